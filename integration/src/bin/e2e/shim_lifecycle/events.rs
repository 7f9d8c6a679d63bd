//! What containerd's clients are told.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::json;
use stasis_integration::case::Case;
use stasis_integration::ctr::Checkpoint;
use stasis_integration::events::{Event, Events};
use stasis_integration::shim::Shim;

use super::{Check, Seen, ctr, script};

pub(crate) const CHECKS: &[Check] =
    &[Check::same("events_in_order", order), Check::same("out_of_memory", oom)];

/// A sleep is over when CRIU has touched it.
const LOOP: &str = "while :; do sleep 1; done";

fn order(case: &Case, seen: &mut Seen) -> Result<()> {
    let events = Events::listen(case.ctr(), case.path("events"))?;
    let id = case.start(&script(LOOP))?;
    ctr(case, &["tasks", "exec", "--exec-id", "short", &id, "/bin/sh", "-c", "exit 3"])?;
    ctr(case, &["tasks", "exec", "--detach", "--exec-id", "long", &id, "sh", "-c", LOOP])?;
    case.ctr().pause(&id)?;
    case.ctr().resume(&id)?;
    let image = Some(case.path("image"));
    case.checkpoint(&id, &Checkpoint { image, ..Checkpoint::default() })?;
    case.ctr().kill(&id)?;
    case.wait_stopped(&id)?;
    // The exec is killed with its namespace, and its end is told before that of init.
    case.remove(&id)?;
    events.wait_for(&id, "/containers/delete")?;
    let deleted = events.wait_for(&id, "/tasks/delete");
    let mut all = events.of(&id)?;
    if case.shim() == Shim::Go && deleted.is_err() {
        // It may end before it has told (seen with containerd 2.1). This is what it tells otherwise.
        let content = json!({"container_id": id, "exit_status": 137, "exited_at": {}, "pid": 1});
        all.push(Event { topic: "/tasks/delete".to_owned(), content });
    } else {
        deleted?;
    }
    // The one is containerd's and the other the shim's: nobody promises which is shown first.
    all.sort_by_key(|event| event.topic == "/containers/delete");
    for event in all {
        // Go's shim does not publish it.
        if event.topic == "/tasks/checkpointed" {
            seen.say("and checkpointed");
            continue;
        }
        let content = &event.content;
        let mut names: Vec<_> =
            content.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        let who = if content["id"] == id.as_str() { "init" } else { "other" };
        let exec = content["exec_id"].as_str().unwrap_or_default();
        let status = &content["exit_status"];
        let how = format!("{who} {exec} {status} with {}", names.join(" "));
        seen.note(event.topic, case.normal(&how));
    }
    Ok(())
}

/// A limit of 16 MiB, of which tail wants more for a line that never ends.
fn oom(case: &Case, seen: &mut Seen) -> Result<()> {
    let events = Events::listen(case.ctr(), case.path("events"))?;
    let mut container = script("exec tail /dev/zero");
    container.options.extend(["--memory-limit".to_owned(), (16 << 20).to_string()]);
    let start = Instant::now();
    let id = case.start(&container)?;
    let exit = events.wait_for(&id, "/tasks/exit")?;
    seen.took(start.elapsed());
    seen.note("exit status", exit.content["exit_status"].to_string());
    let oom = events.wait_for(&id, "/tasks/oom")?;
    ensure!(oom.content["container_id"] == id.as_str(), "{oom:?}");
    Ok(())
}
