//! All of a container's processes are suspended, or none.

use std::fs::{self, File};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container, PORT};
use stasis_integration::runtime::Settings;
use stasis_integration::udp::Question;
use stasis_integration::{command, processes, udp, wait};

use super::{LIMIT, SILENCE, Stasis, says};
use crate::Test;

/// The second of them listens there.
const OTHER: u16 = 10001;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("second_not_locked", |case| suspend_fails(case, "lock error:999")),
        Test::new("second_not_checkpointed", |case| suspend_fails(case, "checkpoint error:999")),
        Test::new("second_checkpoint_is_a_lie", |case| suspend_fails(case, "checkpoint error:0")),
        Test::new("second_lock_hangs", |case| suspend_fails(case, "lock hang")),
        Test::new("second_checkpoint_hangs", |case| suspend_fails(case, "checkpoint hang-after")),
        Test::new("second_not_restored", |case| resume_fails(case, "restore error:999")),
        Test::new("second_restore_hangs", |case| resume_fails(case, "restore hang")),
        Test::new("frozen_meanwhile", frozen_meanwhile),
        Test::new("second_not_unlocked", |case| resume_fails(case, "unlock error:999")),
    ]
}

/// Two counters that share nothing, the second a child of the first.
pub(super) struct Two<'a> {
    pub(super) case: &'a Case<'a>,
    pub(super) id: String,
    last: u64,
}

impl<'a> Two<'a> {
    pub(super) fn start(case: &'a Case<'a>) -> Result<Self> {
        let program = format!("counter --port {OTHER} & exec counter");
        let container = Container::new(["/bin/sh", "-c", &program]);
        let id = case.start(&container.annotated("dev.stasis.multi-process=allow"))?;
        let mut two = Self { case, id, last: 100 };
        two.expect()?;
        Ok(two)
    }

    /// Both answer with the next number.
    pub(super) fn expect(&mut self) -> Result<()> {
        self.last += 1;
        let init = self.case.pid(&self.id)?;
        for port in [PORT, OTHER] {
            let answer = udp::ask(init, port)?;
            ensure!(answer == self.last, "{port}: {answer} instead of {}", self.last);
        }
        Ok(())
    }
}

/// Both run on.
fn suspend_fails(case: &Case<'_>, fault: &str) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let (stasis, mut two) = (Stasis::new(case), Two::start(case)?);
    case.gpu.faults(&[&format!("{fault} skip=1")])?;
    let error = stasis.fails(&["suspend", &two.id])?;
    let phase = if fault.starts_with("lock") { "lock" } else { "checkpoint" };
    says(&error, &["suspend of container", &two.id, phase, "the container runs on as before"])?;
    two.expect()?;
    if fault == "lock hang" {
        // It could be granted later, as long as nobody has seen the end of it.
        ensure!(stasis.journals().len() == 1, "nobody knows of the pending lock");
        case.gpu.heal()?;
        says(&stasis.run(&["repair"])?, &[&two.id, "it runs"])?;
    }
    stasis.expect_no_journal()?;
    stasis.expect_running(&two.id, 2)?;
    case.gpu.heal()?;
    stasis.run(&["suspend", &two.id])?;
    stasis.expect_suspended(&two.id, 2)?;
    stasis.run(&["resume", &two.id])?;
    two.expect()
}

/// Somebody freezes the container behind everybody's back, and finds it frozen afterwards.
fn frozen_meanwhile(case: &Case<'_>) -> Result<()> {
    case.set(&Settings::default().impatient(3))?;
    let stasis = Stasis::new(case);
    case.gpu.configure(&["copy-bytes-per-second=2000000"])?;
    let id = case.start_counter(&["--pattern-mib", "8"])?;
    let freezer = processes::freezer(case.pid(&id)?)?;
    let said = case.path("said");
    let mut call = stasis.command(&["suspend", &id]);
    let mut call = call.stdout(Stdio::null()).stderr(File::create(&said)?).spawn()?;
    let text = || fs::read_to_string(&said).unwrap_or_default();
    wait::until("the copy", LIMIT, || Ok(text().contains(": cuda-checkpoint").then_some(())))?;
    std::thread::sleep(Duration::from_millis(300));
    fs::write(&freezer, "FROZEN")?;
    let status = command::wait(&mut call, LIMIT)?;
    ensure!(status.is_some_and(|status| !status.success()), "{status:?}: {}", text());
    says(&text(), &["suspend of container", &id, "phase cuda-checkpoint", "is paused as before"])?;
    ensure!(fs::read_to_string(&freezer)?.trim() == "FROZEN", "it was thawed");
    stasis.expect_no_journal()?;
    ensure!(case.gpu.used(0)? > 0, "its memory is not back");
    let question = Question::send(case.pid(&id)?, PORT)?;
    question.expect_none(SILENCE)?;
    fs::write(&freezer, "THAWED")?;
    question.answer()?;
    case.expect(&id, 103)
}

/// Both are suspended as before.
fn resume_fails(case: &Case<'_>, fault: &str) -> Result<()> {
    case.set(&Settings::default().impatient(5))?;
    let (stasis, mut two) = (Stasis::new(case), Two::start(case)?);
    stasis.run(&["suspend", &two.id])?;
    case.gpu.faults(&[&format!("{fault} skip=1")])?;
    let error = stasis.fails(&["resume", &two.id])?;
    says(&error, &["resume of container", &two.id, "is suspended and nothing is lost"])?;
    stasis.expect_suspended(&two.id, 2)?;
    case.gpu.heal()?;
    stasis.run(&["resume", &two.id])?;
    stasis.expect_running(&two.id, 2)?;
    two.expect()
}
