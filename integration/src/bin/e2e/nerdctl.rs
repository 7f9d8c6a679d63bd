//! `nerdctl run`, `checkpoint`, `start --checkpoint` and `logs`.
//!
//! nerdctl asks containerd for an end with the checkpoint (Exit) only where the runtime is called
//! exactly `io.containerd.runc.v2`: our shim installed under that name, or containerd's own with
//! `stasis-runc` as its program (`--runtime PATH`). Under our shim's own name a container always
//! runs on, and has to be ended by another command.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::{Case, PORT, Place};
use stasis_integration::cdi::Cdi;
use stasis_integration::ctr::Status;
use stasis_integration::nerdctl::Nerdctl;
use stasis_integration::runtime::{Engine, Settings};
use stasis_integration::shim::Shim;
use stasis_integration::{command, udp, wait};

use crate::{Test, consecutive};

const LIMIT: Duration = Duration::from_secs(10);

/// What each of the shims is put through, under the name of the module.
pub(crate) fn modules() -> Vec<(&'static str, Place, Vec<Test>)> {
    vec![
        ("nerdctl", Place::apart(Shim::Stasis), own_name()),
        ("nerdctl", Place::apart(Shim::StasisAsV2), exact_name()),
        ("nerdctl", Place::SHARED, stasis_runc()),
    ]
}

fn own_name() -> Vec<Test> {
    vec![
        Test::new("own_name_two_cycles", two_cycles),
        Test::new("own_name_logs_of_a_paused_container", logs_of_a_paused_container),
        Test::new("own_name_plain", plain),
        Test::new("own_name_driver_error", driver_error),
        Test::new("own_name_leave_running", leave_running),
    ]
}

fn exact_name() -> Vec<Test> {
    vec![
        Test::new("exact_name_two_cycles", two_cycles),
        Test::new("exact_name_logs_of_a_busy_container", logs_of_a_busy_container),
        Test::new("exact_name_plain", plain),
        Test::new("exact_name_paused", paused),
        Test::new("exact_name_elsewhere", elsewhere),
        Test::new("exact_name_host_network", host_network),
        Test::new("exact_name_bridge", bridge),
        Test::new("exact_name_device_by_cdi", device_by_cdi),
        Test::new("exact_name_terminal", terminal),
    ]
}

fn stasis_runc() -> Vec<Test> {
    vec![
        Test::new("stasis_runc_two_cycles", two_cycles),
        Test::new("stock_plain", |case: &Case| {
            case.set(&Settings { engine: Engine::Stock, ..Settings::default() })?;
            plain(case)
        }),
        Test::new("stock_gpus_want_the_legacy_hook", gpus_want_the_legacy_hook),
    ]
}

/// `nerdctl checkpoint create` without --leave-running, and the end of the container, which under
/// our shim's own name nerdctl does not ask for.
fn end_by_checkpoint(case: &Case, nerdctl: &Nerdctl, id: &str, name: &str) -> Result<()> {
    let before = case.ctr().status(id)?;
    nerdctl.checkpoint(id, name, &[])?;
    if case.shim() == Shim::Stasis {
        case.expect_status(id, before)?;
        nerdctl.run(["kill", id])?;
    }
    case.wait_stopped(id)?;
    let status = nerdctl.inspect(id, "{{.State.Status}}")?;
    ensure!(status == "exited", "nerdctl calls its status {status}");
    Ok(())
}

