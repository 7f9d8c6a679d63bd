//! The shims that the same tests are run through.

use std::path::Path;

/// Which shim a container gets, and under which name containerd knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shim {
    /// containerd's own: `io.containerd.runc.v2`.
    Go,
    /// Ours under its own name, `io.containerd.runc.stasis`.
    Stasis,
    /// Ours, installed as `containerd-shim-runc-v2` before containerd's own in PATH.
    StasisAsV2,
}

impl Shim {
    /// Those that are ours.
    pub const OURS: [Self; 2] = [Self::Stasis, Self::StasisAsV2];

    /// All of them.
    pub const ALL: [Self; 3] = [Self::Go, Self::Stasis, Self::StasisAsV2];

    /// A word for names of files and tests.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Go => "go",
            Self::Stasis => "stasis",
            Self::StasisAsV2 => "v2",
        }
    }

    /// How tables call it.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Go => "go",
            Self::Stasis => "stasis",
            Self::StasisAsV2 => "stasis as v2",
        }
    }

    /// Arguments of `ctr run` by which a container gets this shim. `runc` is the program that
    /// the shim is to take for runc, `config` the file that says the same to ours.
    #[must_use]
    pub fn arguments(self, runc: &Path, config: &Path) -> Vec<String> {
        let pair = |flag: &str, path: &Path| vec![flag.to_owned(), path.display().to_string()];
        match self {
            Self::Go | Self::StasisAsV2 => pair("--runc-binary", runc),
            Self::Stasis => {
                let mut arguments = vec!["--runtime".to_owned(), self.runtime().to_owned()];
                arguments.extend(pair("--runtime-config-path", config));
                arguments
            }
        }
    }

    /// The runtime's name.
    #[must_use]
    pub fn runtime(self) -> &'static str {
        match self {
            Self::Go | Self::StasisAsV2 => "io.containerd.runc.v2",
            Self::Stasis => "io.containerd.runc.stasis",
        }
    }
}
