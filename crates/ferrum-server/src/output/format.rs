//! Which ways to write calls there are, and which of them a chat template speaks of.

use super::definition::FormatDefinition;
use super::function::Function;
use super::grammar::{CallGrammar, Markers, marker_regex};
use super::{
    deepseek, glm, granite, harmony, hermes, kimi, llama, mistral, mistral_args, phi, pythonic,
    qwen_coder,
};
use ferrum_engine::grammar::{Grammar, lark_token};
use std::str::FromStr;

/// A way to write calls of tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallFormat {
    /// Of Hermes, Qwen, Granite 4 and the demo model: an object between tags.
    #[default]
    Hermes,
    /// Of Qwen3-Coder: tags for the function and for each argument.
    QwenCoder,
    /// Of Llama 3: an object by itself.
    Llama,
    /// Of Llama 3.2 and Llama 4: a list of calls in Python.
    Pythonic,
    /// Of Mistral's models: an array of objects after a marker.
    Mistral,
    /// Of Mistral's newer models: after a marker the name, after another the arguments.
    MistralArgs,
    /// Of DeepSeek V3 and R1: names and fenced JSON between markers.
    DeepseekV3,
    /// Of DeepSeek V3.1: names and JSON between markers.
    DeepseekV31,
    /// Of gpt-oss: messages in channels, some of them calls.
    Harmony,
    /// Of GLM 4.5: a name, and tags for each argument.
    Glm,
    /// Of Kimi K2: numbered names and JSON between markers.
    Kimi,
    /// Of Granite 3: an array of objects after a marker.
    Granite,
    /// Of Phi-4-mini: an array of objects between markers.
    Phi,
}

/// Every format. A template has the first of which it speaks: markers of one may be a part of another's.
const FORMATS: [(CallFormat, FormatDefinition); 13] = [
    (CallFormat::Harmony, harmony::DEFINITION),
    (CallFormat::Kimi, kimi::DEFINITION),
    (CallFormat::DeepseekV3, deepseek::DEFINITION),
    (CallFormat::DeepseekV31, deepseek::DEFINITION_V31),
    (CallFormat::Glm, glm::DEFINITION),
    (CallFormat::QwenCoder, qwen_coder::DEFINITION),
    (CallFormat::Phi, phi::DEFINITION),
    (CallFormat::Granite, granite::DEFINITION),
    (CallFormat::Hermes, hermes::DEFINITION),
    (CallFormat::MistralArgs, mistral_args::DEFINITION),
    (CallFormat::Mistral, mistral::DEFINITION),
    (CallFormat::Pythonic, pythonic::DEFINITION),
    (CallFormat::Llama, llama::DEFINITION),
];

impl FromStr for CallFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = FORMATS
            .iter()
            .find(|(_, definition)| definition.name == name);
        found.map(|(format, _)| *format).ok_or_else(|| {
            let names: Vec<_> = FORMATS
                .iter()
                .map(|(_, definition)| definition.name)
                .collect();
            format!("expected one of {}", names.join(", "))
        })
    }
}

impl CallFormat {
    /// All of them.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().map(|(format, _)| *format)
    }

    /// The form of which a chat template speaks.
    pub(crate) fn of_template(source: &str) -> Option<Self> {
        let says = |texts: &&[&str]| texts.iter().all(|text| source.contains(text));
        let found = FORMATS
            .iter()
            .find(|(_, definition)| definition.template.iter().any(says));
        found.map(|(format, _)| *format)
    }

    pub(super) fn definition(self) -> &'static FormatDefinition {
        let found = FORMATS.iter().find(|(format, _)| *format == self);
        found.map_or(&hermes::DEFINITION, |(_, definition)| definition)
    }

    /// Everything that some vocabularies write as a special token.
    pub(crate) fn markers(self) -> &'static [&'static str] {
        self.definition().markers
    }

    /// Whether an answer is messages in channels, reasoning and content included.
    pub(crate) fn has_channels(self) -> bool {
        self == CallFormat::Harmony
    }

    /// A name for a call. Mistral's templates take no other than these.
    pub(crate) fn call_id(self) -> String {
        let id = crate::ids::fresh_id("call_");
        match self {
            CallFormat::Mistral | CallFormat::MistralArgs => id.chars().rev().take(9).collect(),
            _ => id,
        }
    }

    /// The rule `calls`: one call of the functions, or several where the model writes several. With `free` also
    /// the rule `free`: text in which calls are calls of the functions. And the grammars that they name.
    pub(crate) fn calls(
        self,
        functions: &[Function],
        markers: &Markers<'_>,
        parallel: bool,
        must_call: bool,
        free: bool,
    ) -> (String, Vec<(String, Grammar)>) {
        let mut grammar = CallGrammar {
            functions,
            markers,
            parallel,
            must_call,
            parts: Vec::new(),
        };
        let rules = (self.definition().rules)(&mut grammar);
        let mut text = rules.calls;
        if free {
            text += &rules.free.unwrap_or_else(|| self.free(markers));
        }
        (text, grammar.parts)
    }

    fn free(self, markers: &Markers<'_>) -> String {
        let definition = self.definition();
        if let Some(bare) = definition.bare {
            // Text that begins like a call has to be one.
            return format!("free: calls | FREE\nFREE: /(\\s*[^\\{bare}\\s](?s:.*))?/\n");
        }
        let open = definition.openers.first().copied().unwrap_or_default();
        match markers.token(open) {
            Some(token) => {
                let token = lark_token(token);
                format!("free: (FREE {token} call)* FREE\nFREE: /(?s:.*)/\n")
            }
            None => {
                let open = marker_regex(open);
                format!(
                    "free: (opened call)* FREE\nopened[lazy]: /(?s:.*){open}/\nFREE: /(?s:.*)/\n"
                )
            }
        }
    }

    /// What may come before an answer of a form in another channel, and what stands before the answer itself,
    /// with their rules.
    pub(crate) fn channels(self, markers: &Markers<'_>) -> Option<(String, String, String)> {
        self.has_channels().then(|| {
            let (thought, rules) = harmony::thought(markers);
            (thought, harmony::final_mark(markers), rules)
        })
    }

    /// What stands between the prompt and a text of the client's that the answer goes on from.
    pub(crate) fn before_prefill(self) -> &'static str {
        match self.has_channels() {
            true => harmony::FINAL,
            false => "",
        }
    }
}
