//! Filling one step.

use super::host::Begun;
use super::images::keys;
use super::sequence::{Rank, State};
use super::{Scheduler, Sequence};
use ferrum_models::{LogitRows, StateInit};
use ferrum_types::SeqId;
use std::collections::HashMap;
use std::ops::Bound;

/// What one sequence computes in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Which sequence.
    pub seq: SeqId,
    /// Its place among those that run: the order of a step.
    pub batch_index: usize,
    /// Position of the first token.
    pub start: usize,
    /// Tokens.
    pub len: usize,
    /// How many of them, at the end, are a draft: see [`Scheduler::propose`].
    pub draft: usize,
    /// Which of them give logits.
    pub logits: LogitRows,
    /// Whether they give hidden states instead, of which a step has room for any number.
    pub hidden: bool,
    /// Whether the sequence gets its next token in this step: from the last row, and with a draft from the first
    /// row and from each one after a token that was drafted right.
    pub gives_token: bool,
}

impl Work {
    /// Rows of logits.
    pub fn rows(&self) -> usize {
        if self.hidden { 0 } else { self.outputs() }
    }

    /// Rows of hidden states.
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

/// The work of one step. Made to be filled again.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    work: Vec<Work>,
    /// Sequences that lost their blocks while the step was planned.
    preempted: Vec<SeqId>,
}

impl StepPlan {
    pub(super) fn clear(&mut self) {
        self.work.clear();
        self.preempted.clear();
    }

    /// By index in the batch, so that the sequences of a step are where they were in the step before, as far as those that ended
    /// allow it: what a device has of each stays where it is.
    pub fn work(&self) -> &[Work] {
        &self.work
    }

    /// Sequences that have to wait again.
    pub fn preempted(&self) -> &[SeqId] {
        &self.preempted
    }

    /// Tokens in the step.
    pub fn tokens(&self) -> usize {
        self.work.iter().map(|w| w.len).sum()
    }

    /// Rows of logits in the step.
    pub fn rows(&self) -> usize {
        self.work.iter().map(Work::rows).sum()
    }

    /// Rows of hidden states in the step.
    pub fn hidden_rows(&self) -> usize {
        self.work.iter().map(Work::hidden_rows).sum()
    }
}

/// What is left of a step.
struct Budget {
    tokens: usize,
    /// Those that prompts may not have, except for an image.
    kept: usize,
    rows: usize,
}

impl Scheduler {
    /// Plans the next step: gives running sequences the blocks they need (preempting the last ranks
    /// when there are none), admits who waits and fits, and shares out the tokens of the step. An
    /// empty plan means that nobody is there. No step may be in flight.
    pub fn schedule(&mut self, plan: &mut StepPlan) {
        plan.clear();
        self.counters.steps += 1;
        self.grow_running(plan);
        self.admit(plan);
        self.share_out(plan);
    }

    /// Shares out the tokens of a step among those who run.
    pub(super) fn share_out(&mut self, plan: &mut StepPlan) {
        let mut left = Budget {
            tokens: self.config.max_tokens,
            kept: 0,
            rows: self.config.max_logit_rows,
        };
        self.plan_decodes(plan, &mut left);
        let most = match plan.work.is_empty() {
            true => usize::MAX,
            false => self.most_prompt_tokens,
        };
        // What prompts may not have is still there for drafts.
        left.kept = left.tokens.saturating_sub(most);
        left.tokens -= left.kept;
        self.plan_prefills(plan, &mut left);
        self.grow_windows(plan, &left);
        left.tokens += left.kept;
        self.plan_drafts(plan, &mut left);
        plan.work.sort_unstable_by_key(|work| work.batch_index);
    }

