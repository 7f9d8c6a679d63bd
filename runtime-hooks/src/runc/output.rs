//! What the runtime says: what it prints, and its log.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};

/// The last `length` bytes of what was written to a file, without white space around them.
#[must_use]
pub fn tail(mut output: File, length: u64) -> String {
    let mut bytes = Vec::new();
    let from = output.metadata().map_or(0, |metadata| metadata.len().saturating_sub(length));
    let read = output.seek(SeekFrom::Start(from)).and_then(|_| output.read_to_end(&mut bytes));
    match read {
        Ok(_) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        Err(error) => format!("(output not readable: {error})"),
    }
}

/// The reason that was given last: the message of the last `level=error` line of a JSON log.
#[must_use]
pub fn last_error(log: &str) -> Option<String> {
    log.lines().rev().find_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        (line["level"] == "error").then(|| line["msg"].as_str().map(str::to_owned))?
    })
}
