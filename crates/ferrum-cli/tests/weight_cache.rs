//! Packed weights that are kept between starts, as a user meets them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_test_support::skip;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const VOCAB: usize = 8192;
const HIDDEN: usize = 2048;

/// A folder with a model that is just large enough to be kept: one layer and a table of 64 MiB.
fn model(dir: &TempDir) -> PathBuf {
    let (heads, head_dim, inner) = (4, 16, 32);
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "torch_dtype": "float32", "hidden_act": "silu",
    });
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let q = heads * head_dim;
    let tensors = [
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        (layer("input_layernorm"), vec![HIDDEN]),
        (layer("post_attention_layernorm"), vec![HIDDEN]),
        (layer("self_attn.q_proj"), vec![q, HIDDEN]),
        (layer("self_attn.k_proj"), vec![q, HIDDEN]),
        (layer("self_attn.v_proj"), vec![q, HIDDEN]),
        (layer("self_attn.o_proj"), vec![HIDDEN, q]),
        (layer("mlp.gate_proj"), vec![inner, HIDDEN]),
        (layer("mlp.up_proj"), vec![inner, HIDDEN]),
        (layer("mlp.down_proj"), vec![HIDDEN, inner]),
    ];
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors {
        let start = data.len();
        let numbers = 0..shape.iter().product::<usize>() as u32;
        let number = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.5;
        data.extend(numbers.flat_map(|i| number(i).to_le_bytes()));
        let place = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name, place);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    fs::write(model.join("model.safetensors"), file).unwrap();
    model
}

/// The model, its cache, and commands about both.
struct Setup {
    dir: TempDir,
    model: PathBuf,
}

impl Setup {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let model = model(&dir);
        Self { dir, model }
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("packed")
    }

    fn logits(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
        command.args(["logits", "--backend", "cpu", "--tokens", "1,2,3"]);
        command.args(["--json", "--verbose"]);
        command.arg("--model").arg(&self.model);
        command.arg("--weight-cache-dir").arg(self.cache());
        command.args(flags).stdin(Stdio::null());
        command
    }

    fn list(&self) -> Value {
        serde_json::from_slice(&self.cache_command(&["list", "--json"]).stdout).unwrap()
    }

    fn cache_command(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
        command.arg("cache").args(args);
        let output = command
            .arg("--weight-cache-dir")
            .arg(self.cache())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        output
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The output of a command that succeeds, and what it said.
fn run(mut command: Command) -> (Vec<u8>, String) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let said = stderr(&output);
    (output.stdout, said)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

const HIT: &str = "come from the cache";

/// Whether the disk has no room for what the test keeps, by what a start said.
fn skipped(said: &str) -> bool {
    let reason = said.lines().find(|line| line.contains("stay free"));
    if let Some(reason) = reason {
        skip(reason);
    }
    reason.is_some()
}

#[test]
fn the_second_start_uses_what_the_first_kept() {
    let setup = Setup::new();
    let (without, said) = run(setup.logits(&["--no-weight-cache"]));
    assert!(
        !said.contains("packed weights") && !setup.cache().exists(),
        "{said}"
    );
    let (first, said) = run(setup.logits(&[]));
    if skipped(&said) {
        return;
    }
    assert!(said.contains("are written to the cache"), "{said}");
    let (second, said) = run(setup.logits(&[]));
    assert!(said.contains(HIT), "{said}");
    assert!(first == without && second == without, "the same bits");
    let list = setup.list();
    let entry = &list["weights"][0];
    assert_eq!(entry["state"], "current", "{list}");
    assert!(entry["bytes"].as_u64().unwrap() > 64 << 20);
    let text = String::from_utf8(setup.cache_command(&["list"]).stdout).unwrap();
    assert!(
        text.contains("model.safetensors") && text.contains("now"),
        "{text}"
    );
    let (_, said) = run(setup.logits(&["--no-weight-cache"]));
    assert!(!said.contains(HIT), "{said}");

    let path = PathBuf::from(entry["path"].as_str().unwrap());
    let mut file = fs::read(&path).unwrap();
    file[12_345_678] ^= 4;
    fs::write(&path, file).unwrap();
    let (third, said) = run(setup.logits(&[]));
    assert!(
        said.contains("warning:") && said.contains("damaged"),
        "{said}"
    );
    assert!(third == without);
    assert!(run(setup.logits(&[])).1.contains(HIT));

    let cleared = setup.cache_command(&["clear", setup.model.to_str().unwrap()]);
    assert!(
        stderr(&cleared).contains("removed 1 file"),
        "{}",
        stderr(&cleared)
    );
    assert_eq!(setup.list()["weights"], json!([]));
    assert!(!run(setup.logits(&[])).1.contains(HIT));
    setup.cache_command(&["clear"]);
    assert_eq!(names(&setup.cache()), ["lock"]);
}

#[test]
fn starts_at_the_same_time_write_one_file() {
    let setup = Setup::new();
    let start = || {
        setup
            .logits(&[])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let started: Vec<_> = (0..3).map(|_| start().unwrap()).collect();
    let mut outputs = started
        .into_iter()
        .map(|child| child.wait_with_output().unwrap());
    let first = outputs.next().unwrap();
    assert!(first.status.success(), "{}", stderr(&first));
    if skipped(&stderr(&first)) {
        return;
    }
    for output in outputs {
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(output.stdout == first.stdout);
    }
    let names = names(&setup.cache());
    let of = |extension: &str| {
        names
            .iter()
            .filter(|name| name.ends_with(extension))
            .count()
    };
    assert_eq!((of(".weights"), of(".partial")), (1, 0), "{names:?}");
    assert!(run(setup.logits(&[])).1.contains(HIT));
}
