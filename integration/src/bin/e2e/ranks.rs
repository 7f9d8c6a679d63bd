//! Several processes with CUDA that wait for each other.

use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::{command, wait};

use crate::killed::{Striker, joined};
use crate::{Test, consecutive};

const LIMIT: Duration = Duration::from_secs(60);
const RANKS: usize = 3;
const ALLOW: &str = "dev.stasis.multi-process=allow";
const JOB: &str = "dev.stasis.job=file";

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("go_on_when_allowed", |case| go_on(case, &[])),
        Test::new("independent_go_on", |case| go_on(case, &["--independent"])),
        Test::new("refused_without_annotation", refused_without_annotation),
        Test::new("direct", |case| direct(case, ALLOW)),
        Test::new("paused_stay_paused", paused_stay_paused),
        // Its members are locked one after the other.
        Test::new("in_a_job_direct", |case| direct(case, JOB)),
        Test::new("in_a_job_paused_come_to_rest", paused_in_a_job),
        Test::new("in_a_job_go_on_after_a_killed_checkpoint", killed_in_a_job),
    ]
}

fn start(case: &Case, options: &[&str], annotation: Option<&str>) -> Result<String> {
    if annotation == Some(JOB) {
        case.gpu.driver("610.43.02")?;
    }
    let count = RANKS.to_string();
    // No port: waiting for datagrams makes rank 0 the slow one, so that the others sit in a kernel
    // that waits for it practically always, and no moment is right for a lock.
    let program = ["/bin/ranks", &count, "--log", "/data/log", "--port", "0"];
    let mut container = Container::new(program.iter().chain(options).copied());
    if let Some(annotation) = annotation {
        container = container.annotated(annotation);
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
    let id = start(case, options, Some(ALLOW))?;
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
    let id = start(case, &[], None)?;
    let image = Some(case.path("image"));
    let error = case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    ensure!(error.contains("dev.stasis.multi-process"), "the error tells no way out: {error}");
    case.expect_status(&id, Status::Running)?;
    advance(case, &id)
}

/// Nobody pauses them before, so they may run on until all can be locked.
fn direct(case: &Case, annotation: &str) -> Result<()> {
    let id = start(case, &[], Some(annotation))?;
    command::succeed(&mut case.direct_checkpoint(&id, &case.path("image")), LIMIT)?;
    case.expect_status(&id, Status::Running)?;
    advance(case, &id)
}

fn paused_stay_paused(case: &Case) -> Result<()> {
    let id = start(case, &[], Some(ALLOW))?;
    case.ctr().pause(&id)?;
    let before = steps(case, &id)?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    case.expect_status(&id, Status::Paused)?;
    ensure!(steps(case, &id)? == before, "a paused rank made a step");
    case.ctr().resume(&id)?;
    advance(case, &id)
}

/// Killed while one is waited for: its lock would be granted later, and nobody would be there to
/// unlock it.
fn killed_in_a_job(case: &Case) -> Result<()> {
    let id = start(case, &[], Some(JOB))?;
    for image in ["first", "second", "third"] {
        case.ctr().pause(&id)?;
        let image = Some(case.path(image));
        let striker = Striker::new(case, "checkpoint").strike();
        let failed = case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() });
        joined(striker)?;
        failed?;
        case.ctr().resume(&id)?;
        advance(case, &id)?;
        advance(case, &id)?;
    }
    case.ctr().pause(&id)?;
    let image = Some(case.path("fourth"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    case.ctr().resume(&id)?;
    advance(case, &id)
}

/// Wherever they were paused: one that is ahead needs what another has yet to launch, and gets it.
fn paused_in_a_job(case: &Case) -> Result<()> {
    let id = start(case, &[], Some(JOB))?;
    for image in ["first", "second", "third"] {
        case.ctr().pause(&id)?;
        let image = Some(case.path(image));
        case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
        case.expect_status(&id, Status::Paused)?;
        let rested = steps(case, &id)?;
        let (least, most) = (rested.iter().min(), rested.iter().max());
        let apart = most.zip(least).map_or(0, |(most, least)| most - least);
        ensure!(apart <= 1, "they are at rest after different steps: {rested:?}");
        case.ctr().resume(&id)?;
        advance(case, &id)?;
    }
    Ok(())
}
