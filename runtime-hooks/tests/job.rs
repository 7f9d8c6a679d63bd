//! Jobs: checkpoints and restores of processes that share GPU memory.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{DIGEST, Fault, INIT, World, asked, identity, image_of, position, process, restore};
use stasis_config::manifest::{self, JobFile};
use stasis_config::{Annotations, Manifest};
use stasis_hooks::checkpoint::{After, Request, again, checkpoint, parked};
use stasis_hooks::cuda::{CudaState, GpuUse};
use stasis_hooks::discover::discover;
use stasis_hooks::error::{Cause, Failure, Left};
use stasis_hooks::job::{Membership, find};
use stasis_hooks::journal::{Entry, Noted, Stage};
use stasis_hooks::processes::{Pid, Process};
use stasis_hooks::resume::{repair, resume};

const EXIT: After = After::Exit { by_criu: false };

fn take_with(world: &World, after: After, annotations: &Annotations) -> Result<(), Failure> {
    world.run(|parts| {
        let cuda = discover(parts).unwrap();
        asked(after, annotations, |request| checkpoint(parts, request, cuda))
    })
}

fn take(world: &World, after: After) -> Result<(), Failure> {
    take_with(world, after, &Annotations::default())
}

/// For whom the driver was asked to do this, each time.
fn asked_for(world: &World, call: &str) -> Vec<Vec<Pid>> {
    world.with(|state| {
        let asked = state.asked.iter().filter(|(name, _)| *name == call);
        asked.map(|(_, pids)| pids.clone()).collect()
    })
}

#[test]
fn the_file_is_copied_frozen_and_checkpointed_and_stands_in_the_manifest() {
    for frozen in [false, true] {
        let world = World::new(3, frozen).in_job();
        take(&world, EXIT).unwrap();
        let log = world.log();
        assert!(position(&log, "checkpoint") < position(&log, "freeze"), "{log:?}");
        assert!(position(&log, "freeze") < position(&log, "copy-job"), "{log:?}");
        // The copy of an earlier checkpoint goes with its manifest, before.
        assert!(position(&log, "begin") < position(&log, "copy-job"), "{log:?}");
        assert!(position(&log, "copy-job") < position(&log, "dump"), "{log:?}");
        let job = world.with(|state| state.manifest.clone()).unwrap().job.unwrap();
        let expected = manifest::Job { bytes: 1, sha256: DIGEST.into(), file: JobFile::Dumped };
        assert_eq!(job, expected);
    }
}

#[test]
fn members_are_asked_in_the_order_that_the_manifest_records() {
    let world = World::new(3, false).in_job();
    // Pids outside say nothing of the pids inside, which stay the same.
    world.with(|state| {
        state.processes[1].inner_pid = 40;
        state.processes[2].inner_pid = 30;
        state.processes[3].inner_pid = 20;
    });
    take(&world, After::LeaveRunning).unwrap();
    let order = [INIT.pid + 3, INIT.pid + 2, INIT.pid + 1];
    assert_eq!(asked_for(&world, "lock"), order.map(|pid| vec![pid]));
    for call in ["checkpoint", "restore", "unlock"] {
        assert_eq!(asked_for(&world, call), [order], "{call}");
    }
    let manifest = world.with(|state| state.manifest.clone()).unwrap();
    let recorded: Vec<_> = manifest.processes.iter().map(|p| (p.order, p.pid)).collect();
    assert_eq!(recorded, [(0, 20), (1, 30), (2, 40)]);
}

/// Ranks that have launched so many kernels, of which each ends when all have launched it.
fn ranks(launched: &[u32], frozen: bool) -> World {
    let world = World::new(i32::try_from(launched.len()).unwrap(), frozen).in_job();
    world.with(|state| {
        state.launched = (INIT.pid + 1..).zip(launched.iter().copied()).collect();
    });
    world
}

