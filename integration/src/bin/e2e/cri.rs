//! CRI: what the kubelet asks containerd for, by `crictl`, with runtime classes for our shim.
//!
//! containerd 1.7 has no `CheckpointContainer`; there a container has to run as with containerd's own
//! shim, and no more can be asked.

mod classes;
mod cycles;
mod pods;
mod upstream;

use anyhow::{Result, ensure};

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    [classes::tests(), cycles::tests(), pods::tests(), upstream::tests()]
        .into_iter()
        .flatten()
        .collect()
}

/// What a container printed: these counts and nothing else.
fn printed(log: &str, counts: std::ops::RangeInclusive<u64>) -> Result<()> {
    let found: Vec<&str> = log.lines().collect();
    let wanted: Vec<String> = counts.map(|count| count.to_string()).collect();
    ensure!(found == wanted, "the log has {found:?} instead of {wanted:?}");
    Ok(())
}
