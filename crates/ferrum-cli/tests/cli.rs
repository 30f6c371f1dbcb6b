//! The command as a user meets it: what it prints where, and how it fails.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{fails, ferrum, ferrum_with_input, fixture, json, ok, root, stderr, stdout};
use ferrum_test_support::skip;
use serde_json::Value;
use std::path::Path;

/// The first of the ids that `tokenize` printed.
fn first_id(ids: &str) -> &str {
    ids.trim().split(',').next().unwrap()
}

#[test]
fn every_sampler_has_a_flag() {
    let base = ["run", "--raw", "--max-tokens", "24"];
    let prompt = "Mia had a red bell. Mia had a red bell. Mia had a";
    let run = |temperature: &[&str], flags: &[&str]| {
        let output = ferrum(&[&base, temperature, flags, &[prompt]].concat());
        assert!(output.status.success(), "{flags:?}: {}", stderr(&output));
        stdout(&output)
    };
    let answer = |flags: &[&str]| run(&["--temperature", "0"], flags);
    let plain = answer(&[]);
    let tokens = stdout(&ferrum(&["tokenize", " a"]));
    let id = first_id(&tokens);
    let said = answer(&["--logit-bias", &format!("{id}=1000")]);
    assert_eq!(said.trim_end(), " a".repeat(24), "token {id}");
    let tokens = stdout(&ferrum(&["tokenize", &plain]));
    let id = first_id(&tokens);
    assert_ne!(answer(&["--logit-bias", &format!("{id}=-inf")]), plain);
    for flags in [
        &["--repeat-penalty", "5", "--repeat-last-n", "-1"][..],
        &["--presence-penalty", "50"],
        &["--frequency-penalty", "50"],
        &[
            "--dry-multiplier",
            "50",
            "--dry-allowed-length",
            "1",
            "--dry-sequence-breaker",
            "#",
        ],
    ] {
        assert_ne!(answer(flags), plain, "{flags:?}");
    }
    // With randomness: one seed, and what the sampler leaves out changes the text.
    let warmth = [
        "--temperature",
        "1.5",
        "--seed",
        "3",
        "--min-p",
        "0",
        "--top-k",
        "0",
    ];
    let warm = |flags: &[&str]| run(&warmth, flags);
    let free = warm(&[]);
    assert_eq!(warm(&["--typical-p", "1"]), free);
    for flags in [
        &["--typical-p", "0.1"][..],
        &["--xtc-probability", "1", "--xtc-threshold", "0.01"],
        &["--mirostat", "--mirostat-tau", "0.01"],
    ] {
        assert_ne!(warm(flags), free, "{flags:?}");
    }
}

#[test]
fn the_demo_model_tells_a_story() {
    let output = ferrum(&[
        "run",
        "-v",
        "--temperature",
        "0",
        "Tell me a story about a fox.",
    ]);
    let (text, words) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{words}");
    assert!(text.contains("fox"), "{text}");
    assert!(text.split_whitespace().count() > 30, "{text}");
    assert!(words.contains("tokens/s"), "{words}");
    assert!(!text.contains("tokens/s"), "{text}");
}

#[test]
fn a_piped_prompt_is_answered_like_an_argument() {
    let args = ["run", "--temperature", "0", "--max-tokens", "12"];
    let argument = ok(&[&args[..], &["What is 7 plus 5?"]].concat());
    let piped = ferrum_with_input(&args, b"What is 7 plus 5?");
    assert_eq!(stdout(&piped), argument);
    assert!(argument.contains("12"), "{argument}");
}

#[test]
fn one_seed_gives_one_text() {
    let run = |seed: &str| {
        ok(&[
            "run",
            "--seed",
            seed,
            "--temperature",
            "1.5",
            "-n",
            "40",
            "Tell me a story.",
        ])
    };
    assert_eq!(run("7"), run("7"));
    assert_ne!(run("7"), run("8"));
}

#[test]
fn generation_ends_at_a_stop_string_and_at_its_limit() {
    let base = ["run", "--temperature", "0", "--raw", "Once upon a time"];
    let long = ok(&[&base[..], &["-n", "40"]].concat());
    let word = long.split_whitespace().nth(6).unwrap();
    let stopped = ok(&[&base[..], &["-n", "40", "--stop", word]].concat());
    assert!(
        long.starts_with(stopped.trim_end()) && !stopped.contains(word),
        "{stopped}"
    );
    assert!(ok(&[&base[..], &["-n", "3"]].concat()).len() < long.len());
}

