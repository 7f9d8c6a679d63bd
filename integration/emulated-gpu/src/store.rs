//! The store: device memory of all processes, and where their requests lie.
//!
//! ```text
//! STORE/config, faults     written by the test
//! STORE/faults.count       how often each fault has fired
//! STORE/machine            a random number that tells this machine from others
//! STORE/lock               held while memory is counted or changes
//! STORE/<ns>-<pid>/        one process: inode of its pid namespace, pid inside it
//!     alive                locked (flock) as long as the process has a context on a GPU; names
//!                          the GPUs
//!     mem-<gpu>-<address>  one allocation; its length is its size
//!     request, rep-*       a request and replies, see `mailbox`
//!     lie, lost            marks that a fault left, see `caller`
//! ```
//!
//! The `alive` lock goes away with the process, whatever its end, and can be
//! tested from any pid namespace. So whoever counts memory removes what the dead left.

use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::cuda_error::{CudaError, Result};
use crate::settings::{Settings, store_dir};

/// Names a process from inside and outside its pid namespace alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    namespace: u64,
    pid: i32,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.namespace, self.pid)
    }
}

impl Key {
    /// The key of this process, now: a CRIU restore changes it.
    pub(crate) fn own() -> io::Result<Self> {
        let pid = i32::try_from(std::process::id()).map_err(io::Error::other)?;
        Ok(Self { namespace: pid_namespace("self")?, pid })
    }

    /// The key of the process that has `pid` in this process's namespace.
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let inner = status
            .lines()
            .find_map(|line| line.strip_prefix("NSpid:"))
            .and_then(|pids| pids.split_whitespace().last()?.parse().ok())
            .ok_or_else(|| io::Error::other("no NSpid"))?;
        Ok(Self { namespace: pid_namespace(&pid.to_string())?, pid: inner })
    }

    /// The key of the process that has `pid` in this process's own pid namespace, which
    /// this process need not see in /proc.
    pub(crate) fn beside(pid: i32) -> io::Result<Self> {
        Ok(Self { namespace: pid_namespace("self")?, pid })
    }

    /// The directory of the process.
    pub(crate) fn entry(self) -> Entry {
        Entry { dir: store_dir().join(self.to_string()) }
    }
}

fn pid_namespace(process: &str) -> io::Result<u64> {
    let link = fs::read_link(format!("/proc/{process}/ns/pid"))?;
    link.to_string_lossy()
        .trim_start_matches("pid:[")
        .trim_end_matches(']')
        .parse()
        .map_err(io::Error::other)
}

/// When the process began, in the clock ticks of `/proc/PID/stat`. It tells callers a
/// process from an earlier one with the same pid.
pub(crate) fn start_time(process: &str) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// One process's directory.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    dir: PathBuf,
}

impl Entry {
    /// The directory, which may not exist yet.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Creates the directory if it is not there. Whoever asks first does, so it is not
    /// always the process itself.
    fn make(&self) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        for_everybody(&File::open(&self.dir)?);
        Ok(())
    }

    /// Where an allocation lies.
    pub(crate) fn memory(&self, gpu: u32, address: u64) -> PathBuf {
        self.dir.join(format!("mem-{gpu}-{address:x}"))
    }

    /// Writes a file so that readers see all of it or nothing.
    pub(crate) fn write(&self, name: &str, text: &str) -> io::Result<()> {
        self.make()?;
        let temporary = self.dir.join(format!("tmp-{}-{name}", unique()));
        fs::write(&temporary, text)?;
        fs::rename(temporary, self.dir.join(name))
    }

    /// Removes a file if it is there.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        remove_if_there(&self.dir.join(name))
    }

    /// Reads a file if it is there.
    pub(crate) fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.dir.join(name)).ok()
    }

    /// Bytes that this process has on each GPU.
    fn memory_files(&self) -> Vec<(u32, u64)> {
        let Ok(files) = fs::read_dir(&self.dir) else { return Vec::new() };
        files
            .flatten()
            .filter_map(|file| {
                let name = file.file_name().into_string().ok()?;
                let gpu = name.strip_prefix("mem-")?.split_once('-')?.0.parse().ok()?;
                Some((gpu, file.metadata().ok()?.len()))
            })
            .collect()
    }

    fn is_alive(&self) -> bool {
        let Ok(file) = File::open(self.dir.join("alive")) else { return false };
        is_locked(&file)
    }

    fn remove_memory(&self) -> io::Result<()> {
        for file in fs::read_dir(&self.dir)?.flatten() {
            if file.file_name().to_string_lossy().starts_with("mem-") {
                remove_if_there(&file.path())?;
            }
        }
        self.remove("alive")
    }
}

/// Right to count and change memory. Held for moments only.
pub(crate) struct StoreLock {
    _lock: Flock<File>,
}

/// Says that the process uses GPUs; see the module.
pub(crate) struct Alive {
    lock: Flock<File>,
}

impl Alive {
    /// On which GPUs it has a context.
    pub(crate) fn uses(&self, _right: &StoreLock, gpus: &[u32]) -> io::Result<()> {
        let text = gpus.iter().fold(String::new(), |text, gpu| text + &gpu.to_string() + "\n");
        self.lock.set_len(0)?;
        self.lock.write_all_at(text.as_bytes(), 0)
    }
}

/// A process on the GPUs.
pub(crate) struct User {
    /// The name of its key.
    pub(crate) key: String,
    /// The GPUs on which it has a context.
    pub(crate) gpus: Vec<u32>,
    /// Its allocations: GPU and bytes.
    memory: Vec<(u32, u64)>,
}

