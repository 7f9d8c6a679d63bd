//! NVIDIA's command `cuda-checkpoint`, as it is started: for a call to the driver, and to make a job
//! file.
//!
//! It is a thin cover of libcuda, which it looks for by itself; so it may hang as a call may.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::unistd;

use super::job::VARIABLE;
use crate::sys;

/// How much is read of what it says, in bytes. Its usage has about 1600.
const OUTPUT: u64 = 16 << 10;
/// Between two looks whether it has ended. It takes 17 ms at least, with one GPU (measured).
const POLL: Duration = Duration::from_millis(2);

/// The command.
#[derive(Debug, Clone)]
pub(crate) struct Utility {
    program: PathBuf,
    /// Where the libcuda is that it is to use, if that is known.
    libraries: Option<PathBuf>,
    /// The live file of the job that it is to be in.
    job: Option<String>,
}

/// What it said.
#[derive(Debug)]
pub(crate) struct Said {
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// On standard output.
    pub(crate) output: String,
    /// On standard error, where there may also be noise of the dynamic loader.
    pub(crate) errors: String,
}

/// Why it said nothing.
#[derive(Debug)]
pub(crate) enum Silent {
    /// Its time was up, and it was killed.
    Late,
    /// It could not be started, or was lost.
    NotRun(String),
}

impl Utility {
    /// `libcuda` is the library in use.
    pub(crate) fn new(program: &Path, libcuda: Option<&Path>) -> Self {
        let directory = libcuda.and_then(Path::parent).filter(|directory| directory.is_absolute());
        Self { program: program.to_owned(), libraries: directory.map(Path::to_owned), job: None }
    }

    /// In a job: `file` is a name of its live file that other processes can use.
    pub(crate) fn in_job(self, file: Option<String>) -> Self {
        Self { job: file, ..self }
    }

    /// Which program it is.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Runs it until `deadline`. It sees neither what a caller may have in its environment, whose
    /// GPUs are not the container's, nor any descriptor. It dies with the thread that runs it.
    pub(crate) fn run<'a>(
        &self,
        arguments: impl IntoIterator<Item = &'a Path>,
        deadline: Instant,
    ) -> Result<Said, Silent> {
        let (output, errors) = (capture()?, capture()?);
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env_remove("LD_PRELOAD")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove(VARIABLE)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(errors.try_clone()?)
            .process_group(0);
        if let Some(directory) = &self.libraries {
            command.env("LD_LIBRARY_PATH", directory);
        }
        if let Some(file) = &self.job {
            command.env(VARIABLE, file);
        }
        sys::close_other_descriptors(&mut command);
        sys::die_with_parent_thread(&mut command, Signal::SIGKILL);
        let mut child = command.spawn().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Silent::NotRun(
                "is not there; it comes with the driver, or set cuda.utility in config.toml".into(),
            ),
            _ => Silent::NotRun(format!("cannot be started: {error}")),
        })?;
        let status = wait(&mut child, deadline)?;
        Ok(Said { status, output: text(output)?, errors: text(errors)? })
    }
}

fn wait(child: &mut Child, deadline: Instant) -> Result<ExitStatus, Silent> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL),
            Ok(None) => {
                // Not yet waited for, so the group is still its own.
                if let Ok(group) = i32::try_from(child.id()) {
                    let _ = killpg(unistd::Pid::from_raw(group), Signal::SIGKILL);
                }
                let _ = child.wait();
                return Err(Silent::Late);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn capture() -> io::Result<File> {
    Ok(memfd_create(c"utility-output", MFdFlags::MFD_CLOEXEC)?.into())
}

fn text(mut file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(OUTPUT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl From<io::Error> for Silent {
    fn from(error: io::Error) -> Self {
        Self::NotRun(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, limit: Duration) -> (tempfile::TempDir, Result<Said, Silent>) {
        let directory = tempfile::tempdir().unwrap();
        let program = crate::child::script(directory.path(), script);
        let utility = Utility::new(&program, Some(Path::new("/lib/libcuda.so.1")));
        let utility = utility.in_job(Some("/proc/1/fd/9".into()));
        let arguments = ["--toggle", "--pid", "7"].map(Path::new);
        let said = utility.run(arguments, Instant::now() + limit);
        (directory, said)
    }

    #[test]
    fn what_it_says_is_kept_apart() {
        let script = "echo \"$@\"; echo \"$LD_LIBRARY_PATH $CUDA_CHECKPOINT_JOB_FILE\" >&2; exit 3";
        let (_directory, said) = run(script, Duration::from_secs(20));
        let said = said.unwrap();
        assert_eq!(said.status.code(), Some(3));
        assert_eq!(said.output, "--toggle --pid 7\n");
        assert_eq!(said.errors, "/lib /proc/1/fd/9\n");
    }

    #[test]
    fn the_loaders_own_directories_are_left_to_the_loader() {
        assert_eq!(Utility::new(Path::new("a"), Some(Path::new("libcuda.so.1"))).libraries, None);
        assert_eq!(Utility::new(Path::new("a"), None).libraries, None);
    }

    #[test]
    fn one_that_is_late_is_killed_with_what_it_started() {
        let directory = tempfile::tempdir().unwrap();
        let script = "sleep 1000 & echo $! >\"$(dirname \"$0\")/pid\"; wait";
        let program = crate::child::script(directory.path(), script);
        let deadline = Instant::now() + Duration::from_millis(500);
        let said = Utility::new(&program, None).run([], deadline);
        assert!(matches!(said, Err(Silent::Late)), "{said:?}");
        let pid = std::fs::read_to_string(directory.path().join("pid")).unwrap();
        let pid = pid.trim().parse().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while crate::processes::start_time(pid).is_some() {
            assert!(Instant::now() < until, "what it started lives on");
            std::thread::sleep(POLL);
        }
    }

    #[test]
    fn one_that_is_not_there_says_where_it_comes_from() {
        let deadline = Instant::now() + Duration::from_secs(20);
        match Utility::new(Path::new("/no/such"), None).run([], deadline) {
            Err(Silent::NotRun(why)) => assert!(why.contains("cuda.utility"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}
