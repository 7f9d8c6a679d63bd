//! What a check saw a shim do, and the table in which the shims are compared.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::shim::Shim;

/// How something turned out.
#[derive(Debug, Clone, PartialEq, Eq)]
enum How {
    /// It has to be the same, letter by letter.
    Exactly(String),
    /// A refusal. It may say more than another, and be more precise than UNKNOWN.
    Refused { code: String, words: String },
}

impl How {
    /// Whether it will do where Go's shim did the other.
    fn will_do_for(&self, go: &Self) -> bool {
        match (self, go) {
            (Self::Refused { code, words }, Self::Refused { code: go_code, words: go_words }) => {
                let said: Vec<&str> = significant(words).collect();
                (code == go_code || go_code == UNKNOWN || code == UNSAID)
                    && significant(go_words).all(|word| said.contains(&word))
            }
            _ => self == go,
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(text) => write!(formatter, "{text:?}"),
            Self::Refused { code, words } => write!(formatter, "{code} {words:?}"),
        }
    }
}

/// The code of an error of which nothing is known.
const UNKNOWN: &str = "UNKNOWN";

/// The code that a client does not show: `ctr` 2.x says what the shim said and nothing more, and
/// Go's shim has its codes in its words. The codes as such are seen by asking the shim itself.
const UNSAID: &str = "";

/// The codes as containerd's clients write them behind an error.
const CODES: [&str; 6] = [
    "unknown",
    "not found",
    "failed precondition",
    "already exists",
    "invalid argument",
    "not implemented",
];

/// The words of an error that tell something, without the code behind it.
fn significant(text: &str) -> impl Iterator<Item = &str> {
    let text = text.trim();
    let text = CODES.iter().find_map(|code| text.strip_suffix(code)).unwrap_or(text);
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| word.len() > 3)
}

/// What was seen in one check of one shim: named things, in order, and how long it took.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    lines: Vec<(String, How)>,
    time: Option<Duration>,
    words: Option<String>,
}

impl Seen {
    /// Adds a thing that has to be the same with every shim.
    pub fn note(&mut self, what: impl Into<String>, how: impl Into<String>) {
        self.lines.push((what.into(), How::Exactly(how.into())));
    }

    /// Adds a refusal. Ours has to say all that Go's shim says, with the same code; where Go's
    /// shim knows no code, ours may.
    pub fn refused(
        &mut self,
        what: impl Into<String>,
        code: impl Into<String>,
        words: impl Into<String>,
    ) {
        self.lines.push((what.into(), How::Refused { code: code.into(), words: words.into() }));
    }

    /// Adds the error of a `ctr` command, whose code is its end.
    pub fn refused_by_ctr(&mut self, what: impl Into<String>, words: &str) {
        let code = CODES.iter().find(|code| words.trim().ends_with(*code)).unwrap_or(&UNSAID);
        self.refused(what, code.to_uppercase(), words.trim());
    }

    /// Adds a time that the table shows.
    pub fn took(&mut self, time: Duration) {
        self.time = Some(time);
    }

    /// Adds words that the table shows and nobody compares.
    pub fn say(&mut self, words: impl Into<String>) {
        self.words = Some(words.into());
    }

    /// The last thing that was noted, for people who look for what happened next.
    #[must_use]
    pub fn last(&self) -> &str {
        self.lines.last().map_or("nothing", |(what, _)| what.as_str())
    }

    /// The first thing that is different from what Go's shim did and will not do, but for things
    /// of these names.
    #[must_use]
    pub fn difference(&self, go: &Self, but: &[&str]) -> Option<String> {
        for (at, (what, how)) in self.lines.iter().enumerate() {
            match go.lines.get(at) {
                Some((go_what, go_how)) if go_what == what => {
                    if !(how.will_do_for(go_how) || but.contains(&what.as_str())) {
                        return Some(format!("{what}: {how} instead of {go_how}"));
                    }
                }
                Some((go_what, _)) => {
                    return Some(format!("{what} ({how}) where {go_what} should be"));
                }
                None => return Some(format!("{what} ({how}) is too much")),
            }
        }
        let (what, how) = go.lines.get(self.lines.len())?;
        Some(format!("{what} ({how}) is missing"))
    }

    /// How a thing is different from what Go's shim did, if it is.
    #[must_use]
    pub fn difference_in(&self, go: &Self, what: &str) -> Option<String> {
        let find = |seen: &Self| {
            seen.lines.iter().find(|(name, _)| name == what).map(|(_, how)| how.clone())
        };
        let (ours, gos) = (find(self)?, find(go)?);
        (!ours.will_do_for(&gos)).then(|| format!("{what}: {ours} instead of {gos}"))
    }

    fn suffix(&self) -> String {
        let mut text = String::new();
        if let Some(words) = &self.words {
            text.push(' ');
            text.push_str(words);
        }
        if let Some(time) = self.time {
            let _ = write!(text, " {} ms", time.as_millis());
        }
        text
    }
}

/// What the table says of one shim in one check.
#[derive(Debug, Clone)]
pub enum Cell {
    /// As it should be; what differs nevertheless, with the reason why it may.
    Ok(Seen, Vec<String>),
    /// Something is otherwise than with Go's shim.
    Differs(Seen, String),
    /// The check itself failed.
    Failed(String),
}

