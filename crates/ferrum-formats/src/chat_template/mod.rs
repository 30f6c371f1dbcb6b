//! Conversations to prompts, by the template that comes with a model.
//!
//! A chat template is a program in Jinja, written and tested against Python: what it prints for a
//! float, a list or a missing key is Python's. The model was trained on exactly that text, so this
//! room implements the part of Jinja that templates use with Python's values, as transformers sets
//! it up (`trim_blocks`, `lstrip_blocks`, `loopcontrols`, a `tojson` without HTML escapes,
//! `raise_exception`, `strftime_now`, the immutable sandbox), and is held to transformers' output
//! byte for byte. An engine of our own rather than a general one, because equality with Python goes
//! down to operators and formatting, and because a template is hostile input: every rendering has
//! a budget of time, memory, output and recursion (see [`MAX_STEPS`] and its neighbours).

mod ast;
mod call;
mod checks;
mod clock;
mod error;
mod eval;
mod filters;
mod filters_seq;
mod format;
mod globals;
mod interp;
mod lexer;
mod load;
mod meter;
mod methods;
mod ops;
mod parser;
mod parser_expr;
mod text;
mod value;

pub use clock::strftime;
pub use error::TemplateError;
pub use meter::{MAX_DEPTH, MAX_OUTPUT_BYTES, MAX_STEPS, MAX_VALUE_BYTES};

use ast::Stmt;
use interp::Interp;
use meter::{Fault, Meter, Res};
use serde_json::{Map, Value as Json};
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;
use value::{Scope, Value};

/// The longest template that is read, in bytes.
pub const MAX_TEMPLATE_BYTES: usize = 1 << 20;

/// Names under which a message may carry its reasoning, the usual one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// What a template renders.
#[derive(Clone, Debug)]
pub struct ChatInput<'a> {
    /// A list of messages, each an object with `role` and what the template knows besides.
    pub messages: &'a Json,
    /// A list of tool descriptions.
    pub tools: Option<&'a Json>,
    /// End with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`.
    pub extra: Map<String, Json>,
    /// Which of a model's templates, where it has several; by default `tool_use` when there are
    /// tools and such a template, else `default`.
    pub template: Option<&'a str>,
    /// The time that `strftime_now` tells, in UTC; by default the clock's.
    pub now: Option<SystemTime>,
}

impl<'a> ChatInput<'a> {
    /// A conversation to be answered.
    pub fn new(messages: &'a Json) -> Self {
        ChatInput {
            messages,
            tools: None,
            add_generation_prompt: true,
            extra: Map::new(),
            template: None,
            now: None,
        }
    }
}

/// A model's chat template, or its several templates by name.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    variants: Vec<Variant>,
    /// Texts of special tokens, as variables: `bos_token` and the like.
    specials: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
struct Variant {
    name: String,
    source: Arc<str>,
    body: Arc<Vec<Stmt>>,
}

impl ChatTemplate {
    /// Parses a template. `specials` are variables with the texts of special tokens (`bos_token`,
    /// `eos_token`, …); those given twice take the last text.
    pub fn from_source<K: Into<String>, V: Into<String>>(
        source: &str,
        specials: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, TemplateError> {
        let specials = specials
            .into_iter()
            .map(|(name, text)| (name.into(), text.into()));
        Self::from_named(
            [("default".to_owned(), source.to_owned())],
            specials.collect(),
        )
    }

    fn from_named(
        sources: impl IntoIterator<Item = (String, String)>,
        specials: Vec<(String, String)>,
    ) -> Result<Self, TemplateError> {
        let mut variants = Vec::new();
        for (name, source) in sources {
            if source.len() > MAX_TEMPLATE_BYTES {
                let (found, limit) = (source.len(), MAX_TEMPLATE_BYTES);
                return Err(TemplateError::TooLarge { found, limit });
            }
            let body = Arc::new(parser::parse(lexer::tokenize(&source)?)?);
            variants.push(Variant {
                name,
                source: source.into(),
                body,
            });
        }
        Ok(ChatTemplate { variants, specials })
    }

    /// Names of the templates, `default` for an only one.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.variants.iter().map(|variant| &*variant.name)
    }

