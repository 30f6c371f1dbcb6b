//! `ferrum run` without a prompt, on a terminal: a conversation.

use super::run::{Prompter, message, speak, speed};
use crate::failure::{Failure, Outcome};
use crate::ui;
use ferrum_engine::{FinishReason, Generation, Session};
use ferrum_formats::tokenizer::EncodeOptions;
use reedline::{DefaultPrompt, DefaultPromptSegment, FileBackedHistory, Reedline, Signal};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const HELP: &str = "/help     this list
/clear    forget the conversation
/system TEXT  set the system message and start anew
/quit     leave (also Ctrl-D)
Ctrl-C stops an answer; Up and Down bring back earlier lines.";

/// Lines that the history keeps.
const HISTORY: usize = 1000;

/// Talks until the user leaves. `templated` is false for raw continuation.
pub(super) fn chat(
    session: &mut Session,
    prompter: &Prompter,
    wanted: &Generation,
    system: Option<&str>,
    templated: bool,
) -> Outcome {
    // Ctrl-C is a signal while an answer runs; while a line is edited the editor sees it as a key.
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .map_err(|e| Failure::new(format!("cannot listen for Ctrl-C: {e}")))?;
    ui::say("Ask something; /help lists commands, Ctrl-D leaves.");
    let mut editor = editor();
    let prompt = DefaultPrompt::new(
        DefaultPromptSegment::Basic(String::new()),
        DefaultPromptSegment::Empty,
    );
    let mut messages: Vec<Value> = system
        .map(|text| message("system", text))
        .into_iter()
        .collect();
    loop {
        let line = match editor.read_line(&prompt)? {
            Signal::Success(line) => line,
            Signal::CtrlC => continue,
            _ => return Ok(()),
        };
        match command(&line, &mut messages) {
            Said::Nothing => continue,
            Said::Quit => return Ok(()),
            Said::Text => {}
        }
        interrupted.store(false, Ordering::Relaxed);
        messages.push(message("user", &line));
        let tokens = if templated {
            prompter.chat(&messages)
        } else {
            prompter
                .tokenizer
                .encode(&line, EncodeOptions::WRITTEN)
                .map_err(Failure::from)
        };
        let go_on = &mut || !interrupted.load(Ordering::Relaxed);
        let answered =
            tokens.and_then(|tokens| speak(session, &prompter.tokenizer, &tokens, wanted, go_on));
        match answered {
            Ok(stats) => {
                let mark = if stats.finish == FinishReason::Cancelled {
                    " [stopped]"
                } else {
                    ""
                };
                ui::show(&format!("{mark}\n"))?;
                ui::say(&speed(&stats));
                let text = prompter.tokenizer.decode(&stats.tokens, true);
                messages.push(message("assistant", &text));
            }
            Err(Failure::BrokenPipe) => return Err(Failure::BrokenPipe),
            Err(failure) => {
                // The conversation goes on without the question that could not be answered.
                messages.pop();
                ui::error(&failure);
            }
        }
    }
}

enum Said {
    Text,
    Nothing,
    Quit,
}

/// Carries out lines that begin with a slash.
fn command(line: &str, messages: &mut Vec<Value>) -> Said {
    let line = line.trim();
    if line.is_empty() {
        return Said::Nothing;
    }
    if !line.starts_with('/') {
        return Said::Text;
    }
    let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
    match name {
        "/quit" | "/exit" => return Said::Quit,
        "/clear" => {
            messages.retain(|m| m["role"] == "system");
            ui::say("the conversation is forgotten");
        }
        "/system" if !rest.trim().is_empty() => {
            *messages = vec![message("system", rest.trim())];
            ui::say("the system message is set");
        }
        "/help" => ui::say(HELP),
        _ => ui::say(&format!("unknown command {name}; /help lists them")),
    }
    Said::Nothing
}

/// A line editor whose history outlives the program where there is a place for it.
fn editor() -> Reedline {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state =
        state.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")));
    let file = state.map(|dir| dir.join("ferrum/history"));
    let history = file.and_then(|file| FileBackedHistory::with_file(HISTORY, file).ok());
    match history {
        Some(history) => Reedline::create().with_history(Box::new(history)),
        None => Reedline::create(),
    }
}
