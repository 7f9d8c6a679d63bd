//! Runs programs with a time limit, and tells all about those that fail.

use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// What a program that ended said.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Runs a program to its end, whatever that is; only one that runs past the limit is an error.
///
/// Its output goes to files: a daemon that it leaves behind may keep a pipe open.
pub fn run(command: &mut Command, limit: Duration) -> Result<Finished> {
    let mut stdout = tempfile::tempfile()?;
    let mut stderr = tempfile::tempfile()?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .spawn()
        .with_context(|| format!("{command:?} does not start"))?;
    let status = wait(&mut child, limit)?;
    let (stdout, stderr) = (text(&mut stdout)?, text(&mut stderr)?);
    match status {
        Some(status) => Ok(Finished { status, stdout, stderr }),
        None => bail!("{command:?} ran longer than {limit:?}\nstdout: {stdout}\nstderr: {stderr}"),
    }
}

/// Runs a program that has to succeed; gives its standard output.
pub fn succeed(command: &mut Command, limit: Duration) -> Result<String> {
    let finished = run(command, limit)?;
    if !finished.status.success() {
        bail!("{command:?} failed, {}", describe(&finished));
    }
    Ok(finished.stdout)
}

/// Runs a program that has to fail; gives its standard error.
pub fn fail(command: &mut Command, limit: Duration) -> Result<String> {
    let finished = run(command, limit)?;
    if finished.status.success() {
        bail!("{command:?} should have failed, {}", describe(&finished));
    }
    Ok(finished.stderr)
}

fn describe(finished: &Finished) -> String {
    let Finished { status, stdout, stderr } = finished;
    format!("{status}\nstdout: {stdout}\nstderr: {stderr}")
}

/// Waits for a child; kills one that takes longer than the limit and gives nothing.
pub fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        // At first often, because what quick programs take is measured, too.
        let quick = start.elapsed() < Duration::from_millis(200);
        thread::sleep(Duration::from_micros(if quick { 200 } else { 2000 }));
    }
}

fn text(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
