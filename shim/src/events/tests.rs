//! Against a real ttrpc server at a socket in a directory of its own.

use super::*;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};

use async_trait::async_trait;
use containerd_shim::protos::api::Empty;
use containerd_shim::protos::events::task::{TaskExit, TaskStart};
use containerd_shim::protos::protobuf::Message as _;
use containerd_shim::protos::shim_async::{Events, create_events};
use containerd_shim::protos::ttrpc::asynchronous::{Server, TtrpcContext};
use containerd_shim::protos::ttrpc::error::get_rpc_status;
use containerd_shim::protos::ttrpc::{self, Code};

const QUICK: Limits = Limits {
    waiting: 2048,
    attempt: Duration::from_millis(500),
    first_pause: Duration::from_millis(5),
    longest_pause: Duration::from_millis(20),
};
const LONG: Duration = Duration::from_secs(20);

/// containerd, as far as it is needed.
struct Fake {
    directory: tempfile::TempDir,
    seen: Arc<Mutex<Vec<Envelope>>>,
    /// How often it says that it is not available.
    unavailable: Arc<AtomicUsize>,
}

#[derive(Clone)]
struct Handler {
    seen: Arc<Mutex<Vec<Envelope>>>,
    unavailable: Arc<AtomicUsize>,
}

#[async_trait]
impl Events for Handler {
    async fn forward(
        &self,
        _context: &TtrpcContext,
        request: ForwardRequest,
    ) -> ttrpc::Result<Empty> {
        let before = self.unavailable.load(Ordering::Relaxed);
        if before > 0 {
            self.unavailable.store(before - 1, Ordering::Relaxed);
            return Err(get_rpc_status(Code::UNAVAILABLE, "later"));
        }
        if request.envelope.topic == "/tasks/start" {
            return Err(get_rpc_status(Code::INVALID_ARGUMENT, "not that one"));
        }
        self.seen.lock().unwrap().push(request.envelope.unwrap());
        tokio::time::sleep(Duration::from_millis(1)).await;
        Ok(Empty::new())
    }
}

impl Fake {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            seen: Arc::default(),
            unavailable: Arc::default(),
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("containerd.sock.ttrpc")
    }

    fn queue(&self, limits: Limits) -> EventQueue {
        EventQueue::with_limits(self.path().to_str().unwrap(), "default", limits)
    }

    async fn start(&self) -> Server {
        let handler =
            Handler { seen: Arc::clone(&self.seen), unavailable: Arc::clone(&self.unavailable) };
        let mut server = Server::new()
            .bind(&format!("unix://{}", self.path().display()))
            .unwrap()
            .register_service(create_events(Arc::new(handler)));
        server.start().await.unwrap();
        server
    }

    async fn stop(&self, mut server: Server) {
        server.shutdown().await.unwrap();
        std::fs::remove_file(self.path()).unwrap();
    }

    /// The statuses of the exits that have come.
    fn exits(&self) -> Vec<u32> {
        let seen = self.seen.lock().unwrap();
        seen.iter()
            .map(|envelope| {
                assert_eq!(envelope.topic, "/tasks/exit");
                assert_eq!(envelope.namespace, "default");
                assert_eq!(envelope.event.type_url, "containerd.events.TaskExit");
                TaskExit::parse_from_bytes(&envelope.event.value).unwrap().exit_status
            })
            .collect()
    }

    async fn wait_for(&self, count: usize) {
        let begun = Instant::now();
        while self.seen.lock().unwrap().len() < count {
            assert!(begun.elapsed() < LONG);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

fn exit(status: u32) -> TaskExit {
    TaskExit { container_id: "c1".into(), exit_status: status, ..TaskExit::default() }
}

fn publish(queue: &EventQueue, statuses: std::ops::Range<u32>) {
    for status in statuses {
        queue.publish(exit(status));
    }
}

#[tokio::test]
async fn they_come_in_order() {
    let fake = Fake::new();
    let _server = fake.start().await;
    let queue = fake.queue(QUICK);
    assert_eq!(queue.flush(LONG).await, 0);
    publish(&queue, 0..100);
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), (0..100).collect::<Vec<_>>());
}

