//! The choice of a backend at run time, and what each choice gives.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_engine::{BackendDispatch, BackendKind, BackendOptions, KvDtype, Session};
use ferrum_formats::ModelSource;
use ferrum_kernels::KvF32;
use ferrum_models::{Model, Readback, RunnerConfig, WeightPolicy, memory_plan, read_model};
use ferrum_test_support::skip;
use ferrum_types::{Error, TokenId};
use std::path::Path;

fn model(name: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/models")
        .join(name);
    read_model(ModelSource::open(path).unwrap()).unwrap()
}

fn open(kind: BackendKind) -> Option<BackendDispatch> {
    match BackendDispatch::from_kind(kind, BackendOptions::default()) {
        Ok(device) => Some(device),
        Err(Error::NoDevice { .. }) => {
            skip(format_args!("no {kind} device"));
            None
        }
        Err(e) => panic!("{kind}: {e}"),
    }
}

fn session(kind: BackendKind, model: &Model, kv: KvDtype) -> Option<Session> {
    let config = RunnerConfig {
        max_tokens: 16,
        ..RunnerConfig::single(64)
    };
    Some(open(kind)?.load(model, config, kv, &mut |_, _| ()).unwrap())
}

fn greedy(session: &mut Session, prompt: &[TokenId], steps: usize) -> Vec<TokenId> {
    session.prefill(prompt, Readback::GREEDY).unwrap();
    let mut out = Vec::new();
    for _ in 0..steps {
        let next = session.token().unwrap();
        session.decode(next, Readback::GREEDY).unwrap();
        out.push(next);
    }
    out
}

#[test]
fn every_backend_and_cache_gives_the_same_greedy_tokens() {
    let model = model("qwen3");
    let prompt = [5, 9, 2, 77, 31];
    let mut first = session(BackendKind::Reference, &model, KvDtype::F32).unwrap();
    let expected = greedy(&mut first, &prompt, 20);
    for kind in [BackendKind::Cpu, BackendKind::Auto, BackendKind::Vulkan] {
        if let Some(mut session) = session(kind, &model, KvDtype::F32) {
            assert_eq!(greedy(&mut session, &prompt, 20), expected, "{kind}");
        }
    }
    for &(name, kv) in KvDtype::NAMES {
        let [expected, found] = [BackendKind::Reference, BackendKind::Cpu]
            .map(|kind| greedy(&mut session(kind, &model, kv).unwrap(), &prompt, 20));
        assert_eq!(found, expected, "{name}");
        let on_gpu = matches!(kv, KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16);
        if on_gpu && let Some(mut session) = session(BackendKind::Gpu, &model, kv) {
            assert_eq!(
                greedy(&mut session, &prompt, 20),
                expected,
                "{name} on a GPU"
            );
        }
    }
}

#[test]
fn a_cache_the_backend_lacks_is_refused_with_a_hint() {
    let model = model("qwen3");
    let Some(device) = open(BackendKind::Vulkan) else {
        return;
    };
    let result = device.load(
        &model,
        RunnerConfig::single(64),
        KvDtype::Int8,
        &mut |_, _| (),
    );
    let error = result.err().unwrap();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(
        error.to_string().contains("hint: use --kv-dtype"),
        "{error}"
    );
}

#[test]
fn the_memory_plan_is_that_of_the_device() {
    let config = RunnerConfig::single(64);
    for name in ["qwen3", "llama-gptq4", "llama-quantized/model-q4_0.gguf"] {
        let model = model(name);
        let in_f32 = memory_plan::<KvF32>(&model, WeightPolicy::floats(), &config);
        for kind in [
            BackendKind::Reference,
            BackendKind::Cpu,
            BackendKind::Vulkan,
        ] {
            let Some(device) = open(kind) else { continue };
            let plan = device.memory_plan(&model, &config, KvDtype::F32);
            let kept = memory_plan::<KvF32>(&model, device.weight_policy(&model), &config);
            assert_eq!(plan, kept, "{name} on {kind}");
            // No model of this size is kept in blocks, and only the CPU keeps any.
            assert_eq!(plan, in_f32, "{name} on {kind}");
        }
    }
}

#[test]
fn auto_never_takes_a_software_gpu() {
    let options = BackendOptions::default();
    let any = BackendDispatch::from_kind(BackendKind::Auto, options).unwrap();
    let model = model("llama3-tied");
    let fit = BackendDispatch::for_model(BackendKind::Auto, &model, options).unwrap();
    for device in [any, fit] {
        assert!(!device.info().software, "{:?}", device.info());
    }
}

#[test]
fn a_session_keeps_what_two_prompts_share() {
    let model = model("llama3-tied");
    let mut warm = session(BackendKind::Cpu, &model, KvDtype::F32).unwrap();
    let long: Vec<TokenId> = (1..40).collect();
    let wanted = Readback::Logits;
    let other = [&long[..30], &[200, 201, 202]].concat();
    assert_eq!(warm.prefill(&long, wanted).unwrap(), 39);
    assert_eq!(warm.prefill(&other, wanted).unwrap(), 3);
    let kept = warm.logits().to_vec();
    let mut cold = session(BackendKind::Cpu, &model, KvDtype::F32).unwrap();
    cold.prefill(&other, wanted).unwrap();
    assert_eq!(cold.logits(), kept, "bit for bit");
    // The whole prompt is in the cache: its last token is computed again for its logits.
    assert_eq!(cold.prefill(&other, wanted).unwrap(), 1);
    assert_eq!(cold.logits(), kept);
}

#[test]
fn length_dependent_rope_shares_nothing() {
    let model = model("llama-dynamic");
    let mut session = session(BackendKind::Cpu, &model, KvDtype::F32).unwrap();
    let long: Vec<TokenId> = (1..25).collect();
    session.prefill(&long, Readback::Logits).unwrap();
    assert_eq!(session.prefill(&long[..20], Readback::Logits).unwrap(), 20);
}

#[test]
fn the_context_is_a_limit_and_not_a_crash() {
    let model = model("llama2");
    let mut session = session(BackendKind::Cpu, &model, KvDtype::F16).unwrap();
    let prompt = vec![1; 64];
    session.prefill(&prompt, Readback::Logits).unwrap();
    let full = session.decode(2, Readback::Logits).unwrap_err();
    assert!(
        matches!(
            full,
            Error::ContextOverflow {
                requested: 65,
                capacity: 64
            }
        ),
        "{full}"
    );
    assert!(session.prefill(&[1; 65], Readback::Logits).is_err());
    assert!(session.prefill(&[], Readback::Logits).is_err());
    assert!(session.prefill(&[9999], Readback::Logits).is_err());
    // Still of use after all that.
    session.prefill(&[1, 2, 3], Readback::Logits).unwrap();
}

#[test]
fn names_of_kinds_are_read_and_listed() {
    for (name, kind) in BackendKind::NAMES {
        assert_eq!(name.parse::<BackendKind>().unwrap(), *kind);
        assert_eq!(&kind.to_string(), name);
    }
    let error = "opengl".parse::<BackendKind>().unwrap_err();
    assert!(error.contains("auto, cpu, gpu, cuda"), "{error}");
}
