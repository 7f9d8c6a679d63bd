//! [`Driver`] over a helper process: started at the first call, killed when a call is overdue, and
//! then started again for the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use stasis_config::config;

use super::job::{Copied, Job, Named, Neighbour, Unusable};
use super::protocol::{Reply, Request};
use super::sides::Sides;
use super::{
    Answers, Call, CudaError, CudaState, Driver, DriverError, DriverFacts, GpuUse,
    HELPER_SUBCOMMAND, Steps,
};
use crate::child::{Helper, Lost, Program};
use crate::processes::{Pid, ProcessId};

/// How long a call may take that the driver answers at once (measured: 0.1 ms).
const SHORT: Duration = Duration::from_secs(10);
/// After this a lock is not granted at once (measured: 0.6 ms).
const SOON: Duration = Duration::from_millis(100);
/// What a lock gets beyond the timeout that the driver itself keeps.
const GRACE: Duration = Duration::from_secs(2);
/// What the helper gets to say that NVIDIA's command was late.
const TO_TELL: Duration = Duration::from_secs(1);

/// The driver of this host.
#[derive(Debug)]
pub struct HelperDriver {
    program: Program,
    config: config::Cuda,
    job: Option<Job>,
    device_map: Vec<(String, String)>,
    sides: Sides,
    /// By what calls are made, once that is known; it stays the same for a driver.
    way: Option<Way>,
    running: Option<(Helper, DriverFacts)>,
}

impl HelperDriver {
    /// Nothing is started yet.
    #[must_use]
    pub fn new(program: Program, config: &config::Cuda) -> Self {
        Self {
            program,
            config: config.clone(),
            job: None,
            device_map: Vec::new(),
            sides: Sides::default(),
            way: None,
            running: None,
        }
    }

    fn ready(&mut self) -> Result<&mut (Helper, DriverFacts), DriverError> {
        if self.running.is_none() {
            let (helper, facts) = self.start()?;
            self.way = Some(Way { utility: facts.utility.is_some(), steps: facts.steps });
            self.running = Some((helper, facts));
        }
        self.running.as_mut().ok_or_else(not_started)
    }

