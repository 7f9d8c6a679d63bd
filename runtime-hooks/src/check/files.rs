//! Directories that must be writable, and how GPUs get into containers.

use std::path::{Path, PathBuf};

use super::{Check, Finding, Host};

const STATE: Check = Check { id: "state-directory", title: "state" };
const LOG: Check = Check { id: "log-directory", title: "logs" };
const CDI: Check = Check { id: "cdi", title: "CDI" };

/// Without it nothing is checkpointed: an interrupted operation could not be put right.
pub(super) fn state_directory(host: &dyn Host, directory: &Path) -> Finding {
    match host.writable(directory) {
        Ok(()) => STATE.ok(format!("{} is writable", directory.display())),
        Err(why) => STATE
            .error(format!("{} cannot be written: {why}", directory.display()))
            .remedy("make it writable, or set state.directory in the configuration"),
    }
}

/// Checkpoints work without it, only what CRIU said about one that failed is lost.
pub(super) fn log_directory(host: &dyn Host, directory: &Path) -> Finding {
    match host.writable(directory) {
        Ok(()) => LOG.ok(format!("{} is writable", directory.display())),
        Err(why) => LOG
            .warning(format!("{} cannot be written: {why}", directory.display()))
            .remedy("make it writable, or set log.directory in the configuration"),
    }
}

/// What NVIDIA's legacy hook mounts into a container is not in its config.json, so CRIU finds
/// mounts that nobody told it about and refuses. What CDI adds is.
pub(super) fn cdi(host: &dyn Host, directories: &[PathBuf]) -> Finding {
    let specs = specs(host, directories);
    if let Some(hook) = hook(host) {
        let message = format!(
            "NVIDIA's legacy hook is installed ({hook}); containers that get their GPUs from it \
             cannot be checkpointed. CDI specifications: {}",
            if specs.is_empty() { "none".to_owned() } else { specs.join(", ") }
        );
        return CDI.warning(message).remedy(
            "use CDI: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, then \
             --device nvidia.com/gpu=all",
        );
    }
    if specs.is_empty() {
        let shown: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
        CDI.ok(match shown.as_slice() {
            [] => "not used (cdi.directories is empty), and no legacy hook".to_owned(),
            shown => format!("no specifications in {}, and no legacy hook", shown.join(" or ")),
        })
    } else {
        CDI.ok(specs.join(", "))
    }
}

/// Where the legacy hook is, if it is installed.
fn hook(host: &dyn Host) -> Option<String> {
    const NAME: &str = "oci-nvidia-hook.json";
    for directory in ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"] {
        if host.list(Path::new(directory)).is_ok_and(|names| names.iter().any(|n| n == NAME)) {
            return Some(format!("{directory}/{NAME}"));
        }
    }
    let program = host.find(Path::new("nvidia-container-runtime-hook"))?;
    Some(program.display().to_string())
}

/// Whether one of these is NVIDIA's.
pub(super) fn has_nvidias(host: &dyn Host, directories: &[PathBuf]) -> bool {
    let is_its =
        |file: &String| host.read(Path::new(file)).is_ok_and(|text| text.contains("nvidia.com/"));
    specs(host, directories).iter().any(is_its)
}

/// The files of CDI specifications in these directories.
fn specs(host: &dyn Host, directories: &[PathBuf]) -> Vec<String> {
    let mut all = Vec::new();
    for directory in directories {
        for name in host.list(directory).unwrap_or_default() {
            let extension = Path::new(&name).extension();
            if extension.is_some_and(|e| e == "yaml" || e == "json") {
                all.push(directory.join(&name).display().to_string());
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::super::fake::{Fake, said};
    use super::*;

    #[test]
    fn directories_must_be_writable() {
        let fake = Fake::good();
        assert_eq!(
            said(&state_directory(&fake, Path::new("/run/stasis"))),
            "ok /run/stasis is writable"
        );
        fake.file("/run/stasis", "");
        assert_eq!(
            said(&state_directory(&fake, Path::new("/run/stasis"))),
            "error /run/stasis cannot be written: /run/stasis is not a directory"
        );
        assert_eq!(log_directory(&fake, Path::new("/var/log/stasis")).level, Level::Ok);
        assert_eq!(log_directory(&fake, Path::new("/run/stasis")).level, Level::Warning);
    }

    fn cdi(fake: &Fake) -> Finding {
        super::cdi(fake, &["/etc/cdi".into(), "/var/run/cdi".into()])
    }

    #[test]
    fn the_legacy_hook_is_a_warning() {
        let fake = Fake::good();
        fake.remove("/etc/cdi/nvidia.yaml");
        assert_eq!(
            said(&cdi(&fake)),
            "ok no specifications in /etc/cdi or /var/run/cdi, and no legacy hook"
        );
        assert_eq!(
            said(&super::cdi(&fake, &[])),
            "ok not used (cdi.directories is empty), and no legacy hook"
        );
        fake.file("/etc/cdi/nvidia.yaml", "");
        fake.file("/var/run/cdi/other.json", "");
        fake.file("/var/run/cdi/README", "");
        assert_eq!(said(&cdi(&fake)), "ok /etc/cdi/nvidia.yaml, /var/run/cdi/other.json");

        let fake = fake.program("nvidia-container-runtime-hook");
        let finding = cdi(&fake);
        assert_eq!(finding.level, Level::Warning);
        assert!(finding.message.contains("(/usr/bin/nvidia-container-runtime-hook)"));
        fake.file("/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", "{}");
        assert!(cdi(&fake).message.contains("hooks.d/oci-nvidia-hook.json"));
        assert!(cdi(&fake).remedy.unwrap().starts_with("use CDI"));
    }
}
