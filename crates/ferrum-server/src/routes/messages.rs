//! Conversations in OpenAI's form, checked and brought into the form that chat templates read.

use crate::conversation::Conversation;
use crate::error::ApiError;
use crate::fields::{self, Fields};
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ApiError>;

/// Most messages of a conversation, parts of a message, and tools.
pub(crate) const MAX_MESSAGES: usize = 4096;
pub(crate) const MAX_PARTS: usize = 1024;
pub(crate) const MAX_TOOLS: usize = 128;

/// Takes `messages`, if they are there, and then `tools` and `chat_template_kwargs`.
pub(super) fn read(fields: &mut Fields) -> Result<Option<Conversation>> {
    let Some(messages) = read_messages(fields)? else {
        return Ok(None);
    };
    let extra = read_extra(fields)?;
    let tools = read_tools(fields)?;
    Ok(Some(Conversation {
        messages,
        tools,
        extra,
        prefill: String::new(),
    }))
}

fn read_extra(fields: &mut Fields) -> Result<Map<String, Value>> {
    const OURS: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
    let extra = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(name) = OURS.iter().find(|name| extra.contains_key(**name)) {
        let param = format!("chat_template_kwargs.{name}");
        return Err(ApiError::invalid(param, "it is a field of the request"));
    }
    Ok(extra)
}

fn read_tools(fields: &mut Fields) -> Result<Option<Value>> {
    match fields.list("tools", MAX_TOOLS)? {
        Some(tools) if !tools.is_empty() => {
            let tools = tools.into_iter().enumerate();
            let tools = tools.map(|(i, tool)| read_tool(tool, i));
            Ok(Some(tools.collect::<Result<_>>()?))
        }
        _ => Ok(None),
    }
}

fn read_tool(tool: Value, i: usize) -> Result<Value> {
    let mut tool = Fields::of(tool, &format!("tools[{i}]"))?;
    need_function(&mut tool)?;
    let path = tool.name("function");
    let function = Fields::of(tool.need("function")?, &path)?;
    tool.finish()?;
    read_function(function, "parameters")
}

/// A function that may be called, as templates read it. `schema` is the field with that of its
/// arguments.
pub(super) fn read_function(mut function: Fields, schema: &str) -> Result<Value> {
    let mut out = Map::new();
    let name = function.need("name")?;
    check_name(&function.name("name"), &name)?;
    out.insert("name".into(), name);
    if let Some(text) = function.text("description")? {
        out.insert("description".into(), text.into());
    }
    if let Some(schema) = function.object(schema)? {
        out.insert("parameters".into(), schema.into());
    }
    if function.boolean("strict")?.unwrap_or(false) {
        out.insert("strict".into(), true.into());
    }
    function.finish()?;
    Ok(json!({"type": "function", "function": out}))
}

/// A function's name: what OpenAI allows, and dots.
pub(super) fn check_name(param: &str, name: &Value) -> Result<()> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    match name.as_str() {
        Some(text) if (1..=64).contains(&text.len()) && text.chars().all(fine) => Ok(()),
        _ => {
            let expected = "1 to 64 letters, digits, underscores, dots or dashes";
            Err(fields::wrong(param, name, expected))
        }
    }
}

pub(super) fn need_function(fields: &mut Fields) -> Result<()> {
    let name = fields.name("type");
    match fields.take("type") {
        Some(Value::String(kind)) if kind == "function" => Ok(()),
        None => Ok(()),
        Some(other) => Err(fields::wrong(&name, &other, "\"function\"")),
    }
}

fn read_messages(fields: &mut Fields) -> Result<Option<Value>> {
    let Some(messages) = fields.list("messages", MAX_MESSAGES)? else {
        return Ok(None);
    };
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "found no message"));
    }
    let messages = messages.into_iter().enumerate();
    let messages = messages.map(|(i, message)| read_message(message, i));
    Ok(Some(Value::Array(messages.collect::<Result<_>>()?)))
}

