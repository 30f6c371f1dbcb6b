//! `/v1/chat/completions` and what else has a conversation in OpenAI's form.

use super::{
    Alternatives, Anything, Arguments, Content, FunctionName, Limit, List, MAX_TOOLS, Messages,
    Natural, Object, Tools, Words,
};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt::{Formatter, Result as FmtResult};
use utoipa::ToSchema;

/// What a chat completion has beside [`Sampling`](super::Sampling), [`Choices`](super::Choices) and a
/// [`Conversation`].
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Chat {
    /// Most tokens of an answer; -1: as many as fit.
    pub(crate) max_completion_tokens: Option<Limit>,
    #[serde(alias = "n_predict")]
    pub(crate) max_tokens: Option<Limit>,
    pub(crate) logprobs: Option<bool>,
    pub(crate) top_logprobs: Option<Alternatives>,
    pub(crate) modalities: Option<Words>,
    pub(crate) tool_choice: Option<ToolChoice>,
    pub(crate) parallel_tool_calls: Option<bool>,
    /// How hard a model thinks, where its template knows how.
    pub(crate) reasoning_effort: Option<String>,
    /// The same as OpenRouter has it.
    pub(crate) reasoning: Option<Reasoning>,
    /// OpenAI's older form of tools, of which an answer calls one at most, and
    pub(crate) functions: Option<FunctionList>,
    /// that of `tool_choice`.
    pub(crate) function_call: Option<FunctionChoice>,
    /// Whether the last message is gone on with rather than answered.
    pub(crate) continue_final_message: Option<bool>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) store: Option<bool>,
}

/// How much a model thinks, and whether its thoughts are summarised.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Reasoning {
    pub(crate) effort: Option<String>,
    /// Thoughts come in the clear, which serves whatever summary is asked for.
    #[serde(rename = "summary")]
    _summary: Option<Anything>,
    #[serde(rename = "generate_summary")]
    _generate_summary: Option<Anything>,
}

/// Messages, tools and what else a template is given.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Conversation {
    pub(crate) messages: Option<MessageList>,
    pub(crate) tools: Option<ToolList>,
    /// Further variables for the chat template.
    pub(crate) chat_template_kwargs: Option<Object>,
    /// Whether special tokens that users and tools spell out are special; they are text otherwise.
    pub(crate) parse_special: Option<bool>,
}

pub(crate) type MessageList = Messages<Message>;
pub(crate) type ToolList = Tools<Tool>;
pub(crate) type FunctionList = Tools<Function>;
pub(crate) type PartContent = Content<Part>;
pub(crate) type ToolCalls = List<ToolCall, MAX_TOOLS>;

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    /// A tool in OpenAI's older form.
    Function,
}

impl Role {
    /// As templates know it, which have the older name only.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool | Self::Function => "tool",
        }
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Message {
    pub(crate) role: Role,
    pub(crate) content: Option<PartContent>,
    pub(crate) name: Option<String>,
    /// Of an assistant: the thoughts before the answer.
    pub(crate) reasoning_content: Option<String>,
    /// The same under another name.
    pub(crate) reasoning: Option<String>,
    /// Of an assistant: what it said instead of an answer.
    pub(crate) refusal: Option<String>,
    pub(crate) tool_calls: Option<ToolCalls>,
    /// Of a tool: the call that this is the result of.
    pub(crate) tool_call_id: Option<String>,
    // What clients send back with an answer.
    #[serde(rename = "annotations")]
    _annotations: Option<Anything>,
    #[serde(rename = "audio")]
    _audio: Option<Anything>,
    /// Of an assistant: its call in OpenAI's older form.
    pub(crate) function_call: Option<CalledFunction>,
    #[serde(rename = "reasoning_details")]
    _reasoning_details: Option<Anything>,
    #[serde(rename = "thinking_blocks")]
    _thinking_blocks: Option<Anything>,
    #[serde(rename = "provider_specific_fields")]
    _provider_specific_fields: Option<Anything>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Anything>,
}

/// A part of a message.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Part {
    pub(crate) r#type: String,
    pub(crate) text: Option<String>,
    pub(crate) refusal: Option<String>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Anything>,
    /// Of images: a data URL, or one that this server may fetch.
    pub(crate) image_url: Option<ImageUrl>,
    // Of parts that only other models read.
    #[serde(rename = "input_audio")]
    _input_audio: Option<Anything>,
    #[serde(rename = "file")]
    _file: Option<Anything>,
}

/// Where an image is: an address, or an object with one.
#[derive(Debug)]
pub(crate) struct ImageUrl(pub(crate) String);

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct ImageAddress {
    /// A data URL, or one that this server may fetch.
    pub(crate) url: String,
    /// All images are read in the size that the model has.
    #[serde(rename = "detail")]
    _detail: Option<Anything>,
}

