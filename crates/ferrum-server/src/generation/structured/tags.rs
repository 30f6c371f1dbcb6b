//! Structural tags: free text in which what follows certain strings has a form. vLLM and SGLang have them, in the two
//! shapes of XGrammar's documentation: `structures` and `triggers`, and formats that contain each other.

use crate::error::ApiError;
use crate::output::{Markers, marker_regex};
use crate::prompt::special_token_escape::SpecialTokenEscaper;
use ferrum_engine::grammar::{Grammar, lark_string, lark_token};
use serde::Deserialize;
use serde_json::Value;

/// What is found, or why it cannot be.
type Found<T> = Result<T, String>;
/// A part of a rule.
type Expression = Found<String>;

/// Deepest nesting of formats.
const MAX_DEPTH: usize = 32;

/// What the whole answer is, in either shape.
#[derive(Deserialize)]
#[serde(untagged)]
enum Document {
    Nested {
        format: Form,
    },
    Flat {
        structures: Vec<Structure>,
        triggers: Vec<String>,
    },
}

/// A tag of the older shape.
#[derive(Deserialize)]
struct Structure {
    begin: String,
    schema: Value,
    end: String,
}

/// A form of text.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Form {
    ConstString {
        value: String,
    },
    JsonSchema {
        json_schema: Value,
    },
    Regex {
        pattern: String,
    },
    Grammar {
        grammar: String,
    },
    /// Anything up to the end of the tag or of the answer.
    AnyText,
    Sequence {
        elements: Vec<Form>,
    },
    Or {
        elements: Vec<Form>,
    },
    Tag(Tag),
    /// Text in which a trigger begins one of the tags.
    TriggeredTags(Triggered),
    TagsWithSeparator {
        tags: Vec<Tag>,
        separator: String,
        #[serde(default)]
        at_least_one: bool,
        #[serde(default)]
        stop_after_first: bool,
    },
}

#[derive(Deserialize)]
struct Triggered {
    triggers: Vec<String>,
    tags: Vec<Tag>,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
}

#[derive(Deserialize)]
struct Tag {
    begin: String,
    content: Box<Form>,
    end: Ends,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ends {
    One(String),
    Several(Vec<String>),
}

impl Ends {
    fn list(&self) -> &[String] {
        match self {
            Self::One(end) => std::slice::from_ref(end),
            Self::Several(ends) => ends,
        }
    }
}

/// The grammar that the field `param` describes.
///
/// # Errors
/// A 400 that names the field.
pub(super) fn grammar(
    document: Value,
    param: &str,
    markers: &Markers<'_>,
    special: &SpecialTokenEscaper,
) -> Result<Grammar, ApiError> {
    let invalid = |reason: String| ApiError::invalid(param, reason);
    let document = serde_json::from_value(document);
    let document = document.map_err(|e| invalid(format!("not a structural tag: {e}")))?;
    let form = match document {
        Document::Nested { format } => format,
        Document::Flat {
            structures,
            triggers,
        } => Form::TriggeredTags(Triggered {
            tags: structures.into_iter().map(Structure::tag).collect(),
            triggers,
            at_least_one: false,
            stop_after_first: false,
        }),
    };
    let mut rules = Rules {
        markers,
        special,
        text: String::new(),
        parts: Vec::new(),
        count: 0,
    };
    let start = rules.form(&form, None, 0).map_err(invalid)?;
    Ok(Grammar::Lark {
        text: format!("start: {start}\n{ANY}: /(?s:.*)/\n{}", rules.text),
        parts: rules.parts,
    })
}

impl Structure {
    fn tag(self) -> Tag {
        Tag {
            begin: self.begin,
            content: Box::new(Form::JsonSchema {
                json_schema: self.schema,
            }),
            end: Ends::One(self.end),
        }
    }
}

/// The terminal of any text.
const ANY: &str = "TAGS_TEXT";

/// A grammar in the making. Reasons of errors are texts.
struct Rules<'a> {
    markers: &'a Markers<'a>,
    special: &'a SpecialTokenEscaper,
    text: String,
    parts: Vec<(String, Grammar)>,
    /// Rules so far, which gives each a name of its own.
    count: usize,
}

