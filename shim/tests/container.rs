//! The Task service over a runtime that only pretends: order of events, what may be done at the
//! same time, and what a failure leaves behind.

#![allow(clippy::unwrap_used, clippy::zombie_processes, reason = "the reaper waits for children")]

mod common;

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use common::{World, context, refusal, run};
use containerd_shim::protos::api::{self, Status};
use containerd_shim::protos::shim_async::Task as _;
use containerd_shim::protos::ttrpc::Code;
use stasis_shim::runc::Through;

#[test]
fn the_life_of_a_container_is_told_in_order() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        assert_eq!(world.status("c1").await, Status::RUNNING);
        world.exec("c1", "e1").await.unwrap();
        assert_eq!(refusal(world.delete("c1").await).0, Code::FAILED_PRECONDITION);
        world.kill("c1").await.unwrap();
        // The exec is not in a pid namespace that would end it, and its end comes first.
        let exec = pid_of(&world, "c1", "e1").await;
        kill(exec);
        let events = world.events(6).await;
        assert_eq!(world.status("c1").await, Status::STOPPED);
        assert_eq!(world.delete("c1").await.unwrap(), 137);
        let expected = [
            "/tasks/create",
            "/tasks/start",
            "/tasks/exec-added",
            "/tasks/exec-started",
            "/tasks/exit e1",
            "/tasks/exit c1",
        ];
        assert_eq!(events, expected);
        assert_eq!(world.events(7).await[6], "/tasks/delete");
        assert_eq!(refusal(world.delete("c1").await).0, Code::NOT_FOUND);
    });
}

/// Where the engine has the job file of a container of the namespace `default`.
fn job_directory(world: &World, id: &str) -> std::path::PathBuf {
    world.directory.path().join("state/7cb686ffc1b1d3ae").join(format!("{id}.job"))
}

#[test]
fn a_container_with_a_job_file_is_the_engines_and_no_other_costs_one() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        world.exec("c1", "e1").await.unwrap();
        let bundle = world.bundle("c2", true);
        let annotated = r#"{"ociVersion":"1.0.2","root":{"path":"rootfs"},
            "annotations":{"dev.stasis.job":"file"},"linux":{"namespaces":[{"type":"pid"}]}}"#;
        std::fs::write(bundle.join("config.json"), annotated).unwrap();
        world.create_in(&bundle, "").await.unwrap();
        std::fs::create_dir_all(job_directory(&world, "c2")).unwrap();
        world.start("c2").await.unwrap();
        world.exec("c2", "e1").await.unwrap();
        for subcommand in ["create", "exec"] {
            let through = world.runtime.through(subcommand);
            assert_eq!(through, [Through::Runtime, Through::Engine], "{subcommand}");
        }
        world.kill("c2").await.unwrap();
        kill(pid_of(&world, "c2", "e1").await);
        world.wait("c2").await.unwrap();
        world.delete("c2").await.unwrap();
        assert_eq!(world.runtime.through("delete"), [Through::Engine]);
    });
}

#[test]
fn what_a_failed_create_has_made_is_deleted() {
    run(async {
        let world = World::new().await;
        world.runtime.fail("create", "no such mount");
        std::fs::create_dir_all(job_directory(&world, "c1")).unwrap();
        let (_, words) = refusal(world.create_in(&world.bundle("c1", true), "").await);
        assert!(words.contains("no such mount"), "{words}");
        assert_eq!(world.runtime.through("delete"), [Through::Engine]);
        world.create_in(&world.bundle("c2", true), "").await.unwrap_err();
        assert_eq!(world.runtime.through("delete").len(), 1, "nothing was made for this one");
    });
}

