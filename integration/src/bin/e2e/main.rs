//! End-to-end tests: the real containerd, runc and CRIU, and an emulated GPU.
//!
//! Run by `make e2e FILTER=word`, inside the lab. A test's name is that of its module and its
//! own; FILTER is any part of it.

mod containers;
mod criu;
mod exec;
mod failures;
mod hostile;
mod killed;
mod order;
mod plain;
mod ranks;
mod run;
mod tasks;
mod tcp;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use stasis_integration::case::{Case, Lab};

/// How many containers at once suit a machine of two cores, on which the deadlines were chosen.
const PARALLEL: usize = 2;

type Body = Box<dyn FnOnce(&Case) -> Result<()> + Send>;

/// One test.
struct Test {
    name: String,
    body: Body,
}

impl Test {
    fn new(
        name: impl Into<String>,
        body: impl FnOnce(&Case) -> Result<()> + Send + 'static,
    ) -> Self {
        Self { name: name.into(), body: Box::new(body) }
    }
}

fn main() -> Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(PARALLEL);
    let modules = [
        ("run", run::tests()),
        ("exec", exec::tests()),
        ("plain", plain::tests()),
        ("tasks", tasks::tests()),
        ("containers", containers::tests()),
        ("ranks", ranks::tests()),
        ("tcp", tcp::tests()),
        ("criu", criu::tests()),
        ("hostile", hostile::tests()),
        ("order", order::tests()),
        ("failures", failures::tests()),
        ("killed", killed::tests()),
    ];
    // Only a list needs no lab.
    let lab = if arguments.list { None } else { Some(Arc::new(Lab::start()?)) };
    let mut trials = Vec::new();
    for (module, tests) in modules {
        for Test { name, body } in tests {
            let name = format!("{module}::{name}");
            let (lab, id) = (lab.clone(), name.clone());
            trials.push(Trial::test(name, move || {
                let lab = lab.ok_or("a list runs nothing")?;
                lab.run(&id, body).map_err(|error| Failed::from(chain(&error)))
            }));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    // Ends containerd before the last line.
    drop(lab);
    if !arguments.list {
        let skipped = match conclusion.num_ignored {
            0 => String::new(),
            skipped => format!(", {skipped} skipped"),
        };
        println!("{} passed, {} failed{skipped}", conclusion.num_passed, conclusion.num_failed);
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
