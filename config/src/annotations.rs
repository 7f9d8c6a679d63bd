//! `dev.stasis.*`: what the owner of a container asks for.
//!
//! Annotations come from whoever may create a container, so each needs the leave of the
//! configuration ([`AnnotationPolicy`]), and a wrong one is an error: a container that asks for
//! something and silently does not get it is worse than one that does not start.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Deserialize;

use crate::config::AnnotationPolicy;
use crate::duration;
use crate::text::{one_of, quoted};

/// What the keys of all our annotations begin with. Others are none of our business.
pub const PREFIX: &str = "dev.stasis.";

/// An annotation that Stasis knows. In the configuration it is named without the prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnnotationName {
    /// `dev.stasis.job = "file"`: give the container a job file, in which its CUDA processes may
    /// share GPU memory (`cuIpcGetMemHandle`) and keep it.
    Job,
    /// `dev.stasis.multi-process = "allow"`: checkpoint a container with several CUDA processes,
    /// although memory that they share may be lost at restore.
    MultiProcess,
    /// `dev.stasis.multi-gpu = "allow"`: checkpoint a process that uses several GPUs, although
    /// its memory may be lost at restore.
    MultiGpu,
    /// `dev.stasis.lock-timeout = "30s"`: the container's own [`lock_timeout`], at most
    /// [`max_lock_timeout`].
    ///
    /// [`lock_timeout`]: crate::config::Cuda::lock_timeout
    /// [`max_lock_timeout`]: AnnotationPolicy::max_lock_timeout
    LockTimeout,
    /// `dev.stasis.device-map = "OLD=NEW,…"`: when the container is restored, which of its GPUs takes
    /// the place of which of the image's. It reaches only GPUs of the container itself.
    DeviceMap,
    /// `dev.stasis.restore = "suspended"`: a restored container begins with its CUDA suspended, without
    /// a GPU, until `stasis resume`.
    Restore,
}

impl AnnotationName {
    /// All that there are.
    pub const ALL: [Self; 6] = [
        Self::Job,
        Self::MultiProcess,
        Self::MultiGpu,
        Self::LockTimeout,
        Self::DeviceMap,
        Self::Restore,
    ];

    /// The whole key, as it stands on a container.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Job => "dev.stasis.job",
            Self::MultiProcess => "dev.stasis.multi-process",
            Self::MultiGpu => "dev.stasis.multi-gpu",
            Self::LockTimeout => "dev.stasis.lock-timeout",
            Self::DeviceMap => "dev.stasis.device-map",
            Self::Restore => "dev.stasis.restore",
        }
    }

    /// The name in the configuration: the key without [`PREFIX`].
    #[must_use]
    pub fn short(self) -> &'static str {
        &self.key()[PREFIX.len()..]
    }

    /// Every name, the default of [`AnnotationPolicy::allow`].
    #[must_use]
    pub fn all() -> BTreeSet<Self> {
        Self::ALL.into()
    }
}

/// What a container asks for. The default is a container without annotations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an annotation of its own")]
pub struct Annotations {
    /// Give the container a job file.
    pub job: bool,
    /// Checkpoint although several processes of the container use CUDA.
    pub multi_process: bool,
    /// Checkpoint although one process uses several GPUs.
    pub multi_gpu: bool,
    /// How long locking all processes may take, instead of the configured time. Between 1 ms and
    /// the configured maximum.
    pub lock_timeout: Option<Duration>,
    /// Pairs of GPUs as they were written, `OLD=NEW,…`: what they mean depends on the host.
    pub device_map: Option<String>,
    /// Whether a restored container begins suspended.
    pub restore_suspended: bool,
}

/// An annotation that cannot be honoured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnnotationError {
    /// A key with our prefix that means nothing.
    #[error("unknown annotation {}: expected {}", quoted(.key), one_of(AnnotationName::ALL.map(AnnotationName::key)))]
    Unknown {
        /// The whole key, as it was given.
        key: String,
    },
    /// The configuration of this host does not list it.
    #[error("annotation {} is not allowed on this host: annotations.allow in the configuration of Stasis does not list \"{}\"", .name.key(), .name.short())]
    NotAllowed {
        /// Which one.
        name: AnnotationName,
    },
    /// The value does not fit.
    #[error("annotation {} has the value {}: {reason}", .name.key(), quoted(.value))]
    Value {
        /// Which one.
        name: AnnotationName,
        /// As it was given. Messages escape and cut it.
        value: String,
        /// What is wrong and what is expected.
        reason: String,
    },
}

