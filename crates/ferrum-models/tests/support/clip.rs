//! CLIP and SigLIP fixtures, with what `transformers` makes of them.

use ferrum_formats::ModelSource;
use ferrum_kernels::LlmBackend;
use ferrum_media::image::{Filter, ImageLimits, ImageTransform, Resize, decode};
use ferrum_models::Dequantized;
use ferrum_models::clip::{
    ClipKind, ClipModel, ClipRunner, ImageTextModel, is_clip, load_clip, read_clip,
};
use ferrum_types::TokenId;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(crate) const NAMES: [&str; 3] = ["clip", "clip-exact-gelu", "siglip"];

pub(crate) fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/images");
    root.join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    let all = value.as_array().unwrap().iter();
    all.map(|x| x.as_f64().unwrap() as f32).collect()
}

pub(crate) fn open(name: &str) -> ClipModel {
    let source = ModelSource::open(folder(name)).unwrap();
    assert!(is_clip(&source));
    read_clip(source).unwrap()
}

pub(crate) fn runner<B: LlmBackend>(device: &B, model: &ClipModel) -> ClipRunner<B> {
    let weights = load_clip::<B, Dequantized>(device, model, &mut |_, _| ()).unwrap();
    ClipRunner::new(device, model.spec.clone(), weights).unwrap()
}

/// A fixture's pictures and texts, with their vectors.
pub(crate) struct Expected {
    pub(crate) pixels: Vec<Vec<f32>>,
    pub(crate) ids: Vec<Vec<TokenId>>,
    images: Vec<Vec<f32>>,
    texts: Vec<Vec<f32>>,
    /// For each picture one with each text.
    logits: Vec<Vec<f32>>,
}

impl Expected {
    /// Of PNG files only: decoders of JPEG round differently.
    pub(crate) fn read(name: &str, kind: ClipKind) -> Self {
        let expected = json(&folder(name).join("expected.json"));
        let config = json(&folder(name).join("preprocessor_config.json"));
        let three = |key: &str| {
            let all = config[key].as_array().unwrap();
            [0, 1, 2].map(|i| all[i].as_f64().unwrap())
        };
        let (resize, crop) = match kind {
            ClipKind::Clip => (Resize::ShortestEdge(30), Some([30; 2])),
            ClipKind::Siglip => (Resize::Exact([30; 2]), None),
        };
        let transform = ImageTransform {
            resize,
            filter: Filter::Bicubic,
            crop,
            scale: 1.0 / 255.0,
            mean: three("image_mean"),
            std: three("image_std"),
        };
        let images = expected["images"].as_object().unwrap().iter();
        let images: Vec<_> = images.filter(|(name, _)| name.ends_with(".png")).collect();
        let texts = expected["texts"].as_array().unwrap();
        let pixels = |(file, image): &(&String, &Value)| {
            let bytes = std::fs::read(folder("files").join(file)).unwrap();
            let decoded = decode(&bytes, ImageLimits::default()).unwrap();
            let pixels = transform.apply(&decoded, [30; 2]).unwrap();
            for pair in image["pixels"].as_array().unwrap() {
                let at = pair[0].as_u64().unwrap() as usize;
                let off = f64::from(pixels[at]) - pair[1].as_f64().unwrap();
                assert!(off.abs() < 1e-6, "{file}: {off}");
            }
            pixels
        };
        let id = |id: &Value| id.as_u64().unwrap() as TokenId;
        let ids = |text: &Value| text["ids"].as_array().unwrap().iter().map(id).collect();
        Self {
            pixels: images.iter().map(pixels).collect(),
            ids: texts.iter().map(ids).collect(),
            images: images
                .iter()
                .map(|(_, image)| floats(&image["vector"]))
                .collect(),
            texts: texts.iter().map(|text| floats(&text["vector"])).collect(),
            logits: images
                .iter()
                .map(|(name, _)| floats(&expected["logits"][*name]))
                .collect(),
        }
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum::<f64>()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The smallest cosine of a vector with what it should be, and the largest difference of a logit.
pub(crate) fn compare<B: LlmBackend>(device: &B, name: &str) -> (f64, f32) {
    let model = open(name);
    let expected = Expected::read(name, model.spec.kind);
    let mut runner = runner(device, &model);
    let images = runner.embed_images(&expected.pixels).unwrap();
    let texts = runner.embed_texts(&expected.ids).unwrap();
    assert_eq!(
        (images.len(), texts.len()),
        (expected.images.len(), expected.texts.len())
    );
    let vectors = images.iter().zip(&expected.images);
    let vectors = vectors.chain(texts.iter().zip(&expected.texts));
    let least = vectors.map(|(a, b)| cosine(a, b)).fold(1.0, f64::min);
    let mut most = 0f32;
    for (image, logits) in images.iter().zip(&expected.logits) {
        for (text, logit) in texts.iter().zip(logits) {
            most = most.max((runner.logit(image, text) - logit).abs());
        }
    }
    (least, most)
}
