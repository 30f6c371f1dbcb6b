//! Values of which requests are made, with their bounds: each says what it expects where something else is found.

use super::{
    ChosenFunction, ChosenTool, DocumentSource, FunctionChoice, ImageAddress, ImageUrl, MAX_PARTS,
    MAX_TOOLS, Source, ToolChoice,
};
use ferrum_engine::engine::{MAX_STOP_TOKENS, MAX_STOPS};
use ferrum_engine::grammar::MAX_GRAMMAR_PARTS;
use ferrum_engine::sampler::MAX_BAD_WORDS;
use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Unexpected, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt::{Formatter, Result as FmtResult};
use std::marker::PhantomData;
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// No bound above.
pub(crate) const FREE: i64 = i64::MAX;
/// The largest that counts and lengths may be.
pub(crate) const I32: i64 = i32::MAX as i64;

type Schemas = Vec<(String, RefOr<Schema>)>;

/// A number from `LOW` to `HIGH`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Number<const LOW: i64, const HIGH: i64>(pub(crate) f32);

/// A number above 0, `HIGH` at most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Positive<const HIGH: i64>(pub(crate) f32);

/// An integer from `LOW` to `HIGH`. One that is written with a fraction of zero is an integer to clients whose
/// language has only one kind of number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Int<const LOW: i64, const HIGH: i64>(pub(crate) i64);

/// A count up to `HIGH`.
pub(crate) type Count<const HIGH: i64> = Int<0, HIGH>;

// Ranges by name: fields have no generic types, which their schemas are derived from.
pub(crate) type Temperature = Number<0, 2>;
pub(crate) type Share = Number<0, 1>;
pub(crate) type PositiveNumber = Positive<FREE>;
pub(crate) type NonNegative = Number<0, FREE>;
pub(crate) type OneOrMore = Number<1, FREE>;
/// OpenAI's presence and frequency penalties.
pub(crate) type Penalty = Number<-2, 2>;
pub(crate) type Integer = Int<{ i64::MIN }, FREE>;
pub(crate) type Natural = Count<FREE>;
pub(crate) type Quantity = Int<1, FREE>;
/// A count, or -1 for no limit.
pub(crate) type Limit = Int<-1, FREE>;
/// How many tokens are looked at; -1: all.
pub(crate) type Window = Int<-1, I32>;
pub(crate) type Priority = Int<-128, 127>;
pub(crate) type MirostatMode = Int<0, 2>;
pub(crate) type PassageLength = Count<1_048_576>;

impl<const LOW: i64, const HIGH: i64> Int<LOW, HIGH> {
    /// As a count, where negative numbers stand for no limit.
    pub(crate) fn count(self) -> Option<usize> {
        usize::try_from(self.0).ok()
    }
}

/// Where a number lies that is too large for f32, which is still a number.
fn narrow(x: f64) -> f32 {
    (x as f32).clamp(f32::MIN, f32::MAX)
}

struct NumberVisitor {
    low: i64,
    high: i64,
    open: bool,
}

impl NumberVisitor {
    fn check<E: de::Error>(&self, x: f64, found: Unexpected<'_>) -> Result<f64, E> {
        let above = match self.open {
            true => x > 0.0,
            false => x >= self.low as f64,
        };
        match above && (self.high == FREE || x <= self.high as f64) {
            true => Ok(x),
            false => Err(E::invalid_value(found, self)),
        }
    }
}

impl Visitor<'_> for NumberVisitor {
    type Value = f64;

    fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
        match (self.open, self.low, self.high) {
            (true, _, FREE) => write!(f, "a number above 0"),
            (true, _, high) => write!(f, "a number above 0, {high} at most"),
            (_, low, FREE) => write!(f, "a number of at least {low}"),
            (_, low, high) => write!(f, "a number from {low} to {high}"),
        }
    }

    fn visit_f64<E: de::Error>(self, x: f64) -> Result<f64, E> {
        self.check(x, Unexpected::Float(x))
    }

    fn visit_i64<E: de::Error>(self, x: i64) -> Result<f64, E> {
        self.check(x as f64, Unexpected::Signed(x))
    }

    fn visit_u64<E: de::Error>(self, x: u64) -> Result<f64, E> {
        self.check(x as f64, Unexpected::Unsigned(x))
    }
}

struct IntVisitor {
    low: i64,
    high: i64,
}

