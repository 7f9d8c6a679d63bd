//! Looks at an image and fills in the report.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::libc;
use stasis_config::Manifest;
use stasis_config::manifest::{self, JOB_FILE};
use stasis_config::text::printable;

use super::archive::{self, Archive, ArchiveError};
use super::directory::Directory;
use super::source::{List, Source, Unfit};
use super::{
    Checkpoint, Form, Gpu, Job, JobCopy, JobFile, Kind, NeededGpu, Needs, Phase, Process, Report,
    VisibleGpu,
};
use crate::error::chain;
use crate::image;

/// Problems quote what a manifest says.
const LONGEST: usize = 1000;

/// An image that cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// A directory.
    #[error("cannot open the image {}", printable(&path.to_string_lossy(), LONGEST))]
    Directory {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file.
    #[error("cannot read the image {}", printable(&path.to_string_lossy(), LONGEST))]
    Archive {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: ArchiveError,
    },
}

/// Looks at the image in `image`, a directory or an archive. `watch` is told how far an
/// archive was read.
///
/// # Errors
/// If it cannot be opened, or is an archive in which there is no image. Whatever else is wrong stands
/// in the report.
pub fn read(image: &Path, watch: archive::Watch<'_>) -> Result<Report, InspectError> {
    let no_directory = |source| InspectError::Directory { path: image.to_owned(), source };
    let no_archive = |source| InspectError::Archive { path: image.to_owned(), source };
    // Before it is opened: to open a device can already do something.
    let kind = image.metadata().map_err(no_directory)?.file_type();
    if kind.is_dir() {
        let directory = Directory::open(image).map_err(no_directory)?;
        let mut report = report(&directory);
        report.path = directory.path().to_string_lossy().into_owned();
        return Ok(report);
    }
    if kind.is_char_device() || kind.is_block_device() || kind.is_fifo() || kind.is_socket() {
        let reason = "it is neither a directory nor a regular file".to_owned();
        return Err(no_archive(ArchiveError::NotPodmans(reason)));
    }
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(image);
    let file = file.map_err(|error| no_archive(error.into()))?;
    let archive = Archive::read(image, file, watch).map_err(no_archive)?;
    let mut report = report(&archive);
    report.path = image.to_string_lossy().into_owned();
    report.form = Form::Archive;
    report.compression = Some(archive.compression());
    report.exported = archive.exported();
    Ok(report)
}

fn report(source: &impl Source) -> Report {
    let mut problems = Problems::default();
    let (kind, manifest) = kind(source, &mut problems);
    let checkpoint = manifest.as_deref().map(|manifest| {
        let job = manifest.job.as_ref().map(|job| self::job(job, source, &mut problems));
        checkpoint(manifest, job)
    });
    let restore = manifest.as_deref().map(needs);
    let (usage, why) = source.usage();
    if let Some(why) = why {
        problems.add(&format!("its files cannot be counted: {why}"));
    }
    for problem in source.problems() {
        problems.add(&problem);
    }
    Report {
        path: String::new(),
        form: Form::Directory,
        compression: None,
        exported: None,
        kind,
        problems: problems.0,
        bytes_on_disk: usage.bytes,
        files: usage.files,
        checkpoint,
        restore,
        host: None,
    }
}

/// What stands in the way of a restore.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn add(&mut self, problem: &str) {
        self.0.push(printable(problem, LONGEST));
    }
}

/// What the image is, and its manifest, if it has one.
fn kind(source: &impl Source, problems: &mut Problems) -> (Kind, Option<Box<Manifest>>) {
    // An image without a manifest is searched for names, so these two must be what they should be.
    let inventory = list(source, List::Inventory, problems);
    list(source, List::Files, problems);
    let unfit = !problems.0.is_empty();
    if unfit && !source.has_manifest() {
        return (Kind::Unreadable, None);
    }
    let name = List::Inventory.name();
    match source.manifest() {
        Ok(Some(manifest)) => {
            if !inventory && !unfit {
                problems.add(&format!("there is no {name} in it: it is not all of an image"));
            }
            (Kind::Cuda, Some(Box::new(manifest)))
        }
        Ok(None) if source.names(List::Inventory) => (Kind::CriuPlugin, None),
        Ok(None) if source.names(List::Files) => {
            problems.add(&image::without_mark());
            (Kind::Unfinished, None)
        }
        Ok(None) if inventory => (Kind::Plain, None),
        Ok(None) => {
            problems.add(&format!(
                "there is no {name} in it: it is not an image of CRIU, or the dump did not finish"
            ));
            (Kind::NoImage, None)
        }
        Err(error) => {
            problems.add(&chain(&error));
            (Kind::Unreadable, None)
        }
    }
}

