//! The functions of the CUDA driver API that the workloads call, typed once.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use crate::cuda::{Error, Result};

macro_rules! driver {
    ($($field:ident: $symbol:literal($($argument:ty),*);)*) => {
        /// The loaded driver.
        pub struct Library {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Library {
            /// Loads the driver, by default `libcuda.so.1`. It is never unloaded.
            pub fn load(name: &OsStr) -> std::result::Result<Self, libloading::Error> {
                // SAFETY: the CUDA driver may be loaded by any program.
                let library = unsafe { libloading::Library::new(name) }?;
                let library = Box::leak(Box::new(library));
                // SAFETY: the types are those of cuda.h, and the library stays loaded.
                unsafe { Ok(Self { $($field: *library.get($symbol)?,)* }) }
            }
        }
    };
}

driver! {
    init: b"cuInit\0"(c_uint);
    device_get: b"cuDeviceGet\0"(*mut c_int, c_int);
    device_get_count: b"cuDeviceGetCount\0"(*mut c_int);
    context_create: b"cuCtxCreate_v2\0"(*mut usize, c_uint, c_int);
    synchronize: b"cuCtxSynchronize\0"();
    allocate: b"cuMemAlloc_v2\0"(*mut u64, usize);
    free: b"cuMemFree_v2\0"(u64);
    allocate_managed: b"cuMemAllocManaged\0"(*mut u64, usize, c_uint);
    copy_to_device: b"cuMemcpyHtoD_v2\0"(u64, *const c_void, usize);
    copy_to_host: b"cuMemcpyDtoH_v2\0"(*mut c_void, u64, usize);
    set_words: b"cuMemsetD32_v2\0"(u64, c_uint, usize);
    memory_info: b"cuMemGetInfo_v2\0"(*mut usize, *mut usize);
    ipc_get: b"cuIpcGetMemHandle\0"(*mut IpcHandle, u64);
    ipc_open: b"cuIpcOpenMemHandle_v2\0"(*mut u64, IpcHandle, c_uint);
    ipc_close: b"cuIpcCloseMemHandle\0"(u64);
    host_register: b"cuMemHostRegister_v2\0"(*mut c_void, usize, c_uint);
    host_device_pointer: b"cuMemHostGetDevicePointer_v2\0"(*mut u64, *mut c_void, c_uint);
    module_load: b"cuModuleLoadData\0"(*mut usize, *const c_void);
    module_function: b"cuModuleGetFunction\0"(*mut usize, usize, *const c_char);
    module_global: b"cuModuleGetGlobal_v2\0"(*mut u64, *mut usize, usize, *const c_char);
    launch: b"cuLaunchKernel\0"(
        usize, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, usize,
        *mut *mut c_void, *mut *mut c_void
    );
}

/// `CUipcMemHandle`: what another process needs to open an allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcHandle(pub [u8; 64]);

fn check(call: &'static str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(Error { call, code }) }
}

/// `CU_MEM_ATTACH_GLOBAL`
const ATTACH_GLOBAL: c_uint = 1;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`
const DEVICE_MAP: c_uint = 2;

// In each function below: pointers are to live values of the types in cuda.h, or
// to slices of the length that is passed.
impl Library {
    pub(crate) fn init(&self) -> Result<()> {
        // SAFETY: no pointers.
        check("cuInit", unsafe { (self.init)(0) })
    }

    pub(crate) fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: see above.
        check("cuDeviceGetCount", unsafe { (self.device_get_count)(&raw mut count) })?;
        Ok(count)
    }

    pub(crate) fn create_context(&self, ordinal: i32) -> Result<()> {
        let (mut device, mut context) = (0, 0);
        // SAFETY: see above.
        check("cuDeviceGet", unsafe { (self.device_get)(&raw mut device, ordinal) })?;
        // SAFETY: see above.
        check("cuCtxCreate", unsafe { (self.context_create)(&raw mut context, 0, device) })
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: no pointers.
        check("cuCtxSynchronize", unsafe { (self.synchronize)() })
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: see above.
        check("cuMemAlloc", unsafe { (self.allocate)(&raw mut address, bytes) })?;
        Ok(address)
    }

    pub(crate) fn free(&self, address: u64) -> Result<()> {
        // SAFETY: an address of the GPU, which the driver checks.
        check("cuMemFree", unsafe { (self.free)(address) })
    }

    pub(crate) fn allocate_managed(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: see above.
        let code = unsafe { (self.allocate_managed)(&raw mut address, bytes, ATTACH_GLOBAL) };
        check("cuMemAllocManaged", code)?;
        Ok(address)
    }

    pub(crate) fn copy_to_device(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { (self.copy_to_device)(to, from.as_ptr().cast(), from.len()) };
        check("cuMemcpyHtoD", code)
    }

    pub(crate) fn copy_to_host(&self, to: &mut [u8], from: u64) -> Result<()> {
        // SAFETY: see above.
        let code = unsafe { (self.copy_to_host)(to.as_mut_ptr().cast(), from, to.len()) };
        check("cuMemcpyDtoH", code)
    }

    pub(crate) fn set_words(&self, address: u64, value: u32, count: usize) -> Result<()> {
        // SAFETY: an address of the GPU, which the driver checks.
        check("cuMemsetD32", unsafe { (self.set_words)(address, value, count) })
    }

    pub(crate) fn memory_info(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: see above.
        let code = unsafe { (self.memory_info)(&raw mut free, &raw mut total) };
        check("cuMemGetInfo", code)?;
        Ok((free, total))
    }

    pub(crate) fn export(&self, address: u64) -> Result<IpcHandle> {
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: see above.
        check("cuIpcGetMemHandle", unsafe { (self.ipc_get)(&raw mut handle, address) })?;
        Ok(handle)
    }

    pub(crate) fn import(&self, handle: IpcHandle) -> Result<u64> {
        let mut address = 0;
        // SAFETY: see above.
        let code = unsafe { (self.ipc_open)(&raw mut address, handle, LAZY_ENABLE_PEER_ACCESS) };
        check("cuIpcOpenMemHandle", code)?;
        Ok(address)
    }

    pub(crate) fn close(&self, address: u64) -> Result<()> {
        // SAFETY: an address of the GPU, which the driver checks.
        check("cuIpcCloseMemHandle", unsafe { (self.ipc_close)(address) })
    }

    /// Registers host memory; the address at which the GPU sees it.
    ///
    /// # Safety
    /// The memory stays mapped as long as the context lives.
    pub(crate) unsafe fn register(&self, host: *mut c_void, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: this function's contract.
        let code = unsafe { (self.host_register)(host, bytes, DEVICE_MAP) };
        check("cuMemHostRegister", code)?;
        // SAFETY: see above.
        let code = unsafe { (self.host_device_pointer)(&raw mut address, host, 0) };
        check("cuMemHostGetDevicePointer", code)?;
        Ok(address)
    }

    pub(crate) fn load_module(&self, ptx: &str) -> Result<usize> {
        let call = "cuModuleLoadData";
        let text = CString::new(ptx).map_err(|_| Error { call, code: 1 })?;
        let mut module = 0;
        // SAFETY: see above; PTX is a C string.
        check(call, unsafe { (self.module_load)(&raw mut module, text.as_ptr().cast()) })?;
        Ok(module)
    }

    pub(crate) fn function(&self, module: usize, name: &CStr) -> Result<usize> {
        let mut function = 0;
        // SAFETY: see above.
        let code = unsafe { (self.module_function)(&raw mut function, module, name.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        Ok(function)
    }

    pub(crate) fn global(&self, module: usize, name: &CStr) -> Result<u64> {
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: see above.
        let code = unsafe {
            (self.module_global)(&raw mut address, &raw mut bytes, module, name.as_ptr())
        };
        check("cuModuleGetGlobal", code)?;
        Ok(address)
    }

    /// Launches on the default stream. Each argument is a little-endian number of
    /// which the kernel reads as many bytes as its parameter has.
    ///
    /// # Safety
    /// The kernel has at most as many parameters as there are arguments, each of
    /// at most 8 bytes, and addresses among them are memory of the GPU.
    pub(crate) unsafe fn launch(
        &self,
        function: usize,
        grid: u32,
        block: u32,
        arguments: &mut [u64],
    ) -> Result<()> {
        let mut pointers: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| ptr::from_mut(argument).cast()).collect();
        let parameters = pointers.as_mut_ptr();
        // SAFETY: this function's contract.
        let code = unsafe {
            (self.launch)(function, grid, 1, 1, block, 1, 1, 0, 0, parameters, ptr::null_mut())
        };
        check("cuLaunchKernel", code)
    }
}