impl<'de> Deserialize<'de> for ImageUrl {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct UrlVisitor;
        impl<'de> Visitor<'de> for UrlVisitor {
            type Value = ImageUrl;

            fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                f.write_str("a URL, or an object with one")
            }

            fn visit_str<E: de::Error>(self, url: &str) -> Result<ImageUrl, E> {
                Ok(ImageUrl(url.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ImageUrl, A::Error> {
                let map = MapAccessDeserializer::new(map);
                Ok(ImageUrl(ImageAddress::deserialize(map)?.url))
            }
        }
        from.deserialize_any(UrlVisitor)
    }
}

/// A call that was made.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct ToolCall {
    pub(crate) id: Option<String>,
    pub(crate) r#type: Option<String>,
    pub(crate) function: CalledFunction,
    #[serde(rename = "index")]
    _index: Option<Natural>,
    #[serde(rename = "provider_specific_fields")]
    _provider_specific_fields: Option<Anything>,
    #[serde(rename = "extra_content")]
    _extra_content: Option<Anything>,
}

impl ToolCall {
    /// A call of this name.
    pub(crate) fn new(id: String, function: CalledFunction) -> Self {
        Self {
            id: Some(id),
            r#type: None,
            function,
            _index: None,
            _provider_specific_fields: None,
            _extra_content: None,
        }
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct CalledFunction {
    pub(crate) name: FunctionName,
    pub(crate) arguments: Option<Arguments>,
    #[serde(rename = "provider_specific_fields")]
    _provider_specific_fields: Option<Anything>,
}

/// A tool that may be called.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Tool {
    pub(crate) r#type: Option<String>,
    pub(crate) function: Option<Function>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Anything>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct Function {
    pub(crate) name: FunctionName,
    pub(crate) description: Option<String>,
    /// A JSON schema.
    pub(crate) parameters: Option<Object>,
    /// Whether the arguments are held to the schema.
    pub(crate) strict: Option<bool>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<Anything>,
}

impl Function {
    /// A function that another API describes.
    pub(crate) fn new(
        name: FunctionName,
        description: Option<String>,
        parameters: Option<Object>,
        strict: Option<bool>,
    ) -> Self {
        Self {
            name,
            description,
            parameters,
            strict,
            _cache_control: None,
        }
    }
}

/// Whether and which tools are to be called: a word, or a function.
#[derive(Debug)]
pub(crate) enum ToolChoice {
    Word(String),
    Function(ChosenTool),
}

/// Whether and which of `functions` is to be called: a word, or a function.
#[derive(Debug)]
pub(crate) enum FunctionChoice {
    Word(String),
    Function(ChosenFunction),
}

/// A function in OpenAI's form on chat completions (`function.name`), or that on responses (`name`).
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct ChosenTool {
    pub(crate) r#type: Option<String>,
    pub(crate) function: Option<ChosenFunction>,
    pub(crate) name: Option<FunctionName>,
    /// Of `allowed_tools` on responses: how many of those in `tools` are called.
    pub(crate) mode: Option<String>,
    #[serde(rename = "tools")]
    _tools: Option<Anything>,
    /// The same on chat completions.
    pub(crate) allowed_tools: Option<AllowedTools>,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct AllowedTools {
    pub(crate) mode: Option<String>,
    #[serde(rename = "tools")]
    _tools: Option<Anything>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(expecting = "an object")]
pub(crate) struct ChosenFunction {
    pub(crate) name: FunctionName,
}

/// Choices that are a word or an object.
macro_rules! word_or_object {
    ($($choice:ident, $object:ty, $expected:literal, $($words:literal)|+;)*) => {$(
        impl<'de> Deserialize<'de> for $choice {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                struct ChoiceVisitor;
                impl<'de> Visitor<'de> for ChoiceVisitor {
                    type Value = $choice;

                    fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
                        f.write_str($expected)
                    }

                    fn visit_str<E: de::Error>(self, word: &str) -> Result<$choice, E> {
                        match word {
                            $($words)|+ => Ok($choice::Word(word.to_owned())),
                            _ => Err(E::invalid_value(Unexpected::Str(word), &self)),
                        }
                    }

                    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<$choice, A::Error> {
                        let map = MapAccessDeserializer::new(map);
                        <$object>::deserialize(map).map($choice::Function)
                    }
                }
                from.deserialize_any(ChoiceVisitor)
            }
        }
    )*};
}

word_or_object! {
    // "any" is "required" as Mistral's clients say it.
    ToolChoice, ChosenTool, "\"none\", \"auto\", \"required\" or a function", "none" | "auto" | "required" | "any";
    FunctionChoice, ChosenFunction, "\"none\", \"auto\" or a function", "none" | "auto";
}
