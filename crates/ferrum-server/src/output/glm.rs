//! GLM 4.5 and later: `<tool_call>name`, for each argument `<arg_key>key</arg_key>` and
//! `<arg_value>value</arg_value>` on lines of their own or not, then `</tool_call>`. Values are strings where the
//! schema says so, else JSON. Strings are given as they come, other values when they are complete.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::deltas::Deltas;
use super::function::Function;
use super::grammar::{CallGrammar, Pairs, Rules, lark_string};
use super::pending_text::PendingText;
use super::reader::{CallReader, Step};
use super::values::{self, Kind, ValueReader};
use serde_json::Value;
use std::sync::Arc;

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

/// Most bytes of a name.
const MAX_NAME_BYTES: usize = 256;

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "glm4",
    template: &[&[KEY]],
    openers: &[CALL],
    markers: &[CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END],
    bare: None,
    reader,
    rules,
};

fn reader(output_format: &OutputFormat, _: &'static str) -> Box<dyn CallReader> {
    Box::new(Reader {
        functions: Arc::clone(&output_format.functions),
        state: State::Name,
        function: None,
        first: true,
    })
}

#[derive(Debug)]
enum State {
    Name,
    /// Where an argument begins or the call ends.
    Between,
    Key,
    /// After a key, where the value's marker is.
    Begin(String),
    Value(ValueReader),
}

#[derive(Debug)]
struct Reader {
    functions: Arc<[Function]>,
    state: State,
    /// Which function is called.
    function: Option<usize>,
    /// Whether no argument has come yet.
    first: bool,
}

impl Reader {
    fn name(&mut self, held: &mut PendingText, deltas: &mut Deltas) -> Step {
        let (front, is_cut) = held.front(MAX_NAME_BYTES);
        let text = front.trim_start();
        let undecided = match is_cut {
            true => Step::NotACall,
            false => Step::Wait,
        };
        let Some(length) = text.find(['<', '\n', '{', ' ']) else {
            return undecided;
        };
        let (name, rest) = text.split_at(length);
        let rest = rest.trim_start();
        let markers = [KEY, CALL_END];
        if name.is_empty() || !markers.iter().any(|marker| rest.starts_with(marker)) {
            let begun = markers.iter().any(|marker| marker.starts_with(rest));
            return match begun && !name.is_empty() {
                true => undecided,
                false => Step::NotACall,
            };
        }
        let name = name.to_owned();
        held.commit(front.len() - rest.len());
        self.function = self.functions.iter().position(|f| f.name == name);
        deltas.begin_call(name);
        self.state = State::Between;
        Step::Again
    }

    fn between(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        if !held.skip_space() {
            return Step::Wait;
        }
        let text = held.text();
        if text.starts_with(KEY) {
            held.consume(KEY.len());
            self.state = State::Key;
            return Step::Again;
        }
        if !end
            && [KEY, CALL_END]
                .iter()
                .any(|marker| marker.starts_with(text))
        {
            return Step::Wait;
        }
        deltas.end_call();
        // At the end, a marker that was cut.
        held.skip_marker(CALL_END, end);
        Step::Over
    }

    fn kind(&self, key: &str) -> Kind {
        let function = self.function.map(|at| &self.functions[at]);
        let root = function.map_or(&Value::Null, |function| &function.parameters);
        let schema = function.and_then(|function| values::schema(function, key));
        values::kind(root, schema)
    }
}

impl CallReader for Reader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        match &mut self.state {
            State::Name => return self.name(held, deltas),
            State::Between => return self.between(held, deltas, end),
            State::Key => match held.text().find(KEY_END) {
                Some(at) if at <= MAX_NAME_BYTES => {
                    let key = held.text()[..at].trim().to_owned();
                    held.consume(at + KEY_END.len());
                    self.state = State::Begin(key);
                }
                None if held.text().len() <= MAX_NAME_BYTES + KEY_END.len() => return Step::Wait,
                _ => {
                    deltas.end_call();
                    return Step::NotACall;
                }
            },
            State::Begin(key) => match held.skip_marker(VALUE, end) {
                None => return Step::Wait,
                Some(false) => {
                    deltas.end_call();
                    return Step::NotACall;
                }
                Some(true) => {
                    held.commit(0);
                    let key = std::mem::take(key);
                    values::begin_member(deltas, std::mem::take(&mut self.first), &key);
                    let follow = &[KEY, CALL_END];
                    let value = ValueReader::new(self.kind(&key), VALUE_END, follow, false);
                    self.state = State::Value(value);
                }
            },
            State::Value(value) => {
                if !value.read(held, deltas, end) {
                    return Step::Wait;
                }
                self.state = State::Between;
            }
        }
        Step::Again
    }
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let [open, close, key, key_end, value, value_end] = [
        grammar.marker(CALL),
        grammar.marker(CALL_END),
        grammar.marker(KEY),
        grammar.marker(KEY_END),
        grammar.marker(VALUE),
        grammar.marker(VALUE_END),
    ];
    let mut text = grammar.until("text", "", VALUE_END);
    let one = grammar.one(|grammar, i, name| {
        let arguments = grammar.pairs(
            i,
            &Pairs {
                open: &|name| format!("{key} {} {key_end} \"\\n\"? {value}", lark_string(name)),
                any: &format!("{key} /[^<>\\n]{{1,64}}/ {key_end} \"\\n\"? {value} text"),
                text: "text",
                close: &value_end,
                after: "\"\\n\"?",
            },
        );
        format!("{} \"\\n\"? {arguments}", lark_string(name))
    });
    let more = grammar.more(&format!("\"\\n\"? {open} call"));
    text += &format!("calls: {open} call{more}\ncall: {one} {close}\n");
    text.into()
}
