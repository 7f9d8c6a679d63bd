//! Docker: a daemon on a containerd of the tests, and the command line that people type.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::case::Case;
use crate::command::Finished;
use crate::gpu::Gpu;
use crate::site::Site;
use crate::{cdi, command, image, leaks, udp, wait};

const LIMIT: Duration = Duration::from_secs(60);

/// `stasis-runc` under containerd's own shim: `runtimes.NAME.path`.
pub const STASIS_RUNC: &str = "stasis-runc";
/// Our shim by its name: `runtimes.NAME.runtimeType`.
pub const BY_NAME: &str = "stasis";
/// Our shim by the path of its binary.
pub const BY_PATH: &str = "stasis-by-path";
/// Our shim by its name, with a configuration of its own: see [`Dockerd::own_configuration`].
pub const CONFIGURED: &str = "stasis-configured";
/// Whatever containerd finds as `containerd-shim-runc-v2`, with options.
pub const EXACT: &str = "exact";
/// The same without options.
pub const BARE: &str = "bare";
/// Docker's default.
pub const DEFAULT: &str = "runc";

/// The emulated GPU's name in CDI.
pub const CDI_DEVICE: &str = "emulated.test/gpu=0";

/// A running dockerd with its own data, socket and configuration.
///
/// What differs from test to test lies behind the containerd's link to the test's directory, so
/// one daemon serves all tests of its containerd, one at a time.
#[derive(Debug)]
pub struct Dockerd {
    child: Mutex<Child>,
    directory: PathBuf,
    link: PathBuf,
}

impl Dockerd {
    /// Starts one on a containerd, waits until it answers, and loads the image.
    pub fn start(site: &Site, archive: &Path) -> Result<Self> {
        let directory = site.directory().join("docker");
        let link = site.case_link();
        fs::create_dir_all(directory.join("cdi"))?;
        fs::write(directory.join("daemon.json"), daemon_json(site, &directory).to_string())?;
        fs::write(directory.join("cdi/emulated.json"), specification(site).to_string())?;
        let child = Mutex::new(spawn(&directory)?);
        let dockerd = Self { child, directory, link };
        dockerd.answers()?;
        dockerd.run([OsStr::new("load"), OsStr::new("--input"), archive.as_os_str()])?;
        Ok(dockerd)
    }

    fn answers(&self) -> Result<()> {
        wait::until("an answer of dockerd", Duration::from_secs(30), || {
            let answer = command::run(&mut self.command(["version"]), LIMIT)?;
            Ok(answer.status.success().then_some(()))
        })
        .with_context(|| format!("see {}", self.log().display()))
    }

    /// Ends it as an upgrade would, and starts it again; its containers live on.
    pub fn restart(&self) -> Result<()> {
        let mut child = self.child.lock().map_err(|_| anyhow!("a test panicked"))?;
        end(&mut child)?;
        *child = spawn(&self.directory)?;
        drop(child);
        self.answers()
    }

    /// A `docker` command that is not run yet.
    pub fn command(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        let mut command = Command::new("docker");
        command.arg("--host").arg(format!("unix://{}", self.socket().display()));
        command.args(arguments);
        command
    }

    /// Runs `docker` with these arguments; gives its output.
    pub fn run(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::succeed(&mut self.command(arguments), LIMIT)
    }

    /// Runs `docker` with arguments that have to make it fail; gives its error.
    pub fn fail(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::fail(&mut self.command(arguments), LIMIT)
    }

    /// The file that the runtime [`CONFIGURED`] names: a test writes it before it uses it.
    #[must_use]
    pub fn own_configuration(&self) -> PathBuf {
        own_configuration(&self.link)
    }

    /// Where the checkpoints of a container are.
    #[must_use]
    pub fn checkpoints(&self, id: &str) -> PathBuf {
        self.directory.join("data/containers").join(id).join("checkpoints")
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("docker.sock")
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.directory.join("dockerd.log")
    }

