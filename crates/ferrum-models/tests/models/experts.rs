//! Experts in the other forms that files have them in, what configs mean, and what plans count.

use crate::support::{compare, expected, fixtures, logits_in_chunks, open, runner_in};
use ferrum_formats::gguf::Writer;
use ferrum_formats::{Gguf, ModelSource, TensorDtype, TensorSource};
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::{Backend, GroupScore, KvF32};
use ferrum_models::quantize::{Plan, QuantizeOptions, Search};
use ferrum_models::{
    Dequantized, FeedForwardSpec, KvLayout, Model, Moe, MoeSpec, Native, Stage, WeightPolicy,
    load_weights, read_model,
};
use ferrum_types::{Dtype as SourceDtype, GgufQuantType};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const EXPERTS: usize = 8;

/// Bytes of some experts' matrices `part`, one after the other.
fn stacked(file: &SafeTensors<'_>, layer: usize, parts: &[&str]) -> Vec<u8> {
    let name = |e, part| format!("model.layers.{layer}.mlp.experts.{e}.{part}.weight");
    let experts = 0..EXPERTS;
    let of = |e| {
        parts
            .iter()
            .flat_map(move |part| file.tensor(&name(e, part)).unwrap().data())
    };
    experts.flat_map(of).copied().collect()
}

/// The fixture with gate above up of all experts in one tensor, and down in another.
fn write_joined(from: &Path, to: &Path) {
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, tensor) in file.tensors() {
        if !name.contains(".experts.") {
            tensors.insert(name, (tensor.shape().to_vec(), tensor.data().to_vec()));
        }
    }
    for layer in 0..3 {
        let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
        let gate_up = stacked(&file, layer, &["gate_proj", "up_proj"]);
        tensors.insert(name("gate_up_proj"), (vec![EXPERTS, 44, 36], gate_up));
        let down = stacked(&file, layer, &["down_proj"]);
        tensors.insert(name("down_proj"), (vec![EXPERTS, 36, 22], down));
    }
    let views = tensors.iter().map(|(name, (shape, data))| {
        let view = TensorView::new(Dtype::F32, shape.clone(), data).unwrap();
        (name.clone(), view)
    });
    serialize_to_file(views, None, &to.join("model.safetensors")).unwrap();
    std::fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
}

#[test]
fn joined_stacks_are_the_same_model() {
    let from = fixtures().join("qwen3-moe");
    let dir = tempfile::tempdir().unwrap();
    write_joined(&from, dir.path());
    let device = CpuBackend::open(0).unwrap();
    let tokens = expected(&from.join("expected.safetensors")).tokens;
    let logits = |path: &Path| {
        let model = open(path);
        let layout = KvLayout::Contiguous;
        let mut runner = runner_in::<_, KvF32, Moe<Dequantized>>(&device, &model, layout);
        logits_in_chunks(&mut runner, &tokens, &[usize::MAX])
    };
    assert!(logits(&from) == logits(dir.path()));
}

/// Blocks of MXFP4 are computed on as they are, and are the same from either kind of file.
#[test]
fn published_mxfp4_is_that_of_ggml() {
    let dir = fixtures().join("gpt-oss-blocks");
    let device = CpuBackend::open(0).unwrap();
    let policy = WeightPolicy::of::<CpuBackend, Moe<Native>>();
    let whole = expected(&dir.join("expected.safetensors"));
    let logits = |path: &Path| {
        let model = open(path);
        assert_eq!(model.dequantized_types(policy), Vec::<String>::new());
        let layout = KvLayout::Contiguous;
        let mut runner = runner_in::<_, KvF32, Moe<Native>>(&device, &model, layout);
        logits_in_chunks(&mut runner, &whole.tokens, &[usize::MAX])
    };
    let (folder, file) = (logits(&dir), logits(&dir.join("model.gguf")));
    assert!(folder == file);
    let (kl, same) = compare(&whole.logits, &folder, 259);
    // Close, and not the same: then something was computed on integers.
    assert!(kl > 1e-9 && kl < 1e-2 && same >= 0.8, "{kl}, {same}");
}

