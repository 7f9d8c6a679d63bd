//! The driver API that every `libcuda.so.1` exports, with its exact C ABI. Only
//! translation: pointers and handles on one side, `target` and `caller` on the other.
//!
//! Out pointers are `Option<&mut MaybeUninit<T>>`: null is `None`, and what the
//! application did not initialise is not read.
#![allow(unsafe_code, non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::thread;
use std::time::Duration;

use crate::cuda_error::{CudaError, Result, code};
use crate::faults::{self, Call, What};
use crate::ipc::{Exported, IpcHandle};
use crate::kernels::{KERNELS, Work};
use crate::settings::{Settings, Uuid};
use crate::store::StoreLock;
use crate::target;

/// A pointer into which a call writes.
pub(crate) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Handles are numbers with a mark, so that a wrong one is noticed.
const CONTEXT: usize = 0x1000_0000;
const MODULE: usize = 0x2000_0000;
const FUNCTION: usize = 0x3000_0000;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, which cuda.h demands.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

fn put<T>(out: Out<'_, T>, value: T) -> Result<()> {
    out.ok_or(CudaError::INVALID_VALUE)?.write(value);
    Ok(())
}

/// Writes the value of a call that must not be made in vain.
pub(crate) fn put_with<T>(out: Out<'_, T>, value: impl FnOnce() -> Result<T>) -> c_int {
    let result = match out {
        Some(out) => value().map(|value| _ = out.write(value)),
        None => Err(CudaError::INVALID_VALUE),
    };
    code(&result)
}

fn number(handle: usize, mark: usize) -> Result<usize> {
    handle
        .checked_sub(mark)
        .filter(|number| *number < MODULE - CONTEXT)
        .ok_or(CudaError::INVALID_HANDLE)
}

fn ordinal(device: c_int) -> Result<usize> {
    let ordinal = usize::try_from(device).map_err(|_| CudaError::INVALID_DEVICE)?;
    let known = ordinal < target::devices()?.len();
    if known { Ok(ordinal) } else { Err(CudaError::INVALID_DEVICE) }
}

