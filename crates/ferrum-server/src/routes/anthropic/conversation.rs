//! Conversations in Anthropic's form, brought into the form that chat templates read.

use crate::error::ApiError;
use crate::generation::options::GenerationOptions;
use crate::generation::structured;
use crate::models::model::Model;
use crate::prompt::conversation::{
    ChatPrompt, Conversation, ToolChoice, set_effort, set_thinking, unread,
};
use crate::prompt::parts;
use crate::request::{
    AnthropicChoice, AnthropicTool, Block, Body, ChoiceKind, Content, Format, Function,
    FunctionName, OutputConfig, Source, Speaker, Thinking, ThinkingKind, Turn, Turns, need,
};
use crate::routes::openai_messages::function_json;
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ApiError>;

/// What is asked for beside a conversation.
#[derive(Debug)]
pub(super) struct Asked {
    /// Whether its tools are to be called.
    choice: ToolChoice,
    parallel: bool,
    /// What the answer has to be, and the field that says so.
    format: Option<(Format, &'static str)>,
}

impl Asked {
    /// See [`Conversation::prompt`].
    pub(super) fn prompt(
        self,
        conversation: Conversation,
        model: &Model,
        mut options: Option<&mut GenerationOptions>,
    ) -> Result<ChatPrompt> {
        if let (Some(options), Some((format, path))) = (&mut options, self.format) {
            options.structured = structured::read_format(format, path, true, model)?;
        }
        conversation.prompt(model, &self.choice, self.parallel, options)
    }
}

/// Reads the fields that make the prompt.
pub(super) fn read(body: &mut Body, model: &Model) -> Result<(Conversation, Asked)> {
    let fields: Turns = body.part()?;
    if let Some(thread) = &fields.thread {
        if thread.r#type.as_deref() == Some("continue") {
            return Err(ApiError::no_thread());
        }
        body.ignore("thread");
    }
    let mut messages = Vec::new();
    if let Some(system) = fields.system {
        let text = text_of(system, "system")?;
        messages.push(json!({"role": "system", "content": text}));
    }
    let turns = fields.messages;
    let turns = turns.ok_or_else(|| ApiError::invalid("messages", "it is missing"))?;
    if turns.0.is_empty() {
        return Err(ApiError::invalid("messages", "found no message"));
    }
    for (i, turn) in turns.0.into_iter().enumerate() {
        read_turn(body, turn, &format!("messages[{i}].content"), &mut messages)?;
    }
    let mut extra = Map::new();
    if let Some(Thinking { r#type, .. }) = fields.thinking {
        let followed = match r#type {
            ThinkingKind::Enabled => set_thinking(model, &mut extra, true),
            // Whether to think is the model's choice.
            ThinkingKind::Adaptive => true,
            ThinkingKind::Disabled => set_thinking(model, &mut extra, false),
        };
        if !followed {
            body.ignore("thinking.type");
        }
    }
    let OutputConfig { effort, format } = fields.output_config.unwrap_or_default();
    if let Some(effort) = effort
        && !set_effort(model, &mut extra, &effort)
    {
        body.ignore("output_config.effort");
    }
    if fields.context_management.is_some() {
        body.ignore("context_management");
    }
    let format = format.map(|format| (format, "output_config.format"));
    let format = format.or(fields.output_format.map(|format| (format, "output_format")));
    let tools = read_tools(body, fields.tools.unwrap_or_default().0);
    let (choice, parallel) = read_tool_choice(fields.tool_choice, tools.as_ref())?;
    let conversation = Conversation {
        prefill: take_prefill(&mut messages),
        parse_special: false,
        messages: Value::Array(messages),
        tools,
        extra,
    };
    let asked = Asked {
        choice,
        parallel,
        format,
    };
    Ok((conversation, asked))
}

/// An assistant's message at the end is what the answer begins with, unless it calls tools.
fn take_prefill(messages: &mut Vec<Value>) -> String {
    let goes_on = |last: &Value| last["role"] == "assistant" && last.get("tool_calls").is_none();
    let last = messages.pop_if(|last| goes_on(last));
    let text = last.as_ref().and_then(|last| last["content"].as_str());
    text.unwrap_or_default().to_owned()
}

/// A text: a string, or blocks of text, one line after the other.
fn text_of(content: Content<Block>, path: &str) -> Result<String> {
    let blocks = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(blocks) => blocks,
    };
    let mut texts = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.into_iter().enumerate() {
        texts.push(block_text(block, &format!("{path}[{i}]"))?);
    }
    Ok(texts.join("\n"))
}

