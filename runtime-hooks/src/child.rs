//! Helper processes: this executable again, spoken to over pipes, a JSON object a line, and
//! killed when it does not answer in time.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::sys;
pub use crate::sys::{die_with_parent_thread, exit_now, send_signal};

/// How much of a helper's last words goes into an error, in bytes.
const LAST_WORDS: usize = 2000;

/// Which executable is started as helper.
#[derive(Debug, Clone)]
pub struct Program(PathBuf);

impl Program {
    /// This very executable, so that both sides are of the same version. It also works after the
    /// file was replaced by an upgrade.
    #[must_use]
    pub fn this() -> Self {
        Self("/proc/self/exe".into())
    }

    /// Another one, for tests.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

/// In the helper: end when the thread that started it ends.
pub fn die_with_parent() -> io::Result<()> {
    let parent: Option<i32> = std::env::args().nth(2).and_then(|pid| pid.parse().ok());
    nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
    if parent == Some(nix::unistd::getppid().as_raw()) {
        Ok(())
    } else {
        Err(io::Error::other("started by hand, or the parent has ended"))
    }
}

/// Why no answer came.
#[derive(Debug)]
pub enum Lost {
    /// The deadline passed.
    Deadline,
    /// The process ended, or said something that is no answer: its status and last words.
    Ended(String),
}

/// A running helper. Dropping it kills it.
#[derive(Debug)]
pub struct Helper {
    process: Child,
    received: Vec<u8>,
    errors: File,
    /// It was told to end by itself.
    left: bool,
}

impl Helper {
    /// Starts `program subcommand`. It inherits no descriptors and no variable that would change
    /// what the driver sees: a caller's GPU list is not the container's.
    pub fn start(program: &Program, subcommand: &str) -> io::Result<Self> {
        let errors: File = memfd_create(c"helper-stderr", MFdFlags::MFD_CLOEXEC)?.into();
        let mut command = Command::new(program.path());
        command
            .arg(subcommand)
            .arg(std::process::id().to_string())
            .env_remove("LD_PRELOAD")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove(crate::cuda::job::VARIABLE)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone()?)
            // Ctrl-C is for the caller, who then rolls back with the helper's help.
            .process_group(0);
        sys::close_other_descriptors(&mut command);
        let process = command.spawn()?;
        Ok(Self { process, received: Vec::new(), errors, left: false })
    }

