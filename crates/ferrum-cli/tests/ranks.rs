//! `--tensor-parallel`: ranks say what one process says, whether they are threads or processes that `mpirun` started, and a
//! rank that is gone ends them all.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;
#[cfg(feature = "mpi")]
mod job;

use command::{fails, ferrum, fixture, json, ok, stderr};
use ferrum_test_support::skip;
use serde_json::Value;

const TOKENS: &str = "5,9,2,77,31,8,60,12,3,44,71,20";

/// Arguments that print the logits of a fixture, or a greedy answer to a text, with so many ranks.
fn with_ranks(args: &[&str], ranks: usize) -> Vec<String> {
    let ranks = ranks.to_string();
    let more = ["--threads", "1", "--tensor-parallel", &ranks];
    let all = [args, &more].concat();
    all.iter().map(|&word| word.to_owned()).collect()
}

fn logits(model: &str, ranks: usize) -> Vec<String> {
    logits_on(("cpu", &[]), model, ranks)
}

/// Arguments that print logits on a backend, with options of the model.
fn logits_on((backend, options): (&str, &[&str]), model: &str, ranks: usize) -> Vec<String> {
    let args = ["logits", model, "--tokens", TOKENS, "--json"];
    with_ranks(
        &[&args[..], &["--backend", backend], options].concat(),
        ranks,
    )
}

fn greedy(model: &str, ranks: usize) -> Vec<String> {
    let args = ["run", model, "--raw", "--temperature", "0", "-n", "24"];
    let more = ["--quiet", "--backend", "cpu", "Once upon a time"];
    with_ranks(&[&args[..], &more].concat(), ranks)
}

/// Every file of every fixture of a decoder, by its path in the folder of fixtures: families in Hugging Face folders and as
/// GGUF, in all formats of weights.
fn all_models() -> Vec<String> {
    let root = fixture("");
    let names = |dir: &str| -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    let mut models = Vec::new();
    for dir in names(&root) {
        let files = names(&format!("{root}/{dir}"));
        let ggufs = files.iter().filter(|file| file.ends_with(".gguf"));
        models.extend(ggufs.map(|file| format!("{dir}/{file}")));
        if files
            .iter()
            .any(|file| file.ends_with(".safetensors") && !file.starts_with("expected"))
        {
            models.push(dir);
        }
    }
    models
}

fn rows(value: &Value) -> Vec<f64> {
    let rows = value["logits"].as_array().unwrap().iter();
    let numbers = rows.flat_map(|row| row.as_array().unwrap());
    numbers.map(|x| x.as_f64().unwrap()).collect()
}

/// The largest difference of two outputs, as a part of the spread of the second one.
fn difference(found: &Value, alone: &Value) -> f64 {
    let (found, alone) = (rows(found), rows(alone));
    assert_eq!(found.len(), alone.len());
    assert!(found.iter().all(|x| x.is_finite()));
    let spread = alone.iter().copied().fold(f64::MIN, f64::max)
        - alone.iter().copied().fold(f64::MAX, f64::min);
    let both = found.iter().zip(&alone);
    both.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / spread
}

/// The logits of ranks that are threads; what is said where the model cannot be cut for so many.
fn threads(args: &[String]) -> Result<Value, String> {
    let output = ferrum(&words(args));
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).unwrap()),
        false => Err(stderr(&output)),
    }
}

/// Whether an error says that a model cannot be cut for so many ranks, and for how many it can.
fn is_refusal(said: &str, ranks: usize) -> bool {
    let expected = format!("expected at least {ranks}");
    let hint = "hint: this model can be cut for 1 to ";
    let most = said.split_once(hint).and_then(|(_, rest)| {
        let (most, _) = rest.split_once(" ranks")?;
        most.parse::<usize>().ok()
    });
    said.contains(&expected) && most.is_some_and(|most| most < ranks)
}