impl Rules<'_> {
    /// An expression of the form and one of the `ends` behind it.
    fn form(&mut self, form: &Form, ends: Option<&[String]>, depth: usize) -> Expression {
        if depth > MAX_DEPTH {
            return Err(format!("forms are nested more than {MAX_DEPTH} deep"));
        }
        let deeper = depth + 1;
        let plain = match form {
            Form::ConstString { value } => self.string(value),
            Form::JsonSchema { json_schema } => self.part(Grammar::JsonSchema {
                schema: json_schema.clone(),
                lenient: true,
            }),
            Form::Regex { pattern } => self.part(Grammar::Regex(pattern.clone())),
            Form::Grammar { grammar } => self.part(Grammar::Gbnf(grammar.clone())),
            Form::AnyText => return Ok(self.until(ends)),
            Form::Sequence { elements } => return self.sequence(elements, ends, deeper),
            Form::Or { elements } => {
                let each = elements.iter().map(|form| self.form(form, ends, deeper));
                return alternatives(each.collect::<Found<_>>()?);
            }
            Form::Tag(tag) => self.tag(&tag.begin, tag, deeper)?,
            Form::TriggeredTags(tags) => return self.triggered(tags, ends, deeper),
            Form::TagsWithSeparator {
                tags,
                separator,
                at_least_one,
                stop_after_first,
            } => {
                let each = tags.iter().map(|tag| self.tag(&tag.begin, tag, deeper));
                let one = alternatives(each.collect::<Found<_>>()?)?;
                let separator = self.string(separator);
                let more = match stop_after_first {
                    true => String::new(),
                    false => format!(" ({separator} {one})*"),
                };
                let optional = if *at_least_one { "" } else { "?" };
                format!("({one}{more}){optional}")
            }
        };
        Ok(plain + &self.ends(ends))
    }

    fn sequence(&mut self, elements: &[Form], ends: Option<&[String]>, depth: usize) -> Expression {
        let Some((last, before)) = elements.split_last() else {
            return Err("found a sequence without elements".into());
        };
        let mut found = Vec::new();
        for form in before {
            if matches!(form, Form::AnyText | Form::TriggeredTags(_)) {
                let reason = "any_text and triggered_tags may only be the last of a sequence";
                return Err(reason.into());
            }
            found.push(self.form(form, None, depth)?);
        }
        found.push(self.form(last, ends, depth)?);
        Ok(format!("({})", found.join(" ")))
    }

    /// A tag after as much of its beginning as is there already; `begin` is the rest.
    fn tag(&mut self, begin: &str, tag: &Tag, depth: usize) -> Expression {
        let begin = match begin {
            "" => String::new(),
            begin => self.string(begin) + " ",
        };
        let content = self.form(&tag.content, Some(tag.end.list()), depth)?;
        Ok(format!("({begin}{content})"))
    }

    fn triggered(&mut self, tags: &Triggered, ends: Option<&[String]>, depth: usize) -> Expression {
        let mut taken = vec![false; tags.tags.len()];
        let mut opened = Vec::new();
        for trigger in &tags.triggers {
            if trigger.is_empty() {
                return Err("found an empty trigger".into());
            }
            let mut begun = Vec::new();
            for (tag, taken) in tags.tags.iter().zip(&mut taken) {
                if let Some(rest) = tag.begin.strip_prefix(trigger.as_str())
                    && !std::mem::replace(taken, true)
                {
                    begun.push(self.tag(rest, tag, depth)?);
                }
            }
            if !begun.is_empty() {
                let open = self.until(Some(std::slice::from_ref(trigger)));
                opened.push(format!("({open} {})", alternatives(begun)?));
            }
        }
        if let Some(lost) = taken.iter().position(|taken| !taken) {
            let begin = &tags.tags[lost].begin;
            return Err(format!("no trigger begins the tag {begin:?}"));
        }
        let one = alternatives(opened)?;
        let after = self.until(ends);
        let first = match tags.at_least_one {
            true => {
                let each = tags.tags.iter().map(|tag| self.tag(&tag.begin, tag, depth));
                alternatives(each.collect::<Found<_>>()?)?
            }
            false => String::new(),
        };
        Ok(match (tags.at_least_one, tags.stop_after_first) {
            (true, true) => first + &self.ends(ends),
            (false, true) => format!("({one}{} | {after})", self.ends(ends)),
            (_, false) => format!("({first} {one}* {after})"),
        })
    }

    /// One of the ends, behind something else.
    fn ends(&self, ends: Option<&[String]>) -> String {
        let Some(ends) = ends else {
            return String::new();
        };
        let filled = ends.iter().filter(|end| !end.is_empty());
        let filled: Vec<_> = filled.map(|end| self.string(end)).collect();
        let optional = if filled.len() < ends.len() { "?" } else { "" };
        match filled.is_empty() {
            true => String::new(),
            false => format!(" ({}){optional}", filled.join(" | ")),
        }
    }

    /// Any text up to and with the first of the ends; without any, up to the end of the answer.
    fn until(&mut self, ends: Option<&[String]>) -> String {
        let ends = ends.unwrap_or_default();
        if ends.iter().any(String::is_empty) || ends.is_empty() {
            return ANY.into();
        }
        let mut found = Vec::new();
        let mut texts = Vec::new();
        for end in ends {
            match self.markers.token(end) {
                Some(token) => found.push(format!("({ANY} {})", lark_token(token))),
                None => texts.push(marker_regex(end)),
            }
        }
        if !texts.is_empty() {
            let name = format!("tags_until_{}", self.count);
            self.count += 1;
            let texts = texts.join("|");
            self.text += &format!("{name}[lazy]: /(?s:.*)({texts})/\n");
            found.push(name);
        }
        format!("({})", found.join(" | "))
    }

    /// A string, in which special tokens are themselves.
    fn string(&self, text: &str) -> String {
        let parts = self.special.parts(text).into_iter();
        let parts = parts.map(|(part, is_token)| {
            let token = self.markers.token(part).filter(|_| is_token);
            token.map_or_else(|| lark_string(part), lark_token)
        });
        let parts: Vec<_> = parts.collect();
        match parts.is_empty() {
            true => lark_string(text),
            false => format!("({})", parts.join(" ")),
        }
    }

    fn part(&mut self, grammar: Grammar) -> String {
        let name = format!("tags_part_{}", self.parts.len());
        self.parts.push((name.clone(), grammar));
        format!("@{name}")
    }
}

