//! The command `cuda-checkpoint`, as the driver of the configured version has it.
//!
//! The words of the states and of the errors for restore, restore thread and toggle
//! are those that people have reported of the real one; the others are formed after
//! them. It ends with the `CUresult` of what failed (of which an exit status keeps the
//! lowest byte), with 1 for wrong usage.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use lexopt::prelude::*;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::cuda_error::{CudaError, Result};
use crate::settings::{Settings, Uuid, parse_uuid};
use crate::{caller, job, target};

/// An option of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opt {
    Toggle,
    GetState,
    Action,
    GetRestoreTid,
    LaunchJob,
    Pid,
    Timeout,
    DeviceMap,
    Help,
}

/// What there is: its long and short name, the first branch of the driver whose command
/// has it, and what `--help` says.
struct Row(Opt, &'static str, Option<char>, u32, &'static str);

const OPTIONS: [Row; 9] = [
    Row(
        Opt::Toggle,
        "toggle",
        None,
        550,
        "--toggle --pid <pid>\n        Toggles the CUDA state between running and checkpointed",
    ),
    Row(
        Opt::GetState,
        "get-state",
        None,
        555,
        "--get-state --pid <pid>\n        Prints the CUDA state: running, locked, checkpointed or failed",
    ),
    Row(
        Opt::Action,
        "action",
        None,
        555,
        "--action lock|checkpoint|restore|unlock --pid <pid> [--timeout <ms>]\n        Performs one step",
    ),
    Row(
        Opt::GetRestoreTid,
        "get-restore-tid",
        None,
        555,
        "--get-restore-tid --pid <pid>\n        Prints the id of the CUDA restore thread",
    ),
    Row(
        Opt::LaunchJob,
        "launch-job",
        Some('j'),
        job::JOBS,
        "--launch-job|-j <program> [arguments]\n        Runs the program in a new job",
    ),
    Row(Opt::Pid, "pid", Some('p'), 550, "--pid|-p <pid>\n        The process"),
    Row(
        Opt::Timeout,
        "timeout",
        Some('t'),
        555,
        "--timeout|-t <ms>\n        How long a lock may take",
    ),
    Row(
        Opt::DeviceMap,
        "device-map",
        None,
        580,
        "--device-map <old uuid>=<new uuid>,...\n        The GPUs that a restore goes to",
    ),
    Row(Opt::Help, "help", Some('h'), 550, "--help|-h\n        Prints this"),
];

/// One step of `--action`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Lock,
    Checkpoint,
    Restore,
    Unlock,
}

impl Step {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Lock, "lock"),
        (Self::Checkpoint, "checkpoint"),
        (Self::Restore, "restore"),
        (Self::Unlock, "unlock"),
    ];

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.1 == name).map(|step| step.0)
    }

    fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|step| step.0 == self).map_or("", |step| step.1)
    }
}

/// What is asked.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Help,
    LaunchJob(Vec<OsString>),
    Toggle(i32, DeviceMap),
    GetState(i32),
    GetRestoreTid(i32),
    Action(Step, i32, u32, DeviceMap),
}

/// Pairs of old and new GPU.
type DeviceMap = Vec<(Uuid, Uuid)>;

/// Why it failed: a sentence and what the driver said.
struct Failure(String, CudaError);

/// The command. It ends as the process should.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let branch = match Settings::current() {
        Ok(settings) => settings.branch(),
        Err(error) => return status(error.0),
    };
    let done = match parse(arguments, branch) {
        Ok(Request::Help) => {
            print!("{}", usage(branch));
            return ExitCode::SUCCESS;
        }
        Ok(request) => carry_out(&request),
        Err(reason) => {
            eprint!("{reason}\n{}", usage(branch));
            return ExitCode::FAILURE;
        }
    };
    match done {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(Failure(text, error)) => {
            eprintln!("{text}");
            status(error.0)
        }
    }
}

fn status(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1))
}

fn usage(branch: u32) -> String {
    let there = OPTIONS.iter().filter(|row| row.3 <= branch).map(|row| row.4);
    there.fold("usage: cuda-checkpoint\n".into(), |text, option| text + option + "\n")
}

