//! One file of this host's CDI specifications.
//!
//! Read as far as a restore needs it: mounts and device nodes. Fields that are not known are left
//! alone, since each version of CDI adds some. Everything that is used is checked, because a file
//! that was broken by accident must not end in a mount at a place that nobody meant.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use stasis_config::text::printable;

use super::name::{check_device, check_kind};
use super::yaml;
use crate::files::read_regular;

/// A larger file is a mistake: one for eight GPUs with all their parts has 200 KiB.
const MAX_BYTES: u64 = 4 << 20;

/// What a file says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Specification {
    /// The file.
    pub(super) path: PathBuf,
    /// `vendor/class` of all its devices.
    pub(super) kind: String,
    /// Its devices, each with what only it needs.
    pub(super) devices: Vec<Device>,
    /// What each of them needs.
    pub(super) edits: Edits,
}

/// As it stands in the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Contents {
    #[serde(deserialize_with = "text")]
    cdi_version: String,
    kind: String,
    devices: Vec<Device>,
    #[serde(default, deserialize_with = "or_default")]
    container_edits: Edits,
}

/// A device.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Device {
    /// Without its kind.
    #[serde(deserialize_with = "text")]
    pub(super) name: String,
    /// What it needs.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) container_edits: Edits,
}

/// What a container with a device needs, as far as a restored one can be given it.
///
/// Not here: `env`, `additionalGIDs` and `intelRdt`, since a restored process keeps what it had,
/// `netDevices`, which a restored network namespace has, and `hooks`. No runtime runs
/// `createContainer` hooks, which are NVIDIA's, for a restore: there is no moment between making
/// the mount namespace and filling it with processes. What they made (links to libraries, the
/// linker's cache) is in the container's own file system and comes back with it.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Edits {
    /// Its mounts.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) mounts: Vec<Mount>,
    /// Its device nodes.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) device_nodes: Vec<DeviceNode>,
}

/// A file or directory of this host.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Mount {
    /// What.
    pub(super) host_path: String,
    /// Where.
    pub(super) container_path: String,
    /// How.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) options: Vec<String>,
    /// `bind` where nothing is said.
    #[serde(default, rename = "type", deserialize_with = "or_default")]
    pub(super) kind: String,
}

/// A device of this host.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeviceNode {
    /// Where it is in the container.
    pub(super) path: String,
    /// Where it is on the host, if elsewhere.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) host_path: String,
    /// `b`, `c`, `u` or `p`; what it is on the host where nothing is said.
    #[serde(default, rename = "type", deserialize_with = "or_default")]
    pub(super) kind: String,
    /// As on the host where nothing is said, or 0, which is how Go writes nothing.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) major: u32,
    /// Goes with `major`.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) minor: u32,
    /// Its permissions.
    pub(super) file_mode: Option<u32>,
    /// Of `rwm`, what the container may do.
    #[serde(default, deserialize_with = "or_default")]
    pub(super) permissions: String,
    /// Its owner.
    pub(super) uid: Option<u32>,
    /// Its group.
    pub(super) gid: Option<u32>,
}

/// Text, also where YAML takes it for a number: `name: 0`.
fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    match Value::deserialize(from)? {
        Value::String(text) => Ok(text),
        Value::Number(number) => Ok(number.to_string()),
        _ => Err(serde::de::Error::custom("expected text")),
    }
}

/// The default for `null`: an empty list is written that way.
fn or_default<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Specification {
    /// Reads a file. The error says what is wrong with it, without its name.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let text = contents(path)?;
        let json = path.extension().is_some_and(|extension| extension == "json");
        let value = if json {
            serde_json::from_str(&text).map_err(|error| error.to_string())
        } else {
            yaml::parse(&text)
        };
        let contents = value
            .and_then(|value| serde_json::from_value(value).map_err(|error| error.to_string()))
            .map_err(|reason| printable(&reason, 256))?;
        let Contents { cdi_version, kind, devices, container_edits: edits } = contents;
        check_version(&cdi_version)?;
        let specification = Self { path: path.to_owned(), kind, devices, edits };
        specification.check().map(|()| specification)
    }

    fn check(&self) -> Result<(), String> {
        check_kind(&self.kind)?;
        self.edits.check()?;
        if self.devices.is_empty() {
            return Err("it has no devices".to_owned());
        }
        let mut names = BTreeSet::new();
        for Device { name, container_edits } in &self.devices {
            check_device(name)?;
            container_edits.check().map_err(|reason| format!("device {name}: {reason}"))?;
            if !names.insert(name) {
                return Err(format!("device {name} stands there twice"));
            }
        }
        Ok(())
    }
}

impl Edits {
    fn check(&self) -> Result<(), String> {
        for mount in &self.mounts {
            check_path("mounts: hostPath", &mount.host_path)?;
            check_path("mounts: containerPath", &mount.container_path)?;
        }
        for node in &self.device_nodes {
            check_path("deviceNodes: path", &node.path)?;
            if !node.host_path.is_empty() {
                check_path("deviceNodes: hostPath", &node.host_path)?;
            }
            let wrong = |field: &str, found: &str| {
                Err(format!("deviceNodes: {field}: `{}` of {}", printable(found, 16), node.path))
            };
            if !matches!(node.kind.as_str(), "" | "b" | "c" | "u" | "p") {
                return wrong("type", &node.kind);
            }
            if node.permissions.len() > 3 || !node.permissions.bytes().all(|c| b"rwm".contains(&c))
            {
                return wrong("permissions", &node.permissions);
            }
        }
        Ok(())
    }
}

