//! The routes with their methods.

use super::components::{Components, all_of, any_of};
use crate::paths::{HEALTH, PAGE};
use crate::request::{
    Chat, Choices, Completion, Conversation, Detokenize, Embeddings, Infill, LlamaCppCompletion,
    LlamaCppOptions, LoadAdapter, Messaging, Object, Rerank, ResponsesRequest, Sampling, Score,
    Source, Standing, StructuredOutputFields, Template, Tokenize, Turns, UnloadAdapter,
};
use crate::response::{
    AnthropicEvent, AnthropicMessage, AnthropicModel, AnthropicModelList, ChatCompletion,
    ChatCompletionChunk, DeletedResponse, Detokenized, EmbeddingList, ErrorBody, HealthReport,
    InputTokens, LlamaCppAnswer, LlamaCppChunk, ModelCard, ModelList, PoolingList, Props,
    Readiness, RerankList, Response, ResponseEvent, ResponseItemList, ResponseTokens, ScoreList,
    Slot, Templated, TextCompletion, Tokenized, Transcription, VerboseTranscription, Version,
};
use serde_json::{Value, json};

/// A route with one method.
pub(super) struct Operation {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    pub(super) summary: &'static str,
    pub(super) request: Option<Value>,
    /// Type of the request.
    pub(super) takes: &'static str,
    /// Type and schema of each form of the answer.
    pub(super) answers: Vec<(&'static str, Value)>,
    /// Statuses of errors beside those that any route may have.
    pub(super) errors: &'static [u16],
}

pub(super) const JSON: &str = "application/json";
const FORM: &str = "multipart/form-data";
const VTT: &str = "text/vtt; charset=utf-8";
const EVENTS: &str = "text/event-stream";
const HTML: &str = "text/html";
const PLAIN: &str = "text/plain";

/// Statuses of routes that ask for a model, which may have to be loaded, and of those that ask its engine.
const MODEL: &[u16] = &[400, 404, 408, 413, 415, 429, 503, 504];

pub(super) fn all(schemas: &mut Components) -> Vec<Operation> {
    let mut all = read_operations(schemas);
    all.extend(openai(schemas));
    all.extend(responses(schemas));
    all.extend(anthropic(schemas));
    all.extend(vllm(schemas));
    all.extend(llama_cpp(schemas));
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
        takes: JSON,
        answers: vec![(JSON, answer)],
        errors,
    }
}

/// It asks for a model.
fn post(path: &'static str, summary: &'static str, (request, answer): (Value, Value)) -> Operation {
    Operation {
        method: "post",
        request: Some(request),
        ..get(path, summary, answer, MODEL)
    }
}

/// It asks about a file, in a form.
fn recording(path: &'static str, summary: &'static str, answer: Value) -> Operation {
    let text = json!({"type": "string"});
    let formats = json!({"type": "string", "enum": ["json", "text", "srt", "vtt", "verbose_json"]});
    let form = json!({
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "model": text,
            "language": text,
            "response_format": formats,
            "temperature": {"type": "number", "enum": [0]},
            "timestamp_granularities[]": {"type": "array", "items": {"type": "string", "enum": ["segment"]}},
        },
    });
    let mut operation = post(path, summary, (form, answer));
    operation.takes = FORM;
    for kind in [PLAIN, VTT] {
        operation.answers.push((kind, text.clone()));
    }
    operation
}

/// Its answers can be streamed, too: events with data of this schema, which OpenAPI 3.1 has no better place for.
fn stream(data: Value, mut operation: Operation) -> Operation {
    operation.answers.push((EVENTS, data));
    operation
}

/// Its answers are text of another type.
fn text(kind: &'static str, operation: Operation) -> Operation {
    Operation {
        answers: vec![(kind, json!({"type": "string"}))],
        ..operation
    }
}

fn list(entry: Value) -> Value {
    json!({"type": "array", "items": entry})
}

