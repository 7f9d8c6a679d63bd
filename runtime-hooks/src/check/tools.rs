//! The programs that a checkpoint needs: the runtime, CRIU, and what CRIU calls.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::files::has_nvidias;
use super::version::Version;
use super::{Check, Finding, Host, Level, Output};

const RUNTIME: Check = Check { id: "runtime", title: "runtime" };
const CRIU: Check = Check { id: "criu", title: "CRIU" };
const CRIU_CHECK: Check = Check { id: "criu-check", title: "criu check" };
const CRIU_CONF: Check = Check { id: "criu-conf", title: "criu options" };
const CUDA_PLUGIN: Check = Check { id: "criu-cuda-plugin", title: "cuda_plugin" };
const IPTABLES: Check = Check { id: "iptables-restore", title: "iptables" };
const TAR: Check = Check { id: "tar", title: "tar" };

/// How long a program may take to say its version.
const VERSION_LIMIT: Duration = Duration::from_secs(10);
/// `criu check` loads kernel modules.
const CHECK_LIMIT: Duration = Duration::from_secs(60);

const OLDEST_RUNC: Version = Version::of(1, 1);
/// Below it CRIU lacks what runc asks for; from it on it depends on the kernel.
const OLDEST_CRIU: Version = Version::of(3, 17);
const GOOD_CRIU: Version = Version::of(4, 0);
/// Kernels from here on refuse `getsockopt(SO_PASSCRED)` for internet sockets, which older CRIUs ask
/// for (criu#2705; 4.1.1 seen failing on 6.18).
const SOCKETS_KERNEL: Version = Version::of(6, 16);
/// The first CRIU that does not ask.
const SOCKETS_CRIU: Version = Version::of(4, 2);

const UPDATE_CRIU: &str = "install CRIU 4.2 or later";

/// Runs a program that is asked for one thing, and says what went wrong in a sentence.
fn ask(
    host: &dyn Host,
    program: &Path,
    arguments: &[&str],
    limit: Duration,
) -> Result<Output, String> {
    let line = || format!("{} {}", program.display(), arguments.join(" "));
    match host.run(program, arguments, limit) {
        Ok(output) => Ok(output),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(format!("{} did not end within {} s", line(), limit.as_secs()))
        }
        Err(error) => Err(format!("{} cannot be run: {error}", line())),
    }
}

