//! What a shim does while a dump takes long.

use std::fs;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use containerd_shim_protos::ttrpc::proto::Code;
use stasis_integration::case::Case;
use stasis_integration::events::Events;
use stasis_integration::runtime::{Engine, Settings};
use stasis_integration::shim::Shim;
use stasis_integration::task::{Refused, TaskClient, status};
use stasis_integration::{command, processes, wait};

use super::many::grouped;
use super::{Check, LIMIT, Seen, idle, ready, script};
use crate::consecutive;

pub(crate) const CHECKS: &[Check] = &[
    Check::ours("dump_state_of_a_running_task", |case, seen| state(case, seen, false)).quiet(),
    Check::ours("dump_state_of_a_paused_task", |case, seen| state(case, seen, true)).quiet(),
    Check::ours("dump_kill", |case, seen| kill(case, seen, false)),
    Check::ours("dump_kill_of_a_paused_task", |case, seen| kill(case, seen, true)),
    Check::ours("dump_with_cuda_kill", kill_with_cuda),
    Check::ours("dump_refuses_another_operation", refuses),
    Check::ours("dump_whose_caller_goes_away", caller_gone),
];

/// How long it takes.
const DUMP: Duration = Duration::from_secs(5);
/// A caller of State has waited for no dump.
const AT_ONCE: Duration = Duration::from_millis(100);
/// A kill and a delete have waited for no dump.
const PROMPTLY: Duration = Duration::from_secs(2);

const LOG: &str = "/data/log";
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >>/data/log; sleep 0.02; done";

/// A dump that is under way.
struct Dump {
    image: PathBuf,
    thread: JoinHandle<std::result::Result<(), Refused>>,
    begun: Instant,
}

/// Makes dumps slow from now on; gives the file that tells that runc was called for one.
fn slow(case: &Case) -> Result<PathBuf> {
    let file = case.path("dumping");
    let before_runc = format!(
        "case \" $* \" in *' checkpoint '*) echo now >{}; sleep {};; esac",
        file.display(),
        DUMP.as_secs()
    );
    let engine = if case.shim() == Shim::Go { Engine::Stock } else { Engine::Stasis };
    case.set(&Settings { engine, before_runc, ..Settings::default() })?;
    Ok(file)
}

impl Dump {
    /// Begins one and waits until it is with runc.
    fn begin(case: &Case, task: &TaskClient, id: &str) -> Result<Self> {
        let image = case.path("image");
        let (task, name, to) = (task.clone(), id.to_owned(), image.clone());
        let file = case.path("dumping");
        let thread = thread::spawn(move || task.checkpoint(&name, &to, None, false).map(drop));
        wait::until("the dump", LIMIT, || {
            ensure!(!thread.is_finished() || file.exists(), "the checkpoint ended before it began");
            Ok(file.exists().then_some(()))
        })?;
        Ok(Self { image, thread, begun: Instant::now() })
    }

    /// Fails if it could be over.
    fn still(&self) -> Result<()> {
        ensure!(!self.thread.is_finished(), "the dump is over already");
        Ok(())
    }

    fn end(self) -> Result<std::result::Result<(), Refused>> {
        self.thread.join().map_err(|_| anyhow!("a thread panicked"))
    }
}

fn state(case: &Case, seen: &mut Seen, paused: bool) -> Result<()> {
    slow(case)?;
    let id = case.start(&grouped(script(COUNT), "g1"))?;
    let other = case.start(&grouped(idle(), "g1"))?;
    ready(case, &id, LOG)?;
    let task = case.task(&id)?;
    let expected = if paused { "PAUSED" } else { "RUNNING" };
    if paused {
        task.pause(&id)?;
    }
    let before = case.read(&id, LOG)?;
    let dump = Dump::begin(case, &task, &id)?;
    let asking = task.again()?;
    let mut slowest = Duration::ZERO;
    for number in 0..100 {
        for (id, expected) in [(&id, expected), (&other, "RUNNING")] {
            let start = Instant::now();
            let state = asking.state(id, "")?;
            slowest = slowest.max(start.elapsed());
            let found = status(&state);
            ensure!(found == expected, "call {number}: {id} is {found} instead of {expected}");
        }
        if slowest > AT_ONCE {
            break;
        }
    }
    seen.say("slowest answer");
    seen.took(slowest);
    ensure!(slowest <= AT_ONCE, "an answer to State took {} ms", slowest.as_millis());
    dump.still()?;
    let image = dump.image.clone();
    dump.end()??;
    ensure!(image.join("inventory.img").exists(), "no image");
    ensure!(status(&task.state(&id, "")?) == expected, "it is not {expected} afterwards");
    if paused {
        ensure!(case.read(&id, LOG)? == before, "the log of a paused container grew");
        task.resume(&id)?;
    }
    let lines = || consecutive(&case.read(&id, LOG)?, 1);
    let before = lines()?;
    wait::until("more lines", LIMIT, || Ok((lines()? > before).then_some(())))
}

fn kill(case: &Case, seen: &mut Seen, paused: bool) -> Result<()> {
    slow(case)?;
    let id = case.start(&script(COUNT))?;
    ready(case, &id, LOG)?;
    if paused {
        case.task(&id)?.pause(&id)?;
    }
    wins(case, seen, &id)
}

