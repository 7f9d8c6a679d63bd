//! The processes of a container, and which of them may have CUDA.

use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

/// A process id in the pid namespace of this process.
pub type Pid = i32;

/// A process, told from a later one with the same pid by its start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The pid.
    pub pid: Pid,
    /// Field 22 of /proc/PID/stat: clock ticks since boot.
    pub start_time: u64,
}

/// A process of the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Which one.
    pub id: ProcessId,
    /// Its pid in the pid namespace of the container's init.
    pub inner_pid: Pid,
    /// The kernel's name for it. Never `cmdline`, whose pages can hang on FUSE.
    pub command: String,
    /// Whether it maps libcuda; so does a process whose CUDA is checkpointed.
    pub maps_libcuda: bool,
    /// Paths of the NVIDIA device files that it has open, each once.
    pub devices: Vec<String>,
    /// Who traces it, 0 for nobody.
    pub tracer: Pid,
    /// Its parent.
    pub parent: Pid,
}

/// Whether CRIU dumps a process: the container's init and what descends from it. What `exec` starts has
/// a parent outside.
#[must_use]
pub fn descends(all: &[Process], process: &Process, init: Pid) -> bool {
    let mut pid = process.id.pid;
    let mut parent = process.parent;
    // No chain is longer; one that is read while it changes might be a ring.
    for _ in 0..=all.len() {
        if pid == init {
            return true;
        }
        let Some(next) = all.iter().find(|process| process.id.pid == parent) else { return false };
        pid = next.id.pid;
        parent = next.parent;
    }
    false
}

impl Process {
    /// Whether the driver has to be asked about it.
    #[must_use]
    pub fn is_candidate(&self) -> bool {
        self.maps_libcuda || !self.devices.is_empty()
    }

    /// The GPUs that it has open, by their device files (`/dev/nvidia0`).
    #[must_use]
    pub fn gpu_devices(&self) -> Vec<&str> {
        let is_gpu = |path: &&str| {
            path.strip_prefix(DEVICE_PREFIX)
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        };
        self.devices.iter().map(String::as_str).filter(is_gpu).collect()
    }
}

const DEVICE_PREFIX: &str = "/dev/nvidia";
/// A container chooses the names of its processes; escaped, they can be longer than the kernel's
/// 15 bytes.
const COMMAND: usize = 64;
/// And of paths, in characters.
const PATH: usize = 256;

/// Looks processes up.
pub trait Processes {
    /// All processes in the container's cgroup and below it that live in the container's pid
    /// namespace or one below.
    fn list(&self) -> Result<Vec<Process>, ProcessesError>;

    /// Whether a tracer lets go by itself: CRIU at work, or what an operation of ours that was killed
    /// has held its threads with, which may freeze the container before it ends.
    fn lets_go(&self, tracer: Pid) -> bool;

    /// Whether this host has a GPU's device file at all.
    fn host_has_gpu(&self) -> bool;

    /// Whether the process still runs: not ended, no zombie, and not another one of that pid.
    fn alive(&self, id: ProcessId) -> bool;

    /// Whether all of it lives and dies with its init. A cgroup that a person has named has none: its oldest
    /// process stands for it, which may end before the others.
    fn have_init(&self) -> bool;

    /// Bytes in host memory, swapped or not, of the process's largest anonymous mapping. Where it is
    /// CHECKPOINTED, what it had on the GPU is in one such (measured on 580). None if that cannot be told.
    fn largest_mapping(&self, id: ProcessId) -> Option<u64>;

    /// Whether the process has ended, or is about to: it has no memory any more, or was killed and is
    /// frozen. What is dumped of it ends right after its restore.
    fn ending(&self, id: ProcessId) -> bool;
}

/// The list could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcessesError {
    /// The cgroup's list.
    #[error("cannot read {}", path.display())]
    Cgroup {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A process of it.
    #[error("cannot read /proc/{pid}")]
    Process {
        /// Which.
        pid: Pid,
        /// Why.
        source: std::io::Error,
    },
}

impl ProcessesError {
    /// Whether there is no such cgroup any more, and so nobody in it.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let Self::Cgroup { source, .. } = self else { return false };
        let error = source.raw_os_error().map(Errno::from_raw);
        matches!(error, Some(Errno::ENOENT | Errno::ENODEV))
    }
}

/// [`Processes`] from cgroupfs and procfs.
#[derive(Debug, Clone)]
pub struct CgroupProcesses {
    directory: PathBuf,
    /// How many pid namespaces lie between this process and the container's init.
    level: usize,
    have_init: bool,
}

