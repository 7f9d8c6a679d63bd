//! What CRI cannot do, whatever the shim: seen with containerd's own and a container without a
//! GPU. Each of these tests tells when it starts to work.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::cri::{Class, Container, Cri, Registry, Sandbox, Settings};
use stasis_integration::suite::Suite;
use stasis_integration::wait;

use crate::Test;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("no_checkpoint_before_2", no_checkpoint_before_2).only(&[Suite::Trixie]),
        Test::new("base_image_is_pulled", base_image_is_pulled).only(&[Suite::Forky]),
        Test::new("log_lines_twice", log_lines_twice).only(&[Suite::Forky]),
        Test::new("shared_memory_is_the_pods", shared_memory_is_the_pods).only(&[Suite::Forky]),
    ]
}

/// `CheckpointContainer` came with containerd 2.0 (containerd#6965), and its restore with 2.1
/// (containerd#10365).
fn no_checkpoint_before_2(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let (_, id) = cri.in_pod(Sandbox::of(Class::Go), &Container::script("exec sleep 1000000"))?;
    let error = cri.checkpoint_fails(&id, &case.path("checkpoint.tar"))?;
    ensure!(error.contains("CheckpointContainer not implemented"), "{error}");
    cri.finish()
}

/// A restore pulls the image that the container was started from, also if it is there, and knows
/// nothing of mirrors and credentials (containerd#11901, #12585; not any more in 2.2).
fn base_image_is_pulled(case: &Case) -> Result<()> {
    let registry = Arc::new(Registry::start()?);
    registry.push_tests_image(&case.image_parts())?;
    let cri = Cri::start_at(case, &registry, &Settings::default())?;
    let archive = case.path("checkpoint.tar");
    let container = Container::script("exec sleep 1000000");
    let (_, id) = cri.in_pod(Sandbox::of(Class::Go), &container)?;
    cri.checkpoint(&id, &archive)?;
    drop(registry);
    let pod = cri.pod(Sandbox::of(Class::Go))?;
    let container = container.from_image(archive.display().to_string());
    let error = cri.create_fails(&pod, &container)?;
    ensure!(error.contains("failed to pull checkpoint base image"), "{error}");
    cri.finish()
}

/// The log goes into the archive when the container runs on already: what it prints until then is
/// in the log, and is printed again by the restored one.
fn log_lines_twice(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let archive = case.path("checkpoint.tar");
    // Counts each millisecond; of a GPU it knows nothing.
    let program = "/bin/counter --stdout --tick 1 --port 0 --hold-device --device-node /dev/null";
    let ticker = Container::new(program.split(' ')).without_gpu();
    let (pod, id) = cri.in_pod(Sandbox::of(Class::Go), &ticker)?;
    wait::until("a line", Duration::from_secs(5), || {
        Ok((!cri.logs(&id)?.is_empty()).then_some(()))
    })?;
    cri.checkpoint(&id, &archive)?;
    cri.remove_pod(&pod)?;
    let container = ticker.from_image(archive.display().to_string());
    let (_, id) = cri.in_pod(Sandbox::of(Class::Go), &container)?;
    let lines =
        |log: String| log.lines().filter_map(|line| line.parse().ok()).collect::<Vec<u64>>();
    let begun = lines(cri.logs(&id)?).len();
    wait::until("a line of the restored container", Duration::from_secs(5), || {
        Ok((lines(cri.logs(&id)?).len() > begun).then_some(()))
    })?;
    let lines = lines(cri.logs(&id)?);
    let again = lines.windows(2).any(|pair| pair[1] <= pair[0]);
    ensure!(again, "no line is twice: {lines:?}");
    cri.finish()
}

/// /dev/shm is the sandbox's and not the container's, so what is in it is not in a checkpoint.
fn shared_memory_is_the_pods(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let archive = case.path("checkpoint.tar");
    let container = Container::script("echo x >/dev/shm/held; exec sleep 1000000 </dev/shm/held");
    let (pod, id) = cri.in_pod(Sandbox::of(Class::Go), &container)?;
    cri.checkpoint(&id, &archive)?;
    cri.remove_pod(&pod)?;
    let pod = cri.pod(Sandbox::of(Class::Go))?;
    let id = cri.create(&pod, &container.from_image(archive.display().to_string()))?;
    let error = cri.fail(["start", &id])?;
    ensure!(error.contains("criu failed"), "{error}");
    cri.finish()
}
