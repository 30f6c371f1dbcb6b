//! The tokenizer of a Hugging Face folder: `tokenizer.json`, run by the `tokenizers` crate, and the
//! names of special tokens from the files beside it.

use super::bytes;
use super::error::TokenizerError;
use super::regex_steps::{GaveUp, Normalizer, PreTokenizer};
use super::vocab::eog_token_ids;
use super::{EncodeOptions, SpecialIds, TokenizerKind};
use crate::files::read_limited;
use ferrum_types::TokenId;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::OnceLock;
use tokenizers::{DecoderWrapper, Model, ModelWrapper, PostProcessorWrapper, TokenizerImpl};

/// The `tokenizers` crate's tokenizer, with our steps where it matches regular expressions.
pub(super) type Pipeline =
    TokenizerImpl<ModelWrapper, Normalizer, PreTokenizer, PostProcessorWrapper, DecoderWrapper>;

/// How token texts become bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextForm {
    /// Written in the GPT-2 alphabet.
    ByteLevel,
    /// `▁` for spaces, `<0x41>` for bytes; whether a first space is taken off.
    Spaces {
        strip_first: bool,
        byte_fallback: bool,
    },
    /// Only the crate's own decoder knows.
    Other,
}

/// A tokenizer read from `tokenizer.json`.
pub(super) struct HfTokenizer {
    inner: Pipeline,
    /// The same one, blind to special tokens in text; made when first needed.
    plain: OnceLock<Pipeline>,
    form: TextForm,
    pub(super) kind: TokenizerKind,
    pub(super) size: usize,
    pub(super) special: SpecialIds,
    pub(super) eog_tokens: Vec<TokenId>,
    skipped: HashSet<TokenId>,
}

impl std::fmt::Debug for HfTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HfTokenizer")
            .field("kind", &self.kind)
            .field("size", &self.size)
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

/// The crate trusts its file more than a hostile file deserves: a panic inside it is an error here.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => Err(match panic.downcast::<GaveUp>() {
            Ok(gave_up) => gave_up.0,
            Err(_) => "the file's parts contradict each other".into(),
        }),
    }
}

/// Largest `tokenizer.json`; those of the largest vocabularies have some 40 MB.
const MAX_TOKENIZER: u64 = 256 << 20;
/// Largest file beside it.
const MAX_CONFIG: u64 = 16 << 20;
/// Longest text in a `tokenizer.json`, in bytes as written. The crate keeps a unigram vocabulary as a tree with a
/// level for each byte and frees it by recursion: a token of 200 kB overflows the stack, which ends the process.
const MAX_TEXT: usize = 8 << 10;
/// Most that replacements may multiply a text by, and that prefixes may add to it in bytes.
const MAX_GROWTH: usize = 1024;

fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = read_limited(path, MAX_CONFIG)?;
    let value = serde_json::from_slice(&text).map_err(|error| TokenizerError::BadFile {
        path: path.into(),
        reason: format!("not JSON: {error}"),
    })?;
    Ok(Some(value))
}

