//! The inventory of tensors: it is what files hold, no more and no less, and ranks that cut it hold all of
//! it together.

use crate::support::bidirectional::{self, GEMMA};
use crate::support::{fixture_dirs, fixtures, open, vision};
use ferrum_formats::{ModelSource, TensorSource};
use ferrum_kernels::LinearAttentionRule;
use ferrum_kernels::cpu::CpuBackend;
use ferrum_models::{
    AttentionSpec, DecoderSpec, DecoderTensor, Family, FeedForwardSpec, LinearAttentionSpec, Model,
    Moe, Native, RankShard, ShardAxis, ShardBoundaries, ShardUnit, TensorId, TensorLocation,
    TensorPart, TensorRole, TensorShape, WeightNames, WeightPolicy, families::FAMILIES, read_model,
};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names and shapes.
type Shapes = BTreeMap<String, Vec<usize>>;

fn names_of(model: &Model) -> &'static WeightNames {
    match &model.source {
        ModelSource::Gguf(_) => model.family.gguf_names,
        ModelSource::Hf(folder) => {
            let base = model.family.hf_base_names;
            let table = |names: &WeightNames| format!("{}.weight", names.embedding);
            let base = base.filter(|names| folder.tensors.get(&table(names)).is_some());
            base.unwrap_or(model.family.hf_names)
        }
    }
}

fn gguf_names() -> &'static WeightNames {
    ferrum_models::families::gguf_names()
}

/// The suffixes of a matrix that is several tensors, by the scheme that it is quantised with.
const SEVERAL: [&str; 3] = ["qweight", "weight_packed", "weight_scale"];

/// What a file should hold of a tensor, as names and shapes.
fn expected(model: &Model, tensor: &DecoderTensor, all: &mut Shapes) {
    let (mut dims, tensors) = (tensor.shape.dims(), model.tensors());
    let names = names_of(model);
    let places = names.locations(tensor);
    let there = |place: &&TensorLocation| match place {
        TensorLocation::Rows { name, .. } | TensorLocation::Runs { name, .. } => {
            tensors.get(name).is_some()
        }
        TensorLocation::Reordered { name, .. } => {
            let blocks = format!("{name}_blocks");
            [name, &blocks]
                .iter()
                .any(|name| tensors.get(name).is_some())
        }
        _ => true,
    };
    match places.iter().find(there) {
        Some(TensorLocation::Whole(name)) => {
            if names.transposed && tensor.id.layer.is_some() {
                dims.reverse();
            }
            // One row is a vector in GGUF files.
            let is_gguf = matches!(model.source, ModelSource::Gguf(_));
            if is_gguf && tensor.id.role == TensorRole::SharedRouter {
                dims.remove(0);
            }
            // Norms with weights of each head's own have a row for each in some files.
            let rows = tensors.get(name).is_some_and(|view| view.shape.len() == 2);
            if matches!(tensor.shape, TensorShape::Vector(_)) && rows && tensor.unit > 1 {
                dims = vec![dims[0] / tensor.unit, tensor.unit];
            }
            if let (TensorShape::Kernel { .. }, ModelSource::Gguf(_)) =
                (tensor.shape, &model.source)
            {
                dims.remove(1);
            }
            if is_gguf && let Some(linear) = state_space(model, tensor) {
                match tensor.id.role {
                    TensorRole::LinearDecay | TensorRole::LinearSkip => dims.push(1),
                    // A row for each group.
                    TensorRole::LinearNorm => {
                        dims = vec![linear.key_heads, dims[0] / linear.key_heads];
                    }
                    _ => {}
                }
            }
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
            let rows = dims.len().saturating_sub(2);
            assert!(first + dims[rows] <= *height, "{name}");
            dims[rows] = *height;
            if names.transposed {
                dims.reverse();
            }
            all.insert(name.clone(), dims);
        }
        Some(TensorLocation::Runs { name, runs, height }) => {
            let rows = runs.count * runs.len;
            assert_eq!(rows, dims[0], "{name}");
            assert!(runs.row(rows - 1) < *height, "{name}");
            dims[0] = *height;
            all.insert(name.clone(), dims);
        }
        Some(TensorLocation::Reordered { name, layout }) => {
            let (experts, width) = (dims[0], layout.width);
            let blocks = format!("{name}_blocks");
            if tensors.get(&blocks).is_some() {
                let in_row = dims[2] / 32;
                all.insert(blocks, vec![experts, width, in_row, 16]);
                all.insert(format!("{name}_scales"), vec![experts, width, in_row]);
            } else if let TensorShape::Biases { .. } = tensor.shape {
                all.insert(name.clone(), vec![experts, width]);
            } else if name.ends_with(".weight") {
                all.insert(name.clone(), vec![experts * layout.height, width]);
            } else {
                all.insert(name.clone(), vec![experts, layout.height, width]);
            }
        }
        // Follows from the config.
        None => assert!(tensor.id.role.is_rope()),
    }
}

