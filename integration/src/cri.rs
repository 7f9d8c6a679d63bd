//! containerd's CRI as the kubelet uses it: runtime classes, pods and their containers, by
//! `crictl`.

mod config;
mod registry;

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use serde_json::{Map, Value, json};

use crate::case::{Case, PORT};
use crate::containerd::{Containerd, Environment};
use crate::suite::Suite;
use crate::{command, leaks, processes, udp, wait};

pub use registry::Registry;

const LIMIT: Duration = Duration::from_secs(60);

/// The namespace in which CRI has its containers.
pub const NAMESPACE: &str = "k8s.io";

/// Where shims listen.
const SOCKETS: &str = "/run/containerd/s";

/// Kubernetes' modes of a namespace.
const NODE: u8 = 2;
const CONTAINER: u8 = 1;
const POD: u8 = 0;

/// A runtime class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// containerd's own shim with runc: to compare with.
    Go,
    /// The same with `stasis-runc` as its `BinaryName`.
    Engine,
    /// Our shim by its own name.
    Stasis,
    /// Our shim by `runtime_path`, under the name of containerd's own.
    StasisPath,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Go, Self::Engine, Self::Stasis, Self::StasisPath];

    /// Those with CUDA.
    pub const OURS: [Self; 3] = [Self::Engine, Self::Stasis, Self::StasisPath];

    /// The name that a pod has to give.
    #[must_use]
    pub fn handler(self) -> &'static str {
        match self {
            Self::Go => "runc",
            Self::Engine => "engine",
            Self::Stasis => "stasis",
            Self::StasisPath => "stasis-v2",
        }
    }

    /// A word for names of tests.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Go => "go",
            Self::Engine => "binary_name",
            Self::Stasis => "own_name",
            Self::StasisPath => "runtime_path",
        }
    }
}

/// What a test can say about its containerd.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// More of the table `options` of [`Class::Stasis`].
    pub options: String,
    /// Whether the classes of ours are those of the sample in config/containerd.
    pub sample: bool,
}

/// A pod to run.
#[derive(Debug, Clone)]
pub struct Sandbox {
    class: Class,
    annotations: Vec<(String, String)>,
    host_network: bool,
    shared_pids: bool,
}

impl Sandbox {
    /// One of this class with a network of its own.
    #[must_use]
    pub fn of(class: Class) -> Self {
        Self { class, annotations: Vec::new(), host_network: false, shared_pids: false }
    }

    /// The same in the node's network.
    #[must_use]
    pub fn on_host_network(mut self) -> Self {
        self.host_network = true;
        self
    }

    /// The same with one PID namespace for all containers.
    #[must_use]
    pub fn with_shared_pids(mut self) -> Self {
        self.shared_pids = true;
        self
    }

    /// The same with an annotation.
    #[must_use]
    pub fn annotated(mut self, name: &str, value: &str) -> Self {
        self.annotations.push((name.to_owned(), value.to_owned()));
        self
    }

    fn namespaces(&self) -> Value {
        json!({ "namespace_options": {
            "network": if self.host_network { NODE } else { POD },
            "pid": if self.shared_pids { POD } else { CONTAINER },
        }})
    }
}

/// A pod that runs.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Its id, which is that of its sandbox.
    pub id: String,
    sandbox: Sandbox,
    /// Its name, which is that of its cgroup, too.
    name: String,
    /// Its configuration, which is asked for again with each container.
    config: PathBuf,
}

/// A container to create.
#[derive(Debug, Clone)]
pub struct Container {
    name: String,
    program: Vec<String>,
    image: Option<String>,
    gpu: bool,
    annotations: Vec<(String, String)>,
    cdi: Vec<String>,
    memory: u64,
}

