//! What goes over the pipes between [`super::client`] and [`super::helper`]: a JSON object a line.
//!
//! A request with `n` pids is answered by `n` lines, in the order in which the calls come back;
//! `Init`, `Usage`, `FreeMemory`, `JobFiles` and `CopyJobFile` by one. One request is under way at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use stasis_config::config::Interface;

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
    /// Those that are known to be CHECKPOINTED, for drivers that do not tell.
    #[serde(default)]
    pub(super) checkpointed: BTreeSet<Pid>,
    /// The driver's own timeout for `Lock`, in milliseconds; where it has none, how long processes
    /// that are toggled wait for each other.
    #[serde(default)]
    pub(super) timeout_ms: u32,
    /// How long a call may take, in milliseconds, where it can be ended without ending the helper.
    #[serde(default)]
    pub(super) limit_ms: u64,
    /// For `Init`: by what calls are made.
    #[serde(default)]
    pub(super) interface: Interface,
    /// For `Init`: NVIDIA's command.
    #[serde(default)]
    pub(super) utility: PathBuf,
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
            checkpointed: BTreeSet::new(),
            timeout_ms: 0,
            limit_ms: 0,
            interface: Interface::default(),
            utility: PathBuf::new(),
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
    /// NVIDIA's command cannot be used, for this reason.
    NoUtility(String),
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
    /// The process is where the call leads, and the driver was not asked.
    AlreadyThere {
        /// For whom.
        pid: Pid,
    },
    /// The process was checkpointed, still had a device open, and was restored.
    BroughtBack {
        /// For whom.
        pid: Pid,
    },
    /// The process was checkpointed, and restored because others were not ready.
    OthersNotReady {
        /// For whom.
        pid: Pid,
    },
    /// A call was ended because its time was up.
    Late {
        /// For whom.
        pid: Pid,
    },
    /// What came back is not understood.
    Failed {
        /// For whom.
        pid: Pid,
        /// What came back.
        how: String,
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