fn check_version(version: &str) -> Result<(), String> {
    match version.trim_start_matches('v').split('.').next() {
        Some("0" | "1") => Ok(()),
        _ => Err(format!("cdiVersion {} is not known", printable(version, 32))),
    }
}

/// Absolute, of this world, and not the whole of it.
fn check_path(field: &str, path: &str) -> Result<(), String> {
    let good = path.starts_with('/')
        && path.len() <= 4096
        && !path.chars().any(char::is_control)
        && Path::new(path).components().all(|part| part != Component::ParentDir)
        && Path::new(path).components().count() > 1;
    if good {
        return Ok(());
    }
    Err(format!("{field}: expected an absolute path without `..`, found `{}`", printable(path, 64)))
}

fn contents(path: &Path) -> Result<String, String> {
    let bytes = read_regular(path, MAX_BYTES).map_err(|error| error.to_string())?;
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(name: &str, text: &str) -> Result<Specification, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        Specification::read(&path)
    }

    const YAML: &str = "\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
annotations:
  made: by hand
devices:
- name: 0
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      hostPath: /host/dev/nvidia0
      type: c
      major: 195
      fileMode: 0666
      permissions: rw
      uid: 7
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
  mounts:
  - hostPath: /usr/lib/libcuda.so.580.1
    containerPath: /usr/lib/libcuda.so.580.1
    options: [ro, nosuid, nodev, rbind]
  deviceNodes: ~
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
";

    #[test]
    fn what_a_restore_needs_is_read() {
        let found = read("a.yaml", YAML).unwrap();
        assert_eq!(found.kind, "nvidia.com/gpu");
        let [device] = &found.devices[..] else { panic!("{found:?}") };
        assert_eq!(device.name, "0");
        let [node] = &device.container_edits.device_nodes[..] else { panic!("{device:?}") };
        assert_eq!((node.path.as_str(), node.major, node.minor), ("/dev/nvidia0", 195, 0));
        assert_eq!((node.file_mode, node.uid, node.gid), (Some(0o666), Some(7), None));
        let [mount] = &found.edits.mounts[..] else { panic!("{found:?}") };
        assert_eq!(mount.container_path, "/usr/lib/libcuda.so.580.1");
        assert_eq!(mount.options, ["ro", "nosuid", "nodev", "rbind"]);
        assert!(found.edits.device_nodes.is_empty());
    }

    #[test]
    fn json_says_the_same() {
        let json = yaml::parse(YAML).unwrap().to_string();
        let (json, yaml) = (read("a.json", &json).unwrap(), read("a.yaml", YAML).unwrap());
        assert_eq!((json.devices, json.edits), (yaml.devices, yaml.edits));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let with = |old: &str, new: &str| {
            assert!(YAML.contains(old), "{old}");
            read("a.yaml", &YAML.replacen(old, new, 1)).unwrap_err()
        };
        for (old, new, says) in [
            ("containerPath: /usr/lib/libcuda.so.580.1", "containerPath: /usr/../etc/shadow", ".."),
            ("containerPath: /usr/lib/libcuda.so.580.1", "containerPath: usr/lib", "absolute"),
            ("containerPath: /usr/lib/libcuda.so.580.1", "containerPath: /", "containerPath"),
            ("containerPath: /usr/lib/libcuda.so.580.1", "containerPath: \"/a\\nb\"", "/a\\nb"),
            ("hostPath: /usr/lib/libcuda.so.580.1", "hostPath: ../libcuda.so", "hostPath"),
            ("path: /dev/nvidia0", "path: dev/nvidia0", "deviceNodes: path"),
            ("/host/dev/nvidia0", "/host/../dev/sda", "deviceNodes: hostPath"),
            ("type: c", "type: d", "type"),
            ("permissions: rw", "permissions: rwx", "permissions"),
            ("major: 195", "major: -1", "u32"),
            ("cdiVersion: 0.5.0", "cdiVersion: 2.0.0", "cdiVersion 2.0.0"),
            ("cdiVersion: 0.5.0\n", "", "cdiVersion"),
            ("kind: nvidia.com/gpu", "kind: nvidia", "vendor/class"),
            ("name: 0", "name: 0/1", "no name"),
            ("name: 0", "name: [0]", "expected text"),
            ("devices:\n- name: 0", "devices:\n- name: 0\n- name: 0", "twice"),
        ] {
            let error = with(old, new);
            assert!(error.contains(says), "{new}: {error}");
            assert!(!error.chars().any(char::is_control), "{error:?}");
        }
        assert!(read("a.json", YAML).is_err());
        assert!(read("a.yaml", "kind: a/b\ncdiVersion: 1.0.0\ndevices: []\n").is_err());
    }

    #[test]
    fn size_and_kind_of_the_file_are_bounded() {
        let padded = format!("{YAML}#{}\n", "x".repeat(4 << 20));
        assert_eq!(read("a.yaml", &padded).unwrap_err(), "it has more than 4194304 bytes");
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(Specification::read(directory.path()).unwrap_err(), "it is not a regular file");
        let fifo = directory.path().join("fifo.yaml");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(Specification::read(&fifo).unwrap_err(), "it is not a regular file");
        fs::write(directory.path().join("b.yaml"), b"\xff").unwrap();
        assert!(Specification::read(&directory.path().join("b.yaml")).is_err());
    }
}
