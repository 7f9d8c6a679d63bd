//! Whatever fails in a job, its members go on with what they share, and the next checkpoint is good.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use stasis_integration::case::Case;
use stasis_integration::command;
use stasis_integration::runtime::Settings;

use super::KEEPS;
use super::own::{Own, digest, says};
use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    // The first member, one in the middle, and the last.
    for call in ["lock", "checkpoint"] {
        for what in ["error:304", "hang"] {
            for skip in [0, 1, 3] {
                let word = what.split_once(':').map_or(what, |(word, _)| word);
                tests.push(Test::new(format!("{call}_{word}_of_member_{skip}"), move |case| {
                    put_back(case, &format!("{call} {what} skip={skip}"))
                }));
            }
        }
    }
    // Not an error: they are unlocked, and asked again in a moment.
    tests.push(Test::new("lock_not_ready_three_times", |case| {
        comes_back(case, "lock error:600 skip=2 count=3")
    }));
    // One that hangs in a restore uses up its time, and the container with it.
    for (call, what) in [
        ("restore", "error:304"),
        ("restore", "crash"),
        ("unlock", "error:304"),
        ("unlock", "crash"),
        ("unlock", "hang"),
    ] {
        let word = what.split_once(':').map_or(what, |(word, _)| word);
        tests.push(Test::new(format!("{call}_{word}_once"), move |case| {
            comes_back(case, &format!("{call} {what} skip=2 count=1"))
        }));
    }
    for (name, moment) in [
        ("lock", Moment::Fault("lock hang skip=2")),
        ("cuda_checkpoint", Moment::Fault("checkpoint hang-after skip=2")),
        ("job_file", Moment::File("stasis.job")),
        ("criu_dump", Moment::Dumping),
        ("manifest", Moment::File("stasis.json")),
        ("cuda_restore", Moment::Fault("restore hang-after skip=1")),
        ("unlock", Moment::Fault("unlock hang skip=1")),
    ] {
        tests.push(Test::new(format!("killed_in_{name}"), move |case| killed(case, moment)));
    }
    tests.push(Test::new("killed_in_restore", killed_in_restore));
    for call in ["restore", "unlock"] {
        tests.push(Test::new(format!("{call}_error_for_ever"), move |case| {
            never_comes_back(case, &format!("{call} error:304 skip=2"))
        }));
    }
    tests.push(Test::new("no_space_for_the_job_file", no_space));
    tests
}

/// After all of it: a checkpoint that leaves it running, one that does not, and what comes back.
fn works(case: &Case<'_>, own: &mut Own<'_>) -> Result<()> {
    case.gpu.heal()?;
    case.set(&Settings::default())?;
    let image = case.path("good");
    own.checkpoint(&image)?;
    own.expect()?;
    own.checkpoint_and_end(&image)?;
    let before = digest(&image)?;
    own.restore(&image)?;
    own.expect()?;
    ensure!(digest(&image)? == before, "the image was changed");
    own.delete()
}

fn put_back(case: &Case<'_>, fault: &str) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    case.set(&Settings::default().impatient(1))?;
    let mut own = Own::started(case, "a")?;
    case.gpu.faults(&[fault])?;
    let error = own.refused(&case.path("image"))?;
    says(&error, &["(ipc)", "runs on as before"])?;
    works(case, &mut own)
}

fn comes_back(case: &Case<'_>, fault: &str) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    case.set(&Settings::default().impatient(5))?;
    let mut own = Own::started(case, "a")?;
    case.gpu.faults(&[fault])?;
    own.checkpoint(&case.path("image"))?;
    own.expect()?;
    works(case, &mut own)
}

/// The container ends, and says why. The image is whole; a restore that fails changes nothing of that.
fn never_comes_back(case: &Case<'_>, fault: &str) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    case.set(&Settings::default().impatient(1))?;
    let mut own = Own::started(case, "a")?;
    let image = case.path("image");
    case.gpu.faults(&[fault])?;
    let mut checkpoint = own.checkpoint_call(&image, &["--leave-running"]);
    let error = command::fail(&mut checkpoint, LIMIT)?;
    says(&error, &["(ipc)", "304", "killed", "is whole and can be restored"])?;
    own.delete()?;
    let before = digest(&image)?;
    case.gpu.faults(&[fault])?;
    says(&own.restore_fails(&image)?, &["(ipc)", "304"])?;
    ensure!(digest(&image)? == before, "the image was changed");
    case.gpu.heal()?;
    own.restore(&image)?;
    own.expect()?;
    works(case, &mut own)
}

