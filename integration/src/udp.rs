//! Asks a counter inside a container.

use std::fs::File;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::sched::{CloneFlags, setns};
use nix::unistd::Pid;

use crate::{command, wait};

/// How long a counter may think.
const ANSWER: Duration = Duration::from_secs(10);

/// Sends one datagram to a port inside the network namespace of a process and gives the number
/// that comes back.
///
/// A port that nobody listens on yet is tried again; a question that got no answer is not asked
/// twice, since the counter may have counted it.
pub fn ask(pid: Pid, port: u16) -> Result<u64> {
    let counter = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    inside(pid, move || ask_at(counter))
        .with_context(|| format!("asking the counter of process {pid} on port {port}"))
}

/// The same from here: of a container that can be reached by a network.
pub fn ask_at(counter: SocketAddrV4) -> Result<u64> {
    let answer = wait::until("a listener on the counter's port", ANSWER, || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(counter)?;
        socket.set_read_timeout(Some(ANSWER))?;
        socket.send(b"?")?;
        let mut buffer = [0; 64];
        match socket.recv(&mut buffer) {
            Ok(length) => Ok(Some(String::from_utf8_lossy(&buffer[..length]).into_owned())),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(None),
            Err(error) => Err(error.into()),
        }
    })?;
    answer.trim().parse().with_context(|| format!("the counter answered {answer:?}"))
}

/// A datagram that was sent and whose answer is waited for later.
#[derive(Debug)]
pub struct Question(UdpSocket);

impl Question {
    /// Sends one to a port inside the network namespace of a process, on which somebody listens.
    pub fn send(pid: Pid, port: u16) -> Result<Self> {
        inside(pid, move || Self::send_to(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)))
    }

    /// The same from here.
    pub fn send_to(counter: SocketAddrV4) -> Result<Self> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect(counter)?;
        socket.send(b"?")?;
        Ok(Self(socket))
    }

    /// There is no answer for so long.
    pub fn expect_none(&self, time: Duration) -> Result<()> {
        match self.receive(time) {
            Ok(answer) => bail!("the counter answered {answer:?}"),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Ok(())
            }
            Err(error) => Err(error).context("no answer, and no counter either"),
        }
    }

    /// The answer, which may take its time.
    pub fn answer(self) -> Result<u64> {
        let answer = self.receive(ANSWER).context("the answer to an earlier question")?;
        answer.trim().parse().with_context(|| format!("the counter answered {answer:?}"))
    }

    fn receive(&self, limit: Duration) -> std::io::Result<String> {
        self.0.set_read_timeout(Some(limit))?;
        let mut buffer = [0; 64];
        let length = self.0.recv(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }
}

/// Runs in the network namespace of a process, with its loopback up.
///
/// runc leaves the network to others: it has CRIU restore an empty network namespace, unless it
/// was given one. Whoever made the network has to do so again, and here that is the test.
fn inside<T: Send + 'static>(
    pid: Pid,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    // Only this thread changes its namespace, and what it starts inherits that.
    let thread = thread::spawn(move || {
        let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        command::succeed(Command::new("ip").args(["link", "set", "lo", "up"]), ANSWER)?;
        work()
    });
    thread.join().map_err(|_| anyhow!("the thread in the namespace panicked"))?
}
