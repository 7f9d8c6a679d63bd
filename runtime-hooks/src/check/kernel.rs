//! What the kernel and its settings allow.

use std::path::Path;
use std::time::Duration;

use super::version::Version;
use super::{Check, Finding, Host};

const ROOT: Check = Check { id: "root", title: "root" };
const KERNEL: Check = Check { id: "kernel", title: "kernel" };
const PTRACE: Check = Check { id: "ptrace", title: "ptrace" };
const HUGE_PAGES: Check = Check { id: "transparent-huge-pages", title: "huge pages" };

/// `pidfd_open`, by which a process is held on to although its pid may be used again.
const PIDFD: Version = Version::of(5, 3);

/// The namespaces that containers have.
const NAMESPACES: [&str; 5] = ["ipc", "mnt", "net", "pid", "uts"];

pub(super) fn root(host: &dyn Host) -> Finding {
    match host.uid() {
        0 => ROOT.ok("effective user id 0"),
        uid => ROOT
            .error(format!("effective user id {uid}: CRIU and the driver need root"))
            .remedy("run stasis, and the container engine, as root"),
    }
}

/// `criu_is_good`: `criu check` ran well, which says more than any configuration file.
pub(super) fn kernel(host: &dyn Host, criu_is_good: bool) -> Finding {
    let release = host.kernel();
    if Version::parse(&release).is_none_or(|version| version < PIDFD) {
        return KERNEL
            .error(format!("{release}: pidfd_open is missing"))
            .remedy(format!("use a kernel from {PIDFD}"));
    }
    let namespaces = host.list(Path::new("/proc/self/ns")).unwrap_or_default();
    let missing: Vec<_> =
        NAMESPACES.into_iter().filter(|name| !namespaces.iter().any(|n| n == name)).collect();
    if !missing.is_empty() {
        return KERNEL
            .error(format!("{release}: these namespaces are missing: {}", missing.join(", ")))
            .remedy("use a kernel that is built with namespaces, and mount /proc");
    }
    if criu_is_good {
        return KERNEL.ok(format!("{release}: criu check is content"));
    }
    match checkpoint_restore(host, &release) {
        Some((true, from)) => KERNEL.ok(format!("{release}: CONFIG_CHECKPOINT_RESTORE=y ({from})")),
        Some((false, from)) => KERNEL
            .error(format!("{release}: CONFIG_CHECKPOINT_RESTORE is off ({from})"))
            .remedy("use a kernel that is built with CONFIG_CHECKPOINT_RESTORE"),
        None => KERNEL
            .warning(format!("{release}: nothing says whether it can checkpoint processes"))
            .remedy("get criu check to run: see below"),
    }
}

/// Whether the kernel is built with `CONFIG_CHECKPOINT_RESTORE`, and what says so.
fn checkpoint_restore(host: &dyn Host, release: &str) -> Option<(bool, String)> {
    const CONFIG_GZ: &str = "/proc/config.gz";
    // The sysctl is built in with the option.
    if host.read(Path::new("/proc/sys/kernel/ns_last_pid")).is_ok() {
        return Some((true, "/proc/sys/kernel/ns_last_pid".to_owned()));
    }
    let unpacked = host
        .find(Path::new("zcat"))
        .filter(|_| host.list(Path::new("/proc")).is_ok_and(|n| n.iter().any(|n| n == "config.gz")))
        .and_then(|zcat| host.run(&zcat, &[CONFIG_GZ], Duration::from_secs(10)).ok())
        .filter(super::Output::success);
    if let Some(on) = unpacked.and_then(|output| built_in(&output.stdout)) {
        return Some((on, CONFIG_GZ.to_owned()));
    }
    // In the release there may be a slash only if someone wants us to read elsewhere.
    let file = format!("/boot/config-{}", release.replace('/', ""));
    let text = host.read(Path::new(&file)).ok()?;
    Some((built_in(&text)?, file))
}

/// What a kernel configuration says; `None` if the text is not one.
fn built_in(config: &str) -> Option<bool> {
    if config.lines().any(|line| line == "CONFIG_CHECKPOINT_RESTORE=y") {
        return Some(true);
    }
    config.contains("CONFIG_").then_some(false)
}

/// Threads of a paused container are held by ptrace while the driver works, and CRIU itself is a
/// debugger.
pub(super) fn ptrace(host: &dyn Host) -> Finding {
    let Ok(scope) = host.read(Path::new("/proc/sys/kernel/yama/ptrace_scope")) else {
        return PTRACE.ok("not restricted");
    };
    match scope.trim() {
        "0" | "1" | "2" => PTRACE.ok(format!("allowed for root (yama {})", scope.trim())),
        "3" => PTRACE.error("kernel.yama.ptrace_scope is 3: nobody may use ptrace").remedy(
            "set kernel.yama.ptrace_scope to 2 or less at boot; it cannot be lowered later",
        ),
        other => PTRACE
            .warning(format!("kernel.yama.ptrace_scope is `{other}`, which is unknown"))
            .remedy("set kernel.yama.ptrace_scope to 0, 1 or 2"),
    }
}