/// The state space that a tensor is of.
fn state_space<'m>(model: &'m Model, tensor: &DecoderTensor) -> Option<&'m LinearAttentionSpec> {
    match &model.spec.layers[tensor.id.layer?].attention {
        AttentionSpec::Linear(linear) if linear.rule == LinearAttentionRule::StateSpace => {
            Some(linear)
        }
        _ => None,
    }
}

/// Masks of GPT-2, which follow from the config.
fn is_mask(name: &str) -> bool {
    name.ends_with(".attn.bias")
}

/// Tensors of an image tower, which are no part of the decoder.
fn is_of_tower(name: &str) -> bool {
    name.starts_with("vision_tower.") || name.starts_with("multi_modal_projector.")
}

/// What a file holds. The several tensors of a quantised matrix count as the weight that they are of, whose
/// shape they say in other words.
fn found(model: &Model, expected: &Shapes) -> Shapes {
    let mut all = Shapes::new();
    for info in model.tensors().infos() {
        let name = info.name.as_str();
        if is_mask(name) || is_of_tower(name) {
            continue;
        }
        let (module, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
        let weight = format!("{module}.weight");
        let part = !matches!(suffix, "weight" | "bias")
            && !expected.contains_key(name)
            && expected.contains_key(&weight);
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
    assert_eq!(model.unused_tensors(), [""; 0], "{path}");
    let ids: BTreeSet<_> = model.spec.tensors().map(|tensor| tensor.id).collect();
    assert_eq!(ids.len(), model.spec.tensors().count(), "{path}");
    for tensor in model.spec.tensors() {
        assert_eq!(model.spec.tensor(tensor.id), Some(tensor), "{path}");
        assert_eq!(tensor.id.role.is_in_layer(), tensor.id.layer.is_some());
        let taps = matches!(tensor.shape, TensorShape::Kernel { .. });
        let biases = matches!(tensor.shape, TensorShape::Biases { .. });
        assert_eq!(
            tensor.id.role.is_vector() || tensor.id.part == TensorPart::Bias,
            tensor.shape.dims().len() == 1 || taps || biases
        );
        let heads = matches!(tensor.id.role, TensorRole::KeyUp | TensorRole::ValueUp);
        assert_eq!(
            tensor.id.role.is_expert() || heads || taps,
            tensor.shape.dims().len() == 3 || biases,
            "{}",
            tensor.id
        );
    }
    // Numbers of the file itself, where it holds numbers.
    let infos = model.tensors().infos();
    let floats = infos.map(|info| match info.name.as_str() {
        name if name.starts_with("rope_f") || is_mask(name) || is_of_tower(name) => 0,
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
    let others = [vision::folder(), bidirectional::folder(GEMMA)];
    for dir in fixture_dirs().into_iter().chain(others) {
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

/// What a decoder does not read of a file is named, unless files are known to hold it.
#[test]
fn tensors_that_nothing_reads_are_named() {
    let (from, to) = (fixtures().join("qwen3-moe"), tempfile::tempdir().unwrap());
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<_, _> = file.tensors().into_iter().collect();
    let unread = [
        "model.layers.0.mlp.experts.1.up_proj.bias",
        "model.layers.0.mlp.experts.77.up_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_proj.scale",
        "model.layers.2.post_feedforward_layernorm.weight",
        "model.layers.3.eh_proj.weight",
        "score.weight",
    ];
    let beside = [
        "model.layers.0.mlp.experts.1.up_proj.g_idx",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.visual.blocks.0.norm1.weight",
        "mtp.fc.weight",
    ];
    let (zeros, ones) = ([0; 8], [1; 8]);
    let view = |bytes| TensorView::new(Dtype::F32, vec![2], bytes).unwrap();
    for name in unread.iter().chain(&beside) {
        assert!(tensors.insert((*name).to_owned(), view(&ones)).is_none());
    }
    // A bias of zeros adds nothing.
    tensors.insert("model.layers.1.self_attn.o_proj.bias".into(), view(&zeros));
    serialize_to_file(tensors, None, &to.path().join("model.safetensors")).unwrap();
    std::fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
    let model = open(to.path());
    let mut unused = model.unused_tensors();
    unused.sort_unstable();
    assert_eq!(unused, unread);
    let mut models = 0;
    for entry in std::fs::read_dir(fixtures().join("../drafts")).unwrap() {
        let folder = entry.unwrap().path();
        for path in [folder.clone(), folder.join("model.gguf")] {
            let source = ModelSource::open(&path).ok();
            if let Some(model) = source.and_then(|source| read_model(source).ok()) {
                assert_eq!(model.unused_tensors(), [""; 0], "{}", path.display());
                models += 1;
            }
        }
    }
    assert!(models >= 12, "{models} models with heads");
}

#[test]
fn names_lead_back_to_the_tensor() {
    let schemes = FAMILIES
        .iter()
        .flat_map(|family: &&Family| [family.hf_names, family.gguf_names]);
    let base = FAMILIES.iter().filter_map(|family| family.hf_base_names);
    for names in schemes.chain(base).chain([gguf_names()]) {
        for role in TensorRole::ALL {
            let id = match role.is_in_layer() {
                true => TensorId::in_layer(17, role),
                false => TensorId::global(role),
            };
            for id in [id, id.bias()] {
                if let Some(name) = names.name(id) {
                    // Granite 4 and Gemma 4 call their dense feed-forward as a shared expert.
                    let found = names.parse(&name).unwrap();
                    assert_eq!(names.name(found), Some(name.clone()), "{name}");
                    // Falcon's norm before both parts is that before the feed-forward where there are two.
                    let shared = matches!(
                        (found.role, role),
                        (TensorRole::Gate, TensorRole::SharedGate)
                            | (TensorRole::Up, TensorRole::SharedUp)
                            | (TensorRole::Down, TensorRole::SharedDown)
                            | (
                                TensorRole::AttentionNorm,
                                TensorRole::ParallelFeedForwardNorm
                            )
                    );
                    assert!(found == id || shared, "{name}: {found}");
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

/// Every role of the fixtures' tensors, and how their weights and biases are cut.
#[test]
fn every_role_has_its_cut() {
    use ShardAxis::{Columns, Matrices, Replicated, Rows, Vocabulary};
    let table: [(&[TensorRole], ShardAxis, ShardAxis); 5] = [
        (
            &[
                TensorRole::Query,
                TensorRole::Key,
                TensorRole::Value,
                TensorRole::AttentionGate,
                TensorRole::ConvInputGate,
                TensorRole::ConvOutputGate,
                TensorRole::ConvInput,
                TensorRole::ConvKernel,
                TensorRole::Gate,
                TensorRole::Up,
                TensorRole::ExpertGate,
                TensorRole::ExpertUp,
                TensorRole::AttentionSinks,
                TensorRole::QueryUp,
                TensorRole::SharedGate,
                TensorRole::SharedUp,
            ],
            Rows,
            Rows,
        ),
        (
            &[
                TensorRole::AttentionOutput,
                TensorRole::ConvOutput,
                TensorRole::Down,
                TensorRole::ExpertDown,
                TensorRole::SharedDown,
            ],
            Columns,
            Replicated,
        ),
        (
            &[TensorRole::TokenEmbedding, TensorRole::Output],
            Vocabulary,
            Vocabulary,
        ),
        (
            &[
                TensorRole::LinearQuery,
                TensorRole::LinearKey,
                TensorRole::LinearValue,
                TensorRole::LinearGate,
                TensorRole::LinearBeta,
                TensorRole::LinearStep,
                TensorRole::LinearConv,
                TensorRole::LinearDecay,
                TensorRole::LinearStepBias,
                TensorRole::LinearSkip,
                TensorRole::LinearNorm,
                TensorRole::LinearOutput,
                TensorRole::RopeFactors,
                TensorRole::RopeLongFactors,
                TensorRole::RopeShortFactors,
                TensorRole::PositionEmbedding,
                TensorRole::AttentionNorm,
                TensorRole::PostAttentionNorm,
                TensorRole::FeedForwardNorm,
                TensorRole::ParallelAttentionNorm,
                TensorRole::ParallelFeedForwardNorm,
                TensorRole::PostFeedForwardNorm,
                TensorRole::OutputScale,
                TensorRole::PerLayerEmbedding,
                TensorRole::PerLayerProjection,
                TensorRole::PerLayerProjectionNorm,
                TensorRole::PerLayerGate,
                TensorRole::PerLayerOutput,
                TensorRole::PerLayerNorm,
                TensorRole::Router,
                TensorRole::QueryDown,
                TensorRole::QueryDownNorm,
                TensorRole::LatentDown,
                TensorRole::LatentNorm,
                TensorRole::ExpertCorrection,
                TensorRole::RouterNorm,
                TensorRole::ExpertNorm,
                TensorRole::PostExpertNorm,
                TensorRole::PostSharedNorm,
                TensorRole::ExpertScale,
                TensorRole::SharedRouter,
                TensorRole::FinalNorm,
            ],
            Replicated,
            Replicated,
        ),
        (
            &[TensorRole::KeyUp, TensorRole::ValueUp],
            Matrices,
            Matrices,
        ),
    ];
    let mut seen = BTreeSet::new();
    for dir in fixture_dirs() {
        let model = open(&dir);
        for tensor in model.spec.tensors() {
            let (id, cut) = (tensor.id, tensor.shard_axis());
            let expected = match id.role {
                // Cut where there is one for all heads.
                TensorRole::QueryNorm | TensorRole::KeyNorm => {
                    match tensor.shape.dims()[0] > tensor.unit {
                        true => Rows,
                        false => Replicated,
                    }
                }
                role => {
                    let row = table.iter().find(|row| row.0.contains(&role));
                    let (_, weight, bias) = row.unwrap();
                    match id.part {
                        TensorPart::Weight => *weight,
                        TensorPart::Bias => *bias,
                    }
                }
            };
            assert_eq!(cut, expected, "{}: {id}", dir.display());
            assert_eq!(tensor.shard_unit().is_none(), cut == Replicated, "{id}");
            seen.insert((id.role, cut == Replicated));
        }
    }
    for role in TensorRole::ALL {
        assert!(
            seen.iter().any(|(found, _)| *found == role),
            "no fixture has a {role}"
        );
    }
    for norm in [TensorRole::QueryNorm, TensorRole::KeyNorm] {
        assert!(
            [true, false]
                .iter()
                .all(|&whole| seen.contains(&(norm, whole))),
            "{norm}"
        );
    }
}

/// The part of a rank on a device that computes on floats alone.
fn shard(model: &Model, rank: usize, ranks: usize) -> ferrum_types::Result<RankShard> {
    model.shard(WeightPolicy::floats(), (rank, ranks))
}

/// How often each element of a tensor is held by some rank.
fn held(tensor: &DecoderTensor, cuts: &[RankShard]) -> Vec<usize> {
    let dims = tensor.shape.dims();
    let mut held = vec![0; dims.iter().product()];
    for cut in cuts {
        let slice = cut.slice(tensor);
        assert!(!slice.range.is_empty(), "{}", tensor.id);
        let inner: usize = dims[slice.dim + 1..].iter().product();
        for (i, count) in held.iter_mut().enumerate() {
            let at = i / inner % dims[slice.dim];
            *count += usize::from(slice.range.contains(&at));
        }
    }
    held
}

#[test]
fn slices_make_the_whole() {
    let (mut cut, mut gathered) = (BTreeMap::<_, usize>::new(), BTreeMap::<_, usize>::new());
    let policies = [
        WeightPolicy::floats(),
        WeightPolicy::of::<CpuBackend, Moe<Native>>(),
    ];
    let dirs = fixture_dirs();
    let all = dirs.iter().flat_map(|dir| policies.map(|kept| (dir, kept)));
    for (dir, policy) in all {
        let model = open(dir);
        for ranks in [1, 2, 3] {
            let cuts: Vec<_> = (0..ranks)
                .map(|r| model.shard(policy, (r, ranks)).unwrap())
                .collect();
            let specs: Vec<_> = cuts.iter().map(RankShard::rank_spec).collect();
            for spec in &specs {
                assert_eq!(spec.validate(), Ok(()), "{}", dir.display());
                assert_eq!(ranks == 1, *spec == model.spec);
            }
            for tensor in model.spec.tensors() {
                let axis = cuts[0].axis(&tensor);
                let held = held(&tensor, &cuts);
                let fits = match (axis, tensor.shard_unit()) {
                    (ShardAxis::Replicated, _) => held.iter().all(|&n| n == ranks),
                    // Some ranks may hold the same one.
                    (_, Some(ShardUnit::KvHeads)) => held.iter().all(|&n| n >= 1),
                    _ => held.iter().all(|&n| n == 1),
                };
                assert!(fits, "{}: {}: {ranks}", dir.display(), tensor.id);
                *cut.entry((ranks, format!("{axis:?}"))).or_default() += 1;
                // A rank's own spec has the same tensor, but for the vocabulary and for products over inputs of all ranks,
                // which it puts together again.
                if axis != tensor.shard_axis() {
                    *gathered.entry((ranks, tensor.id.role)).or_default() += 1;
                    continue;
                }
                for (cut, spec) in cuts.iter().zip(&specs) {
                    let mut dims = tensor.shape.dims();
                    let slice = cut.slice(&tensor);
                    if axis != ShardAxis::Vocabulary {
                        dims[slice.dim] = slice.range.len();
                    }
                    let own = spec.tensor(tensor.id).unwrap();
                    assert_eq!(own.shape.dims(), dims, "{}", tensor.id);
                }
            }
        }
    }
    assert_eq!(cut.len(), 3 * 5, "{cut:?}");
    // Groups in activation order, and odd widths.
    for role in [
        TensorRole::AttentionOutput,
        TensorRole::Down,
        TensorRole::ExpertDown,
    ] {
        assert!(
            (2..=3).all(|ranks| gathered.contains_key(&(ranks, role))),
            "{gathered:?}"
        );
    }
    assert!(gathered.keys().all(|(ranks, _)| *ranks > 1), "{gathered:?}");
}

#[test]
fn heads_are_not_cut() {
    let model = open(&fixtures().join("llama3-tied"));
    let tensor = |role| model.spec.tensor(TensorId::in_layer(0, role)).unwrap();
    let (query, key) = (tensor(TensorRole::Query), tensor(TensorRole::Key));
    let (heads, kv_heads) = (query.rotated_heads, key.rotated_heads);
    assert_eq!((heads, kv_heads), (6, 2));
    for ranks in 1..=heads {
        for rank in 0..ranks {
            let cut = shard(&model, rank, ranks).unwrap();
            for tensor in [query, key] {
                let slice = cut.slice(&tensor);
                assert_eq!(slice.range.start % tensor.unit, 0);
                assert_eq!(slice.range.len() % tensor.unit, 0);
            }
            // The query heads of a rank read the kv heads that it holds.
            let of = |tensor: &DecoderTensor| {
                let range = cut.slice(tensor).range;
                range.start / tensor.unit..range.end / tensor.unit
            };
            let (queries, keys) = (of(&query), of(&key));
            for head in queries {
                assert!(
                    keys.contains(&(head / (heads / kv_heads))),
                    "{rank} of {ranks}"
                );
            }
        }
    }
    let refused = shard(&model, 0, heads + 1).unwrap_err().to_string();
    let expected = "layer 0: found 6 query heads over 2 kv heads, expected at least 7 query heads for as many ranks";
    assert!(refused.ends_with(expected), "{refused}");
    assert!(shard(&model, 2, 2).is_err());
}

#[test]
fn too_small_a_decoder_is_refused_with_its_sizes() {
    let spec = open(&fixtures().join("llama3-tied")).spec;
    let cut =
        |spec: &DecoderSpec, ranks| RankShard::new(spec, &ShardBoundaries::default(), (0, ranks));
    let mut narrow = spec.clone();
    if let FeedForwardSpec::GatedMlp(mlp) = &mut narrow.layers[1].feed_forward {
        mlp.intermediate = 2;
    }
    assert!(cut(&narrow, 2).is_ok());
    let reason = cut(&narrow, 3).unwrap_err();
    assert_eq!(
        reason,
        "layer 1: found a feed-forward of 2 elements, expected at least 3 for as many ranks"
    );
    let vocab_size = 2;
    let reason = cut(&DecoderSpec { vocab_size, ..spec }, 3).unwrap_err();
    assert_eq!(
        reason,
        "found a vocabulary of 2 tokens, expected at least 3 for as many ranks"
    );
}

/// Formats of blocks are cut between blocks, where there are enough of them.
#[test]
fn widths_are_cut_where_formats_can_be() {
    let cases = [
        ("llama-quantized/model-q8_0.gguf", 32),
        ("llama-awq", 32),
        ("llama-fp8-block", 32),
    ];
    for (name, border) in cases {
        let model = open(&fixtures().join(name));
        let gate = model
            .spec
            .tensor(TensorId::in_layer(0, TensorRole::Gate))
            .unwrap();
        for (rank, ranks) in [(0, 2), (1, 2), (0, 3), (2, 3)] {
            let range = shard(&model, rank, ranks).unwrap().slice(&gate).range;
            assert_eq!((range.start % border, range.end % border), (0, 0), "{name}");
        }
    }
}
