//! The checkpoint of a container with CUDA, from top to bottom.
//!
//! ```text
//! preflight → journal → suspend → [copy of the job file] → runc checkpoint --leave-running → sync → manifest
//!   → exit:            kill
//!   → running before:  bring back
//!   → paused before:   stay frozen until Resume
//! ```
//!
//! Whatever fails before the manifest is written ends where the caller began.

use std::time::Duration;

use oci_spec::runtime::Spec;
use stasis_config::Annotations;
use stasis_config::manifest::{self, JOB_FILE, JobFile, Manifest};

use crate::bring_back::{
    Back, Goal, Thaw, bring_back, fail, forget, has_ended, kill, kill_and_wait, log_of,
    processes_of,
};
use crate::container::Container;
use crate::cuda::job::{Copied, Identity};
use crate::cuda::{Call, DriverError, DriverFacts};
use crate::discover::{Gate, find_uses, newcomers, refuse_strays};
use crate::error::{Cause, Failure, Left, Phase};
use crate::host_memory;
use crate::job::{self, JobError, Membership};
use crate::journal::{Entry, Stage};
use crate::parts::{CudaProcess, Limits, Parts, Progress};
use crate::remap;
use crate::spec;
use crate::suspend::{STATE, recall, suspend};

/// What becomes of the container afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// As it was: running, or paused.
    LeaveRunning,
    /// It ends, once its image is whole.
    Exit {
        /// CRIU itself has to kill it, as the last part of the dump: established TCP connections
        /// would otherwise be closed in the eyes of their peers.
        by_criu: bool,
    },
}

/// A checkpoint that is asked for.
#[derive(Debug)]
pub struct Request<'a> {
    /// Of which container.
    pub container: &'a Container,
    /// Its config.json.
    pub spec: &'a Spec,
    /// Its annotations.
    pub annotations: &'a Annotations,
    /// /proc/INIT/mountinfo.
    pub mountinfo: &'a str,
    /// What the dump is made with, for the restore.
    pub dump: manifest::Dump,
    /// What becomes of it.
    pub after: After,
    /// The first branch of the driver whose jobs are relied on.
    pub minimum_driver: u32,
    /// The job file that the container was given, if it was.
    pub given_job: Option<Identity>,
    /// What `stasis suspend` has noted, if the container is suspended: it stays so.
    pub suspended: Option<&'a Entry>,
    /// How long things may take.
    pub limits: Limits,
}

impl Request<'_> {
    fn gate(&self, facts: &DriverFacts) -> Gate<'_> {
        Gate::new(self.annotations, self.minimum_driver, self.given_job.is_some(), facts)
    }
}

/// Checkpoints. `cuda` is what [`crate::discover`] found; none, if processes have only loaded
/// libcuda: then the manifest says so, or the image could not be told from one that lost its CUDA.
pub fn checkpoint(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    mut cuda: Vec<CudaProcess>,
) -> Result<(), Failure> {
    let mut progress = Progress::new(Phase::Preflight);
    let begun = preflight(parts, request, &mut cuda);
    let (facts, mut entry) = begun.map_err(|cause| Failure {
        operation: OPERATION,
        container: request.container.id.clone(),
        phase: Phase::Preflight,
        log: log_of(&cause),
        cause,
        left: Left::Untouched,
        image: None,
    })?;

    let suspended = if cuda.is_empty() {
        freeze(parts, &mut entry, &mut progress)
    } else {
        let (gate, limits) = (request.gate(&facts), &request.limits);
        suspend(parts, &mut entry, &mut cuda, &gate, limits, &mut progress)
    };
    let made = suspended.and_then(|()| dump(parts, request, &entry, &cuda, &facts, &mut progress));
    if let Err(cause) = made {
        let (phase, limits) = (progress.phase(), &request.limits);
        if !ended_by_criu(request, phase, &cause) {
            return Err(fail(parts, OPERATION, &entry, phase, cause, limits));
        }
        // That it is gone is no reason then.
        let failure = fail(parts, OPERATION, &entry, phase, Cause::Gone, limits);
        return Err(Failure { cause, ..failure });
    }

    match request.after {
        After::Exit { by_criu } => end(parts, request, &entry, by_criu),
        After::LeaveRunning if entry.frozen => await_resume(parts, request, entry),
        After::LeaveRunning => go_on(parts, request, entry),
    }
}

/// Whether CRIU has ended the container, as it was asked to, before this went wrong.
fn ended_by_criu(request: &Request<'_>, phase: Phase, cause: &Cause) -> bool {
    let dumped = match phase {
        Phase::CriuDump => matches!(cause, Cause::Ended { .. }),
        Phase::Sync | Phase::Manifest => true,
        _ => false,
    };
    dumped && matches!(request.after, After::Exit { by_criu: true })
}

