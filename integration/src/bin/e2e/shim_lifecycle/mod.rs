//! The same checks with containerd's own shim and with ours, under both names.
//!
//! What a check notes is compared: Go's shim says how it should be. A table at the end shows all
//! of it. Where ours has to be better than Go's, the check has the requirement in it, and what
//! Go's shim does is only shown.

mod create;
mod dump;
mod ends;
mod events;
mod exec;
mod many;
mod output;
mod resources;
mod signals;
mod states;
mod terminal;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use stasis_integration::case::{Case, Container, Place};
use stasis_integration::command::{self, Finished};
use stasis_integration::runtime::{Engine, Settings};
use stasis_integration::seen::Cell;
pub(crate) use stasis_integration::seen::{Seen, Table};
use stasis_integration::shim::Shim;
use stasis_integration::suite::Suite;
use stasis_integration::wait;

use crate::{Run, chain};

const LIMIT: Duration = Duration::from_secs(60);

/// One check.
#[derive(Clone, Copy)]
pub(crate) struct Check {
    name: &'static str,
    body: fn(&Case, &mut Seen) -> Result<()>,
    /// Ours has to pass it; Go's shim is only looked at.
    ours_only: bool,
    /// Nothing may run beside it.
    quiet: bool,
    /// What ours may do otherwise than Go's, and why.
    reasons: &'static [(&'static str, &'static str)],
}

impl Check {
    /// One in which all shims have to do the same.
    const fn same(name: &'static str, body: fn(&Case, &mut Seen) -> Result<()>) -> Self {
        Self { name, body, ours_only: false, quiet: false, reasons: &[] }
    }

    /// One that Go's shim need not pass.
    const fn ours(name: &'static str, body: fn(&Case, &mut Seen) -> Result<()>) -> Self {
        Self { ours_only: true, ..Self::same(name, body) }
    }

    /// The same with nothing beside it.
    const fn quiet(self) -> Self {
        Self { quiet: true, ..self }
    }

    /// The same, with what ours may do otherwise, and why.
    const fn may_differ(self, reasons: &'static [(&'static str, &'static str)]) -> Self {
        Self { reasons, ..self }
    }

    fn is_long(&self) -> bool {
        const LONG: [&str; 5] =
            ["dump_", "output_of_a_", "output_at_exit", "twenty_at_once", "exec_twenty_at_once"];
        self.quiet || LONG.iter().any(|begin| self.name.starts_with(begin))
    }

    fn place(self, shim: Shim) -> Place {
        let place = Place::apart(shim);
        if self.quiet { place.quiet() } else { place }
    }

    /// What differs and may, with the reasons.
    fn explained(self, seen: &Seen, go: &Seen) -> Vec<String> {
        let reasons = self.reasons.iter();
        reasons
            .filter_map(|(what, why)| {
                let how = seen.difference_in(go, what)?;
                Some(format!("{how}: {why}"))
            })
            .collect()
    }

    /// Runs it with each shim, writes the row, and fails if ours is not as it should be.
    fn run(self, lab: &stasis_integration::case::Lab, name: &str, table: &Table) -> Result<()> {
        let mut cells: Vec<(Shim, Cell)> = Vec::new();
        let mut go = None;
        let mut wrong = Vec::new();
        for shim in Shim::ALL {
            let mut seen = Seen::default();
            let of = format!("{name}-{}", shim.word());
            let mut body = |case: &Case| {
                if shim == Shim::Go {
                    // Containerd's own shim with the real runc is what is compared with.
                    case.set(&Settings { engine: Engine::Stock, ..Settings::default() })?;
                }
                seen = Seen::default();
                (self.body)(case, &mut seen)
            };
            let place = self.place(shim);
            let may_fail = self.ours_only && shim == Shim::Go;
            let result = if may_fail {
                lab.attempt(&of, place, &mut body)
            } else {
                lab.run(&of, place, body)
            };
            let cell = match result {
                Err(error) => {
                    if !may_fail {
                        let (last, error) = (seen.last(), chain(&error));
                        wrong.push(format!("{}: after {last}: {error}", shim.title()));
                    }
                    let why = error.root_cause().to_string();
                    Cell::Failed(why.chars().take(300).collect())
                }
                Ok(()) if self.ours_only => Cell::Ok(seen, Vec::new()),
                Ok(()) => {
                    let compared = go.get_or_insert_with(|| seen.clone());
                    let but: Vec<&str> = self.reasons.iter().map(|(what, _)| *what).collect();
                    match seen.difference(compared, &but) {
                        None => Cell::Ok(seen.clone(), self.explained(&seen, compared)),
                        Some(how) => {
                            wrong.push(format!("{} differs: {how}", shim.title()));
                            Cell::Differs(seen, how)
                        }
                    }
                }
            };
            cells.push((shim, cell));
        }
        table.add(self.name, cells);
        if wrong.is_empty() { Ok(()) } else { bail!(wrong.join("\n")) }
    }
}

/// All checks, as tests. In the newer lab those that are quick, and not those of what a shim does
/// on its own during a dump: there it is to be seen that nothing depends on containerd and runc.
pub(crate) fn tests(table: &Arc<Table>, suite: Option<Suite>) -> Vec<(String, Run)> {
    let newer = suite == Some(Suite::Forky);
    let groups = [
        create::CHECKS,
        exec::CHECKS,
        output::CHECKS,
        terminal::CHECKS,
        signals::CHECKS,
        states::CHECKS,
        resources::CHECKS,
        events::CHECKS,
        many::CHECKS,
        ends::CHECKS,
        dump::CHECKS,
    ];
    groups
        .into_iter()
        .flatten()
        .filter(|check| !(newer && check.is_long()))
        .map(|&check| {
            let table = Arc::clone(table);
            let run: Run = Box::new(move |lab, name| check.run(lab, name, &table));
            (format!("shim_lifecycle::{}", check.name), run)
        })
        .collect()
}

/// A container without a GPU that runs a script.
fn script(text: &str) -> Container {
    Container::new(["/bin/sh", "-c", text]).without_gpu()
}

/// One that does nothing until it is told to end.
fn idle() -> Container {
    Container::new(["/bin/sleep", "1000000"]).without_gpu()
}

/// Waits for a file that a container makes.
fn ready(case: &Case, id: &str, file: &str) -> Result<()> {
    wait::until(&format!("{file} in {id}"), LIMIT, || Ok(case.read(id, file).ok())).map(drop)
}

/// Runs `ctr` to its end, whatever that is.
fn ctr(case: &Case, arguments: &[&str]) -> Result<Finished> {
    command::run(&mut case.ctr().command(arguments), LIMIT)
}

/// `ctr run`, in the foreground, with these flags.
fn foreground(case: &Case, flags: &[&str], container: &Container) -> Result<Finished> {
    let id = case.new_id();
    command::run(&mut case.ctr().command(case.run_arguments(&id, flags, container)), LIMIT)
}

/// The exit code of a program that was not killed.
fn code(finished: &Finished) -> String {
    finished.status.code().map_or_else(|| finished.status.to_string(), |code| code.to_string())
}

/// Notes how a `ctr` command ended and what it said about that.
fn note(case: &Case, seen: &mut Seen, what: &str, finished: &Finished) {
    seen.note(format!("{what}: exit code"), code(finished));
    let error = case.normal(&finished.stderr);
    if error.is_empty() {
        seen.note(what, "done");
    } else {
        seen.refused_by_ctr(what, &error);
    }
}
