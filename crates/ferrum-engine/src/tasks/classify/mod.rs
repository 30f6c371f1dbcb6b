//! [`ImageClassifier`]: a picture and labels to scores, with the preprocessor and the tokenizer around an
//! [`ImageTextModel`].
//!
//! The steps and the numbers are those of the zero-shot image classification of `transformers`: each label is put into a
//! sentence, and the sentences compete for the picture.

pub(crate) mod preprocessor;
mod texts;

use crate::BackendDispatch;
use crate::device::DeviceJob;
use ferrum_formats::ModelSource;
use ferrum_kernels::{BackendKvDtype, KvF32, LlmBackend};
use ferrum_media::image::{ImageTransform, RgbImage};
use ferrum_models::clip::{ClipKind, ClipModel, ClipRunner, ImageTextModel, load_clip};
use ferrum_models::{LoadProgress, WeightForm};
use ferrum_types::{Error, Result};
use texts::TextPreparation;

/// The default sentence for a label.
pub const TEMPLATE: &str = "This is a photo of {}.";

/// What a label is put in the place of.
const PLACE: &str = "{}";

/// How well a label describes a picture.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelScore {
    /// The label, as it was given.
    pub label: String,
    /// From 0 to 1. CLIP's scores add up to 1; SigLIP's are the probability of each.
    pub score: f32,
    /// What the score was made of.
    pub logit: f32,
}

/// What a picture shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Classification {
    /// The best first; labels with the same score as they were given.
    pub scores: Vec<LabelScore>,
    /// Sentences whose ends were cut off because they are too long for the model.
    pub cut: usize,
}

/// A CLIP or SigLIP model on a device, and what is around it.
pub struct ImageClassifier {
    inner: Box<dyn ImageTextModel>,
    texts: TextPreparation,
    transform: ImageTransform,
}

