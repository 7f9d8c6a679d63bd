//! The stdio of a container's process: what the request asks for, carried from and to the process.
//!
//! Without a terminal the process gets pipes that are made here, never the client's FIFOs: CRIU
//! reconnects pipes at a restore, and cannot reconnect FIFOs. A restored process gets fresh ones,
//! so that its output survives any number of restores. Only a logging binary's pipes are given to
//! the process directly.
//!
//! All copying is done by tasks that wait with the runtime. A reader that does not read makes its
//! own container wait and nobody else, and an input that never comes holds no thread.

mod console;
mod error;
mod logger;
mod place;
mod polled;
mod pump;
mod target;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::io::{self, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Gid, Uid, fchown};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub use self::error::StdioError;

use self::console::ConsoleSocket;
use self::logger::Logger;
use self::place::{Input, open_input, open_output};
use self::polled::Polled;
use self::pump::Sink;
use self::target::{Outputs, Place};
use crate::reaper::{Reaper, Spawned};

/// How long others are waited for.
#[derive(Debug, Clone, Copy)]
struct Deadlines {
    /// A logging binary says that it is ready.
    ready: Duration,
    /// A runtime that has ended has sent its terminal.
    terminal: Duration,
    /// A logging binary has written what it has, as long as with Go's shim.
    end: Duration,
}

impl Deadlines {
    const USUAL: Self = Self {
        ready: Duration::from_secs(10),
        terminal: Duration::from_secs(10),
        end: Duration::from_secs(12),
    };
}

/// What a Create or Exec request says of stdio.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// A FIFO, or nothing.
    pub stdin: String,
    /// A FIFO's path, a URI (`fifo`, `binary`, `file`), or nothing.
    pub stdout: String,
    /// The same. It means nothing with a terminal.
    pub stderr: String,
    /// Whether the process gets a terminal.
    pub terminal: bool,
}

/// Who is to own the container's ends of the pipes: runc's options `io_uid` and `io_gid`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Starts children, whose exits somebody reaps.
pub trait Spawner: Send + Sync {
    /// Starts one. `command` holds what is only the child's and is dropped before this returns.
    fn spawn(&self, command: Command) -> io::Result<Spawned>;
}

impl Spawner for Reaper {
    fn spawn(&self, command: Command) -> io::Result<Spawned> {
        Self::spawn(self, command)
    }
}

/// The stdio of one process, from before it is made to after it has ended. Dropping it ends all
/// copying.
#[derive(Debug)]
pub struct ProcessIo {
    /// What the process will have, until it has it.
    child: Option<Child>,
    logger: Option<Logger>,
    /// The writer that keeps stdin from ending.
    stdin: Mutex<Option<OwnedFd>>,
    terminal: Option<OwnedFd>,
    outputs: TaskTracker,
    inputs: TaskTracker,
    /// The process has ended.
    ended: CancellationToken,
    /// All copying is to end.
    closed: CancellationToken,
    _closing: DropGuard,
    deadlines: Deadlines,
}

#[derive(Debug)]
enum Child {
    /// The container's ends, or nothing for /dev/null; and what will be copied. What the runtime
    /// itself says when it fails is not the container's output, so copying begins after it.
    Pipes {
        ends: [Option<OwnedFd>; 3],
        input: Option<(Polled, Polled)>,
        outputs: Vec<(&'static str, Polled, Sink)>,
    },
    /// What will be connected to the terminal.
    Terminal { socket: ConsoleSocket, stdin: Option<Polled>, sink: Sink },
}

/// Where the input comes from.
enum Stdin {
    /// A FIFO, to copy from.
    Fifo(Polled),
    /// A file, which the process gets itself.
    File(OwnedFd),
}

impl Stdin {
    /// To type into a terminal. A file cannot be waited on, which is the error.
    fn into_polled(self, path: &str) -> Result<Polled, StdioError> {
        match self {
            Self::Fifo(from) => Ok(from),
            Self::File(file) => {
                Polled::reader(file).map_err(StdioError::path("watch", Path::new(path)))
            }
        }
    }
}

/// Where one output goes.
enum Output {
    Nowhere,
    /// A logging binary's pipe.
    Logger(OwnedFd),
    Place(Sink),
}

impl Output {
    async fn open(place: Option<Place>) -> Result<Self, StdioError> {
        Ok(match place {
            Some(place) => Self::Place(open_output(place).await?),
            None => Self::Nowhere,
        })
    }

