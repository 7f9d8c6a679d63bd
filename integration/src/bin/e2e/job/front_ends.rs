//! ctr, nerdctl, Docker and Podman.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::unistd::Pid;
use stasis_integration::by_hand::{self, ByHand};
use stasis_integration::case::{Case, Container, PORT, Place};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::docker::{self, BY_NAME, Docker, Network, STASIS_RUNC, Start};
use stasis_integration::ipc::Group;
use stasis_integration::nerdctl::Nerdctl;
use stasis_integration::podman::Podman;
use stasis_integration::shim::Shim;
use stasis_integration::suite::Suite;
use stasis_integration::wait;

use super::lives::{FrontEnd, Method, refused, whole_life};
use super::{FILE, KEEPS, execs};
use crate::Test;

const LIMIT: Duration = Duration::from_secs(10);

pub(super) fn tests() -> Vec<(Place, Vec<Test>)> {
    let mut all = Vec::new();
    for (shim, word) in [(Shim::Stasis, "shim"), (Shim::Go, "stasis_runc")] {
        let mut tests =
            both(&format!("ctr_{word}"), |case, method| whole_life(&Ctr::new(case), method));
        tests.push(Test::new(format!("ctr_{word}_refused"), |case: &Case<'_>| {
            refused(&Ctr::new(case))
        }));
        tests.push(Test::new(format!("ctr_{word}_exec"), execs::through_ctr));
        tests.push(Test::new(format!("ctr_{word}_failed_create"), execs::failed_create));
        tests.push(Test::new(format!("ctr_{word}_failed_restore"), execs::failed_restore));
        tests.push(Test::new(format!("ctr_{word}_without_cuda"), execs::without_cuda));
        all.push((Place::apart(shim), tests));
    }
    let mut tests = both("nerdctl_shim", |case, method| whole_life(&OfNerdctl::new(case), method));
    tests.push(Test::new("nerdctl_shim_refused", |case: &Case<'_>| refused(&OfNerdctl::new(case))));
    all.push((Place::apart(Shim::Stasis), tests));
    for (shim, runtime, word) in
        [(Shim::Go, STASIS_RUNC, "stasis_runc"), (Shim::Stasis, BY_NAME, "shim")]
    {
        let mut tests = both(&format!("docker_{word}"), move |case, method| {
            Docker::test(case, |docker| whole_life(&OfDocker::new(docker, runtime), method))
        });
        tests.push(Test::new(format!("docker_{word}_refused"), move |case: &Case<'_>| {
            Docker::test(case, |docker| refused(&OfDocker::new(docker, runtime)))
        }));
        tests.push(Test::new(format!("docker_{word}_exec"), move |case: &Case<'_>| {
            Docker::test(case, |docker| execs::through_docker(docker, runtime))
        }));
        all.push((Place::apart(shim), tests));
    }
    let mut tests = both("podman_stasis_runc", |case, method| {
        let podman = Podman::with_image(case, "store")?;
        whole_life(&OfPodman::new(case, &podman), method)?;
        podman.finish()
    });
    tests.push(Test::new("podman_stasis_runc_refused", |case: &Case<'_>| {
        let podman = Podman::with_image(case, "store")?;
        refused(&OfPodman::new(case, &podman))?;
        podman.finish()
    }));
    all.push((Place::SHARED, tests));
    all
}

/// A test for each method, on a driver that keeps what is shared.
fn both(
    name: &str,
    body: impl Fn(&Case<'_>, Method) -> Result<()> + Clone + Send + 'static,
) -> Vec<Test> {
    let test = |(method, word)| {
        let body = body.clone();
        Test::new(format!("{name}_{word}"), move |case: &Case<'_>| {
            case.gpu.driver(KEEPS)?;
            body(case, method)
        })
    };
    Method::ALL.into_iter().map(test).collect()
}

