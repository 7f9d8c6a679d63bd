//! Which CDI devices a container may have: those that its own config.json asks for.
//!
//! There are two ways to ask:
//!
//! - by the device nodes: who has a GPU's nodes may have its libraries;
//! - by `NVIDIA_VISIBLE_DEVICES` or an annotation `cdi.k8s.io/*`, where these give GPUs on this host,
//!   that is where NVIDIA's runtime reads them. Nowhere else: every image with CUDA has the variable,
//!   Podman copies annotations of images, and CRI those of a checkpoint's archive.

use std::collections::BTreeMap;

use oci_spec::runtime::{LinuxDevice, Spec};

use super::name::DeviceName;
use super::numbers::Numbers;
use super::registry::{Found, Registry};

/// What annotations that name CDI devices begin with.
const ANNOTATION: &str = "cdi.k8s.io/";

/// The variable of NVIDIA's runtime.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// More devices than this are asked for by mistake; the rest of a list is not read.
const MAX_DEVICES: usize = 1024;

/// How much of a device a container may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Right {
    /// It asks for the device by name: all of it.
    Whole,
    /// It has the device's own nodes: the mounts, and the true numbers of the nodes that it names.
    Mounts,
}

/// A device that the container may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entitled<'a> {
    /// The device.
    pub(super) found: Found<'a>,
    /// How much of it.
    pub(super) right: Right,
}

/// What a container may have, and what it asks for in vain.
#[derive(Debug, Default)]
pub(super) struct Claims<'a> {
    /// In the order of their names.
    pub(super) entitled: Vec<Entitled<'a>>,
    /// Why something that is asked for cannot be had.
    pub(super) in_vain: Vec<String>,
}

impl<'a> Claims<'a> {
    /// Reads them out of the new container's config.json.
    pub(super) fn of(spec: &Spec, registry: &'a Registry, visible_devices: bool) -> Self {
        let mut claims = Self::default();
        for (name, from) in asked(spec, visible_devices, &mut claims.in_vain) {
            match registry.device(&name) {
                Ok(found) => claims.entitled.push(Entitled { found, right: Right::Whole }),
                Err(reason) => claims.in_vain.push(format!("{from} asks for {name}, but {reason}")),
            }
        }
        let linux = spec.linux().as_ref();
        let given = linux.and_then(|linux| linux.devices().as_deref()).unwrap_or_default();
        for found in registry.devices() {
            let known =
                claims.entitled.iter().any(|known| std::ptr::eq(known.found.device, found.device));
            if !known && has_own_nodes(found, given) {
                claims.entitled.push(Entitled { found, right: Right::Mounts });
            }
        }
        claims
    }
}

/// Whether a container that is given these nodes has all that is the device's alone. By numbers,
/// since they are what the kernel goes by: a node called nvidia0 may be any GPU.
fn has_own_nodes(found: Found<'_>, given: &[LinuxDevice]) -> bool {
    let shared = &found.specification.edits.device_nodes;
    let own = &found.device.container_edits.device_nodes;
    own.iter().any(|node| !shared.iter().any(|other| other.path == node.path))
        && own.iter().all(|node| {
            Numbers::of_host(node)
                .is_ok_and(|numbers| given.iter().any(|device| Numbers::of_spec(device) == numbers))
        })
}

