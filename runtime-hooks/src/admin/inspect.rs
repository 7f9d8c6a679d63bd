//! `stasis inspect`.

use std::path::Path;
use std::process::ExitCode;

use stasis_config::Config;

use crate::error::chain;
use crate::inspect::{read, render};

/// Looks into an image.
pub(super) fn run(config: &Config, image: &Path, json: bool) -> ExitCode {
    let report = match read::read(image, config.jobs.minimum_driver) {
        Ok(report) => report,
        Err(error) => return super::failed(&chain(&error)),
    };
    let text = if json { render::json(&report) } else { render::text(&report) };
    match super::print(&text) {
        ExitCode::SUCCESS if report.is_whole() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
