//! Where libcuda and NVML are looked for.

use std::path::{Path, PathBuf};

/// Environment variable that names the libcuda to load.
pub const LIBCUDA_VARIABLE: &str = "STASIS_LIBCUDA";
/// Environment variable that names the NVML library to load.
pub const LIBNVML_VARIABLE: &str = "STASIS_LIBNVML";

const LIBCUDA: &str = "libcuda.so.1";
const LIBNVML: &str = "libnvidia-ml.so.1";

/// Driver roots and library directories outside the loader's path: the GPU operator's driver
/// container, container images and clouds that mount the driver, GKE, Debian, Fedora, WSL.
const DIRECTORIES: &[&str] = &[
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/home/kubernetes/bin/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/lib64/nvidia",
    "/usr/lib/wsl/lib",
];

/// What to try to load, in order. A configured file is the only candidate: when it does not load,
/// another driver found by chance would hide the mistake.
#[must_use]
pub fn libcuda(configured: Option<&Path>, variable: Option<PathBuf>) -> Vec<PathBuf> {
    candidates(configured, variable, LIBCUDA, None)
}

/// As [`libcuda`], for NVML; `beside` is the libcuda in use, whose directory is tried first.
#[must_use]
pub fn libnvml(
    configured: Option<&Path>,
    variable: Option<PathBuf>,
    beside: &Path,
) -> Vec<PathBuf> {
    candidates(configured, variable, LIBNVML, beside.parent().filter(|dir| dir.is_absolute()))
}

fn candidates(
    configured: Option<&Path>,
    variable: Option<PathBuf>,
    name: &str,
    first: Option<&Path>,
) -> Vec<PathBuf> {
    if let Some(path) = configured {
        return vec![path.to_owned()];
    }
    if let Some(path) = variable.filter(|path| !path.as_os_str().is_empty()) {
        return vec![path];
    }
    // A bare name makes the dynamic loader look into ldconfig's cache.
    first
        .map(|directory| directory.join(name))
        .into_iter()
        .chain([PathBuf::from(name)])
        .chain(DIRECTORIES.iter().map(|directory| Path::new(directory).join(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_configured_wins_and_is_the_only_candidate() {
        let found = libcuda(Some(Path::new("/a/libcuda.so")), Some("/b".into()));
        assert_eq!(found, [PathBuf::from("/a/libcuda.so")]);
        assert_eq!(libcuda(None, Some("/b".into())), [PathBuf::from("/b")]);
    }

    #[test]
    fn the_loader_comes_before_the_driver_roots() {
        let found = libcuda(None, Some(PathBuf::new()));
        assert_eq!(found[0], Path::new("libcuda.so.1"));
        assert!(found.contains(&"/usr/local/nvidia/lib64/libcuda.so.1".into()));
    }

    #[test]
    fn nvml_is_first_sought_beside_libcuda() {
        let found = libnvml(None, None, Path::new("/x/libcuda.so.1"));
        assert_eq!(found[0], Path::new("/x/libnvidia-ml.so.1"));
        let found = libnvml(None, None, Path::new("libcuda.so.1"));
        assert_eq!(found[0], Path::new("libnvidia-ml.so.1"));
    }
}
