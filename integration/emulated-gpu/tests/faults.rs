//! Each fault of `STORE/faults`.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Machine, SILENCE, holds_device, play_role};

#[test]
fn role() {
    play_role();
}

#[test]
fn an_error_leaves_the_target_alone() {
    let machine = Machine::new();
    let target = machine.target();
    let pid = target.pid;
    machine.faults("lock error:600 count=2 skip=1\n");
    let script = format!("lock {pid} 100\nunlock {pid}\nlock {pid} 100\nstate-value {pid}");
    assert_eq!(machine.ask(&script), [0, 0, 600, 0]);
    // The count is kept across callers.
    assert_eq!(machine.ask(&format!("lock {pid} 100\nlock {pid} 100")), [600, 0]);
}

#[test]
fn faults_are_for_their_call() {
    let machine = Machine::new();
    let pid = machine.target().pid;
    machine.faults("# only these\nprobe error:304\nstate error:909\n");
    assert_eq!(machine.ask(&format!("tid {pid}\nstate {pid}")), [304, 909]);
    machine.faults("init error:100\n");
    assert_eq!(machine.ask("init"), [100]);
    machine.faults("any error:3 skip=1\n");
    assert_eq!(machine.ask(&format!("init\ntid {pid}")), [0, 3]);
    machine.faults("lock sometimes\n");
    assert_eq!(machine.ask("init"), [999], "what cannot be read is not passed over");
}

#[test]
fn success_that_did_nothing() {
    let machine = Machine::new();
    let target = machine.target();
    let pid = target.pid;
    machine.faults("lock error:0\n");
    assert_eq!(machine.ask(&format!("lock {pid} 100\nstate-value {pid}")), [0, 0]);
}

#[test]
fn a_hang_does_not_touch_the_target() {
    let machine = Machine::new();
    let mut target = machine.target();
    machine.faults("lock hang count=1\n");
    let mut caller = machine.caller(&format!("lock {} 100", target.pid));
    assert_eq!(caller.line_within(SILENCE), None);
    caller.kill();
    assert_eq!(machine.state(&target), 0);
    assert_eq!(target.tell("increment"), "101");
}

#[test]
fn a_hang_after_has_done_the_work() {
    let machine = Machine::new();
    let target = machine.target();
    machine.faults("lock hang-after count=1\n");
    let mut caller = machine.caller(&format!("lock {} 100", target.pid));
    assert_eq!(caller.line_within(SILENCE), None);
    caller.kill();
    assert_eq!(machine.state(&target), 1);
}

#[test]
fn a_crash_ends_the_caller() {
    let machine = Machine::new();
    let target = machine.target();
    machine.faults("checkpoint crash count=1\n");
    let pid = target.pid;
    let mut caller = machine.caller(&format!("lock {pid} 100\ncheckpoint {pid}"));
    assert_eq!(caller.line(), "0");
    assert!(caller.was_killed_by_itself());
    assert_eq!(machine.state(&target), 1);
}

#[test]
fn a_lie_is_told_once() {
    let machine = Machine::new();
    let target = machine.target();
    let pid = target.pid;
    machine.faults("checkpoint lie count=1\n");
    let script = format!("lock {pid} 100\ncheckpoint {pid}\nstate-value {pid}\nstate-value {pid}");
    assert_eq!(machine.ask(&script), [0, 0, 2, 1]);
    assert!(holds_device(pid));
    assert_eq!(machine.ask(&format!("unlock {pid}")), [0]);
}

#[test]
fn lost_memory_never_comes_back() {
    let machine = Machine::new();
    let target = machine.target();
    let pid = target.pid;
    machine.faults("restore lost count=1\n");
    let script = format!(
        "lock {pid} 100\ncheckpoint {pid}\nrestore {pid}\nrestore {pid}\nstate-value {pid}\n\
         unlock {pid}\nrestore {pid}"
    );
    assert_eq!(machine.ask(&script), [0, 0, 1, 304, 2, 401, 304]);
}
