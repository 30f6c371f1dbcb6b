//! Plans which sequences and tokens the next step computes and allocates their KV blocks.
//!
//! Pure logic without a device or a clock: [`Scheduler::schedule`] fills a [`StepPlan`], [`Scheduler::begin`] makes
//! its batch, which the caller submits to the device, [`Scheduler::commit`] records that it was computed, and
//! [`Scheduler::append`] adds the next token of each sequence that got one ([`ScheduledSequence::gives_token`]).
//!
//! - **Decode first.** Every running sequence whose prompt is computed is in every step, so the time
//!   between its tokens is that of one step, and a step is at most `max_tokens` tokens long. The remaining
//!   budget goes to chunks of prompts, at most [`Scheduler::limit_prompts`] tokens while a sequence
//!   decodes. A prompt that does not end within the step takes at most half of what is left, so a short
//!   prompt does not wait for a long one.
//! - **Ordering.** A sequence's rank is its arrival step minus its priority credit. Admission is in rank order,
//!   preemption in reverse; finite credits prevent starvation.
//! - **Preemption by recompute.** When blocks run out, the sequence of the last rank releases its
//!   blocks and waits again with all its tokens. Its full blocks stay in the prefix cache until their
//!   memory is needed.
//! - **Windows.** A cache group with a window gets blocks for what a step computes, not for a whole prompt, and releases
//!   the blocks before the window when the step is committed: later tokens do not read them.
//! - **Recurrent states.** If the model has them, a sequence has a slot for its state beside its blocks, and a step ends
//!   where a state checkpoint is taken (`states.rs`): at an interval, and at the last end of a block before the end of a
//!   prompt. A cached prefix is used up to its last checkpoint, which is copied before the next step that begins.
//! - **Whole prompts.** With bidirectional attention, a step has all of a prompt, or nothing of it
//!   ([`SchedulerConfig::whole_prompts`]), and nothing of it is taken from the prefix cache.
//! - **Images.** A step has all that is left of an image, or nothing of it (`images.rs`). An image that would not fit
//!   otherwise may use the tokens that [`Scheduler::limit_prompts`] withholds from prompts.
//! - **Drafts.** A decode may have drafts of the tokens after it ([`Scheduler::propose`]). They are
//!   computed in the same step with the remaining budget; accepted drafts save steps. A recurrent state is copied before
//!   such a step. After a wrong draft the sequence goes back to the copy, and the tokens that the step computed rightly are
//!   computed again, in the next step and beside the token that follows them.
//! - **One step ahead.** Between `begin` and `commit` the next step can be planned
//!   ([`Scheduler::schedule_ahead`]), with tokens that only the device knows yet. The step in flight still writes to a
//!   sequence that ends meanwhile, so its blocks are held until that step is committed.

mod images;
mod in_flight;
mod offload;
mod plan;
mod prefix_start;
mod sequence;
mod states;
#[cfg(test)]
mod tests;

pub(crate) use offload::{
    OffloadLookup, OffloadLookupResult, OffloadQuery, OffloadedEntry, OffloadedPrefix, Restores,
};
pub use plan::{ScheduledSequence, StepPlan};
pub use sequence::{NewSequence, Sequence};

use crate::pool::{BlockPool, BlockTable, PoolFault};
use ferrum_models::{RunnerConfig, StateInit};
use ferrum_types::{Error, Result, SeqId, TokenId};
use sequence::{ScheduleOrder, State};
use states::PendingCheckpoint;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

/// Limits of a step, and how much priorities count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most sequences in a step.
    pub max_seqs: usize,
    /// Most tokens in a step.
    pub max_tokens: usize,
    /// Most rows of logits in a step.
    pub max_logit_rows: usize,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Scheduling steps by which each priority level moves a sequence ahead.
    pub priority_step_credit: u32,
    /// Whether a prompt is computed in one step, from its first token on, as bidirectional attention needs.
    pub whole_prompts: bool,
    /// Tokens between two checkpoints of recurrent states, for models that have them. One is also taken at the end of
    /// each prompt. 0: only there.
    pub state_checkpoint_interval: usize,
}

