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
use super::subjects::find;
use crate::child::Program;
use crate::container::{Cgroup, Container};
use crate::containers::{self, CGROUPS, Place};
use crate::cuda::client::HelperDriver;
use crate::freezer::Freezer as _;
use crate::gpu_locks::LockFiles;
use crate::hold::Tracer;
use crate::host_memory::HostMemoryOf;
use crate::image::ImageDirectory;
use crate::journal::{Entry, Journal as _, JournalFile};
use crate::parts::Parts;
use crate::processes::{CgroupProcesses, Process, ProcessId, Processes as _, start_time};
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

/// Where what a journal says that it is of has its place: a cgroup, with its directory as its id, under
/// [`CGROUPS`].
pub(super) fn place_of(entry: &Entry, id: String) -> Place {
    let is_cgroup = entry.root == Path::new(CGROUPS);
    let id = if is_cgroup { entry.container.clone() } else { id };
    Place { root: entry.root.clone(), id }
}

/// Whether that is a cgroup.
pub(super) fn is_cgroup(place: &Place) -> bool {
    place.root == Path::new(CGROUPS)
}

/// The journal of a container, or of a cgroup.
pub(super) fn journal(config: &Config, place: &Place) -> JournalFile {
    let state = &config.state.directory;
    if is_cgroup(place) {
        JournalFile::new(state, &place.root, &place.id.replace('/', "%"))
    } else {
        JournalFile::new(state, &place.root, &place.id)
    }
}

impl Target {
    /// The one that the command line names.
    pub(super) fn named(config: &Config, which: &Which) -> anyhow::Result<Self> {
        let roots = containers::roots(&which.roots.given);
        if let Some(cgroup) = &which.cgroup {
            return Self::of_cgroup(&roots, cgroup);
        }
        if let Some(pid) = which.pid {
            return Self::at(containers::of_process(&roots, pid)?.0);
        }
        let Some(name) = &which.container else { bail!("which container?") };
        Self::at(find(config, &which.roots.given, name)?)
    }

    /// This cgroup, which must not be one of a container below `roots`.
    pub(super) fn of_cgroup(roots: &[PathBuf], cgroup: &Path) -> anyhow::Result<Self> {
        Ok(Self { container: containers::of_cgroup(roots, cgroup)?, place: None })
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
        match &self.place {
            Some(place) => journal(config, place),
            None => journal(config, &Place { root: CGROUPS.into(), id: self.container.id.clone() }),
        }
    }

