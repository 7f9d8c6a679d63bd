//! Processes that share device memory by `cuIpcGetMemHandle`, asked by UDP.
//!
//! The first process exports a counter and a pattern, the others import them. At each
//! datagram every member adds one by a kernel of its own, in turn, and then each looks
//! whether it sees what all have added. The answer is the counter: 100 and the number of
//! members after the first datagram. What a member sees wrongly is the answer for ever.
//!
//! The exporter listens at a Unix socket. A member says `join` there, is told the
//! memory's size and handle, and from then on obeys `add` and `look`. When a member ends,
//! so does the exporter, and with the exporter all members.
//!
//! CRIU dumps what descends from a container's first process, and what is started by
//! `exec` does not. So `--join` ends when the new member is in, and leaves it to the
//! first process, without anything of whoever started it.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use lexopt::prelude::*;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{dup2_stderr, dup2_stdout, setsid};
use stasis_workloads::IpcHandle;
use stasis_workloads::cuda::{Gpu, Segment};
use stasis_workloads::ticker::Log;

const HELP: &str = "ipc N [options]      N processes that share device memory
ipc --join [options] one more, in the background, which joins those that listen at the socket
  --socket PATH   where the exporter listens (/tmp/stasis-ipc.sock)
  --ready FILE    create FILE when all are in; with --join when this one is, with its pid
  --port N        UDP port (10000), 0 for none
  --mib N         MiB of pattern (1)
  --log FILE      append each answer to FILE
  --tick MS       add by itself as well
  --no-share      each has memory of its own";

/// How a process becomes a member of others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Join {
    /// Another process in the background does.
    Indirectly,
    /// It is that other process.
    Detached,
    /// The exporter has started it.
    Directly,
}

struct Options {
    members: usize,
    join: Option<Join>,
    socket: PathBuf,
    ready: Option<PathBuf>,
    port: u16,
    mib: usize,
    log: Option<PathBuf>,
    tick: Option<Duration>,
    share: bool,
}

impl Options {
    fn parse() -> anyhow::Result<Self> {
        let mut options = Self {
            members: 0,
            join: None,
            socket: "/tmp/stasis-ipc.sock".into(),
            ready: None,
            port: 10000,
            mib: 1,
            log: None,
            tick: None,
            share: true,
        };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Value(members) => options.members = members.parse()?,
                Long("join") => options.join = Some(Join::Indirectly),
                Long("detached") => options.join = Some(Join::Detached),
                Long("member") => options.join = Some(Join::Directly),
                Long("socket") => options.socket = parser.value()?.into(),
                Long("ready") => options.ready = Some(parser.value()?.into()),
                Long("port") => options.port = parser.value()?.parse()?,
                Long("mib") => options.mib = parser.value()?.parse()?,
                Long("log") => options.log = Some(parser.value()?.into()),
                Long("tick") => {
                    options.tick = Some(Duration::from_millis(parser.value()?.parse()?));
                }
                Long("no-share") => options.share = false,
                Long("help") => {
                    println!("{HELP}");
                    std::process::exit(0);
                }
                other => return Err(other.unexpected()).context(HELP),
            }
        }
        if options.join.is_some() == (1..=64).contains(&options.members) {
            bail!("either N, 1 to 64, or --join\n{HELP}");
        }
        Ok(options)
    }
}

/// The memory of one member.
struct Memory {
    gpu: Gpu,
    segment: Segment,
}

impl Memory {
    /// Adds one; a failed CUDA call is a word like any other: the program lives on.
    fn add(&self) -> String {
        self.gpu.increment_in(&self.segment).map_or_else(|e| e.to_string(), |()| "added".into())
    }

    /// What it sees: the counter, if the pattern is right.
    fn look(&self) -> String {
        match self.gpu.look_at(&self.segment) {
            Ok((count, 0)) => count.to_string(),
            Ok((count, wrong)) => format!("{count} and {wrong} wrong words"),
            Err(error) => error.to_string(),
        }
    }

    fn obey(&self, word: &str) -> String {
        match word {
            "add" => self.add(),
            "look" => self.look(),
            other => format!("what is {other}?"),
        }
    }
}

