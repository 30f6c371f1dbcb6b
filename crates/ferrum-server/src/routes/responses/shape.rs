//! Responses as OpenAI's clients read them.

use crate::error::ApiError;
use crate::generation::chat_output::{Block, BlockKind, Blocks, ChatFinish};
use crate::generation::logprobs::chat_entry;
use crate::http::app::App;
use crate::ids::fresh_id;
use crate::ids::unix_time;
use crate::models::model::Model;
use crate::response::{
    CompletionTokensDetails, EmptyList, IncompleteDetails, IncompleteReason, PromptTokensDetails,
    Response, ResponseError, ResponseItem, ResponseObject, ResponsePart, ResponseStatus,
    ResponseText, ResponseUsage, ServiceTier, TokenLogprobs, Truncation, Verbosity,
};
use ferrum_engine::engine::Usage;
use ferrum_engine::sampler::Logprobs;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// What a response repeats of its request, with what held where that said nothing.
#[derive(Debug)]
pub(super) struct Echo {
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<usize>,
    pub(super) metadata: Value,
    pub(super) model: String,
    pub(super) parallel_tool_calls: bool,
    pub(super) previous_response_id: Option<String>,
    pub(super) reasoning: Value,
    pub(super) store: bool,
    pub(super) temperature: f64,
    pub(super) format: Value,
    pub(super) tool_choice: Value,
    pub(super) tools: Value,
    pub(super) top_logprobs: usize,
    pub(super) top_p: f64,
    pub(super) user: Value,
    /// Of functions by their names; of those that have one.
    pub(super) namespaces: Map<String, Value>,
}

/// What all forms of a response have, and where it is kept.
pub(super) struct Shape {
    app: Arc<App>,
    model: Arc<Model>,
    id: String,
    created: u64,
    echo: Echo,
    /// The conversation so far, if the response is to be kept.
    messages: Option<Vec<Value>>,
}

impl Shape {
    pub(super) fn new(
        app: &Arc<App>,
        model: Arc<Model>,
        echo: Echo,
        messages: Option<Vec<Value>>,
    ) -> Self {
        Self {
            app: Arc::clone(app),
            model,
            id: fresh_id("resp_"),
            created: unix_time(),
            echo,
            messages,
        }
    }

    /// A response with what there is of it so far.
    pub(super) fn going_on<'a>(&'a self, blocks: &'a Blocks) -> Response<'a> {
        self.response(ResponseStatus::InProgress, blocks)
    }

    /// A failed response, with its output so far.
    pub(super) fn failed<'a>(&'a self, blocks: &'a Blocks, error: &ApiError) -> Response<'a> {
        Response {
            error: Some(ResponseError {
                code: error.code().unwrap_or("server_error"),
                message: error.to_string(),
            }),
            ..self.response(ResponseStatus::Failed, blocks)
        }
    }

    /// The whole response.
    pub(super) fn ended<'a>(&'a self, blocks: &'a Blocks, usage: &Usage) -> Response<'a> {
        let cut = blocks.finish() == Some(&ChatFinish::Length);
        let status = match cut {
            true => ResponseStatus::Incomplete,
            false => ResponseStatus::Completed,
        };
        let (cached_tokens, reasoning_tokens) = (usage.cached_tokens, blocks.reasoning_tokens());
        let reason = IncompleteReason::MaxOutputTokens;
        Response {
            completed_at: (!cut).then(unix_time),
            incomplete_details: cut.then_some(IncompleteDetails { reason }),
            usage: Some(ResponseUsage {
                input_tokens: usage.prompt_tokens,
                input_tokens_details: PromptTokensDetails { cached_tokens },
                output_tokens: usage.completion_tokens,
                output_tokens_details: CompletionTokensDetails { reasoning_tokens },
                total_tokens: usage.prompt_tokens + usage.completion_tokens,
            }),
            ..self.response(status, blocks)
        }
    }

    /// Keeps a whole response, if that is wanted.
    pub(super) fn keep(&self, response: &Response<'_>, blocks: &Blocks) {
        let Some(messages) = &self.messages else {
            return;
        };
        let answer = message(blocks);
        let messages: Vec<_> = messages.iter().chain([&answer]).collect();
        // Both are of types that JSON has.
        let response = serde_json::to_string(response).unwrap_or_default();
        let messages = serde_json::to_string(&messages).unwrap_or_default();
        let model = &self.echo.model;
        self.app.responses.put(&self.id, model, response, messages);
    }

