//! A container: its state, its processes, and what may be done at the same time.
//!
//! State, Wait, Kill and Delete never wait for an operation. Start, Pause, Resume and Checkpoint
//! exclude each other, and are refused rather than queued: whoever asks for a second one does not
//! know of the first. An exec or an update that has begun is waited for (it takes milliseconds;
//! refusing a checkpoint because a health check happens to run would be a matter of luck), and
//! none begins while one of the four is under way. Delete is refused while Start is under way,
//! since what it would remove is just being made.
//!
//! A Kill that nobody survives is remembered ([`Inner::killed`]): what is under way may be at a
//! point where runc finds nothing to kill, or freezes what was just killed, and acts on it then.

mod checkpoint;
mod create;
mod exec;
mod lifecycle;
mod restore;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stasis_config::{Annotations, Config};
use stasis_hooks::journal::JournalFile;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

pub use checkpoint::{CheckpointRequest, DEAD};
pub use create::{CreateRequest, RootfsMount};
pub use exec::ExecRequest;
pub use lifecycle::Deleted;

use crate::cgroup::Cgroups;
use crate::error::TaskError;
use crate::events::{EventQueue, TaskEvent};
use crate::oom::OomWatcher;
use crate::process::Process;
use crate::reaper::Reaper;
use crate::runc::{Call, Runc, RuncError, Runtime};
use crate::state::{Action, State};

/// Makes the runtime of a container.
pub type MakeRuntime = Arc<dyn Fn(Runc) -> Arc<dyn Runtime> + Send + Sync>;

/// What all containers of a shim share.
#[derive(Clone)]
pub struct Shared {
    /// What is called: runc, or in tests something in its place.
    pub runtime: MakeRuntime,
    /// containerd's namespace.
    pub namespace: String,
    /// Tells containerd.
    pub events: EventQueue,
    /// Waits for processes.
    pub reaper: Reaper,
    /// Tells of OOM kills.
    pub oom: Arc<OomWatcher>,
    /// From which level on the engine logs.
    pub log_level: String,
    /// What goes on although its container may be gone.
    pub operations: TaskTracker,
}

/// What is fixed when the container is created.
struct Fixed {
    bundle: PathBuf,
    /// The rootfs, if we mounted it.
    rootfs: Option<PathBuf>,
    /// Its configuration.
    config: Config,
    /// Tells whether an operation on its CUDA is pending.
    journal: JournalFile,
    /// runc's `--no-pivot`.
    no_pivot: bool,
    /// runc's `--no-new-keyring`.
    no_new_keyring: bool,
    /// Owner of stdio.
    owner: crate::stdio::Owner,
    /// What its owner asks for.
    annotations: Annotations,
    /// Its processes are not in a pid namespace of their own, and do not end with its init.
    shares_pids: bool,
    /// The image that it is restored from.
    checkpoint: Option<PathBuf>,
    /// CRIU's work directory for a restore.
    criu_work: PathBuf,
}

/// A container.
pub struct Container {
    /// Its id.
    pub id: String,
    shared: Shared,
    runtime: Arc<dyn Runtime>,
    fixed: Fixed,
    init: Process,
    /// The engine's process while a restore is under way, else 0.
    restoring: Arc<AtomicI32>,
    inner: Mutex<Inner>,
    /// A checkpoint that ends it is under way.
    ending: AtomicBool,
    /// Something that was under way has ended, or init has, or it was killed.
    changed: Notify,
}

struct Inner {
    state: State,
    /// Start, Pause, Resume or Checkpoint.
    under_way: Option<(Action, Instant)>,
    /// How many execs are being started, and updates made.
    short: usize,
    execs: HashMap<String, Arc<Process>>,
    cgroups: Option<Arc<Cgroups>>,
    /// SIGKILL was asked for.
    killed: bool,
    /// Its init has ended, which is about to be told.
    ended: bool,
    /// Delete is under way, or done.
    deleted: bool,
}

/// A process and how it is.
pub struct Snapshot {
    /// State.
    pub state: State,
    /// Its pid; 0 without one.
    pub pid: u32,
    /// Its end.
    pub exit: Option<crate::reaper::Exit>,
    /// Its stdio.
    pub stdio: crate::stdio::Request,
}

impl Container {
    /// The bundle directory.
    #[must_use]
    pub fn bundle(&self) -> &Path {
        &self.fixed.bundle
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pid of init; 0 without one.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.init.pid().cast_unsigned()
    }

    /// How it, or an exec of it, is.
    pub fn snapshot(&self, exec: &str) -> Result<Snapshot, TaskError> {
        let of = |process: &Process, state| Snapshot {
            state,
            pid: process.pid().cast_unsigned(),
            exit: process.exit(),
            stdio: process.stdio.clone(),
        };
        if exec.is_empty() {
            let state = self.inner().state;
            return Ok(of(&self.init, state));
        }
        let process = self.exec(exec)?;
        let state = match process.pid() {
            _ if process.exit().is_some() => State::Stopped,
            0 => State::Created,
            _ if self.inner().state == State::Paused => State::Paused,
            _ => State::Running,
        };
        Ok(of(&process, state))
    }

