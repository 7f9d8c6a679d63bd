//! `stasis suspend`.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use serde_json::json;
use stasis_config::Config;

use super::progress::Shown;
use super::target::{Target, Tools};
use super::{Suspend, show};
use crate::checkpoint::LOCK_PATIENCE;
use crate::cuda::Steps;
use crate::discover::discover;
use crate::journal::{Entry, JournalFile, Noted, Stage};
use crate::parts::{Limits, Parts};
use crate::suspended::{self, Request, Suspended};
use crate::{interrupt, resume};

/// Suspends a container.
pub(super) fn run(config: &Config, asked: &Suspend) -> ExitCode {
    match suspend(config, asked) {
        Ok(text) => super::print(&text),
        Err(error) => super::failed(&format!("{error:#}")),
    }
}

fn suspend(config: &Config, asked: &Suspend) -> anyhow::Result<String> {
    let target = Target::named(config, &asked.which)?;
    let id = &target.container.id;
    let annotations = target.annotations(config)?;
    let journal = target.journal(config);
    let _lock = journal.lock(LOCK_PATIENCE).with_context(|| format!("container {id}"))?;
    interrupt::listen()?;
    let limits = Limits::new(&config.cuda, asked.timeout.or(annotations.lock_timeout));
    let mut tools = Tools::new(&target, config)?;
    let earlier = put_right(&mut tools.parts(), &journal, &target, &limits)?;
    let cuda = discover(&mut tools.parts())
        .map_err(|cause| anyhow::anyhow!("container {id}: {cause}; nothing was done"))?;
    if cuda.is_empty() {
        bail!("container {id} uses no CUDA: there is nothing to suspend");
    }
    let request = Request {
        container: &target.container,
        annotations: &annotations,
        minimum_driver: config.jobs.minimum_driver,
        given_job: journal.has_job(),
        earlier: earlier.as_ref(),
        limits,
    };
    if tools.parts().driver.steps().is_ok_and(|steps| steps == Steps::Toggle) {
        eprintln!(
            "stasis: suspend of container {id}: this driver locks and checkpoints in one step. It waits for \
             kernels under way up to {}, whatever the timeout, and cannot be interrupted meanwhile",
            show::seconds(config.cuda.checkpoint_timeout + config.cuda.restore_timeout)
        );
    }
    let shown = Shown::start(&format!("suspend of container {id}"), target.journal(config));
    let mut progress = shown.progress();
    let done = suspended::suspend(&mut tools.parts(), &request, cuda, &mut progress)?;
    let Suspended { entry: suspended, freed } = done;
    let took = shown.elapsed();
    drop(shown);
    let already = earlier.is_some() && freed.is_empty();
    let given = by_gpu(&freed);
    Ok(if asked.json {
        let gpus: Vec<_> =
            given.iter().map(|(uuid, bytes)| json!({"uuid": uuid, "bytes": bytes})).collect();
        let processes: Vec<_> =
            suspended.processes.iter().map(|noted| json!({"pid": noted.id.pid})).collect();
        let phases: Vec<_> = progress
            .phases()
            .into_iter()
            .map(|phase| json!({"name": phase.name, "milliseconds": phase.milliseconds}))
            .collect();
        let milliseconds = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let all = json!({
            "container": id, "suspended": true, "processes": processes, "freed": gpus,
            "milliseconds": milliseconds, "phases": phases,
        });
        format!("{all:#}\n")
    } else if already {
        format!("{id} is suspended already\n{}", way_back(id, &asked.which))
    } else {
        text(id, &suspended, &given, &show::seconds(took), &asked.which)
    })
}

/// Puts right what a killed operation has left; gives what is noted of a suspended container.
pub(super) fn put_right(
    parts: &mut Parts<'_>,
    journal: &JournalFile,
    target: &Target,
    limits: &Limits,
) -> anyhow::Result<Option<Entry>> {
    let (id, init) = (&target.container.id, target.container.init);
    let Some(entry) = journal.load().with_context(|| format!("container {id}"))? else {
        return Ok(None);
    };
    match entry.stage {
        _ if entry.init != init => {}
        Stage::Suspended => return Ok(Some(entry)),
        Stage::AwaitingResume if parts.freezer.frozen()? => bail!(
            "container {id} was paused and checkpointed, and awaits its resume by whoever has paused it \
             (ctr tasks resume, docker unpause, …); its GPU is free until then; nothing was done"
        ),
        _ => {}
    }
    resume::repair(parts, &entry, init, limits)?;
    let now = journal.load().with_context(|| format!("container {id}"))?;
    let now = now.filter(|now| now.init == init);
    Ok(now.and_then(|now| match now.stage {
        Stage::Suspended => Some(now),
        // A lock may still be granted, in a process that began since.
        _ => now.suspended.map(|earlier| *earlier),
    }))
}

/// The GPUs that are free of it, with bytes as far as they are known.
fn by_gpu(freed: &[Noted]) -> Vec<(String, u64)> {
    let mut gpus = std::collections::BTreeMap::<&str, u64>::new();
    for (uuid, bytes) in freed.iter().flat_map(|noted| &noted.uses.gpus) {
        *gpus.entry(uuid).or_default() += bytes.unwrap_or_default();
    }
    gpus.into_iter().map(|(uuid, bytes)| (uuid.to_owned(), bytes)).collect()
}

fn text(
    id: &str,
    entry: &Entry,
    freed: &[(String, u64)],
    took: &str,
    which: &super::Which,
) -> String {
    let count = match entry.processes.len() {
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    };
    let free: Vec<String> = freed
        .iter()
        .map(|(uuid, bytes)| format!("; {} free again on {uuid}", show::bytes(*bytes)))
        .collect();
    let free = free.concat();
    let back = way_back(id, which);
    format!("{id} is suspended: {count} in {took}{free}\n{back}")
}

/// What to type to resume it.
fn way_back(id: &str, which: &super::Which) -> String {
    let name = match (&which.container, which.pid, &which.cgroup) {
        (Some(name), ..) => name.clone(),
        (_, Some(pid), _) => format!("--pid {pid}"),
        (.., Some(cgroup)) => format!("--cgroup {}", cgroup.display()),
        _ => id.to_owned(),
    };
    let roots: Vec<String> =
        which.roots.given.iter().map(|root| format!(" --root {}", root.display())).collect();
    let roots = roots.concat();
    format!("Give it back with: stasis resume {name}{roots}\n")
}
