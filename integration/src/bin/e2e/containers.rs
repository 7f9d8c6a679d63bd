//! `ctr containers checkpoint --rw --task` and `ctr containers restore --rw --live`.

use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::ctr::Status;
use stasis_integration::wait;

use crate::{Test, consecutive};

const LOG: &str = "/data/log";

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("counter_goes_on", counter_goes_on),
        Test::new("original_goes_on", original_goes_on),
        Test::new("files_fit_memory", files_fit_memory),
        Test::new("three_cycles", three_cycles),
        Test::new("large_memory", large_memory),
        Test::new("kernels_in_flight", kernels_in_flight),
    ]
}

fn counter_goes_on(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.cycle(&id)?;
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)
}

fn original_goes_on(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.ctr().checkpoint_container(&id, "checkpoint/original:1")?;
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)?;
    case.ctr().remove_image("checkpoint/original:1")
}

/// The workload appends all the time: CRIU refuses a file that does not have the size it had at
/// the dump, so the files and the memory must be of the same moment.
fn files_fit_memory(case: &Case) -> Result<()> {
    let id = case.start_counter(&["--log", LOG, "--tick", "1"])?;
    for _ in 0..2 {
        case.cycle(&id)?;
        let count = case.ask(&id)?;
        wait::until("the log of the last count", Duration::from_secs(5), || {
            Ok((consecutive(&case.read(&id, LOG)?, 101)? > count).then_some(()))
        })?;
    }
    Ok(())
}

fn three_cycles(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    for count in 102..=104 {
        case.cycle(&id)?;
        case.expect(&id, count)?;
    }
    Ok(())
}

/// The pattern is verified by a kernel at each count.
fn large_memory(case: &Case) -> Result<()> {
    let id = case.start_counter(&["--pattern-mib", "64"])?;
    case.cycle(&id)?;
    case.expect(&id, 102)
}

fn kernels_in_flight(case: &Case) -> Result<()> {
    let id = case.start_counter(&["--log", LOG, "--tick", "200", "--spin", "100"])?;
    case.cycle(&id)?;
    ensure!(case.ask(&id)? > 101, "the counter began anew");
    consecutive(&case.read(&id, LOG)?, 101).map(drop)
}
