//! The journal: what is under way with a container, so that the next operation can put right what
//! a killed one left behind. One file a container, in the state directory.
//!
//! It also carries the state from a checkpoint of a paused container to its resume, which are
//! separate processes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::cuda::job::Job;
use crate::cuda::{CudaState, GpuUse};
use crate::job::Membership;
use crate::parts::CudaProcess;
use crate::processes::ProcessId;
use crate::remap::DeviceMap;

const VERSION: u32 = 2;

/// The suffix of the directory of a container's job file, which lies beside its journal.
pub(crate) const JOB: &str = "job";

/// What is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Format of this file.
    version: u32,
    /// The container.
    pub container: String,
    /// Its init process: tells a later container of the same id.
    pub init: ProcessId,
    /// The root directory of its runtime, as [`JournalFile`] notes it for whoever finds the file: the
    /// directory that it lies in does not tell. Empty where it is no UTF-8.
    #[serde(default)]
    pub root: PathBuf,
    /// How far it is.
    pub stage: Stage,
    /// Whether the container was frozen when the operation began.
    pub frozen: bool,
    /// The operation itself has come to freezing it. If it is found frozen before, somebody else has
    /// paused it meanwhile.
    #[serde(default)]
    pub freezes: bool,
    /// The CUDA processes.
    pub processes: Vec<Noted>,
    /// The job that they are in.
    #[serde(default)]
    pub job: Option<Membership>,
    /// A lock may still be pending in a process: one whose caller was lost is granted later.
    pub locking: bool,
    /// In which one, where they are locked one after the other; none: in any of them.
    #[serde(default)]
    pub locked_last: Option<ProcessId>,
    /// The image of the checkpoint.
    pub image: PathBuf,
    /// What the container goes back to when the operation ends: it was suspended before, and stays so.
    #[serde(default)]
    pub suspended: Option<Box<Entry>>,
}

/// A CUDA process, as an operation found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noted {
    /// Which one.
    pub id: ProcessId,
    /// The state in which it was found, and to which it goes back.
    pub found: CudaState,
    /// The memory that it needs for that, on the GPUs that it comes from.
    pub uses: GpuUse,
    /// Onto which GPUs its memory goes back instead: pairs of UUIDs, empty for where it was. Also set for
    /// a process that is RUNNING there by now.
    #[serde(default)]
    pub device_map: DeviceMap,
    /// What it uses is not known: something else had suspended it before anybody looked.
    #[serde(default)]
    pub unseen: bool,
}

impl From<&CudaProcess> for Noted {
    fn from(process: &CudaProcess) -> Self {
        Self {
            id: process.process.id,
            found: process.found.unwrap_or(CudaState::Running),
            uses: process.uses.clone(),
            device_map: process.device_map.clone(),
            unseen: false,
        }
    }
}

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Before and during the dump: a failure brings everything back.
    Suspending,
    /// The image is whole and the container stays paused, its CUDA checkpointed, until Resume.
    AwaitingResume,
    /// A restore has started the image's processes, all of them CHECKPOINTED, and gives them their CUDA.
    Restoring,
    /// `stasis suspend` is at work. What cannot be brought back stays suspended.
    Freeing,
    /// `stasis resume` is at work. The same.
    Resuming,
    /// No operation: `stasis suspend` has freed the GPU, and the container goes on without until
    /// `stasis resume`.
    Suspended,
}

impl Stage {
    /// Whether an operation is at work, or was killed.
    #[must_use]
    pub fn is_under_way(self) -> bool {
        matches!(self, Self::Suspending | Self::Restoring | Self::Freeing | Self::Resuming)
    }
}

impl Entry {
    /// The same container, suspended: all of its processes run when it is resumed. `toggled` says whether
    /// the driver is one whose toggle may be cut off half-way.
    #[must_use]
    pub fn as_suspended(&self, toggled: bool) -> Self {
        let mut suspended = match &self.suspended {
            Some(earlier) => (**earlier).clone(),
            None => self.empty(),
        };
        suspended.stage = Stage::Suspended;
        suspended.job.clone_from(&self.job);
        // No lock is pending in a process that is CHECKPOINTED.
        suspended.locking = toggled;
        suspended.locked_last = None;
        for noted in &self.processes {
            let known = suspended.processes.iter_mut().find(|known| known.id == noted.id);
            match known {
                // It ran meanwhile, and what was noted of it is out of date.
                Some(known)
                    if self.stage == Stage::Freeing && noted.found != CudaState::Checkpointed =>
                {
                    known.clone_from(noted);
                }
                Some(_) => {}
                None => {
                    let unseen = noted.unseen || noted.found == CudaState::Checkpointed;
                    suspended.processes.push(Noted { unseen, ..noted.clone() });
                }
            }
        }
        for noted in &mut suspended.processes {
            noted.found = CudaState::Running;
        }
        suspended
    }