#[tokio::test]
async fn they_wait_for_containerd_with_the_time_of_their_publication() {
    let fake = Fake::new();
    let queue =
        EventQueue::with_limits(&format!("unix://{}", fake.path().display()), "default", QUICK);
    publish(&queue, 0..3);
    let published = SystemTime::now();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let _server = fake.start().await;
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), [0, 1, 2]);
    let stamped: SystemTime = fake.seen.lock().unwrap()[2].timestamp.clone().unwrap().into();
    assert!(stamped <= published);
    assert!(published.duration_since(stamped).unwrap() < Duration::from_secs(10));
}

#[tokio::test]
async fn none_is_lost_when_containerd_dies_and_returns() {
    let fake = Fake::new();
    let queue = fake.queue(QUICK);
    let server = fake.start().await;
    publish(&queue, 0..50);
    fake.wait_for(10).await;
    fake.stop(server).await;
    publish(&queue, 50..60);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let before = fake.seen.lock().unwrap().len();
    assert!((10..50).contains(&before), "{before}");

    let server = fake.start().await;
    assert_eq!(queue.flush(LONG).await, 0);
    // The one on its way may have come twice.
    let mut exits = fake.exits();
    assert!(exits.len() <= 61, "{exits:?}");
    exits.dedup();
    assert_eq!(exits, (0..60).collect::<Vec<_>>());

    // While nothing is to be sent, too.
    fake.stop(server).await;
    let _server = fake.start().await;
    fake.seen.lock().unwrap().clear();
    publish(&queue, 60..63);
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), [60, 61, 62]);
}

#[tokio::test]
async fn one_that_is_refused_does_not_hold_up_the_others() {
    let fake = Fake::new();
    let _server = fake.start().await;
    let queue = fake.queue(QUICK);
    queue.publish(exit(1));
    queue.publish(TaskStart::new());
    queue.publish(exit(2));
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), [1, 2]);
}

#[tokio::test]
async fn an_answer_that_it_is_not_available_is_no_refusal() {
    let fake = Fake::new();
    fake.unavailable.store(3, Ordering::Relaxed);
    let _server = fake.start().await;
    let queue = fake.queue(QUICK);
    publish(&queue, 0..2);
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), [0, 1]);
}

#[tokio::test]
async fn a_containerd_that_does_not_answer_is_tried_again() {
    let fake = Fake::new();
    let silent = tokio::net::UnixListener::bind(fake.path()).unwrap();
    let queue = fake.queue(QUICK);
    publish(&queue, 0..2);
    let (held, _) = silent.accept().await.unwrap();
    // The second attempt is on a connection of its own.
    let (other, _) = tokio::time::timeout(LONG, silent.accept()).await.unwrap().unwrap();
    drop((held, other, silent));
    std::fs::remove_file(fake.path()).unwrap();
    let _server = fake.start().await;
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), [0, 1]);
}

#[tokio::test]
async fn a_full_queue_loses_the_oldest() {
    let fake = Fake::new();
    let queue = fake.queue(Limits { waiting: 4, ..QUICK });
    // The worker does not run in between.
    publish(&queue, 0..10);
    let _server = fake.start().await;
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), [6, 7, 8, 9]);
}

#[tokio::test]
async fn a_full_queue_keeps_the_one_on_its_way() {
    let fake = Fake::new();
    let queue = fake.queue(Limits { waiting: 4, ..QUICK });
    publish(&queue, 0..1);
    tokio::time::sleep(Duration::from_millis(50)).await;
    publish(&queue, 1..10);
    let _server = fake.start().await;
    assert_eq!(queue.flush(LONG).await, 0);
    assert_eq!(fake.exits(), [0, 6, 7, 8, 9]);
}

#[tokio::test]
async fn a_flush_ends_in_time_and_says_what_is_left() {
    let fake = Fake::new();
    let queue = fake.queue(QUICK);
    publish(&queue, 0..3);
    let begun = Instant::now();
    assert_eq!(queue.flush(Duration::from_millis(50)).await, 3);
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(queue.flush(Duration::ZERO).await, 3);
}
