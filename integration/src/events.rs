//! The events of containerd, as `ctr events` shows them.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::ctr::Ctr;
use crate::wait;

const LIMIT: Duration = Duration::from_secs(10);

/// One event.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Such as `/tasks/exit`.
    pub topic: String,
    /// What it is about.
    pub content: Value,
}

impl Event {
    /// Whether it is about this container.
    #[must_use]
    pub fn is_of(&self, id: &str) -> bool {
        self.content["container_id"] == id || self.content["id"] == id
    }
}

/// `ctr events` in the background.
#[derive(Debug)]
pub struct Events {
    child: Child,
    log: PathBuf,
}

impl Events {
    /// Listens from now on.
    pub fn listen(ctr: &Ctr, log: PathBuf) -> Result<Self> {
        let file = File::create(&log)?;
        let mut command = ctr.command(["events"]);
        command.stdin(Stdio::null()).stdout(file).stderr(Stdio::null());
        let events = Self { child: command.spawn().context("ctr events")?, log };
        // Nothing tells that it listens but an event that it shows.
        let mut number = 0;
        wait::until("an event that ctr events shows", LIMIT, || {
            number += 1;
            let label = format!("listens={number}");
            ctr.run(["namespaces", "label", ctr.namespace(), &label])?;
            Ok(events.all()?.iter().any(|event| event.topic == "/namespaces/update").then_some(()))
        })?;
        Ok(events)
    }

    /// All so far.
    pub fn all(&self) -> Result<Vec<Event>> {
        let text = fs::read_to_string(&self.log)?;
        // The last line may be written at this moment.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(parse).collect()
    }

    /// All about a container so far.
    pub fn of(&self, id: &str) -> Result<Vec<Event>> {
        Ok(self.all()?.into_iter().filter(|event| event.is_of(id)).collect())
    }

    /// Waits for an event about a container.
    pub fn wait_for(&self, id: &str, topic: &str) -> Result<Event> {
        wait::until(&format!("{topic} of {id}"), LIMIT, || {
            Ok(self.of(id)?.into_iter().find(|event| event.topic == topic))
        })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line: date, time, zone, zone, namespace, topic, and the content as JSON.
fn parse(line: &str) -> Result<Event> {
    let mut words = line.splitn(7, ' ');
    let topic = words.nth(5).with_context(|| format!("ctr events shows {line:?}"))?;
    let content = words.next().unwrap_or_default();
    let content = serde_json::from_str(content).with_context(|| format!("in {line:?}"))?;
    Ok(Event { topic: topic.to_owned(), content })
}
