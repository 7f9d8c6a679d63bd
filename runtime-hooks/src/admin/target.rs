//! The container that a command works on, and the tools to do it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid as NixPid;
use stasis_config::{Annotations, Config};

use super::Which;
use crate::child::Program;
use crate::container::Container;
use crate::containers::{self, Place};
use crate::cuda::client::HelperDriver;
use crate::freezer::Freezer as _;
use crate::gpu_locks::LockFiles;
use crate::hold::Tracer;
use crate::host_memory::HostMemoryOf;
use crate::image::ImageDirectory;
use crate::journal::JournalFile;
use crate::parts::Parts;
use crate::processes::{CgroupProcesses, Process, Processes as _};
use crate::runc::criu::{LogStore, Options};
use crate::runc::{Runc, RuncError, Runtime};
use crate::{interrupt, spec};

/// Which container.
#[derive(Debug)]
pub(super) struct Target {
    /// The container, or a cgroup that is treated as one.
    pub(super) container: Container,
    /// Where its runtime has it; none for a cgroup.
    pub(super) place: Option<Place>,
}

/// The journal of cgroups that are no containers lies under this root, which no runtime has.
const CGROUPS: &str = "/sys/fs/cgroup";

impl Target {
    /// The one that the command line names.
    pub(super) fn named(which: &Which) -> anyhow::Result<Self> {
        let roots = containers::roots(&which.roots.given);
        if let Some(cgroup) = &which.cgroup {
            return Ok(Self { container: containers::of_cgroup(&roots, cgroup)?, place: None });
        }
        if let Some(pid) = which.pid {
            return Self::at(containers::of_process(&roots, pid)?.0);
        }
        let Some(name) = &which.container else { bail!("which container?") };
        Self::at(containers::find(&roots, name)?)
    }

    /// The one in this place.
    pub(super) fn at(place: Place) -> anyhow::Result<Self> {
        let container = Container::load(&place.root, &place.id)
            .map_err(|error| anyhow::anyhow!("{}", crate::error::chain(&error)))?;
        if containers::holds_this_process(&container.cgroup.directory) {
            bail!("container {}: its cgroup holds this very command; use another shell", place.id);
        }
        Ok(Self { container, place: Some(place) })
    }

    /// Its journal.
    pub(super) fn journal(&self, config: &Config) -> JournalFile {
        let state = &config.state.directory;
        match &self.place {
            Some(place) => JournalFile::new(state, &place.root, &place.id),
            None => {
                JournalFile::new(state, Path::new(CGROUPS), &self.container.id.replace('/', "%"))
            }
        }
    }

    /// Its annotations. Those of a cgroup are none, so all that a person has not allowed is refused.
    pub(super) fn annotations(&self, config: &Config) -> anyhow::Result<Annotations> {
        if self.place.is_none() {
            return Ok(Annotations::default());
        }
        let all = spec::annotations(&self.container.bundle);
        let pairs = all.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        Ok(Annotations::parse(pairs, &config.annotations)?)
    }
}

/// What a command works with.
pub(super) struct Tools {
    container: Container,
    processes: CgroupProcesses,
    driver: HelperDriver,
    hold: Tracer,
    memory: HostMemoryOf,
    gpu_locks: LockFiles,
    runtime: Box<dyn Runtime>,
    image: ImageDirectory,
    journal: JournalFile,
}

impl Tools {
    /// Nothing is started yet.
    pub(super) fn new(target: &Target, config: &Config) -> anyhow::Result<Self> {
        let container = target.container.clone();
        let (directory, init) = (&container.cgroup.directory, container.init.pid);
        let runtime: Box<dyn Runtime> = match &target.place {
            Some(place) => Box::new(runtime_of(place, &container, config)?),
            None => Box::new(Signals { container: container.clone() }),
        };
        Ok(Self {
            processes: CgroupProcesses::new(directory, init)?,
            driver: HelperDriver::new(Program::this(), &config.cuda),
            hold: Tracer::new(Program::this(), Some(container.cgroup.clone())),
            memory: HostMemoryOf::new(init, config.cuda.check_host_memory),
            gpu_locks: LockFiles::new(&config.state.directory),
            runtime,
            image: ImageDirectory::new(PathBuf::new()),
            journal: target.journal(config),
            container,
        })
    }

    /// For the sequences.
    pub(super) fn parts(&mut self) -> Parts<'_> {
        Parts {
            driver: &mut self.driver,
            hold: &mut self.hold,
            freezer: &self.container.cgroup,
            processes: &self.processes,
            runtime: self.runtime.as_mut(),
            image: &mut self.image,
            journal: &mut self.journal,
            memory: &self.memory,
            gpu_locks: &self.gpu_locks,
            interrupted: &interrupt::interrupted,
        }
    }
}

/// The runtime that has a container: needed only to end one whose CUDA is lost.
fn runtime_of(place: &Place, container: &Container, config: &Config) -> anyhow::Result<Runc> {
    let is_cruns = place.root.join(&place.id).join("status").is_file();
    let program = if is_cruns { Path::new("crun") } else { &config.runtime.path };
    let no_plugins = config.state.directory.join("no-criu-plugins");
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&no_plugins)
        .with_context(|| format!("state directory {}", config.state.directory.display()))?;
    Ok(Runc {
        program: program.to_owned(),
        globals: vec![OsString::from("--root"), place.root.clone().into()],
        id: (&place.id).into(),
        arguments: None,
        criu: Options::from_config(&config.criu),
        no_plugins,
        init: Some(container.init),
        logs: LogStore {
            directory: config.log.directory.clone(),
            keep: usize::try_from(config.log.keep).unwrap_or(usize::MAX),
        },
    })
}

/// In place of a runtime for a cgroup, which none has.
struct Signals {
    container: Container,
}

impl Signals {
    fn cannot(what: &str) -> RuncError {
        RuncError {
            command: what.to_owned(),
            how: "a cgroup that is no container has no runtime".to_owned(),
            output: String::new(),
            criu: Vec::new(),
            log: None,
            code: None,
        }
    }
}

impl Runtime for Signals {
    fn dump(&mut self, _: bool) -> Result<(), RuncError> {
        Err(Self::cannot("checkpoint"))
    }

    fn restore(&mut self) -> Result<(), RuncError> {
        Err(Self::cannot("restore"))
    }

    fn resume(&mut self) -> Result<(), RuncError> {
        let thawed = self.container.cgroup.thaw();
        thawed.map_err(|error| RuncError {
            how: crate::error::chain(&error),
            ..Self::cannot("resume")
        })
    }

    fn kill(&mut self) -> Result<(), RuncError> {
        let failed = |how: String| RuncError { how, ..Self::cannot("kill") };
        let (directory, init) = (&self.container.cgroup.directory, self.container.init.pid);
        let list = CgroupProcesses::new(directory, init).and_then(|processes| processes.list());
        let list = list.map_err(|error| failed(crate::error::chain(&error)))?;
        // Nobody has said that all of the cgroup is one thing.
        for process in list.into_iter().filter(Process::is_candidate) {
            let _ = kill(NixPid::from_raw(process.id.pid), Signal::SIGKILL);
        }
        // A frozen process does not die.
        self.resume()
    }

    fn unlock_network(&mut self) {}

    fn delete(&mut self) -> Result<(), RuncError> {
        Ok(())
    }
}
