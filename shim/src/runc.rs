//! Calls of runc: the same arguments as containerd's own shim gives, and for what concerns CUDA
//! through the engine, which is this executable again with [`ENGINE`] as first argument.
//!
//! The engine is a process of its own, so that nothing of the driver is ever in this one, a
//! checkpoint goes on when this one is lost, and its memory goes back when it ends.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use async_trait::async_trait;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use stasis_hooks::child::die_with_parent_thread;
use stasis_hooks::oci::{self, Caller};
use stasis_hooks::runc::output::{last_error, tail};
use tokio_util::sync::CancellationToken;

use crate::boot::DeleteCall;
use crate::process::KILLED;
use crate::reaper::{Pid, Reaper};

/// First argument with which this executable is the engine: then the runtime, the configuration
/// file (empty: this host's), the FIFO for logs, its level, and runc's command line.
pub const ENGINE: &str = "__runc";

/// How much of what runc prints or logs is kept, in bytes.
const OUTPUT: u64 = 4096;

tokio::task_local! {
    /// Cancelled when whoever asked for the request that is being answered has gone away. A call of
    /// runc that hangs would otherwise hang for ever.
    pub static CALLER: CancellationToken;
}

/// One call.
#[derive(Debug)]
pub struct Call {
    /// runc's subcommand.
    pub subcommand: &'static str,
    /// What follows it.
    pub arguments: Vec<OsString>,
    /// Its standard descriptors.
    pub io: CallIo,
    /// Who is called.
    pub through: Through,
    /// Gets the pid of the call while it runs, 0 afterwards.
    pub pid: Option<Arc<AtomicI32>>,
}

/// Standard descriptors of a call.
#[derive(Debug)]
pub enum CallIo {
    /// Nothing in; what comes out is the error, or the answer.
    Captured,
    /// The same with this as input.
    Input(Vec<u8>),
    /// The container's.
    Container([Stdio; 3]),
}

/// Who is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Through {
    /// runc.
    Runtime,
    /// The engine, and runc through it.
    Engine,
}

impl Call {
    /// A call of runc itself, with captured output.
    pub fn new<A: Into<OsString>>(
        subcommand: &'static str,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self {
            subcommand,
            arguments: arguments.into_iter().map(Into::into).collect(),
            io: CallIo::Captured,
            through: Through::Runtime,
            pid: None,
        }
    }

    /// With other descriptors.
    #[must_use]
    pub fn with_io(self, io: CallIo) -> Self {
        Self { io, ..self }
    }

    /// Through the engine, if `engine`.
    #[must_use]
    pub fn through_engine(self, engine: bool) -> Self {
        let through = if engine { Through::Engine } else { Through::Runtime };
        Self { through, ..self }
    }
}

/// What the container needs of the runtime.
#[async_trait]
pub trait Runtime: Send + Sync {
    /// Calls it and waits for its end; gives what it printed.
    async fn call(&self, call: Call) -> Result<String, RuncError>;
}

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuncError {
    /// It could not be started.
    #[error("{program} cannot be started: {reason}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        reason: String,
    },
    /// It ended with an error.
    #[error("{program} did not terminate successfully: exit status {status}: {output}")]
    Failed {
        /// The program's name.
        program: String,
        /// Its status.
        status: u32,
        /// What it printed, the last 4 KiB.
        output: String,
        /// The last error in its log.
        logged: Option<String>,
    },
}

impl RuncError {
    /// The reason that the runtime itself gave, where it gave one. What it printed is surely this
    /// call's; what was logged meanwhile may be another call's, since a container has one log.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::Failed { output, .. } if !output.is_empty() => {
                output.split_whitespace().collect::<Vec<_>>().join(" ")
            }
            Self::Failed { logged: Some(logged), .. } => logged.clone(),
            other => other.to_string(),
        }
    }

    /// Whether it was ended by SIGKILL.
    #[must_use]
    pub fn was_killed(&self) -> bool {
        matches!(self, Self::Failed { status: KILLED, .. })
    }

    /// Whether it printed or logged this.
    #[must_use]
    pub fn says(&self, words: &str) -> bool {
        match self {
            Self::Start { .. } => false,
            Self::Failed { output, logged: None, .. } => output.contains(words),
            Self::Failed { output, logged: Some(logged), .. } => {
                output.contains(words) || (output.is_empty() && logged.contains(words))
            }
        }
    }
}