impl HfTokenizer {
    pub(super) fn from_dir(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Err(TokenizerError::NoTokenizerFile { path: dir.into() });
        }
        let bytes = read_limited(&path, MAX_TOKENIZER)?;
        let bad = |reason| TokenizerError::BadFile {
            path: path.clone(),
            reason,
        };
        check_texts(&bytes).map_err(bad)?;
        let mut inner = guarded(|| Pipeline::from_bytes(&bytes)).map_err(bad)?;
        check_growth(&inner).map_err(bad)?;
        // Both belong to training; neither must touch a prompt.
        let cleared = inner.with_truncation(None).map(|_| ());
        cleared.map_err(|error| bad(error.to_string()))?;
        inner.with_padding(None);
        let config = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let map = read_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
        let mut more_ends = Vec::new();
        for name in ["generation_config.json", "config.json"] {
            let ids = read_json(&dir.join(name))?.unwrap_or_default();
            more_ends.extend(id_list(ids.get("eos_token_id")));
        }
        Ok(Self::new(inner, &config, &map, &more_ends))
    }

    fn new(inner: Pipeline, config: &Value, map: &Value, more_ends: &[TokenId]) -> Self {
        let size = inner
            .get_vocab(true)
            .into_values()
            .max()
            .map_or(0, |id| id as usize + 1);
        let named = |key: &str| {
            let text = token_text(config.get(key)).or_else(|| token_text(map.get(key)))?;
            inner.token_to_id(text)
        };
        let special = SpecialIds {
            bos: named("bos_token"),
            eos: named("eos_token"),
            eot: named("eot_token"),
            unk: named("unk_token"),
            sep: named("sep_token"),
            pad: named("pad_token"),
            cls: named("cls_token"),
            mask: named("mask_token"),
        };
        let decoder = inner.get_added_tokens_decoder();
        let added: HashSet<TokenId> = decoder.keys().copied().collect();
        let skipped: HashSet<TokenId> = decoder
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, _)| id)
            .collect();
        // A token of that name in the plain vocabulary is text; an added one is a marker.
        let names = eog_token_ids(|name| inner.token_to_id(name).filter(|id| added.contains(id)));
        let mut eog_tokens = Vec::new();
        for id in [special.eos, special.eot]
            .into_iter()
            .flatten()
            .chain(names)
        {
            if !eog_tokens.contains(&id) {
                eog_tokens.push(id);
            }
        }
        for &id in more_ends {
            if (id as usize) < size && !eog_tokens.contains(&id) {
                eog_tokens.push(id);
            }
        }
        let form = text_form(&inner);
        let kind = kind(&inner, form);
        let plain = OnceLock::new();
        HfTokenizer {
            inner,
            plain,
            form,
            kind,
            size,
            special,
            eog_tokens,
            skipped,
        }
    }

    /// The file as the `tokenizers` crate has it.
    pub(super) fn inner(&self) -> &Pipeline {
        &self.inner
    }

    pub(super) fn encode(
        &self,
        text: &str,
        options: EncodeOptions,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        let inner = if options.parse_special {
            &self.inner
        } else {
            self.plain.get_or_init(|| self.without_special())
        };
        guarded(|| inner.encode_fast(text, options.add_special))
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(TokenizerError::Encode)
    }

    /// The tokenizer for text in which nothing is special.
    fn without_special(&self) -> Pipeline {
        let mut plain = self.hide_special().unwrap_or_else(|| self.inner.clone());
        plain.set_encode_special_tokens(true);
        plain
    }

    /// Some models also have their special tokens as words of the vocabulary, where plain text
    /// would find them: there they get a name that no text can guess. `None`: not needed.
    fn hide_special(&self) -> Option<Pipeline> {
        let model = self.inner.get_model();
        // Merges only make what they spell out; whole words are matched by their text.
        if matches!(model, ModelWrapper::BPE(bpe) if !bpe.ignore_merges) {
            return None;
        }
        let secret = RandomState::new().build_hasher().finish();
        let hidden: HashMap<String, String> = self
            .skipped
            .iter()
            .filter(|&&id| Some(id) != self.special.unk)
            .filter_map(|&id| Some((self.inner.id_to_token(id)?, id)))
            .filter(|(text, _)| model.token_to_id(text).is_some())
            .map(|(text, id)| (text, format!("\u{10FFFF}{secret:016x}{id}")))
            .collect();
        if hidden.is_empty() {
            return None;
        }
        let mut file = serde_json::to_value(&self.inner).ok()?;
        let renamed = |text: &str| hidden.get(text).cloned().unwrap_or_else(|| text.to_owned());
        for token in file.get_mut("added_tokens")?.as_array_mut()? {
            let text = renamed(token.get("content")?.as_str()?);
            *token.get_mut("content")? = Value::String(text);
        }
        match file.pointer_mut("/model/vocab")? {
            Value::Object(ids) => {
                let old = std::mem::take(ids);
                ids.extend(old.into_iter().map(|(text, id)| (renamed(&text), id)));
            }
            Value::Array(pieces) => {
                for piece in pieces {
                    let text = piece.get_mut(0)?;
                    *text = Value::String(renamed(text.as_str()?));
                }
            }
            _ => return None,
        }
        guarded(|| Ok(serde_json::from_value(file)?)).ok()
    }

    pub(super) fn decode(
        &self,
        ids: &[TokenId],
        skip_special: bool,
    ) -> Result<String, TokenizerError> {
        guarded(|| self.inner.decode(ids, skip_special)).map_err(TokenizerError::Encode)
    }

    pub(super) fn token_text(&self, id: TokenId) -> Option<String> {
        self.inner.id_to_token(id)
    }

    pub(super) fn token_id(&self, text: &str) -> Option<TokenId> {
        self.inner.token_to_id(text)
    }

    /// The token of that text, if it was added to the plain vocabulary.
    pub(super) fn added_id(&self, text: &str) -> Option<TokenId> {
        let added = self.inner.get_added_vocabulary().get_vocab();
        added.get(text).copied()
    }

    pub(super) fn is_special(&self, id: TokenId) -> bool {
        self.skipped.contains(&id)
    }

    /// Whether concatenated token bytes are the decoded text.
    pub(super) fn decodes_by_bytes(&self) -> bool {
        self.form != TextForm::Other
    }

    pub(super) fn strips_first_space(&self) -> bool {
        matches!(
            self.form,
            TextForm::Spaces {
                strip_first: true,
                ..
            }
        )
    }

    pub(super) fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        let text = self.inner.id_to_token(id)?;
        Some(match self.form {
            TextForm::ByteLevel if text.chars().all(|c| bytes::byte_of(c).is_some()) => {
                bytes::from_alphabet(&text)
            }
            TextForm::Spaces { byte_fallback, .. } => {
                match bytes::fallback_byte(&text).filter(|_| byte_fallback) {
                    Some(byte) => vec![byte],
                    None => text.replace('▁', " ").into_bytes(),
                }
            }
            TextForm::ByteLevel => text.into_bytes(),
            TextForm::Other => text.strip_prefix("##").unwrap_or(&text).into(),
        })
    }
}

