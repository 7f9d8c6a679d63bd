//! NVML, in the helper only: what GPUs there are and who uses them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

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
        self.of_each(|index, device| {
            Ok(Gpu {
                index,
                uuid: device.uuid()?,
                name: device.name()?,
                memory_bytes: match device.memory_info() {
                    Err(NvmlError::NotSupported) => 0,
                    info => info?.total,
                },
                minor: device.minor_number().ok(),
            })
        })
    }

    /// What each GPU answers. One that has fallen off the bus does not: the others are there nevertheless.
    /// One that does not know is an error, so that it is not taken for one of these: GPUs that share the
    /// host's memory tell nothing of their own.
    fn of_each<T>(
        &self,
        ask: impl Fn(u32, &Device<'_>) -> Result<T, NvmlError>,
    ) -> Result<Vec<T>, NvmlError> {
        let mut answers = Vec::new();
        for index in 0..self.nvml.device_count()? {
            match self.nvml.device_by_index(index).and_then(|device| ask(index, &device)) {
                Ok(answer) => answers.push(answer),
                Err(error @ NvmlError::NotSupported) => return Err(error),
                Err(error) => tracing::warn!(index, %error, "a GPU does not answer"),
            }
        }
        Ok(answers)
    }

    /// Free bytes by UUID, of the GPUs that answer.
    pub(super) fn free_memory(&self) -> Result<BTreeMap<String, u64>, NvmlError> {
        let free = self.of_each(|_, device| Ok((device.uuid()?, device.memory_info()?.free)))?;
        Ok(free.into_iter().collect())
    }

    /// The GPUs that answer on which each of `pids` has a context. NVML names processes by their pid in the
    /// pid namespace of the caller.
    pub(super) fn usage(&self, pids: &[Pid]) -> Result<BTreeMap<Pid, GpuUse>, NvmlError> {
        let mut usage: BTreeMap<Pid, GpuUse> =
            pids.iter().map(|pid| (*pid, GpuUse::default())).collect();
        let all =
            self.of_each(|_, device| Ok((device.uuid()?, device.running_compute_processes()?)))?;
        for (uuid, processes) in all {
            for process in processes {
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
