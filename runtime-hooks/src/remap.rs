//! Which GPU of this host takes the place of which.
//!
//! Driver 580 and later restore a process on other GPUs than those that it was checkpointed on. The list
//! of pairs has to name every GPU that the process could see by its device nodes, used or not, and the
//! new one has to be the same chip (measured on two H200; the chip is NVIDIA's word). A container sees
//! what its config.json gives it; nothing else is offered to the driver.

use std::collections::BTreeSet;
use std::ops::Deref;

use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};

use crate::cdi::node_of_card;
use crate::cuda::{Gpu, GpuUse};

/// The first branch of the driver that restores on another GPU.
pub const FIRST_BRANCH: u32 = 580;

/// A GPU of which a container has the device node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// Its node in the container.
    pub path: String,
    /// UUID.
    pub uuid: String,
    /// Product, such as `NVIDIA H200`; empty if it is not known.
    pub name: String,
}

impl From<&Gpu> for Card {
    fn from(gpu: &Gpu) -> Self {
        let path = gpu.minor.map(|minor| format!("/dev/nvidia{minor}")).unwrap_or_default();
        Self { path, uuid: gpu.uuid.clone(), name: gpu.name.clone() }
    }
}

/// Pairs of UUIDs, from where to where. Empty: all goes back to where it was.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceMap(Vec<(String, String)>);

impl DeviceMap {
    /// All goes back to where it was.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What a process uses, in its new place.
    #[must_use]
    pub fn place(&self, uses: &GpuUse) -> GpuUse {
        let to = |uuid: &String| {
            let pair = self.0.iter().find(|(from, _)| from == uuid);
            pair.map_or_else(|| uuid.clone(), |(_, to)| to.clone())
        };
        GpuUse { gpus: uses.gpus.iter().map(|(uuid, bytes)| (to(uuid), *bytes)).collect() }
    }
}

impl Deref for DeviceMap {
    type Target = [(String, String)];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl FromIterator<(String, String)> for DeviceMap {
    fn from_iter<T: IntoIterator<Item = (String, String)>>(pairs: T) -> Self {
        Self(pairs.into_iter().collect())
    }
}

/// The GPUs of this host of which a container has the nodes, by its config.json. Under whatever name: a
/// node is known by its numbers.
#[must_use]
pub fn cards(spec: &Spec, host: &[Gpu]) -> Vec<Card> {
    crate::spec::gpu_devices(spec)
        .into_iter()
        .filter_map(|path| {
            let gpu = host
                .iter()
                .find(|gpu| gpu.minor.is_some_and(|minor| node_of_card(spec, &path, minor)))?;
            Some(Card { path, uuid: gpu.uuid.clone(), name: gpu.name.clone() })
        })
        .collect()
}

/// Where processes go that could see `old`, in a container that has `new`. `asked` are the pairs that
/// somebody has chosen; the rest stays where it is if it can, and goes to what is left otherwise.
pub fn plan(old: &[Card], new: &[Card], asked: &DeviceMap) -> Result<DeviceMap, String> {
    let mut free: Vec<&Card> = new.iter().collect();
    let mut map: Vec<(&Card, &Card)> = Vec::new();
    let mut left: Vec<&Card> = old.iter().collect();
    for (from, to) in asked.iter() {
        let Some(at) = left.iter().position(|card| card.uuid == *from) else {
            return Err(format!(
                "GPU {from} is to be replaced, and the processes saw {}",
                uuids(old.iter())
            ));
        };
        let Some(free_at) = free.iter().position(|card| card.uuid == *to) else {
            return Err(format!(
                "GPU {to} is to take the place of {from}, and the container has {}",
                uuids(new.iter())
            ));
        };
        let (from, to) = (left.remove(at), free.remove(free_at));
        same_chip(from, to)?;
        map.push((from, to));
    }
    // Those that can stay do, before others are looked for.
    left.retain(|from| match free.iter().position(|to| to.uuid == from.uuid) {
        Some(at) => {
            map.push((from, free.remove(at)));
            false
        }
        None => true,
    });
    for from in left {
        let fits = |to: &&Card| same_chip(from, to).is_ok();
        let Some(at) = free.iter().position(fits) else {
            return Err(match free.first() {
                Some(other) => same_chip(from, other).err().unwrap_or_default(),
                None => format!(
                    "it could see {} ({}), and the container has {}",
                    count(old.len()),
                    uuids(old.iter()),
                    if new.is_empty() { "none".to_owned() } else { uuids(new.iter()) }
                ),
            });
        };
        map.push((from, free.remove(at)));
    }
    if map.iter().all(|(from, to)| from.uuid == to.uuid) {
        return Ok(DeviceMap::new());
    }
    Ok(map.into_iter().map(|(from, to)| (from.uuid.clone(), to.uuid.clone())).collect())
}

fn same_chip(from: &Card, to: &Card) -> Result<(), String> {
    if from.name == to.name || from.name.is_empty() || to.name.is_empty() {
        return Ok(());
    }
    Err(format!(
        "GPU {} is of the product {}, and {} of {}: the driver restores on the same chip only",
        from.uuid, from.name, to.uuid, to.name
    ))
}

fn count(gpus: usize) -> String {
    if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") }
}

fn uuids<'a>(cards: impl Iterator<Item = &'a Card>) -> String {
    let list: Vec<&str> = cards.map(|card| card.uuid.as_str()).collect();
    if list.is_empty() { "none".to_owned() } else { list.join(", ") }
}

