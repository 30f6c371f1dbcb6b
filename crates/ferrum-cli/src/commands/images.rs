//! Images of a prompt on the command line.

use super::generation::PromptEncoder;
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::ui::Progress;
use ferrum_engine::Placement;
use ferrum_engine::vision::{ImagePrompt, PromptImage, VisionTower};
use ferrum_formats::ModelSource;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_media::image::ImageLimits;
use ferrum_models::Model;
use ferrum_models::vision::{VisionModel, has_vision, read_vision};
use ferrum_types::TokenId;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Bytes of the longest file.
const MAX_FILE: u64 = 1 << 30;

/// The image tower of a model, if it has one.
pub(super) fn tower_of(model: &Model) -> Outcome<Option<VisionModel>> {
    match &model.source {
        ModelSource::Hf(folder) if has_vision(&model.source) => {
            let source = ModelSource::open(&folder.dir)?;
            Ok(Some(read_vision(source)?))
        }
        _ => Ok(None),
    }
}

/// Image files, and the model that is to see them.
pub(super) struct Images<'a> {
    files: Vec<(&'a PathBuf, Vec<u8>)>,
    model: VisionModel,
    prompt: ImagePrompt,
}

impl<'a> Images<'a> {
    /// Reads the files, for a model that sees.
    pub(super) fn open(
        paths: &'a [PathBuf],
        model: &Model,
        tokenizer: &Tokenizer,
    ) -> Outcome<Self> {
        let Some(model) = tower_of(model)? else {
            return Err(Failure::new(
                "--image: this model reads only text\nhint: models that see are folders of Gemma 3 with an image tower",
            ));
        };
        let read = |path: &'a PathBuf| {
            let text = path.to_string_lossy();
            if ["http://", "https://", "data:"]
                .iter()
                .any(|scheme| text.starts_with(scheme))
            {
                return Err(Failure::new(
                    "--image: found a URL, expected a file\nhint: download the image first; requests to `ferrum serve --allowed-media-domains HOST` may name URLs",
                ));
            }
            Ok((path, input::read_bytes(path, MAX_FILE)?))
        };
        Ok(Self {
            files: paths.iter().map(read).collect::<Outcome<_>>()?,
            prompt: ImagePrompt::new(&model.spec, tokenizer)?,
            model,
        })
    }

    /// The parts of a message: all images, and the question about them.
    pub(super) fn parts(&self, question: &str) -> Value {
        let images = self.files.iter().map(|_| json!({"type": "image"}));
        let question = json!({"type": "text", "text": question});
        images.chain([question]).collect()
    }

    /// The tokens of a conversation with these images in it.
    pub(super) fn tokens(
        &self,
        encoder: &PromptEncoder,
        messages: &[Value],
    ) -> Outcome<Vec<TokenId>> {
        let text = encoder.written(messages)?;
        let text = self.prompt.expand(&text, None, self.files.len())?;
        let tokens = encoder.rendered(&text)?;
        self.prompt.starts(&tokens, self.files.len())?;
        Ok(tokens)
    }

    /// The images in their places among these tokens.
    pub(super) fn embed(
        &self,
        placement: &Placement,
        tokens: &[TokenId],
    ) -> Outcome<Vec<PromptImage>> {
        let mut bar = Progress::bytes("loading the image tower");
        let progress = &mut |done, total| bar.set(done, total);
        let mut tower = VisionTower::load(placement.last_device(), &self.model, progress)?;
        let mut images = Vec::with_capacity(self.files.len());
        for (path, file) in &self.files {
            let task = tower.preprocessor().read(file, ImageLimits::default());
            let task = task.map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
            images.push(tower.embed(&task)?);
        }
        Ok(self.prompt.place(tokens, images)?)
    }
}
