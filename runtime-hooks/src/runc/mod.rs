//! Running the OCI runtime (runc or one with its command line) around CUDA.

pub mod again;
pub mod args;
pub mod criu;
mod network;
pub mod output;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;

use crate::interrupt::interrupted;
use crate::processes::{ProcessId, start_time};
use crate::sys;
use args::{Arguments, CommandLine};
use output::tail;

/// What the sequences need of the runtime.
pub trait Runtime {
    /// `checkpoint`. With `leave_running` the container's processes are as before afterwards
    /// (frozen if they were), without CRIU ends them.
    fn dump(&mut self, leave_running: bool) -> Result<(), RuncError>;
    /// `restore`: on success the container's processes run, detached.
    fn restore(&mut self) -> Result<(), RuncError>;
    /// `resume`: thaws.
    fn resume(&mut self) -> Result<(), RuncError>;
    /// `kill --all ID KILL`: also a frozen container's processes end.
    fn kill(&mut self) -> Result<(), RuncError>;
    /// Undoes what a CRIU that was killed in the middle of a dump has left in the network.
    fn unlock_network(&mut self);
    /// `delete --force`: nothing of the container is left in the runtime.
    fn delete(&mut self) -> Result<(), RuncError>;
}

/// The runtime failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{command}: {how}{}{}", words(output), criu_words(criu))]
pub struct RuncError {
    /// Program and subcommand.
    pub command: String,
    /// Exit status, or why it could not be started.
    pub how: String,
    /// What it printed, the last 4 KiB.
    pub output: String,
    /// The lines of CRIU's log that say what went wrong.
    pub criu: Vec<String>,
    /// CRIU's log.
    pub log: Option<PathBuf>,
    /// Its exit status, if it ran and exited.
    pub code: Option<i32>,
}

fn words(output: &str) -> String {
    let output = output.split_whitespace().collect::<Vec<_>>().join(" ");
    if output.is_empty() { output } else { format!(": {output}") }
}

fn criu_words(lines: &[String]) -> String {
    if lines.is_empty() { String::new() } else { format!("; CRIU says: {}", lines.join(" | ")) }
}

/// The runtime's command line.
#[derive(Debug, Clone)]
pub struct Runc {
    /// The program: a path, or a name that is looked up in PATH.
    pub program: PathBuf,
    /// Everything before the subcommand: `--root`, `--log` and so on.
    pub globals: Vec<OsString>,
    /// The container.
    pub id: OsString,
    /// What the caller asked for, for `dump` and `restore`.
    pub arguments: Option<Arguments>,
    /// What goes beyond the caller's arguments.
    pub criu: criu::Options,
    /// An empty directory for `CRIU_LIBS_DIR`.
    pub no_plugins: PathBuf,
    /// The container's init, where it is known: CRIU has been seen to wait for ever for a container
    /// that was killed while it was dumped.
    pub init: Option<ProcessId>,
    /// Where logs go that must outlive the bundle.
    pub logs: criu::LogStore,
}

/// How often a running runtime is looked at.
const POLL: Duration = Duration::from_millis(2);
/// How long the runtime may go on with a container that is dead: CRIU waits 10 s for a thread that
/// was killed while it was being seized, and for ever in other places.
const DEAD: Duration = Duration::from_secs(1);
/// The same where CRIU itself ends the container, as the last but one thing that it does.
const DEAD_BY_CRIU: Duration = Duration::from_secs(10);
/// The same for what is there to end it.
const KILLING: Duration = Duration::from_secs(10);
const OUTPUT: u64 = 4096;

