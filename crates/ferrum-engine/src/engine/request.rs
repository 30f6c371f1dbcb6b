//! Engine requests, events and limits.

use super::stats::{MAX_DRAFT_TOKENS, Progress};
use super::{Command, EngineHandle, Pooling};
use crate::grammar::Constraint;
use crate::image_embeddings::PromptImage;
use crate::sampler::Logprobs;
use crate::{FinishReason, GenerationParams};
use ferrum_types::{AdapterId, TokenId};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;

/// Most choices of a request.
pub const MAX_CHOICES: usize = 128;
/// Most stop strings.
pub const MAX_STOPS: usize = 16;
/// Longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;
/// Most stop tokens.
pub const MAX_STOP_TOKENS: usize = 1024;
/// Most alternatives for which log-probabilities are returned.
pub const MAX_LOGPROBS: usize = 20;
/// Most log-probabilities of a request: of all choices and the prompt, with alternatives. The receiver may have to keep
/// them all in memory.
pub const MAX_LOGPROB_ENTRIES: usize = 1 << 22;

/// A prompt and the parameters of generation.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// Images in it, in order. A prompt with images has no prompt log-probabilities.
    pub images: Vec<PromptImage>,
    /// Sampling parameters and stop conditions.
    pub generation: GenerationParams,
    /// Number of choices; each has its own random sequence.
    pub n: usize,
    /// Log-probabilities of each generated token and of this many alternatives.
    pub logprobs: Option<usize>,
    /// Log-probabilities of each prompt token but the first, and of this many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// Most tokens of a draft from prompt lookup; 0: no drafts. The output is the same, in fewer, larger steps. The
    /// runner needs more rows of logits than sequences for it.
    pub draft_tokens: usize,
    /// Grammar that constrains each choice. The model may end a choice wherever the grammar allows it, and the choice
    /// finishes when nothing more can follow; `max_tokens` or the context may end it earlier.
    pub grammar: Option<Constraint>,
    /// Special tokens whose text is part of the output; the text of others is left out.
    pub visible_special_tokens: Vec<TokenId>,
    /// Whether the output continues the prompt's text, so that a space at its beginning is kept: SentencePiece decoders
    /// strip it at the beginning of a text.
    pub continues_prompt: bool,
    /// Returns one vector for the prompt, [`Event::Embedding`], instead of generating tokens. The fields about generation
    /// are ignored then, and `n` is 1.
    pub pooling: Option<Pooling>,
    /// Higher is scheduled first, by
    /// [`EngineConfig::priority_step_credit`](super::EngineConfig::priority_step_credit) steps a level.
    pub priority: i8,
    /// Time after which the request ends, finished or not.
    pub timeout: Option<Duration>,
    /// Requests of different tenants share nothing in the prefix cache.
    pub tenant: Option<String>,
    /// A LoRA adapter that [`EngineHandle::load_adapter`] loaded.
    pub adapter: Option<AdapterId>,
}

impl Request {
    /// A request for one choice after `prompt`.
    pub fn new(prompt: Vec<TokenId>, generation: GenerationParams) -> Self {
        Self {
            prompt,
            images: Vec::new(),
            generation,
            n: 1,
            logprobs: None,
            prompt_logprobs: None,
            draft_tokens: 0,
            grammar: None,
            visible_special_tokens: Vec::new(),
            continues_prompt: false,
            pooling: None,
            priority: 0,
            timeout: None,
            tenant: None,
            adapter: None,
        }
    }
}

