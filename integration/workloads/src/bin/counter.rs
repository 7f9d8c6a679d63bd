//! A counter in GPU memory, asked by UDP.
//!
//! Each datagram launches `increment` and is answered with the new count, from 101
//! on; the datagram `state` with the count as it is. See `HELP` for the options.

use std::net::UdpSocket;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use lexopt::prelude::*;
use stasis_workloads::DEVICE;
use stasis_workloads::cuda::{Error, Gpu, Pattern};
use stasis_workloads::ticker::{Event, Log, Ticker};

const HELP: &str = "counter [options]
  --port N          UDP port (10000), 0 for none
  --bind ADDRESS    address (0.0.0.0)
  --pattern-mib N   N MiB of GPU memory that each count verifies
  --log FILE        append each count to FILE
  --stdout          print each count
  --tick MS         count by itself as well
  --spin MS         at each tick first run a kernel of that length
  --managed         allocate managed memory
  --late MS         start CUDA that long after the start
  --ready FILE      create FILE when CUDA works and the port is bound
  --device N        which GPU (0)
  --hold-device     no CUDA: only keep the device node open; ticks and datagrams count on the CPU
  --device-node PATH  the node that --hold-device opens (/dev/nvidia0)";

struct Options {
    port: u16,
    bind: String,
    pattern_mib: usize,
    log: Option<PathBuf>,
    stdout: bool,
    tick: Option<Duration>,
    spin: u64,
    managed: bool,
    late: Duration,
    ready: Option<PathBuf>,
    device: usize,
    hold_device: bool,
    device_node: PathBuf,
}

impl Options {
    fn parse() -> anyhow::Result<Self> {
        let mut options = Self {
            port: 10000,
            bind: "0.0.0.0".into(),
            pattern_mib: 0,
            log: None,
            stdout: false,
            tick: None,
            spin: 0,
            managed: false,
            late: Duration::ZERO,
            ready: None,
            device: 0,
            hold_device: false,
            device_node: DEVICE.into(),
        };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Long("port") => options.port = parser.value()?.parse()?,
                Long("bind") => options.bind = parser.value()?.string()?,
                Long("pattern-mib") => options.pattern_mib = parser.value()?.parse()?,
                Long("log") => options.log = Some(parser.value()?.into()),
                Long("stdout") => options.stdout = true,
                Long("tick") => {
                    options.tick = Some(Duration::from_millis(parser.value()?.parse()?));
                }
                Long("spin") => options.spin = parser.value()?.parse()?,
                Long("managed") => options.managed = true,
                Long("late") => options.late = Duration::from_millis(parser.value()?.parse()?),
                Long("ready") => options.ready = Some(parser.value()?.into()),
                Long("device") => options.device = parser.value()?.parse()?,
                Long("hold-device") => options.hold_device = true,
                Long("device-node") => options.device_node = parser.value()?.into(),
                Long("help") => {
                    println!("{HELP}");
                    std::process::exit(0);
                }
                other => return Err(other.unexpected()).context(HELP),
            }
        }
        Ok(options)
    }
}

/// What counts.
enum Counter {
    Gpu { gpu: Box<Gpu>, pattern: Option<Pattern>, spin: u64 },
    Cpu { count: u32, _device: std::fs::File },
}

impl Counter {
    fn start(options: &Options) -> anyhow::Result<Self> {
        if options.hold_device {
            let node = &options.device_node;
            let device = std::fs::OpenOptions::new().read(true).write(true).open(node);
            let device = device.with_context(|| format!("open {}", node.display()))?;
            return Ok(Self::Cpu { count: 100, _device: device });
        }
        thread::sleep(options.late);
        let gpu = Box::new(Gpu::start(options.device)?);
        if options.managed {
            gpu.allocate_managed(1 << 20)?;
        }
        let pattern = match options.pattern_mib {
            0 => None,
            mib => Some(gpu.pattern(mib)?),
        };
        Ok(Self::Gpu { gpu, pattern, spin: options.spin })
    }

    fn tick(&mut self) -> Result<String, Error> {
        if let Self::Gpu { gpu, spin: spin @ 1.., .. } = self {
            gpu.launch_spin(*spin)?;
            gpu.synchronize()?;
        }
        self.increment()
    }

    fn increment(&mut self) -> Result<String, Error> {
        match self {
            Self::Gpu { gpu, pattern, .. } => {
                let count = gpu.increment()?;
                let wrong = pattern.as_ref().map_or(Ok(0), |pattern| gpu.mismatches(pattern))?;
                Ok(match wrong {
                    0 => count.to_string(),
                    _ => format!("MISMATCH {wrong} words at count {count}"),
                })
            }
            Self::Cpu { count, .. } => {
                *count += 1;
                Ok(count.to_string())
            }
        }
    }

    fn count(&self) -> Result<String, Error> {
        match self {
            Self::Gpu { gpu, .. } => gpu.count().map(|count| count.to_string()),
            Self::Cpu { count, .. } => Ok(count.to_string()),
        }
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse()?;
    let bind = || UdpSocket::bind((options.bind.as_str(), options.port));
    let socket = (options.port != 0).then(bind).transpose();
    let socket = socket.with_context(|| format!("bind {}:{}", options.bind, options.port))?;
    let mut log = Log::new(options.log.as_deref(), options.stdout)?;
    let mut counter = Counter::start(&options)?;
    if let Some(ready) = &options.ready {
        std::fs::write(ready, "ready\n")?;
    }
    let mut ticker = Ticker::new(socket, options.tick);
    loop {
        // A failed CUDA call is an answer like any other: the program lives on.
        let text = |result: Result<String, Error>| result.unwrap_or_else(|error| error.to_string());
        match ticker.wait()? {
            Event::Tick => log.line(&text(counter.tick()))?,
            Event::Datagram(word, from) if word == "state" => {
                ticker.answer(&text(counter.count()), from);
            }
            Event::Datagram(_, from) => {
                let count = text(counter.increment());
                log.line(&count)?;
                ticker.answer(&count, from);
            }
        }
    }
}
