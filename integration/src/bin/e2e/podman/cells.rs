//! The counter in GPU memory: 101 before, 102 after, twice; and all that it printed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::cdi::Cdi;
use stasis_integration::podman::Podman;
use stasis_integration::wait;

use crate::{Test, consecutive};

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("checkpoint_and_restore", stopped),
        Test::new("leave_running", left_running),
        Test::new("export_and_import", exported),
        Test::new("output", output),
        Test::new("cdi_device", cdi_device),
        Test::new("without_gpu", without_gpu),
    ]
}

/// A store with a counter that was asked once.
pub(super) fn started<'a>(case: &'a Case<'a>, name: &str) -> Result<Podman<'a>> {
    let podman = Podman::with_image(case, "store")?;
    podman.start(name, &Container::counter(&["--stdout"]))?;
    podman.expect(name, 101)?;
    Ok(podman)
}

/// What it printed is this and no more.
fn expect_logs(podman: &Podman<'_>, name: &str, logs: &str) -> Result<()> {
    let found = podman.logs(name)?;
    ensure!(found == logs, "podman logs has {found:?} instead of {logs:?}");
    Ok(())
}

/// `checkpoint` ends it and `restore` brings it back, twice.
fn two_cycles(podman: &Podman<'_>, name: &str) -> Result<()> {
    for number in [102, 103] {
        podman.run(["container", "checkpoint", name])?;
        podman.expect_status(name, "exited")?;
        podman.run(["container", "restore", name])?;
        podman.expect_status(name, "running")?;
        podman.expect(name, number)?;
    }
    expect_logs(podman, name, "101\n102\n103\n")
}

fn stopped(case: &Case) -> Result<()> {
    let podman = started(case, "c1")?;
    two_cycles(&podman, "c1")?;
    podman.remove("c1")?;
    podman.finish()
}

/// It goes on; after its end it is what it was at the checkpoint.
fn left_running(case: &Case) -> Result<()> {
    let podman = started(case, "c1")?;
    for number in [102, 103] {
        podman.run(["container", "checkpoint", "--leave-running", "c1"])?;
        podman.expect_status("c1", "running")?;
        podman.expect("c1", number)?;
        podman.kill("c1")?;
        podman.run(["container", "restore", "c1"])?;
        podman.expect("c1", number)?;
    }
    // Each number twice: before the end and after it.
    expect_logs(&podman, "c1", "101\n102\n102\n103\n103\n")?;
    podman.finish()
}

/// Into a store in which nothing is, twice, as on another machine.
///
/// It has the same place, as there: what an archive says of the container names the file in
/// --runroot to which conmon writes its pid (see `stock_import_elsewhere`).
fn exported(case: &Case) -> Result<()> {
    let mut podman = started(case, "c1")?;
    for (number, compression) in [(102, "zstd"), (103, "none")] {
        let path = case.path(&format!("{number}.tar"));
        let archive = path.display().to_string();
        let export = ["container", "checkpoint", "--compress", compression, "--export", &archive];
        podman.run(export.into_iter().chain(["c1"]))?;
        let id = podman.id("c1")?;
        podman = podman.emptied()?;
        let seen = case.inspect(&path)?;
        ensure!(seen["whole"] == true && seen["kind"] == "cuda", "{seen:#}");
        ensure!(seen["form"] == "archive" && seen["compression"] == compression, "{seen:#}");
        ensure!(seen["exported"]["name"] == "c1" && seen["exported"]["id"] == id, "{seen:#}");
        ensure!(seen["checkpoint"]["container"] == id, "{seen:#}");
        ensure!(seen["host"]["can_restore"] == true, "{seen:#}");
        podman.run(["container", "restore", "--import", &archive])?;
        podman.expect("c1", number)?;
    }
    // The log travels with the archive.
    expect_logs(&podman, "c1", "101\n102\n103\n")?;
    podman.finish()
}

/// What is printed around two checkpoints is all there, also while it prints all the time.
fn output(case: &Case) -> Result<()> {
    let podman = Podman::with_image(case, "store")?;
    podman.start("c1", &Container::counter(&["--stdout", "--tick", "5"]))?;
    let more = |than: u64| {
        wait::until("more output", Duration::from_secs(10), || {
            let last = consecutive(&podman.logs("c1")?, 101)?;
            Ok((last > than).then_some(last))
        })
    };
    let mut last = more(101)?;
    for _ in 0..2 {
        podman.run(["container", "checkpoint", "c1"])?;
        podman.run(["container", "restore", "c1"])?;
        last = more(last + 5)?;
    }
    podman.run(["container", "checkpoint", "--leave-running", "c1"])?;
    more(last + 5)?;
    podman.finish()
}

/// The GPU by the host's CDI specification, as `--device nvidia.com/gpu=0` gives a real one.
fn cdi_device(case: &Case) -> Result<()> {
    let cdi = Cdi::install(case.name(), &case.gpu)?;
    let podman = Podman::with_image(case, "store")?;
    let flags = ["--device".to_owned(), cdi.device()];
    podman.start_with("c1", &flags, &Container::counter(&["--stdout"]).program)?;
    podman.expect("c1", 101)?;
    two_cycles(&podman, "c1")?;
    podman.finish()
}

/// Nothing of ours is in the way of a container without a GPU, and runc is called with what Podman
/// says.
fn without_gpu(case: &Case) -> Result<()> {
    let podman = Podman::with_image(case, "store")?;
    // Not more often: CRIU waits 10 s in vain for a process that ends while it is seized.
    let count = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done";
    podman.start("c1", &Container::new(["/bin/sh", "-c", count]).without_gpu())?;
    let more = |than: u64| {
        wait::until("more output", Duration::from_secs(10), || {
            let last = consecutive(&podman.logs("c1")?, 1)?;
            Ok((last > than).then_some(last))
        })
    };
    let last = more(1)?;
    podman.run(["container", "checkpoint", "--leave-running", "c1"])?;
    podman.run(["container", "checkpoint", "c1"])?;
    podman.run(["container", "restore", "c1"])?;
    more(last + 2)?;
    let (bundle, id) = (podman.bundle("c1")?.display().to_string(), podman.id("c1")?);
    let paths = format!("--image-path {bundle}/checkpoint --work-path {bundle}");
    let calls = case.runtime.runc_calls()?;
    for call in [
        format!("checkpoint {paths} --leave-running --leave-running {id}"),
        format!("checkpoint {paths} {id}"),
    ] {
        ensure!(calls.contains(&call), "{call:?} is not in {calls:#?}");
    }
    let restore = calls.iter().find(|call| call.contains("restore --bundle"));
    let restore = restore.with_context(|| format!("no restore in {calls:#?}"))?;
    ensure!(restore.ends_with(&format!("--detach {paths} {id}")), "{restore}");
    podman.finish()
}
