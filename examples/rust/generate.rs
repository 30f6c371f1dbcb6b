//! The engine as a library: opens a GGUF file, and answers one prompt.
//!
//! ```sh
//! cargo run --release --example generate -- model.gguf "What is 7 plus 5?"
//! ```
//!
//! A program of its own depends on `ferrum-engine`, `ferrum-formats` and `ferrum-models`, and on `serde_json`
//! for the messages. Many sequences at once are the business of `ferrum_engine::Engine`, which batches them.

use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, GenerationParams, KvDtype, generate,
};
use ferrum_formats::chat_template::{ChatInput, ChatTemplate};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_formats::{Gguf, ModelSource};
use ferrum_models::{RunnerConfig, read_model};
use serde_json::json;
use std::error::Error;
use std::io::Write;
use std::path::Path;

/// Tokens of the prompt and the answer together.
const CONTEXT: usize = 1024;

/// Answers `prompt` with the model in the GGUF file at `path`; gives the number of generated tokens.
pub(crate) fn answer(
    path: &Path,
    prompt: &str,
    out: &mut dyn Write,
) -> Result<usize, Box<dyn Error>> {
    let gguf = Gguf::open(path)?;
    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer)?;
    let model = read_model(ModelSource::Gguf(gguf))?;

    // Messages become text by the model's template, and text becomes tokens.
    let tokens = match template {
        Some(template) => {
            let messages = json!([{"role": "user", "content": prompt}]);
            let text = template.render(&ChatInput::new(&messages))?;
            tokenizer.encode(&text, EncodeOptions::PROMPT)?
        }
        None => tokenizer.encode(prompt, EncodeOptions::WRITTEN)?,
    };

    let device = BackendDispatch::from_kind(BackendKind::Cpu, BackendOptions::default())?;
    let config = RunnerConfig::single(CONTEXT.min(model.spec.context_length));
    let kv = KvDtype::for_model(&model);
    let mut session = device.load(&model, config, kv, &mut |_done, _total| {})?;

    // The default sampling is greedy: the likeliest token each time.
    let wanted = GenerationParams {
        max_tokens: 256,
        stop_tokens: tokenizer.eos_ids().to_vec(),
        ..GenerationParams::default()
    };
    let mut written = Ok(());
    let stats = generate(&mut session, &tokenizer, &tokens, &wanted, &mut |text| {
        written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.is_ok()
    })?;
    written?;
    Ok(stats.tokens.len())
}

#[allow(
    dead_code,
    reason = "the test of the examples includes this file as a module"
)]
fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let model = arguments
        .next()
        .unwrap_or("assets/demo/ferrum-demo.gguf".into());
    let prompt = match arguments.next() {
        Some(prompt) => prompt
            .into_string()
            .map_err(|_| "the prompt is not UTF-8")?,
        None => "What is 7 plus 5?".to_owned(),
    };
    let tokens = answer(Path::new(&model), &prompt, &mut std::io::stdout())?;
    println!();
    eprintln!("{tokens} tokens");
    Ok(())
}
