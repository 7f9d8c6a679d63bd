//! `stasis-runc`: an OCI runtime with runc's command line.
//!
//! checkpoint, restore, resume and delete stay in front of the runtime; all else prepares and is
//! then replaced by it (`execve`), so that it costs no process and nothing can differ.

mod operations;
mod path;
mod report;

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use stasis_config::Config;

use crate::runc::args::CommandLine;
use report::Report;

/// Runs `stasis-runc` with `arguments` (without the program's name).
#[must_use]
pub fn main(arguments: &[OsString]) -> ExitCode {
    run_as(arguments, Caller::default())
}

/// What a caller that has the engine in its own executable decides for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Caller {
    /// The runtime, instead of the configured one.
    pub runtime: Option<PathBuf>,
    /// The configuration file, instead of this host's.
    pub config: Option<PathBuf>,
}

/// Runs a call of the runtime with `arguments` (without the program's name) as `stasis-runc` would.
#[must_use]
pub fn run_as(arguments: &[OsString], caller: Caller) -> ExitCode {
    let line = CommandLine::recognise(arguments);
    let report = Report::new(line.as_ref());
    let config = match caller.config.as_deref().map_or_else(Config::load, Config::from_file) {
        Ok(config) => Ok(config),
        // A slip in the configuration must not make containers that run undeletable.
        Err(_) if !line.as_ref().is_some_and(needs_configuration) => Ok(Config::default()),
        Err(error) => {
            let text = crate::error::chain(&error);
            Err(anyhow::Error::msg(format!("stasis: {text}; nothing was done")))
        }
    };
    let done = config.and_then(|mut config| {
        if let Some(runtime) = caller.runtime {
            config.runtime.path = runtime;
        }
        report::log_to(&config.log);
        run(&config, arguments, line.as_ref())
    });
    match done {
        Ok(code) => code,
        Err(error) => {
            report.error(&format!("{error:#}").replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

/// Whether a subcommand is more than the runtime's.
fn needs_configuration(line: &CommandLine) -> bool {
    matches!(line.subcommand.as_str(), "checkpoint" | "restore" | "resume" | "create" | "run")
}

fn run(
    config: &Config,
    arguments: &[OsString],
    line: Option<&CommandLine>,
) -> anyhow::Result<ExitCode> {
    let program = path::runtime(&config.runtime.path)?;
    let recognised = line.and_then(|line| Some((line, line.id()?.to_str()?)));
    if let Some((line, id)) = recognised
        && !line.asks_for_help()
    {
        let context = Context { config, program: &program, line, id };
        let operation = line.subcommand.as_str();
        let _span = tracing::info_span!("engine", operation, container = id).entered();
        match line.subcommand.as_str() {
            "checkpoint" => return operations::checkpoint(&context),
            "restore" => return operations::restore(&context),
            "resume" => return operations::resume(&context),
            "delete" => return operations::delete(&context),
            "create" | "run" => operations::check_annotations(&context)?,
            "pause" | "exec" => operations::repair_first(&context)?,
            _ => {}
        }
    }
    // Without an id nothing can be done around the runtime, and restoring CUDA takes more than it.
    if let Some(line) = line.filter(|line| line.subcommand == "restore" && !line.asks_for_help()) {
        operations::refuse_cuda(line)?;
    }
    match become_runtime(&program, arguments)? {}
}

/// What an operation works with.
struct Context<'a> {
    config: &'a Config,
    program: &'a Path,
    line: &'a CommandLine,
    id: &'a str,
}

impl Context<'_> {
    /// The runtime's root directory: where its containers' states are.
    fn root(&self) -> PathBuf {
        self.line.global("root").map_or_else(
            || match self.program.file_name().and_then(OsStr::to_str) {
                Some("crun") => "/run/crun".into(),
                _ => "/run/runc".into(),
            },
            PathBuf::from,
        )
    }

    /// The runtime in our place, with the caller's arguments.
    fn become_runtime(&self) -> anyhow::Result<Infallible> {
        let CommandLine { globals, subcommand, rest } = self.line;
        let mut arguments = globals.clone();
        arguments.push(subcommand.into());
        arguments.extend_from_slice(rest);
        become_runtime(self.program, &arguments)
    }
}

/// Replaces this process. Environment, descriptors, directory and signal mask stay.
fn become_runtime(program: &Path, arguments: &[OsString]) -> anyhow::Result<Infallible> {
    let error = Command::new(program).args(arguments).exec();
    Err(anyhow::Error::new(error).context(format!(
        "stasis: cannot execute {}; set runtime.path in config.toml",
        program.display()
    )))
}
