//! `/v1/chat/completions`, and what it shares with OpenAI's other routes.

use super::{Entries, Null};
use serde::Serialize;
use utoipa::ToSchema;

literals! {
    ChatCompletionObject = "chat.completion";
    ChatCompletionChunkObject = "chat.completion.chunk";
    Assistant = "assistant";
    FunctionType = "function";
}

/// An answer that came whole.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletion<'a> {
    pub(crate) id: &'a str,
    #[schema(inline)]
    pub(crate) object: ChatCompletionObject,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    /// vLLM's, where they were asked for; null for the first token, which nothing foretold.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    #[schema(required)]
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: ChatFinishReason,
    pub(crate) message: ChatMessage,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChatFinishReason {
    Stop,
    Length,
    ToolCalls,
    /// Where `functions` were given.
    FunctionCall,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatMessage {
    #[schema(inline)]
    pub(crate) role: Assistant,
    /// Null where there is nothing but calls.
    #[schema(required)]
    pub(crate) content: Option<String>,
    #[schema(inline)]
    pub(crate) refusal: Null,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ChatToolCall>,
    /// Where `functions` were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) function_call: Option<ChatFunctionCall>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatToolCall {
    pub(crate) id: String,
    #[schema(inline)]
    pub(crate) r#type: FunctionType,
    pub(crate) function: ChatFunctionCall,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatFunctionCall {
    pub(crate) name: String,
    /// JSON as text; not always whole where the answer was cut off.
    pub(crate) arguments: String,
}

/// A part of an answer that is streamed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletionChunk<'a> {
    pub(crate) id: &'a str,
    #[schema(inline)]
    pub(crate) object: ChatCompletionChunkObject,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    /// None in the last chunk, which tells the usage.
    pub(crate) choices: Vec<ChatChunkChoice>,
    /// Where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub(crate) usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: ChatDelta,
    #[schema(required)]
    pub(crate) logprobs: Option<ChatLogprobs>,
    /// Null until the answer ends.
    #[schema(required)]
    pub(crate) finish_reason: Option<ChatFinishReason>,
}

/// What a chunk adds to a message; nothing where the answer ends.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatDelta {
    // In the first chunk. What is inline takes no words of its own: they would make an object of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(inline, nullable = false)]
    pub(crate) role: Option<Assistant>,
    /// Null in the first chunk of an answer that is nothing but calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub(crate) content: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) tool_calls: Option<[ChatToolCallDelta; 1]>,
    /// Where `functions` were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) function_call: Option<ChatFunctionDelta>,
}

/// The beginning of a call, or more of its arguments.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatToolCallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(inline, nullable = false)]
    pub(crate) r#type: Option<FunctionType>,
    pub(crate) function: ChatFunctionDelta,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatFunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) name: Option<String>,
    pub(crate) arguments: String,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<TokenLogprobs>,
    #[schema(inline)]
    pub(crate) refusal: Null,
}

/// A token and its likeliest rivals.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenLogprobs {
    #[serde(flatten)]
    pub(crate) chosen: TokenLogprob,
    pub(crate) top_logprobs: Vec<TokenLogprob>,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct TokenLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f64,
    pub(crate) bytes: Vec<u8>,
}

/// By token id, the token of a prompt first.
pub(crate) type PromptLogprobs = Entries<PromptLogprob>;

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct PromptLogprob {
    pub(crate) logprob: f64,
    pub(crate) rank: usize,
    pub(crate) decoded_token: String,
}

/// Tokens that a request took.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    /// Not in chunks that tell the tokens so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) prompt_tokens_details: Option<PromptTokensDetails>,
    /// Of chats, in the same places.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(crate) completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct PromptTokensDetails {
    /// Those that the prefix cache had.
    pub(crate) cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct CompletionTokensDetails {
    pub(crate) reasoning_tokens: usize,
}

impl Usage {
    /// What is known while answers come.
    pub(crate) fn so_far(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: None,
            completion_tokens_details: None,
        }
    }

    /// All of a request.
    pub(crate) fn of(usage: &ferrum_engine::engine::Usage) -> Self {
        let cached_tokens = usage.cached_tokens;
        Self {
            prompt_tokens_details: Some(PromptTokensDetails { cached_tokens }),
            ..Self::so_far(usage.prompt_tokens, usage.completion_tokens)
        }
    }
}
