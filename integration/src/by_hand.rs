//! A shim that is started as containerd starts one, and a task that no containerd knows.
//!
//! For what no client of containerd lets one see: a task that was created and not started, and
//! one that is restored from a directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{CreateTaskRequest, CreateTaskResponse};
use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci::Options;
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::bundle::lay_out;
use crate::case::Case;
use crate::shim::Shim;
use crate::task::{Answer, TaskClient};
use crate::{command, wait};

const LIMIT: Duration = Duration::from_secs(20);

/// A shim with a bundle.
#[derive(Debug)]
pub struct ByHand {
    id: String,
    bundle: PathBuf,
    shim: Shim,
    runc: PathBuf,
    config: PathBuf,
    /// The FIFOs of the container's standard input and output.
    stdio: Vec<(PathBuf, File)>,
    /// The shim's client.
    pub client: TaskClient,
}

impl ByHand {
    /// Starts a shim for a container that containerd knows and that has no task.
    pub fn start(case: &Case, id: &str) -> Result<Self> {
        let bundle = case.path(&format!("by-hand-{id}"));
        lay_out(case.ctr(), id, &bundle)?;
        // containerd makes a pipe for the shim's log; a file can be read afterwards.
        File::create(bundle.join("log"))?;
        let shim = case.shim();
        let (runc, config) = (case.runtime.program(shim), case.runtime.config());
        let namespace = case.ctr().namespace();
        let socket = case.containerd().socket();
        let mut command = case.containerd().shim_command(shim);
        command.args(["-namespace", namespace, "-id", id, "-address"]).arg(&socket);
        command.args(["-publish-binary", "/usr/bin/containerd", "start"]);
        command.env("TTRPC_ADDRESS", format!("{}.ttrpc", socket.display()));
        command.env("GRPC_ADDRESS", &socket).env("NAMESPACE", namespace);
        command.env("MAX_SHIM_VERSION", "2").current_dir(&bundle);
        let answer = command::succeed(&mut command, LIMIT)?;
        let client = TaskClient::at(&address(&answer)?, namespace)?;
        let stdio = Vec::new();
        Ok(Self { id: id.to_owned(), bundle, shim, runc, config, stdio, client })
    }

    /// Gives the container FIFOs, as clients do. Without them it has `/dev/null`, which for a restored
    /// one is the host's, and which CRIU cannot dump.
    pub fn with_stdio(mut self) -> Result<Self> {
        for name in ["stdin", "stdout", "stderr"] {
            let path = self.bundle.join(name);
            mkfifo(&path, Mode::S_IRWXU)?;
            // For writing as well: it opens at once then.
            let file = File::options().read(true).write(true).open(&path)?;
            self.stdio.push((path, file));
        }
        Ok(self)
    }

    /// `Create`; from a checkpoint if one is named.
    pub fn create(&self, checkpoint: Option<&Path>) -> Answer<CreateTaskResponse> {
        let mut request = CreateTaskRequest {
            id: self.id.clone(),
            bundle: self.bundle.display().to_string(),
            checkpoint: checkpoint.map(|path| path.display().to_string()).unwrap_or_default(),
            ..Default::default()
        };
        if let [stdin, stdout, stderr] = &self.stdio[..] {
            let shown = |(path, _): &(PathBuf, File)| path.display().to_string();
            (request.stdin, request.stdout, request.stderr) =
                (shown(stdin), shown(stdout), shown(stderr));
        }
        request.set_options(self.options());
        self.client.create(&request)
    }

    fn options(&self) -> Any {
        let (type_url, value) = match self.shim {
            Shim::Go | Shim::StasisAsV2 => {
                let binary_name = self.runc.display().to_string();
                let options = Options { binary_name, ..Default::default() };
                ("containerd.runc.v1.Options", options.write_to_bytes().unwrap_or_default())
            }
            Shim::Stasis => ("runtimeoptions.v1.Options", config_path(&self.config)),
        };
        Any { type_url: type_url.to_owned(), value, ..Default::default() }
    }

    /// `Shutdown`, after which the shim has to end.
    pub fn end(self) -> Result<()> {
        // Its answer may be lost with the shim.
        let _ = self.client.shutdown(&self.id);
        wait::until("the end of a shim after Shutdown", LIMIT, || {
            Ok(self.client.again().is_err().then_some(()))
        })
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.client.kill(&self.id, "", 9, true);
        let _ = self.client.delete(&self.id, "");
        let _ = self.client.shutdown(&self.id);
        let _ = umount2(&self.bundle.join("rootfs"), MntFlags::MNT_DETACH);
    }
}

/// What a shim printed: a bare address, or a bootstrap in JSON.
fn address(answer: &str) -> Result<String> {
    let answer = answer.trim();
    if answer.starts_with('{') {
        let bootstrap: serde_json::Value = serde_json::from_str(answer)?;
        return bootstrap["address"].as_str().map(str::to_owned).context("no address in it");
    }
    ensure!(answer.starts_with("unix://"), "the shim's start said {answer:?}");
    Ok(answer.to_owned())
}

/// `runtimeoptions.v1.Options` with a `config_path`, field 2, and nothing else.
fn config_path(path: &Path) -> Vec<u8> {
    let path = path.to_string_lossy().into_owned().into_bytes();
    let mut message = vec![2 << 3 | 2];
    let mut length = path.len();
    while length >= 0x80 {
        message.push(u8::try_from(length & 0x7f).unwrap_or_default() | 0x80);
        length >>= 7;
    }
    message.push(u8::try_from(length).unwrap_or_default());
    message.extend(path);
    message
}

/// A container that containerd knows, without a task.
pub fn container(case: &Case, options: &[&str], program: &[&str]) -> Result<String> {
    let id = case.new_id();
    let mut arguments = vec!["containers".to_owned(), "create".to_owned()];
    // What runc is, is said at Create.
    arguments.extend(["--runtime".to_owned(), case.shim().runtime().to_owned()]);
    arguments.extend(options.iter().map(|&option| option.to_owned()));
    arguments.extend([crate::image::NAME.to_owned(), id.clone()]);
    arguments.extend(program.iter().map(|&word| word.to_owned()));
    case.ctr().run(arguments)?;
    Ok(id)
}
