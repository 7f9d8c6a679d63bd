//! Odd and hostile argument lists reach the runtime as they were given, byte for byte.
//!
//! In this process and with a runtime that is only noted, so that thousands of lists take a
//! second; `tests/arguments.rs` does the same with fewer and a real `execve`.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use stasis_config::Config;

use super::run;
use crate::container::mounted;
use crate::processes::start_time;
use crate::runc::args::CommandLine;

const CASES: usize = 4000;
const SEEDS: [u64; 3] = [1, 0xdead_beef, 0x5717_a515];

/// Longest argument that Linux takes: 128 KiB with its end.
const LONGEST: usize = (128 << 10) - 1;

/// xorshift64*: the same list for the same seed, for ever.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap() % limit
    }

    fn one_of<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.below(list.len())]
    }

    /// Bytes as nobody would type them, but for a slash: what is taken for an image or a bundle
    /// stays below the working directory.
    fn bytes(&mut self) -> OsString {
        let length = 1 + self.below(12);
        let byte = |random: &mut Self| match u8::try_from(1 + random.below(255)).unwrap() {
            b'/' => b'-',
            byte => byte,
        };
        OsString::from_vec((0..length).map(|_| byte(self)).collect())
    }
}

const GLOBALS: &[&str] = &[
    "--debug",
    "-debug",
    "--debug=false",
    "--systemd-cgroup",
    "--log=",
    "--log",
    "--log-format=json",
    "-log-format",
    "json",
    "--unknown",
    "--unknown=value",
    "--",
    "-",
    "",
    "---x",
    "-=",
    "--=x",
    "--rootless",
    "auto",
    "--criu",
    "criu",
    "-v",
    "--version",
    "--help",
    "-h",
    "value",
];

const SUBCOMMANDS: &[&str] = &[
    "checkpoint",
    "checkpoint",
    "restore",
    "restore",
    "create",
    "run",
    "resume",
    "pause",
    "delete",
    "exec",
    "start",
    "kill",
    "state",
    "list",
    "ps",
    "events",
    "update",
    "spec",
    "features",
    "init",
    "help",
    "h",
    "chekpoint",
    "Checkpoint",
    "CHECKPOINT",
    "checkpoint ",
    "",
    "--checkpoint",
];

const WORDS: &[&str] = &[
    "plain",
    "plain",
    "missing",
    "--leave-running",
    "-leave-running",
    "--leave-running=false",
    "--image-path",
    "--image-path=images",
    "-image-path",
    "images",
    "--work-path",
    "work",
    "--tcp-established",
    "--file-locks",
    "--shell-job",
    "--detach",
    "-d",
    "-no-subreaper",
    "--no-pivot",
    "--pid-file",
    "--pid-file=",
    "--bundle",
    "bundle",
    "-b",
    "--console-socket",
    "--manage-cgroups-mode",
    "ignore",
    "--pre-dump",
    "--parent-path",
    "../pre",
    "--force",
    "-f",
    "--lsm-mount-context",
    "--lsm-profile=a:b",
    "--new",
    "--new=x",
    "--",
    "-",
    "",
    "---",
    "--=",
    "-=x",
    "--all",
    "KILL",
    "9",
    "-e",
    "A=b c",
    "--cwd",
    "sh",
    "-c",
    "echo $HOME; `id` \"'",
    "..",
    ".",
    "--help",
    "-h",
    "restore",
    "checkpoint",
    "\n",
    "\u{1b}[2J",
    "*",
    "ä",
];

/// What a caller would write for the container `plain`, odd but right.
const RIGHT: &[&str] = &[
    "--leave-running",
    "-leave-running",
    "--leave-running=false",
    "--image-path=images",
    "-image-path=images",
    "--work-path=--help",
    "--tcp-established",
    "--file-locks=true",
    "--new=x",
    "--manage-cgroups-mode=ignore",
    "--empty-ns=network",
    "--parent-path=../pre",
];

fn right_line(random: &mut Random, root: &OsStr) -> Vec<OsString> {
    let mut line = vec![["--root", "-root"][random.below(2)].into(), root.to_owned()];
    line.extend((0..random.below(3)).map(|_| {
        OsString::from(random.one_of(&["--debug", "--log=", "-new=1", "--systemd-cgroup=false"]))
    }));
    line.push("checkpoint".into());
    line.extend((0..random.below(5)).map(|_| OsString::from(random.one_of(RIGHT))));
    match random.below(3) {
        0 => line.extend([
            "--image-path".into(),
            "--leave-running".into(),
            "plain".into(),
            "--shell-job".into(),
        ]),
        1 => line.extend(["--".into(), "plain".into()]),
        _ => line.push("plain".into()),
    }
    line
}