fn read_message(message: Value, i: usize) -> Result<Value> {
    let mut fields = Fields::of(message, &format!("messages[{i}]"))?;
    let mut out = Map::new();
    let role = fields.need("role")?;
    let role = match role.as_str() {
        // Templates know the older name only.
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        _ => {
            let expected = "system, developer, user, assistant or tool";
            return Err(fields::wrong(&fields.name("role"), &role, expected));
        }
    };
    out.insert("role".into(), role.into());
    let content = content(&mut fields)?;
    let calls = match role {
        "assistant" => assistant_fields(&mut fields, &mut out)?,
        _ => false,
    };
    match content {
        Some(text) => {
            out.insert("content".into(), text.into());
        }
        // Whoever calls a tool need not speak.
        None if calls => {}
        None => return Err(ApiError::invalid(fields.name("content"), "it is missing")),
    }
    if role == "tool"
        && let Some(id) = fields.text("tool_call_id")?
    {
        out.insert("tool_call_id".into(), id.into());
    }
    if let Some(name) = fields.text("name")? {
        out.insert("name".into(), name.into());
    }
    fields.finish()?;
    Ok(out.into())
}

/// The text of a message: a string, or parts of text, one line after the other.
fn content(fields: &mut Fields) -> Result<Option<String>> {
    let name = fields.name("content");
    let parts = match fields.take("content") {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(parts)) if parts.len() <= MAX_PARTS => parts,
        Some(other) => {
            let expected = "a string or an array of at most 1024 parts";
            return Err(fields::wrong(&name, &other, expected));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let mut part = Fields::of(part, &format!("{name}[{i}]"))?;
        let kind = part.need("type")?;
        if kind != "text" {
            let reason = format!("found {kind}, expected \"text\": this model reads only text");
            return Err(ApiError::unsupported(part.name("type"), reason));
        }
        let text = part.text("text")?;
        let missing = || ApiError::invalid(format!("{name}[{i}].text"), "it is missing");
        texts.push(text.ok_or_else(missing)?);
        part.finish()?;
    }
    Ok(Some(texts.join("\n")))
}

/// What only an assistant's message has. Gives whether it calls tools.
fn assistant_fields(fields: &mut Fields, out: &mut Map<String, Value>) -> Result<bool> {
    if let Some(text) = fields.text("reasoning_content")? {
        out.insert("reasoning_content".into(), text.into());
    }
    // What OpenAI's clients send back with an answer.
    let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    fields.harmless("annotations", empty, "an empty array")?;
    let path = fields.name("tool_calls");
    let Some(calls) = fields.list("tool_calls", MAX_TOOLS)? else {
        return Ok(false);
    };
    if calls.is_empty() {
        return Ok(false);
    }
    let calls = calls.into_iter().enumerate();
    let calls = calls.map(|(i, call)| read_call(call, &format!("{path}[{i}]")));
    let calls = calls.collect::<Result<Vec<_>>>()?;
    out.insert("tool_calls".into(), calls.into());
    Ok(true)
}

/// A call that was made. Templates write the arguments out themselves, so they want them as an object.
fn read_call(call: Value, path: &str) -> Result<Value> {
    let mut call = Fields::of(call, path)?;
    need_function(&mut call)?;
    let id = call.text("id")?;
    call.harmless("index", Value::is_u64, "an index")?;
    let mut function = Fields::of(call.need("function")?, &format!("{path}.function"))?;
    call.finish()?;
    let name = function.need("name")?;
    check_name(&function.name("name"), &name)?;
    let arguments = read_arguments(&mut function)?;
    function.finish()?;
    let mut out = json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    if let Some(id) = id {
        out["id"] = id.into();
    }
    Ok(out)
}

/// Takes `arguments`: an object as JSON text.
pub(super) fn read_arguments(call: &mut Fields) -> Result<Value> {
    let param = call.name("arguments");
    let arguments = match call.take("arguments") {
        None => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => serde_json::from_str(&text)
            .map_err(|e| ApiError::invalid(&param, format!("not JSON: {e}")))?,
        Some(other) => other,
    };
    match arguments.is_object() {
        true => Ok(arguments),
        false => Err(fields::wrong(&param, &arguments, "an object as JSON text")),
    }
}
