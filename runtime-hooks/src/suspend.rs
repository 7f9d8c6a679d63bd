//! Suspending: from running or frozen to frozen with all CUDA state in host memory.
//!
//! ```text
//! [frozen on entry: hold all threads but the driver's, thaw]
//!   → lock all at the same moment (in a job one after the other) → look for new ones, until there are none
//!   → hold all but the restore threads → checkpoint all → freeze → let go → look again
//! ```
//!
//! Where lock and checkpoint are one step ([`Steps::Toggle`]) that is done where otherwise all are
//! locked, and what is done after the look for new ones finds all CHECKPOINTED.
//!
//! Nothing here cleans up: whoever calls brings everything back with [`crate::bring_back`], from
//! the journal's entry and from what the driver then says.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::cuda::{Answers, CudaError, CudaState, Driver, GpuUse, Steps};
use crate::discover::{Gate, find_uses, newcomers, refuse_strays};
use crate::error::{Cause, Phase, Who};
use crate::gpu_locks::{GpuLocks, Locked};
use crate::hold::Keep;
use crate::journal::{Entry, Noted, Stage};
use crate::parts::{CudaProcess, Holding, Limits, Parts, Progress, pids};
use crate::processes::{Pid, Processes};
use crate::{host_memory, in_turn, job};

/// How long a state may take to be told when no long operation is under way.
pub(crate) const STATE: Duration = Duration::from_secs(30);
/// The first attempt to lock; the next ones get twice as long each, up to [`LONGEST_ATTEMPT`]. Not all
/// the time at once, so that an interrupt is heard, and that processes that keep each other from being
/// ready in a way that nobody thought of get on in between.
pub(crate) const FIRST_ATTEMPT: Duration = Duration::from_secs(2);
/// A person who has pressed ^C does not wait longer for an answer. Work of any length comes to its end
/// in one of the attempts.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(8);
/// Between two attempts, so that the processes get on with what they wait for.
const PAUSE: Duration = Duration::from_millis(20);

/// Suspends. On success every process of the container is frozen, `cuda` are all its CUDA
/// processes, and each is CHECKPOINTED.
pub fn suspend(
    parts: &mut Parts<'_>,
    entry: &mut Entry,
    cuda: &mut Vec<CudaProcess>,
    gate: &Gate<'_>,
    limits: &Limits,
    progress: &mut Progress,
) -> Result<(), Cause> {
    let steps = parts.driver.steps().map_err(Cause::NoDriver)?;
    let lock = if steps == Steps::Toggle { Phase::CudaCheckpoint } else { Phase::Lock };
    in_order(cuda, entry);
    if entry.frozen {
        // A frozen process answers no driver call: the freezer is replaced by ptrace, which
        // leaves the driver's threads alone.
        progress.enter(Phase::Hold);
        parts.holding().all(cuda, driver_runs)?;
        parts.freezer.thaw()?;
        parts.hold.settle()?;
    }
    progress.enter(lock);
    find_states(parts, entry, cuda)?;
    if let Err(cause) = refuse_unordered(entry, cuda) {
        // None was asked for.
        entry.locking = false;
        return Err(cause);
    }
    // Where the lock is the checkpoint.
    let mut free = if steps == Steps::Toggle { parts.driver.free_memory() } else { None };
    let deadline = Instant::now() + limits.lock;
    loop {
        lock_all(parts, entry, cuda, steps, deadline, limits)?;
        let mut new = newcomers(parts, cuda)?;
        if new.is_empty() {
            progress.enter(Phase::Hold);
            parts.holding().all(cuda, restore_thread_runs)?;
            parts.hold.settle()?;
            // From here on none can start CUDA; one that did just before is found now.
            new = newcomers(parts, cuda)?;
            if new.is_empty() {
                break;
            }
            progress.enter(lock);
        }
        cuda.extend(new);
        in_order(cuda, entry);
        // Before they are noted: one of another job is not to be asked anything in this one.
        if gate.driver_may_have_jobs {
            job::confirm(parts.driver, parts.processes, cuda, entry)?;
        }
        // Until now it was held like a process without CUDA, with the driver's threads.
        if entry.frozen {
            parts.holding().all(cuda, driver_runs)?;
            parts.hold.settle()?;
        } else {
            parts.hold.release();
        }
        find_states(parts, entry, cuda)?;
        refuse_unordered(entry, cuda)?;
        // They matter to CRIU only.
        if entry.stage != Stage::Freeing {
            refuse_strays(parts.processes, cuda, entry.init.pid)?;
        }
        gate.check(cuda, entry.job.is_some())?;
        if Instant::now() >= deadline
            && let Some(last) = cuda.last()
        {
            return Err(Cause::Appeared { who: last.who() });
        }
    }
    interruptible(parts)?;
    // It ran until now, and may have allocated more.
    find_uses(parts, cuda);
    entry.processes = cuda.iter().map(Noted::from).collect();
    if steps == Steps::Separate {
        host_memory::require(parts.memory, cuda)?;
        free = parts.driver.free_memory();
    }
    parts.journal.save(entry)?;

    progress.enter(Phase::CudaCheckpoint);
    checkpoint_all(parts, cuda, limits, entry.job.is_some())?;
    add_besides(parts.driver, cuda, free);
    entry.processes = cuda.iter().map(Noted::from).collect();
    interruptible(parts)?;

    progress.enter(Phase::Freeze);
    freeze(parts, entry)?;
    parts.hold.release();
    forget_ended(parts.processes, cuda, entry.job.is_some())?;
    // `runc exec` may have brought a process into the container meanwhile.
    match newcomers(parts, cuda)?.first() {
        Some(new) => Err(Cause::Appeared { who: new.who() }),
        None => Ok(()),
    }
}

