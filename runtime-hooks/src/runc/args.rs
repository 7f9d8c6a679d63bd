//! runc's command line, recognised and not parsed away: every token reaches the runtime as it was
//! given, and what is added goes right behind the subcommand.
//!
//! runc's parser is Go's: one dash or two, `--flag value` or `--flag=value`, `--bool=false`, flags
//! repeated, and the container id last.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

/// Global options that take a value, of runc and of those that copy its command line.
const VALUED_GLOBALS: &[&str] =
    &["root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager"];

/// Options of `checkpoint` and `restore` that take a value.
const VALUED_OPTIONS: &[&str] = &[
    "image-path",
    "work-path",
    "parent-path",
    "status-fd",
    "page-server",
    "manage-cgroups-mode",
    "empty-ns",
    "console-socket",
    "bundle",
    "b",
    "pid-file",
    "lsm-profile",
    "lsm-mount-context",
    "preserve-fds",
];

/// Subcommands of runc. Needed to tell the subcommand from the value of an unknown option.
const SUBCOMMANDS: &[&str] = &[
    "checkpoint",
    "create",
    "delete",
    "events",
    "exec",
    "features",
    "help",
    "init",
    "kill",
    "list",
    "pause",
    "ps",
    "restore",
    "resume",
    "run",
    "spec",
    "start",
    "state",
    "update",
];

/// A command line of runc.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// Everything before the subcommand.
    pub globals: Vec<OsString>,
    /// The subcommand.
    pub subcommand: String,
    /// Everything after it.
    pub rest: Vec<OsString>,
}

impl CommandLine {
    /// Takes a command line (without the program) apart. `None` if there is no subcommand.
    #[must_use]
    pub fn recognise(arguments: &[OsString]) -> Option<Self> {
        let mut tokens = arguments.iter().enumerate();
        while let Some((index, token)) = tokens.next() {
            match flag(token) {
                Some((name, None)) if VALUED_GLOBALS.contains(&name) => {
                    tokens.next();
                }
                Some(_) => {}
                None => {
                    let name = token.to_str()?;
                    if SUBCOMMANDS.contains(&name) {
                        return Some(Self {
                            globals: arguments[..index].to_vec(),
                            subcommand: name.to_owned(),
                            rest: arguments[index + 1..].to_vec(),
                        });
                    }
                }
            }
        }
        None
    }

    /// The value of a global option; the last one counts, as in Go.
    #[must_use]
    pub fn global(&self, name: &str) -> Option<OsString> {
        value_of(&self.globals, &[name], VALUED_GLOBALS)
    }

    /// What follows the subcommand.
    #[must_use]
    pub fn arguments(&self) -> Arguments {
        Arguments(self.rest.clone())
    }

    /// The container id. Flags may come before it or, if it is the first argument, behind it: runc's
    /// parser sorts them then. `None` where it is not clear what is the id.
    #[must_use]
    pub fn id(&self) -> Option<&OsStr> {
        let id = match self.subcommand.as_str() {
            "checkpoint" | "restore" | "resume" | "pause" | "delete" | "create" | "run" => {
                let first = first_positional(&self.rest, VALUED_OPTIONS)?;
                let is_first = self.rest.first() == Some(first);
                let is_last = self.rest.last().is_some_and(|last| std::ptr::eq(last, first));
                if !is_first && !is_last {
                    return None;
                }
                first
            }
            "exec" => first_positional(&self.rest, VALUED_EXEC)?,
            _ => return None,
        };
        let valid = |byte: &u8| byte.is_ascii_alphanumeric() || b"_+-.".contains(byte);
        let bytes = id.as_bytes();
        // Anything else the runtime refuses, with its own words.
        let fits = !bytes.is_empty()
            && bytes[0] != b'-'
            && bytes.len() <= 1024
            && bytes.iter().all(valid)
            && bytes != b"."
            && bytes != b"..";
        fits.then_some(id.as_os_str())
    }

    /// Whether only help is asked for.
    #[must_use]
    pub fn asks_for_help(&self) -> bool {
        self.rest.iter().any(|token| matches!(flag(token), Some(("help" | "h", None))))
    }
}

