//! Taking a thread back from in front of a system call, so that it makes the call when it runs
//! again and not when it is let go.
//!
//! The call's number is replaced by one that does not exist, the thread goes through it, and then
//! its program counter is put back onto the instruction with the number in its place, as the
//! kernel itself does for a call that it restarts.

use nix::errno::Errno;

use crate::processes::Pid;
use crate::sys;

/// Whether this architecture's registers are known here. Where they are not, no thread is guided.
pub(super) const POSSIBLE: bool = cfg!(target_arch = "x86_64");

/// The length of `syscall` and of `int 0x80`.
#[cfg(target_arch = "x86_64")]
const INSTRUCTION: u64 = 2;

/// In front of the call: makes it one that does nothing, and goes on to behind it.
#[cfg(target_arch = "x86_64")]
pub(super) fn begin(tid: Pid) -> Result<(), Errno> {
    let pid = nix::unistd::Pid::from_raw(tid);
    let mut registers = nix::sys::ptrace::getregs(pid)?;
    registers.orig_rax = u64::MAX;
    nix::sys::ptrace::setregs(pid, registers)?;
    sys::run_to_system_call(tid)
}

/// Behind it: back to the instruction of call `number`.
#[cfg(target_arch = "x86_64")]
pub(super) fn finish(tid: Pid, number: i64) -> Result<(), Errno> {
    let pid = nix::unistd::Pid::from_raw(tid);
    let mut registers = nix::sys::ptrace::getregs(pid)?;
    registers.rax = number.cast_unsigned();
    registers.rip -= INSTRUCTION;
    nix::sys::ptrace::setregs(pid, registers)
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn begin(_: Pid) -> Result<(), Errno> {
    Err(Errno::ENOSYS)
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn finish(_: Pid, _: i64) -> Result<(), Errno> {
    Err(Errno::ENOSYS)
}
