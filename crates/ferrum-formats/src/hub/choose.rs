//! Chooses the files of a repository that make the requested model.
//!
//! The same rules hold for what a hub lists and for what a cache holds, so a cached model is found
//! without asking anybody.

use super::names::{ModelName, RepoId};
use crate::error::Shown;
use crate::files::{CONVERT_HINT, PICKLES};
use crate::{FormatError, Result};
use std::collections::{BTreeMap, HashSet};

/// Beside the weights of a Hugging Face folder: all that Ferrum reads. What lacks is taken for not said, so a file that is
/// left out here makes other numbers than its folder does.
const METADATA_FILES: [&str; 13] = [
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
];

/// Further templates.
const TEMPLATES: &str = "additional_chat_templates/";

/// Whether a file is the config of a module of sentence-transformers, as `sentence_bert_config.json` or
/// `1_Pooling/config.json`.
fn is_of_module(file: &str) -> bool {
    if file.starts_with("sentence_") && file.ends_with("_config.json") && !file.contains('/') {
        return true;
    }
    let folder = file.strip_suffix("/config.json");
    folder.and_then(module_name).is_some()
}

/// Whether a file has the weights of a linear map behind pooling, as `2_Dense/model.safetensors` or, where a model has maps to
/// several sizes, `2_Dense_1024/model.safetensors`.
fn is_of_dense(file: &str) -> bool {
    let folder = file.strip_suffix("/model.safetensors");
    let name = folder.and_then(module_name).unwrap_or_default();
    name == "Dense" || name.starts_with("Dense_")
}

/// What a module is whose folder is called so.
fn module_name(folder: &str) -> Option<&str> {
    let (number, name) = folder.split_once('_')?;
    let is_one = number.parse::<u8>().is_ok() && !name.is_empty() && !name.contains('/');
    is_one.then_some(name)
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Default of several GGUF files: the usual choice, else the one that is as good as the original.
const USUAL: [&str; 2] = ["Q4_K_M", "Q8_0"];

/// Most names in a message.
const MAX_NAMES: usize = 24;

/// Which files of a model a command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DownloadScope {
    /// All of it.
    Model,
    /// Tokenizer and chat template. Of a Hugging Face folder this leaves out the weights.
    Tokenizer,
}

/// The files of a model that are downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectedFiles {
    /// Config, tokenizer and the other files beside the weights.
    pub metadata_files: Vec<String>,
    /// The weights.
    pub weights: Weights,
    /// Whether the file of the weights was asked for by name, and is what a reader opens.
    named: bool,
}

/// The weights of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Weights {
    /// Not needed.
    None,
    /// GGUF files, which are all of the model: one, or its parts in their order.
    Gguf(Vec<String>),
    /// One safetensors file.
    Safetensors(String),
    /// An index that names safetensors files.
    Index(String),
}

impl SelectedFiles {
    /// What a reader opens, inside the folder of the snapshot; `None`: the folder itself.
    pub fn entry(&self) -> Option<&str> {
        match &self.weights {
            Weights::Gguf(files) => files.first().map(String::as_str),
            Weights::Safetensors(file) if self.named => Some(file),
            _ => None,
        }
    }
}

/// Selects the files to download from `model`'s repository.
///
/// # Errors
/// [`FormatError::Hub`] when there is no such file, nothing that can be run, or no way to choose.
pub fn select_files(
    model: &ModelName,
    files: &[String],
    scope: DownloadScope,
) -> Result<SelectedFiles> {
    let listing = Listing {
        repo: &model.repo,
        files,
    };
    match &model.file {
        Some(file) => listing.named(file, scope),
        None => listing.usual(scope),
    }
}

/// Whether `file` of a repository belongs to what `wanted` names: a path, or the end of a GGUF file's name.
pub(super) fn is_named(file: &str, wanted: &str) -> bool {
    let part = || is_gguf(wanted) && Gguf::new(file).whole == Gguf::new(wanted).whole;
    file == wanted || (is_gguf(file) && (part() || ends_with_tag(file, wanted)))
}

struct Listing<'a> {
    repo: &'a RepoId,
    files: &'a [String],
}

