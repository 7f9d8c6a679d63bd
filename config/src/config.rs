//! `config.toml`: what the administrator of a host decides.
//!
//! Read in three steps. Parse: TOML into [`Config`], unknown keys refused. Adjust: what is not
//! given gets its default. Validate: what each value allows, then what they mean together. Every
//! error names file, line, column, key and what is expected.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, de};
use toml::de::{DeTable, DeValue};

use crate::annotations::AnnotationName;
use crate::duration;
use crate::text::{CUT, printable, quoted};

/// The file that is read when [`ENV`] is not set.
pub const DEFAULT_FILE: &str = "/etc/stasis/config.toml";

/// The environment variable that names another file.
pub const ENV: &str = "STASIS_CONFIG";

/// A larger file is a mistake.
const MAX_BYTES: u64 = 1 << 20;

/// The whole configuration. The default is that of a host without a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// `[runtime]`
    pub runtime: Runtime,
    /// `[state]`
    pub state: State,
    /// `[log]`
    pub log: Log,
    /// `[cuda]`
    pub cuda: Cuda,
    /// `[jobs]`
    pub jobs: Jobs,
    /// `[criu]`
    pub criu: Criu,
    /// `[cdi]`
    pub cdi: Cdi,
    /// `[annotations]`
    pub annotations: AnnotationPolicy,
}

/// The OCI runtime below us.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Runtime {
    /// A name without a slash, looked up in `PATH`, or an absolute path. Default `runc`.
    pub path: PathBuf,
}

/// What is noted about operations under way.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct State {
    /// Absolute directory. Default `/run/stasis`: it should not survive a reboot.
    pub directory: PathBuf,
}

/// What is logged, and what is kept of CRIU's logs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Log {
    /// Absolute directory for logs of CRIU. Default `/var/log/stasis`.
    pub directory: PathBuf,
    /// Our own messages. Default [`LogLevel::Warn`].
    pub level: LogLevel,
    /// How many logs of CRIU are kept, a number of files. Default 50; 0 keeps none.
    pub keep: u32,
}

/// The names that `tracing` uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What failed.
    Error,
    /// And what is odd.
    Warn,
    /// And each operation.
    Info,
    /// And each step.
    Debug,
    /// And each call.
    Trace,
}

impl LogLevel {
    /// The name, as in the file; `tracing` parses it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// The driver: where it is, and how long it may take. All times are between 1 ms and 24 h.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Cuda {
    /// Absolute path of the library file. Default: the dynamic loader finds `libcuda.so.1`.
    pub libcuda: Option<PathBuf>,
    /// Absolute path of the library file. Default: the dynamic loader finds
    /// `libnvidia-ml.so.1`.
    pub libnvml: Option<PathBuf>,
    /// By what the driver is asked. Default [`Interface::Auto`].
    pub interface: Interface,
    /// NVIDIA's command, which makes job files, and by which a driver is asked whose library cannot
    /// be: a name without a slash, looked up in `PATH`, or an absolute path. Default
    /// `cuda-checkpoint`.
    pub utility: PathBuf,
    /// Time for `cuInit` in the helper. Default 60 s.
    #[serde(deserialize_with = "some_duration")]
    pub init_timeout: Duration,
    /// Time to lock all processes of a container, all attempts together. Default 60 s; not longer
    /// than `checkpoint_timeout`.
    #[serde(deserialize_with = "some_duration")]
    pub lock_timeout: Duration,
    /// Time to move the GPU memory of all processes to host memory. Default 10 min.
    #[serde(deserialize_with = "some_duration")]
    pub checkpoint_timeout: Duration,
    /// Time to move it back. Default 10 min.
    #[serde(deserialize_with = "some_duration")]
    pub restore_timeout: Duration,
    /// Whether a checkpoint is refused when host memory, as far as the kernel and the container's
    /// cgroups tell, has no room for the GPU memory. Default true.
    pub check_host_memory: bool,
}

