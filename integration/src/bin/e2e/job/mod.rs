//! Job files: containers whose processes share GPU memory.
//!
//! What depends on who asks is tried through each of the front ends ([`lives`]), and what is the
//! engine's alone with bundles of our own ([`own`]).

mod bundles;
mod execs;
mod faults;
pub(crate) mod front_ends;
mod hostile_files;
mod hostile_images;
pub(crate) mod lives;
mod members;
mod old_drivers;
pub(crate) mod own;
mod utility;

use stasis_integration::case::Place;

use crate::Test;

/// The first branch of the driver that keeps shared memory.
pub(crate) const KEEPS: &str = "610.43.02";

/// Knows the variable, and keeps none.
const KNOWS: &str = "590.44.01";

/// Knows nothing of jobs.
const OLD: &str = "580.159.04";

/// The annotation by which a container gets a job file.
pub(crate) const FILE: &str = "dev.stasis.job=file";

/// The variable that names one.
const VARIABLE: &str = "CUDA_CHECKPOINT_JOB_FILE";

/// Where a container finds the one that it was given.
const GIVEN: &str = "/run/stasis/cuda-job";

/// A program that launches another in a new job, as people do who need no annotation.
pub(crate) const LAUNCH: [&str; 2] = ["/bin/cuda-checkpoint", "--launch-job"];

/// Four processes that share memory.
pub(crate) const IPC: [&str; 2] = ["/bin/ipc", "4"];

/// What is tried everywhere, where the shim makes a difference, and in the older lab only.
pub(crate) fn modules() -> Vec<(&'static str, Place, Vec<Test>)> {
    let mut modules: Vec<_> =
        front_ends::tests().into_iter().map(|(place, tests)| ("job", place, tests)).collect();
    let mut engine = bundles::tests();
    engine.extend(utility::tests());
    engine.extend(old_drivers::tests());
    engine.extend(hostile_files::tests());
    engine.extend(hostile_images::tests());
    engine.extend(members::tests());
    engine.extend(faults::tests());
    let older =
        engine.into_iter().map(|test| test.only(&[stasis_integration::suite::Suite::Trixie]));
    modules.push(("job", Place::SHARED, older.collect()));
    modules
}
