//! `stasis.json` in an image directory: what a restore must know about a checkpoint.
//!
//! Written last, so that an image with a manifest is whole: [`Manifest::write`] replaces the file
//! in one step and syncs it. Read with distrust: an image may come from a registry. What stands
//! in a manifest are names to look for on this host, never sources of mounts or devices.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use serde::{Deserialize, Serialize};

use crate::text::printable;

/// The name of the file in the image directory.
pub const MANIFEST_FILE: &str = "stasis.json";

/// The name of the copy of a job file in the image directory.
pub const JOB_FILE: &str = "stasis.job";

/// The largest job file that is used, in bytes. Nobody has published how large the driver makes
/// one; it records processes and what they share, so this is far above what it can need, and little
/// enough for a container to waste.
pub const MAX_JOB_BYTES: u64 = 64 << 20;

/// The version that this program writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// The name before the rename. Fixed, so that a crash leaves one behind at most.
const TEMPORARY: &str = ".stasis.json.tmp";

/// The largest file that is read or written, in bytes.
pub const MAX_BYTES: u64 = 1 << 20;
/// The largest number of entries in a list.
const MAX_ENTRIES: usize = 65_536;
/// The longest text, in bytes. As long as a path can be.
const MAX_TEXT: usize = 4096;

/// What is known about a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`VERSION`].
    pub version: u32,
    /// When, RFC 3339 in UTC: see [`timestamp`].
    pub created: String,
    /// Program and version that wrote it.
    pub created_by: String,
    /// The container's id.
    pub container: String,
    /// The driver of the host of the checkpoint.
    pub driver: Driver,
    /// The GPUs that were in use.
    pub gpus: Vec<Gpu>,
    /// The processes that used CUDA.
    pub processes: Vec<Process>,
    /// The job that the processes are members of, if they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
    /// The flags of the dump, because a restore needs the same.
    pub dump: Dump,
    /// Destinations of GPU mounts, absolute paths in the container.
    pub gpu_mounts: Vec<String>,
    /// GPU devices, absolute paths in the container.
    pub gpu_devices: Vec<String>,
    /// Which GPU each of these devices was, where it was one: all that the processes could see. A
    /// restore may put others in their place, from driver 580 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_nodes: Vec<GpuNode>,
    /// How long each phase of the checkpoint took, in order.
    pub phases: Vec<Phase>,
}

/// A version of the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Driver {
    /// As NVML names it, such as `580.159.04`. Empty where NVML was absent.
    pub version: String,
    /// The CUDA version that it offers, 1000 × major + 10 × minor: 13000 is 13.0.
    pub cuda: u32,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// As NVML writes it, `GPU-…`.
    pub uuid: String,
    /// The product.
    pub name: String,
    /// Whole memory, in bytes.
    pub memory_bytes: u64,
}

/// The device node of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuNode {
    /// Absolute path in the container; one of [`Manifest::gpu_devices`].
    pub path: String,
    /// As NVML writes it, `GPU-…`.
    pub uuid: String,
}

/// A process that used CUDA.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// The pid in the pid namespace of the container's init. At least 1.
    pub pid: i32,
    /// Its name, for messages. A process names itself, so pass it through
    /// [`printable`]: control characters are refused.
    pub command: String,
    /// Its place in the order in which a job is restored. No two have the same.
    pub order: u32,
    /// UUIDs of the GPUs that it used, as far as they are known.
    pub gpus: Vec<String>,
    /// GPU memory that it held, in bytes, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
}

/// The job file of processes that may share GPU memory, as it was when all of them were
/// CHECKPOINTED. The driver restores them with a copy of it and with nothing else.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Its size, at most [`MAX_JOB_BYTES`].
    pub bytes: u64,
    /// Its SHA-256 in 64 lower-case hexadecimal digits.
    pub sha256: String,
    /// Whose it is.
    pub file: JobFile,
}

/// Where the live job file of a restored container comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum JobFile {
    /// Stasis made it for the annotation; [`JOB_FILE`] is the copy.
    #[default]
    Made,
    /// CRIU restores it with the processes: the memory file of `cuda-checkpoint --launch-job`, one
    /// that was unlinked, or one on a tmpfs of the container.
    Dumped,
    /// The container named a file of its own root file system; [`JOB_FILE`] is the copy.
    Rootfs {
        /// Absolute path in the container.
        path: String,
        /// Permission bits, without any beyond 0777.
        mode: u32,
        /// Owner, as the host sees it.
        uid: u32,
        /// Group, as the host sees it.
        gid: u32,
    },
}

