//! Podman's options of checkpoint and restore, its probes, and a container that it has paused.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::command;

use super::cells::started;
use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);
const RUNC: &str = "/usr/sbin/runc";

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("options", options),
        Test::new("keep_and_print_stats", keep_and_stats),
        Test::new("ignore_rootfs", ignore_rootfs),
        Test::new("pre_dump", pre_dump),
        Test::new("paused", paused),
        Test::new("probes", probes),
        Test::new("odd_orders", odd_orders),
    ]
}

/// The options of a dump are CRIU's at the restore, too, whether Podman repeats them or not.
fn options(case: &Case) -> Result<()> {
    let podman = started(case, "c1")?;
    let all = ["container", "checkpoint", "--tcp-established", "--file-locks", "c1"];
    podman.run(all)?;
    podman.run(["container", "restore", "--tcp-established", "--file-locks", "c1"])?;
    podman.expect("c1", 102)?;
    podman.run(all)?;
    podman.run(["container", "restore", "c1"])?;
    podman.expect("c1", 103)?;
    let calls = case.runtime.runc_calls()?;
    let restores: Vec<_> = calls.iter().filter(|call| call.contains("restore")).collect();
    for restore in &restores {
        for flag in ["--tcp-established", "--file-locks"] {
            ensure!(restore.contains(flag), "{flag} is not in {restore}");
        }
    }
    ensure!(restores.len() == 2, "{calls:#?}");
    podman.finish()
}

/// `--keep` leaves CRIU's logs, `--print-stats` says how long each took.
fn keep_and_stats(case: &Case) -> Result<()> {
    let podman = started(case, "c1")?;
    let bundle = podman.bundle("c1")?;
    let said = podman.run(["container", "checkpoint", "--keep", "--print-stats", "c1"])?;
    let took = duration(&said, "runtime_checkpoint_duration")?;
    ensure!(took > 0, "{said}");
    ensure!(bundle.join("dump.log").is_file(), "dump.log is not kept");
    let said = podman.run(["container", "restore", "--keep", "--print-stats", "c1"])?;
    ensure!(duration(&said, "runtime_restore_duration")? > 0, "{said}");
    ensure!(bundle.join("restore.log").is_file(), "restore.log is not kept");
    podman.expect("c1", 102)?;
    podman.finish()
}

/// A duration in what `--print-stats` prints of the first container.
fn duration(said: &str, key: &str) -> Result<u64> {
    let stats: serde_json::Value = serde_json::from_str(said).with_context(|| said.to_owned())?;
    let containers = &stats["container_statistics"][0];
    containers[key].as_u64().with_context(|| format!("no {key} in {said}"))
}

/// An archive without the files that were changed; the GPU's memory is in it all the same.
fn ignore_rootfs(case: &Case) -> Result<()> {
    let podman = started(case, "c1")?;
    let archive = case.path("archive.tar.gz").display().to_string();
    podman.run([
        "container",
        "checkpoint",
        "--ignore-rootfs",
        "--compress",
        "gzip",
        "-e",
        &archive,
        "c1",
    ])?;
    let podman = podman.emptied()?;
    let seen = case.inspect(Path::new(&archive))?;
    ensure!(seen["compression"] == "gzip" && seen["whole"] == true, "{seen:#}");
    // On another machine, with another driver.
    let made = seen["checkpoint"]["driver"].as_str().context("a version")?;
    case.gpu.driver("610.43.02")?;
    let elsewhere = case.inspect(Path::new(&archive))?;
    case.gpu.driver(made)?;
    let why = elsewhere["host"]["problems"].to_string();
    ensure!(elsewhere["host"]["can_restore"] == false && why.contains(made), "{elsewhere:#}");
    podman.run(["container", "restore", "--ignore-rootfs", "--import", &archive])?;
    podman.expect("c1", 102)?;
    // Cut short on the way to another machine.
    let file = std::fs::File::options().write(true).open(&archive)?;
    file.set_len(file.metadata()?.len() / 2)?;
    let said = command::fail(&mut case.inspect_command(Path::new(&archive)), LIMIT)?;
    ensure!(said.contains("the archive is cut short"), "{said}");
    podman.finish()
}

