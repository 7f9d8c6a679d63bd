//! ctr, nerdctl, Docker and Podman: the container is theirs all the while.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use stasis_integration::case::{Case, Container, PORT, Place};
use stasis_integration::command;
use stasis_integration::docker::{BY_NAME, Docker, STASIS_RUNC};
use stasis_integration::podman::Podman;
use stasis_integration::shim::Shim;
use stasis_integration::suite::Suite;
use stasis_integration::udp::{self, Question};

use super::{LIMIT, SILENCE, Stasis, says};
use crate::Test;
use crate::job::front_ends::{Ctr, OfDocker, OfNerdctl, OfPodman};
use crate::job::lives::FrontEnd;

pub(super) fn tests() -> Vec<(Place, Vec<Test>)> {
    let one = |name: &str, body: fn(&Case<'_>) -> Result<()>| vec![Test::new(name, body)];
    let mut all = vec![
        (Place::apart(Shim::Stasis), one("ctr_shim", |case| whole_life(case, &Ctr::new(case)))),
        (Place::apart(Shim::Go), one("ctr_stasis_runc", |case| whole_life(case, &Ctr::new(case)))),
        (
            Place::apart(Shim::Stasis),
            one("nerdctl_shim", |case| whole_life(case, &OfNerdctl::new(case))),
        ),
        (Place::SHARED, one("podman_stasis_runc", podman)),
        (Place::SHARED, vec![Test::new("podman_crun", crun).only(&[Suite::Trixie])]),
    ];
    for (shim, runtime, word) in
        [(Shim::Go, STASIS_RUNC, "stasis_runc"), (Shim::Stasis, BY_NAME, "shim")]
    {
        let test = Test::new(format!("docker_{word}"), move |case: &Case<'_>| {
            Docker::test(case, |docker| whole_life(case, &OfDocker::new(docker, runtime)))
        });
        all.push((Place::apart(shim), vec![test]));
    }
    all
}

/// What people do with containers besides.
trait Client: FrontEnd {
    /// The id as the client shows it.
    fn shown(&self, id: &str) -> Result<String>;
    /// The id as its runtime knows it.
    fn whole(&self, id: &str) -> Result<String>;
    /// The name by which its client knows it, where it has names.
    fn name(&self, _id: &str) -> Result<Option<String>> {
        Ok(None)
    }
    /// As the client calls it: `running`, `paused`.
    fn status(&self, id: &str) -> Result<String>;
    fn pause(&self, id: &str) -> Result<()>;
    fn unpause(&self, id: &str) -> Result<()>;
    /// The word of `stasis ps` for this client.
    fn runtime(&self) -> &'static str;
    /// What has to be said where the client has its runtime's state elsewhere than usual.
    fn root(&self) -> Vec<String> {
        Vec::new()
    }
    /// Takes a container away that has ended, so that nothing of it is left.
    fn forget(&self, _id: &str) -> Result<()> {
        Ok(())
    }
}

impl Client for Ctr<'_> {
    fn shown(&self, id: &str) -> Result<String> {
        Ok(id.to_owned())
    }

    fn whole(&self, id: &str) -> Result<String> {
        Ok(id.to_owned())
    }

    fn status(&self, id: &str) -> Result<String> {
        Ok(format!("{:?}", self.case.ctr().status(id)?).to_lowercase())
    }

    fn pause(&self, id: &str) -> Result<()> {
        self.case.ctr().pause(id)
    }

    fn unpause(&self, id: &str) -> Result<()> {
        self.case.ctr().resume(id)
    }

    fn runtime(&self) -> &'static str {
        "containerd"
    }
}

impl Client for OfNerdctl<'_> {
    fn shown(&self, id: &str) -> Result<String> {
        let list = self.nerdctl.run(["ps", "--quiet"])?;
        let mut shown = list.lines().map(str::trim);
        Ok(shown.find(|shown| id.starts_with(shown)).context("nerdctl ps lacks it")?.to_owned())
    }

    fn whole(&self, id: &str) -> Result<String> {
        Ok(id.to_owned())
    }

    fn name(&self, id: &str) -> Result<Option<String>> {
        self.nerdctl.inspect(id, "{{.Name}}").map(Some)
    }

    fn status(&self, id: &str) -> Result<String> {
        self.nerdctl.inspect(id, "{{.State.Status}}")
    }

    fn pause(&self, id: &str) -> Result<()> {
        self.nerdctl.run(["pause", id]).map(drop)
    }

    fn unpause(&self, id: &str) -> Result<()> {
        self.nerdctl.run(["unpause", id]).map(drop)
    }

    /// A killed one keeps its task until then.
    fn forget(&self, id: &str) -> Result<()> {
        self.nerdctl.run(["rm", "--force", id]).map(drop)
    }

    fn runtime(&self) -> &'static str {
        "containerd"
    }
}