fn two_cycles(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let id = nerdctl.start_counter(&[])?;
    let mut lines = "101\n".to_owned();
    for count in 102..=103 {
        ensure!(nerdctl.logs(&id)? == lines, "before: {:?}", nerdctl.logs(&id)?);
        let name = count.to_string();
        end_by_checkpoint(case, &nerdctl, &id, &name)?;
        ensure!(nerdctl.logs(&id)? == lines, "of the ended: {:?}", nerdctl.logs(&id)?);
        nerdctl.restore(&id, &name, &[])?;
        case.expect_status(&id, Status::Running)?;
        case.expect(&id, count)?;
        writeln!(lines, "{count}")?;
        shows(&nerdctl, &id, &lines)?;
    }
    let listed = nerdctl.list(&id, &[])?;
    ensure!(listed == ["102", "103"], "{listed:?}");
    let said = nerdctl.run(["exec", &id, "cat", "/proc/1/comm"])?;
    ensure!(said == "counter\n", "{said:?}");
    let row = nerdctl.run(["stats", "--no-stream", "--format", "{{.PIDs}}", &id])?;
    ensure!(row.trim().parse::<u32>()? >= 1, "stats: {row:?}");
    Ok(())
}

/// The last line is written by a logger that nobody waits for.
fn shows(nerdctl: &Nerdctl, id: &str, lines: &str) -> Result<()> {
    let _ = wait::until("the log", LIMIT, || Ok((nerdctl.logs(id)? == lines).then_some(())));
    let log = nerdctl.logs(id)?;
    ensure!(log == lines, "nerdctl logs shows {log:?} instead of {lines:?}");
    Ok(())
}

/// Waits until the log has more lines than these and checks that none is missing; gives how many.
fn counts_on(nerdctl: &Nerdctl, id: &str, before: u64) -> Result<u64> {
    wait::until("more lines in the log", LIMIT, || {
        let log = nerdctl.logs(id)?;
        // The last one may be written at this moment.
        let whole = log.rfind('\n').map_or("", |end| &log[..=end]);
        let last = consecutive(whole, 101)?;
        Ok((last > before + 10).then_some(last))
    })
}

/// Lines are on their way all the time.
fn logs_of_a_busy_container(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let id = nerdctl.start_counter(&["--tick", "2"])?;
    let mut last = counts_on(&nerdctl, &id, 101)?;
    for name in ["first", "second"] {
        end_by_checkpoint(case, &nerdctl, &id, name)?;
        nerdctl.restore(&id, name, &[])?;
        last = counts_on(&nerdctl, &id, last)?;
    }
    Ok(())
}

/// The same where a container that went on after its checkpoint would have written more.
fn logs_of_a_paused_container(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let id = nerdctl.start_counter(&["--tick", "2"])?;
    let mut last = counts_on(&nerdctl, &id, 101)?;
    for name in ["first", "second"] {
        nerdctl.run(["pause", &id])?;
        end_by_checkpoint(case, &nerdctl, &id, name)?;
        nerdctl.restore(&id, name, &[])?;
        last = counts_on(&nerdctl, &id, last)?;
    }
    Ok(())
}

/// The container goes on, and later a new one from where the first was.
fn leave_running(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let id = nerdctl.start_counter(&[])?;
    nerdctl.checkpoint(&id, "kept", &["--leave-running"])?;
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)?;
    case.expect(&id, 103)?;
    nerdctl.checkpoint(&id, "dropped", &["--leave-running"])?;
    ensure!(nerdctl.list(&id, &[])? == ["dropped", "kept"], "{:?}", nerdctl.list(&id, &[])?);
    let taken = nerdctl.fail(["checkpoint", "create", "--leave-running", &id, "kept"])?;
    ensure!(taken.contains("checkpoint with name kept already exists"), "{taken}");
    case.expect(&id, 104)?;
    nerdctl.run(["checkpoint", "rm", &id, "dropped"])?;
    ensure!(nerdctl.list(&id, &[])? == ["kept"], "{:?}", nerdctl.list(&id, &[])?);
    nerdctl.run(["stop", "--time", "0", &id])?;
    case.wait_stopped(&id)?;
    let gone = nerdctl.fail(["start", "--checkpoint", "dropped", &id])?;
    ensure!(gone.contains("checkpoint dropped does not exist"), "{gone}");
    nerdctl.restore(&id, "kept", &[])?;
    case.expect(&id, 102)?;
    shows(&nerdctl, &id, "101\n102\n103\n104\n102\n")
}

