//! v2: inotify says that memory.events has changed, and the file how many were killed. It counts
//! the kills in the cgroup and in those below, for whatever reason.

use std::os::fd::{AsFd as _, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::io::unix::AsyncFd;
use tokio_util::task::AbortOnDropHandle;

use super::{OnOom, OomError, lock, readable};

/// All watched containers.
pub(super) struct Watches {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

struct Shared {
    inotify: AsyncFd<Descriptor>,
    /// A list and not a map: two containers may be in the same cgroup (a container restored
    /// beside its original is, with runc before 1.2), and then share a descriptor.
    containers: Mutex<Vec<Container>>,
}

struct Container {
    id: String,
    watch: WatchDescriptor,
    events: PathBuf,
    kills: u64,
}

/// For the runtime, which asks for a number.
struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl Watches {
    pub(super) fn new(on_oom: OnOom) -> Result<Self, OomError> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)
            .map_err(|errno| OomError::Descriptor(errno.into()))?;
        let inotify = readable(Descriptor(inotify))?;
        let shared = Arc::new(Shared { inotify, containers: Mutex::default() });
        let task = tokio::spawn(tell(Arc::clone(&shared), on_oom));
        Ok(Self { shared, _task: AbortOnDropHandle::new(task) })
    }

    pub(super) fn add(&self, id: &str, directory: &Path) -> Result<(), OomError> {
        self.remove(id);
        let events = directory.join("memory.events");
        let watch = match self.shared.inotify().add_watch(&events, AddWatchFlags::IN_MODIFY) {
            Ok(watch) => watch,
            Err(errno) => return Err(OomError::Watch { path: events, source: errno.into() }),
        };
        // Counted from here: the cgroup may have had other processes before.
        let kills = kills(&events).unwrap_or(0);
        let container = Container { id: id.to_owned(), watch, events, kills };
        lock(&self.shared.containers).push(container);
        Ok(())
    }

    /// Ends it, and says whether something was not told yet.
    pub(super) fn remove(&self, id: &str) -> bool {
        let mut containers = lock(&self.shared.containers);
        let Some(at) = containers.iter().position(|container| container.id == id) else {
            return false;
        };
        let mut container = containers.swap_remove(at);
        if !containers.iter().any(|other| other.watch == container.watch) {
            // Fails if the cgroup is gone already.
            let _ = self.shared.inotify().rm_watch(container.watch);
        }
        container.killed()
    }
}

impl Shared {
    fn inotify(&self) -> &Inotify {
        &self.inotify.get_ref().0
    }

    /// The containers that have lost a process, given what inotify said.
    fn killed(&self, changed: &[WatchDescriptor]) -> Vec<String> {
        // So many changes that inotify forgot some.
        let all = changed.iter().any(|watch| watch.as_raw() < 0);
        lock(&self.containers)
            .iter_mut()
            .filter(|container| all || changed.contains(&container.watch))
            .filter_map(|container| container.killed().then(|| container.id.clone()))
            .collect()
    }
}

impl Container {
    /// Whether there are more kills than when it was asked last.
    fn killed(&mut self) -> bool {
        let Some(kills) = kills(&self.events) else {
            return false;
        };
        let more = kills > self.kills;
        self.kills = kills;
        more
    }
}

async fn tell(shared: Arc<Shared>, on_oom: OnOom) {
    loop {
        let Ok(mut ready) = shared.inotify.readable().await else {
            return;
        };
        let read = ready.try_io(|inotify| Ok(inotify.get_ref().0.read_events()?));
        match read {
            Ok(Ok(events)) => {
                let changed: Vec<_> = events.iter().map(|event| event.wd).collect();
                for id in shared.killed(&changed) {
                    on_oom(&id);
                }
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "OOM kills are no longer noticed");
                return;
            }
            Err(_would_block) => {}
        }
    }
}

/// The counter in a memory.events. None if the cgroup is gone.
fn kills(events: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(events).ok()?;
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::super::heard::{next, nothing, watcher};
    use crate::cgroup::Cgroups;
    use std::path::Path;

    fn set(directory: &Path, high: u64, kills: u64) {
        let text =
            format!("low 0\nhigh {high}\nmax 7\noom {kills}\noom_kill {kills}\noom_group_kill 0\n");
        std::fs::write(directory.join("memory.events"), text).unwrap();
    }

    fn cgroup(kills: u64) -> (tempfile::TempDir, Cgroups) {
        let directory = tempfile::tempdir().unwrap();
        set(directory.path(), 0, kills);
        let cgroups = Cgroups::V2(directory.path().to_owned());
        (directory, cgroups)
    }

    #[tokio::test]
    async fn only_more_kills_are_told_and_to_whom_they_belong() {
        let ((one, first), (two, second)) = (cgroup(0), cgroup(3));
        let (watcher, mut receive) = watcher();
        watcher.add("c1", &first).unwrap();
        watcher.add("c2", &second).unwrap();
        nothing(&mut receive).await;

        set(one.path(), 5, 0);
        nothing(&mut receive).await;
        set(one.path(), 5, 1);
        assert_eq!(next(&mut receive).await, "c1");
        set(two.path(), 0, 3);
        nothing(&mut receive).await;
        set(two.path(), 0, 5);
        assert_eq!(next(&mut receive).await, "c2");
        set(one.path(), 5, 2);
        assert_eq!(next(&mut receive).await, "c1");
        nothing(&mut receive).await;
    }

    #[tokio::test]
    async fn a_removed_container_is_looked_at_once_more_and_then_never() {
        let (directory, cgroups) = cgroup(0);
        let (watcher, mut receive) = watcher();
        watcher.add("c1", &cgroups).unwrap();
        set(directory.path(), 0, 1);
        watcher.remove("c1");
        assert_eq!(receive.try_recv().unwrap(), "c1");
        set(directory.path(), 0, 2);
        nothing(&mut receive).await;
        watcher.remove("c1");
        nothing(&mut receive).await;
    }

    #[tokio::test]
    async fn a_cgroup_that_goes_tells_nothing() {
        let (directory, cgroups) = cgroup(0);
        let (watcher, mut receive) = watcher();
        watcher.add("c1", &cgroups).unwrap();
        directory.close().unwrap();
        nothing(&mut receive).await;
        watcher.remove("c1");
        nothing(&mut receive).await;
    }

    #[tokio::test]
    async fn two_containers_in_one_cgroup_are_both_told() {
        let (directory, cgroups) = cgroup(0);
        let (watcher, mut receive) = watcher();
        watcher.add("c1", &cgroups).unwrap();
        watcher.add("c2", &cgroups).unwrap();
        set(directory.path(), 0, 1);
        let mut both = [next(&mut receive).await, next(&mut receive).await];
        both.sort_unstable();
        assert_eq!(both, ["c1", "c2"]);
        watcher.remove("c1");
        set(directory.path(), 0, 2);
        assert_eq!(next(&mut receive).await, "c2");
        nothing(&mut receive).await;
    }
}
