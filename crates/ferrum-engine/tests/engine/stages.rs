//! A runner of several stages under the engine: batches, chunks, the prefix cache, preemption, drafts, adapters and
//! offloaded blocks give what one device gives, to the bit.

use crate::invariance::{ROOMY, all_at_once, assert_same, session, start, submit_all};
use crate::{collect, demo, demo_tokenizer, greedy};
use ferrum_engine::{
    BackendKind, BackendOptions, Engine, EngineConfig, EngineOffload, KvDtype, KvOffload,
    OffloadConfig, Placement, Session,
};
use ferrum_formats::{LoraFolder, ModelSource};
use ferrum_models::{Model, RunnerConfig, read_model};
use pollster::block_on;
use std::path::Path;

fn staged(model: &Model, layers: &str, config: RunnerConfig) -> Session {
    let options = BackendOptions {
        threads: Some(2),
        ..BackendOptions::default()
    };
    let layers = layers.parse().unwrap();
    let placement = Placement::for_model(BackendKind::Auto, Some(&layers), model, options).unwrap();
    let kv = KvDtype::for_model(model);
    placement.load(model, config, kv, &mut |_, _| ()).unwrap()
}

fn start_staged(model: &Model, config: RunnerConfig, settings: EngineConfig) -> Engine {
    let last = model.spec.layers.len() - 1;
    let layers = format!("cpu:0,cpu:1-{last}");
    let runner = staged(model, &layers, config).into_runner();
    Engine::start(runner, Some(demo_tokenizer()), settings).unwrap()
}

#[test]
fn answers_are_those_of_one_stage() {
    let model = demo();
    let expected = all_at_once(&start(&model, ROOMY, EngineConfig::default()));

    let roomy = start_staged(&model, ROOMY, EngineConfig::default());
    assert_same(&all_at_once(&roomy), &expected, "on stages");
    assert_same(&all_at_once(&roomy), &expected, "with a warm cache");
    let drafted = submit_all(&roomy, |request| request.draft_tokens = 6);
    assert_same(&drafted, &expected, "with drafts");
    let stats = roomy.handle().stats();
    assert!(
        stats.cached_tokens > 100 && stats.accepted_tokens > 0,
        "{stats:?}"
    );

    let tight = RunnerConfig {
        kv_tokens: 176,
        max_tokens: 20,
        ..ROOMY
    };
    // Blocks of all stages leave the devices and come back.
    let store = OffloadConfig {
        ram_bytes: 1 << 30,
        dir: None,
        dir_bytes: None,
    };
    let settings = EngineConfig {
        offload: Some(EngineOffload {
            store: KvOffload::open(&store).unwrap(),
            model: "demo".into(),
        }),
        ..EngineConfig::default()
    };
    let preempted = start_staged(&model, tight, settings);
    assert_same(&all_at_once(&preempted), &expected, "preempted");
    let stats = preempted.handle().stats();
    assert!(stats.preemptions > 0, "{stats:?}");
}

#[test]
fn adapters_run_beside_every_stage() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let source = ModelSource::open(fixtures.join("models/llama3-tied")).unwrap();
    let model = read_model(source).unwrap();
    let adapter = || LoraFolder::open(fixtures.join("lora/llama-all")).unwrap();
    let tokens = |session: Session, adapted: bool| {
        let engine = Engine::start(session.into_runner(), None, EngineConfig::default()).unwrap();
        let mut request = greedy(&[5, 9, 2, 77, 31], 12);
        if adapted {
            let handle = engine.handle();
            request.adapter = Some(block_on(handle.load_adapter(adapter())).unwrap());
        }
        let answer = collect(engine.handle().submit(request).unwrap());
        answer.tokens().to_vec()
    };
    let two = || staged(&model, "cpu:0-1,cpu:2-4", ROOMY);
    let expected = tokens(session(&model, ROOMY), true);
    assert_eq!(tokens(two(), true), expected);
    assert_ne!(tokens(two(), false), expected);
}

/// Keys and values of other devices are not taken for those of this one.
#[test]
fn kept_keys_and_values_name_their_stages() {
    let model = demo();
    let last = model.spec.layers.len() - 1;
    let alone = session(&model, ROOMY);
    let two = staged(&model, &format!("cpu:0,reference:1-{last}"), ROOMY);
    assert_eq!(alone.placement(), "cpu");
    assert_eq!(two.placement(), format!("cpu:0,reference:1-{last}"));
    assert_ne!(alone.kv_key("demo"), two.kv_key("demo"));
    assert_eq!(alone.kv_bytes(9), two.kv_bytes(9));
}
