//! Jobs: what is in one comes back, and all that a job file must not be is refused.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{JOB, Machine, PATIENCE, Process, UTILITY, play_role};

#[test]
fn role() {
    play_role();
}

const DRIVER: &str = "driver=610.43.02\n";

/// A job of processes that share a segment of the first.
struct Group {
    machine: Machine,
    file: PathBuf,
    members: Vec<Process>,
    handle: String,
    count: u32,
}

impl Group {
    fn new(importers: usize) -> Self {
        Self::on(Machine::with(DRIVER), importers)
    }

    fn on(machine: Machine, importers: usize) -> Self {
        let file = machine.job_file("job");
        let mut exporter = machine.member(&file);
        let handle = exporter.tell("segment");
        let mut group = Self { machine, file, members: vec![exporter], handle, count: 100 };
        for _ in 0..importers {
            group.join();
        }
        group
    }

    /// One more, as `exec` would start it.
    fn join(&mut self) {
        let mut member = self.machine.member(&self.file);
        assert_eq!(member.tell(&format!("import {}", self.handle)), "0");
        self.members.push(member);
    }

    fn pid(&self, member: usize) -> i32 {
        self.members[member].pid
    }

    /// One call on the members in that order; the results.
    fn each(&self, call: &str, order: &[usize]) -> Vec<i32> {
        // A lock's timeout; what follows a restore's pid is a map.
        let rest = if call == "lock" { " 5000" } else { "" };
        let line = |member: &usize| format!("{call} {}{rest}", self.pid(*member));
        let script: Vec<_> = order.iter().map(line).collect();
        self.machine.ask_in(&self.file, &script.join("\n"))
    }

    /// Each call on all in that order, and all succeed.
    fn all(&self, calls: &[&str], order: &[usize]) {
        for call in calls {
            assert_eq!(self.each(call, order), vec![0; order.len()], "{call}");
        }
    }

    /// Everybody adds, and everybody sees what all have added.
    fn is_well(&mut self) {
        for member in &mut self.members {
            assert_eq!(member.tell("add"), "0");
            self.count += 1;
        }
        for member in &mut self.members {
            assert_eq!(member.tell("look"), self.count.to_string());
            assert_eq!(member.tell("verify"), "0");
        }
    }

    fn content(&self) -> Vec<u8> {
        fs::read(&self.file).unwrap()
    }

    /// The same file with another content, as a copy put there before a restore.
    fn put(&self, content: &[u8]) {
        fs::write(&self.file, content).unwrap();
    }

    fn states(&self) -> Vec<i32> {
        self.members.iter().map(|member| self.machine.state(member)).collect()
    }
}

fn open_files(process: &Process) -> Vec<PathBuf> {
    let fds = fs::read_dir(format!("/proc/{}/fd", process.pid)).unwrap().flatten();
    fds.filter_map(|fd| fs::read_link(fd.path()).ok()).collect()
}

#[test]
fn shared_memory_comes_back_three_times_in_any_order() {
    let mut group = Group::new(2);
    group.is_well();
    for order in [vec![0, 1, 2], vec![2, 0, 1, 3], vec![1, 2, 3, 4, 0]] {
        let before = group.content();
        group.all(&["lock"], &order);
        let mut contents = vec![before];
        for member in &order {
            group.all(&["checkpoint"], &[*member]);
            assert!(!contents.contains(&group.content()), "it changes at each checkpoint");
            contents.push(group.content());
        }
        for member in &group.members {
            let files = open_files(member);
            assert!(!files.iter().any(|file| file.starts_with(group.machine.store())));
            assert!(!files.contains(&group.file), "{files:?}");
        }
        assert_eq!(contents[0].len(), contents[1].len());
        group.all(&["restore", "unlock"], &order);
        group.is_well();
        group.join();
        group.is_well();
    }
}

#[test]
fn a_rollback_half_way_is_no_harm() {
    let mut group = Group::new(2);
    group.all(&["lock"], &[0, 1, 2]);
    group.all(&["checkpoint"], &[0, 1]);
    group.all(&["restore"], &[0, 1]);
    group.all(&["unlock"], &[0, 1, 2]);
    group.is_well();
    group.all(&["lock", "checkpoint", "restore", "unlock"], &[0, 1, 2]);
    group.is_well();
}

#[test]
fn a_checkpoint_that_is_refused_is_no_harm() {
    let mut group = Group::new(1);
    group.members[1].tell("managed");
    group.all(&["lock"], &[0, 1]);
    assert_eq!(group.each("checkpoint", &[0, 1]), [0, 801]);
    group.all(&["restore"], &[0]);
    group.all(&["unlock"], &[0, 1]);
    group.is_well();
}

