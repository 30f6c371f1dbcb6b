//! Newer models of Mistral: `[TOOL_CALLS]name[ARGS]{…}`, again for each call, with `[CALL_ID]id` before `[ARGS]`
//! from some, and without `[ARGS]` from others. The reader is that of [`mistral`], which reads both forms.

use super::definition::FormatDefinition;
use super::grammar::{CallGrammar, Rules, lark_string};
use super::mistral::{self, ARGS, CALL};

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "mistral-args",
    template: &[&[CALL, ARGS]],
    rules,
    ..mistral::DEFINITION
};

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let (open, args) = (grammar.marker(CALL), grammar.marker(ARGS));
    let body = grammar
        .one(|grammar, i, name| format!("{} {args} {}", lark_string(name), grammar.arguments(i)));
    let more = grammar.more(&format!("{open} call"));
    format!("calls: {open} call{more}\ncall: {body}\n").into()
}
