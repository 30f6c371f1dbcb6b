//! Merges the engine event streams of a request's prompts into one stream of text chunks.

use crate::error::ApiError;
use crate::models::Lease;
use crate::observability::metrics::{AdapterUse, EndedAnswers, EndedPrompt};
use crate::observability::record::RequestRecord;
use crate::observability::slots::SlotTask;
use crate::observability::span::Attribute;
use crate::observability::trace::RequestTrace;
use crate::response::SlotSettings;
use ferrum_engine::engine::{StopMatch, Usage};
use ferrum_engine::sampler::Logprobs;
use ferrum_engine::{Event, EventStream, FinishReason, Request};
use ferrum_types::TokenId;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::time::timeout_at;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TextChunk {
    /// Which answer: of each prompt its choices, prompt after prompt.
    pub(crate) index: usize,
    /// May be empty.
    pub(crate) text: String,
    /// With the last piece, those of the stop token, which is no part of the text.
    pub(crate) logprobs: Option<Logprobs>,
    /// Set with the last piece of an answer.
    pub(crate) finish: Option<FinishReason>,
    /// What ended it, if it did not end by itself or for its length.
    pub(crate) stop: Option<StopMatch>,
    /// The token that it is of, if it is of one.
    pub(crate) token: Option<TokenId>,
    /// How far the answer is.
    pub(crate) timings: Timings,
}

impl TextChunk {
    /// Whether a token was generated for it.
    pub(crate) fn is_token(&self) -> bool {
        self.finish.is_none() || matches!(self.stop, Some(StopMatch::Token(_)))
    }

    /// The stop string that ended the answer.
    pub(crate) fn stop_string(&mut self) -> Option<String> {
        match self.stop.take() {
            Some(StopMatch::Text(text)) => Some(text),
            Some(StopMatch::Token(_)) | None => None,
        }
    }
}

/// What an answer took so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timings {
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: usize,
    /// Those of them that the prefix cache had.
    pub(crate) cached_tokens: usize,
    /// From its first step to its first token.
    pub(crate) prefill: Duration,
    /// Tokens of the answer.
    pub(crate) tokens: usize,
    /// Since its first token.
    pub(crate) decode: Duration,
}

/// An event of a [`GenerationStream`].
#[derive(Debug)]
pub(crate) enum GenerationEvent {
    /// Log-probabilities of a part of a prompt, the second token first. Before any piece of its answers.
    PromptLogprobs(usize, Vec<Logprobs>),
    /// The pooled states of a prompt.
    Embedding(usize, Vec<f32>),
    TextChunk(TextChunk),
    /// All answers have ended.
    Done(Usage),
    /// The request failed; no event follows.
    Failed(ApiError),
}

/// All answers to a request. Dropping it cancels them.
#[derive(Debug)]
pub(crate) struct GenerationStream {
    streams: Vec<Option<EventStream>>,
    /// Choices of each prompt.
    n: usize,
    usage: Usage,
    ended: bool,
    /// Whose turn it is to be asked first, so that none is starved.
    turn: usize,
    started: Instant,
    times: Vec<Times>,
    record: Option<Arc<RequestRecord>>,
    prompts: Vec<Prompt>,
    /// What others see of the answers that have not ended.
    slots: Vec<Option<Arc<SlotTask>>>,
    /// How long after its first token an answer goes on, once it has a line break.
    time_limit: Option<Duration>,
    /// Counts the requested adapter in the metrics until it is dropped.
    _adapter: Option<Arc<AdapterUse>>,
    /// When the stream ends in any case: the engine may hang, and the client may not read.
    deadline: Option<Instant>,
    /// Whether it was over before the end.
    expired: bool,
    /// The answers so far, kept only to be logged; empty where that is not wanted.
    logged: Vec<String>,
    /// The model stays loaded until all have ended: after the streams, which are cancelled first.
    lease: Lease,
}

/// The server enforces a deadline this much later than the engine, so that the engine's error is reported where there is one.
const DEADLINE_GRACE: Duration = Duration::from_secs(2);

/// What is known of a prompt from the start.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    tokens: usize,
    max_tokens: usize,
    /// Whether an embedding is wanted instead of answers.
    pooled: bool,
}

/// When an answer got its tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: usize,
    ended: bool,
}

/// 400 about a model that generates no text.
fn for_embeddings(model: &str) -> ApiError {
    ApiError::wrong_model(format!(
        "model: {model:?} is for embeddings and generates no text; use /v1/embeddings"
    ))
}