    /// Checks that no container and no mount of one is left.
    fn expect_empty(&self) -> Result<()> {
        let left = self.run(["ps", "--all"])?;
        ensure!(left.lines().count() == 1, "containers are left: {left}");
        let shown = self.directory.to_string_lossy();
        let left = || -> Result<Vec<String>> {
            let mounts = fs::read_to_string("/proc/self/mountinfo")?;
            // `default` is the host's network, which stays mounted once it was used.
            let of_container = |line: &&str| {
                line.contains(&*shown)
                    && (line.contains("/merged ")
                        || line.contains("/netns/")
                        || line.contains("/shm "))
                    && !line.contains("/netns/default ")
            };
            Ok(mounts.lines().filter(of_container).map(str::to_owned).collect())
        };
        let _ = wait::until("unmounts", LIMIT / 20, || Ok(left()?.is_empty().then_some(())));
        let left = left()?;
        ensure!(left.is_empty(), "mounts of containers are left: {left:#?}");
        Ok(())
    }
}

impl Drop for Dockerd {
    fn drop(&mut self) {
        if let Ok(child) = self.child.get_mut() {
            let _ = end(child);
        }
    }
}

/// The errors in CRIU's log, which runc names in its own.
fn criu_errors(error: &str) -> String {
    let path = error.split_once("path= ").and_then(|(_, rest)| rest.split_whitespace().next());
    let log = path.and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("Error")).collect();
    errors.join("\n")
}

fn own_configuration(link: &Path) -> PathBuf {
    link.join("own-config.toml")
}

/// Containers live on without the daemon, which changes nothing else.
fn daemon_json(site: &Site, directory: &Path) -> Value {
    let (link, namespace) = (site.case_link(), site.ctr().namespace());
    json!({
        "experimental": true,
        "iptables": false,
        "ip6tables": false,
        "bridge": "none",
        "storage-driver": "overlay2",
        "containerd": site.containerd().socket(),
        "cgroup-parent": format!("/{namespace}"),
        "live-restore": true,
        "features": { "cdi": true },
        "cdi-spec-dirs": [directory.join("cdi")],
        "runtimes": {
            STASIS_RUNC: { "path": link.join("runtime/runc") },
            BY_NAME: { "runtimeType": "io.containerd.runc.stasis" },
            BY_PATH: { "runtimeType": site.directory().join("bin/containerd-shim-runc-stasis") },
            CONFIGURED: {
                "runtimeType": "io.containerd.runc.stasis",
                "options": { "ConfigPath": own_configuration(&link) },
            },
            EXACT: {
                "runtimeType": "io.containerd.runc.v2",
                "options": { "BinaryName": "runc" },
            },
            BARE: { "runtimeType": "io.containerd.runc.v2" },
        },
    })
}

/// The emulated GPU of whichever test has the containerd.
fn specification(site: &Site) -> Value {
    let gpu = Gpu::behind(&site.case_link().join("gpu"), site.gpu_library());
    let (kind, _) = CDI_DEVICE.split_once('=').unwrap_or_default();
    cdi::specification(kind, &gpu)
}

fn spawn(directory: &Path) -> Result<Child> {
    let log = File::options().create(true).append(true).open(directory.join("dockerd.log"))?;
    let mut dockerd = Command::new("dockerd");
    dockerd.arg("--config-file").arg(directory.join("daemon.json"));
    dockerd.arg("--data-root").arg(directory.join("data"));
    dockerd.arg("--exec-root").arg(directory.join("exec"));
    dockerd.arg("--pidfile").arg(directory.join("docker.pid"));
    dockerd.arg("--host").arg(format!("unix://{}", directory.join("docker.sock").display()));
    dockerd.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    dockerd.spawn().context("dockerd does not start")
}

fn end(child: &mut Child) -> Result<()> {
    if let Ok(pid) = i32::try_from(child.id()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    let ended =
        wait::until("the end of dockerd", Duration::from_secs(15), || Ok(child.try_wait()?));
    if ended.is_err() {
        child.kill()?;
        child.wait()?;
    }
    ended.map(drop)
}

/// A container's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// Of its own, with nothing but loopback.
    Private,
    /// The lab's.
    Host,
    /// What the flags say.
    ByFlags,
}

impl Network {
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Private => &["--network", "none"],
            Self::Host => &["--network", "host"],
            Self::ByFlags => &[],
        }
    }
}

/// A container that Docker knows.
#[derive(Debug, Clone)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Docker's number for it.
    pub id: String,
    /// Its counter's port.
    pub port: u16,
}

