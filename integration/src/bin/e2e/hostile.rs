//! Input from outside: images, annotations, configuration, and a host that is not ready.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::command;
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::Settings;

use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("images", images),
        Test::new("annotations", annotations),
        Test::new("config", config),
        Test::new("image_paths", image_paths),
        Test::new("check", check),
    ]
}

/// What it is called, how it is done, and what the error has to say.
type Spoil<'a> = (&'a str, &'a dyn Fn() -> Result<()>, &'a str);

/// A checkpoint that is good, then spoiled in every way: each is refused by name before anything
/// runs, and the unspoiled one still restores.
fn images(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    let image = case.path("image");
    let exit = Checkpoint { image: Some(image.clone()), exit: true, ..Checkpoint::default() };
    case.checkpoint(&id, &exit)?;
    case.end_task(&id)?;
    let manifest = image.join("stasis.json");
    let good = fs::read_to_string(&manifest)?;
    let secret = case.path("secret");
    fs::write(&secret, &good)?;

    let spoils: [Spoil<'_>; 8] = [
        ("no manifest", &|| Ok(()), "no stasis.json"),
        ("link", &|| Ok(symlink(&secret, &manifest)?), "symbolic link"),
        ("directory", &|| Ok(fs::create_dir(&manifest)?), "directory"),
        ("fifo", &|| Ok(nix::unistd::mkfifo(&manifest, nix::sys::stat::Mode::S_IRWXU)?), "FIFO"),
        ("not json", &|| Ok(fs::write(&manifest, "{")?), "stasis.json"),
        (
            "newer",
            &|| Ok(fs::write(&manifest, good.replace("\"version\": 1", "\"version\": 7"))?),
            "7",
        ),
        (
            "other driver",
            &|| Ok(fs::write(&manifest, good.replace("580.159.04", "999.1"))?),
            "made with driver 999.1",
        ),
        (
            "other mounts",
            &|| Ok(fs::write(&manifest, good.replace("libcuda.so.1", "libcuda.so.7"))?),
            "libcuda.so.7",
        ),
    ];
    for (name, spoil, says) in spoils {
        remove(&manifest)?;
        spoil()?;
        let error = match case.restore_from(&id, &image) {
            Ok(_) => anyhow::bail!("{name}: restored"),
            Err(error) => format!("{error:#}"),
        };
        ensure!(error.contains(says), "{name}: the error does not say {says:?}: {error}");
    }
    remove(&manifest)?;
    fs::write(&manifest, &good)?;
    let (bundle, pid) = case.restore_from(&id, &image)?;
    let answer = stasis_integration::udp::ask(pid, stasis_integration::case::PORT)?;
    ensure!(answer == 102, "{answer}");
    drop(bundle);
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    if path.is_dir() && !path.is_symlink() {
        return Ok(fs::remove_dir(path)?);
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Told at create, and nothing is left of the container.
fn annotations(case: &Case) -> Result<()> {
    for (annotation, says) in [
        ("dev.stasis.multi-process=yes", "multi-process"),
        ("dev.stasis.nonsense=1", "dev.stasis.nonsense"),
        ("dev.stasis.lock-timeout=10", "10s"),
        ("dev.stasis.lock-timeout=99h", "max-lock-timeout"),
    ] {
        let Err(error) = case.start(&Container::counter(&[]).annotated(annotation)) else {
            anyhow::bail!("{annotation} was accepted");
        };
        let error = format!("{error:#}");
        ensure!(error.contains(says), "{annotation}: the error does not say {says:?}: {error}");
    }
    let policy = Settings::default().with("annotations", "allow", "[]");
    case.set(&policy)?;
    let forbidden = Container::counter(&[]).annotated("dev.stasis.multi-process=allow");
    let Err(error) = case.start(&forbidden) else {
        anyhow::bail!("a forbidden annotation was accepted");
    };
    ensure!(format!("{error:#}").contains("annotations.allow"), "{error:#}");
    case.set(&Settings::default())
}

/// A configuration that cannot be read stops everything and loses nothing.
fn config(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    case.set(&Settings::default().with("cuda", "lock-timeot", "\"1s\""))?;
    let image = case.path("image");
    let error = command::fail(&mut case.direct_checkpoint(&id, &image), LIMIT)?;
    for word in ["config.toml", "lock-timeot", "nothing was done"] {
        ensure!(error.contains(word), "the error does not say {word:?}: {error}");
    }
    case.set(&Settings::default())?;
    case.expect(&id, 102)
}

/// Paths that are no directory: refused before the container is touched.
fn image_paths(case: &Case) -> Result<()> {
    let id = case.start_counter(&[])?;
    let file = case.path("file");
    fs::write(&file, "")?;
    let error = command::fail(&mut case.direct_checkpoint(&id, &file), LIMIT)?;
    ensure!(error.contains("not touched"), "{error}");
    let below = file.join("image");
    let error = command::fail(&mut case.direct_checkpoint(&id, &below), LIMIT)?;
    ensure!(error.contains("not touched"), "{error}");
    // A link to a directory is the administrator's choice, and a path that is not there is made.
    let real = case.path("real");
    fs::create_dir(&real)?;
    let link = case.path("link");
    symlink(&real, &link)?;
    command::succeed(&mut case.direct_checkpoint(&id, &link), LIMIT)?;
    ensure!(real.join("stasis.json").exists(), "no manifest behind the link");
    let deep = case.path("not/there/yet");
    command::succeed(&mut case.direct_checkpoint(&id, &deep), LIMIT)?;
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)
}

/// This lab is ready; without a driver, or with no tools, it is not.
fn check(case: &Case) -> Result<()> {
    let stasis = |variable: &str, value: &str| {
        let mut command = Command::new(case.binary("stasis"));
        let library = case.gpu.library();
        command.args(["check", "--json"]).env("EMULATED_GPU_DIR", case.gpu.store());
        command
            .env("STASIS_LIBCUDA", &library)
            .env("STASIS_LIBNVML", &library)
            .env(variable, value);
        command::run(&mut command, LIMIT)
    };
    for (variable, value, ready, says) in [
        ("LC_ALL", "C", true, "580.159.04"),
        ("STASIS_LIBCUDA", "/nonexistent/libcuda.so.1", false, "/nonexistent/libcuda.so.1"),
        ("PATH", "/nonexistent", false, "was not found in PATH"),
    ] {
        let finished = stasis(variable, value)?;
        let report = finished.stdout;
        ensure!(finished.status.success() == ready, "{variable}={value}: {report}");
        ensure!(report.contains(says), "{variable}={value}: no {says:?} in {report}");
    }
    Ok(())
}