fn paused(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let id = nerdctl.start_counter(&["--tick", "5"])?;
    nerdctl.run(["pause", &id])?;
    let before = nerdctl.logs(&id)?;
    nerdctl.checkpoint(&id, "paused", &["--leave-running"])?;
    case.expect_status(&id, Status::Paused)?;
    ensure!(nerdctl.logs(&id)? == before, "the log of a paused container grew");
    nerdctl.run(["unpause", &id])?;
    let last = counts_on(&nerdctl, &id, consecutive(&before, 101)?)?;
    nerdctl.run(["pause", &id])?;
    end_by_checkpoint(case, &nerdctl, &id, "ended")?;
    nerdctl.restore(&id, "ended", &[])?;
    counts_on(&nerdctl, &id, last).map(drop)
}

/// nerdctl shows the engine's words, and nothing has happened.
fn driver_error(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let id = nerdctl.start_counter(&[])?;
    case.gpu.faults(&["checkpoint error:999"])?;
    let error = nerdctl.fail(["checkpoint", "create", &id, "failed"])?;
    ensure!(error.contains("999 (CUDA_ERROR_UNKNOWN)"), "{error}");
    ensure!(error.contains("counter"), "the process is not named: {error}");
    ensure!(!nerdctl.checkpoints().join("failed").exists(), "there is a checkpoint");
    case.expect_status(&id, Status::Running)?;
    case.expect(&id, 102)?;
    case.gpu.heal()?;
    end_by_checkpoint(case, &nerdctl, &id, "good")?;
    // A restore that fails leaves a container that can be started again.
    case.gpu.faults(&["restore error:999"])?;
    let error = nerdctl.fail(["start", "--checkpoint", "good", &id])?;
    ensure!(error.contains("999 (CUDA_ERROR_UNKNOWN)"), "{error}");
    case.gpu.heal()?;
    nerdctl.restore(&id, "good", &[])?;
    case.expect(&id, 103)
}

/// `--checkpoint-dir`, and what is there starts another container as well.
fn elsewhere(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let id = nerdctl.start_counter(&[])?;
    let directory = case.path("elsewhere").display().to_string();
    let flags = ["--checkpoint-dir", &directory];
    nerdctl.checkpoint(&id, "one", &flags)?;
    case.wait_stopped(&id)?;
    ensure!(case.path("elsewhere/one/stasis.json").exists(), "no manifest");
    ensure!(nerdctl.list(&id, &flags)? == ["one"], "{:?}", nerdctl.list(&id, &flags)?);
    nerdctl.restore(&id, "one", &flags)?;
    case.expect(&id, 102)?;
    let gpu = nerdctl.gpu();
    let mut given = vec!["--network", "none"];
    given.extend(gpu.iter().map(String::as_str));
    let other = nerdctl.create(&given, &["/bin/counter", "--stdout"])?;
    nerdctl.run(["rm", "--force", &id])?;
    nerdctl.restore(&other, "one", &flags)?;
    case.expect(&other, 102)?;
    shows(&nerdctl, &other, "102\n")?;
    nerdctl.run(["checkpoint", "rm", "--checkpoint-dir", &directory, &other, "one"])?;
    ensure!(!case.path("elsewhere/one").exists(), "it is still there");
    Ok(())
}

fn host_network(case: &Case) -> Result<()> {
    // No other container is in the lab's network.
    const HERE: u16 = 18231;
    let nerdctl = Nerdctl::new(case);
    let gpu = nerdctl.gpu();
    let mut flags = vec!["--network", "host"];
    flags.extend(gpu.iter().map(String::as_str));
    let port = HERE.to_string();
    let id = nerdctl.start(&flags, &["/bin/counter", "--port", &port])?;
    let counter = SocketAddrV4::new(Ipv4Addr::LOCALHOST, HERE);
    for count in 101..=103 {
        let answer = udp::ask_at(counter)?;
        ensure!(answer == count, "{answer} instead of {count}");
        if count < 103 {
            end_by_checkpoint(case, &nerdctl, &id, &port)?;
            nerdctl.restore(&id, &port, &[])?;
            nerdctl.run(["checkpoint", "rm", &id, &port])?;
        }
    }
    Ok(())
}

