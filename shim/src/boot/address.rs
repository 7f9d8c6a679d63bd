//! Which containers share a server, and where its socket is.

use std::path::{Path, PathBuf};

use crate::options::spec::Spec;

/// The annotations that name a group, the first one wins: those of containerd's own shim. The
/// second is on all containers of a pod.
const GROUPS: [&str; 2] = ["io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"];

/// Where containerd has its shims' sockets.
pub(super) const DIRECTORY: &str = "/run/containerd/s";

/// The scheme of addresses.
const SCHEME: &str = "unix://";

/// Room for a socket's path; containerd's limit.
const MAX_PATH: usize = 106;

/// The path is too long for a socket.
#[derive(Debug, thiserror::Error)]
#[error("the socket's path {} has more than {MAX_PATH} bytes", .0.display())]
pub struct TooLong(PathBuf);

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address(PathBuf);

impl Address {
    /// That of the container's group in `directory`; `containerd` is the address of containerd's
    /// own socket.
    ///
    /// The name is a hash of its own and not that of containerd's shim: on a node that is
    /// switched to this runtime, a pod whose server is still that one would otherwise get its new
    /// containers from there, without CUDA.
    pub(super) fn new(
        directory: &Path,
        containerd: &str,
        namespace: &str,
        group: &str,
    ) -> Result<Self, TooLong> {
        // The group comes from the container's creator; a path in it must not reach another
        // namespace's server.
        let group = group.replace('%', "%25").replace('/', "%2F");
        let whole =
            containerd_shim::socket_address(containerd, namespace, &format!("{group}/stasis"));
        let hash = whole.rsplit('/').next().unwrap_or_default();
        let path = directory.join(hash);
        if path.as_os_str().len() > MAX_PATH { Err(TooLong(path)) } else { Ok(Self(path)) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SCHEME}{}", self.0.display())
    }
}

/// Where containerd's own shim would have the server of this container's pod, in the directory of
/// ours; `None` if the container is in no pod.
///
/// A container that CRI restores is created without the runtime class's `runtime_path`: containerd
/// runs whatever PATH has as `containerd-shim-runc-v2`, and that one looks here for the pod's
/// server. The pod is ours, so the name is free, and leads to us.
pub(super) fn gos_path(
    directory: &Path,
    containerd: &str,
    namespace: &str,
    spec: &Spec,
) -> Option<PathBuf> {
    let [group, pod] = GROUPS.map(|name| spec.annotation(name));
    let pod = pod.filter(|pod| group.is_none() && !pod.contains('/'))?;
    let whole = containerd_shim::socket_address(containerd, namespace, pod);
    Some(directory.join(whole.rsplit('/').next()?))
}

/// The group of a container.
pub(super) fn group<'a>(spec: &'a Spec, id: &'a str) -> &'a str {
    GROUPS.iter().find_map(|name| spec.annotation(name)).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(directory: &str, namespace: &str, group: &str) -> String {
        Address::new(Path::new(directory), "/run/containerd/containerd.sock", namespace, group)
            .unwrap()
            .to_string()
    }

    #[test]
    fn it_is_a_hash_that_is_not_gos() {
        let ours = address(DIRECTORY, "default", "123");
        assert_eq!(ours.len(), "unix:///run/containerd/s/".len() + 64);
        let gos =
            containerd_shim::socket_address("/run/containerd/containerd.sock", "default", "123");
        assert!(ours.starts_with("unix:///run/containerd/s/") && ours != gos);
        assert!(address("/x", "default", "123").starts_with("unix:///x/"));
        assert_eq!(ours, address(DIRECTORY, "default", "123"));
    }

    #[test]
    fn a_pods_server_has_gos_name_too() {
        let spec = |text: &str| serde_json::from_str::<Spec>(text).unwrap();
        let path = |text| gos_path(Path::new("/x"), "/c.sock", "k8s.io", &spec(text));
        let pod = path(r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"s"}}"#).unwrap();
        // sha256 of "/c.sock/k8s.io/s".
        assert_eq!(
            pod,
            Path::new("/x/ac4a71ec00c0474bac6edb076446dd79209174889c72b33ae7bbd39195a0f22d")
        );
        let grouped = r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"s","io.containerd.runc.v2.group":"g"}}"#;
        for none in ["{}", grouped, r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"../s"}}"#] {
            assert_eq!(path(none), None);
        }
    }

    #[test]
    fn groups_of_different_namespaces_never_meet() {
        let mut seen = std::collections::HashSet::new();
        for namespace in ["a", "b"] {
            for group in ["g", "../b/g", "/run/containerd/containerd.sock/b/g", "%2F", "/", "%252F"]
            {
                assert!(seen.insert(address(DIRECTORY, namespace, group)), "{namespace} {group}");
            }
        }
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_an_error() {
        let directory = format!("/{}", "d".repeat(50));
        let error = Address::new(Path::new(&directory), "/c", "n", "g").unwrap_err();
        assert!(error.to_string().contains("more than 106 bytes"), "{error}");
    }

    #[test]
    fn the_first_annotation_wins() {
        let spec = |text: &str| serde_json::from_str::<Spec>(text).unwrap();
        let both = spec(
            r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"s","io.containerd.runc.v2.group":"g"}}"#,
        );
        assert_eq!(group(&both, "c"), "g");
        let pod = spec(r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"s"}}"#);
        assert_eq!(group(&pod, "c"), "s");
        assert_eq!(group(&spec("{}"), "c"), "c");
    }
}
