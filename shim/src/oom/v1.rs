//! v1: an event descriptor that the kernel counts up when the memory cgroup, or one above it, is
//! out of memory, and when the cgroup is removed.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::io::unix::AsyncFd;
use tokio_util::task::AbortOnDropHandle;

use super::{OnOom, OomError, readable};

/// A watched container.
pub(super) struct Watch {
    source: Arc<Source>,
    _task: AbortOnDropHandle<()>,
}

struct Source {
    event: AsyncFd<EventFd>,
    control: File,
}

impl Watch {
    pub(super) fn new(id: &str, directory: &Path, on_oom: OnOom) -> Result<Self, OomError> {
        let source = Arc::new(Source::new(directory)?);
        let task = tokio::spawn(tell(Arc::clone(&source), id.to_owned(), on_oom));
        Ok(Self { source, _task: AbortOnDropHandle::new(task) })
    }

    /// Ends it, and says whether something was not told yet.
    pub(super) fn end(self) -> bool {
        self.source.take().is_ok() && self.source.exists()
    }
}

impl Source {
    fn new(directory: &Path) -> Result<Self, OomError> {
        let path = directory.join("memory.oom_control");
        let control =
            File::open(&path).map_err(|source| OomError::Watch { path: path.clone(), source })?;
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| OomError::Descriptor(errno.into()))?;
        let path = directory.join("cgroup.event_control");
        fs::write(&path, format!("{} {}", event.as_raw_fd(), control.as_raw_fd()))
            .map_err(|source| OomError::Watch { path, source })?;
        Ok(Self { event: readable(event)?, control })
    }

    /// Takes what the kernel has counted; `WouldBlock` if nothing.
    fn take(&self) -> io::Result<()> {
        self.event.get_ref().read()?;
        Ok(())
    }

    /// Whether the cgroup is still there. Asked of the open file, because another cgroup may be
    /// at the same path by now; the kernel counts up only after the removal.
    fn exists(&self) -> bool {
        self.control.read_at(&mut [0; 256], 0).is_ok()
    }
}

async fn tell(source: Arc<Source>, id: String, on_oom: OnOom) {
    loop {
        let Ok(mut ready) = source.event.readable().await else {
            return;
        };
        match ready.try_io(|_| source.take()) {
            Ok(Ok(())) if source.exists() => on_oom(&id),
            Err(_would_block) => {}
            Ok(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::heard::{next, nothing, watcher};
    use crate::cgroup::Cgroups;
    use std::path::PathBuf;
    use std::process::{Command, Stdio};

    /// A memory cgroup of 8 MiB on this machine; removed in the end.
    struct Memory(PathBuf);

    impl Memory {
        /// None, with a printed reason, where it cannot be.
        fn new(name: &str) -> Option<Self> {
            let mounts = std::fs::read("/proc/self/mountinfo").unwrap();
            let mounts = String::from_utf8_lossy(&mounts);
            let path = format!("/stasis-{name}-{}", std::process::id());
            let Some(path) =
                stasis_hooks::container::mounted(&mounts, "cgroup", Some("memory"), &path)
            else {
                eprintln!("skipped: no v1 memory hierarchy is mounted");
                return None;
            };
            if let Err(error) = std::fs::create_dir(&path) {
                eprintln!("skipped: cannot make {}: {error}", path.display());
                return None;
            }
            let memory = Self(path);
            std::fs::write(memory.0.join("memory.limit_in_bytes"), "8388608").unwrap();
            // Not there without swap accounting; then swap may help for a while.
            let _ = std::fs::write(memory.0.join("memory.memsw.limit_in_bytes"), "8388608");
            Some(memory)
        }

        fn cgroups(&self) -> Cgroups {
            Cgroups::V1([("memory".to_owned(), self.0.clone())].into())
        }

        /// Runs a process in it that wants more than there is, until it is killed.
        fn exhaust(&self) {
            let procs = self.0.join("cgroup.procs");
            let status = Command::new("sh")
                .args(["-c", "echo $$ > \"$0\" && exec tail /dev/zero"])
                .arg(procs)
                .stdout(Stdio::null())
                .status()
                .unwrap();
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
        }

        fn remove(&self) {
            // The last process is a zombie's remains for a moment.
            for _ in 0..100 {
                if std::fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            panic!("{} is still there", self.0.display());
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            if self.0.exists() {
                self.remove();
            }
        }
    }

    #[tokio::test]
    async fn a_kill_is_told_and_the_end_of_the_cgroup_is_not() {
        let Some(memory) = Memory::new("oom") else { return };
        let (watcher, mut receive) = watcher();
        watcher.add("c1", &memory.cgroups()).unwrap();
        nothing(&mut receive).await;
        for _ in 0..2 {
            memory.exhaust();
            assert_eq!(next(&mut receive).await, "c1");
            // The kernel may have run out more than once before the kill.
            while tokio::time::timeout(std::time::Duration::from_millis(100), receive.recv())
                .await
                .is_ok()
            {}
        }
        memory.remove();
        nothing(&mut receive).await;
        watcher.remove("c1");
        nothing(&mut receive).await;
    }

    #[tokio::test]
    async fn the_cgroup_that_takes_the_place_of_a_removed_one_is_another() {
        let Some(memory) = Memory::new("oom-again") else { return };
        let (watcher, mut receive) = watcher();
        watcher.add("c1", &memory.cgroups()).unwrap();
        // Both before the watcher runs again.
        memory.remove();
        std::fs::create_dir(&memory.0).unwrap();
        nothing(&mut receive).await;
        watcher.remove("c1");
        nothing(&mut receive).await;
    }

    #[tokio::test]
    async fn removing_a_container_tells_a_kill_that_is_still_untold() {
        let Some(memory) = Memory::new("oom-last") else { return };
        let (watcher, mut receive) = watcher();
        watcher.add("c1", &memory.cgroups()).unwrap();
        // Nothing else runs on this runtime meanwhile.
        memory.exhaust();
        watcher.remove("c1");
        assert_eq!(receive.try_recv().unwrap(), "c1");
        nothing(&mut receive).await;
    }
}
