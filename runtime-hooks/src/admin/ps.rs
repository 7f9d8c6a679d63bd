//! `stasis ps`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use stasis_config::Config;

use super::subjects::{Subjects, find};
use super::{Ps, show, target};
use crate::child::Program;
use crate::container::{Container, ContainerError};
use crate::containers::{self, Place};
use crate::cuda::client::HelperDriver;
use crate::cuda::{Answers, CudaState, Driver, GpuUse};
use crate::engines::Engine;
use crate::error::chain;
use crate::freezer::Freezer as _;
use crate::journal::{Entry, Stage};
use crate::processes::{CgroupProcesses, Pid, Process, Processes as _};
use crate::suspend::off_gpu;

/// How long a process may take to tell its state. One that is in the middle of an operation does not.
const STATE: Duration = Duration::from_secs(2);

/// What is known of a container.
struct Seen {
    place: Place,
    engine: Engine,
    name: Option<String>,
    paused: bool,
    /// What its journal says, if it is this container's.
    journal: Option<Entry>,
    /// Why its journal cannot be used.
    error: Option<String>,
    job: bool,
    processes: Vec<SeenProcess>,
}

/// A process with CUDA.
struct SeenProcess {
    process: Process,
    state: State,
    uses: GpuUse,
    /// That is what it needs to come back: it is on no GPU now.
    is_off: bool,
}

/// In which state its CUDA is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// What the driver said.
    Told(CudaState),
    /// The container is paused: a frozen process is not asked.
    Paused,
    /// No answer.
    Silent(String),
}

/// Lists containers.
pub(super) fn run(config: &Config, asked: &Ps) -> ExitCode {
    let mut driver = HelperDriver::new(Program::this(), &config.cuda);
    let roots = containers::roots(&asked.roots.given);
    let named = asked.containers.iter().map(|name| find(config, &asked.roots.given, name));
    let places = match named.collect::<Result<Vec<Place>, _>>() {
        Ok(places) if places.is_empty() => {
            let only_given = !asked.roots.given.is_empty();
            Subjects::all(config, &roots, only_given).places
        }
        Ok(places) => places,
        Err(error) => return super::failed(&error.to_string()),
    };
    let (mut all, mut status) = (Vec::new(), ExitCode::SUCCESS);
    for place in places {
        match look(config, &place, &roots, &mut driver) {
            Ok(seen) if asked.all || seen.is_of_interest() => all.push(seen),
            Ok(_) => {}
            // Ended meanwhile, or not started yet.
            Err(error) if asked.containers.is_empty() || is_not_running(&error) => {
                tracing::debug!(id = place.id, %error, "left out");
            }
            Err(error) => status = super::failed(&format!("container {}: {error:#}", place.id)),
        }
    }
    match super::print(&if asked.json { as_json(&all) } else { as_text(&all, asked.all) }) {
        ExitCode::SUCCESS => status,
        failed => failed,
    }
}

fn is_not_running(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ContainerError::NotRunning(_)))
}

fn look(
    config: &Config,
    place: &Place,
    roots: &[PathBuf],
    driver: &mut HelperDriver,
) -> anyhow::Result<Seen> {
    let is_cgroup = target::is_cgroup(place);
    let container = if is_cgroup {
        containers::of_cgroup(roots, Path::new(&place.id))?
    } else {
        Container::load(&place.root, &place.id)?
    };
    let processes = CgroupProcesses::new(&container.cgroup.directory, container.init.pid)?;
    let paused = container.cgroup.frozen()?;
    let candidates: Vec<Process> =
        processes.list()?.into_iter().filter(Process::is_candidate).collect();
    let journal = target::journal(config, place);
    // The oldest process of a cgroup may be another by now.
    let is_its =
        |entry: &Entry| entry.init == container.init || is_cgroup && target::alive(entry).is_some();
    let (entry, error) = match journal.load() {
        Ok(entry) => (entry.filter(is_its), None),
        Err(error) => (None, Some(chain(&error))),
    };
    let noted = |process: &Process| {
        let noted = entry.iter().flat_map(|entry| &entry.processes);
        noted.into_iter().find(|noted| noted.id == process.id).map(|noted| noted.uses.clone())
    };
    let pids: Vec<Pid> = candidates.iter().map(|process| process.id.pid).collect();
    let has_cuda = if pids.is_empty() { Answers::new() } else { driver.probe(&pids) };
    let cuda: Vec<Process> = candidates
        .into_iter()
        // A driver that does not answer says nothing against it.
        .filter(|process| !matches!(has_cuda.get(&process.id.pid), Some(Ok(None)) | None))
        .collect();
    let pids: Vec<Pid> = cuda.iter().map(|process| process.id.pid).collect();
    let mut uses = if pids.is_empty() { None } else { driver.usage(&pids) }.unwrap_or_default();
    // Of one that is under way it is not known.
    if let Some(entry) = entry.as_ref().filter(|entry| entry.stage == Stage::Suspended) {
        driver.recall(&off_gpu(entry.left_checkpointed().map(|id| id.pid), &uses));
    }
    let ask = !paused && !pids.is_empty();
    let mut states = if ask { driver.states(&pids, STATE) } else { Answers::new() };
    let seen = |process: Process| {
        let pid = process.id.pid;
        let state = match states.remove(&pid) {
            Some(Ok(state)) => State::Told(state),
            Some(Err(error)) => State::Silent(error.to_string()),
            None => State::Paused,
        };
        let now = uses.remove(&pid).filter(|uses| !uses.gpus.is_empty());
        let is_off = now.is_none();
        let uses = now.or_else(|| noted(&process)).unwrap_or_default();
        SeenProcess { process, state, uses, is_off }
    };
    let processes = cuda.into_iter().map(seen).collect();
    let engine = Engine::of(&place.root, &container.bundle);
    Ok(Seen {
        place: place.clone(),
        name: engine.name(&place.id, &container.bundle),
        engine,
        paused,
        job: journal.has_job(),
        journal: entry,
        error,
        processes,
    })
}