/// Reads the arguments as the command of that branch does.
fn parse(
    arguments: impl Iterator<Item = OsString>,
    branch: u32,
) -> std::result::Result<Request, String> {
    let mut parser = lexopt::Parser::from_args(arguments);
    let (mut operation, mut pid, mut timeout, mut map) = (None, None, 0, DeviceMap::new());
    let mut set = |name: Opt, step| match operation.replace((name, step)) {
        None => Ok(()),
        Some(_) => Err("more than one operation".to_owned()),
    };
    while let Some(argument) = parser.next().map_err(|error| error.to_string())? {
        let row = OPTIONS.iter().find(|row| match argument {
            Long(name) => row.1 == name,
            Short(letter) => row.2 == Some(letter),
            Value(_) => false,
        });
        let row = row.filter(|row| row.3 <= branch);
        let Some(Row(name, ..)) = row else { return Err(argument.unexpected().to_string()) };
        match name {
            Opt::Help => return Ok(Request::Help),
            Opt::LaunchJob => {
                let program: Vec<_> =
                    parser.raw_args().map_err(|error| error.to_string())?.collect();
                return match (program.is_empty(), operation.is_none() && pid.is_none()) {
                    (true, _) => Err("no program".into()),
                    (_, false) => Err("--launch-job stands alone".into()),
                    _ => Ok(Request::LaunchJob(program)),
                };
            }
            Opt::Pid => pid = Some(value(&mut parser)?),
            Opt::Timeout => timeout = value(&mut parser)?,
            Opt::DeviceMap => {
                let text: String = value(&mut parser)?;
                map = device_map(&text).ok_or_else(|| format!("not a device map: {text}"))?;
            }
            Opt::Action => {
                let word: String = value(&mut parser)?;
                let step = Step::named(&word).ok_or_else(|| format!("unknown action: {word}"))?;
                set(*name, Some(step))?;
            }
            _ => set(*name, None)?,
        }
    }
    let (name, step) = operation.ok_or("no operation")?;
    let pid = pid.ok_or("no pid")?;
    match (name, step) {
        (Opt::Toggle, _) => Ok(Request::Toggle(pid, map)),
        (Opt::GetState, _) => Ok(Request::GetState(pid)),
        (Opt::GetRestoreTid, _) => Ok(Request::GetRestoreTid(pid)),
        (_, Some(step)) => Ok(Request::Action(step, pid, timeout, map)),
        _ => Err("no operation".into()),
    }
}

fn device_map(text: &str) -> Option<DeviceMap> {
    let pair = |pair: &str| {
        let (old, new) = pair.split_once('=')?;
        Some((parse_uuid(old)?, parse_uuid(new)?))
    };
    text.split(',').map(pair).collect()
}

fn value<T: std::str::FromStr>(parser: &mut lexopt::Parser) -> std::result::Result<T, String>
where
    T::Err: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    parser.value().and_then(|value| value.parse()).map_err(|error| error.to_string())
}

/// What it prints, or why it failed.
fn carry_out(request: &Request) -> std::result::Result<String, Failure> {
    let said = |text: String| {
        move |error: CudaError| {
            let words = CudaError::describe(error.0)
                .map_or("unknown error".into(), |words| words.1.to_string_lossy().into_owned());
            Failure(format!("{text}: \"{words}\""), error)
        }
    };
    if let Request::LaunchJob(program) = request {
        let name = program[0].display();
        return match launch(program) {
            Ok(never) => match never {},
            Err(error) => Err(said(format!("Could not launch {name}"))(error)),
        };
    }
    target::init().map_err(said("Could not initialize CUDA".into()))?;
    match request {
        Request::Help | Request::LaunchJob(_) => Ok(String::new()),
        Request::Toggle(pid, map) => {
            let failed = said(format!("Error toggling CUDA in process ID {pid}"));
            toggle(*pid, map).map(|()| String::new()).map_err(failed)
        }
        Request::GetState(pid) => {
            let failed = said(format!("Could not get state of process ID {pid}"));
            caller::state(*pid).map(|state| state_name(state).to_owned() + "\n").map_err(failed)
        }
        Request::GetRestoreTid(pid) => {
            let text = format!("Could not find restore thread for process ID {pid}");
            let tid = caller::restore_thread_id(*pid).map(|tid| format!("{tid}\n"));
            tid.map_err(|error| Failure(text, error))
        }
        Request::Action(step, pid, timeout, map) => {
            let failed = said(format!("Could not {} on process ID {pid}", step.name()));
            let done = match step {
                Step::Lock => caller::lock(*pid, *timeout),
                Step::Checkpoint => caller::checkpoint(*pid),
                Step::Restore => caller::restore(*pid, map.clone()),
                Step::Unlock => caller::unlock(*pid),
            };
            done.map(|()| String::new()).map_err(failed)
        }
    }
}

