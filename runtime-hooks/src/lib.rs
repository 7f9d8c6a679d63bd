//! What Stasis does around runc's checkpoint and restore.
//!
//! # The way of a checkpoint
//!
//! 1. [`oci`] takes runc's command line: which container, which image, exit or leave running.
//!    [`container`] finds its init process, bundle and cgroup; [`journal`] its lock and what an
//!    earlier operation may have left behind, which [`resume`] puts right.
//! 2. [`discover`] asks which processes use CUDA ([`processes`] and the driver). None: runc is
//!    executed in our place and nothing of the following happens.
//! 3. [`checkpoint`] is the sequence: refuse what cannot work, note in the journal, [`suspend`]
//!    (lock and checkpoint all CUDA state, with threads held by [`hold`] so that no application
//!    code runs, then the [`freezer`]), have [`runc`] dump, make the [`image`] last, write its
//!    manifest.
//! 4. Then the container ends, or stays paused until [`resume`], or [`bring_back`] gives it back
//!    its CUDA.
//!
//! Whatever fails on the way, [`bring_back`] ends where the caller began.
//!
//! A restore is [`restore`]: [`cdi`] completes the new container's config.json, then runc, then the
//! driver ([`give_back`]).
//!
//! Processes that share GPU memory are in a [`job`]: its file is given to the container at `create`,
//! found at a checkpoint by what the processes say, and copied into the image; a restored container
//! has a copy of its own.
//!
//! # Invariants of the code
//!
//! - The sequences see only the traits in [`parts`]; everything that touches the host is behind
//!   them.
//! - libcuda and NVML are loaded in the helper process of [`cuda`] and nowhere else.
//! - `unsafe` is in `sys` and `cuda::ffi` and nowhere else.

pub mod admin;
pub mod bring_back;
pub mod cdi;
pub mod check;
pub mod checkpoint;
pub mod child;
pub mod config_json;
pub mod container;
pub mod containers;
pub mod cuda;
pub mod discover;
pub mod engines;
pub mod error;
mod files;
pub mod freezer;
pub mod give_back;
pub mod gpu_locks;
pub mod hold;
pub mod host_memory;
pub mod image;
mod in_turn;
pub mod inspect;
pub mod interrupt;
pub mod job;
pub mod journal;
pub mod oci;
pub mod parts;
pub mod processes;
pub mod remap;
pub mod restore;
pub mod resume;
pub mod runc;
pub mod sockets;
pub mod spec;
pub mod suspend;
pub mod suspended;
mod sys;

use std::ffi::OsStr;
use std::process::ExitCode;

/// Runs as one of this program's helpers, if the first argument says so.
#[must_use]
pub fn helper(first_argument: Option<&OsStr>) -> Option<ExitCode> {
    match first_argument?.to_str()? {
        cuda::HELPER_SUBCOMMAND => Some(cuda::helper::serve()),
        hold::HELPER_SUBCOMMAND => Some(hold::tracer::serve()),
        job::launch::SUBCOMMAND => Some(job::launch::copy()),
        _ => None,
    }
}