impl Container {
    /// One that runs this program, with a GPU.
    pub fn new(program: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            name: "test".to_owned(),
            program: program.into_iter().map(Into::into).collect(),
            image: None,
            gpu: true,
            annotations: Vec::new(),
            cdi: Vec::new(),
            memory: 0,
        }
    }

    /// The counter in GPU memory, which prints its counts, with these options.
    #[must_use]
    pub fn counter(options: &[&str]) -> Self {
        Self::new(["/bin/counter", "--stdout"].iter().chain(options).copied())
    }

    /// A container without a GPU that runs a script.
    #[must_use]
    pub fn script(text: &str) -> Self {
        Self { gpu: false, ..Self::new(["/bin/sh", "-c", text]) }
    }

    /// The same without a GPU.
    #[must_use]
    pub fn without_gpu(mut self) -> Self {
        self.gpu = false;
        self
    }

    /// The same with no more memory than these bytes.
    #[must_use]
    pub fn limited(mut self, memory: u64) -> Self {
        self.memory = memory;
        self
    }

    /// The same under another name.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// The same of another image, or of a checkpoint.
    #[must_use]
    pub fn from_image(mut self, image: impl Into<String>) -> Self {
        self.image = Some(image.into());
        self
    }

    /// The same with an annotation of its own.
    #[must_use]
    pub fn annotated(mut self, name: &str, value: &str) -> Self {
        self.annotations.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The same with a device of a CDI specification instead of what the tests know about the GPU.
    #[must_use]
    pub fn with_cdi_device(mut self, device: &str) -> Self {
        self.gpu = false;
        self.cdi.push(device.to_owned());
        self
    }
}

/// A containerd with CRI, for one test.
#[derive(Debug)]
pub struct Cri<'a> {
    case: &'a Case<'a>,
    /// The image that containers are of, if they name none, and pods.
    image: String,
    containerd: Containerd,
    pods: RefCell<Vec<Pod>>,
    files: Cell<u32>,
}

impl<'a> Cri<'a> {
    /// Starts one.
    pub fn start(case: &'a Case<'a>) -> Result<Self> {
        Self::start_with(case, &Settings::default())
    }

    /// Starts one that differs from the usual.
    pub fn start_with(case: &'a Case<'a>, settings: &Settings) -> Result<Self> {
        let registry = Registry::of_all_tests(&case.image_parts())?;
        Self::start_at(case, &registry, settings)
    }

    /// Starts one that knows this registry, and its image of the tests.
    pub fn start_at(
        case: &'a Case<'a>,
        registry: &Arc<Registry>,
        settings: &Settings,
    ) -> Result<Self> {
        let directory = case.path("containerd");
        let (networks, cdi) = (case.path("networks"), case.path("cdi"));
        for folder in [&directory, &networks, &cdi] {
            fs::create_dir_all(folder)?;
        }
        network(&networks)?;
        trust(&directory.join("hosts"), &registry.host())?;
        let shim = case.binary("containerd-shim-runc-stasis");
        let places = config::Places {
            directory: &directory,
            networks: &networks,
            cdi: &cdi,
            shim: &shim,
            engine: &case.runtime.wrapper(),
        };
        let suite = Suite::current()?.context("this runs inside a lab only")?;
        let image = registry.image();
        let config = config::write(suite, &registry.pause(), &places, settings)?;
        let containerd =
            Containerd::configured(&directory, &config, environment(case, &directory, &shim)?)?;
        let (pods, files) = (RefCell::default(), Cell::default());
        let cri = Self { case, image, containerd, pods, files };
        cri.answers()?;
        cri.pull(&registry.pause())?;
        cri.pull(&cri.image)?;
        Ok(cri)
    }

