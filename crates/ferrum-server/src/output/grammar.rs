//! Grammars of calls: what all formats need to write theirs.

use super::function::Function;
use super::values::{self, Kind};
pub(super) use ferrum_engine::grammar::lark_string;
use ferrum_engine::grammar::{Grammar, lark_token};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_types::TokenId;
use serde_json::Value;

/// The rules of a format's calls.
pub(super) struct Rules {
    /// `calls`: one call of the functions, or several where the model writes several; and `call`: what follows
    /// the marker that begins it.
    pub(super) calls: String,
    /// `free`: text in which calls are calls of the functions, where it is not text with calls in between.
    pub(super) free: Option<String>,
}

impl From<String> for Rules {
    fn from(calls: String) -> Self {
        Self { calls, free: None }
    }
}

/// A grammar in the making.
pub(super) struct CallGrammar<'a> {
    pub(super) functions: &'a [Function],
    pub(super) markers: &'a Markers<'a>,
    pub(super) parallel: bool,
    pub(super) must_call: bool,
    /// Grammars that the rules name.
    pub(super) parts: Vec<(String, Grammar)>,
}

/// How arguments one by one are written.
pub(super) struct Pairs<'a> {
    /// A name with what is around it.
    pub(super) open: &'a dyn Fn(&str) -> String,
    /// Any name and its value, as text.
    pub(super) any: &'a str,
    /// The rule of a value as text, up to what closes it.
    pub(super) text: &'a str,
    /// What closes a value.
    pub(super) close: &'a str,
    /// What follows.
    pub(super) after: &'a str,
}

/// A parameter of a function.
struct Parameter {
    name: String,
    kind: Kind,
    /// All that it may be, if that are strings.
    choices: Option<Vec<String>>,
    required: bool,
    grammar: Grammar,
}

impl CallGrammar<'_> {
    pub(super) fn marker(&self, marker: &str) -> String {
        self.markers.lark(marker)
    }

    pub(super) fn until(&self, rule: &str, before: &str, marker: &str) -> String {
        self.markers.until(rule, before, marker)
    }

    /// One of the functions, each written as `body` says.
    pub(super) fn one(&mut self, mut body: impl FnMut(&mut Self, usize, &str) -> String) -> String {
        let functions = self.functions;
        let bodies = functions.iter().enumerate();
        let bodies: Vec<_> = bodies.map(|(i, f)| body(self, i, &f.name)).collect();
        format!("({})", bodies.join(" | "))
    }

    /// One of the functions as an object up to its last brace, with the arguments under `key`.
    pub(super) fn objects(&mut self, key: &str) -> String {
        self.one(|grammar, i, name| {
            let name = Value::from(name);
            let head = lark_string(&format!("{{\"name\": {name}, \"{key}\": "));
            format!("{head} {}", grammar.arguments(i))
        })
    }

    /// The arguments of a function as JSON.
    pub(super) fn arguments(&mut self, i: usize) -> String {
        let grammar = self.functions[i].arguments(self.must_call);
        self.part(grammar)
    }

    /// Repeats `rest` where there may be several calls.
    pub(super) fn more(&self, rest: &str) -> String {
        match self.parallel {
            true => format!(" ({rest})*"),
            false => String::new(),
        }
    }

    fn part(&mut self, grammar: Grammar) -> String {
        let known = self.parts.iter().find(|(_, known)| *known == grammar);
        if let Some((name, _)) = known {
            return format!("@{name}");
        }
        let name = format!("part_{}", self.parts.len());
        let reference = format!("@{name}");
        self.parts.push((name, grammar));
        reference
    }

    /// The arguments of a function one by one, in the order of its schema.
    pub(super) fn pairs(&mut self, i: usize, pairs: &Pairs<'_>) -> String {
        let Some(parameters) = self.parameters(i) else {
            return format!("({} {})*", pairs.any, pairs.after);
        };
        let one = |parameter: Parameter| {
            let value = match (&parameter.choices, parameter.kind) {
                (Some(choices), _) => {
                    let choices: Vec<_> = choices.iter().map(|text| lark_string(text)).collect();
                    format!("({}) {}", choices.join(" | "), pairs.close)
                }
                (None, Kind::Json) => {
                    format!("{} {}", self.part(parameter.grammar), pairs.close)
                }
                (None, Kind::Text | Kind::Either) => pairs.text.to_owned(),
            };
            let body = format!("{} {value} {}", (pairs.open)(&parameter.name), pairs.after);
            match parameter.required {
                true => body,
                false => format!("({body})?"),
            }
        };
        let list: Vec<_> = parameters.into_iter().map(one).collect();
        list.join(" ")
    }

    /// A call with the arguments of a function by name, as Python writes it. Adds its rules to `rules`.
    pub(super) fn keywords(&mut self, i: usize, name: &str, rules: &mut String) -> String {
        const KEY: &str = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/ \"=\"";
        let open = lark_string(&format!("{name}("));
        let Some(parameters) = self.parameters(i) else {
            let any = self.part(Grammar::JsonSchema {
                schema: true.into(),
                lenient: true,
            });
            return format!("{open} ({KEY} {any} (\", \" {KEY} {any})*)? \")\"");
        };
        let count = parameters.len();
        for (j, parameter) in parameters.into_iter().enumerate() {
            let boolean = matches!(
                &parameter.grammar,
                Grammar::JsonSchema { schema, .. } if schema.get("type") == Some(&"boolean".into())
            );
            let value = match boolean {
                true => "(\"True\" | \"False\")".to_owned(),
                false => self.part(parameter.grammar),
            };
            let key = lark_string(&format!("{}=", parameter.name));
            // A comma stands before all but the first that is there.
            for (rule, comma) in [("first", ""), ("more", "\", \" ")] {
                if j == 0 && rule == "more" {
                    continue;
                }
                let next = |rule: &str| format!("{rule}_{i}_{}", j + 1);
                let last = j + 1 == count;
                let body = match (last, parameter.required) {
                    (true, true) => format!("{comma}{key} {value}"),
                    (true, false) => format!("({comma}{key} {value})?"),
                    (false, true) => format!("{comma}{key} {value} {}", next("more")),
                    (false, false) => {
                        format!("{comma}{key} {value} {} | {}", next("more"), next(rule))
                    }
                };
                *rules += &format!("{rule}_{i}_{j}: {body}\n");
            }
        }
        match count {
            0 => format!("{open} \")\""),
            _ => format!("{open} first_{i}_0 \")\""),
        }
    }

    /// The parameters of a function; `None` where they are free, or the schema does not list them.
    fn parameters(&self, i: usize) -> Option<Vec<Parameter>> {
        const COMBINED: [&str; 4] = ["$ref", "anyOf", "oneOf", "allOf"];
        const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
        let function = &self.functions[i];
        let root = &function.parameters;
        let listed = root.get("properties")?.as_object()?;
        if !self.must_call && !function.strict || COMBINED.iter().any(|key| root.get(key).is_some())
        {
            return None;
        }
        let required = root.get("required").and_then(Value::as_array);
        let is_required = |name: &str| required.is_some_and(|list| list.iter().any(|n| n == name));
        let parameter = |(name, schema): (&String, &Value)| {
            let mut alone = schema.clone();
            if let Value::Object(map) = &mut alone {
                for key in DEFINITIONS {
                    if let Some(definitions) = root.get(key) {
                        map.insert(key.into(), definitions.clone());
                    }
                }
            }
            Parameter {
                name: name.clone(),
                kind: values::kind(root, values::schema(function, name)),
                choices: choices(schema),
                required: is_required(name),
                grammar: Grammar::JsonSchema {
                    schema: alone,
                    lenient: !function.strict,
                },
            }
        };
        Some(listed.iter().map(parameter).collect())
    }
}

