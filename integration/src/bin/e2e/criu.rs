//! Options of CRIU that no caller can give, and CRIU killed in the middle of its work.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::Settings;
use stasis_integration::{command, processes, wait};

use crate::failures::{goes_on, works_again};
use crate::{Test, failures};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("ghost_limit_without_cuda", |case| ghost_limit(case, false)),
        Test::new("ghost_limit_with_cuda", |case| ghost_limit(case, true)),
        Test::new("link_remap", link_remap),
        Test::new("its_words_and_log_are_in_the_error", words),
        Test::new("runc_killed_in_the_dump", |case| killed(case, "runc", Signal::SIGKILL)),
        Test::new("criu_killed_in_the_dump", |case| killed(case, "criu", Signal::SIGKILL)),
        Test::new("stasis_runc_killed_in_the_dump", |case| {
            killed(case, "stasis-runc", Signal::SIGKILL)
        }),
        Test::new("stasis_runc_interrupted_in_the_dump", |case| {
            killed(case, "stasis-runc", Signal::SIGINT)
        }),
    ]
}

fn checkpoint(case: &Case) -> Checkpoint {
    Checkpoint { image: Some(case.path("image")), ..Checkpoint::default() }
}

/// A deleted file of 2 MiB that is still open: more than CRIU takes by default.
fn ghost_limit(case: &Case, gpu: bool) -> Result<()> {
    let script = "exec 3<>/ghost; dd if=/dev/zero of=/ghost bs=1M count=2; rm /ghost; \
                  echo >/ready; exec counter";
    let idle = script.replace("exec counter", "while :; do sleep 1; done");
    let program = ["/bin/sh", "-c", if gpu { script } else { &idle }];
    let container = Container::new(program);
    let id = case.start(&if gpu { container } else { container.without_gpu() })?;
    wait::until("the ghost", Duration::from_secs(10), || Ok(case.read(&id, "/ready").ok()))?;
    if gpu {
        case.expect(&id, 101)?;
    }
    case.checkpoint_fails(&id, &checkpoint(case))?;
    case.expect_status(&id, Status::Running)?;
    case.set(&Settings::default().with("criu", "ghost-limit", "\"8MiB\""))?;
    case.checkpoint(&id, &checkpoint(case))?;
    case.expect_status(&id, Status::Running)?;
    if gpu { case.expect(&id, 102) } else { Ok(()) }
}

/// An open file whose name was removed while another name of it is left.
fn link_remap(case: &Case) -> Result<()> {
    let script = "echo x >/data/a; exec 3<>/data/a; ln /data/a /data/b; rm /data/a; exec counter";
    let id = case.start(&Container::new(["/bin/sh", "-c", script]))?;
    case.expect(&id, 101)?;
    case.checkpoint_fails(&id, &checkpoint(case))?;
    case.expect(&id, 102)?;
    case.set(&Settings::default().with("criu", "link-remap", "true"))?;
    case.checkpoint(&id, &checkpoint(case))?;
    case.expect(&id, 103)
}

/// containerd removes the work directory; what CRIU said is in the error and in a log that stays.
fn words(case: &Case) -> Result<()> {
    let id = failures::start(case)?;
    case.gpu.faults(&["checkpoint lie"])?;
    let error = case.checkpoint_fails(&id, &Checkpoint::default())?;
    for word in [id.as_str(), "criu-dump", "Can't dump file", "10:229", "paused as before"] {
        ensure!(error.contains(word), "the error does not say {word:?}: {error}");
    }
    let (_, rest) = error.split_once("CRIU's log: ").ok_or_else(|| anyhow::anyhow!("{error}"))?;
    let log = rest.split_whitespace().next().unwrap_or_default();
    let text = fs::read_to_string(log)?;
    ensure!(text.contains("Dumping FAILED"), "{log} is not CRIU's log");
    works_again(case, &id)
}

/// Somebody kills runc or the runtime while CRIU copies memory. CRIU ends by itself; until then
/// the processes are its.
fn killed(case: &Case, program: &str, signal: Signal) -> Result<()> {
    // As on a real GPU there is more to dump than the device memory: enough to hit the middle.
    fs::write(case.gpu.store().join("config"), "reserve-bytes=805306368\n")?;
    let id = case.start_counter(&["--pattern-mib", "4", "--log", "/data/log", "--tick", "20"])?;
    let mut hits = 0;
    for delay in [0, 40, 80, 160] {
        let image = case.path(&format!("image-{delay}"));
        let dumping = image.join("pagemap-1.img");
        let mut checkpoint = case.direct_checkpoint(&id, &image);
        let name = program.to_owned();
        let wanted = id.clone();
        let striker = thread::spawn(move || -> Result<bool> {
            wait::until("the dump", Duration::from_secs(30), || {
                Ok(dumping.exists().then_some(()))
            })?;
            thread::sleep(Duration::from_millis(delay));
            let mut hit = false;
            // CRIU itself is not told the container's name; its parent is.
            let checkpoints: Vec<Pid> = processes::with_argument(&wanted)
                .into_iter()
                .filter(|pid| processes::with_argument("checkpoint").contains(pid))
                .collect();
            for pid in processes::of_binary(&name) {
                let parent = processes::parent(pid);
                if checkpoints.iter().any(|known| *known == pid || Some(*known) == parent) {
                    hit |= kill(pid, signal).is_ok();
                }
            }
            Ok(hit)
        });
        let output = command::run(&mut checkpoint, Duration::from_secs(60))?;
        let hit = striker.join().map_err(|_| anyhow::anyhow!("the striker panicked"))??;
        hits += u32::from(hit && !output.status.success());
        // The next operation puts right what was left behind.
        case.ctr().pause(&id)?;
        case.ctr().resume(&id)?;
        goes_on(case, &id)?;
        ensure!(!traced(case.pid(&id)?)?, "CRIU still holds it");
        let _ = fs::remove_dir_all(&image);
    }
    ensure!(hits > 0, "nothing was killed in time");
    works_again(case, &id)
}

fn traced(pid: Pid) -> Result<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    Ok(!status.lines().any(|line| line == "TracerPid:\t0"))
}
