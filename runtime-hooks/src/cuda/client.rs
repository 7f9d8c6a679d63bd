//! [`Driver`] over a helper process: started at the first call, killed when a call is overdue, and
//! then started again for the next one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::protocol::{Reply, Request};
use super::{
    Answers, Call, CudaError, CudaState, Driver, DriverError, DriverFacts, GpuUse,
    HELPER_SUBCOMMAND,
};
use crate::child::{Helper, Lost, Program};
use crate::processes::Pid;

/// How long a call may take that the driver answers at once (measured: 0.1 ms).
const SHORT: Duration = Duration::from_secs(10);
/// After this a lock is not granted at once (measured: 0.6 ms).
const SOON: Duration = Duration::from_millis(100);
/// What a lock gets beyond the timeout that the driver itself keeps.
const GRACE: Duration = Duration::from_secs(2);

/// The driver of this host.
#[derive(Debug)]
pub struct HelperDriver {
    program: Program,
    libcuda: Option<PathBuf>,
    libnvml: Option<PathBuf>,
    init_timeout: Duration,
    running: Option<(Helper, DriverFacts)>,
}

impl HelperDriver {
    /// Nothing is started yet.
    #[must_use]
    pub fn new(program: Program, config: &stasis_config::config::Cuda) -> Self {
        Self {
            program,
            libcuda: config.libcuda.clone(),
            libnvml: config.libnvml.clone(),
            init_timeout: config.init_timeout,
            running: None,
        }
    }

    fn ready(&mut self) -> Result<&mut (Helper, DriverFacts), DriverError> {
        if self.running.is_none() {
            self.running = Some(self.start()?);
        }
        self.running.as_mut().ok_or_else(|| lost(Call::Init, "not started".to_owned()))
    }

    fn start(&self) -> Result<(Helper, DriverFacts), DriverError> {
        let mut helper = Helper::start(&self.program, HELPER_SUBCOMMAND)
            .map_err(|error| lost(Call::Init, format!("not started: {error}")))?;
        let request = Request {
            call: Call::Init,
            pids: Vec::new(),
            timeout_ms: 0,
            libcuda: self.libcuda.clone(),
            libnvml: self.libnvml.clone(),
        };
        let deadline = Instant::now() + self.init_timeout;
        let reply = helper.send(&request).and_then(|()| helper.receive(deadline));
        match reply.map_err(|how| error_of(Call::Init, self.init_timeout, how))? {
            Reply::Ready(facts) => Ok((helper, facts)),
            Reply::NoLibrary(searched) => Err(DriverError::NoLibrary(searched)),
            Reply::InitFailed(code) => {
                Err(DriverError::Refused { call: Call::Init, error: CudaError(code) })
            }
            other => Err(lost(Call::Init, format!("unexpected answer {other:?}"))),
        }
    }

    /// Makes one call for each of `pids`. What has no answer when the limit is reached gets the
    /// reason as its answer.
    fn ask(&mut self, call: Call, pids: &[Pid], limit: Duration) -> Answers<i32> {
        self.ask_and(call, pids, limit, limit, None)
    }

    /// As [`Self::ask`], with the driver's own timeout, and something to do if it takes a while.
    fn ask_and(
        &mut self,
        call: Call,
        pids: &[Pid],
        timeout: Duration,
        limit: Duration,
        waiting: Option<&mut dyn FnMut()>,
    ) -> Answers<i32> {
        let mut answers = Answers::new();
        if pids.is_empty() {
            return answers;
        }
        let failed = match self.ready() {
            Ok((helper, facts)) => {
                let asked = Asked { call, pids, timeout, limit };
                exchange(helper, facts, &asked, waiting, &mut answers)
            }
            Err(error) => Err(error),
        };
        if let Err(error) = failed {
            // Whatever state the helper is in, the next call gets a fresh one.
            self.running = None;
            for pid in pids {
                answers.entry(*pid).or_insert_with(|| Err(error.clone()));
            }
        }
        answers
    }

    fn act(&mut self, call: Call, pids: &[Pid], limit: Duration) -> Answers<()> {
        let answers = self.ask(call, pids, limit);
        answers.into_iter().map(|(pid, answer)| (pid, answer.map(|_| ()))).collect()
    }
}

/// A call for each of some processes.
struct Asked<'a> {
    call: Call,
    pids: &'a [Pid],
    /// The driver's.
    timeout: Duration,
    /// Ours.
    limit: Duration,
}

