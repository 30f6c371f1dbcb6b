//! `ferrum logits`: what a model thinks at every position.

use crate::args::LogitsArgs;
use crate::failure::{Failure, Outcome};
use crate::load_model;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_models::RunnerConfig;
use std::io::Write;

/// Rows of logits that are held at once.
const ROWS: usize = 32;

/// Tokens that the plain output names for each position.
const TOP: usize = 5;

pub(crate) fn logits(args: LogitsArgs) -> Outcome {
    let model = load_model::model(args.model.path(), &args.hub)?;
    load_model::check_causal(&model)?;
    let vocab = model.spec.vocab_size;
    let tokens = match &args.prompt {
        Some(prompt) => load_model::tokenizer_of(&model)?.encode(prompt, EncodeOptions::WRITTEN)?,
        None => args.tokens,
    };
    load_model::check_tokens(&tokens, vocab)?;
    if tokens.is_empty() {
        return Err(Failure::new("the prompt has no token"));
    }
    let context = load_model::checked_context_length(&model, tokens.len());
    let config = RunnerConfig {
        max_logit_rows: ROWS,
        ..RunnerConfig::single(context)
    };
    let device = (&args.device, &args.weights);
    let (mut loaded, _) =
        load_model::load_adapted(&model, device, &args.adapter, config, args.kv_dtype)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    if args.json {
        write!(
            out,
            "{{\"tokens\":{},\"logits\":[",
            serde_json::to_string(&tokens)?
        )?;
    }
    let mut written: Outcome = Ok(());
    loaded.session.score(&tokens, &mut |first, rows| {
        for (i, row) in rows.chunks_exact(vocab).enumerate() {
            if written.is_err() {
                break;
            }
            let position = first + i;
            written = match args.json {
                true => write_row(&mut out, position, row),
                false => write_top(&mut out, position, tokens[position], row),
            };
        }
        Ok(())
    })?;
    written?;
    if args.json {
        writeln!(out, "]}}")?;
    }
    Ok(out.flush()?)
}

fn write_row(out: &mut impl Write, position: usize, row: &[f32]) -> Outcome {
    if position > 0 {
        out.write_all(b",")?;
    }
    Ok(serde_json::to_writer(out, row)?)
}

fn write_top(out: &mut impl Write, position: usize, token: u32, row: &[f32]) -> Outcome {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    let best: Vec<_> = order
        .iter()
        .take(TOP)
        .map(|&id| format!("{id}:{:.4}", row[id]))
        .collect();
    Ok(writeln!(out, "{position}\t{token}\t{}", best.join(" "))?)
}
