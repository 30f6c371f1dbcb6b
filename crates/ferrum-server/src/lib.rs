//! The HTTP server: OpenAI's and Anthropic's routes over engines, one for each loaded model.
//!
//! This crate handles HTTP, JSON and the API shapes, and does not know devices, model files or scheduling. It has a
//! tokenizer and a template to turn requests into tokens, and an [`EngineHandle`](ferrum_engine::EngineHandle) to submit
//! them to. Models are loaded by the [`ModelLoader`] that it is given.
//!
//! A request's life: `serve` accepts the connection, with timeouts in `transport`, `record` records it for the access
//! log, `app` checks the key and reads the body within its limits (`body_budget`), `models` gives the model that it asks
//! for, loaded if need be, a route reads it as types (`request`, `sampling`) and reports the fields that it ignores, text
//! becomes tokens on a thread that may block, the engine gives an event stream for each prompt, and `generation_stream`
//! merges them. The answer is either gathered whole or sent as server-sent events (`sse`), both in types of `response`.
//! When the client disconnects, the stream is dropped, and that cancels its sequences.

mod adapters;
mod app;
mod auth;
mod body_budget;
mod chat_output;
mod config;
mod conversation;
mod cors;
mod error;
mod fim;
mod generation_stream;
mod images;
mod logprobs;
mod metrics;
mod model;
mod models;
mod multipart;
mod openapi;
mod otlp;
mod output;
mod page;
mod parse_threads;
mod record;
mod request;
mod request_id;
mod response;
mod routes;
mod sampling;
mod serve;
mod served;
mod slots;
mod special_token_escape;
mod sse;
mod store;
mod structured;
mod template_limits;
mod tls;
mod trace;
mod transport;

pub use auth::ApiKey;
pub use config::ServerConfig;
pub use cors::CorsOrigin;
pub use error::ApiError;
pub use images::ServedVision;
pub use model::ServedModel;
pub use models::{ModelEvent, ModelLoader, ModelSummary};
pub use otlp::OtlpEndpoint;
pub use output::CallFormat;
pub use serve::{Server, ShutdownError, stop_signal};
pub use served::{LoadedModel, ServedEncoder, ServedSpeech};
pub use tls::{Tls, TlsError};
