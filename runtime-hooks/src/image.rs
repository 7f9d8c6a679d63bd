//! The image directory: what CRIU wrote and the manifest beside it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use stasis_config::manifest::JOB_FILE;
use stasis_config::{Manifest, ManifestError};

use crate::error::Cause;
use crate::files::open_regular;
use crate::processes::Pid;

/// The image of a checkpoint.
pub trait Image {
    /// Makes the directory ready: it exists and can be written. An earlier image in it is still
    /// whole afterwards.
    fn prepare(&mut self) -> Result<(), Cause>;
    /// The dump begins: what we wrote for an earlier checkpoint is removed, so that a dump that fails
    /// half-way cannot be taken for whole. So is what CRIU wrote of its processes, which would be
    /// taken for this one's.
    fn begin(&mut self) -> Result<(), Cause>;
    /// Whether CRIU has written the process with this pid inside.
    fn has_process(&self, inner_pid: Pid) -> bool;
    /// Returns once all that CRIU wrote is on the disk.
    fn sync(&mut self) -> Result<(), Cause>;
    /// Writes the manifest, last of all.
    fn finish(&mut self, manifest: &Manifest) -> Result<(), Cause>;
    /// The directory.
    fn path(&self) -> &Path;
}

/// [`Image`] in the file system.
#[derive(Debug)]
pub struct ImageDirectory(PathBuf);

impl ImageDirectory {
    /// `path` need not exist yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    fn error(&self, what: &str, error: &io::Error) -> Cause {
        Cause::Image { path: self.0.clone(), reason: format!("{what}: {error}") }
    }
}

impl Image for ImageDirectory {
    fn has_process(&self, inner_pid: Pid) -> bool {
        self.0.join(format!("core-{inner_pid}.img")).is_file()
    }

