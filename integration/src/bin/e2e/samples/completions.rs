//! What bash offers behind stasis-runc, compared with what runc knows.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use stasis_integration::case::Case;
use stasis_integration::command;

use super::{LIMIT, file, say};

/// What bash offers behind these words, of which the last is begun.
fn offered(words: &[&str]) -> Result<BTreeSet<String>> {
    let script = "source \"$1\"; shift
        COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _stasis_runc
        [ ${#COMPREPLY[@]} = 0 ] || printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["-euc", script, "bash"]).arg(file("contrib/completions/bash/stasis-runc"));
    bash.args(words);
    Ok(command::succeed(&mut bash, LIMIT)?.lines().map(str::to_owned).collect())
}

/// The first words of a help text's lines between two headings.
fn listed<'a>(help: &'a str, from: &str) -> BTreeSet<&'a str> {
    let lines = help.lines().skip_while(|line| !line.starts_with(from)).skip(1);
    let lines = lines.take_while(|line| !line.trim().is_empty());
    let words = lines.filter(|line| line.starts_with(' ') && !line.starts_with("     "));
    words.filter_map(|line| line.split([' ', ',']).find(|word| !word.is_empty())).collect()
}

/// Beside the real runc, of which `stasis-runc` has the command line.
pub(super) fn stasis_runc(case: &Case) -> Result<()> {
    let program = case.binary("stasis-runc");
    let program = program.to_str().context("a path")?;
    let offer = |words: &[&str]| {
        let words: Vec<_> = [program].iter().chain(words).copied().collect();
        offered(&words)
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
