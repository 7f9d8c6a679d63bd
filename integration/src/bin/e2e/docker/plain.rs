//! Containers without a GPU: what the stock runtime does, so do ours.

use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::docker::{Docker, Start};
use stasis_integration::wait;

use super::{Way, checkpoint_and_end, network, test};
use crate::{Test, consecutive};

/// Counts in a shell's memory, and prints each count.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done";

pub(super) fn tests(way: Way) -> Vec<Test> {
    vec![test(way, "without_gpu", |docker, way| {
        exit_status(docker, way)?;
        cycles(docker, way)
    })]
}

fn exit_status(docker: &Docker<'_>, way: Way) -> Result<()> {
    let program = ["sh", "-c", "echo out; echo err >&2; exit 7"];
    let container = docker.start(&Start::plain(way.runtime(), network()?, &program))?;
    docker.wait_for(&container, "exited")?;
    let code = docker.inspect(&container, ".State.ExitCode")?;
    ensure!(code == "7", "the exit status is {code}");
    docker.expect_logs(&container, "out\n")?;
    let said = docker.try_run(&["logs", &container.name])?;
    ensure!(said.stderr == "err\n", "standard error is {:?}", said.stderr);
    Ok(())
}

fn cycles(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = docker.start(&Start::plain(way.runtime(), network()?, &["sh", "-c", COUNT]))?;
    // The last line may be half there.
    let count = || -> Result<usize> {
        let log = docker.logs(&container)?;
        Ok(log.rfind('\n').map_or(0, |end| log[..end].lines().count()))
    };
    let goes_on = |from: usize| -> Result<usize> {
        wait::until("more lines", Duration::from_secs(5), || {
            Ok(Some(count()?).filter(|&now| now > from))
        })
    };
    let mut last = goes_on(0)?;
    for name in ["first", "second"] {
        if way.exits() {
            checkpoint_and_end(docker, way, &container, name)?;
        } else {
            // As it goes on after the dump, its log would have lines twice.
            docker.daemon().run(["pause", &container.name])?;
            docker.checkpoint(&container, name)?;
            docker.expect_status(&container, "paused")?;
            docker.kill(&container)?;
        }
        let code = docker.inspect(&container, ".State.ExitCode")?;
        ensure!(code == "137", "the exit status is {code}");
        docker.restore(&container, name)?;
        last = goes_on(last.max(count()?))?;
    }
    docker.kill(&container)?;
    consecutive(&docker.logs(&container)?, 1).map(drop)
}
