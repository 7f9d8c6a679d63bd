//! The counters of cgroup v2.

use std::path::Path;

use containerd_shim::protos::cgroups_v2::metrics::{
    CPUStat, HugeTlbStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PSIData, PSIStats,
    PidsStat, RdmaEntry, RdmaStat,
};

use super::files::{self, Counter, counters, number, pairs, text};

const CPU: &[Counter<CPUStat>] = &[
    ("usage_usec", |to| &mut to.usage_usec),
    ("user_usec", |to| &mut to.user_usec),
    ("system_usec", |to| &mut to.system_usec),
    ("nr_periods", |to| &mut to.nr_periods),
    ("nr_throttled", |to| &mut to.nr_throttled),
    ("throttled_usec", |to| &mut to.throttled_usec),
    ("nr_bursts", |to| &mut to.nr_bursts),
    ("burst_usec", |to| &mut to.burst_usec),
];

const MEMORY: &[Counter<MemoryStat>] = &[
    ("anon", |to| &mut to.anon),
    ("file", |to| &mut to.file),
    ("kernel_stack", |to| &mut to.kernel_stack),
    ("slab", |to| &mut to.slab),
    ("sock", |to| &mut to.sock),
    ("shmem", |to| &mut to.shmem),
    ("file_mapped", |to| &mut to.file_mapped),
    ("file_dirty", |to| &mut to.file_dirty),
    ("file_writeback", |to| &mut to.file_writeback),
    ("anon_thp", |to| &mut to.anon_thp),
    ("inactive_anon", |to| &mut to.inactive_anon),
    ("active_anon", |to| &mut to.active_anon),
    ("inactive_file", |to| &mut to.inactive_file),
    ("active_file", |to| &mut to.active_file),
    ("unevictable", |to| &mut to.unevictable),
    ("slab_reclaimable", |to| &mut to.slab_reclaimable),
    ("slab_unreclaimable", |to| &mut to.slab_unreclaimable),
    ("pgfault", |to| &mut to.pgfault),
    ("pgmajfault", |to| &mut to.pgmajfault),
    ("workingset_refault", |to| &mut to.workingset_refault),
    ("workingset_activate", |to| &mut to.workingset_activate),
    ("workingset_nodereclaim", |to| &mut to.workingset_nodereclaim),
    ("pgrefill", |to| &mut to.pgrefill),
    ("pgscan", |to| &mut to.pgscan),
    ("pgsteal", |to| &mut to.pgsteal),
    ("pgactivate", |to| &mut to.pgactivate),
    ("pgdeactivate", |to| &mut to.pgdeactivate),
    ("pglazyfree", |to| &mut to.pglazyfree),
    ("pglazyfreed", |to| &mut to.pglazyfreed),
    ("thp_fault_alloc", |to| &mut to.thp_fault_alloc),
    ("thp_collapse_alloc", |to| &mut to.thp_collapse_alloc),
];

/// Linux 5.9 split the two workingset counters. Go's messages have fields for the halves since
/// 2026; the crate with ours has not, so they are given by field number.
const WORKINGSET: &[(&str, u32)] = &[
    ("workingset_refault_anon", 39),
    ("workingset_refault_file", 40),
    ("workingset_activate_anon", 41),
    ("workingset_activate_file", 42),
];

const MEMORY_EVENTS: &[Counter<MemoryEvents>] = &[
    ("low", |to| &mut to.low),
    ("high", |to| &mut to.high),
    ("max", |to| &mut to.max),
    ("oom", |to| &mut to.oom),
    ("oom_kill", |to| &mut to.oom_kill),
    ("oom_group_kill", |to| &mut to.oom_group_kill),
];

const IO: &[Counter<IOEntry>] = &[
    ("rbytes", |to| &mut to.rbytes),
    ("wbytes", |to| &mut to.wbytes),
    ("rios", |to| &mut to.rios),
    ("wios", |to| &mut to.wios),
];

/// Reads everything; `root` has the host's sys, `at` is the cgroup.
pub(super) fn read(root: &Path, at: &Path) -> Metrics {
    let value = |name: &str| number(&at.join(name), u64::MAX).unwrap_or(0);
    let pids = PidsStat {
        current: value("pids.current"),
        limit: value("pids.max"),
        ..PidsStat::default()
    };
    let io = IOStat {
        usage: io_entries(&text(&at.join("io.stat")).unwrap_or_default()),
        psi: pressure(&at.join("io.pressure")).into(),
        ..IOStat::default()
    };
    Metrics {
        pids: Some(pids).into(),
        cpu: Some(cpu(at)).into(),
        memory: Some(memory(at)).into(),
        rdma: Some(rdma(at)).into(),
        io: Some(io).into(),
        hugetlb: hugetlb(root, at),
        memory_events: memory_events(at).into(),
        ..Metrics::default()
    }
}

