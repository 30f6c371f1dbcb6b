//! Llama 3: `{"name": …, "parameters": {…}}` and nothing before it but maybe `<|python_tag|>`; several of
//! them with `;` or space in between. Arguments are given as they come where the name stands first.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::deltas::Deltas;
use super::grammar::{CallGrammar, Rules};
use super::pending_text::{PendingText, PrefixMatch, begins};
use super::reader::{CallReader, ObjectCall, ObjectStep, Step};

const CALL: &str = "<|python_tag|>";

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "llama3",
    template: &[&[CALL], &["{\"name\": \"", "\"parameters\": "]],
    openers: &[CALL],
    markers: &[CALL],
    bare: Some('{'),
    reader,
    rules,
};

fn reader(_: &OutputFormat, opener: &'static str) -> Box<dyn CallReader> {
    Box::new(match opener.is_empty() {
        true => Reader::Object(ObjectCall::new(true)),
        false => Reader::Open,
    })
}

#[derive(Debug)]
enum Reader {
    /// After the marker: a call, or code for an interpreter that is not there.
    Open,
    Object(ObjectCall),
    Between,
}

impl CallReader for Reader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        match self {
            Reader::Open => {
                if !held.skip_space() {
                    return Step::Wait;
                }
                if !held.text().starts_with('{') {
                    return Step::NotACall;
                }
                *self = Reader::Object(ObjectCall::new(false));
            }
            Reader::Object(call) => match call.read(held, deltas) {
                ObjectStep::Again => {}
                ObjectStep::Wait => return Step::Wait,
                ObjectStep::NotACall => return Step::NotACall,
                ObjectStep::Over(_) => *self = Reader::Between,
            },
            Reader::Between => {
                let between = |c: char| c.is_ascii_whitespace() || matches!(c, ';' | ',');
                let text = held.text();
                held.commit(text.len() - text.trim_start_matches(between).len());
                if held.text().starts_with('{') {
                    *self = Reader::Object(ObjectCall::new(true));
                    return Step::Again;
                }
                match begins(held.text(), CALL) {
                    PrefixMatch::Maybe if !end => return Step::Wait,
                    // The reader of text finds markers.
                    _ => return Step::Over,
                }
            }
        }
        Step::Again
    }
}

/// Its templates have no place for a second call.
fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let open = grammar.marker(CALL);
    let body = grammar.objects("parameters");
    format!("calls: {open}? call\ncall: {body} \"}}\"\n").into()
}