/// All that a schema lets a value be, if that are strings.
fn choices(schema: &Value) -> Option<Vec<String>> {
    let only = schema.get("const").map(std::slice::from_ref);
    let values = only.or_else(|| schema.get("enum")?.as_array().map(Vec::as_slice))?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    values.iter().map(text).collect()
}

/// The vocabulary, as far as markers are concerned.
pub(crate) struct Markers<'t>(pub(crate) &'t Tokenizer);

impl Markers<'_> {
    /// The special token that is this marker, if there is one.
    pub(crate) fn token(&self, marker: &str) -> Option<TokenId> {
        self.0
            .token_id(marker)
            .filter(|&token| self.0.is_special(token))
    }

    /// The marker in Lark.
    pub(crate) fn lark(&self, marker: &str) -> String {
        self.token(marker)
            .map_or_else(|| lark_string(marker), lark_token)
    }

    /// A rule for any text up to and with the first of a marker, which `before` (a regular expression) precedes.
    pub(crate) fn until(&self, rule: &str, before: &str, marker: &str) -> String {
        match self.token(marker) {
            Some(token) => {
                let terminal = rule.to_uppercase();
                let token = lark_token(token);
                format!("{rule}: {terminal} {token}\n{terminal}: /(?s:.*){before}/\n")
            }
            None => format!("{rule}[lazy]: /(?s:.*){before}{}/\n", marker_regex(marker)),
        }
    }
}

/// A marker in a regular expression between slashes.
pub(crate) fn marker_regex(marker: &str) -> String {
    let special = |c: char| c.is_ascii() && !c.is_ascii_alphanumeric() && !"<>_".contains(c);
    let escape = |c: char| match special(c) {
        true => format!("\\{c}"),
        false => c.to_string(),
    };
    marker.chars().map(escape).collect()
}
