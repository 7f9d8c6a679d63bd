//! The checkpoint API against running targets.
//!
//! With `TEST_DRIVER=/path/of/libcuda.so.1` they run on the real driver, without
//! what only an emulated machine can show.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use common::{Machine, PATIENCE, Process, SILENCE, emulated, holds_device, play_role};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

#[test]
fn role() {
    play_role();
}

fn cycle(pid: i32) -> String {
    format!("lock {pid} 5000\ncheckpoint {pid}\nrestore {pid}\nunlock {pid}")
}

fn holds_nothing(machine: &Machine, target: &Process) {
    assert!(!holds_device(target.pid));
    let fds = fs::read_dir(format!("/proc/{}/fd", target.pid)).unwrap().flatten();
    let mut fds = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
    assert!(!fds.any(|path| path.starts_with(machine.store())));
    let maps = fs::read_to_string(format!("/proc/{}/maps", target.pid)).unwrap();
    assert!(!maps.contains(machine.store().to_str().unwrap()) && !maps.contains("/dev/nvidia"));
    let library = common::driver().canonicalize().unwrap();
    assert!(maps.contains(library.to_str().unwrap()), "the library stays mapped");
}

#[test]
fn a_cycle_keeps_memory_and_counter() {
    let machine = Machine::with("reserve-bytes=1048576\n");
    let mut target = machine.target();
    let pid = target.pid;
    assert_eq!(target.tell("increment"), "101");
    assert!(holds_device(pid));
    for round in 1..=3 {
        assert_eq!(machine.state(&target), 0);
        assert_eq!(machine.ask(&format!("lock {pid} 5000")), [0]);
        assert_eq!(machine.state(&target), 1);
        assert_eq!(machine.ask(&format!("checkpoint {pid}")), [0]);
        assert_eq!(machine.state(&target), 2);
        holds_nothing(&machine, &target);
        assert!(machine.files("mem-").is_empty() && machine.files("alive").is_empty());
        assert_eq!(machine.ask(&format!("restore {pid}")), [0]);
        assert_eq!(machine.state(&target), 1);
        assert_eq!(machine.ask(&format!("unlock {pid}")), [0]);
        assert_eq!(machine.state(&target), 0);
        assert_eq!(target.tell("verify"), "0");
        assert_eq!(target.tell("increment"), (101 + round).to_string());
        assert!(holds_device(pid));
    }
    assert!(machine.files("req").is_empty() && machine.files("rep-").is_empty());
}

#[test]
fn verify_sees_a_changed_word() {
    let machine = Machine::new();
    let mut target = machine.target();
    assert_eq!(target.tell("damage"), "0");
    assert_eq!(target.tell("verify"), "1");
}

#[test]
fn the_restore_thread_is_one_of_the_drivers() {
    let machine = Machine::new();
    let target = machine.target();
    let tid = machine.ask(&format!("tid-value {}", target.pid))[0];
    let comm = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", target.pid)).unwrap();
    assert!(comm.starts_with("cuda") && comm.trim_end() != "cuda-EvtHandlr", "{comm}");
    assert!(target.thread("cuda-EvtHandlr").is_some());
}

#[test]
fn a_lock_waits_for_work_in_flight() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    assert_eq!(target.tell("spin 3000"), "0");
    let began = Instant::now();
    assert_eq!(machine.ask(&format!("lock {pid} 500\nstate-value {pid}")), [600, 0]);
    assert!(began.elapsed() >= Duration::from_millis(500));
    assert!(began.elapsed() < Duration::from_millis(2500), "the timeout counts, not the kernel");
    assert_eq!(machine.ask(&format!("lock {pid} 20000\nstate-value {pid}")), [0, 1]);
    assert!(began.elapsed() >= Duration::from_millis(2500));
}

#[test]
fn a_lock_waits_for_a_synchronising_call() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    target.tell("spin 1500");
    target.send("synchronize");
    assert_eq!(machine.ask(&format!("lock {pid} 200")), [600]);
    assert_eq!(machine.ask(&format!("lock {pid} 0")), [0]);
    assert_eq!(target.line(), "0", "the call ended before the lock was given");
}