/// Podman asks CRIU before it offers a pre-dump, and here CRIU cannot (no dirty tracking); so the
/// runtime is called as Podman would. With CUDA it is refused before anything is touched, without
/// it is runc's.
fn pre_dump(case: &Case) -> Result<()> {
    let podman = started(case, "gpu")?;
    podman.start("plain", &Container::new(["sleep", "1000"]).without_gpu())?;
    let call = |runtime: &Path, id: &str| {
        let mut command = Command::new(runtime);
        command.args(["checkpoint", "--image-path"]).arg(case.path("pre-checkpoint"));
        command.arg("--work-path").arg(case.path("work")).args(["--pre-dump", id]);
        command::fail(&mut command, LIMIT)
    };
    let said = call(&case.runtime.wrapper(), &podman.id("gpu")?)?;
    ensure!(said.contains("--pre-dump (the GPU's memory cannot be dumped ahead)"), "{said}");
    podman.expect("gpu", 102)?;
    let plain = podman.id("plain")?;
    let ours = case.normal(&call(&case.runtime.wrapper(), &plain)?);
    let runcs = case.normal(&call(Path::new(RUNC), &plain)?);
    ensure!(ours == runcs, "{ours:?} instead of {runcs:?}");
    ensure!(ours.to_lowercase().contains("criu is missing features"), "{ours}");
    podman.expect_status("plain", "running")?;
    podman.finish()
}

/// A container that Podman has paused: Podman itself refuses, and says so with any runtime
/// (libpod asks for a running container). Called directly, the checkpoint is made and the
/// container stays paused until Podman resumes it.
fn paused(case: &Case) -> Result<()> {
    let podman = started(case, "c1")?;
    podman.run(["pause", "c1"])?;
    let said = podman.fail(["container", "checkpoint", "c1"])?;
    ensure!(said.contains("\"paused\" is not running, cannot checkpoint"), "{said}");
    let id = podman.id("c1")?;
    let mut direct = case.runtime.command();
    direct.args(["checkpoint", "--leave-running", "--image-path"]).arg(case.path("image"));
    direct.arg("--work-path").arg(case.path("work")).arg(&id);
    command::succeed(&mut direct, LIMIT)?;
    podman.expect_status("c1", "paused")?;
    podman.run(["unpause", "c1"])?;
    podman.expect("c1", 102)?;
    podman.run(["container", "checkpoint", "c1"])?;
    podman.run(["container", "restore", "c1"])?;
    podman.expect("c1", 103)?;
    podman.finish()
}

/// What Podman and others ask a runtime before they use it is answered in the words of the runtime
/// below.
fn probes(case: &Case) -> Result<()> {
    let probes: [&[&str]; 6] = [
        &["checkpoint", "--help"],
        &["restore", "--lsm-mount-context"],
        &["features"],
        &["--version"],
        &["--help"],
        &["state", "stasis-no-such-container"],
    ];
    for probe in probes {
        let answer = |runtime: &Path| -> Result<_> {
            let found = command::run(Command::new(runtime).args(probe), LIMIT)?;
            Ok((found.status.code(), case.normal(&found.stdout), case.normal(&found.stderr)))
        };
        let (ours, runcs) = (answer(&case.runtime.wrapper())?, answer(Path::new(RUNC))?);
        ensure!(ours == runcs, "{probe:?}: {ours:?} instead of {runcs:?}");
        match probe {
            ["checkpoint", ..] => ensure!(ours.0 == Some(0), "{ours:?}"),
            ["restore", ..] => {
                let text = format!("{}{}", ours.1, ours.2);
                ensure!(text.contains("flag needs an argument"), "{text}");
            }
            _ => {}
        }
    }
    Ok(())
}

/// Wherever runc takes the container's id from, there it is looked for.
fn odd_orders(case: &Case) -> Result<()> {
    let podman = started(case, "c1")?;
    let id = podman.id("c1")?;
    let orders: [&[&str]; 4] = [
        &["--image-path", "IMAGE", "ID", "--leave-running"],
        &["ID", "-image-path=IMAGE", "-leave-running"],
        &["--image-path=other", "--leave-running", "--image-path", "IMAGE", "--", "ID"],
        &["--leave-running=false", "--image-path", "IMAGE", "--leave-running=true", "ID"],
    ];
    for (number, order) in orders.iter().enumerate() {
        let image = case.path(&format!("image-{number}"));
        let shown = image.display().to_string();
        let mut command = case.runtime.command();
        command.arg("checkpoint").current_dir(case.path("store"));
        command.args(order.iter().map(|word| word.replace("IMAGE", &shown).replace("ID", &id)));
        command::succeed(&mut command, LIMIT)?;
        ensure!(image.join("stasis.json").is_file(), "{order:?} made no manifest");
        podman.expect("c1", 102 + u64::try_from(number)?)?;
    }
    // One that runc refuses is refused in its words, and nothing is touched.
    let refused = |runtime: &Path| -> Result<_> {
        let mut command = Command::new(runtime);
        command.args(["checkpoint", "--leave-running", &id, "--image-path", "image"]);
        let found = command::run(&mut command, LIMIT)?;
        Ok((found.status.code(), case.normal(&found.stdout), case.normal(&found.stderr)))
    };
    let (ours, runcs) = (refused(&case.runtime.wrapper())?, refused(Path::new(RUNC))?);
    ensure!(ours == runcs && ours.2.contains("requires exactly 1 argument"), "{ours:?} {runcs:?}");
    podman.expect("c1", 106)?;
    podman.finish()
}
