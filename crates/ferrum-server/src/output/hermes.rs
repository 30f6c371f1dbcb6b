//! Hermes, Qwen 2.5 and 3, Granite 4 and the demo model: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`,
//! one after the other. Arguments are given as they come where the name stands first.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::grammar::{CallGrammar, Rules};
use super::reader::{CallReader, ObjectsReader};

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "hermes",
    template: &[&[CALL]],
    openers: &[CALL],
    markers: &[CALL, CALL_END],
    bare: None,
    reader,
    rules,
};

fn reader(_: &OutputFormat, _: &'static str) -> Box<dyn CallReader> {
    Box::new(ObjectsReader::new(Some(CALL_END)))
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let (open, close) = (grammar.marker(CALL), grammar.marker(CALL_END));
    let body = grammar.objects("arguments");
    let more = grammar.more(&format!("\"\\n\"? {open} call"));
    format!("calls: {open} call{more}\ncall: \"\\n\"? {body} \"}}\" \"\\n\"? {close}\n").into()
}
