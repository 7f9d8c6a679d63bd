//! The job file that a container is given: a fresh one when it is created; and when it is restored,
//! before `runc restore`, a working copy of the image's, which is found again in its processes before
//! the driver is asked.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid};
use stasis_config::config;
use stasis_config::manifest::{self, JobFile};

use super::directory::saved;
use super::{DESTINATION, Found, JobDirectory, JobError, bundle, launch};
use crate::config_json::ConfigFile;
use crate::cuda::job::VARIABLE;
use crate::error::{Cause, chain};
use crate::restore::NewJob;

/// What the container in a bundle is given.
#[derive(Debug)]
pub struct Given<'a> {
    bundle: PathBuf,
    directory: JobDirectory,
    cuda: &'a config::Cuda,
    /// Whether the container is to be given a job file whatever the image says.
    annotated: bool,
    /// Whether this host gives job files.
    allowed: bool,
    /// config.json as it was.
    original: Option<ConfigFile>,
}

impl<'a> Given<'a> {
    /// `annotated`: the container carries the annotation.
    #[must_use]
    pub fn new(
        bundle: &Path,
        directory: JobDirectory,
        config: &'a stasis_config::Config,
        annotated: bool,
    ) -> Self {
        let allowed = config.annotations.allow.contains(&stasis_config::AnnotationName::Job);
        let bundle = bundle.to_owned();
        Self { bundle, directory, cuda: &config.cuda, annotated, allowed, original: None }
    }

    /// Gives the container a job file that nothing has used, and tells it so in config.json.
    pub fn give_fresh(&mut self) -> Result<(), JobError> {
        self.give(|own| launch::fresh(&own.directory, own.cuda))
    }

    fn give(
        &mut self,
        content: impl FnOnce(&Self) -> Result<(), JobError>,
    ) -> Result<(), JobError> {
        let (file, mut config) = ConfigFile::read(&self.bundle)?;
        // First, because it may be refused.
        bundle::attach(&mut config, &self.directory.file())?;
        let label = config["linux"]["mountLabel"].as_str();
        self.directory.make(label)?;
        let done = content(self).and_then(|()| Ok(self.original.insert(file).write(&config)?));
        done.inspect_err(|_| self.take_back())
    }

    /// Nothing of it is left.
    pub fn take_back(&mut self) {
        if let Some(file) = self.original.take()
            && let Err(error) = file.put_back()
        {
            tracing::error!(error = %chain(&error), "config.json stays as it was changed");
        }
        if let Err(error) = self.directory.remove() {
            tracing::error!(%error, "the job directory stays behind");
        }
    }

    /// Puts the image's copy where the container had its job file.
    fn place(&mut self, image: &Path, job: Option<&manifest::Job>) -> Result<(), JobError> {
        match job.map(|job| (job, &job.file)) {
            Some((job, JobFile::Made)) => {
                if !self.allowed {
                    return Err(JobError::Conflict(
                        "the image has a job file that Stasis made, and this host gives none: \
                         annotations.allow in config.toml does not list \"job\""
                            .to_owned(),
                    ));
                }
                self.give(|own| own.directory.copy_from(image, job))
            }
            Some((job, JobFile::Rootfs { path, mode, uid, gid })) => {
                let content = saved(image, job)?;
                let root = self.rootfs()?;
                let owner = (Uid::from_raw(*uid), Gid::from_raw(*gid));
                write_below(&root, path, &content, Mode::from_raw_mode(*mode), owner)?;
                self.give_if_annotated()
            }
            Some((_, JobFile::Dumped)) | None => self.give_if_annotated(),
        }
    }

    /// The mount is part of such a container, whether it has used it or not.
    fn give_if_annotated(&mut self) -> Result<(), JobError> {
        if self.annotated { self.give_fresh() } else { Ok(()) }
    }

    fn rootfs(&self) -> Result<PathBuf, JobError> {
        let (_, config) = ConfigFile::read(&self.bundle)?;
        // Others may have it, too; and who may not write to it gets nothing written by naming it.
        if config["root"]["readonly"] == true {
            return Err(JobError::Conflict(
                "the image has its job file in its root file system, and that of the new container is \
                 read-only"
                    .to_owned(),
            ));
        }
        let path = config["root"]["path"].as_str().unwrap_or("rootfs");
        Ok(self.bundle.join(path))
    }
}

impl NewJob for Given<'_> {
    fn place(&mut self, image: &Path, job: Option<&manifest::Job>) -> Result<(), Cause> {
        Ok(Self::place(self, image, job)?)
    }

    fn take_back(&mut self) {
        self.take_back();
    }

    fn check(&self, expected: &manifest::Job, found: Option<&Found>) -> Result<(), Cause> {
        let wrong = |reason: String| Err(JobError::NotTheImages(reason).into());
        let Some(found) = found else {
            return wrong(format!(
                "the image's processes are in a job, and the restored ones name no job file in {VARIABLE}"
            ));
        };
        if expected.file == JobFile::Made && self.directory.identity() != Some(found.job.file) {
            let (who, named) = (&found.who, &found.named.named);
            return wrong(format!(
                "{who}: its job file {named} is not the one that is mounted at {DESTINATION}"
            ));
        }
        Ok(())
    }
}

