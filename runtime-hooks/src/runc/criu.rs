//! CRIU behind runc: options that no caller can give, its plugins, its log.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};

use stasis_config::manifest::Dump;

use super::args::Arguments;
use crate::files::open_regular;

/// CRIU's log of a dump, in the work path.
pub const DUMP_LOG: &str = "dump.log";
/// CRIU's log of a restore, in the work path.
pub const RESTORE_LOG: &str = "restore.log";

/// What is asked of CRIU beyond the caller's arguments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// What both dump and restore have to be told.
    pub flags: Dump,
    /// CRIU's link-remap.
    pub link_remap: bool,
    /// CRIU's skip-in-flight.
    pub skip_in_flight: bool,
    /// A configuration file for CRIU, if any option has no flag of runc: [`Options::config_text`].
    pub config_file: Option<PathBuf>,
    /// Whether CRIU's plugins stay out, because CUDA is ours.
    pub without_plugins: bool,
}

impl Options {
    /// From the configuration. `config_file` is not set.
    #[must_use]
    pub fn from_config(config: &stasis_config::config::Criu) -> Self {
        Self {
            flags: Dump {
                tcp_established: config.tcp_established,
                external_unix_sockets: config.external_unix_sockets,
                ..Dump::default()
            },
            link_remap: config.link_remap,
            skip_in_flight: config.skip_in_flight,
            ..Self::default()
        }
    }

    /// What a dump with the caller's arguments is made with.
    #[must_use]
    pub fn flags_with(&self, caller: &Arguments) -> Dump {
        Dump {
            tcp_established: self.flags.tcp_established || caller.has("tcp-established"),
            external_unix_sockets: self.flags.external_unix_sockets || caller.has("ext-unix-sk"),
            shell_job: self.flags.shell_job || caller.has("shell-job"),
            file_locks: self.flags.file_locks || caller.has("file-locks"),
        }
    }

    /// CRIU's flags at restore must be those of the dump; Go's shim passes none of them.
    pub fn add(&mut self, dump: Dump) {
        self.flags.tcp_established |= dump.tcp_established;
        self.flags.external_unix_sockets |= dump.external_unix_sockets;
        self.flags.shell_job |= dump.shell_job;
        self.flags.file_locks |= dump.file_locks;
    }

    /// Flags to add to the caller's, each only if it is not there. `help` gives the runtime's help
    /// text; it is asked only for flags that runc has from 1.2 on.
    pub(super) fn flags(
        &self,
        caller: &Arguments,
        leave_running: bool,
        help: impl Fn() -> Option<Output>,
    ) -> Vec<OsString> {
        let mut flags = Vec::new();
        let wanted = [
            ("leave-running", leave_running),
            ("tcp-established", self.flags.tcp_established),
            ("ext-unix-sk", self.flags.external_unix_sockets),
            ("shell-job", self.flags.shell_job),
            ("file-locks", self.flags.file_locks),
        ];
        for (name, wanted) in wanted {
            if wanted && !caller.has(name) {
                flags.push(OsString::from(format!("--{name}")));
            }
        }
        // A runc that has these flags tells CRIU 'no' when they are missing, which wins over the
        // configuration file.
        let newer = [("link-remap", self.link_remap), ("tcp-skip-in-flight", self.skip_in_flight)];
        if newer.iter().any(|(_, wanted)| *wanted) {
            let help = help().map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            for (name, wanted) in newer {
                let known = help.as_ref().is_some_and(|help| help.contains(&format!("--{name}")));
                if wanted && known && !caller.has(name) {
                    flags.push(OsString::from(format!("--{name}")));
                }
            }
        }
        flags
    }

    pub(super) fn environment(&self, command: &mut Command, no_plugins: &Path) {
        if self.without_plugins {
            command.env("CRIU_LIBS_DIR", no_plugins);
        }
        if let Some(file) = &self.config_file {
            command.env("CRIU_CONFIG_FILE", file);
        }
    }

    /// What CRIU's configuration file has to say for `config`, `None` if nothing. `present` is the
    /// file that the caller's environment names already; it stays in force.
    #[must_use]
    pub fn config_text(
        config: &stasis_config::config::Criu,
        present: Option<&str>,
    ) -> Option<String> {
        let mut lines = Vec::new();
        if config.link_remap {
            lines.push("link-remap".to_owned());
        }
        if config.skip_in_flight {
            lines.push("skip-in-flight".to_owned());
        }
        if let Some(bytes) = config.ghost_limit {
            lines.push(format!("ghost-limit {bytes}"));
        }
        if lines.is_empty() {
            return None;
        }
        Some(format!(
            "{}{}\n",
            present.map(|text| format!("{text}\n")).unwrap_or_default(),
            lines.join("\n")
        ))
    }
}

/// The lines that say why CRIU failed: the first few errors. CRIU goes on and complains about the
/// consequences, so the first ones are the cause.
#[must_use]
pub fn errors(log: &Path) -> Vec<String> {
    const LINES: usize = 4;
    const LENGTH: usize = 300;
    // Printed in every log of a root without CAP_SYS_RESOURCE, and harmless.
    const HARMLESS: &str = "Can't setup RLIMIT_NOFILE for self";
    const LIMIT: u64 = 256 << 20;
    let Ok(file) = open_log(log) else {
        return Vec::new();
    };
    BufReader::new(file.take(LIMIT))
        .split(b'\n')
        .map_while(Result::ok)
        .map(|line| String::from_utf8_lossy(&line).into_owned())
        .filter(|line| line.contains("Error (") && !line.contains(HARMLESS))
        .take(LINES)
        .map(|line| {
            let line: String = line.chars().filter(|c| !c.is_control()).take(LENGTH).collect();
            // Without the time stamp.
            line.split_once(") ")
                .filter(|(stamp, _)| stamp.starts_with('('))
                .map_or(line.clone(), |(_, text)| text.to_owned())
        })
        .collect()
}

