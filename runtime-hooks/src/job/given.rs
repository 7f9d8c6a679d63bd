//! The job file that a container is given: a fresh one when it is created; and when it is restored,
//! before `runc restore`, a working copy of the image's, which is found again in its processes before
//! the driver is asked.

use std::fs;
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;
use stasis_config::config;
use stasis_config::manifest::{self, JobFile};

use super::directory::saved;
use super::rootfs::{Like, Written};
use super::{DESTINATION, Found, JobDirectory, JobError, bundle, launch};
use crate::config_json::ConfigFile;
use crate::error::{Cause, chain};
use crate::journal::JournalError;
use crate::processes::ProcessId;
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
    /// Whether the directory was made here.
    made: bool,
    /// config.json as it was.
    original: Option<ConfigFile>,
    /// What was written to the root file system.
    written: Option<Written>,
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
        Self {
            bundle,
            directory,
            cuda: &config.cuda,
            annotated,
            allowed,
            made: false,
            original: None,
            written: None,
        }
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
        if self.directory.is_anothers() {
            return Err(JournalError::Busy.into());
        }
        let label = config["linux"]["mountLabel"].as_str();
        self.directory.make(label)?;
        self.made = true;
        let done = content(self).and_then(|()| Ok(self.original.insert(file).write(&config)?));
        done.inspect_err(|_| self.take_back())
    }

    /// Nothing of what was given is left.
    pub fn take_back(&mut self) {
        if let Some(file) = self.original.take()
            && let Err(error) = file.put_back()
        {
            tracing::error!(error = %chain(&error), "config.json stays as it was changed");
        }
        if std::mem::take(&mut self.made)
            && let Err(error) = self.directory.remove()
        {
            tracing::error!(%error, "the job directory stays behind");
        }
        if let Some(written) = self.written.take()
            && let Err(error) = written.put_back()
        {
            tracing::error!(%error, "the job file stays in the root file system");
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
                let like = Like { mode: *mode, uid: *uid, gid: *gid };
                let root = self.rootfs(like)?;
                self.give_if_annotated()?;
                self.written = Some(Written::new(&root, path, &content, like)?);
                Ok(())
            }
            Some((_, JobFile::Dumped)) | None => self.give_if_annotated(),
        }
    }

    /// The mount is part of such a container, whether it has used it or not.
    fn give_if_annotated(&mut self) -> Result<(), JobError> {
        if self.annotated { self.give_fresh() } else { Ok(()) }
    }

    fn rootfs(&self, file: Like) -> Result<PathBuf, JobError> {
        let (_, config) = ConfigFile::read(&self.bundle)?;
        // Others may have it, too; and who may not write to it gets nothing written by naming it.
        if config["root"]["readonly"] == true {
            return Err(JobError::Conflict(
                "the image has its job file in its root file system, and that of the new container is \
                 read-only"
                    .to_owned(),
            ));
        }
        file.check_mapping(&config)?;
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

    fn check(
        &self,
        expected: &manifest::Job,
        found: &Found,
        init: ProcessId,
        spec: &Spec,
    ) -> Result<(), Cause> {
        let mountinfo = fs::read_to_string(format!("/proc/{}/mountinfo", init.pid));
        let mountinfo = mountinfo.map_err(|_| Cause::Gone)?;
        let origin = found.origin(self.directory.identity(), spec, &mountinfo)?;
        if origin == expected.file {
            return Ok(());
        }
        let (who, named) = (&found.who, &found.named.named);
        let reason = format!(
            "{who}: its job file {named} is not the one that was placed for the image: that is \
             {}, and this one is {}",
            place_of(&expected.file),
            place_of(&origin)
        );
        Err(JobError::NotTheImages(reason).into())
    }
}