/// `ctr`. It restores an image into the cgroup that its configuration names, so two at the same time
/// are restored by the shim itself, as containerd would ask it to, into containers that `ctr` made.
pub(crate) struct Ctr<'a> {
    pub(crate) case: &'a Case<'a>,
    restored: RefCell<Vec<(String, ByHand)>>,
}

impl<'a> Ctr<'a> {
    pub(crate) fn new(case: &'a Case<'a>) -> Self {
        Self { case, restored: RefCell::default() }
    }
}

impl FrontEnd for Ctr<'_> {
    fn start(&self, annotated: bool, program: &[&str]) -> Result<String> {
        let container = Container::new(program.iter().copied());
        self.case.start(&if annotated { container.annotated(FILE) } else { container })
    }

    fn address(&self, id: &str) -> Result<(Pid, u16)> {
        let restored = self.restored.borrow();
        let Some((_, shim)) = restored.iter().find(|(found, _)| found == id) else {
            return Ok((self.case.pid(id)?, PORT));
        };
        Ok((Pid::from_raw(i32::try_from(shim.client.state(id, "")?.pid)?), PORT))
    }

    fn exec(&self, id: &str, program: &[&str]) -> Result<String> {
        let restored = self.restored.borrow();
        let Some((_, shim)) = restored.iter().find(|(found, _)| found == id) else {
            return self.case.ctr().exec(id, "join", program);
        };
        let client = &shim.client;
        client.exec(id, "join", program)?;
        client.start_exec(id, "join")?;
        let status = client.wait(id, "join")?.exit_status;
        ensure!(status == 0, "{program:?} ended with {status}");
        client.delete(id, "join")?;
        Ok(String::new())
    }

    fn checkpoint(&self, id: &str, image: &str) -> Result<()> {
        let image = Some(self.case.path(image));
        self.case.checkpoint(id, &Checkpoint { image, ..Checkpoint::default() })
    }

    fn checkpoint_and_end(&self, id: &str, image: &str) -> Result<()> {
        let image = self.case.path(image);
        let restored = self.restored.borrow();
        if let Some((_, shim)) = restored.iter().find(|(found, _)| found == id) {
            let client = &shim.client;
            client.pause(id)?;
            client.checkpoint(id, &image, None, true)?;
            client.wait(id, "")?;
            client.delete(id, "")?;
            return Ok(());
        }
        let exit = Checkpoint { image: Some(image), exit: true, ..Checkpoint::default() };
        self.case.checkpoint(id, &exit)?;
        self.case.wait_stopped(id)?;
        self.case.end_task(id)
    }

    fn restore(&self, image: &str, _into: Option<&str>) -> Result<String> {
        let gpu = self.case.gpu.arguments();
        // What it was started with, as far as the configuration tells. A mount that an annotation
        // asks for is none of a container that launches itself.
        let manifest = std::fs::read_to_string(self.case.path(image).join("stasis.json"))?;
        let mut options: Vec<&str> = gpu.iter().map(String::as_str).collect();
        if manifest.contains("\"made\"") {
            options.extend(["--annotation", FILE]);
        }
        let id = by_hand::container(self.case, &options, &["/bin/ipc"])?;
        let shim = ByHand::start(self.case, &id)?.with_stdio()?;
        shim.create(Some(&self.case.path(image)))?;
        shim.client.start(&id)?;
        self.restored.borrow_mut().push((id.clone(), shim));
        Ok(id)
    }

    fn end(&self, id: &str) -> Result<()> {
        let restored = self.restored.borrow();
        let Some((_, shim)) = restored.iter().find(|(found, _)| found == id) else {
            return self.case.remove(id);
        };
        shim.client.kill(id, "", 9, false)?;
        shim.client.wait(id, "")?;
        shim.client.delete(id, "")?;
        Ok(())
    }

    fn has_two_of_an_image(&self) -> bool {
        true
    }

    /// Paused, and by containerd's store.
    fn more(&self, id: &str, group: &mut Group) -> Result<()> {
        self.case.ctr().pause(id)?;
        self.checkpoint(id, "paused")?;
        self.case.expect_status(id, Status::Paused)?;
        self.case.ctr().resume(id)?;
        self.expect(id, group)?;
        self.case.cycle(id)?;
        self.expect(id, group)
    }
}

