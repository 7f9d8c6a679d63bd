//! The GPU's device nodes in a restored container.
//!
//! /dev is a tmpfs, so CRIU brings its nodes back with the numbers that they had where the image
//! was made. Some are not the same everywhere: the kernel gives nvidia-uvm a new major number at
//! each boot. What config.json says is put in their place, as the runtime would have made them for
//! a new container.
//!
//! The container runs already and is not trusted: nothing here follows a link, leaves /dev or
//! crosses a mount, and what was made is reached by a descriptor and not by its name again.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Component, Path};

use oci_spec::runtime::{LinuxDevice, LinuxNamespaceType, Spec};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags,
};
use rustix::io::Errno;

use super::numbers::Numbers;
use crate::spec;

/// Why a node cannot be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum NodeError {
    /// A system call.
    #[error("cannot make {path} in the container: {action}")]
    Call {
        /// The node.
        path: String,
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: Errno,
    },
    /// Another reason.
    #[error("cannot make {path} in the container: {reason}")]
    Refused {
        /// The node.
        path: String,
        /// Why not.
        reason: &'static str,
    },
}

/// The permissions of a node for which config.json names none, as runc has it.
const MODE: u32 = 0o666;

/// Makes each GPU node of `spec` what it says, below `root`, a container's root directory.
pub(super) fn repair(root: BorrowedFd<'_>, spec: &Spec) -> Result<(), NodeError> {
    let mounts = spec.mounts().iter().flatten();
    let bind = |option: &String| option == "bind" || option == "rbind";
    let is_bind = mounts.filter(|mount| mount.destination() == Path::new("/dev")).any(|mount| {
        mount.options().iter().flatten().any(bind) || mount.typ().as_deref() == Some("bind")
    });
    // The host's own /dev, or a directory of its: not the container's and not ours to change.
    if is_bind {
        return Ok(());
    }
    let gpu = spec::gpu_devices(spec);
    let linux = spec.linux().as_ref();
    let devices = linux.and_then(|linux| linux.devices().as_deref()).unwrap_or_default();
    for path in &gpu {
        let Some(device) = devices.iter().find(|device| device.path() == Path::new(path)) else {
            continue;
        };
        Node { path, device, root, in_user_namespace: in_user_namespace(spec) }.repair()?;
    }
    Ok(())
}

/// There runc binds the host's nodes in place of making some, and the kernel lets none be used
/// that are made there.
fn in_user_namespace(spec: &Spec) -> bool {
    let namespaces = spec.linux().as_ref().and_then(|linux| linux.namespaces().as_ref());
    namespaces.into_iter().flatten().any(|namespace| namespace.typ() == LinuxNamespaceType::User)
}

/// A node that has to be there.
struct Node<'a> {
    path: &'a str,
    device: &'a LinuxDevice,
    root: BorrowedFd<'a>,
    in_user_namespace: bool,
}

