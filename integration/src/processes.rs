//! What /proc says about processes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use nix::unistd::Pid;

/// All processes that can be seen.
fn all() -> impl Iterator<Item = Pid> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .map(Pid::from_raw)
}

/// A file of a process as text, empty if the process is gone.
#[must_use]
pub fn read(pid: Pid, file: &str) -> String {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Processes one of whose arguments is exactly this.
#[must_use]
pub fn with_argument(argument: &str) -> Vec<Pid> {
    all().filter(|&pid| read(pid, "cmdline").split('\0').any(|found| found == argument)).collect()
}

/// Processes with this text anywhere in their arguments.
#[must_use]
pub fn with_part_of_argument(text: &str) -> Vec<Pid> {
    all().filter(|&pid| read(pid, "cmdline").contains(text)).collect()
}

/// Processes that were started with this text in their environment.
#[must_use]
pub fn with_environment(text: &str) -> Vec<Pid> {
    all().filter(|&pid| read(pid, "environ").contains(text)).collect()
}

/// Processes in a cgroup below the one of this name, in any hierarchy.
#[must_use]
pub fn in_cgroup(name: &str) -> Vec<Pid> {
    let (inner, last) = (format!("/{name}/"), format!("/{name}"));
    all()
        .filter(|&pid| {
            read(pid, "cgroup").lines().any(|line| line.ends_with(&last) || line.contains(&inner))
        })
        .collect()
}

/// The file that freezes and thaws the cgroup of a process, in version 1 of cgroups.
///
/// # Errors
/// If it is in no such cgroup.
pub fn freezer(pid: Pid) -> Result<PathBuf> {
    let memberships = read(pid, "cgroup");
    let path = memberships.lines().find_map(|line| line.split_once(":freezer:"));
    let (_, path) = path.with_context(|| format!("{pid} is in no freezer"))?;
    Ok(Path::new("/sys/fs/cgroup/freezer").join(path.trim_start_matches('/')).join("freezer.state"))
}

/// How a process is shown to people: its pid, state and command line.
#[must_use]
pub fn describe(pid: Pid) -> String {
    let state = read(pid, "status");
    let state = state.lines().find(|line| line.starts_with("State")).unwrap_or("State: gone");
    format!("{pid} ({}) {}", state.replace('\t', " "), read(pid, "cmdline").replace('\0', " "))
}

/// Whether a process runs the binary of this name, whatever it calls itself.
#[must_use]
pub fn runs(pid: Pid, binary: &str) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ends_with(binary))
}

/// Processes that run the binary of this name.
#[must_use]
pub fn of_binary(binary: &str) -> Vec<Pid> {
    all().filter(|&pid| runs(pid, binary)).collect()
}

/// What a process has open, by name; nothing if it is gone.
#[must_use]
pub fn open_files(pid: Pid) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

/// Who started a process.
#[must_use]
pub fn parent(pid: Pid) -> Option<Pid> {
    let status = read(pid, "status");
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    parent.trim().parse().ok().map(Pid::from_raw)
}
