//! Opens the model at a path, or returns an error that says why it cannot be opened.

use crate::files::{PICKLES, extension_of, files_with_extension, pickle_error};
use crate::gguf::Gguf;
use crate::hf::{GenerationConfig, HfConfig, QuantizationConfig};
use crate::identity::FileIdentity;
use crate::safetensors::{self, Safetensors};
use crate::{FormatError, Result, TensorSource};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Where a folder says how its weights are quantised, when `config.json` does not.
const QUANTIZATION_CONFIGS: [&str; 2] = ["quantize_config.json", "quant_config.json"];

/// An open model.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a program holds one or two of them"
)]
pub enum ModelSource {
    /// One GGUF file: weights, config and tokenizer.
    Gguf(Gguf),
    /// A Hugging Face folder.
    Hf(HfFolder),
}

/// A Hugging Face folder: `config.json` beside safetensors.
#[derive(Debug)]
pub struct HfFolder {
    /// The folder, where tokenizer and chat template lie too.
    pub dir: PathBuf,
    /// `config.json`.
    pub config: HfConfig,
    /// `generation_config.json`, token ids completed from `config.json`.
    pub generation_config: GenerationConfig,
    /// `quantization_config` of `config.json`, else `quantize_config.json` or
    /// `quant_config.json`; `None` for plain weights.
    pub quantization: Option<QuantizationConfig>,
    /// The weights.
    pub tensors: Safetensors,
}

impl ModelSource {
    /// Opens a `.gguf` file (of a model in several, the first), a Hugging Face folder, a folder with exactly
    /// one `.gguf` file or the parts of one model, or a `.safetensors` file inside a Hugging Face folder.
    ///
    /// # Errors
    /// [`FormatError::Source`] when the path is none of these, else what is wrong inside.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let meta = match std::fs::metadata(path) {
            Ok(meta) => meta,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let reason = "there is no such file or folder";
                return Err(FormatError::source(
                    path,
                    reason,
                    "check the path; a model of a hub is ORG/NAME",
                ));
            }
            Err(e) => return Err(FormatError::io(path, "open", &e)),
        };
        if meta.is_dir() {
            return Self::open_folder(path);
        }
        let extension = extension_of(path);
        if extension == "safetensors" {
            return HfFolder::open_file(path).map(ModelSource::Hf);
        }
        if extension == "gguf" || starts_with_gguf(path)? {
            return open_gguf(path);
        }
        if PICKLES.contains(&extension.as_str()) {
            return Err(pickle_error(path));
        }
        if path.file_name().is_some_and(|name| name == "config.json") {
            let hint = "give the folder instead of its config.json";
            return Err(FormatError::source(path, "is a config, not a model", hint));
        }
        Err(FormatError::source(
            path,
            "is no model file",
            "give a .gguf file, a .safetensors file, or a Hugging Face folder",
        ))
    }

    /// Its tensors.
    pub fn tensors(&self) -> &dyn TensorSource {
        match self {
            ModelSource::Gguf(gguf) => gguf,
            ModelSource::Hf(folder) => &folder.tensors,
        }
    }

    /// Identities (path, size, time) of all files that determine the weights, taken at open; `None` for a model that
    /// does not lie in files.
    pub fn identities(&self) -> Option<Vec<FileIdentity>> {
        let folder = match self {
            ModelSource::Gguf(gguf) => return gguf.identities(),
            ModelSource::Hf(folder) => folder,
        };
        let mut files = folder.tensors.identities()?;
        files.push(FileIdentity::of(folder.config.path())?);
        // A file that is not there says nothing.
        let beside = QUANTIZATION_CONFIGS.map(|name| FileIdentity::of(&folder.dir.join(name)));
        files.extend(beside.into_iter().flatten());
        Some(files)
    }

    fn open_folder(dir: &Path) -> Result<Self> {
        if dir.join("config.json").exists() {
            return HfFolder::open(dir).map(ModelSource::Hf);
        }
        let ggufs = files_with_extension(dir, &["gguf"])?;
        match ggufs.as_slice() {
            [only] => open_gguf(only),
            [] => {
                let pickles = files_with_extension(dir, PICKLES)?;
                Err(match pickles.first() {
                    Some(pickle) => pickle_error(pickle),
                    None => FormatError::source(
                        dir,
                        "holds neither config.json nor a .gguf file",
                        "give a .gguf file or a Hugging Face folder",
                    ),
                })
            }
            several => {
                if let Some(first) = first_part(several) {
                    return open_gguf(first);
                }
                let names: Vec<_> = several
                    .iter()
                    .filter_map(|p| p.file_name())
                    .map(|n| n.to_string_lossy().into_owned())
                    .take(8)
                    .collect();
                let reason = format!("holds {} .gguf files", several.len());
                let hint = format!("name one of them: {}", names.join(", "));
                Err(FormatError::source(dir, reason, hint))
            }
        }
    }
}

