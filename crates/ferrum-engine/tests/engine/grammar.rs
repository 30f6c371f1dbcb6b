//! Answers under a grammar, with all that else may happen to an answer.

use crate::overlapped::Overlapped;
use crate::scripted::{CONFIG, Scripted};
use crate::{Answered, collect, demo_tokenizer, encode, greedy, sampled};
use ferrum_engine::engine::StopMatch;
use ferrum_engine::grammar::{Constraint, Grammar, GrammarCompiler, lark_token};
use ferrum_engine::{Engine, EngineConfig, EngineError, FinishReason, Request};
use ferrum_types::TokenId;
use std::sync::OnceLock;

pub(crate) fn compile(grammar: &Grammar) -> Constraint {
    static COMPILER: OnceLock<GrammarCompiler> = OnceLock::new();
    let compiler = COMPILER.get_or_init(|| {
        let tokenizer = demo_tokenizer();
        let size = tokenizer.vocab_size();
        GrammarCompiler::new(tokenizer, size)
    });
    compiler.compile(grammar).unwrap()
}

fn regex(text: &str) -> Constraint {
    compile(&Grammar::Regex(text.into()))
}

fn ask(engine: &Engine, request: Request) -> Answered {
    collect(engine.handle().submit(request).unwrap())
}

/// A request whose answer has to match a regular expression.
fn held(expression: &str, max_tokens: usize) -> Request {
    let mut request = greedy(&[1, 2], max_tokens);
    request.generation.stop_tokens = demo_tokenizer().eos_ids().to_vec();
    request.grammar = Some(regex(expression));
    request
}

/// A model that says this and ends, again and again.
fn saying(text: &str) -> Scripted {
    let mut tokens = encode(text);
    tokens.push(demo_tokenizer().eos_ids()[0]);
    Scripted::new(CONFIG).saying(2, tokens)
}

/// The engine on a runner whose tokens the host chooses under masks, or a device whose steps overlap.
fn start(runner: Scripted, on_device: bool) -> Engine {
    match on_device {
        false => runner.start(EngineConfig::default()),
        true => Overlapped::new(runner.sampling()).start(EngineConfig::default()),
    }
}

#[test]
fn an_answer_ends_where_its_grammar_does() {
    // The model's text, the grammar, the output, and the finish reason.
    let stop = FinishReason::Stop;
    let cases = [
        // The model ends where the grammar allows it, and continues where it does not.
        ("abc", "[a-z]+", "abc", stop),
        ("abc", "[a-z]{3}", "abc", stop),
        ("abcdef", "[a-z]{3}", "abc", stop),
        ("abc", "[a-z]{2}", "ab", stop),
        ("abc", "[a-z]{2,9}", "abc", stop),
        ("\u{1f98a}!", "\u{1f98a}", "\u{1f98a}", stop),
        ("abc", "abc[x]{40}", "abcx", FinishReason::Length),
    ];
    let on_both = cases.iter().flat_map(|case| [(case, false), (case, true)]);
    for (&(said, expression, expected, reason), on_device) in on_both {
        let engine = start(saying(said), on_device);
        let found = ask(&engine, held(expression, 12));
        let choice = &found.choices[0];
        assert!(
            choice.text.starts_with(expected),
            "{said:?} {expression:?}: {choice:?}"
        );
        assert_eq!(found.reason(), reason, "{said:?} {expression:?}");
        if reason == stop {
            assert_eq!(choice.text, expected, "{said:?} {expression:?}");
        }
        let by_token = matches!(choice.ended, Some((_, Some(StopMatch::Token(_)))));
        let tokens = choice.tokens.len() + usize::from(by_token);
        assert_eq!(found.usage.unwrap().completion_tokens, tokens);
    }
}

#[test]
fn a_whole_answer_needs_no_end_from_the_model() {
    let engine = saying("never mind").start(EngineConfig::default());
    let mut request = held("yes|no", 12);
    // Nothing stops this one but its grammar.
    request.generation.stop_tokens.clear();
    request.n = 3;
    request.logprobs = Some(2);
    let found = ask(&engine, request);
    for choice in &found.choices {
        assert!(["yes", "no"].contains(&&*choice.text), "{choice:?}");
        assert_eq!(choice.ended, Some((FinishReason::Stop, None)));
        assert_eq!(choice.logprobs.len(), choice.tokens.len());
        // They are what the model thought of it.
        assert!(choice.logprobs.iter().all(|l| l.chosen.logprob.is_finite()));
    }
}

#[test]
fn noise_under_a_grammar_is_of_the_grammar() {
    // Logits without sense, many sequences at a time, and blocks for a few of them.
    let config = ferrum_models::RunnerConfig {
        kv_tokens: 96,
        context: 64,
        ..CONFIG
    };
    let (runner, gate) = Scripted::new(config).gated();
    let engine = runner.start(EngineConfig::default());
    let schema = serde_json::json!({
        "type": "object",
        "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": false,
    });
    let grammar = compile(&Grammar::JsonSchema {
        schema,
        lenient: false,
    });
    let request = |seed| {
        let mut request = sampled(&[1, 2], 60, seed);
        request.generation.stop_tokens = demo_tokenizer().eos_ids().to_vec();
        request.grammar = Some(grammar.clone());
        request.n = 2;
        request.draft_tokens = if seed % 2 == 0 { 4 } else { 0 };
        request
    };
    let submit = |seed| engine.handle().submit(request(seed)).unwrap();
    let streams: Vec<_> = (0..12).map(submit).collect();
    // All are there before the first step, so that they want more blocks than there are.
    drop(gate);
    let mut whole = 0;
    for (seed, stream) in streams.into_iter().enumerate() {
        let found = collect(stream);
        for choice in &found.choices {
            let Some((FinishReason::Stop, _)) = choice.ended else {
                continue;
            };
            whole += 1;
            let value: serde_json::Value = serde_json::from_str(&choice.text).unwrap();
            assert!(value["a"] == "x" || value["a"] == "yz", "{value}");
            assert!(value["b"].is_boolean() && value.as_object().unwrap().len() == 2);
        }
        let alone = ask(&engine, request(seed as u64));
        assert_eq!(alone.choices, found.choices);
    }
    assert!(whole > 12, "{whole}");
    assert!(engine.handle().stats().preemptions > 0);
}

