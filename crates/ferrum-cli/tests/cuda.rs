//! The command on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`: models of all families compared with
//! the CPU, ranks with a device each, and a server whose clients misbehave.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;
mod serving;

use command::{fixture, mpirun, root, stderr, stdout};
use ferrum_test_support::skip;
use serde_json::{Value, json};
use serving::{Serving, serve};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// Where a process finds the driver; `None`, said aloud, where it cannot be built.
fn driver() -> Option<PathBuf> {
    match ferrum_cuda_emulator::library_dir() {
        Ok(folder) => Some(folder),
        Err(reason) => {
            skip(reason);
            None
        }
    }
}

/// The command, which finds this driver.
fn cuda(driver: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
    command.args(args).env("LD_LIBRARY_PATH", driver);
    command
}

/// A model of each family: the first of its fixtures.
fn families() -> BTreeMap<String, String> {
    let mut families = BTreeMap::new();
    let entries = std::fs::read_dir(root().join("fixtures/models")).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in names {
        let config = std::fs::read(
            root()
                .join("fixtures/models")
                .join(&name)
                .join("config.json"),
        );
        let config: Value = serde_json::from_slice(&config.unwrap()).unwrap();
        let family = config["model_type"].as_str().unwrap().to_owned();
        families.entry(family).or_insert(name);
    }
    families
}

#[test]
fn each_family_agrees_with_the_cpu() {
    let Some(driver) = driver() else { return };
    let families = families();
    assert!(families.len() > 25, "{families:?}");
    for (family, name) in families {
        let model = fixture(&name);
        let flags = ["--backend", "cuda", "--reference", "cpu", "--json"];
        let mut command = cuda(&driver, &["verify", "model", &model]);
        let output = command.args(flags).output().unwrap();
        let (out, err) = (stdout(&output), stderr(&output));
        assert!(output.status.success(), "{family}: {out}{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        println!("{family}: KL {}", report["kl"]);
        assert!(report["kl"].as_f64().unwrap() < 0.1, "{family}: {report}");
    }
}

/// Activations of f16: a model in f16, alone and with its first layers on the CPU, and ops.
#[test]
fn activations_may_be_f16() {
    let Some(driver) = driver() else { return };
    let (model, layers) = (fixture("mistral"), "cpu:0,cuda:1-2");
    for flags in [
        &["verify", "model", &model, "--reference", "cpu"][..],
        &["verify", "ops", "--filter", "rms_norm"],
        &["bench", &model, "--prompt", "4", "--gen", "2"],
    ] {
        let mut command = cuda(&driver, flags);
        command.args(["--backend", "cuda", "--activations", "f16"]);
        let output = command.output().unwrap();
        let (out, err) = (stdout(&output), stderr(&output));
        assert!(output.status.success(), "{flags:?}: {out}{err}");
    }
    let mut command = cuda(&driver, &["bench", &model, "--prompt", "4", "--gen", "2"]);
    command.args(["--layers", layers, "--activations", "f16"]);
    let output = command.output().unwrap();
    let (out, err) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{layers}: {out}{err}");
}

#[test]
fn the_last_layers_are_on_the_gpu() {
    let Some(driver) = driver() else { return };
    for (layers, expected) in [("1", ",cuda:3\n"), ("auto", "cuda"), ("0", "cpu")] {
        let flags = ["--gpu-layers", layers, "--backend", "cuda", "--verbose"];
        let mut command = cuda(&driver, &["bench"]);
        command.args(flags).args(["--prompt", "4", "--gen", "2"]);
        let output = command.args(["--repeat", "1", "--json"]).output().unwrap();
        let (out, err) = (stdout(&output), stderr(&output));
        assert!(output.status.success(), "{layers}: {out}{err}");
        assert!(
            format!("{out}{err}").contains(expected),
            "{layers}: {out}{err}"
        );
    }
}

/// The numbers that `ferrum logits --json` wrote.
fn logits(output: &Output) -> Vec<f64> {
    let (out, err) = (stdout(output), stderr(output));
    assert!(output.status.success(), "{out}{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let rows = report["logits"].as_array().unwrap().iter();
    let numbers = rows.flat_map(|row| row.as_array().unwrap());
    numbers.map(|x| x.as_f64().unwrap()).collect()
}

/// The largest difference between logits, as a part of the range that they have.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().copied().fold(f64::MIN, f64::max);
    let least = expected.iter().copied().fold(f64::MAX, f64::min);
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, f64::max) / (most - least)
}

