//! Encoders give what `transformers` gives, alone and packed with others, on every backend.

use crate::gpu::gpu;
use crate::support::encoders::{
    NAMES, check_alone, difference, difference_of, expected, floats, folder, ids, list, open,
    runner,
};
use crate::support::{exact_cpu, max_difference};
use ferrum_conformance::minimal::Minimal;
use ferrum_formats::ModelSource;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_models::encoder::{
    EncoderLimits, EncoderSpec, TextEncoder, TextInput, is_encoder, load_encoder, read_encoder,
};
use ferrum_models::{Dequantized, Pooling, WeightDtype, read_model};
use ferrum_types::{Error, TokenId};
use serde_json::{Value, json};
use std::path::Path;

#[test]
fn vectors_and_scores_are_those_of_transformers() {
    for name in NAMES {
        for (backend, found) in [
            ("reference", difference(&ReferenceBackend::new(), name)),
            ("cpu", difference(&exact_cpu(), name)),
        ] {
            assert!(found <= 2e-5, "{name} on {backend}: {found}");
        }
        if let Some(device) = gpu() {
            let found = difference(&device, name);
            assert!(found <= 2e-5, "{name} on a GPU: {found}");
        }
        // Activations of eight bits of precision.
        let found = difference(&Minimal::default(), name);
        assert!(found <= 0.25 && found > 1e-4, "{name} in bf16: {found}");
    }
}

#[test]
fn matrices_rounded_to_bf16_change_little_and_something() {
    for name in NAMES {
        let mut model = open(name);
        model.dtype = WeightDtype::Bf16;
        let cpu = difference_of(&exact_cpu(), &model, name);
        let reference = difference_of(&ReferenceBackend::new(), &model, name);
        for found in [cpu, reference] {
            assert!(found <= 0.1 && found > 1e-4, "{name}: {found}");
        }
        assert!(
            (cpu - reference).abs() <= 2e-5,
            "{name}: {cpu} and {reference}"
        );
    }
}

/// The files have the matrices in f16.
#[test]
fn a_gguf_file_gives_the_vectors_of_its_folder() {
    for name in ["bert", "distilbert", "nomic-bert"] {
        let source = ModelSource::open(folder(name).join("model.gguf")).unwrap();
        assert!(is_encoder(&source));
        let model = read_encoder(source).unwrap();
        let (expected, of_folder) = (expected(name), open(name));
        // DistilBERT goes as BERT there.
        let family = model.spec.family;
        assert_eq!(
            model.spec,
            EncoderSpec {
                family,
                ..of_folder.spec
            },
            "{name}"
        );
        assert_eq!(model.pooling, Some(Pooling::Mean));
        let texts = list(&expected, "texts");
        let tokens: Vec<_> = texts.iter().map(|text| ids(text)).collect();
        let inputs: Vec<_> = tokens.iter().map(|tokens| TextInput::of(tokens)).collect();
        let limits = EncoderLimits::of(&model.spec);
        let found = runner(&exact_cpu(), &model, limits).embed(&inputs, Pooling::Mean);
        for (found, text) in found.unwrap().iter().zip(&texts) {
            let off = max_difference(found, &floats(text, "mean"));
            assert!(off < 1e-2, "{name}: {off}");
        }
    }
    let error = read_model(ModelSource::open(folder("bert").join("model.gguf")).unwrap());
    let error = error.err().unwrap().to_string();
    assert!(
        error.contains("ferrum embed and ferrum rerank run it"),
        "{error}"
    );
    // A decoder's file is none.
    let decoder = folder("../models/qwen3/model.gguf");
    let error = read_encoder(ModelSource::open(decoder).unwrap());
    let error = error.err().unwrap().to_string();
    assert!(error.contains("\"qwen3\" is no encoder"), "{error}");
}

/// Texts share a batch, or not: the same bits.
#[test]
fn texts_do_not_know_of_each_other() {
    for name in ["bert", "nomic-bert", "modernbert"] {
        check_alone(&exact_cpu(), name, &[(1, 2), (4, 64)]);
    }
}

#[test]
fn what_cannot_be_computed_is_refused() {
    let model = open("bert");
    let mut encoder = runner(&exact_cpu(), &model, EncoderLimits::of(&model.spec));
    let mut refused = |tokens: &[TokenId]| {
        let error = encoder.embed(&[TextInput::of(tokens)], Pooling::Mean);
        error.unwrap_err()
    };
    assert!(refused(&[]).to_string().contains("no token"));
    let vocab = model.spec.vocab_size as TokenId;
    assert!(refused(&[1, vocab]).to_string().contains("vocabulary"));
    let long = vec![5; model.spec.max_tokens() + 1];
    assert!(matches!(refused(&long), Error::ContextOverflow { .. }));
    let scores = encoder.classify(&[TextInput::of(&[1, 2])]);
    assert!(scores.unwrap_err().to_string().contains("no classifier"));
    // An encoder is no decoder, and a decoder no encoder; each is told what runs it, or what is run.
    let error = read_model(ModelSource::open(folder("bert")).unwrap());
    let error = error.err().unwrap().to_string();
    assert!(error.contains("\"BertModel\" is a text encoder"), "{error}");
    let decoder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3");
    let source = ModelSource::open(decoder).unwrap();
    assert!(!is_encoder(&source));
    let error = read_encoder(source).err().unwrap().to_string();
    assert!(
        error.contains("Qwen3ForCausalLM") && error.contains("BertModel"),
        "{error}"
    );
}

