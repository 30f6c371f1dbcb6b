//! [`StepBatch`]: the tokens of one step, flat and ragged.
//!
//! Prefill, a chunk of a prompt, decode and mixtures differ only in how many tokens each sequence
//! brings. A batch is made to be cleared and filled again: a steady decode step allocates nothing.

use crate::cache::{CacheGroup, StateSlots};
use ferrum_kernels::SampleBatch;
use ferrum_types::{AdapterId, BlockId, Error, Result, StateSlot, TokenId};
use std::ops::Range;
use std::sync::Arc;

/// The rows of an image in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRows {
    /// Which sequence of the step it is in.
    pub seq: usize,
    /// Rows of the step.
    pub rows: Range<usize>,
    /// Keys that each of them sees: all up to the image's end.
    pub keys: usize,
    /// `[tokens, hidden]`, of the whole image.
    pub embeddings: Arc<[f32]>,
    /// Tokens of the image before these rows.
    pub skipped: usize,
}

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
    /// The sequence's KV blocks in the first cache group, enough for `start + tokens.len()` tokens. Those in other
    /// groups follow with [`add_table`](StepBatch::add_table).
    pub blocks: &'a [BlockId],
    /// Which tokens want logits.
    pub logits: LogitRows,
    /// The LoRA adapter that runs beside the weights.
    pub adapter: Option<AdapterId>,
    /// Whether they want the hidden states that logits are made of (after the final norm) instead.
    pub hidden: bool,
}

/// Block tables of one cache group.
#[derive(Clone, Debug, Default)]
pub struct BlockTables {
    /// Those of all sequences, one after the other. In a group with a window,
    /// [released](BlockId::RELEASED) blocks are those that no token of the step sees.
    pub blocks: Vec<BlockId>,
    /// `[seqs + 1]`: first entry of each sequence in `blocks`.
    pub starts: Vec<u32>,
}

impl BlockTables {
    fn clear(&mut self) {
        self.blocks.clear();
        self.starts.clear();
    }

    fn push(&mut self, blocks: &[BlockId]) -> Result<()> {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        let end = u32::try_from(self.blocks.len() + blocks.len());
        let end = end.ok().filter(|&end| end <= i32::MAX as u32);
        let Some(end) = end else {
            let reason = "a length does not fit 31 bits";
            return Err(Error::invalid("step batch", reason));
        };
        self.blocks.extend_from_slice(blocks);
        self.starts.push(end);
        Ok(())
    }

    /// The table of sequence `seq`.
    fn of(&self, seq: usize) -> &[BlockId] {
        &self.blocks[self.starts[seq] as usize..self.starts[seq + 1] as usize]
    }
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
    /// Block tables by cache group: at least one.
    pub block_tables: Vec<BlockTables>,
    /// `[seqs]`: the slot of each sequence, where layers have recurrent states; else empty.
    pub state_slots: Vec<StateSlot>,
    /// Copies of states before the step, in order.
    pub state_inits: Vec<StateInit>,
    /// Copies of states after the step, `(from, to)`, in order.
    pub state_keeps: Vec<(StateSlot, StateSlot)>,
    /// Indices into `tokens` of the rows that want logits, ascending.
    pub logit_rows: Vec<u32>,
    /// Indices into `tokens` of the rows that want hidden states after the final norm, ascending. A row may want logits
    /// as well.
    pub hidden_rows: Vec<u32>,
    /// Rows whose hidden states are wanted at a place of the forward path, beside whatever else they want.
    pub aux_hidden: Vec<AuxHiddenState>,
    /// Rows whose embeddings are given: those of images, in order. See [`add_image`](Self::add_image).
    pub images: Vec<ImageRows>,
    /// Only for the runner of a [draft head](crate::DraftHead): the hidden states that go in beside each token, `[tokens,
    /// width]`.
    pub features: Vec<f32>,
    /// Whose hidden states these are.
    pub feature_source: FeatureSource,
    /// Tokens that only the device knows yet. Runners whose steps do not overlap never get any.
    pub pending_tokens: Vec<PendingToken>,
    /// How the device chooses tokens of the rows that want a [sampled](crate::DeviceChoice::Sampled) one, in order.
    pub sampling: SampleBatch,
}

