//! Weights that a store gives back: the same bits, and never what does not fit.

use super::quant::{Case, INPUTS};
use super::*;
use crate::cpu::{CpuBuffer, CpuExperts, PackedEntry, PackedKey, PackedStore, SharedBytes};
use ferrum_simd::moe::Matrices;
use ferrum_types::{GgufQuantType, SrcDtype};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// A store in memory.
#[derive(Default)]
struct Memory {
    kept: Mutex<HashMap<PackedKey, PackedEntry>>,
    /// Whether weights are computed with where they are kept from the first load.
    moves: bool,
    hits: AtomicUsize,
    packed: AtomicUsize,
}

impl PackedStore for Memory {
    fn get(&self, key: &PackedKey) -> Option<PackedEntry> {
        let found = self.kept.lock().unwrap().get(key).cloned();
        self.hits
            .fetch_add(found.is_some().into(), Ordering::Relaxed);
        found
    }

    fn put(&self, key: PackedKey, mut entry: PackedEntry) -> Option<PackedEntry> {
        let mut all = Vec::new();
        for panels in &entry.panels {
            all.extend(panels.as_slice());
            all.resize(all.len().next_multiple_of(64), 0);
        }
        entry.panels = vec![CpuBuffer::copy_of(&all).unwrap().into()];
        let moved = self.moves.then(|| entry.clone());
        self.kept.lock().unwrap().insert(key, entry);
        self.packed.fetch_add(1, Ordering::Relaxed);
        moved
    }
}

impl Memory {
    /// How many weights were found and how many packed since the last call.
    fn counts(&self) -> (usize, usize) {
        let take = |count: &AtomicUsize| count.swap(0, Ordering::Relaxed);
        (take(&self.hits), take(&self.packed))
    }

    /// A number that stands for all that is kept, in the order of the keys.
    fn hash(&self) -> u64 {
        let kept = self.kept.lock().unwrap();
        let mut all: Vec<_> = kept.iter().collect();
        all.sort_by_key(|(key, _)| key.as_bytes());
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for (_, entry) in all {
            let panels = entry.panels.iter().flat_map(|p| p.as_slice());
            for byte in entry.description.iter().chain(panels) {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
            }
        }
        hash
    }
}

fn cases() -> Vec<Case> {
    let types = GgufQuantType::all().filter(|ty| CpuBackend::is_native(*ty));
    let mut cases: Vec<_> = types.map(Case::blocks).collect();
    for (bits, group) in [(2, 32), (3, 128), (4, 32), (4, 128), (8, 64)] {
        cases.push(Case::groups(bits, group, true));
        cases.push(Case::groups(bits, group, false));
    }
    cases.push(Case::float8([1, INPUTS]));
    cases.push(Case::float8([128, 128]));
    // Another type than those that are packed, in f32.
    cases.push(Case::blocks(GgufQuantType::IQ2_XXS));
    cases
}

#[test]
fn restored_weights_have_the_bits_of_packed_ones() {
    for (device, moves) in devices()
        .into_iter()
        .flat_map(|d| [(d.clone(), false), (d, true)])
    {
        let store = Arc::new(Memory {
            moves,
            ..Memory::default()
        });
        let keeping = device.with_packed_store(Arc::clone(&store) as Arc<dyn PackedStore>);
        for case in cases() {
            let load = |device: &CpuBackend| device.load_layers_fused(&[case.weights()], INPUTS);
            let plain = case.product(&device, &load(&device).unwrap(), (0, 3));
            let packed = load(&keeping).unwrap();
            assert_eq!(store.counts(), (0, 1), "{}", case.name);
            let restored = load(&keeping).unwrap();
            assert_eq!(store.counts(), (1, 0), "{}", case.name);
            for weight in [packed, restored] {
                let found = case.product(&device, &weight, (0, 3));
                assert_eq!(bits(&found), bits(&plain), "{}, {device:?}", case.name);
            }
        }
    }
}

/// A matrix of floats, `[33, 6]`, and what it makes of a row.
fn dense(device: &CpuBackend, dtype: SrcDtype) -> Vec<f32> {
    let (n, k) = (33, 6);
    let bytes: Vec<u8> = (0..n * k * dtype.size())
        .map(|i| (i * 7 % 60) as u8)
        .collect();
    let part = WeightPart::new(&bytes, dtype, n);
    let weight = device.from_weight_parts(&[part], k).unwrap();
    let mut ctx = device.new_context().unwrap();
    let x = act(device, &[0.5, 1.0, -2.0, 0.25, 3.0, 1.0]);
    let mut out = poison(device, n);
    let shape = GemmShape { rows: 1, n, k };
    CpuBackend::gemm(&mut ctx, &x, &weight, &mut out, shape).unwrap();
    host::<CpuBackend, _>(&mut ctx, &out)
}

/// Experts of blocks, of layers and of floats, in panels.
fn experts(device: &CpuBackend) -> Vec<Vec<u8>> {
    let shape = ExpertShape {
        experts: 3,
        n: 5,
        k: 32,
    };
    let bytes: Vec<u8> = (0..3 * 5 * 34).map(|i| (i * 5 % 120) as u8).collect();
    let ty = GgufQuantType::Q8_0;
    let blocks = device.load_quant_experts(&bytes, ty, shape).unwrap();
    let layers: Vec<_> = bytes
        .chunks(5 * 34)
        .map(|bytes| QuantWeights::Gguf(GgufRows::new(bytes, ty, 5)))
        .collect();
    let layers = device.load_layer_experts(&layers, 32).unwrap();
    let floats: Vec<u8> = (0..3 * 5 * 32 * 4).map(|i| (i % 63) as u8).collect();
    let parts = floats
        .chunks(5 * 32 * 4)
        .map(|bytes| WeightPart::new(bytes, SrcDtype::F32, 5));
    let floats = device.load_expert_parts(&parts.collect::<Vec<_>>(), 32);
    let panels = |experts: CpuExperts| match experts.matrices() {
        Matrices::Dense(all) => all.iter().flat_map(|m| m.bytes().to_vec()).collect(),
        Matrices::Packed(all) => all.iter().flat_map(|m| m.bytes().to_vec()).collect(),
    };
    [blocks, layers, floats.unwrap()].map(panels).into()
}

