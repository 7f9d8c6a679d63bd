//! Man pages and completions: that they are well-formed, and that the page of the configuration has
//! all of it. What completions offer is tested end to end, beside the runtime that they are for.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

fn contrib(directory: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib").join(directory);
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.collect();
    assert!(!files.is_empty());
    files
}

/// Runs a checker on a file. One that is not installed has nothing to say.
fn check(command: &mut Command, file: &Path) {
    let output = match command.arg(file).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => return,
        output => output.unwrap(),
    };
    let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.is_empty(), "{command:?}: {said}");
}

#[test]
fn man_pages_are_well_formed() {
    for page in contrib("man") {
        check(Command::new("mandoc").args(["-T", "lint", "-W", "warning"]), &page);
        // Formats, and says only what is wrong.
        let script = "man --warnings --encoding=UTF-8 --local-file \"$1\" >/dev/null";
        let mut man = Command::new("sh");
        man.env("LC_ALL", "C.UTF-8").args([
            "-c",
            &format!("! command -v man >/dev/null || {script}"),
            "sh",
        ]);
        check(&mut man, &page);
    }
}

#[test]
fn completions_are_well_formed() {
    for shell in ["bash", "zsh", "fish"] {
        for file in contrib(&format!("completions/{shell}")) {
            check(Command::new(shell).arg("-n"), &file);
        }
    }
}

/// Keys, with their sections, and values of the sample, where it has one.
fn sample() -> BTreeMap<String, Option<String>> {
    let mut keys = BTreeMap::new();
    let mut section = String::new();
    for line in include_str!("../../config/config.toml").lines() {
        if line.starts_with('[') {
            line.clone_into(&mut section);
            continue;
        }
        let (commented, line) = match line.strip_prefix("# ") {
            Some(rest) => (true, rest),
            None => (false, line),
        };
        let Some((key, value)) = line.split_once(" = ") else { continue };
        if !key.contains(' ') {
            // The value of a key that is commented out is an example.
            let value = (!commented).then(|| value.to_owned());
            keys.insert(format!("{section} {key}"), value);
        }
    }
    keys
}

/// What a man page says of each key, without the marks of its form.
fn page() -> BTreeMap<String, String> {
    let mut keys: BTreeMap<String, String> = BTreeMap::new();
    let (mut section, mut key, mut tagged) = (String::new(), None, false);
    for line in include_str!("../../contrib/man/stasis-config.toml.5").lines() {
        let line = line.replace("\\(dq", "\"").replace("\\-", "-");
        if let Some(name) = line.strip_prefix(".SS ") {
            (section, key) = (name.to_owned(), None);
        } else if line.starts_with(".SH ") {
            (section, key) = (String::new(), None);
        } else if line == ".TP" {
            tagged = true;
        } else if tagged && !section.is_empty() {
            tagged = false;
            let name = line.strip_prefix(".B ").expect("a key in bold");
            key = Some(format!("{section} {name}"));
            keys.entry(format!("{section} {name}")).or_default();
        } else if let Some(key) = &key {
            let said = keys.get_mut(key).expect("just inserted");
            said.push_str(&line);
            said.push('\n');
        }
    }
    keys
}

#[test]
fn the_page_of_the_configuration_has_every_key_and_default() {
    let (sample, page) = (sample(), page());
    assert!(sample.len() > 15, "{sample:?}");
    let missing: Vec<_> = sample.keys().filter(|key| !page.contains_key(*key)).collect();
    assert!(missing.is_empty(), "the page has no {missing:?}");
    for (key, value) in &sample {
        let Some(value) = value else { continue };
        for word in value.trim_matches(['[', ']']).split(", ") {
            assert!(page[key].contains(word), "{key}: the page does not say {word}");
        }
    }
}
