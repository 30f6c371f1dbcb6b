//! What a request may forbid or ask for: alone, in batches, with drafts and under a grammar.

use crate::grammar::compile;
use crate::scripted::{CONFIG, Scripted};
use crate::{Answered, collect, demo_tokenizer, encode, greedy, sampled};
use ferrum_engine::engine::StopMatch;
use ferrum_engine::grammar::Grammar;
use ferrum_engine::{Engine, EngineConfig, EngineError, FinishReason, Request, SamplingParams};
use ferrum_types::TokenId;

/// A model that says this, and its own end after it, again and again.
fn saying(text: &str) -> (Engine, usize) {
    let mut tokens = encode(text);
    let len = tokens.len();
    tokens.push(end());
    let runner = Scripted::new(CONFIG).saying(2, tokens);
    (runner.start(EngineConfig::default()), len)
}

fn end() -> TokenId {
    demo_tokenizer().eos_ids()[0]
}

fn ending(max_tokens: usize) -> Request {
    let mut request = greedy(&[1, 2], max_tokens);
    request.generation.stop_tokens = vec![end()];
    request
}

fn ask(engine: &Engine, request: Request) -> Answered {
    collect(engine.handle().submit(request).unwrap())
}

#[test]
fn an_answer_has_its_least_number_of_tokens() {
    let (engine, len) = saying("one two");
    assert_eq!(ask(&engine, ending(20)).tokens().len(), len);
    // With drafts, several rows of one step are on both sides of the limit.
    for (draft_tokens, n) in [(0, 1), (6, 1), (0, 3), (6, 3)] {
        for least in [0, len, len + 1, len + 4, 2 * len] {
            let mut request = ending(40);
            request.generation.min_tokens = least;
            request.draft_tokens = draft_tokens;
            request.n = n;
            let found = ask(&engine, request);
            for choice in &found.choices {
                let stop = (FinishReason::Stop, Some(StopMatch::Token(end())));
                assert_eq!(choice.ended, Some(stop), "{least}");
                assert!(choice.tokens.len() >= least, "{least}: {choice:?}");
                assert!(!choice.tokens.contains(&end()));
            }
        }
    }
}

#[test]
fn a_stop_string_does_not_count_before_the_least_number_of_tokens() {
    let (engine, len) = saying("one two three");
    let answer = |least: usize| {
        let mut request = ending(3 * len + 2);
        request.generation.stop = vec!["two".into()];
        request.generation.min_tokens = least;
        ask(&engine, request).choices[0].clone()
    };
    let first = answer(0);
    assert_eq!(first.text.trim(), "one");
    // The first one is passed over and is text.
    let second = answer(len + 1);
    assert!(second.text.contains("two three"), "{second:?}");
    let met = (FinishReason::Stop, Some(StopMatch::Text("two".into())));
    assert_eq!(second.ended, Some(met.clone()));
    assert_eq!(first.ended, Some(met));
}

#[test]
fn a_stop_string_may_stay_in_the_text() {
    let (engine, _) = saying("one two three");
    for (included, expected) in [(false, "one t"), (true, "one two th")] {
        let mut request = ending(20);
        request.generation.stop = vec!["wo th".into()];
        request.generation.include_stop = included;
        let choice = ask(&engine, request).choices[0].clone();
        assert_eq!(choice.text.trim_start(), expected);
        let met = Some(StopMatch::Text("wo th".into()));
        assert_eq!(choice.ended, Some((FinishReason::Stop, met)));
    }
}

#[test]
fn special_tokens_may_be_shown() {
    let (engine, len) = saying("one two");
    let text = demo_tokenizer().token_text(end()).unwrap();
    let answer = |shown: bool| {
        // The end is no stop here.
        let mut request = greedy(&[1, 2], 2 * len + 1);
        request.generation.show_special_tokens = shown;
        ask(&engine, request).choices[0].text.clone()
    };
    assert!(!answer(false).contains(&text));
    let shown = answer(true);
    assert_eq!(shown.replacen(&text, "", 1), answer(false), "{shown}");
}

