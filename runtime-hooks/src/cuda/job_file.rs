//! Reaching job files: only in the helper, since the memory in which a process has its environment,
//! and the file systems of a container, may not answer.
//!
//! The container chooses what its processes name, and may change it at any time. So a file is opened
//! once, without any effect (`O_PATH`), looked at, and from then on reached by that descriptor only.
//! The driver is to write to it with the rights of root: it must be a file to which the process could
//! write itself.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::libc;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use stasis_config::manifest::MAX_JOB_BYTES;
use stasis_config::text::printable;

use super::job::{Copied, DESTINATION, Identity, Job, Named, Neighbour, Unusable, VARIABLE, Way};
use crate::processes::{ProcessId, start_time};

/// No environment is larger: the kernel allows a quarter of the stack's limit, and at most 6 MiB.
const MAX_ENVIRONMENT: u64 = 8 << 20;
/// How much of a name goes into messages, in characters.
const SHOWN: usize = 256;

/// The job file that `process` names; none if it names none, or is gone. The container is what `init`
/// has as its root.
pub(super) fn named_by(
    process: ProcessId,
    init: ProcessId,
    neighbours: &[Neighbour],
) -> Result<Option<Named>, Unusable> {
    match variable(process) {
        Variable::Is(value) => resolve(process, init, &value, neighbours),
        Variable::IsNot => Ok(None),
        // What it began with is what it was given, or what others of the container have.
        Variable::Overwritten => {
            // What only CRIU's image lacks says nothing of what is in it.
            let own = neighbours.iter().find(|other| other.id == process);
            let in_image = own.is_some_and(|own| own.in_image);
            let others = neighbours.iter().filter(|other| other.in_image || !in_image);
            let others = others.filter_map(|other| match variable(other.id) {
                Variable::Is(value) => Some(value),
                Variable::IsNot | Variable::Overwritten => None,
            });
            let given = DESTINATION.as_bytes().to_vec();
            let mut all = std::iter::once(given)
                .chain(others)
                .filter_map(|value| resolve(process, init, &value, neighbours).ok().flatten())
                // An empty one was only mounted over, in an earlier life of this root file system.
                .filter(|named| reach(&named.way).is_ok_and(|file| file.metadata.len() > 0));
            let Some(found) = all.next() else { return Ok(None) };
            match all.find(|other| other.file != found.file) {
                None => Ok(Some(found)),
                Some(other) => Err(Unusable {
                    named: found.named,
                    reason: format!(
                        "may not be its own: its environment was overwritten by a title, and of its \
                         container's processes some name {}",
                        other.named
                    ),
                }),
            }
        }
    }
}

/// The job file of this name.
fn resolve(
    process: ProcessId,
    init: ProcessId,
    value: &[u8],
    neighbours: &[Neighbour],
) -> Result<Option<Named>, Unusable> {
    let named = printable(&String::from_utf8_lossy(value), SHOWN);
    let unusable = |reason: String| Unusable { named: named.clone(), reason };
    let way = way(process, value, neighbours).map_err(unusable)?;
    let reached = reach(&way).and_then(|reached| {
        if let Some(process) = way.process()
            && start_time(process.pid) != Some(process.start_time)
        {
            return Err("its process has taken along".to_owned());
        }
        reached.check_writer(process)?;
        let path = reached.path(&way, init)?;
        Ok((reached, path))
    });
    match reached {
        Ok((reached, path)) => Ok(Some(Named {
            named,
            file: reached.identity(),
            way,
            path,
            mode: reached.metadata.mode() & 0o7777,
            uid: reached.metadata.uid(),
            gid: reached.metadata.gid(),
        })),
        Err(_) if start_time(process.pid) != Some(process.start_time) => Ok(None),
        Err(reason) => Err(unusable(reason)),
    }
}

/// The variable in the environment with which a process began.
#[derive(Debug, PartialEq, Eq)]
enum Variable {
    Is(Vec<u8>),
    /// Not there, or the process is gone.
    IsNot,
    /// The process has written its title over its environment, as setproctitle does, and by it the
    /// workers of model servers.
    Overwritten,
}

