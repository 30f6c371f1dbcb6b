//! The steps of a `tokenizer.json` that match regular expressions: its pre-tokenizer, and
//! replacements in its normalizer.
//!
//! The `tokenizers` crate matches with `fancy-regex`, which gives up where an expression backtracks
//! more than a million times, and takes that for the end of the matches: the rest of a long text
//! is then one word, and its ids are wrong. Here, an expression with a [`Rule`] is matched in linear
//! time, and any other says that it gave up.

use super::pretokenize::Rule;
use super::pretokenizers::GPT2;
use fancy_regex::Regex;
use serde::{Deserialize, Serialize};
use std::panic::resume_unwind;
use std::sync::Arc;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::pattern::{Invert, Pattern};
use tokenizers::{NormalizedString, Offsets, PreTokenizedString, Result, SplitDelimiterBehavior};

/// How an expression is matched.
#[derive(Debug)]
enum Matcher {
    Rule(Rule),
    Regex(Regex),
}

impl Matcher {
    fn new(pattern: &str) -> Result<Self> {
        Ok(match Rule::from_regex(pattern) {
            Some(rule) => Matcher::Rule(rule),
            None => Matcher::Regex(Regex::new(pattern)?),
        })
    }
}

impl Pattern for &Matcher {
    fn find_matches(&self, inside: &str) -> Result<Vec<(Offsets, bool)>> {
        match self {
            Matcher::Rule(rule) => rule.find_matches(inside),
            Matcher::Regex(regex) => regex.find_matches(inside).map_err(|error| {
                let (bytes, pattern) = (inside.len(), regex.as_str());
                format!("the expression `{pattern}` on a text of {bytes} bytes: {error}").into()
            }),
        }
    }
}

/// One step of a pre-tokenizer.
#[derive(Debug)]
enum Step {
    /// The crate's `Split` by an expression.
    Split {
        by: Matcher,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    /// What the crate's `ByteLevel` does before it writes bytes, with its own expression.
    Gpt2Words { rule: Rule, add_prefix_space: bool },
    /// A step without an expression that could give up.
    Other(PreTokenizerWrapper),
}

/// The pre-tokenizer of a `tokenizer.json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(try_from = "PreTokenizerWrapper", into = "PreTokenizerWrapper")]
pub(super) struct PreTokenizer {
    file: PreTokenizerWrapper,
    steps: Arc<Vec<Step>>,
}

impl TryFrom<PreTokenizerWrapper> for PreTokenizer {
    type Error = tokenizers::Error;

    fn try_from(file: PreTokenizerWrapper) -> Result<Self> {
        let mut steps = Vec::new();
        add_steps(&file, &mut steps)?;
        let steps = Arc::new(steps);
        Ok(PreTokenizer { file, steps })
    }
}

impl From<PreTokenizer> for PreTokenizerWrapper {
    fn from(pre: PreTokenizer) -> Self {
        pre.file
    }
}

/// Appends the steps of `file`, a sequence taken apart.
fn add_steps(file: &PreTokenizerWrapper, steps: &mut Vec<Step>) -> Result<()> {
    match file {
        PreTokenizerWrapper::Sequence(parts) => {
            let mut parts = parts.as_ref().iter();
            return parts.try_for_each(|part| add_steps(part, steps));
        }
        PreTokenizerWrapper::Split(split) if let SplitPattern::Regex(regex) = &split.pattern => {
            steps.push(Step::Split {
                by: Matcher::new(regex)?,
                behavior: split.behavior,
                invert: split.invert,
            });
        }
        PreTokenizerWrapper::ByteLevel(bytes) if bytes.use_regex => {
            steps.push(Step::Gpt2Words {
                rule: Rule::from_regex(GPT2).ok_or("no rule for GPT-2's expression")?,
                add_prefix_space: bytes.add_prefix_space,
            });
            let bytes = ByteLevel::new(false, bytes.trim_offsets, false);
            steps.push(Step::Other(bytes.into()));
        }
        other => steps.push(Step::Other(other.clone())),
    }
    Ok(())
}

impl tokenizers::PreTokenizer for PreTokenizer {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> Result<()> {
        for step in &*self.steps {
            match step {
                Step::Split {
                    by,
                    behavior,
                    invert,
                } => text.split(|_, part| match invert {
                    true => part.split(Invert(by), *behavior),
                    false => part.split(by, *behavior),
                })?,
                Step::Gpt2Words {
                    rule,
                    add_prefix_space,
                } => text.split(|_, mut part| {
                    if *add_prefix_space && !part.get().starts_with(' ') {
                        part.prepend(" ");
                    }
                    part.split(rule, SplitDelimiterBehavior::Isolated)
                })?,
                Step::Other(step) => step.pre_tokenize(text)?,
            }
        }
        Ok(())
    }
}

/// One step of a normalizer.
#[derive(Debug)]
enum NormalizerStep {
    /// The crate's `Replace` by an expression.
    Replace { what: Matcher, with: String },
    /// A step without an expression that could give up.
    Other(NormalizerWrapper),
}

/// What a normalizer unwinds with where it could not match, and why.
pub(super) struct GaveUp(pub(super) String);

/// The normalizer of a `tokenizer.json`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(try_from = "NormalizerWrapper", into = "NormalizerWrapper")]
pub(super) struct Normalizer {
    file: NormalizerWrapper,
    steps: Arc<Vec<NormalizerStep>>,
}

impl TryFrom<NormalizerWrapper> for Normalizer {
    type Error = tokenizers::Error;

    fn try_from(file: NormalizerWrapper) -> Result<Self> {
        let mut steps = Vec::new();
        add_normalizer_steps(&file, &mut steps)?;
        let steps = Arc::new(steps);
        Ok(Normalizer { file, steps })
    }
}

impl From<Normalizer> for NormalizerWrapper {
    fn from(normalizer: Normalizer) -> Self {
        normalizer.file
    }
}

/// Appends the steps of `file`, a sequence taken apart.
fn add_normalizer_steps(file: &NormalizerWrapper, steps: &mut Vec<NormalizerStep>) -> Result<()> {
    match file {
        NormalizerWrapper::Sequence(parts) => {
            let mut parts = parts.as_ref().iter();
            return parts.try_for_each(|part| add_normalizer_steps(part, steps));
        }
        NormalizerWrapper::Replace(replace) => {
            // The pattern is private to the crate, but not to its file.
            let written = serde_json::to_value(replace)?;
            let regex = written.pointer("/pattern/Regex");
            if let Some(regex) = regex.and_then(|regex| regex.as_str()) {
                steps.push(NormalizerStep::Replace {
                    what: Matcher::new(regex)?,
                    with: replace.content.clone(),
                });
                return Ok(());
            }
        }
        _ => {}
    }
    steps.push(NormalizerStep::Other(file.clone()));
    Ok(())
}

impl tokenizers::Normalizer for Normalizer {
    fn normalize(&self, text: &mut NormalizedString) -> Result<()> {
        for step in &*self.steps {
            match step {
                NormalizerStep::Replace { what, with } => {
                    if let Err(error) = text.replace(what, with) {
                        // The crate drops the errors of normalizers and goes on with the text as
                        // it is. Calls of it are guarded against panics, so this is the way out.
                        resume_unwind(Box::new(GaveUp(error.to_string())));
                    }
                }
                NormalizerStep::Other(step) => step.normalize(text)?,
            }
        }
        Ok(())
    }
}
