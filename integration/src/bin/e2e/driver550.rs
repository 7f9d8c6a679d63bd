//! Drivers without a checkpoint API in libcuda: NVIDIA's command is the way, and on 550 it has only
//! `--toggle`.

use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Place};
use stasis_integration::command;
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::Settings;
use stasis_integration::shim::Shim;

use crate::Test;
use crate::suspend::Stasis;

const LIMIT: Duration = Duration::from_secs(60);

const TOGGLE: &str = "550.54.15";
const STEPS: &str = "555.42.02";

pub(crate) fn modules() -> Vec<(&'static str, Place, Vec<Test>)> {
    let modules = [(Shim::Go, "stasis_runc"), (Shim::Stasis, "shim")].map(|(shim, word)| {
        let mut tests = Vec::new();
        for (driver, branch) in [(TOGGLE, "550"), (STEPS, "555")] {
            tests.push(Test::new(format!("{word}_cycles_{branch}"), move |case| {
                cycles(case, driver)
            }));
            tests.push(Test::new(format!("{word}_paused_{branch}"), move |case| {
                paused(case, driver)
            }));
            tests.push(Test::new(format!("{word}_direct_{branch}"), move |case| {
                direct(case, driver)
            }));
            tests.push(Test::new(format!("{word}_suspended_{branch}"), move |case| {
                suspended(case, driver)
            }));
        }
        tests.push(Test::new(format!("{word}_failed_dump_550"), |case| failed_dump(case, TOGGLE)));
        tests.push(Test::new(format!("{word}_refused_550"), refused_toggle));
        tests.push(Test::new(format!("{word}_refused_555"), refused_step));
        tests.push(Test::new(format!("{word}_without_the_command"), without_the_command));
        tests.push(Test::new(format!("{word}_restore_without_the_command"), restore_without));
        ("driver550", Place::apart(shim), tests)
    });
    modules.into()
}

fn start(case: &Case, driver: &str, options: &[&str]) -> Result<String> {
    case.gpu.driver(driver)?;
    case.start_counter(options)
}

fn cycles(case: &Case, driver: &str) -> Result<()> {
    let id = start(case, driver, &["--pattern-mib", "4"])?;
    for count in 102..=104 {
        case.cycle(&id)?;
        case.expect(&id, count)?;
    }
    Ok(())
}

fn paused(case: &Case, driver: &str) -> Result<()> {
    let id = start(case, driver, &[])?;
    case.ctr().pause(&id)?;
    for image in ["first", "second"] {
        let image = Some(case.path(image));
        case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
        case.expect_status(&id, Status::Paused)?;
    }
    case.ctr().resume(&id)?;
    case.expect(&id, 102)
}

fn direct(case: &Case, driver: &str) -> Result<()> {
    let id = start(case, driver, &["--tick", "20", "--log", "/data/log"])?;
    command::succeed(&mut case.direct_checkpoint(&id, &case.path("image")), LIMIT)?;
    case.expect_status(&id, Status::Running)?;
    case.ask(&id).map(drop)
}

fn suspended(case: &Case, driver: &str) -> Result<()> {
    let id = start(case, driver, &[])?;
    let stasis = Stasis::new(case);
    for count in [102, 103] {
        stasis.run(&["suspend", &id])?;
        stasis.expect_suspended(&id, 1)?;
        stasis.run(&["resume", &id])?;
        case.expect(&id, count)?;
    }
    let error = {
        stasis.run(&["suspend", &id])?;
        stasis.fails(&["resume", &id, "--to", "0"])?
    };
    ensure!(error.contains("branch 580") && error.contains("suspended as before"), "{error}");
    stasis.run(&["resume", &id])?;
    case.expect(&id, 104)
}

fn failed_dump(case: &Case, driver: &str) -> Result<()> {
    let id = start(case, driver, &[])?;
    let before_runc = "case \" $* \" in *' checkpoint '*) exit 1;; esac".to_owned();
    case.set(&Settings { before_runc, ..Settings::default() })?;
    let image = Some(case.path("image"));
    case.checkpoint_fails(&id, &Checkpoint { image, exit: true, ..Checkpoint::default() })?;
    case.set(&Settings::default())?;
    case.expect(&id, 102)?;
    case.cycle(&id)?;
    case.expect(&id, 103)
}

/// A refused toggle leaves the process LOCKED, and 550 has nothing that unlocks: the container is
/// ended, and told.
fn refused_toggle(case: &Case) -> Result<()> {
    let id = start(case, TOGGLE, &["--managed"])?;
    let image = Some(case.path("image"));
    let error = case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    for words in ["operation not supported", "was killed"] {
        let said = error.contains(words) || error.contains("801");
        ensure!(said, "{words:?} is not in: {error}");
    }
    case.wait_stopped(&id)
}

/// 555 unlocks it.
fn refused_step(case: &Case) -> Result<()> {
    let id = start(case, STEPS, &["--managed"])?;
    let image = Some(case.path("image"));
    let error = case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    ensure!(error.contains("801"), "{error}");
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)
}

/// Refused before CRIU is asked; `stasis inspect` knows as much.
fn restore_without(case: &Case) -> Result<()> {
    let id = start(case, TOGGLE, &[])?;
    let directory = case.path("image");
    let image = Some(directory.clone());
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    let image = format!("checkpoint/{id}:1");
    case.ctr().checkpoint_container(&id, &image)?;
    case.remove(&id)?;
    case.set(&no_command())?;
    let error = case.ctr().restore_fails(&id, &image)?;
    ensure!(error.contains("/no/such/cuda-checkpoint") && error.contains("570"), "{error}");
    ensure!(error.contains("in phase preflight") && error.contains("not touched"), "{error}");
    let report = Stasis::new(case).json(&["inspect", &directory.display().to_string()])?;
    let why = report["host"]["problems"].to_string();
    ensure!(report["host"]["can_restore"] == false, "{report}");
    ensure!(why.contains("/no/such/cuda-checkpoint"), "{why}");
    case.remove(&id)?;
    case.set(&Settings::default())?;
    case.ctr().restore(&id, &image)?;
    case.expect(&id, 102)?;
    case.ctr().remove_image(&image)
}

fn no_command() -> Settings {
    Settings::default().with("cuda", "utility", "\"/no/such/cuda-checkpoint\"")
}

fn without_the_command(case: &Case) -> Result<()> {
    let settings = no_command();
    case.set(&settings)?;
    let id = start(case, TOGGLE, &[])?;
    case.set(&settings)?;
    let image = Some(case.path("image"));
    let error = case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    ensure!(error.contains("/no/such/cuda-checkpoint") && error.contains("570"), "{error}");
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)
}
