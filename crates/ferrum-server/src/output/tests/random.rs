//! Random texts made of markers and of what is between them: nothing panics, nothing is lost, and it does not
//! matter where pieces end.

use super::*;
use proptest::prelude::*;
use proptest::sample::select;

/// Markers of all formats, and pieces of what they write.
fn fragments() -> Vec<&'static str> {
    let mut all: Vec<_> = CallFormat::all()
        .flat_map(|f| f.definition().markers)
        .copied()
        .collect();
    all.sort_unstable();
    all.dedup();
    all.extend([
        "<think>",
        "</think>",
        "{\"name\"",
        ": \"f\"",
        "{\"name\": \"f\"",
        ", \"arguments\": ",
        "\"parameters\": ",
        "{\"a\": 1}",
        "}",
        "\\",
        " ",
        "\n",
        // White space of Unicode, but not of JSON.
        "\u{c}",
        "é",
        "<",
        "{",
        "</",
        "[",
        "]",
        ", ",
        ";",
        "f",
        "g()",
        "(",
        ")",
        "=",
        "[{\"name\": \"f\", \"arguments\": {}}",
        "{\"name\": \"f\", \"parameters\": {}}",
        "<function=f>",
        "<parameter=a>",
        "<parameter=n>",
        "</parameter>",
        "</function>",
        "functools",
        "[f(a=1",
        "[f(a='x', b=[True])",
        "function",
        "```json",
        "```",
        "functions.f:0",
        "commentary to=functions.f ",
        "analysis",
        "final",
        "assistant",
        "json",
        "<arg_key>a</arg_key>",
        "5",
    ]);
    all
}

/// Words that occur nowhere else.
const WORDS: [&str; 3] = ["Wone", "Wtwo", "Wthree"];

fn pieces(text: &str, cuts: Vec<usize>) -> Vec<&str> {
    let mut cuts: Vec<_> = cuts
        .into_iter()
        .filter(|&c| c < text.len() && text.is_char_boundary(c))
        .collect();
    cuts.sort_unstable();
    let mut pieces = Vec::new();
    let mut from = 0;
    for cut in cuts.into_iter().chain([text.len()]) {
        pieces.push(&text[from..cut]);
        from = cut;
    }
    pieces
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn pieces_do_not_matter(
        format in select(CallFormat::all().collect::<Vec<_>>()),
        parts in prop::collection::vec(
            prop_oneof![8 => select(fragments()), 1 => select(vec!["\"", "{\"name\": \"", "\"id\": \"x\""])],
            0..14,
        ),
        cuts in prop::collection::vec(0usize..200, 0..8),
    ) {
        let text = parts.concat();
        let whole = parse(&output_format(format), [text.as_str()]);
        for (_, arguments) in &whole.calls {
            let value: Value = serde_json::from_str(arguments).unwrap_or_default();
            prop_assert!(value.is_object(), "{}: {}", text, arguments);
        }
        prop_assert_eq!(&parse(&output_format(format), pieces(&text, cuts)), &whole);
        let characters = text.split_inclusive(|_: char| true);
        prop_assert_eq!(parse(&output_format(format), characters), whole);
    }

    #[test]
    fn no_text_is_lost(
        format in select(CallFormat::all().collect::<Vec<_>>()),
        parts in prop::collection::vec(
            prop_oneof![3 => select(fragments()), 1 => select(&WORDS[..])],
            0..14,
        ),
    ) {
        let text = parts.concat();
        let whole = parse(&output_format(format), [text.as_str()]);
        let said = format!("{} {} {:?}", whole.content, whole.reasoning, whole.calls);
        for word in WORDS {
            prop_assert_eq!(
                said.matches(word).count(), text.matches(word).count(),
                "{} of {:?}: {:?}", word, text, whole
            );
        }
        if whole.calls.is_empty() && format != CallFormat::Harmony {
            let squeezed = |text: &str| text.split_whitespace().collect::<String>();
            let said = squeezed(&(whole.reasoning + &whole.content));
            let thought = text.trim_start().strip_prefix("<think>");
            let expected = match thought {
                None => text,
                Some(rest) => rest.replacen("</think>", "", 1),
            };
            prop_assert_eq!(said, squeezed(&expected));
        }
    }
}
