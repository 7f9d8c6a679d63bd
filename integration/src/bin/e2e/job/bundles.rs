//! The life of a job file on the host, and of one that the container brings itself.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use stasis_integration::case::Case;
use stasis_integration::command;

use super::own::{Own, says};
use super::{FILE, GIVEN, KEEPS, VARIABLE};
use crate::Test;
use crate::suspend::Stasis;

const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn tests() -> Vec<Test> {
    let given = |case: &Case<'_>| {
        case.gpu.driver(KEEPS)?;
        let mut own = Own::started(case, "a")?;
        twice(case, &mut own)
    };
    vec![
        Test::new("given", given),
        Test::new("brought_in_the_root", |case| brought(case, "/etc/job", "rootfs")),
        Test::new("brought_on_a_tmpfs", |case| brought(case, "/data/job", "dumped")),
        Test::new("brought_by_descriptor", |case| by_descriptor(case, "", "rootfs")),
        Test::new("brought_unlinked", |case| by_descriptor(case, "rm /etc/job;", "dumped")),
        Test::new("brought_on_a_volume_refused", on_a_volume),
        Test::new("paused_twice", paused_twice),
        Test::new("read_only_root", read_only),
        Test::new("given_to_another_user", |case| {
            case.gpu.driver(KEEPS)?;
            let mut own = Own::annotated(case, "a")?;
            own.as_user(1000)?;
            own.start()?;
            own.expect()?;
            own.checkpoint_as_far_as_criu(&case.path("image"))?;
            own.delete()
        }),
        Test::new("without_cuda", without_cuda),
        Test::new("started_again", started_again),
        Test::new("annotation_taken_away", annotation_taken_away),
        Test::new("swept_after_a_failed_create", swept),
        Test::new("both_ways_contradict", contradiction),
    ]
}

/// Two containers of one image at the same time, and a second checkpoint and restore of each.
fn twice(case: &Case<'_>, first: &mut Own<'_>) -> Result<()> {
    let image = case.path("image");
    first.join()?;
    first.expect()?;
    first.checkpoint(&case.path("running"))?;
    first.expect()?;
    first.checkpoint_and_end(&image)?;
    let mut second = Own::like(first, "b")?;
    let runtime = case.runtime.wrapper();
    let path = image.to_string_lossy();
    thread::scope(|scope| {
        let [one, other] = [&mut first.bare, &mut second.bare].map(|bare| {
            let (runtime, path) = (&runtime, &path);
            scope.spawn(move || bare.restore(runtime, path))
        });
        one.join().map_err(|_| anyhow!("a thread panicked"))??;
        other.join().map_err(|_| anyhow!("a thread panicked"))?
    })?;
    first.expect()?;
    for own in [&mut *first, &mut second] {
        own.expect()?;
    }
    for (own, again) in [(&mut *first, "again-a"), (&mut second, "again-b")] {
        own.checkpoint_and_end(&case.path(again))?;
        own.restore(&case.path(again))?;
        own.expect()?;
        own.join()?;
        own.expect()?;
    }
    // And the first image is as it was.
    second.delete()?;
    let mut third = Own::like(first, "c")?;
    third.restore(&image)?;
    third.delete()?;
    first.delete()
}

/// Makes a job file as people do, and then starts the processes with it.
pub(super) fn with_own_file(path: &str, program: &str) -> [String; 3] {
    let copy = format!("cp \"${VARIABLE}\" {path}");
    let script = format!(
        "mkdir -p $(dirname {path}) && cuda-checkpoint --launch-job sh -c '{copy}' && \
         export {VARIABLE}={path} && exec {program}"
    );
    ["/bin/sh".to_owned(), "-c".to_owned(), script]
}

/// A container that has made its job file itself.
pub(super) fn bringing<'a>(
    case: &'a Case<'a>,
    name: &str,
    path: &str,
    program: &str,
) -> Result<Own<'a>> {
    let words = with_own_file(path, program);
    Own::new(case, name, &words.each_ref().map(String::as_str))
}

