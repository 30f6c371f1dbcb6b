//! The fixture of a decoder that sees images, and drivers of it.

use super::{grouped_table, logits_of, max_difference, open, read_expected, runner_in};
use ferrum_formats::ModelSource;
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, LlmBackend};
use ferrum_media::image::{Filter, ImageLimits, ImageTransform, Resize, decode};
use ferrum_models::vision::{ImageEncoder, VisionRunner, has_vision, load_vision, read_vision};
use ferrum_models::{Dequantized, ImageSpan, KvLayout, LogitRows, ModelRunner, SeqStep, StepBatch};
use ferrum_types::{BlockId, TokenId};
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

pub(crate) fn folder() -> PathBuf {
    root().join("vision/gemma3")
}

pub(crate) fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(folder().join("expected.json")).unwrap()).unwrap()
}

fn float(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

/// A picture of the fixture: some of its pixels with their places, all of them, and its features.
pub(crate) struct Picture {
    pub(crate) some: Vec<(usize, f32)>,
    pub(crate) pixels: Vec<f32>,
    pub(crate) features: Vec<f32>,
}

fn pixels(name: &str) -> Vec<f32> {
    let transform = ImageTransform {
        resize: Resize::Exact([37; 2]),
        filter: Filter::Bilinear,
        crop: None,
        scale: 1.0 / 255.0,
        mean: [0.5; 3],
        std: [0.5; 3],
    };
    let file = std::fs::read(root().join("images/files").join(name)).unwrap();
    let image = decode(&file, ImageLimits::default()).unwrap();
    transform.apply(&image, [37; 2]).unwrap()
}

pub(crate) fn pictures() -> Vec<Picture> {
    let expected = expected();
    let images = expected["images"].as_object().unwrap();
    let all = images.iter().map(|(name, image)| {
        let some = image["pixels"].as_array().unwrap().iter();
        Picture {
            some: some
                .map(|one| (one[0].as_u64().unwrap() as usize, float(&one[1])))
                .collect(),
            pixels: pixels(name),
            features: image["features"]
                .as_array()
                .unwrap()
                .iter()
                .map(float)
                .collect(),
        }
    });
    all.collect()
}

pub(crate) fn encoder<B: LlmBackend>(device: &B, dir: &Path) -> VisionRunner<B> {
    let source = ModelSource::open(dir).unwrap();
    assert!(has_vision(&source));
    let model = read_vision(source).unwrap();
    let weights = load_vision::<B, Dequantized>(device, &model, &mut |_, _| ()).unwrap();
    VisionRunner::new(device, model.spec, weights).unwrap()
}

/// The largest difference of a feature.
pub(crate) fn compare<B: LlmBackend>(device: &B, dir: &Path) -> f32 {
    let mut encoder = encoder(device, dir);
    let differences = pictures().into_iter().map(|picture| {
        let found = encoder.encode(&picture.pixels).unwrap();
        max_difference(&found, &picture.features)
    });
    differences.fold(0.0, f32::max)
}

/// Tokens of a prompt with images in it, where the images are, and the logits of all of them.
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) images: Vec<ImageSpan>,
    pub(crate) logits: Vec<f32>,
}

/// The token of embeddings.
const SOFT: TokenId = 304;

/// The images of a chat, as its tokens and pictures say.
fn spans(tokens: &[TokenId], names: &[Value]) -> Vec<ImageSpan> {
    let expected = expected();
    let begins = (1..tokens.len()).filter(|&i| tokens[i] == SOFT && tokens[i - 1] != SOFT);
    let image = |(start, name): (usize, &Value)| {
        let features = &expected["images"][name.as_str().unwrap()]["features"];
        let embeddings: Vec<f32> = features.as_array().unwrap().iter().map(float).collect();
        ImageSpan {
            start,
            tokens: 9,
            embeddings: embeddings.into(),
        }
    };
    let images: Vec<_> = begins.zip(names).map(image).collect();
    assert_eq!(images.len(), names.len());
    images
}

pub(crate) fn prompt() -> Prompt {
    let (tokens, logits) = read_expected(&folder().join("expected.safetensors"));
    let expected = expected();
    let names = expected["chats"][2]["images"].as_array().unwrap();
    Prompt {
        images: spans(&tokens, names),
        tokens,
        logits,
    }
}

/// Logits of all positions, in steps that end with these tokens.
pub(crate) fn logits_in_steps<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    runner: &mut ModelRunner<B, K>,
    prompt: &Prompt,
    ends: &[usize],
) -> Vec<f32> {
    let groups = runner.cache_groups().to_vec();
    let (mut found, mut start) = (Vec::new(), 0);
    for &end in ends {
        let mut batch = StepBatch::default();
        let chunk = runner.config().max_tokens;
        let table = |group| grouped_table(group, start, end, chunk);
        push_part(
            &mut batch,
            &prompt.tokens[start..end],
            start,
            &table(&groups[0]),
        );
        for (index, group) in groups.iter().enumerate().skip(1) {
            batch.add_table(index, &table(group)).unwrap();
        }
        for image in &prompt.images {
            batch.add_image(image).unwrap();
        }
        found.extend(logits_of(runner, &batch));
        start = end;
    }
    found
}

pub(crate) fn push_part(
    batch: &mut StepBatch,
    tokens: &[TokenId],
    start: usize,
    blocks: &[BlockId],
) {
    let step = SeqStep {
        tokens,
        start,
        prompt_len: start + tokens.len(),
        blocks,
        hidden: false,
        logits: LogitRows::All,
        adapter: None,
    };
    batch.push(step).unwrap();
}

/// The whole prompt at once, in parts between images, and in one that begins inside of an image that is in the cache.
pub(crate) fn ways(prompt: &Prompt) -> [Vec<usize>; 3] {
    let len = prompt.tokens.len();
    let ends = prompt.images.iter().map(|image| image.positions().end);
    let between: Vec<usize> = prompt.images.iter().map(|image| image.start - 1).collect();
    let behind = ends.flat_map(|end| [end, end + 2]).chain([len]).collect();
    [
        vec![len],
        behind,
        between.into_iter().chain([len]).collect(),
    ]
}

pub(crate) fn check_logits<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    device: &B,
    most: f32,
) {
    let (model, prompt) = (open(&folder()), prompt());
    for layout in [
        KvLayout::Paged { block_size: 16 },
        KvLayout::Grouped { block_size: 5 },
    ] {
        for ends in ways(&prompt) {
            let mut runner = runner_in::<B, K, Dequantized>(device, &model, layout);
            let found = logits_in_steps(&mut runner, &prompt, &ends);
            let difference = max_difference(&found, &prompt.logits);
            assert!(
                difference < most,
                "{} {layout:?} {ends:?}: {difference}",
                B::NAME
            );
        }
    }
}