#[test]
fn calls_wait_while_locked() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    machine.ask(&format!("lock {pid} 5000\ncheckpoint {pid}"));
    target.send("increment");
    assert_eq!(target.line_within(SILENCE), None);
    machine.ask(&format!("restore {pid}"));
    assert_eq!(target.line_within(SILENCE), None);
    machine.ask(&format!("unlock {pid}"));
    assert_eq!(target.line(), "101");
}

#[test]
fn steps_out_of_order_are_illegal() {
    let machine = Machine::new();
    let target = machine.target();
    let pid = target.pid;
    let ask = |call: &str| machine.ask(&format!("{call} {pid} 1000"))[0];
    assert_eq!([ask("checkpoint"), ask("unlock")], [401, 401]);
    assert_eq!(machine.ask(&format!("restore {pid}")), [401]);
    assert_eq!(ask("lock"), 0);
    assert_eq!(ask("lock"), 401);
    assert_eq!(machine.ask(&format!("restore {pid}")), [401]);
    assert_eq!(ask("checkpoint"), 0);
    assert_eq!([ask("lock"), ask("checkpoint"), ask("unlock")], [401, 401, 401]);
    assert_eq!(machine.state(&target), 2);
}

#[test]
fn two_processes_are_independent() {
    let machine = Machine::new();
    let (mut one, mut two) = (machine.target(), machine.target());
    machine.ask(&format!("lock {} 1000\ncheckpoint {}", one.pid, one.pid));
    assert_eq!(machine.state(&two), 0);
    assert_eq!(two.tell("increment"), "101");
    assert_eq!(machine.ask(&cycle(two.pid)), [0, 0, 0, 0]);
    machine.ask(&format!("restore {}\nunlock {}", one.pid, one.pid));
    assert_eq!(one.tell("increment"), "101");
    assert_eq!(one.tell("verify"), "0");
    assert_eq!(two.tell("verify"), "0");
}

#[test]
fn a_process_without_cuda_is_not_initialised() {
    let machine = Machine::new();
    let mut sleep = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let pid = sleep.id();
    let script = format!("tid {pid}\nstate {pid}\nlock {pid} 100");
    assert_eq!(machine.ask(&script), [3, 3, 3]);
    sleep.kill().unwrap();
    sleep.wait().unwrap();
    let script = format!("tid {pid}\nstate {pid}\nlock {pid} 100\nrestore {pid}");
    assert_eq!(machine.ask(&script), [304, 304, 304, 304]);
}

#[test]
fn without_init_nothing_answers() {
    // A later try on the real driver: get-state answered without cuInit. The engine never asks so.
    if !emulated() {
        return;
    }
    let machine = Machine::new();
    let target = machine.target();
    assert_eq!(machine.ask(&format!("raw-state {}", target.pid)), [3]);
}

#[test]
fn a_process_is_cudas_from_init_on() {
    let machine = Machine::new();
    let mut process = machine.caller("init\nstay");
    assert_eq!(process.line(), "0");
    assert!(process.thread("cuda-EvtHandlr").is_none());
    let pid = process.pid;
    let script = format!("tid {pid}\nlock {pid} 1000\ncheckpoint {pid}\nstate-value {pid}");
    assert_eq!(machine.ask(&script), [0, 0, 0, 2]);
    holds_nothing(&machine, &process);
    assert_eq!(machine.ask(&format!("restore {pid}\nunlock {pid}")), [0, 0]);
    assert!(holds_device(pid));
}

#[test]
fn a_fork_has_no_restore_thread() {
    let machine = Machine::new();
    let mut target = machine.target();
    target.send("fork");
    let (one, two) = (target.line(), target.line());
    let child = if one.starts_with("CUDA") { &two } else { &one };
    assert!([&one, &two].iter().any(|line| line.ends_with(" 3")), "{one} {two}");
    assert_eq!(machine.ask(&format!("tid {child}\nstate {child}")), [3, 3]);
    assert!(holds_device(child), "it inherits the device");
    // The parent can still be checkpointed.
    assert_eq!(machine.ask(&cycle(target.pid)), [0, 0, 0, 0]);
    assert_eq!(target.tell("verify"), "0");
}

#[test]
fn managed_memory_refuses_the_checkpoint() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    let address = target.tell("managed");
    let script = format!("lock {pid} 1000\ncheckpoint {pid}\nstate-value {pid}\nunlock {pid}");
    assert_eq!(machine.ask(&script), [0, 801, 1, 0]);
    assert_eq!(target.tell("increment"), "101");
    assert_eq!(target.tell(&format!("free {address}")), "0");
    // As on the real driver: freed too late for this process.
    assert_eq!(machine.ask(&cycle(pid)), [0, 999, 401, 0]);
    assert_eq!(target.tell("increment"), "102");
}

