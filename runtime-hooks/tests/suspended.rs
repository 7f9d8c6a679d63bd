//! Suspending the CUDA of a container that goes on, and giving it back.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{Fault, INIT, World, asked, process};
use stasis_config::Annotations;
use stasis_hooks::checkpoint::{self, After, checkpoint};
use stasis_hooks::cuda::{CudaState, Gpu};
use stasis_hooks::discover::discover;
use stasis_hooks::error::{Cause, Failure, Left, Phase};
use stasis_hooks::journal::{Entry, Stage};
use stasis_hooks::parts::Progress;
use stasis_hooks::remap::DeviceMap;
use stasis_hooks::resume;
use stasis_hooks::suspended;

use CudaState::{Checkpointed, Running};

/// Suspends, as the command does: what an earlier one has noted is known.
fn suspend(world: &World) -> Result<(), Failure> {
    let allowed = Annotations { multi_process: true, ..Annotations::default() };
    let earlier = entry(world);
    common::suspend(world, &allowed, earlier.as_ref()).map(drop)
}

fn resume(world: &World) -> Result<(), Failure> {
    let entry = entry(world).unwrap();
    let mut progress = Progress::new(Phase::Preflight);
    world.run(|parts| {
        suspended::resume(parts, &entry, None, &seen(), &World::limits(), &mut progress)
    })
}

/// The GPUs that the container has.
fn seen() -> [Gpu; 2] {
    [0, 1].map(|index| Gpu {
        index,
        uuid: format!("GPU-{index}"),
        name: String::new(),
        memory_bytes: MEMORY,
        minor: None,
    })
}

/// 400 bytes, and what the driver may keep for itself.
const MEMORY: u64 = 412;

fn resume_onto(world: &World, map: &[(&str, &str)]) -> Result<(), Failure> {
    let map = map.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect();
    let (entry, limits) = (entry(world).unwrap(), World::limits());
    let mut progress = Progress::new(Phase::Preflight);
    world.run(|parts| suspended::resume(parts, &entry, Some(map), &seen(), &limits, &mut progress))
}

fn entry(world: &World) -> Option<Entry> {
    world.with(|state| state.entry.clone())
}

/// It is suspended, and paused or not.
fn is_suspended(world: &World, frozen: bool) {
    let states = world.states();
    assert!(states.iter().all(|state| *state == Checkpointed), "{states:?}");
    let entry = entry(world).unwrap();
    assert_eq!(entry.stage, Stage::Suspended);
    assert!(entry.suspended.is_none() && entry.processes.len() == states.len(), "{entry:?}");
    assert!(entry.processes.iter().all(|noted| noted.found == Running), "{entry:?}");
    at_rest(world, frozen);
}

fn at_rest(world: &World, frozen: bool) {
    world.with(|state| {
        assert_eq!(state.frozen, frozen, "{:?}", state.log);
        assert!(state.held.is_empty(), "{:?}", state.log);
    });
}

fn runs(world: &World, frozen: bool) {
    let states = world.states();
    assert!(states.iter().all(|state| *state == Running), "{states:?}");
    assert_eq!(entry(world), None);
    at_rest(world, frozen);
}

fn suspended_world(count: i32, frozen: bool) -> World {
    let world = World::new(count, frozen);
    suspend(&world).unwrap();
    world
}

#[test]
fn the_container_goes_on_without_its_gpu_and_gets_it_back() {
    for frozen in [false, true] {
        let world = suspended_world(2, frozen);
        is_suspended(&world, frozen);
        resume(&world).unwrap();
        runs(&world, frozen);
        // Nothing of the code of a paused one.
        assert!(!world.with(|state| state.ran));
    }
}

/// Suspends where `call` is faulty, which may be got over.
fn suspended_or_as_before(world: &World, frozen: bool, call: &str) {
    match suspend(world) {
        Ok(()) => is_suspended(world, frozen),
        Err(failure) => {
            assert!(!matches!(failure.left, Left::Killed { .. }), "{call}: {failure}");
            runs(world, frozen);
        }
    }
}

#[test]
fn a_failed_suspension_ends_where_it_began() {
    let calls = ["journal", "lock", "checkpoint", "states", "freeze", "thaw", "hold"];
    for call in calls {
        for frozen in [false, true] {
            let world = World::new(2, frozen).fault(call, Fault::Error(999), 1);
            // Of the others the second may be the one that matters.
            suspended_or_as_before(&world, frozen, call);
        }
    }
}

#[test]
fn the_journal_that_cannot_be_written_at_the_end_undoes_it() {
    // At the beginning, with the processes, with what they use at last, before it is frozen, at the end.
    for good in 0..5 {
        let world = World::new(1, false);
        world.with(|state| state.skip_faults = good);
        let world = world.fault("journal", Fault::Error(1), 1);
        suspend(&world).unwrap_err();
        runs(&world, false);
    }
}

#[test]
fn several_that_may_share_memory_are_refused_as_for_a_checkpoint() {
    let world = World::new(2, false);
    let failure = common::suspend(&world, &Annotations::default(), None).unwrap_err();
    assert!(matches!(failure.cause, Cause::MultiProcess { .. }), "{failure}");
    assert!(matches!(failure.left, Left::Untouched), "{failure}");
    runs(&world, false);
}

#[test]
fn a_killed_suspension_is_put_right() {
    for frozen in [false, true] {
        killed(frozen, || World::new(2, frozen), suspend);
    }
}

