//! A descriptor that is never waited on but by the runtime.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::ioctl_fionbio;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A pipe's, FIFO's, socket's or terminal's descriptor in non-blocking mode, for one direction.
#[derive(Debug)]
pub(super) struct Polled {
    registered: AsyncFd<OwnedFd>,
    interest: Interest,
}

impl Polled {
    /// For reading.
    pub(super) fn reader(descriptor: impl Into<OwnedFd>) -> io::Result<Self> {
        Self::new(descriptor.into(), Interest::READABLE)
    }

    /// For writing.
    pub(super) fn writer(descriptor: impl Into<OwnedFd>) -> io::Result<Self> {
        Self::new(descriptor.into(), Interest::WRITABLE)
    }

    // Deprecated for types whose descriptor may change behind the registration; std's own does
    // not. Its replacement is unsafe, which this crate is not.
    #[expect(deprecated)]
    fn new(descriptor: OwnedFd, interest: Interest) -> io::Result<Self> {
        ioctl_fionbio(&descriptor, true)?;
        let registered = AsyncFd::with_interest(descriptor, interest)?;
        Ok(Self { registered, interest })
    }

    /// After an operation that would have blocked: waits until it will not. The kernel is asked
    /// once more, because a splice that would have blocked does not say on which of its ends.
    pub(super) async fn wait(&mut self) -> io::Result<()> {
        loop {
            let mut guard = self.registered.ready(self.interest).await?;
            if is_ready(&self.registered, self.interest)? {
                return Ok(());
            }
            let ready = guard.ready();
            if ready.is_read_closed() || ready.is_write_closed() {
                // tokio takes a hangup as final. A terminal's ends when it is opened again.
                drop(guard);
                self.register_again()?;
            } else {
                guard.clear_ready();
            }
        }
    }

    fn register_again(&mut self) -> io::Result<()> {
        let descriptor = self.registered.get_ref().try_clone()?;
        // The old one is deregistered before it is closed.
        *self = Self::new(descriptor, self.interest)?;
        Ok(())
    }
}

impl AsFd for Polled {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.registered.get_ref().as_fd()
    }
}

fn is_ready(descriptor: &AsyncFd<OwnedFd>, interest: Interest) -> io::Result<bool> {
    let events = if interest.is_readable() { PollFlags::POLLIN } else { PollFlags::POLLOUT };
    Ok(!polled(descriptor.get_ref(), events)?.is_empty())
}

/// What the kernel says of a descriptor now.
pub(super) fn polled(descriptor: &impl AsFd, events: PollFlags) -> io::Result<PollFlags> {
    let mut descriptors = [PollFd::new(descriptor.as_fd(), events)];
    loop {
        match poll(&mut descriptors, PollTimeout::ZERO) {
            Ok(_) => return Ok(descriptors[0].revents().unwrap_or(PollFlags::empty())),
            Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