    /// A `crictl` command that is not run yet.
    pub fn crictl(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
        let mut crictl = Command::new("crictl");
        let endpoint = format!("unix://{}", self.containerd.socket().display());
        // None of the machine's; and the usual two seconds are little for a machine that is busy.
        crictl.args(["--config", "/dev/null", "--timeout", "60s"]);
        crictl.args(["--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint]);
        crictl.args(arguments);
        crictl
    }

    /// Runs `crictl`; gives its output.
    pub fn run(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::succeed(&mut self.crictl(arguments), LIMIT)
    }

    /// Runs `crictl` with arguments that have to make it fail; gives its error.
    pub fn fail(&self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<String> {
        command::fail(&mut self.crictl(arguments), LIMIT)
    }

    /// The containerd.
    #[must_use]
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// Ends containerd as a crash would, and starts it again.
    pub fn restart(&self) -> Result<()> {
        self.containerd.restart()?;
        self.answers()
    }

    fn answers(&self) -> Result<()> {
        // It answers before it knows what runs.
        wait::until("an answer of CRI", LIMIT, || Ok(self.run(["pods"]).ok()))
            .map(drop)
            .with_context(|| format!("see {}", self.containerd.log().display()))
    }

    /// The directory of its CDI specifications.
    #[must_use]
    pub fn cdi(&self) -> PathBuf {
        self.case.path("cdi")
    }

    /// `crictl pull`.
    pub fn pull(&self, image: &str) -> Result<()> {
        self.run(["pull", image]).map(drop)
    }

    /// Runs a pod.
    pub fn pod(&self, sandbox: Sandbox) -> Result<Pod> {
        let (name, config) = self.pod_config(&sandbox)?;
        let id = self.run(runp(&sandbox, &config))?.trim().to_owned();
        let pod = Pod { id, sandbox, name, config };
        self.pods.borrow_mut().push(pod.clone());
        Ok(pod)
    }

    /// A pod that has to be refused; gives the error.
    pub fn pod_fails(&self, sandbox: &Sandbox) -> Result<String> {
        let (name, config) = self.pod_config(sandbox)?;
        let error = self.fail(runp(sandbox, &config))?;
        // The kubelet does not run it, and has its cgroup all the same.
        leaks::remove_cgroup(&self.cgroup(&name))?;
        Ok(error)
    }

    fn cgroup(&self, name: &str) -> String {
        format!("{}/{name}", self.case.ctr().namespace())
    }

    fn pod_config(&self, sandbox: &Sandbox) -> Result<(String, PathBuf)> {
        let name = self.case.new_id();
        let annotations: Map<String, Value> = map(&sandbox.annotations);
        let config = self.write(&json!({
            "metadata": { "name": name, "namespace": "default", "uid": name },
            "log_directory": self.case.path("logs"),
            "annotations": annotations,
            "linux": {
                "cgroup_parent": format!("/{}", self.cgroup(&name)),
                "security_context": sandbox.namespaces(),
            },
        }))?;
        Ok((name, config))
    }

    /// Creates a container, which is not started; gives its id.
    pub fn create(&self, pod: &Pod, container: &Container) -> Result<String> {
        let config = self.container_config(pod, container)?;
        let create = [OsStr::new("create"), pod.id.as_ref(), config.as_ref(), pod.config.as_ref()];
        Ok(self.run(create)?.trim().to_owned())
    }

    /// A creation that has to fail; gives the error.
    pub fn create_fails(&self, pod: &Pod, container: &Container) -> Result<String> {
        let config = self.container_config(pod, container)?;
        self.fail([OsStr::new("create"), pod.id.as_ref(), config.as_ref(), pod.config.as_ref()])
    }

    /// Starts a container; gives its id.
    pub fn begin(&self, pod: &Pod, container: &Container) -> Result<String> {
        let id = self.create(pod, container)?;
        self.run(["start", &id])?;
        Ok(id)
    }

    /// Starts a container in a pod of its own.
    pub fn in_pod(&self, sandbox: Sandbox, container: &Container) -> Result<(Pod, String)> {
        let pod = self.pod(sandbox)?;
        let id = self.begin(&pod, container)?;
        Ok((pod, id))
    }

    fn container_config(&self, pod: &Pod, container: &Container) -> Result<PathBuf> {
        let gpu = &self.case.gpu;
        let (devices, mounts) = if container.gpu { gpu.for_cri() } else { (json!([]), json!([])) };
        let image = container.image.as_ref().unwrap_or(&self.image);
        let cdi: Vec<Value> = container.cdi.iter().map(|name| json!({ "name": name })).collect();
        let annotations: Map<String, Value> = map(&container.annotations);
        self.write(&json!({
            "metadata": { "name": container.name },
            "image": { "image": image },
            "command": container.program,
            "devices": devices,
            "mounts": mounts,
            "annotations": annotations,
            "CDI_devices": cdi,
            "log_path": format!("{}-{}.log", pod.name, container.name),
            "linux": {
                "security_context": pod.sandbox.namespaces(),
                "resources": { "memory_limit_in_bytes": container.memory },
            },
        }))
    }

    fn write(&self, config: &Value) -> Result<PathBuf> {
        let number = self.files.get();
        self.files.set(number + 1);
        let path = self.case.path(&format!("cri-{number}.json"));
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// What CRI knows about a container.
    pub fn inspect(&self, id: &str) -> Result<Value> {
        Ok(serde_json::from_str(&self.run(["inspect", "--output", "json", id])?)?)
    }

    /// What CRI knows about a pod.
    pub fn inspect_pod(&self, pod: &Pod) -> Result<Value> {
        Ok(serde_json::from_str(&self.run(["inspectp", "--output", "json", &pod.id])?)?)
    }

    /// A container's state: `CONTAINER_RUNNING` and others.
    pub fn state(&self, id: &str) -> Result<String> {
        let state = self.inspect(id)?["status"]["state"].take();
        state.as_str().map(str::to_owned).context("crictl inspect shows no state")
    }

    /// Waits until a container has ended.
    pub fn wait_exited(&self, id: &str) -> Result<Value> {
        wait::until("the end of a container", Duration::from_secs(10), || {
            let mut known = self.inspect(id)?;
            Ok((known["status"]["state"] == "CONTAINER_EXITED").then(|| known["status"].take()))
        })
    }

    /// A container's init process.
    pub fn pid(&self, id: &str) -> Result<Pid> {
        pid(&self.inspect(id)?)
    }

    /// The process of a pod's sandbox.
    pub fn sandbox_pid(&self, pod: &Pod) -> Result<Pid> {
        pid(&self.inspect_pod(pod)?)
    }

    /// What the counter of a container answers on this port.
    pub fn ask_at(&self, id: &str, port: u16) -> Result<u64> {
        udp::ask(self.pid(id)?, port)
    }

    /// The counter answers with this number.
    pub fn expect(&self, id: &str, number: u64) -> Result<()> {
        self.expect_at(id, PORT, number)
    }

    /// The counter answers with this number on this port.
    pub fn expect_at(&self, id: &str, port: u16, number: u64) -> Result<()> {
        let answer = self.ask_at(id, port)?;
        ensure!(answer == number, "the counter of {id} said {answer} instead of {number}");
        Ok(())
    }

    /// `crictl checkpoint`.
    pub fn checkpoint(&self, id: &str, archive: &Path) -> Result<()> {
        self.run(checkpoint(id, archive)).map(drop)
    }

    /// `crictl checkpoint` that has to fail; gives the error.
    pub fn checkpoint_fails(&self, id: &str, archive: &Path) -> Result<String> {
        self.fail(checkpoint(id, archive))
    }

    /// `crictl logs`.
    pub fn logs(&self, id: &str) -> Result<String> {
        self.run(["logs", id])
    }

    /// `crictl exec --sync`, as a probe of the kubelet; gives the output.
    pub fn exec(&self, id: &str, program: &[&str]) -> Result<String> {
        self.run(["exec", "--sync", id].iter().chain(program))
    }

    /// The bytes that a container uses by its cgroup.
    pub fn memory(&self, id: &str) -> Result<u64> {
        let known = self.run(["stats", "--output", "json", "--id", id])?;
        let known: Value = serde_json::from_str(&known)?;
        let memory = known["stats"][0]["memory"]["workingSetBytes"]["value"].as_str();
        Ok(memory.with_context(|| known.to_string())?.parse()?)
    }

    /// Stops and removes a container.
    pub fn remove(&self, id: &str) -> Result<()> {
        self.run(["stop", "--timeout", "0", id])?;
        self.run(["rm", id])?;
        no_container(id)
    }

    /// Stops and removes a pod with all its containers, and its cgroup, as the kubelet does.
    pub fn remove_pod(&self, pod: &Pod) -> Result<()> {
        let network = self.network_namespace(pod);
        self.run(["stopp", &pod.id])?;
        self.run(["rmp", "--force", &pod.id])?;
        self.pods.borrow_mut().retain(|other| other.id != pod.id);
        no_container(&pod.id)?;
        if let Some(path) = network {
            ensure!(!path.exists(), "the network namespace {} is left", path.display());
        }
        leaks::remove_cgroup(&self.cgroup(&pod.name))
    }

    /// Where the pod's network namespace is, if it has one of its own.
    fn network_namespace(&self, pod: &Pod) -> Option<PathBuf> {
        let known = self.inspect_pod(pod).ok()?;
        let namespaces = known["info"]["runtimeSpec"]["linux"]["namespaces"].as_array()?.clone();
        let network = namespaces.iter().find(|namespace| namespace["type"] == "network")?;
        network["path"].as_str().map(PathBuf::from)
    }

    /// Takes all pods away, and checks that nothing is left of them.
    pub fn finish(self) -> Result<()> {
        for pod in self.pods.take() {
            self.remove_pod(&pod)?;
        }
        let _ = wait::until("the end of the shims", Duration::from_secs(5), || {
            Ok(self.containerd.shims().is_empty().then_some(()))
        });
        let left: Vec<_> = self.containerd.shims().into_iter().map(processes::describe).collect();
        ensure!(left.is_empty(), "shims are left: {left:#?}");
        wait::until("the end of names that lead nowhere", Duration::from_secs(5), || {
            Ok(dangling(SOCKETS).is_empty().then_some(()))
        })
        .with_context(|| format!("{:?} are left", dangling(SOCKETS)))
    }
}

/// Links in a directory to what is not there.
fn dangling(directory: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_symlink() && !path.exists()).collect()
}

impl Drop for Cri<'_> {
    fn drop(&mut self) {
        // After a failure.
        for pod in self.pods.take() {
            let _ = self.remove_pod(&pod);
        }
    }
}

fn runp<'a>(sandbox: &Sandbox, config: &'a Path) -> [&'a OsStr; 4] {
    [OsStr::new("runp"), OsStr::new("--runtime"), sandbox.class.handler().as_ref(), config.as_ref()]
}

fn checkpoint<'a>(id: &'a str, archive: &'a Path) -> [&'a OsStr; 4] {
    [OsStr::new("checkpoint"), OsStr::new("--export"), archive.as_ref(), id.as_ref()]
}

