//! `stasis inspect`: what is in an image, whether it is whole, what a restore needs, and whether this
//! host has it.
//!
//! [`read`] looks at a directory or an archive and fills in a [`Report`]; [`host`] compares what a
//! restore needs with what the driver of this host says; [`render`] makes text for people or JSON for
//! programs of it. An image may come from anywhere: no link in it is followed, nothing but a regular
//! file is opened, of each no more is read than it may have, and nothing is changed.

pub mod archive;
mod compression;
mod directory;
pub mod host;
pub mod read;
pub mod render;
mod source;

use serde::Serialize;

pub use archive::Exported;
pub use compression::Compression;
pub use host::Host;

/// What an image is. The names of the fields are those of the JSON: they stay the same
/// from version to version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The directory or archive. As it was named, or the one image in what was named.
    pub path: String,
    /// Which of the two.
    pub form: Form,
    /// How an archive is compressed.
    pub compression: Option<Compression>,
    /// What Podman says of the container in an archive.
    pub exported: Option<Exported>,
    /// What it is.
    pub kind: Kind,
    /// Why a restore would fail or be refused, a sentence each. An image without one is whole.
    pub problems: Vec<String>,
    /// What it takes on the disk.
    pub bytes_on_disk: u64,
    /// How many files are in the image.
    pub files: u64,
    /// What the manifest says; none without one.
    pub checkpoint: Option<Checkpoint>,
    /// What the manifest makes a restore need; none without one.
    pub restore: Option<Needs>,
    /// Whether this host has that; none without a manifest.
    pub host: Option<Host>,
}

/// How an image lies on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// As files in a directory.
    Directory,
    /// In an archive that Podman exported.
    Archive,
}

impl Report {
    /// Nothing was found that stands in the way of a restore.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.problems.is_empty()
    }
}

/// What is in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Stasis made it, of a container with CUDA.
    Cuda,
    /// No process in it has loaded CUDA: any runtime restores it.
    Plain,
    /// CRIU's own plugin for CUDA made it, and CRIU restores it.
    CriuPlugin,
    /// It holds processes with CUDA, and nobody's mark that their GPU memory is in it.
    Unfinished,
    /// It has a manifest, or files of CRIU, that cannot be read.
    Unreadable,
    /// There is no image in it.
    NoImage,
}

/// What the manifest says about the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checkpoint {
    /// The container's id.
    pub container: String,
    /// When, RFC 3339 in UTC.
    pub created: String,
    /// Program and version.
    pub created_by: String,
    /// The driver's version; none where NVML was absent.
    pub driver: Option<String>,
    /// The CUDA version of the driver, such as `13.0`.
    pub cuda: String,
    /// The GPUs that were in use.
    pub gpus: Vec<Gpu>,
    /// The processes with CUDA, by the order in which they are restored.
    pub processes: Vec<Process>,
    /// Their job, if they are members of one.
    pub job: Option<Job>,
    /// Options that the restore has in common with the dump.
    pub flags: Vec<&'static str>,
    /// Destinations of the driver's mounts in the container.
    pub mounts: Vec<String>,
    /// GPU devices in the container.
    pub devices: Vec<String>,
    /// How long each phase took, in order.
    pub phases: Vec<Phase>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// `GPU-…`
    pub uuid: String,
    /// The product.
    pub name: String,
    /// Whole memory.
    pub memory_bytes: u64,
    /// What the processes held of it; none if that is not known.
    pub used_bytes: Option<u64>,
}

/// A process with CUDA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Process {
    /// The pid inside.
    pub pid: i32,
    /// The kernel's name for it.
    pub command: String,
    /// Its place in the order of the restore.
    pub order: u32,
    /// UUIDs of the GPUs that it used, as far as they are known.
    pub gpus: Vec<String>,
    /// GPU memory that it held, if known.
    pub device_bytes: Option<u64>,
}

/// The job file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Job {
    /// Whose the file is.
    pub file: JobFile,
    /// Where in the container, if it is in its root file system.
    pub path: Option<String>,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256 in hexadecimal digits.
    pub sha256: String,
    /// The copy in the image.
    pub copy: JobCopy,
}

/// Whose a job file is: [`stasis_config::manifest::JobFile`] without what belongs to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobFile {
    /// Stasis made it for the annotation.
    Made,
    /// CRIU brings it back with the processes.
    Dumped,
    /// The container's, in its root file system.
    Rootfs,
}

/// What the copy of the job file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobCopy {
    /// The file that the manifest means.
    Whole,
    /// It is not there.
    Missing,
    /// There is something else in its place.
    NotRegular,
    /// It is shorter or longer.
    WrongSize,
    /// It has other bytes.
    WrongDigest,
    /// It cannot be read.
    Unreadable,
}

/// A phase of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// How long it took.
    pub milliseconds: u64,
}

/// What a restore needs of a host, beside what CRIU needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Needs {
    /// The only version of the driver; none if the image does not name it, or needs no driver.
    pub driver: Option<String>,
    /// How many processes with CUDA there are; for none of them a driver is needed.
    #[serde(skip)]
    pub processes: usize,
    /// The GPUs to which memory goes back.
    pub gpus: Vec<NeededGpu>,
    /// The GPUs that the processes could see by their device nodes, used or not: the driver restores only
    /// where there is one for each. Empty if that is not known.
    pub visible: Vec<VisibleGpu>,
}

/// A GPU that the processes could see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VisibleGpu {
    /// `GPU-…`
    pub uuid: String,
    /// The product, if known.
    pub name: Option<String>,
}

/// A GPU to which memory goes back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NeededGpu {
    /// `GPU-…`
    pub uuid: String,
    /// The product, if known.
    pub name: Option<String>,
    /// Its whole memory, if known.
    pub memory_bytes: Option<u64>,
    /// What must be free on it, if known.
    pub bytes: Option<u64>,
}