impl Node<'_> {
    fn failed(&self, action: &'static str) -> impl FnOnce(Errno) -> NodeError + '_ {
        move |source| NodeError::Call { path: self.path.to_owned(), action, source }
    }

    fn refused(&self, reason: &'static str) -> NodeError {
        NodeError::Refused { path: self.path.to_owned(), reason }
    }

    fn repair(&self) -> Result<(), NodeError> {
        let below = Path::new(self.path).strip_prefix("/dev").unwrap_or(Path::new(""));
        let mut names: Vec<&OsStr> = Vec::new();
        for part in below.components() {
            let Component::Normal(name) = part else {
                return Err(self.refused("its path is not a plain one below /dev"));
            };
            names.push(name);
        }
        let Some((name, parents)) = names.split_last() else {
            return Err(self.refused("its path is not a plain one below /dev"));
        };
        let mut directory = open_directory(self.root, OsStr::new("dev"), ResolveFlags::IN_ROOT)
            .map_err(self.failed("open /dev"))?;
        // However config.json spells it, or an image links to it: the host's is not ours to change.
        if is_hosts(&directory) {
            return Ok(());
        }
        for parent in parents {
            directory = match self.enter(&directory, parent) {
                // Somebody's volume.
                Err(Errno::XDEV) => return Ok(()),
                entered => entered.map_err(self.failed("open its directory"))?,
            };
        }
        let wanted = Numbers::of_spec(self.device);
        match stat(&directory, name) {
            Ok(found) if is_mount(&found, &directory) => return Ok(()),
            Ok(found) if numbers(&found) == Some(wanted) => return Ok(()),
            Ok(_) | Err(Errno::NOENT) => {}
            Err(error) => return Err(self.failed("look at it")(error)),
        }
        if self.in_user_namespace {
            return Err(self.refused(
                "it differs from what config.json says, and in a user namespace no device can be \
                 made",
            ));
        }
        self.make(&directory, name, wanted)
    }

    fn enter(&self, directory: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
        match open_directory(directory.as_fd(), name, resolve) {
            Err(Errno::NOENT) if !self.in_user_namespace => {
                match rustix::fs::mkdirat(directory, name, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error),
                }
                open_directory(directory.as_fd(), name, resolve)
            }
            opened => opened,
        }
    }

    /// Under another name first, so that at any moment there is the old node or the new one.
    fn make(&self, directory: &OwnedFd, name: &OsStr, wanted: Numbers) -> Result<(), NodeError> {
        let temporary = format!(".stasis-{}", std::process::id());
        let _ = rustix::fs::unlinkat(directory, &temporary, AtFlags::empty());
        let made = self.make_at(directory, &temporary, wanted).and_then(|()| {
            rustix::fs::renameat(directory, &temporary, directory, name)
                .map_err(self.failed("put it in its place"))
        });
        if made.is_err() {
            let _ = rustix::fs::unlinkat(directory, &temporary, AtFlags::empty());
        }
        made?;
        match stat(directory, name) {
            Ok(found) if numbers(&found) == Some(wanted) => Ok(()),
            _ => Err(self.refused("something in the container replaced it")),
        }
    }

    fn make_at(&self, directory: &OwnedFd, name: &str, wanted: Numbers) -> Result<(), NodeError> {
        let kind = match wanted.kind {
            'b' => FileType::BlockDevice,
            'p' => FileType::Fifo,
            _ => FileType::CharacterDevice,
        };
        let (Ok(major), Ok(minor)) = (u32::try_from(wanted.major), u32::try_from(wanted.minor))
        else {
            return Err(self.refused("its numbers are not possible"));
        };
        let number = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(directory, name, kind, Mode::from_raw_mode(0o600), number)
            .map_err(self.failed("mknod"))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let node = rustix::fs::openat(directory, name, flags, Mode::empty())
            .map_err(self.failed("open it"))?;
        let found = stat(&node, OsStr::new("")).map_err(self.failed("look at it"))?;
        if numbers(&found) != Some(wanted) {
            return Err(self.refused("something in the container replaced it"));
        }
        let (uid, gid) = (self.device.uid().unwrap_or(0), self.device.gid().unwrap_or(0));
        let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
        rustix::fs::chownat(&node, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
            .map_err(self.failed("chown"))?;
        // There is no chmod for a descriptor of this kind but this one.
        let itself = format!("/proc/self/fd/{}", node.as_raw_fd());
        let mode = Mode::from_raw_mode(self.device.file_mode().unwrap_or(MODE) & 0o7777);
        rustix::fs::chmod(itself, mode).map_err(self.failed("chmod"))
    }
}

/// Whether a directory is this host's /dev.
fn is_hosts(directory: &OwnedFd) -> bool {
    let Ok(host) = rustix::fs::stat("/dev") else { return false };
    rustix::fs::fstat(directory)
        .is_ok_and(|found| (found.st_dev, found.st_ino) == (host.st_dev, host.st_ino))
}

fn open_directory(
    at: BorrowedFd<'_>,
    name: &OsStr,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = resolve | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(at, name, flags, Mode::empty(), resolve)
}

/// The empty name is the descriptor itself.
fn stat(at: &OwnedFd, name: &OsStr) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    rustix::fs::statx(at, name, flags, StatxFlags::BASIC_STATS)
}

/// Whether something is mounted there: a node that the runtime bound.
fn is_mount(found: &Statx, directory: &OwnedFd) -> bool {
    let device = |stat: &Statx| (stat.stx_dev_major, stat.stx_dev_minor);
    // Kernels before 5.8 do not tell; a bound node is on another file system.
    let elsewhere =
        stat(directory, OsStr::new("")).is_ok_and(|parent| device(&parent) != device(found));
    found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) || elsewhere
}

