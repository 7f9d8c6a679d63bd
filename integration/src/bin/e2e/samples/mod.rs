//! What is installed beside the programs, used by the tools that it is for: samples of
//! configuration, what the `DaemonSet` runs on a node, completions.

mod completions;
mod daemon;
mod kubernetes;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stasis_integration::case::Case;
use stasis_integration::{command, processes, wait};

use crate::Test;
use daemon::Daemon;

const LIMIT: Duration = Duration::from_secs(15);

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("containerd", containerd),
        Test::new("containerd_1_configuration_in_2", containerd_1_in_2),
        Test::new("docker", docker),
        Test::new("podman", podman),
        Test::new("kubernetes_node", kubernetes::node),
        Test::new("kubernetes_node_keeps_what_is_in_use", kubernetes::in_use),
        Test::new("kubernetes_node_keeps_the_settings", kubernetes::settings),
        Test::new("kubernetes_node_restarts_containerd_at_last", kubernetes::restart),
        Test::new("kubernetes_node_verifies_what_was_interrupted", kubernetes::interrupted),
        Test::new("kubernetes_node_replaces_a_broken_file", kubernetes::broken),
        Test::new("kubernetes_node_removes_programs_last", kubernetes::removal),
        Test::new("kubernetes_node_sees_programs_behind_a_link", kubernetes::linked),
        Test::new("kubernetes_node_needs_both_marks", kubernetes::marks),
        Test::new("kubernetes_node_needs_the_programs", kubernetes::programs),
        Test::new("completion_of_stasis_runc", completions::stasis_runc),
    ]
}

/// A file of the project.
fn file(name: &str) -> PathBuf {
    Path::new("/stasis").join(name)
}

/// What a program says that has to succeed.
fn say(program: &str, arguments: &[&str]) -> Result<String> {
    command::succeed(Command::new(program).args(arguments), LIMIT)
}

/// Whether the lab's containerd is of the old major version, whose newest configuration is 2.
fn is_containerd_1() -> Result<bool> {
    let version = say("containerd", &["--version"])?;
    let number = version.split_whitespace().nth(2).unwrap_or_default();
    Ok(number.trim_start_matches('v').starts_with("1."))
}

/// The sample for the lab's containerd.
fn sample() -> Result<PathBuf> {
    let version = if is_containerd_1()? { 1 } else { 2 };
    Ok(file(&format!("config/containerd/config-{version}.x.toml")))
}

/// A containerd with this configuration, and the socket on which it answers.
fn start(case: &Case, name: &str, config: &Path) -> Result<(Daemon, PathBuf)> {
    let directory = case.path(name);
    fs::create_dir_all(&directory)?;
    // With its other sockets for itself: others have the usual ones.
    let mut text = fs::read_to_string(config)?;
    text.push_str("\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = true\n");
    let config = directory.join("config.toml");
    fs::write(&config, text)?;
    let socket = directory.join("containerd.sock");
    let mut containerd = Command::new("containerd");
    containerd.arg("--config").arg(&config).arg("--address").arg(&socket);
    containerd.arg("--root").arg(directory.join("root"));
    containerd.arg("--state").arg(directory.join("state"));
    let daemon = Daemon::start(&mut containerd, &directory.join("log"))?;
    wait::until("an answer of containerd", LIMIT, || {
        let mut version = Command::new("ctr");
        version.arg("--address").arg(&socket).arg("version");
        Ok(command::run(&mut version, LIMIT)?.status.success().then_some(()))
    })
    .with_context(|| daemon.log())?;
    Ok((daemon, socket))
}

/// What CRI says of itself in a containerd with this configuration.
fn cri(case: &Case, name: &str, config: &Path) -> Result<Value> {
    let (_containerd, socket) = start(case, name, config)?;
    let endpoint = format!("unix://{}", socket.display());
    Ok(serde_json::from_str(&say("crictl", &["--runtime-endpoint", &endpoint, "info"])?)?)
}

/// The class of a runtime as CRI has it.
fn class<'a>(cri: &'a Value, name: &str) -> Result<&'a Value> {
    let class = cri.pointer(&format!("/config/containerd/runtimes/{name}"));
    class.with_context(|| format!("CRI has no class {name}: {cri:#}"))
}

/// Whether CRI has both classes of the samples, and its own still.
fn expect_classes(cri: &Value) -> Result<()> {
    ensure!(cri["config"]["containerd"]["defaultRuntimeName"] == "runc", "{cri:#}");
    ensure!(class(cri, "runc")?["runtimeType"] == "io.containerd.runc.v2", "{cri:#}");
    for (name, kind, path) in [
        ("stasis", "io.containerd.runc.stasis", ""),
        ("stasis-v2", "io.containerd.runc.v2", "/usr/local/bin/containerd-shim-runc-stasis"),
    ] {
        let class = class(cri, name)?;
        ensure!(class["runtimeType"] == kind && class["runtimePath"] == path, "{class:#}");
        ensure!(class["options"]["SystemdCgroup"] == true, "{class:#}");
        ensure!(class["PodAnnotations"] == json!(["dev.stasis.*"]), "{class:#}");
        ensure!(class["ContainerAnnotations"] == json!(["dev.stasis.*"]), "{class:#}");
    }
    ensure!(cri["config"]["enableCDI"] == true, "{cri:#}");
    let directories = json!(["/etc/cdi", "/var/run/cdi"]);
    ensure!(cri["config"]["cdiSpecDirs"] == directories, "{cri:#}");
    Ok(())
}