impl SchedulerConfig {
    /// What a runner allows.
    pub fn for_runner(config: &RunnerConfig) -> Self {
        Self {
            max_seqs: config.max_seqs,
            max_tokens: config.max_tokens,
            max_logit_rows: config.max_logit_rows,
            context: config.context,
            priority_step_credit: 256,
            whole_prompts: false,
            state_checkpoint_interval: 512,
        }
    }
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerCounters {
    /// Steps that were scheduled.
    pub steps: u64,
    /// Sequences that lost their blocks and had to wait again.
    pub preemptions: u64,
    /// Prompt tokens of sequences when they were first admitted.
    pub prompt_tokens: u64,
    /// Those of them that were in the prefix cache.
    pub cached_tokens: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
    seqs: HashMap<SeqId, Sequence>,
    waiting: BTreeMap<ScheduleOrder, SeqId>,
    running: BTreeMap<ScheduleOrder, SeqId>,
    /// Running sequences in the order of the batch. When one leaves, the last takes its index, so all others keep theirs.
    batch_order: Vec<SeqId>,
    deadlines: BTreeSet<(Duration, SeqId)>,
    arrivals: u64,
    counters: SchedulerCounters,
    /// See [`Scheduler::limit_prompts`].
    max_prompt_tokens: usize,
    /// Steps that began, and those of them that were committed.
    begun: u64,
    committed: u64,
    /// State checkpoints to copy before the step that begins next.
    state_inits: Vec<StateInit>,
    /// The state checkpoints of each step in flight.
    pending_checkpoints: VecDeque<Vec<PendingCheckpoint>>,
    /// Blocks of ended sequences that a step in flight still uses: the step, and the blocks.
    held: Vec<(u64, BlockTable)>,
    /// Finds entries of prefixes in the offload tiers.
    offload: Option<Box<dyn OffloadLookup>>,
    /// Offloaded entries to be written to the device before the next step.
    restores: Restores,
    /// Whether the last plan skipped a sequence whose files are being read.
    reading: bool,
}

impl Scheduler {
    /// A scheduler over the blocks of `pool`, all of them free.
    ///
    /// # Errors
    /// `InvalidArgument` when a limit is zero.
    pub fn new(config: SchedulerConfig, pool: BlockPool) -> Result<Self> {
        let mut config = config;
        // Every running sequence decodes in every step, so each needs a token and a row.
        config.max_seqs = config
            .max_seqs
            .min(config.max_tokens)
            .min(config.max_logit_rows);
        if config.max_seqs == 0 || config.context == 0 || pool.blocks() == 0 {
            let reason = format!(
                "found {} sequences, a context of {} and {} blocks, expected at least 1 of each",
                config.max_seqs,
                config.context,
                pool.blocks()
            );
            return Err(Error::invalid("scheduler", reason));
        }
        Ok(Self {
            config,
            pool,
            seqs: HashMap::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            batch_order: Vec::new(),
            deadlines: BTreeSet::new(),
            arrivals: 0,
            counters: SchedulerCounters::default(),
            max_prompt_tokens: usize::MAX,
            begun: 0,
            committed: 0,
            state_inits: Vec::new(),
            pending_checkpoints: VecDeque::new(),
            held: Vec::new(),
            offload: None,
            restores: Restores::default(),
            reading: false,
        })
    }

    /// The limits in force.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// The block pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Counters since the start.
    pub fn counters(&self) -> SchedulerCounters {
        self.counters
    }

    /// Number of sequences without blocks: new or preempted.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Number of sequences with blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
    }

