//! A container's cgroups, for its metrics and for its OOM kills.
//!
//! Which version counts is decided as Go's shim does: v2 if that is what is mounted at
//! /sys/fs/cgroup, else v1. On a hybrid host the v2 hierarchy has no controllers.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use stasis_hooks::container::{entries, mounted};

/// Where the host's cgroups are.
const MOUNTPOINT: &str = "/sys/fs/cgroup";

/// The directories of a container's cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cgroups {
    /// One for each controller, under the controller's name.
    V1(BTreeMap<String, PathBuf>),
    /// The one of the unified hierarchy.
    V2(PathBuf),
}

/// Why nothing is known of a container's cgroups.
#[derive(Debug, thiserror::Error)]
pub enum CgroupsError {
    /// /proc says nothing.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is in the roots, which hold the whole host, or has ended.
    #[error("pid {0} is in no cgroup of its own")]
    None(i32),
}

impl Cgroups {
    /// The cgroups of a container's init process. They are to be found while it lives, and kept:
    /// afterwards nothing tells.
    pub fn of(pid: i32) -> Result<Self, CgroupsError> {
        let memberships = read(format!("/proc/{pid}/cgroup").into())?;
        let mounts = read("/proc/self/mountinfo".into())?;
        Self::find(&memberships, &mounts, unified()).ok_or(CgroupsError::None(pid))
    }

    /// The directory that has a controller's files.
    #[must_use]
    pub fn controller(&self, name: &str) -> Option<&Path> {
        match self {
            Self::V1(directories) => directories.get(name).map(PathBuf::as_path),
            Self::V2(directory) => Some(directory),
        }
    }

    /// `memberships` is a /proc/PID/cgroup, `mounts` this process's mountinfo.
    fn find(memberships: &str, mounts: &str, unified: bool) -> Option<Self> {
        if unified {
            let (_, _, path) = entries(memberships).find(|(number, _, _)| *number == "0")?;
            return mounted(mounts, "cgroup2", None, path).map(Self::V2);
        }
        let directories: BTreeMap<_, _> = entries(memberships)
            .flat_map(|(_, names, path)| names.split(',').map(move |name| (name, path)))
            .filter(|(name, _)| !name.is_empty() && !name.starts_with("name="))
            .filter_map(|(name, path)| {
                Some((name.to_owned(), mounted(mounts, "cgroup", Some(name), path)?))
            })
            .collect();
        (!directories.is_empty()).then_some(Self::V1(directories))
    }
}

/// Whether v2 is all that the host has.
fn unified() -> bool {
    statfs(MOUNTPOINT).is_ok_and(|found| found.filesystem_type() == CGROUP2_SUPER_MAGIC)
}

/// Lossily: somebody's mount point or cgroup that is no UTF-8 stands on a line of its own.
fn read(path: PathBuf) -> Result<String, CgroupsError> {
    match std::fs::read(&path) {
        Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
        Err(source) => Err(CgroupsError::Read { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
34 30 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";

    #[test]
    fn v1_and_hybrid_have_a_directory_for_each_controller() {
        let own = "\
9:name=systemd:/default/c1
4:memory:/default/c1
3:cpu,cpuacct:/default/c1
2:pids:/default/c1
0::/default/c1
";
        let found = Cgroups::find(own, HYBRID, false).unwrap();
        let cpu: PathBuf = "/sys/fs/cgroup/cpu,cpuacct/default/c1".into();
        let memory: PathBuf = "/sys/fs/cgroup/memory/default/c1".into();
        let expected = [("cpu", &cpu), ("cpuacct", &cpu), ("memory", &memory)];
        let expected = expected.map(|(name, path)| (name.to_owned(), path.clone()));
        assert_eq!(found, Cgroups::V1(expected.into()));
        assert_eq!(found.controller("memory"), Some(memory.as_path()));
        assert_eq!(found.controller("pids"), None);
    }

    #[test]
    fn v2_has_one_for_all() {
        let mounts = "33 30 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = Cgroups::find("0::/system.slice/c1.scope\n", mounts, true).unwrap();
        let directory = Path::new("/sys/fs/cgroup/system.slice/c1.scope");
        assert_eq!(found, Cgroups::V2(directory.to_owned()));
        assert_eq!(found.controller("memory"), Some(directory));
    }

    #[test]
    fn the_roots_are_nobodys_own() {
        assert_eq!(Cgroups::find("4:memory:/\n0::/\n", HYBRID, false), None);
        let mounts = "33 30 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(Cgroups::find("0::/\n", mounts, true), None);
        let own = Cgroups::find("4:memory:/a\n3:cpu,cpuacct:/\n", HYBRID, false).unwrap();
        assert_eq!(own.controller("cpu"), None);
        assert!(own.controller("memory").is_some());
    }

    #[test]
    fn lines_that_make_no_sense_are_passed_over() {
        let own = "nonsense\n4\n4:memory:/a:b\n:::\n";
        let found = Cgroups::find(own, HYBRID, false).unwrap();
        assert_eq!(found.controller("memory"), Some(Path::new("/sys/fs/cgroup/memory/a:b")));
    }

    #[test]
    fn a_process_that_has_ended_is_an_error() {
        assert!(matches!(Cgroups::of(i32::MAX), Err(CgroupsError::Read { .. })));
    }
}
