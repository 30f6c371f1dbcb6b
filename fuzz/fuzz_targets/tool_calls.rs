//! What models write, with calls of tools in every format: nothing panics, it does not matter where chunks end, and
//! arguments are objects.
#![no_main]

use ferrum_server::fuzzing::{AnswerFormat, ParsedOutput};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use std::sync::LazyLock;

const MAX_CALLS: usize = 3;

static FORMATS: LazyLock<Vec<AnswerFormat>> = LazyLock::new(|| {
    let all = json!({
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "n": {"type": "integer"},
            "o": {"$ref": "#/$defs/o"},
            "b": {"type": "boolean"},
            "m": {"type": ["string", "null"]},
            "e": {"enum": ["x", "y"]},
        },
        "required": ["a"],
        "$defs": {"o": {"type": "object"}},
    });
    let none = json!({"type": "object", "properties": {}});
    AnswerFormat::all(&[("f", all), ("g", none)], MAX_CALLS)
});

/// Chunks of so many bytes, or one or two more where that would split a character.
fn chunks(text: &str, bytes: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let (chunk, after) = rest.split_at(rest.ceil_char_boundary(bytes.min(rest.len())));
        rest = after;
        (!chunk.is_empty()).then_some(chunk)
    })
}

fn check(answer: &ParsedOutput, text: &str) {
    assert!(answer.calls.len() <= MAX_CALLS, "{text:?}");
    for (_, arguments) in &answer.calls {
        // Numbers are not bounded in JSON, and nesting has its limit in the reader here.
        match serde_json::from_str::<Value>(arguments) {
            Ok(value) => assert!(value.is_object(), "{text:?}: {arguments:?}"),
            Err(e) => {
                let e = e.to_string();
                let bound = e.contains("number out of range") || e.contains("recursion limit");
                assert!(bound, "{text:?}: {arguments:?}: {e}");
            }
        }
    }
    // Marks and other forms of the same values are short.
    let calls = answer
        .calls
        .iter()
        .map(|(name, arguments)| name.len() + arguments.len());
    let said = answer.content.len() + answer.reasoning.len() + calls.sum::<usize>();
    assert!(said <= 8 * text.len() + 64, "{text:?}: {answer:?}");
}

// The format, the length of chunks, and the text.
fuzz_target!(|data: &[u8]| {
    let [format, length, text @ ..] = data else {
        return;
    };
    let Ok(text) = std::str::from_utf8(text) else {
        return;
    };
    let format = &FORMATS[usize::from(*format) % FORMATS.len()];
    let whole = format.parse([text], false);
    check(&whole, text);
    assert_eq!(
        format.parse(chunks(text, usize::from(*length).max(1)), false),
        whole
    );
    assert_eq!(format.parse(chunks(text, 1), false), whole);
    // An answer that was cut off is the same but for ends of arguments that are missing.
    let cut = format.parse([text], true);
    assert_eq!(format.parse(chunks(text, 1), true), cut);
    assert_eq!(
        (cut.content, cut.reasoning),
        (whole.content, whole.reasoning)
    );
});