#[test]
fn a_killed_resume_is_completed() {
    for frozen in [false, true] {
        killed(frozen, || suspended_world(2, frozen), resume);
    }
}

/// Kills after each call; then the container is repaired, and is suspended or runs.
fn killed(frozen: bool, world: impl Fn() -> World, act: impl Fn(&World) -> Result<(), Failure>) {
    for calls in 0..100 {
        let world = world();
        let done = world.cut_off_after(calls, || act(&world));
        world.with(|state| state.held.clear());
        if done.is_some() {
            assert!(calls > 5);
            return;
        }
        match entry(&world) {
            Some(entry) if entry.stage == Stage::Suspended => is_suspended(&world, frozen),
            Some(entry) => {
                let repaired =
                    world.run(|parts| resume::repair(parts, &entry, INIT, &World::limits()));
                repaired.unwrap();
                runs(&world, frozen);
            }
            None => runs(&world, frozen),
        }
    }
    panic!("it never ended");
}

#[test]
fn without_room_it_stays_suspended_and_can_be_resumed_later() {
    for frozen in [false, true] {
        for (call, code) in [("free", 1), ("restore", 999), ("unlock", 999)] {
            let world = suspended_world(1, frozen).fault(call, Fault::Error(code), 1000);
            let failure = resume(&world).unwrap_err();
            assert!(matches!(failure.left, Left::Suspended), "{call}: {failure}");
            assert!(failure.to_string().contains("nothing is lost"), "{failure}");
            is_suspended(&world, frozen);
            world.with(|state| state.faults.clear());
            resume(&world).unwrap();
            runs(&world, frozen);
        }
    }
}

#[test]
fn one_that_ran_already_is_suspended_with_one_that_cannot_be_unlocked() {
    let world = suspended_world(2, false).fault("unlock", Fault::Error(999), 1000);
    world.with(|state| assert_eq!(state.cuda.insert(101, Running), Some(Checkpointed)));
    let failure = resume(&world).unwrap_err();
    assert!(matches!(failure.left, Left::Suspended), "{failure}");
    is_suspended(&world, false);
    world.with(|state| state.faults.clear());
    resume(&world).unwrap();
    runs(&world, false);
}

#[test]
fn what_the_driver_has_lost_is_told_and_ended() {
    let world = suspended_world(2, false).fault("restore", Fault::Error(1), 1000);
    let failure = resume(&world).unwrap_err();
    assert!(matches!(failure.cause, Cause::SharedLost { .. }), "{failure}");
    assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
    assert_eq!(entry(&world), None);
    // Out of memory is final, and so are the answers that follow.
    let world = suspended_world(1, false);
    // Somebody else has been faster, and has the memory since.
    world.with(|state| state.no_room.push(101));
    let failure = resume(&world).unwrap_err();
    assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
    for code in [2, 304] {
        let world = suspended_world(1, false).fault("restore", Fault::Error(code), 1000);
        let failure = resume(&world).unwrap_err();
        assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
        assert_eq!(entry(&world), None);
    }
}

#[test]
fn one_that_somebody_pauses_meanwhile_stays_paused() {
    for call in ["lock", "checkpoint", "states"] {
        let world = World::new(2, false);
        world.with(|state| state.paused_at = Some(call));
        let failure = suspend(&world).unwrap_err();
        assert!(matches!(failure.left, Left::Paused), "{call}: {failure}");
        runs(&world, true);
    }
    for call in ["restore", "states", "unlock"] {
        let world = suspended_world(2, false);
        world.with(|state| state.paused_at = Some(call));
        resume(&world).unwrap();
        runs(&world, true);
    }
}

#[test]
fn one_that_is_paused_while_it_waits_for_room_stays_paused() {
    let world = suspended_world(1, false).fault("free", Fault::Error(1), 1000);
    world.with(|state| state.paused_at = Some("free"));
    let failure = resume(&world).unwrap_err();
    assert!(matches!(failure.left, Left::Suspended), "{failure}");
    is_suspended(&world, true);
}

#[test]
fn somebody_elses_pause_is_kept_by_the_repair_of_a_killed_operation() {
    for calls in 0..100 {
        let world = World::new(1, false);
        world.with(|state| state.paused_at = Some("checkpoint"));
        let done = world.cut_off_after(calls, || suspend(&world));
        world.with(|state| state.held.clear());
        if done.is_some() {
            assert!(calls > 10);
            return;
        }
        let paused = world.with(|state| state.paused_by_other);
        if let Some(entry) = entry(&world) {
            world.run(|parts| resume::repair(parts, &entry, INIT, &World::limits())).unwrap();
        }
        runs(&world, paused);
    }
    panic!("it never ended");
}

#[test]
fn what_host_memory_cannot_hold_is_refused_before_anything_is_touched() {
    let needed = 2 * (100 + (64 << 20));
    let world = World::new(2, false);
    world.with(|state| state.host_memory = needed - 1);
    let failure = suspend(&world).unwrap_err();
    assert!(matches!(failure.cause, Cause::NoHostMemory { .. }), "{failure}");
    assert!(matches!(failure.left, Left::Untouched), "{failure}");
    assert!(failure.to_string().contains("cgroup /x"), "{failure}");
    assert!(!world.log().iter().any(|call| call == "lock" || call == "journal"));
    let failure = checkpoint_of(&world, After::LeaveRunning).unwrap_err();
    assert!(matches!(failure.cause, Cause::NoHostMemory { .. }), "{failure}");
    runs(&world, false);
    world.with(|state| state.host_memory = needed);
    suspend(&world).unwrap();
    // What is there already needs no more.
    world.with(|state| state.host_memory = 0);
    suspend(&world).unwrap();
    checkpoint_of(&world, After::LeaveRunning).unwrap();
    is_suspended(&world, false);
}

