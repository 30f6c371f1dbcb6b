//! Which devices compute which layers: what `--layers` may say, and what it gives.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_engine::{
    Activations, BackendDispatch, BackendKind, BackendOptions, GpuLayers, KvDtype, MemoryShare,
    Placement, Session, StageList,
};
use ferrum_formats::ModelSource;
use ferrum_models::{Model, Readback, RunnerConfig, read_model};
use ferrum_test_support::skip;
use ferrum_types::{Error, Result, SrcDtype, TokenId};
use std::path::Path;

fn model(name: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/models")
        .join(name);
    read_model(ModelSource::open(path).unwrap()).unwrap()
}

fn place(layers: &str, model: &Model) -> Result<Placement> {
    let layers: StageList = layers.parse().unwrap();
    let options = BackendOptions::default();
    Placement::for_model(BackendKind::Auto, Some(&layers), model, options)
}

fn config() -> RunnerConfig {
    RunnerConfig {
        max_tokens: 16,
        ..RunnerConfig::single(64)
    }
}

fn greedy(mut session: Session) -> Vec<TokenId> {
    session
        .prefill(&[5, 9, 2, 77, 31], Readback::GREEDY)
        .unwrap();
    let mut out = Vec::new();
    for _ in 0..20 {
        let next = session.token().unwrap();
        session.decode(next, Readback::GREEDY).unwrap();
        out.push(next);
    }
    out
}

#[test]
fn lists_of_stages_are_read() {
    for (text, shown) in [
        ("cpu:0-13,vulkan:14-27", "cpu:0-13,vulkan:14-27"),
        (
            " cpu:0 , vulkan1:1-2,REFERENCE:3",
            "cpu:0-0,vulkan1:1-2,reference:3-3",
        ),
        ("gpu12:0-4", "gpu12:0-4"),
    ] {
        let list: StageList = text.parse().unwrap();
        assert_eq!(list.to_string(), shown);
        assert_eq!(shown.parse::<StageList>().unwrap(), list);
    }
    for (text, expected) in [
        ("", "found \"\", expected BACKEND:FIRST-LAST"),
        (
            "cpu",
            "found \"cpu\", expected BACKEND:FIRST-LAST, such as cpu:0-13",
        ),
        ("cpu:0-1,", "found \"\", expected BACKEND:FIRST-LAST"),
        (
            "tpu:0-3",
            "unknown backend \"tpu\", expected one of: auto, cpu",
        ),
        (":0-3", "unknown backend \"\""),
        (
            "auto:0-3",
            "expected the name of a backend, which auto is not",
        ),
        ("cpu1:0-3", "expected cpu without a number"),
        (
            "vulkan99999999999999999999:0",
            "expected a device number that exists",
        ),
        (
            "cpu:0-x",
            "found \"cpu:0-x\", expected numbers of layers from 0 on",
        ),
        ("cpu:", "expected numbers of layers from 0 on"),
        ("cpu:-1", "expected numbers of layers from 0 on"),
        ("cpu:0-1-2", "expected numbers of layers from 0 on"),
        ("cpu:0-99999999999999999999", "expected numbers of layers"),
        (
            "cpu:3-1",
            "expected a first layer that is not behind the last one",
        ),
        (
            "cpu:1-3",
            "layers 0 to 0 come before cpu:1-3 and are in no stage",
        ),
        (
            "cpu:0-3,vulkan:6-8",
            "layers 4 to 5 come before vulkan:6-8 and are in no stage",
        ),
        (
            "cpu:0-3,vulkan:2-8",
            "layers 2 to 3 of vulkan:2-8 are in the stage before it, expected layers from 4 on",
        ),
        (
            "vulkan:14-27,cpu:0-13",
            "layers 0 to 13 come before vulkan:14-27",
        ),
    ] {
        let found = text.parse::<StageList>().unwrap_err();
        assert!(found.contains(expected), "{text}: {found}");
    }
}

