//! What follows a checkpoint in another process: Resume of a paused container whose CUDA is
//! checkpointed, and repair of what a killed operation left behind.

use std::time::Duration;

use crate::bring_back::{Back, Goal, Thaw, bring_back, fail, forget, kill, log_of, unlock_network};
use crate::error::{Cause, Failure, Left, Phase};
use crate::journal::{Entry, Stage};
use crate::parts::{Limits, Parts};
use crate::processes::ProcessId;
use crate::suspend::recall;
use crate::suspended;

/// Resumes the container of `entry`: CUDA first, then its own code. If its CUDA does not come back
/// until the deadline the container is killed, since clients do not look at the error, and a
/// container that hangs for ever is worse than one that ended and has an image.
pub fn resume(parts: &mut Parts<'_>, entry: &Entry, limits: &Limits) -> Result<(), Failure> {
    let image_is_whole = entry.stage == Stage::AwaitingResume;
    if !image_is_whole {
        unlock_network(parts);
    }
    recall(parts, entry);
    let mut entry = entry.clone();
    let brought = bring_back(parts, &mut entry, Goal::Running, Thaw::Runtime, limits);
    let pending = matches!(brought, Ok(Back::LockPending));
    let result = brought.map(drop).map_err(|cause| {
        let not_back = Cause::not_back(&cause);
        let log = log_of(&cause);
        let left = kill(parts, &entry, cause);
        let cause = if matches!(left, Left::Gone) { Cause::Gone } else { not_back };
        let container = entry.container.clone();
        let image = image_is_whole.then(|| entry.image.clone());
        Failure { operation: "resume", container, phase: Phase::Resume, cause, left, image, log }
    });
    if !pending {
        forget(parts, &entry);
    }
    result
}

/// Puts right what the entry of a killed operation says: each process back in its state, paused
/// if it was paused. Another container of the same id is left alone.
pub fn repair(
    parts: &mut Parts<'_>,
    entry: &Entry,
    init: ProcessId,
    limits: &Limits,
) -> Result<(), Failure> {
    if entry.init != init {
        parts.journal.clear().map_err(|error| untouched(entry, error.into()))?;
        return Ok(());
    }
    tracing::warn!(container = entry.container, "an interrupted operation is put right");
    unlock_network(parts);
    recall(parts, entry);
    // Its Resume was told, and all that is left of it is the journal.
    let resumed =
        entry.stage == Stage::AwaitingResume && matches!(parts.freezer.frozen(), Ok(false));
    let entry = &mut entry.clone();
    entry.frozen &= !resumed;
    let goal = if entry.frozen { Goal::Paused } else { Goal::Running };
    let may_stay = matches!(entry.stage, Stage::Freeing | Stage::Resuming);
    // Whoever wanted it suspended, or resumed, is not there any more: no room is waited for.
    let limits = if may_stay { Limits { room: AT_ONCE, ..*limits } } else { *limits };
    match bring_back(parts, entry, goal, Thaw::Freezer, &limits) {
        Ok(Back::LockPending) => Ok(()),
        Ok(Back::Whole) => {
            forget(parts, entry);
            Ok(())
        }
        Err(cause) if may_stay => match suspended::stay(parts, entry, &cause, limits.checkpoint) {
            Left::Suspended => {
                tracing::warn!(container = entry.container, %cause, "its CUDA stays suspended");
                Ok(())
            }
            left => Err(Failure { cause, left, ..untouched(entry, Cause::Gone) }),
        },
        Err(cause) => Err(fail(parts, "repair", entry, Phase::Repair, cause, &limits)),
    }
}

const AT_ONCE: Duration = Duration::from_secs(1);

fn untouched(entry: &Entry, cause: Cause) -> Failure {
    Failure {
        operation: "repair",
        container: entry.container.clone(),
        phase: Phase::Repair,
        cause,
        left: Left::Untouched,
        image: None,
        log: None,
    }
}