/// The driver copies GPU memory into one anonymous mapping that it touches for the first time.
pub(super) fn huge_pages(host: &dyn Host) -> Finding {
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    const REMEDY: &str = "echo always > /sys/kernel/mm/transparent_hugepage/enabled";
    match host.read(Path::new(FILE)).as_deref().map(selected) {
        Ok(Some("always")) => HUGE_PAGES.ok("always"),
        Ok(Some("madvise")) => HUGE_PAGES
            .ok("madvise: always is quicker (8 GiB on an H200 with driver 580: CUDA checkpoint \
                 3.0 to 3.6 s instead of 4.3 to 5.4 s, dump 4.3 to 4.9 s instead of 5.4 s, \
                 restore 4.0 to 4.2 s instead of 5.4 s)")
            .remedy(REMEDY),
        Ok(Some("never")) => HUGE_PAGES
            .warning("never: checkpoints and restores of large GPU memory take longer")
            .remedy(REMEDY),
        Ok(other) => HUGE_PAGES
            .warning(format!("{FILE} says {}", other.unwrap_or("nothing that is known")))
            .remedy(REMEDY),
        Err(_) => HUGE_PAGES
            .warning(
                "the kernel has none: checkpoints and restores of large GPU memory take longer",
            )
            .remedy("use a kernel that is built with CONFIG_TRANSPARENT_HUGEPAGE"),
    }
}

/// The word in brackets.
fn selected(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::super::fake::{Fake, said};
    use super::*;

    #[test]
    fn only_root_can() {
        assert_eq!(root(&Fake::good()).level, Level::Ok);
        let finding = root(&Fake { uid: 1000, ..Fake::good() });
        assert_eq!(finding.level, Level::Error);
        assert!(finding.message.contains("1000"));
    }

    #[test]
    fn the_kernel_must_be_new_enough() {
        let of = |kernel: &str| kernel_of(&Fake { kernel: kernel.into(), ..Fake::good() });
        assert_eq!(of("6.18.44-fc-v657"), "ok 6.18.44-fc-v657: criu check is content");
        assert_eq!(of("5.3.0"), "ok 5.3.0: criu check is content");
        assert_eq!(
            of("4.18.0-553.el8.x86_64"),
            "error 4.18.0-553.el8.x86_64: pidfd_open is missing"
        );
        assert_eq!(of(""), "error : pidfd_open is missing");
    }

    fn kernel_of(fake: &Fake) -> String {
        said(&kernel(fake, true))
    }

    #[test]
    fn namespaces_must_be_there() {
        let fake = Fake::good();
        fake.remove("/proc/self/ns/pid");
        fake.remove("/proc/self/ns/net");
        let want = "error 6.18.44: these namespaces are missing: net, pid";
        assert_eq!(said(&kernel(&fake, true)), want);
    }

    #[test]
    fn without_criu_the_configuration_is_asked() {
        let fake = Fake::good();
        let of = |fake: &Fake| said(&kernel(fake, false));
        assert_eq!(
            of(&fake),
            "ok 6.18.44: CONFIG_CHECKPOINT_RESTORE=y (/proc/sys/kernel/ns_last_pid)"
        );
        fake.remove("/proc/sys/kernel/ns_last_pid");
        assert_eq!(of(&fake), "warning 6.18.44: nothing says whether it can checkpoint processes");

        fake.file("/boot/config-6.18.44", "# CONFIG_CHECKPOINT_RESTORE is not set\nCONFIG_X=y\n");
        assert_eq!(
            of(&fake),
            "error 6.18.44: CONFIG_CHECKPOINT_RESTORE is off (/boot/config-6.18.44)"
        );

        fake.file("/proc/config.gz", "");
        let fake = fake.command("zcat /proc/config.gz", 0, "CONFIG_CHECKPOINT_RESTORE=y\n", "");
        assert_eq!(of(&fake), "ok 6.18.44: CONFIG_CHECKPOINT_RESTORE=y (/proc/config.gz)");
    }

    #[test]
    fn yama_can_forbid_ptrace() {
        let fake = Fake::good();
        assert_eq!(said(&ptrace(&fake)), "ok not restricted");
        for (scope, want) in [
            ("0\n", "ok allowed for root (yama 0)"),
            ("1\n", "ok allowed for root (yama 1)"),
            ("2\n", "ok allowed for root (yama 2)"),
            ("3\n", "error kernel.yama.ptrace_scope is 3: nobody may use ptrace"),
            ("x\n", "warning kernel.yama.ptrace_scope is `x`, which is unknown"),
        ] {
            fake.file("/proc/sys/kernel/yama/ptrace_scope", scope);
            assert_eq!(said(&ptrace(&fake)), want);
        }
    }

    #[test]
    fn huge_pages_should_be_on() {
        let fake = Fake::good();
        for (text, level) in [
            ("[always] madvise never\n", Level::Ok),
            ("always [madvise] never\n", Level::Ok),
            ("always madvise [never]\n", Level::Warning),
            ("[sometimes]\n", Level::Warning),
            ("", Level::Warning),
        ] {
            fake.file("/sys/kernel/mm/transparent_hugepage/enabled", text);
            assert_eq!(huge_pages(&fake).level, level, "{text}");
        }
        assert_eq!(huge_pages(&Fake::empty()).level, Level::Warning);
    }
}
