//! Text to tokens and back, for the two forms in which models bring their vocabulary.
//!
//! A [`Tokenizer`] comes from a Hugging Face folder (`tokenizer.json`, run by the `tokenizers`
//! crate) or from a GGUF file, whose vocabularies are implemented here: byte-level BPE with the
//! pre-tokenizers that llama.cpp names, SentencePiece BPE and unigram, WordPiece. Whatever the
//! text, encoding takes time in proportion to its length (times a logarithm) and does not panic.

mod bpe;
mod bytes;
mod charsmap;
mod error;
mod export;
mod fim;
mod gguf;
mod hf;
mod patterns;
mod prefix;
mod pretokenize;
mod pretokenizers;
mod regex_steps;
mod special;
mod spm;
mod stream;
mod symbols;
#[cfg(test)]
#[path = "../../tests/texts/mod.rs"]
mod texts;
mod unicode;
mod unigram;
mod vocab;
mod wordpiece;

pub use error::TokenizerError;
pub use fim::{FimIds, FimTokens};
pub use stream::DecodeStream;
pub use vocab::GgufVocab;

use crate::Gguf;
use ferrum_types::TokenId;
use gguf::GgufTokenizer;
use hf::HfTokenizer;
use std::fmt;
use std::path::Path;

/// The longest text one call encodes, in bytes.
pub const MAX_TEXT_BYTES: usize = 1 << 28;

/// Ids of the tokens with a role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    /// Begins a text.
    pub bos: Option<TokenId>,
    /// Ends a text.
    pub eos: Option<TokenId>,
    /// Ends a turn of a chat.
    pub eot: Option<TokenId>,
    /// Stands for what the vocabulary cannot write.
    pub unk: Option<TokenId>,
    /// Between two texts.
    pub sep: Option<TokenId>,
    /// Fills up a batch.
    pub pad: Option<TokenId>,
    /// Begins a text to be classified or embedded.
    pub cls: Option<TokenId>,
    /// A gap to be filled.
    pub mask: Option<TokenId>,
}

/// How [`Tokenizer::encode`] treats special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add what the model expects around a text, such as BOS.
    pub add_special: bool,
    /// Text that reads like a special token is that token. For prompts from a chat template; text
    /// from users is encoded without.
    pub parse_special: bool,
}

impl EncodeOptions {
    /// A text by itself: special tokens are added, and text is only text.
    pub const TEXT: Self = EncodeOptions {
        add_special: true,
        parse_special: false,
    };
    /// The output of a chat template, which has written its special tokens itself.
    pub const PROMPT: Self = EncodeOptions {
        add_special: false,
        parse_special: true,
    };
    /// A prompt that somebody wrote out whole: special tokens are added, and those written in it count.
    pub const WRITTEN: Self = EncodeOptions {
        add_special: true,
        parse_special: true,
    };
    /// Nothing is added and nothing is special.
    pub const PLAIN: Self = EncodeOptions {
        add_special: false,
        parse_special: false,
    };
}

/// How a vocabulary makes tokens out of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenizerKind {
    /// Byte-pair encoding of bytes (GPT-2, Llama 3, Qwen, …).
    ByteLevelBpe,
    /// Byte-pair encoding of characters, `▁` for spaces (Gemma, Llama 2 as `tokenizer.json`).
    TextBpe,
    /// SentencePiece byte-pair encoding by scores (Llama 2 as GGUF).
    SentencePieceBpe,
    /// SentencePiece unigram (T5).
    Unigram,
    /// BERT's WordPiece.
    WordPiece,
    /// Whole words only.
    WordLevel,
}

impl TokenizerKind {
    /// A name for people.
    pub const fn name(self) -> &'static str {
        match self {
            TokenizerKind::ByteLevelBpe => "byte-level BPE",
            TokenizerKind::TextBpe => "BPE",
            TokenizerKind::SentencePieceBpe => "SentencePiece BPE",
            TokenizerKind::Unigram => "SentencePiece unigram",
            TokenizerKind::WordPiece => "WordPiece",
            TokenizerKind::WordLevel => "word level",
        }
    }
}

impl fmt::Display for TokenizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What `inspect` shows of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerSummary {
    /// Kind of vocabulary.
    pub kind: TokenizerKind,
    /// Where it came from: `tokenizer.json` or `gguf`.
    pub source: &'static str,
    /// Name of the pre-tokenizer, where the source names it.
    pub pre: Option<String>,
    /// Number of ids.
    pub vocab_size: usize,
    /// Tokens with a role, with their texts.
    pub special: Vec<(&'static str, TokenId, String)>,
    /// Tokens that end a generation, with their texts.
    pub ends: Vec<(TokenId, String)>,
}

#[derive(Debug)]
enum Inner {
    Hf(Box<HfTokenizer>),
    Gguf(Box<GgufTokenizer>),
}

/// A tokenizer; see the [module](self).
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
}

impl Tokenizer {
    /// Reads `tokenizer.json` from a model folder, and the names of special tokens from
    /// `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
    /// `config.json` where they are there.
    pub fn from_hf_dir(dir: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        let hf = HfTokenizer::from_dir(dir.as_ref())?;
        Ok(Tokenizer {
            inner: Inner::Hf(Box::new(hf)),
        })
    }

    /// Builds the tokenizer that a GGUF file describes.
    pub fn from_gguf_vocab(vocab: &GgufVocab) -> Result<Self, TokenizerError> {
        let gguf = GgufTokenizer::new(vocab)?;
        Ok(Tokenizer {
            inner: Inner::Gguf(Box::new(gguf)),
        })
    }

