//! What tests that start processes share. They are not among the unit tests, because a reaper
//! takes all children of its process.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use containerd_shim::protos::api::{
    CheckpointTaskRequest, CreateTaskRequest, DeleteRequest, Empty, ExecProcessRequest,
    KillRequest, PauseRequest, ResumeRequest, StartRequest, StateRequest, Status, WaitRequest,
};
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{Message as _, MessageField};
use containerd_shim::protos::shim::events::ForwardRequest;
use containerd_shim::protos::shim::oci::CheckpointOptions;
use containerd_shim::protos::shim_async::{Events, Task as _, create_events};
use containerd_shim::protos::ttrpc;
use containerd_shim::protos::ttrpc::asynchronous::{Server, TtrpcContext};
use stasis_shim::container::Shared;
use stasis_shim::events::EventQueue;
use stasis_shim::oom::OomWatcher;
use stasis_shim::reaper::Reaper;
use stasis_shim::runc::{Call, Runc, RuncError, Runtime, Through};
use stasis_shim::service::Service;
use stasis_shim::tasks::Tasks;
use tokio::sync::Notify;

/// Runs a test on a runtime of its own, one at a time.
pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limit = Duration::from_secs(60);
    runtime.block_on(async { tokio::time::timeout(limit, test).await.expect("the test hangs") })
}

