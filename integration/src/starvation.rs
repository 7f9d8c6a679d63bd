//! Whether the machine itself kept threads from running.
//!
//! On some kernels (seen on 6.18 with two processors) the scheduler keeps threads that are ready to run
//! from all processors for 20 s and more while others have them, even its own ksoftirqd. No deadline of a
//! test holds then, and it says nothing of what it tests: it is repeated.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked.
const INTERVAL: Duration = Duration::from_millis(500);

/// So long no thread waits for a processor otherwise, on a machine that has much to do.
const TOO_LONG: Duration = Duration::from_secs(3);

/// Looks all the time.
#[derive(Debug, Default)]
pub struct Watch {
    last: Arc<Mutex<Option<(Instant, String)>>>,
}

impl Watch {
    /// Begins.
    #[must_use]
    pub fn start() -> Self {
        let watch = Self::default();
        let last = Arc::clone(&watch.last);
        thread::spawn(move || {
            let mut kept = Kept::default();
            loop {
                if let Some(who) = kept.note(&ready(), Instant::now()) {
                    *lock(&last) = Some((Instant::now(), who));
                }
                thread::sleep(INTERVAL);
            }
        });
        watch
    }

    /// Which thread was kept from running since then, if one was.
    #[must_use]
    pub fn since(&self, begin: Instant) -> Option<String> {
        let last = lock(&self.last);
        last.as_ref().filter(|(at, _)| *at >= begin).map(|(_, who)| who.clone())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread that is ready to run: its name, and what changes when it does run.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ready {
    name: String,
    /// Of user and system, in clock ticks.
    cpu: u64,
    /// On and off a processor.
    switches: u64,
}

/// The threads that were ready at each look since some moment, and did not run.
#[derive(Debug, Default)]
struct Kept(BTreeMap<i32, (Ready, Instant)>);

impl Kept {
    /// Learns of those that are ready now; gives one that has been so for too long.
    fn note(&mut self, ready: &BTreeMap<i32, Ready>, now: Instant) -> Option<String> {
        let since = |tid: &i32, thread: &Ready| match self.0.get(tid) {
            Some((before, since)) if before == thread => *since,
            _ => now,
        };
        let kept: BTreeMap<_, _> = ready
            .iter()
            .map(|(tid, thread)| (*tid, (thread.clone(), since(tid, thread))))
            .collect();
        self.0 = kept;
        let longest = self.0.iter().min_by_key(|(_, (_, since))| *since)?;
        let (tid, (thread, since)) = longest;
        let waited = now.duration_since(*since);
        (waited >= TOO_LONG).then(|| {
            format!("thread {tid} ({}) was ready for {waited:.0?} and did not run", thread.name)
        })
    }
}

/// All threads that are ready and can be seen.
fn ready() -> BTreeMap<i32, Ready> {
    let numbers = |directory: &str| -> Vec<i32> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    let threads = numbers("/proc").into_iter().flat_map(|pid| {
        numbers(&format!("/proc/{pid}/task")).into_iter().map(move |tid| (pid, tid))
    });
    let found = threads.filter_map(|(pid, tid)| {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}")).ok();
        let (name, cpu) = if_ready(&read("stat")?)?;
        Some((tid, Ready { name, cpu, switches: switches(&read("status")?) }))
    });
    found.collect()
}

/// Name and time of a thread that is ready, by its /proc/PID/stat.
fn if_ready(stat: &str) -> Option<(String, u64)> {
    let (begin, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if *fields.first()? != "R" {
        return None;
    }
    let name = begin.split_once('(')?.1.to_owned();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some((name, number(11)? + number(12)?))
}

fn switches(status: &str) -> u64 {
    let counts = status.lines().filter(|line| line.contains("ctxt_switches:"));
    counts.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(cpu: u64, switches: u64) -> Ready {
        Ready { name: "t".into(), cpu, switches }
    }

    #[test]
    fn one_that_is_ready_and_does_not_run_is_told_of_after_a_while() {
        let begin = Instant::now();
        let mut kept = Kept::default();
        for second in 0..3 {
            let now = begin + Duration::from_secs(second);
            assert_eq!(kept.note(&[(7, thread(5, 9))].into(), now), None);
        }
        let said = kept.note(&[(7, thread(5, 9))].into(), begin + TOO_LONG).unwrap();
        assert!(said.contains("thread 7 (t)"), "{said}");
    }

    #[test]
    fn one_that_runs_or_sleeps_in_between_is_not() {
        let begin = Instant::now();
        for other in [Some(thread(6, 9)), Some(thread(5, 10)), None] {
            let mut kept = Kept::default();
            assert_eq!(kept.note(&[(7, thread(5, 9))].into(), begin), None);
            let now = other.into_iter().map(|thread| (7, thread)).collect();
            assert_eq!(kept.note(&now, begin + TOO_LONG / 2), None);
            assert_eq!(kept.note(&[(7, thread(5, 9))].into(), begin + TOO_LONG), None);
        }
    }

    #[test]
    fn proc_is_understood() {
        let stat = "7 (a (b) c) R 1 7 7 0 -1 4194304 1 0 0 0 12 30 0 0 20 0 1 0 100 0 0";
        assert_eq!(if_ready(stat), Some(("a (b) c".to_owned(), 42)));
        assert_eq!(if_ready(&stat.replace(") R", ") S")), None);
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t2\n";
        assert_eq!(switches(status), 7);
        // Whoever reads it runs, and has slept once.
        thread::sleep(Duration::from_millis(1));
        let ready = ready();
        let own = &ready[&nix::unistd::gettid().as_raw()];
        assert!(own.switches > 0, "{own:?}");
    }
}
