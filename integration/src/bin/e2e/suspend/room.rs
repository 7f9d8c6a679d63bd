//! Containers that take turns on one GPU.

use std::fs::{self, File};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::Checkpoint;
use stasis_integration::runtime::Settings;
use stasis_integration::{command, wait};

use super::{LIMIT, Stasis, says};
use crate::Test;

/// Of a GPU's memory, in MiB.
const ALL: u64 = 64;

/// More than half of it.
const MOST: &str = "40";

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("two_take_turns", take_turns),
        Test::new("resume_waits_for_room", waits),
        Test::new("resume_without_room", without_room),
        Test::new("two_resumes_at_once", at_once),
        Test::new("resume_interrupted", interrupted),
        Test::new("host_memory", host_memory),
        Test::new("room_for_what_nvml_does_not_show", besides),
        Test::new("room_where_another_gpu_is_lost", another_is_lost),
        Test::new("resume_without_room_of_one_suspended_by_nvidias_command", by_nvidias_command),
    ]
}

/// A counter that verifies all of its memory at each count.
fn start(case: &Case<'_>) -> Result<String> {
    let id = case.start(&Container::counter(&["--pattern-mib", MOST]))?;
    case.expect(&id, 101)?;
    Ok(id)
}

fn two<'a>(case: &'a Case<'a>) -> Result<(Stasis<'a>, String, String)> {
    case.gpu.configure(&[&format!("memory={}", ALL << 20)])?;
    let stasis = Stasis::new(case);
    let first = start(case)?;
    // There is no room for another one.
    let refused = case.start(&Container::counter(&["--pattern-mib", MOST]))?;
    case.wait_stopped(&refused)?;
    case.remove(&refused)?;
    stasis.run(&["suspend", &first])?;
    let second = start(case)?;
    Ok((stasis, first, second))
}

fn take_turns(case: &Case<'_>) -> Result<()> {
    let (stasis, mut waits, mut works) = two(case)?;
    let mut counts = (101, 101);
    for _ in 0..4 {
        stasis.run(&["suspend", &works])?;
        stasis.expect_suspended(&works, 1)?;
        stasis.expect_suspended(&waits, 1)?;
        stasis.run(&["resume", &waits])?;
        (waits, works) = (works, waits);
        counts = (counts.1, counts.0 + 1);
        case.expect(&works, counts.1)?;
    }
    // Any number of them fits into the host's memory.
    stasis.run(&["suspend", &works])?;
    let third = start(case)?;
    stasis.run(&["suspend", &third])?;
    stasis.expect_free()?;
    for (id, count) in [(&waits, counts.0 + 1), (&works, counts.1 + 1), (&third, 102)] {
        stasis.run(&["resume", id])?;
        case.expect(id, count)?;
        case.remove(id)?;
    }
    Ok(())
}

fn without_room(case: &Case<'_>) -> Result<()> {
    let (stasis, first, second) = two(case)?;
    for _ in 0..2 {
        let error = stasis.fails(&["resume", &first, "--timeout", "1s"])?;
        says(
            &error,
            &[
                &format!("resume of container {first} failed"),
                "GPU-",
                "MiB free and",
                "MiB are needed",
                "is suspended and nothing is lost",
            ],
        )?;
        stasis.expect_waiting(&first)?;
    }
    case.expect(&second, 102)?;
    stasis.run(&["suspend", &second])?;
    stasis.run(&["resume", &first])?;
    case.expect(&first, 102)?;
    case.remove(&first)?;
    stasis.run(&["resume", &second])?;
    case.expect(&second, 103)
}

/// There is room for one of them, and both look for it at the same moment.
fn at_once(case: &Case<'_>) -> Result<()> {
    let (stasis, first, second) = two(case)?;
    stasis.run(&["suspend", &second])?;
    let mut counts = [(&first, 101), (&second, 101)];
    for _ in 0..5 {
        let calls: Vec<_> = [&first, &second]
            .into_iter()
            .map(|id| {
                let mut call = stasis.command(&["resume", id, "--timeout", "500ms"]);
                let said = case.path(id);
                call.stdout(Stdio::null()).stderr(File::create(&said)?);
                Ok((id, said, call.spawn()?))
            })
            .collect::<Result<_>>()?;
        let mut resumed = Vec::new();
        for (id, said, mut call) in calls {
            let status = command::wait(&mut call, LIMIT)?;
            if status.is_some_and(|status| status.success()) {
                resumed.push(id);
            } else {
                let said = fs::read_to_string(said)?;
                says(&said, &["MiB are needed", "is suspended and nothing is lost"])?;
                stasis.expect_waiting(id)?;
            }
        }
        let [one] = resumed.as_slice() else { bail!("resumed: {resumed:?}") };
        for (_, count) in counts.iter_mut().filter(|(id, _)| id == one) {
            *count += 1;
            case.expect(one, *count)?;
        }
        stasis.run(&["suspend", one])?;
    }
    Ok(())
}

