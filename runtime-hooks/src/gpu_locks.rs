//! One restore at a time onto a GPU.
//!
//! A restore without enough GPU memory is final: what it had in host memory cannot be restored any more,
//! also when there is room again (measured on 580). So it is looked for room before. Two that look at the
//! same moment would both find it; so whoever looks and restores has the GPU's lock. What allocates
//! memory by itself asks nobody, and can still come in between.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// The locks of this host's GPUs.
pub trait GpuLocks {
    /// Takes those of all of these GPUs, by UUID; none if one of them is another's.
    fn try_lock(&self, gpus: &BTreeSet<&str>) -> io::Result<Option<Locked>>;
}

/// While it lives, nobody else restores onto the GPUs.
#[derive(Debug, Default)]
pub struct Locked {
    _files: Vec<Flock<File>>,
}

/// [`GpuLocks`] as files in the state directory. They stay behind: a lock on a removed file would exclude
/// nobody.
#[derive(Debug, Clone)]
pub struct LockFiles {
    directory: PathBuf,
}

impl LockFiles {
    /// In this state directory.
    #[must_use]
    pub fn new(state: &std::path::Path) -> Self {
        Self { directory: state.to_owned() }
    }
}

impl GpuLocks for LockFiles {
    fn try_lock(&self, gpus: &BTreeSet<&str>) -> io::Result<Option<Locked>> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        let mut files = Vec::new();
        // In order, and none is waited for.
        for gpu in gpus {
            // It comes from a manifest, perhaps.
            if !gpu.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "a GPU without a UUID"));
            }
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .custom_flags(nix::libc::O_NOFOLLOW)
                .open(self.directory.join(format!("{gpu}.gpu-lock")))?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => files.push(lock),
                Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
                Err((_, error)) => return Err(error.into()),
            }
        }
        Ok(Some(Locked { _files: files }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_a_gpu_at_a_time_and_all_or_none_of_several() {
        let state = tempfile::tempdir().unwrap();
        let locks = LockFiles::new(&state.path().join("not/there/yet"));
        let lock = |gpus: &[&str]| locks.try_lock(&gpus.iter().copied().collect()).unwrap();
        let first = lock(&["GPU-b"]).unwrap();
        assert!(lock(&["GPU-a", "GPU-b"]).is_none());
        let other = lock(&["GPU-a"]).expect("it was let go with the one that could not be had");
        drop((first, other));
        assert!(lock(&["GPU-a", "GPU-b"]).is_some());
    }

    #[test]
    fn a_name_that_is_no_uuid_is_no_file_elsewhere() {
        let state = tempfile::tempdir().unwrap();
        let locks = LockFiles::new(state.path());
        assert!(locks.try_lock(&BTreeSet::from(["../GPU-a"])).is_err());
    }
}
