//! Plans one step: admission, preemption, and the token budget.

use super::images::keys;
use super::prefix_start::PrefixStart;
use super::sequence::{ScheduleOrder, State};
use super::{Scheduler, Sequence};
use ferrum_models::{LogitRows, StateInit};
use ferrum_types::SeqId;
use std::collections::HashMap;
use std::ops::Bound;

/// One sequence of a step, and its tokens that the step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledSequence {
    /// The sequence.
    pub seq: SeqId,
    /// Its index in the batch order, which is the order of a step.
    pub batch_index: usize,
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// How many of them, at the end, are a draft: see [`Scheduler::propose`].
    pub draft: usize,
    /// Whether they were computed before, all but the last or all: after a wrong draft a recurrent state goes back.
    pub replay: bool,
    /// Which of them give logits.
    pub logits: LogitRows,
    /// Whether they give hidden states instead of logits. A step has room for any number of them.
    pub hidden: bool,
    /// Whether the sequence gets its next token in this step: from the last row, and with a draft from the first
    /// row and from each one after an accepted token.
    pub gives_token: bool,
}

impl ScheduledSequence {
    /// Whether the sequence generates in this step, as in the one before it.
    pub fn is_decode(&self) -> bool {
        self.len == self.draft + 1 || self.replay
    }

    /// Number of rows of logits.
    pub fn rows(&self) -> usize {
        if self.hidden { 0 } else { self.outputs() }
    }

    /// Number of rows of hidden states.
    pub fn hidden_rows(&self) -> usize {
        if self.hidden { self.outputs() } else { 0 }
    }

    fn outputs(&self) -> usize {
        match self.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.len,
        }
    }
}

/// The sequences of one step. Reused by later steps.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    sequences: Vec<ScheduledSequence>,
    /// Sequences that were preempted while the step was planned.
    preempted: Vec<SeqId>,
}

impl StepPlan {
    pub(super) fn clear(&mut self) {
        self.sequences.clear();
        self.preempted.clear();
    }

    /// The sequences by batch index. A sequence keeps its index from step to step, as far as ended sequences allow, so that
    /// its data on the device need not move.
    pub fn sequences(&self) -> &[ScheduledSequence] {
        &self.sequences
    }

    /// Sequences that were preempted and wait again.
    pub fn preempted(&self) -> &[SeqId] {
        &self.preempted
    }

    /// Tokens in the step.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(|w| w.len).sum()
    }

    /// Rows of logits in the step.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(ScheduledSequence::rows).sum()
    }

    /// Rows of hidden states in the step.
    pub fn hidden_rows(&self) -> usize {
        self.sequences
            .iter()
            .map(ScheduledSequence::hidden_rows)
            .sum()
    }
}

/// Remaining budget of a step.
struct Budget {
    tokens: usize,
    /// Tokens withheld from prompts, except for an image.
    withheld: usize,
    rows: usize,
}

impl Scheduler {
    /// Plans the next step: gives running sequences the blocks they need (preempting the last ranks
    /// if there are none), admits waiting sequences that fit, and allocates the budget of the step. An
    /// empty plan means that there is no sequence, or that all wait for files. No step may be in flight.
    pub fn schedule(&mut self, plan: &mut StepPlan) {
        plan.clear();
        self.counters.steps += 1;
        self.grow_running(plan);
        self.admit(plan);
        self.allocate_budget(plan);
    }

    /// Allocates the token budget of a step to running sequences.
    pub(super) fn allocate_budget(&mut self, plan: &mut StepPlan) {
        let mut left = Budget {
            tokens: self.config.max_tokens,
            withheld: 0,
            rows: self.config.max_logit_rows,
        };
        self.plan_decodes(plan, &mut left);
        let most = match plan.sequences.is_empty() {
            true => usize::MAX,
            false => self.max_prompt_tokens,
        };
        // Tokens that are withheld from prompts are available to drafts.
        left.withheld = left.tokens.saturating_sub(most);
        left.tokens -= left.withheld;
        self.plan_prefills(plan, &mut left);
        self.grow_windows(plan, &left);
        left.tokens += left.withheld;
        self.plan_drafts(plan, &mut left);
        plan.sequences
            .sort_unstable_by_key(|scheduled| scheduled.batch_index);
    }

