//! A working copy of the image's job file in the root file system of a container that is about to be
//! restored.
//!
//! The directory is somebody else's, and the image says where to write: no link is followed, no mount
//! is crossed, and only a file like the one that the container had is replaced.

use std::fs::{File, Metadata};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use serde_json::Value;
use stasis_config::manifest::MAX_JOB_BYTES;

use super::JobError;
use crate::files::open_held;

/// What the file is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Like {
    /// Permission bits.
    pub mode: u32,
    /// Owner, as the host sees it.
    pub uid: u32,
    /// Group, as the host sees it.
    pub gid: u32,
}

impl Like {
    fn is_of(self, metadata: &Metadata) -> bool {
        let mode = metadata.mode() & 0o7777;
        self == Self { mode, uid: metadata.uid(), gid: metadata.gid() }
    }

    /// Whether the container of this config.json can have such a file at all.
    pub(super) fn check_mapping(self, config: &Value) -> Result<(), JobError> {
        for (what, id, list) in
            [("user", self.uid, "uidMappings"), ("group", self.gid, "gidMappings")]
        {
            let Some(mappings) = config["linux"][list].as_array() else { continue };
            let holds = |mapping: &Value| {
                let first = mapping["hostID"].as_u64()?;
                let size = mapping["size"].as_u64()?;
                Some((first..first.saturating_add(size)).contains(&id.into()))
            };
            if !mappings.is_empty() && !mappings.iter().any(|mapping| holds(mapping) == Some(true))
            {
                return Err(JobError::Conflict(format!(
                    "the image's job file belongs to {what} {id} of the host, which the new \
                     container's user namespace does not have"
                )));
            }
        }
        Ok(())
    }
}

/// A file that was written, and what was there before.
#[derive(Debug)]
pub(super) struct Written {
    directory: OwnedFd,
    name: String,
    like: Like,
    before: Option<Vec<u8>>,
}

impl Written {
    /// Writes `path` below `root`. At any moment there is the old file or the new one.
    pub(super) fn new(
        root: &Path,
        path: &str,
        content: &[u8],
        like: Like,
    ) -> Result<Self, JobError> {
        let failed = |source: io::Error| JobError::File {
            action: "cannot write the job file below the root file system to",
            path: path.into(),
            source,
        };
        let below = path.trim_start_matches('/');
        let (parent, name) = below.rsplit_once('/').unwrap_or((".", below));
        let parent = if parent.is_empty() { "." } else { parent };
        let directory = open_directory(root, parent).map_err(|error| failed(error.into()))?;
        let before = present(&directory, name, like).map_err(failed)?;
        replace(&directory, name, content, like).map_err(failed)?;
        Ok(Self { directory, name: name.to_owned(), like, before })
    }

    /// Makes it what it was.
    pub(super) fn put_back(self) -> io::Result<()> {
        match &self.before {
            Some(content) => replace(&self.directory, &self.name, content, self.like),
            None => Ok(rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty())?),
        }
    }
}

fn open_directory(root: &Path, parent: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty())?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(&root, parent, flags, Mode::empty(), resolve)
}

/// The content of the file that is there, if one is. Another than what the image had is an error.
fn present(directory: &OwnedFd, name: &str, like: Like) -> io::Result<Option<Vec<u8>>> {
    // Not NOFOLLOW, with which a link itself would be taken.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let held = match rustix::fs::openat2(directory, name, flags, Mode::empty(), resolve) {
        Ok(held) => File::from(held),
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Err(other("a symbolic link is there")),
        Err(error) => return Err(error.into()),
    };
    let Some(file) = open_held(&held)? else {
        return Err(other("something that is no regular file is there"));
    };
    if !like.is_of(&file.metadata()?) {
        return Err(other("a file of another owner or mode is there"));
    }
    let mut content = Vec::new();
    file.take(MAX_JOB_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_JOB_BYTES {
        return Err(other("a file that is too large for a job file is there"));
    }
    Ok(Some(content))
}

fn other(reason: &str) -> io::Error {
    io::Error::other(format!("{reason}, and not what the checkpointed container had"))
}

fn replace(directory: &OwnedFd, name: &str, content: &[u8], like: Like) -> io::Result<()> {
    let temporary = format!(".stasis-{}", std::process::id());
    let _ = rustix::fs::unlinkat(directory, &temporary, AtFlags::empty());
    let replaced = write_new(directory, &temporary, content, like).and_then(|()| {
        rustix::fs::renameat(directory, &temporary, directory, name).map_err(io::Error::from)
    });
    replaced.inspect_err(|_| {
        let _ = rustix::fs::unlinkat(directory, &temporary, AtFlags::empty());
    })
}

