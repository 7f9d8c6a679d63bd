//! What fails is told by Podman in the engine's words, and the container is as it was.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::podman::Podman;
use stasis_integration::runtime::Settings;
use stasis_integration::wait;

use crate::{Test, consecutive};

pub(super) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for fault in ["lock error:304", "checkpoint error:304"] {
        let name = format!("{}_fails", fault.split_once(' ').map_or("", |(call, _)| call));
        tests.push(Test::new(name, move |case: &Case| checkpoint_fails(case, fault)));
    }
    for runtime in ["runc", "stasis-runc"] {
        let name = format!("restore_of_{}_fails", runtime.replace('-', "_"));
        tests.push(Test::new(name, move |case: &Case| restore_fails(case, runtime)));
        let name = format!("create_by_{}_refused", runtime.replace('-', "_"));
        tests.push(Test::new(name, move |case: &Case| create_refused(case, runtime)));
    }
    tests.push(Test::new("criu_fails", criu_fails));
    tests
}

/// A store with a counter that counts all the time.
fn counting<'a>(case: &'a Case<'a>) -> Result<Podman<'a>> {
    let podman = Podman::with_image(case, "store")?;
    podman.start("c1", &Container::counter(&["--stdout", "--tick", "5"]))?;
    podman.ask("c1")?;
    Ok(podman)
}

/// It runs, counts, and has missed no number.
fn goes_on(podman: &Podman<'_>) -> Result<()> {
    podman.expect_status("c1", "running")?;
    let count = podman.ask("c1")?;
    wait::until("the output of the last count", Duration::from_secs(5), || {
        Ok((consecutive(&podman.logs("c1")?, 101)? > count).then_some(()))
    })
}

fn checkpoint_fails(case: &Case, fault: &str) -> Result<()> {
    case.set(&Settings::default().impatient(1))?;
    let podman = counting(case)?;
    case.gpu.faults(&[fault])?;
    let said = podman.fail(["container", "checkpoint", "c1"])?;
    let phase = if fault.starts_with("lock") { "phase lock" } else { "phase cuda-checkpoint" };
    let words = ["level=error msg=\"stasis: checkpoint of", phase, "runs on as before"];
    for words in words {
        ensure!(said.contains(words), "{words:?} is not in {said}");
    }
    goes_on(&podman)?;
    case.gpu.heal()?;
    case.set(&Settings::default())?;
    podman.run(["container", "checkpoint", "c1"])?;
    podman.run(["container", "restore", "c1"])?;
    goes_on(&podman)?;
    podman.finish()
}

/// The test's runtime under another name.
fn named(case: &Case, name: &str) -> Result<PathBuf> {
    let path = case.path(name);
    let wrapper = case.runtime.wrapper();
    fs::write(&path, format!("#!/bin/sh\nexec {} \"$@\"\n", wrapper.display()))?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(path)
}

/// An annotation that this host does not know is told at `podman run`.
fn create_refused(case: &Case, runtime: &str) -> Result<()> {
    let podman = Podman::with_image(case, "store")?.with_runtime(named(case, runtime)?);
    let wrong = Container::new(["sleep", "1000"]).annotated("dev.stasis.nonsense=allow");
    let Err(error) = podman.start("c1", &wrong.without_gpu()) else {
        bail!("a wrong annotation was taken");
    };
    let said = format!("{error:#}");
    ensure!(said.contains("unknown annotation `dev.stasis.nonsense`"), "{said}");
    podman.finish()
}

/// Podman gives a log in JSON to a runtime of this name, and none to one of another; it says what
/// the engine said all the same.
fn restore_fails(case: &Case, runtime: &str) -> Result<()> {
    let podman = Podman::with_image(case, "store")?.with_runtime(named(case, runtime)?);
    podman.start("c1", &Container::counter(&["--stdout"]))?;
    podman.expect("c1", 101)?;
    podman.run(["container", "checkpoint", "c1"])?;
    case.set(&Settings::default().impatient(2))?;
    case.gpu.faults(&["restore error:304"])?;
    let said = podman.fail(["container", "restore", "c1"])?;
    ensure!(said.contains("stasis: restore of container") && said.contains("304"), "{said}");
    case.gpu.heal()?;
    case.set(&Settings::default())?;
    podman.run(["container", "restore", "c1"])?;
    podman.expect("c1", 102)?;
    let logged = case.runtime.runc_calls()?.iter().any(|call| call.contains("--log-format=json"));
    ensure!(logged == (runtime == "runc"), "{:#?}", case.runtime.runc_calls()?);
    podman.finish()
}

/// A CRIU that does nothing but fail, for the runtime; Podman asks its own.
fn criu_fails(case: &Case) -> Result<()> {
    let podman = counting(case)?;
    let folder = case.path("path");
    fs::create_dir_all(&folder)?;
    std::os::unix::fs::symlink("/bin/false", folder.join("criu"))?;
    case.set(&Settings { path: Some(folder), ..Settings::default() })?;
    let said = podman.fail(["container", "checkpoint", "c1"])?;
    ensure!(said.contains("msg=\"stasis: checkpoint of"), "{said}");
    ensure!(said.contains("CRIU version check failed"), "{said}");
    goes_on(&podman)?;
    case.set(&Settings::default())?;
    podman.run(["container", "checkpoint", "c1"])?;
    podman.run(["container", "restore", "c1"])?;
    goes_on(&podman)?;
    podman.finish()
}
