//! Toggling several processes, of which one may wait for another.
//!
//! A process whose kernel waits for that of another rank is not checkpointed while that rank is. Its
//! toggle has no timeout; given up, it would leave the process LOCKED for ever. So it is not given up at
//! once: when the others have waited long enough they are toggled back, by which the one that is late
//! gets what it waits for, and is toggled back too.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::back_end::{Called, DONE};

/// The toggles of one request. Each process has a thread that calls [`AllOrNone::toggle`].
#[derive(Debug)]
pub(super) struct AllOrNone {
    total: usize,
    deadline: Instant,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    done: usize,
    /// One cannot be toggled, which somebody else has to put right.
    failed: bool,
    /// They go back.
    back: bool,
}

impl AllOrNone {
    /// For `total` processes, which wait for each other for as long as `patience`.
    pub(super) fn new(total: usize, patience: Duration) -> Self {
        let deadline = Instant::now() + patience;
        Self { total, deadline, progress: Mutex::default(), changed: Condvar::new() }
    }

    /// Toggles one process, and back if the others are not.
    pub(super) fn toggle(
        &self,
        there: impl FnOnce() -> Called,
        back: impl FnOnce() -> Called,
    ) -> Called {
        let called = there();
        let mut progress = self.progress();
        match called {
            DONE | Called::AlreadyThere => progress.done += 1,
            _ => progress.failed = true,
        }
        self.changed.notify_all();
        // One that was there before is not to go anywhere.
        if called != DONE {
            return called;
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let waits = |progress: &mut Progress| {
            progress.done < self.total && !progress.failed && !progress.back
        };
        let (mut progress, waited) = self
            .changed
            .wait_timeout_while(progress, left, waits)
            .unwrap_or_else(PoisonError::into_inner);
        progress.back |= waited.timed_out();
        if !progress.back {
            return called;
        }
        drop(progress);
        self.changed.notify_all();
        match back() {
            DONE | Called::AlreadyThere => Called::OthersNotReady,
            other => other,
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Toggles each by its function; what came of it, and how many went back.
    fn run(
        patience: Duration,
        there: &[&(dyn Fn(&AtomicU32) -> Called + Sync)],
    ) -> (Vec<Called>, u32) {
        let all = AllOrNone::new(there.len(), patience);
        let back = AtomicU32::new(0);
        let called = std::thread::scope(|scope| {
            let threads: Vec<_> = there
                .iter()
                .map(|there| {
                    let (all, back) = (&all, &back);
                    scope.spawn(move || {
                        all.toggle(
                            || there(back),
                            || {
                                back.fetch_add(1, Ordering::Relaxed);
                                DONE
                            },
                        )
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        (called, back.into_inner())
    }

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn all_that_are_toggled_stay_so() {
        let late = |_: &AtomicU32| {
            std::thread::sleep(SHORT);
            DONE
        };
        assert_eq!(run(LONG, &[&|_| DONE, &late, &|_| DONE]), (vec![DONE, DONE, DONE], 0));
        assert_eq!(run(LONG, &[&|_| DONE, &|_| Called::AlreadyThere]).1, 0);
        // One alone waits for nobody, however long it takes.
        assert_eq!(run(Duration::ZERO, &[&late]), (vec![DONE], 0));
    }

    #[test]
    fn one_that_waits_for_another_gets_it_and_all_go_back() {
        let waits_for_first = |back: &AtomicU32| {
            while back.load(Ordering::Relaxed) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            DONE
        };
        let (called, back) = run(SHORT, &[&|_| DONE, &waits_for_first]);
        assert_eq!((called, back), (vec![Called::OthersNotReady, Called::OthersNotReady], 2));
    }

    #[test]
    fn a_failure_is_not_waited_for() {
        let refused = || Called::Answer { code: 801, value: 0 };
        let (called, back) = run(LONG, &[&|_| DONE, &|_| refused()]);
        assert_eq!((called, back), (vec![DONE, refused()], 0));
    }
}
