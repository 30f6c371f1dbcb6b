//! How a model writes its calls of tools, and the grammars of it.

use super::{hermes, llama, mistral};
use ferrum_engine::grammar::{Grammar, lark_string, lark_token};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_types::TokenId;
use serde_json::Value;
use std::fmt::Write;
use std::str::FromStr;

/// A way to write calls of tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallFormat {
    /// Of Hermes, Qwen and the demo model: an object between tags.
    #[default]
    Hermes,
    /// Of Llama 3: an object by itself.
    Llama,
    /// Of Mistral's models: an array of objects after a mark.
    Mistral,
    /// Of Mistral's newer models: after a mark the name, after another the arguments.
    MistralArgs,
}

impl FromStr for CallFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "hermes" => Ok(CallFormat::Hermes),
            "llama3" => Ok(CallFormat::Llama),
            "mistral" => Ok(CallFormat::Mistral),
            "mistral-args" => Ok(CallFormat::MistralArgs),
            _ => Err("expected hermes, llama3, mistral or mistral-args".into()),
        }
    }
}

/// A function as a tool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Function {
    /// Its place among the tools of the request.
    pub(crate) index: usize,
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
    /// Whether what the schema says has to be enforceable, and is enforced wherever it is called.
    pub(crate) strict: bool,
}

impl CallFormat {
    /// The form of which a chat template speaks.
    pub(crate) fn of_template(source: &str) -> Option<Self> {
        let says = |text: &str| source.contains(text);
        if says(hermes::CALL) {
            Some(CallFormat::Hermes)
        } else if says(mistral::CALL) && says(mistral::ARGS) {
            Some(CallFormat::MistralArgs)
        } else if says(mistral::CALL) {
            Some(CallFormat::Mistral)
        } else if says(llama::CALL) || says("{\"name\": \"") && says("\"parameters\": ") {
            Some(CallFormat::Llama)
        } else {
            None
        }
    }

