//! containerd's Task service: requests become calls of [`crate::container`], and answers theirs.
//! Nothing is decided here.
//!
//! Each request is a task of its own, because ttrpc drops a handler when its client goes away, and
//! an operation must not end half-way; and a panic in it is that request's error.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim::protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ProcessInfo, ResizePtyRequest, ResumeRequest,
    ShutdownRequest, StartRequest, StartResponse, StateRequest, StateResponse, StatsRequest,
    StatsResponse, Status, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim::protos::protobuf::{EnumOrUnknown, Message, MessageField};
use containerd_shim::protos::shim::oci::{CheckpointOptions, ProcessDetails};
use containerd_shim::protos::shim_async::Task;
use containerd_shim::protos::ttrpc::{self, r#async::TtrpcContext};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use crate::container::{CheckpointRequest, CreateRequest, ExecRequest, RootfsMount};
use crate::error::TaskError;
use crate::options::Options;
use crate::reaper::{Exit, timestamp};
use crate::runc::CALLER;
use crate::state::State;
use crate::stdio::Request;
use crate::tasks::Tasks;

/// The service.
#[derive(Clone)]
pub struct Service(Arc<Tasks>);

impl Service {
    /// Serves these.
    #[must_use]
    pub fn new(tasks: Arc<Tasks>) -> Self {
        Self(tasks)
    }

    /// Runs a request to its end, whatever becomes of its caller.
    async fn run<T, R>(
        &self,
        span: tracing::Span,
        work: impl FnOnce(Arc<Tasks>) -> R,
    ) -> ttrpc::Result<T>
    where
        T: Send + 'static,
        R: Future<Output = Result<T, TaskError>> + Send + 'static,
    {
        let caller = CancellationToken::new();
        let here = caller.clone().drop_guard();
        let work = CALLER.scope(caller, work(Arc::clone(&self.0)));
        let running = tokio::spawn(work.instrument(span.clone()));
        let result = running.await.unwrap_or_else(|error| {
            // The panic hook has logged where.
            Err(TaskError::Failed(format!("internal error of the shim: {}", panic_words(error))))
        });
        here.disarm();
        result.map_err(|error| {
            span.in_scope(|| tracing::debug!(%error, "refused or failed"));
            error.into()
        })
    }
}

fn panic_words(error: tokio::task::JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "panic".to_owned()),
        Err(error) => error.to_string(),
    }
}

/// A span for a request.
macro_rules! span {
    ($operation:literal, $request:ident) => {
        tracing::info_span!($operation, container = $request.id)
    };
    ($operation:literal, $request:ident, exec) => {
        tracing::info_span!($operation, container = $request.id, exec = $request.exec_id)
    };
}

