//! Telling a container of its job file: a mount and a variable in config.json, and the variable in
//! each later exec.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::{Value, json};

use super::{DESTINATION, JobError};
use crate::config_json::ConfigFile;
use crate::cuda::job::VARIABLE;

/// A larger description of a process is a mistake. Environments of a megabyte were seen.
const MAX_BYTES: u64 = 64 << 20;

/// Gives the container of this config.json the job file `source`.
///
/// An environment that names another job file contradicts the annotation.
pub(super) fn attach(config: &mut Value, source: &Path) -> Result<(), JobError> {
    let malformed = |what: &str| JobError::Conflict(format!("{what} in config.json is no list"));
    let process = config.get_mut("process").filter(|process| process.is_object());
    let process =
        process.ok_or_else(|| JobError::Conflict("config.json describes no process".to_owned()))?;
    if let Some(other) = names_another(process) {
        return Err(JobError::Conflict(format!(
            "the environment of the container says {VARIABLE}={other}, and the annotation \
             dev.stasis.job=file gives it a job file of its own: leave one of them out"
        )));
    }
    set_variable(process).ok_or_else(|| malformed("process.env"))?;
    let mounts = config["mounts"].take();
    let mut mounts = match mounts {
        Value::Null => Vec::new(),
        Value::Array(mounts) => mounts,
        _ => return Err(malformed("mounts")),
    };
    // One of an earlier start of the same bundle.
    mounts.retain(|mount| mount["destination"] != DESTINATION);
    // Last, so that nothing is mounted over it.
    mounts.push(json!({
        "destination": DESTINATION,
        "type": "bind",
        "source": source,
        "options": ["bind", "rw", "nosuid", "nodev", "noexec"],
    }));
    config["mounts"] = mounts.into();
    Ok(())
}

/// Takes the job file of another container, or of an earlier start, out of the config.json of one that
/// is to have none: the bundle was copied, or its annotation taken away, after Stasis had changed it.
/// `state` is the directory in which job files lie.
pub fn detach_stale(bundle: &Path, state: &Path) -> Result<(), JobError> {
    // Practically always it has none, and the runtime tells what else is wrong with it.
    let text = std::fs::read(bundle.join("config.json")).unwrap_or_default();
    if !text.windows(DESTINATION.len()).any(|part| part == DESTINATION.as_bytes()) {
        return Ok(());
    }
    let (file, mut config) = ConfigFile::read(bundle)?;
    if detach(&mut config, state) {
        let path = bundle.display();
        tracing::warn!("the job file of another container is taken out of {path}/config.json");
        file.write(&config)?;
    }
    Ok(())
}

/// Whether there was one.
fn detach(config: &mut Value, state: &Path) -> bool {
    let Some(mounts) = config["mounts"].as_array_mut() else { return false };
    let count = mounts.len();
    mounts.retain(|mount| {
        let source = mount["source"].as_str().unwrap_or_default();
        mount["destination"] != DESTINATION || !Path::new(source).starts_with(state)
    });
    if mounts.len() == count {
        return false;
    }
    if let Some(entries) = config["process"]["env"].as_array_mut() {
        entries.retain(|entry| entry.as_str().and_then(value_of) != Some(DESTINATION));
    }
    true
}

fn names_another(process: &Value) -> Option<String> {
    let entries = process["env"].as_array()?.iter();
    let mut values = entries.filter_map(|entry| value_of(entry.as_str()?));
    let other = values.find(|value| !value.is_empty() && *value != DESTINATION)?;
    Some(stasis_config::text::printable(other, 256))
}

fn value_of(entry: &str) -> Option<&str> {
    entry.strip_prefix(VARIABLE)?.strip_prefix('=')
}

/// Sets the variable of a process; none if its environment is no list.
fn set_variable(process: &mut Value) -> Option<()> {
    let entry = Value::from(format!("{VARIABLE}={DESTINATION}"));
    match &mut process["env"] {
        Value::Array(entries) => {
            entries.retain(|entry| entry.as_str().and_then(value_of).is_none());
            entries.push(entry);
        }
        missing @ Value::Null => *missing = vec![entry].into(),
        _ => return None,
    }
    Some(())
}

/// The description of a process for `exec`, with the variable. In memory, since nobody is there to
/// remove a file after the runtime has taken our place; the descriptor is kept over that.
pub struct Exec {
    file: OwnedFd,
}

impl Exec {
    /// Reads that of a caller.
    pub fn of(path: &Path) -> Result<Self, JobError> {
        let failed =
            |action| move |source| JobError::File { action, path: path.to_owned(), source };
        let mut text = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut text));
        let length = read.map_err(failed("cannot read"))?;
        if u64::try_from(length).is_ok_and(|length| length > MAX_BYTES) {
            let reason = format!("it has more than {MAX_BYTES} bytes");
            let source = io::Error::new(io::ErrorKind::FileTooLarge, reason);
            return Err(failed("cannot read")(source));
        }
        let mut process: Value =
            serde_json::from_slice(&text).map_err(|error| failed("cannot read")(error.into()))?;
        if !process.is_object() || set_variable(&mut process).is_none() {
            let source = io::Error::other("it describes no process");
            return Err(failed("cannot read")(source));
        }
        in_memory(&process).map(|file| Self { file }).map_err(failed("cannot copy"))
    }

    /// Its name for the runtime that is executed in our place.
    #[must_use]
    pub fn name(&self) -> OsString {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }
}

