//! Locking processes that wait for each other.
//!
//! A rank whose kernel waits for another rank's next kernel is ready for the lock only when that
//! one has launched it; but that one may be locked by then, and its launch blocks. So the lock of
//! the waiting rank stays requested, while the granted one is unlocked for a moment, in which the
//! launch that blocks goes through, and locked again. That ends with all of them after the same
//! step. Locking them once at the same moment ends there only by luck.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cuda::CudaError;

/// How long a granted lock waits for the others, the first time; twice as long each time after.
const PATIENCE: Duration = Duration::from_millis(20);
/// And at most.
const MOST: Duration = Duration::from_secs(1);

/// The locks of one request. Each process has a thread that calls [`Together::lock`].
#[derive(Debug)]
pub(super) struct Together {
    total: usize,
    deadline: Instant,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    granted: usize,
    /// All are granted, or one cannot be.
    over: bool,
}

impl Together {
    /// For `total` processes, until `timeout` from now.
    pub(super) fn new(total: usize, timeout: Duration) -> Self {
        Self {
            total,
            deadline: Instant::now() + timeout,
            progress: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Locks one process; `lock` is given the driver's timeout in milliseconds. Returns the
    /// driver's last code: 0 if it is locked.
    pub(super) fn lock(&self, lock: impl Fn(u32) -> i32, unlock: impl Fn() -> i32) -> i32 {
        let mut patience = PATIENCE;
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            // 0 would mean no limit to the driver.
            let milliseconds = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1);
            let code = lock(milliseconds);
            match CudaError(code) {
                CudaError(0) => {}
                CudaError::ILLEGAL_STATE => {
                    self.grant(&mut self.progress());
                    return code;
                }
                _ => {
                    self.progress().over = true;
                    self.changed.notify_all();
                    return code;
                }
            }
            let mut progress = self.progress();
            self.grant(&mut progress);
            let left = self.deadline.saturating_duration_since(Instant::now());
            let (mut progress, _) = self
                .changed
                .wait_timeout_while(progress, patience.min(left), |progress| !progress.over)
                .unwrap_or_else(PoisonError::into_inner);
            if progress.over || Instant::now() >= self.deadline {
                return code;
            }
            progress.granted -= 1;
            drop(progress);
            match unlock() {
                0 => patience = (patience * 2).min(MOST),
                code => return code,
            }
        }
    }

    fn grant(&self, progress: &mut Progress) {
        progress.granted += 1;
        if progress.granted == self.total {
            progress.over = true;
            self.changed.notify_all();
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    fn run(
        timeout: Duration,
        ranks: &[&(dyn Fn(u32) -> i32 + Sync)],
        unlock: &(dyn Fn(usize) -> i32 + Sync),
    ) -> Vec<i32> {
        let together = Together::new(ranks.len(), timeout);
        std::thread::scope(|scope| {
            let calls: Vec<_> = ranks
                .iter()
                .enumerate()
                .map(|(index, lock)| {
                    let together = &together;
                    scope.spawn(move || together.lock(lock, || unlock(index)))
                })
                .collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        })
    }

    #[test]
    fn what_is_ready_is_locked_once() {
        let calls = AtomicU32::new(0);
        let ready = |_| {
            calls.fetch_add(1, Ordering::Relaxed);
            0
        };
        let codes = run(Duration::from_secs(5), &[&ready, &ready], &|_| panic!("unlocked"));
        assert_eq!((codes, calls.into_inner()), (vec![0, 0], 2));
    }

    #[test]
    fn a_rank_that_waits_for_a_locked_one_gets_its_kernel() {
        // The first is ready at once; the second only after the first was let through.
        let launched = AtomicBool::new(false);
        let first = |_| 0;
        let second = |timeout: u32| {
            let until = Instant::now() + Duration::from_millis(timeout.into());
            while Instant::now() < until {
                if launched.load(Ordering::Relaxed) {
                    return 0;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            600
        };
        let unlock = |index| {
            assert_eq!(index, 0, "only the granted one is unlocked");
            launched.store(true, Ordering::Relaxed);
            0
        };
        assert_eq!(run(Duration::from_secs(5), &[&first, &second], &unlock), [0, 0]);
    }

    #[test]
    fn time_ends_it() {
        let never = |timeout: u32| {
            std::thread::sleep(Duration::from_millis(timeout.into()));
            600
        };
        let codes = run(Duration::from_millis(100), &[&|_| 0, &never], &|_| 0);
        assert_eq!(codes, [0, 600]);
    }

    #[test]
    fn a_refusal_ends_it_and_illegal_state_does_not() {
        let codes = run(Duration::from_secs(60), &[&|_| 0, &|_| 304], &|_| 0);
        assert_eq!(codes, [0, 304]);
        let codes = run(Duration::from_secs(60), &[&|_| 0, &|_| 401], &|_| panic!("unlocked"));
        assert_eq!(codes, [0, 401]);
    }
}
