//! The vocabulary of a GGUF file: as the file has it, and as the tokenizers use it.

use super::error::TokenizerError;
use super::{FimIds, SpecialIds};
use crate::Gguf;
use ferrum_types::TokenId;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;

/// What a GGUF file says about its tokenizer (`tokenizer.ggml.*` and `tokenizer.chat_template`).
///
/// Plain data, so that a vocabulary can be given from elsewhere than a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2`, `llama`, `bert`, `t5`, …
    pub model: String,
    /// `tokenizer.ggml.pre`: the name of the pre-tokenizer.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: the text of each token.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`: one per token.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
    /// 6 byte; one per token.
    pub token_types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`: pairs with a space between, best first.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<TokenId>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<TokenId>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<TokenId>,
    /// `tokenizer.ggml.eom_token_id`.
    pub eom: Option<TokenId>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<TokenId>,
    /// `tokenizer.ggml.seperator_token_id` (so spelled in the format).
    pub sep: Option<TokenId>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<TokenId>,
    /// `tokenizer.ggml.cls_token_id`.
    pub cls: Option<TokenId>,
    /// `tokenizer.ggml.mask_token_id`.
    pub mask: Option<TokenId>,
    /// `tokenizer.ggml.fim_pre_token_id` and its like.
    pub fim: FimIds,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_sep_token`.
    pub add_sep: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`.
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`: the normaliser of `t5`.
    pub precompiled_charsmap: Option<Vec<u8>>,
    /// `tokenizer.ggml.normalizer.lowercase`, for `bert`.
    pub lowercase: Option<bool>,
    /// `tokenizer.ggml.normalizer.strip_accents`, for `bert`.
    pub strip_accents: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
    /// `general.name`: some models' special tokens swallow the white space after them, which the
    /// format has no key for.
    pub model_name: Option<String>,
    /// `general.architecture`, for the same reason.
    pub architecture: Option<String>,
}

impl GgufVocab {
    /// Takes the tokenizer's keys out of a file.
    ///
    /// # Errors
    /// [`TokenizerError::Format`] when `tokenizer.ggml.model` or the tokens are missing, or a key
    /// has a value of another type.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, TokenizerError> {
        let owned = |list: Vec<&str>| list.into_iter().map(str::to_owned).collect();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let id = |name: &str| gguf.u32(&key(&format!("{name}_token_id")));
        let either = |name: &str, older: &str| {
            id(name).and_then(|found| match found {
                Some(_) => Ok(found),
                None => id(older),
            })
        };
        let flag = |name: &str| gguf.bool(&key(name));
        let text = |name: &str| gguf.str(name).map(|text| text.map(str::to_owned));
        // Bytes are written as either 8-bit type.
        let charsmap = gguf.i32s(&key("precompiled_charsmap"))?;
        Ok(GgufVocab {
            model: gguf.require_str(&key("model"))?.to_owned(),
            pre: text(&key("pre"))?,
            tokens: owned(gguf.require_strs(&key("tokens"))?),
            scores: gguf.f32s(&key("scores"))?,
            token_types: gguf.i32s(&key("token_type"))?,
            merges: gguf.strs(&key("merges"))?.map(owned).unwrap_or_default(),
            bos: id("bos")?,
            eos: id("eos")?,
            eot: id("eot")?,
            eom: id("eom")?,
            unk: id("unknown")?,
            sep: id("seperator")?,
            pad: id("padding")?,
            cls: id("cls")?,
            mask: id("mask")?,
            fim: FimIds {
                prefix: either("fim_pre", "prefix")?,
                suffix: either("fim_suf", "suffix")?,
                middle: either("fim_mid", "middle")?,
                pad: id("fim_pad")?,
                repo: id("fim_rep")?,
                file: id("fim_sep")?,
            },
            add_bos: flag("add_bos_token")?,
            add_eos: flag("add_eos_token")?,
            add_sep: flag("add_sep_token")?,
            add_space_prefix: flag("add_space_prefix")?,
            remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
            precompiled_charsmap: charsmap
                .map(|bytes| bytes.into_iter().map(|byte| byte as u8).collect()),
            lowercase: flag("normalizer.lowercase")?,
            strip_accents: flag("normalizer.strip_accents")?,
            chat_template: text("tokenizer.chat_template")?,
            model_name: text("general.name")?,
            architecture: text("general.architecture")?,
        })
    }
}

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// White space that a special token swallows beside itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Strip {
    pub(super) left: bool,
    pub(super) right: bool,
}

