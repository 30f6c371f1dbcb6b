//! `ferrum classify`.

use crate::args::ClassifyArgs;
use crate::commands::embed::warn_of_cut;
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::load_model;
use crate::ui::{Progress, show, show_json_line};
use ferrum_engine::classify::ImageClassifier;
use ferrum_engine::{BackendDispatch, BackendKind};
use ferrum_media::image::{ImageLimits, decode};
use ferrum_models::ModelKind;
use ferrum_models::clip::read_clip;
use serde::Serialize;

/// Bytes of the longest file.
const MAX_FILE: u64 = 1 << 30;

/// What `--json` prints.
#[derive(Serialize)]
struct Classified<'a> {
    labels: Vec<&'a str>,
    scores: Vec<f32>,
}

pub(crate) fn classify(args: &ClassifyArgs) -> Outcome {
    let labels: Vec<_> = args.labels.iter().map(|label| label.trim()).collect();
    if labels.iter().any(|label| label.is_empty()) {
        return Err(Failure::new(
            "--labels: found an empty label\nhint: labels stand between commas, as in --labels cat,dog",
        ));
    }
    // The file first: it is read sooner than a model is loaded.
    let bytes = input::read_bytes(&args.image, MAX_FILE)?;
    let image = decode(&bytes, ImageLimits::default());
    let fail = |e| Failure::new(format!("{}: {e}", args.image.display()));
    let image = image.map_err(fail)?;
    let mut classifier = load(args)?;
    let found = classifier.classify(&image, &labels, &args.template)?;
    warn_of_cut(found.cut, "sentence", classifier.max_tokens());
    if args.json {
        let labels: Vec<_> = found.scores.iter().map(|one| one.label.as_str()).collect();
        let scores: Vec<_> = found.scores.iter().map(|one| one.score).collect();
        return show_json_line(&Classified { labels, scores });
    }
    let lines = found.scores.iter();
    show(
        &lines
            .map(|one| format!("{:.6}\t{}\n", one.score, one.label))
            .collect::<String>(),
    )
}

fn load(args: &ClassifyArgs) -> Outcome<ImageClassifier> {
    let mut model = read_clip(load_model::source_of(
        ModelKind::Clip,
        &args.model,
        &args.hub,
    )?)?;
    model.dtype = args.dtype.into();
    // One image and a few sentences are sooner computed than a GPU is opened: it is used only if named.
    let kind = match args.device.backend {
        BackendKind::Auto => BackendKind::Cpu,
        kind => kind,
    };
    let device = BackendDispatch::from_kind(kind, args.device.options())?;
    let mut bar = Progress::bytes("loading");
    let progress = &mut |done, total| bar.set(done, total);
    Ok(ImageClassifier::load(&device, &model, progress)?)
}
