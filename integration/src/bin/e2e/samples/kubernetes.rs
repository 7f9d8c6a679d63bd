//! What the pods of the `DaemonSet` run, on the lab as on a node: its own containerd's files, its own
//! process 1, and a systemctl that only notes what it is asked for.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::command;

use super::daemon::Daemon;
use super::{LIMIT, class, cri, file, is_containerd_1, say};

const MAIN: &str = "/etc/containerd/config.toml";
const PROGRAMS: &str = "/opt/stasis";
const SHIM: &str = "/opt/stasis/bin/containerd-shim-runc-stasis";

/// There is one node.
static NODE: Mutex<()> = Mutex::new(());

struct Node {
    directory: PathBuf,
    before: Option<String>,
    _alone: MutexGuard<'static, ()>,
}

impl Node {
    /// With this main file of containerd, or none. The shim of the image is a program that runs
    /// for as long as it is told.
    fn new(case: &Case, main: Option<&str>) -> Result<Self> {
        let alone = NODE.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = case.path("node");
        let bin = directory.join("stage/opt/stasis/bin");
        fs::create_dir_all(&bin)?;
        fs::copy("/bin/busybox", bin.join("containerd-shim-runc-stasis"))?;
        let systemctl = directory.join("bin/systemctl");
        fs::create_dir_all(directory.join("bin"))?;
        let calls = directory.join("calls");
        fs::write(&calls, "")?;
        fs::write(&systemctl, format!("#!/bin/sh\necho \"$*\" >>{}\n", calls.display()))?;
        fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755))?;
        let before = fs::read_to_string(MAIN).ok();
        let node = Self { directory, before, _alone: alone };
        put(main)?;
        Ok(node)
    }

    /// Runs it with these capabilities of a container and no others.
    fn run(&self, word: &str, capabilities: &[String]) -> Result<command::Finished> {
        let mut bounding = "-all".to_owned();
        for name in capabilities {
            bounding.push_str(",+");
            bounding.push_str(name);
        }
        let mut script = Command::new("setpriv");
        script.args(["--bounding-set", &bounding, "--inh-caps", "-all"]);
        script.arg(file("config/kubernetes/stasis-node")).arg(word);
        script.env("STASIS_STAGE", self.directory.join("stage"));
        let path = std::env::var("PATH")?;
        script.env("PATH", format!("{}:{path}", self.directory.join("bin").display()));
        command::run(&mut script, LIMIT)
    }

    /// The same with what the `DaemonSet` gives to the container that does it.
    fn succeed(&self, word: &str) -> Result<String> {
        let capabilities = if word == "copy" { Vec::new() } else { capabilities()? };
        let done = self.run(word, &capabilities)?;
        ensure!(done.status.success(), "{word}: {done:?}");
        Ok(done.stdout)
    }

    /// How often containerd was restarted so far.
    fn restarts(&self) -> usize {
        let calls = fs::read_to_string(self.directory.join("calls")).unwrap_or_default();
        calls.lines().filter(|call| *call == "restart --no-block containerd").count()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = put(self.before.as_deref());
        let _ = fs::remove_dir_all("/etc/containerd/conf.d");
        let _ = fs::remove_dir_all(PROGRAMS);
    }
}

fn put(main: Option<&str>) -> Result<()> {
    match main {
        Some(text) => Ok(fs::write(MAIN, text)?),
        None if Path::new(MAIN).exists() => Ok(fs::remove_file(MAIN)?),
        None => Ok(()),
    }
}

/// What the `DaemonSet` lets the container `configure` do.
fn capabilities() -> Result<Vec<String>> {
    let text = fs::read_to_string(file("config/kubernetes/daemonset.yaml"))?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("add: "));
    let line = line.context("the DaemonSet adds no capabilities")?;
    Ok(line
        .trim_matches(['[', ']'])
        .split(", ")
        .map(|name| name.trim_matches('"').to_lowercase())
        .collect())
}

fn dump() -> Result<String> {
    say("containerd", &["config", "dump"])
}

