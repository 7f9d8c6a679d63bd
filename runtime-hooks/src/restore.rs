//! The restore of an image with CUDA, from top to bottom.
//!
//! ```text
//! manifest → preflight → [working copy of the job file] → config.json completed → runc restore → device nodes
//!   → match the processes → restore all → unlock all → started
//! ```
//!
//! Whatever fails, nothing of the container is left but the runtime's words and CRIU's log, and
//! config.json is what it was.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use oci_spec::runtime::Spec;
use stasis_config::{Manifest, manifest};

use crate::bring_back::log_of;
use crate::checkpoint::require_actions;
use crate::cuda::job::VARIABLE;
use crate::cuda::{CudaState, Driver, DriverFacts, GpuUse, Steps};
use crate::error::{Cause, Failure, Left, Phase};
use crate::give_back;
use crate::gpu_locks::GpuLocks;
use crate::job::{self, Found, JobError, Membership};
use crate::journal::{Entry, Journal, Noted, Stage};
use crate::parts::{CudaProcess, Limits, Progress};
use crate::processes::{Pid, Process, ProcessId, Processes};
use crate::remap::{self, Card, DeviceMap};
use crate::runc::Runtime;
use crate::suspend::{STATE, verify};

/// The world outside, for a restore.
pub struct RestoreParts<'a> {
    /// The NVIDIA driver.
    pub driver: &'a mut dyn Driver,
    /// runc.
    pub runtime: &'a mut dyn Runtime,
    /// What is under way.
    pub journal: &'a mut dyn Journal,
    /// The container that the image is restored into.
    pub container: &'a mut dyn NewContainer,
    /// The job file that it gets.
    pub job: &'a mut dyn NewJob,
    /// The restored container: its init and its processes. Asked after `runc restore`.
    pub restored: &'a dyn Fn() -> Result<(ProcessId, Box<dyn Processes>), Cause>,
    /// Which GPUs something is just being restored onto.
    pub gpu_locks: &'a dyn GpuLocks,
    /// Whether the caller wants the operation to end.
    pub interrupted: &'a dyn Fn() -> bool,
}

/// The container that an image is restored into, as far as what it is given of a GPU.
pub trait NewContainer {
    /// Completes its config.json with what the image needs and the container may have; gives what
    /// config.json says then. An image that needs more is refused.
    fn complete(&mut self, image: &Path, manifest: &Manifest) -> Result<Spec, Cause>;
    /// Makes config.json what it was.
    fn put_back(&mut self);
    /// Makes the device nodes of the restored container what config.json says.
    fn make_nodes(&self, init: ProcessId, spec: &Spec) -> Result<(), Cause>;
}

/// The job file of the container that an image is restored into.
pub trait NewJob {
    /// Puts a working copy of the image's job file where CRIU, the processes and the driver look for
    /// it. Also where there is no `job` in the image, the container may be one that has a file.
    fn place(&mut self, image: &Path, job: Option<&manifest::Job>) -> Result<(), Cause>;
    /// Undoes that.
    fn take_back(&mut self);
    /// Refuses restored processes whose job file is not the one that was placed, nor lies where the
    /// image says. `init` and `spec` are the restored container's.
    fn check(
        &self,
        expected: &manifest::Job,
        found: &Found,
        init: ProcessId,
        spec: &Spec,
    ) -> Result<(), Cause>;
}

/// A restore that is asked for.
#[derive(Debug)]
pub struct Request<'a> {
    /// The container's id.
    pub container: &'a str,
    /// The image directory.
    pub image: &'a Path,
    /// Its manifest.
    pub manifest: &'a Manifest,
    /// How long things may take.
    pub limits: Limits,
    /// Which GPUs take the place of which, as the container's owner wrote it.
    pub device_map: Option<&'a str>,
    /// Whether the container begins suspended, without a GPU.
    pub suspended: bool,
}

