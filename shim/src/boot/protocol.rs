//! How containerd asks `start` and in which form it wants the answer.
//!
//! Up to containerd 2.2: flags and environment, and the options alone on standard input. From 2.3
//! on: one message, `BootstrapParams`, beside the old flags. Its message can be told by the flags,
//! which it repeats: options alone decode as one too, with their type as id.

use std::io::{self, IsTerminal as _, Read as _};
use std::path::PathBuf;

use containerd_shim::protos::bootstrap_api::{BootstrapParams, BootstrapResult, LogLevel};
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{self, Message as _};

use crate::options::is_options;

/// The task API in which containerd talks to us: v2, although our server knows both names.
///
/// The wire format is the same. containerd 1.7 refuses 3. For 3, containerd 2.x gives the later
/// containers of a pod to the pod's server without running `start`, and then does not run `delete`
/// for them either when the server is lost: their processes would stay.
const VERSION: i32 = 2;

const PROTOCOL: &str = "ttrpc";

/// containerd's own limit.
const MAX_INPUT: u64 = 10 << 20;

/// What containerd asks.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Request {
    /// The container's runtime options.
    pub(super) options: Option<Any>,
    /// containerd's ttrpc socket, to which events go. Empty: the environment's.
    pub(super) ttrpc_address: String,
    /// Where the socket is to be.
    pub(super) socket_directory: Option<PathBuf>,
    /// Whether everything is to be logged.
    pub(super) debug: bool,
    /// How to answer.
    pub(super) form: Form,
}

/// The form of the answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Form {
    /// The socket's address alone: all that containerd 1.6 understands. To 1.7 and 2.x it means
    /// what the longer JSON form would say: version 2, ttrpc.
    #[default]
    Address,
    /// `BootstrapResult`.
    Message,
}

/// Standard input cannot be understood.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Neither options nor a message.
    #[error("what containerd sent on standard input is neither runtime options nor a bootstrap")]
    Malformed(#[source] protobuf::Error),
    /// A message for somebody else.
    #[error("the bootstrap is for {found}, and the flags say {expected}")]
    Mismatch {
        /// Namespace and id in the message.
        found: String,
        /// Namespace and id in the flags.
        expected: String,
    },
}

/// Reads standard input: `start` and `-info` get their options there.
pub fn read_input() -> io::Result<Vec<u8>> {
    let stdin = io::stdin();
    let mut input = Vec::new();
    // Started by hand.
    if !stdin.is_terminal() {
        stdin.lock().take(MAX_INPUT).read_to_end(&mut input)?;
    }
    Ok(input)
}

/// The options that stand alone on standard input.
pub(super) fn options_alone(input: &[u8]) -> Result<Option<Any>, RequestError> {
    if input.is_empty() {
        return Ok(None);
    }
    Any::parse_from_bytes(input).map(Some).map_err(RequestError::Malformed)
}

impl Request {
    /// Understands standard input.
    pub(super) fn parse(input: &[u8], namespace: &str, id: &str) -> Result<Self, RequestError> {
        let params = BootstrapParams::parse_from_bytes(input).unwrap_or_default();
        let flags = (namespace, id);
        if (params.namespace.as_str(), params.instance_id.as_str()) == flags {
            return Ok(params.into());
        }
        // What options alone decode to.
        let of_options = BootstrapParams {
            instance_id: params.instance_id.clone(),
            namespace: params.namespace.clone(),
            special_fields: params.special_fields.clone(),
            ..BootstrapParams::default()
        };
        if params != of_options {
            return Err(RequestError::Mismatch {
                found: format!("{}/{}", params.namespace, params.instance_id),
                expected: format!("{namespace}/{id}"),
            });
        }
        Ok(Self { options: options_alone(input)?, ..Self::default() })
    }
}