    /// A sequence, as long as it has not ended.
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.seqs.get(&id)
    }

    /// Most tokens whose keys a sequence can have: the context, or the pool where it is smaller, or a step where that has
    /// whole prompts.
    pub fn capacity(&self) -> usize {
        let step = match self.config.whole_prompts {
            true => self.config.max_tokens,
            false => usize::MAX,
        };
        self.config.context.min(self.pool.max_tokens()).min(step)
    }

    /// Adds a sequence to those that wait.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt or an id that is taken; [`Error::ContextOverflow`] for a
    /// prompt that does not fit.
    pub fn add(&mut self, new: NewSequence) -> Result<()> {
        let (requested, capacity) = (new.prompt.len(), self.capacity());
        if requested == 0 {
            return Err(Error::invalid("scheduler", "the prompt has no token"));
        }
        if requested > capacity {
            return Err(Error::ContextOverflow {
                requested,
                capacity,
            });
        }
        if self.seqs.contains_key(&new.id) {
            let reason = format!("sequence {} is there already", new.id.0);
            return Err(Error::invalid("scheduler", reason));
        }
        let credit = i64::from(new.priority) * i64::from(self.config.priority_step_credit);
        self.arrivals += 1;
        let rank = ScheduleOrder {
            effective_arrival: self.counters.steps as i64 - credit,
            arrival: self.arrivals,
        };
        self.waiting.insert(rank, new.id);
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, new.id));
        }
        let whole = self.config.whole_prompts;
        self.seqs.insert(new.id, Sequence::new(new, rank, whole));
        Ok(())
    }

    /// Removes a sequence in any state and frees its blocks: now, or with the commit of the last step that uses them.
    pub fn remove(&mut self, id: SeqId) -> Option<Sequence> {
        let mut seq = self.seqs.remove(&id)?;
        self.waiting.remove(&seq.order);
        if self.running.remove(&seq.order).is_some() {
            self.leave_batch(seq.batch_index);
        }
        if let Some(deadline) = seq.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        let table = std::mem::take(&mut seq.table);
        self.free(seq.last_step, table);
        if let Some(offload) = &mut self.offload {
            offload.forget(id);
        }
        Some(seq)
    }

    /// Frees an index of the batch order.
    fn leave_batch(&mut self, index: usize) {
        self.batch_order.swap_remove(index);
        let moved = self
            .batch_order
            .get(index)
            .and_then(|id| self.seqs.get_mut(id));
        if let Some(moved) = moved {
            moved.batch_index = index;
        }
    }

    /// A sequence whose deadline is past. It stays until it is removed.
    pub fn overdue(&self, now: Duration) -> Option<SeqId> {
        let &(deadline, id) = self.deadlines.first()?;
        (deadline <= now).then_some(id)
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Limits the prompt tokens of later steps in which a sequence decodes, so that decoding sequences do not wait for
    /// long. The output does not depend on it.
    pub fn limit_prompts(&mut self, most: usize) {
        self.max_prompt_tokens = most.max(1);
    }

    /// Proposes the next tokens of a sequence, for the next step only. If the step has room for them it
    /// gives logits after each. [`append`](Self::append) then accepts them one by one: as long as the
    /// appended token is the proposed one, another token is pending and the sequence's next row of
    /// logits gives it. Nothing is planned ahead of a step with drafts.
    pub fn propose(&mut self, id: SeqId, draft: &[TokenId]) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.draft.clear();
            seq.draft.extend_from_slice(draft);
        }
    }

    /// Appends the next token of a sequence. Returns whether there is room for another; if not, the sequence has to end
    /// here.
    pub fn append(&mut self, id: SeqId, token: TokenId) -> bool {
        let capacity = self.capacity();
        self.seqs.get_mut(&id).is_some_and(|seq| {
            seq.tokens.push(token);
            if let Some(images) = &mut seq.images {
                images.push(token);
            }
            if seq.draft.first() == Some(&token) {
                // The row after it gives the next pending token.
                seq.draft.remove(0);
                seq.computed += 1;
            } else {
                let wrong = !seq.draft.is_empty();
                seq.draft.clear();
                seq.pending_tokens = seq.pending_tokens.saturating_sub(1);
                if self.pool.settle_state(&mut seq.table, wrong) {
                    seq.computed = seq.saved_at;
                    seq.replay_end = seq.tokens.len();
                }
            }
            seq.tokens.len() < capacity
        })
    }

    /// Takes a block for a probe step, which belongs to no sequence; returns whether there was one. It must be given
    /// back with [`return_probe_block`](Self::return_probe_block) before the pool is checked.
    #[must_use]
    pub fn take_probe_block(&mut self, table: &mut BlockTable) -> bool {
        let taken = self.pool.grow(table, 1) && self.pool.take_state(table);
        if !taken {
            self.pool.release(table);
        }
        taken
    }

    /// Releases the blocks of a probe step.
    pub fn return_probe_block(&mut self, table: &mut BlockTable) {
        self.pool.release(table);
    }

    /// Checks the pool against the tables of all sequences, and the queues against each other.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self) -> Result<(), PoolFault> {
        let held = self.held.iter().map(|(_, table)| table);
        self.pool
            .check(self.seqs.values().map(|s| &s.table).chain(held))?;
        for (id, seq) in &self.seqs {
            let running = self.running.get(&seq.order) == Some(id);
            let waiting = self.waiting.get(&seq.order) == Some(id);
            let fits = seq.computed <= seq.table.len() * self.pool.block_size();
            let placed = self.batch_order.get(seq.batch_index) == Some(id);
            let has_state = seq.table.state().is_some() == self.pool.has_states();
            let listed = match seq.state {
                State::Running => running && placed && !waiting && has_state,
                State::Waiting => waiting && !running && seq.table.is_empty(),
            };
            if !listed || !fits {
                return Err(PoolFault::new(format!(
                    "sequence {} is in the wrong queue or has too few blocks",
                    id.0
                )));
            }
        }
        let queued = self.running.len() + self.waiting.len();
        if queued != self.seqs.len() || self.batch_order.len() != self.running.len() {
            return Err(PoolFault::new("a queue has a sequence that is gone".into()));
        }
        Ok(())
    }
}
