//! The fixtures: what all tests share, and what one test has for itself.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;

use crate::bundle::Bundle;
use crate::containerd::Containerd;
use crate::ctr::{Ctr, Status};
use crate::gpu::Gpu;
use crate::runtime::{Runtime, Settings};
use crate::{command, image, leaks, udp, wait};

/// The counter's port; every container has a network namespace of its own.
pub const PORT: u16 = 10000;

/// Where the lab has what cargo built.
const TARGET: &str = "/stasis-target";

/// The lab's directory that outlives it.
const LOGS: &str = "/logs";

/// What all tests share: a containerd that knows the image.
#[derive(Debug)]
pub struct Lab {
    directory: PathBuf,
    binaries: PathBuf,
    containerd: Containerd,
    ctr: Ctr,
}

impl Lab {
    /// Starts containerd and imports the image. Only works inside the lab.
    pub fn start() -> Result<Self> {
        let namespace = std::env::var("LAB_ID")
            .context("this runs inside the lab only: make e2e, make demo")?;
        let profile = std::env::var("STASIS_PROFILE").unwrap_or_else(|_| "debug".to_owned());
        let binaries = Path::new(TARGET).join(profile);
        let directory = std::env::temp_dir().join("stasis");
        fs::create_dir_all(&directory)?;
        let containerd = Containerd::start(&directory.join("containerd"))?;
        let ctr = Ctr::new(&containerd.socket(), &namespace);
        let workloads = [binaries.join("counter"), binaries.join("ranks")];
        let library = [binaries.join("libstasis_emulated_gpu.so")];
        let archive = image::build(&directory.join("image"), &workloads, &library)?;
        ctr.import(&archive)?;
        Ok(Self { directory, binaries, containerd, ctr })
    }

    /// The client that everything goes through.
    #[must_use]
    pub fn ctr(&self) -> &Ctr {
        &self.ctr
    }

    /// The containerd behind it.
    #[must_use]
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// Runs one test with its own GPU, runtime and directory, and cleans up after it.
    ///
    /// What goes wrong in cleaning fails a test that went well otherwise. The logs of a failed
    /// one are kept.
    pub fn run(&self, name: &str, test: impl FnOnce(&Case) -> Result<()>) -> Result<()> {
        let case = Case::new(self, name)?;
        let result = test(&case).and_then(|()| case.finish());
        if let Err(error) = result {
            let kept = self.keep_logs(&case);
            return Err(error.context(match kept {
                Ok(place) => format!("logs are in {place}"),
                Err(error) => format!("no logs could be kept: {error:#}"),
            }));
        }
        Ok(())
    }

    /// Copies what explains a failure to where it outlives the lab; gives the place as the host
    /// names it.
    fn keep_logs(&self, case: &Case) -> Result<String> {
        let folder = Path::new(&self.ctr.namespace()).join(&case.name);
        let kept = Path::new(LOGS).join(&folder);
        copy_logs(&case.directory, &kept.join("test"))?;
        for id in case.containers.borrow().iter() {
            for place in ["root", "state"] {
                let task = self
                    .containerd
                    .log()
                    .with_file_name(place)
                    .join("io.containerd.runtime.v2.task")
                    .join(self.ctr.namespace())
                    .join(id);
                copy_logs(&task, &kept.join(place).join(id))?;
            }
        }
        fs::copy(self.containerd.log(), kept.join("containerd.log"))?;
        let host = std::env::var("LAB_LOGS").unwrap_or_else(|_| LOGS.to_owned());
        Ok(Path::new(&host).join(folder).display().to_string())
    }
}