fn write_new(directory: &OwnedFd, name: &str, content: &[u8], like: Like) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(0o600))?;
    let (uid, gid) = (Uid::from_raw(like.uid), Gid::from_raw(like.gid));
    rustix::fs::fchown(file.as_fd(), Some(uid), Some(gid))?;
    rustix::fs::fchmod(file.as_fd(), Mode::from_raw_mode(like.mode))?;
    let mut file = File::from(file);
    file.write_all(content)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use serde_json::json;

    use super::*;
    use crate::files::make_device;

    fn like() -> Like {
        let uid = rustix::process::getuid().as_raw();
        Like { mode: 0o640, uid, gid: rustix::process::getgid().as_raw() }
    }

    fn write(root: &Path, path: &str) -> Result<Written, String> {
        Written::new(root, path, b"new", like()).map_err(|error| error.to_string())
    }

    fn old(file: &Path) {
        fs::write(file, "old").unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o640)).unwrap();
    }

    #[test]
    fn the_copy_takes_the_place_of_the_file_and_gives_it_back() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("var")).unwrap();
        for path in ["/var/job", "/job"] {
            let file = root.path().join(&path[1..]);
            let written = write(root.path(), path).unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"new");
            written.put_back().unwrap();
            assert!(!file.exists());
            old(&file);
            let written = write(root.path(), path).unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"new");
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
            written.put_back().unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"old");
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        }
        assert_eq!(fs::read_dir(root.path().join("var")).unwrap().count(), 1);
    }

    #[test]
    fn an_image_cannot_lead_it_astray() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(outside.path().join("job"), "theirs").unwrap();
        symlink(outside.path(), root.path().join("var")).unwrap();
        fs::create_dir(root.path().join("real")).unwrap();
        // Also one that leads nowhere else.
        symlink("real", root.path().join("inside")).unwrap();
        for path in ["/var/job", "/inside/job"] {
            assert!(write(root.path(), path).unwrap_err().contains(path));
        }
        fs::create_dir(root.path().join("directory")).unwrap();
        for path in ["/none/job", "/directory", "/"] {
            assert!(write(root.path(), path).is_err(), "{path}");
        }
        assert_eq!(fs::read(outside.path().join("job")).unwrap(), b"theirs");
        assert_eq!(fs::read_dir(root.path().join("real")).unwrap().count(), 0);
    }

    #[test]
    fn what_is_not_such_a_file_is_not_replaced() {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().join("job");
        let refused = |expected: &str| {
            let said = write(root.path(), "/job").unwrap_err();
            assert!(said.contains(expected), "{said}");
            fs::remove_file(&at).unwrap();
        };
        symlink("/etc/passwd", &at).unwrap();
        refused("a symbolic link is there");
        nix::unistd::mkfifo(&at, nix::sys::stat::Mode::S_IRWXU).unwrap();
        refused("no regular file is there");
        if make_device(&at) {
            // And is not opened.
            refused("no regular file is there");
        }
        old(&at);
        fs::set_permissions(&at, fs::Permissions::from_mode(0o4755)).unwrap();
        refused("of another owner or mode");
        old(&at);
        File::options().write(true).open(&at).unwrap().set_len(MAX_JOB_BYTES + 1).unwrap();
        refused("too large for a job file");
    }

    #[test]
    fn it_belongs_to_somebody_of_the_container() {
        let like = Like { mode: 0o600, uid: 5, gid: 1005 };
        let mapped = |uid: u64, gid: u64| {
            let of = |first: u64| json!([{"containerID": 0, "hostID": first, "size": 10}]);
            json!({"linux": {"uidMappings": of(uid), "gidMappings": of(gid)}})
        };
        for config in [json!({}), json!({"linux": {"uidMappings": []}}), mapped(0, 1000)] {
            like.check_mapping(&config).unwrap();
        }
        let said = like.check_mapping(&mapped(1000, 1000)).unwrap_err().to_string();
        assert!(said.contains("user 5 of the host"), "{said}");
        let said = like.check_mapping(&mapped(0, 0)).unwrap_err().to_string();
        assert!(said.contains("group 1005 of the host"), "{said}");
    }
}
