//! `ferrum quantize` from end to end: what it writes, what it keeps, and what it refuses.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_formats::gguf::{Gguf, Value as GgufValue, Writer};
use ferrum_formats::{TensorDtype, TensorSource};
use ferrum_types::{Dtype, GgufQuantType};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fixture(name: &str) -> PathBuf {
    root().join("fixtures/models").join(name)
}

fn demo() -> PathBuf {
    root().join("assets/demo/ferrum-demo.gguf")
}

fn ferrum(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrum"))
        .args(args)
        .output()
        .unwrap()
}

fn ok(args: &[&str]) -> Output {
    let output = ferrum(args);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {words}");
    output
}

fn fails(args: &[&str]) -> String {
    let output = ferrum(args);
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {words}");
    assert!(
        words.contains("error: ") && !words.contains("panicked"),
        "{words}"
    );
    words
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Quantises into the folder and gives the path of the file.
fn quantize(dir: &TempDir, source: &Path, ty: &str, more: &[&str]) -> PathBuf {
    let stem = source.file_name().unwrap().to_str().unwrap();
    let out = dir.path().join(format!("{stem}-{ty}-{}.gguf", more.len()));
    ok(&[
        &[
            "quantize",
            text(source),
            text(&out),
            "--type",
            ty,
            "--force",
        ],
        more,
    ]
    .concat());
    out
}

/// The demo model in f32.
fn demo_f32(dir: &TempDir) -> PathBuf {
    quantize(dir, &demo(), "f32", &["--requantize"])
}

/// A level of every machine that rounds nothing.
const EXACT: &str = match () {
    () if cfg!(target_arch = "x86_64") => "sse2",
    () if cfg!(target_arch = "aarch64") => "neon",
    () => "scalar",
};

fn logits(model: &Path, tokens: &str) -> Vec<Vec<f64>> {
    let args = [
        "logits",
        "--backend",
        "cpu",
        "--isa",
        EXACT,
        "--model",
        text(model),
        "--tokens",
        tokens,
        "--json",
    ];
    let found: Value = serde_json::from_slice(&ok(&args).stdout).unwrap();
    let rows = found["logits"].as_array().unwrap().iter();
    rows.map(|row| {
        row.as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap())
            .collect()
    })
    .collect()
}

/// Mean over positions of the divergence of `other` from `one`, in nats.
fn divergence(one: &[Vec<f64>], other: &[Vec<f64>]) -> f64 {
    let log_softmax = |row: &[f64]| -> Vec<f64> {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
        row.iter().map(|x| x - top - sum.ln()).collect()
    };
    let rows = one.iter().zip(other).map(|(one, other)| {
        let (p, q) = (log_softmax(one), log_softmax(other));
        p.iter()
            .zip(&q)
            .map(|(p, q)| p.exp() * (p - q))
            .sum::<f64>()
    });
    rows.sum::<f64>() / one.len() as f64
}

/// Metadata that says how or when a file was made, or that converters of different age write
/// differently.
const MAY_DIFFER: &[&str] = &[
    "general.name",
    "general.quantization_version",
    "general.file_type",
];

