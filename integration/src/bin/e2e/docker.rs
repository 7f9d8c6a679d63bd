//! Docker: `docker checkpoint` and `docker start --checkpoint` with each way to have Stasis.
//!
//! Docker 28 cannot restore a container with a network namespace of its own
//! (containerd/containerd#12141), so there the containers are on the host's.

mod cells;
mod daemon;
mod failures;
mod given;
mod plain;
mod restored;
mod upstream;

use anyhow::Result;
use stasis_integration::case::{Case, Place};
use stasis_integration::docker::{
    BARE, BY_NAME, BY_PATH, Container, DEFAULT, Docker, EXACT, Network, STASIS_RUNC, Start,
};
use stasis_integration::shim::Shim;
use stasis_integration::suite::Suite;

use crate::Test;

/// Does nothing. (A `sleep` of busybox ends when a checkpoint interrupts it.)
const SLEEP: [&str; 3] = ["sh", "-c", "while :; do sleep 1; done"];

/// A way in which Docker has Stasis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// `runtimes.NAME.path` is `stasis-runc`.
    Runc,
    /// `runtimes.NAME.runtimeType` is our shim's own name.
    Name,
    /// `runtimes.NAME.runtimeType` is the path of our shim.
    Path,
    /// `runtimes.NAME.runtimeType` is `io.containerd.runc.v2`, and that is our shim.
    Exact,
    /// The same without `options`.
    Bare,
    /// Nothing is said, and `containerd-shim-runc-v2` is our shim.
    Default,
    /// Stock runc and containerd's own shim: to compare with.
    Stock,
}

impl Way {
    const OURS: [Self; 6] =
        [Self::Runc, Self::Name, Self::Path, Self::Exact, Self::Bare, Self::Default];

    /// Those that stand for all where the engine alone matters.
    const TYPICAL: [Self; 3] = [Self::Runc, Self::Name, Self::Exact];

    fn word(self) -> &'static str {
        match self {
            Self::Runc => "stasis_runc",
            Self::Name => "shim_by_name",
            Self::Path => "shim_by_path",
            Self::Exact => "shim_as_v2",
            Self::Bare => "shim_as_v2_without_options",
            Self::Default => "shim_by_default",
            Self::Stock => "stock",
        }
    }

    fn runtime(self) -> &'static str {
        match self {
            Self::Runc => STASIS_RUNC,
            Self::Name => BY_NAME,
            Self::Path => BY_PATH,
            Self::Exact => EXACT,
            Self::Bare => BARE,
            Self::Default | Self::Stock => DEFAULT,
        }
    }

    fn place(self) -> Place {
        Place::apart(match self {
            Self::Runc | Self::Stock => Shim::Go,
            Self::Name | Self::Path => Shim::Stasis,
            Self::Exact | Self::Bare | Self::Default => Shim::StasisAsV2,
        })
    }

    /// Whether a checkpoint without --leave-running ends the container.
    ///
    /// Docker asks for that only where it has options of runc's type for the container
    /// (`getCheckpointOptions` in moby): it has for `path` and for its default, and for a
    /// `runtimeType` only if that is `io.containerd.runc.v2` and has `options`.
    fn exits(self) -> bool {
        !matches!(self, Self::Name | Self::Path | Self::Bare)
    }
}

/// The network of containers that are restored.
fn network() -> Result<Network> {
    Ok(if Suite::current()? == Some(Suite::Forky) { Network::Host } else { Network::Private })
}

/// Starts a counter on the test's GPU and asks it once.
fn counter(docker: &Docker<'_>, way: Way, network: Network) -> Result<Container> {
    let container = docker.start(&Start::counter(way.runtime(), network, docker.gpu()))?;
    docker.expect(&container, 101)?;
    Ok(container)
}

/// `docker checkpoint create` without --leave-running, and the end of the container: by itself, or
/// by us where Docker does not ask for it. A test tells when it starts to.
fn checkpoint_and_end(
    docker: &Docker<'_>,
    way: Way,
    container: &Container,
    checkpoint: &str,
) -> Result<()> {
    docker.checkpoint(container, checkpoint)?;
    if way.exits() {
        docker.wait_for(container, "exited")
    } else {
        docker.expect_status(container, "running")?;
        docker.kill(container)
    }
}

/// The tests of each way, in its place.
pub(crate) fn tests() -> Vec<(Place, Vec<Test>)> {
    let mut all = Vec::new();
    let mut add = |way: Way, tests: Vec<Test>| all.push((way.place(), tests));
    for way in Way::OURS {
        add(way, cells::tests(way));
    }
    for way in Way::TYPICAL {
        add(way, given::tests(way));
        add(way, failures::tests(way));
        add(way, restored::tests(way));
        add(way, plain::tests(way));
        add(way, upstream::tests(way));
    }
    for way in [Way::Runc, Way::Name] {
        add(way, daemon::tests(way));
    }
    add(Way::Stock, plain::tests(Way::Stock));
    add(Way::Stock, daemon::tests(Way::Stock));
    add(Way::Stock, upstream::tests(Way::Stock));
    all
}

/// A test of a way.
fn test(
    way: Way,
    name: &str,
    body: impl Fn(&Docker<'_>, Way) -> Result<()> + Send + 'static,
) -> Test {
    Test::new(format!("{}_{name}", way.word()), move |case: &Case<'_>| {
        Docker::test(case, |docker| body(docker, way))
    })
}
