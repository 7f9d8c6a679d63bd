//! The NVML functions that `libnvidia-ml.so.1` exports, with their exact C ABI.
//!
//! NVML looks at the machine, not at this process: it keeps no device open and
//! goes on after a checkpoint.
#![allow(unsafe_code, non_snake_case)]

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::fs;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::settings::{Settings, format_uuid};
use crate::store::{Key, StoreLock};

type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// `nvmlReturn_t` other than success.
#[derive(Clone, Copy)]
struct NvmlError(c_int);

const UNINITIALIZED: NvmlError = NvmlError(1);
const INVALID_ARGUMENT: NvmlError = NvmlError(2);
const INSUFFICIENT_SIZE: NvmlError = NvmlError(7);
const DRIVER_NOT_LOADED: NvmlError = NvmlError(9);
const GPU_IS_LOST: NvmlError = NvmlError(15);
const UNKNOWN: NvmlError = NvmlError(999);

type Result<T> = std::result::Result<T, NvmlError>;

/// How often NVML was initialised and not shut down.
static USERS: AtomicU32 = AtomicU32::new(0);

/// `nvmlMemory_t`.
#[repr(C)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct MemoryInfo2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v2_t`.
#[repr(C)]
struct ProcessInfo {
    pid: c_uint,
    used_gpu_memory: u64,
    gpu_instance_id: c_uint,
    compute_instance_id: c_uint,
}

fn code(result: Result<()>) -> c_int {
    result.map_or_else(|error| error.0, |()| 0)
}

fn put<T>(out: Out<'_, T>, value: Result<T>) -> c_int {
    let written =
        out.ok_or(INVALID_ARGUMENT).and_then(|out| value.map(|value| _ = out.write(value)));
    code(written)
}

/// Copies a text with its zero byte; nothing if it does not fit.
///
/// # Safety
/// `to` is null or has `len` writable bytes.
pub(crate) unsafe fn copy_string(text: &str, to: *mut c_char, len: usize) -> Option<()> {
    if to.is_null() || text.len() >= len {
        return None;
    }
    // SAFETY: room for the text and one byte more was checked.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Some(())
}

fn put_string(text: Result<String>, to: *mut c_char, len: c_uint) -> c_int {
    let body = || {
        let text = text?;
        if to.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the application gives `len` bytes at `to`.
        unsafe { copy_string(&text, to, len as usize) }.ok_or(INSUFFICIENT_SIZE)
    };
    code(body())
}

fn settings() -> Result<Settings> {
    if USERS.load(Ordering::SeqCst) == 0 {
        return Err(UNINITIALIZED);
    }
    Settings::current().map_err(|_| UNKNOWN)
}

/// A device handle is the GPU's index and one.
fn index(settings: &Settings, device: usize) -> Result<u32> {
    let index = device.checked_sub(1).and_then(|index| u32::try_from(index).ok());
    index.filter(|index| settings.visible().contains(index)).ok_or(INVALID_ARGUMENT)
}

