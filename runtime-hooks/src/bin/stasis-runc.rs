//! An OCI runtime with runc's command line that checkpoints and restores containers with CUDA.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match stasis_hooks::helper(arguments.first().map(OsString::as_os_str)) {
        Some(code) => code,
        None => stasis_hooks::oci::main(&arguments),
    }
}
