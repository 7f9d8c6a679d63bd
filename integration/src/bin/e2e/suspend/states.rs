//! A suspended container is paused, killed and checkpointed like any other, and a paused one is
//! suspended and resumed.

use std::fs::{self, File};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use stasis_integration::case::{Case, Container, PORT};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::Settings;
use stasis_integration::udp::Question;
use stasis_integration::{command, wait};

use super::{LIMIT, SILENCE, Stasis, says};
use crate::failures::{LOG, goes_on, start};
use crate::{Test, consecutive};

type Body = fn(&Case<'_>) -> Result<()>;

pub(super) fn tests(word: &str) -> Vec<Test> {
    let tests: [(&str, Body); 12] = [
        ("suspended_is_paused_and_resumed", paused_and_resumed),
        ("paused_is_suspended", paused_is_suspended),
        ("paused_all_the_while", paused_all_the_while),
        ("pause_meanwhile", pause_meanwhile),
        ("ended_by_kill", killed),
        ("killed_meanwhile", killed_meanwhile),
        ("deleted", deleted),
        ("exec", exec),
        ("at_once", at_once),
        ("failed_checkpoint", failed_checkpoint),
        ("killed_checkpoint", killed_checkpoint),
        ("cycle", cycle),
    ];
    let named = |(name, body)| Test::new(format!("{word}_{name}"), body);
    tests.into_iter().map(named).collect()
}

/// What `ps` tells of it: paused, and suspended or not.
fn expect_paused(stasis: Stasis<'_>, id: &str, operation: Option<&str>) -> Result<()> {
    let seen = stasis.seen(id)?.context("ps does not show it")?;
    ensure!(seen["paused"] == true, "{seen}");
    ensure!(seen["operation"].as_str() == operation, "{seen}");
    // A frozen process is not asked.
    ensure!(seen["processes"][0]["state"] == "paused", "{seen}");
    Ok(())
}

/// It has made no step since, and makes none.
fn at_rest(case: &Case<'_>, id: &str, log: &str) -> Result<()> {
    std::thread::sleep(Duration::from_millis(100));
    ensure!(case.read(id, LOG)? == log, "the paused container did something");
    Ok(())
}

fn paused_and_resumed(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    stasis.run(&["suspend", &id])?;
    for _ in 0..2 {
        case.ctr().pause(&id)?;
        case.expect_status(&id, Status::Paused)?;
        expect_paused(stasis, &id, Some("suspended"))?;
        case.ctr().resume(&id)?;
        case.expect_status(&id, Status::Running)?;
        stasis.expect_suspended(&id, 1)?;
    }
    stasis.run(&["resume", &id])?;
    goes_on(case, &id)
}

/// Its owner resumes it, and then its CUDA waits for `stasis resume`.
fn paused_is_suspended(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    case.ctr().pause(&id)?;
    let log = case.read(&id, LOG)?;
    stasis.run(&["suspend", &id])?;
    case.expect_status(&id, Status::Paused)?;
    stasis.expect_free()?;
    expect_paused(stasis, &id, Some("suspended"))?;
    at_rest(case, &id, &log)?;
    case.ctr().resume(&id)?;
    stasis.expect_suspended(&id, 1)?;
    let question = Question::send(case.pid(&id)?, PORT)?;
    question.expect_none(SILENCE)?;
    stasis.run(&["resume", &id])?;
    question.answer()?;
    goes_on(case, &id)
}

fn paused_all_the_while(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    case.ctr().pause(&id)?;
    let log = case.read(&id, LOG)?;
    for _ in 0..2 {
        stasis.run(&["suspend", &id])?;
        stasis.run(&["resume", &id])?;
        case.expect_status(&id, Status::Paused)?;
        expect_paused(stasis, &id, None)?;
        ensure!(case.gpu.used(0)? > 0, "its memory is not back");
        at_rest(case, &id, &log)?;
    }
    // One that is paused and not suspended is its owner's.
    let error = stasis.fails(&["resume", &id])?;
    says(&error, &[&id, "is paused, and was not suspended by stasis suspend", "ctr tasks resume"])
        .or_else(|_| says(&error, &[&id, "is paused", "nothing was done"]))?;
    case.ctr().resume(&id)?;
    goes_on(case, &id)
}

/// Whoever pauses it in the middle is told to try again: a frozen process answers no call of the driver.
fn pause_meanwhile(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    case.gpu.configure(&["copy-bytes-per-second=2000000"])?;
    let id = case.start_counter(&["--pattern-mib", "8"])?;
    for (verb, stage) in [("suspend", "\"freeing\""), ("resume", "\"resuming\"")] {
        let mut call = stasis.command(&[verb, &id]);
        let mut call = call.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        // Whoever comes before it has begun may pause.
        let begun = || {
            let texts = stasis.journals().into_iter().map(fs::read_to_string);
            texts.flatten().any(|text| text.contains(stage))
        };
        wait::until("the operation", LIMIT, || Ok(begun().then_some(())))?;
        std::thread::sleep(Duration::from_millis(300));
        let error = case.ctr().fail(["tasks", "pause", &id])?;
        ensure!(call.try_wait()?.is_none(), "{verb} was over when it was paused");
        says(&error, &["pause", &id, "another operation on this container is in progress"])?;
        let status = command::wait(&mut call, LIMIT)?;
        ensure!(status.is_some_and(|status| status.success()), "{verb}: {status:?}");
        case.expect_status(&id, Status::Running)?;
        // Now it may.
        case.ctr().pause(&id)?;
        case.ctr().resume(&id)?;
    }
    stasis.expect_no_journal()?;
    case.expect(&id, 102)
}

fn killed(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    for paused in [false, true] {
        let id = start(case)?;
        stasis.run(&["suspend", &id])?;
        if paused {
            case.ctr().pause(&id)?;
        }
        case.ctr().kill(&id)?;
        case.wait_stopped(&id)?;
        ensure!(stasis.seen(&id)?.is_none(), "ps shows one that has ended");
        case.ctr().remove_task(&id)?;
        stasis.expect_no_journal()?;
        stasis.expect_free()?;
    }
    Ok(())
}

/// A kill does not wait for the driver, and the command says what became of the container.
fn killed_meanwhile(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    for (verb, fault) in [("suspend", "lock hang"), ("resume", "restore hang")] {
        let id = start(case)?;
        if verb == "resume" {
            stasis.run(&["suspend", &id])?;
        }
        case.gpu.faults(&[fault])?;
        let said = case.path("said");
        let mut call = stasis.command(&[verb, &id]);
        let mut under_way = call.stderr(File::create(&said)?).spawn()?;
        let count = case.gpu.store().join("faults.count");
        wait::until("a call of the driver", LIMIT, || Ok(count.exists().then_some(())))?;
        std::thread::sleep(SILENCE);
        let since = Instant::now();
        case.ctr().kill(&id)?;
        case.wait_stopped(&id)?;
        ensure!(since.elapsed() < Duration::from_secs(5), "after {:?}", since.elapsed());
        case.ctr().remove_task(&id)?;
        let status = command::wait(&mut under_way, LIMIT)?.context("it did not end")?;
        let said = fs::read_to_string(&said)?;
        ensure!(status.code() == Some(1), "{status}: {said}");
        says(&said, &[&format!("{verb} of container {id} failed"), "the container"])?;
        case.gpu.heal()?;
        stasis.expect_no_journal()?;
        stasis.expect_free()?;
    }
    Ok(())
}

/// `ctr tasks rm --force`, without a kill before.
fn deleted(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    stasis.run(&["suspend", &id])?;
    // It ends as its container did, by a signal.
    let _ = case.ctr().run(["tasks", "rm", "--force", &id]);
    case.expect_status(&id, Status::Gone)?;
    stasis.expect_no_journal()?;
    stasis.expect_free()
}

/// What needs no CUDA goes on, and a new process with CUDA is told by ps and suspended with the rest.
fn exec(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let annotation = "dev.stasis.multi-process=allow";
    let counter = Container::counter(&["--log", LOG, "--tick", "5"]);
    let id = case.start(&counter.annotated(annotation))?;
    case.ask(&id)?;
    stasis.run(&["suspend", &id])?;
    let said = case.ctr().exec(&id, "one", &["/bin/sh", "-c", "echo I am here"])?;
    ensure!(said == "I am here\n", "{said:?}");
    stasis.expect_suspended(&id, 1)?;
    let second = ["/bin/sh", "-c", "counter --port 10001 --ready /data/ready >/dev/null 2>&1 &"];
    case.ctr().exec(&id, "two", &second)?;
    wait::until("the second counter", LIMIT, || {
        Ok(case.read(&id, "/data/ready").is_ok().then_some(()))
    })?;
    let seen = stasis.seen(&id)?.context("ps does not show it")?;
    let states: Vec<_> = seen["processes"].as_array().into_iter().flatten().collect();
    ensure!(states.iter().any(|process| process["state"] == "running"), "{seen}");
    stasis.run(&["suspend", &id])?;
    stasis.expect_suspended(&id, 2)?;
    stasis.run(&["resume", &id])?;
    stasis.expect_running(&id, 2)?;
    goes_on(case, &id)?;
    let answer = stasis_integration::udp::ask(case.pid(&id)?, 10001)?;
    ensure!(answer == 101, "the second counter said {answer}");
    Ok(())
}

/// Two of the same wait for each other, and a checkpoint for both.
fn at_once(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    case.gpu.configure(&["copy-bytes-per-second=10000000"])?;
    for verb in ["suspend", "resume"] {
        let both: Vec<_> = (0..2)
            .map(|_| stasis.command(&[verb, &id]).stderr(Stdio::null()).spawn())
            .collect::<Result<_, _>>()?;
        if verb == "suspend" {
            // Without a pause, which would keep the driver from answering the first.
            command::succeed(&mut case.direct_checkpoint(&id, &case.path("image")), LIMIT)?;
        }
        for mut one in both {
            let status = command::wait(&mut one, LIMIT)?;
            ensure!(status.is_some_and(|status| status.success()), "{verb}: {status:?}");
        }
        if verb == "suspend" {
            stasis.expect_suspended(&id, 1)?;
        }
    }
    stasis.expect_no_journal()?;
    goes_on(case, &id)
}

/// It is suspended as before, whoever made it fail: the runtime, or the driver when it is asked.
fn failed_checkpoint(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    stasis.run(&["suspend", &id])?;
    let before_runc =
        "case \" $* \" in *' checkpoint '*) echo no luck >&2; exit 1;; esac".to_owned();
    case.set(&Settings { before_runc, ..Settings::default() })?;
    let image = || Checkpoint { image: Some(case.path("image")), ..Checkpoint::default() };
    case.checkpoint_fails(&id, &image())?;
    case.expect_status(&id, Status::Running)?;
    stasis.expect_suspended(&id, 1)?;
    case.ctr().pause(&id)?;
    case.checkpoint_fails(&id, &image())?;
    case.expect_status(&id, Status::Paused)?;
    case.ctr().resume(&id)?;
    stasis.expect_suspended(&id, 1)?;
    case.set(&Settings::default())?;
    case.gpu.faults(&["state error:999"])?;
    case.checkpoint_fails(&id, &image())?;
    case.gpu.heal()?;
    stasis.expect_suspended(&id, 1)?;
    case.checkpoint(&id, &image())?;
    stasis.expect_suspended(&id, 1)?;
    stasis.run(&["resume", &id])?;
    goes_on(case, &id)
}

/// What comes after a checkpoint of a suspended one that was killed: repair, or another checkpoint.
fn killed_checkpoint(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    stasis.run(&["suspend", &id])?;
    for repaired in [true, false] {
        let marker = case.path("dumping");
        let before_runc = format!(
            "case \" $* \" in *' checkpoint '*) echo now >{}; sleep 1.5; exit 1;; esac",
            marker.display()
        );
        case.set(&Settings { before_runc, ..Settings::default() })?;
        let mut call = case.direct_checkpoint(&id, &case.path("image"));
        let mut engine = call.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let dumping = wait::until("the dump", LIMIT, || Ok(marker.exists().then_some(())));
        engine.kill()?;
        engine.wait()?;
        dumping?;
        fs::remove_file(&marker)?;
        case.set(&Settings::default())?;
        if repaired {
            says(&stasis.run(&["repair"])?, &[&id, "is repaired: it is suspended"])?;
        } else {
            let image = Some(case.path("other-image"));
            case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
        }
        case.expect_status(&id, Status::Running)?;
        stasis.expect_suspended(&id, 1)?;
    }
    stasis.run(&["resume", &id])?;
    goes_on(case, &id)
}

/// `ctr containers checkpoint` and `restore`: what is restored runs, with all that was counted.
fn cycle(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), start(case)?);
    for _ in 0..2 {
        stasis.run(&["suspend", &id])?;
        let before = consecutive(&case.read(&id, LOG)?, 101)?;
        case.cycle(&id)?;
        stasis.expect_no_journal()?;
        stasis.expect_running(&id, 1)?;
        goes_on(case, &id)?;
        ensure!(consecutive(&case.read(&id, LOG)?, 101)? > before, "it began anew");
    }
    Ok(())
}
