//! What a restored container is given of a GPU.
//!
//! NVIDIA's runtime edits config.json for `create` and not for `restore`, and `ctr containers
//! restore` takes the config.json of the host that made the image, with the paths of that host's
//! driver. So before `runc restore` the new config.json is completed, from this host's CDI
//! specifications and for devices that the container itself asks for ([`entitled`]).
//!
//! The image and its manifest give nothing. The manifest says what to look for ([`lack`]); what
//! the container may not have by its own config.json is missing then, and the restore is refused.

mod edits;
mod entitled;
mod lack;
mod name;
mod nodes;
mod numbers;
mod registry;
mod specification;
mod yaml;

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;
use serde::Deserialize as _;
use serde_json::Value;
use stasis_config::{Config, Manifest};

use entitled::Claims;
use lack::Lack;
use numbers::Numbers;
use registry::{Found, Registry};

use crate::config_json::ConfigFile;
use crate::error::{Cause, chain};
use crate::processes::{ProcessId, start_time};
use crate::restore::NewContainer;

/// Why a container cannot be given what it needs.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// A part of config.json is not what the OCI runtime specification says.
    #[error("{0} in config.json is no list")]
    Shape(String),
    /// config.json as a whole is not.
    #[error("config.json is not what the OCI runtime specification says")]
    Spec(#[from] serde_json::Error),
    /// A device cannot be given.
    #[error("CDI device {device} of {}: {reason}", file.display())]
    Device {
        /// Its full name.
        device: String,
        /// The specification.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A device node in the restored container.
    #[error("{0}")]
    Node(String),
}

impl CdiError {
    fn of(found: Found<'_>, reason: String) -> Self {
        let file = found.specification.path.clone();
        Self::Device { device: found.name().to_string(), file, reason }
    }
}

/// The bundle of a container that is being restored.
#[derive(Debug)]
pub struct Bundle {
    directory: PathBuf,
    specifications: Vec<PathBuf>,
    visible_devices: bool,
    /// As it was before it was completed.
    original: Option<ConfigFile>,
}

impl Bundle {
    /// One in a directory, on a host with this configuration.
    #[must_use]
    pub fn new(directory: &Path, config: &Config) -> Self {
        Self {
            directory: directory.to_owned(),
            specifications: config.cdi.directories.clone(),
            visible_devices: config.visible_devices(),
            original: None,
        }
    }

    /// Completes config.json, as far as the container may have it.
    fn complete(&mut self, image: &Path, manifest: &Manifest) -> Result<Spec, Cause> {
        let (file, value) = ConfigFile::read(&self.directory)?;
        let spec = parse(&value)?;
        let lack = Lack::of(manifest, &spec, &self.directory);
        if lack.is_nothing() {
            return Ok(spec);
        }
        let registry = Registry::scan(&self.specifications);
        let mut claims = Claims::of(&spec, &registry, self.visible_devices);
        let mut completed = value.clone();
        let mut devices = Vec::new();
        for entitled in &claims.entitled {
            // All of a device or nothing of it. One that is broken hurts only if it is needed.
            let mut with = completed.clone();
            match edits::apply(&mut with, &self.directory, &lack, entitled) {
                Ok(()) => {
                    completed = with;
                    devices.push(entitled.found.name().to_string());
                }
                Err(error) => claims.in_vain.push(chain(&error)),
            }
        }
        let spec = parse(&completed)?;
        let lack = Lack::of(manifest, &spec, &self.directory);
        if !lack.works() {
            let reason = self.refusal(&lack, &devices, &claims, &registry);
            return Err(Cause::Needs { path: image.to_owned(), reason });
        }
        let shared = lack.stale_for_all();
        if !shared.is_empty() {
            tracing::warn!(
                nodes = shared.join(", "),
                "config.json gives device nodes other numbers than they have on this host, and no CDI \
                 device that would put them right"
            );
        }
        for reason in &claims.in_vain {
            tracing::warn!(reason, "a CDI device cannot be had, and is not needed");
        }
        if completed != value {
            // Before: a write that fails may have taken place.
            self.original.insert(file).write(&completed)?;
            tracing::info!(?devices, "config.json was completed from this host's CDI");
        }
        Ok(spec)
    }

    /// What is missing, and how the container could be given it.
    fn refusal(
        &self,
        lack: &Lack,
        devices: &[String],
        claims: &Claims<'_>,
        registry: &Registry,
    ) -> String {
        let mut parts = vec![lack.words()];
        if claims.entitled.is_empty() {
            parts.push("it asks for no CDI device of this host that would".to_owned());
        } else if !devices.is_empty() {
            parts.push(format!("this host's CDI gives no more by {}", devices.join(", ")));
        }
        parts.extend(claims.in_vain.iter().take(3).cloned());
        if claims.in_vain.is_empty() && !registry.broken.is_empty() {
            parts.push(registry.complaints());
        }
        parts.push(entitled::ways(self.visible_devices));
        parts.join("; ")
    }
}

impl NewContainer for Bundle {
    fn complete(&mut self, image: &Path, manifest: &Manifest) -> Result<Spec, Cause> {
        self.complete(image, manifest)
    }

    fn put_back(&mut self) {
        if let Some(file) = self.original.take()
            && let Err(error) = file.put_back()
        {
            tracing::error!(error = %chain(&error), "config.json stays as it was completed");
        }
    }

    fn make_nodes(&self, init: ProcessId, spec: &Spec) -> Result<(), Cause> {
        let root = File::open(format!("/proc/{}/root", init.pid)).map_err(|_| Cause::Gone)?;
        // The pid may have become another process's before it was opened, not after.
        if start_time(init.pid) != Some(init.start_time) {
            return Err(Cause::Gone);
        }
        nodes::repair(root.as_fd(), spec).map_err(|error| CdiError::Node(chain(&error)).into())
    }
}

/// Whether a device of a config.json is the GPU with this number on this host, under whatever path.
pub(crate) fn node_of_card(spec: &Spec, path: &str, minor: u32) -> bool {
    let linux = spec.linux().as_ref();
    let devices = linux.and_then(|linux| linux.devices().as_deref()).unwrap_or_default();
    let device = devices.iter().find(|device| device.path() == Path::new(path));
    let host = Numbers::at(Path::new(&format!("/dev/nvidia{minor}")));
    device.is_some_and(|device| host == Ok(Numbers::of_spec(device)))
}

fn parse(value: &Value) -> Result<Spec, CdiError> {
    Ok(Spec::deserialize(value)?)
}

#[cfg(test)]
mod tests;
