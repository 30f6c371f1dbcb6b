//! `ferrum run`: answer a prompt.

use super::chat::{self, KeptSession, Start, Turn, Window};
use super::generation::{
    PromptEncoder, fresh_seed, message, recommended_sampling, speed, stop_tokens,
};
use super::images::Images;
use crate::args::{RunArgs, Seed, look_back};
use crate::failure::{Failure, Outcome};
use crate::load_model::Loaded;
use crate::model_argument::model_and_text;
use crate::{input, load_model, ui};
use ferrum_engine::vision::PromptImage;
use ferrum_engine::{
    GenerationParams, GenerationStats, Placement, SamplingParams, Session, generate_with_images,
};
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use ferrum_models::Model;
use ferrum_types::TokenId;
use serde_json::{Value, json};
use std::io::IsTerminal;

pub(crate) fn run(args: RunArgs) -> Outcome {
    let words = model_and_text(
        args.model.as_deref(),
        args.first.as_deref(),
        args.second.as_deref(),
        "prompt",
        &args.hub,
    )?;
    let prompt = prompt(words.text)?;
    if prompt.as_deref().is_some_and(|p| p.trim().is_empty()) {
        let hint = "give one as an argument or through a pipe; without either, `ferrum run` on a terminal opens a chat";
        let model = words.model.as_ref();
        let taken = model.map_or(String::new(), |model| {
            format!(", and {} is the model", model.display())
        });
        return Err(Failure::new(format!(
            "the prompt is empty{taken}\nhint: {hint}"
        )));
    }
    let model = load_model::model(words.model.as_deref(), &args.hub)?;
    load_model::check_causal(&model)?;
    let tokenizer = load_model::tokenizer_of(&model)?;
    let template = load_model::template_of(&model, &tokenizer)?;
    let encoder = PromptEncoder {
        tokenizer,
        template,
    };
    let generation = GenerationParams {
        sampling: sampling(&model, &args, &encoder.tokenizer)?,
        max_tokens: args.max_tokens.unwrap_or(usize::MAX),
        stop: args.stop.clone(),
        stop_tokens: stop_tokens(&model, &encoder.tokenizer),
        ..GenerationParams::default()
    };
    let kept = args.session.as_ref();
    if kept.is_some() && args.device.tensor_parallel > 1 {
        return Err(Failure::new(
            "keys and values of several ranks are not kept in a file\nhint: --session works without --tensor-parallel",
        ));
    }
    let kept = kept.map(|path| KeptSession::open(path, load_model::fingerprint(&model)));
    let kept = kept.transpose()?;
    match (prompt, kept) {
        (Some(prompt), Some(kept)) => {
            continue_session(&args, &model, &encoder, &generation, (kept, &prompt))
        }
        (Some(prompt), None) if !args.image.is_empty() => {
            answer_about_images(&args, &model, &encoder, &generation, &prompt)
        }
        (Some(prompt), None) => answer(&args, &model, &encoder, &generation, &prompt),
        (None, _) if !args.image.is_empty() => Err(Failure::new(
            "--image is for a question about it\nhint: give one as an argument or through a pipe",
        )),
        (None, kept) => {
            let context = load_model::context_length(&model, args.cache.context, 0);
            let (mut loaded, _) = load(&args, &model, context)?;
            let model = match &words.model {
                Some(path) => path.display().to_string(),
                None => "the demo model".to_owned(),
            };
            let start = Start {
                model,
                system: args.system.as_deref(),
                seed: args.sampling.seed.unwrap_or(Seed::Fresh),
                templated: !args.raw,
                kept,
            };
            chat::chat(&mut loaded.session, &encoder, generation, start)?;
            loaded.finish();
            Ok(())
        }
    }
}

