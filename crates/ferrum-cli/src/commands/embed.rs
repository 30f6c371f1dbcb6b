//! `ferrum embed` and `ferrum rerank`.

mod decoder;

use crate::args::{DeviceArgs, DtypeArgs, EmbedArgs, RerankArgs};
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::load_model;
use crate::ui::{self, Progress, show, show_json_line};
use crate::weight_cache;
use decoder::Decoder;
use ferrum_engine::{BackendDispatch, BackendKind, Embedded, Encoder};
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::encoder::{EncoderModel, read_encoder};
use ferrum_models::{EmbeddingPrompts, LoadProgress, ModelKind, Pooling};
use std::collections::BTreeMap;

pub(crate) fn embed(args: &EmbedArgs) -> Outcome {
    let source = load_model::source(&args.model, &args.hub)?;
    let mut kept = None;
    let (mut embedded, dimensions) = match ModelKind::of_embedder(&source)? {
        ModelKind::Decoder => {
            let decoder = Decoder::read(source)?;
            let dimensions = dimensions(args, decoder.dimensions())?;
            let pooling = pooling(args, decoder.pooling())?;
            let texts = texts(args, decoder.prompts())?;
            let embedded;
            (embedded, kept) = decoder.embed(args, &texts, pooling)?;
            (embedded, dimensions)
        }
        _ => {
            let mut encoder = open(source, &args.device, args.dtype)?;
            let dimensions = dimensions(args, encoder.dimensions())?;
            let pooling = pooling(args, encoder.pooling())?;
            let embedded = encoder.embed(&texts(args, encoder.prompts())?, pooling)?;
            let cut = embedded.iter().filter(|one| one.cut).count();
            warn_of_cut(cut, "text", encoder.max_tokens());
            (embedded, dimensions)
        }
    };
    for one in &mut embedded {
        one.shorten(dimensions, !args.no_normalize);
    }
    let shown = match args.json {
        true => {
            let vectors: Vec<_> = embedded.iter().map(|one| &one.vector).collect();
            show_json_line(&BTreeMap::from([("embeddings", vectors)]))
        }
        false => show(&as_lines(&embedded)),
    };
    if let Some(kept) = kept {
        weight_cache::finish(kept);
    }
    shown
}

/// The texts behind one of the model's prompts.
fn texts(args: &EmbedArgs, prompts: &EmbeddingPrompts) -> Outcome<Vec<String>> {
    let before = prompts.text(args.prompt.as_deref());
    let before = before.map_err(|reason| Failure::new(format!("--prompt: {reason}")))?;
    let texts = lines(&args.texts)?;
    Ok(texts.iter().map(|text| format!("{before}{text}")).collect())
}

/// A line of numbers for each vector.
fn as_lines(embedded: &[Embedded]) -> String {
    let mut out = String::new();
    for one in embedded {
        let numbers: Vec<_> = one.vector.iter().map(f32::to_string).collect();
        out.push_str(&numbers.join(" "));
        out.push('\n');
    }
    out
}

/// Numbers of each vector that are kept, of the model's `most`.
fn dimensions(args: &EmbedArgs, most: usize) -> Outcome<usize> {
    match args.dimensions.map_or(most, |n| n as usize) {
        found if found > most => Err(Failure::new(format!(
            "--dimensions: found {found}, the model's vectors have {most} numbers"
        ))),
        found => Ok(found),
    }
}

/// How vectors are pooled, where the model's files say `of_model`.
fn pooling(args: &EmbedArgs, of_model: Option<Pooling>) -> Outcome<Pooling> {
    let pooling = args.pooling.map(Into::into).or(of_model);
    pooling.ok_or_else(|| {
        let path = args.model.display();
        Failure::new(format!(
            "{path}: the model's files ask for another pooling than mean, cls and last, or for a layer behind it\nhint: --pooling takes one of these"
        ))
    })
}

pub(crate) fn rerank(args: &RerankArgs) -> Outcome {
    let source = load_model::source_of(ModelKind::Encoder, &args.model, &args.hub)?;
    let mut encoder = open(source, &args.device, args.dtype)?;
    let documents = lines(&args.documents)?;
    let (scores, cut) = encoder.rerank(&args.query, &documents)?;
    warn_of_cut(cut, "pair", encoder.max_tokens());
    if args.json {
        return show_json_line(&BTreeMap::from([("scores", scores)]));
    }
    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let line = |i: usize| format!("{:.6}\t{}\n", scores[i], documents[i]);
    show(&order.into_iter().map(line).collect::<String>())
}

/// What was given, or the lines of standard input.
fn lines(given: &[String]) -> Outcome<Vec<String>> {
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let text = input::read_stdin()?;
    let lines: Vec<_> = text.lines().map(str::to_owned).collect();
    match lines.is_empty() {
        true => Err(Failure::new(
            "there is no text\nhint: give texts as words, or one a line on standard input",
        )),
        false => Ok(lines),
    }
}

/// Warns of `cut` texts, which are called `what` in the singular, that the model was given in part.
pub(crate) fn warn_of_cut(cut: usize, what: &str, most: usize) {
    let (plural, are, were) = match cut {
        0 => return,
        1 => ("", "is", "was"),
        _ => ("s", "are", "were"),
    };
    ui::say(&format!(
        "warning: {cut} {what}{plural} {are} longer than the {most} tokens that the model takes, and {were} cut off"
    ));
}

fn open(source: ModelSource, device: &DeviceArgs, dtype: DtypeArgs) -> Outcome<Encoder> {
    let mut model = read_encoder(source)?;
    model.dtype = dtype.into();
    let mut bar = Progress::bytes("loading");
    load(&model, device, &mut |done, total| bar.set(done, total))
}

/// Loads an encoder with its tokenizer.
pub(crate) fn load(
    model: &EncoderModel,
    device: &DeviceArgs,
    progress: LoadProgress<'_>,
) -> Outcome<Encoder> {
    let tokenizer = match &model.source {
        ModelSource::Hf(folder) => Tokenizer::from_hf_dir(&folder.dir)?,
        ModelSource::Gguf(gguf) => Tokenizer::from_gguf(gguf)?,
    };
    // Texts are short, and a GPU would wait for the host between batches: it is used only if named.
    let kind = match device.backend {
        BackendKind::Auto => BackendKind::Cpu,
        kind => kind,
    };
    let device = BackendDispatch::from_kind(kind, device.options())?;
    Ok(Encoder::load(&device, model, tokenizer, progress)?)
}
