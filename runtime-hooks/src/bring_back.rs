//! Bringing a container back: every CUDA process to the state in which it was found, the freezer
//! to what the caller expects. One way for a failed checkpoint, for the end of a good one with
//! leave-running, for Resume, and for what a killed operation left behind. It begins from what the
//! driver says, so it does not matter how far things had come.

use std::time::{Duration, Instant};

use crate::cuda::{CudaError, CudaState, Steps};
use crate::discover::probe;
use crate::error::{Cause, Failure, Left, Phase};
use crate::freezer::FreezerError;
use crate::give_back;
use crate::hold::HoldError;
use crate::journal::{Entry, Stage};
use crate::parts::{CudaProcess, Limits, Parts};
use crate::processes::{Process, Processes};
use crate::suspend::driver_runs;
use crate::suspended;

/// How long CRIU may need to let go of the container after its runtime was killed.
const LET_GO: Duration = Duration::from_secs(60);
/// How long a killed container may take to end.
const DIE: Duration = Duration::from_secs(20);

/// How the container is when it is back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Frozen. No application code runs on the way.
    Paused,
    /// Running. From a frozen container, application code runs only when its CUDA works.
    Running,
}

/// Who thaws.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thaw {
    /// The freezer, written directly.
    Freezer,
    /// `runc resume`, because that is what the caller asked for.
    Runtime,
}

/// What is left to do after all was brought back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Back {
    /// Nothing.
    Whole,
    /// A lock whose caller was lost may be granted later. The journal says so.
    LockPending,
}

/// Brings the container of `entry` back. What is at stake is the container's life, so what is not
/// the driver's last word is tried again. One that somebody else has paused meanwhile stays so, which is
/// noted in `entry`.
pub fn bring_back(
    parts: &mut Parts<'_>,
    entry: &mut Entry,
    mut goal: Goal,
    thaw: Thaw,
    limits: &Limits,
) -> Result<Back, Cause> {
    let deadline = Instant::now() + limits.room + limits.restore;
    let mut attempts = 0;
    parts.driver.join(entry.in_job());
    loop {
        attempts += 1;
        // Of one that has ended there is no freezer.
        if !has_ended(parts.processes, entry) && entry.was_paused_meanwhile(parts.freezer.frozen()?)
        {
            tracing::warn!(container = entry.container, "it was paused meanwhile, and stays so");
            entry.frozen = true;
            goal = Goal::Paused;
            // Whoever repairs finds it thawed, maybe.
            if let Err(error) = parts.journal.save(entry) {
                tracing::error!(error = %crate::error::chain(&error), "the journal does not say so");
            }
        }
        let cause = match attempt(parts, entry, goal, thaw, limits) {
            Ok(back) => return Ok(back),
            Err(cause) => cause,
        };
        let last_word = match &cause {
            Cause::Gone
            | Cause::NoRoom { .. }
            | Cause::SilentGpu { .. }
            | Cause::Interrupted
            | Cause::SharedLost { .. }
            | Cause::NotThere { .. } => true,
            // The next attempt begins by finding out.
            Cause::Unusable { state, .. } => *state != CudaState::Undetermined,
            // A helper that was lost says nothing of the process.
            Cause::Driver { error, .. } => error.code().is_some(),
            _ => false,
        };
        // A machine that has no time for a thread has it later. No job ends for that.
        let slow = matches!(
            cause,
            Cause::Hold(HoldError::Pending { .. }) | Cause::Freezer(FreezerError::Stuck { .. })
        );
        let enough = attempts >= ATTEMPTS && !slow;
        if last_word || enough || Instant::now() >= deadline {
            return Err(cause);
        }
        tracing::warn!(%cause, container = entry.container, "bringing back is tried again");
        std::thread::sleep(PAUSE);
    }
}

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// How often bringing back is tried.
const ATTEMPTS: u32 = 3;

