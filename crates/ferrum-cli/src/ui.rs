//! Messages on stderr, data on stdout; the global flags set verbosity and colours.

use crate::failure::Outcome;
use clap::ColorChoice;
use clap::builder::styling::AnsiColor;
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, OnceLock, PoisonError};

/// How much is said on stderr.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verbosity {
    /// Errors only.
    Quiet,
    #[default]
    Normal,
    /// Details as well.
    Verbose,
}

/// The settings of the global flags, stored once when the program starts.
struct Settings {
    verbosity: Verbosity,
    stderr_color: bool,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Stores what the global flags say. Further calls change nothing.
pub(crate) fn init(verbosity: Verbosity, color: ColorChoice) {
    SETTINGS.get_or_init(|| settings(verbosity, color));
}

fn settings(verbosity: Verbosity, color: ColorChoice) -> Settings {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let wanted = variable("NO_COLOR").is_none() && variable("TERM").is_none_or(|t| t != "dumb");
    let stderr_color = match color {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        ColorChoice::Auto => wanted && std::io::stderr().is_terminal(),
    };
    Settings {
        verbosity,
        stderr_color,
    }
}

fn current() -> &'static Settings {
    SETTINGS.get_or_init(|| settings(Verbosity::default(), ColorChoice::default()))
}

pub(crate) fn verbosity() -> Verbosity {
    current().verbosity
}

/// Whether text on stderr may have colours.
pub(crate) fn color_stderr() -> bool {
    current().stderr_color
}

/// A line for a person; nothing with `--quiet`.
pub(crate) fn say(line: &str) {
    if verbosity() > Verbosity::Quiet {
        say_always(line);
    }
}

/// [`say`], but a line that was said before is not said again: several models may have the same to say.
pub(crate) fn say_once(line: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(line.to_owned()) {
        say(line);
    }
}

/// A line that only `--verbose` shows.
pub(crate) fn detail(line: &str) {
    if verbosity() >= Verbosity::Verbose {
        say_always(line);
    }
}

/// What went wrong, as `error: …`.
pub(crate) fn error(message: &impl std::fmt::Display) {
    say_always(&format!("error: {message}"));
}

/// A line that `--quiet` does not silence: an error, a question, an answer to what was typed.
pub(crate) fn say_always(line: &str) {
    let text = match color_stderr() {
        true => paint(line),
        false => line.to_owned(),
    };
    // With stderr closed, the message is lost.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// `text` with the words that begin its lines (`error:`, `hint:`) in their colours.
fn paint(text: &str) -> String {
    const LABELS: [(&str, AnsiColor); 4] = [
        ("error:", AnsiColor::Red),
        ("warning:", AnsiColor::Yellow),
        ("note:", AnsiColor::Cyan),
        ("hint:", AnsiColor::Green),
    ];
    let line = |line: &str| {
        let label = LABELS.iter().find(|(label, _)| line.starts_with(label));
        label.map_or_else(
            || line.to_owned(),
            |(label, color)| {
                let style = color.on_default().bold();
                format!("{style}{label}{style:#}{}", &line[label.len()..])
            },
        )
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// Text for stdout, shown at once.
pub(crate) fn show(text: &str) -> Outcome {
    show_bytes(text.as_bytes())
}

/// [`show`], of a file in whatever encoding.
pub(crate) fn show_bytes(bytes: &[u8]) -> Outcome {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes)?;
    Ok(out.flush()?)
}

/// A value as JSON on stdout, indented.
pub(crate) fn show_json(value: &impl serde::Serialize) -> Outcome {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
    Ok(writeln!(out)?)
}

/// [`show_json`] on one line, for long lists of numbers.
pub(crate) fn show_json_line(value: &impl serde::Serialize) -> Outcome {
    let mut out = std::io::stdout().lock();
    // A `Value` would have each f32 as the f64 that it is, with digits that say nothing.
    serde_json::to_writer(&mut out, value)?;
    Ok(writeln!(out)?)
}

/// A progress bar: on a terminal only, and gone when it is done.
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Over bytes.
    pub(crate) fn bytes(label: &str) -> Self {
        Self::new(label, "{msg} [{bar:30}] {bytes}/{total_bytes} {eta}")
    }

    /// Over things that are counted.
    pub(crate) fn count(label: &str) -> Self {
        Self::new(label, "{msg} [{bar:30}] {pos}/{len} {eta}")
    }

    fn new(label: &str, template: &str) -> Self {
        let bar = if std::io::stderr().is_terminal() && verbosity() > Verbosity::Quiet {
            ProgressBar::new(0)
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(label.to_owned());
        Self { bar }
    }

    pub(crate) fn set(&mut self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if done >= total {
            self.bar.finish_and_clear();
        }
    }
}

/// A number of bytes for people (`1.5 GiB`).
pub(crate) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1024.0, 0);
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::{human_bytes, paint};

    #[test]
    fn labels_have_colors_and_nothing_else_has() {
        let text = "error: no such file\nhint: check the path: note: x";
        assert_eq!(
            paint(text),
            "\u{1b}[1m\u{1b}[31merror:\u{1b}[0m no such file\n\u{1b}[1m\u{1b}[32mhint:\u{1b}[0m check the path: note: x"
        );
    }

    #[test]
    fn bytes_are_short_and_clear() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1 << 20, "1.0 MiB"),
            (3 << 29, "1.5 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(human_bytes(bytes), expected);
        }
    }
}
