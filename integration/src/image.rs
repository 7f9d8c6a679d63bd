//! The tests' container image: busybox, glibc and the workloads, without any registry.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::command;

/// Name under which the image is imported.
pub const NAME: &str = "docker.io/library/stasis-test:1";

/// NVIDIA's utility, as it is called on a host and in the image; here the emulated driver's.
pub const UTILITY: &str = "cuda-checkpoint";

/// Where the image keeps libraries, so also where a GPU's are mounted.
pub const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

const LIMIT: Duration = Duration::from_secs(60);

/// Builds the image in a directory; gives the archive for `ctr image import`.
///
/// `programs` go to /bin with the libraries that they and `libraries` need.
pub fn build(directory: &Path, programs: &[PathBuf], libraries: &[PathBuf]) -> Result<PathBuf> {
    let rootfs = directory.join("rootfs");
    for folder in ["usr/bin", "dev", "etc", "proc", "run", "sys", "tmp", "data"] {
        fs::create_dir_all(rootfs.join(folder))?;
    }
    let library_folder = rootfs.join(LIBRARIES.trim_start_matches('/'));
    fs::create_dir_all(&library_folder)?;
    fs::create_dir_all(rootfs.join("usr/lib64"))?;
    for (link, target) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        symlink(target, rootfs.join(link))?;
    }
    fs::write(rootfs.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n")?;

    let binaries = rootfs.join("usr/bin");
    fs::copy("/bin/busybox", binaries.join("busybox")).context("busybox-static is missing")?;
    let applets = command::succeed(Command::new("/bin/busybox").arg("--list"), LIMIT)?;
    for applet in applets.lines().filter(|&applet| applet != "busybox") {
        symlink("busybox", binaries.join(applet))?;
    }

    let mut needed = BTreeSet::new();
    for program in programs {
        let name = program.file_name().context("a program without a name")?;
        fs::copy(program, binaries.join(name))
            .with_context(|| format!("{} is not built", program.display()))?;
        needed.extend(needs(program)?);
    }
    for library in libraries {
        needed.extend(needs(library)?);
    }
    for library in needed {
        let name = library.file_name().context("a library without a name")?;
        let folder = if library.starts_with("/lib64") {
            rootfs.join("usr/lib64")
        } else {
            library_folder.clone()
        };
        fs::copy(&library, folder.join(name))?;
    }
    archive(directory, &rootfs)
}

/// The libraries, loader included, that ldd names.
fn needs(program: &Path) -> Result<Vec<PathBuf>> {
    let list = command::succeed(Command::new("ldd").arg(program), LIMIT)?;
    Ok(list
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect())
}

/// Packs a root file system in the format of `docker save`.
fn archive(directory: &Path, rootfs: &Path) -> Result<PathBuf> {
    let parts = directory.join("parts");
    fs::create_dir_all(&parts)?;
    let layer = parts.join("layer.tar");
    tar(rootfs, &layer)?;
    let sum = command::succeed(Command::new("sha256sum").arg(&layer), LIMIT)?;
    let digest = sum.split_whitespace().next().context("sha256sum printed nothing")?;
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": { "Env": ["PATH=/bin"], "Cmd": ["/bin/sh"] },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
    });
    fs::write(parts.join("config.json"), config.to_string())?;
    let manifest = json!([{
        "Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"],
    }]);
    fs::write(parts.join("manifest.json"), manifest.to_string())?;
    let image = directory.join("image.tar");
    tar(&parts, &image)?;
    Ok(image)
}

fn tar(folder: &Path, archive: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("--create").arg("--file").arg(archive).arg("--directory").arg(folder).arg(".");
    command::succeed(&mut tar, LIMIT).map(drop)
}
