//! A report as text for people and as JSON for programs.

use serde::Serialize;
use stasis_config::manifest::JOB_FILE;
use stasis_config::text::printable;

use super::host::Target;
use super::{
    Checkpoint, Compression, Exported, Form, Gpu, Host, Job, JobCopy, JobFile, Kind, NeededGpu,
    Needs, Phase, Process, Report, VisibleGpu,
};

/// Where what is said begins.
const LABEL: usize = "container".len() + 2;
/// The longest bar of a phase.
const LONGEST_BAR: usize = 40;
/// Names come from the image; a line of a terminal or two is enough of each.
const LONGEST: usize = 160;

/// One object; the names of its fields are those of [`Report`], and `whole`.
#[must_use]
pub fn json(report: &Report) -> String {
    #[derive(Serialize)]
    struct Object<'a> {
        whole: bool,
        #[serde(flatten)]
        report: &'a Report,
    }
    let object = Object { whole: report.is_whole(), report };
    let mut out = serde_json::to_string_pretty(&object)
        .unwrap_or_else(|error| unreachable!("a report is text and numbers: {error}"));
    out.push('\n');
    out
}

/// Short lines, with what they are about before the first of each group. On a terminal with that many
/// `columns` each phase has a bar.
#[must_use]
pub fn text(report: &Report, columns: Option<usize>) -> String {
    let mut page = Page::default();
    page.group("image");
    page.line(&report.path);
    page.line(kind(report));
    page.line(&format!("{} on disk, {} files", size(report.bytes_on_disk), report.files));
    if report.form == Form::Archive {
        page.line(&archive(report));
    }
    for problem in &report.problems {
        page.group("problem");
        page.whole_line(problem);
    }
    if let Some(exported) = &report.exported {
        self::exported(&mut page, exported);
    }
    if let Some(checkpoint) = &report.checkpoint {
        self::checkpoint(&mut page, checkpoint, columns);
    }
    if let Some(needs) = &report.restore {
        self::needs(&mut page, needs, report.checkpoint.as_ref());
    }
    if let Some(host) = &report.host {
        self::host(&mut page, host);
    }
    page.text
}

fn archive(report: &Report) -> String {
    let compressed = match report.compression {
        Some(Compression::None) | None => String::new(),
        Some(compression) => format!(", compressed with {}", compression.name()),
    };
    format!("an archive of podman container checkpoint --export{compressed}")
}

fn exported(page: &mut Page, exported: &Exported) {
    let Exported { id, name, image } = exported;
    page.group("exported");
    for (what, value) in [("container", id), ("name", name), ("of the image", image)] {
        if let Some(value) = value {
            page.line(&format!("{what} {value}"));
        }
    }
}

/// Lines in groups, aligned, each printable.
#[derive(Default)]
struct Page {
    text: String,
    label: String,
}

impl Page {
    /// What the next lines are about.
    fn group(&mut self, label: &str) {
        label.clone_into(&mut self.label);
    }

    fn line(&mut self, said: &str) {
        self.whole_line(&printable(said, LONGEST));
    }

    /// One that is printable and not cut.
    fn whole_line(&mut self, said: &str) {
        let label = std::mem::take(&mut self.label);
        let line = format!("{label:LABEL$}{said}");
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }
}

fn kind(report: &Report) -> &'static str {
    match (report.kind, report.is_whole()) {
        (Kind::Cuda, true) => "made by Stasis, with CUDA: whole",
        (Kind::Cuda, false) => "made by Stasis, with CUDA: not whole",
        (Kind::Plain, true) => "without CUDA: any runtime restores it",
        (Kind::Plain, false) => "without CUDA: not whole",
        (Kind::CriuPlugin, true) => "made by CRIU's plugin for CUDA, which restores it",
        (Kind::CriuPlugin, false) => "made by CRIU's plugin for CUDA: not whole",
        (Kind::Unfinished, _) => "not finished, or not made by Stasis: not restored",
        (Kind::Unreadable, _) => "cannot be read: not restored",
        (Kind::NoImage, _) => "no image",
    }
}

