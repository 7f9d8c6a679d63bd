//! A driver that can only toggle: lock and checkpoint are one step, and what such a step leaves LOCKED,
//! when it is refused or lost, cannot be unlocked.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Fault, INIT, World, asked, image_of, process, restore, restore_as};
use stasis_config::{Annotations, Manifest};
use stasis_hooks::checkpoint::{After, checkpoint};
use stasis_hooks::cuda::CudaState;
use stasis_hooks::cuda::sides::Sides;
use stasis_hooks::discover::discover;
use stasis_hooks::error::{Cause, Failure, Left, Phase};
use stasis_hooks::journal::{Entry, Stage};
use stasis_hooks::parts::Progress;
use stasis_hooks::resume::{repair, resume};
use stasis_hooks::suspended;

const EXIT: After = After::Exit { by_criu: false };

fn take(world: &World, after: After) -> Result<(), Failure> {
    let annotations = Annotations { multi_process: true, ..Annotations::default() };
    world.run(|parts| {
        let cuda = discover(parts).unwrap();
        asked(after, &annotations, |request| checkpoint(parts, request, cuda))
    })
}

fn world(count: i32, frozen: bool) -> World {
    World::new(count, frozen).toggling()
}

/// The next operation is another process, which knows nothing of the toggles of this one.
fn as_another_process(world: &World) {
    world.with(|state| {
        state.sides = Sides::default();
        state.held.clear();
        state.paused_by_caller = false;
    });
}

#[test]
fn a_running_container_is_checkpointed_and_runs_on() {
    let world = world(2, false);
    take(&world, After::LeaveRunning).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 2]);
    let manifest = world.with(|state| {
        assert!(!state.frozen && state.held.is_empty() && state.image_is_whole);
        assert_eq!(state.entry, None);
        state.manifest.clone().unwrap()
    });
    let phases: Vec<_> = manifest.phases.iter().map(|phase| phase.name.as_str()).collect();
    assert!(phases.contains(&"cuda-checkpoint") && !phases.contains(&"lock"), "{phases:?}");
}

#[test]
fn a_paused_container_stays_paused_until_resume() {
    let world = world(2, true);
    take(&world, After::LeaveRunning).unwrap();
    assert_eq!(world.states(), [CudaState::Checkpointed; 2]);
    let entry = world.with(|state| {
        assert!(state.frozen && state.held.is_empty() && !state.ran);
        state.entry.clone().unwrap()
    });
    assert_eq!(entry.stage, Stage::AwaitingResume);
    as_another_process(&world);
    world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 2]);
    world.with(|state| assert!(!state.frozen && state.entry.is_none()));
}

#[test]
fn a_process_that_comes_late_is_checkpointed_too() {
    let world = world(2, false);
    world.with(|state| state.births.push(("lock", 0, process(150, true))));
    take(&world, EXIT).unwrap();
    let manifest = world.with(|state| state.manifest.clone().unwrap());
    assert_eq!(manifest.processes.len(), 3);
}

#[test]
fn what_fails_later_is_toggled_back() {
    for frozen in [false, true] {
        for call in ["freeze", "dump", "sync", "finish"] {
            let world = world(2, frozen).fault(call, Fault::Error(1), 1);
            let failure = take(&world, EXIT).unwrap_err();
            assert!(matches!(failure.left, Left::Running | Left::Paused), "{call}: {failure}");
            assert_eq!(world.states(), [CudaState::Running; 2], "{call}");
            world.with(|state| {
                assert_eq!(state.frozen, frozen, "{call}");
                assert!(!state.ran && state.entry.is_none() && !state.image_is_whole, "{call}");
            });
        }
    }
}

#[test]
fn a_refused_toggle_costs_the_container_and_the_error_says_so() {
    let world = world(2, false);
    world.with(|state| state.refused.push(102));
    let failure = take(&world, EXIT).unwrap_err();
    assert_eq!(failure.phase, Phase::CudaCheckpoint);
    let text = failure.to_string();
    assert!(matches!(failure.left, Left::Killed { .. }), "{text}");
    assert!(text.contains("pid 102 (p102): cuda-checkpoint --toggle returned 801"), "{text}");
    assert!(text.contains("pid 102 (p102): its CUDA is in state RUNNING or LOCKED"), "{text}");
    assert!(text.contains("was killed"), "{text}");
    assert!(world.with(|state| state.processes.is_empty() && state.entry.is_none()));
}

