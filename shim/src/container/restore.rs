//! The restore of a container that was created with a checkpoint.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use stasis_hooks::runc::criu::{LogStore, RESTORE_LOG};

use super::create::{read_pid, words};
use super::{Container, Fixed};
use crate::bundle::PID_FILE;
use crate::error::TaskError;
use crate::process::{KILLED, UNKNOWN_STATUS};
use crate::reaper::Exit;
use crate::runc::{Call, CallIo};
use crate::state::State;
use crate::stdio::ProcessIo;

impl Container {
    /// `runc restore`, through the engine: an image with CUDA runs when its CUDA works. On failure
    /// nothing runs, and the container can be deleted.
    pub(super) async fn restore(self: &Arc<Self>) -> Result<(), TaskError> {
        let restored = self.run_restore().await;
        if let Err(error) = &restored {
            tracing::error!(container = self.id, phase = "restore", "{error}");
            self.delete_by_force().await;
            self.set_state(State::Stopped);
            self.init.end_io_at_once().await;
            let status = if self.inner().killed { KILLED } else { UNKNOWN_STATUS };
            self.init.set_exit(Exit { status, at: SystemTime::now() });
        }
        restored
    }

    async fn run_restore(self: &Arc<Self>) -> Result<(), TaskError> {
        let Fixed { bundle, checkpoint, criu_work, no_pivot, .. } = &self.fixed;
        let image = checkpoint.as_deref().unwrap_or(Path::new(""));
        let pid_file = bundle.join(PID_FILE);
        let mut arguments = words(&["--image-path"]);
        arguments.push(image.into());
        arguments.extend(["--work-path".into(), criu_work.into(), "--detach".into()]);
        arguments.extend(["--pid-file".into(), pid_file.clone().into()]);
        let (stdio, shared) = (&self.init.stdio, &self.shared);
        let owner = self.fixed.owner;
        let io = ProcessIo::open(stdio, &self.id, &shared.namespace, owner, &shared.reaper).await;
        self.init.set_io(io.map_err(|error| TaskError::failed(&error))?).await;
        let (ends, socket) = self.init.child_ends().await?;
        if let Some(socket) = socket {
            arguments.extend(["--console-socket".into(), socket.into()]);
        }
        if *no_pivot {
            arguments.push("--no-pivot".into());
        }
        // The one dash is that of containerd's own shim.
        arguments.extend(["-no-subreaper".into(), "--bundle".into(), bundle.into()]);
        arguments.push(self.id.clone().into());
        let mut call =
            Call::new("restore", arguments).with_io(CallIo::Container(ends)).through_engine(true);
        call.pid = Some(Arc::clone(&self.restoring));
        let expecting = self.shared.reaper.expect();
        self.refuse_if_killed()?;
        if let Err(error) = self.call(call, "OCI runtime restore failed").await {
            self.refuse_if_killed()?;
            return Err(self.with_restore_log(error).await);
        }
        // Before it is anybody's: what has been killed meanwhile never ran.
        self.refuse_if_killed()?;
        self.init.io_started().await?;
        self.born(read_pid(&pid_file)?, &expecting);
        Ok(())
    }

    fn refuse_if_killed(&self) -> Result<(), TaskError> {
        if self.inner().killed {
            let text = format!("container {}: it was killed while it was restored", self.id);
            return Err(TaskError::Precondition(text));
        }
        Ok(())
    }

    /// CRIU's log lies in the bundle, which goes with the container: what names no other gets a
    /// copy that stays.
    async fn with_restore_log(&self, error: TaskError) -> TaskError {
        let log = self.fixed.criu_work.join(RESTORE_LOG);
        let words = error.to_string();
        if words.contains("CRIU's log: ") {
            return error;
        }
        let settings = &self.fixed.config.log;
        let keep = usize::try_from(settings.keep).unwrap_or(usize::MAX);
        let store = LogStore { directory: settings.directory.clone(), keep };
        let id = self.id.clone();
        let saved = tokio::task::spawn_blocking(move || store.save(&log, id.as_ref())).await;
        match saved {
            Ok(Ok(copy)) => TaskError::Failed(format!("{words}; CRIU's log: {}", copy.display())),
            Ok(Err(_)) | Err(_) => error,
        }
    }
}