#[test]
fn backends_give_the_same_greedy_text() {
    let run = |backend: &str, kv: &str| {
        let prompt = "Tell me a story about a bear.";
        let args = [
            "run",
            "--backend",
            backend,
            "--kv-dtype",
            kv,
            "--temperature",
            "0",
            "-n",
            "24",
        ];
        ferrum(&[&args[..], &[prompt]].concat())
    };
    let cpu = run("cpu", "f32");
    assert!(cpu.status.success(), "{}", stderr(&cpu));
    assert_eq!(stdout(&run("reference", "f32")), stdout(&cpu));
    let vulkan = run("vulkan", "f32");
    if vulkan.status.success() {
        assert_eq!(stdout(&vulkan), stdout(&cpu));
    } else {
        // Without a driver it is one clear sentence.
        assert!(
            stderr(&vulkan).contains("error: no vulkan device"),
            "{}",
            stderr(&vulkan)
        );
        skip("no Vulkan device");
    }
}

#[test]
fn logits_are_given_for_every_position() {
    let dir = fixture("qwen3");
    let value = json(&["logits", "--model", &dir, "--tokens", "1,2,3", "--json"]);
    assert_eq!(value["tokens"], serde_json::json!([1, 2, 3]));
    let rows = value["logits"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.as_array().unwrap().len() == 259));
    let gguf = json(&[
        "logits",
        "--model",
        &format!("{dir}/model.gguf"),
        "--tokens",
        "1,2,3",
        "--json",
    ]);
    let first = |v: &Value| v["logits"][2][7].as_f64().unwrap();
    assert!((first(&value) - first(&gguf)).abs() < 1e-4);
}

#[test]
fn an_adapter_changes_what_a_model_thinks() {
    let model = fixture("llama3-tied");
    let lora = root().join("fixtures/lora/llama-all").display().to_string();
    let args = ["logits", "--model", &model, "--tokens", "1,2,3", "--json"];
    let with = json(&[&args[..], &["--lora", &lora]].concat());
    assert_eq!(with["logits"].as_array().unwrap().len(), 3);
    assert_ne!(with["logits"], json(&args)["logits"]);
    let run = [
        "run",
        "--model",
        &model,
        "--raw",
        "--temperature",
        "0",
        "-n",
        "8",
        "Hello",
    ];
    assert_ne!(ok(&[&run[..], &["--lora", &lora]].concat()), ok(&run));
}

#[test]
fn text_makes_the_round_trip_through_tokens() {
    let text = "Tom has 12 apples.\n  Zoë 🦊 said: \"hi\"";
    let tokens = json(&["tokenize", "--json", text]);
    let ids: Vec<_> = tokens["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(Value::to_string)
        .collect();
    assert_eq!(
        ok(&["detokenize", "--tokens", &ids.join(",")]),
        format!("{text}\n")
    );
    let special = "<|im_end|>";
    let count = |args: &[&str]| json(args)["tokens"].as_array().unwrap().len();
    assert_eq!(
        count(&["tokenize", "--json", "--parse-special", special]),
        1
    );
    assert!(count(&["tokenize", "--json", special]) > 1);
}

#[test]
fn a_template_is_rendered_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("messages.json");
    std::fs::write(&file, r#"[{"role":"user","content":"a < b"}]"#).unwrap();
    let file = file.display().to_string();
    assert_eq!(
        ok(&["template", "--messages", &file]),
        "<|im_start|>user\na < b<|im_end|>\n<|im_start|>assistant\n"
    );
    let without = ok(&["template", "--messages", &file, "--no-generation-prompt"]);
    assert_eq!(without, "<|im_start|>user\na < b<|im_end|>\n");
}

#[test]
fn bench_prints_what_programs_read() {
    let value = json(&[
        "bench", "--prompt", "16", "--gen", "4", "--repeat", "1", "--json",
    ]);
    for key in [
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "load_s",
        "first_token_s",
        "read_bandwidth_bytes_per_s",
        "fma_peak_flops",
    ] {
        assert!(
            value[key].as_f64().is_some_and(|x| x > 0.0),
            "{key}: {value}"
        );
    }
    let rss = &value["peak_rss_bytes"];
    assert!(
        rss.as_u64().is_some_and(|x| x > 1 << 20) || !cfg!(target_os = "linux"),
        "{rss}"
    );
}

#[test]
fn bench_profiles_every_op() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    let args = ["bench", "--prompt", "16", "--gen", "3", "--repeat", "1"];
    let more = ["--profile", trace.to_str().unwrap(), "--json"];
    let value = json(&[&args[..], &more].concat());
    let layers = 4;
    for (stretch, steps) in [("prefill", 1), ("decode", 3)] {
        let stretch = &value["profile"][stretch];
        let ops = stretch["ops"].as_array().unwrap();
        for (name, calls) in [("lm_head", steps), ("attention", steps * layers)] {
            let op = ops.iter().find(|op| op["name"] == name).unwrap();
            assert_eq!(op["calls"], calls, "{op}");
        }
        let sum: f64 = ops.iter().map(|op| op["seconds"].as_f64().unwrap()).sum();
        assert!(sum > 0.0 && sum <= stretch["seconds"].as_f64().unwrap());
    }
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert_eq!(
        events.iter().filter(|e| e["name"] == "lm_head").count(),
        1 + 3
    );
    let (output, missing) = ("no/such/folder/trace.json", "cannot write no/such/folder");
    let failed = ferrum(&[&args[..], &["--profile", output]].concat());
    assert!(!failed.status.success());
    assert!(stderr(&failed).contains(missing), "{}", stderr(&failed));
}

