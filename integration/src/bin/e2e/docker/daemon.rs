//! The daemon is started again while a container runs (`live-restore`).

use anyhow::Result;
use stasis_integration::docker::{Docker, Start};

use super::{SLEEP, Way, counter, network, test};
use crate::Test;

pub(super) fn tests(way: Way) -> Vec<Test> {
    let body = if way == Way::Stock { stock } else { ours };
    vec![test(way, "live_restore", body)]
}

/// A daemon that did not start a container does not know the type of its runtime's options, and
/// so never asks for its end: after a checkpoint without --leave-running it runs on.
fn stock(docker: &Docker<'_>, way: Way) -> Result<()> {
    let sleep = Start::plain(way.runtime(), network()?, &SLEEP);
    let container = docker.start(&sleep)?;
    docker.checkpoint(&container, "before")?;
    docker.wait_for(&container, "exited")?;
    docker.restore(&container, "before")?;
    docker.daemon().restart()?;
    docker.checkpoint(&container, "after")?;
    docker.expect_status(&container, "running")
}

fn ours(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = counter(docker, way, network()?)?;
    docker.daemon().restart()?;
    docker.expect(&container, 102)?;
    docker.checkpoint(&container, "after")?;
    docker.expect_status(&container, "running")?;
    docker.expect(&container, 103)?;
    docker.kill(&container)?;
    docker.restore(&container, "after")?;
    docker.expect(&container, 103)?;
    docker.expect_logs(&container, "101\n102\n103\n103\n")
}
