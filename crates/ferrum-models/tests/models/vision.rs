//! Decoders that see images give what `transformers` gives.

use crate::gpu::gpu;
use crate::support::vision::{
    check_logits, compare, folder, logits_in_steps, pictures, prompt, push_part, root, ways,
};
use crate::support::{config, exact_cpu, logits_of, max_difference, open, runner_in, staged_in};
use ferrum_conformance::minimal::Minimal;
use ferrum_formats::ModelSource;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, KvF32};
use ferrum_models::vision::{ImageTokens, load_vision, read_vision};
use ferrum_models::{
    AttentionSpec, Dequantized, ImageSpan, KvLayout, Readback, RunnerGroup, StepBatch, StepOutput,
};
use ferrum_types::BlockId;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;

#[test]
fn features_are_those_of_transformers() {
    for picture in pictures() {
        for (place, value) in picture.some {
            assert!((picture.pixels[place] - value).abs() < 1e-6);
        }
    }
    for (backend, difference) in [
        ("reference", compare(&ReferenceBackend::new(), &folder())),
        ("cpu", compare(&exact_cpu(), &folder())),
    ] {
        assert!(difference < 2e-5, "{backend}: {difference}");
    }
    if let Some(device) = gpu() {
        let difference = compare(&device, &folder());
        assert!(difference < 1e-3, "wgpu: {difference}");
    }
    // Activations of eight bits of precision.
    let difference = compare(&Minimal::default(), &folder());
    assert!(difference > 1e-4 && difference < 0.2, "bf16: {difference}");
}