#[async_trait]
impl Task for Service {
    async fn state(&self, _: &TtrpcContext, request: StateRequest) -> ttrpc::Result<StateResponse> {
        let span = span!("state", request, exec);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            let snapshot = container.snapshot(&request.exec_id)?;
            let id = if request.exec_id.is_empty() { request.id } else { request.exec_id.clone() };
            Ok(StateResponse {
                id,
                bundle: container.bundle().display().to_string(),
                pid: snapshot.pid,
                status: EnumOrUnknown::new(status(snapshot.state)),
                stdin: snapshot.stdio.stdin,
                stdout: snapshot.stdio.stdout,
                stderr: snapshot.stdio.stderr,
                terminal: snapshot.stdio.terminal,
                exit_status: snapshot.exit.map_or(0, |exit| exit.status),
                exited_at: exited_at(snapshot.exit),
                ..StateResponse::default()
            })
        })
        .await
    }

    async fn create(
        &self,
        _: &TtrpcContext,
        request: CreateTaskRequest,
    ) -> ttrpc::Result<CreateTaskResponse> {
        let span = span!("create", request);
        self.run(span, |tasks| async move {
            let request = create_request(request)?;
            let container = tasks.create(request).await?;
            Ok(CreateTaskResponse { pid: container.pid(), ..CreateTaskResponse::default() })
        })
        .await
    }

    async fn start(&self, _: &TtrpcContext, request: StartRequest) -> ttrpc::Result<StartResponse> {
        let span = span!("start", request, exec);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            let pid = match request.exec_id.as_str() {
                "" => container.start().await?,
                exec => container.start_exec(exec).await?,
            };
            Ok(StartResponse { pid, ..StartResponse::default() })
        })
        .await
    }

    async fn delete(
        &self,
        _: &TtrpcContext,
        request: DeleteRequest,
    ) -> ttrpc::Result<DeleteResponse> {
        let span = span!("delete", request, exec);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            let deleted = if request.exec_id.is_empty() {
                let deleted = container.delete().await?;
                tasks.forget(&request.id);
                deleted
            } else {
                container.delete_exec(&request.exec_id).await?
            };
            Ok(DeleteResponse {
                pid: deleted.pid,
                exit_status: deleted.exit.map_or(0, |exit| exit.status),
                exited_at: exited_at(deleted.exit),
                ..DeleteResponse::default()
            })
        })
        .await
    }

    async fn pids(&self, _: &TtrpcContext, request: PidsRequest) -> ttrpc::Result<PidsResponse> {
        let span = span!("pids", request);
        self.run(span, |tasks| async move {
            let pids = tasks.get(&request.id)?.pids().await?;
            let mut processes = Vec::with_capacity(pids.len());
            for (pid, exec) in pids {
                let info = exec.map(process_details).transpose()?;
                let info = MessageField::from_option(info);
                processes.push(ProcessInfo { pid, info, ..ProcessInfo::default() });
            }
            Ok(PidsResponse { processes, ..PidsResponse::default() })
        })
        .await
    }

    async fn pause(&self, _: &TtrpcContext, request: PauseRequest) -> ttrpc::Result<Empty> {
        let span = span!("pause", request);
        self.run(span, |tasks| async move {
            tasks.get(&request.id)?.pause().await?;
            Ok(Empty::default())
        })
        .await
    }

    async fn resume(&self, _: &TtrpcContext, request: ResumeRequest) -> ttrpc::Result<Empty> {
        let span = span!("resume", request);
        self.run(span, |tasks| async move {
            tasks.get(&request.id)?.resume().await?;
            Ok(Empty::default())
        })
        .await
    }

    async fn checkpoint(
        &self,
        _: &TtrpcContext,
        request: CheckpointTaskRequest,
    ) -> ttrpc::Result<Empty> {
        let span = span!("checkpoint", request);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            container.checkpoint(checkpoint_request(request)?).await?;
            Ok(Empty::default())
        })
        .await
    }

    async fn kill(&self, _: &TtrpcContext, request: KillRequest) -> ttrpc::Result<Empty> {
        let span = span!("kill", request, exec);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            container.kill(&request.exec_id, request.signal, request.all).await?;
            Ok(Empty::default())
        })
        .await
    }

    async fn exec(&self, _: &TtrpcContext, request: ExecProcessRequest) -> ttrpc::Result<Empty> {
        let span = span!("exec", request, exec);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            container.add_exec(ExecRequest {
                id: request.exec_id,
                spec: request.spec.into_option().unwrap_or_default().value,
                stdio: Request {
                    stdin: request.stdin,
                    stdout: request.stdout,
                    stderr: request.stderr,
                    terminal: request.terminal,
                },
            })?;
            Ok(Empty::default())
        })
        .await
    }

    async fn resize_pty(
        &self,
        _: &TtrpcContext,
        request: ResizePtyRequest,
    ) -> ttrpc::Result<Empty> {
        let span = span!("resize-pty", request, exec);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            container.resize(&request.exec_id, request.width, request.height).await?;
            Ok(Empty::default())
        })
        .await
    }

    async fn close_io(&self, _: &TtrpcContext, request: CloseIORequest) -> ttrpc::Result<Empty> {
        let span = span!("close-io", request, exec);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            if request.stdin {
                container.close_stdin(&request.exec_id).await?;
            }
            Ok(Empty::default())
        })
        .await
    }

    async fn update(&self, _: &TtrpcContext, request: UpdateTaskRequest) -> ttrpc::Result<Empty> {
        let span = span!("update", request);
        self.run(span, |tasks| async move {
            let resources = request.resources.into_option().unwrap_or_default().value;
            tasks.get(&request.id)?.update(resources).await?;
            Ok(Empty::default())
        })
        .await
    }

    async fn wait(&self, _: &TtrpcContext, request: WaitRequest) -> ttrpc::Result<WaitResponse> {
        // Not a task of its own: it ends with its client, who may ask again and again.
        let container = self.0.get(&request.id)?;
        let exit = container.wait(&request.exec_id).await?;
        Ok(WaitResponse {
            exit_status: exit.status,
            exited_at: exited_at(Some(exit)),
            ..WaitResponse::default()
        })
    }

    async fn stats(&self, _: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let span = span!("stats", request);
        self.run(span, |tasks| async move {
            let container = tasks.get(&request.id)?;
            let missing = || TaskError::NotFound(format!("container {}: no cgroup", request.id));
            let cgroups = container.cgroups().ok_or_else(missing)?;
            let collected =
                tokio::task::spawn_blocking(move || crate::metrics::collect(&cgroups)).await;
            let stats = collected
                .map_err(|error| TaskError::Failed(error.to_string()))?
                .map_err(|error| TaskError::Failed(stasis_hooks::error::chain(&error)))?;
            Ok(StatsResponse { stats: MessageField::some(stats), ..StatsResponse::default() })
        })
        .await
    }

    async fn connect(
        &self,
        _: &TtrpcContext,
        request: ConnectRequest,
    ) -> ttrpc::Result<ConnectResponse> {
        let span = span!("connect", request);
        self.run(span, |tasks| async move {
            Ok(ConnectResponse {
                shim_pid: std::process::id(),
                task_pid: tasks.get(&request.id).map_or(0, |container| container.pid()),
                ..ConnectResponse::default()
            })
        })
        .await
    }

    async fn shutdown(&self, _: &TtrpcContext, request: ShutdownRequest) -> ttrpc::Result<Empty> {
        let span = span!("shutdown", request);
        self.run(span, |tasks| async move {
            tasks.shut_down();
            Ok(Empty::default())
        })
        .await
    }
}