    /// Gives every running sequence blocks for all its tokens, by rank.
    fn grow_running(&mut self, plan: &mut StepPlan) {
        let mut next = self
            .running
            .first_key_value()
            .map(|(&rank, &id)| (rank, id));
        while let Some((rank, id)) = next {
            while let Some(seq) = self.seqs.get_mut(&id)
                && seq.state == State::Running
                && !seq.grow(&mut self.pool, seq.tokens.len())
            {
                // Preempts the last rank; if that is this sequence, the loop ends.
                self.preempt_last(plan);
            }
            let after = (Bound::Excluded(rank), Bound::Unbounded);
            next = self.running.range(after).next().map(|(&r, &id)| (r, id));
        }
    }

    /// Admits sequences by rank until one does not fit.
    fn admit(&mut self, plan: &mut StepPlan) {
        self.reading = false;
        let mut next = self.next_waiting(None);
        while let Some((rank, id)) = next {
            if self.is_ready(id) && !self.admit_one(id) && !self.preempt_and_admit(id, plan) {
                break;
            }
            next = self.next_waiting(Some(rank));
        }
    }

    /// The waiting sequence of the next rank after `rank`, or of the first rank without one.
    pub(super) fn next_waiting(
        &self,
        rank: Option<ScheduleOrder>,
    ) -> Option<(ScheduleOrder, SeqId)> {
        let from = rank.map_or(Bound::Unbounded, Bound::Excluded);
        let mut after = self.waiting.range((from, Bound::Unbounded));
        after.next().map(|(&rank, &id)| (rank, id))
    }

    /// Whether the prompt of the sequence's leader is computed, or the leader has ended.
    pub(super) fn leader_is_ready(&self, id: SeqId) -> bool {
        let leader = self.seqs.get(&id).and_then(|seq| seq.leader);
        leader
            .and_then(|leader| self.seqs.get(&leader))
            .is_none_or(|leader| leader.prompt_done)
    }

    /// Admits a sequence if the batch has room and there are blocks for all its tokens.
    pub(super) fn admit_one(&mut self, id: SeqId) -> bool {
        if self.running.len() >= self.config.max_seqs {
            return false;
        }
        let Some(seq) = self.seqs.get_mut(&id) else {
            return false;
        };
        let most = seq.max_cached() / self.pool.block_size();
        let keys = keys(&seq.images, &seq.tokens);
        seq.table = self.pool.match_prefix(&seq.salt, keys, most);
        // Each running sequence will soon need another block. Without this reserve the new sequence would
        // be preempted soon.
        let reserve = self.running.len();
        let fits = (self.pool.lacking(&seq.table, seq.tokens.len()))
            .zip(self.pool.available_by_group())
            .all(|(needed, free)| needed + reserve <= free);
        let start = match fits {
            true => seq.begin(&mut self.pool, &mut self.restores),
            false => {
                self.pool.release(&mut seq.table);
                None
            }
        };
        let Some(PrefixStart { known, state }) = start else {
            return false;
        };
        if let (Some(slot), Some(_)) = (seq.table.state(), state) {
            self.state_inits.push(StateInit { slot, from: state });
        }
        if let Some(offload) = &mut self.offload {
            offload.forget(id);
        }
        seq.computed = known * self.pool.block_size();
        seq.state = State::Running;
        seq.batch_index = self.batch_order.len();
        self.batch_order.push(id);
        if seq.cached.is_none() {
            seq.cached = Some(seq.computed);
            self.counters.prompt_tokens += seq.prompt_len as u64;
            self.counters.cached_tokens += seq.computed as u64;
        }
        self.waiting.remove(&seq.order);
        self.running.insert(seq.order, id);
        true
    }

    /// Preempts running sequences of lower priority and later rank to admit this one. If that is not
    /// enough, it preempts none.
    fn preempt_and_admit(&mut self, id: SeqId, plan: &mut StepPlan) -> bool {
        let Some(victims) = self.victims_for(id) else {
            return false;
        };
        for _ in 0..victims {
            self.preempt_last(plan);
        }
        self.admit_one(id)
    }

