//! Suspending the CUDA of a container that goes on, and giving it back: `stasis suspend` and
//! `stasis resume`.
//!
//! ```text
//! suspend: preflight → journal → suspend (lock all, checkpoint all, frozen) → journal → thaw
//! resume:  journal → [hold, thaw] → restore all → unlock all → [freeze] → journal
//! ```
//!
//! Meanwhile the container's processes run, and wait where they call CUDA; its GPU is free. All of its
//! CUDA processes are suspended, or none.

use std::time::Duration;

use crate::bring_back::{
    Back, Goal, Thaw, bring_back, fail, forget, has_ended, kill, log_of, processes_of,
};
use crate::checkpoint::require_actions;
use crate::container::Container;
use crate::cuda::{CudaState, DriverFacts, Gpu, Steps};
use crate::discover::{Gate, find_uses};
use crate::error::{Cause, Failure, Left, Phase};
use crate::freezer::FreezerError;
use crate::host_memory;
use crate::job::{self, Membership};
use crate::journal::{Entry, Noted, Stage};
use crate::parts::{CudaProcess, Limits, Parts, Progress, pids};
use crate::processes::{Pid, ProcessId};
use crate::remap::DeviceMap;
use crate::suspend::{STATE, check, driver_runs, recall, verify};

/// A suspension that is asked for.
#[derive(Debug)]
pub struct Request<'a> {
    /// Of which container.
    pub container: &'a Container,
    /// What its annotations allow.
    pub annotations: &'a stasis_config::Annotations,
    /// The first branch of the driver whose jobs are relied on.
    pub minimum_driver: u32,
    /// Whether the container was given a job file.
    pub given_job: bool,
    /// What an earlier suspension has noted, if it still lasts.
    pub earlier: Option<&'a Entry>,
    /// How long things may take.
    pub limits: Limits,
}

/// What a suspension has done.
#[derive(Debug)]
pub struct Suspended {
    /// What the journal says of it.
    pub entry: Entry,
    /// The processes that were on a GPU until then.
    pub freed: Vec<Noted>,
}

/// Suspends. On success all CUDA processes of the container are CHECKPOINTED, the journal says so, and
/// it is running or paused as before. `cuda` is what [`crate::discover`] found.
pub fn suspend(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    mut cuda: Vec<CudaProcess>,
    progress: &mut Progress,
) -> Result<Suspended, Failure> {
    const OPERATION: &str = "suspend";
    let begun = preflight(parts, request, &mut cuda);
    let (facts, mut entry) = begun.map_err(|cause| Failure {
        operation: OPERATION,
        container: request.container.id.clone(),
        phase: progress.phase(),
        log: None,
        cause,
        left: Left::Untouched,
        image: None,
    })?;
    let gate = gate(request, &facts);
    let limits = &request.limits;
    let done = crate::suspend::suspend(parts, &mut entry, &mut cuda, &gate, limits, progress)
        .and_then(|()| if entry.frozen { Ok(()) } else { Ok(parts.freezer.thaw()?) })
        // Last: whoever finds it said to be suspended has nothing to put right.
        .and_then(|()| note(parts, &entry, &cuda, facts.steps));
    done.map_err(|cause| fail(parts, OPERATION, &entry, progress.phase(), cause, limits))
}

fn gate<'a>(request: &Request<'a>, facts: &DriverFacts) -> Gate<'a> {
    Gate::new(request.annotations, request.minimum_driver, request.given_job, facts)
}

fn preflight(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    cuda: &mut [CudaProcess],
) -> Result<(DriverFacts, Entry), Cause> {
    let facts = parts.driver.facts().map_err(Cause::NoDriver)?;
    require_actions(&facts)?;
    if let Some(earlier) = request.earlier {
        recall(parts, earlier);
    }
    find_uses(parts, cuda);
    host_memory::require(parts.memory, cuda)?;
    let init = request.container.init;
    let mut entry = Entry::new(&request.container.id, init, parts.freezer.frozen()?, "".as_ref());
    entry.stage = Stage::Freeing;
    entry.job = membership(parts, &facts, cuda, init)?;
    gate(request, &facts).check(cuda, entry.job.is_some())?;
    parts.driver.join(entry.in_job());
    entry.suspended = request.earlier.cloned().map(Box::new);
    parts.journal.save(&entry)?;
    Ok((facts, entry))
}

