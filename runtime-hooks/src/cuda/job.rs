//! Jobs: CUDA processes that may share GPU memory (`cuIpcGetMemHandle`) and keep it.
//!
//! The driver, from branch 610 on, keeps such memory for processes that name one and the same job
//! file in `CUDA_CHECKPOINT_JOB_FILE`. Whoever locks, checkpoints, restores or unlocks one of them has
//! to name it, too, and to do one after the other. The driver writes to the file while it
//! checkpoints. (NVIDIA's notes to its utility; no driver of that branch was at hand.)

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::processes::{Pid, ProcessId};

/// The environment variable that names the job file.
pub const VARIABLE: &str = "CUDA_CHECKPOINT_JOB_FILE";

/// Where a container that was given a job file finds it.
pub const DESTINATION: &str = "/run/stasis/cuda-job";

/// The first branch of the driver that has jobs: from then on it wants callers to be in the job.
pub const FIRST_BRANCH: u32 = 590;

/// A file, however it is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The device number of its file system.
    pub device: u64,
    /// Its inode there.
    pub inode: u64,
}

/// A way to a job file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// A file of this host.
    Host(PathBuf),
    /// A descriptor of a process.
    Descriptor {
        /// Whose.
        process: ProcessId,
        /// Its number.
        number: u32,
    },
    /// A path in the root of a process.
    Path {
        /// Whose root.
        process: ProcessId,
        /// Absolute.
        path: String,
    },
}

/// The job that calls are made in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its live file.
    pub file: Identity,
    /// Ways to it, of which one is enough: a process may have ended.
    pub ways: Vec<Way>,
}

/// The job file that a process names in its environment, as it was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// What the process says, for messages: printable and cut.
    pub named: String,
    /// Which file that is.
    pub file: Identity,
    /// How it was reached.
    pub way: Way,
    /// Its path in the container; none for a file that has no name, such as a memfd.
    pub path: Option<String>,
    /// Permission bits, those beyond 0777 as well.
    pub mode: u32,
    /// Owner, as the host sees it.
    pub uid: u32,
    /// Group, as the host sees it.
    pub gid: u32,
}

/// Why a process's job file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("names a job file {named} that {reason}")]
pub struct Unusable {
    /// What the process says, for messages: printable and cut.
    pub named: String,
    /// What is wrong with it, to follow 'that'.
    pub reason: String,
}

/// A copy of the live job file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// Its size.
    pub bytes: u64,
    /// SHA-256 in lower-case hexadecimal digits.
    pub sha256: String,
}

/// A process of the container, for values that name another one's descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its pid inside.
    pub inner_pid: Pid,
    /// Which one.
    pub id: ProcessId,
    /// CRIU dumps it: what it says, a restored container's says, too.
    pub in_image: bool,
}
