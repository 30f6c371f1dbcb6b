//! What the next step computes, for whom, and with which blocks.
//!
//! Pure logic without a device or a clock: [`Scheduler::schedule`] fills a [`StepPlan`], [`Scheduler::begin`] makes
//! the batch of it that the caller hands to the device, [`Scheduler::commit`] records that it was carried out, and
//! [`Scheduler::append`] gives each sequence whose work says so its next token.
//!
//! - **Decode first.** Every running sequence whose prompt is computed is in every step, so the time
//!   between its tokens is that of one step, and a step is at most `max_tokens` tokens long. What is
//!   left of the budget goes to chunks of prompts, while somebody decodes at most as much as
//!   [`Scheduler::limit_prompts`] says. A prompt that does not end within the step takes at
//!   most half of what is left, so a short prompt does not wait for a long one.
//! - **One order.** A sequence's rank is the step at which it came, less a head start for each level
//!   of priority. Admission goes by rank and nobody overtakes; preemption takes the last rank first.
//!   As a head start is finite, nobody starves.
//! - **Preemption by recompute.** When blocks run out, the sequence of the last rank gives back its
//!   blocks and waits again with all its tokens. Its full blocks stay in the prefix cache for as long
//!   as nobody needs their memory.
//!
//! - **Windows.** A cache group with a window gets blocks for what a step computes, not for a whole prompt, and takes
//!   back what is behind the window when the step is committed: what comes after it reads nothing older.
//! - **Recurrent states.** Where layers have them, a sequence has a slot for its state beside its blocks, and a step ends
//!   where a state is kept (`states.rs`): at a stride, and at the last end of a block before the end of a prompt. A
//!   prefix of the cache is taken up to there, and the kept state is copied before the next step that begins. As a state
//!   cannot go back, such sequences have no drafts.
//! - **Images.** A step has all that is left of an image, or nothing of it (`images.rs`), so one takes what steps keep for
//!   those who decode where it would not fit else.
//! - **Drafts.** A decode may bring drafts of the tokens after it ([`Scheduler::propose`]). They are
//!   computed in the same step with whatever room is left; those that turn out right are tokens gained.
//! - **One step ahead.** Between `begin` and `commit` the next step can be planned
//!   ([`Scheduler::schedule_ahead`]), with tokens that only the device knows yet. Whoever ends meanwhile is still
//!   written to, so its blocks are held until that step is committed.
//!
//! Later kinds of work have their place in [`Work`]: an adapter would be one more field of it and of the
//! salt.

mod ahead;
mod host;
mod images;
mod plan;
mod sequence;
mod states;
#[cfg(test)]
mod tests;

pub(crate) use host::{HostAnswer, HostPart, HostParts, HostPrefix, HostQuery, Restores};
pub use plan::{StepPlan, Work};
pub use sequence::{NewSequence, Sequence};

use crate::pool::{BlockPool, BlockTable, PoolFault};
use ferrum_models::{RunnerConfig, StateInit};
use ferrum_types::{Error, Result, SeqId, TokenId};
use sequence::{Rank, State};
use states::Keeping;
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
    /// Steps by which one level of priority lets a sequence go before its turn.
    pub head_start: u32,
    /// Tokens from one recurrent state that is kept to the next, where layers have such; one is kept at the end of each
    /// prompt, too. 0: there alone.
    pub state_stride: usize,
}

impl SchedulerConfig {
    /// What a runner allows.
    pub fn for_runner(config: &RunnerConfig) -> Self {
        Self {
            max_seqs: config.max_seqs,
            max_tokens: config.max_tokens,
            max_logit_rows: config.max_logit_rows,
            context: config.context,
            head_start: 256,
            state_stride: 512,
        }
    }
}