/// Activations have 8 bits of precision.
const MOST_DIFFERENCE: f64 = 0.02;

/// Logits with a model's last layers on the GPU are those of the CPU.
#[test]
fn the_last_layers_on_the_gpu_compute_what_the_cpu_does() {
    let Some(driver) = driver() else { return };
    for name in ["llama3-tied", "llama-quantized/model-q4_0.gguf"] {
        let model = fixture(name);
        let run = |layers: &str| {
            let flags = ["--gpu-layers", layers, "--backend", "cuda"];
            let args = ["logits", &model, "--json", "--tokens", "5,9,2,77,31,8"];
            logits(
                &cuda(&driver, &[&args[..], &flags].concat())
                    .output()
                    .unwrap(),
            )
        };
        let [on_cpu, some, all] = ["0", "1", "auto"].map(run);
        assert!(some != on_cpu && some != all && all != on_cpu, "{name}");
        for found in [&some, &all] {
            let difference = difference(found, &on_cpu);
            println!("{name}: {difference:.1e} of the range");
            assert!(difference < MOST_DIFFERENCE, "{name}: {difference}");
        }
    }
}

/// Logits of a model on ranks that `command` starts, where there are so many devices: the output, and the kernels that ran.
fn rank_logits(
    driver: &Path,
    mut command: Command,
    [ranks, devices]: [usize; 2],
) -> (Output, String) {
    let folder = tempfile::tempdir().unwrap();
    let counters = folder.path().join("counters");
    let output = command
        .args([
            "logits",
            &fixture("llama3-tied"),
            "--json",
            "--tokens",
            "5,9,2,77,31,8",
        ])
        .args(["--backend", "cuda", "--batch-invariant"])
        .args(["--tensor-parallel", &ranks.to_string()])
        .env("LD_LIBRARY_PATH", driver)
        .env("CUDA_EMULATOR_DEVICES", devices.to_string())
        .env("CUDA_EMULATOR_COUNTERS", &counters)
        .output()
        .unwrap();
    let kernels = std::fs::read_to_string(counters).unwrap_or_default();
    (output, kernels)
}

/// The kernel that sums what NCCL has gathered.
const SUM: &str = "rank_sum_bf16";

#[test]
fn ranks_have_a_device_each_and_exchange_by_nccl() {
    let Some(driver) = driver() else { return };
    let run = |sizes| {
        let command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
        rank_logits(&driver, command, sizes)
    };
    let (alone, both) = (run([1, 2]), run([2, 2]));
    assert!(!alone.1.contains(SUM) && both.1.contains(SUM), "{}", both.1);
    let (alone, found) = (logits(&alone.0), logits(&both.0));
    let difference = difference(&found, &alone);
    println!("{difference:.1e} of the range");
    assert!(difference < MOST_DIFFERENCE, "{difference}");

    let (refused, _) = run([2, 1]);
    assert_eq!(refused.status.code(), Some(1));
    let text = stderr(&refused);
    let expected = "found 1 device, expected 2, one for each rank";
    assert!(text.contains(expected), "{text}");

    if cfg!(feature = "mpi")
        && let Some(mut command) = mpirun(2)
    {
        command.arg(env!("CARGO_BIN_EXE_ferrum"));
        let processes = rank_logits(&driver, command, [2, 2]);
        assert!(processes.1.contains(SUM), "{}", processes.1);
        assert_eq!(logits(&processes.0), found);
    }
}