fn containerd(case: &Case) -> Result<()> {
    expect_classes(&cri(case, "containerd", &sample()?)?)
}

/// The other sample: 2.x takes that of 1.x, 1.x not that of 2.x.
fn containerd_1_in_2(case: &Case) -> Result<()> {
    if is_containerd_1()? {
        let newer = file("config/containerd/config-2.x.toml");
        let mut dump = Command::new("containerd");
        dump.arg("--config").arg(newer).args(["config", "dump"]);
        let said = command::fail(&mut dump, LIMIT)?;
        ensure!(said.contains("unsupported config version `3`"), "{said}");
        return Ok(());
    }
    expect_classes(&cri(case, "containerd", &file("config/containerd/config-1.x.toml"))?)
}

fn docker(case: &Case) -> Result<()> {
    let sample = file("config/docker/daemon.json");
    let mut validate = Command::new("dockerd");
    validate.arg("--validate").arg("--config-file").arg(&sample);
    let valid = command::run(&mut validate, LIMIT)?;
    ensure!(valid.status.success(), "{valid:?}");

    let directory = case.path("docker");
    fs::create_dir_all(&directory)?;
    let (_containerd, socket) = start(case, "containerd", &self::sample()?)?;
    let host = format!("unix://{}/docker.sock", directory.display());
    let mut dockerd = Command::new("dockerd");
    dockerd.arg("--config-file").arg(&sample).args(["--host", &host]);
    dockerd.arg("--containerd").arg(socket);
    for (option, name) in [("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "pid")] {
        dockerd.arg(option).arg(directory.join(name));
    }
    dockerd.args(["--bridge", "none", "--iptables=false", "--ip6tables=false"]);
    let daemon = Daemon::start(&mut dockerd, &directory.join("log"))?;
    let form = r#"{"runtimes": {{json .Runtimes}}, "experimental": {{.ExperimentalBuild}}, "cdi": {{json .CDISpecDirs}}}"#;
    wait::until("an answer of dockerd", LIMIT, || {
        let mut version = Command::new("docker");
        version.args(["--host", &host, "version"]);
        Ok(command::run(&mut version, LIMIT)?.status.success().then_some(()))
    })
    .with_context(|| daemon.log())?;
    let info: Value =
        serde_json::from_str(&say("docker", &["--host", &host, "info", "--format", form])?)?;
    drop(daemon);
    // It leaves a mount of its data on itself.
    let _ = nix::mount::umount(&directory.join("data"));
    ensure!(info["runtimes"]["stasis"]["path"] == "/usr/local/bin/stasis-runc", "{info:#}");
    ensure!(info["runtimes"]["stasis-shim"].is_object(), "{info:#}");
    ensure!(info["experimental"] == true, "{info:#}");
    ensure!(info["cdi"] == json!(["/etc/cdi", "/var/run/cdi"]), "{info:#}");
    Ok(())
}

fn podman(case: &Case) -> Result<()> {
    let directory = case.path("podman");
    let rootfs = directory.join("rootfs");
    fs::create_dir_all(rootfs.join("bin"))?;
    fs::copy("/bin/busybox", rootfs.join("bin/true"))?;
    // The second path of the sample: the first is not the lab's to write.
    let installed = Installed::new("/usr/bin/stasis-runc", &case.binary("stasis-runc"))?;
    let parent = format!("/{}-podman", std::env::var("LAB_ID")?);
    let podman = |arguments: &[&str]| {
        let mut podman = Command::new("podman");
        // As a file in containers.conf.d would be.
        podman.env("CONTAINERS_CONF_OVERRIDE", file("config/podman/stasis.conf"));
        podman.env("PODMAN_IGNORE_CGROUPSV1_WARNING", "1");
        podman.arg("--root").arg(directory.join("root"));
        podman.arg("--runroot").arg(directory.join("runroot"));
        podman.args(arguments);
        podman
    };
    let form = "{{.Host.OCIRuntime.Name}} {{.Host.OCIRuntime.Path}}";
    let info =
        command::succeed(&mut podman(&["--runtime", "stasis", "info", "--format", form]), LIMIT)?;
    ensure!(info.trim() == "stasis /usr/bin/stasis-runc", "{info}");

    let run = |runtime, program| {
        let mut run = podman(&["--runtime", runtime, "run", "--rm", "--network", "none"]);
        run.args(["--cgroup-parent", &parent, "--rootfs"]).arg(&rootfs).arg(program);
        run
    };
    command::succeed(&mut run("stasis", "/bin/true"), LIMIT)?;
    // Its own words, which Podman has from the JSON log.
    let said = command::fail(&mut run("stasis", "/bin/none"), LIMIT)?;
    ensure!(said.contains("stasis: runc create failed: unable to start"), "{said}");
    ensure!(!said.contains("level=error"), "{said}");
    // The others are still asked for it.
    let said = command::fail(&mut run("runc", "/bin/none"), LIMIT)?;
    ensure!(said.contains("runc: runc create failed: unable to start"), "{said}");
    drop(installed);
    // What Podman leaves behind cleans up after a container; the last one of all unmounts.
    let root = directory.join("root");
    wait::until("the end of Podman", LIMIT, || {
        let left = processes::with_argument(&root.to_string_lossy());
        Ok(left.is_empty().then_some(()))
    })?;
    let _ = nix::mount::umount(&root.join("overlay"));
    Ok(())
}

/// A program where a package would put it, as long as this lives.
struct Installed(PathBuf);

impl Installed {
    fn new(path: &str, program: &Path) -> Result<Self> {
        symlink(program, path)?;
        Ok(Self(path.into()))
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