fn variable(process: ProcessId) -> Variable {
    let mut environment = Vec::new();
    let read = File::open(format!("/proc/{}/environ", process.pid))
        .and_then(|file| file.take(MAX_ENVIRONMENT).read_to_end(&mut environment));
    if read.is_err() || start_time(process.pid) != Some(process.start_time) {
        return Variable::IsNot;
    }
    match value_in(&environment) {
        Some(value) => Variable::Is(value.to_vec()),
        None if is_overwritten(&environment) => Variable::Overwritten,
        None => Variable::IsNot,
    }
}

/// Whether this is not as the kernel has laid it out: `NAME=VALUE` and a null, again and again.
fn is_overwritten(environment: &[u8]) -> bool {
    let Some(entries) = environment.strip_suffix(&[0]) else { return !environment.is_empty() };
    !entries.split(|&byte| byte == 0).all(|entry| entry.iter().skip(1).any(|&byte| byte == b'='))
}

/// An empty value counts as none.
fn value_in(environment: &[u8]) -> Option<&[u8]> {
    environment
        .split(|&byte| byte == 0)
        .find_map(|entry| entry.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"="))
        .filter(|value| !value.is_empty())
}

impl Way {
    /// The process that has to be there.
    fn process(&self) -> Option<ProcessId> {
        match self {
            Self::Host(_) => None,
            Self::Descriptor { process, .. } | Self::Path { process, .. } => Some(*process),
        }
    }
}

/// What a value means.
fn way(process: ProcessId, value: &[u8], neighbours: &[Neighbour]) -> Result<Way, String> {
    let not_text = || "has a name that is not UTF-8".to_owned();
    let value = std::str::from_utf8(value).map_err(|_| not_text())?;
    if !value.starts_with('/') {
        return Err("is not named by an absolute path".to_owned());
    }
    let descriptor = value.strip_prefix("/dev/fd/").map(|number| ("self", number)).or_else(|| {
        let (whose, rest) = value.strip_prefix("/proc/")?.split_once('/')?;
        Some((whose, rest.strip_prefix("fd/")?))
    });
    let Some((whose, number)) = descriptor else {
        return Ok(Way::Path { process, path: value.to_owned() });
    };
    let number = number.parse().map_err(|_| "is named by no descriptor's number".to_owned())?;
    let process = if matches!(whose, "self" | "thread-self") {
        process
    } else {
        let inner = whose.parse().ok();
        let found = neighbours.iter().find(|neighbour| Some(neighbour.inner_pid) == inner);
        found.ok_or_else(|| format!("belongs to a process {whose} that is not there"))?.id
    };
    Ok(Way::Descriptor { process, number })
}

/// A file that is held, and was not opened.
struct Reached {
    handle: OwnedFd,
    metadata: fs::Metadata,
}

/// Goes a way. What is at its end is a regular file of a size that can be.
fn reach(way: &Way) -> Result<Reached, String> {
    let handle = match way {
        Way::Host(path) => {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty())
        }
        // Such a link leads to the file itself, whatever its name means by now.
        Way::Descriptor { process, number } => rustix::fs::open(
            format!("/proc/{}/fd/{number}", process.pid),
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        ),
        Way::Path { process, path } => in_root_of(*process, path),
    };
    let handle = handle.map_err(|error| match error {
        Errno::NOENT | Errno::NOTDIR => "is not there".to_owned(),
        Errno::LOOP => "is a symbolic link, or lies behind one".to_owned(),
        error => format!("cannot be reached: {error}"),
    })?;
    let file = File::from(handle);
    let metadata = file.metadata().map_err(|error| format!("cannot be looked at: {error}"))?;
    if let Some(kind) = kind(&metadata) {
        return Err(format!("is {kind}"));
    }
    if metadata.len() > MAX_JOB_BYTES {
        let bytes = metadata.len();
        return Err(format!("has {bytes} bytes, more than {MAX_JOB_BYTES}"));
    }
    Ok(Reached { handle: file.into(), metadata })
}

