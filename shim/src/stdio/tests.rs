use std::fs::{self, File, OpenOptions};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Child as Process;
use std::thread;
use std::time::{Instant, SystemTime};

use nix::libc::{O_NOCTTY, O_NONBLOCK};
use nix::sys::stat::Mode;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::mkfifo;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe::{OpenOptions as FifoOptions, Receiver, Sender};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use super::*;
use crate::reaper::Exit;

/// Longer than anything takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(30);

/// Long enough to see that something does not happen.
const SHORT: Duration = Duration::from_millis(300);

const PATIENT: Deadlines = Deadlines { ready: LONG, terminal: LONG, end: LONG };
const IMPATIENT: Deadlines = Deadlines { ready: SHORT, terminal: SHORT, end: SHORT };

/// A reaper of a thread for each child.
struct Threads;

impl Spawner for Threads {
    fn spawn(&self, mut command: Command) -> io::Result<Spawned> {
        let child = command.spawn()?;
        let pid = child.id().cast_signed();
        let (sender, exit) = oneshot::channel();
        thread::spawn(move || {
            let (_, status) = waitpid(Pid::from_raw(pid), WaitOptions::empty()).unwrap().unwrap();
            let signalled = || status.terminating_signal().map_or(0, |signal| 128 + signal);
            let status = status.exit_status().unwrap_or_else(signalled).cast_unsigned();
            let _ = sender.send(Exit { status, at: SystemTime::now() });
        });
        Ok(Spawned { pid, child, exit })
    }
}

/// A client's directory.
struct Client(TempDir);

impl Client {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn fifo(&self, name: &str) -> String {
        let path = self.path(name);
        mkfifo(&path, Mode::from_bits_retain(0o600)).unwrap();
        path.into_os_string().into_string().unwrap()
    }

    /// A logging binary that is this script.
    fn logger(&self, script: &str) -> String {
        let path = self.path("logger");
        crate::testing::script(&path, &format!("#!/bin/sh\n{script}\n"));
        let directory = self.0.path().display();
        format!("binary://{}?directory={directory}&b=2&a=1&b=3", path.display())
    }
}

fn reader(path: &str) -> Receiver {
    FifoOptions::new().open_receiver(path).unwrap()
}

fn writer(path: &str) -> Sender {
    FifoOptions::new().open_sender(path).unwrap()
}

async fn open_as(
    request: &Request,
    owner: Owner,
    deadlines: Deadlines,
) -> Result<ProcessIo, StdioError> {
    ProcessIo::open_with(request, "c1", "ns1", owner, &Threads, deadlines).await
}

/// Us, so that this works for anybody.
fn own() -> Owner {
    Owner { uid: nix::unistd::getuid().as_raw(), gid: nix::unistd::getgid().as_raw() }
}

async fn open(request: &Request) -> ProcessIo {
    open_as(request, own(), PATIENT).await.unwrap()
}

