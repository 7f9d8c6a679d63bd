//! Whose containers they are, and the names that people know them by. No OCI runtime knows names:
//! every engine keeps them in a place of its own.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::files::read_regular;
use crate::spec;

/// Who runs a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// containerd's clients, nerdctl among them.
    Containerd,
    /// Docker.
    Docker,
    /// Kubernetes, through containerd.
    Kubernetes,
    /// Podman.
    Podman,
    /// crun, called by whomever.
    Crun,
    /// runc, called by whomever.
    Runc,
    /// Nobody: a cgroup that is no container.
    Nobody,
}

/// A larger file than this is none that an engine keeps: one of Podman's names all of its containers, in
/// about a kilobyte each.
const MAX_BYTES: u64 = 64 << 20;

/// A name is at most so long: two of Kubernetes with a `/`, each a DNS name.
const LONGEST: usize = 2 * 253 + 1;

impl Engine {
    /// As far as root directory of the runtime and bundle tell.
    #[must_use]
    pub fn of(root: &Path, bundle: &Path) -> Self {
        if is_podmans(bundle) {
            return Self::Podman;
        }
        match root.to_string_lossy().as_ref() {
            // The second where it knows the runtime by a shim's name: containerd's namespace of Docker.
            root if root.contains("/docker/") || root.ends_with("/containerd/runc/moby") => {
                Self::Docker
            }
            root if root.ends_with("/k8s.io") => Self::Kubernetes,
            root if root.contains("/containerd/") => Self::Containerd,
            root if root.ends_with("/crun") => Self::Crun,
            root if root == crate::containers::CGROUPS => Self::Nobody,
            _ => Self::Runc,
        }
    }

    /// As `stasis ps` shows it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Docker => "docker",
            Self::Kubernetes => "kubernetes",
            Self::Podman => "podman",
            Self::Crun => "crun",
            Self::Runc => "runc",
            Self::Nobody => "cgroup",
        }
    }

    /// The name that the container with this id has now, if it has one and the engine's files tell it:
    /// as `docker ps`, `podman ps` and `nerdctl ps` show it, or a pod's and a container's with a `/`
    /// between them.
    #[must_use]
    pub fn name(self, id: &str, bundle: &Path) -> Option<String> {
        let found = match self {
            Self::Docker => of_docker(id, bundle),
            Self::Podman => of_podman(id, bundle),
            Self::Containerd => spec::annotations(bundle).remove("nerdctl/name"),
            Self::Kubernetes => of_kubernetes(&spec::annotations(bundle)),
            Self::Crun | Self::Runc | Self::Nobody => None,
        };
        found.filter(|name| is_plain(name))
    }
}

/// `STORAGE/DRIVER-containers/ID/userdata`, with the driver of the storage: overlay, vfs, btrfs, zfs.
fn is_podmans(bundle: &Path) -> bool {
    let mut names = bundle.iter().rev().map(|name| name.to_string_lossy());
    names.next().is_some_and(|name| name == "userdata")
        && names.nth(1).is_some_and(|name| name.ends_with("-containers"))
}

/// What all engines allow, and no more: it is shown on terminals.
fn is_plain(name: &str) -> bool {
    let plain = |character: char| character.is_ascii_alphanumeric() || "_.-/".contains(character);
    !name.is_empty() && name.len() <= LONGEST && name.chars().all(plain)
}

/// Docker mounts the container's files from `DATA-ROOT/containers/ID`, where `config.v2.json` is, too
/// (moby: daemon/container `CheckpointTo`). The data root itself stands nowhere in a bundle.
fn of_docker(id: &str, bundle: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct State {
        #[serde(rename = "Name")]
        name: String,
    }
    let spec = spec::load(bundle).ok()?;
    let sources = spec.mounts().iter().flatten().filter_map(|mount| mount.source().as_deref());
    // With another container's network its files are mounted, and of this one only what lies deeper.
    let mut directories = sources.flat_map(Path::ancestors);
    let directory = directories.find(|directory| {
        directory.ends_with(Path::new("containers").join(id)) && directory.is_absolute()
    })?;
    let text = read_regular(&directory.join("config.v2.json"), MAX_BYTES).ok()?;
    let state: State = serde_json::from_slice(&text).ok()?;
    Some(state.name.trim_start_matches('/').to_owned())
}

/// The storage's lists of containers lie above those (containers/storage: `containerLocations`).
fn of_podman(id: &str, bundle: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Stored {
        id: String,
        #[serde(default)]
        names: Option<Vec<String>>,
    }
    let directory = bundle.parent()?.parent()?;
    let lists = ["containers.json", "volatile-containers.json"].into_iter().filter_map(|list| {
        let text = read_regular(&directory.join(list), MAX_BYTES).ok()?;
        serde_json::from_slice::<Vec<Stored>>(&text).ok()
    });
    lists.flatten().find(|stored| stored.id == id)?.names?.into_iter().next()
}