/// What happened since the start.
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
    waiting: BTreeMap<Rank, SeqId>,
    running: BTreeMap<Rank, SeqId>,
    /// Running sequences in the order of the batch. When one leaves, the last takes its index, so all others keep theirs.
    batch_order: Vec<SeqId>,
    deadlines: BTreeSet<(Duration, SeqId)>,
    arrivals: u64,
    counters: SchedulerCounters,
    /// See [`Scheduler::limit_prompts`].
    most_prompt_tokens: usize,
    /// Steps that began, and those of them that were committed.
    begun: u64,
    committed: u64,
    /// Copies of kept states before the step that begins next.
    state_inits: Vec<StateInit>,
    /// Of each step in flight, the states that it keeps.
    keeping: VecDeque<Vec<Keeping>>,
    /// Blocks that nobody has any more and that a step in flight still uses: the step, and the blocks.
    held: Vec<(u64, BlockTable)>,
    /// Where parts of prefixes are that the device has no room for.
    host: Option<Box<dyn HostParts>>,
    /// What came from there and is to be written before the next step.
    restores: Restores,
    /// Whether somebody was passed over because of files that are being read.
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
            most_prompt_tokens: usize::MAX,
            begun: 0,
            committed: 0,
            state_inits: Vec::new(),
            keeping: VecDeque::new(),
            held: Vec::new(),
            host: None,
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

    /// What happened since the start.
    pub fn counters(&self) -> SchedulerCounters {
        self.counters
    }

    /// Sequences that have no blocks yet, or no more.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences with blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.seqs.is_empty()
    }

    /// A sequence, as long as it has not ended.
    pub fn sequence(&self, id: SeqId) -> Option<&Sequence> {
        self.seqs.get(&id)
    }

    /// Most tokens whose keys a sequence can have: the context, or the pool where it is smaller.
    pub fn capacity(&self) -> usize {
        self.config.context.min(self.pool.most_tokens())
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
        let head_start = i64::from(new.priority) * i64::from(self.config.head_start);
        self.arrivals += 1;
        let rank = Rank {
            turn: self.counters.steps as i64 - head_start,
            arrival: self.arrivals,
        };
        self.waiting.insert(rank, new.id);
        if let Some(deadline) = new.deadline {
            self.deadlines.insert((deadline, new.id));
        }
        self.seqs.insert(new.id, Sequence::new(new, rank));
        Ok(())
    }

    /// Takes a sequence out, whatever it is doing, and frees its blocks at once, or with the commit of the last
    /// step that uses them.
    pub fn remove(&mut self, id: SeqId) -> Option<Sequence> {
        let mut seq = self.seqs.remove(&id)?;
        self.waiting.remove(&seq.rank);
        if self.running.remove(&seq.rank).is_some() {
            self.leave_batch(seq.batch_index);
        }
        if let Some(deadline) = seq.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        let table = std::mem::take(&mut seq.table);
        self.free(seq.last_step, table);
        if let Some(host) = &mut self.host {
            host.forget(id);
        }
        Some(seq)
    }

    /// Nobody has this slot any more.
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

    /// From now on a step in which somebody decodes has at most so many tokens of prompts, so that those who
    /// decode do not wait for long. Answers do not depend on it.
    pub fn limit_prompts(&mut self, most: usize) {
        self.most_prompt_tokens = most.max(1);
    }

    /// Proposes the tokens that come next in a sequence, for the next step only. If the step has room
    /// for them it gives logits after each. [`append`](Self::append) then confirms them one by one: as
    /// long as the appended token is the proposed one, another is due and the sequence's next row of
    /// logits counts. Nothing is planned ahead of a step with drafts.
    pub fn propose(&mut self, id: SeqId, draft: &[TokenId]) {
        let has_states = self.pool.has_states();
        if let Some(seq) = self.seqs.get_mut(&id).filter(|_| !has_states) {
            seq.draft.clear();
            seq.draft.extend_from_slice(draft);
        }
    }

    /// Gives a sequence its next token. Says whether there is room for another; if not, the sequence has to end
    /// here.
    pub fn append(&mut self, id: SeqId, token: TokenId) -> bool {
        let capacity = self.capacity();
        self.seqs.get_mut(&id).is_some_and(|seq| {
            seq.tokens.push(token);
            if let Some(images) = &mut seq.images {
                images.push(token);
            }
            if seq.draft.first() == Some(&token) {
                // The row after it gives the one that is due now.
                seq.draft.remove(0);
                seq.computed += 1;
            } else {
                seq.draft.clear();
                seq.due = seq.due.saturating_sub(1);
            }
            seq.tokens.len() < capacity
        })
    }

    /// Lends a block for a step that belongs to no sequence; whether there was one. It has to come
    /// back with [`take_back`](Self::take_back) before the pool is checked.
    #[must_use]
    pub fn lend(&mut self, table: &mut BlockTable) -> bool {
        let lent = self.pool.grow(table, 1) && self.pool.take_state(table);
        if !lent {
            self.pool.release(table);
        }
        lent
    }

    /// Takes lent blocks back.
    pub fn take_back(&mut self, table: &mut BlockTable) {
        self.pool.release(table);
    }

    /// Checks the pool against the tables of all sequences, and the queues against each other.
    ///
    /// # Errors
    /// What is wrong first.
    pub fn check(&self) -> Result<(), PoolFault> {
        let held = self.held.iter().map(|(_, table)| table);
        self.pool
            .check(self.seqs.values().map(|s| &s.table).chain(held))?;
        for (id, seq) in &self.seqs {
            let running = self.running.get(&seq.rank) == Some(id);
            let waiting = self.waiting.get(&seq.rank) == Some(id);
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
