//! What a runtime that `stasis-runc` executes finds: arguments, environment, descriptors.

#![allow(clippy::unwrap_used)]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const STASIS: &str = env!("CARGO_BIN_EXE_stasis-runc");
const MARK: &str = "_STASIS_CALL=";

/// A runtime that writes down how it was called and ends with 7.
struct Recorder {
    directory: tempfile::TempDir,
}

impl Recorder {
    fn new(body: &str) -> Self {
        let recorder = Self { directory: tempfile::tempdir().unwrap() };
        // By another process: one that this one writes may be busy, if another thread forks.
        let write = "printf '#!/bin/sh\n%s\n' \"$1\" >\"$2\" && chmod 755 \"$2\"";
        let script = recorder.path("runc");
        let status = Command::new("sh").args(["-c", write, "sh", body]).arg(&script).status();
        assert!(status.unwrap().success());
        let text = format!(
            "[runtime]\npath = \"{}\"\n[state]\ndirectory = \"{}\"\n[log]\ndirectory = \"{}\"\n",
            script.display(),
            recorder.path("state").display(),
            recorder.path("log").display()
        );
        fs::write(recorder.path("config.toml"), text).unwrap();
        recorder
    }

    fn recording() -> Self {
        let recorder = Self::new("");
        let shown = recorder.directory.path().display();
        let body = format!(
            "cd /proc/$$; cat cmdline >{shown}/cmdline; cat environ >{shown}/environ\n\
             for fd in 0 3 4; do readlink fd/$fd; done >{shown}/descriptors\n\
             exit 7"
        );
        let replaced = Self::new(&body);
        // Both see the directory of the first.
        Self { directory: recorder.directory }.with(&replaced.path("runc"))
    }

    fn with(self, script: &Path) -> Self {
        let copied = Command::new("cp").arg(script).arg(self.path("runc")).status();
        assert!(copied.unwrap().success());
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(STASIS);
        command.env_clear().env("STASIS_CONFIG", self.path("config.toml"));
        command.env("PATH", "/usr/bin:/bin");
        command
    }

    /// The arguments that arrive, without the shell and the script.
    fn arguments(&self) -> Vec<OsString> {
        records(&self.path("cmdline")).split_off(2)
    }
}

/// The strings of a file in which a zero ends each.
fn records(path: &Path) -> Vec<OsString> {
    let bytes = fs::read(path).unwrap();
    let end = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
    end.split(|&byte| byte == 0).map(|record| OsString::from_vec(record.to_vec())).collect()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn arguments_arrive_byte_for_byte() {
    let recorder = Recorder::recording();
    let long = OsString::from_vec(vec![b'x'; (128 << 10) - 1]);
    let odd = OsStr::from_bytes(b"\xff\xfe=\x01");
    let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
    let lists = [
        words("--version"),
        words("features"),
        words("checkpoint --help"),
        words("restore --lsm-mount-context"),
        words("-debug --log-format=json -- state c1"),
        words("checkpoint --leave-running --leave-running c1"),
        words("checkpoint  c1"),
        words("delete --force -- --c1"),
        words("nonsense checkpoint c1"),
        words("exec -t c1 sh -c --help"),
        vec!["kill".into(), long.clone(), OsString::new(), odd.to_owned(), "\n".into()],
        vec![OsString::new(), "state".into(), "c1".into()],
        vec!["checkpoint".into(), "--work-path".into(), odd.to_owned(), "c1".into()],
    ];
    for list in lists {
        let output = recorder.command().args(&list).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{list:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{}", stderr(&output));
        assert!(recorder.arguments() == list, "{list:?}");
    }
}

/// conmon gives its pipes by number.
#[test]
fn environment_and_descriptors_arrive() {
    let recorder = Recorder::recording();
    let shell = "exec 3<\"$1\" 4>>\"$2\"; shift 2; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.arg("-c").arg(shell).arg(STASIS);
    command.args([recorder.path("config.toml"), recorder.path("four")]).args(["create", "c1"]);
    command.env_clear().env("STASIS_CONFIG", recorder.path("config.toml"));
    command.env("_OCI_SYNCPIPE", "3").env("_OCI_STARTPIPE", "4").env("EMPTY", "");
    command.env("XDG_RUNTIME_DIR", "").env("ODD", OsStr::from_bytes(b"\xff=x\ny"));
    command.env("PATH", "/usr/bin:/bin").arg0("sh");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let mut found = records(&recorder.path("environ"));
    let marks = found.iter().filter(|line| line.as_bytes().starts_with(MARK.as_bytes())).count();
    assert_eq!(marks, 1);
    found.retain(|line| !line.as_bytes().starts_with(MARK.as_bytes()));
    // The shell's own.
    found.retain(|line| !line.as_bytes().starts_with(b"PWD="));
    let mut config = OsString::from("STASIS_CONFIG=");
    config.push(recorder.path("config.toml"));
    let mut expected: Vec<OsString> = vec![config];
    for line in ["_OCI_SYNCPIPE=3", "_OCI_STARTPIPE=4", "EMPTY=", "XDG_RUNTIME_DIR="] {
        expected.push(line.into());
    }
    expected.push(OsStr::from_bytes(b"ODD=\xff=x\ny").to_owned());
    expected.push("PATH=/usr/bin:/bin".into());
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    let descriptors = fs::read_to_string(recorder.path("descriptors")).unwrap();
    let descriptors: Vec<_> = descriptors.lines().skip(1).map(PathBuf::from).collect();
    assert_eq!(descriptors, [recorder.path("config.toml"), recorder.path("four")]);
}

/// Without a container: what Podman asks before it does anything.
#[test]
fn a_runtime_that_is_not_there_is_named() {
    let recorder = Recorder::new("exit 0");
    fs::remove_file(recorder.path("runc")).unwrap();
    let output = recorder.command().args(["checkpoint", "--help"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("runtime.path"), "{}", stderr(&output));
}

#[test]
fn a_script_that_comes_back_is_told() {
    let forms = [
        format!("exec {STASIS} \"$@\""),
        format!("exec {STASIS} --debug \"$@\""),
        // Not in its place, but as a child that it waits for.
        format!("{STASIS} \"$@\""),
    ];
    for body in forms {
        let recorder = Recorder::new(&body);
        for arguments in [&["--version"][..], &["state", "c1"], &["checkpoint", "c1"]] {
            let output = recorder.command().args(arguments).output().unwrap();
            assert!(!output.status.success(), "{body} {arguments:?}");
            let said = stderr(&output);
            assert!(said.contains("leads back to stasis-runc"), "{body} {arguments:?}: {said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
    }
}

/// As a container's hook may do, which inherits the runtime's environment.
#[test]
fn another_call_from_below_is_none_of_it() {
    let body = format!(
        "case \"$*\" in *create*) {STASIS} state c1 && {STASIS} --version;; *) echo \"$*\";; esac"
    );
    let recorder = Recorder::new(&body);
    let output = recorder.command().args(["create", "c1"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "state c1\n--version\n");
}
