//! Outputs as models of each family write them, whole, broken and cut.

use super::{Case, called, plain};
use crate::output::CallFormat;

pub(super) const TABLE: &[(CallFormat, &[Case])] = &[
    (CallFormat::QwenCoder, QWEN_CODER),
    (CallFormat::Pythonic, PYTHONIC),
    (CallFormat::DeepseekV3, DEEPSEEK),
    (CallFormat::DeepseekV31, DEEPSEEK),
    (CallFormat::Harmony, HARMONY),
    (CallFormat::Glm, GLM),
    (CallFormat::Kimi, KIMI),
    (CallFormat::Granite, GRANITE),
    (CallFormat::Phi, PHI),
];

const fn thought(
    text: &'static str,
    reasoning: &'static str,
    content: &'static str,
    calls: &'static [(&'static str, &'static str)],
) -> Case {
    Case {
        text,
        content,
        reasoning,
        calls,
    }
}

const QWEN_CODER: &[Case] = &[
    plain("Plain, < <tool_cal"),
    plain("<tool_call> is a tag"),
    plain("A <function= and <function=f x>"),
    plain("<tool_call>\n<function="),
    called(
        "I will look.\n<tool_call>\n<function=f>\n<parameter=a>\nOslo\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
        "I will look.",
        &[("f", "{\"a\": \"Oslo\", \"n\": 3}")],
    ),
    called(
        "<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=o>\n{\"x\": [1, \"</parameter>\"]}\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
        &[
            ("g", "{}"),
            ("f", "{\"o\": {\"x\":[1,\"</parameter>\"]}, \"b\": true}"),
        ],
    ),
    called(
        "<tool_call>\n<function=f>\n<parameter=a>\n\nif \"x\" < {1}:\n\tprint('</parameter> \\n é')\n\n</parameter>\n</function>\n</tool_call>",
        "",
        &[(
            "f",
            "{\"a\": \"\\nif \\\"x\\\" < {1}:\\n\\tprint('</parameter> \\\\n é')\\n\"}",
        )],
    ),
    // Numbers that are strings, strings that are not what the schema says, names that it does not know.
    called(
        "<tool_call><function=f><parameter=a>5</parameter><parameter=n>\nmany\n</parameter><parameter=m>null</parameter><parameter=z>[1]</parameter></function></tool_call>",
        "",
        &[(
            "f",
            "{\"a\": \"5\", \"n\": \"many\", \"m\": null, \"z\": [1]}",
        )],
    ),
    called(
        "<function=h>\n<parameter=a>\ntext\n</parameter>\n</function> done",
        "done",
        &[("h", "{\"a\": \"text\"}")],
    ),
    called(
        "<tool_call>\n<function=f>\n<parameter=a>\nno end",
        "",
        &[("f", "{\"a\": \"no end\"}")],
    ),
    called(
        "<tool_call>\n<function=f>\nwhat?\n</function>",
        "what?\n</function>",
        &[("f", "{}")],
    ),
    called(
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</tool_call> So.",
        "So.",
        &[("f", "{\"a\": \"x\"}")],
    ),
    thought(
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "Hm.",
        "",
        &[("g", "{}")],
    ),
];

const PYTHONIC: &[Case] = &[
    plain(" [1, 2] is a list"),
    plain("[link](to=here)"),
    plain("[f(1)]"),
    plain("[f(a=b)]"),
    plain("[f(a=1"),
    plain("See [f(a=1)]"),
    plain("[]"),
    plain("["),
    called(
        "[f(a=\"Oslo\", n=3)]",
        "",
        &[("f", "{\"a\":\"Oslo\",\"n\":3}")],
    ),
    called(
        "\n[f(a='it\\'s \"(]\" \\n', o={'k': [True, None]}), g()]",
        "",
        &[
            (
                "f",
                "{\"a\":\"it's \\\"(]\\\" \\n\",\"o\":{\"k\":[true,null]}}",
            ),
            ("g", "{}"),
        ],
    ),
    called(
        "<|python_start|>[g( ) ,\ng()]<|python_end|>",
        "",
        &[("g", "{}"), ("g", "{}")],
    ),
    called("Now <|python_start|>[g()] then", "Nowthen", &[("g", "{}")]),
    called("[g(), 5]", ", 5]", &[("g", "{}")]),
    called("[g(), f(a=", ", f(a=", &[("g", "{}")]),
    called("[g()", "", &[("g", "{}")]),
    thought("<think>x</think>[g()]", "x", "", &[("g", "{}")]),
];