#[test]
fn ranks_that_wait_for_each_other_come_to_rest_after_the_same_launch() {
    for launched in [&[5, 5][..], &[5, 4], &[4, 5], &[5, 4, 5, 3], &[1, 2, 3]] {
        for frozen in [false, true] {
            let world = ranks(launched, frozen);
            world.run(|parts| {
                let cuda = discover(parts).unwrap();
                asked(EXIT, &Annotations::default(), |request| {
                    let lock = std::time::Duration::from_secs(20);
                    let limits = stasis_hooks::parts::Limits { lock, ..World::limits() };
                    let request = Request { limits, ..*request };
                    checkpoint(parts, &request, cuda).unwrap();
                });
            });
            let came_to: Vec<u32> = world.with(|state| state.launched.values().copied().collect());
            let most = launched.iter().max().unwrap();
            assert!(came_to.iter().all(|launched| launched == most), "{launched:?}: {came_to:?}");
            let one_by_one = asked_for(&world, "lock").iter().all(|pids| pids.len() == 1);
            assert!(one_by_one, "two members were asked at the same time");
        }
    }
}

#[test]
fn ranks_that_never_come_to_rest_run_on() {
    // As if something else kept this one ahead for ever.
    let world = ranks(&[1000, 0], false);
    let failure = take(&world, EXIT).unwrap_err();
    assert!(matches!(failure.cause, Cause::NotReady { .. }), "{failure}");
    assert!(matches!(failure.left, Left::Running), "{failure}");
    assert_eq!(world.states(), [CudaState::Running; 2]);
    world.with(|state| assert!(state.held.is_empty()));
}

#[test]
fn one_that_begins_meanwhile_has_to_be_a_member() {
    let born = || process(150, true);
    let world = World::new(2, false).in_job();
    world.with(|state| {
        state.births.push(("lock", 0, born()));
        state.jobs.insert(150, 1);
    });
    take(&world, EXIT).unwrap();
    assert_eq!(world.with(|state| state.manifest.clone()).unwrap().processes.len(), 3);

    for other in [None, Some(2)] {
        let world = World::new(2, false).in_job();
        world.with(|state| {
            state.births.push(("lock", 0, born()));
            other.map(|job| state.jobs.insert(150, job));
        });
        let failure = take(&world, EXIT).unwrap_err();
        assert!(matches!(failure.left, Left::Running), "{failure}");
        assert!(failure.to_string().contains("pid 150 (p150)"), "{failure}");
        assert_eq!(world.states(), [CudaState::Running; 3]);
    }
}

#[test]
fn one_that_begins_meanwhile_in_a_job_of_its_own_is_refused() {
    let world = World::new(2, false);
    world.with(|state| {
        state.driver = "610.1";
        state.births.push(("lock", 0, process(150, true)));
        state.jobs.insert(150, 1);
    });
    let allowed = Annotations { multi_process: true, ..Annotations::default() };
    let failure = take_with(&world, EXIT, &allowed).unwrap_err();
    let expected = "pid 101 (p101): is not in the job of the other CUDA processes";
    assert!(failure.to_string().contains(expected), "{failure}");
    assert_eq!(world.states(), [CudaState::Running; 3]);
}

#[test]
fn a_file_that_is_exchanged_after_the_lock_is_not_taken_for_the_drivers() {
    for frozen in [false, true] {
        let world = World::new(2, frozen).in_job();
        world.with(|state| state.jobs_change_at = Some("freeze"));
        let failure = take(&world, EXIT).unwrap_err();
        assert!(failure.to_string().contains("was replaced meanwhile"), "{failure}");
        assert_eq!(world.states(), [CudaState::Running; 2]);
        assert!(!world.log().contains(&"dump".to_owned()));
    }
}

#[test]
fn every_failure_ends_where_the_caller_began() {
    let calls = ["journal", "lock", "checkpoint", "freeze", "begin", "copy-job", "dump", "sync"];
    for call in calls {
        for frozen in [false, true] {
            let world = World::new(2, frozen).in_job().fault(call, Fault::Error(999), 1);
            let failure = take(&world, EXIT).unwrap_err();
            assert_eq!(world.states(), [CudaState::Running; 2], "{call}: {failure}");
            world.with(|state| {
                assert!(!state.image_is_whole && !state.ran, "{call}");
                assert_eq!(state.frozen, frozen, "{call}: {failure}");
            });
        }
    }
}