/// All is in host memory and the driver is not to come back when the kill arrives.
fn kill_with_cuda(case: &Case, seen: &mut Seen) -> Result<()> {
    if case.shim() == Shim::Go {
        bail!("runc alone dumps no process with CUDA");
    }
    let id = case.start_counter(&["--pattern-mib", "8"])?;
    slow(case)?;
    wins(case, seen, &id)
}

/// A kill during the dump ends the task, and a delete takes it away, and neither waits.
fn wins(case: &Case, seen: &mut Seen, id: &str) -> Result<()> {
    let events = Events::listen(case.ctr(), case.path("events"))?;
    let task = case.task(id)?;
    let dump = Dump::begin(case, &task, id)?;
    let other = task.again()?;
    let start = Instant::now();
    other.kill(id, "", 9, false)?;
    let exit = other.wait(id, "")?;
    let ended = start.elapsed();
    ensure!(exit.exit_status == 137, "exit status {}", exit.exit_status);
    events.wait_for(id, "/tasks/exit")?;
    let told = start.elapsed();
    let deleted = command::run(&mut case.ctr().command(["tasks", "rm", id]), LIMIT)?;
    let gone = start.elapsed();
    seen.say(format!("end {}, event {}, deleted", ended.as_millis(), told.as_millis()));
    seen.took(gone);
    ensure!(told <= PROMPTLY, "the exit event came after {} ms", told.as_millis());
    ensure!(gone <= PROMPTLY, "the delete was done after {} ms", gone.as_millis());
    ensure!(deleted.stderr.contains("exit code 137"), "{deleted:?}");
    ensure!(start.elapsed() < DUMP, "the dump may be over by itself");
    let image = dump.image.clone();
    let result = dump.end()?;
    ensure!(result.is_err(), "a checkpoint of a task that was killed went well");
    ensure!(!image.join("stasis.json").exists(), "a manifest of half an image");
    let working = || {
        let checkpoints = processes::with_argument("checkpoint");
        processes::with_argument(id).into_iter().any(|pid| checkpoints.contains(&pid))
    };
    wait::until("the end of the dump's processes", PROMPTLY, || Ok((!working()).then_some(())))
}

/// Another operation on the task is refused, and says why.
fn refuses(case: &Case, seen: &mut Seen) -> Result<()> {
    slow(case)?;
    let id = case.start(&script(COUNT))?;
    ready(case, &id, LOG)?;
    let task = case.task(&id)?;
    let dump = Dump::begin(case, &task, &id)?;
    let other = task.again()?;
    let second = case.path("second");
    let start = Instant::now();
    for (what, answer) in [
        ("checkpoint", other.checkpoint(&id, &second, None, false)),
        ("pause", other.pause(&id)),
        ("resume", other.resume(&id)),
    ] {
        let Err(refused) = answer else { bail!("a {what} during a dump went well") };
        let code = refused.code.context("no answer")?;
        ensure!(code == Code::FAILED_PRECONDITION, "{what}: {refused}");
        ensure!(refused.message.to_lowercase().contains("checkpoint"), "{what}: {refused}");
        dump.still()?;
    }
    seen.took(start.elapsed());
    ensure!(dump.begun.elapsed() < DUMP, "the dump was waited for");
    dump.end()??;
    task.pause(&id)?;
    task.resume(&id)?;
    Ok(())
}

/// The image becomes whole, and the task goes on.
fn caller_gone(case: &Case, seen: &mut Seen) -> Result<()> {
    slow(case)?;
    let id = case.start(&script(
        "i=0; while :; do i=$((i+1)); echo $i >/dev/shm/n; \
                                 sleep 0.02; done",
    ))?;
    ready(case, &id, "/dev/shm/n")?;
    let task = case.task(&id)?;
    let (caller, cutter) = task.cuttable()?;
    let dump = Dump::begin(case, &caller, &id)?;
    cutter.cut()?;
    let image = dump.image.clone();
    ensure!(dump.end()?.is_err(), "the caller got an answer");
    wait::until("the image", 2 * DUMP, || {
        let whole = image.join("inventory.img").exists()
            && processes::with_argument("checkpoint")
                .iter()
                .all(|pid| !processes::with_argument(&id).contains(pid));
        Ok(whole.then_some(()))
    })?;
    wait::until("that the task runs", LIMIT, || {
        Ok((status(&task.state(&id, "")?) == "RUNNING").then_some(()))
    })?;
    let before = case.read(&id, "/dev/shm/n")?;
    wait::until("that it goes on", LIMIT, || {
        Ok((case.read(&id, "/dev/shm/n")? != before).then_some(()))
    })?;
    case.set(&Settings::default())?;
    case.end_task(&id)?;
    let (_bundle, pid) = case.restore_from(&id, &image)?;
    let number = fs::read_to_string(format!("/proc/{pid}/root/dev/shm/n"))?;
    ensure!(!number.trim().is_empty(), "the restored container does not count");
    seen.say("image whole");
    Ok(())
}
