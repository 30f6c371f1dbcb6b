//! `ferrum run --image`: the answers of `transformers`, and the errors for unreadable images.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{ferrum, ok, root, stderr};
use ferrum_formats::tokenizer::Tokenizer;
use serde_json::Value;

fn fixture(name: &str) -> String {
    root().join("fixtures").join(name).display().to_string()
}

const MODEL: &str = "vision/gemma3";

#[test]
fn answers_about_images_are_those_of_transformers() {
    let (model, image) = (fixture(MODEL), fixture("images/files/photo.png"));
    let expected = std::fs::read(root().join("fixtures/vision/gemma3/expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let greedy = expected["chats"][0]["greedy"].as_array().unwrap().iter();
    let greedy: Vec<u32> = greedy.map(|id| id.as_u64().unwrap() as u32).collect();
    let tokenizer = Tokenizer::from_hf_dir(root().join("fixtures").join(MODEL)).unwrap();
    let answer = ok(&[
        "run",
        "--backend",
        "cpu",
        "--kv-dtype",
        "f32",
        "--temperature",
        "0",
        "-n",
        "48",
        "--image",
        &image,
        &model,
        "What is this?",
    ]);
    assert_eq!(answer, tokenizer.decode(&greedy, true) + "\n");
    // Two of them are another prompt.
    let two = ok(&[
        "run",
        "--backend",
        "cpu",
        "--kv-dtype",
        "f32",
        "--temperature",
        "0",
        "-n",
        "48",
        "--image",
        &image,
        "--image",
        &image,
        &model,
        "What is this?",
    ]);
    assert_ne!(two, answer);
}

#[test]
fn images_that_cannot_be_seen_are_refused() {
    let (model, image) = (fixture(MODEL), fixture("images/files/photo.png"));
    let text = fixture("models/gemma3");
    let config = fixture("vision/gemma3/config.json");
    for (args, words) in [
        (
            &["--image", &image, &text, "What?"][..],
            "this model reads only text",
        ),
        (&["--image", &image, "What?"], "this model reads only text"),
        (
            &["--image", &config, &model, "What?"],
            "not an image that is supported",
        ),
        (&["--image", "no-file.png", &model, "What?"], "no-file.png"),
        (
            &["--image", "https://example.org/a.png", &model, "What?"],
            "found a URL, expected a file",
        ),
        (
            &["--image", &image, "--raw", &model, "What?"],
            "cannot be used with",
        ),
        (
            &["--image", &image, &model, "<start_of_image>"],
            "2 times \"<start_of_image>\"",
        ),
    ] {
        let output = ferrum(&[&["run", "--backend", "cpu"], args].concat());
        assert!(!output.status.success(), "{args:?}");
        let said = stderr(&output);
        assert!(said.contains(words), "{args:?}: {said}");
    }
}
