//! How a container is given its GPU, and Stasis its configuration.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use stasis_integration::docker::{CDI_DEVICE, CONFIGURED, Docker, Network, Start};

use super::{SLEEP, Way, checkpoint_and_end, counter, network, test};
use crate::Test;

pub(super) fn tests(way: Way) -> Vec<Test> {
    let mut tests = vec![test(way, "gpu_by_cdi", gpu_by_cdi)];
    // The same shim under another name makes no difference here.
    if way != Way::Exact {
        tests.push(test(way, "on_anothers_network", on_anothers_network));
        tests.push(test(way, "with_a_terminal", with_a_terminal));
    }
    if way == Way::Runc {
        tests.push(test(way, "moves", moves));
        tests.push(test(way, "gpus_without_nvidias_hook", gpus_without_nvidias_hook));
    }
    if way == Way::Name {
        tests.push(test(way, "configured_in_daemon_json", configured_in_daemon_json));
    }
    tests
}

/// `--device vendor/class=name`.
fn gpu_by_cdi(docker: &Docker<'_>, way: Way) -> Result<()> {
    let flags = vec!["--device".to_owned(), CDI_DEVICE.to_owned()];
    let container = docker.start(&Start::counter(way.runtime(), network()?, flags))?;
    docker.expect(&container, 101)?;
    checkpoint_and_end(docker, way, &container, "first")?;
    docker.restore(&container, "first")?;
    docker.expect(&container, 102)?;
    checkpoint_and_end(docker, way, &container, "second")?;
    docker.restore(&container, "second")?;
    docker.expect(&container, 103)
}

/// `--network container:NAME`: what Docker 28 can restore and is no network of the host's.
fn on_anothers_network(docker: &Docker<'_>, way: Way) -> Result<()> {
    let holder = docker.start(&Start::plain(way.runtime(), Network::Private, &SLEEP))?;
    let mut start = Start::counter(way.runtime(), Network::ByFlags, docker.gpu());
    start.flags.extend(["--network".to_owned(), format!("container:{}", holder.name)]);
    let container = docker.start(&start)?;
    docker.expect(&container, 101)?;
    let network = |container| -> Result<PathBuf> {
        Ok(fs::read_link(format!("/proc/{}/ns/net", docker.pid(container)?))?)
    };
    for (name, count) in [("first", 102), ("second", 103)] {
        checkpoint_and_end(docker, way, &container, name)?;
        docker.restore(&container, name)?;
        ensure!(network(&container)? == network(&holder)?, "it is on a network of its own");
        docker.expect(&container, count)?;
    }
    ensure!(network(&holder)? != fs::read_link("/proc/self/ns/net")?, "that is the host's");
    docker.expect_logs(&container, "101\n102\n103\n")
}

/// `docker run --tty`: it gets a new terminal, and what was printed on the old one is in the log.
fn with_a_terminal(docker: &Docker<'_>, way: Way) -> Result<()> {
    let mut start = Start::counter(way.runtime(), network()?, docker.gpu());
    start.flags.push("--tty".to_owned());
    let container = docker.start(&start)?;
    docker.expect(&container, 101)?;
    for (name, count) in [("first", 102), ("second", 103)] {
        checkpoint_and_end(docker, way, &container, name)?;
        docker.restore(&container, name)?;
        docker.expect(&container, count)?;
    }
    docker.expect_logs(&container, "101\r\n102\r\n103\r\n")
}

/// Docker knows `--gpus` only with NVIDIA's hook, whose mounts no image can hold: CDI it is.
fn gpus_without_nvidias_hook(docker: &Docker<'_>, way: Way) -> Result<()> {
    let mut start = Start::plain(way.runtime(), network()?, &["true"]);
    start.flags = vec!["--gpus".to_owned(), "all".to_owned()];
    let Err(error) = docker.start(&start) else { anyhow::bail!("there is no such GPU") };
    let error = format!("{error:#}");
    ensure!(error.contains("could not select device driver"), "Docker says: {error}");
    Ok(())
}

/// A checkpoint's directory copied below another container: Docker has no command for it.
fn moves(docker: &Docker<'_>, way: Way) -> Result<()> {
    let start = Start::counter(way.runtime(), network()?, docker.gpu());
    let container = docker.start(&start)?;
    docker.expect(&container, 101)?;
    checkpoint_and_end(docker, way, &container, "first")?;
    let other = docker.create(&start)?;
    let (from, to) =
        (docker.daemon().checkpoints(&container.id), docker.daemon().checkpoints(&other.id));
    fs::create_dir_all(&to)?;
    let mut copy = std::process::Command::new("cp");
    copy.arg("--archive").arg(from.join("first")).arg(&to);
    stasis_integration::command::succeed(&mut copy, std::time::Duration::from_secs(60))?;
    docker.remove(&container)?;
    docker.restore(&other, "first")?;
    // It is the same program, so it listens on the first one's port.
    let answer = stasis_integration::udp::ask(docker.pid(&other)?, container.port)?;
    ensure!(answer == 102, "the counter said {answer} instead of 102");
    docker.expect_logs(&other, "102\n")
}

/// `options` of a runtime reach our shim, as a `ConfigPath`.
fn configured_in_daemon_json(docker: &Docker<'_>, _way: Way) -> Result<()> {
    let file = docker.daemon().own_configuration();
    let usual = fs::read_to_string(docker.case().runtime.config())?;
    fs::write(&file, &usual)?;
    let container = docker.start(&Start::counter(CONFIGURED, network()?, docker.gpu()))?;
    docker.expect(&container, 101)?;
    docker.checkpoint_running(&container, "first")?;
    docker.kill(&container)?;

    let library = docker.case().gpu.host_library().display().to_string();
    let other = usual.replace(&library, "/nonexistent/libcuda.so.1");
    ensure!(other != usual, "the configuration names no {library}");
    fs::write(&file, other)?;
    docker.daemon().run(["start", &container.name])?;
    docker.expect(&container, 101)?;
    let create = ["checkpoint", "create", &container.name, "second"];
    let error = docker.daemon().fail(create)?;
    ensure!(error.contains("/nonexistent/libcuda.so.1"), "Docker says: {error}");
    fs::write(&file, usual)?;
    docker.checkpoint_running(&container, "second")?;
    // The usual way is not changed by it.
    counter(docker, Way::Name, network()?).map(drop)
}
