//! A conversation as a chat template reads it, whichever API it came by, and the prompt that it becomes.

use crate::error::ApiError;
use crate::model::Model;
use crate::output::{CALL, Looks};
use ferrum_formats::chat_template::ChatInput;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use serde_json::{Map, Value};

/// Most tool calls of one answer.
const MAX_CALLS: usize = 128;

/// What goes into a template.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    /// Messages in the form of Hugging Face's templates: an array.
    pub(crate) messages: Value,
    /// Tools in OpenAI's form: an array that is not empty.
    pub(crate) tools: Option<Value>,
    /// Further variables.
    pub(crate) extra: Map<String, Value>,
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
    /// The beginning of an answer that has to be a call.
    fn beginning(&self) -> String {
        match self {
            ToolChoice::None | ToolChoice::Auto => String::new(),
            ToolChoice::Required => format!("{CALL}\n{{\"name\":"),
            // Names have no characters that JSON escapes.
            ToolChoice::Named(name) => format!("{CALL}\n{{\"name\": \"{name}\", \"arguments\":"),
        }
    }
}

/// What the engine gets, and how to read what comes of it.
#[derive(Debug)]
pub(crate) struct ChatPrompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) looks: Looks,
    /// What the prompt says already of the answer, so that it becomes a call.
    pub(crate) begun: String,
}

impl Conversation {
    pub(crate) fn input(&self) -> ChatInput<'_> {
        ChatInput {
            tools: self.tools.as_ref(),
            extra: self.extra.clone(),
            ..ChatInput::new(&self.messages)
        }
    }

    /// The prompt for an answer.
    pub(crate) fn prompt(
        mut self,
        model: &Model,
        choice: &ToolChoice,
        parallel: bool,
    ) -> Result<ChatPrompt, ApiError> {
        if *choice == ToolChoice::None {
            self.tools = None;
        }
        let source = model.template_source();
        if self.tools.is_some() && !source.contains(CALL) {
            let reason =
                "this model's chat template has no tool calls of a form that is known here";
            return Err(ApiError::unsupported("tools", reason));
        }
        let text = model.render(&self.input())?;
        let reasoning = source.contains("<think>") || source.contains("</think>");
        let looks = Looks {
            reasoning,
            begins_thinking: reasoning && text.trim_end().ends_with("<think>"),
            max_calls: match (&self.tools, parallel) {
                (None, _) => 0,
                (Some(_), false) => 1,
                (Some(_), true) => MAX_CALLS,
            },
        };
        let begun = choice.beginning();
        if looks.begins_thinking && !begun.is_empty() {
            let reason =
                "a model that always thinks first cannot be made to call; expected \"auto\"";
            return Err(ApiError::unsupported("tool_choice", reason));
        }
        Ok(ChatPrompt {
            tokens: model.encode("messages", &(text + &begun), EncodeOptions::PROMPT)?,
            looks,
            begun,
        })
    }
}