/// Identifies a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A field of the request is invalid.
    #[error("{field}: {reason}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What was found and what was expected.
        reason: String,
    },
    /// The prompt does not fit, or leaves no room for a token.
    #[error("the prompt has {requested} tokens, the context holds {capacity}")]
    ContextOverflow {
        /// Tokens of the prompt.
        requested: usize,
        /// Tokens that fit.
        capacity: usize,
    },
    /// The queue is full.
    #[error("the engine is overloaded: {waiting} of {limit} places in the queue are taken")]
    Overloaded {
        /// Sequences that wait.
        waiting: usize,
        /// Most that may.
        limit: usize,
    },
    /// The engine is shutting down and accepts no requests.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The engine has failed.
    #[error("the engine has failed: {0}")]
    Failed(String),
    /// The model computed NaN for this request; others are not affected.
    #[error("the model failed on this request: it computed no numbers (NaN)")]
    NotANumber,
}

/// What stopped a choice before a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopMatch {
    /// One of the stop strings.
    Text(String),
    /// One of the stop tokens.
    Token(TokenId),
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that the prefix cache had when the request was admitted.
    pub cached_tokens: usize,
    /// Generated tokens of all choices, stop tokens among them.
    pub completion_tokens: usize,
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.completion_tokens += other.completion_tokens;
    }
}

/// An event of a request. The last one is `Done` or `Failed`, and there is exactly one of them.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Log-probabilities of prompt tokens, from the second on, in one part or several.
    PromptLogprobs(Vec<Logprobs>),
    /// The pooled states of the prompt after the final norm: `[hidden]`.
    Embedding(Vec<f32>),
    /// A token.
    Token {
        /// Which choice, from 0.
        choice: usize,
        /// The token.
        token: TokenId,
        /// Text that is final now: whole characters that begin no stop string. May be empty.
        text: String,
        /// If they were requested.
        logprobs: Option<Logprobs>,
    },
    /// A choice has ended.
    Finished {
        /// Which choice, from 0.
        choice: usize,
        /// Text that was held back.
        text: String,
        /// Why it ended.
        reason: FinishReason,
        /// The stop string or token, for [`FinishReason::Stop`].
        stop: Option<StopMatch>,
        /// Log-probabilities of the stop token, if they were requested.
        logprobs: Option<Logprobs>,
    },
    /// All choices have ended.
    Done(Usage),
    /// The request failed.
    Failed(EngineError),
}

impl Event {
    fn is_last(&self) -> bool {
        matches!(self, Event::Done(_) | Event::Failed(_))
    }
}

/// The events of one request, in order. Dropping it cancels the request.
#[derive(Debug)]
pub struct EventStream {
    id: RequestId,
    events: mpsc::Receiver<Event>,
    engine: EngineHandle,
    progress: Arc<Progress>,
    ended: bool,
}

impl EventStream {
    pub(super) fn new(id: RequestId, events: mpsc::Receiver<Event>, engine: EngineHandle) -> Self {
        Self {
            id,
            events,
            engine,
            progress: Arc::default(),
            ended: false,
        }
    }

    /// How long it waited for its first step; `None` while it waits.
    pub fn queued(&self) -> Option<Duration> {
        self.progress.queued()
    }

    /// Its progress, also for monitoring without the stream.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// Identifies the request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Waits for the next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Polls for the next event, for implementations of `Stream`.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.events
            .poll_recv(cx)
            .map(|event| Some(self.take(event)))
    }

    /// Waits for the next event on a thread that may block; `None` after the last.
    ///
    /// # Panics
    /// On a thread that runs asynchronous tasks.
    pub fn blocking_next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        let event = self.events.blocking_recv();
        Some(self.take(event))
    }

    /// Passes an event on; if the engine ended without one, creates the last event.
    fn take(&mut self, event: Option<Event>) -> Event {
        let event = event.unwrap_or_else(|| Event::Failed(self.engine.end_error()));
        self.ended = event.is_last();
        event
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.engine.commands.send(Command::Cancel(self.id));
        }
    }
}

/// A request that is sent to the engine's thread.
pub(super) struct Submission {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) arrived_at: Duration,
    pub(super) deadline: Option<Duration>,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) progress: Arc<Progress>,
}