/// nerdctl makes the network in a hook that runc runs for a restore, too: the restored container
/// has the same published port, and the same address where it was promised one.
fn bridge(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let gpu = nerdctl.gpu();
    // Where a first attempt was cut off in the middle, its address and its port stay taken.
    let again = u8::from(case.name().ends_with("_again"));
    let (published, own) = (18232 + u16::from(again) * 100, Ipv4Addr::new(10, 4, 0, 77 + again));
    let publish = format!("{published}:{PORT}/udp");
    let ip = own.to_string();
    let mut flags = vec!["--network", "bridge", "--ip", &ip, "--publish", &publish];
    flags.extend(gpu.iter().map(String::as_str));
    let id = nerdctl.start(&flags, &["/bin/counter"])?;
    let host = Ipv4Addr::new(10, 4, 0, 1);
    let mut count = 100;
    let mut says = |address: Ipv4Addr, port: u16| -> Result<()> {
        count += 1;
        let answer = udp::ask_at(SocketAddrV4::new(address, port))?;
        ensure!(answer == count, "{address}:{port} said {answer} instead of {count}");
        Ok(())
    };
    says(own, PORT)?;
    says(host, published)?;
    for name in ["first", "second"] {
        end_by_checkpoint(case, &nerdctl, &id, name)?;
        nerdctl.restore(&id, name, &[])?;
        let now = nerdctl.address(&id)?;
        ensure!(now == own, "nerdctl says that it has the address {now}");
        says(own, PORT)?;
        says(host, published)?;
    }
    Ok(())
}

/// The GPU comes by this host's CDI specification.
fn device_by_cdi(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let cdi = Cdi::install_in(&nerdctl.cdi(), "nerdctl", &case.gpu)?;
    let device = cdi.device();
    let flags = ["--network", "none", "--device", &device];
    let id = nerdctl.start(&flags, &["/bin/counter", "--stdout"])?;
    case.expect(&id, 101)?;
    for count in 102..=103 {
        let name = count.to_string();
        end_by_checkpoint(case, &nerdctl, &id, &name)?;
        nerdctl.restore(&id, &name, &[])?;
        case.expect(&id, count)?;
    }
    shows(&nerdctl, &id, "101\n102\n103\n")
}

/// A terminal whose output goes to nerdctl's logger.
fn terminal(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let gpu = nerdctl.gpu();
    let mut flags = vec!["--network", "none", "--tty"];
    flags.extend(gpu.iter().map(String::as_str));
    let id = nerdctl.start(&flags, &["/bin/counter", "--stdout"])?;
    case.expect(&id, 101)?;
    shows(&nerdctl, &id, "101\r\n")?;
    let mut lines = "101\r\n".to_owned();
    for count in 102..=103 {
        let name = count.to_string();
        end_by_checkpoint(case, &nerdctl, &id, &name)?;
        nerdctl.restore(&id, &name, &[])?;
        case.expect(&id, count)?;
        write!(lines, "{count}\r\n")?;
        shows(&nerdctl, &id, &lines)?;
    }
    Ok(())
}

/// `--gpus` of nerdctl is NVIDIA's legacy hook, whose mounts CRIU cannot dump. It wants a program
/// that is not here: a nerdctl that takes it for CDI does not.
fn gpus_want_the_legacy_hook(case: &Case) -> Result<()> {
    let nerdctl = Nerdctl::new(case);
    let name = case.new_id();
    let mut arguments = vec!["run", "--detach", "--name", &name, "--network", "none"];
    arguments.extend(["--gpus", "all", stasis_integration::image::NAME, "/bin/sleep", "1"]);
    let error = nerdctl.fail(arguments)?;
    ensure!(error.contains("nvidia-container-cli"), "{error}");
    let _ = nerdctl.finish(["rm", "--force", &name]);
    Ok(())
}

