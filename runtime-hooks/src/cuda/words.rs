//! What NVIDIA's command says, and what that means as values of `cuda.h`.
//!
//! Understood strictly: what is not one of its known words is an error that quotes it. On standard
//! error there may be noise, of the dynamic loader for example; a success is not read there.

use stasis_config::text::printable;

use super::utility::Said;
use super::{Call, CudaError, Steps};
use crate::processes::Pid;

/// What it offers, by its `--help`: of 550 to 554 the toggle alone.
pub(super) fn steps(said: &Said) -> Result<Steps, String> {
    let shown: Vec<&str> = said
        .output
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
        .filter(|word| word.starts_with("--"))
        .collect();
    if !said.status.success() || !shown.contains(&"--toggle") {
        return Err(format!("--help: {}", whole(said)));
    }
    let (there, lacking): (Vec<&str>, Vec<&str>) =
        SEPARATE.iter().partition(|option| shown.contains(option));
    match (there.first(), lacking.first()) {
        (Some(_), None) => Ok(Steps::Separate),
        (None, _) => Ok(Steps::Toggle),
        (Some(there), Some(lacking)) => {
            Err(format!("--help: it has {there} and not {lacking}, which is not understood"))
        }
    }
}

/// The options that came together, with 555.
const SEPARATE: [&str; 4] = ["--action", "--get-state", "--get-restore-tid", "--timeout"];

/// The code and the value of a call, as libcuda would have given them.
pub(super) fn answer(call: Call, pid: Pid, said: &Said) -> Result<(i32, i32), String> {
    if said.status.success() {
        let word = said.output.strip_suffix('\n').unwrap_or(&said.output);
        let value = match call {
            Call::State => state(word),
            Call::Probe => word.parse().ok().filter(|tid| *tid > 0 && is_number(word)),
            _ => Some(0),
        };
        return value.map(|value| (0, value)).ok_or_else(|| whole(said));
    }
    // The only sentence without words of the driver's: it has none.
    let none = format!("Could not find restore thread for process ID {pid}");
    if call == Call::Probe && said.errors.lines().any(|line| line == none) {
        return Ok((CudaError::NOT_INITIALIZED.0, 0));
    }
    let code = said.errors.lines().rev().find_map(|line| code(words_of_driver(line)?));
    code.map(|code| (code, 0)).ok_or_else(|| whole(said))
}

fn is_number(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_digit())
}

/// The names of `CUprocessState`, in small letters.
fn state(word: &str) -> Option<i32> {
    ["running", "locked", "checkpointed", "failed"]
        .iter()
        .position(|name| *name == word)
        .and_then(|state| state.try_into().ok())
}

/// `Could not lock on process ID 7: "device not ready"`: what is between the marks.
fn words_of_driver(line: &str) -> Option<&str> {
    let (before, words) = line.strip_suffix('"')?.rsplit_once(": \"")?;
    before.contains("process ID ").then_some(words)
}

/// The code that `cuGetErrorString` has these words for.
fn code(words: &str) -> Option<i32> {
    TEXTS.iter().find(|(_, text)| *text == words).map(|(code, _)| *code)
}

/// By `cuGetErrorString`.
const TEXTS: &[(i32, &str)] = &[
    (1, "invalid argument"),
    (2, "out of memory"),
    (3, "initialization error"),
    (4, "driver shutting down"),
    (34, "CUDA driver is a stub library"),
    (46, "CUDA-capable device(s) is/are busy or unavailable"),
    (100, "no CUDA-capable device is detected"),
    (101, "invalid device ordinal"),
    (201, "invalid device context"),
    (304, "OS call failed or operation not supported on this OS"),
    (400, "invalid resource handle"),
    (401, "the operation cannot be performed in the present state"),
    (500, "named symbol not found"),
    (600, "device not ready"),
    (700, "an illegal memory access was encountered"),
    (719, "unspecified launch failure"),
    (801, "operation not supported"),
    (802, "system not yet initialized"),
    (803, "system has unsupported display driver / cuda driver combination"),
    (909, "wait operation timed out"),
    (999, "unknown error"),
];

/// How much of what it said goes into an error, in characters.
const SHOWN: usize = 256;