/// Restores. On success the container runs and its CUDA works.
pub fn restore(parts: &mut RestoreParts<'_>, request: &Request<'_>) -> Result<(), Failure> {
    let mut progress = Progress::new(Phase::Preflight);
    let failure = |phase, cause: Cause, left| Failure {
        operation: "restore",
        container: request.container.to_owned(),
        phase,
        log: log_of(&cause),
        cause,
        left,
        image: None,
    };
    let (spec, map) = match preflight(parts, request) {
        Ok(ready) => ready,
        Err(cause) => {
            parts.container.put_back();
            parts.job.take_back();
            return Err(failure(progress.phase(), cause, Left::Untouched));
        }
    };
    match run(parts, request, &spec, &map, &mut progress) {
        Ok(()) => Ok(()),
        Err(cause) => {
            let left = remove(parts, progress.phase());
            parts.container.put_back();
            parts.job.take_back();
            Err(failure(progress.phase(), cause, left))
        }
    }
}

/// All that can be refused before anything runs.
fn preflight(
    parts: &mut RestoreParts<'_>,
    request: &Request<'_>,
) -> Result<(Spec, DeviceMap), Cause> {
    let needs = |reason| Cause::Needs { path: request.image.to_owned(), reason };
    let mut facts = DriverFacts::default();
    if !request.manifest.processes.is_empty() {
        facts = parts.driver.facts().map_err(Cause::NoDriver)?;
        if let Some(reason) = other_driver(request.manifest, &facts) {
            return Err(needs(reason));
        }
        require_actions(&facts)?;
    }
    // Last, because they write.
    parts.job.place(request.image, request.manifest.job.as_ref())?;
    let spec = parts.container.complete(request.image, request.manifest)?;
    let map = devices(request, &facts, &spec).map_err(needs)?;
    Ok((spec, map))
}

/// A restored process goes on with the libcuda it has mapped, which works only with the kernel driver
/// of the same version.
fn other_driver(manifest: &Manifest, facts: &DriverFacts) -> Option<String> {
    let (made, here) = (&manifest.driver.version, facts.driver_version.as_ref()?);
    (!made.is_empty() && made != here)
        .then(|| format!("it was made with driver {made}, and this host has {here}"))
}

/// Onto which GPUs the image's memory goes: those that it came from if the new container has them, else
/// what it has instead.
fn devices(request: &Request<'_>, facts: &DriverFacts, spec: &Spec) -> Result<DeviceMap, String> {
    let manifest = request.manifest;
    let name = |uuid: &str| {
        let gpu = manifest.gpus.iter().find(|gpu| gpu.uuid == uuid);
        gpu.map(|gpu| gpu.name.clone()).unwrap_or_default()
    };
    let old: Vec<Card> = manifest
        .gpu_nodes
        .iter()
        .map(|node| Card {
            path: node.path.clone(),
            uuid: node.uuid.clone(),
            name: name(&node.uuid),
        })
        .collect();
    let new = remap::cards(spec, &facts.gpus);
    // Images of earlier versions; containers with all of the host's /dev.
    if old.is_empty() || new.is_empty() {
        return match (request.device_map, missing_on_host(manifest, facts)) {
            (Some(_), _) if !manifest.processes.is_empty() => Err(
                "annotation dev.stasis.device-map: which GPUs the image or the new container has is not \
                 known from the manifest and config.json"
                    .to_owned(),
            ),
            (_, Some(reason)) => Err(reason),
            (_, None) => Ok(DeviceMap::new()),
        };
    }
    if facts.gpus.is_empty() {
        tracing::warn!("NVML lists no GPUs: whether they are those of the image is not known");
    }
    let asked = request.device_map.map(|text| remap::parse(text, &facts.gpus)).transpose();
    let asked = asked.map_err(|why| format!("annotation dev.stasis.device-map: {why}"))?;
    let map = remap::plan(&old, &new, &asked.unwrap_or_default())?;
    if !map.is_empty() && facts.branch().is_some_and(|branch| branch < remap::FIRST_BRANCH) {
        return Err(format!(
            "its memory belongs on GPU {}, which the new container has not, and a driver before branch {} \
             restores on no other",
            old.iter().map(|card| card.uuid.as_str()).collect::<Vec<_>>().join(", "),
            remap::FIRST_BRANCH
        ));
    }
    Ok(map)
}

/// The GPUs that this host lacks.
fn missing_on_host(manifest: &Manifest, facts: &DriverFacts) -> Option<String> {
    if facts.gpus.is_empty() {
        return None;
    }
    let used = manifest.processes.iter().flat_map(|process| &process.gpus);
    let missing: BTreeSet<&String> =
        used.filter(|uuid| !facts.gpus.iter().any(|gpu| gpu.uuid == **uuid)).collect();
    let missing: Vec<&str> = missing.into_iter().map(String::as_str).collect();
    (!missing.is_empty()).then(|| {
        format!("its memory belongs on GPU {}, which this host has not", missing.join(", "))
    })
}

