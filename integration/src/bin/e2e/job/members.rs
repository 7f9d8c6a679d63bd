//! All of a container is one job, or nothing is done.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::wait;

use super::own::{Own, says};
use super::{FILE, KEEPS, LAUNCH, VARIABLE};
use crate::{Test, consecutive};

const LIMIT: Duration = Duration::from_secs(10);

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("one_outside_refused", |case| {
            let words = ["(ipc)", "is not in the job of the other CUDA processes", VARIABLE];
            joined_by(case, &["/bin/env", "-u", VARIABLE, "/bin/ipc", "--join"], &words)
        }),
        Test::new("two_jobs_refused", |case| {
            let join = [&LAUNCH[..], &["/bin/ipc", "--join"]].concat();
            joined_by(case, &join, &["(ipc)", "different jobs", super::GIVEN, "/proc/self/fd/"])
        }),
        Test::new("ranks_go_on", ranks_go_on),
        Test::new("titles_over_the_environment", titles),
        Test::new("one_of_exec_that_stays_outside_refused", stays_outside),
    ]
}

/// As setproctitle does: what a process began with is then no more to be read.
fn titles(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let launched = Own::new(case, "b", &[&LAUNCH[..], &super::IPC].concat())?;
    for (mut own, left) in [(Own::annotated(case, "a")?, 0), (launched, 1)] {
        own.start()?;
        own.expect()?;
        let init = own.init()?.as_raw();
        let children = fs::read_to_string(format!("/proc/{init}/task/{init}/children"))?;
        let mut members: Vec<i32> =
            children.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        members.push(init);
        ensure!(members.len() == 4, "the members are {members:?}");
        for pid in &members[left..] {
            overwrite(*pid)?;
            own.checkpoint(&case.path("image"))?;
            own.expect()?;
        }
        let image = case.path("ended");
        own.checkpoint_and_end(&image)?;
        own.restore(&image)?;
        own.expect()?;
        own.delete()?;
        fs::remove_dir_all(image)?;
    }
    Ok(())
}

/// Writes over the environment of a process.
fn overwrite(pid: i32) -> Result<()> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit_once(") ").context("no stat")?.1.split(' ').collect();
    // Fields 50 and 51: where it begins and ends. The first here is field 3.
    let (begin, end): (u64, u64) = (fields[47].parse()?, fields[48].trim().parse()?);
    let mut over = b"worker of a server".to_vec();
    over.resize(usize::try_from(end - begin)?, 0);
    let memory = fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/mem"))?;
    memory.write_all_at(&over, begin)?;
    Ok(())
}

/// They wait for each other at each step, and are locked one after the other.
fn ranks_go_on(case: &Case<'_>) -> Result<()> {
    const RANKS: usize = 3;
    case.gpu.driver(KEEPS)?;
    let program =
        ["/bin/ranks", "3", "--log", "/data/log", "--port", "0", "--shared", "/data/flags"];
    let mut own = Own::new(case, "a", &program)?;
    own.annotate(FILE)?;
    own.start()?;
    let steps = |own: &Own<'_>| -> Result<Vec<u64>> {
        let log = |rank| own.inside(&format!("/data/log.{rank}")).map(fs::read_to_string);
        (0..RANKS).map(|rank| consecutive(&log(rank)?.unwrap_or_default(), 1)).collect()
    };
    let advance = |own: &Own<'_>| {
        let before = steps(own)?;
        wait::until("a step of each rank", LIMIT, || {
            let now = steps(own)?;
            Ok(now.iter().zip(&before).all(|(now, before)| now > before).then_some(now))
        })
    };
    advance(&own)?;
    for image in ["first", "second"] {
        let image = case.path(image);
        own.checkpoint(&image)?;
        let before = advance(&own)?;
        own.checkpoint_and_end(&image)?;
        own.restore(&image)?;
        let after = advance(&own)?;
        let none_lost = after.iter().zip(&before).all(|(after, before)| after > before);
        ensure!(none_lost, "the ranks began anew: {before:?}, then {after:?}");
    }
    own.delete()
}

/// CRIU dumps what descends from the container's first process. What exec starts does when the process
/// that it started first has ended.
fn stays_outside(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    // Without a hold on what reads the exec's output.
    let counter = "exec /bin/counter --port 0 --ready /tmp/ready >/dev/null 2>&1 </dev/null";
    own.bare.exec(&case.runtime.wrapper(), &["--detach"], &["/bin/sh", "-c", counter])?;
    let ready = own.inside("/tmp/ready")?;
    wait::until("another CUDA process", LIMIT, || Ok(ready.exists().then_some(())))?;
    let error = own.refused(&case.path("image"))?;
    says(&error, &["(counter): was started in the container by exec", "not touched"])?;
    own.exec(&["/bin/sh", "-c", "kill $(pidof counter)"])?;
    let ended = || Ok(own.exec(&["/bin/pidof", "counter"]).is_err().then_some(()));
    wait::until("the end of it", LIMIT, ended)?;
    own.checkpoint(&case.path("image"))?;
    own.expect()?;
    own.delete()
}

fn joined_by(case: &Case<'_>, join: &[&str], words: &[&str]) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    own.exec(join)?;
    own.group.grow();
    own.expect()?;
    for _ in 0..2 {
        let error = own.refused(&case.path("image"))?;
        says(&error, words)?;
        says(&error, &["not touched"])?;
    }
    own.delete()
}