/// containerd: internal/cri/annotations. A pod's sandbox has no container's name.
fn of_kubernetes(annotations: &BTreeMap<String, String>) -> Option<String> {
    let pod = annotations.get("io.kubernetes.cri.sandbox-name")?;
    let container = annotations.get("io.kubernetes.cri.container-name")?;
    Some(format!("{pod}/{container}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn whose_it_is_stands_in_its_paths() {
        let of = |root: &str, bundle: &str| Engine::of(Path::new(root), Path::new(bundle)).word();
        assert_eq!(of("/run/docker/runtime-runc/moby", "/b"), "docker");
        assert_eq!(of("/run/containerd/runc/moby", "/b"), "docker");
        assert_eq!(of("/run/containerd/runc/k8s.io", "/b"), "kubernetes");
        assert_eq!(of("/run/containerd/runc/default", "/b"), "containerd");
        for driver in ["overlay", "vfs"] {
            let storage = format!("/var/lib/containers/storage/{driver}-containers/x/userdata");
            assert_eq!(of("/run/runc", &storage), "podman");
        }
        assert_eq!(of("/run/runc", "/x-containers/userdata"), "runc");
        assert_eq!(of("/run/crun", "/b"), "crun");
        assert_eq!(of("/elsewhere", "/b"), "runc");
        assert_eq!(of("/sys/fs/cgroup", ""), "cgroup");
    }

    fn annotated(engine: Engine, annotations: &Value) -> Option<String> {
        let bundle = tempfile::tempdir().unwrap();
        let config = json!({"ociVersion": "1.0.2", "annotations": annotations});
        fs::write(bundle.path().join("config.json"), config.to_string()).unwrap();
        engine.name("c1", bundle.path())
    }

    #[test]
    fn nerdctl_and_kubernetes_write_names_into_annotations() {
        let nerdctls = json!({"nerdctl/name": "web"});
        assert_eq!(annotated(Engine::Containerd, &nerdctls).unwrap(), "web");
        // Where it is not theirs it is anybody's.
        for other in [Engine::Docker, Engine::Kubernetes, Engine::Podman, Engine::Runc] {
            assert_eq!(annotated(other, &nerdctls), None);
        }
        for bad in ["", "a b", "\u{1b}[2J", "ä", &"x".repeat(LONGEST + 1)] {
            assert_eq!(annotated(Engine::Containerd, &json!({"nerdctl/name": bad})), None, "{bad}");
        }
        let sandbox = json!({"io.kubernetes.cri.sandbox-name": "pod"});
        assert_eq!(annotated(Engine::Kubernetes, &sandbox), None);
        let both = json!({
            "io.kubernetes.cri.sandbox-name": "pod",
            "io.kubernetes.cri.container-name": "train",
        });
        assert_eq!(annotated(Engine::Kubernetes, &both).unwrap(), "pod/train");
    }

    #[test]
    fn docker_keeps_it_beside_the_files_that_it_mounts() {
        let host = tempfile::tempdir().unwrap();
        let of = |id: &str, mounted: &Path| {
            let mount = |destination: &str, source: &Path| json!({"destination": destination, "type": "bind", "source": source});
            let config = json!({"ociVersion": "1.0.2", "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                mount("/data", host.path()),
                mount("/etc/hosts", &mounted.join("hosts")),
            ]});
            fs::write(host.path().join("config.json"), config.to_string()).unwrap();
            Engine::Docker.name(id, host.path())
        };
        let own = host.path().join("data/containers/abc");
        fs::create_dir_all(&own).unwrap();
        assert_eq!(of("abc", &own), None);
        fs::write(own.join("config.v2.json"), r#"{"ID":"abc","Name":"/web"}"#).unwrap();
        assert_eq!(of("abc", &own).unwrap(), "web");
        // With the network of another container.
        let deeper = host.path().join("data/containers/abc/mounts");
        assert_eq!(of("abc", &deeper).unwrap(), "web");
        // Another container's, mounted into this one.
        assert_eq!(of("abcd", &own), None);
        fs::write(own.join("config.v2.json"), "[]").unwrap();
        assert_eq!(of("abc", &own), None);
    }

    #[test]
    fn podman_keeps_it_in_its_storage() {
        let host = tempfile::tempdir().unwrap();
        let lists = host.path().join("overlay-containers");
        let name = |id: &str| {
            let bundle = lists.join(id).join("userdata");
            fs::create_dir_all(&bundle).unwrap();
            Engine::of(Path::new("/run/runc"), &bundle).name(id, &bundle)
        };
        assert_eq!(name("a"), None);
        let list = json!([{"id": "a", "names": ["web", "other"]}, {"id": "b"}, {"id": "c", "names": null}]);
        fs::write(lists.join("containers.json"), list.to_string()).unwrap();
        assert_eq!(name("a").unwrap(), "web");
        assert_eq!((name("b"), name("c"), name("d")), (None, None, None));
        let volatile = json!([{"id": "d", "names": ["gone-with-rm"]}]);
        fs::write(lists.join("volatile-containers.json"), volatile.to_string()).unwrap();
        assert_eq!(name("d").unwrap(), "gone-with-rm");
    }
}