/// The same checkpoint once from the fixture maker, which follows llama.cpp's converter, and once from
/// us: every tensor to the byte, every key that both have, and none missing here.
#[test]
fn folders_become_the_files_that_the_converter_makes() {
    let dir = TempDir::new().unwrap();
    let mut seen = 0;
    for entry in std::fs::read_dir(root().join("fixtures/models")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.join("model.gguf").exists() {
            continue;
        }
        let expected = Gguf::open(folder.join("model.gguf")).unwrap();
        let is_quantised = folder.join("config.json");
        let is_quantised = std::fs::read_to_string(is_quantised).unwrap();
        if expected.get("blk.0.attn_kv_b.weight").is_some()
            || is_quantised.contains("quantization_config")
        {
            // Latent attention in its older form, which is not written, and a folder that is no floats.
            continue;
        }
        seen += 1;
        let dtype = expected
            .infos()
            .find(|t| t.shape.len() == 2)
            .unwrap()
            .dtype
            .name();
        let name = folder.display();
        let found = Gguf::open(quantize(&dir, &folder, dtype, &[])).unwrap();
        let names = |gguf: &Gguf| {
            let mut names: Vec<_> = gguf.infos().map(|t| t.name.clone()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&found), names(&expected), "{name}");
        for info in expected.infos() {
            let (ours, theirs) = (
                found.get(&info.name).unwrap(),
                expected.get(&info.name).unwrap(),
            );
            let what = format!("{name}: {}", info.name);
            assert_eq!(
                (ours.shape, ours.dtype),
                (theirs.shape, theirs.dtype),
                "{what}"
            );
            // What is computed of them, each in its own way.
            if info.name == "rope_freqs.weight" || info.name.ends_with(".ssm_a") {
                let floats = |bytes: &[u8]| -> Vec<f32> {
                    bytes
                        .as_chunks::<4>()
                        .0
                        .iter()
                        .map(|b| f32::from_le_bytes(*b))
                        .collect()
                };
                for (a, b) in floats(ours.bytes).iter().zip(floats(theirs.bytes)) {
                    assert!((a - b).abs() <= 2e-6 * b.abs(), "{what}: {a} and {b}");
                }
            } else {
                assert!(ours.bytes == theirs.bytes, "{what}: other bytes");
            }
        }
        for (key, theirs) in expected.metadata() {
            if MAY_DIFFER.contains(&key) {
                continue;
            }
            let ours = found
                .value(key)
                .unwrap_or_else(|| panic!("{name}: no {key}"));
            let same = match (ours, theirs) {
                (GgufValue::Array(a), GgufValue::Array(b)) => a.iter().eq(b.iter()),
                (GgufValue::F32(a), GgufValue::F32(b)) => (a - b).abs() <= 1e-6 * b.abs(),
                (a, b) => a == b,
            };
            assert!(same, "{name}: {key} is {ours}, expected {theirs}");
        }
    }
    assert!(seen >= 12, "{seen} fixtures");
}

/// That it computes the same, too, is a test of ferrum-models (`converted.rs`), of every fixture.
#[test]
fn a_converted_folder_reads_text_as_the_folder_does() {
    let dir = TempDir::new().unwrap();
    for name in [
        "llama3-tied",
        "mistral-window",
        "mixtral",
        "qwen2-tied",
        "qwen3-yarn",
        "qwen3-moe",
        "qwen2-moe",
        "glm4-moe",
        "granite-moe",
        "deepseek2",
        "deepseek3",
        "gpt-oss",
        "gemma2-scale",
        "gemma4-shared",
        "llama4-experts",
        "command-r-plus",
        "gpt2",
        "lfm2-adjusted",
        "phi2-norms",
        "qwen35",
        "qwen35-moe",
        "qwen3-next-gguf",
        "granite-hybrid",
        "granite-hybrid-moe",
    ] {
        let folder = fixture(name);
        let file = quantize(&dir, &folder, "f32", &[]);
        for words in ["Hello, World's end!", "12345 \n\n x"] {
            let tokens = |model: &Path| ok(&["tokenize", "-m", text(model), words]).stdout;
            assert_eq!(tokens(&folder), tokens(&file), "{name}: {words}");
        }
    }
}

/// Divergence from f32 on the demo model, and what each type must stay below.
const BOUNDS: &[(&str, f64)] = &[
    ("f16", 1e-6),
    ("bf16", 1e-4),
    ("q8_0", 1e-4),
    ("q6_k", 4e-3),
    ("q5_k_m", 5e-3),
    ("q5_k_s", 5e-3),
    ("q5_1", 1e-2),
    ("q5_0", 1e-2),
    ("q4_k_m", 2e-2),
    ("q4_k_s", 2e-2),
    ("q4_1", 4e-2),
    ("q4_0", 4e-2),
    ("iq4_nl", 3e-2),
    ("iq4_xs", 3e-2),
    ("mxfp4", 8e-2),
    ("mxfp4_moe", 1e-4),
    ("q3_k_l", 0.1),
    ("q3_k_m", 0.1),
    ("q3_k_s", 0.2),
    ("q2_k", 0.3),
];

