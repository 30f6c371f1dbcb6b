//! The tokenizer of a GGUF file: special tokens, then one of the vocabulary kinds between them.

use super::bpe::Bpe;
use super::bytes;
use super::error::TokenizerError;
use super::pretokenizers;
use super::special::{Fragment, SpecialTokens};
use super::spm;
use super::unigram::Unigram;
use super::vocab::{GgufVocab, TokenKind, Vocab};
use super::wordpiece::WordPiece;
use super::{EncodeOptions, SpecialIds, TokenizerKind};
use ferrum_types::TokenId;

/// How text between special tokens becomes tokens.
#[derive(Debug)]
enum Model {
    Bpe(Bpe),
    Spm { longest: usize },
    Unigram(Unigram),
    WordPiece(WordPiece),
}

/// A tokenizer built from [`GgufVocab`].
#[derive(Debug)]
pub(super) struct GgufTokenizer {
    pub(super) vocab: Vocab,
    special: SpecialTokens,
    model: Model,
    add_bos: bool,
    add_eos: bool,
    add_sep: bool,
    add_space_prefix: bool,
    pub(super) pre: Option<String>,
    pub(super) warnings: Vec<String>,
}

impl GgufTokenizer {
    pub(super) fn new(file: &GgufVocab) -> Result<Self, TokenizerError> {
        match file.model.as_str() {
            "gpt2" | "gemma4" => Self::bpe(file),
            "llama" => Self::spm(file),
            "bert" => Self::wordpiece(file),
            "t5" => Self::unigram(file),
            other => Err(TokenizerError::UnknownModel {
                found: other.to_owned(),
                hint: match other {
                    "rwkv" | "plamo2" | "hybriddna" | "whitespace" => {
                        "use a model with one of these tokenizers; this one is not supported".into()
                    }
                    "none" | "no_vocab" => {
                        "the file has no vocabulary; take the tokenizer from the original model"
                            .into()
                    }
                    _ => String::new(),
                },
            }),
        }
    }

    fn bpe(file: &GgufVocab) -> Result<Self, TokenizerError> {
        let gemma = file.model == "gemma4";
        let name = if gemma {
            Some("gemma4")
        } else {
            file.pre.as_deref()
        };
        let mut warnings = Vec::new();
        let pre = name.and_then(pretokenizers::by_name).unwrap_or_else(|| {
            let found = name.map_or("missing".into(), |name| {
                format!("`{name}`, which is not known")
            });
            warnings.push(format!(
                "tokenizer.ggml.pre is {found}: using the default pre-tokenizer, some texts may \
                 be tokenized wrongly"
            ));
            pretokenizers::fallback()
        });
        if file.merges.is_empty() && name != Some("kimi-k2") {
            return Err(TokenizerError::BadVocab {
                field: "tokenizer.ggml.merges",
                reason: "missing, a byte-pair vocabulary needs its merges".into(),
            });
        }
        if file.merges.is_empty() {
            warnings.push("tokenizer.ggml.merges is missing: texts fall apart into bytes".into());
        }
        let default = Some(11).filter(|_| !gemma);
        let defaults = SpecialIds {
            bos: default.filter(|_| !pre.no_default_bos),
            eos: default,
            ..SpecialIds::default()
        };
        let vocab = Vocab::new(file, defaults)?;
        // Files of this kind may say otherwise, but the models expect it.
        let add_bos = matches!(name, Some("gemma4" | "granite-embed-multi-311m"));
        let add_bos = add_bos || file.add_bos.unwrap_or(pre.add_bos);
        let add_sep = file.add_sep.unwrap_or(pre.add_sep);
        let model = Model::Bpe(Bpe::new(&vocab, &file.merges, pre)?);
        let ends = (add_bos, file.add_eos.unwrap_or(false), add_sep);
        Self::build(file, vocab, model, ends, false, warnings)
    }

    fn spm(file: &GgufVocab) -> Result<Self, TokenizerError> {
        let defaults = SpecialIds {
            bos: Some(1),
            eos: Some(2),
            unk: Some(0),
            ..SpecialIds::default()
        };
        let vocab = Vocab::new(file, defaults)?;
        let longest = vocab.texts.iter().map(|text| text.len()).max().unwrap_or(0);
        let ends = (
            file.add_bos.unwrap_or(true),
            file.add_eos.unwrap_or(false),
            false,
        );
        let prefix = file.add_space_prefix.unwrap_or(true);
        Self::build(
            file,
            vocab,
            Model::Spm { longest },
            ends,
            prefix,
            Vec::new(),
        )
    }

    fn wordpiece(file: &GgufVocab) -> Result<Self, TokenizerError> {
        let defaults = SpecialIds {
            bos: Some(101),
            unk: Some(100),
            sep: Some(102),
            pad: Some(0),
            mask: Some(103),
            ..SpecialIds::default()
        };
        let vocab = Vocab::new(file, defaults)?;
        let model = Model::WordPiece(WordPiece::new(&vocab, file));
        // The vocabulary's CLS is its BOS; both ends are always set.
        Self::build(file, vocab, model, (true, false, true), false, Vec::new())
    }