impl Runc {
    fn command(&self, subcommand: &str, arguments: &[OsString]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.globals).arg(subcommand).args(arguments);
        let (globals, rest) = (Vec::new(), vec![self.id.clone()]);
        again::mark(
            &mut command,
            &CommandLine { globals, subcommand: subcommand.to_owned(), rest },
        );
        command
    }

    /// The caller's command with the configured options of CRIU, for a container without CUDA.
    pub(crate) fn plain(&self, subcommand: &str) -> Command {
        let help = || self.command(subcommand, &["--help".into()]).output().ok();
        let arguments = self.arguments.as_ref().map_or_else(
            || vec![self.id.clone()],
            |caller| caller.with(&self.criu.flags(caller, false, help)),
        );
        let mut command = self.command(subcommand, &arguments);
        self.criu.environment(&mut command, &self.no_plugins);
        command
    }

    /// Runs a subcommand with its output captured. Its signals are not the caller's: Ctrl-C is
    /// handled here, and killing CRIU in the middle of a dump can harm the container.
    fn run(
        &self,
        subcommand: &str,
        mut command: Command,
        interrupted: &dyn Fn() -> bool,
        dead: Duration,
    ) -> Result<(), RuncError> {
        let failed = |how: String| RuncError {
            command: format!("{} {subcommand}", self.program.display()),
            how,
            output: String::new(),
            criu: Vec::new(),
            log: None,
            code: None,
        };
        // A memory file and not a pipe: what runc leaves behind cannot block on it or keep us.
        let output: File = memfd_create(c"runc-output", MFdFlags::MFD_CLOEXEC)
            .map_err(|error| failed(error.to_string()))?
            .into();
        let copy = || output.try_clone().map_err(|error| failed(error.to_string()));
        command.stdin(Stdio::null()).stdout(copy()?).stderr(copy()?).process_group(0);
        sys::die_with_parent_thread(&mut command, Signal::SIGKILL);
        let mut child =
            command.spawn().map_err(|error| failed(format!("cannot be started: {error}")))?;
        let status =
            self.wait(&mut child, interrupted, dead).map_err(|error| failed(error.to_string()))?;
        if status.success() {
            return Ok(());
        }
        let mut error = failed(status.to_string());
        error.code = status.code();
        error.output = tail(output, OUTPUT);
        Err(error)
    }

    /// Waits for the child. When the caller is interrupted, the runtime is asked to end, once; what
    /// CRIU then still does to the container is waited for by whoever puts the container back.
    fn wait(
        &self,
        child: &mut Child,
        interrupted: &dyn Fn() -> bool,
        dead: Duration,
    ) -> io::Result<ExitStatus> {
        let group = i32::try_from(child.id()).map(nix::unistd::Pid::from_raw).ok();
        let mut asked = false;
        let mut dead_since = None;
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            if interrupted() && !asked {
                asked = true;
                let _ = group.map(|pid| nix::sys::signal::kill(pid, Signal::SIGTERM));
            }
            if self.init.is_some_and(|init| start_time(init.pid) != Some(init.start_time)) {
                let since = dead_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= dead {
                    // runc and CRIU: the dead cannot be harmed.
                    let _ = group.map(|group| nix::sys::signal::killpg(group, Signal::SIGKILL));
                }
            }
            std::thread::sleep(POLL);
        }
    }

    /// The reason that the runtime itself gave last, in the log that it was told to write.
    fn logged(&self) -> String {
        let line = CommandLine {
            globals: self.globals.clone(),
            subcommand: String::new(),
            rest: Vec::new(),
        };
        let Some(log) = line.global("log").and_then(|log| File::open(log).ok()) else {
            return String::new();
        };
        output::last_error(&tail(log, OUTPUT)).unwrap_or_default()
    }

    fn arguments(&self) -> Result<&Arguments, RuncError> {
        self.arguments.as_ref().ok_or_else(|| RuncError {
            command: self.program.display().to_string(),
            how: "no arguments to pass on".to_owned(),
            output: String::new(),
            criu: Vec::new(),
            log: None,
            code: None,
        })
    }

    /// Adds CRIU's own words, and saves its log where it lasts.
    fn with_log(&self, mut error: RuncError, work: Option<&Path>, name: &str) -> RuncError {
        if let Some(log) = work.map(|work| work.join(name)).filter(|log| log.is_file()) {
            error.criu = criu::errors(&log);
            error.log = Some(self.logs.save(&log, &self.id).unwrap_or(log));
        }
        error
    }

    fn remove_old_log(work: Option<&Path>, name: &str) {
        // Otherwise a failure before CRIU starts would show the words of an earlier run.
        if let Some(work) = work {
            let _ = std::fs::remove_file(work.join(name));
        }
    }
}

impl Runtime for Runc {
    fn dump(&mut self, leave_running: bool) -> Result<(), RuncError> {
        let caller = self.arguments()?;
        let work = caller.work_path();
        Self::remove_old_log(work.as_deref(), criu::DUMP_LOG);
        let help = || self.command("checkpoint", &["--help".into()]).output().ok();
        let extra = self.criu.flags(caller, leave_running, help);
        let mut command = self.command("checkpoint", &caller.with(&extra));
        self.criu.environment(&mut command, &self.no_plugins);
        let dead = if leave_running { DEAD } else { DEAD_BY_CRIU };
        self.run("checkpoint", command, &interrupted, dead)
            .map_err(|error| self.with_log(error, work.as_deref(), criu::DUMP_LOG))
    }

    fn restore(&mut self) -> Result<(), RuncError> {
        let caller = self.arguments()?;
        let work = caller.work_path();
        Self::remove_old_log(work.as_deref(), criu::RESTORE_LOG);
        let help = || self.command("restore", &["--help".into()]).output().ok();
        let extra = self.criu.flags(caller, false, help);
        let mut command = self.command("restore", &caller.with(&extra));
        self.criu.environment(&mut command, &self.no_plugins);
        // Standard descriptors are the container's: runc hands them to it, and nothing of ours
        // may be written there.
        sys::die_with_parent_thread(&mut command, Signal::SIGKILL);
        let failed = |how: String, code: Option<i32>| {
            let error = RuncError {
                command: format!("{} restore", self.program.display()),
                how,
                output: if code.is_some() { self.logged() } else { String::new() },
                criu: Vec::new(),
                log: None,
                code,
            };
            self.with_log(error, work.as_deref(), criu::RESTORE_LOG)
        };
        let mut child =
            command.spawn().map_err(|error| failed(format!("cannot be started: {error}"), None))?;
        match self.wait(&mut child, &|| false, DEAD) {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(failed(status.to_string(), status.code())),
            Err(error) => Err(failed(error.to_string(), None)),
        }
    }

    fn resume(&mut self) -> Result<(), RuncError> {
        self.run("resume", self.command("resume", std::slice::from_ref(&self.id)), &|| false, DEAD)
    }

    fn kill(&mut self) -> Result<(), RuncError> {
        let arguments = ["--all".into(), self.id.clone(), "KILL".into()];
        self.run("kill", self.command("kill", &arguments), &|| false, KILLING)
    }

    fn unlock_network(&mut self) {
        if let Some(init) = self.init {
            network::unlock(init.pid);
        }
    }

    fn delete(&mut self) -> Result<(), RuncError> {
        let arguments = ["--force".into(), self.id.clone()];
        self.run("delete", self.command("delete", &arguments), &|| false, KILLING)
    }
}
