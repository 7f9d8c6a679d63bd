//! Containerds that know the tests' image, and what each finds in its environment.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use nix::unistd::Pid;

use crate::containerd::{Containerd, Environment};
use crate::ctr::Ctr;
use crate::docker::Dockerd;
use crate::{processes, wait};

/// Which shim a containerd finds under the name `containerd-shim-runc-v2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// containerd's own.
    Go,
    /// Ours, which is there under its own name, too.
    Ours,
}

/// One containerd with the image.
#[derive(Debug)]
pub struct Site {
    kind: Kind,
    directory: PathBuf,
    archive: PathBuf,
    gpu_library: PathBuf,
    /// Before containerd, so that it ends first.
    docker: Mutex<Option<Arc<Dockerd>>>,
    containerd: Containerd,
    ctr: Ctr,
}

impl Site {
    /// Starts one in a directory.
    pub fn start(
        directory: &Path,
        kind: Kind,
        binaries: &Path,
        namespace: &str,
        archive: &Path,
    ) -> Result<Self> {
        fs::create_dir_all(directory)?;
        let environment = match kind {
            Kind::Go => Environment::default(),
            Kind::Ours => ours(directory, binaries)?,
        };
        let containerd = Containerd::start(&directory.join("containerd"), environment)?;
        let ctr = Ctr::new(&containerd.socket(), namespace);
        ctr.import(archive)?;
        Ok(Self {
            kind,
            directory: directory.to_owned(),
            archive: archive.to_owned(),
            gpu_library: binaries.join("libstasis_emulated_gpu.so"),
            docker: Mutex::default(),
            containerd,
            ctr,
        })
    }

    /// The client of this containerd.
    #[must_use]
    pub fn ctr(&self) -> &Ctr {
        &self.ctr
    }

    /// The daemon.
    #[must_use]
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// The library that stands for the driver's.
    #[must_use]
    pub fn gpu_library(&self) -> &Path {
        &self.gpu_library
    }

    /// The Docker on top of it, started when it is first asked for.
    pub fn docker(&self) -> Result<Arc<Dockerd>> {
        let mut docker = self.docker.lock().map_err(|_| anyhow!("a test panicked"))?;
        if let Some(docker) = &*docker {
            return Ok(Arc::clone(docker));
        }
        let started = Arc::new(Dockerd::start(self, &self.archive)?);
        *docker = Some(Arc::clone(&started));
        Ok(started)
    }

    /// Where it lies.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes a test's directory the one that this containerd's shims are configured by.
    ///
    /// A shim has its containerd's environment, so what differs from test to test has to be behind
    /// a path that does not.
    pub fn serve(&self, case: &Path) -> Result<()> {
        let link = self.case_link();
        let new = link.with_extension("new");
        let _ = fs::remove_file(&new);
        symlink(case, &new)?;
        Ok(fs::rename(new, link)?)
    }

    /// The path behind which the directory of the test that runs now is found.
    #[must_use]
    pub fn case_link(&self) -> PathBuf {
        case_link(&self.directory)
    }

    /// All shims end by themselves once their containers are gone.
    pub fn expect_no_shims(&self) -> Result<()> {
        let _ = wait::until("the end of the shims", Duration::from_secs(5), || {
            Ok(self.started().is_empty().then_some(()))
        });
        let left: Vec<_> = self.started().into_iter().map(processes::describe).collect();
        ensure!(left.is_empty(), "shims or what they started are left: {left:#?}");
        Ok(())
    }

    /// The shims, and what has their environment.
    fn started(&self) -> Vec<Pid> {
        let mut started = self.containerd.shims();
        if self.kind == Kind::Ours {
            let environment = self.case_link();
            started.extend(processes::with_environment(&environment.to_string_lossy()));
            started.retain(|&pid| !processes::runs(pid, "containerd"));
        }
        started
    }
}

fn case_link(directory: &Path) -> PathBuf {
    directory.join("case")
}

/// The environment in which our shim is found, under both names, and finds the test's
/// configuration and GPU.
fn ours(directory: &Path, binaries: &Path) -> Result<Environment> {
    let path = directory.join("bin");
    fs::create_dir_all(&path)?;
    let shim = binaries.join("containerd-shim-runc-stasis");
    for name in ["containerd-shim-runc-stasis", "containerd-shim-runc-v2"] {
        symlink(&shim, path.join(name))?;
    }
    let case = case_link(directory);
    let variables = vec![
        ("STASIS_CONFIG", case.join("runtime/config.toml")),
        ("EMULATED_GPU_DIR", case.join("gpu")),
    ];
    Ok(Environment { variables, path: Some(path) })
}

/// Containerds of which a test has one for itself, started when there is none to spare.
#[derive(Debug)]
pub struct Pool {
    directory: PathBuf,
    binaries: PathBuf,
    namespace: String,
    archive: PathBuf,
    idle: Mutex<(Vec<Arc<Site>>, usize)>,
}

impl Pool {
    /// An empty one.
    #[must_use]
    pub fn new(directory: &Path, binaries: &Path, namespace: &str, archive: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            binaries: binaries.to_owned(),
            namespace: namespace.to_owned(),
            archive: archive.to_owned(),
            idle: Mutex::default(),
        }
    }

    /// Takes one out.
    pub fn take(&self, kind: Kind) -> Result<Arc<Site>> {
        let number = {
            let mut idle = self.idle.lock().map_err(|_| anyhow!("a test panicked"))?;
            let (sites, started) = &mut *idle;
            if let Some(at) = sites.iter().position(|site| site.kind == kind) {
                return Ok(sites.swap_remove(at));
            }
            *started += 1;
            *started
        };
        let directory = self.directory.join(number.to_string());
        Site::start(&directory, kind, &self.binaries, &self.namespace, &self.archive).map(Arc::new)
    }

    /// Puts one back.
    pub fn give(&self, site: Arc<Site>) {
        if let Ok(mut idle) = self.idle.lock() {
            idle.0.push(site);
        }
    }
}
