//! The words and flags that commands share: which word is the model, what a pipe adds, how much is said.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{fails, ferrum, ferrum_with_input, fixture, json, ok, root, stderr, stdout};
use ferrum_test_support::skip;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

const GREEDY: [&str; 5] = ["run", "--temperature", "0", "--max-tokens", "12"];

fn greedy(words: &[&str], input: &[u8]) -> String {
    let args = [&GREEDY[..], words].concat();
    let output = ferrum_with_input(&args, input);
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    stdout(&output)
}

fn demo() -> String {
    root()
        .join("assets/demo/ferrum-demo.gguf")
        .display()
        .to_string()
}

#[test]
fn a_model_is_the_first_word_or_a_flag() {
    let (question, demo, other) = ("What is 7 plus 5?", demo(), fixture("qwen3/model.gguf"));
    let expected = greedy(&[question], b"");
    assert!(expected.contains("12"), "{expected}");
    for words in [
        &[demo.as_str(), question][..],
        &["--model", &demo, question],
        &["-m", &demo, question],
    ] {
        assert_eq!(greedy(words, b""), expected, "{words:?}");
    }
    // A model alone is no prompt: the prompt comes through the pipe.
    assert_eq!(greedy(&[&demo], question.as_bytes()), expected);
    assert_eq!(greedy(&[&demo, "-"], question.as_bytes()), expected);
    assert_ne!(greedy(&[&other, "--raw", question], b""), expected);
}

#[test]
fn every_command_takes_its_model_as_a_word_and_as_a_flag() {
    let model = fixture("qwen3/model.gguf");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let text = path("text.txt", "Once upon a time there was a fox.");
    let messages = path("messages.json", r#"[{"role": "user", "content": "hi"}]"#);
    let cases: [(&str, &[&str]); 6] = [
        ("inspect", &["--json"]),
        ("logits", &["--tokens", "1,2"]),
        ("perplexity", &[&text]),
        ("tokenize", &["some text"]),
        ("detokenize", &["--tokens", "1,2"]),
        ("template", &["--messages", &messages]),
    ];
    for (command, rest) in cases {
        let word = ferrum(&[&[command, &model], rest].concat());
        let flag = ferrum(&[&[command, "--model", &model], rest].concat());
        // The fixture has no chat template, and both ways say so of the same file.
        assert_eq!(word.status, flag.status, "{command}");
        assert_eq!(stderr(&word), stderr(&flag), "{command}");
        // The memory of the process is part of the plan, and differs.
        if command != "inspect" {
            assert_eq!(stdout(&word), stdout(&flag), "{command}");
        }
        let twice = ferrum(&[&[command, &model], rest, &["--model", &model]].concat());
        let words = stderr(&twice);
        assert!(!twice.status.success(), "{command}");
        assert!(
            words.contains("cannot be used with") || words.contains("the model is given twice"),
            "{command}: {words}"
        );
    }
    let bench = [
        "bench", &model, "--prompt", "4", "--gen", "2", "--repeat", "1", "--json",
    ];
    assert_eq!(json(&bench)["model"], model.as_str());
}

#[test]
fn what_is_no_prompt_is_not_sent_as_one() {
    for (words, expected) in [
        (
            &["model.gguf"][..],
            "model.gguf: there is no such file or folder",
        ),
        (&["./models/qwen3"], "./models/qwen3: there is no such file"),
        (&["models/of/mine.safetensors"], "there is no such file"),
        (
            &["missing.gguf", "A question"],
            "missing.gguf: there is no such file",
        ),
        (
            &["Tell", "me"],
            "hint: a prompt of several words goes in quotes",
        ),
        (&["./none", "hi"], "hint: check the path"),
        (&["hi", "a.gguf"], "hint: the model comes before the prompt"),
        (
            &["--model", "a.gguf", "b.gguf", "hi"],
            "the model is given twice: a.gguf by --model, and b.gguf",
        ),
    ] {
        let sentence = fails(&[&["run"], words].concat(), b"");
        assert!(sentence.contains(expected), "{words:?}: {sentence}");
    }
    let sentence = fails(&["perplexity", "model.gguf"], b"");
    assert!(sentence.contains("there is no text file"), "{sentence}");
}

#[test]
fn a_single_word_is_told_how_to_be_a_model() {
    let args = [&GREEDY[..], &["llama3"]].concat();
    let words = stderr(&ferrum(&args));
    assert!(
        words.starts_with("note: \"llama3\" is neither a path nor ORG/NAME"),
        "{words}"
    );
    assert!(words.contains("\nhint: a model is given as"), "{words}");
    assert_eq!(stderr(&ferrum(&[&args[..], &["--quiet"]].concat())), "");
    let sentence = [&GREEDY[..], &["Is it and/or?"]].concat();
    assert_eq!(stderr(&ferrum(&sentence)), "");
}

#[test]
fn a_pipe_follows_the_prompt() {
    let expected = greedy(&["What is 7\n\nplus 5?"], b"");
    assert_eq!(greedy(&["What is 7"], b"plus 5?\n"), expected);
    assert_eq!(greedy(&[&demo(), "What is 7"], b"plus 5?\n"), expected);
    let alone = greedy(&["Tell me a story."], b"");
    // An empty pipe adds nothing, and - is the pipe alone.
    assert_eq!(greedy(&["Tell me a story."], b" \n"), alone);
    assert_eq!(greedy(&["-"], b"Tell me a story."), alone);
    let null = Command::new(env!("CARGO_BIN_EXE_ferrum"))
        .args([&GREEDY[..], &["Tell me a story."]].concat())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(stdout(&null), alone);
}

#[test]
fn a_pipe_that_stays_open_is_told_of() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferrum"))
        .args([&GREEDY[..], &["What is 7 plus 5?"]].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut words = BufReader::new(child.stderr.take().unwrap());
    words.read_line(&mut line).unwrap();
    assert_eq!(line, "note: reading standard input until it ends\n");
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && stdout(&output).contains("12"));
}