/// The CUDA processes of a paused container that awaits its Resume: they are CHECKPOINTED, and
/// frozen, so the driver is asked nothing.
pub fn parked(parts: &mut Parts<'_>, entry: &Entry) -> Result<Vec<CudaProcess>, Cause> {
    processes_of(parts, entry)
}

/// Another checkpoint of such a container: all that is left to do is the dump. Whatever fails, it
/// awaits its Resume as before.
pub fn again(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    entry: &Entry,
    cuda: &[CudaProcess],
) -> Result<(), Failure> {
    let mut progress = Progress::new(Phase::Preflight);
    // CRIU thaws for its work: whoever repairs after a kill is not to take that for the Resume.
    let mut under_way = entry.clone();
    under_way.stage = Stage::Suspending;
    let made = parts.driver.facts().map_err(Cause::NoDriver).and_then(|facts| {
        parts.image.prepare()?;
        parts.driver.join(entry.in_job());
        parts.journal.save(&under_way)?;
        dump(parts, request, entry, cuda, &facts, &mut progress)
    });
    if let Err(error) = parts.journal.save(entry) {
        tracing::warn!(error = %crate::error::chain(&error), "the next operation brings its CUDA back");
    }
    if let Err(cause) = made {
        let frozen = parts
            .freezer
            .frozen()
            .and_then(|frozen| if frozen { Ok(()) } else { parts.freezer.freeze() });
        let left = match frozen {
            _ if has_ended(parts.processes, entry) => Left::Gone,
            Ok(()) => Left::Paused,
            Err(error) => kill(parts, entry, error.into()),
        };
        let container = entry.container.clone();
        let (phase, log) = (progress.phase(), log_of(&cause));
        let failure =
            Failure { operation: OPERATION, container, phase, cause, left, image: None, log };
        return Err(failure);
    }
    match request.after {
        After::Exit { by_criu } => end(parts, request, entry, by_criu),
        After::LeaveRunning => Ok(()),
    }
}

const OPERATION: &str = "checkpoint";

/// All that can be refused without touching the container; then the journal, which is on disk
/// before the first lock.
fn preflight(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    cuda: &mut [CudaProcess],
) -> Result<(DriverFacts, Entry), Cause> {
    if let Some(suspended) = request.suspended {
        refuse_half_moved(suspended)?;
        recall(parts, suspended);
    }
    let facts = match parts.driver.facts() {
        Ok(facts) => facts,
        // A host without a driver: discovery has found that no process has a GPU.
        Err(DriverError::NoLibrary(_)) if cuda.is_empty() => DriverFacts::default(),
        Err(error) => return Err(Cause::NoDriver(error)),
    };
    if cuda.is_empty() {
        parts.image.prepare()?;
        return begin(parts, request, None).map(|entry| (facts, entry));
    }
    require_actions(&facts)?;
    let unknown = spec::unknown_binds(request.spec, request.mountinfo);
    if !unknown.is_empty() {
        return Err(Cause::UnknownMounts(unknown));
    }
    refuse_strays(parts.processes, cuda, request.container.init.pid)?;
    find_uses(parts, cuda);
    host_memory::require(parts.memory, cuda)?;
    if let Some(suspended) = request.suspended {
        recall_uses(cuda, suspended);
    }
    let membership = membership(parts, request, cuda, &facts)?;
    request.gate(&facts).check(cuda, membership.is_some())?;
    parts.image.prepare()?;
    parts.driver.join(membership.as_ref().map(|membership| &membership.job));
    begin(parts, request, membership).map(|entry| (facts, entry))
}

/// The job that the processes are in, if this driver has jobs.
fn membership(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    cuda: &[CudaProcess],
    facts: &DriverFacts,
) -> Result<Option<Membership>, Cause> {
    if !job::may_have(facts) {
        return Ok(None);
    }
    let init = request.container.init;
    let found = job::find(parts.driver, parts.processes, cuda, init)?;
    let Some(found) = found else { return Ok(None) };
    let origin = found.origin(request.given_job, request.spec, request.mountinfo)?;
    Ok(Some(Membership { job: found.job, origin: Some(origin) }))
}

fn begin(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    job: Option<Membership>,
) -> Result<Entry, Cause> {
    let frozen = parts.freezer.frozen()?;
    let Container { id, init, .. } = request.container;
    let mut entry = Entry::new(id, *init, frozen, parts.image.path());
    entry.job = job;
    entry.suspended = request.suspended.cloned().map(Box::new);
    parts.journal.save(&entry)?;
    Ok(entry)
}

