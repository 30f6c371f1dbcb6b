//! Hugging Face JSON: typed access, rope in every spelling, generation and quantisation configs.

mod common;

use ferrum_formats::hf::{AwqConfig, GptqConfig, QuantizationConfig};
use ferrum_formats::{FormatError, GenerationConfig, HfConfig, RopeConfigs, RopeKind};
use ferrum_test_support::skip;
use proptest::prelude::*;

fn config(json: &str) -> HfConfig {
    HfConfig::from_slice("config.json", json.as_bytes()).unwrap_or_else(|e| panic!("{e}"))
}

fn parse_error(json: &str) -> String {
    match HfConfig::from_slice("config.json", json.as_bytes()) {
        Ok(_) => panic!("accepted {json}"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn errors_name_file_field_found_and_expected() {
    let c = config(
        r#"{"hidden_size":"x","layers":0,"neg":-1,"half":1.5,"n":null,"eps":"1e-6","tie":1,
            "architectures":["A",2],"eos":[1,-1],"text_config":{"hidden_size":true},"deep":[[1,2,3]]}"#,
    );
    fn e<T: std::fmt::Debug>(r: Result<T, FormatError>) -> String {
        r.unwrap_err().to_string()
    }
    let text = c.text_config().unwrap();
    let cases = [
        (
            e(c.require_usize("hidden_size")),
            "field \"hidden_size\": found string \"x\", expected a positive integer",
        ),
        (
            e(c.require_usize("layers")),
            "field \"layers\": found number 0, expected a positive integer",
        ),
        (
            e(c.usize("neg")),
            "field \"neg\": found number -1, expected a non-negative integer",
        ),
        (
            e(c.usize("half")),
            "field \"half\": found number 1.5, expected a non-negative integer",
        ),
        (
            e(c.require_usize("n")),
            "field \"n\" is missing, expected a positive integer",
        ),
        (
            e(c.f64("eps")),
            "field \"eps\": found string \"1e-6\", expected a number",
        ),
        (
            e(c.bool("tie")),
            "field \"tie\": found number 1, expected true or false",
        ),
        (
            e(c.architectures()),
            "field \"architectures\": found list [\"A\",2], expected a list of strings",
        ),
        (
            e(c.token_ids("eos")),
            "field \"eos\": found list [1,-1], expected a token id or a list of them",
        ),
        (
            e(c.model_type()),
            "field \"model_type\" is missing, expected a string",
        ),
        (
            e(c.section("eos")),
            "field \"eos\": found list [1,-1], expected an object",
        ),
        (
            e(c.usizes("deep")),
            "field \"deep\": found list [[1,2,3]], expected a list of non-negative integers",
        ),
        (
            e(text.usize("hidden_size")),
            "field \"text_config.hidden_size\": found true, expected a non-negative integer",
        ),
    ];
    for (found, wanted) in cases {
        assert_eq!(found, format!("config.json: {wanted}"));
    }
}

#[test]
fn values_are_read() {
    let c = config(
        r#"{"a":4096.0,"b":1e6,"c":[1,2],"d":7,"e":"x","f":false,"g":null,"h":[0.5,1],"architectures":["LlamaForCausalLM"],"model_type":"llama"}"#,
    );
    assert_eq!(c.require_usize("a").unwrap(), 4096);
    assert_eq!(c.require_f64("b").unwrap(), 1e6);
    assert_eq!(c.token_ids("c").unwrap(), [1, 2]);
    assert_eq!(c.token_ids("d").unwrap(), [7]);
    assert!(c.token_ids("g").unwrap().is_empty());
    assert_eq!(c.str("e").unwrap(), Some("x"));
    assert_eq!(c.bool("f").unwrap(), Some(false));
    assert_eq!((c.usize("g").unwrap(), c.has("g")), (None, false));
    assert_eq!(c.f64s("h").unwrap().unwrap(), [0.5, 1.0]);
    assert_eq!(c.architectures().unwrap(), ["LlamaForCausalLM"]);
    assert_eq!(c.model_type().unwrap(), "llama");
    assert_eq!(c.text_config().unwrap(), c);
}

#[test]
fn python_numbers_that_json_lacks_are_no_numbers() {
    let c = config(
        r#"{"a":[0.0, Infinity], "b":-Infinity, "c":NaN, "d":"NaN -Infinity \" Infinity", "e":-5}"#,
    );
    let said = c.f64("c").unwrap_err().to_string();
    assert!(said.contains("\"c\": found string \"NaN\""), "{said}");
    assert!(c.f64("b").is_err());
    assert_eq!(c.require_str("d").unwrap(), "NaN -Infinity \" Infinity");
    assert_eq!(c.f64("e").unwrap(), Some(-5.0));
    assert!(c.f64s("a").is_err());
}

#[test]
fn texts_that_are_no_config_are_refused() {
    let deep = format!("{{\"a\":{}", "[".repeat(10_000));
    let cases = [
        ("", "EOF while parsing"),
        ("[]", "found list [], expected an object"),
        ("{\"a\":}", "expected value at line 1 column 6"),
        ("{\"a\":1}x", "trailing characters"),
        (deep.as_str(), "nesting depth is 65, the limit is 64"),
    ];
    for (json, words) in cases {
        let e = parse_error(json);
        assert!(e.contains(words), "{e}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 30).unwrap();
    let e = HfConfig::open(&path).unwrap_err().to_string();
    assert!(
        e.contains("size in bytes is 1073741824, the limit is 16777216"),
        "{e}"
    );
    assert!(HfConfig::open(dir.path()).is_err());
}

fn rope(json: &str) -> Result<RopeConfigs, FormatError> {
    config(json).rope(10_000.0)
}

#[test]
fn both_spellings_of_rope_say_the_same() {
    let cases = [
        (
            r#"{"rope_theta":5e5}"#,
            r#"{"rope_parameters":{"rope_theta":5e5,"rope_type":"default"}}"#,
        ),
        (
            r#"{"rope_theta":5e5,"rope_scaling":null}"#,
            r#"{"rope_theta":5e5,"rope_parameters":{}}"#,
        ),
        (
            r#"{"rope_theta":1e4,"rope_scaling":{"type":"linear","factor":2}}"#,
            r#"{"rope_parameters":{"rope_theta":10000,"rope_type":"linear","factor":2.0}}"#,
        ),
        (
            r#"{"max_position_embeddings":4096,"rope_scaling":{"type":"dynamic","factor":4.0}}"#,
            r#"{"max_position_embeddings":4096,"rope_parameters":{"rope_type":"dynamic","factor":4.0}}"#,
        ),
        (
            r#"{"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}}"#,
            r#"{"original_max_position_embeddings":8192,"rope_parameters":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0}}"#,
        ),
        (
            r#"{"max_position_embeddings":32768,"rope_scaling":{"type":"yarn","factor":4.0}}"#,
            r#"{"max_position_embeddings":131072,"rope_parameters":{"rope_type":"yarn","original_max_position_embeddings":32768,"beta_fast":32,"beta_slow":1,"truncate":true}}"#,
        ),
        (
            r#"{"max_position_embeddings":131072,"original_max_position_embeddings":4096,"rope_scaling":{"type":"su","short_factor":[1,2],"long_factor":[3,4]}}"#,
            r#"{"rope_parameters":{"rope_type":"longrope","factor":32,"original_max_position_embeddings":4096,"short_factor":[1,2],"long_factor":[3,4]}}"#,
        ),
        (
            r#"{"partial_rotary_factor":0.5}"#,
            r#"{"rope_parameters":{"partial_rotary_factor":0.5}}"#,
        ),
        (
            r#"{"rotary_pct":0.25,"rotary_emb_base":10000}"#,
            r#"{"rope_parameters":{"partial_rotary_factor":0.25}}"#,
        ),
        (
            r#"{"rope_scaling":{"type":"mrope","mrope_section":[1,2,3]}}"#,
            r#"{"rope_parameters":{"rope_type":"default","mrope_section":[1,2,3]}}"#,
        ),
    ];
    for (old, new) in cases {
        assert_eq!(rope(old).unwrap(), rope(new).unwrap(), "{old}");
    }
}

#[test]
fn rope_kinds_carry_their_parameters() {
    let RopeConfigs::All(yarn) = rope(
        r#"{"rope_parameters":{"rope_type":"yarn","rope_theta":150000,"factor":32.0,"beta_fast":16.0,"beta_slow":2.0,
            "truncate":false,"original_max_position_embeddings":4096,"mscale":0.7,"mscale_all_dim":1.0,"attention_factor":1.5}}"#,
    )
    .unwrap() else {
        panic!("one set");
    };
    let wanted = RopeKind::Yarn {
        factor: 32.0,
        beta_fast: 16.0,
        beta_slow: 2.0,
        attention_factor: Some(1.5),
        mscale: Some(0.7),
        mscale_all_dim: Some(1.0),
        original_max_position: 4096,
        truncate: false,
    };
    assert_eq!((yarn.theta, yarn.kind), (150_000.0, wanted));
}

#[test]
fn rope_may_differ_by_layer_type() {
    let new = rope(
        r#"{"rope_parameters":{"full_attention":{"rope_type":"linear","factor":8.0,"rope_theta":1000000.0},
            "sliding_attention":{"rope_type":"default","rope_theta":10000.0},"none":null}}"#,
    )
    .unwrap();
    let old = rope(
        r#"{"rope_theta":1e6,"rope_local_base_freq":1e4,"rope_scaling":{"rope_type":"linear","factor":8.0}}"#,
    );
    assert_eq!(new, old.unwrap());
    assert_eq!(new.for_layer_type("sliding_attention").unwrap().theta, 1e4);
    assert_eq!(
        new.for_layer_type("full_attention").unwrap().kind,
        RopeKind::Linear { factor: 8.0 }
    );
    assert!(new.for_layer_type("none").is_none());
}

