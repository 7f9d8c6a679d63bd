//! The tracer against real threads.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::Duration;

use stasis_hooks::child::Program;
use stasis_hooks::container::{Cgroup, CgroupVersion};
use stasis_hooks::hold::{Hold, Keep, Target, Tracer};

/// A child that shows whether it runs: it appends to a file all the time.
struct Counting {
    child: std::process::Child,
    file: tempfile::NamedTempFile,
}

impl Counting {
    fn start() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        let script = format!("while :; do echo x >> {}; done", file.path().display());
        let child = std::process::Command::new("sh").args(["-c", &script]).spawn().unwrap();
        Self { child, file }
    }

    fn length(&self) -> u64 {
        self.file.path().metadata().unwrap().len()
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn grows(&self) -> bool {
        let before = self.length();
        for _ in 0..200 {
            std::thread::sleep(Duration::from_millis(5));
            if self.length() > before {
                return true;
            }
        }
        false
    }

    fn stands(&self) -> bool {
        let before = self.length();
        std::thread::sleep(Duration::from_millis(100));
        self.length() == before
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tracer() -> Tracer {
    Tracer::new(Program::at(env!("CARGO_BIN_EXE_stasis-runc")), None)
}

#[test]
fn a_held_process_stands_and_goes_on() {
    let process = Counting::start();
    assert!(process.grows());
    let mut tracer = tracer();
    tracer.hold(&[Target { pid: process.pid(), keep: Keep::None }]).unwrap();
    tracer.settle().unwrap();
    assert!(process.stands());
    assert!(tracer.tracer().is_some());
    tracer.hold(&[Target { pid: process.pid(), keep: Keep::All }]).unwrap();
    assert!(process.grows());
    tracer.hold(&[Target { pid: process.pid(), keep: Keep::None }]).unwrap();
    tracer.settle().unwrap();
    assert!(process.stands());
    tracer.release();
    assert!(process.grows());
}

#[test]
fn a_dead_tracer_lets_go() {
    let process = Counting::start();
    let mut tracer = tracer();
    tracer.hold(&[Target { pid: process.pid(), keep: Keep::None }]).unwrap();
    tracer.settle().unwrap();
    let pid = nix::unistd::Pid::from_raw(tracer.tracer().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(process.grows());
    assert!(tracer.settle().is_err());
}

#[test]
fn a_held_process_can_be_killed_and_is_no_error() {
    let mut process = Counting::start();
    let mut tracer = tracer();
    let target = [Target { pid: process.pid(), keep: Keep::None }];
    tracer.hold(&target).unwrap();
    tracer.settle().unwrap();
    process.child.kill().unwrap();
    process.child.wait().unwrap();
    tracer.hold(&target).unwrap();
    tracer.settle().unwrap();
    tracer.hold(&[]).unwrap();
}

#[test]
fn a_pending_signal_is_not_lost() {
    // The trap writes a word; the signal arrives while the process is held.
    let file = tempfile::NamedTempFile::new().unwrap();
    let script =
        format!("trap 'echo caught >> {}; exit' USR1; while :; do :; done", file.path().display());
    let mut child = std::process::Command::new("sh").args(["-c", &script]).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let mut tracer = tracer();
    tracer.hold(&[Target { pid, keep: Keep::None }]).unwrap();
    tracer.settle().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGUSR1)
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(file.path().metadata().unwrap().len(), 0);
    tracer.release();
    child.wait().unwrap();
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "caught\n");
}

#[test]
fn what_another_traces_is_named() {
    let process = Counting::start();
    let mut first = tracer();
    let target = [Target { pid: process.pid(), keep: Keep::None }];
    first.hold(&target).unwrap();
    let error = tracer().hold(&target).unwrap_err().to_string();
    assert!(error.contains(&format!("traced by pid {}", first.tracer().unwrap())), "{error}");
}

#[test]
fn what_was_frozen_is_frozen_again_when_the_client_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let freeze = directory.path().join("cgroup.freeze");
    std::fs::write(directory.path().join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
    let cgroup = Cgroup { version: CgroupVersion::V2, directory: directory.path().to_owned() };
    let tracer =
        || Tracer::new(Program::at(env!("CARGO_BIN_EXE_stasis-runc")), Some(cgroup.clone()));
    let process = Counting::start();
    let target = [Target { pid: process.pid(), keep: Keep::None }];

    // Held while it was frozen, thawed, and lost in the middle.
    std::fs::write(&freeze, "1").unwrap();
    let mut lost = tracer();
    lost.hold(&target).unwrap();
    std::fs::write(&freeze, "0").unwrap();
    lost.settle().unwrap();
    drop(lost);
    for _ in 0..500 {
        if std::fs::read_to_string(&freeze).unwrap() == "1" {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(std::fs::read_to_string(&freeze).unwrap(), "1");

    // Released in order, or never frozen: nothing is frozen.
    for frozen in ["0", "1"] {
        std::fs::write(&freeze, frozen).unwrap();
        let mut kept = tracer();
        kept.hold(&target).unwrap();
        std::fs::write(&freeze, "0").unwrap();
        kept.settle().unwrap();
        if frozen == "1" {
            kept.release();
        }
        drop(kept);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(std::fs::read_to_string(&freeze).unwrap(), "0");
    }
}

#[test]
fn a_guided_process_runs_to_what_would_be_seen_and_no_further() {
    let file = tempfile::NamedTempFile::new().unwrap();
    // Forks nothing: builtins only. It sleeps by waiting for a pipe that says nothing.
    let script = format!("i=0; while :; do i=$((i+1)); echo $i; done >>{}", file.path().display());
    let mut child = std::process::Command::new("sh").args(["-c", &script]).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let length = || file.path().metadata().unwrap().len();
    while length() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    for round in 0..20 {
        let mut tracer = tracer();
        let target = |keep| [Target { pid, keep }];
        tracer.hold(&target(Keep::None)).unwrap();
        tracer.settle().unwrap();
        let before = length();
        // No thread of it is the driver's.
        tracer.hold(&target(Keep::InsideCalls(0))).unwrap();
        std::thread::sleep(Duration::from_millis(round));
        assert_eq!(length(), before, "a guided process wrote");
        tracer.hold(&target(Keep::None)).unwrap();
        tracer.settle().unwrap();
        assert_eq!(length(), before, "a held process wrote");
        if round % 2 == 0 {
            tracer.release();
        } else {
            // As when it is killed.
            drop(tracer);
        }
        for _ in 0..500 {
            if length() > before {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(length() > before, "it does not run on");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // No line was lost or written twice.
    let text = std::fs::read_to_string(file.path()).unwrap();
    for (line, number) in text.lines().zip(1..) {
        assert_eq!(line, number.to_string());
    }
}

#[test]
fn waiting_is_not_cut_short_by_a_hold() {
    // `read -t` of a shell waits in poll or select; a sleep that ends early would show.
    let mut child = std::process::Command::new("sleep").arg("1").spawn().unwrap();
    let begun = std::time::Instant::now();
    let pid = i32::try_from(child.id()).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    for keep in [Keep::None, Keep::InsideCalls(0), Keep::None, Keep::InsideCalls(0)] {
        let mut tracer = tracer();
        tracer.hold(&[Target { pid, keep: Keep::None }]).unwrap();
        tracer.settle().unwrap();
        tracer.hold(&[Target { pid, keep }]).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        tracer.hold(&[Target { pid, keep: Keep::None }]).unwrap();
        tracer.settle().unwrap();
        tracer.release();
    }
    assert!(child.wait().unwrap().success());
    assert!(begun.elapsed() >= Duration::from_millis(990), "{:?}", begun.elapsed());
}