    /// A cgroup has no init. Its oldest process is taken for it, which may end, or be joined by an older
    /// one; the journal is nevertheless this cgroup's as long as one of the processes that it knows is
    /// in there, and is told which one is the oldest now.
    fn recognise(&self, journal: &mut JournalFile) -> anyhow::Result<()> {
        let Container { id, init, cgroup, .. } = &self.container;
        if self.place.is_some() {
            return Ok(());
        }
        let Some(mut entry) = journal.load()? else { return Ok(()) };
        if entry.init == *init {
            return Ok(());
        }
        let inside = containers::processes(&cgroup.directory);
        if entry.known().any(|known| inside.contains(&known)) {
            entry.follow(*init);
            return Ok(journal.save(&entry)?);
        }
        match alive(&entry) {
            Some(ProcessId { pid, .. }) => bail!(
                "pid {pid}, which the journal of {id} knows, runs outside of this cgroup now; move it back \
                 first; nothing was done"
            ),
            // Nothing is left to put right.
            None => Ok(()),
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

/// One of the processes that the entry knows, if any still runs.
pub(super) fn alive(entry: &Entry) -> Option<ProcessId> {
    entry.known().find(|id| start_time(id.pid) == Some(id.start_time))
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
    /// Nothing is started yet. The lock of the journal is held: that of a cgroup is brought up to date.
    pub(super) fn new(target: &Target, config: &Config) -> anyhow::Result<Self> {
        let container = target.container.clone();
        let mut journal = target.journal(config);
        target.recognise(&mut journal)?;
        let (directory, init) = (&container.cgroup.directory, container.init.pid);
        let processes = CgroupProcesses::new(directory, init)?;
        let (runtime, processes): (Box<dyn Runtime>, _) = if let Some(place) = &target.place {
            (Box::new(runtime_of(place, &container, config)?), processes)
        } else {
            let processes = processes.without_init();
            let cgroup = container.cgroup.clone();
            (Box::new(Signals { processes: processes.clone(), cgroup }), processes)
        };
        Ok(Self {
            processes,
            driver: HelperDriver::new(Program::this(), &config.cuda),
            hold: Tracer::new(Program::this(), Some(container.cgroup.clone())),
            memory: HostMemoryOf::new(init, config.cuda.check_host_memory),
            gpu_locks: LockFiles::new(&config.state.directory),
            runtime,
            image: ImageDirectory::new(PathBuf::new()),
            journal,
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
    processes: CgroupProcesses,
    cgroup: Cgroup,
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
        let thawed = self.cgroup.thaw();
        thawed.map_err(|error| RuncError {
            how: crate::error::chain(&error),
            ..Self::cannot("resume")
        })
    }

    fn kill(&mut self) -> Result<(), RuncError> {
        let failed = |how: String| RuncError { how, ..Self::cannot("kill") };
        let list = self.processes.list().map_err(|error| failed(crate::error::chain(&error)))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::CgroupVersion;
    use std::time::Duration;

    const ENDED: ProcessId = ProcessId { pid: i32::MAX, start_time: 1 };

    /// A cgroup with this process in it, and a journal that knows `known`; what the journal says when it
    /// was told, or why it was not.
    fn told(inside: bool, init: ProcessId, known: Option<ProcessId>) -> Result<Entry, String> {
        let host = tempfile::tempdir().unwrap();
        let directory = host.path().join("cgroup");
        fs::create_dir(&directory).unwrap();
        let own = own();
        let text = if inside { format!("{}\n", own.pid) } else { String::new() };
        fs::write(directory.join("cgroup.procs"), text).unwrap();
        let cgroup = Cgroup { version: CgroupVersion::V2, directory: directory.clone() };
        let id = directory.display().to_string();
        let oldest = ProcessId { pid: 3, start_time: 1 };
        let container = Container { id: id.clone(), init: oldest, bundle: PathBuf::new(), cgroup };
        let target = Target { container, place: None };
        let mut config = Config::default();
        config.state.directory = host.path().join("state");
        let mut journal = target.journal(&config);
        let _lock = journal.lock(Duration::ZERO).unwrap();
        target.recognise(&mut journal).unwrap();
        assert!(!journal.exists());
        let mut entry = Entry::new(&id, init, false, Path::new(""));
        entry.processes.extend(known.map(|id| crate::journal::Noted {
            unseen: false,
            id,
            found: crate::cuda::CudaState::Running,
            uses: crate::cuda::GpuUse::default(),
            device_map: crate::remap::DeviceMap::new(),
        }));
        entry.suspended = Some(Box::new(entry.clone()));
        journal.save(&entry).unwrap();
        target.recognise(&mut journal).map_err(|error| error.to_string())?;
        let now = journal.load().unwrap().unwrap();
        assert_eq!(now.suspended.as_ref().unwrap().init, now.init);
        // It is found again, and is this cgroup's.
        let found = JournalFile::all(&config.state.directory).remove(0);
        let place = place_of(&found.entry.unwrap(), found.id);
        assert!(is_cgroup(&place) && place.id == id, "{place:?}");
        assert_eq!(super::journal(&config, &place).file(), journal.file());
        Ok(now)
    }

    fn own() -> ProcessId {
        let pid = i32::try_from(std::process::id()).unwrap();
        ProcessId { pid, start_time: start_time(pid).unwrap() }
    }

    #[test]
    fn a_cgroup_is_the_same_as_long_as_one_of_its_processes_is_in_it() {
        let oldest = ProcessId { pid: 3, start_time: 1 };
        assert_eq!(told(true, ENDED, Some(own())).unwrap().init, oldest);
        // An older one has joined.
        assert_eq!(told(true, own(), None).unwrap().init, oldest);
        // Others have taken the places of all.
        let reused = ProcessId { start_time: own().start_time + 1, ..own() };
        assert_eq!(told(true, ENDED, Some(reused)).unwrap().init, ENDED);
        let said = told(false, ENDED, Some(own())).unwrap_err();
        assert!(said.contains(&format!("pid {}, which", own().pid)), "{said}");
    }
}