    fn unigram(file: &GgufVocab) -> Result<Self, TokenizerError> {
        let defaults = SpecialIds {
            eos: Some(1),
            unk: Some(2),
            pad: Some(0),
            ..SpecialIds::default()
        };
        let vocab = Vocab::new(file, defaults)?;
        let model = Model::Unigram(Unigram::new(&vocab, file)?);
        let ends = (
            file.add_bos.unwrap_or(false),
            file.add_eos.unwrap_or(true),
            false,
        );
        let prefix = file.add_space_prefix.unwrap_or(false);
        Self::build(file, vocab, model, ends, prefix, Vec::new())
    }

    fn build(
        file: &GgufVocab,
        vocab: Vocab,
        model: Model,
        (add_bos, add_eos, add_sep): (bool, bool, bool),
        add_space_prefix: bool,
        mut warnings: Vec<String>,
    ) -> Result<Self, TokenizerError> {
        let SpecialIds { bos, eos, sep, .. } = vocab.special;
        for (added, id, name) in [
            (add_bos, bos, "bos"),
            (add_eos, eos, "eos"),
            (add_sep, sep.or(eos), "seperator"),
        ] {
            if added && id.is_none() {
                warnings.push(format!(
                    "tokenizer.ggml.{name}_token_id is missing or out of range: it is not added"
                ));
            }
        }
        Ok(GgufTokenizer {
            special: SpecialTokens::new(&vocab)?,
            vocab,
            model,
            add_bos,
            add_eos,
            add_sep,
            add_space_prefix,
            pre: file.pre.clone(),
            warnings,
        })
    }

    pub(super) fn kind(&self) -> TokenizerKind {
        match &self.model {
            Model::Bpe(bpe) if bpe.byte_level() => TokenizerKind::ByteLevelBpe,
            Model::Bpe(_) => TokenizerKind::TextBpe,
            Model::Spm { .. } => TokenizerKind::SentencePieceBpe,
            Model::Unigram(_) => TokenizerKind::Unigram,
            Model::WordPiece(_) => TokenizerKind::WordPiece,
        }
    }

    pub(super) fn encode(&self, text: &str, options: EncodeOptions) -> Vec<TokenId> {
        let special = self.vocab.special;
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        if options.add_special && self.add_bos {
            out.extend(special.bos);
        }
        let mut after_special = true;
        for fragment in self.special.split(text, options.parse_special) {
            match fragment {
                Fragment::Token(id) => {
                    out.push(id);
                    after_special = true;
                }
                Fragment::Text(range) => {
                    self.encode_plain(&text[range], after_special, &mut out);
                    after_special = false;
                }
            }
        }
        if options.add_special {
            if self.add_eos {
                out.extend(special.eos);
            }
            if self.add_sep && matches!(self.model, Model::WordPiece(_)) {
                out.extend(special.sep.or(special.eos));
            }
        }
        out
    }

    fn encode_plain(&self, text: &str, after_special: bool, out: &mut Vec<TokenId>) {
        match &self.model {
            Model::Bpe(bpe) => bpe.encode(&self.vocab, text, out),
            Model::Spm { longest } if self.add_space_prefix && after_special => {
                spm::encode(&self.vocab, *longest, &format!(" {text}"), out);
            }
            Model::Spm { longest } => spm::encode(&self.vocab, *longest, text, out),
            Model::Unigram(unigram) => unigram.encode(&self.vocab, text, out),
            Model::WordPiece(wordpiece) => wordpiece.encode(&self.vocab, text, out),
        }
    }

    /// Whether the token is not text: it is left out where special tokens are.
    pub(super) fn is_special(&self, id: TokenId) -> bool {
        matches!(
            self.vocab.kind(id),
            Some(TokenKind::Control | TokenKind::Unknown)
        )
    }

    pub(super) fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        let text = self.vocab.texts.get(id as usize)?;
        Some(match self.vocab.kind(id)? {
            TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => {
                text.as_bytes().into()
            }
            TokenKind::Byte => match bytes::fallback_byte(text) {
                Some(byte) => vec![byte],
                None => text.as_bytes().into(),
            },
            TokenKind::Normal | TokenKind::Unused => match &self.model {
                Model::Bpe(bpe) if bpe.byte_level() => bytes::from_alphabet(text),
                _ => text.replace('▁', " ").into_bytes(),
            },
        })
    }

    /// Whether a space at the very start of a decoded text is an artefact of encoding.
    pub(super) fn strips_first_space(&self) -> bool {
        self.add_space_prefix || matches!(self.model, Model::WordPiece(_))
    }
}
