//! Words on stderr, data on stdout.

use crate::failure::Outcome;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};

/// A line for a person.
pub(crate) fn say(line: &str) {
    // With stderr closed there is nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Text for stdout, shown at once.
pub(crate) fn show(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// A value as JSON on stdout, indented.
pub(crate) fn show_json(value: &impl serde::Serialize) -> Outcome {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
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
        let bar = if std::io::stderr().is_terminal() {
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
    use super::human_bytes;

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
