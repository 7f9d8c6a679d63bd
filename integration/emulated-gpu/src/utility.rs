//! The command `cuda-checkpoint`, as the driver of the configured version has it.
//!
//! Errors, states, streams and exit statuses are those that were seen of driver 580: what was
//! asked goes to stdout, every error to stderr, and every failure ends with 1. The usage names the
//! same options in the same lines; what it says about them is our own.
//!
//! - A toggle that is refused at its second half leaves the process as its first half did: LOCKED
//!   after a checkpoint that is not supported. One on a LOCKED process is refused.
//! - A toggle locks without a time limit.
//! - `--device-map` is read by `--action restore` alone. Anything else takes it and ignores it,
//!   whatever it says.
//!
//! Assumed, not seen:
//!
//! - Other branches than 580 do the same with the options that they have, 550 also after a refusal.
//! - Before 555 options have no short names, since its published help has none.
//! - What is wrong in any other way than those below (`--pid x`, two operations, words that are no
//!   options) is an invalid option. A map that is none is an invalid argument.
//! - A state other than the first three is called `failed`.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use lexopt::prelude::*;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::cuda_error::{CudaError, Result};
use crate::settings::{REMAP, Settings, Uuid, parse_uuid};
use crate::target::State;
use crate::{abi_cuda, caller, job};

/// The first branch whose command can do more than toggle.
const STEPS: u32 = 555;

/// What stands before the usage when an option is not known.
const INVALID: &str = "Invalid option(s) or option(s) not supported by this CUDA Driver";

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

/// What there is: its long and short name, and the first branch of the driver whose command has it.
struct Row(Opt, &'static str, Option<char>, u32);

const OPTIONS: [Row; 9] = [
    Row(Opt::GetState, "get-state", None, STEPS),
    Row(Opt::Action, "action", None, STEPS),
    Row(Opt::Toggle, "toggle", None, 550),
    Row(Opt::GetRestoreTid, "get-restore-tid", None, STEPS),
    Row(Opt::LaunchJob, "launch-job", Some('j'), job::JOBS),
    Row(Opt::Pid, "pid", Some('p'), 550),
    Row(Opt::Timeout, "timeout", Some('t'), STEPS),
    Row(Opt::DeviceMap, "device-map", Some('d'), REMAP),
    Row(Opt::Help, "help", Some('h'), 550),
];

impl Row {
    fn is_there(&self, argument: &lexopt::Arg<'_>, branch: u32) -> bool {
        let named = match argument {
            Long(name) => self.1 == *name,
            Short(letter) => self.2 == Some(*letter) && branch >= STEPS,
            Value(_) => false,
        };
        named && branch >= self.3
    }
}

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
    Toggle(i32),
    GetState(i32),
    GetRestoreTid(i32),
    Action { word: String, pid: i32, timeout_ms: u32, map: Option<String> },
}

/// Pairs of old and new GPU.
type DeviceMap = Vec<(Uuid, Uuid)>;

/// Why nothing came of it.
#[derive(Debug, PartialEq, Eq)]
enum Failure {
    /// What the usage follows.
    Usage(String),
    /// What stands alone.
    Driver(String),
}

/// The command, with its own name as the first argument. It ends as the process should.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let Ok(settings) = Settings::current() else { return ExitCode::FAILURE };
    let own = arguments.next().unwrap_or_default();
    let done = parse(&own.to_string_lossy(), arguments, settings.branch());
    match done.and_then(|request| carry_out(&request, &settings)) {
        Ok(text) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(Failure::Usage(reason)) => eprint!("{reason}\n\n{}", usage(&settings)),
        Err(Failure::Driver(text)) => eprintln!("{text}"),
    }
    ExitCode::FAILURE
}

