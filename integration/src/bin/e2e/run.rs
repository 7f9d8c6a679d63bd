//! A GPU container just runs.

use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::command;
use stasis_integration::ctr::Status;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("counts", counts),
        Test::new("pauses_and_resumes", pauses_and_resumes),
        Test::new("ends_by_kill", ends_by_kill),
        Test::new("exit_status", exit_status),
    ]
}

fn counts(case: &Case) -> Result<()> {
    let id = case.start(&Container::counter(&[]))?;
    case.expect(&id, 101)?;
    case.expect(&id, 102)?;
    case.expect_status(&id, Status::Running)
}

fn pauses_and_resumes(case: &Case) -> Result<()> {
    let id = case.start(&Container::counter(&[]))?;
    case.expect(&id, 101)?;
    case.ctr().pause(&id)?;
    case.expect_status(&id, Status::Paused)?;
    case.ctr().resume(&id)?;
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)
}

fn ends_by_kill(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.ctr().kill(&id)?;
    case.wait_stopped(&id)?;
    case.remove(&id)
}

fn exit_status(case: &Case) -> Result<()> {
    let id = case.start(&Container::new(["/bin/sh", "-c", "exit 7"]))?;
    case.wait_stopped(&id)?;
    let mut remove = case.ctr().command(["tasks", "rm", &id]);
    let said = command::run(&mut remove, Duration::from_secs(10))?.stderr;
    ensure!(said.contains("exit code 7"), "ctr tasks rm said {said}");
    Ok(())
}
