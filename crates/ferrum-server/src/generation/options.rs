//! The fields that say how an answer is generated: OpenAI's, and those that vLLM and llama.cpp added.
//! They are the same on every route that generates.

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::generation::request_context::RequestContext;
use crate::generation::structured::{self, Structured};
use crate::generation::truncation::Truncation;
use crate::generation::usage::UsageChunks;
use crate::models::Lease;
use crate::models::model::Model;
use crate::request::{BiasedToken, Body, Choices, Int, Sampling, StructuredOutputFields};
use ferrum_engine::engine::{MAX_STOP_BYTES, MAX_STOPS};
use ferrum_engine::grammar::Constraint;
use ferrum_engine::{Dry, DryBreakers, GenerationParams, Mirostat, Request, SamplingParams, Xtc};
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::Arc;

type Result<T> = std::result::Result<T, ApiError>;

/// The options of a request that are not its prompt.
#[derive(Debug)]
pub(crate) struct GenerationOptions {
    pub(crate) generation: GenerationParams,
    pub(crate) n: usize,
    pub(crate) stream: bool,
    pub(crate) usage: UsageChunks,
    /// What the answer has to be, where a field says so.
    pub(crate) structured: Option<Structured>,
    /// The same compiled, with all that belongs to the answer beside it.
    pub(crate) grammar: Option<Constraint>,
    /// Whether the request names a seed. Else each prompt gets a random sequence of its own.
    seeded: bool,
    /// How many alternatives there are to each token of the prompt, where they are wanted.
    pub(crate) prompt_logprobs: Option<usize>,
    /// Which tokens of a prompt count.
    pub(crate) truncation: Truncation,
    /// Whether the model's own last tokens end no answer.
    ignores_eos: bool,
    /// Special tokens whose text the engine includes in its output.
    pub(crate) visible_special_tokens: Vec<TokenId>,
    /// Whether answers continue the text of their prompt, as a prefilled message does.
    pub(crate) continues_prompt: bool,
    pub(crate) context: RequestContext,
}

impl GenerationOptions {
    /// Reads the fields that OpenAI's older routes have, `max_tokens` apart.
    pub(crate) fn read(body: &mut Body, lease: &Lease, config: &ServerConfig) -> Result<Self> {
        let mut options = Self::read_common(body, lease)?;
        let choices: Choices = body.part()?;
        options.n = match choices.n {
            Some(n) => check_range("n", n.0, 1..=config.max_choices)?,
            None => 1,
        };
        options.usage = UsageChunks::of(choices.stream_options.as_ref(), options.stream)?;
        options.prompt_logprobs = choices.prompt_logprobs.and_then(Int::count);
        if options.prompt_logprobs.is_some() && options.stream {
            let reason = "only for requests without \"stream\": true";
            return Err(ApiError::unsupported("prompt_logprobs", reason));
        }
        options.generation.stop = stop_strings("stop", choices.stop.unwrap_or_default().0)?;
        options.structured = structured::read(body.part::<StructuredOutputFields>()?, lease)?;
        Ok(options)
    }

    /// Reads the fields that all routes have, for one answer.
    pub(crate) fn read_common(body: &mut Body, lease: &Lease) -> Result<Self> {
        let context = RequestContext::read(body, lease)?;
        let fields: Sampling = body.part()?;
        supported(&fields)?;
        let generation = GenerationParams {
            stop_tokens: stop_tokens(&fields, lease)?,
            sampling: sampling(&fields, lease)?,
            max_tokens: 0,
            stop: Vec::new(),
            min_tokens: fields.min_tokens.and_then(Int::count).unwrap_or(0),
            include_stop: fields.include_stop_str_in_output.unwrap_or(false),
            show_special_tokens: fields.skip_special_tokens == Some(false),
        };
        Ok(Self {
            generation,
            n: 1,
            stream: fields.stream.unwrap_or(false),
            usage: UsageChunks::default(),
            structured: None,
            grammar: None,
            // -1 asks for any, as llama.cpp's clients do.
            seeded: fields.seed.is_some_and(|seed| seed.0 != -1),
            ignores_eos: fields.ignore_eos.unwrap_or(false),
            prompt_logprobs: None,
            truncation: Truncation::of(fields.truncate_prompt_tokens)?,
            visible_special_tokens: Vec::new(),
            continues_prompt: false,
            context,
        })
    }

    /// Fewest tokens of an answer, which there has to be room for.
    pub(crate) fn min_output_tokens(&self) -> usize {
        self.generation
            .min_tokens
            .max(1)
            .min(self.generation.max_tokens)
    }

    /// Further tokens that end an answer as the model's own do.
    pub(crate) fn add_stop_tokens(&mut self, tokens: &[TokenId]) {
        if !self.ignores_eos {
            let ends = &mut self.generation.stop_tokens;
            ends.extend_from_slice(tokens);
        }
    }

