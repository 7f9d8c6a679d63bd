//! The containers of this host, by the state that OCI runtimes keep of them. For people's commands:
//! the engine is told root and id.

use std::fs;
use std::path::{Path, PathBuf};

use crate::container::{Cgroup, CgroupVersion, Container, mounted};
use crate::engines::Engine;
use crate::processes::{Pid, ProcessId, start_time};

/// Where runtimes are told to keep their state, or do so by themselves. A `*` stands for any one
/// directory: containerd's namespaces, Docker's runtimes. Those of rootless ones are not among them:
/// their users could have root act on any process.
const ROOTS: [&str; 4] =
    ["/run/containerd/runc/*", "/run/docker/runtime-*/*", "/run/runc", "/run/crun"];

/// In place of a root directory, for cgroups that are no containers: no runtime has it.
pub const CGROUPS: &str = "/sys/fs/cgroup";

/// A container, as its runtime finds it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The runtime's root directory.
    pub root: PathBuf,
    /// The id: the name of its directory there.
    pub id: String,
}

impl Place {
    /// The name that its engine gave it, if it did.
    #[must_use]
    pub fn name(&self) -> Option<String> {
        let bundle = Container::bundle(&self.root, &self.id)?;
        Engine::of(&self.root, &bundle).name(&self.id, &bundle)
    }
}

/// Why a container was not found.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FindError {
    /// There is none of that name.
    #[error(
        "no container has the id or the name {name}, or an id that begins so; looked in {}; see \
         stasis ps --all, or name another root directory of a runtime with --root",
        shown(.roots)
    )]
    NotFound {
        /// What was looked for.
        name: String,
        /// Where.
        roots: Vec<PathBuf>,
    },
    /// There are several.
    #[error("{name} may be {}; give all of its id, or its root directory with --root", list(.places))]
    Ambiguous {
        /// What was looked for.
        name: String,
        /// All that it may be.
        places: Vec<Place>,
    },
    /// The process is in none.
    #[error(
        "pid {pid} is in no container that a runtime of this host knows; name its cgroup with --cgroup, \
         which is then suspended as a whole"
    )]
    NoContainer {
        /// Which process.
        pid: Pid,
    },
    /// The cgroup cannot be taken for a container.
    #[error("cgroup {}: {reason}", path.display())]
    Cgroup {
        /// Which.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

fn shown(roots: &[PathBuf]) -> String {
    match roots {
        [] => "no root directory, as none of a runtime was found".to_owned(),
        roots => roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(", "),
    }
}

fn list(places: &[Place]) -> String {
    let name = |place: &Place| format!("{} in {}", place.id, place.root.display());
    places.iter().map(name).collect::<Vec<_>>().join(" or ")
}

/// The root directories of runtimes on this host; only `given` if there are any.
#[must_use]
pub fn roots(given: &[PathBuf]) -> Vec<PathBuf> {
    if given.is_empty() {
        ROOTS.iter().flat_map(|pattern| expand(pattern)).collect()
    } else {
        given.to_vec()
    }
}

/// The directories that a pattern stands for, in order.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from("/")];
    for part in pattern.split('/').filter(|part| !part.is_empty()) {
        found = match part.strip_suffix('*') {
            None => found.into_iter().map(|directory| directory.join(part)).collect(),
            Some(start) => {
                let fits = |name: &String| name.starts_with(start);
                let below = |directory: PathBuf| {
                    let names = names(&directory).into_iter().filter(fits);
                    names.map(|name| directory.join(name)).collect::<Vec<_>>()
                };
                found.into_iter().flat_map(below).collect()
            }
        };
    }
    found.retain(|directory| directory.is_dir());
    found
}

/// What is in a directory, in order; nothing if it cannot be read.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// All containers of these root directories.
#[must_use]
pub fn all(roots: &[PathBuf]) -> Vec<Place> {
    let is_container = |directory: &Path| {
        ["state.json", "status"].iter().any(|name| directory.join(name).is_file())
    };
    let of = |root: &PathBuf| {
        let ids = names(root).into_iter().filter(|id| is_container(&root.join(id)));
        ids.map(|id| Place { root: root.clone(), id }).collect::<Vec<_>>()
    };
    roots.iter().flat_map(of).collect()
}

/// The one container whose id is `name`; else the one of that name; else the one whose id begins so:
/// Docker's order.
pub fn find(roots: &[PathBuf], name: &str) -> Result<Place, FindError> {
    choose(&all(roots), roots, name)
}