/// All that people do with a container without a GPU: the expectations hold for containerd's own
/// shim and the real runc as well.
fn plain(case: &Case) -> Result<()> {
    const PROGRAM: &str = "trap 'echo told; exit 5' TERM; echo begun >&2; i=100; \
                           while :; do i=$((i+1)); echo $i; sleep 0.05; done";
    let nerdctl = Nerdctl::new(case);
    let runtime = nerdctl.runtime();
    let [flag, name] = &runtime;
    let once = ["run", "--rm", "--pull", "never", "--network", "none", flag, name];
    let image = [stasis_integration::image::NAME, "/bin/sh", "-c"];
    let words = [&once[..], &image, &["echo out; echo err >&2; exit 7"]].concat();
    let finished = nerdctl.finish(words)?;
    ensure!(finished.status.code() == Some(7), "{finished:?}");
    ensure!(finished.stdout == "out\n" && finished.stderr.contains("err\n"), "{finished:?}");

    let id = nerdctl.start(&["--network", "none"], &["/bin/sh", "-c", PROGRAM])?;
    let log = || -> Result<String> { Ok(nerdctl.finish(["logs", &id])?.stdout) };
    let last = || consecutive(log()?.trim_end_matches("told\n"), 101);
    let more = |than: u64| {
        wait::until("more lines", LIMIT, || Ok(Some(last()?).filter(|&last| last > than)))
    };
    more(101)?;
    // nerdctl 2.2 has one exit code for all that its execs end with, and tells theirs.
    let finished = nerdctl.finish(["exec", &id, "/bin/sh", "-c", "echo in; exit 3"])?;
    ensure!(finished.stdout == "in\n" && !finished.status.success(), "{finished:?}");
    ensure!(finished.stderr.contains("exec failed with exit code 3"), "{finished:?}");
    let error = nerdctl.fail(["exec", &id, "/nonexistent"])?;
    ensure!(error.contains("no such file or directory"), "{error}");
    nerdctl.run(["pause", &id])?;
    ensure!(nerdctl.inspect(&id, "{{.State.Status}}")? == "paused", "it is not paused");
    nerdctl.run(["unpause", &id])?;
    let before = more(last()?)?;
    nerdctl.run(["pause", &id])?;
    end_by_checkpoint(case, &nerdctl, &id, "plain")?;
    nerdctl.restore(&id, "plain", &[])?;
    more(before)?;
    let errors = nerdctl.finish(["logs", &id])?.stderr;
    ensure!(errors.contains("begun\n"), "standard error is lost: {errors:?}");
    let processes = nerdctl.run(["top", &id])?;
    ensure!(processes.lines().count() >= 2, "{processes:?}");
    // A signal reaches the restored shell, and its exit code nerdctl.
    nerdctl.run(["kill", "--signal", "TERM", &id])?;
    case.wait_stopped(&id)?;
    let code = nerdctl.run(["wait", &id])?;
    ensure!(code.trim() == "5", "exit code {code:?}");
    ensure!(log()?.ends_with("told\n"), "the last word is lost");
    last().context("of the ended")?;
    // Anew, with nothing of the checkpoint.
    nerdctl.run(["start", &id])?;
    case.expect_status(&id, Status::Running)?;
    nerdctl.run(["stop", "--time", "5", &id])?;
    ensure!(nerdctl.inspect(&id, "{{.State.ExitCode}}")? == "5", "it was not told to end");
    nerdctl.run(["rm", &id])?;
    none_left(&nerdctl)?;
    command::fail(&mut nerdctl.command(["inspect", &id]), LIMIT).map(drop)
}

/// Under load one was seen to be listed still when the command that removes it was back.
fn none_left(nerdctl: &Nerdctl) -> Result<()> {
    let list = || nerdctl.run(["ps", "--all"]);
    wait::until("no container", LIMIT, || Ok((list()?.lines().count() == 1).then_some(())))
        .with_context(|| format!("left: {}", list().unwrap_or_else(|error| error.to_string())))
}
