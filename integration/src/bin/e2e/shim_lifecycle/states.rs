//! What the shim says of a task in each of its states, and what it refuses in which.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::json;
use stasis_integration::by_hand::{self, ByHand};
use stasis_integration::case::Case;
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::task::{Answer, Refused, TaskClient, status};
use stasis_integration::wait;

use super::{Check, LIMIT, Seen, ctr, idle, note, ready, script};
use crate::consecutive;

const LOG: &str = "/data/log";
/// Its number in memory and its file have to fit each other after a restore.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >>/data/log; sleep 0.02; done";

pub(crate) const CHECKS: &[Check] = &[
    Check::same("pause_and_resume", pause),
    Check::same("state_in_each_state", states),
    Check::same("refusals", refusals).may_differ(&[
        ("kill of an exec that was not started", "it was created, only not started"),
        ("kill with a signal that is none", "runc's words are enough"),
    ]),
    Check::ours("exec_started_twice", started_twice),
    Check::same("created_by_hand", created).may_differ(&[(
        "create again",
        "the shim knows that it has this task, and calls no runc to be told",
    )]),
    Check::same("start_fails", start_fails),
    Check::same("restored_by_hand", restored),
];

fn pause(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    note(case, seen, "pause", &ctr(case, &["tasks", "pause", &id])?);
    case.expect_status(&id, Status::Paused)?;
    let exec = ctr(case, &["tasks", "exec", "--exec-id", "one", &id, "/bin/true"])?;
    note(case, seen, "exec while paused", &exec);
    note(case, seen, "pause while paused", &ctr(case, &["tasks", "pause", &id])?);
    note(case, seen, "delete while paused", &ctr(case, &["tasks", "rm", &id])?);
    note(case, seen, "resume", &ctr(case, &["tasks", "resume", &id])?);
    case.expect_status(&id, Status::Running)?;
    note(case, seen, "resume while running", &ctr(case, &["tasks", "resume", &id])?);
    let exec = ctr(case, &["tasks", "exec", "--exec-id", "two", &id, "/bin/true"])?;
    note(case, seen, "exec", &exec);
    case.ctr().pause(&id)?;
    case.ctr().kill(&id)?;
    case.wait_stopped(&id)?;
    note(case, seen, "delete after a kill while paused", &ctr(case, &["tasks", "rm", &id])?);
    Ok(())
}

fn state(case: &Case, seen: &mut Seen, what: &str, task: &TaskClient, id: &str, exec: &str) {
    let state = match task.state(id, exec) {
        Err(refused) => return note_refusal(case, seen, what, &refused),
        Ok(state) => format!(
            "{} id={} exec={} pid={} exit={} at={} bundle={} in={} out={} err={} terminal={}",
            status(&state),
            state.id,
            state.exec_id,
            state.pid > 0,
            state.exit_status,
            state.exited_at.as_ref().is_some_and(|at| at.seconds > 0),
            !state.bundle.is_empty(),
            !state.stdin.is_empty(),
            !state.stdout.is_empty(),
            !state.stderr.is_empty(),
            state.terminal,
        ),
    };
    seen.note(what, case.normal(&state));
}

fn note_refusal(case: &Case, seen: &mut Seen, what: &str, refused: &Refused) {
    let code = refused.code.map_or_else(|| "none".to_owned(), |code| format!("{code:?}"));
    seen.refused(what, code, case.normal(&refused.message));
}

fn states(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let task = case.task(&id)?;
    state(case, seen, "running", &task, &id, "");
    case.ctr().run(["tasks", "exec", "--detach", "--exec-id", "e", &id, "sleep", "1000"])?;
    state(case, seen, "exec", &task, &id, "e");
    state(case, seen, "unknown exec", &task, &id, "nobody");
    state(case, seen, "unknown task", &task, "nobody", "");
    task.pause(&id)?;
    state(case, seen, "paused", &task, &id, "");
    state(case, seen, "exec of a paused task", &task, &id, "e");
    task.resume(&id)?;
    task.kill(&id, "e", 9, false)?;
    task.wait(&id, "e")?;
    state(case, seen, "ended exec", &task, &id, "e");
    let deleted = task.delete(&id, "e")?;
    seen.note("deleted exec", format!("{} {}", deleted.pid > 0, deleted.exit_status));
    state(case, seen, "deleted exec", &task, &id, "e");
    task.kill(&id, "", 9, false)?;
    task.wait(&id, "")?;
    state(case, seen, "stopped", &task, &id, "");
    note(case, seen, "delete", &ctr(case, &["tasks", "rm", &id])?);
    Ok(())
}