    /// The request's own seed, if it has one.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.seeded.then_some(self.generation.sampling.seed)
    }

    /// Whether the model's own last tokens end no answer.
    pub(crate) fn ignores_eos(&self) -> bool {
        self.ignores_eos
    }

    /// The request to the engine for one prompt.
    pub(crate) fn request(&self, prompt: Vec<TokenId>, config: &ServerConfig) -> Request {
        let mut generation = self.generation.clone();
        if !self.seeded {
            generation.sampling.seed = fresh_seed();
        }
        Request {
            n: self.n,
            prompt_logprobs: self.prompt_logprobs,
            draft_tokens: config.lookup_tokens,
            grammar: self.grammar.clone(),
            visible_special_tokens: self.visible_special_tokens.clone(),
            continues_prompt: self.continues_prompt,
            ..self.context.request(prompt, generation, config)
        }
    }
}

/// What this engine does not do.
fn supported(fields: &Sampling) -> Result<()> {
    match fields.use_beam_search {
        Some(true) => {
            let reason = "not supported; expected false or no such field";
            Err(ApiError::unsupported("use_beam_search", reason))
        }
        _ => Ok(()),
    }
}

/// A count that a server bounds.
pub(crate) fn check_range(param: &str, found: i64, range: RangeInclusive<usize>) -> Result<usize> {
    let count = usize::try_from(found).ok();
    count.filter(|count| range.contains(count)).ok_or_else(|| {
        let (low, high) = (range.start(), range.end());
        let reason = format!("found {found}, expected an integer from {low} to {high}");
        ApiError::invalid(param, reason)
    })
}

/// Most tokens of an answer, under whichever of its names it is given; `None` where none is, or -1 says that
/// there is no bound.
pub(crate) fn max_tokens<const LOW: i64, const HIGH: i64>(
    names: &[(&str, Option<Int<LOW, HIGH>>)],
    low: usize,
    config: &ServerConfig,
) -> Result<Option<usize>> {
    let mut found: Option<(&str, usize)> = None;
    for (name, most) in names {
        let Some(most) = most.filter(|most| most.0 != -1) else {
            continue;
        };
        let most = check_range(name, most.0, low..=config.max_tokens)?;
        if let Some((before, _)) = found.filter(|(_, before)| *before != most) {
            return Err(ApiError::invalid(*name, format!("it contradicts {before}")));
        }
        found = Some((name, most));
    }
    Ok(found.map(|(_, most)| most))
}

/// The strings at which an answer ends, given in the field `name`; an empty one is none.
pub(crate) fn stop_strings(name: &str, mut values: Vec<String>) -> Result<Vec<String>> {
    values.retain(|text| !text.is_empty());
    if values.len() > MAX_STOPS {
        let found = values.len();
        let reason = format!("found {found} strings, expected at most {MAX_STOPS}");
        return Err(ApiError::invalid(name, reason));
    }
    for text in &values {
        if text.len() > MAX_STOP_BYTES {
            let found = text.len();
            let reason = format!("found {found} bytes, expected at most {MAX_STOP_BYTES}");
            return Err(ApiError::invalid(name, reason));
        }
    }
    Ok(values)
}

fn stop_tokens(fields: &Sampling, model: &Model) -> Result<Vec<TokenId>> {
    let mut tokens = match fields.ignore_eos.unwrap_or(false) {
        true => Vec::new(),
        false => model.served.stop_tokens.clone(),
    };
    for id in fields.stop_token_ids.iter().flat_map(|list| &list.0) {
        tokens.push(token(model, "stop_token_ids", id.0)?);
    }
    Ok(tokens)
}

/// A token id, checked against the vocabulary.
pub(crate) fn token(model: &Model, param: &str, id: i64) -> Result<TokenId> {
    let last = model.served.vocab_size.saturating_sub(1);
    let id = check_range(param, id, 0..=last)?;
    TokenId::try_from(id).map_err(|_| ApiError::invalid(param, "expected a token id"))
}

fn sampling(fields: &Sampling, model: &Model) -> Result<SamplingParams> {
    let default = &model.served.sampling;
    let number = |value: Option<f32>, default: f32| value.unwrap_or(default);
    let last_n = fields.repeat_last_n;
    Ok(SamplingParams {
        temperature: number(fields.temperature.map(|x| x.0), default.temperature),
        // -1 and 0 both mean all.
        top_k: fields
            .top_k
            .map_or(default.top_k, |k| k.count().unwrap_or(0)),
        top_p: number(fields.top_p.map(|x| x.0), default.top_p),
        min_p: number(fields.min_p.map(|x| x.0), default.min_p),
        typical_p: number(fields.typical_p.map(|x| x.0), default.typical_p),
        repeat_penalty: number(
            fields.repetition_penalty.map(|x| x.0),
            default.repeat_penalty,
        ),
        // vLLM's penalty looks at everything, a model's own too; llama.cpp's field limits it.
        repeat_last_n: match last_n {
            Some(n) => n.count().unwrap_or(usize::MAX),
            None => default.repeat_last_n,
        },
        presence_penalty: number(
            fields.presence_penalty.map(|x| x.0),
            default.presence_penalty,
        ),
        frequency_penalty: number(
            fields.frequency_penalty.map(|x| x.0),
            default.frequency_penalty,
        ),
        dry: dry(fields, model)?,
        xtc: Xtc {
            probability: number(fields.xtc_probability.map(|x| x.0), default.xtc.probability),
            threshold: number(fields.xtc_threshold.map(|x| x.0), default.xtc.threshold),
        },
        mirostat: mirostat(fields, default.mirostat)?,
        logit_bias: logit_bias(fields, model)?,
        seed: fields.seed.map_or(0, |seed| seed.0 as u64),
        bad_words: bad_words(fields, model)?,
        allowed_tokens: allowed_tokens(fields, model)?,
    })
}

