//! Containers with a terminal, and standard input.

use std::fs::{self, File};
use std::process::Command;

use anyhow::{Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::terminal::Terminal;
use stasis_integration::{command, wait};

use super::{Check, LIMIT, Seen, code, idle, script};

pub(crate) const CHECKS: &[Check] = &[
    Check::same("terminal_of_a_container", of_a_container),
    Check::same("terminal_of_an_exec", of_an_exec),
    Check::same("standard_input", standard_input),
    Check::same("standard_input_of_an_exec", standard_input_of_an_exec),
    Check::same("standard_input_left_open", left_open),
];

/// What runs in the terminal: it waits for a size, says what it is, reads, waits for another size.
const PROGRAM: &str = "until [ \"$(stty size 2>&-)\" = '33 77' ]; do sleep 0.02; done; \
    test -t 0 && test -t 1 && test -t 2 && echo a terminal: $(tty) ready; \
    read line; echo \"got $line\"; \
    until [ \"$(stty size 2>&-)\" = '44 99' ]; do sleep 0.02; done; echo resized; read line; exit 5";

/// A `ctr` command in a terminal of 33 lines and 77 columns.
fn start(case: &Case, arguments: &[String]) -> Result<Terminal> {
    Terminal::start(&case.ctr().command(arguments), 77, &case.path(""))
}

fn converse(case: &Case, seen: &mut Seen, mut talk: Terminal, id: &str, exec: &str) -> Result<()> {
    talk.expect("ready")?;
    talk.say("hello\n")?;
    talk.expect("got hello")?;
    let shim = case.task(id)?;
    ensure!(shim.state(id, exec)?.terminal, "the shim knows nothing of its terminal");
    shim.resize(id, exec, 99, 44)?;
    talk.expect("resized")?;
    talk.say("\n")?;
    let (status, text) = talk.end()?;
    seen.note("exit code", status.to_string());
    seen.note("output", text);
    Ok(())
}

fn of_a_container(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.new_id();
    let talk = start(case, &case.run_arguments(&id, &["--tty", "--rm"], &script(PROGRAM)))?;
    converse(case, seen, talk, &id, "")
}

fn of_an_exec(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let words = ["tasks", "exec", "--tty", "--exec-id", "e", &id, "/bin/sh", "-c", PROGRAM];
    let talk = start(case, &words.map(str::to_owned))?;
    converse(case, seen, talk, &id, "e")
}

/// `ctr` with a mebibyte of noise as its input, whose output has to be the sum of that.
fn sums(case: &Case, seen: &mut Seen, arguments: &[String]) -> Result<()> {
    let input = case.path("input");
    let mut make = Command::new("sh");
    make.args(["-c", "head -c 1048576 /dev/urandom >\"$0\" && md5sum <\"$0\""]).arg(&input);
    let sum = command::succeed(&mut make, LIMIT)?;
    let output = case.path("output");
    let mut command = case.ctr().command(arguments);
    command.stdin(File::open(&input)?).stdout(File::create(&output)?);
    let mut child = command.spawn()?;
    let status = wait::until("the end of ctr", LIMIT, || Ok(child.try_wait()?));
    if status.is_err() {
        child.kill()?;
        child.wait()?;
    }
    seen.note("exit code", status?.to_string());
    let output = fs::read_to_string(output)?;
    ensure!(output == sum, "{output} instead of {sum}");
    Ok(())
}

fn standard_input(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.new_id();
    sums(case, seen, &case.run_arguments(&id, &["--rm"], &script("cat | md5sum")))
}

fn standard_input_of_an_exec(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let words = ["tasks", "exec", "--exec-id", "e", &id, "/bin/sh", "-c", "cat | md5sum"];
    sums(case, seen, &words.map(str::to_owned))
}

/// Nobody ever attaches to it: the shim has to end all the same.
fn left_open(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&script("cat; exit 3"))?;
    let task = case.task(&id)?;
    ensure!(!task.state(&id, "")?.stdin.is_empty(), "no standard input to leave open");
    task.kill(&id, "", 9, false)?;
    task.wait(&id, "")?;
    let socket = task.socket().to_owned();
    drop(task);
    let finished = command::run(&mut case.ctr().command(["tasks", "rm", &id]), LIMIT)?;
    seen.note("delete", code(&finished));
    wait::until("the end of the shim and its socket", LIMIT, || {
        Ok((case.containerd().shims().is_empty() && !socket.exists()).then_some(()))
    })
}
