//! llama.cpp's own routes: `/completion` and `/infill`.

use super::{Alternatives, Anything, Content, Limit, List, Quantity, Strings, Words};
use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt::{Formatter, Result as FmtResult};
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Most prompts of a request and parts of a prompt that are read at all; servers allow fewer prompts.
const MAX_ENTRIES: usize = 1 << 16;

/// What both routes have beside [`Sampling`](super::Sampling) and [`StructuredOutputFields`](super::StructuredOutputFields).
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
#[schema(as = NativeOptions)]
pub(crate) struct LlamaCppOptions {
    /// Most tokens of an answer; -1, or nothing: as many as fit. 0 computes the prompt only.
    #[serde(alias = "max_tokens")]
    pub(crate) n_predict: Option<Limit>,
    /// Answers to a prompt.
    #[serde(alias = "n")]
    pub(crate) n_cmpl: Option<Quantity>,
    pub(crate) stop: Option<Strings>,
    /// Log-probabilities of each token and of this many alternatives.
    pub(crate) n_probs: Option<Alternatives>,
    /// Whether an answer that comes whole has its token ids; a streamed one has them anyway.
    pub(crate) return_tokens: Option<bool>,
    /// Whether each chunk of a stream has times.
    pub(crate) timings_per_token: Option<bool>,
    /// The fields that an answer has, by their paths with slashes.
    pub(crate) response_fields: Option<Words>,
    /// Milliseconds after its first token at which an answer that has a line break ends; 0 or less: none.
    pub(crate) t_max_predict_ms: Option<super::Integer>,
    /// The samplers that act; the others do nothing. Their order is fixed.
    pub(crate) samplers: Option<Samplers>,
    // There is one cache for all: it is always used, and no answer depends on it. No token of a prompt is ever dropped.
    #[serde(rename = "cache_prompt")]
    _cache_prompt: Option<Anything>,
    #[serde(rename = "id_slot")]
    _id_slot: Option<Anything>,
    #[serde(rename = "n_keep")]
    _n_keep: Option<Anything>,
    #[serde(rename = "n_cache_reuse")]
    _n_cache_reuse: Option<Anything>,
}

/// Names of samplers, or a letter for each.
pub(crate) type Samplers = Content<String>;

/// `/completion` beside that.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
#[schema(as = NativeCompletion)]
pub(crate) struct LlamaCppCompletion {
    pub(crate) prompt: LlamaCppPrompts,
}

/// `/infill` beside that: a gap in a text.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Infill {
    /// What stands before the gap.
    pub(crate) input_prefix: Option<String>,
    /// What stands after it.
    pub(crate) input_suffix: Option<String>,
    /// Other files that the model is shown, the most important last.
    pub(crate) input_extra: Option<Extras>,
    /// More of what stands before the gap.
    pub(crate) prompt: Option<String>,
}

/// Most files beside the one with the gap.
pub(crate) type Extras = List<Extra, 4096>;

/// A file beside the one with the gap.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Extra {
    pub(crate) filename: Option<String>,
    pub(crate) text: Option<String>,
    // When an editor read it.
    #[serde(rename = "time")]
    _time: Option<Anything>,
}

/// A part of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PromptPart {
    Text(String),
    Tokens(Vec<u32>),
}

/// A prompt as parts that follow one another.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LlamaCppPrompt(pub(crate) Vec<PromptPart>);

/// One prompt or several: a text, a list of token ids and texts that follow one another, an object with a
/// `prompt_string`; or a list of such. A list of texts alone is several prompts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LlamaCppPrompts {
    pub(crate) list: Vec<LlamaCppPrompt>,
    /// Whether they came as a list, so that errors name entries.
    pub(crate) listed: bool,
}

/// What stands in a list of prompts.
enum Entry {
    Token(u32),
    Text(String),
    Whole(LlamaCppPrompt),
}

/// The object that llama.cpp has for prompts with images, as far as it is text.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct PromptObject {
    prompt_string: String,
    multimodal_data: Option<List<Anything, MAX_ENTRIES>>,
}

impl LlamaCppPrompt {
    fn text(text: &str) -> Self {
        Self(vec![PromptPart::Text(text.to_owned())])
    }

    fn push_token(&mut self, id: u32) {
        match self.0.last_mut() {
            Some(PromptPart::Tokens(tokens)) => tokens.push(id),
            _ => self.0.push(PromptPart::Tokens(vec![id])),
        }
    }

