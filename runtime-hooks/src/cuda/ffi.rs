//! The driver's checkpoint API, loaded at run time.
//!
//! Only the helper process calls this. Layouts are those of `cuda.h` (CUDA 12.8 and later).
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::path::Path;

use libloading::Library;

use super::Call;

type Init = unsafe extern "C" fn(flags: u32) -> c_int;
type GetVersion = unsafe extern "C" fn(version: *mut c_int) -> c_int;
type GetValue = unsafe extern "C" fn(pid: c_int, value: *mut c_int) -> c_int;
type Act = unsafe extern "C" fn(pid: c_int, args: *mut c_void) -> c_int;

/// `CUcheckpointLockArgs` and its sisters: 64 bytes each, reserved fields zero. For lock the first
/// four bytes are the timeout in milliseconds.
#[repr(C, align(8))]
struct Args {
    timeout_ms: u32,
    reserved: [u32; 15],
}

/// `CUcheckpointGpuPair`: the UUIDs of the GPU of the checkpoint and of that of the restore.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct GpuPair {
    pub(super) old: [u8; 16],
    pub(super) new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
struct RestoreArgs {
    pairs: *const GpuPair,
    count: u32,
    reserved: [u32; 13],
}

/// The functions of a loaded libcuda. A function that the library does not have is `None`.
pub(super) struct Api {
    init: Init,
    version: GetVersion,
    probe: Option<GetValue>,
    state: Option<GetValue>,
    lock: Option<Act>,
    checkpoint: Option<Act>,
    restore: Option<Act>,
    unlock: Option<Act>,
    // Dropped last: the pointers above lead into it.
    _library: Library,
}

impl Api {
    /// Loads `path`, a file or a name for the dynamic loader.
    pub(super) fn load(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: loading runs the library's initialisers. It is the NVIDIA driver of this host
        // or what the administrator configured in its place, and this process exists only to
        // call it, so whatever it does to the process harms no one else.
        let library = unsafe { Library::new(path)? };
        // SAFETY: the names and types are those of cuda.h; the pointers are used only while
        // `_library` is loaded, for which `Api` keeps it.
        unsafe {
            Ok(Self {
                init: *library.get::<Init>(b"cuInit\0")?,
                version: *library.get::<GetVersion>(b"cuDriverGetVersion\0")?,
                probe: optional(&library, Call::Probe),
                state: optional(&library, Call::State),
                lock: optional(&library, Call::Lock),
                checkpoint: optional(&library, Call::Checkpoint),
                restore: optional(&library, Call::Restore),
                unlock: optional(&library, Call::Unlock),
                _library: library,
            })
        }
    }

    /// `cuInit(0)`; returns the driver's code.
    pub(super) fn init(&self) -> i32 {
        // SAFETY: the function takes no pointer.
        unsafe { (self.init)(0) }
    }

    /// `cuDriverGetVersion`: 13000 for CUDA 13.0, 0 if it fails.
    pub(super) fn version(&self) -> u32 {
        let mut version = 0;
        // SAFETY: the pointer is to a live c_int.
        let code = unsafe { (self.version)(&raw mut version) };
        if code == 0 { u32::try_from(version).unwrap_or(0) } else { 0 }
    }

    /// The calls that this library cannot do.
    pub(super) fn missing(&self) -> Vec<String> {
        [
            (Call::Probe, self.probe.is_none()),
            (Call::State, self.state.is_none()),
            (Call::Lock, self.lock.is_none()),
            (Call::Checkpoint, self.checkpoint.is_none()),
            (Call::Restore, self.restore.is_none()),
            (Call::Unlock, self.unlock.is_none()),
        ]
        .into_iter()
        .filter(|(_, missing)| *missing)
        .map(|(call, _)| call.function().to_owned())
        .collect()
    }

    /// Calls the driver for one process. Returns code and value (state or thread id, else 0), or
    /// `None` if the library has no such function. May block for ever.
    /// `map` is for a restore.
    pub(super) fn call(
        &self,
        call: Call,
        pid: i32,
        timeout_ms: u32,
        map: &[GpuPair],
    ) -> Option<(i32, i32)> {
        let mut value = 0;
        let mut args = Args { timeout_ms: 0, reserved: [0; 15] };
        let code = match call {
            Call::Probe | Call::State => {
                let function = if call == Call::Probe { self.probe } else { self.state }?;
                // SAFETY: the pointer is to a c_int that outlives the call.
                unsafe { function(pid, &raw mut value) }
            }
            Call::Lock => {
                args.timeout_ms = timeout_ms;
                // SAFETY: the pointer is to 64 initialised bytes that outlive the call.
                unsafe { (self.lock?)(pid, (&raw mut args).cast()) }
            }
            Call::Checkpoint => {
                // SAFETY: as for lock.
                unsafe { (self.checkpoint?)(pid, (&raw mut args).cast()) }
            }
            Call::Restore => {
                let pairs = if map.is_empty() { std::ptr::null() } else { map.as_ptr() };
                let count = u32::try_from(map.len()).unwrap_or(0);
                let mut args = RestoreArgs { pairs, count, reserved: [0; 13] };
                // SAFETY: as for lock; the pairs are `count` initialised ones that outlive the call,
                // and a zero count means that none follow.
                unsafe { (self.restore?)(pid, (&raw mut args).cast()) }
            }
            Call::Unlock => {
                // SAFETY: as for lock.
                unsafe { (self.unlock?)(pid, (&raw mut args).cast()) }
            }
            Call::Init
            | Call::Toggle
            | Call::Usage
            | Call::FreeMemory
            | Call::JobFiles
            | Call::CopyJobFile => {
                return None;
            }
        };
        Some((code, value))
    }
}

/// Looks a function up.
///
/// # Safety
/// `T` must be the type that cuda.h gives the function.
unsafe fn optional<T: Copy>(library: &Library, call: Call) -> Option<T> {
    // SAFETY: the caller vouches for the type; the name is a plain symbol.
    unsafe { library.get::<T>(call.function().as_bytes()).ok().map(|symbol| *symbol) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_size_of_cuda_h() {
        assert_eq!(size_of::<Args>(), 64);
        assert_eq!(size_of::<RestoreArgs>(), 64);
        assert_eq!(size_of::<GpuPair>(), 32);
    }

    #[test]
    fn a_library_without_cuda_is_an_error_not_a_crash() {
        assert!(Api::load(Path::new("libc.so.6")).is_err());
    }
}
