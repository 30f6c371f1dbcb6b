//! The fields that say how an answer is generated: OpenAI's, and those that vLLM and llama.cpp added. They are
//! the same on every route that generates.

use super::{
    AllowedTokens, Anything, BadWords, Biases, ChoiceList, Count, Integer, Limit, MirostatMode,
    Natural, NonNegative, OneOrMore, PassageLength, Penalty, PositiveNumber, Priority, Quantity,
    Schemata, Share, StopList, StopTokens, Strings, Temperature, Window,
};
use ferrum_engine::engine::MAX_LOGPROBS;
use serde::Deserialize;
use utoipa::ToSchema;

/// Which model a request is to, and where it stands among others.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Standing {
    /// A model or an adapter; without one, the first model.
    #[serde(rename = "model")]
    _model: Option<String>,
    /// Higher goes first.
    pub(crate) priority: Option<Priority>,
    /// Requests with different salts share nothing in the prefix cache.
    pub(crate) cache_salt: Option<String>,
    // Who asks and why, which changes no answer.
    #[serde(rename = "user")]
    _user: Option<Anything>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<Anything>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<Anything>,
    // There is one cache and one kind of service, whatever is asked for.
    #[serde(rename = "prompt_cache_retention")]
    _prompt_cache_retention: Option<Anything>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Anything>,
}

/// How tokens are chosen, and at which tokens an answer ends.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Sampling {
    /// Whether the answer comes as server-sent events.
    pub(crate) stream: Option<bool>,
    /// 0 chooses the likeliest token.
    pub(crate) temperature: Option<Temperature>,
    /// Only so many of the likeliest tokens; -1 and 0 both mean all.
    pub(crate) top_k: Option<Window>,
    /// Only the likeliest tokens that have this share together, and one at least.
    pub(crate) top_p: Option<Share>,
    /// Only tokens with at least this share of the likeliest token's probability.
    pub(crate) min_p: Option<Share>,
    pub(crate) typical_p: Option<Share>,
    #[serde(alias = "repeat_penalty")]
    pub(crate) repetition_penalty: Option<PositiveNumber>,
    /// How many tokens the repetition penalty looks at; -1: all.
    #[serde(alias = "penalty_last_n")]
    pub(crate) repeat_last_n: Option<Window>,
    pub(crate) presence_penalty: Option<Penalty>,
    pub(crate) frequency_penalty: Option<Penalty>,
    pub(crate) dry_multiplier: Option<NonNegative>,
    pub(crate) dry_base: Option<OneOrMore>,
    pub(crate) dry_allowed_length: Option<PassageLength>,
    pub(crate) dry_penalty_last_n: Option<Window>,
    pub(crate) dry_sequence_breakers: Option<StopList>,
    pub(crate) xtc_probability: Option<Share>,
    pub(crate) xtc_threshold: Option<Share>,
    /// 0: off, 2: version 2.
    pub(crate) mirostat: Option<MirostatMode>,
    pub(crate) mirostat_tau: Option<NonNegative>,
    pub(crate) mirostat_eta: Option<NonNegative>,
    /// By token id, what is added to a logit.
    pub(crate) logit_bias: Option<Biases>,
    pub(crate) seed: Option<Integer>,
    /// Further tokens at which an answer ends.
    pub(crate) stop_token_ids: Option<StopTokens>,
    /// Whether answers go on after the model's own last token.
    pub(crate) ignore_eos: Option<bool>,
    /// Tokens before which nothing ends an answer.
    pub(crate) min_tokens: Option<Natural>,
    /// Words that may not be in an answer, as vLLM finds them.
    pub(crate) bad_words: Option<BadWords>,
    /// Only these tokens may be chosen.
    pub(crate) allowed_token_ids: Option<AllowedTokens>,
    /// Whether the text of special tokens is left out.
    pub(crate) skip_special_tokens: Option<bool>,
    /// Whether the stop string that was met stays at the end.
    pub(crate) include_stop_str_in_output: Option<bool>,
    /// Only so many of a prompt's last tokens; -1: as many as leave room for the answer.
    pub(crate) truncate_prompt_tokens: Option<Limit>,
    /// Not supported, as in newer versions of vLLM.
    pub(crate) use_beam_search: Option<bool>,
    #[serde(rename = "spaces_between_special_tokens")]
    _spaces_between_special_tokens: Option<Anything>,
}

