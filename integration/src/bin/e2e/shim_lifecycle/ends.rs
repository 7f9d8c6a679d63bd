//! Ends that nobody planned: of the shim, and of containerd.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use stasis_integration::case::Case;
use stasis_integration::ctr::Status;
use stasis_integration::events::Events;
use stasis_integration::{leaks, wait};

use super::{Check, LIMIT, Seen, code, ctr, foreground, note, ready, script};

pub(crate) const CHECKS: &[Check] = &[
    Check::same("shim_killed", shim_killed),
    Check::same("containerd_restarted", containerd_restarted),
    Check::same("logs_in_a_file", log_file),
    Check::same("logs_through_a_program", log_program).may_differ(&[(
        "/bin/false: exit code",
        "a logger that ended will log nothing, so the container is not started",
    )]),
];

fn shim_killed(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&script("sleep 1000 & echo >/data/ready; wait"))?;
    ready(case, &id, "/data/ready")?;
    let events = Events::listen(case.ctr(), case.path("events"))?;
    let shims = case.containerd().shims();
    ensure!(shims.len() == 1, "{shims:?}");
    kill(shims[0], Signal::SIGKILL)?;
    let exit = events.wait_for(&id, "/tasks/exit")?;
    seen.note("exit status", exit.content["exit_status"].to_string());
    seen.note("exit pid", (exit.content["pid"].as_u64() > Some(1)).to_string());
    wait::until("that the task is gone", LIMIT, || {
        Ok((case.ctr().status(&id)? == Status::Gone).then_some(()))
    })?;
    leaks::container(case.ctr().namespace(), &id)?;
    ensure!(!case.containerd().bundle(case.ctr().namespace(), &id).exists(), "a bundle is left");
    // The socket's name is made of the container's: what is left of it must not be in the way.
    let again = ctr(case, &["tasks", "start", "--detach", &id])?;
    note(case, seen, "start again", &again);
    case.expect_status(&id, Status::Running)
}

fn containerd_restarted(case: &Case, seen: &mut Seen) -> Result<()> {
    let log = case.path("output");
    let uri = format!("file://{}", log.display());
    let text = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done";
    let id = case.new_id();
    case.ctr().run(case.run_arguments(&id, &["--detach", "--log-uri", &uri], &script(text)))?;
    ctr(case, &["tasks", "exec", "--detach", "--exec-id", "before", &id, "sleep", "1000"])?;
    let pid = case.pid(&id)?;
    case.containerd().restart()?;
    case.expect_status(&id, Status::Running)?;
    ensure!(case.pid(&id)? == pid, "it is another process");
    let lines = || crate::consecutive(&fs::read_to_string(&log)?, 1);
    let before = lines()?;
    wait::until("more output", LIMIT, || Ok((lines()? > before).then_some(())))?;
    let exec = ctr(case, &["tasks", "exec", "--exec-id", "after", &id, "/bin/echo", "x"])?;
    note(case, seen, "exec", &exec);
    seen.note("output of exec", exec.stdout);
    let events = Events::listen(case.ctr(), case.path("events"))?;
    let killed = ctr(case, &["tasks", "kill", "--exec-id", "before", "-s", "KILL", &id])?;
    note(case, seen, "kill of the exec from before", &killed);
    events.wait_for(&id, "/tasks/exit")?;
    case.ctr().kill(&id)?;
    wait::until("the end of init", LIMIT, || {
        let ended = |id: &str| {
            Ok::<_, anyhow::Error>(
                events
                    .of(id)?
                    .into_iter()
                    .any(|event| event.topic == "/tasks/exit" && event.content["id"] == id),
            )
        };
        Ok(ended(&id)?.then_some(()))
    })?;
    case.wait_stopped(&id)?;
    note(case, seen, "delete", &ctr(case, &["tasks", "rm", &id])?);
    Ok(())
}

fn log_file(case: &Case, seen: &mut Seen) -> Result<()> {
    let log = case.path("log");
    let uri = format!("file://{}", log.display());
    for text in ["echo first; echo error >&2; exit 4", "echo second; exit 5"] {
        let finished = foreground(case, &["--log-uri", &uri], &script(text))?;
        note(case, seen, text, &finished);
        seen.note("output", &finished.stdout);
    }
    let mut lines: Vec<_> = fs::read_to_string(&log)?.lines().map(str::to_owned).collect();
    lines.sort();
    seen.note("log", lines.join(", "));
    Ok(())
}

/// A program that reads descriptors 3 and 4, and says by closing 5 that it is ready. A shim that is
/// done asks it by a signal to end; this one reads to the end.
fn log_program(case: &Case, seen: &mut Seen) -> Result<()> {
    let program = case.path("logger");
    let log = case.path("log");
    fs::write(
        &program,
        format!(
            "#!/bin/sh\ntrap '' TERM\necho \"arguments $*\" >{0}.about\n\
             echo \"$CONTAINER_ID $CONTAINER_NAMESPACE\" >>{0}.about\n\
             cat <&3 >{0}.out 5>&- & cat <&4 >{0}.err 5>&- &\nexec 3<&- 4<&- 5>&-\nwait\necho >{0}.done\n",
            log.display()
        ),
    )?;
    fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    let uri = format!("binary://{}?first=1&second=two", program.display());
    let finished = foreground(
        case,
        &["--log-uri", &uri],
        &script("i=0; while [ $i -lt 1000 ]; do i=$((i+1)); echo $i; done; echo error >&2; exit 4"),
    )?;
    note(case, seen, "run", &finished);
    wait::until("the end of the logger", LIMIT, || {
        Ok(log.with_extension("done").exists().then_some(()))
    })?;
    for name in ["about", "err"] {
        let file = log.with_extension(name);
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        // Go's shim gives a program its pairs in any order.
        let mut words: Vec<&str> = text.split_whitespace().collect();
        words.sort_unstable();
        seen.note(name, case.normal(&words.join(" ")));
    }
    let last = crate::consecutive(&fs::read_to_string(log.with_extension("out"))?, 1)?;
    seen.note("lines", last.to_string());
    // A program that is not there, and one that ends without being ready.
    for program in ["/nonexistent", "/bin/false"] {
        let uri = format!("binary://{program}");
        let finished = foreground(case, &["--log-uri", &uri], &script("exit 6"))?;
        seen.note(format!("{program}: exit code"), code(&finished));
    }
    Ok(())
}
