//! The fields that say how an answer is generated: OpenAI's, and those that vLLM and llama.cpp added.
//! They are the same on every route that generates.

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::fields::{self, Fields};
use crate::model::Model;
use crate::models::{Lease, Named};
use crate::structured::{self, Structured};
use ferrum_engine::engine::{MAX_STOP_BYTES, MAX_STOP_TOKENS, MAX_STOPS};
use ferrum_engine::grammar::Constraint;
use ferrum_engine::sampler::MAX_LOGIT_BIAS;
use ferrum_engine::{Dry, DryBreakers, Generation, Mirostat, Request, SamplingParams, Xtc};
use ferrum_types::TokenId;
use serde_json::Value;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

type Result<T> = std::result::Result<T, ApiError>;

/// What a request says of the answers that it wants, but for the prompt.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) generation: Generation,
    pub(crate) n: usize,
    pub(crate) stream: bool,
    /// A last chunk with the usage.
    pub(crate) include_usage: bool,
    /// What the answer has to be, where a field says so.
    pub(crate) structured: Option<Structured>,
    /// The same compiled, with all that belongs to the answer beside it.
    pub(crate) grammar: Option<Constraint>,
    /// Special tokens whose text is needed.
    pub(crate) shown_tokens: Vec<TokenId>,
    pub(crate) place: Place,
}

/// What a request is to, and where it stands among others.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) model: Named,
    priority: i8,
    tenant: Option<String>,
    /// How long it has waited for its model.
    waited: Duration,
}

impl Place {
    pub(crate) fn read(fields: &mut Fields, lease: &Lease) -> Result<Self> {
        // The lease is what came of it.
        fields.text("model")?;
        let priority = i64::from(i8::MIN)..=i64::from(i8::MAX);
        Ok(Self {
            model: lease.named.clone(),
            // The range is that of the type.
            priority: fields.int("priority", priority)?.unwrap_or(0) as i8,
            tenant: fields.text("cache_salt")?,
            waited: lease.waited,
        })
    }

    /// A request to the engine.
    pub(crate) fn request(
        &self,
        prompt: Vec<TokenId>,
        generation: Generation,
        config: &ServerConfig,
    ) -> Request {
        Request {
            priority: self.priority,
            tenant: self.tenant.clone(),
            adapter: self.model.adapter,
            timeout: Some(config.request_timeout.saturating_sub(self.waited)),
            ..Request::new(prompt, generation)
        }
    }
}

impl Wanted {
    /// Takes the fields that OpenAI's older routes have, `max_tokens` apart.
    pub(crate) fn read(fields: &mut Fields, lease: &Lease, config: &ServerConfig) -> Result<Self> {
        let mut wanted = Self::one(fields, lease)?;
        wanted.n = fields.count("n", 1..=config.max_choices)?.unwrap_or(1);
        wanted.include_usage = stream_options(fields, wanted.stream)?;
        wanted.generation.stop = stop(fields)?;
        ignored(fields)?;
        fields.harmless("store", is_false, "false")?;
        wanted.structured = structured::read(fields)?;
        Ok(wanted)
    }

    /// Takes the fields that all routes have, for one answer.
    pub(crate) fn one(fields: &mut Fields, lease: &Lease) -> Result<Self> {
        let place = Place::read(fields, lease)?;
        let generation = Generation {
            sampling: sampling(fields, lease)?,
            max_tokens: 0,
            stop: Vec::new(),
            stop_tokens: stop_tokens(fields, lease)?,
            ..Generation::default()
        };
        Ok(Self {
            generation,
            n: 1,
            stream: fields.boolean("stream")?.unwrap_or(false),
            include_usage: false,
            structured: None,
            grammar: None,
            shown_tokens: Vec::new(),
            place,
        })
    }

    /// The request to the engine for one prompt.
    pub(crate) fn request(&self, prompt: Vec<TokenId>, config: &ServerConfig) -> Request {
        let generation = self.generation.clone();
        Request {
            n: self.n,
            draft_tokens: config.lookup_tokens,
            grammar: self.grammar.clone(),
            shown_tokens: self.shown_tokens.clone(),
            ..self.place.request(prompt, generation, config)
        }
    }
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<bool> {
    let Some(options) = fields.take("stream_options") else {
        return Ok(false);
    };
    if !stream {
        let reason = "only for requests with \"stream\": true";
        return Err(ApiError::invalid("stream_options", reason));
    }
    let mut options = Fields::of(options, "stream_options")?;
    let include = options.boolean("include_usage")?.unwrap_or(false);
    options.harmless("include_obfuscation", is_false, "false")?;
    options.harmless("continuous_usage_stats", is_false, "false")?;
    options.finish()?;
    Ok(include)
}

/// Fields that name who asks and why, which change no answer; and those that do, where they ask for
/// what happens anyway.
pub(crate) fn ignored(fields: &mut Fields) -> Result<()> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.text(name)?;
    }
    fields.object("metadata")?;
    let tier = |v: &Value| v == "auto" || v == "default";
    fields.harmless("service_tier", tier, "\"auto\"")?;
    fields.harmless("skip_special_tokens", |v| v == true, "true")?;
    fields.harmless("spaces_between_special_tokens", |v| v == true, "true")?;
    fields.harmless("include_stop_str_in_output", is_false, "false")?;
    fields.harmless("use_beam_search", is_false, "false")?;
    fields.harmless("min_tokens", |v| v == 0, "0")
}