fn state_name(state: i32) -> &'static str {
    match state {
        0 => "running",
        1 => "locked",
        2 => "checkpointed",
        _ => "failed",
    }
}

/// Both steps of one direction. That a refused checkpoint is unlocked again is assumed.
fn toggle(pid: i32, map: &DeviceMap) -> Result<()> {
    match state_name(caller::state(pid)?) {
        "running" => {
            caller::lock(pid, 0)?;
            caller::checkpoint(pid).inspect_err(|_| _ = caller::unlock(pid))
        }
        "checkpointed" => {
            caller::restore(pid, map.clone())?;
            caller::unlock(pid)
        }
        _ => Err(CudaError::ILLEGAL_STATE),
    }
}

/// Becomes the program, with a new job file that it and its children inherit.
fn launch(program: &[OsString]) -> Result<Infallible> {
    let file = File::from(memfd_create(c"cuda-checkpoint-job", MFdFlags::empty())?);
    job::initialise(&file)?;
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let error = Command::new(&program[0]).args(&program[1..]).env(job::VARIABLE, name).exec();
    Err(error.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::format_uuid;

    fn parsed(branch: u32, line: &str) -> std::result::Result<Request, String> {
        parse(line.split_whitespace().map(OsString::from), branch)
    }

    #[test]
    fn each_branch_has_its_options() {
        let lines = [
            (550, "--toggle --pid 7", Request::Toggle(7, Vec::new())),
            (550, "-p 7 --toggle", Request::Toggle(7, Vec::new())),
            (550, "-h", Request::Help),
            (555, "--get-state --pid=7", Request::GetState(7)),
            (555, "--get-restore-tid -p 7", Request::GetRestoreTid(7)),
            (555, "--action lock -p 7 -t 20", Request::Action(Step::Lock, 7, 20, Vec::new())),
            (555, "--action restore --pid 7", Request::Action(Step::Restore, 7, 0, Vec::new())),
            (590, "-j a --pid 7", Request::LaunchJob(vec!["a".into(), "--pid".into(), "7".into()])),
            (590, "--launch-job a", Request::LaunchJob(vec!["a".into()])),
        ];
        for (first, line, request) in lines {
            assert_eq!(parsed(610, line).as_ref(), Ok(&request), "{line}");
            assert_eq!(parsed(first, line), Ok(request), "{line}");
            assert!(parsed(first - 1, line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_map_names_gpus() {
        let settings = Settings::default();
        let (old, new) = (settings.uuid(0), settings.uuid(1));
        let (from, to) = (format_uuid(&old), format_uuid(&new));
        let line = format!("--toggle -p 7 --device-map {from}={to},{to}={from}");
        let expected = Request::Toggle(7, vec![(old, new), (new, old)]);
        assert_eq!(parsed(580, &line), Ok(expected));
        assert!(parsed(570, &line).is_err());
        assert!(parsed(580, "--toggle -p 7 --device-map 0=1").is_err());
    }

    #[test]
    fn the_help_shows_what_there_is() {
        assert!(usage(580).contains("--action") && !usage(580).contains("--launch-job"));
        assert!(usage(590).contains("--launch-job") && !usage(550).contains("--action"));
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        let lines = [
            "",
            "--pid 7",
            "--toggle",
            "--toggle --get-state --pid 7",
            "--action dance --pid 7",
            "--toggle --pid x",
            "--toggle --pid 7 8",
            "--launch-job",
            "--pid 7 --launch-job a",
        ];
        for line in lines {
            assert!(parsed(610, line).is_err(), "{line}");
        }
    }
}
