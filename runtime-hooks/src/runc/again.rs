//! A runtime that leads back to the program that called it.
//!
//! `runtime.path` may name a script, or nvidia-container-runtime, which has a list of runtimes of
//! its own. If that comes back here, both would execute each other for ever: with `execve` no
//! process is made, so nothing else would end it. So each call of the runtime carries in its
//! environment which call it is.

use std::ffi::{OsStr, OsString};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::process::Command;

use super::args::CommandLine;
use crate::processes::start_time;

/// The variable; nothing else is added to the runtime's environment.
pub const VARIABLE: &str = "_STASIS_CALL";

/// Marks a call of the runtime.
pub fn mark(command: &mut Command, line: &CommandLine) {
    if let Some(process) = this_process() {
        let mut value = OsString::from(process);
        value.push(" ");
        value.push(call(Some(line)));
        command.env(VARIABLE, value);
    }
}

/// Marks one whose command line is not understood, such as `--version`.
pub fn mark_unknown(command: &mut Command) {
    if let Some(process) = this_process() {
        command.env(VARIABLE, format!("{process} "));
    }
}

/// Whether this call was made by itself: the same subcommand for the same container, by a process
/// that has not ended (it is this one, where it was executed, or waits for it).
///
/// Another subcommand is none: a container's hooks run with the runtime's environment, and may
/// call it.
#[must_use]
pub fn is_again(value: Option<&OsStr>, line: Option<&CommandLine>) -> bool {
    let Some(value) = value.map(OsStr::as_bytes) else { return false };
    let mut fields = value.splitn(3, |&byte| byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse::<u64>().ok();
    let (Some(pid), Some(started)) = (number(), number()) else { return false };
    let same = fields.next() == Some(call(line).as_bytes());
    same && i32::try_from(pid).is_ok_and(|pid| start_time(pid) == Some(started))
}

/// What tells this process from all others: pid and start time.
fn this_process() -> Option<String> {
    let pid = std::process::id();
    let started = start_time(i32::try_from(pid).ok()?)?;
    Some(format!("{pid} {started}"))
}

/// Subcommand and container, or what stands for it; empty if neither is known.
fn call(line: Option<&CommandLine>) -> OsString {
    let Some(line) = line else { return OsString::new() };
    // Where the line's id is not looked for, all of it, in short: a hook may start another container.
    let rest = || {
        let mut hasher = DefaultHasher::new();
        line.rest.hash(&mut hasher);
        format!("{:016x}", hasher.finish()).into()
    };
    let id = line.id().map_or_else(rest, ToOwned::to_owned);
    OsString::from_vec([line.subcommand.as_bytes(), b" ", id.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Option<CommandLine> {
        let tokens: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        CommandLine::recognise(&tokens)
    }

    /// What a call of the runtime for a command line finds in its environment.
    fn marked(text: &str) -> OsString {
        let mut command = Command::new("true");
        match line(text) {
            Some(line) => mark(&mut command, &line),
            None => mark_unknown(&mut command),
        }
        let (_, value) = command.get_envs().find(|(name, _)| *name == VARIABLE).unwrap();
        value.unwrap().to_owned()
    }

    #[test]
    fn the_same_call_is_again_whatever_a_wrapper_adds() {
        let create = marked("--root /r create --bundle /b c1");
        assert!(is_again(Some(&create), line("--debug create --bundle /b c1").as_ref()));
        let version = marked("--version");
        assert!(is_again(Some(&version), line("--version").as_ref()));
    }

    #[test]
    fn what_a_hook_calls_is_another() {
        let create = marked("create --bundle /b c1");
        assert!(!is_again(Some(&create), line("state c1").as_ref()));
        assert!(!is_again(Some(&create), line("create --bundle /b c2").as_ref()));
        assert!(!is_again(Some(&create), line("--version").as_ref()));
        for subcommand in ["start", "kill", "state"] {
            let outer = marked(&format!("{subcommand} c1"));
            assert!(!is_again(Some(&outer), line(&format!("{subcommand} c2")).as_ref()));
            assert!(is_again(Some(&outer), line(&format!("{subcommand} c1")).as_ref()));
        }
        assert!(!is_again(None, line("create c1").as_ref()));
    }

    #[test]
    fn one_that_has_ended_calls_nothing() {
        let mut ended = Command::new("true").spawn().unwrap();
        let started = start_time(i32::try_from(ended.id()).unwrap()).unwrap_or_default();
        let value = OsString::from(format!("{} {started} create c1", ended.id()));
        ended.wait().unwrap();
        assert!(!is_again(Some(&value), line("create c1").as_ref()));
        for nonsense in ["", "1", "x y create c1", "-1 0 create c1"] {
            assert!(!is_again(Some(OsStr::new(nonsense)), line("create c1").as_ref()));
        }
    }
}