impl Listing<'_> {
    fn has(&self, name: &str) -> bool {
        self.files.iter().any(|file| file == name)
    }

    fn error(&self, reason: impl std::fmt::Display, hint: String) -> FormatError {
        FormatError::hub(&self.repo.to_string(), reason, hint)
    }

    /// What is fetched beside these weights.
    fn metadata_files(&self, weights: &Weights) -> Vec<String> {
        let dense = |file: &str| *weights != Weights::None && is_of_dense(file);
        let template = |file: &str| file.starts_with(TEMPLATES) && file.ends_with(".jinja");
        let wanted = |file: &&String| {
            METADATA_FILES.contains(&file.as_str())
                || template(file)
                || is_of_module(file)
                || dense(file)
        };
        self.files.iter().filter(wanted).cloned().collect()
    }

    fn folder(&self, weights: Weights, named: bool) -> SelectedFiles {
        SelectedFiles {
            metadata_files: self.metadata_files(&weights),
            weights,
            named,
        }
    }

    /// The file that was named.
    fn named(&self, wanted: &str, scope: DownloadScope) -> Result<SelectedFiles> {
        if !self.has(wanted) {
            let ggufs = self.ggufs();
            return match matching(&ggufs, wanted).as_slice() {
                [one] => self.gguf(one),
                [] => Err(self.error(
                    format!("has no file \"{}\"", Shown(wanted)),
                    self.names("there are", self.runnable()),
                )),
                several => Err(self.error(
                    format!("has {} files for \"{}\"", several.len(), Shown(wanted)),
                    self.names("name one of them", several.iter().map(|g| g.file).collect()),
                )),
            };
        }
        if is_gguf(wanted) {
            return self.gguf(&Gguf::new(wanted));
        }
        if wanted.ends_with(".safetensors") && !wanted.contains('/') {
            let weights = match scope {
                DownloadScope::Model => Weights::Safetensors(wanted.to_owned()),
                DownloadScope::Tokenizer => Weights::None,
            };
            return Ok(self.folder(weights, true));
        }
        let name = Shown(wanted);
        if is_pickle(wanted) {
            let reason = format!("\"{name}\" is a Python pickle");
            return Err(self.error(reason, CONVERT_HINT.into()));
        }
        Err(self.error(
            format!("\"{name}\" is no model file"),
            self.names("there are", self.runnable()),
        ))
    }

    /// The default, without a named file.
    fn usual(&self, scope: DownloadScope) -> Result<SelectedFiles> {
        if scope == DownloadScope::Tokenizer && self.has("tokenizer.json") {
            return Ok(self.folder(Weights::None, false));
        }
        let safetensors = self.safetensors();
        if let (true, [_, ..]) = (self.has("config.json"), safetensors.as_slice()) {
            let weights = if self.has(SINGLE) {
                Weights::Safetensors(SINGLE.into())
            } else if self.has(INDEX) {
                Weights::Index(INDEX.into())
            } else if let [only] = safetensors.as_slice() {
                Weights::Safetensors((*only).to_owned())
            } else {
                let reason = format!(
                    "holds {} .safetensors files but no {INDEX}",
                    safetensors.len()
                );
                return Err(self.error(reason, self.names("name one of them", safetensors)));
            };
            return Ok(self.folder(weights, false));
        }
        let ggufs = self.ggufs();
        for tag in USUAL {
            match matching(&ggufs, tag).as_slice() {
                [] => {}
                [one] => return self.gguf(one),
                // Several models, or several kinds of it.
                _ => break,
            }
        }
        match ggufs.as_slice() {
            [one] => self.gguf(one),
            [] => Err(self.nothing(&safetensors)),
            several => {
                let reason = format!(
                    "has {} GGUF files, and none is the usual one",
                    several.len()
                );
                let names = several.iter().map(|g| g.file).collect();
                Err(self.error(reason, self.names("name one of them", names)))
            }
        }
    }

    fn nothing(&self, safetensors: &[&str]) -> FormatError {
        if !safetensors.is_empty() {
            let reason = "has safetensors but no config.json, so its architecture is unknown";
            return self.error(reason, "an adapter is no model; give its base model".into());
        }
        if self.files.iter().any(|file| is_pickle(file)) {
            return self.error("has only Python pickles", CONVERT_HINT.into());
        }
        self.error("holds neither safetensors nor GGUF files", String::new())
    }

    fn gguf(&self, gguf: &Gguf<'_>) -> Result<SelectedFiles> {
        let files = match gguf.parts {
            None => vec![gguf.file.to_owned()],
            Some(parts) => self.parts(gguf.whole, extension(gguf.file), parts)?,
        };
        Ok(SelectedFiles {
            metadata_files: Vec::new(),
            weights: Weights::Gguf(files),
            named: true,
        })
    }

    /// All parts of a split file, the first one first.
    fn parts(&self, whole: &str, extension: &str, count: u32) -> Result<Vec<String>> {
        let there: HashSet<&str> = self.files.iter().map(String::as_str).collect();
        let names = (1..=count).map(|part| format!("{whole}-{part:05}-of-{count:05}.{extension}"));
        names
            .map(|name| match there.contains(name.as_str()) {
                true => Ok(name),
                false => Err(self.error(
                    format!("lacks the part \"{}\"", Shown(&name)),
                    String::new(),
                )),
            })
            .collect()
    }

    fn safetensors(&self) -> Vec<&str> {
        let wanted = |file: &&str| file.ends_with(".safetensors") && !file.contains('/');
        self.files
            .iter()
            .map(String::as_str)
            .filter(wanted)
            .collect()
    }

    /// The GGUF files that are language models, each split one counted once.
    fn ggufs(&self) -> Vec<Gguf<'_>> {
        let mut found = BTreeMap::new();
        for file in self.files.iter().filter(|file| is_gguf(file)) {
            let name = base_name(file).to_ascii_lowercase();
            if name.contains("mmproj") || name.contains("imatrix") {
                continue;
            }
            let gguf = Gguf::new(file);
            found.entry(gguf.whole).or_insert(gguf);
        }
        found.into_values().collect()
    }

    fn runnable(&self) -> Vec<&str> {
        let ggufs = self.ggufs().into_iter().map(|gguf| gguf.file);
        self.safetensors().into_iter().chain(ggufs).collect()
    }

    /// A hint with names that can be given.
    fn names(&self, words: &str, mut names: Vec<&str>) -> String {
        names.sort_unstable();
        let Some(first) = names.first() else {
            return String::new();
        };
        let more = match names.len().saturating_sub(MAX_NAMES) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let shown: Vec<_> = names
            .iter()
            .take(MAX_NAMES)
            .map(|name| Shown(name).to_string())
            .collect();
        format!(
            "{words}: {}{more} (such as {}:{})",
            shown.join(", "),
            self.repo,
            Shown(first)
        )
    }
}

