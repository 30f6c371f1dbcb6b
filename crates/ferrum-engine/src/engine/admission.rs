//! What comes in: sequences of a request, and their first step.

use super::answer::{Answer, AnswerText};
use super::lookup::PromptLookup;
use super::pooling::{Pool, Pooling};
use super::request::{EngineError, Event, Submission, Usage};
use super::stats::Progress;
use super::step_loop::StepLoop;
use crate::pool::CacheSalt;
use crate::scheduler::{NewSequence, StepPlan};
use ferrum_types::{AdapterId, Result, SeqId, TokenId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::Sender;

/// A request that has not ended.
pub(super) struct RequestState {
    pub(super) events: Sender<Event>,
    pub(super) came: Duration,
    /// Told to whoever waits for it.
    pub(super) progress: Arc<Progress>,
    /// Choices that have not ended.
    pub(super) seqs: Vec<SeqId>,
    pub(super) adapter: Option<AdapterId>,
    pub(super) stop_tokens: Vec<TokenId>,
    pub(super) usage: Usage,
    pub(super) prompt_logprobs: Option<usize>,
    /// Prompt positions whose logits were used.
    pub(super) prompt_rows: usize,
}

impl StepLoop<'_> {
    /// Makes sequences of a request.
    pub(super) fn open(&mut self, submission: &Submission) {
        let request = &submission.request;
        // The handle said so before, and an engine that was about to rest may have wiped it out.
        self.shared.watchdog.work_came(submission.came);
        let open = RequestState {
            events: submission.events.clone(),
            came: submission.came,
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
        self.open.insert(submission.id, open);
        if let Err(error) = self.find_adapter(request) {
            self.shared.queued.fetch_sub(request.n, Ordering::AcqRel);
            return self.fail_request(submission.id, error);
        }
        for choice in 0..request.n {
            if let Err(error) = self.add_choice(submission, choice) {
                // All was checked at the door, so this is a fault of the engine's; the request is told.
                let missing = request.n - choice;
                self.shared.queued.fetch_sub(missing, Ordering::AcqRel);
                let failed = EngineError::Failed(error.to_string());
                self.fail_request(submission.id, failed);
                return;
            }
        }
    }

    /// Makes a sequence of one choice. The first computes the prompt, the others wait for it.
    fn add_choice(&mut self, submission: &Submission, choice: usize) -> Result<()> {
        let (id, request) = (submission.id, &submission.request);
        let generation = &request.generation;
        let sampler = generation.sampler(request.prompt.len(), choice as u64)?;
        let spec = self.runner.spec();
        let (depends, dim) = (spec.depends_on_length(), spec.hidden_size);
        let siblings = self.open.get(&id).map(|open| &open.seqs);
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
                None => choice == 0 && request.prompt_logprobs.is_some(),
            },
            hidden: request.pooling.is_some(),
            leader: siblings.and_then(|seqs| seqs.first().copied()),
            max_tokens: self.shared.limits.most_tokens(request),
        })?;
        let answer = Answer {
            request: id,
            choice,
            sampler,
            text: self
                .tokenizer
                .map(|tokenizer| AnswerText::new(tokenizer, request)),
            guide: request
                .grammar
                .as_ref()
                .map(|grammar| grammar.guide(&request.generation.stop_tokens)),
            whole: false,
            stops: generation.stop_matcher(),
            logprobs: request.logprobs,
            max_tokens: self.shared.limits.most_tokens(request),
            generated: 0,
            pool: request.pooling.map(|pooling| Pool::new(pooling, dim)),
            lookup: (request.draft_tokens > 0).then(|| PromptLookup::new(request.draft_tokens)),
            admitted: false,
        };
        self.answers.insert(seq, answer);
        if let Some(open) = self.open.get_mut(&id) {
            open.seqs.push(seq);
        }
        Ok(())
    }

    /// The first step of a sequence, which began then: it no longer counts as waiting.
    pub(super) fn note_admission(&mut self, id: SeqId, began: Duration) {
        let Some(answer) = self.answers.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut answer.admitted, true) {
            return;
        }
        self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        if answer.choice == 0
            && let Some(open) = self.open.get_mut(&answer.request)
        {
            let cached = self.scheduler.sequence(id).and_then(|seq| seq.cached());
            let cached = cached.unwrap_or(0);
            open.usage.cached_tokens = cached;
            open.progress.cached.store(cached, Ordering::Relaxed);
            // Nobody else writes it, and a sequence is admitted once.
            let _ = open.progress.queued.set(began.saturating_sub(open.came));
        }
    }

    /// Sequences that have lost their blocks to others.
    pub(super) fn note_preemptions(&self, plan: &StepPlan) {
        let preempted = plan.preempted();
        if preempted.is_empty() {
            return;
        }
        let count = preempted.len();
        tracing::debug!(preempted = count, "KV cache full, sequences wait again");
        for id in preempted {
            let request = self.answers.get(id).map(|answer| answer.request);
            if let Some(open) = request.and_then(|request| self.open.get(&request)) {
                open.progress.preemptions.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