fn cpu(at: &Path) -> CPUStat {
    let mut cpu = CPUStat::default();
    if counters(&at.join("cpu.stat"), CPU, &mut cpu).is_some() {
        cpu.psi = pressure(&at.join("cpu.pressure")).into();
    }
    cpu
}

fn memory(at: &Path) -> MemoryStat {
    let mut memory = MemoryStat::default();
    let Some(text) = counters(&at.join("memory.stat"), MEMORY, &mut memory) else {
        return memory;
    };
    for (name, value) in pairs(&text) {
        if let Some((_, field)) = WORKINGSET.iter().find(|(known, _)| *known == name) {
            memory.special_fields.mut_unknown_fields().add_varint(*field, value);
        }
    }
    let value = |name: &str| number(&at.join(name), u64::MAX).unwrap_or(0);
    memory.usage = value("memory.current");
    memory.usage_limit = value("memory.max");
    memory.max_usage = value("memory.peak");
    memory.swap_usage = value("memory.swap.current");
    memory.swap_limit = value("memory.swap.max");
    memory.swap_max_usage = value("memory.swap.peak");
    memory.psi = pressure(&at.join("memory.pressure")).into();
    memory
}

fn memory_events(at: &Path) -> Option<MemoryEvents> {
    let mut events = MemoryEvents::default();
    counters(&at.join("memory.events"), MEMORY_EVENTS, &mut events).map(|_| events)
}

/// `MAJOR:MINOR name=value...` lines; a device without values has done nothing.
fn io_entries(text: &str) -> Vec<IOEntry> {
    let entry = |line: &str| {
        let (device, values) = line.split_once(' ')?;
        let (major, minor) = device.split_once(':')?;
        let mut entry = IOEntry {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
            ..IOEntry::default()
        };
        for (name, value) in values.split(' ').filter_map(|pair| pair.split_once('=')) {
            let place = IO.iter().find(|(known, _)| *known == name);
            if let (Some((_, place)), Some(value)) = (place, files::parse(value)) {
                *place(&mut entry) = value;
            }
        }
        Some(entry)
    };
    text.lines().filter_map(entry).collect()
}

/// A pressure file: a line `some` and, but for the CPU on older kernels, a line `full`.
fn pressure(path: &Path) -> Option<PSIStats> {
    let text = text(path)?;
    let mut stats = PSIStats::default();
    for line in text.lines() {
        let (kind, values) = line.split_once(' ')?;
        let data = match kind {
            "some" => &mut stats.some,
            "full" => &mut stats.full,
            _ => continue,
        };
        *data = Some(pressure_data(values)?).into();
    }
    Some(stats)
}

fn pressure_data(values: &str) -> Option<PSIData> {
    let mut data = PSIData::default();
    for value in values.split_whitespace() {
        let (name, value) = value.split_once('=')?;
        match name {
            "avg10" => data.avg10 = value.parse().ok()?,
            "avg60" => data.avg60 = value.parse().ok()?,
            "avg300" => data.avg300 = value.parse().ok()?,
            "total" => data.total = value.parse().ok()?,
            _ => {}
        }
    }
    Some(data)
}

fn hugetlb(root: &Path, at: &Path) -> Vec<HugeTlbStat> {
    let entry = |size: String| {
        let value =
            |what| number(&at.join(format!("hugetlb.{size}.{what}")), u64::MAX).unwrap_or(0);
        let events = text(&at.join(format!("hugetlb.{size}.events"))).unwrap_or_default();
        let failures = pairs(&events).find(|(name, _)| *name == "max");
        HugeTlbStat {
            current: value("current"),
            max: value("max"),
            failcnt: failures.map_or(0, |(_, value)| value),
            pagesize: size,
            ..HugeTlbStat::default()
        }
    };
    files::huge_page_sizes(root).into_iter().map(entry).collect()
}

