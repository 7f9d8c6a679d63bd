//! Start, Kill, Pause, Resume, Update, Delete, and the end of init.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use containerd_shim::protos::events::task::{
    TaskDelete, TaskExit, TaskPaused, TaskResumed, TaskStart,
};
use containerd_shim::protos::protobuf::MessageField;
use nix::sys::signal::{Signal, kill};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::create::unmount;
use super::{Container, does_not_exist};
use crate::error::TaskError;
use crate::process::{Process, UNKNOWN_STATUS};
use crate::reaper::{Exit, Pid, timestamp};
use crate::runc::{Call, CallIo, RuncError};
use crate::state::{Action, State};

/// What is left of a process that was deleted.
#[derive(Debug, Clone, Copy)]
pub struct Deleted {
    /// Its pid; 0 if it never had one.
    pub pid: u32,
    /// Its end.
    pub exit: Option<Exit>,
}

impl Container {
    /// Starts its process: `runc start`, or `runc restore`.
    pub async fn start(self: &Arc<Self>) -> Result<u32, TaskError> {
        let _under_way = self.begin(Action::Start).await?;
        let gate = self.init.gate.lock().await;
        let from = self.inner().state;
        if from == State::CreatedFromCheckpoint {
            self.restore().await?;
        } else {
            self.call(Call::new("start", [&self.id]), "OCI runtime start failed").await?;
        }
        self.change_state(from, State::Running);
        let pid = self.pid();
        let container_id = self.id.clone();
        self.tell(TaskStart { container_id, pid, ..TaskStart::default() });
        drop(gate);
        Ok(pid)
    }

    /// Tells of init's end, once its start was told.
    pub(super) async fn watch_init(&self, exit: oneshot::Receiver<Exit>) {
        let Ok(exit) = exit.await else { return };
        // No exec begins any more.
        self.inner().ended = true;
        self.changed.notify_waiters();
        // A start that hangs does not keep the end from being known.
        let gate = timeout(STARTING, self.init.gate.lock()).await;
        let paused = self.inner().state == State::Paused;
        if paused {
            self.thaw_the_dead().await;
        }
        if self.fixed.shares_pids {
            let killed = self.runtime.call(Call::new("kill", ["--all", &self.id, "KILL"])).await;
            tracing::debug!(container = self.id, ?killed, "its other processes are killed");
        }
        // Its init is the last process of which an end is told.
        let execs: Vec<_> = self.inner().execs.values().cloned().collect();
        for exec in execs {
            let started = timeout(STARTING, exec.gate.lock()).await;
            drop(started);
            if exec.runs() {
                exec.wait().await;
            }
        }
        // Docker deletes what has ended, and containerd then closes the connection on which a
        // checkpoint was still to be answered: a good image counted as failed. A Kill ends the
        // wait, and so does a checkpoint that takes too long.
        self.checkpointed().await;
        // What is still to be told of its memory comes before its end.
        self.shared.oom.remove(&self.id);
        self.init.ended().await;
        self.set_state(State::Stopped);
        self.init.set_exit(exit);
        self.tell_exit(&self.init, exit);
        drop(gate);
    }

    /// Whoever else is in its cgroup could not end, and runc would not delete it.
    async fn thaw_the_dead(&self) {
        let resumed = self.runtime.call(Call::new("resume", [&self.id])).await;
        tracing::debug!(container = self.id, ?resumed, "ended while it was paused");
    }

    /// The end of init or an exec.
    pub(super) fn tell_exit(&self, process: &Process, exit: Exit) {
        self.tell(TaskExit {
            container_id: self.id.clone(),
            id: process.id.clone(),
            pid: process.pid().cast_unsigned(),
            exit_status: exit.status,
            exited_at: MessageField::some(timestamp(exit.at)),
            ..TaskExit::default()
        });
    }

