//! What is known of a process without asking the driver, for drivers that do not tell: 550 to 554.
//!
//! A process with CUDA has a thread that the driver names, and a process that is CHECKPOINTED has no
//! NVIDIA device, neither open nor mapped (both measured on 580). So it is told apart whether it is
//! CHECKPOINTED, which is what matters: CRIU cannot dump one that has a device. It is not told apart
//! whether one that has a device is RUNNING or LOCKED, and one that also has a device for something
//! else, such as NVML, never counts as CHECKPOINTED.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::hold;
use crate::processes::Pid;

/// How all of NVIDIA's device files are called.
const DEVICE: &[u8] = b"/dev/nvidia";

/// A mounted proc.
#[derive(Debug)]
pub(super) struct Proc(PathBuf);

/// What a process has of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Has {
    /// Its restore thread. Of several the first: who needs to tell them apart lets all of the
    /// driver's threads run.
    pub(super) restore_thread: Option<Pid>,
    /// A device, open or mapped.
    pub(super) device: bool,
}

impl Proc {
    /// That of this host.
    pub(super) fn new() -> Self {
        Self("/proc".into())
    }

    /// Another, for tests.
    #[cfg(test)]
    pub(super) fn at(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// None if there is no such process, or it has ended.
    pub(super) fn look(&self, pid: Pid) -> io::Result<Option<Has>> {
        let process = self.0.join(pid.to_string());
        match look(&process) {
            // Of one that has ended and was not waited for nothing is mapped.
            Ok((maps, _)) if maps.is_empty() => Ok(None),
            Ok((maps, mut has)) => {
                has.device |= maps.windows(DEVICE.len()).any(|part| part == DEVICE);
                Ok(Some(has))
            }
            Err(_) if !process.exists() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn look(process: &Path) -> io::Result<(Vec<u8>, Has)> {
    let maps = fs::read(process.join("maps"))?;
    let mut restore_thread: Option<Pid> = None;
    for thread in fs::read_dir(process.join("task"))? {
        let thread = thread?;
        // One that has ended meanwhile is none.
        let Ok(name) = fs::read(thread.path().join("comm")) else { continue };
        let tid = thread.file_name().to_str().and_then(|tid| tid.parse().ok());
        if let (Some(tid), true) = (tid, is_restore_thread(&name)) {
            restore_thread = Some(restore_thread.map_or(tid, |first| first.min(tid)));
        }
    }
    let mut device = false;
    for descriptor in fs::read_dir(process.join("fd"))? {
        let Ok(target) = fs::read_link(descriptor?.path()) else { continue };
        device |= OsStr::new(&target).as_bytes().starts_with(DEVICE);
    }
    Ok((maps, Has { restore_thread, device }))
}

fn is_restore_thread(name: &[u8]) -> bool {
    let name = name.strip_suffix(b"\n").unwrap_or(name);
    std::str::from_utf8(name).is_ok_and(hold::is_restore_threads_name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A proc with the process 7.
    fn proc(maps: &str, threads: &[(&str, &str)], open: &[&str]) -> (tempfile::TempDir, Proc) {
        let root = tempfile::tempdir().unwrap();
        let process = root.path().join("7");
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::create_dir_all(process.join("task")).unwrap();
        fs::write(process.join("maps"), maps).unwrap();
        for (tid, name) in threads {
            let thread = process.join("task").join(tid);
            fs::create_dir(&thread).unwrap();
            fs::write(thread.join("comm"), format!("{name}\n")).unwrap();
        }
        for (number, target) in open.iter().enumerate() {
            symlink(target, process.join("fd").join(number.to_string())).unwrap();
        }
        let proc = Proc(root.path().to_owned());
        (root, proc)
    }

    const PLAIN: &str = "7f00-7f01 rw-p 00000000 00:00 0\n";
    const CUDA: &[(&str, &str)] =
        &[("7", "counter"), ("12", "cuda00001800007"), ("14", "cuda-EvtHandlr")];

    #[test]
    fn one_with_cuda_is_known_by_its_thread_and_a_checkpointed_one_by_its_devices() {
        for (maps, open, device) in [
            (PLAIN, &["/dev/null", "/dev/nvidiactl"][..], true),
            ("7f00-7f01 rw-s 00000000 00:06 9  /dev/nvidia0\n", &["/dev/null"][..], true),
            (PLAIN, &["/dev/null", "/tmp/dev/nvidia0"][..], false),
        ] {
            let (_root, proc) = proc(maps, CUDA, open);
            let has = proc.look(7).unwrap();
            assert_eq!(has, Some(Has { restore_thread: Some(12), device }), "{open:?}");
        }
    }

    #[test]
    fn a_name_that_only_begins_so_is_none_of_the_drivers() {
        let threads =
            [("7", "cuda"), ("8", "cuda-EvtHandlr"), ("9", "cudaworker"), ("10", "cuda0000180000")];
        let (_root, proc) = proc(PLAIN, &threads, &["/dev/nvidia0"]);
        assert_eq!(proc.look(7).unwrap(), Some(Has { restore_thread: None, device: true }));
    }

    #[test]
    fn of_several_threads_the_first_is_given() {
        let threads = [("100", "cuda00001800007"), ("99", "cuda00001400006")];
        let (_root, proc) = proc(PLAIN, &threads, &[]);
        assert_eq!(proc.look(7).unwrap().unwrap().restore_thread, Some(99));
    }

    #[test]
    fn one_that_has_ended_has_nothing() {
        let (_root, proc) = proc("", CUDA, &[]);
        assert_eq!(proc.look(7).unwrap(), None);
        assert_eq!(proc.look(8).unwrap(), None);
    }
}