/// Tells the driver which processes the operation of this entry has left CHECKPOINTED.
pub(crate) fn recall(parts: &mut Parts<'_>, entry: &Entry) {
    if !parts.driver.steps().is_ok_and(|steps| steps == Steps::Toggle) {
        return;
    }
    let there = entry.left_checkpointed().filter(|id| parts.processes.alive(*id));
    let pids: Vec<Pid> = there.map(|id| id.pid).collect();
    let uses = parts.driver.usage(&pids).unwrap_or_default();
    parts.driver.recall(&off_gpu(pids, &uses));
}

/// Those that NVML does not know to use a GPU. One that does has come back since it was CHECKPOINTED, and
/// for it room would be looked for that it has.
pub(crate) fn off_gpu(
    pids: impl IntoIterator<Item = Pid>,
    uses: &BTreeMap<Pid, GpuUse>,
) -> Vec<Pid> {
    let is_off = |pid: &Pid| uses.get(pid).is_none_or(|uses| uses.gpus.is_empty());
    pids.into_iter().filter(is_off).collect()
}

/// Freezes the container. It is noted before, so that a repair can tell it from somebody else's pause.
pub(crate) fn freeze(parts: &mut Parts<'_>, entry: &mut Entry) -> Result<(), Cause> {
    if !entry.frozen && parts.freezer.frozen()? {
        return Err(Cause::Paused);
    }
    entry.freezes = true;
    parts.journal.save(entry)?;
    Ok(parts.freezer.freeze()?)
}

/// One that has ended since it was found is in no image. In a job it stands in the job file, and the
/// others cannot be restored without it.
fn forget_ended(
    processes: &dyn Processes,
    cuda: &mut Vec<CudaProcess>,
    in_job: bool,
) -> Result<(), Cause> {
    if let Some(ended) = cuda.iter().find(|process| {
        let id = process.process.id;
        // Killed and frozen, it is in the image and has no future.
        processes.ending(id) && (in_job || processes.alive(id))
    }) {
        return Err(Cause::Ended { who: ended.who() });
    }
    cuda.retain(|process| processes.alive(process.process.id));
    if cuda.is_empty() { Err(Cause::Gone) } else { Ok(()) }
}

/// The order in which a job's members are locked, checkpointed, and later restored and unlocked. By
/// what stays the same over a restore; those that are suspended come first, as they were CHECKPOINTED.
fn in_order(cuda: &mut [CudaProcess], entry: &Entry) {
    cuda.sort_by_key(|process| {
        (position(entry, process).unwrap_or(usize::MAX), process.process.inner_pid)
    });
}

/// When it was suspended, among those that were, if Stasis has.
fn position(entry: &Entry, process: &CudaProcess) -> Option<usize> {
    let earlier = entry.suspended.as_ref()?;
    earlier.processes.iter().position(|noted| noted.id == process.process.id)
}

