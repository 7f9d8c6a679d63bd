//! Versions in the output of commands.

use std::fmt;

/// A version by its leading numbers: `4.1.1`, `1.1.15+ds1` and `580.159.04` all have some.
/// Compared number by number; those that are not given count as 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) [u32; 3]);

impl Version {
    pub(super) const fn of(major: u32, minor: u32) -> Self {
        Self([major, minor, 0])
    }

    pub(super) fn major(self) -> u32 {
        self.0[0]
    }

    /// Parses `1`, `1.2`, `1.2.3`, and ignores what follows them: `-rc1`, `+ds1`, `.4`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut numbers = [0; 3];
        for (i, part) in text.split('.').take(3).enumerate() {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            match part[..digits].parse() {
                Ok(number) => numbers[i] = number,
                Err(_) if i == 0 => return None,
                Err(_) => break,
            }
            if digits < part.len() {
                break;
            }
        }
        Some(Self(numbers))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [major, minor, 0] => write!(f, "{major}.{minor}"),
            [major, minor, patch] => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed() {
        for (text, want) in [
            ("4.1.1", [4, 1, 1]),
            ("4.2", [4, 2, 0]),
            ("4", [4, 0, 0]),
            ("1.1.15+ds1", [1, 1, 15]),
            ("1.3.0-rc.1", [1, 3, 0]),
            ("1.2-dev.5", [1, 2, 0]),
            ("580.159.04", [580, 159, 4]),
            ("6.18.44-fc-v657", [6, 18, 44]),
            ("5.14.0-427.el9.x86_64", [5, 14, 0]),
            ("1.2.3.4", [1, 2, 3]),
        ] {
            assert_eq!(Version::parse(text), Some(Version(want)), "{text}");
        }
        for text in ["", "v1.2", ".1", "unknown", "99999999999.1"] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
    }

    #[test]
    fn versions_are_compared_by_number() {
        let version = |text| Version::parse(text).unwrap();
        assert!(version("3.17.1") < version("3.18"));
        assert!(version("1.10") > version("1.9.9"));
        assert!(version("575.57.08") > version("575.51.03"));
    }
}