/// Options of exec that take a value.
const VALUED_EXEC: &[&str] = &[
    "console-socket",
    "cwd",
    "env",
    "e",
    "user",
    "u",
    "additional-gids",
    "g",
    "process",
    "p",
    "pid-file",
    "process-label",
    "apparmor",
    "cap",
    "c",
    "preserve-fds",
    "cgroup",
    "ignore-paused",
];

fn first_positional<'a>(tokens: &'a [OsString], valued: &[&str]) -> Option<&'a OsString> {
    let mut tokens = tokens.iter();
    while let Some(token) = tokens.next() {
        match flag(token) {
            Some(("ignore-paused", _)) => {}
            Some((name, None)) if valued.contains(&name) => {
                tokens.next();
            }
            Some(_) => {}
            None => return Some(token),
        }
    }
    None
}

/// The tokens after `checkpoint` or `restore`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arguments(Vec<OsString>);

impl Arguments {
    /// The tokens, with `extra` in front.
    #[must_use]
    pub fn with(&self, extra: &[OsString]) -> Vec<OsString> {
        extra.iter().chain(&self.0).cloned().collect()
    }

    /// Whether a boolean flag is set.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.flags().filter(|(found, _)| *found == name).last().is_some_and(|(_, value)| {
            value.is_none_or(|value| {
                matches!(value.to_str(), Some("1" | "t" | "T" | "true" | "TRUE" | "True"))
            })
        })
    }

    /// The value of an option; the last one counts.
    #[must_use]
    pub fn value(&self, names: &[&str]) -> Option<OsString> {
        value_of(&self.0, names, VALUED_OPTIONS)
    }

    /// `--image-path`. runc's default is `checkpoint` in the working directory.
    #[must_use]
    pub fn image_path(&self) -> PathBuf {
        self.value(&["image-path"])
            .filter(|path| !path.is_empty())
            .map_or_else(|| "checkpoint".into(), PathBuf::from)
    }

    /// `--work-path`, where CRIU writes its log; without it CRIU uses the image path.
    #[must_use]
    pub fn work_path(&self) -> Option<PathBuf> {
        Some(
            self.value(&["work-path"])
                .filter(|path| !path.is_empty())
                .map_or_else(|| self.image_path(), PathBuf::from),
        )
    }

    /// `--bundle`; runc's default is the working directory.
    #[must_use]
    pub fn bundle(&self) -> PathBuf {
        self.value(&["bundle", "b"])
            .filter(|path| !path.is_empty())
            .map_or_else(|| ".".into(), PathBuf::from)
    }

    fn flags(&self) -> impl Iterator<Item = (&str, Option<&OsStr>)> {
        let mut tokens = self.0.iter();
        std::iter::from_fn(move || {
            loop {
                let Some((name, value)) = flag(tokens.next()?) else {
                    continue;
                };
                if value.is_none() && VALUED_OPTIONS.contains(&name) {
                    return Some((name, tokens.next().map(OsString::as_os_str)));
                }
                return Some((name, value));
            }
        })
    }
}

fn value_of(tokens: &[OsString], names: &[&str], valued: &[&str]) -> Option<OsString> {
    let mut found = None;
    let mut tokens = tokens.iter();
    while let Some(token) = tokens.next() {
        let Some((name, value)) = flag(token) else {
            continue;
        };
        let value = match value {
            None if valued.contains(&name) => tokens.next().map(OsString::as_os_str),
            value => value,
        };
        if names.contains(&name) {
            found = value.map(OsStr::to_owned);
        }
    }
    found
}

