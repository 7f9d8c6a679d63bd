//! The counters of cgroup v1, and of a hybrid host.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use containerd_shim::protos::cgroups::metrics::{
    BlkIOEntry, BlkIOStat, CPUStat, CPUUsage, HugetlbStat, MemoryEntry, MemoryOomControl,
    MemoryStat, Metrics, PidsStat, RdmaEntry, RdmaStat, Throttle,
};

use super::files::{self, Counter, counters, number, pairs, text};

/// A tick of cpuacct.stat in nanoseconds: `USER_HZ` is 100 on every architecture that has CUDA.
const TICK: u64 = 10_000_000;

const THROTTLING: &[Counter<Throttle>] = &[
    ("nr_periods", |to| &mut to.periods),
    ("nr_throttled", |to| &mut to.throttled_periods),
    ("throttled_time", |to| &mut to.throttled_time),
];

const MEMORY: &[Counter<MemoryStat>] = &[
    ("cache", |to| &mut to.cache),
    ("rss", |to| &mut to.rss),
    ("rss_huge", |to| &mut to.rss_huge),
    ("mapped_file", |to| &mut to.mapped_file),
    ("dirty", |to| &mut to.dirty),
    ("writeback", |to| &mut to.writeback),
    ("pgpgin", |to| &mut to.pg_pg_in),
    ("pgpgout", |to| &mut to.pg_pg_out),
    ("pgfault", |to| &mut to.pg_fault),
    ("pgmajfault", |to| &mut to.pg_maj_fault),
    ("inactive_anon", |to| &mut to.inactive_anon),
    ("active_anon", |to| &mut to.active_anon),
    ("inactive_file", |to| &mut to.inactive_file),
    ("active_file", |to| &mut to.active_file),
    ("unevictable", |to| &mut to.unevictable),
    ("hierarchical_memory_limit", |to| &mut to.hierarchical_memory_limit),
    ("hierarchical_memsw_limit", |to| &mut to.hierarchical_swap_limit),
    ("total_cache", |to| &mut to.total_cache),
    ("total_rss", |to| &mut to.total_rss),
    ("total_rss_huge", |to| &mut to.total_rss_huge),
    ("total_mapped_file", |to| &mut to.total_mapped_file),
    ("total_dirty", |to| &mut to.total_dirty),
    ("total_writeback", |to| &mut to.total_writeback),
    ("total_pgpgin", |to| &mut to.total_pg_pg_in),
    ("total_pgpgout", |to| &mut to.total_pg_pg_out),
    ("total_pgfault", |to| &mut to.total_pg_fault),
    ("total_pgmajfault", |to| &mut to.total_pg_maj_fault),
    ("total_inactive_anon", |to| &mut to.total_inactive_anon),
    ("total_active_anon", |to| &mut to.total_active_anon),
    ("total_inactive_file", |to| &mut to.total_inactive_file),
    ("total_active_file", |to| &mut to.total_active_file),
    ("total_unevictable", |to| &mut to.total_unevictable),
];

const OOM_CONTROL: &[Counter<MemoryOomControl>] = &[
    ("oom_kill_disable", |to| &mut to.oom_kill_disable),
    ("under_oom", |to| &mut to.under_oom),
    ("oom_kill", |to| &mut to.oom_kill),
];