/// Where the memory of a suspended container came from that was to go to this GPU: it is not there yet.
/// All of its processes are to go there.
fn origin(request: &Request<'_>, uuid: String) -> String {
    let noted = request.suspended.and_then(|suspended| suspended.processes.first());
    let pair = noted.and_then(|noted| noted.device_map.iter().find(|(_, to)| *to == uuid));
    pair.map_or(uuid, |(from, _)| from.clone())
}

/// An image knows only where all of its memory came from.
fn refuse_half_moved(suspended: &Entry) -> Result<(), Cause> {
    let same = suspended.processes.windows(2).all(|two| two[0].device_map == two[1].device_map);
    if same { Ok(()) } else { Err(Cause::HalfMoved) }
}

/// What suspended processes will need: they use no GPU now.
fn recall_uses(cuda: &mut [CudaProcess], suspended: &Entry) {
    for process in cuda.iter_mut().filter(|process| process.uses.gpus.is_empty()) {
        let noted = suspended.processes.iter().find(|noted| noted.id == process.process.id);
        process.uses = noted.map(|noted| noted.uses.clone()).unwrap_or_default();
    }
}

/// Refuses a driver that cannot do one of the steps.
pub(crate) fn require_actions(facts: &DriverFacts) -> Result<(), Cause> {
    let lacks = |call: &&Call| facts.missing.iter().any(|missing| missing == call.function());
    let Some(call) = ACTIONS.iter().find(lacks) else { return Ok(()) };
    Err(Cause::NoDriver(facts.unsupported(*call)))
}

const ACTIONS: [Call; 6] =
    [Call::Probe, Call::State, Call::Lock, Call::Checkpoint, Call::Restore, Call::Unlock];

/// Without CUDA there is nothing to suspend; a process that starts it now would spoil the dump.
fn freeze(parts: &mut Parts<'_>, entry: &mut Entry, progress: &mut Progress) -> Result<(), Cause> {
    progress.enter(Phase::Freeze);
    crate::suspend::freeze(parts, entry)?;
    match newcomers(parts, &[])?.first() {
        Some(new) => Err(Cause::Appeared { who: new.who() }),
        None => Ok(()),
    }
}

/// From frozen and CHECKPOINTED to an image that is whole.
fn dump(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    entry: &Entry,
    cuda: &[CudaProcess],
    facts: &DriverFacts,
    progress: &mut Progress,
) -> Result<(), Cause> {
    crate::suspend::interruptible(parts)?;
    parts.image.begin()?;
    let mut job = None;
    if let Some(membership) = &entry.job {
        progress.enter(Phase::JobFile);
        // What they name is still what the driver has written to.
        job::confirm(parts.driver, parts.processes, cuda, entry)?;
        job = Some(copy_job(parts, membership)?);
    }
    progress.enter(Phase::CriuDump);
    let by_criu = matches!(request.after, After::Exit { by_criu: true });
    parts.runtime.dump(!by_criu)?;
    // CRIU thaws for its work and freezes again; where a version of it does not, this does.
    if !by_criu && !parts.freezer.frozen()? {
        parts.freezer.freeze()?;
    }
    // One that has ended before CRIU came to it is not in the image, and a restore looks for it.
    let (dumped, missing): (Vec<CudaProcess>, Vec<CudaProcess>) =
        cuda.iter().cloned().partition(|process| {
            let there = parts.image.has_process(process.process.inner_pid);
            there && (by_criu || !parts.processes.ending(process.process.id))
        });
    if let Some(ended) = missing.first() {
        let who = ended.who();
        // In a job it stands in the job file, and the others cannot be restored without it.
        if !by_criu || entry.job.is_some() {
            return Err(Cause::Ended { who });
        }
        // The container is gone: what there is of it is better than nothing.
        tracing::warn!(container = entry.container, %who, "it ended, and is not in the image");
    }
    progress.enter(Phase::Sync);
    parts.image.sync()?;
    progress.enter(Phase::Manifest);
    let manifest = manifest(request, &dumped, job, facts, progress);
    parts.image.finish(&manifest)
}

/// The driver has written to the file until the last process was CHECKPOINTED, and writes again at
/// the first restore: this is the one that restores need.
fn copy_job(parts: &mut Parts<'_>, membership: &Membership) -> Result<manifest::Job, Cause> {
    let copy = parts.image.path().join(JOB_FILE);
    let file = membership.origin.clone().unwrap_or(JobFile::Dumped);
    // What CRIU dumps it restores.
    let to = (file != JobFile::Dumped).then_some(copy.as_path());
    let copied = parts.driver.copy_job_file(&membership.job, to, STATE);
    let copied = copied.map_err(JobError::Helper)?;
    let Copied { bytes, sha256 } = copied;
    Ok(manifest::Job { bytes, sha256, file })
}

