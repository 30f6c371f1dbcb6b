use super::*;
use proptest::prelude::*;

const BOTH: Looks = Looks {
    reasoning: true,
    begins_thinking: false,
    format: CallFormat::Hermes,
    max_calls: 8,
};

const FORMATS: [CallFormat; 4] = [
    CallFormat::Hermes,
    CallFormat::Llama,
    CallFormat::Mistral,
    CallFormat::MistralArgs,
];

fn looks(format: CallFormat) -> Looks {
    Looks { format, ..BOTH }
}

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

const fn called(
    text: &'static str,
    content: &'static str,
    calls: &'static [(&'static str, &'static str)],
) -> Case {
    Case {
        text,
        content,
        reasoning: "",
        calls,
    }
}

const LLAMA: &[Case] = &[
    plain(" Plain, {\"name\": \"f\", \"parameters\": {}}"),
    plain("{\"name\": \"f\"} is no call? It is."),
    plain("{braces} are only braces"),
    plain("{\"name\": \"f"),
    plain("{\"x\": {\"name\": \"f\", \"parameters\": {}}}"),
    plain("<|python_tag|>print(1)"),
    plain("a <|python_t"),
    called(
        "{\"name\": \"f\", \"parameters\": {\"a\": \"}\"}}",
        "",
        &[("f", "{\"a\": \"}\"}")],
    ),
    called(" \n{\"name\":\"f\",\"arguments\":{}}", "", &[("f", "{}")]),
    called(
        "{\"parameters\": {\"a\": [1]}, \"name\": \"f\"}",
        "",
        &[("f", "{\"a\":[1]}")],
    ),
    called(
        "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}",
        "",
        &[("f", "{}")],
    ),
    called("<|python_tag|>{\"name\": \"f\"}", "", &[("f", "{}")]),
    called(
        "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": 1}}; {\"name\": \"g\", \"parameters\": {}}\n",
        "",
        &[("f", "{\"x\": 1}"), ("g", "{}")],
    ),
    called(
        "Sure. <|python_tag|>{\"name\": \"f\", \"parameters\": {}}<|python_tag|>{\"name\": \"g\", \"parameters\": {}} done",
        "Sure.done",
        &[("f", "{}"), ("g", "{}")],
    ),
    called(
        "{\"name\": \"f\", \"parameters\": {\"a\": ",
        "",
        &[("f", "{\"a\": ")],
    ),
    Case {
        text: "<think>x</think>\n{\"name\": \"f\", \"parameters\": {}}",
        content: "",
        reasoning: "x",
        calls: &[("f", "{}")],
    },
];

const MISTRAL: &[Case] = &[
    plain("[TOOL_CALLS"),
    plain("[TOOL_CALLS]"),
    plain("[TOOL_CALLS][]"),
    plain("[TOOL_CALLS][1, 2]"),
    plain("[TOOL_CALLS]not a call"),
    plain("[TOOL_CALLS]f[ARGS]5"),
    plain("[TOOL_CALLS]f[ARG]{}"),
    plain("[TOOL_CALLS][{\"x\": 1}] and on"),
    called(
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": \"]\"}}]",
        "",
        &[("f", "{\"a\": \"]\"}")],
    ),
    called(
        "I will. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}, \"id\": \"a}]bcdefgh\"}, {\"arguments\": {\"é\": 1}, \"name\": \"g\"}]\n",
        "I will.",
        &[("f", "{}"), ("g", "{\"é\":1}")],
    ),
    called(
        "[TOOL_CALLS]get.it[ARGS]{\"a\": {\"b\": 1}}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS] {} end",
        "end",
        &[("get.it", "{\"a\": {\"b\": 1}}"), ("g", "{}")],
    ),
    called("[TOOL_CALLS]f[ARGS]{\"a\": ", "", &[("f", "{\"a\": ")]),
    called(
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1",
        "",
        &[("f", "{\"a\": 1")],
    ),
];

/// Each case with how to look at it.
fn cases() -> impl Iterator<Item = (Looks, &'static Case)> {
    let of = |format, cases: &'static [Case]| cases.iter().map(move |case| (looks(format), case));
    of(CallFormat::Hermes, CASES)
        .chain(of(CallFormat::Llama, LLAMA))
        .chain(of(CallFormat::Mistral, MISTRAL))
        .chain(of(CallFormat::MistralArgs, MISTRAL))
}

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
    for (looks, case) in cases() {
        assert_eq!(parse(looks, [case.text]), expected(case), "{}", case.text);
    }
}

#[test]
fn it_does_not_matter_where_pieces_end() {
    for (looks, case) in cases() {
        let whole = parse(looks, [case.text]);
        for cut in (0..case.text.len()).filter(|&at| case.text.is_char_boundary(at)) {
            let (left, right) = case.text.split_at(cut);
            assert_eq!(parse(looks, [left, right]), whole, "{left:?} {right:?}");
        }
        let characters = case.text.split_inclusive(|_: char| true);
        assert_eq!(parse(looks, characters), whole, "{}", case.text);
    }
}

#[test]
fn templates_say_how_calls_are_written() {
    let cases = [
        ("{{ '<tool_call>\n' }}", Some(CallFormat::Hermes)),
        ("{{ '[TOOL_CALLS][' }}", Some(CallFormat::Mistral)),
        (
            "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
            Some(CallFormat::MistralArgs),
        ),
        ("{{ '<|python_tag|>' }}", Some(CallFormat::Llama)),
        (
            "{{ '{\"name\": \"' + name + '\", ' }}{{ '\"parameters\": ' }}",
            Some(CallFormat::Llama),
        ),
        ("{{ message.content }}", None),
    ];
    for (source, expected) in cases {
        assert_eq!(CallFormat::of_template(source), expected, "{source}");
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
    #![proptest_config(ProptestConfig::with_cases(1024))]
    #[test]
    fn pieces_do_not_matter(
        format in prop::sample::select(&FORMATS[..]),
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "<think>", "</think>", "{\"name\": \"f\"", ", \"arguments\": ",
            "{\"name\": \"", "{\"a\": 1}", "}", "\"", "\\", " ", "\n", "é", "<", "text", "{", "</",
            "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ", ", ";", "f", "\"id\": \"x\"",
            "[{\"name\": \"f\", \"arguments\": {}}", "{\"name\": \"f\", \"parameters\": {}}",
        ]), 0..14),
        cuts in prop::collection::vec(0usize..200, 0..8),
    ) {
        let text = parts.concat();
        let whole = parse(looks(format), [text.as_str()]);
        let mut cuts: Vec<_> = cuts.into_iter().filter(|&c| c < text.len() && text.is_char_boundary(c)).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for cut in cuts.into_iter().chain([text.len()]) {
            pieces.push(&text[from..cut]);
            from = cut;
        }
        prop_assert_eq!(&parse(looks(format), pieces), &whole);
        let characters = text.split_inclusive(|_: char| true);
        prop_assert_eq!(parse(looks(format), characters), whole);
    }
}
