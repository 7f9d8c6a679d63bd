//! Pods: several containers and the sandbox in one shim, their namespaces and annotations.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use stasis_integration::case::Case;
use stasis_integration::cdi::Cdi;
use stasis_integration::cri::{Class, Container, Cri, Sandbox};
use stasis_integration::suite::Suite;
use stasis_integration::wait;

use super::printed;
use crate::Test;
use crate::suspend::Stasis;

const SLEEP: &str = "exec sleep 1000000";
const ALLOW: (&str, &str) = ("dev.stasis.multi-process", "allow");
/// Two processes with CUDA that have nothing to do with each other.
const TWO: &str = "/bin/counter --port 10001 & exec /bin/counter";

pub(super) fn tests() -> Vec<Test> {
    let mut tests = vec![
        Test::new("one_shim_for_a_pod", one_shim_for_a_pod),
        Test::new("shim_is_killed", shim_is_killed),
        Test::new("as_with_gos_shim", as_with_gos_shim),
        Test::new("annotations_reach_us", annotations_reach_us),
        Test::new("cdi", cdi),
        Test::new("suspended_by_name", suspended_by_name),
    ];
    for class in Class::OURS {
        let name = format!("namespaces_{}", class.word());
        let body = move |case: &Case| namespaces(case, class);
        tests.push(Test::new(name, body).only(&[Suite::Forky]));
    }
    tests.push(Test::new("multi_process", multi_process).only(&[Suite::Forky]));
    tests
}

/// One server for the sandbox and all containers, which come and go.
fn one_shim_for_a_pod(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    for class in [Class::Stasis, Class::StasisPath] {
        let pod = cri.pod(Sandbox::of(class))?;
        let first = cri.begin(&pod, &Container::counter(&["--port", "10001"]).named("first"))?;
        let second = cri.begin(&pod, &Container::counter(&[]).named("second"))?;
        cri.expect_at(&first, 10001, 101)?;
        cri.expect(&second, 101)?;
        let shims = cri.containerd().shims();
        ensure!(shims.len() == 1, "{class:?}: a pod has {} shims", shims.len());

        kill(cri.pid(&first)?, Signal::SIGKILL)?;
        let status = cri.wait_exited(&first)?;
        ensure!(status["exitCode"] == 137 && status["reason"] == "Error", "{class:?}: {status}");
        cri.remove(&first)?;
        cri.expect(&second, 102)?;
        let third = cri.begin(&pod, &Container::counter(&["--port", "10003"]).named("third"))?;
        cri.expect_at(&third, 10003, 101)?;
        ensure!(cri.containerd().shims() == shims, "{class:?}: another shim");

        ensure!(cri.memory(&second)? > 0, "{class:?}: it uses no memory");
        cri.run(["statsp", "--output", "json", "--id", &pod.id])?;
        // The sandbox goes with containers in it.
        cri.remove_pod(&pod)?;
    }
    cri.finish()
}

/// A container is its pod's and its own name; the other one of the pod keeps its GPU.
fn suspended_by_name(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let pod = cri.pod(Sandbox::of(Class::Stasis))?;
    let first = cri.begin(&pod, &Container::counter(&["--port", "10001"]).named("first"))?;
    let second = cri.begin(&pod, &Container::counter(&[]).named("second"))?;
    cri.expect_at(&first, 10001, 101)?;
    cri.expect(&second, 101)?;
    let status = cri.inspect_pod(&pod)?;
    let name = status["status"]["metadata"]["name"].as_str().context("a pod without a name")?;
    let stasis = Stasis::new(case);
    let name = format!("{name}/first");
    stasis.run(&["suspend", &name])?;
    let seen = stasis.seen(&first)?.context("ps lacks it")?;
    ensure!(seen["operation"] == "suspended" && seen["name"] == *name, "{seen}");
    ensure!(seen["runtime"] == "kubernetes", "{seen}");
    cri.expect(&second, 102)?;
    stasis.run(&["resume", &name])?;
    cri.expect_at(&first, 10001, 102)?;
    cri.finish()
}

/// The kubelet is told that the containers have ended, and can clean up.
fn shim_is_killed(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    for class in [Class::Stasis, Class::StasisPath] {
        let (pod, id) = cri.in_pod(Sandbox::of(class), &Container::counter(&[]))?;
        cri.expect(&id, 101)?;
        for shim in cri.containerd().shims() {
            kill(shim, Signal::SIGKILL)?;
        }
        cri.wait_exited(&id)?;
        cri.remove_pod(&pod)?;
    }
    cri.finish()
}

/// A container without a GPU sees the same and ends in the same ways.
fn as_with_gos_shim(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let go = transcript(&cri, Class::Go)?;
    ensure!(go.len() > 10, "{go:#?}");
    for class in [Class::Stasis, Class::StasisPath] {
        let ours = transcript(&cri, class)?;
        for (at, line) in go.iter().enumerate() {
            ensure!(
                ours.get(at) == Some(line),
                "{class:?}: {:?} instead of {line:?}",
                ours.get(at)
            );
        }
    }
    cri.finish()
}

