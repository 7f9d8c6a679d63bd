//! Where a container's job file lies on this host: a tmpfs of its own in the state directory, that
//! only root can enter and that the container can fill no further than its size.
//!
//! ```text
//! STATE/HASH-OF-RUNTIME-ROOT/ID.job/        the tmpfs
//!     job      the file, mounted into the container
//!     owner    who made it
//! ```
//!
//! It goes with the container (`delete`). After a create that fails the runtime has nothing to
//! delete, and it is executed in our place: so the next container with a job, or `stasis repair`,
//! sweeps away what belongs to no container and to no process that is about to make one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde::{Deserialize, Serialize};
use stasis_config::manifest::{self, JOB_FILE, MAX_JOB_BYTES};

use super::JobError;
use crate::cuda::job::Identity;
use crate::files::open_regular;
use crate::journal::{JOB, JournalFile};
use crate::processes::{ProcessId, start_time};

/// A container's job file on this host.
#[derive(Debug, Clone)]
pub struct JobDirectory {
    path: PathBuf,
}

/// Who made a directory, and may be about to make the container.
#[derive(Serialize, Deserialize)]
struct Owner(ProcessId);

impl JobDirectory {
    /// That of a container, by its journal.
    #[must_use]
    pub fn of(journal: &JournalFile) -> Self {
        Self { path: journal.job() }
    }

    /// Whether the container has one. Costs one system call.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.path.exists()
    }

    /// The live file.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.path.join("job")
    }

    /// Which file the live one is; none if there is none.
    #[must_use]
    pub fn identity(&self) -> Option<Identity> {
        let metadata = fs::symlink_metadata(self.file()).ok()?;
        Some(Identity { device: metadata.dev(), inode: metadata.ino() })
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> JobError {
        let path = self.path.clone();
        move |source| JobError::File { action, path, source }
    }

    /// Makes the directory anew, without a file. `label` is what `SELinux` is to know its files by.
    pub(super) fn make(&self, label: Option<&str>) -> Result<(), JobError> {
        self.remove()?;
        let made = DirBuilder::new().mode(0o700).create(&self.path);
        made.map_err(self.failed("cannot make the directory of a job"))?;
        let mut options = format!("size={MAX_JOB_BYTES},nr_inodes=16,mode=0700");
        if let Some(label) = label.filter(|label| !label.is_empty() && !label.contains('"')) {
            options = format!("{options},context=\"{label}\"");
        }
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("stasis-job"), &self.path, Some("tmpfs"), flags, Some(options.as_str()))
            .map_err(io::Error::from)
            .and_then(|()| self.write_owner())
            .map_err(self.failed("cannot mount a tmpfs for a job"))
            .inspect_err(|_| {
                let _ = self.remove();
            })
    }

    fn write_owner(&self) -> io::Result<()> {
        let pid = nix::unistd::getpid().as_raw();
        let start_time = start_time(pid).ok_or_else(|| io::Error::other("no /proc"))?;
        let owner = serde_json::to_vec(&Owner(ProcessId { pid, start_time }))?;
        fs::write(self.path.join("owner"), owner)
    }

    /// Whether another process is about to make the container.
    #[must_use]
    pub fn is_anothers(&self) -> bool {
        self.exists() && self.owner_is_alive()
    }

    /// Whether it belongs to no container, and to nobody who is about to make one. `container` is the
    /// runtime's directory of it.
    #[must_use]
    pub fn is_left_behind(&self, container: &Path) -> bool {
        // In this order: the owner becomes the runtime, and once that has ended it has made the container
        // or never will.
        !self.owner_is_alive() && !container.exists()
    }

    fn owner_is_alive(&self) -> bool {
        let owner = fs::read(self.path.join("owner")).ok();
        let owner = owner.and_then(|text| serde_json::from_slice::<Owner>(&text).ok());
        owner.is_some_and(|Owner(id)| start_time(id.pid) == Some(id.start_time))
    }

    /// A working copy of the image's, for one restore. What is wrong with the image's is told.
    pub(super) fn copy_from(&self, image: &Path, job: &manifest::Job) -> Result<(), JobError> {
        let content = saved(image, job)?;
        self.write(&content).map_err(self.failed("cannot write the job file in"))
    }

    fn write(&self, content: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(self.file())?;
        file.write_all(content)?;
        make_usable(&file)
    }

    /// Removes everything.
    pub fn remove(&self) -> Result<(), JobError> {
        loop {
            match umount2(&self.path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
                // Another below it.
                Ok(()) => {}
                Err(Errno::EINVAL | Errno::ENOENT) => break,
                Err(error) => return Err(self.failed("cannot unmount")(error.into())),
            }
        }
        match fs::remove_dir(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.failed("cannot remove")(error))
            }
            _ => Ok(()),
        }
    }
}

