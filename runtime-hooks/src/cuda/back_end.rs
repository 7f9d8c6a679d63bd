//! The two ways to make a call for one process: libcuda's functions, or NVIDIA's command. What is
//! above sees codes and values of `cuda.h` from both.

use std::path::Path;
use std::time::{Duration, Instant};

use super::ffi::{Api, GpuPair};
use super::toggled::{Has, Proc};
use super::utility::{Silent, Utility};
use super::{Call, CudaError, CudaState, Steps, words};
use crate::processes::Pid;
use crate::remap;

/// How a call came back.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Called {
    /// With the driver's code, 0 for success, and the state or the thread id where it gives one.
    Answer {
        /// `CUresult`.
        code: i32,
        /// State or thread id, else 0.
        value: i32,
    },
    /// The process is where the call leads: the driver was not asked.
    AlreadyThere,
    /// The process was checkpointed, still had a device open, and was restored.
    BroughtBack,
    /// The process was checkpointed, and restored because others were not ready.
    OthersNotReady,
    /// The library has no such function.
    Unsupported,
    /// Not until the deadline.
    Late,
    /// With something that is not understood.
    Failed(String),
}

/// A call for one process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked<'a> {
    /// Which.
    pub(super) call: Call,
    /// For whom.
    pub(super) pid: Pid,
    /// It is known to be CHECKPOINTED.
    pub(super) checkpointed: bool,
    /// The driver's own timeout, for `Lock`, in milliseconds.
    pub(super) timeout_ms: u32,
    /// Until when, where the call can be ended without ending the helper.
    pub(super) deadline: Instant,
    /// Onto which GPUs, for `Restore`: pairs of UUIDs.
    pub(super) device_map: &'a [(String, String)],
}

/// Makes calls, for several processes at the same time.
pub(super) trait BackEnd: Sync {
    /// Makes a call. May block for ever, if it cannot be ended.
    fn call(&self, asked: Asked<'_>) -> Called;
}

impl BackEnd for Api {
    fn call(&self, asked: Asked<'_>) -> Called {
        let pair = |(old, new): &(String, String)| {
            Some(GpuPair { old: remap::bytes(old)?, new: remap::bytes(new)? })
        };
        let Some(map) = asked.device_map.iter().map(pair).collect::<Option<Vec<_>>>() else {
            return Called::Failed("a GPU of the device map has no UUID".to_owned());
        };
        match Self::call(self, asked.call, asked.pid, asked.timeout_ms, &map) {
            Some((code, value)) => Called::Answer { code, value },
            None => Called::Unsupported,
        }
    }
}

/// NVIDIA's command.
#[derive(Debug)]
pub(super) struct ByUtility {
    utility: Utility,
    steps: Steps,
    proc: Proc,
}

impl ByUtility {
    /// Asks it what it offers, within `limit`.
    pub(super) fn new(utility: Utility, limit: Duration) -> Result<Self, String> {
        let named = |why: &str| format!("{} {why}", utility.program().display());
        let steps = match utility.run([Path::new("--help")], Instant::now() + limit) {
            Ok(said) => words::steps(&said).map_err(|why| named(&why))?,
            Err(Silent::Late) => {
                return Err(named(&format!("--help did not end within {limit:?} and was killed")));
            }
            Err(Silent::NotRun(why)) => return Err(named(&why)),
        };
        Ok(Self { utility, steps, proc: Proc::new() })
    }

    /// Which program it is.
    pub(super) fn program(&self) -> &Path {
        self.utility.program()
    }

    /// What it offers.
    pub(super) fn steps(&self) -> Steps {
        self.steps
    }

    fn run(&self, asked: Asked<'_>, operation: &[&str]) -> Called {
        let pid = asked.pid.to_string();
        let arguments = operation.iter().copied().chain(["--pid", &pid]).map(Path::new);
        match self.utility.run(arguments, asked.deadline) {
            Ok(said) => match words::answer(asked.call, asked.pid, &said) {
                Ok((code, value)) => Called::Answer { code, value },
                Err(why) => Called::Failed(why),
            },
            Err(Silent::Late) => Called::Late,
            Err(Silent::NotRun(why)) => Called::Failed(why),
        }
    }

