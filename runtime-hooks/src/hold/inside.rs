//! What a thread of a paused container may still do so that it comes out of a CUDA call.
//!
//! The driver cannot lock while a thread is inside a synchronising call, so such a thread has to
//! run on; but when the call returns, the application's own code follows. Where one ends and the
//! other begins cannot be told from outside. What can be told is every system call, and without
//! one nothing that the thread does is seen by anybody. So it runs as long as it waits, looks, or
//! speaks to the driver, and is stopped in front of anything else: writing, sending, starting
//! processes.

use std::fs;
use std::path::PathBuf;

use nix::libc;

use crate::processes::Pid;

/// A system call that a thread is about to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SystemCall {
    /// Its number.
    pub(crate) number: i64,
    /// Its arguments.
    pub(crate) arguments: [u64; 6],
}

/// Waiting, looking and the thread's own memory: nothing that is seen outside.
const HARMLESS: &[i64] = &[
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getcpu,
    libc::SYS_sched_getaffinity,
    libc::SYS_getrandom,
    libc::SYS_membarrier,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_preadv,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    // The calls that other architectures never had.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
];

/// Calls with a descriptor that may be the driver's.
const ON_DESCRIPTOR: &[i64] = &[
    libc::SYS_close,
    libc::SYS_ioctl,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_writev,
    libc::SYS_pwritev,
    libc::SYS_flock,
    libc::SYS_ftruncate,
];

/// Whether the thread may make the call.
pub(crate) fn may_run(tid: Pid, call: &SystemCall) -> bool {
    if HARMLESS.contains(&call.number) {
        return true;
    }
    if ON_DESCRIPTOR.contains(&call.number) {
        return is_drivers(tid, call.arguments[0]);
    }
    if call.number == libc::SYS_fcntl {
        return ASKING.contains(&call.arguments[1]);
    }
    let opening = match call.number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_open => Some(call.arguments[1]),
        libc::SYS_openat => Some(call.arguments[2]),
        _ => None,
    };
    // Opening makes nothing, unless it is told to; what is then written is told by the descriptor.
    opening.is_some_and(|flags| flags & OPENING_MAKES == 0)
}

/// What fcntl can be asked without changing anything.
#[allow(clippy::cast_sign_loss, reason = "names, not numbers")]
const ASKING: &[u64] = &[libc::F_GETFD as u64, libc::F_GETFL as u64];

#[allow(clippy::cast_sign_loss, reason = "flags, not numbers")]
const OPENING_MAKES: u64 =
    (libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE) as u64 & !(libc::O_DIRECTORY as u64);

/// Whether the descriptor is a device of the driver's, or an event that its threads wake each
/// other with.
fn is_drivers(tid: Pid, descriptor: u64) -> bool {
    fs::read_link(format!("/proc/{tid}/fd/{descriptor}")).is_ok_and(|path: PathBuf| {
        path.to_str()
            .is_some_and(|path| path.starts_with("/dev/nvidia") || path == "anon_inode:[eventfd]")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    fn allowed(number: i64, arguments: [u64; 6]) -> bool {
        may_run(nix::unistd::getpid().as_raw(), &SystemCall { number, arguments })
    }

    fn with(index: usize, value: i32) -> [u64; 6] {
        let mut arguments = [0; 6];
        arguments[index] = u64::try_from(value).unwrap();
        arguments
    }

    #[test]
    fn waiting_is_harmless_and_starting_processes_is_not() {
        assert!(allowed(libc::SYS_futex, [0; 6]));
        for number in [libc::SYS_clone, libc::SYS_execve, libc::SYS_sendto, libc::SYS_unlinkat] {
            assert!(!allowed(number, [0; 6]));
        }
    }

    #[test]
    fn writing_is_for_the_driver_only() {
        let file = tempfile::tempfile().unwrap();
        assert!(!allowed(libc::SYS_write, with(0, file.as_raw_fd())));
        let event = nix::sys::eventfd::EventFd::new().unwrap();
        assert!(allowed(libc::SYS_write, with(0, event.as_raw_fd())));
        assert!(!allowed(libc::SYS_ioctl, with(0, 9999)));
        assert!(allowed(libc::SYS_fcntl, with(1, libc::F_GETFD)));
        assert!(!allowed(libc::SYS_fcntl, with(1, libc::F_SETLK)));
    }

    #[test]
    fn opening_must_not_make() {
        assert!(allowed(libc::SYS_openat, with(2, libc::O_RDWR | libc::O_CLOEXEC)));
        assert!(allowed(libc::SYS_openat, with(2, libc::O_RDONLY | libc::O_DIRECTORY)));
        for flags in [libc::O_CREAT, libc::O_TRUNC, libc::O_TMPFILE] {
            assert!(!allowed(libc::SYS_openat, with(2, libc::O_WRONLY | flags)));
        }
    }
}