    /// Adds an entry of a list that is one prompt.
    fn push<E: de::Error>(&mut self, entry: Entry) -> Result<(), E> {
        match entry {
            Entry::Token(id) => self.push_token(id),
            Entry::Text(text) if self.0.len() < MAX_ENTRIES => self.0.push(PromptPart::Text(text)),
            Entry::Text(_) => {
                let reason = format!("expected at most {MAX_ENTRIES} parts");
                return Err(E::custom(reason));
            }
            Entry::Whole(_) => {
                let reason = "found a prompt among token ids, expected token ids and strings";
                return Err(E::custom(reason));
            }
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct EntryVisitor;
        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = Entry;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "a string, a token id, an array of them or an object")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Entry, E> {
                Ok(Entry::Text(text.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Entry, E> {
                let wrong = |_| E::invalid_value(de::Unexpected::Unsigned(id), &"a token id");
                u32::try_from(id).map(Entry::Token).map_err(wrong)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Entry, A::Error> {
                let mut prompt = LlamaCppPrompt::default();
                while let Some(entry) = seq.next_element::<Entry>()? {
                    prompt.push(entry)?;
                }
                Ok(Entry::Whole(prompt))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Entry, A::Error> {
                let object = PromptObject::deserialize(de::value::MapAccessDeserializer::new(map))?;
                if object
                    .multimodal_data
                    .is_some_and(|data| !data.0.is_empty())
                {
                    let reason = "multimodal_data: this model reads text only";
                    return Err(de::Error::custom(reason));
                }
                Ok(Entry::Whole(LlamaCppPrompt::text(&object.prompt_string)))
            }
        }
        from.deserialize_any(EntryVisitor)
    }
}

impl<'de> Deserialize<'de> for LlamaCppPrompts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = LlamaCppPrompts;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(
                    f,
                    "a string, an object, or an array of strings, token ids and prompts"
                )
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<LlamaCppPrompts, E> {
                Ok(LlamaCppPrompts {
                    list: vec![LlamaCppPrompt::text(text)],
                    listed: false,
                })
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<LlamaCppPrompts, A::Error> {
                let entry = Entry::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(LlamaCppPrompts {
                    list: [entry].into_iter().map(whole).collect(),
                    listed: false,
                })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<LlamaCppPrompts, A::Error> {
                let mut texts_and_prompts = Vec::new();
                while let Some(entry) = seq.next_element()? {
                    if let Entry::Token(id) = entry {
                        return rest_of_one(texts_and_prompts, id, seq);
                    }
                    if texts_and_prompts.len() == MAX_ENTRIES {
                        let reason = format!("expected at most {MAX_ENTRIES} prompts");
                        return Err(de::Error::custom(reason));
                    }
                    texts_and_prompts.push(entry);
                }
                Ok(LlamaCppPrompts {
                    list: texts_and_prompts.into_iter().map(whole).collect(),
                    listed: true,
                })
            }
        }
        from.deserialize_any(PromptsVisitor)
    }
}

/// An entry as a prompt of its own.
fn whole(entry: Entry) -> LlamaCppPrompt {
    match entry {
        Entry::Whole(prompt) => prompt,
        Entry::Text(text) => LlamaCppPrompt(vec![PromptPart::Text(text)]),
        Entry::Token(id) => LlamaCppPrompt(vec![PromptPart::Tokens(vec![id])]),
    }
}

/// A list with a token id is one prompt: what stood before the first, that one, and what follows.
fn rest_of_one<'de, A: SeqAccess<'de>>(
    before: Vec<Entry>,
    id: u32,
    mut seq: A,
) -> Result<LlamaCppPrompts, A::Error> {
    let mut prompt = LlamaCppPrompt::default();
    for entry in before {
        prompt.push(entry)?;
    }
    prompt.push_token(id);
    while let Some(entry) = seq.next_element::<Entry>()? {
        prompt.push(entry)?;
    }
    Ok(LlamaCppPrompts {
        list: vec![prompt],
        listed: false,
    })
}

impl PartialSchema for LlamaCppPrompts {
    fn schema() -> RefOr<Schema> {
        let of = |kind: Type| ObjectBuilder::new().schema_type(SchemaType::new(kind));
        let object = || {
            of(Type::Object)
                .property("prompt_string", of(Type::String))
                .required("prompt_string")
        };
        let id = || of(Type::Integer).minimum(Some(0.0));
        let mixed = || OneOfBuilder::new().item(of(Type::String)).item(id());
        let prompt = OneOfBuilder::new()
            .item(of(Type::String))
            .item(object())
            .item(ArrayBuilder::new().items(mixed()));
        OneOfBuilder::new()
            .item(of(Type::String))
            .item(object())
            .item(ArrayBuilder::new().items(mixed()))
            .item(ArrayBuilder::new().items(prompt))
            .into()
    }
}

impl ToSchema for LlamaCppPrompts {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("NativePrompts")
    }
}
