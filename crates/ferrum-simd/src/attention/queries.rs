//! The queries of one sequence in a batch.

/// One sequence's share of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries {
    /// Its first query token in the flat batch.
    pub(crate) first_token: usize,
    /// Its query tokens.
    pub(crate) len: usize,
    /// Key index of the first.
    pub(crate) first_index: usize,
    /// Its keys.
    pub(crate) kv_len: usize,
}