fn checkpoint(page: &mut Page, checkpoint: &Checkpoint, columns: Option<usize>) {
    let Checkpoint {
        container,
        created,
        created_by,
        driver,
        cuda,
        gpus,
        processes,
        job,
        flags: _,
        mounts: _,
        devices: _,
        phases,
    } = checkpoint;
    page.group("container");
    page.line(container);
    page.group("created");
    page.line(&format!("{created} by {created_by}"));
    page.group("driver");
    let driver = driver.as_deref().unwrap_or("of unknown version");
    page.line(&format!("{driver}, CUDA {cuda}"));
    for (number, gpu) in gpus.iter().enumerate() {
        page.group(&format!("GPU {number}"));
        let used = match gpu.used_bytes {
            Some(bytes) => format!("{} in use", size(bytes)),
            None => "use unknown".to_owned(),
        };
        page.line(&format!("{}, {}, {used}", gpu.name, size(gpu.memory_bytes)));
        page.line(&gpu.uuid);
    }
    page.group("processes");
    self::processes(page, processes, gpus);
    if let Some(job) = job {
        page.group("job");
        self::job(page, job);
    }
    if !phases.is_empty() {
        page.group("phases");
        self::phases(page, phases, columns);
    }
}

/// By the order of the restore. A GPU is named by its number above.
fn processes(page: &mut Page, processes: &[Process], gpus: &[Gpu]) {
    if processes.is_empty() {
        page.line("none with CUDA");
        return;
    }
    let number = |uuid: &String| match gpus.iter().position(|gpu| gpu.uuid == *uuid) {
        Some(number) => number.to_string(),
        None => printable(uuid, LONGEST),
    };
    let head = ["order", "pid", "GPU memory", "GPU", "command"].map(str::to_owned);
    let mut rows = vec![head];
    rows.extend(processes.iter().map(|process| {
        let numbers: Vec<_> = process.gpus.iter().map(number).collect();
        [
            process.order.to_string(),
            process.pid.to_string(),
            process.device_bytes.map_or_else(|| "unknown".to_owned(), size),
            if numbers.is_empty() { "unknown".to_owned() } else { numbers.join(",") },
            printable(&process.command, LONGEST),
        ]
    }));
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [order, pid, memory, gpu] = [0, 1, 2, 3].map(width);
    for [o, p, m, g, command] in &rows {
        page.whole_line(&format!("{o:>order$}  {p:>pid$}  {m:>memory$}  {g:gpu$}  {command}"));
    }
}

fn job(page: &mut Page, job: &Job) {
    match (job.file, &job.path) {
        (JobFile::Made, _) => page.line("made by Stasis for the annotation dev.stasis.job=file"),
        (JobFile::Dumped, _) => page.line("the container's own, CRIU brings it back"),
        (JobFile::Rootfs, path) => {
            page.line("the container's own, in its root file system:");
            page.line(path.as_deref().unwrap_or_default());
        }
    }
    page.line(&format!("{} bytes, SHA-256", job.bytes));
    page.line(&job.sha256);
    page.line(&format!("copy {JOB_FILE}: {}", copy(job.copy)));
}

fn copy(copy: JobCopy) -> &'static str {
    match copy {
        JobCopy::Whole => "whole",
        JobCopy::Missing => "not there",
        JobCopy::NotRegular => "not a regular file",
        JobCopy::WrongSize => "of another size",
        JobCopy::WrongDigest => "with other bytes",
        JobCopy::Unreadable => "cannot be read",
    }
}

fn phases(page: &mut Page, phases: &[Phase], columns: Option<usize>) {
    let all = phases.iter().fold(0_u64, |sum, phase| sum.saturating_add(phase.milliseconds));
    let most = phases.iter().map(|phase| phase.milliseconds).max().unwrap_or(0);
    let mut rows: Vec<_> = phases
        .iter()
        .map(|phase| {
            let name = printable(&phase.name, LONGEST);
            (name, phase.milliseconds.to_string(), Some(phase.milliseconds))
        })
        .collect();
    rows.push(("together".to_owned(), all.to_string(), None));
    let name = rows.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
    let time = rows.iter().map(|(_, time, _)| time.len()).max().unwrap_or(0);
    let before = LABEL + name + "  ".len() + time + " ms  ".len();
    let room = columns.unwrap_or(0).saturating_sub(before).min(LONGEST_BAR);
    for (phase, milliseconds, part) in &rows {
        let bar = part.map(|part| bar(part, most, room)).unwrap_or_default();
        page.whole_line(&format!("{phase:name$}  {milliseconds:>time$} ms  {bar}"));
    }
}

