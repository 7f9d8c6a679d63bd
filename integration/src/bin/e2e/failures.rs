//! Whatever fails, the container is as it was: it counts on, its status is what it was, and the
//! next checkpoint and restore work.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use stasis_integration::case::Case;
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::Settings;
use stasis_integration::{command, wait};

use crate::{Test, consecutive};

pub(crate) const LOG: &str = "/data/log";
const LIMIT: Duration = Duration::from_secs(60);

/// Who asks for a checkpoint, and what the task does at that moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// A client of containerd, which pauses the running task for the dump.
    Client,
    /// A client of containerd, of a task that was paused before.
    Paused,
    /// Another engine: the task runs until the runtime does something to it.
    Direct,
}

pub(crate) const WAYS: [(Way, &str); 3] =
    [(Way::Client, "running"), (Way::Paused, "paused"), (Way::Direct, "direct")];

pub(crate) fn tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (way, of) in WAYS {
        for call in ["lock", "checkpoint"] {
            for what in ["error:304", "hang", "hang-after", "crash"] {
                let fault = format!("{call} {what}");
                tests.push(Test::new(format!("{}_{of}", word(&fault)), move |case: &Case| {
                    driver_fails(case, way, &fault)
                }));
            }
        }
        tests.push(Test::new(format!("checkpoint_lie_{of}"), move |case: &Case| lie(case, way)));
        tests.push(Test::new(format!("runc_{of}"), move |case: &Case| runc(case, way)));
        tests.push(Test::new(format!("criu_{of}"), move |case: &Case| criu(case, way)));
        tests.push(Test::new(format!("no_space_{of}"), move |case: &Case| no_space(case, way)));
        tests.push(Test::new(format!("no_libcuda_{of}"), move |case: &Case| no_libcuda(case, way)));
        tests.push(Test::new(format!("device_holder_{of}"), move |case: &Case| {
            device_holder(case, way)
        }));
        tests.push(Test::new(format!("managed_memory_{of}"), move |case: &Case| {
            managed_memory(case, way)
        }));
    }
    // A caller that is lost is no lost operation: the state has the last word, and the next call
    // may work. Only a restore that hangs uses up its time, and the container with it.
    let restores = ["restore error:304", "restore hang-after", "restore crash"];
    let unlocks = ["unlock error:304", "unlock crash", "unlock hang"];
    for fault in restores.into_iter().chain(unlocks) {
        tests.push(Test::new(format!("{}_once_at_resume", word(fault)), move |case: &Case| {
            comes_back_late(case, &format!("{fault} count=1"))
        }));
        tests.push(Test::new(format!("{}_once_at_restore", word(fault)), move |case: &Case| {
            restored_late(case, &format!("{fault} count=1"))
        }));
    }
    for fault in ["restore error:304", "restore hang", "restore crash"] {
        tests.push(Test::new(format!("{}_for_ever_at_resume", word(fault)), move |case: &Case| {
            never_comes_back(case, fault)
        }));
    }
    let restores = ["restore error:304", "restore hang", "restore crash"];
    for fault in restores.into_iter().chain(["unlock error:304", "unlock hang"]) {
        tests
            .push(Test::new(format!("{}_for_ever_at_restore", word(fault)), move |case: &Case| {
                restore_fails(case, fault)
            }));
    }
    tests.push(Test::new("restore_without_libcuda", restore_without_libcuda));
    tests.push(Test::new("restore_by_failing_criu", restore_by_failing_criu));
    tests
}

/// A fault as part of a test's name.
fn word(fault: &str) -> String {
    let fault = fault.split_once(':').map_or(fault, |(fault, _)| fault);
    fault.replace([' ', '-'], "_")
}

/// A counter that appends to a file all the time.
pub(crate) fn start(case: &Case) -> Result<String> {
    case.start_counter(&["--log", LOG, "--tick", "5"])
}