async fn refused(request: &Request, deadlines: Deadlines) -> String {
    let error = open_as(request, own(), deadlines).await.unwrap_err();
    anyhow::Error::from(error).chain().map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// What `ls /proc/self/fd` says with these `additional` ones: its own last one comes on top of
/// what whoever runs the tests has left open.
fn inherited(additional: &[&str]) -> String {
    let output = Command::new("ls").arg("/proc/self/fd").output().unwrap().stdout;
    let output = String::from_utf8(output).unwrap();
    let own =
        (3..100).find(|own| !additional.contains(&own.to_string().as_str())).unwrap().to_string();
    let mut all: Vec<&str> = output.split_whitespace().filter(|&one| one != "3").collect();
    all.extend(additional);
    all.push(&own);
    all.sort_unstable();
    all.join(" ")
}

/// A process, as the runtime would make it.
fn make(ours: &mut ProcessIo, script: &str) -> Process {
    let [stdin, stdout, stderr] = ours.take_child_ends().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap()
}

async fn start(ours: &mut ProcessIo, script: &str) -> Process {
    let process = make(ours, script);
    ours.started().await.unwrap();
    process
}

async fn ends(mut process: Process) {
    // No matter how: a test of the reaper may have reaped it.
    let _ = within(spawn_blocking(move || process.wait())).await;
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(LONG, future).await.expect("it takes too long")
}

async fn read_all(mut from: Receiver) -> String {
    let mut all = String::new();
    within(from.read_to_string(&mut all)).await.unwrap();
    all
}

async fn read_some(from: &mut Receiver, length: usize) -> String {
    let mut some = vec![0; length];
    within(from.read_exact(&mut some)).await.unwrap();
    String::from_utf8(some).unwrap()
}

/// Until something that others do is done.
async fn until(mut done: impl FnMut() -> bool) {
    within(async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Whether somebody has a FIFO open for reading.
fn is_read(path: &str) -> bool {
    OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(path).is_ok()
}

#[tokio::test]
async fn pipes_carry_all_three_streams() {
    let client = Client::new();
    let request = Request {
        stdin: client.fifo("in"),
        stdout: client.fifo("out"),
        stderr: client.fifo("err"),
        terminal: false,
    };
    let (out, err) = (reader(&request.stdout), reader(&request.stderr));
    let mut ours = open(&request).await;
    assert_eq!(ours.console_socket(), None);
    let process = start(&mut ours, "read line; echo got $line; echo error >&2").await;
    let mut input = writer(&request.stdin);
    input.write_all(b"this\n").await.unwrap();
    assert_eq!(read_all(out).await, "got this\n");
    assert_eq!(read_all(err).await, "error\n");
    assert!(ours.drained(LONG).await);
    ends(process).await;
    ours.resize(1, 1).unwrap();
    assert!(matches!(ours.take_child_ends(), Err(StdioError::Started)));
    assert!(matches!(ours.started().await, Err(StdioError::Started)));
    assert!(is_read(&request.stdin));
    ours.close().await;
    assert!(!is_read(&request.stdin));
    ours.close().await;
}

#[tokio::test]
async fn what_nobody_asked_for_is_dev_null_and_nothing_else_is_inherited() {
    let client = Client::new();
    let request = Request { stdout: client.fifo("out"), ..Request::default() };
    let out = reader(&request.stdout);
    let mut ours = open(&request).await;
    let script = "readlink /proc/self/fd/0 /proc/self/fd/2; echo $(ls /proc/self/fd) | tr '\\n' ' '; \
                  stat -L -c %F /proc/self/fd/1";
    let process = start(&mut ours, script).await;
    let expected = format!("/dev/null\n/dev/null\n{} fifo\n", inherited(&[]));
    assert_eq!(read_all(out).await, expected);
    ends(process).await;

    let mut ours = open(&Request::default()).await;
    ends(start(&mut ours, "echo nothing").await).await;
    assert!(ours.drained(LONG).await);
}

#[tokio::test]
async fn the_containers_ends_belong_to_whom_the_options_say() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let client = Client::new();
    let request =
        Request { stdin: client.fifo("in"), stdout: client.fifo("out"), ..Request::default() };
    let out = reader(&request.stdout);
    let mut ours = open_as(&request, Owner { uid: 1234, gid: 5678 }, PATIENT).await.unwrap();
    let process = start(&mut ours, "stat -L -c %u:%g /proc/self/fd/0 /proc/self/fd/1").await;
    assert_eq!(read_all(out).await, "1234:5678\n1234:5678\n");
    ends(process).await;
}

#[tokio::test]
async fn a_failed_start_is_tried_again_with_the_same() {
    let client = Client::new();
    let request =
        Request { stdin: client.fifo("in"), stdout: client.fifo("out"), ..Request::default() };
    let out = reader(&request.stdout);
    let mut ours = open(&request).await;
    writer(&request.stdin).write_all(b"input\n").await.unwrap();
    ends(make(&mut ours, "echo failed")).await;
    let process = start(&mut ours, "read line; echo started with $line").await;
    assert_eq!(read_all(out).await, "failed\nstarted with input\n");
    ends(process).await;
}

#[tokio::test]
async fn a_reader_may_go_away_and_come_back() {
    let client = Client::new();
    let request = Request { stdout: client.fifo("out"), ..Request::default() };
    let mut out = reader(&request.stdout);
    let mut ours = open(&request).await;
    let script = format!(
        "echo one; until [ -e {0} ]; do sleep 0.01; done; echo two; \
                          until [ -e {0}2 ]; do sleep 0.01; done; echo three",
        client.path("go").display()
    );
    let process = start(&mut ours, &script).await;
    assert_eq!(read_some(&mut out, 4).await, "one\n");
    drop(out);
    fs::write(client.path("go"), "").unwrap();
    tokio::time::sleep(SHORT).await;
    let mut out = reader(&request.stdout);
    assert_eq!(read_some(&mut out, 4).await, "two\n");
    fs::write(client.path("go2"), "").unwrap();
    assert_eq!(read_all(out).await, "three\n");
    ends(process).await;
}

#[tokio::test]
async fn stdin_ends_with_close_stdin_and_not_with_its_clients() {
    let client = Client::new();
    let request =
        Request { stdin: client.fifo("in"), stdout: client.fifo("out"), ..Request::default() };
    let mut out = reader(&request.stdout);
    let mut ours = open(&request).await;
    let process = start(&mut ours, "cat; echo end").await;
    for word in ["one\n", "two\n"] {
        writer(&request.stdin).write_all(word.as_bytes()).await.unwrap();
        assert_eq!(read_some(&mut out, 4).await, word);
    }
    let mut last = writer(&request.stdin);
    last.write_all(b"last\n").await.unwrap();
    ours.close_stdin();
    last.write_all(b"words\n").await.unwrap();
    drop(last);
    assert_eq!(read_all(out).await, "last\nwords\nend\n");
    ends(process).await;
}

#[tokio::test]
async fn stdin_closed_before_the_process_is_made_ends_too() {
    let client = Client::new();
    let request =
        Request { stdin: client.fifo("in"), stdout: client.fifo("out"), ..Request::default() };
    let out = reader(&request.stdout);
    let mut ours = open(&request).await;
    ours.close_stdin();
    let process = start(&mut ours, "cat; echo end").await;
    assert_eq!(read_all(out).await, "end\n");
    ends(process).await;
}

#[tokio::test]
async fn a_process_that_does_not_read_does_not_hold_its_client() {
    let client = Client::new();
    let request =
        Request { stdin: client.fifo("in"), stdout: client.fifo("out"), ..Request::default() };
    let mut ours = open(&request).await;
    let process = start(&mut ours, "exec 0<&-; echo closed").await;
    let mut input = writer(&request.stdin);
    assert_eq!(read_all(reader(&request.stdout)).await, "closed\n");
    ends(process).await;
    input.write_all(b"for nobody").await.unwrap();
    within(async { while input.write_all(b"for nobody").await.is_ok() {} }).await;
}

#[tokio::test]
async fn a_stdin_that_is_no_fifo_is_the_processs_own() {
    let client = Client::new();
    let file = client.path("file");
    fs::write(&file, "from a file\n").unwrap();
    for (stdin, expected) in [(file.to_str().unwrap(), "from a file\n"), ("/dev/null", "")] {
        let stdout = client.fifo(&format!("out{}", expected.len()));
        let request = Request { stdin: stdin.to_owned(), stdout, ..Request::default() };
        let out = reader(&request.stdout);
        let mut ours = open(&request).await;
        let process = start(&mut ours, "cat").await;
        assert_eq!(read_all(out).await, expected);
        ours.close_stdin();
        ends(process).await;
        ours.close().await;
    }
}

#[test]
fn a_parked_stdin_keeps_neither_the_runtime_nor_the_fifo() {
    let client = Client::new();
    let stdin = client.fifo("in");
    let request = Request { stdin: stdin.clone(), ..Request::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ours = runtime.block_on(async {
        let mut ours = open(&request).await;
        // It lives until the copying has begun: for one that is gone nothing is begun.
        let mut process = start(&mut ours, "exec sleep 1000").await;
        until(|| is_read(&stdin)).await;
        tokio::time::sleep(SHORT).await;
        process.kill().unwrap();
        ends(process).await;
        ours
    });
    assert!(is_read(&stdin));
    let begun = Instant::now();
    drop(runtime);
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(!is_read(&stdin));
    drop(ours);
}

#[tokio::test]
async fn a_slow_reader_holds_its_own_container_only() {
    let client = Client::new();
    let slow = Request { stdout: client.fifo("slow"), ..Request::default() };
    let other = Request { stdout: client.fifo("other"), ..Request::default() };
    let mut slow_out = reader(&slow.stdout);
    let (mut slow_stdio, mut other_stdio) = (open(&slow).await, open(&other).await);
    let script = format!("yes 1234567 | head -c 1048576; : > {}", client.path("over").display());
    let slow_process = start(&mut slow_stdio, &script).await;
    read_some(&mut slow_out, 8).await;
    let out = reader(&other.stdout);
    let process = start(&mut other_stdio, "head -c 8388608 /dev/zero").await;
    let read = within(async {
        let mut all = Vec::new();
        { out }.read_to_end(&mut all).await.unwrap()
    });
    assert_eq!(read.await, 8 << 20);
    assert!(!slow_stdio.drained(SHORT).await);
    assert!(!client.path("over").exists(), "it has written more than anybody has read");
    assert_eq!(read_all(slow_out).await.len(), (1 << 20) - 8);
    assert!(slow_stdio.drained(LONG).await);
    ends(slow_process).await;
    ends(process).await;
}

/// How much processor time this thread uses while it waits.
async fn used() -> Duration {
    let now = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
    let before = now();
    tokio::time::sleep(SHORT).await;
    now().saturating_sub(before)
}

#[tokio::test]
async fn nobody_spins() {
    let client = Client::new();
    let request =
        Request { stdin: client.fifo("in"), stdout: client.fifo("out"), ..Request::default() };
    let mut out = reader(&request.stdout);
    let mut ours = open(&request).await;
    assert!(used().await < SHORT / 4, "before the process");
    let process = start(&mut ours, "exec 0<&-; echo; yes 2>&-").await;
    read_some(&mut out, 1).await;
    assert!(used().await < SHORT / 4, "with a full FIFO, and an input that nobody reads");
    ours.close().await;
    ends(process).await;

    let request = Request {
        stdin: client.fifo("in2"),
        stdout: client.fifo("out2"),
        terminal: true,
        ..Request::default()
    };
    let _out = reader(&request.stdout);
    let (mut ours, name, slave) = terminal(&request).await;
    assert!(used().await < SHORT / 4, "with a terminal");
    drop(slave);
    assert!(used().await < SHORT / 4, "with a terminal that nobody has open");
    let _slave = self::slave(&name);
    used().await;
    assert!(used().await < SHORT / 4, "with a terminal that is open again");
    // More than it takes while nobody reads it.
    let mut input = writer(&request.stdin);
    let line = [[b'x'; 1023].as_slice(), b"\n"].concat();
    while timeout(SHORT, input.write_all(&line)).await.is_ok() {}
    assert!(used().await < SHORT / 4, "with a terminal that is full");
    ours.close().await;
}

#[test]
fn all_may_wait_in_any_thread() {
    fn is_send(_: &impl Send) {}
    let request = Request::default();
    is_send(&ProcessIo::open(&request, "", "", Owner::default(), &Threads));
    let waits = |ours: &mut ProcessIo| {
        is_send(&ours.started());
        is_send(&ours.drained(SHORT));
        is_send(&ours.close());
        is_send(ours);
    };
    let _ = waits;
}

#[tokio::test]
async fn much_output_arrives_whole() {
    const LENGTH: usize = 256 << 20;
    let client = Client::new();
    let request = Request { stdout: client.fifo("out"), ..Request::default() };
    let path = request.stdout.clone();
    let reading = thread::spawn(move || {
        let mut out = File::open(path).unwrap();
        let expected = b"0123456789abcde\n".repeat(4097);
        let mut piece = vec![0; 64 << 10];
        let mut read = 0;
        loop {
            let length = out.read(&mut piece).unwrap();
            if length == 0 {
                return read;
            }
            assert!(piece[..length] == expected[read % 16..][..length], "wrong near {read}");
            read += length;
        }
    });
    let mut ours = open(&request).await;
    let begun = Instant::now();
    let script = format!("yes 0123456789abcde | head -c {LENGTH}");
    let process = start(&mut ours, &script).await;
    assert!(ours.drained(LONG * 4).await);
    let took = begun.elapsed();
    assert_eq!(spawn_blocking(|| reading.join().unwrap()).await.unwrap(), LENGTH);
    println!("{} MiB in {took:?}", LENGTH >> 20);
    ends(process).await;
}

#[tokio::test]
async fn a_pipe_that_stays_open_is_given_up_in_time_and_closed_at_once() {
    let client = Client::new();
    let request = Request { stdout: client.fifo("out"), ..Request::default() };
    let out = reader(&request.stdout);
    let mut ours = open(&request).await;
    let process = start(&mut ours, "echo gone; sleep 1000 & echo $! >&1").await;
    ends(process).await;
    let begun = Instant::now();
    assert!(!ours.drained(SHORT).await);
    assert!(begun.elapsed() < LONG);
    ours.close().await;
    let all = read_all(out).await;
    let left = all.strip_prefix("gone\n").unwrap().trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(left), nix::sys::signal::SIGKILL).unwrap();
}

#[tokio::test]
async fn a_file_is_made_with_its_directory_and_takes_both_outputs() {
    let client = Client::new();
    let path = client.path("a/b c/log");
    let uri = format!("file://{}", path.display()).replace(' ', "%20");
    let request = Request { stdout: uri.clone(), stderr: uri, ..Request::default() };
    for _ in 0..2 {
        let mut ours = open(&request).await;
        let process = start(&mut ours, "echo out; sleep 0.1; echo err >&2").await;
        ends(process).await;
        assert!(ours.drained(LONG).await);
        ours.close().await;
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), "out\nerr\nout\nerr\n");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777 & !0o022, 0o644);
}