/// What to start.
#[derive(Debug, Clone)]
pub struct Start<'a> {
    /// The runtime, as daemon.json calls it.
    pub runtime: &'a str,
    /// The network.
    pub network: Network,
    /// More flags for `docker run`.
    pub flags: Vec<String>,
    /// Program and arguments.
    pub program: Vec<String>,
    /// Whether the program is told its port.
    pub counts: bool,
}

impl<'a> Start<'a> {
    /// A program without a GPU.
    #[must_use]
    pub fn plain(runtime: &'a str, network: Network, program: &[&str]) -> Self {
        let program = program.iter().map(|&word| word.to_owned()).collect();
        Self { runtime, network, flags: Vec::new(), program, counts: false }
    }

    /// A counter that prints, on the GPU that these flags give it.
    #[must_use]
    pub fn counter(runtime: &'a str, network: Network, flags: Vec<String>) -> Self {
        let start = Self::plain(runtime, network, &["/bin/counter", "--stdout"]);
        Self { flags, counts: true, ..start }
    }

    /// The same with more arguments for the program.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.program.extend(arguments.iter().map(|&word| word.to_owned()));
        self
    }
}

/// `docker` for one test's containers.
#[derive(Debug)]
pub struct Docker<'a> {
    case: &'a Case<'a>,
    dockerd: Arc<Dockerd>,
    containers: RefCell<Vec<Container>>,
    all_is_well: bool,
}

impl<'a> Docker<'a> {
    /// Runs a test, and cleans up after it.
    pub fn test(case: &'a Case<'a>, body: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let dockerd = case.site().docker()?;
        let mut docker = Self { case, dockerd, containers: RefCell::default(), all_is_well: false };
        body(&docker)?;
        docker.finish()?;
        docker.all_is_well = true;
        Ok(())
    }