impl IntVisitor {
    fn check<E: de::Error>(&self, x: Option<i64>, found: Unexpected<'_>) -> Result<i64, E> {
        let x = x.filter(|x| (self.low..=self.high).contains(x));
        x.ok_or_else(|| E::invalid_value(found, self))
    }
}

impl Visitor<'_> for IntVisitor {
    type Value = i64;

    fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
        match (self.low, self.high) {
            (i64::MIN, FREE) => write!(f, "an integer"),
            (low, FREE) => write!(f, "an integer of at least {low}"),
            (low, high) => write!(f, "an integer from {low} to {high}"),
        }
    }

    fn visit_f64<E: de::Error>(self, x: f64) -> Result<i64, E> {
        let whole = (x.fract() == 0.0 && x.abs() < 9e15).then_some(x as i64);
        self.check(whole, Unexpected::Float(x))
    }

    fn visit_i64<E: de::Error>(self, x: i64) -> Result<i64, E> {
        self.check(Some(x), Unexpected::Signed(x))
    }

    fn visit_u64<E: de::Error>(self, x: u64) -> Result<i64, E> {
        self.check(i64::try_from(x).ok(), Unexpected::Unsigned(x))
    }
}

impl<'de, const LOW: i64, const HIGH: i64> Deserialize<'de> for Number<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let visitor = NumberVisitor {
            low: LOW,
            high: HIGH,
            open: false,
        };
        from.deserialize_any(visitor).map(|x| Self(narrow(x)))
    }
}

impl<'de, const HIGH: i64> Deserialize<'de> for Positive<HIGH> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let visitor = NumberVisitor {
            low: 0,
            high: HIGH,
            open: true,
        };
        // What is above 0, if ever so little, is above 0 as f32, too.
        let above = |x| Self(narrow(x).max(f32::MIN_POSITIVE));
        from.deserialize_any(visitor).map(above)
    }
}

impl<'de, const LOW: i64, const HIGH: i64> Deserialize<'de> for Int<LOW, HIGH> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let visitor = IntVisitor {
            low: LOW,
            high: HIGH,
        };
        from.deserialize_any(visitor).map(Self)
    }
}

/// A schema of numbers.
fn bounded(kind: Type, low: Option<f64>, above: Option<f64>, high: i64) -> RefOr<Schema> {
    let high = (high != FREE).then_some(high as f64);
    let object = ObjectBuilder::new()
        .schema_type(SchemaType::new(kind))
        .minimum(low)
        .exclusive_minimum(above)
        .maximum(high);
    object.into()
}

impl<const LOW: i64, const HIGH: i64> PartialSchema for Number<LOW, HIGH> {
    fn schema() -> RefOr<Schema> {
        bounded(Type::Number, Some(LOW as f64), None, HIGH)
    }
}

impl<const HIGH: i64> PartialSchema for Positive<HIGH> {
    fn schema() -> RefOr<Schema> {
        bounded(Type::Number, None, Some(0.0), HIGH)
    }
}

impl<const LOW: i64, const HIGH: i64> PartialSchema for Int<LOW, HIGH> {
    fn schema() -> RefOr<Schema> {
        let low = (LOW != i64::MIN).then_some(LOW as f64);
        bounded(Type::Integer, low, None, HIGH)
    }
}

/// `prefix` with the bounds of a range.
fn range_name(prefix: &str, low: i64, high: i64) -> Cow<'static, str> {
    let bound = |x: i64| match x {
        i64::MIN | FREE => "any".to_owned(),
        x => x.to_string().replace('-', "minus"),
    };
    Cow::Owned(format!("{prefix}.{}.{}", bound(low), bound(high)))
}

impl<const LOW: i64, const HIGH: i64> ToSchema for Number<LOW, HIGH> {
    fn name() -> Cow<'static, str> {
        range_name("Number", LOW, HIGH)
    }
}

impl<const HIGH: i64> ToSchema for Positive<HIGH> {
    fn name() -> Cow<'static, str> {
        range_name("Positive", 0, HIGH)
    }
}

impl<const LOW: i64, const HIGH: i64> ToSchema for Int<LOW, HIGH> {
    fn name() -> Cow<'static, str> {
        range_name("Int", LOW, HIGH)
    }
}

/// A list of at most `MOST` entries: what is longer is refused before it takes memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct List<T, const MOST: usize>(pub(crate) Vec<T>);

