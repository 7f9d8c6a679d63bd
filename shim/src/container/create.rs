//! Create: everything that there is before the first instruction of the container.
//!
//! With a checkpoint only the rootfs is made: CRI unpacks files of the image into the rootfs
//! before Start, which restores.

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use containerd_shim::protos::events::task::{TaskCreate, TaskIO};
use containerd_shim::protos::protobuf::MessageField;
use containerd_shim::protos::types::mount::Mount;
use stasis_config::{Annotations, Config};
use stasis_hooks::error::chain;
use stasis_hooks::journal::JournalFile;

use super::{Container, Fixed, Inner, Shared};
use crate::bundle::{self, PID_FILE, ROOTFS, RUNTIME_LOG};
use crate::cgroup::Cgroups;
use crate::error::TaskError;
use crate::options::spec::Spec;
use crate::options::{Options, Settled};
use crate::process::Process;
use crate::reaper::Pid;
use crate::runc::{Call, CallIo, Runc, Runtime};
use crate::state::State;
use crate::stdio::{Owner, ProcessIo, Request};

/// A mount of the rootfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootfsMount {
    /// File system.
    pub kind: String,
    /// What.
    pub source: String,
    /// Where, below the rootfs. Empty: the rootfs itself.
    pub target: String,
    /// How.
    pub options: Vec<String>,
}

impl RootfsMount {
    fn to_message(&self) -> Mount {
        Mount {
            type_: self.kind.clone(),
            source: self.source.clone(),
            target: self.target.clone(),
            options: self.options.clone(),
            ..Mount::default()
        }
    }
}

/// A container that is asked for.
#[derive(Debug)]
pub struct CreateRequest {
    /// Its id.
    pub id: String,
    /// Its bundle directory.
    pub bundle: PathBuf,
    /// Its rootfs.
    pub rootfs: Vec<RootfsMount>,
    /// Its stdio.
    pub stdio: Request,
    /// The image to restore it from; empty: none.
    pub checkpoint: PathBuf,
    /// Options of the runtime.
    pub options: Options,
}

impl Container {
    /// Creates a container.
    pub async fn create(shared: Shared, request: CreateRequest) -> Result<Arc<Self>, TaskError> {
        let CreateRequest { id, bundle, rootfs, stdio, checkpoint, options } = request;
        let Prepared { spec, settled, config, annotations } = prepare(&options, &bundle).await?;
        let root = options.root.join(&shared.namespace);
        let program = options.program;
        let checkpoint = Some(checkpoint)
            .filter(|path| !path.as_os_str().is_empty())
            .or(options.criu_image_path);
        let runc = Runc {
            is_engine: program.file_name().is_some_and(|name| name == "stasis-runc"),
            program,
            root: root.clone(),
            log: bundle.join(RUNTIME_LOG),
            systemd_cgroup: settled.systemd_cgroup,
            config: settled.config,
            engine_log: (bundle.join(crate::log::FILE), engine_level(&shared, &config)),
            reaper: shared.reaper.clone(),
        };

        let mounted = mount(&bundle, rootfs).await?;
        let owner = Owner { uid: options.io_uid, gid: options.io_gid };
        // A client that gives up between Create and Start first waits until nobody writes to its
        // FIFOs, so one that is to be restored has none open until then.
        let io = if checkpoint.is_some() {
            None
        } else {
            match ProcessIo::open(&stdio, &id, &shared.namespace, owner, &shared.reaper).await {
                Ok(io) => Some(io),
                Err(error) => {
                    unmount(mounted.as_deref()).await;
                    return Err(TaskError::failed(&error));
                }
            }
        };
        let fixed = Fixed {
            rootfs: mounted,
            journal: JournalFile::new(&config.state.directory, &root, &id),
            config,
            no_pivot: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            owner,
            shares_pids: spec.shares_pids(),
            annotations,
            criu_work: options.criu_work_path.unwrap_or_else(|| bundle.join("work")),
            checkpoint,
            bundle,
        };
        let runtime = (shared.runtime)(runc);
        let container = Arc::new(Self::new(id, shared, runtime, fixed, stdio, io));
        if container.fixed.checkpoint.is_none()
            && let Err(error) = container.run_create().await
        {
            container.init.end_io_at_once().await;
            unmount(container.fixed.rootfs.as_deref()).await;
            return Err(error);
        }
        Ok(container)
    }

