//! `ferrum template`: what a chat template makes of messages.

use crate::args::TemplateArgs;
use crate::failure::{Failure, Outcome};
use crate::input;
use crate::load_model;
use crate::ui::show;
use ferrum_formats::chat_template::ChatInput;
use serde_json::Value;
use std::path::Path;

pub(crate) fn template(args: &TemplateArgs) -> Outcome {
    let special = [
        ("bos_token", &args.bos_token),
        ("eos_token", &args.eos_token),
    ];
    let special = special
        .into_iter()
        .filter_map(|(name, text)| Some((name, text.clone()?)));
    let template = load_model::template(args.model.path(), &args.hub, special)?;
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
    });
    let name = args.model.path().map(|path| path.display().to_string());
    let name = name.unwrap_or_else(|| "the demo model".into());
    show(&text.map_err(|e| Failure::new(format!("{name}: {e}")))?)
}

/// A JSON list, or an object that holds it under `key`, as in a request to a server.
fn read_list(path: &Path, key: &str) -> Outcome<Value> {
    let name = path.display();
    let value: Value = serde_json::from_str(&input::read_json_text(path)?)
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
