//! A containerd of the tests' own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{command, processes, wait};

/// A running containerd with its own root, state, socket and configuration.
///
/// It ends, with its shims, when this is dropped.
#[derive(Debug)]
pub struct Containerd {
    child: Child,
    directory: PathBuf,
}

impl Containerd {
    /// Starts one in a directory, and waits until it answers.
    pub fn start(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let shown = directory.display();
        let config = directory.join("config.toml");
        fs::write(
            &config,
            format!(
                r#"version = 2
root = "{shown}/root"
state = "{shown}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]

[grpc]
address = "{shown}/containerd.sock"
"#
            ),
        )?;
        let log = File::create(directory.join("containerd.log"))?;
        let child = Command::new("containerd")
            .arg("--config")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("containerd does not start")?;
        let containerd = Self { child, directory: directory.to_owned() };
        wait::until("an answer of containerd", Duration::from_secs(20), || {
            let mut version = Command::new("ctr");
            version.arg("--address").arg(containerd.socket()).arg("version");
            let answer = command::run(&mut version, Duration::from_secs(15))?;
            Ok(answer.status.success().then_some(()))
        })
        .with_context(|| format!("see {}", containerd.log().display()))?;
        Ok(containerd)
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

impl Drop for Containerd {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let ended = wait::until("the end of containerd", Duration::from_secs(5), || {
            Ok(self.child.try_wait()?)
        });
        if ended.is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let socket = self.socket();
        for shim in processes::with_argument(&socket.to_string_lossy()) {
            let _ = kill(shim, Signal::SIGKILL);
        }
    }
}
