//! The subcommands that are more than the runtime's.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::signal::Signal;
use stasis_config::{AnnotationName, Annotations};

use super::Context;
use crate::cdi::Bundle;
use crate::checkpoint::{self, After, LOCK_PATIENCE};
use crate::child::Program;
use crate::container::{Container, ContainerError};
use crate::cuda::Driver as _;
use crate::cuda::client::HelperDriver;
use crate::discover::discover;
use crate::error::{Cause, Failure, Left, Phase, chain};
use crate::freezer::Freezer as _;
use crate::gpu_locks::LockFiles;
use crate::hold::Tracer;
use crate::host_memory::HostMemoryOf;
use crate::image::{self, ImageDirectory};
use crate::interrupt;
use crate::job::bundle::{Exec, detach_stale};
use crate::job::given::Given;
use crate::job::{self, JobDirectory};
use crate::journal::{Entry, Journal as _, JournalError, JournalFile, Stage};
use crate::parts::{Limits, Parts};
use crate::processes::{CgroupProcesses, Process, Processes};
use crate::restore::{self, RestoreParts};
use crate::resume;
use crate::runc::Runc;
use crate::runc::again;
use crate::runc::args::CommandLine;
use crate::runc::criu::{LogStore, Options};
use crate::sockets::established_tcp;
use crate::{spec, sys};

/// `checkpoint`.
pub(super) fn checkpoint(context: &Context<'_>) -> anyhow::Result<ExitCode> {
    let container = match Container::load(&context.root(), context.id) {
        Ok(container) => container,
        // The runtime has the words for these.
        Err(ContainerError::NotFound { .. } | ContainerError::NotRunning(_)) => {
            match context.become_runtime()? {}
        }
        Err(error) => return Err(untouched(context, "checkpoint", error.into())),
    };
    let refused = |cause| untouched(context, "checkpoint", cause);
    let journal = context.journal();
    let arguments = context.line.arguments();
    let image = absolute(&arguments.image_path())?;
    let processes = CgroupProcesses::new(&container.cgroup.directory, container.init.pid)
        .map_err(|error| refused(error.into()))?;
    let listed = processes.list().map_err(|error| refused(error.into()))?;
    if !journal.exists() && !listed.iter().any(Process::is_candidate) {
        image::forget(&image).map_err(refused)?;
        return without_cuda(context, "checkpoint");
    }

    let _lock = journal.lock(LOCK_PATIENCE).map_err(|error| refused(error.into()))?;
    let job = JobDirectory::of(&journal);
    let mut tools = Tools::new(context, journal)?;
    tools.image = ImageDirectory::new(image);
    let mut world = World::of(&container, processes, &mut tools);
    let (parked, suspended) = match world.repair(context)? {
        Before::Nothing => (None, None),
        Before::Parked(entry) => (Some(entry), None),
        Before::Suspended(entry) => (None, Some(entry)),
    };
    let cuda = match &parked {
        Some(entry) => checkpoint::parked(&mut world.parts(), entry),
        None => discover(&mut world.parts()),
    };
    let cuda = cuda.map_err(|cause| failure(context, "checkpoint", Phase::Discover, cause))?;
    // Not before: a runtime that is executed in our place finds the signals as the caller set them.
    interrupt::listen()?;
    if let Some(option) = checkpoint::refused_option(&arguments) {
        return Err(refused(Cause::Option(option)));
    }
    let spec = spec::load(&container.bundle).map_err(|error| refused(error.into()))?;
    let annotations = annotations(context, &container.bundle).map_err(refused)?;
    let mountinfo = fs::read_to_string(format!("/proc/{}/mountinfo", container.init.pid))
        .map_err(|_| refused(Cause::Gone))?;
    let dump = world.tools.runc.criu.flags_with(&arguments);
    let after = if arguments.has("leave-running") {
        After::LeaveRunning
    } else {
        let pids: Vec<_> = listed.iter().map(|process| process.id.pid).collect();
        After::Exit { by_criu: dump.tcp_established && established_tcp(&pids) }
    };
    world.tools.runc.criu.without_plugins = true;
    let request = checkpoint::Request {
        container: &container,
        spec: &spec,
        annotations: &annotations,
        mountinfo: &mountinfo,
        dump,
        after,
        minimum_driver: context.config.jobs.minimum_driver,
        given_job: job.identity(),
        suspended: suspended.as_ref(),
        limits: Limits::new(&context.config.cuda, annotations.lock_timeout),
    };
    match parked {
        Some(entry) => checkpoint::again(&mut world.parts(), &request, &entry, &cuda)?,
        None => checkpoint::checkpoint(&mut world.parts(), &request, cuda)?,
    }
    if after != After::LeaveRunning {
        forget_job(context, &job);
    }
    Ok(ExitCode::SUCCESS)
}

