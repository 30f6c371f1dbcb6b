//! `ferrum template`: what a chat template makes of messages.

use crate::args::TemplateArgs;
use crate::failure::{Failure, Outcome};
use crate::open;
use crate::ui::show;
use ferrum_formats::chat_template::ChatInput;
use serde_json::Value;
use std::path::Path;

pub(crate) fn template(args: &TemplateArgs) -> Outcome {
    let template = open::template(args.model.as_deref())?;
    let messages = read_list(&args.messages, "messages")?;
    let tools = args
        .tools
        .as_deref()
        .map(|path| read_list(path, "tools"))
        .transpose()?;
    let text = template.render(&ChatInput {
        tools: tools.as_ref(),
        add_generation_prompt: !args.no_generation_prompt,
        ..ChatInput::new(&messages)
    })?;
    show(&text)
}

/// A JSON list, or an object that holds it under `key`, as in a request to a server.
fn read_list(path: &Path, key: &str) -> Outcome<Value> {
    let name = path.display();
    let value: Value = serde_json::from_str(&open::read_text(path)?)
        .map_err(|e| Failure::new(format!("{name} is not JSON: {e}")))?;
    let list = match value {
        Value::Object(mut object) => object.remove(key).unwrap_or(Value::Null),
        other => other,
    };
    match list {
        Value::Array(_) => Ok(list),
        _ => Err(Failure::new(format!(
            "{name}: expected a list, or an object with \"{key}\""
        ))),
    }
}
