//! One vector for a text: how the states of its tokens become one, and what a model's files say about that.

use ferrum_formats::{HfConfig, ModelSource};
use ferrum_types::Result;

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

impl Pooling {
    /// How a model's files say that the states of a text become its embedding: `pooling_type` of a GGUF file, and what
    /// sentence-transformers has written into a folder. `otherwise` where they say nothing; `None` for ways that are not
    /// known here.
    ///
    /// # Errors
    /// [`Error::Model`](ferrum_types::Error::Model) for a file that cannot be read.
    pub fn of_model(source: &ModelSource, otherwise: Pooling) -> Result<Option<Pooling>> {
        let folder = match source {
            ModelSource::Gguf(gguf) => {
                let key = format!("{}.pooling_type", gguf.architecture()?);
                return Ok(match gguf.u32(&key)? {
                    None => Some(otherwise),
                    Some(1) => Some(Pooling::Mean),
                    Some(2) => Some(Pooling::Cls),
                    Some(3) => Some(Pooling::Last),
                    Some(_) => None,
                });
            }
            ModelSource::Hf(folder) => &folder.dir,
        };
        let path = folder.join("1_Pooling/config.json");
        if !path.exists() {
            return Ok(Some(otherwise));
        }
        // A map behind the pooling, which nothing here applies.
        if folder.join("2_Dense").exists() {
            return Ok(None);
        }
        let config = HfConfig::open(path)?;
        let mut modes = Vec::new();
        for mode in config.keys().filter(|key| key.starts_with("pooling_mode_")) {
            if config.bool(mode)? == Some(true) {
                modes.push(mode);
            }
        }
        Ok(match modes[..] {
            ["pooling_mode_mean_tokens"] => Some(Pooling::Mean),
            ["pooling_mode_cls_token"] => Some(Pooling::Cls),
            ["pooling_mode_lasttoken"] => Some(Pooling::Last),
            _ => None,
        })
    }
}
