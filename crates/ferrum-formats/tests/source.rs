//! Paths as people give them, right and wrong.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::small_gguf;
use ferrum_formats::gguf::Writer;
use ferrum_formats::{ModelSource, QuantizationConfig, TensorSource};
use ferrum_test_support::skip;
use ferrum_types::GgufQuantType;
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

/// Part `number` of `count`, with tensors of these names.
fn part(number: u16, count: u16, total: i32, names: &[&str]) -> Vec<u8> {
    let mut w = Writer::new("part.gguf");
    w.set("split.no", number).unwrap();
    w.set("split.count", count).unwrap();
    w.set("split.tensors.count", total).unwrap();
    for name in names {
        w.declare(name, &[2], GgufQuantType::F32).unwrap();
    }
    let mut w = w.start(Vec::new()).unwrap();
    for name in names {
        w.push(name, &[number as u8; 8]).unwrap();
    }
    w.finish().unwrap()
}

#[test]
fn the_parts_of_a_model_are_one() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second, third) = (
        "m-00001-of-00003.gguf",
        "m-00002-of-00003.gguf",
        "m-00003-of-00003.gguf",
    );
    put(dir.path(), first, part(0, 3, 3, &["a"]));
    put(dir.path(), second, part(1, 3, 3, &["b", "c"]));
    put(dir.path(), third, part(2, 3, 3, &[]));
    for path in [dir.path().join(first), dir.path().to_owned()] {
        let ModelSource::Gguf(gguf) = ModelSource::open(&path).unwrap_or_else(|e| panic!("{e}"))
        else {
            panic!("{} is a folder", path.display());
        };
        let names: Vec<_> = gguf.infos().map(|info| info.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(gguf.require("c").unwrap().bytes, [1; 8]);
        assert_eq!(gguf.total_bytes(), 24);
        assert!(gguf.get("d").is_none());
    }
    let cases: Vec<(&str, Option<Vec<u8>>, &str, &str)> = vec![
        (
            second,
            Some(part(1, 3, 3, &["b", "a"])),
            first,
            "tensor \"a\" appears more than once",
        ),
        (
            second,
            Some(part(1, 3, 3, &["b"])),
            first,
            "found 3, and the parts have 2",
        ),
        (
            second,
            Some(part(2, 3, 3, &["b", "c"])),
            first,
            "does not say that it is part 2 of 3",
        ),
        (
            second,
            Some(part(1, 4, 3, &["b", "c"])),
            first,
            "does not say that it is part 2 of 3",
        ),
        (
            second,
            None,
            first,
            "needs its part \"m-00002-of-00003.gguf\", which is not there",
        ),
        (
            third,
            Some(part(2, 3, 3, &[])),
            third,
            "is part 3 of 3 of a model\nhint: open the first part",
        ),
        (
            "x.gguf",
            Some(part(0, 3, 3, &["a"])),
            "x.gguf",
            "call it NAME-00001-of-00003.gguf",
        ),
        (
            third,
            Some(part(1, 3, 3, &[])),
            third,
            "is part 2 of 3 and not called so",
        ),
        (
            "y-00001-of-65535.gguf",
            Some(part(0, u16::MAX, 3, &["a"])),
            "y-00001-of-65535.gguf",
            "which is not there",
        ),
    ];
    for (name, bytes, opened, words) in cases {
        match bytes {
            Some(bytes) => put(dir.path(), name, bytes),
            None => std::fs::remove_file(dir.path().join(name)).unwrap(),
        }
        let error = error(&dir.path().join(opened));
        assert!(error.contains(words), "{opened}: {error}");
    }
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
        ("split.gguf", "is part 1 of 3 and not called so"),
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
        return skip("no fixtures/models");
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
