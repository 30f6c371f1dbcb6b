//! A sequence as the scheduler sees it: tokens, how many of them are computed, and in which blocks.

use super::host::HostPrefix;
use super::images::SequenceImages;
use crate::pool::{BlockPool, BlockTable, CacheSalt};
use crate::vision::PromptImage;
use ferrum_types::{SeqId, TokenId};
use std::time::Duration;

/// A sequence to be scheduled.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Its name; used once.
    pub id: SeqId,
    /// Tokens to begin with, at least one.
    pub prompt: Vec<TokenId>,
    /// Images in it, in order. With some, `prompt_logits` are not to be had.
    pub images: Vec<PromptImage>,
    /// Higher goes first; see [`SchedulerConfig::head_start`](super::SchedulerConfig::head_start).
    pub priority: i8,
    /// When it has to end, on the clock of [`Scheduler::overdue`](super::Scheduler::overdue).
    pub deadline: Option<Duration>,
    /// Who it may share blocks with.
    pub salt: CacheSalt,
    /// Whether every token of the prompt wants logits. They are asked for once each, also when the
    /// sequence is preempted, so what the cache has is not used before they are there.
    pub prompt_logits: bool,
    /// Whether it wants hidden states wherever it would have logits.
    pub hidden: bool,
    /// A sequence with the same prompt whose blocks this one will share: it waits for its prompt.
    pub leader: Option<SeqId>,
    /// Most tokens that it will be given. Nothing is planned ahead beyond them.
    pub max_tokens: usize,
}

/// Place in the one order of all sequences; the lowest goes first and is preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// Step of arrival, less the head start.
    pub(super) turn: i64,
    /// Counts arrivals, so that no two are equal.
    pub(super) arrival: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Without blocks.
    Waiting,
    /// With blocks for all its tokens, or one more to be had at the next step.
    Running,
}

/// A sequence that has not ended.
#[derive(Debug)]
pub struct Sequence {
    pub(super) rank: Rank,
    pub(super) state: State,
    /// Place among those that run, while it does.
    pub(super) batch_index: usize,
    pub(super) priority: i8,
    pub(super) deadline: Option<Duration>,
    pub(super) salt: CacheSalt,
    pub(super) leader: Option<SeqId>,
    pub(super) tokens: Vec<TokenId>,
    pub(super) images: Option<Box<SequenceImages>>,
    pub(super) prompt_len: usize,
    /// Drafts of the next tokens. After a step that computed them: those not yet confirmed.
    pub(super) draft: Vec<TokenId>,
    /// Tokens whose keys and values are in `table`, or will be when the steps that began have ended.
    pub(super) computed: usize,
    /// Tokens that steps which began give and that are not known here yet.
    pub(super) due: usize,
    /// Row of logits from which the last of them is chosen.
    pub(super) choice_row: u32,
    /// The last step that writes to its blocks, counted from 1.
    pub(super) last_step: u64,
    pub(super) max_tokens: usize,
    pub(super) table: BlockTable,
    /// What is outside of the device of a prefix that it could go on from.
    pub(super) host: HostPrefix,
    /// Whether the whole prompt was computed once.
    pub(super) prompt_done: bool,
    /// First prompt token whose logits were not given yet, if they are wanted at all.
    pub(super) logits_from: Option<usize>,
    pub(super) hidden: bool,
    /// Prompt tokens that were in the cache at the first admission.
    pub(super) cached: Option<usize>,
}

impl Sequence {
    pub(super) fn new(new: NewSequence, rank: Rank) -> Self {
        Self {
            rank,
            state: State::Waiting,
            batch_index: 0,
            priority: new.priority,
            deadline: new.deadline,
            salt: new.salt,
            leader: new.leader,
            prompt_len: new.prompt.len(),
            images: SequenceImages::of(&new.prompt, &new.images),
            tokens: new.prompt,
            draft: Vec::new(),
            computed: 0,
            due: 0,
            choice_row: 0,
            last_step: 0,
            max_tokens: new.max_tokens,
            table: BlockTable::default(),
            host: HostPrefix::default(),
            prompt_done: false,
            logits_from: new.prompt_logits.then_some(0),
            hidden: new.hidden,
            cached: None,
        }
    }

    /// Prompt and generated tokens.
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Drafts of the tokens that come next.
    pub fn draft(&self) -> &[TokenId] {
        &self.draft
    }

    /// Tokens of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Prompt tokens that were found in the prefix cache; `None` before the first admission.
    pub fn cached(&self) -> Option<usize> {
        self.cached
    }

    /// Tokens that steps in flight give: those to come through [`append`](super::Scheduler::append).
    pub fn due(&self) -> usize {
        self.due
    }

    /// Whether it runs and one token is to be computed.
    pub fn is_decoding(&self) -> bool {
        self.state == State::Running && self.pending() == 1
    }

    /// Tokens that have to be computed before there are logits for the next.
    pub(super) fn pending(&self) -> usize {
        self.tokens.len() + self.due - self.computed
    }

    /// Adds blocks until it has room for so many tokens, in groups with a window only for the next one that is to be
    /// computed; whether there were enough.
    pub(super) fn grow(&mut self, pool: &mut BlockPool, tokens: usize) -> bool {
        pool.grow_to(&mut self.table, tokens, self.computed + 1)
    }

    /// Whether it surely goes on after the tokens that are due, as far as lengths say.
    pub(super) fn goes_on(&self, capacity: usize) -> bool {
        let len = self.tokens.len() + self.due;
        self.due == 0 || len < capacity && len - self.prompt_len < self.max_tokens
    }

    /// Tokens that need not be computed if the prefix cache has them.
    pub(super) fn most_cached(&self) -> usize {
        let first_row = match self.logits_from {
            Some(from) if self.wants_rows(from) => from,
            _ => usize::MAX,
        };
        // The last token is always computed, for its logits.
        first_row.min(self.tokens.len() - 1)
    }

    /// Whether prompt tokens from `start` on still want logits of their own.
    pub(super) fn wants_rows(&self, start: usize) -> bool {
        // The last prompt token's logits are those of the first generated token, wanted anyway.
        self.logits_from
            .is_some_and(|from| from.max(start) + 1 < self.prompt_len)
    }
}
