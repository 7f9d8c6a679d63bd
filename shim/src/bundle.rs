//! What is where in a bundle, for the server and for `delete`, which is a process of its own.

use std::fs;
use std::io;
use std::path::Path;

use containerd_shim::mount::umount_recursive;

/// The file that runc writes init's pid to.
pub const PID_FILE: &str = "init.pid";
/// Where the rootfs is mounted.
pub const ROOTFS: &str = "rootfs";
/// The file that all calls of runc for the container log into.
pub const RUNTIME_LOG: &str = "log.json";

/// Unmounts a rootfs and what is mounted below it. Not lazily: what is still in use is told.
///
/// # Errors
/// In words, for whoever asked.
pub fn unmount(rootfs: &Path) -> Result<(), String> {
    // The kernel's list has no links in it.
    let path = match fs::canonicalize(rootfs) {
        Ok(path) => path,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.to_string()),
    };
    umount_recursive(path.to_str(), 0).map_err(|error| error.to_string())
}
