//! The line editor: keys become a message.
//!
//! What is typed has the terminal's own colour: any fixed one is unreadable on some background.

use super::commands;
use super::storage::{private_file, state_dir};
use crate::failure::{Failure, Outcome};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Helper};
use std::cell::Cell;
use std::path::{Path, PathBuf};

/// Lines that the history keeps.
const HISTORY: usize = 1000;

/// Input at the prompt.
pub(super) enum Input {
    Text(String),
    /// Ctrl-C, on a line with something on it or without.
    Interrupt {
        empty: bool,
    },
    /// Ctrl-D, or the terminal is gone.
    End,
}

pub(super) struct Editor {
    editor: rustyline::Editor<Message, FileHistory>,
    /// Where the history outlives the program, if there is a place for it.
    history: Option<PathBuf>,
}

impl Editor {
    pub(super) fn new() -> Outcome<Self> {
        let config = Config::builder().max_history_size(HISTORY)?;
        let config = config.auto_add_history(true).build();
        let mut editor = rustyline::Editor::with_config(config)?;
        editor.set_helper(Some(Message::default()));
        let history = state_dir().map(|dir| dir.join("history"));
        let history = history.filter(|file| is_private(file).is_ok());
        if let Some(file) = &history {
            // The history is a convenience: without it, talks go on.
            let _ = editor.load_history(file);
        }
        Ok(Self { editor, history })
    }

    pub(super) fn read(&mut self) -> Outcome<Input> {
        if let Some(message) = self.editor.helper() {
            message.has_text.set(false);
        }
        Ok(match self.editor.readline("> ") {
            Ok(text) => {
                if let Some(file) = &self.history {
                    let _ = self.editor.append_history(file);
                }
                Input::Text(text)
            }
            Err(ReadlineError::Interrupted) => Input::Interrupt {
                empty: self
                    .editor
                    .helper()
                    .is_none_or(|message| !message.has_text.get()),
            },
            Err(ReadlineError::Eof) => Input::End,
            Err(e) => return Err(e.into()),
        })
    }
}

impl From<ReadlineError> for Failure {
    fn from(e: ReadlineError) -> Self {
        match e {
            ReadlineError::Io(e) => e.into(),
            e => std::io::Error::other(e).into(),
        }
    }
}

/// Makes a file that only its owner reads, if there is none, and its folder.
fn is_private(file: &Path) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    private_file(file, false).map(|_| ())
}

/// A message as it is typed. Enter begins a new line inside of a block.
#[derive(Default)]
struct Message {
    /// Whether there is some, which Ctrl-C does not tell.
    has_text: Cell<bool>,
}

impl Validator for Message {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match commands::is_open(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Hinter for Message {
    type Hint = String;

    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.has_text.set(!line.is_empty());
        None
    }
}

impl Completer for Message {
    type Candidate = String;
}

impl Highlighter for Message {}
impl Helper for Message {}
