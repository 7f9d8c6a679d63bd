//! An emulated `libcuda.so.1` and `libnvidia-ml.so.1` for machines without a GPU.
//!
//! It behaves as driver 580 was measured, the awkward parts included, so that
//! tests fail where the real driver would fail. What other branches do is assumed
//! from NVIDIA's words, and where there are none to be as on 580:
//!
//! | branch | |
//! |---|---|
//! | 550 | no checkpoint API; the command `cuda-checkpoint` has `--toggle` alone |
//! | 555 | the command's other steps |
//! | 570 | the checkpoint API |
//! | 580 | a restore onto another GPU |
//! | 590 | jobs |
//! | 610 | memory that processes of a job share comes back |
//!
//! `STORE/config` says which branch it is. What a library exports cannot change while it is
//! loaded, so there are two: `stasis-emulated-gpu-550` is built from the same sources without the
//! feature `checkpoint-api`. Both serve the same store. A process with either is checkpointed by
//! its own restore thread, whoever asks, so one command `cuda-checkpoint` does for all branches.
//!
//! - `cuInit` starts the restore thread (named `cuda` and 11 digits), the first
//!   context `cuda-EvtHandlr`. The restore thread does all checkpoint work, so a
//!   frozen process answers nothing and no timeout fires. A lock needs both
//!   threads, everything else the restore thread alone.
//! - A restore that fails for want of memory is final: 304 from then on, also when
//!   there is room again. So is one of memory that another process shares with this
//!   one, but for driver 610 in a job (module `job`).
//! - Device memory is not in the process. It is kept in files of the *store*
//!   under the process's key: pid namespace and pid inside it. The key is
//!   computed again at each use, since a CRIU restore changes it.
//! - Requests and replies are plain files that are polled. A checkpointed
//!   process holds no descriptor and no mapping of the device or the store.
//! - Memory opened by an IPC handle stays in the exporter's files, found by the
//!   exporter's pid in this process's pid namespace.
//! - Kernels are known by name ([`KERNELS`]): there is no PTX interpreter. A
//!   module may name others, `cuModuleGetFunction` then says `NOT_FOUND`.
//!
//! # Settings
//!
//! | environment | meaning | default |
//! |---|---|---|
//! | `EMULATED_GPU_DIR` | the store | `/dev/nvidia-emulated` |
//! | `EMULATED_GPU_DEVICE` | device node of every GPU; `{}` in it stands for its number | `/dev/nvidia{}` |
//!
//! `CUDA_CHECKPOINT_JOB_FILE` is what it is for the real driver.
//!
//! `STORE/config` and `STORE/faults` are described at [`settings`] and
//! [`faults`]. A line that cannot be read is reported on stderr and makes the
//! call return 999.

#[cfg(feature = "checkpoint-api")]
mod abi_checkpoint;
mod abi_cuda;
mod abi_nvml;
mod caller;
mod cuda_error;
pub mod faults;
mod ipc;
mod job;
mod kernels;
mod mailbox;
mod memory;
mod ptx;
mod raw;
pub mod settings;
mod store;
mod target;
pub mod utility;

pub use kernels::KERNELS;

/// Comm of the thread that does the checkpoint work inside a CUDA process. The real
/// driver's differs from process to process (seen: `cuda00001400006`,
/// `cuda00001c00008`); only its beginning can be relied on.
pub const RESTORE_THREAD: &str = "cuda00001400006";

/// Comm of the second thread that a lock needs.
pub const EVENT_THREAD: &str = "cuda-EvtHandlr";
