//! The options of one container: which OCI runtime runs it, and how.
//!
//! They come as a protobuf `Any`, of one of two types, depending only on the name under which
//! containerd knows us: as `io.containerd.runc.v2` we get runc's own options, as anything else
//! CRI and Docker send `runtimeoptions.v1.Options`, which hold a text or the path of a file.
//! Nothing at all comes too, and stands for the defaults.
//!
//! What was decided is kept in the bundle, in the files of containerd's own shim: see [`record`].

mod body;
pub mod record;
pub mod spec;

use std::path::{Component, Path, PathBuf};

use containerd_shim::api::Options as RuncOptions;
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{self, CodedInputStream, Message as _, rt};
use stasis_config::text::printable;
use stasis_config::{Config, ConfigError};

pub use record::{Recorded, Settled};
use spec::SpecError;

/// Where the runtime keeps its state, below it a directory for each namespace.
pub const DEFAULT_ROOT: &str = "/run/containerd/runc";

/// The runtime, where neither the options nor the configuration name one.
pub const DEFAULT_PROGRAM: &str = "runc";

const RUNC_TYPE: &str = "containerd.runc.v1.Options";
const GENERIC_TYPE: &str = "runtimeoptions.v1.Options";
/// The package's name before containerd took it over from CRI.
const GENERIC_OLD_TYPE: &str = "cri.runtimeoptions.v1.Options";

/// What a container's creator decides about its runtime. All of it is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The runtime: a name that is looked up in PATH, or an absolute path.
    pub program: PathBuf,
    /// Its root directory, without the namespace.
    pub root: PathBuf,
    /// Whether cgroups are systemd's; `None` if nobody said: [`Options::settle`] finds out.
    pub systemd_cgroup: Option<bool>,
    /// `--no-pivot`.
    pub no_pivot_root: bool,
    /// `--no-new-keyring`.
    pub no_new_keyring: bool,
    /// The cgroup that the shim itself is put into.
    pub shim_cgroup: Option<PathBuf>,
    /// Owner of the pipes that are the container's standard descriptors.
    pub io_uid: u32,
    /// Their group.
    pub io_gid: u32,
    /// A checkpoint to create the container from.
    pub criu_image_path: Option<PathBuf>,
    /// Where CRIU works and logs.
    pub criu_work_path: Option<PathBuf>,
    /// A configuration of Stasis instead of this host's, for this container.
    pub config: Option<ConfigSource>,
}

/// Where a container's own configuration of Stasis is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigSource {
    /// In this file.
    File(PathBuf),
    /// This is it.
    Text(String),
}

/// Why options cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    /// Somebody else's.
    #[error(
        "runtime options of the unknown type `{}`, expected {RUNC_TYPE} or {GENERIC_TYPE}",
        printable(.0, 128)
    )]
    UnknownType(String),
    /// Not what the type says.
    #[error("runtime options that are not {of_type}")]
    Malformed {
        /// The type.
        of_type: &'static str,
        /// What is wrong with them.
        source: protobuf::Error,
    },
    /// A value cannot be meant.
    #[error("runtime option {}", .0)]
    Value(BadValue),
    /// The body, the file that is named, or this host's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The bundle's config.json.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A file in the bundle.
    #[error("cannot use {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file in the bundle that says something else than expected.
    #[error("cannot make sense of {}", path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

/// A value that cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{option}: {reason}")]
pub struct BadValue {
    /// As it is written in containerd's config.toml.
    pub option: &'static str,
    /// What was found and what is expected.
    pub reason: String,
}

impl Options {
    /// Decodes what containerd sent.
    pub fn decode(options: Option<&Any>) -> Result<Self, OptionsError> {
        Self::decode_on(options, Config::load)
    }

    fn decode_on(
        options: Option<&Any>,
        host: impl FnOnce() -> Result<Config, ConfigError>,
    ) -> Result<Self, OptionsError> {
        let given = match options {
            Some(any) => Given::decode(any)?,
            None => Given::default(),
        };
        given.checked(host)
    }
}

