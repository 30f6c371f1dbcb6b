//! What the image tower of a decoder is, read from a Hugging Face folder.

use crate::clip::{ImageSpec, siglip_image};
use crate::named::folder;
use ferrum_formats::{HfConfig, ModelSource, TensorSource};
use ferrum_types::{Error, Result, TokenId};
use std::path::PathBuf;

const ARCHITECTURE: &str = "Gemma3ForConditionalGeneration";

/// Names of the tower in files, and in the memory of `transformers`.
const TOWERS: [&str; 4] = [
    "vision_tower.vision_model",
    "vision_tower",
    "model.vision_tower.vision_model",
    "model.vision_tower",
];

/// The tokens that stand for an image in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageTokens {
    /// Stands before each image; a chat template writes it alone.
    pub begin: TokenId,
    /// Stands in the place of each embedding.
    pub soft: TokenId,
    /// Stands behind each image.
    pub end: TokenId,
}

/// Sizes of an image tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionSpec {
    /// The tower.
    pub image: ImageSpec,
    /// Embeddings of an image along each side; their square is how many it has.
    pub side_tokens: usize,
    /// Elements of an embedding: the decoder's hidden size.
    pub hidden: usize,
    /// Epsilon of the norm before the projection.
    pub norm_eps: f32,
    /// How images stand in prompts.
    pub tokens: ImageTokens,
}

impl VisionSpec {
    /// Embeddings of an image.
    pub fn image_tokens(&self) -> usize {
        self.side_tokens * self.side_tokens
    }

    /// Patches along a side of the square that becomes an embedding.
    pub fn pooled(&self) -> usize {
        self.image.grid() / self.side_tokens
    }
}

/// The image tower of a folder.
pub struct VisionModel {
    /// The opened folder.
    pub source: ModelSource,
    /// What the forward path needs to know of it.
    pub spec: VisionSpec,
    /// The names of its tensors begin with this.
    pub(super) tower: &'static str,
    /// And those of the projection with this.
    pub(super) projector: &'static str,
}

/// Whether a folder is one of which [`read_vision`] reads the image tower.
pub fn has_vision(source: &ModelSource) -> bool {
    let architectures = |config: &HfConfig| -> bool {
        let names = config.architectures();
        names.is_ok_and(|names| names.contains(&ARCHITECTURE))
    };
    matches!(source, ModelSource::Hf(folder) if architectures(&folder.config))
}

/// Reads the config of the image tower of a decoder.
///
/// # Errors
/// [`Error::Model`] for a folder without one, or a bad field.
pub fn read_vision(source: ModelSource) -> Result<VisionModel> {
    let opened = folder(&source)?;
    if !has_vision(&source) {
        let path = opened.config.path().display();
        let reason = format!("{path}: the model has no image tower that is supported");
        return Err(Error::Model(format!(
            "{reason}\nhint: supported is {ARCHITECTURE}"
        )));
    }
    crate::checkpoint::check_scheme(opened)?;
    let spec = spec(&opened.config)?;
    let has = |tower: &&&str| {
        let patches = format!("{tower}.embeddings.patch_embedding.weight");
        opened.tensors.get(&patches).is_some()
    };
    let Some(&tower) = TOWERS.iter().find(has) else {
        let path: PathBuf = opened.dir.clone();
        return Err(Error::Model(format!(
            "{}: the tensors of the image tower are missing: found no \"{}.embeddings.patch_embedding.weight\"",
            path.display(),
            TOWERS[0]
        )));
    };
    let projector = match tower.starts_with("model.") {
        true => "model.multi_modal_projector",
        false => "multi_modal_projector",
    };
    Ok(VisionModel {
        source,
        spec,
        tower,
        projector,
    })
}

fn spec(config: &HfConfig) -> Result<VisionSpec> {
    let section = |key: &str| -> Result<HfConfig> {
        let section = config.section(key)?;
        Ok(section.ok_or_else(|| config.field_error(key, "an object"))?)
    };
    let (text, vision) = (section("text_config")?, section("vision_config")?);
    let token = |key: &str, default: TokenId| -> Result<TokenId> {
        match config.usize(key)? {
            None => Ok(default),
            Some(found) => {
                TokenId::try_from(found).map_err(|_| config.field_error(key, "a token").into())
            }
        }
    };
    let image = siglip_image(&vision)?;
    let tokens = config.usize("mm_tokens_per_image")?.unwrap_or(256);
    let side_tokens = tokens.isqrt();
    let spec = VisionSpec {
        image,
        side_tokens,
        hidden: text.require_usize("hidden_size")?,
        norm_eps: vision.f64("layer_norm_eps")?.unwrap_or(1e-6) as f32,
        tokens: ImageTokens {
            begin: token("boi_token_index", 255_999)?,
            soft: token("image_token_index", 262_144)?,
            end: token("eoi_token_index", 256_000)?,
        },
    };
    validate(&spec, tokens, &text)
        .map_err(|reason| Error::Model(format!("{}: {reason}", config.path().display())))?;
    Ok(spec)
}

fn validate(spec: &VisionSpec, tokens: usize, text: &HfConfig) -> std::result::Result<(), String> {
    let ImageSpec { stack, side, patch } = &spec.image;
    stack.validate("image tower")?;
    for (name, value, most) in [
        ("vision_config.image_size", *side, 1 << 13),
        ("vision_config.patch_size", *patch, *side),
        ("text_config.hidden_size", spec.hidden, 1 << 24),
        // More would not be in one step.
        ("mm_tokens_per_image", tokens, 1 << 12),
    ] {
        if value == 0 || value > most {
            return Err(format!("{name}: found {value}, expected 1 to {most}"));
        }
    }
    let grid = spec.image.grid();
    let pooled = grid / spec.side_tokens;
    if spec.image_tokens() != tokens || pooled == 0 || grid / pooled != spec.side_tokens {
        return Err(format!(
            "mm_tokens_per_image: found {tokens}, expected a square whose side {grid} patches can be pooled to"
        ));
    }
    // Behind a window, an image's first tokens would see less of it than its last ones.
    match text.usize("sliding_window") {
        Ok(Some(window)) if window < tokens => Err(format!(
            "mm_tokens_per_image: found {tokens}, expected at most the {window} of text_config.sliding_window"
        )),
        _ => Ok(()),
    }
}
