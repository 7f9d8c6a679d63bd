//! Which container: its init process, bundle and cgroup, as the OCI runtime recorded them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::processes::{Pid, ProcessId, start_time};

/// A container that has a running init process.
#[derive(Debug, Clone)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its init process.
    pub init: ProcessId,
    /// Its bundle: the directory of config.json.
    pub bundle: PathBuf,
    /// Its cgroup for finding and freezing processes.
    pub cgroup: Cgroup,
}

/// A directory in a mounted cgroup hierarchy that has a freezer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroup {
    /// The hierarchy.
    pub version: CgroupVersion,
    /// The directory.
    pub directory: PathBuf,
}

/// Which freezer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CgroupVersion {
    /// `freezer.state` of the v1 freezer hierarchy. On a hybrid host this one is used.
    V1,
    /// `cgroup.freeze`.
    V2,
}

impl CgroupVersion {
    /// The file by which a cgroup is frozen.
    #[must_use]
    pub fn freezer(self) -> &'static str {
        match self {
            Self::V1 => "freezer.state",
            Self::V2 => "cgroup.freeze",
        }
    }
}

/// Why nothing is known of a container.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// The runtime has no such container.
    #[error("no state of container {id} in {}", root.display())]
    NotFound {
        /// The container.
        id: String,
        /// The runtime's root directory.
        root: PathBuf,
    },
    /// The runtime's state file.
    #[error("cannot read the runtime's state {}", path.display())]
    State {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The runtime's state file says something else than expected.
    #[error("cannot make sense of the runtime's state {}", path.display())]
    Format {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// The container has no process.
    #[error("container {0} is not running")]
    NotRunning(String),
    /// /proc says nothing of use.
    #[error("cannot tell the cgroup of pid {pid}: {reason}")]
    Cgroup {
        /// The init process.
        pid: Pid,
        /// What is missing.
        reason: String,
    },
}

/// runc's `state.json`, as far as it is used here (the same names since runc 1.0).
#[derive(Deserialize)]
struct RuncState {
    init_process_pid: Pid,
    init_process_start: u64,
    config: RuncConfig,
    /// By controller; the one of version 2 has no name.
    #[serde(default)]
    cgroup_paths: BTreeMap<String, PathBuf>,
}

#[derive(Deserialize)]
struct RuncConfig {
    #[serde(default)]
    labels: Vec<String>,
}

/// crun's `status`.
#[derive(Deserialize)]
struct CrunStatus {
    pid: Pid,
    /// Not written by old versions.
    #[serde(default, rename = "process-start-time")]
    start_time: u64,
    bundle: PathBuf,
    /// Below the root of each hierarchy.
    #[serde(default, rename = "cgroup-path")]
    cgroup_path: PathBuf,
}

/// What a runtime has noted of a container.
struct State {
    init: ProcessId,
    bundle: PathBuf,
    /// Its cgroups, or how the names of their directories end.
    cgroups: Vec<PathBuf>,
}

impl Container {
    /// Reads the state that the runtime keeps under `root`. Read and not asked for with
    /// `runc state`, which would cost a process for every container without CUDA.
    pub fn load(root: &Path, id: &str) -> Result<Self, ContainerError> {
        let directory = root.join(id);
        let State { init, bundle, cgroups } = match Self::runc(&directory)? {
            Some(found) => found,
            None => Self::crun(&directory)?.ok_or_else(|| ContainerError::NotFound {
                id: id.to_owned(),
                root: root.to_owned(),
            })?,
        };
        if start_time(init.pid) != Some(init.start_time) {
            return Err(ContainerError::NotRunning(id.to_owned()));
        }
        let cgroup = Cgroup::of(init.pid)?.of_container(&cgroups);
        Ok(Self { id: id.to_owned(), init, bundle, cgroup })
    }

    /// The bundle alone, of a container that need not run.
    #[must_use]
    pub fn bundle(root: &Path, id: &str) -> Option<PathBuf> {
        let directory = root.join(id);
        let state = Self::runc(&directory).ok().flatten();
        state.or_else(|| Self::crun(&directory).ok().flatten()).map(|state| state.bundle)
    }

    fn runc(directory: &Path) -> Result<Option<State>, ContainerError> {
        let Some((path, text)) = read(directory.join("state.json"))? else {
            return Ok(None);
        };
        let state: RuncState = serde_json::from_slice(&text)
            .map_err(|source| ContainerError::Format { path, source })?;
        let bundle = state.config.labels.iter().find_map(|label| label.strip_prefix("bundle="));
        let init = ProcessId { pid: state.init_process_pid, start_time: state.init_process_start };
        let bundle = PathBuf::from(bundle.unwrap_or_default());
        let cgroups = state.cgroup_paths.into_values().collect();
        Ok(Some(State { init, bundle, cgroups }))
    }

    fn crun(directory: &Path) -> Result<Option<State>, ContainerError> {
        let Some((path, text)) = read(directory.join("status"))? else {
            return Ok(None);
        };
        let status: CrunStatus = serde_json::from_slice(&text)
            .map_err(|source| ContainerError::Format { path, source })?;
        let start_time = match status.start_time {
            0 => start_time(status.pid).unwrap_or_default(),
            noted => noted,
        };
        let init = ProcessId { pid: status.pid, start_time };
        Ok(Some(State { init, bundle: status.bundle, cgroups: vec![status.cgroup_path] }))
    }
}

fn read(path: PathBuf) -> Result<Option<(PathBuf, Vec<u8>)>, ContainerError> {
    match fs::read(&path) {
        Ok(text) => Ok(Some((path, text))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ContainerError::State { path, source }),
    }
}

impl Cgroup {
    /// The cgroup of a process: in the v1 freezer hierarchy where one is mounted, else in v2.
    pub fn of(pid: Pid) -> Result<Self, ContainerError> {
        // Lossily: somebody's mount point or cgroup that is no UTF-8 stands on a line of its own.
        let read = |path: &str| {
            fs::read(path)
                .map(|text| String::from_utf8_lossy(&text).into_owned())
                .map_err(|error| ContainerError::Cgroup { pid, reason: format!("{path}: {error}") })
        };
        let memberships = read(&format!("/proc/{pid}/cgroup"))?;
        let mounts = read("/proc/self/mountinfo")?;
        Self::find(&memberships, &mounts).ok_or_else(|| ContainerError::Cgroup {
            pid,
            reason: "it is in no cgroup of its own in a mounted hierarchy with a freezer".into(),
        })
    }

    /// The one that its runtime has made for it, given the cgroup of its init: an init such as systemd moves
    /// itself, and others of the container, to cgroups below.
    fn of_container(self, noted: &[PathBuf]) -> Self {
        let is_noted = |directory: &&Path| {
            let ends = |noted: &PathBuf| {
                let end = noted.strip_prefix("/").unwrap_or(noted);
                !end.as_os_str().is_empty() && directory.ends_with(end)
            };
            // The root of a hierarchy has none; it is no container's.
            noted.iter().any(ends) && directory.join(self.version.freezer()).is_file()
        };
        // The outermost: what lies below is called as the container wants.
        let found = self.directory.ancestors().filter(is_noted).last().map(Path::to_owned);
        Self { directory: found.unwrap_or(self.directory), version: self.version }
    }

    /// `memberships` is a /proc/PID/cgroup, `mounts` this process's mountinfo.
    fn find(memberships: &str, mounts: &str) -> Option<Self> {
        let v1 = entries(memberships)
            .find(|(_, controllers, _)| controllers.split(',').any(|name| name == "freezer"))
            .and_then(|(_, _, path)| {
                let directory = mounted(mounts, "cgroup", Some("freezer"), path)?;
                Some(Self { version: CgroupVersion::V1, directory })
            });
        v1.or_else(|| {
            let (_, _, path) = entries(memberships).find(|(number, _, _)| *number == "0")?;
            let directory = mounted(mounts, "cgroup2", None, path)?;
            Some(Self { version: CgroupVersion::V2, directory })
        })
    }
}

/// The lines of a /proc/PID/cgroup: the hierarchy's number (0 is v2's), its controllers with
/// commas between them, and the path in it.
pub fn entries(memberships: &str) -> impl Iterator<Item = (&str, &str, &str)> {
    memberships.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        Some((fields.next()?, fields.next()?, fields.next()?))
    })
}

