//! How a container is named: by its id or the beginning of it, a process, a cgroup, and below which
//! root directory.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::runtime::Settings;
use stasis_integration::udp::{self, Question};
use stasis_integration::{command, leaks, wait};

use super::killed::kill;
use super::{LIMIT, SILENCE, Stasis, says};
use crate::Test;
use crate::job::own::Own;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("by_pid", by_pid),
        Test::new("by_root", by_root),
        Test::new("unknown_or_ambiguous", unknown),
        Test::new("by_cgroup_of_its_own", by_cgroup),
        Test::new("by_cgroup_paused", by_frozen_cgroup),
        Test::new("by_cgroup_killed", by_cgroup_killed),
        Test::new("by_cgroup_killed_and_repaired", by_cgroup_repaired),
        Test::new("by_cgroup_after_the_end_of_its_oldest", by_cgroup_without_its_oldest),
        Test::new("own_cgroup_refused", own_cgroup),
        Test::new("wrong_cgroup_refused", wrong_cgroup),
    ]
}

fn by_pid(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), case.start_counter(&[])?);
    let pid = case.pid(&id)?.to_string();
    says(
        &stasis.run(&["suspend", "--pid", &pid])?,
        &[&format!("{id} is suspended"), &format!("stasis resume --pid {pid}\n")],
    )?;
    stasis.expect_suspended(&id, 1)?;
    says(&stasis.run(&["resume", "--pid", &pid])?, &[&format!("{id} is resumed")])?;
    case.expect(&id, 102)?;
    // That of the test is in no container.
    let own = std::process::id().to_string();
    let error = stasis.fails(&["suspend", "--pid", &own])?;
    says(&error, &[&format!("pid {own} is in no container"), "--cgroup"])
}

/// A runtime may be told any directory, which has to be said then.
fn by_root(case: &Case<'_>) -> Result<()> {
    let mut own = Own::new(case, "a", &["/bin/counter"])?;
    own.start()?;
    let (init, id) = (own.init()?, own.bare.id().to_owned());
    let answers = |count: u64| -> Result<()> {
        let answer = udp::ask(init, stasis_integration::case::PORT)?;
        ensure!(answer == count, "{answer} instead of {count}");
        Ok(())
    };
    answers(101)?;
    let stasis = Stasis::new(case);
    let error = stasis.fails(&["suspend", &id])?;
    says(&error, &["no container has the id", "--root", "stasis ps --all"])?;
    ensure!(stasis.seen(&id)?.is_none(), "ps looks everywhere");
    let root = own.bare.root().display().to_string();
    let said = stasis.run(&["suspend", &id, "--root", &root])?;
    // The sentence can be typed as it is.
    says(&said, &[&format!("stasis resume {id} --root {root}\n")])?;
    stasis.expect_free()?;
    let list = stasis.json(&["ps", "--root", &root])?;
    ensure!(list[0]["id"] == *id && list[0]["operation"] == "suspended", "{list}");
    ensure!(list.as_array().is_some_and(|all| all.len() == 1), "{list}");
    says(&stasis.run(&["repair", "--root", &root])?, &["is suspended by stasis suspend"])?;
    stasis.run(&["resume", &id, "--root", &root])?;
    answers(102)?;
    own.delete()
}

fn unknown(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let (one, two) = (case.start_counter(&[])?, case.start_counter(&[])?);
    let common = &one[..one.len() - 1];
    for verb in ["suspend", "resume", "repair"] {
        let error = stasis.fails(&[verb, common])?;
        let root = case.root().display().to_string();
        let places = [format!("{one} in {root}"), format!("{two} in {root}")];
        says(&error, &[&format!("{common} may be"), &places[0], &places[1], "all of its id"])?;
        let error = stasis.fails(&[verb, "no-such-one"])?;
        says(&error, &["no container has the id or the name no-such-one", &root, "--root"])?;
    }
    for arguments in [&["suspend"][..], &["suspend", &one, "--pid", "1"], &["resume", "--odd"]] {
        let finished = command::run(&mut stasis.command(arguments), LIMIT)?;
        ensure!(finished.status.code() == Some(2), "{arguments:?}: {finished:?}");
        says(&finished.stderr, &["Usage: stasis"])?;
    }
    stasis.expect_no_journal()?;
    case.expect(&one, 102)?;
    case.expect(&two, 102)
}

