//! State of a sequence in the scheduler: its tokens, how many of them are computed, and its blocks.

use super::images::{SequenceImages, keys};
use super::offload::OffloadedPrefix;
use crate::image_embeddings::PromptImage;
use crate::pool::{BlockPool, BlockTable, CacheSalt};
use ferrum_models::image_cut_by;
use ferrum_types::{SeqId, TokenId};
use std::time::Duration;

/// A sequence to be scheduled.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Identifies it; used once.
    pub id: SeqId,
    /// Tokens to begin with, at least one.
    pub prompt: Vec<TokenId>,
    /// Images in it, in order. They exclude `prompt_logits`.
    pub images: Vec<PromptImage>,
    /// Higher is scheduled first; see [`SchedulerConfig::priority_step_credit`](super::SchedulerConfig::priority_step_credit).
    pub priority: i8,
    /// When it has to end, on the clock of [`Scheduler::overdue`](super::Scheduler::overdue).
    pub deadline: Option<Duration>,
    /// It shares blocks with sequences of an equal salt.
    pub salt: CacheSalt,
    /// Whether every prompt token needs logits. Each row is computed once, also when the sequence is preempted. Cached
    /// blocks are not used for tokens whose rows are missing.
    pub prompt_logits: bool,
    /// Whether its rows give hidden states instead of logits.
    pub hidden: bool,
    /// A sequence with the same prompt whose blocks this one will share. This one waits until that prompt is computed.
    pub leader: Option<SeqId>,
    /// Most tokens that it will generate. Nothing is planned ahead beyond them.
    pub max_tokens: usize,
}

/// Position in the order of all sequences; the lowest is admitted first and preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScheduleOrder {
    /// Step of arrival minus the priority credit.
    pub(super) effective_arrival: i64,
    /// Counts arrivals, so that no two are equal.
    pub(super) arrival: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Without blocks.
    Waiting,
    /// With blocks for all its tokens, except perhaps for one that the next step allocates.
    Running,
}

/// A sequence that has not ended.
#[derive(Debug)]
pub struct Sequence {
    pub(super) order: ScheduleOrder,
    pub(super) state: State,
    /// Index in the batch order, while it runs.
    pub(super) batch_index: usize,
    pub(super) priority: i8,
    pub(super) deadline: Option<Duration>,
    pub(super) salt: CacheSalt,
    pub(super) leader: Option<SeqId>,
    pub(super) tokens: Vec<TokenId>,
    pub(super) images: Option<Box<SequenceImages>>,
    pub(super) prompt_len: usize,
    /// Drafts of the next tokens. After a step that computed them: those not yet accepted.
    pub(super) draft: Vec<TokenId>,
    /// Tokens whose keys and values are in `table`, or will be when the steps that began have ended.
    pub(super) computed: usize,
    /// Number of tokens before its saved state.
    pub(super) saved_at: usize,
    /// Tokens up to here are computed again, or for the first time with those, as its state went back.
    pub(super) replay_end: usize,
    /// Tokens that steps in flight give and that are not known yet.
    pub(super) pending_tokens: usize,
    /// Row of logits from which the last of them is sampled.
    pub(super) sampled_row: u32,
    /// The last step that writes to its blocks, counted from 1.
    pub(super) last_step: u64,
    pub(super) max_tokens: usize,
    pub(super) table: BlockTable,
    /// Entries in the offload tiers of a prefix from which it could continue.
    pub(super) offload: OffloadedPrefix,
    /// Whether the whole prompt was computed once.
    pub(super) prompt_done: bool,
    /// First prompt token whose logits were not computed yet, if prompt logits are requested.
    pub(super) logits_from: Option<usize>,
    pub(super) hidden: bool,
    /// Whether a step has all of it, or nothing.
    pub(super) whole: bool,
    /// Prompt tokens that were in the cache at the first admission.
    pub(super) cached: Option<usize>,
}

