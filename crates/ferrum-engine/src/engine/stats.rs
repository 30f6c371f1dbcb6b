//! Statistics of an engine, for metrics.

use crate::offload::OffloadStats;
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

/// Most tokens of a draft.
pub const MAX_DRAFT_TOKENS: usize = 64;

/// Upper bounds of the buckets of [`StepSizeHistogram`], in tokens.
pub const STEP_SIZE_BUCKETS: [usize; 13] = [
    1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
];

/// Histogram of tokens per step: one count for each bucket of [`STEP_SIZE_BUCKETS`], and one for larger steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSizeHistogram(pub [u64; STEP_SIZE_BUCKETS.len() + 1]);

impl StepSizeHistogram {
    /// Counts a step.
    pub(crate) fn add(&mut self, tokens: usize) {
        self.0[STEP_SIZE_BUCKETS.partition_point(|&bound| bound < tokens)] += 1;
    }

    fn with_earlier(mut self, past: &Self) -> Self {
        for (count, past) in self.0.iter_mut().zip(past.0) {
            *count += past;
        }
        self
    }
}

/// Draft statistics, with acceptance counts by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftCounts {
    /// Number of drafts that were verified.
    pub drafts: u64,
    /// Tokens of the longest draft.
    pub longest: usize,
    /// How often the token at each position of a draft was accepted, from the first.
    pub accepted_at: [u64; MAX_DRAFT_TOKENS],
}

impl Default for DraftCounts {
    fn default() -> Self {
        Self {
            drafts: 0,
            longest: 0,
            accepted_at: [0; MAX_DRAFT_TOKENS],
        }
    }
}

impl DraftCounts {
    /// Counts a draft whose first `accepted` tokens were accepted.
    pub(super) fn add(&mut self, tokens: usize, accepted: usize) {
        self.drafts += 1;
        self.longest = self.longest.max(tokens);
        for count in self.accepted_at.iter_mut().take(accepted) {
            *count += 1;
        }
    }

    fn with_earlier(mut self, past: &Self) -> Self {
        self.drafts += past.drafts;
        self.longest = self.longest.max(past.longest);
        for (count, past) in self.accepted_at.iter_mut().zip(past.accepted_at) {
            *count += past;
        }
        self
    }
}

/// Progress of a request.
#[derive(Debug, Default)]
pub struct Progress {
    pub(super) queued: OnceLock<Duration>,
    pub(super) cached: AtomicUsize,
    pub(super) preemptions: AtomicU32,
}

impl Progress {
    /// How long it waited for its first step; `None` while it waits.
    pub fn queued(&self) -> Option<Duration> {
        self.queued.get().copied()
    }

    /// Tokens of its prompt that the prefix cache had when it was admitted.
    pub fn cached_tokens(&self) -> usize {
        self.cached.load(Ordering::Relaxed)
    }

    /// How often one of its sequences lost its blocks and had to wait again.
    pub fn preemptions(&self) -> u32 {
        self.preemptions.load(Ordering::Relaxed)
    }
}

/// Counters of an engine since its start, and its current state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences with blocks.
    pub running: usize,
    /// Sequences that wait for their first step, also those just handed in.
    pub waiting: usize,
    /// Sequences that were preempted and wait for their next turn.
    pub preempted: usize,
    /// Tokens of a block of the KV pool.
    pub kv_block_size: usize,
    /// Tokens that the KV cache holds over all sequences.
    pub kv_tokens: usize,
    /// Blocks of the KV pools of all cache groups.
    pub kv_blocks: usize,
    /// Blocks that sequences refer to.
    pub kv_blocks_used: usize,
    /// Blocks that the prefix cache keeps.
    pub kv_blocks_cached: usize,
    /// Prompt tokens of sequences that were admitted.
    pub prompt_tokens: u64,
    /// Those of them that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens that were computed in steps, also those computed again.
    pub computed_tokens: u64,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// Tokens that were drafted and computed.
    pub draft_tokens: u64,
    /// Those of them that were accepted.
    pub accepted_tokens: u64,
    /// Draft statistics.
    pub drafts: DraftCounts,
    /// Whether requests share what they have in common.
    pub prefix_cache: bool,
    /// Times that a sequence lost its blocks and had to wait again.
    pub preemptions: u64,
    /// Requests that have ended.
    pub finished_requests: u64,
    /// Requests that failed because the model computed no numbers for them.
    pub nan_failures: u64,
    /// Steps.
    pub steps: u64,
    /// Steps by how many tokens they computed.
    pub step_sizes: StepSizeHistogram,
    /// Time of all steps, from planning to the last event.
    pub step_time: Duration,
    /// Time of it that the model took, until its outputs were read. The rest is planning, drafting with a
    /// draft model, sampling, detokenising and sending events.
    pub model_time: Duration,
    /// Time of the last step.
    pub last_step_time: Duration,
    /// When the last step ended, on the engine's clock.
    pub last_step: Duration,
    /// Blocks outside of the device.
    pub offload: OffloadStats,
}

impl EngineStats {
    /// Adds the counters of earlier engines.
    pub fn with_earlier(self, past: &EngineStats) -> Self {
        Self {
            prompt_tokens: past.prompt_tokens + self.prompt_tokens,
            cached_tokens: past.cached_tokens + self.cached_tokens,
            computed_tokens: past.computed_tokens + self.computed_tokens,
            generated_tokens: past.generated_tokens + self.generated_tokens,
            draft_tokens: past.draft_tokens + self.draft_tokens,
            accepted_tokens: past.accepted_tokens + self.accepted_tokens,
            preemptions: past.preemptions + self.preemptions,
            finished_requests: past.finished_requests + self.finished_requests,
            nan_failures: past.nan_failures + self.nan_failures,
            steps: past.steps + self.steps,
            step_sizes: self.step_sizes.with_earlier(&past.step_sizes),
            drafts: self.drafts.with_earlier(&past.drafts),
            step_time: past.step_time + self.step_time,
            model_time: past.model_time + self.model_time,
            offload: OffloadStats {
                ram_hit_tokens: past.offload.ram_hit_tokens + self.offload.ram_hit_tokens,
                disk_hit_tokens: past.offload.disk_hit_tokens + self.offload.disk_hit_tokens,
                damaged: past.offload.damaged + self.offload.damaged,
                ..self.offload
            },
            // The current state is this engine's.
            ..self
        }
    }
}
