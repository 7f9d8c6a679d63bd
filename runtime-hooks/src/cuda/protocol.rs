//! What goes over the pipes between [`super::client`] and [`super::helper`]: a JSON object a line.
//!
//! A request with `n` pids is answered by `n` lines, in the order in which the calls come back;
//! `Init`, `Usage` and `FreeMemory` by one. One request is under way at a time.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Call, DriverFacts, GpuUse};
use crate::processes::Pid;

/// From the client.
#[derive(Debug, Serialize, Deserialize)]
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
}

/// From the helper.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    /// `Init` succeeded.
    Ready(DriverFacts),
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
}
