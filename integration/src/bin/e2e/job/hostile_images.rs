//! Images whose job is not what it should be: each is refused by name, nothing of a container is left,
//! and nothing is written anywhere.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};
use stasis_integration::case::Case;

use super::bundles::bringing;
use super::own::{Own, digest, says};
use super::{IPC, KEEPS, LAUNCH};
use crate::Test;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("hostile_images", copies),
        Test::new("hostile_manifests", manifests),
        Test::new("hostile_manifest_of_a_launched_job", dumped),
        Test::new("hostile_paths", paths),
    ]
}

type Spoil<'a> = (&'a str, &'a dyn Fn() -> Result<()>, &'a str);

/// The copy of the job file.
fn copies(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let image = case.path("image");
    own.checkpoint_and_end(&image)?;
    let at = image.join("stasis.job");
    let seen = case.inspect(&image)?;
    ensure!(seen["whole"] == true, "a good image is said to be not whole: {seen}");
    let job = &seen["checkpoint"]["job"];
    ensure!(job["file"] == "made" && job["copy"] == "whole", "its job: {job}");
    let good = fs::read(&at)?;
    let before = digest(&image)?;
    let elsewhere = case.path("elsewhere");
    fs::write(&elsewhere, &good)?;
    let mut longer = good.clone();
    longer.push(0);
    let mut other = good.clone();
    other[good.len() / 2] ^= 1;
    let spoils: [Spoil<'_>; 7] = [
        ("missing", &|| Ok(()), "stasis.job"),
        ("shorter", &|| Ok(fs::write(&at, &good[..100])?), "fewer than"),
        ("empty", &|| Ok(fs::write(&at, "")?), "fewer than"),
        ("longer", &|| Ok(fs::write(&at, &longer)?), "more than"),
        ("another", &|| Ok(fs::write(&at, &other)?), "not that of the manifest"),
        ("link", &|| Ok(symlink(&elsewhere, &at)?), "stasis.job"),
        ("FIFO", &|| Ok(mkfifo(&at, Mode::S_IRWXU)?), "no regular file"),
    ];
    for (name, spoil, why) in spoils {
        let _ = fs::remove_file(&at);
        spoil()?;
        let seen = case.inspect(&image)?;
        ensure!(seen["whole"] == false, "{name} is said to be whole: {seen}");
        says(&seen["problems"].to_string(), &["stasis.job"])?;
        let error = own.restore_fails(&image).with_context(|| name.to_owned())?;
        says(&error, &["stasis.job", why, "not touched"]).with_context(|| name.to_owned())?;
    }
    let _ = fs::remove_file(&at);
    fs::write(&at, &good)?;
    ensure!(digest(&image)? == before, "the image was changed");
    own.restore(&image)?;
    own.expect()?;
    own.delete()
}

/// Writes a manifest with another job.
fn with_job(path: &Path, good: &Value, change: impl FnOnce(&mut Value)) -> Result<()> {
    let mut manifest = good.clone();
    change(&mut manifest["job"]);
    Ok(fs::write(path, manifest.to_string())?)
}

fn manifests(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::started(case, "a")?;
    let image = case.path("image");
    own.checkpoint_and_end(&image)?;
    let at = image.join("stasis.json");
    let good: Value = serde_json::from_slice(&fs::read(&at)?)?;
    let digest = "0".repeat(64);
    let rootfs =
        |path: &str, mode: u32| json!({"rootfs": {"path": path, "mode": mode, "uid": 0, "gid": 0}});
    for (part, value, why) in [
        ("sha256", json!(digest), "not that of the manifest"),
        ("sha256", json!("x"), "job.sha256"),
        ("bytes", json!(1_u64 << 40), "job.bytes"),
        ("bytes", json!(7), "more than the 7 bytes"),
        ("file", json!("elsewhere"), "elsewhere"),
        ("file", rootfs("../../x", 0o600), "absolute"),
        ("file", rootfs("/../../x", 0o600), "path"),
        ("file", rootfs("/var/job", 0o4755), "0o4755"),
        // What would be there is not what the container had.
        ("file", rootfs("/etc/passwd", 0o600), "of another owner or mode"),
        ("more", json!(1), "more"),
    ] {
        with_job(&at, &good, |job| job[part] = value.clone())?;
        let what = format!("{part} {value}");
        let error = own.restore_fails(&image).with_context(|| what.clone())?;
        says(&error, &[why, "nothing was done"])
            .or_else(|_| says(&error, &[why, "not touched"]))
            .with_context(|| what.clone())?;
    }
    // Said to come from elsewhere: then the members name another, which nothing has used.
    fs::create_dir_all(own.root().join("var"))?;
    for file in [json!("dumped"), rootfs("/var/job", 0o600)] {
        with_job(&at, &good, |job| job["file"] = file.clone())?;
        let error = own.restore_fails(&image).with_context(|| file.to_string())?;
        let words = ["(ipc)", "this one is mounted at /run/stasis/cuda-job", "was killed"];
        says(&error, &words).with_context(|| file.to_string())?;
        ensure!(!own.root().join("var/job").exists(), "the copy is left in the root file system");
    }
    // What is found out after the copy was placed.
    let mut other = good.clone();
    other.as_object_mut().context("an object")?.remove("gpu_nodes");
    fs::write(&at, other.to_string().replace("/dev/nvidia0", "/dev/nvidia7"))?;
    let error = own.restore_fails(&image)?;
    says(&error, &["/dev/nvidia7", "not touched"])?;
    // Not in a job at all: then the processes are not restored as what they are.
    let mut without = good.clone();
    without.as_object_mut().context("an object")?.remove("job");
    fs::write(&at, without.to_string())?;
    let error = own.restore_fails(&image)?;
    says(&error, &["stasis: restore of container"])?;
    fs::write(&at, good.to_string())?;
    own.restore(&image)?;
    own.expect()?;
    own.delete()
}

