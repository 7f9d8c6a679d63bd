//! The long-lived process: serves the Task service on the socket that `start` has bound.

use std::collections::HashMap;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use containerd_shim::protos::events::task::TaskOOM;
use containerd_shim::protos::shim_async::{Task, create_task};
use containerd_shim::protos::ttrpc::asynchronous::transport::Listener;
use containerd_shim::protos::ttrpc::asynchronous::{Server, Service as Methods};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::task::TaskTracker;

use crate::boot::socket;
use crate::container::{DEAD, Shared};
use crate::events::EventQueue;
use crate::oom::OomWatcher;
use crate::reaper::Reaper;
use crate::service::Service;
use crate::tasks::Tasks;

/// What the server is told by `start`.
#[derive(Debug)]
pub struct Settings {
    /// containerd's namespace.
    pub namespace: String,
    /// containerd's ttrpc socket.
    pub containerd: String,
    /// From which level on is logged.
    pub log_level: String,
    /// Another name of the socket, which goes with it.
    pub socket_name: Option<PathBuf>,
}

/// The name of the Task service up to containerd 1.7, and what 2.x calls the same one.
const NAMES: [&str; 2] = ["containerd.task.v2.Task", "containerd.task.v3.Task"];

/// How long containerd is waited for at the end, to take the last events.
const FLUSH: Duration = Duration::from_secs(2);

/// Serves until the last container is gone.
pub fn serve(settings: &Settings, listener: UnixListener) -> anyhow::Result<()> {
    // What runc leaves behind becomes our child.
    nix::sys::prctl::set_child_subreaper(true).context("cannot become a subreaper")?;
    // One thread: an idle shim should be small, and all that takes long is in other processes.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(run(settings, listener));
    // Whatever still waits for somebody is not waited for.
    runtime.shutdown_background();
    served
}

async fn run(settings: &Settings, listener: UnixListener) -> anyhow::Result<()> {
    let reaper = Reaper::start()?;
    let operations = TaskTracker::new();
    let events = EventQueue::new(&settings.containerd, &settings.namespace);
    let out_of_memory = events.clone();
    let oom = OomWatcher::new(move |id| {
        tracing::info!(container = id, "a process was killed for want of memory");
        out_of_memory.publish(TaskOOM { container_id: id.to_owned(), ..TaskOOM::default() });
    });
    let shared = Shared {
        runtime: Arc::new(|runc| Arc::new(runc)),
        namespace: settings.namespace.clone(),
        events: events.clone(),
        reaper,
        oom: Arc::new(oom),
        log_level: settings.log_level.clone(),
        operations: operations.clone(),
    };
    let tasks = Arc::new(Tasks::new(shared));
    let socket = listener.try_clone()?;
    listener.set_nonblocking(true)?;
    let listener = Listener::try_from(listener)?;
    let service: Arc<dyn Task + Send + Sync> = Arc::new(Service::new(Arc::clone(&tasks)));
    let mut server =
        Server::new().add_listener(listener).register_service(under_both_names(&service));
    server.start().await?;
    tracing::debug!("serving");

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        () = tasks.done() => {}
        _ = terminate.recv() => tracing::warn!("SIGTERM: the shim ends"),
        _ = interrupt.recv() => tracing::warn!("SIGINT: the shim ends"),
    }
    // First its name, so that nobody finds it any more.
    if let Err(error) = socket::retire(&socket, settings.socket_name.as_deref()) {
        tracing::warn!(%error, "the socket stays behind");
    }
    let _ = server.shutdown().await;
    events.flush(FLUSH).await;
    operations.close();
    let _ = tokio::time::timeout(DEAD + FLUSH, operations.wait()).await;
    Ok(())
}

/// The two versions differ in their name only, so one socket serves every containerd.
fn under_both_names(service: &Arc<dyn Task + Send + Sync>) -> HashMap<String, Methods> {
    let methods = |name: &str| {
        let own = create_task(Arc::clone(service)).into_values().next();
        own.map(|methods| (name.to_owned(), methods))
    };
    NAMES.into_iter().filter_map(methods).collect()
}
