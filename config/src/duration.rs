//! Durations as people write them, shared by configuration and annotations.

use std::time::Duration;

/// The driver counts a timeout in whole milliseconds and takes 0 for 'none', so anything below
/// one would become a wait for ever.
pub(crate) const SHORTEST: Duration = Duration::from_millis(1);

/// No timeout is longer; also keeps milliseconds within 32 bits.
pub(crate) const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// What a duration must look like.
pub(crate) const FORM: &str = "a duration with a unit, such as \"10s\" or \"2m 30s\"";

/// Parses `10s`, `1m 30s`, `500ms`. The error says only what is wrong, not what was given.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    use humantime::DurationError as E;
    // humantime takes a bare zero; here a number without a unit is always a mistake.
    if !text.is_empty() && text.chars().all(|c| c.is_ascii_digit()) {
        return Err("the unit is missing".to_owned());
    }
    humantime::parse_duration(text).map_err(|e| match e {
        E::Empty => "it is empty".to_owned(),
        E::UnknownUnit { ref unit, .. } if unit.is_empty() => "the unit is missing".to_owned(),
        E::UnknownUnit { ref unit, .. } => format!("unknown unit {}", crate::text::quoted(unit)),
        E::NumberOverflow => "the number is too large or too precise".to_owned(),
        E::NumberExpected(_) | E::InvalidCharacter(_) => {
            "it is not a number with a unit".to_owned()
        }
    })
}

/// A timeout as people write it: at least a millisecond, at most a day. The error says what is wrong.
pub fn timeout(text: &str) -> Result<Duration, String> {
    let time = parse(text).map_err(|reason| format!("{reason}; expected {FORM}"))?;
    if (SHORTEST..=LONGEST).contains(&time) {
        return Ok(time);
    }
    Err(format!("it has to be between {} and {}", show(SHORTEST), show(LONGEST)))
}

/// `10s`, `1m 30s`: how a duration is written in messages.
pub(crate) fn show(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}