#[test]
fn who_is_not_in_it_and_who_is_in_another_are_named_before_anything_is_touched() {
    for (job, expected) in [
        (None, "pid 102 (p102): is not in the job of the other CUDA processes"),
        (Some(7), "pid 101 (p101) and pid 102 (p102) are in different jobs"),
    ] {
        let world = World::new(2, false).in_job();
        world.with(|state| {
            state.jobs.remove(&102);
            job.map(|job| state.jobs.insert(102, job));
        });
        // Also with the annotation: nobody knows what the driver does to such a container.
        let allowed = Annotations { multi_process: true, ..Annotations::default() };
        let failure = take_with(&world, EXIT, &allowed).unwrap_err();
        assert!(matches!(failure.left, Left::Untouched), "{failure}");
        assert!(failure.to_string().contains(expected), "{failure}");
        assert!(!world.log().contains(&"lock".to_owned()));
    }
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let world = World::new(1, true).in_job().fault("job-files", Fault::Error(1), 1);
    let failure = take(&world, EXIT).unwrap_err();
    assert!(matches!(failure.left, Left::Untouched), "{failure}");
    let expected = "pid 101 (p101): names a job file /x that is a FIFO";
    assert!(failure.to_string().contains(expected), "{failure}");
    let world = World::new(1, true).in_job().fault("job-files", Fault::Hang, 1);
    assert!(matches!(take(&world, EXIT).unwrap_err().left, Left::Untouched));
}

/// Process 160 holds the job file for `member`. It was started by exec, or descends from the first one.
fn held_for(member: Pid, by_exec: bool) -> World {
    let world = World::new(2, false).in_job();
    world.with(|state| {
        let parent = if by_exec { 7 } else { INIT.pid };
        state.processes.push(Process { parent, ..process(160, false) });
        state.holders.insert(member, 160);
    });
    world
}

#[test]
fn a_file_that_is_held_by_what_criu_does_not_dump_is_not_there_after_a_restore() {
    let expected = |failure: &Failure, member: Pid| {
        let said = failure.to_string();
        let member = format!("pid {member} (p{member}): names a job file /proc/self/fd/1 that is");
        assert!(said.contains(&member), "{said}");
        assert!(said.contains("held by pid 160 (p160), which was started in the"), "{said}");
    };
    for member in [101, 102] {
        let world = held_for(member, true);
        let failure = take(&world, EXIT).unwrap_err();
        assert!(matches!(failure.left, Left::Untouched), "{failure}");
        expected(&failure, member);
        take(&held_for(member, false), EXIT).unwrap();
    }

    // One that begins meanwhile.
    let world = held_for(150, true);
    world.with(|state| {
        state.births.push(("lock", 0, process(150, true)));
        state.jobs.insert(150, 1);
    });
    let failure = take(&world, EXIT).unwrap_err();
    assert!(matches!(failure.left, Left::Running), "{failure}");
    expected(&failure, 150);
    assert_eq!(world.states(), [CudaState::Running; 3]);
}

#[test]
fn a_suspension_does_not_mind_who_holds_the_file() {
    let world = held_for(101, true);
    world.with(|state| {
        state.holders.insert(150, 160);
        state.births.push(("lock", 0, process(150, true)));
        state.jobs.insert(150, 1);
    });
    common::suspend(&world, &Annotations::default(), None).unwrap();
    assert_eq!(world.states(), [CudaState::Checkpointed; 3]);
    assert_eq!(world.with(|state| state.entry.clone()).unwrap().stage, Stage::Suspended);
}

#[test]
fn an_old_drivers_jobs_count_for_nothing() {
    // A single process needs no trust, and is operated in its job.
    let world = World::new(1, false).in_job();
    world.with(|state| state.driver = "590.44");
    take(&world, After::LeaveRunning).unwrap();
    assert!(world.with(|state| state.manifest.clone()).unwrap().job.is_some());

    for (driver, asks) in [("609.99", true), ("580.159", false)] {
        old_driver(driver, asks);
    }
}

fn old_driver(driver: &'static str, asks: bool) {
    let world = World::new(2, false).in_job();
    world.with(|state| state.driver = driver);
    let said = world.run(|parts| {
        let cuda = discover(parts).unwrap();
        asked(EXIT, &Annotations::default(), |request| checkpoint(parts, request, cuda))
            .unwrap_err()
            .to_string()
    });
    for way in ["dev.stasis.job=file, which needs driver branch 610", "multi-process=allow"] {
        assert!(said.contains(way), "{said}");
    }
    let asked = world.log().contains(&"job-files".to_owned());
    assert_eq!(asked, asks, "{driver}: whether environments are read");
}

