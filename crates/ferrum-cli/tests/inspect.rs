//! `ferrum inspect`: what a file holds, and the memory that a run takes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{fails, ferrum, json, ok, root, stderr};
use ferrum_test_support::skip;
use serde_json::{Value, json as value};
use std::fs;
use std::io::Write;
use std::path::Path;

#[test]
fn inspect_plans_what_a_run_takes() {
    let value = json(&["inspect", "--json"]);
    assert_eq!(value["architecture"], "llama");
    assert_eq!(value["chat_template"], true);
    let plan = &value["memory_plan"];
    let part = |name: &str| plan[name].as_u64().unwrap();
    let parts = [
        "weights_bytes",
        "kv_bytes",
        "scratch_bytes",
        "program_bytes",
    ];
    assert_eq!(parts.map(part).iter().sum::<u64>(), part("peak_bytes"));
    assert!(ok(&["inspect"]).contains("memory for a context of"));
}

#[test]
fn inspect_shows_models_of_whole_tasks() {
    let of_clip = &["image layers", "text layers"][..];
    let of_bert = &["layers", "pooling"][..];
    for (name, kind, architecture, lines) in [
        ("encoders/bert", "encoder", "bert", of_bert),
        ("encoders/bert/model.gguf", "encoder", "bert", of_bert),
        ("encoders/bert-labels", "encoder", "bert", &["labels"]),
        ("encoders/modernbert", "encoder", "modernbert", &["windows"]),
        (
            "speech/whisper",
            "speech",
            "whisper",
            &["window", "encoder", "decoder"],
        ),
        ("images/clip", "clip", "clip", of_clip),
        ("images/siglip", "clip", "siglip", of_clip),
    ] {
        let path = root().join("fixtures").join(name).display().to_string();
        let text = ok(&["inspect", &path]);
        for line in lines.iter().chain(&["file", "parameters", "tensors"]) {
            let found = text.lines().any(|found| found.starts_with(line));
            assert!(found, "{name}: {line}: {text}");
        }
        assert!(!text.contains(['{', '}']), "{text}");
        let value = json(&["inspect", "--json", &path]);
        assert_eq!(value["architecture"], architecture, "{name}");
        assert_eq!(value["kind"], kind, "{name}");
        let tensors = value["tensors"].as_array().unwrap();
        let numbers = |tensor: &Value| {
            let shape = tensor["shape"].as_array().unwrap().iter();
            shape.map(|n| n.as_u64().unwrap()).product::<u64>()
        };
        assert_eq!(
            value["parameters"],
            tensors.iter().map(numbers).sum::<u64>(),
            "{name}"
        );
    }
    // They have no plan to show.
    let bert = root().join("fixtures/encoders/bert").display().to_string();
    for flags in [
        ["--context", "64"],
        ["--layers", "cpu:0-2"],
        ["--tensor-parallel", "2"],
    ] {
        let refused = fails(&[&["inspect", &bert], &flags[..]].concat(), b"");
        assert!(refused.contains("is a text encoder"), "{refused}");
    }
    let value = json(&["inspect", "--json"]);
    assert_eq!(value["kind"], "decoder");
}

#[test]
fn inspect_names_the_quantisation() {
    let model = |name: &str| {
        format!(
            "{}/../../fixtures/models/{name}",
            env!("CARGO_MANIFEST_DIR")
        )
    };
    for (name, scheme) in [
        (
            "llama-gptq4-order",
            "GPTQ, 4 bits, groups of 32, symmetric, in activation order",
        ),
        ("llama-awq", "AWQ, 4 bits, groups of 32, gemm"),
        (
            "llama-packed8",
            "compressed-tensors, pack-quantized, 8 bits, a scale for each channel",
        ),
        ("llama-fp8-block", "FP8, a scale for each 32 × 128"),
    ] {
        let value = json(&["inspect", "--json", &model(name)]);
        assert_eq!(value["quantization"], scheme);
        // A table of 259 × 64, one layer (43008 in matrices), three norms.
        assert_eq!(value["parameters"], 259 * 64 + 43_008 + 3 * 64, "{name}");
        // Small enough to be dequantised: f32, and in f16 the table and what was left alone.
        let half = 259 * 64 + if name == "llama-awq" { 64 * 128 } else { 0 };
        let weights = 4 * value["parameters"].as_u64().unwrap() - 2 * half;
        assert_eq!(value["memory_plan"]["weights_bytes"], weights, "{name}");
        assert!(ok(&["inspect", &model(name)]).contains(scheme));
    }
}

