//! Locking the members of a job, which is done one after the other.
//!
//! Ranks with NCCL wait for each other: the kernel of one that is ahead ends when the others have
//! launched theirs. Locked at the same moment they come to rest by the driver's own doing (see
//! `cuda::together`), but members of a job may not be operated at the same moment. So here it is
//! decided who goes on:
//!
//! ```text
//! hold all threads → lock each
//!   → those that are not ready are ahead: they stay held, since they must not get further
//!   → those that are locked may run, and stop in front of their next launch; each is unlocked and
//!     locked again, which lets that one launch through
//!   → lock those that are ahead, until all are locked
//! ```
//!
//! In a paused container nothing of this happens in the first round. If some are ahead then, their
//! peers' own code has to run for as long as it takes to the next launch, or no such container could
//! ever be checkpointed by a client that pauses it: the one exception to 'paused stays paused'. It is
//! logged.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::cuda::{CudaError, CudaState};
use crate::error::{Cause, Who};
use crate::hold::Keep;
use crate::journal::Entry;
use crate::parts::{CudaProcess, Limits, Parts};
use crate::processes::Pid;
use crate::suspend::{
    STATE, check, driver_runs, interruptible, runs_although_paused, verify_locked,
};

/// How long one is waited for, the first time. Longer than it takes until a thread that is held inside
/// a CUDA call is let out of it.
const FIRST: Duration = Duration::from_millis(150);
/// How long those that are locked may take to come to their next launch.
const TO_LAUNCH: Duration = Duration::from_millis(2);
/// After so many rounds all are let go, should they depend on each other in a way that nobody thought
/// of; not where the caller has paused the container.
const ROUNDS: u32 = 8;
/// For so long.
const LET_GO: Duration = Duration::from_millis(50);

/// Locks all of `cuda` that run. Their threads are held afterwards.
pub(crate) fn lock(
    parts: &mut Parts<'_>,
    entry: &mut Entry,
    cuda: &[CudaProcess],
    deadline: Instant,
    limits: &Limits,
) -> Result<(), Cause> {
    let mut turns = Turns { cuda, locked: BTreeSet::new(), round: 0, frozen: entry.frozen };
    turns.hold(parts)?;
    let mut timeout = FIRST;
    loop {
        interruptible(parts)?;
        turns.round += 1;
        let left = deadline.saturating_duration_since(Instant::now());
        let now = timeout.min(left).max(Duration::from_millis(1));
        let Some(ahead) = turns.lock_each(parts, entry, now)? else {
            return verify_locked(parts, cuda);
        };
        if Instant::now() >= deadline {
            let (waited, attempts) = (limits.lock, turns.round);
            return Err(Cause::NotReady { who: ahead, waited, attempts });
        }
        if turns.frozen && turns.round == 1 {
            runs_although_paused(&entry.container, &ahead);
        }
        let stuck = turns.locked.is_empty() || turns.round.is_multiple_of(ROUNDS);
        if stuck && !turns.frozen {
            turns.let_go(parts)?;
        } else {
            turns.let_through(parts, entry, now)?;
        }
        timeout = timeout * 3 / 2;
    }
}

/// Who has come how far.
struct Turns<'a> {
    cuda: &'a [CudaProcess],
    locked: BTreeSet<Pid>,
    round: u32,
    /// Whether the caller has paused the container.
    frozen: bool,
}

impl Turns<'_> {
    /// Those that are locked run, as far as they get; the others are held.
    fn keep(&self, process: &CudaProcess) -> Keep {
        // What was paused stays so where that is possible.
        let may_run = !self.frozen || self.round > 1;
        if may_run && self.locked.contains(&process.pid()) {
            Keep::All
        } else {
            driver_runs(process)
        }
    }

    fn hold(&self, parts: &mut Parts<'_>) -> Result<(), Cause> {
        parts.holding().all(self.cuda, |process| self.keep(process))?;
        Ok(parts.hold.settle()?)
    }

    /// Locks each that is not. Gives the first that is not ready.
    fn lock_each(
        &mut self,
        parts: &mut Parts<'_>,
        entry: &mut Entry,
        timeout: Duration,
    ) -> Result<Option<Who>, Cause> {
        let mut ahead = None;
        for process in self.cuda {
            let runs = process.found == Some(CudaState::Running);
            if runs
                && !self.locked.contains(&process.pid())
                && !self.lock(parts, entry, process, timeout)?
            {
                ahead.get_or_insert_with(|| process.who());
            }
        }
        Ok(ahead)
    }

    /// Locks one; whether it was ready.
    fn lock(
        &mut self,
        parts: &mut Parts<'_>,
        entry: &mut Entry,
        process: &CudaProcess,
        timeout: Duration,
    ) -> Result<bool, Cause> {
        let pid = process.pid();
        // Should this process be killed in the call, it is known who may be locked later.
        entry.locked_last = Some(process.process.id);
        entry.locking = true;
        parts.journal.save(entry)?;
        let (mut let_go, mut let_out) = (Ok(()), false);
        let may_run = !self.frozen || self.round > 1;
        let mut holding = crate::parts::Holding {
            hold: &mut *parts.hold,
            processes: parts.processes,
            freezer: parts.freezer,
        };
        let answer = parts.driver.lock(&[pid], timeout, &mut || {
            // It may be inside a CUDA call, and has to come out of it. It gets no further than to its
            // next one, which the requested lock blocks.
            let_out = true;
            let_go = holding.all(self.cuda, |other| match other.pid() == pid {
                true if may_run => Keep::All,
                true => Keep::InsideCalls(other.restore_thread),
                false => self.keep(other),
            });
        });
        let answer = answer.into_values().next().unwrap_or(Ok(()));
        // Only a call without an answer can leave a lock pending.
        entry.locking = answer.as_ref().is_err_and(|error| error.code().is_none());
        let_go?;
        let ready = match &answer {
            Ok(()) => true,
            Err(error) => match error.code() {
                Some(CudaError::NOT_READY | CudaError::TIMEOUT) => false,
                // It may be locked already; the state tells.
                Some(CudaError::ILLEGAL_STATE) => true,
                _ if !parts.processes.alive(process.process.id) => true,
                _ => {
                    return Err(Cause::Driver { who: process.who(), error: error.clone() });
                }
            },
        };
        if ready {
            self.locked.insert(pid);
        }
        if let_out {
            self.hold(parts)?;
        }
        Ok(ready)
    }

    /// Those that are locked get to their next launch, and through it.
    fn let_through(
        &mut self,
        parts: &mut Parts<'_>,
        entry: &mut Entry,
        timeout: Duration,
    ) -> Result<(), Cause> {
        self.hold(parts)?;
        std::thread::sleep(TO_LAUNCH);
        for process in self.cuda {
            if self.locked.contains(&process.pid()) {
                let answers = parts.driver.unlock(&[process.pid()], STATE);
                check(parts.processes, answers, std::slice::from_ref(process))?;
                self.locked.remove(&process.pid());
                self.lock(parts, entry, process, timeout)?;
            }
        }
        Ok(())
    }

    /// All go on for a moment.
    fn let_go(&mut self, parts: &mut Parts<'_>) -> Result<(), Cause> {
        let locked: Vec<&CudaProcess> =
            self.cuda.iter().filter(|process| self.locked.contains(&process.pid())).collect();
        for process in locked {
            let answers = parts.driver.unlock(&[process.pid()], STATE);
            check(parts.processes, answers, std::slice::from_ref(process))?;
        }
        self.locked.clear();
        parts.hold.release();
        std::thread::sleep(LET_GO);
        self.hold(parts)
    }
}
