//! The tracer process: seizes threads, waits for their stops, detaches.
//!
//! Single-threaded, because only the thread that seized may do anything with a tracee. A stop that
//! was asked for (`PTRACE_INTERRUPT`) is to the program like a pause of its cgroup: the kernel
//! restarts most interrupted system calls, and a few (`epoll_wait`, `sigtimedwait`, a receive with a
//! timeout) return EINTR. A thread that was stopped in front of a signal's delivery gets that
//! signal when it is let go.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, StdinLock, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use super::{Keep, Target, inside, rewind};
use crate::container::Cgroup;
use crate::freezer::Freezer;
use crate::processes::Pid;
use crate::sys::{self, Waited};

/// What the client asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    Hold {
        targets: Vec<Target>,
        /// What to freeze if the client is lost while threads are held: the container was frozen,
        /// and nobody has asked for anything else.
        freeze_if_lost: Option<Cgroup>,
    },
    Settle {
        milliseconds: u64,
    },
}

/// The answer to each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reply {
    Done,
    Refused { pid: Pid, tid: Pid, reason: String },
    Pending { tid: Pid, state: String },
}

/// Serves until the client closes the pipe; then the kernel lets all threads go.
///
/// It does not die with its parent: a paused container whose checkpoint was killed would run on.
#[must_use]
pub fn serve() -> ExitCode {
    let mut held = Held::default();
    let mut input = io::stdin().lock();
    let mut line = String::new();
    loop {
        // A traced process that is killed becomes a zombie for its parent, the shim, only when its
        // tracer has taken note: so this does all the time, not only when asked something.
        while !readable(&input, held.is_guiding()) {
            held.take_news();
        }
        line.clear();
        match input.read_line(&mut line) {
            Ok(1..) => {}
            Ok(0) | Err(_) => return held.lost(),
        }
        let reply = match serde_json::from_str(&line) {
            Ok(Request::Hold { targets, freeze_if_lost }) => {
                held.freeze_if_lost = freeze_if_lost.filter(|_| !targets.is_empty());
                held.hold(targets)
            }
            Ok(Request::Settle { milliseconds }) => {
                held.settle(Duration::from_millis(milliseconds))
            }
            Err(error) => {
                eprintln!("request not understood: {error}");
                return ExitCode::FAILURE;
            }
        };
        let Ok(mut answer) = serde_json::to_vec(&reply) else { return ExitCode::FAILURE };
        answer.push(b'\n');
        let mut output = io::stdout().lock();
        if output.write_all(&answer).and_then(|()| output.flush()).is_err() {
            return held.lost();
        }
    }
}

/// Whether the client has said something, or gone. Waits a little. One request is under way at a
/// time, so none hides in the reader's buffer. `busy`: threads wait for this process at each of
/// their system calls.
fn readable(input: &StdinLock<'_>, busy: bool) -> bool {
    const WAIT: u16 = 20;
    if busy {
        std::thread::sleep(POLL);
    }
    let wait = if busy { 0 } else { WAIT };
    let mut descriptors = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
    !matches!(poll(&mut descriptors, PollTimeout::from(wait)), Ok(0) | Err(Errno::EINTR))
}

/// Between two looks at threads that are about to stop.
const POLL: Duration = Duration::from_micros(200);

/// How far a seized thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thread {
    /// Asked to stop.
    Asked,
    /// Running, with a stop at each system call.
    Guided,
    /// On its way back to in front of the system call with this number.
    Rewinding { number: i64 },
    /// In a ptrace stop; `signal` is to be delivered when it is let go, 0 for none.
    Stopped { signal: i32 },
}

#[derive(Debug, Default)]
struct Held {
    targets: Vec<Target>,
    threads: BTreeMap<Pid, Thread>,
    freeze_if_lost: Option<Cgroup>,
}

impl Held {
    fn frozen(&self) -> bool {
        self.freeze_if_lost.as_ref().is_some_and(|cgroup| cgroup.frozen().unwrap_or(true))
    }

    /// The client is gone. With this process the holds end.
    fn lost(&self) -> ExitCode {
        if let Some(cgroup) = &self.freeze_if_lost
            && cgroup.freeze().is_err()
        {
            return ExitCode::FAILURE;
        }
        ExitCode::SUCCESS
    }

