//! What is added to logits, in OpenAI's shape and in llama.cpp's: an object by token, or a list of pairs. A token is
//! named by its id, or a text stands for all of its tokens; instead of a number, `false` forbids a token.

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt::{Formatter, Result as FmtResult};
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Most entries, as the engine has it.
const MAX_ENTRIES: usize = ferrum_engine::sampler::MAX_LOGIT_BIAS;

/// At most [`MAX_ENTRIES`] tokens, each with what is added to its logit.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Biases(pub(crate) Vec<(BiasedToken, Bias)>);

/// A token by its id, as the request writes it, or the tokens of a text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BiasedToken {
    Id(String),
    Text(String),
}

/// A number from -100 to 100, or minus infinity for `false`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bias(pub(crate) f32);

impl<'de> Deserialize<'de> for Bias {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct BiasVisitor;
        impl Visitor<'_> for BiasVisitor {
            type Value = Bias;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "a number from -100 to 100, or false")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<Bias, E> {
                match on {
                    false => Ok(Bias(f32::NEG_INFINITY)),
                    true => Err(E::invalid_type(de::Unexpected::Bool(true), &self)),
                }
            }

            fn visit_f64<E: de::Error>(self, x: f64) -> Result<Bias, E> {
                match (-100.0..=100.0).contains(&x) {
                    true => Ok(Bias(x as f32)),
                    false => Err(E::invalid_value(de::Unexpected::Float(x), &self)),
                }
            }

            fn visit_i64<E: de::Error>(self, x: i64) -> Result<Bias, E> {
                match (-100..=100).contains(&x) {
                    true => Ok(Bias(x as f32)),
                    false => Err(E::invalid_value(de::Unexpected::Signed(x), &self)),
                }
            }

            fn visit_u64<E: de::Error>(self, x: u64) -> Result<Bias, E> {
                match x <= 100 {
                    true => Ok(Bias(x as f32)),
                    false => Err(E::invalid_value(de::Unexpected::Unsigned(x), &self)),
                }
            }
        }
        from.deserialize_any(BiasVisitor)
    }
}

/// The token of a pair in a list: there a text is a text, also one of digits.
impl<'de> Deserialize<'de> for BiasedToken {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct TokenVisitor;
        impl Visitor<'_> for TokenVisitor {
            type Value = BiasedToken;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "a token id or a string")
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<BiasedToken, E> {
                Ok(BiasedToken::Id(id.to_string()))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<BiasedToken, E> {
                Ok(BiasedToken::Text(text.to_owned()))
            }
        }
        from.deserialize_any(TokenVisitor)
    }
}

impl<'de> Deserialize<'de> for Biases {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct BiasesVisitor;

        fn check<E: de::Error>(found: usize) -> Result<(), E> {
            match found < MAX_ENTRIES {
                true => Ok(()),
                false => Err(E::custom(format!("expected at most {MAX_ENTRIES} entries"))),
            }
        }

        impl<'de> Visitor<'de> for BiasesVisitor {
            type Value = Biases;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                write!(f, "an object of numbers by token id, or an array of pairs")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Biases, A::Error> {
                let mut biases = Vec::new();
                while let Some((token, bias)) = map.next_entry::<String, Bias>()? {
                    check(biases.len())?;
                    let digits = token.bytes().all(|byte| byte.is_ascii_digit());
                    let token = match digits && !token.is_empty() {
                        true => BiasedToken::Id(token),
                        false => BiasedToken::Text(token),
                    };
                    biases.push((token, bias));
                }
                Ok(Biases(biases))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Biases, A::Error> {
                let mut biases = Vec::new();
                while let Some(pair) = seq.next_element()? {
                    check(biases.len())?;
                    biases.push(pair);
                }
                Ok(Biases(biases))
            }
        }
        from.deserialize_any(BiasesVisitor)
    }
}

impl PartialSchema for Biases {
    fn schema() -> RefOr<Schema> {
        let of = |kind: Type| ObjectBuilder::new().schema_type(SchemaType::new(kind));
        let number = of(Type::Number).minimum(Some(-100.0)).maximum(Some(100.0));
        let forbidden = of(Type::Boolean).enum_values(Some([false]));
        let bias = OneOfBuilder::new().item(number).item(forbidden);
        let by_token = of(Type::Object).additional_properties(Some(Schema::from(bias)));
        let pair = ArrayBuilder::new().min_items(Some(2)).max_items(Some(2));
        let pairs = ArrayBuilder::new()
            .items(pair.items(ObjectBuilder::new().schema_type(SchemaType::AnyValue)))
            .max_items(Some(MAX_ENTRIES));
        OneOfBuilder::new().item(by_token).item(pairs).into()
    }
}

impl ToSchema for Biases {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("Biases")
    }
}
