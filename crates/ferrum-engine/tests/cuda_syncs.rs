//! How often the host waits for a CUDA device, under the stand-in driver: a program of its own, because the driver counts for a
//! whole process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_cuda_emulator::{graph_replays, host_syncs};
use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, Engine, EngineConfig, GenerationParams, KvDtype,
    Request,
};
use ferrum_formats::ModelSource;
use ferrum_models::{KvLayout, RunnerConfig, read_model};
use ferrum_test_support::skip;
use std::path::Path;

const TOKENS: usize = 64;

const CONFIG: RunnerConfig = RunnerConfig {
    context: 96,
    max_seqs: 2,
    max_tokens: 48,
    max_logit_rows: 32,
    kv_tokens: 2 * 96,
    kept_states: 0,
    layout: KvLayout::Grouped { block_size: 8 },
    profile: false,
};

/// Of a captured step the host waits for the tokens alone: routing, experts and choices stay on the device.
#[test]
fn a_step_is_waited_for_once() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        skip(reason);
        return;
    }
    let device = BackendDispatch::from_kind(BackendKind::Cuda, BackendOptions::default()).unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    for name in ["qwen3", "qwen3-moe", "llama-gptq4"] {
        let model = read_model(ModelSource::open(fixtures.join(name)).unwrap()).unwrap();
        let kv = KvDtype::for_model(&model);
        let session = device.load(&model, CONFIG, kv, &mut |_, _| ()).unwrap();
        let engine = Engine::start(session.into_runner(), None, EngineConfig::default()).unwrap();
        let answer = || {
            let generation = GenerationParams {
                max_tokens: TOKENS,
                ..GenerationParams::default()
            };
            let request = Request::new(vec![3, 1, 4, 1, 5], generation);
            let mut events = engine.handle().submit(request).unwrap();
            while events.blocking_next().is_some() {}
        };
        // Loads kernels, captures steps, and takes the memory that they need.
        answer();
        let before = (graph_replays(), host_syncs());
        answer();
        let (steps, waits) = (graph_replays() - before.0, host_syncs() - before.1);
        assert!(
            steps as usize >= TOKENS / 2,
            "{name}: {steps} captured steps"
        );
        // Whether pinned memory is free again is asked without waiting, and sometimes it is not.
        let most = steps + steps / 2;
        println!("{name}: {waits} waits in {steps} steps");
        // And some are counted at all.
        assert!(
            waits >= steps / 2 && waits <= most,
            "{name}: {waits} waits in {steps} steps"
        );
    }
}
