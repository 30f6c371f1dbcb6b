//! A conversation as a chat template reads it, whichever API it came by, and the prompt that it becomes.

use crate::error::ApiError;
use crate::generation::options::GenerationOptions;
use crate::generation::structured::ChatForm;
use crate::models::model::Model;
use crate::output::{CallFormat, Function, Markers, OutputFormat, Thinking, name_calls};
use crate::prompt::images::{self, PlacedImage};
use crate::request;
use ferrum_formats::chat_template::ChatInput;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Most tool calls of one answer.
const MAX_CALLS: usize = 128;

/// The variables by which templates let a model think or not, and what those say that have them: Qwen's, and that of
/// DeepSeek and Granite.
const THINKING: [(&str, &[&str]); 2] = [
    ("enable_thinking", &["enable_thinking"]),
    (
        "thinking",
        &["if thinking", "not thinking", "thinking is defined"],
    ),
];

/// The variable by which templates say how much a model thinks.
const REASONING_EFFORT: &str = "reasoning_effort";

/// What goes into a template.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    /// Messages in the form of Hugging Face's templates: an array.
    pub(crate) messages: Value,
    /// Tools in OpenAI's form: an array that is not empty. `strict` is there where it is true.
    pub(crate) tools: Option<Value>,
    /// Further variables.
    pub(crate) extra: Map<String, Value>,
    /// What the answer begins with, said for the model.
    pub(crate) prefill: String,
    /// Whether special tokens that users and tools spell out are special.
    pub(crate) parse_special: bool,
}

/// Whether and which tools are to be called.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

impl ToolChoice {
    /// What the field `tool_choice` says in OpenAI's form.
    pub(crate) fn of(
        asked: Option<request::ToolChoice>,
        tools: Option<&Value>,
    ) -> Result<Self, ApiError> {
        let choice = match asked {
            None => return Ok(tools.map_or(Self::None, |_| Self::Auto)),
            Some(request::ToolChoice::Word(word)) => Self::of_word(&word),
            Some(request::ToolChoice::Function(chosen)) => match chosen.r#type.as_deref() {
                None | Some("function") => {
                    let (param, name) = match (chosen.function, chosen.name) {
                        (Some(function), _) => ("tool_choice.function.name", function.name),
                        (None, Some(name)) => ("tool_choice.name", name),
                        (None, None) => {
                            return Err(ApiError::invalid("tool_choice.function", "it is missing"));
                        }
                    };
                    Self::named(param, name.0, tools)?
                }
                // All tools are allowed, as a choice of some would need another prompt.
                Some("allowed_tools") => {
                    let mode = chosen.allowed_tools.and_then(|allowed| allowed.mode);
                    Self::of_word(mode.or(chosen.mode).as_deref().unwrap_or("auto"))
                }
                Some(other) => {
                    let reason = format!("found {other:?}, expected \"function\"");
                    return Err(ApiError::unsupported("tool_choice.type", reason));
                }
            },
        };
        match tools {
            // Clients send "auto" without any, too.
            None if matches!(choice, Self::None | Self::Auto) => Ok(Self::None),
            None => Err(ApiError::invalid("tool_choice", "there are no tools")),
            Some(_) => Ok(choice),
        }
    }

    fn of_word(word: &str) -> Self {
        match word {
            "none" => Self::None,
            "required" | "any" => Self::Required,
            _ => Self::Auto,
        }
    }

    /// The tool of this name, which has to be one of `tools`.
    pub(crate) fn named(
        param: &str,
        name: String,
        tools: Option<&Value>,
    ) -> Result<Self, ApiError> {
        let mut known = tools.and_then(Value::as_array).into_iter().flatten();
        if !known.any(|tool| tool["function"]["name"] == *name) {
            let reason = format!("there is no tool {name:?} in tools");
            return Err(ApiError::invalid(param, reason));
        }
        Ok(ToolChoice::Named(name))
    }
}

