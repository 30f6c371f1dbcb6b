//! Quantised checkpoints that are wrong: one clear error each, and never a panic.

use crate::support::fixtures;
use ferrum_formats::ModelSource;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_models::{Dequantized, load_weights, read_model};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// One tensor of a file: type, shape, bytes.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);
type Tensors = BTreeMap<String, Tensor>;

/// What opening and loading a changed copy of a fixture says.
fn error_of(
    fixture: &str,
    change_config: impl Fn(&mut Value),
    change: impl Fn(&mut Tensors),
) -> String {
    let from = fixtures().join(fixture);
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    change_config(&mut config["quantization_config"]);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let copy = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    let tensors = file
        .iter()
        .map(|(name, view)| (name.to_owned(), copy(view)));
    let mut tensors: Tensors = tensors.collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let to = dir.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &to).unwrap();
    load(dir.path()).expect_err("a wrong file loads")
}

fn load(path: &Path) -> Result<(), String> {
    let source = ModelSource::open(path).map_err(|e| e.to_string())?;
    let model = read_model(source).map_err(|e| e.to_string())?;
    let loaded = load_weights::<_, Dequantized>(&ReferenceBackend::new(), &model, &mut |_, _| ());
    loaded.map(|_| ()).map_err(|e| e.to_string())
}

const Q: &str = "model.layers.0.self_attn.q_proj";
const DOWN: &str = "model.layers.0.mlp.down_proj";

fn same(_: &mut Value) {}

#[test]
fn schemes_that_are_not_read_are_refused_by_name() {
    let cases: [(&str, &str, Value, &str); 8] = [
        (
            "llama-gptq4",
            "bits",
            json!(5),
            "\"quantization_config.bits\": found 5, expected 2, 3, 4 or 8",
        ),
        (
            "llama-gptq4",
            "checkpoint_format",
            json!("marlin"),
            "found \"marlin\", expected gptq or gptq_v2",
        ),
        (
            "llama-gptq4",
            "quant_method",
            json!("hqq"),
            "found \"hqq\", expected gptq, awq,",
        ),
        (
            "llama-awq",
            "version",
            json!("gemv"),
            "\"quantization_config.version\": found \"gemv\", expected gemm",
        ),
        ("llama-awq", "bits", json!(8), "found 8, expected 4"),
        (
            "llama-awq",
            "zero_point",
            json!(false),
            "found false, expected true",
        ),
        (
            "llama-packed4",
            "format",
            json!("marlin-24"),
            "found \"marlin-24\", expected pack-quantized",
        ),
        ("llama-packed4", "config_groups", json!(3), "config_groups"),
    ];
    for (fixture, field, value, expected) in cases {
        let error = error_of(fixture, |config| config[field] = value.clone(), |_| ());
        assert!(error.contains(expected), "{fixture} {field}: {error}");
        assert!(error.contains("config.json"), "{error}");
    }
}

/// Numbers that the tensors do not agree with.
#[test]
fn configs_that_disagree_with_the_tensors_name_both() {
    let cases: [(&str, &str, Value, &str); 5] = [
        (
            "llama-gptq4",
            "bits",
            json!(8),
            "q_proj.qweight\" has shape [8, 128], expected [16, 128]",
        ),
        (
            "llama-gptq4",
            "group_size",
            json!(16),
            "q_proj.qzeros\" has shape [2, 16], expected [4, 16]",
        ),
        (
            "llama-awq",
            "group_size",
            json!(-1),
            "q_proj.qzeros\" has shape [2, 16], expected [1, 16]",
        ),
        (
            "llama-awq",
            "group_size",
            json!(usize::MAX / 2),
            "q_proj.qzeros\"",
        ),
        (
            "llama-fp8-odd",
            "weight_block_size",
            json!([64, 64]),
            "weight_scale_inv\" has shape [3, 2], expected [2, 1]",
        ),
    ];
    for (fixture, field, value, expected) in cases {
        let error = error_of(fixture, |config| config[field] = value.clone(), |_| ());
        assert!(error.contains(expected), "{fixture} {field}: {error}");
        assert!(error.contains("model.safetensors"), "{error}");
    }
}

