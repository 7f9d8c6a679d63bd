//! Whether host memory has room for what is on the GPU.
//!
//! While a process is CHECKPOINTED the driver keeps its GPU memory in one anonymous mapping of the
//! process (measured on 580), which is charged to the container's cgroups. Without room for it the
//! kernel kills the process in the middle of the driver's call, and the data is gone; so it is looked
//! before.

use std::fs;
use std::path::{Path, PathBuf};

use crate::container::{entries, mounted};
use crate::cuda::CudaState;
use crate::error::Cause;
use crate::parts::CudaProcess;
use crate::processes::Pid;

/// Memory that may be used on top of what is in use now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Whose limit that is: of the host, or of a cgroup, by its directory.
    pub of: String,
}

/// The host memory that a container can get.
pub trait HostMemory {
    /// How much; none if that is not known, or not to be looked at.
    fn room(&self) -> Option<Room>;
}

/// What a checkpointed process needs beside what NVML says that it uses (measured on 580: 9 to 43 MiB).
const BESIDES: u64 = 64 << 20;

/// Refuses what host memory has no room for. Processes that are CHECKPOINTED have it there already, and
/// use no GPU.
pub(crate) fn require(memory: &dyn HostMemory, cuda: &[CudaProcess]) -> Result<(), Cause> {
    let known = |process: &CudaProcess| -> u64 {
        process.uses.gpus.iter().filter_map(|(_, bytes)| *bytes).sum()
    };
    let moves = |process: &&CudaProcess| process.found != Some(CudaState::Checkpointed);
    let on_gpu = cuda.iter().filter(moves).map(known).filter(|bytes| *bytes > 0);
    let needed: u64 = on_gpu.map(|bytes| bytes.saturating_add(BESIDES)).sum();
    if needed == 0 {
        return Ok(());
    }
    match memory.room() {
        Some(Room { bytes: room, of }) if room < needed => {
            Err(Cause::NoHostMemory { needed, room, of })
        }
        _ => Ok(()),
    }
}

/// The host memory that a process can get: what the kernel says is available, and what its cgroups
/// allow. What is there of files does not count as used, since the kernel drops it; swap counts as room.
#[derive(Debug)]
pub struct HostMemoryOf {
    pid: Pid,
    checked: bool,
}

impl HostMemoryOf {
    /// `checked` is the configuration's word on whether it is looked at all.
    #[must_use]
    pub fn new(pid: Pid, checked: bool) -> Self {
        Self { pid, checked }
    }
}

impl HostMemory for HostMemoryOf {
    fn room(&self) -> Option<Room> {
        if !self.checked {
            return None;
        }
        let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
        let swap = field(&meminfo, "SwapFree:").unwrap_or(0);
        let available = field(&meminfo, "MemAvailable:")?;
        let host = Room { bytes: available.saturating_add(swap), of: "this host".to_owned() };
        let read = |path: String| {
            fs::read(path)
                .map(|text| String::from_utf8_lossy(&text).into_owned())
                .unwrap_or_default()
        };
        let memberships = read(format!("/proc/{}/cgroup", self.pid));
        let mounts = read("/proc/self/mountinfo".to_owned());
        let cgroup = cgroup(&memberships, &mounts);
        let cgroups =
            cgroup.iter().flat_map(|(version, directory)| rooms(*version, directory, swap));
        // Of two that are as tight the deeper one is named.
        cgroups.chain([host]).min_by_key(|room| room.bytes)
    }
}

/// What this cgroup and those above it have left. The innermost may be one without memory of its own.
fn rooms(version: Version, directory: &Path, swap: u64) -> impl Iterator<Item = Room> + '_ {
    directory.ancestors().filter_map(move |directory| version.room(directory, swap))
}

/// The cgroup in which the memory of a process is counted.
fn cgroup(memberships: &str, mounts: &str) -> Option<(Version, PathBuf)> {
    let v1 = entries(memberships)
        .find(|(_, controllers, _)| controllers.split(',').any(|name| name == "memory"))
        .and_then(|(_, _, path)| mounted(mounts, "cgroup", Some("memory"), path))
        .map(|directory| (Version::V1, directory));
    v1.or_else(|| {
        let (_, _, path) = entries(memberships).find(|(number, _, _)| *number == "0")?;
        Some((Version::V2, mounted(mounts, "cgroup2", None, path)?))
    })
}

#[derive(Debug, Clone, Copy)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// What a cgroup has left, given the host's free swap; none if it is no cgroup whose memory is counted,
    /// which the root of a hierarchy is not.
    fn room(self, directory: &Path, swap: u64) -> Option<Room> {
        let number = |name: &str| number(&directory.join(name));
        let stat = fs::read_to_string(directory.join("memory.stat")).ok()?;
        let reclaimable =
            |names: [&str; 2]| -> u64 { names.iter().filter_map(|name| field(&stat, name)).sum() };
        let left =
            |limit: u64, used: u64, files: u64| limit.saturating_sub(used.saturating_sub(files));
        let bytes = match self {
            Self::V2 => {
                let (limit, used) = (number("memory.max")?, number("memory.current")?);
                let files = reclaimable(["inactive_file", "active_file"]);
                let swap_limit = number("memory.swap.max").unwrap_or(UNLIMITED);
                let swap_used = number("memory.swap.current").unwrap_or(0);
                left(limit, used, files).saturating_add(swap.min(left(swap_limit, swap_used, 0)))
            }
            Self::V1 => {
                let (limit, used) =
                    (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?);
                let files = reclaimable(["total_inactive_file", "total_active_file"]);
                let with_swap = number("memory.memsw.limit_in_bytes").unwrap_or(UNLIMITED);
                let used_with_swap = number("memory.memsw.usage_in_bytes").unwrap_or(0);
                left(limit, used, files).saturating_add(swap).min(left(
                    with_swap,
                    used_with_swap,
                    files,
                ))
            }
        };
        Some(Room { bytes, of: format!("cgroup {}", directory.display()) })
    }
}

