//! crun below Podman, and below `stasis-runc`.
//!
//! It does not start a container where cgroups of both versions are mounted, as on the tests' host
//! (hybrid mode 'won't be supported', podman#3439), and its package brings no `libcriu.so.2`. So
//! there is no cell of the matrix for it, but what goes before the dump is tested where only
//! version 2 is mounted.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Result, bail, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::podman::Podman;
use stasis_integration::runtime::Settings;

use crate::Test;

const CRUN: &str = "/usr/bin/crun";
const NO_LIBCRIU: &str = "could not load `libcriu.so.2`";

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("stock_crun_needs_one_hierarchy", needs_one_hierarchy),
        Test::new("stock_crun_has_no_libcriu", has_no_libcriu),
        Test::new("crun_below", below),
    ]
}

fn sleeper() -> Container {
    Container::new(["sleep", "1000"]).without_gpu()
}

/// The host has no controllers in version 2, so no limit may be asked for.
fn without_limits(mut container: Container) -> Container {
    container.options.push("--pids-limit=0".to_owned());
    container
}

fn needs_one_hierarchy(case: &Case) -> Result<()> {
    let podman = Podman::with_image(case, "store")?.with_runtime(CRUN);
    let Err(error) = podman.start("c1", &sleeper()) else {
        bail!("crun works on hybrid cgroups now: test it");
    };
    let said = format!("{error:#}");
    let words = "cgroups in hybrid mode not supported, drop all controllers from cgroupv2";
    ensure!(said.contains(words), "{said}");
    podman.finish()
}

fn has_no_libcriu(case: &Case) -> Result<()> {
    let podman =
        Podman::with_image(case, "store")?.with_runtime(CRUN).with_cgroups_of_version_2()?;
    podman.start("c1", &without_limits(sleeper()))?;
    let said = podman.fail(["container", "checkpoint", "c1"])?;
    ensure!(said.contains(NO_LIBCRIU), "{said}");
    podman.finish()
}

/// crun's state is found, CUDA is suspended, and when crun then fails the container is as it was.
fn below(case: &Case) -> Result<()> {
    let path = format!("\"{CRUN}\"");
    case.set(&Settings::default().with("runtime", "path", &path))?;
    // By this name Podman gives it a log, as crun.
    let runtime = case.path("crun");
    let wrapper = case.runtime.wrapper();
    fs::write(&runtime, format!("#!/bin/sh\nexec {} \"$@\"\n", wrapper.display()))?;
    fs::set_permissions(&runtime, Permissions::from_mode(0o755))?;
    let podman =
        Podman::with_image(case, "store")?.with_runtime(runtime).with_cgroups_of_version_2()?;
    podman.start("c1", &without_limits(Container::counter(&["--stdout"])))?;
    podman.expect("c1", 101)?;
    let said = podman.fail(["container", "checkpoint", "c1"])?;
    // crun's form: without time and level.
    ensure!(said.starts_with("stasis: checkpoint of container"), "{said}");
    for words in ["phase criu-dump", NO_LIBCRIU, "the container runs on as before"] {
        ensure!(said.contains(words), "{words:?} is not in {said}");
    }
    podman.expect_status("c1", "running")?;
    podman.expect("c1", 102)?;
    podman.finish()
}
