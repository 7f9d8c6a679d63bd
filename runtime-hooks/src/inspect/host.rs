//! Whether this host has what a restore of an image needs.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use stasis_config::text::printable;

use super::{NeededGpu, Needs, VisibleGpu};
use crate::checkpoint::require_actions;
use crate::cuda::{Driver, DriverError, DriverFacts, Gpu, GpuUse};
use crate::remap::{self, Card, DeviceMap, FIRST_BRANCH as REMAP};

/// Names from the image in sentences.
const LONGEST: usize = 160;

/// What is asked of the driver of this host.
pub trait HostDriver {
    /// What it is.
    ///
    /// # Errors
    /// If there is none, or it does not answer.
    fn facts(&mut self) -> Result<DriverFacts, DriverError>;

    /// Free bytes of each GPU, by UUID; none without NVML.
    fn free_memory(&mut self) -> Option<BTreeMap<String, u64>>;
}

impl<D: Driver> HostDriver for D {
    fn facts(&mut self) -> Result<DriverFacts, DriverError> {
        Driver::facts(self)
    }

    fn free_memory(&mut self) -> Option<BTreeMap<String, u64>> {
        Driver::free_memory(self)
    }
}

/// What this host can do with an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Host {
    /// Nothing that is known stands in the way.
    pub can_restore: bool,
    /// Why not, a sentence each.
    pub problems: Vec<String>,
    /// The library of the driver; none without one, or if no driver is needed.
    pub libcuda: Option<String>,
    /// The version of the driver, where NVML tells it.
    pub driver: Option<String>,
    /// The image's memory goes to other GPUs than those that it came from.
    pub needs_device_map: bool,
    /// Where the memory of each GPU goes; empty where NVML lists no GPUs.
    pub gpus: Vec<Target>,
}

/// Where the memory of a GPU goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Target {
    /// The image's GPU.
    pub uuid: String,
    /// That of this host; none if there is none for it.
    pub target: Option<String>,
    /// What is free on it at the moment, if known.
    pub free_bytes: Option<u64>,
    /// What the image needs of it, if known.
    pub needed_bytes: Option<u64>,
}

impl Target {
    /// There is no room on it at the moment.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.free_bytes.zip(self.needed_bytes).is_some_and(|(free, needed)| free < needed)
    }
}

/// Compares what a restore needs with this host. Its driver is asked only about an image that needs
/// one.
pub fn judge(needs: &Needs, is_whole: bool, driver: &mut dyn HostDriver) -> Host {
    let mut host = Host::default();
    if !is_whole {
        host.problems.push("the image is not whole".to_owned());
    }
    if needs.processes > 0 {
        match driver.facts() {
            Ok(facts) => compare(needs, &facts, driver, &mut host),
            Err(error) => host.problems.push(format!("its driver cannot be used: {error}")),
        }
    }
    for problem in &mut host.problems {
        *problem = printable(problem, 1000);
    }
    host.can_restore = host.problems.is_empty();
    host
}

fn compare(needs: &Needs, facts: &DriverFacts, driver: &mut dyn HostDriver, host: &mut Host) {
    host.libcuda = Some(facts.library.to_string_lossy().into_owned());
    host.driver.clone_from(&facts.driver_version);
    let here = facts.driver_version.as_deref();
    match (needs.driver.as_deref(), here) {
        (Some(made), Some(here)) if made != here => {
            host.problems.push(format!("it was made with driver {made}, and this host has {here}"));
        }
        _ => {
            if let Err(cause) = require_actions(facts) {
                host.problems.push(cause.to_string());
            }
        }
    }
    if facts.gpus.is_empty() {
        return;
    }
    let free = driver.free_memory().unwrap_or_default();
    let uuids = match all_visible(&needs.visible, facts) {
        Some(Ok(map)) => {
            let to = |gpu: &NeededGpu| map.place(&GpuUse { gpus: vec![(gpu.uuid.clone(), None)] });
            needs.gpus.iter().map(|gpu| Ok(to(gpu).gpus.remove(0).0)).collect()
        }
        Some(Err(why)) => {
            host.problems.push(why);
            Vec::new()
        }
        None => targets(&needs.gpus, facts),
    };
    for (needed, target) in needs.gpus.iter().zip(uuids) {
        let target = match target {
            Ok(uuid) => Some(uuid),
            Err(why) => {
                host.problems.push(why);
                None
            }
        };
        host.needs_device_map |= target.as_ref().is_some_and(|uuid| *uuid != needed.uuid);
        let free_bytes = target.as_ref().and_then(|uuid| free.get(uuid).copied());
        let (uuid, needed_bytes) = (needed.uuid.clone(), needed.bytes);
        host.gpus.push(Target { uuid, target, free_bytes, needed_bytes });
    }
}

