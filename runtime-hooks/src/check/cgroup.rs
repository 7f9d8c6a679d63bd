//! Which cgroups this host has, and whether they can freeze.

use std::path::Path;

use super::version::Version;
use super::{Check, Finding, Host};

const CGROUPS: Check = Check { id: "cgroups", title: "cgroups" };

const ROOT: &str = "/sys/fs/cgroup";
const REMEDY: &str = "mount cgroup2, or the freezer controller of cgroup v1, as systemd does";

/// `cgroup.freeze`.
const FREEZE: Version = Version::of(5, 2);

pub(super) fn cgroups(host: &dyn Host) -> Finding {
    let text = match host.read(Path::new("/proc/self/mountinfo")) {
        Ok(text) => text,
        Err(error) => {
            return CGROUPS
                .error(format!("cannot read /proc/self/mountinfo: {error}"))
                .remedy("mount /proc");
        }
    };
    let mounts = mounts(&text);
    // The runtimes go by what is mounted at this place, and so does Stasis.
    let unified = mounts.iter().any(|m| m.kind == "cgroup2" && m.at == ROOT);
    if unified {
        return if freezes(host) {
            CGROUPS.ok("version 2, can freeze")
        } else {
            CGROUPS
                .error("version 2, without cgroup.freeze")
                .remedy(format!("use a kernel from {FREEZE}"))
        };
    }
    let second = mounts.iter().find(|m| m.kind == "cgroup2");
    let version = match second {
        Some(second) => format!("hybrid (version 1, and version 2 at {})", second.at),
        None => "version 1".to_owned(),
    };
    let freezer = mounts.iter().find(|m| m.kind == "cgroup" && m.options.contains(&"freezer"));
    match freezer {
        Some(freezer) => CGROUPS.ok(format!("{version}, freezer at {}", freezer.at)),
        None if mounts.is_empty() => CGROUPS.error("none are mounted").remedy(REMEDY),
        None => CGROUPS.error(format!("{version}, without a freezer")).remedy(REMEDY),
    }
}

/// Whether cgroups of version 2 can freeze. The root cgroup has no `cgroup.freeze`, so this looks
/// below it.
fn freezes(host: &dyn Host) -> bool {
    let root = Path::new(ROOT);
    let mut below = host.list(root).unwrap_or_default().into_iter().filter_map(|name| {
        let files = host.list(&root.join(name)).ok()?;
        Some(files.iter().any(|file| file == "cgroup.freeze"))
    });
    // There may be none at all yet.
    below.next().unwrap_or_else(|| Version::parse(&host.kernel()).is_some_and(|v| v >= FREEZE))
}

struct Mount<'a> {
    at: &'a str,
    kind: &'a str,
    options: Vec<&'a str>,
}

/// The cgroup mounts in a mountinfo file. Those that another one covers are listed as well.
fn mounts(mountinfo: &str) -> Vec<Mount<'_>> {
    mountinfo
        .lines()
        .filter_map(|line| {
            // 35 24 0:30 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw
            let (place, what) = line.split_once(" - ")?;
            let at = place.split(' ').nth(4)?;
            let mut what = what.split(' ');
            let (kind, _, options) = (what.next()?, what.next()?, what.next()?);
            Some(Mount { at, kind, options: options.split(',').collect() })
        })
        .filter(|mount| mount.kind == "cgroup" || mount.kind == "cgroup2")
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::fake::{Fake, said};
    use super::*;

    const HYBRID: &str = "\
30 21 0:27 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:28 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
36 30 0:33 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
39 30 0:36 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
40 30 0:37 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const UNIFIED: &str = "\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn each_kind_is_told() {
        let fake = Fake::good();
        for (mountinfo, want) in [
            (UNIFIED.to_owned(), "ok version 2, can freeze"),
            (
                HYBRID.to_owned(),
                "ok hybrid (version 1, and version 2 at /sys/fs/cgroup/unified), freezer at \
                 /sys/fs/cgroup/freezer",
            ),
            (
                HYBRID.replace("rw,freezer", "rw,pids"),
                "error hybrid (version 1, and version 2 at /sys/fs/cgroup/unified), without a \
                 freezer",
            ),
            (
                HYBRID.replace("cgroup2 cgroup2", "tmpfs tmpfs"),
                "ok version 1, freezer at /sys/fs/cgroup/freezer",
            ),
            (HYBRID[..70].to_owned(), "error none are mounted"),
            ("garbage - \n\n - \n".to_owned(), "error none are mounted"),
        ] {
            fake.file("/proc/self/mountinfo", &mountinfo);
            assert_eq!(said(&cgroups(&fake)), want);
        }
    }

    #[test]
    fn version_2_freezes_if_a_cgroup_says_so_or_the_kernel_is_new() {
        let fake = Fake { kernel: "5.1.0".into(), ..Fake::good() };
        fake.file("/proc/self/mountinfo", UNIFIED);
        assert_eq!(said(&cgroups(&fake)), "error version 2, without cgroup.freeze");
        fake.file("/sys/fs/cgroup/cgroup.procs", "");
        fake.file("/sys/fs/cgroup/system.slice/cgroup.freeze", "0\n");
        assert_eq!(said(&cgroups(&fake)), "ok version 2, can freeze");
    }

    #[test]
    fn a_host_without_proc_is_an_error() {
        assert!(said(&cgroups(&Fake::empty())).starts_with("error cannot read"));
    }
}