fn run(
    parts: &mut RestoreParts<'_>,
    request: &Request<'_>,
    spec: &Spec,
    map: &DeviceMap,
    progress: &mut Progress,
) -> Result<(), Cause> {
    progress.enter(Phase::CriuRestore);
    parts.runtime.restore()?;
    interruptible(parts)?;

    progress.enter(Phase::DeviceNodes);
    let (init, processes) = (parts.restored)()?;
    parts.container.make_nodes(init, spec)?;

    progress.enter(Phase::Match);
    let processes = processes.as_ref();
    let mut cuda = match_processes(parts.driver, processes, request.manifest)?;
    let job = rejoin(parts, processes, &cuda, request.manifest, init, spec)?;
    let in_job = job.is_some();
    let mut entry = Entry::new(request.container, init, false, request.image);
    entry.stage = Stage::Restoring;
    entry.job = job;
    // A restore that is cut off may leave one LOCKED that seems to run.
    entry.locking = parts.driver.steps().map_err(Cause::NoDriver)? == Steps::Toggle;
    for process in &mut cuda {
        process.device_map.clone_from(map);
    }
    entry.processes = cuda.iter().map(Noted::from).collect();
    parts.journal.save(&entry)?;
    interruptible(parts)?;
    // Its code runs since CRIU has ended, and may open a device for something else than CUDA.
    parts.driver.recall(&cuda.iter().map(CudaProcess::pid).collect::<Vec<_>>());
    if request.suspended && !cuda.is_empty() {
        return leave_suspended(parts, processes, &cuda, entry);
    }
    for process in &mut cuda {
        process.uses = map.place(&process.uses);
    }

    progress.enter(Phase::CudaRestore);
    let how = give_back::How {
        in_job,
        room: request.limits.room,
        limit: request.limits.restore,
        given_up: parts.interrupted,
        locks: parts.gpu_locks,
    };
    give_back::restore(parts.driver, processes, &cuda, &how)?;

    progress.enter(Phase::Unlock);
    give_back::unlock(parts.driver, processes, &cuda, request.limits.restore)?;
    if cuda.iter().any(|process| !processes.alive(process.process.id)) {
        return Err(Cause::Gone);
    }
    parts.journal.clear()?;
    Ok(())
}

/// As after `stasis suspend`: `stasis resume` gives it a GPU.
fn leave_suspended(
    parts: &mut RestoreParts<'_>,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    mut entry: Entry,
) -> Result<(), Cause> {
    verify(parts.driver, processes, cuda, |_| CudaState::Checkpointed, STATE)?;
    entry.stage = Stage::Suspended;
    Ok(parts.journal.save(&entry)?)
}

/// The driver restores members with the job file as it was when all were CHECKPOINTED, and with
/// nothing else; what it would do with another one is not known.
fn rejoin(
    parts: &mut RestoreParts<'_>,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    manifest: &Manifest,
    init: ProcessId,
    spec: &Spec,
) -> Result<Option<Membership>, Cause> {
    let Some(expected) = &manifest.job else { return Ok(None) };
    let wrong = |reason: String| Err(JobError::NotTheImages(reason).into());
    let Some(found) = job::find(parts.driver, processes, cuda, init)? else {
        return wrong(format!(
            "the image's processes are in a job, and the restored ones name no job file in {VARIABLE}"
        ));
    };
    parts.job.check(expected, &found, init, spec)?;
    let Found { job, who, .. } = found;
    // Before the driver gets to see it.
    let copied = parts.driver.copy_job_file(&job, None, STATE).map_err(JobError::Helper)?;
    if copied.sha256 != expected.sha256 {
        return wrong(format!("{who}: its restored job file is not as it was in the checkpoint"));
    }
    parts.driver.join(Some(&job));
    Ok(Some(Membership { job, origin: Some(expected.file.clone()) }))
}

fn interruptible(parts: &RestoreParts<'_>) -> Result<(), Cause> {
    if (parts.interrupted)() { Err(Cause::Interrupted) } else { Ok(()) }
}