#[test]
fn without_a_job_both_ways_out_are_named_and_what_was_given_in_vain() {
    let world = World::new(2, false).in_job();
    world.with(|state| state.jobs.clear());
    let said = world.run(|parts| {
        let cuda = discover(parts).unwrap();
        asked(EXIT, &Annotations::default(), |request| {
            let request = Request { given_job: Some(identity(1)), ..*request };
            checkpoint(parts, &request, cuda).unwrap_err().to_string()
        })
    });
    assert!(said.contains("it has a job file, but they were started without"), "{said}");
    let allowed = Annotations { multi_process: true, ..Annotations::default() };
    take_with(&world, EXIT, &allowed).unwrap();
}

#[test]
fn one_process_on_several_gpus_may_be_in_a_job() {
    let on_two = |world: &World| {
        world.with(|state| {
            state.processes[1].devices = vec!["/dev/nvidia0".into(), "/dev/nvidia1".into()];
            state.usage_is_unknown = true;
        });
    };
    let world = World::new(1, false);
    on_two(&world);
    let said = take(&world, EXIT).unwrap_err().to_string();
    assert!(said.contains("dev.stasis.job=file") && said.contains("multi-gpu=allow"), "{said}");
    let world = world.in_job();
    on_two(&world);
    take(&world, EXIT).unwrap();
}

#[test]
fn a_later_process_goes_on_in_the_same_job() {
    let parked_world = || {
        let world = World::new(2, true).in_job();
        take(&world, After::LeaveRunning).unwrap();
        // What follows is another process: nothing of the helper is left.
        world.with(|state| {
            state.joined = None;
            state.asked.clear();
        });
        let entry = world.with(|state| state.entry.clone()).unwrap();
        assert_eq!(entry.in_job().unwrap().file, identity(1));
        (world, entry)
    };
    let (world, entry) = parked_world();
    world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 2]);

    let (world, entry) = parked_world();
    world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 2]);

    let (world, entry) = parked_world();
    world.with(|state| state.manifest = None);
    world.run(|parts| {
        let cuda = parked(parts, &entry).unwrap();
        asked(After::LeaveRunning, &Annotations::default(), |request| {
            again(parts, request, &entry, &cuda).unwrap();
        });
    });
    assert!(world.with(|state| state.manifest.clone()).unwrap().job.is_some());
}

#[test]
fn a_later_process_asks_in_the_order_of_the_checkpoint() {
    let world = World::new(3, true).in_job();
    world.with(|state| {
        state.processes[1].inner_pid = 40;
        state.processes[2].inner_pid = 30;
        state.processes[3].inner_pid = 20;
    });
    take(&world, After::LeaveRunning).unwrap();
    world.with(|state| state.asked.clear());
    let entry = world.with(|state| state.entry.clone()).unwrap();
    world.run(|parts| resume(parts, &entry, &World::limits())).unwrap();
    for call in ["restore", "unlock"] {
        assert_eq!(asked_for(&world, call), [[103, 102, 101]], "{call}");
    }
}

#[test]
fn what_a_killed_operation_left_is_put_right_in_its_job() {
    for frozen in [false, true] {
        killed_after_each_call(frozen, || World::new(2, frozen).in_job());
        killed_after_each_call(frozen, || ranks(&[4, 5], frozen));
    }
}

fn killed_after_each_call(frozen: bool, world: impl Fn() -> World) {
    for calls in 0..100 {
        let world = world();
        let done = world.cut_off_after(calls, || take(&world, After::LeaveRunning));
        if done.is_some() {
            assert!(calls > 10);
            return;
        }
        world.with(|state| {
            state.held.clear();
            state.joined = None;
            state.asked.clear();
            state.locks_are_requested = false;
        });
        if let Some(entry) = world.with(|state| state.entry.clone()) {
            world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
            // Only one can have been in the middle of it.
            if let Some(last) = entry.locked_last {
                let others = asked_for(&world, "lock").into_iter().flatten();
                assert!(others.into_iter().all(|pid| pid == last.pid), "after {calls} calls");
            }
        }
        assert_eq!(world.states(), [CudaState::Running; 2], "after {calls} calls");
        assert_eq!(world.with(|state| state.frozen), frozen, "after {calls} calls");
        assert!(world.with(|state| state.held.is_empty()), "after {calls} calls");
    }
    panic!("it never ended");
}