/// The caller wants it gone, and may have it gone now.
fn end(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    entry: &Entry,
    by_criu: bool,
) -> Result<(), Failure> {
    let ended = if by_criu { Ok(()) } else { kill_and_wait(parts, entry) };
    match ended {
        Ok(()) => {
            // runc forgets a container that it has dumped and ended; so the same id can be restored.
            if !by_criu && let Err(error) = parts.runtime.delete() {
                tracing::warn!(%error, "the ended container's state stays behind");
            }
            forget(parts, entry);
            Ok(())
        }
        Err(cause) => {
            let failure = fail(parts, OPERATION, entry, Phase::Kill, cause, &request.limits);
            Err(failure.with_image(parts.image.path()))
        }
    }
}

/// It was paused and stays so; its CUDA comes back with Resume.
fn await_resume(
    parts: &mut Parts<'_>,
    request: &Request<'_>,
    mut entry: Entry,
) -> Result<(), Failure> {
    entry.stage = Stage::AwaitingResume;
    match parts.journal.save(&entry) {
        Ok(()) => Ok(()),
        Err(error) => {
            let limits = &request.limits;
            let failure = fail(parts, OPERATION, &entry, Phase::Manifest, error.into(), limits);
            Err(failure.with_image(parts.image.path()))
        }
    }
}

/// It was running and runs on.
fn go_on(parts: &mut Parts<'_>, request: &Request<'_>, mut entry: Entry) -> Result<(), Failure> {
    match bring_back(parts, &mut entry, Goal::Running, Thaw::Freezer, &request.limits) {
        Ok(Back::LockPending) => Ok(()),
        Ok(Back::Whole) => {
            forget(parts, &entry);
            Ok(())
        }
        Err(cause) => {
            let not_back = Cause::not_back(&cause);
            let log = log_of(&cause);
            let left = kill(parts, &entry, cause);
            forget(parts, &entry);
            let cause = not_back;
            let container = entry.container.clone();
            let failure = Failure {
                operation: OPERATION,
                container,
                phase: Phase::CudaRestore,
                cause,
                left,
                image: None,
                log,
            };
            Err(failure.with_image(parts.image.path()))
        }
    }
}

fn manifest(
    request: &Request<'_>,
    cuda: &[CudaProcess],
    job: Option<manifest::Job>,
    facts: &DriverFacts,
    progress: &Progress,
) -> Manifest {
    let processes = cuda
        .iter()
        .zip(0..)
        .map(|(process, order)| {
            let gpus = &process.uses.gpus;
            manifest::Process {
                pid: process.process.inner_pid,
                command: process.process.command.clone(),
                order,
                gpus: gpus.iter().map(|(uuid, _)| uuid.clone()).collect(),
                // Not known of one: not known.
                device_bytes: gpus
                    .iter()
                    .map(|(_, bytes)| *bytes)
                    .sum::<Option<u64>>()
                    .filter(|_| !gpus.is_empty()),
            }
        })
        .collect();
    Manifest {
        version: manifest::VERSION,
        created: manifest::timestamp(std::time::SystemTime::now()),
        created_by: format!("stasis {}", env!("CARGO_PKG_VERSION")),
        container: request.container.id.clone(),
        driver: manifest::Driver {
            version: facts.driver_version.clone().unwrap_or_default(),
            cuda: facts.cuda_version,
        },
        gpus: facts.gpus.iter().cloned().map(manifest::Gpu::from).collect(),
        processes,
        job,
        dump: request.dump,
        gpu_mounts: spec::gpu_mounts(request.spec),
        gpu_devices: spec::gpu_devices(request.spec),
        gpu_nodes: remap::cards(request.spec, &facts.gpus)
            .into_iter()
            .map(|card| manifest::GpuNode { path: card.path, uuid: origin(request, card.uuid) })
            .collect(),
        phases: progress.phases(),
    }
}

/// What a checkpoint may be asked for that goes only without CUDA.
#[must_use]
pub fn refused_option(arguments: &crate::runc::args::Arguments) -> Option<&'static str> {
    if arguments.has("pre-dump") {
        return Some("--pre-dump (the GPU's memory cannot be dumped ahead)");
    }
    if arguments.has("lazy-pages") || arguments.value(&["page-server"]).is_some() {
        return Some("--lazy-pages and --page-server (the image would not be whole)");
    }
    None
}

/// How long the lock of an operation that is just ending is waited for.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(1);