/// The text of a block, where it is one: also documents and search results are, in part.
fn block_text(block: Block, path: &str) -> Result<String> {
    let not_text = |reason: String| ApiError::unsupported(format!("{path}.type"), reason);
    match (&*block.r#type, block.source) {
        ("text", _) => need(block.text, path, "text"),
        ("document", Some(Source::Document(source))) => {
            let kind = source.r#type.as_deref().unwrap_or_default();
            let text = match (kind, source.data, source.content) {
                ("text", Some(data), _) => data,
                ("content", _, Some(content)) => {
                    text_of(*content, &format!("{path}.source.content"))?
                }
                (other, _, _) => {
                    let reason = format!(
                        "found a document of {other:?}, expected text: this model reads only text"
                    );
                    return Err(not_text(reason));
                }
            };
            let head = [block.title, block.context].into_iter().flatten();
            Ok(head.chain([text]).collect::<Vec<_>>().join("\n"))
        }
        ("search_result", source) => {
            let name = match source {
                Some(Source::Name(name)) => Some(name),
                _ => None,
            };
            let text = match block.content {
                Some(content) => text_of(*content, &format!("{path}.content"))?,
                None => String::new(),
            };
            let head = [block.title, name].into_iter().flatten();
            Ok(head.chain([text]).collect::<Vec<_>>().join("\n"))
        }
        (other, _) => {
            let reason = format!("found {other:?}, expected \"text\": this model reads only text");
            Err(not_text(reason))
        }
    }
}