impl Seen {
    /// Whether it uses CUDA, or has to be looked after.
    fn is_of_interest(&self) -> bool {
        !self.processes.is_empty() || self.error.is_some()
    }

    /// What is under way with it, or was done.
    fn state(&self) -> Option<&'static str> {
        self.journal.as_ref().map(|entry| match entry.stage {
            Stage::Suspended => "suspended",
            Stage::AwaitingResume => "awaiting resume",
            Stage::Suspending | Stage::Restoring | Stage::Freeing | Stage::Resuming => {
                "under way, or to be repaired"
            }
        })
    }
}

fn word(seen: &Seen, state: &State) -> String {
    match state {
        State::Told(CudaState::Checkpointed)
            if seen.journal.as_ref().is_some_and(|entry| entry.stage == Stage::Suspended) =>
        {
            "suspended".to_owned()
        }
        State::Told(state) => state.to_string().to_lowercase(),
        State::Paused => "paused".to_owned(),
        State::Silent(_) => "no answer".to_owned(),
    }
}

/// The same for people, who have no column for what is under way. Of one that is paused that was noted.
fn cell(seen: &Seen, process: &SeenProcess) -> String {
    let stage = seen.journal.as_ref().map(|entry| entry.stage).filter(|_| process.is_off);
    match (&process.state, stage) {
        (State::Paused, Some(Stage::Suspended)) => "suspended, paused".to_owned(),
        (State::Paused, Some(Stage::AwaitingResume)) => "checkpointed, paused".to_owned(),
        (told, _) => word(seen, told),
    }
}

fn as_text(all: &[Seen], with_others: bool) -> String {
    if all.is_empty() {
        return if with_others {
            "no container runs on this host\n".to_owned()
        } else {
            "no container uses CUDA on this host\n".to_owned()
        };
    }
    let row = |cells: [String; 9]| cells.to_vec();
    let mut rows = vec![row([
        "RUNTIME",
        "CONTAINER",
        "NAME",
        "PID",
        "COMMAND",
        "STATE",
        "GPU",
        "MEMORY",
        "JOB",
    ]
    .map(str::to_owned))];
    for seen in all {
        let job = || if seen.job { "yes" } else { "-" }.to_owned();
        let id = || seen.place.id.clone();
        let name = || seen.name.clone().unwrap_or_else(|| "-".to_owned());
        if seen.processes.is_empty() {
            let state = if seen.paused { "paused" } else { "no CUDA" };
            let none = || "-".to_owned();
            rows.push(row([
                seen.engine.word().to_owned(),
                id(),
                name(),
                none(),
                none(),
                state.to_owned(),
                none(),
                none(),
                job(),
            ]));
        }
        for process in &seen.processes {
            let gpus = &process.uses.gpus;
            let names: Vec<&str> = gpus.iter().map(|(uuid, _)| uuid.as_str()).collect();
            let bytes: u64 = gpus.iter().filter_map(|(_, bytes)| *bytes).sum();
            let memory = match (bytes, process.is_off) {
                (0, _) => "-".to_owned(),
                (bytes, true) => format!("({})", show::bytes(bytes)),
                (bytes, false) => show::bytes(bytes),
            };
            rows.push(row([
                seen.engine.word().to_owned(),
                id(),
                name(),
                process.process.id.pid.to_string(),
                process.process.command.clone(),
                cell(seen, process),
                if names.is_empty() { "-".to_owned() } else { names.join(",") },
                memory,
                job(),
            ]));
        }
    }
    let mut text = show::table(&rows);
    for seen in all {
        if let Some(error) = &seen.error {
            let _ = writeln!(text, "{}: {error}", seen.place.id);
        }
    }
    text
}

