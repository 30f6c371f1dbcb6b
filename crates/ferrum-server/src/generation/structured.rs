//! Structured output: what a request says its answer has to be, in OpenAI's, vLLM's and llama.cpp's
//! fields, and the grammar of it.

use crate::error::ApiError;
use crate::models::model::Model;
use crate::output::{Function, Markers, OutputFormat};
use crate::request::{Format, Outputs, Schemata, StructuredOutputFields};
use ferrum_engine::grammar::{Constraint, Grammar, GrammarError};
use serde_json::Value;
use std::borrow::Cow;

type Result<T> = std::result::Result<T, ApiError>;

/// What an answer has to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Structured {
    pub(crate) grammar: Grammar,
    /// The field that says so.
    pub(crate) param: String,
}

/// What the fields about the form of the answer say; at most one of them may be there.
pub(crate) fn read(fields: StructuredOutputFields, model: &Model) -> Result<Option<Structured>> {
    let mut found = Vec::new();
    if let Some(format) = fields.response_format {
        found.extend(read_format(format, "response_format", false, model)?);
    }
    let guided = Outputs {
        json: fields.guided_json,
        json_object: fields.guided_json_object,
        regex: fields.guided_regex,
        choice: fields.guided_choice,
        grammar: fields.guided_grammar,
        structural_tag: None,
    };
    found.extend(outputs(guided, "guided_", model)?);
    if let Some(inner) = fields.structured_outputs {
        let inner = outputs(inner, "structured_outputs.", model)?;
        if inner.is_empty() {
            let reason =
                "expected one of json, json_object, regex, choice, grammar and structural_tag";
            return Err(ApiError::invalid("structured_outputs", reason));
        }
        found.extend(inner);
    }
    // llama.cpp's clients send an empty grammar where there is none.
    let gbnf = fields.grammar.filter(|text| !text.is_empty());
    let texts = [
        ("grammar", gbnf.map(Grammar::Gbnf)),
        ("ebnf", fields.ebnf.map(Grammar::Gbnf)),
        ("regex", fields.regex.map(Grammar::Regex)),
    ];
    for (param, grammar) in texts {
        found.extend(grammar.map(|grammar| Structured {
            grammar,
            param: param.into(),
        }));
    }
    if let Some(schema) = fields.json_schema {
        found.push(Structured {
            grammar: json_schema(schema.0, false),
            param: "json_schema".into(),
        });
    }
    one_form(found)
}

/// The one form of several fields, which may name the same: clients that know several servers say it in the
/// words of each.
fn one_form(found: Vec<Structured>) -> Result<Option<Structured>> {
    let mut found = found.into_iter();
    let first = found.next();
    let differs =
        |one: &Structured| Some(&one.grammar) != first.as_ref().map(|first| &first.grammar);
    match (found.find(differs), &first) {
        (Some(other), Some(first)) => {
            let reason = format!("it contradicts {}: an answer has one form", first.param);
            Err(ApiError::invalid(&other.param, reason))
        }
        _ => Ok(first),
    }
}

