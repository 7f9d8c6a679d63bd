//! What a person sees while an operation lasts: on a terminal a bar, elsewhere a line for each phase.
//!
//! The driver tells nothing of how far it is. But what it moves from or to the GPU lies in the memory
//! of the process itself, which grows or shrinks meanwhile: that is what the bar shows.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::cuda::CudaState;
use crate::error::Phase;
use crate::journal::JournalFile;
use crate::parts::Progress;
use crate::processes::{Pid, start_time};

const POLL: Duration = Duration::from_millis(100);

/// Shows what is under way until it is dropped.
pub(super) struct Shown {
    phase: Arc<Mutex<Phase>>,
    ended: Arc<AtomicBool>,
    drawing: Option<JoinHandle<()>>,
    line: Option<String>,
    since: Instant,
}

impl Shown {
    /// `what` is the operation and the container. The processes and their memory are those of the
    /// journal, as soon as it knows them.
    pub(super) fn start(what: &str, journal: JournalFile) -> Self {
        let phase = Arc::new(Mutex::new(Phase::Preflight));
        let ended = Arc::new(AtomicBool::new(false));
        let is_terminal = std::io::stderr().is_terminal();
        let drawing = is_terminal.then(|| {
            let (what, phase, ended) = (what.to_owned(), Arc::clone(&phase), Arc::clone(&ended));
            std::thread::spawn(move || draw(&what, &journal, &phase, &ended))
        });
        let line = (!is_terminal).then(|| what.to_owned());
        Self { phase, ended, drawing, line, since: Instant::now() }
    }

    /// The progress of an operation that is shown here.
    pub(super) fn progress(&self) -> Progress {
        let (phase, line) = (Arc::clone(&self.phase), self.line.clone());
        Progress::told(
            Phase::Preflight,
            Box::new(move |entered| {
                *phase.lock().unwrap_or_else(PoisonError::into_inner) = entered;
                if let Some(what) = &line {
                    eprintln!("stasis: {what}: {entered}");
                }
            }),
        )
    }

    /// Since when.
    pub(super) fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(drawing) = self.drawing.take() {
            let _ = drawing.join();
        }
    }
}

fn draw(what: &str, journal: &JournalFile, phase: &Mutex<Phase>, ended: &AtomicBool) {
    let style = |template: &str| {
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
    };
    let waiting = style("{spinner} {prefix}: {msg} {elapsed}");
    let moving =
        style("{spinner} {prefix}: {msg} {bar:30} {binary_bytes}/{binary_total_bytes} {elapsed}");
    // Each setter draws, so the style comes first.
    let spinner = ProgressBar::no_length().with_style(waiting.clone()).with_prefix(what.to_owned());
    let mut shown = None;
    let mut moved: Option<Moved> = None;
    while !ended.load(Ordering::Relaxed) {
        let now = *phase.lock().unwrap_or_else(PoisonError::into_inner);
        if shown != Some(now) {
            shown = Some(now);
            moved = Moved::new(now, journal);
            spinner.set_message(now.to_string());
            match &moved {
                Some(moved) => {
                    spinner.set_length(moved.total);
                    spinner.set_style(moving.clone());
                }
                None => spinner.set_style(waiting.clone()),
            }
        }
        if let Some(moved) = &moved {
            spinner.set_position(moved.until_now());
        }
        spinner.tick();
        std::thread::sleep(POLL);
    }
    spinner.finish_and_clear();
}

/// Data on its way between GPU and host.
struct Moved {
    total: u64,
    to_host: bool,
    before: Vec<(Pid, u64)>,
}

impl Moved {
    /// None in phases that move nothing, and where the sizes are not known.
    fn new(phase: Phase, journal: &JournalFile) -> Option<Self> {
        let to_host = match phase {
            Phase::CudaCheckpoint => true,
            Phase::CudaRestore => false,
            _ => return None,
        };
        let entry = journal.load().ok()??;
        let moving = entry.processes.iter().filter(|noted| {
            noted.found == CudaState::Running
                && start_time(noted.id.pid) == Some(noted.id.start_time)
        });
        let bytes = |noted: &crate::journal::Noted| -> u64 {
            noted.uses.gpus.iter().filter_map(|(_, bytes)| *bytes).sum()
        };
        let total = moving.clone().map(bytes).sum();
        let before = moving.map(|noted| (noted.id.pid, resident(noted.id.pid))).collect();
        (total > 0).then_some(Self { total, to_host, before })
    }

    fn until_now(&self) -> u64 {
        let one = |(pid, before): &(Pid, u64)| {
            let now = resident(*pid);
            if self.to_host { now.saturating_sub(*before) } else { before.saturating_sub(now) }
        };
        self.before.iter().map(one).sum::<u64>().min(self.total)
    }
}

/// Memory that a process has of its own, in bytes; 0 if it is gone.
fn resident(pid: Pid) -> u64 {
    let status = std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_touched_is_seen() {
        let own = Pid::try_from(std::process::id()).unwrap();
        let moved = Moved { total: 1 << 40, to_host: true, before: vec![(own, resident(own))] };
        let memory = vec![1_u8; 64 << 20];
        assert!(moved.until_now() >= 60 << 20, "{}", moved.until_now());
        let back = Moved { total: 32 << 20, to_host: false, before: vec![(own, resident(own))] };
        drop(memory);
        assert_eq!(back.until_now(), 32 << 20, "no more than there is");
        assert_eq!(resident(0), 0);
    }
}