#[test]
fn what_was_allocated_until_the_lock_counts() {
    let world = World::new(1, false);
    world.with(|state| state.grows = [(101, 600)].into());
    suspend(&world).unwrap();
    assert_eq!(entry(&world).unwrap().processes[0].uses.gpus, [("GPU-0".to_owned(), Some(600))]);
    // Also where it was suspended before.
    resume(&world).unwrap();
    let world = World::new(1, false);
    world.with(|state| {
        state.grows = [(101, 600)].into();
        state.host_memory = (64 << 20) + 599;
    });
    let failure = suspend(&world).unwrap_err();
    assert!(matches!(failure.cause, Cause::NoHostMemory { .. }), "{failure}");
    runs(&world, false);
}

#[test]
fn what_ran_since_it_was_suspended_is_noted_anew() {
    let world = suspended_world(2, false);
    // By NVIDIA's command.
    world.with(|state| {
        state.cuda.insert(102, Running);
        state.bytes = [(102, 700)].into();
    });
    suspend(&world).unwrap();
    is_suspended(&world, false);
    let bytes = |at: usize| entry(&world).unwrap().processes[at].uses.gpus[0].1;
    assert_eq!((bytes(0), bytes(1)), (Some(100), Some(700)));
}

#[test]
fn two_restores_onto_a_gpu_do_not_meet() {
    let world = suspended_world(2, false).fault("gpu-lock", Fault::Hang, 2);
    resume(&world).unwrap();
    runs(&world, false);
    let log = world.log();
    let last = log.iter().rposition(|call| call == "gpu-lock").unwrap();
    let restore = log.iter().position(|call| call == "restore").unwrap();
    assert_eq!(log.iter().filter(|call| *call == "gpu-lock").count(), 3, "{log:?}");
    // Looked for room with the lock in hand.
    assert_eq!(log[last..=restore], ["gpu-lock", "free", "restore"], "{log:?}");
    assert!(world.with(|state| state.gpus_locked.iter().all(|gpus| *gpus == ["GPU-0"])));
    // Nobody is lost because another one's restore never ends, or because there are no locks.
    for fault in [Fault::Hang, Fault::Error(1)] {
        let world = suspended_world(1, false).fault("gpu-lock", fault, 1000);
        resume(&world).unwrap();
        runs(&world, false);
    }
}

#[test]
fn whoever_does_not_want_to_wait_for_room_any_more_says_so() {
    let world = suspended_world(1, false).fault("free", Fault::Error(1), 1000);
    world.with(|state| state.interrupted = true);
    let failure = resume(&world).unwrap_err();
    assert!(matches!(failure.cause, Cause::Interrupted), "{failure}");
    assert!(matches!(failure.left, Left::Suspended), "{failure}");
    is_suspended(&world, false);
    // A suspension that was interrupted is put back all the same.
    let world = World::new(1, false);
    world.with(|state| state.interrupted = true);
    let failure = suspend(&world).unwrap_err();
    assert!(matches!(failure.left, Left::Running), "{failure}");
    runs(&world, false);
}

/// All is on the GPU that the journal would restore it to, or comes from there.
fn knows_where_all_is(world: &World) {
    let Some(entry) = entry(world) else { return };
    for noted in &entry.processes {
        let at = world.with(|state| state.memory_at.get(&noted.id.pid).cloned());
        assert_eq!(noted.uses.gpus[0].0, at.unwrap_or_else(|| "GPU-0".to_owned()), "{entry:?}");
    }
}

#[test]
fn a_resume_onto_another_gpu_that_fails_half_way_is_completed_later() {
    const SWAP: &[(&str, &str)] = &[("GPU-0", "GPU-1"), ("GPU-1", "GPU-0")];
    let world = suspended_world(3, false);
    world.with(|state| state.stuck.push(103));
    let failure = resume_onto(&world, SWAP).unwrap_err();
    assert!(matches!(failure.left, Left::Suspended), "{failure}");
    is_suspended(&world, false);
    knows_where_all_is(&world);
    // An image could not tell.
    let failure = checkpoint_of(&world, After::LeaveRunning).unwrap_err();
    assert!(matches!(failure.cause, Cause::HalfMoved), "{failure}");
    assert!(entry(&world).unwrap().moves());
    world.with(|state| state.stuck.clear());
    resume(&world).unwrap();
    runs(&world, false);
    let at: Vec<_> = world.with(|state| state.memory_at.values().cloned().collect());
    assert_eq!(at, ["GPU-1"; 3]);

    // Where none has moved, all is as before.
    let world = suspended_world(2, false);
    world.with(|state| state.stuck = vec![101, 102]);
    resume_onto(&world, SWAP).unwrap_err();
    assert!(!entry(&world).unwrap().moves());
    knows_where_all_is(&world);
}