    /// Sends a signal to init, an exec, or all processes. Never waits for an operation.
    pub async fn kill(&self, exec: &str, signal: u32, all: bool) -> Result<(), TaskError> {
        if !exec.is_empty() {
            return self.kill_exec(exec, signal);
        }
        let fatal = signal == Signal::SIGKILL as u32;
        let (before, restoring) = {
            let mut inner = self.inner();
            let before = inner.killed;
            inner.killed |= fatal;
            if fatal {
                self.no_longer_ending();
            }
            (before, inner.state == State::CreatedFromCheckpoint && inner.under_way.is_some())
        };
        let mut arguments: Vec<String> = Vec::new();
        if all {
            arguments.push("--all".to_owned());
        }
        arguments.extend([self.id.clone(), signal.to_string()]);
        let Err(error) = self.runtime.call(Call::new("kill", arguments)).await else {
            return Ok(());
        };
        if fatal && restoring && does_not_exist(&error) {
            // There is nothing yet that runc could be asked to kill. The engine ends what it has
            // begun; a plain `runc restore` goes on, and ends what it has restored.
            let engine = self.restoring.load(Ordering::Relaxed);
            if engine > 0 {
                let _ = kill(nix::unistd::Pid::from_raw(engine), Signal::SIGTERM);
            }
            return Ok(());
        }
        // One that was accepted before still counts.
        self.inner().killed = before;
        Err(kill_error(&self.id, error))
    }

    fn kill_exec(&self, exec: &str, signal: u32) -> Result<(), TaskError> {
        let process = self.exec(exec)?;
        match process.pid() {
            _ if process.exit().is_some() => {
                Err(TaskError::NotFound(format!("process {exec} already finished")))
            }
            0 => Err(TaskError::Precondition(format!("process {exec} is not started yet"))),
            pid => send(pid, signal).map_err(|error| match error {
                nix::errno::Errno::ESRCH => {
                    TaskError::NotFound(format!("process {exec} already finished"))
                }
                other => TaskError::Failed(format!("exec kill error: {other}")),
            }),
        }
    }

    /// Freezes it.
    pub async fn pause(&self) -> Result<(), TaskError> {
        let _under_way = self.begin(Action::Pause).await?;
        let call = Call::new("pause", [&self.id]).through_engine(self.fixed.journal.exists());
        self.call(call, "OCI runtime pause failed").await?;
        let (killed, state) = {
            let inner = self.inner();
            (inner.killed || inner.ended, inner.state)
        };
        if killed || state != State::Running {
            // With the v1 freezer a process that was killed just before it was frozen does not end.
            self.thaw_the_dead().await;
            return Err(TaskError::Precondition(format!(
                "container {}: it was killed while it was paused",
                self.id
            )));
        }
        self.change_state(State::Running, State::Paused);
        let container_id = self.id.clone();
        self.tell(TaskPaused { container_id, ..TaskPaused::default() });
        Ok(())
    }

    /// Thaws it. If its CUDA is checkpointed, the engine brings that back first; where it cannot,
    /// it kills the container, since clients do not look at the error.
    pub async fn resume(&self) -> Result<(), TaskError> {
        let _under_way = self.begin(Action::Resume).await?;
        let call = Call::new("resume", [&self.id]).through_engine(self.fixed.journal.exists());
        if let Err(error) = self.call(call, "OCI runtime resume failed").await {
            tracing::error!(container = self.id, phase = "resume", "{error}");
            return Err(error);
        }
        self.change_state(State::Paused, State::Running);
        let container_id = self.id.clone();
        self.tell(TaskResumed { container_id, ..TaskResumed::default() });
        Ok(())
    }

    /// Changes its resources: JSON of OCI's `LinuxResources`.
    pub async fn update(&self, resources: Vec<u8>) -> Result<(), TaskError> {
        let _short = self.begin_short(Action::Update)?;
        let call =
            Call::new("update", ["--resources", "-", &self.id]).with_io(CallIo::Input(resources));
        self.call(call, "OCI runtime update failed").await.map(drop)
    }

