//! Opening FIFOs and files. No opening waits for another process.

use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use nix::libc::O_NONBLOCK;
use rustix::io::ioctl_fionbio;
use tokio::task::spawn_blocking;

use super::StdioError;
use super::polled::Polled;
use super::pump::Sink;
use super::target::Place;

/// Where an input comes from.
#[derive(Debug)]
pub(super) enum Input {
    /// containerd's FIFO.
    Fifo {
        /// For reading.
        from: Polled,
        /// Its writing end, which keeps it from ending while clients come and go.
        hold: OwnedFd,
    },
    /// `/dev/null`, or a file: nothing that could be waited on, and nothing that needs it.
    File(OwnedFd),
}

/// Opens an input.
pub(super) fn open_input(path: &Path) -> Result<Input, StdioError> {
    // The reader first: a writer that does not wait is refused without one.
    let reader = open(path, OpenOptions::new().read(true))?;
    let kind = reader.metadata().map_err(StdioError::path("find", path))?.file_type();
    if !kind.is_fifo() {
        ioctl_fionbio(&reader, false)
            .map_err(|errno| StdioError::path("use", path)(errno.into()))?;
        return Ok(Input::File(reader.into()));
    }
    let hold = open(path, OpenOptions::new().write(true))?.into();
    let from = Polled::reader(reader).map_err(StdioError::path("watch", path))?;
    Ok(Input::Fifo { from, hold })
}

/// Opens where an output goes.
pub(super) async fn open_output(place: Place) -> Result<Sink, StdioError> {
    let path = match place {
        Place::File(path) => {
            // Perhaps on a slow disk: not in the runtime's thread.
            let file = spawn_blocking({
                let path = path.clone();
                move || open_file(&path)
            });
            let file = file.await.map_err(StdioError::failed("open a log file"))??;
            return Ok(Sink::File { file: Arc::new(file), path, losing: false });
        }
        Place::Existing(path) => path,
    };
    let kind = fs::metadata(&path).map_err(StdioError::path("find", &path))?.file_type();
    if kind.is_fifo() {
        let hold = open(&path, OpenOptions::new().read(true))?.into();
        let to = open(&path, OpenOptions::new().write(true))?;
        let to = Polled::writer(to).map_err(StdioError::path("watch", &path))?;
        return Ok(Sink::Fifo { to, hold });
    }
    let file = Arc::new(open(&path, OpenOptions::new().append(true))?);
    Ok(Sink::File { file, path, losing: false })
}

fn open(path: &Path, options: &mut OpenOptions) -> Result<File, StdioError> {
    options.custom_flags(O_NONBLOCK).open(path).map_err(StdioError::path("open", path))
}

fn open_file(path: &Path) -> Result<File, StdioError> {
    if let Some(directory) = path.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(directory)
            .map_err(StdioError::path("make the directory", directory))?;
    }
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o644)
        // A FIFO that nobody reads is refused and not waited for.
        .custom_flags(O_NONBLOCK)
        .open(path)
        .map_err(StdioError::path("open", path))
}
