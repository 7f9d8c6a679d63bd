//! Every phase of a checkpoint × every way in which it can fail.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Fault, World, asked, position, process};
use stasis_config::Annotations;
use stasis_hooks::checkpoint::{After, again, checkpoint, parked};
use stasis_hooks::cuda::CudaState;
use stasis_hooks::discover::discover;
use stasis_hooks::error::{Failure, Left, Phase};
use stasis_hooks::journal::Stage;
use stasis_hooks::resume::{repair, resume};

const EXIT: After = After::Exit { by_criu: false };

fn take(world: &World, after: After) -> Result<(), Failure> {
    take_with(world, after, &Annotations { multi_process: true, ..Annotations::default() })
}

fn take_with(world: &World, after: After, annotations: &Annotations) -> Result<(), Failure> {
    world.run(|parts| {
        let cuda = discover(parts).unwrap();
        assert!(!cuda.is_empty());
        asked(after, annotations, |request| checkpoint(parts, request, cuda))
    })
}

#[test]
fn exit_kills_only_when_the_image_is_whole() {
    for frozen in [false, true] {
        let world = World::new(2, frozen);
        take(&world, EXIT).unwrap();
        let log = world.log();
        assert!(position(&log, "dump") < position(&log, "sync"), "{log:?}");
        assert!(position(&log, "sync") < position(&log, "finish"), "{log:?}");
        assert!(position(&log, "finish") < position(&log, "kill"), "{log:?}");
        world.with(|state| {
            assert!(state.image_is_whole && state.processes.is_empty() && !state.ran);
            assert_eq!(state.entry, None);
        });
    }
}

#[test]
fn a_running_container_runs_on() {
    let world = World::new(2, false);
    take(&world, After::LeaveRunning).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 2]);
    world.with(|state| {
        assert!(!state.frozen && state.held.is_empty() && state.image_is_whole);
        assert_eq!(state.entry, None);
    });
}

#[test]
fn a_paused_container_stays_paused_until_resume() {
    let world = World::new(2, true);
    take(&world, After::LeaveRunning).unwrap();
    assert_eq!(world.states(), [CudaState::Checkpointed; 2]);
    let entry = world.with(|state| {
        assert!(state.frozen && state.held.is_empty() && !state.ran);
        state.entry.clone().unwrap()
    });
    assert_eq!(entry.stage, Stage::AwaitingResume);
    world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 2]);
    world.with(|state| assert!(!state.frozen && state.held.is_empty() && state.entry.is_none()));
    // CUDA first, then the container's own code.
    let log = world.log();
    assert!(position(&log, "resume") < position(&log, "restore"));
}

#[test]
fn with_tcp_criu_kills_and_the_manifest_comes_last() {
    let world = World::new(1, true);
    take(&world, After::Exit { by_criu: true }).unwrap();
    let log = world.log();
    assert!(!log.contains(&"kill".to_owned()));
    assert_eq!(log.last().unwrap(), "finish");
}

#[test]
fn what_fails_when_criu_has_killed_is_not_taken_for_somebodys_kill() {
    for call in ["sync", "finish"] {
        let world = World::new(1, false).fault(call, Fault::Error(1), 1);
        let failure = take(&world, After::Exit { by_criu: true }).unwrap_err();
        assert!(matches!(failure.left, Left::Gone), "{failure}");
        assert!(failure.to_string().contains("no space left on device"), "{failure}");
    }
}

#[test]
fn cuda_that_exec_has_started_is_refused_since_criu_does_not_dump_it() {
    let world = World::new(2, false);
    world.with(|state| state.processes[2].parent = 7);
    let failure = take(&world, EXIT).unwrap_err();
    assert!(matches!(failure.left, Left::Untouched), "{failure}");
    assert!(failure.to_string().contains("pid 102 (p102): was started"), "{failure}");

    // One that comes while the container is being suspended.
    let world = World::new(1, false);
    let stray = stasis_hooks::processes::Process { parent: 7, ..process(150, true) };
    world.with(|state| state.births.push(("lock", 0, stray)));
    let failure = take(&world, EXIT).unwrap_err();
    assert!(matches!(failure.left, Left::Running), "{failure}");
    assert!(failure.to_string().contains("pid 150 (p150): was started"), "{failure}");
}