#[test]
fn an_end_is_never_told_before_its_start() {
    run(async {
        let world = World::new().await;
        world.create_in(&world.bundle("c1", true), "").await.unwrap();
        let starting = world.runtime.hold("start");
        let service = world.service.clone();
        let request = containerd_shim::protos::api::StartRequest {
            id: "c1".to_owned(),
            ..Default::default()
        };
        let start = tokio::spawn(async move { service.start(&context(), request).await });
        world.runtime.called("start").await;
        world.runtime.end();
        tokio::time::sleep(Duration::from_millis(50)).await;
        starting.notify_one();
        start.await.unwrap().unwrap();
        assert_eq!(world.events(3).await, ["/tasks/create", "/tasks/start", "/tasks/exit c1"]);
        assert_eq!(world.status("c1").await, Status::STOPPED);
    });
}

#[test]
fn during_a_checkpoint_all_else_is_answered_or_refused_at_once() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let (dump, checkpoint) = world.dumping("c1", false).await;
        assert_eq!(world.status("c1").await, Status::RUNNING);

        let second = world.checkpoint("c1").await.unwrap();
        for (code, words) in [
            refusal(world.pause("c1").await),
            refusal(second),
            refusal(world.resume("c1").await),
            refusal(world.exec("c1", "e1").await),
        ] {
            assert_eq!(code, Code::FAILED_PRECONDITION);
            assert!(words.contains("c1") && words.contains("checkpoint is under way"), "{words}");
        }

        // A kill wins, and the dead is deleted without waiting for the dump.
        world.kill("c1").await.unwrap();
        assert_eq!(world.wait("c1").await.unwrap(), 137);
        assert_eq!(world.status("c1").await, Status::STOPPED);
        assert_eq!(world.delete("c1").await.unwrap(), 137);
        assert!(!checkpoint.is_finished());
        world.runtime.fail("checkpoint", "the container was killed meanwhile");
        dump.notify_one();
        assert!(refusal(checkpoint.await.unwrap()).1.contains("killed meanwhile"));
    });
}

#[test]
fn a_caller_that_goes_away_does_not_cut_a_checkpoint() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let (dump, checkpoint) = world.dumping("c1", false).await;
        checkpoint.abort();
        assert!(checkpoint.await.unwrap_err().is_cancelled());
        // It is still under way.
        assert_eq!(refusal(world.checkpoint("c1").await.unwrap()).0, Code::FAILED_PRECONDITION);
        dump.notify_one();
        assert_eq!(world.events(3).await[2], "/tasks/checkpointed");
    });
}

#[test]
fn a_checkpoint_waits_for_an_exec_that_has_begun() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let starting = world.runtime.hold("exec");
        let (exec, ()) = tokio::join!(world.exec("c1", "e1"), async {
            world.runtime.called("exec").await;
            let checkpoint = world.checkpoint("c1");
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(!world.runtime.calls().iter().any(|call| call.starts_with("checkpoint")));
            starting.notify_one();
            checkpoint.await.unwrap().unwrap();
        });
        kill(exec.unwrap().cast_signed());
    });
}

#[test]
fn a_paused_one_is_paused_all_the_time_and_told() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        world.pause("c1").await.unwrap();
        let (dump, checkpoint) = world.dumping("c1", false).await;
        assert_eq!(world.status("c1").await, Status::PAUSED);
        dump.notify_one();
        checkpoint.await.unwrap().unwrap();
        assert_eq!(world.status("c1").await, Status::PAUSED);
        world.resume("c1").await.unwrap();
        assert_eq!(world.status("c1").await, Status::RUNNING);
        assert_eq!(
            world.events(5).await[2..],
            ["/tasks/paused", "/tasks/checkpointed", "/tasks/resumed"]
        );
    });
}

#[test]
fn a_resume_that_fails_leaves_it_paused() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        world.pause("c1").await.unwrap();
        world.runtime.fail("resume", "stasis: no");
        let (_, words) = refusal(world.resume("c1").await);
        assert!(words.contains("OCI runtime resume failed"), "{words}");
        assert_eq!(world.status("c1").await, Status::PAUSED);
    });
}

