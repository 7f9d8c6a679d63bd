//! `containerd-shim-runc-stasis`: containerd's shim for runc, with CUDA.
//!
//! # The way of a request
//!
//! 1. containerd runs this executable with `start` ([`boot`]): it binds a socket, leaves a server
//!    behind ([`server`]) and prints the address. The containers of a pod share one server.
//! 2. containerd sends requests of its Task service. [`service`] translates them, and does nothing
//!    else: a request is found its container in [`tasks`], an answer is made of what
//!    [`container`] returns, an [`error`] gets its code.
//! 3. [`container`] knows what may be done when ([`state`]) and at the same time. Its processes are
//!    [`process`]es with their [`stdio`].
//! 4. All that is done to a container is a call of [`runc`], through the engine of
//!    [`stasis_hooks`] where its CUDA is concerned. The engine is a process of its own.
//! 5. Processes end in [`reaper`]; containerd is told by [`events`], also of [`oom`] kills.
//!    [`metrics`] of a container come from its [`cgroup`]s.
//! 6. After the last container containerd asks for Shutdown, the server ends, and containerd runs
//!    this executable with `delete` to remove what may be left.
//!
//! # A checkpoint
//!
//! `Task.Checkpoint` → [`service`] → [`container::Container::checkpoint`] → [`runc`] → engine →
//! runc → CRIU. Meanwhile State, Wait, Kill and Delete are answered as ever, and other operations
//! on the container are refused.
//!
//! # Invariants of the code
//!
//! - Only [`service`] and [`server`] know the service's messages, only [`events`] those of events.
//! - Only [`reaper`] waits for children.
//! - No lock is held over an await but those that an operation is meant to hold.
//! - There is no `unsafe` here.

pub mod boot;
pub mod bundle;
pub mod cgroup;
pub mod container;
pub mod error;
pub mod events;
pub mod log;
pub mod metrics;
pub mod oom;
pub mod options;
pub mod process;
pub mod reaper;
pub mod runc;
pub mod server;
pub mod service;
pub mod state;
pub mod stdio;
pub mod tasks;
#[cfg(test)]
mod testing;
