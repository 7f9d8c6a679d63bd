//! What Docker itself cannot do, shown with its stock runtime: these tests tell when it can.

use anyhow::{Result, ensure};
use stasis_integration::ctr::{Checkpoint, Ctr};
use stasis_integration::docker::{BARE, Docker, Network, Start};
use stasis_integration::suite::Suite;

use super::{SLEEP, Way, checkpoint_and_end, network, test};
use crate::Test;

pub(super) fn tests(way: Way) -> Vec<Test> {
    let private = test(way, "private_network_on_28", private_network);
    let mut tests = vec![private.only(&[Suite::Forky])];
    if way == Way::Stock {
        tests.push(test(way, "no_exit_without_options", no_exit_without_options));
        tests.push(test(way, "no_checkpoint_directory", no_checkpoint_directory));
        let already_exists = test(way, "content_already_exists", content_already_exists);
        tests.push(already_exists.only(&[Suite::Trixie]));
    }
    tests
}

/// containerd/containerd#12141: between Create and Start Docker 28 binds the network namespace of
/// the task's process, which a task that is to be restored does not have yet.
fn private_network(docker: &Docker<'_>, way: Way) -> Result<()> {
    let sleep = Start::plain(way.runtime(), Network::Private, &SLEEP);
    let container = docker.start(&sleep)?;
    checkpoint_and_end(docker, way, &container, "first")?;
    let error = docker.daemon().fail(["start", "--checkpoint", "first", &container.name])?;
    let known = error.contains("bind-mount /proc/0/ns/net") && error.contains("no such file");
    ensure!(known, "Docker says something new: {error}");
    docker.expect_status(&container, "exited")?;
    // It can be started afresh.
    docker.daemon().run(["start", &container.name])?;
    docker.expect_status(&container, "running")
}

/// Why our shim under its own name does not end a container at its checkpoint.
fn no_exit_without_options(docker: &Docker<'_>, _way: Way) -> Result<()> {
    let container = docker.start(&Start::plain(BARE, network()?, &SLEEP))?;
    docker.checkpoint(&container, "first")?;
    docker.expect_status(&container, "running")?;
    docker.kill(&container)?;
    docker.restore(&container, "first")?;
    docker.expect_status(&container, "running")
}

/// moby/moby#42900, and containerd before 2.0: no checkpoint while content of an earlier one of the
/// container is there, which is until the collector comes round. The tests' containerd collects at
/// once; here an image of `ctr` holds on to it.
fn content_already_exists(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = docker.start(&Start::plain(way.runtime(), network()?, &SLEEP))?;
    let ctr = Ctr::new(&docker.case().containerd().socket(), "moby");
    ctr.checkpoint(&container.id, &Checkpoint::default())?;
    let create = ["checkpoint", "create", "--leave-running", &container.name, "first"];
    let error = docker.daemon().fail(create)?;
    let known = error.contains("content sha256:") && error.contains("already exists");
    ensure!(known, "Docker says something new: {error}");
    docker.expect_status(&container, "running")?;
    let images = ctr.run(["images", "ls", "--quiet"])?;
    for image in images.lines().filter(|name| name.contains("/checkpoint/")) {
        ctr.remove_image(image)?;
    }
    docker.checkpoint_running(&container, "first")
}

/// A checkpoint is found only where Docker keeps it: moving one takes a copy by hand.
fn no_checkpoint_directory(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = docker.start(&Start::plain(way.runtime(), network()?, &SLEEP))?;
    let directory = docker.case().path("checkpoints").display().to_string();
    let create = ["checkpoint", "create", "--checkpoint-dir", &directory, &container.name, "first"];
    docker.daemon().run(create)?;
    docker.wait_for(&container, "exited")?;
    let start = ["start", "--checkpoint-dir", &directory, "--checkpoint", "first", &container.name];
    let error = docker.daemon().fail(start)?;
    ensure!(error.contains("custom checkpointdir is not supported"), "Docker says: {error}");
    Ok(())
}
