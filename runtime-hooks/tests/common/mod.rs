//! A world for the sequences: a container with CUDA processes, a driver that behaves as measured,
//! runc, image and journal, all in memory, each with faults to order.
//!
//! It panics where the real one would hang or lie: a driver call on a frozen process, a kill before
//! the image is whole, application code that runs where it must not.

#![allow(unreachable_pub, dead_code, reason = "a module of each test")]
#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use oci_spec::runtime::Spec;
use stasis_config::{Annotations, Manifest, manifest};
use stasis_hooks::cdi::CdiError;
use stasis_hooks::checkpoint::{self, After};
use stasis_hooks::container::{Cgroup, CgroupVersion, Container};
use stasis_hooks::cuda::job::{Copied, Identity, Job, Named, Neighbour, Unusable, Way};
use stasis_hooks::cuda::sides::Sides;
use stasis_hooks::cuda::{
    Answers, Call, CudaError, CudaState, Driver, DriverError, DriverFacts, GpuUse, Steps,
};
use stasis_hooks::discover::discover;
use stasis_hooks::error::{Cause, Failure, Phase};
use stasis_hooks::freezer::{Freezer, FreezerError};
use stasis_hooks::gpu_locks::{GpuLocks, Locked};
use stasis_hooks::hold::{Hold, HoldError, Keep, Target};
use stasis_hooks::host_memory::{HostMemory, Room};
use stasis_hooks::image::Image;
use stasis_hooks::job::{Found, JobError};
use stasis_hooks::journal::{Entry, Journal, JournalError};
use stasis_hooks::parts::{Limits, Parts, Progress};
use stasis_hooks::processes::{Pid, Process, ProcessId, Processes, ProcessesError};
use stasis_hooks::restore::{self, NewContainer, NewJob, RestoreParts};
use stasis_hooks::runc::{RuncError, Runtime};
use stasis_hooks::suspended;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The driver's code, or the tool's failure.
    Error(i32),
    /// The call does nothing and is given up at its deadline.
    Hang,
    /// The call does its work and is given up at its deadline all the same.
    HangAfter,
    /// The helper dies in it.
    Crash,
    /// Success without the work.
    Lie,
}

