//! Requests as types.
//!
//! A body is split into its top-level fields first, which takes no memory beside the text; then each part of a
//! request ([`Body::part`]) is read from those fields that it names. So parts that several routes share (how
//! tokens are chosen, what form an answer has) are types of their own, errors name their field by its path, and
//! numbers are bounded where they are read. A null is as good as an absent field.
//!
//! Nothing is ignored in silence: fields that no part names, at any depth, and hints that are understood but
//! not followed are collected ([`Body::ignore`]). They are told in the header `x-ferrum-ignored`, or refused where
//! the server is strict.

mod anthropic;
mod bias;
mod chat;
mod completions;
mod embeddings;
mod generation;
mod llama_cpp;
mod lora;
mod responses;
mod scores;
mod tokenize;
mod value;

pub(crate) use anthropic::*;
pub(crate) use bias::*;
pub(crate) use chat::*;
pub(crate) use completions::*;
pub(crate) use embeddings::*;
pub(crate) use generation::*;
pub(crate) use llama_cpp::*;
pub(crate) use lora::*;
pub(crate) use responses::*;
pub(crate) use scores::*;
pub(crate) use tokenize::*;
pub(crate) use value::*;

use crate::error::ApiError;
use crate::http::body_budget::BodyPermits;
use serde::de::value::MapDeserializer;
use serde::de::{DeserializeOwned, Deserializer, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

type Result<T> = std::result::Result<T, ApiError>;

/// Most messages of a conversation, parts of a message, and tools: agents bring those of all their servers.
pub(crate) const MAX_MESSAGES: usize = 4096;
pub(crate) const MAX_PARTS: usize = 1024;
pub(crate) const MAX_TOOLS: usize = 512;

/// Most names of ignored fields that are kept, and most characters of each.
const MAX_IGNORED: usize = 32;
const MAX_NAME: usize = 80;

/// Most top-level fields of a request.
const MAX_FIELDS: usize = 512;

/// The fields of a request that have not been read yet, and what of it is ignored.
#[derive(Debug)]
pub(crate) struct Body {
    text: String,
    fields: Vec<Field>,
    ignored: Vec<String>,
    /// Its share of what bodies may take, for as long as it is there.
    paid: BodyPermits,
}

/// A top-level field that is not null.
#[derive(Debug)]
struct Field {
    name: String,
    /// Where its value is in the text.
    value: Range<usize>,
    taken: bool,
}

impl Body {
    /// A request as JSON text.
    pub(crate) fn new(bytes: Vec<u8>, paid: BodyPermits) -> Result<Self> {
        let not_json = |e: String| ApiError::malformed(format!("the body is not JSON: {e}"));
        let text = String::from_utf8(bytes).map_err(|e| not_json(e.to_string()))?;
        let whole: &RawValue = serde_json::from_str(&text).map_err(|e| not_json(e.to_string()))?;
        if !whole.get().starts_with('{') {
            let reason = "the body: found something else, expected an object";
            return Err(ApiError::malformed(reason));
        }
        let map: BTreeMap<Cow<'_, str>, &RawValue> =
            serde_json::from_str(&text).map_err(|e| not_json(e.to_string()))?;
        if map.len() > MAX_FIELDS {
            let found = map.len();
            let reason = format!("the body: found {found} fields, expected at most {MAX_FIELDS}");
            return Err(ApiError::malformed(reason));
        }
        let field = |(name, value): (Cow<'_, str>, &RawValue)| {
            let start = value.get().as_ptr() as usize - text.as_ptr() as usize;
            Field {
                name: name.into_owned(),
                value: start..start + value.get().len(),
                taken: false,
            }
        };
        let fields = map.into_iter().map(field);
        let fields = fields.filter(|field| &text[field.value.clone()] != "null");
        Ok(Self {
            fields: fields.collect(),
            text,
            ignored: Vec::new(),
            paid,
        })
    }

    /// Bytes of the whole.
    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }

    /// Reads those fields that a struct names.
    ///
    /// # Errors
    /// A 400 that names the field that is missing or wrong.
    pub(crate) fn part<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut taken = Vec::new();
        let mut ignored = Vec::new();
        let mut track = serde_path_to_error::Track::new();
        let fields = TopLevel {
            text: &self.text,
            fields: &self.fields,
            taken: &mut taken,
        };
        let fields = serde_path_to_error::Deserializer::new(fields, &mut track);
        let mut note = |path: serde_ignored::Path<'_>| {
            if ignored.len() < MAX_IGNORED {
                ignored.push(written(&path));
            }
        };
        let fields = serde_ignored::Deserializer::new(fields, &mut note);
        let read = T::deserialize(fields);
        let read = read.map_err(|error| refusal(&track.path().to_string(), &error))?;
        for index in taken {
            self.fields[index].taken = true;
        }
        for name in ignored {
            remember(&mut self.ignored, &name);
        }
        Ok(read)
    }

    /// The text of a field, without reading the rest.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>> {
        let Some(field) = self.fields.iter().find(|field| field.name == name) else {
            return Ok(None);
        };
        let value = serde_json::from_str(&self.text[field.value.clone()]);
        value.map(Some).map_err(|error| refusal(name, &error))
    }

    /// A field as it is, without reading the rest; null without one.
    pub(crate) fn value(&self, name: &str) -> serde_json::Value {
        let field = self.fields.iter().find(|field| field.name == name);
        let value = field.map(|field| serde_json::from_str(&self.text[field.value.clone()]));
        value.and_then(std::result::Result::ok).unwrap_or_default()
    }

    /// Notes that a field is not followed.
    pub(crate) fn ignore(&mut self, name: impl AsRef<str>) {
        remember(&mut self.ignored, name.as_ref());
    }

    /// Its share of what bodies may take, for what is kept of it when it has been read.
    pub(crate) fn take_permits(&mut self) -> BodyPermits {
        self.paid.take()
    }

    /// All parts have been read: what is ignored, or an error where nothing may be.
    pub(crate) fn finish(mut self, strict: bool) -> Result<Vec<String>> {
        for field in self.fields.iter().filter(|field| !field.taken) {
            remember(&mut self.ignored, &field.name);
        }
        match self.ignored.first() {
            Some(name) if strict => Err(ApiError::unknown(name)),
            _ => Ok(self.ignored),
        }
    }
}