/// Where it lies, for people.
fn place_of(file: &JobFile) -> String {
    match file {
        JobFile::Made => format!("mounted at {DESTINATION}"),
        JobFile::Dumped => "in memory of its own".to_owned(),
        JobFile::Rootfs { path, mode, uid, gid } => {
            let path = stasis_config::text::printable(path, 256);
            format!("{path} in the root file system (mode {mode:04o}, owner {uid}:{gid})")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use stasis_config::manifest::JOB_FILE;

    use super::*;
    use crate::cuda::job::{Identity, Job, Named, Way};
    use crate::error::Who;
    use crate::journal::JournalFile;
    use crate::processes::start_time;

    fn this() -> ProcessId {
        let pid = nix::unistd::getpid().as_raw();
        ProcessId { pid, start_time: start_time(pid).unwrap() }
    }

    /// A bundle, and a state directory beside it.
    fn host() -> (tempfile::TempDir, JobDirectory) {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("bundle/rootfs/var")).unwrap();
        let config = r#"{"root": {"path": "rootfs"}, "process": {}}"#;
        fs::write(host.path().join("bundle/config.json"), config).unwrap();
        let journal = JournalFile::new(&host.path().join("state"), host.path(), "c1");
        (host, JobDirectory::of(&journal))
    }

    fn in_rootfs(path: &str) -> JobFile {
        let uid = rustix::process::getuid().as_raw();
        let gid = rustix::process::getgid().as_raw();
        JobFile::Rootfs { path: path.into(), mode: 0o600, uid, gid }
    }

    fn job(file: JobFile) -> manifest::Job {
        manifest::Job { bytes: 3, sha256: crate::cuda::digest(b"abc"), file }
    }

    #[test]
    fn what_was_placed_is_taken_back_and_nothing_else() {
        let (host, directory) = host();
        let config = stasis_config::Config::default();
        let image = tempfile::tempdir().unwrap();
        fs::write(image.path().join(JOB_FILE), "abc").unwrap();
        let bundle = host.path().join("bundle");
        let at = bundle.join("rootfs/var/job");
        let mut given = Given::new(&bundle, directory.clone(), &config, false);
        given.place(image.path(), Some(&job(in_rootfs("/var/job")))).unwrap();
        assert_eq!(fs::read(&at).unwrap(), b"abc");
        given.take_back();
        assert!(!at.exists());
        // The directory of a container that another process is about to make.
        let lock = JournalFile::new(&host.path().join("state"), host.path(), "c1");
        drop(lock.lock(std::time::Duration::ZERO).unwrap());
        fs::create_dir(lock.job()).unwrap();
        assert!(given.place(image.path(), Some(&job(in_rootfs("/none/job")))).is_err());
        given.take_back();
        assert!(directory.exists(), "it was not made here");
    }

    #[test]
    fn a_read_only_root_file_system_is_not_written_to() {
        let (host, directory) = host();
        let bundle = host.path().join("bundle");
        let text = r#"{"root": {"path": "rootfs", "readonly": true}}"#;
        fs::write(bundle.join("config.json"), text).unwrap();
        let image = tempfile::tempdir().unwrap();
        fs::write(image.path().join(JOB_FILE), "abc").unwrap();
        let config = stasis_config::Config::default();
        let mut given = Given::new(&bundle, directory, &config, false);
        let placed = given.place(image.path(), Some(&job(in_rootfs("/var/job"))));
        assert!(placed.unwrap_err().to_string().contains("is read-only"));
    }

    #[test]
    fn a_restored_process_names_the_file_that_was_placed() {
        let (host, directory) = host();
        let config = stasis_config::Config::default();
        let given = Given::new(&host.path().join("bundle"), directory, &config, false);
        let spec: Spec =
            serde_json::from_str(r#"{"ociVersion":"1.0.2","root":{"path":"rootfs"}}"#).unwrap();
        let found = |path: Option<&str>| {
            let file = Identity { device: 1, inode: 2 };
            let way = Way::Host("/x".into());
            let JobFile::Rootfs { mode, uid, gid, .. } = in_rootfs("") else { unreachable!() };
            let named = path.unwrap_or("/proc/self/fd/3").to_owned();
            let path = path.map(str::to_owned);
            let named = Named { named, file, way: way.clone(), path, mode, uid, gid };
            Found {
                job: Job { file, ways: vec![way] },
                named,
                who: Who { pid: 7, command: "app".into() },
                outside_image: None,
            }
        };
        let check = |expected: JobFile, path: Option<&str>| {
            let checked = given.check(&job(expected), &found(path), this(), &spec);
            checked.map_err(|error| error.to_string())
        };
        // A path that no mount but the root covers, wherever this runs.
        let own = "/no-mount-is-called-like-this/job";
        check(JobFile::Dumped, None).unwrap();
        check(in_rootfs(own), Some(own)).unwrap();
        for (expected, path) in [
            (JobFile::Made, None),
            (JobFile::Made, Some(own)),
            (JobFile::Dumped, Some(own)),
            (in_rootfs(own), None),
            (in_rootfs("/other"), Some(own)),
        ] {
            let said = check(expected, path).unwrap_err();
            assert!(said.starts_with("pid 7 (app): its job file "), "{said}");
            assert!(said.contains("is not the one that was placed"), "{said}");
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
        if crate::files::make_device(&at) {
            // And is not opened.
            assert!(said(&job(3, b"abc")).contains("no regular file"));
            fs::remove_file(&at).unwrap();
        }
        symlink("/etc/passwd", &at).unwrap();
        assert!(said(&job(3, b"abc")).contains("no regular file"));
    }
}