/// What CRIU brings back is compared with what it was, too.
fn dumped(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = Own::new(case, "a", &[&LAUNCH[..], &IPC].concat())?;
    own.start()?;
    own.expect()?;
    let image = case.path("image");
    own.checkpoint_and_end(&image)?;
    let at = image.join("stasis.json");
    let good: Value = serde_json::from_slice(&fs::read(&at)?)?;
    with_job(&at, &good, |job| job["sha256"] = json!("0".repeat(64)))?;
    let error = own.restore_fails(&image)?;
    says(&error, &["(ipc)", "not as it was in the checkpoint", "was killed"])?;
    // One that Stasis is to have made is not where it would be.
    with_job(&at, &good, |job| job["file"] = json!("made"))?;
    says(&own.restore_fails(&image)?, &["stasis.job", "not touched"])?;
    fs::write(&at, good.to_string())?;
    own.restore(&image)?;
    own.expect()?;
    own.delete()
}

/// A job file in the root file system is written there and nowhere else.
fn paths(case: &Case<'_>) -> Result<()> {
    case.gpu.driver(KEEPS)?;
    let mut own = bringing(case, "a", "/var/job", "ipc 4")?;
    own.start()?;
    own.expect()?;
    let image = case.path("image");
    own.checkpoint_and_end(&image)?;
    let outside = case.path("outside");
    fs::create_dir(&outside)?;
    fs::write(outside.join("job"), "theirs")?;
    let at = image.join("stasis.json");
    let good: Value = serde_json::from_slice(&fs::read(&at)?)?;
    let relative = "../".repeat(12) + outside.to_string_lossy().trim_start_matches('/');
    for target in [outside.to_string_lossy().as_ref(), relative.as_str()] {
        let link = own.root().join("out");
        symlink(target, &link)?;
        with_job(&at, &good, |job| job["file"]["rootfs"]["path"] = json!("/out/job"))?;
        let error = own.restore_fails(&image).with_context(|| target.to_owned())?;
        says(&error, &["/out/job", "root file system", "not touched"])?;
        fs::remove_file(link)?;
    }
    // The root's own directory has become such a link.
    fs::write(&at, good.to_string())?;
    let (var, kept) = (own.root().join("var"), own.root().join("kept"));
    fs::rename(&var, &kept)?;
    symlink(&outside, &var)?;
    let error = own.restore_fails(&image)?;
    says(&error, &["/var/job", "not touched"])?;
    let left = fs::read_dir(&outside)?.count();
    let content = fs::read_to_string(outside.join("job"))?;
    ensure!(left == 1 && content == "theirs", "{left} files, and one says {content:?}");
    fs::remove_file(&var)?;
    fs::rename(&kept, &var)?;
    // A link in the file's place is neither followed nor replaced.
    fs::remove_file(var.join("job"))?;
    symlink(outside.join("job"), var.join("job"))?;
    says(&own.restore_fails(&image)?, &["/var/job: a symbolic link is there", "not touched"])?;
    fs::remove_file(var.join("job"))?;
    own.restore(&image)?;
    own.expect()?;
    ensure!(fs::read_to_string(outside.join("job"))? == "theirs", "a link was followed");
    own.delete()
}
