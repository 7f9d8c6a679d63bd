//! Where output is to go, as the request words it.

use std::path::PathBuf;

use url::{ParseError, Url};

use super::StdioError;

/// Where the outputs of a process go.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outputs {
    /// Both to a logging binary. As in Go's shim it has both even if only one was asked for.
    Logger(Binary),
    /// Each to its own place, or nowhere.
    Places {
        /// Standard output, or the terminal.
        stdout: Option<Place>,
        /// Standard error.
        stderr: Option<Place>,
    },
}

/// A place in the file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// What exists under this path: a FIFO, as a rule.
    Existing(PathBuf),
    /// A file to append to, made if it does not exist.
    File(PathBuf),
}

/// A logging binary.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Binary {
    /// The executable.
    pub(super) path: PathBuf,
    /// Its arguments.
    pub(super) arguments: Vec<String>,
}

enum Target {
    Logger(Binary),
    Place(Place),
}

impl Outputs {
    /// Reads both. As in Go's shim stdout decides: its logger or file takes stderr as well.
    pub(super) fn parse(stdout: &str, stderr: &str) -> Result<Self, StdioError> {
        let first = if stdout.is_empty() { stderr } else { stdout };
        if first.is_empty() {
            return Ok(Self::Places { stdout: None, stderr: None });
        }
        let place = match Target::parse(first)? {
            Target::Logger(binary) => return Ok(Self::Logger(binary)),
            Target::Place(place) => place,
        };
        if stdout.is_empty() {
            return Ok(Self::Places { stdout: None, stderr: Some(place) });
        }
        let second = match &place {
            _ if stderr.is_empty() => None,
            Place::File(_) => Some(place.clone()),
            Place::Existing(_) => match Target::parse(stderr)? {
                Target::Place(place) => Some(place),
                Target::Logger(_) => {
                    let reason = "a logging binary for stderr only".to_owned();
                    return Err(StdioError::Uri { uri: stderr.to_owned(), reason });
                }
            },
        };
        Ok(Self::Places { stdout: Some(place), stderr: second })
    }
}

impl Target {
    fn parse(uri: &str) -> Result<Self, StdioError> {
        let wrong = |reason: String| StdioError::Uri { uri: uri.to_owned(), reason };
        let url = match Url::parse(uri) {
            Ok(url) => url,
            // A path, which may hold anything, also what would be an escape in a URL.
            Err(ParseError::RelativeUrlWithoutBase) => return Ok(Self::existing(uri)),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let path = || {
            url.to_file_path()
                .ok()
                .filter(|path| path.file_name().is_some())
                .ok_or_else(|| wrong("no absolute path in it".to_owned()))
        };
        match url.scheme() {
            "fifo" => Ok(Self::Place(Place::Existing(path()?))),
            "file" => Ok(Self::Place(Place::File(path()?))),
            "binary" => Ok(Self::Logger(Binary { path: path()?, arguments: arguments(&url) })),
            scheme => Err(StdioError::Scheme { uri: uri.to_owned(), scheme: scheme.to_owned() }),
        }
    }

    fn existing(path: &str) -> Self {
        Self::Place(Place::Existing(path.into()))
    }
}

/// Each key and its first value, which may be empty. Go's shim iterates over a map, so that its
/// order changes from call to call; here it is the query's.
fn arguments(url: &Url) -> Vec<String> {
    let mut keys = Vec::new();
    let mut arguments = Vec::new();
    for (key, value) in url.query_pairs() {
        if !keys.contains(&key) {
            arguments.extend([key.clone().into_owned(), value.into_owned()]);
            keys.push(key);
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        let existing = |path: &str| Some(Place::Existing(path.into()));
        let file = |path: &str| Some(Place::File(path.into()));
        for (stdout, stderr, first, second) in [
            ("", "", None, None),
            ("/run/%zz?a#b", "", existing("/run/%zz?a#b"), None),
            ("", "/run/err", None, existing("/run/err")),
            ("fifo:///run/o%20ut", "/run/err", existing("/run/o ut"), existing("/run/err")),
            ("file:///var/log/a%20b", "", file("/var/log/a b"), None),
            ("file:///a", "file:///b", file("/a"), file("/a")),
            ("/run/out", "file:///b", existing("/run/out"), file("/b")),
        ] {
            let places = Outputs::Places { stdout: first, stderr: second };
            assert_eq!(Outputs::parse(stdout, stderr).unwrap(), places, "{stdout} {stderr}");
        }
    }

    #[test]
    fn a_loggers_arguments_are_the_keys_and_their_first_values_in_order() {
        let uri = "binary:///opt/my%20logger?z=1&_NERDCTL_INTERNAL_LOGGING=%2Fvar%2Flib&z=2&flag";
        let arguments =
            ["z", "1", "_NERDCTL_INTERNAL_LOGGING", "/var/lib", "flag", ""].map(str::to_owned);
        for (stdout, stderr) in [(uri, uri), (uri, ""), (uri, "/run/err"), ("", uri)] {
            let binary =
                Binary { path: "/opt/my logger".into(), arguments: arguments.clone().into() };
            assert_eq!(Outputs::parse(stdout, stderr).unwrap(), Outputs::Logger(binary));
        }
    }

    #[test]
    fn what_is_refused_is_named() {
        for (stdout, stderr, words) in [
            ("npipe:////x", "", "\"npipe:////x\": unknown scheme npipe"),
            ("/run/out", "what:/x", "\"what:/x\": unknown scheme what"),
            ("binary://", "", "\"binary://\": no absolute path"),
            ("file://host/x", "", "\"file://host/x\": no absolute path"),
            ("/run/out", "binary:///logger", "for stderr only"),
        ] {
            let error = Outputs::parse(stdout, stderr).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
