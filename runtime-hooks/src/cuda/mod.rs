//! CUDA checkpointing as the rest of the program sees it.
//!
//! `Driver` is the only way to the driver. Behind it, [`client`] starts a short-lived helper
//! process (this executable again, hidden subcommand [`HELPER_SUBCOMMAND`]) that loads libcuda,
//! because a driver call can hang for ever and a hung call can only be ended with its process. Where
//! libcuda does not have the functions, before 570, the helper has NVIDIA's command make the calls.
//!
//! The facts that this module relies on are NVIDIA's `cuCheckpointProcess*` API of `cuda.h`
//! and measurements on driver 580 (H200).

mod all_or_none;
mod back_end;
pub mod client;
mod ffi;
pub mod helper;
pub mod job;
mod job_file;
mod nvml;
mod protocol;
pub mod search;
pub mod sides;
mod together;
mod toggled;
pub(crate) mod utility;
mod words;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::processes::{Pid, ProcessId};
use job::{Copied, Job, Named, Neighbour, Unusable};
pub(crate) use job_file::digest;

/// First argument that makes this executable the driver helper.
pub const HELPER_SUBCOMMAND: &str = "__driver";

/// The CUDA state of a process: `CUprocessState` of `cuda.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CudaState {
    /// CUDA calls run.
    Running,
    /// CUDA calls that start work block; what was submitted is done.
    Locked,
    /// The state of the GPU is in host memory; the GPU is released.
    Checkpointed,
    /// The driver gave up on this process.
    Failed,
    /// A value that this version does not know (13.4 has CHECKPOINTING and RESTORING).
    Unknown(i32),
    /// Running or locked, by a driver that cannot be asked ([`Steps::Toggle`]): its last step was
    /// refused, or lost. It cannot be unlocked then.
    Undetermined,
}

impl CudaState {
    /// From the value of `CUprocessState`.
    #[must_use]
    pub const fn from_raw(raw: i32) -> Self {
        match raw {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            3 => Self::Failed,
            other => Self::Unknown(other),
        }
    }

    /// CHECKPOINTING or RESTORING, which CUDA 13.4 and later tell (read in its `cuda.h`): another state
    /// follows by itself.
    #[must_use]
    pub const fn passes(self) -> bool {
        matches!(self, Self::Unknown(4 | 5))
    }
}

impl fmt::Display for CudaState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("RUNNING"),
            Self::Locked => f.write_str("LOCKED"),
            Self::Checkpointed => f.write_str("CHECKPOINTED"),
            Self::Failed => f.write_str("FAILED"),
            Self::Unknown(raw) => write!(f, "state {raw}"),
            Self::Undetermined => f.write_str("RUNNING or LOCKED (told only from driver 555 on)"),
        }
    }
}

/// A call to the driver. Its name in errors is the driver's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Call {
    /// Load the library and `cuInit`.
    Init,
    /// `cuCheckpointProcessGetRestoreThreadId`.
    Probe,
    /// `cuCheckpointProcessGetState`.
    State,
    /// `cuCheckpointProcessLock`.
    Lock,
    /// `cuCheckpointProcessCheckpoint`.
    Checkpoint,
    /// `cuCheckpointProcessRestore`.
    Restore,
    /// `cuCheckpointProcessUnlock`.
    Unlock,
    /// Lock and checkpoint, or restore and unlock, in one step, by NVIDIA's command.
    Toggle,
    /// NVML: which GPUs the processes use.
    Usage,
    /// NVML: how much memory of the GPUs is free.
    FreeMemory,
    /// None of the driver's: which job files processes name.
    JobFiles,
    /// None of the driver's: a copy of the live job file.
    CopyJobFile,
}