fn in_root_of(process: ProcessId, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let root = format!("/proc/{}/root", process.pid);
    let root = rustix::fs::open(root, flags | OFlags::DIRECTORY, Mode::empty())?;
    let mut resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    // In an image /run may be a link, and the runtime has followed it for the mount.
    if path != DESTINATION {
        resolve |= ResolveFlags::NO_SYMLINKS;
    }
    loop {
        match rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve) {
            // Something was renamed on the way.
            Err(Errno::AGAIN | Errno::INTR) => {}
            opened => return opened,
        }
    }
}

/// What it is, if it is not a regular file.
fn kind(metadata: &fs::Metadata) -> Option<&'static str> {
    Some(match metadata.mode() & libc::S_IFMT {
        libc::S_IFREG => return None,
        libc::S_IFDIR => "a directory",
        libc::S_IFLNK => "a symbolic link",
        libc::S_IFIFO => "a FIFO",
        libc::S_IFSOCK => "a socket",
        libc::S_IFCHR | libc::S_IFBLK => "a device",
        _ => "no regular file",
    })
}

impl Reached {
    fn identity(&self) -> Identity {
        Identity { device: self.metadata.dev(), inode: self.metadata.ino() }
    }

    /// Its name in the container, checked: a name that leads elsewhere by now is none. A process may
    /// have another root than the container's, and name it otherwise.
    fn path(&self, way: &Way, init: ProcessId) -> Result<Option<String>, String> {
        if self.metadata.nlink() == 0 {
            return Ok(None);
        }
        let named = match way {
            Way::Host(_) => return Ok(None),
            Way::Path { path, .. } => Some(path.clone()),
            Way::Descriptor { .. } => None,
        };
        let link = fs::read_link(self.own_path()).ok();
        let link = link.and_then(|link| link.into_os_string().into_string().ok());
        let leads_here = |path: &String| {
            reach(&Way::Path { process: init, path: path.clone() })
                .is_ok_and(|other| other.identity() == self.identity())
        };
        let path = [link, named].into_iter().flatten().find(leads_here);
        path.map(Some).ok_or_else(|| "has no name in the container that leads to it".to_owned())
    }

    fn own_path(&self) -> String {
        format!("/proc/self/fd/{}", self.handle.as_fd().as_raw_fd())
    }

    /// Whether `process` could write to it by its own rights.
    fn check_writer(&self, process: ProcessId) -> Result<(), String> {
        let ids = Ids::of(process).ok_or_else(|| "its process has taken along".to_owned())?;
        let (mode, uid, gid) = (self.metadata.mode(), self.metadata.uid(), self.metadata.gid());
        if ids.may_write(mode, uid, gid) {
            return Ok(());
        }
        let mode = mode & 0o7777;
        Err(format!(
            "it may not write to: owner {uid}:{gid}, mode {mode:04o}, and the process is {}:{}",
            ids.uid, ids.gid
        ))
    }

    /// Opens it, for the driver to write to. It is still the same file.
    fn open(&self, write: bool) -> Result<File, String> {
        let opened = OpenOptions::new().read(true).write(write).open(self.own_path());
        let file = opened.map_err(|error| format!("cannot be opened: {error}"))?;
        let metadata = file.metadata().map_err(|error| format!("cannot be looked at: {error}"))?;
        if (metadata.dev(), metadata.ino()) != (self.metadata.dev(), self.metadata.ino()) {
            return Err("was replaced".to_owned());
        }
        Ok(file)
    }
}

/// Bit of that capability.
const DAC_OVERRIDE: u64 = 1 << 1;

/// By what a process may write.
struct Ids {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    /// `CAP_DAC_OVERRIDE`, as root on this host.
    overrides: bool,
}

impl Ids {
    fn of(process: ProcessId) -> Option<Self> {
        let status = fs::read(format!("/proc/{}/status", process.pid)).ok()?;
        Self::parse(&String::from_utf8_lossy(&status))
    }

