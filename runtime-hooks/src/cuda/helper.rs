//! The driver helper: the process in which libcuda lives.
//!
//! Reads requests from standard input and answers on standard output until the input ends. A call
//! may block for ever; then the client kills this process, which harms neither the target nor the
//! operation under way (measured). It dies with the thread that started it.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;

use super::ffi::Api;
use super::job::VARIABLE;
use super::job_file;
use super::nvml::Monitor;
use super::protocol::{Reply, Request};
use super::together::Together;
use super::{Call, DriverFacts, search};
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

/// The libraries of this process.
struct Loaded {
    path: PathBuf,
    api: Api,
    nvml: Option<Monitor>,
    /// The live file of the job that this process is in, open for the driver.
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
        let loaded = candidates.iter().find_map(|path| match Api::load(path) {
            Ok(api) => Some((path.clone(), api)),
            Err(error) => {
                failures.push(format!("{}: {error}", path.display()));
                None
            }
        });
        let Some((path, api)) = loaded else {
            return Err(Reply::NoLibrary(summary(&failures)));
        };
        match api.init() {
            0 => {
                let nvml = Monitor::load(request.libnvml.as_deref(), &path);
                Ok(Self { path, api, nvml, _job: job })
            }
            code => Err(Reply::InitFailed(code)),
        }
    }

    fn facts(&self) -> DriverFacts {
        DriverFacts {
            library: self.path.clone(),
            cuda_version: self.api.version(),
            driver_version: self.nvml.as_ref().and_then(Monitor::driver_version),
            gpus: self.nvml.as_ref().and_then(|nvml| nvml.gpus().ok()).unwrap_or_default(),
            missing: self.api.missing(),
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
        let together = Together::new(request.pids.len(), timeout);
        std::thread::scope(|scope| {
            let calls: Vec<_> = request
                .pids
                .iter()
                .map(|&pid| {
                    let together = &together;
                    scope.spawn(move || send(output, &self.call(request.call, pid, together)))
                })
                .collect();
            calls.into_iter().try_for_each(|call| {
                call.join().unwrap_or_else(|_| Err(io::Error::other("a call panicked")))
            })
        })
    }

    fn call(&self, call: Call, pid: Pid, together: &Together) -> Reply {
        if call == Call::Lock && self.api.missing().is_empty() {
            let code =
                |call, timeout| self.api.call(call, pid, timeout).map_or(-1, |(code, _)| code);
            let code = together.lock(|timeout| code(Call::Lock, timeout), || code(Call::Unlock, 0));
            return Reply::Answer { pid, code, value: 0 };
        }
        match self.api.call(call, pid, 0) {
            Some((code, value)) => Reply::Answer { pid, code, value },
            None => Reply::Unsupported { pid },
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
