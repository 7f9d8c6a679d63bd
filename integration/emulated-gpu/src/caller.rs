//! The checkpoint API as its caller sees it: finds the target's restore thread,
//! asks it through the mailbox, and lets ordered faults happen.

use std::fs;
use std::thread;
use std::time::Duration;

use crate::RESTORE_THREAD;
use crate::cuda_error::{CudaError, Result};
use crate::faults::{self, Call, What};
use crate::mailbox::{Action, Posted};
use crate::settings::{REMAP, Settings, Uuid};
use crate::store::{self, Entry, Key};
use crate::target::{self, State};

/// How often a caller looks for its reply.
const POLL: Duration = Duration::from_micros(500);

/// Names under which this library is mapped in a CUDA process.
const LIBRARY: [&str; 2] = ["libcuda.so", "libstasis_emulated_gpu"];

/// `cuCheckpointProcessGetRestoreThreadId`. Reads /proc alone, so that it answers on
/// a frozen process and on one that has not run since CRIU restored it.
pub(crate) fn restore_thread_id(pid: i32) -> Result<i32> {
    match faults::fire(Call::Probe)? {
        Some(What::Error(error)) if error != 0 => return Err(CudaError(error)),
        Some(What::Crash) => std::process::abort(),
        Some(What::Hang) => hang(),
        Some(What::HangAfter) => {
            let _ = find_restore_thread(pid);
            hang()
        }
        _ => {}
    }
    find_restore_thread(pid)
}

/// `cuCheckpointProcessGetState`.
pub(crate) fn state(pid: i32) -> Result<i32> {
    let fault = faults::fire(Call::State)?;
    match fault {
        Some(What::Error(error)) if error != 0 => return Err(CudaError(error)),
        Some(What::Crash) => std::process::abort(),
        Some(What::Hang) => hang(),
        _ => {}
    }
    let peer = Peer::find(pid)?;
    let state = peer.ask(&Action::State)?;
    if fault == Some(What::HangAfter) {
        hang()
    }
    let lie = peer.mark("lie").and_then(|text| text.parse().ok());
    if lie.is_some() {
        peer.entry.remove("lie")?;
    }
    Ok(lie.unwrap_or(state))
}

/// `cuCheckpointProcessLock`.
pub(crate) fn lock(pid: i32, timeout_ms: u32) -> Result<()> {
    operate(Call::Lock, pid, State::Locked, &Action::Lock { timeout_ms })
}

/// `cuCheckpointProcessCheckpoint`.
pub(crate) fn checkpoint(pid: i32) -> Result<()> {
    operate(Call::Checkpoint, pid, State::Checkpointed, &Action::Checkpoint)
}

/// `cuCheckpointProcessRestore`. That a driver which cannot remap refuses a list as an invalid value
/// is assumed: to it these are bytes that have to be zero.
pub(crate) fn restore(pid: i32, map: Vec<(Uuid, Uuid)>) -> Result<()> {
    if !map.is_empty() && Settings::current()?.branch() < REMAP {
        return Err(CudaError::INVALID_VALUE);
    }
    operate(Call::Restore, pid, State::Locked, &Action::Restore(map))
}

/// `cuCheckpointProcessUnlock`.
pub(crate) fn unlock(pid: i32) -> Result<()> {
    operate(Call::Unlock, pid, State::Running, &Action::Unlock)
}

/// One step; `done` is the state to which it leads.
fn operate(call: Call, pid: i32, done: State, action: &Action) -> Result<()> {
    let fault = faults::fire(call)?;
    match fault {
        Some(What::Error(0)) => return Ok(()),
        Some(What::Error(error)) => return Err(CudaError(error)),
        Some(What::Crash) => std::process::abort(),
        Some(What::Hang) => hang(),
        _ => {}
    }
    let peer = Peer::find(pid)?;
    if call == Call::Restore && peer.mark("lost").is_some() {
        return Err(CudaError::OPERATING_SYSTEM);
    }
    match fault {
        Some(What::Lie) => return peer.set_mark("lie", done as i32),
        // Asked all the same: in another state, or frozen, the restore ends otherwise.
        Some(What::Lost) if peer.ask(&Action::State)? == State::Checkpointed as i32 => {
            peer.set_mark("lost", 1)?;
            return Err(CudaError::INVALID_VALUE);
        }
        _ => {}
    }
    let result = peer.ask(action).map(|_| ());
    if fault == Some(What::HangAfter) {
        hang()
    }
    result
}

/// The process that a call is about.
struct Peer {
    pid: i32,
    restore_thread: i32,
    start_time: u64,
    entry: Entry,
}

impl Peer {
    fn find(pid: i32) -> Result<Self> {
        let restore_thread = find_restore_thread(pid)?;
        let start_time = store::start_time(&pid.to_string()).ok_or(CudaError::OPERATING_SYSTEM)?;
        Ok(Self { pid, restore_thread, start_time, entry: Key::of(pid)?.entry() })
    }

    /// Asks and waits, for ever if the target is frozen. Returns the target's state.
    fn ask(&self, action: &Action) -> Result<i32> {
        // To ask for the state nobody has to be of the job.
        let asks = *action == Action::State;
        let caller = if asks { None } else { target::as_caller()? };
        let posted = loop {
            if let Some(posted) = Posted::post(&self.entry, caller, action)? {
                break posted;
            }
            if !self.is_alive() {
                return Err(CudaError::OPERATING_SYSTEM);
            }
            thread::sleep(POLL);
        };
        loop {
            if let Some((code, value)) = posted.reply() {
                return if code == 0 { Ok(value) } else { Err(CudaError(code)) };
            }
            if !self.is_alive() {
                // It may have answered just before its end.
                let last = posted.reply().filter(|reply| reply.0 == 0);
                return last.map(|reply| reply.1).ok_or(CudaError::OPERATING_SYSTEM);
            }
            thread::sleep(POLL);
        }
    }

    fn is_alive(&self) -> bool {
        let task = format!("{}/task/{}", self.pid, self.restore_thread);
        store::start_time(&self.pid.to_string()) == Some(self.start_time)
            && store::start_time(&task).is_some()
    }

    /// A mark that a fault left on this very process.
    fn mark(&self, name: &str) -> Option<String> {
        let text = self.entry.read(name)?;
        let (time, value) = text.split_once(' ')?;
        (time.parse() == Ok(self.start_time)).then(|| value.to_owned())
    }

    fn set_mark(&self, name: &str, value: i32) -> Result<()> {
        Ok(self.entry.write(name, &format!("{} {value}", self.start_time))?)
    }
}

/// The tid as this process's /proc shows it. The thread's name alone could be
/// anybody's, so the library must be mapped too.
fn find_restore_thread(pid: i32) -> Result<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?;
    let thread = tasks.flatten().find_map(|task| {
        let comm = fs::read_to_string(task.path().join("comm")).ok()?;
        (comm.trim_end() == RESTORE_THREAD).then(|| task.file_name().to_str()?.parse().ok())?
    });
    let thread = thread.ok_or(CudaError::NOT_INITIALIZED)?;
    let maps = fs::read(format!("/proc/{pid}/maps"))?;
    let maps = String::from_utf8_lossy(&maps);
    if LIBRARY.iter().any(|name| maps.contains(name)) {
        Ok(thread)
    } else {
        Err(CudaError::NOT_INITIALIZED)
    }
}

/// Until the process is killed.
fn hang() -> ! {
    loop {
        thread::sleep(Duration::from_secs(3600));
    }
}