#[test]
fn perplexity_of_plain_text_is_better_than_chance() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.txt");
    std::fs::write(
        &file,
        "Once upon a time, there was a little fox. The fox lived in a forest.",
    )
    .unwrap();
    let value = json(&["perplexity", &file.display().to_string(), "--json"]);
    let perplexity = value["perplexity"].as_f64().unwrap();
    assert!(perplexity > 1.0 && perplexity < 200.0, "{value}");
}

#[test]
fn devices_are_listed() {
    let devices = json(&["devices", "--json"]);
    let backends: Vec<_> = devices
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["backend"].as_str().unwrap())
        .collect();
    assert!(
        backends.contains(&"cpu") && backends.contains(&"reference"),
        "{backends:?}"
    );
}

#[test]
fn wrong_use_is_one_clear_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let truncated = path("truncated.gguf");
    let demo = std::fs::read(root().join("assets/demo/ferrum-demo.gguf")).unwrap();
    std::fs::write(&truncated, &demo[..demo.len() / 2]).unwrap();
    let empty = path("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    let pickle = path("pytorch_model.bin");
    std::fs::write(&pickle, b"\x80\x02").unwrap();
    let latin1 = path("latin1.txt");
    std::fs::write(&latin1, b"caf\xe9").unwrap();
    let missing = missing_tensor(dir.path());
    let unknown = unknown_architecture(dir.path());
    let shape = wrong_shape(dir.path());
    let advice = copy_fixture(dir.path(), "advice", |_| ());
    let advised = Path::new(&advice).join("generation_config.json");
    std::fs::write(advised, r#"{"do_sample": true, "temperature": -1.0}"#).unwrap();
    let layers = copy_fixture(dir.path(), "layers", |c| {
        c["num_hidden_layers"] = 1_000_000.into();
    });
    let longrope = copy_fixture(dir.path(), "longrope", |c| {
        c["rope_parameters"] = serde_json::json!({
            "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0],
        });
    });
    let unknown_rope = copy_fixture(dir.path(), "unknown-rope", |c| {
        c["rope_parameters"] = serde_json::json!({ "rope_type": "spiral" });
    });
    let not_a_number = copy_fixture(dir.path(), "nan", |c| c["rms_norm_eps"] = "NaN".into());
    let config = Path::new(&not_a_number).join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"NaN\"", "NaN")).unwrap();
    let long = "word ".repeat(3000);
    let adapter = root().join("fixtures/lora/llama-all");
    let adapter = adapter.display().to_string();
    let cases: &[(&[&str], &[u8], &str)] = &[
        (&["run", ""], b"", "the prompt is empty"),
        (&["run"], b" \n", "the prompt is empty"),
        (&["run"], b"caf\xe9", "standard input is not UTF-8: byte 3"),
        (
            &["run", "--model", "/no/such/file.gguf", "hi"],
            b"",
            "no such file",
        ),
        (&["run", "--model", &truncated, "hi"], b"", "truncated.gguf"),
        (&["run", "--model", &empty, "hi"], b"", "empty.gguf"),
        (
            &["run", "--model", &pickle, "hi"],
            b"",
            "convert the model to safetensors",
        ),
        (
            &["run", "--model", &unknown, "hi"],
            b"",
            "\"NoSuchForCausalLM\" is not supported",
        ),
        (
            &["logits", "--model", &missing, "--tokens", "1"],
            b"",
            "model.norm.weight",
        ),
        (
            &["run", "--lora", "/no/such/adapter", "hi"],
            b"",
            "/no/such/adapter: holds no adapter_config.json",
        ),
        (
            &["run", "--lora", &adapter, "hi"],
            b"",
            "the adapter is for another model (llama3-tied)",
        ),
        (
            &["logits", "--model", &shape, "--tokens", "1"],
            b"",
            "expected",
        ),
        (&["run", &long], b"", "context overflow"),
        (&["run", "--top-p", "7", "hi"], b"", "top-p: found 7"),
        (
            &["run", "--temperature", "-1", "hi"],
            b"",
            "temperature: found -1, expected a number of at least 0",
        ),
        (
            &["run", "--repeat-penalty", "0", "hi"],
            b"",
            "repeat-penalty: found 0, expected a number above 0",
        ),
        (
            &["run", "--xtc-probability", "1.5", "hi"],
            b"",
            "xtc-probability: found 1.5, expected 0 to 1",
        ),
        (&["run", "--device", "9", "hi"], b"", "name the backend too"),
        (
            &["run", "--backend", "cpu", "--device", "1", "hi"],
            b"",
            "device number 1 does not exist",
        ),
        (
            &["run", "--model", &advice, "hi"],
            b"",
            "generation_config.json: sampling: temperature: found -1",
        ),
        (
            &["logits", "--model", &layers, "--tokens", "1"],
            b"",
            "config.json: field \"num_hidden_layers\": found number 1000000, expected 1 to 10000",
        ),
        (
            &["logits", "--model", &longrope, "--tokens", "1"],
            b"",
            "config.json: short_factor: found 1 factors, expected 10 non-zero ones",
        ),
        (
            &["logits", "--model", &unknown_rope, "--tokens", "1"],
            b"",
            "found string \"spiral\", expected default, linear, dynamic, yarn",
        ),
        (
            &["logits", "--model", &not_a_number, "--tokens", "1"],
            b"",
            "field \"rms_norm_eps\": found string \"NaN\"",
        ),
        (&["logits", "--prompt", ""], b"", "the prompt has no token"),
        (
            &["run", "--backend", "cuda", "--device", "99", "hi"],
            b"",
            "no cuda device: ",
        ),
        (
            &["logits", "--tokens", "99999999"],
            b"",
            "outside the vocabulary",
        ),
        (
            &["detokenize", "--tokens", "99999999"],
            b"",
            "outside the vocabulary",
        ),
        (
            &["perplexity", &latin1],
            b"",
            "latin1.txt is not UTF-8: byte 3",
        ),
        (&["perplexity", "-"], b"", "0 tokens"),
        (&["template", "--messages", &latin1], b"", "not UTF-8"),
        (&["template", "--messages", "-"], b"{", "is not JSON"),
        (&["template", "--messages", "-"], b"{}", "expected a list"),
        (
            &["bench", "--prompt", "999999"],
            b"",
            "do not fit the model's context",
        ),
    ];
    for (args, input, expected) in cases {
        let sentence = fails(args, input);
        assert!(sentence.contains(expected), "{args:?}: {sentence}");
    }
}

