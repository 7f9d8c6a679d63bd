//! `ConfigBody`: the table `options` of a runtime in containerd's config.toml, as TOML.
//!
//! It holds runc's options, named as containerd documents them for its own shim, and beside them
//! tables of Stasis' configuration.

use std::ops::Range;
use std::path::Path;

use containerd_shim::api::Options as RuncOptions;
use stasis_config::text::printable;
use stasis_config::{Config, ConfigError};
use toml::de::{DeTable, DeValue};

use super::{ConfigSource, Given, OptionsError};

/// What errors call the body.
const ORIGIN: &str = "runtime-options";

/// Names in containerd's config.toml, for messages; their case does not matter to containerd.
const NAMES: &[&str] = &[
    "NoPivotRoot",
    "NoNewKeyring",
    "ShimCgroup",
    "IoUid",
    "IoGid",
    "BinaryName",
    "Root",
    "SystemdCgroup",
    "CriuImagePath",
    "CriuWorkPath",
];

pub(super) fn parse(body: &[u8]) -> Result<Given, OptionsError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let before = String::from_utf8_lossy(&body[..error.valid_up_to()]);
        invalid(&before, before.len(), None, "it is not UTF-8")
    })?;
    let Ok(table) = DeTable::parse(text) else {
        // Says what is wrong with it.
        Config::parse(text, Path::new(ORIGIN))?;
        return Ok(Given::default());
    };

    let mut given = Given::default();
    let mut taken = Taken::default();
    let mut tables = false;
    for (key, value) in table.get_ref() {
        let name = key.get_ref().as_ref();
        let at = |at: usize, reason: &str| invalid(text, at, Some(name), reason);
        match set(&mut given, &mut taken.config_path, name, value.get_ref()) {
            Ok(true) => {
                taken
                    .note(name, key.span(), value.span())
                    .map_err(|reason| at(key.span().start, reason))?;
            }
            Ok(false) if value.get_ref().is_table() => tables = true,
            Ok(false) => {
                let names = NAMES.join("`, `");
                let reason =
                    format!("unknown option, expected one of `{names}` or a table of Stasis");
                return Err(at(key.span().start, &reason).into());
            }
            Err(expected) => {
                let found = value.get_ref().type_str();
                let reason = format!("expected {expected}, found {found}");
                return Err(at(value.span().start, &reason).into());
            }
        }
    }
    given
        .check()
        .map_err(|bad| invalid(text, taken.value_of(bad.option), Some(bad.option), &bad.reason))?;

    if !taken.config_path.is_empty() {
        if tables {
            let at = taken.value_of("ConfigPath");
            let reason = "not together with tables of Stasis' configuration, which it would name";
            return Err(invalid(text, at, Some("ConfigPath"), reason).into());
        }
        given.config = Given::from_file(&taken.config_path)?.config;
    } else if tables {
        let rest = taken.blank(text);
        let config = Config::parse(&rest, Path::new(ORIGIN))?;
        given.config = Some((ConfigSource::Text(rest), config));
    }
    Ok(given)
}

/// Takes one of runc's options. `Ok(false)`: there is none of this name. The error: what is
/// expected.
fn set(
    given: &mut Given,
    config_path: &mut String,
    name: &str,
    value: &DeValue<'_>,
) -> Result<bool, &'static str> {
    let RuncOptions {
        no_pivot_root,
        no_new_keyring,
        shim_cgroup,
        io_uid,
        io_gid,
        binary_name,
        root,
        criu_image_path,
        criu_work_path,
        ..
    } = &mut given.runc;
    match name.to_ascii_lowercase().as_str() {
        "nopivotroot" => *no_pivot_root = flag(value)?,
        "nonewkeyring" => *no_new_keyring = flag(value)?,
        "shimcgroup" => *shim_cgroup = string(value)?,
        "iouid" => *io_uid = number(value)?,
        "iogid" => *io_gid = number(value)?,
        "binaryname" => *binary_name = string(value)?,
        "root" => *root = string(value)?,
        "systemdcgroup" => given.systemd_cgroup = Some(flag(value)?),
        "criuimagepath" => *criu_image_path = string(value)?,
        "criuworkpath" => *criu_work_path = string(value)?,
        // containerd has read it already, unless it is written in another case.
        "configpath" => *config_path = string(value)?,
        // Known and without effect: runc has not taken a path of CRIU since 1.1, and the rest is
        // for other kinds of shims.
        "criupath" | "taskapiaddress" | "typeurl" => drop(string(value)?),
        "taskapiversion" => drop(number(value)?),
        _ => return Ok(false),
    }
    Ok(true)
}

