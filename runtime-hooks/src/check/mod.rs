//! `stasis check`: can this host checkpoint and restore CUDA containers, and if not, why not?
//!
//! Every check looks through [`Host`] and [`DriverInfo`], so that each is tested against files
//! and outputs of commands that were captured elsewhere. A check never changes anything. It says
//! what was found, not only what is wrong, because the report is also what people attach to a
//! question.

mod cgroup;
mod driver;
mod files;
mod host;
mod jobs;
mod kernel;
mod tools;
mod version;

use std::fmt::Write as _;

use serde::Serialize;
use stasis_config::Config;
use stasis_config::text::printable;

pub use driver::{DriverFacts, DriverInfo};
pub use host::{Host, Output, System};

/// What a check came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// A name for programs, in kebab-case. Stays the same from version to version.
    pub id: &'static str,
    /// A name for people.
    pub title: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found. One line.
    pub message: String,
    /// What to do about it. One line.
    pub remedy: Option<String>,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Checkpoints work, but not all of them, or not as well as they could.
    Warning,
    /// Checkpoints of CUDA containers fail.
    Error,
}

impl Level {
    /// The name in both renderings.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// Findings quote what commands print.
const LONGEST: usize = 2000;

impl Finding {
    fn new(id: &'static str, title: &'static str, level: Level, message: &str) -> Self {
        Self { id, title, level, message: printable(message, LONGEST), remedy: None }
    }

    fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// The name of a check. What it finds is one of three.
#[derive(Clone, Copy)]
struct Check {
    id: &'static str,
    title: &'static str,
}

impl Check {
    fn ok(self, message: impl AsRef<str>) -> Finding {
        Finding::new(self.id, self.title, Level::Ok, message.as_ref())
    }

    fn warning(self, message: impl AsRef<str>) -> Finding {
        Finding::new(self.id, self.title, Level::Warning, message.as_ref())
    }

    fn error(self, message: impl AsRef<str>) -> Finding {
        Finding::new(self.id, self.title, Level::Error, message.as_ref())
    }
}

/// Runs all checks, in the order in which a reader wants them: what the rest needs comes first.
#[must_use]
pub fn run(host: &dyn Host, driver: &dyn DriverInfo, config: &Config) -> Vec<Finding> {
    let criu = tools::criu(host);
    let criu_check = tools::criu_check(host, &criu);
    let criu_options = tools::criu_options(host);

    let mut all = vec![
        kernel::root(host),
        kernel::kernel(host, criu_check.level == Level::Ok),
        kernel::ptrace(host),
        cgroup::cgroups(host),
        kernel::huge_pages(host),
        tools::runtime(host, &config.runtime.path, &config.cdi.directories),
    ];
    all.extend([criu, criu_check]);
    all.extend([
        tools::criu_conf(&criu_options),
        tools::cuda_plugin(host),
        tools::iptables(host, &criu_options),
        tools::tar(host),
    ]);
    all.extend(driver::driver(host, driver, config));
    all.extend([
        files::cdi(host, &config.cdi.directories),
        files::state_directory(host, &config.state.directory),
        files::log_directory(host, &config.log.directory),
    ]);
    all
}

/// A line for each finding, and its remedy below if there is something to do.
#[must_use]
pub fn render_text(findings: &[Finding]) -> String {
    const LEVEL: usize = "warning".len() + 2;
    let title = findings.iter().map(|f| f.title.len()).max().unwrap_or(0) + 2;
    let mut out = String::new();
    for finding in findings {
        let _ = writeln!(
            out,
            "{:LEVEL$}{:title$}{}",
            finding.level.as_str(),
            finding.title,
            finding.message
        );
        if let (Level::Warning | Level::Error, Some(remedy)) = (finding.level, &finding.remedy) {
            let _ = writeln!(out, "{:LEVEL$}{:title$}{remedy}", "", "");
        }
    }
    out
}

/// An array of findings; the fields are those of [`Finding`], `remedy` may be null.
#[must_use]
pub fn render_json(findings: &[Finding]) -> String {
    let mut out = serde_json::to_string_pretty(findings)
        .unwrap_or_else(|error| unreachable!("findings are text: {error}"));
    out.push('\n');
    out
}

/// 0 if nothing stands in the way of checkpoints of CUDA containers, else 1.
#[must_use]
pub fn exit_code(findings: &[Finding]) -> u8 {
    u8::from(findings.iter().any(|finding| finding.level == Level::Error))
}

#[cfg(test)]
mod fake;

#[cfg(test)]
mod tests {
    use super::driver::tests::{FakeDriver, h200};
    use super::fake::Fake;
    use super::*;

    #[test]
    fn a_good_host_is_good() {
        let all = run(&Fake::good(), &FakeDriver(Ok(h200())), &Config::default());
        for finding in &all {
            assert_eq!(finding.level, Level::Ok, "{finding:?}");
        }
        assert_eq!(exit_code(&all), 0);
    }

    #[test]
    fn ids_are_unique_and_kebab_case() {
        let all = run(&Fake::empty(), &FakeDriver(Err("no".into())), &Config::default());
        let good = run(&Fake::good(), &FakeDriver(Ok(h200())), &Config::default());
        for all in [all, good] {
            let mut ids: Vec<_> = all.iter().map(|f| f.id).collect();
            assert!(ids.iter().all(|id| id.chars().all(|c| c.is_ascii_lowercase() || c == '-')));
            ids.sort_unstable();
            let count = ids.len();
            ids.dedup();
            assert_eq!(ids.len(), count);
        }
    }

    #[test]
    fn an_empty_host_says_what_to_do_about_each_error() {
        let all = run(&Fake::empty(), &FakeDriver(Err("no".into())), &Config::default());
        assert_eq!(exit_code(&all), 1);
        for finding in all {
            if finding.level != Level::Ok {
                assert!(finding.remedy.is_some(), "{finding:?}");
            }
        }
    }

    fn some() -> Vec<Finding> {
        let check = |id, title| Check { id, title };
        vec![
            check("kernel", "kernel").ok("6.18.44").remedy("not shown"),
            check("huge-pages", "huge pages").warning("never").remedy("echo always"),
            check("criu", "CRIU").error("a\nb"),
        ]
    }

    #[test]
    fn text_has_a_line_each() {
        assert_eq!(
            render_text(&some()),
            "ok       kernel      6.18.44\n\
             warning  huge pages  never\n\
             \u{20}                    echo always\n\
             error    CRIU        a\\nb\n"
        );
        assert_eq!(render_text(&[]), "");
    }

    #[test]
    fn json_has_an_object_each() {
        let json: serde_json::Value = serde_json::from_str(&render_json(&some())).unwrap();
        let want = serde_json::json!([
            {"id": "kernel", "title": "kernel", "level": "ok", "message": "6.18.44",
             "remedy": "not shown"},
            {"id": "huge-pages", "title": "huge pages", "level": "warning", "message": "never",
             "remedy": "echo always"},
            {"id": "criu", "title": "CRIU", "level": "error", "message": "a\\nb", "remedy": null},
        ]);
        assert_eq!(json, want);
    }

    #[test]
    fn only_errors_fail() {
        assert_eq!(exit_code(&[]), 0);
        assert_eq!(exit_code(&some()[..2]), 0);
        assert_eq!(exit_code(&some()), 1);
    }
}