/// `restore`.
pub(super) fn restore(context: &Context<'_>) -> anyhow::Result<ExitCode> {
    let refused = |cause| untouched(context, "restore", cause);
    let arguments = context.line.arguments();
    let image = absolute(&arguments.image_path())?;
    let image::Kind::Cuda(manifest) = image::kind(&image).map_err(refused)? else {
        give_job_if_annotated(context, "restore")?;
        return without_cuda(context, "restore");
    };
    if !arguments.has("detach") && !arguments.has("d") {
        return Err(refused(Cause::NotDetached));
    }
    let root = context.root();
    let journal = context.journal();
    let _lock = journal.lock(LOCK_PATIENCE).map_err(|error| refused(error.into()))?;
    // A container of this id is not ours to kill if the restore fails: the runtime refuses.
    if root.join(context.id).exists() {
        match context.become_runtime()? {}
    }
    interrupt::listen()?;
    let directory = JobDirectory::of(&journal);
    let mut tools = Tools::new(context, journal)?;
    let bundle = absolute(&arguments.bundle())?;
    let annotations = annotations(context, &bundle).map_err(refused)?;
    if !annotations.job {
        give_no_job(context, &bundle).map_err(refused)?;
    }
    let mut job = Given::new(&bundle, directory, context.config, annotations.job);
    let mut bundle = Bundle::new(&bundle, context.config);
    tools.runc.criu.add(manifest.dump);
    tools.runc.criu.without_plugins = true;
    let restored = || -> Result<_, Cause> {
        let container = Container::load(&root, context.id)?;
        let processes = CgroupProcesses::new(&container.cgroup.directory, container.init.pid)?;
        Ok((container.init, Box::new(processes) as Box<dyn Processes>))
    };
    let mut parts = RestoreParts {
        driver: &mut tools.driver,
        runtime: &mut tools.runc,
        journal: &mut tools.journal,
        container: &mut bundle,
        job: &mut job,
        restored: &restored,
        gpu_locks: &tools.gpu_locks,
        interrupted: &interrupt::interrupted,
    };
    let request = restore::Request {
        container: context.id,
        image: &image,
        manifest: &manifest,
        limits: Limits::new(&context.config.cuda, annotations.lock_timeout),
        device_map: annotations.device_map.as_deref(),
        suspended: annotations.restore_suspended,
    };
    restore::restore(&mut parts, &request)?;
    Ok(ExitCode::SUCCESS)
}

/// For a restore whose container is not clear: an image with CUDA is not left to the runtime alone,
/// which would report a container as started whose CUDA is dead.
pub(super) fn refuse_cuda(line: &CommandLine) -> anyhow::Result<()> {
    let image = absolute(&line.arguments().image_path())?;
    match image::kind(&image) {
        Ok(image::Kind::Plain) => Ok(()),
        Ok(image::Kind::Cuda(_)) => anyhow::bail!(
            "stasis: restore of {}: the command line is not understood (which argument is the \
             container's id?), and the image needs CUDA to be restored; nothing was done",
            image.display()
        ),
        Err(cause) => anyhow::bail!("stasis: restore: {cause}; nothing was done"),
    }
}

/// `resume`.
pub(super) fn resume(context: &Context<'_>) -> anyhow::Result<ExitCode> {
    let journal = context.journal();
    if !journal.exists() {
        match context.become_runtime()? {}
    }
    interrupt::listen()?;
    let _lock =
        journal.lock(LOCK_PATIENCE).map_err(|error| untouched(context, "resume", error.into()))?;
    let entry = journal.load().map_err(|error| untouched(context, "resume", error.into()))?;
    let container = Container::load(&context.root(), context.id);
    let (Some(entry), Ok(container)) = (entry, container) else {
        // Gone: the runtime says so. What the journal says is of no use any more.
        journal.forget();
        match context.become_runtime()? {}
    };
    let mut tools = Tools::new(context, journal)?;
    let limits = limits_of(context, &container);
    let processes = CgroupProcesses::new(&container.cgroup.directory, container.init.pid)
        .map_err(|error| untouched(context, "resume", error.into()))?;
    let mut world = World::of(&container, processes, &mut tools);
    if entry.stage == Stage::Suspended {
        // Paused and resumed like any other, and suspended all the while.
        match context.become_runtime()? {}
    }
    // What cannot be brought back by a suspend or resume that was killed stays suspended.
    let may_stay = matches!(entry.stage, Stage::Freeing | Stage::Resuming);
    if entry.frozen && !may_stay && entry.init == container.init {
        resume::resume(&mut world.parts(), &entry, &limits)?;
        return Ok(ExitCode::SUCCESS);
    }
    resume::repair(&mut world.parts(), &entry, container.init, &limits)?;
    runs_from_now_on(&mut tools.journal)?;
    match context.become_runtime()? {}
}

