//! What a model of embeddings is given before each text: `prompts` of sentence-transformers' `config_sentence_transformers.json`,
//! such as `"query": "search_query: "`.

use crate::pooling::modules_of;
use ferrum_formats::{HfConfig, ModelSource, Shown};
use ferrum_types::Result;
use std::collections::BTreeMap;

const FILE: &str = "config_sentence_transformers.json";

/// Most prompts of a model, and bytes of one: it is put before every text of a request.
const MAX_PROMPTS: usize = 64;
const MAX_BYTES: usize = 4096;

/// The prompts of a model by their names. The default is that of a model without any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingPrompts {
    prompts: BTreeMap<String, String>,
    default: Option<String>,
    /// Whether tokens of a prompt are pooled with those of the text; of no matter without prompts.
    include_prompt: bool,
}

impl EmbeddingPrompts {
    /// Those that a folder has; a GGUF file has none.
    ///
    /// # Errors
    /// [`Error::Model`](ferrum_types::Error::Model) for a file that cannot be read, and for a default that is none of the prompts.
    pub fn of(source: &ModelSource) -> Result<Self> {
        let ModelSource::Hf(folder) = source else {
            return Ok(Self::default());
        };
        let path = folder.dir.join(FILE);
        if !path.exists() {
            return Ok(Self::default());
        }
        let config = HfConfig::open(path)?;
        let mut found = Self {
            default: config.str("default_prompt_name")?.map(str::to_owned),
            ..Self::default()
        };
        if let Some(prompts) = config.section("prompts")? {
            for name in prompts.keys() {
                let text = prompts.require_str(name)?;
                if text.len() > MAX_BYTES || found.prompts.len() == MAX_PROMPTS {
                    let expected = format!("at most {MAX_PROMPTS} prompts of {MAX_BYTES} bytes");
                    return Err(prompts.field_error(name, expected).into());
                }
                found.prompts.insert(name.to_owned(), text.to_owned());
            }
        }
        if let Some(name) = &found.default
            && !found.prompts.contains_key(name)
        {
            let expected = format!("one of its \"prompts\"{}", found.list());
            return Err(config.field_error("default_prompt_name", expected).into());
        }
        found.include_prompt = found.prompts.is_empty() || modules_of(&folder.dir)?.include_prompt;
        Ok(found)
    }

    /// The text before each text: that of the prompt `name`, nothing for an empty name, or where none is named the default's, which
    /// may be nothing.
    ///
    /// # Errors
    /// Why there is no such prompt, for whoever named it.
    pub fn text(&self, name: Option<&str>) -> std::result::Result<&str, String> {
        let named = name.or(self.default.as_deref());
        let Some(name) = named.filter(|name| !name.is_empty()) else {
            return Ok("");
        };
        match self.prompts.get(name) {
            None if self.prompts.is_empty() => Err(format!(
                "found {:?}, the model has no prompts",
                Shown(name).to_string()
            )),
            None => Err(format!(
                "found {:?}, expected one of the model's prompts{}",
                Shown(name).to_string(),
                self.list()
            )),
            Some(text) if !self.include_prompt && !text.is_empty() => Err(format!(
                "the model pools without the prompt {:?} (include_prompt is false), which is not supported; an empty name takes none",
                Shown(name).to_string()
            )),
            Some(text) => Ok(text),
        }
    }

    /// The names, as messages have them.
    fn list(&self) -> String {
        let names: Vec<_> = self
            .prompts
            .keys()
            .take(16)
            .map(|name| Shown(name).to_string())
            .collect();
        format!(" ({})", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(default: Option<&str>, include_prompt: bool) -> EmbeddingPrompts {
        let pair = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
        EmbeddingPrompts {
            prompts: [("query", "query: "), ("document", "")].map(pair).into(),
            default: default.map(str::to_owned),
            include_prompt,
        }
    }

    #[test]
    fn a_prompt_is_found_by_name_or_default() {
        let none = EmbeddingPrompts::default();
        assert_eq!(none.text(None), Ok(""));
        let reason = none.text(Some("query")).unwrap_err();
        assert_eq!(reason, "found \"query\", the model has no prompts");
        let some = prompts(None, true);
        assert_eq!(
            (some.text(None), some.text(Some("query"))),
            (Ok(""), Ok("query: "))
        );
        let reason = some.text(Some("queries")).unwrap_err();
        let expected = "found \"queries\", expected one of the model's prompts (document, query)";
        assert_eq!(reason, expected);
        assert_eq!(prompts(Some("query"), true).text(None), Ok("query: "));
        assert_eq!(prompts(Some("query"), true).text(Some("document")), Ok(""));
    }

    #[test]
    fn a_prompt_that_pooling_leaves_out_is_refused() {
        let some = prompts(Some("query"), false);
        assert!(some.text(None).unwrap_err().contains("include_prompt"));
        assert_eq!(some.text(Some("")), Ok(""));
        assert_eq!(some.text(Some("document")), Ok(""));
    }
}
