//! Holds every answer that the tests get against the document of all routes: it has to be one that the document
//! describes, without a field that the document does not know.

use super::*;
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::OnceLock;

/// The document, as a server without a loaded model gives it.
fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| {
        let loader = |_: &str| Err("no model is needed".to_owned());
        let config = ServerConfig::default();
        let server = Running::models(&["demo"], Arc::new(loader), 0, config);
        let text = server.get("/openapi.json").text();
        serde_json::from_str(&text).unwrap()
    })
}

/// The description of a path. Some are there without their version as well.
fn path_item(path: &str) -> Option<&'static Value> {
    let path = path.split('?').next().unwrap().trim_end_matches('/');
    let matches = |template: &str| match template.split_once('{') {
        None => template == path || template == format!("/v1{path}"),
        Some((before, rest)) => {
            let after = rest.split_once('}').unwrap().1;
            let middle = path
                .strip_prefix(before)
                .and_then(|p| p.strip_suffix(after));
            middle.is_some_and(|middle| !middle.is_empty())
        }
    };
    let paths = document()["paths"].as_object().unwrap().iter();
    let mut found: Vec<_> = paths.filter(|(template, _)| matches(template)).collect();
    // A name may be anything, so what is written out goes before it, and the longer template before the shorter.
    found.sort_by_key(|(template, _)| (template.contains('{'), std::cmp::Reverse(template.len())));
    found.first().map(|(_, item)| *item)
}

/// Holds an answer against the schema of its status and type.
pub(super) fn check(method: &str, path: &str, status: u16, kind: &str, answer: &Value) {
    if path == "/openapi.json" {
        return;
    }
    let operation = path_item(path).and_then(|item| item.get(method.to_lowercase()));
    let response = operation.map(|operation| &operation["responses"][status.to_string()]);
    let schema = match response.and_then(|response| response.get("content")) {
        Some(content) => content[kind].get("schema"),
        // What any route may answer, and what is no route.
        None => None,
    };
    let anthropic = path.starts_with("/v1/messages");
    let error = match anthropic {
        true => &document()["components"]["schemas"]["AnthropicError"],
        false => &document()["components"]["schemas"]["Error"],
    };
    let schema = match (schema, status) {
        (Some(schema), _) => schema,
        (None, 200) => panic!("{method} {path}: the document has no {kind}"),
        (None, _) => error,
    };
    let named = |name: &str| &document()["components"]["schemas"][name];
    let schema = match (&answer["stop"], answer.get("generation_settings")) {
        // An answer of which only some fields were asked for may be anything; these are not.
        (Value::Bool(true), Some(_)) => named("NativeAnswer"),
        (Value::Bool(false), _) => named("NativeChunk"),
        _ => schema,
    };
    if let Err(reason) = validate(answer, schema, "") {
        panic!("{method} {path} ({status}): {reason} in {answer}");
    }
}

/// The fields of an object that some schema speaks of; `None`: all.
type Known = Option<BTreeSet<String>>;

fn join(left: Known, right: Known) -> Known {
    left.zip(right).map(|(left, right)| &left | &right)
}

/// Holds a value, and all in it, against a schema.
fn validate(value: &Value, schema: &Value, at: &str) -> Result<(), String> {
    let known = evaluate(value, schema, at)?;
    let fields = value.as_object().into_iter().flatten();
    for (name, _) in fields {
        if known.as_ref().is_some_and(|known| !known.contains(name)) {
            return Err(format!("{at}.{name} is not in the document"));
        }
    }
    Ok(())
}

