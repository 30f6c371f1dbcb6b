//! Weights that memory has no room for, and entries that cannot be used.

use super::*;
use crate::{BackendDispatch, KvDtype, Placement};
use ferrum_formats::ModelSource;
use ferrum_kernels::{Backend, BackendMoeFused, BackendQuantExperts, ExpertProjection, MoeRouting};
use ferrum_models::{Readback, RunnerConfig, read_model};
use ferrum_test_support::skip;
use ferrum_types::{ExpertInput, ExpertShape, GgufQuantType, MoeShape, RouteShape};
use std::path::Path;
use tempfile::TempDir;

fn model(name: &str) -> Model {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    read_model(ModelSource::open(models.join(name)).unwrap()).unwrap()
}

/// A folder on the disk: that for temporary files may be in memory.
fn folder() -> TempDir {
    let program = std::env::current_exe().unwrap();
    TempDir::new_in(program.parent().unwrap()).unwrap()
}

/// Where there is room for weights.
#[derive(Clone, Copy, PartialEq)]
enum Room {
    InMemory,
    OnDisk,
}

/// A store of a model in a cache of at most `limit` bytes.
fn store_below(limit: u64, dir: &TempDir, model: &Model, room: Room) -> Arc<LoadStore> {
    let cache = WeightCache::new(dir.path().join("packed"), Some(limit)).keep_from(0);
    let device = CpuBackend::open(0).unwrap();
    let layout = (device.packed_layout(), device.threads());
    let bytes = model.tensors().total_bytes();
    let streamed = (room == Room::OnDisk).then_some(bytes);
    Arc::new(LoadStore::open(&cache, model, layout, streamed).unwrap())
}

fn store(dir: &TempDir, model: &Model, room: Room) -> Arc<LoadStore> {
    store_below(1 << 30, dir, model, room)
}

/// The bits of logits of a model with weights of a store, and what became of it.
fn logits(model: &Model, store: &Arc<LoadStore>) -> (Vec<u32>, CacheOutcome) {
    let device = CpuBackend::open(0).unwrap();
    let loading = device.with_packed_store(Arc::clone(store) as Arc<dyn PackedStore>);
    let placement = Placement::on(BackendDispatch::Cpu(loading), model);
    let config = RunnerConfig::single(64);
    let mut session = placement
        .load(model, config, KvDtype::F32, &mut |_, _| ())
        .unwrap();
    let mut kept = store.finish().unwrap();
    kept.finish();
    session
        .prefill(&[5, 9, 2, 77, 31, 8, 3], Readback::Logits)
        .unwrap();
    let bits = session.logits().iter().map(|x| x.to_bits()).collect();
    (bits, kept.outcome().clone())
}

#[test]
fn what_memory_has_no_room_for_is_streamed() {
    // Experts, and weights that two matrices share.
    for name in ["qwen3-moe", "gemma3"] {
        let (model, dir) = (model(name), folder());
        let load = |room| logits(&model, &store(&dir, &model, room));
        let (expected, outcome) = load(Room::InMemory);
        assert!(matches!(outcome, CacheOutcome::Written { .. }), "{name}");
        let file = || store(&dir, &model, Room::InMemory).file.clone().unwrap();
        let whole = file().as_ref().as_ref().to_vec();
        std::fs::remove_dir_all(dir.path()).unwrap();
        let (streamed, outcome) = load(Room::OnDisk);
        assert!(matches!(outcome, CacheOutcome::Streamed { bytes } if bytes > 1000));
        assert_eq!(streamed, expected, "{name}");
        assert!(file().as_ref().as_ref() == whole, "{name}: another file");
        for room in [Room::OnDisk, Room::InMemory] {
            let found = load(room);
            assert_eq!(found, (expected.clone(), CacheOutcome::Hit), "{name}");
        }
    }
}

/// The first start computes, whatever the disk has room for.
#[test]
fn without_room_on_the_disk_weights_stay_in_memory() {
    let (model, dir) = (model("qwen3-moe"), folder());
    let (expected, _) = logits(&model, &store(&dir, &model, Room::InMemory));
    std::fs::remove_dir_all(dir.path()).unwrap();
    let limited = store_below(1000, &dir, &model, Room::OnDisk);
    let reason = limited.why_not_streamed().unwrap();
    assert!(reason.contains("the cache may hold 1000"), "{reason}");
    let expected = (expected, CacheOutcome::Skipped(reason));
    assert_eq!(logits(&model, &limited), expected);
}

/// Two that pack the same at once would take the memory of both.
#[test]
fn a_second_load_waits_for_the_first() {
    let (model, dir) = (model("qwen3-moe"), folder());
    let first = store(&dir, &model, Room::OnDisk);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| store(&dir, &model, Room::OnDisk));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!second.is_finished());
        let (expected, outcome) = logits(&model, &first);
        assert!(matches!(outcome, CacheOutcome::Streamed { .. }));
        let second = second.join().unwrap();
        assert_eq!(logits(&model, &second), (expected, CacheOutcome::Hit));
    });
}