/// What `--help` prints. Who reads it finds the same beginnings of lines as in the real one's.
fn usage(settings: &Settings) -> String {
    let (branch, driver) = (settings.branch(), &settings.driver);
    let version = format!("Version {driver}. Of the emulated GPU.\n");
    let title = "CUDA checkpoint and restore utility.\n".to_owned();
    if branch < STEPS {
        return title
            + "Suspends and resumes CUDA in a process.\n"
            + &version
            + "\n    --toggle --pid <value>\n        From the one to the other.\n"
            + "\n    --help\n        Print this.\n";
    }
    let since = |first: u32, text: &'static str| if branch >= first { text } else { "" };
    let map = since(REMAP, " [--device-map <uuids>]");
    let operations = [
        "--get-state --pid <pid>\n\tThe state of CUDA in a process".to_owned(),
        format!(
            "--action lock | checkpoint | restore | unlock --pid <pid> [--timeout <ms>]{map}\n\t\
             One step"
        ),
        "--toggle --pid <pid>\n\tAll steps from running to checkpointed, or back".to_owned(),
        "--get-restore-tid --pid <pid>\n\tThe thread that does the work in a process".to_owned(),
        since(job::JOBS, "--launch-job|-j <program> [arguments]\n\tA program in a job of its own")
            .to_owned(),
    ];
    let options = [
        "--pid|-p <pid>\n\tThe process",
        "--timeout|-t <timeout>\n\tMilliseconds that a lock may take",
        since(REMAP, "--device-map|-d <deviceUuids>\n\tWhat GPUs become at a restore: old=new,..."),
        "--help|-h\n\tThis",
    ];
    let list = |entries: Vec<&str>| -> String {
        let there = entries.into_iter().filter(|entry| !entry.is_empty());
        there.collect::<Vec<_>>().join("\n\n") + "\n"
    };
    title
        + &version
        + "\nOperations:\n"
        + &list(operations.iter().map(String::as_str).collect())
        + "\nOptions:\n"
        + &list(options.to_vec())
}

/// Reads the arguments as the command of that branch does.
fn parse(
    own: &str,
    arguments: impl Iterator<Item = OsString>,
    branch: u32,
) -> std::result::Result<Request, Failure> {
    let said = |text: &str| Failure::Usage(text.to_owned());
    let invalid = || said(INVALID);
    let mut parser = lexopt::Parser::from_args(arguments);
    let (mut operation, mut pid, mut timeout, mut map) = (None, None, None, None);
    while let Some(argument) = parser.next().map_err(|_| invalid())? {
        let row = OPTIONS.iter().find(|row| row.is_there(&argument, branch));
        let Some(Row(name, ..)) = row else {
            let unknown = match argument {
                Long(name) => format!("unrecognized option '--{name}'"),
                Short(letter) => format!("invalid option -- '{letter}'"),
                Value(_) => return Err(invalid()),
            };
            return Err(Failure::Usage(format!("{own}: {unknown}\n{INVALID}")));
        };
        match name {
            Opt::Help => return Ok(Request::Help),
            Opt::LaunchJob => {
                let program: Vec<_> = parser.raw_args().map_err(|_| invalid())?.collect();
                let alone = operation.is_none() && pid.is_none() && !program.is_empty();
                return if alone { Ok(Request::LaunchJob(program)) } else { Err(invalid()) };
            }
            Opt::Pid => pid = Some(value(&mut parser)?),
            Opt::Timeout => timeout = Some(value(&mut parser)?),
            Opt::DeviceMap => map = Some(value(&mut parser)?),
            operation_name => {
                let word = match operation_name {
                    Opt::Action => value(&mut parser)?,
                    _ => String::new(),
                };
                if operation.replace((operation_name, word)).is_some() {
                    return Err(invalid());
                }
            }
        }
    }
    let (name, word) = operation.ok_or_else(|| said("No operation selected"))?;
    let pid = pid.ok_or_else(|| said("Missing pid to perform operation on"))?;
    let locks = *name == Opt::Action && Step::named(&word) == Some(Step::Lock);
    if timeout.is_some() && !locks {
        return Err(said("Timeout is only valid for --action lock operation"));
    }
    Ok(match name {
        Opt::Toggle => Request::Toggle(pid),
        Opt::GetState => Request::GetState(pid),
        Opt::GetRestoreTid => Request::GetRestoreTid(pid),
        _ => Request::Action { word, pid, timeout_ms: timeout.unwrap_or(0), map },
    })
}

