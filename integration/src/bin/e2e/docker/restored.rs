//! A restored container is a container like any other.

use anyhow::{Result, ensure};
use stasis_integration::docker::Docker;

use super::{Way, checkpoint_and_end, counter, network, test};
use crate::Test;

pub(super) fn tests(way: Way) -> Vec<Test> {
    vec![test(way, "restored_like_any_other", like_any_other)]
}

fn like_any_other(docker: &Docker<'_>, way: Way) -> Result<()> {
    let container = counter(docker, way, network()?)?;
    checkpoint_and_end(docker, way, &container, "first")?;
    docker.restore(&container, "first")?;
    let name = container.name.as_str();
    let daemon = docker.daemon();

    let said = daemon.run(["exec", name, "cat", "/proc/1/comm"])?;
    ensure!(said == "counter\n", "init is called {said:?}");
    let status = docker.try_run(&["exec", name, "sh", "-c", "exit 3"])?.status;
    ensure!(status.code() == Some(3), "docker exec ended with {status}");
    let said = daemon.run(["top", name])?;
    ensure!(said.contains("/bin/counter"), "docker top shows {said}");
    let format = "{{.PIDs}} {{.MemUsage}}";
    let said = daemon.run(["stats", "--no-stream", "--format", format, name])?;
    let processes: u64 = said.split(' ').next().unwrap_or_default().parse()?;
    ensure!(processes > 0 && said.contains("iB / "), "docker stats shows {said}");
    daemon.run(["update", "--memory", "512m", "--memory-swap", "600m", name])?;
    let limit = docker.inspect(&container, ".HostConfig.Memory")?;
    ensure!(limit == (512 << 20).to_string(), "the limit is {limit}");

    docker.expect(&container, 102)?;
    docker.checkpoint_running(&container, "second")?;
    docker.expect(&container, 103)?;
    // Begins anew, and is none that was restored.
    daemon.run(["restart", "--time", "0", name])?;
    docker.expect(&container, 101)?;
    checkpoint_and_end(docker, way, &container, "third")?;
    docker.restore(&container, "second")?;
    docker.expect(&container, 103)
}