/// The flags of the dump.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "these are CRIU's flags")]
pub struct Dump {
    /// `--tcp-established`
    pub tcp_established: bool,
    /// `--ext-unix-sk`
    pub external_unix_sockets: bool,
    /// `--shell-job`
    pub shell_job: bool,
    /// `--file-locks`
    pub file_locks: bool,
}

/// A phase of the checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// How long it took, in milliseconds.
    pub milliseconds: u64,
}

/// A manifest that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The image directory cannot be opened.
    #[error("cannot open the image directory {}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("cannot read the manifest {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write the manifest {}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file cannot be removed.
    #[error("cannot remove the manifest {}", .path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// There is something else in its place.
    #[error("the manifest {} is {kind}, expected a regular file", .path.display())]
    NotRegular {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// It is too large.
    #[error("the manifest {} has more than {MAX_BYTES} bytes", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is not JSON, or fields are missing, unknown or of the wrong type.
    #[error("the manifest {} cannot be parsed: {reason}", .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser says. Not kept as a source: it quotes the file, so it is escaped and
        /// cut.
        reason: String,
    },
    /// It does not say which version it has.
    #[error("the manifest {} names no version, this program reads version {VERSION}", .path.display())]
    NoVersion {
        /// The file.
        path: PathBuf,
    },
    /// Another program wrote it.
    #[error("the manifest {} has version {found}, this program reads version {VERSION}", .path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version that it has.
        found: u64,
    },
    /// A value is not possible.
    #[error("the manifest {} is invalid: {field}: {reason}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Which field, such as `processes[3].pid`.
        field: String,
        /// What was found and what is expected.
        reason: String,
    },
}