    /// From 555 on.
    fn separately(&self, asked: Asked<'_>) -> Called {
        let timeout = asked.timeout_ms.to_string();
        match asked.call {
            Call::Probe => self.run(asked, &["--get-restore-tid"]),
            Call::State => self.run(asked, &["--get-state"]),
            Call::Lock => self.run(asked, &["--action", "lock", "--timeout", &timeout]),
            Call::Checkpoint => self.run(asked, &["--action", "checkpoint"]),
            Call::Restore if asked.device_map.is_empty() => {
                self.run(asked, &["--action", "restore"])
            }
            Call::Restore => {
                let pairs = asked.device_map.iter().map(|(old, new)| format!("{old}={new}"));
                let map = pairs.collect::<Vec<_>>().join(",");
                self.run(asked, &["--action", "restore", "--device-map", &map])
            }
            Call::Unlock => self.run(asked, &["--action", "unlock"]),
            _ => Called::Unsupported,
        }
    }

    /// With the toggle alone. It goes to the other side, whichever that is; so it is looked first on
    /// which side the process is.
    fn toggling(&self, asked: Asked<'_>) -> Called {
        let code = |error: CudaError| Called::Answer { code: error.0, value: 0 };
        let Has { restore_thread, device } = match self.proc.look(asked.pid) {
            Ok(Some(has)) => has,
            Ok(None) => return code(CudaError::OPERATING_SYSTEM),
            Err(error) => return Called::Failed(format!("/proc/{}: {error}", asked.pid)),
        };
        let Some(tid) = restore_thread else { return code(CudaError::NOT_INITIALIZED) };
        let answer = |value| Called::Answer { code: 0, value };
        let on_gpu = device && !asked.checkpointed;
        match (asked.call, on_gpu) {
            (Call::Probe, _) => answer(tid),
            (Call::State, true) => answer(RUNNING),
            (Call::State, false) => answer(CHECKPOINTED),
            (Call::Lock | Call::Checkpoint, true) => match self.run(asked, TOGGLE) {
                DONE if self.holds_device(asked.pid) => match self.run(asked, TOGGLE) {
                    DONE => Called::BroughtBack,
                    other => other,
                },
                other => other,
            },
            (Call::Restore, false) => self.run(asked, TOGGLE),
            // What is restored is unlocked.
            (Call::Lock | Call::Checkpoint, false) | (Call::Restore | Call::Unlock, true) => {
                Called::AlreadyThere
            }
            (Call::Unlock, false) => code(CudaError::ILLEGAL_STATE),
            _ => Called::Unsupported,
        }
    }

