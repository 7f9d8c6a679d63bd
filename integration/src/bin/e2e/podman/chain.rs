//! nvidia-container-runtime before and behind `stasis-runc`.
//!
//! The real one changes config.json in its place for `create`, and then executes the runtime of its
//! list with the same arguments; so does a script here.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stasis_integration::bare::Bare;
use stasis_integration::case::{Case, PORT};
use stasis_integration::runtime::Settings;
use stasis_integration::{command, image, leaks, udp};

use crate::Test;

const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("nvidia_runtime_behind", |case| {
            let nvidia = nvidia(case, &case.runtime.wrapper().with_file_name("inner-runc"))?;
            let path = format!("\"{}\"", nvidia.display());
            case.set(&Settings::default().with("runtime", "path", &path))?;
            two_cycles(case, &case.runtime.wrapper())
        }),
        Test::new("nvidia_runtime_before", |case| {
            two_cycles(case, &nvidia(case, &case.runtime.wrapper())?)
        }),
        Test::new("nvidia_runtime_in_a_circle", circle),
    ]
}

/// A program named as the real one, that executes `next`.
fn nvidia(case: &Case, next: &Path) -> Result<PathBuf> {
    let library = case.gpu.library();
    let library = library.display();
    let mount = |source: String, destination: String| {
        format!(
            "{{\"destination\":\"{destination}\",\"source\":\"{source}\",\"options\":[\"rbind\"]}},"
        )
    };
    let mounts = [
        mount(library.to_string(), format!("{}/libcuda.so.1", image::LIBRARIES)),
        mount(library.to_string(), format!("{}/libnvidia-ml.so.1", image::LIBRARIES)),
        mount(case.gpu.store().display().to_string(), "/dev/nvidia-emulated".to_owned()),
    ]
    .concat();
    let path = case.path("nvidia-container-runtime");
    // The GPU's mounts come last: below the tmpfs on /dev.
    let script = format!(
        "#!/bin/sh\ncase \" $* \" in *' create '*)\n\
         sed -i 's|\\(\"mounts\":\\[.*\\)\\],\"ociVersion\"|\\1,{}],\"ociVersion\"|' config.json;;\nesac\n\
         exec {} \"$@\"\n",
        mounts.trim_end_matches(','),
        next.display()
    );
    fs::write(&path, script)?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(path)
}

fn bare(case: &Case) -> Result<Bare> {
    let parent = std::env::var("LAB_ID")?;
    let rootfs = case.path("../image/rootfs").canonicalize()?;
    let name = case.path("x");
    let name = name.parent().and_then(|path| path.file_name()?.to_str()).context("a name")?;
    let program = ["/bin/counter", "--log", "/data/log"];
    let bare = Bare::new(&case.path("bundle"), name, &parent, &rootfs, &program)?;
    bare.add_device("/dev/nvidia0", 10, 229)?;
    Ok(bare)
}

fn two_cycles(case: &Case, runtime: &Path) -> Result<()> {
    let mut bare = bare(case)?;
    bare.create(runtime)?;
    ensure!(bare.spec()?.contains("libcuda.so.1"), "config.json was not changed");
    bare.start(runtime)?;
    for number in [101, 102, 103] {
        if number > 101 {
            let image = format!("image-{number}");
            command::succeed(&mut bare.checkpoint(runtime, &image, &[]), LIMIT)?;
            ensure!(bare.path(&image).join("stasis.json").is_file(), "no manifest in {image}");
            bare.delete(runtime)?;
            bare.restore(runtime, &image)?;
        }
        let answer = udp::ask(bare.pid()?, PORT)?;
        ensure!(answer == number, "the counter said {answer} instead of {number}");
    }
    bare.delete(runtime)?;
    let parent = std::env::var("LAB_ID")?;
    leaks::container(&parent, bare.id())
}

/// Each is told to execute the other: an error, and not a process that goes on for ever.
fn circle(case: &Case) -> Result<()> {
    let nvidia = nvidia(case, &case.runtime.wrapper())?;
    let path = format!("\"{}\"", nvidia.display());
    case.set(&Settings::default().with("runtime", "path", &path))?;
    let bare = bare(case)?;
    for arguments in [&["--version"][..], &["create", "x"]] {
        for first in [&nvidia, &case.runtime.wrapper()] {
            let said = command::fail(&mut bare.call(first, arguments), LIMIT)?;
            ensure!(said.contains("leads back to stasis-runc"), "{said}");
        }
    }
    Ok(())
}
