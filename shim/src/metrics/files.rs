//! How the kernel writes its counters.

use std::fs;
use std::path::Path;

/// A counter: its name in the kernel's file and its place in a message.
pub(super) type Counter<M> = (&'static str, fn(&mut M) -> &mut u64);

/// What a file says. A file that is missing, whose cgroup has just gone, or that the kernel does
/// not support here (pressure files exist then, and cannot be read) says nothing.
pub(super) fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// A file that is one number; `max` is what the word `max` stands for.
pub(super) fn number(path: &Path, max: u64) -> Option<u64> {
    let text = text(path)?;
    match text.trim() {
        "max" => Some(max),
        digits => parse(digits),
    }
}

/// A number of the kernel's. Some counters of v1 are differences of others that are not read at
/// the same moment, and go below zero for a moment.
pub(super) fn parse(digits: &str) -> Option<u64> {
    digits.parse().ok().or_else(|| digits.parse::<i64>().ok().map(|_| 0))
}

/// The `name value` lines of a file.
pub(super) fn pairs(text: &str) -> impl Iterator<Item = (&str, u64)> {
    text.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        Some((name, parse(value.trim())?))
    })
}

/// Fills a message from a file of `name value` lines, and returns the text; none if there is no
/// such file.
pub(super) fn counters<M>(path: &Path, table: &[Counter<M>], message: &mut M) -> Option<String> {
    let text = text(path)?;
    for (name, value) in pairs(&text) {
        if let Some((_, place)) = table.iter().find(|(known, _)| *known == name) {
            *place(message) = value;
        }
    }
    Some(text)
}

/// The `DEVICE hca_handle=NUMBER hca_object=NUMBER` lines of rdma.current and rdma.max.
pub(super) fn rdma(text: &str) -> impl Iterator<Item = (&str, u32, u32)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let device = fields.next()?;
        let (mut handles, mut objects) = (0, 0);
        for field in fields {
            match field.split_once('=')? {
                ("hca_handle", value) => handles = small(value),
                ("hca_object", value) => objects = small(value),
                _ => {}
            }
        }
        Some((device, handles, objects))
    })
}

fn small(value: &str) -> u32 {
    if value == "max" { u32::MAX } else { value.parse().unwrap_or(0) }
}

/// The sizes of huge pages that the host has, as they are named in the hugetlb files: 2MB, 1GB.
pub(super) fn huge_page_sizes(root: &Path) -> Vec<String> {
    let Ok(directories) = fs::read_dir(root.join("sys/kernel/mm/hugepages")) else {
        return Vec::new();
    };
    let mut sizes: Vec<u64> = directories
        .filter_map(|entry| {
            let name = entry.ok()?.file_name();
            let size = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            size.parse().ok()
        })
        .collect();
    sizes.sort_unstable();
    sizes
        .into_iter()
        .map(|size| match size {
            0..0x400 => format!("{size}KB"),
            0x400..0x10_0000 => format!("{}MB", size >> 10),
            _ => format!("{}GB", size >> 20),
        })
        .collect()
}

/// Fixtures.
#[cfg(test)]
pub(super) mod fixture {
    use super::Counter;
    use std::fs;
    use std::path::Path;

    /// A file that has each counter of a table, with its place in the table as value.
    pub(in crate::metrics) fn numbered<M>(table: &[Counter<M>]) -> String {
        let lines: Vec<_> =
            table.iter().zip(1..).map(|((name, _), value)| format!("{name} {value}\n")).collect();
        lines.concat()
    }

    /// Whether such a file has arrived.
    pub(in crate::metrics) fn assert_numbered<M>(table: &[Counter<M>], message: &mut M) {
        for ((name, place), value) in table.iter().zip(1u64..) {
            assert_eq!(*place(message), value, "{name}");
        }
    }

    /// Writes files under `directory`, making the directories they are in.
    pub(in crate::metrics) fn write(directory: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(parse("18446744073709551615"), Some(u64::MAX));
        assert_eq!(parse("-5"), Some(0));
        assert_eq!(parse("five"), None);
        assert_eq!(parse(""), None);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pids.max");
        assert_eq!(number(&path, 0), None);
        fs::write(&path, "max\n").unwrap();
        assert_eq!((number(&path, 0), number(&path, u64::MAX)), (Some(0), Some(u64::MAX)));
        fs::write(&path, "64\n").unwrap();
        assert_eq!(number(&path, 0), Some(64));
    }

    #[test]
    fn huge_pages_are_named_as_the_kernel_names_their_files() {
        let root = tempfile::tempdir().unwrap();
        assert!(huge_page_sizes(root.path()).is_empty());
        for name in ["hugepages-1048576kB", "hugepages-2048kB", "hugepages-64kB", "other"] {
            fs::create_dir_all(root.path().join("sys/kernel/mm/hugepages").join(name)).unwrap();
        }
        assert_eq!(huge_page_sizes(root.path()), ["64KB", "2MB", "1GB"]);
    }

    #[test]
    fn rdma_devices() {
        let text = "mlx4_0 hca_handle=2 hca_object=2000\nocrdma1 hca_handle=3 hca_object=max\n\n";
        let expected = [("mlx4_0", 2, 2000), ("ocrdma1", 3, u32::MAX)];
        assert_eq!(rdma(text).collect::<Vec<_>>(), expected);
    }
}
