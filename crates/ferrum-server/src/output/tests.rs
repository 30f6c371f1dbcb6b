use super::*;
use proptest::prelude::*;

const BOTH: Looks = Looks {
    reasoning: true,
    begins_thinking: false,
    max_calls: 8,
};

/// What all deltas come to.
#[derive(Debug, Default, PartialEq)]
struct Whole {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
}

fn parse<'a>(looks: Looks, pieces: impl IntoIterator<Item = &'a str>) -> Whole {
    let mut parser = OutputParser::new(looks);
    let mut deltas = Vec::new();
    for piece in pieces {
        deltas.extend(parser.push(piece));
    }
    deltas.extend(parser.finish());
    let mut whole = Whole::default();
    for delta in deltas {
        match delta {
            Delta::Content(text) => whole.content += &text,
            Delta::Reasoning(text) => whole.reasoning += &text,
            Delta::CallBegins(index, name) => {
                assert_eq!(index, whole.calls.len());
                whole.calls.push((name, String::new()));
            }
            Delta::CallArguments(index, text) => {
                assert_eq!(index + 1, whole.calls.len());
                whole.calls[index].1 += &text;
            }
        }
    }
    whole
}

struct Case {
    text: &'static str,
    content: &'static str,
    reasoning: &'static str,
    calls: &'static [(&'static str, &'static str)],
}

const fn plain(text: &'static str) -> Case {
    Case {
        text,
        content: text,
        reasoning: "",
        calls: &[],
    }
}

const CASES: &[Case] = &[
    plain("  A plain answer, < than nothing.\n"),
    plain(""),
    plain("é <tool_cal"),
    plain("no <think>later</think>"),
    plain("<tool_call>\nnot JSON\n</tool_call> and on"),
    plain("<tool_call>\n{\"name\": \"f"),
    Case {
        text: "\n<think>\nWell…\n</think>\n\nYes.",
        content: "Yes.",
        reasoning: "Well…",
        calls: &[],
    },
    Case {
        text: "<think>never ends",
        content: "",
        reasoning: "never ends",
        calls: &[],
    },
    Case {
        text: "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}<\\\"</tool_call>\", \"b\": [1, {}]}}\n</tool_call>",
        content: "",
        reasoning: "",
        calls: &[("f", "{\"a\": \"}<\\\"</tool_call>\", \"b\": [1, {}]}")],
    },
    Case {
        text: "Let me see. \n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>{\"arguments\":{\"é\":1},\"name\":\"g\"}</tool_call>\n",
        content: "Let me see.",
        reasoning: "",
        calls: &[("f", "{}"), ("g", "{\"é\":1}")],
    },
    Case {
        text: "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\": </tool_call>done",
        content: "done",
        reasoning: "",
        calls: &[("f", "{\"a\": ")],
    },
    Case {
        text: "<tool_call>{\"arguments\": \"{}\", \"name\": \"f\"}",
        content: "",
        reasoning: "",
        calls: &[("f", "{}")],
    },
];

fn expected(case: &Case) -> Whole {
    let call = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
    Whole {
        content: case.content.into(),
        reasoning: case.reasoning.into(),
        calls: case.calls.iter().map(call).collect(),
    }
}

#[test]
fn the_parts_are_told_apart() {
    for case in CASES {
        assert_eq!(parse(BOTH, [case.text]), expected(case), "{}", case.text);
    }
}

#[test]
fn it_does_not_matter_where_pieces_end() {
    for case in CASES {
        let whole = parse(BOTH, [case.text]);
        for cut in (0..case.text.len()).filter(|&at| case.text.is_char_boundary(at)) {
            let (left, right) = case.text.split_at(cut);
            assert_eq!(parse(BOTH, [left, right]), whole, "{left:?} {right:?}");
        }
        let characters = case.text.split_inclusive(|_: char| true);
        assert_eq!(parse(BOTH, characters), whole, "{}", case.text);
    }
}

#[test]
fn reasoning_may_begin_in_the_prompt() {
    let looks = Looks {
        begins_thinking: true,
        ..BOTH
    };
    let whole = parse(looks, ["\nHm.</think>", " Yes."]);
    assert_eq!((&*whole.reasoning, &*whole.content), ("Hm.", "Yes."));
}

#[test]
fn tags_are_text_where_nobody_looks_for_them() {
    let text = "<think>a</think><tool_call>{}</tool_call>";
    assert_eq!(parse(Looks::default(), [text]).content, text);
}

#[test]
fn calls_beyond_the_limit_are_left_out() {
    let looks = Looks {
        max_calls: 1,
        ..BOTH
    };
    let call = "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":1}}</tool_call>";
    let whole = parse(looks, [call, "\n", call]);
    assert_eq!(whole.calls, [("f".into(), "{\"x\":1}".into())]);
    assert_eq!(whole.content, "");
}

proptest! {
    #[test]
    fn pieces_do_not_matter(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "<think>", "</think>", "{\"name\": \"f\"", ", \"arguments\": ",
            "{\"name\": \"", "{\"a\": 1}", "}", "\"", "\\", " ", "\n", "é", "<", "text", "{", "</",
        ]), 0..14),
        cuts in prop::collection::vec(0usize..200, 0..8),
    ) {
        let text = parts.concat();
        let whole = parse(BOTH, [text.as_str()]);
        let mut cuts: Vec<_> = cuts.into_iter().filter(|&c| c < text.len() && text.is_char_boundary(c)).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for cut in cuts.into_iter().chain([text.len()]) {
            pieces.push(&text[from..cut]);
            from = cut;
        }
        prop_assert_eq!(parse(BOTH, pieces), whole);
    }
}