/// Copies the small text files below a directory; images and device memory are neither.
fn copy_logs(from: &Path, to: &Path) -> Result<()> {
    const LARGEST: u64 = 4 << 20;
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).into_iter().flatten().flatten() {
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type()?;
        // A bundle's root is the whole image.
        if kind.is_dir() && entry.file_name() != "rootfs" {
            copy_logs(&path, &target)?;
        } else if kind.is_file()
            && entry.metadata()?.len() <= LARGEST
            && path.extension().is_none_or(|extension| extension != "img")
        {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

/// A container to start.
#[derive(Debug, Clone)]
pub struct Container {
    /// Program and arguments.
    pub program: Vec<String>,
    /// Whether it gets the emulated GPU.
    pub gpu: bool,
    /// More arguments for `ctr run`.
    pub options: Vec<String>,
}

impl Container {
    /// One that runs this program, with a GPU.
    pub fn new(program: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            program: program.into_iter().map(Into::into).collect(),
            gpu: true,
            options: Vec::new(),
        }
    }

    /// The counter in GPU memory, with these options.
    #[must_use]
    pub fn counter(options: &[&str]) -> Self {
        Self::new(["/bin/counter"].iter().chain(options).copied())
    }

    /// The same without a GPU.
    #[must_use]
    pub fn without_gpu(mut self) -> Self {
        self.gpu = false;
        self
    }

    /// The same with an annotation.
    #[must_use]
    pub fn annotated(mut self, annotation: &str) -> Self {
        self.options.extend(["--annotation".to_owned(), annotation.to_owned()]);
        self
    }
}

/// The fixture of one test.
#[derive(Debug)]
pub struct Case<'a> {
    /// The test's name as a file name, with which its containers' names begin.
    name: String,
    directory: PathBuf,
    lab: &'a Lab,
    /// Its GPU.
    pub gpu: Gpu,
    /// Its runtime.
    pub runtime: Runtime,
    containers: RefCell<Vec<String>>,
}

impl<'a> Case<'a> {
    fn new(lab: &'a Lab, name: &str) -> Result<Self> {
        let name = name.replace("::", "-");
        let directory = lab.directory.join(&name);
        fs::create_dir_all(&directory)?;
        let library = lab.binaries.join("libstasis_emulated_gpu.so");
        let gpu = Gpu::new(&directory.join("gpu"), &library)?;
        let runtime =
            Runtime::new(&directory.join("runtime"), &lab.binaries, &gpu, &Settings::default())?;
        Ok(Self { name, directory, lab, gpu, runtime, containers: RefCell::default() })
    }

