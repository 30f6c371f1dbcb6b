//! `/v1/responses`: OpenAI's items.

use super::{
    CompletionTokensDetails, EmptyList, ListObject, PromptTokensDetails, TokenLogprob,
    TokenLogprobs,
};
use crate::http::sse::NamedEvent;
use serde::Serialize;
use serde_json::Value;
use std::borrow::Cow;
use utoipa::ToSchema;

literals! {
    ResponseObject = "response";
    InputTokensObject = "response.input_tokens";
    ServiceTier = "default";
    Verbosity = "medium";
    Truncation = "disabled";
}

/// An answer with what it was asked for.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Response<'a> {
    pub(crate) id: &'a str,
    #[schema(inline)]
    pub(crate) object: ResponseObject,
    pub(crate) created_at: u64,
    #[schema(required)]
    pub(crate) completed_at: Option<u64>,
    pub(crate) status: ResponseStatus,
    pub(crate) background: bool,
    #[schema(required)]
    pub(crate) error: Option<ResponseError>,
    #[schema(required)]
    pub(crate) incomplete_details: Option<IncompleteDetails>,
    #[schema(required)]
    pub(crate) instructions: Option<&'a str>,
    #[schema(required)]
    pub(crate) max_output_tokens: Option<usize>,
    /// As the request has it, like the other values of any kind.
    pub(crate) metadata: &'a Value,
    pub(crate) model: &'a str,
    pub(crate) output: Vec<ResponseItem<'a>>,
    pub(crate) parallel_tool_calls: bool,
    #[schema(required)]
    pub(crate) previous_response_id: Option<&'a str>,
    pub(crate) reasoning: &'a Value,
    #[schema(inline)]
    pub(crate) service_tier: ServiceTier,
    pub(crate) store: bool,
    pub(crate) temperature: f64,
    pub(crate) text: ResponseText<'a>,
    pub(crate) tool_choice: &'a Value,
    pub(crate) tools: &'a Value,
    pub(crate) top_logprobs: usize,
    pub(crate) top_p: f64,
    #[schema(inline)]
    pub(crate) truncation: Truncation,
    /// Null until the response ends.
    #[schema(required)]
    pub(crate) usage: Option<ResponseUsage>,
    pub(crate) user: &'a Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResponseStatus {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseError {
    pub(crate) code: &'static str,
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct IncompleteDetails {
    pub(crate) reason: IncompleteReason,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum IncompleteReason {
    MaxOutputTokens,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseText<'a> {
    pub(crate) format: &'a Value,
    #[schema(inline)]
    pub(crate) verbosity: Verbosity,
}

/// Tokens that a response took.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct ResponseUsage {
    pub(crate) input_tokens: usize,
    pub(crate) input_tokens_details: PromptTokensDetails,
    pub(crate) output_tokens: usize,
    pub(crate) output_tokens_details: CompletionTokensDetails,
    pub(crate) total_tokens: usize,
}

/// A part of a conversation.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponseItem<'a> {
    Message {
        id: String,
        status: ResponseStatus,
        role: &'a str,
        content: Vec<ResponsePart<'a>>,
    },
    Reasoning {
        id: String,
        /// Not of an input.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        status: Option<ResponseStatus>,
        #[schema(inline)]
        summary: EmptyList,
        content: Vec<ResponsePart<'a>>,
    },
    FunctionCall {
        id: String,
        status: ResponseStatus,
        call_id: Cow<'a, str>,
        name: &'a str,
        /// JSON as text.
        arguments: Cow<'a, str>,
        /// Of a function of a namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        namespace: Option<&'a str>,
    },
    /// Only of an input.
    FunctionCallOutput {
        id: String,
        status: ResponseStatus,
        call_id: &'a str,
        output: &'a str,
    },
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ResponsePart<'a> {
    OutputText {
        text: &'a str,
        #[schema(inline)]
        annotations: EmptyList,
        /// Empty where they were not asked for; absent of an input.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        logprobs: Option<Vec<TokenLogprobs>>,
    },
    ReasoningText {
        text: &'a str,
    },
    InputText {
        text: &'a str,
    },
    InputImage {
        /// As it came.
        image_url: &'a str,
        detail: &'static str,
    },
}

