//! A store of its own for each test, targets and callers as processes of their own.
//!
//! The test binary runs itself again for them: [`play_role`] is the only thing that
//! runs there. Targets obey lines on stdin; callers read a script and are
//! short-lived, as the engine's helper is.
#![allow(unsafe_code, dead_code, clippy::unwrap_used)]

use std::ffi::{OsStr, c_int, c_void};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use stasis_workloads::cuda::{Error, Gpu, Segment};
use stasis_workloads::{IpcHandle, Library};
use tempfile::TempDir;

/// The variable that names a job file.
pub(crate) const JOB: &str = "CUDA_CHECKPOINT_JOB_FILE";

/// The command that cargo built for this test.
pub(crate) const UTILITY: &str = env!("CARGO_BIN_EXE_cuda-checkpoint");

/// Stands for all of `/dev/nvidia0` and so on.
const DEVICE: &str = "/dev/zero";

/// Names the library that a role loads, if it is not the usual one.
const LIBRARY: &str = "TEST_LIBRARY";

/// Whether the driver is the emulated one: only there can a test look into the store
/// or choose the machine.
pub(crate) fn emulated() -> bool {
    std::env::var_os("TEST_DRIVER").is_none()
}

/// Longer than anything that ends takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Long enough to be sure that something does not happen.
pub(crate) const SILENCE: Duration = Duration::from_millis(600);

/// The emulated driver that cargo built for this test; or the real one, with which
/// those tests that look only at the API must pass as well.
pub(crate) fn driver() -> PathBuf {
    if let Some(real) = std::env::var_os("TEST_DRIVER") {
        return real.into();
    }
    let library = std::env::var(LIBRARY);
    built(library.as_deref().unwrap_or("libstasis_emulated_gpu.so"))
}

/// A library that cargo built for this test.
pub(crate) fn built(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join(name)
}

/// The library of drivers that have no checkpoint API.
pub(crate) const BEFORE_570: &str = "libstasis_emulated_gpu_550.so";

