//! Conversations fitted to what a chat template takes.
//!
//! Agents send system messages in the middle of a conversation and several messages of the user in a row. Some
//! templates write them where they are, some refuse the conversation, and some leave them out in silence. What a template
//! does is found by rendering probes; what it does not take joins a message beside it, so the model reads it in any case.

use crate::prompt::parts::text_part;
use serde_json::{Value, json};

/// Between texts that become one message.
const BETWEEN: &str = "\n\n";

/// A text that stands in no template.
const PROBE: &str = "ferrum-probe-7f3a";

/// What a template takes beside one system message at the beginning and turns that alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TemplateLimits {
    /// A second system message: at the beginning and later.
    more_systems: bool,
    /// Messages of the user one after the other.
    repeated_users: bool,
}

impl TemplateLimits {
    /// Tries what a template does; `render` gives nothing where it refuses.
    pub(crate) fn probe(render: impl Fn(&Value) -> Option<String>) -> Self {
        let user = json!({"role": "user", "content": "a"});
        let system = json!({"role": "system", "content": "b"});
        let keeps = |role: &str, before: &[&Value], after: &[&Value]| {
            let probe = json!({"role": role, "content": PROBE});
            let messages = before
                .iter()
                .copied()
                .chain([&probe])
                .chain(after.iter().copied());
            let messages = Value::Array(messages.cloned().collect());
            render(&messages).is_some_and(|text| text.contains(PROBE))
        };
        Self {
            more_systems: keeps("system", &[&system], &[&user])
                && keeps("system", &[&system, &user], &[]),
            repeated_users: keeps("user", &[], &[&user]),
        }
    }

    /// Joins what the template does not take with messages beside it.
    pub(crate) fn fit(self, messages: &mut Vec<Value>) {
        if self.more_systems && self.repeated_users {
            return;
        }
        let mut fitted: Vec<Value> = Vec::with_capacity(messages.len());
        for mut message in messages.drain(..) {
            let last = fitted.last().map(|last| last["role"].clone());
            let last = last.as_ref().and_then(Value::as_str);
            let joins = match (message["role"].as_str(), last) {
                (Some("system"), None) => false,
                (Some("system"), Some("system" | "user" | "tool")) => !self.more_systems,
                (Some("system"), Some(_)) if !self.more_systems => {
                    message["role"] = "user".into();
                    false
                }
                (Some("user"), Some("user")) => !self.repeated_users,
                _ => false,
            };
            match fitted.last_mut().filter(|_| joins) {
                Some(last) if last["content"].is_string() && message["content"].is_string() => {
                    let texts = [&last["content"], &message["content"]];
                    let texts = texts.map(|text| text.as_str().unwrap_or_default());
                    last["content"] = texts.join(BETWEEN).into();
                }
                Some(last) => {
                    // One of them has images.
                    let mut parts = parts_of(last["content"].take());
                    parts.extend(parts_of(message["content"].take()));
                    last["content"] = parts.into();
                }
                _ => fitted.push(message),
            }
        }
        *messages = fitted;
    }
}

/// What a message says, as parts.
fn parts_of(content: Value) -> Vec<Value> {
    match content {
        Value::Array(parts) => parts,
        Value::String(text) => vec![text_part(&text)],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_formats::chat_template::{ChatInput, ChatTemplate};

    /// Writes every message where it is.
    const FREE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    /// As templates of gpt-oss: one system message at the beginning, others are left out.
    const SILENT: &str = "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";
    /// As templates of Mistral's: one system message at the beginning, then turns that alternate.
    const STRICT: &str = "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}<system>{{ messages[0].content }}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'system' or (m.role != 'tool' and not m.tool_calls and (m.role == 'user') != (loop.index0 % 2 == 0)) %}{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";

    fn rendered(source: &str, messages: &[(&str, &str)]) -> Option<String> {
        let template = ChatTemplate::from_source(source, [("", ""); 0]).unwrap();
        let render = |messages: &Value| template.render(&ChatInput::new(messages)).ok();
        let mut messages: Vec<_> = messages
            .iter()
            .map(|(role, content)| json!({"role": role, "content": content}))
            .collect();
        TemplateLimits::probe(render).fit(&mut messages);
        render(&Value::Array(messages))
    }

    #[test]
    fn every_message_is_read_whatever_the_template_takes() {
        // As Claude Code and Codex begin.
        let claude = [
            ("system", "A"),
            ("user", "B"),
            ("system", "C"),
            ("assistant", "D"),
            ("system", "E"),
        ];
        let codex = [
            ("system", "A"),
            ("system", "B"),
            ("user", "C"),
            ("user", "D"),
        ];
        let result = [
            ("user", "A"),
            ("assistant", "B"),
            ("tool", "C"),
            ("system", "D"),
        ];
        let cases = [
            (
                FREE,
                &claude[..],
                "<system>A<user>B<system>C<assistant>D<system>E",
            ),
            (FREE, &codex[..], "<system>A<system>B<user>C<user>D"),
            (
                SILENT,
                &claude[..],
                "<system>A<user>B\n\nC<assistant>D<user>E",
            ),
            (SILENT, &codex[..], "<system>A\n\nB<user>C<user>D"),
            (SILENT, &result[..], "<user>A<assistant>B<tool>C\n\nD"),
            (
                STRICT,
                &claude[..],
                "<system>A<user>B\n\nC<assistant>D<user>E",
            ),
            (STRICT, &codex[..], "<system>A\n\nB<user>C\n\nD"),
        ];
        for (source, messages, expected) in cases {
            assert_eq!(rendered(source, messages).as_deref(), Some(expected));
        }
    }

    #[test]
    fn messages_of_parts_join_their_parts() {
        let limits = TemplateLimits {
            more_systems: false,
            repeated_users: false,
        };
        let image = json!({"type": "image"});
        let text = |text: &str| json!({"type": "text", "text": text});
        let mut messages = vec![
            json!({"role": "user", "content": [text("a"), image]}),
            json!({"role": "user", "content": "b"}),
            json!({"role": "user", "content": [image]}),
        ];
        limits.fit(&mut messages);
        let parts = [text("a"), image.clone(), text("b"), image];
        assert_eq!(messages, [json!({"role": "user", "content": parts})]);
    }
}