    /// `ctr` for this test's containers.
    #[must_use]
    pub fn ctr(&self) -> &'a Ctr {
        &self.lab.ctr
    }

    /// A path in the test's own directory, on a file system that can hold images.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A program that cargo built.
    #[must_use]
    pub fn binary(&self, name: &str) -> PathBuf {
        self.lab.binaries.join(name)
    }

    /// Changes the runtime from now on.
    pub fn set(&self, settings: &Settings) -> Result<()> {
        self.runtime.set(&self.gpu, settings)
    }

    /// Starts a container in the background; gives its id.
    pub fn start(&self, container: &Container) -> Result<String> {
        let id = format!("{}-{}", self.name, self.containers.borrow().len() + 1);
        self.containers.borrow_mut().push(id.clone());
        let wrapper = self.runtime.wrapper().display().to_string();
        let mut arguments = vec!["run".to_owned(), "--detach".to_owned()];
        arguments.extend(["--runc-binary".to_owned(), wrapper]);
        if container.gpu {
            arguments.extend(self.gpu.arguments());
        }
        arguments.extend(container.options.iter().cloned());
        arguments.extend([image::NAME.to_owned(), id.clone()]);
        arguments.extend(container.program.iter().cloned());
        self.ctr().run(arguments)?;
        Ok(id)
    }

    /// Starts a counter with these options and asks it once; gives its id.
    pub fn start_counter(&self, options: &[&str]) -> Result<String> {
        let id = self.start(&Container::counter(options))?;
        self.ask(&id)?;
        Ok(id)
    }

    /// The init process of a container's task.
    pub fn pid(&self, id: &str) -> Result<Pid> {
        let task = self.ctr().task(id)?.with_context(|| format!("{id} has no task"))?;
        Ok(task.pid)
    }

    /// What the counter of a container answers.
    pub fn ask(&self, id: &str) -> Result<u64> {
        udp::ask(self.pid(id)?, PORT)
    }

    /// The counter answers with this number.
    pub fn expect(&self, id: &str, number: u64) -> Result<()> {
        let answer = self.ask(id)?;
        ensure!(answer == number, "the counter of {id} said {answer} instead of {number}");
        Ok(())
    }

    /// The task has this status.
    pub fn expect_status(&self, id: &str, status: Status) -> Result<()> {
        let found = self.ctr().status(id)?;
        ensure!(found == status, "the task of {id} is {found:?} instead of {status:?}");
        Ok(())
    }

    /// Waits until a task has ended by itself.
    pub fn wait_stopped(&self, id: &str) -> Result<()> {
        wait::until("the end of the task", Duration::from_secs(10), || {
            Ok((self.ctr().status(id)? == Status::Stopped).then_some(()))
        })
    }

    /// A file of a running container.
    pub fn read(&self, id: &str, file: &str) -> Result<String> {
        let path = format!("/proc/{}/root{file}", self.pid(id)?);
        fs::read_to_string(&path).with_context(|| path)
    }

    /// Kills a task and takes it away; the container stays.
    pub fn end_task(&self, id: &str) -> Result<()> {
        if self.ctr().status(id)? != Status::Stopped {
            self.ctr().kill(id)?;
        }
        self.ctr().remove_task(id)
    }

    /// Takes the task and the container away, if they are there.
    pub fn remove(&self, id: &str) -> Result<()> {
        if self.ctr().status(id)? != Status::Gone {
            self.ctr().remove_task(id)?;
        }
        let known = self.ctr().run(["containers", "ls", "--quiet"])?;
        if known.lines().any(|line| line == id) {
            self.ctr().remove_container(id)?;
        }
        leaks::container(self.ctr().namespace(), id)
    }

    /// `ctr containers checkpoint`, then the container is taken away, then restored under the
    /// same name.
    pub fn cycle(&self, id: &str) -> Result<()> {
        let image = format!("checkpoint/{id}:1");
        self.ctr().checkpoint_container(id, &image)?;
        self.remove(id)?;
        self.ctr().restore(id, &image)?;
        self.ctr().remove_image(&image)
    }

    /// Where containerd's shim has runc keep the states of its containers.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        Path::new("/run/containerd/runc").join(self.ctr().namespace())
    }

    /// A checkpoint of a running or paused task as engines other than containerd make it:
    /// without pausing it first.
    #[must_use]
    pub fn direct_checkpoint(&self, id: &str, image: &Path) -> Command {
        let mut command = self.runtime.command();
        command.arg("--root").arg(self.root()).arg("checkpoint");
        command.arg("--image-path").arg(image).arg("--work-path").arg(self.path("work"));
        command.arg("--leave-running").arg(id);
        command
    }

    /// Restores a container whose task is gone from an image directory.
    pub fn restore_from(&self, id: &str, image: &Path) -> Result<(Bundle<'_>, Pid)> {
        let mut bundle = Bundle::new(self.ctr(), &self.runtime, id, &self.path("bundle"))?;
        let pid = bundle.restore(image)?;
        Ok((bundle, pid))
    }

    /// Takes all containers away and checks that nothing is left of the test.
    fn finish(&self) -> Result<()> {
        for id in self.containers.borrow().iter() {
            self.remove(id)?;
        }
        leaks::directory(&self.directory, &self.runtime.state())
    }
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        for id in self.containers.borrow().iter() {
            let _ = self.remove(id);
        }
        let mut remove = Command::new("rm");
        remove.args(["--recursive", "--force", "--one-file-system"]).arg(&self.directory);
        let _ = command::run(&mut remove, Duration::from_secs(60));
    }
}
