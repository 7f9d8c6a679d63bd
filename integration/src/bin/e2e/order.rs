//! Commands in an order that nobody has in mind, until somebody types it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container, PORT};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::{command, udp, wait};

use crate::Test;
use crate::failures::{LOG, goes_on, start, works_again};

const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("restore_over_a_running_container", restore_over),
        Test::new("restore_in_the_foreground", in_the_foreground),
        Test::new("two_checkpoints_while_paused", twice_paused),
        Test::new("checkpoint_while_paused_then_kill", paused_then_kill),
        Test::new("resume_with_the_root_spelled_otherwise", other_root),
        Test::new("libcuda_loaded_and_not_used", loaded_only),
    ]
}

fn to(image: &Path) -> Checkpoint {
    Checkpoint { image: Some(image.to_owned()), ..Checkpoint::default() }
}

fn restore_of(case: &Case, image: &Path) -> Command {
    let mut command = case.runtime.command();
    command.arg("--root").arg(case.root()).arg("restore").arg("--image-path").arg(image);
    command
}

/// The runtime's own refusal, and the container that is there goes on.
fn restore_over(case: &Case) -> Result<()> {
    let id = start(case)?;
    let image = case.path("image");
    case.checkpoint(&id, &to(&image))?;
    let mut command = restore_of(case, &image);
    command.arg("--work-path").arg(case.path("work")).args(["--detach", &id]);
    command::fail(&mut command, LIMIT)?;
    goes_on(case, &id)
}

/// The runtime would come back only at the end of the container, whose CUDA would wait until then.
fn in_the_foreground(case: &Case) -> Result<()> {
    let id = start(case)?;
    let image = case.path("image");
    case.checkpoint(&id, &to(&image))?;
    let mut command = restore_of(case, &image);
    command.arg("--bundle").arg(case.path("none")).arg(format!("{id}-2"));
    let error = command::fail(&mut command, LIMIT)?;
    ensure!(error.contains("add --detach"), "{error}");
    goes_on(case, &id)
}

/// The second finds CUDA checkpointed already, and both images are good.
fn twice_paused(case: &Case) -> Result<()> {
    let id = start(case)?;
    case.ctr().pause(&id)?;
    let before = case.read(&id, LOG)?;
    let images = [case.path("first"), case.path("second")];
    for image in &images {
        case.checkpoint(&id, &to(image))?;
        case.expect_status(&id, Status::Paused)?;
        ensure!(image.join("stasis.json").exists(), "no manifest in {}", image.display());
    }
    ensure!(case.read(&id, LOG)? == before, "the log of a paused container grew");
    case.ctr().resume(&id)?;
    goes_on(case, &id)?;
    works_again(case, &id)
}

/// A kill needs no resume, and nothing stays behind.
fn paused_then_kill(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.ctr().pause(&id)?;
    let image = case.path("image");
    case.checkpoint(&id, &to(&image))?;
    case.end_task(&id)?;
    let (_bundle, pid) = case.restore_from(&id, &image)?;
    let answer = udp::ask(pid, PORT)?;
    ensure!(answer == 102, "{answer}");
    Ok(())
}

fn other_root(case: &Case) -> Result<()> {
    let id = start(case)?;
    case.ctr().pause(&id)?;
    case.checkpoint(&id, &to(&case.path("image")))?;
    let mut command = case.runtime.command();
    command.arg("--root").arg(case.root().join("..").join(case.ctr().namespace()).join(""));
    command.args(["resume", &id]);
    command::succeed(&mut command, LIMIT)?;
    // containerd was not asked and still says that it is paused.
    let before = case.read(&id, LOG)?;
    wait::until("more counts", Duration::from_secs(5), || {
        Ok((case.read(&id, LOG)?.len() > before.len()).then_some(()))
    })
}

/// A program that is linked to libcuda and has not begun to use it.
fn loaded_only(case: &Case) -> Result<()> {
    let mut container = Container::counter(&["--late", "3600000"]);
    container.options.extend([
        "--env".to_owned(),
        "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libcuda.so.1".to_owned(),
    ]);
    let id = case.start(&container)?;
    wait::until("libcuda in the container", Duration::from_secs(10), || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", case.pid(&id)?))?;
        Ok(maps.contains("libcuda.so.1").then_some(()))
    })?;
    let image = case.path("image");
    case.checkpoint(&id, &to(&image))?;
    case.expect_status(&id, Status::Running)?;
    case.end_task(&id)?;
    case.restore_from(&id, &image).map(drop)
}
