//! containerd's client `ctr`, as people type it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::unistd::Pid;

use crate::command;

/// What containerd says about a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// There is no task.
    Gone,
    /// Made and not started.
    Created,
    /// At work.
    Running,
    /// Its cgroup is frozen.
    Paused,
    /// Its init process has ended.
    Stopped,
}

/// A task as `ctr tasks ls` shows it.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    /// Its init process.
    pub pid: Pid,
    /// Its status.
    pub status: Status,
}

/// Where `ctr tasks checkpoint` puts an image, and what becomes of the task.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint {
    /// `--image-path`; the content store without.
    pub image: Option<PathBuf>,
    /// `--work-path`, where CRIU's log stays.
    pub work: Option<PathBuf>,
    /// `--exit`.
    pub exit: bool,
}

/// Runs `ctr` against one containerd and one namespace.
#[derive(Debug, Clone)]
pub struct Ctr {
    socket: PathBuf,
    namespace: String,
    limit: Duration,
}

impl Ctr {
    /// A client of the containerd behind this socket.
    #[must_use]
    pub fn new(socket: &Path, namespace: &str) -> Self {
        Self {
            socket: socket.to_owned(),
            namespace: namespace.to_owned(),
            limit: Duration::from_secs(60),
        }
    }

    /// The containerd namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// A `ctr` command that is not run yet.
    pub fn command(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(&self.socket).args(["--namespace", &self.namespace]);
        command.args(arguments);
        command
    }

    /// Runs `ctr` with these arguments; gives its output.
    pub fn run(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::succeed(&mut self.command(arguments), self.limit)
    }

    /// Runs `ctr` with arguments that have to make it fail; gives its error.
    pub fn fail(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::fail(&mut self.command(arguments), self.limit)
    }

    /// `ctr image import`.
    pub fn import(&self, archive: &Path) -> Result<()> {
        self.run([OsStr::new("image"), OsStr::new("import"), archive.as_os_str()]).map(drop)
    }

    /// `ctr image rm --sync`.
    pub fn remove_image(&self, name: &str) -> Result<()> {
        self.run(["image", "rm", "--sync", name]).map(drop)
    }

    /// The task of a container.
    pub fn task(&self, id: &str) -> Result<Option<Task>> {
        let list = self.run(["tasks", "ls"])?;
        let Some(line) = list.lines().find(|line| line.split_whitespace().next() == Some(id))
        else {
            return Ok(None);
        };
        let mut words = line.split_whitespace().skip(1);
        let (Some(pid), Some(status)) = (words.next(), words.next()) else {
            bail!("ctr tasks ls shows {line:?}");
        };
        let pid = pid.parse().with_context(|| format!("ctr tasks ls shows {line:?}"))?;
        let status = match status {
            "CREATED" => Status::Created,
            "RUNNING" => Status::Running,
            "PAUSED" => Status::Paused,
            "STOPPED" => Status::Stopped,
            other => bail!("a task with status {other}"),
        };
        Ok(Some(Task { pid: Pid::from_raw(pid), status }))
    }

    /// The status of a task.
    pub fn status(&self, id: &str) -> Result<Status> {
        Ok(self.task(id)?.map_or(Status::Gone, |task| task.status))
    }

    /// `ctr tasks pause`.
    pub fn pause(&self, id: &str) -> Result<()> {
        self.run_with_a_pause(&["tasks", "pause", id])
    }

    /// Runs what begins with a pause. runc gives up after half a second when the freezer of version 1 of
    /// cgroups does not come to rest, as on a machine that has much to do; the container runs on then.
    fn run_with_a_pause(&self, arguments: &[&str]) -> Result<()> {
        for _ in 0..3 {
            match self.run(arguments) {
                Err(error) if format!("{error:#}").contains("unable to freeze") => {}
                other => return other.map(drop),
            }
        }
        self.run(arguments).map(drop)
    }

    /// `ctr tasks resume`.
    pub fn resume(&self, id: &str) -> Result<()> {
        self.run(["tasks", "resume", id]).map(drop)
    }

    /// `ctr tasks kill --signal SIGKILL`.
    pub fn kill(&self, id: &str) -> Result<()> {
        self.run(["tasks", "kill", "--signal", "SIGKILL", id]).map(drop)
    }

    /// `ctr tasks rm --force`, after a kill.
    ///
    /// A restore that was killed leaves a task that counts as CREATED and has running processes.
    /// ctr ends with the task's exit status, so its success is whether the task is gone.
    pub fn remove_task(&self, id: &str) -> Result<()> {
        if self.status(id)? != Status::Stopped {
            let _ = self.kill(id);
        }
        let finished = command::run(&mut self.command(["tasks", "rm", "--force", id]), self.limit)?;
        match self.status(id)? {
            Status::Gone => Ok(()),
            status => bail!("ctr tasks rm {id} left it {status:?}: {}", finished.stderr),
        }
    }

    /// `ctr containers rm`.
    pub fn remove_container(&self, id: &str) -> Result<()> {
        self.run(["containers", "rm", id]).map(drop)
    }

    /// `ctr tasks exec`; gives the output.
    pub fn exec(&self, id: &str, exec_id: &str, program: &[&str]) -> Result<String> {
        self.run(["tasks", "exec", "--exec-id", exec_id, id].iter().chain(program))
    }

    /// `ctr tasks checkpoint`.
    pub fn checkpoint(&self, id: &str, options: &Checkpoint) -> Result<()> {
        let arguments = options.arguments(id);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.run_with_a_pause(&arguments)
    }

    /// `ctr tasks checkpoint` that has to fail; gives the error.
    pub fn checkpoint_fails(&self, id: &str, options: &Checkpoint) -> Result<String> {
        self.fail(options.arguments(id))
    }

    /// `ctr containers checkpoint --rw --task`.
    ///
    /// ctr 1.7 keeps quiet about content that the store has already, as the second checkpoint of a
    /// container has unless the image of the first is gone: only the restore shows it.
    pub fn checkpoint_container(&self, id: &str, image: &str) -> Result<()> {
        self.run_with_a_pause(&["containers", "checkpoint", "--rw", "--task", id, image])
    }

    /// `ctr containers restore --rw --live`.
    pub fn restore(&self, id: &str, image: &str) -> Result<()> {
        self.run(["containers", "restore", "--rw", "--live", id, image]).map(drop)
    }

    /// `ctr containers restore --rw --live` that has to fail; gives the error.
    pub fn restore_fails(&self, id: &str, image: &str) -> Result<String> {
        self.fail(["containers", "restore", "--rw", "--live", id, image])
    }
}

impl Checkpoint {
    fn arguments(&self, id: &str) -> Vec<String> {
        let mut arguments = vec!["tasks".to_owned(), "checkpoint".to_owned()];
        for (flag, path) in [("--image-path", &self.image), ("--work-path", &self.work)] {
            if let Some(path) = path {
                arguments.extend([flag.to_owned(), path.display().to_string()]);
            }
        }
        if self.exit {
            arguments.push("--exit".to_owned());
        }
        arguments.push(id.to_owned());
        arguments
    }
}
