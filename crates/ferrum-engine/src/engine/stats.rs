//! Figures of an engine, for metrics.

use std::time::Duration;

/// What an engine did since its start, and what it is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences with blocks.
    pub running: usize,
    /// Sequences that wait for their first step, also those just handed in.
    pub waiting: usize,
    /// Sequences that were preempted and wait for their next turn.
    pub preempted: usize,
    /// Blocks of the KV pool.
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
    /// Tokens that were guessed and computed.
    pub draft_tokens: u64,
    /// Those of them that were right.
    pub accepted_tokens: u64,
    /// Times that a sequence lost its blocks and had to wait again.
    pub preemptions: u64,
    /// Requests that have ended.
    pub finished_requests: u64,
    /// Requests that failed because the model computed no numbers for them.
    pub nan_failures: u64,
    /// Steps.
    pub steps: u64,
    /// Time of all steps, from planning to the last event.
    pub step_time: Duration,
    /// Time of it that the model took, until its logits were here. The rest is planning, guessing with a
    /// small model, choosing tokens, making text of them and telling.
    pub model_time: Duration,
    /// Time of the last step.
    pub last_step_time: Duration,
    /// When the last step ended, on the engine's clock.
    pub last_step: Duration,
}

impl EngineStats {
    /// These figures with what was counted before by engines that are no more, so that counts go on.
    pub fn after(self, past: &EngineStats) -> Self {
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
            step_time: past.step_time + self.step_time,
            model_time: past.model_time + self.model_time,
            // What is going on is only here.
            ..self
        }
    }
}