/// Writes a file below a directory that is somebody else's: no link is followed, no mount crossed.
/// At any moment there is the old file or the new one.
fn write_below(
    root: &Path,
    path: &str,
    content: &[u8],
    mode: Mode,
    (uid, gid): (Uid, Gid),
) -> Result<(), JobError> {
    let failed = |source: io::Error| JobError::File {
        action: "cannot write the job file below the root file system to",
        path: path.into(),
        source,
    };
    let below = path.trim_start_matches('/');
    let (parent, name) = below.rsplit_once('/').unwrap_or((".", below));
    let parent = if parent.is_empty() { "." } else { parent };
    let directory = open_directory(root, parent).map_err(|error| failed(error.into()))?;
    let temporary = format!(".stasis-{}", std::process::id());
    let _ = rustix::fs::unlinkat(&directory, &temporary, AtFlags::empty());
    let replaced = write_new(&directory, &temporary, content, mode, (uid, gid)).and_then(|()| {
        rustix::fs::renameat(&directory, &temporary, &directory, name).map_err(io::Error::from)
    });
    replaced.map_err(|error| {
        let _ = rustix::fs::unlinkat(&directory, &temporary, AtFlags::empty());
        failed(error)
    })
}

fn open_directory(root: &Path, parent: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty())?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(&root, parent, flags, Mode::empty(), resolve)
}

fn write_new(
    directory: &OwnedFd,
    name: &str,
    content: &[u8],
    mode: Mode,
    (uid, gid): (Uid, Gid),
) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(0o600))?;
    rustix::fs::fchown(file.as_fd(), Some(uid), Some(gid))?;
    rustix::fs::fchmod(file.as_fd(), mode)?;
    let mut file = File::from(file);
    file.write_all(content)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use stasis_config::manifest::JOB_FILE;

    use super::*;

    fn write(root: &Path, path: &str) -> Result<(), String> {
        let owner = (rustix::process::getuid(), rustix::process::getgid());
        let mode = Mode::from_raw_mode(0o640);
        write_below(root, path, b"new", mode, owner).map_err(|error| error.to_string())
    }

    #[test]
    fn the_copy_takes_the_place_of_the_file() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("var")).unwrap();
        for path in ["/var/job", "/job"] {
            let file = root.path().join(&path[1..]);
            fs::write(&file, "old").unwrap();
            write(root.path(), path).unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"new");
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        }
        assert_eq!(fs::read_dir(root.path().join("var")).unwrap().count(), 1);
    }

    #[test]
    fn an_image_cannot_lead_it_astray() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("job"), "theirs").unwrap();
        symlink(outside.path(), root.path().join("var")).unwrap();
        symlink(outside.path().join("job"), root.path().join("job")).unwrap();
        assert!(write(root.path(), "/var/job").unwrap_err().contains("/var/job"));
        // A link in its place is replaced, and not followed.
        write(root.path(), "/job").unwrap();
        assert_eq!(fs::read(outside.path().join("job")).unwrap(), b"theirs");
        assert_eq!(fs::read(root.path().join("job")).unwrap(), b"new");
        fs::create_dir(root.path().join("directory")).unwrap();
        for path in ["/none/job", "/directory", "/"] {
            assert!(write(root.path(), path).is_err(), "{path}");
        }
    }

    #[test]
    fn what_is_wrong_with_an_images_copy_is_told() {
        let image = tempfile::tempdir().unwrap();
        let at = image.path().join(JOB_FILE);
        let job = |bytes, content: &[u8]| manifest::Job {
            bytes,
            sha256: crate::cuda::digest(content),
            file: JobFile::Made,
        };
        let said = |job: &manifest::Job| match saved(image.path(), job).unwrap_err() {
            JobError::File { path, source, .. } => format!("{}: {source}", path.display()),
            other => panic!("{other}"),
        };
        assert!(said(&job(3, b"abc")).contains("No such file"));
        fs::write(&at, "abc").unwrap();
        assert_eq!(saved(image.path(), &job(3, b"abc")).unwrap(), b"abc");
        assert!(said(&job(4, b"abc")).contains("it has fewer than the 4 bytes"));
        assert!(said(&job(2, b"abc")).contains("it has more than the 2 bytes"));
        assert!(said(&job(3, b"abd")).contains("its content is not that"));
        fs::remove_file(&at).unwrap();
        nix::unistd::mkfifo(&at, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(said(&job(3, b"abc")).contains("no regular file"));
        fs::remove_file(&at).unwrap();
        symlink("/etc/passwd", &at).unwrap();
        assert!(saved(image.path(), &job(3, b"abc")).is_err());
    }
}
