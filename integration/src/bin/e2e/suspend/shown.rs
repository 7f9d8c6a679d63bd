//! What a person sees: progress, help, and what is wrong where nothing can be done.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::Status;
use stasis_integration::runtime::Settings;
use stasis_integration::terminal::Terminal;
use stasis_integration::wait;

use super::{LIMIT, Stasis, says};
use crate::Test;

pub(super) fn tests() -> Vec<Test> {
    vec![
        Test::new("help", help),
        Test::new("json", json),
        Test::new("table", table),
        Test::new("lines_of_progress", lines),
        Test::new("bar_on_a_terminal", bar),
        Test::new("interrupted_by_signals", interrupted),
        Test::new("interrupted_on_a_terminal", interrupted_on_a_terminal),
        Test::new("timeout", timeout),
        Test::new("without_cuda", without_cuda),
        Test::new("without_driver", without_driver),
        Test::new("without_containers", without_containers),
        Test::new("managed_memory", managed_memory),
    ]
}

/// How to free a GPU for ten minutes stands where people look first.
fn help(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let help = stasis.run(&["--help"])?;
    for verb in ["check", "ps", "suspend", "resume", "repair", "inspect"] {
        let command = format!("\n  {verb} ");
        ensure!(help.contains(&command), "{verb} is not in: {help}");
        says(&stasis.run(&[verb, "--help"])?, &["Usage: stasis", verb, "--help"])?;
    }
    says(
        &help,
        &[
            "free the GPU of a container for ten minutes",
            "stasis suspend CONTAINER",
            "stasis resume CONTAINER",
            "stasis ps",
        ],
    )?;
    says(
        &stasis.run(&["suspend", "--help"])?,
        &["--pid", "--cgroup", "--root", "--timeout", "--json"],
    )?;
    // What it says is what there is to do, line by line.
    let (id, name) = (case.start_counter(&[])?, "CONTAINER");
    let lines = help.lines().filter_map(|line| line.trim_start().strip_prefix("stasis "));
    let mut typed = Vec::new();
    for line in lines.filter(|line| line.contains("  ")) {
        let line = line.split("  ").next().unwrap_or_default().replace(name, &id);
        stasis.run(&line.split_whitespace().collect::<Vec<_>>())?;
        typed.push(line);
    }
    let expected =
        ["ps".to_owned(), format!("suspend {id}"), format!("resume {id}"), "repair".to_owned()];
    ensure!(typed == expected, "{typed:?}");
    case.expect(&id, 102)
}

fn json(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let id = case.start_counter(&["--pattern-mib", "8"])?;
    let (pid, uuid) = (case.pid(&id)?.as_raw(), case.gpu.uuid(0));
    let done = stasis.json(&["suspend", &id])?;
    ensure!(done["container"] == *id && done["suspended"] == true, "{done}");
    ensure!(done["processes"][0]["pid"] == pid, "{done}");
    ensure!(done["freed"][0]["uuid"] == *uuid, "{done}");
    ensure!(done["freed"][0]["bytes"].as_u64() >= Some(8 << 20), "{done}");
    let phases = done["phases"].as_array().context("no phases")?;
    ensure!(phases.iter().any(|phase| phase["name"] == "cuda-checkpoint"), "{done}");
    ensure!(done["milliseconds"].is_u64(), "{done}");
    let seen = stasis.seen(&id)?.context("ps does not show it")?;
    let process = &seen["processes"][0];
    ensure!(process["pid"] == pid && process["inner_pid"] == 1, "{seen}");
    ensure!(process["command"] == "counter" && process["gpus"][0]["uuid"] == *uuid, "{seen}");
    ensure!(seen["root"] == case.root().display().to_string().as_str(), "{seen}");
    let done = stasis.json(&["suspend", &id])?;
    ensure!(done["suspended"] == true && done["freed"] == serde_json::json!([]), "{done}");
    let done = stasis.json(&["resume", &id])?;
    ensure!(done["container"] == *id && done["suspended"] == false, "{done}");
    ensure!(done["resumed"] == 1 && done["milliseconds"].is_u64(), "{done}");
    let done = stasis.json(&["resume", &id])?;
    ensure!(done["suspended"] == false && done["resumed"] == 0, "{done}");
    case.expect(&id, 102)
}