/// A random seed.
fn fresh_seed() -> u64 {
    RandomState::new().hash_one("seed")
}

fn bad_words(fields: &Sampling, model: &Model) -> Result<Vec<Vec<TokenId>>> {
    let words = fields.bad_words.iter().flat_map(|list| &list.0);
    let words: Vec<_> = words.map(String::as_str).collect();
    if words.iter().any(|word| word.len() > MAX_STOP_BYTES) {
        let reason = format!("expected at most {MAX_STOP_BYTES} bytes");
        return Err(ApiError::invalid("bad_words", reason));
    }
    let tokens = SamplingParams::bad_word_tokens(&model.served.tokenizer, &words);
    tokens.map_err(|e| ApiError::invalid("bad_words", e.to_string()))
}

fn allowed_tokens(fields: &Sampling, model: &Model) -> Result<Option<Arc<[TokenId]>>> {
    let Some(ids) = &fields.allowed_token_ids else {
        return Ok(None);
    };
    let ids = ids.0.iter();
    let ids = ids.map(|id| token(model, "allowed_token_ids", id.0));
    let ids = ids.collect::<Result<Vec<_>>>()?;
    match ids.is_empty() {
        true => Err(ApiError::invalid("allowed_token_ids", "found no token")),
        false => Ok(Some(ids.into())),
    }
}

fn dry(fields: &Sampling, model: &Model) -> Result<Dry> {
    let default = Dry::default();
    let multiplier = fields.dry_multiplier.map_or(0.0, |x| x.0);
    let acts = multiplier > 0.0;
    let breakers = match &fields.dry_sequence_breakers {
        Some(texts) => {
            if texts.0.iter().any(|text| text.len() > MAX_STOP_BYTES) {
                let reason = format!("expected at most {MAX_STOP_BYTES} bytes");
                return Err(ApiError::invalid("dry_sequence_breakers", reason));
            }
            let texts: Vec<_> = texts.0.iter().map(String::as_str).collect();
            match acts {
                true => DryBreakers::find(&model.served.tokenizer, &texts),
                false => DryBreakers::default(),
            }
        }
        None if acts => model.default_breakers().clone(),
        None => DryBreakers::default(),
    };
    Ok(Dry {
        multiplier,
        base: fields.dry_base.map_or(default.base, |x| x.0),
        allowed_length: fields
            .dry_allowed_length
            .and_then(Int::count)
            .unwrap_or(default.allowed_length),
        last_n: fields
            .dry_penalty_last_n
            .map_or(usize::MAX, |n| n.count().unwrap_or(usize::MAX)),
        breakers,
    })
}

fn mirostat(fields: &Sampling, default: Option<Mirostat>) -> Result<Option<Mirostat>> {
    let neutral = default.unwrap_or_default();
    let chosen = Mirostat {
        tau: fields.mirostat_tau.map_or(neutral.tau, |x| x.0),
        eta: fields.mirostat_eta.map_or(neutral.eta, |x| x.0),
    };
    match fields.mirostat {
        None => Ok(default.map(|_| chosen)),
        Some(Int(0)) => Ok(None),
        Some(Int(1)) => Err(ApiError::unsupported(
            "mirostat",
            "found 1, expected 0 or 2",
        )),
        Some(_) => Ok(Some(chosen)),
    }
}

fn logit_bias(fields: &Sampling, model: &Model) -> Result<Vec<(TokenId, f32)>> {
    let Some(biases) = &fields.logit_bias else {
        return Ok(model.served.sampling.logit_bias.clone());
    };
    let mut found = Vec::new();
    for (token, bias) in &biases.0 {
        match token {
            BiasedToken::Id(id) => found.push((biased(model, id)?, bias.0)),
            BiasedToken::Text(text) => {
                let param = format!("logit_bias.{text}");
                let tokens = model.encode(&param, text, EncodeOptions::PLAIN)?;
                found.extend(tokens.into_iter().map(|token| (token, bias.0)));
            }
        }
    }
    Ok(found)
}

/// A token of a bias by its id.
fn biased(model: &Model, id: &str) -> Result<TokenId> {
    let found = id.parse::<TokenId>().ok();
    let found = found.filter(|&id| (id as usize) < model.served.vocab_size);
    found.ok_or_else(|| {
        let reason = format!("expected a token id below {}", model.served.vocab_size);
        ApiError::invalid(format!("logit_bias.{id}"), reason)
    })
}
