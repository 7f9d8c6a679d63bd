//! The container's config.json: its annotations, mounts and devices.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use oci_spec::OciSpecError;
use oci_spec::runtime::Spec;
use serde::Deserialize;

use crate::container::unescape;

/// config.json cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Missing, or not what the OCI runtime specification says.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: Box<OciSpecError>,
    },
}

/// Reads the spec of a bundle.
pub fn load(bundle: &Path) -> Result<Spec, SpecError> {
    let path = bundle.join("config.json");
    Spec::load(&path).map_err(|source| SpecError::Read { path, source: Box::new(source) })
}

/// Only the annotations of a bundle's config.json. Empty if it cannot be read: then the runtime
/// says what is wrong with it.
#[must_use]
pub fn annotations(bundle: &Path) -> BTreeMap<String, String> {
    #[derive(Deserialize)]
    struct Annotated {
        #[serde(default)]
        annotations: Option<BTreeMap<String, String>>,
    }
    std::fs::read(bundle.join("config.json"))
        .ok()
        .and_then(|text| serde_json::from_slice::<Annotated>(&text).ok())
        .and_then(|spec| spec.annotations)
        .unwrap_or_default()
}

/// Destinations in the container that look like the driver's: what an image needs to find again.
#[must_use]
pub fn gpu_mounts(spec: &Spec) -> Vec<String> {
    let mounts = spec.mounts().iter().flatten();
    let destinations = mounts.filter_map(|mount| mount.destination().to_str());
    destinations.filter(|path| is_driver_path(path)).map(str::to_owned).collect()
}

/// NVIDIA's device files that the container is given.
#[must_use]
pub fn gpu_devices(spec: &Spec) -> Vec<String> {
    let linux = spec.linux().as_ref();
    let devices = linux.and_then(|linux| linux.devices().as_ref()).into_iter().flatten();
    let mut paths: Vec<String> = devices
        .filter_map(|device| device.path().to_str())
        .filter(|path| path.starts_with("/dev/nvidia"))
        .map(str::to_owned)
        .collect();
    paths.sort_unstable();
    paths.dedup();
    paths
}

/// By its name: NVIDIA's own in most cases, and what NVIDIA's CDI mounts under another. Those are
/// libraries of the driver (libcuda, libcudadebugger, libnvcuvid, libnvoptix, libnvsdm and so on)
/// and what WSL has instead of device nodes.
pub(crate) fn is_driver_path(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    let library = ["libcuda", "libnv", "libdxcore"].iter().any(|start| name.starts_with(start));
    path.contains("nvidia") || (library && name.contains(".so"))
}

/// Mounts of the container that CRIU cannot restore: binds that are not in config.json.
///
/// CRIU knows mounts from outside only by the list that runc makes of config.json. NVIDIA's legacy
/// hook mounts behind its back, and the dump fails with "doesn't have a proper root mount" or
/// "unreachable sharing" after the work is done (runc#4522). Other file systems that the
/// application mounted itself (tmpfs, proc) are CRIU's own business; and so are parts of such a
/// tmpfs in a second place, like the one that NVIDIA's CDI hook puts over
/// /proc/driver/nvidia/params.
#[must_use]
pub fn unknown_binds(spec: &Spec, mountinfo: &str) -> Vec<String> {
    let known = known_destinations(spec);
    let own = own_tmpfs(spec, mountinfo);
    mountinfo
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let left: Vec<&str> = left.split(' ').collect();
            let (root, point) = (unescape(left.get(3)?), unescape(left.get(4)?));
            let kind = right.split(' ').next()?;
            // cgroup mounts show a part of the hierarchy; mqueue, devpts and the like are whole.
            let bind = root != "/" && !kind.starts_with("cgroup");
            let known = point == "/"
                || known.contains(point.as_str())
                || own.contains(left.get(2)?)
                || below_bind(spec, &point);
            (bind && !known).then_some(point)
        })
        .collect()
}

/// The device numbers of each tmpfs that is the container's own: seen as a whole in it, and not by a
/// bind of config.json.
fn own_tmpfs<'a>(spec: &Spec, mountinfo: &'a str) -> BTreeSet<&'a str> {
    let is_bound = |point: &str| {
        spec.mounts().iter().flatten().any(|mount| {
            mount.destination() == Path::new(point) && mount.typ().as_deref() != Some("tmpfs")
        })
    };
    let lines = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let (device, root, point) = (*left.get(2)?, *left.get(3)?, unescape(left.get(4)?));
        let whole = root == "/" && right.starts_with("tmpfs ");
        (whole && !is_bound(&point) && !below_bind(spec, &point)).then_some(device)
    });
    lines.collect()
}

