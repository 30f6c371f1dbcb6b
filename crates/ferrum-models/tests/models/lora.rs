//! LoRA adapters: the logits are PEFT's, from every kind of base file, and what runs beside a sequence
//! changes none of its bits.

use crate::gpu::gpu;
use crate::support::lora::{
    ADAPTERS, LAYOUT, adapter, check_together, folder, logits, runner, with_and_without,
};
use crate::support::{blocks, exact_cpu, fixtures, max_difference, open, read_expected, runner_in};
use ferrum_formats::LoraFolder;
use ferrum_formats::gguf::Writer;
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, BackendKvDtype, KvF32, LlmBackend};
use ferrum_models::{Dequantized, LogitRows, Readback, SeqStep, StepBatch};
use ferrum_types::{AdapterId, Error, GgufQuantType, TokenId};
use safetensors::SafeTensors;
use tempfile::TempDir;

fn check_all<B: LlmBackend + BackendKvDtype<KvF32>>(device: &B) {
    for (name, base) in ADAPTERS {
        let (_, expected) = read_expected(&folder(name).join("expected.safetensors"));
        for file in ["", "model.gguf"] {
            let model = format!("{base}/{file}");
            let found = with_and_without(device, name, &model).adapted;
            let difference = max_difference(&found, &expected);
            assert!(difference <= 1e-4, "{name} on {model}: {difference}");
        }
    }
}

#[test]
fn reference_backend_equals_peft() {
    check_all(&ReferenceBackend::open(0).unwrap());
}

#[test]
fn cpu_backend_equals_peft() {
    check_all(&exact_cpu());
}

#[test]
fn gpu_backend_equals_peft() {
    if let Some(device) = gpu() {
        check_all(&device);
    }
}

/// Logits that an adapter gives on a base file.
fn adapted(adapter: &LoraFolder, base: &str, tokens: &[TokenId]) -> Vec<f32> {
    let mut runner = runner(&exact_cpu(), base);
    let id = AdapterId(7);
    runner.load_adapter(id, adapter).unwrap();
    logits(&mut runner, &[(tokens, Some(id))], 96).remove(0)
}