fn brought(case: &Case<'_>, path: &str, origin: &str) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = bringing(case, "a", path, "ipc 4")?;
    // For those that come by exec.
    own.start()?;
    own.expect()?;
    own.set(&format!("{VARIABLE}={path}"))?;
    has_origin(case, &own, origin)?;
    twice(case, &mut own)
}

/// A descriptor of the first process, which the others have inherited.
fn by_descriptor(case: &Case<'_>, then: &str, origin: &str) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let copy = format!("cp \"${VARIABLE}\" /etc/job");
    let script = format!(
        "cuda-checkpoint --launch-job sh -c '{copy}'; exec 9<>/etc/job; {then} \
         export {VARIABLE}=/proc/self/fd/9; exec ipc 4"
    );
    let mut own = Own::new(case, "a", &["/bin/sh", "-c", &script])?;
    own.start()?;
    own.expect()?;
    own.set(&format!("{VARIABLE}=/proc/1/fd/9"))?;
    has_origin(case, &own, origin)?;
    twice(case, &mut own)
}

fn has_origin(case: &Case<'_>, own: &Own<'_>, origin: &str) -> Result<()> {
    own.checkpoint(&case.path("origin"))?;
    let manifest: Value = serde_json::from_slice(&fs::read(case.path("origin/stasis.json"))?)?;
    let found = &manifest["job"]["file"];
    ensure!(found == origin || found.get(origin).is_some(), "the job file is {found}");
    ensure!(case.path("origin/stasis.job").exists() == (origin == "rootfs"), "a copy?");
    Ok(())
}

/// A second checkpoint of a container that stayed paused after the first.
fn paused_twice(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let call = |own: &Own<'_>, verb: &str| {
        let mut command = own.bare.call(&case.runtime.wrapper(), &[verb, own.bare.id()]);
        command::succeed(&mut command, LIMIT).map(drop)
    };
    call(&own, "pause")?;
    let [first, second] = ["first", "second"].map(|name| case.path(name));
    own.checkpoint(&first)?;
    own.checkpoint(&second)?;
    let at_checkpoint = own.group;
    call(&own, "resume")?;
    own.expect()?;
    own.expect()?;
    own.delete()?;
    for image in [&second, &first] {
        own.restore(image)?;
        own.group = at_checkpoint;
        own.expect()?;
        own.delete()?;
    }
    Ok(())
}

/// With a tmpfs on /run, as containerd's clients have it, and Podman's --read-only.
fn read_only(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::annotated(case, "a")?;
    own.bare.change(|spec| {
        spec["root"]["readonly"] = true.into();
        if let Some(mounts) = spec["mounts"].as_array_mut() {
            for destination in ["/run", "/tmp"] {
                mounts.push(json!({
                    "destination": destination, "type": "tmpfs", "source": "tmpfs",
                }));
            }
        }
    })?;
    own.start()?;
    own.expect()?;
    own.goes_on()
}

fn on_a_volume(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let volume = case.path("volume");
    fs::create_dir(&volume)?;
    let mut own = bringing(case, "a", "/volume/job", "ipc 4")?;
    own.bare.add_mount(&volume, "/volume", true)?;
    own.start()?;
    own.expect()?;
    let error = own.refused(&case.path("image"))?;
    says(&error, &["(ipc)", "/volume/job", "mount from outside", FILE])?;
    own.delete()
}

/// The mount is part of the container, so it is there after a restore, with a file that nothing has
/// used.
fn without_cuda(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::new(case, "a", &["/bin/sh", "-c", "while :; do sleep 1; done"])?;
    own.annotate(FILE)?;
    own.start()?;
    let before = content(&own)?;
    let image = case.path("image");
    own.checkpoint_and_end(&image)?;
    ensure!(!image.join("stasis.job").exists(), "a copy of a file that nothing has used");
    own.restore(&image)?;
    let after = content(&own)?;
    ensure!(before != after, "it was used twice");
    // Those that begin now are members.
    own.exec(&["/bin/sh", "-c", "ipc 4 </dev/null >/dev/null 2>&1 & sleep 0.5"])?;
    own.expect()?;
    own.delete()
}