#[tokio::test]
async fn a_full_disk_does_not_stop_the_process() {
    let client = Client::new();
    let request = Request { stdout: "/dev/full".to_owned(), ..Request::default() };
    let mut ours = open(&request).await;
    let script = format!("head -c 1048576 /dev/zero && : > {}", client.path("over").display());
    ends(start(&mut ours, &script).await).await;
    assert!(client.path("over").exists());
    assert!(ours.drained(LONG).await);
}

#[tokio::test]
async fn errors_name_what_was_asked_for() {
    let client = Client::new();
    let missing = client.path("missing").display().to_string();
    let stdout = |stdout: &str| Request { stdout: stdout.to_owned(), ..Request::default() };
    for (request, words) in [
        (stdout("npipe:////x"), "\"npipe:////x\": unknown scheme npipe".to_owned()),
        (stdout(&missing), format!("cannot find {missing}: No such file")),
        (
            Request { stdin: missing.clone(), ..Request::default() },
            format!("cannot open {missing}: No such file"),
        ),
        (
            stdout(&format!("binary://{missing}")),
            format!("cannot start the logging binary {missing}: No such file"),
        ),
        (stdout("file:///dev/null/x"), "cannot make the directory /dev/null: ".to_owned()),
    ] {
        let error = refused(&request, PATIENT).await;
        assert!(error.contains(&words), "{error}");
    }
}

