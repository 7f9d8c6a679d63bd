//! The configuration of a containerd with CRI, in the form of the lab's version.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::suite::Suite;

use super::{Class, Settings};

/// What the configuration names.
#[derive(Debug)]
pub(super) struct Places<'a> {
    /// containerd's own directory.
    pub directory: &'a Path,
    /// Where networks are described.
    pub networks: &'a Path,
    /// Where CDI specifications are.
    pub cdi: &'a Path,
    /// Our shim.
    pub shim: &'a Path,
    /// `stasis-runc`, or a script around it.
    pub engine: &'a Path,
}

/// The sections of CRI have different names in containerd 1.x and 2.x.
struct Names {
    version: u8,
    runtime: &'static str,
    /// How the pause image is named.
    sandbox: &'static str,
    registry: &'static str,
    plugin_directory: fn(&str) -> String,
}

fn names(suite: Suite) -> Names {
    match suite {
        Suite::Trixie => Names {
            version: 2,
            runtime: r#"plugins."io.containerd.grpc.v1.cri""#,
            sandbox: "sandbox_image",
            registry: r#"plugins."io.containerd.grpc.v1.cri".registry"#,
            plugin_directory: |path| format!("bin_dir = \"{path}\""),
        },
        Suite::Forky => Names {
            version: 3,
            runtime: r#"plugins."io.containerd.cri.v1.runtime""#,
            sandbox: r#"plugins."io.containerd.cri.v1.images".pinned_images"#,
            registry: r#"plugins."io.containerd.cri.v1.images".registry"#,
            plugin_directory: |path| format!("bin_dirs = [\"{path}\"]"),
        },
    }
}

/// Later versions of 2.2 and 2.3 restore nothing without it, and others do not mind.
const RESTORE: &str = "enable_experimental_restore_via_create = true\n";

/// Where the lab has the project.
const PROJECT: &str = "/stasis";

/// The sample for a lab's containerd, with what is different here: nobody has installed the shim,
/// and there is no systemd.
fn sample(suite: Suite, shim: &Path) -> Result<String> {
    let name = match suite {
        Suite::Trixie => "config-1.x.toml",
        Suite::Forky => "config-2.x.toml",
    };
    let path = Path::new(PROJECT).join("config/containerd").join(name);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let installed = "/usr/local/bin/containerd-shim-runc-stasis";
    let text = replaced(&text, installed, &shim.display().to_string())?;
    replaced(&text, "SystemdCgroup = true", "SystemdCgroup = false")
}

fn replaced(text: &str, from: &str, to: &str) -> Result<String> {
    anyhow::ensure!(text.contains(from), "the sample has no {from:?}");
    Ok(text.replace(from, to))
}

/// `config.toml`. Beside the classes it says what this machine and the tests need: no network but
/// the lab's own, nobody else's directories, and nothing that takes a privilege which is not there.
pub(super) fn write(
    suite: Suite,
    pause: &str,
    places: &Places<'_>,
    settings: &Settings,
) -> Result<String> {
    let Names { version, runtime, sandbox, registry, plugin_directory } = names(suite);
    let directory = places.directory.display();
    let mut text = format!(
        r#"version = {version}
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]

[grpc]
address = "{directory}/containerd.sock"
"#
    );
    let stream = "stream_server_address = \"127.0.0.1\"\nstream_server_port = \"0\"\n";
    let _ = match suite {
        Suite::Trixie => {
            write!(text, "\n[{runtime}]\n{stream}{sandbox} = \"{pause}\"\n")
        }
        Suite::Forky => write!(
            text,
            "\n[plugins.\"io.containerd.grpc.v1.cri\"]\n{stream}\n[{sandbox}]\nsandbox = \"{pause}\"\n\n[{runtime}]\n{RESTORE}"
        ),
    };
    let _ = write!(
        text,
        r#"enable_cdi = true
cdi_spec_dirs = ["{}"]
disable_apparmor = true
disable_hugetlb_controller = true
restrict_oom_score_adj = true

[{runtime}.cni]
{}
conf_dir = "{}"

[{registry}]
config_path = "{directory}/hosts"
"#,
        places.cdi.display(),
        plugin_directory("/usr/lib/cni"),
        places.networks.display(),
    );
    if settings.sample {
        return with_sample(&text, runtime, &sample(suite, places.shim)?);
    }
    for class in Class::ALL {
        text.push_str(&class_section(runtime, class, places, settings));
    }
    Ok(text)
}

/// A configuration with the sample in it. A table may be there once only, so the keys of CRI's that
/// the sample has go there, and those that both have are ours.
fn with_sample(text: &str, runtime: &str, sample: &str) -> Result<String> {
    let head = format!("[{runtime}]\n");
    let (_, classes) = sample.split_once(&head).context("the sample has no table of CRI")?;
    let (_, classes) = classes.split_once("\n[").context("the sample has no class")?;
    Ok(format!("{text}\n[{classes}"))
}

fn class_section(runtime: &str, class: Class, places: &Places<'_>, settings: &Settings) -> String {
    let table = format!("{runtime}.containerd.runtimes.{}", class.handler());
    let keys = match class {
        Class::Go | Class::Engine => "runtime_type = \"io.containerd.runc.v2\"\n".to_owned(),
        Class::Stasis => "runtime_type = \"io.containerd.runc.stasis\"\n".to_owned(),
        Class::StasisPath => format!(
            "runtime_type = \"io.containerd.runc.v2\"\nruntime_path = \"{}\"\n",
            places.shim.display()
        ),
    };
    let options = match class {
        Class::Go | Class::StasisPath => String::new(),
        Class::Engine => format!("BinaryName = \"{}\"\n", places.engine.display()),
        Class::Stasis => settings.options.clone(),
    };
    format!(
        r#"
[{table}]
{keys}pod_annotations = ["dev.stasis.*"]
container_annotations = ["dev.stasis.*"]

[{table}.options]
SystemdCgroup = false
{options}"#
    )
}