/// A Llama of 200 MB in `dir`, whose weights are all zero and take no place on the disk.
fn large_model(dir: &Path) {
    let (hidden, inner, vocab, layers) = (1024, 4096, 8192, 5);
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens".to_owned(), vec![vocab, hidden]),
        ("lm_head".to_owned(), vec![vocab, hidden]),
        ("model.norm".to_owned(), vec![hidden]),
    ];
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        shapes.extend([
            (name("self_attn.q_proj"), vec![hidden, hidden]),
            (name("self_attn.k_proj"), vec![hidden / 2, hidden]),
            (name("self_attn.v_proj"), vec![hidden / 2, hidden]),
            (name("self_attn.o_proj"), vec![hidden, hidden]),
            (name("mlp.gate_proj"), vec![inner, hidden]),
            (name("mlp.up_proj"), vec![inner, hidden]),
            (name("mlp.down_proj"), vec![hidden, inner]),
            (name("input_layernorm"), vec![hidden]),
            (name("post_attention_layernorm"), vec![hidden]),
        ]);
    }
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in shapes {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry =
            serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(format!("{name}.weight"), entry);
    }
    let header = Value::from(header).to_string();
    let mut file = std::fs::File::create(dir.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

#[test]
fn the_memory_plan_is_within_five_percent_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    large_model(dir.path());
    let large = dir.path().display().to_string();
    for model in [None, Some(large.as_str())] {
        let plan = ["inspect", "--json", "--context", "264"];
        let plan = json(&[&plan[..], model.as_slice()].concat());
        let bench = ["bench", "--prompt", "256", "--gen", "8", "--repeat", "1"];
        // Without the cache, which would keep weights of a temporary model in the user's cache folder.
        let bench = [&bench[..], &["--no-weight-cache"]].concat();
        let chosen = model.map_or(vec![], |model| vec!["--model", model]);
        let run = json(&[&bench[..], &chosen, &["--json"]].concat());
        let Some(used) = run["peak_rss_bytes"].as_f64() else {
            skip("this system does not tell a process's peak memory");
            return;
        };
        let planned = plan["memory_plan"]["peak_bytes"].as_f64().unwrap();
        let ratio = used / planned;
        assert!(
            (0.95..=1.05).contains(&ratio),
            "{model:?} used {used}, planned {planned}: {ratio}"
        );
    }
}

/// A bias that is left out changes every answer, so it is said.
#[test]
fn tensors_that_nothing_reads_are_said() {
    let (from, to) = (
        root().join("fixtures/models/qwen3"),
        tempfile::tempdir().unwrap(),
    );
    fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let (len, rest) = bytes.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    let name = "model.layers.0.self_attn.q_proj.bias";
    let ends = [data.len(), data.len() + 8];
    header[name] = value!({"dtype": "F32", "shape": [2], "data_offsets": ends});
    let header = header.to_string();
    let len = (header.len() as u64).to_le_bytes();
    let file = [&len, header.as_bytes(), data, &[1; 8]].concat();
    fs::write(to.path().join("model.safetensors"), file).unwrap();
    let path = to.path().display().to_string();
    assert_eq!(
        json(&["inspect", "--json", &path])["unused_tensors"],
        value!([name])
    );
    assert!(ok(&["inspect", &path]).contains(&format!("unused        1: {name}\n")));
    let logits = |path| stderr(&ferrum(&["logits", "--model", path, "--tokens", "1,2,3"]));
    let said = logits(&path);
    let expected = format!(
        "warning: qwen3 does not use 1 of the tensors in {path}/model.safetensors, so answers may be wrong: {name}"
    );
    assert!(said.contains(&expected), "{said}");
    assert!(!logits(&from.display().to_string()).contains("does not use"));
}
