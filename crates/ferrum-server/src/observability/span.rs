//! Spans, as a request makes them and a collector gets them.

/// Value of an attribute of a span.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Attribute {
    Text(String),
    Number(i64),
    Truth(bool),
}

/// A named interval.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Span {
    pub(crate) trace: u128,
    pub(crate) id: u64,
    pub(crate) parent: Option<u64>,
    pub(crate) name: String,
    /// Whether it is the request's, not a phase of it.
    pub(crate) is_request: bool,
    /// Nanoseconds since 1970.
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) attributes: Vec<(&'static str, Attribute)>,
    pub(crate) failed: bool,
}