/// A machine with an emulated GPU.
pub(crate) struct Machine {
    dir: TempDir,
    /// For files that are not the store's.
    files: TempDir,
    /// The library of its CUDA processes. Those that ask about them always have the one with the
    /// checkpoint API: the store is the same.
    library: Option<&'static str>,
    /// The device node of each GPU as its CUDA processes find it, with `{}` for its number. Those
    /// that ask about them are not in their container and find all.
    nodes: String,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self::with("")
    }

    /// With more lines in the configuration.
    pub(crate) fn with(config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config"), format!("cuinit-ms=0\n{config}")).unwrap();
        let files = tempfile::tempdir().unwrap();
        Self { dir, files, library: None, nodes: DEVICE.to_owned() }
    }

    /// With this driver.
    pub(crate) fn driver(version: &str) -> Self {
        let settings: stasis_emulated_gpu::settings::Settings =
            format!("driver={version}").parse().unwrap();
        let library = (settings.branch() < 570).then_some(BEFORE_570);
        Self { library, ..Self::with(&format!("driver={version}\n")) }
    }

    /// With a device node for each GPU, of which the first so many are there.
    pub(crate) fn with_nodes(config: &str, count: u32) -> Self {
        let machine = Self::with(config);
        let nodes = format!("{}/gpu{{}}", machine.files.path().display());
        let machine = Self { nodes, ..machine };
        for gpu in 0..count {
            fs::File::create(machine.node(gpu)).unwrap();
        }
        machine
    }

    /// The device node of a GPU for CUDA processes.
    pub(crate) fn node(&self, gpu: u32) -> PathBuf {
        self.nodes.replace("{}", &gpu.to_string()).into()
    }

    pub(crate) fn store(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn faults(&self, text: &str) {
        let temporary = self.store().join("faults.tmp");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, self.store().join("faults")).unwrap();
    }

    /// Names of all files under the entries that begin with `prefix`.
    pub(crate) fn files(&self, prefix: &str) -> Vec<String> {
        let entries = fs::read_dir(self.store()).unwrap().flatten();
        entries
            .filter_map(|entry| fs::read_dir(entry.path()).ok())
            .flat_map(|files| files.flatten().map(|f| f.file_name().into_string().unwrap()))
            .filter(|name| name.starts_with(prefix))
            .collect()
    }

    fn role(&self, role: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "role", "--nocapture"])
            .env("TEST_ROLE", role)
            .env("EMULATED_GPU_DIR", self.store())
            .env("EMULATED_GPU_DEVICE", if role == "target" { &self.nodes } else { DEVICE })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(library) = self.library.filter(|_| role != "caller") {
            command.env(LIBRARY, library);
        }
        command
    }

    /// A CUDA process with a counter and a pattern of 4 MiB.
    pub(crate) fn target(&self) -> Process {
        let mut target = Process::spawn(self.role("target"));
        assert_eq!(target.line(), "ready");
        target
    }

    /// The same, started through another program.
    pub(crate) fn target_through(&self, program: &[&str]) -> Process {
        let inner = self.role("target");
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(inner.get_program()).args(inner.get_args());
        for (key, value) in inner.get_envs() {
            command.env(key, value.unwrap());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut target = Process::spawn(command);
        assert_eq!(target.line(), "ready");
        target
    }

    /// A helper that makes the calls of the script, one a line.
    pub(crate) fn caller(&self, script: &str) -> Process {
        let mut caller = Process::spawn(self.role("caller"));
        caller.send(&script.replace('\n', ";"));
        caller
    }

    /// Results of all calls of the script; each must return.
    pub(crate) fn ask(&self, script: &str) -> Vec<i32> {
        let mut caller = self.caller(script);
        script.lines().map(|_| caller.line().parse().unwrap()).collect()
    }

    /// The target's state, which must be had without an error.
    pub(crate) fn state(&self, target: &Process) -> i32 {
        self.ask(&format!("state-value {}", target.pid))[0]
    }

    /// A CUDA process that is a member of the job of that file.
    pub(crate) fn member(&self, job: &Path) -> Process {
        let mut command = self.role("target");
        command.env(JOB, job);
        let mut target = Process::spawn(command);
        assert_eq!(target.line(), "ready");
        target
    }

    /// [`Machine::caller`] with the variable that names a job file.
    pub(crate) fn caller_in(&self, job: &Path, script: &str) -> Process {
        let mut command = self.role("caller");
        command.env(JOB, job);
        let mut caller = Process::spawn(command);
        caller.send(&script.replace('\n', ";"));
        caller
    }

    /// [`Machine::ask`] with the variable that names a job file.
    pub(crate) fn ask_in(&self, job: &Path, script: &str) -> Vec<i32> {
        let mut caller = self.caller_in(job, script);
        script.lines().map(|_| caller.line().parse().unwrap()).collect()
    }

    /// The command `cuda-checkpoint` on this machine.
    pub(crate) fn utility(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(UTILITY);
        command
            .args(arguments)
            .env("EMULATED_GPU_DIR", self.store())
            .env("EMULATED_GPU_DEVICE", DEVICE);
        command
    }

    /// A fresh job file, made as NVIDIA says: copied by a program that was launched.
    pub(crate) fn job_file(&self, name: &str) -> PathBuf {
        let path = self.files.path().join(name);
        let copy = format!("cat \"${JOB}\" > {}", path.display());
        let launched = self.utility(&["--launch-job", "sh", "-c", &copy]).status().unwrap();
        assert!(launched.success());
        path
    }

    /// Asks NVML once about its first GPU; what it says, as lines.
    pub(crate) fn nvml(&self) -> Vec<String> {
        self.nvml_of(0)
    }

    /// The same about another.
    pub(crate) fn nvml_of(&self, gpu: u32) -> Vec<String> {
        let mut command = self.role("nvml");
        command.env("TEST_GPU", gpu.to_string());
        let mut process = Process::spawn(command);
        let count: usize = process.line().parse().unwrap();
        (0..count).map(|_| process.line()).collect()
    }
}