#[test]
fn configs_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |change: &dyn Fn(&mut Value)| {
        for name in ["model.safetensors", "tokenizer.json"] {
            std::fs::copy(folder("bert").join(name), dir.path().join(name)).unwrap();
        }
        let text = std::fs::read(folder("bert").join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        change(&mut config);
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let model = read_encoder(ModelSource::open(dir.path()).unwrap());
        let model = model.and_then(|model| {
            load_encoder::<_, Dequantized>(&ReferenceBackend::new(), &model, &mut |_, _| ())?;
            Ok(())
        });
        model.err().map(|error| error.to_string())
    };
    assert_eq!(copy(&|_| ()), None);
    for (key, value, words) in [
        (
            "num_attention_heads",
            Value::from(5),
            "multiple of the 5 heads",
        ),
        ("num_hidden_layers", Value::from(0), "num_hidden_layers"),
        ("hidden_act", Value::from("relu6"), "hidden_act"),
        (
            "position_embedding_type",
            Value::from("relative_key"),
            "absolute",
        ),
        ("vocab_size", Value::from(7), "word_embeddings.weight"),
        ("num_hidden_layers", Value::from(4), "encoder.layer.3"),
        ("layer_norm_eps", Value::from(-1.0), "layer_norm_eps"),
    ] {
        let found = copy(&|config| config[key] = value.clone());
        assert!(
            found.as_ref().is_some_and(|f| f.contains(words)),
            "{key}: {found:?}"
        );
    }
}

/// The same model as `transformers` and as its authors write it.
#[test]
fn published_configs_mean_the_same() {
    for name in ["nomic-bert", "gte", "modernbert"] {
        let published = open(&format!("{name}-published"));
        assert_eq!(open(name).spec, published.spec, "{name}");
    }
}

/// What a config asks for beyond what is computed is refused by the name of its field.
#[test]
fn variants_that_are_not_computed_are_refused() {
    let cases = [
        ("nomic-bert-published", "prenorm", json!(true)),
        ("nomic-bert-published", "parallel_block", json!(true)),
        ("nomic-bert-published", "use_rms_norm", json!(true)),
        ("nomic-bert-published", "norm_mlp", json!(true)),
        ("nomic-bert-published", "causal", json!(true)),
        // Two keys of one meaning.
        ("nomic-bert-published", "n_embd", json!(40)),
        ("nomic-bert-published", "hidden_act", json!("gelu")),
        ("nomic-bert-published", "n_positions", json!(1 << 20)),
        (
            "nomic-bert",
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}),
        ),
        ("nomic-bert-published", "rotary_emb_fraction", json!(0.5)),
        (
            "nomic-bert-published",
            "rotary_emb_interleaved",
            json!(true),
        ),
        ("nomic-bert-published", "rotary_scaling_factor", json!(2.0)),
        ("nomic-bert-published", "num_experts", json!(8)),
        ("nomic-bert-published", "activation_function", json!("relu")),
        ("nomic-bert", "position_embedding_type", json!("absolute")),
        ("bert", "position_embedding_type", json!("relative_key")),
        ("gte-published", "layer_norm_type", json!("rms_norm")),
        ("gte-published", "logn_attention_scale", json!(true)),
        (
            "gte-published",
            "position_embedding_type",
            json!("absolute"),
        ),
        (
            "gte-published",
            "rope_scaling",
            json!({"type": "ntk", "factor": 0.0}),
        ),
        (
            "gte-published",
            "rope_scaling",
            json!({"type": "dynamic", "factor": 2.0}),
        ),
        ("modernbert", "layer_types", json!(["full_attention"])),
        ("modernbert", "layer_types", json!(["x", "x", "x", "x"])),
        (
            "modernbert-published",
            "global_attn_every_n_layers",
            json!(0),
        ),
        ("modernbert-published", "local_rope_theta", json!(0.0)),
        ("modernbert-published", "local_rope_theta", Value::Null),
        ("modernbert-published", "rope_theta", json!(10_000.0)),
        (
            "modernbert-published",
            "rope_scaling",
            json!({"type": "linear", "factor": 2.0}),
        ),
        // Heads of 9 elements cannot be rotated.
        ("gte", "num_attention_heads", json!(4)),
    ];
    for (name, field, value) in cases {
        let dir = tempfile::tempdir().unwrap();
        for file in ["tokenizer.json", "model.safetensors"] {
            std::fs::copy(folder(name).join(file), dir.path().join(file)).unwrap();
        }
        let config = std::fs::read(folder(name).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        config[field] = value.clone();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let error = read_encoder(ModelSource::open(dir.path()).unwrap());
        let error = error
            .err()
            .unwrap_or_else(|| panic!("{name} takes {field} {value}"));
        let named = match field {
            "rope_scaling" if value["type"] == "ntk" => "rope_scaling.factor",
            "num_attention_heads" => "hidden_size",
            // As BERT calls them.
            "n_positions" => "max_position_embeddings",
            "hidden_act" => "activation_function",
            _ => field,
        };
        assert!(
            error.to_string().contains(named),
            "{name}, {field}: {error}"
        );
    }
}
