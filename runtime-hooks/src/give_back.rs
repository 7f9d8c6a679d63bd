//! Giving CUDA back: from CHECKPOINTED by way of LOCKED to the state in which each process was
//! found. Used after a dump, after a failure and after a restore.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::cuda::{Answers, CudaError, CudaState, Driver};
use crate::error::Cause;
use crate::gpu_locks::{GpuLocks, Locked};
use crate::hold::Keep;
use crate::journal::Entry;
use crate::parts::{CudaProcess, Holding, Parts, pids};
use crate::processes::Processes;
use crate::suspend::{
    FIRST_ATTEMPT, STATE, check, driver_runs, keep_room, runs_although_paused, verify,
};

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
    let kept = keep_room(parts.gpu_locks, cuda);
    let answers = parts.driver.lock(&asked, timeout, &mut || {
        if held {
            let_out = holding.all(cuda, |process| Keep::InsideCalls(process.restore_thread));
        }
    });
    drop(kept);
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

/// Waits until the GPUs have room for what `waiting` needs, and nobody else is restoring onto them; until
/// what this gives is dropped, nobody else begins. A restore without enough memory is final (see
/// [`gpu_locks`](crate::gpu_locks)), so it is not tried before there is room.
fn wait_for_room(
    driver: &mut dyn Driver,
    waiting: &[CudaProcess],
    how: &How<'_>,
    deadline: Instant,
) -> Result<Option<Locked>, Cause> {
    let mut needed: BTreeMap<&str, u64> = BTreeMap::new();
    for (gpu, bytes) in waiting.iter().flat_map(|process| &process.uses.gpus) {
        *needed.entry(gpu).or_default() += bytes.unwrap_or(0);
    }
    let gpus: BTreeSet<&str> = needed.keys().copied().collect();
    // The other one's restore comes to its end.
    let patience = Instant::now() + how.limit;
    loop {
        if (how.given_up)() {
            return Err(Cause::Interrupted);
        }
        let mut short = lacks(driver, &needed);
        if short.is_none() {
            let locked = how.locks.try_lock(&gpus).unwrap_or_else(|error| {
                tracing::warn!(%error, "GPU memory is not kept from other restores");
                Some(Locked::default())
            });
            // Whoever had the lock before has taken memory since.
            short = lacks(driver, &needed);
            match (&short, locked) {
                (None, Some(locked)) => return Ok(Some(locked)),
                (None, None) if Instant::now() >= patience => {
                    tracing::warn!(
                        ?gpus,
                        "another restore onto the GPU lasts; it is not waited for"
                    );
                    return Ok(None);
                }
                _ => {}
            }
        }
        match short {
            Some(cause) if Instant::now() >= deadline => return Err(cause),
            _ => std::thread::sleep(PAUSE),
        }
    }
}

/// The first GPU whose free memory does not suffice, or that has gone. None also if nothing is known of any.
fn lacks(driver: &mut dyn Driver, needed: &BTreeMap<&str, u64>) -> Option<Cause> {
    let all = driver.free_memory()?;
    needed.iter().find_map(|(gpu, needed)| {
        let needed = *needed;
        let Some(&free) = all.get(*gpu) else {
            return Some(Cause::SilentGpu { gpu: (*gpu).to_owned() });
        };
        (free < needed).then(|| Cause::NoRoom { gpu: (*gpu).to_owned(), needed, free })
    })
}

/// How CUDA is given back.
pub(crate) struct How<'a> {
    /// The processes are members of a job.
    pub(crate) in_job: bool,
    /// So long room on the GPUs is waited for.
    pub(crate) room: Duration,
    /// So long the rest may take.
    pub(crate) limit: Duration,
    /// Whether nobody waits for room any more.
    pub(crate) given_up: &'a dyn Fn() -> bool,
    /// Against others that restore.
    pub(crate) locks: &'a dyn GpuLocks,
}

/// From CHECKPOINTED to LOCKED, all that were not found CHECKPOINTED. Memory may be short because
/// another job took it, and be free again in a moment; other errors are tried again a few times.
pub(crate) fn restore(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    how: &How<'_>,
) -> Result<(), Cause> {
    let room = Instant::now() + how.room;
    let mut deadline = None;
    let mut attempts = 0;
    let mut out_of_memory = None;
    let mut locked = None;
    loop {
        let left =
            |deadline: Instant| deadline.saturating_duration_since(Instant::now()).max(STATE);
        // The first look may have to wait for an operation whose caller was killed.
        let limit = deadline.map_or(how.limit.max(STATE), left);
        let waiting = checkpointed(driver, processes, cuda, limit)?;
        // Not before: a restore whose caller was lost goes on until the states are told.
        drop(locked.take());
        if waiting.is_empty() {
            return Ok(());
        }
        match (wait_for_room(driver, &waiting, how, room), out_of_memory.take()) {
            (Ok(got), _) => locked = got,
            // What has happened is worse.
            (Err(_), Some((who, error))) => return Err(Cause::Driver { who, error }),
            (Err(cause), None) => return Err(cause),
        }
        let deadline = *deadline.get_or_insert_with(|| Instant::now() + how.limit);
        attempts += 1;
        let mut answers = restore_each(driver, &waiting, left(deadline));
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
            if waiting
                .iter()
                .any(|process| process.pid() == who.pid && !process.device_map.is_empty())
            {
                return Err(Cause::NotThere { who, error });
            }
            if !how.in_job && may_share(cuda) && has_gpus(driver, cuda) {
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
        if passing {
            out_of_memory = Some((who, error));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Those that go to the same GPUs at the same time, in their order.
fn restore_each(driver: &mut dyn Driver, waiting: &[CudaProcess], limit: Duration) -> Answers<()> {
    let mut answers = Answers::new();
    for together in waiting.chunk_by(|one, next| one.device_map == next.device_map) {
        driver.map_devices(&together[0].device_map);
        let given = driver.restore(&pids(together), limit);
        let failed = given.values().any(Result::is_err);
        answers.extend(given);
        if failed {
            break;
        }
    }
    answers
}

/// Whether all the GPUs of these processes are there: without them the driver's answer is the same.
fn has_gpus(driver: &mut dyn Driver, cuda: &[CudaProcess]) -> bool {
    let Ok(facts) = driver.facts() else { return true };
    let is_there = |uuid: &str| facts.gpus.iter().any(|gpu| gpu.uuid == uuid);
    facts.gpus.is_empty()
        || cuda.iter().flat_map(|process| &process.uses.gpus).all(|(uuid, _)| is_there(uuid))
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
    let deadline = Instant::now() + limit;
    let mut states = driver.states(&pids(cuda), limit);
    // The operation of a killed caller is still under way.
    while states.values().any(|state| state.as_ref().is_ok_and(|state| state.passes()))
        && Instant::now() < deadline
    {
        std::thread::sleep(PAUSE);
        states = driver.states(&pids(cuda), limit);
    }
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