/// Whether a file of CRIU's is there. One that is there and cannot be read is a problem.
fn list(source: &impl Source, list: List, problems: &mut Problems) -> bool {
    let name = list.name();
    match source.list(list) {
        Ok(()) => return true,
        Err(Unfit::Missing) => {}
        Err(Unfit::NotRegular) => problems.add(&format!("{name} is not a regular file")),
        Err(Unfit::TooLarge(bytes)) => {
            let max = list.max();
            problems.add(&format!("{name} has {bytes} bytes, expected at most {max}"));
        }
        Err(Unfit::Unreadable(error)) => problems.add(&format!("{name} cannot be read: {error}")),
    }
    false
}

/// The job, with its copy compared.
fn job(job: &manifest::Job, source: &impl Source, problems: &mut Problems) -> Job {
    let (file, path) = match &job.file {
        manifest::JobFile::Made => (JobFile::Made, None),
        manifest::JobFile::Dumped => (JobFile::Dumped, None),
        manifest::JobFile::Rootfs { path, .. } => (JobFile::Rootfs, Some(path.clone())),
    };
    let (copy, why) = copy(job, source);
    // What CRIU brings back itself is not taken from the copy.
    let dispensable = copy == JobCopy::Missing && file == JobFile::Dumped;
    if let Some(why) = why.filter(|_| !dispensable) {
        problems.add(&format!("the copy of the job file, {JOB_FILE}, {why}"));
    }
    Job { file, path, bytes: job.bytes, sha256: job.sha256.clone(), copy }
}

/// What the copy is, and what is wrong with it.
fn copy(job: &manifest::Job, source: &impl Source) -> (JobCopy, Option<String>) {
    // The manifest has bounded its size.
    let content = match source.job(job.bytes) {
        Ok(content) => content,
        Err(Unfit::Missing) => return (JobCopy::Missing, Some("is not there".to_owned())),
        Err(Unfit::NotRegular) => {
            return (JobCopy::NotRegular, Some("is not a regular file".to_owned()));
        }
        Err(Unfit::TooLarge(bytes)) => {
            let reason = format!("has not {} bytes but {bytes}", job.bytes);
            return (JobCopy::WrongSize, Some(reason));
        }
        Err(Unfit::Unreadable(error)) => {
            return (JobCopy::Unreadable, Some(format!("cannot be read: {error}")));
        }
    };
    let bytes = content.len() as u64;
    if bytes != job.bytes {
        let found = if bytes > job.bytes { "more".to_owned() } else { bytes.to_string() };
        return (JobCopy::WrongSize, Some(format!("has not {} bytes but {found}", job.bytes)));
    }
    let sha256 = crate::cuda::digest(&content);
    if sha256 != job.sha256 {
        let reason = format!("has not the SHA-256 of the manifest but {sha256}");
        return (JobCopy::WrongDigest, Some(reason));
    }
    (JobCopy::Whole, None)
}

fn checkpoint(manifest: &Manifest, job: Option<Job>) -> Checkpoint {
    let used = used(manifest);
    let all_known = manifest.processes.iter().all(|process| !process.gpus.is_empty());
    let gpu = |gpu: &manifest::Gpu| Gpu {
        uuid: gpu.uuid.clone(),
        name: gpu.name.clone(),
        memory_bytes: gpu.memory_bytes,
        used_bytes: match used.get(gpu.uuid.as_str()) {
            Some(bytes) => *bytes,
            None => all_known.then_some(0),
        },
    };
    let process = |process: &manifest::Process| Process {
        pid: process.pid,
        command: process.command.clone(),
        order: process.order,
        gpus: process.gpus.clone(),
        device_bytes: process.device_bytes,
    };
    let mut processes: Vec<_> = manifest.processes.iter().map(process).collect();
    processes.sort_by_key(|process| process.order);
    let phase = |phase: &manifest::Phase| Phase {
        name: phase.name.clone(),
        milliseconds: phase.milliseconds,
    };
    let cuda = manifest.driver.cuda;
    Checkpoint {
        container: manifest.container.clone(),
        created: manifest.created.clone(),
        created_by: manifest.created_by.clone(),
        driver: driver(manifest),
        cuda: format!("{}.{}", cuda / 1000, cuda % 1000 / 10),
        gpus: manifest.gpus.iter().map(gpu).collect(),
        processes,
        job,
        flags: flags(manifest.dump),
        mounts: manifest.gpu_mounts.clone(),
        devices: manifest.gpu_devices.clone(),
        phases: manifest.phases.iter().map(phase).collect(),
    }
}

