//! YAML as far as CDI specifications use it, as JSON.
//!
//! The parser gives events; what is made of them is bounded here. What lets a small text mean a
//! large one (anchors and aliases) and what no tool writes into such a file (tags, several
//! documents, keys that are no text) is refused.

use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Number, Value};

/// Lists and maps in each other. A specification has five of them.
const MAX_DEPTH: usize = 16;

/// Parses one document. The error says where and what.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    // A byte order mark is no part of the text.
    let mut parser = Parser::new_from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
    let mut open: Vec<Open> = Vec::new();
    let mut document = None;
    while let Some(event) = parser.next_event() {
        let (event, span) = event.map_err(|error| error.to_string())?;
        if matches!(event, Event::SequenceStart(..) | Event::MappingStart(..))
            && open.len() == MAX_DEPTH
        {
            return Err(at(&span, &format!("nested more than {MAX_DEPTH} deep")));
        }
        let done = match event {
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd => continue,
            Event::Alias(_) => return Err(at(&span, "aliases are not supported")),
            Event::Scalar(_, _, anchor, _)
            | Event::SequenceStart(anchor, _)
            | Event::MappingStart(anchor, _)
                if anchor != 0 =>
            {
                return Err(at(&span, "anchors are not supported"));
            }
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                return Err(at(&span, "tags are not supported"));
            }
            Event::Scalar(text, style, ..) => {
                if let Some(Open::Map { key: key @ None, .. }) = open.last_mut() {
                    *key = Some(text.into_owned());
                    continue;
                }
                scalar(&text, style)
            }
            Event::SequenceStart(..) => {
                no_key(open.last(), &span)?;
                open.push(Open::List(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                no_key(open.last(), &span)?;
                open.push(Open::Map { map: Map::new(), key: None });
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(Open::List(list)) => Value::Array(list),
                Some(Open::Map { map, .. }) => Value::Object(map),
                None => return Err(at(&span, "an end without a beginning")),
            },
        };
        match open.last_mut() {
            None if document.is_some() => return Err(at(&span, "more than one document")),
            None => document = Some(done),
            Some(Open::List(list)) => list.push(done),
            Some(Open::Map { map, key }) => {
                let key = key.take().unwrap_or_default();
                if map.insert(key, done).is_some() {
                    return Err(at(&span, "a key stands there twice"));
                }
            }
        }
    }
    document.ok_or_else(|| "it is empty".to_owned())
}

/// A list or map whose end has not come yet.
enum Open {
    List(Vec<Value>),
    Map { map: Map<String, Value>, key: Option<String> },
}

fn no_key(open: Option<&Open>, span: &Span) -> Result<(), String> {
    match open {
        Some(Open::Map { key: None, .. }) => Err(at(span, "a key that is not text")),
        _ => Ok(()),
    }
}

fn at(span: &Span, what: &str) -> String {
    format!("line {} column {}: {what}", span.start.line(), span.start.col() + 1)
}

/// As Go's YAML library reads it, with which those who write specifications try them: a number
/// that begins with 0 is octal.
fn scalar(text: &str, style: ScalarStyle) -> Value {
    if style != ScalarStyle::Plain {
        return Value::String(text.to_owned());
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return Value::Bool(true),
        "false" | "False" | "FALSE" => return Value::Bool(false),
        _ => {}
    }
    let (negative, digits) = match text.as_bytes() {
        [b'-', ..] => (true, &text[1..]),
        [b'+', ..] => (false, &text[1..]),
        _ => (false, text),
    };
    let (radix, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', b'o' | b'O', ..] => (8, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    // The sign was taken off; a second one is no number.
    let number =
        i64::from_str_radix(digits, radix).ok().filter(|_| !digits.starts_with(['+', '-']));
    number.map_or_else(
        || Value::String(text.to_owned()),
        |number| Value::Number(Number::from(if negative { -number } else { number })),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn it_reads_what_nvidia_ctk_writes() {
        let text = "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: \"0\"\n  \
                    containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n      major: 195\n\
                    containerEdits:\n  hooks:\n  - hookName: createContainer\n    args:\n    - \
                    nvidia-cdi-hook\n    - --link\n    - a::b\n    env:\n    - X=false\n";
        let want = json!({
            "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
            "devices": [{"name": "0", "containerEdits":
                {"deviceNodes": [{"path": "/dev/nvidia0", "major": 195}]}}],
            "containerEdits": {"hooks": [{"hookName": "createContainer",
                "args": ["nvidia-cdi-hook", "--link", "a::b"], "env": ["X=false"]}]},
        });
        assert_eq!(parse(text).unwrap(), want);
        // JSON is YAML, too.
        assert_eq!(parse(&want.to_string()).unwrap(), want);
    }

    #[test]
    fn scalars_are_what_go_makes_of_them() {
        let text =
            "[438, 0666, 0o666, 0x1F, -3, '1', \"2\", ~, null, True, no, 1.5, --1, 0.5.0, 09]";
        let want = json!([
            438, 438, 438, 31, -3, "1", "2", null, null, true, "no", "1.5", "--1", "0.5.0", "09"
        ]);
        assert_eq!(parse(text).unwrap(), want);
        assert_eq!(parse("a:\nb: |\n  x\n  y\n").unwrap(), json!({"a": null, "b": "x\ny\n"}));
        let most = "9223372036854775808";
        assert_eq!(parse(most).unwrap(), json!(most));
    }

    #[test]
    fn what_grows_or_confuses_is_refused() {
        let laughs = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n";
        for (text, says) in [
            (laughs, "line 1 column 4: anchors are not supported"),
            ("a: *x\n", "unknown anchor"),
            ("a: !!binary aGk=\n", "tags are not supported"),
            ("!x [a]\n", "tags are not supported"),
            ("a: 1\n---\nb: 2\n", "more than one document"),
            ("a: 1\na: 2\n", "a key stands there twice"),
            ("? [a]\n: b\n", "a key that is not text"),
            ("", "it is empty"),
            ("a: [1\n", "line 2"),
            ("a: 'x\n", "line"),
            ("\u{0}", "line 1"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }

    #[test]
    fn depth_is_bounded_before_it_costs() {
        for text in ["[".repeat(1 << 20), "- ".repeat(1 << 20), "{a: ".repeat(1 << 18)] {
            let begun = std::time::Instant::now();
            let error = parse(&text).unwrap_err();
            // Or the parser's own limit, whichever comes first.
            let says = ["nested more than 16 deep", "recursion limit exceeded"];
            assert!(says.iter().any(|says| error.contains(says)), "{error}");
            assert!(begun.elapsed() < std::time::Duration::from_secs(2));
        }
    }

    #[test]
    fn nothing_makes_it_panic() {
        let text = "---\nkind: a/b\ndevices:\n- name: \"0\"\n  edits: {x: [1, 2], y: 'z'}\n# c\n";
        for end in 0..text.len() {
            let _ = parse(&text[..end]);
            for byte in ["\0", "\t", "'", "&", "*", "-", ":", "{", "]", "%", "\u{2028}"] {
                let _ = parse(&format!("{}{byte}{}", &text[..end], &text[end..]));
            }
        }
    }
}
