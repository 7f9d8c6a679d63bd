//! The listening socket of a group's server.
//!
//! `start` makes it and hands it to the server as standard input, so that it can be connected to
//! before the server runs, and no descriptor needs to be known by number.
//!
//! All decisions about a path are made under a lock on its directory: between binding and
//! listening a socket looks like one that was left behind, and two starts of one group would each
//! remove the other's. The lock is held for a few system calls and ends with its holder.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use rustix::io::Errno;
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen};

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 128;

/// What [`claim`] found.
#[derive(Debug)]
pub(super) enum Claimed {
    /// Nobody listened there; now we do.
    Ours(Listening),
    /// Somebody listens there.
    Taken,
}

/// A socket that is listened on, by us until it is handed over. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Listening {
    listener: UnixListener,
    path: PathBuf,
    /// Another one that leads to it.
    name: Option<PathBuf>,
    keep: bool,
}

impl Listening {
    /// Another descriptor of it, for the server.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// Gives it another name, unless somebody listens under that.
    pub(super) fn add_name(&mut self, name: &Path) -> io::Result<()> {
        let _lock = lock(name, true)?;
        if matches!(probe(&SocketAddrUnix::new(name)?)?, Found::Listener) {
            return Ok(());
        }
        match fs::remove_file(name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::os::unix::fs::symlink(&self.path, name)?;
        self.name = Some(name.to_owned());
        Ok(())
    }

    /// It is the server's now.
    pub(super) fn keep(mut self) {
        self.keep = true;
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if !self.keep {
            // As we still listen, nobody can have put another in its place.
            let _ = fs::remove_file(&self.path);
            if let Some(name) = &self.name {
                let _ = fs::remove_file(name);
            }
        }
    }
}

/// Listens on `path`, unless somebody does.
pub(super) fn claim(path: &Path) -> io::Result<Claimed> {
    let _lock = lock(path, true)?;
    let address = SocketAddrUnix::new(path)?;
    match probe(&address)? {
        Found::Listener => return Ok(Claimed::Taken),
        // Its server is gone.
        Found::Leftover => fs::remove_file(path)?,
        Found::Nothing => {}
    }
    let socket = socket()?;
    bind(&socket, &address)?;
    let listening =
        Listening { listener: socket.into(), path: path.to_owned(), name: None, keep: false };
    // Before listening, so that there is no moment in which others could connect.
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    listen(&listening.listener, BACKLOG)?;
    Ok(Claimed::Ours(listening))
}

/// Removes the socket of a server that is gone, and its other name.
pub(super) fn remove_leftover(path: &Path, name: Option<&Path>) -> io::Result<()> {
    let _lock = match lock(path, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        lock => lock?,
    };
    match probe(&SocketAddrUnix::new(path)?)? {
        Found::Listener => return Ok(()),
        Found::Leftover => fs::remove_file(path)?,
        Found::Nothing => {}
    }
    name.map_or(Ok(()), |name| remove_name(name, path))
}

/// Removes a name if it leads to this path, and is nobody else's socket.
fn remove_name(name: &Path, path: &Path) -> io::Result<()> {
    if fs::read_link(name).is_ok_and(|to| to == path) { fs::remove_file(name) } else { Ok(()) }
}

/// What is at a path.
enum Found {
    Nothing,
    Listener,
    Leftover,
}

fn probe(address: &SocketAddrUnix) -> io::Result<Found> {
    match connect(&socket()?, address) {
        // AGAIN: it has not accepted the last BACKLOG connections. A server that is stopped still
        // has its containers.
        Ok(()) | Err(Errno::AGAIN) => Ok(Found::Listener),
        Err(Errno::CONNREFUSED) => Ok(Found::Leftover),
        Err(Errno::NOENT) => Ok(Found::Nothing),
        Err(error) => Err(error.into()),
    }
}

/// One that does not block, on a server that is stopped.
fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Locks the directory of a socket until the result is dropped.
fn lock(path: &Path, create: bool) -> io::Result<Flock<File>> {
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    if create {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    let directory = File::open(directory)?;
    Flock::lock(directory, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
}

/// In the server: the socket that `start` handed over. Standard input is `/dev/null` afterwards.
///
/// # Errors
/// If standard input is not a listening socket.
pub fn inherited() -> io::Result<UnixListener> {
    let stdin = io::stdin();
    if !socket_acceptconn(&stdin).unwrap_or(false) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "standard input is not a listening socket; the server is started by `start`",
        ));
    }
    let socket = stdin.as_fd().try_clone_to_owned()?;
    // Should a child inherit it, it would not be a socket on which containerd waits.
    nix::unistd::dup2_stdin(File::open("/dev/null")?)?;
    let listener = UnixListener::from(socket);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// In the server: listens on a path that was given by hand.
pub fn at(path: &Path) -> io::Result<UnixListener> {
    match claim(path)? {
        Claimed::Taken => Err(io::ErrorKind::AddrInUse.into()),
        Claimed::Ours(listening) => {
            let listener = listening.listener.try_clone()?;
            listening.keep();
            Ok(listener)
        }
    }
}

/// In the server, before it stops accepting: removes its socket and that one's other name. From
/// then on a start of the group makes a server of its own.
pub fn retire(listener: &UnixListener, name: Option<&Path>) -> io::Result<()> {
    let address = listener.local_addr()?;
    let Some(path) = address.as_pathname() else { return Ok(()) };
    let _lock = lock(path, false)?;
    fs::remove_file(path)?;
    name.map_or(Ok(()), |name| remove_name(name, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s/x");
        (directory, path)
    }

    fn ours(path: &Path) -> Listening {
        match claim(path).unwrap() {
            Claimed::Ours(listening) => listening,
            Claimed::Taken => panic!("taken"),
        }
    }

    #[test]
    fn it_is_for_its_owner_only_and_can_be_connected_to_at_once() {
        let (_directory, path) = place();
        let listening = ours(&path);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        UnixStream::connect(&path).unwrap();
        assert!(matches!(claim(&path).unwrap(), Claimed::Taken));
        drop(listening);
        assert!(!path.exists());
    }

    #[test]
    fn one_that_was_left_behind_is_replaced() {
        let (_directory, path) = place();
        ours(&path).keep();
        assert!(path.exists() && UnixStream::connect(&path).is_err());
        let _listening = ours(&path);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn a_server_that_accepts_nothing_is_still_one() {
        let (_directory, path) = place();
        let _listening = ours(&path);
        let address = SocketAddrUnix::new(&path).unwrap();
        let mut waiting = Vec::new();
        loop {
            let socket = socket().unwrap();
            match connect(&socket, &address) {
                Ok(()) => waiting.push(socket),
                Err(Errno::AGAIN) => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(matches!(claim(&path).unwrap(), Claimed::Taken));
    }

    #[test]
    fn of_many_starts_one_gets_it() {
        for leftover in [false, true] {
            let (_directory, path) = place();
            if leftover {
                ours(&path).keep();
            }
            let barrier = Barrier::new(16);
            let claimed: Vec<Claimed> = std::thread::scope(|scope| {
                let race = || {
                    barrier.wait();
                    claim(&path).unwrap()
                };
                let threads: Vec<_> = (0..16).map(|_| scope.spawn(race)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let winners = claimed.iter().filter(|one| matches!(one, Claimed::Ours(_))).count();
            assert_eq!(winners, 1);
            UnixStream::connect(&path).unwrap();
        }
    }

    #[test]
    fn only_sockets_of_the_dead_are_leftovers() {
        let (_directory, path) = place();
        remove_leftover(&path, None).unwrap();
        let listening = ours(&path);
        remove_leftover(&path, None).unwrap();
        assert!(path.exists());
        listening.keep();
        // What another test starts in this moment has all descriptors until it is executed.
        for _ in 0..500 {
            remove_leftover(&path, None).unwrap();
            if !path.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(!path.exists());
        remove_leftover(&path, None).unwrap();
    }

    #[test]
    fn a_server_that_ends_makes_room() {
        let (_directory, path) = place();
        let listener = at(&path).unwrap();
        assert!(at(&path).is_err());
        retire(&listener, None).unwrap();
        let _next = ours(&path);
        drop(listener);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn another_name_leads_to_it_and_goes_with_it() {
        let (directory, path) = place();
        let name = directory.path().join("s/name");
        let named = |path: &Path| {
            let mut listening = ours(path);
            listening.add_name(&name).unwrap();
            listening
        };
        drop(named(&path));
        assert!(fs::symlink_metadata(&name).is_err());

        // What others left is replaced, also a name that leads nowhere.
        ours(&name).keep();
        named(&path).keep();
        fs::remove_file(&path).unwrap();
        let listening = named(&path);
        UnixStream::connect(&name).unwrap();
        let server = listening.listener.try_clone().unwrap();
        listening.keep();
        remove_leftover(&path, Some(&name)).unwrap();
        assert!(name.exists());
        retire(&server, Some(&name)).unwrap();
        assert!(fs::symlink_metadata(&name).is_err());

        drop(server);
        named(&path).keep();
        remove_leftover(&path, Some(&name)).unwrap();
        assert!(fs::symlink_metadata(&name).is_err() && !path.exists());

        // Somebody else's stays.
        let _other = ours(&name);
        let mut listening = ours(&path);
        listening.add_name(&name).unwrap();
        assert!(listening.name.is_none());
        remove_leftover(&path, Some(&name)).unwrap();
        drop(listening);
        UnixStream::connect(&name).unwrap();
    }
}
