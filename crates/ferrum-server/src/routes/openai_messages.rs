//! Conversations in OpenAI's form, brought into the form that chat templates read.

use crate::error::ApiError;
use crate::models::model::Model;
use crate::prompt::conversation::{Conversation, unread};
use crate::prompt::{images, parts};
use crate::request::{
    self, Body, Content, Function, ImageUrl, Message, Part, Role, Tool, ToolCall,
};
use ferrum_formats::chat_template::ChatInput;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ApiError>;

/// Reads `messages`, if they are there, and then `tools` and `chat_template_kwargs`.
pub(super) fn read(body: &mut Body) -> Result<Option<Conversation>> {
    let fields: request::Conversation = body.part()?;
    let Some(messages) = fields.messages else {
        return Ok(None);
    };
    if messages.0.is_empty() {
        return Err(ApiError::invalid("messages", "found no message"));
    }
    let mut read = Vec::with_capacity(messages.0.len());
    let mut last_call = None;
    for (i, mut message) in messages.0.into_iter().enumerate() {
        name_call(&mut message, i, &mut last_call);
        read.push(read_message(body, message, i)?);
    }
    Ok(Some(Conversation {
        messages: Value::Array(read),
        tools: read_tools(body, fields.tools.unwrap_or_default().0)?,
        extra: read_extra(fields.chat_template_kwargs.unwrap_or_default().0)?,
        prefill: String::new(),
        parse_special: fields.parse_special.unwrap_or(false),
    }))
}

/// Tokens of a conversation rendered without generating; `begin` adds the generation prompt.
pub(super) fn tokens(
    model: &Model,
    mut conversation: Conversation,
    begin: bool,
    add_special: bool,
) -> Result<Vec<TokenId>> {
    let text = render(model, &mut conversation, begin)?;
    let options = EncodeOptions {
        add_special,
        parse_special: true,
    };
    model.encode("messages", &text, options)
}

/// Text of a conversation rendered without generating, with special tokens in it [escaped](crate::prompt::special_token_escape);
/// `begin` adds the generation prompt.
pub(super) fn render(
    model: &Model,
    conversation: &mut Conversation,
    begin: bool,
) -> Result<String> {
    // A template does not see what is said beside a function.
    conversation.take_functions();
    images::refuse(&images::take(&mut conversation.messages))?;
    conversation.prepare(model);
    model.render(&ChatInput {
        add_generation_prompt: begin,
        ..conversation.input()
    })
}

fn read_extra(extra: Map<String, Value>) -> Result<Map<String, Value>> {
    const OURS: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
    if let Some(name) = OURS.iter().find(|name| extra.contains_key(**name)) {
        let param = format!("chat_template_kwargs.{name}");
        return Err(ApiError::invalid(param, "it is a field of the request"));
    }
    Ok(extra)
}

fn read_tools(body: &mut Body, tools: Vec<Tool>) -> Result<Option<Value>> {
    let mut known = Vec::with_capacity(tools.len());
    for (i, tool) in tools.into_iter().enumerate() {
        match (tool.function, tool.r#type.as_deref()) {
            (Some(function), None | Some("function")) => known.push(function_json(function)),
            (None, None | Some("function")) => {
                let param = format!("tools[{i}].function");
                return Err(ApiError::invalid(param, "it is missing"));
            }
            // Tools that another server runs: the prompt does not have them.
            (_, Some(_)) => body.ignore(format!("tools[{i}]")),
        }
    }
    Ok((!known.is_empty()).then_some(Value::Array(known)))
}

/// A function that may be called, as templates read it.
pub(super) fn function_json(function: Function) -> Value {
    let mut out = Map::new();
    out.insert("name".into(), function.name.0.into());
    if let Some(text) = function.description {
        out.insert("description".into(), text.into());
    }
    if let Some(schema) = function.parameters {
        out.insert("parameters".into(), schema.0.into());
    }
    if function.strict == Some(true) {
        out.insert("strict".into(), true.into());
    }
    json!({"type": "function", "function": out})
}

/// Has a call in OpenAI's older form, or its result, be one as the newer form has it. The older form has no ids, which
/// templates ask for.
fn name_call(message: &mut Message, i: usize, last_call: &mut Option<String>) {
    if let Some(function) = message.function_call.take() {
        // As long as Mistral's are.
        let id = format!("{i:09}");
        let call = ToolCall::new(id.clone(), function);
        message.tool_calls.get_or_insert_default().0.push(call);
        *last_call = Some(id);
    }
    if message.role == Role::Function {
        message.role = Role::Tool;
        message.tool_call_id = last_call.clone();
    }
}