/// What of a container a path belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiesOn {
    /// Its root file system.
    Rootfs,
    /// A tmpfs of its own, which CRIU dumps.
    OwnTmpfs,
    /// Anything else: what is mounted from outside, and what is no place for files.
    Outside,
}

/// What of the container a path belongs to that is no link and has none in it.
#[must_use]
pub fn lies_on(spec: &Spec, mountinfo: &str, path: &str) -> LiesOn {
    let own = own_tmpfs(spec, mountinfo);
    let mut on: Option<(usize, LiesOn)> = None;
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let (Some(device), Some(point)) = (left.get(2), left.get(4)) else { continue };
        let point = unescape(point);
        if !Path::new(path).starts_with(&point) {
            continue;
        }
        let kind = if point == "/" {
            LiesOn::Rootfs
        } else if own.contains(device) && right.starts_with("tmpfs ") {
            LiesOn::OwnTmpfs
        } else {
            LiesOn::Outside
        };
        // Of several at one point the last is seen.
        if on.is_none_or(|(length, _)| point.len() >= length) {
            on = Some((point.len(), kind));
        }
    }
    on.map_or(LiesOn::Outside, |(_, kind)| kind)
}

/// Whether `point` lies below a bind of config.json: a mount that came along with an `rbind`.
fn below_bind(spec: &Spec, point: &str) -> bool {
    spec.mounts().iter().flatten().any(|mount| {
        let recursive = mount.options().iter().flatten().any(|option| option == "rbind");
        recursive && Path::new(point).starts_with(mount.destination())
    })
}

