//! Where our log goes: the FIFO `log` in the bundle, which containerd reads and copies into its
//! own log.
//!
//! Logging must never hold up or end a container. A FIFO that is missing means no log. One that
//! nobody reads keeps what fits into it, which containerd gets when it is back; the rest is lost.

mod text;

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use text::Text;

/// The name of the FIFO in the bundle.
pub const FILE: &str = "log";

/// What one write into a FIFO may have to be whole (`PIPE_BUF`): the lines of several processes
/// arrive there, and parts of a line are not written.
const LINE: usize = 4096;

/// Sends this process's log events of `level` and above to a FIFO, and its panics with them.
///
/// Only the first call in a process has an effect on events.
pub fn to_fifo(path: &Path, level: Level) {
    // Without it there is no subscriber, so that events cost nothing.
    if let Ok(fifo) = Fifo::open(path) {
        // Fails if there is one already.
        let _ = subscriber(fifo, level).try_init();
    }
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let payload = panic.payload();
        let words = payload.downcast_ref::<&str>().copied();
        let words = words.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let words = words.unwrap_or("no message");
        // Not to standard error: that may be somebody's answer, or nothing.
        tracing::error!(place, "panic: {words}");
    }));
}

/// [`to_fifo`] with a level by its name, for the engine's process. An unknown name is `warn`.
pub fn engine(path: &Path, level: &OsStr) {
    let level = level.to_str().and_then(|name| name.parse().ok());
    to_fifo(path, level.unwrap_or(Level::WARN));
}

fn subscriber(fifo: Fifo, level: Level) -> impl Subscriber + Send + Sync {
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        // Its own complaints would go to standard error.
        .log_internal_errors(false)
        .event_format(Text)
        .fmt_fields(Text)
        .with_writer(move || fifo.clone());
    let wanted = filter_fn(move |metadata| {
        // Libraries speak of their own matters.
        let level = if is_ours(metadata) { level } else { level.min(Level::WARN) };
        *metadata.level() <= level
    });
    let wanted = wanted.with_max_level_hint(LevelFilter::from_level(level));
    tracing_subscriber::registry().with(layer.with_filter(wanted))
}

/// By the target, and not by where the event comes from: for records of the crate `log` that is
/// decided before they become events.
fn is_ours(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("stasis")
}

/// The FIFO. Writing to it never blocks and never fails.
#[derive(Debug, Clone)]
struct Fifo(Arc<File>);

impl Fifo {
    fn open(path: &Path) -> io::Result<Self> {
        // Also for reading, although we never read: opening does not fail while containerd is
        // away, writing then gives no EPIPE, and what was written waits for it.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(O_NONBLOCK | O_NOFOLLOW)
            .open(path)?;
        if !file.metadata()?.file_type().is_fifo() {
            // A plain file would grow for ever.
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self(Arc::new(file)))
    }
}

impl Write for Fifo {
    /// Takes one line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Full: nobody reads, and the line is lost.
        let _ = match line.get(..LINE) {
            Some(beginning) => {
                let mut short = beginning.to_vec();
                short.truncate(LINE - "...\n".len());
                short.extend_from_slice(b"...\n");
                self.0.as_ref().write(&short)
            }
            None => self.0.as_ref().write(line),
        };
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::time::{Duration, Instant};

    use nix::sys::stat::Mode;

    use super::*;

    struct Reader {
        directory: tempfile::TempDir,
    }

    impl Reader {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            nix::unistd::mkfifo(&directory.path().join(FILE), Mode::S_IRWXU).unwrap();
            Self { directory }
        }

        fn fifo(&self) -> Fifo {
            Fifo::open(&self.directory.path().join(FILE)).unwrap()
        }

        /// As containerd opens it.
        fn file(&self) -> File {
            let mut options = OpenOptions::new();
            options.read(true).write(true).custom_flags(O_NONBLOCK);
            options.open(self.directory.path().join(FILE)).unwrap()
        }

