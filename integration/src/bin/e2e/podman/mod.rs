//! Podman with `stasis-runc` for its runtime.
//!
//! No containerd takes part. Each test has stores of its own; the runtime is a script that executes
//! `stasis-runc`, because Podman clears the environment in which the configuration is named.

mod cells;
mod chain;
mod crun;
mod failures;
mod options;
mod stock;

use crate::Test;

pub(crate) fn tests() -> Vec<Test> {
    [
        cells::tests(),
        options::tests(),
        failures::tests(),
        stock::tests(),
        chain::tests(),
        crun::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