#[test]
fn what_is_on_a_gpu_does_not_go_to_another() {
    let world = suspended_world(2, false);
    world.with(|state| state.cuda.insert(102, Running));
    let failure = resume_onto(&world, &[("GPU-0", "GPU-1")]).unwrap_err();
    assert!(matches!(failure.cause, Cause::OnGpu { .. }), "{failure}");
    assert_eq!(world.states(), [Checkpointed, Running]);
    assert!(!entry(&world).unwrap().moves());
    resume(&world).unwrap();
    runs(&world, false);
}

#[test]
fn a_killed_resume_onto_another_gpu_leaves_nobody_in_the_wrong_place() {
    const SWAP: &[(&str, &str)] = &[("GPU-0", "GPU-1"), ("GPU-1", "GPU-0")];
    for calls in 0..200 {
        let world = suspended_world(3, false);
        world.with(|state| state.stuck.push(102));
        let done = world.cut_off_after(calls, || resume_onto(&world, SWAP));
        world.with(|state| {
            state.held.clear();
            state.stuck.clear();
        });
        if done.is_some() {
            assert!(calls > 20);
            return;
        }
        let now = entry(&world).unwrap();
        if now.stage != Stage::Suspended {
            world.run(|parts| resume::repair(parts, &now, INIT, &World::limits())).unwrap();
        }
        knows_where_all_is(&world);
        if entry(&world).is_some() {
            resume(&world).unwrap();
        }
        runs(&world, false);
        let at: Vec<_> = world.with(|state| state.memory_at.values().cloned().collect());
        assert!(
            at.iter().all(|gpu| gpu == "GPU-1") && [0, 3].contains(&at.len()),
            "{calls}: {at:?}"
        );
    }
    panic!("it never ended");
}

#[test]
fn one_that_runs_again_with_a_lock_still_to_come_is_not_said_to_be_suspended() {
    let world = suspended_world(1, false);
    world.with(|state| {
        state.entry.as_mut().unwrap().locking = true;
        state.in_flight = [(101, 1000)].into();
    });
    resume(&world).unwrap();
    let pending = entry(&world).unwrap();
    assert_eq!((pending.stage, &pending.suspended), (Stage::Freeing, &None));
    assert_eq!(world.states(), [Running]);
    world.with(|state| state.in_flight.clear());
    world.run(|parts| resume::repair(parts, &pending, INIT, &World::limits())).unwrap();
    runs(&world, false);
}

#[test]
fn what_is_not_known_to_be_suspended_is_not_said_to_be() {
    // From a place where it is LOCKED on, nothing of the driver works.
    let killed = |calls| {
        let world = World::new(1, false);
        world.cut_off_after(calls, || suspend(&world));
        world.with(|state| state.held.clear());
        world
    };
    let mut worlds = (0..100).map(killed);
    let world = worlds.find(|world| world.states() == [CudaState::Locked]).unwrap();
    let under_way = entry(&world).unwrap();
    assert_eq!(under_way.stage, Stage::Freeing);
    let world = world.fault("probe", Fault::Crash, 1000);
    let failure =
        world.run(|parts| resume::repair(parts, &under_way, INIT, &World::limits())).unwrap_err();
    assert!(matches!(failure.left, Left::HalfSuspended), "{failure}");
    assert_eq!(entry(&world).unwrap().stage, Stage::Freeing);
    world.with(|state| state.faults.clear());
    let now = entry(&world).unwrap();
    world.run(|parts| resume::repair(parts, &now, INIT, &World::limits())).unwrap();
    runs(&world, false);
}

#[test]
fn nothing_of_a_paused_ones_code_runs_whatever_fails() {
    for call in ["probe", "hold", "thaw", "states", "restore", "unlock", "settle"] {
        for times in [1, 2, 3, 1000] {
            let world = suspended_world(2, true).fault(call, Fault::Crash, times);
            let _ = resume(&world);
            assert!(!world.with(|state| state.ran), "{call} {times}: {:?}", world.log());
        }
    }
}

/// As on a machine whose processors are taken for half a minute.
#[test]
fn threads_that_stop_late_and_a_late_freezer_cost_no_job() {
    for frozen in [false, true] {
        for call in ["settle", "freeze"] {
            let world = World::new(1, frozen).fault(call, Fault::Error(1), 20);
            suspended_or_as_before(&world, frozen, call);
        }
    }
}

#[test]
fn one_that_was_resumed_by_others_is_not_paused_by_its_repair() {
    let world = World::new(1, true);
    checkpoint_of(&world, After::LeaveRunning).unwrap();
    let parked = entry(&world).unwrap();
    assert_eq!(parked.stage, Stage::AwaitingResume);
    for times in [0, 1, 3, 4] {
        let world = World::new(1, true);
        checkpoint_of(&world, After::LeaveRunning).unwrap();
        world.with(|state| (state.frozen, state.paused_by_caller) = (false, false));
        let world = world.fault("restore", Fault::Error(999), times);
        let _ = world.run(|parts| resume::repair(parts, &parked, INIT, &World::limits()));
        runs(&world, false);
    }
}

#[test]
fn another_checkpoint_of_a_parked_one_that_is_killed_does_not_have_it_run() {
    for calls in 0..100 {
        let world = World::new(1, true);
        checkpoint_of(&world, After::LeaveRunning).unwrap();
        let parked = entry(&world).unwrap();
        // CRIU thaws it for its work.
        world.with(|state| state.thawed_by_dump = true);
        let done = world.cut_off_after(calls, || {
            world.run(|parts| {
                let cuda = checkpoint::parked(parts, &parked).unwrap();
                asked(After::LeaveRunning, &Annotations::default(), |request| {
                    checkpoint::again(parts, request, &parked, &cuda)
                })
            })
        });
        if done.is_some() {
            assert!(calls > 5);
            return;
        }
        let left = entry(&world).unwrap();
        world.run(|parts| resume::repair(parts, &left, INIT, &World::limits())).unwrap();
        runs(&world, true);
        assert!(!world.with(|state| state.ran));
    }
    panic!("it never ended");
}