        fn all(mut file: &File) -> String {
            let mut text = Vec::new();
            let _ = file.read_to_end(&mut text);
            String::from_utf8(text).unwrap()
        }
    }

    fn logged(level: Level, work: impl FnOnce()) -> String {
        let reader = Reader::new();
        let file = reader.file();
        tracing::subscriber::with_default(subscriber(reader.fifo(), level), work);
        Reader::all(&file)
    }

    #[test]
    fn events_are_lines_of_containerds_form_with_the_fields_of_their_spans() {
        let text = logged(Level::INFO, || {
            let outer = tracing::info_span!("checkpoint", container = "c 1");
            let _outer = outer.enter();
            let _inner = tracing::info_span!("dump", phase = "lock").entered();
            tracing::warn!(pid = 7, error = %"it is \"so\"\n", "cannot\u{1b} do");
            tracing::debug!("not this");
        });
        let (time, rest) = text.split_once(" level=").unwrap();
        assert!(time.starts_with("time=\"20") && time.ends_with("Z\""), "{time}");
        assert_eq!(
            rest,
            "warning msg=\"cannot\\u{1b} do\" shim=stasis span=checkpoint:dump container=\"c 1\" \
             phase=lock pid=7 error=\"it is \\\"so\\\"\\n\"\n"
        );
    }

    #[test]
    fn fields_that_a_span_gets_later_are_there() {
        let text = logged(Level::INFO, || {
            let span = tracing::info_span!("create", pid = tracing::field::Empty, none = "");
            span.record("pid", 12);
            span.in_scope(|| tracing::info!("x"));
        });
        assert!(
            text.ends_with("level=info msg=x shim=stasis span=create none= pid=12\n"),
            "{text}"
        );
    }

    #[test]
    fn a_fifo_that_nobody_reads_keeps_what_fits_and_never_blocks() {
        let reader = Reader::new();
        let mut fifo = reader.fifo();
        let begun = Instant::now();
        for number in 0..100_000 {
            fifo.write_all(format!("line {number}\n").as_bytes()).unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(30));
        let file = reader.file();
        let text = Reader::all(&file);
        assert!(text.starts_with("line 0\nline 1\n") && text.ends_with('\n'));
        // And it goes on when somebody does.
        fifo.write_all(b"again\n").unwrap();
        assert_eq!(Reader::all(&file), "again\n");
    }

    #[test]
    fn a_reader_that_goes_away_and_comes_back_does_no_harm() {
        let reader = Reader::new();
        let mut fifo = reader.fifo();
        let first = reader.file();
        fifo.write_all(b"one\n").unwrap();
        assert_eq!(Reader::all(&first), "one\n");
        drop(first);
        fifo.write_all(b"two\n").unwrap();
        let second = reader.file();
        fifo.write_all(b"three\n").unwrap();
        assert_eq!(Reader::all(&second), "two\nthree\n");
    }

    #[test]
    fn long_lines_are_cut() {
        let text = logged(Level::INFO, || tracing::info!("{}", "x".repeat(10_000)));
        assert_eq!(text.len(), LINE);
        assert!(text.ends_with("xx...\n"));
    }

    #[test]
    fn libraries_are_heard_from_warnings_on() {
        let text = logged(Level::DEBUG, || {
            tracing::debug!(target: "ttrpc::server", "chatter");
            tracing::warn!(target: "ttrpc::server", "trouble");
            tracing::debug!("step");
        });
        assert_eq!(text.lines().count(), 2, "{text}");
        let quiet = || tracing::warn!(target: "ttrpc::server", "trouble");
        assert_eq!(logged(Level::ERROR, quiet), "");
    }

    /// The only test that makes a log for the whole process, and so not of all its own events.
    #[test]
    fn a_panic_is_an_error_in_the_log() {
        let reader = Reader::new();
        let file = reader.file();
        let usual = std::panic::take_hook();
        engine(&reader.directory.path().join(FILE), OsStr::new("error"));
        let panicked = std::thread::spawn(|| panic!("no {}", "luck")).join();
        std::panic::set_hook(usual);
        assert!(panicked.is_err());
        let text = Reader::all(&file);
        let line = text.lines().find(|line| line.contains("no luck")).unwrap();
        assert!(line.contains("level=error msg=\"panic: no luck\""), "{line}");
        assert!(line.contains("place=shim/src/log/mod.rs:"), "{line}");
        engine(Path::new("/none"), OsStr::new("what"));
    }

    #[test]
    fn only_a_fifo_is_written_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        assert!(Fifo::open(&path).is_err());
        std::fs::write(&path, "").unwrap();
        assert!(Fifo::open(&path).is_err());
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(Fifo::open(&path).is_err());
    }
}
