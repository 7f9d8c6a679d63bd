//! [`Hold`] over the tracer process.

use std::time::{Duration, Instant};

use super::tracer::{Reply, Request};
use super::{HELPER_SUBCOMMAND, Hold, HoldError, Target};
use crate::child::{Helper, Lost, Program};
use crate::container::Cgroup;
use crate::freezer::Freezer;
use crate::processes::Pid;

/// How long a thread may take to return from the kernel.
const SETTLE: Duration = Duration::from_secs(10);
/// How long the tracer itself may take beyond that.
const GRACE: Duration = Duration::from_secs(5);

/// Starts the tracer at the first hold.
#[derive(Debug)]
pub struct Tracer {
    program: Program,
    cgroup: Option<Cgroup>,
    running: Option<Helper>,
    /// The container was frozen when the holding began.
    frozen: bool,
}

impl Tracer {
    /// Nothing is started yet. `cgroup` is frozen again if this process is lost while it holds
    /// what was frozen.
    #[must_use]
    pub fn new(program: Program, cgroup: Option<Cgroup>) -> Self {
        Self { program, cgroup, running: None, frozen: false }
    }

    fn request(&self, targets: &[Target]) -> Request {
        let freeze_if_lost = self.cgroup.clone().filter(|_| self.frozen);
        Request::Hold { targets: targets.to_vec(), freeze_if_lost }
    }

    fn ask(&mut self, request: &Request) -> Result<(), HoldError> {
        let mut helper = match self.running.take() {
            Some(helper) => helper,
            None => Helper::start(&self.program, HELPER_SUBCOMMAND)?,
        };
        let deadline = Instant::now() + SETTLE + GRACE;
        let reply = helper.send(request).and_then(|()| helper.receive(deadline));
        match reply {
            Ok(Reply::Done) => {
                self.running = Some(helper);
                Ok(())
            }
            Ok(Reply::Refused { pid, tid, reason }) => {
                self.running = Some(helper);
                Err(HoldError::Refused { pid, tid, reason })
            }
            Ok(Reply::Pending { tid, state }) => {
                self.running = Some(helper);
                Err(HoldError::Pending { tid, state })
            }
            Err(Lost::Deadline) => Err(HoldError::Lost("it did not answer".to_owned())),
            Err(Lost::Ended(how)) => Err(HoldError::Lost(how)),
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // Not killed: it may have to freeze first.
        if let Some(helper) = self.running.take() {
            helper.leave();
        }
    }
}

impl Hold for Tracer {
    fn hold(&mut self, targets: &[Target]) -> Result<(), HoldError> {
        if self.running.is_none() {
            self.frozen =
                self.cgroup.as_ref().is_some_and(|cgroup| cgroup.frozen().unwrap_or(true));
        }
        self.ask(&self.request(targets))
    }

    fn settle(&mut self) -> Result<(), HoldError> {
        let milliseconds = u64::try_from(SETTLE.as_millis()).unwrap_or(u64::MAX);
        self.ask(&Request::Settle { milliseconds })
    }

    fn release(&mut self) {
        if self.running.is_none() {
            return;
        }
        if let Err(error) = self.ask(&self.request(&[])) {
            // The kernel lets all threads of a dead tracer go.
            tracing::debug!(%error, "threads are let go by ending the tracer");
        }
        self.running = None;
    }

    fn tracer(&self) -> Option<Pid> {
        self.running.as_ref().and_then(|helper| Pid::try_from(helper.id()).ok())
    }
}