/// More than was reserved is not written: the rest stays in memory, and no file is left.
#[test]
fn what_exceeds_its_room_is_not_written() {
    let (model, dir) = (model("qwen3-moe"), folder());
    let (expected, _) = logits(&model, &store(&dir, &model, Room::InMemory));
    std::fs::remove_dir_all(dir.path()).unwrap();
    let cache = WeightCache::new(dir.path().join("packed"), Some(1 << 30)).keep_from(0);
    let device = CpuBackend::open(0).unwrap();
    let layout = (device.packed_layout(), device.threads());
    let store = LoadStore::open(&cache, &model, layout, None).unwrap();
    *store.stream() = Stream::ToFile(reserve(&cache, &store.key, 20_000).unwrap());
    let (found, outcome) = logits(&model, &Arc::new(store));
    assert_eq!(found, expected);
    assert!(matches!(outcome, CacheOutcome::Skipped(reason) if reason.contains("the room")));
    assert!(cache.entries().unwrap().is_empty());
}

/// Kilobytes of the files below `folder` that are mapped into this process's memory.
#[cfg(target_os = "linux")]
fn mapped(folder: &Path) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let name = folder.canonicalize().ok()?;
    let (mut own, mut sum) = (false, None);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next()? {
            "Rss:" if own => *sum.get_or_insert(0) += words.next()?.parse::<u64>().ok()?,
            first if !first.ends_with(':') => own = line.contains(name.to_str()?),
            _ => {}
        }
    }
    sum
}

/// Decode reads the experts that its token is sent to, and no others.
#[cfg(target_os = "linux")]
#[test]
fn experts_stay_on_the_disk_until_they_are_used() {
    const EXPERTS: usize = 16;
    let (device, dir) = (CpuBackend::open(0).unwrap(), folder());
    let store = store(&dir, &model("qwen3-moe"), Room::OnDisk);
    *store.stream() = Stream::InMemory;
    *store.stream() = Stream::ToFile(reserve(&store.cache, &store.key, 1 << 29).unwrap());
    let loading = device.with_packed_store(Arc::clone(&store) as Arc<dyn PackedStore>);
    let shape = ExpertShape {
        experts: EXPERTS,
        n: 2048,
        k: 2048,
    };
    let ty = GgufQuantType::Q8_0;
    let stack = ty.bytes_for(EXPERTS * shape.n * shape.k).unwrap();
    let experts = loading
        .load_quant_experts(&vec![1; stack], ty, shape)
        .unwrap();
    let Some(before) = mapped(dir.path()) else {
        skip("the system tells of no mappings");
        return;
    };
    assert_eq!(before, 0);
    let routes = RouteShape::softmax(1, EXPERTS, 2);
    let mut routing = MoeRouting::alloc(&device, 1, EXPERTS, 2).unwrap();
    let scores: Vec<f32> = (0..EXPERTS).map(|i| (i * 7 % EXPERTS) as f32).collect();
    let scores = device.from_slice(&scores).unwrap();
    let x = device.from_slice(&vec![1.0f32; shape.k]).unwrap();
    let mut out = device.alloc::<f32>(2 * shape.n).unwrap();
    let mut ctx = device.new_context().unwrap();
    CpuBackend::route_topk(&mut ctx, &scores, None, &mut routing, routes).unwrap();
    CpuBackend::compute_ids_tpe(&mut ctx, &mut routing, routes).unwrap();
    let (tokens, top_k) = (1, 2);
    let moe = MoeShape {
        tokens,
        top_k,
        experts: shape,
    };
    let projection = ExpertProjection::new(&experts);
    CpuBackend::moe_gemm(
        &mut ctx,
        &x,
        ExpertInput::PerToken,
        projection,
        &routing,
        &mut out,
        moe,
    )
    .unwrap();
    CpuBackend::sync(&mut ctx).unwrap();
    // The system maps pages beside those that are touched, up to 2 MiB at both ends.
    let read = mapped(dir.path()).unwrap_or(0) << 10;
    let one = (stack / EXPERTS) as u64;
    assert!(read >= 2 * one, "{read} bytes of {stack}");
    assert!(read <= 2 * (one + (4 << 20)), "{read} bytes of {stack}");
}

fn entry(description: u8) -> PackedEntry {
    PackedEntry {
        description: vec![description],
        panels: Vec::new(),
    }
}

/// Else the file would be written with it, and the weight packed, at each start.
#[test]
fn an_entry_that_could_not_be_used_is_replaced() {
    let names = [b"a", b"b"].map(|name| entry_name(name));
    let mut loaded = Loaded::default();
    // Both were found; one was refused, and packed.
    loaded.add(names[0], entry(1), false);
    loaded.add(names[1], entry(2), false);
    assert!(!loaded.packed);
    loaded.add(names[0], entry(3), true);
    // Tied weights are found twice.
    loaded.add(names[1], entry(2), false);
    assert!(loaded.packed);
    let kept: Vec<_> = loaded
        .entries
        .iter()
        .map(|(_, entry)| entry.description[0])
        .collect();
    assert_eq!(kept, [3, 2]);
}