impl GenerationStream {
    /// Hands requests to a model, each with `n` choices: all of them or none. Their prompts came in the
    /// field `param`.
    ///
    /// # Errors
    /// 400 where the model generates no text and text is wanted; what the engine says of a request.
    pub(crate) fn begin(
        lease: &Lease,
        param: &str,
        n: usize,
        requests: impl IntoIterator<Item = Request>,
    ) -> Result<Self, ApiError> {
        let started = Instant::now();
        let record = RequestRecord::current();
        let logs = record.as_ref().filter(|record| record.log_prompts);
        let (mut streams, mut prompts, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let mut time = None;
        for request in requests {
            if request.pooling.is_none() && !lease.served.generates {
                return Err(for_embeddings(&lease.requested.name));
            }
            prompts.push(Prompt {
                tokens: request.prompt.len(),
                max_tokens: request.generation.max_tokens,
                pooled: request.pooling.is_some(),
            });
            time = time.max(request.timeout);
            if let Some(record) = logs {
                let prompt = lease.served.tokenizer.decode(&request.prompt, false);
                let (request_id, prompt) = (record.id.as_str(), prompt.as_str());
                tracing::info!(target: "prompts", parent: None, request_id, prompt, "prompt");
            }
            let pooled = request.pooling.is_some();
            let params = (!pooled).then(|| SlotSettings::of(&request.generation));
            // Those before it are cancelled when one is refused.
            let submitted = lease.served.engine.submit(request);
            let stream = submitted.map_err(|e| ApiError::from(e).of_prompt(param))?;
            match params {
                Some(params) => {
                    let tasks = lease.slots().begin(&params, &stream.progress(), n);
                    slots.extend(tasks.into_iter().map(Some));
                }
                None => slots.resize_with(slots.len() + n, || None),
            }
            streams.push(stream);
        }
        let answers = streams.len() * n;
        let requested = &lease.requested;
        let adapter = requested.adapter.map(|_| {
            let prompts = streams.iter().map(EventStream::progress).collect();
            lease.metrics().use_adapter(&requested.name, prompts)
        });
        Ok(Self {
            logged: logs.map_or_else(Vec::new, |_| vec![String::new(); answers]),
            prompts,
            slots,
            time_limit: None,
            _adapter: adapter,
            deadline: time.and_then(|time| started.checked_add(time + DEADLINE_GRACE)),
            expired: false,
            record,
            times: vec![Times::default(); answers],
            streams: streams.into_iter().map(Some).collect(),
            n,
            usage: Usage::default(),
            ended: false,
            turn: 0,
            started,
            lease: lease.clone(),
        })
    }

    /// Ends the answers this long after their first token, once they have a line break. For one answer to a prompt.
    pub(crate) fn limit_time(&mut self, limit: Option<Duration>) {
        self.time_limit = limit.filter(|_| self.n == 1);
    }

    fn trace(&self) -> Option<&RequestTrace> {
        self.record.as_ref()?.trace()
    }

    /// Answers in all.
    pub(crate) fn count(&self) -> usize {
        self.times.len()
    }

    /// Waits for what comes next; `None` after the end.
    pub(crate) async fn next(&mut self) -> Option<GenerationEvent> {
        let deadline = self.deadline;
        let next = std::future::poll_fn(|cx| self.poll_next(cx));
        let Some(deadline) = deadline else {
            return next.await;
        };
        if let Ok(next) = timeout_at(deadline.into(), next).await {
            return next;
        }
        self.expire();
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// When [`expire`](Self::expire) is due.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Cancels unfinished prompts, releases the model and reports a timeout.
    pub(crate) fn expire(&mut self) {
        if !self.ended && !self.expired {
            self.expired = true;
            self.fail(&ApiError::timeout());
            self.lease.release();
        }
    }

    /// Records that the request failed, and ends the streams.
    fn fail(&mut self, error: &ApiError) {
        if let Some(record) = &self.record {
            record.failed(error);
        }
        if let Some(trace) = self.trace() {
            trace.fail();
        }
        self.end_rest();
        self.streams.clear();
    }

    /// See [`next`](Self::next).
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<GenerationEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if self.expired {
            self.ended = true;
            return Poll::Ready(Some(GenerationEvent::Failed(ApiError::timeout())));
        }
        let (count, turn) = (self.streams.len(), self.turn);
        for step in 0..count {
            let prompt = (turn + step) % count;
            let Some(stream) = &mut self.streams[prompt] else {
                continue;
            };
            let Poll::Ready(event) = stream.poll_next(cx) else {
                continue;
            };
            self.turn = prompt + 1;
            match event {
                Some(Event::Done(usage)) => self.add(prompt, usage),
                // A stream ends with `Done` or `Failed`.
                None => self.streams[prompt] = None,
                Some(event) => {
                    let next = self.take(prompt, event);
                    if let GenerationEvent::Failed(error) = &next {
                        self.ended = true;
                        self.fail(error);
                    }
                    return Poll::Ready(Some(next));
                }
            }
        }
        if self.streams.iter().any(Option::is_some) {
            return Poll::Pending;
        }
        self.ended = true;
        Poll::Ready(Some(GenerationEvent::Done(self.usage)))
    }

    fn add(&mut self, prompt: usize, usage: Usage) {
        self.usage += usage;
        if let Some(record) = &self.record {
            record.add_usage(&usage);
        }
        self.end_prompt(prompt);
        self.streams[prompt] = None;
    }

    fn take(&mut self, prompt: usize, event: Event) -> GenerationEvent {
        match event {
            Event::PromptLogprobs(part) => GenerationEvent::PromptLogprobs(prompt, part),
            Event::Embedding(states) => GenerationEvent::Embedding(prompt, states),
            Event::Token {
                choice,
                token,
                text,
                logprobs,
            } => {
                let index = prompt * self.n + choice;
                self.time_token(index);
                if let Some(Some(slot)) = self.slots.get(index) {
                    slot.token(&text);
                }
                self.log(index, &text);
                let timings = self.timings(prompt, index);
                GenerationEvent::TextChunk(TextChunk {
                    index,
                    text,
                    logprobs,
                    finish: self.end_late(prompt, index, timings),
                    stop: None,
                    token: Some(token),
                    timings,
                })
            }
            Event::Finished {
                choice,
                text,
                reason,
                stop,
                logprobs,
            } => {
                self.lease
                    .metrics()
                    .finished(reason, self.started.elapsed());
                let ending = match reason {
                    FinishReason::Deadline => "timeout",
                    FinishReason::Cancelled => "cancelled",
                    reason => finish_name(reason),
                };
                let index = prompt * self.n + choice;
                if matches!(stop, Some(StopMatch::Token(_))) {
                    self.time_token(index);
                }
                self.log(index, &text);
                let timings = self.timings(prompt, index);
                self.end_answer(index, ending);
                match reason {
                    FinishReason::Deadline => GenerationEvent::Failed(ApiError::timeout()),
                    FinishReason::Cancelled => {
                        GenerationEvent::Failed(ApiError::unavailable("the request was cancelled"))
                    }
                    FinishReason::Stop | FinishReason::Length => {
                        GenerationEvent::TextChunk(TextChunk {
                            index,
                            text,
                            logprobs,
                            finish: Some(reason),
                            stop,
                            token: None,
                            timings,
                        })
                    }
                }
            }
            Event::Failed(error) => GenerationEvent::Failed(error.into()),
            // Taken care of by the caller; there is nothing to pass on.
            Event::Done(usage) => GenerationEvent::Done(usage),
        }
    }

    /// Keeps a piece of an answer, if answers are to be logged.
    fn log(&mut self, index: usize, text: &str) {
        if let Some(logged) = self.logged.get_mut(index) {
            logged.push_str(text);
        }
    }

    fn time_token(&mut self, index: usize) {
        let now = Instant::now();
        let Some(times) = self.times.get_mut(index) else {
            return;
        };
        if let Some(record) = &self.record {
            record.token(now);
        }
        times.tokens += 1;
        times.first.get_or_insert(now);
        match times.last.replace(now) {
            None => self.lease.metrics().time_to_first_token(now - self.started),
            Some(before) => self.lease.metrics().inter_token_latency(now - before),
        }
    }

    /// What an answer to a prompt took so far.
    fn timings(&self, prompt: usize, index: usize) -> Timings {
        let (now, times) = (Instant::now(), &self.times[index]);
        let first = times.first.unwrap_or(now);
        let stream = self.streams[prompt].as_ref();
        let queued = stream.and_then(EventStream::queued).unwrap_or_default();
        Timings {
            prompt_tokens: self.prompts[prompt].tokens,
            cached_tokens: stream.map_or(0, |stream| stream.progress().cached_tokens()),
            prefill: first.saturating_duration_since(self.started + queued),
            tokens: times.tokens,
            decode: now.saturating_duration_since(first),
        }
    }

    /// Ends the only answer to a prompt if its time is over, as if it had all the tokens that it may have.
    fn end_late(&mut self, prompt: usize, index: usize, so_far: Timings) -> Option<FinishReason> {
        let late = self.time_limit.is_some_and(|limit| so_far.decode > limit);
        let slot = self.slots.get(index).and_then(Option::as_ref);
        if !late || !slot.is_some_and(|slot| slot.has_new_line()) {
            return None;
        }
        let reason = FinishReason::Length;
        let took = self.started.elapsed();
        self.lease.metrics().finished(reason, took);
        self.end_answer(index, finish_name(reason));
        // Dropping the stream cancels the sequence in the engine.
        self.add(
            prompt,
            Usage {
                prompt_tokens: so_far.prompt_tokens,
                cached_tokens: so_far.cached_tokens,
                completion_tokens: so_far.tokens,
            },
        );
        Some(reason)
    }

    /// The phases of a prompt: its time in the queue, and from there to its first token.
    fn end_prompt(&self, prompt: usize) {
        let Some(stream) = &self.streams[prompt] else {
            return;
        };
        let now = Instant::now();
        let admitted = stream.queued().map(|queued| self.started + queued);
        let answers = &self.times[prompt * self.n..][..self.n];
        let first = answers.iter().filter_map(|times| times.first).min();
        let first = first.unwrap_or(now);
        if let Some(admitted) = admitted {
            self.lease.metrics().queued(admitted - self.started);
            self.lease
                .metrics()
                .prefilled(first.saturating_duration_since(admitted));
        }
        let of = self.prompts[prompt];
        self.lease.metrics().prompt_ended(EndedPrompt {
            tokens: of.tokens,
            preemptions: stream.progress().preemptions(),
            computed: admitted.map(|admitted| now.saturating_duration_since(admitted)),
            answers: (!of.pooled).then_some(EndedAnswers {
                n: self.n,
                max_tokens: of.max_tokens,
                longest: answers.iter().map(|times| times.tokens).max().unwrap_or(0),
            }),
        });
        if let (Some(record), Some(admitted)) = (&self.record, admitted) {
            record.queued(admitted - self.started);
        }
        if let Some(trace) = self.trace() {
            trace.phase("queue", self.started, admitted.unwrap_or(now), Vec::new());
            if let Some(admitted) = admitted {
                trace.phase("prefill", admitted, first.max(admitted), Vec::new());
            }
        }
    }

    /// The phase in which an answer came.
    fn end_answer(&mut self, index: usize, reason: &'static str) {
        let Some(times) = self.times.get_mut(index) else {
            return;
        };
        if std::mem::replace(&mut times.ended, true) {
            return;
        }
        let (first, tokens) = (times.first, times.tokens);
        self.slots[index] = None;
        if !self.prompts[index / self.n].pooled {
            self.lease.metrics().generated(tokens);
        }
        if let Some(record) = &self.record {
            record.finished(reason);
            if let Some(text) = self.logged.get_mut(index).map(std::mem::take) {
                let (request_id, answer) = (record.id.as_str(), text.as_str());
                tracing::info!(target: "prompts", parent: None, request_id, index, answer, "answer");
            }
        }
        let Some(first) = first else {
            return;
        };
        let now = Instant::now();
        self.lease.metrics().decoded(now - first);
        let Some(trace) = self.trace() else {
            return;
        };
        let count = |n: usize| Attribute::Number(i64::try_from(n).unwrap_or(i64::MAX));
        let reason = Attribute::Text(reason.into());
        let attributes = vec![
            ("ferrum.answer", count(index)),
            ("gen_ai.usage.output_tokens", count(tokens)),
            ("gen_ai.response.finish_reason", reason),
        ];
        trace.phase("decode", first, now, attributes);
    }

    /// The phases of what does not come to its end.
    fn end_rest(&mut self) {
        for prompt in 0..self.streams.len() {
            if self.streams[prompt].is_some() {
                self.end_prompt(prompt);
                let answers = prompt * self.n..(prompt + 1) * self.n;
                if let Some(record) = &self.record {
                    let times = self.times[answers.clone()].iter();
                    // The engine reports cached tokens only at the end.
                    record.add_usage(&Usage {
                        prompt_tokens: self.prompts[prompt].tokens,
                        cached_tokens: 0,
                        completion_tokens: times.map(|times| times.tokens).sum(),
                    });
                }
                for index in answers {
                    self.end_answer(index, "unfinished");
                }
            }
        }
    }
}

impl Drop for GenerationStream {
    fn drop(&mut self) {
        if self.ended || self.expired {
            return;
        }
        if let Some(record) = &self.record {
            record.cancelled();
        }
        self.end_rest();
    }
}

/// How OpenAI calls the end of an answer.
fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        _ => "stop",
    }
}