impl Call {
    /// The name of the driver's function.
    #[must_use]
    pub fn function(self) -> &'static str {
        match self {
            Self::Init => "cuInit",
            Self::Probe => "cuCheckpointProcessGetRestoreThreadId",
            Self::State => "cuCheckpointProcessGetState",
            Self::Lock => "cuCheckpointProcessLock",
            Self::Checkpoint => "cuCheckpointProcessCheckpoint",
            Self::Restore => "cuCheckpointProcessRestore",
            Self::Unlock => "cuCheckpointProcessUnlock",
            Self::Toggle => "cuda-checkpoint --toggle",
            Self::Usage => "nvmlDeviceGetComputeRunningProcesses",
            Self::FreeMemory => "nvmlDeviceGetMemoryInfo",
            Self::JobFiles => "the search for a job file",
            Self::CopyJobFile => "the copy of the job file",
        }
    }

    /// The first driver branch that has the function.
    #[must_use]
    pub fn since(self) -> u32 {
        match self {
            Self::Init | Self::Usage | Self::FreeMemory | Self::JobFiles | Self::CopyJobFile => 0,
            Self::Toggle => 550,
            _ => 570,
        }
    }
}

/// A result code of the driver that is not success: `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaError(pub i32);

impl CudaError {
    /// `CUDA_ERROR_INVALID_VALUE`: for a restore, what the process had is lost (measured on 580 for
    /// memory shared with another process or GPU), or its GPU or job is not there.
    pub const INVALID_VALUE: Self = Self(1);
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_NOT_INITIALIZED`: for a checkpoint call, the process has no CUDA.
    pub const NOT_INITIALIZED: Self = Self(3);
    /// `CUDA_ERROR_OPERATING_SYSTEM`: for a checkpoint call, there is no such process.
    pub const OPERATING_SYSTEM: Self = Self(304);
    /// `CUDA_ERROR_ILLEGAL_STATE`: the process is not in the state that the call starts from.
    pub const ILLEGAL_STATE: Self = Self(401);
    /// `CUDA_ERROR_NOT_READY`: the lock's time was up.
    pub const NOT_READY: Self = Self(600);
    /// `CUDA_ERROR_NOT_SUPPORTED`: for a checkpoint, managed memory for example.
    pub const NOT_SUPPORTED: Self = Self(801);
    /// `CUDA_ERROR_TIMEOUT`.
    pub const TIMEOUT: Self = Self(909);

    fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            34 => "CUDA_ERROR_STUB_LIBRARY",
            100 => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            401 => "CUDA_ERROR_ILLEGAL_STATE",
            600 => "CUDA_ERROR_NOT_READY",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            909 => "CUDA_ERROR_TIMEOUT",
            999 => "CUDA_ERROR_UNKNOWN",
            _ => return None,
        })
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{} ({name})", self.0),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Why the driver did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// The driver answered with a code.
    #[error("{} returned {error}", call.function())]
    Refused {
        /// What was called.
        call: Call,
        /// What it returned.
        error: CudaError,
    },
    /// The call did not come back in time; the helper was killed.
    #[error("{} did not return within {after:?}; the calling helper was killed", call.function())]
    Deadline {
        /// What was called.
        call: Call,
        /// How long was waited.
        after: Duration,
    },
    /// The helper ended in the middle of the call.
    #[error("the driver helper ended during {}: {how}", call.function())]
    HelperLost {
        /// What was called.
        call: Call,
        /// Its exit status and last words.
        how: String,
    },
    /// NVIDIA's command said something that is not understood.
    #[error("{} by NVIDIA's command: {how}", call.function())]
    Utility {
        /// What was called.
        call: Call,
        /// Its words.
        how: String,
    },
    /// NVIDIA's command is to be used and cannot be.
    #[error("NVIDIA's command cannot be used: {0}")]
    NoUtility(String),
    /// CRIU could not have dumped the process; it runs on as before.
    #[error(
        "{} left it with an NVIDIA device open, so it was brought back at once; if it uses NVML beside \
         CUDA, that needs driver 570 or later",
        call.function()
    )]
    BroughtBack {
        /// What was called.
        call: Call,
    },
    /// Others, which it may be waited for by, were not ready; it runs on as before.
    #[error("{}: brought back, since other processes were not ready in time", call.function())]
    OthersNotReady {
        /// What was called.
        call: Call,
    },
    /// The process is where the call leads; nothing was done.
    #[error("{}: there is nothing to do", call.function())]
    AlreadyThere {
        /// What was called.
        call: Call,
    },
    /// The library was not found or could not be loaded.
    #[error("no usable libcuda.so.1: {0}")]
    NoLibrary(String),
    /// The live job file of the container cannot be used.
    #[error("the container's job file {0}")]
    JobFile(String),
    /// The library has no such function.
    #[error(
        "this driver ({driver}) cannot checkpoint: libcuda has no {}, which needs driver {} or later{}",
        call.function(), call.since(), instead.as_deref().map(instead_of_library).unwrap_or_default()
    )]
    Unsupported {
        /// What was called.
        call: Call,
        /// The driver's version, as far as it is known.
        driver: String,
        /// Why NVIDIA's command is not used instead.
        instead: Option<String>,
    },
}

fn instead_of_library(why: &str) -> String {
    format!("; from {} on NVIDIA's command can, but {why}", Call::Toggle.since())
}

impl DriverError {
    /// The driver's code, if the driver answered.
    #[must_use]
    pub fn code(&self) -> Option<CudaError> {
        match self {
            Self::Refused { error, .. } => Some(*error),
            Self::OthersNotReady { .. } => Some(CudaError::NOT_READY),
            // As the driver says of a process that is not where the call begins.
            Self::AlreadyThere { .. } => Some(CudaError::ILLEGAL_STATE),
            _ => None,
        }
    }
}

/// One answer for each pid that was asked about.
pub type Answers<T> = BTreeMap<Pid, Result<T, DriverError>>;

/// A GPU of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its number in NVML's list, by which nvidia-smi calls it.
    pub index: u32,
    /// `GPU-…` as NVML and nvidia-smi print it.
    pub uuid: String,
    /// Product name.
    pub name: String,
    /// Bytes of memory; 0 for one that shares the host's.
    pub memory_bytes: u64,
    /// The number of its device node, /dev/nvidiaN; none if NVML does not tell.
    #[serde(default)]
    pub minor: Option<u32>,
}

impl From<Gpu> for stasis_config::manifest::Gpu {
    fn from(gpu: Gpu) -> Self {
        Self { uuid: gpu.uuid, name: gpu.name, memory_bytes: gpu.memory_bytes }
    }
}

/// Which steps the driver offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Steps {
    /// Each by itself, and the state is told: from 555 on.
    #[default]
    Separate,
    /// Lock and checkpoint are one step, restore and unlock are one, and no state is told: 550 to 554.
    /// What such a step leaves LOCKED, when it is refused or lost, cannot be unlocked by any means
    /// (a refused one does on 580, and a toggle of a LOCKED process is refused; both measured).
    Toggle,
}

/// What the driver of this host is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DriverFacts {
    /// Which library was loaded.
    pub library: PathBuf,
    /// `cuDriverGetVersion`: 13000 is CUDA 13.0.
    pub cuda_version: u32,
    /// NVML's driver version, `580.159.04`; none without NVML.
    pub driver_version: Option<String>,
    /// The GPUs, as NVML lists them; empty without NVML.
    pub gpus: Vec<Gpu>,
    /// Functions of the checkpoint API that the library does not have; none where NVIDIA's command
    /// is used instead.
    pub missing: Vec<String>,
    /// NVIDIA's command, where it makes the calls.
    #[serde(default)]
    pub utility: Option<PathBuf>,
    /// Why it does not, where the library cannot either.
    #[serde(default)]
    pub no_utility: Option<String>,
    /// Which steps there are.
    #[serde(default)]
    pub steps: Steps,
}

/// Which GPUs a process uses, and how much of them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GpuUse {
    /// UUID and bytes for each GPU on which the process has a context.
    pub gpus: Vec<(String, Option<u64>)>,
}

impl DriverFacts {
    /// The driver's branch: 580 for 580.159.04. None if the version is not known.
    #[must_use]
    pub fn branch(&self) -> Option<u32> {
        self.driver_version.as_deref()?.split('.').next()?.parse().ok()
    }

    /// That this driver does not have `call`.
    #[must_use]
    pub fn unsupported(&self, call: Call) -> DriverError {
        let cuda = format!("CUDA {}.{}", self.cuda_version / 1000, self.cuda_version % 1000 / 10);
        let driver = match &self.driver_version {
            Some(version) => format!("{version}, {cuda}"),
            None => cuda,
        };
        DriverError::Unsupported { call, driver, instead: self.no_utility.clone() }
    }
}

/// The driver of this host. Every method comes back within its limit.
///
/// In a job ([`Driver::join`]) the calls for several processes are made one after the other, in the
/// order in which the processes are given, and the first that fails ends it: the rest is not asked.
/// Locks are asked for all the same, each with the whole time.
pub trait Driver {
    /// Loads the driver, if that was not done yet, and says what it is.
    fn facts(&mut self) -> Result<DriverFacts, DriverError>;

    /// Which steps it offers.
    fn steps(&mut self) -> Result<Steps, DriverError> {
        self.facts().map(|facts| facts.steps)
    }

    /// The restore thread of each process (in this process's pid namespace); `None` for a process
    /// without CUDA or one that is gone. The one call that also answers for frozen processes.
    fn probe(&mut self, pids: &[Pid]) -> Answers<Option<Pid>>;

    /// The state of each process; with [`Steps::Toggle`] whether it is CHECKPOINTED. Blocks for as long as an operation on the process goes on,
    /// also one whose caller was killed, so `limit` should be that of the operation.
    fn states(&mut self, pids: &[Pid], limit: Duration) -> Answers<CudaState>;

    /// Locks all together, within `timeout`. One that is granted while others are not is unlocked
    /// for moments, in which it launches what they may be waiting for. If not all are granted at
    /// once, `waiting` is called, once, while the locks stay requested.
    ///
    /// With [`Steps::Toggle`] this checkpoints, too, and takes as long as both may, since the step has
    /// no timeout of its own; one that is CHECKPOINTED stays so. If some are late the others are brought
    /// back, for which there is the time of a restore, and `waiting` is called again, since they have to
    /// run for those. After a success it is certain that the process is not LOCKED, whatever an earlier
    /// step had left.
    fn lock(&mut self, pids: &[Pid], timeout: Duration, waiting: &mut dyn FnMut()) -> Answers<()>;

    /// Checkpoints all at the same moment.
    fn checkpoint(&mut self, pids: &[Pid], limit: Duration) -> Answers<()>;

    /// Restores all at the same moment.
    fn restore(&mut self, pids: &[Pid], limit: Duration) -> Answers<()>;

    /// Unlocks all at the same moment.
    fn unlock(&mut self, pids: &[Pid], limit: Duration) -> Answers<()>;

    /// The job file that each of `processes` names in its environment; `None` where it names none.
    /// `neighbours` are all processes of the container, `init` is its first. Works on frozen ones.
    fn job_files(
        &mut self,
        processes: &[ProcessId],
        init: ProcessId,
        neighbours: &[Neighbour],
    ) -> Result<BTreeMap<Pid, Result<Option<Named>, Unusable>>, DriverError>;

    /// From now on a restore puts what was on the first GPU of each pair, by UUID, onto the second. With
    /// no pairs everything goes back to where it was.
    fn map_devices(&mut self, map: &[(String, String)]);

    /// An earlier operation has left these CHECKPOINTED, and they may have opened an NVIDIA device since,
    /// for something else. It matters only to a driver that cannot be asked ([`Steps::Toggle`]), by which
    /// they would be taken for RUNNING. Of one that has come back since it need not be true: what it is
    /// asked next says otherwise.
    fn recall(&mut self, suspended: &[Pid]);

    /// From now on every call is made in this job, or in none.
    fn join(&mut self, job: Option<&Job>);

    /// Copies the live file of a job to a new file of this host, if `to` is given, and takes its
    /// digest. Nobody has to be in the job for it.
    fn copy_job_file(
        &mut self,
        job: &Job,
        to: Option<&std::path::Path>,
        limit: Duration,
    ) -> Result<Copied, DriverError>;

    /// NVML's list of the GPUs that each process uses; `None` without NVML.
    fn usage(&mut self, pids: &[Pid]) -> Option<BTreeMap<Pid, GpuUse>>;

    /// NVML's free bytes of each GPU, by UUID; `None` without NVML.
    fn free_memory(&mut self) -> Option<BTreeMap<String, u64>>;
}