    /// Whether somebody else has paused the container since the operation began, given whether it is
    /// frozen now.
    #[must_use]
    pub fn was_paused_meanwhile(&self, frozen: bool) -> bool {
        frozen && !self.frozen && !self.freezes
    }

    /// Whether memory of its processes goes to other GPUs than those that it came from.
    #[must_use]
    pub fn moves(&self) -> bool {
        self.processes.iter().any(|noted| !noted.device_map.is_empty())
    }

    fn empty(&self) -> Self {
        Self::new(&self.container, self.init, false, Path::new(""))
    }

    /// The processes that were CHECKPOINTED when this was noted, also those of what it goes back to. Some may
    /// have been restored since.
    pub fn left_checkpointed(&self) -> impl Iterator<Item = ProcessId> {
        let entries = std::iter::successors(Some(self), |entry| entry.suspended.as_deref());
        let left = |entry: &&Self| {
            matches!(entry.stage, Stage::AwaitingResume | Stage::Restoring | Stage::Suspended)
        };
        entries.filter(left).flat_map(|entry| entry.processes.iter().map(|noted| noted.id))
    }

    /// The processes that it knows, also those of what it goes back to.
    pub fn known(&self) -> impl Iterator<Item = ProcessId> {
        let entries = std::iter::successors(Some(self), |entry| entry.suspended.as_deref());
        entries.flat_map(|entry| {
            std::iter::once(entry.init).chain(entry.processes.iter().map(|noted| noted.id))
        })
    }

    /// Another process has taken the place of its init, also in what it goes back to.
    pub fn follow(&mut self, init: ProcessId) {
        self.init = init;
        if let Some(suspended) = &mut self.suspended {
            suspended.follow(init);
        }
    }

    /// The job that calls to the driver are made in.
    #[must_use]
    pub fn in_job(&self) -> Option<&Job> {
        self.job.as_ref().map(|membership| &membership.job)
    }

    /// A new operation.
    #[must_use]
    pub fn new(container: &str, init: ProcessId, frozen: bool, image: &Path) -> Self {
        Self {
            version: VERSION,
            container: container.to_owned(),
            init,
            root: PathBuf::new(),
            stage: Stage::Suspending,
            frozen,
            freezes: false,
            processes: Vec::new(),
            job: None,
            locking: false,
            locked_last: None,
            image: image.to_owned(),
            suspended: None,
        }
    }
}

/// Keeps the entry of one container.
pub trait Journal {
    /// Writes or replaces the entry; once it returns, the entry survives this process.
    fn save(&mut self, entry: &Entry) -> Result<(), JournalError>;
    /// The operation has ended.
    fn clear(&mut self) -> Result<(), JournalError>;
}

/// The journal could not be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file of it.
    #[error("cannot use the journal {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its content.
    #[error("the journal {} is damaged", path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// Written by another version.
    #[error("the journal {} has version {found}; this program knows {VERSION}", path.display())]
    Version {
        /// Which.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// It does not say whose it is.
    #[error(
        "the journal {} does not say in which root directory of a runtime its container is; name that directory with --root",
        path.display()
    )]
    NoRoot {
        /// Which.
        path: PathBuf,
    },
    /// It says that it is another's.
    #[error(
        "the journal {} says that it is of the runtime's root directory {}, and is not where that one's lie",
        path.display(), root.display()
    )]
    Misplaced {
        /// Which.
        path: PathBuf,
        /// Whose it says that it is.
        root: PathBuf,
    },
    /// Somebody else is at work.
    #[error("another operation on this container is in progress")]
    Busy,
}

/// [`Journal`] and lock of one container, as files.
#[derive(Debug)]
pub struct JournalFile {
    /// The runtime's root directory.
    root: PathBuf,
    directory: PathBuf,
    name: String,
}

/// A journal that lies in a state directory.
#[derive(Debug)]
pub struct Found {
    /// The file.
    pub path: PathBuf,
    /// The container's id, as the file is called.
    pub id: String,
    /// What it says. Its `root` is where the container is.
    pub entry: Result<Entry, JournalError>,
}

