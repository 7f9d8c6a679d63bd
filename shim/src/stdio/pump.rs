//! Copying. Nothing here holds a buffer or a thread while there is nothing to copy.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use rustix::pipe::{SpliceFlags, splice};
use tokio::task::{consume_budget, spawn_blocking};

use super::polled::Polled;

/// More than a pipe holds, unless somebody made it larger.
const AT_ONCE: usize = 1 << 20;

/// How much is read at once for a file.
const FOR_A_FILE: usize = 64 << 10;

/// Where output ends.
#[derive(Debug)]
pub(super) enum Sink {
    /// containerd's FIFO.
    Fifo {
        /// For writing.
        to: Polled,
        /// Its read end, never read: with it a containerd that goes away and comes back causes no
        /// EPIPE, and neither opening waits for anybody.
        hold: OwnedFd,
    },
    /// A logging binary's pipe.
    Logger(Polled),
    /// A file, or a device.
    File {
        /// Opened for appending.
        file: Arc<File>,
        /// For the log.
        path: PathBuf,
        /// Whether the last piece was lost, and so was told of.
        losing: bool,
    },
    /// Nobody asked for it.
    Nowhere,
}

impl Sink {
    /// Delivers one piece. A reader that is slow makes this wait; one that is gone for good, or a
    /// full disk, does not stop the process: what cannot be written is lost.
    pub(super) async fn deliver(&mut self, piece: Vec<u8>) {
        let failed = match self {
            Self::Fifo { to, .. } | Self::Logger(to) => write_all(to, &piece).await,
            Self::File { file, .. } => {
                let file = Arc::clone(file);
                let written = spawn_blocking(move || io::Write::write_all(&mut &*file, &piece));
                written.await.unwrap_or_else(|error| Err(error.into()))
            }
            Self::Nowhere => Ok(()),
        };
        if let Self::File { losing, .. } = self
            && failed.is_ok()
        {
            *losing = false;
        }
        let Err(error) = failed else { return };
        if let Self::File { path, losing, .. } = self {
            // Perhaps only now: the next piece is tried again. Told once, or a full disk would get a
            // line for each.
            if !std::mem::replace(losing, true) {
                tracing::warn!(%error, path = %path.display(), "a container's output is lost");
            }
        } else {
            tracing::warn!(%error, "a container's output is lost from now on");
            *self = Self::Nowhere;
        }
    }
}

/// Copies a pipe to where its output belongs, until all its writers are gone.
pub(super) async fn copy_output(mut from: Polled, sink: Sink) -> io::Result<()> {
    match sink {
        Sink::Fifo { to, hold } => {
            let copied = splice_all(from, to).await;
            drop(hold);
            copied
        }
        mut sink => loop {
            consume_budget().await;
            match read(&from, FOR_A_FILE) {
                Ok(piece) if piece.is_empty() => return Ok(()),
                Ok(piece) => sink.deliver(piece).await,
                Err(Errno::AGAIN) => from.wait().await?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        },
    }
}

/// Moves what comes out of one pipe or FIFO into another, until all writers of the first are
/// gone.
///
/// With splice, which moves the pages themselves. 1 GiB through both took, on 2 cores, median of
/// 9, written in pieces of 64 KiB and of 4 KiB: splice 0.62 s and 0.89 s (CPU 0.13 s and 0.24 s),
/// tokio's copy, which containerd-shim uses, with its 8 KiB 0.95 s and 1.24 s (0.46 s and 0.49 s),
/// Go's with 32 KiB 0.95 s and 0.92 s (0.41 s and 0.46 s), and with 4 KiB, as its shim has had
/// since containerd 1.7, 1.60 s and 1.71 s (0.92 s and 0.97 s). Besides, nothing is ever on its way in
/// this process, so that nothing is lost when the copying is ended, and an idle container costs no
/// buffer.
pub(super) async fn splice_all(mut from: Polled, mut to: Polled) -> io::Result<()> {
    loop {
        // One that always finds something to move lets the others have their turn.
        consume_budget().await;
        match splice(&from, None, &to, None, AT_ONCE, SpliceFlags::NONBLOCK | SpliceFlags::MOVE) {
            Ok(0) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                from.wait().await?;
                to.wait().await?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads once, up to `length` bytes. None is the end.
pub(super) fn read(from: &Polled, length: usize) -> rustix::io::Result<Vec<u8>> {
    let mut piece = Vec::with_capacity(length);
    rustix::io::read(from, spare_capacity(&mut piece))?;
    Ok(piece)
}

/// Writes all of a piece.
pub(super) async fn write_all(to: &mut Polled, mut piece: &[u8]) -> io::Result<()> {
    while !piece.is_empty() {
        match rustix::io::write(&*to, piece) {
            Ok(written) => piece = &piece[written..],
            Err(Errno::AGAIN) => to.wait().await?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
