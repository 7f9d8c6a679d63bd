//! The emulated GPUs of one test.

use std::cell::RefCell;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::image;

/// Where containers find the store.
pub(crate) const INSIDE: &str = "/dev/nvidia-emulated";

/// The first GPU's device node, which is the same on the host and in containers.
pub const DEVICE: &str = "/dev/nvidia0";

/// The numbers of the devices behind the nodes that the lab has, by GPU.
const NUMBERS: [(u64, u64); 2] = [(10, 229), (10, 237)];

/// The first branch of the driver whose libcuda has the checkpoint API.
const CHECKPOINT_API: u32 = 570;

/// The library of older branches, which lies beside the other.
const OLDER: &str = "libstasis_emulated_gpu_550.so";

/// A GPU's device node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its path, on the host and in containers.
    pub path: String,
    /// The device's major number.
    pub major: u64,
    /// Its minor number.
    pub minor: u64,
}

impl Node {
    /// The node of a GPU; the lab has two.
    #[must_use]
    pub fn of(gpu: usize) -> Self {
        let (major, minor) = NUMBERS[gpu];
        Self { path: format!("/dev/nvidia{gpu}"), major, minor }
    }
}

/// Emulated GPUs that no other test uses: one, and another if it is asked for.
#[derive(Debug)]
pub struct Gpu {
    store: PathBuf,
    library: PathBuf,
    /// The GPUs that containers are given.
    given: RefCell<Vec<usize>>,
}

impl Gpu {
    /// Makes one whose device memory lies in `store`; `library` is both libcuda and NVML.
    pub fn new(store: &Path, library: &Path) -> Result<Self> {
        fs::create_dir_all(store)?;
        fs::set_permissions(store, Permissions::from_mode(0o777))?;
        let gpu = Self::behind(store, library);
        gpu.link()?;
        Ok(gpu)
    }

    /// One whose store somebody else makes.
    #[must_use]
    pub fn behind(store: &Path, library: &Path) -> Self {
        let (store, library) = (store.to_owned(), library.to_owned());
        Self { store, library, given: RefCell::new(vec![0]) }
    }