/// The members of a job are restored in the order in which they were CHECKPOINTED. So that has to be known
/// of those that are; and none may be CHECKPOINTED after them that is to come back, or to be restored from
/// an image, while they stay so.
fn refuse_unordered(entry: &Entry, cuda: &[CudaProcess]) -> Result<(), Cause> {
    let (off, on): (Vec<_>, Vec<_>) =
        cuda.iter().partition(|process| process.found == Some(CudaState::Checkpointed));
    let Some(first) = off.first().filter(|_| entry.job.is_some() && cuda.len() > 1) else {
        return Ok(());
    };
    if let Some(unknown) = off.iter().find(|process| position(entry, process).is_none()) {
        return Err(Cause::JobOrder { who: unknown.who() });
    }
    match on.first() {
        // Suspended, all of them stay so until all come back.
        Some(on) if entry.stage != Stage::Freeing => {
            Err(Cause::JobInParts { on: on.who(), off: first.who() })
        }
        _ => Ok(()),
    }
}

/// A process takes more of a GPU than NVML says that it uses (measured on 580: 6 MiB, and 9 if there is no
/// other), and a restore that lacks it is final. How much more is told by what became free, as far as that
/// cannot have been another's: at most this much for each process.
const BESIDES: u64 = 32 << 20;

/// Adds that to what the processes use. `before` is what was free while they were on their GPUs.
fn add_besides(
    driver: &mut dyn Driver,
    cuda: &mut [CudaProcess],
    before: Option<BTreeMap<String, u64>>,
) {
    let (Some(before), Some(now)) = (before, driver.free_memory()) else { return };
    for (gpu, now) in now {
        let moved = |process: &&mut CudaProcess| process.found != Some(CudaState::Checkpointed);
        let used: Vec<&mut u64> = cuda
            .iter_mut()
            .filter(moved)
            .flat_map(|process| &mut process.uses.gpus)
            .filter_map(|(uuid, bytes)| bytes.as_mut().filter(|_| *uuid == gpu))
            .collect();
        let known: u64 = used.iter().map(|bytes| **bytes).sum();
        let freed = now.saturating_sub(before.get(&gpu).copied().unwrap_or(now));
        let each = u64::try_from(used.len()).unwrap_or(u64::MAX);
        let besides = freed.saturating_sub(known).min(BESIDES.saturating_mul(each));
        // Any of them may end before the others come back.
        for bytes in used {
            *bytes += besides.div_ceil(each);
        }
    }
}

/// An error if the caller wants no more.
pub(crate) fn interruptible(parts: &Parts<'_>) -> Result<(), Cause> {
    if (parts.interrupted)() { Err(Cause::Interrupted) } else { Ok(()) }
}

/// Learns in which state each is, and notes it where a later repair finds it.
fn find_states(
    parts: &mut Parts<'_>,
    entry: &mut Entry,
    cuda: &mut Vec<CudaProcess>,
) -> Result<(), Cause> {
    let unknown: Vec<Pid> =
        cuda.iter().filter(|process| process.found.is_none()).map(CudaProcess::pid).collect();
    let mut states = parts.driver.states(&unknown, STATE);
    let mut failed = None;
    cuda.retain_mut(|process| {
        match states.remove(&process.pid()) {
            Some(Ok(state)) => process.found = Some(state),
            Some(Err(_)) if !parts.processes.alive(process.process.id) => return false,
            Some(Err(error)) => {
                failed.get_or_insert(Cause::Driver { who: process.who(), error });
            }
            None => {}
        }
        true
    });
    if let Some(cause) = failed {
        return Err(cause);
    }
    for process in cuda.iter() {
        if let Some(state @ (CudaState::Failed | CudaState::Unknown(_) | CudaState::Undetermined)) =
            process.found
        {
            return Err(Cause::Unusable { who: process.who(), state });
        }
    }
    if cuda.is_empty() {
        return Err(Cause::Gone);
    }
    find_uses(parts, cuda);
    entry.processes = cuda.iter().map(Noted::from).collect();
    entry.locking = true;
    parts.journal.save(entry)?;
    Ok(())
}

