//! LoRA adapters on a running engine: loaded, chosen by request, mixed, and forgotten.

use crate::invariance::{cpu, session_on};
use crate::scripted::{CONFIG, Scripted};
use crate::{collect, greedy};
use ferrum_engine::{BackendDispatch, Engine, EngineConfig, EngineError, Request, Session};
use ferrum_formats::{LoraFolder, ModelSource};
use ferrum_models::{KvLayout, Readback, RunnerConfig, read_model};
use ferrum_types::{AdapterId, TokenId};
use pollster::block_on;
use std::path::{Path, PathBuf};

const TOKENS: usize = 24;
const BLOCK: usize = 8;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures")
        .join(path)
}

pub(crate) fn adapter(name: &str) -> LoraFolder {
    LoraFolder::open(fixture("lora").join(name)).unwrap()
}

fn session(device: &BackendDispatch) -> Session {
    let model = read_model(ModelSource::open(fixture("models/llama3-tied")).unwrap()).unwrap();
    let config = RunnerConfig {
        context: 96,
        max_seqs: 6,
        max_tokens: 32,
        max_logit_rows: 6,
        kv_tokens: 6 * 96,
        kept_states: 0,
        layout: KvLayout::Paged { block_size: BLOCK },
        profile: false,
    };
    session_on(device, &model, config)
}

fn start_on(device: &BackendDispatch) -> Engine {
    let runner = session(device).into_runner();
    Engine::start(runner, None, EngineConfig::default()).unwrap()
}

fn start() -> Engine {
    start_on(&cpu())
}

fn request(adapter: Option<AdapterId>) -> Request {
    let prompt: Vec<TokenId> = (3..40).collect();
    let mut request = greedy(&prompt, TOKENS);
    request.adapter = adapter;
    request
}

fn answer(engine: &Engine, adapter: Option<AdapterId>) -> Vec<TokenId> {
    let answered = collect(engine.handle().submit(request(adapter)).unwrap());
    assert_eq!(answered.failed, None);
    answered.tokens().to_vec()
}

#[test]
fn requests_choose_adapters_whatever_runs_beside_them() {
    check_adapters(&cpu());
}

pub(crate) fn check_adapters(device: &BackendDispatch) {
    let engine = start_on(device);
    let handle = engine.handle();
    let plain = answer(&engine, None);
    let all = block_on(handle.load_adapter(adapter("llama-all"))).unwrap();
    let up = block_on(handle.load_adapter(adapter("llama-up"))).unwrap();
    // What is in the prefix cache was computed without them, and then with another.
    let (with_all, with_up) = (answer(&engine, Some(all)), answer(&engine, Some(up)));
    assert!(plain != with_all && plain != with_up && with_all != with_up);
    let wanted = [Some(all), None, Some(up), Some(all), Some(up), None];
    let streams = wanted.map(|id| handle.submit(request(id)).unwrap());
    for (stream, id) in streams.into_iter().zip(wanted) {
        let expected = match id {
            None => &plain,
            Some(id) if id == all => &with_all,
            Some(_) => &with_up,
        };
        let found = collect(stream);
        assert_eq!(found.tokens(), expected, "{id:?}");
        // Its own prompt is in the cache, but for the block that it writes to.
        let cached = found.usage.unwrap().cached_tokens;
        assert_eq!(cached, request(None).prompt.len() / BLOCK * BLOCK, "{id:?}");
    }
    let mut alone = session(device);
    alone.use_adapter(&adapter("llama-up")).unwrap();
    let prompt = request(None).prompt;
    alone.prefill(&prompt, Readback::GREEDY).unwrap();
    assert_eq!(alone.token(), Some(with_up[0]));
}

#[test]
fn an_adapter_is_forgotten_after_the_last_of_its_requests() {
    let engine = start();
    let handle = engine.handle();
    let first = block_on(handle.load_adapter(adapter("llama-all"))).unwrap();
    let expected = answer(&engine, Some(first));
    let running = handle.submit(request(Some(first))).unwrap();
    assert!(handle.unload_adapter(first) && !handle.unload_adapter(first));
    let gone = |result: Result<_, EngineError>| match result {
        Err(EngineError::Invalid { field, .. }) => assert_eq!(field, "adapter"),
        other => panic!("{other:?}"),
    };
    gone(handle.submit(request(Some(first))).map(|_| ()));
    gone(handle.submit(request(Some(AdapterId(99)))).map(|_| ()));
    assert_eq!(collect(running).tokens(), expected);
    // The same files again are another adapter: nothing of the first is in the cache.
    let second = block_on(handle.load_adapter(adapter("llama-all"))).unwrap();
    assert_ne!(first, second);
    let found = collect(handle.submit(request(Some(second))).unwrap());
    assert_eq!(
        (found.tokens(), found.usage.unwrap().cached_tokens),
        (&*expected, 0)
    );
}

#[test]
fn steps_go_on_while_an_adapter_is_loaded() {
    let (runner, gate) = Scripted::new(CONFIG).gated_adapters();
    let engine = runner.start(EngineConfig::default());
    let handle = engine.handle();
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| block_on(handle.load_adapter(adapter("llama-all"))));
        // Nobody lets it end before these have.
        for _ in 0..3 {
            assert_eq!(answer(&engine, None).len(), TOKENS);
        }
        assert!(!loading.is_finished());
        let early = handle.submit(request(Some(AdapterId(0))));
        assert!(early.is_err(), "nobody can name it yet");
        drop(gate);
        let id = loading.join().unwrap().unwrap();
        assert_eq!(answer(&engine, Some(id)).len(), TOKENS);
    });
}

#[test]
fn an_engine_that_ends_waits_for_no_adapter() {
    let (runner, gate) = Scripted::new(CONFIG).gated_adapters();
    let engine = runner.start(EngineConfig::default());
    let handle = engine.handle();
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| block_on(handle.load_adapter(adapter("llama-all"))));
        engine.shutdown();
        drop(gate);
        let refused = loading.join().unwrap();
        assert!(
            matches!(refused, Err(EngineError::ShuttingDown)),
            "{refused:?}"
        );
    });
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_and_harms_nobody() {
    let engine = start();
    let before = answer(&engine, None);
    match block_on(engine.handle().load_adapter(adapter("qwen3-patterns"))) {
        Err(EngineError::Invalid { field, reason }) => {
            assert_eq!(field, "adapter");
            assert!(reason.contains("for another model"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(answer(&engine, None), before);
    let handle = engine.handle();
    engine.shutdown();
    let refused = block_on(handle.load_adapter(adapter("llama-all")));
    assert!(
        matches!(refused, Err(EngineError::ShuttingDown)),
        "{refused:?}"
    );
}