    /// The library that stands for libcuda.so.1 and libnvidia-ml.so.1 of the driver that the host
    /// has now. It is what containers are given.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        if self.branch() < CHECKPOINT_API {
            self.library.with_file_name(OLDER)
        } else {
            self.library.clone()
        }
    }

    /// A path under which the host's programs find that library, whatever the driver.
    #[must_use]
    pub fn host_library(&self) -> PathBuf {
        self.store.with_file_name("libcuda.so.1")
    }

    fn link(&self) -> Result<()> {
        let (link, library) = (self.host_library(), self.library());
        ensure!(library.exists(), "{} is not built", library.display());
        let new = link.with_extension("new");
        let _ = fs::remove_file(&new);
        symlink(library, &new)?;
        Ok(fs::rename(new, link)?)
    }

    /// The directory that stands for the cards' memory.
    #[must_use]
    pub fn store(&self) -> &Path {
        &self.store
    }

    /// Orders faults, a line each, as `checkpoint error:999 count=1`.
    pub fn faults(&self, lines: &[&str]) -> Result<()> {
        let _ = fs::remove_file(self.store.join("faults.count"));
        // Renamed, so that the driver never reads half a file.
        let new = self.store.join(".faults.new");
        fs::write(&new, lines.join("\n") + "\n")?;
        fs::rename(new, self.store.join("faults"))?;
        Ok(())
    }

    /// Takes all faults back.
    pub fn heal(&self) -> Result<()> {
        self.faults(&[])
    }

    /// Sets properties of the machine, `key=value` each; those that are not named stay as they are.
    /// Read when a process opens the driver.
    pub fn configure(&self, lines: &[&str]) -> Result<()> {
        let key = |line: &str| line.split('=').next().unwrap_or_default().trim().to_owned();
        let changed: Vec<_> = lines.iter().map(|line| key(line)).collect();
        let before = self.configuration();
        let kept = before.lines().filter(|line| !changed.contains(&key(line)));
        let text: String = kept.chain(lines.iter().copied()).flat_map(|l| [l, "\n"]).collect();
        // Renamed, so that the driver never reads half a file.
        let new = self.store.join(".config.new");
        fs::write(&new, text)?;
        fs::rename(new, self.store.join("config"))?;
        self.link()
    }

    fn configuration(&self) -> String {
        fs::read_to_string(self.store.join("config")).unwrap_or_default()
    }

    /// What a property has been set to.
    fn property(&self, key: &str) -> Option<String> {
        let configuration = self.configuration();
        let mut pairs = configuration.lines().filter_map(|line| line.split_once('='));
        pairs.find(|pair| pair.0.trim() == key).map(|pair| pair.1.trim().to_owned())
    }

    /// The branch of the driver that the host has now.
    fn branch(&self) -> u32 {
        let version = self.property("driver");
        let branch = version.and_then(|version| version.split('.').next()?.parse().ok());
        // The emulated driver's own default is a newer one.
        branch.unwrap_or(CHECKPOINT_API)
    }

    /// Has the host another version of the driver from now on: what it can do, what its command
    /// `cuda-checkpoint` can do, and which library it is. Containers that run keep theirs.
    pub fn driver(&self, version: &str) -> Result<()> {
        self.configure(&[&format!("driver={version}")])
    }

    /// Has the host that many GPUs from now on, at most as many as there are nodes.
    pub fn count(&self, gpus: usize) -> Result<()> {
        ensure!(gpus <= NUMBERS.len(), "the lab has no device nodes for {gpus} GPUs");
        self.configure(&[&format!("gpus={gpus}")])
    }

    /// How many GPUs the host has.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.property("gpus").and_then(|count| count.parse().ok()).unwrap_or(1)
    }

    /// How many bytes of a GPU are in use, by processes that live or whose end nobody has noticed yet.
    pub fn used(&self, gpu: usize) -> Result<u64> {
        let prefix = format!("mem-{gpu}-");
        let mut used = 0;
        for process in fs::read_dir(&self.store)?.flatten() {
            for allocation in fs::read_dir(process.path()).into_iter().flatten().flatten() {
                if allocation.file_name().to_string_lossy().starts_with(&prefix) {
                    used += allocation.metadata().map_or(0, |metadata| metadata.len());
                }
            }
        }
        Ok(used)
    }

    /// Which GPUs containers are given from now on where no CDI device says it; the first if nobody
    /// does.
    pub fn give(&self, gpus: &[usize]) {
        gpus.clone_into(&mut self.given.borrow_mut());
    }

    /// The nodes of the GPUs that containers are given.
    #[must_use]
    pub fn nodes(&self) -> Vec<Node> {
        self.given.borrow().iter().map(|gpu| Node::of(*gpu)).collect()
    }

    /// The UUID, as NVML writes it, of a GPU that the host has now: the property `uuid-seed` gives
    /// it others.
    #[must_use]
    pub fn uuid(&self, gpu: usize) -> String {
        let seed = self.property("uuid-seed").and_then(|seed| seed.parse().ok()).unwrap_or(0_u64);
        let digits = format!("e05e1a7e{seed:016x}{gpu:08x}");
        let groups = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20]];
        format!("GPU-{}-{}", groups.join("-"), &digits[20..])
    }

    /// What a container gets beside the device nodes: source, destination, and whether it may write.
    #[must_use]
    pub fn binds(&self) -> [(PathBuf, String, bool); 3] {
        let library = |name: &str| format!("{}/{name}", image::LIBRARIES);
        [
            (self.library(), library("libcuda.so.1"), false),
            (self.library(), library("libnvidia-ml.so.1"), false),
            (self.store.clone(), INSIDE.to_owned(), true),
        ]
    }

    /// The flags for the nodes, which are the same for all clients.
    fn devices(&self) -> Vec<String> {
        self.nodes().into_iter().flat_map(|node| ["--device".to_owned(), node.path]).collect()
    }

    /// What `ctr run` needs to give the GPU to a container.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = self.devices();
        for (source, destination, writes) in self.binds() {
            let (source, mode) = (source.display(), if writes { "rw" } else { "ro" });
            let mount = format!("type=bind,src={source},dst={destination},options=rbind:{mode}");
            arguments.extend(["--mount".to_owned(), mount]);
        }
        arguments
    }

    /// What Podman, Docker and nerdctl need for the same.
    #[must_use]
    pub fn volumes(&self) -> Vec<String> {
        let mut arguments = self.devices();
        for (source, destination, writes) in self.binds() {
            let mode = if writes { "rw" } else { "ro" };
            let volume = format!("{}:{destination}:{mode}", source.display());
            arguments.extend(["--volume".to_owned(), volume]);
        }
        arguments
    }

    /// The devices and the mounts that give the GPU to a container of CRI.
    #[must_use]
    pub fn for_cri(&self) -> (Value, Value) {
        let mounts = self.binds().map(|(source, destination, writes)| {
            json!({ "host_path": source, "container_path": destination, "readonly": !writes })
        });
        let devices: Vec<_> = self
            .nodes()
            .into_iter()
            .map(|Node { path, .. }| {
                json!({ "host_path": path, "container_path": path, "permissions": "rw" })
            })
            .collect();
        (json!(devices), json!(mounts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_brings_its_library() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let newer = path("libcuda-of-today.so");
        for library in [&newer, &path(OLDER)] {
            fs::write(library, "").unwrap();
        }
        let gpu = Gpu::new(&path("gpu"), &newer).unwrap();
        let expect = |library: &Path| {
            assert_eq!(gpu.library(), library);
            assert_eq!(fs::read_link(gpu.host_library()).unwrap(), library);
            assert!(gpu.binds().iter().any(|bind| bind.0 == library));
        };
        expect(&newer);
        for (version, library) in [
            ("550.54.15", path(OLDER)),
            ("555.42.02", path(OLDER)),
            ("570.86.10", newer.clone()),
            ("610.43.02", newer.clone()),
        ] {
            gpu.driver(version).unwrap();
            expect(&library);
        }
    }

    #[test]
    fn properties_stay_until_they_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let library = directory.path().join("libcuda.so");
        fs::write(&library, "").unwrap();
        let gpu = Gpu::new(&directory.path().join("gpu"), &library).unwrap();
        assert_eq!((gpu.cards(), gpu.branch()), (1, CHECKPOINT_API));
        gpu.driver("580.159.04").unwrap();
        gpu.count(2).unwrap();
        gpu.configure(&["uuid-seed=5", "gpus=1"]).unwrap();
        assert_eq!(gpu.configuration(), "driver=580.159.04\nuuid-seed=5\ngpus=1\n");
        assert_eq!((gpu.cards(), gpu.branch()), (1, 580));
        assert!(gpu.count(3).is_err(), "there are two nodes");
        assert_eq!(gpu.uuid(1), "GPU-e05e1a7e-0000-0000-0000-000500000001");
        let nodes = |given: &[usize]| {
            gpu.give(given);
            gpu.nodes().into_iter().map(|node| node.path).collect::<Vec<_>>()
        };
        assert_eq!(nodes(&[1, 0]), ["/dev/nvidia1", "/dev/nvidia0"]);
    }
}
