//! Logging binaries (`binary://`), as nerdctl uses one for every detached container.

use std::fs;
use std::io::{self, PipeReader, PipeWriter, pipe};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use command_fds::{CommandFdExt as _, FdMapping};
use nix::poll::PollFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::io::Errno;
use tokio::sync::oneshot::{Receiver, error::TryRecvError};
use tokio::time::timeout;

use super::polled::{Polled, polled};
use super::pump::read;
use super::target::Binary;
use super::{Spawner, StdioError};
use crate::reaper::Exit;

/// How long the exit of a logger that is already ending is waited for.
const ENDING: Duration = Duration::from_secs(1);

/// A process that is about to be gone, in `/proc/PID/stat`'s flags.
const PF_EXITING: u32 = 4;

/// A logging binary that is ready.
#[derive(Debug)]
pub(super) struct Logger {
    binary: PathBuf,
    pid: Pid,
    exit: Receiver<Exit>,
    /// For the container's stdout. Kept, as is the other one: a logger must not see an end before
    /// the container has begun, or between two tries to restore it.
    pub(super) stdout: PipeWriter,
    /// For the container's stderr.
    pub(super) stderr: PipeWriter,
}

impl Logger {
    /// Starts it and waits until it is ready: the container writes to its pipes directly, so
    /// before that there is nobody to read.
    pub(super) async fn start(
        binary: Binary,
        container: &str,
        namespace: &str,
        spawner: &dyn Spawner,
        within: Duration,
    ) -> Result<Self, StdioError> {
        let no_pipe = || StdioError::failed("make a logging binary's pipe");
        let (stdout_read, stdout) = pipe().map_err(no_pipe())?;
        let (stderr_read, stderr) = pipe().map_err(no_pipe())?;
        let (ready, ready_write) = pipe().map_err(no_pipe())?;
        let ready = Polled::reader(ready).map_err(no_pipe())?;
        let command =
            command(&binary, container, namespace, [stdout_read, stderr_read], ready_write)
                .map_err(StdioError::path("prepare the logging binary", &binary.path))?;
        let process = spawner
            .spawn(command)
            .map_err(StdioError::path("start the logging binary", &binary.path))?;
        let pid = Pid::from_raw(process.pid);
        let mut logger = Self { binary: binary.path, pid, exit: process.exit, stdout, stderr };
        let ready = match timeout(within, until_ready(ready)).await {
            Ok(Ok(true)) => Ok(()),
            // Its end of the pipe is closed. Most say so that they are ready, nerdctl's too; but
            // it is also how one ends that fails, which Go's shim takes for ready: the container
            // is then ended by its first word.
            Ok(Ok(false)) => logger.is_there().await,
            Ok(Err(source)) => {
                Err(StdioError::Failed { what: "wait for a logging binary", source })
            }
            Err(_) => Err(logger.not_ready(within)),
        };
        if ready.is_err() {
            signal(logger.pid, &mut logger.exit, Signal::SIGKILL);
        }
        ready.map(|()| logger)
    }

    fn not_ready(&mut self, within: Duration) -> StdioError {
        let binary = self.binary.clone();
        match self.exit.try_recv() {
            Ok(exit) => StdioError::LoggerEnded { binary, status: Some(exit.status) },
            Err(_) => StdioError::LoggerNotReady { binary, within },
        }
    }

    /// Whether somebody is there to read.
    async fn is_there(&mut self) -> Result<(), StdioError> {
        if !is_ending(self.pid) {
            return Ok(());
        }
        let exit = timeout(ENDING, &mut self.exit).await;
        // It may have left a child that does the work.
        let is_read =
            has_reader(&self.stdout).and_then(|first| Ok(first && has_reader(&self.stderr)?));
        if is_read.map_err(StdioError::failed("look at a logging binary's pipe"))? {
            return Ok(());
        }
        let status = exit.ok().and_then(Result::ok).map(|exit| exit.status);
        Err(StdioError::LoggerEnded { binary: self.binary.clone(), status })
    }

    /// Ends it as Go's shim does: it sees the end of its input and is told to end, has `within`
    /// to write what it has, and is killed then.
    pub(super) async fn end(self, within: Duration) {
        let Self { binary, pid, mut exit, stdout, stderr } = self;
        drop((stdout, stderr));
        if !signal(pid, &mut exit, Signal::SIGTERM) {
            return;
        }
        if timeout(within, &mut exit).await.is_err() {
            tracing::warn!(binary = %binary.display(), ?within, "a logging binary does not end");
            signal(pid, &mut exit, Signal::SIGKILL);
        }
    }
}

/// Signals a child that has not been reaped: then perhaps another process would have its pid.
/// Returns whether it was there.
fn signal(pid: Pid, exit: &mut Receiver<Exit>, signal: Signal) -> bool {
    matches!(exit.try_recv(), Err(TryRecvError::Empty)) && kill(pid, signal).is_ok()
}

/// It gets our environment, where Go's shim gives it the two variables only: some need a PATH.
fn command(
    binary: &Binary,
    container: &str,
    namespace: &str,
    [stdout, stderr]: [PipeReader; 2],
    ready: PipeWriter,
) -> io::Result<Command> {
    let mut command = Command::new(&binary.path);
    command
        .args(&binary.arguments)
        .env("CONTAINER_ID", container)
        .env("CONTAINER_NAMESPACE", namespace)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mappings = vec![
        FdMapping { parent_fd: stdout.into(), child_fd: 3 },
        FdMapping { parent_fd: stderr.into(), child_fd: 4 },
        FdMapping { parent_fd: ready.into(), child_fd: 5 },
    ];
    command.fd_mappings(mappings).map_err(io::Error::other)?;
    Ok(command)
}

fn has_reader(pipe: &PipeWriter) -> io::Result<bool> {
    Ok(!polled(pipe, PollFlags::POLLOUT)?.contains(PollFlags::POLLERR))
}

/// Whether a byte came, or else the end.
async fn until_ready(mut pipe: Polled) -> io::Result<bool> {
    loop {
        match read(&pipe, 1) {
            Ok(byte) => return Ok(!byte.is_empty()),
            Err(Errno::AGAIN) => pipe.wait().await?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a process is on its way out or gone. Asked of /proc, because its descriptors are closed
/// some time before its parent hears of its exit; nobody is made to wait for that.
fn is_ending(pid: Pid) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return true;
    };
    // After the name, which may hold anything: state, then six numbers, the last of them flags.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let flags = fields.split_whitespace().nth(6).and_then(|flags| flags.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & PF_EXITING != 0)
}