#[test]
fn a_lost_toggle_is_cleared_up_by_another_and_only_what_is_locked_is_killed() {
    for frozen in [false, true] {
        for (fault, lives) in [(Fault::Crash, true), (Fault::HangAfter, true), (Fault::Hang, false)]
        {
            let world = world(2, frozen).fault("lock", fault, 1);
            let failure = take(&world, EXIT).unwrap_err();
            let text = failure.to_string();
            if lives {
                assert!(matches!(failure.left, Left::Running | Left::Paused), "{fault:?}: {text}");
                assert_eq!(world.states(), [CudaState::Running; 2], "{fault:?}");
                world.with(|state| assert_eq!((state.frozen, state.ran), (frozen, false)));
            } else {
                assert!(matches!(failure.left, Left::Killed { .. }), "{fault:?}: {text}");
            }
        }
    }
}

#[test]
fn what_waits_for_each_other_is_brought_back_and_tried_again() {
    for (tries, made) in [(2, true), (10_000, false)] {
        let world = world(2, false);
        world.with(|state| state.in_flight = [(101, tries)].into());
        let taken = take(&world, After::LeaveRunning);
        assert_eq!(world.states(), [CudaState::Running; 2]);
        if made {
            taken.unwrap();
            continue;
        }
        let failure = taken.unwrap_err();
        assert!(failure.to_string().contains("did not come to an end within 300ms"), "{failure}");
        assert!(matches!(failure.left, Left::Running), "{failure}");
        // Nothing is in doubt, so nothing is cleared up by another toggle.
        let left = world.with(|state| state.in_flight[&101]);
        let Cause::NotReady { attempts, .. } = failure.cause else { panic!("{failure}") };
        assert_eq!(tries - left, attempts);
    }
}

#[test]
fn a_lie_is_a_failure() {
    let world = world(1, false).fault("lock", Fault::Lie, 1);
    let failure = take(&world, EXIT).unwrap_err();
    assert!(
        failure.to_string().contains("is RUNNING where CHECKPOINTED was expected"),
        "{failure}"
    );
    assert!(matches!(failure.left, Left::Running), "{failure}");
    assert_eq!(world.states(), [CudaState::Running]);
}

#[test]
fn a_lost_restore_after_a_good_dump_is_cleared_up_or_the_image_is_named() {
    for (fault, lives) in [
        (Fault::Error(2), true),
        (Fault::Crash, true),
        (Fault::HangAfter, true),
        (Fault::Hang, false),
    ] {
        let world = world(2, false).fault("restore", fault, 1);
        let taken = take(&world, After::LeaveRunning);
        if lives {
            taken.unwrap();
            assert_eq!(world.states(), [CudaState::Running; 2], "{fault:?}");
        } else {
            let failure = taken.unwrap_err();
            let text = failure.to_string();
            assert!(matches!(failure.left, Left::Killed { .. }), "{fault:?}: {text}");
            assert!(text.contains("the image in /image is whole"), "{text}");
        }
    }
}

#[test]
fn what_a_killed_operation_left_behind_is_put_right_from_every_stage() {
    for frozen in [false, true] {
        let mut cut = 0;
        for stop in 0..40 {
            let world = world(2, frozen);
            let stopped = world.cut_off_after(stop, || take(&world, After::LeaveRunning).is_ok());
            let Some(entry) = world.with(|state| state.entry.clone()) else { continue };
            if stopped == Some(true) {
                break;
            }
            cut += 1;
            as_another_process(&world);
            world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
            assert_eq!(world.states(), [CudaState::Running; 2], "cut off after {stop} calls");
            world.with(|state| {
                assert_eq!(state.frozen, frozen, "cut off after {stop} calls");
                assert!(state.entry.is_none());
            });
        }
        assert!(cut > 5, "{cut}");
    }
}

/// Its toggle was killed with it, between restore and unlock.
#[test]
fn one_that_a_killed_operation_left_locked_is_not_said_to_run() {
    for stage in [None, Some(Stage::AwaitingResume)] {
        let world = world(1, stage.is_some());
        if stage.is_some() {
            take(&world, After::LeaveRunning).unwrap();
        } else {
            let calls = (0..40).find(|stop| {
                let world = self::world(1, false);
                world.cut_off_after(*stop, || _ = take(&world, After::LeaveRunning));
                world.log().contains(&"restore".to_owned())
            });
            world.cut_off_after(calls.unwrap(), || _ = take(&world, After::LeaveRunning));
        }
        world.with(|state| {
            state.frozen = false;
            state.cuda.insert(101, CudaState::Locked);
        });
        let entry = world.with(|state| state.entry.clone().unwrap());
        as_another_process(&world);
        let failure = world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap_err();
        assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
    }
}

