//! A client of a shim's own socket: what containerd says to shims, without containerd.
//!
//! For what no `ctr` can say, and for seeing how soon a shim answers.

use std::fmt;
use std::fs;
use std::net::Shutdown;
use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, ExecProcessRequest, KillRequest,
    PauseRequest, PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest,
    StartRequest, StartResponse, StateRequest, StateResponse, UpdateTaskRequest, WaitRequest,
    WaitResponse,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::well_known_types::empty::Empty;
use containerd_shim_protos::protobuf::{self, EnumFull as _, Message};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use containerd_shim_protos::ttrpc::proto::{Code, KeyValue, Request};
use containerd_shim_protos::ttrpc::{Client, Error};

/// The names of the service: as containerd 1.7 calls it and Go's shim of that time serves it, and
/// as the shim of containerd 2.x serves it. The messages are the same.
const SERVICES: [&str; 2] = ["containerd.task.v2.Task", "containerd.task.v3.Task"];

/// Longer than anything in a test takes: a shim that never answers fails a test.
const LIMIT: Duration = Duration::from_secs(120);

/// Why a call failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Refused {
    /// The shim's answer; none if there was no answer.
    pub code: Option<Code>,
    /// Its words.
    pub message: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(formatter, "{code:?}: {}", self.message),
            None => write!(formatter, "no answer: {}", self.message),
        }
    }
}

impl std::error::Error for Refused {}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        match error {
            Error::RpcStatus(status) => Self {
                code: Some(status.code.enum_value().unwrap_or(Code::UNKNOWN)),
                message: status.message,
            },
            other => Self { code: None, message: other.to_string() },
        }
    }
}

/// What a call gives.
pub type Answer<T> = std::result::Result<T, Refused>;

/// A connection to the shim of one or more tasks.
#[derive(Clone)]
pub struct TaskClient {
    client: Client,
    namespace: String,
    socket: PathBuf,
}

impl fmt::Debug for TaskClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "TaskClient({})", self.socket.display())
    }
}

impl TaskClient {
    /// Connects to the shim that serves the task with this bundle.
    pub fn connect(bundle: &Path, namespace: &str) -> Result<Self> {
        let address = address(bundle)?;
        Self::at(&address, namespace)
    }

    /// Connects to a shim at its address, `unix://PATH`.
    pub fn at(address: &str, namespace: &str) -> Result<Self> {
        let socket = PathBuf::from(address.strip_prefix("unix://").unwrap_or(address));
        let stream =
            UnixStream::connect(&socket).with_context(|| format!("connect to {address}"))?;
        Self::over(stream, socket, namespace)
    }

    fn over(stream: UnixStream, socket: PathBuf, namespace: &str) -> Result<Self> {
        let client = Client::new(stream.into_raw_fd())?;
        Ok(Self { client, namespace: namespace.to_owned(), socket })
    }

    /// The shim's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Another connection to the same shim, and what cuts it.
    pub fn cuttable(&self) -> Result<(Self, Cutter)> {
        let stream = UnixStream::connect(&self.socket)?;
        let cutter = Cutter(stream.try_clone()?);
        Ok((Self::over(stream, self.socket.clone(), &self.namespace)?, cutter))
    }

    /// Another connection to the same shim.
    pub fn again(&self) -> Result<Self> {
        Self::over(UnixStream::connect(&self.socket)?, self.socket.clone(), &self.namespace)
    }

    fn call<Q: Message, A: Message>(&self, method: &str, request: &Q) -> Answer<A> {
        let [first, second] = SERVICES;
        match self.call_service(first, method, request) {
            Err(refused)
                if refused.code == Some(Code::UNIMPLEMENTED) && refused.message.contains(first) =>
            {
                self.call_service(second, method, request)
            }
            answer => answer,
        }
    }

    fn call_service<Q: Message, A: Message>(
        &self,
        service: &str,
        method: &str,
        request: &Q,
    ) -> Answer<A> {
        let broken = |error: protobuf::Error| Refused { code: None, message: error.to_string() };
        let namespace = KeyValue {
            key: "containerd-namespace-ttrpc".to_owned(),
            value: self.namespace.clone(),
            ..Default::default()
        };
        let request = Request {
            service: service.to_owned(),
            method: method.to_owned(),
            payload: request.write_to_bytes().map_err(broken)?,
            timeout_nano: LIMIT.as_nanos().try_into().unwrap_or(i64::MAX),
            metadata: vec![namespace],
            ..Default::default()
        };
        let response = self.client.request(request)?;
        A::parse_from_bytes(&response.payload).map_err(broken)
    }

    /// `Create`.
    pub fn create(&self, request: &CreateTaskRequest) -> Answer<CreateTaskResponse> {
        self.call("Create", request)
    }

    /// `Start` of the task itself.
    pub fn start(&self, id: &str) -> Answer<StartResponse> {
        self.call("Start", &StartRequest { id: id.to_owned(), ..Default::default() })
    }