    /// Waits for the end of init, or of an exec.
    pub async fn wait(&self, exec: &str) -> Result<crate::reaper::Exit, TaskError> {
        if exec.is_empty() {
            return Ok(self.init.wait().await);
        }
        let process = self.exec(exec)?;
        Ok(process.wait().await)
    }

    /// Resizes a terminal.
    pub async fn resize(&self, exec: &str, width: u32, height: u32) -> Result<(), TaskError> {
        if exec.is_empty() {
            return self.init.resize(width, height).await;
        }
        self.exec(exec)?.resize(width, height).await
    }

    /// Closes a standard input.
    pub async fn close_stdin(&self, exec: &str) -> Result<(), TaskError> {
        if exec.is_empty() {
            self.init.close_stdin().await;
        } else {
            self.exec(exec)?.close_stdin().await;
        }
        Ok(())
    }

    fn exec(&self, id: &str) -> Result<Arc<Process>, TaskError> {
        let execs = &self.inner().execs;
        let process = execs.get(id).cloned();
        process.ok_or_else(|| {
            TaskError::NotFound(format!("container {}: process {id} does not exist", self.id))
        })
    }

    /// The container's cgroups, as soon as it has a process.
    #[must_use]
    pub fn cgroups(&self) -> Option<Arc<Cgroups>> {
        self.inner().cgroups.clone()
    }

    fn allow(&self, inner: &Inner, action: Action) -> Result<(), TaskError> {
        // First, since the state may be another one when that has ended.
        if let Some((under_way, since)) = inner.under_way
            && (action != Action::Delete || under_way == Action::Start)
        {
            return Err(TaskError::Busy {
                container: self.id.clone(),
                under_way: under_way.verb(),
                seconds: since.elapsed().as_secs(),
            });
        }
        let refused = |refused| TaskError::State { container: self.id.clone(), refused };
        if inner.ended && action == Action::Exec {
            return State::Stopped.allow(action).map_err(refused);
        }
        inner.state.allow(action).map_err(refused)
    }

    /// Begins one of the operations that exclude each other. It lasts until the result is dropped.
    async fn begin(&self, action: Action) -> Result<UnderWay<'_>, TaskError> {
        {
            let mut inner = self.inner();
            self.allow(&inner, action)?;
            inner.under_way = Some((action, Instant::now()));
        }
        let under_way = UnderWay(self);
        match tokio::time::timeout(SHORT, self.quiet()).await {
            Ok(()) => Ok(under_way),
            Err(_) => Err(TaskError::Busy {
                container: self.id.clone(),
                under_way: "start of an exec, or an update,",
                seconds: SHORT.as_secs(),
            }),
        }
    }

    /// Waits for something that is told by [`Container::changed`].
    async fn until(&self, reached: impl Fn() -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if reached() {
                return;
            }
            changed.await;
        }
    }

    /// Waits until no exec is being started and no update made.
    async fn quiet(&self) {
        self.until(|| self.inner().short == 0).await;
    }

    /// Waits for init's end, which others may not have been told yet.
    async fn has_ended(&self) {
        self.until(|| self.inner().ended).await;
    }

    /// Its end, once it comes, is told at once.
    fn no_longer_ending(&self) {
        self.ending.store(false, Ordering::Relaxed);
        self.changed.notify_waiters();
    }

    /// Waits until no checkpoint that ends it is under way, or it was killed.
    async fn checkpointed(&self) {
        self.until(|| !self.ending.load(Ordering::Relaxed)).await;
    }

    /// Begins an exec or an update.
    fn begin_short(&self, action: Action) -> Result<Short<'_>, TaskError> {
        let mut inner = self.inner();
        self.allow(&inner, action)?;
        inner.short += 1;
        Ok(Short(self))
    }

    fn set_state(&self, state: State) {
        self.inner().state = state;
    }

    /// Only from one state to another: its end may have come in between.
    fn change_state(&self, from: State, to: State) {
        let mut inner = self.inner();
        if inner.state == from {
            inner.state = to;
        }
    }

    async fn call(&self, call: Call, what: &'static str) -> Result<String, TaskError> {
        self.runtime.call(call).await.map_err(|error| TaskError::Runtime { what, error })
    }

    fn tell(&self, event: impl Into<TaskEvent>) {
        self.shared.events.publish(event);
    }
}

/// How long an exec or an update that has begun is waited for.
const SHORT: Duration = Duration::from_secs(10);

/// See [`Container::begin`].
struct UnderWay<'a>(&'a Container);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.inner().under_way = None;
        self.0.no_longer_ending();
    }
}

/// See [`Container::begin_short`].
struct Short<'a>(&'a Container);

impl Drop for Short<'_> {
    fn drop(&mut self) {
        self.0.inner().short -= 1;
        self.0.changed.notify_waiters();
    }
}

/// Whether the runtime does not know the container (any more).
fn does_not_exist(error: &RuncError) -> bool {
    error.says("does not exist")
}