#[test]
fn a_failed_restore_leaves_no_process_and_can_be_deleted() {
    run(async {
        let world = World::new().await;
        let pid = world.create_in(&world.bundle("c1", true), "/image").await.unwrap();
        assert_eq!(pid, 0);
        assert_eq!(world.runtime.calls(), Vec::<String>::new());
        world.runtime.fail("restore", "criu failed");
        let (waited, ()) = tokio::join!(world.wait("c1"), async {
            let (_, words) = refusal(world.start("c1").await);
            assert!(words.contains("OCI runtime restore failed"), "{words}");
        });
        assert_eq!(waited.unwrap(), 255);
        assert_eq!(world.status("c1").await, Status::STOPPED);
        world.delete("c1").await.unwrap();
        let calls = world.runtime.calls();
        assert!(calls[0].starts_with("restore --image-path /image --work-path "), "{calls:?}");
        assert_eq!(calls[1..], ["delete --force c1", "delete c1"]);
        // It never ran, so there is no end to be told.
        assert_eq!(world.events(2).await, ["/tasks/create", "/tasks/delete"]);
    });
}

#[test]
fn the_end_of_one_that_was_never_started_is_told_before_it_is_deleted() {
    run(async {
        let world = World::new().await;
        world.create_in(&world.bundle("c1", true), "").await.unwrap();
        let deleting = world.runtime.hold("delete");
        let (deleted, ()) = tokio::join!(world.delete("c1"), async {
            world.runtime.called("delete").await;
            world.runtime.end();
            deleting.notify_one();
        });
        assert_eq!(deleted.unwrap(), 137);
        assert_eq!(world.events(3).await, ["/tasks/create", "/tasks/exit c1", "/tasks/delete"]);
    });
}

#[test]
fn a_restore_runs_in_start_and_makes_the_same_container() {
    run(async {
        let world = World::new().await;
        world.create_in(&world.bundle("c1", true), "/image").await.unwrap();
        assert_eq!(world.status("c1").await, Status::CREATED);
        assert_ne!(world.start("c1").await.unwrap(), 0);
        assert_eq!(world.status("c1").await, Status::RUNNING);
        world.kill("c1").await.unwrap();
        assert_eq!(world.events(3).await[1..], ["/tasks/start", "/tasks/exit c1"]);
    });
}

#[test]
fn a_kill_during_a_restore_ends_the_engine() {
    run(async {
        let world = World::new().await;
        world.create_in(&world.bundle("c1", true), "/image").await.unwrap();
        let engine = Command::new("sleep").arg("1000").spawn().unwrap().id();
        *world.runtime.engine.lock().unwrap() = Some(engine.cast_signed());
        let restoring = world.runtime.hold("restore");
        world.runtime.fail("kill", "container does not exist");
        let (started, ()) = tokio::join!(world.start("c1"), async {
            world.runtime.called("restore").await;
            // What it would remove is just being made.
            assert_eq!(refusal(world.delete("c1").await).0, Code::FAILED_PRECONDITION);
            world.kill("c1").await.unwrap();
            while std::path::Path::new(&format!("/proc/{engine}")).exists() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // A plain `runc restore` minds no signal, and succeeds.
            restoring.notify_one();
        });
        assert!(refusal(started).1.contains("killed while it was restored"));
        assert_eq!(world.runtime.calls().last().unwrap(), "delete --force c1");
        assert_eq!(world.status("c1").await, Status::STOPPED);
        assert_eq!(world.delete("c1").await.unwrap(), 137);
        assert_eq!(world.events(2).await, ["/tasks/create", "/tasks/delete"]);
    });
}

#[test]
fn a_kill_during_a_pause_is_not_lost() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let pausing = world.runtime.hold("pause");
        let (paused, ()) = tokio::join!(world.pause("c1"), async {
            world.runtime.called("pause").await;
            world.kill("c1").await.unwrap();
            // Its end is told while runc still pauses.
            world.events(3).await;
            pausing.notify_one();
        });
        assert!(refusal(paused).1.contains("killed while it was paused"));
        assert!(world.runtime.calls().contains(&"resume c1".to_owned()));
        assert_eq!(world.status("c1").await, Status::STOPPED);
        world.delete("c1").await.unwrap();
        assert_eq!(world.events(4).await[2..], ["/tasks/exit c1", "/tasks/delete"]);
    });
}