    /// The text of the template that would be used for a conversation with or without tools.
    pub fn source(&self, with_tools: bool) -> Option<&str> {
        self.variant(None, with_tools)
            .ok()
            .map(|variant| &*variant.source)
    }

    fn variant(&self, name: Option<&str>, tools: bool) -> Result<&Variant, TemplateError> {
        let find = |name: &str| self.variants.iter().find(|variant| variant.name == name);
        let found = match name {
            Some(name) => find(name),
            None => find("tool_use")
                .filter(|_| tools)
                .or_else(|| find("default")),
        };
        found.ok_or_else(|| TemplateError::NoSuchTemplate {
            name: name.unwrap_or("default").to_owned(),
            found: self.names().collect::<Vec<_>>().join(", "),
        })
    }

    /// The prompt for a conversation.
    ///
    /// As in `render_jinja_template` of transformers: a null of a message is there and is null (who
    /// takes messages of the OpenAI API, where `"content": null` means none, removes such keys
    /// first), and reasoning given under another name is also `reasoning_content`.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let variant = self.variant(input.template, input.tools.is_some())?;
        let interp = Interp::new(input.now.unwrap_or_else(SystemTime::now));
        let result = self
            .scope(input, &interp.meter)
            .and_then(|scope| interp.render(&variant.body, &scope));
        result.map_err(|fault| match fault {
            Fault::Raised(message) => TemplateError::Refused(message),
            Fault::Exhausted { what, limit } => TemplateError::Exhausted { what, limit },
            Fault::Error(reason) => TemplateError::Render {
                line: interp.line.get(),
                reason,
            },
        })
    }

    fn scope(&self, input: &ChatInput<'_>, meter: &Meter) -> Res<Rc<Scope>> {
        let scope = Rc::new(Scope::default());
        for (name, text) in &self.specials {
            scope.set(&name.as_str().into(), Value::str(text.as_str()));
        }
        let messages = match input.messages {
            Json::Array(messages) => {
                let messages = messages.iter().map(|message| message_value(message, meter));
                Value::list(meter, messages.collect::<Res<_>>()?)?
            }
            other => from_json(other, meter)?,
        };
        let tools = from_json(input.tools.unwrap_or(&Json::Null), meter)?;
        for (name, value) in [
            ("messages", messages),
            ("tools", tools),
            ("documents", Value::None),
            (
                "add_generation_prompt",
                Value::Bool(input.add_generation_prompt),
            ),
        ] {
            scope.set(&name.into(), value);
        }
        for (name, value) in &input.extra {
            scope.set(&name.as_str().into(), from_json(value, meter)?);
        }
        Ok(scope)
    }
}

/// A message as `render_jinja_template` of transformers hands it to a template.
fn message_value(message: &Json, meter: &Meter) -> Res<Value> {
    let Json::Object(fields) = message else {
        return from_json(message, meter);
    };
    let mut pairs = Vec::with_capacity(fields.len() + 2);
    let reasoning = REASONING
        .iter()
        .find_map(|name| fields.get(*name).filter(|v| !v.is_null()));
    if let Some(reasoning) = reasoning {
        pairs.push((Value::str("thinking"), from_json(reasoning, meter)?));
    }
    for (name, value) in fields {
        pairs.push((Value::str(name.as_str()), from_json(value, meter)?));
    }
    if let Some(reasoning) = reasoning {
        pairs.push((
            Value::str("reasoning_content"),
            from_json(reasoning, meter)?,
        ));
    }
    Value::dict(meter, pairs)
}

fn from_json(value: &Json, meter: &Meter) -> Res<Value> {
    meter.nested(|| {
        Ok(match value {
            Json::Null => Value::None,
            Json::Bool(truth) => Value::Bool(*truth),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(number), _) => Value::Int(i128::from(number)),
                (_, Some(number)) => Value::Int(i128::from(number)),
                _ => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::text(meter, text.as_str())?,
            Json::Array(items) => {
                let items = items.iter().map(|item| from_json(item, meter));
                Value::list(meter, items.collect::<Res<_>>()?)?
            }
            Json::Object(fields) => {
                let pairs = fields
                    .iter()
                    .map(|(name, value)| Ok((Value::str(name.as_str()), from_json(value, meter)?)));
                Value::dict(meter, pairs.collect::<Res<_>>()?)?
            }
        })
    })
}
