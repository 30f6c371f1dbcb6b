//! From the tokenizer of a Hugging Face folder to the vocabulary of a GGUF file, and that into one.
//!
//! llama.cpp knows pre-tokenizers by name. Which name belongs to a `tokenizer.json` is found by trying
//! them: the right one cuts a text full of borderline cases into the same words. A vocabulary of text
//! with `▁` for spaces becomes the kind that merges by scores, so merges turn into scores.

use super::error::TokenizerError;
use super::hf::HfTokenizer;
use super::pretokenize::split;
use super::{EncodeOptions, GgufVocab, SpecialIds, Tokenizer, TokenizerKind, pretokenizers};
use crate::Result;
use crate::gguf::{ArrayBuf, Writer};
use ferrum_types::TokenId;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

/// Names that are tried, those of most models first.
const NAMES: [&str; 16] = [
    "gpt-2",
    "llama-bpe",
    "smaug-bpe",
    "qwen2",
    "smollm",
    "tekken",
    "qwen35",
    "gpt-4o",
    "deepseek-v3",
    "deepseek-llm",
    "deepseek-coder",
    "falcon",
    "kimi-k2",
    "exaone-moe",
    "seed-coder",
    "viking",
];

/// Borderline cases of every rule: contractions, digits, runs of white space and breaks, cases,
/// scripts, marks, signs.
const PROBE: &str = "Hello World's END'S we'LL I'm y'all'd  a   b\t\tc \n d\n\n\n  e\r\n f 1 12 123 1234 \
12345 1,234.5 x1y22z333 ²³ ½ ٣٤ 3.14e-7 ... !?!\n //a/b\n\n //\n #$%^&* \"quoted\" `code` camelCase \
HTTPServer iPhone éÉ İı ßẞ e\u{301}a\u{300} नमस्ते ไทย 한국어 조선 日本語カタカナひらがな中文，。！ \
русский язык ΑΒΓ עברית العربية 😀👩‍👩‍👧 🇩🇪 \u{a0}\u{3000}x_y-z ~|<>= -- a\u{200b}b    ";

/// Token types of the format.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

impl GgufVocab {
    /// The vocabulary of a Hugging Face folder as llama.cpp's converter writes it, filled up with unused
    /// tokens to `rows`, the rows of the model's embedding.
    ///
    /// # Errors
    /// [`TokenizerError`], also for a tokenizer that the format cannot say.
    pub fn from_hf_dir(dir: impl AsRef<Path>, rows: usize) -> Result<Self, TokenizerError> {
        let dir = dir.as_ref();
        let hf = HfTokenizer::from_dir(dir)?;
        let bad = |reason: String| TokenizerError::BadFile {
            path: dir.join("tokenizer.json"),
            reason,
        };
        if hf.size > rows {
            return Err(bad(format!(
                "token id {}, expected ids below the {rows} rows of the model's embedding",
                hf.size - 1
            )));
        }
        let file = serde_json::to_value(hf.inner()).map_err(|e| bad(e.to_string()))?;
        let mut vocab = match hf.kind {
            TokenizerKind::ByteLevelBpe => byte_level(&hf, &file).map_err(bad)?,
            TokenizerKind::TextBpe => text_bpe(&file).map_err(bad)?,
            other => {
                return Err(bad(format!(
                    "a tokenizer of kind {other}, expected byte-pair encoding\nhint: convert the \
                     model with llama.cpp's convert_hf_to_gguf.py"
                )));
            }
        };
        vocab.fill(&hf, &file, rows);
        vocab.ends(dir, hf.special)?;
        Ok(vocab)
    }

    /// Texts and types of all tokens.
    fn fill(&mut self, hf: &HfTokenizer, file: &Value, rows: usize) {
        let spm = self.model == "llama";
        let mut tokens: Vec<Option<String>> = vec![None; rows];
        let mut types = vec![UNUSED; rows];
        let words = file.pointer("/model/vocab").and_then(Value::as_object);
        for (text, id) in words.into_iter().flatten() {
            let Some(id) = id.as_u64().map(|id| id as usize).filter(|&id| id < rows) else {
                continue;
            };
            tokens[id] = Some(text.clone());
            types[id] = match super::bytes::fallback_byte(text).filter(|_| spm) {
                Some(_) => BYTE,
                None => NORMAL,
            };
        }
        for (&id, added) in hf.inner().get_added_tokens_decoder().iter() {
            let id = id as usize;
            if id >= rows {
                continue;
            }
            let text = &added.content;
            types[id] = match added.special || looks_special(text) {
                true => CONTROL,
                false => USER_DEFINED,
            };
            // In the plain vocabulary of byte-level models `▁` is a letter as any other.
            tokens[id] = Some(match types[id] {
                USER_DEFINED => text.replace('▁', " "),
                _ => text.clone(),
            });
        }
        if let Some(unk) = hf.special.unk.filter(|_| spm)
            && let Some(kind) = types.get_mut(unk as usize)
        {
            *kind = UNKNOWN;
        }
        let named = tokens.into_iter().enumerate();
        self.tokens = named
            .map(|(id, text)| text.unwrap_or_else(|| format!("[PAD{id}]")))
            .collect();
        self.token_types = Some(types);
        if spm {
            self.scores = Some(scores(&self.tokens, &self.merges));
            self.merges.clear();
        }
    }