/// Limits that a request is checked against before anything is allocated for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) vocab_size: usize,
    /// Most tokens of a sequence.
    pub(super) capacity: usize,
    /// Whether attention is causal.
    pub(super) causal: bool,
    /// Whether there is a tokenizer.
    pub(super) has_text: bool,
    /// Elements of an embedding.
    pub(super) hidden: usize,
    /// Most tokens of an image: those that a step has room for, and the narrowest window.
    pub(super) image_tokens: usize,
}

impl Limits {
    pub(super) fn check(&self, request: &Request) -> Result<(), EngineError> {
        let generation = &request.generation;
        if request.prompt.is_empty() {
            return invalid("prompt", "it has no token".into());
        }
        if request.pooling.is_none() && !self.causal {
            let reason = "the model makes embeddings alone: its attention is bidirectional";
            return invalid("pooling", reason.into());
        }
        // A choice has at least one token, and prompt and output share the context.
        let generates = request.pooling.is_none() && generation.max_tokens > 0;
        if request.prompt.len() + usize::from(generates) > self.capacity {
            return Err(EngineError::ContextOverflow {
                requested: request.prompt.len(),
                capacity: self.capacity,
            });
        }
        if generation.min_tokens > generation.max_tokens {
            let (found, most) = (generation.min_tokens, generation.max_tokens);
            let reason = format!("found {found}, expected at most max_tokens, which is {most}");
            return invalid("min tokens", reason);
        }
        let sizes = [
            ("n", request.n, MAX_CHOICES),
            ("stop", generation.stop.len(), MAX_STOPS),
            ("stop tokens", generation.stop_tokens.len(), MAX_STOP_TOKENS),
            (
                "visible special tokens",
                request.visible_special_tokens.len(),
                MAX_STOP_TOKENS,
            ),
            ("draft tokens", request.draft_tokens, MAX_DRAFT_TOKENS),
            ("logprobs", request.logprobs.unwrap_or(0), MAX_LOGPROBS),
            (
                "prompt logprobs",
                request.prompt_logprobs.unwrap_or(0),
                MAX_LOGPROBS,
            ),
        ];
        for (field, found, most) in sizes {
            if found > most {
                return invalid(field, format!("found {found}, expected at most {most}"));
            }
        }
        self.check_logprobs(request)?;
        self.check_images(request)?;
        if request.n == 0 {
            return invalid("n", "found 0, expected at least 1".into());
        }
        if request.pooling.is_some() {
            let rows = request.logprobs.or(request.prompt_logprobs);
            if request.n != 1 || request.draft_tokens != 0 || rows.is_some() {
                let reason = "expected one choice, no draft and no log-probabilities beside it";
                return invalid("pooling", reason.into());
            }
        }
        if let Some(stop) = generation.stop.iter().find(|s| s.len() > MAX_STOP_BYTES) {
            let reason = format!(
                "found {} bytes, expected at most {MAX_STOP_BYTES}",
                stop.len()
            );
            return invalid("stop", reason);
        }
        if !self.has_text && !generation.stop.is_empty() {
            return invalid("stop", "there is no tokenizer to make text with".into());
        }
        if let Some(grammar) = &request.grammar
            && grammar.vocab_size() != self.vocab_size
        {
            let (found, expected) = (grammar.vocab_size(), self.vocab_size);
            let reason = format!("compiled for {found} tokens, the model has {expected}");
            return invalid("grammar", reason);
        }
        let known = |&token: &TokenId| (token as usize) < self.vocab_size;
        let unknown = |token: TokenId| {
            format!(
                "token {token} is outside the vocabulary of {}",
                self.vocab_size
            )
        };
        if let Some(&token) = request.prompt.iter().find(|t| !known(t)) {
            return invalid("prompt", unknown(token));
        }
        let sampling = &generation.sampling;
        let mut biased = sampling.logit_bias.iter().map(|(token, _)| token);
        let mut banned = sampling.bad_words.iter().flatten();
        let mut allowed = sampling.allowed_tokens.iter().flat_map(|tokens| &**tokens);
        let lists: [(_, &mut dyn Iterator<Item = &TokenId>); 3] = [
            ("logit bias", &mut biased),
            ("bad words", &mut banned),
            ("allowed tokens", &mut allowed),
        ];
        for (field, mut tokens) in lists {
            if let Some(&token) = Iterator::find(&mut tokens, |t| !known(t)) {
                return invalid(field, unknown(token));
            }
        }
        let most = self.vocab_size;
        let allowed = sampling.allowed_tokens.as_ref();
        if let Some(found) = allowed.map(|t| t.len()).filter(|&found| found > most) {
            let reason = format!("found {found}, the vocabulary has {most}");
            return invalid("allowed tokens", reason);
        }
        match generation.sampling.validate() {
            Ok(()) => Ok(()),
            Err(ferrum_types::Error::InvalidArgument { op, reason }) => invalid(op, reason),
            Err(other) => invalid("sampling", other.to_string()),
        }
    }