/// Notes the answer to a call: the code and the words of a refusal.
fn answer<T>(case: &Case, seen: &mut Seen, what: &str, answer: Answer<T>) {
    match answer {
        Ok(_) => seen.note(what, "done"),
        Err(refused) => note_refusal(case, seen, what, &refused),
    }
}

fn refusals(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let image = case.path("image");
    let task = case.task(&id)?;
    let limit = json!({ "memory": { "limit": 64 << 20 } });
    answer(case, seen, "start while running", task.start(&id));
    answer(case, seen, "delete while running", task.delete(&id, ""));
    answer(case, seen, "resume while running", task.resume(&id));
    answer(case, seen, "resize without a terminal", task.resize(&id, "", 80, 25));
    answer(case, seen, "start of an unknown exec", task.start_exec(&id, "nobody"));
    answer(case, seen, "wait for an unknown exec", task.wait(&id, "nobody"));
    answer(case, seen, "delete of an unknown exec", task.delete(&id, "nobody"));
    answer(case, seen, "kill of an unknown exec", task.kill(&id, "nobody", 9, false));
    answer(case, seen, "exec", task.exec(&id, "e", &["/bin/sleep", "1000"]));
    answer(case, seen, "exec under the same name", task.exec(&id, "e", &["/bin/true"]));
    answer(case, seen, "kill of an exec that was not started", task.kill(&id, "e", 9, false));
    answer(case, seen, "start of the exec", task.start_exec(&id, "e"));
    answer(case, seen, "delete of a running exec", task.delete(&id, "e"));
    answer(case, seen, "kill with no signal", task.kill(&id, "", 0, false));
    answer(case, seen, "kill with a signal that is none", task.kill(&id, "", 1000, false));
    answer(case, seen, "pause", task.pause(&id));
    answer(case, seen, "pause while paused", task.pause(&id));
    answer(case, seen, "exec while paused", task.exec(&id, "f", &["/bin/true"]));
    answer(case, seen, "start of an exec while paused", task.start_exec(&id, "f"));
    answer(case, seen, "delete while paused", task.delete(&id, ""));
    answer(case, seen, "resume", task.resume(&id));
    answer(case, seen, "kill of the exec", task.kill(&id, "e", 9, false));
    task.wait(&id, "e")?;
    answer(case, seen, "kill of the ended exec", task.kill(&id, "e", 9, false));
    answer(case, seen, "kill", task.kill(&id, "", 9, false));
    task.wait(&id, "")?;
    answer(case, seen, "start while stopped", task.start(&id));
    answer(case, seen, "pause while stopped", task.pause(&id));
    answer(case, seen, "resume while stopped", task.resume(&id));
    answer(case, seen, "kill while stopped", task.kill(&id, "", 9, false));
    answer(case, seen, "exec while stopped", task.exec(&id, "g", &["/bin/true"]));
    answer(case, seen, "update while stopped", task.update(&id, &limit));
    answer(case, seen, "close stdin while stopped", task.close_stdin(&id, ""));
    let checkpoint = task.checkpoint(&id, &image, None, false);
    ensure!(checkpoint.is_err(), "a checkpoint of a stopped task");
    answer(case, seen, "state of an unknown task", task.state("nobody", ""));
    answer(case, seen, "pids of an unknown task", task.pids("nobody"));
    answer(case, seen, "kill of an unknown task", task.kill("nobody", "", 9, false));
    answer(case, seen, "delete of an unknown task", task.delete("nobody", ""));
    answer(case, seen, "connect", task.pids_of_both(&id));
    answer(case, seen, "shutdown with a task", task.shutdown(&id));
    answer(case, seen, "state after shutdown", task.state(&id, ""));
    Ok(())
}