/// A bar of `part` where the longest, of `most`, fills the room. What took any time is seen.
fn bar(part: u64, most: u64, room: usize) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    if part == 0 || most == 0 || room == 0 {
        return String::new();
    }
    let eighths = u128::from(part) * (room as u128 * 8) / u128::from(most);
    let eighths = usize::try_from(eighths).unwrap_or(room * 8).max(1);
    let mut bar = "█".repeat(eighths / 8);
    bar.push(EIGHTHS[eighths % 8]);
    bar.trim_end().to_owned()
}

fn needs(page: &mut Page, needs: &Needs, checkpoint: Option<&Checkpoint>) {
    page.group("needs");
    match &needs.driver {
        Some(driver) => page.line(&format!("driver {driver}, no other")),
        None if needs.processes == 0 => page.line("no GPU"),
        None => page.line("the driver that it was made with, which is not known"),
    }
    for NeededGpu { uuid, name, memory_bytes, bytes } in &needs.gpus {
        let free = match bytes {
            Some(bytes) => format!("{} free", size(*bytes)),
            None => "room for its part".to_owned(),
        };
        let product = match (name, memory_bytes) {
            (Some(name), Some(memory)) => format!("{name}, {}, ", size(*memory)),
            _ => String::new(),
        };
        page.line(&format!("{product}{free}:"));
        page.line(&format!("  {uuid}"));
    }
    let unused = |gpu: &&VisibleGpu| needs.gpus.iter().all(|needed| needed.uuid != gpu.uuid);
    let unused: Vec<_> = needs.visible.iter().filter(unused).collect();
    if !unused.is_empty() {
        page.line("in the container besides, because it could see them:");
        for gpu in unused {
            page.line(&format!("  {}", gpu.uuid));
        }
    }
    let Some(checkpoint) = checkpoint else { return };
    page.group("flags");
    let flags = checkpoint.flags.join(" ");
    page.line(if flags.is_empty() { "none" } else { &flags });
    for (label, paths) in [("mounts", &checkpoint.mounts), ("devices", &checkpoint.devices)] {
        page.group(label);
        for path in paths {
            page.line(path);
        }
    }
}

fn host(page: &mut Page, host: &Host) {
    let Host { can_restore, problems, libcuda, driver, needs_device_map, gpus } = host;
    page.group("this host");
    page.line(match (can_restore, needs_device_map) {
        (true, false) => "can restore it",
        (true, true) => "can restore it, onto other GPUs of the same product",
        (false, _) => "cannot restore it:",
    });
    if *can_restore && gpus.iter().any(Target::is_short) {
        page.line("but has no room on a GPU now: a restore waits for it, and fails in the end");
    }
    for problem in problems {
        page.whole_line(problem);
    }
    if let Some(libcuda) = libcuda {
        let version = driver.as_deref().unwrap_or("of unknown version");
        page.line(&format!("driver {version}, {libcuda}"));
    }
    for gpu in gpus {
        let Some(target) = &gpu.target else { continue };
        let free = match (gpu.free_bytes, gpu.needed_bytes) {
            (Some(free), Some(needed)) if gpu.is_short() => {
                format!(", {} free now of {} needed", size(free), size(needed))
            }
            (Some(free), _) => format!(", {} free now", size(free)),
            (None, _) => String::new(),
        };
        if *target == gpu.uuid {
            page.line(&format!("has {target}{free}"));
        } else {
            page.line(&format!("for {}:", gpu.uuid));
            page.line(&format!("  {target}{free}"));
        }
    }
}

