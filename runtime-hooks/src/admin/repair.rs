//! `stasis repair`.

use std::process::ExitCode;
use std::time::Duration;

use stasis_config::Config;

use super::Roots;
use super::target::{Target, Tools};
use crate::checkpoint::LOCK_PATIENCE;
use crate::container::{Container, ContainerError};
use crate::containers::{self, Place};
use crate::freezer::Freezer as _;
use crate::journal::{JournalError, JournalFile, Stage};
use crate::parts::Limits;
use crate::resume;

/// Repairs one container, or all that have a journal.
pub(super) fn run(config: &Config, container: Option<&str>, roots: &Roots) -> ExitCode {
    let roots = containers::roots(&roots.given);
    let places = match container {
        Some(name) => match containers::find(&roots, name) {
            Ok(place) => vec![place],
            Err(error) => return super::failed(&error.to_string()),
        },
        None => containers::all(&roots),
    };
    let mut all_good = true;
    let mut any = false;
    for place in places {
        let journal = JournalFile::new(&config.state.directory, &place.root, &place.id);
        if !journal.exists() {
            continue;
        }
        any = true;
        // One that is under way is nobody's to repair; asked for by name it is waited for.
        let patience = if container.is_some() { LOCK_PATIENCE } else { Duration::ZERO };
        let id = place.id.clone();
        match repair(config, place, &journal, patience) {
            Ok(said) => println!("{id} {said}"),
            Err(error) => {
                all_good = false;
                super::failed(&format!("container {id}: {error:#}"));
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
    journal: &JournalFile,
    patience: Duration,
) -> anyhow::Result<&'static str> {
    let _lock = match journal.lock(patience) {
        Ok(lock) => lock,
        Err(JournalError::Busy) if patience.is_zero() => return Ok("has an operation under way"),
        Err(error) => return Err(error.into()),
    };
    let Some(entry) = journal.load()? else { return Ok("needs nothing") };
    match Container::load(&place.root, &place.id) {
        Err(ContainerError::NotFound { .. } | ContainerError::NotRunning(_)) => {
            journal.forget();
            return Ok("does not run any more: its journal is removed");
        }
        Err(error) => anyhow::bail!("{}", crate::error::chain(&error)),
        Ok(_) => {}
    }
    let target = Target::at(place)?;
    let container = &target.container;
    let same = entry.init == container.init;
    if same && entry.stage == Stage::Suspended {
        return Ok("is suspended by stasis suspend, and nothing is wrong: see stasis resume");
    }
    if same && entry.stage == Stage::AwaitingResume && container.cgroup.frozen()? {
        return Ok("is paused and checkpointed, and awaits its resume: nothing is wrong");
    }
    let limits = Limits::new(&config.cuda, None);
    let mut tools = Tools::new(&target, config)?;
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
