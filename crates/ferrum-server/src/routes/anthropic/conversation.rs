//! Conversations in Anthropic's form, checked and brought into the form that chat templates read.

use crate::conversation::{ChatPrompt, Conversation, ToolChoice, set_effort, set_thinking};
use crate::error::ApiError;
use crate::fields::{self, Fields};
use crate::model::Model;
use crate::routes::messages::{MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, check_name, read_function};
use crate::sampling::Wanted;
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ApiError>;

/// A conversation, and whether its tools are to be called.
#[derive(Debug)]
pub(super) struct Asked {
    conversation: Conversation,
    choice: ToolChoice,
    parallel: bool,
}

impl Asked {
    /// See [`Conversation::prompt`].
    pub(super) fn prompt(self, model: &Model, wanted: Option<&mut Wanted>) -> Result<ChatPrompt> {
        self.conversation
            .prompt(model, &self.choice, self.parallel, wanted)
    }
}

/// Takes the fields that make the prompt.
pub(super) fn read(fields: &mut Fields, model: &Model) -> Result<Asked> {
    let mut messages = Vec::new();
    if let Some(text) = text_blocks(fields, "system")? {
        messages.push(json!({"role": "system", "content": text}));
    }
    let turns = fields.list("messages", MAX_MESSAGES)?;
    let turns = turns.ok_or_else(|| ApiError::invalid("messages", "it is missing"))?;
    if turns.is_empty() {
        return Err(ApiError::invalid("messages", "found no message"));
    }
    for (i, turn) in turns.into_iter().enumerate() {
        read_turn(turn, &format!("messages[{i}]"), &mut messages)?;
    }
    let mut extra = Map::new();
    read_thinking(fields, model, &mut extra)?;
    read_output(fields, model, &mut extra)?;
    let tools = read_tools(fields)?;
    let (choice, parallel) = read_tool_choice(fields, tools.as_ref())?;
    // The prefix cache keeps what it can without being asked.
    cache_control(fields)?;
    let conversation = Conversation {
        prefill: take_prefill(&mut messages),
        messages: Value::Array(messages),
        tools,
        extra,
    };
    Ok(Asked {
        conversation,
        choice,
        parallel,
    })
}

/// An assistant's message at the end is what the answer begins with, unless it calls tools.
fn take_prefill(messages: &mut Vec<Value>) -> String {
    let goes_on = |last: &Value| last["role"] == "assistant" && last.get("tool_calls").is_none();
    let last = messages.pop_if(|last| goes_on(last));
    let text = last.as_ref().and_then(|last| last["content"].as_str());
    text.unwrap_or_default().to_owned()
}

fn cache_control(fields: &mut Fields) -> Result<()> {
    let path = fields.name("cache_control");
    let Some(control) = fields.take("cache_control") else {
        return Ok(());
    };
    let mut control = Fields::of(control, &path)?;
    control.harmless("type", |v| v == "ephemeral", "\"ephemeral\"")?;
    control.harmless("ttl", |v| v == "5m" || v == "1h", "\"5m\" or \"1h\"")?;
    control.finish()
}

/// A text: a string, or blocks of text, one line after the other.
fn text_blocks(fields: &mut Fields, field: &str) -> Result<Option<String>> {
    let path = fields.name(field);
    let blocks = match fields.take(field) {
        None => return Ok(None),
        Some(Value::String(text)) => return Ok(Some(text)),
        Some(Value::Array(blocks)) if blocks.len() <= MAX_PARTS => blocks,
        Some(other) => {
            let expected = format!("a string or an array of at most {MAX_PARTS} blocks");
            return Err(fields::wrong(&path, &other, &expected));
        }
    };
    let mut texts = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(block, &format!("{path}[{i}]"))?;
        match &*kind(&mut block)? {
            "text" => texts.push(text_of(block, "text")?),
            other => return Err(no_kind(&block, other, "\"text\"")),
        }
    }
    Ok(Some(texts.join("\n")))
}

fn kind(block: &mut Fields) -> Result<String> {
    match block.need("type")? {
        Value::String(kind) => Ok(kind),
        other => Err(fields::wrong(&block.name("type"), &other, "a string")),
    }
}

