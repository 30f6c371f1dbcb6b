//! CLIP and SigLIP give what `transformers` gives, on every backend.

use crate::gpu::gpu;
use crate::support::clip::{Expected, NAMES, compare, folder, open, runner};
use crate::support::exact_cpu;
use ferrum_conformance::minimal::Minimal;
use ferrum_formats::ModelSource;
use ferrum_kernels::Backend;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_models::clip::{ImageTextModel, load_clip, read_clip};
use ferrum_models::{Dequantized, read_model};
use ferrum_types::Error;
use serde_json::Value;

#[test]
fn vectors_and_logits_are_those_of_transformers() {
    for name in NAMES {
        for (backend, (cosine, logit)) in [
            ("reference", compare(&ReferenceBackend::new(), name)),
            ("cpu", compare(&exact_cpu(), name)),
        ] {
            assert!(cosine > 0.999_999, "{name} on {backend}: {cosine}");
            assert!(logit < 1e-4, "{name} on {backend}: {logit}");
        }
        if let Some(device) = gpu() {
            let (cosine, logit) = compare(&device, name);
            assert!(
                cosine > 0.999_99 && logit < 1e-3,
                "{name}: {cosine} {logit}"
            );
        }
        // Activations of eight bits of precision.
        let (cosine, _) = compare(&Minimal::default(), name);
        assert!(
            cosine > 0.98 && cosine < 0.999_999,
            "{name} in bf16: {cosine}"
        );
    }
}

/// Pictures and texts share a batch, or not: the same bits.
#[test]
fn what_shares_a_batch_does_not_show() {
    for name in NAMES {
        let model = open(name);
        let expected = Expected::read(name, model.spec.kind);
        let mut runner = runner(&exact_cpu(), &model);
        let together = runner.embed_texts(&expected.ids).unwrap();
        for (text, vector) in expected.ids.iter().zip(&together) {
            let alone = runner.embed_texts(std::slice::from_ref(text)).unwrap();
            assert_eq!(&alone[0], vector, "{name}");
        }
        // More than fit a batch, so that some are behind it.
        let pictures: Vec<_> = vec![expected.pixels.clone(); 9].concat();
        let together = runner.embed_images(&pictures).unwrap();
        assert_eq!(together.len(), pictures.len());
        for (i, vector) in together.iter().enumerate() {
            let alone = &together[i % expected.pixels.len()];
            assert_eq!(alone, vector, "{name} {i}");
        }
        let alone = runner.embed_images(&pictures[..1]).unwrap();
        assert_eq!(alone[0], together[0], "{name}");
    }
}

#[test]
fn what_cannot_be_computed_is_refused() {
    let model = open("clip");
    let mut runner = runner(&exact_cpu(), &model);
    for pixels in [0, 3 * 30 * 30 + 1] {
        let found = runner.embed_images(&[vec![0.0; pixels]]);
        assert!(matches!(found, Err(Error::InvalidArgument { .. })));
    }
    for text in [vec![], vec![1_000_000]] {
        let found = runner.embed_texts(&[text]);
        assert!(matches!(found, Err(Error::InvalidArgument { .. })));
    }
    let overflow = Error::ContextOverflow {
        requested: 41,
        capacity: 40,
    };
    assert_eq!(runner.embed_texts(&[vec![1; 41]]), Err(overflow));
    let error = read_model(ModelSource::open(folder("clip")).unwrap());
    let error = error.err().unwrap().to_string();
    assert!(error.contains("ferrum classify runs it"), "{error}");
    let bert = folder("../encoders/bert");
    let error = read_clip(ModelSource::open(bert).unwrap());
    let error = error.err().unwrap().to_string();
    assert!(
        error.contains("BertModel") && error.contains("CLIPModel, SiglipModel"),
        "{error}"
    );
}

#[test]
fn configs_that_cannot_be_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str, section: &str, key: &str, value: Value| {
        let weights = "model.safetensors";
        std::fs::copy(folder(name).join(weights), dir.path().join(weights)).unwrap();
        let text = std::fs::read(folder(name).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        config[section][key] = value;
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let model = read_clip(ModelSource::open(dir.path()).unwrap());
        let model = model.and_then(|model| {
            let device = ReferenceBackend::open(0)?;
            load_clip::<_, Dequantized>(&device, &model, &mut |_, _| ())?;
            Ok(())
        });
        model
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    assert_eq!(copy("clip", "more", "key", Value::Null), "");
    for (name, section, key, value, words) in [
        (
            "clip",
            "vision_config",
            "num_attention_heads",
            3,
            "multiple of the 3 heads",
        ),
        ("clip", "vision_config", "patch_size", 31, "patch_size"),
        ("clip", "vision_config", "patch_size", 0, "patch_size"),
        ("clip", "vision_config", "patch_size", 5, "patch_embedding"),
        ("clip", "vision_config", "num_channels", 1, "num_channels"),
        ("clip", "vision_config", "image_size", 1 << 20, "image_size"),
        (
            "clip",
            "text_config",
            "num_hidden_layers",
            3,
            "text_model.encoder.layers.2",
        ),
        ("clip", "text_config", "hidden_act", 7, "hidden_act"),
        (
            "clip",
            "text_config",
            "max_position_embeddings",
            2,
            "max_position_embeddings",
        ),
        (
            "siglip",
            "vision_config",
            "vision_use_head",
            0,
            "vision_use_head",
        ),
        ("siglip", "text_config", "vocab_size", 40, "token_embedding"),
    ] {
        let found = copy(name, section, key, Value::from(value));
        assert!(found.contains(words), "{section}.{key}: {found}");
    }
}