    fn parse(status: &str) -> Option<Self> {
        let numbers = |name: &str| -> Option<Vec<u32>> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect())
        };
        // Real, effective, saved, and of the file system.
        let (uid, gid) = (*numbers("Uid:")?.get(3)?, *numbers("Gid:")?.get(3)?);
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        let effective = u64::from_str_radix(effective.trim(), 16).ok()?;
        let overrides = uid == 0 && effective & DAC_OVERRIDE != 0;
        Some(Self { uid, gid, groups: numbers("Groups:")?, overrides })
    }

    fn may_write(&self, mode: u32, uid: u32, gid: u32) -> bool {
        let bit = if self.uid == uid {
            0o200
        } else if self.gid == gid || self.groups.contains(&gid) {
            0o020
        } else {
            0o002
        };
        self.overrides || mode & bit != 0
    }
}

/// The live file of a job, open for the driver.
pub(super) fn live(job: &Job) -> Result<File, String> {
    open(job, true)
}

/// The live file of a job, open for copies.
pub(super) fn to_read(job: &Job) -> Result<File, String> {
    open(job, false)
}

fn open(job: &Job, write: bool) -> Result<File, String> {
    let mut reason = "nobody holds any more".to_owned();
    for way in &job.ways {
        let reached = reach(way).and_then(|reached| {
            if reached.identity() == job.file {
                reached.open(write)
            } else {
                Err(CHANGED.to_owned())
            }
        });
        match reached {
            Ok(file) => return Ok(file),
            Err(why) => reason = why,
        }
    }
    Err(reason)
}

const CHANGED: &str = "was replaced by another";

/// What the variable of a process says for a file that it has open.
pub(super) fn name_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Copies the live file to a new one, if `to` is given, and takes its digest.
pub(super) fn copy(live: &File, to: Option<&Path>) -> io::Result<Copied> {
    let mut content = Vec::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        // By position: whoever opened it may have read.
        let read = live.read_at(&mut chunk, content.len() as u64)?;
        if read == 0 {
            break;
        }
        content.extend_from_slice(&chunk[..read]);
        if content.len() as u64 > MAX_JOB_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("the job file has more than {MAX_JOB_BYTES} bytes"),
            ));
        }
    }
    if let Some(to) = to {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(to)?;
        file.write_all(&content).and_then(|()| file.sync_all()).inspect_err(|_| {
            let _ = fs::remove_file(to);
        })?;
    }
    Ok(Copied { bytes: content.len() as u64, sha256: digest(&content) })
}

