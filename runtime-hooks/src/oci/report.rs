//! Errors and log lines, where callers of an OCI runtime look for them.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use stasis_config::config::Log;

use crate::runc::args::CommandLine;

/// Where this call's errors go.
pub(super) struct Report {
    log: Option<PathBuf>,
    json: bool,
    /// Standard error is the container's (create, run, restore): nothing of ours belongs there.
    stderr_is_the_containers: bool,
}

impl Report {
    pub(super) fn new(line: Option<&CommandLine>) -> Self {
        let global = |name| line.and_then(|line| line.global(name));
        let subcommand = line.map_or("", |line| line.subcommand.as_str());
        Self {
            log: global("log").filter(|path| !path.is_empty()).map(PathBuf::from),
            json: global("log-format").is_some_and(|format| format == "json"),
            stderr_is_the_containers: matches!(subcommand, "create" | "run" | "restore"),
        }
    }

    /// Go's shim takes a checkpoint's error from the first line of output and a restore's from the
    /// last `level=error` line of the log. runc writes both for all, so this does too.
    pub(super) fn error(&self, message: &str) {
        let logged = self.log.as_ref().is_some_and(|path| self.append(path, message).is_ok());
        if !(logged && self.stderr_is_the_containers) {
            let _ = writeln!(io::stderr(), "{message}");
        }
    }

    fn append(&self, path: &PathBuf, message: &str) -> io::Result<()> {
        let time = stasis_config::manifest::timestamp(SystemTime::now());
        let line = if self.json {
            serde_json::json!({ "level": "error", "msg": message, "time": time }).to_string()
        } else {
            format!("time=\"{time}\" level=error msg={}", serde_json::json!(message))
        };
        let mut file = OpenOptions::new().create(true).append(true).mode(0o644).open(path)?;
        file.write_all(format!("{line}\n").as_bytes())
    }
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
    use std::ffi::OsString;

    fn report(text: &str) -> Report {
        let tokens: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        Report::new(CommandLine::recognise(&tokens).as_ref())
    }

    #[test]
    fn a_json_log_gets_what_gos_shim_looks_for() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log.json");
        let line = format!("--log {} --log-format json restore c1", log.display());
        report(&line).error("stasis: \"no\"");
        let text = std::fs::read_to_string(log).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!(
            (line["level"].as_str(), line["msg"].as_str()),
            (Some("error"), Some("stasis: \"no\""))
        );
    }

    #[test]
    fn a_text_log_is_runcs() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        report(&format!("--log={} checkpoint c1", log.display())).error("no");
        let text = std::fs::read_to_string(log).unwrap();
        assert!(text.ends_with("level=error msg=\"no\"\n"), "{text}");
    }

    #[test]
    fn the_containers_descriptors_are_left_alone() {
        assert!(report("--log /l restore c1").stderr_is_the_containers);
        assert!(!report("--log /l checkpoint c1").stderr_is_the_containers);
    }
}
