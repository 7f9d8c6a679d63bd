//! The admin command.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match stasis_hooks::helper(arguments.first().map(OsString::as_os_str)) {
        Some(code) => code,
        None => stasis_hooks::admin::main(&arguments),
    }
}
