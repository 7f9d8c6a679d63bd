//! Which program the configured runtime is, and what follows from that.

use std::ffi::{OsStr, OsString};
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

/// Whose habits a runtime has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flavour {
    /// runc's; also of what stands before it under another name.
    Runc,
    /// crun's.
    Crun,
}

impl Flavour {
    /// By its name, or that of the file to which a link leads.
    pub(super) fn of(program: &Path) -> Self {
        let is_crun = |path: &Path| {
            path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("crun"))
        };
        let target = || std::fs::canonicalize(program).is_ok_and(|target| is_crun(&target));
        if is_crun(program) || (program.is_absolute() && target()) {
            Self::Crun
        } else {
            Self::Runc
        }
    }
}

/// What of the environment chooses a root directory.
struct Surroundings {
    runtime_directory: Option<PathBuf>,
    /// Whether this is root of the first user namespace, whom runc keeps to /run.
    is_first_root: bool,
    user: Option<OsString>,
}

impl Surroundings {
    fn now() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        // The first user namespace maps all ids to themselves.
        let first = std::fs::read_to_string("/proc/self/uid_map")
            .is_ok_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]));
        Self {
            runtime_directory: variable("XDG_RUNTIME_DIR").map(PathBuf::from),
            is_first_root: nix::unistd::geteuid().is_root() && first,
            user: std::env::var_os("USER"),
        }
    }

    fn runc(&self) -> PathBuf {
        let is_root = self.is_first_root
            || (nix::unistd::geteuid().is_root() && self.user.as_deref() == Some("root".as_ref()));
        let own = self.runtime_directory.as_ref().filter(|_| !is_root);
        own.map_or_else(|| "/run/runc".into(), |directory| directory.join("runc"))
    }

    fn crun(&self) -> PathBuf {
        let own = self.runtime_directory.as_ref();
        own.map_or_else(|| "/run/crun".into(), |directory| directory.join("crun"))
    }
}

/// The root directory of a runtime that is not told one.
///
/// Something of another name passes on to either: it is crun's if that has the container.
pub(super) fn default_root(program: &Path, id: &str) -> PathBuf {
    choose(&Surroundings::now(), program, id)
}

fn choose(surroundings: &Surroundings, program: &Path, id: &str) -> PathBuf {
    let (runc, crun) = (surroundings.runc(), surroundings.crun());
    if Flavour::of(program) == Flavour::Crun {
        return crun;
    }
    let is_runc = program.file_name().is_some_and(|name| name == "runc");
    if !is_runc && !runc.join(id).exists() && crun.join(id).exists() { crun } else { runc }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(directory: &Path, is_first_root: bool) -> Surroundings {
        Surroundings { runtime_directory: Some(directory.to_owned()), is_first_root, user: None }
    }

    #[test]
    fn each_has_its_root() {
        let own = tempfile::tempdir().unwrap();
        let of = |first, program| choose(&root(own.path(), first), Path::new(program), "c1");
        assert_eq!(of(true, "/usr/sbin/runc"), Path::new("/run/runc"));
        assert_eq!(of(false, "/usr/sbin/runc"), own.path().join("runc"));
        // crun asks for no more than the variable; Podman gives it, empty for root.
        assert_eq!(of(true, "/usr/bin/crun"), own.path().join("crun"));
        let none = Surroundings { runtime_directory: None, is_first_root: true, user: None };
        assert_eq!(choose(&none, Path::new("crun"), "c1"), Path::new("/run/crun"));
    }

    #[test]
    fn a_name_in_between_is_runcs_unless_crun_has_the_container() {
        let own = tempfile::tempdir().unwrap();
        let of = || {
            let program = Path::new("/usr/bin/nvidia-container-runtime");
            choose(&root(own.path(), true), program, "stasis-no-such-container")
        };
        assert_eq!(of(), Path::new("/run/runc"));
        std::fs::create_dir_all(own.path().join("crun/stasis-no-such-container")).unwrap();
        assert_eq!(of(), own.path().join("crun"));
    }

    #[test]
    fn a_link_named_runc_may_be_crun() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("crun-1.28"), directory.path().join("runc"));
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(Flavour::of(&link), Flavour::Crun);
        assert_eq!(Flavour::of(Path::new("runc")), Flavour::Runc);
        assert_eq!(Flavour::of(Path::new("crun")), Flavour::Crun);
    }

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
