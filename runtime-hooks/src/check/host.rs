//! What a check may see of the host.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{AccessFlags, Pid, Uid, faccessat};

/// What is read of a file or of the output of a command at most, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The host, as far as the checks look at it. Paths are absolute.
pub trait Host {
    /// The beginning of a file, up to 1 MiB; what is not UTF-8 is replaced.
    fn read(&self, path: &Path) -> io::Result<String>;

    /// The names in a directory, sorted.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Where a program is: a name is looked up in `PATH`, a path is taken as it is.
    fn find(&self, program: &Path) -> Option<PathBuf>;

    /// Runs a program that [`Self::find`] found. It is killed after `limit`, which gives
    /// [`io::ErrorKind::TimedOut`].
    fn run(&self, program: &Path, arguments: &[&str], limit: Duration) -> io::Result<Output>;

    /// Can files be made in this directory? If it does not exist yet, can it be made?
    fn writable(&self, directory: &Path) -> Result<(), String>;

    /// The effective user id.
    fn uid(&self) -> u32;

    /// The kernel's release, such as `6.18.44`.
    fn kernel(&self) -> String;

    /// The architecture of the CPU, as Rust names it.
    fn arch(&self) -> &'static str;
}

/// What a command printed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// Its exit status; `None` if a signal ended it.
    pub status: Option<i32>,
    /// Up to 1 MiB; what is not UTF-8 is replaced.
    pub stdout: String,
    /// As stdout.
    pub stderr: String,
}

impl Output {
    /// It ended with 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.status == Some(0)
    }

    /// Both outputs, line by line.
    #[must_use]
    pub fn lines(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.stdout.lines().chain(self.stderr.lines())
    }
}

/// This host.
#[derive(Debug)]
pub struct System {
    root: PathBuf,
    search: Vec<PathBuf>,
}

impl System {
    /// This host, with the `PATH` of this process.
    #[must_use]
    pub fn new() -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let search = std::env::split_paths(&path).filter(|dir| dir.is_absolute()).collect();
        Self { root: "/".into(), search }
    }

    /// The files below `root`, with programs in the directories `search` below it.
    #[cfg(test)]
    pub(super) fn at(root: &Path, search: &[&str]) -> Self {
        Self { root: root.into(), search: search.iter().map(PathBuf::from).collect() }
    }

    fn below(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

impl Default for System {
    fn default() -> Self {
        Self::new()
    }
}

impl Host for System {
    fn read(&self, path: &Path) -> io::Result<String> {
        beginning(File::open(self.below(path))?)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut names = fs::read_dir(self.below(path))?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    }

    fn find(&self, program: &Path) -> Option<PathBuf> {
        let runs = |path: &PathBuf| {
            fs::metadata(self.below(path))
                .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
        };
        if program.is_absolute() {
            return Some(program.to_owned()).filter(runs);
        }
        self.search.iter().map(|dir| dir.join(program)).find(runs)
    }

    fn run(&self, program: &Path, arguments: &[&str], limit: Duration) -> io::Result<Output> {
        // Files in memory and not pipes: a child of the program that outlives it would keep a
        // pipe open, and nobody has to read while it writes.
        let file = || memfd_create("output", MFdFlags::MFD_CLOEXEC).map(File::from);
        let (mut stdout, mut stderr) = (file()?, file()?);
        let mut child = Command::new(self.below(program))
            .args(arguments)
            // Parsed, so not to be translated.
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?)
            .process_group(0)
            .spawn()?;
        let status = wait(&mut child, limit)?;
        stdout.rewind()?;
        stderr.rewind()?;
        Ok(Output { status, stdout: beginning(stdout)?, stderr: beginning(stderr)? })
    }

    fn writable(&self, directory: &Path) -> Result<(), String> {
        for dir in directory.ancestors() {
            let found = match fs::metadata(self.below(dir)) {
                Ok(found) => found,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(format!("{}: {error}", dir.display())),
            };
            if !found.is_dir() {
                return Err(format!("{} is not a directory", dir.display()));
            }
            let access = AccessFlags::W_OK | AccessFlags::X_OK;
            return faccessat(AT_FDCWD, &self.below(dir), access, AtFlags::AT_EACCESS)
                .map_err(|error| format!("{}: {}", dir.display(), error.desc()));
        }
        Err("there is no root directory".to_owned())
    }

    fn uid(&self) -> u32 {
        Uid::effective().as_raw()
    }

    fn kernel(&self) -> String {
        self.read(Path::new("/proc/sys/kernel/osrelease"))
            .map(|release| release.trim().to_owned())
            .unwrap_or_default()
    }

    fn arch(&self) -> &'static str {
        std::env::consts::ARCH
    }
}

fn beginning(file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Waits for the exit status; kills the child and its process group when the time is up.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<i32>> {
    const PAUSE: Duration = Duration::from_millis(5);
    /// A process that the kernel does not let go of is left behind.
    const GRACE: Duration = Duration::from_secs(2);

    let deadline = Instant::now() + limit;
    let mut killed = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return if killed { Err(io::ErrorKind::TimedOut.into()) } else { Ok(status.code()) };
        }
        let now = Instant::now();
        if now >= deadline + GRACE {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if now >= deadline && !killed {
            // The pid is still the child's, because nobody has waited for it yet.
            if let Ok(group) = i32::try_from(child.id()) {
                let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
            }
            killed = true;
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> io::Result<Output> {
        System::at(Path::new("/"), &[]).run(Path::new("/bin/sh"), &["-c", script], limit)
    }

    #[test]
    fn a_command_gives_both_outputs_and_its_status() {
        let output = shell("echo out; echo err >&2; exit 3", Duration::from_secs(30)).unwrap();
        let want = Output { status: Some(3), stdout: "out\n".into(), stderr: "err\n".into() };
        assert_eq!(output, want);
        assert_eq!(output.lines().collect::<Vec<_>>(), ["out", "err"]);
        let output = shell("kill -9 $$", Duration::from_secs(30)).unwrap();
        assert_eq!(output.status, None);
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_its_children() {
        let start = Instant::now();
        let error = shell("sleep 60 & sleep 60", Duration::from_millis(100)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_child_that_outlives_the_command_is_not_waited_for() {
        let start = Instant::now();
        let output = shell("sleep 25 & echo done", Duration::from_secs(60)).unwrap();
        assert_eq!(output.stdout, "done\n");
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn programs_are_looked_up() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("usr/bin");
        fs::create_dir_all(bin.join("directory")).unwrap();
        for (name, mode) in [("program", 0o755), ("text", 0o644)] {
            fs::write(bin.join(name), "").unwrap();
            fs::set_permissions(bin.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let system = System::at(dir.path(), &["/bin", "/usr/bin"]);
        let find = |name: &str| system.find(Path::new(name));
        assert_eq!(find("program"), Some("/usr/bin/program".into()));
        assert_eq!(find("/usr/bin/program"), Some("/usr/bin/program".into()));
        for name in ["text", "directory", "none", "/usr/bin/text", "/program"] {
            assert_eq!(find(name), None, "{name}");
        }
    }

    #[test]
    fn a_directory_that_can_be_made_is_writable() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let system = System::at(dir.path(), &[]);
        assert_eq!(system.writable(Path::new("/")), Ok(()));
        assert_eq!(system.writable(Path::new("/a/b/c")), Ok(()));
        assert_eq!(system.writable(Path::new("/file")), Err("/file is not a directory".to_owned()));
        assert!(system.writable(Path::new("/file/below")).is_err());
    }
}
