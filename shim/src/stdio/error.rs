//! What can go wrong with a process's stdio.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a process has no stdio as asked for.
#[derive(Debug, thiserror::Error)]
pub enum StdioError {
    /// What was asked for cannot be read.
    #[error("stdio {uri:?}: {reason}")]
    Uri {
        /// As asked for.
        uri: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A scheme that this shim does not know.
    #[error("stdio {uri:?}: unknown scheme {scheme}, known are fifo, binary and file")]
    Scheme {
        /// As asked for.
        uri: String,
        /// Its scheme.
        scheme: String,
    },
    /// A FIFO or a file.
    #[error("stdio: cannot {what} {}", path.display())]
    Path {
        /// What was tried.
        what: &'static str,
        /// With which one.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Something that needs no path.
    #[error("stdio: cannot {what}")]
    Failed {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The user of the container's end of a pipe.
    #[error("cannot give the container's {stream} to {uid}:{gid}")]
    Owner {
        /// Which pipe.
        stream: &'static str,
        /// User.
        uid: u32,
        /// Group.
        gid: u32,
        /// Why not.
        source: io::Error,
    },
    /// The runtime said nothing on the console socket.
    #[error("console socket {}: no terminal came within {within:?}", path.display())]
    NoTerminal {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        within: Duration,
    },
    /// The runtime sent something else.
    #[error("console socket {}: {what} came instead of a terminal", path.display())]
    NotATerminal {
        /// The socket.
        path: PathBuf,
        /// What came.
        what: &'static str,
    },
    /// The logging binary was still running and had not said that it is ready.
    #[error("logging binary {} was not ready within {within:?} and was killed", binary.display())]
    LoggerNotReady {
        /// The binary.
        binary: PathBuf,
        /// How long it was waited for.
        within: Duration,
    },
    /// The logging binary ended before it was ready.
    #[error(
        "logging binary {} ended before the container was started{}",
        binary.display(),
        status.map(|status| format!(", with status {status}")).unwrap_or_default()
    )]
    LoggerEnded {
        /// The binary.
        binary: PathBuf,
        /// Its exit status, or 128 and the signal that ended it; none if it is not known.
        status: Option<u32>,
    },
    /// The process runs already.
    #[error("the container's ends of its stdio have been given away")]
    Started,
}

impl StdioError {
    /// For `map_err`.
    pub(super) fn path(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Path { what, path, source }
    }

    /// For `map_err`.
    pub(super) fn failed<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Failed { what, source: source.into() }
    }
}
