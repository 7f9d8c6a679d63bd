//! Terminals: the socket over which the runtime sends one, and copying to and from it.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, io};

use nix::unistd::mkdtemp;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, accept_with, recvmsg,
};
use rustix::termios::isatty;
use tokio::task::consume_budget;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::StdioError;
use super::polled::Polled;
use super::pump::{Sink, read};

/// The longest path of a socket, without the final NUL.
const LONGEST: usize = 107;

/// What a terminal gives at most in one read.
const PIECE: usize = 4096;

/// How often a terminal that nobody has open is tried again.
const HUNG_UP: Duration = Duration::from_millis(200);

/// For `--console-socket`, in a directory of its own that nobody else may enter. Dropping it
/// removes both.
#[derive(Debug)]
pub(super) struct ConsoleSocket {
    listener: Polled,
    path: PathBuf,
}

impl ConsoleSocket {
    /// Makes one. Neither the bundle nor a working directory will do: their paths are too long
    /// for a socket's.
    pub(super) fn new() -> Result<Self, StdioError> {
        let name = "pty-XXXXXX";
        let longest = LONGEST - name.len() - "//socket".len();
        let mut base = env::temp_dir();
        if base.as_os_str().as_bytes().len() > longest {
            base = "/tmp".into();
        }
        let directory = mkdtemp(&base.join(name))
            .map_err(|error| StdioError::path("make a directory in", base)(error.into()))?;
        let path = directory.join("socket");
        let listener = UnixListener::bind(&path).and_then(Polled::reader).map_err(|source| {
            let _ = fs::remove_dir_all(&directory);
            StdioError::Path { what: "listen on", path: path.clone(), source }
        })?;
        Ok(Self { listener, path })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Before the runtime is tried once more: what the failed one has sent is a terminal that
    /// nobody uses.
    pub(super) fn forget(&self) {
        while self.accept().is_ok() {}
    }

    fn accept(&self) -> rustix::io::Result<OwnedFd> {
        accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }

    /// Receives the terminal. The runtime has sent it before it ends, so that this waits only for
    /// a runtime that never will.
    pub(super) async fn receive(&mut self, within: Duration) -> Result<OwnedFd, StdioError> {
        let received = timeout(within, self.receive_one()).await;
        let path = self.path.clone();
        let what = match received {
            Err(_) => return Err(StdioError::NoTerminal { path, within }),
            Ok(Err(source)) => {
                return Err(StdioError::Path { what: "receive from", path, source });
            }
            Ok(Ok(Some(master))) if isatty(&master) => return Ok(master),
            Ok(Ok(Some(_))) => "another descriptor",
            Ok(Ok(None)) => "no descriptor",
        };
        Err(StdioError::NotATerminal { path, what })
    }

    async fn receive_one(&mut self) -> io::Result<Option<OwnedFd>> {
        let connection = loop {
            match self.accept() {
                Err(Errno::AGAIN) => self.listener.wait().await?,
                Err(Errno::INTR) => {}
                accepted => break accepted?,
            }
        };
        let mut connection = Polled::reader(connection)?;
        loop {
            match receive_descriptor(&connection) {
                Err(Errno::AGAIN) => connection.wait().await?,
                Err(Errno::INTR) => {}
                received => return Ok(received?),
            }
        }
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        if let Some(directory) = self.path.parent() {
            // Nothing more than two inodes in /tmp is lost.
            let _ = fs::remove_dir_all(directory);
        }
    }
}

/// One message with one descriptor. Its text is the terminal's name inside the container.
fn receive_descriptor(from: &Polled) -> rustix::io::Result<Option<OwnedFd>> {
    let mut text = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(from, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(descriptor)
}

/// Copies what the process writes. While it lives, EIO is no end: it only says that nobody has the
/// terminal open now, as when systemd closes its console between two messages. Once it has
/// `ended`, the first time that nothing is left to read is the end, even if a process that it
/// left behind still has the terminal: the same as in Go's shim. The kernel hands over all that was
/// written before it answers EAGAIN or EIO.
pub(super) async fn copy_output(
    mut master: Polled,
    mut sink: Sink,
    ended: CancellationToken,
) -> io::Result<()> {
    loop {
        consume_budget().await;
        // Asked before the read: what is written between the two is not lost then.
        let last = ended.is_cancelled();
        match read(&master, PIECE) {
            Ok(piece) if piece.is_empty() => return Ok(()),
            Ok(piece) => sink.deliver(piece).await,
            Err(Errno::AGAIN | Errno::IO) if last => return Ok(()),
            Err(Errno::AGAIN) => tokio::select! {
                () = ended.cancelled() => {}
                waited = master.wait() => waited?,
            },
            Err(Errno::IO) => tokio::select! {
                () = ended.cancelled() => {}
                () = sleep(HUNG_UP) => {}
            },
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Copies what a client types until all writers of the FIFO are gone. The terminal stays open
/// then: what the process still says is wanted.
pub(super) async fn copy_input(mut from: Polled, mut master: Polled) -> io::Result<()> {
    loop {
        consume_budget().await;
        match read(&from, PIECE) {
            Ok(piece) if piece.is_empty() => return Ok(()),
            Ok(piece) => type_in(&mut master, &piece).await?,
            Err(Errno::AGAIN) => from.wait().await?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

async fn type_in(master: &mut Polled, mut piece: &[u8]) -> io::Result<()> {
    while !piece.is_empty() {
        match rustix::io::write(&*master, piece) {
            Ok(written) => piece = &piece[written..],
            Err(Errno::AGAIN) => master.wait().await?,
            // Nobody has it open now.
            Err(Errno::IO) => sleep(HUNG_UP).await,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
