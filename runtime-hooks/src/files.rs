//! Files that others than root may have had a hand in.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::libc;

/// Opens for reading what is held by a descriptor of `O_PATH`; none if that is not a regular file. So it
/// is looked at before it is opened, and cannot be exchanged in between: to open a device can already do
/// something, and what root has unpacked may hold any. Nor is a FIFO waited for that nobody writes.
pub(crate) fn open_held(held: &File) -> io::Result<Option<File>> {
    if !held.metadata()?.is_file() {
        return Ok(None);
    }
    let path = format!("/proc/self/fd/{}", held.as_raw_fd());
    // Nor whoever has a lease on it.
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map(Some)
}

/// Opens a regular file for reading; none if it is something else, a link among others.
pub(crate) fn open_regular(path: &Path) -> io::Result<Option<File>> {
    open_held(&hold(path, libc::O_NOFOLLOW)?)
}

/// Without any effect.
fn hold(path: &Path, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_PATH | flags).open(path)
}

/// The contents of a regular file of at most `most` bytes, also behind a link.
pub(crate) fn read_regular(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let Some(file) = open_held(&hold(path, 0)?)? else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    };
    let mut contents = Vec::new();
    let read = file.take(most + 1).read_to_end(&mut contents)?;
    if u64::try_from(read).is_ok_and(|read| read > most) {
        let why = format!("it has more than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(contents)
}

/// Makes a device that no driver has, so that opening it fails with an error of its own. Only root can.
#[cfg(test)]
pub(crate) fn make_device(at: &Path) -> bool {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let made = mknod(at, SFlag::S_IFCHR, Mode::S_IRWXU, makedev(4095, 0));
    assert!(made.is_ok() || !nix::unistd::geteuid().is_root(), "{made:?}");
    made.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_that_is_not_too_large_is_read() {
        let host = tempfile::tempdir().unwrap();
        let at = |name: &str| host.path().join(name);
        std::fs::write(at("file"), "12345").unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read_regular(&at("file"), 5).unwrap(), b"12345");
        assert_eq!(read_regular(&at("link"), 5).unwrap(), b"12345");
        let said = |name: &str, most| read_regular(&at(name), most).unwrap_err().to_string();
        assert_eq!(said("file", 4), "it has more than 4 bytes");
        assert_eq!(said("fifo", 4), "it is not a regular file");
        assert_eq!(said(".", 4), "it is not a regular file");
        assert!(open_regular(&at("file")).unwrap().is_some());
        assert!(open_regular(&at("link")).unwrap().is_none());
        if make_device(&at("device")) {
            assert!(File::open(at("device")).is_err());
            assert_eq!(said("device", 4), "it is not a regular file");
            assert!(open_regular(&at("device")).unwrap().is_none());
        }
    }

    #[test]
    fn what_is_held_is_opened_and_not_what_has_its_name() {
        let host = tempfile::tempdir().unwrap();
        let path = host.path().join("file");
        std::fs::write(&path, "first").unwrap();
        let held = hold(&path, 0).unwrap();
        std::fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let text = io::read_to_string(open_held(&held).unwrap().unwrap()).unwrap();
        assert_eq!(text, "first");
        assert!(open_regular(&path).unwrap().is_none());
    }
}
