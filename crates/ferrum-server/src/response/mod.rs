//! Answers as types: routes serialise them, and `openapi` derives the schemas of answers from the same types, so
//! neither says what the other does not.
//!
//! A field that can be absent is left out when it is `None` (`nullable = false`: it is never null); one that can be null
//! is always there (`required`). Log-probabilities and settings of samplers are f64, as which JSON has them.

/// Types with one value, a string: what an object says that it is.
macro_rules! literals {
    ($($name:ident = $text:literal;)*) => {$(
        #[doc = concat!("`", $text, "`.")]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name;

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str($text)
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                super::value::text_schema($text)
            }
        }

        impl utoipa::ToSchema for $name {
            fn name() -> std::borrow::Cow<'static, str> {
                std::borrow::Cow::Borrowed(stringify!($name))
            }
        }
    )*};
}

mod anthropic;
mod chat;
mod completion;
mod embeddings;
mod error;
mod llama_cpp;
mod responses;
mod scores;
mod status;
mod tokenize;
mod transcription;
mod value;

pub(crate) use anthropic::*;
pub(crate) use chat::*;
pub(crate) use completion::*;
pub(crate) use embeddings::*;
pub(crate) use error::*;
pub(crate) use llama_cpp::*;
pub(crate) use responses::*;
pub(crate) use scores::*;
pub(crate) use status::*;
pub(crate) use tokenize::*;
pub(crate) use transcription::*;
pub(crate) use value::*;
