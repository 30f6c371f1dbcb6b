//! Asynchronous HTTP client and model downloads.
//!
//! [`http`] speaks HTTP/1.1 over TCP or TLS, with a bound on everything that a server decides: time, size,
//! redirects. [`hub`] fetches models from a Hugging Face hub into its cache, whose layout lives in
//! [`ferrum_formats::hub`]. Nothing here knows what a model is for.

mod error;
pub mod http;
pub mod hub;

pub use error::{ClientError, Result};
