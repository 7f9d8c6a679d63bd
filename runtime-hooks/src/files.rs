//! Files that others than root may have had a hand in.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// The contents of a regular file of at most `most` bytes. Nothing else is waited for: opening a FIFO
/// that nobody writes would hold the caller up for ever.
pub(crate) fn read_regular(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut contents = Vec::new();
    let read = file.take(most + 1).read_to_end(&mut contents)?;
    if u64::try_from(read).is_ok_and(|read| read > most) {
        let why = format!("it has more than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(contents)
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
    }
}