/// A process in a role. It is killed at the end of the test.
pub(crate) struct Process {
    pub(crate) pid: i32,
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    fn spawn(mut command: Command) -> Self {
        // SAFETY: prctl is safe between fork and exec.
        unsafe {
            command.pre_exec(|| {
                Ok(nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?)
            });
        }
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // libtest's own words may stand before ours.
                if let Some((_, line)) = line.split_once("OUT ") {
                    let _ = sender.send(line.to_owned());
                }
            }
        });
        let pid = i32::try_from(child.id()).unwrap();
        Self { pid, stdin: child.stdin.take().unwrap(), child, lines }
    }

    pub(crate) fn send(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// The next line, which must come.
    pub(crate) fn line(&mut self) -> String {
        self.line_within(PATIENCE).expect("a line in time")
    }

    /// The next line if it comes in time.
    pub(crate) fn line_within(&mut self, time: Duration) -> Option<String> {
        match self.lines.recv_timeout(time) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("the process has ended"),
        }
    }

    /// Sends a line and reads one.
    pub(crate) fn tell(&mut self, line: &str) -> String {
        self.send(line);
        self.line()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it ends by itself; whether by a signal.
    pub(crate) fn was_killed_by_itself(&mut self) -> bool {
        use std::os::unix::process::ExitStatusExt;
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.signal().is_some();
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("it did not end");
    }

    /// The thread with that name.
    pub(crate) fn thread(&self, comm: &str) -> Option<i32> {
        self.threads().into_iter().find(|thread| thread.1 == comm).map(|thread| thread.0)
    }

    /// The threads that are not the driver's.
    pub(crate) fn application_threads(&self) -> Vec<i32> {
        let threads = self.threads().into_iter();
        threads.filter(|thread| !thread.1.starts_with("cuda")).map(|thread| thread.0).collect()
    }

    fn threads(&self) -> Vec<(i32, String)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).unwrap().flatten();
        tasks
            .filter_map(|task| {
                let comm = fs::read_to_string(task.path().join("comm")).ok()?;
                Some((task.file_name().to_str()?.parse().ok()?, comm.trim_end().to_owned()))
            })
            .collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a process holds the device open.
pub(crate) fn holds_device(pid: impl std::fmt::Display) -> bool {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let device = if emulated() { DEVICE } else { "/dev/nvidia" };
    fds.filter_map(|fd| fs::read_link(fd.path()).ok())
        .any(|path| path.to_string_lossy().starts_with(device))
}

/// What the test binary does when it was started by [`Machine`].
pub(crate) fn play_role() {
    match std::env::var("TEST_ROLE").as_deref() {
        Ok("target") => target(),
        Ok("caller") => caller(),
        Ok("nvml") => nvml(),
        _ => {}
    }
}

fn out(text: impl std::fmt::Display) {
    println!("OUT {text}");
}

fn commands() -> impl Iterator<Item = Vec<String>> {
    let words = |line: String| line.split_whitespace().map(str::to_owned).collect();
    std::io::stdin().lines().map_while(Result::ok).map(words)
}

fn target() {
    let library = Library::load(driver().as_os_str()).unwrap();
    let gpu = Gpu::start_with(library, 0).unwrap();
    let pattern = gpu.pattern(4).unwrap();
    out("ready");
    let mut segment: Option<Segment> = None;
    let text = |result: Result<u64, Error>| match result {
        Ok(value) => value.to_string(),
        Err(error) => error.to_string(),
    };
    for words in commands() {
        let number = || words[1].parse::<u64>().unwrap();
        let done = |result: Result<(), Error>| text(result.map(|()| 0));
        match words[0].as_str() {
            "increment" => out(text(gpu.increment().map(u64::from))),
            "count" => out(text(gpu.count().map(u64::from))),
            "verify" => out(text(gpu.mismatches(&pattern).map(u64::from))),
            "damage" => out(done(gpu.damage(&pattern))),
            "spin" => out(done(gpu.launch_spin(number()))),
            "synchronize" => out(done(gpu.synchronize())),
            "managed" => out(text(gpu.allocate_managed(4096))),
            "allocate" => out(text(gpu.allocate(usize::try_from(number()).unwrap()))),
            "free" => out(done(gpu.free(number()))),
            // One more, with its own counter.
            "context" => {
                let library = Library::load(driver().as_os_str()).unwrap();
                let other = Gpu::start_with(library, usize::try_from(number()).unwrap());
                out(done(other.map(std::mem::forget)));
            }
            "segment" => {
                segment = Some(gpu.segment(1).unwrap());
                out(gpu.export(segment.as_ref().unwrap()).map_or_else(|e| e.to_string(), to_hex));
            }
            "import" => match gpu.import(from_hex(&words[1]), 1) {
                Ok(imported) => {
                    segment = Some(imported);
                    out(0);
                }
                Err(error) => out(error),
            },
            "close" => out(done(gpu.close(segment.as_ref().unwrap()))),
            "add" => out(done(gpu.increment_in(segment.as_ref().unwrap()))),
            "look" => match gpu.look_at(segment.as_ref().unwrap()) {
                Ok((count, 0)) => out(count),
                Ok((count, wrong)) => out(format!("{count} {wrong} wrong")),
                Err(error) => out(error),
            },
            "free-bytes" => out(text(gpu.memory_info().map(|info| info.0 as u64))),
            // SAFETY: the child only sleeps and calls the driver.
            "fork" => match unsafe { nix::unistd::fork() }.unwrap() {
                nix::unistd::ForkResult::Parent { child } => out(child),
                nix::unistd::ForkResult::Child => {
                    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
                    out(text(gpu.count().map(u64::from)));
                    loop {
                        thread::sleep(PATIENCE);
                    }
                }
            },
            other => panic!("what is {other}?"),
        }
    }
}

