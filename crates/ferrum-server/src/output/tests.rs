//! Answers in every format, in pieces that end anywhere.

mod formats;
mod grammars;
mod random;

use super::*;
use serde_json::{Value, json};

fn function(index: usize, name: &str, parameters: Value) -> Function {
    Function {
        index,
        name: name.into(),
        parameters,
        strict: false,
    }
}

/// Functions with parameters of all kinds, and of none.
fn functions() -> Arc<[Function]> {
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
    [function(0, "f", all), function(1, "g", none)].into()
}

fn output_format(format: CallFormat) -> OutputFormat {
    OutputFormat {
        reasoning: true,
        format,
        max_calls: 8,
        functions: functions(),
        ..OutputFormat::default()
    }
}

fn parse<'a>(
    output_format: &OutputFormat,
    chunks: impl IntoIterator<Item = &'a str>,
) -> ParsedOutput {
    ParsedOutput::of(output_format, chunks, false)
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
        calls: &[("f", "{\"a\": null}")],
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
        &[("f", "{\"a\": null}")],
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
    called("[TOOL_CALLS]f[ARGS]{\"a\": ", "", &[("f", "{\"a\": null}")]),
    called(
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1",
        "",
        &[("f", "{\"a\": 1}")],
    ),
];

/// Each case with how to look at it.
fn cases() -> impl Iterator<Item = (OutputFormat, &'static Case)> {
    let of = |format, cases: &'static [Case]| {
        cases.iter().map(move |case| (output_format(format), case))
    };
    of(CallFormat::Hermes, CASES)
        .chain(of(CallFormat::Llama, LLAMA))
        .chain(of(CallFormat::Mistral, MISTRAL))
        .chain(of(CallFormat::MistralArgs, MISTRAL))
        .chain(
            formats::TABLE
                .iter()
                .flat_map(move |&(format, cases)| of(format, cases)),
        )
}

fn expected(case: &Case) -> ParsedOutput {
    let call = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
    ParsedOutput {
        content: case.content.into(),
        reasoning: case.reasoning.into(),
        calls: case.calls.iter().map(call).collect(),
    }
}

#[test]
fn the_parts_are_told_apart() {
    let mut wrong = Vec::new();
    for (output_format, case) in cases() {
        let found = parse(&output_format, [case.text]);
        if found != expected(case) {
            wrong.push(format!(
                "{:?} {:?}\n  {found:?}\n  {:?}",
                output_format.format,
                case.text,
                expected(case)
            ));
        }
        for (name, arguments) in found.calls {
            let arguments: Value = serde_json::from_str(&arguments).unwrap_or_default();
            assert!(arguments.is_object(), "{name} {}", case.text);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn it_does_not_matter_where_pieces_end() {
    for (output_format, case) in cases() {
        let whole = parse(&output_format, [case.text]);
        for cut in (0..case.text.len()).filter(|&at| case.text.is_char_boundary(at)) {
            let (left, right) = case.text.split_at(cut);
            assert_eq!(
                parse(&output_format, [left, right]),
                whole,
                "{left:?} {right:?}"
            );
        }
        let characters = case.text.split_inclusive(|_: char| true);
        assert_eq!(parse(&output_format, characters), whole, "{}", case.text);
    }
}

#[test]
fn reasoning_may_begin_in_the_prompt() {
    let output_format = OutputFormat {
        begins_thinking: true,
        ..output_format(CallFormat::Hermes)
    };
    let whole = parse(&output_format, ["\nHm.</think>", " Yes."]);
    assert_eq!((&*whole.reasoning, &*whole.content), ("Hm.", "Yes."));
}

#[test]
fn families_have_markers_of_their_own_around_reasoning() {
    let cases = [
        ("{{ '<think>' }}", "<think>Hm.</think>\nYes."),
        ("{{ '[THINK]' + t + '[/THINK]' }}", "[THINK]Hm.[/THINK]Yes."),
        ("{%- if '◁/think▷' in content %}", "◁think▷Hm.◁/think▷Yes."),
        (
            "after 'Here is my thought process:' and after 'Here is my response:'",
            "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.",
        ),
    ];
    for (template, text) in cases {
        let output_format = OutputFormat {
            thinking: Thinking::of_template(template).unwrap(),
            ..output_format(CallFormat::Hermes)
        };
        for cut in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
            let (left, right) = text.split_at(cut);
            let whole = parse(&output_format, [left, right]);
            assert_eq!(
                (&*whole.reasoning, &*whole.content),
                ("Hm.", "Yes."),
                "{text}"
            );
        }
    }
    assert_eq!(Thinking::of_template("{{ message.content }}"), None);
}

#[test]
fn tags_are_text_where_nobody_looks_for_them() {
    let text = "<think>a</think><tool_call>{}</tool_call>";
    assert_eq!(parse(&OutputFormat::default(), [text]).content, text);
}

#[test]
fn calls_beyond_the_limit_are_left_out() {
    let output_format = OutputFormat {
        max_calls: 1,
        ..output_format(CallFormat::Hermes)
    };
    let call = "<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":1}}</tool_call>";
    let whole = parse(&output_format, [call, "\n", call]);
    assert_eq!(whole.calls, [("f".into(), "{\"x\":1}".into())]);
    assert_eq!(whole.content, "");
}