/// What OpenAI's older routes have beside that.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Choices {
    /// Answers to a prompt.
    pub(crate) n: Option<Quantity>,
    pub(crate) stop: Option<Strings>,
    pub(crate) stream_options: Option<StreamOptions>,
    /// Log-probabilities of the tokens of the prompt, each with so many alternatives.
    pub(crate) prompt_logprobs: Option<Alternatives>,
    #[serde(rename = "metadata")]
    _metadata: Option<Anything>,
}

/// What a stream says beside its answers.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct StreamOptions {
    /// A last chunk with the tokens that the request took.
    pub(crate) include_usage: Option<bool>,
    /// The tokens so far in each chunk.
    pub(crate) continuous_usage_stats: Option<bool>,
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<Anything>,
}

/// What an answer has to be, in OpenAI's, vLLM's and llama.cpp's fields; one of them at a time.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
#[schema(as = Forms)]
pub(crate) struct StructuredOutputFields {
    pub(crate) response_format: Option<Format>,
    pub(crate) structured_outputs: Option<Outputs>,
    pub(crate) guided_json: Option<Schemata>,
    pub(crate) guided_json_object: Option<bool>,
    pub(crate) guided_regex: Option<String>,
    pub(crate) guided_choice: Option<ChoiceList>,
    pub(crate) guided_grammar: Option<String>,
    /// llama.cpp's: a grammar in GBNF.
    pub(crate) grammar: Option<String>,
    /// llama.cpp's.
    pub(crate) json_schema: Option<Schemata>,
    /// SGLang's.
    pub(crate) regex: Option<String>,
    /// SGLang's: a grammar in GBNF.
    pub(crate) ebnf: Option<String>,
    // There is one engine for grammars.
    #[serde(rename = "guided_decoding_backend")]
    _guided_decoding_backend: Option<Anything>,
}

/// vLLM's fields in an object of their own.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Outputs {
    pub(crate) json: Option<Schemata>,
    pub(crate) json_object: Option<bool>,
    pub(crate) regex: Option<String>,
    pub(crate) choice: Option<ChoiceList>,
    pub(crate) grammar: Option<String>,
    /// XGrammar's structural tag, as JSON or as its text.
    pub(crate) structural_tag: Option<Schemata>,
}

/// The form of an answer. A schema lies in an object of its own (chat completions) or not (responses, messages).
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Format {
    /// `text`, `json_object`, `json_schema` or `structural_tag`.
    pub(crate) r#type: String,
    pub(crate) json_schema: Option<NamedSchema>,
    /// Also under the name that clients of Hugging Face's servers give it.
    #[serde(alias = "value")]
    pub(crate) schema: Option<Schemata>,
    /// Whether what cannot be enforced is an error.
    pub(crate) strict: Option<bool>,
    /// Of a structural tag: a form, or
    pub(crate) format: Option<Schemata>,
    /// tags
    pub(crate) structures: Option<Schemata>,
    /// and what begins them.
    pub(crate) triggers: Option<Schemata>,
    #[serde(rename = "name")]
    _name: Option<Anything>,
    #[serde(rename = "description")]
    _description: Option<Anything>,
}

/// A schema with OpenAI's fields around it.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct NamedSchema {
    pub(crate) schema: Option<Schemata>,
    pub(crate) strict: Option<bool>,
    #[serde(rename = "name")]
    _name: Option<Anything>,
    #[serde(rename = "description")]
    _description: Option<Anything>,
}

/// Alternatives of which log-probabilities may be listed.
pub(crate) type Alternatives = Count<{ MAX_LOGPROBS as i64 }>;
