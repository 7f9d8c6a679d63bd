//! All of a container is one job, or nothing is done.

use std::time::Duration;

use anyhow::Result;
use stasis_integration::case::Case;
use stasis_integration::wait;

use super::own::{Own, says};
use super::{KEEPS, LAUNCH, VARIABLE};
use crate::Test;

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
        Test::new("one_of_exec_that_stays_outside_refused", stays_outside),
    ]
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