fn status(state: State) -> Status {
    match state {
        State::Created | State::CreatedFromCheckpoint => Status::CREATED,
        State::Running => Status::RUNNING,
        State::Paused => Status::PAUSED,
        State::Stopped => Status::STOPPED,
    }
}

fn exited_at(exit: Option<Exit>) -> MessageField<Timestamp> {
    MessageField::from_option(exit.map(|exit| timestamp(exit.at)))
}

fn create_request(request: CreateTaskRequest) -> Result<CreateRequest, TaskError> {
    let options = request.options.into_option();
    let options = Options::decode(options.as_ref())
        .map_err(|error| TaskError::Invalid(stasis_hooks::error::chain(&error)))?;
    let bundle = PathBuf::from(request.bundle);
    if !bundle.is_absolute() {
        return Err(TaskError::Invalid(format!(
            "a bundle needs an absolute path, found {}",
            bundle.display()
        )));
    }
    Ok(CreateRequest {
        id: request.id,
        bundle,
        rootfs: request
            .rootfs
            .into_iter()
            .map(|mount| RootfsMount {
                kind: mount.type_,
                source: mount.source,
                target: mount.target,
                options: mount.options,
            })
            .collect(),
        stdio: Request {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        },
        checkpoint: request.checkpoint.into(),
        options,
    })
}

fn checkpoint_request(request: CheckpointTaskRequest) -> Result<CheckpointRequest, TaskError> {
    let options = match request.options.into_option() {
        None => CheckpointOptions::default(),
        Some(any) if any.type_url.is_empty() && any.value.is_empty() => {
            CheckpointOptions::default()
        }
        Some(any) if any.type_url.ends_with("containerd.runc.v1.CheckpointOptions") => {
            CheckpointOptions::parse_from_bytes(&any.value).map_err(|error| {
                TaskError::Invalid(format!("options of the checkpoint: {error}"))
            })?
        }
        Some(any) => {
            return Err(TaskError::Invalid(format!(
                "options of the checkpoint: {} is not known here; expected \
                 containerd.runc.v1.CheckpointOptions",
                any.type_url
            )));
        }
    };
    let path = if request.path.is_empty() { options.image_path } else { request.path };
    Ok(CheckpointRequest {
        image: path.into(),
        work: Some(options.work_path).filter(|path| !path.is_empty()).map(PathBuf::from),
        exit: options.exit,
        open_tcp: options.open_tcp,
        external_unix_sockets: options.external_unix_sockets,
        terminal: options.terminal,
        file_locks: options.file_locks,
        empty_namespaces: options.empty_namespaces,
    })
}

/// Which exec a process is.
fn process_details(exec_id: String) -> Result<Any, TaskError> {
    let details = ProcessDetails { exec_id, ..ProcessDetails::default() };
    let value = details.write_to_bytes().map_err(|error| TaskError::Failed(error.to_string()))?;
    let type_url = "containerd.runc.v1.ProcessDetails".to_owned();
    Ok(Any { type_url, value, ..Any::default() })
}
