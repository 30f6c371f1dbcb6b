//! What a response answers, in the form of OpenAI's items, brought into the form that chat templates read.
//!
//! An item is a message, a thought, a call or its result. To templates a thought, what is said after it
//! and the calls after that are one message of the assistant.

use crate::error::ApiError;
use crate::fields::{self, Fields};
use crate::routes::messages::{
    MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, check_name, need_function, read_arguments, read_function,
};
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ApiError>;

/// Takes `input`, and adds it to the messages.
pub(super) fn read(fields: &mut Fields, messages: &mut Vec<Value>) -> Result<()> {
    let items = match fields.need("input")? {
        Value::String(text) => {
            messages.push(json!({"role": "user", "content": text}));
            return Ok(());
        }
        Value::Array(items) if items.is_empty() => {
            return Err(ApiError::invalid("input", "found no item"));
        }
        Value::Array(items) if items.len() <= MAX_MESSAGES => items,
        other => {
            let expected = format!("a string or an array of at most {MAX_MESSAGES} items");
            return Err(fields::wrong("input", &other, &expected));
        }
    };
    let mut turn = Map::new();
    for (i, item) in items.into_iter().enumerate() {
        let mut item = Fields::of(item, &format!("input[{i}]"))?;
        // What comes back from an answer has them.
        item.text("id")?;
        item.text("status")?;
        let kind = item.text("type")?;
        match kind.as_deref() {
            None | Some("message") => read_message(item, &mut turn, messages)?,
            Some("reasoning") => {
                end_turn(&mut turn, messages);
                turn.insert("reasoning_content".into(), read_reasoning(item)?.into());
            }
            Some("function_call") => {
                let calls = turn.entry("tool_calls").or_insert_with(|| json!([]));
                if let Some(calls) = calls.as_array_mut() {
                    calls.push(read_call(item)?);
                }
            }
            Some("function_call_output") => {
                end_turn(&mut turn, messages);
                messages.push(read_output(item)?);
            }
            Some(other) => {
                let reason = format!(
                    "found {other:?}, expected message, reasoning, function_call or function_call_output"
                );
                return Err(ApiError::unsupported(item.name("type"), reason));
            }
        }
    }
    end_turn(&mut turn, messages);
    Ok(())
}

/// The assistant has said what it said.
fn end_turn(turn: &mut Map<String, Value>, messages: &mut Vec<Value>) {
    if !turn.is_empty() {
        let mut message = std::mem::take(turn);
        message.insert("role".into(), "assistant".into());
        if !message.contains_key("tool_calls") {
            message.entry("content").or_insert_with(|| "".into());
        }
        messages.push(message.into());
    }
}

fn read_message(
    mut item: Fields,
    turn: &mut Map<String, Value>,
    messages: &mut Vec<Value>,
) -> Result<()> {
    let (param, role) = (item.name("role"), item.need("role")?);
    let text = need_text(&mut item, "content")?;
    item.finish()?;
    match role.as_str() {
        Some("assistant") => {
            if turn.contains_key("content") || turn.contains_key("tool_calls") {
                end_turn(turn, messages);
            }
            turn.insert("content".into(), text.into());
        }
        Some(role @ ("user" | "system" | "developer")) => {
            end_turn(turn, messages);
            // Templates know the older name only.
            let role = if role == "user" { role } else { "system" };
            messages.push(json!({"role": role, "content": text}));
        }
        _ => {
            let expected = "user, assistant, system or developer";
            return Err(fields::wrong(&param, &role, expected));
        }
    }
    Ok(())
}

/// A text: a string, or parts of text, one line after the other.
fn read_text(item: &mut Fields, field: &str) -> Result<Option<String>> {
    let path = item.name(field);
    let parts = match item.take(field) {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) if parts.len() <= MAX_PARTS => parts,
        Some(other) => {
            let expected = format!("a string or an array of at most {MAX_PARTS} parts");
            return Err(fields::wrong(&path, &other, &expected));
        }
    };
    let parts = parts.into_iter().enumerate();
    let parts = parts.map(|(i, part)| read_part(part, &format!("{path}[{i}]")));
    Ok(Some(parts.collect::<Result<Vec<_>>>()?.join("\n")))
}

fn need_text(item: &mut Fields, field: &str) -> Result<String> {
    let text = read_text(item, field)?;
    text.ok_or_else(|| ApiError::invalid(item.name(field), "it is missing"))
}

fn read_part(part: Value, path: &str) -> Result<String> {
    let mut part = Fields::of(part, path)?;
    let kind = part.need("type")?;
    let field = match kind.as_str() {
        Some("input_text" | "output_text" | "reasoning_text" | "text") => "text",
        Some("refusal") => "refusal",
        _ => {
            let reason = format!("found {kind}, expected a text: this model reads only text");
            return Err(ApiError::unsupported(part.name("type"), reason));
        }
    };
    let text = part.text(field)?;
    let text = text.ok_or_else(|| ApiError::invalid(part.name(field), "it is missing"))?;
    // What comes back from an answer has them.
    let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    part.harmless("annotations", empty, "an empty array")?;
    part.harmless("logprobs", empty, "an empty array")?;
    part.finish()?;
    Ok(text)
}

fn read_reasoning(mut item: Fields) -> Result<String> {
    let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    item.harmless("summary", empty, "an empty array")?;
    let text = read_text(&mut item, "content")?;
    item.finish()?;
    Ok(text.unwrap_or_default())
}

fn read_call(mut item: Fields) -> Result<Value> {
    let id = item.need("call_id")?;
    if !id.is_string() {
        return Err(fields::wrong(&item.name("call_id"), &id, "a string"));
    }
    let name = item.need("name")?;
    check_name(&item.name("name"), &name)?;
    let arguments = read_arguments(&mut item)?;
    item.finish()?;
    let function = json!({"name": name, "arguments": arguments});
    Ok(json!({"type": "function", "id": id, "function": function}))
}

fn read_output(mut item: Fields) -> Result<Value> {
    let id = item.text("call_id")?;
    let id = id.ok_or_else(|| ApiError::invalid(item.name("call_id"), "it is missing"))?;
    let text = need_text(&mut item, "output")?;
    item.finish()?;
    Ok(json!({"role": "tool", "tool_call_id": id, "content": text}))
}

/// Takes `tools`, and brings them into the form of chat completions.
pub(super) fn read_tools(fields: &mut Fields) -> Result<Option<Value>> {
    let tools = fields.list("tools", MAX_TOOLS)?.unwrap_or_default();
    let tools = tools.into_iter().enumerate();
    let tools = tools.map(|(i, tool)| {
        let mut tool = Fields::of(tool, &format!("tools[{i}]"))?;
        need_function(&mut tool)?;
        read_function(tool, "parameters")
    });
    let tools = tools.collect::<Result<Vec<_>>>()?;
    Ok((!tools.is_empty()).then_some(Value::Array(tools)))
}
