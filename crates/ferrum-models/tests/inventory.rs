//! The inventory of tensors: it is what files hold, no more and no less, and ranks that cut it hold all of
//! it together.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use ferrum_formats::ModelSource;
use ferrum_models::{
    CutAxis, DecoderTensor, Family, FeedForwardSpec, Model, TensorId, TensorLocation, TensorPart,
    TensorRole, WeightNames, families::FAMILIES,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use support::{fixture_dirs, fixtures, open};

/// Names and shapes.
type Shapes = BTreeMap<String, Vec<usize>>;

fn names_of(model: &Model) -> &'static WeightNames {
    match &model.source {
        ModelSource::Gguf(_) => gguf_names(),
        ModelSource::Hf(_) => model.family.hf_names,
    }
}

fn gguf_names() -> &'static WeightNames {
    ferrum_models::families::gguf_names()
}

/// The suffixes of a matrix that is several tensors, by the scheme that it is quantised with.
const SEVERAL: [&str; 3] = ["qweight", "weight_packed", "weight_scale"];

/// What a file should hold of a tensor, as names and shapes.
fn expected(model: &Model, tensor: &DecoderTensor, all: &mut Shapes) {
    let (dims, tensors) = (tensor.shape.dims(), model.tensors());
    let places = names_of(model).locations(tensor);
    let there = |place: &&TensorLocation| match place {
        TensorLocation::Rows { name, .. } => tensors.get(name).is_some(),
        _ => true,
    };
    match places.iter().find(there) {
        Some(TensorLocation::Whole(name)) => {
            all.insert(name.clone(), dims);
        }
        Some(TensorLocation::PerExpert(pattern)) => {
            for expert in 0..dims[0] {
                let name = pattern.replace("{}", &expert.to_string());
                all.insert(format!("{name}.weight"), dims[1..].to_vec());
            }
        }
        Some(TensorLocation::Rows {
            name,
            first,
            height,
        }) => {
            assert!(first + dims[1] <= *height, "{name}");
            all.insert(name.clone(), vec![dims[0], *height, dims[2]]);
        }
        // Follows from the config.
        None => assert_eq!(tensor.id.role, TensorRole::RopeDivisors),
    }
}

/// What a file holds. The several tensors of a quantised matrix count as the weight that they are of, whose
/// shape they say in other words.
fn found(model: &Model, expected: &Shapes) -> Shapes {
    let mut all = Shapes::new();
    for info in model.tensors().infos() {
        let name = info.name.as_str();
        let (module, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
        let weight = format!("{module}.weight");
        let part = !matches!(suffix, "weight" | "bias") && expected.contains_key(&weight);
        if !part {
            all.insert(name.to_owned(), info.shape.clone());
        } else if SEVERAL.contains(&suffix) && model.tensors().get(&weight).is_none() {
            let shape = expected[&weight].clone();
            all.insert(weight, shape);
        }
    }
    all
}

fn check(model: &Model, path: &Path) {
    let path = path.display();
    let mut expected_all = Shapes::new();
    for tensor in model.spec.tensors() {
        expected(model, &tensor, &mut expected_all);
    }
    assert_eq!(found(model, &expected_all), expected_all, "{path}");
    let ids: BTreeSet<_> = model.spec.tensors().map(|tensor| tensor.id).collect();
    assert_eq!(ids.len(), model.spec.tensors().count(), "{path}");
    for tensor in model.spec.tensors() {
        assert_eq!(model.spec.tensor(tensor.id), Some(tensor), "{path}");
        assert_eq!(tensor.id.role.is_in_layer(), tensor.id.layer.is_some());
        assert_eq!(
            tensor.id.role.is_vector() || tensor.id.part == TensorPart::Bias,
            tensor.shape.dims().len() == 1
        );
        assert_eq!(
            tensor.id.role.is_expert(),
            tensor.shape.dims().len() == 3,
            "{}",
            tensor.id
        );
    }
    // Numbers of the file itself, where it holds numbers.
    let infos = model.tensors().infos();
    let floats = infos.map(|info| match info.name.as_str() {
        "rope_freqs.weight" => 0,
        _ => info.elements() as u64,
    });
    let quantised = matches!(&model.source, ModelSource::Hf(f) if f.quantization.is_some());
    let listed = model.spec.tensors().filter(DecoderTensor::is_parameter);
    let listed: u64 = listed.map(|tensor| tensor.shape.elements()).sum();
    assert_eq!(model.parameters(), listed, "{path}");
    if !quantised {
        assert_eq!(floats.sum::<u64>(), listed, "{path}");
    }
}

#[test]
fn it_is_what_the_files_of_every_fixture_hold() {
    let (mut families, mut files) = (BTreeSet::new(), 0);
    for dir in fixture_dirs() {
        let model = open(&dir);
        families.insert(model.family.name);
        check(&model, &dir);
        for file in std::fs::read_dir(&dir).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|e| e == "gguf") {
                check(&open(&path), &path);
                files += 1;
            }
        }
    }
    let all: BTreeSet<_> = FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(families, all);
    assert!(files >= 20, "{files} GGUF files");
}

#[test]
fn names_lead_back_to_the_tensor() {
    let schemes = FAMILIES.iter().map(|family: &&Family| family.hf_names);
    for names in schemes.chain([gguf_names()]) {
        for role in TensorRole::ALL {
            let id = match role.is_in_layer() {
                true => TensorId::in_layer(17, role),
                false => TensorId::global(role),
            };
            for id in [id, id.bias()] {
                if let Some(name) = names.name(id) {
                    assert_eq!(names.parse(&name), Some(id), "{name}");
                }
            }
        }
    }
    for name in [
        "weight",
        "vision.layers.0.mlp.down_proj.weight",
        "model.layers.x.mlp.up_proj.weight",
    ] {
        assert_eq!(FAMILIES[0].hf_names.parse(name), None, "{name}");
    }
}

