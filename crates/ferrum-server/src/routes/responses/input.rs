//! What a response answers, in the form of OpenAI's items, brought into the form that chat templates read.
//!
//! An item is a message, a thought, a call or its result. To templates a thought, what is said after it
//! and the calls after that are one message of the assistant.

use crate::error::ApiError;
use crate::http::app::App;
use crate::prompt::conversation::unread;
use crate::prompt::parts;
use crate::request::{
    Body, Content, Function, FunctionName, ImageUrl, Input, Item, ItemPart, ResponseTool, Role,
    need,
};
use crate::routes::openai_messages::function_json;
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ApiError>;

/// Adds what a request says to the messages.
pub(super) fn read(
    app: &App,
    body: &mut Body,
    input: Input,
    messages: &mut Vec<Value>,
) -> Result<()> {
    let items = match input {
        Input::Text(text) => {
            messages.push(json!({"role": "user", "content": text}));
            return Ok(());
        }
        Input::Parts(items) if items.is_empty() => {
            return Err(ApiError::invalid("input", "found no item"));
        }
        Input::Parts(items) => items,
    };
    let mut turn = Map::new();
    for (i, item) in items.into_iter().enumerate() {
        let path = format!("input[{i}]");
        let item = match item.r#type.as_deref() {
            Some("item_reference") => referred(app, item, &path)?,
            _ => item,
        };
        match item.r#type.as_deref() {
            None | Some("message") => read_message(item, &path, &mut turn, messages)?,
            Some("reasoning") => {
                end_turn(&mut turn, messages);
                turn.insert(
                    "reasoning_content".into(),
                    read_reasoning(item, &path)?.into(),
                );
            }
            Some("function_call") => {
                let calls = turn.entry("tool_calls").or_insert_with(|| json!([]));
                if let Some(calls) = calls.as_array_mut() {
                    calls.push(read_call(item, &path)?);
                }
            }
            Some("function_call_output") => {
                end_turn(&mut turn, messages);
                messages.push(read_output(body, item, &path)?);
            }
            // What tools did that OpenAI's servers or clients run: the model does not know of them.
            Some(kind) if kind.ends_with("_call") || kind.ends_with("_call_output") => {
                body.ignore(path)
            }
            Some("compaction" | "mcp_list_tools") => body.ignore(path),
            Some(other) => {
                let reason = format!(
                    "found {other:?}, expected message, reasoning, function_call or function_call_output"
                );
                return Err(ApiError::unsupported(format!("{path}.type"), reason));
            }
        }
    }
    end_turn(&mut turn, messages);
    Ok(())
}

/// An item of a response that was kept.
fn referred(app: &App, item: Item, path: &str) -> Result<Item> {
    let id = need(item.id, path, "id")?;
    let found = app.responses.item(&id);
    let found = found.and_then(|item| serde_json::from_str(&item).ok());
    found.ok_or_else(|| {
        let reason = format!("there is no item {id:?} here, or no longer; send the item itself");
        ApiError::invalid(format!("{path}.id"), reason)
    })
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
    item: Item,
    path: &str,
    turn: &mut Map<String, Value>,
    messages: &mut Vec<Value>,
) -> Result<()> {
    let role = need(item.role, path, "role")?;
    let content = need(item.content, path, "content")?;
    let path_of_content = format!("{path}.content");
    if let (Role::User, Content::Parts(parts)) = (role, &content)
        && parts.iter().any(is_image)
    {
        end_turn(turn, messages);
        let content = user_parts(content, &path_of_content)?;
        messages.push(json!({"role": "user", "content": content}));
        return Ok(());
    }
    let text = text_of(content, &path_of_content)?;
    match role {
        Role::Assistant => {
            if turn.contains_key("content") || turn.contains_key("tool_calls") {
                end_turn(turn, messages);
            }
            turn.insert("content".into(), text.into());
        }
        Role::User | Role::System | Role::Developer => {
            end_turn(turn, messages);
            messages.push(json!({"role": role.name(), "content": text}));
        }
        Role::Tool | Role::Function => {
            let reason = "found the role of a tool, expected user, assistant, system or developer";
            return Err(ApiError::invalid(format!("{path}.role"), reason));
        }
    }
    Ok(())
}

/// A text: a string, or parts of text, one line after the other.
fn text_of(content: Content<ItemPart>, path: &str) -> Result<String> {
    let parts = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(parts) => parts.into_iter().enumerate(),
    };
    let parts = parts.map(|(i, part)| read_part(part, &format!("{path}[{i}]")));
    Ok(parts.collect::<Result<Vec<_>>>()?.join("\n"))
}