/// A counter on the host, in a cgroup of its own and in no container.
struct Alone {
    /// As it stands in /proc/PID/cgroup.
    cgroup: String,
    child: Child,
    address: SocketAddrV4,
    last: u64,
}

/// Where cgroups are frozen here: version 1.
const FREEZERS: &str = "/sys/fs/cgroup/freezer";

impl Alone {
    fn start(case: &Case<'_>, port: u16) -> Result<Self> {
        let cgroup = format!("/{}/{}", std::env::var("LAB_ID")?, case.name());
        let directory = directory(&cgroup);
        fs::create_dir_all(&directory)?;
        let program = format!(
            "echo $$ >{}/cgroup.procs && exec {} --port {port} --pattern-mib 8",
            directory.display(),
            case.binary("counter").display()
        );
        // A copy, as a mapping has the name of the file and not of a link to it.
        let libraries = case.path("lib");
        fs::create_dir_all(&libraries)?;
        fs::copy(case.gpu.library(), libraries.join("libcuda.so.1"))?;
        let mut shell = Command::new("sh");
        shell.args(["-c", &program]).env("LD_LIBRARY_PATH", libraries);
        shell.env("EMULATED_GPU_DIR", case.gpu.store());
        let log = fs::File::create(case.path("alone.log"))?;
        let child = shell.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?;
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        let mut alone = Self { cgroup, child, address, last: 100 };
        alone.expect()?;
        Ok(alone)
    }

    fn directory(&self) -> PathBuf {
        directory(&self.cgroup)
    }

    fn expect(&mut self) -> Result<()> {
        self.answered(udp::ask_at(self.address)?)
    }

    fn answered(&mut self, answer: u64) -> Result<()> {
        self.last += 1;
        ensure!(answer == self.last, "{answer} instead of {}", self.last);
        Ok(())
    }

    fn freeze(&self, word: &str) -> Result<()> {
        Ok(fs::write(self.directory().join("freezer.state"), word)?)
    }

    fn end(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        leaks::remove_cgroup(self.cgroup.trim_start_matches('/'))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = self.freeze("THAWED");
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = leaks::remove_cgroup(self.cgroup.trim_start_matches('/'));
    }
}

fn directory(cgroup: &str) -> PathBuf {
    Path::new(FREEZERS).join(cgroup.trim_start_matches('/'))
}

/// Named by its directory, and as it stands in /proc/PID/cgroup.
fn by_cgroup(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let mut alone = Alone::start(case, 18301)?;
    let names = [alone.directory().display().to_string(), alone.cgroup.clone()];
    for name in &names {
        says(
            &stasis.run(&["suspend", "--cgroup", name])?,
            &["is suspended: 1 process in", &format!("stasis resume --cgroup {name}\n")],
        )?;
        stasis.expect_free()?;
        let seen = stasis.json(&["ps"])?;
        let mut seen = seen.as_array().context("no list")?.iter();
        let own = seen.find(|found| found["id"] == *names[0]).context("ps lacks it")?;
        ensure!(own["runtime"] == "cgroup" && own["operation"] == "suspended", "{own}");
        super::expect_states(own, 1, "suspended")?;
        let question = Question::send_to(alone.address)?;
        question.expect_none(SILENCE)?;
        says(&stasis.run(&["suspend", "--cgroup", name])?, &["is suspended already"])?;
        says(&stasis.run(&["resume", "--cgroup", name])?, &["is resumed: 1 process in"])?;
        alone.answered(question.answer()?)?;
        stasis.expect_no_journal()?;
        says(&stasis.run(&["resume", "--cgroup", name])?, &["nothing to resume"])?;
        alone.expect()?;
    }
    // No container: --pid does not find it, and says what does.
    let pid = alone.child.id().to_string();
    says(&stasis.fails(&["suspend", "--pid", &pid])?, &["is in no container", "--cgroup"])?;
    alone.end()
}