/// The runtime of one container.
#[derive(Debug, Clone)]
pub struct Runc {
    /// The program: a path, or a name in PATH.
    pub program: PathBuf,
    /// Whether the program is `stasis-runc`, which is the engine already.
    pub is_engine: bool,
    /// Its root directory, for this namespace.
    pub root: PathBuf,
    /// Where it logs.
    pub log: PathBuf,
    /// Whether cgroups are systemd's.
    pub systemd_cgroup: bool,
    /// The engine's configuration file; `None`: this host's.
    pub config: Option<PathBuf>,
    /// Where the engine's log goes: a FIFO, and a level.
    pub engine_log: (PathBuf, String),
    /// Who waits for it.
    pub reaper: Reaper,
}

impl Runc {
    /// The command line of a call.
    fn command(&self, call: &Call) -> Command {
        // These go on without us, since the container must not be left half-way. All others end with
        // us, as with containerd's own shim: they would go on with a container that is being removed.
        let outlives =
            call.through == Through::Engine && matches!(call.subcommand, "checkpoint" | "resume");
        let mut command = if call.through == Through::Engine && !self.is_engine {
            let (log, level) = &self.engine_log;
            engine_command(&self.program, self.config.as_deref(), log, level)
        } else {
            Command::new(&self.program)
        };
        // With all that it starts in its place.
        command.process_group(0);
        if !outlives {
            die_with_parent_thread(&mut command, Signal::SIGKILL);
        }
        command.args(self.globals()).arg(call.subcommand).args(&call.arguments);
        command
    }

    fn globals(&self) -> Vec<OsString> {
        let mut globals: Vec<OsString> = vec![
            "--root".into(),
            self.root.clone().into(),
            "--log".into(),
            self.log.clone().into(),
            "--log-format".into(),
            "json".into(),
        ];
        if self.systemd_cgroup {
            globals.push("--systemd-cgroup".into());
        }
        globals
    }

    fn name(&self) -> String {
        self.program.file_name().unwrap_or(OsStr::new("runc")).to_string_lossy().into_owned()
    }

    async fn run(&self, call: Call) -> Result<String, RuncError> {
        let cannot = |error: io::Error| RuncError::Start {
            program: self.program.display().to_string(),
            reason: error.to_string(),
        };
        let mut command = self.command(&call);
        let output = captured(&mut command, call.io).map_err(cannot)?;
        let logged = LogTail::new(&self.log);
        let mut spawned = self.reaper.spawn(command).map_err(cannot)?;
        let running = Running::new(call.pid, spawned.pid);
        let ends_with_caller = match call.through {
            Through::Runtime => {
                matches!(call.subcommand, "create" | "start" | "exec" | "ps" | "update" | "kill")
            }
            // An exec may be putting right what was interrupted.
            Through::Engine => call.subcommand == "create",
        };
        let caller = CALLER.try_with(Clone::clone).ok().filter(|_| ends_with_caller);
        let exit = match caller {
            None => spawned.exit.await,
            Some(caller) => tokio::select! {
                exit = &mut spawned.exit => exit,
                () = caller.cancelled() => {
                    tracing::warn!(call = call.subcommand, "ended with its caller");
                    let group = nix::unistd::Pid::from_raw(spawned.pid);
                    let _ = nix::sys::signal::killpg(group, Signal::SIGKILL);
                    spawned.exit.await
                }
            },
        };
        drop(running);
        let status = exit.map_or(255, |exit| exit.status);
        // An answer is whole; of an error the end is enough.
        let kept = if status == 0 { u64::MAX } else { OUTPUT };
        let output = output.map(|output| tail(output, kept)).unwrap_or_default();
        if status == 0 {
            return Ok(output);
        }
        let logged = logged.last_error();
        Err(RuncError::Failed { program: self.name(), status, output, logged })
    }
}

