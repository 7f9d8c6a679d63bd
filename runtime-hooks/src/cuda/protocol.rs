//! What goes over the pipes between [`super::client`] and [`super::helper`]: a JSON object a line.
//!
//! A request with `n` pids is answered by `n` lines, in the order in which the calls come back;
//! `Init`, `Usage`, `FreeMemory`, `JobFiles` and `CopyJobFile` by one. One request is under way at a time.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::job::{Copied, Job, Named, Neighbour, Unusable};
use super::{Call, DriverFacts, GpuUse};
use crate::processes::{Pid, ProcessId};

/// From the client.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Request {
    /// What to call.
    pub(super) call: Call,
    /// For whom; empty for `Init`.
    #[serde(default)]
    pub(super) pids: Vec<Pid>,
    /// The driver's own timeout for `Lock`, in milliseconds.
    #[serde(default)]
    pub(super) timeout_ms: u32,
    /// For `Init`: the configured library.
    #[serde(default)]
    pub(super) libcuda: Option<PathBuf>,
    /// For `Init`: the configured NVML library.
    #[serde(default)]
    pub(super) libnvml: Option<PathBuf>,
    /// For `Init`: the job to be in; for `CopyJobFile`: whose file.
    #[serde(default)]
    pub(super) job: Option<Job>,
    /// For `JobFiles`: those whose environment is read.
    #[serde(default)]
    pub(super) processes: Vec<ProcessId>,
    /// For `JobFiles`: all processes of the container.
    #[serde(default)]
    pub(super) neighbours: Vec<Neighbour>,
    /// For `JobFiles`: the container's init, whose root is the container's.
    #[serde(default)]
    pub(super) init: Option<ProcessId>,
    /// For `Restore`: pairs of UUIDs, from which GPU to which.
    #[serde(default)]
    pub(super) device_map: Vec<(String, String)>,
    /// For `CopyJobFile`: the file to make.
    #[serde(default)]
    pub(super) to: Option<PathBuf>,
}

impl Request {
    /// A call without anything.
    pub(super) fn new(call: Call) -> Self {
        Self {
            call,
            pids: Vec::new(),
            timeout_ms: 0,
            libcuda: None,
            libnvml: None,
            job: None,
            processes: Vec::new(),
            neighbours: Vec::new(),
            init: None,
            device_map: Vec::new(),
            to: None,
        }
    }
}

/// From the helper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    /// `Init` succeeded.
    Ready(DriverFacts),
    /// The job file cannot be used, for this reason.
    NoJobFile(String),
    /// `Init` found no library.
    NoLibrary(String),
    /// `cuInit` returned this.
    InitFailed(i32),
    /// A call for one pid came back.
    Answer {
        /// For whom.
        pid: Pid,
        /// The driver's code, 0 for success.
        code: i32,
        /// The state or the thread id, where the call gives one.
        value: i32,
    },
    /// The library has no such function.
    Unsupported {
        /// For whom.
        pid: Pid,
    },
    /// `Usage`; `None` without NVML.
    Usage(Option<BTreeMap<Pid, GpuUse>>),
    /// `FreeMemory`; `None` without NVML.
    FreeMemory(Option<BTreeMap<String, u64>>),
    /// `JobFiles`.
    JobFiles(BTreeMap<Pid, Result<Option<Named>, Unusable>>),
    /// `CopyJobFile`.
    Copied(Copied),
}
