//! `ctr` in all the forms that it has, through each of the shims.
//!
//! ctr restores what `ctr containers checkpoint` put into containerd's store, and nothing else: an
//! image directory of `ctr tasks checkpoint --image-path` is restored by another client, here by
//! the OCI runtime.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::{Case, Container, PORT, Place};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::events::Events;
use stasis_integration::runtime::{Engine, Settings};
use stasis_integration::shim::Shim;
use stasis_integration::suite::Suite;
use stasis_integration::{image, task, udp, wait};

use crate::{Test, consecutive};

const LIMIT: Duration = Duration::from_secs(10);

/// What each of the shims is put through, under the name of the module.
pub(crate) fn modules() -> Vec<(&'static str, Place, Vec<Test>)> {
    let of = |name: &str| {
        vec![
            Test::new(format!("{name}_two_cycles"), two_cycles),
            Test::new(format!("{name}_image_path"), image_path),
            Test::new(format!("{name}_paused"), paused),
            Test::new(format!("{name}_driver_error"), driver_error),
            Test::new(format!("{name}_containerd_restarts"), containerd_restarts),
        ]
    };
    let mut own_name = of("own_name");
    own_name.extend([
        Test::new("own_name_keeps_the_flags", keeps_the_flags).only(&[Suite::Trixie]),
        Test::new("own_name_bootstrap", bootstrap).only(&[Suite::Forky]),
        Test::new("own_name_runtime_info", runtime_info).only(&[Suite::Forky]),
    ]);
    let mut stasis_runc = of("stasis_runc");
    stasis_runc.extend([
        Test::new("stock_cannot_checkpoint_a_paused_container", stock_paused),
        Test::new("stock_gpus_want_the_legacy_hook", gpus_want_the_legacy_hook),
    ]);
    vec![
        ("ctr", Place::apart(Shim::Stasis), own_name),
        ("ctr", Place::apart(Shim::StasisAsV2), of("exact_name")),
        ("ctr", Place::apart(Shim::Go), stasis_runc),
    ]
}

/// Starts a counter whose lines go to a file; gives its id.
fn start(case: &Case, log: &Path) -> Result<String> {
    let id = case.new_id();
    let uri = format!("file://{}", log.display());
    let flags = ["--detach", "--log-uri", &uri];
    case.ctr().run(case.run_arguments(&id, &flags, &Container::counter(&["--stdout"])))?;
    Ok(id)
}

/// The next lines of a task whose output goes to a FIFO, as ctr's does.
struct Output(BufReader<File>);

impl Output {
    /// Where the shim says that the output goes. Somebody has to read it: ctr is gone.
    fn of(case: &Case, id: &str) -> Result<Self> {
        let fifo = case.task(id)?.state(id, "")?.stdout;
        // For writing as well: a FIFO opens at once then, and has no end while nobody writes.
        let file = File::options().read(true).write(true).open(&fifo).context(fifo)?;
        Ok(Self(BufReader::new(file)))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line)
    }
}

/// 101, a checkpoint with the files, a restore of it, 102, and the same again.
fn two_cycles(case: &Case) -> Result<()> {
    let log = case.path("stdout");
    let id = start(case, &log)?;
    case.expect(&id, 101)?;
    wait::until("the first line", LIMIT, || {
        Ok((fs::read_to_string(&log)? == "101\n").then_some(()))
    })?;
    for count in 102..=103 {
        let image = format!("checkpoint/{id}:{count}");
        case.ctr().checkpoint_container(&id, &image)?;
        case.expect_status(&id, Status::Running)?;
        case.remove(&id)?;
        case.ctr().restore(&id, &image)?;
        case.ctr().remove_image(&image)?;
        case.expect_status(&id, Status::Running)?;
        let mut output = Output::of(case, &id)?;
        case.expect(&id, count)?;
        let line = output.line()?;
        ensure!(line == format!("{count}\n"), "the output goes on with {line:?}");
    }
    let log = fs::read_to_string(&log)?;
    ensure!(log == "101\n", "the log of the first task has {log:?}");
    Ok(())
}

/// `ctr tasks checkpoint --image-path`, leaving it running and with `--exit`.
fn image_path(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    let image = case.path("running");
    case.checkpoint(&id, &Checkpoint { image: Some(image), ..Checkpoint::default() })?;
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)?;
    let (image, work) = (case.path("ended"), Some(case.path("work")));
    let options = Checkpoint { image: Some(image.clone()), work, exit: true };
    case.checkpoint(&id, &options)?;
    case.wait_stopped(&id)?;
    for name in ["running", "ended"] {
        ensure!(case.path(name).join("stasis.json").exists(), "no manifest in {name}");
    }
    ensure!(case.path("work/dump.log").exists(), "no log in the work directory");
    case.ctr().remove_task(&id)?;
    let (_bundle, pid) = case.restore_from(&id, &image)?;
    let answer = udp::ask(pid, PORT)?;
    ensure!(answer == 103, "the restored counter says {answer}");
    Ok(())
}

