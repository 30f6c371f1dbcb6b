//! The routes with their methods.

use super::schema::object;
use super::{answers, requests};
use crate::routes::{HEALTH, PAGE};
use serde_json::{Value, json};

/// A route with one method.
pub(super) struct Operation {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    pub(super) summary: &'static str,
    pub(super) request: Option<Value>,
    /// Type and schema of each form of the answer; null for no schema.
    pub(super) answers: Vec<(&'static str, Value)>,
    /// Statuses of errors beside those that any route may have.
    pub(super) errors: &'static [u16],
}

pub(super) const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
const HTML: &str = "text/html";
const PLAIN: &str = "text/plain";

/// Statuses of routes that ask for a model, which may have to be loaded.
const MODEL: &[u16] = &[400, 404, 408, 413, 415, 429, 503, 504];
/// Statuses of routes that ask the engine.
const ENGINE: &[u16] = &[400, 404, 408, 413, 415, 429, 503, 504];

pub(super) fn all() -> Vec<Operation> {
    let mut all = looks();
    all.extend(openai());
    all.extend(anthropic());
    all.extend(vllm());
    all.extend(llama_cpp());
    all
}

fn get(
    path: &'static str,
    summary: &'static str,
    answer: Value,
    errors: &'static [u16],
) -> Operation {
    Operation {
        path,
        method: "get",
        summary,
        request: None,
        answers: vec![(JSON, answer)],
        errors,
    }
}

fn post(
    path: &'static str,
    summary: &'static str,
    (request, answer): (Value, Value),
    errors: &'static [u16],
) -> Operation {
    Operation {
        path,
        method: "post",
        summary,
        request: Some(request),
        answers: vec![(JSON, answer)],
        errors,
    }
}

/// Its answers can be streamed, too.
fn stream(mut operation: Operation) -> Operation {
    // OpenAPI 3.1 has no words for a stream of values.
    operation.answers.push((EVENTS, Value::Null));
    operation
}

/// Its answers are text of another type.
fn text(kind: &'static str, operation: Operation) -> Operation {
    Operation {
        answers: vec![(kind, json!({"type": "string"}))],
        ..operation
    }
}

/// What there is to look at.
fn looks() -> Vec<Operation> {
    let document = json!({"type": "object"});
    vec![
        get(
            HEALTH,
            "Whether the steps of all engines end.",
            answers::health(),
            &[503],
        ),
        get(
            "/ready",
            "Whether requests are taken.",
            answers::ready(),
            &[503],
        ),
        get(
            "/ping",
            "The same, as SageMaker asks.",
            answers::ready(),
            &[503],
        ),
        text(
            PLAIN,
            get("/metrics", "Figures for Prometheus.", Value::Null, &[]),
        ),
        text(HTML, get(PAGE, "The chat page.", Value::Null, &[])),
        get("/openapi.json", "This document.", document, &[]),
        get(
            "/v1/models",
            "The models that are served.",
            answers::models(),
            &[],
        ),
        get("/v1/models/{name}", "A model.", answers::model(), &[404]),
    ]
}

/// OpenAI's routes.
fn openai() -> Vec<Operation> {
    let completions = (requests::completions(), answers::completion());
    let chat = (requests::chat(), answers::chat());
    let embeddings = (requests::embeddings(), answers::embeddings());
    let responses = (requests::responses(), answers::response());
    let count = (requests::responses(), answers::response_tokens());
    let kept = "/v1/responses/{id}";
    vec![
        stream(post(
            "/v1/completions",
            "Goes on with texts.",
            completions,
            ENGINE,
        )),
        stream(post(
            "/v1/chat/completions",
            "The next message of a conversation.",
            chat,
            ENGINE,
        )),
        post("/v1/embeddings", "Vectors of texts.", embeddings, ENGINE),
        stream(post(
            "/v1/responses",
            "The next part of a conversation.",
            responses,
            ENGINE,
        )),
        post(
            "/v1/responses/input_tokens",
            "Tokens that a request would have.",
            count,
            MODEL,
        ),
        get(
            kept,
            "A response that was kept.",
            answers::response(),
            &[404],
        ),
        get(
            "/v1/responses/{id}/input_items",
            "What a response that was kept answers.",
            answers::items(),
            &[400, 404],
        ),
        Operation {
            method: "delete",
            ..get(kept, "Forgets a response.", answers::deleted(), &[404])
        },
    ]
}

/// Anthropic's routes.
fn anthropic() -> Vec<Operation> {
    let messages = (requests::messages(), answers::message());
    let count = (requests::count_tokens(), answers::count());
    vec![
        stream(post(
            "/v1/messages",
            "The next message, as Anthropic has it.",
            messages,
            ENGINE,
        )),
        post(
            "/v1/messages/count_tokens",
            "Tokens of a conversation.",
            count,
            MODEL,
        ),
    ]
}

/// vLLM's routes.
fn vllm() -> Vec<Operation> {
    let tokenize = (requests::tokenize(), answers::tokens());
    let detokenize = (requests::detokenize(), answers::text());
    let template = (requests::template(), answers::template());
    let score = (requests::score(), answers::scores());
    let pooling = (requests::embeddings(), answers::pooled());
    let (load, unload) = (requests::load_adapter(), requests::unload_adapter());
    let (load, unload) = ((load, Value::Null), (unload, Value::Null));
    vec![
        post(
            "/tokenize",
            "Tokens of a text or a conversation.",
            tokenize,
            MODEL,
        ),
        post("/detokenize", "Text of tokens.", detokenize, MODEL),
        post(
            "/apply-template",
            "The prompt of a conversation, as llama.cpp has it.",
            template,
            MODEL,
        ),
        post("/v1/score", "How alike texts are.", score, ENGINE),
        post(
            "/pooling",
            "Vectors of texts, as vLLM has them.",
            pooling,
            ENGINE,
        ),
        get(
            "/version",
            "The version of the server.",
            answers::version(),
            &[],
        ),
        get(
            "/props",
            "The first model, as llama.cpp tells it.",
            object(),
            &[404, 503, 504],
        ),
        text(
            PLAIN,
            post(
                "/v1/load_lora_adapter",
                "Loads a LoRA adapter from the server's folder.",
                load,
                ENGINE,
            ),
        ),
        text(
            PLAIN,
            post(
                "/v1/unload_lora_adapter",
                "Takes a LoRA adapter away.",
                unload,
                ENGINE,
            ),
        ),
    ]
}

/// llama.cpp's routes.
fn llama_cpp() -> Vec<Operation> {
    let completion = (requests::native(), answers::native());
    let infill = (requests::infill(), answers::native_answer());
    vec![
        stream(post(
            "/completion",
            "Goes on with prompts, as llama.cpp has it.",
            completion,
            ENGINE,
        )),
        stream(post(
            "/infill",
            "Fills in what is between a prefix and a suffix, as llama.cpp has it.",
            infill,
            ENGINE,
        )),
        get(
            "/slots",
            "What a model is answering now (`?model=NAME`; without it, the first).",
            answers::slots(),
            &[400, 404, 503],
        ),
    ]
}
