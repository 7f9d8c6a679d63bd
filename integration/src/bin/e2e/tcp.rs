//! Established TCP connections inside a container.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use stasis_integration::case::{Case, Container};
use stasis_integration::ctr::{Checkpoint, Status};
use stasis_integration::runtime::Settings;
use stasis_integration::{command, wait};

use crate::{Test, consecutive};

const GOT: &str = "/data/got";
const TALK: &str = "
    tail -f /dev/null | nc -l -p 5000 >/data/got &
    sleep 0.2
    { i=0; while :; do i=$((i+1)); echo $i; sleep 0.02; done; } | nc 127.0.0.1 5000 &
    exec counter";

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test::new("kept_when_configured", kept_when_configured),
        Test::new("refused_by_default", refused_by_default),
    ]
}

/// A network namespace that outlives the container, as a CNI plugin makes one: runc restores its
/// own ones empty and down, and no connection could be.
struct Network(String);

impl Network {
    fn new(name: &str) -> Result<Self> {
        let network = Self(name.to_owned());
        ip(&["netns", "add", name])?;
        ip(&["-netns", name, "link", "set", "lo", "up"])?;
        Ok(network)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = ip(&["netns", "delete", &self.0]);
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    command::succeed(Command::new("ip").args(arguments), Duration::from_secs(10)).map(drop)
}

fn start(case: &Case, network: &Network) -> Result<String> {
    let mut container = Container::new(["/bin/sh", "-c", TALK]);
    let namespace = format!("network:/run/netns/{}", network.0);
    container.options.extend(["--with-ns".to_owned(), namespace]);
    let id = case.start(&container)?;
    case.expect(&id, 101)?;
    talks(case, &id)?;
    Ok(id)
}

/// More arrives, and nothing is lost.
fn talks(case: &Case, id: &str) -> Result<()> {
    let received = || consecutive(&case.read(id, GOT).unwrap_or_default(), 1);
    let before = received()?;
    wait::until("more lines by TCP", Duration::from_secs(10), || {
        Ok((received()? > before).then_some(()))
    })
}

fn kept_when_configured(case: &Case) -> Result<()> {
    case.set(&Settings::default().with("criu", "tcp-established", "true"))?;
    let network = Network::new("stasis-tcp-kept")?;
    let id = start(case, &network)?;
    case.cycle(&id)?;
    talks(case, &id)?;
    case.expect(&id, 102)
}

fn refused_by_default(case: &Case) -> Result<()> {
    let network = Network::new("stasis-tcp-refused")?;
    let id = start(case, &network)?;
    let options = Checkpoint { image: Some(case.path("image")), ..Checkpoint::default() };
    let error = case.checkpoint_fails(&id, &options)?;
    ensure!(!error.is_empty(), "no error is shown");
    case.expect_status(&id, Status::Running)?;
    talks(case, &id)?;
    case.expect(&id, 102)
}
