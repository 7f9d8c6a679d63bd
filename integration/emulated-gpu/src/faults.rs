//! Faults to order: `STORE/faults`, applied in the caller's library.
//!
//! One fault a line, `<call> <what> [count=N] [skip=N]`; `#` begins a comment.
//! The file is read again at each call. The first line that fires wins; lines
//! after it do not count that call.
//!
//! - call: `init` (every `cuInit`, an application's too), `probe`
//!   (get-restore-tid), `state`, `lock`, `checkpoint`, `restore`, `unlock`, `any`.
//! - what:
//!   - `error:N`: the call returns N, the target is not touched. `error:0` is a
//!     success that did nothing, and the state says so.
//!   - `hang`: the call never returns, the target is not touched.
//!   - `hang-after`: the target does the work, the call never returns.
//!   - `crash`: the caller's process aborts before anything is done.
//!   - `lie`: returns 0 and does nothing; the state read next says that it was done.
//!   - `lost` (restore): what 580 does with shared or peer memory that cannot come
//!     back: 1, then 304 each time; the target stays CHECKPOINTED for ever.
//! - `count=N`: fires N times (default: always); `skip=N`: lets the first N calls pass.
//!
//! How often a line has matched is kept in `STORE/faults.count`, and forgotten
//! when `faults` is written anew.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;

use crate::cuda_error::{CudaError, Result};
use crate::settings::{complain, store_dir};
use crate::store::StoreLock;

/// The call that a fault is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// `cuInit`.
    Init,
    /// `cuCheckpointProcessGetRestoreThreadId`.
    Probe,
    /// `cuCheckpointProcessGetState`.
    State,
    /// `cuCheckpointProcessLock`.
    Lock,
    /// `cuCheckpointProcessCheckpoint`.
    Checkpoint,
    /// `cuCheckpointProcessRestore`.
    Restore,
    /// `cuCheckpointProcessUnlock`.
    Unlock,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The call returns this `CUresult`.
    Error(i32),
    /// The call never returns.
    Hang,
    /// The call does its work and never returns.
    HangAfter,
    /// The caller dies.
    Crash,
    /// The call and the next state say that it was done, and it was not.
    Lie,
    /// The memory cannot come back.
    Lost,
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The call, or any.
    pub call: Option<Call>,
    /// What goes wrong.
    pub what: What,
    /// How often it fires.
    pub count: u64,
    /// How many calls pass before.
    pub skip: u64,
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(line: &str) -> std::result::Result<Self, String> {
        let mut words = line.split_whitespace();
        let call = match words.next().unwrap_or_default() {
            "init" => Some(Call::Init),
            "probe" => Some(Call::Probe),
            "state" => Some(Call::State),
            "lock" => Some(Call::Lock),
            "checkpoint" => Some(Call::Checkpoint),
            "restore" => Some(Call::Restore),
            "unlock" => Some(Call::Unlock),
            "any" => None,
            other => return Err(format!("unknown call: {other}")),
        };
        let number = |text: &str| text.parse().map_err(|_| format!("not a number: {text}"));
        let what = match words.next().unwrap_or_default() {
            "hang" => What::Hang,
            "hang-after" => What::HangAfter,
            "crash" => What::Crash,
            "lie" => What::Lie,
            "lost" if call == Some(Call::Restore) => What::Lost,
            other => match other.strip_prefix("error:") {
                Some(code) => {
                    What::Error(code.parse().map_err(|_| format!("not a number: {code}"))?)
                }
                None => return Err(format!("unknown fault: {other}")),
            },
        };
        let mut fault = Self { call, what, count: u64::MAX, skip: 0 };
        for word in words {
            match word.split_once('=') {
                Some(("count", value)) => fault.count = number(value)?,
                Some(("skip", value)) => fault.skip = number(value)?,
                _ => return Err(format!("unknown word: {word}")),
            }
        }
        Ok(fault)
    }
}

/// The fault that fires at this call, if one does; the call is counted.
pub(crate) fn fire(call: Call) -> Result<Option<What>> {
    let path = store_dir().join("faults");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut faults = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let fault: Fault = line.parse().map_err(|reason: String| {
            complain(&path, &reason);
            CudaError::UNKNOWN
        })?;
        if fault.call.is_none_or(|wanted| wanted == call) {
            faults.push((line, fault));
        }
    }
    if faults.is_empty() {
        return Ok(None);
    }
    let _lock = StoreLock::take()?;
    let metadata = fs::metadata(&path)?;
    let version = format!("{} {} {}", metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
    let counted = store_dir().join("faults.count");
    let before = fs::read_to_string(&counted).unwrap_or_default();
    let mut counts = read_counts(&before, &version);
    let mut fired = None;
    for (line, fault) in faults {
        let matched = counts.entry(line).or_default();
        *matched += 1;
        if *matched > fault.skip && *matched - fault.skip <= fault.count {
            fired = Some(fault.what);
            break;
        }
    }
    let mut after = version.clone() + "\n";
    for (line, count) in &counts {
        // Writing to a String does not fail.
        let _ = writeln!(after, "{count} {line}");
    }
    fs::write(counted, after)?;
    Ok(fired)
}

fn read_counts<'a>(text: &'a str, version: &str) -> HashMap<&'a str, u64> {
    let mut lines = text.lines();
    if lines.next() != Some(version) {
        return HashMap::new();
    }
    lines
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(n, l)| Some((l, n.parse().ok()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_each_kind() {
        let cases = [
            ("lock error:600", Some(Call::Lock), What::Error(600)),
            ("any hang", None, What::Hang),
            ("checkpoint hang-after", Some(Call::Checkpoint), What::HangAfter),
            ("init crash", Some(Call::Init), What::Crash),
            ("unlock lie", Some(Call::Unlock), What::Lie),
            ("restore lost", Some(Call::Restore), What::Lost),
        ];
        for (line, call, what) in cases {
            let fault = Fault { call, what, count: u64::MAX, skip: 0 };
            assert_eq!(line.parse(), Ok(fault), "{line}");
        }
        let fault: Fault = "probe error:3 count=2 skip=1".parse().unwrap();
        assert_eq!((fault.count, fault.skip), (2, 1));
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        for line in ["lok hang", "lock", "lock error:x", "lock lost", "lock hang often=1"] {
            assert!(line.parse::<Fault>().is_err(), "{line}");
        }
    }
}