/// What there is to look at.
fn read_operations(schemas: &mut Components) -> Vec<Operation> {
    let health = schemas.of::<HealthReport>();
    let ready = schemas.of::<Readiness>();
    let models = any_of!(schemas; ModelList, AnthropicModelList);
    let model = any_of!(schemas; ModelCard, AnthropicModel);
    let document = json!({"type": "object"});
    vec![
        get(
            HEALTH,
            "Whether the steps of all engines end.",
            health,
            &[503],
        ),
        get(
            "/ready",
            "Whether requests are taken.",
            ready.clone(),
            &[503],
        ),
        get("/ping", "The same, as SageMaker asks.", ready, &[503]),
        text(
            PLAIN,
            get("/metrics", "Figures for Prometheus.", Value::Null, &[]),
        ),
        text(HTML, get(PAGE, "The chat page.", Value::Null, &[])),
        get("/openapi.json", "This document.", document, &[]),
        get("/v1/models", "The models that are served.", models, &[]),
        get("/v1/models/{name}", "A model.", model, &[404]),
    ]
}

/// OpenAI's older routes.
fn openai(schemas: &mut Components) -> Vec<Operation> {
    let text = all_of!(schemas; Standing, Sampling, Choices, StructuredOutputFields, Completion);
    let text = (text, schemas.of::<TextCompletion<'_>>());
    let text_events = any_of!(schemas; TextCompletion<'_>, ErrorBody<'_>);
    let chat =
        all_of!(schemas; Standing, Sampling, Choices, StructuredOutputFields, Chat, Conversation);
    let chat = (chat, schemas.of::<ChatCompletion<'_>>());
    let chat_events = any_of!(schemas; ChatCompletionChunk<'_>, ErrorBody<'_>);
    let embeddings = all_of!(schemas; Standing, Embeddings);
    let embeddings = (embeddings, schemas.of::<EmbeddingList<'_>>());
    let speech = any_of!(schemas; Transcription, VerboseTranscription);
    vec![
        stream(
            text_events,
            post("/v1/completions", "Goes on with texts.", text),
        ),
        stream(
            chat_events,
            post(
                "/v1/chat/completions",
                "The next message of a conversation.",
                chat,
            ),
        ),
        post("/v1/embeddings", "Vectors of texts.", embeddings),
        recording(
            "/v1/audio/transcriptions",
            "What is said in a recording.",
            speech.clone(),
        ),
        recording(
            "/v1/audio/translations",
            "What is said in a recording, in English.",
            speech,
        ),
    ]
}

/// OpenAI's responses.
fn responses(schemas: &mut Components) -> Vec<Operation> {
    let request = all_of!(schemas; Standing, Sampling, ResponsesRequest);
    let response = schemas.of::<Response<'_>>();
    let events = schemas.of::<ResponseEvent<'_>>();
    let count = schemas.of::<ResponseTokens>();
    let items = schemas.of::<ResponseItemList<'_>>();
    let deleted = schemas.of::<DeletedResponse<'_>>();
    let kept = "/v1/responses/{id}";
    vec![
        stream(
            events,
            post(
                "/v1/responses",
                "The next part of a conversation.",
                (request.clone(), response.clone()),
            ),
        ),
        post(
            "/v1/responses/input_tokens",
            "Tokens that a request would have.",
            (request, count),
        ),
        get(kept, "A response that was kept.", response, &[404]),
        get(
            "/v1/responses/{id}/input_items",
            "What a response that was kept answers.",
            items,
            &[400, 404],
        ),
        Operation {
            method: "delete",
            ..get(kept, "Forgets a response.", deleted, &[404])
        },
    ]
}

/// Anthropic's routes.
fn anthropic(schemas: &mut Components) -> Vec<Operation> {
    // Blocks may hold blocks, so what they refer to is not followed.
    schemas.add::<Source>();
    let messages = all_of!(schemas; Standing, Sampling, Messaging, Turns);
    let messages = (messages, schemas.of::<AnthropicMessage<'_>>());
    let events = schemas.of::<AnthropicEvent<'_>>();
    let count = all_of!(schemas; Standing, Turns);
    let count = (count, schemas.of::<InputTokens>());
    vec![
        stream(
            events,
            post(
                "/v1/messages",
                "The next message, as Anthropic has it.",
                messages,
            ),
        ),
        post(
            "/v1/messages/count_tokens",
            "Tokens of a conversation.",
            count,
        ),
    ]
}

/// vLLM's routes.
fn vllm(schemas: &mut Components) -> Vec<Operation> {
    let tokenize = all_of!(schemas; Tokenize, Conversation);
    let tokenize = (tokenize, schemas.of::<Tokenized>());
    let detokenize = (schemas.of::<Detokenize>(), schemas.of::<Detokenized>());
    let score = all_of!(schemas; Standing, Score);
    let score = (score, schemas.of::<ScoreList<'_>>());
    let rerank = all_of!(schemas; Standing, Rerank);
    let rerank = (rerank, schemas.of::<RerankList<'_>>());
    let pooling = all_of!(schemas; Standing, Embeddings);
    let pooling = (pooling, schemas.of::<PoolingList<'_>>());
    let version = schemas.of::<Version>();
    let load = (schemas.of::<LoadAdapter>(), Value::Null);
    let unload = (schemas.of::<UnloadAdapter>(), Value::Null);
    vec![
        post("/tokenize", "Tokens of a text or a conversation.", tokenize),
        post("/detokenize", "Text of tokens.", detokenize),
        post("/v1/score", "How alike texts are.", score),
        post(
            "/v1/rerank",
            "Documents by how well they answer a query.",
            rerank.clone(),
        ),
        post(
            "/v2/rerank",
            "The same, for Cohere's newer clients.",
            rerank,
        ),
        post("/pooling", "Vectors of texts, as vLLM has them.", pooling),
        get("/version", "The version of the server.", version, &[]),
        text(
            PLAIN,
            post(
                "/v1/load_lora_adapter",
                "Loads a LoRA adapter from the server's folder.",
                load,
            ),
        ),
        text(
            PLAIN,
            post(
                "/v1/unload_lora_adapter",
                "Takes a LoRA adapter away.",
                unload,
            ),
        ),
    ]
}

/// llama.cpp's routes.
fn llama_cpp(schemas: &mut Components) -> Vec<Operation> {
    let template = all_of!(schemas; Template, Conversation);
    let template = (template, schemas.of::<Templated>());
    let completion = all_of!(schemas; Standing, Sampling, StructuredOutputFields, LlamaCppOptions, LlamaCppCompletion);
    let infill =
        all_of!(schemas; Standing, Sampling, StructuredOutputFields, LlamaCppOptions, Infill);
    // With `response_fields` it has only those.
    let answer = any_of!(schemas; LlamaCppAnswer<'_>, Object);
    // One for one prompt, else a list.
    let answers = json!({"anyOf": [answer, list(answer.clone())]});
    let events = any_of!(schemas; LlamaCppChunk, LlamaCppAnswer<'_>, Object, ErrorBody<'_>);
    let slots = list(schemas.of::<Slot>());
    let props = schemas.of::<Props<'_>>();
    vec![
        stream(
            events.clone(),
            post(
                "/completion",
                "Goes on with prompts, as llama.cpp has it.",
                (completion, answers),
            ),
        ),
        stream(
            events,
            post(
                "/infill",
                "Fills in what is between a prefix and a suffix, as llama.cpp has it.",
                (infill, answer),
            ),
        ),
        get(
            "/slots",
            "What a model is answering now (`?model=NAME`; without it, the first).",
            slots,
            &[400, 404, 503],
        ),
        get(
            "/props",
            "The first model, as llama.cpp tells it.",
            props,
            &[404, 503, 504],
        ),
        post(
            "/apply-template",
            "The prompt of a conversation, as llama.cpp has it.",
            template,
        ),
    ]
}