const COMPLETIONS: &str = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";

fn prompt(client: usize) -> Vec<usize> {
    (0..20 + 7 * client)
        .map(|i| 3 + (i * (client + 2)) % 90)
        .collect()
}

/// What a client's prompt is answered with: the text, how it ended, and log-probabilities where it asks for them. Some ask for a
/// text of a grammar, one for penalties.
fn answer(server: &Serving, client: usize) -> Value {
    let mut body = json!({"prompt": prompt(client), "max_tokens": 10, "temperature": 0});
    let more = match client % 4 {
        0 => json!({}),
        1 => json!({"structured_outputs": {"regex": "[a-d]{3,5}-[0-9]{2}"}}),
        2 => json!({"logprobs": 2, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        _ => {
            let schema = json!({
                "type": "object", "required": ["a"], "additionalProperties": false,
                "properties": {"a": {"enum": ["x", "yz"]}},
            });
            let named = json!({"name": "one", "schema": schema, "strict": true});
            json!({
                "response_format": {"type": "json_schema", "json_schema": named},
                "max_tokens": 24, "logprobs": 1,
                // White space, of which JSON may have much.
                "logit_bias": {"9": -100, "10": -100, "13": -100, "32": -100},
            })
        }
    };
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    let answer = server.ask(COMPLETIONS, &body.to_string());
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    let body: Value = serde_json::from_str(body).unwrap();
    body["choices"][0].clone()
}

/// Holds answers against what was asked for.
fn check_answers(answers: &[Value]) {
    let text = |client: usize| answers[client]["text"].as_str().unwrap();
    let (letters, digits) = text(1).split_once('-').unwrap();
    assert!(
        (3..=5).contains(&letters.len()) && digits.len() == 2,
        "{}",
        text(1)
    );
    assert!(
        letters.bytes().all(|byte| (b'a'..=b'd').contains(&byte)),
        "{letters}"
    );
    assert!(digits.parse::<u8>().is_ok(), "{digits}");
    let value: Value = serde_json::from_str(text(3)).unwrap();
    assert!(value["a"] == "x" || value["a"] == "yz", "{value}");
    for client in [1, 3] {
        assert_eq!(
            answers[client]["finish_reason"], "stop",
            "{}",
            answers[client]
        );
    }
    for client in [2, 3] {
        let logprobs = answers[client]["logprobs"]["token_logprobs"].as_array();
        assert!(logprobs.unwrap().len() > 5, "{}", answers[client]);
    }
}

/// Clients that ask for nonsense, go away in the middle of an answer, or take all that there is.
fn misbehave(server: &Serving, client: usize, round: usize) {
    let status = |body: String| {
        let answer = server.ask(COMPLETIONS, &body);
        answer.split(' ').nth(1).unwrap().to_owned()
    };
    match round % 4 {
        0 => assert_eq!(status("{\"prompt\": [1, 2".into()), "400"),
        1 => {
            let body = json!({"prompt": prompt(client), "max_tokens": 60, "stream": true});
            drop(server.send(COMPLETIONS, &body.to_string()));
        }
        2 => {
            let long: Vec<_> = (0..9999).map(|i| i % 90).collect();
            assert_eq!(status(json!({"prompt": long}).to_string()), "400");
        }
        _ => {
            let sampled = json!({
                "prompt": prompt(client), "max_tokens": 8, "n": 3, "seed": client, "logprobs": 2,
                "top_p": 0.9, "frequency_penalty": 0.5,
            });
            assert_eq!(status(sampled.to_string()), "200");
        }
    }
}

/// A server of a model whose answers are always the same, whatever other clients do in so many rounds. No metric says how much
/// memory of a device is free: that requests give it back is tested in the engine (`device_memory_is_given_back`).
fn check_server(name: &str, rounds: usize) {
    const CLIENTS: usize = 4;
    let Some(driver) = driver() else { return };
    let mut command = serve(&[&fixture(name), "--port", "0", "--backend", "cuda"]);
    // The cache holds fewer tokens than all sequences together.
    command.args([
        "--batch-invariant",
        "--context",
        "128",
        "--kv-tokens",
        "160",
    ]);
    let server = Serving::of(command.env("LD_LIBRARY_PATH", driver));
    let expected: Vec<_> = (0..CLIENTS).map(|client| answer(&server, client)).collect();
    check_answers(&expected);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, expected) = (&server, &expected[client]);
            scope.spawn(move || {
                for round in 0..rounds {
                    misbehave(server, client, client + round);
                    assert_eq!(answer(server, client), *expected, "round {round}");
                }
            });
        }
    });
    // Those that went away are gone, and what they held is free.
    for name in ["vllm:num_requests_running{", "vllm:num_requests_waiting{"] {
        let ended = (0..600).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            server.metric(name) == 0.0
        });
        assert!(ended, "{name}");
    }
    let health = server.ask("GET /health HTTP/1.1", "");
    assert!(health.starts_with("HTTP/1.1 200 "), "{health}");
    let said = server.end();
    assert!(!said.contains("cuda-emulator"), "{said}");
}