#[test]
fn every_type_stays_near_f32() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    // Conversations that the model knows how to lead, one after the other.
    let samples = std::fs::read(root().join("assets/demo/samples.json")).unwrap();
    let samples: Value = serde_json::from_slice(&samples).unwrap();
    let cases = samples["cases"].as_array().unwrap().iter();
    let ids = cases.flat_map(|case| {
        let of = |key: &str| case[key].as_array().unwrap().clone();
        [of("prompt_tokens"), of("greedy_tokens")].concat()
    });
    let ids: Vec<_> = ids.map(|id| id.to_string()).take(250).collect();
    let tokens = &*ids.join(",");
    let exact = logits(&source, tokens);
    let mut found = Vec::new();
    for &(ty, bound) in BOUNDS {
        let file = quantize(&dir, &source, ty, &[]);
        let miss = divergence(&exact, &logits(&file, tokens));
        let mark = if miss < bound { "" } else { " (too much)" };
        found.push(format!("{ty}: {miss:.2e} of {bound:.0e}{mark}"));
    }
    let wrong = found.iter().any(|line| line.ends_with("(too much)"));
    assert!(!wrong, "{found:#?}");
}

#[test]
fn the_file_does_not_depend_on_threads_or_on_the_kind_of_source() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let of = |threads: &str| {
        let out = quantize(&dir, &source, "q4_k_m", &["--threads", threads]);
        std::fs::read(out).unwrap()
    };
    assert!(of("1") == of("7"));
    // From a folder directly, and by way of a float file.
    let folder = fixture("llama-quantized");
    let direct = quantize(&dir, &folder, "q8_0", &[]);
    let float = quantize(&dir, &folder, "f32", &[]);
    let (direct, around) = (
        Gguf::open(direct).unwrap(),
        Gguf::open(quantize(&dir, &float, "q8_0", &[])).unwrap(),
    );
    for info in direct.infos() {
        let other = around.get(&info.name).unwrap();
        assert!(
            direct.get(&info.name).unwrap().bytes == other.bytes,
            "{}",
            info.name
        );
    }
}

/// Both searches give the same file whatever the threads; they are not the same, and the default is the fast one.
#[test]
fn searches_are_chosen_by_name() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let of = |more: &[&str]| std::fs::read(quantize(&dir, &source, "q4_k_m", more)).unwrap();
    let (fast, thorough) = (of(&["--search", "fast"]), of(&["--search", "thorough"]));
    assert!(fast == of(&[]));
    assert!(fast != thorough);
    assert!(thorough == of(&["--search", "thorough", "--threads", "3"]));
    let words = ferrum(&["quantize", "a", "b", "-t", "q4_0", "--search", "slow"]).stderr;
    let words = String::from_utf8(words).unwrap();
    assert!(words.contains("expected fast or thorough"), "{words}");
}

#[test]
fn metadata_of_a_file_is_kept() {
    let dir = TempDir::new().unwrap();
    let (before, after) = (
        Gguf::open(demo()).unwrap(),
        Gguf::open(demo_f32(&dir)).unwrap(),
    );
    for (key, value) in before.metadata() {
        match key {
            "general.file_type" => assert_eq!(after.u32(key).unwrap(), Some(0)),
            _ => assert_eq!(after.value(key), Some(value), "{key}"),
        }
    }
}

