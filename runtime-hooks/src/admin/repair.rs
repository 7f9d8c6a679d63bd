//! `stasis repair`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use stasis_config::Config;

use super::Roots;
use super::target::{self, Target, Tools};
use crate::checkpoint::LOCK_PATIENCE;
use crate::container::{Container, ContainerError};
use crate::containers::{self, FindError, Place};
use crate::error::chain;
use crate::freezer::Freezer as _;
use crate::job;
use crate::journal::{JournalError, JournalFile, Stage};
use crate::parts::Limits;
use crate::processes::ProcessId;
use crate::resume;

/// Repairs one container, or all that have a journal.
pub(super) fn run(config: &Config, container: Option<&str>, roots: &Roots) -> ExitCode {
    let only_given = !roots.given.is_empty();
    let roots = containers::roots(&roots.given);
    let Subjects { mut places, unusable } = Subjects::all(config, &roots, only_given);
    let mut all_good = true;
    let mut any = false;
    if let Some(name) = container {
        places = match named(&places, &roots, name) {
            Ok(place) => vec![place],
            Err(error) => {
                let own = unusable.iter().find(|(id, _)| id == name);
                let other = matches!(error, FindError::Ambiguous { .. });
                return super::failed(&match own {
                    Some((id, why)) if !other => format!("container {id}: {}", chain(why)),
                    _ => error.to_string(),
                });
            }
        };
    } else {
        for (id, why) in unusable {
            (any, all_good) = (true, false);
            super::failed(&format!("container {id}: {}", chain(&why)));
        }
    }
    for place in places {
        let journal = target::journal(config, &place);
        if !journal.exists() {
            continue;
        }
        any = true;
        // One that is under way is nobody's to repair; asked for by name it is waited for.
        let patience = if container.is_some() { LOCK_PATIENCE } else { Duration::ZERO };
        let id = place.id.clone();
        match repair(config, place, &roots, &journal, patience) {
            Ok(said) => println!("{id} {said}"),
            Err(error) => {
                all_good = false;
                super::failed(&format!("container {id}: {error:#}"));
            }
        }
    }
    if container.is_none() {
        for root in &roots {
            let swept = job::directory::sweep(&config.state.directory, root);
            if swept > 0 {
                any = true;
                println!("removed {swept} job files of containers in {}", root.display());
            }
        }
    }
    if !any {
        println!("nothing to repair");
    }
    if all_good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What may have to be repaired.
#[derive(Debug, Default)]
pub(super) struct Subjects {
    /// The containers of the root directories, and whatever else has a journal.
    pub(super) places: Vec<Place>,
    /// Ids of journals of which it is not known where their containers are, and why not.
    unusable: Vec<(String, JournalError)>,
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
fn named(places: &[Place], roots: &[PathBuf], name: &str) -> Result<Place, FindError> {
    let cgroup = name.starts_with('/').then(|| containers::cgroup(Path::new(name))).flatten();
    match cgroup {
        Some(cgroup) => containers::choose(places, roots, &cgroup.directory.display().to_string()),
        None => containers::choose(places, roots, name),
    }
}

fn repair(
    config: &Config,
    place: Place,
    roots: &[PathBuf],
    journal: &JournalFile,
    patience: Duration,
) -> anyhow::Result<&'static str> {
    let _lock = match journal.lock(patience) {
        Ok(lock) => lock,
        Err(JournalError::Busy) if patience.is_zero() => return Ok("has an operation under way"),
        Err(error) => return Err(error.into()),
    };
    let Some(entry) = journal.load()? else { return Ok("needs nothing") };
    let (is_cgroup, alive) = (target::is_cgroup(&place), target::alive(&entry));
    // Whoever is in a cgroup now, what was suspended has ended.
    let has_ended = is_cgroup && alive.is_none();
    if has_ended || !is_there(&place)? {
        // Its root directory may be what is not there, and not the container.
        if let Some(ProcessId { pid, .. }) = alive {
            bail!(
                "it is not known in {}, but pid {pid} of it runs; its journal is kept",
                place.root.display()
            );
        }
        journal.forget();
        return Ok("does not run any more: its journal is removed");
    }
    let target = if is_cgroup {
        Target::of_cgroup(roots, Path::new(&place.id))?
    } else {
        Target::at(place)?
    };
    let mut tools = Tools::new(&target, config)?;
    let Some(entry) = journal.load()? else { return Ok("needs nothing") };
    let container = &target.container;
    let same = entry.init == container.init;
    if same && entry.stage == Stage::Suspended {
        return Ok("is suspended by stasis suspend, and nothing is wrong: see stasis resume");
    }
    if same && entry.stage == Stage::AwaitingResume && container.cgroup.frozen()? {
        return Ok("is paused and checkpointed, and awaits its resume: nothing is wrong");
    }
    let limits = Limits::new(&config.cuda, None);
    resume::repair(&mut tools.parts(), &entry, container.init, &limits)?;
    let now = journal.load()?;
    let suspended = now.is_some_and(|now| now.stage == Stage::Suspended);
    Ok(match (same, suspended, entry.frozen) {
        (false, ..) => "is another container than the journal's, which is removed",
        (_, true, _) => "is repaired: it is suspended, see stasis resume",
        (.., true) => "is repaired: paused as before",
        (.., false) => "is repaired: it runs",
    })
}

/// Whether it is there, and runs.
fn is_there(place: &Place) -> anyhow::Result<bool> {
    if target::is_cgroup(place) {
        return Ok(!containers::processes(Path::new(&place.id)).is_empty());
    }
    match Container::load(&place.root, &place.id) {
        Ok(_) => Ok(true),
        Err(ContainerError::NotFound { .. } | ContainerError::NotRunning(_)) => Ok(false),
        Err(error) => bail!("{}", chain(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Entry, Journal as _};
    use crate::processes::start_time;
    use std::fs;

    const ENDED: ProcessId = ProcessId { pid: i32::MAX, start_time: 1 };

    /// A host with the usual root directory `a`.
    struct Host {
        directory: tempfile::TempDir,
        config: Config,
    }

    impl Host {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut config = Config::default();
            config.state.directory = directory.path().join("state");
            fs::create_dir(directory.path().join("a")).unwrap();
            Self { directory, config }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.directory.path().canonicalize().unwrap().join(name)
        }

        fn place(&self, root: &str, id: &str) -> Place {
            Place { root: self.at(root), id: id.to_owned() }
        }

        fn journal(&self, place: &Place, init: ProcessId) -> JournalFile {
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

    fn cgroup(path: &str) -> Place {
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

    #[test]
    fn the_journal_of_what_is_gone_is_kept_only_while_one_of_its_processes_runs() {
        let host = Host::new();
        let pid = i32::try_from(std::process::id()).unwrap();
        let own = ProcessId { pid, start_time: start_time(pid).unwrap() };
        for place in [host.place("not-mounted", "c1"), cgroup("/sys/fs/cgroup/no/such")] {
            let journal = host.journal(&place, own);
            let repaired = || repair(&host.config, place.clone(), &[], &journal, Duration::ZERO);
            let said = repaired().unwrap_err().to_string();
            assert!(said.contains(&format!("pid {pid} of it runs")), "{said}");
            assert!(journal.exists());
            host.journal(&place, ENDED);
            let said = repaired().unwrap();
            assert_eq!(said, "does not run any more: its journal is removed");
            assert!(!journal.in_use());
        }
        // Somebody else is in it now.
        let others = host.at("cgroup");
        fs::create_dir(&others).unwrap();
        fs::write(others.join("cgroup.procs"), format!("{pid}\n")).unwrap();
        let place = cgroup(others.to_str().unwrap());
        let journal = host.journal(&place, ENDED);
        let said = repair(&host.config, place, &[], &journal, Duration::ZERO).unwrap();
        assert_eq!(said, "does not run any more: its journal is removed");
    }
}
