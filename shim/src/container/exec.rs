//! Further processes in a container.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use containerd_shim::protos::events::task::{TaskExecAdded, TaskExecStarted};
use tokio::sync::oneshot;

use super::Container;
use super::create::{read_pid, words};
use super::lifecycle::Deleted;
use crate::bundle::PID_FILE;
use crate::error::TaskError;
use crate::process::{Process, UNKNOWN_STATUS};
use crate::reaper::Exit;
use crate::runc::{Call, CallIo};
use crate::state::Action;
use crate::stdio::{ProcessIo, Request};

/// A process that is asked for.
#[derive(Debug)]
pub struct ExecRequest {
    /// Its id.
    pub id: String,
    /// JSON of OCI's `Process`.
    pub spec: Vec<u8>,
    /// Its stdio.
    pub stdio: Request,
}

impl Container {
    /// Adds an exec. It runs when it is started.
    pub fn add_exec(&self, request: ExecRequest) -> Result<(), TaskError> {
        let ExecRequest { id, spec, stdio } = request;
        if id.is_empty() || id.contains('/') || id.starts_with('.') {
            return Err(TaskError::Invalid(format!("an exec cannot be called {id:?}")));
        }
        let mut inner = self.inner();
        self.allow(&inner, Action::Exec)?;
        if inner.execs.contains_key(&id) || id == self.id {
            return Err(TaskError::AlreadyExists(format!(
                "container {}: process {id} exists",
                self.id
            )));
        }
        let process = Process::new(&id, stdio, None).with_spec(spec);
        inner.execs.insert(id.clone(), Arc::new(process));
        drop(inner);
        self.tell(TaskExecAdded {
            container_id: self.id.clone(),
            exec_id: id,
            ..TaskExecAdded::default()
        });
        Ok(())
    }

    /// `runc exec`.
    pub async fn start_exec(self: &Arc<Self>, id: &str) -> Result<u32, TaskError> {
        let process = self.exec(id)?;
        let _short = self.begin_short(Action::Exec)?;
        let gate = process.gate.lock().await;
        if process.exit().is_some() || process.pid() != 0 {
            return Err(TaskError::Precondition(format!(
                "container {}: process {id} was started before",
                self.id
            )));
        }
        match self.run_exec(&process).await {
            Ok(pid) => {
                self.tell(TaskExecStarted {
                    container_id: self.id.clone(),
                    exec_id: id.to_owned(),
                    pid,
                    ..TaskExecStarted::default()
                });
                drop(gate);
                Ok(pid)
            }
            Err(error) => {
                process.end_io_at_once().await;
                process.set_exit(Exit { status: UNKNOWN_STATUS, at: SystemTime::now() });
                Err(error)
            }
        }
    }

    async fn run_exec(self: &Arc<Self>, process: &Arc<Process>) -> Result<u32, TaskError> {
        let failed = |error: &dyn std::error::Error| TaskError::failed(error);
        let (owner, shared) = (self.fixed.owner, &self.shared);
        let mut io =
            ProcessIo::open(&process.stdio, &self.id, &shared.namespace, owner, &shared.reaper)
                .await
                .map_err(|error| failed(&error))?;
        let mut spec = tempfile::Builder::new()
            .prefix("runc-process")
            .tempfile()
            .map_err(|error| failed(&error))?;
        spec.write_all(process.spec()).map_err(|error| failed(&error))?;
        let pid_file = self.exec_pid_file(&process.id);
        let mut arguments = words(&["--process"]);
        arguments.push(spec.path().into());
        if let Some(socket) = io.console_socket() {
            arguments.extend(["--console-socket".into(), socket.into()]);
        }
        arguments.extend(["--detach".into(), "--pid-file".into(), pid_file.clone().into()]);
        arguments.push(self.id.clone().into());
        let ends = io.take_child_ends().map_err(|error| failed(&error))?;
        // To put right what was interrupted, and for the variable of a job.
        let engine = self.fixed.journal.exists() || self.fixed.journal.has_job();
        let call =
            Call::new("exec", arguments).with_io(CallIo::Container(ends)).through_engine(engine);
        let expecting = shared.reaper.expect();
        self.call(call, "OCI runtime exec failed").await?;
        let pid = read_pid(&pid_file)?;
        process.set_pid(pid);
        let exit = expecting.claim(pid);
        let started = io.started().await;
        process.set_io(io).await;
        let (container, watched) = (Arc::clone(self), Arc::clone(process));
        tokio::spawn(async move { container.watch_exec(&watched, exit).await });
        if let Err(error) = started {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid),
                nix::sys::signal::Signal::SIGKILL,
            );
            return Err(failed(&error));
        }
        Ok(pid.cast_unsigned())
    }

    fn exec_pid_file(&self, id: &str) -> PathBuf {
        let file = PathBuf::from(format!("{id}.pid"));
        // The name of init's, which is read after a crash.
        let file = if file == Path::new(PID_FILE) { "exec-init.pid".into() } else { file };
        self.fixed.bundle.join(file)
    }

    async fn watch_exec(&self, process: &Process, exit: oneshot::Receiver<Exit>) {
        let Ok(exit) = exit.await else { return };
        let gate = process.gate.lock().await;
        process.ended().await;
        process.set_exit(exit);
        self.tell_exit(process, exit);
        drop(gate);
    }

    /// Removes an exec that has ended, or never began.
    pub async fn delete_exec(&self, id: &str) -> Result<Deleted, TaskError> {
        let process = self.exec(id)?;
        // Being started counts as running.
        let gate = process.gate.try_lock();
        if gate.is_err() || process.runs() {
            return Err(TaskError::Precondition("cannot delete a running process".to_owned()));
        }
        process.end_io().await;
        let _ = std::fs::remove_file(self.exec_pid_file(id));
        self.inner().execs.remove(id);
        Ok(Deleted { pid: process.pid().cast_unsigned(), exit: process.exit() })
    }
}