/// A copy of the fixture with other names of tensors, or another config.
fn changed(rename: impl Fn(&str) -> String, edit: impl Fn(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::read(folder().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let views = tensors.tensors();
    let views = views.iter().map(|(name, view)| {
        let view = TensorView::new(view.dtype(), view.shape().to_vec(), view.data());
        (rename(name), view.unwrap())
    });
    let out = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), out).unwrap();
    let text = std::fs::read(folder().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    edit(&mut config);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

#[test]
fn towers_have_several_names() {
    let plain = |name: &str| name.replace("vision_tower.vision_model", "vision_tower");
    let nested = |name: &str| match name.strip_prefix("language_model.model") {
        Some(rest) => format!("model.language_model{rest}"),
        None => format!("model.{}", plain(name)),
    };
    for dir in [changed(plain, |_| ()), changed(nested, |_| ())] {
        let difference = compare(&exact_cpu(), dir.path());
        assert!(difference < 2e-5, "{difference}");
        let model = open(dir.path());
        ferrum_models::load_weights::<_, Dequantized>(&exact_cpu(), &model, &mut |_, _| ())
            .unwrap();
    }
}

#[test]
fn configs_of_towers_that_cannot_be_are_refused() {
    let keep = str::to_owned;
    let found = |section: Option<&str>, key: &str, value: i64| {
        let dir = changed(keep, |config| match section {
            Some(section) => config[section][key] = value.into(),
            None => config[key] = value.into(),
        });
        let model = read_vision(ModelSource::open(dir.path()).unwrap());
        let loaded = model.and_then(|model| {
            let device = ReferenceBackend::open(0)?;
            load_vision::<_, Dequantized>(&device, &model, &mut |_, _| ()).map(|_| ())
        });
        loaded.err().map(|e| e.to_string()).unwrap_or_default()
    };
    assert_eq!(found(None, "more", 1), "");
    for (section, key, value, words) in [
        (
            None,
            "mm_tokens_per_image",
            8,
            "mm_tokens_per_image: found 8",
        ),
        (
            None,
            "mm_tokens_per_image",
            0,
            "mm_tokens_per_image: found 0",
        ),
        (
            None,
            "mm_tokens_per_image",
            25,
            "mm_tokens_per_image: found 25",
        ),
        (Some("text_config"), "sliding_window", 8, "at most the 8"),
        (Some("vision_config"), "image_size", 4, "patch_size"),
        (
            Some("vision_config"),
            "image_size",
            40,
            "mm_tokens_per_image",
        ),
        (
            Some("vision_config"),
            "image_size",
            34,
            "position_embedding",
        ),
        (
            Some("vision_config"),
            "num_attention_heads",
            3,
            "multiple of the 3 heads",
        ),
        (
            Some("vision_config"),
            "num_hidden_layers",
            3,
            "encoder.layers.2",
        ),
        (
            Some("text_config"),
            "hidden_size",
            35,
            "mm_input_projection_weight",
        ),
    ] {
        let found = found(section, key, value);
        assert!(found.contains(words), "{section:?}.{key}: {found}");
    }
    let text = root().join("models/gemma3");
    let error = read_vision(ModelSource::open(text).unwrap()).err().unwrap();
    assert!(error.to_string().contains("no image tower"), "{error}");
}

#[test]
fn logits_of_prompts_with_images_are_those_of_transformers() {
    check_logits::<_, KvF32>(&ReferenceBackend::new(), 1e-4);
    check_logits::<_, KvF32>(&exact_cpu(), 1e-4);
    if let Some(device) = gpu() {
        check_logits::<_, KvF32>(&device, 2e-3);
    }
    // Without the images they are others.
    let (model, mut prompt) = (open(&folder()), prompt());
    prompt.images.clear();
    let layout = KvLayout::Paged { block_size: 16 };
    let mut runner = runner_in::<_, KvF32, Dequantized>(&exact_cpu(), &model, layout);
    let ends = [prompt.tokens.len()];
    let found = logits_in_steps(&mut runner, &prompt, &ends);
    assert!(max_difference(&found, &prompt.logits) > 0.1);
}

/// An image whose first tokens are in the cache, and one beside a text in the same step: the same bits.
#[test]
fn images_share_steps_and_caches() {
    let (model, prompt) = (open(&folder()), prompt());
    let layout = KvLayout::Paged { block_size: 16 };
    let mut runner = runner_in::<_, KvF32, Dequantized>(&exact_cpu(), &model, layout);
    let (len, vocab) = (prompt.tokens.len(), model.spec.vocab_size);
    let whole = logits_in_steps(&mut runner, &prompt, &[len]);
    let table: Vec<_> = (0..8).map(BlockId).collect();
    for start in prompt
        .images
        .iter()
        .flat_map(|i| [i.start + 4, i.start + 8])
    {
        let mut batch = StepBatch::default();
        push_part(&mut batch, &prompt.tokens[start..], start, &table);
        for image in &prompt.images {
            batch.add_image(image).unwrap();
        }
        let found = logits_of(&mut runner, &batch);
        assert_eq!(found, whole[start * vocab..], "{start}");
    }
    // A text, the first image, the same tokens with another image.
    let first = &prompt.images[0];
    let tokens = &prompt.tokens[..first.positions().end + 1];
    let other = ImageSpan {
        start: first.start,
        ..prompt.images[1].clone()
    };
    let cases = [None, Some(first), Some(&other)];
    let add = |batch: &mut StepBatch, slot: u32, image: Option<&ImageSpan>| {
        let blocks: Vec<_> = (0..4).map(|i| BlockId(4 * slot + i)).collect();
        push_part(batch, tokens, 0, &blocks);
        image
            .iter()
            .for_each(|image| batch.add_image(image).unwrap());
    };
    let alone = cases.map(|image| {
        let mut batch = StepBatch::default();
        add(&mut batch, 0, image);
        logits_of(&mut runner, &batch)
    });
    let mut batch = StepBatch::default();
    for (slot, image) in cases.into_iter().enumerate() {
        add(&mut batch, slot as u32, image);
    }
    let together = logits_of(&mut runner, &batch);
    assert_eq!(together, alone.concat());
    assert!(max_difference(&alone[0], &alone[1]) > 0.1);
    assert!(max_difference(&alone[1], &alone[2]) > 0.1);
    assert_eq!(alone[1], whole[..alone[1].len()]);
}

#[test]
fn images_that_do_not_fit_a_step_are_refused() {
    let (model, prompt) = (open(&folder()), prompt());
    let layout = KvLayout::Paged { block_size: 16 };
    let first = &prompt.images[0];
    let blocks: Vec<_> = (0..8).map(BlockId).collect();
    let batch = |end: usize, image: &ImageSpan| {
        let mut batch = StepBatch::default();
        push_part(&mut batch, &prompt.tokens[..end], 0, &blocks);
        batch.add_image(image).map(|()| batch)
    };
    let end = first.positions().end;
    let error = batch(end - 1, first).unwrap_err().to_string();
    assert!(error.contains("inside an image"), "{error}");
    assert_eq!(batch(first.start, first).unwrap().images, []);
    let short = ImageSpan {
        embeddings: first.embeddings[1..].into(),
        ..first.clone()
    };
    let mut runner = runner_in::<_, KvF32, Dequantized>(&exact_cpu(), &model, layout);
    let wide = ImageSpan {
        tokens: 12,
        start: 0,
        embeddings: vec![0.0; 12 * 36].into(),
    };
    for (image, words) in [
        (&short, "embeddings of 323"),
        (&wide, "12 tokens, a layer sees 11"),
    ] {
        let batch = batch(end, image).unwrap();
        let wanted = vec![Readback::Nothing; batch.logit_rows.len()];
        let error = runner.submit(&batch, &wanted).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let folder = root().join("models/lfm2");
    let model = open(&folder);
    let mut runner = runner_in::<_, KvF32, Dequantized>(&exact_cpu(), &model, layout);
    let tokens = [1; 9];
    let mut batch = StepBatch::default();
    push_part(&mut batch, &tokens, 0, &blocks);
    batch
        .add_image(&ImageSpan {
            start: 0,
            ..first.clone()
        })
        .unwrap();
    let wanted = vec![Readback::Nothing; 9];
    let error = runner.submit(&batch, &wanted).unwrap_err().to_string();
    assert!(error.contains("cannot see images"), "{error}");
}

/// Published configs leave out what `Gemma3TextConfig` and `Gemma3Config` of `transformers` take for granted.
#[test]
fn configs_may_leave_out_what_is_usual() {
    let dir = changed(str::to_owned, |config| {
        let text = config["text_config"].as_object_mut().unwrap();
        let stated = [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "sliding_window",
        ];
        text.retain(|key, _| stated.contains(&&**key));
        text["sliding_window"] = 1024.into();
        let config = config.as_object_mut().unwrap();
        config.retain(|key, _| !key.ends_with("_index"));
        // Another size of the image, so that it has as many tokens.
        config.remove("mm_tokens_per_image");
        config["vision_config"]["image_size"] = 80.into();
    });
    let spec = open(dir.path()).spec;
    let AttentionSpec::Gqa(gqa) = &spec.layers[0].attention else {
        panic!("layers attend")
    };
    assert_eq!((gqa.heads, gqa.kv_heads, gqa.head_dim), (8, 4, 256));
    assert_eq!(gqa.sliding_window, Some(1024));
    assert_eq!((spec.vocab_size, spec.context_length), (262_208, 131_072));
    let vision = read_vision(ModelSource::open(dir.path()).unwrap())
        .unwrap()
        .spec;
    assert_eq!(vision.image_tokens(), 256);
    let ImageTokens { begin, soft, end } = vision.tokens;
    assert_eq!((begin, soft, end), (255_999, 262_144, 256_000));
}

/// Stages on two devices, and ranks that share every layer.
#[test]
fn images_are_seen_across_stages_and_ranks() {
    let (model, prompt) = (open(&folder()), prompt());
    let (cpu, reference) = (exact_cpu(), ReferenceBackend::new());
    let layers = [0..1, 1..4];
    for layout in [
        KvLayout::Paged { block_size: 16 },
        KvLayout::Grouped { block_size: 5 },
    ] {
        let mut runner = staged_in::<_, _, KvF32, Dequantized, Dequantized>(
            (&reference, &cpu),
            &model,
            &layers,
            config(layout),
        );
        for ends in ways(&prompt) {
            let found = logits_in_steps(&mut runner, &prompt, &ends);
            let difference = max_difference(&found, &prompt.logits);
            assert!(difference < 1e-4, "{layout:?} {ends:?}: {difference}");
        }
    }
    let layout = config(KvLayout::Paged { block_size: 16 });
    let devices = [exact_cpu(), exact_cpu()];
    let group = RunnerGroup::load::<KvF32, Dequantized>(&devices, &model, layout, &mut |_, _| ());
    let mut group = group.unwrap();
    let mut batch = StepBatch::default();
    let blocks: Vec<_> = (0..8).rev().map(BlockId).collect();
    push_part(&mut batch, &prompt.tokens, 0, &blocks);
    for image in &prompt.images {
        batch.add_image(image).unwrap();
    }
    let (mut output, wanted) = (
        StepOutput::default(),
        vec![Readback::Logits; prompt.tokens.len()],
    );
    group.run(&batch, &wanted, &mut output).unwrap();
    let difference = max_difference(output.logits(), &prompt.logits);
    assert!(difference < 1e-4, "ranks: {difference}");
}