    /// To copy to.
    fn into_sink(self) -> Result<Sink, StdioError> {
        Ok(match self {
            Self::Nowhere => Sink::Nowhere,
            Self::Logger(pipe) => Sink::Logger(
                Polled::writer(pipe).map_err(StdioError::failed("use a logging binary's pipe"))?,
            ),
            Self::Place(sink) => sink,
        })
    }
}

impl Child {
    fn pipes(
        stdin: Option<Stdin>,
        outputs: [(&'static str, Output); 2],
        owner: Owner,
    ) -> Result<Self, StdioError> {
        let mut ends = [None, None, None];
        let mut input = None;
        if let Some(Stdin::File(file)) = stdin {
            ends[0] = Some(file);
        } else if let Some(Stdin::Fifo(from)) = stdin {
            let (theirs, ours) = pipe().map_err(StdioError::failed("make a pipe"))?;
            owner.give("stdin", &theirs)?;
            let to = Polled::writer(ours).map_err(StdioError::failed("use a pipe"))?;
            input = Some((from, to));
            ends[0] = Some(theirs.into());
        }
        let mut copied = Vec::new();
        for ((stream, output), end) in outputs.into_iter().zip(&mut ends[1..]) {
            let sink = match output {
                Output::Nowhere => continue,
                Output::Logger(pipe) => {
                    *end = Some(pipe);
                    continue;
                }
                Output::Place(sink) => sink,
            };
            let (ours, theirs) = pipe().map_err(StdioError::failed("make a pipe"))?;
            owner.give(stream, &theirs)?;
            let from = Polled::reader(ours).map_err(StdioError::failed("use a pipe"))?;
            copied.push((stream, from, sink));
            *end = Some(theirs.into());
        }
        Ok(Self::Pipes { ends, input, outputs: copied })
    }
}

impl ProcessIo {
    /// All that can fail before the runtime is called: FIFOs, pipes, the console socket, a file,
    /// a logging binary, which is ready then.
    pub async fn open(
        request: &Request,
        container: &str,
        namespace: &str,
        owner: Owner,
        spawner: &dyn Spawner,
    ) -> Result<Self, StdioError> {
        Self::open_with(request, container, namespace, owner, spawner, Deadlines::USUAL).await
    }

    async fn open_with(
        request: &Request,
        container: &str,
        namespace: &str,
        owner: Owner,
        spawner: &dyn Spawner,
        deadlines: Deadlines,
    ) -> Result<Self, StdioError> {
        let closed = CancellationToken::new();
        let mut opened = Self {
            child: None,
            logger: None,
            stdin: Mutex::default(),
            terminal: None,
            outputs: TaskTracker::new(),
            inputs: TaskTracker::new(),
            ended: CancellationToken::new(),
            _closing: closed.clone().drop_guard(),
            closed,
            deadlines,
        };
        // A terminal is one stream.
        let stderr = if request.terminal { "" } else { &request.stderr };
        let outputs = Outputs::parse(&request.stdout, stderr)?;
        let stdin = opened.open_stdin(&request.stdin)?;
        let socket = request.terminal.then(ConsoleSocket::new).transpose()?;
        let (stdout, stderr) = match outputs {
            Outputs::Logger(binary) => {
                let ready = deadlines.ready;
                let logger = Logger::start(binary, container, namespace, spawner, ready).await?;
                let logger = opened.logger.insert(logger);
                (
                    Output::Logger(duplicate(&logger.stdout)?),
                    Output::Logger(duplicate(&logger.stderr)?),
                )
            }
            Outputs::Places { stdout, stderr } => {
                (Output::open(stdout).await?, Output::open(stderr).await?)
            }
        };
        opened.child = Some(match socket {
            Some(socket) => {
                let stdin = stdin.map(|stdin| stdin.into_polled(&request.stdin)).transpose()?;
                Child::Terminal { socket, stdin, sink: stdout.into_sink()? }
            }
            None => Child::pipes(stdin, [("stdout", stdout), ("stderr", stderr)], owner)?,
        });
        Ok(opened)
    }

    fn open_stdin(&mut self, path: &str) -> Result<Option<Stdin>, StdioError> {
        if path.is_empty() {
            return Ok(None);
        }
        let path = path.strip_prefix("fifo://").unwrap_or(path);
        Ok(Some(match open_input(Path::new(path))? {
            Input::Fifo { from, hold } => {
                self.stdin = Mutex::new(Some(hold));
                Stdin::Fifo(from)
            }
            Input::File(file) => Stdin::File(file),
        }))
    }

    fn copy(
        &self,
        tasks: &TaskTracker,
        stream: &'static str,
        copying: impl Future<Output = io::Result<()>> + Send + 'static,
    ) {
        let closed = self.closed.clone();
        tasks.spawn(async move {
            match closed.run_until_cancelled(copying).await {
                // A process that does not read its input.
                Some(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => {}
                Some(Err(error)) => tracing::warn!(%error, stream, "stdio is not copied any more"),
                Some(Ok(())) | None => {}
            }
        });
    }

    /// Stdin, stdout and stderr for the call of the runtime that makes the process. May be taken
    /// again when that call has failed. Errors once the process is started.
    pub fn take_child_ends(&mut self) -> Result<[Stdio; 3], StdioError> {
        match &self.child {
            None => Err(StdioError::Started),
            Some(Child::Terminal { socket, .. }) => {
                socket.forget();
                Ok([Stdio::null(), Stdio::null(), Stdio::null()])
            }
            Some(Child::Pipes { ends, .. }) => {
                let mut taken = [Stdio::null(), Stdio::null(), Stdio::null()];
                for (stdio, end) in taken.iter_mut().zip(ends) {
                    if let Some(end) = end {
                        *stdio = duplicate(end)?.into();
                    }
                }
                Ok(taken)
            }
        }
    }

    /// For the runtime's `--console-socket`, if there is to be a terminal and it is not there yet.
    #[must_use]
    pub fn console_socket(&self) -> Option<&Path> {
        match &self.child {
            Some(Child::Terminal { socket, .. }) => Some(socket.path()),
            _ => None,
        }
    }

    /// After the runtime has made the process: receives its terminal, or lets go of the container's
    /// ends of the pipes, so that their end is seen; and begins copying.
    pub async fn started(&mut self) -> Result<(), StdioError> {
        if let Some(Child::Terminal { socket, .. }) = &mut self.child {
            let master = socket.receive(self.deadlines.terminal).await?;
            self.terminal = Some(master);
        }
        match (self.child.take(), &self.terminal) {
            (Some(Child::Pipes { input, outputs, .. }), _) => {
                if let Some((from, to)) = input {
                    self.copy(&self.inputs, "stdin", pump::splice_all(from, to));
                }
                for (stream, from, sink) in outputs {
                    self.copy(&self.outputs, stream, pump::copy_output(from, sink));
                }
                Ok(())
            }
            (Some(Child::Terminal { stdin, sink, .. }), Some(master)) => {
                let failed = || StdioError::failed("use a terminal");
                let reader = Polled::reader(duplicate(master)?).map_err(failed())?;
                let output = console::copy_output(reader, sink, self.ended.clone());
                self.copy(&self.outputs, "terminal", output);
                if let Some(from) = stdin {
                    let writer = Polled::writer(duplicate(master)?).map_err(failed())?;
                    self.copy(&self.inputs, "terminal", console::copy_input(from, writer));
                }
                Ok(())
            }
            (None | Some(Child::Terminal { .. }), _) => Err(StdioError::Started),
        }
    }

    /// `CloseIO`: stdin ends when the clients that still have the FIFO open have closed it, after
    /// all that they wrote. May come before the process.
    pub fn close_stdin(&self) {
        drop(self.stdin.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// `ResizePty`. Without a terminal this is nothing, as in Go's shim.
    pub fn resize(&self, width: u16, height: u16) -> Result<(), StdioError> {
        let Some(terminal) = &self.terminal else { return Ok(()) };
        let size = Winsize { ws_row: height, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(terminal, size).map_err(StdioError::failed("resize the terminal"))
    }

    /// The process has ended. To be called as soon as that is known, before anybody is told:
    /// a terminal ends with its process, and a client waits for the end of its output before it
    /// deletes the task.
    pub fn ended(&self) {
        self.ended.cancel();
    }

    /// After the process has ended: waits until all its output is copied. False if it is not
    /// `within` this time, because a process that it left behind has a pipe, or nobody reads the
    /// FIFO. Borrows nothing while it waits.
    pub fn drained(&self, within: Duration) -> impl Future<Output = bool> + Send + use<> {
        self.ended();
        let outputs = self.outputs.clone();
        outputs.close();
        async move { timeout(within, outputs.wait()).await.is_ok() }
    }

    /// Ends all copying at once, releases FIFOs and terminal, and ends a logging binary, which may
    /// take the time that Go's shim gives it: awaited with nothing borrowed. Doing it again does
    /// nothing.
    pub fn close(&mut self) -> impl Future<Output = ()> + Send + use<> {
        self.ended.cancel();
        self.closed.cancel();
        self.close_stdin();
        self.child = None;
        self.terminal = None;
        let (outputs, inputs) = (self.outputs.clone(), self.inputs.clone());
        outputs.close();
        inputs.close();
        let logger = self.logger.take().map(|logger| logger.end(self.deadlines.end));
        async move {
            tokio::join!(outputs.wait(), inputs.wait());
            if let Some(end) = logger {
                end.await;
            }
        }
    }
}

impl Owner {
    fn give(self, stream: &'static str, end: impl AsFd) -> Result<(), StdioError> {
        let Self { uid, gid } = self;
        fchown(end, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
            .map_err(|error| StdioError::Owner { stream, uid, gid, source: error.into() })
    }
}

fn duplicate(descriptor: impl AsFd) -> Result<OwnedFd, StdioError> {
    descriptor.as_fd().try_clone_to_owned().map_err(StdioError::failed("duplicate a descriptor"))
}
