//! The command `cuda-checkpoint`.

#![allow(clippy::unwrap_used)]

mod common;

use common::{JOB, Machine, SILENCE, UTILITY, holds_device, play_role};

#[test]
fn role() {
    play_role();
}

/// Exit status, stdout and stderr, the last two without the final newline.
fn run(machine: &Machine, line: &str) -> (i32, String, String) {
    let arguments: Vec<_> = line.split_whitespace().collect();
    let output = machine.utility(&arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().trim_end().to_owned();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn said(text: &str) -> (i32, String, String) {
    (0, text.to_owned(), String::new())
}

#[test]
fn one_step_after_the_other() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    let tid = machine.ask(&format!("tid-value {pid}"))[0];
    assert_eq!(run(&machine, &format!("--get-restore-tid --pid {pid}")), said(&tid.to_string()));
    let steps = [
        ("lock", "locked"),
        ("checkpoint", "checkpointed"),
        ("restore", "locked"),
        ("unlock", "running"),
    ];
    for (step, state) in steps {
        assert_eq!(run(&machine, &format!("--action {step} -p {pid}")), said(""));
        assert_eq!(run(&machine, &format!("--get-state -p {pid}")), said(state));
    }
    assert_eq!(target.tell("verify"), "0");
}

/// A failure with these words, and nothing else.
fn failed(text: String) -> (i32, String, String) {
    (1, String::new(), text)
}

const ILLEGAL: &str = "\"the operation cannot be performed in the present state\"";

#[test]
fn toggle_goes_both_ways() {
    for driver in ["550.54.15", "555.42.02", "570.86.10", "580.159.04", "610.43.02"] {
        let machine = Machine::driver(driver);
        let mut target = machine.target();
        let toggle = format!("--toggle --pid {}", target.pid);
        for count in 101..103 {
            assert_eq!(run(&machine, &toggle), said(""), "{driver}");
            assert_eq!(machine.state(&target), 2);
            assert!(machine.files("mem-").is_empty() && !holds_device(target.pid));
            target.send("increment");
            assert_eq!(target.line_within(SILENCE), None);
            assert_eq!(run(&machine, &toggle), said(""), "{driver}");
            assert_eq!(target.line(), count.to_string());
            assert_eq!(machine.state(&target), 0);
        }
        assert_eq!(target.tell("verify"), "0");
    }
}

#[test]
fn a_refused_toggle_leaves_the_process_locked() {
    for driver in ["550.54.15", "580.159.04"] {
        let machine = Machine::driver(driver);
        let mut target = machine.target();
        let pid = target.pid;
        target.tell("managed");
        let toggle = format!("--toggle --pid {pid}");
        let error =
            |words: &str| failed(format!("Error toggling CUDA in process ID {pid}: {words}"));
        assert_eq!(run(&machine, &toggle), error("\"operation not supported\""), "{driver}");
        assert_eq!(machine.state(&target), 1);
        assert_eq!(run(&machine, &toggle), error(ILLEGAL));
        assert_eq!(machine.state(&target), 1);
        assert_eq!(machine.ask(&format!("unlock {pid}")), [0]);
        assert_eq!(target.tell("increment"), "101");
    }
}

#[test]
fn a_toggle_waits_for_work_without_limit() {
    let machine = Machine::new();
    let mut target = machine.target();
    target.tell("spin 2000");
    let began = std::time::Instant::now();
    assert_eq!(run(&machine, &format!("--toggle --pid {}", target.pid)), said(""));
    assert!(began.elapsed() >= std::time::Duration::from_millis(1500));
    assert_eq!(machine.state(&target), 2);
}

#[test]
fn a_map_is_for_a_restore() {
    let machine = Machine::with("gpus=2\n");
    let mut target = machine.target();
    let pid = target.pid;
    let uuid = |index: u32| format!("GPU-e05e1a7e-0000-0000-0000-{index:012}");
    let map = format!("{0}={1},{1}={0}", uuid(0), uuid(1));
    // Nonsense, which a toggle does not look at.
    for _ in 0..2 {
        let line = format!("--toggle --pid {pid} --device-map {}={}", uuid(7), uuid(8));
        assert_eq!(run(&machine, &line), said(""));
    }
    assert_eq!(machine.files("mem-0-").len(), 3);
    assert_eq!(run(&machine, &format!("--toggle --pid {pid}")), said(""));
    for wrong in ["0=1", &format!("{}={}", uuid(0), uuid(1))] {
        let line = format!("--action restore --pid {pid} --device-map {wrong}");
        let text = format!("Could not restore on process ID {pid}: \"invalid argument\"");
        assert_eq!(run(&machine, &line), failed(text));
    }
    assert_eq!(run(&machine, &format!("--action restore --pid {pid} -d {map}")), said(""));
    assert_eq!(run(&machine, &format!("--action unlock --pid {pid}")), said(""));
    assert_eq!(machine.files("mem-1-").len(), 3);
    assert_eq!(target.tell("verify"), "0");
}

#[test]
fn errors_have_the_words_of_the_real_one() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    let tried = |line: &str| run(&machine, line);
    let own = std::process::id();
    let not_cuda = "\"initialization error\"";
    let gone = "\"OS call failed or operation not supported on this OS\"";
    let of = |pid: u32, words: &str| {
        [
            ("--get-state", format!("Error getting process state for process ID {pid}: {words}")),
            ("--toggle", format!("Error toggling CUDA in process ID {pid}: {words}")),
            ("--action lock", format!("Could not lock on process ID {pid}: {words}")),
            ("--action unlock", format!("Could not unlock on process ID {pid}: {words}")),
            ("--get-restore-tid", format!("Could not find restore thread for process ID {pid}")),
        ]
    };
    for (line, text) in of(own, not_cuda) {
        assert_eq!(tried(&format!("{line} --pid {own}")), failed(text));
    }
    let text =
        |step: &str, words: &str| failed(format!("Could not {step} on process ID {pid}: {words}"));
    for step in ["checkpoint", "restore", "unlock"] {
        assert_eq!(tried(&format!("--action {step} --pid {pid}")), text(step, ILLEGAL));
    }
    target.tell("spin 1500");
    let line = format!("--action lock --pid {pid} --timeout 100");
    assert_eq!(tried(&line), text("lock", "\"device not ready\""));
    assert_eq!(tried(&format!("--get-state --pid {pid}")), said("running"));
    target.tell("synchronize");
    machine.faults("restore error:1\n");
    let line = format!("--action restore --pid {pid}");
    assert_eq!(tried(&line), text("restore", "\"invalid argument\""));
    target.kill();
    for (line, text) in of(pid.cast_unsigned(), gone) {
        assert_eq!(tried(&format!("{line} --pid {pid}")), failed(text));
    }
}