/// Name and `=value` of a token that is a flag.
fn flag(token: &OsStr) -> Option<(&str, Option<&OsStr>)> {
    let bytes = token.as_bytes();
    let name = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-"))?;
    if name.is_empty() {
        return None;
    }
    let (name, value) = match name.iter().position(|&byte| byte == b'=') {
        Some(at) => (&name[..at], Some(OsStr::from_bytes(&name[at + 1..]))),
        None => (name, None),
    };
    Some((std::str::from_utf8(name).ok()?, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> CommandLine {
        let tokens: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        CommandLine::recognise(&tokens).unwrap()
    }

    #[test]
    fn the_line_of_gos_shim() {
        let line = line(
            "--root /run/containerd/runc/default --log /b/log.json --log-format json checkpoint \
             --image-path /i --work-path /w --file-locks --leave-running c1",
        );
        assert_eq!(line.subcommand, "checkpoint");
        assert_eq!(line.id().unwrap(), "c1");
        assert_eq!(line.global("root").unwrap(), "/run/containerd/runc/default");
        assert_eq!(line.global("log-format").unwrap(), "json");
        let arguments = line.arguments();
        assert_eq!(arguments.image_path(), PathBuf::from("/i"));
        assert_eq!(arguments.work_path(), Some("/w".into()));
        assert!(arguments.has("leave-running") && arguments.has("file-locks"));
        assert!(!arguments.has("tcp-established"));
    }

    #[test]
    fn the_restore_of_gos_shim_with_its_single_dash() {
        let line = line(
            "--root /r restore --image-path /i --work-path /w --detach --pid-file /p \
             -no-subreaper --bundle /b c1",
        );
        let arguments = line.arguments();
        assert_eq!(line.id().unwrap(), "c1");
        assert_eq!(arguments.bundle(), PathBuf::from("/b"));
        assert!(arguments.has("no-subreaper") && arguments.has("detach"));
        assert_eq!(arguments.with(&["--x".into()])[..3], ["--x", "--image-path", "/i"]);
    }

    #[test]
    fn values_that_look_like_subcommands_and_flags() {
        let line = line("--root checkpoint --unknown=1 --log=restore --debug pause c1");
        assert_eq!(line.subcommand, "pause");
        assert_eq!(line.global("root").unwrap(), "checkpoint");
        assert_eq!(line.global("log").unwrap(), "restore");
    }

    #[test]
    fn repeated_and_negated_flags_follow_go() {
        let arguments = line(
            "checkpoint --leave-running --leave-running=false -image-path=/a --image-path /b c1",
        )
        .arguments();
        assert!(!arguments.has("leave-running"));
        assert_eq!(arguments.image_path(), PathBuf::from("/b"));
        let arguments = line("checkpoint --leave-running --leave-running c1").arguments();
        assert!(arguments.has("leave-running"));
        // The value of an option is not a flag.
        assert!(
            !line("checkpoint --work-path --leave-running c1").arguments().has("leave-running")
        );
    }

    #[test]
    fn no_subcommand_is_none() {
        for text in ["--version", "--help", "nonsense c1", "--root checkpoint"] {
            let tokens: Vec<OsString> = text.split(' ').map(OsString::from).collect();
            assert_eq!(CommandLine::recognise(&tokens), None, "{text}");
        }
        assert_eq!(CommandLine::recognise(&[]), None);
    }

    #[test]
    fn ids_that_would_lead_elsewhere_are_left_to_the_runtime() {
        for id in ["../x", "..", ".", "", "a/b", "--image-path", "a b"] {
            let tokens = ["checkpoint".into(), OsString::from(id)];
            assert_eq!(CommandLine::recognise(&tokens).unwrap().id(), None, "{id}");
        }
        assert_eq!(line("exec --process /p --detach c1 sh -c x").id().unwrap(), "c1");
        assert_eq!(line("exec -e A=b --ignore-paused c1").id().unwrap(), "c1");
    }

    #[test]
    fn the_id_may_come_first_and_must_be_clear() {
        assert_eq!(line("restore i1 --image-path /p --detach").id().unwrap(), "i1");
        assert_eq!(
            line("restore i1 --image-path /p").arguments().image_path(),
            PathBuf::from("/p")
        );
        // Go stops at the first argument that is no flag; runc then refuses the rest.
        assert_eq!(line("restore --detach i1 --image-path img").id(), None);
        // The value of an option that is not known here.
        assert_eq!(line("restore --new-option value i1").id(), None);
        assert_eq!(line("restore --new-option=value i1").id().unwrap(), "i1");
    }

    #[test]
    fn help_is_seen() {
        assert!(line("checkpoint --help").asks_for_help());
        assert!(!line("checkpoint c1").asks_for_help());
    }
}
