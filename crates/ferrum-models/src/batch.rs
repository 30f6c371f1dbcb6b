//! [`StepBatch`]: the tokens of one step, flat and ragged.
//!
//! Prefill, a chunk of a prompt, decode and mixtures differ only in how many tokens each sequence
//! brings. A batch is made to be cleared and filled again: a steady decode step allocates nothing.

use ferrum_kernels::SampleBatch;
use ferrum_types::{AdapterId, BlockId, Error, Result, TokenId};
use std::ops::Range;

/// Which of a sequence's tokens in a step want logits, or hidden states in their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None (a prompt chunk that is not the last).
    None,
    /// The last one.
    Last,
    /// All.
    All,
}

impl LogitRows {
    /// Those of a sequence with these rows.
    fn of(self, Range { start, end }: Range<usize>) -> Range<usize> {
        match self {
            Self::None => end..end,
            Self::Last => end.saturating_sub(1).max(start)..end,
            Self::All => start..end,
        }
    }
}

/// What one sequence brings to a step.
#[derive(Clone, Copy, Debug)]
pub struct SeqStep<'a> {
    /// New tokens; may be empty.
    pub tokens: &'a [TokenId],
    /// Position of the first of them: the number of tokens already in the cache.
    pub start: usize,
    /// Tokens of the sequence's whole prompt, also those of later chunks. Only length-dependent RoPE
    /// looks at it; it is why such a model gives the same result in chunks.
    pub prompt_len: usize,
    /// The sequence's KV blocks, enough for `start + tokens.len()` tokens.
    pub blocks: &'a [BlockId],
    /// Which tokens want logits.
    pub logits: LogitRows,
    /// The LoRA adapter that runs beside the weights.
    pub adapter: Option<AdapterId>,
    /// Whether they want the hidden states that logits are made of (after the final norm) instead.
    pub hidden: bool,
}

/// The tokens of one step over all sequences.
#[derive(Clone, Debug, Default)]
pub struct StepBatch {
    /// `[tokens]`.
    pub tokens: Vec<TokenId>,
    /// `[tokens]`: position of each in its sequence.
    pub positions: Vec<u32>,
    /// `[seqs + 1]`: first token of each sequence.
    pub query_starts: Vec<u32>,
    /// `[seqs]`: keys in the cache after this step.
    pub kv_lens: Vec<u32>,
    /// `[seqs]`: length of each sequence's prompt.
    pub prompt_lens: Vec<u32>,
    /// `[seqs]`: the LoRA adapter of each sequence.
    pub adapters: Vec<Option<AdapterId>>,
    /// Block tables of all sequences, one after the other.
    pub block_tables: Vec<BlockId>,
    /// `[seqs + 1]`: first entry of each sequence in `block_tables`.
    pub table_starts: Vec<u32>,
    /// Indices into `tokens` of the rows that want logits, ascending.
    pub logit_rows: Vec<u32>,
    /// Indices into `tokens` of the rows that want hidden states after the final norm, ascending. A row may want logits
    /// as well.
    pub hidden_rows: Vec<u32>,
    /// Rows whose residual stream is wanted where a stage of the runner ends, beside whatever else they want.
    pub taps: Vec<HiddenTap>,
    /// Tokens that only the device knows yet. Runners whose steps do not overlap never get any.
    pub choices: Vec<ChosenToken>,
    /// How the device chooses tokens of the rows that want a [sampled](crate::DeviceChoice::Sampled) one, in order.
    pub sampling: SampleBatch,
}

/// A token of a step that the step before it, which is still in flight, chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenToken {
    /// Index into the tokens of the step; the id that is there means nothing.
    pub token: u32,
    /// Row, among those with logits, of the step that was submitted before.
    pub row: u32,
}

/// The residual stream of a row behind a layer, with which a stage of the runner ends: what the next layer's norm
/// gets, or after the last layer the final norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HiddenTap {
    /// The layer.
    pub layer: u32,
    /// Index into the tokens of the step.
    pub row: u32,
}

impl StepBatch {
    /// Number of sequences.
    pub fn seqs(&self) -> usize {
        self.kv_lens.len()
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.query_starts.clear();
        self.kv_lens.clear();
        self.prompt_lens.clear();
        self.adapters.clear();
        self.block_tables.clear();
        self.table_starts.clear();
        self.logit_rows.clear();
        self.hidden_rows.clear();
        self.taps.clear();
        self.choices.clear();
        self.sampling.clear();
    }

    /// The token that was added last is whatever row `row` of the step before this one chooses, among its rows with
    /// logits.
    pub fn choose_last(&mut self, row: u32) {
        let token = self.tokens.len().saturating_sub(1) as u32;
        self.choices.push(ChosenToken { token, row });
    }

    /// Of the sequence that was added last, `rows` want their residual stream behind layer `layer` as well.
    pub fn tap_last(&mut self, layer: usize, rows: LogitRows) {
        let end = self.tokens.len();
        let first = self.query_starts.iter().rev().nth(1);
        let wanted = rows.of(first.map_or(end, |&first| first as usize)..end);
        let layer = layer as u32;
        let taps = wanted.map(|row| HiddenTap {
            layer,
            row: row as u32,
        });
        self.taps.extend(taps);
    }

    /// Adds a sequence.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a length does not fit 31 bits.
    pub fn push(&mut self, seq: SeqStep<'_>) -> Result<()> {
        let first = self.tokens.len();
        let kv_len = seq.start + seq.tokens.len();
        let prompt_len = seq.prompt_len;
        if [
            first + seq.tokens.len(),
            kv_len,
            prompt_len,
            self.block_tables.len() + seq.blocks.len(),
        ]
        .iter()
        .any(|&n| n > i32::MAX as usize)
        {
            return Err(Error::invalid(
                "step batch",
                "a length does not fit 31 bits",
            ));
        }
        if self.query_starts.is_empty() {
            self.query_starts.push(0);
            self.table_starts.push(0);
        }
        self.tokens.extend_from_slice(seq.tokens);
        self.positions.extend((seq.start..kv_len).map(|p| p as u32));
        self.query_starts.push(self.tokens.len() as u32);
        self.kv_lens.push(kv_len as u32);
        self.prompt_lens.push(prompt_len as u32);
        self.adapters.push(seq.adapter);
        self.block_tables.extend_from_slice(seq.blocks);
        self.table_starts.push(self.block_tables.len() as u32);
        let wanted = seq.logits.of(first..self.tokens.len());
        let rows = match seq.hidden {
            true => &mut self.hidden_rows,
            false => &mut self.logit_rows,
        };
        rows.extend(wanted.map(|row| row as u32));
        Ok(())
    }

    /// The block table of sequence `seq`.
    pub fn table(&self, seq: usize) -> &[BlockId] {
        &self.block_tables[self.table_starts[seq] as usize..self.table_starts[seq + 1] as usize]
    }

    /// The tokens (as a range of rows) of sequence `seq`.
    pub fn rows(&self, seq: usize) -> Range<usize> {
        self.query_starts[seq] as usize..self.query_starts[seq + 1] as usize
    }
}
