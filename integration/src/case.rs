//! The fixtures: what all tests share, and what one test has for itself.

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::Pid;
use serde_json::Value;

use crate::bundle::Bundle;
use crate::containerd::Containerd;
use crate::ctr::{Checkpoint, Ctr, Status};
use crate::gpu::Gpu;
use crate::runtime::{Runtime, Settings};
use crate::shim::Shim;
use crate::site::{Kind, Pool, Site};
use crate::starvation::Watch;
use crate::suite::Suite;
use crate::task::TaskClient;
use crate::{command, image, leaks, udp, wait};

/// The counter's port; every container has a network namespace of its own.
pub const PORT: u16 = 10000;

/// How long an image may be looked at: an archive is read as a whole.
const INSPECT: Duration = Duration::from_secs(30);

/// Where the lab has what cargo built.
const TARGET: &str = "/stasis-target";

/// The lab's directory that outlives it.
const LOGS: &str = "/logs";

/// What all tests share: a containerd that knows the image, and more of them for tests that need
/// one for themselves.
#[derive(Debug)]
pub struct Lab {
    directory: PathBuf,
    binaries: PathBuf,
    shared: Arc<Site>,
    pool: Pool,
    /// Held alone by tests that measure times.
    quiet: RwLock<()>,
    watch: Watch,
    /// The tests that failed, were repeated although nothing told why, and passed.
    repeated: Mutex<Vec<String>>,
}

/// So many failures of a whole run may be chance: the programs of others have races of their own.
const CHANCES: usize = 1;

/// What a test runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The shim of its containers.
    pub shim: Shim,
    /// Whether it has a containerd for itself; it has where our shim is used.
    pub apart: bool,
    /// Whether no other test may run beside it.
    pub quiet: bool,
}

impl Place {
    /// On containerd's own shim and the containerd of all tests.
    pub const SHARED: Self = Self { shim: Shim::Go, apart: false, quiet: false };

    /// On this shim, with a containerd that no other test uses at the time.
    #[must_use]
    pub fn apart(shim: Shim) -> Self {
        Self { shim, apart: true, quiet: false }
    }

    /// The same, with the machine for itself.
    #[must_use]
    pub fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }
}

impl Lab {
    /// Starts containerd and imports the image. Only works inside the lab.
    pub fn start() -> Result<Self> {
        let namespace = std::env::var("LAB_ID")
            .context("this runs inside the lab only: make e2e, make demo, make bench")?;
        let profile = std::env::var("STASIS_PROFILE").unwrap_or_else(|_| "debug".to_owned());
        let binaries = Path::new(TARGET).join(profile);
        let directory = std::env::temp_dir().join("stasis");
        fs::create_dir_all(&directory)?;
        // NVIDIA's utility is in the images of people who start their jobs themselves.
        let workloads = ["counter", "ranks", "ipc", image::UTILITY].map(|name| binaries.join(name));
        let library = [binaries.join("libstasis_emulated_gpu.so")];
        let archive = image::build(&directory.join("image"), &workloads, &library)?;
        let shared =
            Site::start(&directory.join("shared"), Kind::Go, &binaries, &namespace, &archive)?;
        let pool = Pool::new(&directory.join("apart"), &binaries, &namespace, &archive);
        let (shared, quiet, watch) = (Arc::new(shared), RwLock::default(), Watch::start());
        Ok(Self { directory, binaries, shared, pool, quiet, watch, repeated: Mutex::default() })
    }

    /// A containerd that nobody else uses.
    pub fn site(&self, kind: Kind) -> Result<Arc<Site>> {
        self.pool.take(kind)
    }

    /// A directory on a file system that can hold images.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where cargo put the binaries.
    #[must_use]
    pub fn binaries(&self) -> &Path {
        &self.binaries
    }

    /// Runs one test with its own GPU, runtime and directory, and cleans up after it.
    ///
    /// What goes wrong in cleaning fails a test that went well otherwise. The logs of a failed
    /// one are kept. It is repeated, once, if the machine stood still meanwhile, and the first of a run
    /// also if nothing tells why it failed: see [`Lab::repeated`].
    pub fn run(
        &self,
        name: &str,
        place: Place,
        mut test: impl FnMut(&Case) -> Result<()>,
    ) -> Result<()> {
        let begin = Instant::now();
        let Err(error) = self.attempt(name, place, &mut test) else { return Ok(()) };
        let starved = self.watch.since(begin);
        let is_known = starved.is_some();
        if !is_known && !self.take_chance(name) {
            return Err(error);
        }
        let why = starved.unwrap_or_else(|| "it may be chance".to_owned());
        eprintln!("{name} is repeated, since {why}; it had failed: {error:#}");
        self.attempt(&format!("{name}_again"), place, &mut test)
    }

