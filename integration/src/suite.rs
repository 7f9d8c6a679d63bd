//! The Debian of the lab in which the tests run.

use anyhow::{Context, Result, bail};

/// A lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    /// containerd 1.7, runc 1.1, Docker 26, Podman 5.4.
    Trixie,
    /// containerd 2.1, runc 1.3, Docker 28, Podman 5.8.
    Forky,
}

impl Suite {
    /// All labs.
    pub const ALL: [Self; 2] = [Self::Trixie, Self::Forky];

    /// The one that this process is in; `None` outside any.
    pub fn current() -> Result<Option<Self>> {
        let Some(word) = std::env::var_os("STASIS_SUITE") else { return Ok(None) };
        let word = word.to_str().context("STASIS_SUITE is no text")?;
        match Self::ALL.into_iter().find(|suite| suite.word() == word) {
            Some(suite) => Ok(Some(suite)),
            None => bail!("STASIS_SUITE names no lab: {word}"),
        }
    }

    /// Whether its containerd and ctr are of version 2.
    #[must_use]
    pub fn has_containerd_2(self) -> bool {
        match self {
            Self::Trixie => false,
            Self::Forky => true,
        }
    }

    /// Its name.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Trixie => "trixie",
            Self::Forky => "forky",
        }
    }
}