/// What a runtime does for a terminal: sends its master. Returns the name of its slave.
fn send_terminal(to: &Path) -> PathBuf {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    send(to, &master);
    name.into_string().unwrap().into()
}

fn send(to: &Path, descriptor: &OwnedFd) {
    let socket = UnixStream::connect(to).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let text = [IoSlice::new(b"/dev/ptmx")];
    sendmsg(&socket, &text, &mut control, SendFlags::empty()).unwrap();
}

fn slave(name: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(O_NOCTTY).open(name).unwrap()
}

/// Opens ours with a terminal. The slave is open from before the master is sent.
async fn terminal(request: &Request) -> (ProcessIo, PathBuf, File) {
    let mut ours = open(request).await;
    ours.take_child_ends().unwrap();
    let socket = ours.console_socket().unwrap().to_owned();
    assert!(socket.as_os_str().len() < 108);
    let directory = socket.parent().unwrap();
    assert_eq!(fs::metadata(directory).unwrap().mode() & 0o777, 0o700);
    // One that a failed call of the runtime has left.
    send_terminal(&socket);
    ours.take_child_ends().unwrap();
    let name = send_terminal(&socket);
    // While we hold it no other master has its number.
    ours.started().await.unwrap();
    let slave = slave(&name);
    assert!(!directory.exists());
    assert_eq!(ours.console_socket(), None);
    (ours, name, slave)
}

