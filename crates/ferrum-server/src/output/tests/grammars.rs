//! What the grammar of each format lets through where a call is required, and where calls are free.

use super::*;
use ferrum_engine::grammar::{Constraint, Grammar, GrammarCompiler};
use ferrum_formats::Gguf;
use ferrum_formats::tokenizer::{EncodeOptions, Tokenizer};

static DEMO: &[u8] = include_bytes!("../../../../../assets/demo/ferrum-demo.gguf");

struct PendingText {
    format: CallFormat,
    yes: &'static [&'static str],
    no: &'static [&'static str],
}

/// Calls of `f` with a string, a number of 1 or 2 and maybe a boolean, and of `go.on` with anything.
const HELD: &[PendingText] = &[
    PendingText {
        format: CallFormat::Hermes,
        yes: &[
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 1}}\n</tool_call>",
        ],
        no: &[
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 3}}\n</tool_call>",
        ],
    },
    PendingText {
        format: CallFormat::QwenCoder,
        yes: &[
            "<tool_call>\n<function=f>\n<parameter=s>\nany <text>\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n<parameter=b>\ntrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=go.on>\n<parameter=any>\nthing\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=go.on>\n</function>\n</tool_call>",
        ],
        no: &[
            "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=h>\n</function>\n</tool_call>",
            "<tool_call>\n{\"name\": \"go.on\", \"arguments\": {}}\n</tool_call>",
        ],
    },
    PendingText {
        format: CallFormat::Llama,
        yes: &["{\"name\": \"f\", \"parameters\": {\"s\": \"x\", \"n\": 1}}"],
        no: &["{\"name\": \"f\", \"parameters\": {\"s\": \"x\"}}"],
    },
    PendingText {
        format: CallFormat::Pythonic,
        yes: &[
            "[f(s=\"x\", n=2)]",
            "[f(s=\"x\", n=1, b=True), go.on(), go.on(k=[1, {\"l\": null}])]",
        ],
        no: &[
            "[f(s=\"x\", n=3)]",
            "[f(n=1)]",
            "[f(s=\"x\", n=1, b=1)]",
            "f(s=\"x\", n=1)",
            "[]",
        ],
    },
    PendingText {
        format: CallFormat::Mistral,
        yes: &["[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 1}}]"],
        no: &["[TOOL_CALLS]f[ARGS]{\"s\": \"x\", \"n\": 1}"],
    },
    PendingText {
        format: CallFormat::MistralArgs,
        yes: &["[TOOL_CALLS]f[ARGS]{\"s\": \"x\", \"n\": 1}[TOOL_CALLS]go.on[ARGS]{}"],
        no: &["[TOOL_CALLS]f[ARGS]{\"s\": \"x\", \"n\": 3}"],
    },
    PendingText {
        format: CallFormat::DeepseekV3,
        yes: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"s\": \"x\", \"n\": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>go.on\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
        no: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"s\": \"x\", \"n\": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        ],
    },
    PendingText {
        format: CallFormat::DeepseekV31,
        yes: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\": \"x\", \"n\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>go.on<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
        no: &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\": \"x\", \"n\": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ],
    },
    PendingText {
        format: CallFormat::Harmony,
        yes: &[
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"s\": \"x\", \"n\": 1}<|call|>",
            "<|channel|>commentary to=functions.go.on <|constrain|>json<|message|>{}",
        ],
        no: &[
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"s\": \"x\", \"n\": 3}<|call|>",
            "<|channel|>final<|message|>No.",
        ],
    },
    PendingText {
        format: CallFormat::Glm,
        yes: &[
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>any <text></arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>go.on\n</tool_call>",
            "<tool_call>go.on<arg_key>k</arg_key><arg_value>thing</arg_value></tool_call>",
        ],
        no: &[
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
            "<tool_call>f\n</tool_call>",
        ],
    },
    PendingText {
        format: CallFormat::Kimi,
        yes: &[
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"s\": \"x\", \"n\": 1}<|tool_call_end|><|tool_call_begin|>functions.go.on:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ],
        no: &[
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"s\": \"x\", \"n\": 3}<|tool_call_end|><|tool_calls_section_end|>",
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        ],
    },
    PendingText {
        format: CallFormat::Granite,
        yes: &[
            "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 1}}, {\"name\": \"go.on\", \"arguments\": {}}]",
        ],
        no: &[
            "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 3}}]",
            "<|tool_call|>[]",
        ],
    },
    PendingText {
        format: CallFormat::Phi,
        yes: &[
            "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 1}}, {\"name\": \"go.on\", \"arguments\": {}}]<|/tool_call|>",
        ],
        no: &[
            "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 3}}]<|/tool_call|>",
            "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\", \"n\": 1}}]",
        ],
    },
];