fn transcript(cri: &Cri<'_>, class: Class) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    let pod = cri.pod(Sandbox::of(class))?;
    let ended = |lines: &mut Vec<String>, what: &str, id: &str| -> Result<()> {
        let mut status = cri.wait_exited(id)?;
        // Go's shim may tell of the end before it has heard of the cause.
        if what == "greedy" && matches!(class, Class::Go) && status["reason"] == "Error" {
            status["reason"] = "OOMKilled".into();
        }
        for key in ["state", "exitCode", "reason", "message"] {
            lines.push(format!("{what}: {key} {}", status[key]));
        }
        lines.push(format!("{what}: printed {:?}", cri.logs(id)?));
        cri.remove(id)
    };

    let id =
        cri.begin(&pod, &Container::script("echo out; echo error >&2; exit 3").named("exit"))?;
    ended(&mut lines, "exit", &id)?;

    let trap = "trap 'echo end; exit 7' TERM; echo begin; while true; do sleep 0.05; done";
    let id = cri.begin(&pod, &Container::script(trap).named("term"))?;
    wait::until("the first line", Duration::from_secs(5), || {
        Ok(cri.logs(&id)?.contains("begin").then_some(()))
    })?;
    lines.push(format!("exec: {:?}", cri.exec(&id, &["sh", "-c", "echo in; exit 0"])?));
    for program in [&["sh", "-c", "echo why >&2; exit 9"][..], &["/none"]] {
        let mut exec = vec!["exec", "--sync", &id];
        exec.extend(program);
        let error = cri.fail(exec)?.replace(&id, "ID");
        // With its time, and a name of its own for each exec.
        let last = error.lines().last().unwrap_or_default();
        let last = last.split_once(" level=").map_or(last, |(_, rest)| rest);
        lines.push(format!("exec: {}", without_hashes(last)));
    }
    let pid = cri.pid(&id)?;
    for file in ["status", "limits", "mountinfo", "oom_score_adj", "attr/current"] {
        let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        for line in text.lines().filter(|line| says_the_same(file, line)) {
            lines.push(format!("{file}: {}", without_hashes(&mount_without_numbers(file, line))));
        }
    }
    cri.run(["stop", "--timeout", "5", &id])?;
    ended(&mut lines, "term", &id)?;

    let greedy = "exec dd if=/dev/zero of=/dev/null bs=200M count=1";
    let id = cri.begin(&pod, &Container::script(greedy).named("greedy").limited(32 << 20))?;
    ended(&mut lines, "greedy", &id)?;

    let id = cri.create(&pod, &Container::new(["/none"]).without_gpu().named("none"))?;
    let error = cri.fail(["start", &id])?;
    let last = error.lines().last().unwrap_or_default().replace(&id, "ID");
    // With the time of it.
    let last = last.split_once(" level=").map_or(last.as_str(), |(_, rest)| rest);
    lines.push(format!("start: {}", without_hashes(last)));
    lines.push(format!("start: {}", cri.state(&id)?));
    cri.remove_pod(&pod)?;
    Ok(lines)
}

/// Whether a line of such a file of a process is the same each time.
fn says_the_same(file: &str, line: &str) -> bool {
    const STATUS: [&str; 6] = ["Cap", "NoNewPrivs", "Seccomp", "Uid", "Gid", "Umask"];
    file != "status" || STATUS.iter().any(|name| line.starts_with(name))
}

/// A line of mountinfo without the numbers of mounts and devices.
fn mount_without_numbers(file: &str, line: &str) -> String {
    if file != "mountinfo" {
        return line.to_owned();
    }
    // The layers of the root have paths of their own.
    let words = line.split(' ').skip(3).filter(|word| !word.contains("lowerdir="));
    words.collect::<Vec<_>>().join(" ")
}

/// A text without the ids of containers, pods and execs, and the numbers of pods' names.
fn without_hashes(text: &str) -> String {
    let whole = |word: &str| {
        let hash = word.len() == 64 && word.chars().all(|c| c.is_ascii_hexdigit());
        let number = !word.is_empty() && word.chars().all(|c| c.is_ascii_digit());
        if hash || number { "#".to_owned() } else { word.to_owned() }
    };
    let mut result = String::new();
    let mut word = String::new();
    for c in text.chars() {
        if c.is_ascii_alphanumeric() {
            word.push(c);
            continue;
        }
        result.push_str(&whole(&word));
        word.clear();
        result.push(c);
    }
    result + &whole(&word)
}

