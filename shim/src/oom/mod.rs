//! Tells when the kernel kills a process of a container for want of memory.
//!
//! Nothing is polled and no thread waits: v1's event descriptors and v2's inotify are read on the
//! runtime.

mod v1;
mod v2;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::cgroup::Cgroups;

/// What is done when a container, named by its id, ran out of memory.
type OnOom = Arc<dyn Fn(&str) + Send + Sync>;

/// A container cannot be watched. It runs all the same.
#[derive(Debug, thiserror::Error)]
pub enum OomError {
    /// It has no memory cgroup of its own.
    #[error("no memory cgroup of its own")]
    NoMemoryCgroup,
    /// The kernel does not tell.
    #[error("cannot watch {}", path.display())]
    Watch {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No descriptor for it, on which it counts with everybody else of this user.
    #[error("no descriptor to be told of OOM kills")]
    Descriptor(#[source] io::Error),
}

/// Watches containers for OOM kills.
pub struct OomWatcher {
    on_oom: OnOom,
    v1: Mutex<HashMap<String, v1::Watch>>,
    /// One for all containers, made when the first comes: the kernel gives a user only 128.
    v2: Mutex<Option<v2::Watches>>,
}

impl OomWatcher {
    /// `on_oom` is called with the container's id, on the runtime's thread; it is not to block.
    pub fn new(on_oom: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { on_oom: Arc::new(on_oom), v1: Mutex::default(), v2: Mutex::default() }
    }

    /// Watches a container from now on. It is to be called on the runtime when the container is
    /// created, before anything of it runs.
    pub fn add(&self, id: &str, cgroups: &Cgroups) -> Result<(), OomError> {
        let directory = cgroups.controller("memory").ok_or(OomError::NoMemoryCgroup)?;
        match cgroups {
            Cgroups::V1(_) => {
                let watch = v1::Watch::new(id, directory, Arc::clone(&self.on_oom))?;
                lock(&self.v1).insert(id.to_owned(), watch);
            }
            Cgroups::V2(_) => {
                let mut watches = lock(&self.v2);
                let watches = match &mut *watches {
                    Some(watches) => watches,
                    none => none.insert(v2::Watches::new(Arc::clone(&self.on_oom))?),
                };
                watches.add(id, directory)?;
            }
        }
        Ok(())
    }

    /// Stops watching a container, after a last look: the kill of an init process is told to its
    /// parent before it is told here (v2 even keeps it back for 10 ms).
    pub fn remove(&self, id: &str) {
        let watch = lock(&self.v1).remove(id);
        let v1 = watch.is_some_and(v1::Watch::end);
        let v2 = lock(&self.v2).as_ref().is_some_and(|watches| watches.remove(id));
        if v1 || v2 {
            (self.on_oom)(id);
        }
    }
}

/// Has the runtime tell when there is something to read.
#[expect(
    deprecated,
    reason = "tokio replaced it with an unsafe one, for types that change or lend their \
              descriptor; those given here own theirs and keep it"
)]
fn readable<T: AsRawFd>(descriptor: T) -> Result<AsyncFd<T>, OomError> {
    AsyncFd::with_interest(descriptor, Interest::READABLE).map_err(OomError::Descriptor)
}

/// A panic elsewhere leaves nothing half-done in these maps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the tests hear.
#[cfg(test)]
mod heard {
    use std::time::Duration;

    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::OomWatcher;

    /// A watcher, and the ids that it tells.
    pub(super) fn watcher() -> (OomWatcher, UnboundedReceiver<String>) {
        let (send, receive) = unbounded_channel();
        let watcher = OomWatcher::new(move |id| {
            send.send(id.to_owned()).unwrap();
        });
        (watcher, receive)
    }

    pub(super) async fn next(receive: &mut UnboundedReceiver<String>) -> String {
        tokio::time::timeout(Duration::from_secs(20), receive.recv()).await.unwrap().unwrap()
    }

    pub(super) async fn nothing(receive: &mut UnboundedReceiver<String>) {
        let waited = tokio::time::timeout(Duration::from_millis(200), receive.recv()).await;
        assert!(waited.is_err(), "{waited:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn containers_that_cannot_be_watched_are_errors() {
        let (watcher, _receive) = heard::watcher();
        let none = watcher.add("c1", &Cgroups::V1(std::collections::BTreeMap::new()));
        assert!(matches!(none, Err(OomError::NoMemoryCgroup)), "{none:?}");
        let gone = PathBuf::from("/nonexistent");
        let v1 = watcher.add("c1", &Cgroups::V1([("memory".to_owned(), gone.clone())].into()));
        assert!(matches!(v1, Err(OomError::Watch { .. })), "{v1:?}");
        let v2 = watcher.add("c1", &Cgroups::V2(gone));
        assert!(matches!(v2, Err(OomError::Watch { .. })), "{v2:?}");
        watcher.remove("c1");
    }
}