    fn response<'a>(&'a self, status: ResponseStatus, blocks: &'a Blocks) -> Response<'a> {
        let echo = &self.echo;
        Response {
            id: &self.id,
            object: ResponseObject,
            created_at: self.created,
            completed_at: None,
            status,
            background: false,
            error: None,
            incomplete_details: None,
            instructions: echo.instructions.as_deref(),
            max_output_tokens: echo.max_output_tokens,
            metadata: &echo.metadata,
            model: &echo.model,
            output: self.items(blocks, status),
            parallel_tool_calls: echo.parallel_tool_calls,
            previous_response_id: echo.previous_response_id.as_deref(),
            reasoning: &echo.reasoning,
            service_tier: ServiceTier,
            store: echo.store,
            temperature: echo.temperature,
            text: ResponseText {
                format: &echo.format,
                verbosity: Verbosity,
            },
            tool_choice: &echo.tool_choice,
            tools: &echo.tools,
            top_logprobs: echo.top_logprobs,
            top_p: echo.top_p,
            truncation: Truncation,
            usage: None,
            user: &echo.user,
        }
    }

    /// Finished items; the last has the status of the response, or is as incomplete as that.
    fn items<'a>(&'a self, blocks: &'a Blocks, status: ResponseStatus) -> Vec<ResponseItem<'a>> {
        let list = blocks.list();
        let last = match status {
            ResponseStatus::Failed => ResponseStatus::Incomplete,
            status => status,
        };
        let item = |(i, block)| match i + 1 == list.len() {
            true => self.item(block, last),
            false => self.item(block, ResponseStatus::Completed),
        };
        list.iter().enumerate().map(item).collect()
    }

    pub(super) fn item<'a>(&'a self, block: &'a Block, status: ResponseStatus) -> ResponseItem<'a> {
        let content = match status {
            ResponseStatus::InProgress => Vec::new(),
            _ => vec![self.part(block)],
        };
        let id = item_id(block);
        match &block.kind {
            BlockKind::Reasoning => ResponseItem::Reasoning {
                id,
                status: Some(status),
                summary: EmptyList,
                content,
            },
            BlockKind::Text => ResponseItem::Message {
                id,
                status,
                role: "assistant",
                content,
            },
            BlockKind::Call(name) => ResponseItem::FunctionCall {
                id,
                status,
                call_id: Cow::Owned(format!("call_{}", block.tag)),
                name,
                arguments: Cow::Borrowed(&block.text),
                namespace: self.echo.namespaces.get(name).and_then(Value::as_str),
            },
        }
    }

    /// The one part of the content of an item.
    pub(super) fn part<'a>(&self, block: &'a Block) -> ResponsePart<'a> {
        let text = &block.text;
        match block.kind {
            BlockKind::Reasoning => ResponsePart::ReasoningText { text },
            _ => ResponsePart::OutputText {
                text,
                annotations: EmptyList,
                logprobs: Some(self.listed(&block.logprobs)),
            },
        }
    }

    /// Tokens of a text.
    pub(super) fn listed<T: From<TokenLogprobs>>(&self, tokens: &[Logprobs]) -> Vec<T> {
        let entry = |logprobs| chat_entry(&self.model, logprobs).into();
        tokens.iter().map(entry).collect()
    }
}

pub(super) fn item_id(block: &Block) -> String {
    let prefix = match &block.kind {
        BlockKind::Reasoning => "rs_",
        BlockKind::Text => "msg_",
        BlockKind::Call(_) => "fc_",
    };
    format!("{prefix}{}", block.tag)
}

/// An answer as templates read it in the next turn.
fn message(blocks: &Blocks) -> Value {
    let text = |kind: &BlockKind| -> String {
        let mine = blocks.list().iter().filter(|block| block.kind == *kind);
        mine.map(|block| &*block.text).collect()
    };
    let call = |block: &Block| match &block.kind {
        BlockKind::Call(name) => Some(json!({
            "type": "function",
            "id": format!("call_{}", block.tag),
            "function": {"name": name, "arguments": block.arguments()},
        })),
        _ => None,
    };
    let calls: Vec<_> = blocks.list().iter().filter_map(call).collect();
    let (said, thought) = (text(&BlockKind::Text), text(&BlockKind::Reasoning));
    let mut message = json!({"role": "assistant"});
    if !said.is_empty() || calls.is_empty() {
        message["content"] = said.into();
    }
    if !thought.is_empty() {
        message["reasoning_content"] = thought.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}