#[test]
fn wrong_tensors_are_named() {
    let with =
        |fixture: &str, name: String, expected: &str, change: &dyn Fn(&mut Tensors, &str)| {
            let error = error_of(fixture, same, |tensors| change(tensors, &name));
            assert!(error.contains(expected), "{fixture} {name}: {error}");
            assert!(error.contains("model.safetensors"), "{error}");
        };
    let remove = |tensors: &mut Tensors, name: &str| {
        tensors.remove(name).unwrap();
    };
    for (fixture, suffix) in [
        ("llama-gptq4", "qzeros"),
        ("llama-gptq4", "scales"),
        ("llama-gptq4-order", "g_idx"),
        ("llama-awq", "qzeros"),
        ("llama-packed4", "weight_scale"),
        ("llama-fp8-tensor", "weight_scale"),
    ] {
        let name = format!("{Q}.{suffix}");
        with(fixture, name.clone(), &name, &remove);
    }
    // Without any of its tensors, a layer is missed by its usual name.
    with(
        "llama-gptq4",
        format!("{Q}.qweight"),
        "q_proj.weight",
        &remove,
    );

    let half = |tensors: &mut Tensors, name: &str| {
        let (_, shape, data) = tensors.get_mut(name).unwrap();
        shape[0] /= 2;
        data.truncate(data.len() / 2);
    };
    for (fixture, suffix) in [
        ("llama-gptq4", "qweight"),
        ("llama-gptq4", "qzeros"),
        ("llama-gptq4", "scales"),
        ("llama-gptq4", "g_idx"),
        ("llama-awq", "qweight"),
        ("llama-packed4", "weight_packed"),
        ("llama-packed4", "weight_scale"),
        ("llama-packed4", "weight_zero_point"),
        ("llama-fp8-channel", "weight_scale"),
    ] {
        with(fixture, format!("{Q}.{suffix}"), "has shape", &half);
    }
    let floats = |tensors: &mut Tensors, name: &str| tensors.get_mut(name).unwrap().0 = Dtype::F32;
    for (fixture, suffix) in [
        ("llama-gptq4", "qweight"),
        ("llama-packed4", "weight_packed"),
    ] {
        with(
            fixture,
            format!("{Q}.{suffix}"),
            "has element type f32, expected i32",
            &floats,
        );
    }
    let table = |tensors: &mut Tensors, _: &str| {
        tensors.get_mut("model.embed_tokens.weight").unwrap().0 = Dtype::I16;
    };
    with(
        "llama-gptq4",
        "embedding".into(),
        "has element type i16, expected a float type",
        &table,
    );
}

#[test]
fn group_indices_out_of_range_are_named() {
    for (fixture, suffix, group) in [
        ("llama-gptq4-order", "g_idx", 3i32),
        ("llama-gptq4-order", "g_idx", -1),
        ("llama-packed4-order", "weight_g_idx", i32::MAX),
    ] {
        let error = error_of(fixture, same, |tensors| {
            let (_, _, data) = tensors.get_mut(&format!("{DOWN}.{suffix}")).unwrap();
            data[20..24].copy_from_slice(&group.to_le_bytes());
        });
        let expected = format!("g_idx[5] is {group}, expected a group below 3");
        assert!(error.contains(&expected), "{fixture}: {error}");
        assert!(error.contains("down_proj"), "{error}");
    }
}

#[test]
fn a_stored_shape_must_be_the_models() {
    let error = error_of("llama-packed4", same, |tensors| {
        let (_, _, data) = tensors.get_mut(&format!("{Q}.weight_shape")).unwrap();
        data[0] = 1;
    });
    assert!(
        error.contains("q_proj.weight_shape\" holds [1, 64], expected [128, 64]"),
        "{error}"
    );
}