    /// Ids of tokens with a role, and what is put around a text.
    fn ends(&mut self, dir: &Path, special: SpecialIds) -> Result<(), TokenizerError> {
        let SpecialIds {
            bos,
            eos,
            unk,
            sep,
            pad,
            cls,
            mask,
            ..
        } = special;
        let config = dir.join("config.json");
        let config = match config.exists() {
            true => Some(crate::HfConfig::open(config)?),
            false => None,
        };
        let from_config = |key: &str| -> Result<Option<TokenId>> {
            let ids = match &config {
                Some(config) if config.value(key).is_some_and(|v| v.as_u64().is_some()) => {
                    config.token_ids(key)?
                }
                _ => Vec::new(),
            };
            Ok(ids
                .first()
                .copied()
                .filter(|&id| (id as usize) < self.tokens.len()))
        };
        let or_config = |id: Option<TokenId>, key: &str| match id {
            Some(id) => Ok(Some(id)),
            None => from_config(key),
        };
        let (bos, eos) = (
            or_config(bos, "bos_token_id")?,
            or_config(eos, "eos_token_id")?,
        );
        (self.pad, self.bos, self.eos) = (or_config(pad, "pad_token_id")?, bos, eos);
        (self.unk, self.sep, self.cls, self.mask) = (unk, sep, cls, mask);
        let tokenizer = Tokenizer::from_hf_dir(dir)?;
        let around = tokenizer.encode("a", EncodeOptions::TEXT)?;
        let inside = tokenizer.encode("a", EncodeOptions::PLAIN)?;
        let longer = around.len() > inside.len();
        self.add_bos = Some(longer && bos.is_some() && around.first() == bos.as_ref());
        self.add_eos = Some(longer && eos.is_some() && around.last() == eos.as_ref());
        Ok(())
    }

    /// Writes the tokenizer's keys: the inverse of [`from_gguf`](Self::from_gguf), less what belongs to
    /// the model.
    ///
    /// # Errors
    /// As [`Writer::set`].
    pub fn write(&self, out: &mut Writer) -> Result<()> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        out.set(&key("model"), &*self.model)?;
        if let Some(pre) = &self.pre {
            out.set(&key("pre"), &**pre)?;
        }
        let tokens = ArrayBuf::from_strs(self.tokens.iter().map(String::as_str));
        out.set(&key("tokens"), &tokens)?;
        if let Some(scores) = &self.scores {
            out.set(
                &key("scores"),
                &ArrayBuf::from_numbers(scores.iter().copied()),
            )?;
        }
        if let Some(types) = &self.token_types {
            let types = ArrayBuf::from_numbers(types.iter().copied());
            out.set(&key("token_type"), &types)?;
        }
        if !self.merges.is_empty() {
            let merges = ArrayBuf::from_strs(self.merges.iter().map(String::as_str));
            out.set(&key("merges"), &merges)?;
        }
        let ids = [
            ("bos", self.bos),
            ("eos", self.eos),
            ("eot", self.eot),
            ("eom", self.eom),
            ("unknown", self.unk),
            ("seperator", self.sep),
            ("padding", self.pad),
            ("cls", self.cls),
            ("mask", self.mask),
            ("fim_pre", self.fim.prefix),
            ("fim_suf", self.fim.suffix),
            ("fim_mid", self.fim.middle),
            ("fim_pad", self.fim.pad),
            ("fim_rep", self.fim.repo),
            ("fim_sep", self.fim.file),
        ];
        for (name, id) in ids {
            if let Some(id) = id {
                out.set(&key(&format!("{name}_token_id")), id)?;
            }
        }
        let flags = [
            ("add_bos_token", self.add_bos),
            ("add_eos_token", self.add_eos),
            ("add_sep_token", self.add_sep),
            ("add_space_prefix", self.add_space_prefix),
            ("remove_extra_whitespaces", self.remove_extra_whitespaces),
        ];
        for (name, flag) in flags {
            if let Some(flag) = flag {
                out.set(&key(name), flag)?;
            }
        }
        if let Some(template) = &self.chat_template {
            out.set("tokenizer.chat_template", &**template)?;
        }
        Ok(())
    }
}

