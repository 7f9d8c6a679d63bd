//! Signals, and what is said when there is nothing to signal.

use std::time::Instant;

use anyhow::{Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::ctr::Status;
use stasis_integration::{leaks, processes, wait};

use super::{Check, LIMIT, Seen, ctr, idle, note, ready, script};

pub(crate) const CHECKS: &[Check] = &[
    Check::same("signals", signals),
    Check::same("kill_errors", errors),
    Check::same("host_pid_namespace", host_pid_namespace),
];

fn signals(case: &Case, seen: &mut Seen) -> Result<()> {
    let text = "trap 'exit 42' TERM; trap 'echo >/data/usr1' USR1; echo >/data/ready; \
                while :; do sleep 0.02; done";
    let id = case.start(&script(text))?;
    ready(case, &id, "/data/ready")?;
    note(case, seen, "USR1", &ctr(case, &["tasks", "kill", "-s", "USR1", &id])?);
    ready(case, &id, "/data/usr1")?;
    let exec = ["tasks", "exec", "--detach", "--exec-id", "other", &id, "/bin/sh", "-c"];
    let trap = "trap 'exit 43' TERM; echo >/data/exec; while :; do sleep 0.02; done";
    note(case, seen, "exec", &ctr(case, &[&exec[..], &[trap]].concat())?);
    ready(case, &id, "/data/exec")?;
    let task = case.task(&id)?;
    note(case, seen, "TERM to exec", &ctr(case, &["tasks", "kill", "--exec-id", "other", &id])?);
    seen.note("exit code of exec", task.wait(&id, "other")?.exit_status.to_string());
    let start = Instant::now();
    note(case, seen, "TERM", &ctr(case, &["tasks", "kill", &id])?);
    seen.note("exit code", task.wait(&id, "")?.exit_status.to_string());
    seen.took(start.elapsed());
    Ok(())
}

fn errors(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let unknown = ctr(case, &["tasks", "kill", "--exec-id", "nobody", &id])?;
    note(case, seen, "unknown process", &unknown);
    note(case, seen, "delete of a running task", &ctr(case, &["tasks", "rm", &id])?);
    case.ctr().kill(&id)?;
    case.wait_stopped(&id)?;
    note(case, seen, "stopped task", &ctr(case, &["tasks", "kill", "-s", "KILL", &id])?);
    note(case, seen, "all of a stopped task", &ctr(case, &["tasks", "kill", "--all", &id])?);
    note(case, seen, "pause of a stopped task", &ctr(case, &["tasks", "pause", &id])?);
    note(case, seen, "resume of a stopped task", &ctr(case, &["tasks", "resume", &id])?);
    let exec = ctr(case, &["tasks", "exec", "--exec-id", "one", &id, "/bin/true"])?;
    note(case, seen, "exec in a stopped task", &exec);
    note(case, seen, "ps of a stopped task", &ctr(case, &["tasks", "ps", &id])?);
    note(case, seen, "delete", &ctr(case, &["tasks", "rm", &id])?);
    note(case, seen, "kill of a deleted task", &ctr(case, &["tasks", "kill", &id])?);
    note(case, seen, "delete of a deleted task", &ctr(case, &["tasks", "rm", &id])?);
    ensure!(case.ctr().status(&id)? == Status::Gone, "it is still there");
    Ok(())
}

/// Without a namespace of its own nothing but the shim ends what init leaves behind.
fn host_pid_namespace(case: &Case, seen: &mut Seen) -> Result<()> {
    let text = "sleep 1000001 & sleep 1000002 & echo >/data/ready; \
                until [ -e /data/end ]; do sleep 0.02; done; exit 6";
    let mut container = script(text);
    container.options.extend(["--with-ns".to_owned(), "pid:/proc/1/ns/pid".to_owned()]);
    let id = case.start(&container)?;
    ready(case, &id, "/data/ready")?;
    let cgroup = format!("{}/{id}", case.ctr().namespace());
    let many = processes::in_cgroup(&cgroup).len();
    ensure!(many >= 3, "only {many} processes");
    let task = case.task(&id)?;
    std::fs::write(format!("/proc/{}/root/data/end", case.pid(&id)?), "")?;
    seen.note("exit code", task.wait(&id, "")?.exit_status.to_string());
    wait::until("the end of the children", LIMIT, || {
        Ok(processes::in_cgroup(&cgroup).is_empty().then_some(()))
    })?;
    note(case, seen, "delete", &ctr(case, &["tasks", "rm", &id])?);
    case.remove(&id)?;
    leaks::container(case.ctr().namespace(), &id)
}
