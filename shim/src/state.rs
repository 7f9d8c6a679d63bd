//! The states of a container and what each of them allows.
//!
//! ```text
//!                     Start                Pause
//!   Created ─────────────────────▶ Running ──────▶ Paused
//!   Restoring (Create with a       ▲  │ ◀──────────  │
//!   checkpoint: runc restore  ─────┘  │    Resume    │
//!   runs in Start)                    │ exit         │ exit
//!        │ Start fails                ▼              │
//!        └────────────────────────▶ Stopped ◀────────┘
//! ```
//!
//! The words of a refusal are those of containerd's own shim, since clients show them.

use std::fmt;

/// Where a container is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// `runc create` has succeeded.
    Created,
    /// Created with a checkpoint: rootfs and stdio are there, no process yet.
    CreatedFromCheckpoint,
    /// Its process runs.
    Running,
    /// Frozen.
    Paused,
    /// Its process has ended, or could not be restored.
    Stopped,
}

/// What is asked of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are the methods of the Task service")]
pub enum Action {
    Start,
    Exec,
    Pause,
    Resume,
    Checkpoint,
    Update,
    Delete,
}

impl Action {
    /// All that there are.
    pub const ALL: [Self; 7] = [
        Self::Start,
        Self::Exec,
        Self::Pause,
        Self::Resume,
        Self::Checkpoint,
        Self::Update,
        Self::Delete,
    ];

    /// As a verb.
    #[must_use]
    pub fn verb(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Exec => "exec",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Checkpoint => "checkpoint",
            Self::Update => "update",
            Self::Delete => "delete",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.verb())
    }
}

/// A state that does not allow an action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(String);

impl State {
    /// Whether `action` may be done now.
    pub fn allow(self, action: Action) -> Result<(), Refused> {
        use Action::{Checkpoint, Delete, Exec, Pause, Resume, Start, Update};
        use State::{Created, CreatedFromCheckpoint, Paused, Running, Stopped};
        match (self, action) {
            (Created | CreatedFromCheckpoint, Start | Update | Delete)
            | (Created, Exec)
            | (Running, Exec | Pause | Checkpoint | Update)
            | (Paused, Resume | Checkpoint | Update)
            | (Stopped, Delete) => Ok(()),
            (CreatedFromCheckpoint, Exec) => Err(refused("cannot exec in a created state")),
            (Paused | Stopped, Exec) => {
                Err(refused(&format!("cannot exec in a {} state", self.name())))
            }
            (Created | CreatedFromCheckpoint, Pause | Resume) => {
                Err(refused(&format!("cannot {action} task in created state")))
            }
            (Created | CreatedFromCheckpoint, Checkpoint) => {
                Err(refused("cannot checkpoint a task in created state"))
            }
            (Running | Paused | Stopped, Start) | (Running | Paused, Delete) => {
                Err(refused(&format!("cannot {action} a {} process", self.name())))
            }
            (Running, Resume) => Err(refused("cannot resume a running process")),
            (Paused, Pause) | (Stopped, Pause | Resume | Checkpoint | Update) => {
                Err(refused(&format!("cannot {action} a {} container", self.name())))
            }
        }
    }

    /// As containerd names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Created | Self::CreatedFromCheckpoint => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        }
    }
}

fn refused(words: &str) -> Refused {
    Refused(words.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_allows_what_gos_shim_allows() {
        use Action::{Checkpoint, Delete, Exec, Pause, Resume, Start, Update};
        let table: [(State, &[Action]); 5] = [
            (State::Created, &[Start, Exec, Update, Delete]),
            (State::CreatedFromCheckpoint, &[Start, Update, Delete]),
            (State::Running, &[Exec, Pause, Checkpoint, Update]),
            (State::Paused, &[Resume, Checkpoint, Update]),
            (State::Stopped, &[Delete]),
        ];
        for (state, allowed) in table {
            for action in Action::ALL {
                assert_eq!(
                    state.allow(action).is_ok(),
                    allowed.contains(&action),
                    "{state:?} {action:?}"
                );
            }
        }
    }

    #[test]
    fn refusals_are_in_the_words_of_gos_shim() {
        let words = |state: State, action| state.allow(action).unwrap_err().to_string();
        assert_eq!(words(State::Paused, Action::Exec), "cannot exec in a paused state");
        assert_eq!(words(State::Stopped, Action::Pause), "cannot pause a stopped container");
        assert_eq!(words(State::Running, Action::Delete), "cannot delete a running process");
        assert_eq!(words(State::Created, Action::Pause), "cannot pause task in created state");
    }
}