#[tokio::test]
async fn a_terminal_is_copied_both_ways_and_resized() {
    let client = Client::new();
    let request = Request {
        stdin: client.fifo("in"),
        stdout: client.fifo("out"),
        terminal: true,
        ..Request::default()
    };
    let mut out = reader(&request.stdout);
    let (mut ours, name, mut terminal) = terminal(&request).await;
    terminal.write_all(b"hello").unwrap();
    assert_eq!(read_some(&mut out, 5).await, "hello");
    ours.resize(123, 45).unwrap();
    let size = rustix::termios::tcgetwinsize(&terminal).unwrap();
    assert_eq!((size.ws_col, size.ws_row), (123, 45));

    writer(&request.stdin).write_all(b"typed\n").await.unwrap();
    // It echoes.
    assert_eq!(read_some(&mut out, 7).await, "typed\r\n");
    let mut terminal = spawn_blocking(move || {
        let mut line = [0; 6];
        terminal.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"typed\n");
        terminal
    })
    .await
    .unwrap();

    // The end of the input is not the end of the output.
    ours.close_stdin();
    until(|| !is_read(&request.stdin)).await;
    terminal.write_all(b"still there").unwrap();
    assert_eq!(read_some(&mut out, 11).await, "still there");

    // Nor is a terminal that nobody has open, while the process lives.
    drop(terminal);
    tokio::time::sleep(SHORT).await;
    for word in ["again", "twice"] {
        let mut terminal = slave(&name);
        terminal.write_all(word.as_bytes()).unwrap();
        assert_eq!(read_some(&mut out, 5).await, word);
    }

    // All that was written before the end arrives.
    let mut terminal = slave(&name);
    terminal.write_all(b"last words").unwrap();
    drop(terminal);
    ours.ended();
    assert_eq!(read_all(out).await, "last words");
    assert!(ours.drained(LONG).await);
    ours.close().await;
}