fn is_image(part: &ItemPart) -> bool {
    part.r#type == "input_image"
}

/// What a user says about images, part by part.
fn user_parts(content: Content<ItemPart>, path: &str) -> Result<Vec<Value>> {
    let parts = match content {
        Content::Text(text) => return Ok(vec![parts::text_part(&text)]),
        Content::Parts(parts) => parts.into_iter().enumerate(),
    };
    let read = parts.map(|(i, part)| {
        let path = format!("{path}[{i}]");
        if !is_image(&part) {
            return Ok(parts::text_part(&read_part(part, &path)?));
        }
        let url = part.image_url.map(|ImageUrl(url)| url);
        Ok(parts::image_part(&part.r#type, path, url))
    });
    read.collect()
}

fn read_part(part: ItemPart, path: &str) -> Result<String> {
    match &*part.r#type {
        "input_text" | "output_text" | "reasoning_text" | "summary_text" | "text" => {
            need(part.text, path, "text")
        }
        "refusal" => need(part.refusal, path, "refusal"),
        other => {
            let reason = format!("found {other:?}, expected a text: this model reads only text");
            Err(ApiError::unsupported(format!("{path}.type"), reason))
        }
    }
}

/// What was thought: whole where it is there, else its summary.
fn read_reasoning(item: Item, path: &str) -> Result<String> {
    let text = match item.content {
        Some(content) => text_of(content, &format!("{path}.content"))?,
        None => String::new(),
    };
    if !text.is_empty() {
        return Ok(text);
    }
    let summary = item.summary.unwrap_or_default().0;
    text_of(Content::Parts(summary), &format!("{path}.summary"))
}

fn read_call(item: Item, path: &str) -> Result<Value> {
    let id = need(item.call_id, path, "call_id")?;
    let FunctionName(name) = need(item.name, path, "name")?;
    let arguments = item.arguments.unwrap_or_default().0;
    let function = json!({"name": name, "arguments": arguments});
    Ok(json!({"type": "function", "id": id, "function": function}))
}

/// The result of a call. What is no text in it is noted in its place: the model chose the tool, so it has to know that
/// this leads nowhere. A refusal would end the conversation, which has the result in it from now on.
fn read_output(body: &mut Body, item: Item, path: &str) -> Result<Value> {
    let id = need(item.call_id, path, "call_id")?;
    let mut output = need(item.output, path, "output")?;
    if let Content::Parts(parts) = &mut output {
        for (i, part) in parts.iter_mut().enumerate() {
            if part.r#type.starts_with("input_") && part.r#type != "input_text" {
                body.ignore(format!("{path}.output[{i}]"));
                part.text = Some(unread(&part.r#type["input_".len()..]));
                part.r#type = "input_text".into();
            }
        }
    }
    let text = text_of(output, &format!("{path}.output"))?;
    Ok(json!({"role": "tool", "tool_call_id": id, "content": text}))
}

/// Tools in the form of chat completions, and the namespace of each function that has one.
pub(super) fn read_tools(
    body: &mut Body,
    tools: Vec<ResponseTool>,
) -> Result<(Option<Value>, Map<String, Value>)> {
    let mut known = Vec::with_capacity(tools.len());
    let mut namespaces = Map::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{i}]");
        match tool.r#type.as_deref() {
            None | Some("function") => {
                let name = need(tool.name, &path, "name")?;
                let function = Function::new(name, tool.description, tool.parameters, tool.strict);
                known.push(function_json(function));
            }
            Some("namespace") => {
                let FunctionName(namespace) = need(tool.name, &path, "name")?;
                let inner = tool.tools.unwrap_or_default().0;
                for (j, tool) in inner.into_iter().enumerate() {
                    if tool.r#type.is_some_and(|kind| kind != "function") {
                        body.ignore(format!("{path}.tools[{j}]"));
                        continue;
                    }
                    namespaces.insert(tool.name.0.clone(), namespace.as_str().into());
                    let function =
                        Function::new(tool.name, tool.description, tool.parameters, tool.strict);
                    known.push(function_json(function));
                }
            }
            // Those that OpenAI's servers or clients define: the model does not know of them.
            Some(_) => body.ignore(path),
        }
    }
    Ok((
        (!known.is_empty()).then_some(Value::Array(known)),
        namespaces,
    ))
}
