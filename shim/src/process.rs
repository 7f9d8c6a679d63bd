//! One process of a container: its init, or an exec.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use tokio::sync::{RwLock, watch};

use crate::error::TaskError;
use crate::reaper::{Exit, Pid};
use crate::stdio::{ProcessIo, Request};

/// The exit status of a process of which nothing better is known, as in Go's shim.
pub const UNKNOWN_STATUS: u32 = 255;

/// The exit status of a process that SIGKILL ended.
pub const KILLED: u32 = 128 + 9;

/// A process of a container.
#[derive(Debug)]
pub struct Process {
    /// The container's id, or the exec's.
    pub id: String,
    /// The stdio that was asked for.
    pub stdio: Request,
    /// The stdio that there is; `None` after Delete.
    pub io: RwLock<Option<ProcessIo>>,
    /// Held while it is being started: an exit is told only after the start was.
    pub gate: tokio::sync::Mutex<()>,
    exited: watch::Sender<Option<Exit>>,
    pid: AtomicI32,
    /// For an exec: JSON of OCI's `Process`.
    spec: Vec<u8>,
    /// `CloseIO` may come before there is anything to close: a client's input can end before its
    /// process has begun.
    stdin_closed: AtomicBool,
}

impl Process {
    /// A process that does not run yet.
    #[must_use]
    pub fn new(id: &str, stdio: Request, io: Option<ProcessIo>) -> Self {
        Self {
            id: id.to_owned(),
            stdio,
            io: RwLock::new(io),
            gate: tokio::sync::Mutex::new(()),
            exited: watch::Sender::new(None),
            pid: AtomicI32::new(0),
            spec: Vec::new(),
            stdin_closed: AtomicBool::new(false),
        }
    }

    /// With what an exec runs: JSON of OCI's `Process`.
    #[must_use]
    pub fn with_spec(self, spec: Vec<u8>) -> Self {
        Self { spec, ..self }
    }

    /// What an exec runs.
    #[must_use]
    pub fn spec(&self) -> &[u8] {
        &self.spec
    }

    /// Its pid; 0 while it has none.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid.load(Ordering::Relaxed)
    }

    /// It has been born.
    pub fn set_pid(&self, pid: Pid) {
        self.pid.store(pid, Ordering::Relaxed);
    }

    /// How it ended, if it did.
    #[must_use]
    pub fn exit(&self) -> Option<Exit> {
        *self.exited.borrow()
    }

    /// Whether it has been started and has not ended.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.pid() != 0 && self.exit().is_none()
    }

    /// It has ended: those who wait for it are told.
    pub fn set_exit(&self, exit: Exit) {
        self.exited.send_replace(Some(exit));
    }

    /// Waits for its end.
    pub async fn wait(&self) -> Exit {
        let mut exited = self.exited.subscribe();
        loop {
            if let Some(exit) = *exited.borrow_and_update() {
                return exit;
            }
            if exited.changed().await.is_err() {
                return Exit { status: UNKNOWN_STATUS, at: std::time::SystemTime::now() };
            }
        }
    }

    /// Resizes its terminal, if it has one.
    pub async fn resize(&self, width: u32, height: u32) -> Result<(), TaskError> {
        let side = |cells: u32| {
            u16::try_from(cells)
                .map_err(|_| TaskError::Invalid(format!("a terminal cannot be {cells} cells long")))
        };
        let (width, height) = (side(width)?, side(height)?);
        match &*self.io.read().await {
            Some(io) => io.resize(width, height).map_err(|error| TaskError::failed(&error)),
            None => Ok(()),
        }
    }

    /// Its standard input gets no more.
    pub async fn close_stdin(&self) {
        self.stdin_closed.store(true, Ordering::Relaxed);
        if let Some(io) = &*self.io.read().await {
            io.close_stdin();
        }
    }

    /// What the runtime's call gets: the standard descriptors, and the console socket. No lock is
    /// held for longer than that: a restore takes its time, and `CloseIO` does not wait for it.
    pub async fn child_ends(&self) -> Result<([Stdio; 3], Option<PathBuf>), TaskError> {
        let mut io = self.io.write().await;
        let io = io.as_mut().ok_or_else(|| TaskError::Failed("its stdio is closed".to_owned()))?;
        let ends = io.take_child_ends().map_err(|error| TaskError::failed(&error))?;
        Ok((ends, io.console_socket().map(PathBuf::from)))
    }

    /// The runtime has made the process.
    pub async fn io_started(&self) -> Result<(), TaskError> {
        let mut io = self.io.write().await;
        let io = io.as_mut().ok_or_else(|| TaskError::Failed("its stdio is closed".to_owned()))?;
        io.started().await.map_err(|error| TaskError::failed(&error))
    }

    /// It has its stdio.
    pub async fn set_io(&self, io: ProcessIo) {
        let mut slot = self.io.write().await;
        if self.stdin_closed.load(Ordering::Relaxed) {
            io.close_stdin();
        }
        *slot = Some(io);
    }

    /// It has ended, and nobody has been told: its terminal ends with it.
    pub async fn ended(&self) {
        if let Some(io) = &*self.io.read().await {
            io.ended();
        }
    }

    /// Ends its stdio, after what it has written before its end was copied, or [`DRAIN`].
    pub async fn end_io(&self) {
        let Some(mut io) = self.io.write().await.take() else { return };
        if !io.drained(DRAIN).await {
            // A process that it left behind keeps the pipe open.
            tracing::debug!(process = self.id, "its output is still open");
        }
        io.close().await;
    }

    /// Ends its stdio at once: it never ran.
    pub async fn end_io_at_once(&self) {
        if let Some(mut io) = self.io.write().await.take() {
            io.close().await;
        }
    }
}

/// How long Delete waits for output to be copied, as Go's shim.
const DRAIN: Duration = Duration::from_secs(2);