    pub(super) fn new(
        id: String,
        shared: Shared,
        runtime: Arc<dyn Runtime>,
        fixed: Fixed,
        stdio: Request,
        io: Option<ProcessIo>,
    ) -> Self {
        let state =
            if fixed.checkpoint.is_some() { State::CreatedFromCheckpoint } else { State::Created };
        let inner = Inner {
            state,
            under_way: None,
            short: 0,
            execs: HashMap::new(),
            cgroups: None,
            killed: false,
            ended: false,
            deleted: false,
        };
        Self {
            init: Process::new(&id, stdio, io),
            id,
            shared,
            runtime,
            fixed,
            restoring: Arc::default(),
            ending: AtomicBool::default(),
            inner: Mutex::new(inner),
            changed: tokio::sync::Notify::new(),
        }
    }

    /// `runc create`.
    async fn run_create(self: &Arc<Self>) -> Result<(), TaskError> {
        let Fixed { bundle, no_pivot, no_new_keyring, .. } = &self.fixed;
        let pid_file = bundle.join(PID_FILE);
        let mut arguments = words(&["--bundle"]);
        arguments.push(bundle.into());
        arguments.extend(["--pid-file".into(), pid_file.clone().into()]);
        let (ends, socket) = self.init.child_ends().await?;
        if let Some(socket) = socket {
            arguments.extend(["--console-socket".into(), socket.into()]);
        }
        if *no_pivot {
            arguments.push("--no-pivot".into());
        }
        if *no_new_keyring {
            arguments.push("--no-new-keyring".into());
        }
        arguments.push(self.id.clone().into());
        // A container without a job file costs no engine.
        let call = Call::new("create", arguments)
            .with_io(CallIo::Container(ends))
            .through_engine(self.fixed.annotations.job);
        let expecting = self.shared.reaper.expect();
        if let Err(error) = self.runtime.call(call).await {
            if error.was_killed() || self.fixed.journal.has_job() {
                // With its caller: it had no chance to remove what it had made. Or a job file was
                // made for it.
                self.delete_by_force().await;
            }
            return Err(TaskError::Runtime { what: "OCI runtime create failed", error });
        }
        let born = match self.init.io_started().await {
            Ok(()) => read_pid(&pid_file),
            Err(error) => Err(error),
        };
        match born {
            Ok(pid) => {
                self.born(pid, &expecting);
                Ok(())
            }
            Err(error) => {
                // It is there, and nobody will ever ask for it.
                self.delete_by_force().await;
                Err(error)
            }
        }
    }

    /// `runc delete --force`. Most of the time there is nothing any more.
    pub(super) async fn delete_by_force(&self) {
        let in_use = self.fixed.journal.in_use();
        let call = Call::new("delete", ["--force", &self.id]).through_engine(in_use);
        let _ = self.runtime.call(call).await;
    }

    /// The container has its init.
    pub(super) fn born(self: &Arc<Self>, pid: Pid, expecting: &crate::reaper::Expecting) {
        self.init.set_pid(pid);
        match Cgroups::of(pid) {
            Ok(cgroups) => {
                if let Err(error) = self.shared.oom.add(&self.id, &cgroups) {
                    let error = chain(&error);
                    tracing::warn!(container = self.id, error, "its OOM kills will not be told");
                }
                self.inner().cgroups = Some(Arc::new(cgroups));
            }
            Err(error) => tracing::warn!(container = self.id, %error, "its cgroups are not found"),
        }
        let exit = expecting.claim(pid);
        let container = Arc::clone(self);
        tokio::spawn(async move { container.watch_init(exit).await });
    }

    /// The event of a creation.
    pub fn tell_created(&self, rootfs: &[RootfsMount]) {
        let stdio = &self.init.stdio;
        let io = TaskIO {
            stdin: stdio.stdin.clone(),
            stdout: stdio.stdout.clone(),
            stderr: stdio.stderr.clone(),
            terminal: stdio.terminal,
            ..TaskIO::default()
        };
        let checkpoint = self.fixed.checkpoint.as_deref();
        self.tell(TaskCreate {
            container_id: self.id.clone(),
            bundle: self.fixed.bundle.display().to_string(),
            rootfs: rootfs.iter().map(RootfsMount::to_message).collect(),
            io: MessageField::some(io),
            checkpoint: checkpoint.map_or_else(String::new, |path| path.display().to_string()),
            pid: self.pid(),
            ..TaskCreate::default()
        });
    }
}

