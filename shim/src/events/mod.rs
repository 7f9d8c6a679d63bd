//! What happens to tasks, told to containerd.
//!
//! What listens to containerd's events learns of an exit in no other way: one that is lost leaves
//! a container that has ended looking as if it ran. So events are queued here and sent one after
//! the other, each until it has arrived, however long containerd is away.

mod containerd;
mod task;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim::protos::shim::event::Envelope;
use containerd_shim::protos::shim::events::ForwardRequest;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use containerd::{Containerd, ForwardError};
pub use task::TaskEvent;

/// How patient the queue is.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// How many events wait.
    waiting: usize,
    /// How long one attempt may take.
    attempt: Duration,
    /// The pause after a failed attempt, doubled with each further one.
    first_pause: Duration,
    /// The longest pause.
    longest_pause: Duration,
}

impl Limits {
    const USUAL: Self = Self {
        waiting: 2048,
        attempt: Duration::from_secs(5),
        first_pause: Duration::from_millis(10),
        longest_pause: Duration::from_secs(2),
    };
}

/// The events on their way to containerd. Clones share one queue; with the last one it ends, and
/// with it what has not been sent.
///
/// Events arrive in the order in which they were published. None is lost unless the queue is full
/// or containerd refuses it. None comes twice but the one that is on its way when the connection
/// breaks: it may have arrived, and is sent again.
#[derive(Clone)]
pub struct EventQueue {
    shared: Arc<Shared>,
    _worker: Arc<AbortOnDropHandle<()>>,
}

struct Shared {
    namespace: String,
    limits: Limits,
    state: Mutex<State>,
    /// There is something to send.
    published: Notify,
    /// Nothing is left to send.
    idle: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Envelope>,
    /// The worker has taken one.
    on_its_way: bool,
    /// How many were given up between the one on its way and the first that waits.
    dropped: usize,
}

impl EventQueue {
    /// For containerd's ttrpc socket (`TTRPC_ADDRESS`: a path, with or without `unix://`). It is
    /// connected to with the first event. To be called on the runtime.
    #[must_use]
    pub fn new(address: &str, namespace: &str) -> Self {
        Self::with_limits(address, namespace, Limits::USUAL)
    }

    fn with_limits(address: &str, namespace: &str, limits: Limits) -> Self {
        let shared = Arc::new(Shared {
            namespace: namespace.to_owned(),
            limits,
            state: Mutex::default(),
            published: Notify::new(),
            idle: Notify::new(),
        });
        let containerd = Containerd::new(address, limits.attempt);
        let worker = tokio::spawn(work(Arc::clone(&shared), containerd));
        Self { shared, _worker: Arc::new(AbortOnDropHandle::new(worker)) }
    }

    /// Queues an event of this moment. When the queue is full, the oldest event gives way.
    pub fn publish(&self, event: impl Into<TaskEvent>) {
        let event = event.into();
        let topic = event.topic();
        let event = match event.to_any() {
            Ok(event) => event,
            Err(error) => {
                tracing::error!(%error, topic, "event cannot be encoded");
                return;
            }
        };
        {
            let mut state = self.shared.lock();
            if state.waiting.len() >= self.shared.limits.waiting {
                state.waiting.pop_front();
                state.dropped += 1;
            }
            state.waiting.push_back(Envelope {
                timestamp: Some(Timestamp::now()).into(),
                namespace: self.shared.namespace.clone(),
                topic: topic.to_owned(),
                event: Some(event).into(),
                ..Envelope::default()
            });
        }
        self.shared.published.notify_one();
    }

    /// Waits until everything published has arrived, but not longer than `within`. Returns how
    /// many events are left.
    pub async fn flush(&self, within: Duration) -> usize {
        let empty = async {
            loop {
                let idle = self.shared.idle.notified();
                if self.shared.lock().left() == 0 {
                    return;
                }
                idle.await;
            }
        };
        // The count is what tells.
        let _ = tokio::time::timeout(within, empty).await;
        self.shared.lock().left()
    }
}

impl Shared {
    /// A panic elsewhere leaves nothing half-done in it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next event to send.
    async fn next(&self) -> Envelope {
        loop {
            if let Some(event) = self.lock().take() {
                return event;
            }
            self.published.notified().await;
        }
    }

    /// The one on its way has arrived, or never will.
    fn done(&self) {
        let mut state = self.lock();
        state.on_its_way = false;
        if state.left() == 0 {
            // A long absence of containerd is not to be seen in this process's size for ever.
            state.waiting.shrink_to(16);
            self.idle.notify_waiters();
        }
    }
}

impl State {
    fn left(&self) -> usize {
        self.waiting.len() + usize::from(self.on_its_way)
    }

    fn take(&mut self) -> Option<Envelope> {
        let event = self.waiting.pop_front()?;
        self.on_its_way = true;
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            tracing::warn!(
                dropped,
                "too many events while containerd was away, the oldest are lost"
            );
        }
        Some(event)
    }
}

/// Sends the events, one after the other.
async fn work(shared: Arc<Shared>, mut containerd: Containerd) {
    loop {
        let envelope = shared.next().await;
        let request =
            ForwardRequest { envelope: Some(envelope).into(), ..ForwardRequest::default() };
        deliver(&mut containerd, &request, &shared.limits).await;
        shared.done();
    }
}

/// Returns when the event has arrived or was refused.
async fn deliver(containerd: &mut Containerd, request: &ForwardRequest, limits: &Limits) {
    let topic = request.envelope.topic.as_str();
    let mut pause = limits.first_pause;
    let mut attempts = 0;
    loop {
        match containerd.forward(request).await {
            Ok(()) if attempts > 1 => {
                tracing::info!(topic, attempts, "containerd takes events again");
                return;
            }
            Ok(()) => return,
            Err(error @ ForwardError::Refused { .. }) => {
                tracing::error!(%error, topic, "event is lost");
                return;
            }
            // At the first attempt a connection shows that it broke while nothing was sent. That
            // is usual after a restart of containerd.
            Err(error) if attempts == 1 => {
                tracing::warn!(%error, topic, "event is kept until containerd takes it");
            }
            Err(error) => tracing::debug!(%error, topic, "event not sent"),
        }
        attempts += 1;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(limits.longest_pause);
    }
}

#[cfg(test)]
mod tests;
