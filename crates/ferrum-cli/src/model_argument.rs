//! Which word of a command line is the model and which is text, where a command takes both.
//!
//! `ferrum run` takes `MODEL PROMPT`, and either may be left out. A word that can only be a path is
//! never sent as a prompt, and a note says how an ambiguous word was read.

use crate::args::HubArgs;
use crate::failure::{Failure, Outcome};
use crate::{hub, ui};
use ferrum_formats::Shown;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Endings of files that hold weights.
const WEIGHTS: [&str; 2] = [".gguf", ".safetensors"];

/// A model, `None` for the demo model, and what it is asked.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ModelAndText {
    pub(crate) model: Option<PathBuf>,
    pub(crate) text: Option<String>,
}

/// What the only word of a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// Something that is there, or a name of a hub.
    Model,
    /// A path to nothing.
    MissingFile,
    Text,
    /// Text of one word, which may have been meant as a model.
    Doubtful,
}

/// Takes the words of a command apart: `first` is `MODEL` and `second` the text (`PROMPT`, as it is called in
/// messages), but one alone is either, and with `--model` it is the text.
pub(crate) fn model_and_text(
    flag: Option<&Path>,
    first: Option<&OsStr>,
    second: Option<&OsStr>,
    text: &str,
    hub: &HubArgs,
) -> Outcome<ModelAndText> {
    let word = |text: &OsStr| word(text, Path::new(text).exists(), hub);
    let (model, words) = match (flag, first, second) {
        (Some(flag), Some(first), Some(_)) => return Err(given_twice(flag, first)),
        (Some(flag), words, None) => (Some(flag.to_owned()), words),
        (None, Some(first), None) => match word(first)? {
            Word::Model => (Some(first.into()), None),
            Word::MissingFile if has_weights_ending(&first.to_string_lossy()) => {
                return Err(missing(first, "check the path"));
            }
            Word::MissingFile => {
                let hint =
                    format!("a {text} of one word goes after the model, or comes through a pipe");
                return Err(missing(first, &hint));
            }
            Word::Text => (None, Some(first)),
            Word::Doubtful => {
                let shown = first.to_string_lossy();
                ui::say(&format!(
                    "note: \"{}\" is neither a path nor ORG/NAME of a hub nor in the cache, and is taken as the {text} for the demo model\nhint: a model is given as `model.gguf`, `./folder` or `ORG/NAME`; `ferrum list` shows those in the cache",
                    Shown(&shown)
                ));
                (None, Some(first))
            }
        },
        (None, Some(first), Some(second)) => {
            let hint = match word(first)? {
                Word::Model => None,
                Word::MissingFile => Some("check the path".to_owned()),
                _ if Path::new(second).exists()
                    || has_weights_ending(&second.to_string_lossy()) =>
                {
                    Some(format!("the model comes before the {text}"))
                }
                _ => Some(format!("a {text} of several words goes in quotes")),
            };
            if let Some(hint) = hint {
                return Err(missing(first, &hint));
            }
            (Some(first.into()), Some(second))
        }
        (_, None, second) => (flag.map(Path::to_owned), second),
    };
    let text = words.map(|words| utf8(words, text)).transpose()?;
    Ok(ModelAndText { model, text })
}

/// Like [`model_and_text`], for a file in place of the text: one word alone is the file.
pub(crate) fn model_and_file<'a>(
    flag: Option<&'a Path>,
    first: Option<&'a OsStr>,
    second: Option<&'a OsStr>,
) -> Outcome<(Option<&'a Path>, &'a Path)> {
    let expected = "hint: the words are MODEL FILE, or FILE alone for the demo model";
    match (flag, first, second) {
        (Some(flag), Some(first), Some(_)) => Err(given_twice(flag, first)),
        (None, Some(model), Some(file)) => Ok((Some(Path::new(model)), Path::new(file))),
        (_, Some(file), None) => {
            let path = Path::new(file);
            let is_model =
                path.is_dir() || has_weights_ending(&file.to_string_lossy()) || hub::is_name(path);
            match flag.is_none() && is_model {
                true => Err(Failure::new(format!(
                    "{} is taken as the model, and there is no text file\n{expected}",
                    path.display()
                ))),
                false => Ok((flag, path)),
            }
        }
        (_, None, _) => Err(Failure::new(format!("there is no text file\n{expected}"))),
    }
}

fn given_twice(flag: &Path, first: &OsStr) -> Failure {
    Failure::new(format!(
        "the model is given twice: {} by --model, and {}",
        flag.display(),
        Path::new(first).display()
    ))
}

fn missing(word: &OsStr, hint: &str) -> Failure {
    let shown = word.to_string_lossy();
    Failure::new(format!(
        "{}: there is no such file or folder, and it is no ORG/NAME of a hub\nhint: {hint}",
        Shown(&shown)
    ))
}

fn utf8(word: &OsStr, what: &str) -> Outcome<String> {
    let text = OsString::from(word).into_string();
    text.map_err(|_| Failure::new(format!("the {what} is not UTF-8")))
}

/// What a word is, of which is known whether there is such a path.
fn word(word: &OsStr, exists: bool, hub: &HubArgs) -> Outcome<Word> {
    if exists {
        return Ok(Word::Model);
    }
    Ok(match word.to_str().map(shape) {
        None => Word::MissingFile,
        Some(Word::Doubtful) if hub::in_cache(Path::new(word), hub)?.is_some() => Word::Model,
        Some(shape) => shape,
    })
}