/// The adapter of a fixture whose modules are called otherwise.
fn renamed(name: &str, new_name: impl Fn(&str) -> String) -> (TempDir, LoraFolder) {
    let dir = tempfile::tempdir().unwrap();
    let config = "adapter_config.json";
    std::fs::copy(folder(name).join(config), dir.path().join(config)).unwrap();
    let weights = "adapter_model.safetensors";
    let bytes = std::fs::read(folder(name).join(weights)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors();
    let tensors = tensors.iter().map(|(name, view)| (new_name(name), view));
    let bytes = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(dir.path().join(weights), bytes).unwrap();
    let adapter = LoraFolder::open(dir.path()).unwrap();
    (dir, adapter)
}

#[test]
fn modules_are_found_whatever_wraps_them() {
    let (tokens, _) = read_expected(&folder("llama-all").join("expected.safetensors"));
    let expected = adapted(&adapter("llama-all"), "llama3-tied", &tokens);
    type NewName = fn(&str) -> String;
    let wrappings: [NewName; 4] = [
        |name| name.replace("base_model.model.", ""),
        // An adapter of the decoder without its output projection.
        |name| name.replace("base_model.model.model.", "base_model.model."),
        |name| name.replace("base_model.model.model.", ""),
        |name| name.replace(".weight", ".default.weight"),
    ];
    for new_name in wrappings {
        let (_dir, adapter) = renamed("llama-all", new_name);
        let found = adapted(&adapter, "llama3-tied", &tokens);
        assert_eq!(
            found,
            expected,
            "{:?}",
            adapter.pairs().next().unwrap().module
        );
    }
}

/// The adapter of a fixture as llama.cpp's converter writes it: names of GGUF files and, for `llama`, rows
/// of queries and keys in pairs. Its scales, which may differ, are in the numbers.
fn converted(name: &str, base: &str, arch: &str) -> (TempDir, LoraFolder) {
    let (adapter, model) = (adapter(name), open(&fixtures().join(base)));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter.gguf");
    let mut head = Writer::new(&path);
    head.set("general.type", "adapter").unwrap();
    head.set("general.architecture", arch).unwrap();
    head.set("adapter.type", "lora").unwrap();
    head.set("adapter.lora.alpha", 0f32).unwrap();
    let mut tensors = Vec::new();
    for pair in adapter.pairs() {
        let id = model
            .family
            .hf_names
            .parse(&format!("{}.weight", pair.module));
        let id = id.unwrap();
        let name = ferrum_models::families::gguf_names().name(id).unwrap();
        let [rows, rank] = *pair.up.shape else {
            panic!()
        };
        let heads = match arch {
            "llama" => model.spec.tensor(id).unwrap().rotated_heads,
            _ => 0,
        };
        let mut up = Vec::new();
        for row in 0..rows {
            let dim = rows.checked_div(heads).unwrap_or(rows);
            let (head, at) = (row / dim, row % dim);
            let from = match heads {
                0 => row,
                _ => head * dim + at % 2 * (dim / 2) + at / 2,
            };
            let row = &pair.up.bytes[4 * rank * from..][..4 * rank];
            up.extend(row.chunks_exact(4).flat_map(|bytes| {
                let value = f32::from_le_bytes(bytes.try_into().unwrap());
                (pair.scale * value).to_le_bytes()
            }));
        }
        tensors.push((
            format!("{name}.lora_a"),
            pair.down.shape,
            pair.down.bytes.to_vec(),
        ));
        tensors.push((format!("{name}.lora_b"), pair.up.shape, up));
    }
    for (name, shape, _) in &tensors {
        head.declare(name, shape, GgufQuantType::F32).unwrap();
    }
    let mut body = head.start(std::fs::File::create(&path).unwrap()).unwrap();
    for (name, _, bytes) in &tensors {
        body.push(name, bytes).unwrap();
    }
    body.finish().unwrap();
    let adapter = LoraFolder::open(&path).unwrap();
    (dir, adapter)
}

#[test]
fn gguf_adapters_equal_peft_on_every_kind_of_base() {
    // Joined maps have their own names there.
    let joined = ["phi3", "lfm2", "qwen35"];
    let others = ADAPTERS
        .into_iter()
        .filter(|(_, base)| !joined.contains(base));
    for (name, base) in others {
        let arch = if base == "qwen3" { "qwen3" } else { "llama" };
        let (tokens, expected) = read_expected(&folder(name).join("expected.safetensors"));
        let (_dir, adapter) = converted(name, base, arch);
        for file in ["", "model.gguf"] {
            let model = format!("{base}/{file}");
            let difference = max_difference(&adapted(&adapter, &model, &tokens), &expected);
            assert!(difference <= 1e-4, "{name} on {model}: {difference}");
        }
    }
    let (_dir, adapter) = converted("qwen3-patterns", "qwen3", "llama");
    let error = runner(&exact_cpu(), "qwen3").load_adapter(AdapterId(0), &adapter);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("found \"llama\", expected \"qwen3\""),
        "{error}"
    );
}

#[test]
fn sequences_of_several_adapters_do_not_change_each_other() {
    let device = CpuBackend::open(0).unwrap();
    let orders = [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0], [0, 3, 2, 1]];
    check_together(&device, &orders, &[1, 5, 24]);
}

#[test]
fn what_does_not_fit_is_said() {
    let device = CpuBackend::open(0).unwrap();
    let cases = [
        (
            "qwen3",
            "llama-all",
            "the adapter is for another model (llama3-tied)",
        ),
        ("qwen3-moe", "llama-up", "module \"model.layers.0."),
        (
            "qwen2",
            "qwen3-patterns",
            "the adapter is for another model (qwen3)",
        ),
    ];
    for (model, name, words) in cases {
        let model = open(&fixtures().join(model));
        let mut runner = runner_in::<CpuBackend, KvF32, ferrum_models::Moe<Dequantized>>(
            &device, &model, LAYOUT,
        );
        match runner.load_adapter(AdapterId(0), &adapter(name)) {
            Err(Error::Model(message)) => assert!(message.contains(words), "{message}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    let mut runner = runner(&device, "llama3-tied");
    let mut batch = StepBatch::default();
    let table = blocks(runner.pool().blocks, 0);
    batch
        .push(SeqStep {
            tokens: &[1],
            start: 0,
            prompt_len: 1,
            blocks: &table,
            logits: LogitRows::Last,
            hidden: false,
            adapter: Some(AdapterId(3)),
        })
        .unwrap();
    let refused = runner.submit(&batch, &[Readback::GREEDY]);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("adapter 3 is not loaded"), "{error}");
}
