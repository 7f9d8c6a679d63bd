//! Established TCP connections of a container.

use std::collections::HashSet;

use procfs::net::TcpState;
use procfs::process::{FDTarget, Process as ProcProcess};

use crate::processes::Pid;

/// Whether any of `pids` holds a TCP connection that a peer would see closed when the process is
/// killed. `false` also for processes that cannot be read: they have ended.
#[must_use]
pub fn established_tcp(pids: &[Pid]) -> bool {
    pids.iter().any(|pid| of_process(*pid).unwrap_or(false))
}

fn of_process(pid: Pid) -> Result<bool, procfs::ProcError> {
    let process = ProcProcess::new(pid)?;
    let sockets: HashSet<u64> = process
        .fd()?
        .filter_map(|fd| match fd.ok()?.target {
            FDTarget::Socket(inode) => Some(inode),
            _ => None,
        })
        .collect();
    if sockets.is_empty() {
        return Ok(false);
    }
    // /proc/PID/net shows the network namespace of that process.
    let connections = process.tcp()?.into_iter().chain(process.tcp6().unwrap_or_default());
    let closed = [TcpState::Listen, TcpState::Close, TcpState::TimeWait];
    Ok(connections.into_iter().any(|c| sockets.contains(&c.inode) && !closed.contains(&c.state)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_listener_is_no_connection_and_a_connection_is() {
        let me = [nix::unistd::getpid().as_raw()];
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!established_tcp(&me));
        let _stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(established_tcp(&me));
    }
}