/// `nerdctl`, which has the checkpoints of all containers in one place.
pub(crate) struct OfNerdctl<'a> {
    pub(crate) case: &'a Case<'a>,
    pub(crate) nerdctl: Nerdctl<'a>,
    flags: RefCell<Vec<String>>,
}

impl<'a> OfNerdctl<'a> {
    pub(crate) fn new(case: &'a Case<'a>) -> Self {
        Self { case, nerdctl: Nerdctl::new(case), flags: RefCell::default() }
    }
}

impl FrontEnd for OfNerdctl<'_> {
    fn start(&self, annotated: bool, program: &[&str]) -> Result<String> {
        let mut flags = self.nerdctl.gpu();
        flags.extend(["--network", "none"].map(str::to_owned));
        if annotated {
            flags.extend(["--annotation", FILE].map(str::to_owned));
        }
        let words: Vec<&str> = flags.iter().map(String::as_str).collect();
        let id = self.nerdctl.start(&words, program)?;
        self.flags.replace(flags);
        Ok(id)
    }

    fn address(&self, id: &str) -> Result<(Pid, u16)> {
        Ok((self.case.pid(id)?, PORT))
    }

    fn exec(&self, id: &str, program: &[&str]) -> Result<String> {
        self.nerdctl.run(["exec", id].iter().chain(program))
    }

    fn checkpoint(&self, id: &str, image: &str) -> Result<()> {
        self.nerdctl.checkpoint(id, image, &["--leave-running"])
    }

    /// nerdctl does not ask our shim for the end, see `nerdctl.rs`.
    fn checkpoint_and_end(&self, id: &str, image: &str) -> Result<()> {
        self.nerdctl.checkpoint(id, image, &[])?;
        self.nerdctl.run(["kill", id])?;
        self.case.wait_stopped(id)
    }

    fn restore(&self, image: &str, into: Option<&str>) -> Result<String> {
        let id = if let Some(id) = into {
            id.to_owned()
        } else {
            let flags = self.flags.borrow();
            let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
            self.nerdctl.create(&flags, &["/bin/ipc"])?
        };
        self.nerdctl.restore(&id, image, &[])?;
        Ok(id)
    }

    fn end(&self, id: &str) -> Result<()> {
        self.nerdctl.run(["kill", id]).map(drop)
    }

    fn has_two_of_an_image(&self) -> bool {
        true
    }
}

/// Docker, whose checkpoints belong to one container.
pub(crate) struct OfDocker<'a> {
    pub(crate) docker: &'a Docker<'a>,
    pub(crate) runtime: &'a str,
    container: RefCell<Option<docker::Container>>,
}

impl<'a> OfDocker<'a> {
    pub(crate) fn new(docker: &'a Docker<'a>, runtime: &'a str) -> Self {
        Self { docker, runtime, container: RefCell::default() }
    }

    pub(crate) fn container(&self) -> Result<docker::Container> {
        self.container.borrow().clone().context("no container")
    }
}

/// What Docker can restore, see `docker.rs`.
pub(super) fn network() -> Result<Network> {
    Ok(if Suite::current()? == Some(Suite::Forky) { Network::Host } else { Network::Private })
}