/// The runtime below us.
pub(super) fn runtime(host: &dyn Host, configured: &Path, cdi: &[PathBuf]) -> Finding {
    const SET: &str = "set runtime.path in the configuration to runc 1.1 or later";
    if configured.file_name().is_some_and(|name| name == "stasis-runc") {
        return RUNTIME.error("runtime.path is stasis-runc, which would call itself").remedy(SET);
    }
    let Some(path) = host.find(configured) else {
        return RUNTIME
            .error(format!("{} was not found", configured.display()))
            .remedy("install runc 1.1 or later, or set runtime.path in the configuration");
    };
    let output = match ask(host, &path, &["--version"], VERSION_LIMIT) {
        Ok(output) => output,
        Err(why) => return RUNTIME.error(why).remedy(SET),
    };
    let path = path.display();
    match runtime_version(&output) {
        Some(Runtime::Runc { version, .. }) if version < OLDEST_RUNC => {
            RUNTIME.error(format!("runc {version} at {path}: older than {OLDEST_RUNC}")).remedy(SET)
        }
        // It edits config.json for create and not for restore.
        Some(Runtime::Runc { version, wrapped: true }) if !has_nvidias(host, cdi) => RUNTIME
            .warning(format!(
                "NVIDIA's wrapper of runc {version} at {path}: what it adds to a container is \
                 taken from CDI at a restore, and cdi.directories have no specification of nvidia.com"
            ))
            .remedy(
                "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, in one of cdi.directories of the \
                 configuration",
            ),
        Some(Runtime::Runc { version, wrapped: true }) => {
            RUNTIME.ok(format!("NVIDIA's wrapper of runc {version} at {path}"))
        }
        Some(Runtime::Runc { version, wrapped: false }) => {
            RUNTIME.ok(format!("runc {version} at {path}"))
        }
        Some(Runtime::Crun { version, criu: true }) => {
            RUNTIME.ok(format!("crun {version} at {path}"))
        }
        Some(Runtime::Crun { version, criu: false }) => RUNTIME
            .error(format!("crun {version} at {path}: built without CRIU"))
            .remedy("install a crun whose --version shows +CRIU, or use runc"),
        None => RUNTIME
            .warning(format!(
                "{path} is neither runc nor crun: {}",
                output.lines().next().unwrap_or("--version prints nothing")
            ))
            .remedy(SET),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Runtime {
    /// `wrapped`: NVIDIA's runtime, which calls it.
    Runc { version: Version, wrapped: bool },
    /// `criu`: it is built with it.
    Crun { version: Version, criu: bool },
}

fn runtime_version(output: &Output) -> Option<Runtime> {
    let version = |prefix: &str| {
        let line = output.stdout.lines().find_map(|line| line.strip_prefix(prefix))?;
        Version::parse(line)
    };
    if !output.success() {
        return None;
    }
    if let Some(version) = version("runc version ") {
        let wrapped = output.stdout.starts_with("NVIDIA Container Runtime");
        return Some(Runtime::Runc { version, wrapped });
    }
    let version = version("crun version ")?;
    let criu = output.stdout.split_whitespace().any(|feature| feature == "+CRIU");
    Some(Runtime::Crun { version, criu })
}

/// CRIU itself.
pub(super) fn criu(host: &dyn Host) -> Finding {
    let Some(path) = host.find(Path::new("criu")) else {
        return CRIU.error("criu was not found in PATH").remedy(UPDATE_CRIU);
    };
    let output = match ask(host, &path, &["--version"], VERSION_LIMIT) {
        Ok(output) => output,
        Err(why) => return CRIU.error(why).remedy(UPDATE_CRIU),
    };
    let path = path.display();
    match criu_version(&output) {
        Some(version) if version < OLDEST_CRIU => {
            CRIU.error(format!("{version} at {path}: older than {OLDEST_CRIU}")).remedy(UPDATE_CRIU)
        }
        Some(version) if version < GOOD_CRIU => CRIU
            .warning(format!(
                "{version} at {path}: older than {GOOD_CRIU}, fails on newer kernels (3.17.1 on \
                 6.18)"
            ))
            .remedy(UPDATE_CRIU),
        Some(version)
            if version < SOCKETS_CRIU
                && Version::parse(&host.kernel())
                    .is_some_and(|kernel| kernel >= SOCKETS_KERNEL) =>
        {
            CRIU.warning(format!(
                "{version} at {path}: on kernels from {SOCKETS_KERNEL} on only CRIU from \
                 {SOCKETS_CRIU} on can dump a process with an internet socket (criu#2705)"
            ))
            .remedy(UPDATE_CRIU)
        }
        Some(version) => CRIU.ok(format!("{version} at {path}")),
        None => CRIU
            .error(format!(
                "{path} does not say its version: {}",
                output.lines().next().unwrap_or("--version prints nothing")
            ))
            .remedy(UPDATE_CRIU),
    }
}

fn criu_version(output: &Output) -> Option<Version> {
    let first = output.stdout.lines().next()?;
    Version::parse(first.strip_prefix("Version: ")?.trim()).filter(|_| output.success())
}

/// What CRIU says about this kernel. `criu`: what was found out about CRIU itself.
pub(super) fn criu_check(host: &dyn Host, criu: &Finding) -> Finding {
    let Some(path) = host.find(Path::new("criu")) else {
        return CRIU_CHECK.error("criu was not found in PATH").remedy(UPDATE_CRIU);
    };
    if host.uid() != 0 {
        return CRIU_CHECK.warning("not run, because it needs root").remedy("run stasis as root");
    }
    let output = match ask(host, &path, &["check"], CHECK_LIMIT) {
        Ok(output) => output,
        Err(why) => return CRIU_CHECK.error(why).remedy(UPDATE_CRIU),
    };
    if output.success() {
        return CRIU_CHECK.ok(match output.lines().filter(|l| l.starts_with("Warn")).count() {
            0 => "looks good".to_owned(),
            1 => "looks good, with 1 warning".to_owned(),
            n => format!("looks good, with {n} warnings"),
        });
    }
    let said = criu_errors(&output);
    let remedy = if said.contains("No parent found for mountpoint") {
        "run stasis on the host itself: its root directory is not a mount point here"
    } else if criu.level == Level::Ok {
        "see https://criu.org/Linux_kernel for what the kernel needs"
    } else {
        "install CRIU 4.2 or later, which knows newer kernels"
    };
    CRIU_CHECK.error(said).remedy(remedy)
}

/// What CRIU complains about, in one line.
fn criu_errors(output: &Output) -> String {
    // The first is where it went wrong, but before it children may have ended with a line each.
    let errors: Vec<_> = output
        .lines()
        .filter_map(|line| line.strip_prefix("Error (")?.split_once("): "))
        .map(|(_, text)| text.trim())
        .filter(|text| !text.starts_with("exited, status="))
        .collect();
    if errors.is_empty() {
        let last = output.lines().map(str::trim).rfind(|line| !line.is_empty());
        last.unwrap_or("criu check failed and says nothing").to_owned()
    } else {
        errors.join("; ")
    }
}

/// An option in CRIU's configuration file for runc.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CriuOption {
    name: String,
    value: String,
}

const CRIU_CONF_FILE: &str = "/etc/criu/runc.conf";

/// The options that win over what Stasis and the callers of a checkpoint ask for.
const OVERRIDING: [&str; 32] = [
    "action-script",
    "auto-dedup",
    "cgroup-root",
    "close",
    "empty-ns",
    "evasive-devices",
    "exec-cmd",
    "ext-unix-sk",
    "external",
    "file-locks",
    "freeze-cgroup",
    "ghost-limit",
    "images-dir",
    "inherit-fd",
    "lazy-pages",
    "leave-running",
    "leave-stopped",
    "libdir",
    "link-remap",
    "log-file",
    "manage-cgroups",
    "page-server",
    "pidfile",
    "prev-images-dir",
    "root",
    "shell-job",
    "skip-in-flight",
    "stream",
    "tcp-close",
    "tcp-established",
    "track-mem",
    "work-dir",
];

/// The options in CRIU's configuration file for runc. None if there is no file.
pub(super) fn criu_options(host: &dyn Host) -> Vec<CriuOption> {
    let text = host.read(Path::new(CRIU_CONF_FILE)).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let line = line.split('#').next()?.trim();
            let end = line.find(|c: char| c.is_whitespace() || c == '=').unwrap_or(line.len());
            let (name, value) = line.split_at(end);
            let name = name.trim_start_matches('-');
            (!name.is_empty()).then(|| CriuOption {
                name: name.to_owned(),
                value: value.trim_start_matches(['=', ' ', '\t']).to_owned(),
            })
        })
        .collect()
}

