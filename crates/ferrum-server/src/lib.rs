//! The HTTP server: OpenAI's and Anthropic's routes over engines, one for each loaded model.
//!
//! This room knows HTTP, JSON and the shapes that clients expect. It has a tokenizer and a template to
//! turn requests into tokens, and an [`EngineHandle`](ferrum_engine::EngineHandle) to hand them to; of
//! devices, models' files and scheduling it knows nothing. Models are loaded by a [`ModelLoader`] that it
//! is given.
//!
//! A request's life: `serve` accepts the connection, whose clocks are in `transport`, `record` takes note of what becomes of it for the access
//! log, `app` checks the key and reads the body within its
//! limits (`bodies`), `models` gives the model that it asks for, loaded if need be, a route reads it as types (`request`,
//! `sampling`; what is left over is told), text becomes tokens on a thread that may block, the
//! engine gives an event stream for each prompt, and `answers` merges them. The answer is either gathered
//! whole or sent as server-sent events (`sse`), both in types of `response`. When the client goes away, its answers are dropped, and that
//! cancels them.

mod adapters;
mod answers;
mod app;
mod auth;
mod body_budget;
mod chat_output;
mod config;
mod conversation;
mod cors;
mod error;
mod fim;
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
mod readers;
mod record;
mod request;
mod request_id;
mod response;
mod routes;
mod sampling;
mod serve;
mod served;
mod slots;
mod spelled;
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