#[test]
fn quiet_says_nothing_and_verbose_says_how_fast() {
    let run = |flags: &[&str]| {
        let output = ferrum(&[&GREEDY[..], flags, &["What is 7 plus 5?"]].concat());
        assert!(output.status.success());
        (stdout(&output), stderr(&output))
    };
    let (plain, words) = run(&[]);
    assert_eq!(words, "");
    assert_eq!(run(&["--quiet"]), (plain.clone(), String::new()));
    for flag in ["-v", "--verbose"] {
        let (text, words) = run(&[flag]);
        assert_eq!(text, plain);
        assert!(words.contains("tokens/s"), "{words}");
        // With --verbose, the note about dequantised weights is printed once.
        assert_eq!(words.matches("dequantised to f32").count(), 1, "{words}");
    }
    // Before the command, too; and errors are always said.
    let output = ferrum(&["-q", "run", "--model", "none.gguf", "hi"]);
    assert!(
        stderr(&output).starts_with("error: none.gguf"),
        "{}",
        stderr(&output)
    );
    let output = ferrum(&["run", "-q", "-v", "hi"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn colors_are_for_terminals_unless_they_are_asked_for() {
    let words = |flags: &[&str], no_color: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrum"))
            .args([flags, &["inspect", "none.gguf"]].concat())
            .env("NO_COLOR", no_color)
            .output()
            .unwrap();
        stderr(&output)
    };
    for no_color in ["", "1"] {
        assert!(!words(&[], no_color).contains('\u{1b}'));
        assert!(!words(&["--color", "never"], no_color).contains('\u{1b}'));
        let colored = words(&["--color=always"], no_color);
        assert!(
            colored.starts_with('\u{1b}') && colored.contains("error:"),
            "{colored:?}"
        );
    }
    let help = |color: &str| ok(&["--color", color, "run", "--help"]);
    assert!(help("always").contains('\u{1b}') && !help("auto").contains('\u{1b}'));
}

#[test]
fn a_wrong_number_gets_a_sentence() {
    for (flags, expected) in [
        (
            &["--seed", "-2"][..],
            "found \"-2\", expected a whole number from 0 to 2^64 - 1, or -1",
        ),
        (&["--seed", "x"], "found \"x\", expected a whole number"),
        (
            &["--top-k", "-1"],
            "found \"-1\", expected a whole number, 0 or more",
        ),
        (
            &["-n", "-1"],
            "found \"-1\", expected a whole number, 0 or more",
        ),
        (
            &["--threads", "-1"],
            "found \"-1\", expected a whole number from 1 to 1024",
        ),
        (
            &["--context", "-1"],
            "found \"-1\", expected a whole number from 1 to 16777216",
        ),
        (
            &["--device", "-1"],
            "found \"-1\", expected a whole number, 0 or more",
        ),
    ] {
        let output = ferrum(&[&["run"], flags, &["hi"]].concat());
        let words = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {words}");
        assert!(words.contains(expected), "{flags:?}: {words}");
    }
    // As other programs have it: another one each time.
    let run = || {
        ok(&[
            "run",
            "--seed",
            "-1",
            "--temperature",
            "2",
            "--min-p",
            "0",
            "Tell me a story.",
        ])
    };
    assert_ne!(run(), run());
}

#[test]
fn seeds_change_stories_and_not_sums() {
    let ask = |seed: &str, prompt: &str| ok(&["run", "--seed", seed, prompt]);
    let stories = ["1", "2"].map(|seed| ask(seed, "Tell me a story about a fox."));
    assert_ne!(stories[0], stories[1]);
    for seed in ["1", "2", "3"] {
        assert_eq!(ask(seed, "What is 7 plus 5?"), "7 plus 5 is 12.\n");
    }
}

#[test]
fn a_filter_that_matches_nothing_fails() {
    const OPS: [&str; 5] = ["verify", "ops", "--backend", "reference", "--filter"];
    for json in [&[][..], &["--json"]] {
        let sentence = fails(&[&OPS[..], &["no_such_op"], json].concat(), b"");
        assert!(
            sentence.contains(
                "error: no case has \"no_such_op\" in its op, dtype or name\nhint: the ops are "
            ) && sentence.contains("rms_norm"),
            "{sentence}"
        );
    }
    assert!(ok(&[&OPS[..], &["rms_norm"]].concat()).contains("rms_norm"));
}

/// The fastest level of the CPU may round activations where weights are bf16; that is no divergence.
#[test]
fn models_in_bf16_agree_with_the_reference_at_the_default_level() {
    for name in ["qwen3-tied", "mixtral", "gpt-oss-mxfp4"] {
        let fixture = root().join("fixtures/models").join(name);
        let model = fixture.to_str().unwrap();
        let report = json(&["verify", "model", model, "--backend", "cpu", "--json"]);
        assert_eq!(report["agrees"], true, "{name}: {report}");
    }
}

#[test]
fn a_model_is_held_against_another_computation_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("activations.safetensors");
    let fixture = root().join("fixtures/models/qwen35");
    let (model, saved) = (fixture.to_str().unwrap(), saved.to_str().unwrap());
    let cpu = ["verify", "model", model, "--backend", "cpu"];
    let report = json(
        &[
            &cpu[..],
            &["--tokens", "5,6,7,8", "--save", saved, "--json"],
        ]
        .concat(),
    );
    assert_eq!(report["agrees"], true, "{report}");
    assert_eq!(report["layers"].as_array().unwrap().len(), 5);
    assert_eq!(report["top1"], 1.0);
    // The same computation has the same bits.
    let folder = dir.path().to_str().unwrap();
    let report = json(
        &[
            &cpu[..],
            &["--against", folder, "--tolerance", "0", "--json"],
        ]
        .concat(),
    );
    assert_eq!(report["logits"]["max"], 0.0, "{report}");
    // What transformers computed, of which the fixture has the logits.
    let expected = fixture.join("expected.safetensors");
    let text = ok(&[&cpu[..], &["--against", expected.to_str().unwrap()]].concat());
    assert!(text.contains("best token the same at 100.0 %"), "{text}");
    let sentence = fails(&[&cpu[..], &["--tolerance", "0"]].concat(), b"");
    assert!(
        sentence.contains("is the first that differs from reference by more than 0"),
        "{sentence}"
    );
    let sentence = fails(&[&cpu[..], &["--against", "nowhere"]].concat(), b"");
    assert!(sentence.contains("nowhere"), "{sentence}");
}

#[test]
fn no_share_of_bandwidth_where_a_cache_holds_the_model() {
    let args = [
        "bench",
        "--backend",
        "cpu",
        "--prompt",
        "8",
        "--gen",
        "2",
        "--repeat",
        "1",
    ];
    let value = json(&[&args[..], &["--batch", "2", "--json"]].concat());
    let (cache, read) = (
        &value["last_level_cache_bytes"],
        &value["decode_bytes_per_token"],
    );
    let Some(cache) = cache
        .as_u64()
        .filter(|&cache| cache > 2 * read.as_u64().unwrap())
    else {
        skip("the demo model does not fit this processor's cache, or its size is not known");
        return;
    };
    assert!(
        value["decode_bandwidth_share"].is_null(),
        "{cache}: {value}"
    );
    assert!(
        value["batched"][0]["decode_bandwidth_share"].is_null(),
        "{value}"
    );
    let text = ok(&args);
    assert!(
        text.contains(": no share of memory bandwidth") && !text.contains("GB/s (read)"),
        "{text}"
    );
}

#[test]
fn inspect_has_no_names_of_rust() {
    for model in [
        demo(),
        fixture("llama3-tied"),
        fixture("llama-dynamic"),
        fixture("qwen3"),
    ] {
        let text = ok(&["inspect", &model]);
        let rope = text.lines().find(|line| line.starts_with("rope")).unwrap();
        let layers = text
            .lines()
            .find(|line| line.starts_with("layers"))
            .unwrap();
        for line in [rope, layers] {
            let (_, what) = line.split_once(' ').unwrap();
            assert!(!what.contains(['{', '}']), "{line}");
            let capital =
                |word: &str| word.starts_with(|c: char| c.is_uppercase()) && word != "MLP";
            assert!(
                !what.split(|c: char| !c.is_alphanumeric()).any(capital),
                "{line}"
            );
        }
        let value = json(&["inspect", &model, "--json"]);
        let rope = &value["spec"]["rope"];
        assert!(
            ["half-split", "interleaved"].contains(&rope["style"].as_str().unwrap()),
            "{rope}"
        );
    }
    assert!(ok(&["inspect"]).contains("scaling none\n"));
}

#[test]
fn shells_and_man_know_the_commands() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = ok(&["completions", shell]);
        for word in ["run", "serve", "perplexity", "completions", "temperature"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let man = dir.path().join("man1");
    assert_eq!(ok(&["man", man.to_str().unwrap()]), "");
    for page in ["ferrum.1", "ferrum-run.1", "ferrum-bench-serve.1"] {
        let text = std::fs::read_to_string(man.join(page)).unwrap();
        assert!(text.contains(".TH ferrum"), "{page}: {text}");
    }
    assert_eq!(
        ok(&["man"]),
        std::fs::read_to_string(man.join("ferrum.1")).unwrap()
    );
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    fails(&["man", file.to_str().unwrap()], b"");
}

#[test]
fn the_version_is_short_or_says_what_a_report_needs() {
    let short = ok(&["-V"]);
    assert_eq!(short, format!("ferrum {}\n", env!("CARGO_PKG_VERSION")));
    let long = ok(&["--version"]);
    assert!(long.starts_with(&short), "{long}");
    let value = |name: &str| {
        let line = long.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name}: {long}"))
            .trim()
            .to_owned()
    };
    let commit = value("commit");
    assert!(
        commit == "unknown" || commit.len() >= 12 && commit.chars().all(|c| c.is_ascii_hexdigit())
    );
    assert!(value("target").contains(std::env::consts::ARCH));
    assert!(value("backends").starts_with("cpu, ") && value("backends").ends_with("reference"));
    let devices = json(&["devices", "--json"]);
    let detail = devices
        .as_array()
        .unwrap()
        .iter()
        .find(|d| d["backend"] == "cpu")
        .unwrap();
    assert!(
        detail["detail"]
            .as_str()
            .unwrap()
            .contains(&value("CPU level")),
        "{long}{detail}"
    );
}

#[test]
fn every_help_is_complete() {
    for command in ["run", "serve", "bench", "pull", "quantize"] {
        let help = ok(&[command, "--help"]);
        assert!(
            help.contains(&format!("Examples:\n  ferrum {command}")),
            "{help}"
        );
    }
}
