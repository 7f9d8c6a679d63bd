//! Several processes with CUDA that wait for each other.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::{command, processes, wait};

use crate::killed::{Striker, joined};
use crate::{Test, consecutive};

const LIMIT: Duration = Duration::from_secs(60);
const RANKS: usize = 3;
const ALLOW: &str = "dev.stasis.multi-process=allow";
const JOB: &str = "dev.stasis.job=file";

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("go_on_when_allowed", |case| go_on(case, &[])),
        Test::new("independent_go_on", |case| go_on(case, &["--independent"])),
        Test::new("refused_without_annotation", refused_without_annotation),
        Test::new("direct", |case| direct(case, ALLOW)),
        Test::new("paused_stay_paused", paused_stay_paused),
        Test::new("one_ends_meanwhile", |case| one_ends(case, ALLOW)),
        // Its members are locked one after the other.
        Test::new("in_a_job_direct", |case| direct(case, JOB)),
        Test::new("in_a_job_paused_come_to_rest", paused_in_a_job),
        Test::new("in_a_job_go_on_after_a_killed_checkpoint", killed_in_a_job),
    ]
}

fn start(case: &Case, options: &[&str], annotation: Option<&str>) -> Result<String> {
    if annotation == Some(JOB) {
        case.gpu.driver("610.43.02")?;
    }
    let count = RANKS.to_string();
    // No port: waiting for datagrams makes rank 0 the slow one, so that the others sit in a kernel
    // that waits for it practically always, and no moment is right for a lock.
    let program = ["/bin/ranks", &count, "--log", "/data/log", "--port", "0"];
    let mut container = Container::new(program.iter().chain(options).copied());
    if let Some(annotation) = annotation {
        container = container.annotated(annotation);
    }
    let id = case.start(&container)?;
    advance(case, &id)?;
    Ok(id)
}

/// The last step of each rank. None is missing or wrong.
fn steps(case: &Case, id: &str) -> Result<Vec<u64>> {
    let log = |rank| case.read(id, &format!("/data/log.{rank}")).unwrap_or_default();
    (0..RANKS).map(|rank| consecutive(&log(rank), 1)).collect()
}

/// Waits until every rank has made another step.
fn advance(case: &Case, id: &str) -> Result<()> {
    let before = steps(case, id)?;
    wait::until("a step of each rank", Duration::from_secs(10), || {
        let now = steps(case, id)?;
        let all = now.iter().zip(&before).all(|(now, before)| now > before);
        Ok(all.then_some(()))
    })
}

fn go_on(case: &Case, options: &[&str]) -> Result<()> {
    let id = start(case, options, Some(ALLOW))?;
    for _ in 0..2 {
        let before = steps(case, &id)?;
        case.cycle(&id)?;
        let after = steps(case, &id)?;
        let none_lost = after.iter().zip(&before).all(|(after, before)| after >= before);
        ensure!(none_lost, "the ranks began anew: {before:?}, then {after:?}");
        advance(case, &id)?;
    }
    Ok(())
}

fn refused_without_annotation(case: &Case) -> Result<()> {
    let id = start(case, &[], None)?;
    let image = Some(case.path("image"));
    let error = case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    ensure!(error.contains("dev.stasis.multi-process"), "the error tells no way out: {error}");
    case.expect_status(&id, Status::Running)?;
    advance(case, &id)
}

/// Nobody pauses them before, so they may run on until all can be locked.
fn direct(case: &Case, annotation: &str) -> Result<()> {
    let id = start(case, &[], Some(annotation))?;
    command::succeed(&mut case.direct_checkpoint(&id, &case.path("image")), LIMIT)?;
    case.expect_status(&id, Status::Running)?;
    advance(case, &id)
}

fn paused_stay_paused(case: &Case) -> Result<()> {
    let id = start(case, &[], Some(ALLOW))?;
    case.ctr().pause(&id)?;
    let before = steps(case, &id)?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    case.expect_status(&id, Status::Paused)?;
    ensure!(steps(case, &id)? == before, "a paused rank made a step");
    case.ctr().resume(&id)?;
    advance(case, &id)
}

