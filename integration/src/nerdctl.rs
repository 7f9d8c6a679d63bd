//! containerd's client `nerdctl`, as people type it.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::case::Case;
use crate::command::{self, Finished};
use crate::image;
use crate::shim::Shim;

const LIMIT: Duration = Duration::from_secs(60);

/// Where Debian has the CNI plugins.
const PLUGINS: &str = "/usr/lib/cni";

/// `nerdctl` for the containers of one test, with all that it keeps in the test's directory.
///
/// Its containers are removed when this is dropped.
#[derive(Debug)]
pub struct Nerdctl<'a> {
    case: &'a Case<'a>,
    directory: PathBuf,
    containers: RefCell<Vec<String>>,
}

impl<'a> Nerdctl<'a> {
    /// One for a test.
    #[must_use]
    pub fn new(case: &'a Case<'a>) -> Self {
        Self { case, directory: case.path("nerdctl"), containers: RefCell::default() }
    }

    /// A command that is not run yet.
    pub fn command(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        let mut command = Command::new("nerdctl");
        command.arg("--address").arg(self.case.containerd().socket());
        command.args(["--namespace", self.case.ctr().namespace()]);
        command.arg("--data-root").arg(self.directory.join("data"));
        command.args(["--cni-path", PLUGINS, "--cni-netconfpath"]).arg(self.directory.join("net"));
        command.arg("--cdi-spec-dirs").arg(self.cdi());
        command.args(["--cgroup-manager", "cgroupfs"]);
        command.args(arguments);
        command
    }

    /// Where it looks for CDI specifications.
    #[must_use]
    pub fn cdi(&self) -> PathBuf {
        self.directory.join("cdi")
    }

    /// Where it puts checkpoints if nothing else is said: of all containers in one directory.
    #[must_use]
    pub fn checkpoints(&self) -> PathBuf {
        self.directory.join("data/checkpoints")
    }

    /// Runs it to its end, whatever that is.
    pub fn finish(
        &self,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Result<Finished> {
        command::run(&mut self.command(arguments), LIMIT)
    }

    /// Runs it; gives its standard output.
    pub fn run(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::succeed(&mut self.command(arguments), LIMIT)
    }

    /// Runs it for something that has to fail; gives its standard error.
    pub fn fail(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::fail(&mut self.command(arguments), LIMIT)
    }

    /// The flags of `nerdctl run` that choose the shim and the runtime of this test.
    ///
    /// A name goes to containerd as it is. A program is the `BinaryName` of containerd's own shim.
    #[must_use]
    pub fn runtime(&self) -> [String; 2] {
        let shim = self.case.shim();
        let runtime = match shim {
            Shim::Go => self.case.runtime.program(shim).display().to_string(),
            Shim::Stasis | Shim::StasisAsV2 => shim.runtime().to_owned(),
        };
        ["--runtime".to_owned(), runtime]
    }

    /// The flags of `nerdctl run` that give a container the emulated GPU.
    #[must_use]
    pub fn gpu(&self) -> Vec<String> {
        self.case.gpu.volumes()
    }

    /// `nerdctl run --detach` with these flags; gives the container's id.
    pub fn start(&self, flags: &[&str], program: &[&str]) -> Result<String> {
        self.make(&["run", "--detach"], flags, program)
    }

    /// `nerdctl create` with these flags; gives the container's id.
    pub fn create(&self, flags: &[&str], program: &[&str]) -> Result<String> {
        self.make(&["create"], flags, program)
    }

    fn make(&self, verb: &[&str], flags: &[&str], program: &[&str]) -> Result<String> {
        let name = self.case.new_id();
        self.containers.borrow_mut().push(name.clone());
        let [runtime, which] = &self.runtime();
        let common = ["--pull", "never", "--name", &name, runtime, which];
        let arguments = [verb, &common, flags, &[image::NAME], program].concat();
        let id = self.run(arguments)?.trim().to_owned();
        self.case.adopt(&id);
        Ok(id)
    }

    /// A counter with a GPU and without a network, asked once; gives its id.
    pub fn start_counter(&self, options: &[&str]) -> Result<String> {
        let gpu = self.gpu();
        let mut flags = vec!["--network", "none"];
        flags.extend(gpu.iter().map(String::as_str));
        let mut program = vec!["/bin/counter", "--stdout"];
        program.extend(options);
        let id = self.start(&flags, &program)?;
        self.case.ask(&id)?;
        Ok(id)
    }

    /// `nerdctl checkpoint create`, with these flags.
    pub fn checkpoint(&self, id: &str, name: &str, flags: &[&str]) -> Result<()> {
        self.run([&["checkpoint", "create"], flags, &[id, name]].concat()).map(drop)
    }

    /// `nerdctl start --checkpoint`, with these flags.
    pub fn restore(&self, id: &str, name: &str, flags: &[&str]) -> Result<()> {
        self.run([&["start", "--checkpoint", name], flags, &[id]].concat()).map(drop)
    }

    /// The names that `nerdctl checkpoint ls` shows.
    pub fn list(&self, id: &str, flags: &[&str]) -> Result<Vec<String>> {
        let list = self.run([&["checkpoint", "ls"], flags, &[id]].concat())?;
        Ok(list.lines().skip(1).map(|line| line.trim().to_owned()).collect())
    }

    /// `nerdctl logs`: what the container has written to its standard output.
    pub fn logs(&self, id: &str) -> Result<String> {
        self.run(["logs", id])
    }

    /// The address of a container on the bridge.
    pub fn address(&self, id: &str) -> Result<Ipv4Addr> {
        let address = self.inspect(id, "{{.NetworkSettings.IPAddress}}")?;
        address.parse().with_context(|| format!("{id} has the address {address:?}"))
    }

    /// `nerdctl inspect` with a format.
    pub fn inspect(&self, id: &str, format: &str) -> Result<String> {
        Ok(self.run(["inspect", "--format", format, id])?.trim().to_owned())
    }
}

impl Drop for Nerdctl<'_> {
    fn drop(&mut self) {
        for name in self.containers.borrow().iter() {
            let _ = self.finish(["rm", "--force", "--volumes", name]);
        }
    }
}