#[test]
fn a_dry_run_shows_types_and_writes_nothing() {
    let dir = TempDir::new().unwrap();
    let (source, out) = (demo(), dir.path().join("x.gguf"));
    let args = [
        "quantize",
        text(&source),
        text(&out),
        "-t",
        "Q4_K_M",
        "--requantize",
        "--dry-run",
    ];
    let shown = String::from_utf8(ok(&args).stdout).unwrap();
    assert!(
        shown.contains("token_embd.weight") && shown.contains("Q6_K"),
        "{shown}"
    );
    assert!(shown.contains("bits per weight"), "{shown}");
    let plan: Value =
        serde_json::from_slice(&ok(&[&args[..], &["--json"]].concat()).stdout).unwrap();
    assert_eq!(plan["recipe"], "q4_k_m");
    assert_eq!(plan["tensors"][0]["name"], "token_embd.weight");
    assert_eq!(plan["tensors"][0]["type"], "Q6_K");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// An importance matrix of the older format, with these columns for one tensor.
fn importance(name: &str, values: &[f32]) -> Vec<u8> {
    let number = |n: usize| (n as i32).to_le_bytes();
    let mut out = [&number(1)[..], &number(name.len()), name.as_bytes()].concat();
    out.extend(number(1));
    out.extend(number(values.len()));
    out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    out
}

#[test]
fn importance_changes_its_tensor_only() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let file = dir.path().join("imatrix.dat");
    let columns: Vec<f32> = (0..256)
        .map(|i| if i % 5 == 0 { 9.0 } else { 0.2 })
        .collect();
    std::fs::write(&file, importance("blk.1.attn_q.weight", &columns)).unwrap();
    let plain = Gguf::open(quantize(&dir, &source, "q4_k_s", &[])).unwrap();
    let weighted = quantize(&dir, &source, "q4_k_s", &["--imatrix", text(&file)]);
    let weighted = Gguf::open(weighted).unwrap();
    for info in plain.infos() {
        let other = weighted.get(&info.name).unwrap();
        let same = plain.get(&info.name).unwrap().bytes == other.bytes;
        assert_eq!(same, info.name != "blk.1.attn_q.weight", "{}", info.name);
    }
    assert_eq!(
        weighted.str("quantize.imatrix.file").unwrap(),
        Some("imatrix.dat")
    );
    assert_eq!(
        weighted.u32("quantize.imatrix.entries_count").unwrap(),
        Some(1)
    );
    // Measured with other models.
    std::fs::write(&file, importance("blk.77.attn_q.weight", &columns)).unwrap();
    let out = dir.path().join("never.gguf");
    let words = fails(&[
        "quantize",
        text(&source),
        text(&out),
        "-t",
        "q4_k_s",
        "--imatrix",
        text(&file),
    ]);
    assert!(words.contains("none of which this model has"), "{words}");
    std::fs::write(&file, importance("blk.1.attn_q.weight", &[1.0; 64])).unwrap();
    let out = dir.path().join("never.gguf");
    let args = [
        "quantize",
        text(&source),
        text(&out),
        "-t",
        "q4_k_s",
        "--imatrix",
        text(&file),
    ];
    let words = fails(&args);
    assert!(
        words.contains("blk.1.attn_q.weight") && words.contains("64"),
        "{words}"
    );
    assert!(!out.exists());
}

#[test]
fn nothing_is_overwritten_unasked() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let out = dir.path().join("out.gguf");
    std::fs::write(&out, b"mine").unwrap();
    let args = ["quantize", text(&source), text(&out), "-t", "q8_0"];
    let words = fails(&args);
    assert!(
        words.contains("already") && words.contains("--force"),
        "{words}"
    );
    assert_eq!(std::fs::read(&out).unwrap(), b"mine");
    ok(&[&args[..], &["--force"]].concat());
    assert!(Gguf::open(&out).is_ok());
    let words = fails(&[
        "quantize",
        text(&source),
        text(&source),
        "-t",
        "q8_0",
        "--force",
    ]);
    assert!(words.contains("is the source itself"), "{words}");
    let words = fails(&["quantize", text(&source), text(dir.path()), "-t", "q8_0"]);
    assert!(words.contains("is a folder"), "{words}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn sources_that_lose_are_refused_in_a_sentence() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.gguf");
    let words = fails(&["quantize", text(&demo()), text(&out), "-t", "q4_0"]);
    assert!(
        words.contains("Q8_0") && words.contains("--requantize"),
        "{words}"
    );
    let words = fails(&[
        "quantize",
        text(&fixture("llama-dynamic")),
        text(&out),
        "-t",
        "q8_0",
    ]);
    assert!(words.contains("dynamic"), "{words}");
    for (name, part) in [
        ("llama-gptq4", "quantised already"),
        ("llama-fp8-block", "quantised already"),
        ("qwen3-moe-sparse", "experts in some layers"),
        ("qwen2-moe-sparse", "experts in some layers"),
        ("deepseek3-halves", "rotation of halves"),
        ("gpt-oss-mxfp4", "quantised already"),
        ("smollm3-layers", "layers without rotation"),
        ("gpt2-layers", "scores"),
        ("llama4", "chunks of 8192"),
    ] {
        let words = fails(&["quantize", text(&fixture(name)), text(&out), "-t", "q8_0"]);
        assert!(words.contains(part), "{name}: {words}");
    }
    let nan = dir.path().join("nan.gguf");
    std::fs::write(&nan, one_tensor(&[1.0, f32::NAN])).unwrap();
    let words = fails(&["quantize", text(&nan), text(&out), "-t", "q8_0"]);
    assert!(
        words.contains("x.weight") && words.contains("row 1, column 3"),
        "{words}"
    );
    let large = dir.path().join("large.gguf");
    std::fs::write(&large, one_tensor(&[1.0, 7e4])).unwrap();
    let words = fails(&["quantize", text(&large), text(&out), "-t", "f16"]);
    assert!(words.contains("70000") && words.contains("bf16"), "{words}");
    // Neither could a scale of f16 hold it.
    let words = fails(&["quantize", text(&large), text(&out), "-t", "q8_0"]);
    assert!(words.contains("70000") && words.contains("bf16"), "{words}");
    assert!(!out.exists());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
}