    /// `Start` of another process of the task.
    pub fn start_exec(&self, id: &str, exec_id: &str) -> Answer<StartResponse> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.call("Start", &StartRequest { id, exec_id, ..Default::default() })
    }

    /// `Exec` of a program without input and output.
    pub fn exec(&self, id: &str, exec_id: &str, program: &[&str]) -> Answer<Empty> {
        let process = serde_json::json!({
            "user": { "uid": 0, "gid": 0 }, "cwd": "/", "args": program, "env": ["PATH=/bin"],
        });
        let spec = Any {
            type_url: "types.containerd.io/opencontainers/runtime-spec/1/Process".to_owned(),
            value: process.to_string().into_bytes(),
            ..Default::default()
        };
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        let mut request = ExecProcessRequest { id, exec_id, ..Default::default() };
        request.set_spec(spec);
        self.call("Exec", &request)
    }

    /// `ResizePty`.
    pub fn resize(&self, id: &str, exec_id: &str, width: u32, height: u32) -> Answer<Empty> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.call(
            "ResizePty",
            &ResizePtyRequest { id, exec_id, width, height, ..Default::default() },
        )
    }

    /// `CloseIO` of standard input.
    pub fn close_stdin(&self, id: &str, exec_id: &str) -> Answer<Empty> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.call("CloseIO", &CloseIORequest { id, exec_id, stdin: true, ..Default::default() })
    }

    /// `State` of the task, or of a process of it where `exec_id` is not empty.
    pub fn state(&self, id: &str, exec_id: &str) -> Answer<StateResponse> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.call("State", &StateRequest { id, exec_id, ..Default::default() })
    }

    /// `Pids`.
    pub fn pids(&self, id: &str) -> Answer<PidsResponse> {
        self.call("Pids", &PidsRequest { id: id.to_owned(), ..Default::default() })
    }

    /// `Pause`.
    pub fn pause(&self, id: &str) -> Answer<Empty> {
        self.call("Pause", &PauseRequest { id: id.to_owned(), ..Default::default() })
    }

    /// `Resume`.
    pub fn resume(&self, id: &str) -> Answer<Empty> {
        self.call("Resume", &ResumeRequest { id: id.to_owned(), ..Default::default() })
    }

    /// `Kill`.
    pub fn kill(&self, id: &str, exec_id: &str, signal: u32, all: bool) -> Answer<Empty> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.call("Kill", &KillRequest { id, exec_id, signal, all, ..Default::default() })
    }

    /// `Delete`.
    pub fn delete(&self, id: &str, exec_id: &str) -> Answer<DeleteResponse> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.call("Delete", &DeleteRequest { id, exec_id, ..Default::default() })
    }

    /// `Wait`.
    pub fn wait(&self, id: &str, exec_id: &str) -> Answer<WaitResponse> {
        let (id, exec_id) = (id.to_owned(), exec_id.to_owned());
        self.call("Wait", &WaitRequest { id, exec_id, ..Default::default() })
    }

    /// `Update`, with the resources as the runtime specification writes them.
    pub fn update(&self, id: &str, resources: &serde_json::Value) -> Answer<Empty> {
        let resources = Any {
            type_url: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources".to_owned(),
            value: resources.to_string().into_bytes(),
            ..Default::default()
        };
        let mut request = UpdateTaskRequest { id: id.to_owned(), ..Default::default() };
        request.set_resources(resources);
        self.call("Update", &request)
    }

    /// `Connect`.
    pub fn pids_of_both(&self, id: &str) -> Answer<ConnectResponse> {
        self.call("Connect", &ConnectRequest { id: id.to_owned(), ..Default::default() })
    }

    /// `Shutdown`.
    pub fn shutdown(&self, id: &str) -> Answer<Empty> {
        self.call("Shutdown", &ShutdownRequest { id: id.to_owned(), ..Default::default() })
    }

    /// `Checkpoint` into a directory.
    pub fn checkpoint(
        &self,
        id: &str,
        image: &Path,
        work: Option<&Path>,
        exit: bool,
    ) -> Answer<Empty> {
        let shown = |path: &Path| path.display().to_string();
        let options = CheckpointOptions {
            exit,
            work_path: work.map(shown).unwrap_or_default(),
            ..Default::default()
        };
        let mut request =
            CheckpointTaskRequest { id: id.to_owned(), path: shown(image), ..Default::default() };
        request.set_options(Any {
            type_url: "containerd.runc.v1.CheckpointOptions".to_owned(),
            value: options.write_to_bytes().unwrap_or_default(),
            ..Default::default()
        });
        self.call("Checkpoint", &request)
    }
}

/// Cuts a connection as the end of its client would.
#[derive(Debug)]
pub struct Cutter(UnixStream);

impl Cutter {
    /// Does it.
    pub fn cut(self) -> Result<()> {
        Ok(self.0.shutdown(Shutdown::Both)?)
    }
}

/// The address of the shim that serves the task with this bundle.
///
/// Go's shim writes one file, containerd the other.
pub fn address(bundle: &Path) -> Result<String> {
    let plain = bundle.join("address");
    if let Ok(address) = fs::read_to_string(&plain) {
        return Ok(address.trim().to_owned());
    }
    let bootstrap = bundle.join("bootstrap.json");
    let text = fs::read_to_string(&bootstrap)
        .with_context(|| format!("neither {} nor {}", plain.display(), bootstrap.display()))?;
    let bootstrap: serde_json::Value = serde_json::from_str(&text)?;
    bootstrap["address"].as_str().map(str::to_owned).context("a bootstrap without an address")
}

/// How a status of a task is called.
#[must_use]
pub fn status(state: &StateResponse) -> String {
    state
        .status
        .enum_value()
        .map_or_else(|number| number.to_string(), |status| status.descriptor().name().to_owned())
}