/// What to answer: the prompt that was given, and after it what comes through a pipe. `None`: a chat.
fn prompt(given: Option<String>) -> Outcome<Option<String>> {
    let terminal = std::io::stdin().is_terminal();
    let given = match given.as_deref() {
        Some("-") => return piped_text().map(Some),
        None if terminal => return Ok(None),
        None => return piped_text().map(Some),
        Some(given) => given,
    };
    let piped = if terminal {
        String::new()
    } else {
        piped_text()?
    };
    // Without a pipe, programs are started with an empty standard input.
    Ok(Some(
        match (given.trim().is_empty(), piped.trim().is_empty()) {
            (_, true) => given.to_owned(),
            (true, false) => piped,
            (false, false) => format!("{given}\n\n{piped}"),
        },
    ))
}

/// The text on standard input, without the end of line that shells add.
fn piped_text() -> Outcome<String> {
    let mut prompt = input::read_stdin()?;
    if prompt.ends_with('\n') {
        prompt.pop();
        if prompt.ends_with('\r') {
            prompt.pop();
        }
    }
    Ok(prompt)
}

/// Answers one prompt.
fn answer(
    args: &RunArgs,
    model: &Model,
    encoder: &PromptEncoder,
    generation: &GenerationParams,
    prompt: &str,
) -> Outcome {
    let tokens = if args.raw || !encoder.has_template() {
        encoder.raw(prompt)?
    } else {
        let system = args.system.iter().map(|text| message("system", text));
        let messages: Vec<_> = system.chain([message("user", prompt)]).collect();
        encoder.chat(&messages)?
    };
    let most = args.max_tokens.unwrap_or(1024).min(1 << 24);
    let context =
        load_model::context_length(model, args.cache.context, tokens.len().saturating_add(most));
    if tokens.len() > context {
        return Err(overflow(tokens.len(), context));
    }
    let (mut loaded, _) = load(args, model, context)?;
    let prompt = (&tokens[..], &[][..]);
    let stats = stream_to_stdout(&mut loaded.session, &encoder.tokenizer, prompt, generation)?;
    ui::show("\n")?;
    ui::detail(&speed(&stats));
    loaded.finish();
    Ok(())
}

/// Answers one prompt about images.
fn answer_about_images(
    args: &RunArgs,
    model: &Model,
    encoder: &PromptEncoder,
    generation: &GenerationParams,
    prompt: &str,
) -> Outcome {
    let files = Images::open(&args.image, model, &encoder.tokenizer)?;
    let system = args.system.iter().map(|text| message("system", text));
    let question = json!({"role": "user", "content": files.parts(prompt)});
    let messages: Vec<_> = system.chain([question]).collect();
    let tokens = files.tokens(encoder, &messages)?;
    let most = args.max_tokens.unwrap_or(1024).min(1 << 24);
    let context =
        load_model::context_length(model, args.cache.context, tokens.len().saturating_add(most));
    if tokens.len() > context {
        return Err(overflow(tokens.len(), context));
    }
    let (mut loaded, placement) = load(args, model, context)?;
    let images = files.embed(&placement, &tokens)?;
    let prompt = (&tokens[..], &images[..]);
    let stats = stream_to_stdout(&mut loaded.session, &encoder.tokenizer, prompt, generation)?;
    ui::show("\n")?;
    ui::detail(&speed(&stats));
    loaded.finish();
    Ok(())
}