/// While it lives, no other operation on the container begins.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

impl JournalFile {
    /// `runtime_root` is the runtime's root directory: the same id under another root (a containerd
    /// namespace, Podman) is another container.
    #[must_use]
    pub fn new(state: &Path, runtime_root: &Path, id: &str) -> Self {
        let root = resolved(runtime_root);
        let directory = state.join(root_name(&root));
        Self { root, directory, name: id.to_owned() }
    }

    /// All journals of a state directory, in order, also of runtimes that nobody has told this command
    /// of. One that cannot be used is among them, with the reason. Nothing is locked: it may be gone, or
    /// be another, when it is.
    #[must_use]
    pub fn all(state: &Path) -> Vec<Found> {
        let mut found: Vec<Found> = entries(state)
            .filter(|directory| {
                directory.file_name().and_then(|name| name.to_str()).is_some_and(is_root_name)
            })
            .flat_map(|directory| entries(&directory))
            .filter_map(Self::found)
            .collect();
        found.sort_by(|one, other| one.path.cmp(&other.path));
        found
    }

    /// None if the file is none of these, or was removed meanwhile.
    fn found(path: PathBuf) -> Option<Found> {
        let id = path.file_name()?.to_str()?.strip_suffix(".json")?.to_owned();
        let entry = load(&path).and_then(|entry| {
            let Some(entry) = entry else { return Ok(None) };
            if entry.root.as_os_str().is_empty() {
                return Err(JournalError::NoRoot { path: path.clone() });
            }
            let own = root_name(&entry.root);
            if path.parent().and_then(Path::file_name) != Some(own.as_ref()) {
                return Err(JournalError::Misplaced { path: path.clone(), root: entry.root });
            }
            Ok(Some(entry))
        });
        Some(Found { id, entry: entry.transpose()?, path })
    }

    /// The file, which need not be there.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.path("json")
    }

    fn path(&self, suffix: &str) -> PathBuf {
        self.directory.join(format!("{}.{suffix}", self.name))
    }

    fn error(path: &Path) -> impl FnOnce(io::Error) -> JournalError {
        move |source| JournalError::File { path: path.to_owned(), source }
    }

    /// Whether there is an entry. Costs one system call.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.path("json").exists()
    }

    /// Whether any file of this container is there.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.exists() || self.path("lock").exists() || self.has_job()
    }

    /// Whether the container was given a job file. Costs one system call.
    #[must_use]
    pub fn has_job(&self) -> bool {
        self.job().exists()
    }

    /// The directory of the container's job file.
    pub(crate) fn job(&self) -> PathBuf {
        self.path(JOB)
    }

    /// The directory of all containers of the runtime root.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Takes the lock. Waits up to `patience` for an operation that is just ending.
    pub fn lock(&self, patience: Duration) -> Result<Lock, JournalError> {
        let path = self.path("lock");
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
            .map_err(Self::error(&self.directory))?;
        let deadline = Instant::now() + patience;
        loop {
            let mut file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .custom_flags(nix::libc::O_NOFOLLOW)
                .open(&path)
                .map_err(Self::error(&path))?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                // `delete` removes the file; a lock on the removed one would exclude nobody.
                Ok(lock) if same_file(&lock, &path) => return Ok(Lock { _file: lock }),
                Ok(lock) => drop(lock),
                Err((returned, nix::errno::Errno::EWOULDBLOCK)) => {
                    file = returned;
                    drop(file);
                    if Instant::now() >= deadline {
                        return Err(JournalError::Busy);
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err((_, error)) => return Err(Self::error(&path)(error.into())),
            }
        }
    }

    /// The entry, if there is one.
    pub fn load(&self) -> Result<Option<Entry>, JournalError> {
        load(&self.path("json"))
    }

    /// The container is gone: nothing of it is kept.
    pub fn forget(&self) {
        for suffix in ["json", "json.new", "lock"] {
            let _ = fs::remove_file(self.path(suffix));
        }
    }
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

fn load(path: &Path) -> Result<Option<Entry>, JournalError> {
    let path = path.to_owned();
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(JournalError::File { path, source }),
    };
    let format = |source| JournalError::Format { path: path.clone(), source };
    // First: what else is in it depends on that.
    let Versioned { version } = serde_json::from_slice(&text).map_err(format)?;
    if version != VERSION {
        return Err(JournalError::Version { path, found: version });
    }
    serde_json::from_slice(&text).map(Some).map_err(format)
}

