//! `/v1/messages` in Anthropic's form.

use super::{Anything, Content, Format, FunctionName, Limit, Messages, Object, StopList, Tools};
use serde::Deserialize;
use utoipa::ToSchema;

/// What a request for a message has beside [`Sampling`](super::Sampling) and [`Turns`].
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Messaging {
    pub(crate) max_tokens: Option<Limit>,
    pub(crate) stop_sequences: Option<StopList>,
    #[serde(rename = "metadata")]
    _metadata: Option<Anything>,
}

pub(crate) type TurnList = Messages<Turn>;
pub(crate) type BlockContent = Content<Block>;
pub(crate) type AnthropicTools = Tools<AnthropicTool>;

/// What makes the prompt of a message, and what form it has.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Turns {
    pub(crate) messages: Option<TurnList>,
    pub(crate) system: Option<BlockContent>,
    pub(crate) tools: Option<AnthropicTools>,
    pub(crate) tool_choice: Option<AnthropicChoice>,
    pub(crate) thinking: Option<Thinking>,
    pub(crate) output_config: Option<OutputConfig>,
    /// The older place of `output_config.format`.
    pub(crate) output_format: Option<Format>,
    /// What to drop from long conversations; nothing is dropped here.
    pub(crate) context_management: Option<Anything>,
    // The prefix cache keeps what it can without being asked.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Anything>,
    /// A conversation that the server keeps.
    pub(crate) thread: Option<Thread>,
}

/// Where a conversation is kept.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Thread {
    /// `continue`: the messages go on from those that the server has.
    pub(crate) r#type: Option<String>,
    #[serde(rename = "previous_message_id")]
    _previous_message_id: Option<Anything>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Speaker {
    User,
    Assistant,
    System,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Turn {
    pub(crate) role: Speaker,
    pub(crate) content: BlockContent,
}

/// A block of a message: which fields it has depends on its type.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
#[schema(no_recursion)]
pub(crate) struct Block {
    pub(crate) r#type: String,
    pub(crate) text: Option<String>,
    // Of tools' results.
    pub(crate) tool_use_id: Option<String>,
    pub(crate) content: Option<Box<BlockContent>>,
    pub(crate) is_error: Option<bool>,
    // Of calls.
    pub(crate) id: Option<String>,
    pub(crate) name: Option<FunctionName>,
    pub(crate) input: Option<Object>,
    // Of thoughts.
    pub(crate) thinking: Option<String>,
    // Of documents and search results.
    pub(crate) source: Option<Source>,
    pub(crate) title: Option<String>,
    pub(crate) context: Option<String>,
    // What comes back from an answer, and hints.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Anything>,
    #[serde(rename = "citations")]
    _citations: Option<Anything>,
    #[serde(rename = "signature")]
    _signature: Option<Anything>,
    #[serde(rename = "data")]
    _data: Option<Anything>,
    #[serde(rename = "caller")]
    _caller: Option<Anything>,
}

/// Where a document comes from: its text, or the address of a search result.
#[derive(Debug)]
pub(crate) enum Source {
    Name(String),
    Document(DocumentSource),
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct DocumentSource {
    pub(crate) r#type: Option<String>,
    pub(crate) data: Option<String>,
    pub(crate) content: Option<Box<BlockContent>>,
    pub(crate) media_type: Option<String>,
    pub(crate) url: Option<String>,
    #[serde(rename = "file_id")]
    _file_id: Option<Anything>,
}

impl<'de> Deserialize<'de> for Source {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct SourceVisitor;
        impl<'de> serde::de::Visitor<'de> for SourceVisitor {
            type Value = Source;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a string or an object")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Source, E> {
                Ok(Source::Name(name.to_owned()))
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<Source, A::Error> {
                let map = serde::de::value::MapAccessDeserializer::new(map);
                DocumentSource::deserialize(map).map(Source::Document)
            }
        }
        from.deserialize_any(SourceVisitor)
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct AnthropicTool {
    /// `custom`, or a tool that Anthropic's servers run.
    pub(crate) r#type: Option<String>,
    pub(crate) name: FunctionName,
    pub(crate) description: Option<String>,
    /// A JSON schema.
    pub(crate) input_schema: Option<Object>,
    pub(crate) strict: Option<bool>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Anything>,
    #[serde(rename = "eager_input_streaming")]
    _eager_input_streaming: Option<Anything>,
    #[serde(rename = "defer_loading")]
    _defer_loading: Option<Anything>,
    #[serde(rename = "input_examples")]
    _input_examples: Option<Anything>,
    #[serde(rename = "allowed_callers")]
    _allowed_callers: Option<Anything>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct AnthropicChoice {
    pub(crate) r#type: ChoiceKind,
    pub(crate) name: Option<FunctionName>,
    pub(crate) disable_parallel_tool_use: Option<bool>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ThinkingKind {
    Enabled,
    Disabled,
    Adaptive,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Thinking {
    pub(crate) r#type: ThinkingKind,
    /// A budget is a wish to Anthropic, too: thinking ends with `max_tokens` at the latest.
    #[serde(rename = "budget_tokens")]
    _budget_tokens: Option<Anything>,
    #[serde(rename = "display")]
    _display: Option<Anything>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct OutputConfig {
    pub(crate) effort: Option<String>,
    pub(crate) format: Option<Format>,
}
