//! Draft heads against independent computations (`tools/fixtures/make_drafts.py`): logits for a text beside the target's
//! hidden states, and for guesses beside the head's own; and what files may have wrong.

use crate::gpu::gpu;
use crate::support::draft_heads::{check_shared_step, differences, drafts, heads, source};
use crate::support::{exact_cpu, fixtures, open};
use ferrum_formats::{ModelSource, TensorSource};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, LlmBackend};
use ferrum_models::quantize::{Plan, QuantizeOptions, Search};
use ferrum_models::{
    AuxHiddenPoint, Dequantized, DraftHead, FeedForwardSpec, LayerSpec, Moe, WeightForm,
    read_eagle3, read_mtp,
};
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize_to_file};
use std::collections::HashMap;

const TOLERANCE: f32 = 1e-4;

fn check<B: LlmBackend, W: WeightForm<B>>(device: &B) {
    for case in heads() {
        let (head, model, folder) = &case;
        let experts = |layer: &LayerSpec| matches!(layer.feed_forward, FeedForwardSpec::Moe(_));
        if !W::EXPERTS && model.spec.layers.iter().any(experts) {
            continue;
        }
        for chunk in [usize::MAX, 5] {
            let found = differences::<B, W>(device, &case, chunk);
            println!("{} {} {found:?}", folder.display(), head.kind());
            let near = found.iter().all(|d| *d <= TOLERANCE);
            assert!(near, "{}, chunks of {chunk}: {found:?}", folder.display());
        }
    }
}

#[test]
fn heads_guess_as_they_were_meant_on_the_reference() {
    check::<_, Moe<Dequantized>>(&ReferenceBackend::open(0).unwrap());
}

#[test]
fn heads_guess_as_they_were_meant_on_the_cpu() {
    check::<_, Moe<Dequantized>>(&exact_cpu());
}

#[test]
fn heads_guess_as_they_were_meant_on_a_gpu() {
    if let Some(device) = gpu() {
        check::<_, Dequantized>(&device);
    }
}

/// Where the head's guesses go on does not depend on what else is in a step.
#[test]
fn features_of_several_sequences_share_a_step() {
    for case in heads() {
        check_shared_step::<_, Moe<Dequantized>>(&exact_cpu(), &case);
    }
}

#[test]
fn heads_read_where_their_files_say() {
    let points = |layers: &[u32]| {
        layers
            .iter()
            .map(|&l| AuxHiddenPoint::Layer(l))
            .collect::<Vec<_>>()
    };
    for (head, model, folder) in heads() {
        let expected = match folder.file_name().and_then(|name| name.to_str()) {
            Some("qwen3-eagle3") => points(&[0, 1, 1]),
            Some("llama3-eagle3") => points(&[0, 1]),
            _ => vec![AuxHiddenPoint::FinalNorm],
        };
        let found = head.features().target.clone();
        assert_eq!(found, expected, "{}", model.family.name);
    }
    let target = open(&drafts().join("llama-cycle-eagle3-target"));
    let head = read_eagle3(source(&drafts().join("llama-cycle-eagle3")), &target).unwrap();
    assert_eq!(head.features().target, points(&[1, 1, 0]));
    assert!(head.features().tokens.is_none());
}

/// A GGUF file in f32 of a folder.
fn converted(folder: &str) -> (tempfile::TempDir, Vec<String>) {
    let source = source(&drafts().join(folder));
    let options = QuantizeOptions {
        recipe: "f32".parse().unwrap(),
        imatrix: None,
        search: Search::default(),
        threads: 2,
        requantize: false,
    };
    let plan = Plan::new(&source, options).unwrap();
    let names = plan.tensors.iter().map(|tensor| tensor.name.clone());
    let (dir, names) = (tempfile::tempdir().unwrap(), names.collect());
    let path = dir.path().join("model.gguf");
    let file = std::fs::File::create(&path).unwrap();
    plan.write(&path, file, &mut |_, _| ()).unwrap();
    (dir, names)
}

