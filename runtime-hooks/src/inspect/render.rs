//! A report as text for people and as JSON for programs.

use serde::Serialize;
use stasis_config::manifest::JOB_FILE;
use stasis_config::text::printable;

use super::{Checkpoint, Gpu, Job, JobCopy, JobFile, Kind, Needs, Phase, Process, Report};

/// Where what is said begins.
const LABEL: usize = "container".len() + 2;
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

/// Short lines, with what they are about before the first of each group.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut page = Page::default();
    page.group("image");
    page.line(&report.path);
    page.line(kind(report));
    page.line(&format!("{} on disk, {} files", size(report.bytes_on_disk), report.files));
    for problem in &report.problems {
        page.group("problem");
        page.whole_line(problem);
    }
    if let Some(checkpoint) = &report.checkpoint {
        self::checkpoint(&mut page, checkpoint);
    }
    if let Some(needs) = &report.restore {
        self::needs(&mut page, needs);
    }
    page.text
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

fn checkpoint(page: &mut Page, checkpoint: &Checkpoint) {
    let Checkpoint {
        container,
        created,
        created_by,
        driver,
        cuda,
        gpus,
        processes,
        job,
        flags,
        mounts,
        devices,
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
    page.group("flags");
    page.line(&if flags.is_empty() { "none".to_owned() } else { flags.join(" ") });
    for (label, paths) in [("mounts", mounts), ("devices", devices)] {
        page.group(label);
        for path in paths {
            page.line(path);
        }
    }
    if !phases.is_empty() {
        page.group("phases");
        self::phases(page, phases);
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

fn phases(page: &mut Page, phases: &[Phase]) {
    let all = phases.iter().fold(0_u64, |sum, phase| sum.saturating_add(phase.milliseconds));
    let mut rows: Vec<_> = phases
        .iter()
        .map(|phase| (printable(&phase.name, LONGEST), phase.milliseconds.to_string()))
        .collect();
    rows.push(("together".to_owned(), all.to_string()));
    let name = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let time = rows.iter().map(|(_, time)| time.len()).max().unwrap_or(0);
    for (phase, milliseconds) in &rows {
        page.whole_line(&format!("{phase:name$}  {milliseconds:>time$} ms"));
    }
}

fn needs(page: &mut Page, needs: &Needs) {
    page.group("needs");
    match &needs.driver {
        Some(driver) => page.line(&format!("driver {driver}, no other")),
        None if needs.gpus.is_empty() => page.line("no GPU"),
        None => page.line("the driver that it was made with, which is not known"),
    }
    if let Some(branch) = needs.minimum_branch {
        page.line(&format!("a driver from branch {branch} on, for its job (jobs.minimum-driver)"));
    }
    for gpu in &needs.gpus {
        let free = match gpu.bytes {
            Some(bytes) => format!("{} free", size(bytes)),
            None => "room for its part".to_owned(),
        };
        page.line(&format!("{}, {free}", gpu.uuid));
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
    use super::super::NeededGpu;
    use super::*;

    fn bare(kind: Kind) -> Report {
        Report {
            path: "/var/lib/images/c1".into(),
            kind,
            problems: Vec::new(),
            bytes_on_disk: 0,
            files: 0,
            checkpoint: None,
            restore: None,
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
                minimum_branch: Some(610),
                gpus: vec![
                    NeededGpu { uuid: uuid("0"), bytes: Some(67_108_864) },
                    NeededGpu { uuid: uuid("1"), bytes: None },
                ],
            }),
            ..bare(Kind::Cuda)
        }
    }

    #[test]
    fn an_image_with_a_job_reads_like_this() {
        insta::assert_snapshot!(text(&whole()), @r"
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
        flags      --tcp-established --file-locks
        mounts     /usr/lib/x86_64-linux-gnu/libcuda.so.1
        devices    /dev/nvidia0
                   /dev/nvidiactl
        phases     lock                3 ms
                   cuda-checkpoint  1204 ms
                   together         1207 ms
        needs      driver 610.43.02, no other
                   a driver from branch 610 on, for its job (jobs.minimum-driver)
                   GPU-00000000-aaaa-bbbb-cccc-dddddddddddd, 64.0 MiB free
                   GPU-11111111-aaaa-bbbb-cccc-dddddddddddd, room for its part
        ");
    }

    #[test]
    fn an_image_with_a_job_is_this_object() {
        let mut report = whole();
        report.checkpoint.as_mut().unwrap().processes.truncate(2);
        report.checkpoint.as_mut().unwrap().mounts.clear();
        insta::assert_snapshot!(json(&report), @r#"
        {
          "whole": true,
          "path": "/var/lib/images/c1",
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
                "uuid": "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd",
                "name": "NVIDIA H200",
                "memory_bytes": 150754820096,
                "used_bytes": 67108864
              },
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
              },
              {
                "pid": 117,
                "command": "importer",
                "order": 1,
                "gpus": [
                  "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd",
                  "GPU-11111111-aaaa-bbbb-cccc-dddddddddddd",
                  "GPU-22222222-aaaa-bbbb-cccc-dddddddddddd"
                ],
                "device_bytes": null
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
            "minimum_branch": 610,
            "gpus": [
              {
                "uuid": "GPU-00000000-aaaa-bbbb-cccc-dddddddddddd",
                "bytes": 67108864
              },
              {
                "uuid": "GPU-11111111-aaaa-bbbb-cccc-dddddddddddd",
                "bytes": null
              }
            ]
          }
        }
        "#);
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
        insta::assert_snapshot!(text(&report), @r"
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
        flags      none
        devices    /dev/nvidia0
                   /dev/nvidiactl
        needs      the driver that it was made with, which is not known
                   a driver from branch 610 on, for its job (jobs.minimum-driver)
                   GPU-00000000-aaaa-bbbb-cccc-dddddddddddd, 64.0 MiB free
                   GPU-11111111-aaaa-bbbb-cccc-dddddddddddd, room for its part
        ");
    }

    #[test]
    fn an_image_without_cuda_reads_like_this() {
        insta::assert_snapshot!(text(&bare(Kind::Plain)), @r"
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
          "kind": "unfinished",
          "problems": [
            "it did not finish"
          ],
          "bytes_on_disk": 0,
          "files": 0,
          "checkpoint": null,
          "restore": null
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
        report.restore = Some(Needs { driver: None, minimum_branch: None, gpus: Vec::new() });
        let text = text(&report);
        assert!(text.contains("\nprocesses  none with CUDA\n"), "{text}");
        assert!(text.ends_with("\nneeds      no GPU\n"), "{text}");
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
        let lines = text(&report).lines().count();
        assert_eq!(lines, text(&whole()).lines().count());
        for line in text(&report).lines() {
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