/// Where lock and checkpoint are one step, those that took it get their memory back when another one does
/// not come to rest. Meanwhile no restore of ours is to take it: without room theirs is final.
pub(crate) fn keep_room(locks: &dyn GpuLocks, cuda: &[CudaProcess]) -> Option<Locked> {
    let gpus = cuda.iter().flat_map(|process| &process.uses.gpus);
    let gpus: BTreeSet<&str> = gpus.map(|(uuid, _)| uuid.as_str()).collect();
    // One that restores just now has looked for room with all of this in its place.
    locks.try_lock(&gpus).unwrap_or_else(|error| {
        tracing::warn!(%error, "GPU memory is not kept from restores");
        None
    })
}

/// Locks all, however often it takes. If one is not ready in time all are unlocked and get a
/// little time.
fn lock_all(
    parts: &mut Parts<'_>,
    entry: &mut Entry,
    cuda: &[CudaProcess],
    steps: Steps,
    deadline: Instant,
    limits: &Limits,
) -> Result<(), Cause> {
    let running: Vec<&CudaProcess> =
        cuda.iter().filter(|process| process.found == Some(CudaState::Running)).collect();
    if running.is_empty() {
        return verify_locked(parts, cuda);
    }
    let asked: Vec<Pid> = running.iter().map(|process| process.pid()).collect();
    if entry.job.is_some() && running.len() > 1 {
        return in_turn::lock(parts, entry, cuda, deadline, limits);
    }
    let mut attempts = 0;
    let mut timeout = FIRST_ATTEMPT;
    loop {
        interruptible(parts)?;
        attempts += 1;
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout_now = timeout.min(left).max(Duration::from_millis(1));
        let mut holding =
            Holding { hold: &mut *parts.hold, processes: parts.processes, freezer: parts.freezer };
        let (mut let_go, mut waited) = (Ok(()), 0);
        let kept = (steps == Steps::Toggle).then(|| keep_room(parts.gpu_locks, cuda));
        let answers = parts.driver.lock(&asked, timeout_now, &mut || {
            waited += 1;
            // A thread inside a synchronising CUDA call has to come out of it before the driver
            // can lock. It runs on, but not so far that anybody would see it: what was paused
            // stays paused. Only where several processes use CUDA, and one may be waiting for
            // what another has yet to say, do they run for real when that did not suffice, each
            // until its next CUDA call, which the requested lock blocks.
            if entry.frozen {
                let free = cuda.len() > 1 && (attempts > 1 || waited > 1);
                let_go = holding.all(cuda, |process| {
                    if free { Keep::All } else { Keep::InsideCalls(process.restore_thread) }
                });
            }
        });
        drop(kept);
        if entry.frozen {
            holding.all(cuda, driver_runs)?;
            holding.hold.settle()?;
        }
        let_go?;
        if entry.frozen && waited > 1 {
            runs_although_paused(&entry.container, &running[0].who());
        }
        entry.locking = answers.values().any(|answer| match (steps, answer) {
            (Steps::Separate, answer) => answer.as_ref().is_err_and(|error| error.code().is_none()),
            // Only one that was brought back is as it was. From here on a step that is lost may leave
            // a process LOCKED that seems to run.
            (Steps::Toggle, Ok(())) => true,
            (Steps::Toggle, Err(error)) => error.code() != Some(CudaError::NOT_READY),
        });
        // Only now, with all calls back: while a peer is locked, a rank may answer nothing.
        let mut not_ready = Vec::new();
        for process in &running {
            match answers.get(&process.pid()) {
                Some(Ok(())) | None => {}
                Some(Err(error)) => match error.code() {
                    Some(CudaError::NOT_READY | CudaError::TIMEOUT) => not_ready.push(*process),
                    // It may be locked already; the state tells.
                    Some(CudaError::ILLEGAL_STATE) => {}
                    _ if !parts.processes.alive(process.process.id) => {}
                    _ => {
                        return Err(Cause::Driver { who: process.who(), error: error.clone() });
                    }
                },
            }
        }
        let Some(first) = not_ready.first() else {
            return match steps {
                Steps::Separate => verify_locked(parts, cuda),
                Steps::Toggle => verify_checkpointed(parts, cuda, STATE),
            };
        };
        if Instant::now() >= deadline {
            return Err(Cause::NotReady { who: first.who(), waited: limits.lock, attempts });
        }
        if entry.frozen && cuda.len() > 1 && attempts == 1 {
            runs_although_paused(&entry.container, &first.who());
        }
        let locked: Vec<Pid> = asked
            .iter()
            .copied()
            .filter(|pid| !not_ready.iter().any(|process| process.pid() == *pid))
            .collect();
        let answers = parts.driver.unlock(&locked, STATE);
        check(parts.processes, answers, cuda)?;
        std::thread::sleep(PAUSE);
        timeout = (timeout * 2).min(LONGEST_ATTEMPT);
    }
}

