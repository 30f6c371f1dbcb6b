//! Qwen3-Coder and its successors, and Nemotron 3: `<tool_call><function=name>`, for each argument
//! `<parameter=key>`, the value on lines of its own and `</parameter>`, then `</function></tool_call>`; the outer
//! tags may be missing. Values are strings where the schema says so, else JSON. Strings are given as they come,
//! other values when they are complete.

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
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// Most bytes of a name.
const MAX_NAME_BYTES: usize = 256;

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "qwen3-coder",
    template: &[&[FUNCTION, PARAMETER]],
    openers: &[CALL, FUNCTION],
    markers: &[CALL, CALL_END],
    bare: None,
    reader,
    rules,
};

fn reader(output_format: &OutputFormat, opener: &'static str) -> Box<dyn CallReader> {
    let state = match opener == FUNCTION {
        true => State::Name,
        false => State::Open,
    };
    Box::new(Reader {
        functions: Arc::clone(&output_format.functions),
        state,
        function: None,
        first: true,
    })
}

#[derive(Debug)]
enum State {
    Open,
    Name,
    /// Where a parameter begins or the call ends.
    Between,
    Key,
    Value(ValueReader),
    Close,
}

#[derive(Debug)]
struct Reader {
    functions: Arc<[Function]>,
    state: State,
    /// Which function is called.
    function: Option<usize>,
    /// Whether no parameter has come yet.
    first: bool,
}

/// A name up to the bracket that closes its tag; `None` if it is none.
fn name(text: &str) -> Option<Option<&str>> {
    match text.find(['>', '<', '\n']) {
        Some(at) if at > 0 && at <= MAX_NAME_BYTES && text[at..].starts_with('>') => {
            Some(Some(&text[..at]))
        }
        None if text.len() <= MAX_NAME_BYTES => Some(None),
        _ => None,
    }
}

impl Reader {
    fn kind(&self, key: &str) -> Kind {
        let function = self.function.map(|at| &self.functions[at]);
        let root = function.map_or(&Value::Null, |function| &function.parameters);
        let schema = function.and_then(|function| values::schema(function, key));
        values::kind(root, schema)
    }

    fn between(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        if !held.skip_space() {
            return Step::Wait;
        }
        let text = held.text();
        if text.starts_with(PARAMETER) {
            held.consume(PARAMETER.len());
            self.state = State::Key;
            return Step::Again;
        }
        let markers = [PARAMETER, FUNCTION_END, CALL_END];
        if !end && markers.iter().any(|marker| marker.starts_with(text)) {
            return Step::Wait;
        }
        deltas.end_call();
        // At the end, a marker that was cut.
        if held.skip_marker(FUNCTION_END, end) == Some(true) {
            held.commit(0);
        }
        self.state = State::Close;
        Step::Again
    }
}

impl CallReader for Reader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        match &mut self.state {
            State::Open => match held.skip_marker(FUNCTION, end) {
                None => return Step::Wait,
                Some(false) => return Step::NotACall,
                Some(true) => self.state = State::Name,
            },
            State::Name => {
                let function = match name(held.text()) {
                    None => return Step::NotACall,
                    Some(None) => return Step::Wait,
                    Some(Some(name)) if name.contains(char::is_whitespace) => {
                        return Step::NotACall;
                    }
                    Some(Some(name)) => name.to_owned(),
                };
                held.commit(function.len() + 1);
                self.function = self.functions.iter().position(|f| f.name == function);
                deltas.begin_call(function);
                self.state = State::Between;
            }
            State::Between => return self.between(held, deltas, end),
            State::Key => {
                let key = match name(held.text()) {
                    None => {
                        deltas.end_call();
                        return Step::NotACall;
                    }
                    Some(None) => return Step::Wait,
                    Some(Some(key)) => key.to_owned(),
                };
                held.commit(key.len() + 1);
                values::begin_member(deltas, std::mem::take(&mut self.first), &key);
                let follow = &[PARAMETER, FUNCTION_END, CALL_END];
                let value = ValueReader::new(self.kind(&key), PARAMETER_END, follow, true);
                self.state = State::Value(value);
            }
            State::Value(value) => {
                if !value.read(held, deltas, end) {
                    return Step::Wait;
                }
                self.state = State::Between;
            }
            State::Close => {
                return match held.skip_marker(CALL_END, end) {
                    None => Step::Wait,
                    Some(_) => Step::Over,
                };
            }
        }
        Step::Again
    }
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let (open, close) = (grammar.marker(CALL), grammar.marker(CALL_END));
    let mut text = grammar.until("text", "\\n", PARAMETER_END);
    let end = lark_string(&format!("\n{PARAMETER_END}"));
    let one = grammar.one(|grammar, i, name| {
        let parameters = grammar.pairs(
            i,
            &Pairs {
                open: &|key| lark_string(&format!("{PARAMETER}{key}>\n")),
                any: &format!("\"{PARAMETER}\" /[^<>\\n]{{1,64}}/ \">\\n\" text"),
                text: "text",
                close: &end,
                after: "\"\\n\"",
            },
        );
        format!(
            "{} {parameters}",
            lark_string(&format!("{FUNCTION}{name}>\n"))
        )
    });
    let more = grammar.more(&format!("\"\\n\"? {open} call"));
    text += &format!(
        "calls: {open} call{more}\ncall: \"\\n\"? {one} {} {close}\n",
        lark_string(&format!("{FUNCTION_END}\n"))
    );
    text.into()
}
