//! Where recurrent states are kept, so that a sequence which begins with the same tokens goes on from there.

use super::{Scheduler, Sequence};
use ferrum_types::{SeqId, StateSlot};

/// Positions behind which states are kept: ends of blocks, at a stride and before the end of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeepPoints {
    block_size: usize,
    /// A multiple of the block size; 0: none.
    stride: usize,
}

/// A state that a step in flight keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keeping {
    pub(super) seq: SeqId,
    /// What it is copied to.
    pub(super) slot: StateSlot,
    /// Tokens that it is the state of.
    pub(super) tokens: usize,
}

impl KeepPoints {
    /// The last end of a block at which the same tokens again could begin: the last token is always computed.
    fn last(self, seq: &Sequence) -> usize {
        (seq.tokens.len() - 1) / self.block_size * self.block_size
    }

    /// The first of them behind `start`, as long as a prompt is computed.
    fn after(self, start: usize, seq: &Sequence) -> Option<usize> {
        let last = self.last(seq);
        let next = start.checked_div(self.stride);
        let next = next.map_or(last, |strides| (strides + 1) * self.stride);
        (last > start).then(|| next.min(last))
    }

    /// Whether the state after the first `end` tokens is kept.
    pub(super) fn keeps(self, end: usize, seq: &Sequence) -> bool {
        let at_stride = self.stride > 0 && end.is_multiple_of(self.stride);
        at_stride || end > 0 && end == self.last(seq)
    }
}

impl Scheduler {
    /// Where states are kept, in a pool that has such.
    pub(super) fn keep_points(&self) -> Option<KeepPoints> {
        let block_size = self.pool.block_size();
        self.pool.has_states().then(|| KeepPoints {
            block_size,
            stride: self.config.state_stride.next_multiple_of(block_size),
        })
    }

    /// Of the next `tokens` tokens of a prompt, those up to where a state is kept.
    pub(super) fn before_keep(&self, seq: &Sequence, tokens: usize) -> usize {
        let points = self.keep_points();
        let next = points.and_then(|points| points.after(seq.computed, seq));
        next.map_or(tokens, |next| tokens.min(next - seq.computed))
    }

    /// Keeps what the step that was committed copied, as far as the sequence is still there: its blocks are then in
    /// the prefix cache.
    pub(super) fn end_keeps(&mut self) {
        for Keeping { seq, slot, tokens } in self.keeping.pop_front().unwrap_or_default() {
            let seq = self.seqs.get(&seq);
            self.pool
                .end_keep(slot, seq.map(|seq| (&seq.table, tokens)));
        }
    }
}
