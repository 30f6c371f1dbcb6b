//! Checks of sizes and of index buffers that the host sees, shared by all backends. A wrong argument gives
//! the same error wherever it is found.

pub use crate::size::{elements, require};
pub use crate::weight_part::{check_rows, check_weight_parts};
use crate::{BatchShape, Error, PagedKvShape, Result};
use std::ops::Range;

/// `id` as an index below `count`; [`Error::InvalidArgument`] otherwise.
#[inline]
pub fn index(op: &'static str, what: &'static str, id: i32, count: usize) -> Result<usize> {
    usize::try_from(id)
        .ok()
        .filter(|index| *index < count)
        .ok_or_else(|| Error::invalid(op, format!("{what} is {id}, expected 0 to below {count}")))
}

/// Each token's row is one of `table_rows`, where the host sees them.
#[inline]
pub fn rope_rows(op: &'static str, rows: &[i32], table_rows: usize) -> Result<()> {
    for row in rows {
        index(op, "a row of the rope tables", *row, table_rows)?;
    }
    Ok(())
}

/// The tokens of sequence `s` and its slot, where the host sees both; the op's own check has seen the lengths.
///
/// # Errors
/// `InvalidArgument` for tokens that are not the batch's, and a slot that is not there.
#[inline]
pub fn state_sequence(
    op: &'static str,
    shape: BatchShape,
    (query_starts, state_slots): (&[i32], &[i32]),
    slots: usize,
    s: usize,
) -> Result<(Range<usize>, usize)> {
    let start = index(op, "query_starts", query_starts[s], shape.tokens + 1)?;
    let end = index(op, "query_starts", query_starts[s + 1], shape.tokens + 1)?;
    require(op, start <= end, || {
        format!("query_starts decrease from {start} to {end} at sequence {s}")
    })?;
    Ok((
        start..end,
        index(op, "a state slot", state_slots[s], slots)?,
    ))
}

/// A checked batch whose buffers the host sees: its sequences, one by one.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    shape: BatchShape,
    query_starts: &'a [i32],
    kv_lens: &'a [i32],
    block_tables: &'a [i32],
}

/// One sequence of a [`Batch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Its tokens in the flat batch.
    pub tokens: Range<usize>,
    /// Key index of its first token in this step.
    pub first_index: usize,
    /// Its keys.
    pub kv_len: usize,
}

impl<'a> Batch<'a> {
    /// The batch of `shape` over `[query_starts, kv_lens, block_tables]`, whose lengths
    /// the op's own check has seen.
    ///
    /// # Errors
    /// `InvalidArgument` when the sequences do not make up the tokens.
    #[inline]
    pub fn new(op: &'static str, shape: BatchShape, buffers: [&'a [i32]; 3]) -> Result<Self> {
        let [query_starts, kv_lens, block_tables] = buffers;
        let BatchShape { tokens, seqs, .. } = shape;
        let (first, last) = (query_starts[0], query_starts[seqs]);
        require(op, first == 0 && last as usize == tokens, || {
            format!("query_starts go from {first} to {last}, expected 0 to {tokens}")
        })?;
        Ok(Self {
            shape,
            query_starts,
            kv_lens,
            block_tables,
        })
    }

    /// Tokens.
    #[inline]
    pub fn tokens(&self) -> usize {
        self.shape.tokens
    }

    /// Sequences.
    #[inline]
    pub fn seqs(&self) -> usize {
        self.shape.seqs
    }

    /// The block table of sequence `s`.
    #[inline(always)]
    pub fn table(&self, s: usize) -> &'a [i32] {
        let stride = self.shape.table_stride;
        &self.block_tables[s * stride..][..stride]
    }

    /// Sequence `s`.
    ///
    /// # Errors
    /// `InvalidArgument` when its tokens and keys contradict each other or the batch's sizes.
    #[inline]
    pub fn sequence(&self, op: &'static str, s: usize) -> Result<Sequence> {
        let BatchShape {
            tokens,
            max_query_len,
            max_kv_len,
            ..
        } = self.shape;
        let start = index(op, "query_starts", self.query_starts[s], tokens + 1)?;
        let end = index(op, "query_starts", self.query_starts[s + 1], tokens + 1)?;
        require(op, start <= end, || {
            format!("query_starts decrease from {start} to {end} at sequence {s}")
        })?;
        let kv_len = index(op, "kv_lens", self.kv_lens[s], i32::MAX as usize)?;
        let query_len = end - start;
        require(op, query_len <= kv_len || query_len == 0, || {
            format!(
                "sequence {s} has {query_len} tokens and {kv_len} keys, expected at least as many"
            )
        })?;
        let announced = query_len <= max_query_len && (kv_len <= max_kv_len || query_len == 0);
        require(op, announced, || {
            format!(
                "sequence {s} has {query_len} tokens and {kv_len} keys, \
                 the batch announces at most {max_query_len} and {max_kv_len}"
            )
        })?;
        Ok(Sequence {
            tokens: start..end,
            first_index: kv_len.saturating_sub(query_len),
            kv_len,
        })
    }
}

