//! `/v1/messages`, `/v1/messages/count_tokens`, and models in Anthropic's shape.

use super::{AnthropicErrorDetail, ModelObject};
use crate::http::sse::NamedEvent;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

literals! {
    AnthropicMessageType = "message";
    AnthropicRole = "assistant";
}

/// An answer; in a stream, as it begins.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AnthropicMessage<'a> {
    pub(crate) id: &'a str,
    #[schema(inline)]
    pub(crate) r#type: AnthropicMessageType,
    #[schema(inline)]
    pub(crate) role: AnthropicRole,
    pub(crate) model: &'a str,
    pub(crate) content: Vec<AnthropicBlock<'a>>,
    #[serde(flatten)]
    pub(crate) stop: AnthropicStop<'a>,
    pub(crate) usage: AnthropicUsage,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum AnthropicBlock<'a> {
    Text {
        text: &'a str,
    },
    Thinking {
        thinking: &'a str,
        /// Lets Anthropic trust what comes back; nothing depends on it here.
        signature: &'static str,
    },
    ToolUse {
        id: String,
        name: &'a str,
        /// The arguments; an object.
        #[schema(value_type = Object)]
        input: Value,
    },
}

/// Why an answer ended; null until it has.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(crate) struct AnthropicStop<'a> {
    #[schema(required)]
    pub(crate) stop_reason: Option<AnthropicStopReason>,
    /// The stop string that it met.
    #[schema(required)]
    pub(crate) stop_sequence: Option<&'a str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AnthropicStopReason {
    EndTurn,
    StopSequence,
    MaxTokens,
    ToolUse,
}

/// Tokens that a request took, those from the prefix cache apart.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct AnthropicUsage {
    pub(crate) input_tokens: usize,
    pub(crate) cache_creation_input_tokens: usize,
    pub(crate) cache_read_input_tokens: usize,
    pub(crate) output_tokens: usize,
    pub(crate) output_tokens_details: ThinkingTokens,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct ThinkingTokens {
    pub(crate) thinking_tokens: usize,
}

/// A streamed message.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum AnthropicEvent<'a> {
    MessageStart {
        message: AnthropicMessage<'a>,
    },
    Ping,
    ContentBlockStart {
        index: usize,
        content_block: AnthropicBlock<'a>,
    },
    ContentBlockDelta {
        index: usize,
        delta: AnthropicDelta<'a>,
    },
    ContentBlockStop {
        index: usize,
    },
    MessageDelta {
        delta: AnthropicStop<'a>,
        usage: AnthropicUsage,
    },
    MessageStop,
    Error {
        error: AnthropicErrorDetail,
    },
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "they are Anthropic's")]
pub(crate) enum AnthropicDelta<'a> {
    TextDelta { text: &'a str },
    ThinkingDelta { thinking: &'a str },
    InputJsonDelta { partial_json: &'a str },
}

impl NamedEvent for AnthropicEvent<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::Ping => "ping",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Error { .. } => "error",
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InputTokens {
    pub(crate) input_tokens: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AnthropicModelList {
    pub(crate) has_more: bool,
    #[schema(required)]
    pub(crate) first_id: Option<String>,
    #[schema(required)]
    pub(crate) last_id: Option<String>,
    pub(crate) data: Vec<AnthropicModel>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AnthropicModel {
    #[schema(inline)]
    pub(crate) r#type: ModelObject,
    pub(crate) id: String,
    pub(crate) display_name: String,
    /// RFC 3339.
    pub(crate) created_at: String,
    /// Null before the model is loaded for the first time.
    #[schema(required)]
    pub(crate) max_input_tokens: Option<usize>,
}
