//! Several processes with a CUDA context each that wait for each other at every
//! step, as ranks with NCCL do, or that do not (`--independent`).

use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, bail};
use lexopt::prelude::*;
use stasis_workloads::cuda::{DeviceFlags, Error, Gpu};
use stasis_workloads::shared::SharedFlags;
use stasis_workloads::ticker::{Event, Log, Ticker};

const HELP: &str = "ranks N [options]
  --tick MS       pause between steps (10)
  --log PREFIX    rank I appends each step to PREFIX.I
  --port N        UDP port of rank 0 (10000); with --independent rank I has N+I; 0 for none
  --shared FILE   the file of the flags (/dev/shm/stasis-ranks)
  --independent   no rank waits for another
  --ready PREFIX  rank I creates PREFIX.I after its first step";

#[derive(Clone)]
struct Options {
    ranks: u32,
    rank: Option<u32>,
    tick: u64,
    log: Option<PathBuf>,
    port: u16,
    shared: PathBuf,
    independent: bool,
    ready: Option<PathBuf>,
}

impl Options {
    fn parse() -> anyhow::Result<Self> {
        let mut options = Self {
            ranks: 0,
            rank: None,
            tick: 10,
            log: None,
            port: 10000,
            shared: "/dev/shm/stasis-ranks".into(),
            independent: false,
            ready: None,
        };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Value(ranks) => options.ranks = ranks.parse()?,
                Long("rank") => options.rank = Some(parser.value()?.parse()?),
                Long("tick") => options.tick = parser.value()?.parse()?,
                Long("log") => options.log = Some(parser.value()?.into()),
                Long("port") => options.port = parser.value()?.parse()?,
                Long("shared") => options.shared = parser.value()?.into(),
                Long("independent") => options.independent = true,
                Long("ready") => options.ready = Some(parser.value()?.into()),
                Long("help") => {
                    println!("{HELP}");
                    std::process::exit(0);
                }
                other => return Err(other.unexpected()).context(HELP),
            }
        }
        if !(1..=64).contains(&options.ranks) {
            bail!("N must be 1 to 64\n{HELP}");
        }
        Ok(options)
    }
}

/// Starts the ranks and waits for them; it has no CUDA itself.
fn parent(options: &Options) -> anyhow::Result<()> {
    SharedFlags::create(&options.shared)
        .with_context(|| format!("create {}", options.shared.display()))?;
    let program = std::env::current_exe()?;
    let mut children = Vec::new();
    for rank in 0..options.ranks {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).arg("--rank").arg(rank.to_string());
        children.push(command.spawn()?);
    }
    let ended: std::io::Result<Vec<_>> = children.iter_mut().map(Child::wait).collect();
    bail!("the ranks ended: {ended:?}");
}

/// One rank.
struct Rank {
    gpu: Gpu,
    number: u32,
    ranks: u32,
    /// Without flags it waits for nobody.
    flags: Option<DeviceFlags>,
    step: u32,
}

impl Rank {
    /// One step, together with the others. The counter in device memory must say
    /// how many there were.
    fn step(&mut self) -> Result<String, Error> {
        let next = self.step + 1;
        if let Some(flags) = self.flags {
            self.gpu.rendezvous(flags, self.number, self.ranks, next)?;
        }
        let count = self.gpu.increment()?;
        self.step = next;
        Ok(if count == 100 + next {
            next.to_string()
        } else {
            format!("MISMATCH count {count} at step {next}")
        })
    }
}

fn rank(options: &Options, rank: u32) -> anyhow::Result<()> {
    // The parent is the job: when it goes, so do its ranks.
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    let suffixed = |path: &PathBuf| PathBuf::from(format!("{}.{rank}", path.display()));
    let port = options.port + if options.independent { u16::try_from(rank)? } else { 0 };
    let has_port = options.port != 0 && (rank == 0 || options.independent);
    let socket = has_port.then(|| UdpSocket::bind(("0.0.0.0", port))).transpose()?;
    let mut log = Log::new(options.log.as_ref().map(suffixed).as_deref(), false)?;
    let gpu = Gpu::start(rank as usize)?;
    let flags = if options.independent {
        None
    } else {
        Some(gpu.share(&SharedFlags::open(&options.shared)?)?)
    };
    let mut rank = Rank { gpu, number: rank, ranks: options.ranks, flags, step: 0 };
    let mut ticker = Ticker::new(socket, Some(Duration::from_millis(options.tick.max(1))));
    let mut last = "0".to_owned();
    loop {
        match ticker.wait()? {
            Event::Tick => {
                last = rank.step().unwrap_or_else(|error| error.to_string());
                log.line(&last)?;
                if let (1, Some(ready)) = (rank.step, &options.ready) {
                    std::fs::write(suffixed(ready), "ready\n")?;
                }
            }
            Event::Datagram(_, from) => ticker.answer(&last, from),
        }
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse()?;
    match options.rank {
        Some(number) => rank(&options, number),
        None => parent(&options),
    }
}
