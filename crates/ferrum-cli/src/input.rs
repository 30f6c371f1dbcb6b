//! Files and standard input that a command reads whole, with bounds on how much.

use crate::failure::{Failure, Outcome};
use crate::ui;
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Most bytes that are read from a file of text, or from standard input.
const MAX_TEXT: u64 = 256 << 20;

/// Most bytes that are read from a file of messages or tools, or from a template.
const MAX_JSON: u64 = 16 << 20;

/// How long standard input may take before a note says that the program waits for it.
const PATIENCE: Duration = Duration::from_secs(2);

/// A text file, or standard input for `-`.
pub(crate) fn read_text(path: &Path) -> Outcome<String> {
    read(path, MAX_TEXT)
}

/// A file of JSON or a template, or standard input for `-`.
pub(crate) fn read_json_text(path: &Path) -> Outcome<String> {
    read(path, MAX_JSON)
}

fn read(path: &Path, most: u64) -> Outcome<String> {
    if path == Path::new("-") {
        return read_stdin();
    }
    to_text(&path.display().to_string(), read_bytes(path, most)?, most)
}

/// All bytes of a file that is no longer than `most`.
pub(crate) fn read_bytes(path: &Path, most: u64) -> Outcome<Vec<u8>> {
    let fail = |e: std::io::Error| Failure::new(format!("{}: {e}", path.display()));
    let file = std::fs::File::open(path).map_err(fail)?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(fail)?;
    match bytes.len() as u64 > most {
        true => Err(too_large(&path.display().to_string(), most)),
        false => Ok(bytes),
    }
}

fn too_large(name: &str, most: u64) -> Failure {
    Failure::new(format!("{name} is larger than {most} bytes"))
}

/// All of standard input. After a while, a note says that the program waits for it.
pub(crate) fn read_stdin() -> Outcome<String> {
    let (read, waiting) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if waiting.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            ui::say(
                "note: reading standard input until it ends\nhint: Ctrl-D ends it on a terminal; `< /dev/null` gives none",
            );
        }
    });
    let text = read_all_of_stdin();
    drop(read);
    text
}

fn read_all_of_stdin() -> Outcome<String> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(MAX_TEXT + 1)
        .read_to_end(&mut bytes)?;
    to_text("standard input", bytes, MAX_TEXT)
}

fn to_text(name: &str, bytes: Vec<u8>, most: u64) -> Outcome<String> {
    if bytes.len() as u64 > most {
        return Err(too_large(name, most));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::new(format!(
            "{name} is not UTF-8: byte {at} begins no character"
        ))
    })
}