fn init() -> c_int {
    let body = || {
        let settings = Settings::current().map_err(|_| UNKNOWN)?;
        if settings.visible().is_empty() {
            return Err(DRIVER_NOT_LOADED);
        }
        USERS.fetch_add(1, Ordering::SeqCst);
        Ok(())
    };
    code(body())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_int {
    init()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> c_int {
    init()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_int {
    let one_less = |users: u32| users.checked_sub(1);
    let before = USERS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
    code(before.map(|_| ()).map_err(|_| UNINITIALIZED))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(error: c_int) -> *const c_char {
    let text = match error {
        0 => c"The operation was successful",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        15 => c"GPU is lost",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, len: c_uint) -> c_int {
    put_string(settings().map(|settings| settings.driver), version, len)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion(version: Out<'_, c_int>) -> c_int {
    put(version, settings().map(|settings| settings.cuda))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<'_, c_int>) -> c_int {
    put(version, settings().map(|settings| settings.cuda))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: Out<'_, c_uint>) -> c_int {
    let visible = settings().map(|settings| settings.visible().len());
    put(count, visible.and_then(|count| c_uint::try_from(count).map_err(|_| UNKNOWN)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<'_, usize>) -> c_int {
    let body = || {
        let settings = settings()?;
        let gpu = *settings.visible().get(index as usize).ok_or(INVALID_ARGUMENT)?;
        if settings.lost_gpu == Some(gpu) {
            return Err(GPU_IS_LOST);
        }
        Ok(gpu as usize + 1)
    };
    put(device, body())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(device: usize, uuid: *mut c_char, len: c_uint) -> c_int {
    let text =
        settings().and_then(|settings| Ok(format_uuid(&settings.uuid(index(&settings, device)?))));
    put_string(text, uuid, len)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(device: usize, name: *mut c_char, len: c_uint) -> c_int {
    let text =
        settings().and_then(|settings| Ok(settings.name(index(&settings, device)?).to_owned()));
    put_string(text, name, len)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMinorNumber(device: usize, minor: Out<'_, c_uint>) -> c_int {
    put(minor, settings().and_then(|settings| index(&settings, device)))
}

fn memory(device: usize) -> Result<MemoryInfo> {
    let settings = settings()?;
    let index = index(&settings, device)?;
    let used = StoreLock::take().map_err(|_| UNKNOWN)?.used(index, &settings);
    Ok(MemoryInfo { total: settings.memory, free: settings.memory.saturating_sub(used), used })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(device: usize, info: Out<'_, MemoryInfo>) -> c_int {
    put(info, memory(device))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: usize, info: Option<&mut MemoryInfo2>) -> c_int {
    let body = || {
        let info = info.ok_or(INVALID_ARGUMENT)?;
        let MemoryInfo { total, free, used } = memory(device)?;
        *info = MemoryInfo2 { version: info.version, total, reserved: 0, free, used };
        Ok(())
    };
    code(body())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    device: usize,
    count: Option<&mut c_uint>,
    infos: *mut ProcessInfo,
) -> c_int {
    processes(device, count, infos)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: usize,
    count: Option<&mut c_uint>,
    infos: *mut ProcessInfo,
) -> c_int {
    processes(device, count, infos)
}

fn processes(device: usize, count: Option<&mut c_uint>, infos: *mut ProcessInfo) -> c_int {
    let body = || {
        let count = count.ok_or(INVALID_ARGUMENT)?;
        let settings = settings()?;
        let found = processes_on(index(&settings, device)?)?;
        let room = std::mem::replace(count, c_uint::try_from(found.len()).map_err(|_| UNKNOWN)?);
        if found.len() > room as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        if infos.is_null() && !found.is_empty() {
            return Err(INVALID_ARGUMENT);
        }
        for (at, info) in found.into_iter().enumerate() {
            // SAFETY: the application gives room for `room` entries at `infos`.
            unsafe { infos.add(at).write(info) };
        }
        Ok(())
    };
    code(body())
}

/// The processes with a context on the GPU that this process's /proc shows.
fn processes_on(gpu: u32) -> Result<Vec<ProcessInfo>> {
    let users = StoreLock::take().map_err(|_| UNKNOWN)?.users();
    let users: HashMap<_, _> = users
        .iter()
        .filter(|user| user.gpus.contains(&gpu))
        .map(|user| (user.key.as_str(), user.bytes(gpu)))
        .collect();
    let pids = fs::read_dir("/proc").map_err(|_| UNKNOWN)?.flatten();
    let infos = pids.filter_map(|process| {
        let pid = process.file_name().to_str()?.parse().ok()?;
        Some(ProcessInfo {
            pid: u32::try_from(pid).ok()?,
            used_gpu_memory: *users.get(Key::of(pid).ok()?.to_string().as_str())?,
            gpu_instance_id: c_uint::MAX,
            compute_instance_id: c_uint::MAX,
        })
    });
    Ok(infos.collect())
}