    fn take_chance(&self, name: &str) -> bool {
        let mut repeated = self.repeated.lock().unwrap_or_else(PoisonError::into_inner);
        let may = repeated.len() < CHANCES;
        if may {
            repeated.push(name.to_owned());
        }
        may
    }

    /// The tests that were repeated although nothing told why they had failed. If they passed then, somebody
    /// has a race, and their logs are kept.
    #[must_use]
    pub fn repeated(&self) -> Vec<String> {
        self.repeated.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The same, and it is not repeated whatever happens.
    pub fn attempt(
        &self,
        name: &str,
        place: Place,
        test: &mut dyn FnMut(&Case) -> Result<()>,
    ) -> Result<()> {
        let (_alone, _beside) = if place.quiet {
            (Some(self.quiet.write().unwrap_or_else(PoisonError::into_inner)), None)
        } else {
            (None, Some(self.quiet.read().unwrap_or_else(PoisonError::into_inner)))
        };
        let case = Case::new(self, name, place)?;
        let result = test(&case).and_then(|()| case.finish()).map_err(|error| {
            let kept = case.keep_logs();
            error.context(match kept {
                Ok(place) => format!("logs are in {place}"),
                Err(error) => format!("no logs could be kept: {error:#}"),
            })
        });
        // Whatever still uses it.
        let unmounted =
            command::succeed(Command::new("umount").arg("--lazy").arg(case.gpu.store()), MOUNTED);
        result.and(unmounted.map(drop))
    }
}

/// Where the memory of a test's GPUs lies: in memory, as a process that writes to a GPU does not wait for
/// a disk. Mounted, since CRIU restores no mount whose source is named by a symbolic link.
fn device_memory(directory: &Path) -> Result<PathBuf> {
    let store = directory.join("gpu");
    fs::create_dir_all(&store)?;
    command::succeed(Command::new("mount").args(["-t", "tmpfs", "gpu"]).arg(&store), MOUNTED)?;
    Ok(store)
}

const MOUNTED: Duration = Duration::from_secs(10);

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

    /// The same with a limit of its host memory, in bytes.
    #[must_use]
    pub fn limited(mut self, bytes: u64) -> Self {
        self.options.extend(["--memory-limit".to_owned(), bytes.to_string()]);
        self
    }

    /// The same with an annotation.
    #[must_use]
    pub fn annotated(mut self, annotation: &str) -> Self {
        self.options.extend(["--annotation".to_owned(), annotation.to_owned()]);
        self
    }
}

/// Log lines without the moment at which they were written.
fn without_times(text: &str) -> String {
    const TIME: &str = "time=\"";
    let mut result = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(TIME) {
        result.push_str(before);
        rest = after.split_once("\" ").map_or("", |(_, after)| after);
    }
    result + rest
}

/// The fixture of one test.
#[derive(Debug)]
pub struct Case<'a> {
    /// The test's name as a file name, with which its containers' names begin.
    name: String,
    directory: PathBuf,
    lab: &'a Lab,
    place: Place,
    site: Arc<Site>,
    /// Its GPUs.
    pub gpu: Gpu,
    /// Its runtime.
    pub runtime: Runtime,
    containers: RefCell<Vec<String>>,
    /// Whether there was a checkpoint.
    checkpointed: Cell<bool>,
}

impl<'a> Case<'a> {
    fn new(lab: &'a Lab, name: &str, place: Place) -> Result<Self> {
        let name = name.replace("::", "-");
        let directory = lab.directory.join(&name);
        fs::create_dir_all(&directory)?;
        let library = lab.binaries.join("libstasis_emulated_gpu.so");
        let gpu = Gpu::new(&device_memory(&directory)?, &library)?;
        let runtime =
            Runtime::new(&directory.join("runtime"), &lab.binaries, &gpu, &Settings::default())?;
        let site = match (place.shim, place.apart) {
            (Shim::Go, false) => lab.shared.clone(),
            (Shim::Go, true) => lab.pool.take(Kind::Go)?,
            (Shim::Stasis | Shim::StasisAsV2, _) => lab.pool.take(Kind::Ours)?,
        };
        let case = Self {
            name,
            directory,
            lab,
            place,
            site,
            gpu,
            runtime,
            containers: RefCell::default(),
            checkpointed: Cell::default(),
        };
        if !case.is_shared() {
            case.site.serve(&case.directory)?;
        }
        Ok(case)
    }

