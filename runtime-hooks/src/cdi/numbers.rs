//! What a device node is to the kernel.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use nix::sys::stat::{major, minor};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceType};

use super::specification::DeviceNode;

/// Kind and numbers of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbers {
    /// `b`, `c` or `p`.
    pub(super) kind: char,
    /// 0 for a FIFO.
    pub(super) major: i64,
    /// 0 for a FIFO.
    pub(super) minor: i64,
}

impl Numbers {
    /// Of a node that a CDI specification gives; what it leaves open is as on this host.
    pub(super) fn of_host(node: &DeviceNode) -> Result<Self, String> {
        let kind = match node.kind.as_str() {
            "u" => Some('c'),
            kind => kind.chars().next(),
        };
        match kind {
            Some('p') => return Ok(Self { kind: 'p', major: 0, minor: 0 }),
            Some(kind) if node.major != 0 => {
                return Ok(Self { kind, major: node.major.into(), minor: node.minor.into() });
            }
            _ => {}
        }
        let path = if node.host_path.is_empty() { &node.path } else { &node.host_path };
        let found = Self::at(Path::new(path))?;
        match kind {
            Some(kind) if kind != found.kind => {
                Err(format!("{path} is of type {} and not {kind}", found.kind))
            }
            _ => Ok(found),
        }
    }

    /// Of a node on this host. A link to one is none: nobody would see where it leads.
    pub(super) fn at(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let found = path.symlink_metadata().map_err(|error| format!("{shown}: {error}"))?;
        let kind = found.file_type();
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let (major, minor) = (number(major(found.rdev())), number(minor(found.rdev())));
        if kind.is_char_device() {
            Ok(Self { kind: 'c', major, minor })
        } else if kind.is_block_device() {
            Ok(Self { kind: 'b', major, minor })
        } else if kind.is_fifo() {
            Ok(Self { kind: 'p', major: 0, minor: 0 })
        } else {
            Err(format!("{shown} is no device"))
        }
    }

    /// Of a node in config.json.
    pub(super) fn of_spec(device: &LinuxDevice) -> Self {
        let kind = match device.typ() {
            LinuxDeviceType::B => 'b',
            LinuxDeviceType::P => return Self { kind: 'p', major: 0, minor: 0 },
            _ => 'c',
        };
        Self { kind, major: device.major(), minor: device.minor() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(path: &str, kind: &str, major: u32) -> DeviceNode {
        let (path, kind) = (path.to_owned(), kind.to_owned());
        DeviceNode {
            path,
            host_path: String::new(),
            kind,
            major,
            minor: 0,
            file_mode: None,
            permissions: String::new(),
            uid: None,
            gid: None,
        }
    }

    #[test]
    fn what_is_left_open_is_as_on_the_host() {
        let null = Numbers { kind: 'c', major: 1, minor: 3 };
        assert_eq!(Numbers::of_host(&node("/dev/null", "", 0)), Ok(null));
        assert_eq!(Numbers::of_host(&node("/dev/null", "u", 0)), Ok(null));
        let elsewhere = DeviceNode { host_path: "/dev/null".into(), ..node("/dev/none", "c", 0) };
        assert_eq!(Numbers::of_host(&elsewhere), Ok(null));
        let told = Numbers { kind: 'c', major: 9, minor: 0 };
        assert_eq!(Numbers::of_host(&node("/dev/none", "c", 9)), Ok(told));
        assert!(Numbers::of_host(&node("/dev/null", "b", 0)).unwrap_err().contains("not b"));
        assert!(Numbers::of_host(&node("/dev/none", "c", 0)).unwrap_err().contains("/dev/none"));
    }

    #[test]
    fn a_link_or_a_file_is_no_device() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert!(Numbers::at(&link).unwrap_err().contains("is no device"));
        assert!(Numbers::at(directory.path()).unwrap_err().contains("is no device"));
    }
}
