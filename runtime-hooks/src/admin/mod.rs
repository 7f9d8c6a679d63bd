//! `stasis`: the command for people.

mod check;
mod inspect;
mod progress;
mod ps;
mod repair;
mod resume;
mod show;
mod suspend;
mod target;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use stasis_config::Config;

/// Checkpoint and restore of GPU containers
///
/// Containers are checkpointed and restored with the commands of containerd, Docker and Podman, through
/// the shim or the OCI runtime stasis-runc. This command looks at containers and images, and frees the
/// GPU of a container for a while.
#[derive(Debug, Parser)]
#[command(name = "stasis", version, arg_required_else_help = true, after_help = FILES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const FILES: &str = "\
To free the GPU of a container for ten minutes:
  stasis ps                      which containers use a GPU, and how much of it
  stasis suspend CONTAINER       its data goes to host memory, the GPU is free, it waits
  sleep 600
  stasis resume CONTAINER        it goes on where it was

Configuration: /etc/stasis/config.toml, or the file that STASIS_CONFIG names.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Is this host ready? A line for each requirement, with what to do
    ///
    /// Exit status 0 only if containers with CUDA can be checkpointed.
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the containers that use CUDA: processes, state, GPU, memory
    Ps(Ps),
    /// Free the GPU of a running container: its CUDA goes to host memory, and its CUDA calls wait
    ///
    /// All of its CUDA processes are suspended, or none. It lives on: it can be paused, killed and
    /// checkpointed as before. `stasis resume` gives its CUDA back.
    Suspend(Suspend),
    /// Give a suspended container its CUDA back
    ///
    /// If the GPU has no room for it until the timeout, it stays suspended and nothing is lost.
    Resume(Resume),
    /// Put right what a killed operation has left behind
    ///
    /// Each container with a journal is brought back to the state from before the operation. The next
    /// operation on a container does the same by itself. The journals tell where the containers are, so
    /// those under any root directory are found, and cgroups, too.
    Repair {
        /// Only this container: its id, or the beginning of it, or the path of a cgroup
        container: Option<String>,
        #[command(flatten)]
        roots: Roots,
    },
    /// What is in an image, what a restore needs, and whether this host has it
    ///
    /// An archive is read and not unpacked, and nothing is changed. Exit status 0 only if the image is
    /// whole.
    Inspect {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// A directory with an image, one with Docker's checkpoints, or an archive that Podman exported
        image: PathBuf,
    },
}

/// Where containers are looked for.
#[derive(Debug, Args)]
struct Roots {
    /// Look only in this root directory of an OCI runtime. May be given several times
    #[arg(long = "root", value_name = "DIRECTORY")]
    given: Vec<PathBuf>,
}

/// Which container.
#[derive(Debug, Args)]
struct Which {
    /// Its id as ctr, nerdctl, docker or podman show it, or the beginning of it
    #[arg(required_unless_present_any = ["pid", "cgroup"])]
    container: Option<String>,
    /// The container that this process is in
    #[arg(long, value_name = "PID", conflicts_with = "container", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
    /// All of this cgroup, where there is no container: a directory, or a path as in /proc/PID/cgroup
    #[arg(long, value_name = "PATH", conflicts_with_all = ["container", "pid"])]
    cgroup: Option<PathBuf>,
    #[command(flatten)]
    roots: Roots,
}

#[derive(Debug, Args)]
struct Ps {
    /// Only these: their ids, or the beginnings of them
    containers: Vec<String>,
    /// Also containers that use no CUDA
    #[arg(long, short)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    roots: Roots,
}

#[derive(Debug, Args)]
struct Suspend {
    #[command(flatten)]
    which: Which,
    /// How long its CUDA work may take to come to an end, such as 90s [default: cuda.lock-timeout]
    #[arg(long, value_name = "TIME", value_parser = stasis_config::duration::timeout)]
    timeout: Option<Duration>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Resume {
    #[command(flatten)]
    which: Which,
    /// Onto another GPU: its number as nvidia-smi counts, or its UUID. For a container that used one, and
    /// has the nodes of both. From driver 580 on
    #[arg(long, value_name = "GPU", conflicts_with = "device_map")]
    to: Option<String>,
    /// Which GPUs take the place of which: OLD=NEW,…. The others stay if they can. From driver 580 on
    #[arg(long, value_name = "MAP")]
    device_map: Option<String>,
    /// How long to wait for room on the GPU, such as 10m [default: cuda.restore-timeout]
    #[arg(long, value_name = "TIME", value_parser = stasis_config::duration::timeout)]
    timeout: Option<Duration>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The command line, for man page and completions.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs `stasis` with `arguments` (without the program's name).
#[must_use]
pub fn main(arguments: &[OsString]) -> ExitCode {
    let all =
        std::iter::once(&OsString::from("stasis")).chain(arguments).cloned().collect::<Vec<_>>();
    let cli = match Cli::try_parse_from(all) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let config = match Config::load() {
        Ok(config) => config,
        Err(error) => return failed(&crate::error::chain(&error)),
    };
    match cli.command {
        Command::Check { json } => check::run(&config, json),
        Command::Ps(asked) => ps::run(&config, &asked),
        Command::Suspend(asked) => suspend::run(&config, &asked),
        Command::Resume(asked) => resume::run(&config, &asked),
        Command::Repair { container, roots } => repair::run(&config, container.as_deref(), &roots),
        Command::Inspect { json, image } => inspect::run(&config, &image, json),
    }
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Says what went wrong, on one line.
fn failed(what: &str) -> ExitCode {
    let what = what.strip_prefix("stasis: ").unwrap_or(what).replace('\n', " ");
    eprintln!("stasis: {what}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Cli, String> {
        let words = std::iter::once("stasis").chain(line.split_whitespace());
        Cli::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn one_container_is_named_in_one_way() {
        for line in [
            "suspend c1",
            "suspend --pid 7",
            "suspend --cgroup /a",
            "resume c1 --root /r --root /s --timeout 10m --json",
            "repair",
            "repair c1",
            "ps -a",
            "inspect -- --odd",
        ] {
            parsed(line).unwrap();
        }
        for line in [
            "suspend",
            "suspend c1 c2",
            "suspend c1 --pid 7",
            "suspend --pid 7 --cgroup /a",
            "suspend --pid -1",
            "suspend --pid 0",
            "suspend c1 --timeout 5",
            "suspend c1 --timeout 0s",
            "inspect",
            "nonsense",
        ] {
            parsed(line).unwrap_err();
        }
    }

    #[test]
    fn the_help_tells_how_to_free_a_gpu() {
        let help = command().render_help().to_string();
        for words in ["for ten minutes", "stasis suspend CONTAINER", "stasis resume CONTAINER"] {
            assert!(help.contains(words), "{help}");
        }
    }
}