/// Has the template make the model think or not. Gives whether that is what happens.
pub(crate) fn set_thinking(model: &Model, extra: &mut Map<String, Value>, think: bool) -> bool {
    let source = model.template_source();
    let knows = |says: &[&str]| says.iter().any(|text| source.contains(text));
    match THINKING.iter().find(|(_, says)| knows(says)) {
        Some((variable, _)) => {
            extra.insert((*variable).into(), think.into());
            true
        }
        None => reasons(source) == think,
    }
}

/// Has the model think as hard as a word says. Gives whether its template knows how.
pub(crate) fn set_effort(model: &Model, extra: &mut Map<String, Value>, effort: &str) -> bool {
    if effort == "none" {
        return set_thinking(model, extra, false);
    }
    let known = model.template_source().contains(REASONING_EFFORT);
    if known {
        extra.insert(REASONING_EFFORT.into(), effort.into());
    }
    known
}

/// What the model reads in place of something of a tool's that is no text, such as an image.
pub(crate) fn unread(kind: &str) -> String {
    format!("[{kind} left out: this model reads only text]")
}

/// Whether a template speaks of reasoning.
fn reasons(source: &str) -> bool {
    Thinking::of_template(source).is_some()
        || CallFormat::of_template(source).is_some_and(CallFormat::has_channels)
}

/// Prompt tokens and images, and the output format for parsing the response.
#[derive(Debug)]
pub(crate) struct ChatPrompt {
    pub(crate) tokens: Vec<TokenId>,
    /// Those in it.
    pub(crate) images: Vec<PlacedImage>,
    pub(crate) output_format: OutputFormat,
    /// Whether the answer can be nothing but calls.
    pub(crate) must_call: bool,
}

impl Conversation {
    /// Takes the last message, which has to be an assistant's, to be gone on with.
    pub(crate) fn take_last(&mut self) -> Result<String, ApiError> {
        let messages = self.messages.as_array_mut();
        let goes_on =
            |last: &mut Value| last["role"] == "assistant" && last.get("tool_calls").is_none();
        let last = messages.and_then(|messages| messages.pop_if(goes_on));
        let text = last.as_ref().and_then(|last| last["content"].as_str());
        let text = text.map(str::to_owned);
        text.ok_or_else(|| {
            let reason = "expected a message of the assistant at the end, without calls";
            ApiError::invalid("continue_final_message", reason)
        })
    }

    /// Puts instructions before all messages.
    pub(crate) fn instruct(&mut self, text: &str) {
        if let Value::Array(messages) = &mut self.messages {
            messages.insert(0, json!({"role": "system", "content": text}));
        }
    }

    /// Makes the messages ready for the template: what it would refuse or leave out is joined with its
    /// neighbours, and special tokens are quoted.
    pub(crate) fn prepare(&mut self, model: &Model) {
        if let Value::Array(messages) = &mut self.messages {
            model.template_limits().fit(messages);
        }
        self.quote(model);
    }

    /// Has what users and tools say be nothing but text: special tokens that they spell out are none.
    fn quote(&mut self, model: &Model) {
        if self.parse_special {
            return;
        }
        let messages = self.messages.as_array_mut().into_iter().flatten();
        for message in
            messages.filter(|message| message["role"] == "user" || message["role"] == "tool")
        {
            let texts = match message.get_mut("content") {
                Some(text @ Value::String(_)) => vec![text],
                Some(Value::Array(parts)) => {
                    let texts = parts.iter_mut().filter_map(|part| part.get_mut("text"));
                    texts.collect()
                }
                _ => Vec::new(),
            };
            for text in texts {
                if let Value::String(text) = text
                    && let Cow::Owned(marked) = model.special_token_escaper().escape(text)
                {
                    *text = marked;
                }
            }
        }
    }

