//! Giving CUDA back: from CHECKPOINTED by way of LOCKED to the state in which each process was
//! found. Used after a dump, after a failure and after a restore.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::cuda::{CudaError, CudaState, Driver};
use crate::error::Cause;
use crate::hold::Keep;
use crate::journal::Entry;
use crate::parts::{CudaProcess, Holding, Parts, pids};
use crate::processes::Processes;
use crate::suspend::{FIRST_ATTEMPT, STATE, check, driver_runs, runs_although_paused, verify};

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Attempts after an error that waiting does not cure.
const ATTEMPTS: u32 = 3;

/// A lock whose caller was lost is granted when the work in flight ends, after its time and after
/// the state was read as RUNNING (measured on 580). A second one is granted after the first, so
/// when it is back none is pending. All are RUNNING meanwhile. Where their threads are `held`, calls are
/// let finish, and then the code of its peers, for which the work may wait, is let go. Gives whether
/// one is still pending, because it takes longer than `timeout`.
pub(crate) fn outlast_lost_locks(
    parts: &mut Parts<'_>,
    entry: &Entry,
    cuda: &[CudaProcess],
    held: bool,
    timeout: Duration,
) -> Result<bool, Cause> {
    let deadline = Instant::now() + timeout;
    let last = |process: &CudaProcess| entry.locked_last.is_none_or(|id| id == process.process.id);
    let mut pending: Vec<CudaProcess> = cuda
        .iter()
        .filter(|process| process.found == Some(CudaState::Running) && last(process))
        .cloned()
        .collect();
    // The members of a job are locked one by one, and could wait for one that is.
    let together = if entry.job.is_some() { 1 } else { pending.len().max(1) };
    let peers = cuda.len() > 1;
    let (mut first, mut attempts) = (FIRST_ATTEMPT, 0);
    while !pending.is_empty() {
        attempts += 1;
        let asked = pids(&pending[..together.min(pending.len())]);
        let left = deadline.saturating_duration_since(Instant::now());
        let mut holding =
            Holding { hold: &mut *parts.hold, processes: parts.processes, freezer: parts.freezer };
        let mut let_out = Ok(());
        let answers = parts.driver.lock(&asked, first.min(left).max(SHORTEST), &mut || {
            if held {
                let_out = holding.all(cuda, |process| {
                    if peers && attempts > 1 {
                        Keep::All
                    } else {
                        Keep::InsideCalls(process.restore_thread)
                    }
                });
            }
        });
        let_out?;
        // Granted, or there was none: nobody is to wait for a locked one.
        parts.driver.unlock(&asked, STATE);
        let not_ready = |process: &CudaProcess| {
            let answer = answers.get(&process.pid()).and_then(|answer| answer.as_ref().err());
            answer.is_some_and(|error| {
                matches!(error.code(), Some(CudaError::NOT_READY | CudaError::TIMEOUT) | None)
            })
        };
        pending.retain(|process| !asked.contains(&process.pid()) || not_ready(process));
        let Some(waits) = pending.iter().find(|process| not_ready(process)) else { continue };
        if Instant::now() >= deadline {
            let (container, pid) = (&entry.container, waits.pid());
            tracing::warn!(
                container,
                pid,
                "a lock whose caller was lost may still be granted later; the next operation waits again"
            );
            break;
        }
        if held && peers && attempts == 1 {
            runs_although_paused(&entry.container, &waits.who());
        }
        first *= 2;
        if answers.values().any(|answer| answer.as_ref().is_err_and(|e| e.code().is_none())) {
            // A helper that cannot be had fails at once.
            std::thread::sleep(PAUSE);
        }
    }
    if held {
        parts.holding().all(cuda, driver_runs)?;
        parts.hold.settle()?;
    }
    Ok(!pending.is_empty())
}

/// 0 would mean no limit to the driver.
const SHORTEST: Duration = Duration::from_millis(1);

/// With [`Steps::Toggle`](crate::cuda::Steps): a process that seems to run may be LOCKED, if a toggle
/// was refused or lost. So those that seem to are toggled: one that is LOCKED refuses, and nothing
/// unlocks it; the others are CHECKPOINTED then, and given back with the rest.
pub(crate) fn clear_up(
    parts: &mut Parts<'_>,
    cuda: &[CudaProcess],
    held: bool,
    timeout: Duration,
) -> Result<(), Cause> {
    let ran = |process: &&CudaProcess| process.found == Some(CudaState::Running);
    let asked: Vec<_> = cuda.iter().filter(ran).map(CudaProcess::pid).collect();
    let mut holding =
        Holding { hold: &mut *parts.hold, processes: parts.processes, freezer: parts.freezer };
    let mut let_out = Ok(());
    let answers = parts.driver.lock(&asked, timeout, &mut || {
        if held {
            let_out = holding.all(cuda, |process| Keep::InsideCalls(process.restore_thread));
        }
    });
    let_out?;
    if held {
        parts.holding().all(cuda, driver_runs)?;
        parts.hold.settle()?;
    }
    for (pid, answer) in answers {
        if let Err(error) = answer
            && error.code() != Some(CudaError::ILLEGAL_STATE)
        {
            tracing::warn!(pid, %error, "it is not known whether it is locked");
        }
    }
    Ok(())
}