#[async_trait]
impl Runtime for Runc {
    async fn call(&self, call: Call) -> Result<String, RuncError> {
        self.run(call).await
    }
}

/// Shows a call's pid while it runs.
struct Running(Option<Arc<AtomicI32>>);

impl Running {
    fn new(slot: Option<Arc<AtomicI32>>, pid: Pid) -> Self {
        if let Some(slot) = &slot {
            slot.store(pid, Ordering::Relaxed);
        }
        Self(slot)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(slot) = &self.0 {
            slot.store(0, Ordering::Relaxed);
        }
    }
}

/// Sets the descriptors; gives the file that output goes to. A memory file and not a pipe: what
/// runc leaves behind cannot block on it or keep us.
fn captured(command: &mut Command, io: CallIo) -> io::Result<Option<File>> {
    let memory = |name| io::Result::Ok(File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC)?));
    let input = match io {
        CallIo::Container([stdin, stdout, stderr]) => {
            command.stdin(stdin).stdout(stdout).stderr(stderr);
            return Ok(None);
        }
        CallIo::Captured => Stdio::null(),
        CallIo::Input(bytes) => {
            let mut file = memory(c"runc-input")?;
            file.write_all(&bytes)?;
            file.rewind()?;
            file.into()
        }
    };
    let output = memory(c"runc-output")?;
    command.stdin(input).stdout(output.try_clone()?).stderr(output.try_clone()?);
    Ok(Some(output))
}

/// What is added to a log from now on. All calls for a container log into one file, and an error
/// of an earlier one is not this one's.
struct LogTail<'a> {
    path: &'a Path,
    from: u64,
}

impl<'a> LogTail<'a> {
    fn new(path: &'a Path) -> Self {
        Self { path, from: path.metadata().map_or(0, |metadata| metadata.len()) }
    }

    /// The message of the last `level=error` line.
    fn last_error(&self) -> Option<String> {
        let mut file = File::open(self.path).ok()?;
        let length = file.metadata().ok()?.len();
        let from = self.from.max(length.saturating_sub(16 * OUTPUT));
        file.seek(SeekFrom::Start(from)).ok()?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).ok()?;
        last_error(&String::from_utf8_lossy(&text))
    }
}

/// Whether a call through the engine is still the engine, and has not become runc.
#[must_use]
pub fn is_engine(pid: Pid) -> bool {
    let same = |program: &Path| {
        let (own, other) = (Path::new("/proc/self/exe").metadata(), program.metadata());
        own.is_ok_and(|own| {
            other.is_ok_and(|other| (own.dev(), own.ino()) == (other.dev(), other.ino()))
        })
    };
    let program = PathBuf::from(format!("/proc/{pid}/exe"));
    let name = std::fs::read_link(&program).unwrap_or_default();
    same(&program) || name.file_name().is_some_and(|name| name == "stasis-runc")
}

/// Removes a container whose server is gone: through the engine, since its journal goes with it.
pub fn delete_by_force(call: &DeleteCall) -> io::Result<Output> {
    let log = call.log.as_deref().map(|log| log.with_file_name(crate::log::FILE));
    let log = log.unwrap_or_default();
    let mut command = engine_command(&call.program, call.config.as_deref(), &log, "warn");
    command.args(call.arguments());
    // One that hangs ends with us, when containerd does not wait any longer.
    die_with_parent_thread(&mut command, Signal::SIGKILL);
    command.stdin(Stdio::null()).output()
}

