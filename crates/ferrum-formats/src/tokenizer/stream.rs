//! Decoding token by token, for output that is shown while it is generated.

use super::Tokenizer;
use ferrum_types::TokenId;

/// Turns tokens into text as they come.
///
/// A token may hold only part of a character: nothing is given out before the character is whole,
/// so the pieces are always text and, put together, what [`Tokenizer::decode`] gives. Bytes that
/// can never become a character are given out as U+FFFD.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Bytes of a character that is not whole yet.
    pending: Vec<u8>,
    /// Whether a space may still be taken from the start of the text.
    at_start: bool,
    /// For decoders whose text is not the tokens' bytes one after the other.
    window: Option<Window>,
}

/// The last tokens, decoded together before and after each new one.
#[derive(Debug, Default)]
struct Window {
    ids: Vec<TokenId>,
    /// Text of `ids` that has been given out.
    given: String,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        let at_start = tokenizer.strips_first_space();
        let window = (!tokenizer.decodes_by_bytes()).then(Window::default);
        DecodeStream {
            tokenizer,
            skip_special,
            pending: Vec::new(),
            at_start,
            window,
        }
    }

    /// A stream for text that goes on after other text, where a first space is meant.
    #[must_use]
    pub fn continued(mut self) -> Self {
        self.at_start = false;
        self
    }

    /// Adds a token; returns the text that is complete now, maybe none. A token that is not in the
    /// vocabulary gives nothing.
    pub fn push(&mut self, id: TokenId) -> String {
        if let Some(window) = &mut self.window {
            return window.push(self.tokenizer, id, self.skip_special);
        }
        let special = self.tokenizer.is_special(id);
        if special && self.skip_special {
            return String::new();
        }
        if let Some(bytes) = self.tokenizer.token_bytes(id) {
            let artificial = self.at_start && !special && bytes.first() == Some(&b' ');
            self.pending
                .extend_from_slice(&bytes[usize::from(artificial)..]);
            self.at_start &= bytes.is_empty();
        }
        self.take_text(false)
    }

    /// Ends the stream: what is left of a character that never became whole.
    pub fn finish(mut self) -> String {
        match &self.window {
            Some(window) => window.fresh(self.tokenizer, self.skip_special),
            None => self.take_text(true),
        }
    }

    fn take_text(&mut self, all: bool) -> String {
        let mut text = String::new();
        let mut used = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let broken = chunk.invalid();
            if broken.is_empty() {
                continue;
            }
            let last = used + broken.len() == self.pending.len();
            if last && !all && may_become_char(broken) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            used += broken.len();
        }
        self.pending.drain(..used);
        text
    }
}

impl Window {
    /// Text of the window that has not been given out.
    fn fresh(&self, tokenizer: &Tokenizer, skip_special: bool) -> String {
        let text = tokenizer.decode(&self.ids, skip_special);
        text.strip_prefix(&self.given).unwrap_or("").to_owned()
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: TokenId, skip_special: bool) -> String {
        self.ids.push(id);
        let fresh = self.fresh(tokenizer, skip_special);
        if fresh.is_empty() || fresh.ends_with(char::REPLACEMENT_CHARACTER) {
            return String::new();
        }
        // The newest token stays, for the decoder to see that the next one is not the first.
        self.ids.drain(..self.ids.len() - 1);
        self.given = tokenizer.decode(&self.ids, skip_special);
        fresh
    }
}

/// Whether more bytes could complete `start` to a character.
fn may_become_char(start: &[u8]) -> bool {
    std::str::from_utf8(start).is_err_and(|error| error.error_len().is_none())
}
