//! What has to be right before a container gets a job file: the driver, the annotation, and the
//! utility.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::runtime::Settings;
use stasis_integration::{command, leaks, processes, wait};

use super::own::{Own, says};
use super::{FILE, KEEPS, KNOWS, OLD};
use crate::Test;

const LIMIT: Duration = Duration::from_secs(20);

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("annotation_refused", annotation),
        Test::new("driver_refused", driver),
        Test::new("utility_refused", refused),
        Test::new("create_killed", killed),
    ]
}

/// A create that fails, without a trace.
fn fails(case: &Case<'_>, annotation: &str, words: &[&str]) -> Result<()> {
    let mut own = Own::new(case, "a", &super::IPC)?;
    own.annotate(annotation)?;
    let spec = own.bare.spec()?;
    says(&own.create_fails()?, words)?;
    ensure!(own.bare.spec()? == spec, "config.json was changed");
    let left = leaks::jobs(&case.runtime.state());
    ensure!(left.is_empty(), "{left:?} is left");
    Ok(())
}

fn annotation(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    fails(case, "dev.stasis.job=yes", &["dev.stasis.job", "`yes`", "expected"])?;
    let others = "[\"multi-process\", \"multi-gpu\", \"lock-timeout\"]";
    case.set(&Settings::default().with("annotations", "allow", others))?;
    fails(case, FILE, &["dev.stasis.job", "annotations.allow"])
}

/// The sentence names the driver that is there and the one that is needed.
fn driver(case: &Case<'_>) -> Result<()> {
    for version in [OLD, KNOWS] {
        case.gpu.driver(version)?;
        fails(case, FILE, &[&format!("driver {version}"), "branch 610 or later"])?;
    }
    case.set(&Settings::default().with("jobs", "minimum-driver", "590"))?;
    let mut own = Own::annotated(case, "brave")?;
    own.start()?;
    own.expect()?;
    own.delete()?;
    case.gpu.driver(OLD)?;
    fails(case, FILE, &[&format!("driver {OLD}"), "branch 590 or later"])
}

/// A program in the utility's place.
fn script(case: &Case<'_>, body: &str) -> Result<PathBuf> {
    let path = case.path("utility");
    fs::write(&path, format!("#!/bin/sh\n{body}\n"))?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(path)
}

fn with_utility(case: &Case<'_>, utility: &str) -> Result<()> {
    let utility = format!("\"{utility}\"");
    case.set(&Settings::default().impatient(2).with("cuda", "utility", &utility))
}

fn refused(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    for utility in ["/nonexistent/cuda-checkpoint", "no-such-utility"] {
        with_utility(case, utility)?;
        fails(case, FILE, &[utility, "is not there", "cuda.utility"])?;
    }
    for (body, words) in [
        ("echo 'no luck today' >&2; exit 3", &["exit status: 3", "no luck today"][..]),
        ("exit 0", &["made no job file"]),
        ("exec sleep 1000", &["did not end within 2s"]),
        ("shift; exec \"$@\"", &["CUDA_CHECKPOINT_JOB_FILE is not set"]),
    ] {
        let utility = script(case, body)?.display().to_string();
        with_utility(case, &utility)?;
        fails(case, FILE, &[&[utility.as_str(), "--launch-job"], words].concat())
            .with_context(|| body.to_owned())?;
    }
    case.set(&Settings::default())?;
    let mut own = Own::started(case, "b")?;
    own.expect()?;
    own.delete()
}

/// While the utility hangs: what `stasis-runc create` had made goes with `delete`, or with the next
/// one that is made.
fn killed(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    for deleted in [true, false] {
        let marker = case.path("called");
        let body = format!("echo now >{}; exec sleep 1000.5", marker.display());
        let utility = script(case, &body)?.display().to_string();
        let utility = format!("\"{utility}\"");
        case.set(&Settings::default().with("cuda", "utility", &utility))?;
        let killed = Own::annotated(case, "killed")?;
        let mut create = killed.bare.call(&case.runtime.wrapper(), &["create", killed.bare.id()]);
        create.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut create = create.spawn()?;
        wait::until("a call of the utility", LIMIT, || Ok(marker.exists().then_some(())))?;
        fs::remove_file(&marker)?;
        ensure!(killed.own_job().is_some(), "there is nothing to be left");
        create.kill()?;
        create.wait()?;
        wait::until("the end of the utility", LIMIT, || {
            Ok(processes::with_argument("1000.5").is_empty().then_some(()))
        })?;
        case.set(&Settings::default())?;
        if deleted {
            // Without --force, as containerd does: the runtime knows no such container.
            let mut delete =
                killed.bare.call(&case.runtime.wrapper(), &["delete", killed.bare.id()]);
            command::fail(&mut delete, LIMIT)?;
            ensure!(killed.own_job().is_none(), "delete left {:?}", killed.own_job());
        }
        let mut next = Own::started(case, "next")?;
        ensure!(killed.own_job().is_none(), "the next create left {:?}", killed.own_job());
        next.expect()?;
        next.delete()?;
    }
    Ok(())
}
