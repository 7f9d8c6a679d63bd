//! Every format of Stasis that outlives a process.
//!
//! * [`config`]: `/etc/stasis/config.toml`, what the administrator of a host decides.
//! * [`annotations`]: `dev.stasis.*` on a container, what its owner asks for, as far as the
//!   configuration allows it.
//! * [`manifest`]: `stasis.json` in an image directory, what a restore must know about a
//!   checkpoint.
//! * [`text`]: how text from outside is put into messages.
//!
//! What does not live here: no process is started, no driver or `/proc` is asked, nothing is
//! decided about a running container. The only I/O is reading and writing these files. All three
//! formats refuse what they do not know, because a setting that is silently ignored shows up much
//! later, as a checkpoint that cannot be restored.

pub mod annotations;
pub mod config;
pub mod duration;
pub mod manifest;
pub mod text;

pub use annotations::{AnnotationError, AnnotationName, Annotations};
pub use config::{Config, ConfigError};
pub use manifest::{MANIFEST_FILE, Manifest, ManifestError};