/// Somebody has frozen it, and it stays so.
fn by_frozen_cgroup(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let mut alone = Alone::start(case, 18302)?;
    alone.freeze("FROZEN")?;
    let state = || -> Result<String> {
        Ok(fs::read_to_string(alone.directory().join("freezer.state"))?.trim().to_owned())
    };
    stasis.run(&["suspend", "--cgroup", &alone.cgroup])?;
    stasis.expect_free()?;
    ensure!(state()? == "FROZEN", "it is {}", state()?);
    stasis.run(&["resume", "--cgroup", &alone.cgroup])?;
    ensure!(state()? == "FROZEN", "it is {}", state()?);
    ensure!(case.gpu.used(0)? > 0, "its memory is not back");
    alone.freeze("THAWED")?;
    alone.expect()?;
    alone.end()
}

/// The next operation on the cgroup puts right what a killed one has left.
fn by_cgroup_killed(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let mut alone = Alone::start(case, 18303)?;
    for (fault, next) in [("lock hang", "suspend"), ("checkpoint hang-after", "resume")] {
        case.gpu.faults(&[fault])?;
        let mut suspend = stasis.command(&["suspend", "--cgroup", &alone.cgroup]).spawn()?;
        let count = case.gpu.store().join("faults.count");
        stasis_integration::wait::until("a call of the driver", LIMIT, || {
            Ok(count.exists().then_some(()))
        })?;
        std::thread::sleep(SILENCE);
        suspend.kill()?;
        suspend.wait()?;
        case.gpu.heal()?;
        stasis.run(&[next, "--cgroup", &alone.cgroup])?;
        if next == "suspend" {
            stasis.expect_free()?;
            stasis.run(&["resume", "--cgroup", &alone.cgroup])?;
        }
        stasis.expect_no_journal()?;
        alone.expect()?;
    }
    alone.end()
}

/// Nobody has to say which cgroup it was.
fn by_cgroup_repaired(case: &Case<'_>) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let stasis = Stasis::new(case);
    let mut alone = Alone::start(case, 18305)?;
    let directory = alone.directory().display().to_string();
    let cgroup = alone.cgroup.clone();
    for (fault, arguments) in [
        ("lock hang", &["repair"][..]),
        ("checkpoint hang", &["repair", &directory]),
        ("checkpoint hang-after", &["repair", &cgroup]),
    ] {
        kill(case, &["suspend", "--cgroup", &cgroup], fault)?;
        says(&stasis.run(arguments)?, &[&directory, "is repaired: it runs"])?;
        stasis.expect_no_journal()?;
        alone.expect()?;
    }
    stasis.run(&["suspend", "--cgroup", &cgroup])?;
    says(&stasis.run(&["repair"])?, &[&directory, "is suspended by stasis suspend"])?;
    stasis.run(&["resume", "--cgroup", &cgroup])?;
    alone.expect()?;
    // Not even the cgroup is there any more.
    kill(case, &["suspend", "--cgroup", &cgroup], "checkpoint hang-after")?;
    alone.end()?;
    says(&stasis.run(&["repair"])?, &[&directory, "does not run any more"])?;
    stasis.expect_no_journal()
}

/// A process without CUDA on the host, which is there before and after others.
struct Idle(Child);

impl Idle {
    fn start() -> Result<Self> {
        Ok(Self(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn()?))
    }