/// Whether an `Any` of this type holds runtime options. The bootstrap protocol sends them among
/// other things.
#[must_use]
pub fn is_options(type_url: &str) -> bool {
    matches!(message_name(type_url), RUNC_TYPE | GENERIC_TYPE | GENERIC_OLD_TYPE)
}

/// containerd's typeurl writes a message's name alone, protobuf libraries put a host before it.
fn message_name(type_url: &str) -> &str {
    type_url.rsplit('/').next().unwrap_or_default()
}

/// Options as they came.
#[derive(Debug, Default)]
struct Given {
    runc: RuncOptions,
    /// Apart, because a protobuf message cannot leave it open.
    systemd_cgroup: Option<bool>,
    config: Option<(ConfigSource, Config)>,
}

impl Given {
    fn decode(any: &Any) -> Result<Self, OptionsError> {
        match message_name(&any.type_url) {
            RUNC_TYPE => {
                let runc = RuncOptions::parse_from_bytes(&any.value)
                    .map_err(|source| OptionsError::Malformed { of_type: RUNC_TYPE, source })?;
                // A message in which nothing is set says nothing about cgroups either.
                let systemd_cgroup = (!any.value.is_empty()).then_some(runc.systemd_cgroup);
                Ok(Self { runc, systemd_cgroup, config: None })
            }
            GENERIC_TYPE | GENERIC_OLD_TYPE => {
                let generic = Generic::decode(&any.value)
                    .map_err(|source| OptionsError::Malformed { of_type: GENERIC_TYPE, source })?;
                // The order of containerd's documentation.
                if generic.config_path.is_empty() {
                    body::parse(&generic.config_body)
                } else {
                    Self::from_file(&generic.config_path)
                }
            }
            "" if any.value.is_empty() => Ok(Self::default()),
            _ => Err(OptionsError::UnknownType(any.type_url.clone())),
        }
    }

    /// Only a configuration of Stasis: containerd passes nothing else on beside a `ConfigPath`.
    fn from_file(path: &str) -> Result<Self, OptionsError> {
        let Some(path) = absolute("ConfigPath", path).map_err(OptionsError::Value)? else {
            return Ok(Self::default());
        };
        let config = Config::from_file(&path)?;
        Ok(Self { config: Some((ConfigSource::File(path), config)), ..Self::default() })
    }

    /// Checks everything that does not need the configuration.
    fn check(&self) -> Result<Checked, BadValue> {
        let runc = &self.runc;
        Ok(Checked {
            program: program("BinaryName", &runc.binary_name)?,
            root: absolute("Root", &runc.root)?,
            shim_cgroup: without_parents("ShimCgroup", &runc.shim_cgroup)?,
            criu_image_path: absolute("CriuImagePath", &runc.criu_image_path)?,
            criu_work_path: absolute("CriuWorkPath", &runc.criu_work_path)?,
        })
    }

    fn checked(
        self,
        host: impl FnOnce() -> Result<Config, ConfigError>,
    ) -> Result<Options, OptionsError> {
        let checked = self.check().map_err(OptionsError::Value)?;
        let program = match (checked.program, &self.config) {
            (Some(program), _) => program,
            (None, Some((_, config))) => config.runtime.path.clone(),
            (None, None) => host()?.runtime.path,
        };
        Ok(Options {
            program,
            root: checked.root.unwrap_or_else(|| DEFAULT_ROOT.into()),
            systemd_cgroup: self.systemd_cgroup,
            no_pivot_root: self.runc.no_pivot_root,
            no_new_keyring: self.runc.no_new_keyring,
            shim_cgroup: checked.shim_cgroup,
            io_uid: self.runc.io_uid,
            io_gid: self.runc.io_gid,
            criu_image_path: checked.criu_image_path,
            criu_work_path: checked.criu_work_path,
            config: self.config.map(|(source, _)| source),
        })
    }
}

struct Checked {
    program: Option<PathBuf>,
    root: Option<PathBuf>,
    shim_cgroup: Option<PathBuf>,
    criu_image_path: Option<PathBuf>,
    criu_work_path: Option<PathBuf>,
}