#[test]
fn conversions_keep_the_layer_where_files_have_it() {
    for name in [
        "glm4-moe-mtp",
        "qwen35-mtp",
        "qwen35-moe-mtp",
        "qwen3-next-mtp",
    ] {
        let (dir, mut names) = converted(name);
        let path = dir.path().join("model.gguf");
        // The same tensors as in a file of another writer.
        let ModelSource::Gguf(other) = source(&drafts().join(name).join("model.gguf")) else {
            panic!("no GGUF file");
        };
        let mut expected: Vec<_> = other.infos().map(|info| info.name.clone()).collect();
        names.sort();
        expected.sort();
        assert_eq!(names, expected, "{name}");
        let model = open(&path);
        let head = (read_mtp(&model).unwrap(), model, drafts().join(name));
        let found = differences::<_, Moe<Dequantized>>(&exact_cpu(), &head, 7);
        assert!(found.iter().all(|d| *d <= TOLERANCE), "{name}: {found:?}");
    }
    // Files of this architecture are without it.
    let (dir, names) = converted("deepseek3-mtp");
    assert!(
        names.iter().all(|name| !name.contains("nextn")),
        "{names:?}"
    );
    let found = refusal(read_mtp(&open(&dir.path().join("model.gguf"))));
    assert!(found.contains("nextn_predict_layers\": found 0"), "{found}");
}

fn refusal(read: Result<DraftHead, ferrum_types::Error>) -> String {
    read.err().unwrap().to_string()
}

#[test]
fn models_without_such_layers_say_so() {
    for (name, expected) in [
        ("llama2", "\"num_nextn_predict_layers\": found 0 layers"),
        (
            "llama2/model.gguf",
            "\"llama.nextn_predict_layers\": found 0 layers",
        ),
        // The config speaks of a layer that the file has not.
        (
            "deepseek3",
            "tensor \"model.layers.3.eh_proj.weight\" is missing",
        ),
        ("qwen3-next", "found 0 layers for multi-token prediction"),
        ("qwen35", "found 0 layers for multi-token prediction"),
    ] {
        let found = refusal(read_mtp(&open(&fixtures().join(name))));
        assert!(found.contains(expected), "{name}: {found}");
    }
}

/// A copy of an EAGLE-3 folder with fields of its config changed, and a tensor if there is one.
fn changed(fields: &[(&str, serde_json::Value)], offsets: Option<Vec<i64>>) -> tempfile::TempDir {
    let (from, to) = (drafts().join("qwen3-eagle3"), tempfile::tempdir().unwrap());
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (field, value) in fields {
        config[*field] = value.clone();
    }
    std::fs::write(to.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: HashMap<_, _> = file.tensors().into_iter().collect();
    let offsets = offsets.unwrap_or_default();
    let raw: Vec<u8> = offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
    if !raw.is_empty() {
        let shape = vec![offsets.len()];
        let view = TensorView::new(safetensors::Dtype::I64, shape, &raw).unwrap();
        tensors.insert("d2t".into(), view);
    }
    serialize_to_file(tensors, None, &to.path().join("model.safetensors")).unwrap();
    to
}

#[test]
fn eagle_heads_of_another_target_are_refused_by_field() {
    let target = open(&fixtures().join("qwen3"));
    let read = |dir: &tempfile::TempDir| refusal(read_eagle3(source(dir.path()), &target));
    let ids = |ids: serde_json::Value| serde_json::json!({"eagle_aux_hidden_state_layer_ids": ids});
    for (field, value, expected) in [
        (
            "vocab_size",
            300.into(),
            "expected 259, the vocabulary of the target",
        ),
        ("num_hidden_layers", 2.into(), "expected 1"),
        ("target_hidden_size", 64.into(), "as the target has"),
        (
            "draft_vocab_size",
            260.into(),
            "1 to 259, the vocabulary of the target",
        ),
        (
            "draft_vocab_size",
            100.into(),
            "tensor \"d2t\" has shape [101]",
        ),
        (
            "eagle_config",
            ids([0, 9].as_slice().into()),
            "layers of the target, 0 to",
        ),
        (
            "eagle_config",
            serde_json::json!({"use_aux_hidden_state": false}),
            "heads that read one layer are EAGLE and EAGLE-2",
        ),
    ] {
        let found = read(&changed(&[(field, value)], None));
        assert!(
            found.contains(expected) && found.contains(field) || found.contains("d2t"),
            "{found}"
        );
        assert!(found.contains(expected), "{found}");
    }
    let mut offsets = vec![0; 101];
    offsets[7] = -8;
    let found = read(&changed(&[], Some(offsets.clone())));
    assert!(
        found.contains("maps token 7 by -8 outside of the vocabulary of 259"),
        "{found}"
    );
    offsets[7] = i64::MAX;
    let found = read(&changed(&[], Some(offsets)));
    assert!(found.contains("maps token 7"), "{found}");
}
