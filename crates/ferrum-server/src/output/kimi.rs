//! Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` for each call,
//! between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`; the first marker may be missing. The
//! number counts calls. Arguments are given as they come.
//!
//! Its templates know a call of the conversation by its id alone, so [`name_calls`] makes such ids of whatever
//! ids clients have.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::grammar::{CallGrammar, Rules, lark_string};
use super::reader::CallReader;
use super::section::{Header, SectionMarkers, SectionReader};
use serde_json::Value;
use std::collections::HashMap;

const CALLS: &str = "<|tool_calls_section_begin|>";
const CALLS_END: &str = "<|tool_calls_section_end|>";
const CALL: &str = "<|tool_call_begin|>";
const CALL_END: &str = "<|tool_call_end|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const NAMESPACE: &str = "functions.";

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "kimi-k2",
    template: &[&[CALLS]],
    openers: &[CALLS, CALL],
    markers: &[CALLS, CALLS_END, CALL, CALL_END, ARGUMENTS],
    bare: None,
    reader,
    rules,
};

fn reader(_: &OutputFormat, opener: &'static str) -> Box<dyn CallReader> {
    let markers = SectionMarkers {
        call: CALL,
        fence: None,
        call_end: CALL_END,
        end: CALLS_END,
        header,
    };
    Box::new(SectionReader::new(markers, opener == CALL))
}

fn header(text: &str) -> Header {
    let Some((id, rest)) = text.split_once(ARGUMENTS) else {
        return Header::Begun;
    };
    let id = id.trim();
    let id = id.strip_prefix(NAMESPACE).unwrap_or(id);
    let name = match id.rsplit_once(':') {
        Some((name, number)) if number.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => id,
    };
    match (name, rest.trim_start()) {
        ("", _) => Header::NoCall,
        (_, "") => Header::Begun,
        (_, rest) if rest.starts_with('{') => Header::Of(name.to_owned(), text.len() - rest.len()),
        _ => Header::NoCall,
    }
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let [calls, calls_end, call, call_end, arguments] = [
        grammar.marker(CALLS),
        grammar.marker(CALLS_END),
        grammar.marker(CALL),
        grammar.marker(CALL_END),
        grammar.marker(ARGUMENTS),
    ];
    let one = grammar.one(|grammar, i, name| {
        let (name, value) = (
            lark_string(&format!("{NAMESPACE}{name}:")),
            grammar.arguments(i),
        );
        format!("{name} /[0-9]{{1,4}}/ {arguments} {value}")
    });
    let more = grammar.more("one");
    format!("calls: {calls} call\ncall: one{more} {calls_end}\none: {call} {one} {call_end}\n")
        .into()
}

/// Gives the calls of a conversation ids that name their functions, and the answers to them, too.
pub(crate) fn name_calls(messages: &mut Value) {
    let mut names = HashMap::new();
    let mut count = 0;
    for message in messages.as_array_mut().into_iter().flatten() {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let Some(name) = call["function"]["name"].as_str() else {
                continue;
            };
            let id = format!("{NAMESPACE}{name}:{count}");
            count += 1;
            if let Some(old) = call["id"].as_str() {
                names.insert(old.to_owned(), id.clone());
            }
            call["id"] = id.into();
        }
        if let Some(old) = message.get("tool_call_id").and_then(Value::as_str)
            && let Some(id) = names.get(old)
        {
            message["tool_call_id"] = id.clone().into();
        }
    }
}