/// Reads `OLD=NEW,…` as people write it. Each may be a UUID, the beginning of one, or its number in the
/// list of `host`, as nvidia-smi numbers them. `old` may also be a GPU that this host does not have, by
/// its whole UUID.
pub fn parse(text: &str, host: &[Gpu]) -> Result<DeviceMap, String> {
    let mut map = Vec::new();
    for pair in text.split(',') {
        let Some((old, new)) = pair.split_once('=') else {
            return Err(format!("'{}' is not OLD=NEW", stasis_config::text::printable(pair, 128)));
        };
        let (old, new) = (old.trim(), new.trim());
        let from = gpu(old, host)
            .or_else(|why| if is_uuid(old) { Ok(old.to_owned()) } else { Err(why) })?;
        map.push((from, gpu(new, host)?));
    }
    for side in [|pair: &(String, String)| pair.0.clone(), |pair: &(String, String)| pair.1.clone()]
    {
        let distinct: BTreeSet<String> = map.iter().map(side).collect();
        if distinct.len() != map.len() {
            return Err("a GPU stands in it twice".to_owned());
        }
    }
    Ok(DeviceMap(map))
}

/// A GPU of this host, as people name it.
pub fn gpu(name: &str, host: &[Gpu]) -> Result<String, String> {
    let shown = stasis_config::text::printable(name, 64);
    if let Ok(index) = name.parse::<u32>() {
        let found = host.iter().find(|gpu| gpu.index == index).map(|gpu| gpu.uuid.clone());
        return found.ok_or_else(|| format!("this host has no GPU number {index}"));
    }
    let fitting: Vec<&Gpu> = host
        .iter()
        .filter(|gpu| !name.is_empty() && gpu.uuid.to_lowercase().starts_with(&name.to_lowercase()))
        .collect();
    match fitting.as_slice() {
        [one] => Ok(one.uuid.clone()),
        [] => Err(format!("this host has no GPU '{shown}'")),
        _ => Err(format!("'{shown}' may be several GPUs of this host: give more of the UUID")),
    }
}

/// `GPU-` and five groups of hexadecimal digits.
#[must_use]
pub fn is_uuid(text: &str) -> bool {
    bytes(text).is_some()
}

