//! What folders of sentence-transformers say of pooling, and where they cut texts off.

use ferrum_formats::ModelSource;
use ferrum_models::encoder::read_encoder;
use ferrum_models::{DenseLayers, Pooling, StatedPooling};
use safetensors::{Dtype, tensor::TensorView};
use std::path::Path;

const TRANSFORMER: &str =
    r#"{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}"#;
const POOLING: &str = r#"{"idx": 1, "path": "pool", "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling"}"#;
const NORMALIZE: &str =
    r#"{"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}"#;
const LOGIT_SCORE: &str = r#"{"idx": 1, "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}"#;
const DENSE: &str =
    r#"{"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}"#;
const DENSE3: &str = r#"{"idx": 3, "path": "3_Dense", "type": "sentence_transformers.sentence_transformer.modules.dense.Dense"}"#;

/// A copy of the fixture "bert" with nothing of sentence-transformers but these files.
fn folder(files: &[(&str, String)]) -> (tempfile::TempDir, ModelSource) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/encoders/bert");
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let source = ModelSource::open(dir.path()).unwrap();
    (dir, source)
}

fn stated(files: &[(&str, String)]) -> Result<StatedPooling, String> {
    let (_dir, source) = folder(files);
    StatedPooling::of(&source).map_err(|error| error.to_string())
}