impl CgroupProcesses {
    /// `directory` is the container's cgroup in a mounted hierarchy.
    pub fn new(directory: &Path, init: Pid) -> Result<Self, ProcessesError> {
        let inner = fs::read(format!("/proc/{init}/status"))
            .map(|status| nspid(&status, init))
            .map_err(|source| ProcessesError::Process { pid: init, source })?;
        let level = inner.len().saturating_sub(1);
        Ok(Self { directory: directory.to_owned(), level, have_init: true })
    }

    /// The same of a cgroup that is no container: `init` was only the oldest process, and may be in another
    /// pid namespace than the others.
    #[must_use]
    pub fn without_init(self) -> Self {
        Self { have_init: false, level: 0, ..self }
    }

    fn pids(&self, directory: &Path, pids: &mut Vec<Pid>) -> Result<(), ProcessesError> {
        let path = directory.join("cgroup.procs");
        let list = match std::fs::read_to_string(&path) {
            Ok(list) => list,
            // A cgroup of the container was removed meanwhile, or is threaded (its processes are
            // listed in the domain above).
            Err(error)
                if directory != self.directory
                    && matches!(
                        error.raw_os_error().map(Errno::from_raw),
                        Some(Errno::ENOENT | Errno::ENODEV | Errno::EOPNOTSUPP)
                    ) =>
            {
                String::new()
            }
            Err(source) => return Err(ProcessesError::Cgroup { path, source }),
        };
        pids.extend(
            list.lines().filter_map(|line| line.parse::<Pid>().ok().filter(|&pid| pid > 0)),
        );
        let Ok(entries) = std::fs::read_dir(directory) else {
            return Ok(());
        };
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.pids(&entry.path(), pids)?;
            }
        }
        Ok(())
    }

    fn describe(&self, pid: Pid) -> io::Result<Option<Process>> {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let stat = Stat::read(&proc)?;
        let status = fs::read(proc.join("status"))?;
        let ids = nspid(&status, pid);
        // Fewer levels: a process of the host in the container's cgroup (`runc exec` on its way).
        let Some(&inner_pid) = ids.get(self.level) else { return Ok(None) };
        if stat.is_dead() {
            return Ok(None);
        }
        let maps = fs::read(proc.join("maps"))?;
        let maps_libcuda = maps.split(|&byte| byte == b'\n').any(maps_libcuda);
        let mut devices = Vec::new();
        for descriptor in fs::read_dir(proc.join("fd"))? {
            // One that was closed meanwhile is none.
            let Ok(target) = fs::read_link(descriptor?.path()) else { continue };
            let target = target.to_string_lossy();
            if target.starts_with(DEVICE_PREFIX) {
                devices.push(stasis_config::text::printable(&target, PATH));
            }
        }
        devices.sort_unstable();
        devices.dedup();
        Ok(Some(Process {
            id: ProcessId { pid, start_time: stat.start_time },
            inner_pid,
            command: stasis_config::text::printable(&stat.command, COMMAND),
            maps_libcuda,
            devices,
            parent: stat.parent,
            tracer: field(&status, "TracerPid").and_then(|pid| pid.parse().ok()).unwrap_or(0),
        }))
    }
}

/// What /proc/PID/stat says. A container chooses its processes' names, so all of this is read as
/// bytes: a name need not be UTF-8.
struct Stat {
    command: String,
    state: char,
    parent: Pid,
    start_time: u64,
}

impl Stat {
    fn read(proc: &Path) -> io::Result<Self> {
        Self::parse(&fs::read(proc.join("stat"))?)
            .ok_or_else(|| io::Error::other("its stat is not understood"))
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        let stat = String::from_utf8_lossy(stat);
        // The name is in parentheses and may hold some itself.
        let (before, after) = stat.rsplit_once(") ")?;
        let (_, command) = before.split_once(" (")?;
        let mut fields = after.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        // Field 22; the state is field 3.
        let start_time = fields.nth(17)?.parse().ok()?;
        Some(Self { command: command.to_owned(), state, parent, start_time })
    }

    fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// By its /proc/PID/status.
fn is_ending(status: &[u8]) -> bool {
    let has_memory = field(status, "VmSize").is_some();
    let killed = |name| {
        let pending = field(status, name).and_then(|bits| u64::from_str_radix(&bits, 16).ok());
        pending.is_some_and(|bits| bits & SIGKILL != 0)
    };
    !has_memory || killed("ShdPnd") || killed("SigPnd")
}

/// Bytes of the largest private writable mapping without a file, given a /proc/PID/smaps.
fn largest_mapping(smaps: &str) -> u64 {
    let (mut largest, mut this, mut counts) = (0, 0, false);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(first), Some(second)) = (words.next(), words.next()) else { continue };
        if !first.ends_with(':') {
            // Addresses, permissions, offset, device, inode, and perhaps a path.
            this = 0;
            counts = second == "rw-p" && words.nth(2) == Some("0");
        } else if counts && matches!(first, "Rss:" | "Swap:") {
            this += second.parse::<u64>().unwrap_or(0).saturating_mul(1024);
            largest = largest.max(this);
        }
    }
    largest
}

/// Its bit in a set of signals.
const SIGKILL: u64 = 1 << (nix::libc::SIGKILL - 1);

/// A field of /proc/PID/status.
fn field(status: &[u8], name: &str) -> Option<String> {
    status.split(|&byte| byte == b'\n').find_map(|line| {
        let value = line.strip_prefix(name.as_bytes())?.strip_prefix(b":")?;
        Some(String::from_utf8_lossy(value).trim().to_owned())
    })
}

/// Its pid in each pid namespace, from that of /proc down to its own.
fn nspid(status: &[u8], pid: Pid) -> Vec<Pid> {
    field(status, "NSpid").map_or_else(
        || vec![pid],
        |ids| ids.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect(),
    )
}

/// Whether a line of /proc/PID/maps is of libcuda.
fn maps_libcuda(line: &[u8]) -> bool {
    let name = line.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    line.contains(&b'/') && name.starts_with(b"libcuda.so")
}

/// The start time of a process, `None` if there is no such process or it is a zombie.
#[must_use]
pub fn start_time(pid: Pid) -> Option<u64> {
    let stat = Stat::read(Path::new(&format!("/proc/{pid}"))).ok()?;
    (!stat.is_dead()).then_some(stat.start_time)
}

impl Processes for CgroupProcesses {
    fn list(&self) -> Result<Vec<Process>, ProcessesError> {
        let mut pids = Vec::new();
        self.pids(&self.directory, &mut pids)?;
        pids.sort_unstable();
        pids.dedup();
        let mut found = Vec::with_capacity(pids.len());
        for pid in pids {
            match self.describe(pid) {
                Ok(process) => found.extend(process),
                // Ended meanwhile.
                Err(_) if start_time(pid).is_none() => {}
                Err(source) => return Err(ProcessesError::Process { pid, source }),
            }
        }
        Ok(found)
    }

    fn lets_go(&self, tracer: Pid) -> bool {
        let read = |file| fs::read(format!("/proc/{tracer}/{file}")).unwrap_or_default();
        let helper = crate::hold::HELPER_SUBCOMMAND.as_bytes();
        read("comm").starts_with(b"criu")
            || read("cmdline").split(|&byte| byte == 0).nth(1) == Some(helper)
    }