/// SHA-256 in lower-case hexadecimal digits.
pub(crate) fn digest(content: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(content).iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn this() -> ProcessId {
        let pid = nix::unistd::getpid().as_raw();
        ProcessId { pid, start_time: start_time(pid).unwrap() }
    }

    fn path_way(path: &Path) -> Way {
        Way::Path { process: this(), path: path.to_str().unwrap().to_owned() }
    }

    fn reason(way: &Way) -> String {
        reach(way).err().unwrap()
    }

    #[test]
    fn a_value_is_found_whole() {
        let of = |text: &[u8]| value_in(text).map(<[u8]>::to_vec);
        assert_eq!(of(b"A=1\0CUDA_CHECKPOINT_JOB_FILE=/j\0"), Some(b"/j".to_vec()));
        assert_eq!(of(b"CUDA_CHECKPOINT_JOB_FILE=/a=b"), Some(b"/a=b".to_vec()));
        for none in [&b""[..], b"X=CUDA_CHECKPOINT_JOB_FILE=/j\0", b"CUDA_CHECKPOINT_JOB_FILE=\0"] {
            assert_eq!(of(none), None);
        }
        assert_eq!(of(b"CUDA_CHECKPOINT_JOB_FILE_2=/j\0"), None);
    }

    #[test]
    fn an_environment_with_a_title_over_it_is_known() {
        for whole in [&b""[..], b"A=1\0B=\0", b"A=1\0", b"A==\0"] {
            assert!(!is_overwritten(whole), "{whole:?}");
        }
        for title in
            [&b"\0\0\0"[..], b"VLLM::Worker_TP0\0\0\0", b"title\0B=1\0", b"A=1\0B", b"=x\0"]
        {
            assert!(is_overwritten(title), "{title:?}");
        }
    }

    #[test]
    fn descriptors_are_told_from_paths() {
        let init = ProcessId { pid: 700, start_time: 1 };
        let neighbours = [Neighbour { inner_pid: 1, id: init, in_image: true }];
        let of = |value: &str| way(this(), value.as_bytes(), &neighbours);
        for own in ["/proc/self/fd/5", "/dev/fd/5", "/proc/thread-self/fd/5"] {
            assert_eq!(of(own), Ok(Way::Descriptor { process: this(), number: 5 }), "{own}");
        }
        assert_eq!(of("/proc/1/fd/3"), Ok(Way::Descriptor { process: init, number: 3 }));
        assert_eq!(of("/run/job"), Ok(Way::Path { process: this(), path: "/run/job".into() }));
        assert!(of("/proc/2/fd/3").unwrap_err().contains("not there"));
        assert!(of("/proc/self/fd/x").is_err() && of("/proc/self/fd/-1").is_err());
        assert!(of("job").unwrap_err().contains("absolute"));
        assert!(way(this(), b"/\xff", &[]).unwrap_err().contains("UTF-8"));
    }

    #[test]
    fn only_regular_files_are_reached() {
        let directory = tempfile::tempdir().unwrap();
        // /tmp may be a link itself.
        let directory = directory.path().canonicalize().unwrap();
        let at = |name: &str| directory.join(name);
        fs::write(at("job"), "x").unwrap();
        symlink(at("job"), at("link")).unwrap();
        symlink(&directory, at("behind")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        File::create(at("huge")).unwrap().set_len(10 << 30).unwrap();
        assert!(reach(&path_way(&at("job"))).is_ok());
        for (name, expected) in [
            ("link", "symbolic link"),
            ("behind/job", "symbolic link"),
            ("fifo", "a FIFO"),
            ("huge", "has 10737418240 bytes"),
            ("none", "not there"),
            ("job/x", "not there"),
            ("", "a directory"),
        ] {
            let said = reason(&path_way(&at(name)));
            assert!(said.contains(expected), "{name}: {said}");
        }
        assert!(reason(&path_way(Path::new("/dev/null"))).contains("a device"));
        // A magic link by another way than a descriptor's.
        let own = format!("/proc/{}/exe", this().pid);
        assert!(reason(&path_way(Path::new(&own))).contains("symbolic link"));
        assert!(reach(&Way::Host(at("link"))).err().unwrap().contains("symbolic link"));
    }

    #[test]
    fn a_file_that_is_replaced_is_not_taken_for_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("job");
        fs::write(&path, "first").unwrap();
        let way = path_way(&path);
        let file = reach(&way).unwrap().identity();
        let job = Job { file, ways: vec![way] };
        let held = live(&job).unwrap();
        assert_eq!(copy(&held, None).unwrap().bytes, 5);
        fs::write(path.with_file_name("other"), "second").unwrap();
        fs::rename(path.with_file_name("other"), &path).unwrap();
        assert_eq!(live(&job).unwrap_err(), CHANGED);
        // What is held stays what it was.
        assert_eq!(copy(&held, None).unwrap().bytes, 5);
    }

    #[test]
    fn one_way_is_enough() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().canonicalize().unwrap();
        let gone = Way::Descriptor { process: this(), number: 9999 };
        let identity = reach(&path_way(&path)).unwrap().identity();
        let job = Job { file: identity, ways: vec![gone.clone(), path_way(&path)] };
        assert!(live(&job).is_ok());
        assert!(live(&Job { file: identity, ways: vec![gone] }).is_err());
        assert!(live(&Job { file: identity, ways: Vec::new() }).unwrap_err().contains("nobody"));
    }

    #[test]
    fn a_memory_file_has_no_path_and_a_named_one_has() {
        let memory: File =
            nix::sys::memfd::memfd_create(c"job", nix::sys::memfd::MFdFlags::empty())
                .unwrap()
                .into();
        let number = memory.as_raw_fd().try_into().unwrap();
        let way = Way::Descriptor { process: this(), number };
        assert_eq!(reach(&way).unwrap().path(&way, this()), Ok(None));
        let named = tempfile::NamedTempFile::new().unwrap();
        let number = named.as_file().as_raw_fd().try_into().unwrap();
        let way = Way::Descriptor { process: this(), number };
        let path = named.path().canonicalize().unwrap();
        assert_eq!(reach(&way).unwrap().path(&way, this()).unwrap().as_deref(), path.to_str());
    }

    #[test]
    fn who_could_not_write_lends_no_right_to() {
        let status = |uid: u32, capabilities: &str| {
            format!(
                "Uid:\t1000\t1000\t1000\t{uid}\nGid:\t100\t100\t100\t100\nGroups:\t7 8 \n\
                 CapEff:\t{capabilities}\n"
            )
        };
        let ids = |uid, capabilities| Ids::parse(&status(uid, capabilities)).unwrap();
        let all = "000001ffffffffff";
        for (mode, uid, gid, may) in [
            (0o600, 1000, 0, true),
            (0o066, 1000, 0, false),
            (0o620, 0, 8, true),
            (0o602, 0, 8, false),
            (0o602, 0, 0, true),
            (0o600, 0, 0, false),
            (0o666, 0, 0, true),
        ] {
            // Capabilities of another user are those in a namespace of its own.
            let found = ids(1000, all).may_write(mode, uid, gid);
            assert_eq!(found, may, "{mode:o} {uid} {gid}");
        }
        assert!(ids(0, all).may_write(0, 1, 1));
        // Root without them.
        assert!(!ids(0, "0000000000000000").may_write(0o600, 1000, 1));
        assert!(ids(0, "0000000000000000").may_write(0o600, 0, 1));
    }

    #[test]
    fn a_process_that_could_not_write_to_it_is_refused() {
        // Root may; so it is asked for a process that is not.
        let mut command = std::process::Command::new("sleep");
        command.arg("60");
        if nix::unistd::geteuid().is_root() {
            std::os::unix::process::CommandExt::uid(&mut command, 65534);
        }
        let mut child = command.spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let other = ProcessId { pid, start_time: start_time(pid).unwrap() };
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().canonicalize().unwrap();
        let reached = |mode| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            reach(&path_way(&path)).unwrap().check_writer(other)
        };
        let (may, may_not) = (reached(0o666), reached(0o444));
        // And through everything that leads there.
        let of_root = fs::Permissions::from_mode(0o444);
        fs::set_permissions(&path, of_root).unwrap();
        let named = resolve(other, this(), path.to_str().unwrap().as_bytes(), &[]);
        child.kill().unwrap();
        child.wait().unwrap();
        may.unwrap();
        let reason = may_not.unwrap_err();
        assert!(reason.starts_with("it may not write to: owner"), "{reason}");
        assert!(named.unwrap_err().reason.contains("may not write to"));
    }

    #[test]
    fn a_process_with_another_root_names_it_as_the_container_does() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("job");
        fs::write(&path, "x").unwrap();
        let reached = reach(&path_way(&path)).unwrap();
        // As from within a chroot to the directory.
        let way = Way::Path { process: this(), path: "/job".into() };
        assert_eq!(reached.path(&way, this()).unwrap().as_deref(), path.to_str());
        fs::rename(&path, path.with_file_name("moved")).unwrap();
        let moved = path.with_file_name("moved");
        assert_eq!(reached.path(&way, this()).unwrap().as_deref(), moved.to_str());
        fs::remove_file(&moved).unwrap();
        fs::write(&moved, "another").unwrap();
        assert!(reached.path(&path_way(&moved), this()).is_err());
    }

    #[test]
    fn a_copy_is_new_and_its_owners_alone() {
        let directory = tempfile::tempdir().unwrap();
        let mut live = tempfile::tempfile().unwrap();
        live.write_all(b"abc").unwrap();
        let to = directory.path().join("copy");
        let copied = copy(&live, Some(&to)).unwrap();
        assert_eq!(copied.bytes, 3);
        assert_eq!(
            copied.sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(fs::read(&to).unwrap(), b"abc");
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(copy(&live, Some(&to)).is_err());
        live.set_len(MAX_JOB_BYTES + 1).unwrap();
        let error = copy(&live, None).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
    }

    #[test]
    fn this_process_names_none_and_a_dead_one_neither() {
        assert_eq!(named_by(this(), this(), &[]), Ok(None));
        assert_eq!(named_by(ProcessId { start_time: 0, ..this() }, this(), &[]), Ok(None));
    }
}
