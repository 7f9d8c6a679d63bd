//! A container that no engine knows: a bundle, and calls of an OCI runtime for it.

use std::fs;
use std::io::PipeReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::command;
use crate::gpu::Gpu;

const LIMIT: Duration = Duration::from_secs(60);

/// A bundle in a directory of its own.
#[derive(Debug)]
pub struct Bare {
    directory: PathBuf,
    id: String,
    /// The runtime's root directory.
    root: PathBuf,
    /// Keeps the container's output from breaking.
    output: Option<PipeReader>,
}

impl Bare {
    /// One that runs `program` on this root file system, read-only, in a cgroup below `parent`.
    pub fn new(
        directory: &Path,
        id: &str,
        parent: &str,
        rootfs: &Path,
        program: &[&str],
    ) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let root = directory.join("root");
        let bare = Self { directory: directory.to_owned(), id: id.to_owned(), root, output: None };
        let mount = |kind: &str, destination: &str| json!({ "destination": destination, "type": kind, "source": kind });
        let namespaces =
            ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({ "type": kind }));
        let all = ["CAP_NET_BIND_SERVICE", "CAP_KILL"];
        let spec = json!({
            "ociVersion": "1.0.2",
            "hostname": "bare",
            "root": { "path": rootfs, "readonly": true },
            "process": {
                "args": program,
                "cwd": "/",
                "env": ["PATH=/bin"],
                "user": { "uid": 0, "gid": 0 },
                "capabilities": { "bounding": all, "effective": all, "permitted": all },
            },
            "mounts": [
                mount("proc", "/proc"),
                mount("tmpfs", "/dev"),
                mount("tmpfs", "/data"),
            ],
            "linux": {
                "cgroupsPath": format!("/{parent}/{id}"),
                "devices": [],
                "namespaces": namespaces,
                "resources": { "devices": [{ "allow": true, "access": "rwm" }] },
            },
        });
        bare.write(&spec)?;
        Ok(bare)
    }

    fn write(&self, spec: &Value) -> Result<()> {
        Ok(fs::write(self.directory.join("config.json"), spec.to_string())?)
    }

    /// The same below a runtime's root directory that others may use, too.
    #[must_use]
    pub fn with_root(mut self, root: &Path) -> Self {
        root.clone_into(&mut self.root);
        self
    }

    /// The runtime's root directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Changes its configuration.
    pub fn change(&self, change: impl FnOnce(&mut Value)) -> Result<()> {
        let mut spec: Value = serde_json::from_str(&self.spec()?)?;
        change(&mut spec);
        self.write(&spec)
    }

    /// Gives it a device node of the host.
    pub fn add_device(&self, path: &str, major: u64, minor: u64) -> Result<()> {
        let device = json!({ "path": path, "type": "c", "major": major, "minor": minor });
        self.change(|spec| {
            if let Some(devices) = spec["linux"]["devices"].as_array_mut() {
                devices.push(device);
            }
        })
    }

    /// Gives it a file or a directory of the host.
    pub fn add_mount(&self, source: &Path, destination: &str, writes: bool) -> Result<()> {
        let options = ["rbind", if writes { "rw" } else { "ro" }];
        let mount = json!({
            "source": source, "destination": destination, "type": "bind", "options": options,
        });
        self.change(|spec| {
            if let Some(mounts) = spec["mounts"].as_array_mut() {
                mounts.push(mount);
            }
        })
    }

    /// Gives it the emulated GPUs that containers are given.
    pub fn add_gpu(&self, gpu: &Gpu) -> Result<()> {
        for node in gpu.nodes() {
            self.add_device(&node.path, node.major, node.minor)?;
        }
        for (source, destination, writes) in gpu.binds() {
            self.add_mount(&source, &destination, writes)?;
        }
        Ok(())
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its configuration as it is now.
    pub fn spec(&self) -> Result<String> {
        Ok(fs::read_to_string(self.directory.join("config.json"))?)
    }

    /// A file beside the bundle.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A call of a runtime.
    #[must_use]
    pub fn call(&self, runtime: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(runtime);
        command.arg("--root").arg(&self.root).args(arguments);
        command.current_dir(&self.directory);
        command
    }

    /// Runs one that hands its standard descriptors to the container.
    fn with_output(&mut self, call: &mut Command) -> Result<()> {
        // Only pipes are found again by runc's restore.
        let (reader, writer) = std::io::pipe()?;
        let (input, _) = std::io::pipe()?;
        self.output = Some(reader);
        let log = self.path("runtime.log");
        call.stdin(Stdio::from(input)).stdout(writer.try_clone()?).stderr(writer);
        let mut child = call.spawn()?;
        let status = command::wait(&mut child, LIMIT)?;
        let said = || fs::read_to_string(&log).unwrap_or_default();
        let good = status.is_some_and(|status| status.success());
        ensure!(good, "{call:?}: {status:?}: {}", said());
        Ok(())
    }

    /// `create`.
    pub fn create(&mut self, runtime: &Path) -> Result<()> {
        let mut command = self.call(runtime, &["--log", "runtime.log", "create"]);
        command.args(["--pid-file", "pid", &self.id]);
        self.with_output(&mut command)
    }

    /// `start`.
    pub fn start(&self, runtime: &Path) -> Result<()> {
        command::succeed(&mut self.call(runtime, &["start", &self.id]), LIMIT).map(drop)
    }

    /// A checkpoint to an image directory beside the bundle.
    #[must_use]
    pub fn checkpoint(&self, runtime: &Path, image: &str, flags: &[&str]) -> Command {
        let mut command = self.call(runtime, &["checkpoint", "--image-path", image]);
        command.args(["--work-path", "work"]).args(flags).arg(&self.id);
        command
    }

    /// `restore` of such an image.
    pub fn restore(&mut self, runtime: &Path, image: &str) -> Result<()> {
        let mut command = self.call(runtime, &["--log", "runtime.log", "restore", "--detach"]);
        command.args(["--image-path", image, "--work-path", "work", "--pid-file", "pid"]);
        command.arg(&self.id);
        self.with_output(&mut command)
    }

    /// `exec` of a program; gives its output.
    pub fn exec(&self, runtime: &Path, flags: &[&str], program: &[&str]) -> Result<String> {
        let mut command = self.call(runtime, &["exec"]);
        command.args(flags).arg(&self.id).args(program);
        command::succeed(&mut command, LIMIT)
    }

    /// `delete --force`.
    pub fn delete(&self, runtime: &Path) -> Result<()> {
        let mut command = self.call(runtime, &["delete", "--force", &self.id]);
        command::succeed(&mut command, LIMIT).map(drop)
    }

    /// Its init process.
    pub fn pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(fs::read_to_string(self.path("pid"))?.trim().parse()?))
    }
}
