//! Where an image lies, as far as it is looked at.

use std::io;

use stasis_config::{Manifest, ManifestError};

/// A file of CRIU's that is searched for a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    /// What is in the image; CRIU writes it when all others are written.
    Inventory,
    /// Open and mapped files.
    Files,
}

impl List {
    pub(super) const ALL: [Self; 2] = [Self::Inventory, Self::Files];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Inventory => "inventory.img",
            Self::Files => "files.img",
        }
    }

    /// What is read of it at most. A whole inventory has some hundred bytes, and ten million open
    /// files do not fill the other.
    pub(super) fn max(self) -> u64 {
        match self {
            Self::Inventory => 1 << 20,
            Self::Files => 1 << 30,
        }
    }

    /// What it is searched for.
    pub(super) fn needle(self) -> &'static [u8] {
        match self {
            Self::Inventory => crate::image::CUDA_PLUGIN,
            Self::Files => crate::image::LIBCUDA,
        }
    }
}

/// Why a file is not read.
#[derive(Debug)]
pub(super) enum Unfit {
    /// It is not there.
    Missing,
    /// There is something else in its place.
    NotRegular,
    /// It is larger than such a file can be.
    TooLarge(u64),
    /// The reason.
    Unreadable(io::Error),
}

/// What an image takes.
#[derive(Debug, Default)]
pub(super) struct Usage {
    /// On the disk.
    pub(super) bytes: u64,
    /// Of the image, not counting directories.
    pub(super) files: u64,
}

/// An image.
pub(super) trait Source {
    /// Whether the list is there and may be read.
    fn list(&self, list: List) -> Result<(), Unfit>;

    /// Whether the list has the name that it is searched for.
    fn names(&self, list: List) -> bool;

    /// Whether there is anything in the place of the manifest.
    fn has_manifest(&self) -> bool;

    /// The manifest; none if there is nothing in its place.
    fn manifest(&self) -> Result<Option<Manifest>, ManifestError>;

    /// The copy of the job file, or more than `most` bytes of a longer one.
    fn job(&self, most: u64) -> Result<Vec<u8>, Unfit>;

    /// What it takes, and why that is not all of it.
    fn usage(&self) -> (Usage, Option<String>);

    /// What else stands in the way of a restore.
    fn problems(&self) -> Vec<String>;
}
