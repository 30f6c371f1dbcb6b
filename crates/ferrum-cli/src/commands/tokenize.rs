//! `ferrum tokenize` and `ferrum detokenize`.

use crate::args::{DetokenizeArgs, TokenizeArgs};
use crate::failure::Outcome;
use crate::input;
use crate::load_model;
use crate::model_argument::model_and_text;
use crate::ui::show;
use ferrum_formats::tokenizer::EncodeOptions;
use serde_json::json;

pub(crate) fn tokenize(args: &TokenizeArgs) -> Outcome {
    let words = model_and_text(
        args.model.as_deref(),
        args.first.as_deref(),
        args.second.as_deref(),
        "text",
        &args.hub,
    )?;
    let tokenizer = load_model::tokenizer(words.model.as_deref(), &args.hub)?;
    let text = match words.text {
        Some(text) if text != "-" => text,
        _ => input::read_stdin()?,
    };
    let options = EncodeOptions {
        add_special: args.add_special,
        parse_special: args.parse_special,
    };
    let tokens = tokenizer.encode(&text, options)?;
    if args.json {
        return show(&format!("{}\n", json!({ "tokens": tokens })));
    }
    let ids: Vec<_> = tokens.iter().map(u32::to_string).collect();
    show(&format!("{}\n", ids.join(",")))
}

pub(crate) fn detokenize(args: &DetokenizeArgs) -> Outcome {
    let tokenizer = load_model::tokenizer(args.model.path(), &args.hub)?;
    load_model::check_tokens(&args.tokens, tokenizer.vocab_size())?;
    show(&format!(
        "{}\n",
        tokenizer.decode(&args.tokens, args.skip_special)
    ))
}