#[test]
fn the_launched_and_what_they_start_share_a_memfd() {
    let machine = Machine::with(DRIVER);
    let through = [UTILITY, "--launch-job", "sh", "-c", "exec \"$@\"", "sh"];
    let mut one = machine.target_through(&through);
    let environ = fs::read(format!("/proc/{}/environ", one.pid)).unwrap();
    let environ = String::from_utf8(environ).unwrap();
    let variable = environ.split('\0').find_map(|line| line.strip_prefix(JOB)?.strip_prefix('='));
    let inherited = variable.unwrap().replace("self", &one.pid.to_string());
    let mut two = machine.member(Path::new(&inherited));
    let handle = one.tell("segment");
    assert_eq!(two.tell(&format!("import {handle}")), "0");

    let (a, b) = (one.pid, two.pid);
    let script = format!("lock {a} 0\nlock {b} 0\ncheckpoint {a}\ncheckpoint {b}");
    // The caller has a descriptor of its own.
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!(
        "exec 9<>{inherited}; export {JOB}=/proc/self/fd/9; \
         for a in lock checkpoint; do for p in {a} {b}; do \
         {UTILITY} --action $a --pid $p || exit; done; done"
    ));
    let utility = machine.utility(&[]);
    command.envs(utility.get_envs().filter_map(|(key, value)| Some((key, value?))));
    assert!(command.status().unwrap().success());
    assert_eq!(machine.ask_in(Path::new(&inherited), &script), [401; 4]);
    let memfd = |file: &PathBuf| file.to_string_lossy().starts_with("/memfd:");
    assert!(open_files(&one).iter().any(memfd), "it was inherited, not opened by the driver");
    assert!(!open_files(&two).iter().any(memfd));
    let script = format!("restore {a}\nrestore {b}\nunlock {a}\nunlock {b}");
    assert_eq!(machine.ask_in(Path::new(&inherited), &script), [0; 4]);
    assert_eq!([two.tell("add"), one.tell("look")], ["0", "101"]);
}

#[test]
fn callers_are_of_the_job() {
    let group = Group::new(0);
    let pid = group.pid(0);
    let machine = &group.machine;
    let copy = machine.job_file("other");
    fs::copy(&group.file, &copy).unwrap();
    let outside = |call: &str| {
        let rest = if call == "lock" { " 5000" } else { "" };
        let line = format!("{call} {pid}{rest}");
        [machine.ask(&line)[0], machine.ask_in(&copy, &line)[0]]
    };
    assert_eq!(outside("lock"), [1, 1]);
    assert_eq!(machine.ask(&format!("state-value {pid}\ntid {pid}")), [0, 0]);
    group.all(&["lock"], &[0]);
    assert_eq!([outside("checkpoint"), outside("unlock")], [[1, 1], [1, 1]]);
    assert_eq!(group.states(), [1]);
    group.all(&["checkpoint"], &[0]);
    assert_eq!([outside("restore"), outside("unlock")], [[1, 1], [1, 1]]);
    assert_eq!(group.states(), [2]);
    group.all(&["restore"], &[0]);
    assert_eq!(outside("unlock"), [1, 1]);
    group.all(&["unlock"], &[0]);

    // A process that is in no job does not ask.
    let lone = machine.target();
    let script = format!("lock {0} 0\ncheckpoint {0}\nrestore {0}\nunlock {0}", lone.pid);
    assert_eq!(machine.ask_in(&group.file, &script), [0; 4]);
}