/// Adds a name that clients chose, as far as it may be written to a header.
fn remember(names: &mut Vec<String>, name: &str) {
    let printable = |c: char| match c {
        ' '..='~' if c != ',' => c,
        _ => '?',
    };
    let name: String = name.chars().take(MAX_NAME).map(printable).collect();
    if names.len() < MAX_IGNORED && !names.contains(&name) {
        names.push(name);
    }
}

/// The path of an ignored field, as errors have it.
fn written(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", written(parent)),
        Path::Map { parent, key } => join(&written(parent), key),
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => written(parent),
    }
}

/// The path of a field of the object at `path`.
fn join(path: &str, field: &str) -> String {
    match path {
        "" | "." => field.to_owned(),
        path => format!("{path}.{field}"),
    }
}

/// A field of the object at `path`, which its type says has to be there.
pub(crate) fn need<T>(value: Option<T>, path: &str, field: &str) -> Result<T> {
    value.ok_or_else(|| ApiError::invalid(join(path, field), "it is missing"))
}

/// What a value at `path` is refused with.
fn refusal(path: &str, error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    // Places are those of the value, not of the body.
    let text = text
        .rsplit_once(" at line ")
        .map_or(&*text, |(text, _)| text);
    let missing = text.strip_prefix("missing field `");
    match missing.and_then(|rest| rest.strip_suffix('`')) {
        Some(field) => ApiError::invalid(join(path, field), "it is missing"),
        None => ApiError::invalid(path, text),
    }
}

/// The fields of a request that a struct asks for, as a deserialiser.
struct TopLevel<'de, 'a> {
    text: &'de str,
    fields: &'a [Field],
    taken: &'a mut Vec<usize>,
}

impl<'de> Deserializer<'de> for TopLevel<'de, '_> {
    type Error = serde_json::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> std::result::Result<V::Value, Self::Error> {
        let mut entries: Vec<(&str, &'de RawValue)> = Vec::new();
        for (index, field) in self.fields.iter().enumerate() {
            if names.contains(&field.name.as_str()) {
                let value = serde_json::from_str(&self.text[field.value.clone()])?;
                entries.push((&field.name, value));
                self.taken.push(index);
            }
        }
        visitor.visit_map(MapDeserializer::new(entries.into_iter()))
    }

    fn deserialize_any<V: Visitor<'de>>(
        self,
        visitor: V,
    ) -> std::result::Result<V::Value, Self::Error> {
        self.deserialize_struct("", &[], visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests;