/// What a state begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateInit {
    /// Its slot.
    pub slot: StateSlot,
    /// The slot of a state that was kept; `None`: zeros, as before the first token.
    pub from: Option<StateSlot>,
}

/// A token of a step that the step before it, which is still in flight, chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingToken {
    /// Index into the tokens of the step; the id that is there means nothing.
    pub token: u32,
    /// Row, among those with logits, of the step that was submitted before.
    pub row: u32,
}

/// A place in the forward path where hidden states can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuxHiddenPoint {
    /// The residual stream behind a layer: what the next layer's norm gets, or after the last layer the final norm.
    Layer(u32),
    /// What the final norm gives.
    FinalNorm,
}

/// A hidden state that a step returns beside logits: of a row, at a place of the forward path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxHiddenState {
    /// The place.
    pub point: AuxHiddenPoint,
    /// Index into the tokens of the step.
    pub row: u32,
}

/// Whose hidden states a draft head gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FeatureSource {
    /// The target's, as they were read there.
    #[default]
    Target,
    /// The head's own, of the step before.
    Head,
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
        self.block_tables.iter_mut().for_each(BlockTables::clear);
        self.state_slots.clear();
        self.state_inits.clear();
        self.state_keeps.clear();
        self.logit_rows.clear();
        self.hidden_rows.clear();
        self.aux_hidden.clear();
        self.images.clear();
        self.features.clear();
        self.feature_source = FeatureSource::default();
        self.pending_tokens.clear();
        self.sampling.clear();
    }

    /// The token that was added last is whatever row `row` of the step before this one chooses, among its rows with
    /// logits.
    pub fn set_last_pending(&mut self, row: u32) {
        let token = self.tokens.len().saturating_sub(1) as u32;
        self.pending_tokens.push(PendingToken { token, row });
    }

    /// Of the sequence that was added last, `rows` want their residual stream behind layer `layer` as well.
    pub fn add_aux_hidden_last(&mut self, layer: usize, rows: LogitRows) {
        let end = self.tokens.len();
        let first = self.query_starts.iter().rev().nth(1);
        let wanted = rows.of(first.map_or(end, |&first| first as usize)..end);
        let point = AuxHiddenPoint::Layer(layer as u32);
        let wanted = wanted.map(|row| AuxHiddenState {
            point,
            row: row as u32,
        });
        self.aux_hidden.extend(wanted);
    }

    /// All rows of sequence `seq` want their hidden states at each of `points`, row by row.
    pub fn add_aux_hidden(&mut self, seq: usize, points: &[AuxHiddenPoint]) {
        for row in self.rows(seq) {
            let row = row as u32;
            let wanted = points.iter().map(|&point| AuxHiddenState { point, row });
            self.aux_hidden.extend(wanted);
        }
    }

    /// Adds a sequence.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a length does not fit 31 bits.
    pub fn push(&mut self, seq: SeqStep<'_>) -> Result<()> {
        let first = self.tokens.len();
        let kv_len = seq.start + seq.tokens.len();
        let prompt_len = seq.prompt_len;
        if [first + seq.tokens.len(), kv_len, prompt_len]
            .iter()
            .any(|&n| n > i32::MAX as usize)
        {
            return Err(Error::invalid(
                "step batch",
                "a length does not fit 31 bits",
            ));
        }
        self.tables_of(0).push(seq.blocks)?;
        if self.query_starts.is_empty() {
            self.query_starts.push(0);
        }
        self.tokens.extend_from_slice(seq.tokens);
        self.positions.extend((seq.start..kv_len).map(|p| p as u32));
        self.query_starts.push(self.tokens.len() as u32);
        self.kv_lens.push(kv_len as u32);
        self.prompt_lens.push(prompt_len as u32);
        self.adapters.push(seq.adapter);
        let wanted = seq.logits.of(first..self.tokens.len());
        let rows = match seq.hidden {
            true => &mut self.hidden_rows,
            false => &mut self.logit_rows,
        };
        rows.extend(wanted.map(|row| row as u32));
        Ok(())
    }

    /// Says which blocks the sequence that was added last has in another cache group than the first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a length does not fit 31 bits.
    pub fn add_table(&mut self, group: usize, blocks: &[BlockId]) -> Result<()> {
        self.tables_of(group).push(blocks)
    }

    /// Says which state slot the sequence has that was added last; a sequence that begins with this step begins with
    /// zeros there.
    pub fn add_state(&mut self, slot: StateSlot) {
        self.state_slots.push(slot);
        let seq = self.seqs().saturating_sub(1);
        if self.kv_lens.get(seq).copied() == Some(self.rows(seq).len() as u32) {
            self.state_inits.push(StateInit { slot, from: None });
        }
    }

    fn tables_of(&mut self, group: usize) -> &mut BlockTables {
        if self.block_tables.len() <= group {
            self.block_tables.resize_with(group + 1, Default::default);
        }
        &mut self.block_tables[group]
    }

    /// The block table of sequence `seq` in a cache group.
    pub fn table(&self, group: usize, seq: usize) -> &[BlockId] {
        self.block_tables[group].of(seq)
    }

    /// Holds the block tables against the cache groups that they are of.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a table is missing, is too short, or names no block of the pool for a key that
    /// some token of the step sees.
    pub(crate) fn check_tables(&self, groups: &[CacheGroup]) -> Result<()> {
        let fail = |reason: String| Err(Error::invalid("step", reason));
        let seqs = self.seqs();
        for (index, group) in groups.iter().enumerate() {
            let tables = self.block_tables.get(index);
            let found = tables.map_or(0, |tables| tables.starts.len().saturating_sub(1));
            if found != seqs {
                return fail(format!(
                    "cache group {index} has block tables of {found} sequences, the step has {seqs}"
                ));
            }
            for seq in 0..seqs {
                let (kv_len, table) = (self.kv_lens[seq] as usize, self.table(index, seq));
                let (found, needed) = (table.len(), kv_len.div_ceil(group.block_size));
                if found < needed {
                    return fail(format!(
                        "sequence {seq} has {found} KV blocks and needs {needed}"
                    ));
                }
                let first = kv_len - self.rows(seq).len();
                let seen = (group.first_seen(first) / group.block_size).min(found);
                let released = |block: &BlockId| *block == BlockId::RELEASED;
                let (behind, seen) = table.split_at(seen);
                let behind = behind.iter().filter(|block| !released(block));
                let mut blocks = behind.chain(seen);
                if let Some(block) = blocks.find(|block| block.0 as usize >= group.blocks) {
                    let (block, blocks) = (block.0, group.blocks);
                    return fail(format!("KV block {block} is outside the pool of {blocks}"));
                }
            }
        }
        Ok(())
    }

    /// Holds the state slots against those of a runner: one for each sequence, no two the same, or none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a slot is missing, is not there, or is that of two sequences.
    pub(crate) fn check_states(&self, slots: Option<StateSlots>) -> Result<()> {
        let fail = |reason: String| Err(Error::invalid("step", reason));
        let count = slots.map_or(0, StateSlots::count);
        let (found, seqs) = (self.state_slots.len(), self.seqs());
        let expected = if slots.is_some() { seqs } else { 0 };
        if found != expected {
            return fail(format!(
                "{found} sequences have a state slot, expected {expected}"
            ));
        }
        let starts = self.state_inits.iter();
        let starts = starts
            .flat_map(|start| [Some(start.slot), start.from])
            .flatten();
        let keeps = self.state_keeps.iter().flat_map(|&(from, to)| [from, to]);
        let mut all = self.state_slots.iter().copied().chain(starts).chain(keeps);
        if let Some(StateSlot(slot)) = all.find(|slot| slot.0 as usize >= count) {
            return fail(format!(
                "state slot {slot} is outside of the {count} of this runner"
            ));
        }
        for (seq, slot) in self.state_slots.iter().enumerate() {
            if self.state_slots[..seq].contains(slot) {
                let slot = slot.0;
                return fail(format!("state slot {slot} is that of two sequences"));
            }
        }
        Ok(())
    }

    /// The tokens (as a range of rows) of sequence `seq`.
    pub fn rows(&self, seq: usize) -> Range<usize> {
        self.query_starts[seq] as usize..self.query_starts[seq + 1] as usize
    }
}