fn no_kind(block: &Fields, found: &str, expected: &str) -> ApiError {
    let reason = format!("found {found:?}, expected {expected}: this model reads only text");
    ApiError::unsupported(block.name("type"), reason)
}

/// The text of a block that has nothing else to say.
fn text_of(mut block: Fields, field: &str) -> Result<String> {
    let text = need_text(&mut block, field)?;
    cache_control(&mut block)?;
    let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
    block.harmless("citations", empty, "an empty array")?;
    block.finish()?;
    Ok(text)
}

fn need_text(fields: &mut Fields, field: &str) -> Result<String> {
    let text = fields.text(field)?;
    text.ok_or_else(|| ApiError::invalid(fields.name(field), "it is missing"))
}

fn read_turn(turn: Value, path: &str, out: &mut Vec<Value>) -> Result<()> {
    let mut turn = Fields::of(turn, path)?;
    let role = turn.need("role")?;
    let role = match role.as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => {
            let expected = "user, assistant or system";
            return Err(fields::wrong(&turn.name("role"), &role, expected));
        }
    };
    if role == "system" {
        let text = text_blocks(&mut turn, "content")?;
        let text = text.ok_or_else(|| ApiError::invalid(turn.name("content"), "it is missing"))?;
        out.push(json!({"role": role, "content": text}));
        return turn.finish();
    }
    let name = turn.name("content");
    let content = turn.need("content")?;
    turn.finish()?;
    let blocks = match content {
        Value::String(text) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) if blocks.len() <= MAX_PARTS => blocks,
        other => {
            let expected = format!("a string or an array of at most {MAX_PARTS} blocks");
            return Err(fields::wrong(&name, &other, &expected));
        }
    };
    let blocks = blocks.into_iter().enumerate();
    let blocks = blocks.map(|(i, block)| Fields::of(block, &format!("{name}[{i}]")));
    let blocks = blocks.collect::<Result<Vec<_>>>()?;
    match role {
        "user" => read_user(&name, blocks, out),
        _ => {
            out.push(read_assistant(blocks)?);
            Ok(())
        }
    }
}

/// What a user says, and the results of tools, each of which is a message of its own to templates.
fn read_user(name: &str, blocks: Vec<Fields>, out: &mut Vec<Value>) -> Result<()> {
    if blocks.is_empty() {
        return Err(ApiError::invalid(name, "found no block"));
    }
    let mut texts: Vec<String> = Vec::new();
    let said = |texts: &mut Vec<String>, out: &mut Vec<Value>| {
        if !texts.is_empty() {
            let text = std::mem::take(texts).join("\n");
            out.push(json!({"role": "user", "content": text}));
        }
    };
    for mut block in blocks {
        match &*kind(&mut block)? {
            "text" => texts.push(text_of(block, "text")?),
            "tool_result" => {
                said(&mut texts, out);
                out.push(read_result(block)?);
            }
            other => return Err(no_kind(&block, other, "\"text\" or \"tool_result\"")),
        }
    }
    said(&mut texts, out);
    Ok(())
}

fn read_result(mut block: Fields) -> Result<Value> {
    let id = need_text(&mut block, "tool_use_id")?;
    let text = text_blocks(&mut block, "content")?.unwrap_or_default();
    let failed = block.boolean("is_error")?.unwrap_or(false);
    cache_control(&mut block)?;
    block.finish()?;
    let text = match failed {
        // Templates have no other way to say so.
        true => format!("Error: {text}"),
        false => text,
    };
    Ok(json!({"role": "tool", "tool_call_id": id, "content": text}))
}

fn read_assistant(blocks: Vec<Fields>) -> Result<Value> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for mut block in blocks {
        match &*kind(&mut block)? {
            "text" => texts.push(text_of(block, "text")?),
            "thinking" => {
                thoughts.push(need_text(&mut block, "thinking")?);
                block.text("signature")?;
                block.finish()?;
            }
            "tool_use" => calls.push(read_call(block)?),
            other => return Err(no_kind(&block, other, "text, thinking or tool_use")),
        }
    }
    let mut message = json!({"role": "assistant"});
    if !texts.is_empty() || calls.is_empty() {
        message["content"] = texts.join("\n").into();
    }
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