/// Where all goes in a container that has all GPUs of this host, or why no container of it will do; none
/// if it is not known which GPUs the processes could see.
fn all_visible(visible: &[VisibleGpu], facts: &DriverFacts) -> Option<Result<DeviceMap, String>> {
    if visible.is_empty() {
        return None;
    }
    let card = |gpu: &VisibleGpu| Card {
        path: String::new(),
        uuid: gpu.uuid.clone(),
        name: gpu.name.clone().unwrap_or_default(),
    };
    let old: Vec<Card> = visible.iter().map(card).collect();
    let here: Vec<Card> = facts.gpus.iter().map(Card::from).collect();
    Some(match remap::plan(&old, &here, &DeviceMap::new()) {
        Ok(map) if !map.is_empty() && facts.branch().is_none_or(|branch| branch < REMAP) => {
            let old: Vec<&str> = old.iter().map(|card| card.uuid.as_str()).collect();
            Err(format!(
                "not all of {} are in this host, and only drivers from {REMAP} on restore onto other GPUs",
                old.join(", ")
            ))
        }
        Ok(map) => Ok(map),
        Err(why) => Err(format!("even with all GPUs of this host in the container: {why}")),
    })
}

/// A GPU of this host for each that is needed, or why there is none. No two go to the same.
fn targets(needed: &[NeededGpu], facts: &DriverFacts) -> Vec<Result<String, String>> {
    let is_here = |uuid: &str| facts.gpus.iter().any(|gpu| gpu.uuid == uuid);
    let mut taken: BTreeSet<&str> =
        needed.iter().map(|gpu| gpu.uuid.as_str()).filter(|uuid| is_here(uuid)).collect();
    // Of one product all have the same memory, so that the first that fits is as good as any.
    let mut another = |gpu: &NeededGpu| {
        let fits = |other: &&Gpu| {
            gpu.name.as_deref() == Some(other.name.as_str())
                && gpu.bytes.or(gpu.memory_bytes).is_none_or(|bytes| bytes <= other.memory_bytes)
        };
        let free = facts.gpus.iter().filter(fits).find(|gpu| !taken.contains(gpu.uuid.as_str()))?;
        taken.insert(&free.uuid);
        Some(free.uuid.clone())
    };
    let target = |gpu: &NeededGpu| {
        if is_here(&gpu.uuid) {
            return Ok(gpu.uuid.clone());
        }
        let uuid = printable(&gpu.uuid, LONGEST);
        let Some(name) = gpu.name.as_deref().map(|name| printable(name, LONGEST)) else {
            return Err(format!(
                "{uuid} is not in this host, and of which product it is, is not known"
            ));
        };
        if facts.branch().is_none_or(|branch| branch < REMAP) {
            return Err(format!(
                "{uuid} ({name}) is not in this host, and only drivers from {REMAP} on restore onto \
                 another GPU"
            ));
        }
        another(gpu).ok_or_else(|| {
            format!("{uuid} is not in this host, nor another {name} with room for its memory")
        })
    };
    needed.iter().map(target).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    struct Fake {
        facts: Result<DriverFacts, DriverError>,
        asked: Cell<u32>,
    }

    impl HostDriver for Fake {
        fn facts(&mut self) -> Result<DriverFacts, DriverError> {
            self.asked.set(self.asked.get() + 1);
            self.facts.clone()
        }

        fn free_memory(&mut self) -> Option<BTreeMap<String, u64>> {
            Some(BTreeMap::from([("GPU-0".to_owned(), 5 << 30)]))
        }
    }

    const GIB: u64 = 1 << 30;

    fn gpu(number: u32, name: &str, gib: u64) -> Gpu {
        Gpu {
            index: number,
            uuid: format!("GPU-{number}"),
            name: name.into(),
            memory_bytes: gib << 30,
            minor: None,
        }
    }

    fn facts(version: Option<&str>, gpus: &[Gpu]) -> DriverFacts {
        DriverFacts {
            library: "/usr/lib/libcuda.so.1".into(),
            cuda_version: 13_000,
            driver_version: version.map(str::to_owned),
            gpus: gpus.to_vec(),
            missing: Vec::new(),
            ..DriverFacts::default()
        }
    }

    fn needed(number: u32, name: Option<&str>, bytes: Option<u64>) -> NeededGpu {
        NeededGpu {
            uuid: format!("GPU-{number}"),
            name: name.map(str::to_owned),
            memory_bytes: Some(140 * GIB),
            bytes,
        }
    }

    fn needs(driver: Option<&str>, gpus: &[NeededGpu]) -> Needs {
        Needs {
            driver: driver.map(str::to_owned),
            processes: 1,
            gpus: gpus.to_vec(),
            visible: Vec::new(),
        }
    }

    fn of(needs: &Needs, facts: DriverFacts) -> Host {
        judge(needs, true, &mut Fake { facts: Ok(facts), asked: Cell::new(0) })
    }

    fn problem(host: &Host) -> &str {
        assert!(!host.can_restore && host.problems.len() == 1, "{host:?}");
        &host.problems[0]
    }

    const H200: Option<&str> = Some("NVIDIA H200");

    #[test]
    fn the_host_of_the_checkpoint_can_restore() {
        let needs = needs(Some("570.1"), &[needed(0, H200, Some(GIB))]);
        let host = of(&needs, facts(Some("570.1"), &[gpu(0, "NVIDIA H200", 140)]));
        assert_eq!(
            host,
            Host {
                can_restore: true,
                problems: Vec::new(),
                libcuda: Some("/usr/lib/libcuda.so.1".into()),
                driver: Some("570.1".into()),
                needs_device_map: false,
                gpus: vec![Target {
                    uuid: "GPU-0".into(),
                    target: Some("GPU-0".into()),
                    free_bytes: Some(5 * GIB),
                    needed_bytes: Some(GIB),
                }],
            }
        );
    }

    #[test]
    fn without_a_driver_it_says_so() {
        let mut none = Fake {
            facts: Err(DriverError::NoLibrary("libcuda.so.1 (loader)".into())),
            asked: Cell::new(0),
        };
        let host = judge(&needs(None, &[]), true, &mut none);
        assert_eq!(
            problem(&host),
            "its driver cannot be used: no usable libcuda.so.1: libcuda.so.1 (loader)"
        );
        assert_eq!((host.libcuda, host.driver), (None, None));
    }

    #[test]
    fn an_image_without_cuda_processes_asks_no_driver() {
        let mut none =
            Fake { facts: Err(DriverError::NoLibrary(String::new())), asked: Cell::new(0) };
        let needs = Needs { processes: 0, ..needs(None, &[]) };
        assert!(judge(&needs, true, &mut none).can_restore);
        assert_eq!(problem(&judge(&needs, false, &mut none)), "the image is not whole");
        assert_eq!(none.asked.get(), 0);
    }

    #[test]
    fn another_version_of_the_driver_cannot() {
        let host = of(&needs(Some("580.1"), &[]), facts(Some("580.2"), &[]));
        assert_eq!(problem(&host), "it was made with driver 580.1, and this host has 580.2");
        // Where one of the two is not known there is nothing to compare.
        assert!(of(&needs(None, &[]), facts(Some("580.2"), &[])).can_restore);
        assert!(of(&needs(Some("580.1"), &[]), facts(None, &[])).can_restore);
        let mut old = facts(None, &[]);
        old.missing = vec!["cuCheckpointProcessRestore".into()];
        let host = of(&needs(None, &[]), old);
        assert!(problem(&host).contains("cuCheckpointProcessRestore"), "{host:?}");
        // Which needs NVIDIA's command, and has none.
        let mut without = facts(Some("550.1"), &[]);
        without.missing = vec!["cuCheckpointProcessRestore".into()];
        without.no_utility = Some("cuda-checkpoint was not found".into());
        let host = of(&needs(Some("550.1"), &[]), without);
        assert!(problem(&host).contains("cuda-checkpoint was not found"), "{host:?}");
    }

    #[test]
    fn what_it_could_see_must_be_there() {
        let visible = |number: u32| VisibleGpu {
            uuid: format!("GPU-{number}"),
            name: H200.map(str::to_owned),
        };
        let mut needs = needs(Some("580.1"), &[needed(0, H200, Some(GIB))]);
        needs.visible = vec![visible(0), visible(1)];
        let on = |version, gpus: &[(u32, &str)]| {
            let gpus: Vec<Gpu> =
                gpus.iter().map(|(number, name)| gpu(*number, name, 140)).collect();
            of(&Needs { driver: None, ..needs.clone() }, facts(Some(version), &gpus))
        };
        let h200 = "NVIDIA H200";
        let host = on("580.1", &[(0, h200), (1, h200)]);
        assert!(host.can_restore && !host.needs_device_map, "{host:?}");
        let host = on("580.1", &[(5, h200), (1, h200)]);
        assert!(host.can_restore && host.needs_device_map, "{host:?}");
        assert_eq!(host.gpus[0].target.as_deref(), Some("GPU-5"));
        assert!(problem(&on("580.1", &[(0, h200)])).contains("it could see 2 GPUs (GPU-0, GPU-1)"));
        let other = on("580.1", &[(0, h200), (1, "NVIDIA L4")]);
        assert!(other.can_restore, "the UUID is the same: {other:?}");
        let other = on("580.1", &[(0, h200), (2, "NVIDIA L4")]);
        assert!(problem(&other).contains("the same chip only"), "{other:?}");
        assert!(problem(&on("570.1", &[(0, h200), (2, h200)])).contains("only drivers from 580"));
    }

    #[test]
    fn another_gpu_of_the_product_is_a_target_from_580_on() {
        let needs = |driver| needs(Some(driver), &[needed(0, H200, Some(GIB))]);
        let host = of(
            &needs("580.1"),
            facts(
                Some("580.1"),
                &[gpu(1, "NVIDIA L4", 24), gpu(2, "NVIDIA H200", 140), gpu(3, "NVIDIA H200", 140)],
            ),
        );
        assert!(host.can_restore && host.needs_device_map, "{host:?}");
        assert_eq!(host.gpus[0].target.as_deref(), Some("GPU-2"));
        let host = of(&needs("570.1"), facts(Some("570.1"), &[gpu(2, "NVIDIA H200", 140)]));
        assert_eq!(
            problem(&host),
            "GPU-0 (NVIDIA H200) is not in this host, and only drivers from 580 on restore onto \
             another GPU"
        );
        assert_eq!(host.gpus[0].target, None);
    }

    #[test]
    fn a_target_is_of_the_product_and_has_room() {
        let with = |needed: NeededGpu, there: Gpu| {
            of(&needs(None, &[needed]), facts(Some("580.1"), &[there]))
        };
        for (needed, there, says) in [
            (needed(0, H200, Some(GIB)), gpu(1, "NVIDIA L4", 140), "another NVIDIA H200"),
            (needed(0, H200, Some(41 * GIB)), gpu(1, "NVIDIA H200", 40), "with room"),
            // How much of it was in use is not known, so it may be all.
            (needed(0, H200, None), gpu(1, "NVIDIA H200", 139), "with room"),
            (needed(0, None, Some(GIB)), gpu(1, "NVIDIA H200", 140), "is not known"),
        ] {
            let host = with(needed, there);
            assert!(problem(&host).contains(says), "{host:?}");
        }
        assert!(with(needed(0, H200, None), gpu(1, "NVIDIA H200", 140)).can_restore);
    }

    #[test]
    fn no_two_gpus_go_to_one() {
        let both = needs(None, &[needed(0, H200, None), needed(1, H200, None)]);
        let three = [0, 1, 2].map(|number| gpu(number, "NVIDIA H200", 140));
        let targets = |gpus: &[Gpu]| -> Vec<Option<String>> {
            let host = of(&both, facts(Some("580.1"), gpus));
            host.gpus.into_iter().map(|gpu| gpu.target).collect()
        };
        let uuid = |number| Some(format!("GPU-{number}"));
        assert_eq!(targets(&three), [uuid(0), uuid(1)]);
        // GPU-1 keeps its own.
        assert_eq!(targets(&three[1..]), [uuid(2), uuid(1)]);
        assert_eq!(targets(&three[1..2]), [None, uuid(1)]);
        assert_eq!(targets(&three[2..]), [uuid(2), None]);
    }

    #[test]
    fn names_from_the_image_are_printable() {
        let host = of(
            &needs(Some("1\n2"), &[needed(0, Some("a\u{1b}[2J"), None)]),
            facts(Some("580.1"), &[gpu(1, "NVIDIA H200", 140)]),
        );
        assert_eq!(host.problems.len(), 2);
        assert!(host.problems.iter().all(|said| !said.contains(char::is_control)), "{host:?}");
    }
}