impl Client for OfDocker<'_> {
    fn shown(&self, id: &str) -> Result<String> {
        let list = self.docker.daemon().run(["ps", "--quiet"])?;
        let mut shown = list.lines().map(str::trim);
        Ok(shown.find(|shown| id.starts_with(shown)).context("docker ps lacks it")?.to_owned())
    }

    fn whole(&self, id: &str) -> Result<String> {
        Ok(id.to_owned())
    }

    fn name(&self, _id: &str) -> Result<Option<String>> {
        let name = self.docker.inspect(&self.container()?, ".Name")?;
        Ok(Some(name.trim_start_matches('/').to_owned()))
    }

    fn status(&self, _id: &str) -> Result<String> {
        self.docker.inspect(&self.container()?, ".State.Status")
    }

    fn pause(&self, id: &str) -> Result<()> {
        self.docker.daemon().run(["pause", id]).map(drop)
    }

    fn unpause(&self, id: &str) -> Result<()> {
        self.docker.daemon().run(["unpause", id]).map(drop)
    }

    fn runtime(&self) -> &'static str {
        "docker"
    }

    /// Docker's own place is below its `--exec-root`, which is not the usual one here.
    fn root(&self) -> Vec<String> {
        if self.runtime != STASIS_RUNC {
            return Vec::new();
        }
        let site = self.docker.case().site().directory();
        let root = site.join("docker/exec/runtime-runc/moby");
        vec!["--root".to_owned(), root.display().to_string()]
    }
}

impl Client for OfPodman<'_> {
    fn shown(&self, id: &str) -> Result<String> {
        let whole = self.whole(id)?;
        let list = self.podman.run(["ps", "--quiet"])?;
        let mut shown = list.lines().map(str::trim);
        Ok(shown.find(|shown| whole.starts_with(shown)).context("podman ps lacks it")?.to_owned())
    }

    fn whole(&self, id: &str) -> Result<String> {
        self.podman.id(id)
    }

    fn name(&self, id: &str) -> Result<Option<String>> {
        Ok(Some(id.to_owned()))
    }

    fn status(&self, id: &str) -> Result<String> {
        let status = self.podman.inspect(id, "/State/Status")?;
        Ok(status.as_str().context("no text")?.to_owned())
    }

    fn pause(&self, id: &str) -> Result<()> {
        self.podman.run(["pause", id]).map(drop)
    }

    fn unpause(&self, id: &str) -> Result<()> {
        self.podman.run(["unpause", id]).map(drop)
    }

    fn runtime(&self) -> &'static str {
        "podman"
    }
}

/// A container and the number that its counter has come to.
struct Counter<'a> {
    client: &'a dyn Client,
    stasis: Stasis<'a>,
    roots: Vec<String>,
    id: String,
    last: u64,
}

impl Counter<'_> {
    fn expect(&mut self) -> Result<()> {
        let (init, port) = self.client.address(&self.id)?;
        let answer = udp::ask(init, port)?;
        self.last += 1;
        ensure!(answer == self.last, "the counter said {answer} instead of {}", self.last);
        Ok(())
    }

    /// `stasis VERB` of it by its id as its client shows it.
    fn stasis(&self, verb: &str) -> Result<String> {
        self.stasis_of(&self.client.shown(&self.id)?, verb)
    }

    fn stasis_of(&self, container: &str, verb: &str) -> Result<String> {
        let mut arguments = vec![verb, container];
        arguments.extend(self.roots.iter().map(String::as_str));
        self.stasis.run(&arguments)
    }

    fn seen(&self) -> Result<Value> {
        let whole = self.client.whole(&self.id)?;
        let mut arguments = vec!["ps", &whole];
        arguments.extend(self.roots.iter().map(String::as_str));
        let list = self.stasis.json(&arguments)?;
        let mut all = list.as_array().context("no list")?.iter();
        Ok(all.find(|container| container["id"] == *whole).context("ps lacks it")?.clone())
    }

    fn expect_suspended(&self) -> Result<()> {
        self.stasis.expect_free()?;
        let seen = self.seen()?;
        ensure!(seen["runtime"] == self.client.runtime(), "{seen}");
        let name = self.client.name(&self.id)?;
        ensure!(seen["name"] == serde_json::to_value(&name)?, "{seen} instead of {name:?}");
        ensure!(seen["operation"] == "suspended" && seen["paused"] == false, "{seen}");
        super::expect_states(&seen, 1, "suspended")?;
        let status = self.client.status(&self.id)?;
        ensure!(status == "running", "its client says {status}");
        Ok(())
    }

    fn expect_running(&self) -> Result<()> {
        let seen = self.seen()?;
        ensure!(seen["operation"].is_null(), "{seen}");
        super::expect_states(&seen, 1, "running")
    }

    fn suspend(&self) -> Result<()> {
        says(
            &self.stasis("suspend")?,
            &[
                &self.client.whole(&self.id)?,
                "is suspended: 1 process in",
                "8.0 MiB free again on GPU-",
                "stasis resume",
            ],
        )?;
        self.expect_suspended()
    }

    fn resume(&self) -> Result<()> {
        says(&self.stasis("resume")?, &["is resumed: 1 process in"])?;
        self.expect_running()
    }

    /// By its name, if it has one.
    fn by_name(&mut self) -> Result<()> {
        let Some(name) = self.client.name(&self.id)? else { return Ok(()) };
        let whole = self.client.whole(&self.id)?;
        says(&self.stasis_of(&name, "suspend")?, &[&format!("{whole} is suspended")])?;
        self.expect_suspended()?;
        says(&self.stasis_of(&name, "resume")?, &[&format!("{whole} is resumed")])?;
        self.expect_running()?;
        self.expect()
    }

    /// Asked while it is suspended, it answers when it is resumed.
    fn suspended_meanwhile(&mut self) -> Result<()> {
        self.suspend()?;
        let (init, port) = self.client.address(&self.id)?;
        let question = Question::send(init, port)?;
        question.expect_none(SILENCE)?;
        self.resume()?;
        self.last += 1;
        let answer = question.answer()?;
        ensure!(answer == self.last, "the counter said {answer} instead of {}", self.last);
        self.expect()
    }
}

