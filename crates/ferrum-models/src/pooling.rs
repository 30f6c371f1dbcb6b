//! One vector for a text: how the states of its tokens become one, and what a model's files say about that.

use crate::dense;
use ferrum_formats::{Gguf, HfConfig, ModelSource, Shown};
use ferrum_types::Result;
use std::path::{Component, Path, PathBuf};

/// How the states of many tokens become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The last token's, which has seen all others: the choice of most decoders.
    #[default]
    Last,
    /// The mean over all tokens.
    Mean,
    /// The first token's, for models in which every token sees all others.
    Cls,
}

/// How a model's files say that the states of a text become its embedding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatedPooling {
    /// They say nothing.
    Nothing,
    /// One way.
    Known(Pooling),
    /// One that is not known here, or something behind it that is not: what that is.
    Other(String),
    /// They list modules, none of which pools: the first that is not known, as that of a reranker.
    NotPooled(String),
}

impl StatedPooling {
    /// What `pooling_type` of a GGUF file says, or what sentence-transformers has written into a folder.
    ///
    /// # Errors
    /// [`Error::Model`](ferrum_types::Error::Model) for a file that cannot be read.
    pub fn of(source: &ModelSource) -> Result<Self> {
        match source {
            ModelSource::Gguf(gguf) => Self::of_gguf(gguf),
            ModelSource::Hf(folder) => Ok(modules_of(&folder.dir)?.pooling),
        }
    }

    fn of_gguf(gguf: &Gguf) -> Result<Self> {
        let key = format!("{}.pooling_type", gguf.architecture()?);
        let Some(number) = gguf.u32(&key)? else {
            return Ok(Self::Nothing);
        };
        let mut known = [Pooling::Mean, Pooling::Cls, Pooling::Last].into_iter();
        let found = known.find(|pooling| pooling.gguf_number() == number);
        let other = || Self::Other(format!("{key} {number}"));
        Ok(found.map_or_else(other, Self::Known))
    }

    /// From the configuration of sentence-transformers' module `Pooling`: `pooling_mode`, or, in older folders, a flag for
    /// each mode.
    fn of_config(config: &HfConfig) -> Result<Self> {
        const FLAGS: [(&str, &str); 6] = [
            ("pooling_mode_cls_token", "cls"),
            ("pooling_mode_max_tokens", "max"),
            ("pooling_mode_mean_tokens", "mean"),
            ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
            ("pooling_mode_weightedmean_tokens", "weightedmean"),
            ("pooling_mode_lasttoken", "lasttoken"),
        ];
        let modes = match config.value("pooling_mode") {
            Some(modes) if modes.is_array() => config.strs("pooling_mode")?.unwrap_or_default(),
            Some(_) => vec![config.require_str("pooling_mode")?],
            None => {
                let mut modes = Vec::new();
                for (flag, mode) in FLAGS {
                    if config.bool(flag)? == Some(true) {
                        modes.push(mode);
                    }
                }
                modes
            }
        };
        Ok(match modes[..] {
            [] | ["mean"] => Self::Known(Pooling::Mean),
            ["cls"] => Self::Known(Pooling::Cls),
            ["lasttoken"] => Self::Known(Pooling::Last),
            _ => Self::Other(format!("pooling by {}", Shown(&modes.join(" and ")))),
        })
    }

    /// The way to take, where files that say nothing mean `otherwise`; `None` for one that is not known.
    pub fn or(self, otherwise: Pooling) -> Option<Pooling> {
        match self {
            Self::Nothing => Some(otherwise),
            Self::Known(pooling) => Some(pooling),
            Self::Other(_) | Self::NotPooled(_) => None,
        }
    }
}

impl Pooling {
    /// Its number in `pooling_type` of a GGUF file.
    pub(crate) fn gguf_number(self) -> u32 {
        match self {
            Pooling::Mean => 1,
            Pooling::Cls => 2,
            Pooling::Last => 3,
        }
    }
}

/// Most linear maps behind pooling: known models have two.
const MAX_MAPS: usize = 8;

/// What sentence-transformers does behind a model.
pub(crate) struct Modules {
    /// How states are pooled.
    pub(crate) pooling: StatedPooling,
    /// Folders of the linear maps that are applied to what was pooled, in order.
    pub(crate) dense: Vec<PathBuf>,
    /// Whether tokens of a prompt are pooled with those of the text.
    pub(crate) include_prompt: bool,
}

/// The modules of `modules.json`. Where that file is missing, which sentence-transformers takes for a model without modules,
/// the usual folders are believed.
pub(crate) fn modules_of(folder: &Path) -> Result<Modules> {
    let list = folder.join("modules.json");
    let (mut maps, mut include_prompt) = (Vec::new(), true);
    let mut stated_by = |config: PathBuf| {
        let config = HfConfig::open(config)?;
        include_prompt = config.bool("include_prompt")? != Some(false);
        StatedPooling::of_config(&config)
    };
    if !list.exists() {
        let config = folder.join("1_Pooling/config.json");
        let pooling = match config.exists() {
            true if folder.join("2_Dense").exists() => {
                StatedPooling::Other("a module Dense".into())
            }
            true => stated_by(config)?,
            false => StatedPooling::Nothing,
        };
        return Ok(Modules {
            pooling,
            dense: maps,
            include_prompt,
        });
    }
    let (mut stated, mut other, mut normalized) = (StatedPooling::Nothing, None, false);
    for module in HfConfig::open_list(&list)? {
        // The name of a Python class, with its modules.
        let class = module.require_str("type")?;
        match class.rsplit('.').next() {
            Some("Transformer" | "Dropout") => {}
            // At the end, whoever takes the embedding normalises it.
            Some("Normalize") => normalized = true,
            Some("Pooling") if stated == StatedPooling::Nothing => {
                stated = stated_by(folder_of(folder, &module)?.join("config.json"))?;
            }
            Some("Dense") if stated != StatedPooling::Nothing && !normalized => {
                let folder = folder_of(folder, &module)?;
                let unknown = match maps.len() < MAX_MAPS {
                    true => dense::unknown_in(&folder)?,
                    false => Some(format!("{MAX_MAPS} before it")),
                };
                other = other.or(unknown.map(|what| format!("a module Dense with {what}")));
                maps.push(folder);
            }
            class => other = other.or(class.map(|class| format!("a module {}", Shown(class)))),
        }
    }
    let pooling = match (stated, other) {
        (StatedPooling::Known(_), Some(other)) => StatedPooling::Other(other),
        (StatedPooling::Nothing, Some(other)) => StatedPooling::NotPooled(other),
        (stated, _) => stated,
    };
    if !matches!(pooling, StatedPooling::Known(_)) {
        maps.clear();
    }
    Ok(Modules {
        pooling,
        dense: maps,
        include_prompt,
    })
}

/// The folder of a module.
fn folder_of(folder: &Path, module: &HfConfig) -> Result<PathBuf> {
    let path = module.require_str("path")?;
    if !is_inside(path) {
        let expected = "the name of a folder beside the file";
        return Err(module.field_error("path", expected).into());
    }
    Ok(folder.join(path))
}

/// Whether a path that a file names is one of something beside it.
fn is_inside(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    !path.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
}
