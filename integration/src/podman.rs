//! Podman with a store of its own, and what it says of its containers.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::Pid;
use serde_json::Value;

use crate::case::{Case, Container, PORT};
use crate::command::Finished;
use crate::{command, image, leaks, processes, udp, wait};

const LIMIT: Duration = Duration::from_secs(60);

/// How long ends may take that nobody waits for: conmon runs a clean-up of its own.
const ENDS: Duration = Duration::from_secs(5);

/// One store with its containers.
#[derive(Debug)]
pub struct Podman<'a> {
    case: &'a Case<'a>,
    directory: PathBuf,
    runtime: PathBuf,
    parent: String,
    /// Lives in the mount namespace in which Podman is called, if that is another.
    apart: Option<Child>,
}

impl<'a> Podman<'a> {
    /// An empty store of this name, with the test's runtime.
    pub fn new(case: &'a Case<'a>, name: &str) -> Result<Self> {
        let directory = case.path(name);
        fs::create_dir_all(&directory)?;
        let parent = std::env::var("LAB_ID").context("outside the lab")?;
        Ok(Self { case, directory, runtime: case.runtime.wrapper(), parent, apart: None })
    }

    /// One that has the tests' image.
    pub fn with_image(case: &'a Case<'a>, name: &str) -> Result<Self> {
        let podman = Self::new(case, name)?;
        let archive = case.path("../image/image.tar");
        podman.run([OsStr::new("load"), "--input".as_ref(), archive.as_ref()])?;
        Ok(podman)
    }

    /// The same with another runtime: a path, or a name that Podman knows.
    #[must_use]
    pub fn with_runtime(mut self, runtime: impl Into<PathBuf>) -> Self {
        self.runtime = runtime.into();
        self
    }

    /// The same where cgroups of version 2 are mounted and no others.
    pub fn with_cgroups_of_version_2(mut self) -> Result<Self> {
        let mounted = self.directory.join("mounted");
        let script = "umount --recursive /sys/fs/cgroup && \
                      mount -t cgroup2 cgroup2 /sys/fs/cgroup && touch \"$0\" && exec sleep 1000";
        let mut holder = Command::new("unshare");
        holder.args(["--mount", "sh", "-c", script]).arg(&mounted);
        self.apart = Some(holder.spawn()?);
        wait::until("cgroups of version 2", ENDS, || Ok(mounted.exists().then_some(())))?;
        Ok(self)
    }

