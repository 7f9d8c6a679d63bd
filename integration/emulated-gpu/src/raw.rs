//! Host memory by address: what a GPU reaches through managed and registered memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// An anonymous private mapping, readable and writable.
pub(crate) struct AnonMapping {
    start: NonNull<c_void>,
    len: NonZeroUsize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is reached
// through `&self` and `&mut self` only.
unsafe impl Send for AnonMapping {}

impl AnonMapping {
    /// Maps `len` zero bytes; at least one page.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let len = NonZeroUsize::new(len).unwrap_or(NonZeroUsize::MIN);
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so no mapping is replaced.
        let start = unsafe { mmap_anonymous(None, len, protection, MapFlags::MAP_PRIVATE) }?;
        Ok(Self { start, len })
    }

    /// The address, as the application sees it.
    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// The bytes, to read.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `start` and `len` are one live mapping of initialised bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len.get()) }
    }

    /// The bytes, to write.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len.get()) }
    }
}

impl Drop for AnonMapping {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `new`, and no reference outlives `self`.
        // It cannot fail for a mapping that exists.
        let _ = unsafe { munmap(self.start, self.len.get()) };
    }
}

/// Reads host memory that the application has handed to the GPU.
///
/// The caller has checked that the range lies in managed or registered memory,
/// which the application promised to keep mapped.
pub(crate) fn read_host(address: u64, out: &mut [u8]) {
    // SAFETY: see above; like a real GPU this races with the application's own
    // accesses, which is the application's affair.
    unsafe { std::ptr::copy(address as *const u8, out.as_mut_ptr(), out.len()) }
}

/// Writes host memory that the application has handed to the GPU; see [`read_host`].
pub(crate) fn write_host(address: u64, data: &[u8]) {
    // SAFETY: as in `read_host`.
    unsafe { std::ptr::copy(data.as_ptr(), address as *mut u8, data.len()) }
}

/// Stores a word that other processes poll; see [`read_host`].
pub(crate) fn store_word(address: u64, value: u32) {
    // SAFETY: as in `read_host`, and the caller has checked the alignment.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(value, Ordering::SeqCst);
}

/// Loads a word that other processes store; see [`read_host`].
pub(crate) fn load_word(address: u64) -> u32 {
    // SAFETY: as in `read_host`, and the caller has checked the alignment.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }.load(Ordering::SeqCst)
}
