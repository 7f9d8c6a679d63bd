//! The cgroup freezer, written directly: `runc pause` would refuse what is paused already, and a
//! freezer that sticks has to be helped.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::container::{Cgroup, CgroupVersion};

/// How long freezing or thawing may take: as long as a process may stay inside the kernel.
pub const LIMIT: Duration = Duration::from_secs(10);
/// A v1 freezer that is still FREEZING after this is thawed and tried again.
const STUCK: Duration = Duration::from_millis(500);
const POLL: Duration = Duration::from_millis(1);

/// Freezes and thaws the container's processes.
pub trait Freezer {
    /// Whether they are frozen, or about to be.
    fn frozen(&self) -> Result<bool, FreezerError>;
    /// Freezes and waits until all are.
    fn freeze(&self) -> Result<(), FreezerError>;
    /// Thaws.
    fn thaw(&self) -> Result<(), FreezerError>;
}

/// The freezer did not obey.
#[derive(Debug, thiserror::Error)]
pub enum FreezerError {
    /// The kernel refused.
    #[error("cannot use the freezer {}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It took too long.
    #[error("{} is still {state} after {LIMIT:?}", directory.display())]
    Stuck {
        /// The cgroup.
        directory: PathBuf,
        /// What it says.
        state: String,
    },
}

impl Freezer for Cgroup {
    fn frozen(&self) -> Result<bool, FreezerError> {
        let state = read(&self.file())?;
        Ok(match self.version {
            CgroupVersion::V1 => state != "THAWED",
            CgroupVersion::V2 => state == "1",
        })
    }

    fn freeze(&self) -> Result<(), FreezerError> {
        match self.version {
            CgroupVersion::V1 => self.freeze_v1(),
            CgroupVersion::V2 => {
                write(&self.file(), "1")?;
                self.wait_v2("frozen 1")
            }
        }
    }

    fn thaw(&self) -> Result<(), FreezerError> {
        match self.version {
            CgroupVersion::V1 => {
                let path = self.file();
                write(&path, "THAWED")?;
                let deadline = Instant::now() + LIMIT;
                while read(&path)? != "THAWED" {
                    self.give_up_after(deadline, &path)?;
                    std::thread::sleep(POLL);
                }
                Ok(())
            }
            CgroupVersion::V2 => {
                write(&self.file(), "0")?;
                self.wait_v2("frozen 0")
            }
        }
    }
}

impl Cgroup {
    fn file(&self) -> PathBuf {
        self.directory.join(self.version.freezer())
    }

    fn freeze_v1(&self) -> Result<(), FreezerError> {
        let path = self.file();
        let deadline = Instant::now() + LIMIT;
        loop {
            write(&path, "FROZEN")?;
            let stuck = Instant::now() + STUCK;
            loop {
                // The state is brought up to date by reading it.
                if read(&path)? == "FROZEN" {
                    return Ok(());
                }
                if Instant::now() >= stuck {
                    break;
                }
                std::thread::sleep(POLL);
            }
            self.give_up_after(deadline, &path)?;
            // A task that forks while the cgroup freezes can keep it FREEZING for ever; runc
            // helps itself in the same way (runc#2774).
            write(&path, "THAWED")?;
            std::thread::sleep(POLL);
        }
    }

    fn wait_v2(&self, wanted: &str) -> Result<(), FreezerError> {
        let path = self.directory.join("cgroup.events");
        let deadline = Instant::now() + LIMIT;
        while !read(&path)?.lines().any(|line| line == wanted) {
            self.give_up_after(deadline, &path)?;
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    fn give_up_after(&self, deadline: Instant, path: &Path) -> Result<(), FreezerError> {
        if Instant::now() < deadline {
            return Ok(());
        }
        let state = read(path)?.replace('\n', " ");
        Err(FreezerError::Stuck { directory: self.directory.clone(), state })
    }
}

fn read(path: &Path) -> Result<String, FreezerError> {
    fs::read_to_string(path)
        .map(|text| text.trim_end().to_owned())
        .map_err(|source| FreezerError::File { path: path.to_owned(), source })
}

fn write(path: &Path, value: &str) -> Result<(), FreezerError> {
    fs::write(path, value).map_err(|source| FreezerError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup(version: CgroupVersion, files: &[(&str, &str)]) -> (tempfile::TempDir, Cgroup) {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let cgroup = Cgroup { version, directory: directory.path().to_owned() };
        (directory, cgroup)
    }

    #[test]
    fn v1_freezing_counts_as_frozen() {
        for (state, frozen) in [("THAWED\n", false), ("FREEZING\n", true), ("FROZEN\n", true)] {
            let (_directory, cgroup) = cgroup(CgroupVersion::V1, &[("freezer.state", state)]);
            assert_eq!(cgroup.frozen().unwrap(), frozen, "{state}");
        }
    }

    #[test]
    fn v2_waits_for_the_event() {
        let files = [("cgroup.freeze", "0\n"), ("cgroup.events", "populated 1\nfrozen 1\n")];
        let (directory, cgroup) = cgroup(CgroupVersion::V2, &files);
        cgroup.freeze().unwrap();
        assert_eq!(fs::read_to_string(directory.path().join("cgroup.freeze")).unwrap(), "1");
        assert!(cgroup.frozen().unwrap());
    }

    #[test]
    fn a_missing_freezer_names_the_file() {
        let (_directory, cgroup) = cgroup(CgroupVersion::V1, &[]);
        assert!(cgroup.frozen().unwrap_err().to_string().contains("freezer.state"));
    }
}
