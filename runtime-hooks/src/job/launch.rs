//! Having NVIDIA's utility make a job file.
//!
//! Only it knows how: `cuda-checkpoint --launch-job PROGRAM` makes a memory file, prepares it, and
//! becomes PROGRAM with the file's name in the environment. PROGRAM is this executable again, which
//! copies the file to where the container gets it from.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use stasis_config::config;
use stasis_config::manifest::MAX_JOB_BYTES;
use stasis_config::text::printable;

use super::directory::make_usable;
use super::{JobDirectory, JobError};
use crate::cuda::job::VARIABLE;
use crate::cuda::utility::{Silent, Utility};

/// First argument that makes this executable the copier; the second is the file to make.
pub const SUBCOMMAND: &str = "__job-file";

/// How much of what the utility says goes into an error, in characters.
const OUTPUT: usize = 1024;

/// In the program that the utility becomes: copies.
#[must_use]
pub fn copy() -> ExitCode {
    match copy_named() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn copy_named() -> io::Result<()> {
    let target = std::env::args_os().nth(2).map(PathBuf::from);
    let target = target.ok_or_else(|| io::Error::other("started by hand"))?;
    let named = std::env::var_os(VARIABLE);
    let named = named.ok_or_else(|| io::Error::other(format!("{VARIABLE} is not set")))?;
    let mut content = Vec::new();
    File::open(named)?.take(MAX_JOB_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_JOB_BYTES {
        let reason = format!("the job file has more than {MAX_JOB_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(target)?;
    file.write_all(&content)?;
    make_usable(&file)
}

/// Makes a fresh job file in `directory`, within the time that the driver has to start.
pub(super) fn fresh(directory: &JobDirectory, cuda: &config::Cuda) -> Result<(), JobError> {
    let target = directory.file();
    run(cuda, &target)?;
    if target.is_file() {
        return Ok(());
    }
    Err(failed(cuda, "made no job file although it says it succeeded"))
}

fn run(cuda: &config::Cuda, target: &Path) -> Result<(), JobError> {
    let utility = Utility::new(&cuda.utility, cuda.libcuda.as_deref());
    // Not by its name, which an upgrade may have taken; and not as `self`, which is the utility.
    let own = format!("/proc/{}/exe", std::process::id());
    let arguments = [Path::new("--launch-job"), Path::new(&own), Path::new(SUBCOMMAND), target];
    let limit = cuda.init_timeout;
    let said = utility.run(arguments, Instant::now() + limit).map_err(|silent| match silent {
        Silent::Late => failed(cuda, &format!("did not end within {limit:?} and was killed")),
        Silent::NotRun(why) => failed(cuda, &why),
    })?;
    if said.status.success() {
        return Ok(());
    }
    let words = [said.output, said.errors].join(" ");
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    Err(failed(cuda, &format!("{}: {}", said.status, printable(&words, OUTPUT))))
}

fn failed(cuda: &config::Cuda, reason: &str) -> JobError {
    JobError::Utility(format!("{} --launch-job: {reason}", cuda.utility.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A utility that is this script.
    fn utility(text: &str) -> (tempfile::TempDir, config::Cuda) {
        let directory = tempfile::tempdir().unwrap();
        let utility = crate::child::script(directory.path(), text);
        let init_timeout = Duration::from_secs(20);
        (directory, config::Cuda { utility, init_timeout, ..config::Cuda::default() })
    }

    fn error(script: &str) -> String {
        let (directory, cuda) = utility(script);
        run(&cuda, &directory.path().join("job")).unwrap_err().to_string()
    }

    #[test]
    fn it_is_told_what_to_become() {
        let (directory, cuda) = utility("echo \"$@\" >\"$(dirname \"$0\")/said\"");
        run(&cuda, Path::new("/target")).unwrap();
        let said = std::fs::read_to_string(directory.path().join("said")).unwrap();
        let pid = std::process::id();
        assert_eq!(said, format!("--launch-job /proc/{pid}/exe __job-file /target\n"));
    }

    #[test]
    fn its_failures_are_told_in_its_words() {
        let said = error("echo no such driver; echo 'option?' >&2; exit 3");
        assert!(said.ends_with("--launch-job: exit status: 3: no such driver option?"), "{said}");
        let cuda = config::Cuda { utility: "/no/such".into(), ..config::Cuda::default() };
        let said = run(&cuda, Path::new("/t")).unwrap_err().to_string();
        assert!(said.starts_with("/no/such --launch-job: is not there"), "{said}");
        assert!(said.contains("cuda.utility"), "{said}");
    }

    #[test]
    fn one_that_hangs_is_killed() {
        let (_directory, mut cuda) = utility("exec sleep 1000");
        cuda.init_timeout = Duration::from_millis(50);
        let said = run(&cuda, Path::new("/t")).unwrap_err().to_string();
        assert!(said.ends_with("did not end within 50ms and was killed"), "{said}");
    }
}
