//! Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`; some of its models write the marker as
//! `<tool_call>`. (Granite 4 writes as Hermes.) Arguments are given as they come where the name stands first.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::grammar::{CallGrammar, Rules};
use super::reader::{CallReader, ObjectsReader};

const CALLS: &str = "<|tool_call|>";
const CALLS_TEXT: &str = "<tool_call>";
const CALLS_TEXT_END: &str = "</tool_call>";

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "granite",
    template: &[&[CALLS]],
    openers: &[CALLS, CALLS_TEXT],
    markers: &[CALLS, CALLS_TEXT, CALLS_TEXT_END],
    bare: None,
    reader,
    rules,
};

fn reader(_: &OutputFormat, opener: &'static str) -> Box<dyn CallReader> {
    let close = (opener == CALLS_TEXT).then_some(CALLS_TEXT_END);
    Box::new(ObjectsReader::new(close))
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let open = grammar.marker(CALLS);
    let body = grammar.objects("arguments");
    let more = grammar.more("\", \" item");
    format!("calls: {open} call\ncall: \" \"? \"[\" item{more} \"]\"\nitem: {body} \"}}\"\n").into()
}