    /// The test.
    #[must_use]
    pub fn case(&self) -> &Case<'a> {
        self.case
    }

    /// The daemon.
    #[must_use]
    pub fn daemon(&self) -> &Dockerd {
        &self.dockerd
    }

    /// The flags by which a container gets the test's GPU without CDI.
    #[must_use]
    pub fn gpu(&self) -> Vec<String> {
        self.case.gpu.volumes()
    }

    /// `docker VERB` of what makes a container, which is cleaned up in the end.
    fn make(&self, verb: &[&str], start: &Start<'_>) -> Result<Container> {
        /// The host's ports are shared by all tests.
        static PORTS: AtomicU16 = AtomicU16::new(20_000);
        let mut containers = self.containers.borrow_mut();
        let name = format!("{}-{}", self.case.name(), containers.len() + 1);
        let port = PORTS.fetch_add(1, Ordering::Relaxed);
        let mut command = self.dockerd.command(verb);
        command.args(["--name", &name, "--runtime", start.runtime]);
        command
            .args(start.network.flags())
            .args(&start.flags)
            .arg(image::NAME)
            .args(&start.program);
        if start.counts {
            command.args(["--port", &port.to_string()]);
        }
        let made = command::succeed(&mut command, LIMIT);
        // One that did not start is there all the same.
        let id = self.dockerd.run(["inspect", "--format", "{{.Id}}", &name]).unwrap_or_default();
        let container = Container { name, id: id.trim().to_owned(), port };
        containers.push(container.clone());
        made.map(|_| container)
    }

    /// `docker run --detach`.
    pub fn start(&self, start: &Start<'_>) -> Result<Container> {
        self.make(&["run", "--detach"], start)
    }

    /// `docker create`.
    pub fn create(&self, start: &Start<'_>) -> Result<Container> {
        self.make(&["create"], start)
    }

    /// What `docker inspect` says about this part of a container.
    pub fn inspect(&self, container: &Container, part: &str) -> Result<String> {
        let format = format!("{{{{{part}}}}}");
        let said = self.dockerd.run(["inspect", "--format", &format, &container.name])?;
        Ok(said.trim().to_owned())
    }

    /// The container has this status.
    pub fn expect_status(&self, container: &Container, status: &str) -> Result<()> {
        let found = self.inspect(container, ".State.Status")?;
        ensure!(found == status, "{} is {found} instead of {status}", container.name);
        Ok(())
    }

    /// Waits until a container has this status.
    pub fn wait_for(&self, container: &Container, status: &str) -> Result<()> {
        wait::until(&format!("{} {status}", container.name), Duration::from_secs(10), || {
            Ok((self.inspect(container, ".State.Status")? == status).then_some(()))
        })
    }

    /// The init process.
    pub fn pid(&self, container: &Container) -> Result<Pid> {
        let pid: i32 = self.inspect(container, ".State.Pid")?.parse()?;
        ensure!(pid > 0, "{} does not run", container.name);
        Ok(Pid::from_raw(pid))
    }

    /// What the counter answers.
    pub fn ask(&self, container: &Container) -> Result<u64> {
        udp::ask(self.pid(container)?, container.port)
    }

    /// The counter answers with this number.
    pub fn expect(&self, container: &Container, number: u64) -> Result<()> {
        let answer = self.ask(container)?;
        let name = &container.name;
        ensure!(answer == number, "the counter of {name} said {answer} instead of {number}");
        Ok(())
    }

    /// `docker checkpoint create`, without --leave-running.
    pub fn checkpoint(&self, container: &Container, checkpoint: &str) -> Result<()> {
        self.dump(container, checkpoint, &[])
    }

    /// CRIU gives up after 10 s when the freezer of version 1 of cgroups does not come to rest, as on a
    /// machine that has much to do; the container runs on then.
    fn dump(&self, container: &Container, checkpoint: &str, flags: &[&str]) -> Result<()> {
        let name = container.name.as_str();
        let create = [&["checkpoint", "create"], flags, &[name, checkpoint]].concat();
        for _ in 0..2 {
            let Err(error) = self.dockerd.run(&create) else { return Ok(()) };
            // Its log goes with the container.
            let said = criu_errors(&format!("{error:#}"));
            if !said.contains("Unable to freeze cgroup") {
                return Err(if said.is_empty() { error } else { error.context(said) });
            }
            eprintln!("{name}: its checkpoint is tried again: {said}");
        }
        self.dockerd.run(&create).map(drop)
    }

    /// `docker checkpoint create --leave-running`.
    pub fn checkpoint_running(&self, container: &Container, checkpoint: &str) -> Result<()> {
        self.dump(container, checkpoint, &["--leave-running"])
    }

    /// `docker start --checkpoint`.
    pub fn restore(&self, container: &Container, checkpoint: &str) -> Result<()> {
        self.dockerd.run(["start", "--checkpoint", checkpoint, &container.name]).map(drop)
    }

    /// `docker checkpoint ls`: the names.
    pub fn checkpoints(&self, container: &Container) -> Result<Vec<String>> {
        let list = self.dockerd.run(["checkpoint", "ls", &container.name])?;
        Ok(list.lines().skip(1).map(|line| line.trim().to_owned()).collect())
    }

    /// `docker kill`, and the end of the container.
    pub fn kill(&self, container: &Container) -> Result<()> {
        self.dockerd.run(["kill", &container.name])?;
        self.wait_for(container, "exited")
    }

    /// `docker logs`: the standard output.
    pub fn logs(&self, container: &Container) -> Result<String> {
        self.dockerd.run(["logs", &container.name])
    }

    /// The log becomes exactly this; it is written a moment after what it tells.
    pub fn expect_logs(&self, container: &Container, expected: &str) -> Result<()> {
        let mut last = String::new();
        let found = wait::until("the log", Duration::from_secs(5), || {
            last = self.logs(container)?;
            Ok((last == expected).then_some(()))
        });
        match found {
            Ok(()) => Ok(()),
            Err(_) => bail!("the log is {last:?} instead of {expected:?}"),
        }
    }

    /// Any `docker` command, whether it succeeds or not.
    pub fn try_run(&self, arguments: &[&str]) -> Result<Finished> {
        command::run(&mut self.dockerd.command(arguments), LIMIT)
    }

    /// Takes a container away.
    pub fn remove(&self, container: &Container) -> Result<()> {
        self.dockerd.run(["rm", "--force", "--volumes", &container.name])?;
        leaks::container(self.case.ctr().namespace(), &container.id)
    }

    fn finish(&self) -> Result<()> {
        for container in self.containers.borrow().iter() {
            self.remove(container)?;
        }
        self.dockerd.expect_empty()
    }
}

impl Drop for Docker<'_> {
    fn drop(&mut self) {
        if self.all_is_well {
            return;
        }
        // Among what is kept of a failed test.
        let _ = fs::copy(self.dockerd.log(), self.case.path("dockerd.log"));
        for container in self.containers.borrow().iter() {
            let _ = self.remove(container);
        }
    }
}