/// Checks as rows, shims as columns.
#[derive(Debug, Default)]
pub struct Table {
    rows: Mutex<BTreeMap<String, Vec<(Shim, Cell)>>>,
}

impl Table {
    /// Adds a row.
    pub fn add(&self, check: &str, cells: Vec<(Shim, Cell)>) {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.insert(check.to_owned(), cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        if rows.is_empty() {
            return Ok(());
        }
        let mut notes: Vec<String> = Vec::new();
        let mut lines = vec![vec!["check".to_owned()]];
        lines[0].extend(Shim::ALL.map(|shim| shim.title().to_owned()));
        let mut mark = |text: &str| {
            // The same words about both names of a shim are written once.
            let at = notes.iter().position(|note| note == text).unwrap_or_else(|| {
                notes.push(text.to_owned());
                notes.len() - 1
            });
            format!(" [{}]", at + 1)
        };
        for (check, cells) in rows.iter() {
            let mut line = vec![check.clone()];
            for shim in Shim::ALL {
                let cell = cells.iter().find(|(of, _)| *of == shim).map(|(_, cell)| cell);
                line.push(match cell {
                    None => String::new(),
                    Some(Cell::Ok(seen, reasons)) => {
                        let notes: String = reasons.iter().map(|reason| mark(reason)).collect();
                        format!("ok{}{notes}", seen.suffix())
                    }
                    Some(Cell::Differs(seen, how)) => {
                        format!("differs{}{}", seen.suffix(), mark(how))
                    }
                    Some(Cell::Failed(why)) => format!("no{}", mark(why)),
                });
            }
            lines.push(line);
        }
        let widths: Vec<usize> = (0..lines[0].len())
            .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
            .collect();
        writeln!(formatter)?;
        for (number, line) in lines.iter().enumerate() {
            for (cell, width) in line.iter().zip(&widths) {
                write!(formatter, "| {cell:width$} ")?;
            }
            writeln!(formatter, "|")?;
            if number == 0 {
                for width in &widths {
                    write!(formatter, "|{:-<1$}", "", width + 2)?;
                }
                writeln!(formatter, "|")?;
            }
        }
        writeln!(formatter)?;
        for (number, note) in notes.iter().enumerate() {
            writeln!(formatter, "[{}] {}", number + 1, note.replace('\n', " "))?;
        }
        writeln!(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(lines: &[(&str, &str)]) -> Seen {
        let mut seen = Seen::default();
        for (what, how) in lines {
            seen.note(*what, *how);
        }
        seen
    }

    #[test]
    fn names_the_first_difference() {
        let go = seen(&[("exit", "0"), ("output", "x")]);
        assert_eq!(go.difference(&go, &[]), None);
        let other = seen(&[("exit", "1"), ("output", "x")]);
        assert_eq!(other.difference(&go, &[]).unwrap(), r#"exit: "1" instead of "0""#);
        let short = seen(&[("exit", "0")]);
        assert_eq!(short.difference(&go, &[]).unwrap(), r#"output ("x") is missing"#);
        assert_eq!(go.difference(&short, &[]).unwrap(), r#"output ("x") is too much"#);
    }

    #[test]
    fn a_refusal_may_say_more() {
        let refused = |code: &str, words: &str| {
            let mut seen = Seen::default();
            seen.refused("exec", code, words);
            seen
        };
        let go = refused("UNKNOWN", "cannot exec in a paused state: unknown");
        let ours = refused("FAILED_PRECONDITION", "container x: cannot exec in a paused state");
        assert_eq!(ours.difference(&go, &[]), None);
        assert!(go.difference(&ours, &[]).is_some());
        assert!(refused("UNKNOWN", "no").difference(&go, &[]).is_some());
        assert!(seen(&[("exec", "done")]).difference(&go, &[]).is_some());
        let mut ctr = Seen::default();
        ctr.refused_by_ctr("exec", "ctr: cannot exec in a paused state: unknown\n");
        assert_eq!(ctr.difference(&go, &[]), None);
        ctr.lines.clear();
        ctr.refused_by_ctr("exec", "ctr: cannot exec in a paused state");
        assert_eq!(
            ctr.difference(&refused("NOT FOUND", "cannot exec in a paused state"), &[]),
            None
        );
        let other = refused("FAILED_PRECONDITION", "no");
        assert_eq!(other.difference(&go, &["exec"]), None);
        assert!(other.difference_in(&go, "exec").is_some());
    }

    #[test]
    fn reasons_and_differences_are_below_the_table() {
        let table = Table::default();
        let go = Cell::Ok(Seen::default(), Vec::new());
        let differs = Cell::Differs(Seen::default(), "exit: 1".to_owned());
        let ours = Cell::Ok(Seen::default(), vec!["better".to_owned()]);
        table.add("run", vec![(Shim::Go, go), (Shim::Stasis, differs), (Shim::StasisAsV2, ours)]);
        let text = table.to_string();
        assert!(text.contains("| run   | ok | differs [1] | ok [2]       |"), "{text}");
        assert!(text.contains("[1] exit: 1\n[2] better\n"), "{text}");
    }
}