/// The image's processes among the restored ones. CRIU gives each the pid that it had inside; the
/// pid outside is a new one.
fn match_processes(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    manifest: &Manifest,
) -> Result<Vec<CudaProcess>, Cause> {
    let list = processes.list()?;
    let mut expected: Vec<_> = manifest.processes.iter().collect();
    expected.sort_by_key(|process| process.order);
    let not_restored = |wanted: &manifest::Process| Cause::NotRestored {
        inner_pid: wanted.pid,
        command: wanted.command.clone(),
    };
    let mut pairs: Vec<(&manifest::Process, &Process)> = Vec::with_capacity(expected.len());
    for wanted in expected {
        let process = list.iter().find(|process| process.inner_pid == wanted.pid);
        pairs.push((wanted, process.ok_or_else(|| not_restored(wanted))?));
    }
    // Also those that the manifest does not name: one with CUDA would stay dead for ever.
    let candidates = list.iter().filter(|process| process.is_candidate());
    let unnamed: Vec<&Process> = candidates
        .filter(|process| !pairs.iter().any(|(_, known)| known.id == process.id))
        .collect();
    let mut pids: Vec<_> = pairs.iter().map(|(_, process)| process.id.pid).collect();
    if !pairs.is_empty() || processes.host_has_gpu() {
        pids.extend(unnamed.iter().map(|process| process.id.pid));
    }
    let mut answers = driver.probe(&pids);
    let began: Vec<&Process> = unnamed
        .into_iter()
        .filter(|process| matches!(answers.get(&process.id.pid), Some(Ok(Some(_)))))
        .collect();
    refuse_lost(driver, &began)?;
    pairs
        .into_iter()
        .map(|(wanted, process)| match answers.remove(&process.id.pid) {
            Some(Ok(Some(restore_thread))) => Ok(CudaProcess {
                process: process.clone(),
                restore_thread,
                found: Some(CudaState::Running),
                uses: needs(wanted),
                device_map: DeviceMap::new(),
            }),
            Some(Err(error)) => Err(Cause::Driver { who: crate::parts::who(process), error }),
            _ => Err(not_restored(wanted)),
        })
        .collect()
}

/// Refuses processes with CUDA that the manifest does not name, but for those that began it after the
/// restore: they run, and CRIU dumps none that uses a GPU.
fn refuse_lost(driver: &mut dyn Driver, unnamed: &[&Process]) -> Result<(), Cause> {
    let pids: Vec<Pid> = unnamed.iter().map(|process| process.id.pid).collect();
    let states = driver.states(&pids, STATE);
    let runs = |pid| matches!(states.get(&pid), Some(Ok(CudaState::Running)));
    match unnamed.iter().find(|process| !runs(process.id.pid)) {
        Some(process) => Err(Cause::NotInManifest { who: crate::parts::who(process) }),
        None => Ok(()),
    }
}

/// The memory that a process needs. On several GPUs it is not known how much on which.
fn needs(process: &manifest::Process) -> GpuUse {
    let bytes = process.device_bytes.filter(|_| process.gpus.len() == 1);
    GpuUse { gpus: process.gpus.iter().map(|uuid| (uuid.clone(), bytes)).collect() }
}

/// How long a killed container may take to end.
const DIE: Duration = Duration::from_secs(20);

/// Nothing is left behind: no process, and no state that would keep the task from being deleted.
fn remove(parts: &mut RestoreParts<'_>, phase: Phase) -> Left {
    // `delete --force` kills as well; asked first, so that its own error does not hide a process
    // that lives on.
    let killed = parts.runtime.kill();
    let deadline = Instant::now() + DIE;
    while let Ok((init, processes)) = (parts.restored)() {
        if !processes.alive(init) && processes.list().is_ok_and(|list| list.is_empty()) {
            break;
        }
        if Instant::now() >= deadline {
            let because = Box::new(Cause::DoesNotDie(DIE));
            let kill = killed.err().map_or(Cause::DoesNotDie(DIE), Cause::from);
            return Left::Broken { because, kill: Box::new(kill) };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // After a failing `runc restore` runc has removed its state itself.
    if let Err(error) = parts.runtime.delete()
        && phase != Phase::CriuRestore
    {
        tracing::warn!(%error, "the failed container's state stays behind");
    }
    let _ = parts.journal.clear();
    Left::Removed
}
