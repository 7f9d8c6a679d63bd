//! NVML, in the helper only: what GPUs there are and who uses them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;

use super::{Gpu, GpuUse, search};
use crate::processes::Pid;

/// A loaded NVML.
pub(super) struct Monitor {
    nvml: Nvml,
}

impl Monitor {
    /// The first NVML that loads; `None` if none does. Without NVML the driver still works, only
    /// the manifest says less and the GPUs of a process are told by its open device files.
    pub(super) fn load(configured: Option<&Path>, libcuda: &Path) -> Option<Self> {
        let variable = std::env::var_os(search::LIBNVML_VARIABLE).map(PathBuf::from);
        search::libnvml(configured, variable, libcuda)
            .into_iter()
            .find_map(|path| Nvml::builder().lib_path(path.as_os_str()).init().ok())
            .map(|nvml| Self { nvml })
    }

    pub(super) fn driver_version(&self) -> Option<String> {
        self.nvml.sys_driver_version().ok()
    }

    pub(super) fn gpus(&self) -> Result<Vec<Gpu>, NvmlError> {
        let gpu = |index| -> Result<Gpu, NvmlError> {
            let device = self.nvml.device_by_index(index)?;
            Ok(Gpu {
                index,
                uuid: device.uuid()?,
                name: device.name()?,
                memory_bytes: device.memory_info()?.total,
                minor: device.minor_number().ok(),
            })
        };
        // One that has fallen off the bus does not answer: the others are there nevertheless.
        let answers = |index| {
            let found = gpu(index);
            found.inspect_err(|error| tracing::warn!(index, %error, "a GPU does not answer")).ok()
        };
        Ok((0..self.nvml.device_count()?).filter_map(answers).collect())
    }

    /// Free bytes by UUID.
    pub(super) fn free_memory(&self) -> Result<BTreeMap<String, u64>, NvmlError> {
        (0..self.nvml.device_count()?)
            .map(|index| {
                let device = self.nvml.device_by_index(index)?;
                Ok((device.uuid()?, device.memory_info()?.free))
            })
            .collect()
    }

    /// The GPUs on which each of `pids` has a context. NVML names processes by their pid in the
    /// pid namespace of the caller.
    pub(super) fn usage(&self, pids: &[Pid]) -> Result<BTreeMap<Pid, GpuUse>, NvmlError> {
        let mut usage: BTreeMap<Pid, GpuUse> =
            pids.iter().map(|pid| (*pid, GpuUse::default())).collect();
        for index in 0..self.nvml.device_count()? {
            let device = self.nvml.device_by_index(index)?;
            let uuid = device.uuid()?;
            for process in device.running_compute_processes()? {
                let Ok(pid) = Pid::try_from(process.pid) else {
                    continue;
                };
                if let Some(found) = usage.get_mut(&pid) {
                    let bytes = match process.used_gpu_memory {
                        UsedGpuMemory::Used(bytes) => Some(bytes),
                        UsedGpuMemory::Unavailable => None,
                    };
                    found.gpus.push((uuid.clone(), bytes));
                }
            }
        }
        Ok(usage)
    }
}
