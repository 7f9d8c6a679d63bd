//! Makes the man pages and the completions of `stasis` from its command line: `manual DIRECTORY`.
//!
//! A page for each command, as git has them: name, synopsis, description and options are what
//! `--help` says; what follows them is written by hand, in `contrib/manual`.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// The date of all pages. Not that of the build, which would make each build another.
const DATE: &str = "2026-11-30";

/// What is written by hand, by the name of the page. It goes on in the description.
const BY_HAND: [(&str, &str); 7] = [
    ("stasis", include_str!("../../contrib/manual/stasis.roff")),
    ("stasis-check", include_str!("../../contrib/manual/stasis-check.roff")),
    ("stasis-inspect", include_str!("../../contrib/manual/stasis-inspect.roff")),
    ("stasis-ps", include_str!("../../contrib/manual/stasis-ps.roff")),
    ("stasis-repair", include_str!("../../contrib/manual/stasis-repair.roff")),
    ("stasis-resume", include_str!("../../contrib/manual/stasis-resume.roff")),
    ("stasis-suspend", include_str!("../../contrib/manual/stasis-suspend.roff")),
];

/// What all pages have.
const OF_ALL: &str = "\
.SH ENVIRONMENT
.TP
.B STASIS_CONFIG
The configuration file, instead of
.IR /etc/stasis/config.toml .
.SH FILES
.TP
.I /etc/stasis/config.toml
The configuration, see
.BR stasis\\-config.toml (5).
It need not exist.
";

/// Other pages of ours and of what we call.
const SEE_ALSO: [(&str, u8); 4] = [
    ("stasis-config.toml", 5),
    ("containerd-shim-runc-stasis", 8),
    ("stasis-runc", 8),
    ("criu", 8),
];

fn main() -> Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [directory] = arguments.as_slice() else { anyhow::bail!("usage: manual DIRECTORY") };
    let directory = Path::new(directory);
    completions(directory)?;
    pages(&directory.join("man"))
}

/// Each under the name under which its shell looks for it.
fn completions(directory: &Path) -> Result<()> {
    for (shell, path) in [
        (Shell::Bash, "bash/stasis"),
        (Shell::Zsh, "zsh/_stasis"),
        (Shell::Fish, "fish/stasis.fish"),
    ] {
        let path = directory.join(path);
        fs::create_dir_all(path.parent().unwrap_or(directory))?;
        let mut file = File::create(&path).with_context(|| path.display().to_string())?;
        clap_complete::generate(shell, &mut stasis_hooks::admin::command(), "stasis", &mut file);
    }
    Ok(())
}

fn pages(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = stasis_hooks::admin::command()
        .disable_help_subcommand(true)
        .subcommand_help_heading("COMMANDS")
        .subcommand_value_name("COMMAND");
    command.build();
    let all: Vec<&Command> = std::iter::once(&command)
        .chain(command.get_subcommands().filter(|command| !command.is_hide_set()))
        .collect();
    let names: Vec<&str> = all.iter().map(|command| name(command)).collect();
    for (known, _) in BY_HAND {
        ensure!(names.contains(&known), "contrib/manual has {known}, and there is no such command");
    }
    for command in &all {
        let name = name(command);
        let page = page(command, &names)?;
        let path = directory.join(format!("{name}.1"));
        fs::write(&path, page).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// The name of a command's page.
fn name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(command: &Command, names: &[&str]) -> Result<String> {
    let name = name(command);
    let by_hand = BY_HAND.iter().find(|(known, _)| *known == name);
    let (_, by_hand) = by_hand.with_context(|| format!("contrib/manual has no {name}.roff"))?;
    // The description goes on until the first heading.
    let heading = by_hand.find(".SH ").context("no heading")?;
    let (description, sections) = by_hand.split_at(heading);
    let version = stasis_hooks::admin::command().get_version().unwrap_or_default().to_owned();
    let man = Man::new((*command).clone())
        .title(name.to_uppercase())
        .date(DATE)
        .source(format!("Stasis {version}"))
        .manual("Stasis");
    let mut made = Vec::new();
    man.render_title(&mut made)?;
    man.render_name_section(&mut made)?;
    man.render_synopsis_section(&mut made)?;
    man.render_description_section(&mut made)?;
    made.extend_from_slice(description.as_bytes());
    man.render_options_section(&mut made)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut made)?;
    }
    let mut page = marked(&without_repetitions(&String::from_utf8(made)?));
    page.push_str(sections);
    page.push_str(OF_ALL);
    page.push_str(".SH SEE ALSO\n");
    let others = names.iter().filter(|other| **other != name).map(|other| (*other, 1));
    let see_also: Vec<String> = others
        .chain(SEE_ALSO)
        .map(|(name, section)| format!(".BR {} ({section})", name.replace('-', "\\-")))
        .collect();
    page.push_str(&see_also.join(",\n"));
    page.push('\n');
    Ok(page)
}

/// Each section begins with a definition of the apostrophe; one of them is enough.
fn without_repetitions(text: &str) -> String {
    let mut seen = Vec::new();
    let mut kept = String::new();
    for line in text.lines() {
        let defines = line.starts_with(".ie ") || line.starts_with(".el ");
        if defines && seen.contains(&line) {
            continue;
        }
        if defines {
            seen.push(line);
        }
        kept.push_str(line.trim_end());
        kept.push('\n');
    }
    kept
}

/// What stands in backquotes in the help is bold in a page.
fn marked(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').collect();
    let mut marked = String::new();
    for (number, part) in parts.iter().enumerate() {
        match number {
            0 => {}
            number if number % 2 == 1 => marked.push_str("\\fB"),
            _ => marked.push_str("\\fR"),
        }
        marked.push_str(part);
    }
    marked
}