fn value<T: std::str::FromStr>(parser: &mut lexopt::Parser) -> std::result::Result<T, Failure>
where
    T::Err: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let value = parser.value().and_then(|value| value.parse());
    value.map_err(|_| Failure::Usage(INVALID.to_owned()))
}

fn device_map(text: Option<&str>) -> Result<DeviceMap> {
    let pair = |pair: &str| {
        let (old, new) = pair.split_once('=')?;
        Some((parse_uuid(old)?, parse_uuid(new)?))
    };
    let pairs = text.map(|text| text.split(',').map(pair).collect());
    pairs.unwrap_or(Some(DeviceMap::new())).ok_or(CudaError::INVALID_VALUE)
}

/// What it prints, or why it failed.
fn carry_out(request: &Request, settings: &Settings) -> std::result::Result<String, Failure> {
    let failed = |text: String| {
        move |error: CudaError| {
            let words = CudaError::describe(error.0)
                .map_or("unknown error".into(), |words| words.1.to_string_lossy().into_owned());
            Failure::Driver(format!("{text}: \"{words}\""))
        }
    };
    match request {
        Request::Help => return Ok(usage(settings)),
        Request::LaunchJob(program) => {
            let text = format!("Could not launch {}", program[0].display());
            return match launch(program) {
                Ok(never) => match never {},
                Err(error) => Err(failed(text)(error)),
            };
        }
        _ => {}
    }
    let initialized = match abi_cuda::cuInit(0) {
        0 => Ok(()),
        code => Err(CudaError(code)),
    };
    initialized.map_err(failed("Could not initialize CUDA".into()))?;
    match request {
        Request::Help | Request::LaunchJob(_) => Ok(String::new()),
        Request::Toggle(pid) => {
            let text = format!("Error toggling CUDA in process ID {pid}");
            toggle(*pid).map(|()| String::new()).map_err(failed(text))
        }
        Request::GetState(pid) => {
            let text = format!("Error getting process state for process ID {pid}");
            let state = caller::state(*pid).map_err(failed(text))?;
            Ok(state_name(state).to_owned() + "\n")
        }
        Request::GetRestoreTid(pid) => {
            let text = format!("Could not find restore thread for process ID {pid}");
            let tid = caller::restore_thread_id(*pid).map(|tid| format!("{tid}\n"));
            tid.map_err(|_| Failure::Driver(text))
        }
        Request::Action { word, pid, timeout_ms, map } => {
            // Found out only now, as the time that it takes has shown.
            let step = Step::named(word);
            let step = step.ok_or_else(|| Failure::Usage("Invalid process state".into()))?;
            let done = match step {
                Step::Lock => caller::lock(*pid, *timeout_ms),
                Step::Checkpoint => caller::checkpoint(*pid),
                Step::Restore => {
                    device_map(map.as_deref()).and_then(|map| caller::restore(*pid, map))
                }
                Step::Unlock => caller::unlock(*pid),
            };
            let text = format!("Could not {} on process ID {pid}", step.name());
            done.map(|()| String::new()).map_err(failed(text))
        }
    }
}

fn state_name(state: i32) -> &'static str {
    const RUNNING: i32 = State::Running as i32;
    const LOCKED: i32 = State::Locked as i32;
    const CHECKPOINTED: i32 = State::Checkpointed as i32;
    match state {
        RUNNING => "running",
        LOCKED => "locked",
        CHECKPOINTED => "checkpointed",
        _ => "failed",
    }
}