#[test]
fn a_server_answers_rightly_while_clients_misbehave() {
    check_server("llama3-tied", 8);
}

#[test]
fn so_does_one_of_a_quantised_model() {
    check_server("llama-gptq4", 4);
}

#[test]
fn so_does_one_of_quantised_experts() {
    check_server("qwen3-moe-quantized/model-q4_0.gguf", 4);
}

/// llama3-tied with a context of 8192 tokens, so that memory is what bounds its cache.
fn with_long_context() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = PathBuf::from(fixture("llama3-tied"));
    for name in [
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(source.join(name), folder.path().join(name)).unwrap();
    }
    let config = std::fs::read(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["max_position_embeddings"] = 8192.into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// Bytes of a device of these tests.
const MEMORY: f64 = (64 << 20) as f64;

/// Bytes of a token in a cache of f16: keys and values of two heads of 24 numbers in each of 5 layers.
const TOKEN: f64 = (2 * 2 * 24 * 5 * 2) as f64;

/// The command for such a device, which may take a part of its memory.
fn small(driver: &Path, args: &[&str], part: &str) -> Command {
    let mut command = cuda(driver, args);
    // Without equal bits, the workspace of the library that multiplies matrices would be more than all else.
    command.args(["--backend", "cuda", "--batch-invariant"]);
    command.args(["--gpu-memory-utilization", part]);
    command.env("CUDA_EMULATOR_MEMORY", MEMORY.to_string());
    command
}

/// Holds the tokens that two parts of the memory have room for against each other: what else a run takes is the same.
fn check_tokens(parts: [&str; 2], token: f64, tokens: impl Fn(&str) -> f64) {
    let [few, many] = parts.map(tokens);
    println!("{few} and {many} tokens");
    let [less, more] = parts.map(|part| part.parse::<f64>().unwrap() * MEMORY);
    // Whole blocks, and bytes that are parts of a token.
    let expected = (more - less) / token;
    assert!((many - few - expected).abs() < 64.0, "{expected}");
    // The rest is for weights and activations.
    assert!((1e5..less).contains(&(less - few * token)), "{few}");
}

#[test]
fn a_server_takes_the_part_of_the_memory_that_it_may() {
    let Some(driver) = driver() else { return };
    let folder = with_long_context();
    let model = folder.path().display().to_string();
    let tokens = |part: &str| {
        let mut command = small(&driver, &["serve", &model, "--port", "0"], part);
        let server = Serving::of(&mut command);
        // There is room for a step, too.
        answer(&server, 0);
        let page = server.ask("GET /metrics HTTP/1.1", "");
        let of_label = |label: &str| -> f64 {
            let (_, rest) = page.split_once(&format!("{label}=\"")).unwrap();
            rest.split('"').next().unwrap().parse().unwrap()
        };
        let tokens = of_label("num_gpu_blocks") * of_label("block_size");
        let said = format!("KV cache {tokens} tokens");
        assert!(server.said.contains(&said), "{said}: {}", server.said);
        tokens
    };
    check_tokens(["0.5", "0.9"], TOKEN, tokens);
}

/// The same of the context that `ferrum run` takes by itself.
#[test]
fn a_run_shortens_its_context_to_what_memory_holds() {
    let Some(driver) = driver() else { return };
    let folder = with_long_context();
    let model = folder.path().display().to_string();
    let text = "x".repeat(8192);
    let context = |part: &str| -> f64 {
        let args = [
            "run",
            "--raw",
            "--model",
            &model,
            &text,
            "--kv-dtype",
            "f32",
        ];
        let output = small(&driver, &args, part).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let (_, rest) = said
            .split_once("tokens requested, the context holds ")
            .unwrap();
        rest.lines().next().unwrap().parse().unwrap()
    };
    check_tokens(["0.2", "0.25"], 2.0 * TOKEN, context);
}

/// An error of a model that does not fit says what it was to take, what was free and what to do.
#[test]
fn a_model_that_does_not_fit_says_its_figures() {
    let Some(driver) = driver() else { return };
    let model = fixture("llama3-tied");
    for args in [
        &["serve", &model, "--port", "0", "--kv-tokens", "200000"][..],
        &["run", "--model", &model, "x", "--context", "200000"],
    ] {
        let output = small(&driver, args, "0.9").output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        for expected in [
            "error: cuda is out of memory: ",
            "; the model takes 0.",
            " MiB for a KV cache of 200000 tokens and ",
            " MiB for activations, and before it ",
            " MiB of 64.00 MiB were free",
            "hint: lower --context or --kv-tokens",
        ] {
            assert!(said.contains(expected), "{expected:?} in {said}");
        }
    }
}

/// `tools/device/report.py` with three of its commands: what agrees, what diverges, and what cannot run.
#[test]
fn reports_say_what_agrees_and_what_diverges() {
    let Some(driver) = driver() else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = root().join("tools/device/report.py");
    let bench = format!("bench {} nowhere -- --prompt 4 --gen 2", fixture("qwen3"));
    let cases = [
        (
            "parity --filter qwen3-tied",
            true,
            ["| qwen3 | qwen3-tied | ", "1 of 1 families agree"],
        ),
        (
            // Activations of f16 differ by less than this, those of bf16 by more.
            "parity --filter qwen3-tied -- --tolerance 0.004",
            false,
            ["| diverges at layer 0: more than 0.004 |", "| agrees |"],
        ),
        (
            "conformance --filter softcap",
            true,
            ["## Activations of f16", "passed, 0 failed, 0 skipped"],
        ),
        (
            &bench,
            false,
            ["decode 2 ", "nowhere: there is no such file or folder"],
        ),
    ];
    for (words, succeeds, expected) in cases {
        let output = Command::new("python3")
            .arg(&script)
            .args(["--ferrum", env!("CARGO_BIN_EXE_ferrum"), "--out"])
            .arg(folder.path())
            .args(words.split(' '))
            .env("LD_LIBRARY_PATH", &driver)
            .output();
        let output = match output {
            Ok(output) => output,
            Err(error) => return skip(format_args!("python3: {error}")),
        };
        let (path, err) = (stdout(&output), stderr(&output));
        assert_eq!(output.status.success(), succeeds, "{words}: {path}{err}");
        let text = std::fs::read_to_string(path.trim()).unwrap();
        for part in expected {
            assert!(text.contains(part), "{words}: no {part:?} in {text}");
        }
    }
}