/// Functions and where calls of them are held to their schemas.
fn held_functions(strict: bool) -> Vec<Function> {
    let schema = json!({
        "type": "object",
        "properties": {"s": {"type": "string"}, "n": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["s", "n"],
        "additionalProperties": false,
    });
    let mut all = vec![function(0, "f", schema), function(1, "go.on", json!({}))];
    all[0].strict = strict;
    all
}

struct Demo {
    tokenizer: Arc<Tokenizer>,
    compiler: GrammarCompiler,
}

impl Demo {
    fn new() -> Self {
        let tokenizer = Tokenizer::from_gguf(&Gguf::from_static(DEMO).unwrap()).unwrap();
        let tokenizer = Arc::new(tokenizer);
        let compiler = GrammarCompiler::new(Arc::clone(&tokenizer), tokenizer.vocab_size());
        Self {
            tokenizer,
            compiler,
        }
    }

    /// The grammar of calls that are required, or of free text with calls.
    fn compile(&self, format: CallFormat, must_call: bool, parallel: bool) -> Constraint {
        let functions = held_functions(!must_call);
        let markers = Markers(&self.tokenizer);
        let (rules, parts) = format.calls(&functions, &markers, parallel, must_call, !must_call);
        let start = if must_call { "calls" } else { "free" };
        let text = format!("start: {start}\n{rules}");
        let grammar = Grammar::Lark { text, parts };
        let compiled = self.compiler.compile(&grammar);
        compiled.unwrap_or_else(|e| panic!("{format:?} {e}: {grammar:?}"))
    }

    fn accepts(&self, constraint: &Constraint, text: &str) -> bool {
        constraint.accepts(&self.tokenizer.encode(text, EncodeOptions::PROMPT).unwrap())
    }
}

#[test]
fn required_calls_are_in_the_format() {
    let demo = Demo::new();
    let mut wrong = Vec::new();
    for format in CallFormat::all() {
        let held = HELD.iter().find(|held| held.format == format).unwrap();
        let constraint = demo.compile(format, true, true);
        for (texts, fine) in [
            (held.yes, true),
            (held.no, false),
            (&["", "Yes.", "{}"], false),
        ] {
            for text in texts {
                if demo.accepts(&constraint, text) != fine {
                    wrong.push(format!("{format:?}, {fine}: {text:?}"));
                }
            }
        }
        // What a grammar lets through is read as calls.
        for text in held.yes {
            let output_format = OutputFormat {
                functions: held_functions(false).into(),
                ..output_format(format)
            };
            let whole = parse(&output_format, [*text]);
            assert!(
                !whole.calls.is_empty() && whole.content.is_empty(),
                "{whole:?}"
            );
            let is_known = |(name, _): &(String, String)| name == "f" || name == "go.on";
            assert!(whole.calls.iter().all(is_known), "{whole:?}");
            // One call alone is one without others, too.
            let single = demo.compile(format, true, false);
            let one = whole.calls.len() == 1;
            assert_eq!(demo.accepts(&single, text), one, "{format:?}: {text:?}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn free_text_has_calls_of_strict_functions() {
    let demo = Demo::new();
    let mut wrong = Vec::new();
    for format in CallFormat::all() {
        let held = HELD.iter().find(|held| held.format == format).unwrap();
        let constraint = demo.compile(format, false, true);
        let bare = format.definition().bare.is_some();
        let before = if bare || format.has_channels() {
            ""
        } else {
            "I see.\n"
        };
        let free = match format.has_channels() {
            true => {
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes, < {it} is."
            }
            false => " Yes, < {it} is.",
        };
        let mut check = |text: &str, fine| {
            if demo.accepts(&constraint, text) != fine {
                wrong.push(format!("{format:?}, {fine}: {text:?}"));
            }
        };
        check(free, true);
        for text in held.yes {
            check(&format!("{before}{text}"), true);
        }
        check(&format!("{before}{}", held.no[0]), false);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