/// Both steps of one direction. Nothing is undone when the second is refused.
fn toggle(pid: i32) -> Result<()> {
    match state_name(caller::state(pid)?) {
        "running" => {
            caller::lock(pid, 0)?;
            caller::checkpoint(pid)
        }
        "checkpointed" => {
            caller::restore(pid, DeviceMap::new())?;
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

    fn parsed(branch: u32, line: &str) -> std::result::Result<Request, Failure> {
        parse("it", line.split_whitespace().map(OsString::from), branch)
    }

    fn refused(reason: &str) -> std::result::Result<Request, Failure> {
        Err(Failure::Usage(reason.to_owned()))
    }

    fn action(word: &str, timeout_ms: u32, map: Option<&str>) -> Request {
        Request::Action { word: word.into(), pid: 7, timeout_ms, map: map.map(str::to_owned) }
    }

    fn usage_of(driver: &str) -> String {
        usage(&format!("driver={driver}").parse().unwrap())
    }

    #[test]
    fn each_branch_has_its_options() {
        let lines = [
            (550, "--toggle --pid 7", Request::Toggle(7)),
            (550, "--pid=7 --toggle", Request::Toggle(7)),
            (550, "--help", Request::Help),
            (555, "-p 7 --toggle", Request::Toggle(7)),
            (555, "-h", Request::Help),
            (555, "--get-state --pid=7", Request::GetState(7)),
            (555, "--get-restore-tid -p 7", Request::GetRestoreTid(7)),
            (555, "--action lock -p 7 -t 20", action("lock", 20, None)),
            (555, "--action restore --pid 7", action("restore", 0, None)),
            (555, "--action dance --pid 7", action("dance", 0, None)),
            (580, "--action restore --pid 7 -d x", action("restore", 0, Some("x"))),
            (580, "--toggle --pid 7 --device-map x", Request::Toggle(7)),
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
    fn refuses_in_the_words_of_the_real_one() {
        let unknown = |option: &str| format!("it: {option}\n{INVALID}");
        let lines = [
            ("", "No operation selected"),
            ("--pid 7", "No operation selected"),
            ("--get-state", "Missing pid to perform operation on"),
            ("--toggle --pid 7 --timeout 5", "Timeout is only valid for --action lock operation"),
            ("--action restore --pid 7 -t 5", "Timeout is only valid for --action lock operation"),
            ("--nonsense", &unknown("unrecognized option '--nonsense'")),
            ("--launch-job a", &unknown("unrecognized option '--launch-job'")),
            ("-x", &unknown("invalid option -- 'x'")),
            ("--toggle --get-state --pid 7", INVALID),
            ("--toggle --pid x", INVALID),
            ("--toggle --pid", INVALID),
            ("--toggle --pid 7 8", INVALID),
        ];
        for (line, reason) in lines {
            assert_eq!(parsed(580, line), refused(reason), "{line}");
        }
        for line in ["--launch-job", "--pid 7 --launch-job a"] {
            assert_eq!(parsed(590, line), refused(INVALID), "{line}");
        }
    }

    #[test]
    fn a_map_names_gpus() {
        let settings = Settings::default();
        let (old, new) = (settings.uuid(0), settings.uuid(1));
        let (from, to) = (format_uuid(&old), format_uuid(&new));
        let map = |text: &str| device_map(Some(text));
        assert_eq!(map(&format!("{from}={to},{to}={from}")), Ok(vec![(old, new), (new, old)]));
        assert_eq!(device_map(None), Ok(Vec::new()));
        for text in ["", "0=1", &from, &format!("{from}={to},")] {
            assert_eq!(map(text), Err(CudaError::INVALID_VALUE), "{text}");
        }
    }

    #[test]
    fn the_help_shows_what_there_is() {
        let rows = [
            ("550.54.15", "    --toggle --pid <value>\n", "--action"),
            ("555.42.02", "unlock --pid <pid> [--timeout <ms>]\n", "--device-map"),
            ("570.86.10", "unlock --pid <pid> [--timeout <ms>]\n", "--device-map"),
            ("580.159.04", " [--timeout <ms>] [--device-map <uuids>]\n", "--launch-job"),
            ("590.44.01", "\n--launch-job|-j <program>", "--dance"),
        ];
        for (driver, has, lacks) in rows {
            let text = usage_of(driver);
            assert!(text.contains(has) && !text.contains(lacks), "{driver}: {text}");
            assert!(text.contains(&format!("\nVersion {driver}.")), "{text}");
        }
    }
}
