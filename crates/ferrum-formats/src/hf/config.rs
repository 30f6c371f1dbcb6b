//! A JSON object of a Hugging Face folder, with accessors whose errors name file and field.

use crate::error::Shown;
use crate::{FormatError, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Largest JSON file read through [`HfConfig::open`].
const MAX_SIZE: u64 = 16 << 20;
/// Deepest nesting of arrays and objects.
const MAX_DEPTH: u64 = 64;

/// `config.json`, one of its neighbours, or a section of it.
///
/// A field that is `null` counts as absent, as in Python. Names may be given as they stand in the
/// object only; a nested object is reached through [`HfConfig::section`].
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    path: PathBuf,
    /// `text_config.` within a section; empty at the top.
    prefix: String,
    map: Map<String, Value>,
}

impl HfConfig {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// [`FormatError`] when it cannot be read, is too large or too deep, or is no JSON object.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_slice(path, &crate::files::read_limited(path, MAX_SIZE)?)
    }

    /// Parses JSON text; `path` is for messages.
    ///
    /// Python writes non-finite numbers as `NaN` and `Infinity`, which JSON does not know; they
    /// read as strings, which no accessor of a number takes.
    ///
    /// # Errors
    /// [`FormatError::Syntax`], or [`FormatError::Limit`] when it nests too deep.
    pub fn from_slice(path: impl Into<PathBuf>, text: &[u8]) -> Result<Self> {
        let path = path.into();
        let value = parse(&path, text)?;
        Self::of_value(path, String::new(), value)
    }

    /// Reads the objects of an array, the whole of the file at `path`.
    ///
    /// # Errors
    /// As [`open`](Self::open); also when the file is no array of objects.
    pub fn open_list(path: impl AsRef<Path>) -> Result<Vec<Self>> {
        let path = path.as_ref();
        let objects = match parse(path, &crate::files::read_limited(path, MAX_SIZE)?)? {
            Value::Array(objects) => objects,
            other => {
                let reason = format!("found {}, expected a list", describe(&other));
                return Err(FormatError::syntax(path, reason));
            }
        };
        let objects = objects.into_iter().enumerate();
        let config = |(i, value)| Self::of_value(path.into(), format!("[{i}]."), value);
        objects.map(config).collect()
    }

    fn of_value(path: PathBuf, prefix: String, value: Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(HfConfig { path, prefix, map }),
            other => {
                let place = match prefix.strip_suffix('.') {
                    Some(place) => format!("{place}: "),
                    None => prefix,
                };
                let reason = format!("{place}found {}, expected an object", describe(&other));
                Err(FormatError::syntax(&path, reason))
            }
        }
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The raw value of a field; `None` when it is absent or `null`.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Whether a field is there and not `null`.
    pub fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// The names of all fields, in the order of the file.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    /// [`FormatError::Field`] for `key`, with what was found there.
    pub fn field_error(&self, key: &str, expected: impl Into<String>) -> FormatError {
        let found = self.map.get(key).map_or_else(|| "nothing".into(), describe);
        FormatError::field(&self.path, &self.full_name(key), found, expected.into())
    }

    fn full_name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn read<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match convert(value) {
                Some(x) => Ok(Some(x)),
                None => Err(self.field_error(key, expected)),
            },
        }
    }

    fn missing(&self, key: &str, expected: &'static str) -> FormatError {
        FormatError::missing_field(&self.path, &self.full_name(key), expected)
    }

    /// A non-negative integer (a float without fraction counts).
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn usize(&self, key: &str) -> Result<Option<usize>> {
        self.read(key, "a non-negative integer", as_usize)
    }

    /// An integer of at least 1 that must be there.
    ///
    /// # Errors
    /// [`FormatError::MissingField`], [`FormatError::Field`].
    pub fn require_usize(&self, key: &str) -> Result<usize> {
        const EXPECTED: &str = "a positive integer";
        self.read(key, EXPECTED, |v| as_usize(v).filter(|&n| n > 0))?
            .ok_or_else(|| self.missing(key, EXPECTED))
    }

    /// A finite number.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.read(key, "a number", Value::as_f64)
    }

    /// A finite number that must be there.
    ///
    /// # Errors
    /// [`FormatError::MissingField`], [`FormatError::Field`].
    pub fn require_f64(&self, key: &str) -> Result<f64> {
        self.f64(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    /// A truth value.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Value::as_bool)
    }

    /// Text.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.read(key, "a string", Value::as_str)
    }

    /// Text that must be there.
    ///
    /// # Errors
    /// [`FormatError::MissingField`], [`FormatError::Field`].
    pub fn require_str(&self, key: &str) -> Result<&str> {
        self.str(key)?.ok_or_else(|| self.missing(key, "a string"))
    }

    /// A list of non-negative integers.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn usizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        self.read(key, "a list of non-negative integers", |v| {
            v.as_array()?.iter().map(as_usize).collect()
        })
    }

    /// A list of numbers.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn f64s(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.read(key, "a list of numbers", |v| {
            v.as_array()?.iter().map(Value::as_f64).collect()
        })
    }

    /// A list of strings.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn strs(&self, key: &str) -> Result<Option<Vec<&str>>> {
        self.read(key, "a list of strings", |v| {
            v.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    /// A token id, or a list of them; empty when absent.
    ///
    /// # Errors
    /// [`FormatError::Field`].
    pub fn token_ids(&self, key: &str) -> Result<Vec<ferrum_types::TokenId>> {
        let id = |v: &Value| v.as_u64().and_then(|x| u32::try_from(x).ok());
        let ids = self.read(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|x| vec![x]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// A nested object as a config of its own, whose errors say `key.field`.
    ///
    /// # Errors
    /// [`FormatError::Field`] when it is no object.
    pub fn section(&self, key: &str) -> Result<Option<HfConfig>> {
        let map = self.read(key, "an object", Value::as_object)?;
        Ok(map.map(|map| HfConfig {
            path: self.path.clone(),
            prefix: format!("{}.", self.full_name(key)),
            map: map.clone(),
        }))
    }

    /// An empty object of the same file.
    pub(super) fn without_fields(&self) -> HfConfig {
        HfConfig {
            map: Map::new(),
            ..self.clone()
        }
    }

    /// The config of the text decoder: `text_config` of a multimodal model, else this one.
    ///
    /// # Errors
    /// [`FormatError::Field`] when `text_config` is no object.
    pub fn text_config(&self) -> Result<HfConfig> {
        Ok(self.section("text_config")?.unwrap_or_else(|| self.clone()))
    }

    /// `architectures`, the class names of the model; empty when absent.
    ///
    /// # Errors
    /// [`FormatError::Field`] when it is no list of strings.
    pub fn architectures(&self) -> Result<Vec<&str>> {
        Ok(self.strs("architectures")?.unwrap_or_default())
    }

    /// `model_type`, the family's name (`llama`, `qwen3`).
    ///
    /// # Errors
    /// [`FormatError`] when it is missing or no string.
    pub fn model_type(&self) -> Result<&str> {
        self.require_str("model_type")
    }
}

/// What messages say was found.
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => format!("{b}"),
        Value::Number(n) => format!("number {n}"),
        Value::String(s) => format!("string \"{}\"", Shown(s)),
        Value::Array(list) => {
            let text = value.to_string();
            match text.len() {
                0..=60 => format!("list {}", Shown(&text)),
                _ => format!("a list of {} values", list.len()),
            }
        }
        Value::Object(map) => format!("an object of {} fields", map.len()),
    }
}

fn as_usize(value: &Value) -> Option<usize> {
    if let Some(n) = value.as_u64() {
        return usize::try_from(n).ok();
    }
    // Some converters write every number as a float; 2^53 is where floats stop being exact.
    let x = value.as_f64()?;
    (x.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(&x)).then_some(x as usize)
}

/// A JSON value of limited depth; `path` is for messages.
fn parse(path: &Path, text: &[u8]) -> Result<Value> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let text = without_non_finite(path, text)?;
    serde_json::from_slice(&text).map_err(|e| FormatError::syntax(path, e))
}

/// Checks the nesting and puts Python's `NaN` and `Infinity` into quotes.
fn without_non_finite(path: &Path, text: &[u8]) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let (mut in_string, mut escaped, mut depth) = (false, false, 0u64);
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        if in_string {
            in_string = escaped || byte != b'"';
            escaped = !escaped && byte == b'\\';
        } else {
            match byte {
                b'"' => in_string = true,
                b'[' | b'{' => depth += 1,
                b']' | b'}' => depth = depth.saturating_sub(1),
                b'-' | b'N' | b'I' => {
                    let words: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];
                    if let Some(word) = words.iter().find(|word| rest.starts_with(word)) {
                        out.push(b'"');
                        out.extend(*word);
                        out.push(b'"');
                        rest = &rest[word.len()..];
                        continue;
                    }
                }
                _ => {}
            }
            if depth > MAX_DEPTH {
                return Err(FormatError::limit(path, "nesting depth", depth, MAX_DEPTH));
            }
        }
        out.push(byte);
        rest = tail;
    }
    Ok(out)
}