/// What is still to be repaired later is not to be paused then.
fn runs_from_now_on(journal: &mut JournalFile) -> anyhow::Result<()> {
    match journal.load()? {
        Some(mut entry) if entry.stage.is_under_way() && entry.frozen => {
            (entry.frozen, entry.freezes) = (false, false);
            Ok(journal.save(&entry)?)
        }
        _ => Ok(()),
    }
}

/// `delete`: never waits for an operation. Its state files go with the container.
pub(super) fn delete(context: &Context<'_>) -> anyhow::Result<ExitCode> {
    let journal = context.journal();
    if !journal.in_use() {
        match context.become_runtime()? {}
    }
    let mut command = Command::new(context.program);
    command.args(&context.line.globals).arg("delete").args(&context.line.rest);
    again::mark(&mut command, context.line);
    sys::die_with_parent_thread(&mut command, Signal::SIGKILL);
    let status = command
        .status()
        .with_context(|| format!("stasis: cannot execute {}", context.program.display()))?;
    if !context.root().join(context.id).exists() {
        // Busy: another of this id is just being made, or an operation on this one sees its end. What that
        // leaves is swept away later.
        if let Ok(_lock) = journal.lock(Duration::ZERO) {
            forget_job(context, &JobDirectory::of(&journal));
            journal.forget();
        }
    }
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)))
}

/// The job file of a container that is not there any more goes with it. Not that of one which is just
/// being made.
fn forget_job(context: &Context<'_>, directory: &JobDirectory) {
    if directory.exists()
        && directory.is_left_behind(&context.root().join(context.id))
        && let Err(error) = directory.remove()
    {
        tracing::warn!(container = context.id, %error, "the job directory stays behind");
    }
}

/// Before `create` and `run`: an annotation that this host refuses is told now and not at the
/// first checkpoint, and a container that asks for a job file gets one.
pub(super) fn prepare_start(context: &Context<'_>) -> anyhow::Result<()> {
    // `create` or `run`.
    let operation = if context.line.subcommand == "run" { "run" } else { "create" };
    let refused = |cause| untouched(context, operation, cause);
    let bundle = absolute(&context.line.arguments().bundle())?;
    let annotations = annotations(context, &bundle).map_err(refused)?;
    let done =
        if annotations.job { give_job(context, &bundle) } else { give_no_job(context, &bundle) };
    done.map_err(refused)
}

/// A container without the annotation has no job file, also where one was left behind.
fn give_no_job(context: &Context<'_>, bundle: &Path) -> Result<(), Cause> {
    forget_job(context, &JobDirectory::of(&context.journal()));
    Ok(detach_stale(bundle, &context.config.state.directory)?)
}

/// The same before a restore that is the runtime's alone: the mount is part of the container.
fn give_job_if_annotated(context: &Context<'_>, operation: &'static str) -> anyhow::Result<()> {
    let refused = |cause| untouched(context, operation, cause);
    let bundle = absolute(&context.line.arguments().bundle())?;
    let asks = spec::annotations(&bundle).contains_key(AnnotationName::Job.key());
    // A pod's sandbox has its pod's annotations, and gets none.
    let gets = asks && annotations(context, &bundle).map_err(refused)?.job;
    let done = if gets { give_job(context, &bundle) } else { give_no_job(context, &bundle) };
    done.map_err(refused)
}

/// Gives a container that is about to start a job file that nothing has used.
fn give_job(context: &Context<'_>, bundle: &Path) -> Result<(), Cause> {
    let (config, root) = (context.config, context.root());
    let is_there = || root.join(context.id).exists();
    // The runtime refuses. The file of the container that runs is not touched.
    if is_there() {
        return Ok(());
    }
    let mut driver = HelperDriver::new(Program::this(), &config.cuda);
    let facts = driver.facts().map_err(Cause::NoDriver)?;
    job::require(&facts, config.jobs.minimum_driver)?;
    job::directory::sweep(&config.state.directory, &root);
    let journal = context.journal();
    let _lock = journal.lock(LOCK_PATIENCE)?;
    let directory = JobDirectory::of(&journal);
    if is_there() {
        return Ok(());
    }
    Given::new(bundle, directory, config, true).give_fresh()?;
    Ok(())
}

