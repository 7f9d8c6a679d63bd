//! `stasis repair`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use stasis_config::Config;

use super::Roots;
use super::subjects::{Subjects, named};
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
    use super::super::subjects::tests::{ENDED, Host, cgroup};
    use super::*;
    use crate::processes::start_time;
    use std::fs;

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