fn read_message(body: &mut Body, mut message: Message, i: usize) -> Result<Value> {
    let mut out = Map::new();
    out.insert("role".into(), message.role.name().into());
    if message.role == Role::Tool
        && let Some(Content::Parts(parts)) = &mut message.content
    {
        note_unread(body, parts, i);
    }
    let said = match message.content {
        Some(Content::Parts(parts)) if message.role == Role::User && parts.iter().any(is_image) => {
            Some(user_parts(parts, i)?)
        }
        Some(content) => Some(text(content, i)?.into()),
        None => None,
    };
    let mut calls = false;
    if message.role == Role::Assistant {
        if let Some(text) = message.reasoning_content.or(message.reasoning) {
            out.insert("reasoning_content".into(), text.into());
        }
        let list = message.tool_calls.unwrap_or_default().0;
        calls = !list.is_empty();
        if calls {
            let list = list.into_iter().enumerate();
            let list = list.map(|(c, call)| read_call(call, i, c));
            let list = list.collect::<Result<Vec<_>>>()?;
            out.insert("tool_calls".into(), list.into());
        }
    }
    match said.or(message.refusal.map(Value::from)) {
        Some(said) => {
            out.insert("content".into(), said);
        }
        // A message with calls may have no content.
        None if calls => {}
        None => {
            let param = format!("messages[{i}].content");
            return Err(ApiError::invalid(param, "it is missing"));
        }
    }
    if message.role == Role::Tool
        && let Some(id) = message.tool_call_id
    {
        out.insert("tool_call_id".into(), id.into());
    }
    if let Some(name) = message.name {
        out.insert("name".into(), name.into());
    }
    Ok(out.into())
}

/// Puts a note in the place of what a tool gave beside text: it stays in an agent's conversation from then on.
fn note_unread(body: &mut Body, parts: &mut [Part], i: usize) {
    for (p, part) in parts.iter_mut().enumerate() {
        if ["text", "input_text", "output_text", "refusal"].contains(&&*part.r#type) {
            continue;
        }
        let kind = part.r#type.trim_start_matches("input_");
        part.text = Some(unread(kind.trim_end_matches("_url")));
        part.r#type = "text".into();
        body.ignore(format!("messages[{i}].content[{p}]"));
    }
}

fn is_image(part: &Part) -> bool {
    matches!(&*part.r#type, "image_url" | "input_image")
}

/// What a user says about images, part by part.
fn user_parts(parts: Vec<Part>, i: usize) -> Result<Value> {
    let read = parts.into_iter().enumerate().map(|(p, part)| {
        if !is_image(&part) {
            return Ok(parts::text_part(&part_text(part, i, p)?));
        }
        let field = format!("messages[{i}].content[{p}]");
        let url = part.image_url.map(|ImageUrl(url)| url);
        Ok(parts::image_part(&part.r#type, field, url))
    });
    read.collect()
}

/// The text of a message: a string, or parts of text, one line after the other.
fn text(content: Content<Part>, i: usize) -> Result<String> {
    let parts = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(parts) => parts,
    };
    let texts = parts.into_iter().enumerate();
    let texts = texts.map(|(p, part)| part_text(part, i, p));
    Ok(texts.collect::<Result<Vec<_>>>()?.join("\n"))
}

/// The text of a part that is one.
fn part_text(part: Part, i: usize, p: usize) -> Result<String> {
    let path = || format!("messages[{i}].content[{p}]");
    let (text, field) = match &*part.r#type {
        "text" | "input_text" | "output_text" => (part.text, "text"),
        "refusal" => (part.refusal, "refusal"),
        other => {
            let why = match is_image(&part) {
                true => "images stand in messages of users",
                false => "this model reads only text",
            };
            let reason = format!("found {other:?}, expected \"text\": {why}");
            return Err(ApiError::unsupported(format!("{}.type", path()), reason));
        }
    };
    let missing = || ApiError::invalid(format!("{}.{field}", path()), "it is missing");
    text.ok_or_else(missing)
}

/// A call that was made. Templates write the arguments out themselves, so they get them as an object.
fn read_call(call: ToolCall, i: usize, c: usize) -> Result<Value> {
    if let Some(other) = call.r#type.filter(|kind| kind != "function") {
        let param = format!("messages[{i}].tool_calls[{c}].type");
        let reason = format!("found {other:?}, expected \"function\"");
        return Err(ApiError::unsupported(param, reason));
    }
    let arguments = call.function.arguments.unwrap_or_default().0;
    let function = json!({"name": call.function.name.0, "arguments": arguments});
    let mut out = json!({"type": "function", "function": function});
    if let Some(id) = call.id {
        out["id"] = id.into();
    }
    Ok(out)
}
