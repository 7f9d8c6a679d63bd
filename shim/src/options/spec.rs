//! The little that is read of a bundle's config.json here. The rest is the runtime's.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

const FILE: &str = "config.json";

/// config.json.
#[derive(Debug, Default, Deserialize)]
pub struct Spec {
    annotations: Option<HashMap<String, Option<String>>>,
    linux: Option<Linux>,
}

#[derive(Debug, Default, Deserialize)]
struct Linux {
    #[serde(rename = "cgroupsPath")]
    cgroups_path: Option<String>,
    namespaces: Option<Vec<Namespace>>,
}

#[derive(Debug, Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    /// One to join; empty or missing: a new one.
    path: Option<String>,
}

/// config.json cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is something else.
    #[error("{} is not an OCI configuration", path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

impl Spec {
    /// Reads that of a bundle.
    pub fn read(bundle: &Path) -> Result<Self, SpecError> {
        let path = bundle.join(FILE);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(source) => return Err(SpecError::Read { path, source }),
        };
        serde_json::from_reader(BufReader::new(file))
            .map_err(|source| SpecError::Format { path, source })
    }

    /// An annotation that says something.
    #[must_use]
    pub fn annotation(&self, name: &str) -> Option<&str> {
        let value = self.annotations.as_ref()?.get(name)?.as_ref()?;
        (!value.is_empty()).then_some(value.as_str())
    }

    /// All annotations.
    pub fn annotations(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.annotations.iter().flatten();
        all.map(|(name, value)| (name.as_str(), value.as_deref().unwrap_or_default()))
    }

    /// Whether its processes are not in a pid namespace of its own, and so do not end with its
    /// init.
    #[must_use]
    pub fn shares_pids(&self) -> bool {
        let namespaces = self.linux.iter().filter_map(|linux| linux.namespaces.as_ref()).flatten();
        let own = |namespace: &Namespace| {
            namespace.kind == "pid" && namespace.path.as_ref().is_none_or(String::is_empty)
        };
        !namespaces.into_iter().any(own)
    }

    /// Whether the cgroup is one of systemd's: `slice:prefix:name`, and not a path.
    #[must_use]
    pub fn is_systemd(&self) -> bool {
        let path = self.linux.as_ref().and_then(|linux| linux.cgroups_path.as_deref());
        let path = path.unwrap_or_default();
        !path.starts_with('/') && path.split(':').count() == 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Spec, SpecError> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(FILE), text).unwrap();
        Spec::read(directory.path())
    }

    #[test]
    fn only_a_new_pid_namespace_is_its_own() {
        let table = [
            (r#"{"linux":{"namespaces":[{"type":"ipc"},{"type":"pid"}]}}"#, false),
            (r#"{"linux":{"namespaces":[{"type":"pid","path":""}]}}"#, false),
            (r#"{"linux":{"namespaces":[{"type":"pid","path":"/proc/1/ns/pid"}]}}"#, true),
            (r#"{"linux":{"namespaces":[{"type":"ipc"}]}}"#, true),
            (r#"{"linux":{"namespaces":null}}"#, true),
            ("{}", true),
        ];
        for (text, shares) in table {
            assert_eq!(read(text).unwrap().shares_pids(), shares, "{text}");
        }
    }

    #[test]
    fn cgroups_in_systemds_form_are_recognised() {
        let table = [
            ("system.slice:docker:c1", true),
            (":docker:c1", true),
            ("/default/c1", false),
            ("/a:b:c", false),
            ("default/c1", false),
            ("a:b", false),
            ("", false),
        ];
        for (path, want) in table {
            let spec = read(&format!("{{\"linux\":{{\"cgroupsPath\":\"{path}\"}}}}")).unwrap();
            assert_eq!(spec.is_systemd(), want, "{path}");
        }
        for none in ["{}", "{\"linux\":null}", "{\"linux\":{}}"] {
            assert!(!read(none).unwrap().is_systemd());
        }
    }

    #[test]
    fn one_that_is_missing_or_no_json_is_an_error_with_its_path() {
        let missing = Spec::read(Path::new("/none")).unwrap_err().to_string();
        assert_eq!(missing, "cannot read /none/config.json");
        let wrong = read("{").unwrap_err().to_string();
        assert!(wrong.ends_with("config.json is not an OCI configuration"), "{wrong}");
    }

    #[test]
    fn annotations_may_be_missing_or_empty() {
        let spec = read("{\"annotations\":{\"a\":\"1\",\"b\":\"\"},\"hooks\":{}}").unwrap();
        assert_eq!((spec.annotation("a"), spec.annotation("b")), (Some("1"), None));
        assert_eq!(read("{\"annotations\":null}").unwrap().annotation("a"), None);
    }
}
