//! A bundle's config.json, changed in place.
//!
//! In place, because that is where the runtime looks for it: NVIDIA's runtime does the same.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// config.json cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct ConfigFileError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// A larger one is a mistake. Environments of a megabyte were seen.
const MAX_BYTES: u64 = 64 << 20;

/// A config.json as it was found.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    /// The file itself, where config.json is a link.
    path: PathBuf,
    original: Vec<u8>,
}

impl ConfigFile {
    /// Reads that of a bundle.
    pub(crate) fn read(bundle: &Path) -> Result<(Self, Value), ConfigFileError> {
        let named = bundle.join("config.json");
        let failed = |source| ConfigFileError { action: "read", path: named.clone(), source };
        let path = fs::canonicalize(&named).map_err(failed)?;
        let mut original = Vec::new();
        let file = File::open(&path).map_err(failed)?;
        file.take(MAX_BYTES + 1).read_to_end(&mut original).map_err(failed)?;
        if u64::try_from(original.len()).is_ok_and(|length| length > MAX_BYTES) {
            let error = io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("it has more than {MAX_BYTES} bytes"),
            );
            return Err(failed(error));
        }
        let value = serde_json::from_slice(&original).map_err(|error| failed(error.into()))?;
        Ok((Self { path, original }, value))
    }

    /// Writes another text in its place.
    pub(crate) fn write(&self, value: &Value) -> Result<(), ConfigFileError> {
        self.replace(value.to_string().as_bytes())
    }

    /// Makes it what it was.
    pub(crate) fn put_back(&self) -> Result<(), ConfigFileError> {
        self.replace(&self.original)
    }

    /// At any moment there is the old file or the new one, with the same owner and mode.
    fn replace(&self, text: &[u8]) -> Result<(), ConfigFileError> {
        let name = format!(".config.json.stasis-{}", std::process::id());
        let temporary = self.path.with_file_name(name);
        let written = self.write_at(&temporary, text);
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(|source| ConfigFileError {
            action: "write",
            path: self.path.clone(),
            source,
        })
    }

    fn write_at(&self, temporary: &Path, text: &[u8]) -> io::Result<()> {
        let like = self.path.metadata()?;
        // Of a process that was killed, and whose number is this one's now.
        let _ = fs::remove_file(temporary);
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
        let own = file.metadata()?;
        if (own.uid(), own.gid()) != (like.uid(), like.gid()) {
            std::os::unix::fs::fchown(&file, Some(like.uid()), Some(like.gid()))?;
        }
        file.set_permissions(fs::Permissions::from_mode(like.mode() & 0o7777))?;
        file.write_all(text)?;
        file.sync_all()?;
        fs::rename(temporary, &self.path)?;
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        File::open(directory)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_is_replaced_and_put_back_to_the_byte() {
        let bundle = tempfile::tempdir().unwrap();
        let path = bundle.path().join("config.json");
        let text = "{\n  \"unknown\": {\"z\": 1, \"a\": [2]}\n}\n";
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let (file, mut value) = ConfigFile::read(bundle.path()).unwrap();
        value["mounts"] = json!([]);
        file.write(&value).unwrap();
        let (_, read) = ConfigFile::read(bundle.path()).unwrap();
        assert_eq!(read, json!({"unknown": {"z": 1, "a": [2]}, "mounts": []}));
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o640);
        file.put_back().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o640);
        assert_eq!(fs::read_dir(bundle.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_a_link() {
        let (bundle, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let real = elsewhere.path().join("c.json");
        fs::write(&real, "{}").unwrap();
        let link = bundle.path().join("config.json");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let (file, _) = ConfigFile::read(bundle.path()).unwrap();
        file.write(&json!({"a": 1})).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&real).unwrap(), "{\"a\":1}");
    }

    #[test]
    fn what_cannot_be_read_is_told() {
        let bundle = tempfile::tempdir().unwrap();
        let error = ConfigFile::read(bundle.path()).unwrap_err().to_string();
        assert!(error.contains("config.json"), "{error}");
        fs::write(bundle.path().join("config.json"), "{").unwrap();
        assert!(ConfigFile::read(bundle.path()).is_err());
    }
}