fn interrupted(case: &Case<'_>) -> Result<()> {
    let (stasis, first, second) = two(case)?;
    let arguments = ["resume", &first, "--timeout", "60s"];
    let (text, took) = stasis.interrupted(&arguments, ": cuda-restore", Signal::SIGINT)?;
    ensure!(took < Duration::from_secs(20), "after {took:?}");
    says(&text, &["interrupted", "is suspended and nothing is lost"])?;
    stasis.expect_waiting(&first)?;
    case.remove(&second)?;
    stasis.run(&["resume", &first])?;
    case.expect(&first, 102)
}

/// What its cgroup would not hold is refused, unless its owner wants it tried.
fn host_memory(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let container = Container::counter(&["--pattern-mib", MOST]).limited(96 << 20);
    let id = case.start(&container)?;
    case.expect(&id, 101)?;
    let words =
        ["host memory", "cgroup /sys/fs/cgroup/memory/", "check-host-memory", "not touched"];
    says(&stasis.fails(&["suspend", &id])?, &words)?;
    case.expect(&id, 102)?;
    let image = || Checkpoint { image: Some(case.path("image")), ..Checkpoint::default() };
    says(&case.checkpoint_fails(&id, &image())?, &words)?;
    case.expect(&id, 103)?;
    stasis.expect_no_journal()?;
    case.set(&Settings::default().with("cuda", "check-host-memory", "false"))?;
    stasis.run(&["suspend", &id])?;
    stasis.run(&["resume", &id])?;
    case.expect(&id, 104)
}

/// Of what a process takes of a GPU, NVML shows a little less: a restore that lacks that is final, too.
fn besides(case: &Case<'_>) -> Result<()> {
    const CONTEXT: u64 = 6;
    case.gpu.configure(&[
        &format!("memory={}", ALL << 20),
        &format!("context-bytes={}", CONTEXT << 20),
    ])?;
    let stasis = Stasis::new(case);
    let first = case.start_counter(&["--pattern-mib", "20"])?;
    stasis.run(&["suspend", &first])?;
    // It leaves what NVML has said of the first, and 3 MiB more.
    let rest = ALL - 20 - 3 - CONTEXT;
    let second = case.start_counter(&["--pattern-mib", &rest.to_string()])?;
    let error = stasis.fails(&["resume", &first, "--timeout", "500ms"])?;
    says(&error, &["MiB are needed", "is suspended and nothing is lost"])?;
    stasis.expect_waiting(&first)?;
    case.remove(&second)?;
    stasis.run(&["resume", &first])?;
    case.expect(&first, 102)
}

/// It is looked for room on those that answer.
fn another_is_lost(case: &Case<'_>) -> Result<()> {
    case.gpu.count(2)?;
    let (stasis, first, second) = two(case)?;
    case.gpu.configure(&["lost-gpu=1"])?;
    let error = stasis.fails(&["resume", &first, "--timeout", "500ms"])?;
    says(&error, &["MiB are needed", "is suspended and nothing is lost"])?;
    stasis.expect_waiting(&first)?;
    stasis.run(&["suspend", &second])?;
    stasis.run(&["resume", &first])?;
    case.expect(&first, 102)?;
    // And what needs the lost one waits for it.
    stasis.run(&["suspend", &first])?;
    case.gpu.configure(&["lost-gpu=0"])?;
    let error = stasis.fails(&["resume", &second, "--timeout", "500ms"])?;
    says(&error, &[&case.gpu.uuid(0), "does not answer", "is suspended and nothing is lost"])?;
    case.gpu.configure(&["lost-gpu=7"])?;
    stasis.run(&["resume", &second])?;
    case.expect(&second, 102)
}

/// Nobody has noted what it needs.
fn by_nvidias_command(case: &Case<'_>) -> Result<()> {
    case.gpu.configure(&[&format!("memory={}", ALL << 20)])?;
    let (stasis, first) = (Stasis::new(case), start(case)?);
    let pid = case.pid(&first)?.to_string();
    command::succeed(&mut case.utility(&["--toggle", "--pid", &pid]), LIMIT)?;
    let second = start(case)?;
    let error = stasis.fails(&["resume", &first, "--timeout", "500ms"])?;
    says(
        &error,
        &[
            "MiB are needed",
            "is suspended and nothing is lost",
            "was not noted",
            "its largest mapping in host memory",
        ],
    )?;
    case.remove(&second)?;
    stasis.run(&["resume", &first])?;
    case.expect(&first, 102)
}

/// Until its time is over.
fn waits(case: &Case<'_>) -> Result<()> {
    let (stasis, first, second) = two(case)?;
    let mut resume = stasis.command(&["resume", &first, "--timeout", "30s"]).spawn()?;
    std::thread::sleep(Duration::from_millis(700));
    ensure!(resume.try_wait()?.is_none(), "it did not wait for room");
    case.expect(&second, 102)?;
    let suspended = stasis.run(&["suspend", &second]);
    let ended = command::wait(&mut resume, LIMIT)?;
    suspended?;
    ensure!(ended.is_some_and(|status| status.success()), "the resume ended with {ended:?}");
    wait::until("the resumed one", LIMIT, || Ok(stasis.expect_running(&first, 1).ok()))?;
    case.expect(&first, 102)
}
