//! LoRA adapters as PEFT saves them, and what is wrong with others.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_formats::LoraFolder;
use ferrum_formats::gguf::Writer;
use ferrum_types::GgufQuantType;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

const DOWN: &str = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight";
const UP: &str = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";

/// Tensors by name, with their shapes.
type Tensors<'a> = &'a [(&'a str, &'a [usize])];

/// A folder with one pair of rank 2, of 4 inputs and 6 outputs, but for `config` and `tensors`.
fn folder(config: &Value, tensors: Tensors<'_>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut all = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 6});
    for (key, value) in config.as_object().unwrap() {
        all[key] = value.clone();
    }
    std::fs::write(dir.path().join("adapter_config.json"), all.to_string()).unwrap();
    let zeros = [0u8; 400];
    let view = |shape: &[usize]| {
        let bytes = 4 * shape.iter().product::<usize>();
        TensorView::new(Dtype::F32, shape.to_vec(), &zeros[..bytes]).unwrap()
    };
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, shape)| (*name, view(shape)))
        .collect();
    let bytes = serialize(views, None).unwrap();
    std::fs::write(dir.path().join("adapter_model.safetensors"), bytes).unwrap();
    dir
}

const PAIR: Tensors<'static> = &[(DOWN, &[2, 4]), (UP, &[6, 2])];

#[test]
fn pairs_have_their_module_and_scale() {
    let cases = [
        (json!({}), 3.0),
        (json!({"use_rslora": true}), (6.0 / 2f64.sqrt()) as f32),
        (json!({"lora_alpha": null}), 4.0),
        (json!({"alpha_pattern": {"q_proj": 1}}), 0.5),
        (
            json!({"alpha_pattern": {"layers.1.self_attn.q_proj": 1}}),
            0.5,
        ),
        // The end of a name is no name.
        (json!({"alpha_pattern": {"proj": 1}}), 3.0),
        // What PEFT writes where nothing was chosen.
        (
            json!({"bias": "none", "modules_to_save": null, "layer_replication": [], "use_dora": false}),
            3.0,
        ),
        (
            json!({"init_lora_weights": true, "rank_pattern": {"q_proj": 2}}),
            3.0,
        ),
    ];
    for (config, scale) in cases {
        let dir = folder(&config, PAIR);
        let open = LoraFolder::open(dir.path()).unwrap();
        let pairs: Vec<_> = open.pairs().collect();
        let [pair] = pairs.as_slice() else {
            panic!("{config}: {pairs:?}")
        };
        assert_eq!(pair.module, "model.layers.1.self_attn.q_proj");
        assert_eq!((pair.down.shape, pair.up.shape), (&[2, 4][..], &[6, 2][..]));
        assert_eq!(pair.scale, scale, "{config}");
    }
}

#[test]
fn modules_are_named_in_every_way_that_peft_has() {
    const MODULE: &str = "model.layers.1.self_attn.q_proj";
    for prefix in ["base_model.model.", ""] {
        for adapter in ["", ".default", ".my-adapter_2"] {
            let name = |half: &str| format!("{prefix}{MODULE}.{half}{adapter}.weight");
            let (down, up) = (name("lora_A"), name("lora_B"));
            let dir = folder(&json!({}), &[(&down, &[2, 4]), (&up, &[6, 2])]);
            let open = LoraFolder::open(dir.path()).unwrap();
            let modules: Vec<_> = open.pairs().map(|pair| pair.module.to_owned()).collect();
            assert_eq!(modules, [MODULE], "{down}");
        }
    }
}

/// A GGUF adapter with one pair of rank 2, of 4 inputs and 6 outputs, but for `keys` and `tensors`.
fn gguf(keys: &[(&str, Option<&str>)], alpha: f32, tensors: Tensors<'_>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter.gguf");
    let mut head = Writer::new(&path);
    let all = [
        ("general.type", Some("adapter")),
        ("general.architecture", Some("llama")),
        ("adapter.type", Some("lora")),
    ];
    for (key, value) in all {
        let changed = keys.iter().find(|(changed, _)| *changed == key);
        if let Some(value) = changed.map_or(value, |(_, value)| *value) {
            head.set(key, value).unwrap();
        }
    }
    head.set("adapter.lora.alpha", alpha).unwrap();
    for (name, shape) in tensors {
        head.declare(name, shape, GgufQuantType::F32).unwrap();
    }
    let mut body = head.start(std::fs::File::create(&path).unwrap()).unwrap();
    for (name, shape) in tensors {
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        body.push(name, &bytes).unwrap();
    }
    body.finish().unwrap();
    dir
}