fn exchange(
    helper: &mut Helper,
    facts: &DriverFacts,
    asked: &Asked<'_>,
    mut waiting: Option<&mut dyn FnMut()>,
    answers: &mut Answers<i32>,
) -> Result<(), DriverError> {
    let Asked { call, pids, timeout, limit } = *asked;
    // 0 would mean no limit to the driver.
    let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1);
    let request = Request { call, pids: pids.to_vec(), timeout_ms, libcuda: None, libnvml: None };
    let deadline = Instant::now() + limit;
    let soon = Instant::now() + SOON;
    helper.send(&request).map_err(|how| error_of(call, limit, how))?;
    while answers.len() < pids.len() {
        let until = if waiting.is_some() { soon.min(deadline) } else { deadline };
        let reply = match helper.receive(until) {
            Ok(reply) => reply,
            Err(Lost::Deadline) if until < deadline => {
                if let Some(waiting) = waiting.take() {
                    waiting();
                }
                continue;
            }
            Err(how) => return Err(error_of(call, limit, how)),
        };
        let (pid, answer) = match reply {
            Reply::Answer { pid, code: 0, value } => (pid, Ok(value)),
            Reply::Answer { pid, code, .. } => {
                (pid, Err(DriverError::Refused { call, error: CudaError(code) }))
            }
            Reply::Unsupported { pid } => {
                (pid, Err(DriverError::Unsupported { call, driver: describe(facts) }))
            }
            other => return Err(lost(call, format!("unexpected answer {other:?}"))),
        };
        answers.insert(pid, answer);
    }
    Ok(())
}

fn describe(facts: &DriverFacts) -> String {
    let cuda = format!("CUDA {}.{}", facts.cuda_version / 1000, facts.cuda_version % 1000 / 10);
    match &facts.driver_version {
        Some(version) => format!("{version}, {cuda}"),
        None => cuda,
    }
}

fn lost(call: Call, how: String) -> DriverError {
    DriverError::HelperLost { call, how }
}

fn error_of(call: Call, limit: Duration, how: Lost) -> DriverError {
    match how {
        Lost::Deadline => DriverError::Deadline { call, after: limit },
        Lost::Ended(how) => lost(call, how),
    }
}

impl Driver for HelperDriver {
    fn facts(&mut self) -> Result<DriverFacts, DriverError> {
        self.ready().map(|(_, facts)| facts.clone())
    }

    fn probe(&mut self, pids: &[Pid]) -> Answers<Option<Pid>> {
        self.ask(Call::Probe, pids, SHORT)
            .into_iter()
            .map(|(pid, answer)| {
                let answer = match answer {
                    Ok(tid) => Ok(Some(tid)),
                    Err(error) => match error.code() {
                        Some(CudaError::NOT_INITIALIZED | CudaError::OPERATING_SYSTEM) => Ok(None),
                        _ => Err(error),
                    },
                };
                (pid, answer)
            })
            .collect()
    }

    fn states(&mut self, pids: &[Pid], limit: Duration) -> Answers<CudaState> {
        let answers = self.ask(Call::State, pids, limit);
        answers.into_iter().map(|(pid, raw)| (pid, raw.map(CudaState::from_raw))).collect()
    }

    fn lock(&mut self, pids: &[Pid], timeout: Duration, waiting: &mut dyn FnMut()) -> Answers<()> {
        let limit = timeout + GRACE;
        let answers = self.ask_and(Call::Lock, pids, timeout, limit, Some(waiting));
        answers.into_iter().map(|(pid, answer)| (pid, answer.map(|_| ()))).collect()
    }

    fn checkpoint(&mut self, pids: &[Pid], limit: Duration) -> Answers<()> {
        self.act(Call::Checkpoint, pids, limit)
    }

    fn restore(&mut self, pids: &[Pid], limit: Duration) -> Answers<()> {
        self.act(Call::Restore, pids, limit)
    }

    fn unlock(&mut self, pids: &[Pid], limit: Duration) -> Answers<()> {
        self.act(Call::Unlock, pids, limit)
    }

    fn usage(&mut self, pids: &[Pid]) -> Option<BTreeMap<Pid, GpuUse>> {
        match self.ask_nvml(Call::Usage, pids)? {
            Reply::Usage(usage) => usage,
            _ => None,
        }
    }

    fn free_memory(&mut self) -> Option<BTreeMap<String, u64>> {
        match self.ask_nvml(Call::FreeMemory, &[])? {
            Reply::FreeMemory(free) => free,
            _ => None,
        }
    }
}

impl HelperDriver {
    /// NVML is of use and not a condition: without an answer it goes on without.
    fn ask_nvml(&mut self, call: Call, pids: &[Pid]) -> Option<Reply> {
        let (helper, _) = self.ready().ok()?;
        let request =
            Request { call, pids: pids.to_vec(), timeout_ms: 0, libcuda: None, libnvml: None };
        let deadline = Instant::now() + SHORT;
        match helper.send(&request).and_then(|()| helper.receive(deadline)) {
            Ok(reply) => Some(reply),
            Err(how) => {
                tracing::warn!(?how, call = call.function(), "NVML did not answer");
                self.running = None;
                None
            }
        }
    }
}