pub(crate) fn is_false(value: &Value) -> bool {
    value == false
}

/// Most tokens of an answer, under whichever of `names` it is given.
pub(crate) fn max_tokens(
    fields: &mut Fields,
    names: &[&str],
    low: usize,
    config: &ServerConfig,
) -> Result<Option<usize>> {
    let mut found: Option<usize> = None;
    for name in names {
        let Some(most) = fields.count(name, low..=config.max_tokens)? else {
            continue;
        };
        if found.is_some_and(|before| before != most) {
            let reason = format!("it contradicts {}", names[0]);
            return Err(ApiError::invalid(*name, reason));
        }
        found = Some(most);
    }
    Ok(found)
}

fn stop(fields: &mut Fields) -> Result<Vec<String>> {
    let values = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(values)) => values,
        Some(value) => vec![value],
    };
    stop_strings("stop", values)
}

/// The strings at which an answer ends, given in the field `name`.
pub(crate) fn stop_strings(name: &str, values: Vec<Value>) -> Result<Vec<String>> {
    if values.len() > MAX_STOPS {
        let reason = format!(
            "found {} strings, expected at most {MAX_STOPS}",
            values.len()
        );
        return Err(ApiError::invalid(name, reason));
    }
    let text = |value: Value| match value {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::invalid(name, "found an empty string"))
        }
        Value::String(text) if text.len() > MAX_STOP_BYTES => {
            let reason = format!(
                "found {} bytes, expected at most {MAX_STOP_BYTES}",
                text.len()
            );
            Err(ApiError::invalid(name, reason))
        }
        Value::String(text) => Ok(text),
        other => Err(fields::wrong(
            name,
            &other,
            "a string or an array of strings",
        )),
    };
    values.into_iter().map(text).collect()
}

fn stop_tokens(fields: &mut Fields, model: &Model) -> Result<Vec<TokenId>> {
    let ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
    let mut tokens = match ignore_eos {
        true => Vec::new(),
        false => model.served.stop_tokens.clone(),
    };
    if let Some(more) = fields.list("stop_token_ids", MAX_STOP_TOKENS / 2)? {
        for value in &more {
            tokens.push(token(model, "stop_token_ids", value)?);
        }
    }
    Ok(tokens)
}

/// A token id, held against the vocabulary.
pub(crate) fn token(model: &Model, param: &str, value: &Value) -> Result<TokenId> {
    let size = model.served.vocab_size;
    let last = i64::try_from(size).unwrap_or(i64::MAX) - 1;
    let id = fields::int(param, value, 0..=last)?;
    TokenId::try_from(id).map_err(|_| fields::wrong(param, value, "a token id"))
}

