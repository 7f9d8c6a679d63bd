//! `stasis`: the command for people.

mod check;
mod inspect;
mod progress;
mod ps;
mod repair;
mod resume;
mod show;
mod subjects;
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
To free the GPU of a container for ten minutes, as root; CONTAINER is its id or its name:
  stasis ps                      which containers use a GPU, and how much of it
  stasis suspend CONTAINER       its data goes to host memory, the GPU is free, it waits
  sleep 600
  stasis resume CONTAINER        it goes on where it was
If one of these was killed in the middle:
  stasis repair                  the container runs, or is suspended, and nothing in between

stasis COMMAND --help and man stasis-COMMAND say more; the configuration is /etc/stasis/config.toml, or the
file that STASIS_CONFIG names.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Is this host ready? A line for each requirement, with what to do
    ///
    /// Exit status 0 only if containers with CUDA can be checkpointed. To suspend and to resume takes the
    /// driver's part of that, and not CRIU.
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the containers that use CUDA: processes, state, GPU, memory
    ///
    /// Also those that are suspended, and those that a killed operation has left behind, with cgroups that
    /// are no containers among them. Nothing is changed.
    Ps(Ps),
    /// Free the GPU of a running container: what it has there goes to host memory, and its CUDA calls wait
    ///
    /// All of its CUDA processes are suspended, or none: if that fails, is interrupted, or takes longer
    /// than the timeout, the container runs on as before; if the driver cannot give back what it has taken,
    /// the error says so. If the host, or the container's memory limit, has no room for what is on the GPU,
    /// nothing is begun. It does not matter whether Stasis had to do with its start.
    ///
    /// Its other code runs on. It can be paused, stopped and checkpointed as before, and like any process
    /// it does not survive a reboot. Others may take the memory of the GPU meanwhile. `stasis resume` gives
    /// it back what it had. Exit status 0 if it is suspended, 1 if it is not.
    Suspend(Suspend),
    /// Give a suspended container back what it had on the GPU
    ///
    /// If the GPU has no room for it until the timeout, or if this is interrupted meanwhile, it stays
    /// suspended and nothing is lost. Exit status 0 if its CUDA works, 1 if it does not.
    Resume(Resume),
    /// Put right what a suspend, resume, checkpoint or restore that was killed has left behind
    ///
    /// Afterwards a container runs, or is paused, as it was before; one whose suspend or resume was killed
    /// stays suspended if the GPU has no room for it. What is still at work is left alone. The next
    /// suspend, resume, checkpoint, pause or exec does the same by itself. What was noted when an operation
    /// began tells where the containers are, so all are found, and cgroups, too. Job files of containers that
    /// are gone are removed.
    Repair {
        /// Only this one: its id, the beginning of it, its name, or the path of a cgroup; without, all of them
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
    /// Look only in this root directory of an OCI runtime (runc --root). May be given several times; those
    /// of containerd, Docker and Podman are known, and those of rootless containers are not
    #[arg(long = "root", value_name = "DIRECTORY")]
    given: Vec<PathBuf>,
}

/// Which container.
#[derive(Debug, Args)]
struct Which {
    /// Its id or its name as ctr, nerdctl, docker ps or podman ps show it, or the beginning of its id; one of
    /// Kubernetes also as POD/CONTAINER. One of this, --pid and --cgroup is needed
    #[arg(required_unless_present_any = ["pid", "cgroup"])]
    container: Option<String>,
    /// The container that this process is in
    #[arg(long, value_name = "PID", conflicts_with = "container", value_parser = clap::value_parser!(i32).range(1..))]
    pid: Option<i32>,
    /// All processes of this cgroup, such as a systemd service, where there is no container: a directory,
    /// or a path as in /proc/PID/cgroup. With several CUDA processes or GPUs only if they are in a job: a
    /// cgroup has no annotation that allows more
    #[arg(long, value_name = "PATH", conflicts_with_all = ["container", "pid"])]
    cgroup: Option<PathBuf>,
    #[command(flatten)]
    roots: Roots,
}

#[derive(Debug, Args)]
struct Ps {
    /// Only these: their ids, the beginnings of them, or their names
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
    /// How long to wait for a moment without a kernel under way, such as 90s; then it runs on as before. Not
    /// with drivers 550 to 554, which wait as long as cuda.checkpoint-timeout and cuda.restore-timeout allow
    /// [default: the container's annotation dev.stasis.lock-timeout, or cuda.lock-timeout of the configuration,
    /// 60s]
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
    /// Onto another GPU of the same product: its UUID, the beginning of that, or its number in nvidia-smi -L.
    /// For a container that used one GPU, and was given both when it was started. From driver 580 on
    #[arg(long, value_name = "GPU", conflicts_with = "device_map")]
    to: Option<String>,
    /// The same for several: OLD=NEW,OLD=NEW, each as for --to, such as 0=1,1=0. From driver 580 on
    #[arg(long, value_name = "MAP")]
    device_map: Option<String>,
    /// How long to wait for room on the GPU, such as 2h [default: cuda.restore-timeout of the
    /// configuration, 10m]
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