#[test]
fn lists_are_held_against_the_model() {
    let model = model("qwen3");
    for (text, expected) in [
        (
            "cpu:0-3",
            "found cpu:0-3, and the model has 3 layers, 0 to 2",
        ),
        (
            "cpu:0,cpu:1",
            "layers 2 to 2 are in no stage of cpu:0-0,cpu:1-1, and the model has 3 layers, 0 to 2",
        ),
    ] {
        let found = place(text, &model).err().unwrap().to_string();
        assert!(found.contains(expected), "{found}");
    }
    let missing = place("cpu:0,cuda99:1-2", &model).err().unwrap();
    assert!(matches!(missing, Error::NoDevice { .. }), "{missing}");
}

#[test]
fn stages_give_the_tokens_of_one_device() {
    let model = model("qwen3");
    let alone = BackendDispatch::from_kind(BackendKind::Cpu, BackendOptions::default()).unwrap();
    for &(name, kv) in KvDtype::NAMES {
        let expected = greedy(alone.load(&model, config(), kv, &mut |_, _| ()).unwrap());
        for layers in [
            "cpu:0,cpu:1-2",
            "cpu:0,reference:1,cpu:2",
            "reference:0-1,cpu:2",
        ] {
            let placement = place(layers, &model).unwrap();
            let session = placement.load(&model, config(), kv, &mut |_, _| ());
            assert_eq!(greedy(session.unwrap()), expected, "{layers} with {name}");
        }
        for layers in ["cpu:0-1,vulkan:2", "vulkan:0,cpu:1-2"] {
            let placement = match place(layers, &model) {
                Err(Error::NoDevice { .. }) => {
                    skip("no Vulkan device");
                    continue;
                }
                other => other.unwrap(),
            };
            let session = placement.load(&model, config(), kv, &mut |_, _| ());
            if matches!(kv, KvDtype::Fp8 | KvDtype::Int8) {
                // One stage without such a cache is enough.
                let refused = session.err().unwrap();
                assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
                continue;
            }
            assert_eq!(greedy(session.unwrap()), expected, "{layers} with {name}");
        }
    }
}

#[test]
fn a_plan_is_that_of_each_device() {
    let model = model("qwen3");
    let (config, kv) = (config(), KvDtype::F16);
    let placement = place("cpu:0,reference:1,cpu:2", &model).unwrap();
    assert_eq!(placement.to_string(), "cpu:0,reference:1,cpu:2");
    let stages = placement.stage_plans(&model, &config, kv);
    let devices = placement.device_plans(&model, &config, kv);
    assert_eq!((stages.len(), devices.len()), (3, 2));
    assert_eq!(devices[0].0.backend, "cpu");
    assert_eq!(devices[0].1, stages[0].and(stages[2]));
    assert_eq!(devices[1].1, stages[1]);
    let all = placement.memory_plan(&model, &config, kv);
    assert_eq!(all, devices[0].1.and(devices[1].1));
    let alone = BackendDispatch::from_kind(BackendKind::Cpu, BackendOptions::default()).unwrap();
    let whole = alone.memory_plan(&model, &config, kv);
    assert_eq!((all.kv, all.kv_per_token), (whole.kv, whole.kv_per_token));
    let alone = Placement::on(alone, &model);
    assert_eq!(alone.memory_plan(&model, &config, kv), whole);
    assert_eq!(
        (alone.to_string(), alone.is_whole()),
        ("cpu".to_owned(), true)
    );
}

fn with_gpu_layers(
    layers: &str,
    kind: BackendKind,
    model: &Model,
    gpu_memory_utilization: f64,
) -> Result<Placement> {
    let share = MemoryShare::alone(gpu_memory_utilization);
    let layers: GpuLayers = layers.parse().unwrap();
    Placement::with_gpu_layers(layers, kind, model, share, BackendOptions::default())
}

