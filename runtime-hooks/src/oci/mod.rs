//! `stasis-runc`: an OCI runtime with runc's command line.
//!
//! checkpoint, restore, resume and delete stay in front of the runtime; all else prepares and is
//! then replaced by it (`execve`), so that it costs no process and nothing can differ.

#[cfg(test)]
mod fuzz;
mod operations;
mod path;
mod report;

use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use stasis_config::Config;

use crate::runc::again;
use crate::runc::args::CommandLine;
use path::Flavour;
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
    let config = match caller.config.as_deref().map_or_else(Config::load, Config::from_file) {
        Ok(config) => Ok(config),
        // A slip in the configuration must not make containers that run undeletable.
        Err(_) if !line.as_ref().is_some_and(needs_configuration) => Ok(Config::default()),
        Err(error) => {
            let text = crate::error::chain(&error);
            Err(anyhow::Error::msg(format!("stasis: {text}; nothing was done")))
        }
    };
    let config = config.map(|mut config| {
        if let Some(runtime) = caller.runtime {
            config.runtime.path = runtime;
        }
        config
    });
    let runtime = config.as_ref().map(|config| config.runtime.path.clone()).unwrap_or_default();
    let done = config.and_then(|config| {
        report::log_to(&config.log);
        run(&config, arguments, line.as_ref(), &execute)
    });
    match done {
        Ok(code) => code,
        Err(error) => {
            let report = Report::new(line.as_ref(), Flavour::of(&runtime));
            report.error(&format!("{error:#}").replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

/// Replaces this process by a program, and comes back only if that fails. Environment, descriptors,
/// directory and signal mask stay.
type Execute<'a> = dyn Fn(&mut Command) -> io::Error + 'a;

fn execute(command: &mut Command) -> io::Error {
    command.exec()
}

/// Whether a subcommand is more than the runtime's.
fn needs_configuration(line: &CommandLine) -> bool {
    matches!(line.subcommand.as_str(), "checkpoint" | "restore" | "resume" | "create" | "run")
}

fn run(
    config: &Config,
    arguments: &[OsString],
    line: Option<&CommandLine>,
    execute: &Execute<'_>,
) -> anyhow::Result<ExitCode> {
    let program = path::runtime(&config.runtime.path)?;
    if again::is_again(std::env::var_os(again::VARIABLE).as_deref(), line) {
        anyhow::bail!(
            "stasis: runtime {} leads back to stasis-runc; set runtime.path in config.toml to the \
             runtime itself, or make what it names call another one",
            program.display()
        );
    }
    let recognised = line.and_then(|line| Some((line, line.id()?.to_str()?)));
    if let Some((line, id)) = recognised
        && !line.asks_for_help()
    {
        let context = Context { config, program: &program, line, id, execute };
        let operation = line.subcommand.as_str();
        let _span = tracing::info_span!("engine", operation, container = id).entered();
        match line.subcommand.as_str() {
            "checkpoint" => return operations::checkpoint(&context),
            "restore" => return operations::restore(&context),
            "resume" => return operations::resume(&context),
            "delete" => return operations::delete(&context),
            "create" | "run" => operations::prepare_start(&context)?,
            "pause" => operations::repair_first(&context)?,
            "exec" => {
                operations::repair_first(&context)?;
                if context.journal().has_job() {
                    return operations::exec_in_job(&context);
                }
            }
            _ => {}
        }
    }
    // Without an id nothing can be done around the runtime, and restoring CUDA takes more than it.
    if let Some(line) = line.filter(|line| line.subcommand == "restore" && !line.asks_for_help()) {
        operations::refuse_cuda(line)?;
    }
    let mut command = Command::new(&program);
    command.args(arguments);
    match line {
        Some(line) => again::mark(&mut command, line),
        None => again::mark_unknown(&mut command),
    }
    match replaced(execute, &mut command)? {}
}

/// What an operation works with.
struct Context<'a> {
    config: &'a Config,
    program: &'a Path,
    line: &'a CommandLine,
    id: &'a str,
    execute: &'a Execute<'a>,
}

impl Context<'_> {
    /// The runtime's root directory: where its containers' states are.
    fn root(&self) -> PathBuf {
        match self.line.global("root").filter(|root| !root.is_empty()) {
            Some(root) => root.into(),
            None => path::default_root(self.program, self.id),
        }
    }

    /// The runtime in our place, with the caller's arguments.
    fn become_runtime(&self) -> anyhow::Result<Infallible> {
        let mut command = Command::new(self.program);
        let CommandLine { globals, subcommand, rest } = self.line;
        command.args(globals).arg(subcommand).args(rest);
        again::mark(&mut command, self.line);
        self.execute(&mut command)
    }

    /// A call of the runtime in our place.
    fn execute(&self, command: &mut Command) -> anyhow::Result<Infallible> {
        replaced(self.execute, command)
    }
}

fn replaced(execute: &Execute<'_>, command: &mut Command) -> anyhow::Result<Infallible> {
    let error = execute(command);
    Err(anyhow::Error::new(error).context(format!(
        "stasis: cannot execute {}; set runtime.path in config.toml",
        Path::new(command.get_program()).display()
    )))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::fs;

    use super::*;
    use crate::job::DESTINATION;
    use crate::journal::JournalFile;

    #[test]
    fn an_exec_is_told_of_the_job_file_where_the_container_was_given_one() {
        let host = tempfile::tempdir().unwrap();
        let at = |name: &str| host.path().join(name);
        fs::write(at("process.json"), r#"{"args": ["a"], "env": ["B=2"]}"#).unwrap();
        let mut config = Config::default();
        config.runtime.path = "/bin/true".into();
        config.state.directory = at("state");
        let root = at("runc");
        let line: Vec<OsString> = [
            "--root".into(),
            root.clone().into(),
            "exec".into(),
            "--process".into(),
            at("process.json").into(),
            "c1".into(),
        ]
        .into();
        // What the process of the exec is described by, as the runtime would read it.
        let described = || {
            let said = RefCell::new(String::new());
            let execute = |command: &mut Command| {
                let arguments: Vec<_> = command.get_args().map(OsString::from).collect();
                assert_eq!(arguments.last().unwrap(), "c1");
                let named = arguments.iter().position(|argument| argument == "--process").unwrap();
                *said.borrow_mut() = fs::read_to_string(&arguments[named + 1]).unwrap();
                io::Error::other("noted")
            };
            let recognised = CommandLine::recognise(&line);
            run(&config, &line, recognised.as_ref(), &execute).unwrap_err();
            said.into_inner()
        };
        assert!(!described().contains(DESTINATION));
        let journal = JournalFile::new(&config.state.directory, &root, "c1");
        fs::create_dir_all(journal.job()).unwrap();
        let described = described();
        assert!(described.contains(&format!("CUDA_CHECKPOINT_JOB_FILE={DESTINATION}")));
        assert!(described.contains("B=2"), "{described}");
    }

    #[test]
    fn a_pods_sandbox_is_given_no_job_file_when_it_is_restored_either() {
        let host = tempfile::tempdir().unwrap();
        let at = |name: &str| host.path().join(name);
        for name in ["bundle", "image"] {
            fs::create_dir(at(name)).unwrap();
        }
        let mut config = Config::default();
        config.runtime.path = "/bin/true".into();
        config.state.directory = at("state");
        let line: Vec<OsString> = [
            "--root".into(),
            at("runc").into(),
            "restore".into(),
            "--image-path".into(),
            at("image").into(),
            "--bundle".into(),
            at("bundle").into(),
            "c1".into(),
        ]
        .into();
        // Whether the runtime was begun; a driver that could make one is not there.
        let begun = |annotations: serde_json::Value| {
            let described = serde_json::json!({"annotations": annotations}).to_string();
            fs::write(at("bundle").join("config.json"), described).unwrap();
            let begun = RefCell::new(false);
            let execute = |_: &mut Command| {
                *begun.borrow_mut() = true;
                io::Error::other("noted")
            };
            let recognised = CommandLine::recognise(&line);
            run(&config, &line, recognised.as_ref(), &execute).unwrap_err();
            begun.into_inner()
        };
        let sandbox = "io.kubernetes.cri.container-type";
        assert!(begun(serde_json::json!({})));
        assert!(begun(serde_json::json!({"dev.stasis.job": "file", sandbox: "sandbox"})));
        assert!(!begun(serde_json::json!({"dev.stasis.job": "file", sandbox: "container"})));
    }
}
