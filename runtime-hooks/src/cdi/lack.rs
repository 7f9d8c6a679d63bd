//! What an image needs of a GPU and a config.json does not give, or not so that it works here.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::{LinuxDevice, Mount, Spec};
use stasis_config::Manifest;

use super::numbers::Numbers;
use crate::spec;

/// What is lacking.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Lack {
    /// Mounts and devices that are not in config.json.
    pub(super) missing: Vec<String>,
    /// Mounts that are, with a source that this host has not.
    pub(super) gone: Vec<(String, PathBuf)>,
    /// Device nodes that are, with other numbers than those of the same name on this host.
    pub(super) stale: Vec<String>,
}

impl Lack {
    /// Compares an image's manifest with the config.json of a bundle.
    pub(super) fn of(manifest: &Manifest, spec: &Spec, bundle: &Path) -> Self {
        let mounts = spec.mounts().as_deref().unwrap_or_default();
        let linux = spec.linux().as_ref();
        let devices = linux.and_then(|linux| linux.devices().as_deref()).unwrap_or_default();
        let given_devices: BTreeSet<String> = spec::gpu_devices(spec).into_iter().collect();
        let mut lack = Self::default();
        for path in &manifest.gpu_mounts {
            match mounts.iter().rfind(|mount| same_path(mount.destination(), Path::new(path))) {
                None => lack.missing.push(path.clone()),
                Some(mount) => {
                    if let Some(source) = missing_source(mount, bundle) {
                        lack.gone.push((path.clone(), source));
                    }
                }
            }
        }
        // Another GPU may take the place of one; whether it can is told later ([`crate::remap`]).
        let known = |path: &&String| !manifest.gpu_devices.contains(*path);
        let mut spare = given_devices.iter().filter(|path| is_gpu(path)).filter(known).count();
        for path in &manifest.gpu_devices {
            let given = devices.iter().find(|device| device.path() == Path::new(path));
            match given.filter(|_| given_devices.contains(path)) {
                None if spare > 0 && manifest.gpu_nodes.iter().any(|node| node.path == *path) => {
                    spare -= 1;
                }
                None => lack.missing.push(path.clone()),
                Some(device) if is_stale(device) => lack.stale.push(path.clone()),
                Some(_) => {}
            }
        }
        lack
    }

    /// Whether nothing is lacking.
    pub(super) fn is_nothing(&self) -> bool {
        self.works() && self.stale.is_empty()
    }

    /// Whether a restore can succeed. A device with other numbers may be what its owner wants:
    /// the second GPU under the name of the first.
    pub(super) fn works(&self) -> bool {
        self.missing.is_empty() && self.gone.is_empty()
    }

    /// The stale ones that no GPU's owner can want so: what all GPUs share.
    pub(super) fn stale_for_all(&self) -> Vec<&str> {
        self.stale.iter().map(String::as_str).filter(|path| !is_gpu(path)).collect()
    }

    /// Whether the mount at this place in the container is missing, or its source is.
    pub(super) fn has_mount(&self, path: &str) -> bool {
        let gone = self.gone.iter().map(|(path, _)| path);
        self.missing
            .iter()
            .chain(gone)
            .any(|lacking| same_path(Path::new(lacking), Path::new(path)))
    }

    /// In words, for an image.
    pub(super) fn words(&self) -> String {
        let mut parts = Vec::new();
        if !self.missing.is_empty() {
            let list = self.missing.join(", ");
            parts.push(format!("{list}, which the new container's config.json does not give"));
        }
        if !self.gone.is_empty() {
            let gone = self.gone.iter();
            let list: Vec<_> =
                gone.map(|(path, source)| format!("{path} from {}", source.display())).collect();
            let list = list.join(", ");
            parts.push(format!("{list}, which config.json mounts and this host has not"));
        }
        format!("its processes use {}", parts.join(", and "))
    }
}

