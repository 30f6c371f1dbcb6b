//! What configs mean where two readings are possible: that of `transformers`.

use crate::support::{exact_cpu, fixtures, logits_in_chunks, open, runner_in};
use ferrum_formats::{Gguf, ModelSource, TensorDtype, TensorSource, gguf};
use ferrum_kernels::KvF32;
use ferrum_models::families::FAMILIES;
use ferrum_models::{
    AttentionSpec, DecoderSpec, Dequantized, KvLayout, Model, ModelRunner, Moe, RopeScaling,
    RunnerConfig, load_weights, read_model,
};
use ferrum_types::{Dtype, GgufQuantType};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::Path;

/// The spec of a fixture whose config was changed.
fn spec(fixture: &str, change: impl Fn(&mut Value)) -> DecoderSpec {
    changed(fixture, change).unwrap().spec
}

/// A fixture whose config was changed.
fn changed(fixture: &str, change: impl Fn(&mut Value)) -> ferrum_types::Result<Model> {
    let dir = tempfile::tempdir().unwrap();
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    for file in std::fs::read_dir(from.join(fixture)).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_dir() {
            continue;
        }
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(&path, config.to_string()).unwrap();
    read_model(ModelSource::open(dir.path()).unwrap())
}

/// Attention of embedding models may be bidirectional. What cannot do that would give other vectors without a word.
#[test]
fn attention_that_is_not_causal_is_read_or_refused() {
    for (fixture, can) in [
        ("llama2", true),
        ("qwen2", true),
        ("qwen3", true),
        ("gpt2", true),
        ("mistral-window", false),
        ("gemma2", false),
        ("gemma3", false),
        ("deepseek2", false),
        ("qwen3-next", false),
    ] {
        let field = "is_causal";
        match changed(fixture, |c| c[field] = json!(false)) {
            Ok(model) => assert!(can && !model.spec.is_causal(), "{fixture}"),
            Err(e) => assert!(!can && e.to_string().contains(field), "{fixture}: {e}"),
        }
        assert!(spec(fixture, |c| c[field] = json!(true)).is_causal());
        // Of Gemma 3's layers alone.
        let field = "use_bidirectional_attention";
        let error = changed(fixture, |c| c[field] = json!(true)).err();
        let error = error.map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(field), "{fixture}: {error:?}");
        let error = changed(fixture, |c| c[field] = json!("all")).err();
        assert!(
            error.is_some_and(|e| e.to_string().contains(field)),
            "{fixture}"
        );
        // As Gemma 4's text has it for images.
        for other in [json!("vision"), json!(false), json!(null)] {
            assert!(spec(fixture, |c| c[field] = other.clone()).is_causal());
        }
    }
    // The part about text, beside one about images.
    for (field, value) in [
        ("is_causal", json!(false)),
        ("use_bidirectional_attention", json!(true)),
        ("use_bidirectional_attention", json!("all")),
    ] {
        for fixture in ["../vision/gemma3", "gemma4"] {
            let error = changed(fixture, |c| match c.get_mut("text_config") {
                Some(text) => text[field] = value.clone(),
                None => c[field] = value.clone(),
            });
            let error = error.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(field), "{fixture}: {error:?}");
        }
    }
    let layers = "../encoders/gemma-embedding";
    assert_eq!(
        windows(&spec(layers, |_| ()))[4..],
        [Some(4), None, Some(4)]
    );
    let error = changed(layers, |c| c["use_bidirectional_attention"] = json!(false));
    let error = error.err().unwrap().to_string();
    assert!(error.contains("use_bidirectional_attention"), "{error}");
}

#[test]
fn a_gguf_file_says_whether_attention_is_causal() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    for (fixture, can) in [("qwen3", true), ("gemma3", false)] {
        for causal in [true, false] {
            let old = Gguf::open(from.join(fixture).join("model.gguf")).unwrap();
            let mut head = gguf::Writer::new("x.gguf");
            for (key, value) in old.metadata() {
                head.set(key, value).unwrap();
            }
            let field = format!("{}.attention.causal", old.architecture().unwrap());
            head.set(&field, causal).unwrap();
            let infos: Vec<_> = old.infos().collect();
            for info in &infos {
                assert_eq!(info.dtype, TensorDtype::Plain(Dtype::F32));
                let kind = GgufQuantType::F32;
                head.declare(&info.name, &info.shape, kind).unwrap();
            }
            let mut file = head.start(Vec::new()).unwrap();
            for info in &infos {
                let bytes = old.require(&info.name).unwrap().bytes;
                file.push(&info.name, bytes).unwrap();
            }
            let file = file.finish().unwrap();
            let source = ModelSource::Gguf(Gguf::from_vec("x.gguf", file).unwrap());
            match read_model(source) {
                Ok(model) => assert_eq!((can || causal, causal), (true, model.spec.is_causal())),
                Err(e) => assert!(!can && !causal && e.to_string().contains(&field), "{e}"),
            }
        }
    }
}

fn windows(spec: &DecoderSpec) -> Vec<Option<usize>> {
    let layers = spec.layers.iter();
    layers
        .map(|layer| match &layer.attention {
            AttentionSpec::Gqa(gqa) => gqa.sliding_window,
            AttentionSpec::Mla(_) | AttentionSpec::ShortConv(_) | AttentionSpec::Linear(_) => None,
        })
        .collect()
}

#[test]
fn a_mistral_with_layer_types_slides_where_they_say() {
    let types = ["sliding_attention", "full_attention", "sliding_attention"];
    let found = spec("mistral-window", |c| c["layer_types"] = json!(types));
    assert_eq!(windows(&found), [Some(7), None, Some(7)]);
    assert_eq!(windows(&spec("mistral-window", |_| ())), [Some(7); 3]);
}

