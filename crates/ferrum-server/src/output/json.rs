//! The JSON of calls, while it comes.

use serde_json::Value;

/// Most bytes up to a call's arguments; a name is much shorter.
const MAX_HEADER_BYTES: usize = 512;

/// The arguments of a call that has none.
pub(super) const NO_ARGUMENTS: &str = "{}";

/// Where in a JSON value a scan is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Nesting {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    /// Inside of one object or array.
    pub(super) fn inside() -> Self {
        Self {
            depth: 1,
            ..Self::default()
        }
    }

    pub(super) fn is_outside_strings(&self) -> bool {
        !self.in_string
    }

    /// Moves on by a byte; whether the object or array ends with it.
    pub(super) fn step(&mut self, byte: u8) -> bool {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// The name of a call that begins as calls do, and where its arguments' brace is.
pub(super) fn header(text: &str) -> Option<(String, usize)> {
    let text = &text[..text.floor_char_boundary(MAX_HEADER_BYTES)];
    let mut rest = text;
    for expected in ["{", "\"name\"", ":"] {
        rest = rest.trim_start().strip_prefix(expected)?;
    }
    rest = rest.trim_start();
    let mut names = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    // A tag inside of a name is told from the end of the call only when all of it is there.
    let name = names.next()?.ok().filter(|name| !name.contains('<'))?;
    rest = rest[names.byte_offset()..].trim_start().strip_prefix(',')?;
    rest = rest.trim_start();
    let keys = ["\"arguments\"", "\"parameters\""];
    rest = keys.iter().find_map(|key| rest.strip_prefix(key))?;
    rest = rest.trim_start().strip_prefix(':')?.trim_start();
    rest.starts_with('{')
        .then(|| (name, text.len() - rest.len()))
}

/// A whole call in whatever order, with its arguments as JSON text if it has any.
pub(super) fn whole_call(text: &str) -> Option<(String, Option<String>)> {
    let call: Value = serde_json::from_str(text.trim()).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = call.get("arguments").or_else(|| call.get("parameters"));
    let text = |arguments: &Value| match arguments {
        Value::Null => NO_ARGUMENTS.to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some((name, arguments.map(text)))
}