#[test]
fn every_spelling_of_a_mode() {
    const MEAN: StatedPooling = StatedPooling::Known(Pooling::Mean);
    const CLS: StatedPooling = StatedPooling::Known(Pooling::Cls);
    const LAST: StatedPooling = StatedPooling::Known(Pooling::Last);
    let other = |modes: &str| StatedPooling::Other(format!("pooling by {modes}"));
    let cases = [
        (r#"{"pooling_mode": "mean"}"#, MEAN),
        (r#"{"pooling_mode": "cls"}"#, CLS),
        (r#"{"pooling_mode": "lasttoken"}"#, LAST),
        (r#"{"pooling_mode": ["cls"]}"#, CLS),
        (
            r#"{"pooling_mode": ["cls", "mean"]}"#,
            other("cls and mean"),
        ),
        (r#"{"pooling_mode": "max"}"#, other("max")),
        // The name comes first where there are flags as well.
        (
            r#"{"pooling_mode": "cls", "pooling_mode_mean_tokens": true}"#,
            CLS,
        ),
        (r#"{"pooling_mode_mean_tokens": true}"#, MEAN),
        (
            r#"{"pooling_mode_mean_tokens": false, "pooling_mode_cls_token": true}"#,
            CLS,
        ),
        (r#"{"pooling_mode_lasttoken": true}"#, LAST),
        (
            r#"{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}"#,
            other("cls and max"),
        ),
        (
            r#"{"pooling_mode_weightedmean_tokens": true}"#,
            other("weightedmean"),
        ),
        // As sentence-transformers takes it.
        (r#"{"embedding_dimension": 24}"#, MEAN),
    ];
    for (config, expected) in cases {
        let found = stated(&[("1_Pooling/config.json", config.into())]);
        assert_eq!(found, Ok(expected), "{config}");
    }
    assert_eq!(stated(&[]), Ok(StatedPooling::Nothing));
    let error = stated(&[("1_Pooling/config.json", r#"{"pooling_mode": 1}"#.into())]);
    assert!(
        error.clone().unwrap_err().contains("pooling_mode"),
        "{error:?}"
    );
}

#[test]
fn the_list_of_modules_comes_first() {
    let modules = |of: &[&str]| ("modules.json", format!("[{}]", of.join(",")));
    let cls = ("pool/config.json", r#"{"pooling_mode": "cls"}"#.to_owned());
    // Where there is a list, this folder means nothing.
    let mean = (
        "1_Pooling/config.json",
        r#"{"pooling_mode": "mean"}"#.to_owned(),
    );
    let dense = ("2_Dense/config.json", "{}".to_owned());
    let known = Ok(StatedPooling::Known(Pooling::Cls));
    let other = |class: &str| Ok(StatedPooling::Other(format!("a module {class}")));
    let not_pooled = Ok(StatedPooling::NotPooled("a module LogitScore".into()));
    for (list, expected) in [
        (&[TRANSFORMER, POOLING, NORMALIZE][..], known.clone()),
        (&[TRANSFORMER, POOLING], known),
        (&[TRANSFORMER], Ok(StatedPooling::Nothing)),
        (
            &[TRANSFORMER, POOLING, DENSE, NORMALIZE],
            other("Dense with no model.safetensors"),
        ),
        (&[TRANSFORMER, POOLING, NORMALIZE, DENSE], other("Dense")),
        (&[TRANSFORMER, DENSE, POOLING], other("Dense")),
        (&[TRANSFORMER, POOLING, POOLING], other("Pooling")),
        (&[TRANSFORMER, LOGIT_SCORE], not_pooled),
    ] {
        let found = stated(&[modules(list), cls.clone(), mean.clone(), dense.clone()]);
        assert_eq!(found, expected, "{list:?}");
    }
    // Without a list, the folder of a map tells that there is one.
    let found = stated(&[mean.clone(), dense]);
    assert_eq!(found, other("Dense"));
    let leads_out = POOLING.replace("\"pool\"", r#""../pool""#);
    let leads_nowhere = POOLING.replace("\"pool\"", "\"\"");
    for (list, expected) in [
        (format!("[{leads_out}]"), "[0].path"),
        (format!("[{leads_nowhere}]"), "[0].path"),
        ("[3]".into(), "[0]: found number 3"),
        ("{}".into(), "expected a list"),
        (r#"[{"path": "pool"}]"#.into(), "[0].type"),
        // A list that names a folder which is not there.
        (format!("[{POOLING}]"), "pool/config.json"),
    ] {
        let error = stated(&[("modules.json", list), mean.clone()]).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// A file of safetensors with these tensors.
fn tensors(tensors: &[(&str, &[usize], &[f32])]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, shape, values)| {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytemuck::cast_slice(values));
        (*name, view.unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn maps_behind_pooling_are_applied_in_order() {
    // The fixture's states have 36 numbers; all of the first map's outputs read the first three.
    let mut weight = [0f32; 2 * 36];
    weight[..3].copy_from_slice(&[1.0, 2.0, -1.0]);
    weight[36..39].copy_from_slice(&[0.0, -1.0, 0.5]);
    let first = tensors(&[
        ("linear.weight", &[2, 36], &weight),
        ("linear.bias", &[2], &[0.5, -0.25]),
    ]);
    let second = tensors(&[("linear.weight", &[1, 2], &[3.0, -2.0])]);
    let list = format!("[{}]", [TRANSFORMER, POOLING, DENSE, DENSE3].join(","));
    let sizes = |inputs: usize, outputs: usize, rest: &str| {
        format!(r#"{{"in_features": {inputs}, "out_features": {outputs}{rest}}}"#)
    };
    let plain = r#", "bias": false, "activation_function": "torch.nn.modules.linear.Identity""#;
    let read = |configs: [String; 2]| {
        let [one, two] = configs;
        let (dir, _) = folder(&[
            ("modules.json", list.clone()),
            ("pool/config.json", "{}".into()),
            ("2_Dense/config.json", one),
            ("3_Dense/config.json", two),
        ]);
        for (name, file) in [("2_Dense", &first), ("3_Dense", &second)] {
            std::fs::write(dir.path().join(name).join("model.safetensors"), file).unwrap();
        }
        let source = ModelSource::open(dir.path()).unwrap();
        let words = |error: ferrum_types::Error| error.to_string();
        let dense = DenseLayers::of(&source, 36).map_err(words)?;
        Ok::<_, String>((StatedPooling::of(&source).map_err(words)?, dense))
    };
    let mut x = vec![0f32; 36];
    x[..3].copy_from_slice(&[0.25, -0.5, 0.125]);
    // 0.25 - 1 - 0.125 + 0.5, and 0.5 + 0.0625 - 0.25.
    let (a, b) = (-0.375f32, 0.3125f32);
    for (function, expected) in [
        ("", 3.0 * a.tanh() - 2.0 * b.tanh()),
        (
            r#", "activation_function": "torch.nn.modules.activation.Tanh""#,
            3.0 * a.tanh() - 2.0 * b.tanh(),
        ),
        (
            r#", "activation_function": "torch.nn.modules.activation.ReLU""#,
            -2.0 * b,
        ),
        (
            r#", "activation_function": "torch.nn.modules.linear.Identity""#,
            3.0 * a - 2.0 * b,
        ),
    ] {
        let (stated, dense) = read([sizes(36, 2, function), sizes(2, 1, plain)]).unwrap();
        assert_eq!(stated, StatedPooling::Known(Pooling::Mean));
        assert_eq!(dense.dimensions(36), 1);
        let found = dense.apply(x.clone());
        assert!(
            found.len() == 1 && (found[0] - expected).abs() < 1e-6,
            "{function}: {found:?}"
        );
    }
    for (one, two, expected) in [
        (sizes(35, 2, ""), sizes(2, 1, plain), "in_features"),
        (sizes(36, 2, ""), sizes(3, 1, plain), "in_features"),
        (sizes(36, 0, ""), sizes(2, 1, plain), "out_features"),
        (sizes(36, 1 << 40, ""), sizes(2, 1, plain), "out_features"),
        (sizes(36, 3, ""), sizes(3, 1, plain), "linear.weight"),
        (sizes(36, 2, ""), sizes(2, 1, ""), "linear.bias"),
        ("[]".into(), sizes(2, 1, plain), "2_Dense"),
    ] {
        let error = read([one, two]).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    // What is not known leaves all maps out, and says so.
    for (field, value) in [
        ("use_residual", "true"),
        ("module_input_name", r#""token_embeddings""#),
        ("module_output_name", r#""token_embeddings""#),
        ("activation_function", r#""torch.nn.GELU""#),
    ] {
        let unknown = format!(r#", "{field}": {value}"#);
        let (stated, dense) = read([sizes(36, 2, &unknown), sizes(2, 1, plain)]).unwrap();
        let StatedPooling::Other(what) = stated else {
            panic!("{field}: {stated:?}");
        };
        assert!(
            what.starts_with(&format!("a module Dense with {field}")),
            "{what}"
        );
        assert_eq!(dense, DenseLayers::default());
    }
    // A list may name the same folder as often as it likes.
    let many = [&[TRANSFORMER, POOLING][..], &[DENSE; 9]].concat();
    let (dir, _) = folder(&[
        ("modules.json", format!("[{}]", many.join(","))),
        ("pool/config.json", "{}".into()),
        ("2_Dense/config.json", "{}".into()),
    ]);
    std::fs::write(dir.path().join("2_Dense/model.safetensors"), &first).unwrap();
    let source = ModelSource::open(dir.path()).unwrap();
    let stated = StatedPooling::of(&source).unwrap();
    let what = "a module Dense with 8 before it";
    assert_eq!(stated, StatedPooling::Other(what.into()));
    // Of a folder without modules there are none.
    let (_dir, source) = folder(&[]);
    let none = DenseLayers::of(&source, 36).unwrap();
    assert_eq!(none, DenseLayers::default());
}

#[test]
fn texts_are_cut_off_where_the_files_say() {
    let of_modules = |text: &str| ("sentence_bert_config.json", text.to_owned());
    let of_tokenizer = |text: &str| ("tokenizer_config.json", text.to_owned());
    let cases = [
        (vec![], None),
        (vec![of_modules(r#"{"max_seq_length": 24}"#)], Some(24)),
        (
            vec![(
                "sentence_distilbert_config.json",
                r#"{"max_seq_length": 22}"#.to_owned(),
            )],
            Some(22),
        ),
        // Newer folders name it only in the tokenizer's file.
        (
            vec![
                of_modules(r#"{"transformer_task": "feature-extraction"}"#),
                of_tokenizer(r#"{"model_max_length": 20}"#),
            ],
            Some(20),
        ),
        (
            vec![
                of_modules(r#"{"max_seq_length": 24}"#),
                of_tokenizer(r#"{"model_max_length": 20}"#),
            ],
            Some(24),
        ),
        // What transformers writes where there is no end.
        (
            vec![of_tokenizer(
                r#"{"model_max_length": 1000000000000000019884624838656}"#,
            )],
            None,
        ),
    ];
    for (files, expected) in cases {
        let (_dir, source) = folder(&files);
        let model = read_encoder(source).unwrap();
        assert_eq!(model.max_seq_length, expected, "{files:?}");
    }
}
