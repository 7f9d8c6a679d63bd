//! The reaper, with real children.

#![allow(clippy::unwrap_used, clippy::zombie_processes, reason = "the reaper waits for children")]

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{run, sh};
use stasis_shim::reaper::Reaper;
use stasis_shim::runc::{CALLER, Call, Runc, Runtime as _};
use tokio_util::sync::CancellationToken;

#[test]
fn exits_and_signals_become_a_status() {
    run(async {
        let reaper = Reaper::start().unwrap();
        // 34 is a real-time signal.
        for (script, status) in
            [("exit 7", 7), ("kill -KILL $$", 137), ("kill -34 $$", 162), ("true", 0)]
        {
            let spawned = reaper.spawn(sh(script)).unwrap();
            assert_eq!(spawned.exit.await.unwrap().status, status, "{script}");
        }
    });
}

#[test]
fn an_exit_that_comes_before_its_pid_is_known_is_kept() {
    run(async {
        let reaper = Reaper::start().unwrap();
        let expecting = reaper.expect();
        let early = sh("exit 3").spawn().unwrap().id().cast_signed();
        // Another child's exit comes after it, so both have been reaped.
        reaper.spawn(sh("sleep 0.1")).unwrap().exit.await.unwrap();
        assert_eq!(expecting.claim(early).await.unwrap().status, 3);
    });
}

#[test]
fn what_nobody_expects_is_reaped_and_forgotten() {
    run(async {
        let reaper = Reaper::start().unwrap();
        let stray = sh("exit 3").spawn().unwrap().id();
        reaper.spawn(sh("sleep 0.1")).unwrap().exit.await.unwrap();
        assert!(!std::path::Path::new(&format!("/proc/{stray}")).exists());
        let late = reaper.expect().claim(stray.cast_signed());
        let nothing = tokio::time::timeout(std::time::Duration::from_millis(50), late).await;
        assert!(nothing.is_err(), "an old exit was given to a new process: {nothing:?}");
    });
}

#[test]
fn a_call_that_hangs_ends_with_its_caller_and_a_checkpoint_does_not() {
    run(async {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("runc");
        std::fs::write(&program, "#!/bin/sh\nsleep 1\n").unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let runc = Runc {
            program,
            // Or this test would be executed as the engine.
            is_engine: true,
            root: directory.path().into(),
            log: directory.path().join("log.json"),
            systemd_cgroup: false,
            config: None,
            engine_log: (directory.path().join("log"), "warn".to_owned()),
            reaper: Reaper::start().unwrap(),
        };
        for (subcommand, engine, ends) in
            [("exec", false, true), ("start", false, true), ("checkpoint", true, false)]
        {
            let caller = CancellationToken::new();
            let call = Call::new(subcommand, ["c1"]).through_engine(engine);
            let calling = CALLER.scope(caller.clone(), runc.call(call));
            let (result, ()) = tokio::join!(calling, async { caller.cancel() });
            assert_eq!(result.is_err_and(|error| error.was_killed()), ends, "{subcommand}");
        }
    });
}
