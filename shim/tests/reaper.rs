//! The reaper, with real children.

mod common;

use common::{run, sh};
use stasis_shim::reaper::Reaper;

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