    fn join(&self, alone: &Alone) -> Result<()> {
        Ok(fs::write(alone.directory().join("cgroup.procs"), self.0.id().to_string())?)
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// It is the same cgroup as long as one that was suspended is in it.
fn by_cgroup_without_its_oldest(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let (first, second, third) = (Idle::start()?, Idle::start()?, Idle::start()?);
    let mut alone = Alone::start(case, 18306)?;
    let cgroup = alone.cgroup.clone();
    first.join(&alone)?;
    stasis.run(&["suspend", "--cgroup", &cgroup])?;
    // While room is waited for.
    case.gpu.configure(&["memory=1048576"])?;
    let said = case.path("resume");
    let mut resume = stasis.command(&["resume", "--cgroup", &cgroup, "--timeout", "2s"]);
    let mut resume = resume.stderr(fs::File::create(&said)?).spawn()?;
    let begun = || Ok(fs::read_to_string(&said)?.contains(": cuda-restore").then_some(()));
    wait::until("the resume", LIMIT, begun)?;
    drop(first);
    let ended = command::wait(&mut resume, LIMIT)?;
    ensure!(
        ended.is_some_and(|status| status.code() == Some(1)),
        "the resume ended with {ended:?}"
    );
    says(&fs::read_to_string(&said)?, &["MiB are needed", "is suspended and nothing is lost"])?;
    case.gpu.configure(&["memory=1073741824"])?;
    says(&stasis.run(&["suspend", "--cgroup", &cgroup])?, &["is suspended already"])?;
    says(&stasis.run(&["repair"])?, &["is suspended by stasis suspend"])?;
    // An older one than those that are there.
    second.join(&alone)?;
    let said = stasis.run(&["resume", "--cgroup", &cgroup])?;
    says(&said, &["is resumed: 1 process in"])?;
    stasis.expect_no_journal()?;
    alone.expect()?;
    kill(case, &["suspend", "--cgroup", &cgroup], "checkpoint hang-after")?;
    drop(second);
    says(&stasis.run(&["repair"])?, &["is repaired: it runs"])?;
    stasis.expect_no_journal()?;
    alone.expect()?;
    // All that was suspended ends, and what comes then has no CUDA.
    stasis.run(&["suspend", "--cgroup", &cgroup])?;
    third.join(&alone)?;
    alone.child.kill()?;
    alone.child.wait()?;
    let said = stasis.run(&["resume", "--cgroup", &cgroup])?;
    says(&said, &["there is nothing to resume"])?;
    stasis.expect_no_journal()?;
    drop(third);
    alone.end()
}

/// It would freeze itself.
fn own_cgroup(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let mut alone = Alone::start(case, 18304)?;
    let procs = alone.directory().join("cgroup.procs").display().to_string();
    let parent = format!("{FREEZERS}/{}", std::env::var("LAB_ID")?);
    for name in [alone.cgroup.clone(), parent] {
        let script = format!("echo $$ >{procs}; exec \"$0\" suspend --cgroup {name}");
        let mut shell = Command::new("sh");
        let plain = stasis.command(&[]);
        shell.args(["-c", &script]).arg(plain.get_program());
        for (key, value) in plain.get_envs() {
            shell.env(key, value.unwrap_or_default());
        }
        let finished = command::run(&mut shell, LIMIT)?;
        ensure!(finished.status.code() == Some(1), "{finished:?}");
        says(&finished.stderr, &[&name, "it holds this very command"])?;
        alone.expect()?;
    }
    alone.end()
}

fn wrong_cgroup(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    for (path, words) in [
        ("/no/such/cgroup", "no such directory with a freezer"),
        ("/proc", "no such directory with a freezer"),
    ] {
        says(&stasis.fails(&["suspend", "--cgroup", path])?, &[path, words])?;
    }
    let cgroup = format!("/{}/{}", std::env::var("LAB_ID")?, case.name());
    fs::create_dir_all(directory(&cgroup))?;
    let error = stasis.fails(&["suspend", "--cgroup", &cgroup]);
    leaks::remove_cgroup(cgroup.trim_start_matches('/'))?;
    says(&error?, &[&cgroup, "it holds no process"])
}