/// A GGUF file, or the first part of a split one.
#[derive(Debug)]
struct Gguf<'a> {
    file: &'a str,
    /// Its path without the number of the part.
    whole: &'a str,
    parts: Option<u32>,
}

impl<'a> Gguf<'a> {
    fn new(file: &'a str) -> Self {
        let stem = stem(file);
        match split_parts(stem) {
            Some((whole, parts)) => Self {
                file,
                whole,
                parts: Some(parts),
            },
            None => Self {
                file,
                whole: stem,
                parts: None,
            },
        }
    }
}

/// Of `x-00001-of-00003`: `x` and 3.
fn split_parts(stem: &str) -> Option<(&str, u32)> {
    let number = |text: &str| -> Option<u32> {
        let digits = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|_| digits)
    };
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (whole, part) = rest.rsplit_once('-')?;
    number(part)?;
    number(count)
        .filter(|&count| count > 1)
        .map(|count| (whole, count))
}

fn matching<'g, 'a>(ggufs: &'g [Gguf<'a>], tag: &str) -> Vec<&'g Gguf<'a>> {
    ggufs
        .iter()
        .filter(|gguf| ends_with_tag(gguf.file, tag))
        .collect()
}

/// Whether the name of a file, or of the folder that it lies in, ends with `tag` as a word.
fn ends_with_tag(file: &str, tag: &str) -> bool {
    let stem = Gguf::new(file).whole.to_ascii_lowercase();
    let tag = tag.to_ascii_lowercase();
    let (folder, name) = stem.rsplit_once('/').unwrap_or(("", &stem));
    [name, base_name(folder)].into_iter().any(|name| {
        let before = name.strip_suffix(tag.as_str());
        before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_']))
    })
}

fn is_gguf(file: &str) -> bool {
    extension(file).eq_ignore_ascii_case("gguf")
}

fn is_pickle(file: &str) -> bool {
    PICKLES.contains(&extension(file))
}