#[test]
fn gpu_layers_are_the_last_ones() {
    let model = model("qwen3");
    for text in ["", "-1", "half"] {
        assert!(text.parse::<GpuLayers>().is_err(), "{text}");
    }
    for text in ["auto", "all", "7"] {
        assert_eq!(text.parse::<GpuLayers>().unwrap().to_string(), text);
    }
    let no_gpu = with_gpu_layers("1", BackendKind::Cpu, &model, 0.9);
    let error = no_gpu.err().unwrap().to_string();
    assert!(error.contains("--backend cpu, which is no GPU"), "{error}");

    if let Err(reason) = ferrum_cuda_emulator::load() {
        return skip(reason);
    }
    let cuda = |layers: &str, part: f64| with_gpu_layers(layers, BackendKind::Cuda, &model, part);
    for (layers, expected) in [
        ("0", "cpu"),
        ("1", "cpu:0-1,cuda:2"),
        ("2", "cpu:0,cuda:1-2"),
        ("3", "cuda"),
        ("all", "cuda"),
        ("auto", "cuda"),
    ] {
        assert_eq!(cuda(layers, 0.9).unwrap().to_string(), expected, "{layers}");
    }
    // As many as the memory holds with a cache of the model's context.
    let run = RunnerConfig::single(model.spec.context_length.min(8192));
    let kv = KvDtype::for_model(&model);
    let two = cuda("2", 0.9).unwrap();
    let plan = two.stage_plans(&model, &run, kv)[1];
    let memory = two.last_device().info().memory.unwrap();
    let needed = (plan.weights + plan.kv + plan.scratch) as f64 / memory.total as f64;
    for (part, expected) in [
        (needed * 1.001, "cpu:0,cuda:1-2"),
        (needed * 0.999, "cpu:0-1,cuda:2"),
        (needed * 0.01, "cpu"),
    ] {
        let found = cuda("auto", part).unwrap();
        assert_eq!(found.to_string(), expected, "{part} of {memory:?}");
    }
}

/// Logits of each position of a text, with a cache of f32.
fn logits(placement: &Placement, model: &Model) -> Vec<f32> {
    let session = placement.load(model, config(), KvDtype::F32, &mut |_, _| ());
    let tokens: Vec<_> = (0..24).map(|at| at * 11 % 97).collect();
    let mut all = Vec::new();
    let scored = session.unwrap().score(&tokens, &mut |_, rows| {
        all.extend_from_slice(rows);
        Ok(())
    });
    scored.unwrap();
    all
}

/// The largest difference between logits, as a part of the range that they have.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().copied().fold(f32::MIN, f32::max);
    let least = expected.iter().copied().fold(f32::MAX, f32::min);
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f32::max) / (most - least)
}

/// With any number of layers on CUDA, logits are those of the CPU but for activations of bf16, which have 8 bits.
#[test]
fn layers_on_a_gpu_give_the_logits_of_the_cpu() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        return skip(reason);
    }
    for name in [
        "qwen3",
        "llama-quantized/model-q4_0.gguf",
        "qwen3-moe-quantized/model-q4_0.gguf",
    ] {
        let model = model(name);
        let place = |layers: &str| with_gpu_layers(layers, BackendKind::Cuda, &model, 0.9).unwrap();
        let expected = logits(&place("0"), &model);
        let mut all = vec![expected.clone()];
        for count in 1..=model.spec.layers.len() {
            let found = logits(&place(&count.to_string()), &model);
            let difference = difference(&found, &expected);
            println!("{name}, {count} layers: {difference:.1e} of the range");
            assert!(difference < 0.02, "{name}, {count} layers: {difference}");
            // Another layer rounds to other bits.
            assert!(!all.contains(&found), "{name}, {count} layers");
            all.push(found);
        }
        assert_eq!(logits(&place("auto"), &model), all[all.len() - 1], "{name}");
    }
}