#[tokio::test]
async fn a_terminal_that_a_left_behind_process_has_ends_with_its_own() {
    let client = Client::new();
    let request = Request { stdout: client.fifo("out"), terminal: true, ..Request::default() };
    let out = reader(&request.stdout);
    let (ours, _name, mut terminal) = terminal(&request).await;
    terminal.write_all(b"all").unwrap();
    assert!(ours.drained(LONG).await);
    assert_eq!(read_all(out).await, "all");
}

#[tokio::test]
async fn a_terminal_whose_output_nobody_wants_does_not_fill_up() {
    let request = Request { terminal: true, ..Request::default() };
    let (mut ours, _name, mut terminal) = terminal(&request).await;
    within(spawn_blocking(move || terminal.write_all(&vec![b'x'; 1 << 20]).unwrap()))
        .await
        .unwrap();
    ours.close().await;
}

#[tokio::test]
async fn a_terminal_that_does_not_come_is_an_error_in_time() {
    let request = Request { terminal: true, ..Request::default() };
    let mut ours = open_as(&request, own(), IMPATIENT).await.unwrap();
    let socket = ours.console_socket().unwrap().to_owned();
    assert!(matches!(ours.started().await, Err(StdioError::NoTerminal { .. })));
    // A runtime that connects and goes away, and one that sends something else.
    drop(UnixStream::connect(&socket).unwrap());
    let error = ours.started().await.unwrap_err().to_string();
    assert!(error.ends_with("no descriptor came instead of a terminal"), "{error}");
    send(&socket, &File::open("/dev/null").unwrap().into());
    let error = ours.started().await.unwrap_err().to_string();
    assert!(error.ends_with("another descriptor came instead of a terminal"), "{error}");
    // Still none, and it may still come.
    let name = send_terminal(&socket);
    ours.started().await.unwrap();
    drop(name);
    ours.close().await;
    assert!(!socket.exists());
}

/// Reads both of its inputs into files until they end.
const LOG: &str = "cat <&3 >$2/out 5>&- & cat <&4 >$2/err 5>&- & exec 3<&- 4<&-";

