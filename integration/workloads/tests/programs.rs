//! The programs on the emulated GPU, without checkpoints.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A directory with the driver under its real name and a store.
struct Machine(TempDir);

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let driver = deps.join("libstasis_emulated_gpu.so");
        std::os::unix::fs::symlink(driver, dir.path().join("libcuda.so.1")).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Running {
        let child = Command::new(program)
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.0.path())
            .env("EMULATED_GPU_DIR", self.path("store"))
            .env("EMULATED_GPU_DEVICE", "/dev/zero")
            .current_dir(self.0.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Running(child)
    }

    /// An `ipc` group, when all are in.
    fn ipc(&self, port: u16, arguments: &str) -> Running {
        let port = port.to_string();
        let mut all = vec!["--port", &port, "--ready", "ready", "--socket", "socket"];
        all.extend(arguments.split_whitespace());
        let running = self.run(env!("CARGO_BIN_EXE_ipc"), &all);
        wait_for(|| self.path("ready").exists());
        running
    }

    /// One more member of the group, by its pid.
    fn join(&self) -> i32 {
        let arguments = ["--join", "--socket", "socket", "--ready", "joined"];
        let mut running = self.run(env!("CARGO_BIN_EXE_ipc"), &arguments);
        assert!(running.0.wait().unwrap().success());
        fs::read_to_string(self.path("joined")).unwrap().trim().parse().unwrap()
    }

    fn counter(&self, port: u16, arguments: &str) -> Running {
        let port = port.to_string();
        let mut all = vec!["--port", &port, "--bind", "127.0.0.1", "--ready", "ready"];
        all.extend(arguments.split_whitespace());
        let running = self.run(env!("CARGO_BIN_EXE_counter"), &all);
        wait_for(|| self.path("ready").exists());
        running
    }
}

fn wait_for(mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "it takes too long");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A port that was free a moment ago; `count` of them in a row.
fn free_port(count: u16) -> u16 {
    let bind = |port: u16| UdpSocket::bind(("0.0.0.0", port));
    loop {
        let port = bind(0).unwrap().local_addr().unwrap().port();
        if port < u16::MAX - count && (port..port + count).all(|port| bind(port).is_ok()) {
            return port;
        }
    }
}

fn ask(port: u16, text: &str) -> String {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket.send_to(text.as_bytes(), ("127.0.0.1", port)).unwrap();
    let mut answer = [0; 100];
    let len = socket.recv(&mut answer).unwrap();
    String::from_utf8(answer[..len].to_vec()).unwrap()
}

fn lines(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn the_first_answer_is_101() {
    let machine = Machine::new();
    let port = free_port(1);
    let _counter = machine.counter(port, "--pattern-mib 3 --log log --managed");
    assert_eq!(ask(port, "state"), "100\n");
    assert_eq!(ask(port, "count"), "101\n");
    assert_eq!(ask(port, ""), "102\n");
    assert_eq!(ask(port, "state\n"), "102\n");
    assert_eq!(lines(&machine.path("log")), ["101", "102"]);
}

#[test]
fn ticks_count_and_are_logged() {
    let machine = Machine::new();
    let port = free_port(1);
    let _counter = machine.counter(port, "--tick 20 --spin 30 --log log");
    wait_for(|| lines(&machine.path("log")).len() >= 3);
    assert_eq!(lines(&machine.path("log"))[..3], ["101", "102", "103"]);
}

#[test]
fn an_error_is_an_answer() {
    let machine = Machine::new();
    let port = free_port(1);
    let _counter = machine.counter(port, "");
    // The memory goes away as it would with a lost GPU.
    for entry in fs::read_dir(machine.path("store")).unwrap().flatten() {
        for file in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
            fs::remove_file(file.path()).unwrap();
        }
    }
    assert_eq!(ask(port, "count"), "CUDA cuMemcpyDtoH 700\n");
    assert_eq!(ask(port, "count"), "CUDA cuLaunchKernel 700\n");
}

#[test]
fn a_late_start_has_no_driver_before() {
    let machine = Machine::new();
    let port = free_port(1).to_string();
    let arguments = ["--port", &port, "--late", "700", "--ready", "ready"];
    let counter = machine.run(env!("CARGO_BIN_EXE_counter"), &arguments);
    thread::sleep(Duration::from_millis(200));
    let maps = || fs::read_to_string(format!("/proc/{}/maps", counter.0.id())).unwrap();
    assert!(!maps().contains("emulated_gpu"));
    wait_for(|| machine.path("ready").exists());
    assert!(maps().contains("emulated_gpu"));
}

#[test]
fn holding_the_device_is_not_cuda() {
    let machine = Machine::new();
    let port = free_port(1);
    let counter = machine.counter(port, "--hold-device --device-node /dev/zero");
    assert_eq!(ask(port, "count"), "101\n");
    let maps = fs::read_to_string(format!("/proc/{}/maps", counter.0.id())).unwrap();
    assert!(!maps.contains("emulated_gpu"));
    let fds = fs::read_dir(format!("/proc/{}/fd", counter.0.id())).unwrap().flatten();
    let mut held = fds.filter_map(|fd| fs::read_link(fd.path()).ok());
    assert!(held.any(|path| path == Path::new("/dev/zero")));
}