/// Where the entries of a blkio file go.
type BlkioFile = (&'static str, fn(&mut BlkIOStat) -> &mut Vec<BlkIOEntry>);

/// What the CFQ scheduler counted, on kernels that had it.
const BLKIO_CFQ: &[BlkioFile] = &[
    ("blkio.sectors_recursive", |to| &mut to.sectors_recursive),
    ("blkio.io_service_bytes_recursive", |to| &mut to.io_service_bytes_recursive),
    ("blkio.io_serviced_recursive", |to| &mut to.io_serviced_recursive),
    ("blkio.io_queued_recursive", |to| &mut to.io_queued_recursive),
    ("blkio.io_service_time_recursive", |to| &mut to.io_service_time_recursive),
    ("blkio.io_wait_time_recursive", |to| &mut to.io_wait_time_recursive),
    ("blkio.io_merged_recursive", |to| &mut to.io_merged_recursive),
    ("blkio.time_recursive", |to| &mut to.io_time_recursive),
];

/// What is counted with every scheduler.
const BLKIO_THROTTLE: &[BlkioFile] = &[
    ("blkio.throttle.io_serviced", |to| &mut to.io_serviced_recursive),
    ("blkio.throttle.io_service_bytes", |to| &mut to.io_service_bytes_recursive),
];

/// Reads everything; `root` has the host's proc and sys.
pub(super) fn read(root: &Path, directories: &BTreeMap<String, PathBuf>) -> Metrics {
    let directory = |controller: &str| directories.get(controller).map(PathBuf::as_path);
    let (memory, oom_control) = directory("memory").map(memory).unwrap_or_default();
    Metrics {
        hugetlb: directory("hugetlb").map(|at| hugetlb(root, at)).unwrap_or_default(),
        pids: directory("pids").and_then(pids).into(),
        cpu: Some(cpu(directory("cpu"), directory("cpuacct"))).into(),
        memory: memory.into(),
        blkio: directory("blkio").map(|at| blkio(root, at)).into(),
        rdma: directory("rdma").and_then(rdma).into(),
        memory_oom_control: oom_control.into(),
        ..Metrics::default()
    }
}

fn hugetlb(root: &Path, at: &Path) -> Vec<HugetlbStat> {
    let entry = |size: String| {
        let value = |what| number(&at.join(format!("hugetlb.{size}.{what}")), 0);
        Some(HugetlbStat {
            usage: value("usage_in_bytes")?,
            max: value("max_usage_in_bytes")?,
            failcnt: value("failcnt")?,
            pagesize: size,
            ..HugetlbStat::default()
        })
    };
    files::huge_page_sizes(root).into_iter().filter_map(entry).collect()
}

fn pids(at: &Path) -> Option<PidsStat> {
    Some(PidsStat {
        current: number(&at.join("pids.current"), 0)?,
        limit: number(&at.join("pids.max"), 0)?,
        ..PidsStat::default()
    })
}

fn cpu(cpu: Option<&Path>, cpuacct: Option<&Path>) -> CPUStat {
    let mut throttling = Throttle::default();
    if let Some(at) = cpu {
        counters(&at.join("cpu.stat"), THROTTLING, &mut throttling);
    }
    let mut usage = CPUUsage::default();
    if let Some(at) = cpuacct {
        for (name, ticks) in pairs(&text(&at.join("cpuacct.stat")).unwrap_or_default()) {
            match name {
                "user" => usage.user = ticks.saturating_mul(TICK),
                "system" => usage.kernel = ticks.saturating_mul(TICK),
                _ => {}
            }
        }
        usage.total = number(&at.join("cpuacct.usage"), 0).unwrap_or(0);
        let per_cpu = text(&at.join("cpuacct.usage_percpu")).unwrap_or_default();
        usage.per_cpu = per_cpu.split_whitespace().filter_map(files::parse).collect();
    }
    CPUStat { usage: Some(usage).into(), throttling: Some(throttling).into(), ..CPUStat::default() }
}

fn memory(at: &Path) -> (Option<MemoryStat>, Option<MemoryOomControl>) {
    let mut memory = MemoryStat::default();
    if counters(&at.join("memory.stat"), MEMORY, &mut memory).is_none() {
        return (None, None);
    }
    let entry = |kind| Some(memory_entry(at, kind)).into();
    memory.usage = entry("memory");
    memory.swap = entry("memory.memsw");
    memory.kernel = entry("memory.kmem");
    memory.kernel_tcp = entry("memory.kmem.tcp");
    let mut control = MemoryOomControl::default();
    let known = counters(&at.join("memory.oom_control"), OOM_CONTROL, &mut control);
    (Some(memory), known.map(|_| control))
}

/// The memsw files are missing without swap accounting, those of kmem on newer kernels.
fn memory_entry(at: &Path, kind: &str) -> MemoryEntry {
    let value = |what| number(&at.join(format!("{kind}.{what}")), 0).unwrap_or(0);
    MemoryEntry {
        limit: value("limit_in_bytes"),
        usage: value("usage_in_bytes"),
        max: value("max_usage_in_bytes"),
        failcnt: value("failcnt"),
        ..MemoryEntry::default()
    }
}

fn blkio(root: &Path, at: &Path) -> BlkIOStat {
    let devices = devices(&text(&root.join("proc/partitions")).unwrap_or_default());
    let mut stat = BlkIOStat::default();
    let mut fill = |table: &[BlkioFile]| {
        let mut found = false;
        for (name, place) in table {
            let entries = place(&mut stat);
            *entries = blkio_entries(&text(&at.join(name)).unwrap_or_default(), &devices);
            found |= !entries.is_empty();
        }
        found
    };
    // CFQ's files are there, and empty, also when no device uses that scheduler.
    if !fill(BLKIO_CFQ) {
        fill(BLKIO_THROTTLE);
    }
    stat
}

/// `MAJOR:MINOR [OPERATION] VALUE` lines. The sums at the end have no device.
fn blkio_entries(text: &str, devices: &HashMap<(u64, u64), String>) -> Vec<BlkIOEntry> {
    let entry = |line: &str| {
        let mut fields = line.split_whitespace();
        let (major, minor) = fields.next()?.split_once(':')?;
        let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
        let (first, second) = (fields.next()?, fields.next());
        let (op, value) = second.map_or(("", first), |value| (first, value));
        Some(BlkIOEntry {
            op: op.to_owned(),
            device: devices.get(&(major, minor)).cloned().unwrap_or_default(),
            major,
            minor,
            value: files::parse(value)?,
            ..BlkIOEntry::default()
        })
    };
    text.lines().filter_map(entry).collect()
}

/// The names in /proc/partitions, which begins with a heading.
fn devices(partitions: &str) -> HashMap<(u64, u64), String> {
    let entry = |line: &str| {
        let mut fields = line.split_whitespace();
        let number = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        Some((number, format!("/dev/{}", fields.nth(1)?)))
    };
    partitions.lines().filter_map(entry).collect()
}

fn rdma(at: &Path) -> Option<RdmaStat> {
    let entries = |name: &str| -> Option<Vec<RdmaEntry>> {
        let text = text(&at.join(name))?;
        let entry = |(device, hca_handles, hca_objects): (&str, u32, u32)| RdmaEntry {
            device: device.to_owned(),
            hca_handles,
            hca_objects,
            ..RdmaEntry::default()
        };
        Some(files::rdma(&text).map(entry).collect())
    };
    let (current, limit) = (entries("rdma.current")?, entries("rdma.max")?);
    // A device went away between the two.
    (current.len() == limit.len()).then(|| RdmaStat { current, limit, ..RdmaStat::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::files::fixture;

    /// A host with these files in the container's cgroups.
    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Metrics) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("sys/kernel/mm/hugepages/hugepages-2048kB"))
            .unwrap();
        fixture::write(
            root.path(),
            &[(
                "proc/partitions",
                "major minor  #blocks  name\n\n   8        0   31457 sda\n 259     1  1 nvme0n1\n",
            )],
        );
        fixture::write(root.path(), files);
        let names = ["cpu", "cpuacct", "memory", "blkio", "pids", "hugetlb", "rdma"];
        let directories = names.map(|name| (name.to_owned(), root.path().join(name)));
        let metrics = read(root.path(), &directories.into());
        (root, metrics)
    }

    #[test]
    fn cpu_is_in_nanoseconds() {
        let (_root, metrics) = host(&[
            ("cpu/cpu.stat", "nr_periods 10\nnr_throttled 3\nthrottled_time 500\nnr_bursts 1\n"),
            ("cpuacct/cpuacct.stat", "user 150\nsystem 7\n"),
            ("cpuacct/cpuacct.usage", "1570000001\n"),
            ("cpuacct/cpuacct.usage_percpu", "1000000000 570000001 \n"),
        ]);
        let usage = &metrics.cpu.usage;
        assert_eq!((usage.user, usage.kernel), (1_500_000_000, 70_000_000));
        assert_eq!(usage.total, 1_570_000_001);
        assert_eq!(usage.per_cpu, [1_000_000_000, 570_000_001]);
        let throttling = &metrics.cpu.throttling;
        assert_eq!(
            (throttling.periods, throttling.throttled_periods, throttling.throttled_time),
            (10, 3, 500)
        );
    }

    #[test]
    fn memory_with_every_counter_in_its_place() {
        let stat = fixture::numbered(MEMORY);
        let (_root, mut metrics) = host(&[
            ("memory/memory.stat", &format!("{stat}unknown 99\nno number\n")),
            ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 1\noom_kill 4\n"),
            ("memory/memory.usage_in_bytes", "11\n"),
            ("memory/memory.max_usage_in_bytes", "12\n"),
            ("memory/memory.failcnt", "13\n"),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/memory.kmem.usage_in_bytes", "21\n"),
            ("memory/memory.kmem.tcp.usage_in_bytes", "31\n"),
        ]);
        let memory = metrics.memory.as_mut().unwrap();
        fixture::assert_numbered(MEMORY, memory);
        assert_eq!((memory.cache, memory.total_unevictable), (1, 32));
        let usage = &memory.usage;
        assert_eq!((usage.usage, usage.max, usage.failcnt), (11, 12, 13));
        assert_eq!(usage.limit, 9_223_372_036_854_771_712);
        // No swap accounting: an empty entry, and the others all the same.
        assert_eq!(memory.swap.as_ref(), Some(&MemoryEntry::default()));
        assert_eq!((memory.kernel.usage, memory.kernel_tcp.usage), (21, 31));
        let control = &metrics.memory_oom_control;
        assert_eq!((control.oom_kill_disable, control.under_oom, control.oom_kill), (0, 1, 4));
    }

    #[test]
    fn pids_and_huge_pages() {
        let (_root, metrics) = host(&[
            ("pids/pids.current", "3\n"),
            ("pids/pids.max", "max\n"),
            ("hugetlb/hugetlb.2MB.usage_in_bytes", "1\n"),
            ("hugetlb/hugetlb.2MB.max_usage_in_bytes", "2\n"),
            ("hugetlb/hugetlb.2MB.failcnt", "3\n"),
        ]);
        assert_eq!((metrics.pids.current, metrics.pids.limit), (3, 0));
        let [huge] = metrics.hugetlb.as_slice() else { panic!("{:?}", metrics.hugetlb) };
        assert_eq!((huge.usage, huge.max, huge.failcnt), (1, 2, 3));
        assert_eq!(huge.pagesize, "2MB");
    }

    #[test]
    fn block_devices_by_the_throttle_files_when_cfq_counts_nothing() {
        let (_root, metrics) = host(&[
            ("blkio/blkio.io_serviced_recursive", "Total 0\n"),
            ("blkio/blkio.throttle.io_serviced", "8:0 Read 5\n8:0 Write 6\n7:7 Read 1\nTotal 12\n"),
            ("blkio/blkio.throttle.io_service_bytes", "259:1 Read 4096\nTotal 4096\n"),
        ]);
        let serviced = &metrics.blkio.io_serviced_recursive;
        let seen: Vec<_> =
            serviced.iter().map(|e| (e.op.as_str(), e.device.as_str(), e.value)).collect();
        assert_eq!(seen, [("Read", "/dev/sda", 5), ("Write", "/dev/sda", 6), ("Read", "", 1)]);
        assert_eq!((serviced[2].major, serviced[2].minor), (7, 7));
        let bytes = &metrics.blkio.io_service_bytes_recursive;
        assert_eq!((bytes[0].device.as_str(), bytes[0].value), ("/dev/nvme0n1", 4096));
    }

    #[test]
    fn block_devices_by_cfq() {
        let (_root, metrics) = host(&[
            ("blkio/blkio.io_serviced_recursive", "8:0 Read 5\nTotal 5\n"),
            ("blkio/blkio.time_recursive", "8:0 77\n"),
            ("blkio/blkio.throttle.io_serviced", "8:0 Read 9\n"),
        ]);
        assert_eq!(metrics.blkio.io_serviced_recursive[0].value, 5);
        let time = &metrics.blkio.io_time_recursive[0];
        assert_eq!((time.op.as_str(), time.value), ("", 77));
    }

    #[test]
    fn rdma_unless_a_device_has_just_gone() {
        let (root, metrics) = host(&[
            ("rdma/rdma.current", "mlx4_0 hca_handle=1 hca_object=20\n"),
            ("rdma/rdma.max", "mlx4_0 hca_handle=max hca_object=30\n"),
        ]);
        let (current, limit) = (&metrics.rdma.current[0], &metrics.rdma.limit[0]);
        assert_eq!((current.device.as_str(), current.hca_handles), ("mlx4_0", 1));
        assert_eq!((limit.hca_handles, limit.hca_objects), (u32::MAX, 30));
        fixture::write(&root.path().join("rdma"), &[("rdma.max", "")]);
        assert_eq!(rdma(&root.path().join("rdma")), None);
    }

    #[test]
    fn what_is_missing_is_left_out() {
        let (_root, metrics) = host(&[("pids/pids.current", "3\n")]);
        assert!(metrics.pids.is_none() && metrics.memory.is_none() && metrics.rdma.is_none());
        assert!(metrics.hugetlb.is_empty() && metrics.memory_oom_control.is_none());
        // As in Go's: whoever asks for the CPU does not have to look whether it is there.
        assert!(metrics.cpu.usage.is_some() && metrics.cpu.throttling.is_some());
    }
}
