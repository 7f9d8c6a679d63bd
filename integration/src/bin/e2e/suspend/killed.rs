//! Somebody kills `stasis` itself in the middle; `stasis repair`, or whatever is done next with the
//! container, puts things right.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::Settings;
use stasis_integration::{leaks, udp, wait};

use super::faults::Two;
use super::{LIMIT, Stasis, says};
use crate::Test;
use crate::job::own::Own;

/// From the moment at which the driver is asked to the one at which it is at it.
const UNDER_WAY: Duration = Duration::from_millis(200);

/// What is done next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    RepairAll,
    RepairNamed,
    Suspend,
    Resume,
    Checkpoint,
    Pause,
}

impl Next {
    const ALL: [(Self, &'static str); 6] = [
        (Self::RepairAll, "repair_of_all"),
        (Self::RepairNamed, "repair_by_name"),
        (Self::Suspend, "suspend"),
        (Self::Resume, "resume"),
        (Self::Checkpoint, "checkpoint"),
        (Self::Pause, "pause"),
    ];
}

/// The moments at which it is killed: the operation, and the call of the driver that does not end.
const MOMENTS: [(&str, &str); 5] = [
    ("suspend", "lock hang"),
    ("suspend", "checkpoint hang"),
    ("suspend", "checkpoint hang-after"),
    ("resume", "restore hang"),
    ("resume", "unlock hang"),
];

pub(super) fn tests() -> Vec<Test> {
    let mut tests: Vec<_> = Next::ALL
        .into_iter()
        .map(|(next, word)| {
            Test::new(format!("killed_then_{word}"), move |case: &Case<'_>| then(case, next))
        })
        .collect();
    tests.push(Test::new("killed_while_paused", while_paused));
    tests.push(Test::new("killed_while_paused_then_resumed_without_room", then_without_room));
    tests.push(Test::new("killed_and_the_container_too", with_its_container));
    tests.push(Test::new("killed_below_an_unusual_root", below_an_unusual_root));
    tests.push(Test::new("repair_without_need", without_need));
    tests
}

/// `stasis` with these arguments, that is killed while the driver is asked.
pub(super) fn kill(case: &Case<'_>, arguments: &[&str], fault: &str) -> Result<()> {
    let stasis = Stasis::new(case);
    case.gpu.faults(&[fault])?;
    let mut call = stasis.command(arguments);
    let mut child = call.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let called = wait::until("a call of the driver", LIMIT, || {
        ensure!(child.try_wait()?.is_none(), "it ended before it was killed");
        Ok(case.gpu.store().join("faults.count").exists().then_some(()))
    });
    std::thread::sleep(UNDER_WAY);
    child.kill()?;
    child.wait()?;
    called?;
    case.gpu.heal()?;
    let left = leaks::journals(&case.runtime.state());
    ensure!(left.len() == 1, "there is nothing to repair: {left:?}");
    Ok(())
}

fn then(case: &Case<'_>, next: Next) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let (stasis, mut two) = (Stasis::new(case), Two::start(case)?);
    let id = two.id.clone();
    for (verb, fault) in MOMENTS {
        if verb == "resume" {
            stasis.run(&["suspend", &id])?;
        }
        kill(case, &[verb, &id], fault)?;
        let seen = stasis.seen(&id)?.context("ps does not show it")?;
        ensure!(seen["operation"] == "under way, or to be repaired", "{seen}");
        put_right(case, &id, next).with_context(|| format!("after a killed {verb}, {fault}"))?;
        stasis.expect_no_journal()?;
        stasis.expect_running(&id, 2)?;
        two.expect().with_context(|| format!("after a killed {verb}, {fault}"))?;
    }
    Ok(())
}

fn put_right(case: &Case<'_>, id: &str, next: Next) -> Result<()> {
    let stasis = Stasis::new(case);
    match next {
        Next::RepairAll => says(&stasis.run(&["repair"])?, &[id, "is repaired: it runs"]),
        Next::RepairNamed => says(&stasis.run(&["repair", id])?, &[id, "is repaired: it runs"]),
        Next::Suspend => {
            stasis.run(&["suspend", id])?;
            stasis.expect_suspended(id, 2)?;
            stasis.run(&["resume", id]).map(drop)
        }
        Next::Resume => stasis.run(&["resume", id]).map(drop),
        Next::Checkpoint => {
            let image = Some(case.path("image"));
            case.checkpoint(id, &Checkpoint { image, ..Checkpoint::default() })?;
            std::fs::remove_dir_all(case.path("image")).map_err(Into::into)
        }
        Next::Pause => {
            case.ctr().pause(id)?;
            case.ctr().resume(id)
        }
    }
}

/// It is as its owner has it.
fn while_paused(case: &Case<'_>) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let (stasis, mut two) = (Stasis::new(case), Two::start(case)?);
    let id = two.id.clone();
    for (verb, fault) in MOMENTS {
        case.ctr().pause(&id)?;
        if verb == "resume" {
            stasis.run(&["suspend", &id])?;
        }
        kill(case, &[verb, &id], fault)?;
        let context = || format!("after a killed {verb}, {fault}");
        says(&stasis.run(&["repair"])?, &[&id, "is repaired: paused as before"])
            .with_context(context)?;
        case.expect_status(&id, Status::Paused)?;
        stasis.expect_no_journal()?;
        ensure!(case.gpu.used(0)? > 0, "its memory is not back, {}", context());
        case.ctr().resume(&id)?;
        two.expect().with_context(context)?;
    }
    Ok(())
}

/// Its owner resumes it when another one has its memory: it runs, suspended, and is not killed.
fn then_without_room(case: &Case<'_>) -> Result<()> {
    case.gpu.configure(&[&format!("memory={}", 64 << 20)])?;
    let stasis = Stasis::new(case);
    let pattern = ["--pattern-mib", "40"];
    let id = case.start_counter(&pattern)?;
    case.ctr().pause(&id)?;
    kill(case, &["suspend", &id], "checkpoint hang-after")?;
    let other = case.start_counter(&pattern)?;
    case.ctr().resume(&id)?;
    case.expect_status(&id, Status::Running)?;
    stasis.expect_waiting(&id)?;
    case.remove(&other)?;
    stasis.run(&["resume", &id])?;
    case.expect(&id, 102)
}

/// What is gone needs no repair.
fn with_its_container(case: &Case<'_>) -> Result<()> {
    let (stasis, two) = (Stasis::new(case), Two::start(case)?);
    kill(case, &["suspend", &two.id], "checkpoint hang-after")?;
    case.ctr().kill(&two.id)?;
    case.wait_stopped(&two.id)?;
    says(&stasis.run(&["repair"])?, &[&two.id, "does not run any more"])?;
    stasis.expect_no_journal()?;
    case.remove(&two.id)
}

/// Its journal tells where it is. A root directory that is not there, as one that is not mounted, is no
/// reason to forget a container that runs.
fn below_an_unusual_root(case: &Case<'_>) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let mut own = Own::new(case, "a", &["/bin/counter"])?;
    own.start()?;
    let (init, id, stasis) = (own.init()?, own.bare.id().to_owned(), Stasis::new(case));
    let (root, away) = (own.bare.root().to_owned(), case.path("root-away"));
    let shown = root.display().to_string();
    let mut last = 100;
    let mut answers = || -> Result<()> {
        last += 1;
        let answer = udp::ask(init, stasis_integration::case::PORT)?;
        ensure!(answer == last, "{answer} instead of {last}");
        Ok(())
    };
    answers()?;
    for (verb, fault) in MOMENTS {
        if verb == "resume" {
            stasis.run(&["suspend", &id, "--root", &shown])?;
        }
        kill(case, &[verb, &id, "--root", &shown], fault)?;
        fs::rename(&root, &away)?;
        let refused = stasis.fails(&["repair"]);
        fs::rename(&away, &root)?;
        says(&refused?, &[&id, &shown, &format!("pid {init} of it runs; its journal is kept")])?;
        let elsewhere = case.root().display().to_string();
        says(&stasis.run(&["repair", "--root", &elsewhere])?, &["nothing to repair"])?;
        let arguments: &[&str] =
            if fault.ends_with("hang") { &["repair"] } else { &["repair", &id] };
        let said = stasis.run(arguments).with_context(|| format!("after {verb}, {fault}"))?;
        says(&said, &[&id, "is repaired: it runs"])?;
        stasis.expect_no_journal()?;
        answers().with_context(|| format!("after a killed {verb}, {fault}"))?;
    }
    kill(case, &["suspend", &id, "--root", &shown], "checkpoint hang-after")?;
    // Without the runtime, which would remove the journal.
    nix::sys::signal::kill(init, nix::sys::signal::Signal::SIGKILL)?;
    wait::until("its end", LIMIT, || {
        let state = fs::read_to_string(format!("/proc/{init}/stat")).unwrap_or_default();
        Ok((state.is_empty() || state.contains(") Z ")).then_some(()))
    })?;
    says(&stasis.run(&["repair"])?, &[&id, "does not run any more: its journal is removed"])?;
    stasis.expect_no_journal()?;
    own.delete()
}

/// What is as it should be is left alone.
fn without_need(case: &Case<'_>) -> Result<()> {
    let (stasis, mut two) = (Stasis::new(case), Two::start(case)?);
    for arguments in [&["repair"][..], &["repair", &two.id]] {
        says(&stasis.run(arguments)?, &["nothing to repair"])?;
    }
    stasis.run(&["suspend", &two.id])?;
    for arguments in [&["repair"][..], &["repair", &two.id]] {
        says(&stasis.run(arguments)?, &[&two.id, "is suspended by stasis suspend"])?;
        stasis.expect_suspended(&two.id, 2)?;
    }
    stasis.run(&["resume", &two.id])?;
    two.expect()?;
    let error = stasis.fails(&["repair", "no-such-container"])?;
    says(&error, &["no container has the id or the name no-such-container"])
}
