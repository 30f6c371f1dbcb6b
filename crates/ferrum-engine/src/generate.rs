//! Prompt in, text out, for one sequence.

use crate::image_embeddings::PromptImage;
use crate::sampler::NoToken;
use crate::{Sampler, SamplingParams, Session, StopMatcher};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_types::{Error, Result, TokenId};
use std::time::{Duration, Instant};

/// Parameters of the generation of one text.
#[derive(Clone, Debug, Default)]
pub struct GenerationParams {
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens to generate; fewer when the context ends before.
    pub max_tokens: usize,
    /// Strings that end the text and are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the text and are not part of it.
    pub stop_tokens: Vec<TokenId>,
    /// Tokens before which nothing ends the text: no stop token is chosen, and a stop string counts only if a
    /// later token completes it. At most `max_tokens`. A grammar that lets nothing follow, cancelling and deadlines still end it.
    pub min_tokens: usize,
    /// Whether the stop string that was met stays at the end of the text. The text of a stop token does not.
    pub include_stop: bool,
    /// Whether the text of special tokens is a part of the text, instead of left out.
    pub show_special_tokens: bool,
}

impl GenerationParams {
    /// Says when the text is at a stop string.
    pub(crate) fn stop_matcher(&self) -> StopMatcher {
        StopMatcher::new(&self.stop).including_stop(self.include_stop)
    }

    /// Chooses tokens after a prompt of `prompt_len`; see [`Sampler::new`].
    ///
    /// # Errors
    /// Those of [`Sampler::new`].
    pub(crate) fn sampler(&self, prompt_len: usize, choice: u64) -> Result<Sampler> {
        let sampler = Sampler::new(self.sampling.clone(), prompt_len, choice)?;
        Ok(sampler.with_min_tokens(self.min_tokens, &self.stop_tokens))
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    /// The receiver of the text said so.
    Cancelled,
    /// Its time was over.
    Deadline,
}

/// What a generation took.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were computed, not found in the cache.
    pub computed_tokens: usize,
    /// Time to the first token's logits.
    pub prefill: Duration,
    /// Tokens generated, a stop token not among them.
    pub tokens: Vec<TokenId>,
    /// Decode steps, the number that `decode` is the time of.
    pub decode_steps: usize,
    /// Time of all decode steps.
    pub decode: Duration,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Generates after `prompt`. `on_text` gets the text as it comes, never half a character, and says
/// whether to go on.
///
/// # Errors
/// Those of [`Session::prefill`], of sampling parameters out of range and of the device.
pub fn generate(
    session: &mut Session,
    tokenizer: &Tokenizer,
    prompt: &[TokenId],
    wanted: &GenerationParams,
    on_text: &mut dyn FnMut(&str) -> bool,
) -> Result<GenerationStats> {
    generate_with_images(session, tokenizer, (prompt, &[]), wanted, on_text)
}

/// The same after a prompt with images in it.
///
/// # Errors
/// Those of [`generate`]; `InvalidArgument` for images that a step has no room for.
pub fn generate_with_images(
    session: &mut Session,
    tokenizer: &Tokenizer,
    (prompt, images): (&[TokenId], &[PromptImage]),
    wanted: &GenerationParams,
    on_text: &mut dyn FnMut(&str) -> bool,
) -> Result<GenerationStats> {
    let mut sampler = wanted.sampler(prompt.len(), 0)?;
    let mut stops = wanted.stop_matcher();
    let mut text = tokenizer.decode_stream(!wanted.show_special_tokens);
    let start = Instant::now();
    let wanted_row = session.readback(&mut sampler, prompt);
    let computed_tokens = session.prefill_with_images((prompt, images), wanted_row)?;
    let mut history = prompt.to_vec();
    let mut next = choose(session, &mut sampler, &history)?;
    let prefill = start.elapsed();
    let decode_start = Instant::now();
    let mut decode_steps = 0;
    let finish = loop {
        let generated = history.len() - prompt.len();
        if generated >= wanted.max_tokens {
            break FinishReason::Length;
        }
        if wanted.stop_tokens.contains(&next) {
            break FinishReason::Stop;
        }
        history.push(next);
        let piece = text.push(next);
        let piece = match generated < wanted.min_tokens {
            true => stops.push_unstopped(&piece),
            false => stops.push(&piece),
        };
        if !piece.is_empty() && !on_text(&piece) {
            break FinishReason::Cancelled;
        }
        if stops.stopped() {
            break FinishReason::Stop;
        }
        if generated + 1 >= wanted.max_tokens || session.len() >= session.capacity() {
            break FinishReason::Length;
        }
        let wanted_row = session.readback(&mut sampler, &history);
        session.decode(next, wanted_row)?;
        decode_steps += 1;
        next = choose(session, &mut sampler, &history)?;
    };
    let decode = decode_start.elapsed();
    if finish != FinishReason::Cancelled && !stops.stopped() {
        let rest = stops.push(&text.finish()) + &stops.finish();
        if !rest.is_empty() {
            on_text(&rest);
        }
    }
    let tokens = history.split_off(prompt.len());
    Ok(GenerationStats {
        prompt_tokens: prompt.len(),
        computed_tokens,
        prefill,
        tokens,
        decode_steps,
        decode,
        finish,
    })
}

fn choose(session: &mut Session, sampler: &mut Sampler, history: &[TokenId]) -> Result<TokenId> {
    let chosen = match session.logits() {
        // The device was to choose.
        [] => session.chosen(),
        logits => sampler.sample(logits, history),
    };
    chosen.map_err(|why| match why {
        NoToken::NotANumber => Error::Device {
            backend: session.backend(),
            op: "sampling",
            reason: why.to_string(),
        },
        NoToken::Forbidden => Error::invalid("sampling", why.to_string()),
    })
}