/// `ctr tasks checkpoint` of a paused task, which stays paused. Into the store with its files it
/// cannot go.
fn paused(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.ctr().pause(&id)?;
    cannot_pause(case, &id)?;
    let image = case.path("image");
    case.checkpoint(&id, &Checkpoint { image: Some(image.clone()), ..Checkpoint::default() })?;
    case.expect_status(&id, Status::Paused)?;
    case.ctr().resume(&id)?;
    case.expect(&id, 102)?;
    case.end_task(&id)?;
    let (_bundle, pid) = case.restore_from(&id, &image)?;
    let answer = udp::ask(pid, PORT)?;
    ensure!(answer == 102, "the restored counter says {answer}");
    Ok(())
}

/// ctr shows the engine's words, and nothing has happened.
fn driver_error(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.gpu.faults(&["checkpoint error:999"])?;
    let image = format!("checkpoint/{id}:1");
    let mut errors =
        vec![case.ctr().fail(["containers", "checkpoint", "--rw", "--task", &id, &image])?];
    errors.push(case.ctr().checkpoint_fails(&id, &Checkpoint::default())?);
    for error in errors {
        ensure!(error.contains("999 (CUDA_ERROR_UNKNOWN)"), "{error}");
    }
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)?;
    case.gpu.heal()?;
    case.cycle(&id)?;
    case.expect(&id, 103)
}

/// A ctr that can has learned to look first whether the task is paused.
fn stock_paused(case: &Case) -> Result<()> {
    case.set(&Settings { engine: Engine::Stock, ..Settings::default() })?;
    let id = case.start(&Container::new(["/bin/sleep", "1000"]).without_gpu())?;
    case.ctr().pause(&id)?;
    cannot_pause(case, &id)
}

fn cannot_pause(case: &Case, id: &str) -> Result<()> {
    let image = format!("checkpoint/{id}:1");
    let error = case.ctr().fail(["containers", "checkpoint", "--rw", "--task", id, &image])?;
    ensure!(error.contains("cannot pause a paused container"), "{error}");
    case.expect_status(id, Status::Paused)
}

/// ctr 1.7 says nothing and sends nothing: the task runs on and there is no such image.
fn keeps_the_flags(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    let image = case.path("image");
    let options = Checkpoint { image: Some(image.clone()), work: None, exit: true };
    case.ctr().checkpoint(&id, &options)?;
    case.expect_status(&id, Status::Running)?;
    ensure!(!image.exists(), "ctr has sent the path");
    case.expect(&id, 102)
}

/// The container counts on while nobody is there, and afterwards everything works, with the exit
/// event as well.
fn containerd_restarts(case: &Case) -> Result<()> {
    const LOG: &str = "/data/log";
    let id = case.start_counter(&["--log", LOG, "--tick", "5"])?;
    case.ctr().pause(&id)?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    let shims = case.containerd().shims();
    case.containerd().restart()?;
    ensure!(case.containerd().shims() == shims, "other shims than before");
    case.expect_status(&id, Status::Paused)?;
    case.ctr().resume(&id)?;
    let count = case.ask(&id)?;
    case.cycle(&id)?;
    case.containerd().restart()?;
    ensure!(case.ask(&id)? > count, "the counter began anew");
    consecutive(&case.read(&id, LOG)?, 101)?;
    let events = Events::listen(case.ctr(), case.path("events"))?;
    case.ctr().kill(&id)?;
    let exit = events.wait_for(&id, "/tasks/exit")?;
    ensure!(exit.content["exit_status"] == 137, "{exit:?}");
    case.wait_stopped(&id)
}

/// What our shim answers to `start` is kept by containerd in its own form, and found after a
/// restart.
fn bootstrap(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    let bundle = case.containerd().bundle(case.ctr().namespace(), &id);
    let address = task::address(&bundle)?;
    let kept = bundle.join("bootstrap.json");
    let kept: serde_json::Value = serde_json::from_str(&fs::read_to_string(kept)?)?;
    ensure!(kept["version"] == 2 && kept["protocol"] == "ttrpc", "{kept}");
    ensure!(kept["address"] == address.as_str(), "{kept} and {address}");
    Ok(())
}

/// containerd 2.x asks the shim's binary what it is.
fn runtime_info(case: &Case) -> Result<()> {
    let info =
        case.ctr().run(["plugins", "inspect-runtime", "--runtime", case.shim().runtime()])?;
    let info: serde_json::Value = serde_json::from_str(&info)?;
    ensure!(info["Name"] == "io.containerd.runc.stasis", "{info}");
    let actions = info["Features"]["ociVersionMax"].as_str();
    ensure!(actions.is_some(), "no features of runc in {info}");
    Ok(())
}

/// `--gpus` of ctr is NVIDIA's legacy hook, whose mounts CRIU cannot dump. It wants a program that
/// is not here: a ctr that takes it for CDI does not.
fn gpus_want_the_legacy_hook(case: &Case) -> Result<()> {
    let id = case.new_id();
    let error = case.ctr().fail(["run", "--gpus", "0", "--rm", image::NAME, &id, "/bin/true"])?;
    ensure!(error.contains("nvidia-container-cli"), "{error}");
    Ok(())
}
