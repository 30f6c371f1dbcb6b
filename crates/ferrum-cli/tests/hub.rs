//! Models by name, as a user meets them: fetched from a hub on this machine, listed, removed.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../ferrum-client/tests/support/mod.rs"]
mod support;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use support::{FakeHub, commit};
use tempfile::TempDir;

static DEMO: &[u8] = include_bytes!("../../../assets/demo/ferrum-demo.gguf");

/// A hub, and a home whose cache is empty.
struct Setup {
    hub: FakeHub,
    home: TempDir,
}

impl Setup {
    fn new() -> Self {
        let hub = FakeHub::start();
        hub.add(
            "org/demo",
            "main",
            &commit('a'),
            &[("demo-Q4_K_M.gguf", DEMO), ("README.md", b"x")],
        );
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/qwen3");
        let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
        let names = ["config.json", "tokenizer.json", "model.safetensors"];
        let files = names.map(|name| (name, read(name)));
        let files = files
            .each_ref()
            .map(|(name, bytes)| (*name, bytes.as_slice()));
        hub.add("org/folder", "main", &commit('b'), &files);
        Self {
            hub,
            home: tempfile::tempdir().unwrap(),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrum"));
        command
            .args(args)
            .current_dir(self.home.path())
            .stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy().to_uppercase();
            if text.starts_with("HF_") || text.starts_with("HUGGING") || text.ends_with("_PROXY") {
                command.env_remove(name);
            }
        }
        command
            .env("HF_HOME", self.home.path())
            .env("HF_ENDPOINT", self.hub.url());
        command
    }

    fn ferrum(&self, args: &[&str]) -> (bool, String, String) {
        said(&self.command(args).output().unwrap())
    }

    fn ok(&self, args: &[&str]) -> String {
        let (ok, out, err) = self.ferrum(args);
        assert!(ok, "{args:?}: {err}");
        out
    }

    fn fails(&self, args: &[&str]) -> String {
        let (ok, out, err) = self.ferrum(args);
        assert!(
            !ok && out.is_empty() && err.contains("error: "),
            "{args:?}: {out}{err}"
        );
        err
    }
}