#[test]
fn arguments_that_were_cut_off_stay_so() {
    let mut parser = OutputParser::new(output_format(CallFormat::Hermes));
    let mut deltas = parser.push("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x");
    deltas.extend(parser.finish(true));
    let expected = [
        Delta::CallBegins(0, "f".into()),
        Delta::CallArguments(0, "{\"a\": \"x".into()),
    ];
    assert_eq!(deltas, expected);
}

#[test]
fn arguments_come_as_they_are_said() {
    let (hermes, qwen) = (CallFormat::Hermes, CallFormat::QwenCoder);
    let cases = [
        (
            hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"one two",
        ),
        (
            CallFormat::Llama,
            "{\"name\": \"f\", \"parameters\": {\"a\": \"one two",
        ),
        (
            CallFormat::Mistral,
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": \"one two",
        ),
        (
            CallFormat::MistralArgs,
            "[TOOL_CALLS]f[ARGS]{\"a\": \"one two",
        ),
        (qwen, "<tool_call>\n<function=f>\n<parameter=a>\none two"),
        (
            CallFormat::Glm,
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>one two",
        ),
        (
            CallFormat::DeepseekV3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"one two",
        ),
        (
            CallFormat::Kimi,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"one two",
        ),
        (
            CallFormat::Harmony,
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"one two",
        ),
        (
            CallFormat::Granite,
            "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": \"one two",
        ),
        (
            CallFormat::Phi,
            "<|tool_call|>{\"name\": \"f\", \"arguments\": {\"a\": \"one two",
        ),
    ];
    for (format, text) in cases {
        let mut parser = OutputParser::new(output_format(format));
        let mut deltas = parser.push(text);
        deltas.extend(parser.push(" three"));
        let said = deltas.into_iter().map(|delta| match delta {
            Delta::CallArguments(0, text) => text,
            _ => String::new(),
        });
        let said: String = said.collect();
        assert_eq!(said, "{\"a\": \"one two three", "{format:?}");
    }
}

#[test]
fn what_is_held_back_has_a_bound() {
    for format in CallFormat::all() {
        let definition = format.definition();
        let begins = definition.openers.iter().map(|marker| (*marker).to_owned());
        for begin in begins.chain(definition.bare.map(String::from)) {
            let mut parser = OutputParser::new(output_format(format));
            let mut deltas = parser.push(&begin);
            let long = "[{\"a\": \"(".to_owned() + &"abcdefgh ".repeat(100);
            let count = 4 * MAX_HELD_BYTES / long.len();
            for _ in 0..count {
                deltas.extend(parser.push(&long));
                assert!(parser.held.text().len() <= MAX_HELD_BYTES + MAX_STEP_BYTES);
            }
            deltas.extend(parser.finish(false));
            let said: usize = deltas
                .iter()
                .map(|delta| match delta {
                    Delta::Content(text) | Delta::Reasoning(text) => text.len(),
                    Delta::CallBegins(..) => 0,
                    Delta::CallArguments(_, text) => text.len(),
                })
                .sum();
            assert!(said >= count * long.len(), "{format:?} {begin}");
        }
    }
}

/// Headers are bounded in size, and a long one is a header or not however it comes.
#[test]
fn long_names_do_not_depend_on_chunks() {
    let call = |name: &str| {
        [
            format!(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>"
            ),
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            format!("[TOOL_CALLS]{name}[ARGS]{{}}"),
            format!("[TOOL_CALLS][{{\"name\": \"{name}\", \"arguments\": {{}}}}]"),
            format!(
                "<tool_call>{name}\n<arg_key>{name}</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
            ),
            format!(
                "<tool_call>\n<function={name}>\n<parameter={name}>\n1\n</parameter>\n</function>\n</tool_call>"
            ),
            format!("[{name}({name}=1)]"),
            format!("<|channel|>commentary to=functions.{name} <|message|>{{}}<|call|>"),
        ]
    };
    for format in CallFormat::all() {
        let output_format = output_format(format);
        // About both bounds, and halves of them, for names that stand twice.
        for length in [1]
            .into_iter()
            .chain([128, 256, 512].into_iter().flat_map(|n| n - 48..n + 8))
        {
            for text in call(&"n".repeat(length)) {
                let whole = parse(&output_format, [text.as_str()]);
                let characters = text.split_inclusive(|_: char| true);
                assert_eq!(
                    parse(&output_format, characters),
                    whole,
                    "{format:?}: {text}"
                );
            }
        }
    }
}
