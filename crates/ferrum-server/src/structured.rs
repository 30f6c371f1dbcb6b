//! Structured output: what a request says its answer has to be, in OpenAI's, vLLM's and llama.cpp's
//! fields, and the grammar of it.

use crate::error::ApiError;
use crate::fields::{self, Fields};
use crate::model::Model;
use crate::output::{Function, Looks, Marks};
use ferrum_engine::grammar::{Constraint, Grammar, GrammarError, MAX_GRAMMAR_PARTS};
use serde_json::Value;

type Result<T> = std::result::Result<T, ApiError>;

/// What an answer has to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Structured {
    pub(crate) grammar: Grammar,
    /// The field that says so.
    pub(crate) param: String,
}

/// Takes all fields about the form of the answer; at most one of them may be there.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<Structured>> {
    let mut found = Vec::new();
    found.extend(response_format(fields)?);
    found.extend(outputs(fields, "guided_", None)?);
    if let Some(value) = fields.take("structured_outputs") {
        let mut inner = Fields::of(value, "structured_outputs")?;
        found.extend(outputs(&mut inner, "", Some("structured_outputs"))?);
        inner.finish()?;
    }
    if let Some(text) = fields.text("grammar")? {
        found.push(Structured {
            grammar: Grammar::Gbnf(text),
            param: "grammar".into(),
        });
    }
    if let [first, second, ..] = &found[..] {
        let reason = format!("it contradicts {}: an answer has one form", first.param);
        return Err(ApiError::invalid(&second.param, reason));
    }
    Ok(found.pop())
}

fn response_format(fields: &mut Fields) -> Result<Option<Structured>> {
    read_format(fields, "response_format", false)
}

/// The `format` of `text` in requests for responses, whose schema has no object of its own.
pub(crate) fn text_format(text: &mut Fields) -> Result<Option<Structured>> {
    read_format(text, "format", true)
}

fn read_format(fields: &mut Fields, name: &str, flat: bool) -> Result<Option<Structured>> {
    let Some(format) = fields.take(name) else {
        return Ok(None);
    };
    let path = fields.name(name);
    let mut format = Fields::of(format, &path)?;
    let kind = format.need("type")?;
    let wanted = match kind.as_str() {
        Some("text") => None,
        Some("json_object") => Some(Structured {
            // A schema here is llama.cpp's.
            grammar: match format.take("schema") {
                Some(schema) => json_schema(schema, false),
                None => Grammar::json_object(),
            },
            param: path,
        }),
        Some("json_schema") => {
            let mut nested = match flat {
                true => None,
                false => {
                    let path = format.name("json_schema");
                    Some(Fields::of(format.need("json_schema")?, &path)?)
                }
            };
            let inner = nested.as_mut().unwrap_or(&mut format);
            inner.text("name")?;
            inner.text("description")?;
            let strict = inner.boolean("strict")?.unwrap_or(false);
            let schema = inner.need("schema")?;
            let param = inner.name("schema");
            if let Some(nested) = nested {
                nested.finish()?;
            }
            let grammar = json_schema(schema, strict);
            Some(Structured { grammar, param })
        }
        _ => {
            let expected = "\"text\", \"json_object\" or \"json_schema\"";
            return Err(fields::wrong(&format.name("type"), &kind, expected));
        }
    };
    format.finish()?;
    Ok(wanted)
}