/// Where `path` of a cgroup hierarchy is seen, given a mountinfo. `kind` is its file system,
/// `cgroup` (with one of its controllers) or `cgroup2`. The root of a hierarchy holds the whole
/// host, so a container in it has no cgroup of its own.
#[must_use]
pub fn mounted(mounts: &str, kind: &str, controller: Option<&str>, path: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let (root, point) = (*left.get(3)?, *left.get(4)?);
        let options = right.get(2)?;
        let fits = right.first() == Some(&kind)
            && controller.is_none_or(|name| options.split(',').any(|option| option == name));
        if !fits {
            return None;
        }
        // A mount of a part of the hierarchy shows only what lies below its root.
        let below = if root == "/" { path } else { path.strip_prefix(root)? };
        if !below.is_empty() && !below.starts_with('/') {
            return None;
        }
        let below = below.trim_start_matches('/');
        (!below.is_empty()).then(|| Path::new(&unescape(point)).join(below))
    })
}

/// Undoes mountinfo's octal escapes.
pub(crate) fn unescape(field: &str) -> String {
    let mut out = String::with_capacity(field.len());
    let mut rest = field;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|code| u8::from_str_radix(code, 8).ok());
        if let Some(byte) = code {
            out.push(char::from(byte));
            rest = &rest[at + 4..];
        } else {
            out.push('\\');
            rest = &rest[at + 1..];
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
32 30 0:28 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
    const UNIFIED: &str =
        "33 30 0:29 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn found(memberships: &str, mounts: &str) -> Option<(CgroupVersion, String)> {
        Cgroup::find(memberships, mounts)
            .map(|cgroup| (cgroup.version, cgroup.directory.display().to_string()))
    }

    #[test]
    fn hybrid_uses_the_v1_freezer() {
        let own = "7:freezer:/default/c1\n3:cpu,cpuacct:/default/c1\n0::/default/c1\n";
        let expected = (CgroupVersion::V1, "/sys/fs/cgroup/freezer/default/c1".to_owned());
        assert_eq!(found(own, HYBRID), Some(expected));
    }

    #[test]
    fn unified_with_systemd_paths() {
        let own = "0::/system.slice/runc-c1.scope\n";
        let expected = (CgroupVersion::V2, "/sys/fs/cgroup/system.slice/runc-c1.scope".to_owned());
        assert_eq!(found(own, UNIFIED), Some(expected));
    }

    #[test]
    fn a_v1_freezer_that_is_not_mounted_is_not_used() {
        let own = "7:freezer:/\n0::/default/c1\n";
        let expected = (CgroupVersion::V2, "/sys/fs/cgroup/default/c1".to_owned());
        assert_eq!(found(own, UNIFIED), Some(expected));
    }

    #[test]
    fn the_root_is_nobodys_own() {
        assert_eq!(found("7:freezer:/\n0::/\n", HYBRID), None);
    }

    #[test]
    fn a_mount_of_a_part_shows_what_is_below() {
        let mounts = "1 2 0:29 /docker/x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let expected = (CgroupVersion::V2, "/sys/fs/cgroup/c1".to_owned());
        assert_eq!(found("0::/docker/x/c1\n", mounts), Some(expected));
        assert_eq!(found("0::/other/c1\n", mounts), None);
        assert_eq!(found("0::/docker/xy/c1\n", mounts), None);
    }

    /// As crun 1.28 writes it, without what is not read.
    fn status(directory: &Path, pid: Pid, more: &str) {
        let text = format!(
            "{{\"pid\": {pid},{more} \"cgroup-path\": \"/x/c1\", \"rootfs\": \"/r\", \
             \"systemd-cgroup\": false, \"bundle\": \"/b/c1\", \"detached\": true}}"
        );
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("status"), text).unwrap();
    }

    #[test]
    fn cruns_status_says_pid_start_and_bundle() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("c1");
        let pid = Pid::try_from(std::process::id()).unwrap();
        let started = start_time(pid).unwrap();
        status(&directory, pid, &format!(" \"process-start-time\": {started},"));
        let State { init, bundle, cgroups } = Container::crun(&directory).unwrap().unwrap();
        assert_eq!((init.pid, init.start_time), (pid, started));
        assert_eq!(bundle, Path::new("/b/c1"));
        assert_eq!(cgroups, [Path::new("/x/c1")]);
        status(&directory, pid, "");
        assert_eq!(Container::crun(&directory).unwrap().unwrap().init.start_time, started);
    }

    #[test]
    fn runcs_state_says_pid_start_bundle_and_cgroups() {
        let root = tempfile::tempdir().unwrap();
        let text = r#"{"id": "c1", "init_process_pid": 7, "init_process_start": 9,
            "config": {"labels": ["bundle=/b/c1"]},
            "cgroup_paths": {"freezer": "/sys/fs/cgroup/freezer/x/c1", "": "/sys/fs/cgroup/x/c1"}}"#;
        fs::write(root.path().join("state.json"), text).unwrap();
        let State { init, bundle, cgroups } = Container::runc(root.path()).unwrap().unwrap();
        assert_eq!((init, bundle), (ProcessId { pid: 7, start_time: 9 }, "/b/c1".into()));
        let expected = ["/sys/fs/cgroup/x/c1", "/sys/fs/cgroup/freezer/x/c1"].map(PathBuf::from);
        assert_eq!(cgroups, expected);
    }

    #[test]
    fn an_init_that_has_moved_is_still_in_the_containers_cgroup() {
        let mount = tempfile::tempdir().unwrap();
        let at = |name: &str| mount.path().join(name);
        // The container may call what is below as it likes.
        let init = at("x.slice/c1.scope/container/x.slice/c1.scope/container/init.scope");
        fs::create_dir_all(&init).unwrap();
        for directory in init.ancestors().take_while(|directory| *directory != mount.path()) {
            fs::write(directory.join("cgroup.freeze"), "0\n").unwrap();
        }
        let of = |noted: &[&str]| {
            let cgroup = Cgroup { version: CgroupVersion::V2, directory: init.clone() };
            let noted: Vec<_> = noted.iter().map(|path| PathBuf::from(path.to_string())).collect();
            cgroup.of_container(&noted).directory
        };
        let expected = at("x.slice/c1.scope/container");
        assert_eq!(of(&["/x.slice/c1.scope/container"]), expected);
        let absolute = expected.display().to_string();
        assert_eq!(of(&["/sys/fs/cgroup/freezer/other", &absolute]), expected);
        // Nothing noted, the root of the hierarchy, or not above: its own.
        let root = mount.path().display().to_string();
        for noted in [[].as_slice(), &[""], &["/"], &[&root], &["/y.slice/c1.scope/container"]] {
            assert_eq!(of(noted), init, "{noted:?}");
        }
    }

    #[test]
    fn a_pid_that_is_anothers_now_is_no_container() {
        let root = tempfile::tempdir().unwrap();
        let pid = Pid::try_from(std::process::id()).unwrap();
        status(&root.path().join("c1"), pid, " \"process-start-time\": 1,");
        let error = Container::load(root.path(), "c1").unwrap_err();
        assert!(matches!(error, ContainerError::NotRunning(_)), "{error}");
    }

    #[test]
    fn escapes_are_undone() {
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
        assert_eq!(unescape("/a\\9"), "/a\\9");
    }
}
