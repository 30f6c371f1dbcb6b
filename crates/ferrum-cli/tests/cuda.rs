//! The command on the CUDA backend, under the stand-in driver of `tools/cuda-emulator`: models of all families compared with
//! the CPU, ranks with a device each, and a server whose clients misbehave.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;
mod serving;

use command::{fixture, mpirun, root, stderr, stdout};
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
            println!("skipped: {reason}");
            None
        }
    }
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
        let output = Command::new(env!("CARGO_BIN_EXE_ferrum"))
            .args(["verify", "model", &model])
            .args(flags)
            .env("LD_LIBRARY_PATH", &driver)
            .output()
            .unwrap();
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
        let output = Command::new(env!("CARGO_BIN_EXE_ferrum"))
            .args(flags)
            .args(["--backend", "cuda", "--activations", "f16"])
            .env("LD_LIBRARY_PATH", &driver)
            .output()
            .unwrap();
        let (out, err) = (stdout(&output), stderr(&output));
        assert!(output.status.success(), "{flags:?}: {out}{err}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_ferrum"))
        .args(["bench", &model, "--prompt", "4", "--gen", "2"])
        .args(["--layers", layers, "--activations", "f16"])
        .env("LD_LIBRARY_PATH", &driver)
        .output()
        .unwrap();
    let (out, err) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{layers}: {out}{err}");
}

#[test]
fn the_last_layers_are_on_the_gpu() {
    let Some(driver) = driver() else { return };
    for (layers, expected) in [("1", ",cuda:3\n"), ("auto", "cuda"), ("0", "cpu")] {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrum"))
            .args([
                "bench",
                "--gpu-layers",
                layers,
                "--backend",
                "cuda",
                "--verbose",
            ])
            .args(["--prompt", "4", "--gen", "2", "--repeat", "1", "--json"])
            .env("LD_LIBRARY_PATH", &driver)
            .output()
            .unwrap();
        let (out, err) = (stdout(&output), stderr(&output));
        assert!(output.status.success(), "{layers}: {out}{err}");
        assert!(
            format!("{out}{err}").contains(expected),
            "{layers}: {out}{err}"
        );
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
    let logits = |(output, _): &(Output, String)| -> Vec<f64> {
        let (out, err) = (stdout(output), stderr(output));
        assert!(output.status.success(), "{out}{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        let rows = report["logits"].as_array().unwrap().iter();
        let numbers = rows.flat_map(|row| row.as_array().unwrap());
        numbers.map(|x| x.as_f64().unwrap()).collect()
    };
    let (alone, both) = (run([1, 2]), run([2, 2]));
    assert!(!alone.1.contains(SUM) && both.1.contains(SUM), "{}", both.1);
    let (alone, found) = (logits(&alone), logits(&both));
    let spread = alone.iter().copied().fold(f64::MIN, f64::max)
        - alone.iter().copied().fold(f64::MAX, f64::min);
    let differences = alone.iter().zip(&found).map(|(a, b)| (a - b).abs());
    let difference = differences.fold(0.0, f64::max) / spread;
    println!("{difference:.1e} of the spread");
    // Activations have 8 bits of precision.
    assert!(difference < 0.02, "{difference}");

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
        assert_eq!(logits(&processes), found);
    }
}

const COMPLETIONS: &str = "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json";

fn prompt(client: usize) -> Vec<usize> {
    (0..20 + 7 * client)
        .map(|i| 3 + (i * (client + 2)) % 90)
        .collect()
}

/// The text that a client's prompt is answered with.
fn text(server: &Serving, client: usize) -> String {
    let body = json!({"prompt": prompt(client), "max_tokens": 10, "temperature": 0});
    let answer = server.ask(COMPLETIONS, &body.to_string());
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    let body: Value = serde_json::from_str(body).unwrap();
    body["choices"][0]["text"].as_str().unwrap().to_owned()
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

#[test]
fn a_server_answers_rightly_while_clients_misbehave() {
    const CLIENTS: usize = 4;
    let Some(driver) = driver() else { return };
    let mut command = serve(&[&fixture("llama3-tied"), "--port", "0", "--backend", "cuda"]);
    // The cache holds fewer tokens than all sequences together.
    command.args([
        "--batch-invariant",
        "--context",
        "128",
        "--kv-tokens",
        "160",
    ]);
    let server = Serving::of(command.env("LD_LIBRARY_PATH", driver));
    let expected: Vec<_> = (0..CLIENTS).map(|client| text(&server, client)).collect();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, expected) = (&server, &expected[client]);
            scope.spawn(move || {
                for round in 0..8 {
                    misbehave(server, client, client + round);
                    assert_eq!(text(server, client), *expected, "round {round}");
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