pub(super) fn criu_conf(options: &[CriuOption]) -> Finding {
    let show = |options: &[&CriuOption]| {
        let all: Vec<_> = options
            .iter()
            .map(|CriuOption { name, value }| format!("{name} {value}").trim_end().to_owned())
            .collect();
        all.join(", ")
    };
    let overriding: Vec<_> =
        options.iter().filter(|o| OVERRIDING.contains(&o.name.as_str())).collect();
    if !overriding.is_empty() {
        return CRIU_CONF
            .warning(format!(
                "{CRIU_CONF_FILE} overrides what is asked for: {}",
                show(&overriding)
            ))
            .remedy(format!("remove them from {CRIU_CONF_FILE}; [criu] in the configuration of Stasis has the useful ones"));
    }
    if options.is_empty() {
        return CRIU_CONF.ok(format!("nothing in {CRIU_CONF_FILE}"));
    }
    CRIU_CONF.ok(format!("{CRIU_CONF_FILE} has {}", show(&options.iter().collect::<Vec<_>>())))
}

/// Nice to know only: Stasis keeps it out of its own checkpoints.
pub(super) fn cuda_plugin(host: &dyn Host) -> Finding {
    const DIRECTORIES: [&str; 6] = [
        "/usr/lib/criu",
        "/usr/lib64/criu",
        "/usr/local/lib/criu",
        "/usr/local/lib64/criu",
        "/usr/lib/x86_64-linux-gnu/criu",
        "/usr/lib/aarch64-linux-gnu/criu",
    ];
    const NAME: &str = "cuda_plugin.so";
    let found: Option<PathBuf> = DIRECTORIES
        .iter()
        .find(|dir| host.list(Path::new(dir)).is_ok_and(|names| names.iter().any(|n| n == NAME)))
        .map(|dir| Path::new(dir).join(NAME));
    CUDA_PLUGIN.ok(match found {
        Some(path) => format!("{}: installed, Stasis keeps it out", path.display()),
        None => "not installed, and not needed".to_owned(),
    })
}