/// A checkpoint that has to fail, of a task in the status that the way says; gives the error and
/// checks that the task is as before.
pub(crate) fn refused(case: &Case, id: &str, way: Way, image: &Path) -> Result<String> {
    if way == Way::Paused {
        case.ctr().pause(id)?;
    }
    let before = case.read(id, LOG)?;
    let error = match way {
        Way::Direct => command::fail(&mut case.direct_checkpoint(id, image), LIMIT)?,
        Way::Client | Way::Paused => {
            let (image, work) = (Some(image.to_owned()), Some(case.path("work")));
            case.checkpoint_fails(id, &Checkpoint { image, work, exit: false })?
        }
    };
    ensure!(!image.join("stasis.json").exists(), "a failed checkpoint left a manifest");
    if way == Way::Paused {
        case.expect_status(id, Status::Paused)?;
        let after = case.read(id, LOG)?;
        ensure!(after == before, "the log of a paused container grew");
        case.ctr().resume(id)?;
    }
    goes_on(case, id)?;
    Ok(error)
}

/// The task runs, counts, and has missed no number.
pub(crate) fn goes_on(case: &Case, id: &str) -> Result<()> {
    case.expect_status(id, Status::Running)?;
    let count = case.ask(id)?;
    ensure!(count > 101, "the counter began anew, at {count}");
    wait::until("the log of the last count", Duration::from_secs(5), || {
        Ok((consecutive(&case.read(id, LOG)?, 101)? > count).then_some(()))
    })
}

/// With everything right again, a checkpoint and a restore work.
pub(crate) fn works_again(case: &Case, id: &str) -> Result<()> {
    case.gpu.heal()?;
    case.set(&Settings::default())?;
    case.cycle(id)?;
    goes_on(case, id)
}

fn driver_fails(case: &Case, way: Way, fault: &str) -> Result<()> {
    case.set(&Settings::default().impatient(1))?;
    let id = start(case)?;
    case.gpu.faults(&[fault])?;
    refused(case, &id, way, &case.path("image"))?;
    works_again(case, &id)
}

/// Without the driver's work CRIU cannot dump: what makes the other tests mean something.
fn lie(case: &Case, way: Way) -> Result<()> {
    let id = start(case)?;
    case.gpu.faults(&["checkpoint lie"])?;
    refused(case, &id, way, &case.path("image"))?;
    works_again(case, &id)
}

fn runc(case: &Case, way: Way) -> Result<()> {
    let id = start(case)?;
    let before_runc =
        "case \" $* \" in *' checkpoint '*) echo no luck >&2; exit 1;; esac".to_owned();
    case.set(&Settings { before_runc, ..Settings::default() })?;
    refused(case, &id, way, &case.path("image"))?;
    works_again(case, &id)
}

/// A directory for PATH in which criu is a program that does nothing but fail.
fn failing_criu(case: &Case) -> Result<PathBuf> {
    let folder = case.path("path");
    fs::create_dir_all(&folder)?;
    std::os::unix::fs::symlink("/bin/false", folder.join("criu"))?;
    Ok(folder)
}

fn criu(case: &Case, way: Way) -> Result<()> {
    let id = start(case)?;
    let path = Some(failing_criu(case)?);
    case.set(&Settings { path, ..Settings::default() })?;
    refused(case, &id, way, &case.path("image"))?;
    works_again(case, &id)
}

fn no_space(case: &Case, way: Way) -> Result<()> {
    let id = start(case)?;
    let small = case.path("small");
    fs::create_dir_all(&small)?;
    let size = Some("size=128k");
    mount(Some("small"), &small, Some("tmpfs"), MsFlags::empty(), size)?;
    let result = refused(case, &id, way, &small.join("image"));
    umount2(&small, MntFlags::MNT_DETACH)?;
    result?;
    works_again(case, &id)
}

fn no_libcuda(case: &Case, way: Way) -> Result<()> {
    let id = start(case)?;
    let libcuda = Some(PathBuf::from("/nonexistent/libcuda.so.1"));
    case.set(&Settings { libcuda, ..Settings::default() })?;
    let error = refused(case, &id, way, &case.path("image"))?;
    ensure!(error.contains("libcuda"), "the error does not name libcuda: {error}");
    works_again(case, &id)
}

