//! The line editor: keys become a message.
//!
//! What is typed has the terminal's own colour: any fixed one is unreadable on some background.

use super::commands;
use super::storage::{private_file, state_dir};
use crate::failure::Outcome;
use crate::ui;
use reedline::{
    Color, FileBackedHistory, Highlighter, Prompt, PromptEditMode, PromptHistorySearch,
    PromptHistorySearchStatus, Reedline, Signal, StyledText, ValidationResult, Validator,
};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Lines that the history keeps.
const HISTORY: usize = 1000;

/// What somebody did at the prompt.
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
    editor: Reedline,
    empty: Arc<AtomicBool>,
}

impl Editor {
    /// An editor whose history outlives the program where there is a place for it.
    pub(super) fn new() -> Self {
        let empty = Arc::new(AtomicBool::new(true));
        let plain = PlainText {
            empty: Arc::clone(&empty),
        };
        let editor = Reedline::create()
            .use_bracketed_paste(true)
            .with_ansi_colors(ui::color_stdout())
            .with_validator(Box::new(Blocks))
            .with_highlighter(Box::new(plain));
        let file = state_dir().map(|dir| dir.join("history"));
        let history = file.and_then(|file| history(&file));
        let editor = match history {
            Some(history) => editor.with_history(Box::new(history)),
            None => editor,
        };
        Self { editor, empty }
    }

    pub(super) fn read(&mut self) -> Outcome<Input> {
        self.empty.store(true, Ordering::Relaxed);
        Ok(match self.editor.read_line(&Marks)? {
            Signal::Success(text) => {
                // The history is a convenience: without a place for it, talks go on.
                let _ = self.editor.sync_history();
                Input::Text(text)
            }
            Signal::CtrlC => Input::Interrupt {
                empty: self.empty.load(Ordering::Relaxed),
            },
            _ => Input::End,
        })
    }
}

/// Earlier lines, in a file that only its owner reads.
fn history(file: &Path) -> Option<FileBackedHistory> {
    std::fs::create_dir_all(file.parent()?).ok()?;
    private_file(file, false).ok()?;
    FileBackedHistory::with_file(HISTORY, file.to_owned()).ok()
}

/// Text without any colour. It also sees whether there is some, which Ctrl-C does not tell.
struct PlainText {
    empty: Arc<AtomicBool>,
}

impl Highlighter for PlainText {
    fn highlight(&self, line: &str, _cursor: usize) -> StyledText {
        self.empty.store(line.is_empty(), Ordering::Relaxed);
        let mut text = StyledText::new();
        text.push((Default::default(), line.to_owned()));
        text
    }
}

/// Enter begins a new line inside of a block.
struct Blocks;

impl Validator for Blocks {
    fn validate(&self, text: &str) -> ValidationResult {
        match commands::is_open(text) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Complete,
        }
    }
}

/// What stands before lines, in the terminal's own colour too.
struct Marks;

impl Prompt for Marks {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        "".into()
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        "".into()
    }

    fn render_prompt_indicator(&self, _mode: PromptEditMode) -> Cow<'_, str> {
        "> ".into()
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        "  ".into()
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        let found = match search.status {
            PromptHistorySearchStatus::Passing => "",
            PromptHistorySearchStatus::Failing => "nothing for ",
        };
        format!("({found}search: {}) ", search.term).into()
    }

    fn get_prompt_color(&self) -> Color {
        Color::Default
    }

    fn get_prompt_multiline_color(&self) -> Color {
        Color::Default
    }

    fn get_indicator_color(&self) -> Color {
        Color::Default
    }

    fn get_prompt_right_color(&self) -> Color {
        Color::Default
    }
}