/// A token and its likeliest rivals, as events of text have them.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventLogprobs {
    pub(crate) token: String,
    pub(crate) logprob: f64,
    pub(crate) top_logprobs: Vec<EventLogprob>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EventLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f64,
}

impl From<TokenLogprobs> for EventLogprobs {
    fn from(logprobs: TokenLogprobs) -> Self {
        let TokenLogprob { token, logprob, .. } = logprobs.chosen;
        let top = logprobs.top_logprobs.into_iter();
        let rival = |TokenLogprob { token, logprob, .. }| EventLogprob { token, logprob };
        Self {
            token,
            logprob,
            top_logprobs: top.map(rival).collect(),
        }
    }
}

/// A part of a response that is streamed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseEvent<'a> {
    #[serde(flatten)]
    pub(crate) change: ResponseChange<'a>,
    /// Counts from 0.
    pub(crate) sequence_number: u64,
}

/// What happened to a response.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
pub(crate) enum ResponseChange<'a> {
    #[serde(rename = "response.created")]
    Created { response: &'a Response<'a> },
    #[serde(rename = "response.in_progress")]
    InProgress { response: &'a Response<'a> },
    #[serde(rename = "response.completed")]
    Completed { response: &'a Response<'a> },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: &'a Response<'a> },
    #[serde(rename = "response.failed")]
    Failed { response: &'a Response<'a> },
    #[serde(rename = "response.output_item.added")]
    ItemAdded {
        output_index: usize,
        item: ResponseItem<'a>,
    },
    #[serde(rename = "response.output_item.done")]
    ItemDone {
        output_index: usize,
        item: ResponseItem<'a>,
    },
    #[serde(rename = "response.content_part.added")]
    PartAdded {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        part: ResponsePart<'a>,
    },
    #[serde(rename = "response.content_part.done")]
    PartDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        part: ResponsePart<'a>,
    },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
        logprobs: Vec<EventLogprobs>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        logprobs: Vec<EventLogprobs>,
    },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
    },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
    },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
    },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone {
        item_id: &'a str,
        output_index: usize,
        arguments: &'a str,
        name: &'a str,
    },
}

impl NamedEvent for ResponseEvent<'_> {
    fn name(&self) -> &'static str {
        match &self.change {
            ResponseChange::Created { .. } => "response.created",
            ResponseChange::InProgress { .. } => "response.in_progress",
            ResponseChange::Completed { .. } => "response.completed",
            ResponseChange::Incomplete { .. } => "response.incomplete",
            ResponseChange::Failed { .. } => "response.failed",
            ResponseChange::ItemAdded { .. } => "response.output_item.added",
            ResponseChange::ItemDone { .. } => "response.output_item.done",
            ResponseChange::PartAdded { .. } => "response.content_part.added",
            ResponseChange::PartDone { .. } => "response.content_part.done",
            ResponseChange::TextDelta { .. } => "response.output_text.delta",
            ResponseChange::TextDone { .. } => "response.output_text.done",
            ResponseChange::ReasoningDelta { .. } => "response.reasoning_text.delta",
            ResponseChange::ReasoningDone { .. } => "response.reasoning_text.done",
            ResponseChange::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            ResponseChange::ArgumentsDone { .. } => "response.function_call_arguments.done",
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseTokens {
    #[schema(inline)]
    pub(crate) object: InputTokensObject,
    pub(crate) input_tokens: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeletedResponse<'a> {
    pub(crate) id: &'a str,
    #[schema(inline)]
    pub(crate) object: ResponseObject,
    pub(crate) deleted: bool,
}

/// What a response answers, as items.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseItemList<'a> {
    #[schema(inline)]
    pub(crate) object: ListObject,
    #[schema(required)]
    pub(crate) first_id: Option<&'a str>,
    #[schema(required)]
    pub(crate) last_id: Option<&'a str>,
    pub(crate) has_more: bool,
    pub(crate) data: &'a [ResponseItem<'a>],
}

impl ResponseItem<'_> {
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Message { id, .. }
            | Self::Reasoning { id, .. }
            | Self::FunctionCall { id, .. }
            | Self::FunctionCallOutput { id, .. } => id,
        }
    }
}