/// The text of a block that a tool gave, or a note in its place where it is none: the model chose the tool, so it has to
/// know that this leads nowhere. A refusal would end the conversation, which has the block in it from now on.
fn tool_text(body: &mut Body, block: Block, path: &str) -> Result<String> {
    let reads = match (&*block.r#type, &block.source) {
        ("text" | "search_result", _) => true,
        ("document", Some(Source::Document(source))) => {
            matches!(source.r#type.as_deref(), Some("text" | "content"))
        }
        _ => false,
    };
    if reads {
        return block_text(block, path);
    }
    body.ignore(path);
    Ok(unread(&block.r#type))
}

fn read_turn(body: &mut Body, turn: Turn, path: &str, out: &mut Vec<Value>) -> Result<()> {
    let role = match turn.role {
        Speaker::User => "user",
        Speaker::Assistant => "assistant",
        Speaker::System => "system",
    };
    match (turn.content, turn.role) {
        (Content::Text(text), _) => out.push(json!({"role": role, "content": text})),
        (content, Speaker::System) => {
            let text = text_of(content, path)?;
            out.push(json!({"role": role, "content": text}));
        }
        (Content::Parts(blocks), Speaker::User) => read_user(body, path, blocks, out)?,
        (Content::Parts(blocks), Speaker::Assistant) => {
            out.push(read_assistant(body, path, blocks)?);
        }
    }
    Ok(())
}

/// What a user says, and the results of tools, each of which is a message of its own to templates.
fn read_user(body: &mut Body, path: &str, blocks: Vec<Block>, out: &mut Vec<Value>) -> Result<()> {
    if blocks.is_empty() {
        return Err(ApiError::invalid(path, "found no block"));
    }
    // Clients put documents that a tool has read beside its result.
    let of_tools = blocks.iter().any(|block| block.r#type == "tool_result");
    let mut said = Said::default();
    for (i, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        match &*block.r#type {
            "tool_result" => {
                said.end(out);
                out.push(read_result(body, block, &path)?);
            }
            _ if of_tools => said.texts.push(tool_text(body, block, &path)?),
            "image" => said.add_image(image(block, path)),
            _ => said.texts.push(block_text(block, &path)?),
        }
    }
    said.end(out);
    Ok(())
}

/// What a user says between results of tools: texts, and what is before the last image.
#[derive(Default)]
struct Said {
    parts: Vec<Value>,
    texts: Vec<String>,
}

impl Said {
    fn add_image(&mut self, image: Value) {
        let texts = std::mem::take(&mut self.texts);
        self.parts
            .extend(texts.iter().map(|text| parts::text_part(text)));
        self.parts.push(image);
    }

    /// Adds the message that it is.
    fn end(&mut self, out: &mut Vec<Value>) {
        let (mut parts, texts) = (
            std::mem::take(&mut self.parts),
            std::mem::take(&mut self.texts),
        );
        match (parts.is_empty(), texts.is_empty()) {
            (true, true) => {}
            (true, false) => out.push(json!({"role": "user", "content": texts.join("\n")})),
            (false, _) => {
                parts.extend(texts.iter().map(|text| parts::text_part(text)));
                out.push(json!({"role": "user", "content": parts}));
            }
        }
    }
}

/// The image that a block has.
fn image(block: Block, path: String) -> Value {
    let url = match block.source {
        Some(Source::Document(source)) => match (source.data, source.url) {
            (Some(data), _) => {
                let kind = source.media_type.unwrap_or_default();
                Some(format!("data:{kind};base64,{data}"))
            }
            (None, url) => url,
        },
        Some(Source::Name(url)) => Some(url),
        None => None,
    };
    parts::image_part("image", path, url)
}

fn read_result(body: &mut Body, block: Block, path: &str) -> Result<Value> {
    let id = need(block.tool_use_id, path, "tool_use_id")?;
    let text = match block.content.map(|content| *content) {
        Some(Content::Parts(blocks)) => {
            let mut texts = Vec::with_capacity(blocks.len());
            for (i, block) in blocks.into_iter().enumerate() {
                texts.push(tool_text(body, block, &format!("{path}.content[{i}]"))?);
            }
            texts.join("\n")
        }
        Some(Content::Text(text)) => text,
        None => String::new(),
    };
    let text = match block.is_error {
        // Templates have no other way to say so.
        Some(true) => format!("Error: {text}"),
        _ => text,
    };
    Ok(json!({"role": "tool", "tool_call_id": id, "content": text}))
}

fn read_assistant(body: &mut Body, path: &str, blocks: Vec<Block>) -> Result<Value> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        match &*block.r#type {
            "text" => texts.push(need(block.text, &path, "text")?),
            "thinking" => thoughts.push(need(block.thinking, &path, "thinking")?),
            "tool_use" => calls.push(read_call(block, &path)?),
            // What only Anthropic's servers can read, or have done.
            "redacted_thinking" | "server_tool_use" | "web_search_tool_result" => body.ignore(path),
            other => {
                let reason = format!("found {other:?}, expected text, thinking or tool_use");
                return Err(ApiError::unsupported(format!("{path}.type"), reason));
            }
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

fn read_call(block: Block, path: &str) -> Result<Value> {
    let id = need(block.id, path, "id")?;
    let FunctionName(name) = need(block.name, path, "name")?;
    let input = block.input.unwrap_or_default().0;
    let function = json!({"name": name, "arguments": input});
    Ok(json!({"type": "function", "id": id, "function": function}))
}

/// Tools in OpenAI's form. Those that Anthropic's servers or clients define are not known to the model.
fn read_tools(body: &mut Body, tools: Vec<AnthropicTool>) -> Option<Value> {
    let mut known = Vec::with_capacity(tools.len());
    for (i, tool) in tools.into_iter().enumerate() {
        match tool.r#type.as_deref() {
            None | Some("custom") => known.push(function_json(Function::new(
                tool.name,
                tool.description,
                tool.input_schema,
                tool.strict,
            ))),
            Some(_) => body.ignore(format!("tools[{i}]")),
        }
    }
    (!known.is_empty()).then_some(Value::Array(known))
}

fn read_tool_choice(
    choice: Option<AnthropicChoice>,
    tools: Option<&Value>,
) -> Result<(ToolChoice, bool)> {
    let Some(choice) = choice else {
        let choice = tools.map_or(ToolChoice::None, |_| ToolChoice::Auto);
        return Ok((choice, true));
    };
    let read = match choice.r#type {
        ChoiceKind::None => ToolChoice::None,
        ChoiceKind::Auto => tools.map_or(ToolChoice::None, |_| ToolChoice::Auto),
        ChoiceKind::Any => ToolChoice::Required,
        ChoiceKind::Tool => {
            let FunctionName(name) = need(choice.name, "tool_choice", "name")?;
            ToolChoice::named("tool_choice.name", name, tools)?
        }
    };
    if tools.is_none() && read != ToolChoice::None {
        return Err(ApiError::invalid("tool_choice", "there are no tools"));
    }
    Ok((read, !choice.disable_parallel_tool_use.unwrap_or(false)))
}