/// `exec` in a container that was given a job file: its environment says so, too.
pub(super) fn exec_in_job(context: &Context<'_>) -> anyhow::Result<ExitCode> {
    let Some(process) = context.line.exec_process() else {
        // The runtime takes the environment of config.json.
        match context.become_runtime()? {}
    };
    let exec = Exec::of(Path::new(&process))
        .map_err(|error| untouched(context, "exec", Cause::Job(error)))?;
    let line = context.line.with_exec_process(&exec.name());
    let mut command = Command::new(context.program);
    command.args(&line.globals).arg(&line.subcommand).args(&line.rest);
    again::mark(&mut command, &line);
    match context.execute(&mut command)? {}
}

/// Before `pause` and `exec`: puts right what a killed operation left behind. A paused container that
/// awaits its resume is left alone, and so is one with an operation under way. That one is not paused: a
/// frozen process answers no call of the driver, and an operation that fails could not tell this pause
/// from its own.
pub(super) fn repair_first(context: &Context<'_>) -> anyhow::Result<()> {
    let journal = context.journal();
    if !journal.exists() {
        return Ok(());
    }
    let pauses = context.line.subcommand == "pause";
    let patience = if pauses { LOCK_PATIENCE } else { Duration::ZERO };
    let _lock = match journal.lock(patience) {
        Ok(lock) => lock,
        Err(JournalError::Busy) if !pauses => return Ok(()),
        Err(error @ JournalError::Busy) => return Err(untouched(context, "pause", error.into())),
        Err(error) => return Err(untouched(context, "repair", error.into())),
    };
    let entry = journal.load().map_err(|error| untouched(context, "repair", error.into()))?;
    let container = Container::load(&context.root(), context.id);
    let Ok(container) = container else { return Ok(()) };
    // Also what was resumed, if the journal is all that is left of that.
    let is_left = |entry: &Entry| {
        let parked = entry.stage == Stage::AwaitingResume;
        entry.stage.is_under_way() || parked && matches!(container.cgroup.frozen(), Ok(false))
    };
    if let Some(entry) = entry.filter(is_left) {
        let mut tools = Tools::new(context, journal)?;
        let processes = CgroupProcesses::new(&container.cgroup.directory, container.init.pid)
            .map_err(|error| untouched(context, "repair", error.into()))?;
        World::of(&container, processes, &mut tools).put_right(context, &entry)?;
    }
    Ok(())
}

/// The runtime in our place for a container without CUDA: with the caller's arguments, and with
/// the configured options of CRIU where there are any.
fn without_cuda(context: &Context<'_>, subcommand: &str) -> anyhow::Result<ExitCode> {
    match context.execute(&mut context.runc()?.plain(subcommand))? {}
}

impl Context<'_> {
    pub(super) fn journal(&self) -> JournalFile {
        JournalFile::new(&self.config.state.directory, &self.root(), self.id)
    }

    fn runc(&self) -> anyhow::Result<Runc> {
        let mut criu = Options::from_config(&self.config.criu);
        criu.config_file = criu_config_file(self)?;
        Ok(Runc {
            program: self.program.to_owned(),
            globals: self.line.globals.clone(),
            id: self.id.into(),
            arguments: Some(self.line.arguments()),
            criu,
            no_plugins: self.config.state.directory.join("no-criu-plugins"),
            init: None,
            logs: LogStore {
                directory: self.config.log.directory.clone(),
                keep: usize::try_from(self.config.log.keep).unwrap_or(usize::MAX),
            },
        })
    }
}

/// The real things behind the traits.
struct Tools {
    driver: HelperDriver,
    hold: Tracer,
    gpu_locks: LockFiles,
    check_host_memory: bool,
    runc: Runc,
    journal: JournalFile,
    image: ImageDirectory,
}

impl Tools {
    fn new(context: &Context<'_>, journal: JournalFile) -> anyhow::Result<Self> {
        let runc = context.runc()?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&runc.no_plugins).with_context(
            || format!("stasis: state directory {}", context.config.state.directory.display()),
        )?;
        Ok(Self {
            driver: HelperDriver::new(Program::this(), &context.config.cuda),
            hold: Tracer::new(Program::this(), None),
            gpu_locks: LockFiles::new(&context.config.state.directory),
            check_host_memory: context.config.cuda.check_host_memory,
            runc,
            journal,
            image: ImageDirectory::new(PathBuf::new()),
        })
    }
}