fn absolute(option: &'static str, text: &str) -> Result<Option<PathBuf>, BadValue> {
    match without_parents(option, text)? {
        Some(path) if !path.is_absolute() => {
            let found = printable(text, 64);
            let reason = format!("expected an absolute path without `..`, found `{found}`");
            Err(BadValue { option, reason })
        }
        path => Ok(path),
    }
}

fn without_parents(option: &'static str, text: &str) -> Result<Option<PathBuf>, BadValue> {
    let path = Path::new(text);
    if text.chars().any(char::is_control) || path.components().any(|c| c == Component::ParentDir) {
        let found = printable(text, 64);
        return Err(BadValue {
            option,
            reason: format!("expected a path without `..`, found `{found}`"),
        });
    }
    Ok((!text.is_empty()).then(|| path.to_owned()))
}

fn program(option: &'static str, text: &str) -> Result<Option<PathBuf>, BadValue> {
    match without_parents(option, text)? {
        Some(path) if path.is_absolute() => Ok(Some(path)),
        Some(path) if !text.contains('/') && text != "." => Ok(Some(path)),
        None => Ok(None),
        Some(_) => Err(BadValue {
            option,
            reason: format!(
                "expected the name of a program or an absolute path, found `{}`",
                printable(text, 64)
            ),
        }),
    }
}

/// `runtimeoptions.v1.Options`, which containerd's crate does not have.
#[derive(Debug, Default)]
struct Generic {
    config_path: String,
    config_body: Vec<u8>,
}

