//! `stasis resume`.

use std::collections::BTreeSet;
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::json;
use stasis_config::Config;

use super::progress::Shown;
use super::suspend::put_right;
use super::target::{Target, Tools};
use super::{Resume, show};
use crate::checkpoint::LOCK_PATIENCE;
use crate::cuda::Gpu;
use crate::discover::discover;
use crate::error::{Cause, chain};
use crate::freezer::Freezer as _;
use crate::journal::Entry;
use crate::parts::Limits;
use crate::remap::{self, Card, DeviceMap};
use crate::spec::{self, SpecError};
use crate::{interrupt, suspended};

/// How much is needed is a guess then, on the safe side.
const NOT_NOTED: &str = "What it had on which GPU was not noted, as something else has suspended it: taken \
                         for it is its largest mapping in host memory, on every GPU that it can see. What \
                         has suspended it may resume it without looking for room";

/// Resumes a container.
pub(super) fn run(config: &Config, asked: &Resume) -> ExitCode {
    match resume(config, asked) {
        Ok(text) => super::print(&text),
        Err(error) => super::failed(&format!("{error:#}")),
    }
}

fn resume(config: &Config, asked: &Resume) -> anyhow::Result<String> {
    let target = Target::named(config, &asked.which)?;
    let id = &target.container.id;
    let journal = target.journal(config);
    let _lock = journal.lock(LOCK_PATIENCE).with_context(|| format!("container {id}"))?;
    interrupt::listen()?;
    let mut limits = Limits::new(&config.cuda, None);
    limits.room = asked.timeout.unwrap_or(limits.room);
    let mut tools = Tools::new(&target, config)?;
    let noted = put_right(&mut tools.parts(), &journal, &target, &limits)?;
    let entry = match noted {
        Some(entry) => entry,
        None => match by_other_means(&target, &mut tools)? {
            Some(entry) => entry,
            None => return Ok(said(asked, id, None)),
        },
    };
    let map = devices(&target, &mut tools, &entry, asked)
        .map_err(|why| anyhow::anyhow!("container {id}: {why}; its CUDA is suspended as before"))?;
    let seen = seen(&target, &mut tools);
    let shown = Shown::start(&format!("resume of container {id}"), target.journal(config));
    let mut progress = shown.progress();
    let done = suspended::resume(&mut tools.parts(), &entry, map, &seen, &limits, &mut progress);
    done.map_err(|failure| match &failure.cause {
        Cause::NoRoom { .. } if entry.processes.iter().any(|noted| noted.unseen) => {
            anyhow::anyhow!("{failure}. {NOT_NOTED}")
        }
        _ => failure.into(),
    })?;
    let took = shown.elapsed();
    drop(shown);
    Ok(said(asked, id, Some((entry.processes.len(), took))))
}

/// Onto which GPUs it goes.
fn devices(
    target: &Target,
    tools: &mut Tools,
    entry: &Entry,
    asked: &Resume,
) -> Result<Option<DeviceMap>, String> {
    if asked.to.is_none() && asked.device_map.is_none() {
        return Ok(None);
    }
    if entry.moves() {
        return Err(
            "it is on its way to other GPUs, which is kept in mind: resume it without this"
                .to_owned(),
        );
    }
    let facts = tools.parts().driver.facts().map_err(|error| error.to_string())?;
    if facts.branch().is_none_or(|branch| branch < remap::FIRST_BRANCH) {
        let version = facts.driver_version.unwrap_or_else(|| "of unknown version".to_owned());
        return Err(format!(
            "driver {version} restores on no other GPU: that needs branch {}",
            remap::FIRST_BRANCH
        ));
    }
    let cards = cards(target, &facts.gpus).map_err(|error| chain(&error))?;
    let wanted = match (&asked.to, &asked.device_map) {
        (Some(to), _) => {
            let gpus = entry.processes.iter().flat_map(|noted| &noted.uses.gpus);
            let gpus: BTreeSet<&str> = gpus.map(|(uuid, _)| uuid.as_str()).collect();
            let gpus: Vec<&str> = gpus.into_iter().collect();
            let [from] = gpus.as_slice() else {
                let what = match gpus.as_slice() {
                    [] => "GPUs that are not known".to_owned(),
                    gpus => gpus.join(", "),
                };
                return Err(format!("it used {what}: say which goes where with --device-map"));
            };
            DeviceMap::from_iter([((*from).to_owned(), remap::gpu(to, &facts.gpus)?)])
        }
        (None, Some(text)) => remap::parse(text, &facts.gpus)?,
        (None, None) => DeviceMap::new(),
    };
    remap::plan(&cards, &cards, &wanted).map(Some)
}

/// The GPUs that its processes can see.
fn cards(target: &Target, host: &[Gpu]) -> Result<Vec<Card>, SpecError> {
    if target.place.is_none() {
        return Ok(host.iter().map(Card::from).collect());
    }
    Ok(remap::cards(&spec::load(&target.container.bundle)?, host))
}

/// The same; all of the host where it is not known.
fn seen(target: &Target, tools: &mut Tools) -> Vec<Gpu> {
    let mut host = tools.parts().driver.facts().map(|facts| facts.gpus).unwrap_or_default();
    let cards = cards(target, &host).unwrap_or_default();
    if !cards.is_empty() {
        host.retain(|gpu| cards.iter().any(|card| card.uuid == gpu.uuid));
    }
    host
}

/// Suspended by somebody who leaves no journal.
fn by_other_means(
    target: &Target,
    tools: &mut Tools,
) -> anyhow::Result<Option<crate::journal::Entry>> {
    let id = &target.container.id;
    if target.container.cgroup.frozen()? {
        anyhow::bail!(
            "container {id} is paused, and was not suspended by stasis suspend: resume it first with the \
             command of whoever has paused it; nothing was done"
        );
    }
    let mut parts = tools.parts();
    let nothing = |cause| anyhow::anyhow!("container {id}: {cause}; nothing was done");
    let mut cuda = discover(&mut parts).map_err(nothing)?;
    suspended::found(&mut parts, &target.container, &mut cuda).map_err(nothing)
}

fn said(asked: &Resume, id: &str, done: Option<(usize, std::time::Duration)>) -> String {
    match done {
        _ if asked.json => {
            let (processes, milliseconds) = done.map_or((0, 0), |(processes, took)| {
                (processes, u64::try_from(took.as_millis()).unwrap_or(u64::MAX))
            });
            let all = json!({
                "container": id, "suspended": false, "resumed": processes,
                "milliseconds": milliseconds,
            });
            format!("{all:#}\n")
        }
        Some((1, took)) => format!("{id} is resumed: 1 process in {}\n", show::seconds(took)),
        Some((count, took)) => {
            format!("{id} is resumed: {count} processes in {}\n", show::seconds(took))
        }
        None => format!("{id} is not suspended: there is nothing to resume\n"),
    }
}