#[test]
fn wrong_rope_is_refused_with_reasons() {
    let cases = [
        (
            r#"{"rope_scaling":{"type":"new"}}"#,
            "field \"rope_scaling.type\": found string \"new\", expected default, linear",
        ),
        (
            r#"{"rope_scaling":{"type":"linear"}}"#,
            "field \"rope_scaling.factor\" is missing",
        ),
        (
            r#"{"rope_scaling":{"type":"linear","factor":0}}"#,
            "expected a positive number",
        ),
        (
            r#"{"rope_scaling":{"type":"linear","factor":"2"}}"#,
            "found string \"2\", expected a number",
        ),
        (
            r#"{"rope_scaling":{"type":"dynamic","factor":2}}"#,
            "field \"max_position_embeddings\" is missing",
        ),
        (
            r#"{"rope_scaling":{"type":"longrope","original_max_position_embeddings":1,"factor":2}}"#,
            "field \"rope_scaling.short_factor\"",
        ),
        (
            r#"{"rope_theta":-1}"#,
            "field \"rope_theta\": found number -1",
        ),
        (
            r#"{"partial_rotary_factor":1.5}"#,
            "field \"partial_rotary_factor\": found number 1.5",
        ),
        (
            r#"{"rope_scaling":7}"#,
            "field \"rope_scaling\": found number 7, expected an object",
        ),
        (
            r#"{"rope_parameters":{"full_attention":{"rope_type":"x"}}}"#,
            "field \"rope_parameters.full_attention.rope_type\"",
        ),
    ];
    for (json, words) in cases {
        let e = rope(json).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
    }
}