fn sampling(fields: &mut Fields, model: &Model) -> Result<SamplingParams> {
    let default = &model.served.sampling;
    const SHARE: std::ops::RangeInclusive<f32> = 0.0..=1.0;
    const POSITIVE: std::ops::RangeInclusive<f32> = f32::MIN_POSITIVE..=f32::MAX;
    let top_k = fields.int("top_k", -1..=i64::from(i32::MAX))?;
    let repeat = fields.number("repetition_penalty", POSITIVE)?;
    let last_n = fields.int("repeat_last_n", -1..=i64::from(i32::MAX))?;
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", 0.0..=2.0)?
            .unwrap_or(default.temperature),
        // -1 and 0 both mean all.
        top_k: top_k.map_or(default.top_k, |k| usize::try_from(k).unwrap_or(0)),
        top_p: fields
            .number("top_p", f32::MIN_POSITIVE..=1.0)?
            .unwrap_or(default.top_p),
        min_p: fields.number("min_p", SHARE)?.unwrap_or(default.min_p),
        typical_p: fields
            .number("typical_p", SHARE)?
            .unwrap_or(default.typical_p),
        repeat_penalty: repeat.unwrap_or(default.repeat_penalty),
        // vLLM's penalty looks at everything, a model's own too; llama.cpp's field limits it.
        repeat_last_n: match last_n {
            Some(n) => usize::try_from(n).unwrap_or(usize::MAX),
            None => default.repeat_last_n,
        },
        presence_penalty: fields
            .number("presence_penalty", -2.0..=2.0)?
            .unwrap_or(default.presence_penalty),
        frequency_penalty: fields
            .number("frequency_penalty", -2.0..=2.0)?
            .unwrap_or(default.frequency_penalty),
        dry: dry(fields, model)?,
        xtc: Xtc {
            probability: fields
                .number("xtc_probability", SHARE)?
                .unwrap_or(default.xtc.probability),
            threshold: fields
                .number("xtc_threshold", SHARE)?
                .unwrap_or(default.xtc.threshold),
        },
        mirostat: mirostat(fields, default.mirostat)?,
        logit_bias: logit_bias(fields, model)?,
        seed: match fields.take("seed") {
            Some(seed) => fields::int("seed", &seed, i64::MIN..=i64::MAX)? as u64,
            None => RandomState::new().hash_one("seed"),
        },
        ..SamplingParams::default()
    })
}

fn dry(fields: &mut Fields, model: &Model) -> Result<Dry> {
    let default = Dry::default();
    let multiplier = fields.number("dry_multiplier", 0.0..=f32::MAX)?;
    let base = fields.number("dry_base", 1.0..=f32::MAX)?;
    let length = fields.count("dry_allowed_length", 0..=1 << 20)?;
    let last_n = fields.int("dry_penalty_last_n", -1..=i64::from(i32::MAX))?;
    let texts = fields.list("dry_sequence_breakers", MAX_STOPS)?;
    let acts = multiplier.is_some_and(|m| m > 0.0);
    let breakers = match texts {
        Some(values) => {
            let text = |v: &Value| match v.as_str() {
                Some(text) if text.len() <= MAX_STOP_BYTES => Ok(text.to_owned()),
                _ => Err(fields::wrong("dry_sequence_breakers", v, "a short string")),
            };
            let texts = values.iter().map(text).collect::<Result<Vec<_>>>()?;
            let texts: Vec<_> = texts.iter().map(String::as_str).collect();
            match acts {
                true => DryBreakers::find(&model.served.tokenizer, &texts),
                false => DryBreakers::default(),
            }
        }
        None if acts => model.default_breakers().clone(),
        None => DryBreakers::default(),
    };
    Ok(Dry {
        multiplier: multiplier.unwrap_or(0.0),
        base: base.unwrap_or(default.base),
        allowed_length: length.unwrap_or(default.allowed_length),
        last_n: last_n.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX)),
        breakers,
    })
}

fn mirostat(fields: &mut Fields, default: Option<Mirostat>) -> Result<Option<Mirostat>> {
    let mode = fields.int("mirostat", 0..=2)?;
    let tau = fields.number("mirostat_tau", 0.0..=f32::MAX)?;
    let eta = fields.number("mirostat_eta", 0.0..=f32::MAX)?;
    let neutral = default.unwrap_or_default();
    let chosen = Mirostat {
        tau: tau.unwrap_or(neutral.tau),
        eta: eta.unwrap_or(neutral.eta),
    };
    match mode {
        None => Ok(default.map(|_| chosen)),
        Some(0) => Ok(None),
        Some(1) => Err(ApiError::unsupported(
            "mirostat",
            "found 1, expected 0 or 2",
        )),
        Some(_) => Ok(Some(chosen)),
    }
}

fn logit_bias(fields: &mut Fields, model: &Model) -> Result<Vec<(TokenId, f32)>> {
    let Some(map) = fields.object("logit_bias")? else {
        return Ok(model.served.sampling.logit_bias.clone());
    };
    if map.len() > MAX_LOGIT_BIAS {
        let found = map.len();
        let reason = format!("found {found} entries, expected at most {MAX_LOGIT_BIAS}");
        return Err(ApiError::invalid("logit_bias", reason));
    }
    let entry = |(id, bias): (&String, &Value)| {
        let param = format!("logit_bias.{id}");
        let id = id.parse::<TokenId>().ok();
        let id = id.filter(|&id| (id as usize) < model.served.vocab_size);
        let Some(id) = id else {
            let reason = format!("expected a token id below {}", model.served.vocab_size);
            return Err(ApiError::invalid(param, reason));
        };
        Ok((id, fields::number(&param, bias, -100.0..=100.0)?))
    };
    map.iter().map(entry).collect()
}