fn rdma(at: &Path) -> RdmaStat {
    let entries = |name: &str| -> Vec<RdmaEntry> {
        let entry = |(device, hca_handles, hca_objects): (&str, u32, u32)| RdmaEntry {
            device: device.to_owned(),
            hca_handles,
            hca_objects,
            ..RdmaEntry::default()
        };
        files::rdma(&text(&at.join(name)).unwrap_or_default()).map(entry).collect()
    };
    RdmaStat { current: entries("rdma.current"), limit: entries("rdma.max"), ..RdmaStat::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::files::fixture;
    use containerd_shim::protos::protobuf::{Message as _, UnknownValueRef};

    /// A host with these files in the container's cgroup.
    fn host(files: &[(&str, &str)]) -> Metrics {
        let root = tempfile::tempdir().unwrap();
        let pages = root.path().join("sys/kernel/mm/hugepages/hugepages-1048576kB");
        std::fs::create_dir_all(pages).unwrap();
        let at = root.path().join("cgroup");
        fixture::write(&at, files);
        read(root.path(), &at)
    }

    #[test]
    fn cpu_with_pressure() {
        let mut metrics = host(&[
            (
                "cpu.stat",
                "usage_usec 1\nuser_usec 2\nsystem_usec 3\nnice_usec 0\nother_usec 0\n\
                 nr_periods 4\nnr_throttled 5\nthrottled_usec 6\nnr_bursts 7\nburst_usec 8\n",
            ),
            (
                "cpu.pressure",
                "some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\n\
                 full avg10=0.00 avg60=0.00 avg300=0.12 total=5\n",
            ),
        ]);
        let cpu = metrics.cpu.as_mut().unwrap();
        fixture::assert_numbered(CPU, cpu);
        let PSIData { avg10, avg60, avg300, total, .. } = *cpu.psi.some;
        assert_eq!((avg10, avg60, avg300, total), (1.5, 0.25, 0.0, 1234));
        assert_eq!((cpu.psi.full.avg300, cpu.psi.full.total), (0.12, 5));
    }

    #[test]
    fn memory_with_every_counter_in_its_place() {
        let stat = fixture::numbered(MEMORY);
        let mut metrics = host(&[
            ("memory.stat", &format!("{stat}percpu 9\nworkingset_refault_file 77\n")),
            ("memory.current", "101\n"),
            ("memory.max", "max\n"),
            ("memory.peak", "103\n"),
            ("memory.swap.current", "104\n"),
            ("memory.swap.max", "105\n"),
            ("memory.swap.peak", "106\n"),
            ("memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\n"),
            ("memory.events", "low 1\nhigh 2\nmax 3\noom 4\noom_kill 5\noom_group_kill 6\n"),
        ]);
        let memory = metrics.memory.as_mut().unwrap();
        fixture::assert_numbered(MEMORY, memory);
        assert_eq!((memory.usage, memory.usage_limit, memory.max_usage), (101, u64::MAX, 103));
        assert_eq!((memory.swap_usage, memory.swap_limit, memory.swap_max_usage), (104, 105, 106));
        assert_eq!(memory.psi.some.total, 9);
        assert!(memory.psi.full.is_none());
        let events = metrics.memory_events.as_mut().unwrap();
        fixture::assert_numbered(MEMORY_EVENTS, events);
        // The newer fields survive the way over the wire.
        let bytes = metrics.write_to_bytes().unwrap();
        let read = Metrics::parse_from_bytes(&bytes).unwrap();
        let unknown = read.memory.special_fields.unknown_fields();
        assert_eq!(unknown.get(40), Some(UnknownValueRef::Varint(77)));
    }

    #[test]
    fn devices_huge_pages_rdma_and_pids() {
        let metrics = host(&[
            (
                "io.stat",
                "8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n7:0 \n253:0\n254:1 rios=x\n",
            ),
            ("io.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=8\n"),
            ("hugetlb.1GB.current", "1\n"),
            ("hugetlb.1GB.max", "max\n"),
            ("hugetlb.1GB.events", "max 3\n"),
            ("rdma.current", "mlx5_0 hca_handle=1 hca_object=2\n"),
            ("rdma.max", "mlx5_0 hca_handle=max hca_object=max\n"),
            ("pids.current", "6\n"),
            ("pids.max", "max\n"),
        ]);
        let io = &metrics.io.usage;
        assert_eq!(io.iter().map(|entry| entry.major).collect::<Vec<_>>(), [8, 7, 254]);
        assert_eq!((io[0].rbytes, io[0].wbytes, io[0].rios, io[0].wios), (1, 2, 3, 4));
        assert_eq!(metrics.io.psi.some.total, 8);
        let huge = &metrics.hugetlb[0];
        assert_eq!((huge.pagesize.as_str(), huge.current), ("1GB", 1));
        assert_eq!((huge.max, huge.failcnt), (u64::MAX, 3));
        assert_eq!(metrics.rdma.current[0].hca_objects, 2);
        assert_eq!(metrics.rdma.limit[0].hca_handles, u32::MAX);
        assert_eq!((metrics.pids.current, metrics.pids.limit), (6, u64::MAX));
    }

    #[test]
    fn what_is_missing_is_left_out() {
        let metrics = host(&[("cpu.pressure", "")]);
        assert!(metrics.memory_events.is_none());
        assert!(metrics.cpu.psi.is_none() && metrics.io.psi.is_none());
        assert!(metrics.io.usage.is_empty());
        // As in Go's: whoever asks for these does not have to look whether they are there.
        assert!(metrics.pids.is_some() && metrics.cpu.is_some() && metrics.memory.is_some());
        assert_eq!((metrics.pids.limit, metrics.hugetlb[0].max), (0, 0));
    }
}