#[test]
fn ranks_go_in_step() {
    let machine = Machine::new();
    let port = free_port(1).to_string();
    let arguments = ["3", "--tick", "5", "--log", "log", "--port", &port, "--shared", "flags"];
    let mut ranks = machine.run(env!("CARGO_BIN_EXE_ranks"), &arguments);
    let log = |rank: usize| lines(&machine.path(&format!("log.{rank}")));
    wait_for(|| (0..3).all(|rank| log(rank).len() >= 10));
    let port = port.parse().unwrap();
    assert!(ask(port, "step").trim().parse::<u32>().unwrap() >= 9);
    for rank in 0..3 {
        assert_eq!(log(rank)[..3], ["1", "2", "3"]);
    }
    let lengths: Vec<usize> = (0..3).map(|rank| log(rank).len()).collect();
    assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 20, "{lengths:?}");
    ranks.0.kill().unwrap();
    ranks.0.wait().unwrap();
    thread::sleep(Duration::from_millis(100));
    let before = log(0).len();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(log(0).len(), before, "the ranks go with their parent");
}

#[test]
fn independent_ranks_have_a_port_each() {
    let machine = Machine::new();
    let port = free_port(2);
    let text = port.to_string();
    let arguments =
        ["2", "--independent", "--port", &text, "--shared", "flags", "--ready", "ready"];
    let _ranks = machine.run(env!("CARGO_BIN_EXE_ranks"), &arguments);
    wait_for(|| machine.path("ready.0").exists() && machine.path("ready.1").exists());
    for port in [port, port + 1] {
        let count: u32 = ask(port, "step").trim().parse().unwrap();
        assert!(count >= 1);
    }
}

/// Whether the process has ended, also when nobody has waited for it yet.
fn is_gone(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.contains(") ") || stat.contains(") Z ")
}

fn has_ended(running: &mut Running) -> bool {
    running.0.try_wait().unwrap().is_some()
}

#[test]
fn members_see_what_all_have_added() {
    for (options, most) in [("3 --log log", 1), ("3 --log log --no-share", 4)] {
        let machine = Machine::new();
        let port = free_port(1);
        let mut group = machine.ipc(port, options);
        assert_eq!([ask(port, ""), ask(port, "?")], ["103\n", "106\n"]);
        let joined = machine.join();
        for fd in 0..3 {
            let file = fs::read_link(format!("/proc/{joined}/fd/{fd}")).unwrap();
            assert_eq!(file, Path::new("/dev/null"));
        }
        assert_eq!([ask(port, ""), ask(port, "")], ["110\n", "114\n"]);
        assert_eq!(lines(&machine.path("log")), ["103", "106", "110", "114"]);
        let entries = fs::read_dir(machine.path("store")).unwrap().flatten();
        let files = entries.filter_map(|entry| fs::read_dir(entry.path()).ok()).flatten().flatten();
        let segments = files.filter(|file| file.metadata().unwrap().len() > 1 << 20).count();
        assert_eq!(segments, most, "{options}");
        // Without the exporter there is nothing for the others.
        group.0.kill().unwrap();
        wait_for(|| is_gone(joined));
    }
}

#[test]
fn a_member_that_ends_ends_all() {
    let machine = Machine::new();
    let port = free_port(1);
    let mut group = machine.ipc(port, "3");
    let joined = nix::unistd::Pid::from_raw(machine.join());
    assert_eq!(ask(port, ""), "104\n");
    nix::sys::signal::kill(joined, nix::sys::signal::Signal::SIGKILL).unwrap();
    wait_for(|| has_ended(&mut group));
}

#[test]
fn what_was_seen_wrongly_is_the_answer_for_ever() {
    let machine = Machine::new();
    let port = free_port(1);
    let _group = machine.ipc(port, "2");
    assert_eq!(ask(port, ""), "102\n");
    let entries = fs::read_dir(machine.path("store")).unwrap().flatten();
    let mut files = entries.filter_map(|entry| fs::read_dir(entry.path()).ok()).flatten().flatten();
    let segment = files.find(|file| file.metadata().unwrap().len() > 1 << 20).unwrap().path();
    let whole = fs::read(&segment).unwrap();
    let mut damaged = whole.clone();
    damaged[300] ^= 1;
    fs::write(&segment, damaged).unwrap();
    assert_eq!(ask(port, ""), "member 0 sees 104 and 1 wrong words, not 104\n");
    fs::write(&segment, whole).unwrap();
    assert_eq!(ask(port, ""), "member 0 sees 104 and 1 wrong words, not 104\n");
}

#[test]
fn who_cannot_join_does_no_harm() {
    let machine = Machine::new();
    let port = free_port(1);
    let _group = machine.ipc(port, "2 --tick 20 --log log");
    drop(std::os::unix::net::UnixStream::connect(machine.path("socket")).unwrap());
    let before = lines(&machine.path("log")).len();
    wait_for(|| lines(&machine.path("log")).len() > before + 3);
    assert_eq!(lines(&machine.path("log"))[..2], ["102", "104"]);
}
