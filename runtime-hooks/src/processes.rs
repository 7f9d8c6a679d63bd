//! The processes of a container, and which of them may have CUDA.

use std::path::{Path, PathBuf};

use procfs::process::{FDTarget, MMapPath, Process as ProcProcess};
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

/// Looks processes up.
pub trait Processes {
    /// All processes in the container's cgroup and below it that live in the container's pid
    /// namespace or one below.
    fn list(&self) -> Result<Vec<Process>, ProcessesError>;

    /// Whether this host has a GPU's device file at all.
    fn host_has_gpu(&self) -> bool;

    /// Whether the process still runs: not ended, no zombie, and not another one of that pid.
    fn alive(&self, id: ProcessId) -> bool;
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
        source: procfs::ProcError,
    },
}

/// [`Processes`] from cgroupfs and procfs.
#[derive(Debug)]
pub struct CgroupProcesses {
    directory: PathBuf,
    /// How many pid namespaces lie between this process and the container's init.
    level: usize,
}

impl CgroupProcesses {
    /// `directory` is the container's cgroup in a mounted hierarchy.
    pub fn new(directory: &Path, init: Pid) -> Result<Self, ProcessesError> {
        let inner = nspid(init).map_err(|source| ProcessesError::Process { pid: init, source })?;
        Ok(Self { directory: directory.to_owned(), level: inner.len().saturating_sub(1) })
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
                        error.raw_os_error().map(nix::errno::Errno::from_raw),
                        Some(
                            nix::errno::Errno::ENOENT
                                | nix::errno::Errno::ENODEV
                                | nix::errno::Errno::EOPNOTSUPP
                        )
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

    fn describe(&self, pid: Pid) -> Result<Option<Process>, procfs::ProcError> {
        let process = ProcProcess::new(pid)?;
        let stat = process.stat()?;
        let status = process.status()?;
        let ids = status.nspid.unwrap_or_else(|| vec![pid]);
        // Fewer levels: a process of the host in the container's cgroup (`runc exec` on its way).
        let Some(&inner_pid) = ids.get(self.level) else {
            return Ok(None);
        };
        if matches!(stat.state, 'Z' | 'X') {
            return Ok(None);
        }
        let maps_libcuda = process.maps()?.into_iter().any(|map| match map.pathname {
            MMapPath::Path(path) => is_libcuda(&path),
            _ => false,
        });
        let mut devices: Vec<String> = process
            .fd()?
            .filter_map(|fd| match fd.ok()?.target {
                FDTarget::Path(path) => path.to_str().map(str::to_owned),
                _ => None,
            })
            .filter(|path| path.starts_with(DEVICE_PREFIX))
            .collect();
        devices.sort_unstable();
        devices.dedup();
        Ok(Some(Process {
            id: ProcessId { pid, start_time: stat.starttime },
            inner_pid,
            command: stasis_config::text::printable(&stat.comm, COMMAND),
            maps_libcuda,
            devices,
            tracer: status.tracerpid,
        }))
    }
}

fn nspid(pid: Pid) -> Result<Vec<Pid>, procfs::ProcError> {
    Ok(ProcProcess::new(pid)?.status()?.nspid.unwrap_or_else(|| vec![pid]))
}

fn is_libcuda(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("libcuda.so"))
}

/// The start time of a process, `None` if there is no such process or it is a zombie.
#[must_use]
pub fn start_time(pid: Pid) -> Option<u64> {
    let stat = ProcProcess::new(pid).ok()?.stat().ok()?;
    (!matches!(stat.state, 'Z' | 'X')).then_some(stat.starttime)
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
                Err(procfs::ProcError::NotFound(_)) => {}
                Err(_) if start_time(pid).is_none() => {}
                Err(source) => return Err(ProcessesError::Process { pid, source }),
            }
        }
        Ok(found)
    }

    fn host_has_gpu(&self) -> bool {
        std::fs::read_dir("/dev").is_ok_and(|entries| {
            entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("nvidia"))
        })
    }

    fn alive(&self, id: ProcessId) -> bool {
        start_time(id.pid) == Some(id.start_time)
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
        }
    }

    #[test]
    fn gpus_are_told_from_control_devices() {
        let devices = ["/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia10", "/dev/nvidiactl"];
        assert_eq!(process(&devices).gpu_devices(), ["/dev/nvidia0", "/dev/nvidia10"]);
    }

    #[test]
    fn libcuda_is_known_with_any_version() {
        assert!(is_libcuda(Path::new("/usr/lib/libcuda.so.580.159.04")));
        assert!(is_libcuda(Path::new("/x/libcuda.so.1")));
        assert!(!is_libcuda(Path::new("/x/libcudart.so.13")));
    }

    #[test]
    fn this_process_is_alive_and_a_reused_pid_is_not() {
        let pid = nix::unistd::getpid().as_raw();
        let processes = CgroupProcesses { directory: "/".into(), level: 0 };
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
        let processes = CgroupProcesses { directory: directory.path().into(), level: 0 };
        let found = processes.list().unwrap();
        assert_eq!(found.iter().map(|p| p.id.pid).collect::<Vec<_>>(), [pid]);
    }
}