/// Whether it is the node of a GPU, and not what all of them share.
fn is_gpu(path: &str) -> bool {
    let number = path.strip_prefix("/dev/nvidia");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

fn is_stale(device: &LinuxDevice) -> bool {
    Numbers::at(device.path()).is_ok_and(|here| here != Numbers::of_spec(device))
}

/// The source of a bind mount, if it is not there.
pub(super) fn missing_source(mount: &Mount, bundle: &Path) -> Option<PathBuf> {
    let bind = mount.typ().as_deref() == Some("bind")
        || mount.options().iter().flatten().any(|option| option == "bind" || option == "rbind");
    let source = bundle.join(mount.source().as_ref()?);
    (bind && source.metadata().is_err()).then_some(source)
}

/// Whether two paths in a container are the same as they are written.
pub(super) fn same_path(one: &Path, other: &Path) -> bool {
    let parts = |path: &Path| -> Vec<_> {
        let named =
            |part| if let Component::Normal(name) = part { Some(name.to_owned()) } else { None };
        path.components().filter_map(named).collect()
    };
    parts(one) == parts(other)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn manifest(mounts: &[&str], devices: &[&str]) -> Manifest {
        let list = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect();
        Manifest { gpu_mounts: list(mounts), gpu_devices: list(devices), ..Manifest::default() }
    }

    #[test]
    fn each_kind_of_lack_is_found() {
        let spec: Spec = serde_json::from_value(json!({
            "ociVersion": "1.0.2", "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/usr//lib/libcuda.so.1/", "type": "bind", "source": "/bin"},
                {"destination": "/lib/libnvidia-ml.so.1", "source": "/none", "options": ["rbind"]},
                {"destination": "/run/nvidia", "type": "tmpfs", "source": "tmpfs"},
                {"destination": "/relative/nvidia", "type": "bind", "source": "here"},
            ],
            "linux": {"devices": [
                {"path": "/dev/null", "type": "c", "major": 1, "minor": 3},
                {"path": "/dev/nvidia77", "type": "c", "major": 1, "minor": 4},
            ]},
        }))
        .unwrap();
        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(bundle.path().join("here"), "").unwrap();
        let needs = manifest(
            &[
                "/usr/lib/libcuda.so.1",
                "/lib/libnvidia-ml.so.1",
                "/run/nvidia",
                "/relative/nvidia",
                "/etc/shadow",
            ],
            &["/dev/null", "/dev/nvidia77", "/dev/nvidia1"],
        );
        let lack = Lack::of(&needs, &spec, bundle.path());
        // /dev/null is given, and is no GPU's: an image does not get to name it.
        assert_eq!(lack.missing, ["/etc/shadow", "/dev/null", "/dev/nvidia1"]);
        assert_eq!(lack.gone, [("/lib/libnvidia-ml.so.1".to_owned(), PathBuf::from("/none"))]);
        assert!(lack.stale.is_empty() && !lack.works());
        assert_eq!(
            lack.words(),
            "its processes use /etc/shadow, /dev/null, /dev/nvidia1, which the new container's \
             config.json does not give, and /lib/libnvidia-ml.so.1 from /none, which config.json \
             mounts and this host has not"
        );
    }

    #[test]
    fn another_gpu_may_take_the_place_of_one() {
        let with = |devices: &[&str]| {
            let devices: Vec<_> = devices
                .iter()
                .map(|path| json!({"path": path, "type": "c", "major": 1, "minor": 3}))
                .collect();
            let text = json!({
                "ociVersion": "1.0.2", "root": {"path": "rootfs"}, "linux": {"devices": devices},
            });
            serde_json::from_value::<Spec>(text).unwrap()
        };
        let node =
            |path: &str| stasis_config::manifest::GpuNode { path: path.into(), uuid: "GPU".into() };
        let mut needs = manifest(&[], &["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]);
        needs.gpu_nodes = vec![node("/dev/nvidia0"), node("/dev/nvidia1")];
        let missing = |devices: &[&str]| Lack::of(&needs, &with(devices), Path::new("/")).missing;
        assert!(missing(&["/dev/nvidia2", "/dev/nvidia3", "/dev/nvidiactl"]).is_empty());
        assert!(missing(&["/dev/nvidia1", "/dev/nvidia7", "/dev/nvidiactl"]).is_empty());
        assert_eq!(missing(&["/dev/nvidia1", "/dev/nvidiactl"]), ["/dev/nvidia0"]);
        assert_eq!(missing(&["/dev/nvidia5", "/dev/nvidiactl"]), ["/dev/nvidia1"]);
        // What all share is no GPU.
        let uvm = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia-uvm"];
        assert_eq!(missing(&uvm), ["/dev/nvidiactl"]);
        // Which GPU it was is not known: by its name then.
        needs.gpu_nodes.remove(1);
        let missing =
            Lack::of(&needs, &with(&["/dev/nvidia2", "/dev/nvidiactl"]), Path::new("/")).missing;
        assert_eq!(missing, ["/dev/nvidia1"]);
    }

    #[test]
    fn a_device_with_other_numbers_than_the_hosts_is_noticed() {
        let device = |minor| {
            let text = json!({"path": "/dev/null", "type": "c", "major": 1, "minor": minor});
            serde_json::from_value::<LinuxDevice>(text).unwrap()
        };
        assert!(is_stale(&device(4)) && !is_stale(&device(3)));
    }
}
