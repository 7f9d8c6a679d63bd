//! The events of a task, and what containerd calls them.

use containerd_shim::protos::events::task::{
    TaskCheckpointed, TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM,
    TaskPaused, TaskResumed, TaskStart,
};
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{self, Message as _};

/// The one place that knows which message goes under which topic. Names of messages are written
/// out and not asked of their descriptors, which would be parsed and kept in memory for it.
macro_rules! task_events {
    ($($variant:ident($message:ident) $topic:literal,)*) => {
        /// An event of a task.
        #[derive(Debug, Clone, PartialEq)]
        pub enum TaskEvent {
            $(
                #[doc = concat!("Topic `", $topic, "`.")]
                $variant($message),
            )*
        }

        $(impl From<$message> for TaskEvent {
            fn from(message: $message) -> Self {
                Self::$variant(message)
            }
        })*

        impl TaskEvent {
            /// Under what containerd's subscribers look for it.
            #[must_use]
            pub fn topic(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $topic,)*
                }
            }

            /// As it is sent.
            pub(super) fn to_any(&self) -> protobuf::Result<Any> {
                let (name, value) = match self {
                    $(Self::$variant(message) => (
                        concat!("containerd.events.", stringify!($message)),
                        message.write_to_bytes()?,
                    ),)*
                };
                Ok(Any { type_url: name.to_owned(), value, ..Any::default() })
            }
        }

        /// One of each, with the name that its message has.
        #[cfg(test)]
        fn all() -> Vec<(TaskEvent, String)> {
            use containerd_shim::protos::protobuf::MessageFull as _;
            vec![$((
                TaskEvent::$variant($message::new()),
                $message::descriptor().full_name().to_owned(),
            )),*]
        }
    };
}

task_events! {
    Create(TaskCreate) "/tasks/create",
    Start(TaskStart) "/tasks/start",
    Oom(TaskOOM) "/tasks/oom",
    Exit(TaskExit) "/tasks/exit",
    Delete(TaskDelete) "/tasks/delete",
    ExecAdded(TaskExecAdded) "/tasks/exec-added",
    ExecStarted(TaskExecStarted) "/tasks/exec-started",
    Paused(TaskPaused) "/tasks/paused",
    Resumed(TaskResumed) "/tasks/resumed",
    Checkpointed(TaskCheckpointed) "/tasks/checkpointed",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_the_messages_own() {
        for (event, name) in all() {
            assert_eq!(event.to_any().unwrap().type_url, name);
        }
    }

    #[test]
    fn the_message_is_in_it() {
        let exit = TaskExit { container_id: "c1".into(), exit_status: 137, ..TaskExit::default() };
        let event = TaskEvent::from(exit.clone());
        assert_eq!(event.topic(), "/tasks/exit");
        let any = event.to_any().unwrap();
        assert_eq!(any.type_url, "containerd.events.TaskExit");
        assert_eq!(TaskExit::parse_from_bytes(&any.value).unwrap(), exit);
    }
}