/// Experts are stacked in one tensor, and importance has the columns of one after the other.
#[test]
fn each_expert_has_its_own_importance() {
    let dir = TempDir::new().unwrap();
    let (source, file) = (dir.path().join("moe.gguf"), dir.path().join("imatrix.dat"));
    let name = "blk.0.ffn_up_exps.weight";
    let mut w = Writer::new("moe.gguf");
    w.set("general.architecture", "qwen3moe").unwrap();
    w.set("qwen3moe.block_count", 1u32).unwrap();
    w.set("qwen3moe.expert_count", 2u32).unwrap();
    w.declare(name, &[2, 3, 256], GgufQuantType::F32).unwrap();
    let mut body = w.start(Vec::new()).unwrap();
    let numbers = (0..2 * 3 * 256u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32);
    let bytes: Vec<u8> = numbers
        .flat_map(|v| (v / 16_777_216.0 - 0.5).to_le_bytes())
        .collect();
    body.push(name, &bytes).unwrap();
    std::fs::write(&source, body.finish().unwrap()).unwrap();
    // Even columns of the second expert weigh nearly all.
    let columns: Vec<f32> = (0..512)
        .map(|i| if i >= 256 && i % 2 == 0 { 50.0 } else { 0.5 })
        .collect();
    std::fs::write(&file, importance(name, &columns)).unwrap();
    let misses = |path: &Path| -> Vec<f64> {
        let gguf = Gguf::open(path).unwrap();
        let found = gguf.get(name).unwrap();
        let mut back = vec![0.0; 2 * 3 * 256];
        ferrum_quant::dequantize(GgufQuantType::Q4_K, found.bytes, &mut back).unwrap();
        let each = back.iter().zip(bytes.as_chunks::<4>().0).enumerate();
        let mut sums = vec![0.0; 4];
        for (i, (y, x)) in each {
            sums[i / 768 * 2 + i % 2] += f64::from(y - f32::from_le_bytes(*x)).powi(2);
        }
        sums
    };
    let weighted = quantize(&dir, &source, "q4_k_s", &["--imatrix", text(&file)]);
    let weighted = misses(&weighted);
    assert!(weighted[2] < 0.8 * weighted[3], "{weighted:?}");
    assert!(
        (weighted[0] / weighted[1] - 1.0).abs() < 0.2,
        "{weighted:?}"
    );
    let stacked = Gguf::open(quantize(&dir, &source, "mxfp4_moe", &[])).unwrap();
    let info = stacked.infos().next().unwrap();
    assert_eq!(info.dtype, TensorDtype::Quant(GgufQuantType::MXFP4));
}

#[test]
fn a_truncated_imatrix_is_a_sentence() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let file = dir.path().join("imatrix.dat");
    let whole = importance("blk.1.attn_q.weight", &[1.0; 256]);
    let out = dir.path().join("never.gguf");
    for len in [0, 3, 9, 30, 100, whole.len() - 1] {
        std::fs::write(&file, &whole[..len]).unwrap();
        let words = fails(&[
            "quantize",
            text(&source),
            text(&out),
            "-t",
            "q4_0",
            "--imatrix",
            text(&file),
        ]);
        assert!(words.contains("imatrix.dat: "), "{len}: {words}");
    }
    assert!(!out.exists());
}

/// Files cannot grow past a limit, as on a full disk: a sentence, and nothing left behind.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let out = dir.path().join("out.gguf");
    let done = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$@\"", "sh"])
        .arg(env!("CARGO_BIN_EXE_ferrum"))
        .args(["quantize", text(&source), text(&out), "-t", "q8_0"])
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{words}");
    assert!(
        words.contains("out.gguf") && words.contains("error: "),
        "{words}"
    );
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "{words}");
    let nowhere = dir.path().join("none/out.gguf");
    let words = fails(&["quantize", text(&source), text(&nowhere), "-t", "q8_0"]);
    assert!(words.contains("none/out.gguf"), "{words}");
}

