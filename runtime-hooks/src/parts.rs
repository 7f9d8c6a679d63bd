//! What the sequences work with: everything outside stands behind a trait, so that every phase
//! and failure can be tried without a container or a GPU.

use std::time::{Duration, Instant};

use crate::cuda::{CudaState, Driver, GpuUse};
use crate::error::{Cause, Phase, Who};
use crate::freezer::Freezer;
use crate::gpu_locks::GpuLocks;
use crate::hold::{Hold, Keep, Target};
use crate::host_memory::HostMemory;
use crate::image::Image;
use crate::journal::Journal;
use crate::processes::{Pid, Process, Processes};
use crate::remap::DeviceMap;
use crate::runc::Runtime;

/// The world outside.
pub struct Parts<'a> {
    /// The NVIDIA driver.
    pub driver: &'a mut dyn Driver,
    /// Holds threads.
    pub hold: &'a mut dyn Hold,
    /// The container's freezer.
    pub freezer: &'a dyn Freezer,
    /// The container's processes.
    pub processes: &'a dyn Processes,
    /// runc.
    pub runtime: &'a mut dyn Runtime,
    /// The image directory.
    pub image: &'a mut dyn Image,
    /// What is under way.
    pub journal: &'a mut dyn Journal,
    /// Host memory, for what is on the GPU.
    pub memory: &'a dyn HostMemory,
    /// Which GPUs something is just being restored onto.
    pub gpu_locks: &'a dyn GpuLocks,
    /// Whether the caller wants the operation to end.
    pub interrupted: &'a dyn Fn() -> bool,
}

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Until all CUDA processes are locked.
    pub lock: Duration,
    /// Until all are checkpointed.
    pub checkpoint: Duration,
    /// Until there is room on the GPUs for what is to be restored.
    pub room: Duration,
    /// Until all are restored and unlocked, once there is room.
    pub restore: Duration,
}

impl Limits {
    /// From the configuration, with the container's own lock timeout.
    #[must_use]
    pub fn new(config: &stasis_config::config::Cuda, lock: Option<Duration>) -> Self {
        Self {
            lock: lock.unwrap_or(config.lock_timeout),
            checkpoint: config.checkpoint_timeout,
            room: config.restore_timeout,
            restore: config.restore_timeout,
        }
    }
}

/// A process with CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaProcess {
    /// The process.
    pub process: Process,
    /// The driver's thread in it that does checkpoint and restore.
    pub restore_thread: Pid,
    /// The state in which it was found, as soon as that is known.
    pub found: Option<CudaState>,
    /// The GPUs that it uses, with bytes, as far as NVML told: what it needs to be restored.
    pub uses: GpuUse,
    /// Onto which GPUs its memory goes when it is restored; empty for where it was.
    pub device_map: DeviceMap,
}

impl CudaProcess {
    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.process.id.pid
    }

    /// For errors.
    #[must_use]
    pub fn who(&self) -> Who {
        who(&self.process)
    }
}

/// For errors.
#[must_use]
pub(crate) fn who(process: &Process) -> Who {
    Who { pid: process.id.pid, command: process.command.clone() }
}

/// The pids of processes.
pub(crate) fn pids(processes: &[CudaProcess]) -> Vec<Pid> {
    processes.iter().map(CudaProcess::pid).collect()
}

impl Parts<'_> {
    /// What is needed to hold threads.
    pub(crate) fn holding(&mut self) -> Holding<'_> {
        Holding { hold: &mut *self.hold, processes: self.processes, freezer: self.freezer }
    }
}

/// What is needed to hold the threads of all of the container's processes.
pub(crate) struct Holding<'a> {
    pub(crate) hold: &'a mut dyn Hold,
    pub(crate) processes: &'a dyn Processes,
    pub(crate) freezer: &'a dyn Freezer,
}

impl Holding<'_> {
    /// Makes of the processes with CUDA run what `keep` says, and of the others nothing. Asks until
    /// no process is born any more; in a frozen container none is, and none comes to its stop
    /// before it is thawed.
    pub(crate) fn all(
        &mut self,
        cuda: &[CudaProcess],
        keep: impl Fn(&CudaProcess) -> Keep,
    ) -> Result<(), Cause> {
        let mut held = Vec::new();
        loop {
            let target = |process: Process| {
                let pid = process.id.pid;
                let cuda = cuda.iter().find(|cuda| cuda.pid() == pid);
                Target { pid, keep: cuda.map_or(Keep::None, &keep) }
            };
            let targets: Vec<Target> = self.processes.list()?.into_iter().map(target).collect();
            if targets == held {
                return Ok(());
            }
            self.hold.hold(&targets)?;
            held = targets;
            if !self.freezer.frozen()? {
                self.hold.settle()?;
            }
        }
    }
}

/// Which phase is under way, and how long the earlier ones took.
pub struct Progress {
    phase: Phase,
    since: Instant,
    done: Vec<(Phase, Duration)>,
    told: Box<dyn Fn(Phase)>,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").field("phase", &self.phase).finish_non_exhaustive()
    }
}

impl Progress {
    /// Begins with `phase`.
    #[must_use]
    pub fn new(phase: Phase) -> Self {
        Self::told(phase, Box::new(|_| {}))
    }

    /// The same, and `told` hears of each phase that is entered.
    #[must_use]
    pub fn told(phase: Phase, told: Box<dyn Fn(Phase)>) -> Self {
        told(phase);
        Self { phase, since: Instant::now(), done: Vec::new(), told }
    }

    /// Goes on to the next phase.
    pub fn enter(&mut self, phase: Phase) {
        let took = self.since.elapsed();
        tracing::debug!(phase = %self.phase, milliseconds = took.as_millis(), "phase done");
        self.done.push((self.phase, took));
        (self.told)(phase);
        self.phase = phase;
        self.since = Instant::now();
    }

    /// The phase under way.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The phases until now, for the manifest. One that came again is added up.
    #[must_use]
    pub fn phases(&self) -> Vec<stasis_config::manifest::Phase> {
        let mut sums: Vec<(Phase, Duration)> = Vec::new();
        for (phase, took) in self.done.iter().chain([&(self.phase, self.since.elapsed())]) {
            match sums.iter_mut().find(|(known, _)| known == phase) {
                Some((_, sum)) => *sum += *took,
                None => sums.push((*phase, *took)),
            }
        }
        sums.into_iter()
            .map(|(phase, took)| stasis_config::manifest::Phase {
                name: phase.name().to_owned(),
                milliseconds: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            })
            .collect()
    }
}