#[test]
fn the_older_rope_field_wins_unless_it_is_empty() {
    let old = json!({"rope_type": "linear", "factor": 2.0});
    let found = spec("qwen3", |c| c["rope_scaling"] = old.clone());
    assert_eq!(found.ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
    let found = spec("qwen3", |c| c["rope_scaling"] = json!({}));
    assert_eq!(found.ropes, spec("qwen3", |_| ()).ropes);
}

#[test]
fn whole_heads_rotate_whatever_the_share() {
    let found = spec("qwen3", |c| c["partial_rotary_factor"] = json!(0.5));
    assert_eq!(found.ropes[0].rot_dim, 20);
}

#[test]
fn an_output_projection_of_its_own_is_not_tied() {
    assert!(!spec("qwen3", |c| c["tie_word_embeddings"] = json!(true)).tie_embeddings);
    assert!(spec("qwen3-tied", |_| ()).tie_embeddings);
}

#[test]
fn a_scaling_lengthens_the_context() {
    let context = |fixture: &str, rope: Value| {
        let spec = spec(fixture, |c| c["rope_parameters"] = rope.clone());
        spec.context_length
    };
    for (kind, expected) in [("default", 256), ("linear", 1024), ("dynamic", 1024)] {
        let rope = json!({"rope_type": kind, "rope_theta": 1e4, "factor": 4.0});
        assert_eq!(context("qwen3", rope), expected, "{kind}");
    }
    let yarn = |original: usize| {
        let rope = json!({
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": original,
        });
        context("qwen3", rope)
    };
    assert_eq!((yarn(256), yarn(64), yarn(32)), (1024, 256, 256));
}

#[test]
fn a_context_beyond_learned_positions_is_refused() {
    let model = open(&fixtures().join("gpt2"));
    let device = exact_cpu();
    let weights = load_weights::<_, Dequantized>(&device, &model, &mut |_, _| ()).unwrap();
    let config = RunnerConfig::single(257);
    let runner = ModelRunner::<_, KvF32>::new(&device, model.spec, weights, config);
    let refused = runner.err().unwrap().to_string();
    assert!(refused.contains("256 learned positions"), "{refused}");
}

/// What people read of families is what the registry has.
#[test]
fn the_documentation_lists_every_family() {
    let quoted = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        names.join(", ")
    };
    let rows = FAMILIES.iter().map(|family| {
        let mut gguf: Vec<_> = family
            .gguf_form
            .iter()
            .map(|form| form.architecture)
            .collect();
        gguf.extend(family.gguf_architectures);
        gguf.dedup();
        let (title, hf) = (family.title, quoted(family.hf_architectures));
        format!("| {title} | {hf} | {} |\n", quoted(&gguf))
    });
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
    let rows: String = rows.collect();
    assert!(
        read("docs/formats.md").contains(&rows),
        "docs/formats.md: expected\n{rows}"
    );
    let readme = read("README.md");
    let readme: Vec<_> = readme.split_whitespace().collect();
    let titles: Vec<_> = FAMILIES.iter().map(|family| family.title).collect();
    let titles = titles.join("; ");
    assert!(
        readme.join(" ").contains(&titles),
        "README.md: expected\n{titles}"
    );
}

/// The text model of one that also sees lies one level deeper, in the config and in the names of its tensors.
#[test]
fn a_text_model_inside_of_another_is_the_same() {
    let cases = [
        (
            "gemma4",
            "Gemma4ForConditionalGeneration",
            "model.language_model.",
        ),
        (
            "llama4",
            "Llama4ForConditionalGeneration",
            "language_model.model.",
        ),
        (
            "qwen35",
            "Qwen3_5ForConditionalGeneration",
            "model.language_model.",
        ),
        (
            "qwen35-moe",
            "Qwen3_5MoeForConditionalGeneration",
            "model.language_model.",
        ),
    ];
    for (fixture, class, prefix) in cases {
        let from = fixtures().join(fixture);
        let plain = open(&from);
        let dir = tempfile::tempdir().unwrap();
        let config = std::fs::read(from.join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let config = json!({"architectures": [class], "text_config": config});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let nested = file.iter().map(|(name, view)| {
            let name = match name.strip_prefix("model.") {
                Some(rest) => format!("{prefix}{rest}"),
                None if prefix.starts_with("model.") => name.to_owned(),
                None => format!("language_model.{name}"),
            };
            (name, view)
        });
        let to = dir.path().join("model.safetensors");
        safetensors::serialize_to_file(nested, None, &to).unwrap();
        let nested = open(dir.path());
        assert_eq!(nested.spec, plain.spec, "{fixture}");
        let device = exact_cpu();
        let logits = [&plain, &nested].map(|model| {
            let layout = KvLayout::Contiguous;
            let mut runner = runner_in::<_, KvF32, Moe<Dequantized>>(&device, model, layout);
            logits_in_chunks(&mut runner, &[1, 2, 3, 4, 5, 6, 7, 8], &[8])
        });
        assert_eq!(logits[0], logits[1], "{fixture}");
    }
}

#[test]
fn a_shared_expert_of_unstated_width_has_that_of_its_tensor() {
    let file = fixtures().join("qwen2-moe/model.gguf");
    let stated = read_model(ModelSource::open(&file).unwrap()).unwrap().spec;
    let mut bytes = std::fs::read(file).unwrap();
    let key = b"expert_shared_feed_forward_length";
    let at = bytes.windows(key.len()).position(|w| w == key).unwrap();
    bytes[at] = b'X';
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    let found = read_model(ModelSource::open(&path).unwrap()).unwrap().spec;
    assert_eq!(found, stated);
}