    /// Checks the number of log-probabilities against [`MAX_LOGPROB_ENTRIES`].
    fn check_logprobs(&self, request: &Request) -> Result<(), EngineError> {
        let entries = |top: Option<usize>, positions: usize| {
            top.map_or(0, |top| positions.saturating_mul(top + 1))
        };
        let generated = request.n.saturating_mul(self.max_tokens(request));
        let prompt = entries(request.prompt_logprobs, request.prompt.len());
        let found = prompt.saturating_add(entries(request.logprobs, generated));
        if found <= MAX_LOGPROB_ENTRIES {
            return Ok(());
        }
        let reason = format!(
            "up to {found} log-probabilities, expected at most {MAX_LOGPROB_ENTRIES}: choices times tokens \
             times alternatives and the token itself, prompts included; lower max_tokens, n or the \
             alternatives"
        );
        invalid("logprobs", reason)
    }

    /// Checks images against the prompt and the limits of a step.
    fn check_images(&self, request: &Request) -> Result<(), EngineError> {
        let mut free = 0;
        for PromptImage { start, image } in &request.images {
            let tokens = image.tokens();
            let end = start.saturating_add(tokens);
            if *start < free || tokens == 0 || end > request.prompt.len() {
                let len = request.prompt.len();
                let reason = format!(
                    "found one at tokens {start} to {end}, expected them in order, side by side, and inside of the {len} tokens of the prompt"
                );
                return invalid("images", reason);
            }
            if image.values().len() != tokens * self.hidden {
                let (found, expected) = (image.values().len(), tokens * self.hidden);
                let reason = format!("found {found} numbers, expected {expected}");
                return invalid("images", reason);
            }
            if tokens > self.image_tokens {
                let most = self.image_tokens;
                let reason = format!(
                    "an image has {tokens} tokens, a step has room for {most} beside the tokens of those who decode"
                );
                return invalid("images", reason);
            }
            free = end;
        }
        // They would cut a step where its rows of logits end.
        let rows = request.prompt_logprobs.is_some() || request.pooling.is_some();
        match rows && !request.images.is_empty() {
            true => invalid(
                "images",
                "a prompt with images has neither log-probabilities nor an embedding".into(),
            ),
            false => Ok(()),
        }
    }

    /// Most tokens that a choice can have.
    pub(super) fn max_tokens(&self, request: &Request) -> usize {
        let room = self.capacity.saturating_sub(request.prompt.len());
        request.generation.max_tokens.min(room)
    }

    /// Most events that a request can have, so that its channel is never full. The channel allocates memory for
    /// queued events only.
    pub(super) fn max_events(&self, request: &Request) -> usize {
        let tokens = self.max_tokens(request) + 1;
        let events = request.n.saturating_mul(tokens);
        let events = events.saturating_add(request.prompt.len() + 2);
        events.min(tokio::sync::Semaphore::MAX_PERMITS)
    }
}

fn invalid(field: &'static str, reason: String) -> Result<(), EngineError> {
    Err(EngineError::Invalid { field, reason })
}
