//! `crictl checkpoint`, and containers that are created from what it wrote.

use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::json;
use stasis_integration::case::Case;
use stasis_integration::cri::{Class, Container, Cri, Pod, Registry, Sandbox};
use stasis_integration::suite::Suite;

use super::printed;
use crate::Test;

pub(super) fn tests() -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for class in Class::OURS {
        let name = format!("two_cycles_{}", class.word());
        tests.push(Test::new(name, move |case: &Case| two_cycles(case, class)));
    }
    tests.extend([
        Test::new("host_network", host_network),
        Test::new("oci_image", oci_image),
        Test::new("restored_lives_on", restored_lives_on),
        Test::new("paused_meanwhile", paused_meanwhile),
        Test::new("driver_fails_to_checkpoint", driver_fails_to_checkpoint),
        Test::new("driver_fails_to_restore", driver_fails_to_restore),
    ]);
    tests.into_iter().map(|test| test.only(&[Suite::Forky])).collect()
}

/// The cell of the matrix. Each container is made in a new pod, the first one's gone.
fn two_cycles(case: &Case, class: Class) -> Result<()> {
    let cri = Cri::start(case)?;
    let (first, second) = (case.path("first.tar"), case.path("second.tar"));

    let (pod, id) = cri.in_pod(Sandbox::of(class), &Container::counter(&[]))?;
    cri.expect(&id, 101)?;
    cri.checkpoint(&id, &first)?;
    cri.expect(&id, 102)?;
    printed(&cri.logs(&id)?, 101..=102)?;
    cri.remove_pod(&pod)?;

    let (pod, id) = restored(&cri, Sandbox::of(class), &first)?;
    cri.expect(&id, 102)?;
    gpu_in_exec(&cri, &id)?;
    printed(&cri.logs(&id)?, 101..=102)?;
    cri.checkpoint(&id, &second)?;
    cri.expect(&id, 103)?;
    cri.remove_pod(&pod)?;

    let (_, id) = restored(&cri, Sandbox::of(class), &second)?;
    cri.expect(&id, 103)?;
    printed(&cri.logs(&id)?, 101..=103)?;
    cri.remove(&id)?;
    cri.finish()
}

/// A container of an archive, in a pod of its own.
fn restored(cri: &Cri<'_>, sandbox: Sandbox, archive: &Path) -> Result<(Pod, String)> {
    cri.in_pod(sandbox, &Container::counter(&[]).from_image(archive.display().to_string()))
}

/// Another process of the container can open the card.
fn gpu_in_exec(cri: &Cri<'_>, id: &str) -> Result<()> {
    let node = cri.exec(id, &["/bin/sh", "-c", "exec 3<>/dev/nvidia0 && ls -l /proc/self/fd/3"])?;
    ensure!(node.contains("/dev/nvidia0"), "exec opened {node:?}");
    let second = "counter --port 0 --tick 10 --log /tmp/second & process=$!
        for try in $(seq 100); do
            grep -q 103 /tmp/second 2>/dev/null && break
            sleep 0.05
        done
        kill $process; wait; head -n 3 /tmp/second; rm /tmp/second";
    printed(cri.exec(id, &["/bin/sh", "-c", second])?.trim(), 101..=103)
}

fn host_network(case: &Case) -> Result<()> {
    // The node's port may be another test's.
    const PORT: u16 = 10117;
    let cri = Cri::start(case)?;
    let archive = case.path("checkpoint.tar");
    let container = Container::counter(&["--port", "10117"]);
    let sandbox = || Sandbox::of(Class::Stasis).on_host_network();
    let (pod, id) = cri.in_pod(sandbox(), &container)?;
    cri.expect_at(&id, PORT, 101)?;
    cri.checkpoint(&id, &archive)?;
    cri.remove_pod(&pod)?;
    let (_, id) = restored(&cri, sandbox(), &archive)?;
    cri.expect_at(&id, PORT, 102)?;
    cri.finish()
}

/// As `buildah add` and `buildah config --annotation` make an image of an archive for a registry.
fn oci_image(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let archive = case.path("checkpoint.tar");
    let (pod, id) = cri.in_pod(Sandbox::of(Class::Stasis), &Container::counter(&[]))?;
    cri.expect(&id, 101)?;
    cri.checkpoint(&id, &archive)?;
    cri.remove_pod(&pod)?;

    let registry = Registry::of_all_tests(&case.image_parts())?;
    let config = json!({ "architecture": "amd64", "os": "linux", "config": {} });
    let annotations = [("org.criu.checkpoint.container.name", "test")];
    let image = registry.push("cri-oci-image:1", &config, &archive, &annotations)?;
    cri.pull(&image)?;
    let container = Container::counter(&[]).from_image(image);
    let (_, id) = cri.in_pod(Sandbox::of(Class::Stasis), &container)?;
    cri.expect(&id, 102)?;
    printed(&cri.logs(&id)?, 101..=102)?;
    cri.finish()
}

