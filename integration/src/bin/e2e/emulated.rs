//! The emulation itself: each driver's own command, and a second GPU.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::Pid;
use stasis_integration::case::{Case, Container};
use stasis_integration::command;
use stasis_integration::gpu::Node;
use stasis_integration::image;
use stasis_integration::runtime::{Engine, Settings};

use crate::Test;

const LIMIT: Duration = Duration::from_secs(20);

/// Where the counter's libcuda is.
const LIBCUDA: &str = "libcuda.so.1";

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("toggle_on_550", |case| toggles(case, "550.54.15")),
        Test::new("toggle_on_610", |case| toggles(case, "610.43.02")),
        Test::new("steps_on_555", |case| steps(case, "555.42.02")),
        Test::new("steps_on_580", |case| steps(case, "580.159.04")),
        Test::new("another_gpu", another_gpu),
        Test::new("another_gpu_not_allowed", not_allowed),
        Test::new("second_node_not_dumped", not_dumped),
    ]
}

/// What the utility printed, when all went well.
fn asks(case: &Case, line: &str) -> Result<String> {
    let arguments: Vec<_> = line.split_whitespace().collect();
    command::succeed(&mut case.utility(&arguments), LIMIT)
}

/// What it said of what went wrong.
fn fails(case: &Case, line: &str) -> Result<String> {
    let arguments: Vec<_> = line.split_whitespace().collect();
    command::fail(&mut case.utility(&arguments), LIMIT)
}

/// The device nodes of GPUs that a process has open.
fn open_nodes(pid: Pid) -> Result<Vec<String>> {
    let open = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    let paths = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    let paths = paths.map(|path| path.display().to_string());
    // The store is below a directory whose name begins so, too.
    Ok(paths.filter(|path| path.starts_with("/dev/nvidia") && !path.contains('-')).collect())
}

fn expect_nodes(pid: Pid, expected: &[&str]) -> Result<()> {
    let open = open_nodes(pid)?;
    ensure!(open == expected, "process {pid} has {open:?} open instead of {expected:?}");
    Ok(())
}

/// A counter with the library of that driver.
fn start(case: &Case, driver: &str) -> Result<(String, Pid)> {
    case.gpu.driver(driver)?;
    let id = case.start_counter(&["--pattern-mib", "4"])?;
    let pid = case.pid(&id)?;
    let inside = format!("/proc/{pid}/root{}/{LIBCUDA}", image::LIBRARIES);
    let (inside, library) = (fs::metadata(inside)?, fs::metadata(case.gpu.library())?);
    ensure!(inside.ino() == library.ino(), "it has another driver's library");
    ensure!(fs::metadata(case.gpu.host_library())?.ino() == library.ino(), "the host has another");
    Ok((id, pid))
}

/// The lab suspends and resumes a container's CUDA with nothing but `--toggle`.
fn toggles(case: &Case, driver: &str) -> Result<()> {
    let (id, pid) = start(case, driver)?;
    for count in [102, 103] {
        asks(case, &format!("--toggle --pid {pid}"))?;
        expect_nodes(pid, &[])?;
        asks(case, &format!("--toggle --pid {pid}"))?;
        expect_nodes(pid, &["/dev/nvidia0"])?;
        case.expect(&id, count)?;
    }
    let state = format!("--get-state --pid {pid}");
    if driver.starts_with("550.") {
        let error = fails(case, &state)?;
        ensure!(error.contains("unrecognized option '--get-state'"), "{error}");
    } else {
        ensure!(asks(case, &state)? == "running\n", "it does not run");
    }
    Ok(())
}

/// The same, one step after the other.
fn steps(case: &Case, driver: &str) -> Result<()> {
    let (id, pid) = start(case, driver)?;
    for (step, state) in [
        ("lock --timeout 2000", "locked\n"),
        ("checkpoint", "checkpointed\n"),
        ("restore", "locked\n"),
        ("unlock", "running\n"),
    ] {
        asks(case, &format!("--action {step} --pid {pid}"))?;
        let found = asks(case, &format!("--get-state --pid {pid}"))?;
        ensure!(found == state, "{found:?} after {step}");
    }
    case.expect(&id, 102)
}

/// Suspended, and the arguments that move it to the second GPU.
fn suspended(case: &Case, program: &str) -> Result<(String, Pid, String)> {
    let id = case.start(&Container::new(["/bin/sh", "-c", program]))?;
    case.expect(&id, 101)?;
    let pid = case.pid(&id)?;
    expect_nodes(pid, &["/dev/nvidia0"])?;
    asks(case, &format!("--toggle --pid {pid}"))?;
    let map = format!("{}={}", case.gpu.uuid(0), case.gpu.uuid(1));
    Ok((id, pid, format!("--action restore --pid {pid} --device-map {map}")))
}

/// Makes the second GPU's node in the container's /dev, as CRIU does not.
fn make_node(pid: Pid) -> Result<()> {
    let Node { path, major, minor } = Node::of(1);
    let path = format!("/proc/{pid}/root{path}");
    Ok(mknod(
        path.as_str(),
        SFlag::S_IFCHR,
        Mode::from_bits_truncate(0o666),
        makedev(major, minor),
    )?)
}

/// Allowed by its cgroup and without a node, as after CRIU has restored the /dev of the image.
fn another_gpu(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    case.gpu.give(&[0, 1]);
    let program = "rm /dev/nvidia1 && exec counter --pattern-mib 4";
    let (id, pid, moved) = suspended(case, program)?;
    let error = fails(case, &moved)?;
    ensure!(error.contains("\"invalid argument\""), "{error}");
    make_node(pid)?;
    asks(case, &moved)?;
    asks(case, &format!("--action unlock --pid {pid}"))?;
    expect_nodes(pid, &["/dev/nvidia1"])?;
    case.expect(&id, 102)
}

/// A node alone is of no use.
fn not_allowed(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    let (id, pid, moved) = suspended(case, "exec counter --pattern-mib 4")?;
    make_node(pid)?;
    let error = fails(case, &moved)?;
    ensure!(error.contains("\"invalid argument\""), "{error}");
    asks(case, &format!("--toggle --pid {pid}"))?;
    case.expect(&id, 102)
}

/// CRIU refuses the second GPU's device as it does the first's, and dumps who has let go of it.
fn not_dumped(case: &Case) -> Result<()> {
    case.gpu.count(2)?;
    case.gpu.give(&[1]);
    case.set(&Settings { engine: Engine::Stock, ..Settings::default() })?;
    let holds = case.start_counter(&["--hold-device", "--device-node", "/dev/nvidia1"])?;
    let image = case.path("image");
    command::fail(&mut case.direct_checkpoint(&holds, &image), LIMIT)?;
    let log = fs::read_to_string(case.path("work").join("dump.log"))?;
    ensure!(log.contains("Can't dump file") && log.contains("10:237"), "{log}");
    let id = case.start_counter(&[])?;
    let pid = case.pid(&id)?;
    expect_nodes(pid, &["/dev/nvidia1"])?;
    asks(case, &format!("--toggle --pid {pid}"))?;
    command::succeed(&mut case.direct_checkpoint(&id, &image), LIMIT)?;
    asks(case, &format!("--toggle --pid {pid}"))?;
    case.expect(&id, 102)
}
