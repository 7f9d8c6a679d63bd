//! `delete`: containerd has lost a container's server, or is done with the container.
//!
//! It comes after every task, also one that was deleted in the regular way, and while the group's
//! server still serves others. What cannot be removed is told as warnings, which containerd logs:
//! it needs an answer to forget the container.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Output;

use containerd_shim::api::DeleteResponse;
use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim::protos::protobuf::{self, Message as _};
use stasis_config::text::printable;

use super::address::{Address, gos_path, group};
use super::start::noted_address;
use super::{Arguments, socket};
use crate::bundle::{PID_FILE, ROOTFS, RUNTIME_LOG, unmount};
use crate::options::spec::Spec;
use crate::options::{OptionsError, Recorded};
use crate::process::KILLED;

/// A call of the runtime: kill the container if it lives, and forget it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeleteCall {
    /// The runtime: a name that is looked up in PATH, or an absolute path.
    pub program: PathBuf,
    /// Its root directory, with the namespace.
    pub root: PathBuf,
    /// Where it logs; `None` if there is no bundle any more.
    pub log: Option<PathBuf>,
    /// The configuration of Stasis for this container; `None`: this host's.
    pub config: Option<PathBuf>,
    /// The container.
    pub id: String,
}

impl DeleteCall {
    /// The runtime's arguments: those of containerd's shim.
    #[must_use]
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["--root".into(), self.root.clone().into()];
        if let Some(log) = &self.log {
            arguments.extend(["--log".into(), log.clone().into()]);
            arguments.extend(["--log-format".into(), "json".into()]);
        }
        arguments.extend(["delete".into(), "--force".into(), self.id.clone().into()]);
        arguments
    }
}

/// What `delete` has to say.
#[derive(Debug)]
pub struct Deleted {
    /// For standard output.
    pub answer: Vec<u8>,
    /// For standard error, a line each.
    pub warnings: Vec<String>,
}

/// Why nothing was deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// What the server has noted in the bundle.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The answer.
    #[error("cannot encode the answer")]
    Encode(#[from] protobuf::Error),
}

/// Removes what a container has left. `working_directory` is what it was called in, another
/// container's bundle if need be; `run` calls the runtime and waits for it.
pub fn delete(
    arguments: &Arguments,
    working_directory: &Path,
    run: impl FnOnce(&DeleteCall) -> io::Result<Output>,
) -> Result<Deleted, DeleteError> {
    let bundle =
        arguments.bundle.clone().unwrap_or_else(|| working_directory.with_file_name(&arguments.id));
    let mut warnings = Vec::new();
    let mut warn = |warning: String| warnings.push(printable(&warning, 4096));

    let recorded = Recorded::read(&bundle)?;
    let call = DeleteCall {
        program: recorded.program,
        root: recorded.root.join(&arguments.namespace),
        log: bundle.is_dir().then(|| bundle.join(RUNTIME_LOG)),
        config: recorded.config,
        id: arguments.id.clone(),
    };
    let program = call.program.display();
    match run(&call) {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let words = [output.stdout, output.stderr].concat();
            let words = String::from_utf8_lossy(&words);
            warn(format!("{program} delete: {}: {}", output.status, words.trim()));
        }
        Err(error) => warn(format!("{program} cannot be started: {error}")),
    }
    if let Err(error) = unmount(&bundle.join(ROOTFS)) {
        warn(format!("cannot unmount {}: {error}", bundle.join(ROOTFS).display()));
    }
    if let Err(error) = remove_socket(&bundle, arguments) {
        warn(format!("cannot remove the lost server's socket: {error}"));
    }
    let pid = init_pid(&bundle).unwrap_or_else(|error| {
        warn(format!("cannot read {}: {error}", bundle.join(PID_FILE).display()));
        0
    });

    let response = DeleteResponse {
        pid,
        // There is no other status to tell.
        exit_status: KILLED,
        exited_at: Some(Timestamp::now()).into(),
        ..DeleteResponse::default()
    };
    Ok(Deleted { answer: response.write_to_bytes()?, warnings })
}