/// A time as [`Manifest::created`] holds it.
#[must_use]
pub fn timestamp(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

impl Manifest {
    /// Reads the manifest of an image; `None` if it has none.
    ///
    /// Nothing but a regular file is opened, links are not followed, and nothing that comes back
    /// has sizes, paths or characters that its reader must fear.
    ///
    /// # Errors
    /// If the directory cannot be opened, or the file is not such a manifest.
    pub fn read(image: &Path) -> Result<Option<Self>, ManifestError> {
        let path = image.join(MANIFEST_FILE);
        let dir = directory(image).map_err(|e| cannot_open(image, e))?;
        let Some(bytes) = read(&dir, &path)? else {
            return Ok(None);
        };
        Self::parse(&bytes, path).map(Some)
    }

    /// As [`Self::read`], of the content of a file that lies elsewhere; `path` is its name in errors.
    ///
    /// # Errors
    /// If it is not such a manifest.
    pub fn parse(bytes: &[u8], path: PathBuf) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct OfAnyVersion {
            version: Option<u64>,
        }
        if bytes.len() as u64 > MAX_BYTES {
            return Err(ManifestError::TooLarge { path });
        }
        let syntax = |path, error: &serde_json::Error| ManifestError::Syntax {
            path,
            reason: printable(&error.to_string(), 512),
        };
        // First, because in another version everything else may differ.
        let version = match serde_json::from_slice(bytes) {
            Ok(OfAnyVersion { version: Some(version) }) => version,
            Ok(OfAnyVersion { version: None }) => return Err(ManifestError::NoVersion { path }),
            Err(error) => return Err(syntax(path, &error)),
        };
        if version != u64::from(VERSION) {
            return Err(ManifestError::Version { path, found: version });
        }
        let manifest: Self = match serde_json::from_slice(bytes) {
            Ok(manifest) => manifest,
            Err(error) => return Err(syntax(path, &error)),
        };
        match manifest.validate() {
            Ok(()) => Ok(manifest),
            Err(Wrong { field, reason }) => Err(ManifestError::Invalid { path, field, reason }),
        }
    }

    /// Writes the manifest of an image: whole, synced, and in place of an old one.
    ///
    /// # Errors
    /// If it could not be read again, or the file cannot be written. An old one is then still
    /// there.
    pub fn write(&self, image: &Path) -> Result<(), ManifestError> {
        let path = image.join(MANIFEST_FILE);
        if let Err(Wrong { field, reason }) = self.validate() {
            return Err(ManifestError::Invalid { path, field, reason });
        }
        let mut text = match serde_json::to_vec_pretty(self) {
            Ok(text) => text,
            Err(error) => {
                return Err(ManifestError::Write { path, source: error.into() });
            }
        };
        text.push(b'\n');
        if u64::try_from(text.len()).map_or(true, |len| len > MAX_BYTES) {
            return Err(ManifestError::TooLarge { path });
        }
        let dir = directory(image).map_err(|e| cannot_open(image, e))?;
        replace(&dir, &text).map_err(|source| {
            // If this fails as well, the next write clears it away.
            let _ = remove(&dir, TEMPORARY);
            ManifestError::Write { path, source }
        })
    }

    /// Removes the manifest of an image, if there is one, so that the image counts as unfinished.
    ///
    /// # Errors
    /// If it is still there afterwards, or might be after a crash.
    pub fn remove(image: &Path) -> Result<(), ManifestError> {
        let dir = match directory(image) {
            Ok(dir) => dir,
            Err(Errno::ENOENT) => return Ok(()),
            Err(error) => return Err(cannot_open(image, error)),
        };
        remove(&dir, TEMPORARY)
            .and_then(|()| remove(&dir, MANIFEST_FILE))
            .map_err(io::Error::from)
            .and_then(|()| sync_directory(&dir))
            .map_err(|source| ManifestError::Remove { path: image.join(MANIFEST_FILE), source })
    }

    fn validate(&self) -> Result<(), Wrong> {
        // Taken apart, so that a new field cannot be forgotten here.
        let Self {
            version,
            created,
            created_by,
            container,
            driver: Driver { version: driver, cuda: _ },
            gpus,
            processes,
            job,
            dump: _,
            gpu_mounts,
            gpu_devices,
            gpu_nodes,
            phases,
        } = self;
        if *version != VERSION {
            return Err(Wrong::new("version", format!("expected {VERSION}, found {version}")));
        }
        text("created", created)?;
        if humantime::parse_rfc3339(created).is_err() {
            return Err(Wrong::new("created", "expected a time in RFC 3339 and UTC"));
        }
        text("created_by", created_by)?;
        text("container", container)?;
        text("driver.version", driver)?;
        for (field, gpu) in entries("gpus", gpus)? {
            let Gpu { uuid, name, memory_bytes: _ } = gpu;
            text(format!("{field}.uuid"), uuid)?;
            text(format!("{field}.name"), name)?;
        }
        let (mut pids, mut orders) = (HashSet::new(), HashSet::new());
        for (field, process) in entries("processes", processes)? {
            let Process { pid, command, order, gpus, device_bytes: _ } = process;
            if *pid < 1 {
                let reason = format!("expected a pid from 1, found {pid}");
                return Err(Wrong::new(format!("{field}.pid"), reason));
            }
            if !pids.insert(pid) {
                return Err(Wrong::new(
                    format!("{field}.pid"),
                    format!("{pid} stands there twice"),
                ));
            }
            text(format!("{field}.command"), command)?;
            if !orders.insert(order) {
                let reason = format!("{order} stands there twice");
                return Err(Wrong::new(format!("{field}.order"), reason));
            }
            for (field, uuid) in entries(&format!("{field}.gpus"), gpus)? {
                text(field, uuid)?;
            }
        }
        if let Some(job) = job {
            job.validate()?;
        }
        for (field, destination) in entries("gpu_mounts", gpu_mounts)? {
            absolute(field, destination)?;
        }
        for (field, device) in entries("gpu_devices", gpu_devices)? {
            absolute(field, device)?;
        }
        for (field, node) in entries("gpu_nodes", gpu_nodes)? {
            let GpuNode { path, uuid } = node;
            text(format!("{field}.uuid"), uuid)?;
            if !gpu_devices.contains(path) {
                let found = crate::text::quoted(path);
                let reason = format!("expected one of gpu_devices, found {found}");
                return Err(Wrong::new(format!("{field}.path"), reason));
            }
        }
        for (field, phase) in entries("phases", phases)? {
            let Phase { name, milliseconds: _ } = phase;
            text(format!("{field}.name"), name)?;
        }
        Ok(())
    }
}