/// Whenever Ctrl-C comes, there is a whole file under the name or nothing at all.
#[cfg(unix)]
#[test]
fn ctrl_c_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let out = dir.path().join("out.gguf");
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferrum"))
        .args(["quantize", text(&source), text(&out), "-t", "q2_k"])
        .args(["--threads", "1"])
        .spawn()
        .unwrap();
    let files = || std::fs::read_dir(dir.path()).unwrap().count();
    // Until the draft is there, or all is over already.
    let over = loop {
        match child.try_wait().unwrap() {
            None if files() < 2 => std::thread::yield_now(),
            status => break status.is_some(),
        }
    };
    if !over {
        let id = child.id().to_string();
        Command::new("kill").args(["-INT", &id]).status().unwrap();
    }
    let code = child.wait().unwrap().code();
    assert!(matches!(code, Some(0 | 130)), "{code:?}");
    assert!(!out.exists() || Gguf::open(&out).is_ok());
    assert_eq!(files(), if out.exists() { 2 } else { 1 });
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_devices_refused() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let (file, link) = (dir.path().join("file.gguf"), dir.path().join("link.gguf"));
    std::fs::write(&file, b"old").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let args = ["quantize", text(&source), text(&link), "-t", "q8_0"];
    ok(&[&args[..], &["--force"]].concat());
    assert!(link.symlink_metadata().unwrap().is_symlink());
    assert!(Gguf::open(&file).is_ok());
    let words = fails(&[
        "quantize",
        text(&source),
        "/dev/null",
        "-t",
        "q8_0",
        "--force",
    ]);
    assert!(words.contains("no plain file"), "{words}");
}

#[test]
fn help_tells_every_type() {
    let help = ok(&["quantize", "--help"]).stdout;
    let help = String::from_utf8(help).unwrap();
    for recipe in ferrum_models::quantize::RECIPES {
        let mut words = help.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        assert!(words.any(|word| word == recipe.name), "{recipe}");
    }
    let words = ferrum(&["quantize", "a", "b", "--type", "q7"]).stderr;
    assert!(String::from_utf8(words).unwrap().contains("q4_k_m"));
}

/// Words go to stderr, data to stdout, and a pipe sees no bar.
#[test]
fn a_pipe_sees_one_line_and_json() {
    let dir = TempDir::new().unwrap();
    let source = demo_f32(&dir);
    let out = dir.path().join("out.gguf");
    let done = ok(&[
        "quantize",
        text(&source),
        text(&out),
        "-t",
        "q4_k_m",
        "--json",
    ]);
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(report["recipe"], "q4_k_m");
    assert_eq!(report["search"], "fast");
    let words = String::from_utf8(done.stderr).unwrap();
    assert_eq!(words.lines().count(), 1, "{words}");
    assert!(
        !words.contains('\r') && !words.contains('\u{1b}'),
        "{words}"
    );
}

/// A file with one matrix of two rows; column 3 has these values.
fn one_tensor(column: &[f32; 2]) -> Vec<u8> {
    let mut w = Writer::new("x.gguf");
    w.set("general.architecture", "llama").unwrap();
    w.declare("x.weight", &[2, 32], GgufQuantType::F32).unwrap();
    let mut body = w.start(Vec::new()).unwrap();
    for value in column {
        let mut row = [0.5f32; 32];
        row[3] = *value;
        let bytes: Vec<u8> = row.iter().flat_map(|v| v.to_le_bytes()).collect();
        body.push("x.weight", &bytes).unwrap();
    }
    body.finish().unwrap()
}

#[test]
fn vectors_become_f32() {
    let dir = TempDir::new().unwrap();
    let file = Gguf::open(quantize(&dir, &fixture("qwen2"), "f16", &[])).unwrap();
    for info in file.infos() {
        let expected = if info.shape.len() == 1 {
            Dtype::F32
        } else {
            Dtype::F16
        };
        assert_eq!(info.dtype, TensorDtype::Plain(expected), "{}", info.name);
    }
}