#[test]
fn init_refuses_what_is_no_job_file() {
    let machine = Machine::with(DRIVER);
    let good = machine.job_file("good");
    let content = fs::read(&good).unwrap();
    let place = |name: &str| good.with_file_name(name);
    fs::write(place("empty"), "").unwrap();
    fs::write(place("short"), &content[..content.len() - 1]).unwrap();
    fs::write(place("zeros"), vec![0; content.len()]).unwrap();
    fs::create_dir(place("directory")).unwrap();
    nix::unistd::mkfifo(&place("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let other = Machine::with(DRIVER);
    let elsewhere = other.job_file("elsewhere");
    let cases = [
        (good.clone(), 0),
        (place("empty"), 1),
        (place("short"), 1),
        (place("zeros"), 1),
        (place("fifo"), 1),
        (elsewhere.clone(), 1),
        (place("directory"), 304),
        (place("missing"), 304),
    ];
    for (path, code) in &cases {
        assert_eq!(machine.ask_in(path, "init"), [*code], "{}", path.display());
    }
    // A job that has been checkpointed may have moved here.
    let member = other.member(&elsewhere);
    let pid = member.pid;
    assert_eq!(other.ask_in(&elsewhere, &format!("lock {pid} 0\ncheckpoint {pid}")), [0, 0]);
    assert_eq!(machine.ask_in(&elsewhere, "init"), [0]);
    fs::write(machine.store().join("config"), "cuinit-ms=0\ndriver=580.1\n").unwrap();
    for (path, _) in &cases {
        assert_eq!(machine.ask_in(path, "init"), [0], "580 knows no jobs");
    }
}

#[test]
fn a_restore_needs_the_right_file() {
    let mut group = Group::new(1);
    let fresh = group.content();
    group.all(&["lock"], &[0, 1]);
    group.all(&["checkpoint"], &[0]);
    let early = group.content();
    group.all(&["checkpoint"], &[1]);
    let saved = group.content();
    let refused = |content: &[u8], members: &[usize], code| {
        group.put(content);
        assert_eq!(group.each("restore", members), vec![code; members.len()]);
        assert_eq!(group.states(), [2, 2]);
    };
    let foreign = fs::read(group.machine.job_file("foreign")).unwrap();
    refused(&fresh, &[0, 1], 1);
    refused(&early, &[1], 1);
    refused(&foreign, &[0, 1], 1);
    // Out of order.
    refused(&saved, &[1], 1);
    // Cut off only after the caller has opened it: cuInit would refuse it.
    group.put(&saved);
    let mut caller = group.machine.caller_in(
        &group.file,
        &format!("init\nwait\nrestore {}\nrestore {}", group.pid(0), group.pid(1)),
    );
    assert_eq!(caller.line(), "0");
    group.put(&saved[..100]);
    caller.send("on");
    assert_eq!([caller.line(), caller.line()], ["304", "304"]);
    assert_eq!(group.states(), [2, 2]);
    fs::rename(&group.file, group.file.with_file_name("moved")).unwrap();
    group.put(&saved);
    group.all(&["restore", "unlock"], &[0, 1]);
    group.is_well();

    // The next checkpoint is not in that copy, nor in what was used for the restore.
    let used = group.content();
    group.all(&["lock", "checkpoint"], &[0, 1]);
    let live = group.content();
    for old in [&saved, &used] {
        group.put(old);
        assert_eq!(group.each("restore", &[0, 1]), [1, 1]);
    }
    group.put(&live);
    group.all(&["restore", "unlock"], &[0, 1]);
    group.is_well();
}

#[test]
fn one_operation_at_a_time() {
    // 9 MiB at this speed take two seconds, also when the caller is gone.
    let group = Group::on(Machine::with(&format!("{DRIVER}copy-bytes-per-second=2500000\n")), 1);
    group.all(&["lock"], &[0, 1]);
    let mut caller = group.machine.caller_in(&group.file, &format!("checkpoint {}", group.pid(0)));
    assert_eq!(caller.line_within(Duration::from_millis(300)), None);
    assert_eq!(group.each("checkpoint", &[1]), [999]);
    caller.kill();
    assert_eq!(group.each("unlock", &[1]), [999]);
    assert_eq!(group.states(), [2, 1], "get-state waits for the work");
    group.all(&["unlock"], &[1]);
}

#[test]
fn a_lock_that_waits_is_an_operation() {
    let mut group = Group::new(1);
    group.members[0].tell("spin 1000");
    let mut caller = group.machine.caller_in(&group.file, &format!("lock {} 0", group.pid(0)));
    assert_eq!(caller.line_within(Duration::from_millis(300)), None);
    assert_eq!(group.each("lock", &[1]), [999]);
    assert_eq!(caller.line_within(PATIENCE).as_deref(), Some("0"));
    group.all(&["lock"], &[1]);
    group.all(&["unlock"], &[0, 1]);
    group.is_well();
}

#[test]
fn branch_590_loses_imports_in_a_job_too() {
    let group = Group::on(Machine::with("driver=590.44.01\n"), 1);
    group.all(&["lock", "checkpoint"], &[0, 1]);
    assert_eq!(group.each("restore", &[0, 1, 1]), [0, 1, 304]);
    assert_eq!(group.states(), [1, 2]);
}

#[test]
fn branch_580_ignores_the_variable() {
    let machine = Machine::with("driver=580.159.04\n");
    let target = machine.member(Path::new("/nowhere"));
    let script = format!("lock {0} 0\ncheckpoint {0}\nrestore {0}\nunlock {0}", target.pid);
    assert_eq!(machine.ask(&script), [0; 4]);
}