/// The GGUF file `from` with more tensors, which take the places of those of the same names.
fn write_gguf(
    from: &Path,
    to: &Path,
    with: &BTreeMap<String, (GgufQuantType, Vec<usize>, Vec<u8>)>,
) {
    let from = Gguf::open(from).unwrap();
    let mut writer = Writer::new(to);
    for (key, value) in from.metadata() {
        writer.set(key, value).unwrap();
    }
    let kept = from.infos().filter(|info| !with.contains_key(&info.name));
    let mut tensors: Vec<_> = kept
        .map(|info| {
            let view = from.get(&info.name).unwrap();
            let ty = match view.dtype {
                TensorDtype::Plain(SourceDtype::F32) => GgufQuantType::F32,
                TensorDtype::Plain(SourceDtype::F16) => GgufQuantType::F16,
                other => panic!("{}: {other:?}", info.name),
            };
            let tensor = (ty, view.shape.to_vec(), view.bytes.to_vec());
            (info.name.clone(), tensor)
        })
        .collect();
    tensors.extend(
        with.iter()
            .map(|(name, tensor)| (name.clone(), tensor.clone())),
    );
    for (name, (ty, shape, _)) in &tensors {
        writer.declare(name, shape, *ty).unwrap();
    }
    let mut out = writer.start(std::fs::File::create(to).unwrap()).unwrap();
    for (name, (.., bytes)) in &tensors {
        out.push(name, bytes).unwrap();
    }
    out.finish().unwrap();
}