/// The job that the processes are in, if this driver has jobs.
fn membership(
    parts: &mut Parts<'_>,
    facts: &DriverFacts,
    cuda: &[CudaProcess],
    init: ProcessId,
) -> Result<Option<Membership>, Cause> {
    if !job::may_have(facts) {
        return Ok(None);
    }
    let found = job::find(parts.driver, parts.processes, cuda, init)?;
    Ok(found.map(|found| Membership { job: found.job, origin: None }))
}

/// Notes that it is suspended, and to which states it goes back.
fn note(
    parts: &mut Parts<'_>,
    entry: &Entry,
    cuda: &[CudaProcess],
    steps: Steps,
) -> Result<Suspended, Cause> {
    let mut suspended = entry.as_suspended(steps == Steps::Toggle);
    // Those that have ended since are not waited for.
    suspended.processes.retain(|noted| cuda.iter().any(|known| known.process.id == noted.id));
    parts.journal.save(&suspended)?;
    let on_gpu = |process: &&CudaProcess| process.found != Some(CudaState::Checkpointed);
    let freed = cuda.iter().filter(on_gpu).map(Noted::from).collect();
    Ok(Suspended { entry: suspended, freed })
}

/// What there is to resume in a container that something else than `stasis suspend` has suspended:
/// NVIDIA's `cuda-checkpoint`, called by hand, or a killed process. None if all of its CUDA runs.
pub fn found(
    parts: &mut Parts<'_>,
    container: &Container,
    cuda: &mut [CudaProcess],
) -> Result<Option<Entry>, Cause> {
    let facts = parts.driver.facts().map_err(Cause::NoDriver)?;
    let toggles = facts.steps == Steps::Toggle;
    let mut states = parts.driver.states(&pids(cuda), STATE);
    find_uses(parts, cuda);
    let mut any = false;
    let mut noted = Vec::new();
    for process in cuda.iter_mut() {
        let state = states.remove(&process.pid());
        let unseen = matches!(state, Some(Ok(CudaState::Checkpointed)));
        match state {
            // It is none of this operation's, which checkpoints again what it has to give up. Where the
            // driver cannot be asked it may be one that is LOCKED.
            Some(Ok(CudaState::Running)) if !toggles => continue,
            Some(Ok(CudaState::Running)) => {}
            Some(Ok(CudaState::Checkpointed | CudaState::Locked)) => any = true,
            Some(Ok(state)) => return Err(Cause::Unusable { who: process.who(), state }),
            Some(Err(error)) if parts.processes.alive(process.process.id) => {
                return Err(Cause::Driver { who: process.who(), error });
            }
            _ => continue,
        }
        process.found = Some(CudaState::Running);
        noted.push(Noted { unseen, ..Noted::from(&*process) });
    }
    if !any {
        return Ok(None);
    }
    let mut entry = Entry::new(&container.id, container.init, false, "".as_ref());
    entry.stage = Stage::Suspended;
    entry.locking = toggles;
    entry.job = membership(parts, &facts, cuda, container.init)?;
    entry.processes = noted;
    Ok(Some(entry))
}

