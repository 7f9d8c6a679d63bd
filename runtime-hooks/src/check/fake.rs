//! A host made of files in a temporary directory and outputs of commands.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Finding, Host, Output, System};

pub(super) struct Fake {
    pub(super) uid: u32,
    pub(super) kernel: String,
    pub(super) arch: &'static str,
    pub(super) files: tempfile::TempDir,
    /// By name of the program and arguments.
    pub(super) commands: HashMap<String, Result<Output, io::ErrorKind>>,
}

/// Level and message, for comparisons.
pub(super) fn said(finding: &Finding) -> String {
    format!("{} {}", finding.level.as_str(), finding.message)
}

impl Fake {
    /// A host on which nothing is installed.
    pub(super) fn empty() -> Self {
        Self {
            uid: 0,
            kernel: "6.18.44".into(),
            arch: "x86_64",
            files: tempfile::tempdir().unwrap(),
            commands: HashMap::new(),
        }
    }

    /// A host on which everything is as it should be. The outputs were captured on Debian 13.
    pub(super) fn good() -> Self {
        let fake = Self::empty()
            .command("criu --version", 0, "Version: 4.2.1\n", "")
            .command("criu check", 0, "Looks good.\n", "")
            .command("runc --version", 0, super::tools::tests::RUNC, "")
            .command("tar --version", 0, "tar (GNU tar) 1.35\nCopyright (C) 2023\n", "")
            .program("iptables-restore");
        for name in ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"] {
            fake.file(&format!("/proc/self/ns/{name}"), "");
        }
        fake.file("/proc/sys/kernel/ns_last_pid", "1\n");
        fake.file(
            "/proc/self/mountinfo",
            "35 24 0:30 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n",
        );
        fake.file("/sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
        fake.file("/etc/cdi/nvidia.yaml", "");
        fake
    }

    fn place(&self, path: &str) -> PathBuf {
        self.files.path().join(path.strip_prefix('/').unwrap())
    }

    pub(super) fn file(&self, path: &str, text: &str) {
        let place = self.place(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, text).unwrap();
    }

    pub(super) fn remove(&self, path: &str) {
        fs::remove_file(self.place(path)).unwrap();
    }

    /// A program in `/usr/bin` that is only looked for.
    pub(super) fn program(self, name: &str) -> Self {
        let path = format!("/usr/bin/{name}");
        self.file(&path, "");
        fs::set_permissions(self.place(&path), fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// A program in `/usr/bin` that prints this when it is called like that.
    pub(super) fn command(self, line: &str, status: i32, stdout: &str, stderr: &str) -> Self {
        let output = Output { status: Some(status), stdout: stdout.into(), stderr: stderr.into() };
        self.answer(line, Ok(output))
    }

    pub(super) fn answer(mut self, line: &str, answer: Result<Output, io::ErrorKind>) -> Self {
        self.commands.insert(line.to_owned(), answer);
        let name = line.split(' ').next().unwrap();
        self.program(name)
    }

    fn system(&self) -> System {
        System::at(self.files.path(), &["/usr/bin"])
    }
}

impl Host for Fake {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.system().read(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.system().list(path)
    }

    fn find(&self, program: &Path) -> Option<PathBuf> {
        self.system().find(program)
    }

    fn run(&self, program: &Path, arguments: &[&str], _: Duration) -> io::Result<Output> {
        assert!(program.is_absolute(), "{}", program.display());
        let name = program.file_name().unwrap().to_str().unwrap();
        let line = [&[name], arguments].concat().join(" ");
        match self.commands.get(&line) {
            Some(answer) => answer.clone().map_err(io::Error::from),
            None => panic!("nothing is known about `{line}`"),
        }
    }

    fn writable(&self, directory: &Path) -> Result<(), String> {
        self.system().writable(directory)
    }

    fn uid(&self) -> u32 {
        self.uid
    }

    fn kernel(&self) -> String {
        self.kernel.clone()
    }

    fn arch(&self) -> &'static str {
        self.arch
    }
}