#[test]
fn what_adapters_name_are_the_linear_maps_outside_experts() {
    let model = open(&fixtures().join("qwen3-moe-sparse"));
    let names = model.family.hf_names;
    let modules = model
        .spec
        .tensors()
        .filter_map(|tensor| tensor.lora_module(names));
    let modules: Vec<_> = modules.filter(|name| name.contains("layers.0.")).collect();
    let dense = matches!(
        model.spec.layers[0].feed_forward,
        FeedForwardSpec::GatedMlp(_)
    );
    let mut expected = vec![
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
    ];
    if dense {
        expected.extend(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);
    }
    let expected: Vec<_> = expected
        .iter()
        .map(|part| format!("model.layers.0.{part}"))
        .collect();
    assert_eq!(modules, expected);
}

#[test]
fn every_role_has_its_cut() {
    use CutAxis::{Columns, Experts, Replicated, Rows, Vocabulary};
    let table = [
        (TensorRole::TokenEmbedding, Vocabulary, None),
        (TensorRole::RopeDivisors, Replicated, None),
        (TensorRole::AttentionNorm, Replicated, None),
        (TensorRole::Query, Rows, Some(Rows)),
        (TensorRole::Key, Rows, Some(Rows)),
        (TensorRole::Value, Rows, Some(Rows)),
        (TensorRole::QueryNorm, Replicated, None),
        (TensorRole::KeyNorm, Replicated, None),
        (TensorRole::AttentionOutput, Columns, Some(Replicated)),
        (TensorRole::FeedForwardNorm, Replicated, None),
        (TensorRole::Gate, Rows, Some(Rows)),
        (TensorRole::Up, Rows, Some(Rows)),
        (TensorRole::Down, Columns, Some(Replicated)),
        (TensorRole::Router, Replicated, None),
        (TensorRole::ExpertGate, Experts, None),
        (TensorRole::ExpertUp, Experts, None),
        (TensorRole::ExpertDown, Experts, None),
        (TensorRole::FinalNorm, Replicated, None),
        (TensorRole::Output, Vocabulary, None),
    ];
    assert_eq!(table.map(|row| row.0), TensorRole::ALL);
    for (role, weight, bias) in table {
        let id = TensorId::in_layer(0, role);
        assert_eq!(id.cut(), weight, "{role}");
        if let Some(bias) = bias {
            assert_eq!(id.bias().cut(), bias, "bias of the {role}");
        }
    }
}

/// How often each element of a tensor is held by some rank.
fn held(tensor: &DecoderTensor, ranks: usize) -> Result<Vec<usize>, String> {
    let dims = tensor.shape.dims();
    let mut held = vec![0; dims.iter().product()];
    for rank in 0..ranks {
        let slice = tensor.slice(rank, ranks)?;
        let inner: usize = dims[slice.dim + 1..].iter().product();
        for (i, count) in held.iter_mut().enumerate() {
            let at = i / inner % dims[slice.dim];
            *count += usize::from(slice.range.contains(&at));
        }
    }
    Ok(held)
}

#[test]
fn slices_make_the_whole() {
    let (mut cut, mut refused) = (BTreeMap::<_, usize>::new(), 0);
    for dir in fixture_dirs() {
        let spec = open(&dir).spec;
        for ranks in [1, 2, 3] {
            for tensor in spec.tensors() {
                let axis = tensor.cut();
                let whole = match axis {
                    CutAxis::Replicated => ranks,
                    _ => 1,
                };
                match held(&tensor, ranks) {
                    Ok(held) => {
                        assert!(held.iter().all(|&n| n == whole), "{}: {ranks}", tensor.id);
                        *cut.entry((ranks, format!("{axis:?}"))).or_default() += 1;
                    }
                    Err(reason) => {
                        assert!(reason.contains(&tensor.id.to_string()), "{reason}");
                        assert!(ranks > 1, "{reason}");
                        refused += 1;
                    }
                }
            }
        }
    }
    for ranks in [1, 2, 3] {
        for axis in ["Replicated", "Rows", "Columns", "Vocabulary", "Experts"] {
            // No fixture has experts by three.
            let found = cut.contains_key(&(ranks, axis.to_owned()));
            assert!(found || (ranks, axis) == (3, "Experts"), "{ranks}: {axis}");
        }
    }
    assert!(refused > 0);
}

#[test]
fn heads_are_not_cut() {
    let spec = open(&fixtures().join("llama3-tied")).spec;
    let tensor = |role| spec.tensor(TensorId::in_layer(0, role)).unwrap();
    let (query, key) = (tensor(TensorRole::Query), tensor(TensorRole::Key));
    let ranks = key.rotated_heads;
    for tensor in [query, key] {
        for rank in 0..ranks {
            let slice = tensor.slice(rank, ranks).unwrap();
            assert_eq!(slice.range.start % tensor.unit, 0);
            assert_eq!(slice.range.len() % tensor.unit, 0);
        }
    }
    // As many rows as ranks, but not as many heads.
    let most = 2 * ranks;
    assert_eq!(key.shape.dims()[0] % most, 0);
    let reason = key.slice(0, most).unwrap_err();
    assert_eq!(
        reason,
        format!(
            "layer 0, key projection: found {ranks} heads, expected a multiple of {most} for as many ranks"
        )
    );
    assert!(key.slice(2, 2).is_err());
}