/// What is noted of an operation that was killed in the lock of the first, which is pending.
fn lost_lock(world: &World, frozen: bool) -> Entry {
    let job = world.run(|parts| {
        let cuda = discover(parts).unwrap();
        find(parts.driver, parts.processes, &cuda, INIT).unwrap().unwrap().job
    });
    let mut entry = Entry::new("c1", INIT, frozen, "/image".as_ref());
    entry.job = Some(Membership { job, origin: Some(JobFile::Dumped) });
    entry.locking = true;
    entry.locked_last = Some(process(101, true).id);
    let noted = |pid| Noted {
        unseen: false,
        id: process(pid, true).id,
        found: CudaState::Running,
        uses: GpuUse::default(),
        device_map: stasis_hooks::remap::DeviceMap::new(),
    };
    entry.processes = [101, 102].map(noted).into();
    world.with(|state| state.late = vec![101]);
    entry
}

#[test]
fn a_lost_lock_that_waits_for_the_others_is_outlasted() {
    for frozen in [false, true] {
        // The first is ahead: its lock, whose caller was killed, is granted when the other has
        // launched the same.
        let world = ranks(&[5, 4], frozen);
        let entry = lost_lock(&world, frozen);
        world.with(|state| state.ranks_run = true);
        world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
        assert_eq!(world.states(), [CudaState::Running; 2]);
        world.with(|state| {
            assert!(state.late.is_empty() && state.held.is_empty());
            assert_eq!(state.frozen, frozen);
        });
        assert!(asked_for(&world, "lock").iter().all(|pids| *pids == [101]));
    }
}

#[test]
fn who_is_killed_in_a_lock_has_noted_that_it_may_be_pending() {
    let mut seen = 0;
    for calls in 0..100 {
        let world = World::new(2, false).in_job();
        let done = world.cut_off_after(calls, || take(&world, After::LeaveRunning));
        if done.is_some() {
            assert_eq!(seen, 2);
            return;
        }
        if world.log().last().is_none_or(|call| call != "lock") {
            continue;
        }
        seen += 1;
        let entry = world.with(|state| state.entry.clone()).unwrap();
        world.with(|state| {
            state.held.clear();
            state.joined = None;
            // What the driver does with such a lock later.
            state.late = vec![entry.locked_last.unwrap().pid];
        });
        world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
        assert!(world.with(|state| state.late.is_empty()), "after {calls} calls");
        assert_eq!(world.states(), [CudaState::Running; 2], "after {calls} calls");
    }
    panic!("it never ended");
}

#[test]
fn a_lost_lock_that_takes_longer_is_left_to_the_next_operation() {
    for frozen in [false, true] {
        let world = ranks(&[5, 4], frozen);
        let entry = lost_lock(&world, frozen);
        world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
        assert_eq!(world.with(|state| state.late.clone()), [101], "it is still pending");
        assert_eq!(world.with(|state| state.frozen), frozen);
        let entry = world.with(|state| state.entry.clone()).unwrap();
        assert!(entry.locking && entry.frozen == frozen, "{entry:?}");
        world.with(|state| state.ranks_run = true);
        world.run(|parts| repair(parts, &entry, INIT, &World::limits())).unwrap();
        assert!(world.with(|state| state.late.is_empty() && state.entry.is_none()));
        assert_eq!(world.states(), [CudaState::Running; 2]);
    }
}

#[test]
fn a_member_that_ends_meanwhile_fails_the_checkpoint() {
    for call in ["lock", "checkpoint", "freeze", "dump"] {
        let world = World::new(2, false).in_job();
        world.with(|state| state.deaths.push((call, 102)));
        let failure = take(&world, EXIT).unwrap_err();
        assert!(
            failure.to_string().contains("pid 102 (p102): ended meanwhile"),
            "{call}: {failure}"
        );
        assert_eq!(world.states(), [CudaState::Running], "{call}");
    }
    // Also where CRIU has ended the others.
    let world = World::new(2, false).in_job();
    world.with(|state| state.deaths.push(("dump", 102)));
    let failure = take(&world, After::Exit { by_criu: true }).unwrap_err();
    assert!(failure.to_string().contains("pid 102 (p102): ended meanwhile"), "{failure}");
    assert!(matches!(failure.left, Left::Gone), "{failure}");
    assert!(!world.with(|state| state.image_is_whole));
}

#[test]
fn the_pause_is_kept_where_no_rank_is_ahead() {
    for launched in [&[5, 5][..], &[5, 4]] {
        let world = ranks(launched, true);
        take(&world, EXIT).unwrap();
        let ahead = launched[0] != launched[1];
        assert_eq!(world.with(|state| state.ran), ahead, "{launched:?}");
    }
}

