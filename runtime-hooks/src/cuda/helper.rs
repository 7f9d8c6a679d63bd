//! The driver helper: the process in which libcuda lives, or which starts NVIDIA's command.
//!
//! Reads requests from standard input and answers on standard output until the input ends. A call
//! may block for ever; then the client kills this process, which harms neither the target nor the
//! operation under way (measured). It dies with the thread that started it.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use stasis_config::config::Interface;

use super::all_or_none::AllOrNone;
use super::back_end::{Asked, BackEnd, ByUtility, Called};
use super::ffi::Api;
use super::job::VARIABLE;
use super::job_file;
use super::nvml::Monitor;
use super::protocol::{Reply, Request};
use super::together::Together;
use super::utility::Utility;
use super::{Call, DriverFacts, Steps, search};
use crate::processes::Pid;
use crate::{child, sys};

/// Serves until the client closes the pipe.
#[must_use]
pub fn serve() -> ExitCode {
    if child::die_with_parent().is_err() {
        return ExitCode::FAILURE;
    }
    let output = Mutex::new(io::stdout());
    let mut driver = None;
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else {
            return ExitCode::FAILURE;
        };
        let request: Request = match serde_json::from_str(&line) {
            Ok(request) => request,
            Err(error) => {
                eprintln!("request not understood: {error}");
                return ExitCode::FAILURE;
            }
        };
        let done = match (request.call, &driver) {
            (Call::Init, _) => match Loaded::load(&request) {
                Ok(loaded) => {
                    let done = send(&output, &Reply::Ready(loaded.facts()));
                    driver = Some(loaded);
                    done
                }
                Err(reply) => send(&output, &reply),
            },
            (_, None) => {
                eprintln!("{:?} before init", request.call);
                return ExitCode::FAILURE;
            }
            (Call::JobFiles, Some(_)) => send(&output, &job_files(&request)),
            (Call::CopyJobFile, Some(_)) => send(&output, &copy_job_file(&request)),
            (Call::Usage, Some(driver)) => send(&output, &driver.usage(&request)),
            (Call::FreeMemory, Some(driver)) => send(&output, &driver.free_memory()),
            (_, Some(driver)) => driver.call_for_all(&request, &output),
        };
        if done.is_err() {
            return ExitCode::FAILURE;
        }
    }
    // The driver's exit handlers have been seen to take long, and there is nothing to save.
    child::exit_now(0)
}

/// The libraries of this process, and what makes the calls.
struct Loaded {
    /// Of the library.
    path: PathBuf,
    /// Also where the command makes the calls: it keeps the driver started, which is slow to start
    /// on hosts with many GPUs. None where the command alone finds it.
    api: Option<Api>,
    /// NVIDIA's command, if it makes the calls.
    utility: Option<ByUtility>,
    /// Why it does not where the library cannot.
    no_utility: Option<String>,
    nvml: Option<Monitor>,
    /// The live file of the job that this process is in, open for the driver and for the command.
    _job: Option<File>,
}

impl Loaded {
    fn load(request: &Request) -> Result<Self, Reply> {
        let job = match request.job.as_ref().map(job_file::live).transpose() {
            Ok(job) => job,
            Err(reason) => return Err(Reply::NoJobFile(reason)),
        };
        // Of the caller's environment none is taken over: Helper::start removes it.
        if let Some(file) = &job {
            sys::set_variable(VARIABLE, &job_file::name_of(file));
        }
        let variable = std::env::var_os(search::LIBCUDA_VARIABLE).map(PathBuf::from);
        let mut failures = Vec::new();
        let candidates = search::libcuda(request.libcuda.as_deref(), variable);
        // Also the command is not to find another one by chance.
        let named = candidates.len() == 1;
        let loaded = candidates.iter().find_map(|path| match Api::load(path) {
            Ok(api) => Some((path.clone(), api)),
            Err(error) => {
                failures.push(format!("{}: {error}", path.display()));
                None
            }
        });
        let (path, api) = loaded.unzip();
        let missing = api.as_ref().is_some_and(|api| !api.missing().is_empty());
        let wanted = match request.interface {
            Interface::Auto => missing,
            Interface::Library => false,
            Interface::Utility => true,
        };
        if api.is_none() && (named || !wanted) {
            return Err(Reply::NoLibrary(summary(&failures)));
        }
        match api.as_ref().map_or(0, Api::init) {
            0 => {}
            code => return Err(Reply::InitFailed(code)),
        }
        let (mut utility, mut no_utility) = (None, None);
        if wanted {
            match ask_utility(request, path.as_ref(), job.as_ref()) {
                Ok(asked) => utility = Some(asked),
                // It has looked for the library as well.
                Err(why) if api.is_none() => {
                    return Err(Reply::NoLibrary(format!("{}; {why}", summary(&failures))));
                }
                Err(why) if request.interface == Interface::Utility => {
                    return Err(Reply::NoUtility(why));
                }
                Err(why) => no_utility = Some(why),
            }
        }
        let path = path.unwrap_or_default();
        let nvml = Monitor::load(request.libnvml.as_deref(), &path);
        Ok(Self { path, api, utility, no_utility, nvml, _job: job })
    }

    fn facts(&self) -> DriverFacts {
        let missing = match &self.utility {
            Some(_) => Vec::new(),
            None => self.api.as_ref().map(Api::missing).unwrap_or_default(),
        };
        DriverFacts {
            library: self.path.clone(),
            cuda_version: self.api.as_ref().map_or(0, Api::version),
            driver_version: self.nvml.as_ref().and_then(Monitor::driver_version),
            gpus: self.nvml.as_ref().and_then(|nvml| nvml.gpus().ok()).unwrap_or_default(),
            missing,
            utility: self.utility.as_ref().map(|utility| utility.program().to_owned()),
            no_utility: self.no_utility.clone(),
            steps: self.steps(),
        }
    }