    fn is_shared(&self) -> bool {
        Arc::ptr_eq(&self.site, &self.lab.shared)
    }

    /// The shim of its containers.
    #[must_use]
    pub fn shim(&self) -> Shim {
        self.place.shim
    }

    /// `ctr` for this test's containers.
    #[must_use]
    pub fn ctr(&self) -> &Ctr {
        self.site.ctr()
    }

    /// Where it runs.
    #[must_use]
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Its name, as a file name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The containerd behind it.
    #[must_use]
    pub fn containerd(&self) -> &Containerd {
        self.site.containerd()
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

    /// NVIDIA's command `cuda-checkpoint` of the driver that the host has now.
    #[must_use]
    pub fn utility(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.binary(image::UTILITY));
        command.args(arguments).env("EMULATED_GPU_DIR", self.gpu.store());
        command
    }

    /// `stasis inspect` on the host of the emulated GPU.
    #[must_use]
    pub fn inspect_command(&self, image: &Path) -> Command {
        let mut command = Command::new(self.binary("stasis"));
        command.arg("inspect").arg(image);
        command.env("STASIS_CONFIG", self.runtime.config());
        command.env("EMULATED_GPU_DIR", self.gpu.store());
        command
    }

    /// What `stasis inspect` says of an image; its exit status agrees.
    pub fn inspect(&self, image: &Path) -> Result<Value> {
        let finished = command::run(self.inspect_command(image).arg("--json"), INSPECT)?;
        let seen: Value = serde_json::from_str(&finished.stdout).context(finished.stderr)?;
        ensure!(
            finished.status.success() == (seen["whole"] == true),
            "{}: {seen}",
            finished.status
        );
        Ok(seen)
    }

    /// The files of which the image of [`image::NAME`] was made.
    #[must_use]
    pub fn image_parts(&self) -> PathBuf {
        self.lab.directory.join("image/parts")
    }

    /// Changes the runtime from now on.
    pub fn set(&self, settings: &Settings) -> Result<()> {
        self.runtime.set(&self.gpu, settings)
    }

    /// A new container's id; what has this id is cleaned up.
    pub fn new_id(&self) -> String {
        let mut containers = self.containers.borrow_mut();
        let id = format!("{}-{}", self.name, containers.len() + 1);
        containers.push(id.clone());
        id
    }

    /// Cleans up after a container whose id was chosen by somebody else, too.
    pub fn adopt(&self, id: &str) {
        self.containers.borrow_mut().push(id.to_owned());
    }

    /// Arguments of `ctr run` that choose the shim and the runtime of this test.
    #[must_use]
    pub fn runtime_arguments(&self) -> Vec<String> {
        let shim = self.shim();
        shim.arguments(&self.runtime.program(shim), &self.runtime.config())
    }

    /// The arguments of `ctr` that run a container, with these flags before the image.
    #[must_use]
    pub fn run_arguments(&self, id: &str, flags: &[&str], container: &Container) -> Vec<String> {
        let mut arguments = vec!["run".to_owned()];
        arguments.extend(flags.iter().map(|&flag| flag.to_owned()));
        arguments.extend(self.runtime_arguments());
        if container.gpu {
            arguments.extend(self.gpu.arguments());
        }
        arguments.extend(container.options.iter().cloned());
        arguments.extend([image::NAME.to_owned(), id.to_owned()]);
        arguments.extend(container.program.iter().cloned());
        arguments
    }

    /// Starts a container in the background; gives its id.
    pub fn start(&self, container: &Container) -> Result<String> {
        let id = self.new_id();
        self.ctr().run(self.run_arguments(&id, &["--detach"], container))?;
        Ok(id)
    }

    /// Starts a counter with these options and asks it once; gives its id.
    pub fn start_counter(&self, options: &[&str]) -> Result<String> {
        let id = self.start(&Container::counter(options))?;
        self.ask(&id)?;
        Ok(id)
    }