/// Answers one prompt of a conversation that is kept in a file.
fn continue_session(
    args: &RunArgs,
    model: &Model,
    encoder: &PromptEncoder,
    generation: &GenerationParams,
    (mut kept, prompt): (KeptSession, &str),
) -> Outcome {
    let raw = args.raw || !encoder.has_template();
    if let Some(system) = &args.system {
        kept.conversation.system = Some(system.clone());
    }
    let most = args.max_tokens.unwrap_or(1024).min(1 << 24);
    // What a conversation of this length may become.
    let new = encoder.raw(prompt)?.len().saturating_mul(2);
    let length = kept.tokens().len().saturating_add(new);
    let context =
        load_model::context_length(model, args.cache.context, length.saturating_add(most));
    let (mut loaded, _) = load(args, model, context)?;
    kept.restore(&mut loaded.session)?;
    let tokens = if raw {
        match kept.tokens() {
            [] => encoder.raw(&format!("{}{prompt}", kept.text))?,
            before => [
                before,
                &encoder.tokenizer.encode(prompt, EncodeOptions::PLAIN)?,
            ]
            .concat(),
        }
    } else {
        let reserve = most.min(context / 4).max(1);
        let encode = |messages: &[Value]| encoder.chat(messages);
        let window = kept
            .conversation
            .window(prompt, (context, reserve), encode)?;
        match window {
            Window::Prompt { tokens, .. } => tokens,
            Window::TooLong(requested) => return Err(overflow(requested, context)),
        }
    };
    if tokens.len() > context {
        return Err(overflow(tokens.len(), context));
    }
    let all = (&tokens[..], &[][..]);
    let stats = stream_to_stdout(&mut loaded.session, &encoder.tokenizer, all, generation)?;
    ui::show("\n")?;
    ui::detail(&speed(&stats));
    let answer = encoder.tokenizer.decode(&stats.tokens, true);
    let all = [&tokens[..], &stats.tokens].concat();
    if raw {
        kept.continued(&format!("{prompt}{answer}"), all);
    } else {
        let question = prompt.to_owned();
        kept.answered(Turn { question, answer }, all);
    }
    kept.save(&mut loaded.session)?;
    loaded.finish();
    Ok(())
}

fn overflow(requested: usize, capacity: usize) -> Failure {
    ferrum_types::Error::ContextOverflow {
        requested,
        capacity,
    }
    .into()
}

fn load(args: &RunArgs, model: &Model, context: usize) -> Outcome<(Loaded, Placement)> {
    let kv = load_model::kv_dtype(model, &args.cache);
    let device = (&args.device, &args.weights);
    let share = args.device.memory.gpu_memory_utilization;
    let sizes = |placement: &Placement| {
        let config = placement.single(context);
        // The default context is no longer than what a GPU has room for.
        let fits = match args.cache.context {
            Some(_) => None,
            None => placement.gpu_kv_tokens(model, (&config, kv), share),
        };
        fits.map_or(config, |fits| placement.single(context.min(fits.max(1))))
    };
    load_model::load_sized(model, device, &args.adapter, kv, sizes)
}

/// Generates, and streams the text to stdout.
fn stream_to_stdout(
    session: &mut Session,
    tokenizer: &Tokenizer,
    prompt: (&[TokenId], &[PromptImage]),
    generation: &GenerationParams,
) -> Outcome<GenerationStats> {
    let mut shown = Ok(());
    let stats = generate_with_images(session, tokenizer, prompt, generation, &mut |text| {
        shown = ui::show(text);
        shown.is_ok()
    })?;
    shown?;
    Ok(stats)
}

/// What the user asked for, completed by what the model recommends and then by defaults.
fn sampling(model: &Model, args: &RunArgs, tokenizer: &Tokenizer) -> Outcome<SamplingParams> {
    let (recommended, samplers) = (recommended_sampling(model)?, &args.samplers);
    let args = &args.sampling;
    let params = SamplingParams {
        temperature: args.temperature.or(recommended.temperature).unwrap_or(0.7),
        top_k: args.top_k.or(recommended.top_k).unwrap_or(40),
        top_p: args.top_p.or(recommended.top_p).unwrap_or(0.95),
        min_p: args.min_p.or(recommended.min_p).unwrap_or(0.05),
        repeat_penalty: args
            .repeat_penalty
            .or(recommended.repeat_penalty)
            .unwrap_or(1.0),
        repeat_last_n: look_back(
            args.repeat_last_n
                .or(recommended.repeat_last_n)
                .unwrap_or(-1),
        ),
        seed: args.seed.and_then(Seed::fixed).unwrap_or_else(fresh_seed),
        ..SamplingParams::default()
    };
    let params = samplers.complete(params, tokenizer);
    params.validate()?;
    Ok(params)
}
