//! System calls that nix offers no safe form of. The only module with `unsafe` besides
//! `cuda::ffi`.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::Signal;

use crate::hold::inside::SystemCall;
use crate::processes::Pid;

/// Ends this process without running exit handlers of loaded libraries.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: `_exit` takes no pointer and does not return.
    unsafe { libc::_exit(status) }
}

/// Sets a variable of this process's environment, before it has begun any thread.
pub(crate) fn set_variable(name: &str, value: &str) {
    // SAFETY: the caller is the helper on its way to load the driver: its only thread.
    unsafe { std::env::set_var(name, value) }
}

/// `kill`. Not nix's, which knows no real-time signals.
pub fn send_signal(pid: Pid, signal: i32) -> Result<(), Errno> {
    // SAFETY: `kill` takes two numbers.
    let result = unsafe { libc::kill(pid, signal) };
    if result == -1 { Err(Errno::last()) } else { Ok(()) }
}

/// Makes `command` start with nothing open but its standard descriptors.
pub(crate) fn close_other_descriptors(command: &mut Command) {
    // SAFETY: the closure runs between fork and exec and makes one system call, which is
    // async-signal-safe. Marking instead of closing keeps the pipe by which std reports a failing
    // exec.
    unsafe {
        command.pre_exec(|| {
            let flags = libc::CLOSE_RANGE_CLOEXEC;
            match libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, flags) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
}

/// Makes the kernel send `signal` to the child when the thread that starts it ends.
pub fn die_with_parent_thread(command: &mut Command, signal: Signal) {
    let parent = nix::unistd::getpid();
    // SAFETY: the closure runs between fork and exec and makes system calls only, which are
    // async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            nix::sys::prctl::set_pdeathsig(signal)?;
            // The parent may have ended before the line above.
            if nix::unistd::getppid() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
        });
    }
}

/// Makes `command` run in another network namespace.
pub(crate) fn enter_network(command: &mut Command, namespace: std::fs::File) {
    // SAFETY: the closure runs between fork and exec and makes one system call, which is
    // async-signal-safe, on a descriptor that it owns.
    unsafe {
        command.pre_exec(move || {
            Ok(nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWNET)?)
        });
    }
}

/// `PTRACE_SEIZE`, then [`interrupt`].
pub(crate) fn seize(tid: Pid) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SEIZE, tid, i64::from(libc::PTRACE_O_TRACESYSGOOD))?;
    interrupt(tid)
}

/// `PTRACE_INTERRUPT`: the thread stops at its next return to user mode.
pub(crate) fn interrupt(tid: Pid) -> Result<(), Errno> {
    ptrace(libc::PTRACE_INTERRUPT, tid, 0)
}

/// `PTRACE_SYSCALL`: the stopped thread runs until it enters or leaves a system call.
pub(crate) fn run_to_system_call(tid: Pid) -> Result<(), Errno> {
    ptrace(libc::PTRACE_SYSCALL, tid, 0)
}

/// The system call in front of which a thread is stopped; `None` behind one.
pub(crate) fn entered_system_call(tid: Pid) -> Result<Option<SystemCall>, Errno> {
    let info = nix::sys::ptrace::syscall_info(nix::unistd::Pid::from_raw(tid))?;
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return Ok(None);
    }
    // SAFETY: `op` says that the kernel filled in this member of the union.
    let entry = unsafe { info.u.entry };
    Ok(Some(SystemCall { number: entry.nr.cast_signed(), arguments: entry.args }))
}

/// `PTRACE_DETACH`, delivering `signal` (0: none). Only for a stopped thread.
///
/// Not nix's: that cannot pass on real-time signals, which libc uses for itself.
pub(crate) fn detach(tid: Pid, signal: i32) -> Result<(), Errno> {
    ptrace(libc::PTRACE_DETACH, tid, i64::from(signal))
}

fn ptrace(request: libc::c_uint, tid: Pid, data: i64) -> Result<(), Errno> {
    // SAFETY: none of the requests used here (seize, interrupt, syscall, detach) reads or writes memory of
    // this process: address is unused and data is a number.
    let result = unsafe { libc::ptrace(request, tid, 0_usize, data) };
    if result == -1 { Err(Errno::last()) } else { Ok(()) }
}

/// How `PTRACE_O_TRACESYSGOOD` marks a stop at a system call.
const SYSTEM_CALL: i32 = libc::SIGTRAP | 0x80;

/// What `waitpid` said of a traced thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waited {
    /// No news.
    Nothing,
    /// The thread is in a ptrace stop.
    Stopped {
        /// Whose.
        tid: Pid,
        /// The signal whose delivery was stopped; 0 for the stop that was asked for.
        signal: i32,
    },
    /// The thread is in front of a system call, or behind one.
    SystemCall(Pid),
    /// The thread has ended.
    Gone(Pid),
}

/// `waitpid(-1, __WALL | WNOHANG)`, by raw status: nix refuses statuses with real-time signals.
pub(crate) fn wait_for_traced() -> Result<Waited, Errno> {
    let mut status = 0;
    // SAFETY: the pointer is to a live c_int.
    let tid = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL | libc::WNOHANG) };
    match tid {
        -1 => Err(Errno::last()),
        0 => Ok(Waited::Nothing),
        tid if libc::WIFSTOPPED(status) => {
            // A stop that was asked for, or a group stop, has an event in the upper half.
            let event = status >> 16;
            match libc::WSTOPSIG(status) {
                _ if event != 0 => Ok(Waited::Stopped { tid, signal: 0 }),
                SYSTEM_CALL => Ok(Waited::SystemCall(tid)),
                signal => Ok(Waited::Stopped { tid, signal }),
            }
        }
        tid => Ok(Waited::Gone(tid)),
    }
}
