//! Which program the configured runtime is.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// Finds the runtime: a path, or a name in PATH. This program itself is refused, since it would
/// execute itself for ever.
pub(super) fn runtime(configured: &Path) -> anyhow::Result<PathBuf> {
    let advice = "set runtime.path in config.toml";
    let found = if configured.is_absolute() {
        configured.to_owned()
    } else {
        // Callers with a bare environment (Podman's) have at least PATH or get the usual one.
        let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
        std::env::split_paths(&path)
            .map(|directory| directory.join(configured))
            .find(|candidate| is_executable(candidate))
            .with_context(|| {
                format!("stasis: runtime {} is not in PATH; {advice}", configured.display())
            })?
    };
    let own = std::fs::metadata("/proc/self/exe").context("stasis: no /proc")?;
    let other = std::fs::metadata(&found)
        .with_context(|| format!("stasis: runtime {}; {advice}", found.display()))?;
    if (own.dev(), own.ino()) == (other.dev(), other.ino()) {
        bail!("stasis: runtime {} is stasis-runc itself; {advice}", found.display());
    }
    Ok(found)
}

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn is_executable(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_up_and_paths_are_taken() {
        assert!(runtime(Path::new("sh")).unwrap().is_absolute());
        assert_eq!(runtime(Path::new("/bin/sh")).unwrap(), Path::new("/bin/sh"));
        let error = runtime(Path::new("no-such-runtime")).unwrap_err();
        assert!(format!("{error:#}").contains("runtime.path"));
    }

    #[test]
    fn itself_is_refused() {
        let own = std::env::current_exe().unwrap();
        let error = runtime(&own).unwrap_err().to_string();
        assert!(error.contains("itself"), "{error}");
    }
}