/// The form in an object that has a `type`. Where it is flat, the schema has no object of its own.
pub(crate) fn read_format(
    format: Format,
    path: &str,
    flat: bool,
    model: &Model,
) -> Result<Option<Structured>> {
    let missing = |name: &str| ApiError::invalid(format!("{path}.{name}"), "it is missing");
    match &*format.r#type {
        "text" => Ok(None),
        "json_object" => Ok(Some(Structured {
            // A schema here is llama.cpp's.
            grammar: match format.schema {
                Some(schema) => json_schema(schema.0, false),
                None => Grammar::json_object(),
            },
            param: path.to_owned(),
        })),
        "json_schema" => {
            let (schema, strict, param) = match format.json_schema {
                Some(named) => (named.schema, named.strict, "json_schema.schema"),
                None if flat || format.schema.is_some() => (format.schema, format.strict, "schema"),
                None => return Err(missing("json_schema")),
            };
            let schema = schema.ok_or_else(|| missing(param))?;
            Ok(Some(Structured {
                grammar: json_schema(schema.0, strict.unwrap_or(false)),
                param: format!("{path}.{param}"),
            }))
        }
        "structural_tag" => {
            let fields = [
                ("format", format.format.map(|inner| inner.0)),
                ("structures", format.structures.map(|inner| inner.0)),
                ("triggers", format.triggers.map(|inner| inner.0)),
            ];
            let fields = fields.into_iter();
            let fields = fields.filter_map(|(name, value)| Some((name.to_owned(), value?)));
            let document = Value::Object(fields.collect());
            Ok(Some(structural_tag(document, path, model)?))
        }
        other => {
            let reason = format!(
                "found {other:?}, expected \"text\", \"json_object\", \"json_schema\" or \"structural_tag\""
            );
            Err(ApiError::invalid(format!("{path}.type"), reason))
        }
    }
}

fn structural_tag(document: Value, param: &str, model: &Model) -> Result<Structured> {
    let markers = Markers(&model.served.tokenizer);
    Ok(Structured {
        grammar: tags::grammar(document, param, &markers, model.special_token_escaper())?,
        param: param.to_owned(),
    })
}

/// A value that may be there as its text.
fn parsed(value: Schemata, param: &str) -> Result<Value> {
    match value.0 {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|e| ApiError::invalid(param, format!("not JSON: {e}"))),
        value => Ok(value),
    }
}

/// vLLM's fields: `guided_json` and its like, or `json` and its like in `structured_outputs`.
fn outputs(fields: Outputs, prefix: &str, model: &Model) -> Result<Vec<Structured>> {
    let mut found = Vec::new();
    if let Some(value) = fields.structural_tag {
        let param = format!("{prefix}structural_tag");
        found.push(structural_tag(parsed(value, &param)?, &param, model)?);
    }
    let mut add = |grammar, field: &str| {
        let param = format!("{prefix}{field}");
        found.push(Structured { grammar, param });
    };
    if let Some(value) = fields.json {
        let schema = parsed(value, &format!("{prefix}json"))?;
        add(json_schema(schema, true), "json");
    }
    if let Some(regex) = fields.regex {
        add(Grammar::Regex(regex), "regex");
    }
    if let Some(choices) = fields.choice {
        if choices.0.iter().any(String::is_empty) {
            let reason = "found \"\", expected strings that are not empty";
            return Err(ApiError::invalid(format!("{prefix}choice"), reason));
        }
        add(Grammar::Choice(choices.0), "choice");
    }
    if let Some(text) = fields.grammar {
        let grammar = match text.contains("::=") {
            true => Grammar::Gbnf(text),
            false => Grammar::Lark {
                text,
                parts: Vec::new(),
            },
        };
        add(grammar, "grammar");
    }
    if fields.json_object == Some(true) {
        add(Grammar::json_object(), "json_object");
    }
    Ok(found)
}

/// OpenAI's `strict`: what cannot be enforced is an error, else it is passed over.
fn json_schema(schema: Value, strict: bool) -> Grammar {
    Grammar::JsonSchema {
        schema,
        lenient: !strict,
    }
}

/// Compiles what a field says.
pub(crate) fn compile(model: &Model, param: &str, grammar: &Grammar) -> Result<Constraint> {
    compiled(model, grammar).map_err(|error| refusal(param, &error))
}

fn compiled(model: &Model, grammar: &Grammar) -> std::result::Result<Constraint, GrammarError> {
    let grammar = match model.served.open_schemas {
        true => Cow::Borrowed(grammar),
        false => close_schemas::close_schemas(grammar),
    };
    model.grammars.compile(&grammar)
}

fn refusal(param: &str, error: &GrammarError) -> ApiError {
    match error {
        GrammarError::Vocabulary(_) => ApiError::unsupported(param, error.to_string()),
        GrammarError::Busy => ApiError::many_grammars(error.to_string()),
        error => ApiError::invalid(param, error.to_string()),
    }
}