    fn hold(&mut self, targets: Vec<Target>) -> Reply {
        self.targets = targets;
        if let Err(reply) = self.seize_new() {
            return reply;
        }
        let wanted: Vec<(Pid, bool)> = self
            .targets
            .iter()
            .flat_map(|target| {
                let guided = matches!(target.keep, Keep::InsideCalls(_)) && rewind::POSSIBLE;
                threads_to_hold(target).into_iter().map(move |(_, tid)| (tid, guided))
            })
            .collect();
        for (tid, thread) in &mut self.threads {
            let guided = wanted.iter().any(|(wanted, guided)| wanted == tid && *guided);
            match thread {
                // ESRCH, here and below: it was killed.
                Thread::Stopped { signal: 0 }
                    if guided && sys::run_to_system_call(*tid).is_ok() =>
                {
                    *thread = Thread::Guided;
                }
                Thread::Guided if !guided && sys::interrupt(*tid).is_ok() => {
                    *thread = Thread::Asked;
                }
                _ => {}
            }
        }
        let unwanted: Vec<Pid> = self
            .threads
            .keys()
            .copied()
            .filter(|tid| !wanted.iter().any(|(wanted, _)| wanted == tid))
            .collect();
        self.let_go(&unwanted)
    }

    /// Whether threads run from system call to system call.
    fn is_guiding(&self) -> bool {
        self.threads
            .values()
            .any(|thread| matches!(thread, Thread::Guided | Thread::Rewinding { .. }))
    }

    /// Stops what is not yet stopped. A thread that is not held can start new ones until it stops,
    /// so this goes on until a look finds none.
    fn settle(&mut self, limit: Duration) -> Reply {
        let deadline = Instant::now() + limit;
        loop {
            if let Err(reply) = self.wait_for_stops(deadline) {
                return reply;
            }
            match self.seize_new() {
                Ok(0) => return Reply::Done,
                Ok(_) => {}
                Err(reply) => return reply,
            }
        }
    }

    fn seize_new(&mut self) -> Result<usize, Reply> {
        let mut new = 0;
        let frozen = self.frozen();
        for (pid, tid) in self.targets.iter().flat_map(threads_to_hold).collect::<Vec<_>>() {
            // Seizing a stopped thread waits for it, and in a frozen cgroup for ever. It is seized
            // after the thaw.
            if self.threads.contains_key(&tid) || (frozen && state_of(tid).starts_with('T')) {
                continue;
            }
            match sys::seize(tid) {
                Ok(()) => {
                    self.threads.insert(tid, Thread::Asked);
                    new += 1;
                }
                // It has ended meanwhile, or is a zombie.
                Err(Errno::ESRCH) => {}
                Err(Errno::EPERM) if is_dead(pid, tid) => {}
                Err(error) => {
                    let reason = match tracer_of(tid) {
                        Some(other) => format!("{error}; it is traced by pid {other}"),
                        None => error.to_string(),
                    };
                    return Err(Reply::Refused { pid, tid, reason });
                }
            }
        }
        Ok(new)
    }

    fn wait_for_stops(&mut self, deadline: Instant) -> Result<(), Reply> {
        loop {
            self.take_news();
            let asked = self.threads.iter().find(|(tid, thread)| {
                matches!(thread, Thread::Asked | Thread::Rewinding { .. })
                    && !waits_for_child(**tid)
            });
            let Some((&tid, _)) = asked else {
                return Ok(());
            };
            if Instant::now() >= deadline {
                return Err(Reply::Pending { tid, state: state_of(tid) });
            }
            std::thread::sleep(POLL);
        }
    }

    fn take_news(&mut self) {
        loop {
            match sys::wait_for_traced() {
                Ok(Waited::Stopped { tid, signal }) => {
                    self.threads.insert(tid, Thread::Stopped { signal });
                }
                Ok(Waited::SystemCall(tid)) => {
                    if let Some(thread) = self.threads.get_mut(&tid) {
                        at_system_call(tid, thread);
                    }
                }
                Ok(Waited::Gone(tid)) => {
                    self.threads.remove(&tid);
                }
                Ok(Waited::Nothing) => return,
                Err(Errno::EINTR) => {}
                // ECHILD: no thread is left.
                Err(_) => {
                    self.threads.clear();
                    return;
                }
            }
        }
    }

