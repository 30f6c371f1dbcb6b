//! LoRA adapters, as folders of PEFT and as GGUF files: what opens has pairs of matrices that fit each other.
#![no_main]

use ferrum_formats::{LoraFolder, MAX_LORA_RANK};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;

static DIR: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fn check(path: &Path) {
    let Ok(adapter) = LoraFolder::open(path) else {
        return;
    };
    let mut modules = BTreeSet::new();
    for pair in adapter.pairs() {
        assert!(modules.insert(pair.module), "two pairs of {}", pair.module);
        let &[rank, _] = pair.down.shape else {
            panic!("{:?} is no matrix", pair.down.shape);
        };
        let &[_, columns] = pair.up.shape else {
            panic!("{:?} is no matrix", pair.up.shape);
        };
        assert_eq!(rank, columns);
        assert!((1..=MAX_LORA_RANK).contains(&rank));
        assert!(pair.scale.is_finite(), "{}", pair.scale);
        for half in [pair.down, pair.up] {
            let elements = half.shape.iter().product();
            assert_eq!(half.dtype.bytes_for(elements), Some(half.bytes.len()));
        }
    }
    assert_eq!(modules.len() * 2, adapter.tensors().infos().count());
    let _ = (adapter.base_model(), adapter.gguf_architecture());
}

// A GGUF file; or the configuration of a folder in one line, and a file of safetensors without the length before it.
fuzz_target!(|data: &[u8]| {
    if data.starts_with(b"GGUF") {
        let file = DIR.path().join("adapter.gguf");
        fs::write(&file, data).expect("written");
        check(&file);
        return;
    }
    let end = data.iter().position(|&b| b == b'\n').unwrap_or(data.len());
    let (config, weights) = data.split_at(end);
    let weights = weights.get(1..).unwrap_or_default();
    let json = weights
        .iter()
        .rposition(|&b| b == b'}')
        .map_or(0, |at| at + 1);
    let weights = [&(json as u64).to_le_bytes()[..], weights].concat();
    let dir = DIR.path().join("adapter");
    fs::create_dir_all(&dir).expect("made");
    fs::write(dir.join("adapter_config.json"), config).expect("written");
    fs::write(dir.join("adapter_model.safetensors"), weights).expect("written");
    check(&dir);
});
