//! What Podman cannot with its own runtimes. Each of these tests tells when it can.

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::leaks;
use stasis_integration::podman::Podman;

use crate::Test;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("stock_paused", paused),
        Test::new("stock_pre_checkpoint", pre_checkpoint),
        Test::new("stock_import_elsewhere", import_elsewhere),
    ]
}

fn sleeper() -> Container {
    Container::new(["sleep", "1000"]).without_gpu()
}

/// A paused container is not checkpointed, whatever the runtime.
fn paused(case: &Case) -> Result<()> {
    let podman = Podman::with_image(case, "store")?.with_runtime("/usr/sbin/runc");
    podman.start("c1", &sleeper())?;
    podman.run(["pause", "c1"])?;
    let said = podman.fail(["container", "checkpoint", "c1"])?;
    let words = "Error: \"paused\" is not running, cannot checkpoint: container state improper";
    ensure!(said.contains(words), "{said}");
    podman.finish()
}

/// The kernel of the tests tracks no dirty pages (`CONFIG_MEM_SOFT_DIRTY`).
fn pre_checkpoint(case: &Case) -> Result<()> {
    let podman = Podman::with_image(case, "store")?.with_runtime("/usr/sbin/runc");
    podman.start("c1", &sleeper())?;
    let archive = case.path("pre.tar").display().to_string();
    let said =
        podman.fail(["container", "checkpoint", "--pre-checkpoint", "-e", &archive, "c1"])?;
    ensure!(said.to_lowercase().contains("criu is missing features"), "{said}");
    podman.finish()
}

/// A store with another --runroot takes no archive, once the container is gone from the old one.
fn import_elsewhere(case: &Case) -> Result<()> {
    let podman = Podman::with_image(case, "store")?.with_runtime("/usr/sbin/runc");
    podman.start("c1", &sleeper())?;
    let archive = case.path("c1.tar.zst").display().to_string();
    podman.run(["container", "checkpoint", "--export", &archive, "c1"])?;
    podman.remove("c1")?;
    podman.finish()?;
    let podman = Podman::with_image(case, "elsewhere")?.with_runtime("/usr/sbin/runc");
    let said = podman.fail(["container", "restore", "--import", &archive])?;
    ensure!(said.contains("Failed to write conmon pidfile"), "{said}");
    // Podman 5.8 cannot remove what it has left of that: 'replacing mount point: directory not
    // empty'. The test's directory goes as a whole. runc may have been killed in the middle of its
    // restore, and CRIU with it, whose mounts stay.
    drop(podman);
    leaks::unmount(&case.path("elsewhere"))
}
