//! LoRA adapters: a folder as PEFT saves them, or a GGUF file as llama.cpp converts them to.
//!
//! An adapter adds `scale · up · (down · x)` to the output of some linear maps (Hu et al., 2021). What
//! an adapter may hold beyond that (DoRA, trained biases, embeddings, whole modules, experts) is refused
//! by name rather than left out: a part of an adapter is another model.

mod gguf;
mod peft;

use crate::error::Shown;
use crate::gguf::Gguf;
use crate::hf::HfConfig;
use crate::safetensors::Safetensors;
use crate::tensor::{TensorSource, TensorView};
use crate::{FormatError, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Largest rank of a pair of matrices; published adapters have 4 to 256.
pub const MAX_LORA_RANK: usize = 1024;

/// An open adapter.
#[derive(Debug)]
pub struct LoraFolder {
    opened: PathBuf,
    files: Files,
    pairs: Vec<PairNames>,
}

#[derive(Debug)]
enum Files {
    Peft {
        config: HfConfig,
        tensors: Safetensors,
    },
    Gguf(Gguf),
}

/// The pair of matrices that an adapter adds to one linear map.
#[derive(Clone, Copy, Debug)]
pub struct LoraPair<'a> {
    /// The map, as a file of the base model in the same format calls it
    /// (`model.layers.0.self_attn.q_proj`, `blk.0.attn_q`).
    pub module: &'a str,
    /// `[rank, in_features]`.
    pub down: TensorView<'a>,
    /// `[out_features, rank]`.
    pub up: TensorView<'a>,
    /// What the product counts by.
    pub scale: f32,
}

#[derive(Debug)]
struct PairNames {
    module: String,
    down: String,
    up: String,
    scale: f32,
}

/// One of a pair's two matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    Down,
    Up,
}

impl LoraFolder {
    /// Opens an adapter, and checks the shapes of its pairs against each other. It does not check whether they fit a
    /// model.
    ///
    /// # Errors
    /// [`FormatError`] names the file and the field or tensor that is missing, wrong, or of a kind of
    /// adapter that is not supported.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_file() {
            let file = Gguf::open(path)?;
            let alpha = gguf::alpha(&file)?;
            let pairs = pairs(&file, (gguf::half, ["lora_a", "lora_b"]), |_, rank| {
                gguf::scale(alpha, rank)
            })?;
            let files = Files::Gguf(file);
            let opened = path.to_owned();
            return Ok(Self {
                opened,
                files,
                pairs,
            });
        }
        let (config, scaling, tensors) = peft::open(path)?;
        let pairs = pairs(
            &tensors,
            (peft::half, ["lora_A.weight", "lora_B.weight"]),
            |module, rank| scaling.of(module, rank),
        )?;
        let files = Files::Peft { config, tensors };
        Ok(Self {
            opened: path.to_owned(),
            files,
            pairs,
        })
    }

    /// What it was opened with: the folder, or the GGUF file.
    pub fn opened_path(&self) -> &Path {
        &self.opened
    }

    /// The file with the weights, for messages.
    pub fn path(&self) -> &Path {
        self.tensors().path_hint()
    }

    /// The model that it was trained on, as its author called it.
    pub fn base_model(&self) -> Option<&str> {
        match &self.files {
            Files::Peft { config, .. } => config.str("base_model_name_or_path").ok().flatten(),
            Files::Gguf(file) => file.str("general.base_model.0.name").ok().flatten(),
        }
    }

    /// The architecture of the GGUF files of its base model; `None` for a folder, which does not say.
    pub fn gguf_architecture(&self) -> Option<&str> {
        match &self.files {
            Files::Peft { .. } => None,
            Files::Gguf(file) => file.architecture().ok(),
        }
    }

    /// The tensors, for conversion.
    pub fn tensors(&self) -> &dyn TensorSource {
        match &self.files {
            Files::Peft { tensors, .. } => tensors,
            Files::Gguf(file) => file,
        }
    }

    /// All pairs, by module.
    pub fn pairs(&self) -> impl Iterator<Item = LoraPair<'_>> {
        let tensors = self.tensors();
        self.pairs.iter().filter_map(move |names| {
            Some(LoraPair {
                module: &names.module,
                // Both were there when it was opened.
                down: tensors.get(&names.down)?,
                up: tensors.get(&names.up)?,
                scale: names.scale,
            })
        })
    }
}

/// Module and half of a tensor's name.
type ReadHalf = for<'n> fn(&'n str) -> Option<(&'n str, Half)>;

/// Pairs up all tensors. `ends` are those of the two halves' names, for messages.
fn pairs(
    tensors: &dyn TensorSource,
    (half, ends): (ReadHalf, [&str; 2]),
    scale: impl Fn(&str, usize) -> f32,
) -> Result<Vec<PairNames>> {
    let path = tensors.path_hint();
    let mut halves: BTreeMap<&str, [Option<&str>; 2]> = BTreeMap::new();
    for info in tensors.infos() {
        let Some((module, half)) = half(&info.name) else {
            let expected = format!("pairs {} and {} of linear maps only", ends[0], ends[1]);
            return Err(FormatError::tensor(path, &info.name, "it", expected));
        };
        let place = &mut halves.entry(module).or_default()[half as usize];
        if let Some(first) = place {
            let found = format!("a second one beside {}", Shown(first));
            let expected = "one pair for each module, of one adapter";
            return Err(FormatError::tensor(path, &info.name, found, expected));
        }
        *place = Some(&info.name);
    }
    let missing = |module: &str, end: &str| FormatError::MissingTensor {
        path: path.into(),
        tensor: Shown(&format!("{module}.{end}")).to_string(),
        hint: "the other half of the pair is there".into(),
    };
    let mut pairs = Vec::with_capacity(halves.len());
    for (module, [down, up]) in halves {
        let down = down.ok_or_else(|| missing(module, ends[0]))?;
        let up = up.ok_or_else(|| missing(module, ends[1]))?;
        let rank = rank(tensors, down, up)?;
        pairs.push(PairNames {
            module: module.to_owned(),
            down: down.to_owned(),
            up: up.to_owned(),
            scale: scale(module, rank),
        });
    }
    if pairs.is_empty() {
        return Err(FormatError::source(path, "holds no pair of matrices", ""));
    }
    Ok(pairs)
}

/// Holds the two shapes against each other.
fn rank(tensors: &dyn TensorSource, down: &str, up: &str) -> Result<usize> {
    let path = tensors.path_hint();
    let (a, b) = (tensors.require(down)?, tensors.require(up)?);
    let shape = |view: &TensorView<'_>| format!("shape {:?}", view.shape);
    match (a.shape, b.shape) {
        (&[rank, _], &[_, other]) if rank == other && (1..=MAX_LORA_RANK).contains(&rank) => {
            Ok(rank)
        }
        (&[rank, _], _) if (1..=MAX_LORA_RANK).contains(&rank) => {
            let expected = format!("[out features, {rank}] as its other half has");
            Err(FormatError::tensor(path, up, shape(&b), expected))
        }
        _ => {
            let expected = format!("[rank, in features] with a rank of 1 to {MAX_LORA_RANK}");
            Err(FormatError::tensor(path, down, shape(&a), expected))
        }
    }
}