fn to_hex(handle: IpcHandle) -> String {
    handle.0.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

fn from_hex(text: &str) -> IpcHandle {
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    IpcHandle(std::array::from_fn(byte))
}

type Call = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;

fn caller() {
    let script = commands().next().unwrap().join(" ");
    // SAFETY: the emulated driver may be loaded by any program.
    let library = unsafe { libloading::Library::new(OsStr::new(&driver())) }.unwrap();
    let call = |name: &str, pid: c_int, arguments: *mut c_void| {
        // SAFETY: all checkpoint calls have this type.
        let call = unsafe { library.get::<Call>(format!("cuCheckpointProcess{name}")) }.unwrap();
        // SAFETY: each gets a pointer to what it expects, or null where that is allowed.
        unsafe { call(pid, arguments) }
    };
    // SAFETY: the type is that of cuda.h.
    let init = unsafe { library.get::<unsafe extern "C" fn(u32) -> c_int>("cuInit") }.unwrap();
    let mut initialized = false;
    for line in script.split(';') {
        let words: Vec<&str> = line.split_whitespace().collect();
        let pid = words.get(1).map_or(0, |word| word.parse().unwrap());
        let mut value: c_int = -1;
        let value_pointer = (&raw mut value).cast();
        if words[0] == "stay" {
            thread::sleep(Duration::from_secs(3600));
        }
        if words[0] == "wait" {
            commands().next().unwrap();
            continue;
        }
        if words[0] != "raw-state" && !initialized {
            initialized = true;
            // SAFETY: no pointers.
            let code = unsafe { init(0) };
            if words[0] == "init" || code != 0 {
                out(code);
                continue;
            }
        }
        out(match words[0] {
            "raw-state" | "state" => call("GetState", pid, value_pointer),
            "state-value" => match call("GetState", pid, value_pointer) {
                0 => value,
                code => -code,
            },
            "tid" => call("GetRestoreThreadId", pid, value_pointer),
            "tid-value" => match call("GetRestoreThreadId", pid, value_pointer) {
                0 => value,
                code => -code,
            },
            "lock" => {
                let mut arguments = [0_u32; 16];
                arguments[0] = words[2].parse().unwrap();
                call("Lock", pid, arguments.as_mut_ptr().cast())
            }
            "checkpoint" => call("Checkpoint", pid, [0_u64; 8].as_mut_ptr().cast()),
            "restore" => {
                // Pairs of GPU numbers, as 0=1.
                let settings = stasis_emulated_gpu::settings::Settings::default();
                let uuid = |index: &str| settings.uuid(index.parse().unwrap());
                let pairs: Vec<_> = words[2..]
                    .iter()
                    .map(|word| word.split_once('=').unwrap())
                    .map(|(old, new)| [uuid(old), uuid(new)])
                    .collect();
                let mut arguments = [0_u64; 8];
                arguments[0] = pairs.as_ptr() as u64;
                arguments[1] = pairs.len() as u64;
                call("Restore", pid, arguments.as_mut_ptr().cast())
            }
            "unlock" => call("Unlock", pid, std::ptr::null_mut()),
            other => panic!("what is {other}?"),
        });
    }
}

fn nvml() {
    let nvml = nvml_wrapper::Nvml::builder().lib_path(driver().as_os_str()).init();
    let nvml = match nvml {
        Ok(nvml) => nvml,
        Err(error) => {
            out(1);
            return out(error);
        }
    };
    let gpu = std::env::var("TEST_GPU").unwrap().parse().unwrap();
    let device = nvml.device_by_index(gpu).unwrap();
    let memory = device.memory_info().unwrap();
    let mut lines = vec![
        nvml.sys_driver_version().unwrap(),
        nvml.sys_cuda_driver_version().unwrap().to_string(),
        nvml.device_count().unwrap().to_string(),
        device.uuid().unwrap(),
        device.name().unwrap(),
        device.minor_number().unwrap().to_string(),
        memory.total.to_string(),
        memory.used.to_string(),
        (memory.total - memory.free).to_string(),
    ];
    for process in device.running_compute_processes().unwrap() {
        lines.push(format!("{} {:?}", process.pid, process.used_gpu_memory));
    }
    out(lines.len());
    lines.iter().for_each(out);
}
