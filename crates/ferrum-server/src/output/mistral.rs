//! Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`. Models with this marker are read in both of their
//! forms, whichever the template speaks of ([`mistral_args`](super::mistral_args) is the other). Arguments are
//! given as they come where the name stands first.

use super::OutputFormat;
use super::definition::FormatDefinition;
use super::deltas::Deltas;
use super::grammar::{CallGrammar, Rules};
use super::pending_text::{PendingText, PrefixMatch, begins};
use super::reader::{CallReader, ObjectsReader, Step};

pub(super) const CALL: &str = "[TOOL_CALLS]";
pub(super) const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

/// Most bytes of names and markers before arguments.
const MAX_HEADER_BYTES: usize = 512;

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "mistral",
    template: &[&[CALL]],
    openers: &[CALL],
    markers: &[CALL, ARGS, CALL_ID],
    bare: None,
    reader,
    rules,
};

fn reader(_: &OutputFormat, _: &'static str) -> Box<dyn CallReader> {
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

/// A call of the newer form, after the marker: `name[ARGS]{…}`.
#[derive(Debug, Default)]
struct NamedCall {
    in_arguments: bool,
}

impl NamedCall {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas) -> Step {
        if self.in_arguments {
            return match deltas.take_arguments(held) {
                None => Step::Wait,
                Some(_) => Step::Over,
            };
        }
        let (text, is_cut) = held.front(MAX_HEADER_BYTES);
        let (name, at) = match head(text) {
            Some(Some(head)) => head,
            Some(None) if !is_cut => return Step::Wait,
            Some(None) | None => return Step::NotACall,
        };
        let name = text[..name].to_owned();
        held.commit(at);
        deltas.begin_call(name);
        self.in_arguments = true;
        Step::Again
    }
}

/// Where the name ends and where the arguments begin, as far as that is known; `None` if it is no call.
fn head(text: &str) -> Option<Option<(usize, usize)>> {
    let part = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let length = |text: &str| text.bytes().take_while(|&byte| part(byte)).count();
    let name = length(text);
    if name == 0 {
        return None;
    }
    let mut rest = &text[name..];
    match begins(rest, CALL_ID) {
        PrefixMatch::Yes => {
            rest = &rest[CALL_ID.len()..];
            rest = &rest[length(rest)..];
        }
        PrefixMatch::Maybe => return Some(None),
        PrefixMatch::No => {}
    }
    match begins(rest, ARGS) {
        PrefixMatch::Yes => rest = &rest[ARGS.len()..],
        PrefixMatch::Maybe => return Some(None),
        PrefixMatch::No => {}
    }
    rest = rest.trim_start();
    match rest.bytes().next() {
        None => Some(None),
        Some(b'{') => Some(Some((name, text.len() - rest.len()))),
        Some(_) => None,
    }
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let open = grammar.marker(CALL);
    let body = grammar.objects("arguments");
    let more = grammar.more("\", \" item");
    format!(
        "calls: {open} call\ncall: \" \"? \"[\" item{more} \"]\"\n\
         item: {body} (\", \\\"id\\\": \\\"\" /[a-zA-Z0-9]{{9}}/ \"\\\"\")? \"}}\"\n"
    )
    .into()
}
