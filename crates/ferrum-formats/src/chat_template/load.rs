//! Where models keep their chat templates.

use super::error::TemplateError;
use super::{ChatTemplate, MAX_TEMPLATE_BYTES};
use crate::Gguf;
use crate::tokenizer::{SpecialIds, Tokenizer};
use serde_json::Value as Json;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Special tokens that are variables of a template.
const SPECIALS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// The longest configuration file that is read for a template, in bytes: added tokens may make a
/// `tokenizer_config.json` long.
const MAX_CONFIG_BYTES: usize = 1 << 26;

fn read(path: &Path, limit: usize) -> Result<Option<String>, TemplateError> {
    let failed = |error: std::io::Error| TemplateError::Read {
        path: path.into(),
        reason: error.to_string(),
    };
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut text = String::new();
    file.take(limit as u64 + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() > limit {
        return Err(TemplateError::TooLarge {
            found: text.len(),
            limit,
        });
    }
    Ok(Some(text))
}

fn read_json(path: &Path) -> Result<Json, TemplateError> {
    let Some(text) = read(path, MAX_CONFIG_BYTES)? else {
        return Ok(Json::Null);
    };
    serde_json::from_str(&text).map_err(|error| TemplateError::BadFile {
        path: path.into(),
        reason: format!("not JSON: {error}"),
    })
}

/// A template as text, or a list of objects with `name` and `template`.
fn named(value: &Json, path: &Path) -> Result<Vec<(String, String)>, TemplateError> {
    match value {
        Json::Null => Ok(Vec::new()),
        Json::String(source) => Ok(vec![("default".into(), source.clone())]),
        Json::Array(list) => list
            .iter()
            .map(|entry| {
                let text = |key: &str| entry.get(key).and_then(Json::as_str).map(str::to_owned);
                text("name")
                    .zip(text("template"))
                    .ok_or_else(|| TemplateError::BadFile {
                        path: path.into(),
                        reason: "chat_template: an entry lacks `name` or `template`".into(),
                    })
            })
            .collect(),
        _ => Err(TemplateError::BadFile {
            path: path.into(),
            reason: "chat_template is neither text nor a list of templates".into(),
        }),
    }
}

impl ChatTemplate {
    /// The template of a Hugging Face folder: `chat_template.jinja` (and what is in
    /// `additional_chat_templates`), else `chat_template.json`, else `chat_template` in
    /// `tokenizer_config.json`. `None`: the model has no template.
    pub fn from_hf_dir(dir: impl AsRef<Path>) -> Result<Option<Self>, TemplateError> {
        let dir = dir.as_ref();
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?;
        let map = read_json(&dir.join("special_tokens_map.json"))?;
        let mut sources = Vec::new();
        if let Some(source) = read(&dir.join("chat_template.jinja"), MAX_TEMPLATE_BYTES)? {
            sources.push(("default".to_owned(), source));
            sources.extend(additional(&dir.join("additional_chat_templates"))?);
        }
        if sources.is_empty() {
            let path = dir.join("chat_template.json");
            let file = read_json(&path)?;
            sources = named(file.get("chat_template").unwrap_or(&Json::Null), &path)?;
        }
        if sources.is_empty() {
            let value = config.get("chat_template").unwrap_or(&Json::Null);
            sources = named(value, &config_path)?;
        }
        if sources.is_empty() {
            return Ok(None);
        }
        let text = |name: &str| {
            [&config, &map].into_iter().find_map(|file| {
                let value = file.get(name)?;
                value
                    .as_str()
                    .or_else(|| value.get("content")?.as_str())
                    .map(str::to_owned)
            })
        };
        let specials = SPECIALS
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), text(name)?)));
        Self::from_named(sources, specials.collect()).map(Some)
    }

    /// The template of a GGUF file (`tokenizer.chat_template`, and `tokenizer.chat_template.NAME`
    /// for the names in `tokenizer.chat_templates`). `None`: the file has no template.
    pub fn from_gguf(gguf: &Gguf, tokenizer: &Tokenizer) -> Result<Option<Self>, TemplateError> {
        let bad = |error: crate::FormatError| TemplateError::BadFile {
            path: gguf.path().into(),
            reason: error.to_string(),
        };
        let mut sources = Vec::new();
        if let Some(source) = gguf.str("tokenizer.chat_template").map_err(bad)? {
            sources.push(("default".to_owned(), source.to_owned()));
        }
        for name in gguf
            .strs("tokenizer.chat_templates")
            .map_err(bad)?
            .unwrap_or_default()
        {
            if let Some(source) = gguf
                .str(&format!("tokenizer.chat_template.{name}"))
                .map_err(bad)?
            {
                sources.push((name.to_owned(), source.to_owned()));
            }
        }
        if sources.is_empty() {
            return Ok(None);
        }
        Self::from_named(sources, specials_of(tokenizer)).map(Some)
    }
}

/// The texts of a tokenizer's special tokens, as variables of a template.
fn specials_of(tokenizer: &Tokenizer) -> Vec<(String, String)> {
    let SpecialIds {
        bos,
        eos,
        unk,
        sep,
        pad,
        cls,
        mask,
        ..
    } = tokenizer.special();
    SPECIALS
        .iter()
        .zip([bos, eos, unk, sep, pad, cls, mask])
        .filter_map(|(name, id)| Some(((*name).to_owned(), tokenizer.token_text(id?)?)))
        .collect()
}

fn additional(dir: &Path) -> Result<Vec<(String, String)>, TemplateError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(TemplateError::Read {
                path: dir.into(),
                reason: error.to_string(),
            });
        }
    };
    let mut paths: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "jinja")
    });
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        let name = path
            .file_stem()
            .map(|name| name.to_string_lossy().into_owned());
        if let (Some(name), Some(source)) = (name, read(&path, MAX_TEMPLATE_BYTES)?) {
            found.push((name, source));
        }
    }
    Ok(found)
}