    fn host_has_gpu(&self) -> bool {
        std::fs::read_dir("/dev").is_ok_and(|entries| {
            entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("nvidia"))
        })
    }

    fn alive(&self, id: ProcessId) -> bool {
        start_time(id.pid) == Some(id.start_time)
    }

    fn have_init(&self) -> bool {
        self.have_init
    }

    fn largest_mapping(&self, id: ProcessId) -> Option<u64> {
        let smaps = fs::read(format!("/proc/{}/smaps", id.pid)).ok()?;
        // It may have been another process's.
        self.alive(id).then(|| largest_mapping(&String::from_utf8_lossy(&smaps)))
    }

    fn ending(&self, id: ProcessId) -> bool {
        let status = fs::read(format!("/proc/{}/status", id.pid)).unwrap_or_default();
        !self.alive(id) || is_ending(&status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(devices: &[&str]) -> Process {
        Process {
            id: ProcessId { pid: 1, start_time: 1 },
            inner_pid: 1,
            command: "a".into(),
            maps_libcuda: false,
            devices: devices.iter().map(|&d| d.to_owned()).collect(),
            tracer: 0,
            parent: 0,
        }
    }

    #[test]
    fn what_a_checkpointed_process_had_on_the_gpu_is_in_its_largest_mapping() {
        const SMAPS: &str = "\
            55d0-55d1 rw-p 00000000 fe:00 77   /usr/bin/python3\n\
            Size: 9000 kB\nRss: 9000 kB\nSwap: 0 kB\nVmFlags: rd wr\n\
            7f00-7f01 ---p 00000000 00:00 0 \nRss: 8000 kB\nSwap: 0 kB\n\
            7f01-7f02 rw-p 00000000 00:00 0 \nSize: 90000 kB\nRss: 600 kB\nPss: 600 kB\nSwap: 400 kB\n\
            7f02-7f03 rw-s 00000000 00:01 9 /dev/shm/x\nRss: 7000 kB\n\
            7f03-7f04 rw-p 00000000 00:00 0 [heap]\nRss: 900 kB\nSwap: 0 kB\n";
        assert_eq!(largest_mapping(SMAPS), 1000 << 10);
        let pid = Pid::try_from(std::process::id()).unwrap();
        let own = ProcessId { pid, start_time: start_time(pid).unwrap() };
        let processes = CgroupProcesses { directory: "/".into(), level: 0, have_init: true };
        let _held = vec![1_u8; 16 << 20];
        assert!(processes.largest_mapping(own).unwrap() >= 16 << 20);
        assert_eq!(processes.largest_mapping(ProcessId { start_time: 1, ..own }), None);
    }

    #[test]
    fn what_exec_starts_does_not_descend_from_init() {
        let one =
            |pid, parent| Process { id: ProcessId { pid, start_time: 1 }, parent, ..process(&[]) };
        // 10 is init, 30 was started by exec, and 40 and 50 are each other's parents.
        let all = [
            one(10, 1),
            one(11, 10),
            one(12, 11),
            one(30, 5),
            one(31, 30),
            one(40, 50),
            one(50, 40),
        ];
        let inside: Vec<_> =
            all.iter().filter(|process| descends(&all, process, 10)).map(|p| p.id.pid).collect();
        assert_eq!(inside, [10, 11, 12]);
    }

    #[test]
    fn gpus_are_told_from_control_devices() {
        let devices = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia10", "/dev/nvidiactl"];
        assert_eq!(process(&devices).gpu_devices(), ["/dev/nvidia0", "/dev/nvidia10"]);
    }

    #[test]
    fn libcuda_is_known_with_any_version() {
        let line = |path: &[u8]| [b"7f00-7f01 r--p 00000000 fe:00 42      ", path].concat();
        assert!(maps_libcuda(&line(b"/usr/lib/libcuda.so.580.159.04")));
        assert!(maps_libcuda(&line(b"/x\xff/libcuda.so.1 (deleted)")));
        assert!(!maps_libcuda(&line(b"/x/libcudart.so.13")));
        assert!(!maps_libcuda(b"7f00-7f01 rw-p 00000000 00:00 0"));
    }

    #[test]
    fn a_name_may_be_anything() {
        let rest = "1 1 1 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        let stat = [b"7 (a) b\xff (c) R ".as_slice(), rest.as_bytes()].concat();
        let stat = Stat::parse(&stat).unwrap();
        assert_eq!((stat.command.as_str(), stat.state), ("a) b\u{fffd} (c", 'R'));
        assert_eq!(stat.start_time, 4711);
    }

    #[test]
    fn status_is_read_as_bytes() {
        let status = b"Name:\ta\xff\nNSpid:\t77\t5\t1\nTracerPid:\t9\n";
        assert_eq!(nspid(status, 77), [77, 5, 1]);
        assert_eq!(field(status, "TracerPid").unwrap(), "9");
    }

    #[test]
    fn this_process_is_alive_and_a_reused_pid_is_not() {
        let pid = nix::unistd::getpid().as_raw();
        let processes = CgroupProcesses { directory: "/".into(), level: 0, have_init: true };
        let start_time = start_time(pid).unwrap();
        assert!(processes.alive(ProcessId { pid, start_time }));
        assert!(!processes.alive(ProcessId { pid, start_time: start_time + 1 }));
    }

    #[test]
    fn children_in_nested_cgroups_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("a/b");
        std::fs::create_dir_all(&below).unwrap();
        let pid = nix::unistd::getpid().as_raw();
        std::fs::write(directory.path().join("cgroup.procs"), "").unwrap();
        std::fs::write(below.join("cgroup.procs"), format!("{pid}\n999999999\n")).unwrap();
        let processes =
            CgroupProcesses { directory: directory.path().into(), level: 0, have_init: true };
        let found = processes.list().unwrap();
        assert_eq!(found.iter().map(|p| p.id.pid).collect::<Vec<_>>(), [pid]);
    }
}