/// Copies a fixture folder, changing its config.
/// A model of another kind is told what it is, and what runs it.
#[test]
fn a_model_of_another_kind_is_told_what_runs_it() {
    let at = |name: &str| root().join("fixtures").join(name).display().to_string();
    let (decoder, encoder) = (at("models/qwen3"), at("encoders/bert"));
    let (clip, whisper) = (at("images/clip"), at("speech/whisper"));
    let (head, named) = (
        at("drafts/qwen3-eagle3"),
        format!("a={}", at("images/clip")),
    );
    let (image, wav) = (at("images/files/photo.png"), at("speech/sentence.wav"));
    for (args, words) in [
        (
            &["run", &encoder, "hi"][..],
            "is a text encoder, not a model that generates text\nhint: ferrum embed and ferrum rerank run it",
        ),
        (&["run", &head, "hi"], "is a draft head, not a model that"),
        (&["embed", &clip, "hi"], "hint: ferrum classify runs it"),
        (&["embed", &head, "hi"], "with --draft-model"),
        (
            &["rerank", &decoder, "hi", "ho"],
            "is a model that generates text, not a text encoder\nhint: ferrum run, ferrum embed and ferrum serve run it",
        ),
        (
            &["transcribe", &clip, &wav],
            "is an image and text encoder, not a speech recogniser",
        ),
        (
            &["classify", &whisper, &image, "--labels", "a,b"],
            "is a speech recogniser, not an image and text encoder",
        ),
        (
            &["quantize", &encoder, "/nowhere.gguf", "--type", "q8_0"],
            "hint: ferrum embed and ferrum rerank run it",
        ),
        // Not when it is asked for: at the start.
        (
            &["serve", &named, &decoder, "--port", "0"],
            "hint: ferrum classify runs it",
        ),
    ] {
        let sentence = fails(args, b"");
        assert!(sentence.contains(words), "{args:?}: {sentence}");
    }
}