#[test]
fn what_only_criu_minds_is_no_reason_to_refuse() {
    let world = World::new(1, false);
    // Started by exec while the others were being locked.
    let mut stray = process(150, true);
    stray.parent = 1;
    world.with(|state| state.births.push(("lock", 0, stray)));
    suspend(&world).unwrap();
    is_suspended(&world, false);
    assert_eq!(world.states().len(), 2);
}

#[test]
fn one_that_the_driver_is_still_working_on_is_waited_for() {
    let world = suspended_world(1, false);
    world.with(|state| state.passes = 3);
    resume(&world).unwrap();
    runs(&world, false);
}

/// A checkpoint that knows that the container is suspended.
fn checkpoint_of(world: &World, after: After) -> Result<(), Failure> {
    let allowed = Annotations { multi_process: true, ..Annotations::default() };
    let suspended = entry(world);
    world.run(|parts| {
        let cuda = discover(parts).unwrap();
        asked(after, &allowed, |request| {
            let request = checkpoint::Request { suspended: suspended.as_ref(), ..*request };
            checkpoint(parts, &request, cuda)
        })
    })
}

#[test]
fn a_suspended_container_can_be_checkpointed_and_stays_suspended() {
    let world = suspended_world(2, false);
    checkpoint_of(&world, After::LeaveRunning).unwrap();
    is_suspended(&world, false);
    let manifest = world.with(|state| state.manifest.clone()).unwrap();
    // A restore needs the memory that they had.
    let bytes: Vec<_> = manifest.processes.iter().map(|process| process.device_bytes).collect();
    assert_eq!(bytes, [Some(100), Some(100)]);
    resume(&world).unwrap();
    runs(&world, false);

    let world = suspended_world(1, false);
    checkpoint_of(&world, After::Exit { by_criu: false }).unwrap();
    assert!(world.with(|state| state.image_is_whole && state.processes.is_empty()));
    assert_eq!(entry(&world), None);
}

#[test]
fn also_by_a_client_that_pauses_it_first() {
    let world = suspended_world(2, false);
    world.with(|state| state.frozen = true);
    checkpoint_of(&world, After::LeaveRunning).unwrap();
    let parked = entry(&world).unwrap();
    assert_eq!(parked.stage, Stage::AwaitingResume);
    world.run(|parts| resume::resume(parts, &parked, &World::limits())).unwrap();
    is_suspended(&world, false);
    resume(&world).unwrap();
    runs(&world, false);
}

#[test]
fn a_failed_or_killed_checkpoint_leaves_it_suspended() {
    for call in ["journal", "freeze", "dump", "sync", "finish"] {
        let world = suspended_world(1, false).fault(call, Fault::Error(1), 1);
        let failure = checkpoint_of(&world, After::LeaveRunning).unwrap_err();
        assert!(!matches!(failure.left, Left::Killed { .. }), "{call}: {failure}");
        is_suspended(&world, false);
    }
    for calls in 0..100 {
        let world = suspended_world(2, false);
        let done = world.cut_off_after(calls, || checkpoint_of(&world, After::LeaveRunning));
        world.with(|state| state.held.clear());
        if done.is_some() {
            assert!(calls > 5);
            return;
        }
        let entry = entry(&world).unwrap();
        if entry.stage != Stage::Suspended {
            world.run(|parts| resume::repair(parts, &entry, INIT, &World::limits())).unwrap();
        }
        is_suspended(&world, false);
    }
    panic!("it never ended");
}

#[test]
fn what_began_since_is_suspended_with_the_rest() {
    let world = suspended_world(1, false);
    world.with(|state| {
        state.processes.push(process(150, true));
        state.cuda.insert(150, Running);
    });
    suspend(&world).unwrap();
    is_suspended(&world, false);
    // And a failure leaves the first as it was.
    world.with(|state| {
        state.processes.push(process(151, true));
        state.cuda.insert(151, Running);
    });
    let world = world.fault("lock", Fault::Error(999), 1);
    suspend(&world).unwrap_err();
    assert_eq!(world.states(), [Checkpointed, Checkpointed, Running]);
    assert_eq!(entry(&world).unwrap().stage, Stage::Suspended);
}

fn found(world: &World) -> Option<Entry> {
    world.run(|parts| {
        let mut cuda = discover(parts).unwrap();
        suspended::found(parts, &World::container(), &mut cuda).unwrap()
    })
}

fn resume_found(world: &World, entry: &Entry) -> Result<(), Failure> {
    let mut progress = Progress::new(Phase::Preflight);
    world.run(|parts| {
        suspended::resume(parts, entry, None, &seen(), &World::limits(), &mut progress)
    })
}

#[test]
fn what_was_suspended_by_other_means_is_found() {
    let world = World::new(3, false);
    assert_eq!(found(&world), None);
    world.with(|state| {
        state.cuda.insert(101, Checkpointed);
        state.cuda.insert(102, CudaState::Locked);
    });
    let entry = found(&world).unwrap();
    // The one that runs is nobody's business.
    assert_eq!(entry.processes.len(), 2);
    resume_found(&world, &entry).unwrap();
    runs(&world, false);
    assert!(world.with(|state| state.asked.iter().all(|(_, pids)| !pids.contains(&103))));
}

