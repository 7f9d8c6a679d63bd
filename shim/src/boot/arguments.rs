//! The command line that containerd gives a shim: flags of Go's form, then an action.

use std::ffi::OsString;
use std::path::PathBuf;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// No action: be the server.
    Serve,
    /// `start`
    Start,
    /// `delete`
    Delete,
    /// `-info`
    Info,
    /// `-v`
    Version,
}

/// A command line that makes sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments {
    /// What is to be done.
    pub action: Action,
    /// The container's namespace; a plain name, except for [`Action::Info`] and
    /// [`Action::Version`].
    pub namespace: String,
    /// The container's id; a plain name, with the same exceptions. A server has that of the first
    /// container of its group.
    pub id: String,
    /// containerd's gRPC socket.
    pub address: String,
    /// A socket to serve on instead of the inherited one. containerd does not give it.
    pub socket: Option<PathBuf>,
    /// The bundle, if it is not the working directory.
    pub bundle: Option<PathBuf>,
    /// Whether everything is to be logged.
    pub debug: bool,
}

/// A command line that makes none.
#[derive(Debug, thiserror::Error)]
pub enum ArgumentsError {
    /// Not flags that a shim has.
    #[error("{0}")]
    Flags(String),
    /// Not an action that a shim has.
    #[error("unknown action `{}`, expected start, delete or none", .0.escape_debug())]
    Action(String),
    /// A name with which no path can be made.
    #[error("-{flag}: expected a name without `/`, found `{}`", value.escape_debug())]
    Name {
        /// Of what.
        flag: &'static str,
        /// The name.
        value: String,
    },
}

impl Arguments {
    /// Parses them, without the program's name. `-publish-binary` is accepted and not used: events
    /// go through containerd's ttrpc socket.
    pub fn parse(arguments: &[OsString]) -> Result<Self, ArgumentsError> {
        let flags = containerd_shim::parse(arguments)
            .map_err(|error| ArgumentsError::Flags(error.to_string()))?;
        let action = match flags.action.as_str() {
            _ if flags.version => Action::Version,
            _ if flags.info => Action::Info,
            "" => Action::Serve,
            "start" => Action::Start,
            "delete" => Action::Delete,
            // Go's shim would become a server. That can only be a mistake.
            other => return Err(ArgumentsError::Action(other.to_owned())),
        };
        if !matches!(action, Action::Version | Action::Info) {
            // Both become parts of paths below which things are deleted.
            name("namespace", &flags.namespace)?;
            name("id", &flags.id)?;
        }
        let path = |text: String| (!text.is_empty()).then(|| PathBuf::from(text));
        Ok(Self {
            action,
            namespace: flags.namespace,
            id: flags.id,
            address: flags.address,
            socket: path(flags.socket),
            bundle: path(flags.bundle),
            debug: flags.debug,
        })
    }
}

fn name(flag: &'static str, value: &str) -> Result<(), ArgumentsError> {
    let plain = !matches!(value, "" | "." | "..")
        && !value.contains('/')
        && !value.chars().any(char::is_control);
    if plain { Ok(()) } else { Err(ArgumentsError::Name { flag, value: value.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        Arguments::parse(&words).map_err(|error| error.to_string())
    }

    #[test]
    fn what_containerd_gives_is_understood() {
        let start = parse(
            "-namespace k8s.io -address /run/c.sock -publish-binary /usr/bin/containerd -id c1 \
             -debug start",
        );
        let want = Arguments {
            action: Action::Start,
            namespace: "k8s.io".into(),
            id: "c1".into(),
            address: "/run/c.sock".into(),
            socket: None,
            bundle: None,
            debug: true,
        };
        assert_eq!(start.as_ref(), Ok(&want));
        let delete = parse("-namespace k8s.io -address /run/c.sock -id c1 -bundle /b delete");
        let bundle = Some(PathBuf::from("/b"));
        let want = Arguments { action: Action::Delete, bundle, debug: false, ..want };
        assert_eq!(delete.as_ref(), Ok(&want));
        let serve = parse("-namespace k8s.io --id=c1 -address /run/c.sock").unwrap();
        assert_eq!(serve, Arguments { action: Action::Serve, bundle: None, ..want });
    }

    #[test]
    fn version_and_info_need_no_names() {
        for (line, action) in
            [("-v", Action::Version), ("-version", Action::Version), ("-info", Action::Info)]
        {
            assert_eq!(parse(line).unwrap().action, action);
        }
    }

    #[test]
    fn names_that_lead_elsewhere_and_unknown_words_are_refused() {
        let table = [
            ("-namespace n -id ../c delete", "-id: expected a name without `/`, found `../c`"),
            ("-namespace n -id .. delete", "-id: expected a name without `/`, found `..`"),
            ("-namespace n delete", "-id: expected a name without `/`, found ``"),
            ("-id c start", "-namespace: expected a name without `/`, found ``"),
            ("-namespace a/b -id c", "-namespace: expected a name without `/`, found `a/b`"),
            ("-namespace n -id c stop", "unknown action `stop`, expected start, delete or none"),
        ];
        for (line, want) in table {
            assert_eq!(parse(line), Err(want.to_owned()), "{line}");
        }
        assert!(parse("-namespace n -frobnicate start").unwrap_err().contains("frobnicate"));
    }
}