/// The devices that are asked for by name, each with where.
fn asked(
    spec: &Spec,
    visible_devices: bool,
    in_vain: &mut Vec<String>,
) -> BTreeMap<DeviceName, String> {
    let mut asked = BTreeMap::new();
    if !visible_devices {
        return asked;
    }
    let mut ask = |name: Result<DeviceName, String>, from: String| match name {
        Ok(name) if asked.len() < MAX_DEVICES => {
            asked.entry(name).or_insert(from);
        }
        // The first few say enough.
        Err(reason) if in_vain.len() < 3 => in_vain.push(format!("{from}: {reason}")),
        Ok(_) | Err(_) => {}
    };
    let annotations = spec.annotations().iter().flatten();
    // Sorted: the same container gets the same error each time.
    let annotations: BTreeMap<_, _> =
        annotations.filter(|(key, _)| key.starts_with(ANNOTATION)).collect();
    for (key, value) in annotations {
        let from = format!("annotation {}", stasis_config::text::printable(key, 64));
        for name in value.split(',').take(MAX_DEVICES) {
            ask(name.trim().parse(), from.clone());
        }
    }
    let visible = variable(spec).into_iter().flat_map(|value| value.split(',')).take(MAX_DEVICES);
    for name in visible.map(str::trim) {
        // Also in a list, as NVIDIA's runtime takes them.
        if matches!(name, "" | "none" | "void") {
            continue;
        }
        let name =
            if name.contains(['=', '/']) { name.parse() } else { DeviceName::of_nvidia(name) };
        ask(name, VISIBLE_DEVICES.to_owned());
    }
    asked
}

/// Of several, the last counts.
fn variable(spec: &Spec) -> Option<&str> {
    let environment = spec.process().as_ref()?.env().as_ref()?;
    environment.iter().rev().find_map(|line| line.strip_prefix(VISIBLE_DEVICES)?.strip_prefix('='))
}