/// A restore without room is final, and nobody tells what it had on which GPU.
#[test]
fn what_was_suspended_by_other_means_needs_room_for_all_that_it_may_have() {
    let world = World::restored(1);
    world.with(|state| {
        state.gpu_bytes = Some(150);
        state.mappings.insert(101, 151);
    });
    let by_hand = found(&world).unwrap();
    let failure = resume_found(&world, &by_hand).unwrap_err();
    assert!(matches!(failure.cause, Cause::NoRoom { needed: 151, .. }), "{failure}");
    assert!(matches!(failure.left, Left::Suspended), "{failure}");
    assert!(world.with(|state| state.asked.iter().all(|(call, _)| *call != "restore")));
    is_suspended(&world, false);
    // No more is noted than is known.
    assert!(entry(&world).unwrap().processes[0].uses.gpus.is_empty());
    // It was on the other one, perhaps.
    world.with(|state| (state.gpu_bytes, state.silent_gpu) = (Some(151), Some("GPU-1")));
    let failure = resume(&world).unwrap_err();
    assert!(matches!(&failure.cause, Cause::SilentGpu { gpu } if gpu == "GPU-1"), "{failure}");
    is_suspended(&world, false);
    world.with(|state| state.silent_gpu = None);
    resume(&world).unwrap();
    runs(&world, false);
}

/// What is refused for good is only what would not fit if nobody else used the GPUs.
#[test]
fn what_was_suspended_by_other_means_comes_back_onto_gpus_that_nobody_uses() {
    // Two that each may need all of both GPUs.
    let world = World::restored(2);
    world.with(|state| {
        state.gpu_bytes = Some(400);
        state.mappings.extend([(101, 300), (102, 1 << 50)]);
    });
    let by_hand = found(&world).unwrap();
    resume_found(&world, &by_hand).unwrap();
    runs(&world, false);
    let world = World::restored(2);
    world.with(|state| {
        state.gpu_bytes = Some(399);
        state.mappings.extend([(101, 300), (102, 1 << 50)]);
    });
    let by_hand = found(&world).unwrap();
    let failure = resume_found(&world, &by_hand).unwrap_err();
    assert!(matches!(failure.cause, Cause::NoRoom { needed: 400, .. }), "{failure}");
    is_suspended(&world, false);
    // Stasis finds them suspended, and notes as little.
    suspend(&world).unwrap();
    let noted = entry(&world).unwrap().processes;
    assert!(noted.iter().all(|noted| noted.unseen && noted.uses.gpus.is_empty()), "{noted:?}");
    resume(&world).unwrap_err();
    is_suspended(&world, false);
}

/// One with CUDA and without a context uses no GPU, whatever it has in host memory.
#[test]
fn what_was_noted_to_use_no_gpu_needs_none() {
    let world = World::new(2, false);
    world.with(|state| {
        state.usage_is_unknown = true;
        state.mappings.extend([(101, 1 << 50), (102, 1 << 50)]);
    });
    suspend(&world).unwrap();
    resume(&world).unwrap();
    runs(&world, false);
}

/// A container that is named, and whose CUDA is lost: all of it is killed, and of a cgroup what has CUDA.
#[test]
fn of_a_cgroup_only_what_has_lost_its_cuda_is_killed() {
    for is_cgroup in [false, true] {
        let world = suspended_world(1, false);
        world.with(|state| {
            state.is_cgroup = is_cgroup;
            state.no_room = vec![101];
        });
        let failure = resume(&world).unwrap_err();
        assert!(matches!(failure.left, Left::Killed { .. }), "{failure}");
        let left = world.with(|state| state.processes.iter().map(|one| one.id).collect::<Vec<_>>());
        assert_eq!(left, if is_cgroup { vec![INIT] } else { Vec::new() });
        assert_eq!(entry(&world), None);
        // Not even what it was before is noted of it.
        if is_cgroup {
            let world = suspended_world(1, false).fault("checkpoint", Fault::Error(999), 1);
            world.with(|state| {
                state.is_cgroup = true;
                state.processes.push(process(150, true));
                state.cuda.insert(150, Running);
                state.no_room = vec![150];
                state.deaths.push(("checkpoint", 101));
            });
            suspend(&world).unwrap_err();
            let noted = entry(&world).map(|entry| entry.processes).unwrap_or_default();
            assert!(noted.iter().all(|noted| noted.id.pid != 101), "{noted:?}");
        }
    }
}

#[test]
fn a_gpu_that_has_gone_is_waited_for() {
    let world = suspended_world(1, false);
    world.with(|state| state.silent_gpu = Some("GPU-0"));
    let failure = resume(&world).unwrap_err();
    assert!(matches!(&failure.cause, Cause::SilentGpu { gpu } if gpu == "GPU-0"), "{failure}");
    is_suspended(&world, false);
    // Another one is nobody's business.
    world.with(|state| state.silent_gpu = Some("GPU-1"));
    resume(&world).unwrap();
    runs(&world, false);
}

