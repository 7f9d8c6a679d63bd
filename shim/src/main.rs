//! `containerd-shim-runc-stasis`: containerd's shim for runc, with CUDA. Here is only what it is
//! run for.

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use stasis_shim::boot::{self, Action, Arguments, Serve, socket};
use stasis_shim::{log, runc, server};

fn main() -> ExitCode {
    let mut words = std::env::args_os();
    let program = words.next().unwrap_or_default();
    let words: Vec<OsString> = words.collect();
    let first = words.first().map(OsString::as_os_str);
    if let Some(code) = stasis_hooks::helper(first) {
        return code;
    }
    if first == Some(OsStr::new(runc::ENGINE)) {
        return runc::engine(&words[1..]);
    }
    match run(Path::new(&program), &words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", boot::RUNTIME_NAME);
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(program: &Path, words: &[OsString]) -> anyhow::Result<()> {
    let arguments = Arguments::parse(words)?;
    let mut answer = std::io::stdout();
    match arguments.action {
        Action::Version => print!("{}", boot::version(program)),
        Action::Info => answer.write_all(&boot::info(&boot::read_input()?)?)?,
        Action::Start => {
            boot::start(&arguments, &Serve::this()?, &boot::read_input()?, &mut answer)?;
        }
        Action::Delete => {
            let here = std::env::current_dir()?;
            let deleted = boot::delete(&arguments, &here, runc::delete_by_force)?;
            for warning in deleted.warnings {
                eprintln!("{warning}");
            }
            answer.write_all(&deleted.answer)?;
        }
        Action::Serve => {
            let level = if arguments.debug { tracing::Level::DEBUG } else { tracing::Level::WARN };
            log::to_fifo(Path::new(log::FILE), level);
            let listener = match &arguments.socket {
                Some(path) => socket::at(path)?,
                None => socket::inherited()?,
            };
            let settings = server::Settings {
                socket_name: boot::other_name(&arguments, &listener),
                namespace: arguments.namespace,
                containerd: std::env::var("TTRPC_ADDRESS")?,
                log_level: level.as_str().to_ascii_lowercase(),
            };
            server::serve(&settings, listener)?;
        }
    }
    answer.flush()?;
    Ok(())
}