/// Opens a log of CRIU: a regular file, whatever is put in its place.
pub fn open_log(path: &Path) -> io::Result<fs::File> {
    open_regular(path)?.ok_or_else(|| io::Error::other("not a regular file"))
}

/// Where logs of failed operations are kept: the bundle, and the work path in it, go away.
#[derive(Debug, Clone)]
pub struct LogStore {
    /// The directory.
    pub directory: PathBuf,
    /// How many are kept; the oldest are removed.
    pub keep: usize,
}

impl LogStore {
    /// Copies `log`; returns the copy's path.
    pub fn save(&self, log: &Path, id: &OsStr) -> io::Result<PathBuf> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let kind = log.file_name().unwrap_or(OsStr::new("criu.log"));
        // The time first, in fixed width, so that names sort by age.
        let mut name = OsString::from(format!("{:010}.{:03}-", now.as_secs(), now.subsec_millis()));
        name.push(id);
        name.push("-");
        name.push(kind);
        let path = self.directory.join(name);
        let mut copy =
            fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path)?;
        io::copy(&mut open_log(log)?, &mut copy)?;
        self.remove_oldest();
        Ok(path)
    }

    fn remove_oldest(&self) {
        let Ok(entries) = fs::read_dir(&self.directory) else {
            return;
        };
        let is_ours = |name: &OsString| {
            let name = name.to_string_lossy();
            (name.ends_with(DUMP_LOG) || name.ends_with(RESTORE_LOG))
                && name.as_bytes().first().is_some_and(u8::is_ascii_digit)
        };
        let mut names: Vec<OsString> =
            entries.flatten().map(|entry| entry.file_name()).filter(is_ours).collect();
        names.sort_unstable();
        let surplus = names.len().saturating_sub(self.keep);
        for name in &names[..surplus] {
            let _ = fs::remove_file(self.directory.join(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runc::args::CommandLine;
    use stasis_config::config::Criu;

    fn arguments(text: &str) -> Arguments {
        let tokens: Vec<OsString> = text.split(' ').map(OsString::from).collect();
        CommandLine::recognise(&tokens).unwrap().arguments()
    }

    #[test]
    fn a_plain_dump_adds_nothing() {
        let flags = Options::default().flags(&arguments("checkpoint c1"), false, || None);
        assert_eq!(flags, Vec::<OsString>::new());
    }

    #[test]
    fn flags_are_added_once() {
        let flags = Dump { tcp_established: true, file_locks: true, ..Dump::default() };
        let options = Options { flags, ..Options::default() };
        let caller = arguments("checkpoint --file-locks c1");
        assert_eq!(options.flags(&caller, true, || None), ["--leave-running", "--tcp-established"]);
    }

    #[test]
    fn newer_flags_only_where_the_runtime_has_them() {
        let options = Options { link_remap: true, skip_in_flight: true, ..Options::default() };
        let output = |text: &str| {
            Some(Output {
                status: std::process::ExitStatus::default(),
                stdout: text.into(),
                stderr: Vec::new(),
            })
        };
        let caller = arguments("checkpoint c1");
        let old = options.flags(&caller, false, || output("--leave-running"));
        assert_eq!(old, Vec::<OsString>::new());
        let new =
            options.flags(&caller, false, || output("--link-remap  x\n--tcp-skip-in-flight y"));
        assert_eq!(new, ["--link-remap", "--tcp-skip-in-flight"]);
    }

    #[test]
    fn options_without_a_flag_go_into_a_file() {
        assert_eq!(Options::config_text(&Criu::default(), None), None);
        let criu = Criu { link_remap: true, ghost_limit: Some(1 << 20), ..Criu::default() };
        let text = Options::config_text(&criu, Some("verbosity 4")).unwrap();
        assert_eq!(text, "verbosity 4\nlink-remap\nghost-limit 1048576\n");
    }

    #[test]
    fn the_first_errors_are_quoted_without_the_harmless_one() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("dump.log");
        fs::write(
            &log,
            "(00.001) Warn  (criu/x.c:1): no\n\
             (00.002) Error (criu/rlimit.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: x\n\
             (00.003) Error (criu/files-ext.c:98): Can't dump file 9 of that type [20666] (chr 10:229)\n\
             (00.004) Error (criu/cr-dump.c:2111): Dumping FAILED.\n",
        )
        .unwrap();
        assert_eq!(
            errors(&log),
            [
                "Error (criu/files-ext.c:98): Can't dump file 9 of that type [20666] (chr 10:229)",
                "Error (criu/cr-dump.c:2111): Dumping FAILED."
            ]
        );
    }

    #[test]
    fn only_the_newest_logs_are_kept_and_links_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("dump.log");
        fs::write(&log, "x").unwrap();
        let store = LogStore { directory: directory.path().join("logs"), keep: 2 };
        for _ in 0..4 {
            store.save(&log, OsStr::new("c1")).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        assert_eq!(fs::read_dir(&store.directory).unwrap().count(), 2);
        let link = directory.path().join("link-dump.log");
        std::os::unix::fs::symlink("/etc/shadow", &link).unwrap();
        assert!(store.save(&link, OsStr::new("c1")).is_err());
        let device = directory.path().join("device-dump.log");
        if crate::files::make_device(&device) {
            assert_eq!(open_log(&device).unwrap_err().to_string(), "not a regular file");
        }
    }
}