/// vLLM's fields: `guided_json` and its like, or `json` and its like in `structured_outputs`.
fn outputs(fields: &mut Fields, prefix: &str, whole: Option<&str>) -> Result<Vec<Structured>> {
    let mut found = Vec::new();
    let mut add = |grammar, param| found.push(Structured { grammar, param });
    let name = |field: &str| format!("{prefix}{field}");
    if let Some(value) = fields.take(&name("json")) {
        let param = fields.name(&name("json"));
        let schema = match value {
            // A schema as text.
            Value::String(text) => serde_json::from_str(&text)
                .map_err(|e| ApiError::invalid(&param, format!("not JSON: {e}")))?,
            value => value,
        };
        add(json_schema(schema, true), param);
    }
    if let Some(regex) = fields.text(&name("regex"))? {
        add(Grammar::Regex(regex), fields.name(&name("regex")));
    }
    if let Some(choices) = fields.list(&name("choice"), MAX_GRAMMAR_PARTS)? {
        let param = fields.name(&name("choice"));
        let text = |value: Value| match value {
            Value::String(text) if !text.is_empty() => Ok(text),
            other => Err(fields::wrong(&param, &other, "strings that are not empty")),
        };
        let choices = choices.into_iter().map(text).collect::<Result<_>>()?;
        add(Grammar::Choice(choices), param.clone());
    }
    if let Some(text) = fields.text(&name("grammar"))? {
        let grammar = match text.contains("::=") {
            true => Grammar::Gbnf(text),
            false => Grammar::Lark {
                text,
                parts: Vec::new(),
            },
        };
        add(grammar, fields.name(&name("grammar")));
    }
    let any = fields.boolean(&name("json_object"))?;
    match (any, whole) {
        (Some(true), _) => add(Grammar::json_object(), fields.name(&name("json_object"))),
        (_, Some(whole)) if found.is_empty() => {
            let reason = "expected one of json, json_object, regex, choice and grammar";
            return Err(ApiError::invalid(whole, reason));
        }
        _ => {}
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
    model
        .grammars
        .compile(grammar)
        .map_err(|error| match error {
            GrammarError::Vocabulary(_) => ApiError::unsupported(param, error.to_string()),
            error => ApiError::invalid(param, error.to_string()),
        })
}

/// Whether and which tools are to be called, and what else the answer may be.
pub(crate) struct ChatForm<'a> {
    pub(crate) looks: Looks,
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
        let (grammar, parts) = self.grammar(&Marks(&model.served.tokenizer));
        let first = parts.first().map_or("tools", |(param, _)| param);
        compile(model, first, &grammar).map(Some).map_err(|fault| {
            // Which part is at fault shows where it is compiled by itself.
            let alone = |(param, part): &(String, Grammar)| compile(model, param, part).err();
            parts.iter().find_map(alone).unwrap_or(fault)
        })
    }

    /// The grammar, and its parts by the fields that they come from.
    fn grammar(&self, marks: &Marks<'_>) -> (Grammar, Vec<(String, Grammar)>) {
        let mut parts = Vec::new();
        let mut fields = Vec::new();
        let mut rules = String::new();
        let mut options = Vec::new();
        let free = !self.must_call && self.structured.is_none();
        let format = self.looks.format;
        if !self.functions.is_empty() {
            let parallel = self.looks.max_calls > 1;
            (rules, parts) = format.calls(self.functions, marks, parallel, self.must_call, free);
            for function in self.functions {
                let param = format!("tools[{}].function.parameters", function.index);
                fields.push((param, function.arguments(self.must_call)));
            }
            options.push(if free { "free" } else { "calls" }.to_owned());
        }
        if let Some(structured) = self.structured.filter(|_| !self.must_call) {
            // Without a channel to come, the prompt has opened the last.
            let channels = format.channels(marks).filter(|_| self.looks.reasoning);
            let before = channels.map(|(_, before, _)| before);
            options.push(before.unwrap_or_default() + "@answer");
            parts.push(("answer".into(), structured.grammar.clone()));
            fields.push((structured.param.clone(), structured.grammar.clone()));
        }
        let (thought, more) = self.thought(marks, free);
        let options = options.join(" | ");
        let text = format!("start: {thought}body\nbody: {options}\n{rules}{more}");
        (Grammar::Lark { text, parts }, fields)
    }

    /// Reasoning before the answer, and its rules. Free text may begin with reasoning by itself.
    fn thought(&self, marks: &Marks<'_>, free: bool) -> (String, String) {
        let looks = &self.looks;
        if let Some((before, _, rules)) = looks.format.channels(marks) {
            return match looks.reasoning && !free {
                true => (before, rules),
                false => Default::default(),
            };
        }
        let thought = match looks {
            looks if looks.begins_thinking => "thinking GAP? ".to_owned(),
            looks if looks.reasoning && !free => {
                format!("({} thinking GAP?)? ", marks.lark(looks.thinking.open))
            }
            _ => return Default::default(),
        };
        let thinking = marks.until("thinking", "", looks.thinking.close);
        (thought, thinking + "GAP: /[ \\n]{1,4}/\n")
    }
}

#[cfg(test)]
mod tests;