#[test]
fn memory_is_shared_and_comes_back_from_the_dead() {
    if !emulated() {
        return;
    }
    let machine = Machine::with("memory=16777216\n");
    let (mut one, mut two) = (machine.target(), machine.target());
    let free: u64 = one.tell("free-bytes").parse().unwrap();
    assert_eq!(free, (16 << 20) - 2 * ((4 << 20) + 8));
    assert_eq!(two.tell("allocate 9000000"), "CUDA cuMemAlloc 2");
    one.kill();
    assert!(!two.tell("allocate 9000000").starts_with("CUDA"));
}

#[test]
fn a_restore_without_room_is_final() {
    if !emulated() {
        return;
    }
    let machine = Machine::with("memory=16777216\n");
    let (one, mut two) = (machine.target(), machine.target());
    machine.ask(&format!("lock {} 1000\ncheckpoint {}", one.pid, one.pid));
    let address = two.tell("allocate 9000000");
    let script = format!("restore {0}\nstate-value {0}\nrestore {0}\nunlock {0}", one.pid);
    assert_eq!(machine.ask(&script), [2, 2, 304, 401]);
    holds_nothing(&machine, &one);
    assert_eq!(two.tell(&format!("free {address}")), "0");
    assert_eq!(machine.ask(&format!("restore {0}\nstate-value {0}", one.pid)), [304, 2]);
}

#[test]
fn a_map_moves_memory_to_another_gpu() {
    if !emulated() {
        return;
    }
    let machine = Machine::with("gpus=2\n");
    let mut target = machine.target();
    let pid = target.pid;
    assert_eq!(target.tell("increment"), "101");
    assert!(machine.files("mem-1-").is_empty());
    let script = format!(
        "lock {pid} 1000\ncheckpoint {pid}\nrestore {pid} 0=1\nrestore {pid} 0=7 1=0\n\
         state-value {pid}\nrestore {pid} 0=1 1=0\nunlock {pid}"
    );
    assert_eq!(machine.ask(&script), [0, 0, 1, 1, 2, 0, 0]);
    assert!(machine.files("mem-0-").is_empty());
    assert_eq!(machine.files("mem-1-").len(), 3);
    assert_eq!(target.tell("verify"), "0");
    assert_eq!(target.tell("increment"), "102");
}

#[test]
fn a_map_needs_the_node_of_the_new_gpu() {
    if !emulated() {
        return;
    }
    let machine = Machine::with_nodes("gpus=2\n", 1);
    let mut target = machine.target();
    let pid = target.pid;
    let state = format!("lock {pid} 1000\ncheckpoint {pid}\nrestore {pid} 0=1\nstate-value {pid}");
    assert_eq!(machine.ask(&state), [0, 0, 1, 2]);
    // There, and not to be opened: as a device that its cgroup does not allow.
    fs::create_dir(machine.node(1)).unwrap();
    assert_eq!(machine.ask(&format!("restore {pid} 0=1\nstate-value {pid}")), [1, 2]);
    fs::remove_dir(machine.node(1)).unwrap();
    fs::File::create(machine.node(1)).unwrap();
    // It names what the process had; what is there now does not count.
    assert_eq!(machine.ask(&format!("restore {pid} 0=1\nunlock {pid}")), [0, 0]);
    assert_eq!(target.tell("verify"), "0");
    assert_eq!(target.tell("increment"), "101");
    let (old, new) = (machine.nvml_of(0), machine.nvml_of(1));
    let used = (4 << 20) + 8;
    assert_eq!(old[7..], ["0", "0"]);
    assert_eq!(new[7..], [used.to_string(), used.to_string(), format!("{pid} Used({used})")]);
    // And back, while the new one's node is gone.
    machine.ask(&format!("lock {pid} 1000\ncheckpoint {pid}"));
    fs::remove_file(machine.node(1)).unwrap();
    let script = format!("restore {pid}\nrestore {pid} 0=0\nrestore {pid} 1=0\nunlock {pid}");
    assert_eq!(machine.ask(&script), [1, 1, 0, 0]);
    assert_eq!(target.tell("increment"), "102");
}

