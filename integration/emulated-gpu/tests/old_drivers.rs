//! What libcuda exports before driver 570.

#![allow(unsafe_code, clippy::unwrap_used)]

mod common;

use std::ffi::c_int;

use common::{BEFORE_570, Machine, built, play_role};
use libloading::Library;

#[test]
fn role() {
    play_role();
}

const CHECKPOINT: [&str; 6] =
    ["GetRestoreThreadId", "GetState", "Lock", "Checkpoint", "Restore", "Unlock"];

fn has(library: &Library, name: &str) -> bool {
    // SAFETY: it is only looked for.
    unsafe { library.get::<unsafe extern "C" fn() -> c_int>(name) }.is_ok()
}

#[test]
fn the_checkpoint_api_is_not_there() {
    // SAFETY: the emulated drivers may be loaded by any program.
    let load = |name: &str| unsafe { Library::new(built(name)) }.unwrap();
    let (old, new) = (load(BEFORE_570), load("libstasis_emulated_gpu.so"));
    for call in CHECKPOINT.map(|call| format!("cuCheckpointProcess{call}")) {
        assert_eq!((has(&old, &call), has(&new, &call)), (false, true), "{call}");
    }
    for call in ["cuInit", "cuDriverGetVersion", "cuLaunchKernel", "cuMemAlloc_v2", "nvmlInit_v2"] {
        assert!(has(&old, call) && has(&new, call), "{call}");
    }
}

#[test]
fn nvml_tells_of_the_old_driver() {
    let machine = Machine::driver("550.54.15");
    let target = machine.target();
    let used = (4 << 20) + 8;
    let lines = machine.nvml();
    assert_eq!(lines[..3], ["550.54.15", "12040", "1"]);
    assert_eq!(lines[9..], [format!("{} Used({used})", target.pid)]);
}