/// A process that holds the device and is no process of CUDA cannot be dumped.
fn device_holder(case: &Case, way: Way) -> Result<()> {
    let id = start(case)?;
    let holder = ["/bin/counter", "--hold-device", "--port", "10001", "--ready", "/data/ready"];
    case.ctr()
        .run(["tasks", "exec", "--detach", "--exec-id", "holder", &id].iter().chain(&holder))?;
    wait::until("the holder", LIMIT, || Ok(case.read(&id, "/data/ready").is_ok().then_some(())))?;
    let error = refused(case, &id, way, &case.path("image"))?;
    ensure!(error.contains("counter"), "the error does not name the process: {error}");
    case.ctr().run(["tasks", "kill", "--signal", "SIGKILL", "--exec-id", "holder", &id])?;
    works_again(case, &id)
}

/// The driver refuses managed memory at the checkpoint, after the lock.
fn managed_memory(case: &Case, way: Way) -> Result<()> {
    let id = case.start_counter(&["--log", LOG, "--tick", "5", "--managed"])?;
    refused(case, &id, way, &case.path("image")).map(drop)
}

/// The dump was good, and CUDA comes back at the second try only.
fn comes_back_late(case: &Case, fault: &str) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let id = start(case)?;
    case.gpu.faults(&[fault])?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    goes_on(case, &id)?;
    works_again(case, &id)
}

/// The dump was good, and CUDA never comes back: the container does not hang, it ends.
fn never_comes_back(case: &Case, fault: &str) -> Result<()> {
    case.set(&Settings::default().impatient(2))?;
    let id = start(case)?;
    case.ctr().pause(&id)?;
    let image = case.path("image");
    let to_image = Checkpoint { image: Some(image.clone()), ..Checkpoint::default() };
    case.checkpoint(&id, &to_image)?;
    case.gpu.faults(&[fault])?;
    let error = case.ctr().fail(["tasks", "resume", &id])?;
    ensure!(error.contains("image"), "the error does not name the image: {error}");
    case.wait_stopped(&id)?;
    case.ctr().remove_task(&id)?;
    // Nothing is lost.
    case.gpu.heal()?;
    case.set(&Settings::default())?;
    let (_bundle, pid) = case.restore_from(&id, &image)?;
    stasis_integration::udp::ask(pid, stasis_integration::case::PORT).map(drop)
}

/// The restore gets there at the second try.
fn restored_late(case: &Case, fault: &str) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let id = start(case)?;
    let image = format!("checkpoint/{id}:1");
    case.ctr().checkpoint_container(&id, &image)?;
    case.remove(&id)?;
    case.gpu.faults(&[fault])?;
    case.ctr().restore(&id, &image)?;
    goes_on(case, &id)?;
    case.ctr().remove_image(&image)?;
    works_again(case, &id)
}

/// A restore that fails leaves nothing, and the same image can be restored when all is well.
fn failing_restore(case: &Case, spoil: impl FnOnce() -> Result<()>) -> Result<()> {
    let id = start(case)?;
    let image = format!("checkpoint/{id}:1");
    case.ctr().checkpoint_container(&id, &image)?;
    case.remove(&id)?;
    spoil()?;
    case.ctr().restore_fails(&id, &image)?;
    case.remove(&id)?;
    case.gpu.heal()?;
    case.set(&Settings::default())?;
    case.ctr().restore(&id, &image)?;
    goes_on(case, &id)?;
    case.ctr().remove_image(&image)
}

fn restore_fails(case: &Case, fault: &str) -> Result<()> {
    failing_restore(case, || {
        case.set(&Settings::default().impatient(2))?;
        case.gpu.faults(&[fault])
    })
}

fn restore_without_libcuda(case: &Case) -> Result<()> {
    failing_restore(case, || {
        let libcuda = Some(PathBuf::from("/nonexistent/libcuda.so.1"));
        case.set(&Settings { libcuda, ..Settings::default() })
    })
}

fn restore_by_failing_criu(case: &Case) -> Result<()> {
    failing_restore(case, || {
        let path = Some(failing_criu(case)?);
        case.set(&Settings { path, ..Settings::default() })
    })
}
