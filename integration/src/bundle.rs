//! Restores an image directory by calling the OCI runtime as Podman would:
//! `ctr` has no option for that.

use std::fs;
use std::io::PipeReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, umount2};
use nix::unistd::Pid;

use crate::command;
use crate::ctr::Ctr;
use crate::runtime::Runtime;

const LIMIT: Duration = Duration::from_secs(60);

/// A bundle made of a container that containerd knows and whose task is gone.
#[derive(Debug)]
pub struct Bundle<'a> {
    runtime: &'a Runtime,
    directory: PathBuf,
    id: String,
    /// Keeps the restored container's output from breaking.
    output: Option<PipeReader>,
}

impl<'a> Bundle<'a> {
    /// Lays out the container's configuration and root file system in a directory.
    pub fn new(ctr: &Ctr, runtime: &'a Runtime, id: &str, directory: &Path) -> Result<Self> {
        lay_out(ctr, id, directory)?;
        Ok(Self { runtime, directory: directory.to_owned(), id: id.to_owned(), output: None })
    }

    /// Its directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// `exec` in the restored container; gives the output.
    pub fn exec(&self, program: &[&str]) -> Result<String> {
        let mut command = self.command("exec");
        command::succeed(command.arg(&self.id).args(program), LIMIT)
    }

    /// `checkpoint`, after which the restored container is gone.
    pub fn checkpoint(&self, image: &Path) -> Result<()> {
        let mut command = self.command("checkpoint");
        command.arg("--image-path").arg(image);
        command.arg("--work-path").arg(self.directory.join("work")).arg(&self.id);
        command::succeed(&mut command, LIMIT).map(drop)
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = self.runtime.command();
        command.arg("--root").arg(self.directory.join("runc-root"));
        command.arg("--log").arg(self.directory.join("runc.log"));
        command.arg(verb);
        command.current_dir(&self.directory);
        command
    }

    /// `restore --detach` of an image directory; gives the new init.
    pub fn restore(&mut self, image: &Path) -> Result<Pid> {
        let pid_file = self.directory.join("init.pid");
        let mut command = self.command("restore");
        command.arg("--image-path").arg(image);
        command.arg("--work-path").arg(self.directory.join("work"));
        command.args(["--detach", "--pid-file"]).arg(&pid_file);
        command.arg("--bundle").arg(&self.directory).arg(&self.id);
        // The container's own output was a pipe, so that is what it wants back.
        let (reader, writer) = std::io::pipe()?;
        let (input, _) = std::io::pipe()?;
        self.output = Some(reader);
        let mut child =
            command.stdin(Stdio::from(input)).stdout(writer.try_clone()?).stderr(writer).spawn()?;
        drop(command);
        let status = crate::wait::until("the end of restore", LIMIT, || Ok(child.try_wait()?))?;
        ensure!(
            status.success(),
            "restore from {} failed, {status}: {}",
            image.display(),
            fs::read_to_string(self.directory.join("runc.log")).unwrap_or_default()
        );
        Ok(Pid::from_raw(fs::read_to_string(pid_file)?.trim().parse()?))
    }
}

/// Makes a bundle of a container that containerd knows: its configuration and its root file
/// system, mounted.
pub fn lay_out(ctr: &Ctr, id: &str, directory: &Path) -> Result<()> {
    let rootfs = directory.join("rootfs");
    fs::create_dir_all(&rootfs)?;
    let info: serde_json::Value = serde_json::from_str(&ctr.run(["containers", "info", id])?)?;
    let mut spec = info["Spec"].clone();
    spec["root"]["path"] = "rootfs".into();
    fs::write(directory.join("config.json"), spec.to_string())?;
    let key = info["SnapshotKey"].as_str().context("a container without a snapshot")?;
    let mount = ctr.run(["snapshots", "mounts", &rootfs.to_string_lossy(), key])?;
    command::succeed(Command::new("sh").arg("-c").arg(mount), LIMIT).map(drop)
}

impl Drop for Bundle<'_> {
    fn drop(&mut self) {
        let _ = command::run(self.command("delete").arg("--force").arg(&self.id), LIMIT);
        let _ = umount2(&self.directory.join("rootfs"), MntFlags::MNT_DETACH);
    }
}
