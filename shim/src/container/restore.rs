//! The restore of a container that was created with a checkpoint.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use stasis_hooks::runc::criu::{LogStore, RESTORE_LOG};

use super::create::{PID_FILE, read_pid, words};
use super::{Container, Fixed};
use crate::error::TaskError;
use crate::process::UNKNOWN_STATUS;
use crate::reaper::Exit;
use crate::runc::{Call, CallIo};
use crate::state::State;

impl Container {
    /// `runc restore`, through the engine: an image with CUDA runs when its CUDA works. On failure
    /// nothing runs, and the container can be deleted.
    pub(super) async fn restore(self: &Arc<Self>) -> Result<(), TaskError> {
        let restored = self.run_restore().await;
        if let Err(error) = &restored {
            tracing::error!(container = self.id, phase = "restore", "{error}");
            // Most of the time there is nothing any more.
            let call = Call::new("delete", ["--force", &self.id]);
            let in_use = self.fixed.journal.in_use();
            let _ = self.runtime.call(call.through_engine(in_use)).await;
            self.set_state(State::Stopped);
            self.init.end_io_at_once().await;
            self.init.set_exit(Exit { status: UNKNOWN_STATUS, at: SystemTime::now() });
        }
        restored
    }

    async fn run_restore(self: &Arc<Self>) -> Result<(), TaskError> {
        let Fixed { bundle, checkpoint, criu_work, no_pivot, .. } = &self.fixed;
        let failed = |error: &dyn std::error::Error| TaskError::failed(error);
        let image = checkpoint.as_deref().unwrap_or(Path::new(""));
        let pid_file = bundle.join(PID_FILE);
        let mut arguments = words(&["--image-path"]);
        arguments.push(image.into());
        arguments.extend(["--work-path".into(), criu_work.into(), "--detach".into()]);
        arguments.extend(["--pid-file".into(), pid_file.clone().into()]);
        let mut io = self.init.io.write().await;
        let io = io.as_mut().ok_or_else(|| TaskError::Failed("it was deleted".to_owned()))?;
        if let Some(socket) = io.console_socket() {
            arguments.extend(["--console-socket".into(), socket.into()]);
        }
        if *no_pivot {
            arguments.push("--no-pivot".into());
        }
        // The one dash is that of containerd's own shim.
        arguments.extend(["-no-subreaper".into(), "--bundle".into(), bundle.into()]);
        arguments.push(self.id.clone().into());
        let ends = io.take_child_ends().map_err(|error| failed(&error))?;
        let mut call =
            Call::new("restore", arguments).with_io(CallIo::Container(ends)).through_engine(true);
        call.pid = Some(Arc::clone(&self.restoring));
        let expecting = self.shared.reaper.expect();
        if let Err(error) = self.call(call, "OCI runtime restore failed").await {
            return Err(self.with_restore_log(error));
        }
        io.started().await.map_err(|error| failed(&error))?;
        self.born(read_pid(&pid_file)?, &expecting);
        Ok(())
    }

    /// CRIU's log lies in the bundle, which goes with the container: what names no other gets a
    /// copy that stays.
    fn with_restore_log(&self, error: TaskError) -> TaskError {
        let log = self.fixed.criu_work.join(RESTORE_LOG);
        let words = error.to_string();
        if words.contains("CRIU's log: ") || !log.is_file() {
            return error;
        }
        let settings = &self.fixed.config.log;
        let keep = usize::try_from(settings.keep).unwrap_or(usize::MAX);
        let store = LogStore { directory: settings.directory.clone(), keep };
        match store.save(&log, self.id.as_ref()) {
            Ok(copy) => TaskError::Failed(format!("{words}; CRIU's log: {}", copy.display())),
            Err(_) => error,
        }
    }
}
