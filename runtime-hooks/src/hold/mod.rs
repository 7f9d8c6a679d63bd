//! Holding threads: stopping all threads of the container's processes but the driver's, so that no
//! application code runs while the driver works.
//!
//! A process in a frozen cgroup answers no driver call. So a container that came to us frozen is
//! held by ptrace, thawed, locked and checkpointed, frozen again and let go (measured to work on
//! both cgroup versions). The tracer is a helper process of its own (hidden subcommand
//! [`HELPER_SUBCOMMAND`]): a driver helper that is killed at its deadline does not let go of the
//! threads, and when the tracer dies the kernel lets them go. When its client is lost it freezes
//! first what was frozen.

mod client;
pub(crate) mod inside;
mod rewind;
pub mod tracer;

use std::io;

use serde::{Deserialize, Serialize};

pub use client::Tracer;

use crate::processes::Pid;

/// First argument that makes this executable the tracer.
pub const HELPER_SUBCOMMAND: &str = "__hold";

/// Whether a thread of this name is the driver's: `cuda-EvtHandlr`, or `cuda` and a number, as its
/// worker threads are called (`cuda00001400006`; both seen on 580). An application can call its
/// own threads anything, so no more than this is believed.
fn is_drivers_name(name: &str) -> bool {
    name == "cuda-EvtHandlr" || is_workers_name(name, 8)
}

/// Whether a thread of this name may be a restore thread: `cuda` and eleven digits (seen on 580).
pub(crate) fn is_restore_threads_name(name: &str) -> bool {
    is_workers_name(name, 11)
}

fn is_workers_name(name: &str, digits: usize) -> bool {
    name.strip_prefix("cuda").is_some_and(|number| {
        number.len() >= digits && number.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// Which threads of a process go on running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keep {
    /// None: a process without CUDA.
    None,
    /// The driver's: locking needs `cuda-EvtHandlr` as well as the restore thread (given), else it
    /// hangs past its timeout.
    Driver(Pid),
    /// The restore thread only: enough for checkpoint, and all that must not stand still.
    RestoreThread(Pid),
    /// All, but only to come out of a CUDA call: each thread runs until it is about to do
    /// something that is seen outside, and stops in front of that.
    InsideCalls(Pid),
    /// All: the process runs.
    All,
}

/// What to hold of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The process.
    pub pid: Pid,
    /// Its threads that run.
    pub keep: Keep,
}

/// Why threads could not be held.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HoldError {
    /// Another debugger has it, or the kernel forbids ptrace.
    #[error("pid {pid}, thread {tid}: cannot be held by ptrace: {reason}")]
    Refused {
        /// The process.
        pid: Pid,
        /// The thread.
        tid: Pid,
        /// The kernel's words, and who traces it.
        reason: String,
    },
    /// A thread did not come to a stop: it is inside the kernel, uninterruptible.
    #[error("thread {tid} did not stop in time; it hangs in the kernel ({state})")]
    Pending {
        /// The thread.
        tid: Pid,
        /// Its state as /proc names it.
        state: String,
    },
    /// The tracer ended or did not answer.
    #[error("the process that holds threads was lost: {0}")]
    Lost(String),
}

impl From<io::Error> for HoldError {
    fn from(error: io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

/// Holds threads.
pub trait Hold {
    /// Makes the held threads exactly those of `targets` that are not kept: asks threads to stop
    /// (in a frozen cgroup they do as soon as it is thawed) and lets others go. A process that has
    /// ended is no error.
    fn hold(&mut self, targets: &[Target]) -> Result<(), HoldError>;

    /// Waits until every thread that was asked to has stopped, and stops those that were born
    /// meanwhile. After it no code of the held threads runs.
    fn settle(&mut self) -> Result<(), HoldError>;

    /// Lets all go.
    fn release(&mut self);

    /// The pid of the process that holds threads, while one does.
    fn tracer(&self) -> Option<Pid>;
}
