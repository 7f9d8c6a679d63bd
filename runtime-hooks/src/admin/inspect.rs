//! `stasis inspect`.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use stasis_config::Config;

use crate::error::chain;
use crate::inspect::{read, render};

/// Runs it with what stands behind its name.
pub(super) fn main(arguments: &[OsString]) -> ExitCode {
    match parse(arguments) {
        Ok(Asked::Help) => super::print(super::HELP),
        Ok(Asked::Image { path, json }) => run(path, json),
        Err(what) => super::usage(&format!("inspect: {what}")),
    }
}

/// What is wanted.
#[derive(Debug, PartialEq, Eq)]
enum Asked<'a> {
    Help,
    Image { path: &'a Path, json: bool },
}

fn parse(arguments: &[OsString]) -> Result<Asked<'_>, String> {
    let (mut image, mut json, mut options) = (None, false, true);
    for argument in arguments {
        match argument.to_str() {
            Some("--json") if options => json = true,
            Some("-h" | "--help") if options => return Ok(Asked::Help),
            Some("--") if options => options = false,
            Some(option) if options && option.starts_with('-') => {
                return Err(format!(
                    "'{}' is not understood",
                    option.replace(char::is_control, "?")
                ));
            }
            _ if image.is_some() => return Err("one image at a time".to_owned()),
            _ => image = Some(argument.as_os_str()),
        }
    }
    match image {
        Some(image) if image != OsStr::new("") => Ok(Asked::Image { path: Path::new(image), json }),
        _ => Err("which image?".to_owned()),
    }
}

fn run(image: &Path, json: bool) -> ExitCode {
    let failed = |error: &dyn std::error::Error| {
        eprintln!("stasis: {}", chain(error));
        ExitCode::FAILURE
    };
    let config = match Config::load() {
        Ok(config) => config,
        Err(error) => return failed(&error),
    };
    let report = match read::read(image, config.jobs.minimum_driver) {
        Ok(report) => report,
        Err(error) => return failed(&error),
    };
    let text = if json { render::json(&report) } else { render::text(&report) };
    match super::print(&text) {
        ExitCode::SUCCESS if report.is_whole() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(line: &str) -> Result<(String, bool), String> {
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        match parse(&arguments)? {
            Asked::Image { path, json } => Ok((path.display().to_string(), json)),
            Asked::Help => Ok(("help".to_owned(), false)),
        }
    }

    #[test]
    fn an_image_and_options_in_any_order() {
        assert_eq!(asked("/a").unwrap(), ("/a".into(), false));
        assert_eq!(asked("--json /a").unwrap(), ("/a".into(), true));
        assert_eq!(asked("/a --json").unwrap(), ("/a".into(), true));
        assert_eq!(asked("-- --json").unwrap(), ("--json".into(), false));
        assert_eq!(asked("/a --help").unwrap().0, "help");
    }

    #[test]
    fn anything_else_is_not_understood() {
        assert_eq!(asked("").unwrap_err(), "which image?");
        assert_eq!(asked("--json").unwrap_err(), "which image?");
        assert_eq!(asked("--").unwrap_err(), "which image?");
        assert_eq!(asked("/a /b").unwrap_err(), "one image at a time");
        assert_eq!(asked("--jso\x1bn /a").unwrap_err(), "'--jso?n' is not understood");
    }

    #[test]
    fn a_path_need_not_be_text() {
        use std::os::unix::ffi::OsStrExt as _;
        let path = OsStr::from_bytes(b"/a\xff");
        let asked = Asked::Image { path: Path::new(path), json: false };
        assert_eq!(parse(&[path.to_owned()]), Ok(asked));
    }
}
