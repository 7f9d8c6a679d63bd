//! What an operation says when it fails: one line with container, phase, cause, where the log is,
//! in which state the container was left, and what to do.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::cdi::CdiError;
use crate::config_json::ConfigFileError;
use crate::cuda::{Call, CudaError, CudaState, DriverError};
use crate::freezer::FreezerError;
use crate::hold::HoldError;
use crate::job::JobError;
use crate::journal::JournalError;
use crate::processes::{Pid, ProcessesError};
use crate::runc::RuncError;
use crate::spec::SpecError;

/// The part of an operation that is under way: in errors, logs and the manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names say it, and design and README list them")]
pub enum Phase {
    Preflight,
    Discover,
    Hold,
    Lock,
    CudaCheckpoint,
    Freeze,
    JobFile,
    CriuDump,
    Sync,
    Manifest,
    Kill,
    CriuRestore,
    DeviceNodes,
    Match,
    CudaRestore,
    Unlock,
    Resume,
    Repair,
}

impl Phase {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Preflight => "preflight",
            Self::Discover => "discover",
            Self::Hold => "hold",
            Self::Lock => "lock",
            Self::CudaCheckpoint => "cuda-checkpoint",
            Self::Freeze => "freeze",
            Self::JobFile => "job-file",
            Self::CriuDump => "criu-dump",
            Self::Sync => "sync",
            Self::Manifest => "manifest",
            Self::Kill => "kill",
            Self::CriuRestore => "criu-restore",
            Self::DeviceNodes => "device-nodes",
            Self::Match => "match",
            Self::CudaRestore => "cuda-restore",
            Self::Unlock => "unlock",
            Self::Resume => "resume",
            Self::Repair => "repair",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A process in an error: pid and command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// The pid, as the host sees it.
    pub pid: Pid,
    /// The kernel's name for it.
    pub command: String,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} ({})", self.pid, self.command)
    }
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// The driver, for one process.
    #[error("{who}: {error}{}", hint(error))]
    Driver {
        /// Which process.
        who: Who,
        /// Its words.
        error: DriverError,
    },
    /// The driver as a whole.
    #[error("{}{}", .0, hint(.0))]
    NoDriver(DriverError),
    /// The driver said it succeeded, and the state says otherwise.
    #[error("{who}: is {found} where {wanted} was expected, although the driver reported success")]
    WrongState {
        /// Which process.
        who: Who,
        /// Its state.
        found: CudaState,
        /// The state it should have.
        wanted: CudaState,
    },
    /// `restore` without `--detach`.
    #[error(
        "without --detach the runtime comes back when the container has ended, and only then its CUDA could \
         be given back: add --detach"
    )]
    NotDetached,
    /// The locks were not granted in time.
    #[error(
        "{who}: its CUDA work did not come to an end within {waited:?} ({attempts} attempts); \
         raise cuda.lock-timeout or annotation dev.stasis.lock-timeout if its kernels run longer"
    )]
    NotReady {
        /// The first that was not ready.
        who: Who,
        /// For how long it was tried.
        waited: std::time::Duration,
        /// How often.
        attempts: u32,
    },
    /// A process is already in a state from which nothing can be done.
    #[error("{who}: its CUDA is in state {state}; it cannot be checkpointed any more")]
    Unusable {
        /// Which process.
        who: Who,
        /// Its state.
        state: CudaState,
    },
    /// It holds the GPU and is not CUDA's.
    #[error(
        "{who}: has {} open but no CUDA that could be checkpointed (it uses NVML or graphics only, \
         or was forked by a CUDA process, or is just starting); CRIU cannot dump it: end it, have it \
         close the device, or try again",
        devices.join(", ")
    )]
    DeviceHolder {
        /// Which process.
        who: Who,
        /// The device files.
        devices: Vec<String>,
    },
    /// Not in CRIU's dump.
    #[error(
        "{who}: was started in the container by exec and does not descend from its first process; \
         CRIU dumps only what does, so a restore would lack it: end it, or have it started in the \
         background by a process that ends, whereupon it becomes the first one's"
    )]
    Stray {
        /// Which process.
        who: Who,
    },
    /// A debugger.
    #[error("{who}: is traced by pid {tracer}; end the debugger first")]
    Traced {
        /// Which process.
        who: Who,
        /// By whom.
        tracer: Pid,
    },
    /// More than one CUDA process.
    #[error(
        "{count} processes use CUDA ({list}); GPU memory that they share would be lost at restore, \
         and the driver does not tell. If they share some (cuIpcGetMemHandle), start the container \
         with the annotation dev.stasis.job=file, which needs driver branch {minimum} or later{}; if \
         they share none (for NCCL: NCCL_P2P_DISABLE=1), with dev.stasis.multi-process=allow",
        if *given { " (it has a job file, but they were started without its variable)" } else { "" }
    )]
    MultiProcess {
        /// How many.
        count: usize,
        /// Which.
        list: String,
        /// The first branch of the driver whose jobs are relied on.
        minimum: u32,
        /// Whether the container was given a job file.
        given: bool,
    },
    /// One process on more than one GPU.
    #[error(
        "{who}: uses {gpus} GPUs; peer memory can be lost at restore, and the driver does not tell. \
         Start the container with the annotation dev.stasis.job=file, which needs driver branch \
         {minimum} or later, or if it uses no peer memory with dev.stasis.multi-gpu=allow"
    )]
    MultiGpu {
        /// Which process.
        who: Who,
        /// How many.
        gpus: usize,
        /// The first branch of the driver whose jobs are relied on.
        minimum: u32,
    },
    /// What processes or GPUs shared did not come back.
    #[error(
        "{who}: {error}: GPU memory that it shared with another process or GPU is lost. The driver \
         keeps such memory from branch 610 on, and only in a job (annotation dev.stasis.job=file); the \
         image cannot bring it back either"
    )]
    SharedLost {
        /// Which process.
        who: Who,
        /// The driver's words.
        error: DriverError,
    },
    /// It was killed, or came to its end by itself.
    #[error(
        "{who}: ended meanwhile, so that it would be lacking afterwards; try again if the container goes on \
         without it"
    )]
    Ended {
        /// Which process.
        who: Who,
    },
    /// The driver does not restore onto these GPUs.
    #[error(
        "{who}: {error}: the driver does not restore it onto the other GPUs; they have to be of the same \
         chip, and the container has to have their device nodes and may use them"
    )]
    NotThere {
        /// Which process.
        who: Who,
        /// The driver's words.
        error: DriverError,
    },
    /// Somebody else was faster.
    #[error("it was paused meanwhile by somebody else: try again")]
    Paused,
    /// Some of a container's processes came onto other GPUs, and some did not.
    #[error(
        "only some of its processes have come to the other GPUs that it was to be resumed on: stasis resume \
         it first, which brings the others there"
    )]
    HalfMoved,
    /// It has something on a GPU, which stays where it is.
    #[error(
        "{who}: its CUDA is not suspended, and does not go to another GPU: stasis resume the container \
         without --to and --device-map first, and suspend it again"
    )]
    OnGpu {
        /// Which process.
        who: Who,
    },
    /// Host memory would not hold what is on the GPU.
    #[error(
        "the {} MiB that its processes have on the GPU go to host memory, and {of} has room for {} MiB: \
         raise that limit or free memory; cuda.check-host-memory = false in config.toml has it tried all \
         the same, which may end with the kernel killing the container",
        needed.div_ceil(1 << 20), room >> 20
    )]
    NoHostMemory {
        /// Bytes.
        needed: u64,
        /// Bytes.
        room: u64,
        /// Whose limit it is.
        of: String,
    },
    /// CUDA appeared in a new process all the time.
    #[error("{who}: began to use CUDA while the container was being suspended")]
    Appeared {
        /// The last one.
        who: Who,
    },
    /// Mounts that config.json does not know.
    #[error(
        "mounted in the container but not in its config.json: {}; CRIU cannot dump that. NVIDIA's \
         legacy runtime hook mounts this way. Switch to CDI (nvidia-ctk cdi generate \
         --output=/etc/cdi/nvidia.yaml, and mode = \"cdi\" under [nvidia-container-runtime] in \
         /etc/nvidia-container-runtime/config.toml) and create the container anew",
        .0.join(", ")
    )]
    UnknownMounts(Vec<String>),
    /// An option that cannot go with CUDA.
    #[error("{0} cannot be used for a container with CUDA processes")]
    Option(&'static str),
    /// The image directory.
    #[error("image {}: {reason}", path.display())]
    Image {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The image needs what this host or the new spec does not have.
    #[error("image {}: {reason}", path.display())]
    Needs {
        /// The directory.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// The caller sent a signal.
    #[error("interrupted")]
    Interrupted,
    /// The container's processes are gone.
    #[error("the container was killed meanwhile")]
    Gone,
    /// A restored process is not there.
    #[error("the image's CUDA process {inner_pid} ({command}) is not in the restored container")]
    NotRestored {
        /// Its pid inside.
        inner_pid: Pid,
        /// Its name.
        command: String,
    },
    /// There is not enough GPU memory for the process's data.
    #[error(
        "GPU {gpu} has {} MiB free and {} MiB are needed: end or move what uses it",
        free >> 20, needed >> 20
    )]
    NoRoom {
        /// UUID.
        gpu: String,
        /// Bytes.
        needed: u64,
        /// Bytes.
        free: u64,
    },
    /// A GPU on which memory is needed has gone.
    #[error(
        "GPU {gpu}, where its memory is to go, does not answer (nvidia-smi and the kernel's log say more)"
    )]
    SilentGpu {
        /// UUID.
        gpu: String,
    },
    /// Some of a job runs.
    #[error(
        "{on}: has begun to use CUDA since {off} was suspended. The members of a job come back in the \
         order in which they were suspended, so the one could not go on before the other: stasis resume \
         the container first, or stasis suspend it once more, which suspends that one, too"
    )]
    JobInParts {
        /// One that is on the GPU.
        on: Who,
        /// One that is not.
        off: Who,
    },
    /// Nobody knows in which order the members of a job were suspended.
    #[error(
        "{who}: was suspended by something else than Stasis. The members of a job come back in the order \
         in which they were suspended, which only that something knows: have it resume them first"
    )]
    JobOrder {
        /// One of them.
        who: Who,
    },
    /// Nothing is known of the container.
    #[error("{0}")]
    Container(String),
    /// Its CUDA did not come back after a good dump, or at Resume.
    #[error("its CUDA did not come back: {reason}")]
    NotBack {
        /// Why.
        reason: String,
        /// Whether a restore of the image meets the same.
        image_too: bool,
    },
    /// A restored process has CUDA, and the manifest does not know.
    #[error(
        "{who}: has CUDA, but the image's manifest does not name it: the manifest is not this image's"
    )]
    NotInManifest {
        /// Which process.
        who: Who,
    },
    /// The container still runs after it was killed.
    #[error("the container did not end within {0:?} after it was killed")]
    DoesNotDie(std::time::Duration),
    /// See there.
    #[error(transparent)]
    Hold(#[from] HoldError),
    /// See there.
    #[error("{}", chain(.0))]
    Freezer(#[from] FreezerError),
    /// See there.
    #[error("{}", chain(.0))]
    Processes(#[from] ProcessesError),
    /// See there.
    #[error("{}", chain(.0))]
    ConfigFile(#[from] ConfigFileError),
    /// See there.
    #[error(transparent)]
    Job(#[from] JobError),
    /// See there.
    #[error("{}", chain(.0))]
    Journal(#[from] JournalError),
    /// See there.
    #[error(transparent)]
    Runc(#[from] RuncError),
    /// See there.
    #[error("{}", chain(.0))]
    Spec(#[from] SpecError),
    /// See there.
    #[error("{}", chain(.0))]
    Cdi(#[from] CdiError),
    /// See there.
    #[error("{}", chain(.0))]
    Manifest(#[from] stasis_config::ManifestError),
    /// See there.
    #[error("{}", chain(.0))]
    Annotation(#[from] stasis_config::AnnotationError),
}

impl Cause {
    /// Whether the driver has lost what a process had on the GPU: no later restore brings it back.
    /// A restore that has returned 2 returns 304 from then on, also when memory is free again, and so it
    /// does after 1 for shared memory; a toggle the same (measured on 580).
    pub(crate) fn is_loss(&self) -> bool {
        match self {
            Self::SharedLost { .. } | Self::Unusable { .. } => true,
            Self::Driver { error: DriverError::Refused { call, error }, .. } => {
                matches!(call, Call::Restore | Call::Toggle)
                    && matches!(*error, CudaError::OUT_OF_MEMORY | CudaError::OPERATING_SYSTEM)
            }
            _ => false,
        }
    }

    /// For CUDA that did not come back from a good dump.
    pub(crate) fn not_back(cause: &Self) -> Self {
        let image_too = matches!(cause, Self::SharedLost { .. });
        Self::NotBack { reason: cause.to_string(), image_too }
    }
}

/// An error and its sources on one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// What a driver's code is known to mean for a checkpoint.
fn hint(error: &DriverError) -> &'static str {
    match (error, error.code()) {
        (_, Some(CudaError::NOT_SUPPORTED)) => {
            " (managed memory, cudaMallocManaged, cannot be checkpointed by the driver)"
        }
        (_, Some(CudaError::OUT_OF_MEMORY)) => {
            " (not enough free GPU memory, or host memory, for the process's data)"
        }
        (DriverError::NoLibrary(_), _) => {
            "; set cuda.libcuda in config.toml if the driver is in an unusual place"
        }
        _ => "",
    }
}

/// In which state a failed operation left the container.
#[derive(Debug)]
pub enum Left {
    /// Nothing was touched.
    Untouched,
    /// Put back: running as before.
    Running,
    /// Put back: paused as before.
    Paused,
    /// Its CUDA is suspended, all of it.
    Suspended,
    /// Some of its CUDA is suspended, and the rest did not answer.
    HalfSuspended,
    /// There is no such container any more: it was killed by somebody else.
    Gone,
    /// It could not be put back and was killed.
    Killed {
        /// Why it could not be put back.
        because: Box<Cause>,
    },
    /// It could not be put back, and killing it failed too.
    Broken {
        /// Why it could not be put back.
        because: Box<Cause>,
        /// Why it could not be killed.
        kill: Box<Cause>,
    },
    /// The restored container was removed.
    Removed,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Untouched => f.write_str("the container was not touched"),
            Self::Running => f.write_str("the container runs on as before"),
            Self::Paused => f.write_str("the container is paused as before"),
            Self::HalfSuspended => f.write_str(
                "it is not known whether all of its CUDA is suspended, and nothing is known to be lost: \
                 stasis repair, or the next operation on it, puts it right",
            ),
            Self::Suspended => f.write_str(
                "its CUDA is suspended and nothing is lost: stasis resume it later",
            ),
            Self::Gone => f.write_str("the container is gone"),
            Self::Killed { because } => {
                write!(f, "the container could not be brought back ({because}) and was killed")
            }
            Self::Broken { because, kill } => write!(
                f,
                "the container could not be put back ({because}) and not be killed ({kill}): \
                 delete it by force"
            ),
            Self::Removed => f.write_str("what had been restored was killed"),
        }
    }
}

/// A failed operation.
#[derive(Debug)]
pub struct Failure {
    /// `checkpoint`, `restore`, `resume`.
    pub operation: &'static str,
    /// The container.
    pub container: String,
    /// How far it was.
    pub phase: Phase,
    /// Why.
    pub cause: Cause,
    /// What became of the container.
    pub left: Left,
    /// An image that is whole in spite of the failure.
    pub image: Option<PathBuf>,
    /// CRIU's log, where it lasts.
    pub log: Option<PathBuf>,
}

impl Failure {
    /// Names an image that is whole.
    #[must_use]
    pub fn with_image(mut self, image: &Path) -> Self {
        self.image = Some(image.to_owned());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, container, phase, cause, left, image, log } = self;
        let restorable = !matches!(cause, Cause::NotBack { image_too: true, .. });
        // Callers show one line only.
        let cause = cause.to_string().replace('\n', " ");
        write!(f, "stasis: {operation} of container {container} failed in phase {phase}: {cause}")?;
        match (&self.cause, left) {
            // The same reason once is enough.
            (Cause::NotBack { .. }, Left::Killed { .. }) => {
                f.write_str("; the container was killed")?;
            }
            _ => write!(f, "; {left}")?,
        }
        if let Some(image) = image {
            let image = image.display();
            if restorable {
                write!(f, "; the image in {image} is whole and can be restored")?;
            } else {
                write!(f, "; the image in {image} is kept")?;
            }
        }
        if let Some(log) = log {
            write!(f, "; CRIU's log: {}", log.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Call;

    #[test]
    fn a_failure_says_all_on_one_line() {
        let error = DriverError::Refused { call: Call::Checkpoint, error: CudaError(801) };
        let failure = Failure {
            operation: "checkpoint",
            container: "c1".into(),
            phase: Phase::CudaCheckpoint,
            cause: Cause::Driver { who: Who { pid: 7, command: "train".into() }, error },
            left: Left::Running,
            image: None,
            log: Some("/var/log/stasis/c1.log".into()),
        };
        assert_eq!(
            failure.to_string(),
            "stasis: checkpoint of container c1 failed in phase cuda-checkpoint: pid 7 (train): \
             cuCheckpointProcessCheckpoint returned 801 (CUDA_ERROR_NOT_SUPPORTED) (managed memory, \
             cudaMallocManaged, cannot be checkpointed by the driver); the container runs on as \
             before; CRIU's log: /var/log/stasis/c1.log"
        );
    }
}