impl Sequence {
    pub(super) fn new(new: NewSequence, order: ScheduleOrder, whole: bool) -> Self {
        Self {
            order,
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
            saved_at: 0,
            replay_end: 0,
            pending_tokens: 0,
            sampled_row: 0,
            last_step: 0,
            max_tokens: new.max_tokens,
            table: BlockTable::default(),
            offload: OffloadedPrefix::default(),
            prompt_done: false,
            logits_from: new.prompt_logits.then_some(0),
            hidden: new.hidden,
            whole,
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

    /// Number of tokens that steps in flight give: those that [`append`](super::Scheduler::append) has yet to add.
    pub fn pending_tokens(&self) -> usize {
        self.pending_tokens
    }

    /// Whether it runs and one token is to be computed.
    pub fn is_decoding(&self) -> bool {
        self.state == State::Running && self.uncomputed() == 1
    }

    /// Number of tokens that have to be computed before there are logits for the next one.
    pub(super) fn uncomputed(&self) -> usize {
        self.tokens.len() + self.pending_tokens - self.computed
    }

    /// Whether its next step computes a token behind its prompt, or the last one of that. A prompt of one token is such a
    /// step, too, unless prompts are whole: those go by rank, so that a long one gets its step. So is one that computes tokens
    /// again after a wrong draft.
    pub(super) fn is_decode(&self) -> bool {
        (self.uncomputed() == 1 || self.computed < self.replay_end) && !self.whole
    }

    /// Whether its next step is one of its prompt.
    pub(super) fn is_prefill(&self) -> bool {
        self.uncomputed() > 0 && !self.is_decode()
    }

    /// Adds blocks until it has room for `tokens` tokens, in groups with a window only for the next one to be computed.
    /// Returns whether there were enough.
    pub(super) fn grow(&mut self, pool: &mut BlockPool, tokens: usize) -> bool {
        pool.grow_to(&mut self.table, tokens, self.computed + 1)
    }

    /// Whether it continues after its pending tokens, according to the length limits.
    pub(super) fn goes_on(&self, capacity: usize) -> bool {
        let len = self.tokens.len() + self.pending_tokens;
        self.pending_tokens == 0 || len < capacity && len - self.prompt_len < self.max_tokens
    }

    /// Most tokens that may come from the prefix cache.
    pub(super) fn max_cached(&self) -> usize {
        if self.whole {
            return 0;
        }
        let first_row = match self.logits_from {
            Some(from) if self.wants_rows(from) => from,
            _ => usize::MAX,
        };
        // The last token is always computed, for its logits.
        first_row.min(self.tokens.len() - 1)
    }

    /// Whether prompt tokens from `start` on still need rows of logits.
    pub(super) fn wants_rows(&self, start: usize) -> bool {
        // The row of the last prompt token gives the first generated token, so it is computed in any case.
        self.logits_from
            .is_some_and(|from| from.max(start) + 1 < self.prompt_len)
    }

    /// The keys of its tokens in the prefix cache.
    pub(super) fn cache_keys(&self) -> &[TokenId] {
        keys(&self.images, &self.tokens)
    }

    /// Limits the next `tokens` tokens to those before an image that would be split, or to none of a prompt that would.
    pub(super) fn unsplit(&self, tokens: usize) -> usize {
        if self.whole && tokens < self.uncomputed() {
            return 0;
        }
        let images = self.images.as_ref();
        let cut = images.and_then(|images| image_cut_by(&images.spans, self.computed + tokens));
        cut.map_or(tokens, |image| image.start.saturating_sub(self.computed))
    }

    /// Tokens that its next step has together: what is left of the image with which it begins, or a whole prompt; 0: each
    /// may be the last.
    pub(super) fn unsplit_ahead(&self) -> usize {
        if self.whole {
            return self.uncomputed();
        }
        let images = self.images.as_ref();
        let cut = images.and_then(|images| image_cut_by(&images.spans, self.computed + 1));
        cut.map_or(0, |image| image.end - self.computed)
    }
}