fn flag(value: &DeValue<'_>) -> Result<bool, &'static str> {
    value.as_bool().ok_or("true or false")
}

fn string(value: &DeValue<'_>) -> Result<String, &'static str> {
    value.as_str().map(str::to_owned).ok_or("a string")
}

fn number(value: &DeValue<'_>) -> Result<u32, &'static str> {
    let number = value.as_integer();
    number
        .and_then(|number| u32::from_str_radix(number.as_str(), number.radix()).ok())
        .ok_or("a number from 0 to 4294967295")
}

/// Which parts of the text are runc's options.
#[derive(Debug, Default)]
struct Taken {
    /// Name in lower case, key and value.
    parts: Vec<(String, Range<usize>, Range<usize>)>,
    config_path: String,
}

impl Taken {
    fn note(
        &mut self,
        name: &str,
        key: Range<usize>,
        value: Range<usize>,
    ) -> Result<(), &'static str> {
        let name = name.to_ascii_lowercase();
        if self.parts.iter().any(|(taken, _, _)| *taken == name) {
            return Err("the same option twice");
        }
        self.parts.push((name, key, value));
        Ok(())
    }

    fn value_of(&self, option: &str) -> usize {
        let option = option.to_ascii_lowercase();
        let part = self.parts.iter().find(|(name, _, _)| *name == option);
        part.map_or(0, |(_, _, value)| value.start)
    }

    /// The text with spaces instead of them: what is left is a configuration of Stasis, and its
    /// places are the same.
    fn blank(&self, text: &str) -> String {
        let blanked = |at: usize| {
            self.parts.iter().any(|(_, key, value)| {
                // From the line's start, should the key's span not cover its quotes.
                let line = text[..key.start].rfind('\n').map_or(0, |newline| newline + 1);
                (line..value.end).contains(&at)
            })
        };
        let chars = text.char_indices();
        chars.map(|(at, c)| if c != '\n' && blanked(at) { ' ' } else { c }).collect()
    }
}

fn invalid(text: &str, at: usize, key: Option<&str>, reason: &str) -> ConfigError {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    ConfigError::Invalid {
        path: ORIGIN.into(),
        line: before.matches('\n').count() + 1,
        column: before[line_start..].chars().count() + 1,
        key: key.map(|key| printable(key, 64)),
        reason: printable(reason, 1024),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_that_messages_offer_are_known() {
        for name in NAMES {
            let known = ["true", "1", "'/x'"]
                .iter()
                .any(|value| parse(format!("{name} = {value}").as_bytes()).is_ok());
            assert!(known, "{name}");
        }
    }

    #[test]
    fn what_is_left_of_a_body_keeps_its_places() {
        let text = "\"Root\" = '''\n/ö'''   # kept\nIoUid = 0x10\r\ncuda.lock-timeout = '1s'\n";
        let Some((ConfigSource::Text(rest), _)) = parse(text.as_bytes()).unwrap().config else {
            panic!("no configuration");
        };
        assert_eq!(rest.lines().count(), text.lines().count());
        let places = |text: &str| text.lines().nth(3).map(str::to_owned);
        assert_eq!(places(&rest), places(text));
        assert!(!rest.contains("Root") && !rest.contains('ö') && rest.contains("# kept"));
    }
}
