//! From options of a request to its output: engine requests, grammars, event streams and deltas.

pub(crate) mod chat_output;
pub(crate) mod generation_stream;
pub(crate) mod logprobs;
pub(crate) mod options;
pub(crate) mod request_context;
pub(crate) mod sampler_settings;
pub(crate) mod structured;
pub(crate) mod truncation;
pub(crate) mod usage;