/// Markers that some files do not call special.
fn looks_special(text: &str) -> bool {
    let bracketed = |open: &str, close: &str| text.starts_with(open) && text.ends_with(close);
    matches!(text, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
        || bracketed("<|", "|>")
        || bracketed("<｜", "｜>")
}

/// The steps of a part of the file, a sequence taken apart.
fn steps(file: &Value, part: &str, list: &str) -> Vec<Value> {
    let part = file.get(part).cloned().unwrap_or_default();
    match part.get(list).and_then(Value::as_array) {
        Some(steps) => steps.clone(),
        None => vec![part],
    }
}

/// The merges of a `tokenizer.json`, in either spelling.
fn merges(file: &Value) -> Result<Vec<(String, String)>, String> {
    let list = file.pointer("/model/merges").and_then(Value::as_array);
    let pair = |merge: &Value| match merge {
        Value::String(text) => {
            let (one, other) = text.split_once(' ')?;
            Some((one.to_owned(), other.to_owned()))
        }
        Value::Array(pair) => match pair.as_slice() {
            [Value::String(one), Value::String(other)] => Some((one.clone(), other.clone())),
            _ => None,
        },
        _ => None,
    };
    let list = list.ok_or("no merges, expected a byte-pair vocabulary")?;
    list.iter()
        .map(|merge| pair(merge).ok_or_else(|| format!("merge {merge}, expected a pair")))
        .collect()
}

fn joined(merges: Vec<(String, String)>) -> Vec<String> {
    let pairs = merges.into_iter();
    pairs.map(|(one, other)| format!("{one} {other}")).collect()
}

/// A vocabulary of bytes in the GPT-2 alphabet.
fn byte_level(hf: &HfTokenizer, file: &Value) -> Result<GgufVocab, String> {
    let flag = |key: &str| file.pointer(key).and_then(Value::as_bool).unwrap_or(false);
    let prefixed = |step: &Value| step.get("add_prefix_space") == Some(&Value::Bool(true));
    if steps(file, "pre_tokenizer", "pretokenizers")
        .iter()
        .any(prefixed)
    {
        return Err(
            "add_prefix_space is true, expected false: GGUF files cannot say it of a byte-level \
             vocabulary"
                .into(),
        );
    }
    let name = pre_name(hf, flag("/model/ignore_merges"))?;
    Ok(GgufVocab {
        model: "gpt2".into(),
        pre: Some(name.into()),
        merges: joined(merges(file)?),
        ..GgufVocab::default()
    })
}

/// The first name that cuts the probe as the file does.
fn pre_name(hf: &HfTokenizer, ignore_merges: bool) -> Result<&'static str, String> {
    let mut pieces = PreTokenizedString::from(PROBE);
    if let Some(pre) = hf.inner().get_pre_tokenizer() {
        pre.pre_tokenize(&mut pieces).map_err(|e| e.to_string())?;
    }
    let pieces = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
    let expected: Vec<_> = pieces.into_iter().map(|(_, at, _)| at.0..at.1).collect();
    let find = |wanted: &dyn Fn(&pretokenizers::PreTokenizer) -> bool| {
        let fits = |name: &&&str| {
            pretokenizers::by_name(name)
                .is_some_and(|pre| wanted(&pre) && split(&pre.rules, PROBE) == expected)
        };
        NAMES.iter().find(fits).copied()
    };
    let exact = find(&|pre| pre.ignore_merges == ignore_merges);
    exact.or_else(|| find(&|_| true)).ok_or_else(|| {
        "a pre-tokenizer that no name of llama.cpp is known for\nhint: convert the model with \
         llama.cpp's convert_hf_to_gguf.py"
            .into()
    })
}

/// A vocabulary of text with `▁` for spaces.
fn text_bpe(file: &Value) -> Result<GgufVocab, String> {
    if file.pointer("/model/byte_fallback") != Some(&Value::Bool(true)) {
        return Err("a byte-pair vocabulary of text without byte_fallback, expected it".into());
    }
    let is = |step: &Value, kind: &str| step.get("type").and_then(Value::as_str) == Some(kind);
    let normalizers = steps(file, "normalizer", "normalizers");
    let prepends = normalizers.iter().any(|step| is(step, "Prepend"));
    let metaspace = steps(file, "pre_tokenizer", "pretokenizers")
        .iter()
        .any(|step| {
            is(step, "Metaspace")
                && step.get("prepend_scheme").and_then(Value::as_str) != Some("never")
        });
    Ok(GgufVocab {
        model: "llama".into(),
        pre: Some("default".into()),
        merges: joined(merges(file)?),
        add_space_prefix: Some(prepends || metaspace),
        ..GgufVocab::default()
    })
}

/// Scores under which merging by score is merging by rank: less for each later merge. Tokens that no
/// merge makes are letters and markers, which stand below or beside.
fn scores(tokens: &[String], merges: &[String]) -> Vec<f32> {
    let mut ranks = HashMap::new();
    for (rank, merge) in merges.iter().enumerate() {
        let made: String = merge.chars().filter(|&c| c != ' ').collect();
        ranks.entry(made).or_insert(rank);
    }
    let letters: HashSet<&str> = tokens
        .iter()
        .map(String::as_str)
        .filter(|text| text.chars().count() == 1)
        .collect();
    let score = |text: &String| match ranks.get(text) {
        Some(&rank) => -(rank as f32),
        None if letters.contains(text.as_str()) => -(merges.len() as f32),
        None => 0.0,
    };
    tokens.iter().map(score).collect()
}