fn numbers(found: &Statx) -> Option<Numbers> {
    let (major, minor) = (found.stx_rdev_major.into(), found.stx_rdev_minor.into());
    match FileType::from_raw_mode(found.stx_mode.into()) {
        FileType::CharacterDevice => Some(Numbers { kind: 'c', major, minor }),
        FileType::BlockDevice => Some(Numbers { kind: 'b', major, minor }),
        FileType::Fifo => Some(Numbers { kind: 'p', major: 0, minor: 0 }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};

    use serde_json::{Value, json};

    use super::*;

    /// FIFOs stand for devices: anybody can make them.
    fn spec(path: &str, more: &Value) -> Spec {
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        let mut text = json!({
            "ociVersion": "1.0.2", "root": {"path": "rootfs"},
            "mounts": [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}],
            "linux": {"devices": [
                {"path": "/dev/other", "type": "p"},
                {"path": path, "type": "p", "fileMode": 0o640, "uid": uid, "gid": gid},
            ]},
        });
        for (key, value) in more.as_object().unwrap() {
            *text.pointer_mut(key).unwrap() = value.clone();
        }
        serde_json::from_value(text).unwrap()
    }

    fn run(root: &Path, spec: &Spec) -> Result<(), String> {
        let root = File::open(root).unwrap();
        repair(root.as_fd(), spec).map_err(|error| crate::error::chain(&error))
    }

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        root
    }

    #[test]
    fn a_missing_node_is_made_with_its_directory() {
        let root = root();
        let path = "/dev/nvidia-caps/nvidia-cap1";
        run(root.path(), &spec(path, &json!({}))).unwrap();
        let node = root.path().join("dev/nvidia-caps/nvidia-cap1");
        let made = node.metadata().unwrap();
        assert!(made.file_type().is_fifo());
        assert_eq!(made.mode() & 0o7777, 0o640);
        assert_eq!(fs::read_dir(node.parent().unwrap()).unwrap().count(), 1, "only the node");
        assert_eq!(fs::read_dir(root.path().join("dev")).unwrap().count(), 1, "GPU nodes only");
        // What is as it should be stays: the same file, also with another mode.
        fs::set_permissions(&node, fs::Permissions::from_mode(0o600)).unwrap();
        run(root.path(), &spec(path, &json!({}))).unwrap();
        let after = node.metadata().unwrap();
        assert_eq!((after.ino(), after.mode() & 0o7777), (made.ino(), 0o600));
    }

    #[test]
    fn the_hosts_own_dev_is_left_alone_however_it_is_spelled() {
        for destination in ["/dev", "dev", "/x/../dev"] {
            let bind = json!({"/mounts": [{"destination": destination, "source": "/dev"}]});
            run(Path::new("/"), &spec("/dev/nvidia-stasis-test", &bind)).unwrap();
            let made = Path::new("/dev/nvidia-stasis-test");
            assert!(!made.exists() || fs::remove_file(made).is_err(), "{destination}");
        }
    }

    #[test]
    fn something_else_in_its_place_is_replaced_and_no_link_followed() {
        let root = root();
        let victim = root.path().join("victim");
        fs::write(&victim, "mine").unwrap();
        let before = victim.metadata().unwrap().mode();
        let node = root.path().join("dev/nvidia0");
        symlink(&victim, &node).unwrap();
        run(root.path(), &spec("/dev/nvidia0", &json!({}))).unwrap();
        assert!(node.symlink_metadata().unwrap().file_type().is_fifo());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
        assert_eq!(victim.metadata().unwrap().mode(), before);
        // A trap under the name that is used on the way.
        fs::remove_file(&node).unwrap();
        let trap = root.path().join(format!("dev/.stasis-{}", std::process::id()));
        symlink(&victim, &trap).unwrap();
        run(root.path(), &spec("/dev/nvidia0", &json!({}))).unwrap();
        assert!(!trap.is_symlink());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
    }

    #[test]
    fn it_does_not_leave_dev() {
        let root = root();
        let outside = tempfile::tempdir().unwrap();
        symlink(outside.path(), root.path().join("dev/nvidia-caps")).unwrap();
        let error = run(root.path(), &spec("/dev/nvidia-caps/x", &json!({}))).unwrap_err();
        assert!(error.contains("open its directory"), "{error}");
        let error = run(root.path(), &spec("/dev/nvidia/../../../x", &json!({}))).unwrap_err();
        assert!(error.contains("not a plain one"), "{error}");
        fs::rename(root.path().join("dev"), root.path().join("old")).unwrap();
        symlink(outside.path(), root.path().join("dev")).unwrap();
        let error = run(root.path(), &spec("/dev/nvidia0", &json!({}))).unwrap_err();
        assert!(error.contains("open /dev"), "{error}");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_in_its_place_is_told_and_nothing_left() {
        let root = root();
        fs::create_dir(root.path().join("dev/nvidia0")).unwrap();
        let error = run(root.path(), &spec("/dev/nvidia0", &json!({}))).unwrap_err();
        assert!(error.contains("cannot make /dev/nvidia0 in the container: put it"), "{error}");
        assert_eq!(fs::read_dir(root.path().join("dev")).unwrap().count(), 1);
    }

    #[test]
    fn the_hosts_dev_and_user_namespaces_are_left_alone() {
        let root = root();
        let bind =
            json!({"/mounts": [{"destination": "/dev", "source": "/dev", "options": ["rbind"]}]});
        run(root.path(), &spec("/dev/nvidia0", &bind)).unwrap();
        assert_eq!(fs::read_dir(root.path().join("dev")).unwrap().count(), 0);
        let mut text = serde_json::to_value(spec("/dev/nvidia0", &json!({}))).unwrap();
        text["linux"]["namespaces"] = json!([{"type": "user"}]);
        let user: Spec = serde_json::from_value(text).unwrap();
        let error = run(root.path(), &user).unwrap_err();
        assert!(error.contains("user namespace"), "{error}");
        nix::unistd::mkfifo(&root.path().join("dev/nvidia0"), nix::sys::stat::Mode::S_IRWXU)
            .unwrap();
        run(root.path(), &user).unwrap();
    }

    #[test]
    fn a_mounted_node_is_left_alone() {
        // procfs is a mount of its own in every namespace that tests run in.
        let (root, proc) = (File::open("/").unwrap(), OsStr::new("proc"));
        let root = OwnedFd::from(root);
        assert!(is_mount(&stat(&root, proc).unwrap(), &root));
        let here = tempfile::tempdir().unwrap();
        fs::write(here.path().join("file"), "").unwrap();
        let here = OwnedFd::from(File::open(here.path()).unwrap());
        assert!(!is_mount(&stat(&here, OsStr::new("file")).unwrap(), &here));
    }
}