/// Gives the container of `entry`, which is suspended, its CUDA back, on other GPUs if `map` says so. If
/// that fails it is suspended as before and can be resumed later, unless the driver has lost what it had.
/// `seen` are the GPUs that its processes may have used.
pub fn resume(
    parts: &mut Parts<'_>,
    entry: &Entry,
    map: Option<DeviceMap>,
    seen: &[Gpu],
    limits: &Limits,
    progress: &mut Progress,
) -> Result<(), Failure> {
    const OPERATION: &str = "resume";
    let mut under_way = entry.clone();
    if let Some(map) = &map {
        for noted in &mut under_way.processes {
            noted.device_map.clone_from(map);
        }
    }
    under_way.freezes = false;
    under_way.stage = Stage::Resuming;
    under_way.suspended = Some(Box::new(entry.clone()));
    estimate(parts, &mut under_way, seen);
    recall(parts, entry);
    // Without a driver nothing is begun.
    let begun = parts.driver.facts().map_err(Cause::NoDriver).and_then(|_| {
        under_way.frozen = parts.freezer.frozen()?;
        if map.is_some_and(|map| !map.is_empty()) && !under_way.frozen {
            all_can_move(parts, entry)?;
        }
        Ok(parts.journal.save(&under_way)?)
    });
    let failure = |phase, cause: Cause, left| Failure {
        operation: OPERATION,
        container: entry.container.clone(),
        phase,
        log: log_of(&cause),
        cause,
        left,
        image: None,
    };
    if let Err(cause) = begun {
        return Err(failure(progress.phase(), cause, Left::Suspended));
    }
    progress.enter(Phase::CudaRestore);
    let goal = if under_way.frozen { Goal::Paused } else { Goal::Running };
    match bring_back(parts, &mut under_way, goal, Thaw::Freezer, limits) {
        Ok(Back::LockPending) => Ok(()),
        Ok(Back::Whole) => {
            forget(parts, &under_way);
            Ok(())
        }
        Err(cause) => {
            let left = stay(parts, &under_way, &cause, limits.checkpoint);
            Err(failure(Phase::CudaRestore, cause, left))
        }
    }
}

/// What something else than Stasis has suspended uses no GPU that anybody could be asked about, and a
/// restore without room is final. So it is taken to need as much as it has in host memory, on any GPU that it
/// sees; of a GPU at most what it has free where nobody else uses it.
fn estimate(parts: &Parts<'_>, under_way: &mut Entry, seen: &[Gpu]) {
    let (mut unseen, known): (Vec<_>, Vec<_>) =
        under_way.processes.iter_mut().partition(|noted| noted.unseen);
    // Once: the kernel goes through all that is mapped.
    let mapped = |noted: &&mut Noted| parts.processes.largest_mapping(noted.id).unwrap_or(0);
    let mapped: Vec<u64> = unseen.iter().map(mapped).collect();
    for Gpu { uuid, memory_bytes, .. } in seen {
        let known = known.iter().flat_map(|noted| &noted.uses.gpus);
        let known: u64 = known.filter(|(gpu, _)| gpu == uuid).filter_map(|(_, bytes)| *bytes).sum();
        let reserved = RESERVED.min(memory_bytes / 32);
        let mut most = memory_bytes.saturating_sub(reserved).saturating_sub(known);
        for (noted, mapped) in unseen.iter_mut().zip(&mapped) {
            let bytes = most.min(*mapped);
            most -= bytes;
            noted.uses.gpus.push((uuid.clone(), Some(bytes)));
        }
    }
}

/// More than the driver keeps of a large GPU for itself (about 600 MiB of 141 GiB were seen on an H200); of
/// smaller ones it is less.
const RESERVED: u64 = 1 << 30;

/// Only what is CHECKPOINTED goes to another GPU.
fn all_can_move(parts: &mut Parts<'_>, entry: &Entry) -> Result<(), Cause> {
    let cuda = processes_of(parts, entry)?;
    let states = parts.driver.states(&pids(&cuda), STATE);
    let on_gpu = |process: &&CudaProcess| {
        matches!(states.get(&process.pid()), Some(Ok(CudaState::Running | CudaState::Locked)))
    };
    match cuda.iter().find(on_gpu) {
        Some(process) => Err(Cause::OnGpu { who: process.who() }),
        None => Ok(()),
    }
}

