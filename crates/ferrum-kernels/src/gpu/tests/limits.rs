//! Weights beyond the limit for a binding, and grids beyond one dimension.

use super::{gpu, noise, open_with};
use crate::backend::*;
use crate::gpu::{GpuBackend, GpuConfig};
use ferrum_types::{Error, SrcDtype};
use half::f16;

type B = GpuBackend;

/// Product and look-up of a table `[vocab, dim]` in f16.
fn table_ops(device: &GpuBackend, vocab: usize, dim: usize) -> (Vec<f32>, usize) {
    let mut ctx = device.new_context().expect("context");
    let bytes: Vec<u8> = noise(1, vocab * dim)
        .iter()
        .flat_map(|x| f16::from_f32(*x).to_le_bytes())
        .collect();
    let shape = MatShape {
        rows: vocab,
        cols: dim,
    };
    let table = device
        .from_weight_bytes(&bytes, SrcDtype::F16, shape)
        .expect("table");
    let ids: Vec<i32> = vec![0, vocab as i32 - 1, -1, vocab as i32, 9, 10, 11, 12];
    let ids_on = device.from_slice(&ids).expect("ids");
    let mut rows = device
        .from_slice(&vec![f32::NAN; ids.len() * dim])
        .expect("rows");
    let looked_up = RowShape {
        rows: ids.len(),
        dim,
    };
    B::embedding_lookup(&mut ctx, &table, &ids_on, &mut rows, looked_up).expect("lookup");
    let mut logits = device
        .from_slice(&vec![f32::NAN; ids.len() * vocab])
        .expect("logits");
    let gemm = GemmShape {
        rows: ids.len(),
        n: vocab,
        k: dim,
    };
    B::gemm(&mut ctx, &rows, &table, &mut logits, gemm).expect("gemm");
    let mut all = B::to_vec(&mut ctx, &rows).expect("rows");
    all.extend(B::to_vec(&mut ctx, &logits).expect("logits"));
    (all, table.slabs.len())
}

#[test]
fn a_weight_may_be_larger_than_a_binding() {
    let config = GpuConfig {
        max_binding_bytes: Some(8 << 10),
        ..GpuConfig::default()
    };
    let (Some(whole), Some(small)) = (gpu(), open_with(config)) else {
        return;
    };
    // Rows of 33 elements are padded to 36, 72 bytes: 113 of them in 8 KiB.
    let (expected, slabs) = table_ops(whole, 250, 33);
    assert_eq!(slabs, 1);
    let (found, slabs) = table_ops(&small, 250, 33);
    assert_eq!(slabs, 3);
    assert!(expected.iter().all(|x| x.is_finite()));
    assert_eq!(found, expected);
}

#[test]
fn too_much_is_out_of_memory() {
    let config = GpuConfig {
        max_binding_bytes: Some(1 << 10),
        ..GpuConfig::default()
    };
    let Some(small) = open_with(config) else {
        return;
    };
    let out_of_memory = |e| matches!(e, Some(Error::OutOfMemory { .. }));
    assert!(small.alloc::<f32>(256).is_ok());
    assert!(out_of_memory(small.alloc::<f32>(257).err()));
    assert!(out_of_memory(small.from_slice(&[0u8; 1025]).err()));
    assert!(out_of_memory(small.alloc::<f32>(usize::MAX / 2).err()));
    let row = vec![0u8; 4 * 300];
    let shape = MatShape { rows: 1, cols: 300 };
    assert!(out_of_memory(
        small.from_weight_bytes(&row, SrcDtype::F32, shape).err()
    ));
    let pool = PagedKvShape {
        blocks: 100,
        block_size: 16,
        kv_heads: 1,
        head_dim: 8,
        value_dim: 8,
        values_in_keys: false,
    };
    let layer: Result<KvLayer<B, KvF32>, _> = small.alloc_kv_layer(pool);
    assert!(out_of_memory(layer.err()));
}

#[test]
fn a_grid_may_need_two_dimensions() {
    let Some(device) = gpu() else { return };
    let mut ctx = device.new_context().expect("context");
    // One workgroup for each row.
    let rows = 70_001;
    let values: Vec<f32> = (0..rows * 2).map(|i| ((i / 2 + i) % 3) as f32).collect();
    let x = device.from_slice(&values).expect("x");
    let mut out = device.from_slice(&vec![-1i32; rows + 5]).expect("out");
    B::argmax_rows(&mut ctx, &x, &mut out, RowShape { rows, dim: 2 }).expect("argmax");
    let out = B::to_vec(&mut ctx, &out).expect("read");
    for (row, pair) in values.chunks(2).enumerate() {
        assert_eq!(out[row], i32::from(pair[1] > pair[0]), "row {row}");
    }
    assert_eq!(out[rows..], [-1; 5]);
}