fn suspend(world: &World) -> Result<Entry, Failure> {
    let annotations = Annotations { multi_process: true, ..Annotations::default() };
    common::suspend(world, &annotations, None)
}

fn resume_suspended(world: &World, entry: &Entry) -> Result<(), Failure> {
    as_another_process(world);
    let mut progress = Progress::new(Phase::Preflight);
    world.run(|parts| suspended::resume(parts, entry, None, &[], &World::limits(), &mut progress))
}

#[test]
fn what_a_toggle_has_moved_to_host_memory_is_not_looked_for_room_again() {
    let world = world(1, false);
    world.with(|state| state.host_memory = 100 + (64 << 20));
    world.with(|state| state.host_memory_taken_at = Some("lock"));
    suspend(&world).unwrap();
}

#[test]
fn a_suspended_container_is_resumed_or_stays_suspended_as_a_whole() {
    for frozen in [false, true] {
        let world = world(2, frozen);
        let entry = suspend(&world).unwrap();
        assert_eq!(world.states(), [CudaState::Checkpointed; 2]);
        world.with(|state| state.stuck.push(102));
        let failure = resume_suspended(&world, &entry).unwrap_err();
        assert!(matches!(failure.left, Left::Suspended), "{failure}");
        assert_eq!(world.states(), [CudaState::Checkpointed; 2]);
        world.with(|state| {
            assert_eq!(state.entry.as_ref().unwrap().stage, Stage::Suspended);
            assert_eq!(state.frozen, frozen);
            state.stuck.clear();
        });
        resume_suspended(&world, &entry).unwrap();
        assert_eq!(world.states(), [CudaState::Running; 2]);
    }
    // What has found no room finds it never again.
    let world = world(1, false);
    let entry = suspend(&world).unwrap();
    world.with(|state| state.no_room.push(101));
    let failure = resume_suspended(&world, &entry).unwrap_err();
    assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
}

#[test]
fn a_suspended_container_whose_resume_was_cut_off_locked_is_not_said_to_run() {
    let world = world(1, false);
    let entry = suspend(&world).unwrap();
    world.with(|state| state.cuda.insert(101, CudaState::Locked));
    let failure = resume_suspended(&world, &entry).unwrap_err();
    assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
}

/// With NVML, say. Who recalls that it was suspended is not misled by that, and not by what it recalls.
#[test]
fn one_that_has_opened_a_device_since_is_resumed_by_who_recalls_it() {
    for (really, lives) in
        [(CudaState::Checkpointed, true), (CudaState::Running, true), (CudaState::Locked, false)]
    {
        let world = world(1, false);
        let entry = suspend(&world).unwrap();
        as_another_process(&world);
        world.with(|state| {
            if really == CudaState::Checkpointed {
                state.opened.push(101);
            }
            state.cuda.insert(101, really);
        });
        let resumed = resume_suspended(&world, &entry);
        if lives {
            resumed.unwrap();
            assert_eq!(world.states(), [CudaState::Running], "{really}");
        } else {
            let failure = resumed.unwrap_err();
            assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
        }
    }
}

/// Neither does who puts right what a killed operation has left.
#[test]
fn one_that_has_opened_a_device_since_is_repaired_by_who_recalls_it() {
    let opens = |world: &World| {
        world.with(|state| {
            assert_eq!(state.cuda[&101], CudaState::Checkpointed);
            state.opened.push(101);
            state.frozen = false;
        });
    };
    let repaired = |world: &World| {
        let entry = world.with(|state| state.entry.clone().unwrap());
        as_another_process(world);
        world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
        assert_eq!(world.states(), [CudaState::Running]);
        world.with(|state| assert!(state.entry.is_none()));
    };
    // A resume that was killed before its toggle.
    let world = world(1, false);
    let entry = suspend(&world).unwrap();
    world.cut_off_after(5, || _ = resume_suspended(&world, &entry));
    world.with(|state| assert_eq!(state.entry.as_ref().unwrap().stage, Stage::Resuming));
    opens(&world);
    repaired(&world);
    // A paused one that somebody else than its engine has thawed.
    let world = self::world(1, true);
    take(&world, After::LeaveRunning).unwrap();
    opens(&world);
    repaired(&world);
    // One that ran in between, and is paused again.
    let world = self::world(1, true);
    take(&world, After::LeaveRunning).unwrap();
    world.with(|state| state.opened.push(101));
    let entry = world.with(|state| state.entry.clone().unwrap());
    as_another_process(&world);
    world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
    assert_eq!(world.states(), [CudaState::Running]);
    // A restore that was killed before its toggle.
    let world = World::restored(1).toggling();
    let calls = (0..40).find(|stop| {
        let world = World::restored(1).toggling();
        world.cut_off_after(*stop, || _ = restore(&world, &image(1)));
        world.with(|state| state.entry.is_some())
    });
    world.cut_off_after(calls.unwrap(), || _ = restore(&world, &image(1)));
    opens(&world);
    repaired(&world);
}

