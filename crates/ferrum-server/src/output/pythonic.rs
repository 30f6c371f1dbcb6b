//! Calls as a list in Python, of Llama 3.2 and Llama 4: `[f(a=1, b="x"), g()]` and nothing before it but maybe
//! `<|python_start|>`. Values are literals of Python or JSON. Arguments are given when a call is complete: until
//! then, strings in either quotes and names like `True` cannot be told from what is no call.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::deltas::Deltas;
use super::grammar::{CallGrammar, Rules};
use super::pending_text::PendingText;
use super::reader::{CallReader, Step};
use serde_json::{Map, Number, Value};

const START: &str = "<|python_start|>";
const END: &str = "<|python_end|>";

/// Deepest nesting of values.
const MAX_DEPTH: usize = 64;

/// Most bytes of names before the first argument's value.
const MAX_HEAD_BYTES: usize = 512;

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "pythonic",
    template: &[&["[func_name1("]],
    openers: &[START],
    markers: &[START, END],
    bare: Some('['),
    reader,
    rules,
};

fn reader(_: &OutputFormat, _: &'static str) -> Box<dyn CallReader> {
    Box::new(Reader {
        state: State::Open,
        scan: Scan::default(),
    })
}

#[derive(Debug)]
enum State {
    /// Before the bracket.
    Open,
    /// Before a call.
    Item,
    /// After a call.
    Between,
    /// After the bracket.
    Close,
}

/// Where in the text of a call a scan for its end is.
#[derive(Debug, Default)]
struct Scan {
    seen: usize,
    depth: usize,
    quote: Option<u8>,
    escaped: bool,
}

impl Scan {
    /// Where the parenthesis is that ends the call.
    fn end(&mut self, text: &str) -> Option<usize> {
        while let Some(&byte) = text.as_bytes().get(self.seen) {
            self.seen += 1;
            match (self.quote, byte) {
                (Some(_), _) if self.escaped => self.escaped = false,
                (Some(_), b'\\') => self.escaped = true,
                (Some(quote), _) if byte == quote => self.quote = None,
                (Some(_), _) => {}
                (None, b'"' | b'\'') => self.quote = Some(byte),
                (None, b'(' | b'[' | b'{') => self.depth += 1,
                (None, b')' | b']' | b'}') => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(self.seen);
                    }
                }
                (None, _) => {}
            }
        }
        None
    }
}

#[derive(Debug)]
struct Reader {
    state: State,
    scan: Scan,
}

impl Reader {
    fn call(&mut self, held: &mut PendingText, deltas: &mut Deltas) -> Step {
        // The beginning tells most lists from calls, long before their end.
        let (head, is_cut) = held.front(MAX_HEAD_BYTES);
        match may_be_call(head) {
            Some(true) => {}
            None if !is_cut => return Step::Wait,
            Some(false) | None => return Step::NotACall,
        }
        let text = held.text();
        let Some(end) = self.scan.end(text) else {
            return Step::Wait;
        };
        let Some((name, arguments)) = parse_call(&text[..end]) else {
            return Step::NotACall;
        };
        held.commit(end);
        deltas.begin_call(name);
        deltas.arguments(&Value::Object(arguments).to_string());
        self.scan = Scan::default();
        self.state = State::Between;
        Step::Again
    }
}

impl CallReader for Reader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        if let State::Close = self.state {
            return match held.skip_marker(END, end) {
                None => Step::Wait,
                Some(_) => Step::Over,
            };
        }
        if !held.skip_space() {
            return Step::Wait;
        }
        self.state = match (&self.state, held.text().as_bytes()[0]) {
            (State::Item, _) => return self.call(held, deltas),
            (State::Open, b'[') | (State::Between, b',') => {
                held.consume(1);
                State::Item
            }
            (State::Between, b']') => {
                held.commit(1);
                State::Close
            }
            _ => return Step::NotACall,
        };
        Step::Again
    }
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_.-".contains(&byte)
}

/// Whether a text begins like a call with named arguments; `None`: more has to come to know.
fn may_be_call(text: &str) -> Option<bool> {
    let mut input = Input { rest: text };
    let name = input.word();
    input.space();
    if input.rest.is_empty() {
        return None;
    }
    if name.is_none() || !input.skip('(') {
        return Some(false);
    }
    if input.rest.starts_with(')') {
        return Some(true);
    }
    let key = input.word();
    input.space();
    let next = input.rest.bytes().next()?;
    Some(key.is_some() && next == b'=')
}

/// A call that is all there.
fn parse_call(text: &str) -> Option<(String, Map<String, Value>)> {
    let mut input = Input { rest: text };
    let name = input.word()?.to_owned();
    let mut arguments = Map::new();
    if !input.skip('(') {
        return None;
    }
    while !input.skip(')') {
        let key = input.word()?.to_owned();
        if !input.skip('=') {
            return None;
        }
        arguments.insert(key, input.value(0)?);
        if !input.skip(',') && !input.rest.starts_with(')') {
            return None;
        }
    }
    input.rest.is_empty().then_some((name, arguments))
}

/// Python's literals, from the front of a text.
struct Input<'t> {
    rest: &'t str,
}