    /// Builds the tokenizer of a GGUF file.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        Self::from_gguf_vocab(&GgufVocab::from_gguf(gguf)?)
    }

    /// What is doubtful about the vocabulary, in sentences for the user.
    pub fn warnings(&self) -> &[String] {
        match &self.inner {
            Inner::Hf(_) => &[],
            Inner::Gguf(gguf) => &gguf.warnings,
        }
    }

    /// The tokens of `text`.
    pub fn encode(
        &self,
        text: &str,
        options: EncodeOptions,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TextTooLong {
                found: text.len(),
                limit: MAX_TEXT_BYTES,
            });
        }
        match &self.inner {
            Inner::Hf(hf) => hf.encode(text, options),
            Inner::Gguf(gguf) => Ok(gguf.encode(text, options)),
        }
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids that are not in the
    /// vocabulary nothing. `skip_special` leaves control tokens out.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> String {
        if let Inner::Hf(hf) = &self.inner
            && let Ok(text) = hf.decode(ids, skip_special)
        {
            return text;
        }
        let mut stream = self.decode_stream(skip_special);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// Decoding token by token.
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream<'_> {
        DecodeStream::new(self, skip_special)
    }

    /// The bytes a token stands for, with byte-level and byte-fallback texts resolved; of a
    /// special token, its text. `None`: no such id.
    pub fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        match &self.inner {
            Inner::Hf(hf) => hf.token_bytes(id),
            Inner::Gguf(gguf) => gguf.token_bytes(id),
        }
    }

    /// The text of a token as the vocabulary writes it.
    pub fn token_text(&self, id: TokenId) -> Option<String> {
        match &self.inner {
            Inner::Hf(hf) => hf.token_text(id),
            Inner::Gguf(gguf) => gguf
                .vocab
                .texts
                .get(id as usize)
                .map(|text| text.to_string()),
        }
    }

    /// The token that the vocabulary writes as `text`.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        match &self.inner {
            Inner::Hf(hf) => hf.token_id(text),
            Inner::Gguf(gguf) => gguf.vocab.id(text),
        }
    }

    /// Whether a token is left out of text that skips special tokens.
    pub fn is_special(&self, id: TokenId) -> bool {
        match &self.inner {
            Inner::Hf(hf) => hf.is_special(id),
            Inner::Gguf(gguf) => gguf.is_special(id),
        }
    }

    /// Number of ids: one more than the greatest.
    pub fn vocab_size(&self) -> usize {
        match &self.inner {
            Inner::Hf(hf) => hf.size,
            Inner::Gguf(gguf) => gguf.vocab.len(),
        }
    }

    /// Tokens with a role.
    pub fn special(&self) -> SpecialIds {
        match &self.inner {
            Inner::Hf(hf) => hf.special,
            Inner::Gguf(gguf) => gguf.vocab.special,
        }
    }

    /// The token that begins a text, if the vocabulary has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.special().bos
    }

    /// Everything that ends a generation: EOS first, then end-of-turn tokens.
    pub fn eos_ids(&self) -> &[TokenId] {
        match &self.inner {
            Inner::Hf(hf) => &hf.eog_tokens,
            Inner::Gguf(gguf) => &gguf.vocab.eog_tokens,
        }
    }

    /// The tokens that fill in the middle, if the vocabulary has such.
    pub fn fim(&self) -> Option<FimTokens> {
        match &self.inner {
            // A word of that name in the plain vocabulary is text; an added one is a marker.
            Inner::Hf(hf) => fim::find(FimIds::default(), |text| hf.added_id(text)),
            Inner::Gguf(gguf) => fim::find(gguf.vocab.fim, |text| gguf.vocab.id(text)),
        }
    }

    /// Kind of vocabulary.
    pub fn kind(&self) -> TokenizerKind {
        match &self.inner {
            Inner::Hf(hf) => hf.kind,
            Inner::Gguf(gguf) => gguf.kind(),
        }
    }

    /// What `inspect` shows.
    pub fn summary(&self) -> TokenizerSummary {
        let text = |id| self.token_text(id).unwrap_or_default();
        let SpecialIds {
            bos,
            eos,
            eot,
            unk,
            sep,
            pad,
            cls,
            mask,
        } = self.special();
        let roles = [
            ("bos", bos),
            ("eos", eos),
            ("eot", eot),
            ("unk", unk),
            ("sep", sep),
            ("pad", pad),
            ("cls", cls),
            ("mask", mask),
        ];
        let (source, pre) = match &self.inner {
            Inner::Hf(_) => ("tokenizer.json", None),
            Inner::Gguf(gguf) => ("gguf", gguf.pre.clone()),
        };
        TokenizerSummary {
            kind: self.kind(),
            source,
            pre,
            vocab_size: self.vocab_size(),
            special: roles
                .into_iter()
                .filter_map(|(role, id)| id.map(|id| (role, id, text(id))))
                .collect(),
            ends: self.eos_ids().iter().map(|&id| (id, text(id))).collect(),
        }
    }

    fn decodes_by_bytes(&self) -> bool {
        match &self.inner {
            Inner::Hf(hf) => hf.decodes_by_bytes(),
            Inner::Gguf(_) => true,
        }
    }

    fn strips_first_space(&self) -> bool {
        match &self.inner {
            Inner::Hf(hf) => hf.strips_first_space(),
            Inner::Gguf(gguf) => gguf.strips_first_space(),
        }
    }
}