fn driver(manifest: &Manifest) -> Option<String> {
    Some(manifest.driver.version.clone()).filter(|version| !version.is_empty())
}

/// The options of the runtime's `restore` that stand for them.
fn flags(dump: manifest::Dump) -> Vec<&'static str> {
    let manifest::Dump { tcp_established, external_unix_sockets, shell_job, file_locks } = dump;
    [
        (tcp_established, "--tcp-established"),
        (external_unix_sockets, "--ext-unix-sk"),
        (shell_job, "--shell-job"),
        (file_locks, "--file-locks"),
    ]
    .into_iter()
    .filter_map(|(set, flag)| set.then_some(flag))
    .collect()
}

/// What the processes held of each GPU that one of them used. Of a process on several it is not
/// known how much on which.
fn used(manifest: &Manifest) -> BTreeMap<&str, Option<u64>> {
    let mut used = BTreeMap::new();
    for process in &manifest.processes {
        let bytes = process.device_bytes.filter(|_| process.gpus.len() == 1);
        for uuid in &process.gpus {
            let sum = used.entry(uuid.as_str()).or_insert(Some(0_u64));
            *sum = sum.zip(bytes).map(|(sum, bytes)| sum.saturating_add(bytes));
        }
    }
    used
}

fn needs(manifest: &Manifest) -> Needs {
    let known = |uuid: &str| manifest.gpus.iter().find(|gpu| gpu.uuid == uuid);
    let gpu = |(uuid, bytes): (&str, Option<u64>)| {
        let known = known(uuid);
        NeededGpu {
            uuid: uuid.to_owned(),
            name: known.map(|gpu| gpu.name.clone()),
            memory_bytes: known.map(|gpu| gpu.memory_bytes),
            bytes,
        }
    };
    let visible = |node: &manifest::GpuNode| VisibleGpu {
        uuid: node.uuid.clone(),
        name: known(&node.uuid).map(|gpu| gpu.name.clone()),
    };
    let nodes = manifest.gpu_nodes.iter().filter(|_| !manifest.processes.is_empty());
    Needs {
        // The driver is not asked about an image in which nothing has a context.
        driver: driver(manifest).filter(|_| !manifest.processes.is_empty()),
        processes: manifest.processes.len(),
        gpus: used(manifest).into_iter().map(gpu).collect(),
        visible: nodes.map(visible).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::unistd::mkfifo;

    use std::fs;

    use nix::sys::stat::Mode;

    use super::super::render;
    use super::*;

    const INVENTORY: &str = List::Inventory.name();
    const FILES: &str = List::Files.name();

    fn read(image: &Path) -> Result<Report, InspectError> {
        super::read(image, &|_, _| ())
    }

    /// SHA-256 of `job`, as sha256sum prints it.
    const OF_JOB: &str = "5e8c9902207afaeb7120430c585a445f21e92932081d64bc99f80e4925bcb002";

    fn manifest(file: Option<manifest::JobFile>) -> Manifest {
        let uuid = |number: u32| format!("GPU-{number}");
        let process = |pid, order, gpus: &[u32], device_bytes| manifest::Process {
            pid,
            command: "rank".into(),
            order,
            gpus: gpus.iter().copied().map(uuid).collect(),
            device_bytes,
        };
        Manifest {
            version: manifest::VERSION,
            created: "2026-11-30T04:05:06Z".into(),
            created_by: "stasis-runc 0.1.0".into(),
            container: "c1".into(),
            driver: manifest::Driver { version: "610.43.02".into(), cuda: 13_020 },
            gpus: vec![
                manifest::Gpu { uuid: uuid(0), name: "NVIDIA H200".into(), memory_bytes: 1 << 37 },
                manifest::Gpu { uuid: uuid(1), name: "NVIDIA H200".into(), memory_bytes: 1 << 37 },
            ],
            processes: vec![
                process(9, 2, &[], None),
                process(7, 1, &[0], Some(3 << 20)),
                process(1, 0, &[0], Some(1 << 20)),
                process(12, 3, &[1], None),
            ],
            job: file.map(|file| manifest::Job { bytes: 3, sha256: OF_JOB.into(), file }),
            dump: manifest::Dump {
                tcp_established: true,
                file_locks: true,
                ..manifest::Dump::default()
            },
            gpu_mounts: vec!["/usr/lib/libcuda.so.1".into()],
            gpu_devices: vec!["/dev/nvidia0".into()],
            gpu_nodes: vec![manifest::GpuNode {
                path: "/dev/nvidia0".into(),
                uuid: "GPU-0".into(),
            }],
            phases: vec![manifest::Phase { name: "lock".into(), milliseconds: 3 }],
        }
    }

    /// An image of CRIU's in which this library is mapped.
    fn image(mapped: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(INVENTORY), "").unwrap();
        fs::write(directory.path().join(FILES), mapped).unwrap();
        directory
    }

    fn with_job(file: manifest::JobFile) -> tempfile::TempDir {
        let directory = image("libcuda.so.1");
        manifest(Some(file)).write(directory.path()).unwrap();
        fs::write(directory.path().join(JOB_FILE), "job").unwrap();
        directory
    }

    fn of(directory: &tempfile::TempDir) -> Report {
        let report = read(directory.path()).unwrap();
        // Whatever an image is, it can be shown.
        assert!(
            render::text(&report, Some(80)).lines().all(|line| !line.contains(char::is_control))
        );
        assert!(render::json(&report).ends_with("}\n"));
        report
    }

    fn problem(report: &Report) -> &str {
        assert_eq!(report.problems.len(), 1, "{:?}", report.problems);
        &report.problems[0]
    }

    #[test]
    fn an_image_without_a_manifest_is_told_by_its_names() {
        let directory = image("/usr/lib/libc.so.6");
        let report = of(&directory);
        assert_eq!((report.kind, report.is_whole(), report.files), (Kind::Plain, true, 2));
        assert_eq!((report.checkpoint, report.restore), (None, None));

        let directory = image("/usr/lib/libcuda.so.580.159.04");
        let report = of(&directory);
        assert_eq!((report.kind, report.is_whole()), (Kind::Unfinished, false));
        assert!(problem(&report).contains("no stasis.json"));

        fs::write(directory.path().join(INVENTORY), "..cuda_plugin..").unwrap();
        assert_eq!((of(&directory).kind, of(&directory).is_whole()), (Kind::CriuPlugin, true));
    }

    #[test]
    fn a_directory_without_an_inventory_is_no_image() {
        let directory = tempfile::tempdir().unwrap();
        let report = of(&directory);
        assert_eq!((report.kind, report.files), (Kind::NoImage, 0));
        assert!(problem(&report).starts_with("there is no inventory.img"));

        let error = read(&directory.path().join("none")).unwrap_err();
        assert!(error.to_string().starts_with("cannot open the image /"));
    }

    #[test]
    fn the_only_image_below_a_directory_is_meant() {
        let directory = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| directory.path().join(name));
        fs::create_dir(directory.path().join("other")).unwrap();
        fs::create_dir(&first).unwrap();
        fs::write(first.join(INVENTORY), "").unwrap();
        // What a link leads to is not below it.
        symlink(&first, &second).unwrap();
        let report = of(&directory);
        assert_eq!((report.kind, report.files), (Kind::Plain, 1));
        assert_eq!(report.path, first.to_str().unwrap());
        fs::remove_file(&second).unwrap();
        fs::create_dir(&second).unwrap();
        manifest(None).write(&second).unwrap();
        let error = chain(&read(directory.path()).unwrap_err());
        assert!(error.ends_with("there are several images in it: first, second"), "{error}");
        // One that is an image is meant itself.
        fs::write(directory.path().join(FILES), "").unwrap();
        assert_eq!(of(&directory).kind, Kind::NoImage);
    }

    #[test]
    fn what_is_neither_directory_nor_file_is_not_opened() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        for path in [&fifo, Path::new("/dev/zero")] {
            let error = chain(&read(path).unwrap_err());
            assert!(error.ends_with("neither a directory nor a regular file"), "{error}");
        }
    }

    #[test]
    fn what_a_manifest_says_is_reported() {
        let directory = image("libcuda.so.1");
        manifest(None).write(directory.path()).unwrap();
        let report = of(&directory);
        assert_eq!((report.kind, report.is_whole(), report.files), (Kind::Cuda, true, 3));
        assert!(report.bytes_on_disk > 0);
        let checkpoint = report.checkpoint.unwrap();
        assert_eq!(checkpoint.driver.as_deref(), Some("610.43.02"));
        assert_eq!(checkpoint.cuda, "13.2");
        assert_eq!(checkpoint.flags, ["--tcp-established", "--file-locks"]);
        let pids: Vec<_> = checkpoint.processes.iter().map(|process| process.pid).collect();
        assert_eq!(pids, [1, 7, 9, 12]);
        let used: Vec<_> = checkpoint.gpus.iter().map(|gpu| gpu.used_bytes).collect();
        assert_eq!(used, [Some(4 << 20), None]);
        let needs = report.restore.unwrap();
        assert_eq!(needs.driver.as_deref(), Some("610.43.02"));
        let visible = VisibleGpu { uuid: "GPU-0".into(), name: Some("NVIDIA H200".into()) };
        assert_eq!(needs.visible, [visible]);
        assert_eq!(
            needs.gpus,
            [
                NeededGpu {
                    uuid: "GPU-0".into(),
                    name: Some("NVIDIA H200".into()),
                    memory_bytes: Some(1 << 37),
                    bytes: Some(4 << 20)
                },
                NeededGpu {
                    uuid: "GPU-1".into(),
                    name: Some("NVIDIA H200".into()),
                    memory_bytes: Some(1 << 37),
                    bytes: None
                },
            ]
        );
    }

    #[test]
    fn memory_on_several_gpus_is_on_none_in_particular() {
        let mut manifest = manifest(None);
        manifest.processes[1].gpus.push("GPU-1".into());
        let used = used(&manifest);
        assert_eq!((used["GPU-0"], used["GPU-1"]), (None, None));
    }

    #[test]
    fn an_image_without_cuda_processes_needs_no_driver() {
        let directory = image("libcuda.so.1");
        Manifest { processes: Vec::new(), ..manifest(None) }.write(directory.path()).unwrap();
        let report = of(&directory);
        assert_eq!(report.checkpoint.unwrap().gpus[0].used_bytes, Some(0));
        let needs = report.restore.unwrap();
        let none = Needs { driver: None, processes: 0, gpus: Vec::new(), visible: Vec::new() };
        assert_eq!(needs, none);
    }

    #[test]
    fn a_manifest_without_the_rest_is_not_whole() {
        let directory = tempfile::tempdir().unwrap();
        manifest(None).write(directory.path()).unwrap();
        let report = of(&directory);
        assert_eq!(report.kind, Kind::Cuda);
        assert!(problem(&report).starts_with("there is no inventory.img"));
    }

    #[test]
    fn a_manifest_that_cannot_be_read_is_told() {
        let directory = image("libcuda.so.1");
        let path = directory.path().join(stasis_config::MANIFEST_FILE);
        fs::write(&path, "{\"version\": 9}").unwrap();
        let report = of(&directory);
        assert_eq!((report.kind, report.checkpoint.is_none()), (Kind::Unreadable, true));
        assert!(problem(&report).ends_with("has version 9, this program reads version 1"));
        fs::remove_file(&path).unwrap();
        symlink("/dev/zero", &path).unwrap();
        assert!(problem(&of(&directory)).contains("a symbolic link"));
    }

    #[test]
    fn the_copy_of_a_job_is_compared() {
        let directory = with_job(manifest::JobFile::Made);
        let path = directory.path().join(JOB_FILE);
        let copy = |report: &Report| report.checkpoint.as_ref().unwrap().job.as_ref().unwrap().copy;
        let report = of(&directory);
        assert_eq!((copy(&report), report.is_whole()), (JobCopy::Whole, true));
        for (bytes, want, says) in [
            ("jo", JobCopy::WrongSize, "has not 3 bytes but 2"),
            ("", JobCopy::WrongSize, "has not 3 bytes but 0"),
            ("jobs and more", JobCopy::WrongSize, "has not 3 bytes but more"),
            ("jot", JobCopy::WrongDigest, "has not the SHA-256 of the manifest but "),
        ] {
            fs::write(&path, bytes).unwrap();
            let report = of(&directory);
            assert_eq!(copy(&report), want, "{bytes}");
            assert!(problem(&report).contains(says), "{report:?}");
        }
        fs::remove_file(&path).unwrap();
        let report = of(&directory);
        assert_eq!(copy(&report), JobCopy::Missing);
        assert!(problem(&report).ends_with("stasis.job, is not there"));
    }

    #[test]
    fn a_job_that_criu_brings_back_needs_no_copy() {
        let directory = with_job(manifest::JobFile::Dumped);
        fs::remove_file(directory.path().join(JOB_FILE)).unwrap();
        let report = of(&directory);
        assert!(report.is_whole());
        assert_eq!(report.checkpoint.unwrap().job.unwrap().copy, JobCopy::Missing);
        // But one that is there is the right one.
        fs::write(directory.path().join(JOB_FILE), "joe").unwrap();
        assert!(!of(&directory).is_whole());
    }

    #[test]
    fn the_path_of_a_job_is_named() {
        let path = "/srv/job".to_owned();
        let file = manifest::JobFile::Rootfs { path, mode: 0o600, uid: 0, gid: 0 };
        let job = of(&with_job(file)).checkpoint.unwrap().job.unwrap();
        assert_eq!((job.file, job.path.as_deref()), (JobFile::Rootfs, Some("/srv/job")));
    }

    /// Puts each kind of file that is none in the place of `name`. None hangs, and none is read.
    fn hostile(directory: &tempfile::TempDir, name: &str, says: &dyn Fn(&Report)) {
        let path = directory.path().join(name);
        fs::remove_file(&path).unwrap();
        for target in ["/dev/zero", "target", "/nonexistent", name] {
            fs::write(directory.path().join("target"), "job").unwrap();
            symlink(target, &path).unwrap();
            says(&of(directory));
            fs::remove_file(&path).unwrap();
        }
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        says(&of(directory));
        fs::remove_file(&path).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        says(&of(directory));
        drop(listener);
        fs::remove_file(&path).unwrap();
        if crate::files::make_device(&path) {
            says(&of(directory));
            fs::remove_file(&path).unwrap();
        }
        fs::create_dir(&path).unwrap();
        says(&of(directory));
        fs::remove_dir(&path).unwrap();
        // 10 TiB of nothing.
        File::create(&path).unwrap().set_len(10 << 40).unwrap();
        says(&of(directory));
    }

    #[test]
    fn a_hostile_job_file_is_named_and_not_followed() {
        hostile(&with_job(manifest::JobFile::Made), JOB_FILE, &|report| {
            let said = problem(report);
            assert!(
                said.ends_with("stasis.job, is not a regular file")
                    || said.ends_with("has not 3 bytes but more"),
                "{said}"
            );
        });
    }

    #[test]
    fn hostile_files_of_criu_are_named_and_not_followed() {
        for name in [FILES, INVENTORY] {
            hostile(&image("x"), name, &|report| {
                assert_eq!(report.kind, Kind::Unreadable);
                let said = problem(report);
                assert!(
                    said == format!("{name} is not a regular file")
                        || said.starts_with(&format!("{name} has 10995116277760 bytes")),
                    "{said}"
                );
            });
        }
        hostile(&with_job(manifest::JobFile::Made), INVENTORY, &|report| {
            assert_eq!(report.kind, Kind::Cuda);
            assert!(problem(report).starts_with(INVENTORY));
        });
    }

    #[test]
    fn links_and_depth_are_bounded_when_files_are_counted() {
        let directory = image("x");
        symlink("/", directory.path().join("root")).unwrap();
        symlink(".", directory.path().join("again")).unwrap();
        assert_eq!(of(&directory).files, 4);
        fs::create_dir_all(directory.path().join("1/2/3/4/5/6/7")).unwrap();
        assert!(of(&directory).is_whole());
        fs::create_dir(directory.path().join("1/2/3/4/5/6/7/8")).unwrap();
        assert!(problem(&of(&directory)).ends_with("more than 8 deep"));
    }

    #[test]
    fn control_characters_reach_neither_text_nor_problems() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a\n\u{1b}[2J");
        fs::create_dir(&path).unwrap();
        let report = read(&path).unwrap();
        let text = render::text(&report, Some(80));
        assert!(text.contains("a\\n\\u{1b}[2J"), "{text}");
        assert!(!text.replace('\n', "").contains(char::is_control), "{text}");
        let error = read(&path.join("none")).unwrap_err().to_string();
        assert!(!error.contains(char::is_control), "{error}");
    }
}
