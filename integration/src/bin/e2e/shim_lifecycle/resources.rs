//! Processes, limits and numbers of a task.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use stasis_integration::case::Case;

use super::{Check, Seen, ctr, idle, note, ready, script};

pub(crate) const CHECKS: &[Check] = &[
    Check::same("processes", ps),
    Check::same("update_of_a_limit", update),
    Check::same("metrics", metrics),
];

fn ps(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&script("sleep 1000 & echo >/data/ready; wait"))?;
    ready(case, &id, "/data/ready")?;
    case.ctr().run(["tasks", "exec", "--detach", "--exec-id", "other", &id, "sleep", "1000"])?;
    let pid = case.pid(&id)?.to_string();
    let list = ctr(case, &["tasks", "ps", &id])?;
    let mut kinds: Vec<String> = list
        .stdout
        .lines()
        .skip(1)
        .map(|line| {
            let (number, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let init = if number == pid { "init" } else { "other" };
            format!("{init} {}", rest.trim())
        })
        .collect();
    kinds.sort();
    ensure!(kinds.len() == 3, "{}", list.stdout);
    seen.note("processes", kinds.join(", "));
    note(case, seen, "ps", &list);
    Ok(())
}

fn update(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&idle())?;
    let limit = || -> Result<String> {
        let cgroup = format!("{}/{id}", case.ctr().namespace());
        let file = format!("/sys/fs/cgroup/memory/{cgroup}/memory.limit_in_bytes");
        Ok(fs::read_to_string(file)?.trim().to_owned())
    };
    let before = limit()?;
    case.task(&id)?.update(&id, &json!({ "memory": { "limit": 64 << 20 } }))?;
    let after = limit()?;
    ensure!(before != after, "the limit stayed {before}");
    seen.note("limit", after);
    let refused = case.task(&id)?.update(&id, &json!({ "memory": { "limit": 1 } })).map(drop);
    seen.note("a limit that is too small", refused.is_err().to_string());
    Ok(())
}

/// The places of everything that holds something; single numbers are left out where they are 0.
fn places(value: &Value, place: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            found.insert(place.to_owned());
            for (name, value) in map {
                places(value, &format!("{place}.{name}"), found);
            }
        }
        Value::Array(list) => {
            for value in list {
                places(value, &format!("{place}[]"), found);
            }
        }
        _ => {}
    }
}

fn metrics(case: &Case, seen: &mut Seen) -> Result<()> {
    let id = case.start(&script(
        "dd if=/dev/zero of=/data/x bs=1M count=8; echo >/data/ready; \
                                 sleep 1000000",
    ))?;
    ready(case, &id, "/data/ready")?;
    let finished = ctr(case, &["tasks", "metrics", "--format", "json", &id])?;
    ensure!(finished.status.success(), "{}", finished.stderr);
    let metrics: Value = serde_json::from_str(&finished.stdout)?;
    let number = |pointer: &str| metrics.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
    ensure!(number("/pids/current") == 1, "pids: {}", metrics["pids"]);
    let memory = number("/memory/usage/usage");
    ensure!((100_000..1 << 30).contains(&memory), "memory: {}", metrics["memory"]);
    ensure!(number("/memory/cache") >= 4 << 20, "cache: {}", metrics["memory"]);
    let time = number("/cpu/usage/total");
    ensure!((100_000..60_000_000_000).contains(&time), "cpu: {}", metrics["cpu"]);
    let mut found = BTreeSet::new();
    places(&metrics, "", &mut found);
    for place in found {
        seen.note(place, "");
    }
    let table = ctr(case, &["tasks", "metrics", &id])?;
    let names: Vec<_> =
        table.stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    seen.note("table", case.normal(&names.join(" ")));
    Ok(())
}