fn map(pairs: &[(String, String)]) -> Map<String, Value> {
    pairs.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect()
}

fn pid(known: &Value) -> Result<Pid> {
    let pid = known["info"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.filter(|&pid| pid > 0).context("crictl shows no pid")?;
    Ok(Pid::from_raw(pid))
}

/// Nothing of a container is left where the shim and runc work.
fn no_container(id: &str) -> Result<()> {
    leaks::processes_and_mounts(id, id)?;
    let state = Path::new("/run/containerd/runc").join(NAMESPACE).join(id);
    ensure!(!state.exists(), "{} is left", state.display());
    Ok(())
}

/// What containerd and its shims find in their environment.
fn environment(case: &Case, directory: &Path, shim: &Path) -> Result<Environment> {
    let path = directory.join("bin");
    fs::create_dir_all(&path)?;
    std::os::unix::fs::symlink(shim, path.join("containerd-shim-runc-stasis"))?;
    let variables = vec![
        ("STASIS_CONFIG", case.runtime.config()),
        ("EMULATED_GPU_DIR", case.gpu.store().to_owned()),
    ];
    Ok(Environment { variables, path: Some(path) })
}

/// Describes the pods' network: a pair of interfaces for each, in a range of its own.
fn network(directory: &Path) -> Result<()> {
    static RANGES: AtomicU8 = AtomicU8::new(1);
    let range = RANGES.fetch_add(1, Ordering::Relaxed);
    let config = json!({
        "cniVersion": "1.0.0",
        "name": format!("test-{range}"),
        "plugins": [{
            "type": "ptp",
            "ipam": {
                "type": "host-local",
                "dataDir": directory.join("addresses"),
                "ranges": [[{ "subnet": format!("10.88.{range}.0/24") }]],
            },
        }],
    });
    Ok(fs::write(directory.join("10-test.conflist"), config.to_string())?)
}

/// CRI takes no registry for one that speaks HTTP unless it is told so.
fn trust(hosts: &Path, host: &str) -> Result<()> {
    let directory = hosts.join(host);
    fs::create_dir_all(&directory)?;
    let text = format!(
        "server = \"http://{host}\"\n\n[host.\"http://{host}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
    );
    Ok(fs::write(directory.join("hosts.toml"), text)?)
}
