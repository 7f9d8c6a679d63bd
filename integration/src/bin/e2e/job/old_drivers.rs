//! Drivers that lose what processes share: the refusal, and the loss told as what it is.

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::command;
use stasis_integration::ctr::Checkpoint;
use stasis_integration::ipc::Group;
use stasis_integration::leaks;
use std::time::Duration;

use super::own::{Own, digest, says};
use super::{IPC, KEEPS, KNOWS, LAUNCH, OLD};
use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);
const ALLOW: &str = "dev.stasis.multi-process=allow";
const LOST: [&str; 3] = ["(ipc)", "GPU memory that it shared with another process", "is lost"];

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("none_on_580_refused", |case| refused(case, OLD, &[])),
        Test::new("none_on_610_refused", |case| refused(case, KEEPS, &[])),
        Test::new("launched_on_590_refused", |case| refused(case, KNOWS, &LAUNCH)),
        Test::new("lost_when_left_running", left_running),
        Test::new("lost_at_restore", at_restore),
        Test::new("lost_at_resume", at_resume),
        Test::new("nothing_shared_on_580", nothing_shared),
    ]
}

/// Both ways out are named.
fn refused(case: &Case<'_>, driver: &str, launch: &[&str]) -> Result<()> {
    case.gpu.driver(driver)?;
    let mut own = Own::new(case, "a", &[launch, &IPC].concat())?;
    own.start()?;
    own.expect()?;
    let error = own.refused(&case.path("image"))?;
    says(&error, &["4 processes use CUDA", "dev.stasis.job=file", "driver branch 610", ALLOW])?;
    own.delete()
}

fn allowed<'a>(case: &'a Case<'a>, name: &str, program: &[&str]) -> Result<Own<'a>> {
    case.gpu.driver(OLD)?;
    let mut own = Own::new(case, name, program)?;
    own.annotate(ALLOW)?;
    own.start()?;
    own.expect()?;
    Ok(own)
}

/// The container is ended, because it could do nothing right any more; the image is kept.
fn left_running(case: &Case<'_>) -> Result<()> {
    let mut own = allowed(case, "a", &IPC)?;
    let image = case.path("image");
    let error = command::fail(&mut own.checkpoint_call(&image, &["--leave-running"]), LIMIT)?;
    says(&error, &LOST)?;
    says(&error, &["killed", &image.display().to_string()])?;
    // A driver that keeps it would need a job.
    ensure!(image.join("stasis.json").exists(), "the image is gone");
    let before = digest(&image)?;
    own.delete()?;
    let error = own.restore_fails(&image)?;
    says(&error, &LOST)?;
    ensure!(digest(&image)? == before, "the image was changed");
    Ok(())
}

fn at_restore(case: &Case<'_>) -> Result<()> {
    let mut own = allowed(case, "a", &IPC)?;
    let image = case.path("image");
    own.checkpoint_and_end(&image)?;
    let before = digest(&image)?;
    for _ in 0..2 {
        let error = own.restore_fails(&image)?;
        says(&error, &LOST)?;
        ensure!(digest(&image)? == before, "the image was changed");
    }
    Ok(())
}

/// A client of containerd pauses and resumes: its Resume tells.
fn at_resume(case: &Case<'_>) -> Result<()> {
    let id = case.start(&Container::new(IPC).annotated(ALLOW))?;
    Group::new(4).expect(case.pid(&id)?)?;
    case.ctr().pause(&id)?;
    let image = case.path("image");
    case.checkpoint(&id, &Checkpoint { image: Some(image.clone()), ..Checkpoint::default() })?;
    let before = digest(&image)?;
    let error = case.ctr().fail(["tasks", "resume", &id])?;
    says(&error, &LOST)?;
    case.wait_stopped(&id)?;
    ensure!(digest(&image)? == before, "the image was changed");
    case.remove(&id)?;
    leaks::container(case.ctr().namespace(), &id)
}

/// As NCCL with `NCCL_P2P_DISABLE=1`.
fn nothing_shared(case: &Case<'_>) -> Result<()> {
    let own = allowed(case, "a", &["/bin/ipc", "4", "--no-share"])?;
    own.goes_on()
}
