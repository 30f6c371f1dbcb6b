//! `ferrum run` without a prompt, on a terminal: a conversation.
//!
//! Nothing that a user types or a model says ends the talk: what goes wrong is a sentence, and the next
//! question can be asked. The only ends are those that were asked for, and a terminal that is gone.

mod commands;
mod conversation;
mod editor;
mod session;
mod settings;
mod storage;
mod wrap;

use super::generation::{PromptEncoder, speed};
use crate::args::Seed;
use crate::failure::{Failure, Outcome};
use crate::ui::{self, Verbosity};
use commands::{HELP, Line};
use conversation::Conversation;
pub(super) use conversation::{Turn, Window};
use editor::{Editor, Input};
use ferrum_engine::{FinishReason, GenerationParams, GenerationStats, Session, generate};
use ferrum_types::TokenId;
pub(super) use session::KeptSession;
use settings::Settings;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use storage::SavedChat;
use terminal_size::{Width, terminal_size};
use wrap::{Part, Wrap};

/// What a conversation begins with.
pub(super) struct Start<'a> {
    /// What the model is called.
    pub(super) model: String,
    pub(super) system: Option<&'a str>,
    pub(super) seed: Seed,
    /// Whether messages go through the chat template; without it each is continued as it is.
    pub(super) templated: bool,
    /// The file that the conversation comes from and goes to.
    pub(super) kept: Option<KeptSession>,
}

/// Talks until the user leaves.
pub(super) fn chat(
    session: &mut Session,
    encoder: &PromptEncoder,
    generation: GenerationParams,
    start: Start<'_>,
) -> Outcome {
    // Ctrl-C is a signal while an answer runs; while a line is edited the editor sees it as a key.
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .map_err(|e| Failure::new(format!("cannot listen for Ctrl-C: {e}")))?;
    ui::say("Ask something; /help lists commands, Ctrl-D leaves.");
    let mut editor = Editor::new()?;
    let mut start = start;
    let mut conversation = Conversation::default();
    if let Some(kept) = &mut start.kept {
        kept.restore(session)?;
        conversation.clone_from(&kept.conversation);
        let turns = conversation.turns.len();
        if turns > 0 {
            ui::say(&format!(
                "The conversation goes on after {turns} {}.",
                if turns == 1 { "turn" } else { "turns" }
            ));
        }
    }
    if let Some(system) = start.system {
        conversation.system = Some(system.to_owned());
    }
    let verbose = ui::verbosity() >= Verbosity::Verbose;
    let mut chat = Chat {
        session,
        encoder,
        settings: Settings::new(generation, start.seed, verbose),
        conversation,
        start,
        interrupted,
    };
    loop {
        let text = match editor.read()? {
            Input::Text(text) => text,
            Input::Interrupt { empty: true } => {
                tell("Ctrl-D or /bye leaves, /help lists commands");
                continue;
            }
            Input::Interrupt { empty: false } => continue,
            Input::End => break,
        };
        let done = match Line::parse(&text) {
            Line::Leave => break,
            Line::Message(question) => chat.answer(&question),
            command => chat.command(&command),
        };
        match done {
            Err(Failure::BrokenPipe) => return Err(Failure::BrokenPipe),
            Err(failure) => tell(&format!("error: {failure}")),
            Ok(()) => {}
        }
    }
    match chat.start.kept.take() {
        Some(mut kept) => {
            kept.conversation = chat.conversation;
            kept.save(chat.session)
        }
        None => Ok(()),
    }
}

/// A conversation that goes on.
struct Chat<'a> {
    session: &'a mut Session,
    encoder: &'a PromptEncoder,
    settings: Settings,
    conversation: Conversation,
    start: Start<'a>,
    interrupted: Arc<AtomicBool>,
}

