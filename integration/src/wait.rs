//! Waiting for what happens by itself.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Pause between two looks.
const INTERVAL: Duration = Duration::from_millis(10);

/// Waits until `look` finds something, and says `what` was not found otherwise.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if start.elapsed() > limit {
            bail!("waited {limit:?} in vain: {what}");
        }
        thread::sleep(INTERVAL);
    }
}
