//! The 64 bytes that name an allocation to other processes.

use crate::cuda_error::{CudaError, Result};

const MAGIC: &[u8; 8] = b"EMUIPC01";

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle([u8; 64]);

const _: () = assert!(size_of::<IpcHandle>() == 64);

/// What a handle names: memory of a process of the same pid namespace.
///
/// The pid is the one inside, so it stays right when CRIU restores both processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exported {
    pub(crate) pid: i32,
    pub(crate) gpu: u32,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl From<Exported> for IpcHandle {
    fn from(exported: Exported) -> Self {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&exported.pid.to_le_bytes());
        bytes[12..16].copy_from_slice(&exported.gpu.to_le_bytes());
        bytes[16..24].copy_from_slice(&exported.address.to_le_bytes());
        bytes[24..32].copy_from_slice(&exported.bytes.to_le_bytes());
        Self(bytes)
    }
}

impl TryFrom<IpcHandle> for Exported {
    type Error = CudaError;

    /// That other bytes are an invalid handle is assumed.
    fn try_from(IpcHandle(bytes): IpcHandle) -> Result<Self> {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let long = |at: usize| {
            let (low, high) = (u32::from_le_bytes(word(at)), u32::from_le_bytes(word(at + 4)));
            u64::from(high) << 32 | u64::from(low)
        };
        let exported = Self {
            pid: i32::from_le_bytes(word(8)),
            gpu: u32::from_le_bytes(word(12)),
            address: long(16),
            bytes: long(24),
        };
        let made_here = IpcHandle::from(exported).0 == bytes;
        if made_here { Ok(exported) } else { Err(CudaError::INVALID_HANDLE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_name_what_was_exported() {
        let exported = Exported { pid: 7, gpu: 1, address: 0x0102_0304_0506, bytes: 1 << 40 };
        let mut handle = IpcHandle::from(exported);
        assert_eq!(Exported::try_from(handle), Ok(exported));
        handle.0[63] = 1;
        assert_eq!(Exported::try_from(handle), Err(CudaError::INVALID_HANDLE));
    }
}