impl Chat<'_> {
    /// Answers a question, which becomes a part of the conversation if that works.
    fn answer(&mut self, question: &str) -> Outcome {
        let capacity = self.session.capacity();
        let tokens = match self.window(question, capacity)? {
            Window::Prompt { tokens, dropped } => {
                if dropped {
                    tell(&unseen_note(self.conversation.unseen(), capacity));
                }
                tokens
            }
            Window::TooLong(tokens) => {
                return Err(Failure::new(format!(
                    "the message takes {tokens} tokens, and the context holds {capacity}\nhint: --context N makes it larger, where the model allows it"
                )));
            }
        };
        self.interrupted.store(false, Ordering::Relaxed);
        let (mut screen, mut shown) = (Screen::new(), Ok(()));
        let tokenizer = &self.encoder.tokenizer;
        let wanted = &self.settings.generation();
        let stats = generate(self.session, tokenizer, &tokens, wanted, &mut |text| {
            shown = screen.show(text);
            shown.is_ok() && !self.interrupted.load(Ordering::Relaxed)
        });
        shown?;
        if stats
            .as_ref()
            .is_ok_and(|stats| stats.finish == FinishReason::Cancelled)
        {
            screen.show(" [stopped]")?;
        }
        screen.finish()?;
        let stats = stats?;
        ui::show("\n")?;
        if stats.finish == FinishReason::Length && stats.tokens.len() < wanted.max_tokens {
            tell(&format!(
                "note: the context of {capacity} tokens is full: the answer ends here"
            ));
        }
        self.keep(question, &tokens, &stats);
        if self.settings.verbose {
            tell(&speed(&stats));
        }
        Ok(())
    }

    /// The prompt for a question.
    fn window(&mut self, question: &str, capacity: usize) -> Outcome<Window> {
        if !self.start.templated {
            let tokens = self.encoder.raw(question)?;
            return Ok(match tokens.len() < capacity {
                true => Window::Prompt {
                    tokens,
                    dropped: false,
                },
                false => Window::TooLong(tokens.len()),
            });
        }
        // Enough for most answers; with more, less of the conversation would be seen.
        let most = self.settings.generation().max_tokens;
        let reserve = most.min(capacity / 4).max(1);
        let encoder = self.encoder;
        self.conversation
            .window(question, (capacity, reserve), |messages| {
                encoder.chat(messages)
            })
    }

    fn keep(&mut self, question: &str, prompt: &[TokenId], stats: &GenerationStats) {
        let turn = Turn {
            question: question.to_owned(),
            answer: self.encoder.tokenizer.decode(&stats.tokens, true),
        };
        if let Some(kept) = &mut self.start.kept {
            kept.answered(turn.clone(), [prompt, &stats.tokens].concat());
        }
        self.conversation.turns.push(turn);
    }

    fn command(&mut self, line: &Line<'_>) -> Outcome {
        match *line {
            Line::Nothing | Line::Message(_) | Line::Leave => {}
            Line::Help => tell(HELP),
            Line::Clear => {
                self.conversation.clear();
                tell("the conversation is forgotten");
            }
            Line::Settings => {
                let system = self.conversation.system.as_deref();
                tell(&self.settings.list(system));
            }
            Line::Set("system", text) => self.set_system(text),
            Line::Set(name, value) => self.settings.set(name, value).map_err(Failure::new)?,
            Line::Save(name) => {
                let path = storage::file_of(name)?;
                storage::save(&path, &self.start.model, &self.settings, &self.conversation)?;
                tell(&format!("saved to {}", path.display()));
            }
            Line::Load(name) => self.load(name)?,
            Line::Unknown(name) => {
                let message = format!("there is no command {name}\nhint: /help lists them");
                return Err(Failure::new(message));
            }
        }
        Ok(())
    }

    /// Sets the system message, or takes it away.
    fn set_system(&mut self, text: &str) {
        let text = text.trim_matches('"');
        self.conversation.system = (!text.is_empty()).then(|| text.to_owned());
        tell(match text.is_empty() {
            true => "there is no system message any more",
            false => "the system message is set; /clear forgets what was said before",
        });
    }

    fn load(&mut self, name: &str) -> Outcome {
        let SavedChat {
            model,
            settings,
            conversation,
        } = storage::load(&storage::kept(name)?, &self.settings)?;
        if model != self.start.model {
            // The name is from a file: what a terminal would obey is escaped.
            tell(&format!("note: the conversation was with {model:?}"));
        }
        let turns = conversation.turns.len();
        self.settings = settings;
        self.conversation = conversation;
        tell(&format!(
            "loaded {turns} turn{}",
            if turns == 1 { "" } else { "s" }
        ));
        Ok(())
    }
}

/// What is said when turns are left out.
fn unseen_note(turns: usize, capacity: usize) -> String {
    let what = match turns {
        1 => "turn is".to_owned(),
        n => format!("{n} turns are"),
    };
    format!("note: the context of {capacity} tokens is full: the oldest {what} no longer seen")
}

/// Where answers are shown.
struct Screen {
    /// On a terminal only: elsewhere a text stays as it is.
    wrap: Option<Wrap>,
}

impl Screen {
    fn new() -> Self {
        let terminal = std::io::stdout().is_terminal();
        Self {
            wrap: terminal.then(Wrap::default),
        }
    }

    fn show(&mut self, text: &str) -> Outcome {
        match &mut self.wrap {
            None => ui::show(text),
            Some(wrap) => show_parts(wrap.push(&harmless(text), columns())),
        }
    }

    fn finish(&mut self) -> Outcome {
        match &mut self.wrap {
            None => Ok(()),
            Some(wrap) => show_parts(wrap.finish(columns())),
        }
    }
}

fn show_parts(parts: Vec<Part>) -> Outcome {
    ui::show(&wrap::joined(parts))
}

/// Says something beside the answers, without breaking words at the margin.
fn tell(text: &str) {
    let columns = match std::io::stderr().is_terminal() {
        true => columns(),
        false => 0,
    };
    ui::say_always(&wrap::wrapped(text, columns));
}

/// Columns of the terminal now; 0 where that is not known.
fn columns() -> usize {
    terminal_size().map_or(0, |(Width(columns), _)| columns.into())
}

/// Text without the characters that a terminal would obey: a model says what it has read somewhere.
fn harmless(text: &str) -> String {
    let shown = |c: &char| !c.is_control() || ['\n', '\t'].contains(c);
    text.chars().filter(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_get_text_and_no_orders() {
        assert_eq!(harmless("a\u{1b}[31m\tb\r\n\u{9b}c\u{7}"), "a[31m\tb\nc");
    }

    #[test]
    fn what_is_dropped_is_counted() {
        let note = "note: the context of 512 tokens is full: the oldest turn is no longer seen";
        assert_eq!(unseen_note(1, 512), note);
        assert!(unseen_note(3, 512).ends_with("the oldest 3 turns are no longer seen"));
    }
}