impl Annotations {
    /// Picks ours out of all annotations of a container and checks them.
    ///
    /// # Errors
    /// If a key with [`PREFIX`] is unknown or not allowed, or a value does not fit. Of several
    /// wrong ones the first by key is reported.
    pub fn parse<'a>(
        all: impl IntoIterator<Item = (&'a str, &'a str)>,
        policy: &AnnotationPolicy,
    ) -> Result<Self, AnnotationError> {
        let all: Vec<_> = all.into_iter().collect();
        // Sorted, because annotations come out of a hash map: the same container must get the
        // same error each time.
        let ours: BTreeMap<_, _> =
            all.iter().copied().filter(|(k, _)| k.starts_with(PREFIX)).collect();
        let mut out = Self::default();
        for (key, value) in ours {
            let name = AnnotationName::ALL
                .into_iter()
                .find(|name| name.key() == key)
                .ok_or_else(|| AnnotationError::Unknown { key: key.to_owned() })?;
            if !policy.allow.contains(&name) {
                return Err(AnnotationError::NotAllowed { name });
            }
            let wrong = |reason| AnnotationError::Value { name, value: value.to_owned(), reason };
            match name {
                AnnotationName::Job => out.job = only("file", value).map_err(wrong)?,
                AnnotationName::MultiProcess => {
                    out.multi_process = only("allow", value).map_err(wrong)?;
                }
                AnnotationName::MultiGpu => out.multi_gpu = only("allow", value).map_err(wrong)?,
                AnnotationName::LockTimeout => {
                    out.lock_timeout =
                        Some(timeout(value, policy.max_lock_timeout).map_err(wrong)?);
                }
                AnnotationName::DeviceMap => {
                    out.device_map = Some(pairs(value).map_err(wrong)?.to_owned());
                }
                AnnotationName::Restore => {
                    out.restore_suspended = only("suspended", value).map_err(wrong)?;
                }
            }
        }
        // A pod's annotations are its sandbox's, too, in which nothing computes.
        if SANDBOX.iter().any(|sandbox| all.contains(sandbox)) {
            out.job = false;
        }
        Ok(out)
    }
}

/// How containerd and CRI-O mark the container that only holds a pod's namespaces.
const SANDBOX: [(&str, &str); 2] = [
    ("io.kubernetes.cri.container-type", "sandbox"),
    ("io.kubernetes.cri-o.ContainerType", "sandbox"),
];

/// A switch has one value. There is no 'deny': leaving the annotation out says that.
fn only(expected: &str, value: &str) -> Result<bool, String> {
    if value == expected { Ok(true) } else { Err(format!("expected \"{expected}\"")) }
}

/// The form only.
fn pairs(value: &str) -> Result<&str, String> {
    let is_pair = |pair: &str| {
        pair.split_once('=').is_some_and(|(old, new)| !old.is_empty() && !new.is_empty())
    };
    if value.len() <= MAX_PAIRS && value.split(',').all(is_pair) {
        Ok(value)
    } else {
        Err("expected pairs of GPUs, such as \"OLD=NEW,OLD=NEW\"".to_owned())
    }
}

/// In bytes: enough for 50 GPUs by their UUIDs.
const MAX_PAIRS: usize = 4096;