/// What is in the file that a container was given; outside and inside it is the same.
fn content(own: &Own<'_>) -> Result<Vec<u8>> {
    let directory = own.own_job().context("it has no job file")?;
    let content = fs::read(directory.join("job"))?;
    ensure!(!content.is_empty(), "an empty job file");
    let inside = own.inside(GIVEN)?;
    ensure!(same_file(&inside, &directory.join("job"))?, "another file is mounted");
    Ok(content)
}

fn same_file(one: &Path, other: &Path) -> Result<bool> {
    let (one, other) = (fs::metadata(one)?, fs::metadata(other)?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// A bundle is used again: for another start it is another job.
/// A bundle that was used with the annotation, and its copy, are used without.
fn annotation_taken_away(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let mut copy = Own::like(&own, "b")?;
    copy.group = stasis_integration::ipc::Group::new(4);
    let taken = |own: &mut Own<'_>| -> Result<()> {
        own.bare.change(|spec| spec["annotations"] = json!({}))?;
        ensure!(own.bare.spec()?.contains(GIVEN), "Stasis had changed config.json");
        own.start()?;
        ensure!(!own.bare.spec()?.contains(GIVEN), "it has another's job file");
        own.expect()?;
        ensure!(own.own_job().is_none(), "it has a job file");
        says(&own.refused(&case.path("image"))?, &["dev.stasis.job=file"])
    };
    taken(&mut copy)?;
    own.expect()?;
    own.delete()?;
    own.group = stasis_integration::ipc::Group::new(4);
    taken(&mut own)?;
    own.delete()?;
    copy.delete()
}

fn started_again(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let file = own.own_job().context("it has no job file")?;
    let before = content(&own)?;
    let mode = fs::metadata(file.join("job"))?.mode() & 0o777;
    ensure!(mode == 0o666, "its mode is {mode:o}");
    let mode = fs::metadata(&file)?.mode() & 0o777;
    ensure!(mode == 0o700, "the mode of its directory is {mode:o}");
    let spec = own.bare.spec()?;
    own.delete()?;
    own.start()?;
    ensure!(own.bare.spec()? == spec, "config.json grows from start to start");
    own.group = stasis_integration::ipc::Group::new(4);
    own.expect()?;
    ensure!(content(&own)? != before, "the same job file was used for two starts");
    own.delete()
}

/// What runc refuses after a job file was made leaves it behind, until another one is made.
fn swept(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let fails = |name: &str| -> Result<Own<'_>> {
        let mut failed = Own::annotated(case, name)?;
        failed.bare.add_mount(Path::new("/nonexistent"), "/mnt", false)?;
        says(&failed.create_fails()?, &["/nonexistent"])?;
        Ok(failed)
    };
    let failed = fails("failed")?;
    let mut good = Own::started(case, "good")?;
    ensure!(failed.own_job().is_none(), "the job file of a failed create was not swept away");
    good.expect()?;
    // Nor does it wait for a next one.
    let failed = fails("again")?;
    ensure!(failed.own_job().is_some(), "there is nothing to sweep away");
    let root = failed.bare.root().display().to_string();
    Stasis::new(case).run(&["repair", "--root", &root])?;
    ensure!(failed.own_job().is_none(), "the job file of a failed create was not repaired away");
    good.expect()?;
    // What runs is not swept.
    let mut other = Own::started(case, "other")?;
    good.checkpoint(&case.path("image"))?;
    good.expect()?;
    other.expect()?;
    other.delete()?;
    good.delete()
}

/// A container that names a job file and asks for one.
fn contradiction(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::annotated(case, "a")?;
    own.set(&format!("{VARIABLE}=/var/job"))?;
    says(&own.create_fails()?, &["/var/job", FILE])?;
    ensure!(own.own_job().is_none(), "a job file is left");
    Ok(())
}