/// Block and slot inside it of the key with index `at`, by its sequence's block table.
///
/// # Errors
/// `InvalidArgument` when the table ends before it or names no block of the pool.
#[inline]
pub fn block_and_slot(
    op: &'static str,
    table: &[i32],
    shape: &PagedKvShape,
    at: usize,
) -> Result<(usize, usize)> {
    let entry = at / shape.block_size;
    let Some(id) = table.get(entry) else {
        let len = table.len();
        let reason = format!("key {at} needs block table entry {entry}, the table has {len}");
        return Err(Error::invalid(op, reason));
    };
    Ok((
        index(op, "a block id", *id, shape.blocks)?,
        at % shape.block_size,
    ))
}

/// A sorted routing whose buffers the host sees, cut to `[pairs]`, `[pairs]`, `[experts]` and
/// `[experts + 1]`.
#[derive(Clone, Copy, Debug)]
pub struct SortedPairs<'a> {
    /// Chosen expert of each pair.
    pub expert_ids: &'a [i32],
    /// Pairs sorted by expert.
    pub sorted_pairs: &'a [i32],
    /// Pairs of each expert.
    pub tokens_per_expert: &'a [i32],
    /// First index in `sorted_pairs` of each expert.
    pub offsets: &'a [i32],
}

impl SortedPairs<'_> {
    /// Calls `each(expert, start, count)` for each expert that has pairs, which are
    /// `ids[start..][..count]`.
    ///
    /// # Errors
    /// `InvalidArgument` when a pair does not stand in `ids` exactly once, with its expert: then
    /// `compute_ids_tpe` was forgotten.
    pub fn groups(
        &self,
        op: &'static str,
        mut each: impl FnMut(usize, usize, usize),
    ) -> Result<()> {
        let pairs = self.expert_ids.len();
        let unsorted = |what: String| {
            let reason = format!("{what}\nhint: run compute_ids_tpe first");
            Error::invalid(op, reason)
        };
        let mut start = 0;
        for (expert, &count) in self.tokens_per_expert.iter().enumerate() {
            let next = self.offsets[expert + 1];
            let end = usize::try_from(next).unwrap_or(usize::MAX);
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            let bounds = self.offsets[expert] as usize == start && end <= pairs;
            if !bounds || end.checked_sub(start) != Some(count) {
                let bounds = format!("{} to {next}", self.offsets[expert]);
                let what = format!("expert {expert} has {count} pairs from {bounds}, of {pairs}");
                return Err(unsorted(what));
            }
            let mut last = -1;
            for &pair in &self.sorted_pairs[start..end] {
                // Ascending within an expert, and of that expert: so no pair stands here twice.
                let found = self.expert_ids.get(pair as usize);
                if pair <= last || found != Some(&(expert as i32)) {
                    let what = format!("the pairs of expert {expert} are not sorted");
                    return Err(unsorted(what));
                }
                last = pair;
            }
            if count > 0 {
                each(expert, start, count);
            }
            start = end;
        }
        if start != pairs {
            return Err(unsorted(format!("{start} of {pairs} pairs are sorted")));
        }
        Ok(())
    }
}
