//! `ferrum perplexity`: how well a model predicts a text.

use crate::args::PerplexityArgs;
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::load_model;
use crate::model_argument::model_and_file;
use crate::ui::{Progress, show, show_json};
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_models::RunnerConfig;
use serde_json::json;

/// Default tokens of a window, as other engines have it.
const WINDOW: usize = 512;

/// The text is cut into windows that do not overlap; in each, every token but the first is predicted
/// from those before it in the window. A text that begins with a special token for this model has it
/// at the start of the first window only.
pub(crate) fn perplexity(args: &PerplexityArgs) -> Outcome {
    let (model, file) = model_and_file(
        args.model.as_deref(),
        args.first.as_deref(),
        args.second.as_deref(),
    )?;
    let model = load_model::model(model, &args.hub)?;
    load_model::check_causal(&model)?;
    let text = input::read_text(file)?;
    let tokens = load_model::tokenizer_of(&model)?.encode(&text, EncodeOptions::TEXT)?;
    if tokens.len() < 2 {
        let message = format!("the text has {} tokens, expected at least 2", tokens.len());
        return Err(Failure::new(message));
    }
    let vocab = model.spec.vocab_size;
    let window = match args.cache.context {
        Some(_) => load_model::context_length(&model, args.cache.context, 0),
        None => WINDOW.min(model.spec.context_length),
    };
    let config = RunnerConfig {
        max_logit_rows: 32,
        ..RunnerConfig::single(window)
    };
    let kv = load_model::kv_dtype(&model, &args.cache);
    let device = (&args.device, &args.weights);
    let (mut loaded, _) = load_model::load_adapted(&model, device, &args.adapter, config, kv)?;
    let (mut sum, mut count) = (0f64, 0usize);
    let mut bar = Progress::bytes("reading");
    for (i, part) in tokens.chunks(window).enumerate() {
        loaded.session.score(part, &mut |first, rows| {
            for (row, &next) in rows.chunks_exact(vocab).zip(part[first..].iter().skip(1)) {
                sum -= log_probability(row, next);
                count += 1;
            }
            Ok(())
        })?;
        bar.set((i * window + part.len()) as u64, tokens.len() as u64);
    }
    let mean = sum / count.max(1) as f64;
    if args.json {
        return show_json(&json!({
            "perplexity": mean.exp(),
            "negative_log_likelihood": mean,
            "predicted_tokens": count,
            "tokens": tokens.len(),
            "window": window,
        }));
    }
    show(&format!(
        "perplexity {:.4} over {count} tokens in windows of {window}\n",
        mean.exp()
    ))
}

fn log_probability(logits: &[f32], token: u32) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
    f64::from(logits[token as usize] - top) - sum.ln()
}