#[test]
fn floats_and_experts_are_restored() {
    for device in devices().into_iter().chain(rounding_devices()) {
        let store = Arc::new(Memory {
            moves: true,
            ..Memory::default()
        });
        let keeping = device.with_packed_store(Arc::clone(&store) as Arc<dyn PackedStore>);
        for dtype in [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16] {
            let plain = dense(&device, dtype);
            assert_eq!(bits(&dense(&keeping, dtype)), bits(&plain));
            assert_eq!(bits(&dense(&keeping, dtype)), bits(&plain));
            assert_eq!(store.counts(), (1, 1));
        }
        let packed = experts(&keeping);
        assert_eq!(store.counts(), (0, 3));
        assert_eq!(experts(&keeping), packed);
        assert_eq!(store.counts(), (3, 0));
        let plain = keeping.without_packed_store();
        assert_eq!(experts(&plain), packed);
        assert_eq!(store.counts(), (0, 0));
    }
}

#[test]
fn what_does_not_fit_is_packed_anew() {
    let device = CpuBackend::open(0).unwrap();
    let store = Arc::new(Memory::default());
    let keeping = device.with_packed_store(Arc::clone(&store) as Arc<dyn PackedStore>);
    let case = Case::blocks(GgufQuantType::Q4_K);
    let load = || {
        keeping
            .load_layers_fused(&[case.weights()], INPUTS)
            .unwrap()
    };
    load();
    let whole: Vec<_> = store.kept.lock().unwrap().drain().collect();
    let [(key, entry)] = &whole[..] else {
        panic!("one weight was packed");
    };
    let set = |entry: PackedEntry| {
        store.kept.lock().unwrap().insert(key.clone(), entry);
        store.counts();
    };
    let packed_anew = || {
        load();
        store.counts().1 == 1
    };
    // Shapes, form and number of parts have to agree with the panels; what does not is refused.
    for at in 0..entry.description.len() {
        for bit in 0..8 {
            let mut changed = entry.clone();
            changed.description[at] ^= 1 << bit;
            set(changed);
            load();
        }
        let mut short = entry.clone();
        short.description.truncate(at);
        set(short);
        assert!(packed_anew(), "{at} bytes of a description");
    }
    let panels = &entry.panels[0];
    let len = panels.as_slice().len();
    for range in [0..len - 1, 0..len - 64, 1..len, 0..0] {
        let mut changed = entry.clone();
        changed.panels = vec![panels.part(range.clone()).unwrap()];
        set(changed);
        assert!(packed_anew(), "{range:?} of the panels");
    }
    let longer = CpuBuffer::<u8>::zeroed(len + 64).unwrap();
    let not_aligned = SharedBytes::from(longer).part(1..len + 1).unwrap();
    for panels in [vec![], vec![panels.clone(); 2], vec![not_aligned]] {
        let mut changed = entry.clone();
        changed.panels = panels;
        set(changed);
        assert!(packed_anew());
    }
    set(entry.clone());
    assert!(!packed_anew(), "the entry as it was");
}

#[test]
fn another_level_does_not_take_them() {
    let rounding = CpuBackend::with_level(Level::base_bf16(), 1).unwrap();
    let config = CpuConfig {
        threads: Some(1),
        isa: Some(Isa::BASE),
    };
    let exact = CpuBackend::with_config(config).unwrap();
    assert_ne!(rounding.packed_layout(), exact.packed_layout());
    let store = Arc::new(Memory::default());
    let keeping =
        |device: &CpuBackend| device.with_packed_store(Arc::clone(&store) as Arc<dyn PackedStore>);
    dense(&keeping(&rounding), SrcDtype::BF16);
    assert_eq!(store.counts(), (0, 1));
    let found = dense(&keeping(&exact), SrcDtype::BF16);
    assert_eq!(store.counts(), (1, 1), "what was found was refused");
    assert_eq!(bits(&found), bits(&dense(&exact, SrcDtype::BF16)));
}

/// Weights that were kept by one version of the program are taken by the next. A failure here means that
/// `LAYOUT` in `packed_store.rs` has to be another; then this number, too.
#[test]
fn the_layout_has_its_version() {
    let config = CpuConfig {
        threads: Some(1),
        isa: Some(Isa::BASE),
    };
    let devices = [
        CpuBackend::with_config(config).unwrap(),
        CpuBackend::with_level(Level::base_bf16(), 1).unwrap(),
    ];
    let found = devices.map(|device| {
        let store = Arc::new(Memory::default());
        let keeping = device.with_packed_store(Arc::clone(&store) as Arc<dyn PackedStore>);
        for case in cases() {
            keeping
                .load_layers_fused(&[case.weights()], INPUTS)
                .unwrap();
        }
        for dtype in [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16] {
            dense(&keeping, dtype);
        }
        experts(&keeping);
        format!("{} {:016x}", device.packed_layout(), store.hash())
    });
    assert_eq!(
        found,
        ["1-00 37c9687fa9e55dbf", "1-00-bf16 2a1b92f3e187242c"]
    );
}
