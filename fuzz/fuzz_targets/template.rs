//! Chat templates: any text either is refused as a template or renders within its budget.
#![no_main]

use ferrum_formats::chat_template::{ChatInput, ChatTemplate, MAX_OUTPUT_BYTES};
use libfuzzer_sys::fuzz_target;
use serde_json::json;

fuzz_target!(|data: &[u8]| {
    let Ok(source) = std::str::from_utf8(data) else {
        return;
    };
    let specials = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let Ok(template) = ChatTemplate::from_source(source, specials) else {
        return;
    };
    let messages = json!([
        { "role": "system", "content": "Be <terse> & \"é\"" },
        { "role": "user", "content": [{ "type": "text", "text": " hi\n" }] },
        { "role": "assistant", "tool_calls": [
            { "function": { "name": "f", "arguments": { "x": 1.5, "y": null, "z": [true] } } },
        ] },
    ]);
    let tools = json!([{ "type": "function", "function": { "name": "f", "parameters": {} } }]);
    let input = ChatInput {
        tools: Some(&tools),
        ..ChatInput::new(&messages)
    };
    if let Ok(prompt) = template.render(&input) {
        assert!(prompt.len() as u64 <= MAX_OUTPUT_BYTES);
    }
});