#[test]
fn bad_words_are_not_completed() {
    let said = "one two three one two three";
    let tokenizer = demo_tokenizer();
    let words = SamplingParams::bad_word_tokens(&tokenizer, &["two three", "  two three", ""]);
    let words = words.unwrap();
    assert!((1..=2).contains(&words.len()) && words.iter().all(|w| w.len() > 1));
    let (engine, len) = saying(said);
    let mut answers = Vec::new();
    for (draft_tokens, beside) in [(0, 0), (5, 0), (0, 5), (5, 5)] {
        let mut request = greedy(&[1, 2], len);
        request.generation.sampling.bad_words = words.clone();
        request.draft_tokens = draft_tokens;
        let others: Vec<_> = (0..beside)
            .map(|i| sampled(&[1, 2 + i], 20, i.into()))
            .map(|request| engine.handle().submit(request).unwrap())
            .collect();
        let found = ask(&engine, request);
        others.into_iter().for_each(|other| drop(collect(other)));
        let tokens = found.tokens().to_vec();
        let has = |word: &Vec<TokenId>| tokens.windows(word.len()).any(|at| at == word);
        assert!(!words.iter().any(has), "{found:?}");
        answers.push(tokens);
    }
    assert!(answers.iter().all(|a| *a == answers[0]));
    let plain = ask(&engine, greedy(&[1, 2], len));
    assert!(plain.choices[0].text.contains("two three"));
}

#[test]
fn only_allowed_tokens_are_chosen() {
    let (engine, len) = saying("one two three");
    let allowed: Vec<TokenId> = encode("two one");
    for (temperature, draft_tokens) in [(0.0, 0), (0.0, 4), (1.0, 0), (1.0, 4)] {
        let mut request = ending(3 * len);
        request.n = 2;
        request.draft_tokens = draft_tokens;
        request.generation.sampling.temperature = temperature;
        request.generation.sampling.allowed_tokens = Some(allowed.clone().into());
        for choice in ask(&engine, request).choices {
            assert!(choice.tokens.iter().all(|t| allowed.contains(t)));
            // What would end the answer is not on the list.
            assert_eq!(choice.ended, Some((FinishReason::Length, None)));
        }
    }
}

#[test]
fn a_request_that_leaves_no_token_fails_alone() {
    let (engine, _) = saying("one");
    let mut request = ending(8);
    request.generation.min_tokens = 1;
    request.generation.sampling.allowed_tokens = Some([end()].into());
    match ask(&engine, request).failed {
        Some(EngineError::Invalid { field, .. }) => assert_eq!(field, "sampling"),
        other => panic!("{other:?}"),
    }
    assert!(ask(&engine, ending(8)).failed.is_none());
    assert_eq!(engine.handle().stats().nan_failures, 0);
}

#[test]
fn a_grammar_goes_before_the_least_number_of_tokens() {
    for draft_tokens in [0, 4] {
        let (engine, _) = saying("abc");
        let held = |expression: &str, least| {
            let mut request = ending(20);
            request.grammar = Some(compile(&Grammar::Regex(expression.into())));
            request.generation.min_tokens = least;
            request.draft_tokens = draft_tokens;
            ask(&engine, request)
        };
        // It may go on, and has to.
        let longer = held("[a-z]+", 8);
        assert!(longer.tokens().len() >= 8, "{longer:?}");
        // It cannot.
        let whole = held("abc", 8);
        assert_eq!(whole.choices[0].text, "abc");
        assert_eq!(whole.reason(), FinishReason::Stop);
        // What it needs is forbidden.
        let mut request = ending(20);
        request.grammar = Some(compile(&Grammar::Regex("abc".into())));
        let outside: Vec<TokenId> = encode("xyz");
        request.generation.sampling.allowed_tokens = Some(outside.into());
        match ask(&engine, request).failed {
            Some(EngineError::Invalid { field, .. }) => assert_eq!(field, "grammar"),
            other => panic!("{other:?}"),
        }
    }
}
