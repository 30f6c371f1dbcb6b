//! Paths as people give them, right and wrong.

mod common;

use common::small_gguf;
use ferrum_formats::gguf::Writer;
use ferrum_formats::{ModelSource, QuantizationConfig, TensorSource};
use std::path::Path;

fn put(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(dir.join(name), bytes).expect("the folder can be written");
}

fn tensor_file() -> Vec<u8> {
    common::safetensors(
        r#"{"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#,
        2,
    )
}

fn error(path: &Path) -> String {
    match ModelSource::open(path) {
        Ok(_) => panic!("{} was accepted", path.display()),
        Err(e) => e.to_string(),
    }
}

#[test]
fn a_gguf_is_opened_by_file_by_folder_and_by_content() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "m.gguf", small_gguf());
    put(dir.path(), "notes.txt", "x");
    put(dir.path(), "0a1b2c", small_gguf());
    for path in [
        dir.path().join("m.gguf"),
        dir.path().join("0a1b2c"),
        dir.path().to_owned(),
    ] {
        assert!(
            matches!(ModelSource::open(&path), Ok(ModelSource::Gguf(_))),
            "{}",
            path.display()
        );
    }
    put(dir.path(), "n.gguf", small_gguf());
    let e = error(dir.path());
    assert!(
        e.contains("holds 2 .gguf files\nhint: name one of them: m.gguf, n.gguf"),
        "{e}"
    );
}

#[test]
fn a_hugging_face_folder_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    put(
        dir.path(),
        "config.json",
        r#"{"model_type":"llama","eos_token_id":2}"#,
    );
    put(
        dir.path(),
        "generation_config.json",
        r#"{"temperature":0.5}"#,
    );
    put(
        dir.path(),
        "quantize_config.json",
        r#"{"bits":4,"group_size":128,"desc_act":false}"#,
    );
    put(dir.path(), "model.safetensors", tensor_file());
    for path in [dir.path().to_owned(), dir.path().join("model.safetensors")] {
        let Ok(ModelSource::Hf(hf)) = ModelSource::open(&path) else {
            panic!("{} is a folder", path.display());
        };
        assert_eq!(hf.config.model_type().unwrap(), "llama");
        assert_eq!(hf.generation_config.temperature, Some(0.5));
        assert_eq!(hf.generation_config.eos_token_ids, [2]);
        assert!(matches!(hf.quantization, Some(QuantizationConfig::Gptq(_))));
        assert_eq!(hf.tensors.require("t").unwrap().shape, [2]);
    }
}

#[test]
fn one_shard_opens_its_whole_set() {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "config.json", "{}");
    let other = common::safetensors(
        r#"{"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        1,
    );
    put(dir.path(), "a.safetensors", tensor_file());
    put(dir.path(), "b.safetensors", other);
    let index = r#"{"weight_map":{"t":"a.safetensors","u":"b.safetensors"}}"#;
    put(dir.path(), "model.safetensors.index.json", index);
    let Ok(ModelSource::Hf(hf)) = ModelSource::open(dir.path().join("b.safetensors")) else {
        panic!("a folder");
    };
    assert_eq!(hf.tensors.file_count(), 2);
}

#[test]
fn other_paths_are_refused_with_reasons() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    put(dir.path(), "pytorch_model.bin", "PK");
    put(dir.path(), "lonely.safetensors", tensor_file());
    put(dir.path(), "notes.txt", "x");
    put(dir.path(), "empty.gguf", "");
    let mut split = Writer::new("split.gguf");
    split.set("split.count", 3u16).unwrap();
    put(
        dir.path(),
        "split.gguf",
        split.start(Vec::new()).unwrap().finish().unwrap(),
    );
    for name in ["pickles", "hf-pickles", "nothing", "no-weights", "many"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    put(&path("pickles"), "pytorch_model.bin", "PK");
    for name in ["hf-pickles", "no-weights", "many"] {
        put(&path(name), "config.json", "{}");
    }
    put(&path("hf-pickles"), "pytorch_model.bin", "PK");
    put(&path("many"), "a.safetensors", tensor_file());
    put(&path("many"), "b.safetensors", tensor_file());
    let cases = [
        ("absent", "there is no such file or folder"),
        (
            "pytorch_model.bin",
            "is a Python pickle\nhint: pickles can run code",
        ),
        ("lonely.safetensors", "has no config.json beside it"),
        ("notes.txt", "is no model file\nhint: give a .gguf file"),
        ("many/config.json", "give the folder instead"),
        ("empty.gguf", "file ends within the GGUF magic"),
        ("split.gguf", "one of the 3 parts of a split model"),
        ("pickles", "is a Python pickle"),
        ("hf-pickles", "is a Python pickle"),
        ("nothing", "holds neither config.json nor a .gguf file"),
        ("no-weights", "holds no .safetensors file"),
        (
            "many",
            "holds 2 .safetensors files but no model.safetensors.index.json",
        ),
    ];
    for (name, words) in cases {
        let e = error(&path(name));
        assert!(e.contains(words), "{name}: {e}");
    }
}

#[test]
fn fixture_models_are_opened() {
    let dir = common::workspace_root().join("fixtures/models");
    let Ok(folders) = std::fs::read_dir(&dir) else {
        return println!("skipped: no fixtures/models");
    };
    for folder in folders
        .flatten()
        .filter(|f| f.path().join("config.json").exists())
    {
        let source = ModelSource::open(folder.path()).unwrap_or_else(|e| panic!("{e}"));
        assert!(
            matches!(source, ModelSource::Hf(_)),
            "{}",
            folder.path().display()
        );
        let gguf = folder.path().join("model.gguf");
        if gguf.exists() {
            let source = ModelSource::open(&gguf).unwrap_or_else(|e| panic!("{e}"));
            assert!(matches!(source, ModelSource::Gguf(_)));
        }
    }
}
