//! End-to-end tests: the real containerd, runc and CRIU, and an emulated GPU.
//!
//! Run by `make e2e FILTER=word`, inside the lab. A test's name is that of its module and its
//! own; FILTER is any part of it.

mod cdi;
mod containers;
mod cri;
mod criu;
mod ctr_matrix;
mod docker;
mod driver550;
mod emulated;
mod exec;
mod failures;
mod hostile;
mod job;
mod killed;
mod nerdctl;
mod order;
mod plain;
mod podman;
mod ranks;
mod remap;
mod run;
mod samples;
mod shim_lifecycle;
mod suspend;
mod tasks;
mod tcp;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use stasis_integration::case::{Case, Lab, Place};
use stasis_integration::shim::Shim;
use stasis_integration::suite::Suite;

use crate::shim_lifecycle::Table;

/// How many containers at once suit a machine of two cores, on which the deadlines were chosen.
const PARALLEL: usize = 2;

type Body = Box<dyn Fn(&Case) -> Result<()> + Send>;

/// One test.
struct Test {
    name: String,
    /// The labs in which it can be run.
    suites: &'static [Suite],
    body: Body,
}

impl Test {
    fn new(name: impl Into<String>, body: impl Fn(&Case) -> Result<()> + Send + 'static) -> Self {
        Self { name: name.into(), suites: &Suite::ALL, body: Box::new(body) }
    }

    /// The same, for these labs only.
    fn only(mut self, suites: &'static [Suite]) -> Self {
        self.suites = suites;
        self
    }
}

/// What is run under a full name, in whatever place it wants.
type Run = Box<dyn FnOnce(&Lab, &str) -> Result<()> + Send>;

/// The tests of the main job, with containerd's own shim and `stasis-runc` under it.
fn modules() -> Vec<(&'static str, Vec<Test>)> {
    vec![
        ("run", run::tests()),
        ("exec", exec::tests()),
        ("plain", plain::tests()),
        ("tasks", tasks::tests()),
        ("containers", containers::tests()),
        ("ranks", ranks::tests()),
        ("tcp", tcp::tests()),
        ("criu", criu::tests()),
        ("emulated", emulated::tests()),
        ("hostile", hostile::tests()),
        ("order", order::tests()),
        ("failures", failures::tests()),
        ("killed", killed::tests()),
        ("remap", remap::tests()),
    ]
}

/// Those of them that our shim is put through, too: what a client of containerd asks for, and not
/// what the engine, which is the same, does about it.
fn is_for_shims(module: &str, test: &str) -> bool {
    match module {
        "run" | "exec" | "tasks" | "containers" | "order" => true,
        "plain" => matches!(test, "stasis" | "failed_dump"),
        "ranks" => matches!(test, "go_on_when_allowed" | "refused_without_annotation"),
        "failures" => {
            test.starts_with("checkpoint_error")
                || test.starts_with("runc_")
                || test.starts_with("restore_crash")
                || test.starts_with("restore_error_for_ever")
        }
        "killed" => test.starts_with("helper_in_checkpoint") && !test.ends_with("direct"),
        _ => false,
    }
}

/// Those of them that the newer lab has, too: what our shim does there that depends on containerd
/// and runc. They are quick.
fn is_for_forky(module: &str, test: &str) -> bool {
    match module {
        "run" | "exec" | "order" => true,
        "containers" => test != "large_memory",
        _ => false,
    }
}

