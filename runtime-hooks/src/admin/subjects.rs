//! Which containers there are: those of the known root directories of runtimes, and those that only a
//! journal tells of.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use stasis_config::Config;

use super::target;
use crate::containers::{self, FindError, Place};
use crate::journal::{JournalError, JournalFile};

/// The containers that a command may be about.
#[derive(Debug, Default)]
pub(super) struct Subjects {
    /// The containers of the root directories, and whatever else has a journal.
    pub(super) places: Vec<Place>,
    /// Ids of journals of which it is not known where their containers are, and why not.
    pub(super) unusable: Vec<(String, JournalError)>,
}

impl Subjects {
    /// A journal tells of which root directory it is, which may be one that nobody else tells of; whoever
    /// may write journals has named it once. With `only_given` it has to be one of `roots`.
    pub(super) fn all(config: &Config, roots: &[PathBuf], only_given: bool) -> Self {
        let state = &config.state.directory;
        let mut all = Self { places: containers::all(roots), unusable: Vec::new() };
        let known: BTreeMap<PathBuf, &PathBuf> = roots
            .iter()
            .map(|root| (JournalFile::new(state, root, "").directory().to_owned(), root))
            .collect();
        for found in JournalFile::all(state) {
            let root = found.path.parent().and_then(|directory| known.get(directory));
            let place = match (root, found.entry) {
                (None, _) if only_given => continue,
                (None, Err(why)) => {
                    all.unusable.push((found.id, why));
                    continue;
                }
                // Also of one that cannot be used that much is known.
                (Some(root), Err(_)) => Place { root: (*root).clone(), id: found.id },
                (root, Ok(entry)) => {
                    let mut place = target::place_of(&entry, found.id);
                    if let (Some(root), false) = (root, target::is_cgroup(&place)) {
                        // As it is spelled here.
                        place.root.clone_from(root);
                    }
                    place
                }
            };
            if !all.places.contains(&place) {
                all.places.push(place);
            }
        }
        all
    }
}

/// The container that has this name, also below a root directory that only a journal tells of.
pub(super) fn find(config: &Config, given: &[PathBuf], name: &str) -> Result<Place, FindError> {
    let roots = containers::roots(given);
    match containers::find(&roots, name) {
        Err(error @ FindError::NotFound { .. }) if given.is_empty() => {
            let mut places = Subjects::all(config, &roots, false).places;
            places.retain(|place| !target::is_cgroup(place));
            containers::choose(&places, &roots, name).map_err(|_| error)
        }
        found => found,
    }
}

/// The one that is called so: an id or its beginning, or the path of a cgroup.
pub(super) fn named(places: &[Place], roots: &[PathBuf], name: &str) -> Result<Place, FindError> {
    let cgroup = name.starts_with('/').then(|| containers::cgroup(Path::new(name))).flatten();
    match cgroup {
        Some(cgroup) => containers::choose(places, roots, &cgroup.directory.display().to_string()),
        None => containers::choose(places, roots, name),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::journal::{Entry, Journal as _};
    use crate::processes::ProcessId;
    use std::fs;
    use std::time::Duration;

    pub(in crate::admin) const ENDED: ProcessId = ProcessId { pid: i32::MAX, start_time: 1 };

    /// A host with the usual root directory `a`.
    pub(in crate::admin) struct Host {
        directory: tempfile::TempDir,
        pub(in crate::admin) config: Config,
    }

    impl Host {
        pub(in crate::admin) fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut config = Config::default();
            config.state.directory = directory.path().join("state");
            fs::create_dir(directory.path().join("a")).unwrap();
            Self { directory, config }
        }

        pub(in crate::admin) fn at(&self, name: &str) -> PathBuf {
            self.directory.path().canonicalize().unwrap().join(name)
        }

        pub(in crate::admin) fn place(&self, root: &str, id: &str) -> Place {
            Place { root: self.at(root), id: id.to_owned() }
        }

        pub(in crate::admin) fn journal(&self, place: &Place, init: ProcessId) -> JournalFile {
            let mut journal = target::journal(&self.config, place);
            let _lock = journal.lock(Duration::ZERO).unwrap();
            journal.save(&Entry::new(&place.id, init, false, Path::new(""))).unwrap();
            journal
        }

        fn subjects(&self, roots: &[PathBuf], only_given: bool) -> Subjects {
            let mut all = Subjects::all(&self.config, roots, only_given);
            all.places.sort();
            all
        }
    }

    pub(in crate::admin) fn cgroup(path: &str) -> Place {
        Place { root: "/sys/fs/cgroup".into(), id: path.to_owned() }
    }

    #[test]
    fn every_journal_is_found_and_each_once() {
        let host = Host::new();
        let running = host.place("a", "running");
        fs::create_dir(running.root.join(&running.id)).unwrap();
        fs::write(running.root.join("running/state.json"), "{}").unwrap();
        let (gone, elsewhere) = (host.place("a", "gone"), host.place("b", "c1"));
        let cgroup = cgroup("/sys/fs/cgroup/x.slice/100%");
        for place in [&running, &gone, &elsewhere, &cgroup] {
            host.journal(place, ENDED);
        }
        let usual = [host.at("a")];
        let mut expected = vec![running.clone(), gone.clone(), elsewhere.clone(), cgroup.clone()];
        expected.sort();
        let all = host.subjects(&usual, false);
        assert_eq!(all.places, expected);
        assert!(all.unusable.is_empty(), "{all:?}");
        for (name, place) in
            [("c1", &elsewhere), ("go", &gone), ("/sys/fs/cgroup/x", &cgroup), ("run", &running)]
        {
            assert_eq!(named(&all.places, &usual, name).unwrap(), *place);
        }
        named(&all.places, &usual, "none").unwrap_err();
        // Only what is below a given one, however that is spelled.
        let spelled = host.at("a/../b");
        fs::create_dir(host.at("b")).unwrap();
        let given = host.subjects(std::slice::from_ref(&spelled), true).places;
        assert_eq!(given, [Place { root: spelled, id: "c1".into() }]);
        assert_eq!(host.subjects(&["/sys/fs/cgroup".into()], true).places, [cgroup]);
    }

    #[test]
    fn one_elsewhere_is_found_by_name_if_no_root_directory_is_given() {
        let host = Host::new();
        let elsewhere = host.place("b", "one-that-nobody-else-has");
        host.journal(&elsewhere, ENDED);
        host.journal(&cgroup("/sys/fs/cgroup/one-of-a-cgroup"), ENDED);
        assert_eq!(find(&host.config, &[], "one-that-nobody").unwrap(), elsewhere);
        find(&host.config, &[host.at("a")], "one-that-nobody").unwrap_err();
        find(&host.config, &[], "/sys/fs/cgroup/one-of-a-cgroup").unwrap_err();
    }

    #[test]
    fn one_that_does_not_say_where_it_is_from_is_told_of() {
        let host = Host::new();
        let (usual, elsewhere) = (host.place("a", "c1"), host.place("b", "c2"));
        for place in [&usual, &elsewhere] {
            let journal = host.journal(place, ENDED);
            let text = fs::read_to_string(journal.file()).unwrap();
            let root = place.root.display().to_string();
            fs::write(journal.file(), text.replace(&root, "")).unwrap();
        }
        let all = host.subjects(&[host.at("a")], false);
        assert_eq!(all.places, [usual]);
        let [(id, why)] = all.unusable.as_slice() else { panic!("{all:?}") };
        assert!(id == "c2" && matches!(why, JournalError::NoRoot { .. }), "{why}");
        assert_eq!(host.subjects(&[host.at("b")], true).places, [elsewhere]);
    }
}
