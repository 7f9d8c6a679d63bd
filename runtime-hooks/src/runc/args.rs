//! runc's command line, recognised and not parsed away: every token reaches the runtime as it was
//! given, and what is added goes right behind the subcommand.
//!
//! runc's parser is Go's: one dash or two, `--flag value` or `--flag=value`, `--bool=false`, flags
//! repeated, `--` before the last. Flags may follow the container's id, but where the id stands
//! behind a flag without a value: then runc, up to 1.4, and crun refuse the line.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

/// Global options that take a value, of runc and of those that copy its command line.
const VALUED_GLOBALS: &[&str] =
    &["root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager"];

/// Global options without a value.
const BARE_GLOBALS: &[&str] = &["debug", "systemd-cgroup", "version", "v", "help", "h"];

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
    "pidfd-socket",
    "network-lock",
];

/// Options without a value, of the subcommands of which the id is asked.
const BARE_OPTIONS: &[&str] = &[
    "leave-running",
    "tcp-established",
    "tcp-close",
    "tcp-skip-in-flight",
    "link-remap",
    "ext-unix-sk",
    "shell-job",
    "lazy-pages",
    "file-locks",
    "pre-dump",
    "auto-dedup",
    "detach",
    "d",
    "no-subreaper",
    "no-pivot",
    "no-new-keyring",
    "keep",
    "force",
    "f",
    "regex",
    "r",
    "help",
    "h",
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
        // The next word may be the value of an option that is not known here.
        let mut may_be_a_value = false;
        while let Some((index, token)) = tokens.next() {
            match flag(token) {
                Some((name, None)) if VALUED_GLOBALS.contains(&name) => {
                    tokens.next();
                }
                Some((name, value)) => {
                    may_be_a_value = value.is_none() && !BARE_GLOBALS.contains(&name);
                    continue;
                }
                None if token == "--" => {}
                None => {
                    let name = token.to_str()?;
                    if SUBCOMMANDS.contains(&name) {
                        return Some(Self {
                            globals: arguments[..index].to_vec(),
                            subcommand: name.to_owned(),
                            rest: arguments[index + 1..].to_vec(),
                        });
                    }
                    if !may_be_a_value {
                        return None;
                    }
                }
            }
            may_be_a_value = false;
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

    /// The container id. `None` where it is not clear what is the id, or where the runtime refuses
    /// the line anyhow.
    #[must_use]
    pub fn id(&self) -> Option<&OsStr> {
        let id = match self.subcommand.as_str() {
            "checkpoint" | "restore" | "resume" | "pause" | "delete" | "create" | "run" => {
                only_positional(&self.rest)?
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

    /// The file that `exec` is to take the process from; the last one counts.
    #[must_use]
    pub fn exec_process(&self) -> Option<OsString> {
        let mut process = None;
        self.map_exec_process(|value| {
            process = Some(value.to_owned());
            value.to_owned()
        });
        process.filter(|process| !process.is_empty())
    }

    /// The same `exec` with the process from another file.
    #[must_use]
    pub fn with_exec_process(&self, path: &OsStr) -> Self {
        let rest = self.map_exec_process(|_| path.to_owned());
        Self { rest, ..self.clone() }
    }

    /// The tokens after `exec`, with other values of `--process`.
    fn map_exec_process(&self, mut map: impl FnMut(&OsStr) -> OsString) -> Vec<OsString> {
        let id = first_positional(&self.rest, VALUED_EXEC);
        let mut mapped = Vec::with_capacity(self.rest.len());
        let mut tokens = self.rest.iter();
        while let Some(token) = tokens.next() {
            if id.is_some_and(|id| std::ptr::eq(token, id)) {
                mapped.push(token.clone());
                break;
            }
            match flag(token) {
                Some(("process" | "p", Some(value))) => {
                    let mut token = OsString::from("--process=");
                    token.push(map(value));
                    mapped.push(token);
                }
                Some((name, None)) if VALUED_EXEC.contains(&name) => {
                    mapped.push(token.clone());
                    if let Some(value) = tokens.next() {
                        let is_process = matches!(name, "process" | "p");
                        mapped.push(if is_process { map(value) } else { value.clone() });
                    }
                }
                _ => mapped.push(token.clone()),
            }
        }
        mapped.extend(tokens.cloned());
        mapped
    }

    /// Whether only help is asked for.
    #[must_use]
    pub fn asks_for_help(&self) -> bool {
        let is_help = |name: &str| matches!(name, "help" | "h");
        if self.subcommand == "exec" {
            // What follows the id is the program's.
            let id = first_positional(&self.rest, VALUED_EXEC);
            let before =
                self.rest.iter().take_while(|token| id.is_none_or(|id| !std::ptr::eq(*token, id)));
            return flags(before, VALUED_EXEC).any(|(name, _)| is_help(name));
        }
        flags(&self.rest, VALUED_OPTIONS).any(|(name, _)| is_help(name))
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
    "pidfd-socket",
    "cgroup",
];

fn first_positional<'a>(tokens: &'a [OsString], valued: &[&str]) -> Option<&'a OsString> {
    let mut tokens = tokens.iter();
    while let Some(token) = tokens.next() {
        match flag(token) {
            Some((name, None)) if valued.contains(&name) => {
                tokens.next();
            }
            Some(_) => {}
            None if token == "--" => return tokens.next(),
            None => return Some(token),
        }
    }
    None
}

/// The only argument that is neither a flag nor a flag's value.
fn only_positional(tokens: &[OsString]) -> Option<&OsString> {
    let (mut clear, mut doubtful) = (Vec::new(), Vec::new());
    let mut rest = tokens.iter().enumerate();
    // What the token before was.
    let (mut after_bare, mut after_unknown) = (false, false);
    while let Some((index, token)) = rest.next() {
        match flag(token) {
            Some((name, None)) if VALUED_OPTIONS.contains(&name) => {
                rest.next();
                (after_bare, after_unknown) = (false, false);
            }
            Some((name, value)) => {
                after_bare = value.is_none() && BARE_OPTIONS.contains(&name);
                after_unknown = value.is_none() && !after_bare;
            }
            None if token == "--" => {
                clear.extend(rest.by_ref().map(|(_, token)| token));
            }
            None => {
                let is_last = index + 1 == tokens.len();
                if after_bare && !is_last {
                    return None;
                }
                let list = if after_unknown { &mut doubtful } else { &mut clear };
                list.push(token);
                (after_bare, after_unknown) = (false, false);
            }
        }
    }
    match (&*clear, &*doubtful) {
        ([only], _) | ([], [only]) => Some(only),
        _ => None,
    }
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
        flags(&self.0, VALUED_OPTIONS)
    }
}

/// All flags with their values, up to a `--`.
fn flags<'a>(
    tokens: impl IntoIterator<Item = &'a OsString>,
    valued: &[&str],
) -> impl Iterator<Item = (&'a str, Option<&'a OsStr>)> {
    let mut tokens = tokens.into_iter().take_while({
        let mut is_value = false;
        move |token| {
            let end = !is_value && *token == "--";
            is_value =
                !is_value && matches!(flag(token), Some((name, None)) if valued.contains(&name));
            !end
        }
    });
    std::iter::from_fn(move || {
        loop {
            let Some((name, value)) = flag(tokens.next()?) else {
                continue;
            };
            if value.is_none() && valued.contains(&name) {
                return Some((name, tokens.next().map(OsString::as_os_str)));
            }
            return Some((name, value));
        }
    })
}

fn value_of(tokens: &[OsString], names: &[&str], valued: &[&str]) -> Option<OsString> {
    let (_, value) = flags(tokens, valued).filter(|(name, _)| names.contains(name)).last()?;
    value.map(OsStr::to_owned)
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
    fn the_process_of_an_exec_is_replaced_wherever_it_stands() {
        let replaced = |text: &str| {
            let line = line(text).with_exec_process("/new".as_ref());
            let rest: Vec<_> = line.rest.iter().map(|token| token.to_string_lossy()).collect();
            rest.join(" ")
        };
        let shim = "exec --process /p.json --detach --pid-file /f c1";
        assert_eq!(line(shim).exec_process().unwrap(), "/p.json");
        assert_eq!(replaced(shim), "--process /new --detach --pid-file /f c1");
        let by_pidfd = "exec --pidfd-socket /s --process /p.json c1";
        assert_eq!(line(by_pidfd).id().unwrap(), "c1");
        assert_eq!(replaced(by_pidfd), "--pidfd-socket /s --process /new c1");
        let podman = "exec --pid-file /f --process=/p.json c1";
        assert_eq!(line(podman).exec_process().unwrap(), "/p.json");
        assert_eq!(replaced(podman), "--pid-file /f --process=/new c1");
        assert_eq!(replaced("exec -p /p -ignore-paused c1"), "-p /new -ignore-paused c1");
        // The last one counts, and none is left that names another.
        let twice = "exec -p /a --process /b c1";
        assert_eq!(line(twice).exec_process().unwrap(), "/b");
        assert_eq!(replaced(twice), "-p /new --process /new c1");
        // What follows the id is the program's, and a value is no flag.
        for text in ["exec c1 sh -p /x --process=/y", "exec --user -p c1 a", "exec --process= c1"] {
            assert_eq!(line(text).exec_process(), None, "{text}");
        }
        assert_eq!(replaced("exec c1 sh -p /x --process=/y"), "c1 sh -p /x --process=/y");
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
        let none = [
            "--version",
            "--help",
            "nonsense c1",
            "--root checkpoint",
            "nonsense checkpoint c1",
            "--debug nonsense checkpoint c1",
        ];
        for text in none {
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
        // Behind a flag without a value runc stops at it, and refuses the rest.
        assert_eq!(line("restore --detach i1 --image-path img").id(), None);
        assert_eq!(line("restore --image-path img i1 --detach").id().unwrap(), "i1");
        assert_eq!(line("checkpoint --image-path /p i1 i2").id(), None);
        assert_eq!(line("checkpoint --leave-running false i1").id(), None);
        // An option that is not known here, with and without a value.
        assert_eq!(line("restore --new-option value i1").id().unwrap(), "i1");
        assert_eq!(line("restore --new-option=value i1").id().unwrap(), "i1");
        assert_eq!(line("restore --new-option i1").id().unwrap(), "i1");
        assert_eq!(line("restore i1 --new-option value").id().unwrap(), "i1");
    }

    #[test]
    fn two_dashes_end_the_flags() {
        assert_eq!(line("checkpoint -- i1").id().unwrap(), "i1");
        assert_eq!(line("checkpoint --leave-running -- i1").id().unwrap(), "i1");
        let arguments = line("checkpoint -- i1 --image-path /p").arguments();
        assert_eq!(arguments.image_path(), PathBuf::from("checkpoint"));
        assert!(!line("checkpoint -- --leave-running").arguments().has("leave-running"));
        // As a value it ends nothing.
        let arguments = line("checkpoint --image-path -- --leave-running i1").arguments();
        assert_eq!(arguments.image_path(), PathBuf::from("--"));
        assert!(arguments.has("leave-running"));
        assert_eq!(line("--debug -- checkpoint i1").subcommand, "checkpoint");
    }

    #[test]
    fn help_is_seen() {
        assert!(line("checkpoint --help").asks_for_help());
        assert!(line("checkpoint c1 --image-path /p -h").asks_for_help());
        assert!(!line("checkpoint c1").asks_for_help());
        assert!(!line("checkpoint --image-path --help c1").asks_for_help());
        assert!(line("exec --help").asks_for_help());
        assert!(!line("exec -e -h c1 sh -h").asks_for_help());
    }
}