const DEEPSEEK: &[Case] = &[
    plain("Plain <｜tool▁calls▁beg"),
    plain("<｜tool▁calls▁begin｜>"),
    plain("<｜tool▁calls▁begin｜> and text"),
    plain("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\ntext"),
    plain("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>5<｜tool▁call▁end｜>"),
    called(
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"Oslo\", \"n\": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me see.",
        &[("f", "{\"a\": \"Oslo\", \"n\": 3}")],
    ),
    called(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"```<｜tool▁call▁end｜>\\\"}\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        &[
            ("f", "{\"a\": \"```<｜tool▁call▁end｜>\\\"}\"}"),
            ("g", "{}"),
        ],
    ),
    called(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"x\ny\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜> end",
        "end",
        &[("f", "{\"a\": \"x\\ny\"}"), ("g", "{}")],
    ),
    called(
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "",
        &[("g", "{}")],
    ),
    called(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": [1, ",
        "",
        &[("f", "{\"a\": [1]}")],
    ),
    called(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": what}<｜tool▁call▁end｜>",
        "what}<｜tool▁call▁end｜>",
        &[("f", "{\"a\": null}")],
    ),
    thought(
        "<think>\nHm.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        "",
        &[("g", "{}")],
    ),
];

const HARMONY: &[Case] = &[
    plain(" Plain text, <|without|> channels."),
    plain(""),
    plain("to=f is no header"),
    thought(
        "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>Yes < {it} is.<|return|>",
        "Simple.",
        "Yes < {it} is.",
        &[],
    ),
    thought(
        "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"Oslo\", \"n\": 3}<|call|>",
        "Need f.",
        "",
        &[("f", "{\"a\": \"Oslo\", \"n\": 3}")],
    ),
    // The token that ends a call ends most answers, and is not shown then.
    called(
        "<|channel|>commentary<|message|>I look both up.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"a\": \"<|call|>\n\"}<|call|><|start|>assistant to=functions.g<|channel|>commentary <|constrain|>json<|message|>{}",
        "I look both up.",
        &[("f", "{\"a\": \"<|call|>\\n\"}"), ("g", "{}")],
    ),
    called(
        " to=functions.g<|channel|>commentary json<|message|><|call|>",
        "",
        &[("g", "{}")],
    ),
    called(
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>no JSON<|call|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>no JSON",
        &[],
    ),
    called(
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1, what<|call|><|start|>assistant<|channel|>final<|message|>So.",
        "whatSo.",
        &[("f", "{\"a\": 1}")],
    ),
    thought(
        "<|channel|>analysis<|message|>Search.<|end|><|start|>assistant<|channel|>analysis to=browser.search code<|message|>{\"query\": 1}<|call|>",
        "Search.{\"query\": 1}",
        "",
        &[],
    ),
    called(
        "<|channel|>commentary to=functions.f what<|message|>{}",
        "<|channel|>commentary to=functions.f what<|message|>{}",
        &[],
    ),
    // Cut in a header, and a header that is none.
    thought(
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assi",
        "Hm",
        "",
        &[],
    ),
    thought("<|channel|>analysis<|mess", "", "", &[]),
    called(
        "<|channel|>what is <|end|> this",
        "<|channel|>what is this",
        &[],
    ),
    thought(
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.",
        "Hm.",
        "Yes.",
        &[],
    ),
];