impl Job {
    fn validate(&self) -> Result<(), Wrong> {
        let Self { bytes, sha256, file } = self;
        if *bytes > MAX_JOB_BYTES {
            let reason = format!("expected at most {MAX_JOB_BYTES} bytes, found {bytes}");
            return Err(Wrong::new("job.bytes", reason));
        }
        let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if sha256.len() != 64 || !sha256.bytes().all(digit) {
            let found = crate::text::quoted(sha256);
            let reason = format!("expected 64 hexadecimal digits, found {found}");
            return Err(Wrong::new("job.sha256", reason));
        }
        if let JobFile::Rootfs { path, mode, uid: _, gid: _ } = file {
            absolute("job.file.rootfs.path".to_owned(), path)?;
            if *mode > 0o777 {
                let reason = format!("expected permission bits up to 0777, found {mode:#o}");
                return Err(Wrong::new("job.file.rootfs.mode", reason));
            }
        }
        Ok(())
    }
}

/// A field that cannot be.
struct Wrong {
    field: String,
    reason: String,
}

impl Wrong {
    fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }
}

/// The entries of a list with their names, if there are not too many.
fn entries<'a, T>(
    field: &str,
    list: &'a [T],
) -> Result<impl Iterator<Item = (String, &'a T)> + use<'a, T>, Wrong> {
    if list.len() > MAX_ENTRIES {
        let reason = format!("expected at most {MAX_ENTRIES} entries, found {}", list.len());
        return Err(Wrong::new(field, reason));
    }
    let field = field.to_owned();
    Ok(list.iter().enumerate().map(move |(i, entry)| (format!("{field}[{i}]"), entry)))
}

fn text(field: impl Into<String>, text: &str) -> Result<(), Wrong> {
    if text.len() > MAX_TEXT {
        let reason = format!("expected at most {MAX_TEXT} bytes, found {}", text.len());
        return Err(Wrong::new(field, reason));
    }
    if text.chars().any(char::is_control) {
        let reason = format!("expected no control characters, found {}", crate::text::quoted(text));
        return Err(Wrong::new(field, reason));
    }
    Ok(())
}

fn absolute(field: String, path: &str) -> Result<(), Wrong> {
    if !path.starts_with('/') || path.split('/').any(|part| part == "..") {
        let found = crate::text::quoted(path);
        let reason = format!("expected an absolute path without `..`, found {found}");
        return Err(Wrong::new(field, reason));
    }
    text(field, path)
}

fn directory(path: &Path) -> nix::Result<OwnedFd> {
    open(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
}

fn cannot_open(image: &Path, error: Errno) -> ManifestError {
    ManifestError::Directory { path: image.to_owned(), source: error.into() }
}

fn read(dir: impl AsFd, path: &Path) -> Result<Option<Vec<u8>>, ManifestError> {
    let failed = |source: io::Error| ManifestError::Read { path: path.to_owned(), source };
    let check = |stat: &FileStat| match kind(stat) {
        None => Ok(()),
        Some(kind) => Err(ManifestError::NotRegular { path: path.to_owned(), kind }),
    };
    // Looked at before it is opened, because to open a device can already do something: an image
    // that was unpacked by root may hold any.
    match fstatat(&dir, MANIFEST_FILE, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => check(&stat)?,
        Err(Errno::ENOENT) => return Ok(None),
        Err(error) => return Err(failed(error.into())),
    }
    let flags = OFlag::O_RDONLY
        | OFlag::O_NOFOLLOW
        | OFlag::O_NONBLOCK
        | OFlag::O_NOCTTY
        | OFlag::O_CLOEXEC;
    let file = File::from(
        openat(&dir, MANIFEST_FILE, flags, Mode::empty()).map_err(|e| failed(e.into()))?,
    );
    check(&fstat(&file).map_err(|e| failed(e.into()))?)?;

    let mut bytes = Vec::new();
    // Its size may change under our eyes, so count what is read.
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if u64::try_from(bytes.len()).map_or(true, |len| len > MAX_BYTES) {
        return Err(ManifestError::TooLarge { path: path.to_owned() });
    }
    Ok(Some(bytes))
}

/// What it is, if it is not a regular file.
fn kind(stat: &FileStat) -> Option<&'static str> {
    Some(match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => return None,
        SFlag::S_IFLNK => "a symbolic link",
        SFlag::S_IFDIR => "a directory",
        SFlag::S_IFIFO => "a FIFO",
        SFlag::S_IFSOCK => "a socket",
        SFlag::S_IFCHR | SFlag::S_IFBLK => "a device",
        _ => "something else",
    })
}

