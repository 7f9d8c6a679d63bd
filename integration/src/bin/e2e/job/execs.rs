//! What clients of containerd see of a job beside checkpoints: `exec`, and what a failed start leaves.

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::Checkpoint;
use stasis_integration::docker::{Docker, Start};
use stasis_integration::ipc::Group;
use stasis_integration::leaks;

use super::front_ends::network;
use super::own::says;
use super::{FILE, GIVEN, IPC, KEEPS};

/// Tells who it is and what it was given.
const TELL: &str = "id -u; pwd; echo $MINE; echo $CUDA_CHECKPOINT_JOB_FILE; test -t 0 && echo tty; \
     test -w $CUDA_CHECKPOINT_JOB_FILE && echo writable; exit 7";

/// All but the variable is as the client says.
pub(super) fn through_ctr(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let id = case.start(&Container::new(IPC).annotated(FILE))?;
    let mut exec = vec!["tasks", "exec", "--exec-id", "tell", "--user", "1000", "--cwd", "/tmp"];
    exec.extend([id.as_str(), "/bin/sh", "-c", TELL]);
    let said = tell(&mut case.ctr().command(exec), 7)?;
    expect(&said, &["1000", "/tmp", "", GIVEN, "writable"])
}

pub(super) fn through_docker(docker: &Docker<'_>, runtime: &str) -> Result<()> {
    docker.case().gpu.driver(KEEPS)?;
    let mut start = Start::plain(runtime, network()?, &IPC);
    start.flags = docker.gpu();
    start.flags.extend(["--annotation", FILE].map(str::to_owned));
    start.counts = true;
    let container = docker.start(&start)?;
    let mut exec = vec!["exec", "--user", "1000", "--workdir", "/tmp", "--env", "MINE=yes"];
    exec.extend([container.name.as_str(), "/bin/sh", "-c", TELL]);
    let said = tell(&mut docker.daemon().command(exec), 7)?;
    expect(&said, &["1000", "/tmp", "yes", GIVEN, "writable"])?;
    // Another value is none of the container's job.
    let other = format!("{}=/other", super::VARIABLE);
    let exec = [
        "exec",
        "--env",
        &other,
        &container.name,
        "/bin/sh",
        "-c",
        "echo $CUDA_CHECKPOINT_JOB_FILE",
    ];
    let said = docker.daemon().run(exec)?;
    ensure!(said.trim() == GIVEN, "{said}");
    let script = "test -t 1 && echo $CUDA_CHECKPOINT_JOB_FILE";
    let exec = ["exec", "--tty", &container.name, "/bin/sh", "-c", script];
    let said = docker.daemon().run(exec)?;
    ensure!(said.trim() == GIVEN, "on a terminal: {said}");
    Ok(())
}

fn tell(command: &mut std::process::Command, code: i32) -> Result<String> {
    let finished = stasis_integration::command::run(command, std::time::Duration::from_secs(20))?;
    let status = finished.status;
    ensure!(status.code() == Some(code), "{status}: {}{}", finished.stdout, finished.stderr);
    Ok(finished.stdout)
}

fn expect(said: &str, lines: &[&str]) -> Result<()> {
    let found: Vec<&str> = said.lines().collect();
    ensure!(found == lines, "the exec said {found:?} instead of {lines:?}");
    Ok(())
}

/// A container that has not used CUDA yet is one with a job file after a restore, too.
pub(super) fn without_cuda(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let sleep = ["/bin/sh", "-c", "while :; do sleep 1; done"];
    let id = case.start(&Container::new(sleep).annotated(FILE))?;
    let before = case.read_bytes(&id, GIVEN)?;
    case.cycle(&id)?;
    ensure!(case.read_bytes(&id, GIVEN)? != before, "a job file was used twice");
    let script = "ipc 4 --ready /tmp/ready </dev/null >/dev/null 2>&1 & \
                  until [ -e /tmp/ready ]; do sleep 0.02; done";
    case.ctr().exec(&id, "begin", &["/bin/sh", "-c", script])?;
    let mut group = Group::new(4);
    group.expect(case.pid(&id)?)?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    group.expect(case.pid(&id)?)
}

/// What the shim made for a restore that failed goes with it, and the image is as good as before.
pub(super) fn failed_restore(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let id = case.start(&Container::new(IPC).annotated(FILE))?;
    let mut group = Group::new(4);
    group.expect(case.pid(&id)?)?;
    let image = format!("checkpoint/{id}:1");
    case.ctr().checkpoint_container(&id, &image)?;
    case.remove(&id)?;
    for fault in ["restore error:304 skip=2", "unlock error:304 skip=2"] {
        case.gpu.faults(&[fault])?;
        let error = case.ctr().restore_fails(&id, &image)?;
        says(&error, &["stasis: restore of container", "(ipc)", "304"])?;
        let left = leaks::jobs(&case.runtime.state());
        ensure!(left.is_empty(), "{left:?} is left");
        case.remove(&id)?;
    }
    case.gpu.heal()?;
    case.ctr().restore(&id, &image)?;
    group.expect(case.pid(&id)?)?;
    case.ctr().remove_image(&image)
}

/// Whatever is wrong, nothing is left: neither by a refusal of ours nor by one of runc.
pub(super) fn failed_create(case: &Case<'_>) -> Result<()> {
    let refused = |container: &Container, words: &[&str]| {
        let Err(error) = case.start(container) else { anyhow::bail!("it was started") };
        says(&format!("{error:#}"), words)?;
        let left = leaks::jobs(&case.runtime.state());
        ensure!(left.is_empty(), "{left:?} is left");
        Ok(())
    };
    let container = Container::new(IPC).annotated(FILE);
    refused(&container, &["driver 580.159.04", "branch 610 or later"])?;
    case.gpu.driver(KEEPS)?;
    let mut wrong = container.clone();
    wrong.options.extend([
        "--mount".to_owned(),
        "type=bind,src=/nonexistent,dst=/mnt,options=rbind:ro".to_owned(),
    ]);
    refused(&wrong, &["/nonexistent"])?;
    refused(&Container::new(["/bin/nonexistent"]).annotated(FILE), &["nonexistent"])
}