/// NVML says of a process a little less than a restore needs.
#[test]
fn room_is_for_all_that_became_free() {
    let world = World::new(2, false);
    world.with(|state| (state.gpu_bytes, state.besides) = (Some(1000), 9));
    suspend(&world).unwrap();
    for free in [208, 209, 217] {
        world.with(|state| state.gpu_bytes = Some(free));
        let failure = resume(&world).unwrap_err();
        assert!(matches!(failure.cause, Cause::NoRoom { needed: 218, .. }), "{failure}");
        is_suspended(&world, false);
    }
    world.with(|state| state.gpu_bytes = Some(218));
    resume(&world).unwrap();
    runs(&world, false);
    // What others free at the same moment is not its own.
    let world = World::new(1, false);
    world.with(|state| (state.gpu_bytes, state.besides) = (Some(1 << 40), 1 << 39));
    suspend(&world).unwrap();
    let uses = &entry(&world).unwrap().processes[0].uses.gpus;
    assert_eq!(uses[..], [("GPU-0".to_owned(), Some(100 + (32 << 20)))]);
}

/// A cgroup that a person has named has no init: one of its processes stands for it.
#[test]
fn a_cgroup_goes_on_when_its_oldest_process_ends_meanwhile() {
    // While room is waited for, and while all is given back.
    for call in ["free", "restore", "unlock"] {
        let world = suspended_world(1, false);
        world.with(|state| {
            state.is_cgroup = true;
            state.deaths.push((call, INIT.pid));
            state.faults.push((call, Fault::Error(600), 1000));
        });
        let failure = resume(&world).unwrap_err();
        assert!(matches!(failure.left, Left::Suspended), "{call}: {failure}");
        assert!(!matches!(failure.cause, Cause::Gone), "{call}: {failure}");
        is_suspended(&world, false);
        world.with(|state| state.faults.clear());
        resume(&world).unwrap();
        runs(&world, false);
    }
    for call in ["lock", "checkpoint"] {
        let world = World::new(2, false).fault(call, Fault::Error(801), 1);
        world.with(|state| {
            state.is_cgroup = true;
            state.deaths.push((call, INIT.pid));
        });
        let failure = suspend(&world).unwrap_err();
        assert!(matches!(failure.left, Left::Running), "{call}: {failure}");
        assert!(matches!(failure.cause, Cause::Driver { .. }), "{call}: {failure}");
        runs(&world, false);
    }
    // Of all of it nothing is left.
    let world = suspended_world(1, false);
    world.with(|state| {
        state.is_cgroup = true;
        state.deaths.extend([("free", INIT.pid), ("free", 101)]);
    });
    // There is nothing to give back, or to come back to.
    _ = resume(&world);
    assert_eq!(entry(&world), None);
}

/// The driver restores the members of a job in the order in which they were CHECKPOINTED.
#[test]
fn a_job_of_which_a_part_is_suspended_is_not_checkpointed() {
    for after in [After::LeaveRunning, After::Exit { by_criu: false }] {
        let world = World::new(2, false).in_job();
        suspend(&world).unwrap();
        world.with(|state| {
            state.processes.push(process(150, true));
            state.cuda.insert(150, Running);
            state.jobs.insert(150, 1);
        });
        world.with(|state| state.log.clear());
        let failure = checkpoint_of(&world, after).unwrap_err();
        assert!(matches!(failure.left, Left::Running), "{failure}");
        assert!(!world.log().contains(&"lock".to_owned()), "{:?}", world.log());
        let said = failure.to_string();
        assert!(said.contains("pid 150 (p150)") && said.contains("stasis resume"), "{said}");
        assert_eq!(world.states(), [Checkpointed, Checkpointed, Running]);
        assert_eq!(entry(&world).unwrap().stage, Stage::Suspended);
        // All of it can be suspended, and resumed, and checkpointed then.
        suspend(&world).unwrap();
        is_suspended(&world, false);
        checkpoint_of(&world, After::LeaveRunning).unwrap();
        is_suspended(&world, false);
        resume(&world).unwrap();
        runs(&world, false);
    }
}

#[test]
fn an_image_of_a_suspended_job_has_its_order_and_not_that_of_the_pids() {
    let world = World::new(1, false).in_job();
    suspend(&world).unwrap();
    world.with(|state| {
        state.processes[0] = process(INIT.pid, true);
        state.cuda.insert(INIT.pid, Running);
        state.jobs.insert(INIT.pid, 1);
    });
    suspend(&world).unwrap();
    checkpoint_of(&world, After::LeaveRunning).unwrap();
    let manifest = world.with(|state| state.manifest.clone().unwrap());
    let order: Vec<_> = manifest.processes.iter().map(|one| (one.order, one.pid)).collect();
    assert_eq!(order, [(0, 2), (1, 1)]);
    resume(&world).unwrap();
    runs(&world, false);
}

#[test]
fn a_job_that_something_else_has_suspended_is_not_checkpointed() {
    let world = World::restored(2).in_job();
    let checkpoint = |world: &World| checkpoint_of(world, After::LeaveRunning);
    for done in [suspend(&world), checkpoint(&world)] {
        let failure = done.unwrap_err();
        assert!(matches!(failure.cause, Cause::JobOrder { .. }), "{failure}");
        assert_eq!(world.states(), [Checkpointed, Checkpointed]);
        assert_eq!(entry(&world), None);
    }
}

#[test]
fn members_of_a_job_are_suspended_and_resumed_in_it() {
    let world = World::new(2, false).in_job();
    suspend(&world).unwrap();
    is_suspended(&world, false);
    world.with(|state| state.joined = None);
    resume(&world).unwrap();
    runs(&world, false);
}

