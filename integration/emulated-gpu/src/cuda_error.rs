//! `CUresult` as an error type, and its names.

use std::ffi::{CStr, c_int};
use std::io;

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CudaError(pub(crate) c_int);

/// The result of everything that ends as a `CUresult`.
pub(crate) type Result<T> = std::result::Result<T, CudaError>;

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal, $description:literal;)*) => {
        impl CudaError {
            $(
                #[allow(dead_code, reason = "some are only named to the application")]
                pub(crate) const $name: Self = Self($code);
            )*

            /// Name and description, as `cuGetErrorName` and `cuGetErrorString` give them.
            pub(crate) fn describe(code: c_int) -> Option<(&'static CStr, &'static CStr)> {
                match code {
                    0 => Some((c"CUDA_SUCCESS", c"no error")),
                    $($code => Some(($text, $description)),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NOT_INITIALIZED = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
    NO_DEVICE = 100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    INVALID_IMAGE = 200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
    OPERATING_SYSTEM = 304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
    ILLEGAL_STATE = 401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state";
    NOT_FOUND = 500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found";
    NOT_READY = 600, c"CUDA_ERROR_NOT_READY", c"device not ready";
    ILLEGAL_ADDRESS = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"pointer does not correspond to a registered memory region";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported";
    TIMEOUT = 909, c"CUDA_ERROR_TIMEOUT", c"wait operation timed out";
    UNKNOWN = 999, c"CUDA_ERROR_UNKNOWN", c"unknown error";
}

/// Files of the store stand for the kernel driver: what fails there is the system's failure.
impl From<io::Error> for CudaError {
    fn from(_: io::Error) -> Self {
        Self::OPERATING_SYSTEM
    }
}

impl From<nix::Error> for CudaError {
    fn from(_: nix::Error) -> Self {
        Self::OPERATING_SYSTEM
    }
}

/// What the C function returns.
pub(crate) fn code<T>(result: &Result<T>) -> c_int {
    match result {
        Ok(_) => 0,
        Err(CudaError(code)) => *code,
    }
}
