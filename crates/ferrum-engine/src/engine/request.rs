//! What an engine is asked, and what it answers.

use super::stats::{MAX_DRAFT_TOKENS, Progress};
use super::{Command, EngineHandle, Pooling};
use crate::grammar::Constraint;
use crate::sampler::Logprobs;
use crate::vision::PromptImage;
use crate::{FinishReason, Generation};
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
/// Most alternatives of which log-probabilities are given.
pub const MAX_LOGPROBS: usize = 20;
/// Most log-probabilities that a request may be given: of all choices and the prompt, with alternatives. Whoever
/// takes them may have to keep them all.
pub const MAX_LOGPROB_ENTRIES: usize = 1 << 22;

/// A prompt, and what is wanted of it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens, at least one.
    pub prompt: Vec<TokenId>,
    /// Images in it, in order. Choices about them are made like those about any prompt, but its tokens have no
    /// log-probabilities.
    pub images: Vec<PromptImage>,
    /// How to choose tokens and when to stop.
    pub generation: Generation,
    /// How many answers; each has a random sequence of its own.
    pub n: usize,
    /// Log-probabilities of each generated token and of this many alternatives.
    pub logprobs: Option<usize>,
    /// Log-probabilities of each prompt token but the first, and of this many alternatives.
    pub prompt_logprobs: Option<usize>,
    /// Most tokens to draft at a time from what the text already says (prompt lookup); 0: none. The
    /// answer is the same; it comes in fewer, larger steps. The runner needs more rows of logits than
    /// sequences for it.
    pub draft_tokens: usize,
    /// What each answer has to be. It ends when it is that and nothing can follow, and it may end
    /// wherever it is that; `max_tokens` or the context may end it before.
    pub grammar: Option<Constraint>,
    /// Special tokens whose text is a part of the answer's; those of others is left out.
    pub shown_tokens: Vec<TokenId>,
    /// Whether an answer goes on with the prompt's text, so that a space at its beginning is meant: decoders of
    /// SentencePiece take it off where a text begins.
    pub goes_on: bool,
    /// Instead of an answer, one vector for the prompt: [`Event::Embedding`]. The fields about answers
    /// mean nothing then, and there is one choice.
    pub pooling: Option<Pooling>,
    /// Higher goes first, by [`EngineConfig::head_start`](super::EngineConfig::head_start) steps a level.
    pub priority: i8,
    /// After this time it ends, wherever it is.
    pub timeout: Option<Duration>,
    /// Requests of different tenants share nothing in the prefix cache.
    pub tenant: Option<String>,
    /// A LoRA adapter that [`EngineHandle::load_adapter`] loaded.
    pub adapter: Option<AdapterId>,
}

impl Request {
    /// One answer to `prompt`.
    pub fn new(prompt: Vec<TokenId>, generation: Generation) -> Self {
        Self {
            prompt,
            images: Vec::new(),
            generation,
            n: 1,
            logprobs: None,
            prompt_logprobs: None,
            draft_tokens: 0,
            grammar: None,
            shown_tokens: Vec::new(),
            goes_on: false,
            pooling: None,
            priority: 0,
            timeout: None,
            tenant: None,
            adapter: None,
        }
    }
}

/// Names a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

/// Why a request is not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A part of the request is not acceptable.
    #[error("{field}: {reason}")]
    Invalid {
        /// Which part.
        field: &'static str,
        /// What was found and what was expected.
        reason: String,
    },
    /// The prompt does not fit, or leaves no room for an answer.
    #[error("the prompt has {requested} tokens, the context holds {capacity}")]
    ContextOverflow {
        /// Tokens of the prompt.
        requested: usize,
        /// Tokens that fit.
        capacity: usize,
    },
    /// Too many wait already.
    #[error("the engine is overloaded: {waiting} of {limit} places in the queue are taken")]
    Overloaded {
        /// Sequences that wait.
        waiting: usize,
        /// Most that may.
        limit: usize,
    },
    /// The engine ends and takes nothing more.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The engine has failed.
    #[error("the engine has failed: {0}")]
    Failed(String),
    /// The model computed no numbers for this request; others are not affected.
    #[error("the model failed on this request: it computed no numbers (NaN)")]
    NotANumber,
}

/// What ended an answer early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopMatch {
    /// One of the stop strings.
    Text(String),
    /// One of the stop tokens.
    Token(TokenId),
}

/// Tokens that a request took.
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

/// What happens to a request. The last is `Done` or `Failed`, and there is exactly one of them.
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
        /// Text that is certain now: whole characters that begin no stop string. May be empty.
        text: String,
        /// If they were asked for.
        logprobs: Option<Logprobs>,
    },
    /// A choice has ended.
    Finished {
        /// Which choice, from 0.
        choice: usize,
        /// Text that was held back.
        text: String,
        /// Why.
        reason: FinishReason,
        /// What was met, for [`FinishReason::Stop`].
        stop: Option<StopMatch>,
        /// Those of the stop token that was met, if they were asked for.
        logprobs: Option<Logprobs>,
    },
    /// All choices have ended.
    Done(Usage),
    /// The request could not be answered, or not to its end.
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

    /// How far it has come, also for those who look on without the stream.
    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// The request's name.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Waits for the next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The next event as a poll, for whoever implements a `Stream`.
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

    /// Passes an event on, and makes one up where the engine ended without a word.
    fn take(&mut self, event: Option<Event>) -> Event {
        let event = event.unwrap_or_else(|| Event::Failed(self.engine.ending()));
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

/// A request on its way to the engine's thread.
pub(super) struct Submission {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) came: Duration,
    pub(super) deadline: Option<Duration>,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) progress: Arc<Progress>,
}

/// What a request is held against before anything is kept for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) vocab_size: usize,
    /// Most tokens of a sequence.
    pub(super) capacity: usize,
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
        // An answer has at least one token, and prompt and answer have the context together.
        let answers = request.pooling.is_none() && generation.max_tokens > 0;
        if request.prompt.len() + usize::from(answers) > self.capacity {
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
            ("shown tokens", request.shown_tokens.len(), MAX_STOP_TOKENS),
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

    /// Holds what may have to be gathered against its bound.
    fn check_logprobs(&self, request: &Request) -> Result<(), EngineError> {
        let entries = |wanted: Option<usize>, positions: usize| {
            wanted.map_or(0, |top| positions.saturating_mul(top + 1))
        };
        let answers = request.n.saturating_mul(self.most_tokens(request));
        let prompt = entries(request.prompt_logprobs, request.prompt.len());
        let found = prompt.saturating_add(entries(request.logprobs, answers));
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

    /// Holds images against the prompt, and against what a step can have of them.
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

    /// Most tokens that an answer can have.
    pub(super) fn most_tokens(&self, request: &Request) -> usize {
        let room = self.capacity.saturating_sub(request.prompt.len());
        request.generation.max_tokens.min(room)
    }

    /// Most events that a request can have, so that its channel is never full: memory is taken for
    /// those that are there and not for those that may be.
    pub(super) fn most_events(&self, request: &Request) -> usize {
        let tokens = self.most_tokens(request) + 1;
        let events = request.n.saturating_mul(tokens);
        let events = events.saturating_add(request.prompt.len() + 2);
        events.min(tokio::sync::Semaphore::MAX_PERMITS)
    }
}

fn invalid(field: &'static str, reason: String) -> Result<(), EngineError> {
    Err(EngineError::Invalid { field, reason })
}
