//! Looks for what a test should not leave behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use crate::{processes, wait};

/// How long ends may take that nobody waits for, such as a killed helper's.
const LIMIT: Duration = Duration::from_secs(3);

/// The cgroups of this path below each hierarchy.
fn cgroups(path: &str) -> Vec<PathBuf> {
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    hierarchies
        .map(|hierarchy| hierarchy.path())
        .chain([PathBuf::from("/sys/fs/cgroup")])
        .map(|hierarchy| hierarchy.join(path))
        .filter(|cgroup| cgroup.is_dir())
        .collect()
}

/// Mounts whose line in mountinfo holds this text. Not that of the GPUs' memory, which is the test's.
fn mounts(text: &str) -> Result<Vec<String>> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo")?;
    let is_gpu = |line: &str| line.split(' ').nth(4).is_some_and(|point| point.ends_with("/gpu"));
    let left = mountinfo.lines().filter(|line| line.contains(text) && !is_gpu(line));
    Ok(left.map(str::to_owned).collect())
}

/// Checks that a container and its cgroups and mounts are gone.
pub fn container(namespace: &str, id: &str) -> Result<()> {
    let path = format!("{namespace}/{id}");
    let _ = wait::until("empty cgroups", LIMIT, || Ok(cgroups(&path).is_empty().then_some(())));
    processes_and_mounts(&path, id)?;
    let left = cgroups(&path);
    ensure!(left.is_empty(), "cgroups of container {id} are left: {left:#?}");
    Ok(())
}

/// Checks that the processes in a cgroup are gone, and the mounts of what it is called.
pub fn processes_and_mounts(cgroup: &str, id: &str) -> Result<()> {
    let left: Vec<_> = processes::in_cgroup(cgroup).into_iter().map(processes::describe).collect();
    ensure!(left.is_empty(), "processes of container {id} are left: {left:#?}");
    let left = mounts(&format!("/{id}/"))?;
    ensure!(left.is_empty(), "mounts of container {id} are left: {left:#?}");
    Ok(())
}

/// Removes a cgroup that others were asked to make their own below of; those have to be gone.
pub fn remove_cgroup(path: &str) -> Result<()> {
    for cgroup in cgroups(path) {
        // What was killed leaves its cgroup a little later.
        let _ = wait::until("an empty cgroup", LIMIT, || Ok(fs::remove_dir(&cgroup).ok()));
    }
    let left: Vec<_> = cgroups(path).iter().flat_map(|cgroup| below(cgroup)).collect();
    ensure!(left.is_empty(), "cgroups are left: {left:#?}");
    Ok(())
}

/// A cgroup and those below it.
fn below(cgroup: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten().map(|entry| entry.path());
    let inner = entries.filter(|entry| entry.is_dir()).flat_map(|entry| below(&entry));
    [cgroup.to_owned()].into_iter().chain(inner).collect()
}

/// Takes away what somebody else's programs have left mounted in a test's directory.
pub fn unmount(directory: &Path) -> Result<()> {
    let text = directory.to_string_lossy();
    let working = || processes::with_part_of_argument(&text);
    let _ = wait::until("the end of what mounts", LIMIT, || Ok(working().is_empty().then_some(())));
    for line in mounts(&text)?.iter().rev() {
        if let Some(point) = line.split(' ').nth(4) {
            let _ = nix::mount::umount2(point, nix::mount::MntFlags::MNT_DETACH);
        }
    }
    Ok(())
}

/// Checks that nothing works on in a test's directory: processes that its runtime started,
/// mounts, journals, job files.
pub fn directory(directory: &Path, state: &Path) -> Result<()> {
    let text = directory.to_string_lossy();
    let started = || processes::with_environment(&text);
    let _ = wait::until("the end of helpers", LIMIT, || Ok(started().is_empty().then_some(())));
    let left: Vec<_> = started().into_iter().map(processes::describe).collect();
    ensure!(left.is_empty(), "processes of the runtime are left: {left:#?}");
    let left = mounts(&text)?;
    ensure!(left.is_empty(), "mounts are left: {left:#?}");
    let left = journals(state);
    ensure!(left.is_empty(), "journals are left: {left:#?}");
    let left = jobs(state);
    ensure!(left.is_empty(), "directories of jobs are left: {left:#?}");
    Ok(())
}

/// The journals in a state directory, at any depth.
#[must_use]
pub fn journals(state: &Path) -> Vec<PathBuf> {
    with_extension(state, "json")
}

/// The directories of containers with a job file in a state directory.
#[must_use]
pub fn jobs(state: &Path) -> Vec<PathBuf> {
    with_extension(state, "job")
}

fn with_extension(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        } else if path.is_dir() {
            found.extend(with_extension(&path, extension));
        }
    }
    found
}