fn as_json(all: &[Seen]) -> String {
    let process = |seen: &Seen, process: &SeenProcess| {
        let gpus: Vec<Value> = process
            .uses
            .gpus
            .iter()
            .map(|(uuid, bytes)| json!({"uuid": uuid, "bytes": bytes}))
            .collect();
        let mut value = json!({
            "pid": process.process.id.pid,
            "inner_pid": process.process.inner_pid,
            "command": process.process.command,
            "state": word(seen, &process.state),
            "gpus": gpus,
        });
        if let State::Silent(why) = &process.state {
            value["error"] = why.as_str().into();
        }
        value
    };
    let container = |seen: &Seen| {
        let processes: Vec<Value> =
            seen.processes.iter().map(|found| process(seen, found)).collect();
        let mut value = json!({
            "runtime": seen.engine.word(),
            "root": seen.place.root,
            "id": seen.place.id,
            "name": seen.name,
            "paused": seen.paused,
            "operation": seen.state(),
            "job": seen.job,
            "processes": processes,
        });
        if let Some(error) = &seen.error {
            value["error"] = error.as_str().into();
        }
        value
    };
    let list: Vec<Value> = all.iter().map(container).collect();
    format!("{:#}\n", Value::from(list))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::processes::ProcessId;

    fn container(stage: Option<Stage>, told: State, is_off: bool) -> Seen {
        let init = ProcessId { pid: 7, start_time: 1 };
        let journal = stage.map(|stage| {
            let mut entry = Entry::new("c1", init, false, Path::new(""));
            entry.stage = stage;
            entry
        });
        let process = Process {
            id: ProcessId { pid: 8, start_time: 1 },
            inner_pid: 2,
            command: "train".into(),
            maps_libcuda: true,
            devices: Vec::new(),
            tracer: 0,
            parent: 7,
        };
        let uses = GpuUse { gpus: vec![("GPU-1".into(), Some(8 << 30))] };
        let place = Place { root: "/run/containerd/runc/default".into(), id: "c1".into() };
        let (engine, name) = (Engine::Containerd, Some("web".to_owned()));
        let processes = vec![SeenProcess { process, state: told, uses, is_off }];
        Seen { place, engine, name, paused: false, journal, error: None, job: false, processes }
    }

    #[test]
    fn a_row_for_each_process() {
        let of = |stage, state, is_off| {
            let text = as_text(&[container(stage, state, is_off)], false);
            let row = text.lines().nth(1).unwrap();
            row.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let row = |state: &str, memory: &str| {
            format!("containerd c1 web 8 train {state} GPU-1 {memory} -")
        };
        assert_eq!(of(None, State::Told(CudaState::Running), false), row("running", "8.0 GiB"));
        let off = || State::Told(CudaState::Checkpointed);
        assert_eq!(of(None, off(), true), row("checkpointed", "(8.0 GiB)"));
        let suspended = Some(Stage::Suspended);
        assert_eq!(of(suspended, off(), true), row("suspended", "(8.0 GiB)"));
        assert_eq!(of(None, State::Paused, false), row("paused", "8.0 GiB"));
        assert_eq!(of(suspended, State::Paused, true), row("suspended, paused", "(8.0 GiB)"));
        // It has begun since.
        assert_eq!(of(suspended, State::Paused, false), row("paused", "8.0 GiB"));
        let parked = of(Some(Stage::AwaitingResume), State::Paused, true);
        assert_eq!(parked, row("checkpointed, paused", "(8.0 GiB)"));
        assert_eq!(of(None, State::Silent("x".into()), false), row("no answer", "8.0 GiB"));
        assert!(as_text(&[], false).contains("no container uses CUDA"));
    }

    #[test]
    fn one_whose_journal_cannot_be_used_is_not_left_out() {
        let mut seen = container(None, State::Paused, false);
        seen.processes.clear();
        assert!(!seen.is_of_interest());
        seen.error = Some("the journal /j is damaged".into());
        assert!(seen.is_of_interest());
        let text = as_text(std::slice::from_ref(&seen), false);
        assert!(text.ends_with("\nc1: the journal /j is damaged\n"), "{text}");
        assert!(as_json(&[seen]).contains("\"error\": \"the journal /j is damaged\""));
    }

    #[test]
    fn json_has_all_of_it() {
        let text =
            as_json(&[container(Some(Stage::AwaitingResume), State::Silent("late".into()), true)]);
        let list: BTreeMap<String, Value> =
            serde_json::from_value(serde_json::from_str::<Value>(&text).unwrap()[0].clone())
                .unwrap();
        assert_eq!((&list["id"], &list["name"]), (&"c1".into(), &"web".into()));
        assert_eq!(list["operation"], "awaiting resume");
        assert_eq!(list["processes"][0]["error"], "late");
        assert_eq!(list["processes"][0]["gpus"][0]["bytes"], 8_u64 << 30);
    }
}
