//! Newer models of Mistral: `[TOOL_CALLS]name[ARGS]{…}`, again for each call, with `[CALL_ID]id` before `[ARGS]`
//! from some, and without `[ARGS]` from others. Arguments are given as they come.

use super::deltas::Deltas;
use super::format::Row;
use super::grammar::{CallGrammar, Rules, lark_string};
use super::mistral::{self, ARGS, CALL, CALL_ID};
use super::pending_text::{PendingText, PrefixMatch, begins};
use super::reader::Step;

/// Most bytes of names and marks before arguments.
const MAX_HEADER_BYTES: usize = 512;

pub(super) const ROW: Row = Row {
    name: "mistral-args",
    template: &[&[CALL, ARGS]],
    rules,
    ..mistral::ROW
};

/// What follows the mark.
#[derive(Debug, Default)]
pub(super) struct NamedCall {
    in_arguments: bool,
}

impl NamedCall {
    pub(super) fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas) -> Step {
        if self.in_arguments {
            return match deltas.take_arguments(held) {
                None => Step::Wait,
                Some(_) => Step::Over,
            };
        }
        let Some(head) = head(held.text()) else {
            return Step::NotACall;
        };
        let Some((name, at)) = head else {
            return match held.text().len() > MAX_HEADER_BYTES {
                true => Step::NotACall,
                false => Step::Wait,
            };
        };
        let name = held.text()[..name].to_owned();
        held.settle(at);
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
    let (open, args) = (grammar.mark(CALL), grammar.mark(ARGS));
    let body = grammar
        .one(|grammar, i, name| format!("{} {args} {}", lark_string(name), grammar.arguments(i)));
    let more = grammar.more(&format!("{open} call"));
    format!("calls: {open} call{more}\ncall: {body}\n").into()
}