#[test]
fn all_are_locked_before_any_is_checkpointed() {
    let world = World::new(3, false);
    world.with(|state| state.births.push(("lock", 0, process(150, true))));
    take(&world, EXIT).unwrap();
    let log = world.log();
    let last_lock = log.iter().rposition(|call| call == "lock").unwrap();
    assert!(last_lock < position(&log, "checkpoint"), "{log:?}");
    // The fourth process, which began with CUDA in between, is in the image.
    let manifest = world.with(|state| state.manifest.clone().unwrap());
    assert_eq!(manifest.processes.len(), 4);
}

#[test]
fn a_second_cuda_process_needs_leave_also_when_it_comes_late() {
    let world = World::new(2, false);
    let failure = take_with(&world, EXIT, &Annotations::default()).unwrap_err();
    assert_eq!(failure.phase, Phase::Preflight);
    assert!(matches!(failure.left, Left::Untouched));
    assert!(failure.to_string().contains("dev.stasis.multi-process"), "{failure}");
    assert!(!world.log().contains(&"lock".to_owned()));

    let world = World::new(1, false);
    world.with(|state| state.births.push(("lock", 0, process(150, true))));
    let failure = take_with(&world, EXIT, &Annotations::default()).unwrap_err();
    assert!(matches!(failure.left, Left::Running), "{failure}");
    assert_eq!(world.states(), [CudaState::Running; 2]);
}

#[test]
fn a_process_that_starts_cuda_after_the_hold_is_not_dumped() {
    for frozen in [false, true] {
        let world = World::new(1, frozen);
        world.with(|state| state.births.push(("freeze", 0, process(150, true))));
        let failure = take(&world, EXIT).unwrap_err();
        assert_eq!(failure.phase, Phase::Freeze, "{failure}");
        assert!(!world.log().contains(&"dump".to_owned()));
        assert_eq!(world.states(), [CudaState::Running; 2]);
    }
}

#[test]
fn a_process_that_starts_cuda_just_before_the_hold_is_locked_too() {
    for frozen in [false, true] {
        // Looks are: before the lock, after it, and behind the hold.
        let world = World::new(1, frozen);
        let holds = if frozen { 3 } else { 1 };
        world.with(|state| state.births.push(("settle", holds, process(150, true))));
        take(&world, After::LeaveRunning).unwrap();
        world.with(|state| {
            assert!(state.births.is_empty() && !state.ran, "frozen={frozen}");
            assert_eq!(state.manifest.as_ref().unwrap().processes.len(), 2);
        });
    }
}

#[test]
fn a_container_without_cuda_costs_no_driver() {
    let world = World::new(0, true);
    assert!(world.run(discover).unwrap().is_empty());
    assert!(world.log().is_empty(), "{:?}", world.log());
}

#[test]
fn work_in_flight_is_waited_for() {
    for frozen in [false, true] {
        let world = World::new(2, frozen);
        world.with(|state| state.in_flight.insert(101, 1));
        take(&world, After::LeaveRunning).unwrap();
        assert_eq!(world.log().iter().filter(|call| *call == "lock").count(), 2);
        assert!(!world.with(|state| state.ran));
    }
}

#[test]
fn work_that_does_not_end_leaves_all_unlocked() {
    for frozen in [false, true] {
        let world = World::new(2, frozen);
        world.with(|state| state.in_flight.insert(101, 1000));
        let failure = take(&world, EXIT).unwrap_err();
        assert_eq!(failure.phase, Phase::Lock);
        assert!(failure.to_string().contains("lock-timeout"), "{failure}");
        assert_eq!(world.states(), [CudaState::Running; 2]);
        world.with(|state| assert_eq!((state.frozen, state.held.len()), (frozen, 0)));
    }
}

#[test]
fn ranks_are_locked_at_the_same_moment() {
    let world = World::new(4, true);
    world.with(|state| state.ranks = true);
    take(&world, EXIT).unwrap();
    assert_eq!(world.log().iter().filter(|call| *call == "lock").count(), 1);
}

#[test]
fn states_that_were_found_are_given_back() {
    for found in [CudaState::Locked, CudaState::Checkpointed] {
        for frozen in [false, true] {
            let world = World::new(2, frozen);
            world.with(|state| state.cuda.insert(101, found));
            take(&world, After::LeaveRunning).unwrap();
            if frozen {
                let entry = world.with(|state| state.entry.clone().unwrap());
                world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
            }
            assert_eq!(world.states(), [found, CudaState::Running]);
        }
    }
}