/// A shell command.
pub(crate) fn sh(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// A shim with a runtime that only pretends, and a containerd that only takes events.
pub(crate) struct World {
    pub(crate) service: Service,
    pub(crate) runtime: Arc<Fake>,
    pub(crate) directory: tempfile::TempDir,
    events: Arc<Mutex<Vec<String>>>,
    _containerd: Server,
}

/// In place of runc: notes its calls, and a container is a `sleep`.
#[derive(Default)]
pub(crate) struct Fake {
    calls: Mutex<Vec<String>>,
    through: Mutex<Vec<(&'static str, Through)>>,
    failing: Mutex<HashMap<&'static str, &'static str>>,
    waiting: Mutex<HashMap<&'static str, Arc<Notify>>>,
    init: Mutex<Option<i32>>,
    /// The process of a call that shows its pid.
    pub(crate) engine: Mutex<Option<i32>>,
}

impl Fake {
    /// From now on a subcommand fails with these words.
    pub(crate) fn fail(&self, subcommand: &'static str, words: &'static str) {
        self.failing.lock().unwrap().insert(subcommand, words);
    }

    /// From now on a subcommand takes until the result is notified.
    pub(crate) fn hold(&self, subcommand: &'static str) -> Arc<Notify> {
        let notify = Arc::new(Notify::new());
        self.waiting.lock().unwrap().insert(subcommand, Arc::clone(&notify));
        notify
    }

    /// The subcommands so far.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    /// Who was called with a subcommand, each time.
    pub(crate) fn through(&self, subcommand: &str) -> Vec<Through> {
        let through = self.through.lock().unwrap();
        through
            .iter()
            .filter(|(name, _)| *name == subcommand)
            .map(|(_, through)| *through)
            .collect()
    }

    /// Waits until a call is there.
    pub(crate) async fn called(&self, beginning: &str) {
        while !self.calls().iter().any(|call| call.starts_with(beginning)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Ends the container's process.
    pub(crate) fn end(&self) {
        let pid = *self.init.lock().unwrap();
        kill(pid.expect("no process"));
    }

    #[allow(clippy::zombie_processes, reason = "the reaper waits for it")]
    fn spawn(arguments: &[OsString]) -> i32 {
        // Whoever reads the test's output does not wait for it.
        let child = Command::new("sleep")
            .arg("1000")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        let at = arguments.iter().position(|word| word == "--pid-file").unwrap();
        std::fs::write(&arguments[at + 1], pid.to_string()).unwrap();
        pid
    }
}

fn kill(pid: i32) {
    let pid = nix::unistd::Pid::from_raw(pid);
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
}

#[async_trait]
impl Runtime for Fake {
    async fn call(&self, call: Call) -> Result<String, RuncError> {
        let words: Vec<_> = call.arguments.iter().map(|word| word.to_string_lossy()).collect();
        let line = format!("{} {}", call.subcommand, words.join(" "));
        self.calls.lock().unwrap().push(line);
        self.through.lock().unwrap().push((call.subcommand, call.through));
        if let Some(slot) = &call.pid {
            slot.store(self.engine.lock().unwrap().unwrap_or(0), Ordering::Relaxed);
        }
        let waiting = self.waiting.lock().unwrap().get(call.subcommand).cloned();
        if let Some(waiting) = waiting {
            waiting.notified().await;
        }
        let failing = self.failing.lock().unwrap().get(call.subcommand).copied();
        match failing {
            Some("panic") => panic!("the runtime's wrapper is broken"),
            Some(words) => {
                return Err(RuncError::Failed {
                    program: "runc".to_owned(),
                    status: 1,
                    output: words.to_owned(),
                    logged: None,
                });
            }
            None => {}
        }
        match call.subcommand {
            "create" | "restore" => {
                *self.init.lock().unwrap() = Some(Self::spawn(&call.arguments));
            }
            "exec" => drop(Self::spawn(&call.arguments)),
            "kill" if !words.iter().any(|word| word == "--all") => self.end(),
            _ => {}
        }
        Ok(String::new())
    }
}

struct Sink(Arc<Mutex<Vec<String>>>);

#[async_trait]
impl Events for Sink {
    async fn forward(&self, _: &TtrpcContext, request: ForwardRequest) -> ttrpc::Result<Empty> {
        let topic = request.envelope().topic.clone();
        let exec = match topic.as_str() {
            "/tasks/exit" => {
                let exit = containerd_shim::protos::events::task::TaskExit::parse_from_bytes(
                    &request.envelope().event.value,
                );
                format!(" {}", exit.unwrap().id)
            }
            _ => String::new(),
        };
        self.0.lock().unwrap().push(format!("{topic}{exec}"));
        Ok(Empty::default())
    }
}

impl World {
    pub(crate) async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = format!("unix://{}", directory.path().join("containerd.ttrpc").display());
        let events = Arc::<Mutex<Vec<String>>>::default();
        let mut containerd = Server::new()
            .bind(&socket)
            .unwrap()
            .register_service(create_events(Arc::new(Sink(Arc::clone(&events)))));
        containerd.start().await.unwrap();
        let runtime = Arc::new(Fake::default());
        let made: Arc<dyn Runtime> = Arc::clone(&runtime) as Arc<dyn Runtime>;
        let shared = Shared {
            runtime: Arc::new(move |_: Runc| Arc::clone(&made)),
            namespace: "default".to_owned(),
            events: EventQueue::new(&socket, "default"),
            reaper: Reaper::start().unwrap(),
            oom: Arc::new(OomWatcher::new(|_| ())),
            log_level: "warn".to_owned(),
            operations: tokio_util::task::TaskTracker::new(),
        };
        let service = Service::new(Arc::new(Tasks::new(shared)));
        Self { service, runtime, directory, events, _containerd: containerd }
    }

    /// Makes a bundle.
    pub(crate) fn bundle(&self, id: &str, own_pids: bool) -> PathBuf {
        let bundle = self.directory.path().join(id);
        std::fs::create_dir_all(bundle.join("work")).unwrap();
        let namespaces = if own_pids { r#"[{"type":"pid"}]"# } else { "[]" };
        let spec = format!(
            r#"{{"ociVersion":"1.0.2","root":{{"path":"rootfs"}},"linux":{{"namespaces":{namespaces}}}}}"#
        );
        std::fs::write(bundle.join("config.json"), spec).unwrap();
        let config = format!(
            "[state]\ndirectory = \"{0}/state\"\n[log]\ndirectory = \"{0}/log\"\n",
            self.directory.path().display()
        );
        std::fs::write(bundle.join("config.toml"), config).unwrap();
        bundle
    }

    pub(crate) async fn create_in(&self, bundle: &Path, checkpoint: &str) -> ttrpc::Result<u32> {
        let id = bundle.file_name().unwrap().to_str().unwrap().to_owned();
        // runtimeoptions.v1.Options with a ConfigPath: field 2.
        let config = bundle.join("config.toml").display().to_string();
        let mut value = vec![2 << 3 | 2, u8::try_from(config.len()).unwrap()];
        value.extend(config.bytes());
        let options =
            Any { type_url: "runtimeoptions.v1.Options".to_owned(), value, ..Any::default() };
        let request = CreateTaskRequest {
            id,
            bundle: bundle.display().to_string(),
            checkpoint: checkpoint.to_owned(),
            options: MessageField::some(options),
            ..CreateTaskRequest::default()
        };
        Ok(self.service.create(&context(), request).await?.pid)
    }

    /// A running container.
    pub(crate) async fn running(&self, id: &str) {
        self.create_in(&self.bundle(id, true), "").await.unwrap();
        self.start(id).await.unwrap();
    }

    pub(crate) async fn start(&self, id: &str) -> ttrpc::Result<u32> {
        let request = StartRequest { id: id.to_owned(), ..StartRequest::default() };
        Ok(self.service.start(&context(), request).await?.pid)
    }

    pub(crate) async fn exec(&self, id: &str, exec: &str) -> ttrpc::Result<u32> {
        let (id, exec_id) = (id.to_owned(), exec.to_owned());
        let request = ExecProcessRequest {
            id: id.clone(),
            exec_id: exec_id.clone(),
            ..ExecProcessRequest::default()
        };
        self.service.exec(&context(), request).await?;
        let request = StartRequest { id, exec_id, ..StartRequest::default() };
        Ok(self.service.start(&context(), request).await?.pid)
    }

    pub(crate) async fn status(&self, id: &str) -> Status {
        let request = StateRequest { id: id.to_owned(), ..StateRequest::default() };
        self.service.state(&context(), request).await.unwrap().status.unwrap()
    }

    pub(crate) async fn pause(&self, id: &str) -> ttrpc::Result<()> {
        let request = PauseRequest { id: id.to_owned(), ..PauseRequest::default() };
        self.service.pause(&context(), request).await.map(drop)
    }

    pub(crate) async fn resume(&self, id: &str) -> ttrpc::Result<()> {
        let request = ResumeRequest { id: id.to_owned(), ..ResumeRequest::default() };
        self.service.resume(&context(), request).await.map(drop)
    }

    /// Waits for the end of init; gives its status.
    pub(crate) async fn wait(&self, id: &str) -> ttrpc::Result<u32> {
        let request = WaitRequest { id: id.to_owned(), ..WaitRequest::default() };
        Ok(self.service.wait(&context(), request).await?.exit_status)
    }

    pub(crate) async fn kill(&self, id: &str) -> ttrpc::Result<()> {
        let request = KillRequest { id: id.to_owned(), signal: 9, ..KillRequest::default() };
        self.service.kill(&context(), request).await.map(drop)
    }

    pub(crate) async fn delete(&self, id: &str) -> ttrpc::Result<u32> {
        let request = DeleteRequest { id: id.to_owned(), ..DeleteRequest::default() };
        Ok(self.service.delete(&context(), request).await?.exit_status)
    }

    /// Asks for a checkpoint, in a task that can be aborted.
    pub(crate) fn checkpoint(&self, id: &str) -> tokio::task::JoinHandle<ttrpc::Result<Empty>> {
        self.checkpoint_and(id, false)
    }

    /// A checkpoint whose dump is under way until it is told to end.
    pub(crate) async fn dumping(
        &self,
        id: &str,
        exit: bool,
    ) -> (Arc<Notify>, tokio::task::JoinHandle<ttrpc::Result<Empty>>) {
        let dump = self.runtime.hold("checkpoint");
        let checkpoint = self.checkpoint_and(id, exit);
        self.runtime.called("checkpoint").await;
        (dump, checkpoint)
    }

    /// The same, after which the container may have to end.
    pub(crate) fn checkpoint_and(
        &self,
        id: &str,
        exit: bool,
    ) -> tokio::task::JoinHandle<ttrpc::Result<Empty>> {
        let service = self.service.clone();
        let path = self.directory.path().join("image").display().to_string();
        let options = CheckpointOptions { exit, ..CheckpointOptions::default() };
        let options = Any {
            type_url: "containerd.runc.v1.CheckpointOptions".to_owned(),
            value: options.write_to_bytes().unwrap(),
            ..Any::default()
        };
        let request = CheckpointTaskRequest {
            id: id.to_owned(),
            path,
            options: MessageField::some(options),
            ..CheckpointTaskRequest::default()
        };
        tokio::spawn(async move { service.checkpoint(&context(), request).await })
    }

    /// Waits until as many events have arrived, and gives them.
    pub(crate) async fn events(&self, count: usize) -> Vec<String> {
        loop {
            let events = self.events.lock().unwrap().clone();
            if events.len() >= count {
                return events;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(pid) = *self.runtime.init.lock().unwrap() {
            kill(pid);
        }
    }
}

pub(crate) fn context() -> TtrpcContext {
    TtrpcContext {
        mh: ttrpc::MessageHeader::default(),
        metadata: HashMap::new(),
        timeout_nano: 0,
        connection_data: Arc::default(),
    }
}

/// Code and words of a refusal.
pub(crate) fn refusal<T: std::fmt::Debug>(result: ttrpc::Result<T>) -> (ttrpc::Code, String) {
    match result {
        Err(ttrpc::Error::RpcStatus(status)) => (status.code(), status.message().to_owned()),
        other => panic!("no refusal: {other:?}"),
    }
}