/// From nothing to a class that CRI has, and back.
pub(super) fn node(case: &Case) -> Result<()> {
    // What Debian installs: no class is named in it.
    let debian = fs::read_to_string(MAIN)?;
    for (name, main) in [("debian", Some(debian.as_str())), ("none", None)] {
        let node = Node::new(case, main)?;
        node.succeed("copy")?;
        ensure!(fs::read(SHIM)? == fs::read("/bin/busybox")?, "{SHIM} is another");
        ensure!(!node.run("ready", &capabilities()?)?.status.success(), "ready without the class");
        node.succeed("configure")?;
        node.succeed("ready")?;
        ensure!(node.restarts() == 1, "{name}: containerd was not restarted");

        let cri = cri(case, name, Path::new(MAIN))?;
        let stasis = class(&cri, "stasis")?;
        ensure!(stasis["runtimeType"] == "io.containerd.runc.v2", "{stasis:#}");
        ensure!(stasis["runtimePath"] == SHIM, "{stasis:#}");
        ensure!(class(&cri, "runc")?["runtimeType"] == "io.containerd.runc.v2", "{cri:#}");
        drop(cri);

        // Again, as after an update.
        node.succeed("copy")?;
        node.succeed("configure")?;
        ensure!(node.restarts() == 1, "{name}: containerd was restarted for nothing");
        node.succeed("remove")?;
        ensure!(node.restarts() == 2, "{name}: containerd was not restarted");
        ensure!(fs::read_to_string(MAIN).ok().as_deref() == main, "{name}: {MAIN} is another");
        ensure!(fs::read_dir(PROGRAMS)?.next().is_none(), "{name}: programs are left");
        node.succeed("remove")?;
        ensure!(node.restarts() == 2, "{name}: containerd was restarted for nothing");
    }
    // Each of the capabilities is needed.
    let node = Node::new(case, Some(&debian))?;
    node.succeed("copy")?;
    node.succeed("configure")?;
    let all = capabilities()?;
    for one in &all {
        let others: Vec<_> = all.iter().filter(|name| *name != one).cloned().collect();
        ensure!(!node.run("ready", &others)?.status.success(), "{one} is not needed");
    }
    Ok(())
}

/// containerd calls the shim of a container that runs: it may not be removed before.
pub(super) fn in_use(case: &Case) -> Result<()> {
    let node = Node::new(case, Some("version = 2\n"))?;
    node.succeed("copy")?;
    node.succeed("configure")?;
    let mut shim = Command::new(SHIM);
    std::os::unix::process::CommandExt::arg0(&mut shim, "sleep");
    let shim = Daemon::start(shim.arg("100"), &node.directory.join("log"))?;
    // An update while it runs: the new program is another file.
    node.succeed("copy")?;
    let said = node.succeed("remove")?;
    ensure!(said.contains("the programs stay"), "{said}");
    ensure!(Path::new(SHIM).exists(), "{SHIM} was removed");
    drop(shim);
    node.succeed("remove")?;
    ensure!(!Path::new(SHIM).exists(), "{SHIM} is left");
    Ok(())
}

/// Whatever the main file says stays in force, in each form and with and without imports.
pub(super) fn settings(case: &Case) -> Result<()> {
    let versions: &[_] = if is_containerd_1()? { &[2] } else { &[2, 3] };
    for &version in versions {
        let plugin = if version == 2 { "grpc.v1.cri" } else { "cri.v1.runtime" };
        for imports in ["", "imports = [\"/etc/containerd/conf.d/*.toml\"]\n"] {
            let main = format!(
                "version = {version}\n{imports}\
                 [plugins.\"io.containerd.{plugin}\".containerd]\n\
                 default_runtime_name = \"foo\"\n\
                 [plugins.\"io.containerd.{plugin}\".containerd.runtimes.foo]\n\
                 runtime_type = \"io.containerd.runc.v2\"\n"
            );
            let node = Node::new(case, Some(&main))?;
            let before = dump()?;
            node.succeed("copy")?;
            node.succeed("configure")?;
            let after = dump()?;
            ensure!(after.contains(SHIM), "{after}");
            let lost = before.lines().filter(|line| {
                !line.starts_with("imports") && !after.lines().any(|other| other == *line)
            });
            let lost: Vec<_> = lost.collect();
            ensure!(lost.is_empty(), "{main}lost: {lost:#?}");
            node.succeed("remove")?;
            ensure!(dump()? == before, "{main}is another after the removal");
        }
    }
    // What is no longer valid with ours is left as it is.
    let taken = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.stasis]\n\
                 runtime_type = \"io.containerd.runc.v2\"\n";
    let node = Node::new(case, Some(taken))?;
    let done = node.run("configure", &capabilities()?)?;
    ensure!(!done.status.success() && done.stderr.contains("nothing was changed"), "{done:?}");
    ensure!(fs::read_to_string(MAIN)? == taken, "{MAIN} is another");
    ensure!(node.restarts() == 0, "containerd was restarted");
    Ok(())
}