fn start<'a>(client: &'a dyn Client, stasis: Stasis<'a>) -> Result<Counter<'a>> {
    let id = client.start(false, &["/bin/counter", "--stdout", "--pattern-mib", "8"])?;
    let roots = client.root();
    let mut counter = Counter { client, stasis, roots, id, last: 100 };
    counter.expect()?;
    Ok(counter)
}

/// Suspended and resumed, twice, also when it is already; paused, checkpointed, restored and ended
/// while it is suspended.
fn whole_life(case: &Case<'_>, client: &dyn Client) -> Result<()> {
    let stasis = Stasis::new(case);
    let mut counter = start(client, stasis)?;
    counter.suspended_meanwhile()?;
    counter.suspended_meanwhile()?;
    counter.by_name()?;

    says(&counter.stasis("resume")?, &["is not suspended: there is nothing to resume"])?;
    counter.expect()?;
    counter.suspend()?;
    says(&counter.stasis("suspend")?, &["is suspended already"])?;
    counter.expect_suspended()?;
    counter.resume()?;
    counter.expect()?;

    counter.suspend()?;
    client.pause(&counter.id)?;
    let seen = counter.seen()?;
    ensure!(seen["paused"] == true && seen["operation"] == "suspended", "{seen}");
    client.unpause(&counter.id)?;
    counter.expect_suspended()?;

    client.checkpoint(&counter.id, "running")?;
    counter.expect_suspended()?;
    counter.resume()?;
    counter.expect()?;

    counter.suspend()?;
    client.checkpoint_and_end(&counter.id, "ended")?;
    stasis.expect_free()?;
    counter.id = client.restore("ended", Some(&counter.id))?;
    counter.expect_running()?;
    stasis.expect_no_journal()?;
    counter.expect()?;

    // The restored one as the first one; and its end.
    counter.stasis("suspend")?;
    stasis.expect_free()?;
    counter.resume()?;
    counter.expect()?;
    counter.stasis("suspend")?;
    client.end(&counter.id)?;
    client.forget(&counter.id)?;
    stasis.expect_free()?;
    stasis.expect_no_journal()
}

fn podman(case: &Case<'_>) -> Result<()> {
    let podman = Podman::with_image(case, "store")?;
    let client = OfPodman::new(case, &podman);
    whole_life(case, &client)?;
    podman.finish()
}

/// Stock crun, which knows nothing of Stasis: its containers are found, too.
fn crun(case: &Case<'_>) -> Result<()> {
    let podman = Podman::with_image(case, "store")?
        .with_runtime("/usr/bin/crun")
        .with_cgroups_of_version_2()?;
    let mut container = Container::counter(&["--stdout", "--pattern-mib", "8"]);
    // The host has no controllers in version 2.
    container.options.push("--pids-limit=0".to_owned());
    podman.start("c1", &container)?;
    podman.expect("c1", 101)?;
    let whole = podman.id("c1")?;
    let run = |arguments: &[&str]| -> Result<String> {
        // Where the cgroups are mounted as crun sees them.
        let call = Stasis::new(case).command(arguments);
        let mut there = podman.program(call.get_program());
        there.args(call.get_args());
        for (key, value) in call.get_envs() {
            there.env(key, value.unwrap_or_default());
        }
        command::succeed(&mut there, LIMIT)
    };
    for number in [102, 104] {
        run(&["suspend", &whole[..12]])?;
        Stasis::new(case).expect_free()?;
        says(&run(&["ps"])?, &["podman", &whole, "suspended", "(8.0 MiB)"])?;
        podman.expect_status("c1", "running")?;
        let question = Question::send(podman.pid("c1")?, PORT)?;
        question.expect_none(SILENCE)?;
        run(&["resume", &whole[..12]])?;
        let answer = question.answer()?;
        ensure!(answer == number, "{answer} instead of {number}");
        podman.expect("c1", number + 1)?;
    }
    podman.finish()
}