/// A row for each process; what it needs to come back stands in parentheses.
fn table(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let id = case.start_counter(&["--pattern-mib", "8"])?;
    let row = || -> Result<String> {
        let table = stasis.run(&["ps"])?;
        let titles = table.lines().next().context("no titles")?.split_whitespace();
        let titles: Vec<_> = titles.collect();
        let expected =
            ["RUNTIME", "CONTAINER", "NAME", "PID", "COMMAND", "STATE", "GPU", "MEMORY", "JOB"];
        ensure!(titles == expected, "{table}");
        let row = table.lines().find(|line| line.contains(&id)).context("no row")?;
        Ok(row.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let (pid, uuid) = (case.pid(&id)?, case.gpu.uuid(0));
    let expected = |state: &str, memory: &str| {
        format!("containerd {id} - {pid} counter {state} {uuid} {memory} -")
    };
    ensure!(row()? == expected("running", "8.0 MiB"), "{}", row()?);
    stasis.run(&["suspend", &id])?;
    ensure!(row()? == expected("suspended", "(8.0 MiB)"), "{}", row()?);
    case.ctr().pause(&id)?;
    ensure!(row()? == expected("suspended, paused", "(8.0 MiB)"), "{}", row()?);
    case.ctr().resume(&id)?;
    stasis.run(&["resume", &id])?;
    ensure!(row()? == expected("running", "8.0 MiB"), "{}", row()?);
    case.ctr().pause(&id)?;
    ensure!(row()? == expected("paused", "8.0 MiB"), "{}", row()?);
    case.ctr().resume(&id)?;
    case.expect(&id, 102)
}

/// Where nobody watches, each phase is a line; standard output has the result alone.
fn lines(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), case.start_counter(&[])?);
    for (verb, phases) in
        [("suspend", &["lock", "cuda-checkpoint", "freeze"][..]), ("resume", &["cuda-restore"])]
    {
        let finished = stasis.finished(&[verb, &id])?;
        let mut lines = finished.stderr.lines();
        for phase in phases {
            let line = format!("stasis: {verb} of container {id}: {phase}");
            ensure!(lines.any(|found| found == line), "{line:?} is not in {:?}", finished.stderr);
        }
        ensure!(!finished.stderr.contains(['\r', '\x1b']), "{:?}", finished.stderr);
        ensure!(!finished.stdout.contains("of container"), "{:?}", finished.stdout);
    }
    case.expect(&id, 102)
}

fn in_a_terminal(case: &Case<'_>, arguments: &[&str]) -> Result<Terminal> {
    Terminal::start(&Stasis::new(case).command(arguments), 200, &case.path(""))
}

/// The bar tells how much there is, and moves with what is done.
fn bar(case: &Case<'_>) -> Result<()> {
    case.gpu.configure(&[&format!("copy-bytes-per-second={}", 32 << 20)])?;
    let id = case.start_counter(&["--pattern-mib", "64"])?;
    for (verb, phase) in [("suspend", "cuda-checkpoint"), ("resume", "cuda-restore")] {
        let (status, text) = in_a_terminal(case, &[verb, &id])?.end()?;
        ensure!(status.success(), "{status}: {text:?}");
        says(&text, &[&format!("{verb} of container {id}: {phase}")])?;
        let shown: Vec<_> = text.split(['\r', '\n']).filter_map(moved).collect();
        ensure!(shown.is_sorted(), "the bar went back: {shown:?}");
        let between = shown.iter().filter(|mib| (8.0..60.0).contains(*mib)).count();
        // The emulated driver takes the memory of a restored process back all at once, at the end.
        let moves = if verb == "suspend" { between > 2 } else { text.contains("B/64.00 MiB") };
        ensure!(moves, "the bar stood at {shown:?}: {text:?}");
        // The result takes the place of the bar.
        let result = text.split(['\r', '\n']).find(|line| line.contains(&format!("{id} is ")));
        ensure!(result.is_some_and(|line| !line.contains("64.00")), "{result:?} in {text:?}");
    }
    case.expect(&id, 102)
}

/// The MiB that a state of the bar shows as done.
fn moved(line: &str) -> Option<f64> {
    let (before, _) = line.split_once(" MiB/64.00 MiB")?;
    before.rsplit(' ').next()?.parse().ok()
}

/// A counter whose work lasts longer than anybody waits, and has just begun: what is tried ends before
/// the work does, also on a slow machine.
fn busy(case: &Case<'_>) -> Result<String> {
    let container = Container::counter(&["--spin", "6000", "--tick", "1", "--log", "/data/log"]);
    let id = case.start(&container)?;
    begun(case, &id)?;
    Ok(id)
}

/// Waits for the next kernel.
fn begun(case: &Case<'_>, id: &str) -> Result<()> {
    let log = || case.read(id, "/data/log").unwrap_or_default();
    let before = log();
    wait::until("the next kernel", LIMIT, || Ok((log() != before).then_some(())))
}

