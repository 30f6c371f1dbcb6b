//! The access log, metrics, traces and slots of running choices.

pub(crate) mod metrics;
pub(crate) mod otlp;
pub(crate) mod prometheus;
pub(crate) mod record;
pub(crate) mod slots;
pub(crate) mod span;
pub(crate) mod trace;