/// Messages of a conversation, at most.
pub(crate) type Messages<T> = List<T, { super::MAX_MESSAGES }>;
/// Tools of a request, at most.
pub(crate) type Tools<T> = List<T, MAX_TOOLS>;
/// A few words.
pub(crate) type Words = List<String, MAX_PARTS>;
pub(crate) type StopList = List<String, MAX_STOPS>;
pub(crate) type StopTokens = List<Natural, { MAX_STOP_TOKENS / 2 }>;
pub(crate) type BadWords = List<String, { MAX_BAD_WORDS / 2 }>;
/// As many as vocabularies have tokens, and then some.
pub(crate) type AllowedTokens = List<Natural, { 1 << 20 }>;
pub(crate) type ChoiceList = List<String, MAX_GRAMMAR_PARTS>;

impl<T, const MOST: usize> Default for List<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// Takes the entries of a list, `most` of them.
fn entries<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
    mut seq: A,
    most: usize,
) -> Result<Vec<T>, A::Error> {
    let mut list = Vec::new();
    while let Some(entry) = seq.next_element()? {
        if list.len() == most {
            let reason = format!("found more than {most} entries, expected at most {most}");
            return Err(de::Error::custom(reason));
        }
        list.push(entry);
    }
    Ok(list)
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ListVisitor<T>(PhantomData<T>, usize);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "an array of at most {} entries", self.1)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<T>, A::Error> {
                entries(seq, self.1)
            }
        }
        from.deserialize_seq(ListVisitor(PhantomData, MOST))
            .map(Self)
    }
}

fn list_of<T: ToSchema>(most: usize) -> ArrayBuilder {
    ArrayBuilder::new()
        .items(reference::<T>())
        .max_items(Some(most))
}

/// A schema by its name.
fn reference<T: ToSchema>() -> RefOr<Schema> {
    RefOr::Ref(utoipa::openapi::Ref::from_schema_name(T::name()))
}

impl<T: ToSchema, const MOST: usize> PartialSchema for List<T, MOST> {
    fn schema() -> RefOr<Schema> {
        list_of::<T>(MOST).into()
    }
}

impl<T: ToSchema, const MOST: usize> ToSchema for List<T, MOST> {
    fn name() -> Cow<'static, str> {
        Cow::Owned(format!("List.{MOST}.{}", T::name()))
    }

    fn schemas(schemas: &mut Schemas) {
        add_schema::<T>(schemas);
    }
}

/// Adds a schema with those that it refers to, once: types may contain themselves.
fn add_schema<T: ToSchema>(schemas: &mut Schemas) {
    let name = T::name();
    if schemas.iter().all(|(known, _)| *known != name) {
        schemas.push((name.into_owned(), T::schema()));
        T::schemas(schemas);
    }
}

/// A string, or a list of parts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Content<P, const MOST: usize = MAX_PARTS> {
    Text(String),
    Parts(Vec<P>),
}

impl<'de, P: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Content<P, MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ContentVisitor<P, const MOST: usize>(PhantomData<P>);
        impl<'de, P: Deserialize<'de>, const MOST: usize> Visitor<'de> for ContentVisitor<P, MOST> {
            type Value = Content<P, MOST>;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "a string or an array of at most {MOST} entries")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Self::Value, E> {
                Ok(Content::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                entries(seq, MOST).map(Content::Parts)
            }
        }
        from.deserialize_any(ContentVisitor(PhantomData))
    }
}

impl<P: ToSchema, const MOST: usize> PartialSchema for Content<P, MOST> {
    fn schema() -> RefOr<Schema> {
        OneOfBuilder::new()
            .item(string())
            .item(list_of::<P>(MOST))
            .into()
    }
}

impl<P: ToSchema, const MOST: usize> ToSchema for Content<P, MOST> {
    fn name() -> Cow<'static, str> {
        Cow::Owned(format!("Content.{}", P::name()))
    }

    fn schemas(schemas: &mut Schemas) {
        add_schema::<P>(schemas);
    }
}

/// A field of any value, which is ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Anything;

impl<'de> Deserialize<'de> for Anything {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // A value of its own kind would be told as ignored.
        <&RawValue>::deserialize(from).map(|_| Self)
    }
}

/// JSON of at most `MOST` bytes as text: as values, numbers take many times their length.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Json<const MOST: usize>(pub(crate) Value);

/// A JSON schema or what a template is given.
pub(crate) type Schemata = Json<{ ferrum_engine::grammar::MAX_GRAMMAR_BYTES }>;