#[test]
fn a_dump_that_hangs_is_ended_with_the_dead_unless_the_end_was_asked_for() {
    for (exit, ends) in [(false, true), (true, false)] {
        run(async {
            let world = World::new().await;
            world.running("c1").await;
            let criu = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap().id();
            *world.runtime.engine.lock().unwrap() = Some(criu.cast_signed());
            let (dump, checkpoint) = world.dumping("c1", exit).await;
            world.kill("c1").await.unwrap();
            world.events(3).await;
            let running = || std::path::Path::new(&format!("/proc/{criu}")).exists();
            tokio::time::pause();
            tokio::time::sleep(Duration::from_secs(7)).await;
            tokio::time::resume();
            for _ in 0..100 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(running(), !ends, "with exit {exit}");
            if running() {
                kill(criu.cast_signed());
            }
            dump.notify_one();
            let _ = checkpoint.await;
        });
    }
}

#[test]
fn a_checkpoint_that_ends_it_is_answered_before_its_end_is_told() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let (dump, checkpoint) = world.dumping("c1", true).await;
        world.runtime.end();
        let told = tokio::time::timeout(Duration::from_millis(200), world.wait("c1")).await;
        assert!(told.is_err(), "its end was told while the checkpoint was under way");
        dump.notify_one();
        checkpoint.await.unwrap().unwrap();
        world.wait("c1").await.unwrap();
        assert_eq!(world.events(4).await[2..], ["/tasks/checkpointed", "/tasks/exit c1"]);
    });
}

#[test]
fn a_kill_during_such_a_checkpoint_is_told_at_once() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let (dump, checkpoint) = world.dumping("c1", true).await;
        world.runtime.end();
        // Whether or not runc still finds something to kill.
        let _ = world.kill("c1").await;
        tokio::time::timeout(Duration::from_secs(2), world.wait("c1")).await.unwrap().unwrap();
        dump.notify_one();
        let _ = checkpoint.await.unwrap();
    });
}

#[test]
fn an_end_is_told_although_such_a_checkpoint_hangs() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let (_dump, _checkpoint) = world.dumping("c1", true).await;
        world.runtime.end();
        tokio::time::sleep(Duration::from_millis(100)).await;
        tokio::time::pause();
        let told = tokio::time::timeout(Duration::from_secs(40), world.wait("c1")).await;
        tokio::time::resume();
        told.unwrap().unwrap();
        world.delete("c1").await.unwrap();
    });
}

#[test]
fn a_kill_before_the_dump_begins_is_told_at_once() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let exec = world.runtime.hold("exec");
        let (id, exec_id) = ("c1".to_owned(), "e1".to_owned());
        let request = api::ExecProcessRequest { id, exec_id, ..Default::default() };
        world.service.exec(&context(), request).await.unwrap();
        let service = world.service.clone();
        let starting = tokio::spawn(async move {
            let (id, exec_id) = ("c1".to_owned(), "e1".to_owned());
            let request = api::StartRequest { id, exec_id, ..Default::default() };
            service.start(&context(), request).await
        });
        world.runtime.called("exec").await;
        let dump = world.runtime.hold("checkpoint");
        let checkpoint = world.checkpoint_and("c1", true);
        tokio::time::sleep(Duration::from_millis(50)).await;
        world.kill("c1").await.unwrap();
        exec.notify_one();
        starting.await.unwrap().unwrap();
        world.runtime.called("checkpoint").await;
        kill(pid_of(&world, "c1", "e1").await);
        tokio::time::timeout(Duration::from_secs(3), world.wait("c1")).await.unwrap().unwrap();
        dump.notify_one();
        let _ = checkpoint.await;
    });
}

#[test]
fn it_is_deleted_once() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        world.kill("c1").await.unwrap();
        world.events(3).await;
        let deleting = world.runtime.hold("delete");
        let (first, second) = tokio::join!(world.delete("c1"), async {
            world.runtime.called("delete").await;
            let limit = Duration::from_secs(5);
            let second = tokio::time::timeout(limit, world.delete("c1")).await;
            deleting.notify_one();
            second
        });
        assert_eq!(first.unwrap(), 137);
        assert_eq!(refusal(second.expect("it waits for the first")).0, Code::NOT_FOUND);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(world.events(4).await.len(), 4);
    });
}