/// The 16 bytes of a UUID.
#[must_use]
pub fn bytes(uuid: &str) -> Option<[u8; 16]> {
    let groups: Vec<&str> = uuid.strip_prefix("GPU-")?.split('-').collect();
    if groups.iter().map(|group| group.len()).ne([8, 4, 4, 4, 12]) {
        return None;
    }
    let digits = groups.concat();
    let mut bytes = [0; 16];
    for (at, byte) in bytes.iter_mut().enumerate() {
        let pair = digits.get(2 * at..2 * at + 2)?;
        if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "GPU-0a000000-0000-0000-0000-00000000000a";
    const B: &str = "GPU-0b000000-0000-0000-0000-00000000000b";
    const C: &str = "GPU-0c000000-0000-0000-0000-00000000000c";

    fn card(uuid: &str, name: &str) -> Card {
        Card { path: format!("/dev/{uuid}"), uuid: uuid.into(), name: name.into() }
    }

    fn planned(old: &[&str], new: &[&str], asked: &[(&str, &str)]) -> Result<DeviceMap, String> {
        let cards = |list: &[&str]| list.iter().map(|uuid| card(uuid, "H200")).collect::<Vec<_>>();
        let asked = asked.iter().map(|(old, new)| ((*old).into(), (*new).into())).collect();
        plan(&cards(old), &cards(new), &asked)
    }

    fn pairs(list: &[(&str, &str)]) -> DeviceMap {
        list.iter().map(|(old, new)| ((*old).into(), (*new).into())).collect()
    }

    #[test]
    fn what_can_stay_stays_and_then_no_list_is_given() {
        assert_eq!(planned(&[A], &[A], &[]).unwrap(), pairs(&[]));
        assert_eq!(planned(&[A, B], &[B, A], &[]).unwrap(), pairs(&[]));
        assert_eq!(planned(&[A], &[A, B], &[]).unwrap(), pairs(&[]));
        assert_eq!(planned(&[A], &[A], &[(A, A)]).unwrap(), pairs(&[]));
    }

    #[test]
    fn every_gpu_that_was_seen_is_listed() {
        assert_eq!(planned(&[A], &[B], &[]).unwrap(), pairs(&[(A, B)]));
        // B stays, and is named all the same.
        assert_eq!(planned(&[A, B], &[B, C], &[]).unwrap(), pairs(&[(B, B), (A, C)]));
        // Asked for: the other one has to make room.
        assert_eq!(planned(&[A, B], &[A, B], &[(A, B)]).unwrap(), pairs(&[(A, B), (B, A)]));
        assert_eq!(planned(&[A, B], &[A, B, C], &[(A, C)]).unwrap(), pairs(&[(A, C), (B, B)]));
    }

    #[test]
    fn what_cannot_be_is_told() {
        for (old, new, asked, expected) in [
            (&[A, B][..], &[C][..], &[][..], "could see 2 GPUs"),
            (&[A], &[], &[], "the container has none"),
            (&[A], &[A], &[(A, B)], "and the container has GPU-0a"),
            (&[A], &[B], &[(C, B)], "the processes saw GPU-0a"),
        ] {
            let said = planned(old, new, asked).unwrap_err();
            assert!(said.contains(expected), "{said}");
        }
        let said = plan(&[card(A, "H200")], &[card(B, "A100")], &DeviceMap::new()).unwrap_err();
        assert!(said.contains("product H200") && said.contains("same chip"), "{said}");
        let other = [card(B, "A100"), card(C, "H200")];
        let map = plan(&[card(A, "H200")], &other, &DeviceMap::new()).unwrap();
        assert_eq!(map, pairs(&[(A, C)]));
        let asked = pairs(&[(A, B)]);
        assert!(plan(&[card(A, "H200")], &other, &asked).unwrap_err().contains("same chip"));
    }

    #[test]
    fn people_name_gpus_by_number_or_beginning() {
        let host: Vec<Gpu> = [A, B]
            .iter()
            .zip(0..)
            .map(|(uuid, index)| Gpu {
                index,
                uuid: (*uuid).into(),
                name: "H200".into(),
                memory_bytes: 1,
                minor: None,
            })
            .collect();
        assert_eq!(gpu("1", &host).unwrap(), B);
        // Number 0 does not answer.
        assert_eq!(gpu("1", &host[1..]).unwrap(), B);
        assert!(gpu("0", &host[1..]).unwrap_err().contains("no GPU number 0"));
        assert_eq!(gpu("gpu-0A", &host).unwrap(), A);
        assert_eq!(gpu(B, &host).unwrap(), B);
        for (name, expected) in
            [("2", "number 2"), ("GPU-0", "several"), ("GPU-1", "no GPU"), ("", "no GPU")]
        {
            let said = gpu(name, &host).unwrap_err();
            assert!(said.contains(expected), "{name}: {said}");
        }
        assert_eq!(parse("0=1, 1=0", &host).unwrap(), pairs(&[(A, B), (B, A)]));
        assert_eq!(parse(&format!("{C}=0"), &host).unwrap(), pairs(&[(C, A)]));
        for text in ["", "0", "0=1,0=1", "0=1,1=1", "GPU-0c=0", "0=9", &format!("0={C}")] {
            assert!(parse(text, &host).is_err(), "{text}");
        }
    }

    #[test]
    fn memory_is_needed_in_the_new_place() {
        let uses = GpuUse { gpus: vec![(A.into(), Some(7)), (C.into(), None)] };
        let placed = pairs(&[(A, B), (B, A)]).place(&uses);
        assert_eq!(placed.gpus, [(B.to_owned(), Some(7)), (C.to_owned(), None)]);
    }

    #[test]
    fn a_uuid_is_sixteen_bytes() {
        let found = bytes("GPU-d4e0b26e-0ed4-0e46-4c53-f162bfbca063").unwrap();
        assert_eq!(found[..4], [0xd4, 0xe0, 0xb2, 0x6e]);
        assert_eq!(found[15], 0x63);
        for text in [
            "",
            "GPU-",
            "d4e0b26e-0ed4-0e46-4c53-f162bfbca063",
            "GPU-d4e0b26e-0ed4-0e46-4c53-f162bfbca06",
            "GPU-d4e0b26e0-ed4-0e46-4c53-f162bfbca063",
            "GPU-+4e0b26e-0ed4-0e46-4c53-f162bfbca063",
            "MIG-d4e0b26e-0ed4-0e46-4c53-f162bfbca063",
        ] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }
}