impl Generic {
    fn decode(bytes: &[u8]) -> protobuf::Result<Self> {
        const CONFIG_PATH: u32 = 2 << 3 | LENGTH_DELIMITED;
        const CONFIG_BODY: u32 = 3 << 3 | LENGTH_DELIMITED;
        const LENGTH_DELIMITED: u32 = 2;

        let mut options = Self::default();
        let mut stream = CodedInputStream::from_bytes(bytes);
        while let Some(tag) = stream.read_raw_tag_or_eof()? {
            match tag {
                CONFIG_PATH => options.config_path = stream.read_string()?,
                CONFIG_BODY => options.config_body = stream.read_bytes()?,
                // 1, type_url, is the content's type for runtimes that have several.
                tag => rt::skip_field_for_tag(tag, &mut stream)?,
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with these fields, all of them text.
    fn message(fields: &[(u32, &str)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut stream = protobuf::CodedOutputStream::vec(&mut bytes);
        for (number, text) in fields {
            stream.write_string(*number, text).unwrap();
        }
        stream.flush().unwrap();
        drop(stream);
        bytes
    }

    fn any(type_url: &str, value: Vec<u8>) -> Any {
        Any { type_url: type_url.into(), value, ..Any::default() }
    }

    fn runc(options: &RuncOptions) -> Any {
        any(RUNC_TYPE, options.write_to_bytes().unwrap())
    }

    fn body(text: &str) -> Any {
        any(GENERIC_TYPE, message(&[(3, text)]))
    }

    /// On a host without a configuration.
    fn decode(options: Option<&Any>) -> Result<Options, String> {
        Options::decode_on(options, || Ok(Config::default())).map_err(|error| error.to_string())
    }

    fn defaults() -> Options {
        decode(None).unwrap()
    }

    #[test]
    fn nothing_means_the_defaults() {
        let nothing = Options {
            program: "runc".into(),
            root: "/run/containerd/runc".into(),
            systemd_cgroup: None,
            no_pivot_root: false,
            no_new_keyring: false,
            shim_cgroup: None,
            io_uid: 0,
            io_gid: 0,
            criu_image_path: None,
            criu_work_path: None,
            config: None,
        };
        assert_eq!(defaults(), nothing);
        for options in [
            Any::default(),
            any(RUNC_TYPE, vec![]),
            any(GENERIC_TYPE, vec![]),
            any(GENERIC_TYPE, message(&[(1, "some.type")])),
            body(""),
            body("# nothing\n"),
            body("BinaryName = ''\nRoot = \"\"\nConfigPath = ''\nTypeUrl = 'x'"),
        ] {
            assert_eq!(decode(Some(&options)), Ok(nothing.clone()), "{options:?}");
        }
    }

    #[test]
    fn runcs_options_are_taken_with_and_without_a_host_in_the_type() {
        let options = RuncOptions {
            no_pivot_root: true,
            no_new_keyring: true,
            shim_cgroup: "/shims".into(),
            io_uid: 1000,
            io_gid: 1001,
            binary_name: "/usr/bin/nvidia-container-runtime".into(),
            root: "/run/r".into(),
            systemd_cgroup: true,
            criu_image_path: "/i".into(),
            criu_work_path: "/w".into(),
            task_api_address: "ttrpc+unix:///x".into(),
            ..RuncOptions::default()
        };
        let want = Options {
            program: "/usr/bin/nvidia-container-runtime".into(),
            root: "/run/r".into(),
            systemd_cgroup: Some(true),
            no_pivot_root: true,
            no_new_keyring: true,
            shim_cgroup: Some("/shims".into()),
            io_uid: 1000,
            io_gid: 1001,
            criu_image_path: Some("/i".into()),
            criu_work_path: Some("/w".into()),
            config: None,
        };
        let mut any = runc(&options);
        assert_eq!(decode(Some(&any)).as_ref(), Ok(&want));
        any.type_url = format!("type.googleapis.com/{RUNC_TYPE}");
        assert_eq!(decode(Some(&any)), Ok(want));
    }

    #[test]
    fn a_message_of_runcs_that_says_something_has_also_said_no_to_systemd() {
        let options = RuncOptions { io_uid: 1, ..RuncOptions::default() };
        assert_eq!(decode(Some(&runc(&options))).unwrap().systemd_cgroup, Some(false));
    }

    #[test]
    fn other_types_are_named() {
        for (type_url, value) in
            [("containerd.linux.runc.Hyper", vec![]), ("", vec![1]), ("a/\u{1b}b", vec![])]
        {
            let error = decode(Some(&any(type_url, value))).unwrap_err();
            assert!(error.contains(&type_url.escape_debug().to_string()), "{error}");
            assert!(error.contains("runtimeoptions.v1.Options"), "{error}");
            assert!(!error.chars().any(char::is_control), "{error}");
        }
        for of_type in [RUNC_TYPE, GENERIC_TYPE] {
            let error = decode(Some(&any(of_type, vec![0xff]))).unwrap_err();
            assert_eq!(error, format!("runtime options that are not {of_type}"));
        }
    }

    #[test]
    fn values_that_lead_elsewhere_are_refused() {
        let table = [
            (
                RuncOptions { root: "run/r".into(), ..RuncOptions::default() },
                "Root: expected an absolute path",
            ),
            (
                RuncOptions { root: "/run/../etc".into(), ..RuncOptions::default() },
                "Root: expected a path without `..`",
            ),
            (
                RuncOptions { binary_name: "./runc".into(), ..RuncOptions::default() },
                "BinaryName: expected the name",
            ),
            (
                RuncOptions { binary_name: "a/b".into(), ..RuncOptions::default() },
                "BinaryName: expected the name",
            ),
            (
                RuncOptions { binary_name: "a\nb".into(), ..RuncOptions::default() },
                "BinaryName: expected a path",
            ),
            (
                RuncOptions { shim_cgroup: "/a/../../b".into(), ..RuncOptions::default() },
                "ShimCgroup: expected a path",
            ),
            (
                RuncOptions { criu_work_path: "w".into(), ..RuncOptions::default() },
                "CriuWorkPath: expected an absolute",
            ),
            (
                RuncOptions { criu_image_path: "w".into(), ..RuncOptions::default() },
                "CriuImagePath: expected an absolute",
            ),
        ];
        for (options, want) in table {
            let error = decode(Some(&runc(&options))).unwrap_err();
            assert!(error.starts_with(&format!("runtime option {want}")), "{error}");
        }
    }

    #[test]
    fn a_body_holds_runcs_options_in_any_case_and_stasis_tables() {
        let both = decode(Some(&body(
            "BinaryName = '/opt/runc'\nsystemdcgroup = true # here\nIOUID = 1_000\n\
             [runtime]\npath = \"crun\"\n[cuda]\nlock-timeout = \"5s\"\n",
        )))
        .unwrap();
        assert_eq!(both.program, Path::new("/opt/runc"));
        assert_eq!((both.systemd_cgroup, both.io_uid), (Some(true), 1000));
        let Some(ConfigSource::Text(text)) = both.config else { panic!("{both:?}") };
        let config = Config::parse(&text, Path::new("x")).unwrap();
        assert_eq!(config.cuda.lock_timeout, std::time::Duration::from_secs(5));

        let tables = decode(Some(&body("[runtime]\npath = \"crun\"\n"))).unwrap();
        assert_eq!(tables.program, Path::new("crun"));
    }

    #[test]
    fn a_body_of_runcs_options_alone_leaves_the_hosts_configuration() {
        let host = || Config::parse("runtime.path = \"/opt/crun\"", Path::new("c.toml"));
        let options = Options::decode_on(Some(&body("SystemdCgroup = false")), host).unwrap();
        assert_eq!(options.program, Path::new("/opt/crun"));
        assert_eq!((options.systemd_cgroup, options.config), (Some(false), None));
    }

    #[test]
    fn errors_in_a_body_name_place_and_key() {
        let table = [
            ("BinaryNme = 'x'", "1:1: BinaryNme: unknown option, expected one of `NoPivotRoot`"),
            ("Root = 1", "1:8: Root: expected a string, found integer"),
            (
                "\nSystemdCgroup = 'yes'",
                "2:17: SystemdCgroup: expected true or false, found string",
            ),
            ("IoUid = -1", "1:9: IoUid: expected a number from 0 to 4294967295"),
            ("IoUid = 4294967296", "1:9: IoUid: expected a number from 0 to 4294967295"),
            ("Root = '/r'\nroot = '/s'", "2:1: root: the same option twice"),
            (
                "IoUid = 1\nRoot = 'r'",
                "2:8: Root: expected an absolute path without `..`, found `r`",
            ),
            ("Root.x = 1", "1:"),
            ("Root = '/r'\n[cuda]\nlock-timeout = 3", "3:16: cuda.lock-timeout: invalid type"),
            (
                "Root = '''\n/ö'''\n[logs]",
                "3:2: logs: unknown field `logs`, expected one of `runtime`",
            ),
            ("not toml", "1:"),
            ("ConfigPath = '/x'\n[log]\nkeep = 1", "1:14: ConfigPath: not together with tables"),
        ];
        for (text, want) in table {
            let error = decode(Some(&body(text))).unwrap_err();
            let want = format!("configuration runtime-options:{want}");
            assert!(error.starts_with(&want), "{text}: {error}, not {want}");
        }
        let error = decode(Some(&any(GENERIC_TYPE, vec![3 << 3 | 2, 1, 0xff]))).unwrap_err();
        assert!(error.contains("not UTF-8"), "{error}");
    }

    #[test]
    fn a_config_path_is_stasis_configuration() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.toml");
        let options = |path: &Path| {
            let text = path.to_str().unwrap();
            let whole = message(&[(2, text), (3, "BinaryName = 'ignored'")]);
            decode(Some(&any("type.googleapis.com/cri.runtimeoptions.v1.Options", whole)))
        };
        let error = options(&path).unwrap_err();
        assert_eq!(error, format!("cannot read the configuration {}", path.display()));
        std::fs::write(&path, "[runtime]\npath = \"crun\"").unwrap();
        let found = options(&path).unwrap();
        assert_eq!(found.program, Path::new("crun"));
        assert_eq!(found.config, Some(ConfigSource::File(path.clone())));
        // Where containerd did not recognise its own key, we do.
        let text = format!("configpath = '{}'\nSystemdCgroup = true", path.display());
        let found = decode(Some(&body(&text))).unwrap();
        assert_eq!(found.config, Some(ConfigSource::File(path.clone())));
        assert_eq!(
            (found.program.as_path(), found.systemd_cgroup),
            (Path::new("crun"), Some(true))
        );

        std::fs::write(&path, "BinaryName = 'x'").unwrap();
        assert!(options(&path).unwrap_err().contains("c.toml:1:1: BinaryName"));
        assert!(options(Path::new("c.toml")).unwrap_err().contains("ConfigPath: expected an abs"));
    }
}
