//! Programs in a terminal of their own, as a person has them.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::wait;

/// Longer than anything takes that is shown in one.
const LIMIT: Duration = Duration::from_secs(30);

/// The lines of every such terminal.
const ROWS: u16 = 33;

/// A program in a terminal; it ends with it.
#[derive(Debug)]
pub struct Terminal {
    child: Child,
    input: ChildStdin,
    output: PathBuf,
}

impl Terminal {
    /// Starts a program in a terminal of so many columns; what it shows is kept in this directory.
    pub fn start(command: &Command, columns: u16, directory: &Path) -> Result<Self> {
        let words: Vec<_> = std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| format!("'{}'", word.to_string_lossy().replace('\'', "'\\''")))
            .collect();
        let commands = directory.join("in-a-terminal");
        let text = format!("stty rows {ROWS} cols {columns}\nexec {}\n", words.join(" "));
        fs::write(&commands, text)?;
        let output = directory.join("typescript");
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--flush", "--command"]);
        // The user's shell runs this, and not every one is replaced by its last command; one that is
        // not ends at ^C before the program does.
        script.arg(format!("exec sh '{}'", commands.display())).arg("/dev/null");
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => script.env(key, value),
                None => script.env_remove(key),
            };
        }
        script.env("TERM", "xterm").stdin(Stdio::piped()).stdout(File::create(&output)?);
        let mut child = script.stderr(Stdio::null()).spawn().context("script")?;
        let input = child.stdin.take().context("no pipe")?;
        Ok(Self { child, input, output })
    }

    /// What it has shown so far.
    pub fn text(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(&self.output)?).into_owned())
    }

    /// Waits until it has shown this.
    pub fn expect(&self, word: &str) -> Result<()> {
        let found = wait::until(word, LIMIT, || Ok(self.text()?.contains(word).then_some(())));
        found.with_context(|| self.text().unwrap_or_default())
    }

    /// Types this.
    pub fn say(&mut self, text: &str) -> Result<()> {
        Ok(self.input.write_all(text.as_bytes())?)
    }

    /// Waits for the program's end; gives its status, and all that was shown.
    pub fn end(mut self) -> Result<(ExitStatus, String)> {
        let ended = wait::until("its end", LIMIT, || Ok(self.child.try_wait()?));
        let status = ended.with_context(|| self.text().unwrap_or_default())?;
        Ok((status, self.text()?))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