pub(super) fn words(words: &[&str]) -> Vec<std::ffi::OsString> {
    words.iter().map(Into::into).collect()
}

/// Reads a pid that runc wrote.
pub(super) fn read_pid(path: &Path) -> Result<Pid, TaskError> {
    let text = fs::read_to_string(path)
        .map_err(|error| TaskError::Failed(format!("cannot read {}: {error}", path.display())))?;
    // 0 and negative numbers mean others than a process to `kill`.
    let pid = text.trim().parse().ok().filter(|&pid| pid > 0);
    pid.ok_or_else(|| {
        TaskError::Failed(format!("{} does not hold a pid: {text:?}", path.display()))
    })
}

struct Prepared {
    spec: Spec,
    settled: Settled,
    config: Config,
    annotations: Annotations,
}

/// Reads and writes the bundle's files, and checks what they ask for. Not in the runtime's thread:
/// the paths are others', and may be on a disk that does not answer.
async fn prepare(options: &Options, bundle: &Path) -> Result<Prepared, TaskError> {
    let (options, bundle) = (options.clone(), bundle.to_owned());
    let work = tokio::task::spawn_blocking(move || {
        let invalid = |error: &dyn std::error::Error| TaskError::Invalid(chain(error));
        let spec = Spec::read(&bundle).map_err(|error| invalid(&error))?;
        let settled = options.settle(&bundle).map_err(|error| invalid(&error))?;
        let config = settled.config.as_deref().map_or_else(Config::load, Config::from_file);
        let config = config.map_err(|error| invalid(&error))?;
        let annotations = annotations(&spec, &config)?;
        Ok(Prepared { spec, settled, config, annotations })
    });
    work.await.map_err(|error| TaskError::failed(&error))?
}

/// What containerd asks for, or the configuration if that is more.
fn engine_level(shared: &Shared, config: &Config) -> String {
    let own = config.log.level.as_str();
    let level = |name: &str| name.parse().unwrap_or(tracing::Level::WARN);
    if level(own) > level(&shared.log_level) { own.to_owned() } else { shared.log_level.clone() }
}

/// An annotation that this host refuses is told now and not at the first checkpoint.
fn annotations(spec: &Spec, config: &Config) -> Result<Annotations, TaskError> {
    Annotations::parse(spec.annotations(), &config.annotations)
        .map_err(|error| TaskError::Invalid(chain(&error)))
}

/// Mounts the rootfs. On failure nothing stays mounted.
async fn mount(bundle: &Path, mounts: Vec<RootfsMount>) -> Result<Option<PathBuf>, TaskError> {
    if mounts.is_empty() {
        return Ok(None);
    }
    let rootfs = bundle.join(ROOTFS);
    let target = rootfs.clone();
    // A thread of its own: for an overlay with many layers the working directory of the calling
    // thread is changed, to shorten the options.
    let (sender, done) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("mount".to_owned()).spawn(move || {
        let _ = sender.send(mount_all(&target, &mounts));
    });
    let failed = |error: &dyn std::fmt::Display| {
        TaskError::Failed(format!("cannot mount the rootfs {}: {error}", rootfs.display()))
    };
    thread.map_err(|error| failed(&error))?;
    match done.await {
        Ok(Ok(())) => Ok(Some(rootfs)),
        Ok(Err(error)) => {
            unmount(Some(&rootfs)).await;
            Err(failed(&error))
        }
        Err(error) => Err(failed(&error)),
    }
}

fn mount_all(rootfs: &Path, mounts: &[RootfsMount]) -> anyhow::Result<()> {
    if !rootfs.is_dir() {
        DirBuilder::new().mode(0o711).create(rootfs)?;
    }
    for RootfsMount { kind, source, target, options } in mounts {
        let some = |text: &'_ str| (!text.is_empty()).then(|| text.to_owned());
        let target = rootfs.join(target.trim_start_matches('/'));
        containerd_shim::mount::mount_rootfs(
            some(kind).as_deref(),
            some(source).as_deref(),
            options,
            target,
        )?;
    }
    Ok(())
}

/// Unmounts a rootfs and what is mounted in it.
pub(super) async fn unmount(rootfs: Option<&Path>) -> Option<String> {
    let rootfs = rootfs?.to_owned();
    let unmounted = tokio::task::spawn_blocking(move || bundle::unmount(&rootfs)).await;
    unmounted.unwrap_or_else(|error| Err(error.to_string())).err()
}