/// Files with NVFP4 have a factor beside each tensor, or one for each expert.
#[test]
fn factors_of_nvfp4_are_read() {
    const BLOCK: usize = 64;
    let from = fixtures().join("qwen2-moe-quantized/model.gguf");
    let source = Gguf::open(&from).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (mut blocks, mut floats) = (BTreeMap::new(), BTreeMap::new());
    for name in ["blk.0.attn_q", "blk.0.ffn_gate_exps", "blk.1.ffn_up_exps"] {
        let weight = format!("{name}.weight");
        let view = source.require(&weight).unwrap();
        let shape = view.shape.to_vec();
        let count: usize = shape.iter().product();
        assert!(
            shape[shape.len() - 1].is_multiple_of(BLOCK),
            "{name}: {shape:?}"
        );
        // Scales around 1 and all codes.
        let byte = |i: usize| {
            if i % 36 < 4 {
                0x30 + (i % 11) as u8
            } else {
                (i * 37 % 251) as u8
            }
        };
        let bytes: Vec<u8> = (0..count / BLOCK * 36).map(byte).collect();
        let mut values = vec![0f32; count];
        ferrum_quant::dequantize(GgufQuantType::NVFP4, &bytes, &mut values).unwrap();
        let matrices = if shape.len() == 3 { shape[0] } else { 1 };
        let factors: Vec<f32> = (0..matrices).map(|i| 0.01 + 0.003 * i as f32).collect();
        for (values, factor) in values.chunks_exact_mut(count / matrices).zip(&factors) {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        let to_bytes = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        blocks.insert(weight.clone(), (GgufQuantType::NVFP4, shape.clone(), bytes));
        let scale = (GgufQuantType::F32, vec![matrices], to_bytes(&factors));
        blocks.insert(format!("{name}.scale"), scale);
        floats.insert(weight, (GgufQuantType::F32, shape, to_bytes(&values)));
    }
    let device = CpuBackend::open(0).unwrap();
    let tokens = expected(&fixtures().join("qwen2-moe-quantized/expected.safetensors")).tokens;
    let logits = |name: &str, with: &BTreeMap<_, _>| {
        let path = dir.path().join(name);
        write_gguf(&from, &path, with);
        let model = open(&path);
        let layout = KvLayout::Contiguous;
        let mut runner = runner_in::<_, KvF32, Moe<Native>>(&device, &model, layout);
        logits_in_chunks(&mut runner, &tokens, &[usize::MAX])
    };
    let read = logits("blocks.gguf", &blocks);
    assert!(read == logits("floats.gguf", &floats));
    // Other types have no such scale, so none is made of them.
    let source = ModelSource::open(dir.path().join("blocks.gguf")).unwrap();
    let options = QuantizeOptions {
        recipe: "q8_0".parse().unwrap(),
        imatrix: None,
        search: Search::default(),
        threads: 1,
        requantize: true,
    };
    let error = Plan::new(&source, options).err().unwrap().to_string();
    assert!(error.contains("NVFP4 with a scale of its own"), "{error}");
    // Another count of factors is refused, and a factor is not left out.
    blocks.retain(|name, _| name != "blk.0.attn_q.scale");
    assert!(read != logits("without.gguf", &blocks));
    let scale = blocks.get_mut("blk.0.ffn_gate_exps.scale").unwrap();
    (scale.1, scale.2) = (vec![1], 1f32.to_le_bytes().to_vec());
    let path = dir.path().join("wrong.gguf");
    write_gguf(&from, &path, &blocks);
    let model = open(&path);
    let loaded = load_weights::<_, Moe<Native>>(&device, &model, &mut |_, _| {});
    let error = loaded.err().unwrap().to_string();
    assert!(
        error.contains("ffn_gate_exps.scale") && error.contains("has 1 numbers"),
        "{error}"
    );
}

/// What configs of DeepSeek and those who followed it say of the choice of experts.
#[test]
fn groups_and_shared_experts_are_read() {
    let moe = |fixture: &str, change: fn(&mut Value)| {
        let model = changed(fixture, change).unwrap();
        let last = model.spec.layers.last().unwrap().feed_forward.clone();
        match last {
            FeedForwardSpec::Moe(moe) => moe,
            other => panic!("{other:?}"),
        }
    };
    let groups = |found: &MoeSpec| found.routing.groups.map(|g| (g.groups, g.top, g.score));
    let v3 = moe("deepseek3", |_| ());
    assert_eq!(groups(&v3), Some((4, 2, GroupScore::BestTwo)));
    assert!(v3.routing.correction && v3.routing.renormalize);
    let all = moe("deepseek3", |config| config["topk_group"] = json!(4));
    assert_eq!(groups(&all), None);
    let v2 = moe("deepseek2", |_| ());
    assert_eq!(groups(&v2), Some((2, 1, GroupScore::Best)));
    assert_eq!(v2.shared.unwrap().intermediate, 44);
    let greedy = moe("deepseek2", |config| {
        config["topk_method"] = json!("greedy")
    });
    assert_eq!(groups(&greedy), None);
    let none = moe("glm4-moe", |config| config["n_shared_experts"] = json!(0));
    assert_eq!(none.shared, None);
    for (fixture, key, value) in [
        ("deepseek2", "topk_method", json!("best")),
        ("deepseek2", "norm_topk_prob", json!(true)),
        ("deepseek3", "n_group", json!(3)),
        ("deepseek3", "topk_group", json!(1)),
        ("deepseek3", "qk_rope_head_dim", json!(7)),
        ("deepseek3", "kv_lora_rank", json!(0)),
    ] {
        let found = changed(fixture, |config| config[key] = value.clone());
        assert!(found.is_err(), "{fixture}: {key} = {value}");
    }
}

/// Opens a fixture whose config was changed.
fn changed(fixture: &str, change: impl Fn(&mut Value)) -> Result<Model, String> {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixtures().join(fixture)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    read_model(ModelSource::open(dir.path()).unwrap()).map_err(|e| e.to_string())
}

#[test]
fn layers_have_experts_where_the_config_says() {
    let places = |model: Model| {
        let layers = model.spec.layers.iter();
        let has = layers.map(|layer| matches!(layer.feed_forward, FeedForwardSpec::Moe(_)));
        has.collect::<Vec<_>>()
    };
    let sparse = |change: fn(&mut Value)| places(changed("qwen3-moe-sparse", change).unwrap());
    let (yes, no) = (true, false);
    assert_eq!(sparse(|_| ()), [no, yes, no, no, no, yes]);
    assert_eq!(
        sparse(|c| c["decoder_sparse_step"] = json!(3)),
        [no, no, yes, no, no, yes]
    );
    assert_eq!(
        sparse(|c| c["mlp_only_layers"] = json!([])),
        [no, yes, no, yes, no, yes]
    );
}

#[test]
fn configs_that_cannot_be_are_refused() {
    let cases: [(&str, Value, &str); 7] = [
        ("decoder_sparse_step", json!(0), "decoder_sparse_step"),
        ("num_experts_per_tok", json!(0), "0 experts for each token"),
        ("num_experts_per_tok", json!(9), "9 experts for each token"),
        ("num_local_experts", json!(1 << 20), "1048576 experts"),
        ("moe_intermediate_size", json!(1 << 29), "feed-forward size"),
        ("moe_intermediate_size", json!(0), "feed-forward size"),
        ("hidden_act", json!("gelu"), "the activation gelu"),
    ];
    for (key, value, says) in cases {
        let found = changed("qwen3-moe", |config| config[key] = value.clone());
        let error = found.err().unwrap_or_default();
        assert!(error.contains(says), "{key} = {value}: {error}");
    }
}

#[test]
fn a_decode_step_reads_the_chosen_experts_only() {
    let model = open(&fixtures().join("qwen3-moe/model.gguf"));
    let (mut experts, mut table) = (0, 0);
    for info in model.tensors().infos() {
        match &*info.name {
            name if name.contains("_exps.") => experts += info.byte_len,
            "token_embd.weight" => table += info.byte_len,
            _ => (),
        }
    }
    // All of it is f32; 3 of 8 experts are chosen.
    let read = model.tensors().total_bytes() as usize - table - experts * 5 / 8;
    let whole = Stage::whole(&model.spec);
    let found = model.decode_bytes(WeightPolicy::floats(), &whole) as f64 / read as f64;
    assert!((0.99..1.01).contains(&found), "{found}");
    let layers = read as u64 / 4 - 259 * 36;
    assert_eq!(model.layer_parameters(), layers);
}
