//! The demo: a counter in GPU memory is checkpointed, killed and restored with `ctr`, through our
//! shim.
//!
//! Run by `make demo`, inside the lab. It prints what a user would type.

use std::fs;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use stasis_integration::case::{Case, Lab, PORT, Place};
use stasis_integration::ctr::Status;
use stasis_integration::shim::Shim;
use stasis_integration::{command, image, udp};

const ID: &str = "counter";
const CHECKPOINT: &str = "checkpoint/counter:1";
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    match demo() {
        Ok(()) => {
            println!("demo: 101 -> checkpoint -> restore -> 102 (emulated GPU)");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let chain: Vec<_> = error.chain().map(ToString::to_string).collect();
            eprintln!("demo: FAILED: {}", chain.join("\n  because: "));
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<()> {
    let mut clock = Clock(Instant::now());
    let lab = Lab::start()?;
    clock.lap("containerd is up and knows the image");
    lab.run("demo", Place::apart(Shim::Stasis), |case| {
        let result = show(case, &mut clock);
        // The container has a name of its own here, which the fixture does not know.
        let cleaned = case.remove(ID);
        result.and(cleaned)
    })
}

fn show(case: &Case, clock: &mut Clock) -> Result<()> {
    let network = ["--net-host".to_owned()];
    let runtime = ["--runtime".to_owned(), Shim::Stasis.runtime().to_owned()];
    let mut run = vec!["run".to_owned(), "--detach".to_owned()];
    run.extend(runtime.into_iter().chain(network).chain(case.gpu.arguments()));
    run.extend([image::NAME.to_owned(), ID.to_owned(), "/bin/counter".to_owned()]);
    type_in(case, &run)?;
    expect(101)?;
    clock.lap("the counter in GPU memory says 101");

    type_in(case, &["containers", "checkpoint", "--rw", "--task", ID, CHECKPOINT])?;
    case.expect_status(ID, Status::Running)?;
    clock.lap("checkpointed");

    type_in(case, &["tasks", "kill", "--signal", "SIGKILL", ID])?;
    case.wait_stopped(ID)?;
    shown(case, &["tasks", "rm", ID])?;
    type_in(case, &["containers", "rm", ID])?;
    ensure!(case.ctr().status(ID)? == Status::Gone, "the task is still there");
    ensure!(!in_use(case)?, "somebody still has GPU memory");
    clock.lap("killed and removed: no process, no container, no GPU memory");

    type_in(case, &["containers", "restore", "--rw", "--live", ID, CHECKPOINT])?;
    case.expect_status(ID, Status::Running)?;
    clock.lap("restored");
    expect(102)?;
    clock.lap("the counter in GPU memory says 102");
    Ok(())
}

/// Says how long each step took.
struct Clock(Instant);

impl Clock {
    fn lap(&mut self, step: &str) {
        println!("[{:4.1} s] {step}", self.0.elapsed().as_secs_f32());
        self.0 = Instant::now();
    }
}

/// Shows a `ctr` command as it is typed.
fn show_command(arguments: &[impl AsRef<str>]) {
    let words: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    println!("$ ctr {}", words.join(" "));
}

/// Shows and runs a `ctr` command.
fn type_in(case: &Case, arguments: &[impl AsRef<str>]) -> Result<String> {
    show_command(arguments);
    case.ctr().run(arguments.iter().map(AsRef::as_ref))
}

/// Shows and runs a `ctr` command that ends with the status of a killed container.
fn shown(case: &Case, arguments: &[&str]) -> Result<()> {
    show_command(arguments);
    command::run(&mut case.ctr().command(arguments), LIMIT).map(drop)
}

/// Asks the counter, which shares the lab's network.
fn expect(number: u64) -> Result<()> {
    println!("$ echo '?' | nc -u -w 1 127.0.0.1 {PORT}");
    let answer = udp::ask(Pid::this(), PORT)?;
    println!("{answer}");
    ensure!(answer == number, "the counter said {answer} instead of {number}");
    Ok(())
}

/// Whether a living process has memory on the GPU: it holds the lock on its `alive`.
fn in_use(case: &Case) -> Result<bool> {
    for entry in fs::read_dir(case.gpu.store()).context("the emulated GPU's store")?.flatten() {
        let alive = entry.path().join("alive");
        if !alive.exists() {
            continue;
        }
        let mut probe = Command::new("flock");
        probe.args(["--nonblock", "--shared"]).arg(&alive).arg("true");
        if !command::run(&mut probe, LIMIT)?.status.success() {
            return Ok(true);
        }
    }
    Ok(false)
}
