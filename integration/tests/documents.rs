//! Man pages and completions, those that are generated too: that they are well-formed, and have all that
//! they are about. What the completions of stasis-runc offer is tested end to end, beside the runtime of
//! which it has the command line.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use stasis_integration::manual;
use tempfile::TempDir;

/// What is made of the command line of stasis.
static GENERATED: LazyLock<TempDir> = LazyLock::new(|| {
    let directory = TempDir::new().unwrap();
    manual::make(directory.path()).unwrap();
    directory
});

fn files(directory: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.collect();
    assert!(!files.is_empty(), "{}", directory.display());
    files
}

/// Those by hand and those that are generated.
fn all(by_hand: &str, generated: &str) -> Vec<PathBuf> {
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib");
    [files(&contrib.join(by_hand)), files(&GENERATED.path().join(generated))].concat()
}

/// What stasis can be asked, by its pages.
fn commands() -> BTreeSet<String> {
    let pages = files(&GENERATED.path().join("man"));
    let names = pages.iter().map(|page| page.file_name().unwrap().to_str().unwrap());
    let command = |name: &str| Some(name.strip_prefix("stasis-")?.strip_suffix(".1")?.to_owned());
    names.filter_map(command).collect()
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
    for page in all("man", "man") {
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
        for file in all(&format!("completions/{shell}"), shell) {
            check(Command::new(shell).arg("-n"), &file);
        }
    }
}

/// What bash offers behind these words, of which the last is begun.
fn offered(words: &[&str]) -> BTreeSet<String> {
    let script = "source \"$1\"; shift; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1))
        _stasis \"$1\" \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"
        [ ${#COMPREPLY[@]} = 0 ] || printf '%s\\n' \"${COMPREPLY[@]}\"";
    let mut bash = Command::new("bash");
    bash.args(["-c", script, "bash"]).arg(GENERATED.path().join("bash/stasis")).arg("stasis");
    let output = bash.args(words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn completions_offer_what_there_is() {
    let set = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let mut commands = commands();
    assert!(commands.contains("suspend"), "{commands:?}");
    assert_eq!(offered(&["su"]), set(&["suspend"]));
    assert_eq!(offered(&["check", "--"]), set(&["--json", "--help"]));
    // A file, which bash adds by itself.
    assert_eq!(offered(&["inspect", "c1.tar"]), set(&[]));
    for shell in ["zsh/_stasis", "fish/stasis.fish"] {
        let text = fs::read_to_string(GENERATED.path().join(shell)).unwrap();
        for command in &commands {
            assert!(text.contains(command), "{shell} has no {command}");
        }
    }
    commands.insert("help".to_owned());
    let first = offered(&[""]).into_iter().filter(|word| !word.starts_with('-'));
    assert_eq!(first.collect::<BTreeSet<_>>(), commands);
}

/// What `--help` does not say stands in the pages all the same.
#[test]
fn pages_have_what_the_help_lacks() {
    for page in files(&GENERATED.path().join("man")) {
        let text = fs::read_to_string(&page).unwrap();
        for heading in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"] {
            assert!(text.contains(&format!("\n.SH {heading}\n")), "{}: {heading}", page.display());
        }
        assert!(!text.contains('`'), "{}", page.display());
    }
    let inspect = fs::read_to_string(GENERATED.path().join("man/stasis-inspect.1")).unwrap();
    for word in ["can_restore", "podman container checkpoint", ".SH JSON"] {
        assert!(inspect.contains(word), "{word}");
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