/// For an error: the three ways to ask.
pub(super) fn ways(visible_devices: bool) -> String {
    let counts = if visible_devices {
        ""
    } else {
        " (these two count with runtime.path = \"nvidia-container-runtime\" or \
         cdi.visible-devices = true in config.toml)"
    };
    format!(
        "create the container with the same GPU options as the one that was checkpointed, or have \
         the GPU's CDI device of this host complete it: give the container the GPU's own device \
         nodes, or name it in NVIDIA_VISIBLE_DEVICES of its environment or in an annotation \
         cdi.k8s.io/NAME = nvidia.com/gpu=0{counts}"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn registry(specifications: &[Value]) -> Registry {
        let directory = tempfile::tempdir().unwrap();
        for (number, text) in specifications.iter().enumerate() {
            let path = directory.path().join(format!("{number}.json"));
            std::fs::write(path, text.to_string()).unwrap();
        }
        Registry::scan(&[directory.path().to_owned()])
    }

    /// Two GPUs with numbers of their own and one node for both.
    fn two_gpus() -> Registry {
        let gpu = |index: u32| {
            let node = json!({"path": format!("/dev/nvidia{index}"), "type": "c", "major": 195, "minor": index});
            json!({"name": index.to_string(), "containerEdits": {"deviceNodes": [node]}})
        };
        let shared = json!({"path": "/dev/nvidiactl", "type": "c", "major": 195, "minor": 255});
        let fabric = json!({"name": "control", "containerEdits": {"deviceNodes": [shared]}});
        registry(&[json!({
            "cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [gpu(0), gpu(1), fabric],
            "containerEdits": {"deviceNodes": [shared]},
        })])
    }

    fn spec(annotations: &Value, env: &[&str], devices: &[(&str, u32)]) -> Spec {
        let devices: Vec<_> = devices
            .iter()
            .map(|(path, minor)| json!({"path": path, "type": "c", "major": 195, "minor": minor}))
            .collect();
        serde_json::from_value(json!({
            "ociVersion": "1.0.2", "root": {"path": "rootfs"}, "annotations": annotations,
            "process": {"cwd": "/", "env": env, "user": {"uid": 0, "gid": 0}},
            "linux": {"devices": devices},
        }))
        .unwrap()
    }

    fn names(
        spec: &Spec,
        registry: &Registry,
        visible: bool,
    ) -> (Vec<(String, Right)>, Vec<String>) {
        let claims = Claims::of(spec, registry, visible);
        let names = claims.entitled.iter();
        (names.map(|one| (one.found.name().device, one.right)).collect(), claims.in_vain)
    }

    #[test]
    fn annotations_give_whole_devices() {
        let registry = two_gpus();
        let spec = spec(&json!({"cdi.k8s.io/a_b": "nvidia.com/gpu=1, nvidia.com/gpu=0"}), &[], &[]);
        let (given, in_vain) = names(&spec, &registry, true);
        assert_eq!(given, [("0".into(), Right::Whole), ("1".into(), Right::Whole)]);
        assert!(in_vain.is_empty());
        // An image's own, where nobody gives GPUs by it.
        assert!(names(&spec, &registry, false).0.is_empty());
    }

    #[test]
    fn the_variable_counts_where_it_gives_gpus_only() {
        let registry = two_gpus();
        for (env, visible, want) in [
            ("NVIDIA_VISIBLE_DEVICES=0", false, &[][..]),
            ("NVIDIA_VISIBLE_DEVICES=0", true, &["0"]),
            ("NVIDIA_VISIBLE_DEVICES=1,nvidia.com/gpu=0", true, &["0", "1"]),
            ("NVIDIA_VISIBLE_DEVICES=void", true, &[]),
            ("NVIDIA_VISIBLE_DEVICES=none", true, &[]),
            ("NVIDIA_VISIBLE_DEVICES=", true, &[]),
            ("NVIDIA_VISIBLE_DEVICES_X=0", true, &[]),
            ("XNVIDIA_VISIBLE_DEVICES=0", true, &[]),
        ] {
            let env = ["NVIDIA_VISIBLE_DEVICES=1", "A=b", env];
            let env =
                if env[2].starts_with("NVIDIA_VISIBLE_DEVICES=") { &env[..] } else { &env[1..] };
            let (found, in_vain) = names(&spec(&json!({}), env, &[]), &registry, visible);
            let found: Vec<_> = found.into_iter().map(|(name, _)| name).collect();
            assert_eq!(found, want, "{env:?}");
            assert!(in_vain.is_empty(), "{in_vain:?}");
        }
    }

    #[test]
    fn own_nodes_give_mounts_by_their_numbers() {
        let registry = two_gpus();
        for (devices, want) in [
            (&[("/dev/nvidia0", 0)][..], &["0"][..]),
            // The second GPU under the name of the first.
            (&[("/dev/nvidia0", 1)], &["1"]),
            (&[("/dev/nvidiactl", 255)], &[]),
            (&[("/dev/nvidia0", 7)], &[]),
            (&[], &[]),
        ] {
            let (found, _) = names(&spec(&json!({}), &[], devices), &registry, true);
            let want: Vec<_> = want.iter().map(|&name| (name.to_owned(), Right::Mounts)).collect();
            assert_eq!(found, want, "{devices:?}");
        }
    }

    #[test]
    fn what_is_asked_for_in_vain_is_told() {
        let registry = two_gpus();
        let hostile = json!({
            "cdi.k8s.io/\u{1b}[2J": "\u{1b}]0;x\u{7}",
            "cdi.k8s.io/x": "../../etc=shadow,nvidia.com/gpu=9",
            "cdi.k8s.io.not/x": "nvidia.com/gpu=0",
        });
        let (found, in_vain) = names(&spec(&hostile, &[], &[]), &registry, true);
        assert!(found.is_empty());
        let text = in_vain.join("; ");
        assert!(!text.chars().any(char::is_control) && text.len() < 2000, "{text}");
        assert!(text.contains("annotation cdi.k8s.io/x asks for nvidia.com/gpu=9, but"), "{text}");
        assert!(text.contains("`../../etc=shadow`") || text.contains("../../etc"), "{text}");
    }

    #[test]
    fn a_large_environment_is_read_quickly_and_answered_shortly() {
        let registry = two_gpus();
        let many: Vec<_> = (2..150_000).map(|number| number.to_string()).collect();
        for value in
            ["x/".repeat(1 << 19), ",".repeat(1 << 20), "0,".repeat(1 << 19), many.join(",")]
        {
            let begun = std::time::Instant::now();
            let line = format!("NVIDIA_VISIBLE_DEVICES={value}");
            let (found, in_vain) = names(&spec(&json!({}), &[&line], &[]), &registry, true);
            assert!(begun.elapsed() < std::time::Duration::from_secs(2), "{:?}", begun.elapsed());
            assert!(found.len() <= 1 && in_vain.len() <= MAX_DEVICES + 3);
            assert!(in_vain.iter().all(|line| line.len() < 1000));
        }
    }
}
