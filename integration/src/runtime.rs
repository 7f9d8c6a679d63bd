//! The OCI runtime of one test: a script for `ctr run --runc-binary`, the
//! configuration behind it, and a look at how the real runc is called in the end.

use std::cell::Cell;
use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::gpu::Gpu;
use crate::image::UTILITY;
use crate::shim::Shim;

/// The real one.
const RUNC: &str = "/usr/sbin/runc";

/// What stands between containerd's shim and runc.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Nothing: to compare with.
    Stock,
    /// `stasis-runc`.
    Stasis,
}

/// What a test can change about its runtime. It can be written again at any time: each call of
/// the runtime reads it anew.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What stands between the shim and runc.
    pub engine: Engine,
    /// Table, key and value of `config.toml`, the value as TOML writes it.
    pub config: Vec<(&'static str, &'static str, String)>,
    /// Overrides the emulated libcuda for the helper.
    pub libcuda: Option<PathBuf>,
    /// Shell lines that run before the real runc, with its arguments in `$@`.
    pub before_runc: String,
    /// A directory that comes first in PATH.
    pub path: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            engine: Engine::Stasis,
            config: Vec::new(),
            libcuda: None,
            before_runc: String::new(),
            path: None,
        }
    }
}

impl Settings {
    /// Sets a key of `config.toml`.
    #[must_use]
    pub fn with(mut self, table: &'static str, key: &'static str, value: &str) -> Self {
        self.config.push((table, key, value.to_owned()));
        self
    }

    /// Deadlines of this many seconds for all that the driver does.
    #[must_use]
    pub fn impatient(self, seconds: u32) -> Self {
        let deadline = format!("\"{seconds}s\"");
        self.with("cuda", "init-timeout", &deadline)
            .with("cuda", "lock-timeout", &deadline)
            .with("cuda", "checkpoint-timeout", &deadline)
            .with("cuda", "restore-timeout", &deadline)
    }
}

/// The runtime of one test.
#[derive(Debug)]
pub struct Runtime {
    directory: PathBuf,
    binaries: PathBuf,
    engine: Cell<Engine>,
}

impl Runtime {
    /// One that lies in a directory of the test; `binaries` is where cargo put stasis-runc.
    pub fn new(directory: &Path, binaries: &Path, gpu: &Gpu, settings: &Settings) -> Result<Self> {
        let (directory, binaries) = (directory.to_owned(), binaries.to_owned());
        let runtime = Self { directory, binaries, engine: Cell::new(settings.engine) };
        runtime.set(gpu, settings)?;
        Ok(runtime)
    }

    /// Writes the scripts and the configuration.
    pub fn set(&self, gpu: &Gpu, settings: &Settings) -> Result<()> {
        self.engine.set(settings.engine);
        fs::create_dir_all(&self.directory)?;
        let shown = self.directory.display();
        let binary = self.binaries.join("stasis-runc");
        let library = gpu.host_library();
        let libcuda = settings.libcuda.as_deref().unwrap_or(&library).display();
        let library = library.display();
        let store = gpu.store().display();
        let path = settings
            .path
            .as_ref()
            .map(|path| format!("export PATH={}:$PATH\n", path.display()))
            .unwrap_or_default();
        let next = match settings.engine {
            Engine::Stock => self.inner(),
            Engine::Stasis => binary,
        };

        fs::write(self.config(), self.toml(gpu, settings))?;
        script(
            &self.wrapper(),
            &format!(
                "export STASIS_CONFIG={shown}/config.toml STASIS_LIBCUDA={libcuda} \
                 STASIS_LIBNVML={library} EMULATED_GPU_DIR={store}\n\
                 {path}exec {} \"$@\"\n",
                next.display()
            ),
        )?;
        // One line per call, in one write, so that calls at the same time do not mix.
        script(
            &self.inner(),
            &format!(
                "line=$*\nprintf '%s\\n' \"$line\" >>{shown}/runc-arguments\n{path}{}\nexec {RUNC} \"$@\"\n",
                settings.before_runc
            ),
        )
    }

    fn toml(&self, gpu: &Gpu, settings: &Settings) -> String {
        let library = gpu.host_library();
        let libcuda = settings.libcuda.as_deref().unwrap_or(&library);
        let shown = self.directory.display();
        let text = |value: &str| format!("\"{value}\"");
        let mut keys = vec![
            ("runtime", "path", text(&self.inner().to_string_lossy())),
            ("state", "directory", text(&format!("{shown}/state"))),
            ("log", "directory", text(&format!("{shown}/log"))),
            ("log", "level", text("debug")),
            // Where there is no wrapper to say it in the environment.
            ("cuda", "libcuda", text(&libcuda.to_string_lossy())),
            ("cuda", "libnvml", text(&library.to_string_lossy())),
            ("cuda", "utility", text(&self.binaries.join(UTILITY).to_string_lossy())),
            ("cuda", "init-timeout", text("20s")),
            ("cuda", "lock-timeout", text("20s")),
            ("cuda", "checkpoint-timeout", text("30s")),
            ("cuda", "restore-timeout", text("30s")),
        ];
        for (table, key, value) in &settings.config {
            keys.retain(|(old_table, old_key, _)| (old_table, old_key) != (table, key));
            keys.push((table, key, value.clone()));
        }
        keys.sort_by_key(|(table, _, _)| *table);
        let mut toml = String::new();
        let mut last = "";
        for (table, key, value) in keys {
            if table != last {
                let _ = writeln!(toml, "[{table}]");
                last = table;
            }
            let _ = writeln!(toml, "{key} = {value}");
        }
        toml
    }

    /// The script for `--runc-binary`.
    #[must_use]
    pub fn wrapper(&self) -> PathBuf {
        self.directory.join("runc")
    }

    /// The script that Stasis takes for runc.
    fn inner(&self) -> PathBuf {
        self.directory.join("inner-runc")
    }

    /// What a shim is to take for runc: ours has the engine in itself.
    #[must_use]
    pub fn program(&self, shim: Shim) -> PathBuf {
        match (shim, self.engine.get()) {
            (Shim::Go, Engine::Stasis) => self.wrapper(),
            (Shim::Go, Engine::Stock) | (Shim::Stasis | Shim::StasisAsV2, _) => self.inner(),
        }
    }

    /// The configuration of Stasis.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.directory.join("config.toml")
    }

    /// Where Stasis keeps its journals.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// A call of the runtime as an engine other than containerd's shim makes it.
    #[must_use]
    pub fn command(&self) -> Command {
        Command::new(self.wrapper())
    }

    /// The arguments of each call of the real runc so far.
    pub fn runc_calls(&self) -> Result<Vec<String>> {
        let log = self.directory.join("runc-arguments");
        let text = fs::read_to_string(&log).with_context(|| log.display().to_string())?;
        Ok(text.lines().map(str::to_owned).collect())
    }
}

fn script(path: &Path, body: &str) -> Result<()> {
    // Renamed into place: a script that is being run cannot be written, and a shell reads as it runs.
    let new = path.with_extension("new");
    fs::write(&new, format!("#!/bin/sh\n{body}"))?;
    fs::set_permissions(&new, Permissions::from_mode(0o755))?;
    Ok(fs::rename(new, path)?)
}