/// When the runtime is killed.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// The driver has this fault.
    Fault(&'static str),
    /// The image has this file.
    File(&'static str),
    /// runc is about to dump.
    Dumping,
}

/// How often a fault's call has been made.
fn calls(case: &Case<'_>, fault: &str) -> u64 {
    let counted = fs::read_to_string(case.gpu.store().join("faults.count")).unwrap_or_default();
    let line = counted.lines().find_map(|line| line.strip_suffix(fault)?.trim().parse().ok());
    line.unwrap_or_default()
}

fn strike(mut child: Child, is_ready: impl Fn() -> Result<bool>) -> Result<()> {
    let begin = Instant::now();
    while !is_ready()? {
        if let Some(status) = child.try_wait()? {
            bail!("it ended before, {status}");
        }
        ensure!(begin.elapsed() < LIMIT, "the moment did not come");
        thread::sleep(Duration::from_micros(100));
    }
    child.kill()?;
    child.wait()?;
    Ok(())
}

fn killed(case: &Case<'_>, moment: Moment) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let image = case.path("image");
    let dumping = case.path("dumping");
    match moment {
        Moment::Fault(fault) => case.gpu.faults(&[fault])?,
        Moment::File(_) => {}
        Moment::Dumping => {
            let before_runc = format!(
                "case \" $* \" in *' checkpoint '*) echo now >{}; sleep 1.5; exit 1;; esac",
                dumping.display()
            );
            case.set(&Settings { before_runc, ..Settings::default() })?;
        }
    }
    let mut checkpoint = own.checkpoint_call(&image, &["--leave-running"]);
    checkpoint.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    strike(checkpoint.spawn()?, || match moment {
        Moment::Fault(fault) => {
            let skip: u64 = fault.rsplit_once('=').context("a skip")?.1.parse()?;
            Ok(calls(case, fault) > skip)
        }
        Moment::File(name) => Ok(image.join(name).exists()),
        Moment::Dumping => Ok(dumping.exists()),
    })?;
    case.gpu.heal()?;
    case.set(&Settings::default())?;
    // The next operation puts right what is left, whatever it is.
    own.checkpoint(&case.path("next"))?;
    own.expect()?;
    works(case, &mut own)
}

/// Nothing of the container stays, and the image can be restored.
fn killed_in_restore(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let image = case.path("image");
    own.checkpoint_and_end(&image)?;
    let before = digest(&image)?;
    for fault in ["restore hang skip=2", "unlock hang-after skip=2"] {
        case.gpu.faults(&[fault])?;
        let mut restore = own.bare.call(&case.runtime.wrapper(), &["restore", "--detach"]);
        restore.arg("--image-path").arg(&image).args(["--work-path", "work", own.bare.id()]);
        // Pipes, as the image has them.
        let ((_reader, writer), (input, _)) = (std::io::pipe()?, std::io::pipe()?);
        restore.stdin(Stdio::from(input)).stdout(writer.try_clone()?).stderr(writer);
        let child = restore.spawn()?;
        strike(child, || Ok(calls(case, fault) > 2))?;
        own.delete()?;
        case.gpu.heal()?;
    }
    ensure!(digest(&image)? == before, "the image was changed");
    own.restore(&image)?;
    own.expect()?;
    own.delete()
}

/// A file system without a page for it.
fn no_space(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let small = case.path("small");
    fs::create_dir_all(&small)?;
    mount(Some("small"), &small, Some("tmpfs"), MsFlags::empty(), Some("size=8k"))?;
    let result = fails_for_space(&mut own, &small);
    umount2(&small, MntFlags::MNT_DETACH)?;
    result?;
    works(case, &mut own)
}

fn fails_for_space(own: &mut Own<'_>, small: &Path) -> Result<()> {
    let image = small.join("image");
    let error = own.refused(&image)?;
    says(&error, &["phase job-file", "No space left", "runs on as before"])?;
    ensure!(!image.join("stasis.job").exists(), "half a copy is left");
    let _ = command::run(&mut own.checkpoint_call(&image, &["--leave-running"]), LIMIT)?;
    own.expect()
}
