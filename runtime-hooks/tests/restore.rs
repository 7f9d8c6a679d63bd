//! Every phase of a restore × every way in which it can fail.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Fault, World, image_of, restore};
use stasis_config::Manifest;
use stasis_hooks::cuda::CudaState;
use stasis_hooks::error::{Cause, Left};

fn image(count: i32) -> Manifest {
    image_of("580.1", count)
}

#[test]
fn it_has_started_only_when_its_cuda_works() {
    let world = World::restored(3);
    restore(&world, &image(3)).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 3]);
    world.with(|state| assert!(state.entry.is_none()));
    assert_eq!(world.log().iter().filter(|call| *call == "restore").count(), 1, "in parallel");
}

#[test]
fn one_that_the_manifest_does_not_name_has_begun_since_or_is_lost() {
    let world = World::restored(3);
    world.with(|state| state.cuda.insert(103, CudaState::Running));
    restore(&world, &image(2)).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 3]);

    let failure = restore(&World::restored(3), &image(2)).unwrap_err();
    assert!(matches!(failure.cause, Cause::NotInManifest { .. }), "{failure}");
    assert!(matches!(failure.left, Left::Removed), "{failure}");
}

#[test]
fn a_passing_lack_of_memory_is_waited_for() {
    let world = World::restored(1).fault("restore", Fault::Error(2), 2);
    restore(&world, &image(1)).unwrap();
    assert_eq!(world.states(), [CudaState::Running]);
}

#[test]
fn a_lost_caller_is_no_lost_operation() {
    for fault in [Fault::HangAfter, Fault::Crash] {
        for call in ["restore", "unlock"] {
            let world = World::restored(1).fault(call, fault, 1);
            restore(&world, &image(1)).unwrap();
            assert_eq!(world.states(), [CudaState::Running], "{call} {fault:?}");
        }
    }
}

#[test]
fn every_failure_leaves_nothing() {
    let calls = ["runc-restore", "nodes", "restore", "unlock", "states", "probe", "journal"];
    for call in calls {
        for fault in [Fault::Error(999), Fault::Hang, Fault::Lie] {
            let world = World::restored(2).fault(call, fault, 99);
            let failure = restore(&world, &image(2)).unwrap_err();
            assert!(matches!(failure.left, Left::Removed), "{call}: {failure}");
            world.with(|state| {
                assert!(state.processes.is_empty(), "{call} left processes");
                assert!(state.entry.is_none(), "{call}");
                assert!(state.log.contains(&"delete".to_owned()), "{call}");
            });
        }
    }
}

#[test]
fn an_interrupted_restore_leaves_nothing() {
    let world = World::restored(1);
    world.with(|state| state.interrupted = true);
    let failure = restore(&world, &image(1)).unwrap_err();
    assert!(failure.to_string().contains("interrupted"));
    assert!(world.with(|state| state.processes.is_empty()));
}

#[test]
fn a_process_that_is_missing_is_named() {
    let failure = restore(&World::restored(1), &image(2)).unwrap_err();
    assert!(failure.to_string().contains("process 3 (p2)"), "{failure}");
}

#[test]
fn what_the_new_container_may_not_have_is_refused_before_anything_runs() {
    let world = World::restored(1).fault("complete", Fault::Error(1), 1);
    let failure = restore(&world, &image(1)).unwrap_err();
    assert!(failure.to_string().contains("not given"), "{failure}");
    assert!(matches!(failure.left, Left::Untouched));
    assert!(!world.log().contains(&"runc-restore".to_owned()));
}

#[test]
fn config_json_is_complete_before_runc_and_the_nodes_are_there_before_the_driver() {
    let world = World::restored(1);
    restore(&world, &image(1)).unwrap();
    let log = world.log();
    let at = |call: &str| log.iter().position(|logged| logged == call).unwrap();
    assert!(at("complete") < at("runc-restore"));
    assert!(at("runc-restore") < at("nodes") && at("nodes") < at("probe"));
    assert!(!log.contains(&"put-back".to_owned()), "it stays for the next checkpoint");
}

#[test]
fn config_json_is_put_back_after_each_failure() {
    for call in ["complete", "runc-restore", "nodes", "probe", "restore", "unlock", "journal"] {
        let world = World::restored(1).fault(call, Fault::Error(999), 99);
        restore(&world, &image(1)).unwrap_err();
        assert!(world.log().contains(&"put-back".to_owned()), "{call}");
    }
}

#[test]
fn another_driver_is_refused() {
    let mut manifest = image(1);
    manifest.driver.version = "550.54".into();
    let failure = restore(&World::restored(1), &manifest).unwrap_err();
    assert!(failure.to_string().contains("made with driver 550.54, and this host has 580.1"));
}

#[test]
fn a_host_without_driver_is_refused() {
    let world = World::restored(1).fault("facts", Fault::Error(1), 9);
    let failure = restore(&world, &image(1)).unwrap_err();
    assert!(failure.to_string().contains("libcuda"), "{failure}");
    assert!(!world.log().contains(&"runc-restore".to_owned()));
}

#[test]
fn cuda_that_the_manifest_does_not_name_is_not_started() {
    for named in [0, 1] {
        let world = World::restored(2);
        let failure = restore(&world, &image(named)).unwrap_err();
        assert!(failure.to_string().contains("manifest does not name it"), "{failure}");
        assert!(world.with(|state| state.processes.is_empty()));
    }
}

#[test]
fn an_image_without_cuda_needs_no_driver() {
    let world = World::restored(1).fault("facts", Fault::Error(1), 9);
    world.with(|state| {
        state.cuda.clear();
        state.processes[1].devices.clear();
    });
    restore(&world, &image(0)).unwrap();
    assert!(!world.log().contains(&"restore".to_owned()));
}
