//! The signals with which a caller ends an operation. They are noted and acted on between two
//! phases, so that the container is always put back.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on SIGTERM, SIGINT and SIGHUP are noted.
pub fn listen() -> io::Result<()> {
    let flag = FLAG.get_or_init(Arc::default);
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(())
}

/// Whether one came.
#[must_use]
pub fn interrupted() -> bool {
    FLAG.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}