#[test]
fn what_runc_does_not_delete_keeps_all_it_has_and_can_be_deleted_later() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        world.kill("c1").await.unwrap();
        world.events(3).await;
        world.runtime.fail("delete", "device or resource busy");
        assert!(refusal(world.delete("c1").await).1.contains("failed to delete task"));
        world.runtime.fail("delete", "container does not exist");
        assert_eq!(world.delete("c1").await.unwrap(), 137);
    });
}

#[test]
fn an_exec_that_is_being_started_is_not_deleted_and_its_end_comes_first() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let starting = world.runtime.hold("exec");
        let (exec, ()) = tokio::join!(world.exec("c1", "e1"), async {
            world.runtime.called("exec").await;
            let request = containerd_shim::protos::api::DeleteRequest {
                id: "c1".to_owned(),
                exec_id: "e1".to_owned(),
                ..Default::default()
            };
            let deleted = world.service.delete(&context(), request).await;
            assert_eq!(refusal(deleted).0, Code::FAILED_PRECONDITION);
            // Its init ends meanwhile.
            world.runtime.end();
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(refusal(world.exec("c1", "e2").await).1.contains("stopped"));
            starting.notify_one();
        });
        kill(exec.unwrap().cast_signed());
        let expected =
            ["/tasks/exec-added", "/tasks/exec-started", "/tasks/exit e1", "/tasks/exit c1"];
        let events = world.events(6).await;
        let told: Vec<_> = events[2..].iter().collect();
        assert_eq!(told, expected);
    });
}

#[test]
fn a_failed_creation_leaves_nothing_and_can_be_tried_again() {
    run(async {
        let world = World::new().await;
        world.runtime.fail("create", "no such file or directory");
        let bundle = world.bundle("c1", true);
        let (code, words) = refusal(world.create_in(&bundle, "").await);
        assert_eq!(code, Code::UNKNOWN);
        assert!(words.starts_with("OCI runtime create failed: "), "{words}");
        assert_eq!(refusal(world.start("c1").await).0, Code::NOT_FOUND);
        world.runtime.fail("create", "panic");
        let (_, words) = refusal(world.create_in(&bundle, "").await);
        assert!(words.contains("internal error of the shim: the runtime's wrapper"), "{words}");
        let (_, words) = refusal(world.create_in(&bundle, "").await);
        assert!(words.contains("internal error"), "the id is still taken: {words}");
    });
}

#[test]
fn an_id_is_taken_once() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        let again = world.create_in(&world.bundle("c1", true), "").await;
        assert_eq!(refusal(again).0, Code::ALREADY_EXISTS);
        assert_eq!(world.status("c1").await, Status::RUNNING);
    });
}

#[test]
fn without_pids_of_its_own_all_of_it_is_killed_with_its_init() {
    run(async {
        let world = World::new().await;
        world.create_in(&world.bundle("c1", false), "").await.unwrap();
        world.start("c1").await.unwrap();
        world.runtime.end();
        world.events(3).await;
        assert!(world.runtime.calls().contains(&"kill --all c1 KILL".to_owned()));
    });
}

#[test]
fn what_ends_while_it_is_paused_is_thawed() {
    run(async {
        let world = World::new().await;
        world.running("c1").await;
        world.pause("c1").await.unwrap();
        world.runtime.end();
        world.events(4).await;
        assert!(world.runtime.calls().contains(&"resume c1".to_owned()));
        assert_eq!(world.status("c1").await, Status::STOPPED);
    });
}

async fn pid_of(world: &World, id: &str, exec: &str) -> i32 {
    let request = containerd_shim::protos::api::StateRequest {
        id: id.to_owned(),
        exec_id: exec.to_owned(),
        ..Default::default()
    };
    world.service.state(&context(), request).await.unwrap().pid.cast_signed()
}

fn kill(pid: i32) {
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
}