    /// What stands before the first call.
    pub(super) fn opener(self) -> &'static str {
        match self {
            CallFormat::Hermes => hermes::CALL,
            CallFormat::Llama => llama::CALL,
            CallFormat::Mistral | CallFormat::MistralArgs => mistral::CALL,
        }
    }

    /// Everything that some vocabularies write as a special token.
    pub(crate) fn marks(self) -> &'static [&'static str] {
        match self {
            CallFormat::Hermes => &[hermes::CALL, hermes::CALL_END],
            CallFormat::Llama => &[llama::CALL],
            CallFormat::Mistral | CallFormat::MistralArgs => {
                &[mistral::CALL, mistral::ARGS, mistral::CALL_ID]
            }
        }
    }

    /// A name for a call. Mistral's templates take no other than these.
    pub(crate) fn call_id(self) -> String {
        let id = crate::app::fresh_id("call_");
        match self {
            CallFormat::Hermes | CallFormat::Llama => id,
            CallFormat::Mistral | CallFormat::MistralArgs => id.chars().rev().take(9).collect(),
        }
    }

    /// The rule `calls`: one call of the functions, or several where the model writes several. Arguments
    /// of the `i`-th function are `@args_i`.
    pub(crate) fn calls(self, functions: &[Function], marks: &Marks<'_>, parallel: bool) -> String {
        let mark = |text| marks.lark(text);
        let names = || functions.iter().enumerate().map(|(i, f)| (i, &f.name));
        let head =
            |name: &str, key: &str| lark_string(&format!("{{\"name\": \"{name}\", \"{key}\": "));
        let object = |i: usize, name: &str, key: &str| format!("{} @args_{i}", head(name, key));
        let one = |body: &dyn Fn(usize, &str) -> String| {
            let bodies: Vec<_> = names().map(|(i, name)| body(i, name)).collect();
            format!("({})", bodies.join(" | "))
        };
        let more = |rest: &str| match parallel {
            true => format!(" ({rest})*"),
            false => String::new(),
        };
        match self {
            CallFormat::Hermes => {
                let body = one(&|i, name| object(i, name, "arguments"));
                let (open, close) = (mark(hermes::CALL), mark(hermes::CALL_END));
                // Beside the calls, the rule of what follows the opening tag, for where it is free.
                format!(
                    "calls: {open} call{}\ncall: \"\\n\"? {body} \"}}\" \"\\n\"? {close}\n",
                    more(&format!("\"\\n\"? {open} call"))
                )
            }
            // Its templates have no place for a second call.
            CallFormat::Llama => {
                let body = one(&|i, name| object(i, name, "parameters"));
                format!("calls: {}? call\ncall: {body} \"}}\"\n", mark(llama::CALL))
            }
            CallFormat::Mistral => {
                let body = one(&|i, name| object(i, name, "arguments"));
                format!(
                    "calls: {} call\ncall: \" \"? \"[\" item{} \"]\"\n\
                     item: {body} (\", \\\"id\\\": \\\"\" /[a-zA-Z0-9]{{9}}/ \"\\\"\")? \"}}\"\n",
                    mark(mistral::CALL),
                    more("\", \" item")
                )
            }
            CallFormat::MistralArgs => {
                let args = mark(mistral::ARGS);
                let open = mark(mistral::CALL);
                let body = one(&|i, name| format!("{} {args} @args_{i}", lark_string(name)));
                format!(
                    "calls: {open} call{}\ncall: {body}\n",
                    more(&format!("{open} call"))
                )
            }
        }
    }

    /// The rule `free`: text in which calls are calls of the functions, whose rules [`calls`](Self::calls)
    /// gives.
    pub(crate) fn free(self, marks: &Marks<'_>) -> String {
        let mut rules = String::new();
        let open = self.opener();
        // Writing to a string does not fail.
        let _ = match (self, marks.token(open)) {
            (CallFormat::Llama, _) => {
                // Whoever begins like a call makes one.
                write!(
                    rules,
                    "free: calls | FREE\nFREE: /(\\s*[^{{\\s](?s:.*))?/\n"
                )
            }
            (_, Some(token)) => {
                let token = lark_token(token);
                write!(rules, "free: (FREE {token} call)* FREE\nFREE: /(?s:.*)/\n")
            }
            (_, None) => {
                let open = mark_regex(open);
                write!(
                    rules,
                    "free: (opened call)* FREE\nopened[lazy]: /(?s:.*){open}/\nFREE: /(?s:.*)/\n"
                )
            }
        };
        rules
    }
}

impl Function {
    /// What its arguments have to be.
    pub(crate) fn arguments(&self) -> Grammar {
        let mut schema = self.parameters.clone();
        let says = |key: &str| schema.get(key).is_some();
        // Arguments are an object, whether the schema says so or not.
        if !["type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"]
            .into_iter()
            .any(says)
            && let Value::Object(map) = &mut schema
        {
            map.insert("type".into(), "object".into());
        }
        Grammar::JsonSchema {
            schema,
            lenient: !self.strict,
        }
    }
}

/// The vocabulary, as far as marks are concerned.
pub(crate) struct Marks<'t>(pub(crate) &'t Tokenizer);

impl Marks<'_> {
    /// The special token that is this mark, if there is one.
    pub(crate) fn token(&self, mark: &str) -> Option<TokenId> {
        self.0
            .token_id(mark)
            .filter(|&token| self.0.is_special(token))
    }

    /// The mark in Lark.
    pub(crate) fn lark(&self, mark: &str) -> String {
        self.token(mark)
            .map_or_else(|| lark_string(mark), lark_token)
    }
}

/// A mark in a regular expression between slashes.
pub(crate) fn mark_regex(mark: &str) -> String {
    let special = |c: char| !c.is_ascii_alphanumeric() && !"<>_".contains(c);
    let escape = |c: char| match special(c) {
        true => format!("\\{c}"),
        false => c.to_string(),
    };
    mark.chars().map(escape).collect()
}
