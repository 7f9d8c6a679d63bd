//! Which processes of the container use CUDA, and whether they can be checkpointed at all.
//! Nothing is touched here, and all of it works on a frozen container.

use std::time::{Duration, Instant};

use stasis_config::Annotations;

use crate::cuda::{DriverError, DriverFacts, GpuUse};
use crate::error::Cause;
use crate::job;
use crate::parts::{CudaProcess, Parts, pids, who};
use crate::processes::{Pid, Process, Processes, descends};
use crate::remap::DeviceMap;

/// The processes with CUDA; empty for a container that is none of the driver's business.
///
/// The driver is asked only when a process maps libcuda or has an NVIDIA device open, so a
/// container without CUDA costs no helper.
pub fn discover(parts: &mut Parts<'_>) -> Result<Vec<CudaProcess>, Cause> {
    let deadline = Instant::now() + STARTING;
    loop {
        match look(parts) {
            // It may be in the middle of cuInit, which opens the device first.
            Err(Cause::DeviceHolder { .. })
                if Instant::now() < deadline && !parts.freezer.frozen()? =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            other => return other,
        }
    }
}

/// How long a process may take to get from opening the device to having CUDA.
const STARTING: Duration = Duration::from_secs(1);

fn look(parts: &mut Parts<'_>) -> Result<Vec<CudaProcess>, Cause> {
    let all = parts.processes.list()?;
    let candidates: Vec<&Process> = all.iter().filter(|process| process.is_candidate()).collect();
    if candidates.is_empty() {
        return Ok(Vec::new());
    }
    match parts.driver.facts() {
        Ok(_) => {}
        // An image that brings its own libcuda to a host without GPUs.
        Err(DriverError::NoLibrary(_))
            if candidates.iter().all(|process| process.devices.is_empty())
                && !parts.processes.host_has_gpu() =>
        {
            return Ok(Vec::new());
        }
        Err(error) => return Err(Cause::NoDriver(error)),
    }
    let cuda = probe(parts, &candidates)?;
    if cuda.is_empty() {
        return Ok(cuda);
    }
    let own = parts.hold.tracer();
    match all.iter().find(|process| process.tracer != 0 && Some(process.tracer) != own) {
        Some(traced) => Err(Cause::Traced { who: who(traced), tracer: traced.tracer }),
        None => Ok(cuda),
    }
}

/// Asks the driver which of `candidates` have CUDA.
pub(crate) fn probe(
    parts: &mut Parts<'_>,
    candidates: &[&Process],
) -> Result<Vec<CudaProcess>, Cause> {
    let asked: Vec<Pid> = candidates.iter().map(|process| process.id.pid).collect();
    let mut answers = parts.driver.probe(&asked);
    let mut cuda = Vec::new();
    for process in candidates {
        match answers.remove(&process.id.pid) {
            Some(Ok(Some(restore_thread))) => {
                let process = (*process).clone();
                cuda.push(CudaProcess {
                    process,
                    restore_thread,
                    found: None,
                    uses: GpuUse::default(),
                    device_map: DeviceMap::new(),
                });
            }
            // Ended since it was listed.
            _ if !parts.processes.alive(process.id) => {}
            Some(Err(error)) => {
                return Err(Cause::Driver { who: who(process), error });
            }
            // It has loaded libcuda and not begun to use it.
            Some(Ok(None)) | None if process.devices.is_empty() => {}
            Some(Ok(None)) | None => {
                let devices = process.devices.clone();
                return Err(Cause::DeviceHolder { who: who(process), devices });
            }
        }
    }
    Ok(cuda)
}

/// Refuses CUDA that CRIU does not dump. Other processes that it does not dump are the runtime's
/// business: it leaves them out of the image without a word.
pub(crate) fn refuse_strays(
    processes: &dyn Processes,
    cuda: &[CudaProcess],
    init: Pid,
) -> Result<(), Cause> {
    let all = processes.list()?;
    let stray = cuda.iter().find(|cuda| {
        let now = all.iter().find(|process| process.id == cuda.process.id);
        now.is_some_and(|process| !descends(&all, process, init))
    });
    stray.map_or(Ok(()), |stray| Err(Cause::Stray { who: stray.who() }))
}