/// CRIU locks a container's network with it.
pub(super) fn iptables(host: &dyn Host, options: &[CriuOption]) -> Finding {
    if let Some(path) = host.find(Path::new("iptables-restore")) {
        return IPTABLES.ok(path.display().to_string());
    }
    let lock = options.iter().rev().find(|option| option.name == "network-lock");
    if let Some(lock) = lock.filter(|lock| lock.value == "nftables" || lock.value == "skip") {
        return IPTABLES.ok(format!(
            "iptables-restore was not found, and not needed: network-lock {} in {CRIU_CONF_FILE}",
            lock.value
        ));
    }
    IPTABLES
        .error("iptables-restore was not found in PATH; CRIU locks the network with it")
        .remedy("install iptables")
}

/// CRIU packs what is in a tmpfs with it, with options that only GNU tar has.
pub(super) fn tar(host: &dyn Host) -> Finding {
    const REMEDY: &str = "install GNU tar";
    let Some(path) = host.find(Path::new("tar")) else {
        return TAR.error("tar was not found in PATH").remedy(REMEDY);
    };
    let output = match ask(host, &path, &["--version"], VERSION_LIMIT) {
        Ok(output) => output,
        Err(why) => return TAR.error(why).remedy(REMEDY),
    };
    // Only the first line: a copyright or a help text may name GNU as well.
    match output.lines().next() {
        Some(first) if first.starts_with("tar (GNU tar) ") => TAR.ok(first),
        first => TAR
            .error(format!(
                "{} is not GNU tar ({}), so a container with files in a tmpfs cannot be dumped",
                path.display(),
                first.unwrap_or("--version prints nothing")
            ))
            .remedy(REMEDY),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::fake::{Fake, said};
    use super::*;

    /// runc 1.1.15 of Debian 13.
    pub(in super::super) const RUNC: &str = "runc version 1.1.15+ds1\n\
        commit: 1.1.15+ds1-2+b4\nspec: 1.2.0\ngo: go1.24.4\nlibseccomp: 2.6.0\n";

    /// crun 1.8.1 of Debian 12.
    const CRUN: &str = "crun version 1.8.1\n\
        commit: f8a096be060b22ccd3d5f3ebe44108517fbf6c30\nrundir: /run/crun\nspec: 1.0.0\n\
        +SYSTEMD +SELINUX +APPARMOR +CAP +SECCOMP +EBPF +YAJL\n";

    /// `criu check` of CRIU 3.17.1 on kernel 6.18.
    const CHECK_VDSO: &str = "\
Error (criu/util.c:642): exited, status=1
Error (criu/util.c:642): exited, status=1
Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds
Error (criu/vdso.c:613): vdso: Failed to fill self vdso symtable
Error (criu/kerndat.c:1615): kerndat_vdso_fill_symtable failed when initializing kerndat.
Error (criu/crtools.c:260): Could not initialize kernel features detection.
";

    /// `criu check` of CRIU 4.1.1 in a chroot.
    const CHECK_CHROOT: &str =
        "Error (criu/mount.c:381): mnt: No parent found for mountpoint 109 (@./run)\n";

    fn runtime_of(stdout: &str) -> String {
        let fake = Fake::empty().command("runc --version", 0, stdout, "");
        said(&runtime(&fake, Path::new("runc"), &["/etc/cdi".into()]))
    }

    #[test]
    fn the_runtime_is_runc_or_a_crun_with_criu() {
        assert_eq!(runtime_of(RUNC), "ok runc 1.1.15 at /usr/bin/runc");
        assert_eq!(
            runtime_of("runc version 1.0.0-rc93\nspec: 1.0.2-dev\n"),
            "error runc 1.0 at /usr/bin/runc: older than 1.1"
        );
        assert_eq!(runtime_of(CRUN), "error crun 1.8.1 at /usr/bin/runc: built without CRIU");
        assert_eq!(
            runtime_of(&CRUN.replace("+YAJL", "+CRIU +YAJL")),
            "ok crun 1.8.1 at /usr/bin/runc"
        );
        let wrapped = format!("NVIDIA Container Runtime version 1.17.8\nspec: 1.2.1\n\n{RUNC}");
        assert_eq!(
            runtime_of(&wrapped),
            "warning NVIDIA's wrapper of runc 1.1.15 at /usr/bin/runc: what it adds to a container \
             is taken from CDI at a restore, and cdi.directories have no specification of nvidia.com"
        );
        let fake = Fake::empty().command("runc --version", 0, &wrapped, "");
        fake.file("/etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n");
        assert_eq!(
            said(&runtime(&fake, Path::new("runc"), &["/etc/cdi".into()])),
            "ok NVIDIA's wrapper of runc 1.1.15 at /usr/bin/runc"
        );
        assert_eq!(
            runtime_of("youki version 0.5.5\n"),
            "warning /usr/bin/runc is neither runc nor crun: youki version 0.5.5"
        );
        assert_eq!(
            runtime_of(""),
            "warning /usr/bin/runc is neither runc nor crun: --version prints nothing"
        );
    }

    #[test]
    fn the_runtime_must_be_there_and_answer() {
        let of = |fake: &Fake, path: &str| said(&runtime(fake, Path::new(path), &[]));
        assert_eq!(of(&Fake::empty(), "runc"), "error runc was not found");
        assert_eq!(of(&Fake::empty(), "/opt/runc"), "error /opt/runc was not found");
        assert_eq!(
            of(&Fake::good(), "/usr/local/bin/stasis-runc"),
            "error runtime.path is stasis-runc, which would call itself"
        );
        let hangs = Fake::empty().answer("runc --version", Err(io::ErrorKind::TimedOut));
        assert_eq!(of(&hangs, "runc"), "error /usr/bin/runc --version did not end within 10 s");
        let broken = Fake::empty().answer("runc --version", Err(io::ErrorKind::PermissionDenied));
        assert_eq!(
            of(&broken, "/usr/bin/runc"),
            "error /usr/bin/runc --version cannot be run: permission denied"
        );
        let fails = Fake::empty().command("runc --version", 1, RUNC, "");
        assert!(of(&fails, "runc").starts_with("warning "));
    }

    #[test]
    fn sockets_need_a_newer_criu_on_newer_kernels() {
        let of = |kernel: &str, version: &str| {
            let mut host = Fake::empty().command("criu --version", 0, version, "");
            host.kernel = kernel.to_owned();
            said(&criu(&host))
        };
        assert_eq!(of("6.15.9", "Version: 4.1.1\n"), "ok 4.1.1 at /usr/bin/criu");
        assert_eq!(of("6.16.0", "Version: 4.2.1\n"), "ok 4.2.1 at /usr/bin/criu");
        assert!(of("6.16.0", "Version: 4.1.1\n").starts_with("warning 4.1.1 "));
    }

    #[test]
    fn criu_must_be_new_enough() {
        let of = |stdout: &str| {
            let mut host = Fake::empty().command("criu --version", 0, stdout, "");
            host.kernel = "6.12.0".to_owned();
            said(&criu(&host))
        };
        assert_eq!(of("Version: 4.1.1\n"), "ok 4.1.1 at /usr/bin/criu");
        assert_eq!(of("Version: 4.2\nGitID: v4.2-15-gdeadbee\n"), "ok 4.2 at /usr/bin/criu");
        assert_eq!(of("Version: 4.0\n"), "ok 4.0 at /usr/bin/criu");
        assert_eq!(
            of("Version: 3.17.1\n"),
            "warning 3.17.1 at /usr/bin/criu: older than 4.0, fails on newer kernels (3.17.1 on \
             6.18)"
        );
        assert_eq!(of("Version: 3.16.1\n"), "error 3.16.1 at /usr/bin/criu: older than 3.17");
        assert_eq!(of("x\n"), "error /usr/bin/criu does not say its version: x");
        assert_eq!(
            of(""),
            "error /usr/bin/criu does not say its version: --version prints nothing"
        );
        assert_eq!(said(&criu(&Fake::empty())), "error criu was not found in PATH");
    }

    fn check_of(version: &str, status: i32, stdout: &str, stderr: &str) -> Finding {
        let fake = Fake::empty().command("criu --version", 0, version, "").command(
            "criu check",
            status,
            stdout,
            stderr,
        );
        criu_check(&fake, &criu(&fake))
    }

    #[test]
    fn criu_check_is_believed() {
        let new = "Version: 4.2\n";
        let old = "Version: 3.17.1\n";
        assert_eq!(said(&check_of(new, 0, "Looks good.\n", "")), "ok looks good");
        let warn = "Warn  (criu/autofs.c:99): Failed to find pipe_ino option (old kernel?)\n";
        assert_eq!(said(&check_of(new, 0, "Looks good.\n", warn)), "ok looks good, with 1 warning");

        let finding = check_of(old, 1, "", CHECK_VDSO);
        assert_eq!(
            said(&finding),
            "error vdso: Unexpected rt vDSO area bounds; vdso: Failed to fill self vdso symtable; \
             kerndat_vdso_fill_symtable failed when initializing kerndat.; Could not initialize \
             kernel features detection."
        );
        assert!(finding.remedy.unwrap().starts_with("install CRIU 4.2"));

        let finding = check_of(new, 1, "", CHECK_CHROOT);
        assert_eq!(said(&finding), "error mnt: No parent found for mountpoint 109 (@./run)");
        assert!(finding.remedy.unwrap().contains("on the host itself"));

        let finding = check_of(new, 1, "", &format!("{warn}Does not look good.\n"));
        assert_eq!(said(&finding), "error Does not look good.");
        assert!(finding.remedy.unwrap().contains("criu.org/Linux_kernel"));
        assert_eq!(said(&check_of(new, 1, "", "")), "error criu check failed and says nothing");
    }

    #[test]
    fn criu_check_needs_criu_and_root() {
        let of = |fake: &Fake| said(&criu_check(fake, &criu(fake)));
        assert_eq!(of(&Fake::empty()), "error criu was not found in PATH");
        let user = Fake { uid: 1000, ..Fake::good() };
        assert_eq!(of(&user), "warning not run, because it needs root");
        let hangs = Fake::good().answer("criu check", Err(io::ErrorKind::TimedOut));
        assert_eq!(of(&hangs), "error /usr/bin/criu check did not end within 60 s");
    }

    #[test]
    fn options_for_criu_that_override_are_listed() {
        let fake = Fake::empty();
        let of = |fake: &Fake| said(&criu_conf(&criu_options(fake)));
        assert_eq!(of(&fake), "ok nothing in /etc/criu/runc.conf");
        fake.file("/etc/criu/runc.conf", "# tcp-established\n\n  # x\n");
        assert_eq!(of(&fake), "ok nothing in /etc/criu/runc.conf");
        fake.file("/etc/criu/runc.conf", "network-lock nftables\nv4 # much\n");
        assert_eq!(of(&fake), "ok /etc/criu/runc.conf has network-lock nftables, v4");
        fake.file(
            "/etc/criu/runc.conf",
            "tcp-established\nv4\n--ghost-limit=2M\n\tlibdir\t/x y \n",
        );
        assert_eq!(
            of(&fake),
            "warning /etc/criu/runc.conf overrides what is asked for: tcp-established, \
             ghost-limit 2M, libdir /x y"
        );
    }

    #[test]
    fn the_plugin_is_only_named() {
        let fake = Fake::empty();
        assert_eq!(said(&cuda_plugin(&fake)), "ok not installed, and not needed");
        fake.file("/usr/lib/criu/amdgpu_plugin.so", "");
        assert_eq!(said(&cuda_plugin(&fake)), "ok not installed, and not needed");
        fake.file("/usr/lib/criu/cuda_plugin.so", "");
        assert_eq!(
            said(&cuda_plugin(&fake)),
            "ok /usr/lib/criu/cuda_plugin.so: installed, Stasis keeps it out"
        );
    }

    #[test]
    fn the_network_must_be_lockable() {
        let of = |fake: &Fake| said(&iptables(fake, &criu_options(fake)));
        assert_eq!(of(&Fake::good()), "ok /usr/bin/iptables-restore");
        let fake = Fake::empty();
        assert!(of(&fake).starts_with("error iptables-restore was not found"));
        fake.file("/etc/criu/runc.conf", "network-lock iptables\n");
        assert!(of(&fake).starts_with("error "));
        fake.file("/etc/criu/runc.conf", "network-lock iptables\nnetwork-lock skip\n");
        assert!(of(&fake).starts_with("ok "));
    }

    #[test]
    fn tar_must_be_gnu_tar() {
        let of = |status, stdout: &str, stderr: &str| {
            said(&tar(&Fake::empty().command("tar --version", status, stdout, stderr)))
        };
        assert_eq!(
            of(0, "tar (GNU tar) 1.34\nCopyright (C) 2021 Free Software Foundation, Inc.\n", ""),
            "ok tar (GNU tar) 1.34"
        );
        assert_eq!(
            of(0, "tar (busybox) 1.37.0\n", ""),
            "error /usr/bin/tar is not GNU tar (tar (busybox) 1.37.0), so a container with files \
             in a tmpfs cannot be dumped"
        );
        assert!(of(0, "bsdtar 3.7.4 - libarchive 3.7.4 zlib/1.3.1\n", "").starts_with("error "));
        assert!(of(1, "", "tar: unrecognized option: version\n").starts_with("error "));
        assert_eq!(said(&tar(&Fake::empty())), "error tar was not found in PATH");
    }
}
