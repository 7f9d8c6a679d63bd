//! The counter on the GPU is checkpointed and restored, twice, and no line of its output is lost.

use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::command;
use stasis_integration::docker::{Container, Docker, Network, Start};
use stasis_integration::suite::Suite;

use super::{Way, checkpoint_and_end, counter, network, test};
use crate::{Test, consecutive};

pub(super) fn tests(way: Way) -> Vec<Test> {
    let mut tests = vec![test(way, "cycles", |docker, way| cycles(docker, way, network()?))];
    if Way::TYPICAL.contains(&way) {
        tests.push(test(way, "leaves_running", leaves_running));
    }
    if way == Way::Runc {
        tests.push(test(way, "loses_no_line", loses_no_line));
        // On the newer one this is the network of all tests.
        let on_host = test(way, "cycles_on_the_hosts_network", |docker, way| {
            cycles(docker, way, Network::Host)
        });
        tests.push(on_host.only(&[Suite::Trixie]));
    }
    tests
}

fn cycles(docker: &Docker<'_>, way: Way, network: Network) -> Result<()> {
    let container = counter(docker, way, network)?;
    checkpoint_and_end(docker, way, &container, "first")?;
    docker.restore(&container, "first")?;
    docker.expect(&container, 102)?;
    checkpoint_and_end(docker, way, &container, "second")?;
    let names = docker.checkpoints(&container)?;
    ensure!(names == ["first", "second"], "docker checkpoint ls shows {names:?}");
    docker.daemon().run(["checkpoint", "rm", &container.name, "first"])?;
    docker.restore(&container, "second")?;
    docker.expect(&container, 103)?;
    let names = docker.checkpoints(&container)?;
    ensure!(names == ["second"], "docker checkpoint ls shows {names:?}");
    let all = docker.daemon().checkpoints(&container.id);
    let seen = docker.case().inspect(&all)?;
    ensure!(seen["path"] == all.join("second").to_string_lossy().as_ref(), "{seen:#}");
    docker.expect_logs(&container, "101\n102\n103\n")
}

/// The image is of the moment of the dump, wherever the original has come to.
fn leaves_running(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = counter(docker, way, network()?)?;
    docker.checkpoint_running(&container, "first")?;
    docker.expect_status(&container, "running")?;
    docker.expect(&container, 102)?;
    docker.checkpoint_running(&container, "second")?;
    docker.expect(&container, 103)?;
    inspected(docker, &container)?;
    docker.kill(&container)?;
    docker.restore(&container, "first")?;
    docker.expect(&container, 102)?;
    docker.expect_logs(&container, "101\n102\n103\n102\n")
}

/// `stasis inspect` of what Docker keeps: a checkpoint, and the directory of both.
fn inspected(docker: &Docker<'_>, container: &Container) -> Result<()> {
    let both = docker.daemon().checkpoints(&container.id);
    let case = docker.case();
    for name in ["first", "second"] {
        let seen = case.inspect(&both.join(name))?;
        ensure!(seen["whole"] == true && seen["kind"] == "cuda", "{name}: {seen:#}");
        ensure!(seen["checkpoint"]["container"] == container.id.as_str(), "{name}: {seen:#}");
        ensure!(seen["host"]["can_restore"] == true, "{name}: {seen:#}");
    }
    let said = command::fail(&mut case.inspect_command(&both), Duration::from_secs(10))?;
    ensure!(said.contains("there are several images in it: first, second"), "{said}");
    Ok(())
}

/// One that prints all the time, also at the moment of the dump.
fn loses_no_line(docker: &Docker<'_>, way: Way) -> Result<()> {
    let start = Start::counter(way.runtime(), network()?, docker.gpu());
    let container = docker.start(&start.with(&["--tick", "5"]))?;
    docker.ask(&container)?;
    for name in ["first", "second"] {
        docker.checkpoint(&container, name)?;
        docker.wait_for(&container, "exited")?;
        let before = consecutive(&docker.logs(&container)?, 101)?;
        docker.restore(&container, name)?;
        let after = docker.ask(&container)?;
        ensure!(after > before, "at {before} before and {after} after");
    }
    docker.kill(&container)?;
    consecutive(&docker.logs(&container)?, 101).map(drop)
}