#[test]
fn generation_configs_are_read_and_completed() {
    let json = config(
        r#"{"eos_token_id":[2,3],"do_sample":true,"temperature":0.6,"top_k":20,"top_p":0.95,"min_p":0.0,"repetition_penalty":1.05,"max_length":4096,"pad_token_id":-1}"#,
    );
    let model = config(r#"{"bos_token_id":1,"eos_token_id":9,"pad_token_id":0}"#);
    let g = GenerationConfig::from_json(&json)
        .unwrap()
        .completed_from(&model)
        .unwrap();
    assert_eq!((g.bos_token_id, g.pad_token_id), (Some(1), Some(0)));
    assert_eq!(g.eos_token_ids, [2, 3]);
    assert_eq!(
        (g.temperature, g.top_k, g.top_p),
        (Some(0.6), Some(20), Some(0.95))
    );
    assert_eq!(
        (g.do_sample, g.max_length, g.max_new_tokens),
        (Some(true), Some(4096), None)
    );
    let nested = config(r#"{"text_config":{"eos_token_id":5}}"#);
    assert_eq!(
        GenerationConfig::default()
            .completed_from(&nested)
            .unwrap()
            .eos_token_ids,
        [5]
    );
    assert!(GenerationConfig::from_json(&config(r#"{"top_p":"1"}"#)).is_err());
}

fn quantization(section: &str) -> Result<Option<QuantizationConfig>, FormatError> {
    QuantizationConfig::of_model(&config(&format!("{{\"quantization_config\":{section}}}")))
}

#[test]
fn quantization_configs_are_read() {
    let gptq = quantization(
        r#"{"quant_method":"gptq","bits":4,"group_size":-1,"desc_act":true,"sym":false,"checkpoint_format":"gptq_v2","dynamic":{"+:.*\\.4\\..*":{"bits":8}}}"#,
    );
    let wanted = GptqConfig {
        bits: 4,
        group_size: None,
        desc_act: true,
        sym: false,
        checkpoint_format: "gptq_v2".into(),
        lm_head: false,
        overrides: vec![r"+:.*\.4\..*".into()],
    };
    assert_eq!(gptq.unwrap(), Some(QuantizationConfig::Gptq(wanted)));

    let wanted = QuantizationConfig::Awq(AwqConfig {
        bits: 4,
        group_size: Some(64),
        zero_point: true,
        version: "gemm".into(),
        modules_to_not_convert: vec![],
    });
    let awq = quantization(
        r#"{"quant_method":"awq","bits":4,"group_size":64,"zero_point":true,"version":"GEMM"}"#,
    );
    assert_eq!(awq.unwrap().as_ref(), Some(&wanted));
    let old = config(r#"{"zero_point":true,"q_group_size":64,"w_bit":4,"version":"GEMM"}"#);
    assert_eq!(QuantizationConfig::from_json(&old).unwrap(), wanted);

    let fp8 = quantization(
        r#"{"quant_method":"fp8","activation_scheme":"dynamic","weight_block_size":[128,128]}"#,
    );
    let Some(QuantizationConfig::Fp8(fp8)) = fp8.unwrap() else {
        panic!("fp8");
    };
    assert_eq!(fp8.weight_block_size, Some([128, 128]));

    let ct = quantization(
        r#"{"quant_method":"compressed-tensors","format":"pack-quantized","ignore":["lm_head"],"kv_cache_scheme":null,
            "config_groups":{"group_0":{"targets":["Linear"],"input_activations":null,
            "weights":{"num_bits":4,"type":"int","symmetric":true,"group_size":128,"strategy":"group","dynamic":false,"actorder":"weight"}}}}"#,
    );
    let Some(QuantizationConfig::CompressedTensors(ct)) = ct.unwrap() else {
        panic!("compressed-tensors");
    };
    let weights = ct.groups[0].weights.as_ref().unwrap();
    assert_eq!((weights.num_bits, weights.group_size), (4, Some(128)));
    assert_eq!(weights.actorder.as_deref(), Some("weight"));
    assert_eq!(
        (ct.ignore.as_slice(), ct.has_kv_cache_scheme),
        (&["lm_head".to_owned()][..], false)
    );

    let other = quantization(r#"{"quant_method":"bitsandbytes","load_in_4bit":true}"#).unwrap();
    assert_eq!(
        other,
        Some(QuantizationConfig::Other("bitsandbytes".into()))
    );
    assert_eq!(QuantizationConfig::of_model(&config("{}")).unwrap(), None);
}

#[test]
fn wrong_quantization_configs_are_refused_with_reasons() {
    let cases = [
        (
            "{}",
            "field \"quantization_config.quant_method\" is missing",
        ),
        (
            r#"{"quant_method":"gptq"}"#,
            "field \"quantization_config.bits\" is missing",
        ),
        (
            r#"{"quant_method":"gptq","bits":99}"#,
            "expected an integer from 1 to 16",
        ),
        (
            r#"{"quant_method":"gptq","bits":4,"group_size":"x"}"#,
            "field \"quantization_config.group_size\"",
        ),
        (
            r#"{"quant_method":"fp8","weight_block_size":[1]}"#,
            "expected two positive integers",
        ),
        (
            r#"{"quant_method":"compressed-tensors"}"#,
            "config_groups\" is missing",
        ),
        ("3", "expected an object"),
    ];
    for (json, words) in cases {
        let e = quantization(json).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
    }
}

/// Calls every reader of a config; none may panic.
fn read_all(c: &HfConfig) {
    let _ = (
        c.rope(1e4),
        c.architectures().is_ok(),
        c.model_type().is_ok(),
    );
    let _ = (
        GenerationConfig::from_json(c),
        GenerationConfig::default().completed_from(c),
    );
    let _ = (
        QuantizationConfig::of_model(c),
        QuantizationConfig::from_json(c),
    );
}

const SEED: &str = r#"{"max_position_embeddings":4096,"eos_token_id":[1,2],"rope_scaling":{"type":"yarn","factor":4.0,"truncate":true},"quantization_config":{"quant_method":"gptq","bits":4,"group_size":128}}"#;

proptest! {
    #[test]
    fn random_text_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(c) = HfConfig::from_slice("c.json", &bytes) {
            read_all(&c);
        }
    }

    #[test]
    fn mutations_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), "[0-9\\[\\]{}\",:a-z.-]"), 1..5)) {
        let mut bytes = SEED.as_bytes().to_vec();
        for (at, text) in edits {
            let at = at.index(bytes.len());
            bytes[at] = text.as_bytes()[0];
        }
        if let Ok(c) = HfConfig::from_slice("c.json", &bytes) {
            read_all(&c);
        }
    }
}

#[test]
fn fixture_configs_are_read() {
    let files = common::files(&common::workspace_root().join("fixtures/models"), "json");
    let configs: Vec<_> = files
        .iter()
        .filter(|p| p.ends_with("config.json"))
        .collect();
    if configs.is_empty() {
        return skip("no config.json below fixtures/models");
    }
    for path in configs {
        let c = HfConfig::open(path).unwrap_or_else(|e| panic!("{e}"));
        c.model_type().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(c.architectures().unwrap().len(), 1, "{}", path.display());
        c.rope(10_000.0).unwrap_or_else(|e| panic!("{e}"));
    }
}