#[test]
fn gguf_files_have_pairs_too() {
    const PAIR: Tensors<'static> = &[
        ("blk.1.attn_q.weight.lora_a", &[2, 4]),
        ("blk.1.attn_q.weight.lora_b", &[6, 2]),
    ];
    for (alpha, scale) in [(6.0, 3.0), (0.0, 1.0)] {
        let dir = gguf(&[], alpha, PAIR);
        let open = LoraFolder::open(dir.path().join("adapter.gguf")).unwrap();
        assert_eq!(open.gguf_architecture(), Some("llama"));
        let pairs: Vec<_> = open.pairs().collect();
        let [pair] = pairs.as_slice() else {
            panic!("{pairs:?}")
        };
        assert_eq!((pair.module, pair.scale), ("blk.1.attn_q", scale));
        assert_eq!((pair.down.shape, pair.up.shape), (&[2, 4][..], &[6, 2][..]));
    }
    for alpha in [f32::NAN, f32::INFINITY] {
        let dir = gguf(&[], alpha, PAIR);
        let error = LoraFolder::open(dir.path().join("adapter.gguf")).unwrap_err();
        assert!(error.to_string().contains("a finite number"), "{error}");
    }
    type Keys<'a> = &'a [(&'a str, Option<&'a str>)];
    let cases: [(Keys<'_>, Tensors<'_>, &str); 5] = [
        (
            &[("general.type", Some("model"))],
            PAIR,
            "found string \"model\"",
        ),
        (
            &[("adapter.type", None)],
            PAIR,
            "\"adapter.type\" is missing",
        ),
        (&[], &PAIR[..1], "blk.1.attn_q.lora_b\" is missing"),
        (
            &[],
            &[("blk.1.attn_norm.weight", &[4])],
            "expected pairs lora_a and lora_b",
        ),
        (&[], &[], "holds no pair"),
    ];
    for (keys, tensors, words) in cases {
        let dir = gguf(keys, 1.0, tensors);
        let error = LoraFolder::open(dir.path().join("adapter.gguf")).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn what_is_more_or_less_than_pairs_is_refused_by_name() {
    const EMBEDDING: &str = "base_model.model.model.embed_tokens.lora_embedding_A";
    let cases: Vec<(Value, Tensors<'_>, &str)> = vec![
        (
            json!({"peft_type": "IA3"}),
            PAIR,
            "field \"peft_type\": found string \"IA3\"",
        ),
        (
            json!({"peft_type": null}),
            PAIR,
            "field \"peft_type\" is missing",
        ),
        (json!({"r": 0}), PAIR, "field \"r\""),
        (json!({"r": 1_000_000}), PAIR, "at most 1024"),
        (json!({"lora_alpha": "much"}), PAIR, "field \"lora_alpha\""),
        (json!({"lora_alpha": 1e39}), PAIR, "a number within f32"),
        (
            json!({"alpha_pattern": {"q_proj": -1e39}}),
            PAIR,
            "field \"alpha_pattern.q_proj\": found number -1e+39, expected a number within f32",
        ),
        (
            json!({"use_dora": true}),
            PAIR,
            "field \"use_dora\": found true",
        ),
        (json!({"bias": "all"}), PAIR, "field \"bias\""),
        (
            json!({"modules_to_save": ["lm_head"]}),
            PAIR,
            "field \"modules_to_save\"",
        ),
        (
            json!({"target_parameters": ["mlp.experts.gate_up_proj"]}),
            PAIR,
            "\"target_parameters\"",
        ),
        (
            json!({"alpha_pattern": {".*q_proj$": 3}}),
            PAIR,
            "regular expressions",
        ),
        (
            json!({"init_lora_weights": "pissa_niter_4"}),
            PAIR,
            "path_initial_model_for_weight_conversion",
        ),
        (
            json!({}),
            &[
                (DOWN, &[2, 4]),
                (UP, &[6, 2]),
                (
                    "model.layers.1.self_attn.q_proj.lora_A.other.weight",
                    &[2, 4],
                ),
            ],
            "expected one pair for each module",
        ),
        (json!({}), &[], "holds no pair"),
        (json!({}), &PAIR[..1], "lora_B.weight\" is missing"),
        (json!({}), &PAIR[1..], "lora_A.weight\" is missing"),
        (
            json!({}),
            &[(DOWN, &[2, 4]), (UP, &[6, 3])],
            "expected [out features, 2]",
        ),
        (
            json!({}),
            &[(DOWN, &[8]), (UP, &[6, 2])],
            "expected [rank, in features]",
        ),
        (
            json!({}),
            &[(DOWN, &[0, 4]), (UP, &[6, 0])],
            "expected [rank, in features]",
        ),
        (json!({}), &[(EMBEDDING, &[2, 4])], "lora_embedding_A"),
        (
            json!({}),
            &[
                (DOWN, &[2, 4]),
                (UP, &[6, 2]),
                ("x.lora_magnitude_vector", &[6]),
            ],
            "magnitude",
        ),
    ];
    for (config, tensors, words) in cases {
        let dir = folder(&config, tensors);
        let error = LoraFolder::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(words), "{config}: {error}");
    }
}

#[test]
fn files_that_are_not_there_are_named() {
    let dir = folder(&json!({}), PAIR);
    let file = |name: &str| dir.path().join(name);
    let error = || LoraFolder::open(dir.path()).unwrap_err().to_string();
    std::fs::rename(file("adapter_model.safetensors"), file("x")).unwrap();
    assert!(error().contains("adapter_model.safetensors"), "{}", error());
    std::fs::write(file("adapter_model.bin"), b"pickle").unwrap();
    assert!(error().contains("pickle"), "{}", error());
    std::fs::remove_file(file("adapter_config.json")).unwrap();
    assert!(error().contains("save_pretrained"), "{}", error());
    let nowhere = LoraFolder::open(Path::new("/no/such/folder")).unwrap_err();
    assert!(nowhere.to_string().contains("/no/such/folder"));
}
