//! Connections, middleware and request bodies: everything between the socket and a route.

pub(crate) mod api_key;
pub(crate) mod app;
pub(crate) mod auth;
pub(crate) mod body_budget;
pub(crate) mod cors;
pub(crate) mod multipart;
pub(crate) mod parse_threads;
pub(crate) mod request_id;
pub(crate) mod router;
pub(crate) mod serve;
pub(crate) mod sse;
pub(crate) mod tls;
pub(crate) mod transport;
