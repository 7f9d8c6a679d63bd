//! Runtime classes: which of them runs what, and what their tables say.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::cri::{Class, Container, Cri, NAMESPACE, Sandbox, Settings};
use stasis_integration::processes;
use stasis_integration::shim::Shim;

use super::printed;
use crate::Test;

pub(super) fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for class in Class::OURS {
        tests.push(Test::new(format!("runs_{}", class.word()), move |case: &Case| {
            runs(case, class)
        }));
    }
    tests.extend([
        Test::new("options", options),
        Test::new("config_path", config_path),
        Test::new("sample", sample),
    ]);
    tests
}

/// A container with a GPU, in all labs: what of a pod's life needs no checkpoint.
fn runs(case: &Case, class: Class) -> Result<()> {
    let cri = Cri::start(case)?;
    let (_, id) = cri.in_pod(Sandbox::of(class), &Container::counter(&[]))?;
    cri.expect(&id, 101)?;
    let shims = cri.containerd().shims();
    let ours = |pid| processes::runs(pid, "containerd-shim-runc-stasis");
    let wanted = class != Class::Engine;
    ensure!(
        shims.len() == 1 && ours(shims[0]) == wanted,
        "not the shim of the class: {:?}",
        shims.into_iter().map(processes::describe).collect::<Vec<_>>()
    );
    // containerd finds its shims again.
    cri.restart()?;
    cri.expect(&id, 102)?;
    let name = cri.exec(&id, &["cat", "/proc/1/comm"])?;
    ensure!(name.trim() == "counter", "init is called {name:?}");
    printed(&cri.logs(&id)?, 101..=102)?;
    cri.run(["stop", "--timeout", "0", &id])?;
    let status = cri.wait_exited(&id)?;
    ensure!(status["exitCode"] == 137, "{status}");
    cri.remove(&id)?;
    cri.finish()
}

/// runc's options and tables of ours in one table.
fn options(case: &Case) -> Result<()> {
    let (root, runc) = (case.path("root"), case.runtime.program(Shim::Stasis));
    let called = case.path("called");
    script(
        &case.path("own-runc"),
        &format!("echo \"$@\" >>{}\nexec {} \"$@\"", called.display(), runc.display()),
    )?;
    let settings = Settings {
        options: format!(
            "Root = \"{}\"\nBinaryName = \"{}\"\nannotations.allow = [\"lock-timeout\"]\nannotations.max-lock-timeout = \"1m\"\n",
            root.display(),
            case.path("own-runc").display()
        ),
        ..Settings::default()
    };
    let cri = Cri::start_with(case, &settings)?;
    let (pod, id) =
        cri.in_pod(Sandbox::of(Class::Stasis), &Container::script("exec sleep 1000000"))?;
    let state = root.join(NAMESPACE).join(&id);
    ensure!(state.is_dir(), "runc has no state in {}", state.display());
    let calls = fs::read_to_string(&called)?;
    let create = calls.lines().find(|call| call.ends_with(&id) && call.contains(" create "));
    let create = create.context("the own runc was not called")?;
    ensure!(!create.contains("--systemd-cgroup"), "{create}");
    // The tables are a whole configuration: what the host's allows by default they do not.
    let container = Container::script("exec sleep 1000000").named("second");
    let refused = container.annotated("dev.stasis.multi-process", "allow");
    let refused = cri.create(&pod, &refused)?;
    let error = cri.fail(["start", &refused])?;
    ensure!(error.contains("dev.stasis.multi-process"), "{error}");
    cri.remove_pod(&pod)?;
    ensure!(!state.exists(), "{} is left", state.display());
    cri.finish()
}

fn config_path(case: &Case) -> Result<()> {
    let (own, called) = (case.path("class.toml"), case.path("called"));
    let runc = case.runtime.program(Shim::Stasis);
    script(
        &case.path("own-runc"),
        &format!("echo \"$@\" >>{}\nexec {} \"$@\"", called.display(), runc.display()),
    )?;
    let text = fs::read_to_string(case.runtime.config())?;
    let (from, to) = (case.runtime.program(Shim::Stasis), case.path("own-runc"));
    fs::write(&own, text.replace(&*from.to_string_lossy(), &to.to_string_lossy()))?;
    let options = format!("ConfigPath = \"{}\"\n", own.display());
    let cri = Cri::start_with(case, &Settings { options, ..Settings::default() })?;
    let (_, id) =
        cri.in_pod(Sandbox::of(Class::Stasis), &Container::script("exec sleep 1000000"))?;
    let calls = fs::read_to_string(&called)?;
    ensure!(calls.lines().any(|call| call.ends_with(&id)), "the own runc was not called: {calls}");
    cri.finish()
}

/// The classes that config/ shows to people are those that were tested.
fn sample(case: &Case) -> Result<()> {
    let cri = Cri::start_with(case, &Settings { sample: true, ..Settings::default() })?;
    for class in [Class::Stasis, Class::StasisPath] {
        let sandbox = Sandbox::of(class).annotated("dev.stasis.multi-process", "allow");
        let (pod, id) = cri.in_pod(sandbox, &Container::counter(&[]))?;
        cri.expect(&id, 101)?;
        let annotations = cri.inspect(&id)?["info"]["runtimeSpec"]["annotations"].take();
        ensure!(annotations["dev.stasis.multi-process"] == "allow", "{class:?}: {annotations}");
        cri.remove_pod(&pod)?;
    }
    cri.finish()
}

fn script(path: &Path, body: &str) -> Result<()> {
    fs::write(path, format!("#!/bin/sh\n{body}\n"))?;
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
}