#[test]
fn a_map_stays_on_one_kind_of_chip() {
    if !emulated() {
        return;
    }
    let machine = Machine::with_nodes("gpus=3\nnames=A,B,A\n", 1);
    let mut target = machine.target();
    let pid = target.pid;
    machine.ask(&format!("lock {pid} 1000\ncheckpoint {pid}"));
    for gpu in [1, 2] {
        fs::File::create(machine.node(gpu)).unwrap();
    }
    let script = format!("restore {pid} 0=1\nstate-value {pid}\nrestore {pid} 0=2\nunlock {pid}");
    assert_eq!(machine.ask(&script), [1, 2, 0, 0]);
    assert_eq!(target.tell("verify"), "0");
}

#[test]
fn a_map_onto_a_full_gpu_is_final() {
    if !emulated() {
        return;
    }
    let machine = Machine::with_nodes("gpus=2\nmemory=8388608\n", 1);
    let one = machine.target();
    let pid = one.pid;
    machine.ask(&format!("lock {pid} 1000\ncheckpoint {pid}"));
    fs::rename(machine.node(0), machine.node(1)).unwrap();
    let mut two = machine.target();
    fs::File::create(machine.node(0)).unwrap();
    assert_eq!(two.tell("increment"), "101");
    assert_eq!(machine.files("mem-1-").len(), 3, "the second is on the other GPU");
    let script = format!("restore {pid} 0=1\nstate-value {pid}\nrestore {pid}\nrestore {pid} 0=0");
    assert_eq!(machine.ask(&script), [2, 2, 304, 304]);
    assert_eq!(two.tell("verify"), "0");
}

#[test]
fn a_map_needs_driver_580() {
    if !emulated() {
        return;
    }
    for (driver, code) in [("570.86.10", 1), ("580.65.06", 0)] {
        let machine = Machine::with(&format!("gpus=2\ndriver={driver}\n"));
        let mut target = machine.target();
        let pid = target.pid;
        let script = format!("lock {pid} 1000\ncheckpoint {pid}\nrestore {pid} 0=1 1=0");
        assert_eq!(machine.ask(&script), [0, 0, code], "{driver}");
        assert_eq!(machine.ask(&format!("restore {pid}")), [if code == 0 { 401 } else { 0 }]);
        assert_eq!(machine.ask(&format!("unlock {pid}")), [0]);
        assert_eq!(target.tell("verify"), "0");
    }
}

#[test]
fn other_gpus_need_a_map() {
    if !emulated() {
        return;
    }
    let machine = Machine::new();
    let target = machine.target();
    let pid = target.pid;
    machine.ask(&format!("lock {pid} 1000\ncheckpoint {pid}"));
    fs::write(machine.store().join("config"), "uuid-seed=5\n").unwrap();
    assert_eq!(machine.ask(&format!("restore {pid}\nstate-value {pid}")), [1, 2]);
}

#[test]
fn a_killed_caller_does_not_stop_the_work() {
    // 4 MiB at this speed take two seconds.
    let machine = Machine::with("copy-bytes-per-second=2000000\n");
    let mut target = machine.target();
    let pid = target.pid;
    assert_eq!(machine.ask(&format!("lock {pid} 1000")), [0]);
    for (call, state) in [("checkpoint", 2), ("restore", 1)] {
        let mut caller = machine.caller(&format!("{call} {pid}"));
        if emulated() {
            assert_eq!(caller.line_within(SILENCE), None);
        } else {
            // The real driver takes a second for the first, and less for the second.
            thread::sleep(Duration::from_millis(150));
        }
        caller.kill();
        let began = Instant::now();
        assert_eq!(machine.state(&target), state);
        let waited = began.elapsed() > Duration::from_millis(200);
        assert!(waited || !emulated(), "get-state waits for the work");
        assert_eq!(machine.ask(&format!("{call} {pid}")), [401], "it is not done twice");
    }
    machine.ask(&format!("unlock {pid}"));
    assert_eq!(target.tell("verify"), "0");
}

#[test]
fn a_target_that_dies_ends_the_call() {
    let machine = Machine::new();
    let mut target = machine.target();
    target.tell("spin 60000");
    let mut caller = machine.caller(&format!("lock {} 0", target.pid));
    assert_eq!(caller.line_within(SILENCE), None);
    target.kill();
    assert_eq!(caller.line_within(PATIENCE).as_deref(), Some("304"));
}

