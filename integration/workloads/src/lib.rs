//! What the workloads share: the CUDA driver API found by dlopen, their kernels,
//! and the small things around them.
//!
//! The same binaries run on the emulated GPU and on a real one.

pub mod cuda;
mod ffi;
pub mod shared;
pub mod ticker;

pub use ffi::{IpcHandle, Library};

/// The kernels. Valid for any real GPU from `sm_50` on; the emulated one knows them by name.
pub const PTX: &str = include_str!("kernels.ptx");

/// The device node that the driver opens first.
pub const DEVICE: &str = "/dev/nvidia0";
