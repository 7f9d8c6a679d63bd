//! [`Driver`] over a helper process: started at the first call, killed when a call is overdue, and
//! then started again for the next one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::job::{Copied, Job, Named, Neighbour, Unusable};
use super::protocol::{Reply, Request};
use super::{
    Answers, Call, CudaError, CudaState, Driver, DriverError, DriverFacts, GpuUse,
    HELPER_SUBCOMMAND,
};
use crate::child::{Helper, Lost, Program};
use crate::processes::{Pid, ProcessId};

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
    job: Option<Job>,
    device_map: Vec<(String, String)>,
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
            job: None,
            device_map: Vec::new(),
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
            libcuda: self.libcuda.clone(),
            libnvml: self.libnvml.clone(),
            job: self.job.clone(),
            ..Request::new(Call::Init)
        };
        let deadline = Instant::now() + self.init_timeout;
        let reply = helper.send(&request).and_then(|()| helper.receive(deadline));
        match reply.map_err(|how| error_of(Call::Init, self.init_timeout, how))? {
            Reply::Ready(facts) => Ok((helper, facts)),
            Reply::NoLibrary(searched) => Err(DriverError::NoLibrary(searched)),
            Reply::NoJobFile(reason) => Err(DriverError::JobFile(reason)),
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

    /// In a job one after the other, until one fails: members that are operated at the same time
    /// would spoil each other's part of the job file.
    fn ask_in_turn(&mut self, call: Call, pids: &[Pid], limit: Duration) -> Answers<i32> {
        let deadline = Instant::now() + limit;
        let mut answers = Answers::new();
        for pid in pids {
            let left = deadline.saturating_duration_since(Instant::now());
            let one = self.ask(call, &[*pid], left);
            let failed = one.values().any(|answer| match answer {
                Ok(_) => false,
                // It may be there already; whoever asked reads the state.
                Err(error) => error.code() != Some(CudaError::ILLEGAL_STATE),
            });
            answers.extend(one);
            if failed {
                break;
            }
        }
        answers
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
        let answers = if self.job.is_some() {
            self.ask_in_turn(call, pids, limit)
        } else {
            self.ask(call, pids, limit)
        };
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
    let request = Request { pids: pids.to_vec(), timeout_ms, ..Request::new(call) };
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
        let mut answers = Answers::new();
        // In a job one by one, each with its time.
        let together = if self.job.is_some() { 1 } else { pids.len().max(1) };
        for pids in pids.chunks(together) {
            answers.extend(self.ask_and(Call::Lock, pids, timeout, limit, Some(&mut *waiting)));
        }
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

    fn job_files(
        &mut self,
        processes: &[ProcessId],
        init: ProcessId,
        neighbours: &[Neighbour],
    ) -> Result<BTreeMap<Pid, Result<Option<Named>, Unusable>>, DriverError> {
        let request = Request {
            processes: processes.to_vec(),
            init: Some(init),
            neighbours: neighbours.to_vec(),
            ..Request::new(Call::JobFiles)
        };
        match self.ask_one(&request, SHORT)? {
            Reply::JobFiles(named) => Ok(named),
            other => Err(lost(Call::JobFiles, format!("unexpected answer {other:?}"))),
        }
    }

    fn map_devices(&mut self, map: &[(String, String)]) {
        self.device_map = map.to_vec();
    }

    fn join(&mut self, job: Option<&Job>) {
        if self.job.as_ref() != job {
            self.job = job.cloned();
            // The driver reads the variable once.
            self.running = None;
        }
    }

    fn copy_job_file(
        &mut self,
        job: &Job,
        to: Option<&Path>,
        limit: Duration,
    ) -> Result<Copied, DriverError> {
        let (job, to) = (Some(job.clone()), to.map(Path::to_owned));
        let request = Request { job, to, ..Request::new(Call::CopyJobFile) };
        match self.ask_one(&request, limit)? {
            Reply::Copied(copied) => Ok(copied),
            Reply::NoJobFile(reason) => Err(DriverError::JobFile(reason)),
            other => Err(lost(Call::CopyJobFile, format!("unexpected answer {other:?}"))),
        }
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
        let request = Request { pids: pids.to_vec(), ..Request::new(call) };
        self.ask_one(&request, SHORT)
            .inspect_err(|error| tracing::warn!(%error, "NVML did not answer"))
            .ok()
    }

    /// A request that has one answer.
    fn ask_one(&mut self, request: &Request, limit: Duration) -> Result<Reply, DriverError> {
        let (helper, _) = self.ready()?;
        let deadline = Instant::now() + limit;
        let answered = helper.send(request).and_then(|()| helper.receive(deadline));
        answered.map_err(|how| {
            self.running = None;
            error_of(request.call, limit, how)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::Identity;
    use super::*;

    /// Answers everything, and keeps what it was asked. A call for pid 102 fails at the third time.
    const HELPER: &str = r#"
        cd "$(dirname "$0")"
        while read -r line; do
            case $line in *'"call":"init"'*)
                echo '{"ready":{"library":"/l","cuda_version":13030,"driver_version":"610.1","gpus":[],"missing":[]}}'
                continue
            esac
            printf '%s\n' "$line" | sed 's/.*"call":"\([a-z]*\)","pids":\[\([0-9,]*\)\].*/\1 \2/' >>asked
            for pid in $(tail -n 1 asked | sed 's/.* //; s/,/ /g'); do
                code=0
                [ "$pid $(grep -c 'restore.*102' asked)" != '102 2' ] || code=999
                printf '{"answer":{"pid":%s,"code":%s,"value":0}}\n' "$pid" "$code"
            done
        done"#;

    #[test]
    fn the_members_of_a_job_are_asked_one_after_the_other_until_one_fails() {
        let directory = tempfile::tempdir().unwrap();
        let program = Program::at(crate::child::script(directory.path(), HELPER));
        let mut driver = HelperDriver::new(program, &stasis_config::config::Cuda::default());
        let (pids, limit) = ([103, 102, 101], Duration::from_secs(20));
        let mut asked = |act: &mut dyn FnMut(&mut HelperDriver) -> Answers<()>| {
            let answers = act(&mut driver);
            let path = directory.path().join("asked");
            let text = std::fs::read_to_string(&path).unwrap();
            (answers.len(), text)
        };
        let (count, text) = asked(&mut |driver| driver.restore(&pids, limit));
        assert_eq!((count, text.as_str()), (3, "restore 103,102,101\n"), "all at once");
        let job = Job { file: Identity { device: 1, inode: 1 }, ways: Vec::new() };
        let (count, text) = asked(&mut |driver| {
            driver.join(Some(&job));
            driver.checkpoint(&pids, limit)
        });
        let one_by_one = "checkpoint 103\ncheckpoint 102\ncheckpoint 101\n";
        assert!(count == 3 && text.ends_with(one_by_one), "{text}");
        let (_, text) = asked(&mut |driver| driver.lock(&pids, limit, &mut || {}));
        assert!(text.ends_with("lock 103\nlock 102\nlock 101\n"), "{text}");
        let (count, text) = asked(&mut |driver| driver.restore(&pids, limit));
        assert!(count == 2 && text.ends_with("restore 103\nrestore 102\n"), "{text}");
    }
}