#[test]
fn a_failed_process_is_named_and_nothing_is_locked() {
    let world = World::new(2, false);
    world.with(|state| state.cuda.insert(102, CudaState::Failed));
    let failure = take(&world, EXIT).unwrap_err();
    assert!(failure.to_string().contains("pid 102 (p102)"), "{failure}");
    assert!(!world.log().contains(&"lock".to_owned()));
}

/// Each call, each fault, frozen and not, exit and leave running: whenever the checkpoint fails,
/// the container ends where the caller began.
#[test]
fn every_failure_ends_where_the_caller_began() {
    let driver = [Fault::Error(999), Fault::Hang, Fault::HangAfter, Fault::Crash, Fault::Lie];
    let tool = [Fault::Error(1)];
    let calls: &[(&'static str, &[Fault])] = &[
        ("lock", &driver),
        ("checkpoint", &driver),
        ("states", &tool),
        ("hold", &tool),
        ("settle", &tool),
        ("thaw", &tool),
        ("freeze", &tool),
        ("dump", &tool),
        ("prepare", &tool),
        ("begin", &tool),
        ("sync", &tool),
        ("finish", &tool),
        ("journal", &tool),
        ("kill", &tool),
    ];
    let mut failures = 0;
    for (call, faults) in calls {
        for &fault in *faults {
            for frozen in [false, true] {
                for after in [EXIT, After::LeaveRunning] {
                    let world = World::new(2, frozen).fault(call, fault, 1);
                    let what = format!("{call} {fault:?} frozen={frozen} {after:?}");
                    let Err(failure) = take(&world, after) else {
                        continue;
                    };
                    failures += 1;
                    assert_eq!(world.states(), [CudaState::Running; 2], "{what}: {failure}");
                    world.with(|state| {
                        assert_eq!(state.frozen, frozen, "{what}: {failure}");
                        assert!(state.held.is_empty(), "{what}");
                        assert!(state.entry.is_none() || *call == "journal", "{what}");
                        assert!(!state.ran, "{what}: application code ran while paused");
                        assert_eq!(state.image_is_whole, failure.image.is_some(), "{what}");
                    });
                    let left_as_told = match failure.left {
                        Left::Untouched => true,
                        Left::Running => !frozen,
                        Left::Paused => frozen,
                        _ => false,
                    };
                    assert!(left_as_told, "{what}: {failure}");
                }
            }
        }
    }
    assert!(failures > 40, "only {failures} of the faults were met");
}

#[test]
fn cuda_that_does_not_come_back_after_a_failure_ends_the_container_and_says_so() {
    for frozen in [false, true] {
        let world = World::new(1, frozen).fault("dump", Fault::Error(1), 1).fault(
            "restore",
            Fault::Error(1),
            99,
        );
        let failure = take(&world, EXIT).unwrap_err();
        assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
        assert!(failure.to_string().contains("was killed"), "{failure}");
        assert!(failure.image.is_none());
    }
}

#[test]
fn cuda_that_does_not_come_back_after_a_good_dump_names_the_image() {
    let world = World::new(1, false).fault("restore", Fault::Error(1), 99);
    let failure = take(&world, After::LeaveRunning).unwrap_err();
    assert!(failure.to_string().contains("the image in /image is whole"), "{failure}");
    assert!(world.with(|state| state.processes.is_empty()));
}

#[test]
fn a_second_checkpoint_while_paused_only_dumps() {
    for (after, fault) in [(After::LeaveRunning, None), (EXIT, None), (EXIT, Some("dump"))] {
        let world = World::new(2, true);
        take(&world, After::LeaveRunning).unwrap();
        let entry = world.with(|state| {
            state.log.clear();
            state.faults.extend(fault.map(|call| (call, Fault::Error(1), 1)));
            state.entry.clone().unwrap()
        });
        let result = world.run(|parts| {
            let cuda = parked(parts, &entry).unwrap();
            asked(after, &Annotations::default(), |request| again(parts, request, &entry, &cuda))
        });
        assert_eq!(result.is_err(), fault.is_some());
        let log = world.log();
        assert!(!log.iter().any(|call| call == "lock" || call == "restore"), "{log:?}");
        if after == EXIT && fault.is_none() {
            assert!(world.with(|state| state.processes.is_empty()));
        } else {
            assert_eq!(world.states(), [CudaState::Checkpointed; 2]);
            world.with(|state| assert!(state.frozen && state.entry == Some(entry)));
        }
    }
}

#[test]
fn loaded_libcuda_without_cuda_has_a_manifest_that_says_so() {
    for frozen in [false, true] {
        let world = World::new(1, frozen);
        world.with(|state| {
            state.cuda.clear();
            state.processes[1].devices.clear();
        });
        world.run(|parts| {
            let cuda = discover(parts).unwrap();
            assert!(cuda.is_empty());
            asked(After::LeaveRunning, &Annotations::default(), |request| {
                checkpoint(parts, request, cuda).unwrap();
            });
        });
        let manifest = world.with(|state| state.manifest.clone().unwrap());
        assert!(manifest.processes.is_empty());
        assert_eq!(world.with(|state| (state.frozen, state.ran)), (frozen, false));
    }
}

#[test]
fn a_lost_helper_is_not_the_drivers_last_word() {
    for frozen in [false, true] {
        let world = World::new(1, frozen).fault("dump", Fault::Error(1), 1);
        let failure = take(&world, EXIT).unwrap_err();
        assert!(matches!(failure.left, Left::Running | Left::Paused), "{failure}");

        let world = World::new(1, true);
        take(&world, After::LeaveRunning).unwrap();
        let entry = world.with(|state| {
            state.faults.push(("probe", Fault::Crash, 2));
            state.entry.clone().unwrap()
        });
        world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
        assert_eq!(world.states(), [CudaState::Running]);
    }
}

#[test]
fn a_resume_that_cannot_is_tried_and_then_the_container_is_killed() {
    let world = World::new(1, true);
    take(&world, After::LeaveRunning).unwrap();
    let entry = world.with(|state| {
        state.faults.push(("restore", Fault::Error(2), 2));
        state.entry.clone().unwrap()
    });
    world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
    assert_eq!(world.states(), [CudaState::Running]);

    let world = World::new(1, true);
    take(&world, After::LeaveRunning).unwrap();
    let entry = world.with(|state| {
        state.faults.push(("restore", Fault::Error(2), 10_000));
        state.entry.clone().unwrap()
    });
    let failure = world.run(|parts| resume(parts, &entry, &World::limits())).unwrap_err();
    assert!(failure.to_string().contains("the image in /image is whole"), "{failure}");
    world.with(|state| {
        assert!(state.processes.is_empty() && state.entry.is_none());
        assert!(!state.ran, "code of a container whose image is final ran");
    });
}

#[test]
fn room_on_the_gpu_is_waited_for_before_the_driver_is_asked() {
    let resumed = |times| {
        let world = World::new(1, true);
        take(&world, After::LeaveRunning).unwrap();
        let entry = world.with(|state| {
            state.log.clear();
            state.faults.push(("free", Fault::Error(0), times));
            state.entry.clone().unwrap()
        });
        (world.run(|parts| resume(parts, &entry, &World::limits())), world)
    };
    let (result, world) = resumed(2);
    result.unwrap();
    assert_eq!(world.log().iter().filter(|call| *call == "restore").count(), 1);
    let (result, world) = resumed(10_000);
    let text = result.unwrap_err().to_string();
    assert!(text.contains("GPU GPU-0 has 0 MiB free"), "{text}");
    assert!(!world.log().contains(&"restore".to_owned()), "asked without room: final on 580");
}

#[test]
fn a_lost_lock_that_is_granted_late_is_undone() {
    for frozen in [false, true] {
        let world = World::new(1, frozen).fault("lock", Fault::Crash, 1);
        world.with(|state| state.granted_late = true);
        let failure = take(&world, EXIT).unwrap_err();
        assert!(failure.to_string().contains("helper ended"), "{failure}");
        world.with(|state| assert!(state.late.is_empty(), "a lock is still pending"));
        assert_eq!(world.states(), [CudaState::Running]);
    }
}

#[test]
fn an_interrupted_checkpoint_is_rolled_back() {
    for frozen in [false, true] {
        let world = World::new(1, frozen);
        world.with(|state| state.interrupted = true);
        let failure = take(&world, EXIT).unwrap_err();
        assert!(failure.to_string().contains("interrupted"));
        assert_eq!(world.states(), [CudaState::Running]);
        assert_eq!(world.with(|state| state.frozen), frozen);
    }
}

#[test]
fn a_container_that_is_killed_meanwhile_is_not_brought_back() {
    for frozen in [false, true] {
        let world = World::new(1, frozen);
        world.with(|state| state.killed_in_dump = true);
        let failure = take(&world, EXIT).unwrap_err();
        assert!(matches!(failure.left, Left::Gone), "{failure}");
        assert!(failure.to_string().contains("killed meanwhile"), "{failure}");
        assert!(!world.log().contains(&"kill".to_owned()));
    }
}

#[test]
fn what_a_killed_operation_left_behind_is_put_right_from_every_stage() {
    // The operation is cut off at its nth call: nothing after that happens, as after SIGKILL.
    for frozen in [false, true] {
        for stop in 0..40 {
            let world = World::new(2, frozen);
            let stopped = world.cut_off_after(stop, || take(&world, After::LeaveRunning).is_ok());
            let Some(entry) = world.with(|state| state.entry.clone()) else {
                continue;
            };
            if stopped == Some(true) {
                break;
            }
            // The tracer died with it.
            world.with(|state| {
                state.held.clear();
                state.paused_by_caller = false;
            });
            world.run(|parts| repair(parts, &entry, common::INIT, &World::limits())).unwrap();
            assert_eq!(world.states(), [CudaState::Running; 2], "cut off after {stop} calls");
            world.with(|state| {
                assert_eq!(state.frozen, frozen, "cut off after {stop} calls");
                assert!(state.entry.is_none());
            });
        }
    }
}

#[test]
fn a_journal_of_an_earlier_container_is_only_removed() {
    let world = World::new(1, true);
    take(&world, After::LeaveRunning).unwrap();
    let entry = world.with(|state| {
        state.log.clear();
        state.entry.clone().unwrap()
    });
    let other = stasis_hooks::processes::ProcessId { pid: 100, start_time: 2 };
    world.run(|parts| repair(parts, &entry, other, &World::limits())).unwrap();
    assert!(world.log().is_empty() && world.with(|state| state.entry.is_none()));
}

/// Without a word to anybody, at any moment: the memory of a GPU takes its time.
#[test]
fn a_process_that_ends_meanwhile_is_in_the_manifest_only_if_it_is_in_the_image() {
    for call in ["lock", "states", "checkpoint", "freeze", "begin", "dump", "sync"] {
        for after in [After::LeaveRunning, EXIT, After::Exit { by_criu: true }] {
            let world = World::new(2, false);
            world.with(|state| state.deaths.push((call, 102)));
            let allowed = Annotations { multi_process: true, ..Annotations::default() };
            let done = world.run(|parts| {
                let cuda = discover(parts).unwrap();
                asked(after, &allowed, |request| checkpoint(parts, request, cuda))
            });
            let what = format!("{call} {after:?}");
            match done {
                Ok(()) => {
                    let manifest = world.with(|state| state.manifest.clone()).unwrap();
                    let named: Vec<_> = manifest.processes.iter().map(|p| p.pid).collect();
                    let dumped = world.with(|state| state.dumped.clone());
                    assert!(named.iter().all(|pid| dumped.contains(pid)), "{what}: {named:?}");
                    assert!(named.contains(&2), "{what}: the other is in it");
                }
                Err(failure) => {
                    assert!(matches!(failure.left, Left::Running), "{what}: {failure}");
                    assert_eq!(world.states(), [CudaState::Running], "{what}");
                    world.with(|state| assert!(!state.image_is_whole, "{what}"));
                }
            }
        }
    }
}

#[test]
fn one_that_was_killed_and_is_frozen_has_no_future_in_an_image() {
    for frozen in [false, true] {
        let world = World::new(2, frozen);
        world.with(|state| state.doomed.push(102));
        let allowed = Annotations { multi_process: true, ..Annotations::default() };
        let failure = world.run(|parts| {
            let cuda = discover(parts).unwrap();
            asked(EXIT, &allowed, |request| checkpoint(parts, request, cuda)).unwrap_err()
        });
        assert!(failure.to_string().contains("pid 102 (p102): ended meanwhile"), "{failure}");
        assert!(!world.with(|state| state.image_is_whole));
    }
}
