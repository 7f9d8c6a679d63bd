//! `stasis`: the command for people.

mod check;
mod inspect;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;

const HELP: &str = "\
Checkpoint and restore of GPU containers.

Usage: stasis <command> [options]

Commands:
  check [--json]   Is this host ready? A line for each requirement, with what to do.
                   Exit status 0 only if containers with CUDA can be checkpointed.
  inspect [--json] IMAGE
                   What is in the image directory IMAGE, and what a restore needs.
                   Exit status 0 only if the image is whole.

Options:
  -h, --help       This text.
  -V, --version    The version.

Containers are checkpointed and restored with the commands of containerd, through the OCI runtime
stasis-runc. Configuration: /etc/stasis/config.toml, or the file that STASIS_CONFIG names.
";

/// Runs `stasis` with `arguments` (without the program's name).
#[must_use]
pub fn main(arguments: &[OsString]) -> ExitCode {
    let words: Vec<&str> =
        arguments.iter().map(|argument| argument.to_str().unwrap_or("\u{fffd}")).collect();
    match words.as_slice() {
        ["-h" | "--help" | "help"] | ["check", "-h" | "--help"] => print(HELP),
        ["-V" | "--version"] => print(concat!("stasis ", env!("CARGO_PKG_VERSION"), "\n")),
        ["check"] => check::run(false),
        ["check", "--json"] => check::run(true),
        ["inspect", ..] => inspect::main(&arguments[1..]),
        [] => usage("which command?"),
        words => {
            let said = words.join(" ").replace(char::is_control, "?");
            usage(&format!("'{said}' is not understood"))
        }
    }
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn usage(what: &str) -> ExitCode {
    eprintln!("stasis: {what}; see stasis --help");
    ExitCode::from(2)
}