/// The memory that others have taken of a device is left out, and a load that finds too little says what was planned.
#[test]
fn a_cache_fits_what_is_free() {
    // Nobody else uses the second one.
    if let Err(reason) = ferrum_cuda_emulator::load_devices(2) {
        return skip(reason);
    }
    let options = BackendOptions {
        ordinal: 1,
        ..BackendOptions::default()
    };
    let (model, kv) = (model("qwen3"), KvDtype::F16);
    let placement = Placement::for_model(BackendKind::Cuda, None, &model, options).unwrap();
    let free = || placement.last_device().info().memory.unwrap().free;
    let tokens = |part| {
        let found = placement.gpu_kv_tokens(&model, (&config(), kv), part);
        found.unwrap() as u64
    };
    let per_token = placement.memory_plan(&model, &config(), kv).kv_per_token;
    let (before, half, all) = (free(), tokens(0.5), tokens(1.0));
    let session = placement.load(&model, config(), kv, &mut |_, _| ());
    let taken = before - free();
    let fewer = taken / per_token;
    assert!(fewer > 100, "{taken} bytes");
    assert!(
        (fewer..=fewer + 1).contains(&(all - tokens(1.0))),
        "{fewer} of {all}"
    );
    // There is still more than half of it.
    assert_eq!(tokens(0.5), half);
    drop(session);
    assert_eq!((free(), tokens(1.0)), (before, all));

    // The first pool alone is more than all memory, so that nothing is taken.
    let too_many = RunnerConfig {
        kv_tokens: 16 * all as usize,
        ..config()
    };
    let plan = placement.memory_plan(&model, &too_many, kv);
    let refused = placement.load(&model, too_many, kv, &mut |_, _| ());
    let Some(Error::OutOfMemory {
        backend, reason, ..
    }) = refused.err()
    else {
        panic!("there is room for {} bytes of KV", plan.kv);
    };
    assert_eq!(backend, "cuda");
    let size = |bytes: u64| match bytes >> 30 {
        0 => format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    };
    for expected in [
        format!("takes {} for weights", size(plan.weights)),
        format!(
            "{} for a KV cache of {} tokens",
            size(plan.kv),
            too_many.cache_tokens()
        ),
        format!("{} for activations", size(plan.scratch)),
        format!("before it {} of 8.00 GiB were free", size(before)),
        "hint: lower --context or --kv-tokens".into(),
    ] {
        assert!(reason.contains(&expected), "{expected:?} in {reason}");
    }
    assert_eq!(free(), before, "of a load that failed");
}

/// CUDA has no kernels for FP8 with scales of 40 numbers: such weights become bf16 or f16 there, half of what other devices make
/// of them.
#[test]
fn weights_without_kernels_become_what_the_device_multiplies() {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        return skip(reason);
    }
    let model = model("llama-fp8-odd");
    let plan = |kind, activations| {
        let options = BackendOptions {
            activations,
            ..BackendOptions::default()
        };
        let device = BackendDispatch::from_kind(kind, options).unwrap();
        let placement = Placement::on(device, &model);
        let to: Vec<_> = placement.dequantized_dtypes(&model).collect();
        let plan = placement.memory_plan(&model, &config(), KvDtype::F16);
        (to, plan.weights)
    };
    let (in_f32, all) = plan(BackendKind::Reference, None);
    let (in_bf16, half) = plan(BackendKind::Cuda, None);
    assert_eq!(in_bf16, [SrcDtype::BF16]);
    let (in_f16, as_much) = plan(BackendKind::Cuda, Some(Activations::F16));
    assert_eq!((in_f16, as_much), (vec![SrcDtype::F16], half));
    // The reference multiplies FP8 as it is, or dequantises it to f32.
    assert!(in_f32.iter().all(|&dtype| dtype == SrcDtype::F32));
    let elements = model
        .spec
        .tensors()
        .map(|tensor| tensor.shape.elements())
        .sum::<u64>();
    assert!(
        half < 3 * elements,
        "{half} bytes for {elements} weights, {all} in the reference"
    );
}

/// Bytes of all stages are reported as those of one file.
#[test]
fn progress_goes_on_from_stage_to_stage() {
    for name in ["qwen3", "llama3-tied"] {
        let model = model(name);
        let last = model.spec.layers.len() - 1;
        let placement = place(&format!("cpu:0,cpu:1-{last}"), &model).unwrap();
        let (mut told, mut total) = (vec![0], 0);
        let progress = &mut |done, all| {
            told.push(done);
            total = all;
        };
        placement
            .load(&model, config(), KvDtype::F32, progress)
            .unwrap();
        assert!(told.is_sorted(), "{name}: {told:?}");
        assert_eq!(
            (told.last(), total),
            (Some(&total), model.tensors().total_bytes())
        );
    }
}
