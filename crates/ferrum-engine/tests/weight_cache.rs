//! Models whose packed weights are kept: what is mapped computes the same bits, and what cannot be used is
//! packed again.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_engine::{
    BackendDispatch, BackendKind, BackendOptions, CacheOutcome, CacheWriter, KvDtype, Placement,
    Session,
};
use ferrum_formats::ModelSource;
use ferrum_formats::weight_cache::WeightCache;
use ferrum_models::{Model, Readback, RunnerConfig, read_model};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    models.join(name)
}

fn open(path: &Path) -> Model {
    read_model(ModelSource::open(path).unwrap()).unwrap()
}

fn cache(dir: &TempDir) -> WeightCache {
    WeightCache::new(dir.path().join("packed"), Some(1 << 30)).keep_from(0)
}

fn device() -> BackendDispatch {
    BackendDispatch::from_kind(BackendKind::Cpu, BackendOptions::default()).unwrap()
}

fn load(model: &Model, cache: &WeightCache) -> (Session, CacheWriter) {
    let config = RunnerConfig::single(64);
    let sizes = (config, KvDtype::F32);
    let prepared = Placement::on(device(), model).prepare(model, sizes, Some(cache));
    assert_eq!(prepared.memory_shortage(), None);
    let loaded = prepared.load(None, &mut |_, _| ()).unwrap();
    let (session, mut kept) = (loaded.session, loaded.kept.unwrap());
    kept.finish();
    (session, kept)
}

fn logits(session: &mut Session) -> Vec<u32> {
    session
        .prefill(&[5, 9, 2, 77, 31, 8, 3], Readback::Logits)
        .unwrap();
    session.logits().iter().map(|x| x.to_bits()).collect()
}

fn plain_logits(model: &Model) -> Vec<u32> {
    let config = RunnerConfig::single(64);
    logits(
        &mut device()
            .load(model, config, KvDtype::F32, &mut |_, _| ())
            .unwrap(),
    )
}

fn is_written(kept: &CacheWriter) -> bool {
    matches!(kept.outcome(), CacheOutcome::Written { .. }) && kept.damaged().is_none()
}

#[test]
fn the_second_start_maps_the_same_bits() {
    for entry in fs::read_dir(fixture("")).unwrap() {
        let path = entry.unwrap().path();
        let Ok(source) = ModelSource::open(&path) else {
            continue;
        };
        let (model, dir) = (read_model(source).unwrap(), TempDir::new().unwrap());
        let cache = cache(&dir);
        let expected = plain_logits(&model);
        let (mut first, kept) = load(&model, &cache);
        assert!(is_written(&kept), "{}: {kept:?}", path.display());
        assert_eq!(logits(&mut first), expected, "{}", path.display());
        let (mut second, kept) = load(&model, &cache);
        assert_eq!(kept.outcome(), &CacheOutcome::Hit, "{}", path.display());
        assert_eq!(logits(&mut second), expected, "{}", path.display());
        // A file may go while it is mapped.
        assert_eq!(cache.clear(None).unwrap().0, 1);
        assert_eq!(logits(&mut second), expected, "{}", path.display());
    }
}

/// A copy of a model of one file.
fn copied(dir: &TempDir) -> PathBuf {
    let path = dir.path().join("model");
    fs::create_dir(&path).unwrap();
    for entry in fs::read_dir(fixture("qwen3")).unwrap() {
        let from = entry.unwrap().path();
        fs::copy(&from, path.join(from.file_name().unwrap())).unwrap();
    }
    path
}

fn only_file(cache: &WeightCache) -> PathBuf {
    let entries = cache.entries().unwrap();
    assert_eq!(entries.len(), 1);
    entries[0].path.clone()
}

#[test]
fn damage_is_noticed_and_repaired() {
    let dir = TempDir::new().unwrap();
    let (model, cache) = (open(&copied(&dir)), cache(&dir));
    let expected = plain_logits(&model);
    assert!(is_written(&load(&model, &cache).1));
    let path = only_file(&cache);
    let whole = fs::read(&path).unwrap();
    let changes: [fn(&mut Vec<u8>); 4] = [
        |file| file[1000] ^= 1,
        |file| *file.last_mut().unwrap() ^= 0x80,
        |file| file.truncate(file.len() / 2),
        Vec::clear,
    ];
    for change in changes {
        let mut file = whole.clone();
        change(&mut file);
        fs::write(&path, file).unwrap();
        let (mut session, kept) = load(&model, &cache);
        assert!(
            matches!(kept.outcome(), CacheOutcome::Written { .. }),
            "{kept:?}"
        );
        assert!(kept.damaged().is_some());
        assert_eq!(logits(&mut session), expected);
        let (mut session, kept) = load(&model, &cache);
        assert_eq!(kept.outcome(), &CacheOutcome::Hit);
        assert_eq!(logits(&mut session), expected);
    }
}

#[test]
fn a_changed_model_is_packed_again() {
    let dir = TempDir::new().unwrap();
    let (path, cache) = (copied(&dir), cache(&dir));
    assert!(is_written(&load(&open(&path), &cache).1));
    let weights = path.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    // The last number of the last tensor.
    let last = bytes.len() - 1;
    bytes[last] ^= 0x40;
    fs::write(&weights, bytes).unwrap();
    let model = open(&path);
    let expected = plain_logits(&model);
    let (mut session, kept) = load(&model, &cache);
    assert!(is_written(&kept), "{kept:?}");
    assert_eq!(logits(&mut session), expected);
    assert_eq!(load(&model, &cache).1.outcome(), &CacheOutcome::Hit);
}

#[test]
fn what_is_not_kept_has_a_reason() {
    let dir = TempDir::new().unwrap();
    let model = open(&copied(&dir));
    let root = dir.path().join("packed");
    let small = WeightCache::new(&root, Some(1 << 30));
    let full = WeightCache::new(&root, Some(100)).keep_from(0);
    for (cache, reason) in [(small, "small"), (full, "may hold 100")] {
        let (_, kept) = load(&model, &cache);
        let CacheOutcome::Skipped(found) = kept.outcome() else {
            panic!("{kept:?}");
        };
        assert!(found.contains(reason), "{found}");
        assert!(cache.entries().unwrap().is_empty());
    }
}