/// The same among these, which were looked for in `roots`.
pub fn choose(places: &[Place], roots: &[PathBuf], name: &str) -> Result<Place, FindError> {
    let fits: [&dyn Fn(&Place) -> bool; 3] = [
        &|place| place.id == name,
        &|place| place.name().is_some_and(|own| own == name),
        &|place| !name.is_empty() && place.id.starts_with(name),
    ];
    let all_that = |fits: &dyn Fn(&Place) -> bool| -> Vec<Place> {
        places.iter().filter(|place| fits(place)).cloned().collect()
    };
    let mut fitting =
        fits.into_iter().map(all_that).find(|found| !found.is_empty()).unwrap_or_default();
    match fitting.len() {
        0 => Err(FindError::NotFound { name: name.to_owned(), roots: roots.to_vec() }),
        1 => Ok(fitting.remove(0)),
        _ => Err(FindError::Ambiguous { name: name.to_owned(), places: fitting }),
    }
}

/// The container that a process is in.
pub fn of_process(roots: &[PathBuf], pid: Pid) -> Result<(Place, Container), FindError> {
    let none = FindError::NoContainer { pid };
    let Ok(own) = Cgroup::of(pid) else { return Err(none) };
    // Of containers in containers the innermost.
    let mut found: Option<(Place, Container)> = None;
    for place in all(roots) {
        let Ok(container) = Container::load(&place.root, &place.id) else { continue };
        let directory = &container.cgroup.directory;
        let deeper = found.as_ref().is_none_or(|(_, other)| {
            directory.components().count() > other.cgroup.directory.components().count()
        });
        if own.directory.starts_with(directory) && deeper {
            found = Some((place, container));
        }
    }
    found.ok_or(none)
}

/// A cgroup as if it were a container: a directory of a mounted hierarchy, or a path as it stands in
/// /proc/PID/cgroup.
pub fn of_cgroup(roots: &[PathBuf], path: &Path) -> Result<Container, FindError> {
    let failed =
        |reason: &str| FindError::Cgroup { path: path.to_owned(), reason: reason.to_owned() };
    let cgroup = cgroup(path).ok_or_else(|| {
        failed("there is no such directory with a freezer, nor such a path in /proc/PID/cgroup")
    })?;
    let directory = &cgroup.directory;
    if holds_this_process(directory) {
        return Err(failed(
            "it holds this very command, which would freeze itself; use another shell, or a deeper cgroup",
        ));
    }
    let related = |place: &Place| {
        let container = Container::load(&place.root, &place.id).ok()?;
        let other = container.cgroup.directory;
        (other.starts_with(directory) || directory.starts_with(&other)).then_some(container.id)
    };
    if let Some(id) = all(roots).iter().find_map(related) {
        return Err(failed(&format!(
            "it is, holds or lies in the cgroup of container {id}: name that"
        )));
    }
    let oldest = processes(directory).into_iter().min_by_key(|process| process.start_time);
    let init = oldest.ok_or_else(|| failed("it holds no process"))?;
    Ok(Container { id: directory.display().to_string(), init, bundle: PathBuf::new(), cgroup })
}

/// Whether freezing this cgroup would freeze who does it.
#[must_use]
pub fn holds_this_process(directory: &Path) -> bool {
    let own = Pid::try_from(std::process::id()).unwrap_or_default();
    processes(directory).iter().any(|process| process.pid == own)
}

/// The cgroup with this path, as [`of_cgroup`] is given it, if it has a freezer.
#[must_use]
pub fn cgroup(path: &Path) -> Option<Cgroup> {
    let at = |directory: PathBuf| {
        let has = |version: &CgroupVersion| directory.join(version.freezer()).is_file();
        let version = [CgroupVersion::V1, CgroupVersion::V2].into_iter().find(has)?;
        Some(Cgroup { version, directory })
    };
    let named = fs::canonicalize(path).ok().and_then(at);
    named.or_else(|| {
        let mounts = fs::read(format!("/proc/{}/mountinfo", std::process::id())).ok()?;
        let mounts = String::from_utf8_lossy(&mounts).into_owned();
        let path = path.to_str()?;
        let v1 = mounted(&mounts, "cgroup", Some("freezer"), path).and_then(at);
        v1.or_else(|| at(mounted(&mounts, "cgroup2", None, path)?))
    })
}

