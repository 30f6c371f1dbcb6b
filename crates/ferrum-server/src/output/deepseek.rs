//! DeepSeek, in two forms between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`:
//!
//! - V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line's end, and the arguments in a fence of
//!   `json`, then `<｜tool▁call▁end｜>`;
//! - V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
//!
//! Both are read, whichever the template speaks of; the first marker may be missing. Arguments are given as they
//! come.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::grammar::{CallGrammar, Rules, lark_string};
use super::reader::CallReader;
use super::section::{Header, SectionMarkers, SectionReader};

const CALLS: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```";
const LANGUAGE: &str = "json";

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "deepseek-v3",
    template: &[&[CALLS, "```json"]],
    openers: &[CALLS, CALL],
    markers: &[CALLS, CALLS_END, CALL, CALL_END, SEPARATOR],
    bare: None,
    reader,
    rules: fenced_rules,
};

pub(super) const DEFINITION_V31: FormatDefinition = FormatDefinition {
    name: "deepseek-v3.1",
    template: &[&[CALLS]],
    rules,
    ..DEFINITION
};

fn reader(_: &OutputFormat, opener: &'static str) -> Box<dyn CallReader> {
    let markers = SectionMarkers {
        call: CALL,
        fence: Some(FENCE),
        call_end: CALL_END,
        end: CALLS_END,
        header,
    };
    Box::new(SectionReader::new(markers, opener == CALL))
}

fn header(text: &str) -> Header {
    let Some((kind, after)) = text.split_once(SEPARATOR) else {
        return Header::Begun;
    };
    let at = |rest: &str| text.len() - rest.len();
    let name = |name: &str, rest: &str| match name.trim() {
        "" => Header::NoCall,
        name => Header::Of(name.to_owned(), at(rest)),
    };
    let rest = after.trim_start();
    if rest.is_empty() {
        return Header::Begun;
    }
    if rest.starts_with('{') {
        return name(kind, rest);
    }
    let Some(length) = rest.find(['\n', '`', '<']) else {
        return Header::Begun;
    };
    let (function, rest) = rest.split_at(length);
    let mut rest = rest.trim_start();
    for (marker, needed) in [(FENCE, true), (LANGUAGE, false)] {
        match rest.strip_prefix(marker) {
            Some(after) => rest = after,
            None if marker.starts_with(rest) => return Header::Begun,
            None if needed => return Header::NoCall,
            None => {}
        }
    }
    match rest.trim_start() {
        "" => Header::Begun,
        rest if rest.starts_with('{') => name(function, rest),
        _ => Header::NoCall,
    }
}

fn fenced_rules(grammar: &mut CallGrammar<'_>) -> Rules {
    section(
        grammar,
        "function",
        "\\n```json\\n",
        "\"\\n```\"",
        "\"\\n\"?",
    )
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    section(grammar, "", "", "", "")
}

fn section(
    grammar: &mut CallGrammar<'_>,
    kind: &str,
    fence: &str,
    fence_end: &str,
    between: &str,
) -> Rules {
    let [calls, calls_end, call, call_end, separator] = [
        grammar.marker(CALLS),
        grammar.marker(CALLS_END),
        grammar.marker(CALL),
        grammar.marker(CALL_END),
        grammar.marker(SEPARATOR),
    ];
    let one = grammar.one(|grammar, i, name| {
        let arguments = grammar.arguments(i);
        match kind {
            "" => format!("{} {separator} {arguments}", lark_string(name)),
            _ => format!(
                "\"{kind}\" {separator} {} \"{fence}\" {arguments}",
                lark_string(name)
            ),
        }
    });
    let more = grammar.more(&format!("{between} one"));
    format!(
        "calls: {calls} call\ncall: one{more} {calls_end}\n\
         one: {call} {one} {fence_end} {call_end}\n"
    )
    .into()
}
