//! What was decided for a container, kept in its bundle: `options.json` and `runtime`.
//!
//! `delete` is a process of its own, which may find a bundle of containerd's own shim, and the
//! other way round: nodes are switched while containers run. So these are the files of that shim,
//! with its names. Our own key, [`Record::stasis_config`], is one that it ignores.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::spec::Spec;
use super::{ConfigSource, DEFAULT_PROGRAM, DEFAULT_ROOT, Options, OptionsError};

const OPTIONS_FILE: &str = "options.json";
const RUNTIME_FILE: &str = "runtime";
const CONFIG_FILE: &str = "stasis.toml";

/// What remains to be decided when a container is created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// Whether cgroups are systemd's.
    pub systemd_cgroup: bool,
    /// The configuration file for this container; `None`: this host's.
    pub config: Option<PathBuf>,
}

/// What `delete` finds in a bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// The runtime.
    pub program: PathBuf,
    /// Its root directory, without the namespace.
    pub root: PathBuf,
    /// The configuration file of this container; `None`: this host's.
    pub config: Option<PathBuf>,
}

/// options.json. Go leaves out what is empty, and we ignore what we do not know.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Record {
    #[serde(skip_serializing_if = "is_default")]
    no_pivot_root: bool,
    #[serde(skip_serializing_if = "is_default")]
    no_new_keyring: bool,
    #[serde(skip_serializing_if = "is_default")]
    shim_cgroup: PathBuf,
    #[serde(skip_serializing_if = "is_default")]
    io_uid: u32,
    #[serde(skip_serializing_if = "is_default")]
    io_gid: u32,
    #[serde(skip_serializing_if = "is_default")]
    binary_name: PathBuf,
    #[serde(skip_serializing_if = "is_default")]
    root: PathBuf,
    #[serde(skip_serializing_if = "is_default")]
    systemd_cgroup: bool,
    #[serde(skip_serializing_if = "is_default")]
    criu_image_path: PathBuf,
    #[serde(skip_serializing_if = "is_default")]
    criu_work_path: PathBuf,
    #[serde(skip_serializing_if = "is_default")]
    stasis_config: PathBuf,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Options {
    /// Decides what is open, and keeps all of it in the bundle for `delete`.
    ///
    /// The engine is a process of its own, so a configuration that came as text becomes a file.
    pub fn settle(&self, bundle: &Path) -> Result<Settled, OptionsError> {
        let systemd_cgroup = match self.systemd_cgroup {
            Some(said) => said,
            None => Spec::read(bundle)?.is_systemd(),
        };
        let config = match &self.config {
            None => None,
            Some(ConfigSource::File(path)) => Some(path.clone()),
            Some(ConfigSource::Text(text)) => {
                let path = bundle.join(CONFIG_FILE);
                write(&path, text.as_bytes())?;
                Some(path)
            }
        };
        let record = Record {
            no_pivot_root: self.no_pivot_root,
            no_new_keyring: self.no_new_keyring,
            shim_cgroup: self.shim_cgroup.clone().unwrap_or_default(),
            io_uid: self.io_uid,
            io_gid: self.io_gid,
            binary_name: self.program.clone(),
            root: self.root.clone(),
            systemd_cgroup,
            criu_image_path: self.criu_image_path.clone().unwrap_or_default(),
            criu_work_path: self.criu_work_path.clone().unwrap_or_default(),
            stasis_config: config.clone().unwrap_or_default(),
        };
        let path = bundle.join(OPTIONS_FILE);
        let text = serde_json::to_vec(&record)
            .map_err(|source| OptionsError::Format { path: path.clone(), source })?;
        write(&path, &text)?;
        let program = self.program.to_string_lossy();
        write(&bundle.join(RUNTIME_FILE), program.as_bytes())?;
        Ok(Settled { systemd_cgroup, config })
    }
}

