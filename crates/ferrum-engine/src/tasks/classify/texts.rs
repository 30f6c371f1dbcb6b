//! Texts to the tokens that a text tower has learned from.

use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_formats::{HfConfig, HfFolder};
use ferrum_models::clip::{ClipKind, ClipSpec};
use ferrum_types::{Error, Result, TokenId};

/// What is done to a text before and after its tokenizer.
#[derive(Debug)]
pub(super) struct TextPreparation {
    tokenizer: Tokenizer,
    /// Tokens of the longest text.
    most: usize,
    form: Form,
}

#[derive(Debug)]
enum Form {
    /// CLIP: the tokenizer adds a token before and one after.
    Clip,
    /// SigLIP: one token ends the text, and padding follows up to `most`, which attention reads as the rest.
    Siglip {
        /// The tokenizer's class lower-cases.
        lower_case: bool,
        /// It also leaves punctuation out, and counts any white space as one space.
        words_only: bool,
        begin: Option<TokenId>,
        end: TokenId,
        padding: TokenId,
        /// Padding comes first.
        left: bool,
    },
}

impl TextPreparation {
    /// What the files of a folder say.
    pub(super) fn read(folder: &HfFolder, spec: &ClipSpec) -> Result<Self> {
        let tokenizer =
            Tokenizer::from_hf_dir(&folder.dir).map_err(|e| Error::Model(e.to_string()))?;
        let form = match spec.kind {
            ClipKind::Clip => Form::Clip,
            ClipKind::Siglip => siglip(folder, &tokenizer)?,
        };
        Ok(Self {
            tokenizer,
            most: spec.text.positions,
            form,
        })
    }

    /// The tokens of a text, and whether its end was cut off.
    pub(super) fn tokens(&self, text: &str) -> Result<(Vec<TokenId>, bool)> {
        let encode = |text: &str, options| {
            let tokens = self.tokenizer.encode(text, options);
            tokens.map_err(|e| Error::invalid("encode", e.to_string()))
        };
        match &self.form {
            Form::Clip => {
                let mut tokens = encode(text, EncodeOptions::TEXT)?;
                let cut = tokens.len() > self.most;
                // The token that ends the text stays.
                if cut && let Some(end) = tokens.pop() {
                    tokens.truncate(self.most - 1);
                    tokens.push(end);
                }
                Ok((tokens, cut))
            }
            Form::Siglip {
                lower_case,
                words_only,
                begin,
                end,
                padding,
                left,
            } => {
                let text = canonical(text, *lower_case, *words_only);
                let mut tokens: Vec<_> = begin.iter().copied().collect();
                tokens.extend(encode(&text, EncodeOptions::PLAIN)?);
                let cut = tokens.len() >= self.most;
                tokens.truncate(self.most - 1);
                tokens.push(*end);
                let fill = vec![*padding; self.most - tokens.len()];
                let at = if *left { 0 } else { tokens.len() };
                tokens.splice(at..at, fill);
                Ok((tokens, cut))
            }
        }
    }
}

fn siglip(folder: &HfFolder, tokenizer: &Tokenizer) -> Result<Form> {
    let path = folder.dir.join("tokenizer_config.json");
    let config = match path.is_file() {
        true => HfConfig::open(&path)?,
        false => HfConfig::from_slice(&path, b"{}")?,
    };
    let class = config.str("tokenizer_class")?.unwrap_or("SiglipTokenizer");
    let special = tokenizer.special();
    let missing = |what: &str| Error::Model(format!("{}: found no {what}", path.display()));
    let end = special.eos.ok_or_else(|| missing("eos_token"))?;
    let begin = match config.bool("add_bos_token")?.unwrap_or(false) {
        true => Some(special.bos.ok_or_else(|| missing("bos_token"))?),
        false => None,
    };
    Ok(Form::Siglip {
        lower_case: config.bool("do_lower_case")?.unwrap_or(true),
        words_only: class.starts_with("SiglipTokenizer"),
        begin,
        end,
        padding: special.pad.unwrap_or(end),
        left: match config.str("padding_side")? {
            Some(side) => side == "left",
            None => class.starts_with("Siglip2Tokenizer"),
        },
    })
}

/// The text as the tokenizer's class changes it before its vocabulary is asked.
fn canonical(text: &str, lower_case: bool, words_only: bool) -> String {
    let text = match lower_case {
        true => text.to_lowercase(),
        false => text.to_owned(),
    };
    if !words_only {
        return text;
    }
    let text = text.replace('▁', " ");
    let text = text.replace(|c: char| c.is_ascii_punctuation(), "");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_become_plain_words() {
        let text = "  This is\ta  PHOTO of\n\"a cat\", isn't it? ▁ÄÖ—";
        assert_eq!(
            canonical(text, true, true),
            "this is a photo of a cat isnt it äö—"
        );
        assert_eq!(canonical("A b!", true, false), "a b!");
        assert_eq!(canonical("A b!", false, true), "A b");
    }
}