fn words(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// Every family and every format of weights.
#[test]
fn threads_give_the_logits_of_one() {
    let mut failures = Vec::new();
    let (mut cut, mut refused) = (0, Vec::new());
    for name in all_models() {
        let model = fixture(&name);
        let alone = json(&words(&logits(&model, 1)));
        for ranks in [2, 4] {
            match threads(&logits(&model, ranks)) {
                Ok(found) => {
                    let difference = difference(&found, &alone);
                    if difference != 0.0 {
                        failures.push(format!("{name}, {ranks} ranks: {difference:.1e}"));
                    }
                    cut += 1;
                }
                Err(said) if is_refusal(&said, ranks) => refused.push((name.clone(), ranks)),
                Err(said) => failures.push(format!("{name}, {ranks} ranks: {said}")),
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(cut > 350, "{cut}");
    // Fixtures with three heads.
    assert!(refused.iter().all(|(_, ranks)| *ranks == 4), "{refused:?}");
    assert!(
        refused.contains(&("deepseek2".to_owned(), 4)),
        "{refused:?}"
    );
}

/// The reference backend does not cut its sums as ranks do.
#[test]
fn ranks_of_the_reference_backend_give_the_logits_of_one() {
    // Ill-conditioned: what the order of sums changes is largest here.
    let model = fixture("gemma4");
    let run = |ranks| json(&words(&logits_on(("reference", &[]), &model, ranks)));
    let alone = run(1);
    for ranks in [2, 4] {
        let difference = difference(&run(ranks), &alone);
        assert!(difference <= 1e-5, "{ranks} ranks: {difference}");
    }
}

#[test]
fn ranks_say_what_one_says() {
    let run = |ranks: &str| {
        let args = ["run", "--temperature", "0", "-n", "24", "--backend", "cpu"];
        let more = [
            "--tensor-parallel",
            ranks,
            "--threads",
            "1",
            "Tell me a story.",
        ];
        ok(&[&args[..], &more].concat())
    };
    assert_eq!(run("2"), run("1"));
    for name in [
        "llama3-tied",
        "qwen3-moe-quantized/model-q4_0.gguf",
        "deepseek2",
        "qwen35",
        "granite-hybrid",
    ] {
        let run = |ranks| ok(&words(&greedy(&fixture(name), ranks)));
        let alone = run(1);
        assert!(!alone.trim().is_empty(), "{name}");
        assert_eq!(run(2), alone, "{name}");
    }
    let bench = [
        "bench", "--prompt", "4", "--gen", "2", "--repeat", "1", "--json",
    ];
    let more = ["--batch", "2", "--backend", "cpu", "--tensor-parallel", "2"];
    let report = json(&[&bench[..], &more].concat());
    assert_eq!(report["layers"], "2 ranks of cpu");
}

#[test]
fn inspect_says_what_each_rank_holds() {
    let model = fixture("qwen3");
    let plan = |ranks: &str| json(&["inspect", &model, "--json", "--tensor-parallel", ranks]);
    let whole = plan("1")["memory_plan"]["weights_bytes"].as_f64().unwrap();
    let ranks = plan("2")["memory_plan"]["ranks"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(ranks.len(), 2);
    for rank in &ranks {
        let part = rank["weights_bytes"].as_f64().unwrap() / whole;
        assert!((0.45..0.55).contains(&part), "{part}");
    }
    let text = ok(&["inspect", &model, "--tensor-parallel", "2"]);
    assert!(text.contains("  rank 1       weights "), "{text}");
    assert!(!ok(&["inspect", &model]).contains("on each rank"));
}

#[test]
fn a_model_that_cannot_be_cut_is_refused_with_what_can() {
    let model = fixture("qwen3");
    for command in [
        &["logits", &model, "--tokens", "1"][..],
        &["inspect", &model],
        &["bench", &model, "--prompt", "2", "--gen", "1"],
    ] {
        let error = fails(&[command, &["--tensor-parallel", "64"]].concat(), b"");
        assert!(error.contains("expected at least 64"), "{error}");
        assert!(
            error.contains("hint: this model can be cut for 1 to "),
            "{error}"
        );
    }
    let refused = ferrum(&["run", "--tensor-parallel", "2", "--layers", "cpu:0", "hi"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("cannot be used with"));
}

/// Processes that a launcher started compute one model, or say what is missing.
#[test]
fn processes_that_were_started_together_are_ranks() {
    let run = |envs: &[(&str, &str)], args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferrum"));
        let output = command.args(args).envs(envs.iter().copied()).output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1));
        stderr(&output)
    };
    let started = [("OMPI_COMM_WORLD_SIZE", "2")];
    let text = run(&started, &["run", "hi"]);
    assert!(text.contains("found 2 processes"), "{text}");
    assert!(text.contains("--tensor-parallel 2"), "{text}");
    if cfg!(not(feature = "mpi")) {
        let text = run(&started, &["run", "--tensor-parallel", "2", "hi"]);
        assert!(text.contains("this build has no MPI"), "{text}");
        assert!(text.contains("--features mpi"), "{text}");
        skip("processes as ranks: this build has no MPI");
    }
}

#[cfg(feature = "mpi")]
mod processes {
    use super::{
        difference, fixture, greedy, is_refusal, json, logits, logits_on, ok, threads, words,
    };
    use crate::command::mpirun;
    use crate::job::{FERRUM, await_end, complete, complete_with, descendants, kill_a_rank, serve};
    use ferrum_test_support::skip;
    use serde_json::Value;
    use std::process::Command;
    use std::time::{Duration, Instant};

    /// Families and formats of weights: what threads compute of all files, processes compute of these.
    const MODELS: [(&str, &str); 24] = [
        ("qwen3", "dense, f32"),
        ("llama3-tied", "dense, bf16"),
        ("mistral", "dense, f16"),
        ("llama3-tied/model.gguf", "dense, GGUF"),
        ("olmo2", "norms over all heads"),
        ("llama-quantized/model-q8_0.gguf", "GGUF Q8_0"),
        ("llama-quantized/model-q4_0.gguf", "GGUF Q4_0"),
        ("llama-gptq4", "GPTQ"),
        ("llama-gptq4-order", "GPTQ in activation order"),
        ("llama-awq", "AWQ"),
        ("llama-packed4", "pack-quantized"),
        ("llama-fp8-block", "FP8 with a scale for each block"),
        ("llama-fp8-channel", "FP8 with a scale for each channel"),
        ("llama-fp8-tensor", "FP8 with a scale for each tensor"),
        ("gpt-oss-mxfp4", "mixture of experts, MXFP4"),
        ("qwen3-moe", "mixture of experts"),
        (
            "qwen3-moe-quantized/model-q4_0.gguf",
            "mixture of experts, GGUF Q4_0",
        ),
        ("deepseek2", "latent attention (MLA), experts, 3 heads"),
        (
            "deepseek2-quantized/model-q8_0.gguf",
            "latent attention, GGUF Q8_0",
        ),
        ("qwen35", "linear attention"),
        (
            "qwen35-quantized/model-q8_0.gguf",
            "linear attention, GGUF Q8_0",
        ),
        ("granite-hybrid", "Mamba-2"),
        (
            "granite-hybrid-quantized/model-q4_0.gguf",
            "Mamba-2, GGUF Q4_0",
        ),
        ("lfm2", "short convolutions"),
    ];

    /// What a command says as ranks in processes of their own; `None` where there is no `mpirun`.
    fn processes(args: &[String], ranks: usize) -> Option<Result<String, String>> {
        let output = mpirun(ranks)?.arg(FERRUM).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        Some(match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap()),
            false => Err(said),
        })
    }

    /// Processes give the bits of as many threads, which are those of one rank.
    #[test]
    fn processes_give_the_logits_of_one() {
        for (name, covers) in MODELS {
            let model = fixture(name);
            let alone = json(&words(&logits(&model, 1)));
            for ranks in [2, 4] {
                let args = logits(&model, ranks);
                let case = format!("{name} ({covers}), {ranks} ranks");
                let Some(output) = processes(&args, ranks) else {
                    return;
                };
                match (output, threads(&args)) {
                    (Ok(found), Ok(of_threads)) => {
                        // Rank 0 alone prints.
                        let found: Value = serde_json::from_str(&found).unwrap();
                        let difference = difference(&found, &alone);
                        assert_eq!(difference, 0.0, "{case}");
                        assert_eq!(found, of_threads, "{case}");
                    }
                    (Err(said), Err(_)) => {
                        assert!(is_refusal(&said, ranks), "{case}: {said}");
                        assert_eq!(said.matches("error: ").count(), 1, "{case}: {said}");
                        assert_eq!((name, ranks), ("deepseek2", 4), "{said}");
                    }
                    (found, of_threads) => panic!("{case}: {found:?}, {of_threads:?}"),
                }
            }
        }
    }

    #[test]
    fn processes_give_the_greedy_text_of_one() {
        for (name, most) in [
            ("qwen3", 4),
            ("llama-awq", 2),
            ("llama-quantized/model-q4_0.gguf", 4),
            ("qwen3-moe-quantized/model-q8_0.gguf", 2),
            ("deepseek2", 2),
            ("qwen35", 4),
            ("granite-hybrid", 2),
        ] {
            let model = fixture(name);
            let Some(found) = processes(&greedy(&model, most), most) else {
                return;
            };
            let alone = ok(&words(&greedy(&model, 1)));
            assert!(!alone.trim().is_empty(), "{name}");
            assert_eq!(found, Ok(alone), "{name}, {most} ranks");
        }
    }

    /// Every rank reads its part of an adapter.
    #[test]
    fn processes_apply_adapters() {
        for (adapter, base) in [
            ("llama-all", "llama3-tied"),
            ("llama-all", "llama3-tied/model.gguf"),
            ("lfm2-convolutions", "lfm2"),
            ("qwen35-hybrid", "qwen35"),
        ] {
            let (model, folder) = (fixture(base), fixture(&format!("../lora/{adapter}")));
            let run = |ranks| logits_on(("cpu", &["--lora", &folder]), &model, ranks);
            let alone = json(&words(&run(1)));
            let plain = json(&words(&logits(&model, 1)));
            let effect = difference(&alone, &plain);
            assert!(effect > 0.01, "{adapter} changes nothing: {effect}");
            for ranks in [2, 4] {
                let Some(output) = processes(&run(ranks), ranks) else {
                    return;
                };
                let found: Value = serde_json::from_str(&output.unwrap()).unwrap();
                let difference = difference(&found, &alone);
                assert_eq!(difference, 0.0, "{adapter} on {base}, {ranks} ranks");
            }
        }
    }

    #[test]
    fn what_goes_wrong_is_said_once() {
        let Some(mut command) = mpirun(2) else {
            return;
        };
        let args = [
            "run",
            "--tensor-parallel",
            "2",
            "--raw",
            "/nowhere/model.gguf",
            "hi",
        ];
        let output = command.arg(FERRUM).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && output.stdout.is_empty(),
            "{said}"
        );
        assert_eq!(said.matches("error: ").count(), 1, "{said}");
    }

    #[test]
    fn a_rank_that_is_killed_ends_the_job() {
        let Some(mut command) = mpirun(2) else {
            return;
        };
        // mpirun leaves the others to themselves.
        command.arg("--enable-recovery");
        let (said, sentence, red, _) = kill_a_rank(command, "cpu");
        assert!(said.contains(&sentence), "{said}");
        assert!(red, "health was not red: {said}");
        // It ends the others at once, mostly before they can say why, and says so itself.
        let Some(command) = mpirun(2) else {
            return;
        };
        let (said, sentence, _, failed) = kill_a_rank(command, "cpu");
        assert!(failed, "{said}");
        let mpirun = "exited on signal 9";
        assert!(said.contains(&sentence) || said.contains(mpirun), "{said}");
    }

    /// Ranks on CUDA devices wait for each other inside a collective of the device, which only the watch over the group ends.
    #[test]
    fn a_rank_on_a_cuda_device_that_is_killed_ends_the_job() {
        let driver = match ferrum_cuda_emulator::library_dir() {
            Ok(folder) => folder,
            Err(reason) => {
                skip(reason);
                return;
            }
        };
        let Some(mut command) = mpirun(2) else {
            return;
        };
        command.arg("--enable-recovery");
        command.env("LD_LIBRARY_PATH", driver);
        command.env("CUDA_EMULATOR_DEVICES", "2");
        let (said, sentence, red, _) = kill_a_rank(command, "cuda");
        assert!(said.contains(&sentence), "{said}");
        assert!(red, "health was not red: {said}");
    }

    /// Text and log probabilities of an answer are the same alone and among others, to the bit; the server ends in order.
    fn check_server(command: Command, model: Option<&str>) {
        let (mut job, address, rest) = serve(command, "cpu", model);
        let choice = |answer: String| {
            let (_, body) = answer.split_once("\r\n\r\n").unwrap();
            let body: Value = serde_json::from_str(body).unwrap();
            let choice = body["choices"][0].clone();
            assert!(
                choice["logprobs"]["token_logprobs"][3].is_number(),
                "{body}"
            );
            choice
        };
        let alone = choice(complete(&address));
        let longer = r#"{"prompt": [7, 1, 40, 41, 42, 3, 3, 99, 20, 21], "max_tokens": 24, "temperature": 0}"#;
        let all: Vec<_> = std::thread::scope(|scope| {
            let noise = || scope.spawn(|| complete_with(&address, longer));
            let noise: Vec<_> = (0..3).map(|_| noise()).collect();
            let ask = || scope.spawn(|| choice(complete(&address)));
            let asked: Vec<_> = (0..4).map(|_| ask()).collect();
            for thread in noise {
                let answer = thread.join().unwrap();
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            }
            asked
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(all.iter().all(|found| *found == alone), "{all:?} {alone}");
        let ranks = descendants(job.0.id());
        for pid in ranks {
            // The other rank takes no notice.
            let _ = Command::new("kill")
                .args(["-15", &pid.to_string()])
                .status();
        }
        let (_, _) = await_end(&mut job, &address);
        let said = rest.join().unwrap();
        assert!(job.0.wait().unwrap().success(), "{said}");
        assert!(!said.contains("error"), "{said}");
    }

    #[test]
    fn a_server_of_processes_is_batch_invariant_and_ends_when_it_is_asked_to() {
        let experts = fixture("qwen3-moe-quantized/model-q8_0.gguf");
        for model in [None, Some(experts.as_str())] {
            let Some(command) = mpirun(2) else {
                return;
            };
            check_server(command, model);
        }
    }

    /// Two network namespaces with a cable between them; gone when it is dropped.
    struct Hosts;

    impl Hosts {
        /// `None`, with a word why, where this process may not make them.
        fn connect() -> Option<Self> {
            // What an earlier run left goes first.
            drop(Self);
            let made = "ip netns add ferrum-a && ip netns add ferrum-b &&
                ip link add fe-a netns ferrum-a type veth peer name fe-b netns ferrum-b &&
                ip -n ferrum-a addr add 10.77.0.1/24 dev fe-a && ip -n ferrum-b addr add 10.77.0.2/24 dev fe-b &&
                ip -n ferrum-a link set lo up && ip -n ferrum-b link set lo up &&
                ip -n ferrum-a link set fe-a up && ip -n ferrum-b link set fe-b up &&
                unshare --uts true";
            let output = Command::new("sh").args(["-c", made]).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let hosts = Self;
            if output.status.success() {
                return Some(hosts);
            }
            skip(format_args!("there are no network namespaces: {said}"));
            None
        }
    }

    impl Drop for Hosts {
        fn drop(&mut self) {
            for name in ["ferrum-a", "ferrum-b"] {
                // What still runs there has lost its job.
                let ended = "ip netns pids $0 | xargs -r kill -9; ip netns del $0";
                let _ = Command::new("sh").args(["-c", ended, name]).output();
            }
        }
    }

    /// A server with a rank on each of two hosts, whose link then goes down.
    #[test]
    fn a_host_that_is_cut_off_ends_the_job() {
        if mpirun(2).is_none() {
            return;
        }
        let Some(_hosts) = Hosts::connect() else {
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        // What Open MPI starts its daemon on the other host with, in place of ssh: host, command.
        let agent = dir.path().join("agent");
        let script = "#!/bin/sh\nshift\n\
            exec ip netns exec ferrum-b unshare --uts sh -c 'hostname host-b; exec sh -c \"$0\"' \"$*\"\n";
        std::fs::write(&agent, script).unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&agent, executable).unwrap();
        let agent = agent.to_str().unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", "ferrum-a", "unshare", "--uts", "sh", "-c"]);
        command.args(["hostname host-a; exec \"$@\"", "sh"]);
        command.args(["mpirun", "--allow-run-as-root", "--enable-recovery"]);
        command.args([
            "--bind-to",
            "none",
            "-n",
            "2",
            "--host",
            "10.77.0.1,10.77.0.2",
        ]);
        for (name, value) in [
            ("plm_rsh_agent", agent),
            ("btl", "tcp,self"),
            ("btl_tcp_if_include", "10.77.0.0/24"),
            ("oob_tcp_if_include", "10.77.0.0/24"),
        ] {
            command.args(["--mca", name, value]);
        }
        let inside = |address: &str| {
            let ask = "exec 3<>/dev/tcp/$0/$1; printf '%b' \"$2\" >&3; cat <&3";
            let (host, port) = address.rsplit_once(':').unwrap();
            let body = r#"{"prompt": [5, 9, 2, 77], "max_tokens": 8, "temperature": 0}"#;
            let head = "POST /v1/completions HTTP/1.1\\r\\nContent-Type: application/json\\r\\nHost: x\\r\\n";
            let rest = format!(
                "Connection: close\\r\\nContent-Length: {}\\r\\n\\r\\n{body}",
                body.len()
            );
            let request = format!("{head}{rest}");
            let command = [
                "netns", "exec", "ferrum-a", "bash", "-c", ask, host, port, &request,
            ];
            let output = Command::new("ip").args(command).output().unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let (mut job, address, rest) = serve(command, "cpu", None);
        let answer = inside(&address);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let down = ["-n", "ferrum-b", "link", "set", "fe-b", "down"];
        assert!(Command::new("ip").args(down).status().unwrap().success());
        let start = Instant::now();
        // `mpirun` itself waits for the daemon of the other host; the ranks do not.
        let name = std::path::Path::new(FERRUM).canonicalize().unwrap();
        let is_rank =
            |pid: &u32| std::fs::read_link(format!("/proc/{pid}/exe")).ok() == Some(name.clone());
        while descendants(job.0.id()).iter().any(is_rank) {
            assert!(start.elapsed() < Duration::from_secs(60), "it did not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        println!("ended after {:.1?}", start.elapsed());
        let _ = job.0.kill();
        drop(_hosts);
        let said = rest.join().unwrap();
        assert!(said.contains("rank 1 of 2 ended the group: "), "{said}");
        assert!(said.contains("on host-b for 2.5 s"), "{said}");
    }
}