impl<'t> Input<'t> {
    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Takes a character and the space around it, if it is there.
    fn skip(&mut self, marker: char) -> bool {
        self.space();
        let Some(rest) = self.rest.strip_prefix(marker) else {
            return false;
        };
        self.rest = rest;
        if marker != ')' {
            self.space();
        }
        true
    }

    fn word(&mut self) -> Option<&'t str> {
        self.space();
        let length = self.rest.bytes().take_while(|&byte| is_name(byte)).count();
        let (word, rest) = self.rest.split_at(length);
        self.rest = rest;
        (!word.is_empty()).then_some(word)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.space();
        let value = match self.rest.chars().next()? {
            '"' | '\'' => Value::String(self.string()?),
            '[' => self.list('[', ']', depth)?,
            '(' => self.list('(', ')', depth)?,
            '{' => self.dict(depth)?,
            _ => self.atom()?,
        };
        self.space();
        Some(value)
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.skip(open);
        let mut items = Vec::new();
        loop {
            self.space();
            if let Some(rest) = self.rest.strip_prefix(close) {
                self.rest = rest;
                return Some(items.into());
            }
            items.push(self.value(depth + 1)?);
            if !self.skip(',') && !self.rest.starts_with(close) {
                return None;
            }
        }
    }

    fn dict(&mut self, depth: usize) -> Option<Value> {
        self.skip('{');
        let mut members = Map::new();
        loop {
            if let Some(rest) = self.rest.strip_prefix('}') {
                self.rest = rest;
                return Some(members.into());
            }
            let Value::String(key) = self.value(depth + 1)? else {
                return None;
            };
            if !self.skip(':') {
                return None;
            }
            members.insert(key, self.value(depth + 1)?);
            if !self.skip(',') && !self.rest.starts_with('}') {
                return None;
            }
        }
    }

    fn atom(&mut self) -> Option<Value> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "+-._".contains(c);
        let length = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (atom, rest) = self.rest.split_at(length);
        self.rest = rest;
        match atom {
            "True" | "true" => return Some(true.into()),
            "False" | "false" => return Some(false.into()),
            "None" | "null" => return Some(Value::Null),
            _ => {}
        }
        if let Ok(number) = serde_json::from_str::<Number>(atom) {
            return Some(number.into());
        }
        // Numbers that JSON writes in another way: `1_000`, `.5`, `5.`, `+1`.
        let plain = atom.replace('_', "");
        if !plain.contains(|c: char| c.is_ascii_digit()) {
            return None;
        }
        match plain.parse::<i64>() {
            Ok(number) => Some(number.into()),
            Err(_) => Number::from_f64(plain.parse().ok()?).map(Value::Number),
        }
    }

    fn string(&mut self) -> Option<String> {
        let mut chars = self.rest.chars();
        let quote = chars.next()?;
        let mut text = String::new();
        loop {
            match chars.next()? {
                '\\' => match chars.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    '\n' => {}
                    c @ ('\\' | '\'' | '"' | '/') => text.push(c),
                    c @ ('x' | 'u' | 'U') => {
                        let digits = match c {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let code = chars.as_str().get(..digits).and_then(hex);
                        match code.and_then(char::from_u32) {
                            Some(found) => {
                                text.push(found);
                                chars = chars.as_str()[digits..].chars();
                            }
                            None => text.extend(['\\', c]),
                        }
                    }
                    c => text.extend(['\\', c]),
                },
                c if c == quote => {
                    self.rest = chars.as_str();
                    return Some(text);
                }
                c => text.push(c),
            }
        }
    }
}

fn hex(digits: &str) -> Option<u32> {
    let all = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    all.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let mut rules = String::new();
    let one = grammar.one(|grammar, i, name| grammar.keywords(i, name, &mut rules));
    let more = grammar.more("\", \" one");
    rules += &format!("calls: \"[\" one{more} \"]\"\none: {one}\n");
    rules.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn literals_are_values() {
        let cases = [
            ("f()", Some(json!({}))),
            (
                "f( a = 1 , b=-2.5e3, )",
                Some(json!({"a": 1, "b": -2500.0})),
            ),
            (
                "f(a='it\\'s \"x\"', b=\"\\u00e9\\x41\\n\\q\")",
                Some(json!({"a": "it's \"x\"", "b": "éA\n\\q"})),
            ),
            (
                "f(a=[True, None, (1, 2)], b={'k': {\"l\": []}})",
                Some(json!({"a": [true, null, [1, 2]], "b": {"k": {"l": []}}})),
            ),
            (
                "f(a=1_000, b=.5, c=true)",
                Some(json!({"a": 1000, "b": 0.5, "c": true})),
            ),
            ("f(1)", None),
            ("f(a=x)", None),
            ("f(a=1 b=2)", None),
            ("f(a={1: 2})", None),
            ("f(a=\"x\")y", None),
            ("f(a=nan)", None),
        ];
        for (text, expected) in cases {
            let found = parse_call(text).map(|(_, arguments)| Value::Object(arguments));
            assert_eq!(found, expected, "{text}");
        }
        let deep = format!("f(a={}1{})", "[".repeat(90), "]".repeat(90));
        assert_eq!(parse_call(&deep), None);
    }
}