    pub(crate) fn input(&self) -> ChatInput<'_> {
        ChatInput {
            tools: self.tools.as_ref(),
            extra: self.extra.clone(),
            ..ChatInput::new(&self.messages)
        }
    }

    /// The functions among the tools, from which what templates do not know is taken out.
    pub(crate) fn take_functions(&mut self) -> Vec<Function> {
        let tools = self.tools.as_mut().and_then(Value::as_array_mut);
        let function = |(index, tool): (usize, &mut Value)| {
            let function = tool.get_mut("function")?.as_object_mut()?;
            let strict = function.shift_remove("strict");
            Some(Function {
                index,
                name: function.get("name")?.as_str()?.to_owned(),
                parameters: function.get("parameters").cloned().unwrap_or(json!({})),
                strict: strict == Some(Value::Bool(true)),
            })
        };
        let tools = tools.into_iter().flatten().enumerate();
        tools.filter_map(function).collect()
    }

    /// The prompt for an answer. It completes `options`: truncation, grammar and shown tokens. Without them, only the
    /// prompt is made.
    pub(crate) fn prompt(
        mut self,
        model: &Model,
        choice: &ToolChoice,
        parallel: bool,
        options: Option<&mut GenerationOptions>,
    ) -> Result<ChatPrompt, ApiError> {
        if *choice == ToolChoice::None {
            self.tools = None;
        }
        let source = model.template_source();
        let format = model.served.call_format;
        let format = format.or_else(|| CallFormat::of_template(source));
        if self.tools.is_some() && format.is_none() {
            let reason =
                "this model's chat template has no tool calls of a form that is known here";
            return Err(ApiError::unsupported("tools", reason));
        }
        let mut functions = self.take_functions();
        if let ToolChoice::Named(name) = choice {
            functions.retain(|function| function.name == *name);
        }
        if format == Some(CallFormat::Kimi) {
            name_calls(&mut self.messages);
        }
        let seen = images::read(model, images::take(&mut self.messages))?;
        self.prepare(model);
        let text = model.render(&self.input())?;
        let text = images::expand(model, text, seen.len())?;
        let reasoning = reasons(source) || format.is_some_and(CallFormat::has_channels);
        let thinking = Thinking::of_template(source).unwrap_or_default();
        let output_format = OutputFormat {
            reasoning: reasoning && self.prefill.is_empty(),
            begins_thinking: reasoning && text.trim_end().ends_with(thinking.open),
            thinking,
            format: format.unwrap_or_default(),
            max_calls: match (&self.tools, parallel) {
                (None, _) => 0,
                (Some(_), false) => 1,
                (Some(_), true) => MAX_CALLS,
            },
            functions: functions.into(),
        };
        if output_format.begins_thinking && !self.prefill.is_empty() {
            let reason = "a model that always thinks first does not go on from a message; expected one of the user at the end";
            return Err(ApiError::unsupported("messages", reason));
        }
        let before =
            Some(output_format.format.before_prefill()).filter(|_| !self.prefill.is_empty());
        let text = text + before.unwrap_or_default() + &self.prefill;
        let mut tokens = model.encode("messages", &text, EncodeOptions::PROMPT)?;
        let must_call = matches!(choice, ToolChoice::Required | ToolChoice::Named(_));
        if let Some(options) = options {
            let answer = options.min_output_tokens();
            options.truncation.apply(&mut tokens, model, answer);
            let form = ChatForm {
                output_format: output_format.clone(),
                functions: &output_format.functions,
                must_call,
                structured: options.structured.as_ref(),
            };
            options.grammar = form.compile(model)?;
            options.visible_special_tokens = visible_special_tokens(model, &output_format);
            options.continues_prompt = !self.prefill.is_empty();
        }
        Ok(ChatPrompt {
            images: images::place(model, &tokens, seen)?,
            tokens,
            output_format,
            must_call,
        })
    }
}

/// Special tokens that tell the parts of an answer apart.
fn visible_special_tokens(model: &Model, output_format: &OutputFormat) -> Vec<TokenId> {
    let markers = Markers(&model.served.tokenizer);
    output_format
        .markers()
        .filter_map(|marker| markers.token(marker))
        .collect()
}