/// The engine: its side is [`engine`]. runc's command line is to follow.
fn engine_command(runtime: &Path, config: Option<&Path>, log: &Path, level: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg(ENGINE).arg(runtime).arg(config.unwrap_or(Path::new(""))).arg(log).arg(level);
    command
}

/// Runs as the engine; `arguments` are those behind [`ENGINE`].
#[must_use]
pub fn engine(arguments: &[OsString]) -> ExitCode {
    let [runtime, config, log, level, line @ ..] = arguments else {
        eprintln!("stasis: {ENGINE} is for the shim itself");
        return ExitCode::FAILURE;
    };
    crate::log::engine(Path::new(log), level.as_ref());
    let config = Some(PathBuf::from(config)).filter(|path| !path.as_os_str().is_empty());
    oci::run_as(line, Caller { runtime: Some(runtime.into()), config })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runc(directory: &Path, reaper: Reaper) -> Runc {
        Runc {
            program: directory.join("runc"),
            is_engine: false,
            root: "/run/containerd/runc/default".into(),
            log: directory.join("log.json"),
            systemd_cgroup: false,
            config: None,
            engine_log: (directory.join("log"), "warn".into()),
            reaper,
        }
    }

    fn line(command: &Command) -> Vec<String> {
        let program = std::iter::once(command.get_program());
        let words = program.chain(command.get_args());
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn the_arguments_are_those_of_gos_shim() {
        let runc = runc(Path::new("/b"), Reaper::default());
        let call = Call::new("pause", ["c1"]);
        assert_eq!(
            line(&runc.command(&call)).join(" "),
            "/b/runc --root /run/containerd/runc/default --log /b/log.json --log-format json pause c1"
        );
        let runc = Runc { systemd_cgroup: true, ..runc };
        assert!(line(&runc.command(&call)).join(" ").contains("json --systemd-cgroup pause c1"));
    }

    #[test]
    fn the_engine_is_this_executable_unless_the_runtime_is_the_engine() {
        let runc = runc(Path::new("/b"), Reaper::default());
        let call = Call::new("checkpoint", ["c1"]).through_engine(true);
        let words = line(&runc.command(&call));
        assert_eq!(words[..6], ["/proc/self/exe", ENGINE, "/b/runc", "", "/b/log", "warn"]);
        assert_eq!(words[6..8], ["--root", "/run/containerd/runc/default"]);
        let runc = Runc { is_engine: true, ..runc };
        assert_eq!(line(&runc.command(&call))[0], "/b/runc");
    }

    #[test]
    fn what_a_call_printed_goes_before_what_was_logged_meanwhile() {
        let failed = |output: &str, logged: Option<&str>| RuncError::Failed {
            program: "runc".to_owned(),
            status: 1,
            output: output.to_owned(),
            logged: logged.map(str::to_owned),
        };
        let own = failed("stasis: killed\nmeanwhile", Some("container not paused"));
        assert_eq!(own.words(), "stasis: killed meanwhile");
        assert!(own.says("killed") && !own.says("not paused"));
        let silent = failed("", Some("no such file"));
        assert_eq!(silent.words(), "no such file");
        assert!(silent.says("no such file"));
        assert!(failed("", None).words().contains("exit status 1"));
    }

    #[test]
    fn an_error_of_an_earlier_call_is_not_this_ones() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log.json");
        std::fs::write(&log, "{\"level\":\"error\",\"msg\":\"old\"}\n").unwrap();
        let tail = LogTail::new(&log);
        assert_eq!(tail.last_error(), None);
        let mut file = std::fs::OpenOptions::new().append(true).open(&log).unwrap();
        writeln!(file, "{{\"level\":\"error\",\"msg\":\"new\"}}").unwrap();
        writeln!(file, "{{\"level\":\"warning\",\"msg\":\"not it\"}}\nnot json").unwrap();
        assert_eq!(tail.last_error().as_deref(), Some("new"));
    }
}