impl From<BootstrapParams> for Request {
    fn from(params: BootstrapParams) -> Self {
        // Others are for other shims, or for a later one of us.
        let extensions = params.extensions.into_iter().filter_map(|one| one.value.into_option());
        let directory = params.socket_dir.filter(|directory| !directory.is_empty());
        Self {
            options: { extensions }.find(|any| is_options(&any.type_url)),
            ttrpc_address: params.containerd_ttrpc_address,
            socket_directory: directory.map(PathBuf::from),
            // An open enum: less is more.
            debug: params.log_level.value() <= LogLevel::LOG_LEVEL_DEBUG as i32,
            form: Form::Message,
        }
    }
}

impl Form {
    /// The answer: where the server is.
    pub(super) fn answer(self, address: &str) -> Vec<u8> {
        match self {
            Self::Address => address.into(),
            Self::Message => BootstrapResult {
                version: VERSION,
                address: address.to_owned(),
                protocol: PROTOCOL.to_owned(),
                ..BootstrapResult::default()
            }
            .write_to_bytes()
            // Fails for fields that are missing, which proto3 does not have.
            .unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use containerd_shim::protos::bootstrap_api::Extension;
    use containerd_shim::protos::protobuf::EnumOrUnknown;

    fn any(type_url: &str) -> Any {
        Any { type_url: type_url.into(), value: b"n".to_vec(), ..Any::default() }
    }

    fn parse(input: &[u8]) -> Result<Request, String> {
        Request::parse(input, "n", "c").map_err(|error| error.to_string())
    }

    #[test]
    fn before_2_3_there_are_options_alone_or_nothing() {
        assert_eq!(parse(b""), Ok(Request::default()));
        for type_url in ["containerd.runc.v1.Options", "runtimeoptions.v1.Options", ""] {
            let any = any(type_url);
            let want = Request { options: Some(any.clone()), ..Request::default() };
            assert_eq!(parse(&any.write_to_bytes().unwrap()), Ok(want));
        }
        // Not text, as which BootstrapParams' namespace would have to be.
        let options = Any { value: vec![0xff], ..any("runtimeoptions.v1.Options") };
        let request = parse(&options.write_to_bytes().unwrap()).unwrap();
        assert_eq!((request.options, request.form), (Some(options), Form::Address));
        assert!(parse(b"\xff\xff").unwrap_err().contains("neither"));
    }

    #[test]
    fn from_2_3_on_there_is_one_message() {
        let extension = |type_url: &str| Extension {
            value: Some(any(type_url)).into(),
            ..Extension::default()
        };
        let params = BootstrapParams {
            instance_id: "c".into(),
            namespace: "n".into(),
            log_level: EnumOrUnknown::from_i32(-5),
            containerd_ttrpc_address: "/t".into(),
            socket_dir: Some("/s".into()),
            extensions: vec![
                extension("cri.v1.PodSandboxConfig"),
                Extension::default(),
                extension("x/runtimeoptions.v1.Options"),
            ],
            ..BootstrapParams::default()
        };
        let want = Request {
            options: Some(any("x/runtimeoptions.v1.Options")),
            ttrpc_address: "/t".into(),
            socket_directory: Some("/s".into()),
            debug: true,
            form: Form::Message,
        };
        assert_eq!(parse(&params.write_to_bytes().unwrap()), Ok(want));

        let plain = BootstrapParams {
            instance_id: "c".into(),
            namespace: "n".into(),
            ..BootstrapParams::default()
        };
        let want = Request { form: Form::Message, ..Request::default() };
        assert_eq!(parse(&plain.write_to_bytes().unwrap()), Ok(want));

        let other = BootstrapParams { instance_id: "d".into(), ..params };
        let error = parse(&other.write_to_bytes().unwrap()).unwrap_err();
        assert_eq!(error, "the bootstrap is for n/d, and the flags say n/c");
    }

    #[test]
    fn the_answer_is_for_task_api_2() {
        assert_eq!(Form::Address.answer("unix:///s"), b"unix:///s");
        let message =
            BootstrapResult::parse_from_bytes(&Form::Message.answer("unix:///s")).unwrap();
        assert_eq!((message.version, message.protocol.as_str()), (2, "ttrpc"));
        assert_eq!(message.address, "unix:///s");
    }
}