/// The processes of a cgroup and of those below it; none if it is not there.
#[must_use]
pub fn processes(directory: &Path) -> Vec<ProcessId> {
    let list = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    let pids = list.lines().filter_map(|line| line.parse::<Pid>().ok());
    let own = pids.filter_map(|pid| Some(ProcessId { pid, start_time: start_time(pid)? }));
    let mut found: Vec<ProcessId> = own.collect();
    for name in names(directory) {
        let below = directory.join(name);
        if below.is_dir() {
            found.extend(processes(&below));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(containers: &[&str]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let host = tempfile::tempdir().unwrap();
        let mut roots = Vec::new();
        for container in containers {
            let directory = host.path().join(container);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("state.json"), "{}").unwrap();
            roots.push(directory.parent().unwrap().to_owned());
        }
        roots.dedup();
        (host, roots)
    }

    #[test]
    fn an_id_or_its_beginning_is_enough_if_it_is_clear() {
        let (_host, roots) = host(&["a/abc", "a/abcd", "a/xyz", "b/xyz", "b/other"]);
        let found = |name: &str| find(&roots, name).map(|place| place.id);
        assert_eq!(found("abc").unwrap(), "abc");
        assert_eq!(found("abcd").unwrap(), "abcd");
        assert_eq!(found("ot").unwrap(), "other");
        for (name, expected) in [("ab", "abc in"), ("xyz", "/b")] {
            let said = found(name).unwrap_err().to_string();
            assert!(said.contains(expected) && said.contains("--root"), "{said}");
        }
        for name in ["none", "", "bc"] {
            let said = found(name).unwrap_err().to_string();
            assert!(said.contains("no container") && said.contains("/a"), "{said}");
        }
    }

    #[test]
    fn a_name_is_enough_where_no_id_is_the_same() {
        let (host, roots) =
            host(&["containerd/a/abc", "containerd/a/abcd", "containerd/a/web", "x/y"]);
        let name = |id: &str, name: &str| {
            let bundle = host.path().join(format!("bundle-{id}"));
            fs::create_dir_all(&bundle).unwrap();
            let state = serde_json::json!({
                "init_process_pid": 1,
                "init_process_start": 1,
                "config": {"labels": [format!("bundle={}", bundle.display())]},
            });
            fs::write(roots[0].join(id).join("state.json"), state.to_string()).unwrap();
            let config = serde_json::json!({"annotations": {"nerdctl/name": name}});
            fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        };
        let found = |name: &str| find(&roots, name).map(|place| place.id);
        // `a` is the beginning of two ids, and then a name.
        assert!(found("a").is_err());
        name("web", "a");
        name("abcd", "web");
        assert_eq!((found("a").unwrap(), found("web").unwrap()), ("web".into(), "web".into()));
        // In two namespaces nerdctl may call two the same.
        name("abc", "a");
        let said = found("a").unwrap_err().to_string();
        assert!(said.contains("a may be abc in") && said.contains("or web in"), "{said}");
        assert!(found("b").is_err());
    }

    #[test]
    fn what_has_no_state_is_no_container() {
        let (host, roots) = host(&["a/abc"]);
        fs::create_dir(host.path().join("a/lock")).unwrap();
        fs::write(host.path().join("a/file"), "").unwrap();
        assert_eq!(all(&roots), [Place { root: roots[0].clone(), id: "abc".into() }]);
        assert!(all(&[host.path().join("none")]).is_empty());
    }

    #[test]
    fn a_star_stands_for_any_directory() {
        let (host, _) = host(&["run/user/0/runc/a", "run/user/5/runc/b", "run/user/5/crun/c"]);
        let pattern = host.path().join("run/user/*/runc");
        let found = expand(pattern.to_str().unwrap());
        let at = |name: &str| host.path().join(name);
        assert_eq!(found, [at("run/user/0/runc"), at("run/user/5/runc")]);
        let pattern = host.path().join("run/us*/9/runc");
        assert!(expand(pattern.to_str().unwrap()).is_empty());
        assert_eq!(roots(&[at("x")]), [at("x")]);
    }

    #[test]
    fn a_cgroup_with_this_command_in_it_is_refused() {
        let own = Pid::try_from(std::process::id()).unwrap();
        for path in ["/no/such/cgroup", "/proc"] {
            let said = of_cgroup(&[], Path::new(path)).unwrap_err().to_string();
            assert!(said.contains("no such directory with a freezer"), "{said}");
        }
        // Where there is one at all.
        if let Ok(cgroup) = Cgroup::of(own) {
            let said = of_cgroup(&[], &cgroup.directory).unwrap_err().to_string();
            assert!(said.contains("this very command"), "{said}");
        }
    }
}
