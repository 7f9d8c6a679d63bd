//! Containers begin and end.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::Status;
use stasis_integration::image;

use super::{Check, LIMIT, Seen, code, ctr, foreground, idle, script};
use stasis_integration::wait;

pub(crate) const CHECKS: &[Check] = &[
    Check::same("exit_codes", exit_codes),
    Check::same("exit_code_of_a_killed_one", killed),
    Check::same("missing_program", missing_program),
    Check::same("bad_mount", bad_mount),
    Check::same("environment", environment),
    Check::same("output_and_error", output_and_error),
    Check::same("named_by_its_path", named_by_its_path),
];

fn exit_codes(case: &Case, seen: &mut Seen) -> Result<()> {
    for number in ["0", "1", "7", "255"] {
        let finished = foreground(case, &["--rm"], &script(&format!("exit {number}")))?;
        seen.note(number, code(&finished));
    }
    Ok(())
}

fn killed(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.new_id();
    let mut run = case.ctr().command(case.run_arguments(&id, &[], &idle()));
    let mut run = run.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    wait::until("the task", LIMIT, || {
        Ok((case.ctr().status(&id)? == Status::Running).then_some(()))
    })?;
    case.ctr().kill(&id)?;
    let status = wait::until("the end of ctr run", LIMIT, || Ok(run.try_wait()?))?;
    seen.note("ctr run", status.to_string());
    Ok(())
}

fn missing_program(case: &Case, seen: &mut Seen) -> Result<()> {
    for program in ["/nonexistent", "nonexistent", "/etc/passwd", "/etc"] {
        let container = Container::new([program]).without_gpu();
        let finished = foreground(case, &[], &container)?;
        ensure!(!finished.status.success(), "{program} was started");
        seen.note(format!("{program}: exit code"), code(&finished));
        seen.note(program, case.normal(&finished.stderr));
    }
    let tasks = case.ctr().run(["tasks", "ls", "--quiet"])?;
    ensure!(tasks.trim().is_empty(), "tasks are left: {tasks}");
    Ok(())
}

/// runc refuses it in `create`.
fn bad_mount(case: &Case, seen: &mut Seen) -> Result<()> {
    let mut container = idle();
    let mount = "type=bind,src=/nonexistent,dst=/mnt,options=rbind";
    container.options.extend(["--mount".to_owned(), mount.to_owned()]);
    let finished = foreground(case, &[], &container)?;
    seen.note("mount", case.normal(&finished.stderr));
    Ok(())
}

fn environment(case: &Case, seen: &mut Seen) -> Result<()> {
    let mut container = script(
        "id; pwd; hostname; echo \"$A\"; grep -E '^(Cap|NoNewPrivs|Seccomp:|Sig(Blk|Ign))' \
         /proc/self/status; ulimit -a; cat /proc/self/oom_score_adj; ls -l /proc/self/fd | wc -l; \
         umask; env | sort; cut -d' ' -f2- /proc/self/mounts | grep -v overlay",
    );
    let options =
        ["--env", "A=b c", "--cwd", "/data", "--user", "1000:1001", "--hostname", "called"];
    container.options.extend(options.map(str::to_owned));
    let finished = foreground(case, &["--rm"], &container)?;
    ensure!(finished.status.success(), "{}", finished.stderr);
    for (number, line) in finished.stdout.lines().enumerate() {
        seen.note(format!("line {number}"), line);
    }
    Ok(())
}

fn output_and_error(case: &Case, seen: &mut Seen) -> Result<()> {
    let finished = foreground(case, &["--rm"], &script("echo out; echo err >&2; exit 3"))?;
    seen.note("exit code", code(&finished));
    seen.note("output", finished.stdout);
    seen.note("error", finished.stderr);
    let null = foreground(case, &["--rm", "--null-io"], &script("echo out; echo err >&2; exit 4"))?;
    seen.note("exit code without output", code(&null));
    seen.note("no output", null.stdout);
    seen.note("no error", null.stderr);
    let id = case.start(&idle())?;
    let info = ctr(case, &["containers", "info", &id])?.stdout;
    let info: serde_json::Value = serde_json::from_str(&info).context("ctr containers info")?;
    ensure!(info["Runtime"]["Name"] == case.shim().runtime(), "{}", info["Runtime"]);
    Ok(())
}

/// As CRI's `runtime_path` does it.
fn named_by_its_path(case: &Case, seen: &mut Seen) -> Result<()> {
    let command = case.containerd().shim_command(case.shim());
    let program = Path::new(command.get_program());
    let path =
        if program.is_absolute() { program.into() } else { Path::new("/usr/bin").join(program) };
    let (path, id) = (path.display().to_string(), case.new_id());
    let run =
        ["run", "--rm", "--runtime", &path, image::NAME, &id, "/bin/sh", "-c", "echo hi; exit 3"];
    let finished = ctr(case, &run)?;
    seen.note("exit code", code(&finished));
    seen.note("output", finished.stdout);
    seen.note("error", case.normal(&finished.stderr));
    Ok(())
}
