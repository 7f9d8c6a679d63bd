//! `stasis suspend`, `resume`, `ps` and `repair`, with containers that go on.
//!
//! What depends on who manages the container is tried through each of the front ends
//! ([`clients`]), and what is the engine's alone through one of them.

mod clients;
mod faults;
mod killed;
mod names;
mod room;
mod several;
mod shown;
mod states;

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use stasis_integration::case::{Case, Place};
use stasis_integration::command::{self, Finished};
use stasis_integration::shim::Shim;
use stasis_integration::suite::Suite;
use stasis_integration::wait;

use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);

/// So long a question gets no answer.
const SILENCE: Duration = Duration::from_millis(300);

/// What is tried through each front end is in every lab, the rest in the older one only.
pub(crate) fn modules() -> Vec<(&'static str, Place, Vec<Test>)> {
    let mut modules: Vec<_> =
        clients::tests().into_iter().map(|(place, tests)| ("suspend", place, tests)).collect();
    for (shim, word) in [(Shim::Stasis, "shim"), (Shim::Go, "stasis_runc")] {
        modules.push(("suspend", Place::apart(shim), older(states::tests(word))));
    }
    let engine = [
        faults::tests(),
        killed::tests(),
        names::tests(),
        room::tests(),
        several::tests(),
        shown::tests(),
    ];
    modules.push(("suspend", Place::SHARED, older(engine.into_iter().flatten().collect())));
    modules
}

fn older(tests: Vec<Test>) -> Vec<Test> {
    tests.into_iter().map(|test| test.only(&[Suite::Trixie])).collect()
}

/// The command `stasis`, which knows nothing of a test but its configuration.
#[derive(Clone, Copy)]
pub(crate) struct Stasis<'a> {
    case: &'a Case<'a>,
}

impl<'a> Stasis<'a> {
    pub(crate) fn new(case: &'a Case<'a>) -> Self {
        Self { case }
    }

    /// A call that is not made yet.
    pub(crate) fn command(self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.case.binary("stasis"));
        command.args(arguments);
        command.env("STASIS_CONFIG", self.case.runtime.config());
        command.env("EMULATED_GPU_DIR", self.case.gpu.store());
        command
    }

    /// One that has to succeed.
    pub(crate) fn finished(self, arguments: &[&str]) -> Result<Finished> {
        let finished = command::run(&mut self.command(arguments), LIMIT)?;
        ensure!(finished.status.success(), "stasis {arguments:?}: {finished:?}");
        Ok(finished)
    }

    /// The same; gives what it prints.
    pub(crate) fn run(self, arguments: &[&str]) -> Result<String> {
        Ok(self.finished(arguments)?.stdout)
    }

    /// One that has to fail, with status 1 and nothing on standard output; gives the last line of what
    /// it says, which is the whole of the error.
    pub(crate) fn fails(self, arguments: &[&str]) -> Result<String> {
        let finished = command::run(&mut self.command(arguments), LIMIT)?;
        let Finished { status, stdout, stderr } = &finished;
        ensure!(status.code() == Some(1), "stasis {arguments:?}: {finished:?}");
        ensure!(stdout.is_empty(), "it printed {stdout:?}, and failed: {stderr}");
        let last = stderr.lines().last().context("it failed and said nothing")?;
        ensure!(last.starts_with("stasis: "), "the last line is {last:?}");
        Ok(last.to_owned())
    }

    /// One that gets a signal a little after it has said this word, and has to fail; gives what it said,
    /// and how long it took to end.
    fn interrupted(
        self,
        arguments: &[&str],
        word: &str,
        signal: Signal,
    ) -> Result<(String, Duration)> {
        let said = self.case.path("said");
        let mut call = self.command(arguments);
        let mut call = call.stdout(Stdio::null()).stderr(File::create(&said)?).spawn()?;
        let text = || fs::read_to_string(&said).unwrap_or_default();
        wait::until(word, LIMIT, || Ok(text().contains(word).then_some(())))?;
        std::thread::sleep(Duration::from_millis(300));
        let since = Instant::now();
        kill(Pid::from_raw(i32::try_from(call.id())?), signal)?;
        let status = command::wait(&mut call, LIMIT)?.context("it did not end")?;
        ensure!(status.code() == Some(1), "it ended with {status}: {}", text());
        Ok((text(), since.elapsed()))
    }

    /// What `--json` prints.
    pub(crate) fn json(self, arguments: &[&str]) -> Result<Value> {
        let text = self.run(&[arguments, &["--json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("this is no JSON: {text}"))
    }

    /// What `stasis ps` tells of the container with this whole id.
    pub(crate) fn seen(self, id: &str) -> Result<Option<Value>> {
        // Not of all: those of tests that run beside it have other GPUs, and would be asked in vain.
        let mut command = self.command(&["ps", id, "--json"]);
        let Finished { status, stdout, stderr } = command::run(&mut command, LIMIT)?;
        if !status.success() {
            ensure!(stderr.contains("no container has the id"), "{stderr}");
            return Ok(None);
        }
        let list: Value = serde_json::from_str(&stdout).context(stdout)?;
        let mut all = list.as_array().context("no list")?.iter();
        Ok(all.find(|container| container["id"] == id).cloned())
    }

    /// The container is suspended, as far as `ps` tells, and so is each of so many processes; all of
    /// them tell what they will need. The GPU is free.
    pub(crate) fn expect_suspended(self, id: &str, processes: usize) -> Result<()> {
        let seen = self.seen(id)?.context("ps does not show it")?;
        self.expect_free()?;
        ensure!(seen["operation"] == "suspended", "{seen}");
        expect_states(&seen, processes, "suspended")
    }

    /// The same with one process, whoever has the GPU now.
    pub(crate) fn expect_waiting(self, id: &str) -> Result<()> {
        let seen = self.seen(id)?.context("ps does not show it")?;
        ensure!(seen["operation"] == "suspended", "{seen}");
        expect_states(&seen, 1, "suspended")
    }

    /// The container runs and uses the GPU.
    pub(crate) fn expect_running(self, id: &str, processes: usize) -> Result<()> {
        let seen = self.seen(id)?.context("ps does not show it")?;
        ensure!(self.case.gpu.used(0)? > 0, "nothing is on the GPU");
        ensure!(seen["operation"].is_null(), "{seen}");
        expect_states(&seen, processes, "running")
    }

    /// Nobody uses the GPU.
    pub(crate) fn expect_free(self) -> Result<()> {
        let used = self.case.gpu.used(0)?;
        ensure!(used == 0, "{used} bytes of the GPU are in use");
        Ok(())
    }

    /// The journals of this test.
    pub(crate) fn journals(self) -> Vec<PathBuf> {
        stasis_integration::leaks::journals(&self.case.runtime.state())
    }

    /// There is nothing to repair.
    pub(crate) fn expect_no_journal(self) -> Result<()> {
        let left = self.journals();
        ensure!(left.is_empty(), "journals are left: {left:?}");
        Ok(())
    }
}

/// So many processes, all in this state, and each of them has or needs memory.
fn expect_states(seen: &Value, processes: usize, state: &str) -> Result<()> {
    let all = seen["processes"].as_array().context("no list of processes")?;
    ensure!(all.len() == processes, "{processes} processes are not {}: {seen}", all.len());
    for process in all {
        ensure!(process["state"] == state, "not {state}: {seen}");
        ensure!(process["gpus"][0]["bytes"].as_u64() > Some(0), "it needs no memory: {seen}");
    }
    Ok(())
}

/// The text says all of these.
fn says(text: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(text.contains(word), "{word:?} is not in: {text}");
    }
    Ok(())
}
