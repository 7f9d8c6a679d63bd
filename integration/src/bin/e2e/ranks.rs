//! Several processes with CUDA that wait for each other.

use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::{command, wait};

use crate::{Test, consecutive};

const LIMIT: Duration = Duration::from_secs(60);
const RANKS: usize = 3;
const ALLOW: &str = "dev.stasis.multi-process=allow";

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("go_on_when_allowed", |case| go_on(case, &[])),
        Test::new("independent_go_on", |case| go_on(case, &["--independent"])),
        Test::new("refused_without_annotation", refused_without_annotation),
        Test::new("direct", direct),
        Test::new("paused_stay_paused", paused_stay_paused),
    ]
}

fn start(case: &Case, options: &[&str], allowed: bool) -> Result<String> {
    let count = RANKS.to_string();
    // No port: waiting for datagrams makes rank 0 the slow one, so that the others sit in a kernel
    // that waits for it practically always, and no moment is right for a lock.
    let program = ["/bin/ranks", &count, "--log", "/data/log", "--port", "0"];
    let mut container = Container::new(program.iter().chain(options).copied());
    if allowed {
        container = container.annotated(ALLOW);
    }
    let id = case.start(&container)?;
    advance(case, &id)?;
    Ok(id)
}

/// The last step of each rank. None is missing or wrong.
fn steps(case: &Case, id: &str) -> Result<Vec<u64>> {
    let log = |rank| case.read(id, &format!("/data/log.{rank}")).unwrap_or_default();
    (0..RANKS).map(|rank| consecutive(&log(rank), 1)).collect()
}

/// Waits until every rank has made another step.
fn advance(case: &Case, id: &str) -> Result<()> {
    let before = steps(case, id)?;
    wait::until("a step of each rank", Duration::from_secs(10), || {
        let now = steps(case, id)?;
        let all = now.iter().zip(&before).all(|(now, before)| now > before);
        Ok(all.then_some(()))
    })
}

fn go_on(case: &Case, options: &[&str]) -> Result<()> {
    let id = start(case, options, true)?;
    for _ in 0..2 {
        let before = steps(case, &id)?;
        case.cycle(&id)?;
        let after = steps(case, &id)?;
        let none_lost = after.iter().zip(&before).all(|(after, before)| after >= before);
        ensure!(none_lost, "the ranks began anew: {before:?}, then {after:?}");
        advance(case, &id)?;
    }
    Ok(())
}

fn refused_without_annotation(case: &Case) -> Result<()> {
    let id = start(case, &[], false)?;
    let image = Some(case.path("image"));
    let error = case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    ensure!(error.contains("dev.stasis.multi-process"), "the error tells no way out: {error}");
    case.expect_status(&id, Status::Running)?;
    advance(case, &id)
}

/// Nobody pauses them before, so they may run on until all can be locked.
fn direct(case: &Case) -> Result<()> {
    let id = start(case, &[], true)?;
    command::succeed(&mut case.direct_checkpoint(&id, &case.path("image")), LIMIT)?;
    case.expect_status(&id, Status::Running)?;
    advance(case, &id)
}

fn paused_stay_paused(case: &Case) -> Result<()> {
    let id = start(case, &[], true)?;
    case.ctr().pause(&id)?;
    let before = steps(case, &id)?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    case.expect_status(&id, Status::Paused)?;
    ensure!(steps(case, &id)? == before, "a paused rank made a step");
    case.ctr().resume(&id)?;
    advance(case, &id)
}
