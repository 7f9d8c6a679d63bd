//! CDI specifications for the emulated GPU of a test.
//!
//! They lie where every tool looks for them, so each test has a vendor of its own.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use crate::gpu::{self, Gpu, Node};

/// Where the administrator of a host puts specifications.
const DIRECTORY: &str = "/etc/cdi";

/// What a specification of this kind says: the host's GPUs are its devices, by number.
#[must_use]
pub fn specification(kind: &str, gpu: &Gpu) -> Value {
    let mounts = gpu.binds().map(|(source, destination, writes)| {
        let mode = if writes { "rw" } else { "ro" };
        json!({
            "hostPath": source,
            "containerPath": destination,
            "options": [mode, "nosuid", "rbind", "rprivate"],
        })
    });
    let devices: Vec<_> = (0..gpu.cards())
        .map(|card| {
            json!({
                "name": card.to_string(),
                "containerEdits": { "deviceNodes": [{ "path": Node::of(card).path }] },
            })
        })
        .collect();
    json!({
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": devices,
        "containerEdits": {
            // As NVIDIA's have it, so that no other hook gives the GPU again.
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "mounts": mounts,
        },
    })
}

/// The specification of one test's GPUs. It goes when this is dropped.
#[derive(Debug)]
pub struct Cdi {
    path: PathBuf,
    kind: String,
    contents: Value,
}

impl Cdi {
    /// Writes one with the GPUs that there are, for a test of this name, where every tool finds it.
    pub fn install(name: &str, gpu: &Gpu) -> Result<Self> {
        Self::install_in(Path::new(DIRECTORY), name, gpu)
    }

    /// The same in another directory.
    pub fn install_in(directory: &Path, name: &str, gpu: &Gpu) -> Result<Self> {
        let kind = format!("{name}.test/gpu");
        let contents = specification(&kind, gpu);
        let path = directory.join(format!("{name}.json"));
        fs::create_dir_all(directory)?;
        let cdi = Self { path, kind, contents };
        cdi.write()?;
        Ok(cdi)
    }

    /// The first GPU as tools name it: `--device` of Docker, Podman, nerdctl and ctr.
    #[must_use]
    pub fn device(&self) -> String {
        self.device_of(0)
    }

    /// The same for another.
    #[must_use]
    pub fn device_of(&self, gpu: usize) -> String {
        format!("{}={gpu}", self.kind)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the first card the one whose node on the host is `node`.
    pub fn set_node(&mut self, node: &Path) -> Result<()> {
        let nodes = json!([{ "path": gpu::DEVICE, "hostPath": node }]);
        self.contents["devices"][0]["containerEdits"]["deviceNodes"] = nodes;
        self.write()
    }

    /// Adds a mount, read-only.
    pub fn add_mount(&mut self, host: &Path, container: &str) -> Result<()> {
        let mount =
            json!({"hostPath": host, "containerPath": container, "options": ["ro", "bind"]});
        if let Some(mounts) = self.contents["containerEdits"]["mounts"].as_array_mut() {
            mounts.push(mount);
        }
        self.write()
    }

    fn write(&self) -> Result<()> {
        // Renamed, because other tests' tools read all files of the directory.
        let new = self.path.with_extension("new");
        fs::write(&new, self.contents.to_string())?;
        Ok(fs::rename(new, &self.path)?)
    }
}

impl Drop for Cdi {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
