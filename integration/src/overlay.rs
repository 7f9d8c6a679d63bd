//! A root file system of a container that it may write to, on top of one that stays as it is.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A mounted one; it is unmounted when this is dropped.
#[derive(Debug)]
pub struct Overlay {
    root: PathBuf,
}

impl Overlay {
    /// One on top of `lower`, with all that it needs in `directory`.
    pub fn mount(lower: &Path, directory: &Path) -> Result<Self> {
        let [root, upper, work] = ["rootfs", "upper", "work-of-rootfs"].map(|n| directory.join(n));
        for folder in [&root, &upper, &work] {
            fs::create_dir_all(folder)?;
        }
        let [lower, upper, work] = [lower, &upper, &work].map(Path::display);
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        mount(Some("overlay"), &root, Some("overlay"), MsFlags::empty(), Some(options.as_str()))?;
        Ok(Self { root })
    }

    /// Where it is.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = umount2(&self.root, MntFlags::MNT_DETACH);
    }
}