impl ImageClassifier {
    /// Loads a model onto a device.
    ///
    /// # Errors
    /// Those of [`load_clip`]; `Model` for a folder without a preprocessor, or with one that does what is not known
    /// here; what the tokenizer says.
    pub fn load(
        device: &BackendDispatch,
        model: &ClipModel,
        progress: LoadProgress<'_>,
    ) -> Result<Self> {
        let ModelSource::Hf(folder) = &model.source else {
            return Err(Error::Model(
                "image and text encoders are read from folders".into(),
            ));
        };
        // Small files are read first, so that a wrong folder is reported before weights are loaded.
        let transform = preprocessor::read(folder, model.spec.kind)?;
        let texts = TextPreparation::read(folder, &model.spec)?;
        let load = Load { model, progress };
        let inner = device.with_kv::<KvF32, _>(false, load)?;
        Ok(Self {
            inner,
            texts,
            transform,
        })
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    /// Tokens of the longest sentence, special ones included; longer ones are cut off.
    pub fn max_tokens(&self) -> usize {
        self.inner.spec().text.positions
    }

    /// The pixel values of a picture, `[3, side, side]`, as the model reads it.
    ///
    /// # Errors
    /// `InvalidArgument` for a picture that the preprocessor does not bring to the model's size.
    pub fn pixels(&self, image: &RgbImage) -> Result<Vec<f32>> {
        let side = self.inner.spec().image.side;
        let values = self.transform.apply(image, [side, side]);
        values.map_err(|e| Error::invalid("classify", e.to_string()))
    }

    /// The vectors of pictures, not normalised.
    ///
    /// # Errors
    /// Those of [`pixels`](Self::pixels); what the device says.
    pub fn embed_images(&mut self, images: &[RgbImage]) -> Result<Vec<Vec<f32>>> {
        let pixels = images.iter().map(|image| self.pixels(image));
        let pixels = pixels.collect::<Result<Vec<_>>>()?;
        self.inner.embed_images(&pixels)
    }

    /// The vectors of texts, not normalised, and how many of the texts were cut off.
    ///
    /// # Errors
    /// What the tokenizer says, and the device.
    pub fn embed_texts(&mut self, texts: &[impl AsRef<str>]) -> Result<(Vec<Vec<f32>>, usize)> {
        let prepared = texts.iter().map(|text| self.texts.tokens(text.as_ref()));
        let prepared = prepared.collect::<Result<Vec<_>>>()?;
        let cut = prepared.iter().filter(|(_, cut)| *cut).count();
        let tokens: Vec<_> = prepared.into_iter().map(|(tokens, _)| tokens).collect();
        Ok((self.inner.embed_texts(&tokens)?, cut))
    }

    /// Scores labels by how well they describe a picture. A label stands in `template` in the place of `{}`.
    ///
    /// # Errors
    /// `InvalidArgument` without a label, for an empty one, and for a template without `{}`; those of
    /// [`embed_images`](Self::embed_images) and [`embed_texts`](Self::embed_texts).
    pub fn classify(
        &mut self,
        image: &RgbImage,
        labels: &[impl AsRef<str>],
        template: &str,
    ) -> Result<Classification> {
        let sentences = sentences(labels, template)?;
        let (texts, cut) = self.embed_texts(&sentences)?;
        let pixels = self.pixels(image)?;
        let images = self.inner.embed_images(&[pixels])?;
        let logits = images.iter().flat_map(|image| {
            let logit = |text: &Vec<f32>| self.inner.logit(image, text);
            texts.iter().map(logit)
        });
        let logits: Vec<f32> = logits.collect();
        let scores = match self.inner.spec().kind {
            ClipKind::Clip => softmax(&logits),
            ClipKind::Siglip => logits.iter().map(|&logit| sigmoid(logit)).collect(),
        };
        let labels = labels.iter().zip(logits).zip(scores);
        let scores = labels.map(|((label, logit), score)| LabelScore {
            label: label.as_ref().to_owned(),
            score,
            logit,
        });
        let mut scores: Vec<_> = scores.collect();
        scores.sort_by(|a, b| b.logit.total_cmp(&a.logit));
        Ok(Classification { scores, cut })
    }
}

/// Each label in its sentence.
fn sentences(labels: &[impl AsRef<str>], template: &str) -> Result<Vec<String>> {
    let invalid = |reason: &str| Err(Error::invalid("classify", reason));
    if labels.is_empty() {
        return invalid("found no label, expected one at least");
    }
    if labels.iter().any(|label| label.as_ref().trim().is_empty()) {
        return invalid("found an empty label");
    }
    if !template.contains(PLACE) {
        return invalid("the template has no {}, where a label is put");
    }
    let labels = labels.iter();
    Ok(labels
        .map(|label| template.replace(PLACE, label.as_ref()))
        .collect())
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers = logits.iter().map(|&x| f64::from(x - most).exp());
    let powers: Vec<f64> = powers.collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|x| (x / sum) as f32).collect()
}

fn sigmoid(logit: f32) -> f32 {
    (1.0 / (1.0 + f64::from(-logit).exp())) as f32
}

/// Loads a model on whichever device.
struct Load<'a, 'p> {
    model: &'a ClipModel,
    progress: LoadProgress<'p>,
}

impl DeviceJob<KvF32> for Load<'_, '_> {
    type Output = Box<dyn ImageTextModel>;

    fn run<B: LlmBackend + BackendKvDtype<KvF32>, W: WeightForm<B>>(
        self,
        (loading, running): (&B, &B),
    ) -> Result<Self::Output> {
        let Self { model, progress } = self;
        let weights = load_clip::<B, W>(loading, model, progress)?;
        let runner = ClipRunner::new(running, model.spec.clone(), weights)?;
        Ok(Box::new(runner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_stand_in_the_template() {
        let found = sentences(&["a cat", "{}"], "One {}, two {}.");
        assert_eq!(
            found,
            Ok(vec![
                "One a cat, two a cat.".into(),
                "One {}, two {}.".into()
            ])
        );
        for (labels, template) in [(&[][..], TEMPLATE), (&[" "], TEMPLATE), (&["cat"], "none")] {
            assert!(
                sentences(labels, template).is_err(),
                "{labels:?} {template}"
            );
        }
    }

    #[test]
    fn scores_of_large_logits_are_finite() {
        assert_eq!(softmax(&[1e30, 0.0, -1e30]), [1.0, 0.0, 0.0]);
        assert_eq!(softmax(&[3.0, 3.0]), [0.5, 0.5]);
        assert_eq!([1e4, -1e4].map(sigmoid), [1.0, 0.0]);
    }
}
