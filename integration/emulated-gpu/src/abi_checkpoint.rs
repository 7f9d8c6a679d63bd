//! The checkpoint API, which `libcuda.so.1` exports from driver 570 on. Like
//! `abi_cuda` only translation.
#![allow(unsafe_code, non_snake_case)]

use std::ffi::{c_int, c_uint};

use crate::abi_cuda::{Out, put_with};
use crate::cuda_error::{CudaError, Result, code};
use crate::settings::Uuid;
use crate::{caller, target};

/// `CUcheckpointLockArgs`.
#[repr(C)]
struct LockArgs {
    timeout_ms: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 7],
}

/// The arguments of checkpoint and unlock: nothing yet.
type NoArgs = [u64; 8];

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
struct RestoreArgs {
    pairs: *const [Uuid; 2],
    count: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 6],
}

const _: () = assert!(size_of::<LockArgs>() == 64 && size_of::<RestoreArgs>() == 64);

fn all_zero(words: &[u64]) -> Result<()> {
    if words.iter().all(|word| *word == 0) { Ok(()) } else { Err(CudaError::INVALID_VALUE) }
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, tid: Out<'_, c_int>) -> c_int {
    put_with(tid, || target::check_initialized().and_then(|()| caller::restore_thread_id(pid)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessGetState(pid: c_int, state: Out<'_, c_int>) -> c_int {
    put_with(state, || target::check_initialized().and_then(|()| caller::state(pid)))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessLock(pid: c_int, args: Option<&LockArgs>) -> c_int {
    let body = || {
        target::check_initialized()?;
        if let Some(args) = args {
            all_zero(&[args.reserved0.into()])?;
            all_zero(&args.reserved1)?;
        }
        caller::lock(pid, args.map_or(0, |args| args.timeout_ms))
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessCheckpoint(pid: c_int, args: Option<&NoArgs>) -> c_int {
    let body = || {
        target::check_initialized()?;
        args.map_or(Ok(()), |args| all_zero(args))?;
        caller::checkpoint(pid)
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessRestore(pid: c_int, args: Option<&RestoreArgs>) -> c_int {
    let body = || {
        target::check_initialized()?;
        let mut map = Vec::new();
        if let Some(args) = args {
            all_zero(&[args.reserved0.into()])?;
            all_zero(&args.reserved1)?;
            if args.count > 0 {
                if args.pairs.is_null() || args.count > 1024 {
                    return Err(CudaError::INVALID_VALUE);
                }
                // SAFETY: the caller gives `count` pairs at `pairs`.
                let pairs = unsafe { std::slice::from_raw_parts(args.pairs, args.count as usize) };
                map.extend(pairs.iter().map(|[old, new]| (*old, *new)));
            }
        }
        caller::restore(pid, map)
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessUnlock(pid: c_int, args: Option<&NoArgs>) -> c_int {
    let body = || {
        target::check_initialized()?;
        args.map_or(Ok(()), |args| all_zero(args))?;
        caller::unlock(pid)
    };
    code(&body())
}
