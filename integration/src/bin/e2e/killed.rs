//! Somebody kills the helper or the runtime itself, at any moment of an operation.

use std::fs;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use stasis_integration::case::Case;
use stasis_integration::runtime::Settings;
use stasis_integration::{command, processes, wait};

use crate::Test;
use crate::failures::{WAYS, Way, goes_on, refused, start, works_again};

const LIMIT: Duration = Duration::from_secs(30);
/// From the moment at which a process is seen to the one at which it does what it is for.
const UNDER_WAY: Duration = Duration::from_millis(300);

/// The binaries that have the engine in them.
const ENGINES: [&str; 2] = ["stasis-runc", "containerd-shim-runc-stasis"];

/// When the runtime is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// The driver does not answer the lock.
    Locking,
    /// The driver has done the checkpoint and does not answer.
    Checkpointing,
    /// All is in host memory, and runc is about to dump.
    Dumping,
}

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (way, of) in WAYS {
        for call in ["lock", "checkpoint"] {
            tests.push(Test::new(format!("helper_in_{call}_{of}"), move |case: &Case| {
                helper(case, way, &format!("{call} hang"))
            }));
        }
        for (moment, word) in [
            (Moment::Locking, "locking"),
            (Moment::Checkpointing, "checkpointing"),
            (Moment::Dumping, "dumping"),
        ] {
            tests.push(Test::new(format!("runtime_{word}_{of}"), move |case: &Case| {
                runtime(case, way, moment)
            }));
        }
    }
    tests.push(Test::new("runtime_restoring", restoring));
    tests
}

/// Kills processes of a test's runtime at the right moment, in a thread of its own.
pub(crate) struct Striker {
    /// By which the processes of this test's runtime are known.
    environment: String,
    /// By which the one to kill is known among them.
    argument: &'static str,
    /// A file that has to hold this word before.
    ready: Option<(PathBuf, &'static str)>,
    /// How long after that.
    delay: Duration,
}

impl Striker {
    pub(crate) fn new(case: &Case, argument: &'static str) -> Self {
        Self { environment: case.engine_environment(), argument, ready: None, delay: UNDER_WAY }
    }

    fn targets(&self) -> Vec<Pid> {
        let with_argument = processes::with_argument(self.argument);
        processes::with_environment(&self.environment)
            .into_iter()
            .filter(|pid| with_argument.contains(pid))
            .filter(|&pid| ENGINES.iter().any(|engine| processes::runs(pid, engine)))
            .collect()
    }

    fn is_ready(&self) -> bool {
        self.ready.as_ref().is_none_or(|(file, word)| {
            fs::read_to_string(file).is_ok_and(|text| text.contains(word))
        })
    }

    /// That long after the engine is seen.
    pub(crate) fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Waits for the moment and kills.
    pub(crate) fn strike(self) -> JoinHandle<Result<()>> {
        thread::spawn(move || {
            let what = format!("stasis-runc with {}", self.argument);
            let targets = wait::until(&what, LIMIT, || {
                let found = self.targets();
                Ok((!found.is_empty() && self.is_ready()).then_some(found))
            })?;
            thread::sleep(self.delay);
            for pid in targets {
                kill(pid, Signal::SIGKILL)?;
            }
            Ok(())
        })
    }
}

pub(crate) fn joined(striker: JoinHandle<Result<()>>) -> Result<()> {
    striker.join().map_err(|_| anyhow!("the striker panicked"))?
}

/// The driver would be waited for much longer than the test takes: only the helper's end tells
/// that something is wrong.
fn helper(case: &Case, way: Way, fault: &str) -> Result<()> {
    let id = start(case)?;
    case.gpu.faults(&[fault])?;
    let striker = Striker::new(case, "__driver").strike();
    let refused = refused(case, &id, way, &case.path("image"));
    joined(striker)?;
    refused?;
    works_again(case, &id)
}

fn runtime(case: &Case, way: Way, moment: Moment) -> Result<()> {
    let id = start(case)?;
    let mut striker = Striker::new(case, "checkpoint");
    let patient = Settings::default();
    match moment {
        Moment::Locking => case.gpu.faults(&["lock hang"])?,
        Moment::Checkpointing => case.gpu.faults(&["checkpoint hang-after"])?,
        Moment::Dumping => {
            let file = case.path("dumping");
            let before_runc = format!(
                "case \" $* \" in *' checkpoint '*) echo now >{}; sleep 1.5; exit 1;; esac",
                file.display()
            );
            case.set(&Settings { before_runc, ..patient })?;
            striker.ready = Some((file, "now"));
        }
    }
    if moment != Moment::Dumping {
        // The helper is there from the first look at the driver on.
        striker.ready = Some((case.gpu.store().join("faults.count"), ""));
    }
    let striker = striker.strike();
    let image = case.path("image");
    if way == Way::Direct {
        let failed = command::fail(&mut case.direct_checkpoint(&id, &image), LIMIT);
        joined(striker)?;
        failed?;
        // Nobody resumes. The next operation finds the journal and puts things right.
    } else {
        // The client's Resume does that.
        let refused = refused(case, &id, way, &image);
        joined(striker)?;
        refused?;
    }
    works_again(case, &id)
}

/// Killed while the driver does not answer the restore: nothing of the container is left, and the
/// image can be restored again.
fn restoring(case: &Case) -> Result<()> {
    let id = start(case)?;
    let image = format!("checkpoint/{id}:1");
    case.ctr().checkpoint_container(&id, &image)?;
    case.remove(&id)?;
    case.gpu.faults(&["restore hang"])?;
    let mut striker = Striker::new(case, "restore");
    striker.ready = Some((case.gpu.store().join("faults.count"), ""));
    let striker = striker.strike();
    let failed = case.ctr().restore_fails(&id, &image);
    joined(striker)?;
    failed?;
    case.remove(&id)?;
    case.gpu.heal()?;
    case.ctr().restore(&id, &image)?;
    goes_on(case, &id)?;
    case.ctr().remove_image(&image)
}
