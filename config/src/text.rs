//! Text from outside in messages: escaped and cut.
//!
//! Annotations, manifests and names of processes are written by others. In a log or a terminal
//! they must not move the cursor, forge a line or fill the disk.

/// `text` with everything escaped that is not printable, cut after `max` characters of the
/// original.
///
/// What is cut is marked by `…`. Text that needs neither is returned as it is.
#[must_use]
pub fn printable(text: &str, max: usize) -> String {
    let mut out = String::with_capacity(text.len().min(max));
    for (count, c) in text.chars().enumerate() {
        if count == max {
            out.push('…');
            break;
        }
        match c {
            '\'' | '"' | '\\' => out.push(c),
            // Also escapes the marks that change the direction of text.
            c => out.extend(c.escape_debug()),
        }
    }
    out
}

/// The length at which messages cut a value from outside.
pub(crate) const CUT: usize = 64;

/// [`printable`] in backquotes, for a value in the middle of a sentence.
pub(crate) fn quoted(text: &str) -> String {
    format!("`{}`", printable(text, CUT))
}

/// Lists names the way a sentence does: `a, b or c`.
pub(crate) fn one_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<_> = names.into_iter().collect();
    match names.as_slice() {
        [] => "nothing".to_owned(),
        [one] => (*one).to_owned(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_stays_as_it_is() {
        let text = "python3 -c 'print(\"ü\")' \\";
        assert_eq!(printable(text, 100), text);
    }

    #[test]
    fn control_characters_and_direction_marks_are_escaped() {
        assert_eq!(printable("a\n\u{1b}[31mb\u{202e}c\0", 100), "a\\n\\u{1b}[31mb\\u{202e}c\\0");
    }

    #[test]
    fn long_text_is_cut() {
        assert_eq!(printable("abcdef", 3), "abc…");
        assert_eq!(printable("abc", 3), "abc");
        assert_eq!(printable(&"é".repeat(1 << 20), 2), "éé…");
    }

    #[test]
    fn lists_read_like_a_sentence() {
        assert_eq!(one_of(["a"]), "a");
        assert_eq!(one_of(["a", "b", "c"]), "a, b or c");
    }
}
