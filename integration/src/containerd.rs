//! A containerd of the tests' own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::shim::Shim;
use crate::{command, processes, wait};

/// What a containerd and the shims that it starts find in their environment.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// Names and values.
    pub variables: Vec<(&'static str, PathBuf)>,
    /// A directory that comes first in PATH, in which shims are looked for.
    pub path: Option<PathBuf>,
}

impl Environment {
    fn apply(&self, command: &mut Command) {
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        if let Some(front) = &self.path {
            let mut path = front.clone().into_os_string();
            path.push(":");
            path.push(std::env::var_os("PATH").unwrap_or_default());
            command.env("PATH", path);
        }
    }
}

/// A running containerd with its own root, state, socket and configuration.
///
/// It ends, with its shims, when this is dropped.
#[derive(Debug)]
pub struct Containerd {
    child: Mutex<Child>,
    directory: PathBuf,
    environment: Environment,
}

impl Containerd {
    /// Starts one in a directory, and waits until it answers.
    pub fn start(directory: &Path, environment: Environment) -> Result<Self> {
        let shown = directory.display();
        let config = format!(
            r#"version = 2
root = "{shown}/root"
state = "{shown}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]

# Docker's next checkpoint fails while the last one's content is there (moby/moby#42900), which
# is until the collector comes round.
[plugins."io.containerd.gc.v1.scheduler"]
deletion_threshold = 1
pause_threshold = 0.5
schedule_delay = "0s"

[grpc]
address = "{shown}/containerd.sock"
"#
        );
        Self::configured(directory, &config, environment)
    }

    /// Starts one in a directory with this configuration, which names the directory as
    /// [`Containerd::start`]'s does.
    pub fn configured(directory: &Path, config: &str, environment: Environment) -> Result<Self> {
        fs::create_dir_all(directory)?;
        fs::write(directory.join("config.toml"), config)?;
        let child = Mutex::new(spawn(directory, &environment)?);
        let containerd = Self { child, directory: directory.to_owned(), environment };
        containerd.answers()?;
        Ok(containerd)
    }

    /// Ends it as a crash would, and starts it again in the same place; its shims live on.
    pub fn restart(&self) -> Result<()> {
        let mut child = self.child.lock().map_err(|_| anyhow!("a test panicked"))?;
        child.kill()?;
        child.wait()?;
        *child = spawn(&self.directory, &self.environment)?;
        drop(child);
        self.answers()
    }

    fn answers(&self) -> Result<()> {
        wait::until("an answer of containerd", Duration::from_secs(20), || {
            let mut version = Command::new("ctr");
            version.arg("--address").arg(self.socket()).arg("version");
            let answer = command::run(&mut version, Duration::from_secs(15))?;
            Ok(answer.status.success().then_some(()))
        })
        .with_context(|| format!("see {}", self.log().display()))
    }

    /// The servers of its shims that run now.
    #[must_use]
    pub fn shims(&self) -> Vec<Pid> {
        let ours = processes::with_argument(&self.socket().to_string_lossy());
        // Go's flags have one dash; ctr, which names the same socket, has no such one.
        let shims = processes::with_argument("-namespace");
        ours.into_iter().filter(|pid| shims.contains(pid)).collect()
    }

    /// A command for the binary of a shim, with the environment that containerd would give it.
    #[must_use]
    pub fn shim_command(&self, shim: Shim) -> Command {
        let name = match shim {
            Shim::Go | Shim::StasisAsV2 => "containerd-shim-runc-v2",
            Shim::Stasis => "containerd-shim-runc-stasis",
        };
        let front = self.environment.path.as_ref().map(|path| path.join(name));
        let program = front.unwrap_or_else(|| PathBuf::from(name));
        let mut command = Command::new(program);
        self.environment.apply(&mut command);
        command
    }

    /// The bundle of a task.
    #[must_use]
    pub fn bundle(&self, namespace: &str, id: &str) -> PathBuf {
        self.directory.join("state/io.containerd.runtime.v2.task").join(namespace).join(id)
    }

    /// The socket on which it listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.directory.join("containerd.sock")
    }

    /// Its log, with those of its shims.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.directory.join("containerd.log")
    }
}

fn spawn(directory: &Path, environment: &Environment) -> Result<Child> {
    let log = File::options().create(true).append(true).open(directory.join("containerd.log"))?;
    let mut containerd = Command::new("containerd");
    containerd.arg("--config").arg(directory.join("config.toml"));
    environment.apply(&mut containerd);
    containerd.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    containerd.spawn().context("containerd does not start")
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let Ok(mut child) = self.child.lock() else { return };
        if let Ok(pid) = i32::try_from(child.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let ended =
            wait::until("the end of containerd", Duration::from_secs(5), || Ok(child.try_wait()?));
        if ended.is_err() {
            let _ = child.kill();
            let _ = child.wait();
        }
        drop(child);
        for shim in self.shims() {
            let _ = kill(shim, Signal::SIGKILL);
        }
    }
}