fn replace(dir: impl AsFd, text: &[u8]) -> io::Result<()> {
    remove(&dir, TEMPORARY)?;
    let flags =
        OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut file = File::from(openat(&dir, TEMPORARY, flags, Mode::from_bits_truncate(0o600))?);
    file.write_all(text)?;
    file.sync_all()?;
    renameat(&dir, TEMPORARY, &dir, MANIFEST_FILE)?;
    sync_directory(dir)
}

fn remove(dir: impl AsFd, name: &str) -> nix::Result<()> {
    match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

fn sync_directory(dir: impl AsFd) -> io::Result<()> {
    match nix::unistd::fsync(dir) {
        // EINVAL: a filesystem that has nothing to sync here.
        Ok(()) | Err(Errno::EINVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;

    const JSON: &str = r#"{
  "version": 1,
  "created": "2026-11-29T18:35:00Z",
  "created_by": "stasis 0.1.0",
  "container": "counter",
  "driver": {
    "version": "580.159.04",
    "cuda": 13000
  },
  "gpus": [
    {
      "uuid": "GPU-5d8c5b7e-8a3f-4b0e-9d5e-0c1f2a3b4c5d",
      "name": "NVIDIA H200",
      "memory_bytes": 150754820096
    }
  ],
  "processes": [
    {
      "pid": 1,
      "command": "counter",
      "order": 0,
      "gpus": [
        "GPU-5d8c5b7e-8a3f-4b0e-9d5e-0c1f2a3b4c5d"
      ],
      "device_bytes": 67108864
    },
    {
      "pid": 7,
      "command": "helper",
      "order": 1,
      "gpus": []
    }
  ],
  "dump": {
    "tcp_established": true,
    "external_unix_sockets": false,
    "shell_job": false,
    "file_locks": true
  },
  "gpu_mounts": [
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
  ],
  "gpu_devices": [
    "/dev/nvidia0",
    "/dev/nvidiactl"
  ],
  "phases": [
    {
      "name": "lock",
      "milliseconds": 3
    },
    {
      "name": "dump",
      "milliseconds": 1200
    }
  ]
}
"#;

    fn manifest() -> Manifest {
        let uuid = "GPU-5d8c5b7e-8a3f-4b0e-9d5e-0c1f2a3b4c5d".to_owned();
        Manifest {
            version: 1,
            created: "2026-11-29T18:35:00Z".into(),
            created_by: "stasis 0.1.0".into(),
            container: "counter".into(),
            driver: Driver { version: "580.159.04".into(), cuda: 13000 },
            gpus: vec![Gpu {
                uuid: uuid.clone(),
                name: "NVIDIA H200".into(),
                memory_bytes: 150_754_820_096,
            }],
            processes: vec![
                Process {
                    pid: 1,
                    command: "counter".into(),
                    order: 0,
                    gpus: vec![uuid],
                    device_bytes: Some(64 << 20),
                },
                Process { pid: 7, command: "helper".into(), order: 1, ..Process::default() },
            ],
            job: None,
            dump: Dump { tcp_established: true, file_locks: true, ..Dump::default() },
            gpu_mounts: vec!["/usr/lib/x86_64-linux-gnu/libcuda.so.1".into()],
            gpu_devices: vec!["/dev/nvidia0".into(), "/dev/nvidiactl".into()],
            gpu_nodes: Vec::new(),
            phases: vec![
                Phase { name: "lock".into(), milliseconds: 3 },
                Phase { name: "dump".into(), milliseconds: 1200 },
            ],
        }
    }

    /// An image directory with this manifest in it.
    fn image(text: impl AsRef<[u8]>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(MANIFEST_FILE), text).unwrap();
        dir
    }

    /// What is said about this text, after the path.
    fn refused(text: impl AsRef<[u8]>) -> String {
        let dir = image(text);
        let message = Manifest::read(dir.path()).unwrap_err().to_string();
        let path = dir.path().join(MANIFEST_FILE);
        let rest = message.strip_prefix(&format!("the manifest {} ", path.display()));
        rest.unwrap_or_else(|| panic!("{message}")).to_owned()
    }

    fn changed(change: impl FnOnce(&mut Manifest)) -> String {
        let mut manifest = manifest();
        change(&mut manifest);
        let said = refused(serde_json::to_vec(&manifest).unwrap());
        // What cannot be read is not written either.
        let dir = tempfile::tempdir().unwrap();
        assert!(manifest.write(dir.path()).unwrap_err().to_string().ends_with(&said));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        said
    }

    #[test]
    fn it_looks_like_this() {
        let dir = tempfile::tempdir().unwrap();
        manifest().write(dir.path()).unwrap();
        let path = dir.path().join(MANIFEST_FILE);
        assert_eq!(fs::read_to_string(&path).unwrap(), JSON);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(Manifest::read(dir.path()).unwrap(), Some(manifest()));
    }

    fn with_job(file: JobFile) -> Manifest {
        let job = Job { bytes: 4096, sha256: "0123456789abcdef".repeat(4), file };
        Manifest { job: Some(job), ..manifest() }
    }

    #[test]
    fn which_gpu_a_node_was_is_known_for_nodes_only() {
        let node = |path: &str| GpuNode { path: path.into(), uuid: "GPU-0".into() };
        let dir = tempfile::tempdir().unwrap();
        let with = Manifest { gpu_nodes: vec![node("/dev/nvidia0")], ..manifest() };
        with.write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), Some(with));
        let said = changed(|manifest| manifest.gpu_nodes = vec![node("/dev/sda")]);
        assert!(said.contains("gpu_nodes[0].path: expected one of gpu_devices"), "{said}");
    }

    #[test]
    fn a_job_looks_like_this() {
        let rootfs = JobFile::Rootfs { path: "/var/job".into(), mode: 0o600, uid: 1000, gid: 1000 };
        for (file, text) in [
            (JobFile::Made, r#""made""#),
            (JobFile::Dumped, r#""dumped""#),
            (rootfs, r#"{"rootfs":{"path":"/var/job","mode":384,"uid":1000,"gid":1000}}"#),
        ] {
            assert_eq!(serde_json::to_string(&file).unwrap(), text);
            let dir = tempfile::tempdir().unwrap();
            with_job(file.clone()).write(dir.path()).unwrap();
            assert_eq!(Manifest::read(dir.path()).unwrap(), Some(with_job(file)));
        }
    }

    #[test]
    fn a_job_that_cannot_be_is_refused() {
        let of = |change: fn(&mut Job)| {
            changed(|manifest| {
                *manifest = with_job(JobFile::Made);
                manifest.job.as_mut().map(change).unwrap();
            })
        };
        assert_eq!(
            of(|job| job.bytes = MAX_JOB_BYTES + 1),
            "is invalid: job.bytes: expected at most 67108864 bytes, found 67108865"
        );
        for sha256 in ["", "00", &"A".repeat(64), &"é".repeat(32)] {
            let mut manifest = with_job(JobFile::Made);
            sha256.clone_into(&mut manifest.job.as_mut().unwrap().sha256);
            let said = refused(serde_json::to_vec(&manifest).unwrap());
            assert!(said.starts_with("is invalid: job.sha256: expected 64"), "{said}");
        }
        let path = "../job".to_owned();
        let said = changed(|manifest| {
            *manifest = with_job(JobFile::Rootfs { path, mode: 0o600, uid: 0, gid: 0 });
        });
        assert!(
            said.starts_with("is invalid: job.file.rootfs.path: expected an absolute"),
            "{said}"
        );
        let said = changed(|manifest| {
            let path = "/job".to_owned();
            *manifest = with_job(JobFile::Rootfs { path, mode: 0o4755, uid: 0, gid: 0 });
        });
        assert!(said.contains("expected permission bits up to 0777, found 0o4755"), "{said}");
    }

    #[test]
    fn the_time_is_in_utc() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_977_300);
        assert_eq!(timestamp(time), "2026-11-29T18:35:00Z");
    }

    #[test]
    fn none_is_none_but_a_missing_image_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), None);
        let missing = dir.path().join("none");
        assert!(matches!(Manifest::read(&missing), Err(ManifestError::Directory { .. })));
        assert!(matches!(manifest().write(&missing), Err(ManifestError::Directory { .. })));
        Manifest::remove(&missing).unwrap();
    }

    #[test]
    fn a_write_replaces_and_leaves_nothing_behind() {
        let dir = image("old");
        // A crash in the middle of the last write.
        fs::write(dir.path().join(TEMPORARY), "half").unwrap();
        manifest().write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), Some(manifest()));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_write_does_not_follow_links() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        for name in [MANIFEST_FILE, TEMPORARY] {
            let _ = fs::remove_file(dir.path().join(name));
            std::os::unix::fs::symlink(&victim, dir.path().join(name)).unwrap();
        }
        manifest().write(dir.path()).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
        assert_eq!(Manifest::read(dir.path()).unwrap(), Some(manifest()));
    }

    #[test]
    fn a_failed_write_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(MANIFEST_FILE)).unwrap();
        assert!(matches!(manifest().write(dir.path()), Err(ManifestError::Write { .. })));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn remove_takes_all_traces_away_twice() {
        let dir = image(JSON);
        fs::write(dir.path().join(TEMPORARY), "half").unwrap();
        for _ in 0..2 {
            Manifest::remove(dir.path()).unwrap();
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
        fs::create_dir(dir.path().join(MANIFEST_FILE)).unwrap();
        assert!(matches!(Manifest::remove(dir.path()), Err(ManifestError::Remove { .. })));
    }

    #[test]
    fn only_a_regular_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(MANIFEST_FILE);
        let said = || match Manifest::read(dir.path()).unwrap_err() {
            ManifestError::NotRegular { kind, .. } => kind,
            other => panic!("{other}"),
        };

        fs::write(dir.path().join("other"), JSON).unwrap();
        std::os::unix::fs::symlink("other", &path).unwrap();
        assert_eq!(said(), "a symbolic link");
        fs::remove_file(&path).unwrap();

        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        assert_eq!(said(), "a FIFO");
        fs::remove_file(&path).unwrap();

        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(said(), "a socket");
        fs::remove_file(&path).unwrap();

        fs::create_dir(&path).unwrap();
        assert_eq!(said(), "a directory");
    }

    #[test]
    fn the_image_must_be_a_directory() {
        let dir = image(JSON);
        let file = dir.path().join(MANIFEST_FILE);
        assert!(matches!(Manifest::read(&file), Err(ManifestError::Directory { .. })));
    }

    #[test]
    fn size_and_depth_are_bounded() {
        let mut padded = JSON.to_owned();
        padded.push_str(&" ".repeat((1 << 20) - JSON.len()));
        assert!(Manifest::read(image(&padded).path()).unwrap().is_some());
        padded.push(' ');
        assert_eq!(refused(&padded), "has more than 1048576 bytes");

        for deep in [
            "[".repeat(1 << 20),
            format!("{{\"version\":1,\"gpus\":{}", "[".repeat(1 << 19)),
            format!("{{\"x\":{0}{1},\"version\":1}}", "[".repeat(1 << 18), "]".repeat(1 << 18)),
        ] {
            assert!(refused(deep).starts_with("cannot be parsed: "));
        }
    }

    #[test]
    fn the_version_is_looked_at_first() {
        assert_eq!(
            refused(r#"{"version": 2, "anything": {"else": [1]}}"#),
            "has version 2, this program reads version 1"
        );
        assert_eq!(
            refused("{\"version\": 18446744073709551615}"),
            "has version 18446744073709551615, this program reads version 1"
        );
        for text in ["{}", "{\"version\": null}", "{\"Version\": 1}"] {
            assert_eq!(refused(text), "names no version, this program reads version 1");
        }
        for text in
            ["{\"version\": \"1\"}", "{\"version\": -1}", "{\"version\": 1.0}", "[]", "", "1"]
        {
            assert!(refused(text).starts_with("cannot be parsed: "), "{text}");
        }
    }

    #[test]
    fn what_is_unknown_missing_or_twice_is_refused() {
        let with = |old: &str, new: &str| {
            assert!(JSON.contains(old), "{old}");
            refused(JSON.replacen(old, new, 1))
        };
        assert!(with("\"container\"", "\"kontainer\"").contains("unknown field `kontainer`"));
        assert!(with("\"cuda\"", "\"x\": 1, \"cuda\"").contains("unknown field `x`"));
        assert!(with("\"order\": 0,", "").contains("missing field `order`"));
        assert!(with("\"version\": 1,", "\"version\": 1, \"version\": 1,").contains("duplicate"));
        assert!(with("\"pid\": 1,", "\"pid\": 4294967296,").contains("expected i32"));
        assert!(with("1200", "-1").contains("expected u64"));
        assert!(refused(format!("{JSON}x")).contains("trailing characters"));
        assert!(refused(&JSON[..JSON.len() / 2]).contains("EOF"));
    }

    #[test]
    fn text_that_is_not_utf_8_is_refused() {
        let mut bytes = JSON.as_bytes().to_vec();
        let at = JSON.find("counter").unwrap();
        bytes[at] = 0xff;
        assert!(refused(bytes).starts_with("cannot be parsed: "));
        assert!(refused("\u{feff}{}").starts_with("cannot be parsed: "));
        assert!(refused(b"\0").starts_with("cannot be parsed: "));
    }

    #[test]
    fn pids_and_orders_are_possible_and_unique() {
        assert_eq!(
            changed(|m| m.processes[1].pid = 1),
            "is invalid: processes[1].pid: 1 stands there twice"
        );
        for pid in [0, -1, i32::MIN] {
            assert_eq!(
                changed(|m| m.processes[0].pid = pid),
                format!("is invalid: processes[0].pid: expected a pid from 1, found {pid}")
            );
        }
        assert_eq!(
            changed(|m| m.processes[1].order = 0),
            "is invalid: processes[1].order: 0 stands there twice"
        );
    }

    #[test]
    fn paths_are_absolute_and_stay_below() {
        for path in ["", "dev/nvidia0", "/dev/../etc/shadow", "/..", "../x", "/a/.."] {
            assert_eq!(
                changed(|m| m.gpu_devices[1] = path.into()),
                format!(
                    "is invalid: gpu_devices[1]: expected an absolute path without `..`, found \
                     `{path}`"
                )
            );
            assert!(changed(|m| m.gpu_mounts[0] = path.into()).contains("gpu_mounts[0]"));
        }
        let mut fine = manifest();
        fine.gpu_devices[0] = "/dev/..nvidia0".into();
        fine.write(tempfile::tempdir().unwrap().path()).unwrap();
    }

    #[test]
    fn text_is_short_and_printable() {
        assert_eq!(
            changed(|m| m.processes[0].command = "a\n\u{1b}[2J".into()),
            "is invalid: processes[0].command: expected no control characters, found \
             `a\\n\\u{1b}[2J`"
        );
        assert!(changed(|m| m.gpu_mounts[0] = "/a\0".into()).contains("control characters"));
        let long = "x".repeat(4097);
        for said in [
            changed(|m| m.created_by.clone_from(&long)),
            changed(|m| m.container.clone_from(&long)),
            changed(|m| m.driver.version.clone_from(&long)),
            changed(|m| m.gpus[0].uuid.clone_from(&long)),
            changed(|m| m.gpus[0].name.clone_from(&long)),
            changed(|m| m.processes[0].gpus[0].clone_from(&long)),
            changed(|m| m.phases[0].name.clone_from(&long)),
            changed(|m| m.gpu_mounts[0] = format!("/{long}")),
        ] {
            assert!(said.contains("expected at most 4096 bytes"), "{said}");
        }
        assert_eq!(
            changed(|m| m.created = "yesterday".into()),
            "is invalid: created: expected a time in RFC 3339 and UTC"
        );
    }

    #[test]
    fn lists_are_bounded() {
        let uuids = vec![String::new(); MAX_ENTRIES + 1];
        assert_eq!(
            changed(|m| m.processes[0].gpus = uuids),
            "is invalid: processes[0].gpus: expected at most 65536 entries, found 65537"
        );
        // More than the file may hold.
        let mut large = manifest();
        large.gpu_mounts = vec!["/x".repeat(20); MAX_ENTRIES];
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(large.write(dir.path()), Err(ManifestError::TooLarge { .. })));
        assert_eq!(Manifest::read(dir.path()).unwrap(), None);
    }

    #[test]
    fn messages_about_hostile_text_are_short_and_printable() {
        for text in [
            "{\"version\": 1, \"\\u001b[2J\\n\": 1}".to_owned(),
            format!("{{\"version\": 1, \"{}\": 1}}", "x".repeat(1 << 19)),
        ] {
            let said = refused(text);
            assert!(said.len() < 1000 && !said.chars().any(char::is_control), "{said}");
        }
    }

    #[test]
    fn nothing_makes_the_reader_panic() {
        // Each prefix, and each byte changed a little.
        let path = || PathBuf::from("m");
        for end in 0..JSON.len() - 2 {
            assert!(Manifest::parse(&JSON.as_bytes()[..end], path()).is_err());
        }
        for at in 0..JSON.len() {
            for byte in [0, b'"', b'9', b'}', 0xff] {
                let mut bytes = JSON.as_bytes().to_vec();
                bytes[at] = byte;
                let _ = Manifest::parse(&bytes, path());
            }
        }
    }
}