/// Writes CRIU's options that runc has no flag for. The same for all containers of a
/// configuration, so two at once write the same.
fn criu_config_file(context: &Context<'_>) -> anyhow::Result<Option<PathBuf>> {
    let present =
        std::env::var_os("CRIU_CONFIG_FILE").and_then(|path| fs::read_to_string(path).ok());
    let text = Options::config_text(&context.config.criu, present.as_deref());
    let Some(text) = text else { return Ok(None) };
    let directory = &context.config.state.directory;
    let path = directory.join(format!("criu-{}.conf", std::process::id()));
    let named = directory.join("criu.conf");
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    fs::write(&path, text)
        .and_then(|()| fs::rename(&path, &named))
        .with_context(|| format!("stasis: cannot write {}", named.display()))?;
    Ok(Some(named))
}

/// One container and the tools to work on it.
struct World<'a> {
    container: Container,
    processes: CgroupProcesses,
    memory: HostMemoryOf,
    tools: &'a mut Tools,
}

impl<'a> World<'a> {
    fn of(container: &Container, processes: CgroupProcesses, tools: &'a mut Tools) -> Self {
        tools.hold = Tracer::new(Program::this(), Some(container.cgroup.clone()));
        tools.runc.init = Some(container.init);
        let memory = HostMemoryOf::new(container.init.pid, tools.check_host_memory);
        Self { container: container.clone(), processes, memory, tools }
    }

    fn parts(&mut self) -> Parts<'_> {
        Parts {
            driver: &mut self.tools.driver,
            hold: &mut self.tools.hold,
            freezer: &self.container.cgroup,
            processes: &self.processes,
            runtime: &mut self.tools.runc,
            image: &mut self.tools.image,
            journal: &mut self.tools.journal,
            memory: &self.memory,
            gpu_locks: &self.tools.gpu_locks,
            interrupted: &interrupt::interrupted,
        }
    }

    /// Puts right what a killed operation left behind.
    fn put_right(&mut self, context: &Context<'_>, entry: &Entry) -> anyhow::Result<()> {
        let limits = limits_of(context, &self.container);
        let init = self.container.init;
        resume::repair(&mut self.parts(), entry, init, &limits)?;
        Ok(())
    }

    /// The same, if there is something to put right.
    fn repair(&mut self, context: &Context<'_>) -> anyhow::Result<Before> {
        let entry = self.tools.journal.load();
        let entry = entry.map_err(|error| untouched(context, "repair", error.into()))?;
        let Some(mut entry) = entry else { return Ok(Before::Nothing) };
        let frozen = self.container.cgroup.frozen();
        let frozen = frozen.map_err(|error| untouched(context, "repair", error.into()))?;
        let same = entry.init == self.container.init;
        if same && frozen && entry.stage == Stage::AwaitingResume {
            return Ok(Before::Parked(entry));
        }
        if entry.stage != Stage::Suspended {
            self.put_right(context, &entry)?;
            let now = self.tools.journal.load();
            let now = now.map_err(|error| untouched(context, "repair", error.into()))?;
            let Some(now) = now.filter(|now| now.stage == Stage::Suspended) else {
                return Ok(Before::Nothing);
            };
            entry = now;
        }
        Ok(if same { Before::Suspended(entry) } else { Before::Nothing })
    }
}

/// In which state an operation finds a container.
enum Before {
    /// As its owner has it.
    Nothing,
    /// Paused, its CUDA checkpointed, awaiting its Resume.
    Parked(Entry),
    /// Suspended by `stasis suspend`.
    Suspended(Entry),
}

/// As its owner has it. What this host does not allow any more counts for nothing: an operation that
/// began is ended.
fn limits_of(context: &Context<'_>, container: &Container) -> Limits {
    let annotations = annotations(context, &container.bundle).unwrap_or_default();
    Limits::new(&context.config.cuda, annotations.lock_timeout)
}

fn annotations(context: &Context<'_>, bundle: &Path) -> Result<Annotations, Cause> {
    let all = spec::annotations(bundle);
    let pairs = all.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    Ok(Annotations::parse(pairs, &context.config.annotations)?)
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("stasis: path {}", path.display()))
}

fn untouched(context: &Context<'_>, operation: &'static str, cause: Cause) -> anyhow::Error {
    failure(context, operation, Phase::Preflight, cause)
}

fn failure(
    context: &Context<'_>,
    operation: &'static str,
    phase: Phase,
    cause: Cause,
) -> anyhow::Error {
    let container = context.id.to_owned();
    let left = Left::Untouched;
    Failure { operation, container, phase, cause, left, image: None, log: None }.into()
}

impl From<ContainerError> for Cause {
    fn from(error: ContainerError) -> Self {
        Self::Container(chain(&error))
    }
}