fn copy_fixture(to: &Path, name: &str, change: impl Fn(&mut Value)) -> String {
    let (from, to) = (root().join("fixtures/models/qwen3"), to.join(name));
    std::fs::create_dir(&to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    let config = to.join("config.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(&config, value.to_string()).unwrap();
    to.display().to_string()
}

fn unknown_architecture(dir: &Path) -> String {
    copy_fixture(dir, "unknown", |c| {
        c["architectures"] = serde_json::json!(["NoSuchForCausalLM"])
    })
}

fn wrong_shape(dir: &Path) -> String {
    copy_fixture(dir, "shape", |c| c["intermediate_size"] = 7.into())
}

/// A folder whose weights lack the final norm: its name in the header is another.
fn missing_tensor(dir: &Path) -> String {
    let folder = copy_fixture(dir, "missing", |_| ());
    let file = Path::new(&folder).join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let name = b"\"model.norm.weight\"";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap();
    bytes[at + 1..at + 6].copy_from_slice(b"nodel");
    std::fs::write(&file, bytes).unwrap();
    folder
}

#[test]
fn arguments_that_clap_refuses_say_what_was_expected() {
    for (tokens, found) in [("1,x", "\"x\""), ("", "\"\""), ("-1", "\"-1\"")] {
        let output = ferrum(&["logits", "--tokens", tokens]);
        let words = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{words}");
        let expected = format!("found {found}, expected a token id");
        assert!(words.contains(&expected), "{words}");
    }
    assert_eq!(
        ok(&["detokenize", "--tokens", "5, 6"]),
        ok(&["detokenize", "--tokens", "5,6"])
    );
}

/// Dynamic RoPE begins where the trained context ends, so a run has to get there.
#[test]
fn a_context_may_be_longer_than_the_trained_one() {
    let ids = (0..40)
        .map(|i| (i * 7 % 250).to_string())
        .collect::<Vec<_>>();
    let model = fixture("llama-dynamic");
    let long = json(&[
        "logits",
        "--model",
        &model,
        "--tokens",
        &ids.join(","),
        "--json",
    ]);
    assert_eq!(long["logits"].as_array().unwrap().len(), 40);
    let output = ferrum(&["run", "--context", "3000", "-n", "1", "hi"]);
    assert!(output.status.success());
    let words = stderr(&output);
    assert!(
        words.contains("note: 3000 tokens of context, and the model was made for"),
        "{words}"
    );
}

#[test]
fn a_written_out_prompt_may_hold_special_tokens() {
    let count = |prompt: &str| {
        let output = ferrum(&[
            "run",
            "-v",
            "--raw",
            "--temperature",
            "0",
            "-n",
            "1",
            prompt,
        ]);
        let words = stderr(&output);
        let (_, rest) = words.split_once("prompt: ").unwrap();
        rest.split(' ').next().unwrap().parse::<usize>().unwrap()
    };
    assert_eq!(count("<|im_end|>"), 1);
}

#[test]
fn a_piped_prompt_ends_without_its_end_of_line() {
    let prompt = "What is 7 plus 5?";
    let args = ["run", "--temperature", "0"];
    let piped = ferrum_with_input(&args, format!("{prompt}\n").as_bytes());
    let given = ferrum(&[&args[..], &[prompt]].concat());
    assert_eq!(stdout(&piped), stdout(&given));
}

#[test]
fn a_template_file_gets_its_special_tokens_by_flags() {
    let dir = tempfile::tempdir().unwrap();
    let template = dir.path().join("t.jinja").display().to_string();
    let source = "{{ bos_token + messages[0]['content'] + eos_token }}";
    std::fs::write(&template, source).unwrap();
    let messages = br#"[{"role": "user", "content": "hi"}]"#;
    let args = ["template", "--model", &template, "--messages", "-"];
    let flags = ["--bos-token", "<s>", "--eos-token", "</s>"];
    let output = ferrum_with_input(&[&args[..], &flags].concat(), messages);
    assert_eq!(stdout(&output), "<s>hi</s>");
    assert!(fails(&args, messages).contains("t.jinja: chat template, line 1"));
}

#[test]
fn help_needs_no_docs() {
    insta::assert_snapshot!("help", ok(&["--help"]));
}