fn said(output: &Output) -> (bool, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

const QUESTION: [&str; 5] = [
    "--temperature",
    "0",
    "--backend",
    "cpu",
    "What is 7 plus 5?",
];

#[test]
fn a_model_answers_by_its_name_and_then_without_a_hub() {
    let setup = Setup::new();
    let run = |flags: &[&'static str]| [&["run", "--model", "org/demo"], flags, &QUESTION].concat();
    let (ok, out, err) = setup.ferrum(&run(&[]));
    assert!(ok && out.contains("12"), "{out}{err}");
    assert!(
        err.starts_with("note: org/demo is not in the cache; fetching it from http://127"),
        "{err}"
    );
    assert!(!err.contains('\r') && !err.contains('\u{1b}'), "{err}");
    setup.hub.asked();
    for flags in [&[][..], &["--offline"]] {
        let (ok, again, err) = setup.ferrum(&run(flags));
        assert!(ok && again == out, "{err}");
        assert!(
            err.starts_with("note: org/demo is demo-Q4_K_M.gguf here\n"),
            "{err}"
        );
    }
    assert!(setup.hub.asked().is_empty());
    let cache = setup.home.path().join("hub/models--org--demo");
    assert!(cache.join("refs/main").exists());
}

#[test]
fn what_is_in_the_cache_needs_no_org() {
    let setup = Setup::new();
    let question = [
        "run",
        "--temperature",
        "0",
        "--backend",
        "cpu",
        "Demo:q4_k_m",
    ];
    // Nothing of that name is here yet: it is a prompt.
    let (_, _, err) = setup.ferrum(&question);
    assert!(err.contains("is neither a path nor ORG/NAME"), "{err}");
    setup.ok(&["pull", "org/demo"]);
    setup.hub.asked();
    let error = setup.fails(&question);
    assert!(
        error.contains("the prompt is empty, and Demo:q4_k_m is the model"),
        "{error}"
    );
    let answer = [&question[..], &["What is 7 plus 5?"]].concat();
    assert!(setup.ok(&answer).contains("12"));
    let inspected = setup.ok(&["inspect", "demo"]);
    assert!(inspected.contains("demo-Q4_K_M.gguf"), "{inspected}");
    let error = setup.fails(&["serve", "demo", "org/demo"]);
    assert!(
        error.contains("two models are called \"org/demo\""),
        "{error}"
    );
    assert!(setup.hub.asked().is_empty());
    // A path goes before a name.
    std::fs::write(setup.home.path().join("demo"), "x").unwrap();
    setup.fails(&["inspect", "demo"]);
    std::fs::remove_file(setup.home.path().join("demo")).unwrap();
    let files: [(&str, &[u8]); 1] = [("x.gguf", DEMO)];
    setup.hub.add("other/demo", "main", &commit('c'), &files);
    setup.ok(&["pull", "other/demo"]);
    let error = setup.fails(&["inspect", "demo"]);
    assert!(
        error.contains("hint: give one of org/demo, other/demo"),
        "{error}"
    );
}

#[test]
fn the_address_of_the_hub_needs_no_scheme() {
    let setup = Setup::new();
    let (ok, _, err) = setup.ferrum(&["pull", "hf.co/org/demo:Q4_K_M"]);
    assert!(ok && err.contains("org/demo:Q4_K_M at "), "{err}");
    // It is the hub of the settings that is asked.
    assert!(
        err.starts_with("note: org/demo:Q4_K_M is asked for at http://127"),
        "{err}"
    );
    assert!(
        setup
            .ok(&["inspect", "hf.co/org/demo"])
            .contains("demo-Q4_K_M.gguf")
    );
}

#[test]
fn pull_prints_the_path_and_says_what_it_did() {
    let setup = Setup::new();
    let (ok, out, err) = setup.ferrum(&["pull", "org/folder"]);
    assert!(ok, "{err}");
    assert_eq!(
        err,
        format!("org/folder at {}: fetched 3 files\n", &commit('b')[..8])
    );
    let tokens = ["--tokens", "1,2,3", "--json"];
    let by_path = setup.ok(&[&["logits", "--model", out.trim()][..], &tokens].concat());
    let by_name = setup.ok(&[&["logits", "--model", "org/folder"][..], &tokens].concat());
    assert_eq!(by_path, by_name);
    let (_, _, err) = setup.ferrum(&["pull", "org/folder"]);
    assert!(err.contains("is here already"), "{err}");
}

#[test]
fn a_tokenizer_needs_no_weights() {
    let setup = Setup::new();
    setup.ok(&["tokenize", "--model", "org/folder", "a text"]);
    assert!(!setup.hub.asked().iter().any(|asked| asked.cdn));
    assert!(
        setup
            .ok(&["list"])
            .contains("org/folder  main (bbbbbbbb), no weights")
    );
    setup.ok(&["logits", "--model", "org/folder", "--tokens", "1"]);
    assert!(setup.hub.asked().iter().any(|asked| asked.cdn));
}

#[test]
fn flags_go_before_variables() {
    let setup = Setup::new();
    let other = setup.home.path().join("other");
    std::fs::write(setup.home.path().join("token"), "hf_wrong\n").unwrap();
    std::fs::write(setup.home.path().join("mine"), " hf_mine \n").unwrap();
    setup.hub.gate("org/demo", "hf_mine");
    let error = setup.fails(&["pull", "org/demo"]);
    assert!(
        error.contains("accepted its terms") && error.contains("check the token"),
        "{error}"
    );
    let url = setup.hub.url();
    let mut command = setup.command(&[
        "pull",
        "org/demo",
        "--endpoint",
        &url,
        "--token-file",
        "mine",
    ]);
    command
        .arg("--cache-dir")
        .arg(&other)
        .env("HF_ENDPOINT", "http://127.0.0.1:9");
    command
        .env("HF_HUB_CACHE", "/nowhere")
        .env("HF_TOKEN", "hf_other");
    let (ok, out, err) = said(&command.output().unwrap());
    assert!(ok && out.starts_with(other.to_str().unwrap()), "{err}");
    let mut command = setup.command(&["pull", "org/demo"]);
    command
        .env("HF_TOKEN", "hf_mine")
        .env("HF_HUB_CACHE", setup.home.path().join("third"));
    assert!(
        said(&command.output().unwrap())
            .1
            .contains("/third/models--org--demo/")
    );
    for (name, value) in [("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "yes")] {
        let mut command = setup.command(&["pull", "org/demo"]);
        let (ok, _, err) = said(&command.env(name, value).output().unwrap());
        assert!(!ok && err.contains("HF_HUB_OFFLINE is set"), "{err}");
    }
}

#[test]
fn what_exists_wins_and_what_is_a_file_is_no_name() {
    let setup = Setup::new();
    std::fs::create_dir_all(setup.home.path().join("org/demo")).unwrap();
    std::fs::write(setup.home.path().join("org/demo/x.gguf"), DEMO).unwrap();
    let args = [&["run", "--model", "org/demo"][..], &QUESTION].concat();
    assert!(setup.ok(&args).contains("12"));
    for path in [
        "org/model.gguf",
        "./org/model",
        "model",
        "/org/model",
        "a/b/c",
    ] {
        let error = setup.fails(&["inspect", path]);
        assert!(
            error.contains("no such file or folder\nhint: check the path"),
            "{error}"
        );
    }
    assert!(setup.hub.asked().is_empty());
}

#[test]
fn what_cannot_be_had_is_said() {
    let setup = Setup::new();
    let offline = setup.fails(&["run", "--model", "org/demo", "--offline", "x"]);
    assert!(
        offline.contains("is no path, and not all of it is in the cache"),
        "{offline}"
    );
    assert!(offline.contains("hint: without --offline"), "{offline}");
    let missing = setup.fails(&["run", "--model", "org/nothing", "x"]);
    assert!(missing.contains("has no model org/nothing"), "{missing}");
    let revision = setup.fails(&["pull", "org/demo", "--revision", "v2"]);
    assert!(revision.contains("has no revision \"v2\""), "{revision}");
    for (args, words) in [
        (&["pull", "org/../demo"][..], "expected ORG/NAME"),
        (&["pull", "org/demo:../x"], "is no path inside a folder"),
        (
            &["pull", "org/demo", "--revision", "../x"],
            "is no revision",
        ),
        (
            &["pull", "org/demo", "--endpoint", "file:///etc"],
            "is no usable address",
        ),
        (
            &["pull", "org/demo", "--token-file", "/dev/null"],
            "there is no token in it",
        ),
        (&["rm", "org/demo", "--yes"], "is not in the cache"),
        (&["rm", "../..", "--yes"], "expected ORG/NAME"),
    ] {
        let error = setup.fails(args);
        assert!(error.contains(words), "{args:?}: {error}");
    }
    let down = setup.fails(&["pull", "org/demo", "--endpoint", "http://127.0.0.1:9"]);
    assert!(down.contains("hint: check the connection"), "{down}");
}

#[test]
fn models_are_listed_and_removed() {
    let setup = Setup::new();
    let (_, out, err) = setup.ferrum(&["list"]);
    assert!(
        out.is_empty() && err.contains("there are no models in "),
        "{err}"
    );
    setup.ok(&["pull", "org/demo"]);
    setup.ok(&["pull", "org/folder"]);
    let list = setup.ok(&["list"]);
    assert!(
        list.contains("org/demo:demo-Q4_K_M.gguf  main (aaaaaaaa)"),
        "{list}"
    );
    assert!(
        list.contains("org/folder                 main (bbbbbbbb)"),
        "{list}"
    );
    let json: Value = serde_json::from_str(&setup.ok(&["list", "--json"])).unwrap();
    let model = &json["models"][0];
    assert_eq!(model["model"], "org/demo");
    assert_eq!(model["bytes"], DEMO.len());
    assert_eq!(model["snapshots"][0]["refs"][0], "main");
    assert_eq!(model["snapshots"][0]["files"][0]["bytes"], DEMO.len());
    let error = setup.fails(&["rm", "org/demo"]);
    assert!(
        error.contains("hint: --yes removes without asking"),
        "{error}"
    );
    assert!(setup.ok(&["list"]).contains("org/demo"));
    let (ok, _, err) = setup.ferrum(&["rm", "org/demo", "--yes"]);
    assert!(ok && err.contains("removed all of org/demo"), "{err}");
    setup.ok(&["rm", "org/folder", "--yes", "--revision", "main"]);
    assert!(setup.ok(&["list"]).is_empty());
}

#[test]
fn the_address_of_a_page_is_a_model() {
    let setup = Setup::new();
    let host = setup.hub.url();
    let path = setup.ok(&["pull", &format!("{host}/org/demo/tree/main")]);
    let name = format!("{host}/org/demo/blob/main/demo-Q4_K_M.gguf");
    let (ok, again, err) = setup.ferrum(&["pull", &name]);
    assert!(
        ok && again == path && err.contains("is here already"),
        "{err}"
    );
    assert!(!err.contains("note:"), "{err}");
    let answer = setup.ok(&[&["run", &format!("{host}/org/demo")], &QUESTION[..]].concat());
    assert!(answer.contains("12"), "{answer}");
    // The hub that is set is asked, and where that is another one, it is said.
    let (ok, again, err) = setup.ferrum(&["pull", "https://hub.example.org/org/demo"]);
    assert!(ok && again == path, "{err}");
    assert!(
        err.contains("and not at https://hub.example.org:443\nhint: --endpoint"),
        "{err}"
    );
    for (address, words) in [
        (
            format!("{host}/org/demo/discussions"),
            "is no page of a model",
        ),
        (format!("{host}/org"), "is no model of a hub"),
    ] {
        let error = setup.fails(&["pull", &address]);
        assert!(error.contains(words), "{error}");
    }
    let clash = setup.fails(&[
        "pull",
        &format!("{host}/org/demo/tree/v1"),
        "--revision",
        "v2",
    ]);
    assert!(clash.contains("the address says revision v1"), "{clash}");
}

#[test]
fn a_name_of_a_hub_is_no_prompt() {
    let setup = Setup::new();
    let args = [&["run", "org/demo"], &QUESTION[..]].concat();
    assert!(setup.ok(&args).contains("12"));
    // Alone, it is the model, and the prompt is what the pipe has: here nothing.
    let error = setup.fails(&["run", "org/demo"]);
    assert!(
        error.contains("the prompt is empty, and org/demo is the model\nhint: "),
        "{error}"
    );
    let error = setup.fails(&["run", "org/nothing", "x"]);
    assert!(error.contains("has no model org/nothing"), "{error}");
}

/// The files of a folder, of its folders as well.
fn files_of(folder: &Path, below: &str, files: &mut Vec<(String, Vec<u8>)>) {
    for entry in std::fs::read_dir(folder.join(below)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let name = match below {
            "" => name,
            _ => format!("{below}/{name}"),
        };
        match entry.file_type().unwrap().is_dir() {
            true => files_of(folder, &name, files),
            false => files.push((name, std::fs::read(entry.path()).unwrap())),
        }
    }
}

/// Files beside the weights say how a model is to be run, so all that are read are fetched: how texts are pooled and where
/// they are cut off, and how images are resized.
#[test]
fn a_folder_that_was_fetched_gives_what_the_folder_gives() {
    let setup = Setup::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let long = "cat ".repeat(30);
    let image = fixtures.join("images/files/alpha.png");
    let image = image.display().to_string();
    for (folder, name, before, behind) in [
        (
            "encoders/distilbert",
            "org/embedder",
            &["embed"][..],
            &["the dog ran", &*long][..],
        ),
        // With maps behind pooling.
        (
            "encoders/gemma-embedding",
            "org/decoder",
            &["embed"],
            &["the dog ran"],
        ),
        (
            "images/clip",
            "org/clip",
            &["classify"],
            &[&*image, "--labels", "cat,dog"],
        ),
    ] {
        let folder = fixtures.join(folder);
        let mut files = Vec::new();
        files_of(&folder, "", &mut files);
        let files: Vec<_> = files
            .iter()
            .map(|(name, bytes)| (&**name, &**bytes))
            .collect();
        setup.hub.add(name, "main", &commit('d'), &files);
        let run = |model: &str| {
            let flags = ["--json", "--backend", "cpu"];
            setup.ok(&[before, &flags, &[model], behind].concat())
        };
        assert_eq!(run(name), run(&folder.display().to_string()), "{name}");
    }
}