impl Recorded {
    /// Reads a bundle. Files that are missing stand for the defaults: `delete` also comes for a
    /// container that was never created.
    pub fn read(bundle: &Path) -> Result<Self, OptionsError> {
        let path = bundle.join(OPTIONS_FILE);
        let record = match read(&path)? {
            None => Record::default(),
            // Deleting from a root that is a guess could leave the container running unseen.
            Some(text) => serde_json::from_slice(&text)
                .map_err(|source| OptionsError::Format { path, source })?,
        };
        let runtime = read(&bundle.join(RUNTIME_FILE))?.unwrap_or_default();
        let runtime = PathBuf::from(String::from_utf8_lossy(&runtime).into_owned());
        let some = |path: PathBuf| (!path.as_os_str().is_empty()).then_some(path);
        Ok(Self {
            program: some(runtime)
                .or(some(record.binary_name))
                .unwrap_or_else(|| DEFAULT_PROGRAM.into()),
            root: some(record.root).unwrap_or_else(|| DEFAULT_ROOT.into()),
            config: some(record.stasis_config),
        })
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, OptionsError> {
    match fs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(OptionsError::File { path: path.to_owned(), source }),
    }
}

/// Whole or not at all, for the owner only.
fn write(path: &Path, content: &[u8]) -> Result<(), OptionsError> {
    replace(path, content, 0o600)
        .map_err(|source| OptionsError::File { path: path.to_owned(), source })
}

/// Replaces a file by one with this content: nobody reads half of it. Not synced: the bundle does
/// not outlive this boot.
pub(crate) fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}", std::process::id()));
    let temporary = path.with_file_name(hidden);
    let written = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&temporary)
        .and_then(|mut file| {
            // Whatever the umask is: Go's shim reads it too.
            file.set_permissions(fs::Permissions::from_mode(mode))?;
            file.write_all(content)
        })
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // A full file system; the error is the first one.
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            program: "/opt/runc".into(),
            root: "/run/r".into(),
            systemd_cgroup: None,
            no_pivot_root: false,
            no_new_keyring: true,
            shim_cgroup: None,
            io_uid: 7,
            io_gid: 0,
            criu_image_path: None,
            criu_work_path: None,
            config: None,
        }
    }

    fn bundle(cgroup: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let spec = format!("{{\"linux\":{{\"cgroupsPath\":\"{cgroup}\"}}}}");
        fs::write(directory.path().join("config.json"), spec).unwrap();
        directory
    }

    #[test]
    fn what_is_settled_is_found_again_and_is_what_gos_shim_writes() {
        let bundle = bundle("s.slice:cri:c1");
        let settled = options().settle(bundle.path()).unwrap();
        assert_eq!(settled, Settled { systemd_cgroup: true, config: None });
        let text = fs::read_to_string(bundle.path().join("options.json")).unwrap();
        assert_eq!(
            text,
            r#"{"no_new_keyring":true,"io_uid":7,"binary_name":"/opt/runc","root":"/run/r","systemd_cgroup":true}"#
        );
        assert_eq!(fs::read_to_string(bundle.path().join("runtime")).unwrap(), "/opt/runc");
        let mode = fs::metadata(bundle.path().join("options.json")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let recorded = Recorded::read(bundle.path()).unwrap();
        let want = Recorded { program: "/opt/runc".into(), root: "/run/r".into(), config: None };
        assert_eq!(recorded, want);
        assert_eq!(fs::read_dir(bundle.path()).unwrap().count(), 3);
    }

    #[test]
    fn what_the_options_say_about_systemd_needs_no_spec() {
        let directory = tempfile::tempdir().unwrap();
        let said = Options { systemd_cgroup: Some(false), ..options() };
        assert!(!said.settle(directory.path()).unwrap().systemd_cgroup);
        assert!(options().settle(directory.path()).is_err());
    }

    #[test]
    fn a_configuration_that_came_as_text_becomes_a_file() {
        let bundle = bundle("/c1");
        let text = "[cuda]\nlock-timeout = \"1s\"\n".to_owned();
        let options = Options { config: Some(ConfigSource::Text(text.clone())), ..options() };
        let path = bundle.path().join("stasis.toml");
        let settled = options.settle(bundle.path()).unwrap();
        assert_eq!(settled, Settled { systemd_cgroup: false, config: Some(path.clone()) });
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(Recorded::read(bundle.path()).unwrap().config, Some(path));

        let file = Some(ConfigSource::File("/etc/x.toml".into()));
        let options = Options { config: file, ..options };
        assert_eq!(options.settle(bundle.path()).unwrap().config, Some("/etc/x.toml".into()));
    }

    #[test]
    fn a_bundle_of_gos_shim_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let recorded = |options: &str, runtime: Option<&str>| {
            fs::write(directory.path().join("options.json"), options).unwrap();
            let _ = fs::remove_file(directory.path().join("runtime"));
            if let Some(runtime) = runtime {
                fs::write(directory.path().join("runtime"), runtime).unwrap();
            }
            Recorded::read(directory.path()).map(|recorded| (recorded.program, recorded.root))
        };
        let default_root = PathBuf::from(DEFAULT_ROOT);
        assert_eq!(recorded("{}", Some("")).unwrap(), ("runc".into(), default_root.clone()));
        assert_eq!(
            recorded(r#"{"binary_name":"crun","criu_path":"/x","task_api_version":3}"#, None)
                .unwrap(),
            ("crun".into(), default_root.clone())
        );
        assert_eq!(
            recorded(r#"{"root":"/r","systemd_cgroup":true}"#, Some("/usr/bin/kata")).unwrap(),
            ("/usr/bin/kata".into(), "/r".into())
        );
        let error = recorded("{", None).unwrap_err().to_string();
        assert!(error.contains("options.json"), "{error}");
        let nothing = Recorded::read(Path::new("/none")).unwrap();
        assert_eq!((nothing.program, nothing.root), ("runc".into(), default_root));
    }
}
