//! A daemon that ends with the test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use stasis_integration::wait;

/// A child that is ended when this is dropped.
pub(super) struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts it with its output in a file.
    pub(super) fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::create(log)?;
        let command = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("{command:?} does not start"))?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// The end of what it said.
    pub(super) fn log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().rev().take(5).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let ended = wait::until("the end of a daemon", Duration::from_secs(10), || {
            Ok(self.child.try_wait()?)
        });
        if ended.is_err() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