    fn prepare(&mut self) -> Result<(), Cause> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.0)
            .map_err(|error| self.error("cannot be created", &error))?;
        // Told now and not after minutes of copying: a full or read-only file system.
        let probe = self.0.join(".stasis-probe");
        let written = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .open(&probe)
            .and_then(|mut file| io::Write::write_all(&mut file, &[0; 4096]));
        let removed = fs::remove_file(&probe);
        written.and(removed).map_err(|error| self.error("cannot be written", &error))
    }

    fn begin(&mut self) -> Result<(), Cause> {
        forget(&self.0)?;
        // Not in `forget`: where the runtime goes on alone it may yet refuse, and leave the earlier image
        // as it is.
        let failed =
            |error| self.error("cannot be cleared of an earlier checkpoint's processes", &error);
        for entry in fs::read_dir(&self.0).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name().to_str().is_some_and(is_process) {
                fs::remove_file(entry.path()).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), Cause> {
        let failed = |error| self.error("cannot be written to disk", &error);
        // File by file and not syncfs: an error is then reported for the file it belongs to.
        for entry in fs::read_dir(&self.0).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_type().map_err(failed)?.is_file() {
                let file = OpenOptions::new()
                    .read(true)
                    .custom_flags(nix::libc::O_NOFOLLOW)
                    .open(entry.path())
                    .map_err(failed)?;
                file.sync_all().map_err(failed)?;
            }
        }
        File::open(&self.0).and_then(|directory| directory.sync_all()).map_err(failed)
    }

    fn finish(&mut self, manifest: &Manifest) -> Result<(), Cause> {
        Ok(manifest.write(&self.0)?)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

/// Removes what we have written into an image: it says nothing of what is written next.
pub fn forget(image: &Path) -> Result<(), Cause> {
    Manifest::remove(image)?;
    match fs::remove_file(image.join(JOB_FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Cause::Image {
            path: image.to_owned(),
            reason: format!("{JOB_FILE} of an earlier checkpoint cannot be removed: {error}"),
        }),
        _ => Ok(()),
    }
}

/// Whether a file of CRIU's is a process, or a thread of one.
fn is_process(name: &str) -> bool {
    name.strip_prefix("core-")
        .and_then(|rest| rest.strip_suffix(".img"))
        .is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What CRIU's list of files names if a process maps it, whatever its version.
pub(crate) const LIBCUDA: &[u8] = b"libcuda.so";
/// What CRIU's inventory names if its plugin for CUDA took care of the image.
pub(crate) const CUDA_PLUGIN: &[u8] = b"cuda_plugin";

/// What an image is.
#[derive(Debug)]
pub enum Kind {
    /// Written by us: with CUDA.
    Cuda(Box<Manifest>),
    /// No process in it maps libcuda, or CRIU's own plugin took care of it: the runtime restores
    /// it as it is.
    Plain,
}

/// Tells what an image is. One with CUDA and nobody's mark is refused: its processes would find
/// their GPU gone.
pub fn kind(image: &Path) -> Result<Kind, Cause> {
    match Manifest::read(image) {
        Ok(Some(manifest)) => return Ok(Kind::Cuda(Box::new(manifest))),
        Ok(None) => {}
        // The runtime says what is wrong with a directory that is not there.
        Err(ManifestError::Directory { source, .. })
            if source.kind() == io::ErrorKind::NotFound =>
        {
            return Ok(Kind::Plain);
        }
        Err(error) => return Err(error.into()),
    }
    let unfinished = mentions(&image.join("files.img"), LIBCUDA)
        && !mentions(&image.join("inventory.img"), CUDA_PLUGIN);
    if unfinished {
        return Err(Cause::Needs { path: image.to_owned(), reason: without_mark() });
    }
    Ok(Kind::Plain)
}

/// Why an image with CUDA and nobody's mark is refused.
pub(crate) fn without_mark() -> String {
    format!(
        "it holds processes with CUDA but no {}: the checkpoint did not finish, or was not made by \
         Stasis, and its GPU memory is not in it",
        stasis_config::MANIFEST_FILE
    )
}

/// Whether a file contains the bytes.
fn mentions(path: &Path, needle: &[u8]) -> bool {
    let Ok(Some(file)) = open_regular(path) else { return false };
    contains(file, needle).unwrap_or(false)
}

/// Whether the bytes are in it. CRIU's images hold names of files and plugins as plain bytes, so
/// this needs no decoder for them.
pub(crate) fn contains(mut file: impl Read, needle: &[u8]) -> io::Result<bool> {
    const CHUNK: usize = 1 << 20;
    let mut window: Vec<u8> = Vec::new();
    let mut chunk = vec![0; CHUNK];
    loop {
        let length = file.read(&mut chunk)?;
        if length == 0 {
            return Ok(false);
        }
        window.extend_from_slice(&chunk[..length]);
        if window.windows(needle.len()).any(|bytes| bytes == needle) {
            return Ok(true);
        }
        // What could be the beginning of a match goes on to the next round.
        let keep = window.len().min(needle.len() - 1);
        window.drain(..window.len() - keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_with_cuda_and_no_mark_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path();
        assert!(matches!(kind(image).unwrap(), Kind::Plain));
        let mut files = vec![b'x'; (1 << 20) - 4];
        files.extend_from_slice(b"/usr/lib/libcuda.so.580.159.04");
        fs::write(image.join("files.img"), files).unwrap();
        let error = kind(image).unwrap_err().to_string();
        assert!(error.contains("stasis.json"), "{error}");
        fs::write(image.join("inventory.img"), b"..cuda_plugin..").unwrap();
        assert!(matches!(kind(image).unwrap(), Kind::Plain));
    }

    #[test]
    fn a_missing_image_is_the_runtimes_to_refuse() {
        assert!(matches!(kind(Path::new("/nonexistent/image")).unwrap(), Kind::Plain));
    }

    #[test]
    fn an_old_manifest_goes_when_the_dump_begins_and_not_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b");
        let mut image = ImageDirectory::new(path.clone());
        image.prepare().unwrap();
        fs::write(path.join(stasis_config::MANIFEST_FILE), "{}").unwrap();
        fs::write(path.join(JOB_FILE), "old").unwrap();
        image.prepare().unwrap();
        assert!(path.join(stasis_config::MANIFEST_FILE).exists());
        image.begin().unwrap();
        image.sync().unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    }

    #[test]
    fn processes_of_an_earlier_dump_are_not_taken_for_this_ones() {
        let directory = tempfile::tempdir().unwrap();
        let mut image = ImageDirectory::new(directory.path().to_owned());
        let others = ["core-.img", "core-x7.img", "core-7.img.old", "files.img", "pages-1.img"];
        for name in others.iter().chain(&["core-7.img", "core-19.img"]) {
            fs::write(directory.path().join(name), "").unwrap();
        }
        image.prepare().unwrap();
        assert!(image.has_process(7) && image.has_process(19));
        image.begin().unwrap();
        assert!(!image.has_process(7) && !image.has_process(19));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), others.len());
        // Another's checkpoint, that the runtime may yet refuse.
        fs::write(directory.path().join("core-7.img"), "").unwrap();
        forget(directory.path()).unwrap();
        assert!(image.has_process(7));
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("files.img");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // Waits until somebody opens it for reading.
        let path = fifo.clone();
        let writer = std::thread::spawn(move || File::options().write(true).open(path).map(drop));
        let while_it_waits = || std::thread::sleep(std::time::Duration::from_millis(100));
        while_it_waits();
        assert!(!mentions(&fifo, LIBCUDA));
        while_it_waits();
        assert!(!writer.is_finished(), "it was opened");
        let flags = nix::libc::O_NONBLOCK;
        let reader = OpenOptions::new().read(true).custom_flags(flags).open(&fifo).unwrap();
        writer.join().unwrap().unwrap();
        drop(reader);
    }

    #[test]
    fn an_image_path_that_is_a_file_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "").unwrap();
        assert!(ImageDirectory::new(path).prepare().is_err());
    }
}