/// All that it said, on one line.
fn whole(said: &Said) -> String {
    let words: Vec<&str> =
        said.output.split_whitespace().chain(said.errors.split_whitespace()).collect();
    format!("{}, it said `{}`", said.status, printable(&words.join(" "), SHOWN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    fn said(code: i32, output: &str, errors: &str) -> Said {
        let status = ExitStatus::from_raw(code << 8);
        Said { status, output: output.into(), errors: errors.into() }
    }

    #[test]
    fn a_state_is_one_known_word() {
        let state = |output: &str| answer(Call::State, 7, &said(0, output, "noise\n"));
        assert_eq!(state("running\n"), Ok((0, 0)));
        assert_eq!(state("locked\n"), Ok((0, 1)));
        assert_eq!(state("checkpointed\n"), Ok((0, 2)));
        assert_eq!(state("failed\n"), Ok((0, 3)));
        for wrong in
            ["", "Running\n", " running\n", "running\n\n", "running locked\n", "restoring\n"]
        {
            assert!(state(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(
            state("rest\u{1b}oring\n").unwrap_err(),
            "exit status: 0, it said `rest\\u{1b}oring noise`"
        );
    }

    #[test]
    fn a_thread_is_one_number() {
        let tid = |output: &str| answer(Call::Probe, 7, &said(0, output, ""));
        assert_eq!(tid("618\n"), Ok((0, 618)));
        for wrong in ["", "0\n", "-1\n", "+618\n", "618 \n", "618\n619\n", "99999999999\n"] {
            assert!(tid(wrong).is_err(), "{wrong:?}");
        }
    }

    /// Word for word as a driver 580 has said it.
    #[test]
    fn the_drivers_words_are_its_codes() {
        let noise = "ERROR: ld.so: object '/no/such.so' from LD_PRELOAD cannot be preloaded (cannot \
                     open shared object file): ignored.\n";
        for (call, line, code) in [
            (Call::Lock, "Could not lock on process ID 7: \"device not ready\"", 600),
            (Call::Lock, "Could not lock on process ID 7: \"initialization error\"", 3),
            (
                Call::Checkpoint,
                "Could not checkpoint on process ID 7: \"the operation cannot be performed in the \
                 present state\"",
                401,
            ),
            (Call::Lock, "Error toggling CUDA in process ID 7: \"operation not supported\"", 801),
            (
                Call::State,
                "Error getting process state for process ID 7: \"OS call failed or operation not \
                 supported on this OS\"",
                304,
            ),
            (Call::Probe, "Could not find restore thread for process ID 7", 3),
        ] {
            let answered = answer(call, 7, &said(1, "", &format!("{noise}{line}\n{noise}")));
            assert_eq!(answered, Ok((code, 0)), "{line}");
        }
    }

    #[test]
    fn unknown_words_are_quoted() {
        let line = "Could not lock on process ID 7: \"too much of it\"";
        let why = answer(Call::Lock, 7, &said(1, "", line)).unwrap_err();
        assert_eq!(why, format!("exit status: 1, it said `{line}`"));
        let long = answer(Call::Lock, 7, &said(1, "", &"x".repeat(9000))).unwrap_err();
        assert!(long.len() < 1000, "{}", long.len());
        let killed = Said { status: ExitStatus::from_raw(9), ..said(0, "", "") };
        assert!(answer(Call::Lock, 7, &killed).unwrap_err().starts_with("signal: 9"));
        // Words that are somebody else's.
        assert!(answer(Call::Lock, 7, &said(1, "", "hint: \"device not ready\"")).is_err());
    }

    #[test]
    fn what_it_offers_is_read_from_its_help() {
        let of_550 = "CUDA checkpoint and restore utility.\nToggles the state of CUDA within a process \
                      between suspended and running.\nVersion 550.54.09.\n\n    --toggle --pid <value>\n\
                      \x20       Toggle the state of CUDA in the specified process.\n\n    --help\n";
        let of_570 = "Operations:\n--get-state --pid <pid>\n--action lock | checkpoint | restore | unlock \
                      --pid <pid> [--timeout <ms>]\n--toggle --pid <pid>\n--get-restore-tid --pid <pid>\n\
                      Options:\n--pid|-p <pid>\n--timeout|-t <timeout>\n--help|-h\n";
        assert_eq!(steps(&said(0, of_550, "")), Ok(Steps::Toggle));
        assert_eq!(steps(&said(0, of_570, "")), Ok(Steps::Separate));
        let half = of_570.replace("--get-state", "--got-state");
        let why = steps(&said(0, &half, "")).unwrap_err();
        assert!(why.contains("--action") && why.contains("--get-state"), "{why}");
        assert!(steps(&said(1, of_570, "")).is_err());
        assert!(steps(&said(0, "usage: something --else", "")).is_err());
        // What people write on standard error is none of its help.
        assert!(steps(&said(0, "", of_570)).is_err());
    }
}
