//! What is refused before anything is kept for it.

use crate::scripted::{CONFIG, Scripted};
use crate::{collect, greedy};
use ferrum_engine::{Engine, EngineConfig, EngineError, Request, StepRunner};
use std::time::Duration;

#[test]
fn hostile_requests_are_refused_by_name() {
    let engine = Scripted::new(CONFIG).start(EngineConfig::default());
    type Change = fn(&mut Request);
    let cases: Vec<(&str, Change)> = vec![
        ("prompt: it has no token", |r| r.prompt.clear()),
        ("prompt: token 4000000 is outside", |r| {
            r.prompt.push(4_000_000)
        }),
        ("n: found 0", |r| r.n = 0),
        ("n: found 129, expected at most 128", |r| r.n = 129),
        ("stop: found 17", |r| {
            r.generation.stop = vec!["x".into(); 17]
        }),
        ("stop: found 1025 bytes", |r| {
            r.generation.stop = vec!["x".repeat(1025)];
        }),
        ("stop tokens: found 1025", |r| {
            r.generation.stop_tokens = vec![1; 1025];
        }),
        ("logprobs: found 21", |r| r.logprobs = Some(21)),
        ("prompt logprobs: found 21", |r| {
            r.prompt_logprobs = Some(21)
        }),
        ("logit bias: token 4000000", |r| {
            r.generation.sampling.logit_bias = vec![(4_000_000, 1.0)];
        }),
        ("sampling: logit-bias: found 1025 entries", |r| {
            r.generation.sampling.logit_bias = vec![(1, 1.0); 1025];
        }),
        ("min tokens: found 5, expected at most max_tokens", |r| {
            r.generation.min_tokens = 5
        }),
        ("bad words: token 4000000", |r| {
            r.generation.sampling.bad_words = vec![vec![1, 4_000_000]];
        }),
        ("sampling: bad-words: found 1025", |r| {
            r.generation.sampling.bad_words = vec![vec![1]; 1025];
        }),
        ("allowed tokens: token 4000000", |r| {
            r.generation.sampling.allowed_tokens = Some([1, 4_000_000].into());
        }),
        ("allowed tokens: found 5000, the vocabulary has", |r| {
            r.generation.sampling.allowed_tokens = Some(vec![1; 5000].into());
        }),
        ("sampling: top-p: found 2", |r| {
            r.generation.sampling.top_p = 2.0
        }),
    ];
    for (words, change) in cases {
        let mut request = greedy(&[1, 2, 3], 4);
        change(&mut request);
        let error = engine.handle().submit(request).unwrap_err();
        assert!(matches!(error, EngineError::Invalid { .. }), "{error}");
        assert!(
            error.to_string().contains(words),
            "{error}, expected {words}"
        );
    }
    let long = engine.handle().submit(greedy(&[1; 513], 1)).unwrap_err();
    let expected = EngineError::ContextOverflow {
        requested: 513,
        capacity: 512,
    };
    assert_eq!(long, expected);
    assert_eq!(
        engine.handle().stats().waiting,
        0,
        "no place in the queue is lost"
    );
    // Large wishes that can be met as far as there is room.
    let mut request = greedy(&[1; 510], usize::MAX);
    request.n = 128;
    request.timeout = Some(Duration::MAX);
    let answered = collect(engine.handle().submit(request).unwrap());
    assert!(answered.choices.iter().all(|c| c.tokens.len() == 2));
}

#[test]
fn what_log_probabilities_are_gathered_has_a_bound() {
    let config = ferrum_models::RunnerConfig {
        context: 1 << 20,
        kv_tokens: 1 << 20,
        ..CONFIG
    };
    let engine = Scripted::new(config).start(EngineConfig::default());
    let ask = |change: &dyn Fn(&mut Request)| {
        let mut request = greedy(&[1, 2, 3], 1 << 19);
        change(&mut request);
        // Whoever is not refused is cancelled at once.
        engine.handle().submit(request).map(drop)
    };
    let within: [fn(&mut Request); 3] = [
        |r| r.logprobs = Some(7),
        |r| (r.n, r.generation.max_tokens, r.logprobs) = (8, 1 << 16, Some(7)),
        |r| (r.n, r.prompt_logprobs) = (128, Some(20)),
    ];
    for (case, change) in within.iter().enumerate() {
        assert_eq!(ask(change), Ok(()), "{case}");
    }
    let beyond: [fn(&mut Request); 3] = [
        |r| r.logprobs = Some(8),
        |r| (r.n, r.logprobs) = (128, Some(0)),
        |r| (r.prompt, r.prompt_logprobs) = (vec![1; 1 << 19], Some(8)),
    ];
    for (case, change) in beyond.iter().enumerate() {
        let error = ask(change).unwrap_err().to_string();
        assert!(
            error.contains("log-probabilities, expected at most 4194304"),
            "{case}: {error}"
        );
    }
}

#[test]
fn without_a_tokenizer_there_is_no_text_to_stop_at() {
    let runner = Box::new(Scripted::new(CONFIG));
    let runner: Box<dyn StepRunner> = runner;
    let engine = Engine::start(runner, None, EngineConfig::default()).unwrap();
    let mut request = greedy(&[1], 3);
    let answered = collect(engine.handle().submit(request.clone()).unwrap());
    assert_eq!(answered.choices[0].text, "");
    assert_eq!(answered.tokens().len(), 3);
    request.generation.stop = vec!["x".into()];
    assert!(engine.handle().submit(request).is_err());
}