    fn steps(&self) -> Steps {
        self.utility.as_ref().map_or(Steps::Separate, ByUtility::steps)
    }

    /// Makes a call. Without either there is no driver that could be asked.
    fn make(&self, asked: Asked<'_>) -> Called {
        match (&self.utility, &self.api) {
            (Some(utility), _) => utility.call(asked),
            (None, Some(api)) => BackEnd::call(api, asked),
            (None, None) => Called::Unsupported,
        }
    }

    fn usage(&self, request: &Request) -> Reply {
        Reply::Usage(self.nvml.as_ref().and_then(|nvml| nvml.usage(&request.pids).ok()))
    }

    fn free_memory(&self) -> Reply {
        Reply::FreeMemory(self.nvml.as_ref().and_then(|nvml| nvml.free_memory().ok()))
    }

    /// A thread for each process. Answers are sent as the calls come back.
    fn call_for_all(&self, request: &Request, output: &Mutex<io::Stdout>) -> io::Result<()> {
        let timeout = Duration::from_millis(request.timeout_ms.into());
        let deadline = Instant::now() + Duration::from_millis(request.limit_ms);
        let total = request.pids.len();
        let (together, all) = (Together::new(total, timeout), AllOrNone::new(total, timeout));
        std::thread::scope(|scope| {
            let calls: Vec<_> = request
                .pids
                .iter()
                .map(|&pid| {
                    let (together, all) = (&together, &all);
                    let checkpointed = request.checkpointed.contains(&pid);
                    let call = request.call;
                    let device_map = &request.device_map;
                    let asked =
                        Asked { call, pid, checkpointed, timeout_ms: 0, deadline, device_map };
                    scope.spawn(move || send(output, &self.call(asked, together, all)))
                })
                .collect();
            calls.into_iter().try_for_each(|call| {
                call.join().unwrap_or_else(|_| Err(io::Error::other("a call panicked")))
            })
        })
    }

    fn call(&self, asked: Asked<'_>, together: &Together, all: &AllOrNone) -> Reply {
        if asked.call != Call::Lock {
            return reply(asked.pid, self.make(asked));
        }
        if self.steps() == Steps::Toggle {
            let back = Asked { call: Call::Restore, checkpointed: true, ..asked };
            return reply(asked.pid, all.toggle(|| self.make(asked), || self.make(back)));
        }
        // The last that was no code; it ends the lock.
        let failed = Cell::new(None);
        let code = |call, timeout_ms| match self.make(Asked { call, timeout_ms, ..asked }) {
            Called::Answer { code, .. } => code,
            other => {
                failed.set(Some(other));
                NO_CODE
            }
        };
        let code = together.lock(|timeout| code(Call::Lock, timeout), || code(Call::Unlock, 0));
        match failed.take() {
            Some(failed) => reply(asked.pid, failed),
            None => Reply::Answer { pid: asked.pid, code, value: 0 },
        }
    }
}

/// Of a job that this process need not be in: the driver sees nothing of it.
fn copy_job_file(request: &Request) -> Reply {
    let Some(job) = &request.job else {
        return Reply::NoJobFile("was not given".to_owned());
    };
    let copied = job_file::to_read(job).and_then(|live| {
        job_file::copy(&live, request.to.as_deref())
            .map_err(|error| format!("cannot be copied: {error}"))
    });
    copied.map_or_else(Reply::NoJobFile, Reply::Copied)
}

/// None of the driver's.
const NO_CODE: i32 = -1;

fn reply(pid: Pid, called: Called) -> Reply {
    match called {
        Called::Answer { code, value } => Reply::Answer { pid, code, value },
        Called::AlreadyThere => Reply::AlreadyThere { pid },
        Called::BroughtBack => Reply::BroughtBack { pid },
        Called::OthersNotReady => Reply::OthersNotReady { pid },
        Called::Unsupported => Reply::Unsupported { pid },
        Called::Late => Reply::Late { pid },
        Called::Failed(how) => Reply::Failed { pid, how },
    }
}

/// Has NVIDIA's command say what it offers, well within the time that the client waits for.
fn ask_utility(
    request: &Request,
    libcuda: Option<&PathBuf>,
    job: Option<&File>,
) -> Result<ByUtility, String> {
    // It inherits no descriptor, so it gets the file by that of this process.
    let own = |file: &File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let libcuda = libcuda.map(PathBuf::as_path);
    let utility = Utility::new(&request.utility, libcuda).in_job(job.map(own));
    ByUtility::new(utility, Duration::from_millis(request.limit_ms) * 9 / 10)
}

fn job_files(request: &Request) -> Reply {
    let named = |id| job_file::named_by(id, request.init.unwrap_or(id), &request.neighbours);
    Reply::JobFiles(request.processes.iter().map(|&id| (id.pid, named(id))).collect())
}

fn send(output: &Mutex<io::Stdout>, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    let mut output = output.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    output.write_all(&line)?;
    output.flush()
}

/// The first failure tells most: it is the configured file or the loader's own search.
fn summary(failures: &[String]) -> String {
    match failures {
        [] => "nothing to try".to_owned(),
        [only] => only.clone(),
        [first, rest @ ..] => format!("{first} (and {} other places)", rest.len()),
    }
}
