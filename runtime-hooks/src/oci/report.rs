//! Errors and log lines, where callers of an OCI runtime look for them.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use stasis_config::config::Log;

use super::path::Flavour;
use crate::runc::args::CommandLine;

/// Where this call's errors go: where, and in the form in which, the runtime would write its own.
///
/// That is always standard error, and `--log` besides if one is given. Go's shim takes a
/// checkpoint's error from the first line of output and a restore's from the last `level=error`
/// line of the log; conmon takes standard error, and Podman a log that is one JSON object.
pub(super) struct Report {
    log: Option<PathBuf>,
    json: bool,
    flavour: Flavour,
}

impl Report {
    pub(super) fn new(line: Option<&CommandLine>, flavour: Flavour) -> Self {
        let global = |name| line.and_then(|line| line.global(name));
        let log = global("log").filter(|path| !path.is_empty());
        Self {
            log: match flavour {
                Flavour::Runc => log.map(PathBuf::from),
                Flavour::Crun => log.and_then(crun_log),
            },
            json: global("log-format").is_some_and(|format| format == "json"),
            flavour,
        }
    }

    /// Writes an error.
    pub(super) fn error(&self, message: &str) {
        let line = self.line(message, SystemTime::now());
        let logged = self.log.as_ref().is_some_and(|path| append(path, &line).is_ok());
        let shown = if logged { message } else { &line };
        let _ = writeln!(io::stderr(), "{shown}");
    }

    /// What stands in the log, and where there is none on standard error.
    fn line(&self, message: &str, now: SystemTime) -> String {
        let time = stasis_config::manifest::timestamp(now);
        match (self.flavour, self.json) {
            (_, true) => {
                serde_json::json!({ "level": "error", "msg": message, "time": time }).to_string()
            }
            (Flavour::Runc, false) => {
                format!("time=\"{time}\" level=error msg={}", quoted(message))
            }
            (Flavour::Crun, false) => message.to_owned(),
        }
    }
}

/// The file of crun's `--log`, which may also name the system's log.
fn crun_log(log: OsString) -> Option<PathBuf> {
    let bytes = log.as_bytes();
    if let Some(path) = bytes.strip_prefix(b"file:") {
        return Some(PathBuf::from(OsStr::from_bytes(path)));
    }
    let elsewhere = bytes.starts_with(b"syslog:") || bytes.starts_with(b"journald:");
    (!elsewhere).then(|| PathBuf::from(log))
}

fn append(path: &PathBuf, line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).mode(0o644).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())
}

/// A value in runc's text log: in quotes unless it is a plain word, as its logger does.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._/@^+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            c if c.is_control() => {
                let _ = std::fmt::Write::write_fmt(
                    &mut quoted,
                    format_args!("\\u{:04x}", u32::from(c)),
                );
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Sends log events to `stasis-runc.log` in the log directory. The file is made by the first event
/// and not before: most calls have nothing to say.
pub(super) fn log_to(config: &Log) {
    let file = LogFile { directory: config.directory.clone(), open: Arc::default() };
    let level = config.level.as_str().parse().unwrap_or(tracing::Level::WARN);
    // A second call (in tests) finds one installed.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(move || file.clone())
        .try_init();
}

#[derive(Clone)]
struct LogFile {
    directory: PathBuf,
    open: Arc<Mutex<Option<File>>>,
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.is_none() {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
            let path = self.directory.join("stasis-runc.log");
            let flags = nix::libc::O_NOFOLLOW;
            let mut options = OpenOptions::new();
            *open =
                Some(options.create(true).append(true).mode(0o600).custom_flags(flags).open(path)?);
        }
        match open.as_mut() {
            Some(file) => file.write(bytes),
            None => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    fn report(text: &str, flavour: Flavour) -> Report {
        let tokens: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        Report::new(CommandLine::recognise(&tokens).as_ref(), flavour)
    }

    /// What a report writes to its log.
    fn logged(flags: &str, flavour: Flavour, message: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let flags = flags.replace("LOG", &log.to_string_lossy());
        report(&format!("{flags} checkpoint c1"), flavour).error(message);
        std::fs::read_to_string(log).unwrap()
    }

    /// What stands on standard error where there is no log, at the beginning of 1970.
    fn shown(flags: &str, flavour: Flavour, message: &str) -> String {
        report(&format!("{flags} checkpoint c1"), flavour).line(message, UNIX_EPOCH)
    }

    #[test]
    fn a_json_log_gets_what_gos_shim_looks_for() {
        for flavour in [Flavour::Runc, Flavour::Crun] {
            let text = logged("--log LOG --log-format json", flavour, "stasis: \"no\"");
            // One object and no more: Podman reads the whole file as one.
            let line: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(
                (line["level"].as_str(), line["msg"].as_str()),
                (Some("error"), Some("stasis: \"no\""))
            );
        }
    }

    /// As runc 1.1.15 and 1.3.6 were seen to write.
    #[test]
    fn runcs_forms() {
        let runc = |flags, message| shown(flags, Flavour::Runc, message);
        assert_eq!(
            runc("--debug", "container does not exist"),
            "time=\"1970-01-01T00:00:00Z\" level=error msg=\"container does not exist\""
        );
        assert!(runc("--log-format text", "no").ends_with("level=error msg=no"));
        assert!(runc("--debug", "\"a\\\n\u{1b}é").ends_with(r#"msg="\"a\\\n\u001bé""#));
        assert_eq!(
            runc("--log-format json", "container does not exist"),
            r#"{"level":"error","msg":"container does not exist","time":"1970-01-01T00:00:00Z"}"#
        );
        assert!(logged("--log=LOG", Flavour::Runc, "no").ends_with("level=error msg=no\n"));
    }

    /// As crun 1.21 and 1.28 were seen to write: a text log has neither time nor level.
    #[test]
    fn cruns_forms() {
        assert_eq!(shown("--debug", Flavour::Crun, "not there"), "not there");
        assert_eq!(logged("--log LOG", Flavour::Crun, "not there"), "not there\n");
        assert_eq!(logged("--log file:LOG", Flavour::Crun, "not there"), "not there\n");
        for elsewhere in ["--log syslog:x", "--log journald:x"] {
            assert_eq!(report(elsewhere, Flavour::Crun).log, None);
        }
    }
}
