//! Where the server stands among the processes of the host: its cgroup, and its turn when memory
//! runs out.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};

/// The greatest value there is.
const MAX_SCORE: i32 = 1000;

/// Puts a process into a cgroup that exists. `cgroups` is `/sys/fs/cgroup`.
///
/// Of several v1 hierarchies, those that have the cgroup: as containerd's shim does, and unlike
/// `containerd_shim::cgroup`, which fails at the first one that has not.
pub(super) fn join_cgroup(cgroups: &Path, cgroup: &Path, pid: u32) -> io::Result<()> {
    let below: PathBuf =
        cgroup.components().filter(|c| matches!(c, Component::Normal(_))).collect();
    let hierarchies = if cgroups.join("cgroup.controllers").exists() {
        vec![cgroups.to_owned()]
    } else {
        hierarchies(cgroups)?
    };
    let mut found = false;
    for hierarchy in hierarchies {
        let directory = hierarchy.join(&below);
        if directory.is_dir() {
            fs::write(directory.join("cgroup.procs"), pid.to_string())?;
            found = true;
        }
    }
    let missing = || io::Error::new(ErrorKind::NotFound, "there is no such cgroup");
    if found { Ok(()) } else { Err(missing()) }
}

/// The v1 hierarchies. Links (`cpu` to `cpu,cpuacct`) are not others, and the v2 one of a hybrid
/// host has no controllers.
fn hierarchies(cgroups: &Path) -> io::Result<Vec<PathBuf>> {
    let mut hierarchies = Vec::new();
    for entry in fs::read_dir(cgroups)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.file_name() != "unified" {
            hierarchies.push(entry.path());
        }
    }
    Ok(hierarchies)
}

/// Gives a process an `oom_score_adj` one above that of `parent`, containerd: of the two, the shim
/// goes first. `processes` is `/proc`.
pub(super) fn before_parent(processes: &Path, parent: u32, pid: u32) -> io::Result<()> {
    let file = |pid: u32| processes.join(pid.to_string()).join("oom_score_adj");
    let score: i32 = fs::read_to_string(file(parent))?
        .trim()
        .parse()
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
    match fs::write(file(pid), score.saturating_add(1).min(MAX_SCORE).to_string()) {
        // Without the privilege it stays as it is, which is no reason to have no container.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(paths: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for path in paths {
            fs::create_dir_all(directory.path().join(path)).unwrap();
        }
        directory
    }

    fn procs(root: &Path, cgroup: &str) -> Option<String> {
        fs::read_to_string(root.join(cgroup).join("cgroup.procs")).ok()
    }

    #[test]
    fn of_v1_hierarchies_those_that_have_the_cgroup_are_joined() {
        let tree = tree(&["memory/a/b", "cpu,cpuacct/a/b", "pids/a", "unified/a/b"]);
        let root = tree.path();
        std::os::unix::fs::symlink("cpu,cpuacct", root.join("cpu")).unwrap();
        join_cgroup(root, Path::new("/a/b"), 7).unwrap();
        assert_eq!(procs(root, "memory/a/b").as_deref(), Some("7"));
        assert_eq!(procs(root, "cpu,cpuacct/a/b").as_deref(), Some("7"));
        assert_eq!(procs(root, "pids/a"), None);
        assert_eq!(procs(root, "unified/a/b"), None);
        let error = join_cgroup(root, Path::new("none"), 7).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn the_v2_hierarchy_is_joined() {
        let tree = tree(&["a/b"]);
        fs::write(tree.path().join("cgroup.controllers"), "").unwrap();
        join_cgroup(tree.path(), Path::new("a/b"), 8).unwrap();
        assert_eq!(procs(tree.path(), "a/b").as_deref(), Some("8"));
        assert!(join_cgroup(tree.path(), Path::new("/b"), 8).is_err());
    }

    #[test]
    fn the_shim_goes_before_containerd() {
        for (parent, want) in [("-999\n", "-998"), ("0\n", "1"), ("1000\n", "1000")] {
            let tree = tree(&["1", "2"]);
            fs::write(tree.path().join("1/oom_score_adj"), parent).unwrap();
            before_parent(tree.path(), 1, 2).unwrap();
            assert_eq!(fs::read_to_string(tree.path().join("2/oom_score_adj")).unwrap(), want);
        }
        let (tree, table) = (tree(&["1"]), ["x", ""]);
        for text in table {
            fs::write(tree.path().join("1/oom_score_adj"), text).unwrap();
            assert!(before_parent(tree.path(), 1, 1).is_err());
        }
    }
}