impl User {
    /// Its bytes on a GPU.
    pub(crate) fn bytes(&self, gpu: u32) -> u64 {
        self.memory.iter().filter(|memory| memory.0 == gpu).map(|memory| memory.1).sum()
    }
}

#[expect(clippy::unused_self, reason = "the lock is the right to do what these do")]
impl StoreLock {
    /// Waits for the right.
    pub(crate) fn take() -> io::Result<Self> {
        fs::create_dir_all(store_dir())?;
        let path = store_dir().join("lock");
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        for_everybody(&file);
        Ok(Self { _lock: lock(file)? })
    }

    /// Takes over the process's entry; memory under it is an earlier process's.
    pub(crate) fn claim(&self, entry: &Entry) -> io::Result<Alive> {
        entry.make()?;
        entry.remove_memory()?;
        let file = File::create(entry.dir().join("alive"))?;
        Ok(Alive { lock: lock(file)? })
    }

    /// Bytes in use on a GPU by all processes, with what NVML shows of none.
    pub(crate) fn used(&self, gpu: u32, settings: &Settings) -> u64 {
        let of = |user: &User| {
            let besides = if user.gpus.contains(&gpu) { settings.context_bytes } else { 0 };
            user.bytes(gpu) + besides
        };
        self.users().iter().map(of).sum()
    }

    /// Fails as the driver does if `bytes` more do not fit on a GPU.
    pub(crate) fn reserve(&self, gpu: u32, bytes: u64, settings: &Settings) -> Result<()> {
        match self.used(gpu, settings).checked_add(bytes) {
            Some(sum) if sum <= settings.memory => Ok(()),
            _ => Err(CudaError::OUT_OF_MEMORY),
        }
    }

    /// Creates one allocation, filled with zeros.
    pub(crate) fn create(&self, path: &Path, bytes: u64) -> io::Result<()> {
        File::create_new(path)?.set_len(bytes)
    }

    /// Removes what a process has on the GPUs.
    pub(crate) fn release(&self, entry: &Entry) -> io::Result<()> {
        entry.remove_memory()
    }

    /// The processes on the GPUs. What the dead left is removed.
    pub(crate) fn users(&self) -> Vec<User> {
        let Ok(entries) = fs::read_dir(store_dir()) else { return Vec::new() };
        let mut users = Vec::new();
        for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
            let key = entry.file_name().to_string_lossy().into_owned();
            let entry = Entry { dir: entry.path() };
            if entry.is_alive() {
                let alive = entry.read("alive").unwrap_or_default();
                let gpus = alive.lines().filter_map(|gpu| gpu.parse().ok()).collect();
                users.push(User { key, gpus, memory: entry.memory_files() });
            } else {
                // What cannot be removed now is counted out all the same.
                let _ = entry.remove_memory();
            }
        }
        users
    }
}

/// The processes of a machine are different users', and its GPU is for all of them.
fn for_everybody(file: &File) {
    let Ok(metadata) = file.metadata() else { return };
    let mode = if metadata.is_dir() { 0o777 } else { 0o666 };
    if metadata.mode() & mode != mode {
        // Whoever made it is about to do the same.
        let _ = file.set_permissions(Permissions::from_mode(mode));
    }
}

fn lock(mut file: File) -> io::Result<Flock<File>> {
    loop {
        match Flock::lock(file, FlockArg::LockExclusive) {
            Ok(lock) => return Ok(lock),
            Err((again, Errno::EINTR)) => file = again,
            Err((_, errno)) => return Err(errno.into()),
        }
    }
}

/// Whether some living process holds the file's lock.
pub(crate) fn is_locked(file: &File) -> bool {
    match file.try_clone() {
        // The clone shares the open file description: dropping the lock releases it.
        Ok(clone) => Flock::lock(clone, FlockArg::LockSharedNonblock).is_err(),
        Err(_) => true,
    }
}

/// A locked file, under its final name only once it is whole and locked; nothing if
/// that name is taken.
pub(crate) fn publish(entry: &Entry, name: &str, text: &str) -> io::Result<Option<Flock<File>>> {
    entry.make()?;
    let temporary = entry.dir().join(format!("tmp-{}", unique()));
    fs::write(&temporary, text)?;
    let lock = lock(OpenOptions::new().write(true).open(&temporary)?)?;
    let linked = fs::hard_link(&temporary, entry.dir().join(name));
    fs::remove_file(temporary)?;
    match linked {
        Ok(()) => Ok(Some(lock)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

/// Deletes a file that may be gone already.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The number of this machine.
pub(crate) fn machine() -> io::Result<u128> {
    let path = store_dir().join("machine");
    let _lock = StoreLock::take()?;
    match fs::read_to_string(&path) {
        Ok(text) => u128::from_str_radix(text.trim_end(), 16).map_err(io::Error::other),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let machine = random()?;
            fs::write(path, format!("{machine:032x}\n"))?;
            Ok(machine)
        }
        Err(error) => Err(error),
    }
}

/// A number that nobody can guess, and never zero.
pub(crate) fn random() -> io::Result<u128> {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    u128::from_str_radix(&uuid.trim_end().replace('-', ""), 16).map_err(io::Error::other)
}

/// A name that no other process or thread uses.
pub(crate) fn unique() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{SystemTime, UNIX_EPOCH};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // The namespace tells callers with the same pid apart; a caller without /proc gets 0.
    let namespace = pid_namespace("self").unwrap_or_default();
    format!("{now}-{namespace}-{}-{count}", std::process::id())
}