/// One of them is killed as soon as its memory is on the host, as by a lack of memory. Either the
/// checkpoint fails and the others go on, or what it has made can be restored.
fn one_ends(case: &Case, annotation: &str) -> Result<()> {
    for round in 0..4 {
        let id = start(case, &["--independent"], Some(annotation))?;
        let last = last_rank(case, &id)?;
        let image = format!("checkpoint/{id}:1");
        let killer = thread::spawn(move || -> Result<()> {
            let devices =
                || processes::open_files(last).iter().any(|f| f.starts_with("/dev/nvidia0"));
            ensure!(devices(), "it has no GPU");
            let end = Instant::now() + LIMIT;
            // Not in a loop without a rest: on two processors a whole one would be missing, and kernels
            // have been seen that then keep others from theirs for half a minute.
            while devices() && Instant::now() < end {
                thread::sleep(Duration::from_micros(200));
            }
            Ok(kill(last, Signal::SIGKILL)?)
        });
        let made = case.ctr().checkpoint_container(&id, &image);
        killer.join().map_err(|_| anyhow!("a thread panicked"))??;
        let what = format!("round {round}: {made:?}");
        match made {
            Ok(()) => {
                case.remove(&id)?;
                case.ctr().restore(&id, &image).context(what.clone())?;
            }
            Err(error) => {
                let said = format!("{error:#}");
                ensure!(said.contains("stasis: checkpoint of container"), "{what}: {said}");
            }
        }
        case.expect_status(&id, Status::Running).context(what.clone())?;
        let others = || Ok::<_, anyhow::Error>(steps(case, &id)?[..RANKS - 1].to_vec());
        let before = others()?;
        wait::until("a step of each of the others", Duration::from_secs(10), || {
            let now = others()?;
            Ok(now.iter().zip(&before).all(|(now, before)| now > before).then_some(()))
        })
        .context(what)?;
        case.remove(&id)?;
        let _ = case.ctr().remove_image(&image);
    }
    Ok(())
}

/// A process of the container that is not its init.
fn last_rank(case: &Case, id: &str) -> Result<Pid> {
    let init = case.pid(id)?;
    let ranks = processes::of_binary("ranks");
    let own = ranks.into_iter().filter(|&pid| processes::parent(pid) == Some(init));
    own.max().context("no rank")
}

/// Killed at any moment of their lock: one that is waited for would be locked later, and nobody would
/// be there to unlock it.
fn killed_in_a_job(case: &Case) -> Result<()> {
    let id = start(case, &[], Some(JOB))?;
    for milliseconds in [10, 20, 40, 80, 160] {
        case.ctr().pause(&id)?;
        let image = Some(case.path(&format!("image-{milliseconds}")));
        let delay = Duration::from_millis(milliseconds);
        let striker = Striker::new(case, "checkpoint").after(delay).strike();
        let image = Checkpoint { image, ..Checkpoint::default() };
        // It may be through by then.
        let _ = case.ctr().checkpoint(&id, &image);
        let _ = joined(striker);
        case.ctr().resume(&id)?;
        advance(case, &id).with_context(|| format!("killed after {milliseconds} ms"))?;
        advance(case, &id)?;
    }
    case.ctr().pause(&id)?;
    let image = Some(case.path("last"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    case.ctr().resume(&id)?;
    advance(case, &id)
}

/// Wherever they were paused: one that is ahead needs what another has yet to launch, and gets it.
fn paused_in_a_job(case: &Case) -> Result<()> {
    let id = start(case, &[], Some(JOB))?;
    for image in ["first", "second", "third"] {
        case.ctr().pause(&id)?;
        let image = Some(case.path(image));
        case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
        case.expect_status(&id, Status::Paused)?;
        let rested = steps(case, &id)?;
        let (least, most) = (rested.iter().min(), rested.iter().max());
        let apart = most.zip(least).map_or(0, |(most, least)| most - least);
        ensure!(apart <= 1, "they are at rest after different steps: {rested:?}");
        case.ctr().resume(&id)?;
        advance(case, &id)?;
    }
    Ok(())
}
