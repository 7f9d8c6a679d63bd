//! Names of CDI devices: `vendor/class=device`.

use std::fmt;
use std::str::FromStr;

use stasis_config::text::printable;

/// A longer name is a mistake.
const MAX_BYTES: usize = 512;

/// A device in full.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DeviceName {
    /// `vendor/class`.
    pub(super) kind: String,
    /// The name among the devices of its kind.
    pub(super) device: String,
}

impl DeviceName {
    /// A device of NVIDIA, by index, UUID or `all`.
    pub(super) fn of_nvidia(device: &str) -> Result<Self, String> {
        let name = Self { kind: "nvidia.com/gpu".to_owned(), device: device.to_owned() };
        check_device(device).map(|()| name)
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let not_a_name = || format!("`{}` is no vendor/class=device", printable(text, 64));
        let (kind, device) = text.split_once('=').ok_or_else(not_a_name)?;
        check_kind(kind)?;
        check_device(device)?;
        Ok(Self { kind: kind.to_owned(), device: device.to_owned() })
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.device)
    }
}

/// `vendor/class`.
pub(super) fn check_kind(kind: &str) -> Result<(), String> {
    let fits = |part: &str, inner: &[u8]| {
        let bytes = part.as_bytes();
        bytes.first().is_some_and(u8::is_ascii_alphabetic)
            && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || inner.contains(byte))
    };
    let good = kind.len() <= MAX_BYTES
        && kind
            .split_once('/')
            .is_some_and(|(vendor, class)| fits(vendor, b"_-.") && fits(class, b"_-"));
    if good { Ok(()) } else { Err(format!("`{}` is no vendor/class", printable(kind, 64))) }
}

/// The part behind the `=`.
pub(super) fn check_device(device: &str) -> Result<(), String> {
    let bytes = device.as_bytes();
    let good = bytes.len() <= MAX_BYTES
        && bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_-.:".contains(byte));
    if good { Ok(()) } else { Err(format!("`{}` is no name of a device", printable(device, 64))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_specification() {
        for text in ["nvidia.com/gpu=0", "a/b=GPU-8d2f:1", "v_1-x.org/c_d-e=0:0", "a/b=all"] {
            assert_eq!(text.parse::<DeviceName>().unwrap().to_string(), text);
        }
        let long = format!("a/b={}", "x".repeat(1 << 20));
        for text in [
            "",
            "=",
            "a/b",
            "a/b=",
            "/b=c",
            "a/=c",
            "b=c",
            "1a/b=c",
            "a/b.c=d",
            "a/b=-x",
            "a/b=x-",
            "a/b=x/../y",
            "a/b=c=d",
            "a b/c=d",
            "a/b=\n",
            "a/b=\u{e9}",
            "../b=c",
            "a/b/c=d",
            &long,
        ] {
            let error = text.parse::<DeviceName>().unwrap_err();
            assert!(error.len() < 200 && !error.contains('\n'), "{error:?}");
        }
    }

    #[test]
    fn nvidias_devices_need_no_kind() {
        assert_eq!(DeviceName::of_nvidia("0").unwrap().to_string(), "nvidia.com/gpu=0");
        assert!(DeviceName::of_nvidia("a,b").is_err());
    }
}