/// The container's init process, which containerd puts into its exit event; 0 if there never was
/// one.
fn init_pid(bundle: &Path) -> io::Result<u32> {
    match fs::read_to_string(bundle.join(PID_FILE)) {
        Ok(text) => {
            text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// A server that was killed leaves its socket. Only what was made by us is touched.
fn remove_socket(bundle: &Path, arguments: &Arguments) -> io::Result<()> {
    let (Some(noted), Ok(spec)) = (noted_address(bundle), Spec::read(bundle)) else {
        return Ok(());
    };
    let path = Path::new(noted.strip_prefix("unix://").unwrap_or(&noted));
    let group = group(&spec, &arguments.id);
    let directory = path.parent().unwrap_or(path);
    let ours = Address::new(directory, &arguments.address, &arguments.namespace, group);
    if !ours.is_ok_and(|ours| ours.path() == path) {
        return Ok(());
    }
    let name = gos_path(directory, &arguments.address, &arguments.namespace, &spec);
    socket::remove_leftover(path, name.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::Action;
    use crate::boot::socket::{Claimed, claim};
    use std::process::Command;

    fn arguments(bundle: Option<&Path>) -> Arguments {
        Arguments {
            action: Action::Delete,
            namespace: "n".into(),
            id: "c1".into(),
            address: "/c.sock".into(),
            socket: None,
            bundle: bundle.map(Path::to_owned),
            debug: false,
        }
    }

    fn run(call: &DeleteCall) -> io::Result<Output> {
        Command::new(&call.program).args(call.arguments()).output()
    }

    /// A bundle whose runtime is this script.
    fn bundle(script: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let bundle = directory.path().join("c1");
        fs::create_dir_all(bundle.join("rootfs")).unwrap();
        let runtime = bundle.join("runc");
        crate::testing::script(&runtime, &format!("#!/bin/sh\n{script}\n"));
        fs::write(bundle.join("runtime"), runtime.to_str().unwrap()).unwrap();
        directory
    }

    fn response(deleted: &Deleted) -> DeleteResponse {
        DeleteResponse::parse_from_bytes(&deleted.answer).unwrap()
    }

    #[test]
    fn the_runtime_that_was_noted_is_called_as_gos_shim_would() {
        let directory = bundle("echo \"$@\" > \"$(dirname \"$0\")/called\"");
        let bundle = directory.path().join("c1");
        fs::write(bundle.join("options.json"), r#"{"root":"/run/r","binary_name":"x"}"#).unwrap();
        fs::write(bundle.join("init.pid"), "4711").unwrap();
        let deleted = delete(&arguments(Some(&bundle)), Path::new("/"), run).unwrap();
        assert_eq!(deleted.warnings, Vec::<String>::new());
        assert_eq!(
            fs::read_to_string(bundle.join("called")).unwrap().trim(),
            format!(
                "--root /run/r/n --log {}/log.json --log-format json delete --force c1",
                bundle.display()
            )
        );
        let response = response(&deleted);
        assert_eq!((response.pid, response.exit_status), (4711, 137));
        let now = Timestamp::now().seconds;
        assert!((now - 60..=now).contains(&response.exited_at.seconds));
    }

    #[test]
    fn without_the_flag_the_bundle_is_beside_the_working_directory() {
        let directory = bundle("exit 0");
        fs::write(directory.path().join("c1/init.pid"), "7\n").unwrap();
        let elsewhere = directory.path().join("other");
        let deleted = delete(&arguments(None), &elsewhere, run).unwrap();
        assert_eq!((response(&deleted).pid, deleted.warnings.len()), (7, 0));
    }

    #[test]
    fn a_container_that_never_was_is_no_error() {
        let asked = |call: &DeleteCall| {
            assert_eq!(call.program, Path::new("runc"));
            assert_eq!(call.root, Path::new("/run/containerd/runc/n"));
            assert_eq!(
                call.arguments(),
                ["--root", "/run/containerd/runc/n", "delete", "--force", "c1"]
            );
            Command::new("true").output()
        };
        let deleted = delete(&arguments(Some(Path::new("/none/c1"))), Path::new("/"), asked);
        let deleted = deleted.unwrap();
        assert_eq!(response(&deleted).pid, 0);
        assert_eq!(deleted.warnings, Vec::<String>::new());
    }

    #[test]
    fn what_fails_is_a_warning_and_the_rest_goes_on() {
        let directory = bundle("echo no >&2; exit 3");
        let bundle = directory.path().join("c1");
        fs::write(bundle.join("init.pid"), "none").unwrap();
        let deleted = delete(&arguments(Some(&bundle)), Path::new("/"), run).unwrap();
        assert_eq!((response(&deleted).pid, response(&deleted).exit_status), (0, 137));
        let warnings = deleted.warnings.join("\n");
        assert!(warnings.contains("runc delete: exit status: 3: no\n"), "{warnings}");
        assert!(warnings.contains("init.pid"), "{warnings}");
        fs::write(bundle.join("runtime"), "/none").unwrap();
        let deleted = delete(&arguments(Some(&bundle)), Path::new("/"), run).unwrap();
        assert!(deleted.warnings[0].starts_with("/none cannot be started"));
    }

    #[test]
    fn what_is_mounted_on_the_rootfs_and_below_is_unmounted() {
        use nix::mount::{MsFlags, mount};

        let directory = bundle("exit 0");
        let rootfs = directory.path().join("c1/rootfs");
        let tmpfs =
            |path: &Path| mount(Some("none"), path, Some("tmpfs"), MsFlags::empty(), None::<&str>);
        if tmpfs(&rootfs) == Err(nix::errno::Errno::EPERM) {
            eprintln!("skipped: this user may not mount");
            return;
        }
        tmpfs(&rootfs).unwrap();
        fs::create_dir(rootfs.join("below")).unwrap();
        tmpfs(&rootfs.join("below")).unwrap();
        // A name that only begins the same.
        let other = directory.path().join("c1/rootfs2");
        fs::create_dir(&other).unwrap();
        tmpfs(&other).unwrap();
        // As /var/run is one.
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();

        let deleted = delete(&arguments(Some(&link.join("c1"))), Path::new("/"), run).unwrap();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        nix::mount::umount(&other).unwrap();
        assert_eq!(deleted.warnings, Vec::<String>::new());
        let ours = directory.path().to_str().unwrap();
        let left: Vec<_> = mounts.lines().filter(|line| line.contains(ours)).collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[test]
    fn nothing_is_deleted_by_guessing() {
        let directory = bundle("exit 0");
        let bundle = directory.path().join("c1");
        fs::write(bundle.join("options.json"), "{\"root\":").unwrap();
        let never = |_: &DeleteCall| -> io::Result<Output> { panic!("called") };
        let failed = delete(&arguments(Some(&bundle)), Path::new("/"), never);
        assert!(matches!(failed, Err(DeleteError::Options(_))));
    }

    #[test]
    fn the_socket_of_a_lost_server_goes_and_that_of_a_live_one_stays() {
        let directory = bundle("exit 0");
        let bundle = directory.path().join("c1");
        fs::write(bundle.join("config.json"), "{}").unwrap();
        let address = Address::new(directory.path(), "/c.sock", "n", "c1").unwrap();
        fs::write(bundle.join("address"), address.to_string()).unwrap();
        let Claimed::Ours(listening) = claim(address.path()).unwrap() else { panic!("taken") };
        let call = || delete(&arguments(Some(&bundle)), Path::new("/"), run).unwrap();
        assert!(call().warnings.is_empty() && address.path().exists());
        listening.keep();
        // One that is not ours by its name stays too.
        let other = directory.path().join("other");
        fs::rename(address.path(), &other).unwrap();
        fs::write(bundle.join("address"), format!("unix://{}", other.display())).unwrap();
        assert!(call().warnings.is_empty() && other.exists());
        fs::rename(&other, address.path()).unwrap();
        fs::write(bundle.join("address"), address.to_string()).unwrap();
        assert!(call().warnings.is_empty() && !address.path().exists());
    }
}