/// A freezer of cgroup v1 with one process in it.
struct Freezer(PathBuf);

impl Freezer {
    /// None where the hierarchy is not there or not ours.
    fn around(target: &Process) -> Option<Self> {
        let path = PathBuf::from(format!("/sys/fs/cgroup/freezer/emulated-gpu-{}", target.pid));
        fs::create_dir(&path).ok()?;
        fs::write(path.join("cgroup.procs"), target.pid.to_string()).ok()?;
        Some(Self(path))
    }

    fn set(&self, state: &str) {
        fs::write(self.0.join("freezer.state"), state).unwrap();
        while fs::read_to_string(self.0.join("freezer.state")).unwrap().trim() != state {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        let inside = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        let _ = fs::write("/sys/fs/cgroup/freezer/cgroup.procs", inside.trim());
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_frozen_target_answers_nothing() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    let Some(freezer) = Freezer::around(&target) else {
        eprintln!("skipped: no freezer of cgroup v1 to write to");
        return;
    };
    freezer.set("FROZEN");
    for call in ["state", "lock", "checkpoint"] {
        let mut caller = machine.caller(&format!("{call} {pid} 100"));
        assert_eq!(caller.line_within(SILENCE), None, "{call}");
        caller.kill();
    }
    assert_eq!(machine.ask(&format!("tid {pid}")), [0], "this one reads /proc alone");
    freezer.set("THAWED");
    assert_eq!(machine.state(&target), 0, "calls that were killed change nothing");
    assert_eq!(target.tell("increment"), "101");
    assert_eq!(machine.ask(&cycle(pid)), [0, 0, 0, 0]);
}

fn seize(tid: i32) {
    let tid = Pid::from_raw(tid);
    ptrace::seize(tid, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(tid).unwrap();
    waitpid(tid, Some(WaitPidFlag::__WALL)).unwrap();
}

fn release(tid: i32) {
    ptrace::detach(Pid::from_raw(tid), None).unwrap();
}

#[test]
fn a_lock_needs_both_driver_threads() {
    let machine = Machine::new();
    let target = machine.target();
    let pid = target.pid;
    let events = target.thread("cuda-EvtHandlr").unwrap();
    seize(events);
    let mut caller = machine.caller(&format!("lock {pid} 100"));
    assert_eq!(caller.line_within(SILENCE), None, "the timeout does not fire");
    release(events);
    assert_eq!(caller.line(), "0");
}

#[test]
fn other_threads_may_be_held() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    let events = target.thread("cuda-EvtHandlr").unwrap();
    let others = target.application_threads();
    others.iter().copied().for_each(seize);
    assert_eq!(machine.ask(&format!("lock {pid} 1000")), [0]);
    seize(events);
    let script = format!("checkpoint {pid}\nrestore {pid}\nunlock {pid}");
    assert_eq!(machine.ask(&script), [0, 0, 0]);
    release(events);
    others.iter().copied().for_each(release);
    assert_eq!(target.tell("increment"), "101");
}

#[test]
fn a_held_synchronising_call_is_not_ready() {
    // The real driver gives 600 or 0, by where the thread happens to be held.
    if !emulated() {
        return;
    }
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    target.tell("spin 300");
    target.send("synchronize");
    thread::sleep(Duration::from_millis(100));
    let others = target.application_threads();
    others.iter().copied().for_each(seize);
    assert_eq!(machine.ask(&format!("lock {pid} 800\nstate-value {pid}")), [600, 0]);
    others.iter().copied().for_each(release);
    assert_eq!(target.line(), "0");
    assert_eq!(machine.ask(&format!("lock {pid} 5000")), [0]);
}

#[test]
fn a_target_in_another_pid_namespace_is_found() {
    let machine = Machine::new();
    let mut outer =
        machine.target_through(&["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]);
    let children = format!("/proc/{0}/task/{0}/children", outer.pid);
    let pid: i32 = fs::read_to_string(children).unwrap().trim().parse().unwrap();
    assert_eq!(outer.tell("increment"), "101");
    assert_eq!(machine.ask(&cycle(pid)), [0, 0, 0, 0]);
    assert_eq!(outer.tell("verify"), "0");
    assert_eq!(outer.tell("increment"), "102");
}