/// It runs on, and is not suspended when its work has come to its end.
fn runs_on(case: &Case<'_>, id: &str) -> Result<()> {
    let stasis = Stasis::new(case);
    stasis.expect_no_journal()?;
    stasis.expect_running(id, 1)?;
    case.expect_status(id, Status::Running)?;
    begun(case, id)
}

fn interrupted(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), busy(case)?);
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let arguments = ["suspend", &id, "--timeout", "60s"];
        let (text, took) = stasis.interrupted(&arguments, ": lock", signal)?;
        ensure!(took < Duration::from_secs(8), "after {took:?}");
        says(&text, &["interrupted", "the container runs on as before"])?;
        runs_on(case, &id)?;
    }
    Ok(())
}

/// The terminal sends the signal to all that work for it.
fn interrupted_on_a_terminal(case: &Case<'_>) -> Result<()> {
    let id = busy(case)?;
    let mut terminal = in_a_terminal(case, &["suspend", &id, "--timeout", "60s"])?;
    terminal.expect(": lock")?;
    std::thread::sleep(Duration::from_millis(300));
    terminal.say("\x03")?;
    let (status, text) = terminal.end()?;
    ensure!(status.code() == Some(1), "{status}: {text:?}");
    says(&text, &["interrupted", "the container runs on as before"])?;
    runs_on(case, &id)
}

/// Work that does not come to its end in time.
fn timeout(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), busy(case)?);
    let since = Instant::now();
    let error = stasis.fails(&["suspend", &id, "--timeout", "500ms"])?;
    ensure!(since.elapsed() < Duration::from_secs(10), "after {:?}", since.elapsed());
    says(&error, &["phase lock", "(counter)", "the container runs on as before"])?;
    runs_on(case, &id)
}

fn without_cuda(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let id = case.start(&Container::new(["/bin/sleep", "1000"]).without_gpu())?;
    let error = stasis.fails(&["suspend", &id])?;
    says(&error, &[&id, "uses no CUDA", "nothing to suspend"])?;
    says(&stasis.run(&["resume", &id])?, &[&id, "is not suspended"])?;
    ensure!(stasis.seen(&id)?.is_none(), "ps shows one without CUDA");
    let table = stasis.run(&["ps", "--all"])?;
    let row = table.lines().find(|line| line.contains(&id)).context("no row")?;
    ensure!(row.contains("no CUDA"), "{row}");
    stasis.expect_no_journal()
}

/// No libcuda on this host, and no utility either.
fn without_driver(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let id = case.start_counter(&[])?;
    let gone = PathBuf::from("/nonexistent/libcuda.so.1");
    case.set(&Settings { libcuda: Some(gone), ..Settings::default() })?;
    for verb in ["suspend", "resume"] {
        let error = stasis.fails(&[verb, &id])?;
        says(&error, &[&id, "libcuda", "/nonexistent/libcuda.so.1", "nothing was done"])?;
    }
    // Containers without CUDA need none.
    let plain = case.start(&Container::new(["/bin/sleep", "1000"]).without_gpu())?;
    says(&stasis.fails(&["suspend", &plain])?, &["uses no CUDA"])?;
    says(&stasis.run(&["ps", "--all"])?, &[&plain, "no CUDA"])?;
    let seen = stasis.seen(&id)?.context("ps does not show it")?;
    ensure!(seen["processes"][0]["state"] == "no answer", "{seen}");
    says(seen["processes"][0]["error"].as_str().unwrap_or_default(), &["libcuda"])?;
    case.set(&Settings::default())?;
    stasis.expect_no_journal()?;
    case.expect(&id, 102)
}

fn without_containers(case: &Case<'_>) -> Result<()> {
    let stasis = Stasis::new(case);
    let empty = case.path("empty");
    fs::create_dir_all(&empty)?;
    let root = empty.display().to_string();
    says(&stasis.run(&["ps", "--root", &root])?, &["no container uses CUDA on this host"])?;
    says(&stasis.run(&["ps", "--all", "--root", &root])?, &["no container runs on this host"])?;
    ensure!(stasis.json(&["ps", "--root", &root])? == serde_json::json!([]), "not empty");
    says(&stasis.run(&["repair", "--root", &root])?, &["nothing to repair"])
}

/// The driver refuses it after the lock.
fn managed_memory(case: &Case<'_>) -> Result<()> {
    let (stasis, id) = (Stasis::new(case), case.start_counter(&["--managed"])?);
    let error = stasis.fails(&["suspend", &id])?;
    says(&error, &["cudaMallocManaged", "the container runs on as before"])?;
    stasis.expect_no_journal()?;
    case.expect(&id, 102)
}