/// containerd passes annotations on as the class says, from the pod and from the container.
fn annotations_reach_us(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    // One that this host does not know is refused by its name.
    let (name, value) = ("dev.stasis.jobs", "file");
    for class in [Class::Stasis, Class::StasisPath] {
        let refused = cri.pod_fails(&Sandbox::of(class).annotated(name, value))?;
        ensure!(refused.contains(name), "{class:?}: {refused}");
        let pod = cri.pod(Sandbox::of(class))?;
        let id = cri.create(&pod, &Container::script(SLEEP).annotated(name, value))?;
        let refused = cri.fail(["start", &id])?;
        ensure!(refused.contains(name), "{class:?}: {refused}");
        cri.remove_pod(&pod)?;
        // A sandbox computes nothing and needs no driver for it; the container does.
        let (name, value) = ("dev.stasis.job", "file");
        let pod = cri.pod(Sandbox::of(class).annotated(name, value))?;
        let id = cri.create(&pod, &Container::script(SLEEP).annotated(name, value))?;
        let refused = cri.fail(["start", &id])?;
        ensure!(refused.contains("needs branch 610"), "{class:?}: {refused}");
        cri.remove_pod(&pod)?;
    }
    cri.finish()
}

fn multi_process(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let class = Class::Stasis;
    let two = || Container::new(["/bin/sh", "-c", TWO]);
    let both = |id: &str, count| -> Result<()> {
        cri.expect(id, count)?;
        cri.expect_at(id, 10001, count)
    };

    let (pod, id) = cri.in_pod(Sandbox::of(class), &two())?;
    both(&id, 101)?;
    let error = cri.checkpoint_fails(&id, &case.path("refused.tar"))?;
    ensure!(error.contains(ALLOW.0), "the error tells no way out: {error}");
    both(&id, 102)?;
    cri.remove_pod(&pod)?;

    // A container's own annotations are in its checkpoint; CRI takes them from there, and only
    // from there.
    let archive = case.path("checkpoint.tar");
    let (pod, id) = cri.in_pod(Sandbox::of(class), &two().annotated(ALLOW.0, ALLOW.1))?;
    both(&id, 101)?;
    cri.checkpoint(&id, &archive)?;
    cri.remove_pod(&pod)?;
    let restored = || two().from_image(archive.display().to_string());
    let (pod, id) = cri.in_pod(Sandbox::of(class), &restored())?;
    both(&id, 102)?;
    cri.remove_pod(&pod)?;

    // A pod's are not: the new pod has its own.
    let allowing = || Sandbox::of(class).annotated(ALLOW.0, ALLOW.1);
    let (pod, id) = cri.in_pod(allowing(), &two())?;
    both(&id, 101)?;
    cri.checkpoint(&id, &case.path("of-pod.tar"))?;
    cri.remove_pod(&pod)?;
    let container = two().from_image(case.path("of-pod.tar").display().to_string());
    let (_, id) = cri.in_pod(allowing(), &container)?;
    both(&id, 102)?;
    cri.finish()
}

/// A restored container is in the namespaces of the new pod.
fn namespaces(case: &Case, class: Class) -> Result<()> {
    let cri = Cri::start(case)?;
    let archive = case.path("checkpoint.tar");
    let sandbox = || Sandbox::of(class).with_shared_pids();
    let (pod, id) = cri.in_pod(sandbox(), &Container::counter(&[]))?;
    cri.expect(&id, 101)?;
    cri.checkpoint(&id, &archive)?;
    cri.expect(&id, 102)?;
    cri.remove_pod(&pod)?;
    let pod = cri.pod(sandbox())?;
    let container = Container::counter(&[]).from_image(archive.display().to_string());
    let id = cri.begin(&pod, &container)?;
    cri.expect(&id, 102)?;
    printed(&cri.logs(&id)?, 101..=102)?;
    for kind in ["net", "ipc", "uts", "pid"] {
        let (ours, pods) =
            (namespace(cri.pid(&id)?, kind)?, namespace(cri.sandbox_pid(&pod)?, kind)?);
        ensure!(ours == pods, "its {kind} namespace is not the pod's: {ours}, {pods}");
    }
    ensure!(cri.containerd().shims().len() == 1, "more shims than pods");
    cri.remove(&id)?;
    cri.finish()
}

fn namespace(pid: Pid, kind: &str) -> Result<String> {
    let link = fs::read_link(format!("/proc/{pid}/ns/{kind}"))?;
    Ok(link.to_string_lossy().into_owned())
}

/// The kubelet names a CDI device; containerd edits the container's specification.
fn cdi(case: &Case) -> Result<()> {
    let cri = Cri::start(case)?;
    let gpu = Cdi::install_in(&cri.cdi(), "cri", &case.gpu)?;
    let counter = || Container::counter(&[]).with_cdi_device(&gpu.device());
    let (pod, id) = cri.in_pod(Sandbox::of(Class::Stasis), &counter())?;
    cri.expect(&id, 101)?;
    if Suite::current()? == Some(Suite::Forky) {
        let archive = case.path("checkpoint.tar");
        cri.checkpoint(&id, &archive)?;
        cri.remove_pod(&pod)?;
        let container = counter().from_image(archive.display().to_string());
        let (_, id) = cri.in_pod(Sandbox::of(Class::Stasis), &container)?;
        cri.expect(&id, 102)?;
    }
    cri.finish()
}
