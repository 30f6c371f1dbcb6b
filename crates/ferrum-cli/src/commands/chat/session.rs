//! `--session FILE`: a conversation with its keys and values, so that the next process goes on without computing what
//! was said.
//!
//! The file is taken as hostile: its checksum is verified before anything of it is used, and lengths are checked against
//! what the model needs before memory is taken. Keys and values of another model, cache or program are not used: the
//! conversation goes on, and is computed anew.

use super::conversation::{Conversation, Turn};
use super::storage;
use crate::failure::{Failure, Outcome};
use crate::ui::{self, human_bytes};
use ferrum_engine::Session;
use ferrum_formats::kv_blocks::{KvFile, write_kv_file};
use ferrum_types::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Longest description that is read.
const MAX_DESCRIPTION: usize = 256 << 20;

/// What is said in a file beside keys and values.
#[derive(Serialize, Deserialize)]
struct Description {
    /// What keys and values depend on beside the tokens.
    key: String,
    /// All tokens, of the prompt and of the answer.
    tokens: Vec<TokenId>,
    /// So many of them, from the first on, have keys and values.
    cached: usize,
    messages: Value,
    /// All that was said without a chat template.
    text: String,
}

/// A conversation that is kept in a file.
pub(in crate::commands) struct KeptSession {
    path: PathBuf,
    /// Of the model.
    identity: String,
    pub(in crate::commands) conversation: Conversation,
    /// All that was said without a chat template.
    pub(in crate::commands) text: String,
    tokens: Vec<TokenId>,
    stored: Option<Stored>,
}

/// Keys and values that wait for a model.
struct Stored {
    key: String,
    cached: usize,
}

impl KeptSession {
    /// What the file at `path` holds, for a model of this identity; a new conversation where there is none.
    pub(in crate::commands) fn open(path: &Path, identity: String) -> Outcome<Self> {
        let mut session = Self {
            path: path.to_owned(),
            identity,
            conversation: Conversation::default(),
            text: String::new(),
            tokens: Vec::new(),
            stored: None,
        };
        if !path.exists() {
            return Ok(session);
        }
        let hint =
            "hint: --session takes a file that it wrote; remove this one, or give another name";
        let wrong = |e: String| Failure::new(format!("{e}\n{hint}"));
        KvFile::verify(path, MAX_DESCRIPTION).map_err(|e| wrong(e.to_string()))?;
        let file = KvFile::open(path, MAX_DESCRIPTION).map_err(|e| wrong(e.to_string()))?;
        let found = serde_json::from_slice::<Description>(file.description());
        let named = |reason: String| wrong(format!("{}: {reason}", path.display()));
        let found = found.map_err(|e| named(format!("holds no conversation: {e}")))?;
        if found.cached > found.tokens.len() {
            return Err(named("has more keys and values than tokens".into()));
        }
        session.conversation = storage::conversation(&found.messages).map_err(named)?;
        session.text = found.text;
        session.tokens = found.tokens;
        session.stored = Some(Stored {
            key: found.key,
            cached: found.cached,
        });
        Ok(session)
    }

    /// Tokens of the conversation so far.
    pub(in crate::commands) fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Gives the keys and values of the file to a session. Where they are not for it, says so, and gives up the tokens,
    /// too, which another model may read otherwise.
    pub(in crate::commands) fn restore(&mut self, session: &mut Session) -> Outcome {
        let Some(stored) = self.stored.take() else {
            return Ok(());
        };
        let path = self.path.display();
        if session.kv_key(&self.identity).as_ref() != Some(&stored.key) {
            ui::say(&format!(
                "note: {path} was written with another model, KV cache, backend or version: the conversation is computed again"
            ));
            self.tokens.clear();
            return Ok(());
        }
        let cached = &self.tokens[..stored.cached];
        if cached.is_empty() {
            return Ok(());
        }
        let vocab = session.spec().vocab_size;
        let file = KvFile::open(&self.path, MAX_DESCRIPTION)?;
        let expected = session.kv_bytes(cached.len()).map(|bytes| bytes as u64);
        let fits = cached.len() <= session.capacity() && expected == Some(file.payload_len());
        if !fits || self.tokens.iter().any(|&token| token as usize >= vocab) {
            ui::say(&format!(
                "note: the keys and values in {path} do not fit this context: the conversation is computed again"
            ));
            return Ok(());
        }
        let bytes = file.into_payload()?;
        session.write_kv(cached, &bytes)?;
        ui::detail(&format!(
            "note: {} tokens come from {path} ({})",
            cached.len(),
            human_bytes(bytes.len() as u64)
        ));
        Ok(())
    }

    /// A question was answered: `tokens` are the prompt and the answer.
    pub(in crate::commands) fn answered(&mut self, turn: Turn, tokens: Vec<TokenId>) {
        self.conversation.turns.push(turn);
        self.tokens = tokens;
    }

    /// The same for a text that was continued.
    pub(in crate::commands) fn continued(&mut self, text: &str, tokens: Vec<TokenId>) {
        self.text.push_str(text);
        self.tokens = tokens;
    }

    /// Writes the file anew: whole, or not at all.
    pub(in crate::commands) fn save(&self, session: &mut Session) -> Outcome {
        let key = session.kv_key(&self.identity);
        let key = key.ok_or_else(|| Failure::new("this backend's KV cache cannot be kept"))?;
        // What was fed last may not be part of the conversation.
        let common = session.tokens().iter().zip(&self.tokens);
        let cached = common.take_while(|(a, b)| a == b).count();
        let (cached, bytes) = match cached == session.len() {
            true => (cached, session.read_kv()?),
            false => (0, Vec::new()),
        };
        let description = Description {
            key,
            tokens: self.tokens.clone(),
            cached,
            messages: Value::Array(self.conversation.all()),
            text: self.text.clone(),
        };
        let description = serde_json::to_vec(&description)?;
        write_kv_file(&self.path, &description, &bytes, true)?;
        Ok(())
    }
}
