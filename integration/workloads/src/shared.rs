//! Memory that several processes share: a file, so that CRIU can restore it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::OpenOptions;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap};

/// Room for as many flags as anyone needs.
const BYTES: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// One page of flags, mapped until the process ends.
pub struct SharedFlags(NonNull<c_void>);

impl SharedFlags {
    /// Creates the file, all flags zero.
    pub fn create(path: &Path) -> io::Result<()> {
        std::fs::write(path, [0; BYTES.get()])
    }

    /// Maps the file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so no mapping is replaced.
        let start = unsafe { mmap(None, BYTES, protection, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self(start))
    }

    pub(crate) fn address(&self) -> *mut c_void {
        self.0.as_ptr()
    }

    #[expect(clippy::unused_self, reason = "the size belongs to the mapping")]
    pub(crate) fn bytes(&self) -> usize {
        BYTES.get()
    }
}