/// A special token is written as its text or as an object with its `content`.
fn token_text(value: Option<&Value>) -> Option<&str> {
    let value = value?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// An id or a list of ids.
fn id_list(value: Option<&Value>) -> Vec<TokenId> {
    let one = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Some(Value::Array(ids)) => ids.iter().filter_map(one).collect(),
        Some(id) => one(id).into_iter().collect(),
        None => Vec::new(),
    }
}

/// The steps of the decoder, a sequence taken apart.
fn decoder_steps(decoder: Value) -> Vec<Value> {
    match decoder {
        Value::Object(mut object) => match object.get_mut("decoders").map(Value::take) {
            Some(Value::Array(steps)) => steps.into_iter().flat_map(decoder_steps).collect(),
            _ => vec![Value::Object(object)],
        },
        _ => Vec::new(),
    }
}

/// Refuses a file with a text longer than [`MAX_TEXT`] before any of it becomes a vocabulary; a character map,
/// which is no token, may be as long as it likes.
fn check_texts(file: &[u8]) -> Result<(), String> {
    let mut rest = file;
    while let Some(quote) = rest.iter().position(|&byte| byte == b'"') {
        let (before, text) = (&rest[..quote], &rest[quote + 1..]);
        let mut escaped = false;
        let end = text.iter().position(|&byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        });
        let end = end.unwrap_or(text.len());
        let key = file[..file.len() - rest.len()].strip_suffix(br#""precompiled_charsmap""#);
        if end > MAX_TEXT && (key.is_none() || before.trim_ascii() != b":") {
            return Err(format!(
                "a text of {end} bytes, expected at most {MAX_TEXT}"
            ));
        }
        rest = text.get(end + 1..).unwrap_or_default();
    }
    Ok(())
}

/// Refuses steps that would blow a text up: a short prompt must not become gigabytes.
fn check_growth(inner: &Pipeline) -> Result<(), String> {
    let parts = [
        ("normalizer", serde_json::to_value(inner.get_normalizer())),
        ("decoder", serde_json::to_value(inner.get_decoder())),
    ];
    for (part, steps) in parts {
        let (mut factor, mut added) = (1usize, 0usize);
        let mut rest = vec![steps.unwrap_or_default()];
        while let Some(step) = rest.pop() {
            let text = |key: &str| step.get(key).and_then(Value::as_str);
            match text("type") {
                Some("Replace") => {
                    if step.pointer("/pattern/String").and_then(Value::as_str) == Some("") {
                        return Err(format!(
                            "{part}: replaces the empty text, expected a pattern"
                        ));
                    }
                    let content = text("content").unwrap_or_default().len();
                    factor = factor.saturating_mul(content.max(1));
                }
                Some("Prepend") => {
                    added = added.saturating_add(text("prepend").unwrap_or_default().len());
                }
                _ => {}
            }
            for list in ["normalizers", "decoders"] {
                if let Some(Value::Array(steps)) = step.get(list) {
                    rest.extend(steps.iter().cloned());
                }
            }
        }
        if factor > MAX_GROWTH || added > MAX_GROWTH {
            return Err(format!(
                "{part}: multiplies a text by up to {factor} and adds {added} bytes, expected at \
                 most {MAX_GROWTH}"
            ));
        }
    }
    Ok(())
}

fn text_form(inner: &Pipeline) -> TextForm {
    let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or_default();
    let steps = decoder_steps(decoder);
    let (mut spaces, mut strip_first, mut byte_fallback) = (false, false, false);
    for step in &steps {
        match step.get("type").and_then(Value::as_str) {
            Some("ByteLevel") if steps.len() == 1 => return TextForm::ByteLevel,
            Some("Metaspace") if step.get("replacement").and_then(Value::as_str) == Some("▁") => {
                spaces = true;
                strip_first = step.get("prepend_scheme").and_then(Value::as_str) != Some("never");
            }
            Some("Replace")
                if step.pointer("/pattern/String").and_then(Value::as_str) == Some("▁")
                    && step.get("content").and_then(Value::as_str) == Some(" ") =>
            {
                spaces = true;
            }
            Some("ByteFallback") => byte_fallback = true,
            Some("Fuse") => {}
            Some("Strip")
                if step.get("content").and_then(Value::as_str) == Some(" ")
                    && step.get("start").and_then(Value::as_u64) == Some(1)
                    && step.get("stop").and_then(Value::as_u64) == Some(0) =>
            {
                strip_first = true;
            }
            _ => return TextForm::Other,
        }
    }
    if spaces {
        TextForm::Spaces {
            strip_first,
            byte_fallback,
        }
    } else {
        TextForm::Other
    }
}

fn kind(inner: &Pipeline, form: TextForm) -> TokenizerKind {
    match inner.get_model() {
        ModelWrapper::BPE(_) if form == TextForm::ByteLevel => TokenizerKind::ByteLevelBpe,
        ModelWrapper::BPE(_) => TokenizerKind::TextBpe,
        ModelWrapper::WordPiece(_) => TokenizerKind::WordPiece,
        ModelWrapper::Unigram(_) => TokenizerKind::Unigram,
        ModelWrapper::WordLevel(_) => TokenizerKind::WordLevel,
    }
}
