//! Conversations to prompts, by the template that comes with a model.
//!
//! A chat template is a program in Jinja, written and tested against Python: what it prints for a
//! float, a list or a missing key is Python's. The model was trained on exactly that text, so rendering is held to
//! transformers' output byte for byte. minijinja parses and runs templates; around it are what transformers
//! sets up (`trim_blocks`, `lstrip_blocks`, `loopcontrols`, `generation`, a `tojson` without HTML escapes,
//! `raise_exception`, `strftime_now`, the immutable sandbox), Python's values and operators, and a budget: a template
//! is hostile input, and every rendering has limits of time, memory, output and recursion. [`MAX_STEPS`] and its
//! neighbours are the limits; `compile.rs` says why they hold.

mod args;
mod budget;
mod clock;
mod compile;
mod error;
mod filters;
mod globals;
mod json;
mod load;
mod methods;
mod objects;
mod operators;
mod semantics;
mod value;

pub use budget::{MAX_DEPTH, MAX_OUTPUT_BYTES, MAX_STEPS, MAX_VALUE_BYTES};
pub use clock::strftime;
pub use error::TemplateError;

use budget::Stop;
use compile::Program;
use globals::Namespaces;
use minijinja::{Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};
use std::sync::Arc;
use std::thread;
use std::time::SystemTime;
use value::{Dict, List};

/// Stack of the thread that compiles or renders: both recurse as deep as their limits allow, whatever thread asks.
const STACK_BYTES: usize = 64 << 20;
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
    program: Arc<Program>,
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
            let program = with_stack(|| Program::compile(&source))
                .unwrap_or_else(|reason| Err(TemplateError::Syntax { line: 1, reason }))?;
            variants.push(Variant {
                name,
                source: source.into(),
                program: Arc::new(program),
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
    /// As in `render_jinja_template` of transformers: a null of a message is there and is null (callers
    /// with messages of the OpenAI API, where `"content": null` means none, remove such keys
    /// first), and reasoning given under another name is also `reasoning_content`.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TemplateError> {
        let variant = self.variant(input.template, input.tools.is_some())?;
        let rendered = with_stack(|| {
            let namespaces = Arc::new(Namespaces::default());
            let variables = self.variables(input, &namespaces)?;
            variant.program.render(&filters::ENVIRONMENT, variables)
        });
        match rendered {
            Ok(rendered) => rendered.map_err(|error| failure(&error)),
            Err(reason) => Err(TemplateError::Render { line: 1, reason }),
        }
    }

    fn variables(
        &self,
        input: &ChatInput<'_>,
        namespaces: &Arc<Namespaces>,
    ) -> Result<Value, Error> {
        let mut variables: Vec<(Value, Value)> = Vec::new();
        let now = input.now.unwrap_or_else(SystemTime::now);
        for (name, function) in globals::of_rendering(now, namespaces) {
            variables.push((name.into(), function));
        }
        for (name, text) in &self.specials {
            variables.push((name.as_str().into(), text.as_str().into()));
        }
        let messages = match input.messages {
            Json::Array(messages) => {
                let messages = messages.iter().map(message_value);
                List::value(messages.collect::<Result<_, _>>()?, false)?
            }
            other => from_json(other)?,
        };
        let tools = from_json(input.tools.unwrap_or(&Json::Null))?;
        for (name, value) in [
            ("messages", messages),
            ("tools", tools),
            ("documents", ().into()),
            ("add_generation_prompt", input.add_generation_prompt.into()),
        ] {
            variables.push((name.into(), value));
        }
        for (name, value) in &input.extra {
            variables.push((name.as_str().into(), from_json(value)?));
        }
        Dict::value(variables)
    }
}

/// Runs on a thread with a large stack. A failure there, of the system or of the engine, is an error here.
fn with_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work);
        let thread = thread.map_err(|error| format!("no thread for the template: {error}"))?;
        thread.join().map_err(|_| {
            "the template engine failed, which is a bug; please report it with the template".into()
        })
    })
}

/// What the engine's error means.
fn failure(error: &Error) -> TemplateError {
    let mut causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| {
        error.source()
    });
    if let Some(stop) = causes.find_map(|cause| cause.downcast_ref::<Stop>()) {
        return match stop.clone() {
            Stop::Raised(message) => TemplateError::Refused(message),
            Stop::Exhausted { what, limit } => TemplateError::Exhausted { what, limit },
        };
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::Exhausted {
            what: "time",
            limit: MAX_STEPS,
        };
    }
    let detail = error.detail().unwrap_or_default();
    if detail == "recursion limit exceeded" {
        return TemplateError::Exhausted {
            what: "recursion",
            limit: MAX_DEPTH.into(),
        };
    }
    let reason = match error.kind() {
        ErrorKind::UndefinedError => "a variable or key is used that is missing".to_owned(),
        ErrorKind::UnknownFunction => format!("no such function or macro: {detail}"),
        ErrorKind::UnknownMethod => format!("no such method: {detail}"),
        _ if detail.is_empty() => error.kind().to_string(),
        _ => detail.to_owned(),
    };
    let line = error
        .line()
        .and_then(|line| u32::try_from(line).ok())
        .unwrap_or(1);
    TemplateError::Render { line, reason }
}

/// A message as `render_jinja_template` of transformers hands it to a template.
fn message_value(message: &Json) -> Result<Value, Error> {
    let Json::Object(fields) = message else {
        return from_json(message);
    };
    let mut pairs = Vec::with_capacity(fields.len() + 2);
    let reasoning = REASONING
        .iter()
        .find_map(|name| fields.get(*name).filter(|v| !v.is_null()));
    if let Some(reasoning) = reasoning {
        pairs.push(("thinking".into(), from_json(reasoning)?));
    }
    for (name, value) in fields {
        pairs.push((name.as_str().into(), from_json(value)?));
    }
    if let Some(reasoning) = reasoning {
        pairs.push(("reasoning_content".into(), from_json(reasoning)?));
    }
    Dict::value(pairs)
}

fn from_json(value: &Json) -> Result<Value, Error> {
    Ok(match value {
        Json::Null => ().into(),
        Json::Bool(truth) => (*truth).into(),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => number.into(),
            (_, Some(number)) => number.into(),
            _ => number.as_f64().unwrap_or(f64::NAN).into(),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => List::value(
            items.iter().map(from_json).collect::<Result<_, _>>()?,
            false,
        )?,
        Json::Object(fields) => {
            let pairs = fields
                .iter()
                .map(|(name, value)| Ok((name.as_str().into(), from_json(value)?)));
            Dict::value(pairs.collect::<Result<Vec<_>, Error>>()?)?
        }
    })
}
