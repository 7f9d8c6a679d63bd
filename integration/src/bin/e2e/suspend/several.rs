//! Containers with several CUDA processes.

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container, PORT};
use stasis_integration::ctr::Checkpoint;
use stasis_integration::ipc::Group;
use stasis_integration::udp::Question;
use stasis_integration::wait;

use super::{LIMIT, SILENCE, Stasis, says};
use crate::job::{FILE, IPC, KEEPS, LAUNCH};
use crate::{Test, consecutive};

/// They share nothing.
const ALLOW: &str = "dev.stasis.multi-process=allow";
const RANKS: usize = 3;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("job_by_annotation", |case| in_job(case, true)),
        Test::new("job_by_itself", |case| in_job(case, false)),
        Test::new("job_checkpointed", job_checkpointed),
        Test::new("job_with_one_that_began_since", began_since),
        Test::new("shared_without_job_refused", refused),
        Test::new("ranks_that_wait_for_each_other", |case| ranks(case, ALLOW)),
        Test::new("ranks_in_a_job", |case| ranks(case, FILE)),
    ]
}

fn start(case: &Case<'_>, annotated: bool) -> Result<(String, Group)> {
    case.gpu.driver(KEEPS)?;
    let id = if annotated {
        case.start(&Container::new(IPC).annotated(FILE))?
    } else {
        case.start(&Container::new(LAUNCH.iter().chain(&IPC).copied()))?
    };
    let mut group = Group::new(4);
    group.expect(case.pid(&id)?)?;
    Ok((id, group))
}

/// Four processes that share memory.
fn in_job(case: &Case<'_>, annotated: bool) -> Result<()> {
    let (id, mut group) = start(case, annotated)?;
    let (stasis, init) = (Stasis::new(case), case.pid(&id)?);
    for _ in 0..3 {
        says(&stasis.run(&["suspend", &id])?, &["is suspended: 4 processes in"])?;
        stasis.expect_suspended(&id, 4)?;
        let seen = stasis.seen(&id)?.unwrap_or_default();
        ensure!(seen["job"] == annotated, "{seen}");
        let question = Question::send(init, PORT)?;
        question.expect_none(SILENCE)?;
        says(&stasis.run(&["resume", &id])?, &["is resumed: 4 processes in"])?;
        group.answered(question.answer()?)?;
        stasis.expect_running(&id, 4)?;
        group.expect(init)?;
    }
    Ok(())
}

/// A checkpoint of a suspended one that goes on, and a restore.
fn job_checkpointed(case: &Case<'_>) -> Result<()> {
    let (id, mut group) = start(case, true)?;
    let stasis = Stasis::new(case);
    stasis.run(&["suspend", &id])?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    stasis.expect_suspended(&id, 4)?;
    stasis.run(&["resume", &id])?;
    group.expect(case.pid(&id)?)?;
    stasis.run(&["suspend", &id])?;
    case.cycle(&id)?;
    stasis.expect_running(&id, 4)?;
    group.expect(case.pid(&id)?)?;
    stasis.run(&["suspend", &id])?;
    stasis.expect_suspended(&id, 4)?;
    stasis.run(&["resume", &id])?;
    group.expect(case.pid(&id)?)
}

/// A member that begins while the others are suspended could come back only after them.
fn began_since(case: &Case<'_>) -> Result<()> {
    let (id, mut group) = start(case, true)?;
    let stasis = Stasis::new(case);
    stasis.run(&["suspend", &id])?;
    let counter = "/bin/counter --port 0 --ready /tmp/ready >/dev/null 2>&1 </dev/null &";
    case.ctr().run(["tasks", "exec", "--exec-id", "late", &id, "/bin/sh", "-c", counter])?;
    wait::until("the late one", LIMIT, || Ok(case.read(&id, "/tmp/ready").ok()))?;
    let image = |name: &str| Checkpoint { image: Some(case.path(name)), ..Checkpoint::default() };
    let error = case.checkpoint_fails(&id, &image("refused"))?;
    says(
        &error,
        &["(counter): has begun to use CUDA since pid", "stasis resume the container first"],
    )?;
    let seen = stasis.seen(&id)?.unwrap_or_default();
    let states = seen["processes"].as_array().into_iter().flatten().map(|one| &one["state"]);
    let states: Vec<_> = states.filter_map(|state| state.as_str()).collect();
    let count = |wanted: &str| states.iter().filter(|state| **state == wanted).count();
    ensure!((count("suspended"), count("running")) == (4, 1), "{seen}");
    // With the late one last all of it is suspended, checkpointed, restored and resumed.
    says(&stasis.run(&["suspend", &id])?, &["is suspended: 5 processes in"])?;
    case.checkpoint(&id, &image("image"))?;
    stasis.expect_suspended(&id, 5)?;
    case.cycle(&id)?;
    stasis.expect_running(&id, 5)?;
    group.expect(case.pid(&id)?)?;
    stasis.run(&["suspend", &id])?;
    stasis.run(&["resume", &id])?;
    group.expect(case.pid(&id)?)
}

/// The error names both ways out, and they go on.
fn refused(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    for driver in [KEEPS, "580.159.04"] {
        case.gpu.driver(driver)?;
        let id = case.start(&Container::new(IPC))?;
        let mut group = Group::new(4);
        group.expect(case.pid(&id)?)?;
        let error = stasis.fails(&["suspend", &id])?;
        says(
            &error,
            &[
                "4 processes use CUDA",
                "dev.stasis.job=file",
                "branch 610 or later",
                "dev.stasis.multi-process=allow",
                "the container was not touched",
            ],
        )?;
        stasis.expect_no_journal()?;
        stasis.expect_running(&id, 4)?;
        group.expect(case.pid(&id)?)?;
        case.remove(&id)?;
    }
    Ok(())
}

/// The last step of each rank. None is missing or wrong.
fn steps(case: &Case<'_>, id: &str) -> Result<Vec<u64>> {
    let log = |rank| case.read(id, &format!("/data/log.{rank}")).unwrap_or_default();
    (0..RANKS).map(|rank| consecutive(&log(rank), 1)).collect()
}

/// Waits until every rank has made another step.
fn advance(case: &Case<'_>, id: &str) -> Result<()> {
    let before = steps(case, id)?;
    wait::until("a step of each rank", LIMIT, || {
        let now = steps(case, id)?;
        let all = now.iter().zip(&before).all(|(now, before)| now > before);
        Ok(all.then_some(()))
    })
}

/// No moment is right for a lock of one of them alone.
fn ranks(case: &Case<'_>, annotation: &str) -> Result<()> {
    if annotation == FILE {
        case.gpu.driver(KEEPS)?;
    }
    let (stasis, count) = (Stasis::new(case), RANKS.to_string());
    let program = ["/bin/ranks", &count, "--log", "/data/log", "--port", "0"];
    let id = case.start(&Container::new(program).annotated(annotation))?;
    advance(case, &id)?;
    for _ in 0..3 {
        stasis.run(&["suspend", &id])?;
        stasis.expect_suspended(&id, RANKS)?;
        let before = steps(case, &id)?;
        std::thread::sleep(SILENCE);
        ensure!(steps(case, &id)? == before, "a suspended rank made a step");
        stasis.run(&["resume", &id])?;
        advance(case, &id)?;
    }
    Ok(())
}