#[test]
fn wrong_usage_is_answered_with_the_usage() {
    const INVALID: &str = "Invalid option(s) or option(s) not supported by this CUDA Driver";
    let unknown = |option: &str| format!("unrecognized option '{option}'\n{INVALID}");
    let cases = [
        ("550.54.15", "--get-state --pid 1", unknown("--get-state")),
        ("550.54.15", "--action lock --pid 1", unknown("--action")),
        ("550.54.15", "--toggle --pid 1 --timeout 5", unknown("--timeout")),
        ("570.86.10", "--toggle --pid 1 --device-map a=b", unknown("--device-map")),
        ("580.159.04", "--launch-job /bin/true", unknown("--launch-job")),
        ("580.159.04", "--nonsense", unknown("--nonsense")),
        ("580.159.04", "", "No operation selected".into()),
        ("580.159.04", "--get-state", "Missing pid to perform operation on".into()),
        ("580.159.04", "--action dance --pid 1", "Invalid process state".into()),
        (
            "580.159.04",
            "--toggle --pid 1 --timeout 5",
            "Timeout is only valid for --action lock operation".into(),
        ),
    ];
    for (driver, line, reason) in cases {
        let machine = Machine::driver(driver);
        let (_, usage, _) = run(&machine, "--help");
        assert!(usage.contains(&format!("Version {driver}.")) && usage.contains("--toggle"));
        let (code, out, text) = run(&machine, line);
        assert_eq!((code, out.as_str()), (1, ""), "{driver} {line}");
        let after_name = text.strip_prefix(&format!("{UTILITY}: ")).unwrap_or(&text);
        assert_eq!(after_name, format!("{reason}\n\n{usage}"), "{driver} {line}");
    }
}

#[test]
fn faults_of_init_are_its_own() {
    let machine = Machine::driver("550.54.15");
    let target = machine.target();
    machine.faults("init error:100 count=1\n");
    let toggle = format!("--toggle --pid {}", target.pid);
    let (code, _, text) = run(&machine, &toggle);
    assert!(code == 1 && text.contains("no CUDA-capable device"), "{text}");
    assert_eq!(run(&machine, &toggle), said(""));
    assert_eq!(machine.state(&target), 2);
}

#[test]
fn launch_job_becomes_the_program() {
    let machine = Machine::with("driver=590.1\n");
    let mut command =
        machine.utility(&["-j", "sh", "-c", &format!("echo $$ ${JOB}; wc -c < ${JOB}; exit 7")]);
    let child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let pid = child.id().to_string();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    let text = String::from_utf8(output.stdout).unwrap();
    let words: Vec<_> = text.split_whitespace().collect();
    assert_eq!(words[0], pid, "it keeps its pid");
    assert!(words[1].starts_with("/proc/self/fd/"), "{text}");
    assert_eq!(words[2], "16384");
    let (code, _, text) = run(&machine, "--launch-job /nowhere");
    assert_eq!(code, 1);
    assert!(text.contains("/nowhere"), "{text}");
}
