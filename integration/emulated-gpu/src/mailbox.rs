//! Requests from a caller to the restore thread of a target, as plain files.
//!
//! The caller holds a lock on its request for as long as it waits. A request
//! whose lock is free was left by a caller that is dead: the target drops it,
//! so killing a caller that is blocked on a frozen target changes nothing. Once
//! taken (removed, so never executed twice) a request is carried out to its
//! end, whether the caller lives or not.
//!
//! The same lock keeps a request from reaching a later process with the same key:
//! its caller sees the target die and lets go. (The start time would not do. CRIU
//! restores into a time namespace, where /proc shows the process itself another one
//! than its caller sees.)

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;

use nix::fcntl::Flock;

use crate::job::Caller;
use crate::settings::Uuid;
use crate::store::{self, Entry, Key};

/// Name of the one request that may lie in an entry.
const REQUEST: &str = "request";

/// Stands for the job of a caller that has none.
const NO_JOB: &str = "-";

/// What is asked of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    State,
    Lock {
        timeout_ms: u32,
    },
    Checkpoint,
    /// The list of (old, new) GPUs may be empty.
    Restore(Vec<(Uuid, Uuid)>),
    Unlock,
}

impl Action {
    fn to_text(&self) -> String {
        match self {
            Self::State => "state".into(),
            Self::Lock { timeout_ms } => format!("lock {timeout_ms}"),
            Self::Checkpoint => "checkpoint".into(),
            Self::Restore(map) => map.iter().fold("restore".into(), |text, (old, new)| {
                format!(
                    "{text} {:032x} {:032x}",
                    u128::from_be_bytes(*old),
                    u128::from_be_bytes(*new)
                )
            }),
            Self::Unlock => "unlock".into(),
        }
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        match words.next()? {
            "state" => Some(Self::State),
            "lock" => Some(Self::Lock { timeout_ms: words.next()?.parse().ok()? }),
            "checkpoint" => Some(Self::Checkpoint),
            "restore" => {
                let uuids: Option<Vec<Uuid>> = words
                    .map(|word| Some(u128::from_str_radix(word, 16).ok()?.to_be_bytes()))
                    .collect();
                Some(Self::Restore(uuids?.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()))
            }
            "unlock" => Some(Self::Unlock),
            _ => None,
        }
    }
}

/// The caller's end: a request that waits for its reply.
pub(crate) struct Posted {
    entry: Entry,
    id: String,
    lock: Flock<File>,
}

impl Posted {
    /// Puts a request before the process; nothing if another request is there, which
    /// must be taken first.
    pub(crate) fn post(
        entry: &Entry,
        caller: Option<Caller>,
        action: &Action,
    ) -> io::Result<Option<Self>> {
        let id = store::unique();
        let caller = caller.map_or_else(|| NO_JOB.to_owned(), Caller::to_word);
        let text = format!("{id} {caller} {}\n", action.to_text());
        let lock = store::publish(entry, REQUEST, &text)?;
        Ok(lock.map(|lock| Self { entry: entry.clone(), id, lock }))
    }

    /// The reply, once there is one: a `CUresult` and a value.
    pub(crate) fn reply(&self) -> Option<(i32, i32)> {
        let text = self.entry.read(&format!("rep-{}", self.id))?;
        let (code, value) = text.trim_end().split_once(' ')?;
        Some((code.parse().ok()?, value.parse().ok()?))
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        // If the target is gone nobody else removes the request; by now it may be another's.
        let inode = |metadata: io::Result<fs::Metadata>| metadata.ok().map(|m| m.ino());
        let there = inode(fs::metadata(self.entry.dir().join(REQUEST)));
        if there.is_some() && there == inode(self.lock.metadata()) {
            let _ = self.entry.remove(REQUEST);
        }
        let _ = self.entry.remove(&format!("rep-{}", self.id));
    }
}

/// The target's end: a request that has been taken.
pub(crate) struct Taken {
    entry: Entry,
    id: String,
    request: File,
    /// The job file that the caller names.
    pub(crate) caller: Option<Caller>,
    pub(crate) action: Action,
}

/// Takes the request for this process, if there is one.
///
/// While there is none, no descriptor is opened: CRIU may freeze the process at any
/// moment, and would then find it.
pub(crate) fn take(key: Key) -> Option<Taken> {
    let entry = key.entry();
    let path = entry.dir().join(REQUEST);
    fs::metadata(&path).ok()?;
    let mut request = File::open(&path).ok()?;
    let mut text = String::new();
    request.read_to_string(&mut text).ok()?;
    if entry.remove(REQUEST).is_err() || !store::is_locked(&request) {
        return None;
    }
    let (id, rest) = text.split_once(' ')?;
    let (caller, action) = rest.split_once(' ')?;
    let caller = Caller::from_word(caller);
    Some(Taken { entry, id: id.to_owned(), request, caller, action: Action::from_text(action)? })
}

impl Taken {
    /// Answers, if someone still waits. With the answer the process may be dumped, so
    /// the request is closed before.
    pub(crate) fn answer(self, code: i32, value: i32) {
        let waited_for = store::is_locked(&self.request);
        drop(self.request);
        if waited_for {
            // Nothing can be done about a store that cannot be written: the caller waits on.
            let _ = self.entry.write(&format!("rep-{}", self.id), &format!("{code} {value}\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_survive_the_file() {
        let actions = [
            Action::State,
            Action::Lock { timeout_ms: 2000 },
            Action::Checkpoint,
            Action::Restore(Vec::new()),
            Action::Restore(vec![([0x01; 16], [0xff; 16]), ([0; 16], [0x80; 16])]),
            Action::Unlock,
        ];
        for action in actions {
            assert_eq!(Action::from_text(&action.to_text()), Some(action));
        }
        assert_eq!(Action::from_text("dance"), None);
    }
}
