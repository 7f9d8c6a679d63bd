//! The form of a line: that of containerd's log, since that is where it appears.
//!
//! `time="…" level=warning msg="…" key=value`. Values are quoted where they hold more than letters
//! and a few marks. tracing's own form would be shorter, but whoever looks for a container in
//! containerd's log, or lets a tool read it, has one form for all lines.

use std::fmt::{self, Write as _};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, Scope};

/// The form.
#[derive(Debug, Clone, Copy)]
pub(super) struct Text;

impl<S, N> FormatEvent<S, N> for Text
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        line.write_str("time=\"")?;
        SystemTime.format_time(&mut line)?;
        write!(line, "\" level={}", level(*event.metadata().level()))?;

        let mut message = Message::default();
        event.record(&mut message);
        pair(&mut line, "msg", &message.0)?;
        // containerd's log has the lines of everybody.
        line.write_str(" shim=stasis")?;

        let spans = || context.event_scope().into_iter().flat_map(Scope::from_root);
        let names = spans().map(|span| span.name()).collect::<Vec<_>>().join(":");
        if !names.is_empty() {
            pair(&mut line, "span", &names)?;
        }
        for span in spans() {
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                line.write_str(fields)?;
            }
        }
        context.format_fields(line.by_ref(), event)?;
        line.write_char('\n')
    }
}

impl<'writer> FormatFields<'writer> for Text {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut pairs = Pairs { writer, result: Ok(()) };
        fields.record(&mut pairs);
        pairs.result
    }

    fn add_fields(
        &self,
        current: &'writer mut FormattedFields<Self>,
        fields: &tracing::span::Record<'_>,
    ) -> fmt::Result {
        // The given one puts a space between, and each of our pairs begins with one.
        self.format_fields(current.as_writer(), fields)
    }
}

/// The names that containerd's log has.
fn level(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

fn pair(writer: &mut Writer<'_>, key: &str, value: &str) -> fmt::Result {
    if value.chars().all(|c| c.is_ascii_alphanumeric() || "-._/@^+:".contains(c)) {
        write!(writer, " {key}={value}")
    } else {
        // Also escapes what would forge a line or move a cursor.
        write!(writer, " {key}={value:?}")
    }
}

/// Only what an event says.
#[derive(Debug, Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            // Writing to a string does not fail.
            let _ = write!(self.0, "{value:?}");
        }
    }
}

/// All else of an event or a span, as ` key=value`.
struct Pairs<'writer> {
    writer: Writer<'writer>,
    result: fmt::Result,
}

impl Visit for Pairs<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        // Of a record of the crate `log`, its target says enough.
        let left_out = ["message", "log.module_path", "log.file", "log.line"];
        if !left_out.contains(&field.name()) && self.result.is_ok() {
            self.result = pair(&mut self.writer, field.name(), value);
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.record_str(field, &value.to_string());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}
