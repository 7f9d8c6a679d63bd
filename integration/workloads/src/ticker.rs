//! The loop that both workloads have: answer datagrams, and do something at each tick.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

/// Where a workload writes each count, as one line.
#[derive(Default)]
pub struct Log {
    file: Option<File>,
    stdout: bool,
}

impl Log {
    /// Opens the file for appending and keeps it open.
    pub fn new(path: Option<&Path>, stdout: bool) -> io::Result<Self> {
        let open = |path| OpenOptions::new().create(true).append(true).open(path);
        Ok(Self { file: path.map(open).transpose()?, stdout })
    }

    /// Writes a line at once.
    pub fn line(&mut self, text: &str) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            file.write_all(format!("{text}\n").as_bytes())?;
        }
        if self.stdout {
            let mut stdout = io::stdout().lock();
            writeln!(stdout, "{text}")?;
            stdout.flush()?;
        }
        Ok(())
    }
}

/// What happened.
pub enum Event {
    /// A datagram, and who waits for an answer.
    Datagram(String, SocketAddr),
    /// The time for a tick has come.
    Tick,
}

/// Waits for datagrams and for the next tick.
///
/// CRIU 4.1 cannot dump an internet socket on Linux 6.16 and later (it asks for
/// `SO_PASSCRED`, which is refused there), so there must be a way without one.
pub struct Ticker {
    socket: Option<UdpSocket>,
    period: Option<Duration>,
    next: Instant,
}

impl Ticker {
    /// Without a socket only ticks come, without a period only datagrams.
    #[must_use]
    pub fn new(socket: Option<UdpSocket>, period: Option<Duration>) -> Self {
        Self { socket, period, next: Instant::now() }
    }

    /// The next event. Ticks that were missed do not pile up.
    pub fn wait(&mut self) -> io::Result<Event> {
        loop {
            let left = self.period.map(|_| self.next.saturating_duration_since(Instant::now()));
            if let (Some(left), Some(period)) = (left, self.period) {
                // After a restore on another machine the clock may have gone back.
                if left.is_zero() || left > period {
                    self.next = Instant::now() + period;
                    return Ok(Event::Tick);
                }
            }
            let Some(socket) = &self.socket else {
                std::thread::sleep(left.unwrap_or(Duration::from_secs(3600)));
                continue;
            };
            socket.set_read_timeout(left)?;
            let mut text = [0; 64];
            match socket.recv_from(&mut text) {
                Ok((len, from)) => {
                    let text = String::from_utf8_lossy(&text[..len]).trim().to_owned();
                    return Ok(Event::Datagram(text, from));
                }
                Err(error) if is_no_datagram(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Answers. Whoever asked may be gone, or the network is not back yet after a restore.
    pub fn answer(&self, text: &str, to: SocketAddr) {
        if let Some(socket) = &self.socket {
            let _ = socket.send_to(format!("{text}\n").as_bytes(), to);
        }
    }
}

fn is_no_datagram(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), WouldBlock | TimedOut | Interrupted | ConnectionRefused)
}