const GLM: &[Case] = &[
    plain("Plain <tool_call"),
    plain("<tool_call>"),
    plain("<tool_call>is a tag"),
    plain("<tool_call>f\n{\"a\": 1}\n</tool_call>"),
    plain("<tool_call>f"),
    called(
        "I will.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "I will.",
        &[("f", "{\"a\": \"Oslo\", \"n\": 3}")],
    ),
    called(
        "<tool_call>g\n</tool_call>\n<tool_call>f<arg_key>a</arg_key><arg_value>\"{<arg_key>\n</arg_value> </tool_call</arg_value><arg_key>o</arg_key><arg_value>{\"x\": \"</tool_call>\"}</arg_value></tool_call>",
        "",
        &[
            ("g", "{}"),
            (
                "f",
                "{\"a\": \"\\\"{<arg_key>\\n</arg_value> </tool_call\", \"o\": {\"x\":\"</tool_call>\"}}",
            ),
        ],
    ),
    called(
        "<tool_call>f\n<arg_key>m</arg_key>\n<arg_value>null</arg_value>\n<arg_key>e</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>false</arg_value>\n</tool_call>",
        "",
        &[("f", "{\"m\": null, \"e\": \"1\", \"b\": false}")],
    ),
    called(
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>no end",
        "",
        &[("f", "{\"a\": \"no end\"}")],
    ),
    called(
        "<tool_call>f\n<arg_key>a</arg_key>\nno value</tool_call>",
        "<arg_key>a</arg_key>\nno value</tool_call>",
        &[("f", "{}")],
    ),
    thought(
        "\n<think>Hm.</think>\n<tool_call>g\n</tool_call>",
        "Hm.",
        "",
        &[("g", "{}")],
    ),
];