/// What a container may have that the driver can lose.
#[derive(Debug, Clone, Copy)]
pub struct Gate<'a> {
    /// What its annotations allow.
    pub allowed: &'a Annotations,
    /// The first branch of the driver whose jobs are relied on.
    pub minimum_driver: u32,
    /// Whether it was given a job file.
    pub given_job: bool,
    /// Whether this driver may have jobs at all.
    pub driver_may_have_jobs: bool,
    /// Whether jobs of this driver keep what is shared.
    pub jobs_are_trusted: bool,
}

impl<'a> Gate<'a> {
    /// What this driver can lose of a container that allows so much.
    #[must_use]
    pub fn new(
        allowed: &'a Annotations,
        minimum_driver: u32,
        given_job: bool,
        facts: &DriverFacts,
    ) -> Self {
        Self {
            allowed,
            minimum_driver,
            given_job,
            driver_may_have_jobs: job::may_have(facts),
            jobs_are_trusted: job::trusted(facts, minimum_driver),
        }
    }

    /// Refuses what was measured to be lost at restore without a word from the driver, unless the
    /// processes are in a job or the container's annotations allow it: memory shared between
    /// processes or between GPUs.
    pub fn check(&self, cuda: &[CudaProcess], in_job: bool) -> Result<(), Cause> {
        if in_job && self.jobs_are_trusted {
            return Ok(());
        }
        several_processes(self, cuda)?;
        several_gpus(self, cuda)
    }
}

fn several_processes(gate: &Gate<'_>, cuda: &[CudaProcess]) -> Result<(), Cause> {
    if cuda.len() > 1 && !gate.allowed.multi_process {
        const SHOWN: usize = 8;
        let mut list: Vec<String> =
            cuda.iter().take(SHOWN).map(|process| process.who().to_string()).collect();
        if cuda.len() > SHOWN {
            list.push("…".to_owned());
        }
        return Err(Cause::MultiProcess {
            count: cuda.len(),
            list: list.join(", "),
            minimum: gate.minimum_driver,
            given: gate.given_job,
        });
    }
    Ok(())
}

fn several_gpus(gate: &Gate<'_>, cuda: &[CudaProcess]) -> Result<(), Cause> {
    if gate.allowed.multi_gpu {
        return Ok(());
    }
    for process in cuda {
        // NVML knows on which GPUs there is a context; without it the open device files tell,
        // which may be more (the driver opens all that it sees).
        let gpus = match process.uses.gpus.len() {
            0 => process.process.gpu_devices().len(),
            used => used,
        };
        if gpus > 1 {
            let minimum = gate.minimum_driver;
            return Err(Cause::MultiGpu { who: process.who(), gpus, minimum });
        }
    }
    Ok(())
}

/// Notes which GPUs each process uses. Only while it runs: a checkpointed one uses none.
pub(crate) fn find_uses(parts: &mut Parts<'_>, cuda: &mut [CudaProcess]) {
    let Some(mut usage) = parts.driver.usage(&pids(cuda)) else { return };
    for process in cuda {
        if let Some(uses) = usage.remove(&process.pid())
            && !uses.gpus.is_empty()
        {
            process.uses = uses;
        }
    }
}

/// CUDA processes that are not among `known`.
pub(crate) fn newcomers(
    parts: &mut Parts<'_>,
    known: &[CudaProcess],
) -> Result<Vec<CudaProcess>, Cause> {
    let known = pids(known);
    let all = parts.processes.list()?;
    let candidates: Vec<&Process> = all
        .iter()
        .filter(|process| process.is_candidate() && !known.contains(&process.id.pid))
        .collect();
    // On a host without a driver none has CUDA, as long as none has a device.
    let none_can = || {
        candidates.iter().all(|process| process.devices.is_empty())
            && !parts.processes.host_has_gpu()
    };
    if candidates.is_empty() || none_can() { Ok(Vec::new()) } else { probe(parts, &candidates) }
}