/// Go's shim counts it wrong and panics at the end of init (seen with 1.7.24: makechan: size out of
/// range), after which nobody knows how the task ended.
fn started_twice(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let task = case.task(&id)?;
    task.exec(&id, "e", &["/bin/sleep", "1000"])?;
    task.start_exec(&id, "e")?;
    ensure!(task.start_exec(&id, "e").is_err(), "an exec was started twice");
    state(case, seen, "exec", &task, &id, "e");
    task.kill(&id, "e", 9, false)?;
    ensure!(task.wait(&id, "e")?.exit_status == 137, "exec");
    task.kill(&id, "", 9, false)?;
    ensure!(task.wait(&id, "")?.exit_status == 137, "init");
    Ok(())
}

/// What `ctr` cannot stop at.
fn created(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = by_hand::container(case, &[], &["/bin/sleep", "1000000"])?;
    let shim = ByHand::start(case, &id)?;
    let task = &shim.client;
    let made = shim.create(None)?;
    ensure!(made.pid > 0, "a created task without a process");
    state(case, seen, "created", task, &id, "");
    answer(case, seen, "create again", shim.create(None));
    answer(case, seen, "pause", task.pause(&id));
    answer(case, seen, "resume", task.resume(&id));
    let checkpoint = task.checkpoint(&id, &case.path("image"), None, false);
    ensure!(checkpoint.is_err(), "a checkpoint of a created task");
    answer(case, seen, "exec", task.exec(&id, "e", &["/bin/true"]));
    answer(case, seen, "pids", task.pids(&id));
    answer(case, seen, "start", task.start(&id));
    state(case, seen, "started", task, &id, "");
    answer(case, seen, "kill", task.kill(&id, "", 9, false));
    task.wait(&id, "")?;
    answer(case, seen, "delete", task.delete(&id, ""));
    state(case, seen, "deleted", task, &id, "");
    // The same shim can have the next one, and delete it before it was started.
    shim.create(None)?;
    answer(case, seen, "kill of a created task", task.kill(&id, "", 9, false));
    task.wait(&id, "")?;
    state(case, seen, "killed before its start", task, &id, "");
    answer(case, seen, "delete of it", task.delete(&id, ""));
    shim.end()
}

/// runc makes it, and only `start` finds that there is no such program.
fn start_fails(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = by_hand::container(case, &[], &["/nonexistent"])?;
    let shim = ByHand::start(case, &id)?;
    let create = shim.create(None);
    let failed = create.is_err();
    answer(case, seen, "create", create);
    if !failed {
        answer(case, seen, "start", shim.client.start(&id));
    }
    answer(case, seen, "delete", shim.client.delete(&id, ""));
    state(case, seen, "afterwards", &shim.client, &id, "");
    shim.end()
}

/// Create with a checkpoint, then Start: how containerd's clients and CRI restore.
fn restored(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&script(COUNT))?;
    ready(case, &id, LOG)?;
    let image = case.path("image");
    let exit = Checkpoint { image: Some(image.clone()), exit: true, ..Checkpoint::default() };
    case.checkpoint(&id, &exit)?;
    case.wait_stopped(&id)?;
    case.end_task(&id)?;
    let shim = ByHand::start(case, &id)?;
    let task = &shim.client;
    answer(case, seen, "create", shim.create(Some(&image)));
    let before = task.state(&id, "")?;
    seen.note("status before start", status(&before));
    let started = task.start(&id)?;
    state(case, seen, "started", task, &id, "");
    let count = || consecutive(&fs::read_to_string(format!("/proc/{}/root{LOG}", started.pid))?, 1);
    let before = count()?;
    wait::until("more counts", LIMIT, || Ok((count()? > before).then_some(())))?;
    answer(case, seen, "pause", task.pause(&id));
    answer(case, seen, "resume", task.resume(&id));
    answer(case, seen, "kill", task.kill(&id, "", 9, false));
    seen.note("exit code", task.wait(&id, "")?.exit_status.to_string());
    answer(case, seen, "delete", task.delete(&id, ""));
    // A restore that fails: the task can be taken away, and the shim serves on.
    fs::remove_file(image.join("inventory.img"))?;
    answer(case, seen, "create without an inventory", shim.create(Some(&image)).map(drop));
    ensure!(task.start(&id).is_err(), "a restore without an inventory");
    let deleted = task.delete(&id, "");
    seen.note("delete after a failed restore", deleted.is_ok().to_string());
    wait::until("that the task is unknown", LIMIT, || {
        Ok(task.state(&id, "").is_err().then_some(()))
    })?;
    shim.end()
}