/// The tests of the front ends, each in every lab that has it.
fn front_ends() -> Vec<(&'static str, Place, Vec<Test>)> {
    let mut modules = vec![
        ("samples", Place::SHARED, samples::tests()),
        ("cri", Place::SHARED, cri::tests()),
        ("podman", Place::SHARED, podman::tests()),
        ("cdi", Place::SHARED, cdi::tests()),
        ("cdi_stasis", Place::apart(Shim::Stasis), cdi::tests_of_clients()),
        ("cdi_v2", Place::apart(Shim::StasisAsV2), cdi::tests_of_clients()),
    ];
    modules.extend(ctr_matrix::modules());
    modules.extend(nerdctl::modules());
    modules.extend(job::modules());
    modules.extend(driver550::modules().into_iter().map(|(module, place, tests)| {
        let older = tests.into_iter().map(|test| test.only(&[Suite::Trixie])).collect();
        (module, place, older)
    }));
    modules.extend(suspend::modules());
    modules.extend(docker::tests().into_iter().map(|(place, tests)| ("docker", place, tests)));
    modules
}

/// All tests of a lab, and of all labs if none is given.
///
/// What is ours does not depend on the lab, so most of the tests that ask for much of it and little
/// of the others are run in the older one only.
fn all(suite: Option<Suite>) -> Vec<(String, Run)> {
    fn add(list: &mut Vec<(String, Run)>, prefix: &str, place: Place, test: Test) {
        let Test { name, body, .. } = test;
        let name = format!("{prefix}::{name}");
        list.push((name, Box::new(move |lab, name| lab.run(name, place, body))));
    }
    let mut all = Vec::new();
    for (module, place, tests) in front_ends() {
        for test in tests {
            if suite.is_none_or(|suite| test.suites.contains(&suite)) {
                add(&mut all, module, place, test);
            }
        }
    }
    let newer = suite == Some(Suite::Forky);
    if !newer {
        for (module, tests) in modules() {
            for test in tests {
                add(&mut all, module, Place::SHARED, test);
            }
        }
    }
    let (shims, is_for) = if newer {
        (&Shim::OURS[..1], is_for_forky as fn(&str, &str) -> bool)
    } else {
        (&Shim::OURS[..], is_for_shims as fn(&str, &str) -> bool)
    };
    for &shim in shims {
        for (module, tests) in modules() {
            let prefix = format!("shim_{}_{module}", shim.word());
            for test in tests.into_iter().filter(|test| is_for(module, &test.name)) {
                add(&mut all, &prefix, Place::apart(shim), test);
            }
        }
    }
    all
}

fn main() -> Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(PARALLEL);
    // Only a list needs no lab.
    let lab = if arguments.list { None } else { Some(Arc::new(Lab::start()?)) };
    let suite = Suite::current()?;
    let table = Arc::new(Table::default());
    let mut tests = all(suite);
    tests.extend(shim_lifecycle::tests(&table, suite));
    let trials = tests
        .into_iter()
        .map(|(name, run)| {
            let (lab, id) = (lab.clone(), name.clone());
            Trial::test(name, move || {
                let lab = lab.ok_or("a list runs nothing")?;
                run(&lab, &id).map_err(|error| Failed::from(chain(&error)))
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    let repeated = lab.as_ref().map(|lab| lab.repeated()).unwrap_or_default();
    // Ends containerd before the last line.
    drop(lab);
    if !arguments.list {
        print!("{table}");
        let skipped = match conclusion.num_ignored {
            0 => String::new(),
            skipped => format!(", {skipped} skipped"),
        };
        let repeated = match repeated.as_slice() {
            [] => String::new(),
            names => format!(", repeated without a known reason: {}", names.join(", ")),
        };
        let name = suite.map_or("lab", Suite::word);
        println!(
            "{name}: {} passed, {} failed{skipped}{repeated}",
            conclusion.num_passed, conclusion.num_failed
        );
    }
    Ok(if conclusion.has_failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What happened and why, without the backtrace that `RUST_BACKTRACE` would add.
fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).collect::<Vec<_>>().join("\n  because: ")
}

/// A line for each count, none missing and none twice, from `first` on; gives the last.
fn consecutive(log: &str, first: u64) -> Result<u64> {
    let mut next = first;
    for line in log.lines() {
        anyhow::ensure!(line == next.to_string(), "the log has {line:?} instead of {next}");
        next += 1;
    }
    Ok(next - 1)
}