/// What is in a directory; nothing if it cannot be read.
fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path())
}

impl Journal for JournalFile {
    fn save(&mut self, entry: &Entry) -> Result<(), JournalError> {
        let new = self.path("json.new");
        // JSON has no other.
        let root = self.root.to_str().map(PathBuf::from).unwrap_or_default();
        let text = serde_json::to_vec(&Entry { root, ..entry.clone() })
            .map_err(|source| JournalError::Format { path: new.clone(), source })?;
        let written = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .open(&new)
            .and_then(|mut file| {
                file.write_all(&text)?;
                file.sync_all()
            });
        written.map_err(Self::error(&new))?;
        let path = self.path("json");
        fs::rename(&new, &path).map_err(Self::error(&path))
    }

    fn clear(&mut self) -> Result<(), JournalError> {
        let path = self.path("json");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Self::error(&path)(error)),
            _ => Ok(()),
        }
    }
}

/// A path however it is spelled: with a link, a trailing slash, or relative. Its end need not be there
/// yet: the runtime makes its root directory with the first container.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let found = path.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    match found {
        Some((above, known)) => match path.strip_prefix(above) {
            Ok(rest) if !rest.as_os_str().is_empty() => known.join(rest),
            _ => known,
        },
        None => path,
    }
}

fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => open.ino() == named.ino() && open.dev() == named.dev(),
        _ => false,
    }
}

/// A directory name for a runtime root: FNV-1a of the path, which does not change between
/// versions as the standard library's hash may.
fn root_name(root: &Path) -> String {
    let hash = root
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("{hash:016x}")
}

