//! Many containers at once, and several in one shim.

use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::Status;
use stasis_integration::shim::Shim;
use stasis_integration::{command, leaks, processes, wait};

use super::{Check, LIMIT, Seen, ctr, idle, note};

pub(crate) const CHECKS: &[Check] =
    &[Check::same("twenty_at_once", twenty).quiet(), Check::same("group_in_one_shim", group)];

/// Runs a `ctr` command for each container, all at once.
fn each(case: &Case, ids: &[String], arguments: impl Fn(&str) -> Vec<String>) -> Result<()> {
    let threads: Vec<_> = ids
        .iter()
        .map(|id| {
            let mut command = case.ctr().command(arguments(id));
            thread::spawn(move || command::run(&mut command, LIMIT))
        })
        .collect();
    for thread in threads {
        let finished = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        // `ctr tasks rm` ends with the exit code of the task.
        let code = finished.status.code();
        ensure!(matches!(code, Some(0 | 137)), "{finished:?}");
    }
    Ok(())
}

fn twenty(case: &Case, seen: &mut Seen) -> Result<()> {
    let ids: Vec<String> = (0..20).map(|_| case.new_id()).collect();
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    let start = Instant::now();
    each(case, &ids, |id| case.run_arguments(id, &["--detach"], &idle()))?;
    for id in &ids {
        case.expect_status(id, Status::Running)?;
    }
    each(case, &ids, |id| words(&["tasks", "kill", "-s", "KILL", id]))?;
    for id in &ids {
        case.wait_stopped(id)?;
    }
    each(case, &ids, |id| words(&["tasks", "rm", id]))?;
    seen.took(start.elapsed());
    Ok(())
}

/// In a group as a pod is one.
pub(super) fn grouped(container: Container, group: &str) -> Container {
    container.annotated(&format!("io.containerd.runc.v2.group={group}"))
}

fn group(case: &Case, seen: &mut Seen) -> Result<()> {
    let mut ids = Vec::new();
    let shims = || case.containerd().shims();
    for _ in 0..5 {
        ids.push(case.start(&grouped(idle(), "g1"))?);
        let shims: Vec<_> = shims().into_iter().map(processes::describe).collect();
        ensure!(shims.len() == 1, "shims: {shims:#?}");
    }
    let other = case.start(&grouped(idle(), "g2"))?;
    ensure!(shims().len() == 2, "another group has no shim for itself");
    case.remove(&other)?;
    wait::until("the end of the other shim", LIMIT, || Ok((shims().len() == 1).then_some(())))?;
    let socket = case.task(&ids[0])?.socket().to_owned();
    // The first one is the one that the shim was started for.
    for id in &ids {
        ensure!(shims().len() == 1, "the shim is gone before {id}");
        let exec = ctr(case, &["tasks", "exec", "--exec-id", "e", id, "/bin/true"])?;
        note(case, seen, "exec", &exec);
        case.remove(id)?;
        leaks::container(case.ctr().namespace(), id)?;
    }
    wait::until("the end of the shim", LIMIT, || Ok(shims().is_empty().then_some(())))?;
    if case.shim() == Shim::Go {
        // That of containerd 2.1 leaves it.
        return Ok(());
    }
    wait::until("the end of its socket", LIMIT, || Ok((!socket.exists()).then_some(())))
}
