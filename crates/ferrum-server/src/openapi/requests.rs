//! What routes take: the types that they are read with.

use crate::request::{
    Chat, Choices, Completion, Conversation, Detokenize, Embeddings, Forms, Infill, LoadAdapter,
    Messaging, NativeCompletion, NativeOptions, Respond, Sampling, Score, Source, Standing,
    Template, Tokenize, Turns, UnloadAdapter,
};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// A request of several parts.
macro_rules! request {
    ($($part:ty),*) => {
        json!({"allOf": [$({"$ref": format!("#/components/schemas/{}", <$part>::name())}),*]})
    };
}

pub(super) fn completions() -> Value {
    request!(Standing, Sampling, Choices, Forms, Completion)
}

pub(super) fn native() -> Value {
    request!(Standing, Sampling, Forms, NativeOptions, NativeCompletion)
}

pub(super) fn infill() -> Value {
    request!(Standing, Sampling, Forms, NativeOptions, Infill)
}

pub(super) fn chat() -> Value {
    request!(Standing, Sampling, Choices, Forms, Chat, Conversation)
}

pub(super) fn embeddings() -> Value {
    request!(Standing, Embeddings)
}

pub(super) fn responses() -> Value {
    request!(Standing, Sampling, Respond)
}

pub(super) fn messages() -> Value {
    request!(Standing, Sampling, Messaging, Turns)
}

pub(super) fn count_tokens() -> Value {
    request!(Standing, Turns)
}

pub(super) fn tokenize() -> Value {
    request!(Tokenize, Conversation)
}

pub(super) fn template() -> Value {
    request!(Template, Conversation)
}

pub(super) fn score() -> Value {
    request!(Standing, Score)
}

pub(super) fn detokenize() -> Value {
    request!(Detokenize)
}

pub(super) fn load_adapter() -> Value {
    request!(LoadAdapter)
}

pub(super) fn unload_adapter() -> Value {
    request!(UnloadAdapter)
}

/// The schemas of all parts, and of what they are made of.
pub(super) fn schemas() -> Map<String, Value> {
    let mut all: Vec<(String, RefOr<Schema>)> = Vec::new();
    macro_rules! add {
        ($($part:ty),*) => {$(
            all.push((<$part>::name().into_owned(), <$part>::schema()));
            <$part>::schemas(&mut all);
        )*};
    }
    add!(
        Standing,
        Sampling,
        Choices,
        Forms,
        Completion,
        NativeOptions,
        NativeCompletion,
        Infill,
        Chat,
        Conversation,
        Embeddings,
        Respond,
        Messaging,
        Turns,
        // Blocks may hold blocks, so what they refer to is not followed.
        Source,
        Tokenize,
        Template,
        Score,
        Detokenize,
        LoadAdapter,
        UnloadAdapter
    );
    let written = |(name, schema)| (name, serde_json::to_value(schema).unwrap_or_default());
    all.into_iter().map(written).collect()
}