/// By what the driver is asked to checkpoint and to restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interface {
    /// By its library if that has the functions, which is from branch 570 on, else by NVIDIA's
    /// command.
    #[default]
    Auto,
    /// By its library only.
    Library,
    /// By NVIDIA's command only, which works from branch 550 on.
    Utility,
}

/// Jobs: containers whose CUDA processes share GPU memory.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Jobs {
    /// The first branch of the driver (the number before the first dot of its version) whose jobs
    /// are relied on. Default 610, the first that keeps shared memory; at least 590, the first that
    /// has jobs.
    pub minimum_driver: u32,
}

/// Added to what the caller of a checkpoint asks of CRIU. Each is off by default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[expect(clippy::struct_excessive_bools, reason = "these are CRIU's flags")]
pub struct Criu {
    /// Keep established TCP connections (`--tcp-established`).
    pub tcp_established: bool,
    /// Allow UNIX sockets whose peer is outside the container (`--ext-unix-sk`).
    pub external_unix_sockets: bool,
    /// Dump deleted files that have other links by linking them again (`--link-remap`).
    pub link_remap: bool,
    /// The largest deleted file that is put into the image, in bytes (`--ghost-limit`): from 1 to
    /// [`u32::MAX`], which is what CRIU can take. `None` leaves CRIU its own limit of 1 MiB.
    #[serde(deserialize_with = "some_size")]
    pub ghost_limit: Option<u64>,
    /// Leave out TCP connections that are still being established (`--skip-in-flight`).
    pub skip_in_flight: bool,
}

/// This host's CDI specifications, from which a restored container gets what its own config.json
/// does not give it of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Cdi {
    /// Absolute directories of CDI specifications; a later one wins. Default `/etc/cdi` and
    /// `/var/run/cdi`. Without any, no CDI is used.
    pub directories: Vec<PathBuf>,
    /// Whether `NVIDIA_VISIBLE_DEVICES` in a container's environment, and annotations `cdi.k8s.io/*`,
    /// give it GPUs on this host.
    /// `None`: see [`Config::visible_devices`].
    pub visible_devices: Option<bool>,
}

/// Which of our annotations a container may carry, and how far they go.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct AnnotationPolicy {
    /// Those that are allowed, in the file by their names without `dev.stasis.`. Default: all.
    pub allow: BTreeSet<AnnotationName>,
    /// The longest that `dev.stasis.lock-timeout` may ask for, between 1 ms and 24 h. Default
    /// 10 min.
    #[serde(deserialize_with = "some_duration")]
    pub max_lock_timeout: Duration,
}

impl Default for Runtime {
    fn default() -> Self {
        Self { path: "runc".into() }
    }
}

impl Default for State {
    fn default() -> Self {
        Self { directory: "/run/stasis".into() }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { directory: "/var/log/stasis".into(), level: LogLevel::Warn, keep: 50 }
    }
}

impl Default for Cuda {
    fn default() -> Self {
        Self {
            libcuda: None,
            libnvml: None,
            interface: Interface::Auto,
            utility: "cuda-checkpoint".into(),
            init_timeout: Duration::from_secs(60),
            lock_timeout: Duration::from_secs(60),
            checkpoint_timeout: Duration::from_secs(600),
            restore_timeout: Duration::from_secs(600),
            check_host_memory: true,
        }
    }
}

impl Default for Jobs {
    fn default() -> Self {
        Self { minimum_driver: 610 }
    }
}

/// The first branch of the driver that has jobs.
const FIRST_WITH_JOBS: u32 = 590;

impl Default for Cdi {
    fn default() -> Self {
        let directories = ["/etc/cdi", "/var/run/cdi"].map(PathBuf::from).into();
        Self { directories, visible_devices: None }
    }
}

