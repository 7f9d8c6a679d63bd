//! The connection to containerd's events service.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use containerd_shim::protos::shim::events::ForwardRequest;
use containerd_shim::protos::shim_async::{Client, EventsClient};
use containerd_shim::protos::ttrpc::asynchronous::transport::Socket;
use containerd_shim::protos::ttrpc::context::with_duration;
use containerd_shim::protos::ttrpc::{self, Code};
use tokio::net::UnixStream;

/// Why an event was not taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
    /// containerd has answered that it does not want it. It never will.
    #[error("containerd refuses the event: {message} ({code:?})")]
    Refused {
        /// The answer.
        code: Code,
        /// In words.
        message: String,
    },
    /// containerd is away.
    #[error("cannot connect to {}: {source}", path.display())]
    Connect {
        /// Its socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke, or containerd had no time.
    #[error("no answer from containerd: {0}")]
    Lost(ttrpc::Error),
    /// No answer came in time.
    #[error("no answer from containerd within {0:?}")]
    Late(Duration),
}

/// containerd's events service; connected to when it is needed.
pub(super) struct Containerd {
    path: PathBuf,
    limit: Duration,
    client: Option<EventsClient>,
}

impl Containerd {
    /// `limit` is how long an attempt to send an event may take.
    pub(super) fn new(address: &str, limit: Duration) -> Self {
        let path = address.strip_prefix("unix://").unwrap_or(address).into();
        Self { path, limit, client: None }
    }

    /// Tries once to send an event.
    pub(super) async fn forward(&mut self, request: &ForwardRequest) -> Result<(), ForwardError> {
        let sent = match tokio::time::timeout(self.limit, self.send(request)).await {
            Ok(sent) => sent,
            Err(_elapsed) => Err(ForwardError::Late(self.limit)),
        };
        if !matches!(sent, Ok(()) | Err(ForwardError::Refused { .. })) {
            self.client = None;
        }
        sent
    }

    async fn send(&mut self, request: &ForwardRequest) -> Result<(), ForwardError> {
        let client = match &mut self.client {
            Some(client) => client,
            none => none.insert(connect(&self.path).await?),
        };
        match client.forward(with_duration(self.limit), request).await {
            Ok(_empty) => Ok(()),
            Err(ttrpc::Error::RpcStatus(status)) if !passes(status.code()) => {
                Err(ForwardError::Refused { code: status.code(), message: status.message })
            }
            Err(error) => Err(ForwardError::Lost(error)),
        }
    }
}

/// Whether an answer is about containerd's state and not about the event.
fn passes(code: Code) -> bool {
    matches!(code, Code::CANCELLED | Code::DEADLINE_EXCEEDED | Code::UNAVAILABLE)
}

/// ttrpc's own way to connect would block the runtime's thread while containerd does not accept.
async fn connect(path: &PathBuf) -> Result<EventsClient, ForwardError> {
    match UnixStream::connect(path).await {
        Ok(stream) => Ok(EventsClient::new(Client::new(Socket::from(stream)))),
        Err(source) => Err(ForwardError::Connect { path: path.clone(), source }),
    }
}