    fn start(&self) -> Result<(Helper, DriverFacts), DriverError> {
        let mut helper = Helper::start(&self.program, HELPER_SUBCOMMAND)
            .map_err(|error| lost(Call::Init, format!("not started: {error}")))?;
        let limit = self.config.init_timeout;
        let request = Request {
            limit_ms: milliseconds(limit),
            interface: self.config.interface,
            utility: self.config.utility.clone(),
            libcuda: self.config.libcuda.clone(),
            libnvml: self.config.libnvml.clone(),
            job: self.job.clone(),
            ..Request::new(Call::Init)
        };
        let deadline = Instant::now() + limit;
        let reply = helper.send(&request).and_then(|()| helper.receive(deadline));
        match reply.map_err(|how| error_of(Call::Init, limit, how))? {
            Reply::Ready(facts) => Ok((helper, facts)),
            Reply::NoLibrary(searched) => Err(DriverError::NoLibrary(searched)),
            Reply::NoUtility(reason) => Err(DriverError::NoUtility(reason)),
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
        let ready = self.ready().map(|_| ());
        let failed = match ready.and_then(|()| self.running.as_mut().ok_or_else(not_started)) {
            Ok((helper, facts)) => {
                let checkpointed = self.sides.checkpointed();
                let device_map =
                    if call == Call::Restore { self.device_map.as_slice() } else { &[] };
                let asked = Asked { call, pids, checkpointed, device_map, timeout, limit };
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
        self.stepped(call, answers)
    }

    /// The answers to a step. Where that is a toggle, its errors are named so, and it is noted what
    /// is known from now on.
    fn stepped(&mut self, call: Call, answers: Answers<i32>) -> Answers<()> {
        let toggles = self.way.is_some_and(|way| way.steps == Steps::Toggle);
        answers
            .into_iter()
            .map(|(pid, answer)| {
                let answer = answer.map(|_| ());
                if !toggles {
                    return (pid, answer);
                }
                self.sides.note(call, pid, &answer);
                (pid, answer.map_err(by_toggle))
            })
            .collect()
    }

    /// By what calls are made. Starts a helper only to learn it.
    fn way(&mut self) -> Result<Way, DriverError> {
        if self.way.is_none() {
            self.ready()?;
        }
        Ok(self.way.unwrap_or_default())
    }
}

/// By what calls are made.
#[derive(Debug, Clone, Copy, Default)]
struct Way {
    utility: bool,
    steps: Steps,
}

/// The error with the name of what was called.
fn by_toggle(error: DriverError) -> DriverError {
    let call = Call::Toggle;
    match error {
        DriverError::Refused { error, .. } => DriverError::Refused { call, error },
        DriverError::Deadline { after, .. } => DriverError::Deadline { call, after },
        DriverError::HelperLost { how, .. } => DriverError::HelperLost { call, how },
        DriverError::Utility { how, .. } => DriverError::Utility { call, how },
        other => other,
    }
}

/// A call for each of some processes.
struct Asked<'a> {
    call: Call,
    pids: &'a [Pid],
    /// Known to be CHECKPOINTED.
    checkpointed: &'a BTreeSet<Pid>,
    /// Onto which GPUs, for a restore.
    device_map: &'a [(String, String)],
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
    let Asked { call, pids, checkpointed, device_map, timeout, limit } = *asked;
    // 0 would mean no limit to the driver.
    let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1);
    let limit_ms = milliseconds(limit);
    let request = Request {
        pids: pids.to_vec(),
        checkpointed: checkpointed.clone(),
        device_map: device_map.to_vec(),
        timeout_ms,
        limit_ms,
        ..Request::new(call)
    };
    let to_tell = if facts.utility.is_some() { TO_TELL } else { Duration::ZERO };
    let deadline = Instant::now() + limit + to_tell;
    // With the toggle also when those that are late are waited for, and the others run again.
    let late =
        Instant::now() + if facts.steps == Steps::Toggle { timeout } else { limit + to_tell };
    let mut moments = [Instant::now() + SOON, late].into_iter().peekable();
    helper.send(&request).map_err(|how| error_of(call, limit, how))?;
    while answers.len() < pids.len() {
        let moment = moments.peek().filter(|_| waiting.is_some());
        let until = moment.map_or(deadline, |moment| deadline.min(*moment));
        let reply = match helper.receive(until) {
            Ok(reply) => reply,
            Err(Lost::Deadline) if until < deadline => {
                moments.next();
                if let Some(waiting) = &mut waiting {
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
            Reply::Unsupported { pid } => (pid, Err(facts.unsupported(call))),
            Reply::AlreadyThere { pid } => (pid, Err(DriverError::AlreadyThere { call })),
            Reply::BroughtBack { pid } => (pid, Err(DriverError::BroughtBack { call })),
            Reply::OthersNotReady { pid } => (pid, Err(DriverError::OthersNotReady { call })),
            Reply::Late { pid } => (pid, Err(DriverError::Deadline { call, after: limit })),
            Reply::Failed { pid, how } => (pid, Err(DriverError::Utility { call, how })),
            other => return Err(lost(call, format!("unexpected answer {other:?}"))),
        };
        answers.insert(pid, answer);
    }
    Ok(())
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn not_started() -> DriverError {
    lost(Call::Init, "not started".to_owned())
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

    fn steps(&mut self) -> Result<Steps, DriverError> {
        Ok(self.way()?.steps)
    }

    fn probe(&mut self, pids: &[Pid]) -> Answers<Option<Pid>> {
        // NVIDIA's command starts the driver each time.
        let limit = if self.way().is_ok_and(|way| way.utility) {
            SHORT.max(self.config.init_timeout)
        } else {
            SHORT
        };
        self.ask(Call::Probe, pids, limit)
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
        let state = |pid, raw| self.sides.state(pid, CudaState::from_raw(raw));
        answers.into_iter().map(|(pid, raw)| (pid, raw.map(|raw| state(pid, raw)))).collect()
    }

    fn lock(&mut self, pids: &[Pid], timeout: Duration, waiting: &mut dyn FnMut()) -> Answers<()> {
        let whole = self.config.checkpoint_timeout;
        let (timeout, limit) = match self.way().unwrap_or_default() {
            // They wait for those that are late as long as both steps may take, and not only for this
            // attempt, which would leave them LOCKED. Then all go back, which takes as long as a restore.
            Way { steps: Steps::Toggle, .. } => (whole, whole + self.config.restore_timeout),
            Way { utility: true, .. } => (timeout, timeout + GRACE + self.config.init_timeout),
            Way { utility: false, .. } => (timeout, timeout + GRACE),
        };
        let mut answers = Answers::new();
        // In a job one by one, each with its time.
        let together = if self.job.is_some() { 1 } else { pids.len().max(1) };
        for pids in pids.chunks(together) {
            answers.extend(self.ask_and(Call::Lock, pids, timeout, limit, Some(&mut *waiting)));
        }
        self.stepped(Call::Lock, answers)
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

    fn recall(&mut self, suspended: &[Pid]) {
        self.sides.recall(suspended);
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

    /// As of a driver that can only toggle: the first is refused, the second is done, the third late.
    const TOGGLING: &str = r#"
        cd "$(dirname "$0")"
        while read -r line; do
            printf '%s\n' "$line" >>asked
            case $line in
            *'"call":"init"'*) echo '{"ready":{"library":"/l","cuda_version":12040,"driver_version":"550.1",
                "gpus":[],"missing":[],"utility":"/u","steps":"toggle"}}' | tr -d '\n'; echo;;
            *'"call":"lock"'*)
                echo '{"answer":{"pid":101,"code":801,"value":0}}'
                echo '{"answer":{"pid":102,"code":0,"value":0}}'
                echo '{"late":{"pid":103}}';;
            *'"call":"state"'*)
                for pid in 101 102 103 104; do echo "{\"answer\":{\"pid\":$pid,\"code\":0,\"value\":0}}"; done;;
            esac
        done"#;

    #[test]
    fn what_a_toggle_may_have_left_locked_is_undetermined() {
        let directory = tempfile::tempdir().unwrap();
        let program = Program::at(crate::child::script(directory.path(), TOGGLING));
        let config = config::Cuda { utility: "/u".into(), ..config::Cuda::default() };
        let mut driver = HelperDriver::new(program, &config);
        assert_eq!(driver.steps(), Ok(Steps::Toggle));
        let (pids, limit) = ([101, 102, 103], Duration::from_secs(5));
        driver.recall(&[104]);
        let answers = driver.lock(&pids, limit, &mut || {});
        let call = Call::Toggle;
        let refused = DriverError::Refused { call, error: CudaError::NOT_SUPPORTED };
        assert_eq!(answers[&101], Err(refused));
        assert_eq!(answers[&102], Ok(()));
        // The time for both steps, and for the way back of those that have waited.
        let after = config.checkpoint_timeout + config.restore_timeout;
        assert_eq!(answers[&103], Err(DriverError::Deadline { call, after }));
        let states = driver.states(&[101, 102, 103, 104], limit);
        let states: Vec<_> = states.into_values().map(Result::unwrap).collect();
        let (running, unknown) = (CudaState::Running, CudaState::Undetermined);
        assert_eq!(states, [unknown, running, unknown, running]);
        let asked = std::fs::read_to_string(directory.path().join("asked")).unwrap();
        let last = asked.lines().last().unwrap();
        assert!(last.contains("\"checkpointed\":[102,104]"), "{last}");
        assert!(asked.contains("\"interface\":\"auto\",\"utility\":\"/u\""), "{asked}");
    }

    /// What the helper is told, by which it ends a toggle.
    #[test]
    fn those_that_have_waited_in_vain_get_the_time_of_a_restore_to_go_back() {
        let directory = tempfile::tempdir().unwrap();
        let program = Program::at(crate::child::script(directory.path(), TOGGLING));
        let config = config::Cuda {
            utility: "/u".into(),
            checkpoint_timeout: Duration::from_secs(40),
            restore_timeout: Duration::from_secs(70),
            ..config::Cuda::default()
        };
        let mut driver = HelperDriver::new(program, &config);
        driver.lock(&[101, 102, 103], Duration::from_secs(2), &mut || {});
        let asked = std::fs::read_to_string(directory.path().join("asked")).unwrap();
        let lock = asked.lines().find(|line| line.contains("\"call\":\"lock\"")).unwrap();
        assert!(lock.contains("\"timeout_ms\":40000,\"limit_ms\":110000,"), "{lock}");
    }

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