impl Default for AnnotationPolicy {
    fn default() -> Self {
        Self { allow: AnnotationName::all(), max_lock_timeout: Duration::from_secs(600) }
    }
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A place in the file is wrong.
    #[error("configuration {}:{line}:{column}: {}{reason}", .path.display(), key_prefix(.key.as_deref()))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// In characters, from 1.
        column: usize,
        /// The key with its section, such as `cuda.lock-timeout`. `None` where the file is not
        /// TOML.
        key: Option<String>,
        /// What was found and what is expected.
        reason: String,
    },
}

fn key_prefix(key: Option<&str>) -> String {
    key.map(|key| format!("{key}: ")).unwrap_or_default()
}

impl Config {
    /// Reads the configuration of this host: the file that [`ENV`] names, else [`DEFAULT_FILE`],
    /// else the defaults.
    ///
    /// An empty [`ENV`] counts as not set.
    ///
    /// # Errors
    /// If the file is wrong, cannot be read, or is named by [`ENV`] and missing.
    pub fn load() -> Result<Self, ConfigError> {
        Self::load_from(std::env::var_os(ENV), Path::new(DEFAULT_FILE))
    }

    fn load_from(named: Option<OsString>, default: &Path) -> Result<Self, ConfigError> {
        if let Some(named) = named.filter(|named| !named.is_empty()) {
            return Self::from_file(Path::new(&named));
        }
        match Self::from_file(default) {
            Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Ok(Self::default())
            }
            other => other,
        }
    }

    /// Reads this file.
    ///
    /// # Errors
    /// If it is wrong, or cannot be read, or is missing.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text =
            read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Parses this text; errors name `origin` as the file.
    ///
    /// # Errors
    /// If it is not TOML, or a key is unknown, or a value does not fit.
    pub fn parse(text: &str, origin: &Path) -> Result<Self, ConfigError> {
        let source = Source { text, path: origin };
        let config: Self = toml::from_str(text).map_err(|error| {
            let span = error.span().unwrap_or(0..0);
            source.error(span.start, source.key_at(&span), error.message())
        })?;
        config.validate().map_err(|(keys, reason)| {
            // Of several keys that do not go together, the one that is in the file.
            let (key, at) =
                keys.iter().find_map(|key| Some((*key, source.find(key)?))).unwrap_or((keys[0], 0));
            source.error(at, Some(key.to_owned()), &reason)
        })?;
        Ok(config)
    }

    /// Whether `NVIDIA_VISIBLE_DEVICES` and annotations `cdi.k8s.io/*` give a container GPUs on this
    /// host.
    ///
    /// Every image with CUDA has that variable, also where nobody gives GPUs for it; so by default
    /// only where NVIDIA's runtime, which does, is the one that runs the containers, and is not
    /// itself told to refuse it to the unprivileged.
    #[must_use]
    pub fn visible_devices(&self) -> bool {
        self.visible_devices_with(Path::new(NVIDIA_CONFIG))
    }

    fn visible_devices_with(&self, nvidia: &Path) -> bool {
        self.cdi.visible_devices.unwrap_or_else(|| {
            let name = self.runtime.path.file_name().unwrap_or_default();
            name.as_encoded_bytes().starts_with(b"nvidia-container-runtime")
                && !refuses_variable(nvidia)
        })
    }

    /// What the types cannot say. The error: the keys concerned, and what is wrong.
    fn validate(&self) -> Result<(), (&'static [&'static str], String)> {
        let Self { runtime, state, log, cuda, jobs, criu: _, cdi, annotations: _ } = self;

        program(&runtime.path).map_err(|e| (&["runtime.path"][..], e))?;
        absolute(&state.directory).map_err(|e| (&["state.directory"][..], e))?;
        absolute(&log.directory).map_err(|e| (&["log.directory"][..], e))?;
        if let Some(path) = &cuda.libcuda {
            absolute(path).map_err(|e| (&["cuda.libcuda"][..], e))?;
        }
        if let Some(path) = &cuda.libnvml {
            absolute(path).map_err(|e| (&["cuda.libnvml"][..], e))?;
        }
        program(&cuda.utility).map_err(|e| (&["cuda.utility"][..], e))?;
        if jobs.minimum_driver < FIRST_WITH_JOBS {
            let found = jobs.minimum_driver;
            return Err((
                &["jobs.minimum-driver"],
                format!("expected a driver branch from {FIRST_WITH_JOBS}, found {found}"),
            ));
        }
        for directory in &cdi.directories {
            absolute(directory).map_err(|e| (&["cdi.directories"][..], e))?;
        }
        if cuda.lock_timeout > cuda.checkpoint_timeout {
            return Err((
                &["cuda.lock-timeout", "cuda.checkpoint-timeout"],
                format!(
                    "expected cuda.lock-timeout ({}) to be at most cuda.checkpoint-timeout ({})",
                    duration::show(cuda.lock_timeout),
                    duration::show(cuda.checkpoint_timeout)
                ),
            ));
        }
        // The bounds of each duration and size were checked where it was parsed.
        Ok(())
    }
}

