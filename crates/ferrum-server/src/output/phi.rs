//! Phi-4-mini: `<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>`, or an object in each pair of
//! tags, or `functools[…]`. Arguments are given as they come where the name stands first.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::grammar::{CallGrammar, Rules};
use super::reader::{CallReader, ObjectsReader};

const CALLS: &str = "<|tool_call|>";
const CALLS_END: &str = "<|/tool_call|>";
const FUNCTOOLS: &str = "functools";

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "phi4",
    template: &[&[CALLS_END], &["functools["]],
    openers: &[CALLS, FUNCTOOLS],
    markers: &[CALLS, CALLS_END],
    bare: None,
    reader,
    rules,
};

fn reader(_: &OutputFormat, opener: &'static str) -> Box<dyn CallReader> {
    let close = (opener == CALLS).then_some(CALLS_END);
    Box::new(ObjectsReader::new(close))
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let (open, close) = (grammar.marker(CALLS), grammar.marker(CALLS_END));
    let body = grammar.objects("arguments");
    let more = grammar.more("\", \" item");
    format!("calls: {open} call\ncall: \"[\" item{more} \"]\" {close}\nitem: {body} \"}}\"\n")
        .into()
}