/// For one that is back no room is looked for that it has itself.
#[test]
fn one_that_has_come_back_since_needs_no_room() {
    let repaired = |world: &World| {
        world.with(|state| {
            assert_eq!(state.cuda[&101], CudaState::Running);
            state.gpu_bytes = Some(100);
            state.frozen = false;
        });
        let entry = world.with(|state| state.entry.clone().unwrap());
        as_another_process(world);
        world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
        assert_eq!(world.states(), [CudaState::Running]);
        world.with(|state| assert!(state.entry.is_none()));
    };
    let cut_off = |world: &dyn Fn() -> World, act: &dyn Fn(&World)| {
        let stops = |stop: &u32| {
            let world = world();
            world.cut_off_after(*stop, || act(&world));
            world.with(|state| state.entry.is_some() && state.cuda[&101] == CudaState::Running)
        };
        let stop = (1..60).find(stops).unwrap();
        let world = world();
        world.cut_off_after(stop, || act(&world));
        repaired(&world);
    };
    let suspended = || {
        let world = world(1, false);
        suspend(&world).unwrap();
        world
    };
    cut_off(&suspended, &|world| {
        let entry = world.with(|state| state.entry.clone().unwrap());
        let _ = resume_suspended(world, &entry);
    });
    let restored = || World::restored(1).toggling();
    cut_off(&restored, &|world| _ = restore(world, &image(1)));
    let parked = || {
        let world = world(1, true);
        take(&world, After::LeaveRunning).unwrap();
        world
    };
    cut_off(&parked, &|world| {
        let entry = world.with(|state| state.entry.clone().unwrap());
        as_another_process(world);
        let _ = world.run(|parts| resume(parts, &entry, &World::limits()));
    });
}

/// Its code runs as soon as CRIU has restored it.
#[test]
fn a_restored_one_that_opens_a_device_at_once_gets_its_cuda() {
    for suspended in [false, true] {
        let world = World::restored(2).toggling();
        world.with(|state| state.opened.push(101));
        restore_as(&world, &image(2), suspended).unwrap();
        let expected = if suspended { CudaState::Checkpointed } else { CudaState::Running };
        assert_eq!(world.states(), [expected; 2]);
    }
}

fn image(count: i32) -> Manifest {
    image_of("550.1", count)
}

#[test]
fn an_image_is_restored() {
    let world = World::restored(3).toggling();
    restore(&world, &image(3)).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 3]);
    assert_eq!(world.log().iter().filter(|call| *call == "restore").count(), 1, "in parallel");

    let world = World::restored(2).toggling().fault("restore", Fault::Hang, 1);
    let failure = restore(&world, &image(2)).unwrap_err();
    assert!(matches!(failure.left, Left::Removed), "{failure}");
    assert!(failure.to_string().contains("RUNNING or LOCKED"), "{failure}");
}

#[test]
fn a_restore_that_is_cut_off_is_put_right() {
    for locked in [false, true] {
        let world = World::restored(1).toggling();
        let calls = (0..40).find(|stop| {
            let world = World::restored(1).toggling();
            world.cut_off_after(*stop, || _ = restore(&world, &image(1)));
            world.log().contains(&"restore".to_owned())
        });
        world.cut_off_after(calls.unwrap(), || _ = restore(&world, &image(1)));
        if locked {
            world.with(|state| state.cuda.insert(101, CudaState::Locked));
        }
        let entry = world.with(|state| state.entry.clone().unwrap());
        as_another_process(&world);
        let repaired = world.run(|parts| repair(parts, &entry, INIT, &World::limits()));
        if locked {
            let failure = repaired.unwrap_err();
            assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
        } else {
            repaired.unwrap();
            assert_eq!(world.states(), [CudaState::Running]);
        }
    }
}