/// Where NVIDIA's runtime has its configuration.
const NVIDIA_CONFIG: &str = "/etc/nvidia-container-runtime/config.toml";

/// Whether NVIDIA's configuration gives no GPUs to unprivileged containers for their environment.
/// One that cannot be read counts as strict, one that is not there as the default, which is not.
fn refuses_variable(nvidia: &Path) -> bool {
    let text = match read(nvidia) {
        Ok(text) => text,
        Err(error) => return error.kind() != io::ErrorKind::NotFound,
    };
    let Ok(table) = toml::from_str::<toml::Table>(&text) else { return true };
    let key = "accept-nvidia-visible-devices-envvar-when-unprivileged";
    table.get(key).is_some_and(|value| value.as_bool() != Some(true))
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if u64::try_from(read).is_ok_and(|read| read > MAX_BYTES) {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has more than {MAX_BYTES} bytes"),
        ));
    }
    Ok(text)
}

fn absolute(path: &Path) -> Result<(), String> {
    let text = path.to_string_lossy();
    if !path.is_absolute()
        || path.components().any(|c| c == Component::ParentDir)
        || text.chars().any(char::is_control)
    {
        return Err(format!("expected an absolute path without `..`, found {}", quoted(&text)));
    }
    Ok(())
}

fn program(path: &Path) -> Result<(), String> {
    let text = path.to_string_lossy();
    let name = !text.contains('/')
        && matches!(path.components().next(), Some(Component::Normal(_)))
        && !text.chars().any(char::is_control);
    if name || absolute(path).is_ok() {
        return Ok(());
    }
    Err(format!("expected the name of a program or an absolute path, found {}", quoted(&text)))
}

fn some_duration<'de, D: Deserializer<'de>>(de: D) -> Result<Duration, D::Error> {
    struct Visitor;
    impl de::Visitor<'_> for Visitor {
        type Value = Duration;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(duration::FORM)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Duration, E> {
            let found = quoted(text);
            let given = duration::parse(text).map_err(|why| {
                E::custom(format!("{why}, expected {}, found {found}", duration::FORM))
            })?;
            if !(duration::SHORTEST..=duration::LONGEST).contains(&given) {
                return Err(E::custom(format!(
                    "expected a duration from {} to {}, found {found}",
                    duration::show(duration::SHORTEST),
                    duration::show(duration::LONGEST)
                )));
            }
            Ok(given)
        }
    }
    de.deserialize_str(Visitor)
}

const SIZE_FORM: &str = "a size with a unit, such as \"1MiB\" or \"512kB\"";

fn some_size<'de, D: Deserializer<'de>>(de: D) -> Result<Option<u64>, D::Error> {
    struct Visitor;
    impl de::Visitor<'_> for Visitor {
        type Value = Option<u64>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(SIZE_FORM)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Option<u64>, E> {
            let found = quoted(text);
            // bytesize takes a number alone for bytes.
            if !text.ends_with(|c: char| c.is_ascii_alphabetic()) {
                return Err(E::custom(format!(
                    "the unit is missing, expected {SIZE_FORM}, found {found}"
                )));
            }
            let bytesize::ByteSize(bytes) = text
                .parse()
                .map_err(|_| E::custom(format!("expected {SIZE_FORM}, found {found}")))?;
            if bytes == 0 || bytes > u64::from(u32::MAX) {
                return Err(E::custom(format!(
                    "expected a size from 1B to {}B (less than 4GiB), found {found}",
                    u32::MAX
                )));
            }
            Ok(Some(bytes))
        }
    }
    de.deserialize_str(Visitor)
}

