//! What the build makes of the command line of `stasis`: man pages and completions.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::command;

/// It may have to be compiled.
const LIMIT: Duration = Duration::from_secs(600);

/// Makes them in a directory, as the Makefile does.
pub fn make(directory: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args([
        "run",
        "--locked",
        "--quiet",
        "--package",
        "stasis-hooks",
        "--example",
        "manual",
    ]);
    command.arg("--").arg(directory).current_dir(env!("CARGO_MANIFEST_DIR"));
    command::succeed(&mut command, LIMIT).map(drop)
}
