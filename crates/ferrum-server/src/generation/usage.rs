//! Usage chunks of streams: `stream_options` and the tokens of a request so far.

use crate::error::ApiError;
use crate::generation::generation_stream::TextChunk;
use crate::request::StreamOptions;
use crate::response::Usage;

/// When a stream says how many tokens the request took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UsageChunks {
    /// In a last chunk.
    pub(crate) last: bool,
    /// In each chunk, those so far.
    pub(crate) each: bool,
}

/// Tokens of a request so far, for streams that tell them in each chunk.
#[derive(Debug)]
pub(crate) struct UsageSoFar {
    chunks: UsageChunks,
    /// Answers to each prompt.
    n: usize,
    prompts: Vec<usize>,
    answers: Vec<usize>,
}

impl UsageSoFar {
    pub(crate) fn new(chunks: UsageChunks, prompts: Vec<usize>, n: usize) -> Self {
        Self {
            answers: vec![0; prompts.len() * n],
            chunks,
            n,
            prompts,
        }
    }

    /// Whether a last chunk tells them.
    pub(crate) fn last(&self) -> bool {
        self.chunks.last
    }

    /// Takes note of a piece of an answer.
    pub(crate) fn count(&mut self, piece: &TextChunk) {
        if piece.is_token() {
            self.answers[piece.index] += 1;
        }
    }

    /// What a chunk of an answer tells: nothing, or null where only the last chunk tells it.
    pub(crate) fn of_chunk(&self, index: usize) -> Option<Option<Usage>> {
        let (prompt, answer) = (self.prompts[index / self.n], self.answers[index]);
        let so_far = || Usage::so_far(prompt, answer);
        self.chunks.last.then(|| self.chunks.each.then(so_far))
    }
}

impl UsageChunks {
    pub(super) fn of(options: Option<&StreamOptions>, stream: bool) -> Result<Self, ApiError> {
        let Some(options) = options else {
            return Ok(Self::default());
        };
        only_for_streams(stream)?;
        let each = options.continuous_usage_stats.unwrap_or(false);
        Ok(Self {
            last: each || options.include_usage.unwrap_or(false),
            each,
        })
    }
}

/// `stream_options` says nothing to an answer that comes whole.
pub(crate) fn only_for_streams(stream: bool) -> Result<(), ApiError> {
    match stream {
        true => Ok(()),
        false => {
            let reason = "only for requests with \"stream\": true";
            Err(ApiError::invalid("stream_options", reason))
        }
    }
}