/// One command line; `root` is where the container `plain` is.
fn line(random: &mut Random, root: &OsStr) -> Vec<OsString> {
    if random.below(6) == 0 {
        return right_line(random, root);
    }
    let mut line = Vec::new();
    if random.below(4) > 0 {
        let mut joined = OsString::from(["--root=", "-root="][random.below(2)]);
        joined.push(root);
        match random.below(2) {
            0 => line.extend(["--root".into(), root.to_owned()]),
            _ => line.push(joined),
        }
    }
    for _ in 0..random.below(4) {
        line.push(match random.below(8) {
            0 => random.bytes(),
            _ => random.one_of(GLOBALS).into(),
        });
    }
    // Now and then in another place, or missing.
    match random.below(12) {
        0 => {}
        1 => line.insert(0, random.one_of(SUBCOMMANDS).into()),
        2 => line.push(random.bytes()),
        _ => line.push(random.one_of(SUBCOMMANDS).into()),
    }
    for _ in 0..random.below(7) {
        line.push(match random.below(16) {
            0 => random.bytes(),
            1 if random.below(16) == 0 => OsString::from_vec(vec![b'x'; LONGEST]),
            2 => ["--", random.one_of(WORDS), "=", random.one_of(WORDS)].concat().into(),
            _ => random.one_of(WORDS).into(),
        });
    }
    line
}

/// What the runtime is called with for a command line, each time that it is called.
fn passed_on(config: &Config, line: &[OsString]) -> (Vec<Vec<OsString>>, String) {
    let calls = RefCell::new(Vec::new());
    let execute = |command: &mut Command| {
        calls.borrow_mut().push(command.get_args().map(OsStr::to_owned).collect());
        io::Error::other("noted")
    };
    let recognised = CommandLine::recognise(line);
    let said = match run(config, line, recognised.as_ref(), &execute) {
        Ok(_) => String::new(),
        Err(error) => format!("{error:#}"),
    };
    (calls.into_inner(), said)
}

/// A process without CUDA in a cgroup of its own, for which a runtime has a state.
struct Plain {
    process: Child,
    cgroup: PathBuf,
}

impl Plain {
    fn start(root: &Path, bundle: &Path) -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let name = format!("/stasis-fuzz-{}", std::process::id());
        let cgroup = mounted(&mounts, "cgroup", Some("freezer"), &name)
            .or_else(|| mounted(&mounts, "cgroup2", None, &name))
            .ok_or_else(|| io::Error::other("no cgroups are mounted"))?;
        fs::create_dir(&cgroup)?;
        let process = Command::new("sleep").arg("1000").spawn()?;
        let plain = Self { process, cgroup };
        let pid = plain.process.id();
        fs::write(plain.cgroup.join("cgroup.procs"), pid.to_string())?;
        let state = serde_json::json!({
            "init_process_pid": pid,
            "init_process_start": start_time(i32::try_from(pid).unwrap_or_default()),
            "config": { "labels": [format!("bundle={}", bundle.display())] },
        });
        fs::create_dir_all(root.join("plain"))?;
        fs::write(root.join("plain/state.json"), state.to_string())?;
        Ok(plain)
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let start = Instant::now();
        // The kernel empties a cgroup a little after its last process.
        while fs::remove_dir(&self.cgroup).is_err() && start.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// All in a directory of the test; the runtime only has to be there.
fn config(directory: &Path) -> Config {
    let mut config = Config::default();
    config.runtime.path = "/bin/true".into();
    config.state.directory = directory.join("state");
    config.log.directory = directory.join("log");
    config
}

#[test]
fn argument_lists_reach_the_runtime_as_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    // Only root may make a cgroup; without one checkpoints are of containers that are not there.
    let plain = Plain::start(&root, directory.path());
    assert!(plain.is_ok() || !nix::unistd::geteuid().is_root(), "{:?}", plain.err());
    let config = config(directory.path());
    let mut subcommands = std::collections::BTreeSet::new();
    let mut of_plain = 0;
    for seed in SEEDS {
        let mut random = Random(seed);
        for case in 0..CASES / SEEDS.len() {
            let line = line(&mut random, root.as_os_str());
            let (calls, said) = passed_on(&config, &line);
            let shown: Vec<_> = line.iter().map(|token| cut(token)).collect();
            assert!(calls == [&*line], "{seed}/{case}: {shown:?} became {}: {said}", calls.len());
            if let Some(line) = CommandLine::recognise(&line) {
                let is_checkpoint = line.subcommand == "checkpoint" && !line.asks_for_help();
                let of_it = is_checkpoint && line.id() == Some(OsStr::new("plain"));
                of_plain +=
                    usize::from(of_it && line.global("root").as_deref() == Some(root.as_os_str()));
                subcommands.insert(line.subcommand);
            }
        }
    }
    // The generator is of no use if it does not get there.
    assert!(subcommands.len() >= 19, "{subcommands:?}");
    assert!(of_plain > 200, "{of_plain} checkpoints of a container without CUDA");
}

fn cut(token: &OsStr) -> String {
    token.to_string_lossy().chars().take(40).collect()
}

#[test]
fn every_case_is_another() {
    let lists = |seed| {
        let mut random = Random(seed);
        (0..100).map(|_| line(&mut random, OsStr::new("/r"))).collect::<Vec<_>>()
    };
    assert_eq!(lists(1), lists(1));
    assert_ne!(lists(1), lists(2));
}