    /// A text without what differs from shim to shim and from run to run: names of containers,
    /// paths, and numbers of more than two digits.
    #[must_use]
    pub fn normal(&self, text: &str) -> String {
        let mut text = without_times(text);
        for id in self.containers.borrow().iter().rev() {
            text = text.replace(id, "ID");
        }
        let program = self.runtime.program(self.shim());
        for (path, word) in [
            (program, "RUNC"),
            (self.directory.clone(), "TEST"),
            (self.site.directory().to_owned(), "SITE"),
            (PathBuf::from(self.ctr().namespace()), "NAMESPACE"),
        ] {
            text = text.replace(&*path.to_string_lossy(), word);
        }
        let mut result = String::new();
        let mut rest = text.as_str();
        while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
            let digits = rest[at..].find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len() - at);
            result.push_str(&rest[..at]);
            result.push_str(if digits > 2 { "#" } else { &rest[at..at + digits] });
            rest = &rest[at + digits..];
        }
        result + rest
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

    /// The same, whatever is in it.
    pub fn read_bytes(&self, id: &str, file: &str) -> Result<Vec<u8>> {
        let path = format!("/proc/{}/root{file}", self.pid(id)?);
        fs::read(&path).with_context(|| path)
    }

    /// A client of the task's shim.
    pub fn task(&self, id: &str) -> Result<TaskClient> {
        let namespace = self.ctr().namespace();
        TaskClient::connect(&self.containerd().bundle(namespace, id), namespace)
    }

    /// `ctr tasks checkpoint`.
    ///
    /// ctr 1.7 keeps all flags to itself unless the runtime is called `io.containerd.runc.v2`. For
    /// another name they go to the shim as containerd's client would send them.
    pub fn checkpoint(&self, id: &str, options: &Checkpoint) -> Result<()> {
        let plain = options.image.is_none() && options.work.is_none() && !options.exit;
        let sent = Suite::current()?.is_some_and(Suite::has_containerd_2);
        if sent && self.shim() == Shim::Stasis && self.checkpointed.replace(true) {
            // ctr 2.x also puts an image into the store, under the name of the second.
            std::thread::sleep(Duration::from_millis(1100));
        }
        if self.shim() != Shim::Stasis || plain || sent {
            return self.ctr().checkpoint(id, options);
        }
        let shim = self.task(id)?;
        let paused = self.ctr().status(id)? == Status::Paused;
        if !paused {
            shim.pause(id)?;
        }
        let image = options.image.clone().unwrap_or_else(|| self.path("image-for-the-store"));
        let result = shim.checkpoint(id, &image, options.work.as_deref(), options.exit);
        if !paused {
            // A task that ended is not there to be resumed, and ctr minds as little.
            let _ = shim.resume(id);
        }
        Ok(result.map(drop)?)
    }

    /// `ctr tasks checkpoint` that has to fail; gives the error.
    pub fn checkpoint_fails(&self, id: &str, options: &Checkpoint) -> Result<String> {
        match self.checkpoint(id, options) {
            Ok(()) => bail!("a checkpoint of {id} should have failed"),
            Err(error) => Ok(format!("{error:#}")),
        }
    }

    /// By which the processes of this test's engine are known: a part of their environment.
    #[must_use]
    pub fn engine_environment(&self) -> String {
        let config = match self.shim() {
            Shim::Go => self.runtime.config(),
            Shim::Stasis | Shim::StasisAsV2 => self.site.case_link().join("runtime/config.toml"),
        };
        format!("STASIS_CONFIG={}", config.display())
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

    /// Copies what explains a failure to where it outlives the lab; gives the place as the host
    /// names it.
    fn keep_logs(&self) -> Result<String> {
        let (ctr, containerd) = (self.ctr(), self.containerd());
        let folder = Path::new(ctr.namespace()).join(&self.name);
        let kept = Path::new(LOGS).join(&folder);
        copy_logs(&self.directory, &kept.join("test"))?;
        for id in self.containers.borrow().iter() {
            for place in ["root", "state"] {
                let task = containerd
                    .log()
                    .with_file_name(place)
                    .join("io.containerd.runtime.v2.task")
                    .join(ctr.namespace())
                    .join(id);
                copy_logs(&task, &kept.join(place).join(id))?;
            }
        }
        fs::copy(containerd.log(), kept.join("containerd.log"))?;
        let host = std::env::var("LAB_LOGS").unwrap_or_else(|_| LOGS.to_owned());
        Ok(Path::new(&host).join(folder).display().to_string())
    }

    /// Takes all containers away and checks that nothing is left of the test.
    fn finish(&self) -> Result<()> {
        for id in self.containers.borrow().iter() {
            self.remove(id)?;
        }
        if !self.is_shared() {
            self.site.expect_no_shims()?;
        }
        leaks::directory(&self.directory, &self.runtime.state())
    }
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        for id in self.containers.borrow().iter() {
            let _ = self.remove(id);
        }
        // One with remains of this test would spoil the next one's.
        if !self.is_shared() && self.site.expect_no_shims().is_ok() {
            self.lab.pool.give(self.site.clone());
        }
        let mut remove = Command::new("rm");
        remove.args(["--recursive", "--force", "--one-file-system"]).arg(&self.directory);
        let _ = command::run(&mut remove, Duration::from_secs(60));
    }
}