fn attempt(
    parts: &mut Parts<'_>,
    entry: &Entry,
    goal: Goal,
    thaw: Thaw,
    limits: &Limits,
) -> Result<Back, Cause> {
    if has_ended(parts.processes, entry) {
        return Err(Cause::Gone);
    }
    let mut back = Back::Whole;
    wait_for_criu(parts)?;
    let cuda = processes_of(parts, entry)?;
    let frozen = parts.freezer.frozen()?;
    if entry.was_paused_meanwhile(frozen) {
        return Err(Cause::Paused);
    }
    if !cuda.is_empty() {
        let hold = frozen || goal == Goal::Paused;
        let asked = if hold { parts.holding().all(&cuda, driver_runs) } else { Ok(()) };
        let hold = match asked {
            // Somebody traces one of them. It is a matter of milliseconds of its code.
            Err(Cause::Hold(HoldError::Refused { pid, .. })) if goal == Goal::Running => {
                tracing::warn!(pid, container = entry.container, "cannot be held; it is let run");
                false
            }
            Err(cause) => return Err(cause),
            Ok(()) => hold,
        };
        if !hold {
            parts.hold.release();
        }
        if frozen {
            thaw_by(parts, thaw)?;
        }
        if hold {
            parts.hold.settle()?;
        }
        let toggles = parts.driver.steps().map_err(Cause::NoDriver)? == Steps::Toggle;
        if entry.locking && toggles {
            give_back::clear_up(parts, &cuda, hold, limits.lock)?;
        }
        // Only there can it be given up: elsewhere an interrupt is the reason for bringing back.
        let resumes = entry.stage == Stage::Resuming;
        let how = give_back::How {
            in_job: entry.job.is_some(),
            room: limits.room,
            limit: limits.restore,
            given_up: &|| resumes && (parts.interrupted)(),
            locks: parts.gpu_locks,
        };
        give_back::restore(parts.driver, parts.processes, &cuda, &how)?;
        give_back::unlock(parts.driver, parts.processes, &cuda, limits.restore)?;
        if entry.locking && !toggles {
            if give_back::outlast_lost_locks(parts, entry, &cuda, hold, limits.lock)? {
                back = Back::LockPending;
            }
            give_back::unlock(parts.driver, parts.processes, &cuda, limits.restore)?;
        }
    }
    match (goal, parts.freezer.frozen()?) {
        (Goal::Paused, false) => parts.freezer.freeze()?,
        (Goal::Running, true) if !entry.was_paused_meanwhile(true) => thaw_by(parts, thaw)?,
        _ => {}
    }
    parts.hold.release();
    if back == Back::LockPending {
        let mut later = entry.clone();
        if later.stage == Stage::Resuming {
            // It runs.
            (later.stage, later.suspended) = (Stage::Freeing, None);
        } else if later.stage == Stage::AwaitingResume {
            later.stage = Stage::Suspending;
        }
        later.freezes = false;
        later.frozen = goal == Goal::Paused;
        parts.journal.save(&later)?;
    }
    Ok(back)
}

fn thaw_by(parts: &mut Parts<'_>, thaw: Thaw) -> Result<(), Cause> {
    match thaw {
        Thaw::Freezer => Ok(parts.freezer.thaw()?),
        Thaw::Runtime => Ok(parts.runtime.resume()?),
    }
}

/// The operation has ended: its entry in the journal goes. A container that was suspended before is
/// so again.
pub(crate) fn forget(parts: &mut Parts<'_>, entry: &Entry) {
    let resumed = entry.stage == Stage::Resuming;
    let is_there = |earlier: &&Entry| {
        !has_ended(parts.processes, entry)
            && earlier.processes.iter().any(|noted| parts.processes.alive(noted.id))
    };
    let earlier = entry.suspended.as_deref().filter(|_| !resumed).filter(is_there);
    let done = match earlier {
        Some(earlier) => parts.journal.save(earlier),
        None => parts.journal.clear(),
    };
    if let Err(error) = done {
        tracing::error!(error = %crate::error::chain(&error), "the journal stays behind");
    }
}

/// Brings back after a failure, or kills what cannot be brought back: a container that is left
/// locked would hang for ever.
pub fn put_back(parts: &mut Parts<'_>, entry: &Entry, limits: &Limits) -> Left {
    unlock_network(parts);
    let mut entry = entry.clone();
    let goal = if entry.frozen { Goal::Paused } else { Goal::Running };
    let brought = bring_back(parts, &mut entry, goal, Thaw::Freezer, limits);
    let pending = matches!(brought, Ok(Back::LockPending));
    let left = match brought {
        Ok(_) if has_ended(parts.processes, &entry) => Left::Gone,
        Ok(_) if parts.freezer.frozen().unwrap_or(entry.frozen) => Left::Paused,
        Ok(_) => Left::Running,
        Err(because) if matches!(entry.stage, Stage::Freeing | Stage::Resuming) => {
            return suspended::stay(parts, &entry, &because, limits.checkpoint);
        }
        Err(because) => kill(parts, &entry, because),
    };
    if !pending {
        forget(parts, &entry);
    }
    left
}

/// Kills a container whose CUDA does not come back.
pub fn kill(parts: &mut Parts<'_>, entry: &Entry, because: Cause) -> Left {
    parts.hold.release();
    if has_ended(parts.processes, entry) {
        return Left::Gone;
    }
    let because = Box::new(because);
    match kill_and_wait(parts, entry) {
        Ok(()) => Left::Killed { because },
        Err(error) => Left::Broken { because, kill: Box::new(error) },
    }
}