    /// The helper's pid.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends a request. A helper that has ended is noticed by the next [`Self::receive`].
    pub fn send(&mut self, request: &impl Serialize) -> Result<(), Lost> {
        let mut line = serde_json::to_vec(request)
            .map_err(|error| Lost::Ended(format!("request not sent: {error}")))?;
        line.push(b'\n');
        let sent = self.process.stdin.as_mut().map(|input| input.write_all(&line));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(Lost::Ended(self.end())),
        }
    }

    /// Waits for the next answer until `deadline`.
    pub fn receive<T: DeserializeOwned>(&mut self, deadline: Instant) -> Result<T, Lost> {
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|error| {
                    let ending = self.end();
                    Lost::Ended(format!("answer not understood: {error}; {ending}"))
                });
            }
            if !self.wait_readable(deadline)? {
                return Err(Lost::Deadline);
            }
            let mut buffer = [0; 4096];
            let read = match self.process.stdout.as_mut() {
                Some(output) => output.read(&mut buffer),
                None => Ok(0),
            };
            match read {
                Ok(0) => return Err(Lost::Ended(self.end())),
                Ok(length) => self.received.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Lost::Ended(error.to_string())),
            }
        }
    }

    fn wait_readable(&mut self, deadline: Instant) -> Result<bool, Lost> {
        let Some(output) = self.process.stdout.as_ref() else {
            return Ok(true);
        };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up, so that the last part of a millisecond is not spent spinning.
            let left =
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut descriptors = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
            match poll(&mut descriptors, left) {
                Ok(0) if Instant::now() >= deadline => return Ok(false),
                Ok(0) | Err(nix::errno::Errno::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(Lost::Ended(error.to_string())),
            }
        }
    }

    /// Closes the pipe; the helper ends by itself.
    pub fn leave(mut self) {
        drop(self.process.stdin.take());
        self.left = true;
    }

    /// Kills the helper and returns how it ended: its status, if it had ended by itself, and what
    /// it wrote on standard error.
    fn end(&mut self) -> String {
        // A helper that has just closed its output is given the time to become a zombie.
        let mut status = None;
        for _ in 0..20 {
            status = self.process.try_wait().ok().flatten();
            if status.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill();
        let status = status.map_or_else(|| "killed".to_owned(), |status| status.to_string());
        let mut words = Vec::new();
        let read = self
            .errors
            .seek(SeekFrom::Start(0))
            .and_then(|_| (&self.errors).take(LAST_WORDS as u64).read_to_end(&mut words));
        match read {
            Ok(length) if length > 0 => {
                let words = String::from_utf8_lossy(&words);
                format!("{status}: {}", words.split_whitespace().collect::<Vec<_>>().join(" "))
            }
            _ => status,
        }
    }

    fn kill(&mut self) {
        // Both fail only if it is gone already. A helper stuck in the kernel would make the wait
        // hang; it is left to init then.
        let _ = self.process.kill();
        for _ in 0..200 {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // Its GPU context is taken apart; init, or the shim, reaps it.
        tracing::debug!(pid = self.process.id(), "a killed helper takes its time to end");
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        if !self.left {
            self.kill();
        }
    }
}

/// A shell script in a directory, for tests to execute.
///
/// Another process writes it: a test beside this may fork while it is open for writing, and it could
/// not be executed until that child has executed something else (ETXTBSY).
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "for tests")]
pub(crate) fn script(directory: &Path, text: &str) -> PathBuf {
    let path = directory.join("script");
    let mut writer = Command::new("sh")
        .args(["-c", "cat >\"$0\" && chmod 755 \"$0\""])
        .arg(&path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let text = format!("#!/bin/sh\n{text}\n");
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A helper that is this script.
    fn helper(text: &str) -> (tempfile::TempDir, Helper) {
        let directory = tempfile::tempdir().unwrap();
        let path = script(directory.path(), text);
        let helper = Helper::start(&Program::at(path), "__driver").unwrap();
        (directory, helper)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(200)
    }

    #[test]
    fn one_that_does_not_answer_is_given_up_and_killed() {
        let (_directory, mut helper) = helper("exec sleep 1000");
        let pid = i32::try_from(helper.id()).unwrap();
        let begun = Instant::now();
        assert!(matches!(helper.receive::<String>(soon()), Err(Lost::Deadline)));
        assert!(begun.elapsed() < Duration::from_secs(30));
        drop(helper);
        assert_eq!(crate::processes::start_time(pid), None);
    }

    #[test]
    fn one_that_ends_leaves_its_last_words() {
        let (_directory, mut helper) = helper("echo no such driver >&2; exit 3");
        let far = Instant::now() + Duration::from_secs(30);
        match helper.receive::<String>(far) {
            Err(Lost::Ended(how)) => assert_eq!(how, "exit status: 3: no such driver"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn its_answers_come_line_by_line_and_nonsense_is_an_end() {
        let (_directory, mut helper) =
            helper("printf '\"a\"\\n\"b'; sleep 0.1; echo '\"'; echo what");
        let far = Instant::now() + Duration::from_secs(30);
        assert_eq!(helper.receive::<String>(far).unwrap(), "a");
        assert_eq!(helper.receive::<String>(far).unwrap(), "b");
        assert!(matches!(helper.receive::<String>(far), Err(Lost::Ended(_))));
    }

    #[test]
    fn it_inherits_neither_descriptors_nor_the_callers_gpus() {
        let file = tempfile::tempfile().unwrap();
        let inherited = nix::unistd::dup(&file).unwrap();
        let script =
            "echo \"\\\"$(ls /proc/self/fd | tr '\\n' ' ')${CUDA_VISIBLE_DEVICES-none}\\\"\"";
        let (_directory, mut helper) = helper(script);
        let far = Instant::now() + Duration::from_secs(30);
        let seen = helper.receive::<String>(far).unwrap();
        drop(inherited);
        // 3 is ls's own.
        assert_eq!(seen, "0 1 2 3 none");
    }
}