#[test]
fn a_device_chooses_under_masks_what_the_host_would() {
    let schema = serde_json::json!({
        "type": "object",
        "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": false,
    });
    let lenient = false;
    let grammar = compile(&Grammar::JsonSchema { schema, lenient });
    let request = |seed| {
        let mut request = sampled(&[1, 2], 40, seed);
        request.generation.stop_tokens = demo_tokenizer().eos_ids().to_vec();
        // Every second one is free.
        request.grammar = (seed % 2 == 0).then(|| grammar.clone());
        request.n = 2;
        let sampling = &mut request.generation.sampling;
        match seed % 8 {
            0 => sampling.temperature = 0.0,
            2 => sampling.top_p = 0.9,
            4 => sampling.repeat_penalty = 1.3,
            _ => request.logprobs = Some(2),
        }
        request.generation.min_tokens = 3 * (seed as usize % 3);
        request
    };
    let answers = |engine: &Engine| {
        let submit = |seed| engine.handle().submit(request(seed)).unwrap();
        let streams: Vec<_> = (0..16).map(submit).collect();
        let answers = streams.into_iter().map(|stream| collect(stream).choices);
        answers.collect::<Vec<_>>()
    };
    let host = answers(&start(Scripted::new(CONFIG), false));
    let device = Overlapped::new(Scripted::new(CONFIG).sampling());
    let rows = device.rows_read();
    let device = answers(&device.start(EngineConfig::default()));
    assert_eq!(device, host);
    assert_eq!(rows.load(std::sync::atomic::Ordering::Relaxed), 0);
}

#[test]
fn stop_strings_stop_before_the_grammar_does() {
    let engine = saying("abcdef").start(EngineConfig::default());
    let mut request = held("[a-z]{6}", 12);
    request.generation.stop = vec!["cd".into()];
    let found = ask(&engine, request);
    assert_eq!(found.choices[0].text, "ab");
    let stop = Some(StopMatch::Text("cd".into()));
    assert_eq!(found.choices[0].ended, Some((FinishReason::Stop, stop)));
}

#[test]
fn a_special_token_has_text_where_it_is_asked_for() {
    let tokenizer = demo_tokenizer();
    let special = (0..tokenizer.vocab_size() as TokenId)
        .find(|&token| tokenizer.is_special(token) && !tokenizer.eos_ids().contains(&token));
    let special = special.unwrap();
    let text = tokenizer.token_text(special).unwrap();
    let engine = saying("é").start(EngineConfig::default());
    for shown in [false, true] {
        let mut request = held("", 12);
        request.grammar = Some(compile(&Grammar::Lark {
            text: format!("start: \"é\" {} \"b\"", lark_token(special)),
            parts: Vec::new(),
        }));
        request.visible_special_tokens = if shown { vec![special] } else { Vec::new() };
        let found = ask(&engine, request);
        let expected = if shown {
            format!("é{text}b")
        } else {
            "éb".into()
        };
        assert_eq!(found.choices[0].text, expected);
        assert!(found.tokens().contains(&special));
    }
}

#[test]
fn what_cannot_be_kept_to_fails_and_nothing_else_does() {
    for on_device in [false, true] {
        check_what_cannot_be_kept_to(on_device);
    }
}

fn check_what_cannot_be_kept_to(on_device: bool) {
    let engine = start(saying("abc"), on_device);
    let mut impossible = held("abc", 12);
    let bytes = |token| demo_tokenizer().token_bytes(token).unwrap_or_default();
    let all = 0..demo_tokenizer().vocab_size() as TokenId;
    let with_b = all.filter(|&token| bytes(token).contains(&b'b'));
    let banned = with_b.map(|token| (token, f32::NEG_INFINITY)).collect();
    impossible.generation.sampling.logit_bias = banned;
    impossible.n = 2;
    let good = engine.handle().submit(held("[a-z]+", 12)).unwrap();
    let found = ask(&engine, impossible);
    let Some(EngineError::Invalid { field, reason }) = found.failed else {
        panic!("{found:?}");
    };
    assert_eq!(field, "grammar");
    assert!(reason.contains("logit bias"), "{reason}");
    assert_eq!(collect(good).choices[0].text, "abc");

    // A grammar of another vocabulary is refused at the door.
    let other = GrammarCompiler::new(demo_tokenizer(), 300);
    let mut request = held("a", 3);
    request.grammar = Some(other.compile(&Grammar::json_object()).unwrap());
    let refused = engine.handle().submit(request).unwrap_err();
    let EngineError::Invalid { field, reason } = refused else {
        panic!("{refused}");
    };
    assert_eq!(field, "grammar");
    assert!(reason.contains("300 tokens"), "{reason}");
    assert_eq!(engine.handle().stats().running, 0);
}
