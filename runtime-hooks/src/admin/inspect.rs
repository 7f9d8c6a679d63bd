//! `stasis inspect`.

use std::io::IsTerminal as _;
use std::path::Path;
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressStyle};
use stasis_config::Config;

use crate::child::Program;
use crate::cuda::client::HelperDriver;
use crate::error::chain;
use crate::inspect::{host, read, render};

/// How wide lines are where the terminal does not tell.
const COLUMNS: usize = 80;

/// Looks into an image.
pub(super) fn run(config: &Config, image: &Path, json: bool) -> ExitCode {
    let bar = bar();
    let watch = |position, length| {
        bar.set_length(length);
        bar.set_position(position);
    };
    let report = read::read(image, &watch);
    bar.finish_and_clear();
    let mut report = match report {
        Ok(report) => report,
        Err(error) => return super::failed(&chain(&error)),
    };
    if let Some(needs) = &report.restore {
        let mut driver = HelperDriver::new(Program::this(), &config.cuda);
        report.host = Some(host::judge(needs, report.is_whole(), &mut driver));
    }
    let text = if json { render::json(&report) } else { render::text(&report, columns()) };
    match super::print(&text) {
        ExitCode::SUCCESS if report.is_whole() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// How far an archive was read, on a terminal.
fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("reading [{bar:30}] {bytes}/{total_bytes} {elapsed}");
    let bar = ProgressBar::no_length();
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// How wide the terminal is; none if there is none.
fn columns() -> Option<usize> {
    let stdout = std::io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(&stdout).ok();
    Some(size.map(|size| size.ws_col.into()).filter(|columns| *columns > 0).unwrap_or(COLUMNS))
}