fn base_name(file: &str) -> &str {
    file.rsplit_once('/').map_or(file, |(_, name)| name)
}

fn extension(file: &str) -> &str {
    base_name(file).rsplit_once('.').map_or("", |(_, e)| e)
}

fn stem(file: &str) -> &str {
    match extension(file) {
        "" => file,
        extension => &file[..file.len() - extension.len() - 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chosen(model: &str, files: &[&str], scope: DownloadScope) -> Result<SelectedFiles> {
        let files: Vec<_> = files.iter().map(|file| (*file).to_owned()).collect();
        select_files(&ModelName::parse(model).unwrap(), &files, scope)
    }

    #[test]
    fn a_folder_is_what_its_readers_read() {
        let common = [
            "README.md",
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.json",
            "additional_chat_templates/rag.jinja",
            "preprocessor_config.json",
            "processor_config.json",
            "modules.json",
            "config_sentence_transformers.json",
            "sentence_bert_config.json",
            "1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "2_Dense_1024/model.safetensors",
            "0_Transformer/model.safetensors",
            "1_Pooling/x/config.json",
            "openvino/config.json",
            "original/consolidated.pth",
            "onnx/model.onnx",
            "pytorch_model.bin",
        ];
        let single = [&common[..], &["model.safetensors"]].concat();
        let choice = chosen("a/b", &single, DownloadScope::Model).unwrap();
        assert_eq!(choice.weights, Weights::Safetensors(SINGLE.into()));
        assert_eq!(
            choice.metadata_files,
            [
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "additional_chat_templates/rag.jinja",
                "preprocessor_config.json",
                "processor_config.json",
                "modules.json",
                "config_sentence_transformers.json",
                "sentence_bert_config.json",
                "1_Pooling/config.json",
                "2_Dense/config.json",
                "2_Dense/model.safetensors",
                "2_Dense_1024/model.safetensors",
            ]
        );
        assert_eq!(choice.entry(), None);
        let shards = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        let sharded = [&common[..], &shards, &[INDEX, "consolidated.safetensors"]].concat();
        let choice = chosen("a/b", &sharded, DownloadScope::Model).unwrap();
        assert_eq!(choice.weights, Weights::Index(INDEX.into()));
        let choice = chosen("a/b", &sharded, DownloadScope::Tokenizer).unwrap();
        assert_eq!(
            (choice.weights, choice.metadata_files.len()),
            (Weights::None, 12)
        );
        let choice = chosen(
            "a/b:consolidated.safetensors",
            &sharded,
            DownloadScope::Model,
        )
        .unwrap();
        assert_eq!(choice.entry(), Some("consolidated.safetensors"));
    }

    #[test]
    fn a_gguf_file_is_chosen_sensibly() {
        let cases: &[(&str, &[&str], &str)] = &[
            (
                "a/b",
                &["x-Q8_0.gguf", "x-Q4_K_M.gguf", "x-Q2_K.gguf"],
                "x-Q4_K_M.gguf",
            ),
            ("a/b", &["x.q8_0.gguf", "x.q5_0.gguf"], "x.q8_0.gguf"),
            ("a/b", &["strange.gguf", "README.md"], "strange.gguf"),
            (
                "a/b",
                &["x-Q6_K.gguf", "mmproj-F16.gguf", "x.imatrix.gguf"],
                "x-Q6_K.gguf",
            ),
            ("a/b:q5_0", &["x-Q5_0.gguf", "x-Q4_K_M.gguf"], "x-Q5_0.gguf"),
            (
                "a/b:Q4_K_M",
                &["Q4_K_M/x.gguf", "Q8_0/x.gguf"],
                "Q4_K_M/x.gguf",
            ),
            (
                "a/b:x-Q2_K.gguf",
                &["x-Q2_K.gguf", "y-Q2_K.gguf"],
                "x-Q2_K.gguf",
            ),
            (
                "a/b:UD-Q4_K_XL",
                &["x-UD-Q4_K_XL.gguf", "x-Q4_K_M.gguf"],
                "x-UD-Q4_K_XL.gguf",
            ),
        ];
        for (model, files, expected) in cases {
            let choice = chosen(model, files, DownloadScope::Model).unwrap();
            assert_eq!(
                choice.weights,
                Weights::Gguf(vec![(*expected).into()]),
                "{model} {files:?}"
            );
            assert_eq!(choice.entry(), Some(*expected));
        }
    }

    #[test]
    fn a_split_file_is_all_of_its_parts() {
        let parts = [
            "Q4_K_M/x-00002-of-00003.gguf",
            "Q4_K_M/x-00001-of-00003.gguf",
            "Q4_K_M/x-00003-of-00003.gguf",
        ];
        for model in ["a/b", "a/b:Q4_K_M", "a/b:Q4_K_M/x-00002-of-00003.gguf"] {
            let choice = chosen(
                model,
                &[&parts[..], &["y-Q2_K.gguf"]].concat(),
                DownloadScope::Model,
            )
            .unwrap();
            let expected = [parts[1], parts[0], parts[2]].map(str::to_owned);
            assert_eq!(choice.weights, Weights::Gguf(expected.into()));
            assert_eq!(choice.entry(), Some(parts[1]));
        }
        for part in parts {
            assert!(
                is_named(part, "q4_k_m") && is_named(part, parts[0]) && !is_named(part, "Q8_0")
            );
        }
    }

    #[test]
    fn what_cannot_be_chosen_is_said() {
        let cases: &[(&str, &[&str], &str)] = &[
            (
                "a/b",
                &["x-Q5_0.gguf", "x-Q6_K.gguf"],
                "name one of them: x-Q5_0.gguf, x-Q6_K.gguf",
            ),
            (
                "a/b",
                &["x-Q4_K_M.gguf", "y-Q4_K_M.gguf"],
                "(such as a/b:x-Q4_K_M.gguf)",
            ),
            (
                "a/b",
                &["x-Q4_K_M.gguf", "y-Q4_K_M.gguf", "x-Q8_0.gguf"],
                "has 3 GGUF files",
            ),
            (
                "a/b:Q4_K_M",
                &["x-Q4_K_M.gguf", "y-Q4_K_M.gguf"],
                "has 2 files for \"Q4_K_M\"",
            ),
            (
                "a/b:Q3_K",
                &["x-Q4_K_M.gguf"],
                "has no file \"Q3_K\"\nhint: there are: x-Q4_K_M.gguf",
            ),
            ("a/b:K_M", &["x-Q4_K_Mx.gguf"], "has no file \"K_M\""),
            (
                "a/b:Q8_0",
                &["Q8_0/x-00001-of-00002.gguf"],
                "lacks the part \"Q8_0/x-00002-of-00002.gguf\"",
            ),
            ("a/b", &["x-00001-of-99999.gguf"], "lacks the part"),
            (
                "a/b",
                &["config.json", "pytorch_model.bin"],
                "has only Python pickles",
            ),
            (
                "a/b:pytorch_model.bin",
                &["pytorch_model.bin"],
                "is a Python pickle",
            ),
            ("a/b", &["adapter_model.safetensors"], "no config.json"),
            (
                "a/b",
                &["config.json", "x.safetensors", "y.safetensors"],
                "but no model.safetensors.index",
            ),
            (
                "a/b:config.json",
                &["config.json", "x.gguf"],
                "is no model file",
            ),
            ("a/b", &["README.md"], "holds neither safetensors nor GGUF"),
            ("a/b", &[], "holds neither safetensors nor GGUF"),
        ];
        for (model, files, expected) in cases {
            let error = chosen(model, files, DownloadScope::Model)
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{model} {files:?}: {error}");
            assert!(error.starts_with("a/b: "), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_chosen_is_there(
            files in prop::collection::vec("(x|y|Q4_K_M|mmproj)[-./](Q8_0|00001-of-00002|config)[.](gguf|safetensors|json|bin|é)", 0..6),
            file in prop::option::of("(Q8_0|x-Q8_0.gguf|é)"),
        ) {
            let repo = RepoId::parse("a/b").unwrap();
            for scope in [DownloadScope::Model, DownloadScope::Tokenizer] {
                let model = ModelName { repo: repo.clone(), file: file.clone() };
                if let Ok(choice) = select_files(&model, &files, scope) {
                    let weights = match choice.weights {
                        Weights::Gguf(files) => files,
                        Weights::Safetensors(file) | Weights::Index(file) => vec![file],
                        Weights::None => Vec::new(),
                    };
                    for file in choice.metadata_files.iter().chain(&weights) {
                        prop_assert!(files.contains(file));
                    }
                }
            }
        }
    }
}