/// A C string that the application passed.
///
/// # Safety
/// `text` is null or points to a string that lives as long as the call.
unsafe fn string<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(CudaError::INVALID_VALUE);
    }
    // SAFETY: not null, and a string by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| CudaError::INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(flags: c_uint) -> c_int {
    let fault = match faults::fire(Call::Init) {
        Ok(fault) => fault,
        Err(error) => return error.0,
    };
    let hang = || loop {
        thread::sleep(Duration::from_secs(3600));
    };
    match fault {
        Some(What::Error(error)) => return error,
        Some(What::Lie) => return 0,
        Some(What::Crash) => std::process::abort(),
        Some(What::Hang) => hang(),
        _ => {}
    }
    let result = if flags == 0 { target::init() } else { Err(CudaError::INVALID_VALUE) };
    if fault == Some(What::HangAfter) {
        hang();
    }
    code(&result)
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<'_, c_int>) -> c_int {
    put_with(version, || Ok(Settings::current()?.cuda))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<'_, c_int>) -> c_int {
    put_with(count, || c_int::try_from(target::devices()?.len()).map_err(|_| CudaError::UNKNOWN))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(device: Out<'_, c_int>, index: c_int) -> c_int {
    put_with(device, || ordinal(index).map(|_| index))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int {
    let body = || {
        let text = target::devices()?.swap_remove(ordinal(device)?).name;
        let len = usize::try_from(len).map_err(|_| CudaError::INVALID_VALUE)?;
        // SAFETY: the application gives `len` bytes at `name`.
        unsafe { crate::abi_nvml::copy_string(&text, name, len) }.ok_or(CudaError::INVALID_VALUE)
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(uuid: Out<'_, Uuid>, device: c_int) -> c_int {
    put_with(uuid, || Ok(target::devices()?[ordinal(device)?].uuid))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, device: c_int) -> c_int {
    put_with(bytes, || {
        ordinal(device)?;
        usize::try_from(Settings::current()?.memory).map_err(|_| CudaError::UNKNOWN)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxCreate_v2(context: Out<'_, usize>, _flags: c_uint, device: c_int) -> c_int {
    put_with(context, || {
        let ordinal = ordinal(device)?;
        target::create_context(ordinal)?;
        target::set_current(Some(ordinal));
        Ok(CONTEXT + ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, usize>, device: c_int) -> c_int {
    put_with(context, || {
        let ordinal = ordinal(device)?;
        target::create_context(ordinal)?;
        Ok(CONTEXT + ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    let body = || {
        let devices = target::devices()?.len();
        let ordinal = match context {
            0 => None,
            _ => Some(number(context, CONTEXT).map_err(|_| CudaError::INVALID_CONTEXT)?),
        };
        if ordinal.is_some_and(|ordinal| ordinal >= devices) {
            return Err(CudaError::INVALID_CONTEXT);
        }
        target::set_current(ordinal);
        Ok(())
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> c_int {
    code(&target::call_in_order(|_| Ok(())))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(address: Out<'_, u64>, bytes: usize) -> c_int {
    put_with(address, || target::call(|gpu| gpu.allocate(bytes as u64)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAllocManaged(address: Out<'_, u64>, bytes: usize, _flags: c_uint) -> c_int {
    put_with(address, || target::call(|gpu| gpu.memory.allocate_managed(bytes as u64)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    code(&target::call_in_order(|gpu| gpu.memory.free(address)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) -> c_int {
    if bytes == 0 {
        return 0;
    }
    if from.is_null() {
        return CudaError::INVALID_VALUE.0;
    }
    // SAFETY: the application gives `bytes` readable bytes at `from`.
    let data = unsafe { std::slice::from_raw_parts(from, bytes) };
    code(&target::call_in_order(|gpu| gpu.memory.write(to, data)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) -> c_int {
    if bytes == 0 {
        return 0;
    }
    if to.is_null() {
        return CudaError::INVALID_VALUE.0;
    }
    // SAFETY: the application gives `bytes` writable bytes at `to`; as plain bytes
    // they are only written here.
    let out = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
    code(&target::call_in_order(|gpu| gpu.memory.read(from, out)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32_v2(address: u64, value: c_uint, count: usize) -> c_int {
    let words: Vec<u8> = value.to_ne_bytes().repeat(count.min(1 << 18));
    code(&target::call_in_order(|gpu| {
        let mut at = 0;
        while at < count {
            let now = (count - at).min(1 << 18);
            gpu.memory.write(address + 4 * at as u64, &words[..4 * now])?;
            at += now;
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> c_int {
    let body = || {
        let (size, used) = target::call(|gpu| {
            let index = gpu.current()?;
            let settings = Settings::current()?;
            Ok((settings.memory, StoreLock::take()?.used(index, &settings)))
        })?;
        let bytes = |value: u64| usize::try_from(value).map_err(|_| CudaError::UNKNOWN);
        put(free, bytes(size.saturating_sub(used))?)?;
        put(total, bytes(size)?)
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: u64, bytes: usize, _flags: c_uint) -> c_int {
    code(&target::call(|gpu| gpu.memory.register(start, bytes as u64)))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostGetDevicePointer_v2(
    address: Out<'_, u64>,
    host: u64,
    _flags: c_uint,
) -> c_int {
    put_with(address, || {
        let registered = target::call(|gpu| Ok(gpu.memory.is_registered(host)))?;
        if registered { Ok(host) } else { Err(CudaError::INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: u64) -> c_int {
    code(&target::call_in_order(|gpu| gpu.memory.unregister(start)))
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(handle: Out<'_, IpcHandle>, address: u64) -> c_int {
    put_with(handle, || target::call(|gpu| gpu.memory.export(address).map(IpcHandle::from)))
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(
    address: Out<'_, u64>,
    handle: IpcHandle,
    flags: c_uint,
) -> c_int {
    put_with(address, || {
        if flags != LAZY_ENABLE_PEER_ACCESS {
            return Err(CudaError::INVALID_VALUE);
        }
        let exported = Exported::try_from(handle)?;
        target::call(|gpu| gpu.memory.import(exported))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle(address: Out<'_, u64>, handle: IpcHandle, flags: c_uint) -> c_int {
    cuIpcOpenMemHandle_v2(address, handle, flags)
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    code(&target::call_in_order(|gpu| gpu.memory.close(address)))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(module: Out<'_, usize>, image: *const c_char) -> c_int {
    put_with(module, || {
        // SAFETY: PTX is a C string. Other images begin with a magic number that is
        // not PTX's and hold a zero byte soon, so this stays within them.
        let text = unsafe { string(image) }.map_err(|_| CudaError::INVALID_IMAGE)?;
        Ok(MODULE + target::call(|gpu| gpu.load(text))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(
    function: Out<'_, usize>,
    module: usize,
    name: *const c_char,
) -> c_int {
    put_with(function, || {
        let module = number(module, MODULE)?;
        // SAFETY: the application passes a C string.
        let name = unsafe { string(name) }?;
        Ok(FUNCTION + target::call(|gpu| gpu.function(module, name))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetGlobal_v2(
    address: Out<'_, u64>,
    bytes: Out<'_, usize>,
    module: usize,
    name: *const c_char,
) -> c_int {
    let body = || {
        let module = number(module, MODULE)?;
        // SAFETY: the application passes a C string.
        let name = unsafe { string(name) }?;
        let found = target::call(|gpu| gpu.global(module, name))?;
        // Either pointer may be null.
        address.map(|out| out.write(found.0));
        bytes.map(|out| out.write(found.1));
        Ok(())
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernel(
    function: usize,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared_bytes: c_uint,
    stream: usize,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> c_int {
    let body = || {
        let kernel = number(function, FUNCTION)?;
        let sizes = KERNELS.get(kernel).ok_or(CudaError::INVALID_HANDLE)?.1;
        // There is one stream: null, and the two other names of the default one.
        if stream > 2 {
            return Err(CudaError::INVALID_HANDLE);
        }
        if parameters.is_null() || !extra.is_null() {
            return Err(CudaError::INVALID_VALUE);
        }
        let mut arguments = Vec::new();
        for (at, size) in sizes.iter().enumerate() {
            // SAFETY: the application passes one pointer for each parameter of the kernel.
            let pointer = unsafe { *parameters.add(at) };
            if pointer.is_null() {
                return Err(CudaError::INVALID_VALUE);
            }
            let mut bytes = [0_u8; 8];
            // SAFETY: it points to a value of the parameter's size, at most 8 bytes.
            unsafe { std::ptr::copy_nonoverlapping(pointer.cast(), bytes.as_mut_ptr(), *size) };
            arguments.push(u64::from_le_bytes(bytes));
        }
        let work = Work::new(kernel, &arguments).ok_or(CudaError::INVALID_VALUE)?;
        target::call(|gpu| {
            gpu.launch(work);
            Ok(())
        })
    };
    code(&body())
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: c_int, name: Out<'_, *const c_char>) -> c_int {
    describe(error, name, |texts| texts.0)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: c_int, text: Out<'_, *const c_char>) -> c_int {
    describe(error, text, |texts| texts.1)
}

fn describe(
    error: c_int,
    out: Out<'_, *const c_char>,
    which: impl Fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> c_int {
    let text = CudaError::describe(error).map(which);
    let known = text.map(|_| ()).ok_or(CudaError::INVALID_VALUE);
    let written = put(out, text.map_or(std::ptr::null(), CStr::as_ptr));
    code(&written.and(known))
}
