//! `ctr tasks checkpoint` in all its forms.

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, PORT};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::udp;

use crate::{Test, consecutive};

const LOG: &str = "/data/log";

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("direct", direct),
        Test::new("direct_of_a_paused_task", direct_of_a_paused_task),
        Test::new("restore_after_leave_running", restore_after_leave_running),
        Test::new("twice", twice),
    ];
    for paused in [false, true] {
        let of = if paused { "paused" } else { "running" };
        for to_path in [true, false] {
            let to = if to_path { "to_path" } else { "to_store" };
            tests.push(Test::new(format!("leave_{of}_{to}"), move |case: &Case| {
                leave(case, paused, to_path)
            }));
            tests.push(Test::new(format!("exit_{of}_{to}"), move |case: &Case| {
                exit(case, paused, to_path)
            }));
        }
    }
    tests
}

/// Where to; the work directory is kept, for the log of a failure.
fn options(case: &Case, to_path: bool, exit: bool) -> Checkpoint {
    let path = |name| to_path.then(|| case.path(name));
    Checkpoint { image: path("image"), work: path("work"), exit }
}

fn start(case: &Case) -> Result<String> {
    case.start_counter(&["--log", LOG, "--tick", "10"])
}

fn leave(case: &Case, paused: bool, to_path: bool) -> Result<()> {
    let id = start(case)?;
    if paused {
        case.ctr().pause(&id)?;
    }
    let before = case.read(&id, LOG)?;
    case.checkpoint(&id, &options(case, to_path, false))?;
    if paused {
        case.expect_status(&id, Status::Paused)?;
        let after = case.read(&id, LOG)?;
        ensure!(after == before, "the log of a paused container grew: {before:?} {after:?}");
        case.ctr().resume(&id)?;
    }
    case.expect_status(&id, Status::Running)?;
    let count = case.ask(&id)?;
    ensure!(consecutive(&case.read(&id, LOG)?, 101)? >= count, "the log stays behind");
    if to_path {
        ensure!(case.path("image").join("stasis.json").exists(), "the image has no manifest");
    }
    Ok(())
}

fn exit(case: &Case, paused: bool, to_path: bool) -> Result<()> {
    let id = start(case)?;
    if paused {
        case.ctr().pause(&id)?;
    }
    case.checkpoint(&id, &options(case, to_path, true))?;
    case.wait_stopped(&id)?;
    case.ctr().remove_task(&id)?;
    if to_path {
        // ctr restores from its store only, and there only what `ctr containers checkpoint` made.
        let (_bundle, pid) = case.restore_from(&id, &case.path("image"))?;
        let count = udp::ask(pid, PORT)?;
        ensure!(count > 101, "the counter began anew, at {count}");
        let log = std::fs::read_to_string(format!("/proc/{pid}/root{LOG}"))?;
        ensure!(consecutive(&log, 101)? >= count, "the log stays behind");
    }
    Ok(())
}

/// The image is of the moment of the dump, wherever the original has come to. (No log here: it
/// would be longer than the restored counter thinks.)
fn restored_says(case: &Case, id: &str, count: u64) -> Result<()> {
    case.end_task(id)?;
    let (_bundle, pid) = case.restore_from(id, &case.path("image"))?;
    let answer = udp::ask(pid, PORT)?;
    ensure!(answer == count, "the restored counter says {answer} instead of {count}");
    Ok(())
}

fn restore_after_leave_running(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.checkpoint(&id, &options(case, true, false))?;
    case.expect(&id, 102)?;
    case.expect(&id, 103)?;
    restored_says(case, &id, 102)
}

fn twice(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    for count in 102..=103 {
        case.checkpoint(&id, &options(case, true, false))?;
        case.expect(&id, count)?;
    }
    restored_says(case, &id, 103)
}

/// As Podman calls it, on a task that nobody paused.
fn direct(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    run(case.direct_checkpoint(&id, &case.path("image")))?;
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)?;
    restored_says(case, &id, 102)
}

fn direct_of_a_paused_task(case: &Case) -> Result<()> {
    let id = start(case)?;
    case.ctr().pause(&id)?;
    let before = case.read(&id, LOG)?;
    run(case.direct_checkpoint(&id, &case.path("image")))?;
    case.expect_status(&id, Status::Paused)?;
    ensure!(case.read(&id, LOG)? == before, "the log of a paused container grew");
    case.ctr().resume(&id)?;
    case.ask(&id)?;
    consecutive(&case.read(&id, LOG)?, 101).map(drop)
}

fn run(mut command: std::process::Command) -> Result<()> {
    stasis_integration::command::succeed(&mut command, std::time::Duration::from_secs(60)).map(drop)
}
