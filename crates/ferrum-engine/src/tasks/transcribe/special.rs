//! The tokens of a Whisper vocabulary that are no text.

use ferrum_formats::tokenizer::Tokenizer;
use ferrum_formats::{HfConfig, ModelSource};
use ferrum_models::whisper::WhisperModel;
use ferrum_types::{Error, Result, TokenId};

/// Tokens that control the task, and tokens that must not be generated.
pub(super) struct SpeechTokens {
    /// Ends a text; all tokens below it are text.
    pub(super) eot: TokenId,
    /// Codes of languages; none for a model of one language.
    pub(super) languages: Vec<(String, TokenId)>,
    transcribe: Option<TokenId>,
    translate: Option<TokenId>,
    /// Disables timestamps; the timestamp tokens follow it in the vocabulary.
    pub(super) no_timestamps: TokenId,
    /// Never written.
    pub(super) suppressed: Vec<TokenId>,
    /// Never written as the first of a text.
    pub(super) suppressed_first: Vec<TokenId>,
    /// The last timestamp, counted from the first, that a text may begin with.
    pub(super) max_initial: Option<usize>,
    /// Begins a prompt.
    pub(super) previous: Option<TokenId>,
    /// Marks a window without speech.
    pub(super) no_speech: Option<TokenId>,
}

impl SpeechTokens {
    pub(super) fn read(model: &WhisperModel, tokenizer: &Tokenizer) -> Result<Self> {
        let ModelSource::Hf(folder) = &model.source else {
            return Err(Error::invalid("transcribe", "the model is not a folder"));
        };
        let path = folder.dir.join("generation_config.json");
        let generation = match path.is_file() {
            true => Some(HfConfig::open(path)?),
            false => None,
        };
        let config = generation.as_ref().unwrap_or(&folder.config);
        let size = model.spec.vocab_size;
        let token = |name: &str| {
            let id = tokenizer.token_id(name);
            id.filter(|&id| (id as usize) < size)
        };
        let need = |name: &str| {
            token(name).ok_or_else(|| {
                let path = folder.dir.join("tokenizer.json");
                Error::Model(format!("{}: found no token {name}", path.display()))
            })
        };
        let translate = token("<|translate|>");
        let no_timestamps = match config.usize("no_timestamps_token_id")? {
            Some(id) if id + 1 < size => id as TokenId,
            Some(_) => {
                let expected = "a token of the vocabulary";
                return Err(config
                    .field_error("no_timestamps_token_id", expected)
                    .into());
            }
            None => need("<|notimestamps|>")?,
        };
        let listed = |key: &str| -> Result<Vec<TokenId>> {
            match config.has(key) {
                true => Ok(config.token_ids(key)?),
                false => Ok(Vec::new()),
            }
        };
        Ok(Self {
            eot: need("<|endoftext|>")?,
            // A model of one language has the tokens of others, but was not taught what they mean.
            languages: match config.bool("is_multilingual")?.unwrap_or(true) {
                true => languages(model.spec.start, no_timestamps, tokenizer),
                false => Vec::new(),
            },
            transcribe: token("<|transcribe|>"),
            translate,
            no_timestamps,
            suppressed: listed("suppress_tokens")?,
            suppressed_first: listed("begin_suppress_tokens")?,
            max_initial: config.usize("max_initial_timestamp_index")?,
            previous: token("<|startofprev|>"),
            // The second is its name in older vocabularies.
            no_speech: token("<|nospeech|>").or_else(|| token("<|nocaptions|>")),
        })
    }

    pub(super) fn first_timestamp(&self) -> TokenId {
        self.no_timestamps + 1
    }

    /// The token of a language.
    pub(super) fn language(&self, code: &str) -> Result<TokenId> {
        let mut all = self.languages.iter();
        let found = all.find(|(known, _)| known.eq_ignore_ascii_case(code));
        found.map(|(_, id)| *id).ok_or_else(|| {
            let known: Vec<_> = self.languages.iter().map(|(code, _)| &**code).collect();
            let known = known.join(", ");
            let reason = format!("language: found {code:?}, the model knows {known}");
            Error::invalid("transcribe", reason)
        })
    }

    /// The language with the highest logit.
    pub(super) fn likeliest(&self, logits: &[f32]) -> TokenId {
        let logit = |id: TokenId| logits.get(id as usize).copied().unwrap_or(f32::MIN);
        let ids = self.languages.iter().map(|(_, id)| *id);
        let best = ids.reduce(|best, id| if logit(id) > logit(best) { id } else { best });
        best.unwrap_or_default()
    }

    pub(super) fn task(&self, translate: bool) -> Result<TokenId> {
        let found = if translate {
            self.translate
        } else {
            self.transcribe
        };
        found.ok_or_else(|| Error::invalid("transcribe", "the model does not have this task"))
    }
}

/// The languages of a vocabulary: codes between its first and its last special token.
fn languages(first: TokenId, last: TokenId, tokenizer: &Tokenizer) -> Vec<(String, TokenId)> {
    let language = |id: TokenId| {
        let text = tokenizer.token_text(id)?;
        let code = text.strip_prefix("<|")?.strip_suffix("|>")?;
        let fine = (2..=3).contains(&code.len()) && code.bytes().all(|c| c.is_ascii_lowercase());
        fine.then(|| (code.to_owned(), id))
    };
    (first..last).filter_map(language).collect()
}