/// Bytes as people read them.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    // The largest unit of which there is one.
    let unit = (bytes.ilog2() / 10) as usize - 1;
    // Tenths, in integers, so that none is made by rounding.
    let one = 1_u128 << (10 * (unit + 1));
    let tenths = u128::from(bytes) * 10 / one;
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare(kind: Kind) -> Report {
        Report {
            path: "/var/lib/images/c1".into(),
            form: Form::Directory,
            compression: None,
            exported: None,
            kind,
            problems: Vec::new(),
            bytes_on_disk: 0,
            files: 0,
            checkpoint: None,
            restore: None,
            host: None,
        }
    }

    fn whole() -> Report {
        let uuid = |digit: &str| format!("GPU-{}-aaaa-bbbb-cccc-dddddddddddd", digit.repeat(8));
        let gpu = |digit, used_bytes| Gpu {
            uuid: uuid(digit),
            name: "NVIDIA H200".into(),
            memory_bytes: 150_754_820_096,
            used_bytes,
        };
        let process = |pid, order, command: &str, gpus, device_bytes| Process {
            pid,
            command: command.into(),
            order,
            gpus,
            device_bytes,
        };
        let needed = |digit, bytes| NeededGpu {
            uuid: uuid(digit),
            name: Some("NVIDIA H200".into()),
            memory_bytes: Some(150_754_820_096),
            bytes,
        };
        let phase = |name: &str, milliseconds| Phase { name: name.into(), milliseconds };
        Report {
            bytes_on_disk: 1_395_864_371,
            files: 34,
            checkpoint: Some(Checkpoint {
                container: "c1".into(),
                created: "2026-11-30T04:05:06Z".into(),
                created_by: "stasis-runc 0.1.0".into(),
                driver: Some("610.43.02".into()),
                cuda: "13.2".into(),
                gpus: vec![gpu("0", Some(67_108_864)), gpu("1", None)],
                processes: vec![
                    process(1, 0, "exporter", vec![uuid("0")], Some(67_108_864)),
                    process(117, 1, "importer", vec![uuid("0"), uuid("1"), uuid("2")], None),
                    process(118, 2, "importer", vec![], None),
                ],
                job: Some(Job {
                    file: JobFile::Made,
                    path: None,
                    bytes: 4096,
                    sha256: "0123456789abcdef".repeat(4),
                    copy: JobCopy::Whole,
                }),
                flags: vec!["--tcp-established", "--file-locks"],
                mounts: vec!["/usr/lib/x86_64-linux-gnu/libcuda.so.1".into()],
                devices: vec!["/dev/nvidia0".into(), "/dev/nvidiactl".into()],
                phases: vec![phase("lock", 3), phase("cuda-checkpoint", 1204)],
            }),
            restore: Some(Needs {
                driver: Some("610.43.02".into()),
                processes: 3,
                gpus: vec![needed("0", Some(67_108_864)), needed("1", None)],
                visible: ["0", "1", "7"]
                    .map(|number| VisibleGpu { uuid: uuid(number), name: None })
                    .into(),
            }),
            host: Some(Host {
                can_restore: true,
                problems: Vec::new(),
                libcuda: Some("/usr/lib/libcuda.so.1".into()),
                driver: Some("610.43.02".into()),
                needs_device_map: true,
                gpus: vec![
                    Target {
                        uuid: uuid("0"),
                        target: Some(uuid("0")),
                        free_bytes: Some(150_323_855_360),
                        needed_bytes: Some(1 << 30),
                    },
                    Target {
                        uuid: uuid("1"),
                        target: Some(uuid("5")),
                        free_bytes: None,
                        needed_bytes: None,
                    },
                ],
            }),
            ..bare(Kind::Cuda)
        }
    }

    #[test]
    fn an_image_with_a_job_reads_like_this() {
        insta::assert_snapshot!(text(&whole(), None), @r"
        image      /var/lib/images/c1
                   made by Stasis, with CUDA: whole
                   1.2 GiB on disk, 34 files
        container  c1
        created    2026-11-30T04:05:06Z by stasis-runc 0.1.0
        driver     610.43.02, CUDA 13.2
        GPU 0      NVIDIA H200, 140.4 GiB, 64.0 MiB in use
                   GPU-00000000-aaaa-bbbb-cccc-dddddddddddd
        GPU 1      NVIDIA H200, 140.4 GiB, use unknown
                   GPU-11111111-aaaa-bbbb-cccc-dddddddddddd
        processes  order  pid  GPU memory  GPU                                           command
                       0    1    64.0 MiB  0                                             exporter
                       1  117     unknown  0,1,GPU-22222222-aaaa-bbbb-cccc-dddddddddddd  importer
                       2  118     unknown  unknown                                       importer
        job        made by Stasis for the annotation dev.stasis.job=file
                   4096 bytes, SHA-256
                   0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
                   copy stasis.job: whole
        phases     lock                3 ms
                   cuda-checkpoint  1204 ms
                   together         1207 ms
        needs      driver 610.43.02, no other
                   NVIDIA H200, 140.4 GiB, 64.0 MiB free:
                     GPU-00000000-aaaa-bbbb-cccc-dddddddddddd
                   NVIDIA H200, 140.4 GiB, room for its part:
                     GPU-11111111-aaaa-bbbb-cccc-dddddddddddd
                   in the container besides, because it could see them:
                     GPU-77777777-aaaa-bbbb-cccc-dddddddddddd
        flags      --tcp-established --file-locks
        mounts     /usr/lib/x86_64-linux-gnu/libcuda.so.1
        devices    /dev/nvidia0
                   /dev/nvidiactl
        this host  can restore it, onto other GPUs of the same product
                   driver 610.43.02, /usr/lib/libcuda.so.1
                   has GPU-00000000-aaaa-bbbb-cccc-dddddddddddd, 140.0 GiB free now
                   for GPU-11111111-aaaa-bbbb-cccc-dddddddddddd:
                     GPU-55555555-aaaa-bbbb-cccc-dddddddddddd
        ");
    }

    #[test]
    fn an_image_with_a_job_is_this_object() {
        let mut report = whole();
        let checkpoint = report.checkpoint.as_mut().unwrap();
        checkpoint.gpus.remove(0);
        checkpoint.processes.truncate(1);
        checkpoint.mounts.clear();
        report.restore.as_mut().unwrap().gpus.truncate(1);
        report.restore.as_mut().unwrap().visible.clear();
        report.host.as_mut().unwrap().gpus.remove(0);
        insta::assert_snapshot!(json(&report), @r#"
        {
          "whole": true,
          "path": "/var/lib/images/c1",
          "form": "directory",
          "compression": null,
          "exported": null,
          "kind": "cuda",
          "problems": [],
          "bytes_on_disk": 1395864371,
          "files": 34,
          "checkpoint": {
            "container": "c1",
            "created": "2026-11-30T04:05:06Z",
            "created_by": "stasis-runc 0.1.0",
            "driver": "610.43.02",
            "cuda": "13.2",
            "gpus": [
              {
                "uuid": "GPU-11111111-aaaa-bbbb-cccc-dddddddddddd",
                "name": "NVIDIA H200",
                "memory_bytes": 150754820096,
                "used_bytes": null
              }
            ],
            "processes": [
              {
                "pid": 1,
                "command": "exporter",
                "order": 0,
                "gpus": [
                  "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd"
                ],
                "device_bytes": 67108864
              }
            ],
            "job": {
              "file": "made",
              "path": null,
              "bytes": 4096,
              "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
              "copy": "whole"
            },
            "flags": [
              "--tcp-established",
              "--file-locks"
            ],
            "mounts": [],
            "devices": [
              "/dev/nvidia0",
              "/dev/nvidiactl"
            ],
            "phases": [
              {
                "name": "lock",
                "milliseconds": 3
              },
              {
                "name": "cuda-checkpoint",
                "milliseconds": 1204
              }
            ]
          },
          "restore": {
            "driver": "610.43.02",
            "gpus": [
              {
                "uuid": "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd",
                "name": "NVIDIA H200",
                "memory_bytes": 150754820096,
                "bytes": 67108864
              }
            ],
            "visible": []
          },
          "host": {
            "can_restore": true,
            "problems": [],
            "libcuda": "/usr/lib/libcuda.so.1",
            "driver": "610.43.02",
            "needs_device_map": true,
            "gpus": [
              {
                "uuid": "GPU-11111111-aaaa-bbbb-cccc-dddddddddddd",
                "target": "GPU-55555555-aaaa-bbbb-cccc-dddddddddddd",
                "free_bytes": null,
                "needed_bytes": null
              }
            ]
          }
        }
        "#);
    }

    #[test]
    fn what_is_just_enough_is_enough() {
        let mut target = whole().host.unwrap().gpus.remove(0);
        target.needed_bytes = target.free_bytes;
        assert!(!target.is_short());
        target.needed_bytes = target.free_bytes.map(|bytes| bytes + 1);
        assert!(target.is_short());
    }

    #[test]
    fn that_there_is_no_room_now_is_said() {
        let mut report = whole();
        let host = report.host.as_mut().unwrap();
        host.gpus[0].needed_bytes = Some(150 << 30);
        let text = text(&report, None);
        for said in [
            "can restore it, onto other GPUs of the same product\n           but has no room on a GPU now",
            ", 140.0 GiB free now of 150.0 GiB needed\n",
        ] {
            assert!(text.contains(said), "{said:?} is not in {text}");
        }
    }

    #[test]
    fn an_image_with_problems_reads_like_this() {
        let mut report = whole();
        report.problems = vec!["the copy of the job file, stasis.job, is not there".into()];
        let checkpoint = report.checkpoint.as_mut().unwrap();
        checkpoint.driver = None;
        checkpoint.gpus.clear();
        checkpoint.processes.truncate(1);
        checkpoint.flags.clear();
        checkpoint.mounts.clear();
        checkpoint.phases.clear();
        let job = checkpoint.job.as_mut().unwrap();
        (job.file, job.path) = (JobFile::Rootfs, Some("/srv/job".into()));
        job.copy = JobCopy::Missing;
        report.restore.as_mut().unwrap().driver = None;
        insta::assert_snapshot!(text(&report, None), @r"
        image      /var/lib/images/c1
                   made by Stasis, with CUDA: not whole
                   1.2 GiB on disk, 34 files
        problem    the copy of the job file, stasis.job, is not there
        container  c1
        created    2026-11-30T04:05:06Z by stasis-runc 0.1.0
        driver     of unknown version, CUDA 13.2
        processes  order  pid  GPU memory  GPU                                       command
                       0    1    64.0 MiB  GPU-00000000-aaaa-bbbb-cccc-dddddddddddd  exporter
        job        the container's own, in its root file system:
                   /srv/job
                   4096 bytes, SHA-256
                   0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
                   copy stasis.job: not there
        needs      the driver that it was made with, which is not known
                   NVIDIA H200, 140.4 GiB, 64.0 MiB free:
                     GPU-00000000-aaaa-bbbb-cccc-dddddddddddd
                   NVIDIA H200, 140.4 GiB, room for its part:
                     GPU-11111111-aaaa-bbbb-cccc-dddddddddddd
                   in the container besides, because it could see them:
                     GPU-77777777-aaaa-bbbb-cccc-dddddddddddd
        flags      none
        devices    /dev/nvidia0
                   /dev/nvidiactl
        this host  can restore it, onto other GPUs of the same product
                   driver 610.43.02, /usr/lib/libcuda.so.1
                   has GPU-00000000-aaaa-bbbb-cccc-dddddddddddd, 140.0 GiB free now
                   for GPU-11111111-aaaa-bbbb-cccc-dddddddddddd:
                     GPU-55555555-aaaa-bbbb-cccc-dddddddddddd
        ");
    }

    #[test]
    fn on_a_terminal_each_phase_has_a_bar() {
        let mut report = whole();
        let checkpoint = report.checkpoint.as_mut().unwrap();
        for (name, milliseconds) in [("criu-dump", 602), ("unlock", 0)] {
            checkpoint.phases.push(Phase { name: name.into(), milliseconds });
        }
        let phases = |columns| -> String {
            let text = text(&report, columns);
            let lines = text.lines().skip_while(|line| !line.starts_with("phases")).take(5);
            lines.collect::<Vec<_>>().join("\n")
        };
        insta::assert_snapshot!(phases(Some(80)), @r"
        phases     lock                3 ms  ▏
                   cuda-checkpoint  1204 ms  ████████████████████████████████████████
                   criu-dump         602 ms  ████████████████████
                   unlock              0 ms
                   together         1809 ms
        ");
        // In a narrow one they are shorter, or none.
        for columns in 0..80 {
            for line in phases(Some(columns)).lines() {
                assert!(line.chars().count() <= columns.max(37), "{columns}: {line}");
            }
        }
        assert_eq!(phases(Some(30)), phases(None));
        assert!(!phases(None).contains(['█', '▏']));
    }

    #[test]
    fn bars_are_in_proportion() {
        for (part, most, room, want) in [
            (0, 10, 10, ""),
            (1, 10_000, 10, "▏"),
            (5, 10, 10, "█████"),
            (10, 10, 10, "██████████"),
            (10, 10, 0, ""),
            (0, 0, 10, ""),
            (3, 16, 2, "▍"),
            (u64::MAX, u64::MAX, 3, "███"),
        ] {
            assert_eq!(bar(part, most, room), want, "{part} of {most} in {room}");
        }
    }

    #[test]
    fn an_archive_on_a_host_that_cannot_restore_it_reads_like_this() {
        let mut report = whole();
        report.path = "/srv/c1.tar.zst".into();
        report.form = Form::Archive;
        report.compression = Some(Compression::Zstd);
        report.exported = Some(Exported {
            id: Some("8f2c".into()),
            name: Some("c\u{7}1".into()),
            image: Some("localhost/train:1".into()),
        });
        report.checkpoint = None;
        let host = report.host.as_mut().unwrap();
        host.can_restore = false;
        host.problems = vec!["it was made with driver 610.43.02, and this host has 580.1".into()];
        host.driver = None;
        host.gpus.clear();
        insta::assert_snapshot!(text(&report, None), @r"
        image      /srv/c1.tar.zst
                   made by Stasis, with CUDA: whole
                   1.2 GiB on disk, 34 files
                   an archive of podman container checkpoint --export, compressed with zstd
        exported   container 8f2c
                   name c\u{7}1
                   of the image localhost/train:1
        needs      driver 610.43.02, no other
                   NVIDIA H200, 140.4 GiB, 64.0 MiB free:
                     GPU-00000000-aaaa-bbbb-cccc-dddddddddddd
                   NVIDIA H200, 140.4 GiB, room for its part:
                     GPU-11111111-aaaa-bbbb-cccc-dddddddddddd
                   in the container besides, because it could see them:
                     GPU-77777777-aaaa-bbbb-cccc-dddddddddddd
        this host  cannot restore it:
                   it was made with driver 610.43.02, and this host has 580.1
                   driver of unknown version, /usr/lib/libcuda.so.1
        ");
    }

    #[test]
    fn an_image_without_cuda_reads_like_this() {
        insta::assert_snapshot!(text(&bare(Kind::Plain), None), @r"
        image      /var/lib/images/c1
                   without CUDA: any runtime restores it
                   0 bytes on disk, 0 files
        ");
    }

    #[test]
    fn an_image_without_a_manifest_is_this_object() {
        let mut report = bare(Kind::Unfinished);
        report.problems.push("it did not finish".into());
        insta::assert_snapshot!(json(&report), @r#"
        {
          "whole": false,
          "path": "/var/lib/images/c1",
          "form": "directory",
          "compression": null,
          "exported": null,
          "kind": "unfinished",
          "problems": [
            "it did not finish"
          ],
          "bytes_on_disk": 0,
          "files": 0,
          "checkpoint": null,
          "restore": null,
          "host": null
        }
        "#);
    }

    #[test]
    fn a_container_that_loaded_cuda_and_did_not_use_it_needs_no_gpu() {
        let mut report = whole();
        let checkpoint = report.checkpoint.as_mut().unwrap();
        checkpoint.gpus.clear();
        checkpoint.processes.clear();
        checkpoint.job = None;
        report.restore =
            Some(Needs { driver: None, processes: 0, gpus: Vec::new(), visible: Vec::new() });
        report.host = None;
        let text = text(&report, None);
        assert!(text.contains("\nprocesses  none with CUDA\n"), "{text}");
        assert!(text.contains("\nneeds      no GPU\n"), "{text}");
    }

    #[test]
    fn names_from_the_image_cannot_forge_lines() {
        let mut report = whole();
        let checkpoint = report.checkpoint.as_mut().unwrap();
        checkpoint.container = "c\nproblem    none".into();
        checkpoint.processes[0].command = "\u{202e}\u{1b}[2J".into();
        checkpoint.processes[2].gpus = vec!["\r".into()];
        checkpoint.phases[0].name = "x".repeat(4096);
        checkpoint.devices[0] = "/\u{7f}".into();
        let lines = text(&report, None).lines().count();
        assert_eq!(lines, text(&whole(), None).lines().count());
        for line in text(&report, None).lines() {
            assert!(!line.contains(|c: char| c.is_control() || c == '\u{202e}'), "{line:?}");
            assert!(line.chars().count() < 200, "{line:?}");
        }
    }

    #[test]
    fn sizes_have_a_unit_and_a_tenth() {
        for (bytes, want) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB"),
            (1_048_575, "1023.9 KiB"),
            (67_108_864, "64.0 MiB"),
            (150_754_820_096, "140.4 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(size(bytes), want);
        }
    }
}