/// Whether there is nothing left of the container.
pub(crate) fn has_ended(processes: &dyn Processes, entry: &Entry) -> bool {
    if processes.have_init() { !processes.alive(entry.init) } else { is_empty(processes) }
}

fn is_empty(processes: &dyn Processes) -> bool {
    processes.list().map_or_else(|error| error.is_gone(), |list| list.is_empty())
}

/// `runc kill`, and waits until no process of the container runs; of a cgroup that is none, until none of
/// those that had CUDA, as the others are let live.
pub(crate) fn kill_and_wait(parts: &mut Parts<'_>, entry: &Entry) -> Result<(), Cause> {
    let killed = parts.runtime.kill();
    let deadline = Instant::now() + DIE;
    loop {
        let alive = |id| parts.processes.alive(id);
        let ended = if parts.processes.have_init() {
            !alive(entry.init) && is_empty(parts.processes)
        } else {
            !entry.processes.iter().any(|noted| alive(noted.id))
        };
        if ended {
            return Ok(());
        }
        if let Err(error) = &killed
            && !has_ended(parts.processes, entry)
        {
            return Err(error.clone().into());
        }
        if Instant::now() >= deadline {
            return Err(Cause::DoesNotDie(DIE));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Turns a failure in `phase` into what the caller is told, after putting the container back.
pub(crate) fn fail(
    parts: &mut Parts<'_>,
    operation: &'static str,
    entry: &Entry,
    phase: Phase,
    cause: Cause,
    limits: &Limits,
) -> Failure {
    if let Cause::Driver { error, .. } = &cause
        && error.code() == Some(CudaError::OPERATING_SYSTEM)
    {
        // 'No such process': it is about to end, which takes a while with the memory of a GPU in
        // it. If all of the container does, somebody killed it.
        wait_for_end(parts, entry);
    }
    let left = put_back(parts, entry, limits);
    // Whatever went wrong then went wrong because somebody killed it.
    let cause = if matches!(left, Left::Gone) { Cause::Gone } else { cause };
    let log = log_of(&cause);
    let container = entry.container.clone();
    Failure { operation, container, phase, cause, left, image: None, log }
}

fn wait_for_end(parts: &Parts<'_>, entry: &Entry) {
    let deadline = Instant::now() + ENDING;
    while !has_ended(parts.processes, entry) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// How long a process that was killed may take to end.
const ENDING: Duration = Duration::from_secs(3);

pub(crate) fn log_of(cause: &Cause) -> Option<std::path::PathBuf> {
    match cause {
        Cause::Runc(error) => error.log.clone(),
        _ => None,
    }
}

/// A runtime that was killed in the middle of a dump leaves CRIU at work, which finishes by itself
/// or gives up at its next word to the runtime. Until then the processes are CRIU's. And whatever held
/// the threads for an engine that was killed freezes what was frozen, after the engine is gone: who looks
/// before that finds it thawed, and its calls then hang.
fn wait_for_criu(parts: &mut Parts<'_>) -> Result<(), Cause> {
    let deadline = Instant::now() + LET_GO;
    loop {
        let own = parts.hold.tracer();
        let list = parts.processes.list()?;
        let traced = list.iter().find(|process| {
            process.tracer != 0
                && Some(process.tracer) != own
                && parts.processes.lets_go(process.tracer)
        });
        let Some(traced) = traced else { return Ok(()) };
        if Instant::now() >= deadline {
            let who = crate::parts::who(traced);
            return Err(Cause::Traced { who, tracer: traced.tracer });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// After a dump that failed. Only when CRIU is gone: until then the lock is its own.
pub(crate) fn unlock_network(parts: &mut Parts<'_>) {
    if wait_for_criu(parts).is_ok() {
        parts.runtime.unlock_network();
    }
}

/// The processes of the entry that still run, in its order, with their restore threads.
pub(crate) fn processes_of(
    parts: &mut Parts<'_>,
    entry: &Entry,
) -> Result<Vec<CudaProcess>, Cause> {
    if entry.processes.is_empty() {
        return Ok(Vec::new());
    }
    let list = parts.processes.list()?;
    let known: Vec<&Process> = list
        .iter()
        .filter(|process| entry.processes.iter().any(|noted| noted.id == process.id))
        .collect();
    if known.is_empty() {
        return Ok(Vec::new());
    }
    let mut cuda = probe(parts, &known)?;
    cuda.sort_by_key(|process| {
        entry.processes.iter().position(|noted| noted.id == process.process.id)
    });
    for process in &mut cuda {
        if let Some(noted) = entry.processes.iter().find(|noted| noted.id == process.process.id) {
            process.found = Some(noted.found);
            process.uses = noted.device_map.place(&noted.uses);
            process.device_map.clone_from(&noted.device_map);
        }
    }
    Ok(cuda)
}