/// What a word that is no path looks like.
fn shape(text: &str) -> Word {
    let from_a_folder = ["/", "./", "../", "~/"];
    let absolute = from_a_folder.iter().any(|start| text.starts_with(start));
    if text.contains(char::is_whitespace) {
        // A sentence may well have slashes, and end with the name of a file.
        return match absolute && has_weights_ending(text) {
            true => Word::MissingFile,
            false => Word::Text,
        };
    }
    if text.is_empty() || text == "-" {
        return Word::Text;
    }
    if hub::is_name(Path::new(text)) {
        return Word::Model;
    }
    let path_like = text.contains(std::path::is_separator) || text == "~";
    match path_like || has_weights_ending(text) {
        true => Word::MissingFile,
        false => Word::Doubtful,
    }
}

fn has_weights_ending(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    WEIGHTS.iter().any(|ending| lower.ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache with nothing in it.
    fn nowhere() -> HubArgs {
        let cache_dir = Some(concat!(env!("CARGO_MANIFEST_DIR"), "/no-cache").into());
        HubArgs {
            cache_dir,
            ..HubArgs::default()
        }
    }

    #[test]
    fn a_word_is_a_model_or_text() {
        let cases = [
            ("model.gguf", true, Word::Model),
            ("folder", true, Word::Model),
            ("a folder with spaces", true, Word::Model),
            ("Qwen/Qwen3-0.6B", false, Word::Model),
            ("Qwen/Qwen3-0.6B-GGUF:Q8_0", false, Word::Model),
            ("https://hub.example.org/org/demo", false, Word::Model),
            ("model.gguf", false, Word::MissingFile),
            ("MODEL.GGUF", false, Word::MissingFile),
            ("model.safetensors", false, Word::MissingFile),
            ("org/model.gguf", false, Word::MissingFile),
            ("./model", false, Word::MissingFile),
            ("../model", false, Word::MissingFile),
            ("~/model", false, Word::MissingFile),
            ("~", false, Word::MissingFile),
            ("/models/qwen3", false, Word::MissingFile),
            ("/my models/qwen3.gguf", false, Word::MissingFile),
            ("models/qwen/3", false, Word::MissingFile),
            ("Tell me a story.", false, Word::Text),
            ("What is in model.gguf", false, Word::Text),
            ("/bin/sh and ./configure differ how?", false, Word::Text),
            ("Is it and/or?", false, Word::Text),
            ("one\ntwo", false, Word::Text),
            ("-", false, Word::Text),
            ("", false, Word::Text),
            ("llama3", false, Word::Doubtful),
            ("llama3:8b", false, Word::Doubtful),
            ("Hello!", false, Word::Doubtful),
        ];
        for (text, exists, expected) in cases {
            let found = word(OsStr::new(text), exists, &nowhere()).ok();
            assert_eq!(found, Some(expected), "{text:?}");
        }
    }

    #[test]
    fn words_are_taken_apart() {
        let here = env!("CARGO_MANIFEST_DIR");
        let cases = [
            (None, [None, None], Some((None, None))),
            (
                None,
                [Some("Hi there"), None],
                Some((None, Some("Hi there"))),
            ),
            (None, [Some(here), None], Some((Some(here), None))),
            (
                None,
                [Some("a/b"), Some("Hi")],
                Some((Some("a/b"), Some("Hi"))),
            ),
            (
                None,
                [Some("a/b"), Some("-")],
                Some((Some("a/b"), Some("-"))),
            ),
            (Some("a/b"), [None, None], Some((Some("a/b"), None))),
            (
                Some("a/b"),
                [Some("c/d"), None],
                Some((Some("a/b"), Some("c/d"))),
            ),
            (Some("a/b"), [Some("c/d"), Some("Hi")], None),
            (None, [Some("Tell"), Some("me")], None),
            (None, [Some("no/such/file"), None], None),
        ];
        for (flag, [first, second], expected) in cases {
            let found = model_and_text(
                flag.map(Path::new),
                first.map(OsStr::new),
                second.map(OsStr::new),
                "prompt",
                &nowhere(),
            );
            let expected = expected.map(|(model, text)| ModelAndText {
                model: model.map(PathBuf::from),
                text: text.map(str::to_owned),
            });
            assert_eq!(found.ok(), expected, "{flag:?} {first:?} {second:?}");
        }
    }

    #[test]
    fn a_lonely_word_is_a_file_unless_it_is_a_model() {
        let here = env!("CARGO_MANIFEST_DIR");
        let cases = [
            (None, [Some("a.txt"), None], Some((None, "a.txt"))),
            (None, [Some("-"), None], Some((None, "-"))),
            (
                None,
                [Some("m.gguf"), Some("-")],
                Some((Some("m.gguf"), "-")),
            ),
            (
                Some("m.gguf"),
                [Some("a/b"), None],
                Some((Some("m.gguf"), "a/b")),
            ),
            (None, [Some("m.gguf"), None], None),
            (None, [Some("a/b"), None], None),
            (None, [Some(here), None], None),
            (None, [None, None], None),
            (Some("m"), [Some("m.gguf"), Some("a.txt")], None),
        ];
        for (flag, [first, second], expected) in cases {
            let found = model_and_file(
                flag.map(Path::new),
                first.map(OsStr::new),
                second.map(OsStr::new),
            );
            let expected = expected.map(|(model, file)| (model.map(Path::new), Path::new(file)));
            assert_eq!(found.ok(), expected, "{flag:?} {first:?} {second:?}");
        }
    }
}