impl<'de, const MOST: usize> Deserialize<'de> for Json<MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(from)?;
        if raw.get().len() > MOST {
            let found = raw.get().len();
            let reason = format!("found {found} bytes, expected at most {MOST}");
            return Err(de::Error::custom(reason));
        }
        serde_json::from_str(raw.get())
            .map(Self)
            .map_err(de::Error::custom)
    }
}

/// A JSON object, bounded in the same way.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Object(pub(crate) Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match Schemata::deserialize(from)?.0 {
            Value::Object(map) => Ok(Self(map)),
            other => Err(de::Error::invalid_type(unexpected(&other), &"an object")),
        }
    }
}

/// What a value is, for errors.
fn unexpected(value: &Value) -> Unexpected<'_> {
    match value {
        Value::Null => Unexpected::Unit,
        Value::Bool(truth) => Unexpected::Bool(*truth),
        Value::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(n), _) => Unexpected::Signed(n),
            (None, x) => Unexpected::Float(x.unwrap_or_default()),
        },
        Value::String(text) => Unexpected::Str(text),
        Value::Array(_) => Unexpected::Seq,
        Value::Object(_) => Unexpected::Map,
    }
}

/// The name of a function: what OpenAI allows, and dots.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FunctionName(pub(crate) String);

impl<'de> Deserialize<'de> for FunctionName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = String::deserialize(from)?;
        let fine = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        match (1..=64).contains(&name.len()) && name.chars().all(fine) {
            true => Ok(Self(name)),
            false => {
                let expected = "1 to 64 letters, digits, underscores, dots or dashes";
                Err(de::Error::invalid_value(Unexpected::Str(&name), &expected))
            }
        }
    }
}

/// The arguments of a call: an object, which OpenAI's clients send as JSON text. A text that is no object, as that of a
/// call that was cut off, stands for none: agents send back what they got, and go on from the tool's complaint.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Arguments(pub(crate) Map<String, Value>);

impl<'de> Deserialize<'de> for Arguments {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(from)?;
        let wrong =
            |found: &Value| de::Error::invalid_type(unexpected(found), &"an object as JSON text");
        let value: Value = serde_json::from_str(raw.get()).map_err(de::Error::custom)?;
        let value = match value {
            Value::String(text) => {
                let map = serde_json::from_str(&text);
                return Ok(Self(map.unwrap_or_default()));
            }
            other => other,
        };
        match value {
            Value::Object(map) => Ok(Self(map)),
            Value::Null => Ok(Self::default()),
            other => Err(wrong(&other)),
        }
    }
}

/// A text or its tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// One prompt or several: a text, texts, tokens, or lists of tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Prompts {
    pub(crate) list: Vec<Prompt>,
    /// Whether they came as a list, so that errors name entries.
    pub(crate) listed: bool,
}

/// A text, a list of tokens, or a token of a list that is the whole prompt.
enum PromptEntry {
    Whole(Prompt),
    Token(u32),
}

/// A token id, which a model's vocabulary bounds further.
type Token = Count<{ u32::MAX as i64 }>;

fn more_tokens<'de, A: SeqAccess<'de>>(seq: &mut A, tokens: &mut Vec<u32>) -> Result<(), A::Error> {
    while let Some(Int(id)) = seq.next_element::<Token>()? {
        // The range is that of the type.
        tokens.push(id as u32);
    }
    Ok(())
}

/// Most prompts of a request that are read at all; servers allow fewer.
const MAX_PROMPTS: usize = 1 << 16;

