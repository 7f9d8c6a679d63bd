//! What is known of processes whose driver cannot be asked ([`Steps::Toggle`](super::Steps)), because of
//! what was done with them. A toggle that is refused or lost may leave a process LOCKED, which nothing
//! can tell from RUNNING; until another has succeeded it counts as undetermined.

use std::collections::BTreeSet;

use super::{Call, CudaError, CudaState, DriverError};
use crate::processes::Pid;

/// On which side of the toggle processes are, as far as an operation knows.
#[derive(Debug, Clone, Default)]
pub struct Sides {
    /// Their last toggle was refused or lost.
    doubtful: BTreeSet<Pid>,
    /// They were checkpointed, even if they have opened a device since, for something else.
    checkpointed: BTreeSet<Pid>,
}

impl Sides {
    /// Learns from the answer to a step.
    pub fn note(&mut self, call: Call, pid: Pid, answer: &Result<(), DriverError>) {
        match answer {
            Ok(()) => {
                self.doubtful.remove(&pid);
                match call {
                    Call::Lock | Call::Checkpoint => _ = self.checkpointed.insert(pid),
                    _ => _ = self.checkpointed.remove(&pid),
                }
            }
            // Nothing was toggled.
            Err(DriverError::AlreadyThere { .. }) => {}
            Err(DriverError::BroughtBack { .. } | DriverError::OthersNotReady { .. }) => {
                self.doubtful.remove(&pid);
            }
            Err(error) => {
                self.doubtful.insert(pid);
                // 'Illegal state': it is LOCKED, whatever was thought of it.
                if matches!(error.code(), None | Some(CudaError::ILLEGAL_STATE)) {
                    self.checkpointed.remove(&pid);
                }
            }
        }
    }

    /// An earlier operation has left these CHECKPOINTED. One that is not is toggled to there by its
    /// restore, after which it counts as what its devices say, and is restored again.
    pub fn recall(&mut self, suspended: &[Pid]) {
        self.checkpointed.extend(suspended);
    }

    /// Those that are known to be CHECKPOINTED.
    #[must_use]
    pub fn checkpointed(&self) -> &BTreeSet<Pid> {
        &self.checkpointed
    }

    /// The state of a process that is told to be in this one.
    #[must_use]
    pub fn state(&self, pid: Pid, told: CudaState) -> CudaState {
        match told {
            CudaState::Running if self.doubtful.contains(&pid) => CudaState::Undetermined,
            told => told,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: Result<(), DriverError> =
        Err(DriverError::Refused { call: Call::Toggle, error: CudaError::NOT_SUPPORTED });

    fn lost() -> Result<(), DriverError> {
        Err(DriverError::HelperLost { call: Call::Toggle, how: "killed".into() })
    }

    fn already() -> Result<(), DriverError> {
        Err(DriverError::AlreadyThere { call: Call::Toggle })
    }

    #[test]
    fn what_was_refused_or_lost_is_undetermined_until_a_toggle_succeeds() {
        for failed in [REFUSED, lost()] {
            let mut sides = Sides::default();
            let state = |sides: &Sides| sides.state(7, CudaState::Running);
            assert_eq!(state(&sides), CudaState::Running);
            sides.note(Call::Lock, 7, &failed);
            assert_eq!(state(&sides), CudaState::Undetermined);
            assert_eq!(sides.state(7, CudaState::Checkpointed), CudaState::Checkpointed);
            assert_eq!(sides.state(8, CudaState::Running), CudaState::Running);
            sides.note(Call::Unlock, 7, &already());
            assert_eq!(state(&sides), CudaState::Undetermined, "nothing was learnt");
            sides.note(Call::Restore, 7, &Ok(()));
            assert_eq!(state(&sides), CudaState::Running);
        }
    }

    #[test]
    fn what_was_brought_back_runs() {
        let mut sides = Sides::default();
        let call = Call::Toggle;
        for back in [DriverError::BroughtBack { call }, DriverError::OthersNotReady { call }] {
            sides.note(Call::Lock, 7, &REFUSED);
            sides.note(Call::Lock, 7, &Err(back));
            assert_eq!(sides.state(7, CudaState::Running), CudaState::Running);
            assert!(sides.checkpointed().is_empty());
        }
    }

    #[test]
    fn what_is_recalled_counts_until_a_step_says_otherwise() {
        let refused = |error| Err(DriverError::Refused { call: Call::Toggle, error });
        for (answer, known, then) in [
            (Ok(()), false, CudaState::Running),
            (already(), true, CudaState::Running),
            // There is no room for it.
            (refused(CudaError::OUT_OF_MEMORY), true, CudaState::Undetermined),
            (refused(CudaError::ILLEGAL_STATE), false, CudaState::Undetermined),
            (lost(), false, CudaState::Undetermined),
        ] {
            let mut sides = Sides::default();
            sides.recall(&[7, 8]);
            assert!(sides.checkpointed().contains(&7));
            // Nothing was lost so far.
            assert_eq!(sides.state(7, CudaState::Running), CudaState::Running);
            sides.note(Call::Restore, 7, &answer);
            assert_eq!(sides.checkpointed().contains(&7), known, "{answer:?}");
            assert_eq!(sides.state(7, CudaState::Running), then, "{answer:?}");
            assert!(sides.checkpointed().contains(&8));
        }
    }

    #[test]
    fn one_is_checkpointed_until_its_restore_has_answered_well_or_not_at_all() {
        for (answer, known) in
            [(Ok(()), false), (REFUSED, true), (already(), true), (lost(), false)]
        {
            let mut sides = Sides::default();
            sides.note(Call::Lock, 7, &Ok(()));
            assert!(sides.checkpointed().contains(&7));
            sides.note(Call::Restore, 7, &answer);
            assert_eq!(sides.checkpointed().contains(&7), known, "{answer:?}");
        }
    }
}
