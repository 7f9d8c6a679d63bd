//! What bash offers, compared with what the programs know.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::command;

use super::{LIMIT, file, say};

/// What bash offers behind these words, of which the last is begun.
fn offered(name: &str, words: &[&str]) -> Result<BTreeSet<String>> {
    let script = "source \"$1\"; function=$2; shift 2
        COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); $function
        [ ${#COMPREPLY[@]} = 0 ] || printf '%s\\n' \"${COMPREPLY[@]}\"";
    let function = format!("_{}", name.replace('-', "_"));
    let mut bash = Command::new("bash");
    bash.args(["-euc", script, "bash"]).arg(file("contrib/completions/bash").join(name));
    bash.arg(function).args(words);
    Ok(command::succeed(&mut bash, LIMIT)?.lines().map(str::to_owned).collect())
}

fn set(words: &[&str]) -> BTreeSet<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// The first words of a help text's lines between two headings.
fn listed<'a>(help: &'a str, from: &str) -> BTreeSet<&'a str> {
    let lines = help.lines().skip_while(|line| !line.starts_with(from)).skip(1);
    let lines = lines.take_while(|line| !line.trim().is_empty());
    let words = lines.filter(|line| line.starts_with(' ') && !line.starts_with("     "));
    words.filter_map(|line| line.split([' ', ',']).find(|word| !word.is_empty())).collect()
}

pub(super) fn stasis(case: &Case) -> Result<()> {
    let help = say(&case.binary("stasis").to_string_lossy(), &["--help"])?;
    let commands = listed(&help, "Commands:");
    ensure!(commands.contains("check"), "{help}");
    let offered_commands: BTreeSet<_> = offered("stasis", &["stasis", ""])?
        .into_iter()
        .filter(|word| !word.starts_with('-'))
        .collect();
    ensure!(offered_commands.iter().map(String::as_str).eq(commands.iter().copied()), "{help}");
    for shell in ["zsh/_stasis", "fish/stasis.fish", "../man/stasis.1"] {
        let text = std::fs::read_to_string(file("contrib/completions").join(shell))?;
        for command in &commands {
            ensure!(text.contains(command), "{shell} has no {command}");
        }
    }
    ensure!(offered("stasis", &["stasis", "ch"])? == set(&["check"]), "ch");
    let flags = offered("stasis", &["stasis", "check", "--"])?;
    ensure!(flags == set(&["--json", "--help"]), "{flags:?}");
    for flag in &flags {
        ensure!(help.contains(flag.as_str()), "{flag} is not in {help}");
    }
    ensure!(offered("stasis", &["stasis", "check", "--json", ""])?.is_empty(), "behind --json");
    Ok(())
}

/// Beside the real runc, of which `stasis-runc` has the command line.
pub(super) fn stasis_runc(case: &Case) -> Result<()> {
    let program = case.binary("stasis-runc");
    let program = program.to_str().context("a path")?;
    let offer = |words: &[&str]| {
        let words: Vec<_> = [program].iter().chain(words).copied().collect();
        offered("stasis-runc", &words)
    };
    let help = say("runc", &["--help"])?;
    let commands = listed(&help, "COMMANDS:");
    let offered_commands = offer(&[""])?;
    ensure!(
        offered_commands.iter().map(String::as_str).eq(commands.iter().copied()),
        "offered: {offered_commands:?}, runc has {commands:?}"
    );
    for shell in ["zsh/_stasis-runc", "fish/stasis-runc.fish"] {
        let text = std::fs::read_to_string(file("contrib/completions").join(shell))?;
        for command in &commands {
            ensure!(text.contains(command), "{shell} has no {command}");
        }
    }
    let known = |offered: &BTreeSet<String>, help: &str| {
        let unknown: Vec<_> = offered
            .iter()
            .filter(|flag| ![' ', ','].iter().any(|end| help.contains(&format!("{flag}{end}"))))
            .cloned()
            .collect();
        ensure!(
            !offered.is_empty() && unknown.is_empty(),
            "not of runc: {unknown:?} of {offered:?}"
        );
        Ok(())
    };
    let mut globals = offer(&["--"])?;
    ensure!(globals.remove("--help"), "{globals:?}");
    known(&globals, &help)?;
    for command in ["checkpoint", "restore", "create", "run", "delete", "list"] {
        let mut flags = offer(&["--root", "/nowhere", command, "--"])?;
        ensure!(flags.remove("--help"), "{flags:?}");
        known(&flags, &say("runc", &[command, "--help"])?)?;
    }

    // The ids of containers, below the root that is named.
    let id = case.start_counter(&[])?;
    let root = format!("/run/containerd/runc/{}", std::env::var("LAB_ID")?);
    for command in ["checkpoint", "kill", "resume"] {
        let ids = offer(&["--root", &root, command, &id[..id.len() - 1]])?;
        ensure!(ids.contains(&id), "{command}: {ids:?}");
    }
    ensure!(offer(&["checkpoint", &id])?.is_empty(), "an id below another root");
    ensure!(offer(&["--root", &root, "restore", &id])?.is_empty(), "an id that is taken");
    Ok(())
}
