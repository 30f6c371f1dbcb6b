//! The access log, metrics, traces and slots of running choices.

pub(crate) mod metrics;
pub(crate) mod otlp;
pub(crate) mod record;
pub(crate) mod slots;
pub(crate) mod trace;
