//! The checkpoint of a container.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use containerd_shim::protos::events::task::TaskCheckpointed;
use stasis_hooks::runc::criu::{DUMP_LOG, open_log};

use super::Container;
use super::create::words;
use crate::error::TaskError;
use crate::runc::{Call, RuncError, is_engine};
use crate::state::Action;

/// A checkpoint that is asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "these are the options of the Task service")]
pub struct CheckpointRequest {
    /// Where the image goes.
    pub image: PathBuf,
    /// CRIU's work directory, where its log is. Without one it is a temporary one in the bundle.
    pub work: Option<PathBuf>,
    /// Whether the container ends.
    pub exit: bool,
    /// `--tcp-established`
    pub open_tcp: bool,
    /// `--ext-unix-sk`
    pub external_unix_sockets: bool,
    /// `--shell-job`
    pub terminal: bool,
    /// `--file-locks`
    pub file_locks: bool,
    /// `--empty-ns`
    pub empty_namespaces: Vec<String>,
}

impl CheckpointRequest {
    /// The arguments, as containerd's own shim gives them.
    fn arguments(&self, work: &Path, id: &str) -> Vec<OsString> {
        let mut arguments = words(&["--image-path"]);
        arguments.push(self.image.clone().into());
        arguments.extend(["--work-path".into(), work.into()]);
        let flags = [
            (self.open_tcp, "--tcp-established"),
            (self.external_unix_sockets, "--ext-unix-sk"),
            (self.terminal, "--shell-job"),
            (self.file_locks, "--file-locks"),
        ];
        arguments.extend(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag.into()));
        for namespace in &self.empty_namespaces {
            arguments.extend(["--empty-ns".into(), namespace.into()]);
        }
        if !self.exit {
            arguments.push("--leave-running".into());
        }
        arguments.push(id.into());
        arguments
    }
}

impl Container {
    /// Checkpoints it. The engine suspends its CUDA, calls runc, and puts back what failed; a
    /// container without CUDA is runc's alone.
    pub async fn checkpoint(&self, request: CheckpointRequest) -> Result<(), TaskError> {
        if request.image.as_os_str().is_empty() {
            return Err(TaskError::Invalid("a checkpoint needs a path for its image".to_owned()));
        }
        let _under_way = self.begin(Action::Checkpoint).await?;
        {
            let inner = self.inner();
            // One that was killed meanwhile has its end told at once.
            self.ending.store(request.exit && !inner.killed && !inner.ended, Ordering::Relaxed);
        }
        let temporary = self.fixed.bundle.join("work/criu-work");
        let work = request.work.as_ref().unwrap_or(&temporary);
        let call = Call::new("checkpoint", request.arguments(work, &self.id)).through_engine(true);
        let result = match self.call_engine(call, request.exit).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.explain(error, work).await),
        };
        if request.work.is_none() {
            let _ = tokio::task::spawn_blocking(|| fs::remove_dir_all(temporary)).await;
        }
        if let Err(error) = &result {
            tracing::error!(container = self.id, phase = "checkpoint", "{error}");
            return result;
        }
        self.tell(TaskCheckpointed {
            container_id: self.id.clone(),
            checkpoint: request.image.display().to_string(),
            ..TaskCheckpointed::default()
        });
        Ok(())
    }

    /// As containerd's own shim: the first line, and where CRIU's log is.
    async fn explain(&self, error: RuncError, work: &Path) -> TaskError {
        let (words, log) = (error.to_string(), work.join(DUMP_LOG));
        if error.says("stasis: ") {
            return TaskError::Runtime { what: "OCI runtime checkpoint failed", error };
        }
        let words = words.lines().next().unwrap_or_default();
        let copy = self.fixed.bundle.join("criu-dump.log");
        let target = copy.clone();
        // Not in the runtime's thread, and only a regular file: the path is the caller's.
        let copied = tokio::task::spawn_blocking(move || {
            io::copy(&mut open_log(&log)?, &mut fs::File::create(target)?)
        });
        match copied.await {
            Ok(Ok(_)) => TaskError::Failed(format!("{words} path= {}", copy.display())),
            Ok(Err(_)) | Err(_) => TaskError::Failed(words.to_owned()),
        }
    }

    /// Calls the engine. If the container ends before, a `runc checkpoint` that goes on is ended, since
    /// CRIU has been seen to wait for ever for a process that was killed. Not where the end was asked
    /// for, and not the engine itself: it notices, and may be about to make a good image whole. But
    /// the end is not kept back for these for ever.
    async fn call_engine(&self, mut call: Call, exit: bool) -> Result<String, RuncError> {
        // At its end the shim waits for this.
        let _operation = self.shared.operations.token();
        let pid = Arc::new(AtomicI32::new(0));
        call.pid = Some(Arc::clone(&pid));
        let calling = self.runtime.call(call);
        tokio::pin!(calling);
        let dead = async {
            self.has_ended().await;
            tokio::time::sleep(DEAD).await;
        };
        tokio::select! {
            made = &mut calling => return made,
            () = dead => {}
        }
        let pid = pid.load(Ordering::Relaxed);
        if exit {
            if is_engine(pid) {
                let limit = tokio::time::timeout(WHOLE, &mut calling);
                if let Ok(made) = limit.await {
                    return made;
                }
            }
            tracing::warn!(container = self.id, pid, "a checkpoint goes on with the dead");
            self.no_longer_ending();
        } else if pid > 0 && !is_engine(pid) {
            tracing::warn!(
                container = self.id,
                pid,
                "a checkpoint that goes on with the dead is ended"
            );
            let group = nix::unistd::Pid::from_raw(pid);
            let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
        }
        calling.await
    }
}

/// How long the engine may take to make an image whole (sync it, write its manifest) whose container
/// has ended, before that end is told: with connections kept it is CRIU that ends the container.
const WHOLE: Duration = Duration::from_secs(600);

/// How long an operation may go on with a container that has ended.
pub const DEAD: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn line(request: &CheckpointRequest) -> String {
        let words = request.arguments(Path::new("/w"), "c1");
        words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_arguments_are_those_of_gos_shim() {
        let mut request = CheckpointRequest { image: "/i".into(), ..CheckpointRequest::default() };
        assert_eq!(line(&request), "--image-path /i --work-path /w --leave-running c1");
        request.exit = true;
        request.open_tcp = true;
        request.external_unix_sockets = true;
        request.terminal = true;
        request.file_locks = true;
        request.empty_namespaces = vec!["network".into()];
        assert_eq!(
            line(&request),
            "--image-path /i --work-path /w --tcp-established --ext-unix-sk --shell-job \
             --file-locks --empty-ns network c1"
        );
    }
}