/// Whoever paused the container is told that the pause was not kept, since files that were copied
/// meanwhile may be older than the memory.
pub(crate) fn runs_although_paused(container: &str, waits: &Who) {
    tracing::warn!(
        container,
        process = %waits,
        "it waits for work of the container's other processes: although the container is paused, \
         their own code runs, each to its next CUDA launch, until all can be locked"
    );
}

/// All are LOCKED, but those that were found CHECKPOINTED.
pub(crate) fn verify_locked(parts: &mut Parts<'_>, cuda: &[CudaProcess]) -> Result<(), Cause> {
    let wanted = |process: &CudaProcess| match process.found {
        Some(CudaState::Checkpointed) => CudaState::Checkpointed,
        _ => CudaState::Locked,
    };
    verify(parts.driver, parts.processes, cuda, wanted, STATE)
}

/// What runs while the driver locks.
pub(crate) fn driver_runs(process: &CudaProcess) -> Keep {
    Keep::Driver(process.restore_thread)
}

/// What runs while the driver checkpoints.
fn restore_thread_runs(process: &CudaProcess) -> Keep {
    Keep::RestoreThread(process.restore_thread)
}

fn checkpoint_all(
    parts: &mut Parts<'_>,
    cuda: &[CudaProcess],
    limits: &Limits,
    in_job: bool,
) -> Result<(), Cause> {
    let asked: Vec<Pid> = cuda
        .iter()
        .filter(|process| process.found != Some(CudaState::Checkpointed))
        .map(CudaProcess::pid)
        .collect();
    let answers = parts.driver.checkpoint(&asked, limits.checkpoint);
    check(parts.processes, answers, cuda)?;
    // Those after it were not asked, and are not to be named for it.
    let ended = |process: &&CudaProcess| in_job && parts.processes.ending(process.process.id);
    if let Some(process) = cuda.iter().find(ended) {
        return Err(Cause::Ended { who: process.who() });
    }
    verify_checkpointed(parts, cuda, limits.checkpoint)
}

fn verify_checkpointed(
    parts: &mut Parts<'_>,
    cuda: &[CudaProcess],
    limit: Duration,
) -> Result<(), Cause> {
    verify(parts.driver, parts.processes, cuda, |_| CudaState::Checkpointed, limit)
}

/// The first error among answers, with the name of its process. 'Illegal state' is none: the
/// process may be where it should be, and the state that is read next tells.
/// A process that ended by itself is none either.
pub(crate) fn check(
    processes: &dyn Processes,
    mut answers: Answers<()>,
    cuda: &[CudaProcess],
) -> Result<(), Cause> {
    for process in cuda {
        match answers.remove(&process.pid()) {
            Some(Err(error))
                if error.code() != Some(CudaError::ILLEGAL_STATE)
                    && processes.alive(process.process.id) =>
            {
                return Err(Cause::Driver { who: process.who(), error });
            }
            _ => {}
        }
    }
    Ok(())
}

/// The driver is asked, not believed: a success code with another state is a failure.
pub(crate) fn verify(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    wanted: impl Fn(&CudaProcess) -> CudaState,
    limit: Duration,
) -> Result<(), Cause> {
    let mut states = driver.states(&pids(cuda), limit);
    for process in cuda {
        let wanted = wanted(process);
        match states.remove(&process.pid()) {
            Some(Ok(found)) if found == wanted => {}
            _ if !processes.alive(process.process.id) => {}
            Some(Ok(found)) => {
                return Err(Cause::WrongState { who: process.who(), found, wanted });
            }
            Some(Err(error)) => {
                return Err(Cause::Driver { who: process.who(), error });
            }
            None => return Err(Cause::Gone),
        }
    }
    Ok(())
}