/// Not among the descriptors that a caller may pass on to the container by their number.
const FIRST_DESCRIPTOR: i32 = 900;
/// Where so many are not allowed.
const NEXT_BEST_DESCRIPTOR: i32 = 100;

/// Kept over execve. The runtime gives the container none of the descriptors that it was not told to.
fn in_memory(process: &Value) -> io::Result<OwnedFd> {
    let mut file: File = memfd_create(c"process.json", MFdFlags::MFD_CLOEXEC)?.into();
    file.write_all(process.to_string().as_bytes())?;
    file.rewind()?;
    let kept = rustix::io::fcntl_dupfd_cloexec(&file, FIRST_DESCRIPTOR)
        .or_else(|_| rustix::io::fcntl_dupfd_cloexec(&file, NEXT_BEST_DESCRIPTOR))?;
    rustix::io::fcntl_setfd(&kept, rustix::io::FdFlags::empty())?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use nix::fcntl::{FcntlArg, fcntl};

    use super::*;

    fn attached(mut config: Value) -> Result<Value, String> {
        attach(&mut config, Path::new("/s/job")).map_err(|error| error.to_string())?;
        Ok(config)
    }

    const ENTRY: &str = "CUDA_CHECKPOINT_JOB_FILE=/run/stasis/cuda-job";

    #[test]
    fn config_json_gets_mount_and_variable_once() {
        let config = json!({
            "process": {"env": ["A=1", "CUDA_CHECKPOINT_JOB_FILE_X=y"], "unknown": 1},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "unknown": {"b": 1, "a": 2},
        });
        let once = attached(config).unwrap();
        assert_eq!(once["process"]["env"], json!(["A=1", "CUDA_CHECKPOINT_JOB_FILE_X=y", ENTRY]));
        assert_eq!(once["mounts"].as_array().unwrap().len(), 2);
        assert_eq!(once["mounts"][1]["source"], "/s/job");
        assert_eq!(once["unknown"], json!({"b": 1, "a": 2}));
        // A bundle is started again: the source is another.
        let mut again = once.clone();
        attach(&mut again, Path::new("/t/job")).unwrap();
        assert_eq!(again["mounts"].as_array().unwrap().len(), 2);
        assert_eq!(again["mounts"][1]["source"], "/t/job");
        assert_eq!(again["process"], once["process"]);
    }

    #[test]
    fn what_is_of_another_container_is_taken_out() {
        let config = json!({
            "process": {"env": ["A=1"]},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        });
        let given = attached(config.clone()).unwrap();
        let bundle = tempfile::tempdir().unwrap();
        let path = bundle.path().join("config.json");
        let after = |config: &Value, state: &str| -> Value {
            std::fs::write(&path, config.to_string()).unwrap();
            detach_stale(bundle.path(), Path::new(state)).unwrap();
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
        };
        assert_eq!(after(&given, "/s"), config);
        // A mount that somebody else has put there is theirs.
        assert_eq!(after(&given, "/elsewhere"), given);
        assert_eq!(after(&config, "/s"), config);
        detach_stale(Path::new("/no/such"), Path::new("/s")).unwrap();
    }

    #[test]
    fn little_is_enough_and_nonsense_is_not() {
        let config = attached(json!({"process": {}})).unwrap();
        assert_eq!(config["process"]["env"], json!([ENTRY]));
        for config in [json!({}), json!({"process": []}), json!({"process": {"env": {}}})] {
            assert!(attached(config.clone()).is_err(), "{config}");
        }
        assert!(attached(json!({"process": {}, "mounts": 1})).is_err());
        // Values that are no text are the runtime's to refuse.
        assert!(attached(json!({"process": {"env": [1, null]}})).is_ok());
    }

    #[test]
    fn an_environment_with_another_job_file_contradicts() {
        let config = json!({"process": {"env": ["CUDA_CHECKPOINT_JOB_FILE=/x\n"]}});
        let said = attached(config).unwrap_err();
        assert!(said.contains("dev.stasis.job=file") && !said.contains('\n'), "{said}");
        assert!(attached(json!({"process": {"env": ["CUDA_CHECKPOINT_JOB_FILE="]}})).is_ok());
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn an_exec_gets_the_variable_and_keeps_the_rest() {
        let original =
            file(r#"{"args":["a"],"env":["CUDA_CHECKPOINT_JOB_FILE=/old","B=2"],"x":1}"#);
        let exec = Exec::of(original.path()).unwrap();
        let name = exec.name();
        assert!(exec.file.as_raw_fd() >= FIRST_DESCRIPTOR);
        let text = std::fs::read(Path::new(&name)).unwrap();
        let process: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(process, json!({"args": ["a"], "env": ["B=2", ENTRY], "x": 1}));
        let flags = fcntl(&exec.file, FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags, 0, "it is kept over execve");
    }

    #[test]
    fn an_exec_without_a_process_is_refused() {
        for text in ["", "[]", r#"{"env": 1}"#] {
            let original = file(text);
            let said = Exec::of(original.path()).err().unwrap().to_string();
            assert!(said.starts_with("cannot read /"), "{said}");
        }
        assert!(Exec::of(Path::new("/no/such")).is_err());
    }
}