fn alternatives(list: Vec<String>) -> Expression {
    match list.is_empty() {
        true => Err("found no form to choose from".into()),
        false => Ok(format!("({})", list.join(" | "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::demo;
    use ferrum_engine::grammar::GrammarCompiler;
    use ferrum_formats::tokenizer::EncodeOptions;
    use serde_json::json;
    use std::sync::Arc;

    #[test]
    fn answers_are_of_the_form() {
        let model = demo().decoder();
        let tokenizer = &model.tokenizer;
        let compiler = GrammarCompiler::new(Arc::clone(tokenizer), tokenizer.vocab_size());
        let special = SpecialTokenEscaper::new(tokenizer);
        let mut ids = 0..tokenizer.vocab_size() as u32;
        let token = ids.rfind(|&id| tokenizer.is_special(id));
        let token = tokenizer.token_text(token.unwrap()).unwrap();
        let one = json!({"enum": [1]});
        let call = json!({"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": one}, "end": "</f>"});
        let note = json!({"type": "tag", "begin": "<n>", "content": {"type": "any_text"}, "end": ["</n>", "<n/>"]});
        let nested = |format: Value| json!({"type": "structural_tag", "format": format});
        let triggered = |tags: &[&Value], first: bool, stop: bool| {
            nested(json!({
                "type": "triggered_tags", "triggers": ["<f=", "<n>", token], "tags": tags,
                "at_least_one": first, "stop_after_first": stop,
            }))
        };
        let by_token =
            json!({"begin": format!("{token}go"), "content": {"type": "any_text"}, "end": token});
        let flat = json!({
            "type": "structural_tag", "triggers": ["<f="],
            "structures": [{"begin": "<f=a>", "schema": one, "end": "</f>"}],
        });
        let spoken = format!("Well {token}go on{token} so");
        let unspoken = format!("Well {token}stop{token}");
        let cases: &[(Value, &[&str], &[&str])] = &[
            (
                flat,
                &["", "Text.", "So <f=a>1</f> and <f=a>1</f>."],
                &["<f=b>1</f>", "<f=a>2</f>", "<f=a>1"],
            ),
            (
                triggered(&[&call, &note], true, false),
                &["<f=a>1</f>", "<n>any <f= text</n> and <f=a>1</f> so"],
                &["", "Text <f=a>1</f>", "<f=a>1</f><f="],
            ),
            (
                triggered(&[&call], false, true),
                &["", "Text", "Text <f=a>1</f>"],
                &["Text <f=a>1</f> more", "<f=a>"],
            ),
            (
                triggered(&[&by_token], false, false),
                &["", &spoken],
                &[&unspoken],
            ),
            (
                nested(
                    json!({"type": "tags_with_separator", "tags": [call, note], "separator": ", "}),
                ),
                &["", "<f=a>1</f>", "<f=a>1</f>, <n>b<n/>, <f=a>1</f>"],
                &["<f=a>1</f>,", "<f=a>1</f><f=a>1</f>"],
            ),
            (
                nested(json!({"type": "sequence", "elements": [
                    {"type": "const_string", "value": "a"},
                    {"type": "or", "elements": [
                        {"type": "regex", "pattern": "[bc]+"},
                        {"type": "grammar", "grammar": "root ::= \"x\" \"y\""},
                    ]},
                    {"type": "any_text"},
                ]})),
                &["ab", "axy and more", "acb."],
                &["a", "b", "ax"],
            ),
        ];
        for (i, (document, yes, no)) in cases.iter().enumerate() {
            let grammar = grammar(document.clone(), "x", &Markers(tokenizer), &special).unwrap();
            let constraint = compiler.compile(&grammar);
            let constraint = constraint.unwrap_or_else(|e| panic!("case {i}: {e}: {grammar:?}"));
            let accepts = |text: &str| {
                constraint.accepts(&tokenizer.encode(text, EncodeOptions::PROMPT).unwrap())
            };
            for text in *yes {
                assert!(accepts(text), "case {i}: {text:?}");
            }
            for text in *no {
                assert!(!accepts(text), "case {i}: {text:?}");
            }
        }
        let mut deep = json!({"type": "any_text"});
        for _ in 0..40 {
            deep = json!({"type": "or", "elements": [deep]});
        }
        for (document, words) in [
            (json!({}), "not a structural tag"),
            (nested(json!({"type": "or", "elements": []})), "no form"),
            (triggered(&[], false, false), "no form"),
            (nested(deep), "nested more than 32"),
            (
                nested(
                    json!({"type": "triggered_tags", "triggers": ["<x>"], "tags": [{"begin": "<y>", "content": {"type": "any_text"}, "end": ""}]}),
                ),
                "no trigger begins the tag \"<y>\"",
            ),
        ] {
            let error = grammar(document, "field", &Markers(tokenizer), &special).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
