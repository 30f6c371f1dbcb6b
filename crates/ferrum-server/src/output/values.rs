//! Arguments that are written one by one as text between markers (Qwen3-Coder, GLM): their types, which only the
//! function's schema knows, and reading them.

use super::deltas::Deltas;
use super::function::Function;
use super::json;
use super::pending_text::{PendingText, overlap};
use serde_json::{Value, json};

/// Most references that are followed to a schema.
const MAX_REFERENCES: usize = 8;

/// What a value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text as it stands.
    Text,
    /// JSON, which is a string at most where it is no JSON.
    Json,
    /// The schema does not say: JSON that is no string, or text.
    Either,
}

/// The schema of a parameter.
pub(super) fn schema<'a>(function: &'a Function, name: &str) -> Option<&'a Value> {
    let root = &function.parameters;
    resolved(root, root)?
        .get("properties")?
        .get(name)
        .and_then(|schema| resolved(root, schema))
}

fn resolved<'a>(root: &'a Value, mut schema: &'a Value) -> Option<&'a Value> {
    for _ in 0..MAX_REFERENCES {
        match schema.get("$ref").and_then(Value::as_str) {
            Some(place) => schema = root.pointer(place.strip_prefix('#')?)?,
            None => return Some(schema),
        }
    }
    None
}

/// What a schema lets a value be.
pub(super) fn kind(root: &Value, schema: Option<&Value>) -> Kind {
    let Some(schema) = schema else {
        return Kind::Either;
    };
    let mut strings = false;
    let mut others = false;
    types(root, schema, 0, &mut |name| match name {
        "string" => strings = true,
        _ => others = true,
    });
    match (strings, others) {
        (true, false) => Kind::Text,
        (false, true) => Kind::Json,
        _ => Kind::Either,
    }
}

fn types(root: &Value, schema: &Value, depth: usize, add: &mut impl FnMut(&str)) {
    let of = |value: &Value| match value {
        Value::String(_) => "string",
        _ => "other",
    };
    let list = |key: &str| schema.get(key).and_then(Value::as_array);
    if let Some(values) = list("enum") {
        return values.iter().for_each(|value| add(of(value)));
    }
    if let Some(value) = schema.get("const") {
        return add(of(value));
    }
    match schema.get("type") {
        Some(Value::String(name)) => return add(name),
        Some(Value::Array(names)) => {
            return names.iter().filter_map(Value::as_str).for_each(add);
        }
        _ => {}
    }
    let branches = ["anyOf", "oneOf", "allOf"].into_iter().find_map(list);
    if let Some(branches) = branches.filter(|_| depth < MAX_REFERENCES) {
        for branch in branches {
            if let Some(branch) = resolved(root, branch) {
                types(root, branch, depth + 1, add);
            }
        }
    }
}

/// A value as JSON text.
fn typed(kind: Kind, text: &str) -> String {
    let text = match kind {
        Kind::Text => return json!(text).to_string(),
        Kind::Json | Kind::Either => text,
    };
    let value = match text.trim() {
        // As Python writes them.
        "True" => Ok(true.into()),
        "False" => Ok(false.into()),
        "None" => Ok(Value::Null),
        trimmed => serde_json::from_str(trimmed),
    };
    match value {
        Ok(Value::String(_)) if kind == Kind::Either => json!(text).to_string(),
        Ok(value) => value.to_string(),
        Err(_) => json!(text).to_string(),
    }
}

/// Reads a value up to the marker that closes it, and gives it out as JSON: text as it comes, all else when it is
/// whole. The marker is text where none of `follow` is behind it.
#[derive(Debug)]
pub(super) struct ValueReader {
    kind: Kind,
    close: &'static str,
    follow: &'static [&'static str],
    /// Whether a line's end at both ends is none of the value's.
    lines: bool,
    begun: bool,
    /// Where in what is held the marker may be.
    seen: usize,
}

impl ValueReader {
    pub(super) fn new(
        kind: Kind,
        close: &'static str,
        follow: &'static [&'static str],
        lines: bool,
    ) -> Self {
        Self {
            kind,
            close,
            follow,
            lines,
            begun: false,
            seen: 0,
        }
    }

    /// Whether the value was read to its end.
    pub(super) fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> bool {
        if !self.begun {
            if held.text().is_empty() && !end {
                return false;
            }
            self.begun = true;
            if self.lines && held.text().starts_with('\n') {
                held.commit(1);
            }
            if self.kind == Kind::Text {
                deltas.arguments("\"");
            }
        }
        match self.closed(held.text(), end) {
            Ok(at) => {
                let value = self.without_line(&held.text()[..at]);
                match self.kind {
                    Kind::Text => deltas.arguments(&(json::escaped(value) + "\"")),
                    kind => deltas.arguments(&typed(kind, value)),
                };
                let marker = at + self.close.len();
                held.commit(marker.min(held.text().len()));
                true
            }
            Err(safe) => {
                if self.kind == Kind::Text {
                    deltas.arguments(&json::escaped(&held.text()[..safe]));
                    held.commit(safe);
                    self.seen = 0;
                }
                false
            }
        }
    }

    fn without_line<'t>(&self, text: &'t str) -> &'t str {
        match text.strip_suffix('\n') {
            Some(text) if self.lines => text,
            _ => text,
        }
    }

    /// Where the closing marker is, or how much is certainly before it.
    fn closed(&mut self, text: &str, end: bool) -> Result<usize, usize> {
        let mut from = self.seen;
        while let Some(at) = text[from..].find(self.close).map(|at| from + at) {
            let rest = text[at + self.close.len()..].trim_start();
            let follows = |marker: &&str| rest.starts_with(*marker);
            let may_follow = |marker: &&str| marker.starts_with(rest);
            if self.follow.iter().any(follows) || end && rest.is_empty() {
                return Ok(at);
            }
            if self.follow.iter().any(may_follow) {
                if end {
                    return Ok(at);
                }
                self.seen = at;
                return Err(self.without_line(&text[..at]).len());
            }
            from = at + self.close.len();
        }
        if end {
            // Only the beginning of the marker is there, or nothing of it.
            return Ok(text.len() - overlap(text, self.close));
        }
        let before = &text[..text.len() - overlap(text, self.close)];
        self.seen = before.len();
        Err(self.without_line(before).len())
    }
}

/// Adds the name of a parameter to the arguments.
pub(super) fn begin_member(deltas: &mut Deltas, first: bool, name: &str) {
    let open = if first { "{" } else { ", " };
    deltas.arguments(&format!("{open}{}: ", json!(name)));
}
