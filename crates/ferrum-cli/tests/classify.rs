//! `ferrum classify`: from files of pictures to the scores of `transformers`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{fails, ferrum, ok, root, stderr};
use serde_json::Value;

fn fixture(name: &str) -> String {
    let path = root().join("fixtures/images").join(name);
    path.display().to_string()
}

fn expected(name: &str) -> Value {
    let path = fixture(&format!("{name}/expected.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn labels(expected: &Value) -> Vec<&str> {
    let labels = expected["labels"].as_array().unwrap().iter();
    labels.map(|label| label.as_str().unwrap()).collect()
}

fn classify(model: &str, image: &str, labels: &[&str], flags: &[&str]) -> Vec<(String, f64)> {
    let (model, image) = (fixture(model), fixture(&format!("files/{image}")));
    let mut args = vec!["classify", "--json", "--backend", "cpu", &model, &image];
    args.extend(labels.iter().flat_map(|&label| ["--labels", label]));
    let printed = ok(&[&args, flags].concat());
    let found: Value = serde_json::from_str(&printed).unwrap();
    let names = found["labels"].as_array().unwrap().iter();
    let scores = found["scores"].as_array().unwrap().iter();
    names
        .zip(scores)
        .map(|(name, score)| (name.as_str().unwrap().to_owned(), score.as_f64().unwrap()))
        .collect()
}

/// Labels with their scores, the best first.
fn ranked(expected: &Value, image: &str, labels: &[&str], softmax: bool) -> Vec<(String, f64)> {
    let logits = expected["logits"][image].as_array().unwrap().iter();
    let logits: Vec<f64> = logits.map(|x| x.as_f64().unwrap()).collect();
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |x: &f64| match softmax {
        true => x.exp() / sum,
        false => 1.0 / (1.0 + (-x).exp()),
    };
    let names = labels.iter().map(|&label| label.to_owned());
    let mut all: Vec<_> = names.zip(logits.iter().map(score)).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

#[test]
fn scores_are_those_of_transformers() {
    for name in ["clip", "clip-exact-gelu", "siglip"] {
        let expected = expected(name);
        // A comma parts labels, so none of these has one.
        let all = labels(&expected);
        let plain: Vec<&str> = all.iter().copied().filter(|l| !l.contains(',')).collect();
        for image in expected["images"].as_object().unwrap().keys() {
            // Decoders of JPEG round differently.
            let most = if image.ends_with(".png") { 1e-5 } else { 0.05 };
            let mut wanted = ranked(&expected, image, &all, name != "siglip");
            wanted.retain(|(label, _)| plain.contains(&&**label));
            let sum: f64 = wanted.iter().map(|one| one.1).sum();
            if name != "siglip" {
                wanted.iter_mut().for_each(|one| one.1 /= sum);
            }
            let found = classify(name, image, &plain, &[]);
            assert_eq!(found.len(), wanted.len());
            for (label, score) in wanted {
                let found = found.iter().find(|one| one.0 == label).unwrap().1;
                assert!(
                    (found - score).abs() < most,
                    "{name} {image} {label}: {found} {score}"
                );
            }
            assert!(found.is_sorted_by(|a, b| a.1 >= b.1), "{found:?}");
        }
    }
}

#[test]
fn a_sentence_of_ones_own_is_used() {
    let expected = expected("clip");
    let sentences = ["This is a photo of a cat.", "This is a photo of town."];
    let own = classify("clip", "photo.png", &sentences, &["--template", "{}"]);
    let usual = classify("clip", "photo.png", &["a cat", "town"], &[]);
    let scores = |all: &[(String, f64)]| all.iter().map(|one| one.1).collect::<Vec<_>>();
    assert_eq!(scores(&own), scores(&usual));
    assert_eq!(labels(&expected)[0], "a cat");
}

#[test]
fn lines_have_scores_and_labels() {
    let (model, image) = (fixture("siglip"), fixture("files/grey.png"));
    let printed = ok(&["classify", &model, &image, "--labels", "a cat, town ,rain"]);
    let lines: Vec<_> = printed
        .lines()
        .map(|line| line.split_once('\t').unwrap())
        .collect();
    let scores: Vec<f64> = lines.iter().map(|line| line.0.parse().unwrap()).collect();
    assert!(
        scores.len() == 3 && scores.is_sorted_by(|a, b| a >= b),
        "{printed}"
    );
    assert!(lines.iter().any(|line| line.1 == "town"), "{printed}");
    // More tokens than the model has positions.
    let long = "cat ".repeat(80);
    let cut = ferrum(&["classify", &model, &image, "--labels", &long]);
    assert!(cut.status.success());
    assert!(stderr(&cut).contains("1 sentence is longer than the 64 tokens"));
}

#[test]
fn what_cannot_be_classified_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("a.png");
    std::fs::write(&text, b"no image at all").unwrap();
    let text = text.display().to_string();
    let photo = std::fs::read(fixture("files/photo.jpg")).unwrap();
    let half = dir.path().join("half.jpg");
    std::fs::write(&half, &photo[..photo.len() / 2]).unwrap();
    let half = half.display().to_string();
    let (model, image) = (fixture("clip"), fixture("files/photo.png"));
    let bert = root().join("fixtures/encoders/bert").display().to_string();
    let labels = ["--labels", "cat,dog"];
    for (args, words) in [
        (&["classify", &model, &text][..], "expected PNG or JPEG"),
        (&["classify", &model, "/nowhere.png"], "/nowhere.png"),
        (
            &["classify", &model, &half],
            "the JPEG image cannot be decoded: it ends too early",
        ),
        (
            &["classify", &bert, &image],
            "ferrum embed and ferrum rerank run it",
        ),
        (
            &["classify", &model, &image, "--labels", "cat,,dog"],
            "an empty label",
        ),
        (
            &["classify", &model, &image, "--labels", ""],
            "an empty label",
        ),
        (
            &["classify", &model, &image, "--template", "a photo"],
            "has no {}",
        ),
        (&["run", &model, "hi"], "ferrum classify runs it"),
    ] {
        let args: Vec<_> = match args[0] {
            "classify" => [args, &labels].concat(),
            _ => args.to_vec(),
        };
        let sentence = fails(&args, b"");
        assert!(sentence.contains(words), "{args:?}: {sentence}");
    }
    let missing = ferrum(&["classify", &model, &image]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(
        stderr(&missing).contains("--labels"),
        "{}",
        stderr(&missing)
    );
}

#[test]
fn a_preprocessor_that_is_not_known_is_told() {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("clip")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("preprocessor_config.json");
    let whole: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let (folder, image) = (dir.path().display().to_string(), fixture("files/photo.png"));
    let args = ["classify", &folder, &image, "--labels", "cat,dog"];
    let usual = ok(&args);
    for (key, value, words) in [
        ("resample", Value::from(0), "resample"),
        ("size", Value::from("small"), "size"),
        (
            "size",
            serde_json::json!({"longest_edge": 30}),
            "longest_edge",
        ),
        (
            "size",
            serde_json::json!({"height": 0, "width": 3}),
            "height",
        ),
        ("crop_size", Value::from(1 << 20), "crop_size"),
        ("crop_size", Value::from(29), "gives 29 x 29 pixels"),
        ("image_mean", serde_json::json!([1, 2]), "image_mean"),
        ("image_std", serde_json::json!([1, 2, 0]), "image_std"),
        ("do_pad", Value::from(true), "do_pad"),
    ] {
        let mut changed = whole.clone();
        changed[key] = value;
        std::fs::write(&path, changed.to_string()).unwrap();
        let sentence = fails(&args, b"");
        assert!(sentence.contains(words), "{key}: {sentence}");
    }
    // Sizes as they were once written, and the file that newer versions write.
    let mut changed = whole.clone();
    (changed["size"], changed["crop_size"]) = (30.into(), 30.into());
    std::fs::write(&path, changed.to_string()).unwrap();
    assert_eq!(ok(&args), usual);
    std::fs::remove_file(&path).unwrap();
    assert!(fails(&args, b"").contains("found no preprocessor_config.json"));
    let new = serde_json::json!({"image_processor": whole, "processor_class": "CLIPProcessor"});
    std::fs::write(dir.path().join("processor_config.json"), new.to_string()).unwrap();
    assert_eq!(ok(&args), usual);
}