/// Whether and which tools are to be called, and what else the answer may be.
pub(crate) struct ChatForm<'a> {
    pub(crate) output_format: OutputFormat,
    /// Functions that may be called; none where no tool is.
    pub(crate) functions: &'a [Function],
    /// Whether the answer has to be a call.
    pub(crate) must_call: bool,
    /// What the answer is where it is no call.
    pub(crate) structured: Option<&'a Structured>,
}

impl ChatForm<'_> {
    /// The constraint on the whole answer, reasoning and calls included; `None` where it is free.
    ///
    /// # Errors
    /// A 400 that names the field whose grammar is at fault.
    pub(crate) fn compile(&self, model: &Model) -> Result<Option<Constraint>> {
        let strict = self.functions.iter().any(|function| function.strict);
        if self.structured.is_none() && !self.must_call && !strict {
            return Ok(None);
        }
        let (grammar, parts) = self.grammar(&Markers(&model.served.tokenizer));
        let first = parts.first().map_or("tools", |(param, _)| param);
        compiled(model, &grammar).map(Some).map_err(|fault| {
            let all = refusal(first, &fault);
            if matches!(fault, GrammarError::TooSlow | GrammarError::Busy) {
                return all;
            }
            // Which part is at fault shows where it is compiled by itself.
            let alone = |(param, part): &(String, Grammar)| compile(model, param, part).err();
            parts.iter().find_map(alone).unwrap_or(all)
        })
    }

    /// The grammar, and its parts by the fields that they come from.
    fn grammar(&self, markers: &Markers<'_>) -> (Grammar, Vec<(String, Grammar)>) {
        let mut parts = Vec::new();
        let mut fields = Vec::new();
        let mut rules = String::new();
        let mut options = Vec::new();
        let free = !self.must_call && self.structured.is_none();
        let format = self.output_format.format;
        if !self.functions.is_empty() {
            let parallel = self.output_format.max_calls > 1;
            (rules, parts) = format.calls(self.functions, markers, parallel, self.must_call, free);
            for function in self.functions {
                let param = format!("tools[{}].function.parameters", function.index);
                fields.push((param, function.arguments(self.must_call)));
            }
            options.push(if free { "free" } else { "calls" }.to_owned());
        }
        if let Some(structured) = self.structured.filter(|_| !self.must_call) {
            // Without a channel to come, the prompt has opened the last.
            let channels = format
                .channels(markers)
                .filter(|_| self.output_format.reasoning);
            let before = channels.map(|(_, before, _)| before);
            options.push(before.unwrap_or_default() + "@answer");
            parts.push(("answer".into(), structured.grammar.clone()));
            fields.push((structured.param.clone(), structured.grammar.clone()));
        }
        let (thought, more) = self.thought(markers, free);
        let options = options.join(" | ");
        let text = format!("start: {thought}body\nbody: {options}\n{rules}{more}");
        (Grammar::Lark { text, parts }, fields)
    }

    /// Reasoning before the answer, and its rules. Free text may begin with reasoning by itself.
    fn thought(&self, markers: &Markers<'_>, free: bool) -> (String, String) {
        let output_format = &self.output_format;
        if let Some((before, _, rules)) = output_format.format.channels(markers) {
            return match output_format.reasoning && !free {
                true => (before, rules),
                false => Default::default(),
            };
        }
        let thought = match output_format {
            output_format if output_format.begins_thinking => "thinking GAP? ".to_owned(),
            output_format if output_format.reasoning && !free => {
                format!(
                    "({} thinking GAP?)? ",
                    markers.lark(output_format.thinking.open)
                )
            }
            _ => return Default::default(),
        };
        let thinking = markers.until("thinking", "", output_format.thinking.close);
        (thought, thinking + "GAP: /[ \\n]{1,4}/\n")
    }
}

mod close_schemas;
mod tags;
#[cfg(test)]
mod tests;
