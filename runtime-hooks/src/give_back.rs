//! Giving CUDA back: from CHECKPOINTED by way of LOCKED to the state in which each process was
//! found. Used after a dump, after a failure and after a restore.

use std::time::{Duration, Instant};

use crate::cuda::{CudaError, CudaState, Driver, DriverError};
use crate::error::Cause;
use crate::parts::{CudaProcess, pids};
use crate::processes::Processes;
use crate::suspend::{STATE, check, verify};

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Attempts after an error that waiting does not cure.
const ATTEMPTS: u32 = 3;

/// From CHECKPOINTED to LOCKED, all that were not found CHECKPOINTED. Memory may be short because
/// another job took it, and be free again in a moment; other errors are tried again a few times.
pub(crate) fn restore(
    driver: &mut dyn Driver,
    processes: &dyn Processes,
    cuda: &[CudaProcess],
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
            Some(Ok(state @ (CudaState::Failed | CudaState::Unknown(_)))) => {
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
) -> Result<(), Cause> {
    let asked: Vec<CudaProcess> = cuda
        .iter()
        .filter(|process| process.found == Some(CudaState::Running))
        .cloned()
        .collect();
    let mut attempts = 0;
    loop {
        attempts += 1;
        let answers = driver.unlock(&pids(&asked), STATE);
        let done = check(processes, answers, &asked)
            .and_then(|()| verify(driver, processes, cuda, |process| process.found.unwrap_or(CudaState::Running), STATE));
        match done {
            Ok(()) => return Ok(()),
            Err(cause) if attempts >= ATTEMPTS => {
                // As for restore: the call may have been lost and its work done.
                let lost = matches!(
                    &cause,
                    Cause::Driver {
                        error: DriverError::Deadline { .. } | DriverError::HelperLost { .. },
                        ..
                    }
                );
                if lost {
                    return verify(driver, processes, cuda, |process| process.found.unwrap_or(CudaState::Running), STATE);
                }
                return Err(cause);
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
