//! One file for each group of routes.

mod adapters;
mod anthropic;
mod audio;
mod chat;
mod completions;
mod embeddings;
mod llama_cpp;
mod openai_messages;
mod page;
mod responses;
mod scores;
mod slots;
mod status;
mod texts;
mod tokens;

use crate::http::app::App;
use crate::openapi;
use crate::paths::{
    COUNT_TOKENS, HEALTH, LOAD_ADAPTER, MESSAGES, METRICS, PAGE, READY, UNLOAD_ADAPTER,
};
use axum::routing::{MethodRouter, get, post};
use std::sync::Arc;

/// Every route.
pub(crate) fn table() -> Vec<(&'static str, MethodRouter<Arc<App>>)> {
    let response = get(responses::retrieve).delete(responses::delete);
    vec![
        (HEALTH, get(status::health)),
        (PAGE, get(page::page)),
        (READY, get(status::ready)),
        ("/ping", get(status::ready).post(status::ready)),
        (METRICS, get(status::metrics)),
        ("/openapi.json", get(openapi::openapi)),
        ("/v1/models", get(status::models)),
        // The name of a model may have slashes.
        ("/v1/models/{*name}", get(status::model)),
        ("/tokenize", post(tokens::tokenize)),
        ("/detokenize", post(tokens::detokenize)),
        ("/v1/completions", post(completions::completions)),
        ("/v1/chat/completions", post(chat::chat)),
        ("/v1/embeddings", post(embeddings::embeddings)),
        ("/v1/responses", post(responses::create)),
        ("/v1/responses/input_tokens", post(responses::count)),
        ("/v1/responses/{id}", response),
        (
            "/v1/responses/{id}/input_items",
            get(responses::input_items),
        ),
        ("/v1/score", post(scores::score)),
        ("/score", post(scores::score)),
        ("/v1/audio/transcriptions", post(audio::transcriptions)),
        ("/v1/audio/translations", post(audio::translations)),
        ("/v1/rerank", post(scores::rerank)),
        ("/v2/rerank", post(scores::rerank)),
        ("/rerank", post(scores::rerank)),
        ("/pooling", post(embeddings::pooling)),
        ("/apply-template", post(tokens::apply_template)),
        ("/props", get(status::props)),
        ("/version", get(status::version)),
        ("/completion", post(llama_cpp::completion)),
        ("/infill", post(llama_cpp::infill)),
        ("/slots", get(slots::slots)),
        // For clients of llama.cpp and vLLM, and those whose base address lacks the version.
        ("/models", get(status::models)),
        ("/completions", post(completions::completions)),
        ("/chat/completions", post(chat::chat)),
        ("/embeddings", post(embeddings::embeddings)),
        ("/responses", post(responses::create)),
        (LOAD_ADAPTER, post(adapters::load)),
        (UNLOAD_ADAPTER, post(adapters::unload)),
        (MESSAGES, post(anthropic::messages)),
        (COUNT_TOKENS, post(anthropic::count_tokens)),
    ]
}