    fn let_go(&mut self, tids: &[Pid]) -> Reply {
        // One that was running until now comes to its stop in a moment.
        let deadline = Instant::now() + Duration::from_secs(1);
        let coming = |held: &Self| {
            tids.iter().any(|tid| {
                matches!(held.threads.get(tid), Some(Thread::Asked | Thread::Rewinding { .. }))
            })
        };
        self.take_news();
        while coming(self) && !self.frozen() && Instant::now() < deadline {
            std::thread::sleep(POLL);
            self.take_news();
        }
        for tid in tids {
            match self.threads.get(tid) {
                Some(Thread::Stopped { signal }) => {
                    // ESRCH: it was killed while it was held.
                    let _ = sys::detach(*tid, *signal);
                    self.threads.remove(tid);
                }
                // Only a stopped thread can be detached. The client ends this process instead.
                Some(Thread::Asked | Thread::Guided | Thread::Rewinding { .. }) => {
                    return Reply::Pending { tid: *tid, state: state_of(*tid) };
                }
                None => {}
            }
        }
        Reply::Done
    }
}

/// A thread is in front of a system call, or behind one.
fn at_system_call(tid: Pid, thread: &mut Thread) {
    let next = match (*thread, sys::entered_system_call(tid)) {
        (Thread::Rewinding { number }, _) => {
            rewind::finish(tid, number).map(|()| Thread::Stopped { signal: 0 })
        }
        (Thread::Guided, Ok(Some(call))) if inside::may_run(tid, &call) => {
            sys::run_to_system_call(tid).map(|()| Thread::Guided)
        }
        (Thread::Guided, Ok(None)) => sys::run_to_system_call(tid).map(|()| Thread::Guided),
        // It must not be made, or not now: a thread that is let go in front of a system call
        // makes it, also in a frozen cgroup.
        (_, Ok(Some(call))) => {
            rewind::begin(tid).map(|()| Thread::Rewinding { number: call.number })
        }
        (_, Ok(None)) => Ok(Thread::Stopped { signal: 0 }),
        (_, Err(error)) => Err(error),
    };
    // An error is ESRCH: it was killed, and the next wait says so.
    if let Ok(next) = next {
        *thread = next;
    }
}

/// Process and thread ids of what `target` wants held. Empty for a process that has ended.
fn threads_to_hold(target: &Target) -> Vec<(Pid, Pid)> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", target.pid)) else {
        return Vec::new();
    };
    tasks
        .filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&tid| match target.keep {
            Keep::None => true,
            Keep::All => false,
            Keep::RestoreThread(kept) => tid != kept,
            Keep::Driver(kept) | Keep::InsideCalls(kept) => {
                tid != kept && !is_driver_thread(target.pid, tid)
            }
        })
        .map(|tid| (target.pid, tid))
        .collect()
}

fn is_driver_thread(pid: Pid, tid: Pid) -> bool {
    // A main thread keeps the program's name, which may begin in any way.
    pid != tid
        && fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm"))
            .is_ok_and(|name| super::is_drivers_name(name.trim_end()))
}

fn status_field(tid: Pid, field: &str) -> Option<String> {
    let status = fs::read(format!("/proc/{tid}/status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(value.trim().to_owned())
}

fn tracer_of(tid: Pid) -> Option<Pid> {
    status_field(tid, "TracerPid")?.parse().ok().filter(|&pid| pid != 0)
}

fn state_of(tid: Pid) -> String {
    status_field(tid, "State").unwrap_or_else(|| "unknown".to_owned())
}

/// Whether a thread stands inside vfork: it comes out when its child, which is held too, has
/// executed a program or ended, so it stands as if it were held.
fn waits_for_child(tid: Pid) -> bool {
    let calls = [
        #[cfg(target_arch = "x86_64")]
        nix::libc::SYS_vfork,
        nix::libc::SYS_clone,
        nix::libc::SYS_clone3,
    ];
    state_of(tid).starts_with('D')
        && fs::read_to_string(format!("/proc/{tid}/syscall")).is_ok_and(|call| {
            let number = call.split(' ').next().and_then(|number| number.parse().ok());
            number.is_some_and(|number: i64| calls.contains(&number))
        })
}

fn is_dead(pid: Pid, tid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).map_or(true, |stat| {
        stat.rsplit(')').next().is_some_and(|s| s.starts_with(" Z") || s.starts_with(" X"))
    })
}
