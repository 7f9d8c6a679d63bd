//! The command `cuda-checkpoint`.

#![allow(clippy::unwrap_used)]

mod common;

use common::{JOB, Machine, play_role};

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

/// What is left of a `CUresult` in an exit status.
fn status(code: i32) -> i32 {
    code & 0xff
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

#[test]
fn toggle_goes_both_ways() {
    for driver in ["550.54", "580.1"] {
        let machine = Machine::with(&format!("driver={driver}\n"));
        let mut target = machine.target();
        let toggle = format!("--toggle --pid {}", target.pid);
        assert_eq!(run(&machine, &toggle), said(""));
        assert_eq!(machine.state(&target), 2);
        assert_eq!(run(&machine, &toggle), said(""));
        assert_eq!(machine.state(&target), 0);
        target.tell("managed");
        let text = format!(
            "Error toggling CUDA in process ID {}: \"operation not supported\"",
            target.pid
        );
        assert_eq!(run(&machine, &toggle), (status(801), String::new(), text));
        assert_eq!(machine.state(&target), 0);
    }
}

#[test]
fn a_map_moves_memory_to_another_gpu() {
    let machine = Machine::with("gpus=2\n");
    let mut target = machine.target();
    let pid = target.pid;
    let uuid = |index: u32| format!("GPU-e05e1a7e-0000-0000-0000-{index:012}");
    let map = format!("{0}={1},{1}={0}", uuid(0), uuid(1));
    assert_eq!(run(&machine, &format!("--toggle --pid {pid}")), said(""));
    assert_eq!(run(&machine, &format!("--toggle --pid {pid} --device-map {map}")), said(""));
    assert_eq!(machine.files("mem-1-").len(), 3);
    assert_eq!(target.tell("verify"), "0");
}

#[test]
fn errors_have_the_words_of_the_real_one() {
    let machine = Machine::new();
    let mut target = machine.target();
    let pid = target.pid;
    let failed = |line: String| {
        let (code, out, text) = run(&machine, &line);
        assert_eq!(out, "");
        (code, text)
    };
    let own = std::process::id();
    let text = format!("Could not find restore thread for process ID {own}");
    assert_eq!(failed(format!("--get-restore-tid --pid {own}")), (3, text));
    let text = format!("Could not lock on process ID {pid}: \"device not ready\"");
    target.tell("spin 1500");
    assert_eq!(failed(format!("--action lock --pid {pid} --timeout 100")), (status(600), text));
    target.tell("synchronize");
    machine.faults("restore error:1\n");
    let text = format!("Could not restore on process ID {pid}: \"invalid argument\"");
    assert_eq!(failed(format!("--action restore --pid {pid}")), (1, text));
    target.kill();
    let words = "\"OS call failed or operation not supported on this OS\"";
    let text = format!("Error toggling CUDA in process ID {pid}: {words}");
    assert_eq!(failed(format!("--toggle --pid {pid}")), (status(304), text));
}

#[test]
fn options_come_with_drivers() {
    let cases = [
        ("550.1", ["--get-state -p 1", "--action lock -p 1", "--launch-job true"].as_slice()),
        ("555.1", &["--launch-job true"]),
        ("580.1", &["--launch-job true", "-j true"]),
        ("610.1", &["--dance", "", "--toggle"]),
    ];
    for (driver, lines) in cases {
        let machine = Machine::with(&format!("driver={driver}\n"));
        for line in lines {
            let (code, out, text) = run(&machine, line);
            assert_eq!((code, out.as_str()), (1, ""), "{driver} {line}");
            assert!(text.contains("usage: cuda-checkpoint"), "{text}");
        }
        assert!(run(&machine, "--help").1.contains("--toggle"));
    }
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
    assert_eq!(code, status(304));
    assert!(text.contains("/nowhere"), "{text}");
}
