//! `/v1/responses`: OpenAI's items.

use super::{
    Alternatives, Anything, Arguments, Content, Format, FunctionName, ImageUrl, Limit, List,
    MAX_MESSAGES, MAX_PARTS, Natural, Object, Reasoning, Role, StreamOptions, ToolChoice, Tools,
    Words,
};
use serde::Deserialize;
use utoipa::ToSchema;

/// What a request for a response has beside [`Sampling`](super::Sampling).
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
#[schema(as = Respond)]
pub(crate) struct ResponsesRequest {
    pub(crate) input: Option<Input>,
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<Limit>,
    pub(crate) previous_response_id: Option<String>,
    /// Whether the response is kept, so that a later one goes on from it.
    pub(crate) store: Option<bool>,
    pub(crate) tools: Option<ResponseTools>,
    pub(crate) tool_choice: Option<ToolChoice>,
    pub(crate) parallel_tool_calls: Option<bool>,
    pub(crate) reasoning: Option<Reasoning>,
    pub(crate) text: Option<TextForm>,
    pub(crate) include: Option<Words>,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) background: Option<bool>,
    pub(crate) truncation: Option<String>,
    /// Likeliest rivals of each token, where `include` asks for log-probabilities.
    pub(crate) top_logprobs: Option<Alternatives>,
    pub(crate) max_tool_calls: Option<Natural>,
    /// Conversations and prompts that OpenAI's servers keep.
    pub(crate) conversation: Option<Anything>,
    pub(crate) prompt: Option<Anything>,
    #[serde(rename = "metadata")]
    _metadata: Option<Anything>,
    #[serde(rename = "client_metadata")]
    _client_metadata: Option<Anything>,
}

pub(crate) type ItemContent = Content<ItemPart>;
pub(crate) type ItemParts = List<ItemPart, MAX_PARTS>;
pub(crate) type ResponseTools = Tools<ResponseTool>;
pub(crate) type NamespacedTools = Tools<NamespacedTool>;
/// A text, or items: as many as a conversation has messages.
pub(crate) type Input = Content<Item, MAX_MESSAGES>;

/// A message, a thought, a call or its result: which fields it has depends on its type.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Item {
    pub(crate) r#type: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) role: Option<Role>,
    pub(crate) content: Option<ItemContent>,
    // Of thoughts.
    pub(crate) summary: Option<ItemParts>,
    // Of calls and their results.
    pub(crate) call_id: Option<String>,
    pub(crate) name: Option<FunctionName>,
    pub(crate) arguments: Option<Arguments>,
    pub(crate) output: Option<ItemContent>,
    // What comes back from an answer.
    #[serde(rename = "status")]
    _status: Option<Anything>,
    #[serde(rename = "phase")]
    _phase: Option<Anything>,
    #[serde(rename = "encrypted_content")]
    _encrypted_content: Option<Anything>,
    #[serde(rename = "namespace")]
    _namespace: Option<Anything>,
    #[serde(rename = "internal_chat_message_metadata_passthrough")]
    _passthrough: Option<Anything>,
}

/// A part of an item's text.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct ItemPart {
    pub(crate) r#type: String,
    pub(crate) text: Option<String>,
    pub(crate) refusal: Option<String>,
    #[serde(rename = "annotations")]
    _annotations: Option<Anything>,
    #[serde(rename = "logprobs")]
    _logprobs: Option<Anything>,
    /// Of images: a data URL, or one that this server may fetch.
    pub(crate) image_url: Option<ImageUrl>,
    // Of parts that only other models read.
    #[serde(rename = "file_id")]
    _file_id: Option<Anything>,
    #[serde(rename = "detail")]
    _detail: Option<Anything>,
}

/// A function, a namespace of functions, or a tool that OpenAI's servers or clients run.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct ResponseTool {
    pub(crate) r#type: Option<String>,
    pub(crate) name: Option<FunctionName>,
    pub(crate) description: Option<String>,
    /// A JSON schema.
    pub(crate) parameters: Option<Object>,
    pub(crate) strict: Option<bool>,
    /// Of a namespace.
    pub(crate) tools: Option<NamespacedTools>,
    // Of tools that are dropped as a whole.
    #[serde(rename = "format")]
    _format: Option<Anything>,
    #[serde(rename = "defer_loading")]
    _defer_loading: Option<Anything>,
    #[serde(rename = "external_web_access")]
    _external_web_access: Option<Anything>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct NamespacedTool {
    pub(crate) r#type: Option<String>,
    pub(crate) name: FunctionName,
    pub(crate) description: Option<String>,
    pub(crate) parameters: Option<Object>,
    pub(crate) strict: Option<bool>,
    #[serde(rename = "defer_loading")]
    _defer_loading: Option<Anything>,
}

/// The form of the answer.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct TextForm {
    pub(crate) format: Option<Format>,
    /// Any is accepted: it is a wish.
    pub(crate) verbosity: Option<String>,
}
