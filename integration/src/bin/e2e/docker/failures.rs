//! What fails is told in the engine's words, and the container is as it was.

use anyhow::{Result, ensure};
use stasis_integration::docker::{Container, Docker};
use stasis_integration::runtime::Settings;

use super::{Way, checkpoint_and_end, counter, network, test};
use crate::Test;

pub(super) fn tests(way: Way) -> Vec<Test> {
    vec![
        test(way, "failed_checkpoint", failed_checkpoint),
        test(way, "failed_restore", failed_restore),
        test(way, "paused", paused),
    ]
}

/// Docker says what the engine said.
fn says(error: &str, words: &[&str]) -> Result<()> {
    for word in words {
        ensure!(error.contains(word), "Docker does not say {word:?}: {error}");
    }
    Ok(())
}

fn create_fails(docker: &Docker<'_>, container: &Container, name: &str) -> Result<String> {
    docker.daemon().fail(["checkpoint", "create", &container.name, name])
}

fn failed_checkpoint(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = counter(docker, way, network()?)?;
    docker.case().gpu.faults(&["checkpoint error:304"])?;
    let error = create_fails(docker, &container, "first")?;
    says(&error, &["stasis: checkpoint of container", "cuda-checkpoint", "(counter)", "304"])?;
    docker.expect_status(&container, "running")?;
    docker.expect(&container, 102)?;
    ensure!(docker.checkpoints(&container)?.is_empty(), "half a checkpoint is listed");
    docker.case().gpu.heal()?;
    // The name is still free, and then it is not.
    docker.checkpoint_running(&container, "first")?;
    let error = create_fails(docker, &container, "first")?;
    says(&error, &["checkpoint with name first already exists"])?;
    docker.expect(&container, 103)?;
    docker.kill(&container)?;
    docker.restore(&container, "first")?;
    docker.expect(&container, 103)?;
    docker.expect_logs(&container, "101\n102\n103\n103\n")
}

fn failed_restore(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = counter(docker, way, network()?)?;
    checkpoint_and_end(docker, way, &container, "first")?;
    docker.case().set(&Settings::default().impatient(2))?;
    docker.case().gpu.faults(&["restore error:304"])?;
    let error = docker.daemon().fail(["start", "--checkpoint", "first", &container.name])?;
    let words = ["stasis: restore of container", "cuda-restore", "(counter)", "304"];
    says(&error, &words)?;
    docker.expect_status(&container, "exited")?;
    says(&docker.inspect(&container, ".State.Error")?, &words)?;
    if way != Way::Runc {
        // CRIU's log lay in the bundle, which Docker has removed by now.
        says(&error, &["CRIU's log: "])?;
    }
    docker.case().gpu.heal()?;
    docker.case().set(&Settings::default())?;
    docker.restore(&container, "first")?;
    docker.expect(&container, 102)
}

/// What was paused stays paused; without --leave-running it ends as one that was not.
fn paused(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = counter(docker, way, network()?)?;
    let docker_does = |verb: &str| docker.daemon().run([verb, &container.name]);
    docker_does("pause")?;
    docker.checkpoint_running(&container, "first")?;
    docker.expect_status(&container, "paused")?;
    docker_does("unpause")?;
    docker.expect(&container, 102)?;
    docker_does("pause")?;
    docker.checkpoint(&container, "second")?;
    if way.exits() {
        docker.wait_for(&container, "exited")?;
    } else {
        docker.expect_status(&container, "paused")?;
        docker_does("unpause")?;
        docker.kill(&container)?;
    }
    docker.restore(&container, "second")?;
    docker.expect_status(&container, "running")?;
    docker.expect(&container, 103)
}