#[test]
fn shared_memory_that_is_lost_is_told_as_what_it_is() {
    let allowed = Annotations { multi_process: true, ..Annotations::default() };
    let world = World::new(2, false).fault("restore", Fault::Error(1), 1);
    let failure = take_with(&world, After::LeaveRunning, &allowed).unwrap_err();
    let said = failure.to_string();
    assert!(matches!(failure.left, Left::Killed { .. }), "{said}");
    for words in ["GPU memory that it shared", "returned 1 (", "/image is kept"] {
        assert!(said.contains(words), "{said}");
    }
    assert!(!said.contains("can be restored"), "{said}");
    // One process that shared none has lost its GPU, or whatever: it is tried again.
    let world = World::new(1, false).fault("restore", Fault::Error(1), 2);
    take(&world, After::LeaveRunning).unwrap();
}

fn image(count: i32, job: Option<JobFile>) -> Manifest {
    let mut image = image_of("610.1", count);
    // The reverse of the pids.
    for (process, order) in image.processes.iter_mut().rev().zip(0..) {
        process.order = order;
    }
    image.job = job.map(|file| manifest::Job { bytes: 1, sha256: DIGEST.into(), file });
    image
}

#[test]
fn a_restore_places_the_file_first_and_asks_in_the_recorded_order() {
    let world = World::restored(3).in_job();
    restore(&world, &image(3, Some(JobFile::Made))).unwrap();
    assert_eq!(world.states(), [CudaState::Running; 3]);
    let log = world.log();
    assert!(position(&log, "place-job") < position(&log, "runc-restore"), "{log:?}");
    assert!(position(&log, "copy-job") < position(&log, "restore"), "its digest is looked at");
    for call in ["restore", "unlock"] {
        assert_eq!(asked_for(&world, call), [[103, 102, 101]], "{call}");
    }
    assert!(!log.contains(&"take-back-job".to_owned()));
}

#[test]
fn restored_processes_with_another_job_file_are_not_given_to_the_driver() {
    for expected in ["name no job file", "is not in the job", "not as it was in the checkpoint"] {
        let world = World::restored(2).in_job();
        let mut manifest = image(2, Some(JobFile::Dumped));
        match expected {
            "name no job file" => world.with(|state| state.jobs.clear()),
            "is not in the job" => world.with(|state| assert!(state.jobs.remove(&102).is_some())),
            _ => manifest.job.as_mut().unwrap().sha256 = "0".repeat(64),
        }
        let failure = restore(&world, &manifest).unwrap_err();
        assert!(failure.to_string().contains(expected), "{failure}");
        assert!(matches!(failure.left, Left::Removed), "{failure}");
        assert_eq!(asked_for(&world, "restore"), Vec::<Vec<Pid>>::new());
        // The driver has not seen the file.
        assert!(world.with(|state| state.joined.is_none()), "{failure}");
    }
}

#[test]
fn every_failed_restore_takes_its_job_file_back() {
    for call in [
        "place-job",
        "complete",
        "runc-restore",
        "nodes",
        "job-files",
        "check-job",
        "copy-job",
        "restore",
    ] {
        let world = World::restored(2).in_job().fault(call, Fault::Error(999), 99);
        let failure = restore(&world, &image(2, Some(JobFile::Made))).unwrap_err();
        assert!(world.log().contains(&"take-back-job".to_owned()), "{call}: {failure}");
        let untouched = matches!(failure.left, Left::Untouched);
        assert_eq!(untouched, matches!(call, "place-job" | "complete"), "{call}: {failure}");
    }
}

#[test]
fn a_refusal_in_a_job_is_not_taken_for_the_loss_without_one() {
    let world = World::restored(2).in_job().fault("restore", Fault::Error(1), 99);
    let failure = restore(&world, &image(2, Some(JobFile::Made))).unwrap_err();
    assert!(matches!(failure.cause, Cause::Driver { .. }), "{failure}");
    let world = World::restored(2).in_job().fault("restore", Fault::Error(1), 99);
    world.with(|state| state.jobs.clear());
    let failure = restore(&world, &image(2, None)).unwrap_err();
    assert!(matches!(failure.cause, Cause::SharedLost { .. }), "{failure}");
    assert!(failure.to_string().contains("the image cannot bring it back"), "{failure}");
}