/// Tokens by id and by text, with kinds, scores and special ids checked.
#[derive(Debug)]
pub(super) struct Vocab {
    pub(super) texts: Vec<Arc<str>>,
    pub(super) kinds: Vec<TokenKind>,
    pub(super) scores: Vec<f32>,
    pub(super) ids: HashMap<Arc<str>, TokenId, RandomState>,
    /// The token of each byte, as byte-fallback vocabularies name them.
    pub(super) bytes: Vec<Option<TokenId>>,
    pub(super) special: SpecialIds,
    /// Tokens that end a generation, the file's own EOS first.
    pub(super) eog_tokens: Vec<TokenId>,
    pub(super) strips: HashMap<TokenId, Strip>,
    /// Tokens that fill in the middle, as far as the file names them.
    pub(super) fim: FimIds,
}

/// Names that end a turn, in the order in which one is chosen as the end-of-turn token.
const END_OF_TURN: [&str; 11] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Further names that end a generation.
const ENDS: [&str; 19] = [
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<reponame>",
    "<|file_sep|>",
];

/// Names that are text of the harmony format rather than control tokens.
const HARMONY: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The ids among `id_of`'s tokens that end a generation by their name.
pub(super) fn eog_token_ids(id_of: impl Fn(&str) -> Option<TokenId>) -> Vec<TokenId> {
    let found = |names: &[&str]| names.iter().any(|name| id_of(name).is_some());
    // In the harmony format `<|end|>` only ends a message; the generation goes on.
    let harmony = (found(&["<|return|>"]) && found(&["<|call|>", "<|calls|>"]))
        || (found(&["<|flush|>"]) && found(&["<|call|>", "<|calls|>"]));
    let plain_s = found(&["<|tool_response>", "<|plamo:eos|>"]);
    END_OF_TURN
        .iter()
        .chain(&ENDS)
        .filter(|&&name| match name {
            "<|end|>" => !harmony,
            "</s>" => !plain_s,
            _ => true,
        })
        .filter_map(|name| id_of(name))
        .collect()
}

