//! The one place that waits for children: runc's calls, loggers, and the containers' processes,
//! which become ours when runc has left them (the shim is their subreaper).

use std::collections::HashMap;
use std::io;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use rustix::process::{WaitOptions, test_kill_process, wait};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// A pid as this host sees it.
pub type Pid = i32;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Exit status, or 128 and the signal that ended it.
    pub status: u32,
    /// When it was reaped.
    pub at: SystemTime,
}

/// A time as containerd wants it.
#[must_use]
pub fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: since.subsec_nanos().cast_signed(),
        ..Timestamp::default()
    }
}

/// A started child.
#[derive(Debug)]
pub struct Spawned {
    /// Its pid.
    pub pid: Pid,
    /// For its pipes. Never waited on: the reaper does.
    pub child: Child,
    /// Gets its exit.
    pub exit: oneshot::Receiver<Exit>,
}

/// Reaps all children. A clone is the same reaper.
#[derive(Debug, Clone, Default)]
pub struct Reaper(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    waiting: HashMap<Pid, oneshot::Sender<Exit>>,
    /// How many calls of runc are under way that will leave us a process.
    expecting: usize,
    /// Exits that nobody has claimed yet: a container's process can end before runc has told its
    /// pid.
    unclaimed: HashMap<Pid, Exit>,
}

impl Reaper {
    /// Reaps from now on, in a task of the current runtime.
    pub fn start() -> io::Result<Self> {
        let reaper = Self::default();
        let mut signals = signal(SignalKind::child())?;
        let own = reaper.clone();
        tokio::spawn(async move {
            // Signals coalesce: each time until nothing is left.
            while signals.recv().await.is_some() {
                own.reap();
            }
        });
        Ok(reaper)
    }

    /// Starts a child whose exit arrives in [`Spawned::exit`].
    pub fn spawn(&self, mut command: Command) -> io::Result<Spawned> {
        // Locked over both, or its exit could be reaped before it is known.
        let mut table = self.table();
        let child = command.spawn()?;
        let pid = child.id().cast_signed();
        let (sender, exit) = oneshot::channel();
        table.waiting.insert(pid, sender);
        Ok(Spawned { pid, child, exit })
    }

    /// Before a call of runc that leaves us a process: exits that nobody waits for are kept until
    /// the result is dropped.
    #[must_use]
    pub fn expect(&self) -> Expecting {
        self.table().expecting += 1;
        Expecting(self.clone())
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap(&self) {
        let mut table = self.table();
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let signalled = || status.terminating_signal().map_or(0, |signal| 128 + signal);
            let status = status.exit_status().unwrap_or_else(signalled);
            let exit = Exit { status: status.cast_unsigned(), at: SystemTime::now() };
            let pid = pid.as_raw_nonzero().get();
            tracing::debug!(pid, status, "reaped");
            match table.waiting.remove(&pid) {
                // The receiver is gone where nobody is interested any more.
                Some(waiting) => drop(waiting.send(exit)),
                None if table.expecting > 0 => drop(table.unclaimed.insert(pid, exit)),
                // A process that a container left behind.
                None => {}
            }
        }
    }
}

/// See [`Reaper::expect`].
#[derive(Debug)]
pub struct Expecting(Reaper);

impl Expecting {
    /// The exit of a process that runc has left us, which may have come already.
    #[must_use]
    pub fn claim(&self, pid: Pid) -> oneshot::Receiver<Exit> {
        let (sender, exit) = oneshot::channel();
        let mut table = self.0.table();
        // What was reaped is not there any more: a process of that pid is a later one.
        let is_there =
            rustix::process::Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid).is_ok());
        match table.unclaimed.remove(&pid) {
            Some(gone) if !is_there => drop(sender.send(gone)),
            _ => drop(table.waiting.insert(pid, sender)),
        }
        exit
    }
}

impl Drop for Expecting {
    fn drop(&mut self) {
        let mut table = self.0.table();
        table.expecting -= 1;
        if table.expecting == 0 {
            table.unclaimed.clear();
        }
    }
}