/// A line that must come; without one the other process has ended.
fn line(reader: &mut impl BufRead) -> anyhow::Result<String> {
    let mut line = String::new();
    ensure!(reader.read_line(&mut line)? > 0, "the other end is gone");
    Ok(line.trim_end().to_owned())
}

/// Starts a member in the background and waits until it is in.
fn start_detached() -> anyhow::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--detached");
    let mut member = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let stdout = member.stdout.take().context("no pipe")?;
    line(&mut BufReader::new(stdout)).context("it could not join").map(drop)
}

/// Lets go of the files of whoever started it, and tells that it is in.
fn detach() -> anyhow::Result<()> {
    let mut told = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    Ok(told.write_all(b"ready\n")?)
}

/// The other processes: each joins, and obeys until the exporter is gone.
fn member(options: &Options, join: Join) -> anyhow::Result<()> {
    if join == Join::Detached {
        setsid()?;
    }
    let stream = UnixStream::connect(&options.socket)
        .with_context(|| format!("connect to {}", options.socket.display()))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let gpu = Gpu::start(0)?;
    say(&stream, "join")?;
    let told = line(&mut reader)?;
    let (mib, handle) = told.split_once(' ').context("not an answer to join")?;
    let mib = mib.parse()?;
    let segment = match from_hex(handle) {
        Some(handle) => gpu.import(handle, mib)?,
        None => gpu.segment(mib)?,
    };
    let memory = Memory { gpu, segment };
    say(&stream, "ready")?;
    if let Some(ready) = &options.ready {
        std::fs::write(ready, format!("{}\n", std::process::id()))?;
    }
    if join == Join::Detached {
        detach()?;
    }
    // Until the exporter is gone.
    while let Ok(word) = line(&mut reader) {
        say(&stream, &memory.obey(&word))?;
    }
    Ok(())
}

fn say(mut stream: &UnixStream, text: &str) -> std::io::Result<()> {
    stream.write_all(format!("{text}\n").as_bytes())
}