/// A text to point into.
struct Source<'a> {
    text: &'a str,
    path: &'a Path,
}

impl Source<'_> {
    fn error(&self, at: usize, key: Option<String>, reason: &str) -> ConfigError {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        ConfigError::Invalid {
            path: self.path.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            key: key.map(|key| printable(&key, CUT)),
            // Quotes values from the file.
            reason: printable(reason, 16 * CUT),
        }
    }

    /// The key whose name or value covers `span`, with its section.
    fn key_at(&self, span: &Range<usize>) -> Option<String> {
        fn inside(inner: &Range<usize>, outer: &Range<usize>) -> bool {
            outer.start <= inner.start && inner.end <= outer.end
        }
        fn search(table: &DeTable<'_>, span: &Range<usize>) -> Option<String> {
            table.iter().find_map(|(key, value)| {
                let name = key.get_ref();
                if inside(span, &key.span()) {
                    return Some(name.to_string());
                }
                // A table that is opened by a dotted key or a header has no span of its own that
                // covers what is in it, so look inside first.
                if let DeValue::Table(below) = value.get_ref()
                    && let Some(found) = search(below, span)
                {
                    return Some(format!("{name}.{found}"));
                }
                inside(span, &value.span()).then(|| name.to_string())
            })
        }
        // Empty where there is no place at all, as for a key that is missing.
        if span.is_empty() {
            return None;
        }
        search(DeTable::parse(self.text).ok()?.get_ref(), span)
    }

    /// Where the value of a key `section.name` begins, if it is in the file.
    fn find(&self, key: &str) -> Option<usize> {
        let (section, name) = key.split_once('.')?;
        let root = DeTable::parse(self.text).ok()?;
        let value = root.get_ref().get(section)?.get_ref().as_table()?.get(name)?;
        Some(value.span().start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = include_str!("../config.toml");

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("c.toml")).map_err(|e| e.to_string())
    }

    #[test]
    fn the_sample_shows_the_defaults() {
        assert_eq!(parse(SAMPLE), Ok(Config::default()));
        assert_eq!(parse(""), Ok(Config::default()));
        Config::default().validate().unwrap();
    }

    #[test]
    fn the_sample_shows_every_key() {
        // serde lists the keys that it knows when it meets one that it does not.
        let known = |text: &str| {
            let error = toml::from_str::<Config>(text).unwrap_err();
            let listed = error.message().split_once("expected ").unwrap().1;
            listed.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()
        };
        for section in known("-x = 1") {
            let (_, body) = SAMPLE.split_once(&format!("\n[{section}]\n")).expect(&section);
            let body = body.split("\n[").next().unwrap();
            for key in known(&format!("[{section}]\n-x = 1")) {
                let shown = body
                    .lines()
                    .any(|line| line.trim_start_matches("# ").starts_with(&format!("{key} = ")));
                assert!(shown, "{section}.{key}");
            }
        }
    }

    #[test]
    fn the_examples_in_the_sample_parse() {
        let all: Vec<_> = SAMPLE
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(example) if example.contains(" = \"") => example,
                _ => line,
            })
            .collect();
        let config = parse(&all.join("\n")).unwrap();
        assert_eq!(config.criu.ghost_limit, Some(1 << 20));
        assert!(config.cuda.libcuda.is_some() && config.cuda.libnvml.is_some());
    }

    #[test]
    fn every_value_can_be_set() {
        let config = parse(
            r#"
            runtime.path = "/usr/local/sbin/crun"
            state.directory = "/a"
            log = { directory = "/b", level = "trace", keep = 0 }
            [cuda]
            libcuda = "/c/libcuda.so.1"
            libnvml = "/c/libnvidia-ml.so.1"
            interface = "utility"
            utility = "/c/cuda-checkpoint"
            init-timeout = "1ms"
            lock-timeout = "1m 30s"
            checkpoint-timeout = "24h"
            restore-timeout = "1h"
            check-host-memory = false
            [jobs]
            minimum-driver = 590
            [criu]
            tcp-established = true
            external-unix-sockets = true
            link-remap = true
            ghost-limit = "4294967295B"
            skip-in-flight = true
            [cdi]
            directories = ["/d", "/e"]
            visible-devices = true
            [annotations]
            allow = ["lock-timeout"]
            max-lock-timeout = "5s"
            "#,
        );
        let want = Config {
            runtime: Runtime { path: "/usr/local/sbin/crun".into() },
            state: State { directory: "/a".into() },
            log: Log { directory: "/b".into(), level: LogLevel::Trace, keep: 0 },
            cuda: Cuda {
                libcuda: Some("/c/libcuda.so.1".into()),
                libnvml: Some("/c/libnvidia-ml.so.1".into()),
                interface: Interface::Utility,
                utility: "/c/cuda-checkpoint".into(),
                init_timeout: Duration::from_millis(1),
                lock_timeout: Duration::from_secs(90),
                checkpoint_timeout: Duration::from_secs(86_400),
                restore_timeout: Duration::from_secs(3600),
                check_host_memory: false,
            },
            jobs: Jobs { minimum_driver: 590 },
            criu: Criu {
                tcp_established: true,
                external_unix_sockets: true,
                link_remap: true,
                ghost_limit: Some(4_294_967_295),
                skip_in_flight: true,
            },
            cdi: Cdi { directories: vec!["/d".into(), "/e".into()], visible_devices: Some(true) },
            annotations: AnnotationPolicy {
                allow: [AnnotationName::LockTimeout].into(),
                max_lock_timeout: Duration::from_secs(5),
            },
        };
        assert_eq!(config, Ok(want));
    }

    /// Each wrong text has this whole message.
    fn wrong<const N: usize>(table: [(&str, String); N]) {
        for (text, want) in table {
            assert_eq!(parse(text), Err(format!("configuration c.toml:{want}")), "{text}");
        }
    }

    #[test]
    fn a_driver_without_jobs_cannot_be_trusted_with_them() {
        let want = "2:18: jobs.minimum-driver: expected a driver branch from 590, found 580";
        wrong([
            ("[jobs]\nminimum-driver = 580", want.to_owned()),
            (
                "[cuda]\nutility = \"bin/cuda-checkpoint\"",
                "2:11: cuda.utility: expected the name of a program or an absolute path, found \
                 `bin/cuda-checkpoint`"
                    .to_owned(),
            ),
        ]);
    }

    #[test]
    fn errors_about_durations_and_sizes_show_the_right_form() {
        let form = "a duration with a unit, such as \"10s\" or \"2m 30s\"";
        let size = "a size with a unit, such as \"1MiB\" or \"512kB\"";
        wrong([
            (
                "[cuda]\nlock-timeout = 10\n",
                format!("2:16: cuda.lock-timeout: invalid type: integer `10`, expected {form}"),
            ),
            (
                "[cuda]\nlock-timeout = \"10\"",
                format!(
                    "2:16: cuda.lock-timeout: the unit is missing, expected {form}, found `10`"
                ),
            ),
            (
                "cuda.init-timeout = \"soon\"",
                format!(
                    "1:21: cuda.init-timeout: it is not a number with a unit, expected {form}, \
                     found `soon`"
                ),
            ),
            (
                "cuda = { restore-timeout = \"0s\" }",
                "1:28: cuda.restore-timeout: expected a duration from 1ms to 1day, found `0s`"
                    .into(),
            ),
            (
                "[annotations]\nmax-lock-timeout = \"25h\"",
                "2:20: annotations.max-lock-timeout: expected a duration from 1ms to 1day, found \
                 `25h`"
                    .into(),
            ),
            (
                "[criu]\nghost-limit = 1048576",
                format!("2:15: criu.ghost-limit: invalid type: integer `1048576`, expected {size}"),
            ),
            (
                "[criu]\nghost-limit = \"1048576\"",
                format!(
                    "2:15: criu.ghost-limit: the unit is missing, expected {size}, found `1048576`"
                ),
            ),
            (
                "[criu]\nghost-limit = \"1 parsec\"",
                format!("2:15: criu.ghost-limit: expected {size}, found `1 parsec`"),
            ),
            (
                "[criu]\nghost-limit = \"4GiB\"",
                "2:15: criu.ghost-limit: expected a size from 1B to 4294967295B (less than 4GiB), \
                 found `4GiB`"
                    .into(),
            ),
        ]);
    }

    #[test]
    fn errors_name_place_key_and_what_is_expected() {
        wrong([
            (
                "[log]\n# ö\n  lvel = \"warn\"",
                "3:3: log.lvel: unknown field `lvel`, expected one of `directory`, `level`, `keep`"
                    .into(),
            ),
            (
                "[cuda]\ninterface = \"toggle\"",
                "2:13: cuda.interface: unknown variant `toggle`, expected one of `auto`, `library`, \
                 `utility`"
                    .into(),
            ),
            (
                "[log]\nlevel = \"loud\"",
                "2:9: log.level: unknown variant `loud`, expected one of `error`, `warn`, `info`, \
                 `debug`, `trace`"
                    .into(),
            ),
            ("[log]\nkeep = -1", "2:8: log.keep: invalid value: integer `-1`, expected u32".into()),
            (
                "[logs]",
                "1:2: logs: unknown field `logs`, expected one of `runtime`, `state`, `log`, \
                 `cuda`, `jobs`, `criu`, `cdi`, `annotations`"
                    .into(),
            ),
            (
                "[annotations]\nallow = [\"jobs\"]",
                "2:10: annotations.allow: unknown variant `jobs`, expected one of `job`, `multi-process`, \
                 `multi-gpu`, `lock-timeout`, `device-map`, `restore`"
                    .into(),
            ),
            (
                "[runtime]\npath = \"./runc\"",
                "2:8: runtime.path: expected the name of a program or an absolute path, found \
                 `./runc`"
                    .into(),
            ),
            (
                "[runtime]\npath = \"\"",
                "2:8: runtime.path: expected the name of a program or an absolute path, found ``"
                    .into(),
            ),
            (
                "[state]\ndirectory = \"run/stasis\"",
                "2:13: state.directory: expected an absolute path without `..`, found `run/stasis`"
                    .into(),
            ),
            (
                "[log]\ndirectory = \"/var/log/../stasis\"",
                "2:13: log.directory: expected an absolute path without `..`, found \
                 `/var/log/../stasis`"
                    .into(),
            ),
            (
                "[cuda]\nlibcuda = \"libcuda.so.1\"",
                "2:11: cuda.libcuda: expected an absolute path without `..`, found `libcuda.so.1`"
                    .into(),
            ),
            (
                "[cdi]\ndirectories = [\"/etc/cdi\", \"cdi\"]",
                "2:15: cdi.directories: expected an absolute path without `..`, found `cdi`".into(),
            ),
            (
                "[cdi]\nvisible-devices = \"all\"",
                "2:19: cdi.visible-devices: invalid type: string \"all\", expected a boolean"
                    .into(),
            ),
            (
                "[cuda]\ncheckpoint-timeout = \"30s\"",
                "2:22: cuda.checkpoint-timeout: expected cuda.lock-timeout (1m) to be at most \
                 cuda.checkpoint-timeout (30s)"
                    .into(),
            ),
            (
                "[cuda]\nlock-timeout = \"11m\"",
                "2:16: cuda.lock-timeout: expected cuda.lock-timeout (11m) to be at most \
                 cuda.checkpoint-timeout (10m)"
                    .into(),
            ),
        ]);
    }

    #[test]
    fn visible_devices_count_where_nvidias_runtime_gives_them() {
        for (text, counts) in [
            ("", false),
            ("runtime.path = \"nvidia-container-runtime\"", true),
            ("runtime.path = \"/usr/bin/nvidia-container-runtime.cdi\"", true),
            ("runtime.path = \"/nvidia-container-runtime/runc\"", false),
            ("cdi.visible-devices = true", true),
            ("runtime.path = \"nvidia-container-runtime\"\ncdi.visible-devices = false", false),
        ] {
            let config = parse(text).unwrap();
            assert_eq!(config.visible_devices_with(Path::new("/none")), counts, "{text}");
        }
    }

    #[test]
    fn what_nvidias_runtime_refuses_the_unprivileged_is_not_given() {
        let directory = tempfile::tempdir().unwrap();
        let nvidia = directory.path().join("config.toml");
        let config = parse("runtime.path = \"nvidia-container-runtime\"").unwrap();
        for (text, counts) in [
            ("", true),
            ("accept-nvidia-visible-devices-envvar-when-unprivileged = true", true),
            ("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n[x]\ny = 1", false),
            ("accept-nvidia-visible-devices-envvar-when-unprivileged = \"no\"", false),
            ("not toml", false),
        ] {
            std::fs::write(&nvidia, text).unwrap();
            assert_eq!(config.visible_devices_with(&nvidia), counts, "{text}");
        }
        let own = parse("cdi.visible-devices = true").unwrap();
        assert!(own.visible_devices_with(&nvidia));
    }

    #[test]
    fn text_that_is_not_toml_says_where() {
        let error = parse("[cuda]\nlock-timeout \"10s\"").unwrap_err();
        assert!(error.starts_with("configuration c.toml:2:"), "{error}");
        let error = parse("[cuda]\n[cuda]").unwrap_err();
        assert!(error.starts_with("configuration c.toml:2:"), "{error}");
        let deep = format!("x = {}", "[".repeat(100_000));
        assert!(parse(&deep).is_err());
    }

    #[test]
    fn messages_are_free_of_control_characters() {
        for text in ["[cuda]\nlibcuda = \"/a\\u001b\\n\"", "[\"\\u001b\\n\"]", "\u{1b} = 1"] {
            let error = parse(text).unwrap_err();
            assert!(!error.chars().any(char::is_control), "{error:?}");
        }
        let long = format!("[cuda]\ninit-timeout = \"{}\"", "x".repeat(1 << 19));
        assert!(parse(&long).unwrap_err().len() < 1000);
    }

    #[test]
    fn only_the_default_file_may_be_missing() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("none.toml");
        let config = |named: &str| Config::load_from(Some(named.into()), &missing);

        assert_eq!(Config::load_from(None, &missing).unwrap(), Config::default());
        assert_eq!(config("").unwrap(), Config::default());
        let error = config("/none/such.toml").unwrap_err();
        assert_eq!(error.to_string(), "cannot read the configuration /none/such.toml");
        assert!(std::error::Error::source(&error).is_some());

        let file = dir.path().join("c.toml");
        std::fs::write(&file, "runtime.path = \"crun\"").unwrap();
        let named = config(file.to_str().unwrap()).unwrap();
        assert_eq!(named.runtime.path, Path::new("crun"));
        assert_eq!(Config::load_from(None, &file).unwrap(), named);
        // A directory or a file that is not text is an error, also at the default place.
        assert!(Config::load_from(None, dir.path()).is_err());
        std::fs::write(&file, b"\xff").unwrap();
        assert!(Config::load_from(None, &file).is_err());
        std::fs::write(&file, "#".repeat((1 << 20) + 1)).unwrap();
        assert!(Config::load_from(None, &file).is_err());
    }
}