impl<'de> Deserialize<'de> for PromptEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct EntryVisitor;
        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = PromptEntry;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "a string, a token id or an array of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<PromptEntry, E> {
                Ok(PromptEntry::Whole(Prompt::Text(text.to_owned())))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<PromptEntry, E> {
                let wrong = |_| E::invalid_value(Unexpected::Unsigned(id), &"a token id");
                u32::try_from(id).map(PromptEntry::Token).map_err(wrong)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptEntry, A::Error> {
                let mut tokens = Vec::new();
                more_tokens(&mut seq, &mut tokens)?;
                Ok(PromptEntry::Whole(Prompt::Tokens(tokens)))
            }
        }
        from.deserialize_any(EntryVisitor)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "a string or an array of strings or of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts {
                    list: vec![Prompt::Text(text.to_owned())],
                    listed: false,
                })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompts, A::Error> {
                let mut list = Vec::new();
                match seq.next_element()? {
                    None => {}
                    Some(PromptEntry::Token(first)) => {
                        let mut tokens = vec![first];
                        more_tokens(&mut seq, &mut tokens)?;
                        return Ok(Prompts {
                            list: vec![Prompt::Tokens(tokens)],
                            listed: false,
                        });
                    }
                    Some(PromptEntry::Whole(prompt)) => list.push(prompt),
                }
                while let Some(entry) = seq.next_element()? {
                    let PromptEntry::Whole(prompt) = entry else {
                        let reason = "found a token id among texts, expected one kind only";
                        return Err(de::Error::custom(reason));
                    };
                    if list.len() == MAX_PROMPTS {
                        let reason = format!("expected at most {MAX_PROMPTS} prompts");
                        return Err(de::Error::custom(reason));
                    }
                    list.push(prompt);
                }
                Ok(Prompts { list, listed: true })
            }
        }
        from.deserialize_any(PromptsVisitor)
    }
}

/// A string or a list of strings.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Strings(pub(crate) Vec<String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Content::<String>::deserialize(from).map(|content| match content {
            Content::Text(text) => Self(vec![text]),
            Content::Parts(list) => Self(list),
        })
    }
}

/// A document: its text, or an object with it, as Cohere's older clients send it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Document(pub(crate) String);

/// The object of a [`Document`].
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct DocumentText {
    text: String,
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct DocumentVisitor;
        impl<'de> Visitor<'de> for DocumentVisitor {
            type Value = Document;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "a string or an object with a text")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Document, E> {
                Ok(Document(text.to_owned()))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Document, A::Error> {
                let map = de::value::MapAccessDeserializer::new(map);
                Ok(Document(DocumentText::deserialize(map)?.text))
            }
        }
        from.deserialize_any(DocumentVisitor)
    }
}

/// Types that are a string or an object: what the string may be, and the object.
macro_rules! word_or {
    ($($type:ty, $name:literal, $words:expr, $object:ty;)*) => {$(
        impl PartialSchema for $type {
            fn schema() -> RefOr<Schema> {
                let words: Option<&[&str]> = $words;
                let words = string().enum_values(words.map(|words| words.iter().copied()));
                OneOfBuilder::new().item(words).item(reference::<$object>()).into()
            }
        }
        impl ToSchema for $type {
            fn name() -> Cow<'static, str> {
                Cow::Borrowed($name)
            }

            fn schemas(schemas: &mut Schemas) {
                add_schema::<$object>(schemas);
            }
        }
    )*};
}

word_or! {
    Source, "Source", None, DocumentSource;
    Document, "RerankDocument", None, DocumentText;
    ImageUrl, "ImageUrl", None, ImageAddress;
    ToolChoice, "ToolChoice", Some(&["none", "auto", "required", "any"]), ChosenTool;
    FunctionChoice, "FunctionChoice", Some(&["none", "auto"]), ChosenFunction;
}

/// Types whose schema is given in words.
macro_rules! schemas {
    ($($type:ty, $name:literal, $schema:expr;)*) => {$(
        impl PartialSchema for $type {
            fn schema() -> RefOr<Schema> {
                $schema.into()
            }
        }
        impl ToSchema for $type {
            fn name() -> Cow<'static, str> {
                Cow::Borrowed($name)
            }
        }
    )*};
}

fn string() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::new(Type::String))
}

fn object() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::new(Type::Object))
}

fn tokens() -> ArrayBuilder {
    ArrayBuilder::new().items(Count::<FREE>::schema())
}

schemas! {
    Anything, "Anything", ObjectBuilder::new().schema_type(SchemaType::AnyValue);
    Schemata, "Json", ObjectBuilder::new().schema_type(SchemaType::AnyValue);
    Object, "Object", object();
    FunctionName, "FunctionName", string().pattern(Some("^[a-zA-Z0-9_.-]{1,64}$"));
    Arguments, "Arguments", OneOfBuilder::new().item(string()).item(object());
    Prompts, "Prompts", OneOfBuilder::new()
        .item(string())
        .item(tokens())
        .item(ArrayBuilder::new().items(string()))
        .item(ArrayBuilder::new().items(tokens()));
    Strings, "Strings", OneOfBuilder::new().item(string()).item(ArrayBuilder::new().items(string()));
}
