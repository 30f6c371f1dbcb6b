//! Hostile templates end in an error, not in a hang, a crash or an empty machine; and the ways in
//! which models bring templates.

#![allow(clippy::unwrap_used)]

use ferrum_formats::Gguf;
use ferrum_formats::chat_template::{ChatInput, ChatTemplate, MAX_TEMPLATE_BYTES, TemplateError};
use ferrum_formats::gguf::Writer;
use ferrum_formats::tokenizer::{GgufVocab, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;

fn render(source: &str, messages: &Value) -> Result<String, TemplateError> {
    ChatTemplate::from_source(source, [("bos_token", "<s>")])?.render(&ChatInput::new(messages))
}

#[test]
fn templates_that_take_too_much_are_stopped() {
    let deep = format!("{{{{ {}1{} }}}}", "[".repeat(50), "]".repeat(50));
    assert!(render(&deep, &json!([])).is_ok());
    for (what, source) in [
        (
            "memory",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        ),
        (
            "time",
            "{% set l = range(99999) | list %}{% for a in l %}{% if -1 in l %}{% endif %}{% endfor %}",
        ),
        (
            "memory",
            "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        ),
        (
            "time",
            "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(17) %}{% set ns.a = [ns.a, ns.a] %}\
             {% set ns.b = [ns.b, ns.b] %}{% endfor %}{% for i in range(99999) %}{{ ns.a == ns.b }}{% endfor %}",
        ),
        (
            "time",
            "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(17) %}{% set ns.a = [ns.a, ns.a] %}\
             {% set ns.b = [ns.b, ns.b] %}{% endfor %}{% for i in [1, ns.a] %}{% set outer = loop %}\
             {% for j in [1, ns.b] %}{% set inner = loop %}{% for k in range(99999) %}\
             {{ outer == inner }}{% endfor %}{% endfor %}{% endfor %}",
        ),
        (
            "memory",
            "{{ ([[1] * 99] * 9999) | map('tojson', indent='x' * 9999) | list }}",
        ),
        ("memory", "{{ ('a' * 3000000).strip('b' * 3000000 ~ 'a') }}"),
        (
            "memory",
            "{{ (['a'] * 99999) | sort(attribute='a.' * 1000000) }}",
        ),
        (
            "time",
            "{{ (['a'] * 99999) | join(',', attribute='0.' * 1000000) }}",
        ),
        ("memory", "{{ [1] | slice(30000000) }}"),
        ("memory", "{{ 'x' * 99999999999 }}"),
        ("memory", "{{ [1] * 99999999999 }}"),
        ("memory", "{{ 'aaaa'.replace('a', 'b' * 99999999) }}"),
        ("memory", "{{ 'a' | center(99999999999) }}"),
        ("memory", "{{ 'a'.ljust(99999999999) }}"),
        ("memory", "{{ [1] | tojson(indent=99999999999) }}"),
        (
            "memory",
            "{% set ns = namespace(l=[1]) %}{% for a in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        ),
        (
            "memory",
            "{% set ns = namespace(l=1) %}{% for a in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        ),
        (
            "recursion",
            "{% set ns = namespace(l=1) %}{% for a in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}",
        ),
        (
            "recursion",
            "{% set ns = namespace(l=1) %}{% for a in range(99999) %}{% set ns.l = cycler(ns.l) %}{% endfor %}",
        ),
        (
            "recursion",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ),
        (
            "recursion",
            "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        ),
    ] {
        match render(source, &json!([])) {
            Err(TemplateError::Exhausted { what: found, .. }) => {
                let alike = found == what || (what == "memory" && found == "time");
                assert!(alike, "{source}: {found}");
            }
            other => panic!("{source}: {:?}", other.map(|text| text.len())),
        }
    }
}

#[test]
fn values_that_hold_themselves_are_freed() {
    let source = "{% set ns = namespace() %}{% for a in range(9999) %}\
        {% set next = namespace(before=ns) %}{% set ns.after = next %}{% set ns.me = ns %}\
        {% macro m() %}{{ ns }}{% endmacro %}{% set ns.m = m %}{% endfor %}{{ ns.me is defined }}";
    assert_eq!(render(source, &json!([])).unwrap(), "True");
}

#[test]
fn a_loop_that_is_kept_is_what_it_was_then() {
    let source = "{% set ns = namespace(l=1) %}{% for a in range(99999) %}{% for b in [ns.l] %}\
        {% set ns.l = loop %}{% endfor %}{% endfor %}{{ ns.l.index }} {{ ns.l.length }}";
    assert_eq!(render(source, &json!([])).unwrap(), "1 1");
}

#[test]
fn what_costs_nothing_is_done_at_once() {
    let source = "{{ [] * 9223372036854775807 }}{{ '' * 9223372036854775807 }}\
        {{ 'ab'[::9223372036854775807] }}{{ range(9, -9, -9223372036854775807) }}\
        {{ [[1]] | map('tojson', separators=('', ''), indent=1) | join }}";
    assert_eq!(render(source, &json!([])).unwrap(), "[]a[9][\n 1\n]");
}

#[test]
fn jumps_out_of_blocks_inside_a_loop_are_refused() {
    for block in [
        "{% with %}{% break %}{% endwith %}",
        "{% set x %}{% break %}{% endset %}",
        "{% filter upper %}{% continue %}{% endfilter %}",
        "{% call m() %}{% break %}{% endcall %}",
        "{% generation %}{% break %}{% endgeneration %}",
        "{% else %}{% break %}",
    ] {
        let source = format!("{{% for a in [] %}}{block}{{% endfor %}}");
        let result = ChatTemplate::from_source(&source, [("", "")]);
        assert!(
            matches!(result, Err(TemplateError::Syntax { .. })),
            "{block}"
        );
    }
    let source = "{% for a in [1] %}{{ loop.cycle() }}{% endfor %}";
    assert!(matches!(
        render(source, &json!([])),
        Err(TemplateError::Render { .. })
    ));
}

#[test]
fn values_that_hold_themselves_print_compare_and_end() {
    let source = "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}{{ [ns] | join }}\
        {{ ns == ns.me }}{{ [ns, ns] | sort | length }}{{ loop is defined }}";
    assert_eq!(
        render(source, &json!([])).unwrap(),
        "<Namespace><Namespace>True2False"
    );
}

#[test]
fn deep_input_is_an_error() {
    let mut content = json!("x");
    for _ in 0..2_000 {
        content = json!([content]);
    }
    let messages = json!([{ "role": "user", "content": content }]);
    let result = render("{{ messages }}", &messages);
    assert!(
        matches!(
            result,
            Err(TemplateError::Exhausted {
                what: "recursion",
                ..
            })
        ),
        "{result:?}"
    );
}

#[test]
fn syntax_errors_name_the_line() {
    for (source, line) in [
        ("a\n{% if %}", 2),
        ("\n\n{{ 1 + }}", 3),
        ("{{ 'a", 1),
        ("{% nonsense %}", 1),
        ("{% include 'x' %}", 1),
        ("{{ (1 }}", 1),
        ("{% raw %}", 1),
        ("{# a", 1),
        ("{% break %}", 1),
        ("{{ 99999999999999999999999999999999999999999999 }}", 1),
    ] {
        match ChatTemplate::from_source(source, [("", "")]) {
            Err(TemplateError::Syntax { line: found, .. }) => assert_eq!(found, line, "{source}"),
            other => panic!("{source}: {other:?}"),
        }
    }
    for open in [
        "{{ (",
        "{{ [",
        "{{ -",
        "{{ not ",
        "{% if x %}",
        "{{ a.b",
        "{{ {1:",
    ] {
        let source = open.repeat(20_000);
        assert!(
            ChatTemplate::from_source(&source, [("", "")]).is_err(),
            "{open}"
        );
    }
    for chain in [
        "+1",
        ".a",
        "[0]",
        "|upper",
        " if 1 else 2",
        " is defined",
        "()",
        " and 1",
        "~1",
    ] {
        let source = format!("{{{{ a{} }}}}", chain.repeat(50_000));
        let _ = ChatTemplate::from_source(&source, [("", "")]);
    }
    let large = "x".repeat(MAX_TEMPLATE_BYTES + 1);
    let result = ChatTemplate::from_source(&large, [("", "")]);
    assert!(matches!(result, Err(TemplateError::TooLarge { .. })));
}

#[test]
fn a_refusal_carries_the_templates_words() {
    let source =
        "{% if messages[0].role != 'user' %}{{ raise_exception('start with a user') }}{% endif %}";
    let result = render(source, &json!([{ "role": "system", "content": "" }]));
    assert_eq!(
        result,
        Err(TemplateError::Refused("start with a user".into()))
    );
}

#[test]
fn folders_and_files_bring_templates_in_many_ways() {
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let tools = json!([{ "type": "function" }]);
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    assert!(ChatTemplate::from_hf_dir(dir.path()).unwrap().is_none());
    let config = json!({
        "bos_token": { "content": "<b>" },
        "eos_token": "<e>",
        "chat_template": [
            { "name": "default", "template": "{{ bos_token }}plain" },
            { "name": "tool_use", "template": "tools{{ eos_token }}" },
        ],
    });
    fs::write(path("tokenizer_config.json"), config.to_string()).unwrap();
    let template = ChatTemplate::from_hf_dir(dir.path()).unwrap().unwrap();
    let mut input = ChatInput::new(&messages);
    assert_eq!(template.render(&input).unwrap(), "<b>plain");
    input.tools = Some(&tools);
    assert_eq!(template.render(&input).unwrap(), "tools<e>");
    input.template = Some("default");
    assert_eq!(template.render(&input).unwrap(), "<b>plain");
    input.template = Some("rag");
    assert!(matches!(
        template.render(&input),
        Err(TemplateError::NoSuchTemplate { .. })
    ));

    fs::write(
        path("chat_template.jinja"),
        "file {{ messages[0].content }}\n",
    )
    .unwrap();
    let template = ChatTemplate::from_hf_dir(dir.path()).unwrap().unwrap();
    assert_eq!(
        template.render(&ChatInput::new(&messages)).unwrap(),
        "file Hi"
    );
    fs::create_dir(path("additional_chat_templates")).unwrap();
    fs::write(path("additional_chat_templates/rag.jinja"), "rag").unwrap();
    let template = ChatTemplate::from_hf_dir(dir.path()).unwrap().unwrap();
    let input = ChatInput {
        template: Some("rag"),
        ..ChatInput::new(&messages)
    };
    assert_eq!(template.render(&input).unwrap(), "rag");

    let mut writer = Writer::new("test.gguf");
    writer
        .set(
            "tokenizer.chat_template",
            "{{ bos_token }}{{ messages[0].content }}",
        )
        .unwrap();
    let bytes = writer
        .start(Vec::new())
        .and_then(|body| body.finish())
        .unwrap();
    let gguf = Gguf::from_vec("test.gguf", bytes).unwrap();
    let vocab = GgufVocab {
        model: "llama".into(),
        tokens: ["<unk>", "<s>", "</s>", "a"].map(str::to_owned).into(),
        ..GgufVocab::default()
    };
    let tokenizer = Tokenizer::from_gguf_vocab(&vocab).unwrap();
    let template = ChatTemplate::from_gguf(&gguf, &tokenizer).unwrap().unwrap();
    assert_eq!(
        template.render(&ChatInput::new(&messages)).unwrap(),
        "<s>Hi"
    );
}

/// Pieces that make templates which are often nearly right.
fn fragments() -> impl Strategy<Value = String> {
    let parts = [
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "-",
        "+",
        " ",
        "\n",
        "messages",
        "x",
        "1",
        "'a'",
        "\"b\"",
        "if",
        "for",
        "in",
        "else",
        "endif",
        "endfor",
        "set",
        "=",
        "|",
        "upper",
        "tojson",
        "join",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ".",
        ",",
        ":",
        "~",
        "*",
        "**",
        "//",
        "%",
        "is",
        "not",
        "defined",
        "macro",
        "endmacro",
        "f",
        "loop",
        "range(9)",
        "namespace(a=1)",
        "raw",
        "endraw",
        "\\",
        "é",
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{% if x %}",
        "{% endif %}",
        "{{ messages | tojson }}",
        "{{ 'a' % 1 }}",
        ".split()",
        "[::-1]",
        "| map('upper') | list",
    ];
    proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..40)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_template_gives_a_result(source in fragments()) {
        let messages = json!([{ "role": "user", "content": "Hi <b> é", "n": [1.5, null] }]);
        let _ = render(&source, &messages);
    }
}