impl HfFolder {
    /// Opens `config.json`, `generation_config.json` and the weights of a folder.
    ///
    /// # Errors
    /// What is wrong with any of them.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        Self::with_weights(dir, || Safetensors::open_folder(dir))
    }

    fn open_file(file: &Path) -> Result<Self> {
        let dir = match file.parent() {
            Some(dir) if dir != Path::new("") => dir,
            _ => Path::new("."),
        };
        if !dir.join("config.json").exists() {
            let reason = "has no config.json beside it, so its architecture is unknown";
            let hint = "keep it in the folder it was published in";
            return Err(FormatError::source(file, reason, hint));
        }
        Self::with_weights(dir, || match safetensors::index_naming(file)? {
            Some(index) => Safetensors::open_index(index),
            None => Safetensors::open(file),
        })
    }

    fn with_weights(dir: &Path, open: impl FnOnce() -> Result<Safetensors>) -> Result<Self> {
        let config = HfConfig::open(dir.join("config.json"))?;
        let generation = dir.join("generation_config.json");
        let generation_config = match generation.exists() {
            true => GenerationConfig::from_json(&HfConfig::open(generation)?)?,
            false => GenerationConfig::default(),
        };
        let generation_config = generation_config.completed_from(&config)?;
        let mut quantization = QuantizationConfig::of_model(&config)?;
        for name in QUANTIZATION_CONFIGS {
            if quantization.is_none() && dir.join(name).exists() {
                let json = HfConfig::open(dir.join(name))?;
                quantization = Some(QuantizationConfig::from_json(&json)?);
            }
        }
        Ok(HfFolder {
            dir: dir.to_owned(),
            config,
            generation_config,
            quantization,
            tensors: open()?,
        })
    }
}

fn open_gguf(path: &Path) -> Result<ModelSource> {
    Gguf::open(path)?.with_parts().map(ModelSource::Gguf)
}

/// The first of `ggufs`, when they are the parts of one model.
fn first_part(ggufs: &[PathBuf]) -> Option<&PathBuf> {
    // They are sorted, and the number of parts is in every name.
    let first = ggufs.first()?;
    let end = format!("-of-{:05}.gguf", ggufs.len());
    let stem = |path: &Path| -> Option<String> {
        let name = path.file_name()?.to_str()?.strip_suffix(&end)?;
        Some(name.rsplit_once('-')?.0.to_owned())
    };
    let own = stem(first)?;
    let same = |path: &PathBuf| stem(path).as_ref() == Some(&own);
    ggufs.iter().all(same).then_some(first)
}

fn starts_with_gguf(path: &Path) -> Result<bool> {
    // Hub caches name files by hash, so the contents decide where the extension says nothing.
    let meta = std::fs::metadata(path).map_err(|e| FormatError::io(path, "open", &e))?;
    if !meta.is_file() {
        return Ok(false);
    }
    let file = std::fs::File::open(path).map_err(|e| FormatError::io(path, "open", &e))?;
    let mut head = Vec::with_capacity(4);
    file.take(4)
        .read_to_end(&mut head)
        .map_err(|e| FormatError::io(path, "read", &e))?;
    Ok(head == b"GGUF")
}