/// What cannot be brought back stays suspended, or becomes it again, as far as the driver answers. Only
/// what the driver has lost ends the container.
pub(crate) fn stay(parts: &mut Parts<'_>, entry: &Entry, cause: &Cause, limit: Duration) -> Left {
    let lost = cause.is_loss();
    let mut entry = entry.clone();
    // Before this thaws it.
    entry.frozen |= matches!(parts.freezer.frozen(), Ok(now) if entry.was_paused_meanwhile(now));
    let again = if lost { Ok(()) } else { checkpointed_again(parts, &mut entry, limit) };
    let entry = &entry;
    // Before its threads are let go: what was paused stays so.
    if !lost
        && !has_ended(parts.processes, entry)
        && let Err(error) = as_it_was(parts, entry)
    {
        tracing::error!(container = entry.container, error = %crate::error::chain(&error), "the freezer");
    }
    parts.hold.release();
    if has_ended(parts.processes, entry) {
        forget(parts, entry);
        return Left::Gone;
    }
    if lost {
        let reason = cause.to_string();
        let left = kill(parts, entry, Cause::NotBack { reason, image_too: true });
        forget(parts, entry);
        return left;
    }
    let container = &entry.container;
    if let Err(error) = again {
        // The entry that says so is there already.
        tracing::error!(container, %error, "it is not known whether all of it is suspended");
        return Left::HalfSuspended;
    }
    let toggled = parts.driver.steps().is_ok_and(|steps| steps == Steps::Toggle);
    if let Err(error) = parts.journal.save(&entry.as_suspended(toggled)) {
        tracing::error!(container, error = %crate::error::chain(&error), "the journal");
        return Left::HalfSuspended;
    }
    Left::Suspended
}

/// Frozen, or not, as before the operation.
fn as_it_was(parts: &Parts<'_>, entry: &Entry) -> Result<(), FreezerError> {
    let frozen = parts.freezer.frozen()?;
    match entry.frozen {
        true if !frozen => parts.freezer.freeze(),
        false if frozen && !entry.was_paused_meanwhile(frozen) => parts.freezer.thaw(),
        _ => Ok(()),
    }
}

/// Notes that the memory of these is where it was to go, and comes from there from now on.
fn moved(under_way: &mut Entry, restored: &[Pid]) {
    let maps: Vec<(ProcessId, DeviceMap)> =
        under_way.processes.iter().map(|noted| (noted.id, noted.device_map.clone())).collect();
    let earlier = under_way.suspended.iter_mut().flat_map(|earlier| &mut earlier.processes);
    for noted in under_way.processes.iter_mut().chain(earlier) {
        let Some((_, map)) = maps.iter().find(|(id, _)| *id == noted.id) else { continue };
        if restored.contains(&noted.id.pid) {
            noted.uses = map.place(&noted.uses);
            noted.device_map = DeviceMap::new();
        } else {
            noted.device_map.clone_from(map);
        }
    }
}

/// Those that got as far as LOCKED, or as RUNNING when another could not be unlocked, go back to
/// CHECKPOINTED.
fn checkpointed_again(
    parts: &mut Parts<'_>,
    under_way: &mut Entry,
    limit: Duration,
) -> Result<(), Cause> {
    let cuda = processes_of(parts, under_way)?;
    if parts.freezer.frozen()? {
        // It answers nothing.
        parts.holding().all(&cuda, driver_runs)?;
        parts.freezer.thaw()?;
        parts.hold.settle()?;
    }
    let toggles = parts.driver.steps().map_err(Cause::NoDriver)? == Steps::Toggle;
    let states = parts.driver.states(&pids(&cuda), limit);
    let among = |wanted: &[CudaState]| -> Vec<_> {
        let is = |pid: &Pid| matches!(states.get(pid), Some(Ok(state)) if wanted.contains(state));
        cuda.iter().map(CudaProcess::pid).filter(is).collect()
    };
    let restored = among(&[CudaState::Locked, CudaState::Running]);
    // The others go where they are. If none is there yet, all go where they came from.
    if under_way.moves() && !restored.is_empty() {
        moved(under_way, &restored);
    }
    under_way.locking |= !restored.is_empty();
    // Before they are locked and CHECKPOINTED, where they are now.
    parts.journal.save(under_way)?;
    // One toggle does both.
    let running = if toggles { Vec::new() } else { among(&[CudaState::Running]) };
    // The members of a job are locked one by one.
    let together = if under_way.job.is_some() { 1 } else { running.len().max(1) };
    for running in running.chunks(together) {
        let answers = parts.driver.lock(running, limit, &mut || {});
        check(parts.processes, answers, &cuda)?;
    }
    let answers = parts.driver.checkpoint(&restored, limit);
    check(parts.processes, answers, &cuda)?;
    verify(parts.driver, parts.processes, &cuda, |_| CudaState::Checkpointed, limit)
}
