//! Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`. Models with this mark are read in both of their
//! forms, whichever the template speaks of ([`mistral_args`](super::mistral_args) is the other). Arguments are
//! given as they come where the name stands first.

use super::deltas::Deltas;
use super::grammar::{CallGrammar, Rules};
use super::mistral_args::NamedCall;
use super::pending_text::PendingText;
use super::reader::{CallReader, ObjectsReader, Step};
use super::{OutputFormat, format::Row};

pub(super) const CALL: &str = "[TOOL_CALLS]";
pub(super) const ARGS: &str = "[ARGS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";

pub(super) const ROW: Row = Row {
    name: "mistral",
    template: &[&[CALL]],
    openers: &[CALL],
    marks: &[CALL, ARGS, CALL_ID],
    bare: None,
    reader,
    rules,
};

pub(super) fn reader(_: &OutputFormat, _: &'static str) -> Box<dyn CallReader> {
    Box::new(Reader::Open)
}

#[derive(Debug)]
enum Reader {
    Open,
    Objects(ObjectsReader),
    Named(NamedCall),
}

impl CallReader for Reader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        match self {
            Reader::Open if !held.skip_space() => Step::Wait,
            Reader::Open => {
                *self = match held.text().starts_with(['[', '{']) {
                    true => Reader::Objects(ObjectsReader::new(None)),
                    false => Reader::Named(NamedCall::default()),
                };
                Step::Again
            }
            Reader::Objects(objects) => objects.read(held, deltas, end),
            Reader::Named(call) => call.read(held, deltas),
        }
    }
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let open = grammar.mark(CALL);
    let body = grammar.objects("arguments");
    let more = grammar.more("\", \" item");
    format!(
        "calls: {open} call\ncall: \" \"? \"[\" item{more} \"]\"\n\
         item: {body} (\", \\\"id\\\": \\\"\" /[a-zA-Z0-9]{{9}}/ \"\\\"\")? \"}}\"\n"
    )
    .into()
}