/// Waits until the GPUs have room for what `waiting` needs. A restore without enough memory is
/// final: it returns 2 and from then on 304, also when memory is free again (measured on 580). So
/// it is not tried before there is room.
fn wait_for_memory(
    driver: &mut dyn Driver,
    waiting: &[CudaProcess],
    deadline: Instant,
) -> Result<(), Cause> {
    loop {
        let Some(free) = driver.free_memory() else { return Ok(()) };
        let mut needed: BTreeMap<&str, u64> = BTreeMap::new();
        for (gpu, bytes) in waiting.iter().flat_map(|process| &process.uses.gpus) {
            *needed.entry(gpu).or_default() += bytes.unwrap_or(0);
        }
        let short = needed.iter().find_map(|(gpu, needed)| {
            let free = *free.get(*gpu)?;
            (free < *needed).then(|| Cause::NoRoom {
                gpu: (*gpu).to_owned(),
                needed: *needed,
                free,
            })
        });
        match short {
            None => return Ok(()),
            Some(cause) if Instant::now() >= deadline => return Err(cause),
            Some(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// What a refusal may mean.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How {
    /// The processes are members of a job.
    pub(crate) in_job: bool,
    /// They go to other GPUs than those that they came from.
    pub(crate) mapped: bool,
}

/// From CHECKPOINTED to LOCKED, all that were not found CHECKPOINTED. Memory may be short because
/// another job took it, and be free again in a moment; other errors are tried again a few times.
pub(crate) fn restore(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    how: How,
    limit: Duration,
) -> Result<(), Cause> {
    let deadline = Instant::now() + limit;
    let mut attempts = 0;
    loop {
        // The first look may have to wait for an operation whose caller was killed.
        let left = deadline.saturating_duration_since(Instant::now()).max(STATE);
        let waiting = checkpointed(driver, processes, cuda, left)?;
        if waiting.is_empty() {
            return Ok(());
        }
        wait_for_memory(driver, &waiting, deadline)?;
        attempts += 1;
        let left = deadline.saturating_duration_since(Instant::now()).max(STATE);
        let mut answers = driver.restore(&pids(&waiting), left);
        let failed = waiting.iter().find_map(|process| match answers.remove(&process.pid()) {
            Some(Err(error)) => Some((process.who(), error)),
            _ => None,
        });
        let Some((who, error)) = failed else {
            // Read again by the next round; a success code with the old state must not go on
            // for ever.
            if attempts < ATTEMPTS {
                continue;
            }
            return verify(driver, processes, &waiting, |_| CudaState::Locked, STATE);
        };
        if error.code() == Some(CudaError::INVALID_VALUE) {
            // A refused list harms nothing, and another one can be tried (measured on 580).
            if how.mapped {
                return Err(Cause::NotThere { who, error });
            }
            if !how.in_job && may_share(cuda) {
                return Err(Cause::SharedLost { who, error });
            }
        }
        let passing = error.code() == Some(CudaError::OUT_OF_MEMORY);
        if Instant::now() >= deadline || (!passing && attempts >= ATTEMPTS) {
            // A lost caller is not a lost operation: the state has the last word.
            if checkpointed(driver, processes, cuda, STATE)?.is_empty() {
                return Ok(());
            }
            return Err(Cause::Driver { who, error });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether any may have had memory in common with another, or GPUs with each other.
fn may_share(cuda: &[CudaProcess]) -> bool {
    cuda.len() > 1 || cuda.iter().any(|process| process.uses.gpus.len() > 1)
}

/// Those that are CHECKPOINTED and were not found so.
fn checkpointed(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    limit: Duration,
) -> Result<Vec<CudaProcess>, Cause> {
    let mut states = driver.states(&pids(cuda), limit);
    let mut waiting = Vec::new();
    for process in cuda {
        match states.remove(&process.pid()) {
            Some(Ok(CudaState::Checkpointed)) if process.found != Some(CudaState::Checkpointed) => {
                waiting.push(process.clone());
            }
            Some(Ok(
                state @ (CudaState::Failed | CudaState::Unknown(_) | CudaState::Undetermined),
            )) => {
                return Err(Cause::Unusable { who: process.who(), state });
            }
            Some(Err(error)) if processes.alive(process.process.id) => {
                return Err(Cause::Driver { who: process.who(), error });
            }
            _ => {}
        }
    }
    Ok(waiting)
}

/// From LOCKED to RUNNING, all that were found RUNNING.
pub(crate) fn unlock(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    limit: Duration,
) -> Result<(), Cause> {
    let asked: Vec<CudaProcess> =
        cuda.iter().filter(|process| process.found == Some(CudaState::Running)).cloned().collect();
    // It takes a millisecond or so; what takes longer than this will not come.
    let limit = limit.min(STATE);
    let mut attempts = 0;
    loop {
        attempts += 1;
        let answers = driver.unlock(&pids(&asked), limit);
        let done = check(processes, answers, &asked).and_then(|()| {
            verify(
                driver,
                processes,
                cuda,
                |process| process.found.unwrap_or(CudaState::Running),
                limit,
            )
        });
        match done {
            Ok(()) => return Ok(()),
            Err(cause @ Cause::Driver { .. }) if attempts >= ATTEMPTS => {
                // As for restore: the call may have been lost and its work done, or been refused
                // where nothing was locked, because the container has replaced its job file.
                let found = |process: &CudaProcess| process.found.unwrap_or(CudaState::Running);
                return verify(driver, processes, cuda, found, limit).map_err(|_| cause);
            }
            Err(cause) if attempts >= ATTEMPTS => return Err(cause),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