    /// How many of the last running sequences must be preempted to admit `id`; `None` if all that may be
    /// preempted are not enough. Blocks that they share with others are not freed.
    pub(super) fn victims_for(&mut self, id: SeqId) -> Option<usize> {
        let seq = self.seqs.get(&id)?;
        let yields = |s: &&Sequence| s.priority < seq.priority && s.order > seq.order;
        let most = seq.max_cached() / self.pool.block_size();
        // The table holds references, so that shared blocks do not count as freed.
        let mut table = self.pool.match_prefix(&seq.salt, seq.cache_keys(), most);
        let needed: Vec<_> = self.pool.lacking(&table, seq.tokens.len()).collect();
        let mut lost = HashMap::new();
        let mut free: Vec<_> = self.pool.available_by_group().collect();
        let mut left = self.running.len();
        let mut last = self.running.values().rev();
        let victims = std::iter::from_fn(|| self.seqs.get(last.next()?).filter(yields));
        let fits = victims.map(|victim| {
            left -= 1;
            self.pool.freed_by(&victim.table, &mut lost, &mut free);
            let mut groups = needed.iter().zip(&free);
            left < self.config.max_seqs && groups.all(|(needed, free)| needed + left <= *free)
        });
        let count = fits.into_iter().position(|fits| fits);
        self.pool.release(&mut table);
        count.map(|before| before + 1)
    }

    /// Preempts the running sequence of the last rank.
    fn preempt_last(&mut self, plan: &mut StepPlan) {
        let Some((rank, id)) = self.running.pop_last() else {
            return;
        };
        if let Some(seq) = self.seqs.get_mut(&id) {
            debug_assert_eq!(seq.pending_tokens, 0, "a step in flight uses these blocks");
            self.pool.release(&mut seq.table);
            (seq.computed, seq.replay_end) = (0, 0);
            seq.draft.clear();
            seq.state = State::Waiting;
            let index = seq.batch_index;
            self.leave_batch(index);
        }
        self.waiting.insert(rank, id);
        self.counters.preemptions += 1;
        plan.preempted.push(id);
    }

    fn plan_decodes(&self, plan: &mut StepPlan, left: &mut Budget) {
        let capacity = self.capacity();
        for (&id, seq) in self.running_by_rank() {
            let decodes = seq.is_decode() && seq.goes_on(capacity);
            if decodes && left.tokens > 0 && left.rows > 0 {
                left.tokens -= 1;
                left.rows -= 1;
                plan.sequences.push(ScheduledSequence {
                    seq: id,
                    batch_index: seq.batch_index,
                    start: seq.computed,
                    len: 1,
                    draft: 0,
                    replay: false,
                    logits: LogitRows::Last,
                    hidden: seq.hidden,
                    gives_token: !seq.hidden,
                });
            }
        }
        // What is computed again after wrong drafts comes second, so that each sequence has its token in the step.
        for scheduled in &mut plan.sequences {
            let Some(seq) = self
                .seqs
                .get(&scheduled.seq)
                .filter(|seq| seq.uncomputed() > 1)
            else {
                continue;
            };
            let replayed = chunk(scheduled.seq, seq, 1 + left.tokens, 1);
            left.tokens -= replayed.len - 1;
            left.rows += 1 - replayed.rows();
            *scheduled = replayed;
        }
    }

    fn plan_prefills(&self, plan: &mut StepPlan, left: &mut Budget) {
        let first = plan.sequences.len();
        let prefills = || self.running_by_rank().filter(|(_, seq)| seq.is_prefill());
        for (&id, seq) in prefills() {
            // A prompt that needs more than this step leaves half of the budget to later ranks.
            let share = match seq.uncomputed() <= left.tokens {
                true => seq.uncomputed(),
                false => left.tokens.div_ceil(2),
            };
            let mut scheduled = chunk(id, seq, self.before_checkpoint(seq, share), left.rows);
            let unsplit = seq.unsplit_ahead();
            if scheduled.len == 0 && unsplit <= left.tokens + left.withheld {
                // It would never fit into the budget of prompts.
                scheduled = chunk(id, seq, unsplit, left.rows);
            }
            if scheduled.len > 0 {
                left.withheld -= scheduled.len.saturating_sub(left.tokens);
                left.tokens = left.tokens.saturating_sub(scheduled.len);
                left.rows -= scheduled.rows();
                plan.sequences.push(scheduled);
            }
        }
        // Tokens that later ranks did not need are given back, in rank order.
        for scheduled in &mut plan.sequences[first..] {
            let Some(seq) = self.seqs.get(&scheduled.seq) else {
                continue;
            };
            let rows = left.rows + scheduled.rows();
            let most = self.before_checkpoint(seq, scheduled.len + left.tokens);
            let longer = chunk(scheduled.seq, seq, most, rows);
            if longer.len > scheduled.len {
                left.tokens -= longer.len - scheduled.len;
                left.rows = rows - longer.rows();
                *scheduled = longer;
            }
        }
    }

