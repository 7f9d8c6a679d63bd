//! What containers say and are told.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::command;

use super::{Check, LIMIT, Seen, ctr, foreground, idle, script};

pub(crate) const CHECKS: &[Check] = &[
    Check::same("output_of_a_gibibyte", gibibyte).quiet(),
    Check::ours("output_at_exit", at_exit),
];

/// 16 times 64 MiB of noise. The reader begins late, so that everything on the way is full before.
fn gibibyte(case: &Case, seen: &mut Seen) -> Result<()> {
    const COPIES: &str = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do cat";
    let noise = case.path("noise");
    let shown = noise.display().to_string();
    let mut make = Command::new("dd");
    make.args(["if=/dev/urandom", "bs=1M", "count=64", &format!("of={shown}")]);
    command::succeed(&mut make, LIMIT)?;
    let mut container = script(&format!("{COPIES} /noise; done"));
    let mount = format!("type=bind,src={shown},dst=/noise,options=rbind:ro");
    container.options.extend(["--mount".to_owned(), mount]);
    let id = case.new_id();
    let mut run = case.ctr().command(case.run_arguments(&id, &["--rm"], &container));
    let start = Instant::now();
    let mut run = run.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let pipe = run.stdout.take().context("no pipe")?;
    let mut compare = Command::new("bash");
    compare.arg("-c").arg(format!("sleep 0.3; cmp - <({COPIES} {shown}; done)"));
    let compared = compare.stdin(pipe).output()?;
    let status = run.wait()?;
    seen.took(start.elapsed());
    ensure!(status.success(), "ctr run: {status}");
    ensure!(compared.status.success(), "cmp: {compared:?}");
    Ok(())
}

/// The last line of a process that ends at once. (With Go's shim one is lost now and then.)
fn at_exit(case: &Case, _: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    for number in 0..30 {
        let line = number.to_string();
        let run = foreground(case, &["--rm"], &script(&format!("echo {line}")))?;
        let exec = ctr(case, &["tasks", "exec", "--exec-id", &line, &id, "/bin/echo", &line])?;
        for finished in [run, exec] {
            ensure!(finished.status.success(), "{finished:?}");
            ensure!(finished.stdout.trim() == line, "{line} is lost: {finished:?}");
        }
    }
    Ok(())
}
