//! All CDI devices of this host.

use std::path::{Path, PathBuf};

use super::name::DeviceName;
use super::specification::{Device, Specification};

/// More files than this in a directory are a mistake.
const MAX_FILES: usize = 1024;

/// What the directories hold.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// With the place of their directory; a higher one wins.
    specifications: Vec<(usize, Specification)>,
    /// Files that cannot be used, and why.
    pub(super) broken: Vec<(PathBuf, String)>,
    directories: Vec<PathBuf>,
}

/// A device and the file that has it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found<'a> {
    /// The file.
    pub(super) specification: &'a Specification,
    /// The device.
    pub(super) device: &'a Device,
}

impl Found<'_> {
    /// The device's full name.
    pub(super) fn name(&self) -> DeviceName {
        let (kind, device) = (self.specification.kind.clone(), self.device.name.clone());
        DeviceName { kind, device }
    }
}

impl Registry {
    /// Reads all files. One that is broken is noted and hurts nobody who does not need it.
    pub(super) fn scan(directories: &[PathBuf]) -> Self {
        let mut registry = Self { directories: directories.to_vec(), ..Self::default() };
        for (priority, directory) in directories.iter().enumerate() {
            for path in files(directory, &mut registry.broken) {
                match Specification::read(&path) {
                    Ok(found) => registry.specifications.push((priority, found)),
                    Err(reason) => registry.broken.push((path, reason)),
                }
            }
        }
        for (path, reason) in &registry.broken {
            tracing::warn!(path = %path.display(), reason, "CDI specification cannot be used");
        }
        registry
    }

    /// Finds a device. The error says why there is none.
    pub(super) fn device(&self, name: &DeviceName) -> Result<Found<'_>, String> {
        let all = self.specifications.iter().filter_map(|(priority, specification)| {
            let device = specification.devices.iter().find(|device| device.name == name.device)?;
            let found = Found { specification, device };
            (specification.kind == name.kind).then_some((*priority, found))
        });
        let all: Vec<_> = all.collect();
        let Some(best) = all.iter().map(|(priority, _)| *priority).max() else {
            let list =
                |paths: &mut dyn Iterator<Item = String>| paths.collect::<Vec<_>>().join(", ");
            let places = list(&mut self.directories.iter().map(|path| path.display().to_string()));
            let mut reason = format!("there is no CDI device {name} in {places}");
            if !self.broken.is_empty() {
                reason = format!("{reason} ({})", self.complaints());
            }
            return Err(reason);
        };
        let mut winners = all.iter().filter(|(priority, _)| *priority == best);
        match (winners.next(), winners.next()) {
            (Some((_, found)), None) => Ok(*found),
            (Some((_, one)), Some((_, other))) => Err(format!(
                "CDI device {name} stands in both {} and {}, and neither has precedence",
                one.specification.path.display(),
                other.specification.path.display()
            )),
            (None, _) => Err(format!("there is no CDI device {name}")),
        }
    }

    /// All devices that can be had by their name.
    pub(super) fn devices(&self) -> impl Iterator<Item = Found<'_>> {
        self.specifications.iter().flat_map(|(_, specification)| {
            let found = |device| Found { specification, device };
            specification.devices.iter().map(found).filter(|found| {
                self.device(&found.name()).is_ok_and(|best| std::ptr::eq(best.device, found.device))
            })
        })
    }

    /// What is wrong with the files that cannot be used, for an error.
    pub(super) fn complaints(&self) -> String {
        let shown = self.broken.iter().take(3);
        let shown: Vec<String> = shown
            .map(|(path, reason)| format!("{} cannot be used: {reason}", path.display()))
            .collect();
        shown.join("; ")
    }
}

/// The files of a directory that are specifications by their name, sorted.
fn files(directory: &Path, broken: &mut Vec<(PathBuf, String)>) -> Vec<PathBuf> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            // Most hosts have one of the directories only.
            if error.kind() != std::io::ErrorKind::NotFound {
                broken.push((directory.to_owned(), error.to_string()));
            }
            return Vec::new();
        }
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "json" || end == "yaml"))
        .take(MAX_FILES + 1)
        .collect();
    if paths.len() > MAX_FILES {
        broken.push((directory.to_owned(), format!("it has more than {MAX_FILES} files")));
        return Vec::new();
    }
    paths.sort_unstable();
    paths
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn write(directory: &Path, name: &str, kind: &str, devices: &[&str]) {
        let devices: Vec<_> =
            devices.iter().map(|name| serde_json::json!({"name": name})).collect();
        let text = serde_json::json!({"cdiVersion": "0.6.0", "kind": kind, "devices": devices});
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join(name), text.to_string()).unwrap();
    }

    fn file(registry: &Registry, name: &str) -> Result<String, String> {
        registry
            .device(&name.parse().unwrap())
            .map(|found| found.specification.path.file_name().unwrap().to_str().unwrap().to_owned())
    }

    #[test]
    fn a_later_directory_wins_and_equals_conflict() {
        let root = tempfile::tempdir().unwrap();
        let (etc, run) = (root.path().join("etc"), root.path().join("run"));
        write(&etc, "a.json", "v/c", &["0", "1"]);
        write(&etc, "b.json", "v/c", &["1", "2"]);
        write(&etc, "ignored.yml", "v/c", &["3"]);
        write(&run, "c.yaml", "v/c", &["0"]);
        let none = root.path().join("none");
        let registry = Registry::scan(&[etc.clone(), none, run]);
        assert_eq!(file(&registry, "v/c=0").unwrap(), "c.yaml");
        assert_eq!(file(&registry, "v/c=2").unwrap(), "b.json");
        let conflict = file(&registry, "v/c=1").unwrap_err();
        assert!(conflict.contains("a.json") && conflict.contains("b.json"), "{conflict}");
        assert!(file(&registry, "v/c=3").unwrap_err().contains("no CDI device v/c=3 in"));
        assert!(file(&registry, "v/d=0").is_err());
        let names: Vec<_> = registry.devices().map(|found| found.name().to_string()).collect();
        assert_eq!(names, ["v/c=2", "v/c=0"]);
        assert!(registry.broken.is_empty());
    }

    #[test]
    fn a_broken_file_is_named_only_where_something_is_missing() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "a.json", "v/c", &["0"]);
        fs::write(root.path().join("b.yaml"), "a: &a [x]\n").unwrap();
        let registry = Registry::scan(&[root.path().to_owned()]);
        assert!(file(&registry, "v/c=0").is_ok());
        let error = file(&registry, "v/c=1").unwrap_err();
        assert!(
            error.contains("b.yaml cannot be used: line 1") && error.contains("anchors"),
            "{error}"
        );
    }

    #[test]
    fn a_directory_that_is_none_is_told() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("cdi");
        fs::write(&file, "").unwrap();
        assert_eq!(Registry::scan(std::slice::from_ref(&file)).broken[0].0, file);
    }
}
