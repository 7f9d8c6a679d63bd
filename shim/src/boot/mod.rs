//! What containerd runs this executable for, besides serving a container's requests.
//!
//! * `start`: [`start`] finds or makes the server of the container's group and says where it is.
//! * `delete`: [`delete`] removes what a container whose server is lost has left.
//! * `-info`: [`info`] describes the runtime. `-v`: [`version`].
//! * without an action: serve; [`socket::inherited`] is the listening socket.
//!
//! Each is a short-lived process with the bundle as working directory, which answers on standard
//! output and prints nothing else.

mod address;
mod arguments;
mod delete;
mod info;
mod placement;
mod protocol;
pub mod socket;
mod start;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::options::spec::Spec;

pub use arguments::{Action, Arguments, ArgumentsError};
pub use delete::{DeleteCall, DeleteError, Deleted, delete};
pub use info::{InfoError, info};
pub use protocol::read_input;
pub use start::{Serve, StartError, start};

/// The name under which containerd knows us.
pub const RUNTIME_NAME: &str = "io.containerd.runc.stasis";

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit, where the build knows it.
const REVISION: Option<&str> = option_env!("STASIS_REVISION");

/// In the server, with its first bundle as working directory: the other name that `start` gave to
/// the listening socket, if any.
#[must_use]
pub fn other_name(arguments: &Arguments, listener: &UnixListener) -> Option<PathBuf> {
    let address = listener.local_addr().ok()?;
    let directory = address.as_pathname()?.parent()?;
    let spec = Spec::read(Path::new(".")).ok()?;
    address::gos_path(directory, &arguments.address, &arguments.namespace, &spec)
}

/// What `-v` prints, in the form of containerd's own shim.
#[must_use]
pub fn version(program: &Path) -> String {
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
    let revision = REVISION.map(|revision| format!("  Revision: {revision}\n"));
    format!("{name}:\n  Version:  {VERSION}\n{}\n", revision.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_has_the_form_of_gos_shim() {
        let text = version(Path::new("/usr/bin/containerd-shim-runc-v2"));
        assert!(text.starts_with("containerd-shim-runc-v2:\n  Version:  0.1.0\n"), "{text}");
    }
}