fn timeout(value: &str, max: Duration) -> Result<Duration, String> {
    let given =
        duration::parse(value).map_err(|why| format!("{why}, expected {}", duration::FORM))?;
    if given < duration::SHORTEST {
        return Err(format!("expected at least {}", duration::show(duration::SHORTEST)));
    }
    if given > max {
        return Err(format!(
            "expected at most {}, which is annotations.max-lock-timeout in the configuration of \
             Stasis",
            duration::show(max)
        ));
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(all: &[(&str, &str)]) -> Result<Annotations, String> {
        Annotations::parse(all.iter().copied(), &AnnotationPolicy::default())
            .map_err(|e| e.to_string())
    }

    #[test]
    fn names_agree_with_the_prefix_and_with_the_configuration() {
        for name in AnnotationName::ALL {
            assert!(name.key().starts_with(PREFIX));
            let text = format!("allow = [\"{}\"]", name.short());
            let policy: BTreeMap<String, Vec<AnnotationName>> = toml::from_str(&text).unwrap();
            assert_eq!(policy["allow"], [name]);
        }
    }

    #[test]
    fn annotations_of_others_are_ignored() {
        let all = [
            ("dev.stasis", "x"),
            ("dev.stasisx.multi-gpu", "x"),
            ("DEV.STASIS.multi-gpu", "x"),
            ("io.kubernetes.cri.container-type", "container"),
            ("", ""),
        ];
        assert_eq!(parse(&all), Ok(Annotations::default()));
    }

    #[test]
    fn all_can_be_given() {
        let all = [
            ("dev.stasis.job", "file"),
            ("dev.stasis.multi-process", "allow"),
            ("dev.stasis.multi-gpu", "allow"),
            ("dev.stasis.lock-timeout", "1m 30s"),
            ("dev.stasis.device-map", "0=1,GPU-a=GPU-b"),
            ("dev.stasis.restore", "suspended"),
        ];
        let want = Annotations {
            job: true,
            multi_process: true,
            multi_gpu: true,
            lock_timeout: Some(Duration::from_secs(90)),
            device_map: Some("0=1,GPU-a=GPU-b".into()),
            restore_suspended: true,
        };
        assert_eq!(parse(&all), Ok(want));
    }

    #[test]
    fn an_unknown_one_lists_the_known() {
        assert_eq!(
            parse(&[("dev.stasis.multigpu", "allow")]).unwrap_err(),
            "unknown annotation `dev.stasis.multigpu`: expected dev.stasis.job, \
             dev.stasis.multi-process, dev.stasis.multi-gpu, dev.stasis.lock-timeout, \
             dev.stasis.device-map or dev.stasis.restore"
        );
        assert!(parse(&[("dev.stasis.", "")]).is_err());
    }

    #[test]
    fn the_same_error_whatever_the_order() {
        let (a, b) = (("dev.stasis.aa", ""), ("dev.stasis.bb", ""));
        assert_eq!(parse(&[a, b]), parse(&[b, a]));
    }

    #[test]
    fn one_that_is_not_allowed_names_the_key() {
        let policy = AnnotationPolicy {
            allow: [AnnotationName::MultiGpu].into(),
            ..AnnotationPolicy::default()
        };
        let all = [("dev.stasis.multi-gpu", "allow"), ("dev.stasis.multi-process", "allow")];
        assert_eq!(
            Annotations::parse(all, &policy).unwrap_err().to_string(),
            "annotation dev.stasis.multi-process is not allowed on this host: annotations.allow \
             in the configuration of Stasis does not list \"multi-process\""
        );
    }

    #[test]
    fn a_switch_takes_allow_only() {
        for value in ["", "Allow", "true", "allow ", "deny"] {
            assert_eq!(
                parse(&[("dev.stasis.multi-gpu", value)]).unwrap_err(),
                format!(
                    "annotation dev.stasis.multi-gpu has the value `{value}`: expected \"allow\""
                )
            );
        }
    }

    #[test]
    fn a_job_is_made_of_a_file() {
        assert!(parse(&[("dev.stasis.job", "file")]).unwrap().job);
        assert_eq!(
            parse(&[("dev.stasis.job", "allow")]).unwrap_err(),
            "annotation dev.stasis.job has the value `allow`: expected \"file\""
        );
    }

    #[test]
    fn a_device_map_is_made_of_pairs() {
        for value in ["", "0", "0=", "=1", "0=1,", &"0=1,".repeat(2000)] {
            let said = parse(&[("dev.stasis.device-map", value)]).unwrap_err();
            assert!(
                said.ends_with("expected pairs of GPUs, such as \"OLD=NEW,OLD=NEW\""),
                "{said}"
            );
        }
        assert!(parse(&[("dev.stasis.restore", "running")]).is_err());
    }

    #[test]
    fn a_pods_sandbox_is_given_no_job() {
        let job = ("dev.stasis.job", "file");
        let kind = "io.kubernetes.cri.container-type";
        assert!(!parse(&[job, (kind, "sandbox")]).unwrap().job);
        assert!(parse(&[job, (kind, "container")]).unwrap().job);
        assert!(!parse(&[job, ("io.kubernetes.cri-o.ContainerType", "sandbox")]).unwrap().job);
    }

    #[test]
    fn the_lock_timeout_has_bounds() {
        let of = |value| parse(&[("dev.stasis.lock-timeout", value)]);
        assert!(of("1ms").is_ok());
        assert!(of("10m").is_ok());
        assert!(of("999us").unwrap_err().ends_with(": expected at least 1ms"));
        assert!(of("0s").unwrap_err().ends_with(": expected at least 1ms"));
        assert_eq!(
            of("601s").unwrap_err(),
            "annotation dev.stasis.lock-timeout has the value `601s`: expected at most 10m, which \
             is annotations.max-lock-timeout in the configuration of Stasis"
        );
        assert_eq!(
            of("30").unwrap_err(),
            "annotation dev.stasis.lock-timeout has the value `30`: the unit is missing, expected \
             a duration with a unit, such as \"10s\" or \"2m 30s\""
        );
        for value in ["", "0", "s", "-1s", "1e9s", "99999999999999999999s", "10 parsecs", "∞"] {
            assert!(of(value).is_err(), "{value}");
        }
    }

    #[test]
    fn a_hostile_value_neither_fills_nor_forges_a_log() {
        let long = format!("1{}\n\u{1b}[2J", "x".repeat(1 << 20));
        for all in [
            [("dev.stasis.lock-timeout", long.as_str())],
            [("dev.stasis.multi-gpu", long.as_str())],
            [("dev.stasis.device-map", long.as_str())],
            [("dev.stasis.multi-gpu", "\u{1b}[2J\nlevel=error")],
            [("dev.stasis.\u{1b}[2J\n\r\u{202e}", "allow")],
        ] {
            let error = parse(&all).unwrap_err();
            assert!(error.len() < 500, "{}", error.len());
            assert!(!error.chars().any(|c| c.is_control() || c == '\u{202e}'), "{error:?}");
        }
    }
}