impl Vocab {
    /// Checks `file` and takes the token tables out of it.
    pub(super) fn new(file: &GgufVocab, defaults: SpecialIds) -> Result<Self, TokenizerError> {
        let count = file.tokens.len();
        let bad = |field, reason| Err(TokenizerError::BadVocab { field, reason });
        if count == 0 {
            return bad(
                "tokenizer.ggml.tokens",
                "no tokens, expected at least one".into(),
            );
        }
        if u32::try_from(count).is_err() {
            return bad(
                "tokenizer.ggml.tokens",
                format!("{count} tokens do not fit 32-bit ids"),
            );
        }
        let scores = match &file.scores {
            Some(scores) if scores.len() < count => {
                let reason = format!("found {} scores, expected {count}", scores.len());
                return bad("tokenizer.ggml.scores", reason);
            }
            // Made comparable: no NaN, one zero.
            Some(scores) => {
                let order = |&s: &f32| {
                    if s.is_nan() {
                        f32::NEG_INFINITY
                    } else {
                        s + 0.0
                    }
                };
                scores[..count].iter().map(order).collect()
            }
            None => vec![0.0; count],
        };
        let kinds = match &file.token_types {
            Some(types) if types.len() < count => {
                let reason = format!("found {} types, expected {count}", types.len());
                return bad("tokenizer.ggml.token_type", reason);
            }
            Some(types) => types[..count].iter().map(|&t| kind_of(t)).collect(),
            None => vec![TokenKind::Normal; count],
        };
        let mut texts: Vec<Arc<str>> = Vec::with_capacity(count);
        let mut ids = HashMap::with_capacity_and_hasher(count, RandomState::default());
        for (id, text) in file.tokens.iter().enumerate() {
            let text: Arc<str> = if text.is_empty() {
                format!("[EMPTY_{id}]").into()
            } else {
                text.as_str().into()
            };
            texts.push(text.clone());
            ids.insert(text, id as TokenId);
        }
        let bytes = (0..=255u8)
            .map(|byte| ids.get(format!("<0x{byte:02X}>").as_str()).copied())
            .collect();
        let special = special_ids(file, defaults, count);
        let mut vocab = Vocab {
            texts,
            kinds,
            scores,
            ids,
            bytes,
            special,
            eog_tokens: Vec::new(),
            strips: HashMap::new(),
            fim: fim_ids(file.fim, count),
        };
        vocab.find_ends(file);
        vocab.find_strips(file);
        Ok(vocab)
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(super) fn id(&self, text: &str) -> Option<TokenId> {
        self.ids.get(text).copied()
    }

    pub(super) fn kind(&self, id: TokenId) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The token of `text` if text may become it: control tokens never come out of plain text.
    pub(super) fn plain_id(&self, text: &str) -> Option<TokenId> {
        use TokenKind::{Normal, Unused, UserDefined};
        self.id(text)
            .filter(|&id| matches!(self.kind(id), Some(Normal | UserDefined | Unused)))
    }

    /// The token that stands for a byte no token covers, or else the unknown token.
    pub(super) fn byte_id(&self, byte: u8) -> Option<TokenId> {
        self.bytes[byte as usize]
            .or_else(|| {
                self.id(byte
                    .is_ascii()
                    .then(|| char::from(byte))?
                    .encode_utf8(&mut [0; 4]))
            })
            .or(self.special.unk)
    }

    fn find_ends(&mut self, file: &GgufVocab) {
        let typed = file.token_types.is_some();
        let named = eog_token_ids(|name| {
            // `</s>` is also a tag people write: as a normal token it ends nothing.
            let tag =
                |&id: &TokenId| typed && name == "</s>" && self.kind(id) == Some(TokenKind::Normal);
            self.id(name).filter(|id| !tag(id))
        });
        for &id in &named {
            self.kinds[id as usize] = TokenKind::Control;
        }
        for name in HARMONY {
            if let Some(id) = self.id(name) {
                self.kinds[id as usize] = TokenKind::UserDefined;
            }
        }
        if let Some(id) = self.id("<|end|>").filter(|id| !named.contains(id)) {
            self.kinds[id as usize] = TokenKind::UserDefined;
        }
        let eot = self.special.eot.or_else(|| {
            END_OF_TURN
                .iter()
                .filter_map(|name| self.id(name))
                .find(|id| named.contains(id))
        });
        self.special.eot = eot;
        let eom = file.eom.filter(|&id| (id as usize) < self.len());
        for id in [self.special.eos, eot, eom]
            .into_iter()
            .flatten()
            .chain(named)
        {
            if !self.eog_tokens.contains(&id) {
                self.eog_tokens.push(id);
            }
        }
    }

    /// Which special tokens swallow white space: known by model, as the format has no key for it.
    fn find_strips(&mut self, file: &GgufVocab) {
        let holds = |text: &Option<String>, parts: &[&str]| {
            let text = text.as_deref().unwrap_or("").to_lowercase();
            parts.iter().any(|part| text.contains(part))
        };
        let left = Strip {
            left: true,
            right: false,
        };
        if holds(&file.pre, &["jina-v2-de", "jina-v2-es", "jina-v2-code"])
            || holds(&file.architecture, &["nomic-bert-moe", "jina-bert-v3"])
        {
            self.strips.extend(self.id("<mask>").map(|id| (id, left)));
        } else if holds(&file.model_name, &["phi-3", "phi3"]) {
            let right = Strip {
                left: false,
                right: true,
            };
            for id in 0..self.len() as TokenId {
                let text = &*self.texts[id as usize];
                if (self.is_special(id) && !["<unk>", "<s>", "<|endoftext|>"].contains(&text))
                    || text == "</s>"
                {
                    self.strips.insert(id, right);
                }
            }
        } else if holds(&file.model_name, &["modern-bert"]) {
            self.strips.extend(self.id("[MASK]").map(|id| (id, left)));
        }
    }

    /// Whether the token is set apart from text before anything else.
    pub(super) fn is_special(&self, id: TokenId) -> bool {
        use TokenKind::{Control, Unknown, UserDefined};
        matches!(self.kind(id), Some(Control | Unknown | UserDefined))
    }
}

fn kind_of(token_type: i32) -> TokenKind {
    match token_type {
        2 => TokenKind::Unknown,
        3 => TokenKind::Control,
        4 => TokenKind::UserDefined,
        5 => TokenKind::Unused,
        6 => TokenKind::Byte,
        _ => TokenKind::Normal,
    }
}

fn fim_ids(file: FimIds, count: usize) -> FimIds {
    let known = |id: Option<TokenId>| id.filter(|&id| (id as usize) < count);
    FimIds {
        prefix: known(file.prefix),
        suffix: known(file.suffix),
        middle: known(file.middle),
        pad: known(file.pad),
        repo: known(file.repo),
        file: known(file.file),
    }
}

fn special_ids(file: &GgufVocab, defaults: SpecialIds, count: usize) -> SpecialIds {
    let pick = |given: Option<TokenId>, default: Option<TokenId>| {
        given
            .filter(|&id| (id as usize) < count)
            .or(default.filter(|&id| (id as usize) < count))
    };
    SpecialIds {
        bos: pick(file.bos, defaults.bos),
        eos: pick(file.eos, defaults.eos),
        eot: pick(file.eot, defaults.eot),
        unk: pick(file.unk, defaults.unk),
        sep: pick(file.sep, defaults.sep),
        pad: pick(file.pad, defaults.pad),
        cls: pick(file.cls, defaults.cls.or(file.bos)),
        mask: pick(file.mask, defaults.mask),
    }
}