    /// Every running sequence gets blocks for all its tokens, by rank.
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
                // The last one; when that is this one itself, the loop ends here.
                self.preempt_last(plan);
            }
            let after = (Bound::Excluded(rank), Bound::Unbounded);
            next = self.running.range(after).next().map(|(&r, &id)| (r, id));
        }
    }

    /// Lets sequences in by rank until one does not fit.
    fn admit(&mut self, plan: &mut StepPlan) {
        self.reading = false;
        let mut next = self.next_waiting(None);
        while let Some((rank, id)) = next {
            if self.is_ready(id) && !self.admit_one(id) && !self.push_in(id, plan) {
                break;
            }
            next = self.next_waiting(Some(rank));
        }
    }

    /// Who waits with the rank after `rank`; with the first, if there is none.
    pub(super) fn next_waiting(&self, rank: Option<Rank>) -> Option<(Rank, SeqId)> {
        let from = rank.map_or(Bound::Unbounded, Bound::Excluded);
        let mut after = self.waiting.range((from, Bound::Unbounded));
        after.next().map(|(&rank, &id)| (rank, id))
    }

    /// Whether the prompt that `id` will share is computed, or never will be.
    pub(super) fn leader_is_ready(&self, id: SeqId) -> bool {
        let leader = self.seqs.get(&id).and_then(|seq| seq.leader);
        leader
            .and_then(|leader| self.seqs.get(&leader))
            .is_none_or(|leader| leader.prompt_done)
    }

    /// Admits a sequence if there is a place for it and blocks for all its tokens.
    pub(super) fn admit_one(&mut self, id: SeqId) -> bool {
        if self.running.len() >= self.config.max_seqs {
            return false;
        }
        let Some(seq) = self.seqs.get_mut(&id) else {
            return false;
        };
        let most = seq.most_cached() / self.pool.block_size();
        let keys = keys(&seq.images, &seq.tokens);
        seq.table = self.pool.match_prefix(&seq.salt, keys, most);
        // Whoever runs will soon want a block more; without them the newcomer would be let in only to
        // be preempted.
        let kept = self.running.len();
        let fits = (self.pool.lacking(&seq.table, seq.tokens.len()))
            .zip(self.pool.available_by_group())
            .all(|(needed, free)| needed + kept <= free);
        let begun = match fits {
            true => seq.begin(&mut self.pool, &mut self.restores),
            false => {
                self.pool.release(&mut seq.table);
                None
            }
        };
        let Some(Begun { known, state }) = begun else {
            return false;
        };
        if let (Some(slot), Some(_)) = (seq.table.state(), state) {
            self.state_inits.push(StateInit { slot, from: state });
        }
        if let Some(host) = &mut self.host {
            host.forget(id);
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
        self.waiting.remove(&seq.rank);
        self.running.insert(seq.rank, id);
        true
    }

    /// Admits a sequence at the cost of running ones with lower priority and a later rank, if they
    /// have what it takes; else nobody loses anything.
    fn push_in(&mut self, id: SeqId, plan: &mut StepPlan) -> bool {
        let Some(victims) = self.victims_for(id) else {
            return false;
        };
        for _ in 0..victims {
            self.preempt_last(plan);
        }
        self.admit_one(id)
    }

    /// How many of the last running sequences have to go so that `id` can be admitted; `None` when all that
    /// may be asked to are not enough. Blocks that they share with others do not come free.
    pub(super) fn victims_for(&mut self, id: SeqId) -> Option<usize> {
        let seq = self.seqs.get(&id)?;
        let yields = |s: &&Sequence| s.priority < seq.priority && s.rank > seq.rank;
        let most = seq.most_cached() / self.pool.block_size();
        // Held meanwhile, so that what both have does not count as freed.
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

    /// Sends the running sequence of the last rank back to wait.
    fn preempt_last(&mut self, plan: &mut StepPlan) {
        let Some((rank, id)) = self.running.pop_last() else {
            return;
        };
        if let Some(seq) = self.seqs.get_mut(&id) {
            debug_assert_eq!(seq.due, 0, "a step in flight uses these blocks");
            self.pool.release(&mut seq.table);
            seq.computed = 0;
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
        for (&id, seq) in self.runners() {
            let decodes = seq.pending() == 1 && seq.goes_on(capacity);
            if decodes && left.tokens > 0 && left.rows > 0 {
                left.tokens -= 1;
                left.rows -= 1;
                plan.work.push(Work {
                    seq: id,
                    batch_index: seq.batch_index,
                    start: seq.computed,
                    len: 1,
                    draft: 0,
                    logits: LogitRows::Last,
                    hidden: seq.hidden,
                    gives_token: !seq.hidden,
                });
            }
        }
    }

    fn plan_prefills(&self, plan: &mut StepPlan, left: &mut Budget) {
        let first = plan.work.len();
        let prefills = || self.runners().filter(|(_, seq)| seq.pending() > 1);
        for (&id, seq) in prefills() {
            // A prompt that needs more than this step leaves half of it to those behind.
            let share = match seq.pending() <= left.tokens {
                true => seq.pending(),
                false => left.tokens.div_ceil(2),
            };
            let mut work = chunk(id, seq, self.before_keep(seq, share), left.rows);
            let image = seq.image_ahead();
            if work.len == 0 && image <= left.tokens + left.kept {
                // It would never fit a part of a step.
                work = chunk(id, seq, image, left.rows);
            }
            if work.len > 0 {
                left.kept -= work.len.saturating_sub(left.tokens);
                left.tokens = left.tokens.saturating_sub(work.len);
                left.rows -= work.rows();
                plan.work.push(work);
            }
        }
        // What those behind did not need goes back, first come first served.
        for work in &mut plan.work[first..] {
            let Some(seq) = self.seqs.get(&work.seq) else {
                continue;
            };
            let rows = left.rows + work.rows();
            let most = self.before_keep(seq, work.len + left.tokens);
            let longer = chunk(work.seq, seq, most, rows);
            if longer.len > work.len {
                left.tokens -= longer.len - work.len;
                left.rows = rows - longer.rows();
                *work = longer;
            }
        }
    }

    /// Gives everybody the blocks that the step writes to in groups with a window. A chunk of a prompt ends where there
    /// are no more; its first token has one already.
    fn grow_windows(&mut self, plan: &mut StepPlan, left: &Budget) {
        if !self.pool.has_windows() {
            return;
        }
        for work in &mut plan.work {
            let Some(seq) = self.seqs.get_mut(&work.seq) else {
                continue;
            };
            let end = work.start + work.len;
            let room = self.pool.grow_windows(&mut seq.table, end);
            if room < end {
                *work = chunk(work.seq, seq, room - work.start, left.rows + work.rows());
            }
        }
        plan.work.retain(|work| work.len > 0);
    }

    /// Lengthens decodes by their drafts, as far as prompts left room and nobody loses a block.
    fn plan_drafts(&mut self, plan: &mut StepPlan, left: &mut Budget) {
        let capacity = self.capacity();
        for work in &mut plan.work {
            // Whoever runs may need a block soon, and a draft is a draft.
            let spare = self.pool.available() > self.running.len();
            let Some(seq) = self.seqs.get_mut(&work.seq) else {
                continue;
            };
            if seq.draft.is_empty() || seq.pending() != 1 || seq.hidden {
                continue;
            }
            let held = seq.table.len() * self.pool.block_size();
            let room = if spare { capacity } else { held };
            let most = left.tokens.min(left.rows);
            let draft = seq.draft.len().min(most).min(room - seq.tokens.len());
            if draft == 0 || !self.pool.grow(&mut seq.table, seq.tokens.len() + draft) {
                continue;
            }
            left.tokens -= draft;
            left.rows -= draft;
            work.len += draft;
            work.draft = draft;
            work.logits = LogitRows::All;
        }
    }

    /// Running sequences by rank.
    fn runners(&self) -> impl Iterator<Item = (&SeqId, &Sequence)> {
        let known = |id| self.seqs.get(id).map(|seq| (id, seq));
        self.running.values().filter_map(known)
    }
}

/// The next at most `tokens` tokens of a prompt that need at most `rows` rows of logits.
fn chunk(id: SeqId, seq: &Sequence, tokens: usize, rows: usize) -> Work {
    let start = seq.computed;
    // The rows that are few are those of logits.
    let rows = if seq.hidden { usize::MAX } else { rows };
    let all = seq.wants_rows(start);
    let mut len = tokens.min(seq.pending());
    if all {
        len = len.min(rows);
    } else if rows == 0 && len == seq.pending() {
        // Without a row for its last token, the chunk ends before it.
        len = len.saturating_sub(1);
    }
    len = seq.whole_images(len);
    let logits = match all {
        true => LogitRows::All,
        false if len == seq.pending() => LogitRows::Last,
        false => LogitRows::None,
    };
    Work {
        seq: id,
        batch_index: seq.batch_index,
        start,
        len,
        draft: 0,
        logits,
        hidden: seq.hidden,
        gives_token: len == seq.pending() && !seq.hidden,
    }
}
