//! What the Task service answers when something fails, and its one translation to ttrpc's codes.

use containerd_shim::protos::ttrpc::{self, Code};

use crate::runc::RuncError;
use crate::state::Refused;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// No such container, process or exec.
    #[error("{0}")]
    NotFound(String),
    /// The id is taken.
    #[error("{0}")]
    AlreadyExists(String),
    /// The request itself is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The container's state does not allow it.
    #[error("container {container}: {refused}")]
    State {
        /// Which.
        container: String,
        /// In which words.
        refused: Refused,
    },
    /// Something else is under way.
    #[error(
        "container {container}: a {under_way} is under way, since {} s; try again when it has ended",
        seconds
    )]
    Busy {
        /// Which.
        container: String,
        /// What.
        under_way: &'static str,
        /// For how long.
        seconds: u64,
    },
    /// The state does not allow it, in other words.
    #[error("{0}")]
    Precondition(String),
    /// The runtime failed.
    #[error("{what}: {}", error.words())]
    Runtime {
        /// In the words of Go's shim: `OCI runtime create failed`.
        what: &'static str,
        /// How.
        error: RuncError,
    },
    /// Nothing begins any more.
    #[error("the shim is shutting down")]
    Closing,
    /// The host failed us.
    #[error("{0}")]
    Failed(String),
}

impl TaskError {
    fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NOT_FOUND,
            Self::AlreadyExists(_) => Code::ALREADY_EXISTS,
            Self::Invalid(_) => Code::INVALID_ARGUMENT,
            Self::State { .. } | Self::Busy { .. } | Self::Precondition(_) => {
                Code::FAILED_PRECONDITION
            }
            Self::Closing => Code::UNAVAILABLE,
            // What containerd's own shim gives for these.
            Self::Runtime { .. } | Self::Failed(_) => Code::UNKNOWN,
        }
    }
}

impl TaskError {
    /// The host failed us: the error with its sources.
    #[must_use]
    pub fn failed(error: &dyn std::error::Error) -> Self {
        Self::Failed(stasis_hooks::error::chain(error))
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        ttrpc::Error::RpcStatus(ttrpc::get_status(error.code(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{Action, State};

    #[test]
    fn each_error_has_its_code() {
        let state = State::Running.allow(Action::Delete).unwrap_err();
        let table = [
            (TaskError::NotFound("x".into()), Code::NOT_FOUND),
            (TaskError::AlreadyExists("x".into()), Code::ALREADY_EXISTS),
            (TaskError::Invalid("x".into()), Code::INVALID_ARGUMENT),
            (TaskError::State { container: "c".into(), refused: state }, Code::FAILED_PRECONDITION),
            (
                TaskError::Busy { container: "c".into(), under_way: "checkpoint", seconds: 3 },
                Code::FAILED_PRECONDITION,
            ),
            (TaskError::Precondition("x".into()), Code::FAILED_PRECONDITION),
            (TaskError::Closing, Code::UNAVAILABLE),
            (TaskError::Failed("x".into()), Code::UNKNOWN),
        ];
        for (error, code) in table {
            let words = error.to_string();
            match ttrpc::Error::from(error) {
                ttrpc::Error::RpcStatus(status) => {
                    assert_eq!((status.code(), status.message()), (code, words.as_str()));
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
