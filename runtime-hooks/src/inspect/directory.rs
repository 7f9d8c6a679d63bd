//! An image in a directory: the one of `--image-path`, of Docker's checkpoint, or the one above it.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{FileStat, Mode, fstatat};
use stasis_config::manifest::{JOB_FILE, MANIFEST_FILE};
use stasis_config::{Manifest, ManifestError};

use super::source::{List, Source, Unfit, Usage};
use crate::files::open_held;
use crate::image;

/// How many files are counted at most, and how deep. CRIU writes some for each process, flat; Docker
/// has a directory or two of its own beside them.
const MAX_FILES: u64 = 1 << 20;
const MAX_DEPTH: usize = 8;

/// An open image directory.
pub(super) struct Directory {
    path: PathBuf,
    open: OwnedFd,
}

impl Directory {
    /// Opens the image that `path` is, or the only one right below it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let this = Self::open_this(path.to_owned())?;
        if this.is_image() {
            return Ok(this);
        }
        let mut below = this.images_below()?;
        match below.len() {
            0 => Ok(this),
            1 => Ok(below.remove(0)),
            _ => {
                let mut names: Vec<_> =
                    below.iter().filter_map(|image| image.path.file_name()?.to_str()).collect();
                names.sort_unstable();
                let names = names.join(", ");
                Err(io::Error::other(format!("there are several images in it: {names}")))
            }
        }
    }

    fn open_this(path: PathBuf) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let open = open(&path, flags, Mode::empty())?;
        Ok(Self { path, open })
    }

    /// Which one was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// There is something in it that an image has.
    fn is_image(&self) -> bool {
        [MANIFEST_FILE, List::Inventory.name(), List::Files.name()]
            .into_iter()
            .any(|name| look(&self.open, name).is_ok())
    }

    /// Docker keeps the checkpoints of a container in one directory, Podman has `checkpoint` in its
    /// bundle.
    fn images_below(&self) -> io::Result<Vec<Self>> {
        let mut below = Vec::new();
        for entry in
            fs::read_dir(&self.path)?.take(usize::try_from(MAX_FILES).unwrap_or(usize::MAX))
        {
            let entry = entry?;
            // A link leads elsewhere.
            if entry.file_type()?.is_dir() {
                below.extend(Self::open_this(entry.path()).ok().filter(Self::is_image));
            }
        }
        Ok(below)
    }

    fn read(&self, name: &str) -> Result<File, Unfit> {
        regular(&self.open, name)
    }
}

impl Source for Directory {
    fn list(&self, list: List) -> Result<(), Unfit> {
        match self.read(list.name())?.metadata() {
            Ok(metadata) if metadata.len() <= list.max() => Ok(()),
            Ok(metadata) => Err(Unfit::TooLarge(metadata.len())),
            Err(error) => Err(Unfit::Unreadable(error)),
        }
    }

    fn names(&self, list: List) -> bool {
        self.read(list.name())
            .ok()
            .and_then(|file| image::contains(file.take(list.max()), list.needle()).ok())
            .unwrap_or(false)
    }

    fn has_manifest(&self) -> bool {
        !matches!(look(&self.open, MANIFEST_FILE), Err(Errno::ENOENT))
    }

    fn manifest(&self) -> Result<Option<Manifest>, ManifestError> {
        Manifest::read(&self.path)
    }

    fn job(&self, most: u64) -> Result<Vec<u8>, Unfit> {
        let mut content = Vec::new();
        match self.read(JOB_FILE)?.take(most.saturating_add(1)).read_to_end(&mut content) {
            Ok(_) => Ok(content),
            Err(error) => Err(Unfit::Unreadable(error)),
        }
    }

    fn usage(&self) -> (Usage, Option<String>) {
        let (mut usage, mut entries) = (Usage::default(), 0);
        let counted = add(&mut usage, &mut entries, &self.path, MAX_DEPTH);
        (usage, counted.err().map(|error| error.to_string()))
    }

    fn problems(&self) -> Vec<String> {
        Vec::new()
    }
}

impl From<Errno> for Unfit {
    fn from(error: Errno) -> Self {
        match error {
            Errno::ENOENT => Self::Missing,
            error => Self::Unreadable(error.into()),
        }
    }
}

/// What a name in the directory is; a link is one.
fn look(directory: impl AsFd, name: &str) -> nix::Result<FileStat> {
    fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Opens a file of the directory if it is a regular one.
fn regular(directory: &OwnedFd, name: &str) -> Result<File, Unfit> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let held = File::from(openat(directory, name, flags, Mode::empty())?);
    open_held(&held).map_err(Unfit::Unreadable)?.ok_or(Unfit::NotRegular)
}

/// Adds what is in a directory. Links count as themselves.
fn add(usage: &mut Usage, entries: &mut u64, directory: &Path, depth: usize) -> io::Result<()> {
    if depth == 0 {
        return Err(io::Error::other(format!("directories lie more than {MAX_DEPTH} deep")));
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        *entries += 1;
        if *entries > MAX_FILES {
            return Err(io::Error::other(format!("there are more than {MAX_FILES}")));
        }
        usage.bytes = usage.bytes.saturating_add(metadata.blocks().saturating_mul(512));
        if metadata.is_dir() {
            add(usage, entries, &entry.path(), depth - 1)?;
        } else {
            usage.files += 1;
        }
    }
    Ok(())
}