fn known_destinations(spec: &Spec) -> BTreeSet<&str> {
    let linux = spec.linux().as_ref();
    let mounts = spec.mounts().iter().flatten().filter_map(|mount| mount.destination().to_str());
    let devices = linux
        .and_then(|linux| linux.devices().as_ref())
        .into_iter()
        .flatten()
        .filter_map(|device| device.path().to_str());
    let masked = linux.and_then(|linux| linux.masked_paths().as_ref()).into_iter().flatten();
    let readonly = linux.and_then(|linux| linux.readonly_paths().as_ref()).into_iter().flatten();
    // runc binds these itself: the terminal, and with a user namespace the default devices.
    let own = [
        "/dev/console",
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/random",
        "/dev/urandom",
        "/dev/tty",
    ];
    mounts
        .chain(devices)
        .chain(masked.map(String::as_str))
        .chain(readonly.map(String::as_str))
        .chain(own)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        serde_json::from_str(
            r#"{"ociVersion":"1.0.2","root":{"path":"rootfs"},
            "mounts":[
              {"destination":"/proc","type":"proc","source":"proc"},
              {"destination":"/usr/lib/libcuda.so.1","type":"bind","source":"/x","options":["bind"]},
              {"destination":"/data","type":"bind","source":"/y","options":["rbind"]}],
            "linux":{"devices":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0}],
                     "maskedPaths":["/proc/kcore"],"readonlyPaths":["/proc/sys"]}}"#,
        )
        .unwrap()
    }

    const OWN: &str = "\
1 0 0:50 / / rw - overlay overlay rw
2 1 0:51 / /proc rw - proc proc rw
3 2 0:51 /sys /proc/sys ro - proc proc rw
4 2 0:6 /null /proc/kcore rw - devtmpfs udev rw
5 1 254:1 /x /usr/lib/libcuda.so.1 ro - ext4 /dev/vda rw
6 1 254:1 /y /data rw - ext4 /dev/vda rw
7 6 254:1 /z /data/below rw - ext4 /dev/vda rw
8 1 0:60 /default/c1 /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu
9 1 0:61 / /tmp rw - tmpfs tmpfs rw
";

    #[test]
    fn what_config_json_explains_is_known() {
        assert_eq!(unknown_binds(&spec(), OWN), Vec::<String>::new());
    }

    #[test]
    fn the_legacy_hooks_binds_are_told() {
        let hook = "10 1 254:1 /usr/bin/nvidia-smi /usr/bin/nvidia\\040smi ro - ext4 /dev/vda rw\n\
                    11 1 0:6 /nvidiactl /dev/nvidiactl ro - devtmpfs udev rw\n";
        let found = unknown_binds(&spec(), &format!("{OWN}{hook}"));
        assert_eq!(found, ["/usr/bin/nvidia smi", "/dev/nvidiactl"]);
    }

    #[test]
    fn a_part_of_a_tmpfs_is_known_where_the_whole_is_the_containers_own() {
        let hook = "10 1 0:70 / /run/nvidia-ctk-hook/u rw - tmpfs tmpfs rw\n\
                    11 2 0:70 /nvct-params /proc/driver/nvidia/params ro - tmpfs tmpfs rw\n";
        assert_eq!(unknown_binds(&spec(), &format!("{OWN}{hook}")), Vec::<String>::new());
        // The host's /run, of which a directory is bound.
        for whole in
            ["", "10 1 0:70 / /data rw - tmpfs tmpfs rw\n", "10 1 0:70 / /data/x rw - tmpfs t rw\n"]
        {
            let host = format!("{whole}11 1 0:70 /nvidia/socket /run/socket ro - tmpfs tmpfs rw\n");
            assert_eq!(unknown_binds(&spec(), &format!("{OWN}{host}")), ["/run/socket"], "{whole}");
        }
    }

    #[test]
    fn a_path_belongs_to_the_last_mount_above_it() {
        let of = |path| lies_on(&spec(), OWN, path);
        for (path, expected) in [
            ("/job", LiesOn::Rootfs),
            ("/database/job", LiesOn::Rootfs),
            ("/tmp/a/job", LiesOn::OwnTmpfs),
            ("/data/job", LiesOn::Outside),
            ("/data/below/job", LiesOn::Outside),
            ("/usr/lib/libcuda.so.1", LiesOn::Outside),
            ("/proc/job", LiesOn::Outside),
        ] {
            assert_eq!(of(path), expected, "{path}");
        }
        let over = format!("{OWN}12 9 254:1 /z /tmp rw - ext4 /dev/vda rw\n");
        assert_eq!(lies_on(&spec(), &over, "/tmp/job"), LiesOn::Outside);
        assert_eq!(lies_on(&spec(), "", "/job"), LiesOn::Outside);
        let host = format!("{OWN}12 1 0:70 / /run rw - tmpfs tmpfs rw\n");
        assert_eq!(lies_on(&spec(), &host, "/run/job"), LiesOn::OwnTmpfs);
        let bound: Spec = serde_json::from_str(
            r#"{"ociVersion":"1.0.2","mounts":[{"destination":"/run","type":"bind","source":"/run"}]}"#,
        )
        .unwrap();
        assert_eq!(lies_on(&bound, &host, "/run/job"), LiesOn::Outside);
    }

    #[test]
    fn what_an_image_needs_is_named_by_destination() {
        assert_eq!(gpu_mounts(&spec()), ["/usr/lib/libcuda.so.1"]);
        assert_eq!(gpu_devices(&spec()), ["/dev/nvidia0"]);
    }

    #[test]
    fn what_nvidias_cdi_mounts_is_known_by_name() {
        for path in [
            "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
            "/usr/lib/x86_64-linux-gnu/libcudadebugger.so.580.159.04",
            "/usr/lib/x86_64-linux-gnu/libnvcuvid.so.580.159.04",
            "/usr/lib/x86_64-linux-gnu/libnvoptix.so.580.159.04",
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
            "/usr/lib/x86_64-linux-gnu/libEGL_nvidia.so.580.159.04",
            "/usr/bin/nvidia-smi",
            "/run/nvidia-persistenced/socket",
            "/lib/firmware/nvidia/580.159.04/gsp_ga10x.bin",
        ] {
            assert!(is_driver_path(path), "{path}");
        }
        for path in ["/data/libnvme", "/etc/hosts", "/usr/lib/libcurl.so.4", "/models/cuda"] {
            assert!(!is_driver_path(path), "{path}");
        }
    }

    #[test]
    fn annotations_of_an_unreadable_bundle_are_none() {
        let bundle = tempfile::tempdir().unwrap();
        assert!(annotations(bundle.path()).is_empty());
        std::fs::write(bundle.path().join("config.json"), r#"{"annotations":{"a":"b"}}"#).unwrap();
        assert_eq!(annotations(bundle.path())["a"], "b");
    }
}