/// Whoever the container's processes are, they write to it.
pub(super) fn make_usable(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    file.set_permissions(fs::Permissions::from_mode(0o666))
}

/// The job file in an image, if it is what the manifest says.
pub(super) fn saved(image: &Path, job: &manifest::Job) -> Result<Vec<u8>, JobError> {
    let path = image.join(JOB_FILE);
    let wrong = |source| JobError::File { action: "cannot use", path: path.clone(), source };
    let Some(file) = open_regular(&path).map_err(wrong)? else {
        return Err(wrong(io::Error::other("it is no regular file")));
    };
    let mut content = Vec::new();
    file.take(job.bytes + 1).read_to_end(&mut content).map_err(wrong)?;
    let length = content.len() as u64;
    if length != job.bytes {
        let more = if length > job.bytes { "more" } else { "fewer" };
        let reason = format!("it has {more} than the {} bytes of the manifest", job.bytes);
        return Err(wrong(io::Error::other(reason)));
    }
    if crate::cuda::digest(&content) != job.sha256 {
        return Err(wrong(io::Error::other("its content is not that of the manifest")));
    }
    Ok(content)
}

/// Removes what failed creates of this runtime root have left behind; gives of how many. What has a
/// journal is for a repair, which asks whether any of the container's processes runs.
pub fn sweep(state: &Path, runtime_root: &Path) -> usize {
    let mut swept = 0;
    if !runtime_root.is_dir() {
        return swept;
    }
    for id in JournalFile::jobs(state, runtime_root) {
        let journal = JournalFile::new(state, runtime_root, &id);
        let directory = JobDirectory::of(&journal);
        // Busy: somebody is about to make it.
        let Ok(_lock) = journal.lock(Duration::ZERO) else { continue };
        if journal.exists() || !directory.is_left_behind(&runtime_root.join(&id)) {
            continue;
        }
        match directory.remove() {
            Ok(()) => {
                journal.forget();
                swept += 1;
            }
            Err(error) => tracing::warn!(container = id, %error, "a job directory stays behind"),
        }
    }
    swept
}

impl JournalFile {
    /// The containers below a runtime root that have a job directory.
    fn jobs(state: &Path, runtime_root: &Path) -> Vec<String> {
        let directory = Self::new(state, runtime_root, "").directory().to_owned();
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| Some(name.strip_suffix(&format!(".{JOB}"))?.to_owned())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_belongs_to_who_is_about_to_make_the_container() {
        let host = tempfile::tempdir().unwrap();
        let directory = JobDirectory { path: host.path().join("c1.job") };
        let container = host.path().join("c1");
        assert!(!directory.is_anothers());
        fs::create_dir(&directory.path).unwrap();
        // Without an owner: of a process that was killed before it wrote its name.
        assert!(!directory.is_anothers() && directory.is_left_behind(&container));
        directory.write_owner().unwrap();
        assert!(directory.is_anothers() && !directory.is_left_behind(&container));
        let pid = nix::unistd::getpid().as_raw();
        let earlier = Owner(ProcessId { pid, start_time: 1 });
        fs::write(directory.path.join("owner"), serde_json::to_vec(&earlier).unwrap()).unwrap();
        assert!(!directory.is_anothers() && directory.is_left_behind(&container));
        fs::create_dir(&container).unwrap();
        assert!(!directory.is_left_behind(&container));
    }
}
