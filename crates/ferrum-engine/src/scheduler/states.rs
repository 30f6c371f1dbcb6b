//! Checkpoints of recurrent states, from which a sequence with the same prefix continues.

use super::{Scheduler, Sequence};
use ferrum_types::{SeqId, StateSlot};

/// Positions at which state checkpoints are taken: ends of blocks, at an interval and before the end of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckpointPolicy {
    block_size: usize,
    /// A multiple of the block size; 0: none.
    interval: usize,
}

/// A state checkpoint that a step in flight takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingCheckpoint {
    pub(super) seq: SeqId,
    /// The slot to which the state is copied.
    pub(super) slot: StateSlot,
    /// Number of tokens before it.
    pub(super) tokens: usize,
}

impl CheckpointPolicy {
    /// The last end of a block from which a sequence with the same tokens could continue: the last token is always
    /// computed.
    fn last(self, seq: &Sequence) -> usize {
        (seq.tokens.len() - 1) / self.block_size * self.block_size
    }

    /// The first checkpoint after `start` while a prompt is computed.
    fn after(self, start: usize, seq: &Sequence) -> Option<usize> {
        let last = self.last(seq);
        let next = start.checked_div(self.interval);
        let next = next.map_or(last, |intervals| (intervals + 1) * self.interval);
        (last > start).then(|| next.min(last))
    }

    /// Most tokens of a draft behind the first `end` tokens, so that a step ends where the next checkpoint is due.
    pub(super) fn max_draft(self, end: usize) -> usize {
        match (end % self.interval.max(1), self.interval) {
            (_, 0) => usize::MAX,
            (0, _) => 0,
            (after, interval) => interval - after - 1,
        }
    }

    /// Whether a checkpoint is taken after the first `end` tokens.
    pub(super) fn applies(self, end: usize, seq: &Sequence) -> bool {
        let at_interval = self.interval > 0 && end.is_multiple_of(self.interval);
        at_interval || end > 0 && end == self.last(seq)
    }
}

impl Scheduler {
    /// The checkpoint policy, if the pool has states.
    pub(super) fn checkpoint_policy(&self) -> Option<CheckpointPolicy> {
        let block_size = self.pool.block_size();
        self.pool.has_states().then(|| CheckpointPolicy {
            block_size,
            interval: self
                .config
                .state_checkpoint_interval
                .next_multiple_of(block_size),
        })
    }

    /// Limits the next `tokens` tokens of a prompt to those before the next checkpoint.
    pub(super) fn before_checkpoint(&self, seq: &Sequence, tokens: usize) -> usize {
        let policy = self.checkpoint_policy();
        let next = policy.and_then(|policy| policy.after(seq.computed, seq));
        next.map_or(tokens, |next| tokens.min(next - seq.computed))
    }

    /// Adds the checkpoints of the committed step to the pool, for sequences that have not been removed: their blocks are
    /// in the prefix cache then.
    pub(super) fn commit_checkpoints(&mut self) {
        for PendingCheckpoint { seq, slot, tokens } in
            self.pending_checkpoints.pop_front().unwrap_or_default()
        {
            let seq = self.seqs.get(&seq);
            self.pool
                .commit_checkpoint(slot, seq.map(|seq| (&seq.table, tokens)));
        }
    }
}
