//! Containers without CUDA: the result is stock runc's, and so is every call of runc.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::{Engine, Settings};
use stasis_integration::wait;

use crate::{Test, consecutive};

const LOG: &str = "/data/log";
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >>/data/log; sleep 0.02; done";

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("stock", |case| life(case, Engine::Stock).map(drop)),
        Test::new("stasis", |case| life(case, Engine::Stasis).map(drop)),
        Test::new("same_runc_calls", same_runc_calls),
        Test::new("failed_dump", failed_dump),
    ]
}

fn start(case: &Case) -> Result<String> {
    let id = case.start(&Container::new(["/bin/sh", "-c", COUNT]).without_gpu())?;
    goes_on(case, &id)?;
    Ok(id)
}

/// The container counts, and no number is missing.
fn goes_on(case: &Case, id: &str) -> Result<u64> {
    let count = || consecutive(&case.read(id, LOG).unwrap_or_default(), 1);
    let before = count()?;
    wait::until("more lines", Duration::from_secs(5), || {
        let now = count()?;
        Ok((now > before).then_some(now))
    })
}

/// Everything that can happen to a container; gives how runc was called for it.
fn life(case: &Case, engine: Engine) -> Result<Vec<String>> {
    case.set(&Settings { engine, ..Settings::default() })?;
    let ctr = case.ctr();
    let id = start(case)?;
    let first = case.runtime.runc_calls().map_or(0, |calls| calls.len()) - 2;

    ctr.exec(&id, "true", &["true"])?;
    ctr.pause(&id)?;
    case.expect_status(&id, Status::Paused)?;
    ctr.resume(&id)?;
    let image = case.path(&format!("{engine:?}"));
    let work = case.path("work");
    case.checkpoint(&id, &Checkpoint { image: Some(image), work: Some(work), exit: false })?;
    case.expect_status(&id, Status::Running)?;
    let before = goes_on(case, &id)?;
    case.cycle(&id)?;
    ensure!(goes_on(case, &id)? > before, "the restored container began anew");
    let exit = Checkpoint { exit: true, ..Checkpoint::default() };
    case.checkpoint(&id, &exit)?;
    case.expect_status(&id, Status::Stopped)?;
    case.remove(&id)?;
    let calls = case.runtime.runc_calls()?;
    Ok(calls[first..].iter().map(|call| normal(call, &id)).collect())
}

/// A call without what differs from container to container: its name and all numbers.
fn normal(call: &str, id: &str) -> String {
    let mut result = String::new();
    let call = call.replace(id, "ID").replace("Stock", "ENGINE").replace("Stasis", "ENGINE");
    for part in call.split(|c: char| c.is_ascii_digit()) {
        if !(part.is_empty() && result.ends_with('#')) {
            result.push_str(part);
            result.push('#');
        }
    }
    result
}

fn same_runc_calls(case: &Case) -> Result<()> {
    let stock = life(case, Engine::Stock)?;
    let stasis = life(case, Engine::Stasis)?;
    for (number, call) in stock.iter().enumerate() {
        let other = stasis.get(number).with_context(|| format!("{call} is missing"))?;
        ensure!(call == other, "call {number} differs:\nstock:  {call}\nstasis: {other}");
    }
    ensure!(stock.len() == stasis.len(), "more calls: {:#?}", &stasis[stock.len()..]);
    Ok(())
}

fn failed_dump(case: &Case) -> Result<()> {
    let id = start(case)?;
    let before_runc = "case \" $* \" in *' checkpoint '*) exit 1;; esac".to_owned();
    case.set(&Settings { before_runc, ..Settings::default() })?;
    let image = Some(case.path("image"));
    case.checkpoint_fails(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    case.expect_status(&id, Status::Running)?;
    goes_on(case, &id)?;
    case.set(&Settings::default())?;
    case.cycle(&id)?;
    goes_on(case, &id).map(drop)
}
