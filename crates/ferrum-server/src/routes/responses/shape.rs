//! Responses as OpenAI's clients read them.

use super::NAMESPACES;
use crate::app::{App, fresh_id};
use crate::error::ApiError;
use crate::model::unix_time;
use crate::speech::{Block, Blocks, End, Kind};
use ferrum_engine::engine::Usage;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What all forms of a response have, and where it is kept.
pub(super) struct Shape {
    app: Arc<App>,
    id: String,
    created: u64,
    echo: Map<String, Value>,
    /// The conversation so far, if the response is to be kept.
    messages: Option<Vec<Value>>,
}

impl Shape {
    pub(super) fn new(
        app: &Arc<App>,
        echo: Map<String, Value>,
        messages: Option<Vec<Value>>,
    ) -> Self {
        Self {
            app: Arc::clone(app),
            id: fresh_id("resp_"),
            created: unix_time(),
            echo,
            messages,
        }
    }

    /// A response of which nothing is there.
    pub(super) fn begun(&self) -> Value {
        self.response("in_progress", Vec::new(), Value::Null)
    }

    /// A response with what there is of it so far.
    pub(super) fn going_on(&self, blocks: &Blocks) -> Value {
        let output = self.items(blocks, "in_progress");
        self.response("in_progress", output, Value::Null)
    }

    /// A response that will not end; what there was of it is told.
    pub(super) fn failed(&self, blocks: &Blocks, error: &ApiError) -> Value {
        let mut response = self.response("failed", self.items(blocks, "incomplete"), Value::Null);
        let code = error.code().unwrap_or("server_error");
        response["error"] = json!({"code": code, "message": error.to_string()});
        response
    }

    /// The whole response, which is kept if that is wanted.
    pub(super) fn ended(self, blocks: &Blocks, usage: &Usage) -> Value {
        let cut = blocks.end() == Some(&End::Length);
        let status = if cut { "incomplete" } else { "completed" };
        let usage = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": blocks.reasoning_tokens()},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        });
        let mut response = self.response(status, self.items(blocks, status), usage);
        match cut {
            true => response["incomplete_details"] = json!({"reason": "max_output_tokens"}),
            false => response["completed_at"] = unix_time().into(),
        }
        if let Some(mut messages) = self.messages {
            messages.push(message(blocks));
            self.app.responses.put(&self.id, &response, &messages);
        }
        response
    }

    fn response(&self, status: &str, output: Vec<Value>, usage: Value) -> Value {
        let echo = |field: &str| self.echo.get(field).cloned().unwrap_or_default();
        let or = |field: &str, default: Value| match echo(field) {
            Value::Null => default,
            value => value,
        };
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": null,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": echo("instructions"),
            "max_output_tokens": echo("max_output_tokens"),
            "metadata": or("metadata", json!({})),
            "model": echo("model"),
            "output": output,
            "parallel_tool_calls": echo("parallel_tool_calls"),
            "previous_response_id": echo("previous_response_id"),
            "reasoning": or("reasoning", json!({"effort": null, "summary": null})),
            "service_tier": "default",
            "store": echo("store"),
            "temperature": echo("temperature"),
            "text": {"format": or("format", json!({"type": "text"})), "verbosity": "medium"},
            "tool_choice": or("tool_choice", json!("auto")),
            "tools": or("tools", json!([])),
            "top_logprobs": 0,
            "top_p": echo("top_p"),
            "truncation": "disabled",
            "usage": usage,
            "user": echo("user"),
        })
    }

    /// Finished items; the last has the status of the response.
    fn items(&self, blocks: &Blocks, status: &str) -> Vec<Value> {
        let list = blocks.list();
        let item = |(i, block)| match i + 1 == list.len() {
            true => self.item(block, status),
            false => self.item(block, "completed"),
        };
        list.iter().enumerate().map(item).collect()
    }

    pub(super) fn item(&self, block: &Block, status: &str) -> Value {
        let mut item = item(block, status);
        let namespaces = self.echo.get(NAMESPACES);
        if let Kind::Call(name) = &block.kind
            && let Some(namespace) = namespaces.and_then(|all| all.get(name))
        {
            item["namespace"] = namespace.clone();
        }
        item
    }
}

fn item(block: &Block, status: &str) -> Value {
    let begun = status == "in_progress";
    let content = match begun {
        true => Vec::new(),
        false => vec![part(block)],
    };
    let id = item_id(block);
    match &block.kind {
        Kind::Reasoning => json!({
            "id": id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }),
        Kind::Text => json!({
            "id": id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }),
        Kind::Call(name) => json!({
            "id": id,
            "type": "function_call",
            "status": status,
            "call_id": format!("call_{}", block.tag),
            "name": name,
            "arguments": block.text,
        }),
    }
}

pub(super) fn item_id(block: &Block) -> String {
    let prefix = match &block.kind {
        Kind::Reasoning => "rs_",
        Kind::Text => "msg_",
        Kind::Call(_) => "fc_",
    };
    format!("{prefix}{}", block.tag)
}

/// The one part of the content of an item.
pub(super) fn part(block: &Block) -> Value {
    match block.kind {
        Kind::Reasoning => json!({"type": "reasoning_text", "text": block.text}),
        _ => json!({
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": [],
        }),
    }
}

/// An answer as templates read it in the next turn.
fn message(blocks: &Blocks) -> Value {
    let text = |kind: &Kind| -> String {
        let mine = blocks.list().iter().filter(|block| block.kind == *kind);
        mine.map(|block| &*block.text).collect()
    };
    let call = |block: &Block| match &block.kind {
        Kind::Call(name) => Some(json!({
            "type": "function",
            "id": format!("call_{}", block.tag),
            "function": {"name": name, "arguments": block.arguments()},
        })),
        _ => None,
    };
    let calls: Vec<_> = blocks.list().iter().filter_map(call).collect();
    let (said, thought) = (text(&Kind::Text), text(&Kind::Reasoning));
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

/// A number as it was written: 0.7 and not 0.699999988.
pub(super) fn short(x: f32) -> Value {
    let written = x.to_string().parse::<f64>();
    json!(written.unwrap_or_else(|_| x.into()))
}
