//! The JSON of calls, while it comes: checked and mended byte by byte, so that what a client gets is always
//! the text of an object or the beginning of one.

use serde_json::Value;

/// Most bytes up to a call's arguments; a name is much shorter.
const MAX_HEADER_BYTES: usize = 512;

/// Deepest nesting; `serde_json` and others read no deeper.
const MAX_DEPTH: usize = 127;

/// Most space that is kept after a comma.
const MAX_SPACE: usize = 64;

/// The arguments of a call that has none.
pub(super) const NO_ARGUMENTS: &str = "{}";

/// How an object ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// With its brace.
    Whole,
    /// What follows cannot be a part of it.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    None,
    /// After the backslash.
    Begun,
    /// So many hexadecimal digits are to come.
    Hex(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    /// Before the brace.
    #[default]
    Begin,
    Key,
    Colon,
    Value,
    /// Where an array has a value or ends.
    Item,
    After,
    Text {
        key: bool,
        escape: Escape,
    },
    /// The rest of `true`, `false` or `null`.
    Word(&'static str),
    Number(Number),
    End,
}

/// Follows an object that comes in pieces. Mended on the way are what models write most often: line breaks
/// in strings, escapes that JSON does not have, and a comma before a closing bracket.
#[derive(Clone, Debug, Default)]
pub(super) struct ObjectScan {
    at: At,
    /// For each bracket that is open, whether it is an object's.
    open: Vec<bool>,
    /// A comma and the space after it, which are given out when a value follows.
    comma: String,
}

/// What became of a text.
#[derive(Debug)]
pub(super) struct Scanned {
    /// What of it is to be given out.
    pub(super) text: String,
    /// How many bytes belong to the object.
    pub(super) used: usize,
    /// `None` while it goes on.
    pub(super) ended: Option<Ended>,
}

impl ObjectScan {
    /// After the value of a member.
    pub(super) fn after_member() -> Self {
        Self {
            at: At::After,
            open: vec![true],
            comma: String::new(),
        }
    }

    pub(super) fn feed(&mut self, text: &str) -> Scanned {
        let mut out = String::with_capacity(text.len());
        let (mut used, mut ended) = (text.len(), None);
        for (at, c) in text.char_indices() {
            if !self.step(c, &mut out) {
                (used, ended) = (at, Some(Ended::Broken));
                break;
            }
            if self.at == At::End {
                (used, ended) = (at + c.len_utf8(), Some(Ended::Whole));
                break;
            }
        }
        Scanned {
            text: out,
            used,
            ended,
        }
    }

    /// What is missing for the whole to be an object. What has no value yet gets `null`.
    pub(super) fn closing(&self) -> String {
        let mut out = String::new();
        match self.at {
            At::Begin => out += NO_ARGUMENTS,
            At::Text { key, escape } => {
                match escape {
                    Escape::None => {}
                    Escape::Begun => out.push('\\'),
                    Escape::Hex(left) => out.extend(std::iter::repeat_n('0', left)),
                }
                out += if key { "\": null" } else { "\"" };
            }
            At::Word(rest) => out += rest,
            At::Number(number) if !number.is_whole() => out.push('0'),
            At::Colon => out += ": null",
            At::Value => out += "null",
            At::Key | At::Item | At::After | At::Number(_) | At::End => {}
        }
        let close = |&object: &bool| if object { '}' } else { ']' };
        out.extend(self.open.iter().rev().map(close));
        out
    }

    /// Moves on by a character, unless it cannot follow.
    fn step(&mut self, c: char, out: &mut String) -> bool {
        match self.at {
            At::Text { key, escape } => {
                self.text(key, escape, c, out);
                true
            }
            At::Word(rest) => {
                let Some(rest) = rest.strip_prefix(c) else {
                    return false;
                };
                out.push(c);
                self.at = if rest.is_empty() {
                    At::After
                } else {
                    At::Word(rest)
                };
                true
            }
            At::Number(number) => match number.then(c) {
                Some(number) => {
                    out.push(c);
                    self.at = At::Number(number);
                    true
                }
                None if number.is_whole() => {
                    self.at = At::After;
                    self.step(c, out)
                }
                None => false,
            },
            _ if is_space(c) => {
                if self.comma.is_empty() {
                    out.push(c);
                } else if self.comma.len() < MAX_SPACE {
                    self.comma.push(c);
                }
                true
            }
            At::After if c == ',' => {
                self.comma.push(c);
                let object = self.open.last() == Some(&true);
                self.at = if object { At::Key } else { At::Item };
                true
            }
            At::Key | At::After if c == '}' => self.close(true, out),
            At::Item | At::After if c == ']' => self.close(false, out),
            At::Begin if c == '{' => self.open(c, out),
            At::Colon if c == ':' => {
                out.push(c);
                self.at = At::Value;
                true
            }
            At::Key if c == '"' => self.begin(text(true), c, out),
            At::Value | At::Item => match c {
                '"' => self.begin(text(false), c, out),
                '{' | '[' => self.open(c, out),
                't' => self.begin(At::Word("rue"), c, out),
                'f' => self.begin(At::Word("alse"), c, out),
                'n' => self.begin(At::Word("ull"), c, out),
                '-' => self.begin(At::Number(Number::Minus), c, out),
                '0' => self.begin(At::Number(Number::Zero), c, out),
                '1'..='9' => self.begin(At::Number(Number::Digits), c, out),
                _ => false,
            },
            At::Begin | At::Key | At::Colon | At::After | At::End => false,
        }
    }

    fn begin(&mut self, at: At, c: char, out: &mut String) -> bool {
        *out += &std::mem::take(&mut self.comma);
        out.push(c);
        self.at = at;
        true
    }

    fn open(&mut self, c: char, out: &mut String) -> bool {
        if self.open.len() == MAX_DEPTH {
            return false;
        }
        self.open.push(c == '{');
        self.begin(if c == '{' { At::Key } else { At::Item }, c, out)
    }

    fn close(&mut self, object: bool, out: &mut String) -> bool {
        if self.open.last() != Some(&object) {
            return false;
        }
        self.open.pop();
        self.comma.clear();
        out.push(if object { '}' } else { ']' });
        self.at = match self.open.is_empty() {
            true => At::End,
            false => At::After,
        };
        true
    }

    /// A character of a string.
    fn text(&mut self, key: bool, escape: Escape, c: char, out: &mut String) {
        let mut next = Escape::None;
        match (escape, c) {
            (Escape::Begun, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => out.push(c),
            (Escape::Begun, 'u') => {
                out.push(c);
                next = Escape::Hex(4);
            }
            (Escape::Hex(left), '0'..='9' | 'a'..='f' | 'A'..='F') => {
                out.push(c);
                if left > 1 {
                    next = Escape::Hex(left - 1);
                }
            }
            (escape, _) => {
                // An escape that is none.
                match escape {
                    Escape::None => {}
                    Escape::Begun => out.push('\\'),
                    Escape::Hex(left) => out.extend(std::iter::repeat_n('0', left)),
                }
                match c {
                    '"' => {
                        out.push(c);
                        self.at = if key { At::Colon } else { At::After };
                        return;
                    }
                    '\\' => {
                        out.push(c);
                        next = Escape::Begun;
                    }
                    _ => *out += &escaped(c.encode_utf8(&mut [0; 4])),
                }
            }
        }
        self.at = At::Text { key, escape: next };
    }
}

const fn text(key: bool) -> At {
    At::Text {
        key,
        escape: Escape::None,
    }
}

impl Number {
    fn is_whole(self) -> bool {
        matches!(
            self,
            Number::Zero | Number::Digits | Number::Fraction | Number::Exponent
        )
    }

    fn then(self, c: char) -> Option<Self> {
        match (self, c) {
            (Number::Minus, '0') => Some(Number::Zero),
            (Number::Minus | Number::Digits, '0'..='9') => Some(Number::Digits),
            (Number::Zero | Number::Digits, '.') => Some(Number::Point),
            (Number::Point | Number::Fraction, '0'..='9') => Some(Number::Fraction),
            (Number::Zero | Number::Digits | Number::Fraction, 'e' | 'E') => Some(Number::E),
            (Number::E, '+' | '-') => Some(Number::Sign),
            (Number::E | Number::Sign | Number::Exponent, '0'..='9') => Some(Number::Exponent),
            _ => None,
        }
    }
}

/// A text as it stands in a JSON string, without the quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Whether JSON has this character between its parts: fewer are than are white space in Unicode.
fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n')
}

/// The name of a call that begins as calls do, and where its arguments' brace is. It takes nothing that [`ObjectScan`] does not,
/// which sees a beginning first where chunks are short.
pub(super) fn header(text: &str) -> Option<(String, usize)> {
    let text = &text[..text.floor_char_boundary(MAX_HEADER_BYTES)];
    let mut rest = text;
    for expected in ["{", "\"name\"", ":"] {
        rest = rest.trim_start_matches(is_space).strip_prefix(expected)?;
    }
    rest = rest.trim_start_matches(is_space);
    let mut names = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    let name = names.next()?.ok()?;
    rest = rest[names.byte_offset()..].trim_start_matches(is_space);
    rest = rest.strip_prefix(',')?.trim_start_matches(is_space);
    let keys = ["\"arguments\"", "\"parameters\""];
    rest = keys.iter().find_map(|key| rest.strip_prefix(key))?;
    rest = rest.trim_start_matches(is_space).strip_prefix(':')?;
    rest = rest.trim_start_matches(is_space);
    rest.starts_with('{')
        .then(|| (name, text.len() - rest.len()))
}

/// A whole call in whatever order, with its arguments as JSON text of an object if it has any.
pub(super) fn whole_call(text: &str) -> Option<(String, Option<String>)> {
    let call: Value = serde_json::from_str(text).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None => None,
        Some(Value::Null) => Some(NO_ARGUMENTS.to_owned()),
        // Some write the object as a string.
        Some(Value::String(text)) => {
            let inner: Value = serde_json::from_str(text).ok()?;
            inner.is_object().then(|| text.trim().to_owned())?.into()
        }
        Some(object @ Value::Object(_)) => Some(object.to_string()),
        Some(_) => return None,
    };
    Some((name, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_mended_and_completed() {
        let cases = [
            ("", "{}", ""),
            ("{\"a\": 1, }", "{\"a\": 1}", ""),
            (
                "{\"a\": [1, 2,], \"b\": 2}",
                "{\"a\": [1, 2], \"b\": 2}",
                "",
            ),
            (
                "{\"a\": \"x\ny\\dé\\u12\"}",
                "{\"a\": \"x\\ny\\\\dé\\u1200\"}",
                "",
            ),
            ("{\"a", "{\"a\": null}", ""),
            ("{\"a\"", "{\"a\": null}", ""),
            ("{\"a\":", "{\"a\":null}", ""),
            ("{\"a\": tr", "{\"a\": true}", ""),
            ("{\"a\": -", "{\"a\": -0}", ""),
            ("{\"a\": 1.5e", "{\"a\": 1.5e0}", ""),
            (
                "{\"a\": [{\"b\": \"c\\",
                "{\"a\": [{\"b\": \"c\\\\\"}]}",
                "",
            ),
            ("{\"a\": 1, ", "{\"a\": 1}", ""),
            ("{\"a\": <", "{\"a\": null}", "<"),
            ("{\"a\": 007}", "{\"a\": 0}", "07}"),
            ("{\"a\": 1]", "{\"a\": 1}", "]"),
            ("[1]", "{}", "[1]"),
            ("{} {}", "{}", " {}"),
        ];
        for (text, expected, rest) in cases {
            let mut scan = ObjectScan::default();
            let scanned = scan.feed(text);
            let whole = scanned.text + &scan.closing();
            assert_eq!((&*whole, &text[scanned.used..]), (expected, rest), "{text}");
            assert!(serde_json::from_str::<Value>(&whole).unwrap().is_object());
        }
        let deep = "{\"a\":".repeat(MAX_DEPTH + 2);
        let mut scan = ObjectScan::default();
        assert_eq!(scan.feed(&deep).ended, Some(Ended::Broken));
    }

    /// The name is read of what is there so far, so what the scan refuses must not become a call when more of it is.
    #[test]
    fn headers_are_beginnings_of_objects() {
        let begins = [
            "{\"name\"~: \"f\", \"arguments\": {",
            "{~\"name\": \"f\"~,~\"arguments\"~:~{",
        ];
        for text in begins {
            for (space, is_call) in [
                (" ", true),
                ("\r\n\t", true),
                ("\u{c}", false),
                ("\u{a0}", false),
            ] {
                let text = text.replace('~', space);
                let call = is_call.then(|| ("f".to_owned(), text.len() - 1));
                assert_eq!(header(&text), call, "{text:?}");
                let ended = ObjectScan::default().feed(&text).ended;
                assert_eq!(ended.is_none(), is_call, "{text:?}");
            }
        }
    }
}
