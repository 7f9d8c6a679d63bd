//! More processes in a container.

use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use stasis_integration::case::Case;
use stasis_integration::command;
use stasis_integration::ctr::Status;

use super::{Check, LIMIT, Seen, code, ctr, idle, note};

pub(crate) const CHECKS: &[Check] = &[
    Check::ours("exec_twenty_at_once", twenty),
    Check::same("exec_of_a_missing_program", missing),
    Check::same("exec_killed", killed),
    Check::same("exec_user_and_directory", environment),
];

/// (With Go's shim the output of one is lost now and then.)
fn twenty(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let start = Instant::now();
    let threads: Vec<_> = (0..20)
        .map(|number| {
            let program = format!("echo {number}; echo e{number} >&2; exit {number}");
            let exec = format!("exec-{number}");
            let arguments = ["tasks", "exec", "--exec-id", &exec, &id, "/bin/sh", "-c", &program];
            let mut command = case.ctr().command(arguments);
            thread::spawn(move || command::run(&mut command, LIMIT))
        })
        .collect();
    for (number, thread) in threads.into_iter().enumerate() {
        let finished = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        ensure!(code(&finished) == number.to_string(), "{number}: {finished:?}");
        ensure!(finished.stdout == format!("{number}\n"), "{number}: {finished:?}");
        ensure!(finished.stderr == format!("e{number}\n"), "{number}: {finished:?}");
    }
    seen.took(start.elapsed());
    case.expect_status(&id, Status::Running)
}

/// It fails, the task does not mind, and the name is free again.
fn missing(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    for program in ["/nonexistent", "nonexistent", "/etc/passwd"] {
        let finished = ctr(case, &["tasks", "exec", "--exec-id", "one", &id, program])?;
        note(case, seen, program, &finished);
    }
    let finished = ctr(case, &["tasks", "exec", "--exec-id", "one", &id, "/bin/true"])?;
    note(case, seen, "true", &finished);
    let finished = ctr(case, &["tasks", "exec", "--exec-id", "a/b", &id, "/bin/true"])?;
    note(case, seen, "a name that is none", &finished);
    case.expect_status(&id, Status::Running)
}

fn killed(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let finished =
        ctr(case, &["tasks", "exec", "--exec-id", "self", &id, "/bin/sh", "-c", "kill -9 $$"])?;
    note(case, seen, "by itself", &finished);
    case.ctr().run(["tasks", "exec", "--detach", "--exec-id", "other", &id, "sleep", "1000"])?;
    let finished = ctr(case, &["tasks", "kill", "--exec-id", "other", "-s", "KILL", &id])?;
    note(case, seen, "by ctr", &finished);
    case.expect_status(&id, Status::Running)
}

fn environment(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let program = "id; pwd; env | sort; grep -E '^(Cap|NoNewPrivs)' /proc/self/status";
    let finished = ctr(
        case,
        &[
            "tasks",
            "exec",
            "--exec-id",
            "e",
            "--user",
            "1000:1000",
            "--cwd",
            "/data",
            &id,
            "/bin/sh",
            "-c",
            program,
        ],
    )?;
    note(case, seen, "exec", &finished);
    seen.note("output", finished.stdout);
    Ok(())
}