impl FrontEnd for OfDocker<'_> {
    fn start(&self, annotated: bool, program: &[&str]) -> Result<String> {
        let mut start = Start::plain(self.runtime, network()?, program);
        start.flags = self.docker.gpu();
        if annotated {
            start.flags.extend(["--annotation", FILE].map(str::to_owned));
        }
        start.counts = true;
        let container = self.docker.start(&start)?;
        let id = container.id.clone();
        self.container.replace(Some(container));
        Ok(id)
    }

    fn address(&self, _id: &str) -> Result<(Pid, u16)> {
        let container = self.container()?;
        Ok((self.docker.pid(&container)?, container.port))
    }

    fn exec(&self, id: &str, program: &[&str]) -> Result<String> {
        self.docker.daemon().run(["exec", id].iter().chain(program))
    }

    fn checkpoint(&self, _id: &str, image: &str) -> Result<()> {
        self.docker.checkpoint_running(&self.container()?, image)
    }

    /// Docker asks for the end where it knows the runtime's options, see `docker.rs`.
    fn checkpoint_and_end(&self, _id: &str, image: &str) -> Result<()> {
        let container = self.container()?;
        self.docker.checkpoint(&container, image)?;
        if self.runtime == STASIS_RUNC {
            self.docker.wait_for(&container, "exited")
        } else {
            self.docker.kill(&container)
        }
    }

    fn restore(&self, image: &str, into: Option<&str>) -> Result<String> {
        let id = into.context("its checkpoints are of one container")?;
        self.docker.restore(&self.container()?, image)?;
        Ok(id.to_owned())
    }

    fn end(&self, _id: &str) -> Result<()> {
        self.docker.kill(&self.container()?)
    }

    fn has_two_of_an_image(&self) -> bool {
        false
    }
}

/// Podman, with archives that are imported under other names.
pub(crate) struct OfPodman<'a> {
    case: &'a Case<'a>,
    pub(crate) podman: &'a Podman<'a>,
    made: RefCell<usize>,
}

impl<'a> OfPodman<'a> {
    pub(crate) fn new(case: &'a Case<'a>, podman: &'a Podman<'a>) -> Self {
        Self { case, podman, made: RefCell::default() }
    }

    fn new_name(&self) -> String {
        let mut made = self.made.borrow_mut();
        *made += 1;
        format!("c{made}")
    }

    fn archive(&self, image: &str) -> PathBuf {
        self.case.path(&format!("{image}.tar"))
    }
}

impl FrontEnd for OfPodman<'_> {
    fn start(&self, annotated: bool, program: &[&str]) -> Result<String> {
        let mut container = Container::new(program.iter().copied());
        if annotated {
            container = container.annotated(FILE);
        }
        let name = self.new_name();
        self.podman.start(&name, &container)?;
        Ok(name)
    }

    fn address(&self, id: &str) -> Result<(Pid, u16)> {
        Ok((self.podman.pid(id)?, PORT))
    }

    fn exec(&self, id: &str, program: &[&str]) -> Result<String> {
        self.podman.run(["exec", id].iter().chain(program))
    }

    fn checkpoint(&self, id: &str, image: &str) -> Result<()> {
        let archive = self.archive(image).display().to_string();
        let export = ["--leave-running", "--compress", "none", "--export", &archive, id];
        self.podman.run([&["container", "checkpoint"], &export[..]].concat()).map(drop)
    }

    fn checkpoint_and_end(&self, id: &str, image: &str) -> Result<()> {
        let archive = self.archive(image).display().to_string();
        let export = ["container", "checkpoint", "--compress", "none", "--export", &archive, id];
        self.podman.run(export)?;
        self.podman.remove(id)
    }

    fn restore(&self, image: &str, _into: Option<&str>) -> Result<String> {
        let (name, archive) = (self.new_name(), self.archive(image).display().to_string());
        self.podman.run(["container", "restore", "--import", &archive, "--name", &name])?;
        wait::until("a restored container", LIMIT, || {
            Ok(self.podman.expect_status(&name, "running").ok())
        })?;
        Ok(name)
    }

    fn end(&self, id: &str) -> Result<()> {
        self.podman.remove(id)
    }

    fn has_two_of_an_image(&self) -> bool {
        true
    }
}
