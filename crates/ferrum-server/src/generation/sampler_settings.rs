//! Samplers as responses show them.

use crate::response::SamplerSettings;
use ferrum_engine::SamplingParams;

/// The shortest decimal of an f32 as f64; a plain conversion has further digits.
pub(crate) fn written(value: f32) -> f64 {
    value.to_string().parse::<f64>().unwrap_or(value.into())
}

/// The numbers of samplers under llama.cpp's names, the seed apart.
pub(crate) fn sampler_settings(sampling: &SamplingParams) -> SamplerSettings {
    // -1 stands for all.
    let window = |n: usize| i64::try_from(n).unwrap_or(-1);
    let dry = &sampling.dry;
    let mirostat = sampling.mirostat.unwrap_or_default();
    SamplerSettings {
        temperature: written(sampling.temperature),
        top_k: sampling.top_k,
        top_p: written(sampling.top_p),
        min_p: written(sampling.min_p),
        typical_p: written(sampling.typical_p),
        xtc_probability: written(sampling.xtc.probability),
        xtc_threshold: written(sampling.xtc.threshold),
        repeat_last_n: window(sampling.repeat_last_n),
        repeat_penalty: written(sampling.repeat_penalty),
        presence_penalty: written(sampling.presence_penalty),
        frequency_penalty: written(sampling.frequency_penalty),
        dry_multiplier: written(dry.multiplier),
        dry_base: written(dry.base),
        dry_allowed_length: dry.allowed_length,
        dry_penalty_last_n: window(dry.last_n),
        mirostat: if sampling.mirostat.is_some() { 2 } else { 0 },
        mirostat_tau: written(mirostat.tau),
        mirostat_eta: written(mirostat.eta),
    }
}