    /// The pids of its processes.
    pub async fn pids(&self) -> Result<Vec<(u32, Option<String>)>, TaskError> {
        let call = Call::new("ps", ["--format", "json", &self.id]);
        let text = self.call(call, "OCI runtime ps failed").await?;
        // runc prints `null` for none.
        let pids: Option<Vec<u32>> = serde_json::from_str(&text)
            .map_err(|error| TaskError::Failed(format!("runc ps: {error}: {text}")))?;
        let inner = self.inner();
        let exec_of = |pid: u32| {
            let mut execs = inner.execs.values();
            execs.find(|exec| exec.pid().cast_unsigned() == pid).map(|exec| exec.id.clone())
        };
        Ok(pids.unwrap_or_default().into_iter().map(|pid| (pid, exec_of(pid))).collect())
    }

    /// Removes what there is of it. Never waits for an operation: one that is under way finds the
    /// container gone.
    pub async fn delete(&self) -> Result<Deleted, TaskError> {
        let deleting = self.begin_delete()?;
        let in_use = self.fixed.journal.in_use();
        let call = Call::new("delete", [&self.id]).through_engine(in_use);
        match self.runtime.call(call).await {
            // Nothing is taken from what still runs.
            Err(error) if !does_not_exist(&error) => {
                return Err(TaskError::Runtime { what: "failed to delete task", error });
            }
            _ => {}
        }
        if self.init.runs() {
            // It was created and never started, and runc has just ended it: that is told first.
            let _ = timeout(ENDING, self.init.wait()).await;
        }
        self.init.end_io().await;
        self.shared.oom.remove(&self.id);
        let unmounted = unmount(self.fixed.rootfs.as_deref()).await;
        if let Some(error) = unmounted {
            return Err(TaskError::Failed(format!("failed rootfs umount: {error}")));
        }
        // One that was never started ends now.
        let exit = self.init.exit();
        if exit.is_none() {
            self.init.set_exit(Exit { status: UNKNOWN_STATUS, at: SystemTime::now() });
        }
        let pid = self.pid();
        self.tell(TaskDelete {
            container_id: self.id.clone(),
            pid,
            exit_status: exit.map_or(0, |exit| exit.status),
            exited_at: MessageField::from_option(exit.map(|exit| timestamp(exit.at))),
            ..TaskDelete::default()
        });
        deleting.done();
        Ok(Deleted { pid, exit })
    }

    /// Only one Delete at a time, and only one that succeeds.
    fn begin_delete(&self) -> Result<Deleting<'_>, TaskError> {
        let mut inner = self.inner();
        if inner.deleted {
            return Err(TaskError::NotFound(format!("container {} is being deleted", self.id)));
        }
        self.allow(&inner, Action::Delete)?;
        inner.deleted = true;
        Ok(Deleting { container: self, done: false })
    }
}

/// Given up unless it is done.
struct Deleting<'a> {
    container: &'a Container,
    done: bool,
}

impl Deleting<'_> {
    fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Deleting<'_> {
    fn drop(&mut self) {
        self.container.inner().deleted = self.done;
    }
}

/// How long a start is waited for before an end is told without it.
const STARTING: Duration = Duration::from_secs(10);

/// How long a process that runc has killed may take to be reaped.
const ENDING: Duration = Duration::from_secs(2);

/// Sends a signal by number: there are more than have names.
fn send(pid: Pid, signal: u32) -> Result<(), nix::errno::Errno> {
    let Ok(signal) = i32::try_from(signal) else { return Err(nix::errno::Errno::EINVAL) };
    stasis_hooks::child::send_signal(pid, signal)
}

/// What clients look for in an error of Kill.
fn kill_error(id: &str, error: RuncError) -> TaskError {
    const ENDED: [&str; 3] =
        ["process already finished", "container not running", "no such process"];
    if ENDED.iter().any(|words| error.says(words)) {
        TaskError::NotFound("process already finished".to_owned())
    } else if does_not_exist(&error) {
        TaskError::NotFound(format!("no such container: {id}"))
    } else {
        TaskError::Runtime { what: "unknown error after kill", error }
    }
}