#[tokio::test]
async fn a_logger_gets_arguments_environment_and_both_outputs() {
    let client = Client::new();
    let script = format!(
        "echo \"$@\" $CONTAINER_ID $CONTAINER_NAMESPACE $(ls /proc/self/fd) > $2/begun\n\
         {LOG}; sleep 0.1; : > $2/ready; printf x >&5; exec 5>&-; wait; : > $2/end",
    );
    let request = Request { stdout: client.logger(&script), ..Request::default() };
    let mut ours = open(&request).await;
    assert!(client.path("ready").exists());
    let directory = client.0.path().display();
    assert_eq!(
        fs::read_to_string(client.path("begun")).unwrap(),
        format!("directory {directory} b 2 a 1 c1 ns1 {}\n", inherited(&["3", "4", "5"]))
    );
    // It sees no end between two tries.
    ends(make(&mut ours, "echo one")).await;
    let process = start(&mut ours, "echo two; echo err >&2; readlink /proc/self/fd/0").await;
    ends(process).await;
    assert!(ours.drained(LONG).await);
    until(|| fs::read_to_string(client.path("out")).unwrap() == "one\ntwo\n/dev/null\n").await;
    until(|| fs::read_to_string(client.path("err")).unwrap() == "err\n").await;
    assert!(!client.path("end").exists());
    ours.close().await;
}

#[tokio::test]
async fn a_logger_is_ready_when_it_closes_its_pipe_too_and_may_leave_a_child() {
    for script in [
        format!("{LOG}; exec 5>&-; wait"),
        // The first one is gone when the second one is ready.
        format!("( sleep 0.1; {LOG}; exec 5>&-; wait ) & exit 0"),
    ] {
        let client = Client::new();
        let request = Request { stdout: client.logger(&script), ..Request::default() };
        let mut ours = open(&request).await;
        ends(start(&mut ours, "echo out").await).await;
        until(|| fs::read_to_string(client.path("out")).is_ok_and(|out| out == "out\n")).await;
        ours.close().await;
    }
}

#[tokio::test]
async fn a_logger_that_is_not_ready_is_killed() {
    let client = Client::new();
    let request = Request {
        stdout: client.logger("echo $$ > $2/pid; exec sleep 1000"),
        ..Request::default()
    };
    let begun = Instant::now();
    let error = refused(&request, IMPATIENT).await;
    assert!(begun.elapsed() < LONG);
    assert!(error.contains("logger was not ready within 300ms and was killed"), "{error}");
    let pid = fs::read_to_string(client.path("pid")).unwrap();
    until(|| !Path::new("/proc").join(pid.trim()).exists()).await;
}

#[tokio::test]
async fn a_logger_that_ends_early_is_an_error() {
    let client = Client::new();
    let request = Request { stdout: client.logger("exit 3"), ..Request::default() };
    for _ in 0..10 {
        let error = refused(&request, PATIENT).await;
        let words = "logger ended before the container was started, with status 3";
        assert!(error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn a_logger_that_does_not_end_is_killed_and_one_that_does_is_waited_for() {
    let client = Client::new();
    let script = "trap '' TERM; echo $$ > $2/pid; printf x >&5; exec sleep 1000";
    let request = Request { stdout: client.logger(script), ..Request::default() };
    let mut ours = open_as(&request, own(), IMPATIENT).await.unwrap();
    let begun = Instant::now();
    ours.close().await;
    assert!(begun.elapsed() >= SHORT && begun.elapsed() < LONG);
    let pid = fs::read_to_string(client.path("pid")).unwrap();
    until(|| !Path::new("/proc").join(pid.trim()).exists()).await;

    let script = "trap 'sleep 0.1; : > $2/end; exit' TERM; printf x >&5
                  while :; do sleep 0.01; done";
    let request = Request { stdout: client.logger(script), ..Request::default() };
    let mut ours = open(&request).await;
    ours.close().await;
    assert!(client.path("end").exists());
}

#[tokio::test]
async fn a_logger_gets_a_terminals_output() {
    let client = Client::new();
    let request = Request {
        stdout: client.logger(&format!("{LOG}; exec 5>&-; wait")),
        terminal: true,
        ..Request::default()
    };
    let (mut ours, _name, mut terminal) = terminal(&request).await;
    terminal.write_all(b"on the terminal").unwrap();
    until(|| fs::read_to_string(client.path("out")).is_ok_and(|out| out == "on the terminal"))
        .await;
    drop(terminal);
    assert!(ours.drained(LONG).await);
    ours.close().await;
}
