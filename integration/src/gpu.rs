//! The emulated GPU of one test.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use crate::image;

/// Where containers find the store.
pub(crate) const INSIDE: &str = "/dev/nvidia-emulated";

/// The device node, which is the same for all of them.
pub const DEVICE: &str = "/dev/nvidia0";

/// The numbers of the device behind it.
pub(crate) const MAJOR: u64 = 10;
pub(crate) const MINOR: u64 = 229;

/// An emulated GPU that no other test uses.
#[derive(Debug)]
pub struct Gpu {
    store: PathBuf,
    library: PathBuf,
}

impl Gpu {
    /// Makes one whose device memory lies in `store`; `library` is both libcuda and NVML.
    pub fn new(store: &Path, library: &Path) -> Result<Self> {
        fs::create_dir_all(store)?;
        fs::set_permissions(store, Permissions::from_mode(0o777))?;
        Ok(Self { store: store.to_owned(), library: library.to_owned() })
    }

    /// One whose store somebody else makes.
    #[must_use]
    pub fn behind(store: &Path, library: &Path) -> Self {
        Self { store: store.to_owned(), library: library.to_owned() }
    }

    /// The library that stands for libcuda.so.1 and libnvidia-ml.so.1.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The directory that stands for the card's memory.
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

    /// Writes the card's properties, `key=value` each. Read when a process opens the driver.
    pub fn configure(&self, lines: &[&str]) -> Result<()> {
        Ok(fs::write(self.store.join("config"), lines.join("\n") + "\n")?)
    }

    /// Has the host another version of the driver from now on.
    pub fn driver(&self, version: &str) -> Result<()> {
        self.configure(&[&format!("driver={version}")])
    }

    /// What a container gets beside the device node: source, destination, and whether it may write.
    #[must_use]
    pub fn binds(&self) -> [(&Path, String, bool); 3] {
        let library = |name: &str| format!("{}/{name}", image::LIBRARIES);
        [
            (&self.library, library("libcuda.so.1"), false),
            (&self.library, library("libnvidia-ml.so.1"), false),
            (&self.store, INSIDE.to_owned(), true),
        ]
    }

    /// What `ctr run` needs to give the GPU to a container.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["--device".to_owned(), DEVICE.to_owned()];
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
        let mut arguments = vec!["--device".to_owned(), DEVICE.to_owned()];
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
        let device = json!({ "host_path": DEVICE, "container_path": DEVICE, "permissions": "rw" });
        (json!([device]), json!(mounts))
    }
}