const KIMI: &[Case] = &[
    plain("Plain <|tool_calls_sect"),
    plain("<|tool_calls_section_begin|>"),
    plain("<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    plain("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"),
    plain("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>text"),
    called(
        "I will.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"Oslo\", \"n\": 3}<|tool_call_end|><|tool_calls_section_end|>",
        "I will.",
        &[("f", "{\"a\": \"Oslo\", \"n\": 3}")],
    ),
    called(
        "<|tool_calls_section_begin|>\n<|tool_call_begin|> functions.f:0 <|tool_call_argument_begin|> {\"a\": \"<|tool_call_end|>\n\\\"}{\"}<|tool_call_end|>\n<|tool_call_begin|>functions.go.on:11<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|> end",
        "end",
        &[
            ("f", "{\"a\": \"<|tool_call_end|>\\n\\\"}{\"}"),
            ("go.on", "{}"),
        ],
    ),
    called(
        "<|tool_call_begin|>f<|tool_call_argument_begin|>{\"a\": \"x",
        "",
        &[("f", "{\"a\": \"x\"}")],
    ),
    called(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\" 1}<|tool_call_end|>",
        "1}<|tool_call_end|>",
        &[("f", "{\"a\" : null}")],
    ),
    thought(
        "<think>Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Hm.",
        "",
        &[("g", "{}")],
    ),
];

const GRANITE: &[Case] = &[
    plain("Plain <|tool_call"),
    plain("<|tool_call|>none"),
    plain("<|tool_call|>[5]"),
    called(
        "I will. <|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": \"Oslo\"}}]",
        "I will.",
        &[("f", "{\"a\": \"Oslo\"}")],
    ),
    called(
        "<|tool_call|> [{\"name\": \"f\", \"arguments\": {\"a\": \"}]<|tool_call|>\n\"}}, {\"arguments\": {}, \"name\": \"g\"}] end",
        "end",
        &[("f", "{\"a\": \"}]<|tool_call|>\\n\"}"), ("g", "{}")],
    ),
    called(
        "<tool_call>[{\"name\": \"g\", \"arguments\": {}}]</tool_call>",
        "",
        &[("g", "{}")],
    ),
    called(
        "<|tool_call|>{\"name\": \"f\", \"arguments\": {\"a\": \"x",
        "",
        &[("f", "{\"a\": \"x\"}")],
    ),
    thought(
        "<think>Hm.</think><|tool_call|>[{\"name\": \"g\", \"arguments\": {}}]",
        "Hm.",
        "",
        &[("g", "{}")],
    ),
];

const PHI: &[Case] = &[
    plain("import functools\nfunctools.cache"),
    plain("<|tool_call|>none<|/tool_call|>"),
    plain("<|tool_call|>["),
    called(
        "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": \"Oslo\"}}]<|/tool_call|>",
        "",
        &[("f", "{\"a\": \"Oslo\"}")],
    ),
    called(
        "Now:\n<|tool_call|>{\"arguments\": {\"a\": \"<|/tool_call|>\"}, \"name\": \"f\"}<|/tool_call|><|tool_call|>{\"name\": \"g\", \"arguments\": {}}<|/tool_call|> end",
        "Now:end",
        &[("f", "{\"a\":\"<|/tool_call|>\"}"), ("g", "{}")],
    ),
    called(
        "functools[{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}, {\"name\": \"g\", \"arguments\": {}}]",
        "",
        &[("f", "{\"a\": \"x\"}"), ("g", "{}")],
    ),
    called(
        "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}<|/tool_call|>",
        "<|/tool_call|>",
        &[("f", "{\"a\": \"x\"}")],
    ),
];

/// What says in a template which format it is, with what else stands there.
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
        (
            "Use exact format: [func_name1(param1=value1), func_name2(...)] {{ '<|python_tag|>' }}",
            Some(CallFormat::Pythonic),
        ),
        (
            "<tool_call>\n<function=example>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
            Some(CallFormat::QwenCoder),
        ),
        (
            "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' }}",
            Some(CallFormat::DeepseekV3),
        ),
        (
            "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
            Some(CallFormat::DeepseekV31),
        ),
        (
            "{{ '<|channel|>commentary to=functions.' + name + '<|message|>' }}",
            Some(CallFormat::Harmony),
        ),
        (
            "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
            Some(CallFormat::Glm),
        ),
        (
            "<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>",
            Some(CallFormat::Kimi),
        ),
        (
            "respond with <|tool_call|> followed by a JSON list of tools",
            Some(CallFormat::Granite),
        ),
        (
            "{{ '<|tool_call|>' + (call | tojson) + '<|/tool_call|>' }}",
            Some(CallFormat::Phi),
        ),
        (
            "formatted as functools[{\"name\": [function name], \"arguments\": …}]",
            Some(CallFormat::Phi),
        ),
        (
            "return a json object within <tool_call></tool_call> XML tags: {\"name\": \"f\", \"parameters\": ",
            Some(CallFormat::Hermes),
        ),
        ("{{ message.content }}", None),
    ];
    for (source, expected) in cases {
        assert_eq!(CallFormat::of_template(source), expected, "{source}");
    }
    for format in CallFormat::all() {
        assert!(cases.iter().any(|(_, found)| *found == Some(format)));
        assert_eq!(format.definition().name.parse(), Ok(format));
    }
}

#[test]
fn kimi_knows_calls_by_their_names() {
    let call = |id: &str, name: &str| serde_json::json!({"id": id, "function": {"name": name, "arguments": {}}});
    let mut messages = serde_json::json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("call_1", "f"), call("call_2", "g")]},
        {"role": "tool", "tool_call_id": "call_2", "content": "2"},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "assistant", "tool_calls": [call("call_1", "f")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "tool", "tool_call_id": "other", "content": "4"},
    ]);
    crate::output::name_calls(&mut messages);
    let expected = serde_json::json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("functions.f:0", "f"), call("functions.g:1", "g")]},
        {"role": "tool", "tool_call_id": "functions.g:1", "content": "2"},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
        {"role": "assistant", "tool_calls": [call("functions.f:2", "f")]},
        {"role": "tool", "tool_call_id": "functions.f:2", "content": "3"},
        {"role": "tool", "tool_call_id": "other", "content": "4"},
    ]);
    assert_eq!(messages, expected);
}
