//! The containers of this shim: one, or those of a pod.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::container::{Container, CreateRequest, Shared};
use crate::error::TaskError;

/// All containers.
pub struct Tasks {
    shared: Shared,
    containers: Mutex<Containers>,
    /// There is nothing left to serve.
    done: Notify,
}

#[derive(Default)]
struct Containers {
    slots: HashMap<String, Slot>,
    /// Shutdown was accepted: nothing begins any more.
    closing: bool,
}

enum Slot {
    /// Its creation is under way.
    Taken,
    Filled(Arc<Container>),
}

impl Tasks {
    /// None yet.
    #[must_use]
    pub fn new(shared: Shared) -> Self {
        Self { shared, containers: Mutex::default(), done: Notify::new() }
    }

    fn containers(&self) -> MutexGuard<'_, Containers> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A container by its id.
    pub fn get(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        match self.containers().slots.get(id) {
            Some(Slot::Filled(container)) => Ok(Arc::clone(container)),
            Some(Slot::Taken) | None => {
                Err(TaskError::NotFound(format!("container {id} not created")))
            }
        }
    }

    /// Creates a container.
    pub async fn create(&self, request: CreateRequest) -> Result<Arc<Container>, TaskError> {
        let id = request.id.clone();
        {
            let mut containers = self.containers();
            if containers.closing {
                return Err(TaskError::Closing);
            }
            match containers.slots.entry(id.clone()) {
                Entry::Occupied(_) => {
                    return Err(TaskError::AlreadyExists(format!("container {id} exists")));
                }
                Entry::Vacant(slot) => drop(slot.insert(Slot::Taken)),
            }
        }
        let mut reserved = Reserved { tasks: self, id: Some(id) };
        let rootfs = request.rootfs.clone();
        let container = Container::create(self.shared.clone(), request).await?;
        if let Some(id) = reserved.id.take() {
            self.containers().slots.insert(id, Slot::Filled(Arc::clone(&container)));
        }
        container.tell_created(&rootfs);
        Ok(container)
    }

    /// A deleted container is forgotten.
    pub fn forget(&self, id: &str) {
        self.containers().slots.remove(id);
    }

    /// Ends the shim, if it has no container any more.
    pub fn shut_down(&self) {
        let mut containers = self.containers();
        if containers.slots.is_empty() {
            containers.closing = true;
            self.done.notify_one();
        }
    }

    /// Waits for [`Self::shut_down`].
    pub async fn done(&self) {
        self.done.notified().await;
    }
}

/// Gives an id back if the creation fails, also by a panic.
struct Reserved<'a> {
    tasks: &'a Tasks,
    id: Option<String>,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            self.tasks.forget(id);
        }
    }
}
