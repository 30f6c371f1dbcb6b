//! Which whole answers a request lets through: with reasoning, calls in every format, and what else it
//! asks for.

use super::*;
use crate::output::CallFormat;
use ferrum_engine::grammar::GrammarCompiler;
use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};
use serde_json::json;
use std::sync::Arc;

static DEMO: &[u8] = include_bytes!("../../../../../assets/demo/ferrum-demo.gguf");

struct Case {
    format: CallFormat,
    reasoning: bool,
    begins_thinking: bool,
    must_call: bool,
    parallel: bool,
    structured: bool,
    yes: &'static [&'static str],
    no: &'static [&'static str],
}

const FREE: Case = Case {
    format: CallFormat::Hermes,
    reasoning: false,
    begins_thinking: false,
    must_call: false,
    parallel: true,
    structured: false,
    yes: &[],
    no: &[],
};

const CASES: &[Case] = &[
    Case {
        must_call: true,
        yes: &[
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            "<tool_call>{\"name\": \"go.on\", \"arguments\": {}}</tool_call>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 2}}\n</tool_call>",
        ],
        no: &[
            "",
            "Yes.",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 3}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
        ],
        ..FREE
    },
    Case {
        must_call: true,
        reasoning: true,
        begins_thinking: true,
        parallel: false,
        yes: &[
            "Hm. <tool_call></think>\n\n<tool_call>{\"name\": \"go.on\", \"arguments\": {}}</tool_call>",
        ],
        no: &[
            "<tool_call>{\"name\": \"go.on\", \"arguments\": {}}</tool_call>",
            "</think><tool_call>{\"name\": \"go.on\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"go.on\", \"arguments\": {}}</tool_call>",
        ],
        ..FREE
    },
    Case {
        yes: &[
            "",
            "Free text, < and {\"a\": 3}.",
            "I see. <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call> So <tool_call>{\"name\": \"go.on\", \"arguments\": {\"any\": [null]}}</tool_call>",
        ],
        no: &[
            "I see. <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 3}}</tool_call>",
            "<tool_call>no",
        ],
        ..FREE
    },
    Case {
        format: CallFormat::Llama,
        yes: &[
            "",
            " Free text {\"name\": 1}",
            "{\"name\": \"f\", \"parameters\": {\"a\": 1}}",
            "<|python_tag|>{\"name\": \"go.on\", \"parameters\": {}}",
        ],
        no: &["{\"name\": \"f\", \"parameters\": {\"a\": 3}}", "{}", "\n{"],
        ..FREE
    },
    Case {
        format: CallFormat::Llama,
        must_call: true,
        reasoning: true,
        yes: &[
            "<think>\nWell\n</think>\n\n{\"name\": \"f\", \"parameters\": {\"a\": 1}}",
            "{\"name\": \"go.on\", \"parameters\": {}}",
        ],
        no: &[
            "<think>{\"name\": \"go.on\", \"parameters\": {}}",
            "{\"name\": \"f\", \"parameters\": {}}",
        ],
        ..FREE
    },
    Case {
        format: CallFormat::Mistral,
        yes: &[
            "Free [TOOL_CAL",
            "Now[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}, \"id\": \"abcDEF123\"}, {\"name\": \"go.on\", \"arguments\": {}}]",
        ],
        no: &[
            "[TOOL_CALLS]",
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 3}}]",
        ],
        ..FREE
    },
    Case {
        format: CallFormat::MistralArgs,
        must_call: true,
        yes: &["[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]go.on[ARGS]{}"],
        no: &["[TOOL_CALLS]f[ARGS]{\"a\": 3}", "f[ARGS]{\"a\": 1}"],
        ..FREE
    },
    Case {
        format: CallFormat::Harmony,
        must_call: true,
        reasoning: true,
        yes: &[
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>",
            "<|channel|>commentary to=functions.go.on <|constrain|>json<|message|>{}",
        ],
        no: &[
            "<|channel|>analysis<|message|>Hm.<|end|>",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 3}",
            "<|channel|>final<|message|>Yes.",
        ],
        ..FREE
    },
    Case {
        format: CallFormat::Harmony,
        structured: true,
        reasoning: true,
        yes: &[
            "<|channel|>final<|message|>ok",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>ok",
        ],
        no: &["ok", "<|channel|>final<|message|>okay"],
        ..FREE
    },
    Case {
        structured: true,
        reasoning: true,
        yes: &[
            "ok",
            "<think>a</think>ok",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 2}}</tool_call>",
        ],
        no: &[
            "",
            "okay",
            "<think>ok",
            "ok<tool_call>{\"name\": \"go.on\", \"arguments\": {}}</tool_call>",
        ],
        ..FREE
    },
];

#[test]
fn whole_answers_are_of_the_form() {
    let tokenizer = Arc::new(Tokenizer::from_gguf(&Gguf::from_static(DEMO).unwrap()).unwrap());
    let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), tokenizer.vocab_size());
    let a = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]});
    let function = |index: usize, name: &str, parameters: Value, strict| Function {
        index,
        name: name.into(),
        parameters,
        strict,
    };
    let functions = [
        function(0, "f", a, true),
        function(1, "go.on", json!({}), false),
    ];
    let options = Structured {
        grammar: Grammar::Choice(vec!["ok".into()]),
        param: "guided_choice".into(),
    };
    for (i, case) in CASES.iter().enumerate() {
        let form = ChatForm {
            output_format: OutputFormat {
                reasoning: case.reasoning,
                begins_thinking: case.begins_thinking,
                format: case.format,
                max_calls: if case.parallel { 9 } else { 1 },
                ..OutputFormat::default()
            },
            functions: &functions,
            must_call: case.must_call,
            structured: Some(&options).filter(|_| case.structured),
        };
        let (grammar, _) = form.grammar(&Markers(&tokenizer));
        let constraint = compiler.compile(&grammar);
        let constraint = constraint.unwrap_or_else(|e| panic!("{e}: {grammar:?}"));
        let accepts = |text: &str| {
            // The demo's vocabulary distinguishes a special token from its text.
            let special = EncodeOptions::PROMPT;
            constraint.accepts(&tokenizer.encode(text, special).unwrap())
        };
        for text in case.yes {
            assert!(accepts(text), "case {i}: {text:?}");
        }
        for text in case.no {
            assert!(!accepts(text), "case {i}: {text:?}");
        }
    }
}
