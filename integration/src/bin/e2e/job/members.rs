//! All of a container is one job, or nothing is done.

use anyhow::Result;
use stasis_integration::case::Case;

use super::own::{Own, says};
use super::{KEEPS, LAUNCH, VARIABLE};
use crate::Test;

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
    ]
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
