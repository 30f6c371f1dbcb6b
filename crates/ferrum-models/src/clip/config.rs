//! What a CLIP or SigLIP checkpoint is, read from a Hugging Face folder.

use crate::families::hint_of_supported;
use crate::named::WeightDtype;
use crate::named::folder;
use crate::pre_norm::{PreNormActivation, PreNormSpec};
use crate::spec::Activation;
use ferrum_formats::{HfConfig, HfFolder, ModelSource, TensorSource};
use ferrum_types::{Error, Result, TokenId};

/// What such models differ in besides sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClipKind {
    /// Its image tower reads a class token, its text tower is causal, and labels compete (softmax).
    Clip,
    /// An attention head pools the image, every token of a text sees all others, and each label has a probability of its
    /// own (sigmoid).
    Siglip,
}

/// The tower of pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpec {
    /// Its layers.
    pub stack: PreNormSpec,
    /// Pixels of a side; pictures are square.
    pub side: usize,
    /// Pixels of a patch's side. What is left of a picture at its right and bottom is not read.
    pub patch: usize,
}

impl ImageSpec {
    /// Patches along a side.
    pub fn grid(&self) -> usize {
        self.side / self.patch
    }

    /// Numbers of a picture, `[3, side, side]`.
    pub fn values(&self) -> usize {
        3 * self.side * self.side
    }
}

/// The tower of texts.
#[derive(Clone, Debug, PartialEq)]
pub struct TextSpec {
    /// Its layers.
    pub stack: PreNormSpec,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Tokens of the longest text.
    pub positions: usize,
    /// CLIP: the token whose first state is the text's; `None` for the largest one of the text, as in configs from before
    /// the field was right (`eos_token_id` 2).
    pub end: Option<TokenId>,
}

/// Sizes of a CLIP or SigLIP model.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipSpec {
    /// Which of them it is.
    pub kind: ClipKind,
    /// The tower of pictures.
    pub image: ImageSpec,
    /// The tower of texts.
    pub text: TextSpec,
    /// Elements of a vector.
    pub dimensions: usize,
}

impl ClipSpec {
    /// Tokens of a picture.
    pub fn image_tokens(&self) -> usize {
        let patches = self.image.grid() * self.image.grid();
        patches + usize::from(self.kind == ClipKind::Clip)
    }
}

/// A CLIP or SigLIP folder that has been understood.
pub struct ClipModel {
    /// The opened folder.
    pub source: ModelSource,
    /// What the forward path needs to know of it.
    pub spec: ClipSpec,
    /// In what type its matrices are kept on a device.
    pub dtype: WeightDtype,
}

/// Architectures, and what `transformers` takes for keys that their configs leave out.
struct Defaults {
    architecture: &'static str,
    kind: ClipKind,
    activation: &'static str,
    norm_eps: f64,
    vocab_size: usize,
    positions: usize,
    text: [usize; 4],
    image: [usize; 4],
    patch: usize,
}

static KNOWN: [Defaults; 2] = [
    Defaults {
        architecture: "CLIPModel",
        kind: ClipKind::Clip,
        activation: "quick_gelu",
        norm_eps: 1e-5,
        vocab_size: 49_408,
        positions: 77,
        text: [512, 12, 8, 2048],
        image: [768, 12, 12, 3072],
        patch: 32,
    },
    Defaults {
        architecture: "SiglipModel",
        kind: ClipKind::Siglip,
        activation: "gelu_pytorch_tanh",
        norm_eps: 1e-6,
        vocab_size: 32_000,
        positions: 64,
        text: [768, 12, 12, 3072],
        image: [768, 12, 12, 3072],
        patch: 16,
    },
];

fn known(config: &HfConfig) -> Option<&'static Defaults> {
    let names = config.architectures().ok()?;
    let mut known = KNOWN.iter();
    known.find(|one| names.contains(&one.architecture))
}

/// Whether a model is one that [`read_clip`] reads.
pub fn is_clip(source: &ModelSource) -> bool {
    matches!(source, ModelSource::Hf(folder) if known(&folder.config).is_some())
}

/// Reads the config of a CLIP or SigLIP model.
///
/// # Errors
/// [`Error::Model`] for another architecture, or a bad field.
pub fn read_clip(source: ModelSource) -> Result<ClipModel> {
    let opened = folder(&source)?;
    let config = &opened.config;
    let Some(defaults) = known(config) else {
        let found = config.architectures()?.join(", ");
        let known = KNOWN.each_ref().map(|one| one.architecture);
        return Err(Error::Model(format!(
            "{}: field \"architectures\": \"{found}\" does not compare images with texts\n{}",
            config.path().display(),
            hint_of_supported(&found, &known)
        )));
    };
    crate::checkpoint::check_scheme(opened)?;
    let spec = spec(opened, defaults)?;
    validate(&spec)
        .map_err(|reason| Error::Model(format!("{}: {reason}", config.path().display())))?;
    Ok(ClipModel {
        source,
        spec,
        dtype: WeightDtype::default(),
    })
}

