//! What the pods of the `DaemonSet` run, on the lab as on a node: its own containerd's files, its own
//! process 1, and a systemctl that only notes what it is asked for.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stasis_integration::case::Case;
use stasis_integration::command;

use super::daemon::Daemon;
use super::{LIMIT, class, cri, file, is_containerd_1, say};

const MAIN: &str = "/etc/containerd/config.toml";
const PROGRAMS: &str = "/opt/stasis";
const SHIM: &str = "/opt/stasis/bin/containerd-shim-runc-stasis";
const DROP_IN: &str = "/etc/containerd/conf.d/stasis.toml";
/// A line of the main file by which it imports ours.
const IMPORTS: &str = "imports = [\"/etc/containerd/conf.d/*.toml\"]\n";
/// Ends the script that calls the node's program, which is its grandchild in `$(...)`.
const KILL_GRANDPARENT: &str = "kill -KILL \"$(awk '{ print $4 }' /proc/$PPID/stat)\"";

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
        fs::create_dir_all(directory.join("bin"))?;
        fs::write(directory.join("calls"), "")?;
        let before = fs::read_to_string(MAIN).ok();
        let node = Self { directory, before, _alone: alone };
        node.systemctl(":")?;
        put(main)?;
        Ok(node)
    }

    /// Puts a shell script before a program of the node.
    fn mock(&self, program: &str, script: &str) -> Result<()> {
        let path = self.directory.join("bin").join(program);
        fs::write(&path, format!("#!/bin/sh\n{script}\n"))?;
        Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
    }

    fn unmock(&self, program: &str) -> Result<()> {
        Ok(fs::remove_file(self.directory.join("bin").join(program))?)
    }

    /// A systemctl that notes the call, and whether there is a shim, and then does this.
    fn systemctl(&self, then: &str) -> Result<()> {
        let calls = self.directory.join("calls");
        let note = format!("echo \"$* with $(ls {SHIM} 2>&1)\" >>{}\n{then}", calls.display());
        self.mock("systemctl", &note)
    }

    /// Runs it with these capabilities of a container and no others.
    fn run(&self, word: &str, capabilities: &[String]) -> Result<command::Finished> {
        self.run_for(PROGRAMS, word, capabilities)
    }

    /// The same with the programs at another place.
    fn run_for(
        &self,
        prefix: &str,
        word: &str,
        capabilities: &[String],
    ) -> Result<command::Finished> {
        let mut bounding = "-all".to_owned();
        for name in capabilities {
            bounding.push_str(",+");
            bounding.push_str(name);
        }
        let mut script = Command::new("setpriv");
        script.args(["--bounding-set", &bounding, "--inh-caps", "-all"]);
        script.arg(file("config/kubernetes/stasis-node")).arg(word);
        script.env("STASIS_STAGE", self.directory.join("stage"));
        script.env("STASIS_PREFIX", prefix);
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

    /// The same of what has to fail, and what it says.
    fn fail(&self, word: &str) -> Result<String> {
        let done = self.run(word, &capabilities()?)?;
        ensure!(!done.status.success(), "{word} succeeds: {done:?}");
        Ok(done.stderr)
    }

    /// What systemctl was asked for so far.
    fn calls(&self) -> String {
        fs::read_to_string(self.directory.join("calls")).unwrap_or_default()
    }

    /// How often containerd was restarted so far.
    fn restarts(&self) -> usize {
        self.calls().lines().filter(|call| call.starts_with("restart ")).count()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = put(self.before.as_deref());
        let _ = fs::remove_dir_all("/etc/containerd/conf.d");
        let _ = fs::remove_dir_all(PROGRAMS);
        let _ = fs::remove_file("/etc/containerd/stasis.restart-pending");
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
        ensure!(stasis["ContainerAnnotations"] == json!(["dev.stasis.*"]), "{stasis:#}");
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
    for &version in versions()? {
        let plugin = if version == 2 { "grpc.v1.cri" } else { "cri.v1.runtime" };
        for imports in ["", IMPORTS] {
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
    node.succeed("copy")?;
    let done = node.run("configure", &capabilities()?)?;
    ensure!(!done.status.success() && done.stderr.contains("nothing was changed"), "{done:?}");
    ensure!(fs::read_to_string(MAIN)? == taken, "{MAIN} is another");
    ensure!(node.restarts() == 0, "containerd was restarted");
    Ok(())
}

/// The newest version of configuration of the lab's containerd, and that of most nodes.
fn versions() -> Result<&'static [u32]> {
    Ok(if is_containerd_1()? { &[2] } else { &[2, 3] })
}

/// A restart that failed, or was never seen to succeed, is made up for.
pub(super) fn restart(case: &Case) -> Result<()> {
    for imports in ["", IMPORTS] {
        let main = format!("version = 2\n{imports}");
        for failure in ["exit 1", "kill -KILL $PPID"] {
            let node = Node::new(case, Some(&main))?;
            let before = dump()?;
            node.succeed("copy")?;
            node.systemctl(failure)?;
            node.fail("configure")?;
            node.fail("ready")?;
            if failure == "exit 1" {
                ensure!(dump()? == before, "a class with which containerd does not start is left");
            }
            node.systemctl(":")?;
            let restarts = node.restarts();
            node.succeed("configure")?;
            ensure!(node.restarts() == restarts + 1, "containerd was not restarted");
            node.succeed("ready")?;
            node.succeed("configure")?;
            ensure!(node.restarts() == restarts + 1, "containerd was restarted for nothing");

            // The same when the class is taken away.
            node.systemctl(failure)?;
            node.fail("remove")?;
            ensure!(Path::new(SHIM).exists(), "containerd knows the class, its shim is removed");
            node.systemctl(":")?;
            let restarts = node.restarts();
            node.succeed("remove")?;
            ensure!(node.restarts() == restarts + 1, "containerd was not restarted");
            ensure!(fs::read_to_string(MAIN)? == main, "{MAIN} is another");
        }
    }
    Ok(())
}

/// A run that is killed while it verifies what it wrote leaves nothing that is trusted unseen.
pub(super) fn interrupted(case: &Case) -> Result<()> {
    for version in versions()? {
        let main = format!("version = {version}\n{IMPORTS}");
        let node = Node::new(case, Some(&main))?;
        let containerd = say("which", &["containerd"])?;
        let containerd = containerd.trim();
        node.succeed("copy")?;
        // While it asks for what is not in force.
        let kill = format!("case $* in *--config*) {KILL_GRANDPARENT} ;; esac");
        node.mock("containerd", &format!("{kill}\nexec {containerd} \"$@\""))?;
        node.fail("configure")?;
        ensure!(!Path::new(DROP_IN).exists(), "{DROP_IN} is in force and was never verified");
        ensure!(fs::read_to_string(MAIN)? == main, "{MAIN} is another");
        node.unmock("containerd")?;
        node.succeed("configure")?;
        node.succeed("ready")?;
        ensure!(node.restarts() == 1, "containerd was not restarted");
        if is_containerd_1()? {
            continue;
        }

        // While it asks for what is.
        node.succeed("remove")?;
        node.succeed("copy")?;
        node.mock(
            "containerd",
            &format!("[ ! -e {DROP_IN} ] || {KILL_GRANDPARENT}\nexec {containerd} \"$@\""),
        )?;
        node.fail("configure")?;
        ensure!(Path::new(DROP_IN).exists(), "it was not killed while it verified");
        node.fail("ready")?;
        ensure!(node.restarts() == 2, "containerd was restarted");
        // The file is one with which containerd would lose a setting.
        node.mock(
            "containerd",
            &format!("{containerd} \"$@\" | if [ -e {DROP_IN} ]; then grep -v ^root; else cat; fi"),
        )?;
        node.succeed("configure")?;
        ensure!(!Path::new(DROP_IN).exists(), "{DROP_IN} is left");
        ensure!(fs::read_to_string(MAIN)?.contains(SHIM), "{MAIN} has no class");
        ensure!(node.restarts() == 3, "containerd was not restarted");
        node.unmock("containerd")?;
        node.succeed("ready")?;
    }
    Ok(())
}

/// A file of ours that containerd cannot read, or that is not the one of now.
pub(super) fn broken(case: &Case) -> Result<()> {
    for version in versions()? {
        let main = format!("version = {version}\n{IMPORTS}");
        for half in ["version = 2\n[plugins.\"io.containerd", "[", "version = 9\n"] {
            let node = Node::new(case, Some(&main))?;
            node.succeed("copy")?;
            fs::create_dir_all("/etc/containerd/conf.d")?;
            fs::write(DROP_IN, half)?;
            node.succeed("configure")?;
            node.succeed("ready")?;
            ensure!(dump()?.contains(SHIM), "containerd has no class");
            ensure!(node.restarts() == 1, "containerd was not restarted");

            // A user's mistake is not blamed on ours.
            put(Some(&format!("{}[", fs::read_to_string(MAIN)?)))?;
            let ours = fs::read(DROP_IN).ok();
            let said = node.fail("configure")?;
            ensure!(said.contains("is not valid"), "{said}");
            ensure!(fs::read(DROP_IN).ok() == ours, "{DROP_IN} is another");
        }

        // With what a former version of this script allowed.
        let node = Node::new(case, Some(&main))?;
        node.succeed("copy")?;
        node.succeed("configure")?;
        let file = if Path::new(DROP_IN).exists() { DROP_IN } else { MAIN };
        let now = fs::read_to_string(file)?;
        fs::write(
            file,
            now.replace("s = [\"dev.stasis.*\"]", "s = [\"dev.stasis.*\", \"x.y/*\"]"),
        )?;
        ensure!(dump()?.contains("x.y/*"), "{file} is not in force");
        node.succeed("configure")?;
        ensure!(fs::read_to_string(file)? == now, "{file} is another");
        ensure!(node.restarts() == 2, "containerd was not restarted");
    }
    if is_containerd_1()? {
        // Left by a newer containerd. This one would lose its class runc by it.
        let node = Node::new(case, Some("version = 2\n"))?;
        node.succeed("copy")?;
        node.succeed("configure")?;
        let text = fs::read_to_string(MAIN)?;
        let start = text.find("[plugins").context("no class")?;
        let end = text.find("[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]");
        let ours = &text[start..end.context("no class runc")?];
        fs::create_dir_all("/etc/containerd/conf.d")?;
        fs::write(DROP_IN, format!("version = 2\n{ours}"))?;
        put(Some(&format!("version = 2\n{IMPORTS}")))?;
        ensure!(!dump()?.contains("runtimes.runc]"), "containerd 1.x merges imported classes");
        node.succeed("configure")?;
        let after = dump()?;
        ensure!(after.contains("runtimes.runc]") && after.contains(SHIM), "{after}");
    }
    Ok(())
}

/// Programs go only when it is known that nothing runs them, and containerd calls them no more.
pub(super) fn removal(case: &Case) -> Result<()> {
    let node = Node::new(case, Some("version = 2\n"))?;
    node.succeed("copy")?;
    node.succeed("configure")?;
    let nsenter = say("which", &["nsenter"])?;
    node.mock(
        "nsenter",
        &format!("case \"$*\" in *' sh '*) exit 1 ;; esac\nexec {} \"$@\"", nsenter.trim()),
    )?;
    let said = node.fail("remove")?;
    ensure!(said.contains("nothing was changed"), "{said}");
    ensure!(Path::new(SHIM).exists(), "{SHIM} was removed");
    node.succeed("ready")?;
    node.unmock("nsenter")?;
    node.succeed("remove")?;
    ensure!(!Path::new(SHIM).exists(), "{SHIM} is left");
    let calls = node.calls();
    let last = calls.lines().last().unwrap_or_default();
    // The restart takes the connection of this exec with it.
    ensure!(last == format!("restart --no-block containerd with {SHIM}"), "{calls}");
    Ok(())
}

/// On some nodes /opt is a link: the kernel names the programs by another path.
pub(super) fn linked(case: &Case) -> Result<()> {
    let node = Node::new(case, Some("version = 2\n"))?;
    let real = node.directory.join("real");
    fs::create_dir_all(&real)?;
    std::os::unix::fs::symlink(&real, node.directory.join("link"))?;
    let prefix = node.directory.join("link/stasis").display().to_string();
    let staged = format!("{}/stage{prefix}", node.directory.display());
    fs::create_dir_all(&staged)?;
    say("cp", &["-a", &format!("{}/stage{PROGRAMS}/bin", node.directory.display()), &staged])?;
    let succeed = |word: &str| {
        let done = node.run_for(&prefix, word, &capabilities()?)?;
        ensure!(done.status.success(), "{word}: {done:?}");
        Ok(done.stdout)
    };
    succeed("copy")?;
    succeed("configure")?;
    let path = format!("{prefix}/bin/containerd-shim-runc-stasis");
    let mut shim = Command::new(&path);
    std::os::unix::process::CommandExt::arg0(&mut shim, "sleep");
    let shim = Daemon::start(shim.arg("100"), &node.directory.join("log"))?;
    let said = succeed("remove")?;
    ensure!(said.contains("the programs stay") && Path::new(&path).exists(), "{said}");
    drop(shim);
    succeed("remove")?;
    ensure!(!Path::new(&path).exists(), "{path} is left");
    Ok(())
}

/// What stands after a mark whose other one is gone is perhaps not ours.
pub(super) fn marks(case: &Case) -> Result<()> {
    let node = Node::new(case, Some("version = 2\n"))?;
    node.succeed("copy")?;
    node.succeed("configure")?;
    let whole = fs::read_to_string(MAIN)?;
    let end = "# END stasis\n";
    let begin = whole.lines().find(|line| line.starts_with("# BEGIN")).context("no mark")?;
    let begin = format!("{begin}\n");
    let user = "[debug]\nlevel = \"warn\"\n";
    for broken in [
        whole.replace(end, ""),
        whole.replace(&begin, ""),
        format!("{whole}{begin}"),
        format!("{end}{whole}"),
    ] {
        // Once with a class that is not up to date, so that both words would change it.
        for broken in [format!("{broken}{user}"), format!("{broken}{user}").replace("/opt/", "/")] {
            put(Some(&broken))?;
            let said = node.fail("remove")?;
            ensure!(said.contains("by hand"), "{said}");
            ensure!(fs::read_to_string(MAIN)? == broken, "{MAIN} is another");
            ensure!(Path::new(SHIM).exists(), "{SHIM} was removed");
            if !broken.contains(SHIM) {
                node.fail("configure")?;
                ensure!(fs::read_to_string(MAIN)? == broken, "{MAIN} is another");
            }
        }
    }
    put(Some(&format!("{whole}{user}")))?;
    node.succeed("remove")?;
    ensure!(fs::read_to_string(MAIN)? == format!("version = 2\n{user}"), "{MAIN} is another");
    Ok(())
}

/// An image without the programs, and a node without them.
pub(super) fn programs(case: &Case) -> Result<()> {
    let node = Node::new(case, Some("version = 2\n"))?;
    let said = node.fail("configure")?;
    ensure!(said.contains(&format!("there is no {SHIM}")), "{said}");
    ensure!(fs::read_to_string(MAIN)? == "version = 2\n", "{MAIN} is another");
    fs::remove_dir_all(node.directory.join("stage/opt"))?;
    let said = node.fail("copy")?;
    ensure!(said.contains("there is no ") && said.contains("stage"), "{said}");
    Ok(())
}