/// What stands for no limit: more than any machine has.
const UNLIMITED: u64 = u64::MAX;

/// A file with a number, or `max`.
fn number(path: &Path) -> Option<u64> {
    match fs::read_to_string(path).ok()?.trim() {
        "max" => Some(UNLIMITED),
        number => number.parse().ok(),
    }
}

/// The number after a name at the beginning of a line, in bytes; `kB` is what meminfo says.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        if words.next() != Some(name) {
            return None;
        }
        let number: u64 = words.next()?.parse().ok()?;
        match words.next() {
            Some("kB") => number.checked_mul(1024),
            _ => Some(number),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn bytes(version: Version, files: &[(&str, &str)], swap: u64) -> Option<u64> {
        let root = at(files);
        version.room(root.path(), swap).map(|room| room.bytes)
    }

    #[test]
    fn of_v2_files_do_not_count_and_swap_counts_as_far_as_it_may_be_used() {
        let stat = ("memory.stat", "anon 5\ninactive_file 200\nactive_file 100\n");
        let files = [stat, ("memory.max", "1000\n"), ("memory.current", "700\n")];
        assert_eq!(bytes(Version::V2, &files, 0), Some(600));
        assert_eq!(bytes(Version::V2, &files, 50), Some(650));
        let swap = [("memory.swap.max", "30\n"), ("memory.swap.current", "10\n")];
        let files = [files.as_slice(), &swap].concat();
        assert_eq!(bytes(Version::V2, &files, 50), Some(620));
        let files = [stat, ("memory.max", "max\n"), ("memory.current", "700\n")];
        assert!(bytes(Version::V2, &files, 0) > Some(1 << 60));
        // The root, which is not limited.
        assert_eq!(bytes(Version::V2, &[stat], 0), None);
    }

    #[test]
    fn all_cgroups_above_count_also_where_the_innermost_counts_nothing() {
        let root = at(&[
            ("pod/memory.stat", ""),
            ("pod/memory.max", "1000"),
            ("pod/memory.current", "1"),
            ("pod/ctr/memory.stat", ""),
            ("pod/ctr/memory.max", "max"),
            ("pod/ctr/memory.current", "1"),
            ("pod/ctr/init.scope/cgroup.procs", ""),
        ]);
        let innermost = root.path().join("pod/ctr/init.scope");
        let all: Vec<u64> = rooms(Version::V2, &innermost, 0).map(|room| room.bytes).collect();
        assert_eq!(all.len(), 2, "{all:?}");
        assert_eq!(all[1], 999);
    }

    #[test]
    fn of_v1_the_tighter_of_memory_and_memory_with_swap_counts() {
        let stat =
            ("memory.stat", "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 0\n");
        let memory =
            [stat, ("memory.limit_in_bytes", "1000\n"), ("memory.usage_in_bytes", "700\n")];
        assert_eq!(bytes(Version::V1, &memory, 40), Some(540));
        let swap =
            [("memory.memsw.limit_in_bytes", "1010"), ("memory.memsw.usage_in_bytes", "720")];
        let files = [memory.as_slice(), &swap].concat();
        assert_eq!(bytes(Version::V1, &files, 40), Some(490));
        // More than the limit is in use where the limit was lowered.
        let over = [stat, ("memory.limit_in_bytes", "100"), ("memory.usage_in_bytes", "700")];
        assert_eq!(bytes(Version::V1, &over, 0), Some(0));
    }

    #[test]
    fn the_hierarchy_that_counts_memory_is_found() {
        let mounts = "32 30 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = |memberships: &str| cgroup(memberships, mounts).map(|(_, path)| path);
        let hybrid = "7:freezer:/x/c1\n4:memory:/x/c1\n0::/x/c1\n";
        assert_eq!(found(hybrid).unwrap(), Path::new("/sys/fs/cgroup/memory/x/c1"));
        assert_eq!(found("0::/x/c1\n").unwrap(), Path::new("/sys/fs/cgroup/unified/x/c1"));
        assert_eq!(found("0::/\n"), None);
    }

    #[test]
    fn this_process_has_some_room_and_that_is_not_looked_at_if_it_is_not_to_be() {
        let own = Pid::try_from(std::process::id()).unwrap();
        assert!(HostMemoryOf::new(own, true).room().unwrap().bytes > 0);
        assert_eq!(HostMemoryOf::new(own, false).room(), None);
    }
}
