//! A conversation as a chat template reads it, whichever API it came by, and the prompt that it becomes.

use crate::error::ApiError;
use crate::model::Model;
use crate::output::{CallFormat, Function, Looks, Marks, THINK, THINK_END};
use crate::sampling::Wanted;
use crate::structured::ChatForm;
use ferrum_formats::chat_template::ChatInput;
use ferrum_formats::tokenizer::EncodeOptions;
use ferrum_types::TokenId;
use serde_json::{Map, Value, json};

/// Most tool calls of one answer.
const MAX_CALLS: usize = 128;

/// What goes into a template.
#[derive(Debug, Default)]
pub(crate) struct Conversation {
    /// Messages in the form of Hugging Face's templates: an array.
    pub(crate) messages: Value,
    /// Tools in OpenAI's form: an array that is not empty. `strict` is there where it is true.
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

/// What the engine gets, and how to read what comes of it.
#[derive(Debug)]
pub(crate) struct ChatPrompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) looks: Looks,
}

impl Conversation {
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

    /// The prompt for an answer, which `wanted` says more about and gets to know what it is held to.
    pub(crate) fn prompt(
        mut self,
        model: &Model,
        choice: &ToolChoice,
        parallel: bool,
        wanted: &mut Wanted,
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
        let text = model.render(&self.input())?;
        let reasoning = source.contains(THINK) || source.contains(THINK_END);
        let looks = Looks {
            reasoning,
            begins_thinking: reasoning && text.trim_end().ends_with(THINK),
            format: format.unwrap_or_default(),
            max_calls: match (&self.tools, parallel) {
                (None, _) => 0,
                (Some(_), false) => 1,
                (Some(_), true) => MAX_CALLS,
            },
        };
        let form = ChatForm {
            looks,
            functions: &functions,
            must_call: matches!(choice, ToolChoice::Required | ToolChoice::Named(_)),
            structured: wanted.structured.as_ref(),
        };
        wanted.grammar = form.compile(model)?;
        wanted.shown_tokens = shown_tokens(model, looks);
        Ok(ChatPrompt {
            tokens: model.encode("messages", &text, EncodeOptions::PROMPT)?,
            looks,
        })
    }
}

/// Special tokens that tell the parts of an answer apart.
fn shown_tokens(model: &Model, looks: Looks) -> Vec<TokenId> {
    let thought = [THINK, THINK_END].into_iter();
    let calls = looks.format.marks().iter().copied();
    let thought = thought.filter(|_| looks.reasoning);
    let calls = calls.filter(|_| looks.max_calls > 0);
    let marks = Marks(&model.served.tokenizer);
    let tokens = thought.chain(calls).filter_map(|mark| marks.token(mark));
    tokens.collect()
}