fn read_call(mut block: Fields) -> Result<Value> {
    let id = need_text(&mut block, "id")?;
    let name = block.need("name")?;
    check_name(&block.name("name"), &name)?;
    let input = block.object("input")?.unwrap_or_default();
    cache_control(&mut block)?;
    block.finish()?;
    let function = json!({"name": name, "arguments": input});
    Ok(json!({"type": "function", "id": id, "function": function}))
}

/// Takes `thinking`. A budget is a wish to Anthropic, too: thinking ends with `max_tokens` at the latest.
fn read_thinking(fields: &mut Fields, model: &Model, extra: &mut Map<String, Value>) -> Result<()> {
    let Some(thinking) = fields.take("thinking") else {
        return Ok(());
    };
    let mut thinking = Fields::of(thinking, "thinking")?;
    let param = thinking.name("type");
    match &*kind(&mut thinking)? {
        "enabled" => {
            thinking.count("budget_tokens", 1..=usize::MAX)?;
            set_thinking(model, extra, &param, true)?;
        }
        // Whether to think is the model's choice.
        "adaptive" => {}
        "disabled" => set_thinking(model, extra, &param, false)?,
        other => {
            let expected = "\"enabled\", \"disabled\" or \"adaptive\"";
            return Err(fields::wrong(&param, &json!(other), expected));
        }
    }
    thinking.harmless("display", |v| v == "summarized", "\"summarized\"")?;
    thinking.finish()
}

/// Takes `output_config`. Formats that are held against a grammar belong here.
fn read_output(fields: &mut Fields, model: &Model, extra: &mut Map<String, Value>) -> Result<()> {
    let Some(config) = fields.take("output_config") else {
        return Ok(());
    };
    let mut config = Fields::of(config, "output_config")?;
    if let Some(effort) = config.text("effort")? {
        set_effort(model, extra, "output_config.effort", &effort)?;
    }
    config.finish()
}

/// Tools in OpenAI's form.
fn read_tools(fields: &mut Fields) -> Result<Option<Value>> {
    let tools = fields.list("tools", MAX_TOOLS)?.unwrap_or_default();
    let tools = tools.into_iter().enumerate();
    let tools = tools.map(|(i, tool)| read_tool(tool, &format!("tools[{i}]")));
    let tools = tools.collect::<Result<Vec<_>>>()?;
    Ok((!tools.is_empty()).then_some(Value::Array(tools)))
}

fn read_tool(tool: Value, path: &str) -> Result<Value> {
    let mut tool = Fields::of(tool, path)?;
    // The others are tools that Anthropic's servers run.
    tool.harmless("type", |v| v == "custom", "\"custom\"")?;
    cache_control(&mut tool)?;
    read_function(tool, "input_schema")
}

fn read_tool_choice(fields: &mut Fields, tools: Option<&Value>) -> Result<(ToolChoice, bool)> {
    let Some(choice) = fields.take("tool_choice") else {
        let choice = tools.map_or(ToolChoice::None, |_| ToolChoice::Auto);
        return Ok((choice, true));
    };
    let mut choice = Fields::of(choice, "tool_choice")?;
    let (param, name) = (choice.name("type"), choice.name("name"));
    let read = match &*kind(&mut choice)? {
        "none" => ToolChoice::None,
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "tool" => ToolChoice::named(&name, need_text(&mut choice, "name")?, tools)?,
        other => {
            let expected = "\"auto\", \"any\", \"tool\" or \"none\"";
            return Err(fields::wrong(&param, &json!(other), expected));
        }
    };
    let single = choice.boolean("disable_parallel_tool_use")?;
    choice.finish()?;
    if tools.is_none() && read != ToolChoice::None {
        return Err(ApiError::invalid("tool_choice", "there are no tools"));
    }
    Ok((read, !single.unwrap_or(false)))
}