fn evaluate(value: &Value, schema: &Value, at: &str) -> Result<Known, String> {
    let mut known = Some(BTreeSet::new());
    let keywords = schema.as_object().unwrap();
    let says = |keyword: &String| !["description", "format"].contains(&keyword.as_str());
    if !keywords.keys().any(says) {
        return Ok(None);
    }
    let fail = |what: &str| Err(format!("{at}: found {value}, expected {what}"));
    for (keyword, said) in keywords {
        match keyword.as_str() {
            "$ref" => {
                let name = said.as_str().unwrap().rsplit('/').next().unwrap();
                let schema = &document()["components"]["schemas"][name];
                known = join(known, evaluate(value, schema, at)?);
            }
            "allOf" => {
                for schema in said.as_array().unwrap() {
                    known = join(known, evaluate(value, schema, at)?);
                }
            }
            "anyOf" | "oneOf" => {
                let forms = said.as_array().unwrap().iter();
                // As a whole: a form that knows a part of the fields is not the one that was meant.
                let mut fine: Vec<_> = Vec::new();
                let mut reasons = Vec::new();
                for form in forms {
                    match evaluate(value, form, at) {
                        Ok(known) => fine.push(known),
                        Err(reason) => reasons.push(reason),
                    }
                }
                if fine.is_empty() || keyword == "oneOf" && fine.len() > 1 {
                    let fits = fine.len();
                    return fail(&format!("one form, not {fits}: {reasons:?}"));
                }
                for form in fine {
                    known = join(known, form);
                }
            }
            "type" => {
                let kinds = said
                    .as_array()
                    .map_or(vec![said], |kinds| kinds.iter().collect());
                if !kinds.iter().any(|kind| is_a(value, kind.as_str().unwrap())) {
                    return fail(&said.to_string());
                }
                // An object of which nothing more is said may have anything.
                if !keywords.contains_key("properties") && value.is_object() {
                    known = None;
                }
            }
            "enum" if !said.as_array().unwrap().contains(value) => return fail(&said.to_string()),
            "required" => {
                for name in said.as_array().unwrap() {
                    if value
                        .as_object()
                        .is_some_and(|o| !o.contains_key(name.as_str().unwrap()))
                    {
                        return fail(&format!("a field {name}"));
                    }
                }
            }
            "properties" => {
                for (name, schema) in said.as_object().unwrap() {
                    if let Some(value) = value.get(name) {
                        validate(value, schema, &format!("{at}.{name}"))?;
                        known.iter_mut().for_each(|known| {
                            known.insert(name.clone());
                        });
                    }
                }
            }
            "additionalProperties" if said.is_object() => {
                for (name, value) in value.as_object().into_iter().flatten() {
                    validate(value, said, &format!("{at}.{name}"))?;
                }
                known = None;
            }
            "items" => {
                for (i, value) in value.as_array().into_iter().flatten().enumerate() {
                    validate(value, said, &format!("{at}[{i}]"))?;
                }
            }
            "maxItems" => {
                let length = value.as_array().map_or(0, Vec::len) as u64;
                if length > said.as_u64().unwrap() {
                    return fail(&format!("at most {said} entries"));
                }
            }
            "minimum" if value.as_f64() < said.as_f64() && value.is_number() => {
                return fail(&format!("at least {said}"));
            }
            "enum" | "minimum" | "description" | "format" => {}
            other => panic!("the check does not know {other}"),
        }
    }
    Ok(known)
}

fn is_a(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other}"),
    }
}

#[test]
fn what_the_document_does_not_have_is_found() {
    let schemas = &document()["components"]["schemas"];
    let stop = json!({"stop_reason": "end_turn", "stop_sequence": null});
    let holds = |name: &str, value: &Value| validate(value, &schemas[name], "").is_ok();
    assert!(holds("AnthropicStop", &stop));
    for (field, value) in [
        ("stop_reason", json!("stop")),
        ("stop_sequence", json!(1)),
        ("more", json!(null)),
    ] {
        let mut wrong = stop.clone();
        wrong[field] = value;
        assert!(!holds("AnthropicStop", &wrong), "{wrong}");
    }
    assert!(!holds("AnthropicStop", &json!({"stop_reason": null})));
    let event = json!({"type": "response.output_text.delta", "item_id": "a", "output_index": 0,
        "content_index": 0, "delta": "b", "logprobs": [], "sequence_number": 1});
    assert!(holds("ResponseEvent", &event));
    let mut wrong = event.clone();
    wrong["delta"].take();
    assert!(!holds("ResponseEvent", &wrong));
    wrong = event;
    wrong["text"] = json!("c");
    assert!(!holds("ResponseEvent", &wrong));
}