/// What the world is like.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "a world has many sides")]
pub struct State {
    pub processes: Vec<Process>,
    pub cuda: BTreeMap<Pid, CudaState>,
    pub frozen: bool,
    pub held: Vec<Target>,
    /// Calls, in order.
    pub log: Vec<String>,
    /// Faults still to come: name of the call, how many times.
    pub faults: Vec<(&'static str, Fault, u32)>,
    /// So many calls that would be faulty are good before.
    pub skip_faults: u32,
    /// Processes that start CUDA when the named call is made after so many others of its name.
    pub births: Vec<(&'static str, u32, Process)>,
    pub image_is_whole: bool,
    pub entry: Option<Entry>,
    pub interrupted: bool,
    /// Application code must not run (the caller has paused the container).
    pub paused_by_caller: bool,
    /// Application code ran in spite of that.
    pub ran: bool,
    pub manifest: Option<Manifest>,
    pub in_flight: BTreeMap<Pid, u32>,
    /// A lock whose caller is lost stays pending, and is granted before the next one.
    pub granted_late: bool,
    /// The processes with such a lock.
    pub late: Vec<Pid>,
    /// A lock is waited for.
    pub locks_are_requested: bool,
    /// These processes end when the named call is made.
    pub deaths: Vec<(&'static str, Pid)>,
    /// Killed, and frozen before they could end.
    pub doomed: Vec<Pid>,
    /// The pids inside of what is in the image.
    pub dumped: Vec<Pid>,
    /// A dump thaws the container, and freezes it again; its processes are CRIU's meanwhile.
    pub thawed_by_dump: bool,
    /// The container is killed by somebody else while it is dumped.
    pub killed_in_dump: bool,
    /// How many more calls are made before the operation is cut off.
    pub calls_left: Option<u32>,
    /// Ranks that are ready only when all of them are asked at once.
    pub ranks: bool,
    /// NVML does not tell who uses which GPU.
    pub usage_is_unknown: bool,
    /// How many kernels each has launched, of those that wait for the same of all others.
    pub launched: BTreeMap<Pid, u32>,
    /// Those of them that run launch until they wait for another.
    pub ranks_run: bool,
    /// Which steps the driver offers.
    pub steps: Steps,
    /// What is known of its toggles, by the operation under way.
    pub sides: Sides,
    /// Processes that have opened an NVIDIA device since they were CHECKPOINTED, as for NVML.
    pub opened: Vec<Pid>,
    /// Processes whose toggle is refused, which leaves them LOCKED.
    pub refused: Vec<Pid>,
    /// Processes whose GPU has no room to toggle them back.
    pub no_room: Vec<Pid>,
    /// The driver's version.
    pub driver: &'static str,
    /// The job file that each process names, by a number; none that is not here.
    pub jobs: BTreeMap<Pid, u64>,
    /// Who holds it for a process, if not itself.
    pub holders: BTreeMap<Pid, Pid>,
    /// At this call all name another file.
    pub jobs_change_at: Option<&'static str>,
    /// The job that the driver's helper is in.
    pub joined: Option<Job>,
    /// Where a restore goes.
    pub map: Vec<(String, String)>,
    /// What host memory has room for.
    pub host_memory: u64,
    /// At this call there is none left.
    pub host_memory_taken_at: Option<&'static str>,
    /// What each uses of a GPU from now on; else 100 bytes.
    pub bytes: BTreeMap<Pid, u64>,
    /// What GPU-0 has, if that matters.
    pub gpu_bytes: Option<u64>,
    /// What each takes of a GPU beside that, which NVML says of no process.
    pub besides: u64,
    /// This GPU has fallen off the bus.
    pub silent_gpu: Option<&'static str>,
    /// The largest mapping of each; none that is not here.
    pub mappings: BTreeMap<Pid, u64>,
    /// All of it is a cgroup that a person has named.
    pub is_cgroup: bool,
    /// The members of jobs that are CHECKPOINTED, in that order, in which alone they can be restored.
    pub waiting_members: Vec<Pid>,
    /// Which GPUs' locks were asked for.
    pub gpus_locked: Vec<Vec<String>>,
    /// Somebody else pauses the container when the named call is made.
    pub paused_at: Option<&'static str>,
    /// Somebody has, and nothing answers.
    pub paused_by_other: bool,
    /// What each uses once it was locked.
    pub grows: BTreeMap<Pid, u64>,
    /// Where the memory of each is; GPU-0 at first.
    pub memory_at: BTreeMap<Pid, String>,
    /// Those whose restore has found no room. Nobody has room any more.
    pub lost: BTreeSet<Pid>,
    /// Whose restore the driver refuses.
    pub stuck: Vec<Pid>,
    /// So often the driver says that it is still at work.
    pub passes: u32,
    /// What each call of the driver was made for, in order.
    pub asked: Vec<(&'static str, Vec<Pid>)>,
}

/// The job file of this number.
pub fn identity(inode: u64) -> Identity {
    Identity { device: 1, inode }
}

/// The digest of the live file of job 1.
pub const DIGEST: &str = "4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a";

#[derive(Clone)]
pub struct World(pub Rc<RefCell<State>>);

pub const INIT: ProcessId = ProcessId { pid: 100, start_time: 1 };

pub fn process(pid: Pid, cuda: bool) -> Process {
    Process {
        id: ProcessId { pid, start_time: 1 },
        inner_pid: pid - 99,
        command: format!("p{pid}"),
        maps_libcuda: cuda,
        devices: if cuda { vec!["/dev/nvidia0".into()] } else { Vec::new() },
        tracer: 0,
        parent: if pid == INIT.pid { 1 } else { INIT.pid },
    }
}

impl World {
    /// An init without CUDA and `count` processes with it.
    pub fn new(count: i32, frozen: bool) -> Self {
        let mut processes = vec![process(INIT.pid, false)];
        processes.extend((1..=count).map(|n| process(INIT.pid + n, true)));
        let cuda = (1..=count).map(|n| (INIT.pid + n, CudaState::Running)).collect();
        Self(Rc::new(RefCell::new(State {
            processes,
            cuda,
            frozen,
            held: Vec::new(),
            log: Vec::new(),
            faults: Vec::new(),
            skip_faults: 0,
            births: Vec::new(),
            image_is_whole: false,
            entry: None,
            interrupted: false,
            paused_by_caller: frozen,
            ran: false,
            manifest: None,
            in_flight: BTreeMap::new(),
            granted_late: false,
            late: Vec::new(),
            locks_are_requested: false,
            deaths: Vec::new(),
            doomed: Vec::new(),
            dumped: Vec::new(),
            thawed_by_dump: false,
            killed_in_dump: false,
            calls_left: None,
            ranks: false,
            usage_is_unknown: false,
            launched: BTreeMap::new(),
            ranks_run: false,
            steps: Steps::Separate,
            sides: Sides::default(),
            opened: Vec::new(),
            refused: Vec::new(),
            no_room: Vec::new(),
            driver: "580.1",
            jobs: BTreeMap::new(),
            holders: BTreeMap::new(),
            jobs_change_at: None,
            joined: None,
            map: Vec::new(),
            host_memory: u64::MAX,
            host_memory_taken_at: None,
            bytes: BTreeMap::new(),
            gpu_bytes: None,
            besides: 0,
            silent_gpu: None,
            mappings: BTreeMap::new(),
            is_cgroup: false,
            waiting_members: Vec::new(),
            gpus_locked: Vec::new(),
            paused_at: None,
            paused_by_other: false,
            grows: BTreeMap::new(),
            memory_at: BTreeMap::new(),
            lost: BTreeSet::new(),
            stuck: Vec::new(),
            passes: 0,
            asked: Vec::new(),
        })))
    }

    pub fn fault(self, call: &'static str, fault: Fault, times: u32) -> Self {
        self.0.borrow_mut().faults.push((call, fault, times));
        self
    }

    /// As CRIU leaves a restored container: running, each process CHECKPOINTED.
    pub fn restored(count: i32) -> Self {
        let world = Self::new(count, false);
        world.with(|state| {
            for state in state.cuda.values_mut() {
                *state = CudaState::Checkpointed;
            }
        });
        world
    }

    /// With a driver that has jobs, and all processes in one.
    pub fn in_job(self) -> Self {
        self.with(|state| {
            state.driver = "610.1";
            state.jobs = state.cuda.keys().map(|pid| (*pid, 1)).collect();
        });
        self
    }

    /// With a driver that can only toggle.
    pub fn toggling(self) -> Self {
        self.with(|state| (state.driver, state.steps) = ("550.1", Steps::Toggle));
        self
    }

    pub fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.borrow_mut())
    }

    pub fn states(&self) -> Vec<CudaState> {
        self.with(|state| state.cuda.values().copied().collect())
    }

    pub fn log(&self) -> Vec<String> {
        self.with(|state| state.log.clone())
    }

    pub fn container() -> Container {
        Container {
            id: "c1".into(),
            init: INIT,
            bundle: "/bundle".into(),
            cgroup: Cgroup { version: CgroupVersion::V2, directory: "/nowhere".into() },
        }
    }

    pub fn limits() -> Limits {
        Limits {
            lock: Duration::from_millis(300),
            checkpoint: Duration::from_secs(5),
            room: Duration::from_millis(700),
            restore: Duration::from_millis(700),
        }
    }

    /// Runs `act` with the traits of this world.
    pub fn run<T>(&self, act: impl FnOnce(&mut Parts<'_>) -> T) -> T {
        let (mut driver, mut hold, mut runtime) = (self.clone(), self.clone(), self.clone());
        let (mut image, mut journal) = (self.clone(), self.clone());
        let interrupted = || self.with(|state| state.interrupted);
        act(&mut Parts {
            driver: &mut driver,
            hold: &mut hold,
            freezer: self,
            processes: self,
            runtime: &mut runtime,
            image: &mut image,
            journal: &mut journal,
            memory: self,
            gpu_locks: self,
            interrupted: &interrupted,
        })
    }

    /// Runs `act` as if its process were killed with SIGKILL after `calls` calls. `None` if it was.
    pub fn cut_off_after<T>(&self, calls: u32, act: impl FnOnce() -> T) -> Option<T> {
        self.with(|state| state.calls_left = Some(calls));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        self.with(|state| state.calls_left = None);
        match done {
            Ok(done) => Some(done),
            Err(reason) if reason.is::<CutOff>() => None,
            Err(reason) => std::panic::resume_unwind(reason),
        }
    }

    fn note(&self, call: &'static str) -> Option<Fault> {
        let cut_off = self.with(|state| match &mut state.calls_left {
            Some(0) => true,
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        });
        if cut_off {
            std::panic::resume_unwind(Box::new(CutOff));
        }
        self.with(|state| {
            state.log.push(call.to_owned());
            if state.host_memory_taken_at == Some(call) {
                state.host_memory = 0;
            }
            if state.jobs_change_at == Some(call) {
                state.jobs.values_mut().for_each(|number| *number += 1);
            }
            let dead: Vec<Pid> =
                state.deaths.extract_if(.., |(at, _)| *at == call).map(|(_, pid)| pid).collect();
            state.processes.retain(|process| !dead.contains(&process.id.pid));
            state.cuda.retain(|pid, _| !dead.contains(pid));
            let mut born = Vec::new();
            state.births.retain_mut(|(at, skip, process)| {
                if *at != call {
                    return true;
                }
                if *skip > 0 {
                    *skip -= 1;
                    return true;
                }
                born.push(process.clone());
                false
            });
            for process in born {
                state.cuda.insert(process.id.pid, CudaState::Running);
                state.processes.push(process);
            }
            let fault =
                state.faults.iter_mut().find(|(name, _, left)| *name == call && *left > 0)?;
            if state.skip_faults > 0 {
                state.skip_faults -= 1;
                return None;
            }
            fault.2 -= 1;
            Some(fault.1)
        })
    }

    fn watch(state: &mut State) {
        let all_held = state.processes.iter().all(|process| {
            state.held.iter().any(|t| t.pid == process.id.pid && t.keep != Keep::All)
        });
        // Running into a requested lock is what must be, to get out of a CUDA call.
        let must = state.locks_are_requested;
        if state.paused_by_caller
            && !must
            && !state.frozen
            && !all_held
            && !state.processes.is_empty()
        {
            state.ran = true;
        }
    }

    /// Who runs comes as far as the others.
    fn launch(state: &mut State) {
        let most = state.launched.values().max().copied().unwrap_or_default();
        for (pid, launched) in &mut state.launched {
            let held = state.held.iter().any(|t| t.pid == *pid && t.keep != Keep::All);
            if !held && state.cuda.get(pid) == Some(&CudaState::Running) {
                *launched = most;
            }
        }
    }

    fn move_member(state: &mut State, name: &str, pid: Pid) {
        state.waiting_members.retain(|member| *member != pid);
        if name == "checkpoint" && state.jobs.contains_key(&pid) {
            state.waiting_members.push(pid);
        }
    }

    fn grant_late(state: &mut State) {
        if state.ranks_run {
            Self::launch(state);
        }
        let least = state.launched.values().min().copied().unwrap_or_default();
        let (waiting, granted): (Vec<Pid>, Vec<Pid>) = std::mem::take(&mut state.late)
            .into_iter()
            .partition(|pid| state.launched.get(pid).is_some_and(|own| *own > least));
        state.late = waiting;
        state.cuda.extend(granted.into_iter().map(|pid| (pid, CudaState::Locked)));
    }

    fn act(
        &self,
        call: Call,
        name: &'static str,
        pids: &[Pid],
        from: CudaState,
        to: CudaState,
    ) -> Answers<()> {
        let fault = if pids.is_empty() { None } else { self.note(name) };
        if self.paused(name) {
            let late = || Err(DriverError::Deadline { call, after: Duration::ZERO });
            return pids.iter().map(|pid| (*pid, late())).collect();
        }
        self.with(|state| {
            if !pids.is_empty() {
                state.asked.push((name, pids.to_vec()));
            }
            if name == "lock" {
                state.bytes.append(&mut state.grows.clone());
            }
            // One whose file was exchanged is still in the first.
            let exchanged = state.jobs_change_at.is_some();
            let foreign = |pid: &Pid| {
                let job = state.jobs.get(pid).map(|number| identity(*number));
                job.is_some_and(|job| state.joined.as_ref().is_none_or(|own| own.file != job))
            };
            assert!(
                exchanged || !pids.iter().any(foreign),
                "{name} of a member by somebody outside its job"
            );
            assert!(!state.frozen || pids.is_empty(), "{name} on a frozen process would hang");
            for pid in pids {
                let driver_is_held = name == "lock"
                    && state.held.iter().any(|t| {
                        t.pid == *pid && matches!(t.keep, Keep::RestoreThread(_) | Keep::None)
                    });
                assert!(!driver_is_held, "lock without cuda-EvtHandlr would hang");
            }
            if name == "lock" && !matches!(fault, Some(Fault::Crash)) {
                Self::grant_late(state);
            } else if name == "lock" && state.granted_late {
                state.late = pids.to_vec();
            }
            pids.iter()
                .map(|pid| {
                    let refused = |code| Err(DriverError::Refused { call, error: CudaError(code) });
                    let works = !matches!(
                        fault,
                        Some(Fault::Error(_) | Fault::Hang | Fault::Crash | Fault::Lie)
                    );
                    let Some(current) = state.cuda.get(pid).copied() else {
                        return (*pid, refused(304));
                    };
                    let least = state.launched.values().min().copied().unwrap_or_default();
                    let ahead = name == "lock"
                        && state.launched.get(pid).is_some_and(|launched| *launched > least);
                    let runs = state.held.iter().all(|t| t.pid != *pid || t.keep == Keep::All);
                    if name == "unlock" && runs && current == from {
                        // The launch that the lock has blocked.
                        state.launched.entry(*pid).and_modify(|launched| *launched += 1);
                    }
                    let alone = state.ranks && name == "lock" && pids.len() < state.cuda.len();
                    let waiting = name == "lock"
                        && state.in_flight.get_mut(pid).is_some_and(|left| {
                            let waits = *left > 0;
                            *left = left.saturating_sub(1);
                            waits
                        });
                    let at = state.memory_at.get(pid).map_or("GPU-0", String::as_str);
                    let to_gpu = state.map.iter().find(|(from, _)| from == at).map(|(_, to)| to);
                    let answer = if current != from {
                        refused(401)
                    } else if name == "restore" && state.no_room.contains(pid) {
                        // Measured: once, and then never again.
                        refused(if state.lost.insert(*pid) { 2 } else { 304 })
                    } else if name == "restore"
                        && state.jobs.contains_key(pid)
                        && state.waiting_members.first().is_some_and(|first| first != pid)
                    {
                        refused(1)
                    } else if name == "restore" && state.stuck.contains(pid) {
                        refused(999)
                    } else if name == "restore" && !state.map.is_empty() && to_gpu.is_none() {
                        refused(1)
                    } else if works && (alone || waiting || ahead) {
                        refused(600)
                    } else {
                        if works {
                            if let ("restore", Some(gpu)) = (name, to_gpu) {
                                state.memory_at.insert(*pid, gpu.clone());
                            }
                            Self::move_member(state, name, *pid);
                            state.cuda.insert(*pid, to);
                        }
                        match fault {
                            Some(Fault::Error(code)) => refused(code),
                            Some(Fault::Hang | Fault::HangAfter) => {
                                Err(DriverError::Deadline { call, after: Duration::ZERO })
                            }
                            Some(Fault::Crash) => {
                                Err(DriverError::HelperLost { call, how: "signal: 11".into() })
                            }
                            Some(Fault::Lie) | None => Ok(()),
                        }
                    };
                    (*pid, answer)
                })
                .collect()
        })
    }

    /// A toggle of those that are told to be on this side. One that is lost may end as it likes.
    fn toggle(
        &self,
        call: Call,
        name: &'static str,
        pids: &[Pid],
        from: CudaState,
        to: CudaState,
    ) -> Answers<()> {
        let fault = if pids.is_empty() { None } else { self.note(name) };
        self.with(|state| {
            assert!(!state.frozen || pids.is_empty(), "{name} on a frozen process would hang");
            if name == "lock" && state.in_flight.values().any(|left| *left > 0) {
                // One waits for another; all are brought back.
                for left in state.in_flight.values_mut() {
                    *left = left.saturating_sub(1);
                }
                let back = || Err(DriverError::OthersNotReady { call: Call::Toggle });
                return pids.iter().map(|pid| (*pid, back())).collect();
            }
            let mut one = |pid: &Pid| {
                let told = told(state, *pid);
                let Some(current) = state.cuda.get_mut(pid) else {
                    return Err(DriverError::Refused { call, error: CudaError(304) });
                };
                let refused =
                    |code| DriverError::Refused { call: Call::Toggle, error: CudaError(code) };
                if told != Some(from) {
                    return Err(DriverError::AlreadyThere { call: Call::Toggle });
                }
                if *current == CudaState::Locked {
                    return Err(refused(401));
                }
                if from == CudaState::Checkpointed && state.no_room.contains(pid) {
                    return Err(refused(if state.lost.insert(*pid) { 2 } else { 304 }));
                }
                if from == CudaState::Checkpointed && state.stuck.contains(pid) {
                    return Err(refused(999));
                }
                if state.refused.contains(pid) {
                    *current = CudaState::Locked;
                    return Err(refused(801));
                }
                let late = || DriverError::Deadline { call: Call::Toggle, after: Duration::ZERO };
                let (then, answer) = match fault {
                    // It goes to the other side, whichever that is.
                    None if *current == to => (from, Ok(())),
                    None => (to, Ok(())),
                    Some(Fault::Error(code)) if from == CudaState::Running => {
                        (CudaState::Locked, Err(refused(code)))
                    }
                    Some(Fault::Error(code)) => (from, Err(refused(code))),
                    // Killed while the lock was waited for, or between restore and unlock.
                    Some(Fault::Hang) => (CudaState::Locked, Err(late())),
                    Some(Fault::HangAfter) => (to, Err(late())),
                    Some(Fault::Crash) => {
                        let how = "signal: 11".into();
                        (from, Err(DriverError::HelperLost { call: Call::Toggle, how }))
                    }
                    Some(Fault::Lie) => (from, Ok(())),
                };
                *current = then;
                answer
            };
            let answers: Answers<()> = pids.iter().map(|pid| (*pid, one(pid))).collect();
            // The devices tell, and not what was said.
            if !matches!(fault, Some(Fault::Lie)) {
                for (pid, answer) in &answers {
                    state.sides.note(call, *pid, answer);
                }
            }
            answers
        })
    }

    /// Whether somebody has paused the container, so that no call is answered.
    fn paused(&self, call: &'static str) -> bool {
        self.with(|state| {
            if state.paused_at == Some(call) {
                (state.paused_at, state.frozen, state.paused_by_other) = (None, true, true);
            }
            state.paused_by_other && state.frozen
        })
    }

    fn toggles(&self) -> bool {
        self.with(|state| state.steps == Steps::Toggle)
    }

    fn tool(&self, name: &'static str) -> Result<(), RuncError> {
        match self.note(name) {
            None => Ok(()),
            Some(_) => Err(RuncError {
                command: format!("runc {name}"),
                how: "exit status: 1".into(),
                output: "no".into(),
                criu: Vec::new(),
                log: None,
                code: Some(1),
            }),
        }
    }
}

/// What a driver that can only toggle lets see: whether a process has a device open, which says nothing
/// of one that is known to be CHECKPOINTED.
fn told(state: &State, pid: Pid) -> Option<CudaState> {
    let current = *state.cuda.get(&pid)?;
    let none_open = current == CudaState::Checkpointed && !state.opened.contains(&pid);
    let checkpointed = none_open || state.sides.checkpointed().contains(&pid);
    Some(if checkpointed { CudaState::Checkpointed } else { CudaState::Running })
}

impl Driver for World {
    fn facts(&mut self) -> Result<DriverFacts, DriverError> {
        match self.note("facts") {
            Some(_) => Err(DriverError::NoLibrary("searched".into())),
            None => Ok(DriverFacts {
                cuda_version: 13000,
                driver_version: Some(self.with(|state| state.driver).into()),
                steps: self.with(|state| state.steps),
                ..DriverFacts::default()
            }),
        }
    }

    fn steps(&mut self) -> Result<Steps, DriverError> {
        Ok(self.with(|state| state.steps))
    }

    fn probe(&mut self, pids: &[Pid]) -> Answers<Option<Pid>> {
        let fault = self.note("probe");
        self.with(|state| {
            pids.iter()
                .map(|pid| {
                    let error = DriverError::HelperLost { call: Call::Probe, how: "gone".into() };
                    let answer = match fault {
                        Some(_) => Err(error),
                        None => Ok(state.cuda.contains_key(pid).then_some(pid + 1000)),
                    };
                    (*pid, answer)
                })
                .collect()
        })
    }

    fn states(&mut self, pids: &[Pid], _: Duration) -> Answers<CudaState> {
        let fault = if pids.is_empty() { None } else { self.note("states") };
        let fault = if self.paused("states") { Some(Fault::Hang) } else { fault };
        self.with(|state| {
            if fault == Some(Fault::Hang) {
                let late =
                    || Err(DriverError::Deadline { call: Call::State, after: Duration::ZERO });
                return pids.iter().map(|pid| (*pid, late())).collect();
            }
            assert!(!state.frozen || pids.is_empty(), "get-state of a frozen process would hang");
            pids.iter()
                .map(|pid| {
                    let answer = match (fault, state.cuda.get(pid)) {
                        (None, Some(found)) if state.steps == Steps::Toggle => {
                            let told = told(state, *pid).unwrap_or(*found);
                            Ok(state.sides.state(*pid, told))
                        }
                        (None, Some(_)) if state.passes > 0 => {
                            state.passes -= 1;
                            Ok(CudaState::Unknown(5))
                        }
                        (None, Some(found)) => Ok(*found),
                        (None, None) => {
                            Err(DriverError::Refused { call: Call::State, error: CudaError(304) })
                        }
                        (Some(_), _) => {
                            Err(DriverError::Deadline { call: Call::State, after: Duration::ZERO })
                        }
                    };
                    (*pid, answer)
                })
                .collect()
        })
    }

    fn lock(&mut self, pids: &[Pid], timeout: Duration, waiting: &mut dyn FnMut()) -> Answers<()> {
        if self.toggles() {
            let (running, checkpointed) = (CudaState::Running, CudaState::Checkpointed);
            return self.toggle(Call::Lock, "lock", pids, running, checkpointed);
        }
        // The driver's own timeout passes where something is in flight.
        let answers = self.act(Call::Lock, "lock", pids, CudaState::Running, CudaState::Locked);
        if answers
            .values()
            .any(|a| a.as_ref().is_err_and(|e| e.code() == Some(CudaError::NOT_READY)))
        {
            self.with(|state| state.locks_are_requested = true);
            waiting();
            self.with(|state| state.locks_are_requested = false);
            std::thread::sleep(timeout.min(Duration::from_millis(50)));
        }
        answers
    }

    fn checkpoint(&mut self, pids: &[Pid], _: Duration) -> Answers<()> {
        if self.toggles() {
            let (running, checkpointed) = (CudaState::Running, CudaState::Checkpointed);
            return self.toggle(Call::Checkpoint, "checkpoint", pids, running, checkpointed);
        }
        self.act(Call::Checkpoint, "checkpoint", pids, CudaState::Locked, CudaState::Checkpointed)
    }

    fn restore(&mut self, pids: &[Pid], _: Duration) -> Answers<()> {
        if self.toggles() {
            let (running, checkpointed) = (CudaState::Running, CudaState::Checkpointed);
            return self.toggle(Call::Restore, "restore", pids, checkpointed, running);
        }
        self.act(Call::Restore, "restore", pids, CudaState::Checkpointed, CudaState::Locked)
    }

    fn unlock(&mut self, pids: &[Pid], _: Duration) -> Answers<()> {
        if self.toggles() {
            // What is restored is unlocked.
            let already = || Err(DriverError::AlreadyThere { call: Call::Toggle });
            return pids.iter().map(|pid| (*pid, already())).collect();
        }
        self.act(Call::Unlock, "unlock", pids, CudaState::Locked, CudaState::Running)
    }

    fn job_files(
        &mut self,
        processes: &[ProcessId],
        init: ProcessId,
        _: &[Neighbour],
    ) -> Result<BTreeMap<Pid, Result<Option<Named>, Unusable>>, DriverError> {
        assert_eq!(init, INIT);
        if let Some(fault) = self.note("job-files") {
            let named = "/x".to_owned();
            let reason = "is a FIFO".to_owned();
            return match fault {
                Fault::Error(_) => Ok(processes
                    .iter()
                    .map(|id| {
                        let why = Unusable { named: named.clone(), reason: reason.clone() };
                        (id.pid, Err(why))
                    })
                    .collect()),
                _ => Err(DriverError::Deadline { call: Call::JobFiles, after: Duration::ZERO }),
            };
        }
        Ok(self.with(|state| {
            let named = |pid: &Pid| {
                let holder = state.holders.get(pid).copied().unwrap_or(*pid);
                state.jobs.get(pid).map(|number| Named {
                    named: format!("/proc/self/fd/{number}"),
                    file: identity(*number),
                    way: Way::Descriptor {
                        process: ProcessId { pid: holder, start_time: 1 },
                        number: u32::try_from(*number).unwrap_or_default(),
                    },
                    path: None,
                    mode: 0o666,
                    uid: 0,
                    gid: 0,
                })
            };
            processes.iter().map(|id| (id.pid, Ok(named(&id.pid)))).collect()
        }))
    }

    fn map_devices(&mut self, map: &[(String, String)]) {
        self.with(|state| state.map = map.to_vec());
    }

    fn recall(&mut self, suspended: &[Pid]) {
        self.with(|state| state.sides.recall(suspended));
    }

    fn join(&mut self, job: Option<&Job>) {
        self.with(|state| state.joined = job.cloned());
    }

    fn copy_job_file(
        &mut self,
        _: &Job,
        to: Option<&Path>,
        _: Duration,
    ) -> Result<Copied, DriverError> {
        if self.note("copy-job").is_some() {
            return Err(DriverError::JobFile("cannot be copied: no space left".into()));
        }
        self.with(|state| {
            let all = state.cuda.values().all(|state| *state == CudaState::Checkpointed);
            assert!(all, "the job file is copied when all are CHECKPOINTED");
            // At a checkpoint; at a restore it is only read.
            assert!(to.is_none() || state.frozen, "the job file is copied frozen");
        });
        Ok(Copied { bytes: 1, sha256: DIGEST.to_owned() })
    }

    fn usage(&mut self, pids: &[Pid]) -> Option<BTreeMap<Pid, GpuUse>> {
        if self.with(|state| state.usage_is_unknown) {
            return None;
        }
        let used = |pid: &Pid| {
            let bytes = self.with(|state| state.bytes.get(pid).copied().unwrap_or(100));
            let at = self.with(|state| state.memory_at.get(pid).cloned());
            GpuUse { gpus: vec![(at.unwrap_or_else(|| "GPU-0".to_owned()), Some(bytes))] }
        };
        // One that is CHECKPOINTED uses none.
        let on_gpu =
            |pid: &&Pid| self.with(|state| state.cuda.get(*pid) != Some(&CudaState::Checkpointed));
        Some(pids.iter().filter(on_gpu).map(|pid| (*pid, used(pid))).collect())
    }

    fn free_memory(&mut self) -> Option<BTreeMap<String, u64>> {
        self.paused("free");
        let taken = self.with(|state| !state.lost.is_empty());
        let none = self.note("free").is_some() || taken;
        let on_gpu: u64 = self.with(|state| {
            let there = state.cuda.iter().filter(|(_, now)| **now != CudaState::Checkpointed);
            let bytes = |pid: &Pid| state.bytes.get(pid).copied().unwrap_or(100) + state.besides;
            there.map(|(pid, _)| bytes(pid)).sum()
        });
        let free = match self.with(|state| state.gpu_bytes) {
            _ if none => 0,
            Some(all) => all.saturating_sub(on_gpu),
            None => 1000,
        };
        let all = [("GPU-0".to_owned(), free), ("GPU-1".to_owned(), 1000)].into_iter();
        let silent = self.with(|state| state.silent_gpu);
        Some(all.filter(|(uuid, _)| Some(uuid.as_str()) != silent).collect())
    }
}

impl HostMemory for World {
    fn room(&self) -> Option<Room> {
        let bytes = self.with(|state| state.host_memory);
        Some(Room { bytes, of: "cgroup /x".to_owned() })
    }
}

impl GpuLocks for World {
    fn try_lock(&self, gpus: &BTreeSet<&str>) -> io::Result<Option<Locked>> {
        self.with(|state| {
            state.gpus_locked.push(gpus.iter().map(|gpu| (*gpu).to_owned()).collect());
        });
        match self.note("gpu-lock") {
            None => Ok(Some(Locked::default())),
            Some(Fault::Error(_)) => Err(io::Error::other("no space left")),
            Some(_) => Ok(None),
        }
    }
}

impl Hold for World {
    fn hold(&mut self, targets: &[Target]) -> Result<(), HoldError> {
        if self.note("hold").is_some() {
            return Err(HoldError::Refused { pid: 101, tid: 101, reason: "EPERM".into() });
        }
        self.with(|state| {
            state.held = targets.to_vec();
            Self::watch(state);
        });
        Ok(())
    }

    fn settle(&mut self) -> Result<(), HoldError> {
        if self.note("settle").is_some() {
            return Err(HoldError::Pending { tid: 101, state: "D".into() });
        }
        Ok(())
    }

    fn release(&mut self) {
        self.with(|state| {
            state.held.clear();
            Self::watch(state);
        });
    }

    fn tracer(&self) -> Option<Pid> {
        None
    }
}

impl Freezer for World {
    fn frozen(&self) -> Result<bool, FreezerError> {
        Ok(self.with(|state| state.frozen))
    }

    fn freeze(&self) -> Result<(), FreezerError> {
        if self.note("freeze").is_some() {
            return Err(FreezerError::Stuck { directory: "/cg".into(), state: "FREEZING".into() });
        }
        self.with(|state| state.frozen = true);
        Ok(())
    }

    fn thaw(&self) -> Result<(), FreezerError> {
        if self.note("thaw").is_some() {
            return Err(FreezerError::Stuck { directory: "/cg".into(), state: "FROZEN".into() });
        }
        self.with(|state| {
            state.frozen = false;
            Self::watch(state);
        });
        Ok(())
    }
}

impl Processes for World {
    fn list(&self) -> Result<Vec<Process>, ProcessesError> {
        Ok(self.with(|state| state.processes.clone()))
    }

    fn lets_go(&self, _: Pid) -> bool {
        true
    }

    fn host_has_gpu(&self) -> bool {
        true
    }

    fn alive(&self, id: ProcessId) -> bool {
        self.with(|state| state.processes.iter().any(|process| process.id == id))
    }

    fn have_init(&self) -> bool {
        !self.with(|state| state.is_cgroup)
    }

    fn largest_mapping(&self, id: ProcessId) -> Option<u64> {
        self.with(|state| state.mappings.get(&id.pid).copied())
    }

    fn ending(&self, id: ProcessId) -> bool {
        !self.alive(id) || self.with(|state| state.doomed.contains(&id.pid))
    }
}

impl Runtime for World {
    fn dump(&mut self, leave_running: bool) -> Result<(), RuncError> {
        self.with(|state| {
            assert!(state.frozen, "dumped while it runs");
            assert!(state.held.is_empty(), "CRIU cannot trace what is held");
        });
        self.tool("dump")?;
        if self.with(|state| state.killed_in_dump) {
            self.with(|state| {
                state.processes.clear();
                state.cuda.clear();
            });
            self.with(|state| state.faults.push(("dump", Fault::Error(1), 1)));
            self.tool("dump")?;
        }
        if self.with(|state| state.thawed_by_dump) {
            self.with(|state| state.frozen = false);
            // Where it may be killed.
            self.note("dumping");
            self.with(|state| state.frozen = true);
        }
        self.with(|state| {
            assert!(
                state.cuda.values().all(|state| *state == CudaState::Checkpointed),
                "CRIU cannot dump a process that holds a GPU: {:?}",
                state.cuda
            );
            state.dumped = state.processes.iter().map(|process| process.inner_pid).collect();
            if !leave_running {
                state.processes.clear();
                state.cuda.clear();
            }
        });
        Ok(())
    }

    fn restore(&mut self) -> Result<(), RuncError> {
        self.tool("runc-restore")
    }

    fn resume(&mut self) -> Result<(), RuncError> {
        self.tool("resume")?;
        self.with(|state| {
            state.frozen = false;
            Self::watch(state);
            state.paused_by_caller = false;
        });
        Ok(())
    }

    fn kill(&mut self) -> Result<(), RuncError> {
        self.tool("kill")?;
        self.with(|state| {
            // Of a cgroup the others are let live.
            let spared = |process: &Process| state.is_cgroup && !process.is_candidate();
            state.processes.retain(spared);
            state.cuda.clear();
        });
        Ok(())
    }

    fn unlock_network(&mut self) {}

    fn delete(&mut self) -> Result<(), RuncError> {
        self.tool("delete")
    }
}

fn image_error() -> Cause {
    Cause::Image { path: "/image".into(), reason: "no space left on device".into() }
}

impl Image for World {
    fn has_process(&self, inner_pid: Pid) -> bool {
        self.with(|state| state.dumped.contains(&inner_pid))
    }

    fn prepare(&mut self) -> Result<(), Cause> {
        if self.note("prepare").is_some() { Err(image_error()) } else { Ok(()) }
    }

    fn begin(&mut self) -> Result<(), Cause> {
        if self.note("begin").is_some() { Err(image_error()) } else { Ok(()) }
    }

    fn sync(&mut self) -> Result<(), Cause> {
        if self.note("sync").is_some() { Err(image_error()) } else { Ok(()) }
    }

    fn finish(&mut self, manifest: &Manifest) -> Result<(), Cause> {
        if self.note("finish").is_some() {
            return Err(image_error());
        }
        self.with(|state| {
            state.image_is_whole = true;
            state.manifest = Some(manifest.clone());
        });
        Ok(())
    }

    fn path(&self) -> &Path {
        Path::new("/image")
    }
}

impl NewContainer for World {
    fn complete(&mut self, image: &Path, _: &Manifest) -> Result<Spec, Cause> {
        if self.note("complete").is_some() {
            return Err(Cause::Needs { path: image.to_owned(), reason: "not given".into() });
        }
        Ok(Spec::default())
    }

    fn put_back(&mut self) {
        self.note("put-back");
    }

    fn make_nodes(&self, init: ProcessId, _: &Spec) -> Result<(), Cause> {
        assert_eq!(init, INIT);
        if self.note("nodes").is_some() {
            return Err(CdiError::Node("cannot make /dev/nvidia0".into()).into());
        }
        Ok(())
    }
}

impl NewJob for World {
    fn place(&mut self, _: &Path, _: Option<&manifest::Job>) -> Result<(), Cause> {
        match self.note("place-job") {
            Some(_) => Err(JobError::Conflict("no job file".into()).into()),
            None => Ok(()),
        }
    }

    fn take_back(&mut self) {
        self.note("take-back-job");
    }

    fn check(&self, _: &manifest::Job, _: &Found, init: ProcessId, _: &Spec) -> Result<(), Cause> {
        assert_eq!(init, INIT);
        match self.note("check-job") {
            Some(_) => Err(JobError::NotTheImages("elsewhere".into()).into()),
            None => Ok(()),
        }
    }
}

impl Journal for World {
    fn save(&mut self, entry: &Entry) -> Result<(), JournalError> {
        if self.note("journal").is_some() {
            return Err(JournalError::Busy);
        }
        self.with(|state| state.entry = Some(entry.clone()));
        Ok(())
    }

    fn clear(&mut self) -> Result<(), JournalError> {
        self.with(|state| state.entry = None);
        Ok(())
    }
}

/// Has `act` make a checkpoint that is asked for in this way.
pub fn asked<T>(
    after: After,
    annotations: &Annotations,
    act: impl FnOnce(&checkpoint::Request<'_>) -> T,
) -> T {
    let spec = serde_json::from_str(r#"{"ociVersion":"1.0.2","root":{"path":"rootfs"}}"#).unwrap();
    act(&checkpoint::Request {
        container: &World::container(),
        spec: &spec,
        annotations,
        mountinfo: "",
        dump: manifest::Dump::default(),
        after,
        minimum_driver: 610,
        given_job: None,
        suspended: None,
        limits: World::limits(),
    })
}

/// Suspends a container with these annotations, of which an earlier suspension has noted so much.
pub fn suspend(
    world: &World,
    annotations: &Annotations,
    earlier: Option<&Entry>,
) -> Result<Entry, Failure> {
    world.run(|parts| {
        let cuda = discover(parts).unwrap();
        let request = suspended::Request {
            container: &World::container(),
            annotations,
            minimum_driver: 610,
            given_job: false,
            earlier,
            limits: World::limits(),
        };
        let mut progress = Progress::new(Phase::Preflight);
        suspended::suspend(parts, &request, cuda, &mut progress).map(|done| done.entry)
    })
}

/// When a call was made for the first time.
pub fn position(log: &[String], call: &str) -> usize {
    log.iter().position(|entry| entry == call).unwrap_or_else(|| panic!("no {call} in {log:?}"))
}

/// The manifest of an image with so many CUDA processes, made with this driver.
pub fn image_of(driver: &str, count: i32) -> Manifest {
    Manifest {
        version: manifest::VERSION,
        driver: manifest::Driver { version: driver.into(), cuda: 13000 },
        processes: (1..=count)
            .map(|n| manifest::Process {
                pid: n + 1,
                command: format!("p{n}"),
                order: u32::try_from(n).unwrap(),
                ..manifest::Process::default()
            })
            .collect(),
        ..Manifest::default()
    }
}

/// Restores the image of this manifest into the world.
pub fn restore(world: &World, manifest: &Manifest) -> Result<(), Failure> {
    restore_as(world, manifest, false)
}

/// The same, into a container that begins suspended or not.
pub fn restore_as(world: &World, manifest: &Manifest, suspended: bool) -> Result<(), Failure> {
    let (mut driver, mut runtime, mut journal) = (world.clone(), world.clone(), world.clone());
    let (mut container, mut job) = (world.clone(), world.clone());
    let found = || {
        if world.with(|state| state.processes.is_empty()) {
            return Err(Cause::Gone);
        }
        Ok((INIT, Box::new(world.clone()) as Box<dyn Processes>))
    };
    let mut parts = RestoreParts {
        driver: &mut driver,
        runtime: &mut runtime,
        journal: &mut journal,
        container: &mut container,
        job: &mut job,
        restored: &found,
        gpu_locks: world,
        interrupted: &|| world.with(|state| state.interrupted),
    };
    let (container, image) = ("c1", "/image".as_ref());
    let request = restore::Request {
        container,
        image,
        manifest,
        limits: World::limits(),
        device_map: None,
        suspended,
    };
    restore::restore(&mut parts, &request)
}

/// The end of an operation whose process was killed.
struct CutOff;