/// A restored container is one like others: containerd finds it again, probes and measures it.
fn restored_lives_on(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let archive = case.path("checkpoint.tar");
    // Restored through containerd's own shim, which finds ours.
    let sandbox = || Sandbox::of(Class::StasisPath);
    let (pod, id) = cri.in_pod(sandbox(), &Container::counter(&[]))?;
    cri.expect(&id, 101)?;
    cri.checkpoint(&id, &archive)?;
    cri.remove_pod(&pod)?;
    let (pod, id) = restored(&cri, sandbox(), &archive)?;
    cri.restart()?;
    cri.expect(&id, 102)?;
    printed(&cri.logs(&id)?, 101..=102)?;
    ensure!(cri.memory(&id)? > 0, "it uses no memory");
    cri.exec(&id, &["/bin/sh", "-c", "exec 3<>/dev/nvidia0"])?;
    // Others join it.
    let second = Container::counter(&["--port", "10001"]).named("second");
    let second = cri.begin(&pod, &second)?;
    cri.expect_at(&second, 10001, 101)?;
    ensure!(cri.containerd().shims().len() == 1, "the pod has several shims");
    cri.run(["stop", "--timeout", "0", &id])?;
    let status = cri.wait_exited(&id)?;
    ensure!(status["exitCode"] == 137, "{status}");
    cri.expect_at(&second, 10001, 102)?;
    cri.finish()
}

/// CRI's client pauses a container before it asks for the checkpoint, and resumes it afterwards.
fn paused_meanwhile(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let (_, id) = cri.in_pod(Sandbox::of(Class::Stasis), &Container::counter(&["--tick", "10"]))?;
    cri.checkpoint(&id, &case.path("checkpoint.tar"))?;
    let calls = case.runtime.runc_calls()?;
    let verbs: Vec<&str> = calls
        .iter()
        .filter(|call| call.ends_with(&id))
        .filter_map(|call| {
            call.split(' ').find(|word| ["pause", "checkpoint", "resume"].contains(word))
        })
        .collect();
    ensure!(verbs == ["pause", "checkpoint", "resume"], "runc was called: {verbs:?}");
    cri.finish()
}

fn driver_fails_to_checkpoint(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    for class in Class::OURS {
        let (pod, id) = cri.in_pod(Sandbox::of(class), &Container::counter(&[]))?;
        cri.expect(&id, 101)?;
        case.gpu.faults(&["checkpoint error:999"])?;
        let archive = case.path("failed.tar");
        let error = cri.checkpoint_fails(&id, &archive)?;
        case.gpu.heal()?;
        for word in ["CUDA", "counter", "999"] {
            ensure!(error.contains(word), "{class:?}: the error does not say {word:?}: {error}");
        }
        ensure!(!archive.exists(), "{class:?}: a failed checkpoint left an archive");
        ensure!(cri.state(&id)? == "CONTAINER_RUNNING", "{class:?}: it does not run on");
        cri.expect(&id, 102)?;
        cri.checkpoint(&id, &archive)?;
        std::fs::remove_file(&archive)?;
        cri.remove_pod(&pod)?;
    }
    cri.finish()
}

/// The pod lives, the container is an exited one that says why, and another try works.
fn driver_fails_to_restore(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    for class in Class::OURS {
        let archive = case.path(&format!("{}.tar", class.word()));
        let (pod, id) = cri.in_pod(Sandbox::of(class), &Container::counter(&[]))?;
        cri.expect(&id, 101)?;
        cri.checkpoint(&id, &archive)?;
        cri.remove_pod(&pod)?;

        let pod = cri.pod(Sandbox::of(class))?;
        let container = Container::counter(&[]).from_image(archive.display().to_string());
        let id = cri.create(&pod, &container)?;
        case.gpu.faults(&["restore error:999"])?;
        let error = cri.fail(["start", &id])?;
        case.gpu.heal()?;
        for word in ["CUDA", "counter", "999"] {
            ensure!(error.contains(word), "{class:?}: the error does not say {word:?}: {error}");
        }
        let known = cri.inspect(&id)?;
        ensure!(known["status"]["state"] == "CONTAINER_EXITED", "{class:?}: {known}");
        cri.run(["rm", &id])?;

        let id = cri.begin(&pod, &container)?;
        cri.expect(&id, 102)?;
        cri.remove_pod(&pod)?;
    }
    cri.finish()
}