    fn holds_device(&self, pid: Pid) -> bool {
        matches!(self.proc.look(pid), Ok(Some(Has { device: true, .. })))
    }
}

const TOGGLE: &[&str] = &["--toggle"];
/// Success without a value.
pub(super) const DONE: Called = Called::Answer { code: 0, value: 0 };

const RUNNING: i32 = 0;
const CHECKPOINTED: i32 = 2;
const _: () = assert!(
    matches!(CudaState::from_raw(RUNNING), CudaState::Running)
        && matches!(CudaState::from_raw(CHECKPOINTED), CudaState::Checkpointed)
);

impl BackEnd for ByUtility {
    fn call(&self, asked: Asked<'_>) -> Called {
        match self.steps {
            Steps::Separate => self.separately(asked),
            Steps::Toggle => self.toggling(asked),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const HELP_550: &str = "echo 'Operations: --toggle --pid <value> --help'";
    const HELP_555: &str =
        "echo '--toggle --action lock|checkpoint --get-state --get-restore-tid --timeout <ms>'";

    /// A command that answers `--help` so, and else is this script; it notes its arguments. The proc
    /// that is looked at has the process 7, which has CUDA.
    struct Site {
        directory: tempfile::TempDir,
        back_end: ByUtility,
    }

    impl Site {
        fn new(help: &str, script: &str) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let process = directory.path().join("7");
            fs::create_dir_all(process.join("fd")).unwrap();
            fs::create_dir_all(process.join("task/9")).unwrap();
            fs::write(process.join("task/9/comm"), "cuda00001800007\n").unwrap();
            fs::write(process.join("maps"), "7f00-7f01 rw-p 0 00:00 0\n").unwrap();
            let script = format!(
                "cd \"$(dirname \"$0\")\"\nif [ \"$1\" = --help ]; then {help}; exit; fi\n\
                 echo \"$@\" >>said\n{script}"
            );
            let program = crate::child::script(directory.path(), &script);
            let utility = Utility::new(&program, None);
            let mut back_end = ByUtility::new(utility, Duration::from_secs(60)).unwrap();
            back_end.proc = Proc::at(directory.path());
            Self { directory, back_end }
        }

        /// Whose command opens and closes the device of its process, as a toggle does.
        fn toggling() -> Self {
            let site = Self::new(
                HELP_550,
                "if [ -L 7/fd/3 ]; then rm 7/fd/3; else ln -s /dev/nvidia0 7/fd/3; fi",
            );
            site.open("3");
            site
        }

        fn open(&self, number: &str) {
            let descriptor = self.directory.path().join("7/fd").join(number);
            std::os::unix::fs::symlink("/dev/nvidia0", descriptor).unwrap();
        }

        fn call(&self, call: Call) -> Called {
            self.ask(call, false, Duration::from_secs(60))
        }

        fn ask(&self, call: Call, checkpointed: bool, limit: Duration) -> Called {
            let deadline = Instant::now() + limit;
            self.back_end.call(Asked {
                call,
                pid: 7,
                checkpointed,
                timeout_ms: 250,
                deadline,
                device_map: &[],
            })
        }

        fn said(&self) -> String {
            fs::read_to_string(self.directory.path().join("said")).unwrap_or_default()
        }
    }

    fn code(code: i32) -> Called {
        Called::Answer { code, value: 0 }
    }

    #[test]
    fn from_555_on_each_step_is_a_call() {
        let site =
            Site::new(HELP_555, "case $1 in --get-state) echo locked;; --get-r*) echo 9;; esac");
        assert_eq!(site.back_end.steps(), Steps::Separate);
        assert_eq!(site.call(Call::Probe), Called::Answer { code: 0, value: 9 });
        assert_eq!(site.call(Call::State), Called::Answer { code: 0, value: 1 });
        for call in [Call::Lock, Call::Checkpoint, Call::Restore, Call::Unlock] {
            assert_eq!(site.call(call), DONE);
        }
        assert_eq!(
            site.said(),
            "--get-restore-tid --pid 7\n--get-state --pid 7\n--action lock --timeout 250 --pid 7\n\
             --action checkpoint --pid 7\n--action restore --pid 7\n--action unlock --pid 7\n"
        );
    }

    #[test]
    fn what_fails_has_the_drivers_code_or_its_words() {
        let site = Site::new(
            HELP_555,
            "case $2 in\n\
             lock) echo 'Could not lock on process ID 7: \"device not ready\"' >&2; exit 1;;\n\
             checkpoint) echo no idea >&2; exit 1;;\n\
             restore) sleep 1000;;\n\
             esac\necho resting",
        );
        assert_eq!(site.call(Call::Lock), code(600));
        let failed = |said: &str| Called::Failed(said.into());
        assert_eq!(site.call(Call::Checkpoint), failed("exit status: 1, it said `no idea`"));
        assert_eq!(site.call(Call::State), failed("exit status: 0, it said `resting`"));
        assert_eq!(site.ask(Call::Restore, false, Duration::from_millis(300)), Called::Late);
    }

    #[test]
    fn a_toggle_is_made_only_from_the_side_that_it_is_to_leave() {
        let site = Site::toggling();
        assert_eq!(site.back_end.steps(), Steps::Toggle);
        assert_eq!(site.call(Call::Probe), Called::Answer { code: 0, value: 9 });
        assert_eq!(site.call(Call::State), Called::Answer { code: 0, value: RUNNING });
        assert_eq!(site.call(Call::Restore), Called::AlreadyThere);
        assert_eq!(site.call(Call::Unlock), Called::AlreadyThere);
        assert_eq!(site.said(), "", "nothing to toggle");

        assert_eq!(site.call(Call::Lock), DONE);
        assert_eq!(site.said(), "--toggle --pid 7\n");
        assert_eq!(site.call(Call::State), Called::Answer { code: 0, value: CHECKPOINTED });
        assert_eq!(site.call(Call::Checkpoint), Called::AlreadyThere);
        assert_eq!(site.call(Call::Lock), Called::AlreadyThere);
        assert_eq!(site.call(Call::Unlock), code(401));
        assert_eq!(site.said(), "--toggle --pid 7\n");

        assert_eq!(site.call(Call::Restore), DONE);
        assert_eq!(site.call(Call::State), Called::Answer { code: 0, value: RUNNING });
        assert_eq!(site.said(), "--toggle --pid 7\n".repeat(2));
    }

    #[test]
    fn one_that_keeps_a_device_is_brought_back() {
        let site = Site::toggling();
        site.open("4");
        assert_eq!(site.call(Call::Lock), Called::BroughtBack);
        assert_eq!(site.said(), "--toggle --pid 7\n".repeat(2));
        assert_eq!(site.call(Call::State), Called::Answer { code: 0, value: RUNNING });
    }

    #[test]
    fn one_that_opens_a_device_later_is_still_checkpointed() {
        let site = Site::toggling();
        assert_eq!(site.call(Call::Lock), DONE);
        site.open("4");
        let known = |call| site.ask(call, true, Duration::from_secs(60));
        assert_eq!(known(Call::State), Called::Answer { code: 0, value: CHECKPOINTED });
        assert_eq!(known(Call::Checkpoint), Called::AlreadyThere);
        assert_eq!(known(Call::Restore), DONE);
        assert_eq!(site.said(), "--toggle --pid 7\n".repeat(2));
    }

    #[test]
    fn without_cuda_or_without_a_process_it_is_the_drivers_code() {
        let site = Site::toggling();
        let thread = site.directory.path().join("7/task/9/comm");
        fs::write(thread, "worker\n").unwrap();
        for call in [Call::Probe, Call::State, Call::Lock] {
            assert_eq!(site.call(call), code(3));
        }
        fs::remove_dir_all(site.directory.path().join("7")).unwrap();
        for call in [Call::Probe, Call::State, Call::Lock] {
            assert_eq!(site.call(call), code(304));
        }
        assert_eq!(site.said(), "");
    }

    #[test]
    fn one_that_is_not_the_command_is_refused() {
        let ask = |help: &str, limit| {
            let directory = tempfile::tempdir().unwrap();
            let program = crate::child::script(directory.path(), help);
            ByUtility::new(Utility::new(&program, None), limit).unwrap_err()
        };
        let long = Duration::from_secs(60);
        let why = ask("echo what", long);
        assert!(why.ends_with("script --help: exit status: 0, it said `what`"), "{why}");
        let why = ask("echo 'libcuda.so.1: no' >&2; exit 1", long);
        assert!(why.ends_with("--help: exit status: 1, it said `libcuda.so.1: no`"), "{why}");
        let why = ask("exec sleep 1000", Duration::from_millis(100));
        assert!(why.ends_with("--help did not end within 100ms and was killed"), "{why}");
    }
}