fn spec(folder: &HfFolder, defaults: &Defaults) -> Result<ClipSpec> {
    let config = &folder.config;
    let section = |key: &str| -> Result<HfConfig> {
        let section = config.section(key)?;
        Ok(section.ok_or_else(|| config.field_error(key, "an object"))?)
    };
    let (text, image) = (section("text_config")?, section("vision_config")?);
    let clip = defaults.kind == ClipKind::Clip;
    let size = |config: &HfConfig, key: &str, default: usize| -> Result<usize> {
        Ok(config.usize(key)?.unwrap_or(default))
    };
    if image.bool("vision_use_head")? == Some(false) {
        let expected = "true, as nothing else pools the image";
        return Err(image.field_error("vision_use_head", expected).into());
    }
    let end = text.usize("eos_token_id")?.unwrap_or(49_407);
    let end = match end {
        2 => None,
        end => {
            Some(TokenId::try_from(end).map_err(|_| text.field_error("eos_token_id", "a token"))?)
        }
    };
    // The shape of what makes the vectors says how long they are; the config may not.
    let head = match clip {
        true => "text_projection.weight",
        false => "text_model.head.weight",
    };
    let head = folder.tensors.require(head)?;
    Ok(ClipSpec {
        kind: defaults.kind,
        dimensions: head.shape.first().copied().unwrap_or(0),
        image: image_spec(&image, defaults)?,
        text: TextSpec {
            stack: stack(&text, defaults, defaults.text, clip)?,
            vocab_size: size(&text, "vocab_size", defaults.vocab_size)?,
            positions: size(&text, "max_position_embeddings", defaults.positions)?,
            end,
        },
    })
}

/// The image tower of SigLIP by itself, as other models have it.
pub(crate) fn siglip_image(config: &HfConfig) -> Result<ImageSpec> {
    image_spec(config, &KNOWN[1])
}

fn image_spec(config: &HfConfig, defaults: &Defaults) -> Result<ImageSpec> {
    let size =
        |key: &str, default: usize| -> Result<usize> { Ok(config.usize(key)?.unwrap_or(default)) };
    if size("num_channels", 3)? != 3 {
        let expected = "3, red, green and blue";
        return Err(config.field_error("num_channels", expected).into());
    }
    Ok(ImageSpec {
        stack: stack(config, defaults, defaults.image, false)?,
        side: size("image_size", 224)?,
        patch: size("patch_size", defaults.patch)?,
    })
}

fn stack(
    config: &HfConfig,
    defaults: &Defaults,
    [hidden, layers, heads, intermediate]: [usize; 4],
    causal: bool,
) -> Result<PreNormSpec> {
    let size =
        |key: &str, default: usize| -> Result<usize> { Ok(config.usize(key)?.unwrap_or(default)) };
    let eps = config.f64("layer_norm_eps")?.unwrap_or(defaults.norm_eps);
    if eps < 0.0 {
        return Err(config.field_error("layer_norm_eps", "at least 0").into());
    }
    Ok(PreNormSpec {
        hidden: size("hidden_size", hidden)?,
        layers: size("num_hidden_layers", layers)?,
        heads: size("num_attention_heads", heads)?,
        intermediate: size("intermediate_size", intermediate)?,
        activation: activation(config, defaults.activation)?,
        norm_eps: eps as f32,
        causal,
    })
}

fn activation(config: &HfConfig, default: &str) -> Result<PreNormActivation> {
    match config.str("hidden_act")?.unwrap_or(default) {
        "quick_gelu" => Ok(PreNormActivation::QUICK_GELU),
        "gelu" => Ok(Activation::Gelu.into()),
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh.into()),
        "silu" | "swish" => Ok(Activation::Silu.into()),
        _ => Err(config
            .field_error("hidden_act", "silu or a form of gelu")
            .into()),
    }
}

fn validate(spec: &ClipSpec) -> std::result::Result<(), String> {
    spec.image.stack.validate("image tower")?;
    spec.text.stack.validate("text tower")?;
    for (name, value, most) in [
        ("text_config.vocab_size", spec.text.vocab_size, 1 << 24),
        (
            "text_config.max_position_embeddings",
            spec.text.positions,
            1 << 16,
        ),
        ("vision_config.image_size", spec.image.side, 1 << 13),
        (
            "vision_config.patch_size",
            spec.image.patch,
            spec.image.side,
        ),
        ("size of the vectors", spec.dimensions, 1 << 24),
    ] {
        if value == 0 || value > most {
            return Err(format!("{name}: found {value}, expected 1 to {most}"));
        }
    }
    // A token that begins the text, and one that ends it.
    if spec.text.positions < 3 {
        let found = spec.text.positions;
        return Err(format!(
            "text_config.max_position_embeddings: found {found}, expected 3 at least"
        ));
    }
    match spec.kind == ClipKind::Siglip && spec.dimensions != spec.image.stack.hidden {
        true => Err(format!(
            "text_config.projection_size: found {}, the vectors of images have {} elements",
            spec.dimensions, spec.image.stack.hidden
        )),
        false => Ok(()),
    }
}
