//! Conversation history and the part of it in the context.
//!
//! When the context is full, the oldest turns are left out of the prompt, and the system message stays.
//! What was left out once stays so: the prompts of later turns then begin alike, and the cache of keys and
//! values is of use.

use crate::commands::generation::message;
use crate::failure::Outcome;
use ferrum_types::TokenId;
use serde_json::Value;

/// A question with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::commands) struct Turn {
    pub(in crate::commands) question: String,
    pub(in crate::commands) answer: String,
}

/// See the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::commands) struct Conversation {
    pub(in crate::commands) system: Option<String>,
    pub(in crate::commands) turns: Vec<Turn>,
    /// How many turns at the beginning are no longer seen.
    unseen: usize,
}

/// The prompt for a question.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::commands) enum Window {
    /// It fits.
    Prompt {
        tokens: Vec<TokenId>,
        /// Whether it has fewer turns than the one before.
        dropped: bool,
    },
    /// So many tokens without any turn, which is more than the context holds.
    TooLong(usize),
}

impl Conversation {
    pub(super) fn new(system: Option<String>, turns: Vec<Turn>) -> Self {
        Self {
            system,
            turns,
            unseen: 0,
        }
    }

    /// Forgets the turns.
    pub(super) fn clear(&mut self) {
        self.turns.clear();
        self.unseen = 0;
    }

    /// How many turns at the beginning are no longer seen.
    pub(super) fn unseen(&self) -> usize {
        self.unseen
    }

    /// The system message, all turns from one on, and a question.
    fn messages(&self, from: usize, question: Option<&str>) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        let turns = self.turns.iter().skip(from).flat_map(|turn| {
            [
                message("user", &turn.question),
                message("assistant", &turn.answer),
            ]
        });
        let question = question.map(|text| message("user", text));
        system.chain(turns).chain(question).collect()
    }

    /// All that was said, seen or not.
    pub(super) fn all(&self) -> Vec<Value> {
        self.messages(0, None)
    }

    /// The prompt for a question with as many turns as leave `reserve` tokens of `capacity` for the answer;
    /// without any, whatever is left will do. `encode` makes tokens of messages.
    pub(in crate::commands) fn window(
        &mut self,
        question: &str,
        (capacity, reserve): (usize, usize),
        encode: impl Fn(&[Value]) -> Outcome<Vec<TokenId>>,
    ) -> Outcome<Window> {
        let mut from = self.unseen;
        loop {
            let tokens = encode(&self.messages(from, Some(question)))?;
            let last = from >= self.turns.len();
            if tokens.len().saturating_add(reserve) <= capacity || (last && tokens.len() < capacity)
            {
                let dropped = from > self.unseen;
                self.unseen = from;
                return Ok(Window::Prompt { tokens, dropped });
            }
            if last {
                return Ok(Window::TooLong(tokens.len()));
            }
            from += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn turn(question: &str, answer: &str) -> Turn {
        Turn {
            question: question.into(),
            answer: answer.into(),
        }
    }

    /// A token for each character, and one for each message.
    fn encode(messages: &[Value]) -> Outcome<Vec<TokenId>> {
        let text = |m: &Value| m["content"].as_str().unwrap_or_default().to_owned() + "|";
        let texts: String = messages.iter().map(text).collect();
        Ok(texts.chars().map(u32::from).collect())
    }

    fn prompt(window: Outcome<Window>) -> (String, bool) {
        match window {
            Ok(Window::Prompt { tokens, dropped }) => {
                let text = tokens.into_iter().filter_map(char::from_u32).collect();
                (text, dropped)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_oldest_turns_go_and_the_system_message_stays() {
        let turns = vec![turn("a1", "b1"), turn("a2", "b2"), turn("a3", "b3")];
        let mut talk = Conversation::new(Some("sys".into()), turns);
        let all = "sys|a1|b1|a2|b2|a3|b3|q|";
        let fits = |talk: &mut Conversation, capacity| talk.window("q", (capacity, 5), encode);
        let whole = prompt(fits(&mut talk, all.len() + 5));
        assert_eq!(whole, (all.into(), false));
        let (text, dropped) = prompt(fits(&mut talk, all.len() + 4));
        assert_eq!((text.as_str(), dropped), ("sys|a2|b2|a3|b3|q|", true));
        assert_eq!(talk.unseen(), 1);
        // Dropped turns stay dropped, and are reported once.
        let (text, dropped) = prompt(fits(&mut talk, 1000));
        assert_eq!((text.as_str(), dropped), ("sys|a2|b2|a3|b3|q|", false));
        // A question that fills the context alone gets what is left.
        assert_eq!(prompt(fits(&mut talk, 7)), ("sys|q|".into(), true));
        assert_eq!(talk.unseen(), 3);
        assert_eq!(talk.all().len(), 7);
    }

    #[test]
    fn a_question_that_cannot_fit_changes_nothing() {
        let mut talk = Conversation::new(None, vec![turn("a", "b")]);
        let long = "x".repeat(20);
        let window = talk.window(&long, (21, 5), encode);
        assert!(matches!(window, Ok(Window::TooLong(21))), "{window:?}");
        assert_eq!(talk.unseen(), 0);
        let (text, _) = prompt(talk.window("q", (21, 5), encode));
        assert_eq!(text, "a|b|q|");
        talk.clear();
        assert_eq!(prompt(talk.window("q", (21, 5), encode)).0, "q|");
    }

    proptest! {
        #[test]
        fn a_window_fits_and_no_larger_one_does(
            lengths in prop::collection::vec((0usize..30, 0usize..30), 0..12),
            question in 0usize..40, capacity in 1usize..200, reserve in 1usize..60,
        ) {
            let text = |n: usize| "x".repeat(n);
            let turns: Vec<_> = lengths.iter().map(|&(q, a)| turn(&text(q), &text(a))).collect();
            let count = |from: usize| 4 + question + 1
                + lengths[from..].iter().map(|(q, a)| q + a + 2).sum::<usize>();
            let mut talk = Conversation::new(Some("sys".into()), turns);
            let window = talk.window(&text(question), (capacity, reserve), encode).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let (seen, all) = (talk.unseen(), lengths.len());
            match window {
                Window::Prompt { tokens, dropped } => {
                    prop_assert_eq!(tokens.len(), count(seen));
                    prop_assert_eq!(dropped, seen > 0);
                    prop_assert!(tokens.len() + reserve <= capacity || (seen == all && tokens.len() < capacity));
                    prop_assert!(seen == 0 || count(seen - 1) + reserve > capacity);
                }
                Window::TooLong(tokens) => {
                    prop_assert_eq!(tokens, count(all));
                    prop_assert!(tokens >= capacity);
                    prop_assert_eq!(seen, 0);
                }
            }
        }
    }
}
