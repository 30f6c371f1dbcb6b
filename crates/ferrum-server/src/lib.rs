//! The HTTP server: OpenAI's and Anthropic's routes over engines, one for each loaded model.
//!
//! This crate handles HTTP, JSON and the API shapes, and does not know devices, model files or scheduling. It has a
//! tokenizer and a template to turn requests into tokens, and an [`EngineHandle`](ferrum_engine::EngineHandle) to submit
//! them to. Models are loaded by the [`ModelLoader`] that it is given.
//!
//! A request's life: `http::serve` accepts the connection, with timeouts in `http::transport`, `observability::record`
//! records it for the access log, `http::router` checks the key, `http::app` reads the body within its limits
//! (`http::body_budget`), `models` gives the model that it asks for, loaded if need be, a route reads it as types (`request`,
//! `generation`) and reports the fields that it ignores, `media` fetches images that are elsewhere, where that is allowed,
//! `prompt` makes tokens of text on a thread that may block, the engine gives an event stream for each prompt, and `generation::generation_stream` merges them. The answer is either gathered
//! whole or sent as server-sent events (`http::sse`), both in types of `response`. When the client disconnects, the stream
//! is dropped, and that cancels its sequences.

mod config;
mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod generation;
mod http;
mod ids;
mod media;
mod models;
mod observability;
mod openapi;
mod output;
mod page;
mod paths;
mod prompt;
mod request;
mod response;
mod routes;
mod store;

pub use config::ServerConfig;
pub use error::ApiError;
pub use http::api_key::ApiKey;
pub use http::cors::CorsOrigin;
pub use http::serve::{Server, ShutdownError, stop_signal};
pub use http::tls::{Tls, TlsError};
pub use media::MediaDomain;
pub use models::model::ServedModel;
pub use models::served::{LoadedModel, ServedEncoder, ServedTranscriber};
pub use models::vision::ServedVision;
pub use models::{ModelEvent, ModelLoader, ModelSummary};
pub use observability::otlp::OtlpEndpoint;
pub use output::CallFormat;