fn to_hex(handle: IpcHandle) -> String {
    handle.0.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

fn from_hex(text: &str) -> Option<IpcHandle> {
    let mut bytes = [0; 64];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(IpcHandle(bytes))
}

/// A member as the exporter sees it.
struct Member {
    stream: BufReader<UnixStream>,
    /// How often it has added.
    added: u32,
}

impl Member {
    fn ask(&mut self, word: &str) -> anyhow::Result<String> {
        say(self.stream.get_ref(), word)?;
        line(&mut self.stream)
    }
}

/// The first process.
struct Exporter {
    memory: Memory,
    mib: usize,
    share: bool,
    members: Vec<Member>,
    /// How often it has added itself.
    added: u32,
    /// The first wrong thing that a member saw.
    wrong: Option<String>,
}

impl Exporter {
    fn start(options: &Options) -> anyhow::Result<Self> {
        let gpu = Gpu::start(0)?;
        let segment = gpu.segment(options.mib)?;
        let memory = Memory { gpu, segment };
        let (mib, share) = (options.mib, options.share);
        Ok(Self { memory, mib, share, members: Vec::new(), added: 0, wrong: None })
    }

    /// Lets the one join that has connected.
    fn admit(&mut self, listener: &UnixListener) -> anyhow::Result<()> {
        let mut member = Member { stream: BufReader::new(listener.accept()?.0), added: 0 };
        let word = line(&mut member.stream)?;
        ensure!(word == "join", "{word} instead of join");
        // A new handle each time: the memory may have been elsewhere meanwhile.
        let handle = if self.share {
            to_hex(self.memory.gpu.export(&self.memory.segment)?)
        } else {
            "none".into()
        };
        let word = member.ask(&format!("{} {handle}", self.mib))?;
        ensure!(word == "ready", "{word} instead of ready");
        self.members.push(member);
        Ok(())
    }

    /// Everybody adds one, then everybody looks.
    fn round(&mut self) -> anyhow::Result<String> {
        let mut said = vec![self.memory.add()];
        self.added += 1;
        for member in &mut self.members {
            said.push(member.ask("add")?);
            member.added += 1;
        }
        let others: u32 = self.members.iter().map(|member| member.added).sum();
        let sum = 100 + self.added + others;
        let expected = |added: u32| if self.share { sum } else { 100 + added };
        let mut seen = vec![(self.memory.look(), expected(self.added))];
        for member in &mut self.members {
            seen.push((member.ask("look")?, expected(member.added)));
        }
        for (number, (added, (sees, expected))) in said.iter().zip(&seen).enumerate() {
            let wrong = if added != "added" {
                format!("member {number}: {added}")
            } else if *sees != expected.to_string() {
                format!("member {number} sees {sees}, not {expected}")
            } else {
                continue;
            };
            self.wrong.get_or_insert(wrong);
        }
        Ok(self.wrong.clone().unwrap_or_else(|| sum.to_string()))
    }

    /// Waits until something is to be done, at most for `left`; true for each descriptor
    /// that has something, the members' among them: they speak only when asked, or end.
    fn wait(
        &self,
        listener: &UnixListener,
        socket: Option<&UdpSocket>,
        left: Option<Duration>,
    ) -> anyhow::Result<[bool; 3]> {
        let mut fds: Vec<BorrowedFd<'_>> = vec![listener.as_fd()];
        fds.extend(self.members.iter().map(|member| member.stream.get_ref().as_fd()));
        fds.extend(socket.map(AsFd::as_fd));
        let mut fds: Vec<PollFd<'_>> =
            fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let left = left.map(|left| left + Duration::from_millis(1));
        let timeout = left.map_or(Ok(PollTimeout::NONE), PollTimeout::try_from);
        match poll(&mut fds, timeout.unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let any = |fds: &[PollFd<'_>]| fds.iter().any(|fd| fd.any() == Some(true));
        let (first, rest) = fds.split_at(1);
        let (members, socket) = rest.split_at(self.members.len());
        Ok([any(first), any(members), any(socket)])
    }
}

/// Starts the other members: this program again, with all that it has inherited itself.
fn spawn(options: &Options) -> anyhow::Result<Vec<Child>> {
    let program = std::env::current_exe()?;
    let member = || {
        let mut command = Command::new(&program);
        command.arg("--member").arg("--socket").arg(&options.socket);
        Ok(command.spawn()?)
    };
    (1..options.members).map(|_| member()).collect()
}

fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    // One that an earlier start has left.
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path).with_context(|| format!("listen at {}", path.display()))
}

fn exporter(options: &Options) -> anyhow::Result<()> {
    let bind = || UdpSocket::bind(("0.0.0.0", options.port));
    let socket = (options.port != 0).then(bind).transpose();
    let socket = socket.with_context(|| format!("bind port {}", options.port))?;
    let mut log = Log::new(options.log.as_deref(), false)?;
    let listener = listen(&options.socket)?;
    let mut exporter = Exporter::start(options)?;
    let mut children = spawn(options)?;
    while exporter.members.len() + 1 < options.members {
        if exporter.wait(&listener, None, Some(Duration::from_millis(200)))?[0] {
            exporter.admit(&listener)?;
        }
        for child in &mut children {
            ensure!(child.try_wait()?.is_none(), "a member has ended");
        }
    }
    if let Some(ready) = &options.ready {
        std::fs::write(ready, "ready\n")?;
    }
    let mut next = Instant::now();
    loop {
        let left = options.tick.map(|_| next.saturating_duration_since(Instant::now()));
        // After a restore on another machine the clock may have gone back.
        let left = left.map(|left| left.min(options.tick.unwrap_or_default()));
        if let (Some(Duration::ZERO), Some(period)) = (left, options.tick) {
            next = Instant::now() + period;
            log.line(&exporter.round()?)?;
            continue;
        }
        let [joins, ends, asked] = exporter.wait(&listener, socket.as_ref(), left)?;
        ensure!(!ends, "a member has ended");
        if joins && let Err(error) = exporter.admit(&listener) {
            // It was no member yet, so the others go on.
            eprintln!("not joined: {error:#}");
        }
        if let (true, Some(socket)) = (asked, &socket) {
            let Ok((_, from)) = socket.recv_from(&mut [0; 64]) else { continue };
            let answer = exporter.round()?;
            log.line(&answer)?;
            // Whoever asked may be gone.
            let _ = socket.send_to(format!("{answer}\n").as_bytes(), from);
        }
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse()?;
    match options.join {
        None => exporter(&options),
        Some(Join::Indirectly) => start_detached(),
        Some(join) => member(&options, join),
    }
}