#[test]
fn a_restored_container_may_begin_suspended() {
    let manifest = stasis_config::Manifest {
        version: stasis_config::manifest::VERSION,
        driver: stasis_config::manifest::Driver { version: "580.1".into(), cuda: 13000 },
        processes: vec![stasis_config::manifest::Process {
            pid: 2,
            command: "p2".into(),
            gpus: vec!["GPU-0".into()],
            device_bytes: Some(100),
            ..stasis_config::manifest::Process::default()
        }],
        ..stasis_config::Manifest::default()
    };
    let world = World::restored(1);
    common::restore_as(&world, &manifest, true).unwrap();
    is_suspended(&world, false);
    let noted = entry(&world).unwrap().processes.remove(0);
    assert_eq!(noted.uses.gpus, [("GPU-0".to_owned(), Some(100))]);
    resume(&world).unwrap();
    runs(&world, false);
    // One whose CUDA is not as the dump left it is not said to be suspended.
    let world = World::new(1, false);
    let failure = common::restore_as(&world, &manifest, true).unwrap_err();
    assert!(matches!(failure.left, Left::Removed), "{failure}");
}

#[test]
fn it_goes_to_another_gpu_if_there_is_room() {
    const TO_OTHER: &[(&str, &str)] = &[("GPU-0", "GPU-1")];
    let world = suspended_world(1, false);
    // GPU-0 has no room, and GPU-1 has.
    world.with(|state| state.faults.push(("free", Fault::Error(1), 1000)));
    let failure = resume_onto(&world, &[]).unwrap_err();
    assert!(matches!(failure.cause, Cause::NoRoom { .. }), "{failure}");
    // A refused list is no loss.
    world.with(|state| state.faults.push(("restore", Fault::Error(1), 3)));
    let failure = resume_onto(&world, TO_OTHER).unwrap_err();
    assert!(matches!(failure.cause, Cause::NotThere { .. }), "{failure}");
    assert!(matches!(failure.left, Left::Suspended), "{failure}");
    is_suspended(&world, false);
    world.with(|state| state.faults.retain(|(call, ..)| *call == "free"));
    resume_onto(&world, TO_OTHER).unwrap();
    assert_eq!(world.with(|state| state.memory_at[&101].clone()), "GPU-1");
    runs(&world, false);
}

#[test]
fn whoever_cannot_ask_the_driver_loses_nothing() {
    for frozen in [false, true] {
        for call in ["probe", "hold", "thaw", "states"] {
            let world = suspended_world(1, frozen).fault(call, Fault::Crash, 1000);
            let failure = match resume(&world) {
                Ok(()) => continue,
                Err(failure) => failure,
            };
            assert!(matches!(failure.left, Left::HalfSuspended), "{call}: {failure}");
            world.with(|state| state.faults.clear());
            let under_way = entry(&world).unwrap();
            assert_eq!(under_way.stage, Stage::Resuming);
            world.run(|parts| resume::repair(parts, &under_way, INIT, &World::limits())).unwrap();
            runs(&world, frozen);
        }
    }
}

#[test]
fn what_was_killed_while_another_took_the_memory_stays_suspended() {
    let mut seen = [0; 2];
    for (which, count) in seen.iter_mut().enumerate() {
        for calls in 0..100 {
            let world = if which == 0 { World::new(1, false) } else { suspended_world(1, false) };
            let act = if which == 0 { suspend } else { resume };
            if world.cut_off_after(calls, || act(&world)).is_some() {
                break;
            }
            world.with(|state| state.held.clear());
            let entry = entry(&world);
            let Some(entry) = entry.filter(|entry| entry.stage.is_under_way()) else { continue };
            let suspended = world.states() == [Checkpointed];
            let world = world.fault("free", Fault::Error(1), 1_000_000);
            world.run(|parts| resume::repair(parts, &entry, INIT, &World::limits())).unwrap();
            if suspended {
                *count += 1;
                is_suspended(&world, false);
            } else {
                runs(&world, false);
            }
        }
    }
    assert!(seen.iter().all(|seen| *seen > 1), "{seen:?}");
}

#[test]
fn a_suspension_that_fails_too_late_stays_one_where_the_memory_is_taken() {
    let world = World::new(1, false).fault("freeze", Fault::Error(1), 1).fault(
        "free",
        Fault::Error(1),
        1_000_000,
    );
    let failure = suspend(&world).unwrap_err();
    assert!(matches!(failure.left, Left::Suspended), "{failure}");
    is_suspended(&world, false);
}

#[test]
fn where_it_is_to_go_is_kept_over_a_second_suspension() {
    let world = suspended_world(1, false);
    let map = DeviceMap::from_iter([("GPU-0".to_owned(), "GPU-1".to_owned())]);
    world.with(|state| state.entry.as_mut().unwrap().processes[0].device_map = map.clone());
    world.with(|state| {
        state.processes.push(process(150, true));
        state.cuda.insert(150, Running);
        state.memory_at.insert(150, "GPU-1".to_owned());
    });
    suspend(&world).unwrap();
    assert_eq!(entry(&world).unwrap().processes[0].device_map, map);
    // One that began there goes back there.
    resume(&world).unwrap();
    runs(&world, false);
    assert_eq!(
        world.with(|state| state.memory_at.clone()).into_values().collect::<Vec<_>>(),
        ["GPU-1"; 2]
    );
}
