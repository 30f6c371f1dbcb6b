//! Admits requests: creates a sequence for each choice, and records first steps and preemptions.

use super::choice::{ChoiceState, OutputText};
use super::pooling::{Pooling, PoolingState};
use super::prompt_lookup::PromptLookup;
use super::request::{EngineError, Submission, Usage};
use super::state::{RequestState, StepLoop};
use crate::pool::CacheSalt;
use crate::scheduler::{NewSequence, StepPlan};
use crate::sync::atomic::Ordering;
use ferrum_types::{Result, SeqId};
use std::sync::Arc;
use std::time::Duration;

impl StepLoop<'_> {
    /// Creates the sequences of a request.
    pub(super) fn admit_request(&mut self, submission: &Submission) {
        let request = &submission.request;
        // The handle set this before, but an engine that became idle meanwhile may have cleared it.
        self.shared.watchdog.work_arrived(submission.arrived_at);
        let state = RequestState {
            events: submission.events.clone(),
            arrived_at: submission.arrived_at,
            progress: Arc::clone(&submission.progress),
            seqs: Vec::with_capacity(request.n),
            adapter: request.adapter,
            stop_tokens: request.generation.stop_tokens.clone(),
            usage: Usage {
                prompt_tokens: request.prompt.len(),
                ..Usage::default()
            },
            prompt_logprobs: request.prompt_logprobs,
            prompt_rows: 0,
        };
        self.requests.insert(submission.id, state);
        if let Err(error) = self.find_adapter(request) {
            self.shared.queued.fetch_sub(request.n, Ordering::AcqRel);
            return self.fail_request(submission.id, error);
        }
        for index in 0..request.n {
            if let Err(error) = self.add_choice(submission, index) {
                // `submit` has checked the request, so this is a bug in the engine; the request fails.
                let missing = request.n - index;
                self.shared.queued.fetch_sub(missing, Ordering::AcqRel);
                let failed = EngineError::Failed(error.to_string());
                self.fail_request(submission.id, failed);
                return;
            }
        }
    }

    /// Creates the sequence of one choice. The first computes the prompt, the others wait for it.
    fn add_choice(&mut self, submission: &Submission, index: usize) -> Result<()> {
        let (id, request) = (submission.id, &submission.request);
        let generation = &request.generation;
        let sampler = generation.sampler(request.prompt.len(), index as u64)?;
        let spec = self.runner.spec();
        let (depends, dim) = (spec.depends_on_length(), spec.hidden_size);
        let siblings = self.requests.get(&id).map(|state| &state.seqs);
        let seq = SeqId(self.next_seq);
        self.next_seq += 1;
        self.scheduler.add(NewSequence {
            id: seq,
            prompt: request.prompt.clone(),
            images: request.images.clone(),
            priority: request.priority,
            deadline: submission.deadline,
            salt: CacheSalt {
                tenant: request.tenant.as_deref().map(Into::into),
                prompt_len: depends.then_some(request.prompt.len()),
                adapter: request.adapter,
                private: (!self.shared.config.prefix_cache).then_some(id.0),
            },
            prompt_logits: match request.pooling {
                Some(pooling) => pooling != Pooling::Last,
                None => index == 0 && request.prompt_logprobs.is_some(),
            },
            hidden: request.pooling.is_some(),
            leader: siblings.and_then(|seqs| seqs.first().copied()),
            max_tokens: self.shared.limits.max_tokens(request),
        })?;
        let choice = ChoiceState {
            request: id,
            index,
            sampler,
            text: self
                .tokenizer
                .map(|tokenizer| OutputText::new(tokenizer, request)),
            guide: request
                .grammar
                .as_ref()
                .map(|grammar| grammar.guide(&request.generation.stop_tokens)),
            grammar_complete: false,
            stops: generation.stop_matcher(),
            logprobs: request.logprobs,
            max_tokens: self.shared.limits.max_tokens(request),
            generated: 0,
            pooling: request
                .pooling
                .map(|pooling| PoolingState::new(pooling, dim)),
            lookup: (request.draft_tokens > 0).then(|| PromptLookup::new(request.draft_tokens)),
            admitted: false,
        };
        self.choices.insert(seq, choice);
        if let Some(state) = self.requests.get_mut(&id) {
            state.seqs.push(seq);
        }
        Ok(())
    }

    /// Records the first step of a sequence, which started at `began`: it no longer counts as waiting.
    pub(super) fn note_admission(&mut self, id: SeqId, began: Duration) {
        let Some(choice) = self.choices.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut choice.admitted, true) {
            return;
        }
        self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        if choice.index == 0
            && let Some(state) = self.requests.get_mut(&choice.request)
        {
            let cached = self.scheduler.sequence(id).and_then(|seq| seq.cached());
            let cached = cached.unwrap_or(0);
            state.usage.cached_tokens = cached;
            state.progress.cached.store(cached, Ordering::Relaxed);
            // This is the only writer, and a sequence is admitted once.
            let waited = began.saturating_sub(state.arrived_at);
            let _ = state.progress.queued.set(waited);
        }
    }

    /// Counts the sequences that the plan preempted.
    pub(super) fn note_preemptions(&self, plan: &StepPlan) {
        let preempted = plan.preempted();
        if preempted.is_empty() {
            return;
        }
        let count = preempted.len();
        tracing::debug!(preempted = count, "KV cache full, sequences wait again");
        for id in preempted {
            let request = self.choices.get(id).map(|choice| choice.request);
            if let Some(state) = request.and_then(|request| self.requests.get(&request)) {
                state.progress.preemptions.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
