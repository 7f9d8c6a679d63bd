//! Containerd's own shim and ours, and runc and `stasis-runc`, side by side: memory, times,
//! throughput.
//!
//! Run by `make bench`, inside the lab. Both are asked by the same `ctr` commands, under the same
//! name and with the real runc, in turn, so that whatever else the machine does hits both. It
//! reports and judges nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use stasis_integration::bare::Bare;
use stasis_integration::case::Lab;
use stasis_integration::ctr::Status;
use stasis_integration::site::{Kind, Site};
use stasis_integration::{command, image, processes, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// How often quick things are measured.
const QUICK: usize = 31;
/// How often slow ones are.
const SLOW: usize = 11;
/// How often runc is called with and without ours before it.
const DIRECT: usize = 20;
const IDLE: &[&str] = &["sleep", "1000000"];
const COUNT: &[&str] =
    &["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i >/dev/shm/n; sleep 0.1; done"];
const GIBIBYTE: &[&str] = &["dd", "if=/dev/zero", "bs=1M", "count=1024"];

fn main() -> ExitCode {
    match bench() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench() -> Result<()> {
    let lab = Lab::start()?;
    // A part is enough for who works on it.
    if std::env::args().nth(1).as_deref() == Some("direct") {
        println!("{}", machine(&lab)?);
        return direct(&lab);
    }
    let sides = [Side::new(&lab, Kind::Go)?, Side::new(&lab, Kind::Ours)?];
    println!("{}\n", machine(&lab)?);
    println!("| | Go's containerd-shim-runc-v2 | containerd-shim-runc-stasis | ratio |");
    println!("|---|---|---|---|");
    compare(&sides, "idle shim, 1 container: PSS, kB", 7, |side| side.memory(1, true))?;
    compare(&sides, "1 shim with 10 grouped containers: PSS, kB", 3, |side| side.memory(10, true))?;
    compare(&sides, "10 shims with 1 container each: PSS of all, kB", 3, |side| {
        side.memory(10, false)
    })?;
    compare(&sides, "`ctr run --rm IMAGE true`, ms", QUICK, |side| side.run_to_end(&[]))?;
    compare(&sides, "the same with `--null-io`, ms", QUICK, |side| {
        side.run_to_end(&["--null-io"])
    })?;
    let ids = both(&sides, |side| side.start(IDLE, &[]))?;
    compare(&sides, "`ctr tasks exec true`, ms", QUICK, |side| {
        side.time(&["tasks", "exec", "--exec-id", "e", &ids[side.number], "true"])
    })?;
    // Each is measured between two of the other.
    compare(&sides, "`ctr tasks pause`, ms", QUICK, |side| {
        let time = side.time(&["tasks", "pause", &ids[side.number]])?;
        side.time(&["tasks", "resume", &ids[side.number]])?;
        Ok(time)
    })?;
    compare(&sides, "`ctr tasks resume`, ms", QUICK, |side| {
        side.time(&["tasks", "pause", &ids[side.number]])?;
        side.time(&["tasks", "resume", &ids[side.number]])
    })?;
    both(&sides, |side| side.remove(&ids[side.number]))?;
    compare(&sides, "`ctr run --detach`, `tasks kill`, `tasks rm`, ms", QUICK, Side::life)?;
    let ids = both(&sides, |side| side.start(COUNT, &[]))?;
    compare(
        &sides,
        "`ctr tasks checkpoint --image-path`, left running, no GPU, ms",
        SLOW,
        |side| side.checkpoint(&ids[side.number]),
    )?;
    both(&sides, |side| side.remove(&ids[side.number]))?;
    compare(&sides, "1 GiB of output through `ctr run`, MiB/s", SLOW, Side::throughput)?;
    compare(&sides, "size of the binary (ours with line tables), kB", 1, Side::size)?;
    direct(&lab)
}

/// Calls of the runtime for a container without a GPU, as an engine makes them.
fn direct(lab: &Lab) -> Result<()> {
    let ours = lab.binaries().join("stasis-runc");
    let sides = [Direct::new(lab, Path::new("/usr/sbin/runc"))?, Direct::new(lab, &ours)?];
    println!(
        "\n| a container without a GPU | runc | stasis-runc, which executes runc | more, ms |"
    );
    println!("|---|---|---|---|");
    let row = |what: &str, measure: fn(&Direct) -> Result<f64>| -> Result<()> {
        let found = in_turn(&sides, what, DIRECT, measure)?;
        let more = median(&found[1]) - median(&found[0]);
        println!("| {what} | {} | {} | {more:.1} |", shown(&found[0]), shown(&found[1]));
        Ok(())
    };
    row("`create`, `start`, `delete --force`, ms", Direct::life)?;
    row("`checkpoint --leave-running`, ms", Direct::checkpoint)?;
    row("`restore --detach`, ms", Direct::restore)
}

/// Bundles for one of the runtimes.
struct Direct {
    runtime: PathBuf,
    directory: PathBuf,
    rootfs: PathBuf,
    parent: String,
}

impl Direct {
    fn new(lab: &Lab, runtime: &Path) -> Result<Self> {
        let name = runtime.file_name().context("a name")?.to_string_lossy().into_owned();
        Ok(Self {
            runtime: runtime.to_owned(),
            directory: lab.directory().join(format!("direct-{name}")),
            rootfs: lab.directory().join("image/rootfs"),
            parent: std::env::var("LAB_ID")?,
        })
    }

    fn bundle(&self) -> Result<Bare> {
        let id = new_id();
        let count = "i=0; while :; do i=$((i+1)); echo $i >/data/n; sleep 0.1; done";
        let program = ["sh", "-c", count];
        Bare::new(&self.directory.join(&id), &id, &self.parent, &self.rootfs, &program)
    }

    /// How long this takes.
    fn time(work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed().as_secs_f64() * 1000.0)
    }

    fn running(&self) -> Result<Bare> {
        let mut bundle = self.bundle()?;
        bundle.create(&self.runtime)?;
        bundle.start(&self.runtime)?;
        Ok(bundle)
    }

    fn life(&self) -> Result<f64> {
        let mut bundle = self.bundle()?;
        Self::time(|| {
            bundle.create(&self.runtime)?;
            bundle.start(&self.runtime)?;
            bundle.delete(&self.runtime)
        })
    }

    fn checkpoint(&self) -> Result<f64> {
        let bundle = self.running()?;
        let mut checkpoint = bundle.checkpoint(&self.runtime, "image", &["--leave-running"]);
        let time = Self::time(|| command::succeed(&mut checkpoint, LIMIT).map(drop))?;
        bundle.delete(&self.runtime)?;
        Ok(time)
    }

    fn restore(&self) -> Result<f64> {
        let mut bundle = self.running()?;
        command::succeed(&mut bundle.checkpoint(&self.runtime, "image", &[]), LIMIT)?;
        bundle.delete(&self.runtime)?;
        let time = Self::time(|| bundle.restore(&self.runtime, "image"))?;
        bundle.delete(&self.runtime)?;
        Ok(time)
    }
}

/// The machine and the versions, for people who read the numbers later.
fn machine(lab: &Lab) -> Result<String> {
    let first = |program: &str| -> Result<String> {
        let text = command::succeed(Command::new(program).arg("--version"), LIMIT)?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    };
    let memory = fs::read_to_string("/proc/meminfo")?;
    let memory = memory.lines().next().and_then(|line| line.split_whitespace().nth(1));
    let memory: u64 = memory.context("/proc/meminfo")?.parse()?;
    let profile = lab.binaries().file_name().unwrap_or_default().to_string_lossy();
    Ok(format!(
        "{} cores, {} GiB, Linux {}; {}; {}; {}; built as {profile}. Median (smallest to largest), \
         n; both in turn.",
        thread::available_parallelism()?,
        memory >> 20,
        fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
        first("containerd")?,
        first("runc")?,
        first("criu")?,
    ))
}

/// One of the two that are compared.
struct Side {
    number: usize,
    site: Arc<Site>,
    directory: PathBuf,
}

impl Side {
    fn new(lab: &Lab, kind: Kind) -> Result<Self> {
        let site = lab.site(kind)?;
        let number = usize::from(kind == Kind::Ours);
        let directory = lab.directory().join(format!("bench-{number}"));
        let runtime = directory.join("runtime");
        fs::create_dir_all(&runtime)?;
        fs::create_dir_all(directory.join("gpu"))?;
        let shown = directory.display();
        // All else as where there is no configuration: runc is that of PATH.
        let places =
            format!("[state]\ndirectory = \"{shown}/state\"\n[log]\ndirectory = \"{shown}/log\"\n");
        fs::write(runtime.join("config.toml"), places)?;
        site.serve(&directory)?;
        Ok(Self { number, site, directory })
    }

    /// How many milliseconds a `ctr` command takes.
    fn time(&self, arguments: &[&str]) -> Result<f64> {
        let mut command = self.site.ctr().command(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let start = Instant::now();
        let status = command.status()?;
        let time = start.elapsed();
        ensure!(status.success(), "{command:?}: {status}");
        Ok(time.as_secs_f64() * 1000.0)
    }

    fn run(&self, id: &str, flags: &[&str], program: &[&str]) -> Result<f64> {
        self.time(&[&["run"], flags, &[image::NAME, id], program].concat())
    }

    fn start(&self, program: &[&str], flags: &[&str]) -> Result<String> {
        let id = new_id();
        self.run(&id, &[&["--detach"], flags].concat(), program)?;
        Ok(id)
    }

    fn remove(&self, id: &str) -> Result<()> {
        self.site.ctr().remove_task(id)?;
        self.site.ctr().remove_container(id)
    }

    /// The proportional set size of all shims, once it stays as it is.
    fn memory(&self, containers: usize, grouped: bool) -> Result<f64> {
        let group = ["--annotation", "io.containerd.runc.v2.group=bench"];
        let flags = if grouped { &group[..] } else { &[] };
        let ids: Vec<String> =
            (0..containers).map(|_| self.start(IDLE, flags)).collect::<Result<_>>()?;
        let shims = self.site.containerd().shims();
        let expected = if grouped { 1 } else { containers };
        ensure!(shims.len() == expected, "{} shims", shims.len());
        let mut last = 0;
        let all = wait::until("memory that stays as it is", LIMIT, || {
            let now = shims.iter().map(|&shim| pss(shim)).sum::<Result<u64>>()?;
            let same = now == last;
            last = now;
            if !same {
                thread::sleep(Duration::from_millis(500));
            }
            Ok(same.then_some(now))
        })?;
        for id in ids {
            self.remove(&id)?;
        }
        self.site.expect_no_shims()?;
        Ok(float(all))
    }

    fn run_to_end(&self, flags: &[&str]) -> Result<f64> {
        self.run(&new_id(), &[&["--rm"], flags].concat(), &["true"])
    }

    fn life(&self) -> Result<f64> {
        let start = Instant::now();
        let id = self.start(IDLE, &["--null-io"])?;
        self.time(&["tasks", "kill", "--signal", "SIGKILL", &id])?;
        // Not to be had by an event without another client that costs time.
        while self.site.ctr().status(&id)? != Status::Stopped {}
        let mut remove = self.site.ctr().command(["tasks", "rm", &id]);
        remove.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        let time = start.elapsed();
        self.site.ctr().remove_container(&id)?;
        Ok(time.as_secs_f64() * 1000.0)
    }

    fn checkpoint(&self, id: &str) -> Result<f64> {
        let image = self.directory.join("image");
        let shown = image.display().to_string();
        let time = self.time(&["tasks", "checkpoint", "--image-path", &shown, id])?;
        fs::remove_dir_all(&image)?;
        Ok(time)
    }

    fn throughput(&self) -> Result<f64> {
        let mut run = vec!["run", "--rm", image::NAME];
        let id = new_id();
        run.push(&id);
        run.extend(GIBIBYTE);
        let mut command = self.site.ctr().command(&run);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let start = Instant::now();
        let status = command.status()?;
        ensure!(status.success(), "{command:?}: {status}");
        Ok(1024.0 / start.elapsed().as_secs_f64())
    }

    fn size(&self) -> Result<f64> {
        let program = match self.number {
            0 => Path::new("/usr/bin/containerd-shim-runc-v2").to_owned(),
            _ => self.site.directory().join("bin/containerd-shim-runc-v2"),
        };
        Ok(float(fs::metadata(program)?.len() / 1000))
    }
}

/// A name that no container had.
fn new_id() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    format!("bench-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn pss(pid: Pid) -> Result<u64> {
    let rollup = processes::read(pid, "smaps_rollup");
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    Ok(kilobytes.with_context(|| format!("{pid} has no memory"))?.parse()?)
}

/// Numbers of this size lose nothing.
#[allow(clippy::cast_precision_loss)]
fn float(number: u64) -> f64 {
    number as f64
}

fn both<T>(sides: &[Side; 2], work: impl Fn(&Side) -> Result<T>) -> Result<Vec<T>> {
    sides.iter().map(work).collect()
}

/// Measures on both sides in turn; gives the numbers of each, sorted.
fn in_turn<S>(
    sides: &[S; 2],
    what: &str,
    times: usize,
    measure: impl Fn(&S) -> Result<f64>,
) -> Result<[Vec<f64>; 2]> {
    let mut found = [Vec::new(), Vec::new()];
    for round in 0..times {
        // Neither is always the first.
        for turn in [round % 2, 1 - round % 2] {
            let number = measure(&sides[turn]).with_context(|| what.to_owned())?;
            found[turn].push(number);
        }
    }
    for numbers in &mut found {
        numbers.sort_by(f64::total_cmp);
    }
    Ok(found)
}

fn median(numbers: &[f64]) -> f64 {
    numbers[numbers.len() / 2]
}

fn shown(numbers: &[f64]) -> String {
    match numbers {
        [only] => format!("{only:.0}"),
        _ => format!(
            "**{:.1}** ({:.1} to {:.1}), {}",
            median(numbers),
            numbers[0],
            numbers[numbers.len() - 1],
            numbers.len()
        ),
    }
}

/// Measures on both sides, and prints a row.
fn compare(
    sides: &[Side; 2],
    what: &str,
    times: usize,
    measure: impl Fn(&Side) -> Result<f64>,
) -> Result<()> {
    let found = in_turn(sides, what, times, measure)?;
    let ratio = median(&found[1]) / median(&found[0]);
    println!("| {what} | {} | {} | {ratio:.2} |", shown(&found[0]), shown(&found[1]));
    Ok(())
}