    /// A program where Podman is called.
    pub fn program(&self, program: impl AsRef<OsStr>) -> Command {
        match &self.apart {
            Some(holder) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--mount=/proc/{}/ns/mnt", holder.id())).arg(program);
                command
            }
            None => Command::new(program),
        }
    }

    /// A call of Podman.
    pub fn command(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        let mut command = self.program("podman");
        for (flag, folder) in [("--root", "store"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
            command.arg(flag).arg(self.directory.join(folder));
        }
        command.args(["--cgroup-manager", "cgroupfs", "--events-backend", "file"]);
        command.arg("--runtime").arg(&self.runtime).args(arguments);
        command.env("PODMAN_IGNORE_CGROUPSV1_WARNING", "1");
        command
    }

    /// One that has to succeed; gives what it prints.
    pub fn run(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::succeed(&mut self.command(arguments), LIMIT)
    }

    /// One that has to fail with Podman's status for that, 125; gives what it says.
    pub fn fail(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        let mut call = self.command(arguments);
        let Finished { status, stdout, stderr } = command::run(&mut call, LIMIT)?;
        let code = status.code();
        ensure!(code == Some(125), "{call:?}: {status} instead of 125: {stdout}{stderr}");
        Ok(stderr)
    }

    /// Starts a container with these flags of `podman run`.
    pub fn start_with(&self, name: &str, flags: &[String], program: &[String]) -> Result<()> {
        let mut arguments =
            ["run", "--detach", "--network", "none", "--name", name].map(str::to_owned).to_vec();
        arguments.extend(["--cgroup-parent".to_owned(), format!("/{}", self.parent)]);
        arguments.extend_from_slice(flags);
        arguments.push(image::NAME.to_owned());
        arguments.extend_from_slice(program);
        self.run(arguments).map(drop)
    }

    /// Starts a container; one with a GPU gets it by plain devices and volumes.
    pub fn start(&self, name: &str, container: &Container) -> Result<()> {
        let mut flags = container.options.clone();
        if container.gpu {
            flags.extend(self.case.gpu.volumes());
        }
        self.start_with(name, &flags, &container.program)
    }

    /// A field of `podman container inspect`.
    pub fn inspect(&self, name: &str, pointer: &str) -> Result<Value> {
        let text = self.run(["container", "inspect", name])?;
        let all: Value = serde_json::from_str(&text)?;
        let found = all.pointer(&format!("/0{pointer}"));
        found.cloned().with_context(|| format!("{pointer} is not in {text}"))
    }

    /// Its init process.
    pub fn pid(&self, name: &str) -> Result<Pid> {
        let pid = self.inspect(name, "/State/Pid")?.as_i64().context("a pid")?;
        Ok(Pid::from_raw(i32::try_from(pid)?))
    }

    /// `podman ps` calls it this.
    pub fn expect_status(&self, name: &str, status: &str) -> Result<()> {
        let found = self.inspect(name, "/State/Status")?;
        ensure!(found == status, "{name} is {found} instead of {status}");
        Ok(())
    }

    /// What the counter answers.
    pub fn ask(&self, name: &str) -> Result<u64> {
        udp::ask(self.pid(name)?, PORT)
    }

    /// The counter answers with this number.
    pub fn expect(&self, name: &str, number: u64) -> Result<()> {
        let answer = self.ask(name)?;
        ensure!(answer == number, "the counter of {name} said {answer} instead of {number}");
        Ok(())
    }

    /// All that it ever printed.
    pub fn logs(&self, name: &str) -> Result<String> {
        self.run(["logs", name])
    }

    /// The directory of its bundle, where Podman has checkpoints and logs of CRIU.
    pub fn bundle(&self, name: &str) -> Result<PathBuf> {
        let id = self.id(name)?;
        Ok(self.directory.join("store/overlay-containers").join(id).join("userdata"))
    }

    /// Its whole id.
    pub fn id(&self, name: &str) -> Result<String> {
        let id = self.inspect(name, "/Id")?;
        Ok(id.as_str().context("an id")?.to_owned())
    }

    /// Kills it; it can be restored from an earlier checkpoint.
    pub fn kill(&self, name: &str) -> Result<()> {
        self.run(["kill", "--signal", "KILL", name])?;
        // Before that conmon's clean-up has to run.
        wait::until("the end of a killed container", ENDS, || {
            let status = self.inspect(name, "/State/Status")?;
            Ok((status == "exited").then_some(()))
        })
    }

    /// Takes a container away and checks that nothing is left of it.
    pub fn remove(&self, name: &str) -> Result<()> {
        let id = self.id(name)?;
        self.run(["rm", "--force", "--time", "0", name])?;
        leaks::container(&self.parent, &format!("libpod-{id}"))
    }

    /// Checks that the store is at rest: no monitors, no clean-ups, no containers, no mounts.
    pub fn finish(mut self) -> Result<()> {
        let left = self.run(["ps", "--all", "--quiet", "--no-trunc"])?;
        for id in left.split_whitespace() {
            self.remove(id)?;
        }
        self.end_apart();
        // Podman keeps its store mounted onto itself, for as long as it likes.
        self.unmount();
        let text = self.directory.display().to_string();
        let working = || processes::with_part_of_argument(&text);
        let _ = wait::until("the end of conmon", ENDS, || Ok(working().is_empty().then_some(())));
        let left: Vec<_> = working().into_iter().map(processes::describe).collect();
        if !left.is_empty() {
            bail!("processes of Podman are left: {left:#?}");
        }
        Ok(())
    }

    /// The same with nothing in it but the tests' image, as on another machine.
    pub fn emptied(self) -> Result<Self> {
        let name = self.directory.file_name().context("a name")?.to_owned();
        let (case, runtime, directory) = (self.case, self.runtime.clone(), self.directory.clone());
        self.finish()?;
        let mut remove = Command::new("rm");
        command::succeed(remove.args(["-r", "--one-file-system"]).arg(&directory), LIMIT)?;
        let name = name.to_str().context("a name")?;
        Ok(Self::with_image(case, name)?.with_runtime(runtime))
    }

    fn end_apart(&mut self) {
        if let Some(mut holder) = self.apart.take() {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }

    fn unmount(&self) {
        let store = self.directory.join("store/overlay");
        let _ = nix::mount::umount2(&store, nix::mount::MntFlags::MNT_DETACH);
    }
}

impl Drop for Podman<'_> {
    fn drop(&mut self) {
        let all = ["rm", "--all", "--force", "--time", "0"];
        let _ = command::run(&mut self.command(all), LIMIT);
        self.end_apart();
        self.unmount();
    }
}