    /// Allocates the blocks that the step writes to in groups with a window. A chunk of a prompt is cut where there are
    /// no more blocks; its first token has one already.
    fn grow_windows(&mut self, plan: &mut StepPlan, left: &Budget) {
        if !self.pool.has_windows() {
            return;
        }
        for scheduled in &mut plan.sequences {
            let Some(seq) = self.seqs.get_mut(&scheduled.seq) else {
                continue;
            };
            let end = scheduled.start + scheduled.len;
            let room = self.pool.grow_windows(&mut seq.table, end);
            if room < end {
                *scheduled = chunk(
                    scheduled.seq,
                    seq,
                    room - scheduled.start,
                    left.rows + scheduled.rows(),
                );
            }
        }
        plan.sequences.retain(|scheduled| scheduled.len > 0);
    }

    /// Extends decodes by their drafts, as far as the budget and free blocks allow.
    fn plan_drafts(&mut self, plan: &mut StepPlan, left: &mut Budget) {
        let (capacity, policy) = (self.capacity(), self.checkpoint_policy());
        for scheduled in &mut plan.sequences {
            // Running sequences may need a block soon and take precedence over drafts.
            let spare = self.pool.available() > self.running.len();
            let Some(seq) = self.seqs.get_mut(&scheduled.seq) else {
                continue;
            };
            if seq.draft.is_empty() || seq.uncomputed() != 1 || seq.hidden {
                continue;
            }
            let held = seq.table.len() * self.pool.block_size();
            let room = if spare { capacity } else { held };
            let checkpoint = policy.map_or(usize::MAX, |policy| policy.max_draft(seq.tokens.len()));
            let most = left.tokens.min(left.rows).min(checkpoint);
            let draft = seq.draft.len().min(most).min(room - seq.tokens.len());
            if draft == 0 || !self.pool.save_state(&mut seq.table) {
                continue;
            }
            if !self.pool.grow(&mut seq.table, seq.tokens.len() + draft) {
                self.pool.settle_state(&mut seq.table, false);
                continue;
            }
            left.tokens -= draft;
            left.rows -= draft;
            scheduled.len += draft;
            scheduled.draft = draft;
            scheduled.logits = LogitRows::All;
        }
    }

    /// Running sequences by rank.
    fn running_by_rank(&self) -> impl Iterator<Item = (&SeqId, &Sequence)> {
        let known = |id| self.seqs.get(id).map(|seq| (id, seq));
        self.running.values().filter_map(known)
    }
}

/// The next at most `tokens` tokens of a prompt that need at most `rows` rows of logits.
fn chunk(id: SeqId, seq: &Sequence, tokens: usize, rows: usize) -> ScheduledSequence {
    let start = seq.computed;
    // Only rows of logits are limited.
    let rows = if seq.hidden { usize::MAX } else { rows };
    let all = seq.wants_rows(start);
    let mut len = tokens.min(seq.uncomputed());
    if all {
        len = len.min(rows);
    } else if rows == 0 && len == seq.uncomputed() {
        // Without a row for its last token, the chunk ends before it.
        len = len.saturating_sub(1);
    }
    len = seq.unsplit(len);
    let logits = match all {
        true => LogitRows::All,
        false if len == seq.uncomputed() => LogitRows::Last,
        false => LogitRows::None,
    };
    ScheduledSequence {
        seq: id,
        batch_index: seq.batch_index,
        start,
        len,
        draft: 0,
        replay: start < seq.replay_end,
        logits,
        hidden: seq.hidden,
        gives_token: len == seq.uncomputed() && !seq.hidden,
    }
}