/// Whether a directory may have been named by [`root_name`].
fn is_root_name(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        let init = ProcessId { pid: 7, start_time: 8 };
        let mut entry = Entry::new("c1", init, true, Path::new("/image"));
        let uses = GpuUse { gpus: vec![("GPU-0".into(), Some(1))] };
        let device_map = DeviceMap::new();
        entry.processes.push(Noted {
            id: init,
            found: CudaState::Running,
            uses,
            device_map,
            unseen: false,
        });
        entry
    }

    #[test]
    fn what_was_saved_is_loaded_until_it_is_cleared() {
        let state = tempfile::tempdir().unwrap();
        let mut journal = JournalFile::new(state.path(), Path::new("/run/runc"), "c1");
        let _lock = journal.lock(Duration::ZERO).unwrap();
        assert!(!journal.exists());
        journal.save(&entry()).unwrap();
        let saved = Entry { root: "/run/runc".into(), ..entry() };
        assert_eq!(journal.load().unwrap(), Some(saved));
        journal.clear().unwrap();
        journal.clear().unwrap();
        assert_eq!(journal.load().unwrap(), None);
    }

    #[test]
    fn two_operations_exclude_each_other_and_other_containers_do_not() {
        let state = tempfile::tempdir().unwrap();
        let journal = |root: &str, id| JournalFile::new(state.path(), Path::new(root), id);
        let lock = journal("/a", "c1").lock(Duration::ZERO).unwrap();
        let busy = journal("/a", "c1").lock(Duration::ZERO).unwrap_err();
        assert!(matches!(busy, JournalError::Busy));
        journal("/b", "c1").lock(Duration::ZERO).unwrap();
        journal("/a", "c2").lock(Duration::ZERO).unwrap();
        drop(lock);
        journal("/a", "c1").lock(Duration::ZERO).unwrap();
    }

    #[test]
    fn another_spelling_of_the_root_is_the_same_container() {
        let state = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        let link = state.path().join("link");
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        let lock = JournalFile::new(state.path(), root.path(), "c1").lock(Duration::ZERO).unwrap();
        for other in [link, root.path().join(""), root.path().join(".")] {
            let journal = JournalFile::new(state.path(), &other, "c1");
            assert!(matches!(journal.lock(Duration::ZERO).unwrap_err(), JournalError::Busy));
        }
        drop(lock);
    }

    #[test]
    fn a_root_that_is_not_there_yet_is_the_same_afterwards() {
        let state = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        let link = state.path().join("link");
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        let before = JournalFile::new(state.path(), &link.join("a/b"), "c1");
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        let after = JournalFile::new(state.path(), &root.path().join("a/b"), "c1");
        assert_eq!(before.directory, after.directory);
    }

    #[test]
    fn a_damaged_or_newer_journal_is_named() {
        let state = tempfile::tempdir().unwrap();
        let mut journal = JournalFile::new(state.path(), Path::new("/a"), "c1");
        let _lock = journal.lock(Duration::ZERO).unwrap();
        fs::write(journal.path("json"), "{").unwrap();
        assert!(matches!(journal.load().unwrap_err(), JournalError::Format { .. }));
        let newer = Entry { version: 9, ..entry() };
        journal.save(&newer).unwrap();
        assert!(journal.load().unwrap_err().to_string().contains("version 9"));
    }

    fn saved(state: &Path, root: &Path, id: &str) -> JournalFile {
        let mut journal = JournalFile::new(state, root, id);
        let _lock = journal.lock(Duration::ZERO).unwrap();
        let container = id.to_owned();
        journal.save(&Entry { container, ..entry() }).unwrap();
        journal
    }

    #[test]
    fn all_journals_are_found_with_the_roots_that_they_are_of() {
        let (state, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (root, link) = (host.path().join("a"), host.path().join("link"));
        fs::create_dir(&root).unwrap();
        std::os::unix::fs::symlink(&root, &link).unwrap();
        let mut expected = vec![
            (saved(state.path(), &link, "c1.json").file(), "c1.json", root.clone()),
            (saved(state.path(), &root, "c2").file(), "c2", root.clone()),
            (saved(state.path(), Path::new("/no/such"), "c1").file(), "c1", "/no/such".into()),
        ];
        expected.sort();
        // What else lies there.
        fs::write(expected[0].0.with_extension("json.new"), "{}").unwrap();
        fs::create_dir(state.path().join("no-criu-plugins")).unwrap();
        fs::write(state.path().join("no-criu-plugins/x.json"), "{}").unwrap();
        fs::write(state.path().join("0123456789abcdef"), "").unwrap();
        let found: Vec<_> = JournalFile::all(state.path())
            .into_iter()
            .map(|found| (found.path, found.id, found.entry.unwrap().root))
            .collect();
        let expected: Vec<_> =
            expected.into_iter().map(|(path, id, root)| (path, id.to_owned(), root)).collect();
        assert_eq!(found, expected);
        assert!(JournalFile::all(&state.path().join("none")).is_empty());
    }

    #[test]
    fn one_that_cannot_be_used_is_found_with_the_reason() {
        let state = tempfile::tempdir().unwrap();
        let root = Path::new("/no/such");
        let journal = saved(state.path(), root, "c1");
        let why = || {
            let mut all = JournalFile::all(state.path());
            assert_eq!((all.len(), all[0].id.as_str()), (1, "c1"));
            all.remove(0).entry.unwrap_err()
        };
        let text = fs::read_to_string(journal.file()).unwrap();
        fs::write(journal.file(), text.replace("\"root\":\"/no/such\",", "")).unwrap();
        assert_eq!(journal.load().unwrap().unwrap().root, Path::new(""));
        assert!(matches!(why(), JournalError::NoRoot { .. }));
        assert!(why().to_string().contains("--root"));
        fs::write(journal.file(), text.replace("/no/such", "/elsewhere")).unwrap();
        assert!(matches!(why(), JournalError::Misplaced { .. }));
        fs::write(journal.file(), "{").unwrap();
        assert!(matches!(why(), JournalError::Format { .. }));
    }

    #[test]
    fn what_it_goes_back_to_has_the_same_init() {
        let id = |pid| ProcessId { pid, start_time: 8 };
        let earlier = entry().as_suspended(false);
        let mut under_way = Entry::new("c1", id(7), false, Path::new(""));
        under_way.suspended = Some(Box::new(earlier));
        under_way.processes.push(Noted { id: id(9), ..entry().processes.remove(0) });
        under_way.follow(id(11));
        let known: Vec<_> = under_way.known().collect();
        assert_eq!(known, [id(11), id(9), id(11), id(7)]);
    }

    #[test]
    fn a_root_that_is_no_utf8_is_no_reason_to_fail() {
        use std::os::unix::ffi::OsStrExt as _;
        let state = tempfile::tempdir().unwrap();
        let root = Path::new(std::ffi::OsStr::from_bytes(b"/no/\xff"));
        let journal = saved(state.path(), root, "c1");
        assert_eq!(journal.load().unwrap().unwrap().root, Path::new(""));
    }

    #[test]
    fn names_of_roots_do_not_change() {
        assert_eq!(root_name(Path::new("/run/containerd/runc/default")), "7cb686ffc1b1d3ae");
    }
}
